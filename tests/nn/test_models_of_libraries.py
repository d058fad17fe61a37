"""Models of timm, torchvision and x-transformers, and nn.Transformer: what of them runs on trifuse.

Each test is skipped where its library isn't installed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewritten import Rewritten
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse


class Calls(TorchDispatchMode):
    """Counts attentions and norms, ours and torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.counts["attention"] += name.startswith("trifuse.attention")
        self.counts["norm"] += name.startswith("trifuse.dropout_add_layer_norm")
        theirs = ("aten._softmax", "aten._scaled_dot_product", "aten._transformer_encoder")
        self.counts["torch's attention"] += name.startswith(theirs)
        self.counts["torch's norm"] += name.startswith(("aten.native_layer_norm", "aten.rsqrt"))
        return func(*args, **(kwargs or {}))


def library(name: str) -> Any:
    """Imports a library; a torchvision built for another torch raises RuntimeError."""
    try:
        return pytest.importorskip(name, exc_type=ImportError)
    except RuntimeError as error:
        pytest.skip(f"{name} does not work here: {error}")


def of_timm(name: str, size: int, **options: Any) -> Callable[[], tuple[nn.Module, Tensor]]:
    def make() -> tuple[nn.Module, Tensor]:
        timm = library("timm")
        model = timm.create_model(name, num_classes=10, img_size=size, **options)
        return model, torch.randn(2, 3, size, size)

    return make


def vit() -> tuple[nn.Module, Tensor]:
    torchvision = library("torchvision")
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64)
    nn.init.normal_(model.heads.head.weight)  # zeros at first
    return model, torch.randn(2, 3, 32, 32)


def swin(second: bool) -> tuple[nn.Module, Tensor]:
    library("torchvision")
    from torchvision.models import swin_transformer as swin

    parts = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    options = parts if second else {}
    model = swin.SwinTransformer([4, 4], 24, [2, 2], [3, 6], [4, 4], num_classes=3, **options)
    return model, torch.randn(2, 3, 64, 64)


def of_x_transformers(
    kind: str = "Decoder", **options: Any
) -> Callable[[], tuple[nn.Module, Tensor]]:
    def make() -> tuple[nn.Module, Tensor]:
        xt = library("x_transformers")
        layers = getattr(xt, kind)(dim=32, depth=2, heads=4, **options)
        model = xt.TransformerWrapper(num_tokens=97, max_seq_len=64, attn_layers=layers)
        return model, torch.randint(0, 97, (2, 20))

    return make


# The model, how many attentions it has, and how many norms.
Make = Callable[[], tuple[nn.Module, Tensor]]
MODELS: dict[str, tuple[Make, int, int]] = {
    "timm ViT": (of_timm("vit_tiny_patch16_224", 64, depth=2), 2, 5),
    "timm DeiT 3": (of_timm("deit3_small_patch16_224", 64, depth=2), 2, 5),
    "timm EVA-02": (of_timm("eva02_tiny_patch14_224", 56, depth=2), 2, 5),
    "timm Swin": (
        of_timm("swin_tiny_patch4_window7_224", 56, depths=(2, 1, 1, 1), window_size=7), 5, 15),
    "torchvision Swin": (lambda: swin(second=False), 4, 11),
    "torchvision Swin V2": (lambda: swin(second=True), 4, 11),
    "x-transformers decoder": (of_x_transformers(), 2, 5),
    "x-transformers encoder": (of_x_transformers("Encoder"), 2, 5),
    "x-transformers flash": (of_x_transformers(attn_flash=True), 2, 5),
    "x-transformers rotary, SwiGLU": (
        of_x_transformers(rotary_pos_emb=True, ff_swish=True, ff_glu=True), 2, 5),
    "x-transformers ALiBi": (of_x_transformers(alibi_pos_bias=True), 2, 5),
    "x-transformers relative bias": (of_x_transformers(rel_pos_bias=True), 2, 5),
    "x-transformers grouped queries": (of_x_transformers(attn_kv_heads=2), 2, 5),
}  # fmt: skip


def build(make: Make) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, given = make()
    return model.eval(), given


def close(got: Tensor, wanted: Tensor) -> None:
    scale = wanted.abs().max().item()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize(("make", "attentions", "norms"), MODELS.values(), ids=MODELS)
def test_attention_in_the_context(make, attentions, norms):
    """All of it becomes ours; forward and gradients."""
    model, given = build(make)
    with torch.no_grad():
        wanted = model(given)
        with Calls() as calls, trifuse.attention():
            close(model(given), wanted)
    assert calls.counts["attention"] == attentions
    assert calls.counts["torch's attention"] == 0
    grads = []
    for context in (trifuse.attention, torch.enable_grad):
        model.zero_grad()
        with context():
            model(given).square().sum().backward()
        grads.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    scale = max(grad.abs().max().item() for grad in grads[1].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize(("make", "attentions", "norms"), MODELS.values(), ids=MODELS)
def test_compiled(make, attentions, norms):
    """All attentions and norms of a traced model become ours, in inference."""
    model, given = build(make)
    with torch.no_grad():
        wanted = model(given)
        ours = Rewritten(model)
        close(ours(given), wanted)
    assert ours.replaced == {"attention": attentions, "norm": norms}
    assert ours.reasons == []


@pytest.mark.parametrize("name", ["timm ViT", "torchvision Swin", "x-transformers decoder"])
def test_fused(name):
    """The same results, and a report that names the attention that it left."""
    model, given = build(MODELS[name][0])
    ours = copy.deepcopy(model)
    report = trifuse.fuse(ours)
    named = [left for left in report.left if "trifuse.attention()" in left.reason]
    assert len(named) == MODELS[name][1]
    with torch.no_grad():
        close(ours(given), model(given))
        with trifuse.attention():
            close(ours(given), model(given))
    report.revert()
    assert [type(m) for m in ours.modules()] == [type(m) for m in model.modules()]


def test_lists_that_hold_none():
    """x-transformers has such lists."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleList([None, nn.Linear(4, 4)]), None, nn.Linear(4, 4)])
    trifuse.fuse(model).revert()


def test_vit_of_torchvision():
    """Its attention is nn.MultiheadAttention, which fuse swaps."""
    model, given = build(vit)
    ours = copy.deepcopy(model)
    trifuse.fuse(ours)
    with torch.no_grad(), Calls() as calls:
        close(ours(given), model(given))
    assert calls.counts["attention"] == 2


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_of_torch(norm_first):
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True, norm_first=norm_first).eval()
    source, target = torch.randn(2, 9, 32), torch.randn(2, 7, 32)
    ours = copy.deepcopy(model)
    trifuse.fuse(ours)
    with torch.no_grad():
        wanted = model(source, target)
        with Calls() as calls:
            close(ours(source, target), wanted)
    assert calls.counts["attention"] == 6
    assert calls.counts["norm"] == 12
    assert calls.counts["torch's attention"] == calls.counts["torch's norm"] == 0
