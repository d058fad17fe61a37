"""GRU and RNN layers against nn.GRU and nn.RNN.

Each case is one layer or several over whole sequences, in one direction or both. torch's modules
get ragged sequences as a PackedSequence, packed outside the timed call. A single step has torch's
cell as its peer, and the GRU whose reset gate precedes the product a loop of torch's operations.

Rates count the products that the valid steps need: 2·G·H (I + H) operations per token forward, with
G = 3 gates in a GRU and 1 in an RNN, and twice as many more backward. On a CPU the forward of one
sequence and a single step are bound by reading weights instead: each step reads W_hh, and a single
step also W_ih; its backward reads them again and writes gradients of the same size. The ceiling is
then the rate at which that many bytes are read repeatedly.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import trifuse
from trifuse import backends
from trifuse.benchmarks import ceilings, timing
from trifuse.benchmarks.agreement import check_accuracy, check_agreement
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.lstm import read_rate, run_command, step
from trifuse.benchmarks.other_kernels import other_kernels
from trifuse.ops import gru, rnn

# Cases ------------------------------------------------------------------------------------------

Kind = Literal["GRU", "GRU, reset first", "RNN", "RNN, relu"]


@dataclass(frozen=True)
class Case:
    """One row. ``at_least`` is a target for the peer's time over ours."""

    kind: Kind
    what: str
    shape: tuple[int, int, int, int]  # T, B, input size I, H
    dtype: torch.dtype
    backward: bool
    at_least: float | None = None
    ragged: bool = False  # lengths from 1 to T - 1, half of T on average
    bidirectional: bool = False
    layers: int = 1

    @property
    def name(self) -> str:
        return f"{self.title}, {self.step}, {self.size}"

    @property
    def title(self) -> str:
        return f"{self.kind}, {self.what}"

    @property
    def step(self) -> str:
        return "forward + backward" if self.backward else "forward"

    @property
    def size(self) -> str:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        T, B, features, H = self.shape
        return f"{dtype}, T {T}, B {B}, in {features}, hidden {H}"

    @property
    def is_gru(self) -> bool:
        return self.kind.startswith("GRU")

    @property
    def peer(self) -> str:
        if self.kind == "GRU, reset first":  # torch has no such module
            return "eager loop"
        name = "nn.GRU" if self.is_gru else "nn.RNN"
        return f"{name}Cell" if self.shape[0] == 1 else name

    @property
    def gates(self) -> int:
        return 3 if self.is_gru else 1

    @property
    def nonlinearity(self) -> str:
        return "relu" if self.kind == "RNN, relu" else "tanh"

    @property
    def reverse(self) -> tuple[bool, ...]:
        return (False, True)[: 1 + self.bidirectional]

    @property
    def lengths(self) -> list[int]:
        T, B, _, _ = self.shape
        if not self.ragged:
            return [T] * B
        return torch.linspace(1, T - 1, B).round().int().tolist()


_FP32, _BF16 = torch.float32, torch.bfloat16

CASES: dict[str, tuple[Case, ...]] = {
    "cpu": (
        Case("GRU", "dense", (64, 32, 512, 512), _FP32, True, 1.2),
        Case("GRU", "dense", (64, 32, 512, 512), _BF16, True, 1.4),
        Case("GRU", "ragged", (64, 16, 512, 512), _FP32, True, 3.0, ragged=True),
        Case(
            "GRU",
            "two directions, ragged",
            (64, 8, 256, 256),
            _FP32,
            True,
            3.0,
            ragged=True,
            bidirectional=True,
        ),
        Case("GRU", "one sequence", (64, 1, 512, 512), _FP32, False, 1.0),
        Case("GRU", "one step", (1, 1, 64, 64), _FP32, False, 1.0),
        Case("GRU", "one step", (1, 1, 512, 512), _FP32, False, 1.0),
        Case("GRU", "one step", (1, 1, 512, 512), _FP32, True, 1.0),
        Case("GRU, reset first", "dense", (64, 32, 512, 512), _FP32, True, 1.2),
        Case("RNN", "dense", (64, 32, 512, 512), _FP32, True, 1.2),
        Case("RNN, relu", "dense", (64, 32, 512, 512), _FP32, True, 1.2),
        Case("RNN", "ragged", (64, 16, 512, 512), _FP32, True, 3.0, ragged=True),
        Case("RNN", "one sequence", (64, 1, 512, 512), _FP32, False, 1.0),
        Case("RNN", "one step", (1, 1, 64, 64), _FP32, False, 1.0),
        Case("RNN", "one step", (1, 1, 512, 512), _FP32, True, 1.0),
    ),
    "cuda": (
        Case(
            "GRU",
            "two directions, two layers",
            (512, 16, 1024, 1024),
            _BF16,
            True,
            1.5,
            bidirectional=True,
            layers=2,
        ),
        Case("GRU", "ragged", (512, 32, 1024, 1024), _BF16, True, 3.0, ragged=True),
        Case("GRU", "dense", (512, 16, 1024, 1024), _BF16, False),
        Case("RNN", "dense", (512, 16, 1024, 1024), _BF16, True),
    ),
}


