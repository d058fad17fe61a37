"""Triton's GRU and RNN kernels: their numbers in the interpreter, their code for two GPUs."""

from __future__ import annotations

from typing import Any

import gru_cases
import pytest
import torch
from budgets import check_budget, compile_calls, selected_calls
from gru_cases import KINDS, Case, Results, record_accuracy, run, specification
from lstm_cases import assert_same_bits, lay_out_any
from numerics import Accuracy
from torch import Tensor

import trifuse
from trifuse.reference.gru import Parameters

pytest.importorskip("triton")

NAN = float("nan")
SCHEDULES = ("one_launch", "step_by_step")
NAMES = ("input", "h0", *Parameters._fields, *(f"{name}_reverse" for name in Parameters._fields))
VARIANTS = gru_cases.VARIANTS | {"two directions": {"reverse": (False, True)}}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def one_launch(triton):
    """One launch for all steps. Triton also serves the operator."""


@pytest.fixture
def step_by_step(triton, monkeypatch):
    from trifuse.kernels import without_cells

    monkeypatch.setattr(without_cells, "fits_one_launch", lambda *args: False)


@pytest.fixture(params=SCHEDULES)
def schedule(request):
    return request.getfixturevalue(request.param)


# Calls ------------------------------------------------------------------------------------------


def launch_forward(case: Case, input: Tensor, h0: Tensor | None, save: bool) -> tuple[Tensor, ...]:
    from trifuse.kernels import gru, rnn

    inputs = (input, h0, flat_parameters(case), case.lengths, *case.kind.options(case.reverse))
    if case.kind.operator == "gru":
        return gru.gru_forward(*inputs, save)
    return rnn.rnn_forward(*inputs)


def flat_parameters(case: Case) -> list[Tensor | None]:
    _, _, parameters = case.arguments(case.tensors)
    return [t for p in parameters for t in p]


def launch(case: Case, needs_grad: tuple[bool, ...] | None = None) -> Results:
    """Calls the launchers directly."""
    from trifuse.kernels import gru, rnn

    tensors = (case.tensors["input"], case.tensors.get("h0"), flat_parameters(case))
    output, h_n, *saved = launch_forward(case, *tensors[:2], save=True)
    every = [t is not None for t in (*tensors[:2], *tensors[2])]
    backward = gru.gru_backward if case.kind.operator == "gru" else rnn.rnn_backward
    options = case.kind.options(case.reverse)
    grads = backward(
        *case.upstream, *tensors, case.lengths, output, *saved, *options, needs_grad or every
    )
    names = (f"grad_{name}" for name in NAMES)
    given = {n: g for n, g, there in zip(names, grads, every, strict=False) if there}
    return {"output": output, "h_n": h_n, **given}


# Numbers ----------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.covering(1)
def test_variants(triton, schedule, variant, kind):
    record_accuracy({triton: Accuracy(triton.name)}, Case(kind=kind, **VARIANTS[variant]))


@kinds
@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        ("one_launch", torch.float16),
        ("one_launch", torch.bfloat16),
        ("step_by_step", torch.bfloat16),
    ],
)
@pytest.mark.covering(1)
def test_many_calls(request, triton, schedule, dtype, kind):
    """The mean errors over numbers drawn independently of each other."""
    request.getfixturevalue(schedule)
    accuracy, options = Accuracy(triton.name), VARIANTS["two directions, lengths"]
    for seed, H in enumerate((3, 8, 17, 20)):
        record_accuracy({triton: accuracy}, Case(H=H, kind=kind, dtype=dtype, seed=seed, **options))
    accuracy.conclude()


@kinds
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.covering(1)
def test_float64(step_by_step, variant, kind):
    """The formulas to 12 digits, where no rounding hides a mistake."""
    case = Case(kind=kind, dtype=torch.float64, **VARIANTS[variant])
    actual = launch(case)
    for name, expected in specification(case).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-12, atol=1e-12)


@kinds
@pytest.mark.parametrize(("schedule", "B", "H"), [("one_launch", 18, 30), ("step_by_step", 5, 150)])
def test_several_blocks(request, triton, schedule, B, H, kind):
    """Several blocks of rows and of units; the last ones are partial."""
    request.getfixturevalue(schedule)
    record_accuracy({triton: Accuracy(triton.name)}, Case(2, B, 8, H, kind=kind))


# Rows -------------------------------------------------------------------------------------------


@kinds
@pytest.mark.covering(1)
def test_padding_does_not_exist(schedule, kind):
    clean = Case(4, 3, kind=kind, lengths=(2, 4, 0), reverse=(True, False))
    padding = (torch.arange(4)[:, None] >= clean.lengths)[..., None]
    input = clean.tensors["input"].masked_fill(padding, NAN)
    grad_output, grad_h_n = clean.upstream
    spoilt = clean.replace(
        tensors=clean.tensors | {"input": input},
        upstream=[grad_output.masked_fill(padding, NAN), grad_h_n],
    )
    results = launch(spoilt)
    assert_same_bits(results, launch(clean))
    for name in ("output", "grad_input"):
        assert not results[name].masked_select(padding).any()


