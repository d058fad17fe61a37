"""Shows the rows of a comparison: as tables, as a picture and as a JSON file."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from trifuse.benchmarks import machine, pictures
from trifuse.benchmarks.comparison import MemoryResult, Result
from trifuse.benchmarks.terminal import console, print_table
from trifuse.benchmarks.timing import Timing, percentile


def write(
    name: str,
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    results: Sequence[Result],
    memory: Sequence[MemoryResult] = (),
    more: Mapping[str, Any] | None = None,
    failed: Mapping[str, str] | None = None,
    fastest_only: bool = False,
) -> None:
    """Print the tables; write the JSON and the picture if requested."""
    refused: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for peer, why in result.refused.items():
            refused.setdefault((peer, why), []).append(f"{result.case}, {result.step}")
    for (peer, why), cases in refused.items():
        line = f"{peer} does not serve {'; '.join(cases)}: {why}"
        console.print(line, style="dim", markup=False, soft_wrap=True)
    if results:
        print_table(table(name, results, fastest_only))
        if compared := kernels_compared(results):
            console.print(compared, soft_wrap=True)
    if memory:
        console.print(memory_table(memory))
    if options.json is not None:
        save(options, facts, results, memory, more, failed)
        console.print(f"wrote {options.json}", markup=False)
    if options.plot is not None and results:
        plot(options.plot, f"{name}\n{machine.describe(facts)}", results)
        console.print(f"wrote {options.plot}", markup=False)


def save(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    results: Sequence[Result],
    memory: Sequence[MemoryResult] = (),
    more: Mapping[str, Any] | None = None,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write the JSON of a comparison if requested."""
    records = {"memory": [result.record() for result in memory]}
    save_times(options, facts, results, failed, {**records, **(more or {})})


