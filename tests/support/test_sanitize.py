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
    [fields] = re.findall(r"^struct Kernels \{\n(.*?)^\};", text, re.DOTALL | re.MULTILINE)
    assert re.findall(r"(\w+);$", fields, re.MULTILINE) == list(sanitized_calls.CALLS)


def test_threads_come_from_one_place():
    """ThreadSanitizer can follow only the threads of threads.h."""
    theirs = re.compile(
        r"\bat::(parallel_for|parallel_reduce|in_parallel_region)|#pragma omp (?!simd)"
    )
    for source in (*ROOT.glob("csrc/*.*"), *ROOT.glob("csrc/cpu/*")):
        if source.name != "threads.h":
            assert not theirs.search(source.read_text()), source


def calls_have_the_same_bits_on_any_number_of_threads() -> None:
    made = 0
    with trifuse.backend("cpp"):
        for call in sanitized_calls.larger(torch.float32):
            torch.set_num_threads(1)
            expected = call()
            torch.set_num_threads(3)
            sanitized_calls.assert_same_bits(call(), expected)
            made += 1
    assert made > 100


@pytest.mark.skipif(backends._C is None, reason="the C++ extension was not built")
def test_calls_are_right_and_the_same_on_any_number_of_threads():
    """In the ordinary extension, and in a new process, as some calls count all its allocations."""
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
