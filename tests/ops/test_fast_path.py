"""Plain calls of attention and dropout_add_layer_norm, which C++ checks (csrc/fast_path/)."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from attention_cases import assert_equal, normal
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse import backends
from trifuse.nn import packing
from trifuse.ops import _fast_path, lstm
from trifuse.reference import lstm as reference_lstm

pytestmark = pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
B, H, L, E = 2, 2, 5, 8
Call = Callable[..., Any]


def norm_calls(dtype: torch.dtype = torch.float32) -> Iterator[tuple[Call, list[Tensor | None]]]:
    """Calls with each of the tensors absent or present, and each of the options."""
    x, residual = (normal(3, L, E, seed=i, dtype=dtype) for i in range(2))
    vectors = [normal(E, seed=i, dtype=dtype) for i in (2, 3, 4)]

    def call(options: dict[str, Any]) -> Call:
        def norm(x: Any, residual: Any, weight: Any, bias: Any, x_bias: Any) -> Any:
            return trifuse.dropout_add_layer_norm(
                x, residual, weight, bias, x_bias=x_bias, **options
            )

        return norm

    for options in (
        {},
        {"prenorm": True},
        {"rms_norm": True, "eps": 0.1},
        {"dropout_p": 0, "eps": 1, "training": True},
        {"dropout_p": 0.5, "training": True},
        {"dropout_p": 0.5, "training": False},
        {"dropout_p": 0.5, "training": True, "prenorm": True},
    ):
        for rows, affine in itertools.product((None, residual, residual.float()), (False, True)):
            if rows is not None and rows.dtype != dtype and dtype == torch.float64:
                continue
            yield call(options), [x, rows, *(vectors if affine else [None] * 3)]
    yield call({}), [x, None, vectors[0].float() if dtype.itemsize == 2 else vectors[0], None, None]
    yield call({}), [x.transpose(0, 1), residual.transpose(0, 1), *vectors]


def attention_calls(
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Call, list[Tensor | None]]]:
    query, key, value = (normal(B, H, L, E, seed=i, dtype=dtype) for i in range(3))
    lengths = torch.tensor([L, 3])

    def call(options: dict[str, Any]) -> Call:
        def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
            return trifuse.scaled_dot_product_attention(query, key, value, mask, **options)

        return attention

    for options in (
        {},
        {"return_lse": True},
        {"is_causal": True},
        {"scale": 0.3},
        {"key_lengths": lengths},
        {"key_lengths": lengths.int()},
        {"dropout_p": 0.5},
        {"dropout_p": 0.5, "return_lse": True},
    ):
        yield call(options), [query, key, value]
    yield call({"enable_gqa": True}), [query, key[:, :1], value[:, :1]]
    yield call({}), [query, key, value, normal(B, 1, L, L, seed=4, dtype=dtype)]
    yield call({}), [query, key, value, normal(1, H, 1, L, seed=4)]
    yield call({}), [query, key, value, torch.ones(L, L).tril().bool()[None, None]]
    yield call({}), [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    yield call({"dropout_p": 0, "scale": 1}), [query, key, value]
    yield call({}), [query, key, value, torch.ones(L, L).tril().bool()]
    yield call({}), [query, key, value, normal(H, L, L, seed=4)]
    heads = [x[:, 0] for x in (query, key, value)]  # (B, L, E), a batch of one head
    yield call({"return_lse": True}), heads
    yield call({}), [*heads, normal(B, L, L, seed=4, dtype=dtype)]
    yield call({"is_causal": True}), [*heads, normal(L, seed=4, dtype=dtype)]
    yield from packed_calls(dtype)


def packed_calls(dtype: torch.dtype) -> Iterator[tuple[Call, list[Tensor | None]]]:
    """Sequences of 5 and 3 tokens, end to end; as keys of 2 and 4."""
    cu_seqlens = torch.tensor([0, 5, 8])
    queries = packing.PackedSequences(torch.arange(8), cu_seqlens, 5)
    keys = packing.PackedSequences(torch.arange(6), torch.tensor([0, 2, 6]), 4)
    query, key, value = (normal(1, H, 8, E, seed=i, dtype=dtype) for i in range(3))
    for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.5}):
        yield functools.partial(packing.attend, packed=queries, **options), [query, key, value]
    int32 = queries._replace(cu_seqlens=cu_seqlens.int())
    yield functools.partial(packing.attend, packed=int32), [query, key[:, :1], value[:, :1]]
    both = packing.CrossSequences(queries, keys)
    tokens = [x[:, :, :6] for x in (key, value)]
    yield functools.partial(packing.attend, packed=both), [query, *tokens]


def every_call(dtype: torch.dtype = torch.float32) -> list[tuple[Call, list[Tensor | None]]]:
    return [*norm_calls(dtype), *attention_calls(dtype)]


def results(call: Call, tensors: Sequence[Tensor | None], gradients: bool) -> list[Tensor]:
    """Returns a call's results and, if wanted, the gradients of each floating tensor."""
    torch.manual_seed(0)
    given = [
        None if t is None else t.detach().requires_grad_(gradients and t.is_floating_point())
        for t in tensors
    ]
    out = call(*given)
    found = list(out) if isinstance(out, tuple) else [out]
    assert [y.requires_grad for y in found] == [gradients] * len(found)
    if gradients:
        variables = [t for t in given if t is not None and t.requires_grad]
        for chosen in {(0,), tuple(range(len(found))), (len(found) - 1,)}:
            total = sum(found[i].sin().sum() for i in chosen)
            found += torch.autograd.grad(total, variables, retain_graph=True, allow_unused=True)
    found.append(torch.rand(()))  # the same seeds were drawn
    return found


