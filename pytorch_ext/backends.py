"""Chooses the backend that serves a call.

One table serves every operator. An operator describes its call, gets back a backend's name, and
runs that backend's overload, such as ``torch.ops.trifuse.attention_forward.cpp``.

| backend | what it is                          | tensors on                               |
|---------|-------------------------------------|------------------------------------------|
| cuda    | CUDA C++ kernels, csrc/cuda         | NVIDIA GPU                               |
| triton  | Triton kernels, kernels/            | GPU; CPU only under TRITON_INTERPRET=1   |
| cpp     | vectorised C++ kernels, csrc/cpu    | CPU                                      |
| eager   | the formula in torch, reference/    | anything                                 |

``auto`` takes the first of these that can serve the call, except that Triton precedes CUDA for
operators whose CUDA kernels have not been measured to be faster (``CUDA_BEFORE_TRITON``).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

log = logging.getLogger("trifuse")

ORDER = ("cuda", "triton", "cpp", "eager")

# Operators whose CUDA kernels measure faster than their Triton kernels. None has been measured yet.
CUDA_BEFORE_TRITON: frozenset[str] = frozenset()

try:
    from trifuse import _C
except ImportError as error:
    _C = None  # type: ignore[assignment]
    _extension_error = str(error)


class Call(NamedTuple):
    """The properties of a call that decide its backend. Hashable, because decisions are cached."""

    operator: str
    device: str  # a torch device type
    dtype: torch.dtype
    head_dim: int = 0


class Choice(NamedTuple):
    """The backend for a call, why those before it were refused, and notes on how it runs."""

    backend: str
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        refused = (f"not {name}: {why}" for name, why in self.refused)
        return "\n  ".join([self.backend, *self.notes, *refused])


def build_info() -> dict[str, object]:
    """Returns what the extension was built with: CPU capabilities, compiler, and operators with
    CUDA kernels or why there are none. Without the extension, returns why it is missing."""
    try:
        from trifuse import _build_info
    except ImportError:
        reason, why_no_cuda = "", ""
    else:
        reason, why_no_cuda = _build_info.ERROR, _build_info.CUDA_ERROR
    if _C is None:
        return {"error": reason or _extension_error}
    return {**_C.build_info(), "cuda_error": why_no_cuda}


def cpu_capability() -> str | None:
    """Returns the instruction set that the C++ kernels use, or None without the extension."""
    return None if _C is None else str(_C.cpu_capability())


def interpreting() -> bool:
    """Returns whether Triton's interpreter runs kernels on CPU tensors, one program at a time."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# Read once, at import: torch.compile can't trace into the extension.
_CUDA_OPERATORS: tuple[str, ...] = () if _C is None else tuple(_C.build_info()["cuda"])


def _why_not_cuda(call: Call) -> str | None:
    if not _CUDA_OPERATORS:
        return "this build holds no CUDA kernels"
    if call.device != "cuda":
        return f"tensors are on {call.device}"
    if call.operator not in _CUDA_OPERATORS:
        return "no CUDA kernel for this operator"
    if call.operator == "attention" and call.dtype == torch.float64:
        return f"no kernel for {call.dtype}"
    major, minor = _capability()
    if major < 8:
        return f"the GPU's compute capability is {major}.{minor}, and 8.0 is the least"
    return _why_not_head_dim(call)


def _capability() -> tuple[int, int]:
    """Returns the current GPU's compute capability; without a GPU, the lowest that kernels need."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)


# torch.compiler.assume_constant_result sets this too, but would import Dynamo with trifuse.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_not_head_dim(call: Call) -> str | None:
    """Returns why the GPU kernels' attention tiles can't hold head_dim, or None."""
    if call.operator == "attention" and call.head_dim > 256:
        return f"head_dim {call.head_dim} exceeds 256"
    return None


_HAS_TRITON = importlib.util.find_spec("triton") is not None
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _why_not_triton(call: Call) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    if call.device != "cuda" and not (call.device == "cpu" and interpreting()):
        return f"tensors are on {call.device}"
    if call.dtype not in _TRITON_DTYPES:
        return f"no kernel for {call.dtype}"
    return _why_not_head_dim(call)


_CPP_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _why_not_cpp(call: Call) -> str | None:
    if _C is None:
        return "the C++ extension is missing; `python -m trifuse` says why"
    if call.device != "cpu":
        return f"tensors are on {call.device}"
    return None if call.dtype in _CPP_DTYPES else f"no kernel for {call.dtype}"


def _is_for_triton(call: Call) -> bool:
    """Returns whether ``auto`` prefers the Triton kernels to the CUDA kernels."""
    return call.operator not in CUDA_BEFORE_TRITON and _why_not_triton(call) is None


_WHY_NOT = {
    "cuda": _why_not_cuda,
    "triton": _why_not_triton,
    "cpp": _why_not_cpp,
    "eager": lambda call: None,
}


def _checked(name: str, source: str) -> str:
    if name not in ("auto", *ORDER):
        raise ValueError(f"{source}: expected one of auto, {', '.join(ORDER)}; got {name!r}")
    return name


_requested = _checked(os.environ.get("TRIFUSE_BACKEND", "auto"), "TRIFUSE_BACKEND")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Serves the calls inside the ``with`` block by one backend, or raises if it can't.

    Args:
        name: "auto", "cuda", "triton", "cpp" or "eager".

    The choice is made by the forward call and holds for its backward. It is global to the process,
    like torch's own backend switches. The environment variable ``TRIFUSE_BACKEND`` sets it for the
    whole run.
    """
    global _requested
    previous, _requested = _requested, _checked(name, "backend")
    try:
        yield
    finally:
        _requested = previous


def choose(call: Call) -> Choice:
    """Returns the backend for a call.

    Raises:
        RuntimeError: the backend requested by name can't serve the call.
    """
    if torch.compiler.is_compiling():
        return _choose.__wrapped__(call, _requested)
    return _choose(call, _requested)


@functools.cache
def fallback_backend(call: Call, backend: str) -> str:
    """Returns the backend for a call traced on another device: ``backend``, if it can serve it."""
    return backend if _WHY_NOT[backend](call) is None else _choose(call, "auto").backend


@functools.cache
def _choose(call: Call, requested: str) -> Choice:
    if requested != "auto":
        why = _WHY_NOT[requested](call)
        if why is not None:
            raise RuntimeError(
                f"{call.operator}: backend {requested!r} can't serve this call: {why}"
            )
        return Choice(requested, ())
    refused = []
    for name in ORDER:
        why = _WHY_NOT[name](call)
        # The interpreter is for checking kernels. ``auto`` never chooses it.
        if name == "triton" and call.device == "cpu":
            why = "on CPU tensors only when asked for by name, under TRITON_INTERPRET=1"
        if name == "cuda" and why is None and _is_for_triton(call):
            why = "not measured to be faster than Triton"
        if why is None:
            break
        refused.append((name, why))
    if name == "eager" and call.device in ("cpu", "cuda") and not torch.compiler.is_compiling():
        reasons = "; ".join(f"{other}: {why}" for other, why in refused)
        log.warning("%s (%s, %s) → eager, because %s", *call[:3], reasons)
    return Choice(name, tuple(refused))
