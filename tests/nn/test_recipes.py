"""Families of transformers, fused by their code: results, gradients, and the norms that remain."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from model_sizes import DISTILBERT_SIZES, GROUPED_QUERIES, PADDED_SIZES, SIZES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

B, L = 3, 10
GROUPED = SIZES | GROUPED_QUERIES | {"pad_token_id": 0}
EMBEDDED = PADDED_SIZES | {"embedding_size": 16}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

# By model: its configuration, the norms that the recipes fuse, and those that stay torch's: that
# of embeddings whose sum broadcasts, and those at the beginning of a layer or at the model's end.
FAMILIES: dict[str, tuple[dict[str, Any], int, int]] = {
    "Roberta": (PADDED_SIZES, 5, 0),
    "XLMRoberta": (PADDED_SIZES, 5, 0),
    "Camembert": (PADDED_SIZES, 5, 0),
    "Electra": (EMBEDDED, 4, 1),
    "Ernie": (PADDED_SIZES, 4, 1),
    "LayoutLM": (PADDED_SIZES, 5, 0),
    "MPNet": (PADDED_SIZES, 5, 0),
    "DistilBert": (DISTILBERT_SIZES, 4, 1),
    "Albert": (EMBEDDED, 4, 1),
    "Llama": (GROUPED, 5, 0),
    "Mistral": (GROUPED, 5, 0),
    "Qwen2": (GROUPED, 5, 0),
    "Qwen3": (GROUPED | {"head_dim": 8}, 9, 0),
    "GPT2": (GPT, 2, 3),
    "CLIPText": (PADDED_SIZES | {"eos_token_id": 2}, 2, 3),
}
LENGTHS = torch.tensor([L, 6, 3])[:, None]
MASKS = {
    "whole": torch.ones(B, L, dtype=torch.int64),
    "padded right": (torch.arange(L) < LENGTHS).long(),
    "padded left": (torch.arange(L) < LENGTHS).flip(1).long(),
}


def build(name: str) -> nn.Module:
    options, _, _ = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}Model")(config).eval()


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    for name in vars(model.config):
        if "dropout" in name or "pdrop" in name:
            setattr(model.config, name, 0.0)


def run(model: nn.Module, mask: Tensor) -> Tensor:
    ids = torch.randint(3, 97, (B, L), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, attention_mask=mask)[0][mask.bool()]


def gradients(model: nn.Module, mask: Tensor) -> Tensor:
    model.zero_grad()
    out = run(model, mask)
    # Weighted, since the sum of a norm's squares has almost no gradient.
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return grads / grads.abs().max()


class Norms(TorchDispatchMode):
    """Counts torch's norms, or their parts, and trifuse's."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs = self.ours = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.torchs += name.startswith(("aten.native_layer_norm", "aten.rsqrt"))
        self.ours += name.startswith("trifuse.dropout_add_layer_norm")
        return func(*args, **(kwargs or {}))


def count(model: nn.Module) -> tuple[int, int]:
    with torch.no_grad(), Norms() as norms:
        run(model, MASKS["whole"])
    return norms.ours, norms.torchs


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name):
    model = build(name)
    classes = [type(module) for module in model.modules()]
    _, ours, torchs = FAMILIES[name]
    assert count(model) == (0, ours + torchs)
    wanted = {kind: run(model, mask) for kind, mask in MASKS.items()}
    report = trifuse.fuse(model)
    assert count(model) == (ours, torchs)
    for kind, mask in MASKS.items():
        torch.testing.assert_close(run(model, mask), wanted[kind], rtol=1e-5, atol=5e-6)
    assert not trifuse.fuse(model).swapped
    twin, its_report = pickle.loads(pickle.dumps((model, report)))
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    its_report.revert()
    report.revert()
    for each in (model, twin):
        assert [type(module) for module in each.modules()] == classes
        assert torch.equal(run(each, MASKS["padded right"]), wanted["padded right"])


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_in_training(name):
    model, mask = build(name).train(), MASKS["padded right"]
    without_dropout(model)
    wanted = gradients(model, mask)
    trifuse.fuse(model)
    torch.testing.assert_close(gradients(model, mask), wanted, rtol=1e-5, atol=5e-6)


class Tail(nn.Module):
    """The end of a sublayer, with submodules of the names that recipes use for their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(8)
        self.norms, self.source, self.roles = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, residual):
        x = self.layer_norm(x + residual)
        return self.norms(self.source(self.roles(x)))


def test_names_that_recipes_use(monkeypatch):
    monkeypatch.setattr(Tail, "__module__", "transformers_modules.remote")
    torch.manual_seed(0)
    model, x = Tail(), torch.randn(3, 8)
    wanted = model(x, x + 1)
    assert trifuse.fuse(model).swapped
    torch.testing.assert_close(model(x, x + 1), wanted)
    assert type(model).__module__ == "trifuse.recipes"


def test_a_hooked_norm_is_called():
    model, mask = build("Roberta"), MASKS["whole"]
    report = trifuse.fuse(model)
    wanted = run(model, mask)
    seen: list[Tensor] = []
    output = model.encoder.layer[0].output
    output.LayerNorm.register_forward_hook(lambda module, args, out: seen.append(out))
    torch.testing.assert_close(run(model, mask), wanted, rtol=1e-5, atol=5e-6)
    assert len(seen) == 1
    assert not report.notes
    rows = {row.path: row.runs for row in trifuse.explain(model).modules}
    assert rows["encoder.layer.0.output"] == "fused; dropout, sum and norm one by one"
    assert rows["encoder.layer.1.output"] == "fused"
