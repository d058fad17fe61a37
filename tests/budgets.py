"""What kernels need on GPUs that aren't there, held to what they may need.

A budget says, by call and kernel: registers and bytes of stack for a thread, KiB of shared memory
for a program.
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

Budget = dict[str, tuple[int, int, int]]

ARCHITECTURES = (80, 90)


def for_each_architecture(calls: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(architecture, *call) for call in calls for architecture in ARCHITECTURES]


def compile_calls(
    script: str, calls: Sequence[tuple[Any, ...]]
) -> dict[tuple[Any, ...], list[Any]]:
    """By call: the kernels of its forward and backward, and what each of them needs.

    Args:
        script: the file beside this one that compiles calls and prints what it found.
        calls: as the script takes them; they begin with the architecture.
    """
    pytest.importorskip("triton")
    path = Path(__file__).with_name(script)
    shares = [[call for call in calls if call[0] == of] for of in ARCHITECTURES]
    # Processes of their own, in which kernels aren't the interpreter's.
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
    for name, registers, stack, shared, *_ in kernels:
        needed = (registers, stack, math.ceil(shared / 1024))
        allowed = tuple(sum(pair) for pair in zip(budget[name], slack, strict=True))
        assert all(n <= a for n, a in zip(needed, allowed, strict=True)), (
            f"{name}: registers, stack bytes, shared KiB {needed}, allowed {allowed}"
        )
