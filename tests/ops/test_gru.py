"""gru and rnn: results, gradients, bits that don't depend on other rows.

lstm's tests cover the rest of what the three share, and ``test_rnn`` what only an rnn has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from attention_cases import assert_equal, normal
from gru_cases import (
    KINDS,
    VARIANTS,
    Case,
    draw_case,
    eager_torch,
    record_accuracy,
    run,
    specification,
)
from lstm_cases import (
    assert_near,
    assert_same_bits,
    backend_fixture,
    kernel_fixture,
    lay_out_any,
    serving,
)
from numerics import Accuracy
from tested_kernels import KERNELS
from torch import Tensor
from torch_checks import check_forward_mode, check_vmap

from trifuse.ops._operator import SAVE_ALL, SAVE_NOTHING

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CPP = serving("gru", [kernel for kernel in KERNELS if kernel.backend == "cpp"])

kernel = kernel_fixture("gru")
backend = backend_fixture("gru")
served = backend_fixture("gru", "triton")


kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=CPP, ids=lambda kernel: kernel.name)
def cpp_kernel(request: pytest.FixtureRequest) -> Any:
    with request.param.serving():
        yield request.param


PER_ROW = ("output", "h_n", "grad_input", "grad_h0")


# Results ----------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.covering(1)
def test_many_calls(dtype, kind):
    """Errors obey the numerics rule, in each call and on average."""
    kernels = serving("gru", KERNELS)
    accuracies, random = {kernel: Accuracy(kernel.name) for kernel in kernels}, Random(0)
    for _ in range(30):
        record_accuracy(accuracies, draw_case(random, kind, dtype))
    for accuracy in accuracies.values():
        accuracy.conclude()


@kinds
@pytest.mark.parametrize("what", VARIANTS)
def test_variants(served, what, kind):
    dtypes = (torch.float32,) if served == "triton" else (torch.float32, torch.float64)
    for dtype in dtypes:
        case = Case(kind=kind, dtype=dtype, **VARIANTS[what])
        assert_near(run(case), specification(case))


@kinds
def test_no_drift_over_many_steps(kind):
    """Over 2000 steps, errors stay within twice eager torch's and don't grow."""
    case = Case(2000, 2, 3, 5, kind=kind)
    expected, eager = specification(case), eager_torch(case)
    for kernel in serving("gru", KERNELS):
        with kernel.serving():
            actual = run(case)
        for name in ("output", "grad_input", "grad_weight_hh"):
            mine, theirs = (r[name] - expected[name] for r in (actual, eager))
            assert mine.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt(), name
        error = (actual["output"] - expected["output"]).square().mean((1, 2)).sqrt()
        assert error[-200:].mean() <= 3 * error[:200].mean()


@pytest.mark.parametrize("kind", ["gru", "reset first"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_saturation(kernel, sign, dtype, kind):
    """Gates at ±80, where e^80 is near float32's limit: open or shut, never NaN."""
    case = Case(4, 2, 1, 5, kind=kind, dtype=dtype, biases=False)
    case.tensors["input"].fill_(1)
    case.tensors["weight_ih"].fill_(80 * sign)
    case.tensors["weight_hh"].zero_()
    results = run(case)
    h0 = case.tensors["h0"][0]
    # z = 1 keeps h as it is; z = 0 takes n = tanh(-80).
    wanted = (h0 if sign > 0 else torch.full_like(h0, -1)).expand(4, 2, 5)
    torch.testing.assert_close(results["output"], wanted)
    expected = specification(case)
    tolerance = 1e-2 if dtype.itemsize == 2 else 1e-5
    for name, actual in results.items():
        torch.testing.assert_close(
            actual.double(), expected[name], rtol=tolerance, atol=tolerance, msg=name
        )


@kinds
def test_the_public_functions(backend, kind):
    """Time or batch first, unbatched, one step."""
    case = Case(kind=kind)
    run, cell = case.kind.run, functools.partial(case.kind.run, name=f"{case.kind.operator}_cell")
    x, h0, (p,) = case.arguments(case.tensors)
    output, h_n = run(x, h0[0], *p)
    expected = case.kind.layer(x, h0, [p])
    assert_equal(output, expected[0])
    assert_equal(h_n, expected[1][0])
    first, last = run(x.transpose(0, 1), h0[0], *p, batch_first=True)
    assert_equal(first.transpose(0, 1), output)
    assert_equal(last, h_n)
    alone, h = run(x[:, 1], h0[0, 1], *p)
    torch.testing.assert_close((alone, h), (output[:, 1], h_n[1]))
    step = cell(x[0], h0[0], *p)
    torch.testing.assert_close(step, case.kind.torchs(x[0], h0[0], *p))
    torch.testing.assert_close(cell(x[0, 1], h0[0, 1], *p), step[1])


