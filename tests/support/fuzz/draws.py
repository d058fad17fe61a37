"""Random decisions, recorded so that they can be replayed and shrunk.

Hypothesis takes two milliseconds to draw a call, as long as it takes to run and check one, and it
shrinks only its own draws. So ``random`` draws the decisions. They are recorded, and shrunk as in
Hypothesis, by replaying them with some left out and others smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Makes decisions. Each is an integer from 0 up; 0 is the simplest.

    Args:
        source: a generator, or recorded decisions; past their end, every decision is 0.
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
        """Returns an integer in [low, high]; low is the simplest."""
        return low + self._next(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        """Returns one of the options; the first is the simplest."""
        return options[self._next(len(options))]

    def flag(self, percent: int) -> bool:
        """Returns True with this probability; False is the simplest."""
        return self._next(100) >= 100 - percent

    def maybe(self, percent: int, value: Callable[[], T]) -> T | None:
        return value() if self.flag(percent) else None


def shrink(
    decisions: Sequence[int], fails: Callable[[list[int]], bool], seconds: float = 60.0
) -> list[int]:
    """Returns fewer and smaller decisions that still fail.

    Args:
        decisions: a record that fails.
        fails: returns whether a record fails in the same way.
        seconds: time limit, after which the best record so far is returned.
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
            # From the end, because later decisions depend on earlier ones.
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
