"""Triton's GRU kernels: their numbers in the interpreter, their code for two GPUs."""

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
from torch import Tensor

from trifuse.ops import gru as ops
from trifuse.reference import gru as reference
from trifuse.reference.gru import SLOTS, Options, Parameters

pytest.importorskip("triton")

NAN = float("nan")
SCHEDULES = ("one_launch", "step_by_step")
NAMES = ("input", "h0", *Parameters._fields, *(f"{name}_reverse" for name in Parameters._fields))


@pytest.fixture
def one_launch(triton):
    """Returns the module under test. Triton also serves the operator."""
    from trifuse.kernels import gru

    return gru


@pytest.fixture
def step_by_step(one_launch, monkeypatch):
    monkeypatch.setattr(one_launch, "fits_one_launch", lambda *args, **kwargs: False)
    return one_launch


@pytest.fixture(params=SCHEDULES)
def kernels(request):
    return request.getfixturevalue(request.param)


# Calls ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    tensors: dict[str, Tensor]  # by name, as in NAMES; absent ones are left out
    lengths: Tensor | None
    reverse: tuple[bool, ...]
    grad_output: Tensor  # (T, B, D·H)
    grad_h_n: Tensor  # (D, B, H)

    def arguments(self, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
        """Returns input, h0 and parameters, taken from ``tensors`` by name."""
        given = [tensors.get(name) for name in NAMES[: 2 + SLOTS * len(self.reverse)]]
        return given[0], given[1], given[2:]


def make(
    T: int = 5,
    B: int = 3,
    I: int = 4,  # noqa: E741
    H: int = 6,
    *,
    dtype: torch.dtype = torch.float32,
    biases: bool = True,
    states: bool = True,
    lengths: Sequence[int] | None = None,
    reverse: tuple[bool, ...] = (False,),
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    D = len(reverse)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    tensors = {"input": normal(T, B, I)}
    if states:
        tensors["h0"] = normal(D, B, H)
    for suffix in ("", "_reverse")[:D]:
        tensors[f"weight_ih{suffix}"] = normal(3 * H, I, scale=I**-0.5)
        tensors[f"weight_hh{suffix}"] = normal(3 * H, H, scale=H**-0.5)
        if biases:
            tensors[f"bias_ih{suffix}"] = normal(3 * H)
            tensors[f"bias_hh{suffix}"] = normal(3 * H)
    return Case(
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


def launch(kernels: Any, case: Case, wanted: tuple[bool, ...] | None = None) -> Results:
    """Calls the launchers directly."""
    input, h0, parameters = case.arguments(case.tensors)
    inputs = (input, h0, parameters, case.lengths)
    output, h_n, gates = kernels.gru_forward(*inputs, case.reverse, True)
    every = [t is not None for t in (input, h0, *parameters)]
    grads = kernels.gru_backward(
        case.grad_output, case.grad_h_n, *inputs, output, gates, case.reverse, wanted or every
    )
    names = (f"grad_{name}" for name in NAMES)
    given = {n: g for n, g, there in zip(names, grads, every, strict=False) if there}
    return {"output": output, "h_n": h_n, **given}


def run(case: Case) -> Results:
    """Runs the operator, forward and backward, on the current backend."""

    def call(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        input, h0, flat = case.arguments(tensors)
        parameters = [Parameters(*flat[i : i + SLOTS]) for i in range(0, len(flat), SLOTS)]
        return ops.layer(input, h0, parameters, case.lengths, reverse=case.reverse)

    return differentiate(case, case.tensors, call)


def specification(case: Case, tensors: dict[str, Tensor] | None = None) -> Results:
    """Evaluates the reference formula in float64, differentiated by autograd."""

    def formula(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        options = Options(case.reverse)
        return reference.gru(*case.arguments(tensors), case.lengths, options=options)[:2]

    tensors = case.tensors if tensors is None else tensors
    return differentiate(case, {n: t.double() for n, t in tensors.items()}, formula)


def eager_torch(case: Case) -> Results:
    """Evaluates the formula in plain torch, everything in the dtype of the input."""

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
                x = input[t, torch.arange(B)]
                a_r, a_z, a_n = F.linear(x, p.weight_ih, p.bias_ih).chunk(3, 1)
                h_r, h_z, k = F.linear(h, p.weight_hh, p.bias_hh).chunk(3, 1)
                z = torch.sigmoid(a_z + h_z)
                n = torch.tanh(a_n + torch.sigmoid(a_r + h_r) * k)
                h = torch.where(valid[:, None], (1 - z) * n + z * h, h)
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(triton, kernels, variant):
    record_accuracy(Accuracy(triton.name), make(**VARIANTS[variant]))


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        ("one_launch", torch.float16),
        ("one_launch", torch.bfloat16),
        ("step_by_step", torch.bfloat16),
    ],
)
def test_many_calls(request, triton, schedule, dtype):
    """The mean errors over numbers drawn independently of each other."""
    request.getfixturevalue(schedule)
    accuracy, options = Accuracy(triton.name), VARIANTS["two directions, lengths"]
    for seed, H in enumerate((3, 8, 17, 20)):
        record_accuracy(accuracy, make(H=H, dtype=dtype, seed=seed, **options))
    accuracy.conclude()


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64(step_by_step, variant):
    """The formulas to 12 digits, where no rounding hides a mistake."""
    case = make(dtype=torch.float64, **VARIANTS[variant])
    actual = launch(step_by_step, case)
    for name, expected in specification(case).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("schedule", "B", "H"), [("one_launch", 18, 30), ("step_by_step", 5, 150)])
def test_several_blocks(request, triton, schedule, B, H):
    """Several blocks of rows and of units; the last ones are partial."""
    request.getfixturevalue(schedule)
    record_accuracy(Accuracy(triton.name), make(2, B, 8, H))


# Rows -------------------------------------------------------------------------------------------


def test_padding_does_not_exist(kernels):
    clean = make(4, 3, lengths=(2, 4, 0), reverse=(True, False))
    padding = (torch.arange(4)[:, None] >= clean.lengths)[..., None]
    input = clean.tensors["input"].masked_fill(padding, NAN)
    spoilt = dataclasses.replace(
        clean,
        tensors={**clean.tensors, "input": input},
        grad_output=clean.grad_output.masked_fill(padding, NAN),
    )
    results = launch(kernels, spoilt)
    assert_same_bits(results, launch(kernels, clean))
    for name in ("output", "grad_input"):
        assert not results[name].masked_select(padding).any()


def test_a_sequence_cut_in_two(kernels):
    case = make(5, 3)
    input, h0, parameters = case.arguments(case.tensors)
    y1, h, _ = kernels.gru_forward(input[:2], h0, parameters, None, (False,), False)
    y2, last, _ = kernels.gru_forward(input[2:], h, parameters, None, (False,), False)
    y, expected, _ = kernels.gru_forward(input, h0, parameters, None, (False,), False)
    assert torch.equal(torch.cat([y1, y2]), y)
    assert torch.equal(last, expected)


@pytest.mark.parametrize(("T", "B"), [(0, 2), (2, 0), (0, 0)])
def test_empty(kernels, T, B):
    case = make(T, B, reverse=(False, True))
    results = launch(kernels, case)
    assert results["output"].shape == case.grad_output.shape
    if T == 0:
        assert torch.equal(results["h_n"], case.tensors["h0"])
        assert torch.equal(results["grad_h0"], case.grad_h_n)
    for name in NAMES[2:]:
        assert not results[f"grad_{name}"].any()


@pytest.mark.parametrize("layout", ["gaps", "swapped"])
def test_layouts_change_nothing(kernels, layout):
    case = make(3, 3, reverse=(False, True))
    laid_out = dataclasses.replace(
        case,
        tensors={name: lay_out_any(t, layout) for name, t in case.tensors.items()},
        grad_output=lay_out_any(case.grad_output, layout),
        grad_h_n=lay_out_any(case.grad_h_n, layout),
    )
    assert_same_bits(launch(kernels, laid_out), launch(kernels, case))


# Launchers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [0, 1])
def test_gradients_not_wanted_are_empty(step_by_step, half):
    case = make(2, 2, reverse=(True, False))
    wanted = tuple(i % 2 == half for i in range(len(NAMES)))
    every, some = launch(step_by_step, case), launch(step_by_step, case, wanted)
    for name, want in zip(NAMES, wanted, strict=True):
        grad = some[f"grad_{name}"]
        assert torch.equal(grad, every[f"grad_{name}"]) if want else grad.shape == (0,)


def test_results_share_no_memory(kernels):
    case = make()
    results = launch(kernels, case)
    storages = [t.untyped_storage().data_ptr() for t in (*results.values(), *case.tensors.values())]
    assert len(set(storages)) == len(storages)


# Code for GPUs ----------------------------------------------------------------------------------

# Registers and stack bytes per thread, KiB of shared memory per program.
BUDGET: dict[tuple[Any, ...], dict[str, tuple[int, int, int]]] = {
    ("bf16", 128, "gru"): {
        "gru_forward_sequence": (144, 0, 112), "gru_backward_sequence": (128, 0, 112),
    },
    ("fp32", 512, "gru"): {"gru_forward_step": (64, 0, 2), "gru_backward_step": (56, 0, 2)},
}  # fmt: skip


@pytest.fixture(scope="module")
def usages() -> dict[tuple[Any, ...], list[Any]]:
    return compile_calls("compile_lstm.py", for_each_architecture(BUDGET))


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("call", BUDGET, ids=lambda call: " ".join(map(str, call)))
def test_compiled_kernels_keep_to_their_budget(usages, architecture, call):
    check_budget(usages[(architecture, *call)], BUDGET[call])
