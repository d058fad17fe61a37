"""Measurement for every benchmark: ours and its peers in turns, and the machine's ceilings.

Three rules make a figure mean something:

- **In one run.** A machine's speed drifts with its clock, its memory and its neighbours. Ours and
  the peers are timed in turns, and a ratio is the median of the ratios within each round.
- **Beside a ceiling.** The rate at which this machine multiplies matrices or copies memory is
  measured between the cases, so that each figure is also a fraction of what was possible.
- **With its spread.** Medians come with the 10th and the 90th percentile, and with the machine,
  the thread count and the versions they were taken with.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, track
from rich.table import Table
from torch import Tensor

import trifuse
from trifuse import backends
from trifuse.__main__ import version_of

console = Console(width=None if sys.stdout.isatty() else 120)

# Times ------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Seconds per call, one number for each round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def percentile(self, percent: float) -> float:
        return percentile(self.seconds, percent)

    def ratios(self, other: Timing) -> list[float]:
        """The other's time over this one's, round by round."""
        return [theirs / ours for theirs, ours in zip(other.seconds, self.seconds, strict=True)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, interpolated between neighbours as by numpy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def alternate(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: str = "cpu",
    waited: bool = False,
    seconds: float = 4.0,
    min_rounds: int = 5,
    rest: float = 0.0,
) -> dict[str, Timing]:
    """Time several functions in turns.

    Each round calls every function, starting with a different one each time. A call too short for
    the clock is repeated within its turn.

    On a GPU the GPU's time counts, by events on the stream. Before each call the L2 cache is
    overwritten, and the call's launches are queued while the GPU is still busy with that. So
    Python's time shows only where it exceeds the GPU's. With ``waited`` the caller's time counts,
    by the CPU's clock, Python and launches included, for calls one after the other.

    Args:
        functions: what to call, by name.
        device: "cpu" or "cuda", where the functions compute.
        waited: on a GPU, measure the time that a caller waits.
        seconds: the least time to go on for; at least ``min_rounds`` rounds are done in any case.
        rest: seconds to sleep before each turn. Libraries with threads of their own need a rest:
            for some time after a call these threads spin, on the cores of the next turn.
    """
    turn, shortest = _wall_turn, 1e-3  # seconds; the clock's own cost is below 0.01% of it
    if device == "cuda":
        # The CPU's clock includes the start and the end of the GPU's work, once per turn.
        turn, shortest = (_waited_turn, 2e-2) if waited else (_cuda_turn, 1e-3)
    names = list(functions)
    calls = {}
    for name, function in functions.items():
        function()  # compiles, autotunes, faults pages in
        calls[name] = max(1, math.ceil(shortest / max(turn(function, 1), 1e-9)))
        turn(function, calls[name])
    taken: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    rounds = 0
    while rounds < min_rounds or time.perf_counter() - begin < seconds:
        first = rounds % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(rest)
            taken[name].append(turn(functions[name], calls[name]))
        rounds += 1
    return {name: Timing(tuple(values)) for name, values in taken.items()}


def _wall_turn(function: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls


def _waited_turn(function: Callable[[], object], calls: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


_CACHE = 256 << 20  # bytes; larger than any L2 cache


def _cuda_turn(function: Callable[[], object], calls: int) -> float:
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in ("begin", "end")] for _ in range(calls)
    ]
    cache = torch.empty(_CACHE, dtype=torch.int8, device="cuda")
    for _ in range(64):  # some milliseconds, in which Python gets ahead of the GPU
        cache.zero_()
    for begin, end in events:
        cache.zero_()
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sum(begin.elapsed_time(end) for begin, end in events) / 1e3 / calls


Function = Callable[[], Sequence[Tensor]]


def other_kernels(
    call: backends.Call,
    make: Callable[[], Function],
    check: Callable[[Function], None],
    of_cuda: Mapping[str, Callable[[], Function]] | None = None,
) -> tuple[dict[str, Function], dict[str, str]]:
    """Our operator on each GPU backend that could serve a call but is not the one chosen for it.

    Empty on a CPU, and if a backend was requested by name.

    Args:
        make: returns the function to time; both are called under that backend.
        check: raises if the function's result is wrong; called under that backend, too.
        of_cuda: further variants of the CUDA kernels, by name, each as ``make``.

    Returns:
        The functions to time, by name, and why others were left out.
    """
    functions: dict[str, Function] = {}
    refused: dict[str, str] = {}
    if call.device != "cuda" or backends._requested != "auto":
        return functions, refused
    ways = {
        f"by {backend}": (backend, make)
        for backend in ("cuda", "triton")
        if backend != backends.choose(call).backend
    }
    ways |= {f"by cuda, {how}": ("cuda", made) for how, made in (of_cuda or {}).items()}

    def by(backend: str, make: Callable[[], Function]) -> Function:
        with backends.backend(backend):
            made = make()

        def serve() -> Sequence[Tensor]:
            with backends.backend(backend):
                return made()

        return serve

    for name, (backend, make_it) in ways.items():
        if backends._WHY_NOT[backend](call) is not None:
            continue
        try:
            function = by(backend, make_it)
            with backends.backend(backend):
                check(function)
        except (RuntimeError, AssertionError) as error:
            refused[f"ours {name}"] = str(error).partition("\n")[0]
        else:
            functions[name] = function
    return functions, refused


# Ceilings ---------------------------------------------------------------------------------------


class Rate(NamedTuple):
    """The highest rate that a machine reaches, and how it was measured."""

    value: float  # per second
    source: str


def matrix_rate(dtype: torch.dtype, *, device: str = "cpu", seconds: float = 0.2) -> Rate:
    """FLOP/s of matrix products in ``dtype``, accumulated in float32, on every thread.

    On a CPU these are the extension's own products on tiles that stay in the cores' caches, or,
    without the extension, ``torch.mm``, which may be well below the cores' limit.
    """
    name = str(dtype).removeprefix("torch.")
    if device == "cpu" and backends._C is not None and name in ("float32", "bfloat16"):
        return Rate(backends._C.matrix_rate(name, seconds), "trifuse._C tiles")
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timing = alternate({"mm": lambda: torch.mm(a, b)}, device=device, seconds=seconds)["mm"]
    return Rate(2 * size**3 / min(timing.seconds), "torch.mm")


def copy_rate(*, device: str = "cpu", seconds: float = 0.2) -> Rate:
    """Bytes/s read and written by copying a tensor far larger than the caches."""
    source = torch.ones((1 << 30 if device == "cuda" else 1 << 28) // 4, device=device)
    target = torch.zeros_like(source)
    copy = {"copy": lambda: target.copy_(source)}
    timing = alternate(copy, device=device, seconds=seconds)["copy"]
    return Rate(2 * source.nbytes / min(timing.seconds), "Tensor.copy_")


# Memory -----------------------------------------------------------------------------------------


def peak_extra_memory(prepare: Callable[..., Callable[[], Sequence[Tensor]]], *args: Any) -> int:
    """Bytes that a computation held at its peak beyond its inputs and its results.

    Measured as the peak resident memory of a fresh process (on a GPU: the peak of torch's
    allocator), so that earlier measurements leave no pages behind.

    Args:
        prepare: a module-level function, called with ``args``, which can be pickled. It makes the
            inputs and returns the computation, which returns its results. It should run something
            small first, so that what a first call loads or allocates once does not count.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_peak_here, prepare, args, torch.get_num_threads()).result()


