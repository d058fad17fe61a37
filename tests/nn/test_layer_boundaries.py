"""The sum at a layer's end and the norm at the next layer's beginning, in one call."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from model_sizes import (
    GROUPED_QUERIES,
    OPT_SIZES,
    PADDED_SIZES,
    SIZES,
    T5_SIZES,
    VIT_SIZES,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import trifuse
from trifuse.nn import dropout_add_layer_norm
from trifuse.recipes import boundaries, sublayers

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

LAYERS = 2
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SIZES | GROUPED_QUERIES | {"pad_token_id": 0},
    "GPT2": GPT,
    "ViT": VIT_SIZES,
    "OPT": OPT_SIZES,
    "Esm": PADDED_SIZES | {"mask_token_id": 4},
    # The norm after the last layer belongs to the model around the stack.
    "CLIPText": PADDED_SIZES | {"eos_token_id": 2},
    "Dinov2": VIT_SIZES,
}
IDS = torch.randint(5, 97, (2, 7), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def build(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    return getattr(transformers, f"{name}Model")(config).eval()


def run(model: Any, **options: Any) -> Any:
    return model(IMAGES if model.main_input_name == "pixel_values" else IDS, **options)


def gradients(model: nn.Module, **options: Any) -> Tensor:
    model.zero_grad()
    out = run(model, **options)[0]
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return grads / grads.abs().max()


def holder(model: Any) -> Any:
    """Returns the module that holds the stack of layers; in 4.57 it isn't the model of CLIP."""
    return getattr(model, "text_model", model)


def layers(model: Any) -> nn.ModuleList:
    model = holder(model)
    if hasattr(model, "encoder"):
        return getattr(model.encoder, "layer", None) or model.encoder.layers
    stack = getattr(model, "decoder", model)
    return stack.h if hasattr(stack, "h") else stack.layers


def meeting(model: Any) -> tuple[nn.Module, nn.Module]:
    """Returns the module whose sum ends the first layer, and the one that holds the next norm."""
    first, second = layers(model)
    if model.config.model_type == "esm":
        return first.output, second.attention
    return first, second


def sum_of(layer: nn.Module, model: Any) -> Tensor:
    """Returns the sum that ends a layer of Llama."""
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(3))
    turns = model.rotary_emb(x, torch.arange(7)[None])
    return layer(x, position_embeddings=turns, attention_mask=None)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)


class Norms(TorchDispatchMode):
    """Counts trifuse's norms, and those that take in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.with_sums = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("trifuse.dropout_add_layer_norm_forward"):
            self.all += 1
            self.with_sums += args[1] is not None
        return func(*args, **(kwargs or {}))


def count(model: nn.Module) -> tuple[int, int]:
    with torch.no_grad(), Norms() as norms:
        run(model)
    return norms.all, norms.with_sums


@pytest.mark.parametrize("name", FAMILIES)
def test_results_gradients_copies_and_the_way_back(name):
    model = build(name)
    wanted, grads, names = run(model)[0], gradients(model), list(model.state_dict())
    report = trifuse.fuse(model)
    assert list(model.state_dict()) == names
    assert count(model) == (5, 2 * LAYERS)
    close(run(model)[0], wanted)
    close(gradients(model), grads)
    twin, its_report = pickle.loads(pickle.dumps((model, report)))
    for each, its in ((twin, its_report), copy.deepcopy((model, report)), (model, report)):
        assert count(each) == (5, 2 * LAYERS)
        closing, opening = meeting(each)
        following = boundaries.following(closing)
        assert following is not None
        assert following[0] is opening
        its.revert()
        assert not any("trifuse" in key for part in each.modules() for key in vars(part))
        assert torch.equal(run(each)[0], wanted)


def test_a_layer_does_not_hold_the_next():
    """Neither one that was taken out of its model, nor a copy of one."""
    model = build("Llama")
    trifuse.fuse(model)
    first, second = layers(model)
    assert len(pickle.dumps(first)) < 1.1 * len(pickle.dumps(build("Llama").layers[0]))
    assert torch.equal(sum_of(copy.deepcopy(first), model), sum_of(first, model))
    model.layers = model.layers[:1]
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None
    other = build("Llama")
    other.layers = other.layers[:1]
    for each in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        close(run(each)[0], run(other)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sublayers_that_are_modules(dtype):
    """All but the first norm of T5's encoder and decoder take a sum in, and none is computed twice.

    In float16, its blocks clamp the sums.
    """
    torch.manual_seed(0)
    model = transformers.T5Model(transformers.T5Config(**T5_SIZES)).eval().to(dtype)
    given = {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}
    with torch.no_grad():
        wanted = model(**given)[0]
        trifuse.fuse(model)
        with Norms() as norms:
            got = model(**given)[0]
    assert (norms.all, norms.with_sums) == (12, 0 if dtype == torch.float16 else 10)
    within = {torch.float32: 5e-6, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    torch.testing.assert_close(got, wanted, rtol=within, atol=within)


@pytest.mark.parametrize("name", FAMILIES)
def test_dropout_depends_on_the_seed_alone(name):
    model = build(name).train()
    trifuse.fuse(model)
    draws = []
    for seed in (1, 1):
        torch.manual_seed(seed)
        draws.append(gradients(model))
    assert torch.equal(*draws)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    model = build("Llama").train()
    wanted = gradients(model)
    trifuse.fuse(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    close(gradients(model), wanted)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("fused_first", [False, True])
def test_checkpoints_around_layers(which, fused_first):
    """Each saves the same tensors when it computes its layer again."""
    model = build("Llama").train()
    wanted = gradients(model, use_cache=False)
    if fused_first:
        trifuse.fuse(model)
    for at in which:
        model.layers[at] = Checkpointed(model.layers[at])
    trifuse.fuse(model)
    close(gradients(model, use_cache=False), wanted)


def test_hidden_states_are_the_sums():
    model = build("Llama")
    wanted = run(model, output_hidden_states=True).hidden_states
    trifuse.fuse(model)
    for ours, theirs in zip(
        run(model, output_hidden_states=True).hidden_states, wanted, strict=True
    ):
        close(ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_results_in_inference_mode(name):
    """They are inference tensors, as torch's; only the sums between layers count their changes."""
    model = build(name)
    trifuse.fuse(model)
    with torch.inference_mode():
        assert run(model)[0].is_inference()
        assert count(model) == (5, 2 * LAYERS)
        sums = run(model, output_hidden_states=True).hidden_states
    assert not sums[1].is_inference()


