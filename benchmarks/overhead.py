"""A call's overhead: how much longer than torch's a call takes that computes next to nothing.

Tensors have a few dozen elements a row, so a call's time is that of Python, the checks, the
dispatcher and autograd. Calls run in one thread unless --threads is given, because passing work to
another thread takes longer than everything else. Forward is timed without gradients; forward +
backward takes the gradients of all tensors and parameters. The last columns are ours less torch's,
the median over the rounds, and the limit for it.

The same plain call of attention is made in several spellings, because each must be recognised as
plain: numbers as ints, a mask without batch and heads, and tensors without a batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import trifuse
from trifuse.benchmarks import command_line, passes, report, timing
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.cases import run_selected
from trifuse.benchmarks.terminal import print_table
from trifuse.benchmarks.timing import Timing

N, HEADS = 32, 2
AT_MOST = {False: 3e-6, True: 8e-6}  # seconds of ours less torch's, without and with gradients


class Calls(NamedTuple):
    """The same computation by trifuse and by torch, from the same tensors."""

    ours: Callable[..., Any]
    torch: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    random: bool = False  # the two draw different numbers, so results can't be compared


def _vectors() -> tuple[Tensor, Tensor]:
    return 1 + torch.randn(N) / 8, torch.randn(N)


def _norm(p: float | None = None, rows: int = 1) -> Calls:
    """LayerNorm of x or, with the probability p, of residual + dropout(x)."""
    x = torch.randn(rows, N)
    if p is None:
        return Calls(
            lambda x, w, b: trifuse.dropout_add_layer_norm(x, None, w, b),
            lambda x, w, b: F.layer_norm(x, (N,), w, b),
            (x, *_vectors()),
        )

    def theirs(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(residual + (F.dropout(x, p) if p else x), (N,), w, b)

    return Calls(
        lambda x, r, w, b: trifuse.dropout_add_layer_norm(x, r, w, b, p, training=True),
        theirs,
        (x, torch.randn(rows, N), *_vectors()),
        random=p > 0,
    )


def _attention(
    leading: tuple[int, ...] = (1, HEADS), mask: tuple[int, ...] | None = None, **options: Any
) -> Calls:
    """Attention; ``leading`` are the dimensions before the tokens', ``mask`` a boolean's shape."""
    tensors = tuple(torch.randn(*leading, 2, N // HEADS) for _ in range(3))
    if mask is not None:
        options["attn_mask"] = torch.ones(mask, dtype=torch.bool)
    return Calls(
        functools.partial(trifuse.scaled_dot_product_attention, **options),
        functools.partial(F.scaled_dot_product_attention, **options),
        tensors,
        random=options.get("dropout_p", 0) > 0,
    )


def _modules(ours: nn.Module, theirs: nn.Module, *tensors: Tensor, **options: Any) -> Calls:
    ours.load_state_dict(theirs.state_dict())
    return Calls(functools.partial(ours, **options), functools.partial(theirs, **options), tensors)


class _AddNorm(nn.LayerNorm):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(residual + x)


def _multihead() -> Calls:
    x = torch.randn(2, 2, N)
    ours, theirs = (m.MultiheadAttention(N, HEADS, batch_first=True) for m in (trifuse.nn, nn))
    return _modules(ours, theirs, x, x, x, need_weights=False)


def _encoder_layer() -> Calls:
    theirs = nn.TransformerEncoderLayer(N, HEADS, N, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(theirs)
    trifuse.fuse(ours)
    return _modules(ours, theirs, torch.randn(2, 2, N))


def _cell(name: str) -> Calls:
    ours, theirs = (getattr(module, name)(N, N) for module in (trifuse.nn, nn))
    return _modules(ours, theirs, torch.randn(1, N))


MAKERS: dict[str, Callable[[], Calls]] = {
    "norm": _norm,
    "norm, residual": functools.partial(_norm, 0.0),
    "norm, residual, dropout": functools.partial(_norm, 0.1),
    "attention": _attention,
    "attention, causal": functools.partial(_attention, is_causal=True),
    "attention, boolean mask": functools.partial(_attention, mask=(1, 1, 2, 2)),
    "attention, boolean mask (Lq, Lk)": functools.partial(_attention, mask=(2, 2)),
    "attention, dropout_p=0": functools.partial(_attention, dropout_p=0),
    "attention, scale=1": functools.partial(_attention, scale=1),
    "attention, 3-D": functools.partial(_attention, (HEADS,)),
    "attention, dropout": functools.partial(_attention, dropout_p=0.1),
    "DropoutAddLayerNorm": lambda: _modules(
        trifuse.nn.DropoutAddLayerNorm(N), _AddNorm(N), torch.randn(1, N), torch.randn(1, N)
    ),
    "MultiheadAttention": _multihead,
    "TransformerEncoderLayer": _encoder_layer,
    "LSTMCell": functools.partial(_cell, "LSTMCell"),
    "GRUCell": functools.partial(_cell, "GRUCell"),
    "RNNCell": functools.partial(_cell, "RNNCell"),
}


class Case(NamedTuple):
    maker: str
    backward: bool

    @property
    def name(self) -> str:
        return f"{self.maker}, {'forward + backward' if self.backward else 'forward'}"


CASES = tuple(Case(maker, backward) for backward in (False, True) for maker in MAKERS)


class Outcome(NamedTuple):
    case: Case
    timings: dict[str, Timing]  # ours and torch's

    @property
    def overhead(self) -> float:
        """Seconds of ours less torch's, the median over the rounds."""
        return self.timings["ours"].over(self.timings["torch"])

    @property
    def at_most(self) -> float:
        """The limit for the overhead, in seconds."""
        return AT_MOST[self.case.backward]

    @property
    def met(self) -> bool:
        return self.overhead <= self.at_most

    def record(self) -> dict[str, Any]:
        medians = {name: measured.median for name, measured in self.timings.items()}
        limit = {"at_most": self.at_most, "met": self.met}
        return {"case": self.case.name, **medians, "overhead": self.overhead, **limit}


