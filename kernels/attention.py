"""Masked scaled dot-product attention, forward and backward, in Triton.

The formulas are those at the head of ``trifuse/reference/attention.py``. Nothing of size Lq × Lk is
stored: the forward keeps a running softmax over blocks of keys (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023), the backward computes
the weights again from the logsumexp. There are no atomics: every sum is taken in a fixed order, so
results repeat bit for bit.

Four ideas run through all kernels:

- *Full and edge blocks.* For a block of queries, lengths, causality and window bound the range of
  keys that can hold a pair, and an inner range from which they leave nothing out. The loop over the
  inner range has no comparisons and unguarded loads; only the few blocks at its ends have guards.
  Keys that a mask leaves out at the ends of the outer range are cut off before the loops begin.
- *Hope and redo.* A NaN or Inf in a row that the mask leaves out must not come back as 0 · NaN from
  a matrix product. Cleaning every tile would take it off the asynchronous path from memory to the
  tensor cores, so the kernels multiply as if all numbers were finite. Only a program that ends with
  a non-finite sum starts again: it counts the non-finite numbers that belong to each sum, and adds
  up the rest with every tile cleaned.
- *Powers of 2.* exp(x) is exp2(x · log2 e), with the factor folded into the scale. With a float
  mask the maximum is subtracted before the factor is applied: masks hold numbers near the end of
  float32's range, and multiplying them would overflow.
- *Explicit rounding.* A product and a sum that are rounded once are written as ``tl.fma``, and the
  compiler may fuse nothing else (``enable_fp_fusion``): full and edge blocks give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels.arguments import check_memory, check_shape
from trifuse.kernels.arithmetic import dot, end_run
from trifuse.kernels.philox import dropout_keep
from trifuse.reference import philox
from trifuse.reference.results import empty_like_layout

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
INF = tl.constexpr(math.inf)

# Beyond this magnitude a float32 logsumexp is too coarse to normalise scores with. Near the lowest
# finite number, a common value in float masks, log ∑ exp is lost in it altogether.
COARSE_LOGSUMEXP = tl.constexpr(1024.0)

# Beyond this scale a float32 score may have no bits left for the logarithm of a sum, and rounding
# its product with log2 e may change it by more than 1.
LARGE_SCALE = 2.0**20

# Number of terms of a mask's gradient that are summed as one chain.
RUN = tl.constexpr(16)

# Columns in a run of a mask: 16 bytes of the narrowest dtype.
MASK_RUN = tl.constexpr(16)


# Kernel arguments --------------------------------------------------------------------------------


class Strided(NamedTuple):
    """A tensor and its strides, in elements; 0 where a dimension is broadcast."""

    data: Tensor
    strides: tuple[int, ...]


class Inputs(NamedTuple):
    """The tensors of a call. Packed sequences lie end to end: query, key and value then have B = 1,
    and L is the total."""

    query: Strided  # (B, H, Lq, E)
    key: Strided  # (B, Hkv, Lk, E)
    value: Strided  # (B, Hkv, Lk, Ev)
    attn_mask: Strided | None  # (B, H, Lq, Lk): uint8 for a boolean mask, or floating
    key_lengths: Tensor | None  # (B,)
    cu_seqlens_q: Tensor | None  # (B + 1,)
    cu_seqlens_k: Tensor | None  # (B + 1,)
    seed: Tensor | None  # (1,) int64


class Sizes(NamedTuple):
    """Numbers that change from call to call without compiling a kernel again.

    Kernels take them one by one. For numbers in a tuple Triton ignores ``do_not_specialize``: a 1
    or a multiple of 16 would compile another kernel.
    """

    B: int  # sequences
    H: int
    group: int  # query heads per key head
    Lq: int  # queries of the longest sequence
    Lk: int
    total_q: int  # rows of the query tensor: Lq unless sequences are packed
    total_k: int
    left: int  # bounds of the window, if Variant.left and Variant.right are set
    right: int
    scale: float
    scale_log2: float  # scale · log2 e
    threshold: int  # random 16-bit values below it drop a weight
    keep_scale: float


# Shapes made of fields of the next two classes go to tl.full. tl.zeros is itself a jitted function,
# in which Triton 3.6 no longer treats the fields as constants.
class Variant(NamedTuple):
    """Compile-time parameters of a kernel: the parts of the operator that a call uses."""

    dtype: str
    E: int
    Ev: int
    BLOCK_E: int  # E in tiles: a power of 2, at least the 16 of a tensor core
    BLOCK_EV: int
    bool_mask: bool
    float_mask: bool
    masked: bool  # bool_mask or float_mask
    mask_rows: bool  # the mask differs between queries
    mask_columns: bool  # the mask differs between keys
    mask_runs: bool  # rows of the mask are whole runs of MASK_RUN columns
    trim: bool  # cut the ends that the mask leaves out off a range of keys or queries
    large: bool  # scores may dwarf the logarithm of a sum: a float mask, or a large scale
    natural: bool  # scores in units of 1 instead of log 2: if large, or if the scale isn't above 0
    lengths: bool  # key_lengths
    packed: bool
    left: bool  # the window has a left bound
    right: bool
    lower_right: bool
    selective: bool  # a tile of loaded rows can hold pairs that don't take part
    dropout: bool
    grouped: bool  # query heads share key heads


class Block(NamedTuple):
    """Sizes of tiles."""

    M: int  # queries
    N: int  # keys
    K: int  # step along the head dimension in products of two loaded tiles; 0 for one step


class Head(NamedTuple):
    """One query head of one sequence: the beginnings and lengths of its tensors."""

    query: Any  # pointers to the first row
    key: Any
    value: Any
    mask: Any
    batch: Any  # batch index and first row in query, out and their gradients
    first_query: Any
    row: Any  # int64: offset of the head in a contiguous (B, H, L)
    queries: Any
    keys: Any  # number of keys, cut off at key_lengths
    shift: Any  # of the diagonal
    plane: Any  # the number of this head's matrix in dropout
    seed: Any


class Tile(NamedTuple):
    """Rows of one head from ``first`` on. The head has ``length`` rows."""

    pointer: Any  # to the head's first row
    strides: Any
    first: Any
    length: Any


# Memory ------------------------------------------------------------------------------------------


@triton.jit
def _at(tensor, batch, head, row):
    """Pointer to a row's first element. Offsets are int64: a tensor may pass 2³¹ elements."""
    return (
        tensor.data
        + tl.cast(batch, tl.int64) * tensor.strides[0]
        + tl.cast(head, tl.int64) * tensor.strides[1]
        + tl.cast(row, tl.int64) * tensor.strides[2]
    )


