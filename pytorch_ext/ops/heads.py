"""Views of joint projections of query, key and value as heads of attention."""

from __future__ import annotations

from torch import Tensor

from trifuse.ops import _fast_path


def split_heads(x: Tensor, count: int, heads: int, batch_first: bool) -> tuple[Tensor, ...]:
    """Views a joint projection as heads, without a copy.

    On a CPU the gradients of attention on these views lie side by side as the projection does, so
    that the backward copies nothing either.

    Args:
        x: (B, L, count · heads · E), or (L, B, count · heads · E) without ``batch_first``.
        count: 3 for query, key and value; 2 for key and value; 1.
        heads: the number of heads.
        batch_first: whether the first dimension of x is the batch.

    Returns:
        ``count`` tensors (B, heads, L, E).
    """
    if (fast := _fast_path.extension()) is not None:
        served: tuple[Tensor, ...] | Tensor | None = fast.split_heads(x, count, heads, batch_first)
        if served is not None:
            return served if isinstance(served, tuple) else (served,)
    order = (2, 0, 3, 1, 4) if batch_first else (2, 1, 3, 0, 4)
    head_dim = x.shape[2] // (count * heads)
    return x.view(*x.shape[:2], count, heads, head_dim).permute(order).unbind()
