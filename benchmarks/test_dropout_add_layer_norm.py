"""Microbenchmarks of dropout + residual + LayerNorm for pytest-benchmark: ``make bench``.

The cases of ``python -m trifuse.benchmarks dropout_add_layer_norm``, one function at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from trifuse.benchmarks import command_line, dropout_add_layer_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = dropout_add_layer_norm.CASES[DEVICE]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(command_line.default_threads())
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("who", ["ours", "theirs"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dropout_add_layer_norm(
    benchmark: BenchmarkFixture, case: dropout_add_layer_norm.Case, who: str
) -> None:
    benchmark.group = case.name
    step = getattr(dropout_add_layer_norm, who)(case, dropout_add_layer_norm.inputs(case, DEVICE))
    step()

    def finished() -> None:
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark(finished)
