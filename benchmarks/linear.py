"""Linear layers: trifuse's matrix product against torch's, by the number of rows.

A call goes through the products of a layer of BERT-base: 768 to 768 features four times, 768 to
3072, and back; in inference through four layers, so that no weight stays in a cache. In inference,
weights are packed beforehand, as a fused model keeps them, or used unpacked, as it does with few
rows. Training takes the gradients of input and weights too. Gated calls go through eight first
halves of SwiGLU, 768 to twice 2048 features, as one product each, or as torch's products, SiLU and
multiplication one by one.

The ceiling is the larger of two times: the operations at the matrix rate, and in inference the
bytes of the weights at the copy rate.

The table that chooses the product, in trifuse/ops/_linear_choice.py, follows from torch's time over
ours with 64 and 512 rows. A second table has the mean of the two and the smaller one.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from trifuse.benchmarks import ceilings, command_line, timing
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.cases import run_selected
from trifuse.benchmarks.terminal import print_table
from trifuse.benchmarks.timing import Timing
from trifuse.ops import _linear_choice

ROWS = (1, 4, 16, 32, 64, 512)
DECISIVE_ROWS = (64, 512)  # the table of choices follows from these
LAYER = ((768, 768),) * 4 + ((768, 3072), (3072, 768))  # in and out features
GATED = ((768, 2048),) * 16  # a gate and its other factor in turn


class Case(NamedTuple):
    dtype: torch.dtype
    rows: int
    training: bool
    gated: bool = False

    @property
    def name(self) -> str:
        kind = "gated" if self.gated else "training" if self.training else "inference"
        return f"{str(self.dtype).removeprefix('torch.')}, {kind}, {self.rows} rows"

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """In and out features of a call's products."""
        return GATED if self.gated else LAYER * (1 if self.training else 4)

    @property
    def weights(self) -> int:
        """How many numbers the weights hold."""
        return sum(k * n for k, n in self.products)

    @property
    def operations(self) -> float:
        """The floating-point operations of one call's products."""
        products = 3 if self.training else 1
        return 2.0 * products * self.rows * self.weights

    @property
    def unpacked(self) -> bool:
        """Whether the product with weights as they are serves such a call."""
        return not self.training and self.rows < 512

    def floor(self) -> float:
        """Seconds that the ceilings allow."""
        computing = self.operations / ceilings.matrix_rate(self.dtype).value
        if self.training:
            return computing
        return max(computing, self.weights * self.dtype.itemsize / ceilings.copy_rate().value)


CASES = tuple(
    Case(dtype, rows, training, gated)
    for dtype, (training, gated), rows in itertools.product(
        (torch.float32, torch.bfloat16), ((False, False), (True, False), (False, True)), ROWS
    )
    if rows >= 64 or not training  # torch's product serves training with fewer
)


class Outcome(NamedTuple):
    case: Case
    timings: dict[str, Timing]  # ours, with and without packing, and torch's
    floor: float  # seconds

    @property
    def ratio(self) -> float:
        """torch's time over ours, the median over the rounds."""
        return statistics.median(self.timings["ours"].ratios(self.timings["torch"]))

    def fraction(self) -> float:
        return self.floor / self.timings["ours"].median

    def record(self) -> dict[str, Any]:
        medians = {name: measured.median for name, measured in self.timings.items()}
        return {"case": self.case.name, **medians, "fraction": self.fraction()}


def run(case: Case, seconds: float) -> Outcome:
    """Time a case.

    Raises:
        AssertionError: the two don't compute the same.
    """
    torch.manual_seed(0)
    weights = [torch.randn(n, k).div_(k**0.5).to(case.dtype) for k, n in case.products]
    inputs = {k: torch.randn(case.rows, k).to(case.dtype) for k in (768, 3072)}
    if case.gated:
        timed = {"ours": _gate_by_ours(inputs, weights), "torch": _gate(inputs, weights)}
    elif case.training:
        timed = {"ours": _train_by_ours(inputs, weights), "torch": _train(inputs, weights)}
    else:
        timed = {"ours": _infer_by_ours(inputs, weights), "torch": _infer(inputs, weights)}
    if case.unpacked:
        unpacked = _gate_unpacked if case.gated else _infer_unpacked
        timed["unpacked"] = unpacked(inputs, weights)
    for mine in timed.keys() - {"torch"}:
        check_agreement("torch", timed[mine](), timed["torch"]())
    return Outcome(case, timing.alternate(timed, seconds=seconds), case.floor())


