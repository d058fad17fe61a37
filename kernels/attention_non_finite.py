"""NaN and Inf in rows that attention's mask or window leaves out.

Such a number must not reappear as 0 · NaN from a matrix product. Cleaning every tile would prevent
the asynchronous path from memory to the tensor cores, so the kernels multiply as if all numbers
were finite. Only a program that ends with a non-finite sum starts again. Its second attempt

1. counts the non-finite numbers that belong to each sum, and starts the sum from ∞ if there are
   any;
2. adds up the rest, with NaN and Inf replaced by 0 in the rows that are summed: values in the
   forward, keys in dQ (after their scores), q and dO in dK and dV.

Results pass through ``infinite_to_nan``, so the sums that start from ∞ are stored as NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trifuse.kernels.arithmetic import dot
from trifuse.kernels.attention_pairs import keep_and_bias, query_rows, visible_queries
from trifuse.kernels.attention_tiles import (
    INF,
    group_size,
    load_head,
    load_tile,
    tile_at,
    tile_like_query,
)


@triton.jit
def any_non_finite(x):
    """Returns whether a tile holds a NaN or ±∞: one bool."""
    return tl.max((~_finite(x)).to(tl.int32)) > 0


@triton.jit
def zero_non_finite(x):
    """Returns x with 0 in place of NaN and ±∞, in its dtype."""
    return tl.where(_finite(x), x, 0.0).to(x.dtype)


@triton.jit
def infinite_to_nan(x):
    """Returns x with NaN in place of ±∞."""
    return tl.where(tl.abs(x) == INF, float("nan"), x)


@triton.jit
def _finite(x):
    """Returns which elements of x are neither NaN nor ±∞."""
    return tl.abs(x.to(tl.float32)) < INF


@triton.jit
def sums_of_non_finite_keys(
    rows_of_head,
    first_row,
    visible,
    head,
    variant: tl.constexpr,
    block: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Returns ∞ where a key or value that the query attends to is not finite, else 0.

    The result is (M, BLOCK_DIM). ``rows_of_head`` is the HeadTile of the head's keys or values.
    """
    rows = query_rows(head, first_row, block.M, False, variant)
    count = tl.full((block.M, BLOCK_DIM), 0.0, tl.float32)
    for first in tl.range(visible.start, visible.stop, block.N, num_stages=1):
        columns = first + tl.arange(0, block.N)[None, :]
        keep = keep_and_bias(head, rows, columns, variant, False)[0]
        x = load_tile(tile_at(rows_of_head, first), block.N, DIM, BLOCK_DIM, False)
        count = _count_non_finite(keep, x, count)
    return tl.where(count > 0.0, INF, 0.0)


@triton.jit
def sums_of_non_finite_queries(
    tensor,
    first_column,
    b,
    kv_head,
    inputs,
    sizes,
    variant: tl.constexpr,
    block: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Returns ∞ where q or dO of a query that attends to the key is not finite, else 0.

    The result is (N, BLOCK_DIM).
    """
    columns = first_column + tl.arange(0, block.N)[:, None]
    count = tl.full((block.N, BLOCK_DIM), 0.0, tl.float32)
    for member in range(group_size(sizes, variant)):
        h = kv_head * group_size(sizes, variant) + member
        head = load_head(inputs, sizes, b, h, variant)
        rows_of_head = tile_like_query(tensor, head, 0)
        visible = visible_queries(head, first_column, variant, block)
        for first in tl.range(visible.start, visible.stop, block.M, num_stages=1):
            rows = first + tl.arange(0, block.M)[None, :]
            keep = keep_and_bias(head, rows, columns, variant, False)[0]
            x = load_tile(tile_at(rows_of_head, first), block.M, DIM, BLOCK_DIM, False)
            count = _count_non_finite(keep, x, count)
    return tl.where(count > 0.0, INF, 0.0)


@triton.jit
def _count_non_finite(keep, x, count):
    """Adds keep @ (x is not finite) to ``count``: the non-finite terms of each sum over pairs."""
    bad = tl.where(_finite(x), 0.0, 1.0)
    return dot(tl.where(keep, 1.0, 0.0).to(tl.bfloat16), bad.to(tl.bfloat16), count)