def _peak_here(
    prepare: Callable[..., Callable[[], Sequence[Tensor]]], args: Sequence[Any], threads: int
) -> int:
    torch.set_num_threads(threads)
    compute = prepare(*args)
    before = _start_peak()
    results = compute()
    peak = _peak(results[0].device.type)
    return max(0, peak - before - sum(result.nbytes for result in results))


def _start_peak() -> int:
    """Reset the peak, and return the bytes held now."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return _peak("cpu")  # the peak so far, at which the inputs were held
    return _status("VmRSS")


def _peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    """Bytes, from proc(5)'s status, which counts in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def page_faults(function: Callable[[], object], calls: int = 8) -> float:
    """Pages of fresh memory that a call touches: the kernel maps and clears each of them."""
    function()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        function()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls


# Results ----------------------------------------------------------------------------------------


def check_agreement(peer: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Check that both computed the same thing. Precision is left to the tests.

    Raises:
        AssertionError: a result differs by more than rounding explains.
    """
    for a, b in zip(ours, theirs, strict=True):
        bound = {torch.float64: 1e-12, torch.float32: 1e-4}.get(a.dtype, 3e-2)
        difference, norm = (a.double() - b.double()).norm(), b.double().norm()
        if not difference <= bound * norm:
            raise AssertionError(f"we differ from {peer} by {difference:.2g}; it has {norm:.2g}")


def check_accuracy(
    peer: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Check that our error is at most twice the peer's, or at most two machine epsilons.

    For 16-bit computations so deep that both results are some way off the exact ones.

    Raises:
        AssertionError: our error is larger.
    """
    for a, b, expected in zip(ours, theirs, exact, strict=True):
        off, theirs_off = (
            (x.double() - expected.double()).norm() / expected.double().norm() for x in (a, b)
        )
        if not off <= 2 * max(theirs_off, torch.finfo(a.dtype).eps):
            raise AssertionError(
                f"we are off by {off:.2g} of an exact result, {peer} by {theirs_off:.2g}"
            )


@dataclass(frozen=True)
class Result:
    """One row of a comparison.

    Attributes:
        case, step, shape: what was computed; ``step`` is "forward" or "forward + backward".
        ours: our times.
        peers: times by name of the peers that can serve the case.
        refused: why the other peers can't, by name.
        work: operations, bytes or tokens that the case requires.
        ceiling: the machine's highest rate for that work.
        unit: "FLOP", "B" or "token".
        also: our times with kernels other than those that a call gets, by name.
        against: the peers to compare with, as far as they serve the case; all peers if empty or if
            none of them does.
        at_least: target for the ratio, the fastest peer's time over ours.
        at_least_fraction: target for the fraction of the ceiling.
        at_most_over: limit on our seconds beyond the fastest peer's, for calls so short that only
            their overhead counts.
    """

    case: str
    step: str
    shape: str
    ours: Timing
    peers: Mapping[str, Timing]
    refused: Mapping[str, str]
    work: float
    ceiling: Rate
    unit: str = "FLOP"
    at_least: float | None = None
    at_most_over: float | None = None
    at_least_fraction: float | None = None
    also: Mapping[str, Timing] = field(default_factory=dict)
    against: Sequence[str] = ()

    @property
    def fastest_peer(self) -> str:
        names = [name for name in self.peers if name in self.against] or list(self.peers)
        return min(names, key=lambda name: self.peers[name].median)

    @property
    def ratios(self) -> list[float]:
        """The fastest peer's time over ours, round by round."""
        return self.ours.ratios(self.peers[self.fastest_peer])

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def also_ratios(self) -> dict[str, float]:
        """The speed of our other kernels relative to those that a call gets, by name."""
        return {
            name: statistics.median(timing.ratios(self.ours)) for name, timing in self.also.items()
        }

    @property
    def over(self) -> float:
        """Seconds per call that we take beyond the fastest peer; below 0 if we are faster."""
        peer = self.peers[self.fastest_peer].seconds
        pairs = zip(peer, self.ours.seconds, strict=True)
        return statistics.median(ours - theirs for theirs, ours in pairs)

    @property
    def met(self) -> bool:
        if self.at_most_over is not None:
            return self.over <= self.at_most_over
        enough = self.at_least_fraction is None or self.fraction >= self.at_least_fraction
        return enough and (self.at_least is None or self.ratio >= self.at_least)

    @property
    def achieved(self) -> float:
        return self.work / self.ours.median

    @property
    def fraction(self) -> float:
        return self.achieved / self.ceiling.value

    def record(self) -> dict[str, Any]:
        """The entry for the JSON file, in seconds, bytes, FLOP, and rates per second."""
        return {
            "case": self.case,
            "step": self.step,
            "shape": self.shape,
            "ours": _summary(self.ours),
            "also": {name: _summary(timing) for name, timing in self.also.items()},
            "also_ratios": self.also_ratios,
            "peers": {name: _summary(timing) for name, timing in self.peers.items()},
            "refused": dict(self.refused),
            "fastest_peer": self.fastest_peer,
            "ratio": self.ratio,
            "ratio_p10": percentile(self.ratios, 10),
            "ratio_p90": percentile(self.ratios, 90),
            "over": self.over,
            "at_least": self.at_least,
            "at_most_over": self.at_most_over,
            "at_least_fraction": self.at_least_fraction,
            "met": self.met,
            "work": self.work,
            "unit": self.unit,
            "achieved": self.achieved,
            "ceiling": self.ceiling.value,
            "ceiling_source": self.ceiling.source,
            "fraction_of_ceiling": self.fraction,
        }


@dataclass(frozen=True)
class MemoryResult:
    """Peak bytes beyond inputs and results: ours, the peers', and the limit for ours."""

    case: str
    step: str
    shape: str
    ours: int
    peers: Mapping[str, int]
    at_most: int

    @property
    def met(self) -> bool:
        return self.ours <= self.at_most

    def record(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "step": self.step,
            "shape": self.shape,
            "ours": self.ours,
            "peers": dict(self.peers),
            "at_most": self.at_most,
            "met": self.met,
        }


def _summary(timing: Timing) -> dict[str, float]:
    return {
        "median": timing.median,
        "p10": timing.percentile(10),
        "p90": timing.percentile(90),
        "rounds": len(timing.seconds),
    }


def table(title: str, results: Sequence[Result], fastest_only: bool = False) -> Table:
    """Times with their spread, the ratio beside its target, and the fraction of the ceiling.

    Every peer has a column. With ``fastest_only``, for rows with different peers, a single column
    names the fastest of each row.
    """
    peers = list(dict.fromkeys(name for result in results for name in result.peers))
    shown = ["fastest peer"] if fastest_only else peers
    units = "/".join(dict.fromkeys(f"G{result.unit}" for result in results))
    also = list(dict.fromkeys(name for result in results for name in result.also))
    columns = ("ours", *also, *shown, "ratio", "at least", f"{units}/s", "of ceiling")
    compared = "; by other kernels, and times as fast as ours" if also else ""
    out = _empty_table(f"{title}: median (p10–p90){compared}", columns)
    for result in results:
        rate, fraction = f"{result.achieved / 1e9:.0f}", f"{result.fraction:.0%}"
        if result.at_most_over is not None:
            got, wanted = f"{1e6 * result.over:+.1f} µs", f"≤ +{1e6 * result.at_most_over:.0f} µs"
            rate = fraction = "–"
        else:
            got = f"{result.ratio:.2f}×"
            wanted = "–" if result.at_least is None else f"{result.at_least:g}×"
        if result.at_least_fraction is not None:
            good = result.fraction >= result.at_least_fraction
            fraction = f"{_coloured(fraction, good)}\n[dim]≥ {result.at_least_fraction:.0%}[/dim]"
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
            _coloured(got, result.met),
            wanted,
            rate,
            fraction,
        )
    return out


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
            _coloured(f"{result.ours / 2**20:.1f}", result.met),
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


