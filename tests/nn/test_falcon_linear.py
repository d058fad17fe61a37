"""Falcon's linear layer on our product."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import trifuse
from trifuse.ops._linear_choice import is_available

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.falcon.modeling_falcon")

from transformers.models.falcon.modeling_falcon import FalconLinear as Theirs  # noqa: E402

from trifuse.recipes import falcon_linear  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension"),
    pytest.mark.usefixtures("our_product"),
]

DTYPES = [torch.float32, torch.bfloat16]
FREEZE = pytest.mark.parametrize("freeze", [False, True])
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return Theirs(64, 48, bias=bias).to(dtype)


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_it_is_our_linear_layer(dtype, bias, rows, freeze):
    theirs = layer(bias, dtype)
    plain = nn.Linear(64, 48, bias=bias, dtype=dtype)
    plain.load_state_dict(theirs.state_dict())
    ours, x = copy.deepcopy(theirs), torch.randn(rows, 64).to(dtype)
    report = trifuse.fuse(ours, freeze=freeze)
    after = [each.after for each in report.swapped]
    assert after == ["trifuse.recipes.falcon_linear.FalconLinear"]
    kind = falcon_linear.FrozenFalconLinear if freeze else falcon_linear.FalconLinear
    assert type(ours) is kind
    trifuse.fuse(plain, freeze=freeze)
    with torch.no_grad():
        expected = theirs(x)
        assert torch.equal(ours(x), plain(x))
        # Theirs also rounds the product without the bias.
        tolerance = {"rtol": 2**-7, "atol": 2**-8} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(ours(x), expected, **tolerance)
        assert torch.equal(pickle.loads(pickle.dumps(ours))(x), ours(x))
        report.revert()
        assert type(ours) is Theirs
        assert torch.equal(ours(x), expected)


def test_gradients():
    theirs, x = layer(), torch.randn(5, 64, requires_grad=True)
    ours = copy.deepcopy(theirs)
    trifuse.fuse(ours)
    for module in (theirs, ours):
        module(x).square().sum().backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad)


def test_subclasses_and_replaced_forwards_are_left():
    class Own(Theirs):
        pass

    replaced = layer()
    replaced.forward = lambda x: x
    report = trifuse.fuse(nn.Sequential(Own(4, 4), replaced))
    assert [(each.path, each.reason) for each in report.left] == [
        ("0", "a subclass of Linear"),
        ("1", "its forward was replaced on the instance"),
    ]


def test_other_code_is_left(monkeypatch):
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return 2 * (input @ self.weight.T)

    monkeypatch.setattr(Theirs, "forward", forward)
    report = trifuse.fuse(nn.Sequential(layer()))
    assert [each.reason for each in report.left] == ["a subclass of Linear"]
    assert not report.swapped


@FREEZE
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("options", [{}, {"multi_query": False, "bias": True}])
def test_falcon(options, unpad, freeze):
    torch.manual_seed(0)
    config = transformers.FalconConfig(**SIZES, **options, attn_implementation="eager")
    model = transformers.FalconModel(config).eval()
    ids = torch.randint(3, 97, (2, 9))
    keep = torch.arange(9) >= torch.tensor([[0], [3]])
    with torch.no_grad():
        expected = model(ids, attention_mask=keep.long()).last_hidden_state[keep]
        report = trifuse.fuse(model, unpad=unpad, freeze=freeze)
        actual = model(ids, attention_mask=keep.long()).last_hidden_state[keep]
    torch.testing.assert_close(actual, expected)
    swapped = [each for each in report.swapped if each.before.endswith("FalconLinear")]
    assert len(swapped) == 2 * 4