def change(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 2


def change_in_place(module: nn.Module, args: Any, out: Any) -> None:
    out.add_(torch.arange(out.shape[-1]) / 8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("what", ["hook", "hook in place", "a norm's hook", "layers", "norm"])
def test_what_comes_between(what, mode):
    """A sum that is changed, and a norm that is another one than was expected."""

    def meddle(model: Any) -> None:
        first, second = layers(model)
        if what == "hook":
            first.register_forward_hook(change)
        elif what == "hook in place":
            first.register_forward_hook(change_in_place)
        elif what == "a norm's hook":
            second.input_layernorm.register_forward_hook(change)
        elif what == "layers":
            model.layers = nn.ModuleList([second, first])
        else:
            second.input_layernorm = nn.LayerNorm(32)

    model, other = build("Llama"), build("Llama")
    meddle(other)
    with mode():
        wanted = run(other)[0]
        trifuse.fuse(model)
        run(model)
        meddle(model)
        close(run(model)[0], wanted)
        if mode is torch.enable_grad:
            close(gradients(model), gradients(other))


def double(module: nn.Module, args: Any, out: Any = None) -> None:
    """Changes the result of a module, or its input, in place."""
    given = args if out is None else out
    (given[0] if isinstance(given, tuple) else given).mul_(2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "between", "opening"),
    [
        ("Llama", ["layers.0"], ["layers.1"]),
        ("Esm", ["encoder.layer.0.attention.output", "encoder.layer.0.attention"], []),
        ("Esm", ["encoder.layer.0.output", "encoder.layer.0"], ["encoder.layer.1.attention"]),
        ("Esm", ["encoder.layer.1.output", "encoder.layer.1"], ["encoder.emb_layer_norm_after"]),
        ("T5", ["encoder.block.0.layer.1", "encoder.block.0"], ["encoder.block.1.layer.0"]),
        ("T5", ["encoder.block.1"], ["encoder.final_layer_norm"]),
        ("CLIPText", ["encoder.layers.1"], ["final_layer_norm"]),
    ],
)
def test_hooks_that_change_a_sum_in_place(name, between, opening, training):
    """The sum may end a submodule of the module that is hooked, and the norm may begin one."""

    def hooked(model: nn.Module, register: str, path: str) -> Tensor:
        hook = getattr(holder(model).get_submodule(path), register)(double)
        try:
            return gradients(model, **options)
        finally:
            hook.remove()

    options = {"decoder_input_ids": IDS} if name == "T5" else {}
    sizes = T5_SIZES if name == "T5" else FAMILIES[name]
    torch.manual_seed(0)
    plain = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    model = copy.deepcopy(plain).train(training)
    plain.eval()
    trifuse.fuse(model)
    for register, paths in (
        ("register_forward_hook", between),
        ("register_forward_pre_hook", opening),
    ):
        for path in paths:
            got = hooked(model, register, path)
            if not training:  # otherwise torch drops other elements
                close(got, hooked(plain, register, path))


@pytest.mark.parametrize("dropout", [nn.Dropout(0.1).eval(), (0.1, False)])
def test_a_dropout_that_does_not_apply(dropout):
    """It neither makes a sum alone compute a norm, nor keeps a norm from a sum that broadcasts."""
    x, positions, norm = torch.randn(2, 7, 32), torch.randn(1, 7, 32), nn.LayerNorm(32)
    with Norms() as counted:
        sublayers.add(x, x, dropout)
        assert counted.all == 0
        sublayers.add_then_norm(x, positions, dropout, norm, prenorm=False)
        assert counted.with_sums == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_norm_is_kept_as_long_as_its_sum(mode):
    model = build("Llama")
    trifuse.fuse(model)
    with mode():
        total = sum_of(layers(model)[0], model)
        norm = layers(model)[1].input_layernorm
        last = dropout_add_layer_norm._local.slot
        assert last.kept is not None
        assert dropout_add_layer_norm.normed_before(total.clone(), norm) is None
        assert dropout_add_layer_norm.normed_before(total, layers(model)[0].input_layernorm) is None
        kept = dropout_add_layer_norm.normed_before(total, norm)
        assert last.kept is None
        close(kept, norm(total))
        total = sum_of(layers(model)[0], model)
        assert last.kept is not None
        del total
        assert last.kept is None
        total = sum_of(layers(model)[0], model)
    if mode is torch.no_grad:  # then a norm in which gradients are recorded is another
        assert norm(total).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_norm_after_packed_layers(mode):
    """It takes the sum of the packed tokens; in the padding it is the norm of 0."""
    model = build("CLIPText")
    last, encoder = holder(model).final_layer_norm, holder(model).encoder
    last.bias.data.uniform_()
    keep = torch.arange(7) < torch.tensor([7, 4])[:, None]
    given = {"attention_mask": keep.long()}
    with mode():
        wanted = run(model, **given)[0]
        weights = wanted.new_ones(wanted.shape).cumsum(-1)
        if mode is torch.enable_grad:
            (wanted * weights).sum().backward()
            grad, last.bias.grad = last.bias.grad, None
        (unpadded,) = trifuse.fuse(model, unpad=True).unpadded
        assert model.get_submodule(unpadded) is encoder
        with Norms() as norms:
            got = run(model, **given)[0]
        # With gradients, the sum that leaves a stack is computed alone.
        with_sums = 2 * LAYERS - (mode is torch.enable_grad)
        assert (norms.all, norms.with_sums) == (5, with_sums)
        close(got[keep], wanted[keep])
        close(got[~keep], last.bias.expand_as(got[~keep]))
        if mode is torch.enable_grad:
            (got * weights).sum().backward()
            close(last.bias.grad, grad)  # the padding's outputs depend on it too
        alone = encoder(torch.randn(2, 7, 32), keep[:, None, None]).last_hidden_state
        assert alone[~keep].eq(0).all()  # the sum, whose norm nobody takes


def test_a_stack_called_by_itself():
    """Its sum has the gradient of the norm after it, which changes with its weights."""
    model = build("CLIPText")
    trifuse.fuse(model)
    norm, encoder = holder(model).final_layer_norm, holder(model).encoder
    x = torch.randn(2, 7, 32)
    total = encoder(inputs_embeds=x).last_hidden_state
    total.retain_grad()
    total.sum().backward(retain_graph=True)
    assert norm.weight.grad is None
    norm(total).square().sum().backward()
    assert norm.weight.grad is not None
    assert (total.grad - 1).abs().max() > 0
    with torch.no_grad():
        total = encoder(inputs_embeds=x).last_hidden_state
        norm.weight.mul_(3)
        close(norm(total), nn.functional.layer_norm(total, (32,), norm.weight, norm.bias, norm.eps))


class Packing(nn.Module):
    """A layer that adds tuples last, and returns them second, or first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def second(self, x, past, present):
        x = self.norm(x)
        kept = past + present
        return x, kept

    def first(self, x, past, present):
        x = self.norm(x)
        kept = past + present
        return kept, x


@pytest.mark.parametrize("which", ["first", "second"])
def test_sums_that_are_no_layers_end(which, monkeypatch):
    monkeypatch.setattr(Packing, "forward", getattr(Packing, which))
    fused = sublayers._make(Packing, (("norm", "norm"),))
    assert (fused is not Packing) == (which == "first")
    layer = Packing()
    x = torch.randn(3, 8)
    wanted = layer(x, (1,), (2, 3))
    layer.__class__ = fused
    following = Packing()
    boundaries.join(layer, boundaries.Following(following, "norm", True))
    got = layer(x, (1,), (2, 3))
    at = ("first", "second").index(which)
    assert got[at] == wanted[at] == (1, 2, 3)
    assert torch.equal(got[1 - at], wanted[1 - at])


@torch.no_grad()
def test_a_norm_goes_with_its_sum_in_any_thread():
    model = build("Llama")
    trifuse.fuse(model)
    held = [sum_of(layers(model)[0], model)]
    slot = dropout_add_layer_norm._local.slot
    assert slot.kept is not None
    other = threading.Thread(target=held.clear)
    other.start()
    other.join()
    assert slot.kept is None


@torch.no_grad()
def test_a_compiled_norm_takes_nothing_that_was_kept():
    model = build("Llama")
    trifuse.fuse(model)
    total, norm = sum_of(layers(model)[0], model), layers(model)[1].input_layernorm
    got = torch.compile(norm, fullgraph=True, backend="eager")(total)
    assert dropout_add_layer_norm._local.slot.kept is not None
    close(got, norm(total))


def test_autocast_and_another_dtype_of_the_weights():
    model = build("GPT2")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        wanted = run(model)[0]
        trifuse.fuse(model)
        torch.testing.assert_close(run(model)[0], wanted, rtol=0.05, atol=0.05)
