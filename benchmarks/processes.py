"""Engines that are compared, each in its own process.

The idle threads of one engine spin for some time after a call. In one process they would take the
cores of the next engine's turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


@contextlib.contextmanager
def each_in_a_process(
    names: Sequence[str], start: Callable[..., None], *arguments: Any
) -> Iterator[dict[str, Callable[..., Any]]]:
    """Yield, by name, a function that calls another one in the process of that engine.

    Args:
        start: called first in each process, with the name and ``arguments``.
    """
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        calls = {}
        for name in names:
            pool = ProcessPoolExecutor(
                1, mp_context=spawn, initializer=start, initargs=(name, *arguments)
            )
            stack.enter_context(pool)
            pool.submit(int)  # starts the process, beside the others
            calls[name] = lambda *job, pool=pool: pool.submit(*job).result()
        yield calls