def run(case: Case, seconds: float) -> Outcome:
    """Time a case.

    Raises:
        AssertionError: the two don't compute the same.
    """
    torch.manual_seed(0)
    calls = MAKERS[case.maker]()
    timed = {
        "ours": _call(calls.ours, calls.tensors, case.backward),
        "torch": _call(calls.torch, calls.tensors, case.backward),
    }
    if not calls.random:
        check_agreement("torch", timed["ours"](), timed["torch"]())
    return Outcome(case, timing.alternate(timed, seconds=seconds))


def _call(
    function: Callable[..., Any], tensors: Sequence[Tensor], backward: bool
) -> Callable[[], Sequence[Tensor]]:
    def output() -> Tensor:
        result = function(*tensors)
        return result[0] if isinstance(result, tuple) else result

    if not backward:
        return passes.forward(output)
    module = function.func if isinstance(function, functools.partial) else function
    parameters = tuple(module.parameters()) if isinstance(module, nn.Module) else ()
    return passes.forward_backward(output, list(dict.fromkeys((*tensors, *parameters))))


def table(outcomes: Sequence[Outcome]) -> Table:
    columns = ("ours", "torch", "ours - torch", "at most")
    out = Table("case", *columns, title="microseconds a call")
    for column in out.columns[1:]:
        column.justify = "right"
    for outcome in outcomes:
        medians = (outcome.timings[name].median for name in ("ours", "torch"))
        over = report.coloured(f"{outcome.overhead * 1e6:.1f}", outcome.met)
        cells = [f"{seconds * 1e6:.1f}" for seconds in medians]
        out.add_row(outcome.case.name, *cells, over, f"{outcome.at_most * 1e6:.0f}")
    return out


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    parser = command_line.parser("overhead", __doc__, devices=("cpu",), plots=False)
    parser.set_defaults(threads=1)
    options = parser.parse_args(argv)
    call = functools.partial(run, seconds=0.1 if options.quick else 1.0)
    done = run_selected(options, CASES, lambda case: case.name, call)
    if done.outcomes:
        print_table(table(done.outcomes))
    return bool(done.failed)
