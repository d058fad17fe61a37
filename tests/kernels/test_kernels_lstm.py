"""Triton's LSTM kernels: their numbers in the interpreter, their code for two GPUs.

The interpreter takes milliseconds per program and step, so calls are small. Calls that fit one
launch run step by step too.
"""

from __future__ import annotations

import dataclasses
import math
from importlib import metadata
from typing import Any

import pytest
import torch
from budgets import check_budget, compile_calls, selected_calls
from lstm_cases import (
    DRAWN,
    EVERYTHING,
    VARIANTS,
    Case,
    assert_same_bits,
    check_empty,
    laid_out,
    make,
    record_accuracy,
    run,
    specification,
    with_exact_products,
)
from numerics import Accuracy
from torch import Tensor

import trifuse
from trifuse import backends
from trifuse.reference.lstm import SLOTS

pytest.importorskip("triton")
from triton import jit
from triton import language as tl

from trifuse.kernels import recurrent

NAN = float("nan")
SCHEDULES = ("one_launch", "step_by_step")


@pytest.fixture
def one_launch(triton):
    """Returns the module under test. Triton also serves the operator."""
    from trifuse.kernels import lstm

    return lstm


@pytest.fixture
def step_by_step(one_launch, monkeypatch):
    monkeypatch.setattr(one_launch, "fits_one_launch", lambda *args, **kwargs: False)
    return one_launch


@pytest.fixture(params=SCHEDULES)
def kernels(request):
    return request.getfixturevalue(request.param)


# Numbers ----------------------------------------------------------------------------------------


PROJECTED = tuple(variant for variant, of in VARIANTS.items() if "projection" in of)
FITTING = tuple(variant for variant in VARIANTS if variant not in PROJECTED)


@pytest.mark.parametrize(
    "variant",
    [
        *PROJECTED,
        "plain",
        "lengths, reverse",
        "coupled, peephole",
        "zoneout",
        "recurrent dropout",
        "recompute, layer norm",
        "two directions, lengths",
    ],
)
def test_step_by_step(triton, step_by_step, variant):
    record_accuracy({triton: Accuracy(triton.name)}, make(**VARIANTS[variant]))


@pytest.mark.parametrize("variant", FITTING)
def test_one_launch(triton, one_launch, variant):
    case = make(dtype=torch.bfloat16, **VARIANTS[variant])
    record_accuracy({triton: Accuracy(triton.name)}, case)


@pytest.mark.parametrize(
    ("schedule", "dtype"), [("one_launch", torch.float16), ("step_by_step", torch.bfloat16)]
)
def test_many_calls(request, triton, schedule, dtype):
    """The mean errors, with all options, over numbers drawn independently of each other."""
    request.getfixturevalue(schedule)
    accuracy = Accuracy(triton.name)
    options = {**EVERYTHING, **DRAWN, "lengths": (2, 3, 0)}
    if schedule == "one_launch":
        del options["projection"], options["proj_clip"]
    for seed, H in enumerate((3, 8, 17, 20)):
        case = make(3, 3, H=H, dtype=dtype, seed=seed, recompute=seed % 2 == 1, **options)
        record_accuracy({triton: accuracy}, case)
    accuracy.conclude()


def launch(kernels: Any, case: Case, wanted: tuple[bool, ...] | None = None) -> dict[str, Tensor]:
    """As ``lstm_cases.run``, but calls the launchers directly."""
    parameters = [t for p in case.parameters for t in p]
    tensors = (case.input, case.h0, case.c0, *parameters)
    inputs = (case.input, case.h0, case.c0, parameters, case.lengths, case.seed)
    results = kernels.lstm_forward(*inputs, *case.op_options, 1 + (not case.recompute))
    results, kept = results[:3], results[3:]
    grads = kernels.lstm_backward(
        case.grad_output,
        case.grad_h_n,
        case.grad_c_n,
        *inputs,
        results[0],
        *kept,
        *case.op_options,
        wanted or tuple(t is not None for t in tensors),
    )
    given = [grad for grad, t in zip(grads, tensors, strict=True) if t is not None]
    names = [f"grad_{name}" for name in case.tensors]
    return dict(zip(("output", "h_n", "c_n", *names), (*results, *given), strict=True))


