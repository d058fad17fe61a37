"""The functions that ``trifuse.explain`` takes; each is registered beside its operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Explained(NamedTuple):
    """How to explain a call of a function without running it.

    Attributes:
        prepare: takes the function's arguments, except those that only shape its results; checks
            them and returns the checked call, whose ``choice`` is its :class:`backends.Choice`.
        notes: returns notes on how the chosen backend runs a checked call.
    """

    prepare: Callable[..., Any]
    notes: Callable[[Any], tuple[str, ...]]


EXPLAINED: dict[Callable[..., Any], Explained] = {}


def explains(
    function: Callable[..., Any],
    prepare: Callable[..., Any],
    notes: Callable[[Any], tuple[str, ...]] = lambda call: (),
) -> None:
    """Registers a function that ``trifuse.explain`` takes; see :class:`Explained`."""
    EXPLAINED[function] = Explained(prepare, notes)
