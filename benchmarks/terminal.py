"""The terminal that benchmarks print to."""

from __future__ import annotations

import sys

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
