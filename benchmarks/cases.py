"""Selects a benchmark's cases by name, and runs them."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from rich.progress import track

import trifuse
from trifuse.benchmarks import machine, report
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


class Finished(NamedTuple):
    """The results of a command."""

    facts: dict[str, Any]  # the machine
    outcomes: list[Any]
    failed: dict[str, str]  # errors by the case's name


def run_selected(
    options: argparse.Namespace,
    cases: Sequence[Item],
    name: Callable[[Item], str],
    run: Callable[[Item], Any],
) -> Finished:
    """Run the cases that the options select, with their threads and backend, on a CPU.

    Prints the machine. Saves the times so far after each case if the options ask for a JSON file.
    """
    torch.set_num_threads(options.threads)
    chosen = select(cases, name, options.cases)
    facts = machine.facts()
    console.print(machine.describe(facts), soft_wrap=True, markup=False)
    keep = functools.partial(report.save_times, options, facts)
    with trifuse.backend(options.backend):
        outcomes, failed = run_all(chosen, name, run, keep)
    keep(outcomes, failed=failed)
    return Finished(facts, outcomes, failed)


def _gpu_is_lost() -> bool:
    """Whether an error of a kernel makes every later call of this process fail."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
