"""Plain calls in training that C++ checks: linear layers, dropout, heads of joint projections."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attention_cases import assert_equal, normal
from torch import Tensor

import trifuse
from trifuse import backends
from trifuse.ops import _fast_path, _linear_choice
from trifuse.ops.dropout import dropout
from trifuse.ops.heads import split_heads
from trifuse.ops.linear import linear

pytestmark = pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")

Call = tuple[Callable[..., Any], list[Tensor | None]]
NAMES = ("linear", "dropout", "split_heads")
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "quick_gelu", "silu")


@pytest.fixture(params=["cpp", "torch in training"])
def product(request, monkeypatch):
    """Trains on trifuse's product, or on torch's beside trifuse's in inference."""
    ours = request.param == "cpp"
    choice = _linear_choice.Choice("a test's", inference=True, training=ours)
    made = dict.fromkeys((torch.float32, torch.bfloat16), choice)
    monkeypatch.setattr(_linear_choice, "_made", made)
    return request.param


def linear_calls(dtype: torch.dtype) -> list[Call]:
    def call(activation: Any) -> Callable[..., Any]:
        return lambda x, weight, bias: linear(x, weight, bias, activation=activation)

    weight, bias = normal(24, 40, seed=1, dtype=dtype), normal(24, seed=2, dtype=dtype)
    calls: list[Call] = [
        (call(activation), [normal(rows, 40, dtype=dtype), weight, b])
        for activation, rows, b in itertools.product(ACTIVATIONS, (3, 80), (None, bias))
    ]
    xs = [normal(40, dtype=dtype), normal(3, 40, 30, dtype=dtype).transpose(1, 2)]
    xs += [normal(40, 90, dtype=dtype).t(), normal(1, 40, dtype=dtype).expand(70, 40)]
    calls += [(call("relu"), [x, weight, bias]) for x in xs]
    by_columns = normal(40, 24, seed=1, dtype=dtype).t()
    return [*calls, (call("gelu"), [normal(9, 10, 40, dtype=dtype), by_columns, bias])]


def dropout_calls(dtype: torch.dtype) -> list[Call]:
    def call(p: float) -> Callable[..., Any]:
        return lambda x: dropout(x, p)

    x = normal(3, 5, 40, dtype=dtype)
    return [(call(p), [each]) for p in (0.1, 1.0) for each in (x, x.transpose(0, 2), x[0, 0, 0])]


def attention_calls(dtype: torch.dtype) -> list[Call]:
    H, E = 2, 8

    def of_itself(batch_first: bool, dropout_p: float = 0.0) -> Callable[..., Any]:
        def call(x: Tensor) -> Tensor:
            heads = split_heads(x, 3, H, batch_first)
            return trifuse.scaled_dot_product_attention(*heads, dropout_p=dropout_p)

        return call

    def of_memory(query: Tensor, memory: Tensor) -> Tensor:
        (q,) = split_heads(query, 1, H, True)
        return trifuse.scaled_dot_product_attention(q, *split_heads(memory, 2, H, True))

    def twice(x: Tensor) -> Tensor:
        """A gradient that is a sum, which doesn't lie beside the others."""
        q, k, v = split_heads(x, 3, H, True)
        return trifuse.scaled_dot_product_attention(q, k, v) + q.sin()

    def keys_only(x: Tensor) -> Tensor:
        q, k, v = split_heads(x, 3, H, True)
        return trifuse.scaled_dot_product_attention(q.detach(), k, v.detach())

    shapes = ((3, 7), (1, 7), (3, 1), (1, 1))
    calls: list[Call] = [
        (call, [normal(*shape, 3 * H * E, dtype=dtype)])
        for shape in shapes
        for call in (of_itself(True), of_itself(False), of_itself(True, 0.3), twice, keys_only)
    ]
    memory = normal(3, 5, 2 * H * E, seed=1, dtype=dtype)
    return [*calls, (of_memory, [normal(3, 7, H * E, dtype=dtype), memory])]


def every_call(dtype: torch.dtype) -> list[Call]:
    linears = linear_calls(dtype) if dtype in (torch.float32, torch.bfloat16) else []
    return [*linears, *dropout_calls(dtype), *attention_calls(dtype)]


