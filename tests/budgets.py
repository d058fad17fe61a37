"""What kernels need on GPUs that aren't there, held to what they may need.

A budget says, by call and kernel: registers and bytes of stack for a thread, KiB of shared memory
for a program.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

Budget = dict[str, tuple[int, int, int]]


def compile_calls(
    script: str, budget: Mapping[tuple[Any, ...], Budget], more: Sequence[tuple[Any, ...]] = ()
) -> dict[tuple[Any, ...], list[Any]]:
    """By architecture and call: the kernels of its forward and backward, and what each needs.

    Args:
        script: the file beside this one that compiles calls and prints what it found.
        budget: its calls are compiled for both architectures.
        more: calls for the second architecture, which they begin with.
    """
    pytest.importorskip("triton")
    path = Path(__file__).with_name(script)
    calls = {architecture: [(architecture, *of) for of in budget] for architecture in (80, 90)}
    calls[90] += more
    # Processes of their own, in which kernels aren't the interpreter's.
    compilers = {
        architecture: subprocess.Popen(
            [sys.executable, str(path), json.dumps(of)], stdout=subprocess.PIPE, text=True
        )
        for architecture, of in calls.items()
    }
    found = {}
    for architecture, compiler in compilers.items():
        output, _ = compiler.communicate()
        assert compiler.returncode == 0
        found |= dict(zip(calls[architecture], json.loads(output), strict=True))
    return found


def check_budget(kernels: list[Any], budget: Budget) -> None:
    assert [name for name, *_ in kernels] == list(budget)
    for name, registers, stack, shared, *_ in kernels:
        needed = (registers, stack, math.ceil(shared / 1024))
        assert all(n <= a for n, a in zip(needed, budget[name], strict=True)), (
            f"{name}: registers, stack bytes, shared KiB {needed}, allowed {budget[name]}"
        )
