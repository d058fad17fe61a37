"""Dtypes and memory layouts of results, the same on every backend."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums and statistics: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_like_layout(like: Tensor, last_dim: int) -> Tensor:
    """Returns a dense uninitialised (B, H, L, last_dim), in memory order (B, L, H) if ``like`` is.

    A model splits its heads with a view and a transpose; an output in the same order can be joined
    again without a copy.
    """
    B, H, L, _ = like.shape
    if like.stride(1) < like.stride(2):
        # Not a view, because a caller may change a result in place.
        strides = (L * H * last_dim, last_dim, H * last_dim, 1)
        return like.new_empty_strided((B, H, L, last_dim), strides)
    return like.new_empty(B, H, L, last_dim)
