"""wav2vec2 and HuBERT, with norms after their sublayers and before them ("stable layer norm")."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_gradients import weighted_gradients
from model_sizes import SPEECH_SIZES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

B, L = 3, 64
SOUND = torch.randn(B, L, generator=torch.Generator().manual_seed(1))
KEEP = torch.arange(L) < torch.tensor([L, 40, 20])[:, None]
MASKS = {"whole": torch.ones_like(KEEP), "padded": KEEP}
# A model has 8 norms. Three of them have no sum: those in the convolutions and after them. Where
# norms come first, the first layer's has none either, because it stands after a dropout.
NORMS, WITH_SUMS = 8, {False: 5, True: 4}


def build(name: str, stable: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **SPEECH_SIZES | options, do_stable_layer_norm=stable
    )
    return getattr(transformers, f"{name}Model")(config).eval()


def run(model: Any, keep: Tensor) -> Tensor:
    """The results at real frames, of which there are fewer than samples."""
    out = model(SOUND.clone(), attention_mask=keep.long())[0]
    return out[model._get_feature_vector_attention_mask(out.shape[1], keep.long()).bool()]


def gradients(model: nn.Module, keep: Tensor) -> Tensor:
    return weighted_gradients(model, run(model, keep))


class Norms(TorchDispatchMode):
    """Counts torch's norms and dropouts; trifuse's norms, those with a sum, and its attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs = self.ours = self.with_sums = self.attentions = self.dropouts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.torchs += name.startswith("aten.native_layer_norm")
        self.dropouts += name.startswith(("aten.native_dropout", "aten.bernoulli"))
        self.attentions += name.startswith("trifuse.attention_forward")
        if name.startswith("trifuse.dropout_add_layer_norm_forward"):
            self.ours += 1
            self.with_sums += args[1] is not None
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("unpad", [False, True], ids=["padded", "unpad"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("name", "stable"), [("Wav2Vec2", True), ("Hubert", False)])
def test_results_gradients_and_what_runs_fused(name, stable, kind, unpad):
    model, keep = build(name, stable), MASKS[kind]
    wanted, grads = run(model, keep), gradients(model, keep)
    report = trifuse.fuse(model, unpad=unpad)
    assert not report.norms
    with torch.no_grad(), Norms() as norms:
        got = run(model, keep)
    assert (norms.torchs, norms.ours, norms.attentions) == (0, NORMS, 2)
    assert norms.with_sums == WITH_SUMS[stable]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(gradients(model, keep), grads, rtol=1e-5, atol=5e-6)
    report.revert()
    assert torch.equal(run(model, keep), wanted)


@pytest.mark.parametrize("stable", [False, True])
def test_all_dropouts_are_trifuses_and_depend_on_the_seed(stable):
    model = build("Wav2Vec2", stable, layerdrop=0.0, apply_spec_augment=False).train()
    with Norms() as before:
        run(model, KEEP)
    assert before.dropouts
    trifuse.fuse(model)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with Norms() as after:
            draws.append(gradients(model, KEEP))
        assert not after.dropouts
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_adapters_after_layers():
    """A layer with an adapter ends with another sum, which the next norm takes in."""
    model = build("Wav2Vec2", True, adapter_attn_dim=4)
    wanted, grads = run(model, KEEP), gradients(model, KEEP)
    trifuse.fuse(model)
    with torch.no_grad(), Norms() as norms:
        got = run(model, KEEP)
    assert norms.with_sums == WITH_SUMS[True]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(gradients(model, KEEP), grads, rtol=1e-5, atol=5e-6)
