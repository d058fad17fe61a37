"""Layouts of the values in a loop over experts, each of which gets the rows that chose it ::

    chosen = one_hot(experts_of_rows, num_classes=n).permute(2, 1, 0)    # (n, k, rows)
    for expert in range(n):    # or over those that have rows
        slots, picks = torch.where(chosen[expert])
        out = self.experts[expert](x[picks]) * weights[picks, slots, None]
        result.index_add_(0, picks, out)

An expert's rows keep apart, and each goes back to its own place. How many rows an expert has may
decide whether it runs, and nothing else.

The kinds of values here, besides those of :mod:`trifuse.recipes.layouts`, are

- chosen: (n, k, rows) or (n, rows, k), which experts each row chose; ``held`` names the last two
  dimensions in order;
- of one: a part of it, for one expert;
- loads: how many rows each expert has, or which experts have any;
- picks: the numbers of the rows of one expert; slots: their places among the k. ``held`` is where
  they were found;
- picked: these rows, (number of picks, ...); ``held`` as for picks;
- count: a number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trifuse.recipes import layouts
from trifuse.recipes.layouts import Value, constant

_ORDERS: dict[tuple[int, ...], tuple[str, str]] = {
    (2, 1, 0): ("slots", "picks"),
    (2, 0, 1): ("picks", "slots"),
}
LOADS = Value("loads")
COUNT = Value("count")
COUNTED = ("picks", "rows", "slots", "tokens")  # kinds of values that may be counted
_NEW = constant(None)  # as an index


def by_expert(base: Value, order: Sequence[int]) -> Value | None:
    """Return the result of ``permute`` of rows that mark the experts they chose, (rows, k, n)."""
    found = _ORDERS.get(tuple(order))
    known = (base.kind, base.trailing) == ("rows", 2) and found is not None
    return Value("chosen", 0, found) if known else None


def method(base: Value, name: str, values: list[Value], named: dict[str, Value]) -> Value | None:
    """Return the result of a method of a value of these kinds, other than picked rows."""
    given = [*values, *named.values()]
    if base.kind == "chosen" and name == "sum":
        dims = Value("tuple", 0, (constant(-1), constant(-2)))
        return LOADS if given == [dims] else None
    if base.kind == "of one" and name == "squeeze":
        return base if given == [constant(0)] else None
    if base == LOADS and name == "nonzero":
        return LOADS if all(map(_is_number, given)) else None
    return None


def function(called: Any, values: list[Value], named: dict[str, Value], at: int) -> Value | None:
    """Return the result of a function of torch; ``at`` is the line of the call."""
    if called is torch.nn.functional.one_hot and values[:1] and values[0].kind == "rows":
        others = [*values[1:], *named.values()]
        marks = values[0]._replace(trailing=values[0].trailing + 1)
        return marks if all(map(_is_number, others)) else None
    if called is torch.greater and values[:1] == [LOADS] and not named:
        return LOADS if all(map(_is_number, values[1:])) else None
    if called is torch.where and [value.kind for value in values] == ["of one"] and not named:
        return Value("tuple", 0, tuple(Value(kind, 0, at) for kind in values[0].held))
    return None


def indexed(base: Value, index: Sequence[Value]) -> Value | None:
    """Return the result of ``base[index]``."""
    if base.kind == "chosen":
        return base._replace(kind="of one") if len(index) == 1 and _is_number(index[0]) else None
    if base.kind != "rows":
        return None
    if index[0] == _NEW and [each.kind for each in index[1:]] == ["picks"]:
        index = index[1:]  # (1, picks, ...); what follows joins the two
    first, *features = index
    if first.kind != "picks":
        return None
    trailing = base.trailing
    for each in features:
        if each.kind == "slots" and each.held == first.held:
            trailing -= 1
        elif each == _NEW:
            trailing += 1
        else:
            return None
    return None if trailing < 0 else Value("picked", trailing, first.held)


def added(base: Value, values: list[Value]) -> Value | None:
    """Return the result of ``base.index_add_(0, picks, rows)``."""
    if base.kind != "rows" or len(values) != 3 or values[0] != constant(0):
        return None
    _, picks, rows = values
    known = picks.kind == "picks" and rows == Value("picked", base.trailing, picks.held)
    return base if known else None


def _is_number(value: Value) -> bool:
    return value.kind in (*layouts.NUMBERS, "own")
