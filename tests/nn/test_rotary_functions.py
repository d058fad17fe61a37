"""Functions of transformers that rotate queries and keys, which fused models run as one op."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from rotary_models import DTYPES, REPLACED, build, call, keep, modern_bert, words
from torch import Tensor

import trifuse
from trifuse.backends import _C
from trifuse.ops import rotary
from trifuse.recipes import rotary_functions

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(_C is None, reason="no C++ extension")


@pytest.fixture
def served(monkeypatch) -> list[bool]:
    """Whether the kernel served each rotation of queries or of keys."""
    seen: list[bool] = []
    rotate = rotary.rotate

    def spy(*args: Any, **options: Any) -> Tensor | None:
        out = rotate(*args, **options)
        seen.append(out is not None)
        return out

    monkeypatch.setattr(rotary, "rotate", spy)
    return seen


def function_of(family: str, name: str = "apply_rotary_pos_emb") -> Any:
    module = f"transformers.models.{family}.modeling_{family}"
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {family}, or none of this kind")


# Families whose copies of the function differ: more features than cosines, and dtypes
FUNCTIONS = [
    ("llama", "apply_rotary_pos_emb"),
    ("modernbert", "apply_rotary_pos_emb"),
    ("olmo2", "apply_rotary_pos_emb"),
    ("gpt_neox", "apply_rotary_pos_emb"),
    ("phi3", "apply_rotary_pos_emb"),
    ("nemotron", "apply_rotary_pos_emb"),
    ("qwen2_vl", "apply_rotary_pos_emb_vision"),
    ("gemma4", "apply_rotary_pos_emb"),
    ("glm", "apply_rotary_pos_emb"),
    ("helium", "apply_rotary_pos_emb"),
    ("gptj", "apply_rotary_pos_emb"),
    ("ernie4_5", "apply_rotary_pos_emb"),
    ("cohere", "apply_rotary_pos_emb"),
    ("gpt_oss", "apply_rotary_pos_emb"),
    ("openai_privacy_filter", "apply_rotary_pos_emb"),
    ("dinov3_vit", "apply_rotary_pos_emb"),
]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("family", "name"), FUNCTIONS, ids=lambda each: each)
def test_the_bits_of_every_function(served, family, name, dtype):
    function = function_of(family, name)
    known = rotary_functions.rotation_of(function)
    if known is None and transformers.__version__ < "5":
        pytest.skip("this transformers has another function")
    assert known is not None
    torch.manual_seed(0)
    vision = known.unsqueeze_dim == -2
    tensors = []
    for heads in (6, 2)[: known.tensors]:
        x = torch.randn(2, 7, heads, 16).to(dtype)
        tensors.append(x[0] if vision else x if known.unsqueeze_dim == 2 else x.transpose(1, 2))
    R = 8 if known.partial or not known.repeated else 16
    for of_positions in {dtype, torch.float32}:
        positions = (5,) if known.last else (7,) if vision else (2, 7)
        cos, sin = torch.randn(2, *positions, R).to(of_positions)
        actual = rotary_functions.rotate(function, *tensors, cos, sin)
        expected = function(*tensors, cos, sin)
        if known.tensors == 1:
            actual, expected = (actual,), (expected,)
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e)
            assert a.dtype == e.dtype
    exactly = dtype != torch.float64 or not known.in_float32
    assert served.count(True) >= known.tensors * exactly


def gradients(model: Any, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    out = call(model, ids, mask=mask)
    if mask is not None:
        out = out * mask[..., None]
    weights = [p for p in model.parameters() if p.dim() == 2]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out, list(torch.autograd.grad(out, weights, upstream))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "ModernBert"])
@pytest.mark.parametrize("padded", [False, True])
def test_models(served, name, padded):
    encoder = name == "ModernBert"
    if encoder and transformers.__version__ < "5":
        pytest.skip("its functions of attention rotate there, rather than a module's methods")
    model = modern_bert(torch.float32) if encoder else build(name, fused=False)
    layers = model.config.num_hidden_layers
    ids, mask = words(3, 12), keep(3, 12) if padded else None
    exact = gradients(copy.deepcopy(model).double(), ids, mask)
    theirs = gradients(model, ids, mask)
    assert not served
    trifuse.fuse(model)
    ours = gradients(model, ids, mask)
    assert served == [True] * 2 * layers
    for a, t, e in zip(
        (ours[0], *ours[1]), (theirs[0], *theirs[1]), (exact[0], *exact[1]), strict=True
    ):
        scale = e.abs().max()
        allowed = 2 * (t - e).abs().max() + 1e-6 * scale
        assert (a - e).abs().max() <= allowed


def test_a_saved_model_and_a_copy_still_rotate(served):
    model = build("Llama", fused=False)
    trifuse.fuse(model)
    expected = call(model, words(1, 5))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        served.clear()
        assert torch.equal(call(other, words(1, 5)), expected)
        assert served == [True] * 2 * len(model.layers)


def test_after_revert_and_while_compiled_the_function_is_called(served):
    model = build("Llama", fused=False)
    report = trifuse.fuse(model)
    expected = call(model, words(1, 5))
    served.clear()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(call(compiled, words(1, 5)), expected)
    assert not served
    report.revert()
    torch.testing.assert_close(call(model, words(1, 5)), expected)
    assert not served


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half"])
@REPLACED
def test_a_function_that_was_replaced_is_called(served, monkeypatch, name, disguise):
    from transformers.models.llama import modeling_llama

    model = build("Llama", fused=False)
    trifuse.fuse(model)
    before = call(model, words(1, 5))
    real = getattr(modeling_llama, name)
    called: list[str] = []

    def watched(*args: Any, **options: Any) -> Any:
        called.append(name)
        return real(*args, **options)

    served.clear()
    monkeypatch.setattr(modeling_llama, name, disguise(real, watched))
    assert torch.equal(call(model, words(1, 5)), before)
    assert called
    assert not served


def test_autocast(served):
    """Queries are bfloat16 and cosines float32 there, so that torch's result is float32."""
    model = build("Llama", fused=False)
    with torch.autocast("cpu"):
        expected = call(model, words(1, 5))
        trifuse.fuse(model)
        actual = call(model, words(1, 5))
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1)
    assert not any(served)
