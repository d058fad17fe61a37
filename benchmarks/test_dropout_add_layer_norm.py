"""Microbenchmarks of dropout + residual + LayerNorm for pytest-benchmark: ``make bench``.

The cases of ``python -m trifuse.benchmarks dropout_add_layer_norm``, one function at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trifuse.benchmarks import dropout_add_layer_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = dropout_add_layer_norm.CASES[DEVICE]


@pytest.mark.parametrize("who", ["ours", "theirs"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dropout_add_layer_norm(
    timed: Callable[..., Any], case: dropout_add_layer_norm.Case, who: str
) -> None:
    given = dropout_add_layer_norm.inputs(case, DEVICE)
    timed(case.name, getattr(dropout_add_layer_norm, who)(case, given))
