"""Tests that the selection of combinations covers what it should, and that it is small."""

from __future__ import annotations

import itertools

import pytest
from covering import covering

GRID = list(itertools.product(range(6), range(5), range(2)))


@pytest.mark.parametrize(("strength", "count"), [(0, 1), (1, 6), (2, 30), (3, 60), (9, 60)])
def test_everything_meets_that_should(strength, count):
    chosen = [GRID[i] for i in covering(GRID, strength)]
    assert len(chosen) == count
    for places in itertools.combinations(range(3), min(strength, 3)):
        meet = [{tuple(c[p] for p in places) for c in of} for of in (GRID, chosen)]
        assert meet[0] == meet[1]


def test_one_combination_is_the_last():
    assert covering(GRID, 0) == [len(GRID) - 1]


def test_no_value_is_preferred():
    chosen = [GRID[i] for i in covering(GRID, 2)]
    counts = [sum(c[2] == value for c in chosen) for value in range(2)]
    assert counts == [15, 15]


def test_combinations_that_are_not_in_the_grid_are_not_missed():
    grid = [c for c in GRID if c[0] != c[1]]
    assert len(covering(grid, 2)) == 25