def save_times(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    outcomes: Sequence[Any],
    failed: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write the JSON if requested: the record of each outcome, and the cases that failed."""
    if options.json is None:
        return
    content = {
        "machine": dict(facts),
        "times": [outcome.record() for outcome in outcomes],
        "failed": dict(failed or {}),
        **(more or {}),
    }
    write_json(options.json, content, quietly=True)


def write_json(path: Path, content: Mapping[str, Any], *, quietly: bool = False) -> None:
    """Write figures: times in seconds, sizes in bytes, rates per second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if not quietly:
        console.print(f"wrote {path}", markup=False)


def table(title: str, results: Sequence[Result], fastest_only: bool = False) -> Table:
    """Times with their spread, the ratio beside its target, and the fraction of the ceiling.

    Every peer has a column. With ``fastest_only``, for rows with different peers, a single column
    names the fastest of each row. A target against a single peer stands below the row's own, and so
    does a limit on our own time.
    """
    peers = list(dict.fromkeys(name for result in results for name in result.peers))
    shown = ["fastest peer"] if fastest_only else peers
    units = "/".join(dict.fromkeys(f"G{result.unit}" for result in results))
    also = list(dict.fromkeys(name for result in results for name in result.also))
    columns = ("ours", *also, *shown, "ratio", "at least", f"{units}/s", "of ceiling")
    compared = "; by other kernels, and times as fast as ours" if also else ""
    out = _empty_table(f"{title}: median (p10–p90){compared}", columns)
    for result in results:
        rate, fraction = f"{result.achieved / 1e9:.0f}", of_ceiling(result)
        if result.at_most_over is not None:
            got, wanted = f"{1e6 * result.over:+.1f} µs", f"≤ +{1e6 * result.at_most_over:.0f} µs"
            rate = fraction = "–"
        else:
            got = f"{result.ratio:.2f}×"
            wanted = "–" if result.at_least is None else f"{result.at_least:g}×"
        got = coloured(got, result.met_at_least)
        for name, good in result.met_against.items():
            got += f"\n{coloured(f'{result.peer_ratios[name]:.2f}×', good)}"
            wanted += f"\n[dim]{name}: {result.at_least_against[name]:g}×[/dim]"
        if result.at_most is not None:
            got += f"\n{coloured(f'{1e6 * result.ours.median:.1f} µs', result.met_at_most)}"
            wanted += f"\n[dim]≤ {1e6 * result.at_most:g} µs[/dim]"
        theirs = [_duration(result.peers.get(name)) for name in peers]
        if fastest_only:
            median, _, _ = _duration(result.peers[result.fastest_peer]).partition("\n")
            theirs = [f"{median}\n[dim]{result.fastest_peer}[/dim]"]
        out.add_row(
            f"{result.case}\n[dim]{result.shape}[/dim]",
            result.step,
            _duration(result.ours),
            *(_beside(result, name) for name in also),
            *theirs,
            got,
            wanted,
            rate,
            fraction,
        )
    return out


def of_ceiling(result: Result) -> str:
    """Return the fraction of the ceiling, with its target below."""
    return with_target(result.fraction, result.at_least_fraction, "{:.0%}")


def with_target(value: float, at_least: float | None, form: str) -> str:
    """Return a figure as text, coloured by whether it meets its target, which stands below."""
    text = form.format(value)
    if at_least is None:
        return text
    return f"{coloured(text, value >= at_least)}\n[dim]≥ {form.format(at_least)}[/dim]"


def kernels_compared(results: Sequence[Result]) -> str:
    """Compare an operator's kernels: a line for each kind other than the one that a call gets."""
    lines = []
    for name in dict.fromkeys(name for result in results for name in result.also):
        ratios = [result.also_ratios[name] for result in results if name in result.also]
        mean = statistics.geometric_mean(ratios)
        lines.append(
            f"{name}: {mean:.2f} times as fast as ours in the geometric mean of {len(ratios)} "
            f"cases, from {min(ratios):.2f} to {max(ratios):.2f}; faster in "
            f"{sum(ratio > 1 for ratio in ratios)}"
        )
    return "\n".join(lines)


def memory_table(results: Sequence[MemoryResult]) -> Table:
    peers = list(dict.fromkeys(name for result in results for name in result.peers))
    title = "peak memory beyond inputs, outputs and gradients, MiB"
    out = _empty_table(title, ("ours", *peers, "at most"))
    for result in results:
        theirs = (result.peers.get(name) for name in peers)
        out.add_row(
            f"{result.case}\n[dim]{result.shape}[/dim]",
            result.step,
            coloured(f"{result.ours / 2**20:.1f}", result.met),
            *("–" if size is None else f"{size / 2**20:.1f}" for size in theirs),
            f"{result.at_most / 2**20:.0f}",
        )
    return out


def _empty_table(title: str, numbers: Sequence[str]) -> Table:
    out = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("case", "step"):
        out.add_column(name, no_wrap=True)
    for name in numbers:
        out.add_column(name, justify="right", no_wrap=True)
    return out


def coloured(text: str, good: bool) -> str:
    return f"[{'green' if good else 'bold red'}]{text}[/]"


def _beside(result: Result, name: str) -> str:
    median, _, _ = _duration(result.also.get(name)).partition("\n")
    if name not in result.also:
        return median
    ratio = result.also_ratios[name]
    return f"{median}\n{coloured(f'{ratio:.2f}×', ratio > 1)}"


def _duration(timing: Timing | None) -> str:
    if timing is None:
        return "–"
    unit, scale = ("ms", 1e3) if timing.median >= 1e-4 else ("µs", 1e6)
    median, low, high = (scale * timing.percentile(p) for p in (50, 10, 90))
    digits = max(0, 2 - math.floor(math.log10(median)))
    return f"{median:.{digits}f} {unit}\n[dim]{low:.{digits}f}–{high:.{digits}f}[/dim]"


def plot(path: Path, title: str, results: Sequence[Result]) -> None:
    """Draw each case's speed relative to the fastest peer, with a mark at its target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [result for result in reversed(results) if result.at_most_over is None]
    places = range(len(rows))
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
    ratios = [result.ratio for result in rows]
    below = [result.ratio - percentile(result.ratios, 10) for result in rows]
    above = [percentile(result.ratios, 90) - result.ratio for result in rows]
    axes.barh(places, ratios, xerr=[below, above], color="#3b7dd8", ecolor="#555555")
    for place, ratio, over in zip(places, ratios, above, strict=True):
        end = max(ratio + over, rows[place].at_least or 0)
        axes.text(end, place, f"  {ratio:.1f}×", va="center", fontsize=9)
    axes.margins(x=0.1)
    targets = [
        (result.at_least, place)
        for place, result in zip(places, rows, strict=True)
        if result.at_least
    ]
    if targets:
        x, y = zip(*targets, strict=True)
        axes.scatter(x, y, marker="|", s=250, color="black", label="target")
        figure.legend(loc="outside lower right", frameon=False, fontsize=8)
    axes.axvline(1, color="#888888", linewidth=1)
    labels = [f"{r.case}, {r.step}\n{r.shape}, against {r.fastest_peer}" for r in rows]
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_xlabel("times as fast as the fastest peer: median, p10 to p90", fontsize=8)
    figure.suptitle(title, fontsize=8, wrap=True)
    pictures.save(figure, path)
    pyplot.close(figure)
