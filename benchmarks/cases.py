"""Selects a benchmark's cases by name, and runs them."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from rich.progress import track

from trifuse.benchmarks.terminal import console

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def select(
    items: Sequence[Item], name: Callable[[Item], str], wanted: Sequence[str] | None
) -> list[Item]:
    """The items whose name matches one of the patterns; all of them without patterns.

    Raises:
        SystemExit: a pattern matches nothing; the message lists the names.
    """
    if wanted is None:
        return list(items)
    for pattern in wanted:
        if not any(fnmatch.fnmatch(name(item), pattern) for item in items):
            names = "\n  ".join(dict.fromkeys(map(name, items)))
            raise SystemExit(f"--cases: nothing is named {pattern!r}; there are\n  {names}")
    return [item for item in items if any(fnmatch.fnmatch(name(item), p) for p in wanted)]


def run_all(
    cases: Sequence[Item],
    name: Callable[[Item], str],
    run: Callable[[Item], Outcome],
    keep: Callable[[list[Outcome]], None],
) -> tuple[list[Outcome], dict[str, str]]:
    """Run every case, even if others fail.

    Args:
        keep: called after each case with the outcomes so far, so that they survive an interruption.

    Returns:
        The outcomes of the cases that succeeded, and the errors of those that didn't, by name.

    Raises:
        SystemExit: with status 2, a case has left the GPU unusable.
    """
    done: list[Outcome] = []
    failed = {}
    for case in track(cases, "timing", console=console, transient=True):
        try:
            done.append(run(case))
        except (Exception, KeyboardInterrupt) as error:
            failed[name(case)] = f"{type(error).__name__}: {error}"
            console.print(f"{name(case)}: {failed[name(case)]}", style="red", markup=False)
            if isinstance(error, KeyboardInterrupt):
                break
            if _gpu_is_lost():
                sys.exit(2)
        keep(done)
    return done, failed


def _gpu_is_lost() -> bool:
    """Whether an error of a kernel makes every later call of this process fail."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
