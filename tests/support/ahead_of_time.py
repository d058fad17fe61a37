"""Compiles Triton kernels without a GPU.

Kernels decorated under ``TRITON_INTERPRET=1`` can't be compiled, so a program has to import this
module before any kernel, in a separate process.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver


class Code(NamedTuple):
    """One compiled kernel."""

    kernel: str
    registers: int  # per thread
    stack: int  # bytes per thread, nearly all of them spills
    shared: int  # bytes per program
    hash: str
    ptx: str
    cubin: bytes

    @property
    def sass(self) -> str:
        return "" if _ONLY_COMPILE else _dump(self.cubin, "--dump-sass")


# Whether instructions are left out, which take a quarter of the time.
_ONLY_COMPILE = "--only-compile" in sys.argv


class _Device:
    """Triton's driver for a GPU, as far as launches use it before they need the GPU."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


def compile_launches(
    architecture: int, call: Callable[[], object], kernels: tuple[str, ...] = ()
) -> list[Code]:
    """Returns the code of the kernels (default: all) that ``call`` launches on meta tensors.

    A launch stops after compilation. The code is what a GPU would run, down to the alignments that
    Triton specialises for.
    """
    driver.set_active(_Device(architecture))
    compiled = []

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        if self.__name__ in kernels or not kernels:
            compiled.append(run(self, *args, warmup=True, **kwargs))

    run, JITFunction.run = JITFunction.run, compile_only
    try:
        call()
    finally:
        JITFunction.run = run
    return [_code(kernel) for kernel in compiled]


def _code(kernel: Any) -> Code:
    report = _dump(kernel.asm["cubin"], "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    resources = int(found[1]), int(found[2]), kernel.metadata.shared
    return Code(kernel.name, *resources, kernel.hash, kernel.asm["ptx"], kernel.asm["cubin"])


@functools.cache  # one kernel may serve several launches
def _dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _compile(compile_call: Callable[[Any], list[Any]], calls: list[Any]) -> list[list[Any]]:
    return [compile_call(call) for call in calls]


def main(calls: Sequence[Any], compile_call: Callable[[Any], list[Any]]) -> None:
    """Prints usages as JSON for calls given in JSON; without arguments, a table of all ``calls``.

    A process for each architecture compiles its calls, in JSON. ``--only-compile`` after them
    leaves out what instructions would tell.

    Args:
        compile_call: returns the usages of a call's kernels. Calls and usages are NamedTuples.
    """
    if sys.argv[1:]:
        wanted = [type(calls[0])(*call) for call in json.loads(sys.argv[1])]
        architectures = sorted({call.architecture for call in wanted})
        shares = [[call for call in wanted if call.architecture == of] for of in architectures]
        with ProcessPoolExecutor(len(shares), multiprocessing.get_context("fork")) as pool:
            usages = pool.map(_compile, repeat(compile_call), shares)
            found = dict(zip(architectures, usages, strict=True))
        print(json.dumps([found[call.architecture].pop(0) for call in wanted]))
        return
    from rich.console import Console
    from rich.table import Table

    rows = [call._asdict() | usage._asdict() for call in calls for usage in compile_call(call)]
    shown = [name for name in rows[0] if name not in ("kernels", "hash")]
    table = Table(*shown)
    for row in rows:
        table.add_row(*(str(row[name]) for name in shown))
    Console(width=200).print(table)
