"""The calls of well-known models, each against torch's own function or module.

``sweep`` makes every call of ``sweep_calls.py``; ``sweep attention|norm|recurrent`` those of one
operator. Inference is forward without gradients. Training is forward and backward with the
gradients of all tensors, and dropout where the model has it. torch is called as a user would: with
a boolean mask in place of key lengths or a window, and with separate functions for dropout,
addition and norm.

The command prints the share of calls for which torch is not faster, the geometric means of torch's
time over ours, and the ten calls with the lowest ratio. A call with a ratio below 0.95 is timed
three times more; the median of the four ratios counts. Calls that take torch less than 20 µs are
listed separately, by the microseconds by which ours take longer, because their time is that of
Python and checks.
"""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import trifuse
from trifuse.benchmarks import command_line, machine, passes, pictures, timing
from trifuse.benchmarks.agreement import check_accuracy, check_agreement
from trifuse.benchmarks.cases import run_selected
from trifuse.benchmarks.sweep_calls import CALLS, Attention, Norm, Recurrent, SweptCall
from trifuse.benchmarks.terminal import console, print_table
from trifuse.benchmarks.timing import Timing

OPERATORS = {"attention": Attention, "norm": Norm, "recurrent": Recurrent}
PICTURE = Path("docs/sweep.png")
RETIMED_BELOW, SHORT = 0.95, 20e-6
WINDOW = 64  # keys on either side of a query, as in ModernBERT's local layers


class Pair(NamedTuple):
    """The same computation by trifuse and by torch, and the tensors that it differentiates."""

    ours: Callable[[], Tensor]
    torch: Callable[[], Tensor]
    variables: Sequence[Tensor]  # ours, if the two have tensors of their own
    torch_variables: Sequence[Tensor]
    random: bool = False  # the two draw different numbers, so results can't be compared


class Precision(NamedTuple):
    """The dtype of the tensors' values, and the dtype to compute with, at least as wide."""

    rounded_to: torch.dtype
    computed_in: torch.dtype

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.rounded_to).to(self.computed_in)


def make(call: SweptCall, computed_in: torch.dtype | None = None) -> Pair:
    """Make the tensors of a call and both functions, from torch's seed."""
    precision = Precision(call.dtype, computed_in or call.dtype)
    if isinstance(call.call, Attention):
        return _attention(call.call, precision, call.kind == "training")
    if isinstance(call.call, Norm):
        return _norm(call.call, precision)
    return _recurrent(call.call, precision)


def _attention(case: Attention, precision: Precision, training: bool) -> Pair:
    B, Lq, Lk, H, E = case.B, case.Lq, case.Lk, case.H, case.head_dim
    query = precision.randn(B, H, Lq, E)
    key, value = (precision.randn(B, case.Hkv, Lk, E) for _ in range(2))
    options: dict[str, Any] = {"enable_gqa": case.Hkv != H, "dropout_p": case.dropout_p}
    ours, theirs, variables = dict(options), dict(options), [query, key, value]
    position = torch.arange(Lk)
    if case.masking == "causal":
        ours["is_causal"] = theirs["is_causal"] = True
    elif case.masking == "key lengths":
        lengths = torch.linspace(Lk / 4, 3 * Lk / 4, B).long().clamp(min=1)
        ours["key_lengths"] = lengths
        theirs["attn_mask"] = (position < lengths[:, None])[:, None, None]
    elif case.masking == "window":
        ours["window"] = WINDOW
        theirs["attn_mask"] = (position - position[:, None]).abs() <= WINDOW
    elif case.masking == "bias":
        bias = precision.randn(1, H, Lq, Lk)
        ours["attn_mask"] = theirs["attn_mask"] = bias
        variables += [bias] if training else []
    return Pair(
        lambda: trifuse.scaled_dot_product_attention(query, key, value, **ours),
        lambda: F.scaled_dot_product_attention(query, key, value, **theirs),
        variables,
        variables,
        random=case.dropout_p > 0,
    )