@kinds
def test_a_sequence_cut_in_two(schedule, kind):
    case = Case(5, 3, kind=kind)
    input, h0 = case.tensors["input"], case.tensors["h0"]
    y1, h, *_ = launch_forward(case, input[:2], h0, save=False)
    y2, last, *_ = launch_forward(case, input[2:], h, save=False)
    y, expected, *_ = launch_forward(case, input, h0, save=False)
    assert torch.equal(torch.cat([y1, y2]), y)
    assert torch.equal(last, expected)


@kinds
@pytest.mark.parametrize(("T", "B"), [(0, 2), (2, 0), (0, 0)])
def test_empty(schedule, T, B, kind):
    case = Case(T, B, kind=kind, reverse=(False, True))
    results = launch(case)
    assert results["output"].shape == case.upstream[0].shape
    if T == 0:
        assert torch.equal(results["h_n"], case.tensors["h0"])
        assert torch.equal(results["grad_h0"], case.upstream[1])
    for name in NAMES[2:]:
        assert not results[f"grad_{name}"].any()


@kinds
@pytest.mark.parametrize("layout", ["gaps", "swapped"])
@pytest.mark.covering(1)
def test_layouts_change_nothing(schedule, layout, kind):
    case = Case(3, 3, kind=kind, reverse=(False, True))
    laid_out = case.replace(
        tensors={name: lay_out_any(t, layout) for name, t in case.tensors.items()},
        upstream=[lay_out_any(t, layout) for t in case.upstream],
    )
    assert_same_bits(launch(laid_out), launch(case))


@kinds
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_numbers_that_are_not_finite(schedule, value, kind):
    """They reach the units that the formula says, whether or not a block is full: H = 6."""
    case = Case(4, 3, kind=kind)
    case.tensors["input"][1, 1, 0] = value
    case.upstream[0][2, 2, 1] = value
    actual = launch(case)
    with trifuse.backend("eager"):
        expected = run(case)
    for name, t in expected.items():
        assert torch.equal(actual[name].isnan(), t.isnan()), name
        assert torch.equal(actual[name].isinf(), t.isinf()), name


# Launchers --------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("half", [0, 1])
def test_gradients_not_wanted_are_empty(step_by_step, half, kind):
    case = Case(2, 2, kind=kind, reverse=(True, False))
    needs_grad = tuple(i % 2 == half for i in range(len(NAMES)))
    every, some = launch(case), launch(case, needs_grad)
    for name, needed in zip(NAMES, needs_grad, strict=True):
        grad = some[f"grad_{name}"]
        assert torch.equal(grad, every[f"grad_{name}"]) if needed else grad.shape == (0,)


@kinds
def test_results_share_no_memory(schedule, kind):
    case = Case(kind=kind)
    results = launch(case)
    storages = [t.untyped_storage().data_ptr() for t in (*results.values(), *case.tensors.values())]
    assert len(set(storages)) == len(storages)


# Code for GPUs ----------------------------------------------------------------------------------

# Registers and stack bytes per thread, KiB of shared memory per program.
BUDGET: dict[tuple[Any, ...], dict[str, tuple[int, int, int]]] = {
    ("bf16", 128, "gru"): {
        "gru_forward_sequence": (144, 0, 112), "gru_backward_sequence": (128, 0, 112),
    },
    ("bf16", 128, "gru, reset first"): {
        "gru_reset_first_forward_sequence": (160, 0, 112),
        "gru_reset_first_backward_sequence": (128, 0, 112),
    },
    ("fp32", 512, "gru, reset first"): {
        "gru_reset_step": (40, 0, 2), "gru_reset_first_forward_step": (48, 0, 2),
        "gru_reset_first_backward_step": (48, 0, 0), "gru_reset_backward_step": (40, 0, 0),
    },
    ("fp32", 512, "gru"): {"gru_forward_step": (64, 0, 2), "gru_backward_step": (56, 0, 2)},
    ("bf16", 128, "rnn"): {
        "rnn_forward_sequence": (72, 0, 36), "rnn_backward_sequence": (80, 0, 36),
    },
    ("fp32", 512, "rnn"): {"rnn_forward_step": (32, 0, 2), "rnn_backward_step": (32, 0, 0)},
    ("fp32", 512, "rnn, relu"): {"rnn_forward_step": (32, 0, 1), "rnn_backward_step": (32, 0, 0)},
}  # fmt: skip


@pytest.fixture(scope="module")
def usages(request) -> dict[tuple[Any, ...], list[Any]]:
    return compile_calls("compile_lstm.py", selected_calls(request, BUDGET))


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("call", BUDGET, ids=lambda call: " ".join(map(str, call)))
@pytest.mark.covering(1)
def test_compiled_kernels_keep_to_their_budget(usages, architecture, call):
    check_budget(usages[(architecture, *call)], BUDGET[call])
