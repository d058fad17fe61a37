"""Chooses some of a test's combinations of parameters, so that each value, or each pair of values,
occurs.

``@pytest.mark.covering`` on a test reduces its grid to pairs: for any two of its parameters, each
combination of their values runs, with some value of every other parameter.
``@pytest.mark.covering(1)`` reduces it to values: each value of each parameter runs at least once.
``pytest --exhaustive`` runs all combinations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import pytest

Combination = tuple[Hashable, ...]  # one value for each parameter


def covering(grid: Sequence[Combination], strength: int) -> list[int]:
    """Returns the positions in ``grid`` of a small selection that has every tuple of ``strength``
    values which occurs together somewhere in the grid.

    Takes in turn the combination with the most tuples that are still missing; of equals, the one
    whose values were taken least often, so that each value meets many others.
    """

    def tuples(combination: Combination) -> set[Hashable]:
        size = min(strength, len(combination))
        return set(itertools.combinations(enumerate(combination), size))

    has = [tuples(combination) for combination in grid]
    missing = set().union(*has)
    taken: Counter[Hashable] = Counter()
    chosen = []
    while missing:
        best = max(
            range(len(grid)),
            key=lambda i: (len(has[i] & missing), -sum(taken[v] for v in enumerate(grid[i]))),
        )
        chosen.append(best)
        missing -= has[best]
        taken.update(enumerate(grid[best]))
    return sorted(chosen)


def selected(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns the items that run without ``--exhaustive``."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for grid in grids.values():
        marker = grid[0].get_closest_marker("covering")
        if marker is None:
            kept.update(grid)
            continue
        (strength,) = marker.args or (2,)
        combinations = [tuple(item.callspec.indices.values()) for item in grid]  # type: ignore[attr-defined]
        kept.update(grid[i] for i in covering(combinations, strength))
    return kept