def _coloured(text: str, good: bool) -> str:
    return f"[{'green' if good else 'bold red'}]{text}[/]"


def _beside(result: Result, name: str) -> str:
    median, _, _ = _duration(result.also.get(name)).partition("\n")
    if name not in result.also:
        return median
    ratio = result.also_ratios[name]
    return f"{median}\n{_coloured(f'{ratio:.2f}×', ratio > 1)}"


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
        axes.scatter(x, y, marker="|", s=250, color="black", label="what we ask for")
        figure.legend(loc="outside lower right", frameon=False, fontsize=8)
    axes.axvline(1, color="#888888", linewidth=1)
    labels = [f"{r.case}, {r.step}\n{r.shape}, against {r.fastest_peer}" for r in rows]
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_xlabel("times as fast as the fastest peer: median, p10 to p90", fontsize=8)
    figure.suptitle(title, fontsize=8, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# The machine ------------------------------------------------------------------------------------


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions that the figures were taken with, and its measured rates."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": None if backends._C is None else backends._C.cpu_capability(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trifuse": trifuse.__version__,
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _driver()
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["triton"] = version_of("triton")
    for dtype in (torch.float32, torch.bfloat16):
        rate = matrix_rate(dtype, device=device)
        facts[f"{dtype} matrix products".removeprefix("torch.")] = rate._asdict()
    facts["copies"] = copy_rate(device=device)._asdict()
    return facts


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.partition("\n")[0]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def describe(facts: Mapping[str, Any]) -> str:
    """The machine in two lines."""
    place = facts.get("gpu", f"{facts['cpu']}, {facts['threads']} of {facts['cores']} cores")
    kernels = f", kernels for {facts['cpu_capability']}" if facts["cpu_capability"] else ""
    fp32, bf16 = facts["float32 matrix products"], facts["bfloat16 matrix products"]
    return (
        f"{place}{kernels}, torch {facts['torch']}, trifuse {facts['trifuse']}\n"
        f"matrix products at most {fp32['value'] / 1e9:.0f} GFLOP/s in fp32 ({fp32['source']}), "
        f"{bf16['value'] / 1e9:.0f} in bf16 ({bf16['source']}); "
        f"copies {facts['copies']['value'] / 1e9:.1f} GB/s"
    )


# The command line -------------------------------------------------------------------------------


Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def default_threads() -> int:
    """Two, so that figures from different machines compare; one on a machine with one core."""
    return min(2, os.cpu_count() or 1)


def parser(
    name: str,
    description: str | None,
    devices: Sequence[str] = ("cpu", "cuda"),
    plots: bool = True,
) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; ``--device`` is one of ``devices``."""
    out = argparse.ArgumentParser(
        prog=f"python -m trifuse.benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gpu = torch.cuda.is_available() and "cuda" in devices
    out.add_argument("--quick", action="store_true", help="a fraction of the rounds")
    out.add_argument(
        "--cases", nargs="+", metavar="NAME", help="only these; * and ? match anything"
    )
    out.add_argument("--device", choices=devices, default="cuda" if gpu else "cpu")
    out.add_argument("--backend", choices=("auto", *backends.ORDER), default="auto", help="ours")
    out.add_argument("--threads", type=int, default=default_threads(), help="default: %(default)s")
    out.add_argument("--json", type=Path, metavar="PATH", help="write all figures")
    if plots:
        plot = "write a picture (PNG, SVG or PDF)"
        out.add_argument("--plot", type=Path, metavar="PATH", help=plot)
    return out


def add_count(
    to: argparse.ArgumentParser, option: str, default: int, of: str = "", least: int = 1
) -> None:
    """Add an option that takes a whole number of at least ``least``."""

    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}")
        return value

    text = "; ".join(filter(None, (of, f"default: {default}")))
    to.add_argument(option, type=count, default=default, help=text)


def select(
    items: Sequence[Item], name: Callable[[Item], str], wanted: Sequence[str] | None
) -> list[Item]:
    """The items whose name matches one of the patterns; all of them without patterns.

    Raises:
        SystemExit: a pattern matches nothing; the message lists the names.
    """
    if wanted is None:
        return list(items)
    for pattern in wanted:
        if not any(fnmatch.fnmatch(name(item), pattern) for item in items):
            names = "\n  ".join(dict.fromkeys(map(name, items)))
            raise SystemExit(f"--cases: nothing is named {pattern!r}; there are\n  {names}")
    return [item for item in items if any(fnmatch.fnmatch(name(item), p) for p in wanted)]


def progress() -> Progress:
    """Progress bars with a description and a count, which vanish when all is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True)


def run_all(
    cases: Sequence[Item],
    name: Callable[[Item], str],
    run: Callable[[Item], Outcome],
    keep: Callable[[list[Outcome]], None],
) -> tuple[list[Outcome], dict[str, str]]:
    """Run every case, even if others fail.

    Args:
        keep: called after each case with the outcomes so far, so that they survive an interruption.

    Returns:
        The outcomes of the cases that succeeded, and the errors of those that didn't, by name.

    Raises:
        SystemExit: with status 2, a case has left the GPU unusable.
    """
    done: list[Outcome] = []
    failed = {}
    for case in track(cases, "timing", console=console, transient=True):
        try:
            done.append(run(case))
        except (Exception, KeyboardInterrupt) as error:
            failed[name(case)] = f"{type(error).__name__}: {error}"
            console.print(f"{name(case)}: {failed[name(case)]}", style="red", markup=False)
            if isinstance(error, KeyboardInterrupt):
                break
            if _gpu_is_lost():
                sys.exit(2)
        keep(done)
    return done, failed


def _gpu_is_lost() -> bool:
    """Whether an error of a kernel makes every later call of this process fail."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def write_json(path: Path, content: Mapping[str, Any], *, quietly: bool = False) -> None:
    """Write figures: times in seconds, sizes in bytes, rates per second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if not quietly:
        console.print(f"wrote {path}", markup=False)


def print_table(table: Table) -> None:
    """Print a table; in a file or a pipe it is as wide as it needs to be."""
    (console if console.is_terminal else Console(width=240)).print(table)


def report(
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
        plot(options.plot, f"{name}\n{describe(facts)}", results)
        console.print(f"wrote {options.plot}", markup=False)


def save(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    results: Sequence[Result],
    memory: Sequence[MemoryResult] = (),
    more: Mapping[str, Any] | None = None,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write the JSON if requested."""
    if options.json is None:
        return
    content = {
        "machine": dict(facts),
        "times": [result.record() for result in results],
        "memory": [result.record() for result in memory],
        "failed": dict(failed or {}),
        **(more or {}),
    }
    write_json(options.json, content, quietly=True)
