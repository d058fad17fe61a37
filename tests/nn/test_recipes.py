"""Families of transformers, fused by their code: results, gradients, and the norms that remain."""

from __future__ import annotations

import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from model_gradients import weighted_gradients
from model_sizes import (
    DISTILBERT_SIZES,
    GROUPED_QUERIES,
    OPT_SIZES,
    PADDED_SIZES,
    SIZES,
    SPECIAL_TOKENS,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse.recipes import code, sublayers

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

B, L = 3, 10
GROUPED = SIZES | GROUPED_QUERIES | {"pad_token_id": 0}
EMBEDDED = PADDED_SIZES | {"embedding_size": 16}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

# By model: its configuration, and how many norms it computes.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Roberta": (PADDED_SIZES, 5),
    "XLMRoberta": (PADDED_SIZES, 5),
    "Camembert": (PADDED_SIZES, 5),
    "Electra": (EMBEDDED, 5),
    "Ernie": (PADDED_SIZES, 5),
    "LayoutLM": (PADDED_SIZES, 5),
    "MPNet": (PADDED_SIZES, 5),
    "DistilBert": (DISTILBERT_SIZES, 5),
    "Albert": (EMBEDDED, 5),
    "ModernBert": (PADDED_SIZES | SPECIAL_TOKENS | {"local_attention": 4}, 5),
    "Esm": (PADDED_SIZES | {"mask_token_id": 4}, 5),
    "Llama": (GROUPED, 5),
    "Mistral": (GROUPED, 5),
    "Qwen2": (GROUPED, 5),
    "Qwen3": (GROUPED | {"head_dim": 8}, 9),
    "Gemma": (GROUPED | {"head_dim": 8}, 5),
    "Gemma2": (GROUPED | {"head_dim": 8, "sliding_window": 4}, 9),
    "Gemma3Text": (GROUPED | {"head_dim": 8, "sliding_window": 4}, 13),
    "Olmo": (GROUPED, 5),
    "Nemotron": (GROUPED, 5),
    "GPT2": (GPT, 5),
    "OPT": (OPT_SIZES, 5),
    "OPT norms last": (OPT_SIZES | {"do_layer_norm_before": False}, 4),  # as OPT 350M
    "CLIPText": (PADDED_SIZES | {"eos_token_id": 2}, 5),
}
LENGTHS = torch.tensor([L, 6, 3])[:, None]
MASKS = {
    "whole": torch.ones(B, L, dtype=torch.int64),
    "padded right": (torch.arange(L) < LENGTHS).long(),
    "padded left": (torch.arange(L) < LENGTHS).flip(1).long(),
}


def build(name: str) -> nn.Module:
    options, _ = FAMILIES[name]
    torch.manual_seed(0)
    family = name.split()[0]
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}Model")(config).eval()
    for module in model.modules():
        if "Norm" in type(module).__name__:  # whose defaults hide the weight and the bias
            for parameter in module.parameters(recurse=False):
                parameter.data.uniform_(0.5, 1.5)
    return model


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for name, value in vars(model.config).items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            setattr(model.config, name, 0.0)


def run(model: nn.Module, mask: Tensor) -> Tensor:
    ids = torch.randint(3, 97, (B, L), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, attention_mask=mask)[0][mask.bool()]


def gradients(model: nn.Module, mask: Tensor) -> Tensor:
    return weighted_gradients(model, run(model, mask))


