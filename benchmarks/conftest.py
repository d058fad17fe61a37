"""Fixtures of the microbenchmarks: ``make bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from trifuse.benchmarks import command_line


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(command_line.default_threads())
    yield
    torch.set_num_threads(before)


@pytest.fixture
def timed(benchmark: BenchmarkFixture) -> Callable[[str, Callable[[], Any]], None]:
    """Returns a function that times a step, beside the others of its group."""

    def time(group: str, step: Callable[[], Any]) -> None:
        benchmark.group = group
        step()

        def finished() -> None:
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        benchmark(finished)

    return time
