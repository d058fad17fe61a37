"""The microbenchmarks of ``make bench`` run: one of each file, a few times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark")

ROOT = Path(__file__).parents[2]

LAST_OF_EACH_FILE = """
import sys

import pytest


class Selection:
    def pytest_collection_modifyitems(self, items):
        items[:] = {item.path: item for item in items}.values()


sys.exit(pytest.main(sys.argv[1:], plugins=[Selection()]))
"""


def test_one_case_of_each_file_runs():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"-m pytest (benchmarks\b.*) \$\(ARGS\)", makefile)
    briefly = ("--benchmark-min-rounds=1", "--benchmark-max-time=0.001", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-c", LAST_OF_EACH_FILE, *arguments.split(), *briefly],
        cwd=ROOT,
        # Not the workers' variables, with which pytest-benchmark would time nothing.
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = len(list((ROOT / "benchmarks").glob("test_*.py")))
    assert f"{files} passed" in done.stdout
    assert done.stdout.count("Median") == files  # a table for each, as each is of another group