@kinds
@pytest.mark.parametrize(("T", "B"), [(0, 3), (4, 0), (0, 0), (1, 1)])
def test_no_steps_and_no_rows(kernel, T, B, kind):
    case = Case(T, B, kind=kind, reverse=(False, True))
    results = run(case)
    assert_near(results, specification(case))
    if T == 0:
        assert_equal(results["h_n"], case.tensors["h0"])
        assert_equal(results["grad_h0"], case.upstream[1])


@kinds
@pytest.mark.parametrize("layout", ["gaps", "offset", "swapped"])
def test_layouts_change_nothing(kernel, layout, kind):
    case, laid = (Case(kind=kind, **VARIANTS["two directions, lengths"]) for _ in range(2))
    laid.tensors = {n: lay_out_any(t, layout) for n, t in case.tensors.items()}
    laid.upstream = [lay_out_any(g, layout) for g in case.upstream]
    compare = assert_near if kernel.backend == "eager" else assert_same_bits
    compare(run(laid), run(case))


@kinds
@pytest.mark.parametrize("what", ["lengths", "lengths, reverse", "two directions, lengths"])
def test_padding_does_not_exist(kernel, what, kind):
    case, poisoned = (Case(kind=kind, **VARIANTS[what]) for _ in range(2))
    past = torch.arange(5)[:, None, None] >= case.lengths[:, None]
    poisoned.tensors["input"] = case.tensors["input"].masked_fill(past, math.nan)
    poisoned.upstream[0] = case.upstream[0].masked_fill(past, math.nan)
    results = run(poisoned)
    assert_same_bits(results, run(case))
    for name in ("output", "grad_input"):
        assert results[name].masked_select(past).eq(0).all()


# Bits that do not depend on other rows ----------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_one_step_of_few_rows(cpp_kernel, dtype, kind):
    """The layer's and the cell's op read weights unpacked for few rows; the bits stay the same."""
    case = Case(2, 11, 150, 51, kind=kind, dtype=dtype)
    run, cell = case.kind.run, f"{case.kind.operator}_cell"
    x, h0, (p,) = case.arguments(case.tensors)
    output, _ = run(x, h0[0], *p)
    for count in (1, 5, 8, 9):
        assert_equal(run(x[:1, :count], h0[0, :count], *p)[0], output[:1, :count])
        assert_equal(run(x[0, :count], h0[0, :count], *p, name=cell), output[0, :count])


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
@pytest.mark.covering
def test_some_steps_of_few_rows_of_a_large_layer(cpp_kernel, dtype, kind):
    """By its size, the rows, the steps and the CPU, W_hh is packed or read in place; same bits."""
    case = Case(7, 9, 3, 1100, kind=kind, dtype=dtype)
    run = case.kind.run
    x, h0, (p,) = case.arguments(case.tensors)
    output, _ = run(x, h0[0], *p)
    for steps, count in ((2, 8), (3, 1), (6, 3), (7, 2)):
        few, _ = run(x[:steps, :count], h0[0, :count], *p)
        assert_equal(few, output[:steps, :count])


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reverse", [(False,), (True,), (False, True)], ids=str)
def test_ragged_is_a_loop_over_sequences(cpp_kernel, reverse, dtype, kind):
    lengths = (4, 0, 6, 1, 6, 2)
    case = Case(6, 6, 5, 19, kind=kind, dtype=dtype, lengths=lengths, reverse=reverse)
    results = run(case)
    for b, length in enumerate(lengths):
        alone = case.rows(slice(b, b + 1)).steps(slice(length))
        alone.lengths = None
        expected = run(alone)
        for name in PER_ROW:
            actual = results[name][:, b : b + 1]
            actual = actual[:length] if name in ("output", "grad_input") else actual
            assert_equal(actual, expected[name], f"{name} of row {b}")


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_threads(cpp_kernel, dtype, kind):
    """A row's bits depend neither on other rows nor on the number of threads."""
    # A one-gate cell needs more units until its rows are worth more than one thread.
    units = 35 if KINDS[kind].operator == "gru" else 67
    case = Case(4, 21, 5, units, kind=kind, dtype=dtype)
    results = run(case)
    alone = run(case.rows(slice(7, 8)))
    for name in PER_ROW:
        assert_equal(alone[name], results[name][:, 7:8], name)
    for threads in (2, 3, 2):
        torch.set_num_threads(threads)
        assert_same_bits(run(case), results)


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_cut_in_two(cpp_kernel, dtype, kind):
    case = Case(7, 3, 5, 19, kind=kind, dtype=dtype)
    whole = run(case)
    for T1 in (0, 3, 7):
        first, then = run(case.steps(slice(T1))), case.steps(slice(T1, None))
        then.tensors["h0"] = first["h_n"]
        second = run(then)
        assert_equal(torch.cat([first["output"], second["output"]]), whole["output"])
        assert_equal(second["h_n"], whole["h_n"])
        assert_equal(second["grad_input"], whole["grad_input"][T1:])