class Norms(TorchDispatchMode):
    """Counts torch's norms, or their parts, and trifuse's."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs = self.ours = self.with_sums = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.torchs += name.startswith(("aten.native_layer_norm", "aten.rsqrt"))
        if name.startswith("trifuse.dropout_add_layer_norm"):
            self.ours += 1
            self.with_sums += args[1] is not None
        return func(*args, **(kwargs or {}))


def count(model: nn.Module) -> tuple[int, int]:
    with torch.no_grad(), Norms() as norms:
        run(model, MASKS["whole"])
    return norms.ours, norms.torchs


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name):
    model = build(name)
    classes = [type(module) for module in model.modules()]
    _, norms = FAMILIES[name]
    assert count(model) == (0, norms)
    wanted = {kind: run(model, mask) for kind, mask in MASKS.items()}
    report = trifuse.fuse(model)
    assert count(model) == (norms, 0)
    assert not report.norms
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


def test_norms_after_sublayers_take_in_the_sum_before_them():
    """OPT 350M has such layers; families.py counts the sums of other models."""
    model = build("OPT norms last")
    trifuse.fuse(model)
    with torch.no_grad(), Norms() as norms:
        run(model, MASKS["whole"])
    assert norms.with_sums == norms.ours == 4


def test_a_decoder_exports_with_any_length():
    model = build("OPT")
    model.config.use_cache = False
    del model.decoder.layers[1:]
    trifuse.fuse(model)
    given = {"input_ids": torch.randint(3, 97, (B, L)), "attention_mask": MASKS["whole"]}
    length = torch.export.Dim("length", min=2, max=60)
    shapes = {argument: {1: length} for argument in given}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False)
    # ONNX has no view of another dtype.
    assert torch.ops.aten.view.dtype not in {node.target for node in program.graph.nodes}
    shorter = {argument: value[:, :5].clone() for argument, value in given.items()}
    with torch.no_grad():
        torch.testing.assert_close(program.module()(**shorter)[0], model(**shorter)[0])


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


def halved(function: Any) -> Any:
    """Returns a function in whose place another can be put, which passes for it."""

    @functools.wraps(function)
    def half(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) / 2

    return half


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return x + 1


@halved
def decorated_here(x: Tensor) -> Tensor:
    return x + 1


def test_only_decorators_may_wrap_what_is_read():
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaModel.forward
    assert inspect.unwrap(forward) is not forward
    assert code.parse(forward) is not None
    assert code.body(decorated) == code.body(decorated_here) == "return x + 1"
    for function in (forward, decorated, modeling_llama.rotate_half):
        assert code.body(function) is not None
        other = halved(function)
        # A decorator of this file's may have made what this file's functions are wrapped in.
        assert (code.body(other) is None) is (function is not decorated)


@pytest.mark.parametrize("cls", ["LlamaRMSNorm", "LlamaMLP"])
def test_a_wrapped_forward_stays(monkeypatch, cls):
    from transformers.models.llama import modeling_llama

    def build() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)).eval()

    ids = torch.randint(3, 97, (B, L))
    source = getattr(modeling_llama, cls)
    with torch.no_grad():
        before = build()(ids).last_hidden_state
        monkeypatch.setattr(source, "forward", halved(source.forward))
        expected = build()(ids).last_hidden_state
        model = build()
        trifuse.fuse(model)
        torch.testing.assert_close(model(ids).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(before, expected, rtol=1e-2)


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


class Inner(nn.Module):
    """Norms inside of the statement after a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.LayerNorm(8) for _ in range(3))
        self.linear = nn.Linear(8, 8)

    def forward(self, x, residual, choose=True):
        x = x + residual
        y, total = self.linear(self.first(x)), x * 2
        total = total + y
        out = total - (self.second(total) if choose else total)
        out = out + y
        return out, [self.third(out) for _ in range(2)]


def test_norms_inside_of_an_expression(monkeypatch):
    """The first takes the sum in; the others may not run, or run twice."""
    monkeypatch.setattr(Inner, "__module__", "transformers_modules.remote")
    torch.manual_seed(0)
    model, x, y = Inner(), torch.randn(3, 8), torch.randn(3, 8)
    wanted = {choose: model(x, y, choose) for choose in (True, False)}
    trifuse.fuse(model)
    assert type(model)._trifuse_origin.norms == ("first",)
    for choose, (out, (again, _)) in wanted.items():
        got = model(x, y, choose)
        torch.testing.assert_close(got[0], out)
        torch.testing.assert_close(got[1][0], again)


@pytest.mark.parametrize("name", ["Gemma2", "Nemotron"])
def test_bfloat16_weights_from_one_are_added_in_float32(name):
    """1 + weight keeps the bits of the weight, in a norm by itself and after a sum."""
    model = build(name)
    exact, halved = pickle.loads(pickle.dumps(model)).double(), model.bfloat16()
    wanted = run(exact.load_state_dict(halved.state_dict()) and exact, MASKS["whole"])
    theirs = run(halved, MASKS["whole"])
    trifuse.fuse(halved)
    ours = run(halved, MASKS["whole"])
    assert ours.dtype == torch.bfloat16
    off, theirs_off = ((x.double() - wanted).norm() for x in (ours, theirs))
    assert off <= 2 * theirs_off


def test_a_norm_that_autocast_casts():
    """Nemotron's result is in the dtype of autocast, where torch's LayerNorm gives float32."""
    model = build("Nemotron")
    x = torch.randn(2, 3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model.norm(x)
        trifuse.fuse(model)
        got = model.norm(x)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted)


def test_other_layer_norms_stay_and_are_reported(monkeypatch):
    monkeypatch.setattr(Tail, "__module__", "transformers_modules.remote")
    model = Tail()
    model.alone, model.wide, model.replaced = (nn.LayerNorm(size) for size in (8, (2, 8), 8))
    model.replaced.forward = lambda x: x
    report = trifuse.fuse(model)
    assert type(model.alone) is trifuse.nn.LayerNorm
    assert [(norm.path, norm.reason) for norm in report.norms] == [
        ("wide", "it is a norm over several dimensions"),
        ("replaced", "its forward was replaced on the instance"),
    ]
    x = torch.randn(3, 2, 8)
    torch.testing.assert_close(model.wide(x), nn.functional.layer_norm(x, (2, 8)))
    report.revert()
    assert type(model.alone) is nn.LayerNorm


@pytest.mark.parametrize("dropout", [None, (0.5, True)])
@pytest.mark.parametrize("order", [1, -1])
def test_a_sum_with_a_contiguous_term_can_be_viewed(order, dropout):
    """As torch's, if that term comes first; Inkling adds the result of a convolution to it."""
    terms = [torch.randn(2, 3, 8), torch.randn(2, 8, 3).mT][::order]
    normed, total = sublayers.add_then_norm(*terms, dropout, nn.LayerNorm(8), prenorm=True)
    for x in (normed, total, sublayers.add(*terms, dropout)):
        x.view(-1, 8)
