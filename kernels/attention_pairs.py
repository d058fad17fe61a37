"""Which pairs of a query and a key take part in attention, block by block.

The kernels cut the Lq × Lk scores of a head into blocks of M queries by N keys. Here M = N = 4, no
query attends to a later key (causal), and the window reaches 9 keys to the left::

                               keys
                0      4      8      12     16
              0 ┌──────┬──────┬──────┬──────┬──────┐
                │ edge │      │      │      │      │
              4 ├──────┼──────┼──────┼──────┼──────┤
                │ full │ edge │      │      │      │
     queries  8 ├──────┼──────┼──────┼──────┼──────┤
                │ edge │ full │ edge │      │      │
             12 ├──────┼──────┼──────┼──────┼──────┤
                │ edge │ edge │ full │ edge │      │  ← the program that owns queries 12 to 15
             16 ├──────┼──────┼──────┼──────┼──────┤
                │      │ edge │ edge │ full │ edge │
                └──────┴──────┴──────┴──────┴──────┘
                ↑             ↑      ↑      ↑
              start  full_start full_stop  stop       of that program

- The forward and dQ: a program owns a row of this picture, and walks through its blocks from left
  to right. The backward's numbers per query take the same walk where a logsumexp is coarse.
- The forward of few queries over many keys: the same walk through a chunk of the row.
- dK and dV: a program owns a column, and walks through its blocks downwards, in every query head
  that shares the key head.
- The mask's gradient: a program owns one block of the gradient and a share of its sum, and walks
  through its part of the query blocks, heads and sequences that the mask is broadcast over. The
  gradient of a mask that all keys share needs no scores.

A walk visits the full blocks first, with unguarded loads and without comparisons, because lengths,
window and causality leave nothing out of them. Then it visits the edge blocks, which have guards,
and skips the full ones. It visits no block outside [start, stop). A mask tensor is read in both
kinds of blocks. If it leaves out whole blocks at the ends of [start, stop), ``_trim`` first moves
the ends inwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trifuse.kernels.attention_tiles import INF

# Columns in a run of a mask: 16 bytes of the narrowest dtype.
MASK_RUN = tl.constexpr(16)


# Blocks to visit ---------------------------------------------------------------------------------


class Visible(NamedTuple):
    """Bounds of the keys that a block of queries attends to, or of the queries of a block of keys.

    All are multiples of the block size. No pair lies outside [start, stop); lengths and window
    leave nothing out of [full_start, full_stop), which lies inside."""

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any


class Walk(NamedTuple):
    """The blocks of [start, stop) that are not in [gap_start, gap_stop)."""

    start: Any
    stop: Any
    gap_start: Any
    gap_stop: Any


@triton.jit
def full_blocks(visible):
    """Returns the Walk over the full blocks."""
    return Walk(visible.full_start, visible.full_stop, visible.full_stop, visible.full_stop)


@triton.jit
def edge_blocks(visible):
    """Returns the Walk over the edge blocks, which skips the full ones."""
    return Walk(visible.start, visible.stop, visible.full_start, visible.full_stop)


@triton.jit
def all_blocks(visible):
    """Returns the Walk over full and edge blocks, in order."""
    return Walk(visible.start, visible.stop, visible.stop, visible.stop)


@triton.jit
def visible_keys(head, first, variant: tl.constexpr, block: tl.constexpr):
    """Returns the Visible keys of the block of queries at ``first``."""
    last = tl.minimum(first + block.M, head.num_queries)
    keys = keys_by_position(head, first, last, variant)
    return blocks_of_keys(head, keys, first, variant, block)


@triton.jit
def keys_by_position(head, first, last, variant: tl.constexpr):
    """Returns the bounds that positions set to the keys of the queries [first, last): a Visible
    that is not yet rounded to blocks."""
    start = 0
    full_start = 0
    full_stop = head.num_keys
    stop = head.num_keys
    if variant.left_bound:
        start = tl.maximum(first - head.left, 0)
        full_start = tl.maximum(last - 1 - head.left, 0)
    if variant.right_bound:
        full_stop = first + head.right + 1
        full_stop = tl.maximum(tl.minimum(full_stop, head.num_keys), 0)
        stop = tl.maximum(tl.minimum(last + head.right, head.num_keys), 0)
    return Visible(start, full_start, full_stop, stop)


@triton.jit
def blocks_of_keys(head, keys, first, variant: tl.constexpr, block: tl.constexpr):
    """Returns the Visible of ``keys_by_position``, without the blocks at its ends that the mask
    leaves out for all rows of the tile at row ``first``."""
    start, full_start, full_stop, stop = keys
    if variant.trim_by_mask:
        start, stop = _trim(head, start, stop, first, block.N, block.M, True, variant)
    return _round_to_blocks(start, full_start, full_stop, stop, block.N)


@triton.jit
def visible_queries(head, first, variant: tl.constexpr, block: tl.constexpr):
    """Returns the Visible queries of the block of keys at ``first``."""
    last = tl.minimum(first + block.N, head.num_keys)
    start = 0
    full_start = 0
    full_stop = tl.where(first + block.N <= head.num_keys, head.num_queries, 0)
    stop = tl.where(first < head.num_keys, head.num_queries, 0)
    if variant.right_bound:
        start = tl.maximum(first - head.right, 0)
        full_start = tl.maximum(last - 1 - head.right, 0)
    if variant.left_bound:
        full_stop = tl.minimum(first + head.left + 1, full_stop)
        full_stop = tl.maximum(full_stop, 0)
        stop = tl.maximum(tl.minimum(last + head.left, stop), 0)
    if variant.trim_by_mask:
        start, stop = _trim(head, start, stop, first, block.M, block.N, False, variant)
    return _round_to_blocks(start, full_start, full_stop, stop, block.M)


@triton.jit
def _round_to_blocks(start, full_start, full_stop, stop, BLOCK: tl.constexpr):
    """Rounds to whole blocks: the outer range outwards, the full range inwards and inside it."""
    start = start // BLOCK * BLOCK
    stop = tl.maximum(tl.cdiv(stop, BLOCK) * BLOCK, start)
    full_start = tl.minimum(tl.maximum(tl.cdiv(full_start, BLOCK) * BLOCK, start), stop)
    full_stop = tl.minimum(tl.maximum(full_stop // BLOCK * BLOCK, full_start), stop)
    return Visible(start, full_start, full_stop, stop)


@triton.jit
def _trim(
    head,
    start,
    stop,
    first,
    BLOCK: tl.constexpr,
    OTHER: tl.constexpr,
    KEYS: tl.constexpr,
    variant: tl.constexpr,
):
    """Cuts off the ends of [start, stop) that the mask leaves out, for the block at ``first``.

    KEYS: the range consists of keys and the block of queries; otherwise the reverse. The search
    reads the mask for two blocks of the range at a time, from either end, until it finds a pair. So
    a mask without empty ends costs two such reads. Holes in the middle are not removed.
    """
    at = start // BLOCK * BLOCK
    lowest = stop
    while (at < stop) & (lowest == stop):
        index = at + tl.arange(0, 2 * BLOCK)
        kept = _mask_keeps(head, index, first, 2 * BLOCK, OTHER, KEYS, variant)
        lowest = tl.min(tl.where(kept & (index >= start) & (index < stop), index, stop), 0)
        at += 2 * BLOCK
    at = tl.cdiv(stop, BLOCK) * BLOCK
    highest = lowest
    while (at > lowest) & (highest == lowest):
        at -= 2 * BLOCK
        index = at + tl.arange(0, 2 * BLOCK)
        kept = _mask_keeps(head, index, first, 2 * BLOCK, OTHER, KEYS, variant)
        highest = tl.max(tl.where(kept & (index >= lowest) & (index < stop), index + 1, lowest), 0)
    return lowest, highest


@triton.jit
def _mask_keeps(
    head,
    index,
    first,
    SIZE: tl.constexpr,
    OTHER: tl.constexpr,
    KEYS: tl.constexpr,
    variant: tl.constexpr,
):
    """Returns whether the mask keeps each key (query) for any query (key) of the block, (SIZE,)."""
    if KEYS:
        rows = query_rows(head, first, OTHER, False, variant)
        columns = index[None, :]
    else:
        rows = index[:, None]
        columns = first + tl.arange(0, OTHER)[None, :]
    if not variant.mask_rows:
        rows = tl.zeros((1, 1), tl.int32)
    inside = (rows >= 0) & (columns >= 0) & (rows < head.num_queries) & (columns < head.num_keys)
    if variant.bool_mask:
        fill = 0
    else:
        fill = -INF
    strides = head.inputs.attn_mask.strides
    offsets = rows.to(tl.int64) * strides[2] + columns.to(tl.int64) * strides[3]
    mask = tl.load(head.mask + offsets, mask=inside, other=fill)
    return tl.max((mask != fill).to(tl.int32), 0 if KEYS else 1) > 0


# Pairs of a block --------------------------------------------------------------------------------


@triton.jit
def query_rows(head, first, M: tl.constexpr, FULL: tl.constexpr, variant: tl.constexpr):
    """Returns the queries of a tile's rows from ``first`` on, (M, 1).

    Full blocks of keys have no guard for rows past the last query. Those rows read the last query's
    mask, and their results are not stored.
    """
    rows = first + tl.arange(0, M)[:, None]
    if variant.heads_in_rows:
        rows = rows // head.sizes.group
    if FULL:
        rows = tl.minimum(rows, head.num_queries - 1)
    return rows


@triton.jit
def keep_and_bias(head, rows, columns, variant: tl.constexpr, FULL: tl.constexpr):
    """Returns which pairs take part, and the sum of the float mask and the relative biases.

    Tiles may have a row per query or per key. In a full block only masks decide. With a float mask,
    callers need not select pairs there: its -∞ makes a weight 0, and a NaN that remains triggers
    the second attempt.
    """
    keep = rows < head.num_queries
    bias = 0.0
    if variant.bool_mask:
        keep = _load_mask(head, rows, columns, 0, variant, FULL) != 0
    if variant.float_mask:
        mask = _load_mask(head, rows, columns, -INF, variant, FULL)
        bias = mask.to(tl.float32)
        keep = bias != -INF
    if variant.relative_bias:
        by_distance = _load_relative_bias(head, rows, columns, FULL)
        keep = keep & (by_distance != -INF)
        bias = tl.where(keep, bias + by_distance, -INF)
    if variant.indexed:
        keep, bias = _add_tables(head, rows, columns, keep, bias, variant, FULL)
    if not FULL:
        keep = keep & (rows < head.num_queries) & (columns < head.num_keys)
        if variant.left_bound:
            keep = keep & (columns >= rows - head.left)
        if variant.right_bound:
            keep = keep & (columns <= rows + head.right)
    return keep, bias


@triton.jit
def have_pairs(first_row, visible, head, variant: tl.constexpr, block: tl.constexpr):
    """Returns whether each query has any key, (M,)."""
    rows = query_rows(head, first_row, block.M, False, variant)
    found = tl.full((block.M,), 0, tl.int32)
    for first in tl.range(visible.start, visible.stop, block.N, num_stages=1):
        columns = first + tl.arange(0, block.N)[None, :]
        keep = keep_and_bias(head, rows, columns, variant, False)[0]
        found = tl.maximum(found, tl.max(keep.to(tl.int32), 1))
    return found > 0


@triton.jit
def _load_relative_bias(head, rows, columns, FULL: tl.constexpr):
    """Loads the numbers of the pairs' distances; -∞ for pairs that don't exist."""
    pointers = head.relative_bias + (columns - rows)
    if FULL:
        by_distance = tl.load(pointers)
    else:
        exists = (rows < head.num_queries) & (columns < head.num_keys)
        by_distance = tl.load(pointers, mask=exists, other=-INF)
    return by_distance


@triton.jit
def columns_read(head, rows, columns, exists):
    """Loads the columns of the tables that pairs read; 0 for pairs that don't exist."""
    strides = head.inputs.relative_index.strides
    offsets = rows.to(tl.int64) * strides[0] + columns.to(tl.int64) * strides[1]
    return tl.load(head.relative_index + offsets, mask=exists, other=0)


