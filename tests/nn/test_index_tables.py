"""Biases that models pick from tables by an index: Swin's windows, DeBERTa's disentangled terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse.recipes.disentangled import DisentangledAttention
from trifuse.recipes.own_biases import WindowBias
from trifuse.written_out import IndexedBias

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

DEBERTA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "relative_attention": True,
    "position_buckets": 8,
    "max_relative_positions": 16,
}
L = 30
KEEP = torch.arange(L) < torch.tensor([L, 20, 7])[:, None]


class Calls(TorchDispatchMode):
    """Records the tensors of each call of the operator, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("trifuse.attention_forward"):
            names = [argument.name for argument in func._schema.arguments]
            self.tensors.append(dict(zip(names, args, strict=False)))
        return func(*args, **(kwargs or {}))


def calls_of(function: Any) -> list[dict[str, Any]]:
    with Calls() as calls:
        function()
    return calls.tensors


def with_gradients(model: nn.Module, run: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = run(model)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close(got: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert got[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        size = max(float(grad.abs().max()), 1e-2)
        torch.testing.assert_close(got[1][name], grad, rtol=1e-4, atol=1e-5 * size, msg=name)


# Swin ---------------------------------------------------------------------------------------------


def swin() -> Any:
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4}
    config = transformers.SwinConfig(depths=[2, 2], num_heads=[2, 4], **sizes)
    model = transformers.SwinModel(config).eval()
    for name, weight in model.named_parameters():
        if "relative_position_bias_table" in name:
            weight.data.normal_()  # so that it matters
    return model


def run_swin(model: Any) -> Tensor:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    out: Tensor = model(images).last_hidden_state
    return out


HAS_MODULE = hasattr(transformers.models.swin.modeling_swin, "SwinRelativePositionBias")


@pytest.mark.skipif(not HAS_MODULE, reason="Swin makes its bias inside of its attention")
def test_swin_s_windows():
    """Results and gradients; every call reads a table, beside the masks of shifted windows."""
    model = swin()
    wanted = with_gradients(model, run_swin)
    report = trifuse.fuse(model)
    assert sum(isinstance(module, WindowBias) for module in model.modules()) == 4
    close(with_gradients(model, run_swin), wanted)
    calls = calls_of(lambda: run_swin(model))
    assert len(calls) == 4
    for call in calls:
        assert call["relative_index"].shape == (16, 16)
        assert call["relative_bias"].shape[1:] == (call["query"].shape[1], 49)
        # No mask has a matrix for each head.
        assert call["attn_mask"] is None or call["attn_mask"].shape[1] == 1
    assert any(call["attn_mask"] is not None for call in calls)
    report.revert()
    assert torch.equal(run_swin(model), wanted[0])


@pytest.mark.skipif(not HAS_MODULE, reason="Swin makes its bias inside of its attention")
def test_swin_s_bias_by_itself():
    """It is a tensor of numbers for all but attention."""
    model = swin()
    module = next(m for n, m in model.named_modules() if n.endswith("relative_position_bias"))
    wanted = module()
    trifuse.fuse(model)
    bias = module()
    assert isinstance(bias, IndexedBias)
    assert bias.shape == wanted.shape
    torch.testing.assert_close(bias * 1, wanted)
    mask = torch.randn(3, 1, *wanted.shape[2:])
    both = module() + mask
    assert isinstance(both, IndexedBias)
    torch.testing.assert_close(both * 1, wanted + mask)
    torch.testing.assert_close((mask + module()) * 1, wanted + mask)
    assert not isinstance(module() + mask.requires_grad_(), IndexedBias)


# DeBERTa ------------------------------------------------------------------------------------------


def deberta(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**DEBERTA | {"pos_att_type": ["c2p", "p2c"]} | options)
    return transformers.DebertaV2Model(config).eval()


def run_deberta(model: Any) -> Tensor:
    ids = torch.randint(5, 97, KEEP.shape, generator=torch.Generator().manual_seed(1))
    out: Tensor = model(ids, attention_mask=KEEP.long()).last_hidden_state
    return out[KEEP]


OPTIONS: dict[str, dict[str, Any]] = {
    "both": {},
    "both, one projection": {"share_att_key": True},
    "content to position": {"pos_att_type": ["c2p"]},
    "position to content": {"pos_att_type": ["p2c"]},
    "no buckets": {"position_buckets": -1},
}


@pytest.mark.parametrize("unpad", [False, True], ids=["padded", "unpad"])
@pytest.mark.parametrize("options", OPTIONS)
def test_disentangled_terms(options, unpad):
    """Results and gradients; every call reads tables, and no mask has a matrix for each head."""
    model = deberta(**OPTIONS[options])
    wanted = with_gradients(model, run_deberta)
    report = trifuse.fuse(model, unpad=unpad)
    close(with_gradients(model, run_deberta), wanted)
    calls = calls_of(lambda: run_deberta(model))
    assert len(calls) == 2
    kinds = OPTIONS[options].get("pos_att_type", ["c2p", "p2c"])
    for call in calls:
        assert call["relative_index"].dim() == 1
        assert (call["query_bias"] is not None) == ("c2p" in kinds)
        assert (call["key_bias"] is not None) == ("p2c" in kinds)
        assert call["attn_mask"] is None or call["attn_mask"].shape[1] == 1
    report.revert()
    assert torch.equal(run_deberta(model), wanted[0])


@pytest.mark.parametrize("own", ["not antisymmetric", "not of distances"])
def test_relative_positions_of_the_callers_own(own):
    """Where a pair has another index in each term, the attention's own method makes them."""
    model = deberta()
    attention = model.encoder.layer[0].attention.self
    hidden, embeddings = torch.randn(2, L, 32), model.encoder.get_rel_embedding()
    places = torch.arange(L)
    if own == "not of distances":
        places = places**2
    buckets = (places[:, None] - places).clamp(-3, 3)[None]
    if own == "not antisymmetric":
        buckets = buckets.abs()
    mask = torch.ones(2, 1, L, L, dtype=torch.bool)

    def run() -> Tensor:
        out: Tensor = attention(hidden, mask, relative_pos=buckets, rel_embeddings=embeddings)[0]
        return out

    wanted = run()
    trifuse.fuse(model)
    assert isinstance(attention, DisentangledAttention)
    torch.testing.assert_close(run(), wanted, rtol=1e-5, atol=1e-5)
    assert all(call["relative_index"] is None for call in calls_of(run))


def test_disentangled_weights_are_the_source_s():
    model = deberta()
    ids = torch.randint(5, 97, (2, L))
    wanted = model(ids, output_attentions=True).attentions
    trifuse.fuse(model)
    got = model(ids, output_attentions=True).attentions
    torch.testing.assert_close(got, wanted)


def test_a_replaced_method_of_terms(monkeypatch):
    model = deberta()
    attention = model.encoder.layer[0].attention.self
    trifuse.fuse(model)
    before = run_deberta(model)
    own = attention.disentangled_attention_bias
    monkeypatch.setattr(attention, "disentangled_attention_bias", lambda *args: own(*args) * 9)
    assert not torch.allclose(run_deberta(model), before, rtol=1e-2)
    monkeypatch.undo()
    torch.testing.assert_close(run_deberta(model), before)
