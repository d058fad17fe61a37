"""lstm: results, padding, and bits that depend neither on other rows nor on where T is cut."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
from attention_cases import SEED, assert_equal, drawn_seed
from hypothesis import given, settings
from hypothesis import strategies as st
from lstm_cases import (
    CLIPS,
    VARIANTS,
    Case,
    assert_near,
    assert_same_bits,
    backend_fixture,
    draw_case,
    draws,
    kernel_fixture,
    laid_out,
    make,
    run,
    serving,
    specification,
)
from tested_kernels import KERNELS, Kernel
from torch import Tensor

import trifuse
from trifuse.ops import _modes, _recurrent_fast

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CPP = serving("lstm", [kernel for kernel in KERNELS if kernel.backend == "cpp"])

kernel = kernel_fixture("lstm")
backend = backend_fixture("lstm")


@pytest.fixture(params=CPP, ids=lambda kernel: kernel.name)
def cpp_kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with request.param.serving():
        yield request.param


def rows(case: Case, which: slice) -> Case:
    """The same call for some of the rows."""
    return dataclasses.replace(
        case,
        input=case.input[:, which],
        h0=None if case.h0 is None else case.h0[:, which],
        c0=None if case.c0 is None else case.c0[:, which],
        lengths=None if case.lengths is None else case.lengths[which],
        grad_output=case.grad_output[:, which],
        grad_h_n=case.grad_h_n[:, which],
        grad_c_n=case.grad_c_n[:, which],
    )


def steps(case: Case, which: slice) -> Case:
    return dataclasses.replace(case, input=case.input[which], grad_output=case.grad_output[which])


# Results with the batch in dimension 1; gradients of parameters are sums over it.
PER_ROW = ("output", "h_n", "c_n", "grad_input", "grad_h0", "grad_c0")


# Results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.covering
def test_variants(kernel, what, dtype):
    case = make(**VARIANTS[what], dtype=dtype)
    assert_near(run(case), specification(case))


@pytest.mark.parametrize("what", VARIANTS)
def test_options_make_a_difference(what):
    """Each option changes the results; otherwise a variant would test nothing."""
    case = make(**VARIANTS[what])
    numbers = {k: v for k, v in case.options.items() if k not in ("training", "coupled") and v}
    for name, value in numbers.items():
        if name == "recurrent_dropout" and not case.options.get("training"):
            continue
        without = {**case.options, name: None if name in CLIPS else type(value)()}
        results = specification(dataclasses.replace(case, options=without))
        assert not torch.equal(results["output"], specification(case)["output"]), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_direction_is_the_public_function(backend, dtype):
    case = make(dtype=dtype, **{**VARIANTS["everything"], "reverse": (True,)})
    output, h_n, c_n = (run(case)[name] for name in ("output", "h_n", "c_n"))
    tensors = case.parameters[0]._asdict()
    torch.manual_seed(SEED)
    actual = trifuse.lstm(
        case.input,
        (case.h0[0], case.c0[0]),
        lengths=case.lengths,
        reverse=True,
        **tensors,
        **case.options,
    )
    for a, e in zip((actual[0], *actual[1]), (output, h_n[0], c_n[0]), strict=True):
        assert_equal(a, e)


def test_shapes_of_batches(backend):
    """Time or batch first; no batch at all; both, either or neither of the initial states."""
    case = make(B=3)
    p = [t for t in case.parameters[0] if t is not None]
    h0, c0 = case.h0[0], case.c0[0]
    output, (h_n, c_n) = trifuse.lstm(case.input, (h0, c0), *p)
    assert output.is_contiguous()
    first, states = trifuse.lstm(case.input.transpose(0, 1), (h0, c0), *p, batch_first=True)
    for a, e in zip((first.transpose(0, 1), *states), (output, h_n, c_n), strict=True):
        assert_equal(a, e)
    alone, (h, c) = trifuse.lstm(case.input[:, 1], (h0[1], c0[1]), *p)
    torch.testing.assert_close((alone, h, c), (output[:, 1], h_n[1], c_n[1]))
    zeros = torch.zeros_like(h0)
    expected = trifuse.lstm(case.input, (zeros, zeros), *p)[0]
    assert_equal(trifuse.lstm(case.input, None, *p)[0], expected)
    for h, c in ((None, None), (h0, None), (None, c0)):
        full = (zeros if h is None else h, zeros if c is None else c)
        expected = trifuse.lstm(case.input, full, *p)[0]
        assert_equal(trifuse.lstm(case.input, (h, c), *p)[0], expected)


def test_cell(backend):
    case = make(1)
    p = [t for t in case.parameters[0] if t is not None]
    h0, c0 = case.h0[0], case.c0[0]
    _, expected = trifuse.lstm(case.input, (h0, c0), *p)
    actual = trifuse.lstm_cell(case.input[0], (h0, c0), *p)
    for a, e in zip(actual, expected, strict=True):
        assert_equal(a, e)
    torch.testing.assert_close(actual, torch.lstm_cell(case.input[0], (h0, c0), *p))
    alone = trifuse.lstm_cell(case.input[0, 1], (h0[1], c0[1]), *p)
    torch.testing.assert_close(alone, tuple(t[1] for t in actual))
    torch.testing.assert_close(
        trifuse.lstm_cell(case.input[0], None, *p[:2]),
        torch.lstm_cell(case.input[0], (h0 * 0, c0 * 0), *p[:2]),
    )


def results_and_gradients(
    function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    results = function(*leaves)
    total = sum((i + t.float()).sin().sum() for i, t in enumerate(results))
    grads = torch.autograd.grad(total, [t for t in leaves if t is not None])
    return [*results, *grads]


def assert_fast_path_is_the_slow_path(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
) -> None:
    """The plain op and the long way agree bit for bit, with gradients and without."""
    with torch.no_grad():
        alone = function(*tensors)
    actual = results_and_gradients(function, tensors)
    with monkeypatch.context() as patch:
        patch.setattr(_recurrent_fast._fast_path, "extension", lambda: None)
        expected = results_and_gradients(function, tensors)
    for a, e in zip([*alone, *actual], [*expected[: len(alone)], *expected], strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert_equal(a, e)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_step_gives_the_bits_of_the_long_way(cpp_kernel, monkeypatch, dtype):
    """With and without either state and biases, with other strides, on many rows, one or none."""

    def step(x: Tensor, h0: Any, c0: Any, *p: Any) -> tuple[Tensor, ...]:
        return trifuse.lstm_cell(x, (h0, c0), *p)

    for B, I, H in ((3, 20, 19), (1, 5, 64), (0, 4, 3)):  # noqa: E741
        case = make(1, B, I, H, dtype=dtype)
        weights, biases = case.parameters[0][:2], case.parameters[0][2:4]
        x, h0, c0 = case.input[0], case.h0[0], case.c0[0]
        columns = [t.t().contiguous().t() for t in weights]
        narrow, wide = c0.to(dtype), h0.t().contiguous().t()
        for states in ((None, None), (h0, None), (None, c0), (h0, narrow), (wide, c0)):
            for p in ((*weights, *biases), (*weights, None, biases[1]), columns):
                assert_fast_path_is_the_slow_path(monkeypatch, step, [x, *states, *p])
        if B:
            assert_fast_path_is_the_slow_path(monkeypatch, step, [x[0], h0[0], c0[0], *weights])


@pytest.mark.parametrize("what", ["plain", "projection", "two directions"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_layer_gives_the_bits_of_the_long_way(cpp_kernel, monkeypatch, dtype, what):
    for T, B in ((1, 1), (3, 2), (5, 9)):
        case = make(T, B, dtype=dtype, **VARIANTS[what])
        names = list(case.tensors)

        def layer(*tensors: Any, case: Case = case, names: list[str] = names) -> Any:
            of = case.of(dict(zip(names, tensors, strict=True)))
            return trifuse.ops.lstm.layer(*of, reverse=case.reverse)

        assert_fast_path_is_the_slow_path(monkeypatch, layer, list(case.tensors.values()))


def test_which_calls_are_plain(monkeypatch):
    """Calls are plain except under autocast, another backend, vmap or forward-mode AD."""
    if not CPP:
        pytest.skip("the C++ extension is not built")
    slow_path: list[None] = []
    check = trifuse.ops.lstm.check_options

    def watched(*args: Any, **options: Any) -> Any:
        slow_path.append(None)
        return check(*args, **options)

    monkeypatch.setattr(trifuse.ops.lstm, "check_options", watched)
    case = make(1, dtype=torch.bfloat16, vectors=torch.float32)
    x, h0, c0, p = case.input[0], case.h0[0], case.c0[0], case.parameters[0][:4]
    leaf = x.clone().requires_grad_()

    def plain(x: Tensor = x) -> bool:
        slow_path.clear()
        results = trifuse.lstm_cell(x, (h0, c0), *p)
        by_step = not slow_path
        slow_path.clear()
        layer = trifuse.ops.lstm.layer(x[None], h0[None], c0[None], case.parameters)
        assert by_step is not bool(slow_path)
        if not _modes.transform_active():
            assert results[0].requires_grad == layer[0].requires_grad == x.requires_grad
        return by_step

    assert plain()
    assert plain(leaf)
    with torch.no_grad():
        trifuse.lstm_cell(leaf, (h0, c0), *p)
        assert not slow_path
    with torch.autocast("cpu", torch.float16):
        assert not plain()
    with trifuse.backend("eager"):
        assert not plain()
    torch.func.vmap(lambda t: trifuse.lstm_cell(t, (h0[0], c0[0]), *p))(x)
    assert slow_path
    with torch.autograd.forward_ad.dual_level():
        assert not plain()


@pytest.mark.parametrize("vectors", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES[1:3])
def test_dtypes_of_results(kernel, dtype, vectors):
    """c_n is float32; each gradient has the dtype of its tensor."""
    case = make(dtype=dtype, vectors=vectors, **VARIANTS["everything"])
    for c0 in (case.c0, case.c0.to(dtype)):
        results = run(dataclasses.replace(case, c0=c0))
        assert results["c_n"].dtype == torch.float32
        assert results["output"].dtype == results["h_n"].dtype == dtype
        tensors = dataclasses.replace(case, c0=c0).tensors
        assert {n: results[f"grad_{n}"].dtype for n in tensors} == {
            n: t.dtype for n, t in tensors.items()
        }


@pytest.mark.parametrize("layout", ["gaps", "offset", "swapped", "expanded", "negated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_change_nothing(kernel, layout, dtype):
    # Eager results are equal up to rounding, which layer norm of equal numbers magnifies.
    norm = layout != "expanded" or kernel.backend != "eager"
    case = make(dtype=dtype, **VARIANTS["everything"] | {"norm": norm})
    if layout == "expanded":  # repeats its first entry, so the dense tensors have to do so too
        dense = {n: t[:1].expand(t.shape).clone() for n, t in case.tensors.items()}
        case = case.with_tensors(dense)
        upstream: dict[str, Any] = {
            n: getattr(case, n)[:1].expand(getattr(case, n).shape).clone()
            for n in ("grad_output", "grad_h_n", "grad_c_n")
        }
        case = dataclasses.replace(case, **upstream)
    results = run(laid_out(case, lambda: layout))
    assert all(t.is_contiguous() for t in results.values())
    compare = assert_near if kernel.backend == "eager" else assert_same_bits
    compare(results, run(case))


def test_upstream_gradients_expanded_from_one_number(kernel):
    case = make()
    upstream = ("grad_output", "grad_h_n", "grad_c_n")
    expanded = {n: torch.ones(()).expand(getattr(case, n).shape) for n in upstream}
    dense = {n: torch.ones(getattr(case, n).shape) for n in upstream}
    assert_near(run(dataclasses.replace(case, **expanded)), run(dataclasses.replace(case, **dense)))


@pytest.mark.parametrize("what", ["plain", "everything", "two directions", "layer norm"])
@pytest.mark.parametrize(("T", "B"), [(0, 3), (4, 0), (0, 0), (1, 1)])
def test_no_steps_and_no_rows(kernel, what, T, B):
    """With T = 0 the states and their gradients pass through unchanged."""
    options = VARIANTS[what]
    if "lengths" in options:
        options = {**options, "lengths": [T] * B}
    case = make(T=T, B=B, **options)
    results = run(case)
    assert_near(results, specification(case))
    if T == 0:
        assert_equal(results["h_n"], case.h0)
        assert_equal(results["c_n"], case.c0)
        assert_equal(results["grad_h0"], case.grad_h_n)
        assert_equal(results["grad_c0"], case.grad_c_n)
    if T == 0 or B == 0:
        for name, t in results.items():
            if "weight" in name or "bias" in name:
                assert t.eq(0).all(), name


def test_inputs_are_not_modified(kernel):
    case = make(**VARIANTS["everything"])
    tensors = [*case.tensors.values(), case.lengths, case.grad_output, case.grad_c_n]
    before = [(t.clone(), t._version) for t in tensors]
    run(case)
    for t, (value, version) in zip(tensors, before, strict=True):
        assert_equal(t, value)
        assert t._version == version


def test_results_are_nobody_elses_memory(kernel):
    """A final state is no view of the initial one; equal gradients are two tensors."""
    case = make(T=0)
    leaves = {n: t.clone().requires_grad_() for n, t in case.tensors.items()}
    leaf = case.with_tensors(leaves)
    p = [t for t in leaf.parameters[0] if t is not None]
    with torch.no_grad():
        _, (h_n, c_n) = trifuse.lstm(leaf.input, (leaf.h0[0], leaf.c0[0]), *p)
    assert h_n.data_ptr() != leaf.h0.data_ptr()
    assert c_n.data_ptr() != leaf.c0.data_ptr()
    case = make()
    leaves = {n: t.clone().requires_grad_() for n, t in case.tensors.items()}
    leaf = case.with_tensors(leaves)
    p = [t for t in leaf.parameters[0] if t is not None]
    output, _ = trifuse.lstm(leaf.input, None, *p)
    output.sin().sum().backward()
    assert_equal(p[2].grad, p[3].grad)
    p[2].grad.zero_()
    assert p[3].grad.ne(0).any()


# Lengths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["plain", "everything in evaluation", "layer norm", "coupled"])
@pytest.mark.parametrize("reverse", [(False,), (True,), (False, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.covering
def test_ragged_is_a_loop_over_sequences(cpp_kernel, what, reverse, dtype):
    """Bit for bit, each sequence alone and at its own length."""
    lengths = (4, 0, 6, 1, 6, 2)
    options = {**VARIANTS[what], "lengths": lengths, "reverse": reverse}
    case = make(6, len(lengths), 5, 19, dtype=dtype, **options)
    results = run(case)
    for b, length in enumerate(lengths):
        alone = steps(rows(case, slice(b, b + 1)), slice(length))
        alone = run(dataclasses.replace(alone, lengths=None))
        for name in PER_ROW:
            actual = results[name][:, b : b + 1]
            if name in ("output", "grad_input"):
                assert actual[length:].eq(0).all(), name
                actual = actual[:length]
            assert_equal(actual, alone[name], f"{name} of row {b}")


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("what", ["lengths", "everything", "two directions, lengths"])
def test_padding_does_not_exist(kernel, what, poison):
    """Values in the padding and in its upstream gradient reach no result."""
    case = make(**VARIANTS[what])
    past = torch.arange(len(case.input))[:, None, None] >= case.lengths[:, None]
    poisoned = dataclasses.replace(
        case,
        input=case.input.masked_fill(past, poison),
        grad_output=case.grad_output.masked_fill(past, poison),
    )
    results = run(poisoned)
    assert_same_bits(results, run(case))
    assert results["output"].masked_select(past).eq(0).all()
    assert results["grad_input"].masked_select(past).eq(0).all()


@pytest.mark.parametrize("units", [5, 16, 33])
def test_an_infinite_state_saturates_gates_as_in_the_formula(kernel, units):
    """It gives no NaN, whether or not the units fill a block."""
    case = make(3, 2, 4, units)
    case.h0[:, 0, 0] = float("inf")
    actual = run(case)
    with trifuse.backend("eager"):
        expected = run(case)
    for name in ("output", "h_n", "c_n"):
        assert actual[name].isfinite().all(), name
        assert expected[name].isfinite().all(), name


@pytest.mark.parametrize("recompute", [False, True])
def test_padding_does_not_exist_in_second_derivatives(backend, recompute):
    case = make(dtype=torch.float64, **VARIANTS["lengths, reverse"])
    past = torch.arange(len(case.input))[:, None, None] >= case.lengths[:, None]

    def penalty(input: Tensor) -> tuple[Tensor, ...]:
        tensors = {
            n: t.clone().requires_grad_() for n, t in (case.tensors | {"input": input}).items()
        }
        leaf = case.with_tensors(tensors)
        p = [t for t in leaf.parameters[0] if t is not None]
        output, _ = trifuse.lstm(
            leaf.input, None, *p, lengths=case.lengths, reverse=True, recompute=recompute
        )
        first = torch.autograd.grad(output.square().sum(), p, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [leaf.input, *p])

    poisoned = penalty(case.input.masked_fill(past, NAN))
    for actual, expected in zip(poisoned, penalty(case.input), strict=True):
        assert_equal(actual, expected)


def test_lengths_in_int32(backend):
    case = make(**VARIANTS["lengths"])
    narrow = dataclasses.replace(case, lengths=case.lengths.int())
    assert_same_bits(run(narrow), run(case))


# Bits that do not depend on other rows ----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "what", ["plain", "both clips", "two directions, lengths", "layer norm", "recompute"]
)
def test_a_row_does_not_depend_on_the_others(cpp_kernel, what, dtype):
    """A row has the same bits alone, among others, and beside NaN."""
    options = VARIANTS[what]
    B = 21
    if "lengths" in options:
        options = {**options, "lengths": [b % 5 for b in range(B)]}
    case = make(4, B, 5, 35, dtype=dtype, **options)
    results = run(case)
    torch.set_num_threads(2)
    for part in (slice(0, 1), slice(7, 8), slice(3, 20)):
        alone = run(rows(case, part))
        poisoned = {
            n: torch.full_like(getattr(case, n), NAN)
            for n in ("input", "h0", "c0", "grad_output", "grad_h_n", "grad_c_n")
        }
        for n, t in poisoned.items():
            t[:, part] = getattr(case, n)[:, part]
        beside_nan = run(dataclasses.replace(case, **poisoned))
        for name in PER_ROW:
            assert_equal(alone[name], results[name][:, part], name)
            assert_equal(beside_nan[name][:, part], results[name][:, part], name)


def test_the_first_rows_draw_the_same_whatever_follows(cpp_kernel):
    case = make(**{**VARIANTS["everything"], "B": 9, "lengths": [5] * 9})
    results, alone = run(case), run(rows(case, slice(0, 4)))
    for name in PER_ROW:
        assert_equal(alone[name], results[name][:, :4], name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_and_any_number_of_threads(dtype):
    """Includes gradients summed over rows, and repeats on as many threads to show races."""

    @settings(max_examples=settings.default.max_examples // 10)
    @given(st.randoms(use_true_random=False))
    def call(random: Random) -> None:
        case = draw_case(random, dtype)
        for kernel in CPP[-1:]:
            with kernel.serving():
                torch.set_num_threads(1)
                alone = run(case)
                for threads in (2, 3, 2):
                    torch.set_num_threads(threads)
                    assert_same_bits(run(case), alone)

    call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["plain", "projection", "layer norm", "two directions"])
def test_threads_share_many_units(cpp_kernel, what, dtype):
    case = make(6, 10, 40, 200, dtype=dtype, **VARIANTS[what])
    torch.set_num_threads(1)
    expected = run(case)
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert_same_bits(run(case), expected)


@pytest.mark.parametrize("what", ["plain", "both clips", "peephole", "layer norm", "coupled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_cut_in_two(cpp_kernel, what, dtype):
    """run(T1), then run(T2) from its states, is run(T1 + T2), bit for bit. c_n isn't rounded."""
    case = make(7, 3, 5, 19, dtype=dtype, **VARIANTS[what])
    for T1 in (0, 1, 4, 7):
        whole = run(case)
        first = run(steps(case, slice(T1)))
        then = dataclasses.replace(steps(case, slice(T1, None)), h0=first["h_n"], c0=first["c_n"])
        second = run(then)
        assert_equal(torch.cat([first["output"], second["output"]]), whole["output"])
        for name in ("h_n", "c_n"):
            assert_equal(second[name], whole[name], name)
        assert_equal(second["grad_input"], whole["grad_input"][T1:], "grad_input")


