"""Selects combinations of a test's parameters.

A test marked as covering runs only some combinations of its parameters:

- ``@pytest.mark.covering``: any two values of two parameters meet in some combination;
- ``@pytest.mark.covering(1)``: each value of each parameter occurs in some combination;
- ``@pytest.mark.covering(0)``: one combination, the last.

``pytest --exhaustive`` runs all. Parameters are those of the test and of its fixtures.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

Combination = tuple[Hashable, ...]  # one value for each parameter


def covering(grid: Sequence[Combination], strength: int) -> list[int]:
    """Returns the positions of a small selection from a grid: any ``strength`` values that meet in
    some combination of the grid also meet in one of the selection.

    Each step takes the combination with the most missing meetings. Among equals it takes one whose
    values were taken least often, so that each value meets many others. Among these it takes the
    last, because the best kernels come last.
    """

    def meetings(combination: Combination) -> set[Hashable]:
        size = min(strength, len(combination))
        return set(itertools.combinations(enumerate(combination), size))

    has = [meetings(combination) for combination in grid]
    missing = set().union(*has)
    taken: Counter[Hashable] = Counter()
    chosen = []
    while missing:
        best = max(
            range(len(grid)),
            key=lambda i: (len(has[i] & missing), -sum(taken[v] for v in enumerate(grid[i])), i),
        )
        chosen.append(best)
        missing -= has[best]
        taken.update(enumerate(grid[best]))
    return sorted(chosen)


def selected(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns the items that run without ``--exhaustive``."""
    grids: dict[str, list[pytest.Item]] = {}
    kept: set[pytest.Item] = set()
    for item in items:
        if item.get_closest_marker("covering") is None:
            kept.add(item)
        else:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for grid in grids.values():
        marker = grid[0].get_closest_marker("covering")
        assert marker is not None
        (strength,) = marker.args or (2,)
        # Values need not be hashable, but all combinations hold the same objects, so ids identify
        # them.
        combinations = [
            tuple(map(id, item.callspec.params.values()))  # type: ignore[attr-defined]
            for item in grid
        ]
        kept.update(grid[i] for i in covering(combinations, strength))
    return kept


def selected_parameters(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """Returns the parameters with which a module's test runs, for a fixture shared by all."""
    return [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and item.nodeid.partition("[")[0].endswith(f"::{test}")
    ]
