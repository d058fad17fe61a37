"""Decisions at random that can be repeated, and made again with less.

Hypothesis takes two milliseconds to draw such a call, as long as computing and judging it takes,
and shrinks only what it drew itself. So the decisions are drawn by ``random``, kept on record, and
shrunk in its way: by repeating them with some left out and others smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Decisions, each a whole number from 0, which stands for the simplest.

    Args:
        source: a generator; or decisions on record, after which each is the simplest.
    """

    def __init__(self, source: Random | Sequence[int]) -> None:
        self._source = source
        self.made: list[int] = []

    def _next(self, count: int) -> int:
        if isinstance(self._source, Random):
            decision = int(self._source.random() * count)
        else:
            place = len(self.made)
            known = self._source[place] if place < len(self._source) else 0
            decision = min(known, count - 1)
        self.made.append(decision)
        return decision

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included; low is the simplest."""
        return low + self._next(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        """The first is the simplest."""
        return options[self._next(len(options))]

    def flag(self, percent: int) -> bool:
        """True so often; False is the simplest."""
        return self._next(100) >= 100 - percent

    def maybe(self, percent: int, value: Callable[[], T]) -> T | None:
        return value() if self.flag(percent) else None


def shrink(
    decisions: Sequence[int], fails: Callable[[list[int]], bool], seconds: float = 60.0
) -> list[int]:
    """Fewer and smaller decisions that fail as well.

    Args:
        decisions: known to fail.
        fails: whether such a record fails in the same way.
        seconds: after which the best so far is taken.
    """
    end = time.monotonic() + seconds
    best = list(decisions)

    def accept(candidate: list[int]) -> bool:
        nonlocal best
        smaller = (len(candidate), sum(candidate)) < (len(best), sum(best))
        if not smaller or time.monotonic() > end or not fails(candidate):
            return False
        best = candidate
        return True

    before: list[int] | None = None
    while best != before and time.monotonic() < end:
        before = list(best)
        for size in (32, 8, 4, 2, 1):
            # From the end, where decisions depend on those before and not the other way.
            for start in range(len(best) - size, -1, -size):
                accept(best[:start] + best[start + size :])
                zeros = [0] * len(best[start : start + size])
                accept(best[:start] + zeros + best[start + size :])
        for place in range(len(best)):
            step = best[place]
            while step > 0 and place < len(best):
                lower = best[place] - step
                if lower < 0 or not accept([*best[:place], lower, *best[place + 1 :]]):
                    step //= 2
    return best