def test_a_ragged_sequence_cut_in_two(cpp_kernel):
    lengths = torch.tensor([7, 2, 0, 4, 5])
    case = make(7, 5, 5, 19, lengths=lengths.tolist(), **VARIANTS["both clips"])
    whole = run(case)
    first = run(dataclasses.replace(steps(case, slice(4)), lengths=lengths.clamp(max=4)))
    then = dataclasses.replace(steps(case, slice(4, None)), h0=first["h_n"], c0=first["c_n"])
    second = run(dataclasses.replace(then, lengths=(lengths - 4).clamp(min=0)))
    assert_equal(torch.cat([first["output"], second["output"]]), whole["output"])
    for name in ("h_n", "c_n"):
        assert_equal(second[name], whole[name], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["plain", "projection", "coupled", "layer norm"])
@pytest.mark.covering
def test_one_step_of_few_rows(cpp_kernel, what, dtype):
    """Few rows read weights unpacked, in whole and partial blocks; the bits stay the same."""
    for I, H in ((5, 19), (150, 48), (33, 147)):  # noqa: E741
        projection = {"projection": H - 30 if H > 30 else 7} if what == "projection" else {}
        case = make(2, 11, I, H, dtype=dtype, **VARIANTS[what] | projection)
        results = run(case)
        for count in (1, 2, 5, 8, 9):
            few = run(rows(steps(case, slice(1)), slice(count)))
            assert_equal(few["output"], results["output"][:1, :count])