@triton.jit
def _load_head(inputs, sizes, b, h, variant: tl.constexpr):
    if variant.packed:
        batch = 0
        first_query = tl.load(inputs.cu_seqlens_q + b)
        first_key = tl.load(inputs.cu_seqlens_k + b)
        queries = (tl.load(inputs.cu_seqlens_q + b + 1) - first_query).to(tl.int32)
        keys = (tl.load(inputs.cu_seqlens_k + b + 1) - first_key).to(tl.int32)
    else:
        batch = b
        first_query = 0
        first_key = 0
        queries = sizes.Lq
        keys = sizes.Lk
    if variant.lower_right:
        shift = keys - queries
    else:
        shift = 0
    if variant.lengths:
        keys = tl.load(inputs.key_lengths + b).to(tl.int32)
    if variant.masked:
        mask = _at(inputs.attn_mask, b, h, 0)
    else:
        mask = 0
    if variant.dropout:
        seed = tl.load(inputs.seed)
    else:
        seed = 0
    return Head(
        query=_at(inputs.query, batch, h, first_query),
        key=_at(inputs.key, batch, h // sizes.group, first_key),
        value=_at(inputs.value, batch, h // sizes.group, first_key),
        mask=mask,
        batch=batch,
        first_query=first_query,
        row=tl.cast(batch * sizes.H + h, tl.int64) * sizes.total_q + first_query,
        queries=queries,
        keys=keys,
        shift=shift,
        plane=b * sizes.H + h,
        seed=seed,
    )


@triton.jit
def _pointers(tile, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None].to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    first = tile.pointer + tl.cast(tile.first, tl.int64) * tile.strides[2]
    first += tl.cast(column, tl.int64) * tile.strides[3]
    return first + (rows * tile.strides[2] + columns * tile.strides[3])


@triton.jit
def _guard(tile, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr):
    rows = tile.first + tl.arange(0, ROWS)[:, None]
    columns = column + tl.arange(0, COLUMNS)[None, :]
    return (rows < tile.length) & (columns < DIM)


@triton.jit
def _load(tile, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FULL: tl.constexpr):
    """Loads (ROWS, BLOCK_DIM), 0 past the last row and past DIM. FULL: no row is past the last."""
    pointers = _pointers(tile, 0, ROWS, BLOCK_DIM)
    if FULL and DIM == BLOCK_DIM:
        x = tl.load(pointers)
    elif FULL:
        x = tl.load(pointers, mask=tl.arange(0, BLOCK_DIM)[None, :] < DIM, other=0.0)
    else:
        x = tl.load(pointers, mask=_guard(tile, 0, ROWS, BLOCK_DIM, DIM), other=0.0)
    return x


@triton.jit
def _store(tile, x, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    x = x.to(tile.pointer.dtype.element_ty)
    tl.store(_pointers(tile, 0, ROWS, BLOCK_DIM), x, mask=_guard(tile, 0, ROWS, BLOCK_DIM, DIM))


@triton.jit
def _store_zeros(
    tensor, h, start, stop, step, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Writes zeros for packed tokens in [start, stop): ROWS tokens of every ``step``."""
    for first in range(start, stop, step):
        tile = Tile(_at(tensor, 0, h, 0), tensor.strides, first, stop)
        _store(tile, tl.zeros((ROWS, BLOCK_DIM), tl.float32), ROWS, DIM, BLOCK_DIM)


@triton.jit
def _load_mask(head, strides, rows, columns, fill, variant: tl.constexpr, FULL: tl.constexpr):
    """Loads the mask at ``rows`` and ``columns``, with size 1 in dimensions where it is broadcast.

    Only edge blocks guard the load. If the mask's rows are whole runs, the guard covers whole runs:
    a comparison that can differ between neighbours would break 16-byte loads into single elements.
    """
    columns_end = head.keys
    if variant.mask_runs:
        columns_end = tl.cdiv(head.keys, MASK_RUN) * MASK_RUN
    row_offsets = rows.to(tl.int64) * strides[2]
    column_offsets = columns.to(tl.int64) * strides[3]
    if variant.mask_rows and variant.mask_columns:
        pointers = head.mask + (row_offsets + column_offsets)
        guard = (rows < head.queries) & (columns < columns_end)
    elif variant.mask_rows:
        pointers = head.mask + row_offsets
        guard = rows < head.queries
    elif variant.mask_columns:
        pointers = head.mask + column_offsets
        guard = columns < columns_end
    else:
        pointers = head.mask + tl.zeros((1, 1), tl.int64)
        guard = tl.full((1, 1), True, tl.int1)
    if FULL:
        mask = tl.load(pointers)
    else:
        mask = tl.load(pointers, mask=guard, other=fill)
    return mask


# Pairs that take part ----------------------------------------------------------------------------


@triton.jit
def _query_rows(head, first, M: tl.constexpr, FULL: tl.constexpr):
    """(M, 1). Full blocks of keys have no guard for rows past the last query: those rows read the
    last query's mask, and their results are not stored."""
    rows = first + tl.arange(0, M)[:, None]
    if FULL:
        rows = tl.minimum(rows, head.queries - 1)
    return rows


@triton.jit
def _take_part(head, inputs, sizes, rows, columns, variant: tl.constexpr, FULL: tl.constexpr):
    """Returns which pairs take part, and the float mask. Tiles may have a row per query or per key.

    In a full block only the mask decides. With a float mask callers need not select there: its -∞
    alone makes a weight 0, and a NaN that survives it triggers the second attempt.
    """
    keep = rows < head.queries
    bias = 0.0
    if variant.bool_mask:
        keep = _load_mask(head, inputs.attn_mask.strides, rows, columns, 0, variant, FULL) != 0
    if variant.float_mask:
        mask = _load_mask(head, inputs.attn_mask.strides, rows, columns, -INF, variant, FULL)
        bias = mask.to(tl.float32)
        keep = bias != -INF
    if not FULL:
        keep = keep & (rows < head.queries) & (columns < head.keys)
        if variant.left:
            keep = keep & (columns >= rows + (head.shift - sizes.left))
        if variant.right:
            keep = keep & (columns <= rows + (head.shift + sizes.right))
    return keep, bias


@triton.jit
def _round(start, full_start, full_stop, stop, BLOCK: tl.constexpr):
    """Rounds to whole blocks: the outer range outwards, the full range inwards and inside it."""
    start = start // BLOCK * BLOCK
    stop = tl.maximum(tl.cdiv(stop, BLOCK) * BLOCK, start)
    full_start = tl.minimum(tl.maximum(tl.cdiv(full_start, BLOCK) * BLOCK, start), stop)
    full_stop = tl.minimum(tl.maximum(full_stop // BLOCK * BLOCK, full_start), stop)
    return start, full_start, full_stop, stop


@triton.jit
def _visible_keys(head, inputs, sizes, first, variant: tl.constexpr, block: tl.constexpr):
    """Returns the ranges of keys for the block of queries at ``first``. Only keys in [start, stop)
    may be seen; lengths and window leave nothing out of [full_start, full_stop)."""
    last = tl.minimum(first + block.M, head.queries)
    start = 0
    full_start = 0
    full_stop = head.keys
    stop = head.keys
    if variant.left:
        start = tl.maximum(first + head.shift - sizes.left, 0)
        full_start = tl.maximum(last - 1 + head.shift - sizes.left, 0)
    if variant.right:
        full_stop = tl.maximum(tl.minimum(first + head.shift + sizes.right + 1, head.keys), 0)
        stop = tl.maximum(tl.minimum(last + head.shift + sizes.right, head.keys), 0)
    if variant.trim:
        start, stop = _trim(head, inputs, start, stop, first, block.N, block.M, True, variant)
    return _round(start, full_start, full_stop, stop, block.N)


@triton.jit
def _visible_queries(head, inputs, sizes, first, variant: tl.constexpr, block: tl.constexpr):
    """Returns the same ranges of queries for the block of keys at ``first``."""
    last = tl.minimum(first + block.N, head.keys)
    start = 0
    full_start = 0
    full_stop = tl.where(first + block.N <= head.keys, head.queries, 0)
    stop = tl.where(first < head.keys, head.queries, 0)
    if variant.right:
        start = tl.maximum(first - head.shift - sizes.right, 0)
        full_start = tl.maximum(last - 1 - head.shift - sizes.right, 0)
    if variant.left:
        full_stop = tl.maximum(tl.minimum(first - head.shift + sizes.left + 1, full_stop), 0)
        stop = tl.maximum(tl.minimum(last - head.shift + sizes.left, stop), 0)
    if variant.trim:
        start, stop = _trim(head, inputs, start, stop, first, block.M, block.N, False, variant)
    return _round(start, full_start, full_stop, stop, block.M)


@triton.jit
def _trim(
    head, inputs, start, stop, first, BLOCK: tl.constexpr, OTHER: tl.constexpr, KEYS: tl.constexpr,
    variant: tl.constexpr,
):  # fmt: skip
    """Cuts the ends that the mask leaves out off [start, stop), for the block at ``first``.

    KEYS: the range is of keys and the block of queries; otherwise the reverse. The search reads the
    mask for two blocks of the range at a time, from either end, until it finds a pair: a mask
    without empty ends costs two such reads. Holes in the middle stay.
    """
    at = start // BLOCK * BLOCK
    lowest = stop
    while (at < stop) & (lowest == stop):
        index = at + tl.arange(0, 2 * BLOCK)
        kept = _mask_keeps(head, inputs, index, first, 2 * BLOCK, OTHER, KEYS, variant)
        lowest = tl.min(tl.where(kept & (index >= start) & (index < stop), index, stop), 0)
        at += 2 * BLOCK
    at = tl.cdiv(stop, BLOCK) * BLOCK
    highest = lowest
    while (at > lowest) & (highest == lowest):
        at -= 2 * BLOCK
        index = at + tl.arange(0, 2 * BLOCK)
        kept = _mask_keeps(head, inputs, index, first, 2 * BLOCK, OTHER, KEYS, variant)
        highest = tl.max(tl.where(kept & (index >= lowest) & (index < stop), index + 1, lowest), 0)
    return lowest, highest


@triton.jit
def _mask_keeps(
    head, inputs, index, first, SIZE: tl.constexpr, OTHER: tl.constexpr, KEYS: tl.constexpr,
    variant: tl.constexpr,
):  # fmt: skip
    """(SIZE,): whether the mask keeps each key (or query) for any query (or key) of the block."""
    other = first + tl.arange(0, OTHER)
    if KEYS:
        rows = other[:, None]
        columns = index[None, :]
    else:
        rows = index[:, None]
        columns = other[None, :]
    if not variant.mask_rows:
        rows = tl.zeros((1, 1), tl.int32)
    inside = (rows >= 0) & (columns >= 0) & (rows < head.queries) & (columns < head.keys)
    if variant.bool_mask:
        fill = 0
    else:
        fill = -INF
    offsets = rows.to(tl.int64) * inputs.attn_mask.strides[2]
    offsets += columns.to(tl.int64) * inputs.attn_mask.strides[3]
    mask = tl.load(head.mask + offsets, mask=inside, other=fill)
    return tl.max((mask != fill).to(tl.int32), 0 if KEYS else 1) > 0


@triton.jit
def _program(blocks, heads):
    """Returns the program's block, head and sequence."""
    program = tl.program_id(0)
    return program % blocks, program // blocks % heads, program // blocks // heads


# Arithmetic --------------------------------------------------------------------------------------


@triton.jit
def _pair_products(
    a, a_tile, b, b_tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Returns a @ bᵀ (ROWS, COLUMNS), at once or in steps of block.K along DIM.

    In float32, products run on the ordinary arithmetic units, and the compiler keeps all operands
    of a thread in registers. Steps bound their number, but load both tiles again through the cache.
    """
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    if block.K == 0 or block.K >= BLOCK_DIM:
        products = dot(a, tl.trans(b), products)
    else:
        for k in range(0, BLOCK_DIM, block.K):
            guard = _guard(a_tile, k, ROWS, block.K, DIM)
            x = tl.load(_pointers(a_tile, k, ROWS, block.K), mask=guard, other=0.0)
            guard = _guard(b_tile, k, COLUMNS, block.K, DIM)
            y = tl.load(_pointers(b_tile, k, COLUMNS, block.K), mask=guard, other=0.0)
            products = dot(x, tl.trans(y), products)
    return products


@triton.jit
def _finite(x):
    return tl.abs(x.to(tl.float32)) < INF


@triton.jit
def _zero_non_finite(x):
    return tl.where(_finite(x), x, 0.0).to(x.dtype)


@triton.jit
def _count_non_finite(keep, x, count):
    """Adds keep @ (x is not finite) to ``count``: the non-finite terms of each sum over pairs."""
    bad = tl.where(_finite(x), 0.0, 1.0)
    return dot(tl.where(keep, 1.0, 0.0).to(tl.bfloat16), bad.to(tl.bfloat16), count)


@triton.jit
def _any_non_finite(x):
    return tl.max((~_finite(x)).to(tl.int32)) > 0


@triton.jit
def _infinite_to_nan(x):
    return tl.where(tl.abs(x) == INF, float("nan"), x)


# Forward -----------------------------------------------------------------------------------------


@triton.jit
def _attend(
    acc, peak, total, query, query_tile, start, stop, gap_start, gap_stop, head, inputs, sizes,
    variant: tl.constexpr, block: tl.constexpr, FULL: tl.constexpr, CAREFUL: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Adds the keys in [start, stop) without [gap_start, gap_stop) to the softmax of a block.

    ``acc`` (M, BLOCK_EV) is ∑ p v and ``total`` (M,) is ∑ p, where p = exp(score - peak) and
    ``peak`` (M,) is the largest score so far.
    """
    rows = _query_rows(head, query_tile.first, block.M, FULL)
    STAGES: tl.constexpr = 1 if CAREFUL else None
    for step in tl.range(start, stop - (gap_stop - gap_start), block.N, num_stages=STAGES):
        first = step + tl.where(step < gap_start, 0, gap_stop - gap_start)
        columns = first + tl.arange(0, block.N)[None, :]
        key_tile = Tile(head.key, inputs.key.strides, first, head.keys)
        key = _load(key_tile, block.N, variant.E, variant.BLOCK_E, FULL)
        products = _pair_products(
            query, query_tile, key, key_tile, block.M, block.N, variant.E, variant.BLOCK_E, block
        )
        scores = products
        keep, bias = _take_part(head, inputs, sizes, rows, columns, variant, FULL)
        if variant.natural:
            scores = tl.fma(scores, sizes.scale, bias)
        if variant.bool_mask or not FULL:
            scores = tl.where(keep, scores, -INF)
        top = tl.max(scores, 1)
        if not variant.natural:
            # One product per row instead of one per score.
            top *= sizes.scale_log2
        new_peak = tl.maximum(peak, top)
        # A row without a pair so far has a peak of -∞; subtracting that would give NaN.
        base = tl.where(new_peak == -INF, 0.0, new_peak)
        if variant.natural:
            p = tl.exp2((scores - base[:, None]) * LOG2E)
            shrink = tl.exp2((peak - base) * LOG2E)
        else:
            p = tl.exp2(tl.fma(scores, sizes.scale_log2, -base[:, None]))
            shrink = tl.exp2(peak - base)
        total = tl.fma(total, shrink, tl.sum(p, 1))
        peak = new_peak
        if VALUES:
            if variant.dropout:
                p = tl.where(_kept(head, sizes, query_tile.first, first, block), p, 0.0)
            value_tile = Tile(head.value, inputs.value.strides, first, head.keys)
            value = _load(value_tile, block.N, variant.Ev, variant.BLOCK_EV, FULL)
            if CAREFUL:
                value = _zero_non_finite(value)
            acc = dot(p.to(value.dtype), value, acc * shrink[:, None])
    return acc, peak, total


@triton.jit
def _have_pairs(
    first_row, start, stop, head, inputs, sizes, variant: tl.constexpr, block: tl.constexpr
):
    """(M,): whether each query has any key."""
    rows = first_row + tl.arange(0, block.M)[:, None]
    found = tl.full((block.M,), 0, tl.int32)
    for first in tl.range(start, stop, block.N, num_stages=1):
        columns = first + tl.arange(0, block.N)[None, :]
        keep = _take_part(head, inputs, sizes, rows, columns, variant, False)[0]
        found = tl.maximum(found, tl.max(keep.to(tl.int32), 1))
    return found > 0


@triton.jit
def _kept(head, sizes, row, column, block: tl.constexpr):
    return dropout_keep(head.seed, head.plane, row, column, sizes.threshold, block.M, block.N)


@triton.jit
def _count_non_finite_keys(
    tensor, pointer, first_row, start, stop, head, inputs, sizes, variant: tl.constexpr,
    block: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """(M, BLOCK_DIM): non-finite numbers in the keys or values that each query sees."""
    rows = first_row + tl.arange(0, block.M)[:, None]
    count = tl.full((block.M, BLOCK_DIM), 0.0, tl.float32)
    for first in tl.range(start, stop, block.N, num_stages=1):
        columns = first + tl.arange(0, block.N)[None, :]
        keep = _take_part(head, inputs, sizes, rows, columns, variant, False)[0]
        tile = Tile(pointer, tensor.strides, first, head.keys)
        x = _load(tile, block.N, DIM, BLOCK_DIM, False)
        count = _count_non_finite(keep, x, count)
    return count


@triton.jit(do_not_specialize=Sizes._fields)
def attention_forward_kernel(
    inputs,
    out,  # (B, H, Lq, Ev)
    lse,  # (B, H, Lq) float32, contiguous
    B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale,
    variant: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Computes the output and the logsumexp.

    A program owns M queries of one head of one sequence. It reads them once, and the keys and
    values that they see; it writes M rows of ``out`` and of ``lse``. Programs of one head are
    neighbours in the grid, so its keys and values come from the L2 cache for all but the first.

    Floor: 2 · pairs · (E + Ev) operations of the matrix unit and one exponential per pair, for
    B · H · (Lq · (E + Ev) + Lk · (E + Ev)) elements of memory.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    blocks = tl.cdiv(sizes.Lq, block.M)
    index, h, b = _program(blocks, sizes.H)
    if variant.right:
        index = blocks - 1 - index  # blocks that see the most keys begin first
    first = index * block.M
    if variant.packed:
        if b == sizes.B:  # tokens past the last sequence
            start = tl.load(inputs.cu_seqlens_q + b).to(tl.int32) + first
            step = blocks * block.M
            _store_zeros(out, h, start, sizes.total_q, step, block.M, variant.Ev, variant.BLOCK_EV)
            for token in range(start, sizes.total_q, step):
                rows = token + tl.arange(0, block.M)
                pointers = lse + tl.cast(h, tl.int64) * sizes.total_q + rows
                tl.store(pointers, tl.full((block.M,), -INF, tl.float32), rows < sizes.total_q)
            return
    head = _load_head(inputs, sizes, b, h, variant)
    if first >= head.queries:
        return
    start, full_start, full_stop, stop = _visible_keys(head, inputs, sizes, first, variant, block)
    query_tile = Tile(head.query, inputs.query.strides, first, head.queries)
    query = _load(query_tile, block.M, variant.E, variant.BLOCK_E, False)
    acc = tl.full((block.M, variant.BLOCK_EV), 0.0, tl.float32)
    peak = tl.full((block.M,), -INF, tl.float32)
    total = tl.full((block.M,), 0.0, tl.float32)
    acc, peak, total = _attend(
        acc, peak, total, query, query_tile, full_start, full_stop, full_stop, full_stop, head,
        inputs, sizes, variant, block, True, False, True,
    )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, query, query_tile, start, stop, full_start, full_stop, head,
        inputs, sizes, variant, block, False, False, True,
    )  # fmt: skip
    if variant.selective:
        # ``total`` too: dropout may have removed a NaN from ``acc``.
        if _any_non_finite(acc) | _any_non_finite(total):
            count = _count_non_finite_keys(
                inputs.value, head.value, first, start, stop, head, inputs, sizes, variant, block,
                variant.Ev, variant.BLOCK_EV,
            )  # fmt: skip
            acc, peak, total = _attend(
                tl.where(count > 0.0, INF, 0.0), tl.full((block.M,), -INF, tl.float32),
                tl.zeros_like(total), query, query_tile, start, stop, stop, stop, head, inputs,
                sizes, variant, block, False, True, True,
            )  # fmt: skip
    rows = first + tl.arange(0, block.M)
    # A total of 0 means no pair, or only scores of -∞. The latter makes the row NaN.
    nothing = (total == 0.0) & (rows < head.queries)
    if tl.max(nothing.to(tl.int32), 0) > 0:
        have = _have_pairs(first, start, stop, head, inputs, sizes, variant, block)
        total = tl.where(nothing & have, float("nan"), total)
    total = tl.where(total == 0.0, 1.0, total)
    result = _infinite_to_nan(acc * (sizes.keep_scale / total)[:, None])
    out_tile = Tile(_at(out, head.batch, h, head.first_query), out.strides, first, head.queries)
    _store(out_tile, result, block.M, variant.Ev, variant.BLOCK_EV)
    if variant.natural:
        logsumexp = tl.fma(tl.log2(total), LN2, peak)
    else:
        logsumexp = (peak + tl.log2(total)) * LN2
    tl.store(lse + head.row + rows, logsumexp, rows < head.queries)


# Backward ----------------------------------------------------------------------------------------


class RowVectors(NamedTuple):
    """Per-query numbers that the backward needs: float32 (B, H, Lq), contiguous."""

    # The logsumexp or, where that is too coarse, the largest score. With Variant.large it is ∞ for
    # a row without a pair: subtracted from any score it gives -∞, and the weights are 0.
    peak: Tensor
    log_total: Tensor | None  # with Variant.large: the rest of the logsumexp, in units of log 2
    delta: Tensor  # ∑ dO O - dlse


@triton.jit(do_not_specialize=Sizes._fields)
def attention_backward_rows_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    grad_lse,  # (B, H, Lq), or None
    out,  # (B, H, Lq, Ev)
    lse,  # (B, H, Lq) float32, contiguous
    vectors,  # RowVectors, all written, except a peak that is lse itself
    B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale,
    variant: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """delta = ∑ dO O - dlse and, with Variant.large, the logsumexp in two parts.

    A program owns M queries of one head of one sequence; it reads their rows of ``grad_out`` and
    ``out`` and writes a few numbers for each. With Variant.large, and only if one of its rows has a
    coarse logsumexp, it also runs through the keys for the exact sum.

    Floor: 2 · B · H · Lq · Ev elements of memory.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    index, h, b = _program(tl.cdiv(sizes.Lq, block.M), sizes.H)
    first = index * block.M
    head = _load_head(inputs, sizes, b, h, variant)
    if first >= head.queries:
        return
    rows = first + tl.arange(0, block.M)
    guard = rows < head.queries
    do_tile = Tile(
        _at(grad_out, head.batch, h, head.first_query), grad_out.strides, first, head.queries
    )
    do = _load(do_tile, block.M, variant.Ev, variant.BLOCK_EV, False).to(tl.float32)
    o_tile = Tile(_at(out, head.batch, h, head.first_query), out.strides, first, head.queries)
    o = _load(o_tile, block.M, variant.Ev, variant.BLOCK_EV, False).to(tl.float32)
    # An Inf in dO makes its row NaN, whatever the output it multiplies.
    delta = tl.sum(tl.fma(do, 0.0, do) * o, 1)
    if grad_lse is not None:
        pointers = _at(grad_lse, head.batch, h, head.first_query)
        pointers += rows.to(tl.int64) * grad_lse.strides[2]
        delta -= tl.load(pointers, guard, other=0.0)
    delta = _infinite_to_nan(delta)
    tl.store(vectors.delta + head.row + rows, delta, guard)
    if variant.large:
        peak = tl.load(lse + head.row + rows, guard, other=0.0)
        log_total = tl.full((block.M,), 0.0, tl.float32)
        is_nan = peak != peak
        if tl.max(tl.where((peak == -INF) | is_nan, 0.0, tl.abs(peak)), 0) > COARSE_LOGSUMEXP:
            start, _full_start, _full_stop, stop = _visible_keys(
                head, inputs, sizes, first, variant, block
            )
            query_tile = Tile(head.query, inputs.query.strides, first, head.queries)
            query = _load(query_tile, block.M, variant.E, variant.BLOCK_E, False)
            _none, peak, total = _attend(
                0.0, tl.full((block.M,), -INF, tl.float32), log_total, query, query_tile, start,
                stop, stop, stop, head, inputs, sizes, variant, block, False, False, False,
            )  # fmt: skip
            log_total = tl.log2(tl.where(total == 0.0, 1.0, total))
            peak = tl.where(is_nan, float("nan"), peak)
        tl.store(vectors.peak + head.row + rows, tl.where(peak == -INF, INF, peak), guard)
        tl.store(vectors.log_total + head.row + rows, log_total, guard)


@triton.jit
def _load_vector(vector, head, rows, FULL: tl.constexpr):
    if FULL:
        x = tl.load(vector + head.row + rows)
    else:
        x = tl.load(vector + head.row + rows, mask=rows < head.queries, other=0.0)
    return x


@triton.jit
def _load_vectors(vectors, head, rows, variant: tl.constexpr, FULL: tl.constexpr):
    """Loads peak, log_total and delta of the queries in ``rows``, in the units of ``_weights``."""
    peak = _load_vector(vectors.peak, head, rows, FULL)
    delta = _load_vector(vectors.delta, head, rows, FULL)
    if variant.large:
        log_total = _load_vector(vectors.log_total, head, rows, FULL)
    else:
        log_total = peak
        peak *= LOG2E
    return peak, log_total, delta


@triton.jit
def _weights(products, bias, peak, log_total, sizes, variant: tl.constexpr):
    """P = exp(score - logsumexp). The vectors may run along rows or columns."""
    if variant.large:
        above = tl.fma(products, sizes.scale, bias) - peak
        p = tl.exp2(tl.fma(above, LOG2E, -log_total))
    else:
        p = tl.exp2(tl.fma(products, sizes.scale_log2, -peak))
    return p


@triton.jit
def _collect(
    dk, dv, key, value, key_tile, value_tile, start, stop, gap_start, gap_stop, head, grad_out,
    do_pointer, inputs, vectors, sizes, variant: tl.constexpr, block: tl.constexpr,
    FULL: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Adds the terms of the queries in [start, stop) without [gap_start, gap_stop) to dK and dV.

    Score tiles have a row per key: that way the weights are the left operand of both following
    products, straight from registers.
    """
    columns = key_tile.first + tl.arange(0, block.N)[:, None]
    STAGES: tl.constexpr = 1 if CAREFUL else None
    for step in tl.range(start, stop - (gap_stop - gap_start), block.M, num_stages=STAGES):
        first = step + tl.where(step < gap_start, 0, gap_stop - gap_start)
        rows = first + tl.arange(0, block.M)[None, :]
        peak, log_total, delta = _load_vectors(vectors, head, rows, variant, FULL)
        query_tile = Tile(head.query, inputs.query.strides, first, head.queries)
        query = _load(query_tile, block.M, variant.E, variant.BLOCK_E, FULL)
        if CAREFUL:
            query = _zero_non_finite(query)
        products = _pair_products(
            key, key_tile, query, query_tile, block.N, block.M, variant.E, variant.BLOCK_E, block
        )
        keep, bias = _take_part(head, inputs, sizes, rows, columns, variant, FULL)
        p = _weights(products, bias, peak, log_total, sizes, variant)
        if variant.bool_mask or not FULL:
            p = tl.where(keep, p, 0.0)
        do_tile = Tile(do_pointer, grad_out.strides, first, head.queries)
        do = _load(do_tile, block.M, variant.Ev, variant.BLOCK_EV, FULL)
        if CAREFUL:
            do = _zero_non_finite(do)
        grad_p = _pair_products(
            value, value_tile, do, do_tile, block.N, block.M, variant.Ev, variant.BLOCK_EV, block
        )
        dropped = p
        if variant.dropout:
            kept = tl.trans(_kept(head, sizes, first, key_tile.first, block))
            dropped = tl.where(kept, p, 0.0)
            grad_p = tl.where(kept, grad_p * sizes.keep_scale, 0.0)
        grad_scores = p * (grad_p - delta)
        if not FULL:
            grad_scores = tl.where(keep, grad_scores, 0.0)
        dv = dot(dropped.to(do.dtype), do, dv)
        dk = dot(grad_scores.to(query.dtype), query, dk)
    return dk, dv


@triton.jit
def _group(sizes, variant: tl.constexpr):
    """Query heads per key head. A 1 is a compile-time constant, which removes a loop."""
    if variant.grouped:
        group = sizes.group
    else:
        group = 1
    return group


@triton.jit
def _collect_group(
    dk, dv, key, value, key_tile, value_tile, b, kv_head, grad_out, inputs, vectors, sizes,
    variant: tl.constexpr, block: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Adds the terms of all query heads that share a key head to dK and dV."""
    for member in range(_group(sizes, variant)):
        h = kv_head * _group(sizes, variant) + member
        head = _load_head(inputs, sizes, b, h, variant)
        do_pointer = _at(grad_out, head.batch, h, head.first_query)
        start, full_start, full_stop, stop = _visible_queries(
            head, inputs, sizes, key_tile.first, variant, block
        )
        if CAREFUL:
            dk, dv = _collect(
                dk, dv, key, value, key_tile, value_tile, start, stop, stop, stop, head, grad_out,
                do_pointer, inputs, vectors, sizes, variant, block, False, True,
            )  # fmt: skip
        else:
            dk, dv = _collect(
                dk, dv, key, value, key_tile, value_tile, full_start, full_stop, full_stop,
                full_stop, head, grad_out, do_pointer, inputs, vectors, sizes, variant, block,
                True, False,
            )  # fmt: skip
            dk, dv = _collect(
                dk, dv, key, value, key_tile, value_tile, start, stop, full_start, full_stop, head,
                grad_out, do_pointer, inputs, vectors, sizes, variant, block, False, False,
            )  # fmt: skip
    return dk, dv


@triton.jit
def _count_non_finite_queries(
    tensor, first_column, b, kv_head, inputs, sizes, variant: tl.constexpr, block: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """(N, BLOCK_DIM): non-finite numbers in the q or dO of all queries that see each key."""
    columns = first_column + tl.arange(0, block.N)[:, None]
    count = tl.full((block.N, BLOCK_DIM), 0.0, tl.float32)
    for member in range(_group(sizes, variant)):
        h = kv_head * _group(sizes, variant) + member
        head = _load_head(inputs, sizes, b, h, variant)
        pointer = _at(tensor, head.batch, h, head.first_query)
        start, _full_start, _full_stop, stop = _visible_queries(
            head, inputs, sizes, first_column, variant, block
        )
        for first in tl.range(start, stop, block.M, num_stages=1):
            rows = first + tl.arange(0, block.M)[None, :]
            keep = _take_part(head, inputs, sizes, rows, columns, variant, False)[0]
            tile = Tile(pointer, tensor.strides, first, head.queries)
            x = _load(tile, block.M, DIM, BLOCK_DIM, False)
            count = _count_non_finite(keep, x, count)
    return count


@triton.jit(do_not_specialize=Sizes._fields)
def attention_backward_key_value_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    vectors,  # RowVectors
    grad_key,  # (B, Hkv, Lk, E)
    grad_value,  # (B, Hkv, Lk, Ev)
    B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale,
    variant: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """dV_j = ∑_i D_ij P_ij dO_i and dK_j = scale ∑_i dS_ij q_i.

    A program owns N keys of one key head of one sequence, and runs through the queries that see
    them, in every query head that shares the key head: no sum is split. It reads its keys and
    values once, and q, dO and 2 or 3 numbers per query; it writes N rows of dK and of dV.

    Floor: 4 · pairs · (E + Ev) operations of the matrix unit.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    blocks = tl.cdiv(sizes.Lk, block.N)
    # In causal attention the first keys are seen most, so their programs begin first.
    index, kv_head, b = _program(blocks, sizes.H // sizes.group)
    first = index * block.N
    if variant.packed:
        token = tl.load(inputs.cu_seqlens_k + b)
        if b == sizes.B:  # tokens past the last sequence
            start = token.to(tl.int32) + first
            step = blocks * block.N
            stop = sizes.total_k
            _store_zeros(grad_key, kv_head, start, stop, step, block.N, variant.E, variant.BLOCK_E)
            _store_zeros(
                grad_value, kv_head, start, stop, step, block.N, variant.Ev, variant.BLOCK_EV
            )
            return
        batch = 0
        stored = (tl.load(inputs.cu_seqlens_k + b + 1) - token).to(tl.int32)
    else:
        token = 0
        batch = b
        stored = sizes.Lk
    if first >= stored:
        return
    keys = stored
    if variant.lengths:
        keys = tl.load(inputs.key_lengths + b).to(tl.int32)
    key_tile = Tile(_at(inputs.key, batch, kv_head, token), inputs.key.strides, first, keys)
    value_tile = Tile(_at(inputs.value, batch, kv_head, token), inputs.value.strides, first, keys)
    key = _load(key_tile, block.N, variant.E, variant.BLOCK_E, False)
    value = _load(value_tile, block.N, variant.Ev, variant.BLOCK_EV, False)
    dk = tl.full((block.N, variant.BLOCK_E), 0.0, tl.float32)
    dv = tl.full((block.N, variant.BLOCK_EV), 0.0, tl.float32)
    dk, dv = _collect_group(
        dk, dv, key, value, key_tile, value_tile, b, kv_head, grad_out, inputs, vectors, sizes,
        variant, block, False,
    )  # fmt: skip
    if variant.selective:
        if _any_non_finite(dk) | _any_non_finite(dv):
            count = _count_non_finite_queries(
                inputs.query, first, b, kv_head, inputs, sizes, variant, block, variant.E,
                variant.BLOCK_E,
            )  # fmt: skip
            dk = tl.where(count > 0.0, INF, 0.0)
            count = _count_non_finite_queries(
                grad_out, first, b, kv_head, inputs, sizes, variant, block, variant.Ev,
                variant.BLOCK_EV,
            )  # fmt: skip
            dv = tl.where(count > 0.0, INF, 0.0)
            dk, dv = _collect_group(
                dk, dv, key, value, key_tile, value_tile, b, kv_head, grad_out, inputs, vectors,
                sizes, variant, block, True,
            )  # fmt: skip
    if variant.lengths:
        # Keys past the lengths have weights of 0, but the other factor may have been NaN.
        take_part = (first + tl.arange(0, block.N) < keys)[:, None]
        dk = tl.where(take_part, dk, 0.0)
        dv = tl.where(take_part, dv, 0.0)
    dk_tile = Tile(_at(grad_key, batch, kv_head, token), grad_key.strides, first, stored)
    dk = _infinite_to_nan(dk * sizes.scale)
    _store(dk_tile, dk, block.N, variant.E, variant.BLOCK_E)
    dv_tile = Tile(_at(grad_value, batch, kv_head, token), grad_value.strides, first, stored)
    dv = _infinite_to_nan(dv * sizes.keep_scale)
    _store(dv_tile, dv, block.N, variant.Ev, variant.BLOCK_EV)


@triton.jit
def _grad_scores(
    query, do, key, query_tile, do_tile, key_tile, peak, log_total, delta, head, inputs, sizes,
    variant: tl.constexpr, block: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """dS (M, N), 0 for pairs that don't take part."""
    rows = _query_rows(head, query_tile.first, block.M, FULL)
    columns = key_tile.first + tl.arange(0, block.N)[None, :]
    products = _pair_products(
        query, query_tile, key, key_tile, block.M, block.N, variant.E, variant.BLOCK_E, block
    )
    keep, bias = _take_part(head, inputs, sizes, rows, columns, variant, FULL)
    p = _weights(products, bias, peak[:, None], log_total[:, None], sizes, variant)
    value_tile = Tile(head.value, inputs.value.strides, key_tile.first, head.keys)
    value = _load(value_tile, block.N, variant.Ev, variant.BLOCK_EV, FULL)
    grad_p = _pair_products(
        do, do_tile, value, value_tile, block.M, block.N, variant.Ev, variant.BLOCK_EV, block
    )
    if variant.dropout:
        kept = _kept(head, sizes, query_tile.first, key_tile.first, block)
        grad_p = tl.where(kept, grad_p * sizes.keep_scale, 0.0)
    grad_scores = p * (grad_p - delta[:, None])
    if variant.bool_mask or not FULL:
        grad_scores = tl.where(keep, grad_scores, 0.0)
    return grad_scores


@triton.jit
def _gather(
    dq, query, do, query_tile, do_tile, peak, log_total, delta, start, stop, gap_start, gap_stop,
    head, inputs, sizes, variant: tl.constexpr, block: tl.constexpr, FULL: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Adds the terms of the keys in [start, stop) without [gap_start, gap_stop) to dQ."""
    STAGES: tl.constexpr = 1 if CAREFUL else None
    for step in tl.range(start, stop - (gap_stop - gap_start), block.N, num_stages=STAGES):
        first = step + tl.where(step < gap_start, 0, gap_stop - gap_start)
        key_tile = Tile(head.key, inputs.key.strides, first, head.keys)
        key = _load(key_tile, block.N, variant.E, variant.BLOCK_E, FULL)
        grad_scores = _grad_scores(
            query, do, key, query_tile, do_tile, key_tile, peak, log_total, delta, head, inputs,
            sizes, variant, block, FULL,
        )  # fmt: skip
        if CAREFUL:
            key = _zero_non_finite(key)  # after the scores, which an infinite key can make -∞
        dq = dot(grad_scores.to(key.dtype), key, dq)
    return dq


@triton.jit(do_not_specialize=Sizes._fields)
def attention_backward_query_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    vectors,  # RowVectors
    grad_query,  # (B, H, Lq, E)
    B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale,
    variant: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """dQ_i = scale ∑_j dS_ij k_j.

    A program owns M queries of one head of one sequence and runs through the keys that they see. It
    reads q, dO and 2 or 3 numbers per query once, and the keys and values; it writes M rows.

    Floor: 2 · pairs · (2 E + Ev) operations of the matrix unit. Two of the three products are also
    computed for dK and dV: the price of never splitting a sum between programs.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    blocks = tl.cdiv(sizes.Lq, block.M)
    index, h, b = _program(blocks, sizes.H)
    if variant.right:
        index = blocks - 1 - index
    first = index * block.M
    if variant.packed:
        if b == sizes.B:  # tokens past the last sequence
            start = tl.load(inputs.cu_seqlens_q + b).to(tl.int32) + first
            step = blocks * block.M
            _store_zeros(
                grad_query, h, start, sizes.total_q, step, block.M, variant.E, variant.BLOCK_E
            )
            return
    head = _load_head(inputs, sizes, b, h, variant)
    if first >= head.queries:
        return
    start, full_start, full_stop, stop = _visible_keys(head, inputs, sizes, first, variant, block)
    query_tile = Tile(head.query, inputs.query.strides, first, head.queries)
    do_pointer = _at(grad_out, head.batch, h, head.first_query)
    do_tile = Tile(do_pointer, grad_out.strides, first, head.queries)
    query = _load(query_tile, block.M, variant.E, variant.BLOCK_E, False)
    do = _load(do_tile, block.M, variant.Ev, variant.BLOCK_EV, False)
    rows = first + tl.arange(0, block.M)
    peak, log_total, delta = _load_vectors(vectors, head, rows, variant, False)
    dq = tl.full((block.M, variant.BLOCK_E), 0.0, tl.float32)
    dq = _gather(
        dq, query, do, query_tile, do_tile, peak, log_total, delta, full_start, full_stop,
        full_stop, full_stop, head, inputs, sizes, variant, block, True, False,
    )  # fmt: skip
    dq = _gather(
        dq, query, do, query_tile, do_tile, peak, log_total, delta, start, stop, full_start,
        full_stop, head, inputs, sizes, variant, block, False, False,
    )  # fmt: skip
    if variant.selective:
        if _any_non_finite(dq):
            count = _count_non_finite_keys(
                inputs.key, head.key, first, start, stop, head, inputs, sizes, variant, block,
                variant.E, variant.BLOCK_E,
            )  # fmt: skip
            dq = _gather(
                tl.where(count > 0.0, INF, 0.0), query, do, query_tile, do_tile, peak, log_total,
                delta, start, stop, stop, stop, head, inputs, sizes, variant, block, False, True,
            )  # fmt: skip
    dq_pointer = _at(grad_query, head.batch, h, head.first_query)
    dq_tile = Tile(dq_pointer, grad_query.strides, first, head.queries)
    dq = _infinite_to_nan(dq * sizes.scale)
    _store(dq_tile, dq, block.M, variant.E, variant.BLOCK_E)


class MaskShape(NamedTuple):
    """Which dimensions of the mask's gradient are full. It is summed over the others."""

    batch: bool
    heads: bool
    rows: bool
    columns: bool


@triton.jit(do_not_specialize=("chunk", *Sizes._fields))
def attention_backward_mask_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    grad_lse,  # (B, H, Lq), or None
    vectors,  # RowVectors
    grad_mask,  # (shares, *attn_mask.shape), contiguous
    chunk,  # number of terms in a share of the sum
    B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale,
    shape: tl.constexpr,  # MaskShape
    long: tl.constexpr,  # whether a share has more terms than a run
    variant: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """The float mask's gradient: dS, summed over the dimensions that the mask is broadcast in.

    A program owns a tile of the gradient (a single row if all queries share the mask) and a share
    of the sum: it computes dS again for one sequence, head and query block after another. Shares
    are added up afterwards.

    A mask that all keys share shifts whole rows and changes only their logsumexp: its gradient is
    dlse, and no scores are needed.

    Floor: 2 · pairs · (E + Ev) operations of the matrix unit.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    row_blocks = tl.cdiv(sizes.Lq, block.M)
    # The tile: columns fastest, then rows, heads, sequences, and the share last.
    index = tl.program_id(0)
    first_column = 0
    if shape.columns:
        column_blocks = tl.cdiv(sizes.Lk, block.N)
        first_column = index % column_blocks * block.N
        index = index // column_blocks
    tile_row = 0
    if shape.rows:
        tile_row = index % row_blocks * block.M
        index = index // row_blocks
    tile_head = 0
    if shape.heads:
        tile_head = index % sizes.H
        index = index // sizes.H
    tile_batch = 0
    if shape.batch:
        tile_batch = index % sizes.B
        index = index // sizes.B
    # The sum: blocks of queries fastest, then heads, then sequences.
    terms = 1
    if not shape.rows:
        terms *= row_blocks
    if not shape.heads:
        terms *= sizes.H
    if not shape.batch:
        terms *= sizes.B

    tile_sum = tl.full((block.M, block.N), 0.0, tl.float32)
    row_sum = tl.full((block.M,), 0.0, tl.float32)
    tile_total = tl.full((block.M, block.N), 0.0, tl.float32)
    row_total = tl.full((block.M,), 0.0, tl.float32)
    begin = index * chunk
    for term in range(begin, tl.minimum(begin + chunk, terms)):
        rest = term
        if shape.rows:
            first = tile_row
        else:
            first = rest % row_blocks * block.M
            rest = rest // row_blocks
        if shape.heads:
            h = tile_head
        else:
            h = rest % sizes.H
            rest = rest // sizes.H
        if shape.batch:
            b = tile_batch
        else:
            b = rest
        head = _load_head(inputs, sizes, b, h, variant)
        rows = first + tl.arange(0, block.M)
        peak, log_total, delta = _load_vectors(vectors, head, rows, variant, False)
        if shape.columns:
            last = tl.minimum(first + block.M, head.queries) - 1
            seen = (first < head.queries) & (first_column < head.keys)
            if variant.left:
                seen = seen & (first_column + block.N > first + head.shift - sizes.left)
            if variant.right:
                seen = seen & (first_column <= last + head.shift + sizes.right)
            if seen:
                query_tile = Tile(head.query, inputs.query.strides, first, head.queries)
                key_tile = Tile(head.key, inputs.key.strides, first_column, head.keys)
                do_pointer = _at(grad_out, head.batch, h, head.first_query)
                do_tile = Tile(do_pointer, grad_out.strides, first, head.queries)
                query = _load(query_tile, block.M, variant.E, variant.BLOCK_E, False)
                key = _load(key_tile, block.N, variant.E, variant.BLOCK_E, False)
                do = _load(do_tile, block.M, variant.Ev, variant.BLOCK_EV, False)
                tile_sum += _grad_scores(
                    query, do, key, query_tile, do_tile, key_tile, peak, log_total, delta, head,
                    inputs, sizes, variant, block, False,
                )  # fmt: skip
        else:
            guard = rows < head.queries
            grad = tl.full((block.M,), 0.0, tl.float32)
            if grad_lse is not None:
                pointers = _at(grad_lse, head.batch, h, head.first_query)
                grad = tl.load(pointers + rows.to(tl.int64) * grad_lse.strides[2], guard, other=0.0)
            # peak and delta are NaN in rows that a NaN has reached.
            grad = tl.fma(peak + delta, 0.0, grad)
            row_sum += tl.where(guard & (peak != INF), grad, 0.0)
        if long:
            if (term - begin) % RUN == RUN - 1:
                if shape.columns:
                    tile_sum, tile_total = end_run(tile_sum, tile_total)
                else:
                    row_sum, row_total = end_run(row_sum, row_total)
    if long:
        tile_sum += tile_total
        row_sum += row_total

    plane = tl.cast(index, tl.int64)
    if shape.batch:
        plane = plane * sizes.B + tile_batch
    if shape.heads:
        plane = plane * sizes.H + tile_head
    rows = tile_row + tl.arange(0, block.M)
    columns = first_column + tl.arange(0, block.N)
    if shape.rows and shape.columns:
        offsets = (plane * sizes.Lq + rows[:, None]) * sizes.Lk + columns[None, :]
        guard = (rows[:, None] < sizes.Lq) & (columns[None, :] < sizes.Lk)
        tl.store(grad_mask + offsets, tile_sum.to(grad_mask.dtype.element_ty), guard)
    elif shape.columns:
        result = tl.sum(tile_sum, 0).to(grad_mask.dtype.element_ty)
        tl.store(grad_mask + plane * sizes.Lk + columns, result, columns < sizes.Lk)
    elif shape.rows:
        result = row_sum.to(grad_mask.dtype.element_ty)
        tl.store(grad_mask + plane * sizes.Lq + rows, result, rows < sizes.Lq)
    else:
        tl.store(grad_mask + plane, tl.sum(row_sum, 0).to(grad_mask.dtype.element_ty))


# Configurations ----------------------------------------------------------------------------------


class Config(NamedTuple):
    """Sizes of tiles, as in ``Block``, and options of the compiler."""

    M: int
    N: int
    K: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread, so that more programs fit a multiprocessor


class Class(NamedTuple):
    """Key of a configuration. It does not depend on batch size or lengths."""

    kernel: str
    unit: str  # the unit that multiplies: "fma", "mma", "wgmma", or "interpreter"
    head_dim: int  # 64, 128 or 256: no smaller than E and Ev
    extras: bool  # a mask or dropout, which take registers


# Configurations by kernel and by the unit that multiplies: fma for float32; for 16 bits mma, or
# wgmma where the GPU has it. Each row lists the configuration for calls without extras, the one for
# calls with extras, and others worth timing; a row of one serves all calls.
#
# They come from compiling ahead of time, with a causal bound, boolean and float masks, dropout and
# all of these: the largest tiles whose loops spill little or nothing. None has been timed on a GPU.
# With wgmma and two stages, loads begin as the previous step ends and are waited for at once; a
# third stage hides them. Shared memory stays under the 99 KiB of the smallest GPU with an mma unit
# for bfloat16, and under the 227 KiB of GPUs with wgmma.
_CONFIGS: dict[tuple[str, str], dict[int, tuple[tuple[int, ...], ...]]] = {
    ("forward", "fma"): {
        64: ((64, 32, 16, 8, 2),),
        128: ((64, 16, 16, 8, 2),),
        256: ((32, 16, 16, 8, 2),),
    },
    ("forward", "mma"): {
        64: ((128, 64, 0, 8, 3), (128, 32, 0, 8, 3), (64, 64, 0, 4, 3)),
        128: ((128, 32, 0, 8, 3), (64, 64, 0, 8, 2), (128, 64, 0, 8, 2)),
        256: ((64, 32, 0, 8, 2),),
    },
    ("forward", "wgmma"): {
        64: ((128, 64, 0, 8, 3, 128), (128, 64, 0, 8, 3), (64, 128, 0, 4, 3), (128, 128, 0, 8, 3)),
        128: ((128, 64, 0, 8, 3), (128, 64, 0, 8, 3), (64, 64, 0, 4, 3), (128, 128, 0, 8, 3)),
        256: ((128, 64, 0, 8, 2), (128, 32, 0, 8, 2), (64, 32, 0, 4, 3)),
    },
    ("rows", "fma"): dict.fromkeys((64, 128, 256), ((64, 32, 16, 8, 1),)),
    ("rows", "mma"): dict.fromkeys((64, 128, 256), ((64, 64, 64, 8, 1),)),
    ("rows", "wgmma"): dict.fromkeys((64, 128, 256), ((64, 64, 64, 8, 1),)),
    ("key_value", "fma"): {
        64: ((32, 64, 16, 8, 1), (16, 64, 16, 8, 2)),
        128: ((16, 32, 16, 8, 2),),
        256: ((16, 16, 16, 8, 2),),
    },
    ("key_value", "mma"): {
        64: ((32, 128, 0, 8, 2), (16, 64, 0, 8, 2), (32, 64, 0, 8, 2)),
        128: ((32, 64, 0, 8, 2), (32, 64, 0, 8, 2), (16, 128, 0, 8, 2)),
        256: ((16, 64, 0, 8, 1), (16, 64, 0, 8, 1), (16, 32, 0, 8, 1)),
    },
    ("key_value", "wgmma"): {
        64: ((64, 128, 0, 8, 3), (32, 128, 0, 8, 3), (32, 128, 0, 8, 2)),
        128: ((64, 128, 0, 8, 3), (32, 128, 0, 8, 3), (32, 128, 0, 8, 2)),
        256: ((32, 64, 0, 8, 2), (32, 64, 0, 8, 2), (64, 64, 0, 8, 2)),
    },
    ("query", "fma"): {
        64: ((64, 32, 16, 8, 2),),
        128: ((64, 16, 16, 8, 2),),
        256: ((32, 16, 16, 8, 2),),
    },
    ("query", "mma"): {
        64: ((128, 32, 0, 8, 2), (64, 32, 0, 8, 2)),
        128: ((64, 32, 0, 4, 2), (64, 32, 0, 8, 2)),
        256: ((64, 16, 0, 8, 1),),
    },
    ("query", "wgmma"): {
        64: ((128, 64, 0, 8, 3), (128, 64, 0, 8, 3), (64, 64, 0, 4, 3)),
        128: ((128, 64, 0, 8, 3), (128, 64, 0, 8, 2), (64, 64, 0, 4, 2)),
        256: ((128, 32, 0, 8, 2),),
    },
    ("mask", "fma"): dict.fromkeys((64, 128, 256), ((32, 64, 16, 8, 1),)),
    ("mask", "mma"): {
        64: ((64, 64, 0, 8, 1),),
        128: ((64, 64, 64, 8, 1),),
        256: ((64, 64, 32, 8, 1),),
    },
    ("mask", "wgmma"): dict.fromkeys((64, 128, 256), ((64, 64, 0, 8, 1),)),
}


@functools.cache
def configs(of: Class) -> tuple[Config, ...]:
    """Returns the configurations worth trying for a class; the first is used without autotuning."""
    if of.unit == "interpreter":
        return (Config(64, 32, 32, 4, 1),)
    row = _CONFIGS[of.kernel, of.unit][of.head_dim]
    default = row[min(of.extras, len(row) - 1)]
    return tuple(Config(*config) for config in dict.fromkeys((default, *row)))


# Launchers ---------------------------------------------------------------------------------------


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Implements the op ``attention_forward``: returns the output and the logsumexp."""
    tensors = (query, key, value, attn_mask, key_lengths, cu_seqlens_q, cu_seqlens_k, seed)
    for name, t in zip(_NAMES, tensors, strict=True):
        check_memory(name, t)
    call = _Call(tensors, *options)
    out = empty_like_layout(query, value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    call.launch("forward", call.query_grid(tail=True), _strided(out), lse)
    return out, lse


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements the op ``attention_backward``: returns the gradients."""
    *call_options, (_, _, _, mask_requires_grad) = options
    tensors = (query, key, value, attn_mask, key_lengths, cu_seqlens_q, cu_seqlens_k, seed)
    _check_backward(tensors, grad_out, grad_lse, out, lse, call_options)
    call = _Call(tensors, *call_options)
    do = _strided(grad_out)
    dlse = None if grad_lse is None else _strided(grad_lse)
    lse = lse.contiguous()
    vectors = RowVectors(peak=lse, log_total=None, delta=torch.empty_like(lse))
    if call.variant.large:
        vectors = vectors._replace(peak=torch.empty_like(lse), log_total=torch.empty_like(lse))
    grad_query, grad_key, grad_value = (
        empty_like_layout(x, x.shape[3]) for x in (query, key, value)
    )
    call.launch("rows", call.query_grid(tail=False), do, dlse, _strided(out), lse, vectors)
    grads = (_strided(grad_key), _strided(grad_value))
    call.launch("key_value", call.key_grid, do, vectors, *grads)
    call.launch("query", call.query_grid(tail=True), do, vectors, _strided(grad_query))
    grad_mask = query.new_empty(0)
    if mask_requires_grad:
        assert attn_mask is not None
        grad_mask = _mask_gradient(call, attn_mask, do, dlse, vectors)
    return grad_query, grad_key, grad_value, grad_mask


_NAMES = (
    "query", "key", "value", "attn_mask", "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "seed",
)  # fmt: skip


def _check_backward(
    tensors: tuple[Tensor | None, ...],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    options: Sequence[Any],
) -> None:
    """Raises ValueError unless the tensors of a backward still fit one call."""
    query, key, value, attn_mask, _, cu_seqlens_q, _, _ = tensors
    assert query is not None
    assert key is not None
    assert value is not None
    (B, H, Lq, E), (Hkv, Lk, Ev) = query.shape, value.shape[1:]
    shapes: list[Sequence[int]] = [(B, H, Lq, E), (B, Hkv, Lk, E), (B, Hkv, Lk, Ev)]
    if cu_seqlens_q is not None:
        B, Lq, Lk = cu_seqlens_q.numel() - 1, *options[:2]
    if attn_mask is None:
        shapes.append(())
    else:
        sizes = zip(attn_mask.shape, (B, H, Lq, Lk), strict=True)
        shapes.append([1 if given == 1 else full for given, full in sizes])
    shapes += [(B,), (B + 1,), (B + 1,), (1,)]
    for name, t, shape in zip(_NAMES, tensors, shapes, strict=True):
        check_shape(name, t, shape)
    check_shape("grad_out", grad_out, (*query.shape[:3], Ev))
    check_shape("out", out, grad_out.shape)
    check_shape("logsumexp", lse, query.shape[:3])
    check_shape("grad_logsumexp", grad_lse, query.shape[:3])


# A sum over broadcast dimensions is split until there are about this many programs: enough for any
# GPU, and a bound on the memory for the shares.
_MASK_PROGRAMS = 512


def _mask_gradient(
    call: _Call, attn_mask: Tensor, do: Strided, dlse: Strided | None, vectors: RowVectors
) -> Tensor:
    if attn_mask.numel() == 0:
        return attn_mask.new_empty(attn_mask.shape)
    shape = MaskShape(*(size != 1 for size in attn_mask.shape))
    block = call.configs("mask")[0]
    sizes = (call.sizes.B, call.sizes.H, triton.cdiv(call.sizes.Lq, block.M))
    terms = math.prod(n for n, full in zip(sizes, shape, strict=False) if not full)
    tiles = math.prod(n for n, full in zip(sizes, shape, strict=False) if full)
    tiles *= triton.cdiv(call.sizes.Lk, block.N) if shape.columns else 1
    chunk = triton.cdiv(terms, max(_MASK_PROGRAMS // max(tiles, 1), 1))
    shares = triton.cdiv(terms, chunk) if terms else 1
    grad = attn_mask.new_empty(attn_mask.shape)
    parts = grad if shares == 1 else grad.new_empty((shares, *grad.shape), dtype=torch.float32)
    grid = (tiles * shares,)
    static = {"shape": shape, "long": chunk > RUN.value}
    call.launch("mask", lambda meta: grid, do, dlse, vectors, parts, chunk, **static)
    return grad if shares == 1 else parts.sum(0).to(grad.dtype)


_KERNELS = {
    "forward": attention_forward_kernel,
    "rows": attention_backward_rows_kernel,
    "key_value": attention_backward_key_value_kernel,
    "query": attention_backward_query_kernel,
    "mask": attention_backward_mask_kernel,
}
_AUTOTUNE = os.environ.get("TRIFUSE_TRITON_AUTOTUNE") == "1"

Grid = Callable[[dict[str, Any]], tuple[int]]


class _Call:
    """A call of the operator, converted to the kernels' arguments."""

    def __init__(
        self,
        tensors: tuple[Tensor | None, ...],
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float | None,
        window_left: int,
        window_right: int,
        lower_right: bool,
        dropout_p: float,
    ) -> None:
        query, key, value, attn_mask, key_lengths, cu_seqlens_q, cu_seqlens_k, seed = tensors
        assert query is not None
        assert key is not None
        assert value is not None
        B, H, total_q, E = query.shape
        total_k, Ev = value.shape[2:]
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            B = cu_seqlens_q.numel() - 1
            # No sequence is longer than the total, but a mask may be sized for a longer one.
            if attn_mask is None or attn_mask.shape[2] == 1:
                max_seqlen_q = min(max_seqlen_q, total_q)
            if attn_mask is None or attn_mask.shape[3] == 1:
                max_seqlen_k = min(max_seqlen_k, total_k)
            # Programs are needed for tokens past the last sequence even if all sequences are empty.
            max_seqlen_q, max_seqlen_k = max(max_seqlen_q, 1), max(max_seqlen_k, 1)
            cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        scale = max(E, 1) ** -0.5 if scale is None else scale
        threshold = philox.threshold(dropout_p)
        mask = None
        bool_mask = attn_mask is not None and attn_mask.dtype == torch.bool
        if attn_mask is not None:
            mask = _strided(attn_mask.view(torch.uint8) if bool_mask else attn_mask)
        masked, left, right = mask is not None, window_left >= 0, window_right >= 0
        mask_rows = mask is not None and mask.strides[2] != 0
        mask_columns = mask is not None and mask.strides[3] != 0
        mask_runs = attn_mask is not None and attn_mask.shape[3] % MASK_RUN.value == 0
        farthest = max(total_q, total_k)  # a wider window bounds nothing
        single = ctypes.c_float(scale).value  # 0 or ∞ outside float32's range
        large = (masked and not bool_mask) or abs(single) > LARGE_SCALE
        self.query = query
        self.inputs = Inputs(
            query=_strided(query),
            key=_strided(key),
            value=_strided(value),
            attn_mask=mask,
            key_lengths=None if key_lengths is None else key_lengths.contiguous(),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seed=seed if threshold else None,
        )
        self.sizes = Sizes(
            B=B,
            H=H,
            group=max(H // max(key.shape[1], 1), 1),
            Lq=max_seqlen_q,
            Lk=max_seqlen_k,
            total_q=total_q,
            total_k=total_k,
            left=min(window_left, farthest),
            right=min(window_right, farthest),
            scale=single,
            scale_log2=ctypes.c_float(scale * math.log2(math.e)).value,
            threshold=threshold,
            keep_scale=philox.keep_scale(dropout_p),
        )
        self.variant = Variant(
            dtype=str(query.dtype),
            E=E,
            Ev=Ev,
            BLOCK_E=max(16, triton.next_power_of_2(E)),
            BLOCK_EV=max(16, triton.next_power_of_2(Ev)),
            bool_mask=bool_mask,
            float_mask=masked and not bool_mask,
            masked=masked,
            mask_rows=mask_rows,
            mask_columns=mask_columns,
            mask_runs=mask_runs,
            trim=mask_columns and (bool_mask or not mask_rows),
            large=large,
            natural=large or not single > 0,  # true for NaN
            lengths=key_lengths is not None,
            packed=cu_seqlens_q is not None,
            left=left,
            right=right,
            lower_right=lower_right and (left or right),
            selective=masked or left or right,
            dropout=threshold > 0,
            grouped=key.shape[1] != H,
        )

    def query_grid(self, tail: bool) -> Grid:
        """The grid over blocks of queries; ``tail`` adds packed tokens past the last sequence."""
        sequences = self.sizes.B + (tail and self.variant.packed)
        return lambda meta: (
            triton.cdiv(self.sizes.Lq, meta["block"].M) * self.sizes.H * sequences,
        )

    def key_grid(self, meta: dict[str, Any]) -> tuple[int]:
        blocks = triton.cdiv(self.sizes.Lk, meta["block"].N)
        return (blocks * (self.sizes.H // self.sizes.group) * (self.sizes.B + self.variant.packed),)

    def class_of(self, kernel: str) -> Class:
        variant = self.variant
        head_dim = max(64, variant.BLOCK_E, variant.BLOCK_EV)
        unit = _unit(self.query.device, self.query.dtype)
        return Class(kernel, unit, head_dim, extras=variant.masked or variant.dropout)

    def configs(self, kernel: str) -> tuple[Config, ...]:
        return configs(self.class_of(kernel))

    def launch(self, kernel: str, grid: Grid, *args: Any, **static: Any) -> None:
        of = self.class_of(kernel)
        arguments = (self.inputs, *args, *self.sizes)
        static |= {"variant": self.variant, "enable_fp_fusion": False}
        with torch.cuda.device_of(self.query):
            if _AUTOTUNE and len(configs(of)) > 1:
                _tuner(of)[grid](*arguments, **static)
            else:
                _KERNELS[kernel][grid](*arguments, **static, **_options(configs(of)[0]))


def _options(config: Config) -> dict[str, Any]:
    *block, num_warps, num_stages, max_registers = config
    return {
        "block": Block(*block), "num_warps": num_warps, "num_stages": num_stages,
        "maxnreg": max_registers,
    }  # fmt: skip


@functools.cache
def _tuner(of: Class) -> Any:
    """Times the configurations of a class once for each variant, and keeps the fastest."""
    candidates = [
        triton.Config({"block": options.pop("block")}, **options)
        for options in map(_options, configs(of))
    ]
    return triton.autotune(candidates, key=["variant"])(_KERNELS[of.kernel])


def _unit(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cpu":
        return "interpreter"
    if dtype == torch.float32:
        return "fma"
    return "wgmma" if _has_wgmma(device) else "mma"


@functools.cache
def _has_wgmma(device: torch.device) -> bool:
    """Hopper has wgmma, and data-centre Blackwell an equivalent."""
    return 9 <= torch.cuda.get_device_capability(device)[0] < 12


def _strided(x: Tensor) -> Strided:
    # The stride of a dimension of size 1 is arbitrary. 0 broadcasts the dimension, and leaves fewer
    # kinds of strides to compile kernels for.
    return Strided(x, tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)))