@pytest.mark.parametrize(
    "variant",
    [
        "without biases or states",
        "both clips",
        "forget bias",
        "peephole",
        "coupled, peephole",
        "zoneout of h",
        "zoneout in evaluation",
        "recurrent dropout",
        "recompute",
        "two directions, lengths",
    ],
)
def test_float64(step_by_step, variant):
    """The formulas to 12 digits, where no rounding hides a mistake."""
    case = make(dtype=torch.float64, **VARIANTS[variant])
    actual = launch(step_by_step, case)
    for name, expected in specification(case).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("H", [5, 16])
def test_an_infinite_state_saturates_gates(kernels, H):
    """It gives no NaN that the formula lacks, whether or not the units fill a block."""
    case = make(3, 2, 4, H)
    case.h0[:, 0, 0] = math.inf
    actual = launch(kernels, case)
    with trifuse.backend("eager"):
        expected = run(case)
    assert actual["output"].isfinite().all()
    for name, t in expected.items():
        assert torch.equal(actual[name].isfinite(), t.isfinite()), name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{}, {"norm": True, "peephole": True}], ids=["", "norm"])
def test_several_blocks(request, triton, schedule, options):
    """Several blocks of rows and of units; the last ones are partial."""
    request.getfixturevalue(schedule)
    one_launch = schedule == "one_launch"
    case = make(2, 18 if one_launch else 5, 8, 30 if one_launch else 150, **options)
    record_accuracy({triton: Accuracy(triton.name)}, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_and_tanh(triton, dtype):
    """Relative errors are a few roundings at most, also for tiny results."""
    edges = [0.0, 1e-30, -1e-4, 0.49999, 0.5, 0.50001, 9.0, 80.0, -80.0, math.inf, -math.inf, NAN]
    x = torch.tensor([*edges, *torch.linspace(-2, 2, 50)], dtype=dtype)
    sigmoid, tanh = torch.empty_like(x), torch.empty_like(x)
    sigmoid_and_tanh_kernel[(1,)](x, sigmoid, tanh, len(x))
    tolerance = 4 * torch.finfo(dtype).eps
    for actual, function in ((sigmoid, torch.sigmoid), (tanh, torch.tanh)):
        expected = function(x.double())
        torch.testing.assert_close(
            actual.double(), expected, rtol=tolerance, atol=0, equal_nan=True
        )


@jit
def sigmoid_and_tanh_kernel(x, sigmoid, tanh, count):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 64)
    value = tl.load(x + at, at < count, other=0.0)
    tl.store(sigmoid + at, recurrent.sigmoid(value), at < count)
    tl.store(tanh + at, recurrent.tanh(value), at < count)


# Rows -------------------------------------------------------------------------------------------

OF_ROWS = ("output", "h_n", "c_n", "grad_input", "grad_h0", "grad_c0")


def rows(case: Case, keep: slice, T: int | None = None) -> Case:
    """Returns some rows of a case, and at most T steps of them."""
    of_input = {n: getattr(case, n)[:T, keep] for n in ("input", "grad_output")}
    of_states = {n: getattr(case, n)[:, keep] for n in ("h0", "c0", "grad_h_n", "grad_c_n")}
    lengths = None if case.lengths is None else case.lengths[keep]
    return dataclasses.replace(case, lengths=lengths, **of_input, **of_states)


def of_rows(results: dict[str, Tensor], keep: slice, T: int | None = None) -> dict[str, Tensor]:
    return {
        n: results[n][:T, keep] if n in ("output", "grad_input") else results[n][:, keep]
        for n in OF_ROWS
    }


OF_KERNELS = tuple(name for name in OF_ROWS if name != "grad_input")


def test_a_row_by_itself(one_launch):
    """The rows below a row change none of its bits."""
    case = with_exact_products(make(3, 18, H=20, peephole=True, **DRAWN))
    alone = of_rows(launch(one_launch, rows(case, slice(1))), slice(None))
    first = of_rows(launch(one_launch, case), slice(1))
    assert_same_bits({n: alone[n] for n in OF_KERNELS}, {n: first[n] for n in OF_KERNELS})
    torch.testing.assert_close(alone["grad_input"], first["grad_input"])


