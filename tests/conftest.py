"""Shared by all tests: the machine's backends, and NaN in uninitialised memory."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import hypothesis
import pytest

# Waiting threads sleep instead of spinning: the cores may be busy with another worker's tests, and
# some tests have more threads than cores. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Errors are compared with torch's, which depend on the order of MKL's sums. With these instructions
# Intel's processors sum much as others do. MKL reads this when torch is loaded.
with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
    if "GenuineIntel" in cpuinfo.read():
        os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX2")

import torch

if not torch.cuda.is_available():
    # Triton reads this when it decorates a kernel, so it must be set before the import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with contextlib.suppress(ModuleNotFoundError):  # it needs a package that torch does not bring
    # This loads a Hypothesis profile, so ours is loaded later. Some versions also import Triton.
    import torch.testing._internal.common_utils

import trifuse
from trifuse import backends
from trifuse.ops import linear


def _patch_language_once_a_launch() -> None:
    """Makes Triton's interpreter patch triton.language once per launch.

    It also patches it whenever one jitted function calls another, which changes nothing and takes
    half of a test's time.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # this version of Triton patches differently

    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope
    language = interpreter.tl
    patched: set[str] = set()

    class Scope(scope):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    @functools.cache
    def seen_from(module: str) -> set[str]:
        """Returns which language modules are globals of a module: the interpreter patches them."""
        known = vars(sys.modules[module]).values()
        return {m.__name__ for m in (language, language.core) if any(m is v for v in known)}

    def patch_lang(fn: Any) -> Any:
        if patched and seen_from(fn.__module__) <= patched:
            return Scope()
        patched.update(seen_from(fn.__module__))
        return patch(fn)

    interpreter._patch_lang, interpreter._LangPatchScope = patch_lang, Scope


def _keep_block_types() -> None:
    """Makes Triton's interpreter work out a block type once, and a NumPy type.

    It makes several for each operation, which takes a fifth of a test's time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    initialise, numpy_type = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}  # attributes, among them the element's type, by its id
    numpy_types: dict[str, Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        known = blocks.get(key := (id(element_ty), tuple(shape)))
        if known is None:
            initialise(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        else:
            vars(self).update(known)

    def get_np_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(of)
        return numpy_types[name]

    core.block_type.__init__, interpreter._get_np_dtype = init, get_np_dtype


if backends._HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1":
    _patch_language_once_a_launch()
    _keep_block_types()

# The same examples on every run, so that only a change can make a test fail.
# `pytest --hypothesis-profile=thorough` draws new ones, and many more.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [
        hypothesis.HealthCheck.function_scoped_fixture,  # `backend` is the same for every example
        hypothesis.HealthCheck.differing_executors,
        hypothesis.HealthCheck.too_slow,
    ],
}
hypothesis.settings.register_profile(
    "default", max_examples=100, derandomize=True, database=None, **_COMMON
)
hypothesis.settings.register_profile("thorough", max_examples=1000, **_COMMON)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Runs tests in one thread. On their small tensors, threads cost more than they gain, many
    times more on a shared machine. Tests about threads set their own number."""
    torch.set_num_threads(1)


def pytest_make_parametrize_id(val: object) -> str | None:
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


class Kernel(NamedTuple):
    """A backend, and for C++ the instruction set that its kernels are compiled for."""

    backend: str
    capability: str | None = None

    @property
    def name(self) -> str:
        return self.backend if self.capability is None else f"{self.backend} {self.capability}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serves the calls inside the block by this kernel."""
        if self.capability is not None:
            before = backends._C.cpu_capability()
            backends._C.set_cpu_capability(self.capability)
        try:
            with trifuse.backend(self.backend):
                yield
        finally:
            if self.capability is not None:
                backends._C.set_cpu_capability(before)


CPU_CAPABILITIES = () if backends._C is None else tuple(backends._C.cpu_capabilities())
CPP_KERNELS = tuple(Kernel("cpp", name) for name in CPU_CAPABILITIES)
KERNELS = (Kernel("eager"), *CPP_KERNELS)
BACKENDS = ("eager", "cpp") if CPP_KERNELS else ("eager",)


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
    monkeypatch.setattr(linear, "_measured", {})


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
        operator = getattr(trifuse, name)

        def call(*args: object, **kwargs: object) -> object:
            made.append(name)
            return operator(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    watch(trifuse.nn.attention, "scaled_dot_product_attention")
    watch(trifuse.nn.packing, "varlen_attention")
    return made
