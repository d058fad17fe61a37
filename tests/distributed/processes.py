"""Runs checks in several processes joined by gloo, all of them in one start of the processes.

A check is a function without arguments that every process runs. It fails in the test of its name if
it raises in any process. Run as a program, this file is the parent of the processes, also of
several numbers of them, one after the other: it imports once what they need.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[1] / "support"
if str(SUPPORT) not in sys.path:  # as a program, this file has only its own folder there
    sys.path.append(str(SUPPORT))

from covering import covering  # noqa: E402

SIZES = (2, 4)
MODULES = (
    "dtensor_checks",
    "model_checks",
    "checkpoint_checks",
    "pipeline_checks",
    "context_checks",
    "dropout_checks",
    "recurrent_checks",
    "page_checks",
)
CHECKS: dict[str, Callable[[], None]] = {}
_EXHAUSTIVE = False  # in a process that runs checks: whether they make all their calls


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Adds the decorated function to the checks, under its name."""
    assert function.__name__ not in CHECKS, function.__name__
    CHECKS[function.__name__] = function
    return function


def thinned(*values: Sequence[Any], strength: int = 3) -> list[tuple[Any, ...]]:
    """Returns combinations of values for the calls of a check, in which any three (``strength``)
    values of different sequences meet; with ``--exhaustive``, all combinations."""
    positions = list(itertools.product(*(range(len(each)) for each in values)))
    chosen = range(len(positions)) if _EXHAUSTIVE else covering(positions, strength)
    return [tuple(each[i] for each, i in zip(values, positions[n], strict=True)) for n in chosen]


def names() -> list[str]:
    """Returns the names of all checks."""
    _load()
    return list(CHECKS)


def run(
    wanted: dict[int, list[str]], folder: Path, exhaustive: bool = False
) -> dict[int, dict[str, list[str]]]:
    """Runs checks, by the number of processes; returns each check's errors.

    Args:
        exhaustive: see ``thinned``.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    arguments = [str(folder), json.dumps(wanted), json.dumps(exhaustive)]
    parent = subprocess.Popen(
        [sys.executable, __file__, *arguments], env=environment, start_new_session=True
    )
    try:
        parent.wait(timeout=900)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # a group of its own: the processes too
        parent.wait()
    return {size: _errors(size, folder / str(size), names) for size, names in wanted.items()}


def _errors(size: int, folder: Path, names: list[str]) -> dict[str, list[str]]:
    results = [_read(folder / f"{rank}.json") for rank in range(size)]
    return {
        name: [
            f"process {rank}: {result.get(name, 'did not finish')}"
            for rank, result in enumerate(results)
            if result.get(name, "did not finish")
        ]
        for name in names
    }


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _load() -> None:
    for module in MODULES:
        if (Path(__file__).parent / f"{module}.py").exists():
            importlib.import_module(module)


def _main(rank: int, size: int, folder: Path, wanted: list[str]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["TRIFUSE_TEST_FOLDER"] = str(folder)
    store = dist.FileStore(str(folder / "store"), size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    results: dict[str, str] = {}
    for name in wanted:
        torch.manual_seed(0)
        try:
            CHECKS[name]()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))
        # No process goes on while another is inside the check, even if the check failed here.
        store.set(f"{name} {rank}", "done")
        store.wait([f"{name} {other}" for other in range(size)], 2 * limit)
    dist.destroy_process_group()


def _start(size: int, folder: Path, wanted: list[str]) -> None:
    """Forks the processes, so that torch is imported once."""
    folder.mkdir()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                _main(rank, size, folder, wanted)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    sys.modules["processes"] = sys.modules["__main__"]  # the checks add themselves to this module
    _EXHAUSTIVE = json.loads(sys.argv[3])
    _load()
    gc.freeze()  # collections leave out what the imports made, whose pages the processes share
    for number, checks in json.loads(sys.argv[2]).items():
        _start(int(number), Path(sys.argv[1]) / number, checks)