def _norm(case: Norm, precision: Precision) -> Pair:
    x, residual = (precision.randn(case.rows, case.N) for _ in range(2))
    weight, bias = (precision.randn(case.N) for _ in range(2))
    shape, p = (case.N,), case.dropout_p
    variables = [x, weight]
    if case.residual:
        variables.append(residual)
    if not case.rms_norm:
        variables.append(bias)

    def theirs() -> Tensor:
        total = F.dropout(x, p) if p else x
        total = residual + total if case.residual else total
        if case.rms_norm:
            return F.rms_norm(total, shape, weight, 1e-5)
        return F.layer_norm(total, shape, weight, bias)

    return Pair(
        lambda: trifuse.dropout_add_layer_norm(
            x,
            residual if case.residual else None,
            weight,
            None if case.rms_norm else bias,
            p,
            training=p > 0,
            rms_norm=case.rms_norm,
        ),
        theirs,
        variables,
        variables,
        random=p > 0,
    )


def _recurrent(case: Recurrent, precision: Precision) -> Pair:
    options: dict[str, Any] = {"bidirectional": case.bidirectional}
    if case.proj_size:
        options["proj_size"] = case.proj_size
    sizes = case.input_size, case.hidden_size
    theirs = getattr(nn, case.module)(*sizes, **options)
    theirs = theirs.to(precision.rounded_to).to(precision.computed_in)
    ours = getattr(trifuse.nn, case.module)(*sizes, **options, dtype=precision.computed_in)
    ours.load_state_dict(theirs.state_dict())
    x = precision.randn(case.T, case.B, case.input_size)
    return Pair(
        lambda: ours(x)[0],
        lambda: theirs(x)[0],
        [x, *ours.parameters()],
        [x, *theirs.parameters()],
    )


class Outcome(NamedTuple):
    call: SweptCall
    ours: float  # seconds, the median
    torch: float
    ratio: float  # torch's time over ours
    over: float  # seconds of ours less torch's

    @property
    def is_short(self) -> bool:
        return self.torch < SHORT

    def record(self) -> dict[str, Any]:
        times = {"ours": self.ours, "torch": self.torch, "ratio": self.ratio, "over": self.over}
        return {"call": self.call.name, "group": self.call.group, **times}


def run(call: SweptCall, seconds: float) -> Outcome:
    """Time a call.

    Raises:
        AssertionError: the two don't compute the same.
    """
    torch.manual_seed(0)
    pair = make(call)
    training = call.kind == "training"
    timed = {
        "ours": _timed(pair.ours, pair.variables, training),
        "torch": _timed(pair.torch, pair.torch_variables, training),
    }
    if pair.random:
        pass
    elif call.dtype == torch.float32:
        check_agreement("torch", timed["ours"](), timed["torch"]())
    else:
        torch.manual_seed(0)
        exact = make(call, torch.float32)
        expected = _timed(exact.torch, exact.torch_variables, training)()
        check_accuracy("torch", timed["ours"](), timed["torch"](), expected)
    timings = timing.alternate(timed, seconds=seconds)
    ratios = [_ratio(timings)]
    if ratios[0] < RETIMED_BELOW:
        ratios += [_ratio(timing.alternate(timed, seconds=seconds)) for _ in range(3)]
    ours, theirs = timings["ours"], timings["torch"]
    return Outcome(call, ours.median, theirs.median, statistics.median(ratios), ours.over(theirs))


def _ratio(timings: dict[str, Timing]) -> float:
    return statistics.median(timings["ours"].ratios(timings["torch"]))


def _timed(
    function: Callable[[], Tensor], variables: Sequence[Tensor], training: bool
) -> Callable[[], Sequence[Tensor]]:
    if training:
        return passes.forward_backward(function, variables)
    return passes.forward(function)


# Tables and picture ------------------------------------------------------------------------------


