"""The Triton kernels compile with the oldest Triton that is supported, too.

``make test`` installs it into a folder of the virtual environment. Other tests compile with the
Triton that is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

OLDEST = Path(sys.prefix) / "oldest-triton"
SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.skipif(
    not OLDEST.is_dir(), reason="`make test` installs the oldest Triton; it is not there"
)

# By script: calls that together launch the script's kernels with each kind of tensor absent.
CALLS: dict[str, list[list[Any]]] = {
    "compile_attention.py": [
        [90, "bf16", 64, "plain"],
        [90, "bf16", 64, "all"],
        [90, "bf16", 64, "placed dropout"],
        [90, "bf16", 64, "relative bias"],
        [90, "fp32", 64, "a diagonal each"],
        [90, "bf16", 64, "few queries", ["chunk", "join"]],
        [90, "bf16", 64, "few queries, mask", ["chunk", "join"]],
        [90, "bf16", 64, "few queries, packed", ["chunk", "join"]],
    ],
    "compile_dropout_add_layer_norm.py": [
        [90, "bf16", 768],
        [90, "bf16", 768, 0.1, False, True],
        [90, "bf16", 65536, 0.1, True, True, 64, True],
    ],
    "compile_lstm.py": [
        [90, "bf16", 64, options] for options in ("plain", "norm, all", "projected")
    ]
    + [[90, "bf16", H, kind] for H in (64, 512) for kind in ("gru", "gru, reset first", "rnn")],
}

DROPOUT = """
import torch
from ahead_of_time import compile_launches
from trifuse.kernels.dropout import dropout
from trifuse.reference.philox import SEED_AND_PLACE

for numbers in (1, SEED_AND_PLACE):
    x = torch.empty(40, 64, device="meta")
    seed = torch.empty(numbers, dtype=torch.int64, device="meta")
    assert compile_launches(90, lambda: dropout(x, seed, 0.1))
"""


def run(arguments: Sequence[str]) -> str:
    path = os.pathsep.join([str(OLDEST), str(SUPPORT)])
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("script", CALLS)
def test_kernels_compile(script):
    calls = json.dumps(CALLS[script])
    found = json.loads(run([str(SUPPORT / script), calls, "--only-compile"]))
    assert all(found)
    assert len(found) == len(CALLS[script])


def test_dropout_compiles():
    run(["-c", DROPOUT])


def test_the_version_is_the_one_that_pyproject_names():
    version = run(["-c", "import triton; print(triton.__version__)"]).strip()
    project = (SUPPORT.parents[1] / "pyproject.toml").read_text()
    assert f'"triton>={version.rpartition(".")[0]};' in project
