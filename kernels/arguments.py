"""Checks that launchers make on tensors before a kernel reads through their pointers.

The public functions have checked the tensors of a forward. Its backward gets the same tensors and
the forward's results, but ``t.data = other`` may have replaced any of them in between.

The eager backend's ops check that storages are large enough (``ops/_op.py``). Here the
check runs in every backward and in the forwards of attention, dropout and the norm. It only finds
storages of 0 bytes, in about the time of a comparison.
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