def second_derivatives(call: Callable[..., Any], tensors: Sequence[Tensor | None]) -> Any:
    torch.manual_seed(0)
    variables = [t.detach().requires_grad_() for t in tensors if t is not None]
    given = iter(variables)
    out = call(*(None if t is None else next(given) for t in tensors))
    first = torch.autograd.grad(out.sin().sum(), variables, create_graph=True)
    total = sum(((g * g).sum() for g in first), torch.zeros((), dtype=out.dtype))
    return torch.autograd.grad(total, variables, allow_unused=True)


def results(call: Callable[..., Any], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns a call's result and its gradients, all together and one by one."""
    torch.manual_seed(0)
    given = [None if t is None else t.detach().requires_grad_() for t in tensors]
    variables = [t for t in given if t is not None]
    out = call(*given)
    upstream = normal(*out.shape, seed=9, dtype=out.dtype)
    found = [out.detach(), *torch.autograd.grad(out, variables, upstream, retain_graph=True)]
    for each in variables:
        found += torch.autograd.grad(out, each, upstream, retain_graph=True)
    for i in range(len(variables)):  # whatever needs no gradient
        left = [t if t is None or t is variables[i] else t.detach() for t in given]
        torch.manual_seed(0)
        found += torch.autograd.grad(call(*left), variables[i], upstream)
    found.append(torch.rand(()))  # the same seeds were drawn
    return found


class SlowPath:
    """The extension without its calls of this file."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *args: None) if name in NAMES else getattr(backends._C, name)


@pytest.fixture
def served(monkeypatch) -> list[bool]:
    """For each call that reached C++, whether it was served there."""
    answers: list[bool] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = function(*args)
            answers.append(found is not None)
            return found

        return call

    for name in NAMES:
        monkeypatch.setattr(backends._C, name, counted(getattr(backends._C, name)))
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_bits_are_those_of_the_slow_path(monkeypatch, product, served, dtype):
    calls = every_call(dtype)
    fast = [results(*call) for call in calls]
    assert served
    assert all(served)
    monkeypatch.setattr(_fast_path, "extension", lambda *args: SlowPath())
    for (call, tensors), actual in zip(calls, fast, strict=True):
        for a, b in zip(actual, results(call, tensors), strict=True):
            assert_equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives_are_those_of_the_slow_path(monkeypatch, product, served, dtype):
    """Up to the order in which autograd adds up terms."""
    calls = every_call(dtype)
    fast = [second_derivatives(*call) for call in calls]
    assert all(served)
    monkeypatch.setattr(_fast_path, "extension", lambda *args: SlowPath())
    for call, actual in zip(calls, fast, strict=True):
        for a, b in zip(actual, second_derivatives(*call), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_joint_projections_are_not_copied():
    x = normal(3, 7, 48).requires_grad_()
    heads = split_heads(x, 3, 2, True)
    out = trifuse.scaled_dot_product_attention(*heads)
    with torch.profiler.profile() as profile:
        out.backward(torch.ones_like(out))
    seen = {event.key for event in profile.key_averages()}
    assert "trifuse::attention_backward_side_by_side" in seen
    assert not seen & {"aten::stack", "aten::cat", "aten::clone", "aten::copy_"}


def test_batched_gradients(product):
    for call, tensors in every_call(torch.float32):
        given = [None if t is None else t.detach().requires_grad_() for t in tensors]
        variables = [t for t in given if t is not None]
        torch.manual_seed(0)
        out = call(*given)
        upstream = torch.stack([normal(*out.shape, seed=i) for i in (8, 9)])
        batched = torch.autograd.grad(
            out, variables, upstream, is_grads_batched=True, retain_graph=True
        )
        for i, each in enumerate(upstream):
            expected = torch.autograd.grad(out, variables, each, retain_graph=True)
            for a, b in zip(batched, expected, strict=True):
                torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("fast_first", [False, True])
def test_a_checkpoint_may_replay_the_other_path(monkeypatch, product, fast_first):
    """Both paths save the same tensors."""
    from torch.utils.checkpoint import checkpoint

    def extension(*args: Any) -> Any:
        return backends._C if serving else SlowPath()

    monkeypatch.setattr(_fast_path, "extension", extension)
    for call, tensors in [*linear_calls(torch.float32), *dropout_calls(torch.float32)]:
        given = [None if t is None else t.detach().requires_grad_() for t in tensors]
        variables = [t for t in given if t is not None]
        serving = fast_first
        torch.manual_seed(0)
        out = checkpoint(call, *given, use_reentrant=False)
        serving = not fast_first
        actual = torch.autograd.grad(out.sum(), variables)
        torch.manual_seed(0)
        for a, b in zip(actual, torch.autograd.grad(call(*given).sum(), variables), strict=True):
            assert_equal(a, b)


def test_what_was_changed_is_noticed(product):
    x, weight, bias = normal(80, 40), normal(24, 40, seed=1), normal(24, seed=2)
    for changed in ("x", "weight", "out"):
        given = {"x": x.clone().requires_grad_(), "weight": weight.clone().requires_grad_()}
        out = linear(given["x"], given["weight"], bias, activation="relu")
        with torch.no_grad():
            (given | {"out": out})[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("fast", [False, True])
def test_results_can_be_changed_in_place(monkeypatch, product, fast):
    extension = backends._C if fast else SlowPath()
    monkeypatch.setattr(_fast_path, "extension", lambda *args: extension)
    for shape in ((80, 40), (8, 10, 40), (3, 40)):
        x, weight = normal(*shape).requires_grad_(), normal(24, 40, seed=1).requires_grad_()
        expected = torch.autograd.grad((linear(x, weight) * 3).sum(), (x, weight))
        actual = torch.autograd.grad(linear(x, weight).mul_(3).sum(), (x, weight))
        for a, b in zip(actual, expected, strict=True):
            assert_equal(a, b)
    dropped = dropout(x, 0.5)
    (of_x,) = torch.autograd.grad(dropped.mul_(0).sum(), x)
    assert_equal(of_x, torch.zeros_like(x))


def test_rows_that_were_copied_may_change(product):
    """As with torch's layer, which saves the copy."""
    whole, weight = normal(2, 40, 64), normal(24, 40, seed=1).requires_grad_()
    expected = normal(2, 64, 24, seed=3).flatten(0, 1).t() @ whole.transpose(1, 2).flatten(0, 1)
    out = linear(whole.transpose(1, 2), weight)
    whole.zero_()
    (actual,) = torch.autograd.grad(out, weight, normal(2, 64, 24, seed=3))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("learnt", [False, True])
def test_changes_of_a_projection_are_noticed(learnt):
    """Its heads are views of it. They may be saved for the gradient of a mask alone."""
    x = normal(3, 7, 48).requires_grad_(learnt) * 1
    mask = normal(1, 1, 7, 7, seed=1).requires_grad_(not learnt)
    heads = split_heads(x, 3, 2, True)
    out = trifuse.scaled_dot_product_attention(*heads, mask)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        out.sum().backward()
    if learnt:
        with pytest.raises(RuntimeError, match="multiple views"):
            heads[0].mul_(2)


def test_heads_of_nothing(monkeypatch):
    for fast in (backends._C, None):
        monkeypatch.setattr(_fast_path, "extension", lambda *args, fast=fast: fast)
        for shape in ((0, 7, 48), (3, 0, 48)):
            assert [h.shape for h in split_heads(torch.ones(shape), 3, 2, True)] == [
                (shape[0], 2, shape[1], 8)
            ] * 3
        assert split_heads(torch.ones(3, 7, 48), 3, 2, False)[0].shape == (7, 2, 3, 8)


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40), (5, 0), (2, 5, 0), (0,)])
def test_products_of_nothing(shape):
    from trifuse.ops._linear_product import product as multiply

    x = torch.ones(shape).requires_grad_()
    weight = torch.ones(24, shape[-1]).requires_grad_()
    bias = torch.ones(24).requires_grad_()
    out = multiply(x, weight, bias)
    assert out.shape == (*shape[:-1], 24)
    grads = torch.autograd.grad(out.sum(), (x, weight, bias))
    assert [g.shape for g in grads] == [x.shape, weight.shape, bias.shape]


