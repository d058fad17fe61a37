"""Triton's GRU and RNN kernels: their numbers in the interpreter, their code for two GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import check_budget, compile_calls, for_each_architecture
from lstm_cases import assert_same_bits, lay_out_any
from numerics import Accuracy, rounding_error
from test_gru import reset_first_cell
from torch import Tensor

import trifuse
from trifuse.ops import gru as gru_ops
from trifuse.ops import rnn as rnn_ops
from trifuse.reference import gru, rnn
from trifuse.reference.gru import SLOTS, Parameters

pytest.importorskip("triton")

NAN = float("nan")
SCHEDULES = ("one_launch", "step_by_step")
NAMES = ("input", "h0", *Parameters._fields, *(f"{name}_reverse" for name in Parameters._fields))


# A GRU, one whose reset gate precedes the product, and an RNN with either activation.
KINDS = ("gru", "reset first", "tanh", "relu")
GRUS = KINDS[:2]
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def one_launch(triton):
    """One launch for all steps. Triton also serves the operator."""


@pytest.fixture
def step_by_step(triton, monkeypatch):
    from trifuse.kernels import recurrent

    monkeypatch.setattr(recurrent, "fits_one_launch", lambda *args: False)


@pytest.fixture(params=SCHEDULES)
def schedule(request):
    return request.getfixturevalue(request.param)


# Calls ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    tensors: dict[str, Tensor]  # by name, as in NAMES; absent ones are left out
    lengths: Tensor | None
    reverse: tuple[bool, ...]
    grad_output: Tensor  # (T, B, D·H)
    grad_h_n: Tensor  # (D, B, H)

    def arguments(self, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
        """Returns input, h0 and parameters, taken from ``tensors`` by name."""
        given = [tensors.get(name) for name in NAMES[: 2 + SLOTS * len(self.reverse)]]
        return given[0], given[1], given[2:]

    @property
    def options(self) -> tuple[Any, ...]:
        """The operator's options, as the launchers take them."""
        return self.reverse, self.kind == ("gru" if self.kind in GRUS else "relu")