def _infer(inputs: dict[int, Tensor], weights: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    return lambda: [F.linear(inputs[weight.shape[1]], weight) for weight in weights]


def _infer_by_ours(
    inputs: dict[int, Tensor], weights: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    ops = torch.ops.trifuse
    packed = ops.pack_linears(weights)
    return lambda: [
        ops.linear_packed(inputs[weight.shape[1]], each, weight.shape[0], None)
        for weight, each in zip(weights, packed, strict=True)
    ]


def _infer_unpacked(
    inputs: dict[int, Tensor], weights: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    product = torch.ops.trifuse.linear_unpacked
    return lambda: [product(inputs[weight.shape[1]], weight, None) for weight in weights]


def _gate(inputs: dict[int, Tensor], weights: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    x = inputs[768]
    return lambda: [
        F.silu(F.linear(x, gate)) * F.linear(x, up)
        for gate, up in zip(weights[::2], weights[1::2], strict=True)
    ]


def _gate_by_ours(
    inputs: dict[int, Tensor], weights: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    ops, x, N = torch.ops.trifuse, inputs[768], weights[0].shape[0]
    packed = ops.pack_linears(weights)
    return lambda: [
        ops.linear_packed(x, gate, N, None, "silu", up)
        for gate, up in zip(packed[::2], packed[1::2], strict=True)
    ]


def _gate_unpacked(
    inputs: dict[int, Tensor], weights: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    product, x = torch.ops.trifuse.linear_unpacked, inputs[768]
    return lambda: [
        product(x, gate, None, "silu", up)
        for gate, up in zip(weights[::2], weights[1::2], strict=True)
    ]


def _train(inputs: dict[int, Tensor], weights: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    def step() -> list[Tensor]:
        grads = []
        for weight in weights:
            x = inputs[weight.shape[1]]
            out = F.linear(x, weight)
            grads += [torch.mm(out, weight), torch.mm(out.t(), x)]
        return grads

    return step


def _train_by_ours(
    inputs: dict[int, Tensor], weights: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    product = torch.ops.trifuse.linear

    def step() -> list[Tensor]:
        grads = []
        for weight in weights:
            x = inputs[weight.shape[1]]
            out = product(x, weight, None)
            grads += [product(out, weight.t(), None), product(out.t(), x.t(), None)]
        return grads

    return step


def table(outcomes: Sequence[Outcome]) -> Table:
    out = Table("case", "ours", "unpacked", "torch", "torch / ours", "of the ceiling")
    for column in out.columns[1:]:
        column.justify = "right"
    for outcome in outcomes:
        columns = [
            f"{outcome.timings[name].median * 1e3:.2f} ms" if name in outcome.timings else ""
            for name in ("ours", "unpacked", "torch")
        ]
        out.add_row(
            outcome.case.name, *columns, f"{outcome.ratio:.2f}×", f"{outcome.fraction():.0%}"
        )
    return out


def gains(outcomes: Sequence[Outcome]) -> Table:
    """The figures that the table of choices follows from, for each dtype and kind of call.

    The last column is what the table in force chooses by for this CPU.
    """
    columns = ("mean", "smallest", "the choice")
    title = "torch / ours with 64 and 512 rows"
    out = Table("product", *columns, title=title)
    for dtype, training in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        ratios = [
            outcome.ratio
            for outcome in outcomes
            if outcome.case in [Case(dtype, rows, training) for rows in DECISIVE_ROWS]
        ]
        if len(ratios) < len(DECISIVE_ROWS):
            continue  # --cases left one out
        kind = "training" if training else "inference"
        out.add_row(
            f"{str(dtype).removeprefix('torch.')}, {kind}",
            f"{statistics.geometric_mean(ratios):.2f}×",
            f"{min(ratios):.2f}×",
            _linear_choice.choose(dtype).reason,
        )
    return out


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    parser = command_line.parser("linear", __doc__, devices=("cpu",), plots=False)
    options = parser.parse_args(argv)
    call = functools.partial(run, seconds=0.3 if options.quick else 2.0)
    done = run_selected(options, CASES, lambda case: case.name, call)
    if done.outcomes:
        print_table(table(done.outcomes))
        decisive = gains(done.outcomes)
        if decisive.row_count:
            print_table(decisive)
    return bool(done.failed)
