"""The machine's ceilings: the rates at which it multiplies matrices and copies memory.

They are measured between the cases, so that each figure is also a fraction of what was possible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trifuse import backends
from trifuse.benchmarks import timing


class Rate(NamedTuple):
    """The highest rate that a machine reaches, and how it was measured."""

    value: float  # per second
    source: str


def matrix_rate(dtype: torch.dtype, *, device: str = "cpu", seconds: float = 0.2) -> Rate:
    """FLOP/s of matrix products in ``dtype``, accumulated in float32, on every thread.

    On a CPU these are the extension's own products on tiles that stay in the cores' caches, or,
    without the extension, ``torch.mm``, which may be well below the cores' limit.
    """
    name = str(dtype).removeprefix("torch.")
    if device == "cpu" and backends._C is not None and name in ("float32", "bfloat16"):
        return Rate(backends._C.matrix_rate(name, seconds), "trifuse._C tiles")
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = {"mm": lambda: torch.mm(a, b)}
    times = timing.alternate(product, device=device, seconds=seconds)["mm"]
    return Rate(2 * size**3 / min(times.seconds), "torch.mm")


def copy_rate(*, device: str = "cpu", seconds: float = 0.2) -> Rate:
    """Bytes/s read and written by copying a tensor far larger than the caches."""
    source = torch.ones((1 << 30 if device == "cuda" else 1 << 28) // 4, device=device)
    target = torch.zeros_like(source)
    copy = {"copy": lambda: target.copy_(source)}
    times = timing.alternate(copy, device=device, seconds=seconds)["copy"]
    return Rate(2 * source.nbytes / min(times.seconds), "Tensor.copy_")