def test_training_releases_the_packed_weight(product):
    from trifuse.nn.linear import packed_weight

    module = trifuse.nn.Linear(40, 24)
    with torch.no_grad():
        for _ in range(2):  # packed for good from the second call on
            module(normal(600, 40))
    kept = packed_weight(module, "weight")
    assert kept is not None
    assert kept.is_kept
    module(normal(600, 40)).sum().backward()
    assert not kept.is_kept


def test_compiled_autograd(product, fresh_dynamo):
    from torch._dynamo import compiled_autograd

    calls = [linear_calls(torch.float32)[3], dropout_calls(torch.float32)[0]]
    for call, tensors in [*calls, attention_calls(torch.float32)[0]]:
        given = [None if t is None else t.detach().requires_grad_() for t in tensors]
        variables = [t for t in given if t is not None]
        torch.manual_seed(0)
        out = call(*given).sin().sum()
        expected = torch.autograd.grad(out, variables, retain_graph=True)
        with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
            out.backward()
        for t, e in zip(variables, expected, strict=True):
            torch.testing.assert_close(t.grad, e)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_compiled_autograd_of_the_slow_path_is_one_graph(monkeypatch, fresh_dynamo, activation):
    from torch._dynamo import compiled_autograd

    choice = _linear_choice.Choice("a test's", inference=True, training=True)
    monkeypatch.setattr(_linear_choice, "_made", {torch.float32: choice})
    monkeypatch.setattr(_fast_path, "extension", lambda *args: None)
    variables = [normal(80, 40), normal(24, 40, seed=1), normal(24, seed=2)]
    x, weight, bias = (t.requires_grad_() for t in variables)
    out = linear(x, weight, bias, activation=activation).sin().sum()
    expected = torch.autograd.grad(out, variables, retain_graph=True)

    def compiled(graph: Any) -> Any:
        return torch.compile(graph, backend="eager", fullgraph=True)

    with compiled_autograd._enable(compiled):
        out.backward()
    for t, e in zip(variables, expected, strict=True):
        torch.testing.assert_close(t.grad, e)


