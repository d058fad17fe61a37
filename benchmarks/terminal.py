"""The terminal that benchmarks print to."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 120)


def progress_bars() -> Progress:
    """Progress bars with a description and a count, which vanish when all is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True)


def print_table(table: Table) -> None:
    """Print a table; in a file or a pipe it is as wide as it needs to be."""
    (console if console.is_terminal else Console(width=240)).print(table)


def print_missing(name: str) -> None:
    """Print what to install for a package that was not found.

    The brackets of an extra would be taken for markup.
    """
    console.print(f"{name} is not installed; try: pip install 'trifuse[bench]'", markup=False)


def learnt_share(shares: float | Sequence[float], early: bool) -> str:
    """Return a share of right answers as text; of several seeds, mean ± standard deviation.

    ``early``: the models were trained too briefly to learn, so that a share would mislead.
    """
    if early:
        return "stopped early"
    if isinstance(shares, float):
        return f"{shares:.1%}"
    return f"{statistics.mean(shares):.1%} ± {statistics.stdev(shares):.1%}"
