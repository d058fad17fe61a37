"""The report of ``trifuse.fuse``: what it changed, and what it left alone and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from trifuse.fusing.steps import Change, Undoable
from trifuse.nn import plans


class Swapped(NamedTuple):
    """A module that now runs fused."""

    path: str  # its name in the model; "" is the model itself
    before: str  # its class, or what its configuration chose
    after: str  # the same, and what it leaves out or takes


class Left(NamedTuple):
    """A module that :func:`trifuse.fuse` left alone, and why."""

    path: str
    module: str
    reason: str


class Note(NamedTuple):
    """The part of a swapped module that does not run fused."""

    path: str
    text: str


@dataclass
class FuseReport:
    """A report of what :func:`trifuse.fuse` did. ``print(report)`` shows it as a table.

    The report refers to the modules that were changed. Copied or pickled together with the model,
    as in ``copy.deepcopy((model, report))``, it reverts the copied model; copied alone, it reverts
    private copies of the modules. :func:`trifuse.explain` shows what a model runs at present.

    Attributes:
        swapped: the modules that now run fused and did not before.
        left: the modules that were candidates, and why they were left alone.
        notes: the parts of the swapped modules that do not run fused.
        linear: for each dtype among the model's linear layers, the product that serves it, and why.
        unpadded: with ``unpad``, the names of the modules that compute on real tokens only.
        padded: with ``unpad``, the modules that compute padding too, and why.
        frozen: with ``freeze``, the names of the modules whose weights were frozen.
        norms: the norms in modules of transformers that run as before, and why.
        sums: the sums in modules of transformers that run as before, and why: those at the ends of
            layers; and those of embeddings, or anywhere else, that a norm takes.
    """

    swapped: list[Swapped] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    linear: dict[torch.dtype, str] = field(default_factory=dict)
    unpadded: list[str] = field(default_factory=list)
    padded: list[Left] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    norms: list[Left] = field(default_factory=list)
    sums: list[Left] = field(default_factory=list)
    _steps: list[Undoable] = field(default_factory=list, repr=False)

    def revert(self) -> None:
        """Undo the swaps of this report, the latest first. A second call does nothing.

        A module whose class has been changed again since is left as it is.
        """
        while self._steps:
            self._steps.pop().undo()
        plans.forget()  # they hold packed weights

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} swapped, {len(self.left)} left"]
        rows = [swapped for swapped in self.swapped if swapped.after not in _MANY]
        for name in _MANY:  # too many to list
            layers = [swapped for swapped in self.swapped if swapped.after == name]
            if layers:
                count = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
                rows.append(Swapped(f"({count})", layers[0].before, name))
        notes = dict(self.notes)
        rows = [
            Swapped(path, was, f"{now}; {notes[path]}" if path in notes else now)
            for path, was, now in rows
        ]
        rows += [Swapped(path, module, f"left: {reason}") for path, module, reason in self.left]
        rows += [
            Swapped(path, module, f"computes padding too: {reason}")
            for path, module, reason in self.padded
        ]
        # The same norm in all layers is one row, and so is the same sum.
        for kind, left in (("norm", self.norms), ("sum", self.sums)):
            counts = Counter((each.module, each.reason) for each in left)
            for (module, reason), alike in counts.items():
                many = f"1 {kind}" if alike == 1 else f"{alike} {kind}s"
                rows.append(Swapped(f"({many})", module, f"as before: {reason}"))
        lines += table(rows)
        lines += [f"  linear layers: {choice}" for choice in self.linear.values()]
        if self.unpadded:
            names = ", ".join(path or _WHOLE for path in self.unpadded)
            lines.append(f"  without padding: {names}")
        if self.frozen:
            lines.append(f"  frozen: the weights of {len(self.frozen)} modules")
        return "\n".join(lines)


def table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Format rows as aligned lines. The first column is a module's name in the model."""
    rows = [(path or _WHOLE, second, third) for path, second, third in rows]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return [f"  {path:{widths[0]}}  {second:{widths[1]}}  {third}" for path, second, third in rows]


_WHOLE = "(the model)"


_MANY = (
    "trifuse.nn.Linear",
    "trifuse.recipes.conv1d.Conv1D",
    "trifuse.recipes.falcon_linear.FalconLinear",
    "trifuse.nn.Dropout",
    "trifuse.nn.LayerNorm",
)


UNPADDED = ", without padding"


def add(report: FuseReport, path: str, change: Change) -> None:
    """Add a change to a report. Merge it with the module's last change if it continues that one."""
    before = change.before
    last = report.swapped[-1] if report.swapped else None
    if last is not None and (last.path, last.after) == (path, before):
        before = report.swapped.pop().before
    report.swapped.append(Swapped(path, before, change.after))
    report._steps += change.steps