def flops(case: Case) -> float:
    """Operations of the products that the valid steps need."""
    _, _, features, H = case.shape
    inputs = features + (case.layers - 1) * len(case.reverse) * H  # of all layers
    token = case.gates * H * (inputs + case.layers * H)
    return 2.0 * sum(case.lengths) * len(case.reverse) * token * (3 if case.backward else 1)


def weight_bytes(case: Case) -> int:
    """Bytes that every step reads: W_hh and, for a single step, W_ih."""
    T, _, features, H = case.shape
    return case.gates * H * (H + (features if T == 1 else 0)) * case.dtype.itemsize


# Calls ------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    input: Tensor  # (T, B, I)
    lengths: Tensor | None  # (B,)
    module: nn.GRU | nn.RNN  # holds the weights that all compared functions use
    grad_output: Tensor  # (T, B, D·H)

    @property
    def variables(self) -> list[Tensor]:
        return [self.input, *self.module.parameters()]


def inputs(case: Case, device: str) -> Inputs:
    T, B, features, H = case.shape
    torch.manual_seed(0)
    module: nn.GRU | nn.RNN
    if case.is_gru:
        module = nn.GRU(features, H, case.layers, bidirectional=case.bidirectional)
    else:
        module = nn.RNN(
            features,
            H,
            case.layers,
            nonlinearity=case.nonlinearity,
            bidirectional=case.bidirectional,
        )
    module = module.to(device, case.dtype).requires_grad_(case.backward)
    lengths = torch.tensor(case.lengths, device=device) if case.ragged else None
    given: dict[str, Any] = {"dtype": case.dtype, "device": device}
    grad_output = torch.randn(T, B, H * len(case.reverse), **given)
    if lengths is not None:
        grad_output[torch.arange(T, device=device)[:, None] >= lengths] = 0
    x = torch.randn(T, B, features, requires_grad=case.backward, **given)
    return Inputs(x, lengths, module, grad_output)


def _parameters(module: nn.GRU | nn.RNN, of_layer: int, reverse: bool) -> gru.Parameters:
    suffix = f"_l{of_layer}" + ("_reverse" if reverse else "")
    return gru.Parameters._make(getattr(module, name + suffix) for name in gru.Parameters._fields)


def ours(case: Case, given: Inputs) -> Callable[[], Sequence[Tensor]]:
    """Return a step, which returns the output, and with ``case.backward`` the gradients."""
    if case.shape[0] == 1:
        return _cell(trifuse.nn.GRUCell if case.is_gru else trifuse.nn.RNNCell, case, given)
    parameters = [
        [_parameters(given.module, of_layer, reverse) for reverse in case.reverse]
        for of_layer in range(case.layers)
    ]
    layer: Callable[..., tuple[Tensor, Tensor]]
    if case.is_gru:
        layer = functools.partial(gru.layer, linear_before_reset=case.kind == "GRU")
    else:
        layer = functools.partial(rnn.layer, nonlinearity=case.nonlinearity)

    def output() -> Tensor:
        x = given.input
        for of_layer in parameters:
            x, _ = layer(x, None, of_layer, given.lengths, reverse=case.reverse)
        return x

    return step(output, given.variables, given.grad_output, case.backward)