def make(
    T: int = 5,
    B: int = 3,
    I: int = 4,  # noqa: E741
    H: int = 6,
    *,
    kind: str = "gru",
    dtype: torch.dtype = torch.float32,
    biases: bool = True,
    states: bool = True,
    lengths: Sequence[int] | None = None,
    reverse: tuple[bool, ...] = (False,),
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    D, rows = len(reverse), 3 * H if kind in GRUS else H

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    tensors = {"input": normal(T, B, I)}
    if states:
        tensors["h0"] = normal(D, B, H)
    for suffix in ("", "_reverse")[:D]:
        tensors[f"weight_ih{suffix}"] = normal(rows, I, scale=I**-0.5)
        tensors[f"weight_hh{suffix}"] = normal(rows, H, scale=H**-0.5)
        if biases:
            tensors[f"bias_ih{suffix}"] = normal(rows)
            tensors[f"bias_hh{suffix}"] = normal(rows)
    return Case(
        kind,
        tensors,
        None if lengths is None else torch.tensor(lengths),
        reverse,
        normal(T, B, D * H),
        normal(D, B, H),
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without biases or states": {"biases": False, "states": False},
    "reverse": {"reverse": (True,)},
    "lengths": {"lengths": (3, 5, 0)},
    "lengths, reverse": {"lengths": (4, 1, 5), "reverse": (True,)},
    "two directions": {"reverse": (False, True)},
    "two directions, lengths": {"reverse": (False, True), "lengths": (2, 0, 5)},
}

Results = dict[str, Tensor]


def launch_forward(case: Case, input: Tensor, h0: Tensor | None, save: bool) -> tuple[Tensor, ...]:
    from trifuse.kernels import gru, rnn

    _, _, parameters = case.arguments(case.tensors)
    inputs = (input, h0, parameters, case.lengths, *case.options)
    return gru.gru_forward(*inputs, save) if case.kind in GRUS else rnn.rnn_forward(*inputs)


def launch(case: Case, wanted: tuple[bool, ...] | None = None) -> Results:
    """Calls the launchers directly."""
    from trifuse.kernels import gru, rnn

    input, h0, parameters = case.arguments(case.tensors)
    output, h_n, *saved = launch_forward(case, input, h0, save=True)
    every = [t is not None for t in (input, h0, *parameters)]
    backward = gru.gru_backward if case.kind in GRUS else rnn.rnn_backward
    upstream = (case.grad_output, case.grad_h_n)
    inputs = (input, h0, parameters, case.lengths)
    grads = backward(*upstream, *inputs, output, *saved, *case.options, wanted or every)
    names = (f"grad_{name}" for name in NAMES)
    given = {n: g for n, g, there in zip(names, grads, every, strict=False) if there}
    return {"output": output, "h_n": h_n, **given}


def run(case: Case) -> Results:
    """Runs the operator, forward and backward, on the current backend."""

    def call(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        input, h0, flat = case.arguments(tensors)
        parameters = [Parameters(*flat[i : i + SLOTS]) for i in range(0, len(flat), SLOTS)]
        arguments = (input, h0, parameters, case.lengths)
        if case.kind in GRUS:
            first = case.kind == "gru"
            return gru_ops.layer(*arguments, reverse=case.reverse, linear_before_reset=first)
        return rnn_ops.layer(*arguments, reverse=case.reverse, nonlinearity=case.kind)

    return differentiate(case, case.tensors, call)


def specification(case: Case, tensors: dict[str, Tensor] | None = None) -> Results:
    """Evaluates the reference formula in float64, differentiated by autograd."""

    def formula(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        arguments = (*case.arguments(tensors), case.lengths)
        if case.kind in GRUS:
            return gru.gru(*arguments, options=gru.Options(*case.options))[:2]
        return rnn.rnn(*arguments, options=rnn.Options(*case.options))

    tensors = case.tensors if tensors is None else tensors
    return differentiate(case, {n: t.double() for n, t in tensors.items()}, formula)


def eager_torch(case: Case) -> Results:
    """Evaluates the formula in plain torch, everything in the dtype of the input."""

    def cell(x: Tensor, h: Tensor, p: Parameters) -> Tensor:
        if case.kind == "reset first":
            return reset_first_cell(x, h, *p)
        a, k = F.linear(x, p.weight_ih, p.bias_ih), F.linear(h, p.weight_hh, p.bias_hh)
        if case.kind != "gru":
            return torch.relu(a + k) if case.kind == "relu" else torch.tanh(a + k)
        (a_r, a_z, a_n), (k_r, k_z, k_n) = a.chunk(3, 1), k.chunk(3, 1)
        z = torch.sigmoid(a_z + k_z)
        n = torch.tanh(a_n + torch.sigmoid(a_r + k_r) * k_n)
        return (1 - z) * n + z * h

    def formula(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        input, h0, flat = case.arguments(tensors)
        T, B, _ = input.shape
        lengths = torch.full((B,), T) if case.lengths is None else case.lengths
        outputs, states = [], []
        for d, backwards in enumerate(case.reverse):
            p = Parameters(*flat[d * SLOTS : (d + 1) * SLOTS])
            h = input.new_zeros(B, p.weight_hh.shape[1]) if h0 is None else h0[d]
            y = input.new_zeros(T, B, h.shape[1])
            for step in range(T):
                valid = step < lengths
                t = torch.where(valid & backwards, lengths - 1 - step, step)
                h = torch.where(valid[:, None], cell(input[t, torch.arange(B)], h, p), h)
                here = torch.where(valid[:, None], h, 0)
                y = y.index_put((t, torch.arange(B)), here)
            outputs.append(y)
            states.append(h)
        return torch.cat(outputs, -1), torch.stack(states)

    return differentiate(case, case.tensors, formula)


def differentiate(case: Case, tensors: dict[str, Tensor], function: Callable[..., Any]) -> Results:
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    output, h_n = function(leaves)
    upstream = [case.grad_output.to(output.dtype), case.grad_h_n.to(h_n.dtype)]
    grads = torch.autograd.grad([output, h_n], list(leaves.values()), upstream)
    return {"output": output.detach(), "h_n": h_n.detach()} | {
        f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)
    }


def record_accuracy(accuracy: Accuracy, case: Case) -> None:
    """Holds a case to the numerics rule. Roundings are measured as in lstm_cases.one_rounding."""
    eps = rounding_error(case.tensors["input"].dtype)
    generator = torch.Generator().manual_seed(0)

    def rounded(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return t.double() * (1 + eps * noise)

    expected, eager, actual = specification(case), eager_torch(case), run(case)
    squares = {name: (eps * t).square() for name, t in expected.items()}
    for _ in range(4):
        near = dataclasses.replace(
            case, grad_output=rounded(case.grad_output), grad_h_n=rounded(case.grad_h_n)
        )
        moved = specification(near, {n: rounded(t) for n, t in case.tensors.items()})
        for name, t in moved.items():
            squares[name] = squares[name] + (t - expected[name]).square() / 4
    assert actual.keys() == expected.keys()
    for name in actual:
        rounding = squares[name].sqrt()
        accuracy.record(name, actual[name], expected[name], eager[name], rounding)


# Numbers ----------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(triton, schedule, variant, kind):
    record_accuracy(Accuracy(triton.name), make(kind=kind, **VARIANTS[variant]))


@kinds
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("one_launch", torch.float16),
        ("one_launch", torch.bfloat16),
        ("step_by_step", torch.bfloat16),
    ],
)
def test_many_calls(request, triton, way, dtype, kind):
    """The mean errors over numbers drawn independently of each other."""
    request.getfixturevalue(way)
    accuracy, options = Accuracy(triton.name), VARIANTS["two directions, lengths"]
    for seed, H in enumerate((3, 8, 17, 20)):
        record_accuracy(accuracy, make(H=H, kind=kind, dtype=dtype, seed=seed, **options))
    accuracy.conclude()


@kinds
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64(step_by_step, variant, kind):
    """The formulas to 12 digits, where no rounding hides a mistake."""
    case = make(kind=kind, dtype=torch.float64, **VARIANTS[variant])
    actual = launch(case)
    for name, expected in specification(case).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-12, atol=1e-12)


@kinds
@pytest.mark.parametrize(("way", "B", "H"), [("one_launch", 18, 30), ("step_by_step", 5, 150)])
def test_several_blocks(request, triton, way, B, H, kind):
    """Several blocks of rows and of units; the last ones are partial."""
    request.getfixturevalue(way)
    record_accuracy(Accuracy(triton.name), make(2, B, 8, H, kind=kind))


# Rows -------------------------------------------------------------------------------------------


@kinds
def test_padding_does_not_exist(schedule, kind):
    clean = make(4, 3, kind=kind, lengths=(2, 4, 0), reverse=(True, False))
    padding = (torch.arange(4)[:, None] >= clean.lengths)[..., None]
    input = clean.tensors["input"].masked_fill(padding, NAN)
    spoilt = dataclasses.replace(
        clean,
        tensors={**clean.tensors, "input": input},
        grad_output=clean.grad_output.masked_fill(padding, NAN),
    )
    results = launch(spoilt)
    assert_same_bits(results, launch(clean))
    for name in ("output", "grad_input"):
        assert not results[name].masked_select(padding).any()


@kinds
def test_a_sequence_cut_in_two(schedule, kind):
    case = make(5, 3, kind=kind)
    input, h0, _ = case.arguments(case.tensors)
    y1, h, *_ = launch_forward(case, input[:2], h0, save=False)
    y2, last, *_ = launch_forward(case, input[2:], h, save=False)
    y, expected, *_ = launch_forward(case, input, h0, save=False)
    assert torch.equal(torch.cat([y1, y2]), y)
    assert torch.equal(last, expected)


@kinds
@pytest.mark.parametrize(("T", "B"), [(0, 2), (2, 0), (0, 0)])
def test_empty(schedule, T, B, kind):
    case = make(T, B, kind=kind, reverse=(False, True))
    results = launch(case)
    assert results["output"].shape == case.grad_output.shape
    if T == 0:
        assert torch.equal(results["h_n"], case.tensors["h0"])
        assert torch.equal(results["grad_h0"], case.grad_h_n)
    for name in NAMES[2:]:
        assert not results[f"grad_{name}"].any()


@kinds
@pytest.mark.parametrize("layout", ["gaps", "swapped"])
def test_layouts_change_nothing(schedule, layout, kind):
    case = make(3, 3, kind=kind, reverse=(False, True))
    laid_out = dataclasses.replace(
        case,
        tensors={name: lay_out_any(t, layout) for name, t in case.tensors.items()},
        grad_output=lay_out_any(case.grad_output, layout),
        grad_h_n=lay_out_any(case.grad_h_n, layout),
    )
    assert_same_bits(launch(laid_out), launch(case))


@kinds
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_numbers_that_are_not_finite(schedule, value, kind):
    """They reach the units that the formula says, whether or not a block is full: H = 6."""
    case = make(4, 3, kind=kind)
    case.tensors["input"][1, 1, 0] = value
    case.grad_output[2, 2, 1] = value
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
    case = make(2, 2, kind=kind, reverse=(True, False))
    wanted = tuple(i % 2 == half for i in range(len(NAMES)))
    every, some = launch(case), launch(case, wanted)
    for name, want in zip(NAMES, wanted, strict=True):
        grad = some[f"grad_{name}"]
        assert torch.equal(grad, every[f"grad_{name}"]) if want else grad.shape == (0,)


@kinds
def test_results_share_no_memory(schedule, kind):
    case = make(kind=kind)
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
def usages() -> dict[tuple[Any, ...], list[Any]]:
    return compile_calls("compile_lstm.py", for_each_architecture(BUDGET))


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("call", BUDGET, ids=lambda call: " ".join(map(str, call)))
def test_compiled_kernels_keep_to_their_budget(usages, architecture, call):
    check_budget(usages[(architecture, *call)], BUDGET[call])
