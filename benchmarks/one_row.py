"""Recurrent layers and cells on a batch of one row, for 1 to 20 steps, against torch's.

Short calls on one row take microseconds, so what counts is the overhead of a call and how the
kernels read the weights. Each number of the table is torch's time over ours. Forward is timed
without gradients; forward + backward takes the gradients of the input and of all parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import command_line, passes, timing
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.cases import run_selected
from trifuse.benchmarks.terminal import console, print_table
from trifuse.benchmarks.timing import Timing

STEPS = (1, 2, 3, 5, 20)


class Case(NamedTuple):
    module: str  # its name in torch.nn and trifuse.nn
    dtype: torch.dtype
    H: int  # also the input size
    projection: int
    backward: bool

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        projected = f", proj_size {self.projection}" if self.projection else ""
        return f"{self.module}, {self.step}, {dtype}, H {self.H}{projected}"

    @property
    def step(self) -> str:
        return "forward + backward" if self.backward else "forward"

    @property
    def steps(self) -> tuple[int, ...]:
        return (1,) if self.module.endswith("Cell") else STEPS


# The name in torch.nn and in trifuse.nn; whether it has a projection.
_MODULES = (
    ("LSTM", False),
    ("LSTM", True),
    ("GRU", False),
    ("RNN", False),
    ("LSTMCell", False),
    ("GRUCell", False),
    ("RNNCell", False),
)
CASES = tuple(
    Case(module, dtype, H, H // 4 if projected else 0, backward)
    for backward, (module, projected), dtype, H in itertools.product(
        (False, True),
        _MODULES,
        (torch.float32, torch.float64, torch.bfloat16),
        (64, 256, 512),
    )
)


class Outcome(NamedTuple):
    case: Case
    timings: dict[int, dict[str, Timing]]  # by the number of steps: ours and torch's

    def ratios(self) -> dict[int, float]:
        return {T: each["torch"].median / each["ours"].median for T, each in self.timings.items()}

    def record(self) -> dict[str, Any]:
        medians = {
            T: {name: measured.median for name, measured in each.items()}
            for T, each in self.timings.items()
        }
        return {"case": self.case.name, "steps": medians, "ratios": self.ratios()}


def run(case: Case, seconds: float) -> Outcome:
    """Time a case for each number of steps.

    Raises:
        AssertionError: the two don't compute the same.
    """
    torch.manual_seed(0)
    given: dict[str, Any] = {"proj_size": case.projection} if case.projection else {}
    theirs = getattr(nn, case.module)(case.H, case.H, dtype=case.dtype, **given)
    ours = getattr(trifuse.nn, case.module)(case.H, case.H, dtype=case.dtype, **given)
    ours.load_state_dict(theirs.state_dict())
    timings = {}
    for T in case.steps:
        shape = (1, case.H) if case.module.endswith("Cell") else (T, 1, case.H)
        x = torch.randn(shape, dtype=case.dtype, requires_grad=case.backward)
        calls = {"ours": _call(ours, x, case.backward), "torch": _call(theirs, x, case.backward)}
        check_agreement("torch", calls["ours"](), calls["torch"]())
        timings[T] = timing.alternate(calls, seconds=seconds)
    return Outcome(case, timings)


def _call(module: nn.Module, x: Tensor, backward: bool) -> Callable[[], Sequence[Tensor]]:
    def output() -> Tensor:
        result = module(x)
        return result[0] if isinstance(result, tuple) else result

    if not backward:
        return passes.forward(output)
    variables = [x, *module.parameters()]

    def forward_backward() -> Sequence[Tensor]:
        y = output()
        return (y.detach(), *torch.autograd.grad(y.sum(), variables))

    return forward_backward


def table(outcomes: Sequence[Outcome]) -> Table:
    out = Table("case", *(f"T {T}" for T in STEPS), "ours, T 1", title="torch's time over ours")
    for column in out.columns[1:]:
        column.justify = "right"
    for outcome in outcomes:
        ratios = [f"{ratio:.2f}×" for ratio in outcome.ratios().values()]
        ratios += [""] * (len(STEPS) - len(ratios))
        out.add_row(outcome.case.name, *ratios, f"{outcome.timings[1]['ours'].median * 1e6:.0f} µs")
    return out


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    parser = command_line.parser("one_row", __doc__, devices=("cpu",), plots=False)
    options = parser.parse_args(argv)
    # torch warns that LSTMs with projections take a slower path.
    warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
    call = functools.partial(run, seconds=0.05 if options.quick else 0.25)
    _, outcomes, failed = run_selected(options, CASES, lambda case: case.name, call)
    if outcomes:
        print_table(table(outcomes))
        worst = min(outcomes, key=lambda outcome: min(outcome.ratios().values()))
        ratios = [ratio for outcome in outcomes for ratio in outcome.ratios().values()]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        console.print(
            f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)} are at least as fast; least "
            f"{min(ratios):.2f}× ({worst.case.name}); geometric mean {mean:.2f}×"
        )
    return bool(failed)
