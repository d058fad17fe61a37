"""Times several functions in turns.

Two rules make a time meaningful:

- **In one run.** A machine's speed drifts with its clock, its memory and its neighbours. Ours and
  the peers are timed in turns, and a ratio is the median of the ratios within each round.
- **With its spread.** Medians come with the 10th and the 90th percentile.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch


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

    def over(self, other: Timing) -> float:
        """This one's seconds less the other's, the median over the rounds."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(ours - theirs for ours, theirs in pairs)


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
        seconds: the least time to measure; at least ``min_rounds`` rounds are done in any case.
        rest: seconds to sleep before each turn. Libraries with their own threads need a rest,
            because these threads spin for some time after a call, on the cores of the next turn.
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
        if calls[name] > 1:
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
