"""Biases that models pick from tables by an index: Swin's windows, DeBERTa's disentangled terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse.fusing.remains import notes
from trifuse.recipes.disentangled import DisentangledAttention
from trifuse.recipes.window_biases import WindowBias
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


# Windows ------------------------------------------------------------------------------------------

SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "window_size": 4,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "drop_path_rate": 0.0,
}
BEIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "drop_path_rate": 0.0,
}
CLAP = {
    "spec_size": 64,
    "num_mel_bins": 16,
    "patch_size": 4,
    "patch_stride": [4, 4],
    "patch_embeds_hidden_size": 16,
    "hidden_size": 32,
    "window_size": 4,
    "depths": [2, 2],
    "num_attention_heads": [2, 4],
    "hidden_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}
EACH = {"use_relative_position_bias": True}
SHARED = {"use_shared_relative_position_bias": True}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "Swin": ("Swin", SWIN),
    "SwinV2": ("Swinv2", SWIN),
    "SwinV2 from other windows": ("Swinv2", SWIN | {"pretrained_window_sizes": [3, 3]}),
    "Donut": ("DonutSwin", SWIN),
    "MaskFormer": ("MaskFormerSwin", SWIN),
    "Swin2SR": ("Swin2SR", SWIN | {"patch_size": 1}),
    "CLAP": ("ClapAudio", CLAP),
    "BEiT": ("Beit", BEIT | EACH),
    "BEiT, eager": ("Beit", BEIT | EACH | {"attn_implementation": "eager"}),
    "BEiT, one for all layers": ("Beit", BEIT | SHARED),
    "BEiT, both": ("Beit", BEIT | EACH | SHARED),
    "Data2Vec": ("Data2VecVision", BEIT | EACH),
    "Data2Vec, eager": ("Data2VecVision", BEIT | EACH | {"attn_implementation": "eager"}),
    "Data2Vec, one for all layers": ("Data2VecVision", BEIT | SHARED),
    "Data2Vec, both": ("Data2VecVision", BEIT | EACH | SHARED),
    "Data2Vec, both, eager": (
        "Data2VecVision",
        BEIT | EACH | SHARED | {"attn_implementation": "eager"},
    ),
}
# 18 patches by 14 in windows of 4 by 4: these are padded, shifted and masked.
PADDED = 36, 28


def windows(name: str, **options: Any) -> Any:
    """Returns a model in float64, whose biases matter."""
    torch.manual_seed(0)
    family, own = WINDOWS[name]
    config = getattr(transformers, f"{family}Config")(**own | options)
    make = getattr(transformers, f"{family}Model", None)
    model = transformers.AutoModel.from_config(config) if make is None else make(config)
    for weight_name, weight in model.named_parameters():
        if "position_bias_table" in weight_name:
            weight.data.normal_()
    return model.double().eval()


def run_windows(model: Any, size: tuple[int, int] = (32, 32), **options: Any) -> Tensor:
    if model.config.model_type == "clap_audio_model":  # CLAP stretches sounds to one size
        sounds = torch.randn(2, 1, 250, 16, generator=torch.Generator().manual_seed(1))
        out: Tensor = model(sounds.to(model.dtype), **options).last_hidden_state
        return out
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).double()
    return model(images, **options).last_hidden_state


def is_swin(name: str) -> bool:
    return "Swin" in WINDOWS[name][0] or name == "CLAP"


def check_tables(calls: list[dict[str, Any]], count: int) -> None:
    """Every call reads a table, and no mask has a matrix for each head."""
    assert len(calls) == count
    for call in calls:
        H, L = call["query"].shape[1:3]
        assert call["relative_index"].shape == (L, L)
        assert call["relative_bias"].shape[:2] == (1, H)
        assert call["attn_mask"] is None or call["attn_mask"].shape[1] == 1


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name, mode):
    """Results and gradients, and the way back."""
    model = windows(name).train(mode == "training")
    for weight_name, weight in model.named_parameters():
        if "logit_scale" in weight_name:
            weight.data[0] = 9  # which is cut off
    size = PADDED if is_swin(name) else (32, 32)
    wanted = with_gradients(model, lambda m: run_windows(m, size))
    report = trifuse.fuse(model)
    close(with_gradients(model, lambda m: run_windows(m, size)), wanted)
    with torch.inference_mode():
        torch.testing.assert_close(run_windows(model, size), wanted[0])
    calls = calls_of(lambda: run_windows(model, size))
    check_tables(calls, 4 if is_swin(name) else 2)
    if is_swin(name):
        assert any(call["attn_mask"] is not None for call in calls)
    assert not list(notes(model))
    report.revert()
    assert torch.equal(run_windows(model, size), wanted[0])


@pytest.mark.parametrize("name", [name for name in WINDOWS if not is_swin(name)])
def test_tables_of_other_sizes(name):
    """BEiT interpolates its table between the relative positions of larger images."""
    model = windows(name)
    size = 48, 40

    def run(model: Any) -> Tensor:
        return run_windows(model, size, interpolate_pos_encoding=True)

    wanted = with_gradients(model, run)
    trifuse.fuse(model)
    close(with_gradients(model, run), wanted)
    calls = calls_of(lambda: run(model))
    check_tables(calls, 2)
    for call in calls:
        assert call["relative_bias"].shape[2] == 11 * 9 + 3


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="BEiT takes no mask")
@pytest.mark.parametrize("name", [name for name in WINDOWS if "BEiT" in name])
def test_a_mask_beside_a_bias(name):
    """BEiT adds the two. With "sdpa" it adds a boolean mask; ours is that of "eager"."""
    keep = torch.arange(17) < torch.tensor([[17], [9]])
    given = {"attention_mask": keep.long()}
    wanted = run_windows(windows(name, attn_implementation="eager"), **given)[keep]
    model = windows(name, attn_implementation="trifuse")
    torch.testing.assert_close(run_windows(model, **given)[keep], wanted)
    trifuse.fuse(model)
    torch.testing.assert_close(run_windows(model, **given)[keep], wanted)
    check_tables(calls_of(lambda: run_windows(model, **given)), 2)


# Without fuse, BEiT can't train in these with one bias for all layers either.
IN_REENTRANT = ["Swin", "SwinV2", "BEiT", "Data2Vec, one for all layers"]


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        *((name, False) for name in WINDOWS if name != "CLAP"),  # CLAP refuses checkpoints
        *((name, True) for name in IN_REENTRANT),
    ],
)
def test_windows_in_checkpoints(name, reentrant):
    model = windows(name).train()
    wanted = with_gradients(model, run_windows)
    trifuse.fuse(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    close(with_gradients(model, run_windows), wanted)


def test_windows_in_one_graph():
    """Dynamo traces the whole model, whose biases are matrices there."""
    model = windows("Swin", depths=[1], num_heads=[2])
    trifuse.fuse(model)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(images).last_hidden_state
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(images).last_hidden_state, wanted)


@pytest.mark.parametrize("name", ["Swin", "SwinV2", "BEiT", "Data2Vec"])
def test_windows_in_16_bits(name):
    """Autocast, and weights of 16 bits; the results are as near to those in float64 as torch's."""
    exact = windows(name)
    wanted = run_windows(exact)
    results = []
    for fused in (False, True):
        for cast in (False, True):
            model = windows(name).float() if cast else windows(name).bfloat16()
            if fused:
                trifuse.fuse(model)
            images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
            images = images if cast else images.bfloat16()
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=cast)
            with torch.no_grad(), autocast, Calls() as calls:
                results.append(model(images).last_hidden_state)
            if fused:
                check_tables(calls.tensors, 4 if is_swin(name) else 2)
    errors = [(result.double() - wanted).square().mean().sqrt() for result in results]
    for torchs, ours in zip(errors[:2], errors[2:], strict=True):
        assert ours < 1.25 * torchs


