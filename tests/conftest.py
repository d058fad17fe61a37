"""Fixtures of all tests: the machine's backends, and NaN in uninitialised memory."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import environment  # noqa: F401 - before torch
import hypothesis
import pytest
import torch
import transformers_versions
from covering import selected
from tested_kernels import BACKENDS, CPP_KERNELS, KERNELS, Kernel

import trifuse
from trifuse import backends
from trifuse.ops import _linear_choice

# The same examples on every run, so that only a change can make a test fail; more of them with
# --exhaustive. `pytest --hypothesis-profile=thorough` draws new ones, and many more.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [
        hypothesis.HealthCheck.function_scoped_fixture,  # `backend` is the same for every example
        hypothesis.HealthCheck.differing_executors,
        hypothesis.HealthCheck.too_slow,
    ],
}
for _name, _examples in (("default", 40), ("exhaustive", 100)):
    hypothesis.settings.register_profile(
        _name, max_examples=_examples, derandomize=True, database=None, **_COMMON
    )
hypothesis.settings.register_profile("thorough", max_examples=1000, **_COMMON)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every combination of parameters, and more examples",
    )
    parser.addoption(
        "--oldest-transformers",
        action="store_true",
        help="fail unless the oldest transformers that is supported is the one that is imported",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("exhaustive") and not config.getoption("--hypothesis-profile", None):
        hypothesis.settings.load_profile("exhaustive")
    if config.getoption("oldest_transformers"):
        transformers_versions.check_that_it_is_the_oldest()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("exhaustive"):
        return
    kept = selected(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


# Until a worker has collected all tests, hardly anything becomes garbage, and each garbage
# collection would walk over all that is there. The process that starts the workers collects none.
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()


def pytest_collection_finish() -> None:
    """Takes what exists before the first test out of garbage collections. Otherwise each of them
    walks over every collected test, which costs small tests a fifth of their time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    _time_no_guards()


def _time_no_guards() -> None:
    """Keeps torch.compile from timing a graph's guards, for statistics that nothing here reads.

    It first flushes the CPU's caches, which takes a tenth of the time of compiling a small graph.
    If no test has imported torch.compile by now, it isn't imported for this.
    """
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that the interpreter, at its end, frees what was frozen


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Runs tests in one thread. On their small tensors, threads cost more than they gain, many
    times more on a shared machine. Tests about threads set their own number."""
    torch.set_num_threads(1)


def pytest_make_parametrize_id(val: object) -> str | None:
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """Fills uninitialised memory with NaN, so that elements a kernel does not write show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Resets Dynamo, so that graphs compiled by other tests do not count."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Serves calls by each CPU backend in turn, with the machine's best instruction set."""
    with trifuse.backend(request.param):
        yield request.param


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.name)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """As ``backend``, with the C++ kernels of each instruction set in turn."""
    with request.param.serving():
        yield request.param


@pytest.fixture
def triton() -> Iterator[Kernel]:
    """Serves calls by Triton's interpreter. A program takes milliseconds, so use tiny tensors."""
    why_not = backends._why_not_triton(backends.Call("attention", "cpu", torch.float32))
    if why_not is not None:
        pytest.skip(why_not)
    kernel = Kernel("triton")
    with kernel.serving():
        yield kernel


@pytest.fixture
def every_kernel() -> tuple[Kernel, ...]:
    """Returns all kernels, for tests that run the same call on each."""
    return KERNELS


@pytest.fixture
def cpp_kernels() -> tuple[Kernel, ...]:
    """Returns the C++ kernels of each instruction set; skips the test if there are none."""
    if not CPP_KERNELS:
        pytest.skip("the C++ extension is not built")
    return CPP_KERNELS


@pytest.fixture(params=CPP_KERNELS or [pytest.param(None, marks=pytest.mark.skip("not built"))])
def cpp_kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with request.param.serving():
        yield request.param


@pytest.fixture
def torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves products of linear layers to torch, so that reports don't depend on the machine."""
    monkeypatch.setenv("TRIFUSE_LINEAR", "torch")
    monkeypatch.setattr(_linear_choice, "_made", {})


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings that trifuse has logged since the list was last cleared."""
    caplog.set_level(logging.WARNING, "trifuse")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trifuse").addHandler(handler)
    yield said
    logging.getLogger("trifuse").removeHandler(handler)


@pytest.fixture(scope="session")
def _measured_ceilings() -> dict[str, Any]:
    from trifuse.benchmarks import ceilings

    return {name: functools.cache(getattr(ceilings, name)) for name in ("matrix_rate", "copy_rate")}


@pytest.fixture
def ceilings_measured_once(
    monkeypatch: pytest.MonkeyPatch, _measured_ceilings: dict[str, Any]
) -> None:
    """Measures each ceiling of the machine once per process, because each time takes seconds.

    A ceiling is kept by its arguments alone: a test that changes the number of threads must not
    rely on the rates."""
    from trifuse.benchmarks import ceilings

    for name, measured in _measured_ceilings.items():
        monkeypatch.setattr(ceilings, name, measured)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that records the operator's name whenever trifuse.nn calls attention."""
    made: list[str] = []

    def watch(module: object, name: str) -> None:
        operator = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            result = operator(*args, **kwargs)
            if result is not None:  # the fast path of packed sequences declined
                made.append("varlen_attention" if name == "packed_attention" else name)
            return result

        monkeypatch.setattr(module, name, call)

    watch(trifuse.nn.attention, "scaled_dot_product_attention")
    watch(trifuse.nn.packing, "varlen_attention")
    watch(trifuse.nn.packing, "packed_attention")
    return made