def test_ragged_rows_are_rows_by_themselves(one_launch):
    """In both directions. Padding to the length of a longer row changes nothing."""
    case = make(4, 3, H=20, lengths=(2, 0, 4), reverse=(False, True), peephole=True)
    case = with_exact_products(case)
    together = launch(one_launch, case)
    for b, length in enumerate(case.lengths.tolist()):
        keep = slice(b, b + 1)
        alone = dataclasses.replace(rows(case, keep, length), lengths=None)
        expected = of_rows(launch(one_launch, alone), slice(None))
        actual = of_rows(together, keep, length)
        assert_same_bits({n: actual[n] for n in OF_KERNELS}, {n: expected[n] for n in OF_KERNELS})
        torch.testing.assert_close(actual["grad_input"], expected["grad_input"])
        assert not together["output"][length:, b].any()
        assert not together["grad_input"][length:, b].any()


@pytest.mark.parametrize("recompute", [False, True])
def test_padding_does_not_exist(kernels, recompute):
    options = {"norm": True, "peephole": True, "recompute": recompute, **DRAWN}
    clean = make(4, 3, lengths=(2, 4, 0), reverse=(True,), **options)
    padding = torch.arange(4)[:, None] >= clean.lengths
    spoilt = dataclasses.replace(
        clean,
        input=clean.input.masked_fill(padding[..., None], NAN),
        grad_output=clean.grad_output.masked_fill(padding[..., None], NAN),
    )
    assert_same_bits(launch(kernels, spoilt), launch(kernels, clean))


def test_a_sequence_cut_in_two(kernels):
    whole = with_exact_products(make(5, 3, cell_clip=0.8, peephole=True))
    first, second = (
        dataclasses.replace(whole, input=x) for x in (whole.input[:2], whole.input[2:])
    )

    def forward(case: Case) -> tuple[Tensor, ...]:
        inputs = (case.input, case.h0, case.c0, list(case.parameters[0]), None, None)
        return kernels.lstm_forward(*inputs, *case.op_options, 0)

    y1, h, c, *_ = forward(first)
    y2, *last = forward(dataclasses.replace(second, h0=h, c0=c))
    y, *expected = forward(whole)
    assert torch.equal(torch.cat([y1, y2]), y)
    assert all(torch.equal(a, b) for a, b in zip(last, expected, strict=True))


def test_runs_repeat(kernels):
    case = make(norm=True, peephole=True, **DRAWN)
    assert_same_bits(launch(kernels, case), launch(kernels, case))


@pytest.mark.parametrize(("T", "B"), [(0, 2), (2, 0), (0, 0)])
def test_empty(kernels, T, B):
    case = make(T, B, reverse=(False, True), norm=True, peephole=True, **DRAWN)
    check_empty(case, launch(kernels, case))


@pytest.mark.parametrize("layout", ["gaps", "swapped"])
def test_layouts_change_nothing(kernels, layout):
    case = make(3, 3, reverse=(False, True), norm=True, peephole=True)
    laid = laid_out(case, lambda: layout)
    assert_same_bits(launch(kernels, laid), launch(kernels, case))


# Launchers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [0, 1])
def test_gradients_not_wanted_are_empty(step_by_step, half):
    case = make(2, 2, **EVERYTHING | {"lengths": None, "reverse": (True,)})
    assert len(case.tensors) == 3 + SLOTS
    wanted = tuple(i % 2 == half for i in range(3 + SLOTS))
    every, some = launch(step_by_step, case), launch(step_by_step, case, wanted)
    for name, want in zip(case.tensors, wanted, strict=True):
        grad = some[f"grad_{name}"]
        assert grad.dtype == case.input.dtype
        assert torch.equal(grad, every[f"grad_{name}"]) if want else grad.shape == (0,)


def test_results_share_no_memory(kernels):
    """Neither with each other nor with an argument: torch.library forbids it."""
    case = make(norm=True, peephole=True)
    results = launch(kernels, case)
    storages = [t.untyped_storage().data_ptr() for t in (*results.values(), *case.tensors.values())]
    assert len(set(storages)) == len(storages)


