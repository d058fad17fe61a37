"""Assumptions of `make sanitize`: its list of calls, the origin of threads, a separate build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import fault_cases as faults
import pytest
import sanitized_calls
import torch

import trifuse
from trifuse import backends

ROOT = Path(__file__).parents[2]


def test_every_kernel_has_its_calls():
    text = (ROOT / "csrc/cpu/kernels.h").read_text()
    structs = dict(re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.DOTALL | re.MULTILINE))
    kernels = dict[str, str](
        (name, kind) for kind, name in re.findall(r"^  (\w+) (\w+);$", structs["Kernels"], re.M)
    )
    assert list(kernels) == list(sanitized_calls.CALLS)
    for name, kind in kernels.items():
        if name != "probe":
            functions = re.findall(r"\(\*(\w+)\)\(", structs[kind])
            assert functions == list(sanitized_calls.OPS[name])


def ops_of_the_extension() -> set[str]:
    sources = (ROOT / "csrc/cpu").glob("*.cpp")
    return {
        name
        for source in sources
        for name in re.findall(r'm\.impl\("(\w+)(?:\.\w+)?"', source.read_text())
    }


def test_threads_come_from_one_place():
    """ThreadSanitizer can follow only the threads of threads.h."""
    theirs = re.compile(
        r"\bat::(parallel_for|parallel_reduce|in_parallel_region)|#pragma omp (?!simd)"
    )
    for source in (
        *ROOT.glob("csrc/*.*"),
        *ROOT.glob("csrc/cpu/*"),
        *ROOT.glob("csrc/fast_path/*"),
    ):
        if source.name != "threads.h":
            assert not theirs.search(source.read_text()), source


def calls_have_the_same_bits_on_any_number_of_threads() -> None:
    calls = list(sanitized_calls.larger(torch.float32))
    assert len(calls) > 100
    with trifuse.backend("cpp"):
        torch.set_num_threads(1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            expected = [call() for call in calls]
        torch.set_num_threads(3)
        for call, results in zip(calls, expected, strict=True):
            sanitized_calls.assert_same_bits(call(), results)
    ran = {event.name.removeprefix("trifuse::") for event in profile.events()}
    named = {op for ops in sanitized_calls.OPS.values() for op in ops.values()}
    if missed := (ops_of_the_extension() | named) - ran:
        raise AssertionError(f"no call of {missed}")


@pytest.mark.skipif(backends._C is None, reason="the C++ extension was not built")
def test_calls_are_right_and_the_same_on_any_number_of_threads():
    """With the ordinary extension, in a new process, as some calls count all its allocations."""
    faults.in_process(calls_have_the_same_bits_on_any_number_of_threads, seconds=600)


@pytest.mark.parametrize(
    ("value", "why"),
    [("memory", "does not replace the one in place"), ("speed", "expected memory or threads")],
)
def test_a_sanitized_build_leaves_the_ordinary_one_alone(value, why):
    def state() -> list[tuple[str, int]]:
        files = [*ROOT.glob("pytorch_ext/_C*.so"), *ROOT.glob("pytorch_ext/_build_info.py")]
        return [(str(path), path.stat().st_mtime_ns) for path in files]

    before = state()
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=ROOT,
        env={**os.environ, "TRIFUSE_SANITIZE": value},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert why in done.stderr
    assert state() == before