@pytest.mark.parametrize("name", ["SwinV2", "Data2Vec, eager"])
def test_weights_of_windows_are_the_source_s(name):
    model = windows(name)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    wanted = model(images, output_attentions=True).attentions
    trifuse.fuse(model)
    got = model(images, output_attentions=True).attentions
    torch.testing.assert_close(got, wanted)


def module_of_biases() -> tuple[Any, tuple[Any, ...]]:
    """Returns a module that makes a bias of windows, and its arguments."""
    model = windows("Data2Vec")
    return model.encoder.layer[0].attention.attention.relative_position_bias, ((4, 4),)


def test_a_bias_of_windows_by_itself():
    """It is a tensor of numbers for all but attention."""
    module, args = module_of_biases()
    wanted = module(*args)
    trifuse.fuse(module)
    assert isinstance(module, WindowBias)
    bias = module(*args)
    assert isinstance(bias, IndexedBias)
    assert bias.shape == wanted.shape
    torch.testing.assert_close(bias + 0.5, wanted + 0.5)
    mask = torch.randn(3, 1, *wanted.shape[2:]).double()
    both = module(*args) + mask
    assert isinstance(both, IndexedBias)
    torch.testing.assert_close(both * 1, wanted + mask)
    torch.testing.assert_close((mask + module(*args)) * 1, wanted + mask)
    assert not isinstance(module(*args) + mask.requires_grad_(), IndexedBias)
    twice = module(*args) + module(*args)
    assert isinstance(twice, IndexedBias)
    torch.testing.assert_close(twice - 0, 2 * wanted)
    changed = module(*args)
    changed += 1
    torch.testing.assert_close(changed, wanted + 1)
    changed = held = module(*args)
    changed += module(*args)
    assert isinstance(changed, IndexedBias)
    torch.testing.assert_close(held + 0.5, 2 * wanted + 0.5)
    torch.testing.assert_close(changed + 0.5, 2 * wanted + 0.5)
    scaled = 16 * torch.sigmoid(module(*args).squeeze(0)).unsqueeze(0)
    assert isinstance(scaled, IndexedBias)
    torch.testing.assert_close(scaled - 0, 16 * wanted.sigmoid())
    cropped = nn.functional.interpolate(module(*args), (3, 3), mode="bilinear")
    torch.testing.assert_close(cropped, nn.functional.interpolate(wanted, (3, 3), mode="bilinear"))


def test_a_bias_of_windows_under_transforms_is_torchs():
    module, args = module_of_biases()
    table = module.relative_position_bias_table.detach()

    def total(table: Tensor) -> Tensor:
        out = torch.func.functional_call(module, {"relative_position_bias_table": table}, args)
        return out.square().sum()

    wanted = torch.func.grad(total)(table)
    trifuse.fuse(module)
    torch.testing.assert_close(torch.func.grad(total)(table), wanted)


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