@torch.no_grad()
def test_one_step_of_a_layer_larger_than_a_cache(cpp_kernel):
    """Weights larger than a cache are packed for shorter chains of multiply-adds."""
    case = make(2, 9, 3, 800, projection=780)
    output, _ = trifuse.lstm(case.input, (case.h0[0], case.c0[0]), *case.parameters[0][:5])
    states = (case.h0[0, :3], case.c0[0, :3])
    few, _ = trifuse.lstm(case.input[:1, :3], states, *case.parameters[0][:5])
    assert_equal(few, output[:1, :3])


@pytest.mark.parametrize("what", ["plain", "projection", "coupled", "layer norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
@pytest.mark.covering
def test_some_steps_of_few_rows_of_a_large_layer(cpp_kernel, what, dtype):
    """By its size, the rows, the steps and the CPU, W_hh is packed or read in place; same bits."""
    for H, T in ((600, 8), (1100, 18)):  # in float32 W_hh has more than 2 MiB, and more than 16
        projection = {"projection": H - 70} if what == "projection" else {}
        case = make(T, 9, 3, H, dtype=dtype, **VARIANTS[what] | projection)
        results = run(case)
        for steps_, count in ((1, 9), (2, 8), (3, 1), (6, 3), (7, 8), (16, 2), (18, 1)):
            if steps_ <= T:
                few = run(rows(steps(case, slice(steps_)), slice(count)))
                assert_equal(few["output"], results["output"][:steps_, :count])


@pytest.mark.parametrize("what", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_directions_are_two_calls(cpp_kernel, what, dtype):
    """Bit for bit, except random draws and the input's gradient, which sums both directions."""
    both = make(**{**VARIANTS[what], "reverse": (False, True)}, dtype=dtype)
    both = dataclasses.replace(both, options={**both.options, "training": False})
    results, R = run(both), both.parameters[0].weight_hh.shape[1]
    for d, reverse in enumerate(both.reverse):
        one = dataclasses.replace(
            both,
            h0=None if both.h0 is None else both.h0[d : d + 1],
            c0=None if both.c0 is None else both.c0[d : d + 1],
            parameters=both.parameters[d : d + 1],
            reverse=(reverse,),
            grad_output=both.grad_output[..., d * R : (d + 1) * R],
            grad_h_n=both.grad_h_n[d : d + 1],
            grad_c_n=both.grad_c_n[d : d + 1],
        )
        alone = run(one)
        assert_equal(alone["output"], results["output"][..., d * R : (d + 1) * R], "output")
        for name in ("h_n", "c_n", *(f"grad_{n}" for n in ("h0", "c0") if n in one.tensors)):
            assert_equal(alone[name], results[name][d : d + 1], name)
        for name in one.tensors:
            if name not in ("input", "h0", "c0"):
                twin = f"grad_{name}" + ("_reverse" if d else "")
                assert_equal(alone[f"grad_{name}"], results[twin], twin)


# Gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["everything", "plain", "recompute", "lengths, reverse"])
def test_gradients_asked_for_one_by_one(kernel, what):
    """Each gradient alone, all but one, and all: the same bits."""
    case = make(**VARIANTS[what])
    everything = run(case)
    names = list(case.tensors)
    for wanted in [[n] for n in names] + [[n for n in names if n != m] for m in names]:
        torch.manual_seed(SEED)
        leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in case.tensors.items()}
        input, h0, c0, parameters = case.of(leaves)
        outputs = trifuse.ops.lstm.layer(
            input,
            h0,
            c0,
            parameters,
            case.lengths,
            reverse=case.reverse,
            recompute=case.recompute,
            **case.options,
        )
        upstream = (case.grad_output, case.grad_h_n, case.grad_c_n)
        grads = torch.autograd.grad(outputs, [leaves[n] for n in wanted], upstream)
        for n, grad in zip(wanted, grads, strict=True):
            assert_equal(grad, everything[f"grad_{n}"], n)


@pytest.mark.parametrize("which", [c for n in (1, 2) for c in itertools.combinations(range(3), n)])
def test_some_outputs_have_no_gradient(kernel, which):
    """A missing upstream gradient counts as zeros."""
    case = make(**VARIANTS["everything"])
    names = ("grad_output", "grad_h_n", "grad_c_n")
    zeros: dict[str, Any] = {
        name: torch.zeros_like(getattr(case, name))
        for i, name in enumerate(names)
        if i not in which
    }
    expected = run(dataclasses.replace(case, **zeros))
    torch.manual_seed(SEED)
    leaves = {n: t.detach().requires_grad_() for n, t in case.tensors.items()}
    outputs = trifuse.ops.lstm.layer(
        *case.of(leaves), case.lengths, reverse=case.reverse, **case.options
    )
    grads = torch.autograd.grad(
        [outputs[i] for i in which], list(leaves.values()), [getattr(case, names[i]) for i in which]
    )
    for n, grad in zip(leaves, grads, strict=True):
        assert (grad == expected[f"grad_{n}"]).all(), n


def test_a_backward_can_be_run_again(kernel):
    case = make(**VARIANTS["everything"])
    leaves = {n: t.detach().requires_grad_() for n, t in case.tensors.items()}
    outputs = trifuse.ops.lstm.layer(
        *case.of(leaves), case.lengths, reverse=case.reverse, **case.options
    )
    total = sum(o.sin().sum() for o in outputs)
    first = torch.autograd.grad(total, list(leaves.values()), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(total, list(leaves.values())), strict=True):
        assert_equal(a, b)


def test_no_gradient_without_grad_mode(backend):
    case = make()
    expected = run(case)["output"]
    leaves = {n: t.detach().requires_grad_() for n, t in case.tensors.items()}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output, *_ = trifuse.ops.lstm.layer(*case.of(leaves))
        assert not output.requires_grad
        assert_equal(output, expected)


def keep_in(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    return pack


@pytest.mark.parametrize(
    "what", ["plain", "two directions", "layer norm", "coupled", "projection", "both clips"]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_saved(backend, what, recompute):
    """Saved are inputs, the output, cells in float32, gates unless recomputed, and with clips marks
    of the elements that were clipped.

    With layer normalisation, C++ saves the products that it normalises, in float32, instead of the
    gates. C++ packs 16 marks into an int16.
    """
    case = make(dtype=torch.bfloat16, **VARIANTS[what])
    leaves = {n: t.detach().requires_grad_() for n, t in case.tensors.items()}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep_in(saved), lambda t: t):
        output, *_ = trifuse.ops.lstm.layer(
            *case.of(leaves), reverse=case.reverse, recompute=recompute, **case.options
        )
    known = {t.data_ptr() for t in (*leaves.values(), output) if t.numel()}
    kept = [(tuple(t.shape), t.dtype) for t in saved if t.data_ptr() not in known]
    (T, B, _), D = case.input.shape, len(case.reverse)
    gates, H = case.parameters[0].weight_ih.shape[0], case.c0.shape[2]
    shape, dtype = (D, T, B, gates), torch.bfloat16
    if backend == "cpp" and what == "layer norm":
        shape, dtype = (D, T, B, 2 * gates), torch.float32
    first = ((0,), torch.bfloat16) if recompute else (shape, dtype)
    clipped: tuple[int, ...] = (0,)
    if what == "both clips":
        columns = (H, case.h0.shape[2])
        clipped = (D, T, B, sum(-(-n // 16) if backend == "cpp" else n for n in columns))
    marks = torch.int16 if backend == "cpp" else torch.bool
    assert kept == [first, ((D, T, B, H), torch.float32), (clipped, marks)]


# Randomness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [(False,), (True,), (False, True)], ids=str)
@pytest.mark.parametrize("p", [0.001, 0.3, 0.9])
def test_zoneout_draws_as_the_specification(kernel, p, reverse):
    """With the input gate open and the forget gate shut, c shows whether any step changed it."""
    T, B, H = 4, 3, 11
    case = make(T, B, 1, H, reverse=reverse, lengths=(4, 2, 3), zoneout_c=p, training=True)
    bias = torch.tensor([40.0, -40.0, 40.0, 40.0]).repeat_interleave(H)
    flat = tuple(
        q._replace(
            weight_ih=torch.zeros(4 * H, 1),
            weight_hh=torch.zeros(4 * H, H),
            bias_ih=bias,
            bias_hh=None,
        )
        for q in case.parameters
    )
    case = dataclasses.replace(case, parameters=flat, c0=torch.zeros_like(case.c0))
    results = run(case)
    for d in range(len(reverse)):
        keep = draws(case, d).keep_c
        for b in range(B):
            # c is 1 once a step has changed it.
            changed = keep[: case.lengths[b], b].any(0)
            assert_equal(results["c_n"][d, b], changed.float())


def test_zoneout_leaves_bits_as_they_are(kernel):
    case = make(1, 2, 3, 50, zoneout_h=0.5, zoneout_c=0.5, training=True)
    results, drawn = run(case), draws(case, 0)
    for name, first, keep in (("h_n", case.h0, drawn.keep_h), ("c_n", case.c0, drawn.keep_c)):
        assert_equal(results[name].masked_select(~keep), first.masked_select(~keep), name)
        assert results[name].masked_select(keep).ne(first.masked_select(keep)).all()


def test_recurrent_dropout_is_one_draw_for_all_steps(kernel):
    """A unit of h that is dropped reaches no gate at any step: its column has no gradient."""
    case = make(5, 1, 3, 40, recurrent_dropout=0.5, training=True)
    dropped = draws(case, 0).dropout[0] == 0
    assert 5 < dropped.sum() < 35
    silent = run(case)["grad_weight_hh"].eq(0).all(0)
    assert torch.equal(silent, dropped)


def test_the_generator_decides(backend):
    """Draws depend on torch's default generator; a call that needs none leaves its state alone."""
    case = make(**VARIANTS["zoneout"])
    first = run(case)
    torch.manual_seed(SEED)
    torch.rand(1)
    leaves = case.of(case.tensors)
    other, *_ = trifuse.ops.lstm.layer(*leaves, **case.options)
    assert not torch.equal(first["output"], other)
    state = torch.get_rng_state()
    trifuse.ops.lstm.layer(*leaves, **{**case.options, "training": False})
    trifuse.ops.lstm.layer(*leaves, training=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn_seed().shape == (1,)
