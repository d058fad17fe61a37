"""What every test shares: the machine's backends, and uninitialised memory that shows."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when a kernel is decorated, so this has to come before it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import trifuse
from trifuse import backends

# The same examples on every run: a change is judged by what it does, not by the day's draw.
# `pytest --hypothesis-profile=thorough` draws new ones, and many more.
_COMMON = {
    "deadline": None,
    "suppress_health_check": [
        hypothesis.HealthCheck.function_scoped_fixture,  # `backend` is the same for every example
        hypothesis.HealthCheck.differing_executors,
        hypothesis.HealthCheck.too_slow,
    ],
}
hypothesis.settings.register_profile("default", derandomize=True, database=None, **_COMMON)
hypothesis.settings.register_profile("thorough", max_examples=1000, **_COMMON)
hypothesis.settings.load_profile("default")

CAPABILITIES = () if backends._C is None else tuple(backends._C.cpu_capabilities())
CPP = pytest.param(
    "cpp",
    marks=pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built"),
)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """What a kernel forgets to write shows up as NaN, in every test."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=["eager", CPP])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Calls are served by each backend for CPU tensors in turn, at the machine's best."""
    with trifuse.backend(request.param):
        yield request.param


@pytest.fixture(params=["eager", *(f"cpp-{name}" for name in CAPABILITIES)])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """As ``backend``, with the C++ kernels in turn as compiled for each instruction set."""
    name, _, capability = request.param.partition("-")
    if capability:
        before = backends._C.cpu_capability()
        backends._C.set_cpu_capability(capability)
    with trifuse.backend(name):
        yield name
    if capability:
        backends._C.set_cpu_capability(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """Leaves torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