def theirs(case: Case, given: Inputs) -> Callable[[], Sequence[Tensor]]:
    """As :func:`ours`, by torch's module, or by the formula where torch has none."""
    if case.peer == "eager loop":
        formula = ours(case, given)

        def loop() -> Sequence[Tensor]:
            with trifuse.backend("eager"):
                return formula()

        return loop
    if case.shape[0] == 1:
        return _cell(nn.GRUCell if case.is_gru else nn.RNNCell, case, given)
    if given.lengths is None:
        return step(
            lambda: given.module(given.input)[0], given.variables, given.grad_output, case.backward
        )
    packed = pack_padded_sequence(given.input.detach(), given.lengths.cpu(), enforce_sorted=False)
    data = packed.data.requires_grad_(case.backward)

    def output() -> Tensor:
        sequence = PackedSequence(
            data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        )
        return pad_packed_sequence(given.module(sequence)[0], total_length=case.shape[0])[0]

    variables = [data, *given.module.parameters()]
    return step(output, variables, given.grad_output, case.backward)


def _cell(module: type[nn.Module], case: Case, given: Inputs) -> Callable[[], Sequence[Tensor]]:
    """One step of a cell from a fixed state."""
    _, B, features, H = case.shape
    options = {} if case.is_gru else {"nonlinearity": case.nonlinearity}
    cell = module(features, H, **options)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(given.module, f"{name}_l0"))
    state = torch.ones(B, H, dtype=case.dtype, device=given.input.device)
    return step(
        lambda: cell(given.input[0], state)[None], given.variables, given.grad_output, case.backward
    )


# Measuring --------------------------------------------------------------------------------------


def checker(case: Case, given: Inputs) -> Callable[[], None]:
    """Return a function that checks ours, by the kernels in force, against torch's module.

    In 16 bits rounding errors add up over the steps, so both are compared with the formula in
    float64. The function raises AssertionError if ours is wrong.
    """

    def compared(results: Sequence[Tensor]) -> Sequence[Tensor]:
        # torch's gradient of a ragged input is packed, so it is left out.
        return (results[0], *results[2:]) if case.ragged and case.backward else results

    expected = compared(theirs(case, given)())
    exact: Sequence[Tensor] | None = None
    if case.dtype != _FP32:
        wide = Inputs(
            given.input.detach().double().requires_grad_(case.backward),
            given.lengths,
            copy.deepcopy(given.module).double(),
            given.grad_output.double(),
        )
        with trifuse.backend("eager"):
            exact = compared(ours(case, wide)())

    def check() -> None:
        results = compared(ours(case, given)())
        if exact is None:
            check_agreement(case.peer, results, expected)
        else:
            check_accuracy(case.peer, results, expected, exact)

    return check


def run(case: Case, device: str, seconds: float) -> Result:
    given = inputs(case, device)
    check = checker(case, given)
    check()
    functions = {"ours": ours(case, given), case.peer: theirs(case, given)}
    operator = "gru" if case.is_gru else "rnn"
    also, refused = other_kernels(
        backends.Call(operator, device, case.dtype), lambda: ours(case, given), lambda _: check()
    )
    functions |= also
    T, B, _, _ = case.shape
    bound_by_memory = B == 1 and (T == 1 or not case.backward) and device == "cpu"
    if bound_by_memory:
        ceiling = read_rate(weight_bytes(case))
        work = float(weight_bytes(case) * T * (3 if case.backward else 1))
    else:
        ceiling, work = ceilings.matrix_rate(case.dtype, device=device), flops(case)
    timings = timing.alternate(functions, device=device, seconds=seconds)
    return Result(
        case=case.title,
        step=case.step,
        shape=case.size,
        ours=timings.pop("ours"),
        also={name: timings.pop(name) for name in also},
        peers=timings,
        refused=refused,
        work=work,
        ceiling=ceiling,
        unit="B" if bound_by_memory else "FLOP",
        at_least=case.at_least,
    )


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    return run_command("gru", "gru and rnn", __doc__, CASES, run, argv)
