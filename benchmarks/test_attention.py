"""Microbenchmarks of attention for pytest-benchmark: ``make bench``.

The cases of ``python -m trifuse.benchmarks attention``, one function at a time, for following one
kernel over time: ``make bench ARGS='-k causal --benchmark-autosave --benchmark-compare'``. For
ratios use the command instead, which times the functions in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trifuse.benchmarks import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRS = [(case, who) for case in attention.CASES[DEVICE] for who in ("ours", *case.peers)]


@pytest.mark.parametrize(("case", "who"), PAIRS, ids=[f"{who}: {case.name}" for case, who in PAIRS])
def test_attention(timed: Callable[..., Any], case: attention.Case, who: str) -> None:
    given = attention.inputs(case, DEVICE)
    try:
        step = attention.ours(case, given) if who == "ours" else attention.theirs(who, case, given)
        step()
    except RuntimeError as error:
        if who == "ours":
            raise
        pytest.skip(f"{who} does not serve this: {error}")
    timed(case.name, step)
