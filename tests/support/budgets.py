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

Budget = dict[str, tuple[int, int, int]]

BUDGETED = "3.9."
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
    path = Path(__file__).with_name(script)
    shares = [[call for call in calls if call[0] == of] for of in ARCHITECTURES]
    # Kernels decorated for the interpreter can't be compiled, hence separate processes.
    compilers = [
        subprocess.Popen(
            [sys.executable, str(path), json.dumps(share)], stdout=subprocess.PIPE, text=True
        )
        for share in shares
    ]
    found = {}
    for share, compiler in zip(shares, compilers, strict=True):
        output, _ = compiler.communicate()
        assert compiler.returncode == 0
        found |= dict(zip(share, json.loads(output), strict=True))
    return found


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