def sparse_gradient(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The bias's gradient where the layer's result gets a sparse one."""
    rows = linear(x, weight, bias)
    found = torch.nn.functional.embedding(torch.tensor([1, 1, 5]), rows, sparse=True)
    return torch.autograd.grad(found.sum(), bias)[0]


@pytest.mark.parametrize("fast", [False, True])
def test_gradients_and_results_in_other_forms(monkeypatch, product, fast):
    """A sparse gradient, and hooks that keep ReLU's result in another dtype."""
    if not fast:
        monkeypatch.setattr(_fast_path, "extension", lambda *args: None)
    x, weight, bias = normal(80, 40), normal(24, 40, seed=1), normal(24, seed=2).requires_grad_()
    torch.testing.assert_close(sparse_gradient(x, weight, bias), torch.full((24,), 3.0))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t)
    with hooks:
        out = linear(x, weight, bias, activation="relu")
    (found,) = torch.autograd.grad(out.sum(), bias)
    torch.testing.assert_close(found, (out > 0).sum(0).float())


def test_side_by_side_arguments_are_checked():
    x = normal(3, 7, 48)
    q, k, v = split_heads(x, 3, 2, True)
    out, lse = trifuse.scaled_dot_product_attention(q, k, v, return_lse=True)
    absent = (None,) * 5

    def backward(*tensors: Tensor, saved: tuple[Tensor, ...] = (out, lse)) -> Any:
        return torch.ops.trifuse.attention_backward_side_by_side(
            saved[0], *tensors, *absent, *saved, 7, 7, None, None, 0.0, True
        )

    of_query, joint = backward(q, k, v)
    assert of_query.shape == (0,)
    assert joint.shape == (3, 3, 2, 7, 8)
    for tensors in ((q[..., :4], k, v), (q, k[:, :, :3], v), (q, k, v[..., :4])):
        with pytest.raises(ValueError, match="expected shape"):
            backward(*tensors)
    with pytest.raises(ValueError, match="query"):
        backward(q[:, :, :3], k, v, saved=(out[:, :, :3], lse[..., :3]))