def test_nothing_is_kept_without_need(kernels):
    case = make(peephole=True)
    inputs = (case.input, case.h0, case.c0, list(case.parameters[0]), None, None)
    results = [kernels.lstm_forward(*inputs, *case.op_options, save) for save in (0, 1, 2)]
    shapes = [(tuple(gates.shape), tuple(cells.shape)) for *_, gates, cells, _ in results]
    assert shapes == [((0,), (0,)), ((0,), (1, 5, 3, 6)), ((1, 5, 3, 24), (1, 5, 3, 6))]
    for *results_of, _, _, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results_of, results[0], strict=False))


@pytest.mark.parametrize(
    ("dtype", "gates", "H", "shared_memory", "fits"),
    [
        (torch.bfloat16, 4, 128, 163 << 10, True),  # sm_80
        (torch.bfloat16, 4, 128, 99 << 10, False),  # sm_86
        (torch.bfloat16, 4, 64, 99 << 10, True),
        (torch.float16, 4, 129, 227 << 10, False),  # tiles are powers of 2
        (torch.bfloat16, 3, 128, 120 << 10, True),
        (torch.float32, 4, 32, 227 << 10, True),
        (torch.float32, 4, 33, 227 << 10, False),
        (torch.float64, 4, 1, 227 << 10, False),
    ],
)
def test_what_fits_one_launch(triton, monkeypatch, dtype, gates, H, shared_memory, fits):
    monkeypatch.setattr(recurrent, "_shared_memory", lambda device: shared_memory)
    assert recurrent.fits_one_launch(torch.device("cuda"), dtype, H, gates) == fits


# Code for GPUs ----------------------------------------------------------------------------------

# Upper bounds for the kernels of a call: registers and stack bytes per thread, KiB of shared memory
# per program. Stack is spills.
_BY_TRITON_3_6 = backends._HAS_TRITON and metadata.version("triton").startswith("3.6.")
BUDGET: dict[tuple[Any, ...], dict[str, tuple[int, int, int]]] = {
    ("bf16", 128, "plain"): {
        "lstm_forward_sequence": (192, 0, 136), "lstm_backward_sequence": (176, 16, 148),
    },
    ("fp32", 32, "all"): {
        "lstm_dropout": (32, 0, 1),
        "lstm_forward_sequence": (255, 624, 24) if _BY_TRITON_3_6 else (160, 0, 24),  # on sm_80
        "lstm_backward_sequence": (176, 16, 26),
    },
    ("bf16", 512, "projected"): {
        "lstm_forward_step": (72, 0, 2), "lstm_forward_projection": (32, 0, 1),
        "lstm_hidden": (40, 0, 1), "lstm_backward_projection": (40, 0, 1),
        "lstm_backward_step": (56, 0, 2),
    },
    ("fp32", 512, "norm, all"): {
        "lstm_dropout": (32, 0, 1), "lstm_forward_step": (80, 0, 1),
        "lstm_backward_step": (128, 0, 1),
    },
}  # fmt: skip
BATCHES = [(90, "bf16", 512, "projected", B) for B in (4, 37)]


@pytest.fixture(scope="module")
def usages(request) -> dict[tuple[Any, ...], list[Any]]:
    """Returns, by call, the kernels of its forward and backward and the resources of each."""
    return compile_calls("compile_lstm.py", selected_calls(request, BUDGET) + BATCHES)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("call", BUDGET, ids=lambda call: " ".join(map(str, call)))
@pytest.mark.covering(1)
def test_compiled_kernels_keep_to_their_budget(usages, architecture, call):
    check_budget(usages[(architecture, *call)], BUDGET[call])


def test_products_of_a_whole_sequence_run_on_the_matrix_unit(usages):
    """Except in float32, whose factors the matrix unit would round."""
    sequences = [
        (dtype, matrix)
        for (_, dtype, *_), kernels in usages.items()
        for name, _, _, _, matrix, _ in kernels
        if name.endswith("sequence")
    ]
    assert {dtype for dtype, _ in sequences} == {"bf16", "fp32"}
    assert all(matrix == (dtype == "bf16") for dtype, matrix in sequences)


def test_one_compilation_serves_every_batch(usages):
    one, other = ([(name, code) for name, *_, code in usages[call]] for call in BATCHES)
    assert one == other
