"""Microbenchmarks of LSTM layers and cells for pytest-benchmark: ``make bench``.

The cases of ``python -m trifuse.benchmarks lstm``, one function at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trifuse.benchmarks import lstm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = lstm.CASES[DEVICE]


@pytest.mark.parametrize("who", ["ours", "theirs"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lstm(timed: Callable[..., Any], case: lstm.Case, who: str) -> None:
    given = lstm.inputs(case, DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # oneDNN does not serve projections
        timed(case.name, getattr(lstm, who)(case, given))
