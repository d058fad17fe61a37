"""Encoder layers in one call in training: the bits of their parts, and when the parts run."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import trifuse
from trifuse.models import bert
from trifuse.nn import embeddings, post_norm
from trifuse.ops._linear_choice import is_available

pytestmark = pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension")

B, L, D = 3, 10, 48
KEEP = torch.arange(L) < torch.tensor([L - 1, 6, 3])[:, None]
SIZES = {
    "vocab_size": 97,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def served(monkeypatch) -> list[bool]:
    """For each call of several layers, whether one call served it. Here it may on a CPU too."""
    found: list[bool] = []
    op = post_norm.post_norm_layers

    def watched(*args: Any) -> Tensor | None:
        out = op(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(post_norm, "post_norm_layers", watched)
    monkeypatch.setattr(post_norm, "DEVICES", {"cpu"})
    return found


def by_parts(function: Callable[[], Any]) -> Any:
    """Returns the result of a call whose layers call their parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(post_norm, "DEVICES", set())
        return function()


def ours(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = bert.BertModel(bert.BertConfig(**SIZES | options), add_pooling_layer=False)
    return _with_large_weights(model)


def of_transformers(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES | options, attn_implementation="sdpa")
    return _with_large_weights(transformers.BertModel(config, add_pooling_layer=False))


def _with_large_weights(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


MAKERS = [ours, of_transformers]


def fused(make: Callable[..., nn.Module], dtype: torch.dtype, **options: Any) -> nn.Module:
    model = make(**options).to(dtype)
    trifuse.fuse(model, unpad=True)
    return model


def step(
    model: nn.Module, keep: Tensor | None = KEEP, wanted: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Returns the hidden states of real tokens, and gradients of the parameters or of others."""
    torch.manual_seed(2)
    ids = torch.randint(97, (B, L))
    out = model(ids, keep).last_hidden_state
    real = out if keep is None else out[keep]
    loss = (real.double().sin() * torch.randn(real.shape).double()).sum()
    found = torch.autograd.grad(loss, list(model.parameters()) if wanted is None else wanted)
    return [real.detach(), *found]


def check(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Compares the bits of the hidden states, and the gradients."""
    assert torch.equal(actual[0], expected[0])
    largest = max(float(each.abs().max()) for each in expected[1:])
    epsilon = torch.finfo(actual[0].dtype).eps
    for one, other in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=100 * epsilon, atol=100 * epsilon * largest)


# The same results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("keep", [KEEP, None])
def test_results_are_those_of_the_parts(served, make, dtype, training, keep):
    model = fused(make, dtype).train(training)
    actual = step(model, keep)
    assert served == [True]
    check(actual, by_parts(lambda: step(model, keep)))


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "quick_gelu", "relu", "silu"])
def test_activations(served, activation):
    model = fused(of_transformers, torch.float64, hidden_act=activation)
    check(step(model), by_parts(lambda: step(model)))
    assert served == [True]


@pytest.mark.parametrize(("hidden", "attention"), [(0.0, 0.3), (0.3, 0.0), (0.0, 0.0)])
def test_one_kind_of_dropout(served, hidden, attention):
    options = {"hidden_dropout_prob": hidden, "attention_probs_dropout_prob": attention}
    model = fused(of_transformers, torch.float64, **options)
    check(step(model), by_parts(lambda: step(model)))
    assert served == [True]


@pytest.mark.parametrize("make", MAKERS)
def test_without_gradients(served, make):
    model = fused(make, torch.float32).eval()
    ids = torch.randint(97, (B, L))
    with torch.no_grad():
        actual = model(ids, KEEP).last_hidden_state
        expected = by_parts(lambda: model(ids, KEEP).last_hidden_state)
    torch.testing.assert_close(actual, expected)  # on a CPU the parts' products are not torch's
    assert served == [True]