# Transforms -------------------------------------------------------------------------------------


def call_of(case: Case) -> tuple[Callable[..., Any], list[Tensor]]:
    names = list(case.tensors)

    def call(*tensors: Tensor) -> Any:
        arguments = case.arguments(dict(zip(names, tensors, strict=True)))
        return case.kind.layer(*arguments, case.lengths, reverse=case.reverse)

    return call, [t.detach().requires_grad_() for t in case.tensors.values()]


@kinds
@pytest.mark.parametrize("what", VARIANTS)
@pytest.mark.covering
def test_gradcheck(backend, what, kind):
    options = VARIANTS[what] | ({"lengths": (3, 1)} if "lengths" in VARIANTS[what] else {})
    call, args = call_of(Case(3, 2, 2, 3, kind=kind, dtype=torch.float64, **options))
    torch.autograd.gradcheck(call, args, check_batched_grad=what == "plain")
    torch.autograd.gradgradcheck(call, args, gen_non_contig_grad_outputs=True, fast_mode=True)


@kinds
@pytest.mark.parametrize("what", ["plain", "two directions, lengths"])
@pytest.mark.covering(1)
def test_opcheck(served, what, kind):
    # Full lengths: past a row's length gates are uninitialised, and opcheck would compare them.
    full = {"lengths": (5, 5, 5)} if "lengths" in VARIANTS[what] else {}
    case = Case(kind=kind, **{**VARIANTS[what], **full})
    input, h0, parameters = case.arguments(case.tensors)
    flat, options = [t for p in parameters for t in p], list(case.kind.options(case.reverse))
    tensors = (input, h0, flat, case.lengths)
    name = case.kind.operator
    forward, backward = (
        getattr(getattr(torch.ops.trifuse, f"{name}_{way}"), served)
        for way in ("forward", "backward")
    )
    last = (SAVE_ALL,) if name == "gru" else ()
    torch.library.opcheck(forward, (*tensors, *options, *last))
    output, h_n, *gates = forward(*tensors, *options, *last)
    if name == "gru":
        assert forward(*tensors, *options, SAVE_NOTHING)[2].shape == (0,)
    every = [t is not None for t in (input, h0, *flat)]
    for upstream, wanted in (
        ((output, h_n), every),
        ((output, None), [True, *[False] * (len(every) - 1)]),
    ):
        args = (*upstream, *tensors, output, *gates, *options, wanted)
        torch.library.opcheck(backward, args)


@kinds
@pytest.mark.parametrize(
    "batched", [{"input": 0}, {"h0": 1}, {"input": 1, "weight_hh": 0}], ids=str
)
@pytest.mark.covering(1)
def test_vmap(served, batched, kind):
    case = Case(3, 2, 4, 5, kind=kind, lengths=(3, 1))
    call, args = call_of(case)
    in_dims = tuple(batched.get(n) for n in case.tensors)
    args = [
        t.detach() if d is None else normal(*t.shape[:d], 3, *t.shape[d:], seed=i)
        for i, (t, d) in enumerate(zip(args, in_dims, strict=True))
    ]

    def gradients(*a: Tensor) -> Any:
        every = tuple(range(len(a)))
        return torch.func.grad(lambda *b: call(*b)[0].sin().sum(), argnums=every)(*a)

    for function in (call, gradients):
        check_vmap(function, in_dims, args)


@kinds
@pytest.mark.covering(1)
def test_compile(served, kind):
    torch._dynamo.reset()
    case = Case(kind=kind, **VARIANTS["lengths"])
    call, args = call_of(case)

    def model(*tensors: Tensor) -> Tensor:
        return sum(t.sin().sum() for t in call(*tensors))

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(f(*args), args) for f in (compiled, model)]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), model(*args))


@kinds
def test_forward_mode(backend, kind):
    check_forward_mode(*call_of(Case(kind=kind, dtype=torch.float64)))


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(backend, dtype, kind):
    call, args = call_of(Case(kind=kind))
    cast = [t.to(dtype) if t.dim() > 1 else t for t in args]
    with torch.autocast("cpu", dtype=dtype):
        actual = call(*args)
    for a, e in zip(actual, call(*cast), strict=True):
        assert a.dtype == dtype
        assert_equal(a, e)


@kinds
def test_saved_tensors(backend, kind):
    """Saved are inputs, the output and, of a GRU, four gates per unit in the dtype of the input, or
    three if the reset gate comes first."""
    case = Case(kind=kind, dtype=torch.bfloat16)
    saved: list[Tensor] = []
    call, args = call_of(case)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output, _ = call(*args)
    known = {t.data_ptr() for t in (*args, output)}
    kept = [(tuple(t.shape), t.dtype) for t in saved if t.data_ptr() not in known]
    columns = {"gru": 4 * 6, "reset first": 3 * 6}.get(kind)
    assert kept == ([((1, 5, 3, columns), torch.bfloat16)] if columns else [])
