"""The C++ extension: what it was built with, and hooks for tests and benchmarks.

Operators are not here; they go through ``torch.ops.trifuse``.
"""

from typing import Any

from torch import Tensor

def build_info() -> dict[str, Any]:
    """ "capabilities": instruction sets compiled for; "compiler"; "torch"; "cuda": the operators
    that have CUDA kernels; "cuda_code", where there are any: what for, such as "sm_90,compute_90"
    (compute_: PTX)."""

def cpu_capability() -> str:
    """The instruction set in use."""

def cpu_capabilities() -> list[str]:
    """Those that this machine can run, worst first."""

def set_cpu_capability(name: str) -> str:
    """Use another; returns the one before. Raises ValueError if the machine can't run it."""

def matrix_rate(dtype: str, seconds: float = 0.2) -> float:
    """FLOP/s of the extension's matrix products, on every thread, for "float32" or "bfloat16"."""

def register_autograd(op: str, companion: str) -> None:
    """Have ``companion`` run in the place of ``op`` where a derivative is wanted. Both are of
    namespace trifuse, "name.overload", and have the same schema."""

def fail_allocations(first: int, count: int = 1) -> None:
    """For tests: of the allocations from now on, torch's own on a CPU included, let ``count`` fail,
    beginning with number ``first``, counted from 1; with 0, none any more.

    An allocation of the kernels' own that fails is tried once more after memory that was kept of
    freed results has been given back. That is a number of its own.
    """

def counted_allocations() -> int:
    """How many there have been since ``fail_allocations`` was last called with another than 0."""

def throw_in_crew(threads: int, thread: int) -> None:
    """For tests: throw in one of some threads that wait for one another. Raises RuntimeError."""

def exp2(x: Tensor) -> Tensor:
    """2ˣ of float32 as the kernels compute it."""

def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e⁻ˣ) of float32 as the kernels compute it."""

def tanh(x: Tensor) -> Tensor:
    """tanh(x) of float32 as the kernels compute it."""