class Served:
    """Counts the calls that C++ has served and those that went on to Python's checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain = self.declined = 0
        for name in ("attention", "packed_attention", "dropout_add_layer_norm"):
            function = getattr(backends._C, name)
            monkeypatch.setattr(backends._C, name, self._counted(function))

    def _counted(self, function: Call) -> Call:
        def call(*args: Any) -> Any:
            found = function(*args)
            self.plain += found is not None
            self.declined += found is None
            return found

        return call


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_the_slow_path(monkeypatch, served, dtype, gradients):
    """Results, gradients and random numbers; each call is served by C++."""
    calls = every_call(dtype)
    fast = [results(*call, gradients) for call in calls]
    assert (served.plain, served.declined) == (len(calls), 0)
    monkeypatch.setattr(_fast_path, "extension", lambda *args: None)
    for (call, tensors), actual in zip(calls, fast, strict=True):
        expected = results(call, tensors, gradients)
        for a, b in zip(actual, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_equal(a, b)
                assert a.stride() == b.stride()


_INDEX = torch.arange(L * L).view(L, L) % 3

# Each entry holds options with which an argument after the query, key and value changes the result.
ATTENTION_ARGUMENTS: dict[str, dict[str, Any]] = {
    "attn_mask": {"attn_mask": torch.ones(L, L).tril().bool()},
    "dropout_p": {"dropout_p": 0.5},
    "is_causal": {"is_causal": True},
    "scale": {"scale": 0.1},
    "enable_gqa": {"enable_gqa": True},  # changes none, as these heads are equally many
    "key_lengths": {"key_lengths": torch.tensor([L, 3])},
    "window": {"window": 1},
    "diagonal": {"is_causal": True, "diagonal": 1},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": normal(H, seed=5)},
    "relative_bias": {"relative_bias": normal(H, 2 * L - 1, seed=5)},
    "query_bias": {"query_bias": normal(B, H, L, 3, seed=5), "relative_index": _INDEX},
    "key_bias": {"key_bias": normal(B, H, L, 3, seed=5), "relative_index": _INDEX},
    "relative_index": {"relative_bias": normal(H, 3, seed=5), "relative_index": _INDEX},
    "alibi_slopes": {"alibi_slopes": normal(H, seed=5).exp()},
    "return_lse": {"return_lse": True},
}


def test_every_argument_of_attention_counts():
    """None is ignored by the fast path, which a call with an argument unknown to it must leave."""
    parameters = inspect.signature(trifuse.scaled_dot_product_attention).parameters
    assert list(ATTENTION_ARGUMENTS) == list(parameters)[3:]
    tensors = [normal(B, H, L, E, seed=i) for i in range(3)]

    def run(backend: str, **options: Any) -> Tensor:
        torch.manual_seed(0)
        with trifuse.backend(backend):
            out = trifuse.scaled_dot_product_attention(*tensors, **options)
        return torch.cat([x.flatten() for x in out]) if isinstance(out, tuple) else out.flatten()

    plain = run("auto")
    for name, options in ATTENTION_ARGUMENTS.items():
        out = run("auto", **options)
        torch.testing.assert_close(out, run("eager", **options), msg=name)
        same = out.shape == plain.shape and torch.equal(out, plain)
        assert same == (name == "enable_gqa"), name


def test_every_option_of_an_lstm_leaves_the_fast_path():
    without_effect = {"eps", "training"}  # unless there are others, or norms
    of_layers = set(reference_lstm.Options._fields) - {"reverse"}
    assert set(lstm._NO_OPTIONS) | without_effect == of_layers


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_casts_as_on_the_slow_path(monkeypatch, served, dtype, gradients):
    """In the forward; a backward under autocast computes the same, too."""

    def run(calls: list[tuple[Call, list[Tensor | None]]]) -> list[list[Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            return [results(*call, gradients) for call in calls]

    calls = every_call(dtype)
    fast = run(calls)
    assert (served.plain, served.declined) == (len(calls), 0)
    monkeypatch.setattr(_fast_path, "extension", lambda *args: None)
    for actual, expected in zip(fast, run(calls), strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_equal(a, b)
                assert (a.dtype, a.stride()) == (b.dtype, b.stride())


def plain(seed: int = 0) -> list[tuple[Call, list[Tensor]]]:
    """A plain call of each operator, with tensors that require gradients."""
    rows = normal(3, E, seed=seed, dtype=torch.float64).requires_grad_()
    heads = normal(B, H, L, E, seed=seed, dtype=torch.float64).requires_grad_()
    return [
        (lambda x: trifuse.dropout_add_layer_norm(x, x.sin()), [rows]),
        (lambda x: trifuse.scaled_dot_product_attention(x, x, x), [heads]),
    ]


class Recorded(TorchDispatchMode):
    """Lists the ops that a mode of __torch_dispatch__ sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class RecordedFunctions(TorchFunctionMode):
    """Lists the functions that a mode of __torch_function__ sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


WATCHERS: dict[str, Callable[[], Any]] = {
    "dispatch mode": Recorded,
    "function mode": RecordedFunctions,
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "default device": lambda: torch.device("cpu"),
    "another backend": lambda: trifuse.backend("eager"),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_watched_calls_are_declined(served, watcher):
    for call, tensors in plain():
        with WATCHERS[watcher]():
            call(*tensors)
    assert served.plain == 0
    for call, tensors in plain():
        call(*tensors)
    assert served.plain == 2


@pytest.mark.parametrize("mode", [Recorded, RecordedFunctions])
def test_modes_see_the_ops(mode):
    for (call, tensors), name in zip(plain(), ("dropout_add_layer_norm", "attention"), strict=True):
        with torch.no_grad(), mode() as seen:
            call(*tensors)
        assert any(f"{name}_forward" in op for op in seen.ops)


def test_transformed_calls_are_declined(served):
    """vmap, torch.func and forward-mode AD; also what they leave to their wrappers."""
    for call, (x,) in plain():
        torch.vmap(call)(torch.stack([x, x]))
        torch.func.grad(lambda x, call=call: call(x).sin().sum())(x)
        torch.func.jvp(call, (x.detach(),), (x.detach(),))
        with torch.autograd.forward_ad.dual_level():
            call(torch.autograd.forward_ad.make_dual(x, x.detach()))
        torch.func.functionalize(call)(x.detach())
    assert served.plain == 0


def test_other_tensors_are_declined(served):
    for call, (x,) in plain():
        call(x.as_subclass(Subclass))
        call(torch.ones_like(x.detach(), device="meta"))
    assert served.plain == 0
    served.declined = 0
    for call, (x,) in plain():
        call(nn.Parameter(x.detach()))
        with torch.inference_mode():
            call(x)
            call(x.clone())
    assert served.declined == 0


INVALID: list[tuple[Call, type[Exception], str]] = [
    (lambda x: trifuse.dropout_add_layer_norm(x, weight=x), ValueError, "weight"),
    (lambda x: trifuse.dropout_add_layer_norm(x, dropout_p=1.5), ValueError, "dropout_p"),
    (lambda x: trifuse.dropout_add_layer_norm(x, eps=-1.0), ValueError, "eps"),
    (lambda x: trifuse.dropout_add_layer_norm(x, training=1), TypeError, "training"),
    (lambda x: trifuse.dropout_add_layer_norm(x.int()), TypeError, "float32"),
    (lambda x: trifuse.dropout_add_layer_norm([x]), TypeError, "Tensor"),
    (
        lambda x: trifuse.scaled_dot_product_attention(x, x[..., :3], x, dropout_p=0.5),
        ValueError,
        "key",
    ),
    (
        lambda x: trifuse.scaled_dot_product_attention(x, x, x, key_lengths=torch.tensor([9, 1])),
        ValueError,
        "key_lengths",
    ),
    (
        lambda x: trifuse.scaled_dot_product_attention(x, x, x, return_lse=1),
        TypeError,
        "return_lse",
    ),
    (lambda x: trifuse.scaled_dot_product_attention(x, None, x), TypeError, "key"),
]


@pytest.mark.parametrize("number", range(len(INVALID)))
def test_python_reports_what_is_wrong(number):
    """An invalid call draws no random number."""
    call, error, name = INVALID[number]
    torch.manual_seed(0)
    with pytest.raises(error, match=name):
        call(normal(B, H, L, E))
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert drawn == torch.rand(())


def test_second_derivatives():
    for call, tensors in plain():
        assert torch.autograd.gradcheck(call, tensors)
        assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("name", ["norm", "attention"])
def test_second_derivatives_with_all_results(name):
    """Two results, a shared gradient, a mask; the gradient of one tensor at a time too."""
    if name == "norm":
        tensors = [normal(2, 3, seed=i, dtype=torch.float64) for i in range(2)]
        tensors += [normal(3, seed=i, dtype=torch.float64) for i in (2, 3)]

        def call(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
            return trifuse.dropout_add_layer_norm(x, residual, weight, bias, prenorm=True)
    else:
        tensors = [normal(1, 2, 3, 2, seed=i, dtype=torch.float64) for i in range(3)]
        tensors.append(normal(1, 1, 3, 3, seed=4, dtype=torch.float64))

        def call(*tensors: Tensor) -> Any:
            return trifuse.scaled_dot_product_attention(*tensors, return_lse=True)

    for chosen in (range(4), *([i] for i in range(4))):
        given = [t.clone().requires_grad_(i in chosen) for i, t in enumerate(tensors)]
        assert torch.autograd.gradgradcheck(call, given)


def test_batched_gradients():
    """By torch.func.vmap and by the older vmap behind is_grads_batched."""
    for call, (x,) in plain():
        out = call(x)
        upstream = torch.stack([torch.ones_like(out), out.detach().cos()])
        (batched,) = torch.autograd.grad(out, x, upstream, is_grads_batched=True, retain_graph=True)
        for each, actual in zip(upstream, batched, strict=True):
            (expected,) = torch.autograd.grad(out, x, each, retain_graph=True)
            torch.testing.assert_close(actual, expected)


def test_saved_tensors_pass_through_hooks():
    for call, (x,) in plain():
        packed: list[Tensor] = []

        def pack(t: Tensor, packed: list[Tensor] = packed) -> Tensor:
            packed.append(t)
            return t.detach().clone()

        (expected,) = torch.autograd.grad(call(x).sum(), x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = call(x)
        assert len(packed) >= 3
        assert_equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_a_checkpointed_call_is_run_again(served):
    from torch.utils.checkpoint import checkpoint

    for call, (x,) in plain():
        (expected,) = torch.autograd.grad(call(x).sum(), x)
        (actual,) = torch.autograd.grad(checkpoint(call, x, use_reentrant=False).sum(), x)
        assert served.declined == 0
        assert_equal(actual, expected)


def test_torchs_errors_in_backward():
    """A saved tensor that was changed in place; a second backward."""
    for call, (leaf,) in plain():
        x = leaf.detach().clone().requires_grad_()
        out = call(x)
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        out = call(x)
        out.sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.sum().backward()


def test_results_can_be_changed_in_place():
    """They are not views, and what autograd has saved of them is guarded."""
    for call, (x,) in plain():
        (expected,) = torch.autograd.grad(call(x).sum() * 2, x)
        if call(x).dim() == 2:  # the norm does not save its result
            assert_equal(torch.autograd.grad(call(x).mul_(2).sum(), x)[0], expected)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                call(x).mul_(2).sum().backward()


def test_profiles_and_anomalies_name_the_ops():
    for (call, (x,)), name in zip(plain(), ("dropout_add_layer_norm", "attention"), strict=True):
        with torch.profiler.profile() as profile, torch.autograd.set_detect_anomaly(True):
            call(x).sum().backward()
        seen = {event.key for event in profile.key_averages()}
        assert {f"trifuse::{name}_forward", f"trifuse::{name}_backward"} <= seen


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    _, (call, (x,)) = plain()
    with FlopCounterMode(display=False) as counter:
        call(x).sum().backward()
    assert counter.get_total_flops() == 2 * B * H * L * L * E * 2 * 7 // 2


def test_gradients_that_are_not_wanted():
    x, residual = (normal(3, E, seed=i).requires_grad_(i == 1) for i in range(2))
    out, total = trifuse.dropout_add_layer_norm(x, residual, prenorm=True)
    assert torch.autograd.grad(out.sum() * 0 + total.sum(), residual)[0].eq(1).all()
    query, key, value = (normal(B, H, L, E, seed=i).requires_grad_(i != 0) for i in range(3))
    out = trifuse.scaled_dot_product_attention(query, key, value)
    (one,) = torch.autograd.grad(out.sum(), value, retain_graph=True)
    _, both = torch.autograd.grad(out.sum(), (key, value))
    assert_equal(one, both)


def test_compiled_autograd(fresh_dynamo):
    from torch._dynamo import compiled_autograd

    for call, (x,) in plain():
        (expected,) = torch.autograd.grad(call(x).sin().sum(), x)
        out = call(x).sin().sum()
        with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
            out.backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, expected)


def test_threads_run_at_once():
    """The GIL is released while an op runs; results do not depend on the thread."""
    for call, (x,) in plain():
        expected = call(x)
        with ThreadPoolExecutor(4) as pool:
            for actual in pool.map(call, [x] * 16):
                assert_equal(actual, expected)
