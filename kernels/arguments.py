"""Checks of tensors that launchers make before a kernel reads through their pointers.

A forward is given what the public functions have checked. Its backward is handed the same tensors,
and what the forward left, but ``t.data = other`` may have exchanged any of it in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_memory(name: str, t: Tensor | None) -> None:
    """Raise ValueError for a tensor whose storage was resized to nothing."""
    if t is not None and not t.is_meta and t.data_ptr() == 0 and t.numel() > 0:
        raise ValueError(
            f"{name}: expected storage for shape {tuple(t.shape)}; got 0 bytes (was it resized?)"
        )


def check_shape(name: str, t: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ValueError for a tensor of another shape, or without memory."""
    if t is None:
        return
    if t.shape != tuple(shape):
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}; got {tuple(t.shape)} "
            "(was its data exchanged between forward and backward?)"
        )
    check_memory(name, t)
