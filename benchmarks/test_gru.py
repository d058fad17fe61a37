"""Microbenchmarks of GRU and RNN layers and cells for pytest-benchmark: ``make bench``.

The cases of ``python -m trifuse.benchmarks gru``, one function at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trifuse.benchmarks import gru

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = gru.CASES[DEVICE]


@pytest.mark.parametrize("who", ["ours", "theirs"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gru(timed: Callable[..., Any], case: gru.Case, who: str) -> None:
    given = gru.inputs(case, DEVICE)
    timed(case.name, getattr(gru, who)(case, given))