PATHS = [
    "attention.self.query.weight",
    "attention.self.query.bias",
    "attention.self.key.weight",
    "attention.self.value.weight",
    "attention.output.dense.bias",
    "attention.output.LayerNorm.weight",
    "attention.output.LayerNorm.bias",
    "intermediate.dense.weight",
    "intermediate.dense.bias",
    "output.dense.weight",
    "output.dense.bias",
    "output.LayerNorm.weight",
    "output.LayerNorm.bias",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("training", [False, True])
def test_a_single_gradient(served, path, training):
    model = fused(of_transformers, torch.float64).train(training).requires_grad_(False)
    wanted = [model.get_parameter(f"encoder.layer.{i}.{path}").requires_grad_() for i in (0, 1)]
    check(step(model, wanted=wanted), by_parts(lambda: step(model, wanted=wanted)))
    # Now only the first layer's tensor has a gradient.
    wanted[1].requires_grad_(False)
    check(step(model, wanted=wanted[:1]), by_parts(lambda: step(model, wanted=wanted[:1])))
    assert served == [True] * 2


def test_layers_without_biases(served):
    model = fused(of_transformers, torch.float64)
    for module in model.encoder.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.bias = None
    check(step(model), by_parts(lambda: step(model)))
    assert served == [True]


def test_a_mask(served):
    model = fused(ours, torch.float64)
    mask = torch.rand(B, 1, L, L) < 0.7
    x = torch.randn(B, L, D, dtype=torch.float64)
    torch.manual_seed(3)
    actual = model.encoder(x, mask)
    torch.manual_seed(3)
    expected = by_parts(lambda: model.encoder(x, mask))
    assert torch.equal(actual, expected)
    assert served == [True]


# Derivatives of the backward ----------------------------------------------------------------------


def test_second_derivatives(served):
    model = fused(of_transformers, torch.float64)

    def second() -> list[Tensor]:
        torch.manual_seed(2)
        parameters = [each for name, each in model.named_parameters() if "embed" not in name]
        out = model(torch.randint(97, (B, L)), KEEP).last_hidden_state
        first = torch.autograd.grad(out.sin().sum(), parameters, create_graph=True)
        of_first = sum(each.sin().sum() for each in first)
        return [out.detach(), *torch.autograd.grad(of_first, parameters)]

    actual, expected = second(), by_parts(second)
    assert served == [True]
    check(actual, expected)


def _share_query_and_key(model: Any) -> None:
    attention = model.encoder.layer[0].attention.self
    attention.key.weight = attention.query.weight


def _repeat_a_layer(model: Any) -> None:
    model.encoder.layer[1] = model.encoder.layer[0]


def _double_a_gradient(model: Any) -> None:
    model.encoder.layer[0].output.dense.weight.register_hook(lambda grad: 2 * grad)


@pytest.mark.parametrize("change", [_share_query_and_key, _repeat_a_layer, _double_a_gradient])
def test_gradients_with_a_graph_of_what_is_shared_or_watched(served, change):
    model = fused(of_transformers, torch.float64)
    change(model)

    def with_a_graph() -> list[Tensor]:
        torch.manual_seed(2)
        out = model(torch.randint(97, (B, L)), KEEP).last_hidden_state
        wanted = list(model.parameters())
        grads = torch.autograd.grad(out.sin().sum(), wanted, create_graph=True)
        return [out.detach(), *(grad.detach() for grad in grads)]

    for run in (lambda: step(model), with_a_graph):
        check(run(), by_parts(run))
    assert served == [True] * 2


def test_batched_gradients(served):
    model = fused(of_transformers, torch.float64)
    weights = [model.encoder.layer[0].output.dense.weight, model.encoder.layer[1].output.dense.bias]

    def jacobian(batched: bool) -> list[Tensor]:
        torch.manual_seed(2)
        out = model(torch.randint(97, (B, L)), KEEP).last_hidden_state
        grads = torch.randn(4, *out.shape, dtype=torch.float64)
        if batched:
            return list(torch.autograd.grad(out, weights, grads, is_grads_batched=True))
        each = [torch.autograd.grad(out, weights, grad, retain_graph=True) for grad in grads]
        return [torch.stack(found) for found in zip(*each, strict=True)]

    for one, other in zip(jacobian(True), jacobian(False), strict=True):
        torch.testing.assert_close(one, other)
    assert served == [True] * 2


def test_forward_mode_calls_the_parts(served):
    model = fused(of_transformers, torch.float64).eval()
    names, values = zip(*model.named_parameters(), strict=True)
    ids = torch.randint(97, (B, L))

    def run(*parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(model, given, (ids, KEEP)).last_hidden_state

    tangents = tuple(torch.randn_like(value) for value in values)
    torch.func.jvp(run, tuple(value.detach() for value in values), tangents)
    assert True not in served


# When the parts run -------------------------------------------------------------------------------


def _hook(model: Any) -> None:
    model.encoder.layer[0].output.register_forward_hook(lambda module, args, out: None)


def _hook_before(model: Any) -> None:
    model.encoder.layer[1].register_forward_pre_hook(lambda module, args: None)


def _hook_backward(model: Any) -> None:
    model.encoder.layer[1].register_full_backward_hook(lambda module, grads, others: None)


def _replace_forward(model: Any) -> None:
    layer = model.encoder.layer[1].intermediate
    layer.forward = type(layer).forward.__get__(layer)


def _replace_linear(model: Any) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.encoder.layer[0].output.dense.__class__ = Twice


def _drop_everything(model: Any) -> None:
    model.encoder.layer[0].output.dropout.p = 1.0


def _other_attention(model: Any) -> None:
    model.set_attn_implementation("sdpa")


def _checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable()


def _prune(model: Any) -> None:
    for module in (model.encoder.layer[0].output.dense, model.embeddings.position_embeddings):
        prune.random_unstructured(module, "weight", 0.5)


@pytest.mark.parametrize(
    "change",
    [
        _hook,
        _hook_before,
        _hook_backward,
        _replace_forward,
        _replace_linear,
        _drop_everything,
        _other_attention,
        _checkpoint,
        _prune,
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_what_watches_or_changes_a_layer(served, change, before):
    model = fused(of_transformers, torch.float64).train(change is not _other_attention)
    if before:  # a plan exists
        step(model)
        served.clear()
    change(model)
    check(step(model), by_parts(lambda: step(model)))
    assert True not in served


def test_under_autocast_the_parts_run(served):
    model = fused(of_transformers, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = step(model), by_parts(lambda: step(model))
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    assert True not in served


def test_other_weights_and_rates_take_effect(served):
    model = fused(of_transformers, torch.float64)
    step(model)
    layer: Any = model.encoder.layer[1]
    layer.output.dense.weight = nn.Parameter(torch.randn(D, 80, dtype=torch.float64))
    layer.attention.self.dropout.p = 0.7
    layer.output.dropout.p = 0.4
    layer.output.LayerNorm.eps = 0.5
    check(step(model), by_parts(lambda: step(model)))
    layer.attention.self.eval()  # it says whether the weights of the attention are dropped
    layer.output.dropout.eval()
    check(step(model), by_parts(lambda: step(model)))
    with torch.no_grad():
        layer.output.dense.weight.mul_(2)
    check(step(model), by_parts(lambda: step(model)))
    assert served == [True] * 4


def test_an_encoder_with_one_layer_less(served):
    model = fused(of_transformers, torch.float64)
    step(model)
    del model.encoder.layer[1]
    check(step(model), by_parts(lambda: step(model)))
    assert served == [True] * 2


def test_layers_of_a_kind_that_is_not_known(served):
    model = fused(of_transformers, torch.float64)
    dense = model.encoder.layer[0].output.dense
    _replace_linear(model)
    step(model)
    step(model)
    assert served == []
    dense.__class__ = nn.Linear
    step(model)
    assert served == [True]


# Copies and lifetimes -----------------------------------------------------------------------------


def test_a_checkpoint_computes_the_same(served):
    model = fused(of_transformers, torch.float64)
    ids = torch.randint(97, (B, L))

    def gradients(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(4)
        return torch.autograd.grad(run().sin().sum(), list(model.parameters()))

    def run() -> Tensor:
        out: Tensor = model(ids, KEEP).last_hidden_state
        return out

    expected = gradients(run)
    actual = gradients(lambda: checkpoint(run, use_reentrant=False))
    assert all(map(torch.equal, actual, expected))
    assert served == [True] * 3


def test_a_weight_changed_before_the_backward_is_noticed(served):
    model = fused(of_transformers, torch.float64)
    out = model(torch.randint(97, (B, L)), KEEP).last_hidden_state
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert served == [True]


def test_a_backward_runs_twice_only_if_its_graph_is_kept():
    model = fused(of_transformers, torch.float64)
    out = model(torch.randint(97, (B, L)), KEEP).last_hidden_state
    weight = model.encoder.layer[0].output.dense.weight
    first = torch.autograd.grad(out.sum(), weight, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(out.sum(), weight))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), weight)


def test_copies_and_saved_models(served):
    model = fused(of_transformers, torch.float64)
    expected = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check(step(other), expected)
    assert served == [True] * 3


def test_no_model_is_kept_alive():
    model = fused(of_transformers, torch.float64)
    step(model)
    layer = weakref.ref(model.encoder.layer[0])
    del model
    gc.collect()
    assert layer() is None


# Embeddings ---------------------------------------------------------------------------------------


@pytest.fixture
def looked_up(monkeypatch) -> list[bool]:
    """For each lookup of embeddings, whether one call served it."""
    found: list[bool] = []
    op = embeddings.ops.embedded_rows

    def watched(*args: Any) -> tuple[Tensor, Tensor] | None:
        out = op(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(embeddings.ops, "embedded_rows", watched)
    return found


def embed(model: Any, **given: Tensor) -> list[Tensor]:
    """Returns what embeddings make of packed tokens, and the gradients of their parameters."""
    torch.manual_seed(5)
    ids = torch.randint(97, (40, 1))
    ids[::7] = 0  # the id of padding, whose row gets no gradient
    positions = torch.arange(40)[:, None] % 9
    out = model.embeddings(input_ids=ids, position_ids=positions, **given)
    loss = (out.double().sin() * torch.randn(out.shape).double()).sum()
    return [out.detach(), *torch.autograd.grad(loss, list(model.embeddings.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("types", [False, True])
def test_embeddings(looked_up, dtype, types):
    model = fused(of_transformers, dtype)
    given = {"token_type_ids": torch.arange(40)[:, None] % 2} if types else {}
    actual, expected = embed(model, **given), by_parts(lambda: embed(model, **given))
    check(actual, expected)
    assert looked_up == [True]
    assert not actual[1][0].any()


def test_sums_of_rows_are_rounded_once(looked_up):
    exact = fused(of_transformers, torch.float64).eval()
    model = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict({name: each.double() for name, each in model.state_dict().items()})
    for one, other in zip(embed(model), by_parts(lambda: embed(exact)), strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 0.01
    assert looked_up == [True]


def test_second_derivatives_of_embeddings(looked_up):
    model = fused(of_transformers, torch.float64)

    def second() -> list[Tensor]:
        torch.manual_seed(6)
        tables = [model.embeddings.get_submodule(f"{name}_embeddings").weight for name in TABLES]
        ids, positions = torch.randint(97, (40, 1)), torch.arange(40)[:, None] % 9
        out = model.embeddings(input_ids=ids, position_ids=positions)
        first = torch.autograd.grad(out.sin().sum(), tables, create_graph=True)
        of_first = sum(each.sin().sum() for each in first)
        return [out.detach(), *torch.autograd.grad(of_first, tables)]

    check(second(), by_parts(second))
    assert looked_up == [True]


TABLES = ("word", "token_type", "position")


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_other_tables_are_looked_up_by_torch(looked_up, option):
    model = fused(of_transformers, torch.float64).eval()
    setattr(model.embeddings.position_embeddings, option, 1.0 if option == "max_norm" else True)
    embed(model)
    assert looked_up == []


def test_segments_of_a_buffer_that_is_not_zero(looked_up):
    model = fused(of_transformers, torch.float64)
    model.embeddings.token_type_ids[:, 3:] = 1
    check(embed(model), by_parts(lambda: embed(model)))
    model.embeddings.token_type_ids.zero_()
    check(embed(model), by_parts(lambda: embed(model)))
    assert looked_up == [True]


@pytest.mark.parametrize("gpu", [False, True])  # the lookups of a CPU, or of a GPU
def test_embeddings_of_models_in_a_batch(monkeypatch, gpu):
    monkeypatch.setattr(post_norm, "DEVICES", {"cpu"} if gpu else set())
    models: list[Any] = [fused(of_transformers, torch.float64).eval() for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(0.5)
        ids = torch.randint(97, (B, L))
        parameters, buffers = torch.func.stack_module_state([each.embeddings for each in models])

        def run(*state: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(models[0].embeddings, state, (ids,))

        batched = torch.vmap(run)(parameters, buffers)
        alone = torch.stack([each.embeddings(ids) for each in models])
    torch.testing.assert_close(batched, alone)
