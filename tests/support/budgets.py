"""Budgets of compiled Triton kernels, checked without a GPU.

A budget bounds each kernel of a call: registers and stack bytes per thread, KiB of shared memory
per program. It is for the code that one version of Triton, BUDGETED, generates.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from covering import selected_parameters
from filelock import FileLock

Budget = dict[str, tuple[int, int, int]]

BUDGETED = "3.9."
BUILD = Path(__file__).parents[2] / "build"
ARCHITECTURES = (80, 90)


def selected_calls(
    request: pytest.FixtureRequest, calls: Iterable[tuple[Any, ...]]
) -> list[tuple[Any, ...]]:
    """Returns the calls whose budgets are checked, beginning with the architecture. Returns all
    calls if none is checked, because then only another test of the module runs."""
    chosen = selected_parameters(request, "test_compiled_kernels_keep_to_their_budget")
    return [(each["architecture"], *each["call"]) for each in chosen] or [
        (architecture, *call) for call in calls for architecture in ARCHITECTURES
    ]


def compile_calls(
    script: str, calls: Sequence[tuple[Any, ...]]
) -> dict[tuple[Any, ...], list[Any]]:
    """Returns, by call, the kernels of its forward and backward and the resources of each.

    Args:
        script: the file in this folder that compiles calls and prints these resources.
        calls: in the script's format, beginning with the architecture.
    """
    pytest.importorskip("triton")
    # Kernels decorated for the interpreter can't be compiled, hence a separate process. If another
    # test worker is compiling the same, the results will be in Triton's cache.
    command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(calls)]
    BUILD.mkdir(exist_ok=True)
    with FileLock(BUILD / "compiled_calls.lock"):
        compiled = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(calls, json.loads(compiled.stdout), strict=True))


def check_budget(
    kernels: list[Any], budget: Budget, slack: tuple[int, int, int] = (0, 0, 0)
) -> None:
    assert [name for name, *_ in kernels] == list(budget)
    version = pytest.importorskip("triton").__version__
    if not version.startswith(BUDGETED):
        pytest.skip(f"budgets are those of Triton {BUDGETED}x; this is {version}")
    for name, registers, stack, shared, *_ in kernels:
        needed = (registers, stack, math.ceil(shared / 1024))
        allowed = tuple(sum(pair) for pair in zip(budget[name], slack, strict=True))
        assert all(n <= a for n, a in zip(needed, allowed, strict=True)), (
            f"{name}: registers, stack bytes, shared KiB {needed}, allowed {allowed}"
        )
