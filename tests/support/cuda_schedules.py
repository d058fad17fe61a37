"""The schedules of the recurrent CUDA kernels on the host model: all steps in one launch, or step
by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tested_kernels import Kernel

CUDA = Kernel("cuda")

# Properties of the modelled device. Small calls fit one launch. A device that can hold none of
# their blocks runs them step by step.
ONE_LAUNCH: dict[str, int] = {}
STEP_BY_STEP = {"blocks_per_multiprocessor": 0}
SCHEDULES = pytest.mark.parametrize(
    "schedule", [ONE_LAUNCH, STEP_BY_STEP], ids=["one launch", "steps"]
)


@contextmanager
def on_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test on the CUDA kernels, on its schedule if it has one, with guarded memory and
    threads in a random order."""
    library, schedule = request.getfixturevalue("library"), ONE_LAUNCH
    if "schedule" in request.fixturenames:
        schedule = request.getfixturevalue("schedule")
    with library.device(seed=1, **schedule), CUDA.serving(), library.guarded_memory():
        yield