@triton.jit
def _add_tables(head, rows, columns, keep, bias, variant: tl.constexpr, FULL: tl.constexpr):
    """Adds the numbers that the pairs read; -∞ leaves a pair out."""
    exists = (rows < head.num_queries) & (columns < head.num_keys)
    read = columns_read(head, rows, columns, exists)
    if variant.table:
        keep, bias = _add_numbers(head.table + read, exists, keep, bias)
    if variant.query_bias:
        stride = head.inputs.query_bias.strides[2]
        keep, bias = _add_numbers(
            head.query_bias + (rows.to(tl.int64) * stride + read), exists, keep, bias
        )
    if variant.key_bias:
        stride = head.inputs.key_bias.strides[2]
        keep, bias = _add_numbers(
            head.key_bias + (columns.to(tl.int64) * stride + read), exists, keep, bias
        )
    return keep, bias


@triton.jit
def _add_numbers(pointers, exists, keep, bias):
    numbers = tl.load(pointers, mask=exists, other=-INF).to(tl.float32)
    keep = keep & (numbers != -INF)
    return keep, tl.where(keep, bias + numbers, -INF)


@triton.jit
def _load_mask(head, rows, columns, fill, variant: tl.constexpr, FULL: tl.constexpr):
    """Loads the mask at ``rows`` and ``columns``, with size 1 in dimensions where it is broadcast.

    Only edge blocks guard the load. If the mask's rows are whole runs, the guard covers whole runs,
    because a comparison that can differ between neighbours would break 16-byte loads into single
    elements.
    """
    columns_end = head.num_keys
    if variant.mask_runs:
        columns_end = tl.cdiv(head.num_keys, MASK_RUN) * MASK_RUN
    strides = head.inputs.attn_mask.strides
    row_offsets = rows.to(tl.int64) * strides[2]
    column_offsets = columns.to(tl.int64) * strides[3]
    if variant.mask_rows and variant.mask_columns:
        pointers = head.mask + (row_offsets + column_offsets)
        inside = (rows < head.num_queries) & (columns < columns_end)
    elif variant.mask_rows:
        pointers = head.mask + row_offsets
        inside = rows < head.num_queries
    elif variant.mask_columns:
        pointers = head.mask + column_offsets
        inside = columns < columns_end
    else:
        pointers = head.mask + tl.zeros((1, 1), tl.int64)
        inside = tl.full((1, 1), True, tl.int1)
    if FULL:
        mask = tl.load(pointers)
    else:
        mask = tl.load(pointers, mask=inside, other=fill)
    return mask
