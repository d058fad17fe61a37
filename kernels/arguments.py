"""Checks that launchers make on tensors before a kernel reads through their pointers.

The public functions have checked the tensors of a forward. Its backward gets the same tensors and
the forward's results, but ``t.data = other`` may have replaced any of them in between.

The ops check that storages are large enough (``ops/_op.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trifuse.reference import philox


def seed_shape(seed: Tensor | None) -> tuple[int]:
    """Returns the shape that a seed must have, including a place if there seems to be one."""
    return (philox.SEED_AND_PLACE if seed is not None and philox.is_placed(seed) else 1,)


def check_shape(name: str, t: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ValueError for a tensor of another shape."""
    if t is None:
        return
    if t.shape != tuple(shape):
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}; got {tuple(t.shape)} "
            "(was its data exchanged between forward and backward?)"
        )