def summary(outcomes: Sequence[Outcome]) -> Table:
    """The number of calls in each group, the share at or above torch, and the mean ratio."""
    out = Table("calls", "number", "torch not faster", "below 0.95", "lowest", "geometric mean")
    for column in out.columns[1:]:
        column.justify = "right"
    long = [outcome for outcome in outcomes if not outcome.is_short]
    for group in (*dict.fromkeys(outcome.call.group for outcome in long), None):
        ratios = [each.ratio for each in long if group in (None, each.call.group)]
        if not ratios:
            continue
        at_least = sum(ratio >= 1 for ratio in ratios) / len(ratios)
        out.add_row(
            group or "all",
            str(len(ratios)),
            f"{at_least:.1%}",
            str(sum(ratio < RETIMED_BELOW for ratio in ratios)),
            f"{min(ratios):.2f}×",
            f"{statistics.geometric_mean(ratios):.2f}×",
        )
    return out


def table(title: str, outcomes: Sequence[Outcome]) -> Table:
    out = Table("call", "ours", "torch", "ratio", "ours − torch", title=title)
    for column in out.columns[1:]:
        column.justify = "right"
    for each in outcomes:
        out.add_row(
            each.call.name,
            f"{each.ours * 1e6:,.0f} µs",
            f"{each.torch * 1e6:,.0f} µs",
            f"{each.ratio:.2f}×",
            f"{each.over * 1e6:+,.1f} µs",
        )
    return out


def plot(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Draw a dot for each call: torch's time over ours, against torch's time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for group in dict.fromkeys(outcome.call.group for outcome in outcomes):
        dots = [outcome for outcome in outcomes if outcome.call.group == group]
        mean = statistics.geometric_mean([dot.ratio for dot in dots])
        axes.scatter(
            [1e3 * dot.torch for dot in dots],
            [dot.ratio for dot in dots],
            s=14,
            alpha=0.8,
            label=f"{group}: {len(dots)} calls, {mean:.1f}× in the mean",
        )
    axes.axhline(1, color="#888888", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20)
    axes.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("torch's time in milliseconds", fontsize=9)
    axes.set_ylabel("times as fast as torch", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}
    axes.legend(frameon=False, fontsize=8, **above)
    pictures.add_caption(figure, title)
    pictures.save(figure, path)
    pyplot.close(figure)


def main(argv: Sequence[str]) -> int:
    """Time the calls, print the tables and draw the picture."""
    parser = command_line.parser("sweep", __doc__, devices=("cpu",))
    # argparse refuses an empty list beside choices.
    parser.add_argument("operator", nargs="*", metavar="|".join(OPERATORS), help="default: all")
    options = command_line.parse(parser, argv, PICTURE)
    if unknown := set(options.operator) - set(OPERATORS):
        parser.error(f"operator: expected {', '.join(OPERATORS)}; got {', '.join(unknown)}")
    partial = options.operator or options.cases
    if partial and options.plot == PICTURE:
        options.plot = None  # the picture shows all calls
    warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
    wanted = tuple(OPERATORS[name] for name in options.operator or OPERATORS)
    calls = [call for call in CALLS if isinstance(call.call, wanted)]
    timed = functools.partial(run, seconds=0.1 if options.quick else 0.7)
    facts, outcomes, failed = run_selected(options, calls, lambda call: call.name, timed)
    if outcomes:
        _show(outcomes)
        if options.plot is not None:
            plot(options.plot, machine.describe(facts), outcomes)
            console.print(f"wrote {options.plot}", markup=False)
    return bool(failed)


def _show(outcomes: Sequence[Outcome]) -> None:
    short = [outcome for outcome in outcomes if outcome.is_short]
    long = [outcome for outcome in outcomes if not outcome.is_short]
    if short:
        worst = sorted(short, key=lambda outcome: -outcome.over)[:10]
        title = f"of {len(short)} calls that take torch less than 20 µs, ours furthest behind"
        print_table(table(title, worst))
    if long:
        worst = sorted(long, key=lambda outcome: outcome.ratio)[:10]
        print_table(table("the lowest ratios of torch's time to ours", worst))
        print_table(summary(outcomes))
