"""Masked scaled dot-product attention, forward and backward, in Triton.

The formulas are those at the head of ``trifuse/reference/attention.py``. Nothing of size Lq × Lk is
stored: the forward keeps a running softmax over blocks of keys (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023), the backward computes
the weights again from the logsumexp. There are no atomics: every sum is taken by one program in a
fixed order, so results repeat bit for bit.

Three ideas run through all kernels:

- *Inside and edge.* Lengths, causality and window give each program a range of blocks that can hold
  a pair, and within it a range where every pair takes part as far as these are concerned. The
  second runs a loop without comparisons and with unguarded loads; only the few blocks at its ends
  pay for the rest. A mask that is the same for all queries narrows the first range too.
- *Hope and redo.* A NaN or Inf in a row that the mask leaves out must not come back as 0 · NaN from
  a matrix product. Cleaning every tile would take it out of the asynchronous path from memory to
  the tensor cores, so the kernels multiply as if all were finite. Only if a program ends up with a
  non-finite sum does it run again, cleaning as it goes (``_dot_over_pairs``).
- *Powers of 2.* exp(x) is exp2(x · log2 e), the factor folded into the scale. With a float mask the
  subtraction comes first: the mask may hold numbers near the end of float32's range.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels.philox import dropout_keep
from trifuse.reference import philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# From here on a float32 logsumexp is too coarse beside the scores of a float mask to normalise
# with: at the lowest finite number, where masks like to be, log ∑ exp is lost in it altogether.
COARSE_LOGSUMEXP = tl.constexpr(1024.0)


# What kernels are given --------------------------------------------------------------------------


class Strided(NamedTuple):
    """A tensor and its strides, in elements; 0 where a dimension is broadcast."""

    data: Tensor
    strides: tuple[int, ...]


class Inputs(NamedTuple):
    """The tensors of a call. With ``cu_seqlens``, B of query, key and value is 1 and L their total
    length."""

    query: Strided  # (B, H, Lq, E)
    key: Strided  # (B, Hkv, Lk, E)
    value: Strided  # (B, Hkv, Lk, Ev)
    attn_mask: Strided | None  # (B, H, Lq, Lk): uint8 for a boolean mask, or floating
    key_lengths: Tensor | None  # (B,)
    cu_seqlens_q: Tensor | None  # (B + 1,)
    cu_seqlens_k: Tensor | None  # (B + 1,)
    seed: Tensor | None  # (1,)


class Sizes(NamedTuple):
    """Numbers that change from call to call: no kernel is compiled again for them."""

    B: int  # sequences
    H: int
    group: int  # query heads per key head
    Lq: int  # of the longest sequence
    Lk: int
    total_q: int  # the size of the query's length dimension: Lq unless sequences are packed
    total_k: int
    left: int  # the window, where the variant says that there is one
    right: int
    scale: float
    scale_log2: float  # scale · log2 e
    sign: float  # of the scale, or 0
    factor: float  # sign · factor is scale_log2, and factor > 0
    threshold: int  # of dropout
    keep_scale: float


class Variant(NamedTuple):
    """What a kernel is compiled for: the parts of the operator that a call uses."""

    dtype: str
    E: int
    Ev: int
    BLOCK_E: int  # E as tile sizes have to be: a power of 2, no less than a tensor core takes
    BLOCK_EV: int
    bool_mask: bool
    float_mask: bool
    masked: bool  # either of them
    mask_rows: bool  # the mask differs between queries
    mask_columns: bool  # and between keys
    key_mask: bool  # between keys alone, as padding does
    lengths: bool
    packed: bool  # sequences end to end
    left: bool
    right: bool
    lower_right: bool
    selective: bool  # a tile that is loaded can hold pairs that don't take part
    dropout: bool


class Head(NamedTuple):
    """One query head of one sequence: where its tensors begin, and how far they go."""

    query: Any  # pointers to the first row
    key: Any
    value: Any
    mask: Any
    batch: Any  # indices into query, out and the like, and their gradients
    first_query: Any
    row: Any  # int64: where its entries begin in a contiguous (B, H, L)
    queries: Any
    keys: Any  # those before key_lengths
    shift: Any  # of the diagonal
    plane: Any  # of dropout
    seed: Any


# Pieces ------------------------------------------------------------------------------------------


@triton.jit
def _at(tensor, batch, head, row):
    """Pointer to a row's first element. Offsets are int64: a tensor may pass 2³¹ elements."""
    return (
        tensor.data
        + batch.to(tl.int64) * tensor.strides[0]
        + head.to(tl.int64) * tensor.strides[1]
        + row.to(tl.int64) * tensor.strides[2]
    )


@triton.jit
def _load_head(inputs, sizes, b, h, variant: tl.constexpr):
    batch = b
    first_query = b * 0
    first_key = b * 0
    queries = sizes.Lq
    keys = sizes.Lk
    if variant.packed:
        batch = b * 0
        first_query = tl.load(inputs.cu_seqlens_q + b)
        first_key = tl.load(inputs.cu_seqlens_k + b)
        queries = (tl.load(inputs.cu_seqlens_q + b + 1) - first_query).to(tl.int32)
        keys = (tl.load(inputs.cu_seqlens_k + b + 1) - first_key).to(tl.int32)
    shift = b * 0
    if variant.lower_right:
        shift = keys - queries
    if variant.lengths:
        keys = tl.load(inputs.key_lengths + b).to(tl.int32)
    mask = inputs.query.data
    if variant.masked:
        mask = _at(inputs.attn_mask, b, h, b * 0)
    seed = b * 0
    if variant.dropout:
        seed = tl.load(inputs.seed)
    return Head(
        query=_at(inputs.query, batch, h, first_query),
        key=_at(inputs.key, batch, h // sizes.group, first_key),
        value=_at(inputs.value, batch, h // sizes.group, first_key),
        mask=mask,
        batch=batch,
        first_query=first_query,
        row=(batch * sizes.H + h).to(tl.int64) * sizes.total_q + first_query,
        queries=queries,
        keys=keys,
        shift=shift,
        plane=b * sizes.H + h,
        seed=seed,
    )


@triton.jit
def _tile_offsets(strides, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None].to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    return rows * strides[2] + columns * strides[3]


@triton.jit
def _load_rows(
    pointer, strides, first, length, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """(ROWS, BLOCK_DIM) from row ``first`` on; 0 past ``length`` and past DIM."""
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    pointers = pointer + first.to(tl.int64) * strides[2] + _tile_offsets(strides, ROWS, BLOCK_DIM)
    if INSIDE:
        if DIM == BLOCK_DIM:
            return tl.load(pointers)
        return tl.load(pointers, mask=columns < DIM, other=0.0)
    rows = first + tl.arange(0, ROWS)[:, None]
    return tl.load(pointers, mask=(rows < length) & (columns < DIM), other=0.0)


@triton.jit
def _store_rows(
    pointer, strides, first, length, x, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    pointers = pointer + first.to(tl.int64) * strides[2] + _tile_offsets(strides, ROWS, BLOCK_DIM)
    x = x.to(pointer.dtype.element_ty)
    tl.store(pointers, x, mask=(rows < length) & (columns < DIM))


@triton.jit
def _store_zero_rows(
    tensor, h, start, stop, step, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Zeros in every ``step``-th row block of packed tokens ``start`` to ``stop``."""
    zeros = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    for first in range(start, stop, step):
        pointer = _at(tensor, h * 0, h, h * 0)
        _store_rows(pointer, tensor.strides, first, stop, zeros, ROWS, DIM, BLOCK_DIM)


@triton.jit
def _dot(a, b, acc):
    """acc + a @ b, in float32 throughout where a and b are."""
    if INTERPRETED:
        # numpy has no bfloat16, and would multiply the bit patterns.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _zero_non_finite(x):
    return tl.where(tl.abs(x.to(tl.float32)) < INF, x, 0.0).to(x.dtype)


@triton.jit
def _count_non_finite(keep, rows, count):
    """count + how many non-finite numbers each sum of ``rows`` over the pairs in ``keep`` holds."""
    bad = tl.where(tl.abs(rows.to(tl.float32)) < INF, 0.0, 1.0)
    return _dot(keep.to(tl.bfloat16), bad.to(tl.bfloat16), count)


@triton.jit
def _holds_non_finite(x):
    return tl.max((~(tl.abs(x) < INF)).to(tl.int32)) > 0


@triton.jit
def _infinite_to_nan(x):
    return tl.where(tl.abs(x) == INF, float("nan"), x)


@triton.jit
def _load_mask(head, strides, rows, columns, fill, variant: tl.constexpr, INSIDE: tl.constexpr):
    """The mask for ``rows`` and ``columns``, of size 1 in the directions it doesn't vary in.

    Columns are checked only at an edge: a comparison that differs between neighbours would break
    16-byte loads into single elements.
    """
    row_offsets = rows.to(tl.int64) * strides[2]
    column_offsets = columns.to(tl.int64) * strides[3]
    if variant.mask_rows and variant.mask_columns:
        guard = rows < head.queries
        if not INSIDE:
            guard = guard & (columns < head.keys)
        mask = tl.load(head.mask + (row_offsets + column_offsets), mask=guard, other=fill)
    elif variant.mask_rows:
        mask = tl.load(head.mask + row_offsets, mask=rows < head.queries, other=fill)
    elif variant.mask_columns and INSIDE:
        mask = tl.load(head.mask + column_offsets)
    elif variant.mask_columns:
        mask = tl.load(head.mask + column_offsets, mask=columns < head.keys, other=fill)
    else:
        mask = tl.load(head.mask)
    return mask


@triton.jit
def _take_part(head, inputs, sizes, rows, columns, variant: tl.constexpr, INSIDE: tl.constexpr):
    """Which pairs take part, and the float mask. Rows and columns may lie either way round."""
    keep = rows < head.queries
    if not INSIDE:
        keep = keep & (columns < head.keys)
        if variant.left:
            keep = keep & (columns >= rows + (head.shift - sizes.left))
        if variant.right:
            keep = keep & (columns <= rows + (head.shift + sizes.right))
    bias = 0.0
    if variant.bool_mask:
        mask = _load_mask(head, inputs.attn_mask.strides, rows, columns, 0, variant, INSIDE)
        keep = keep & (mask != 0)
    if variant.float_mask:
        mask = _load_mask(head, inputs.attn_mask.strides, rows, columns, -INF, variant, INSIDE)
        bias = mask.to(tl.float32)
        keep = keep & (bias != -INF)
    return keep, bias


@triton.jit
def _visible_keys(head, inputs, sizes, first, last, variant: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of keys for queries ``first`` to ``last`` - 1: [start, stop) can hold a pair, and lengths
    and window cut nothing from [inside, outside), which lies within. All are multiples of BLOCK_N.
    """
    start = head.keys * 0
    stop = head.keys
    inside = start
    outside = stop
    if variant.left:
        start = tl.maximum(first + head.shift - sizes.left, 0)
        inside = tl.maximum(last - 1 + head.shift - sizes.left, 0)
    if variant.right:
        stop = tl.minimum(last + head.shift + sizes.right, stop)
        outside = tl.maximum(tl.minimum(first + head.shift + sizes.right + 1, outside), 0)
    if variant.key_mask:
        start, stop = _kept_keys(head, inputs, start, stop, variant, BLOCK_N)
    start = start // BLOCK_N * BLOCK_N
    stop = tl.maximum(tl.cdiv(stop, BLOCK_N) * BLOCK_N, start)
    inside = tl.minimum(tl.maximum(tl.cdiv(inside, BLOCK_N) * BLOCK_N, start), stop)
    outside = tl.minimum(tl.maximum(outside // BLOCK_N * BLOCK_N, inside), stop)
    return start, inside, outside, stop


@triton.jit
def _kept_keys(head, inputs, start, stop, variant: tl.constexpr, BLOCK_N: tl.constexpr):
    """[start, stop) without the keys at its ends that a mask of keys leaves out."""
    from_key = stop
    to_key = start
    for first in range(start, stop, 4 * BLOCK_N):
        columns = first + tl.arange(0, 4 * BLOCK_N)
        pointers = head.mask + columns.to(tl.int64) * inputs.attn_mask.strides[3]
        guard = columns < stop
        if variant.bool_mask:
            keep = tl.load(pointers, mask=guard, other=0) != 0
        else:
            keep = tl.load(pointers, mask=guard, other=-INF) != -INF
        from_key = tl.minimum(from_key, tl.min(tl.where(keep, columns, stop), 0))
        to_key = tl.maximum(to_key, tl.max(tl.where(keep, columns + 1, start), 0))
    return tl.minimum(from_key, to_key), to_key


@triton.jit
def _visible_queries(head, sizes, first, variant: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """As ``_visible_keys``, with the blocks of queries that see keys ``first`` to + BLOCK_N - 1."""
    last = tl.minimum(first + BLOCK_N, head.keys)
    start = head.queries * 0
    stop = tl.where(first < head.keys, head.queries, 0)
    inside = start
    outside = tl.where(first + BLOCK_N <= head.keys, stop, 0)
    if variant.right:
        start = tl.maximum(first - head.shift - sizes.right, 0)
        inside = tl.maximum(last - 1 - head.shift - sizes.right, 0)
    if variant.left:
        stop = tl.minimum(last - head.shift + sizes.left, stop)
        outside = tl.maximum(tl.minimum(first - head.shift + sizes.left + 1, outside), 0)
    start = start // BLOCK_M * BLOCK_M
    stop = tl.maximum(tl.cdiv(stop, BLOCK_M) * BLOCK_M, start)
    inside = tl.minimum(tl.maximum(tl.cdiv(inside, BLOCK_M) * BLOCK_M, start), stop)
    outside = tl.minimum(tl.maximum(outside // BLOCK_M * BLOCK_M, inside), stop)
    return start, inside, outside, stop


@triton.jit
def _program(sizes, blocks, variant: tl.constexpr):
    """A block, a head and a sequence. Causal attention begins with the blocks that see most."""
    program = tl.program_id(0)
    block = program % blocks
    if variant.right:
        block = blocks - 1 - block
    return block, program // blocks % sizes.H, program // blocks // sizes.H


# Forward -----------------------------------------------------------------------------------------


@triton.jit
def _attend(
    acc, peak, total, query, first_row, start, stop, gap_start, gap_stop, head, inputs, sizes,
    variant: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INSIDE: tl.constexpr, CAREFUL: tl.constexpr, WITH_VALUES: tl.constexpr,
):  # fmt: skip
    """Takes the blocks of keys in [start, stop) without [gap_start, gap_stop) into the softmax.

    ``acc`` (BLOCK_M, BLOCK_EV) is ∑ p v, ``total`` (BLOCK_M,) ∑ p, for p = exp(score - peak) and
    ``peak`` the largest score so far: in units of log 2, with a float mask in natural ones.
    """
    rows = first_row + tl.arange(0, BLOCK_M)[:, None]
    STAGES: tl.constexpr = 1 if CAREFUL else None
    for step in tl.range(start, stop - (gap_stop - gap_start), BLOCK_N, num_stages=STAGES):
        first = step + tl.where(step < gap_start, 0, gap_stop - gap_start)
        columns = first + tl.arange(0, BLOCK_N)[None, :]
        key = _load_rows(
            head.key, inputs.key.strides, first, head.keys, BLOCK_N, variant.E, variant.BLOCK_E,
            INSIDE,
        )  # fmt: skip
        products = _dot(query, tl.trans(key), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        # ±Inf becomes NaN: from here on -∞ says that a pair takes no part.
        scores = tl.fma(products, 0.0, products)
        keep, bias = _take_part(head, inputs, sizes, rows, columns, variant, INSIDE)
        if variant.float_mask:
            scores = tl.fma(scores, sizes.scale, bias)
        if variant.masked or not INSIDE:
            scores = tl.where(keep, scores, -INF)
        top = tl.max(scores, 1)
        if not variant.float_mask:
            # One product per row instead of one per score; the factor is positive.
            top *= sizes.factor
        new_peak = tl.maximum(peak, top)
        # A row without a pair so far keeps a peak of -∞; any number will do to subtract.
        base = tl.where(new_peak == -INF, 0.0, new_peak)
        if variant.float_mask:
            p = tl.exp2((scores - base[:, None]) * LOG2E)
            shrink = tl.exp2((peak - base) * LOG2E)
        else:
            p = tl.exp2(tl.fma(scores, sizes.factor, -base[:, None]))
            shrink = tl.exp2(peak - base)
        total = tl.fma(total, shrink, tl.sum(p, 1))
        peak = new_peak
        if WITH_VALUES:
            acc = acc * shrink[:, None]
            if variant.dropout:
                kept = dropout_keep(
                    head.seed, head.plane, first_row, first, sizes.threshold, BLOCK_M, BLOCK_N
                )
                p = tl.where(kept, p, 0.0)
            value = _load_rows(
                head.value, inputs.value.strides, first, head.keys, BLOCK_N, variant.Ev,
                variant.BLOCK_EV, INSIDE,
            )  # fmt: skip
            if CAREFUL:
                value = _zero_non_finite(value)
            acc = _dot(p.to(value.dtype), value, acc)
    return acc, peak, total


@triton.jit
def _non_finite_keys(
    pointer, strides, first_row, start, stop, head, inputs, sizes, variant: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_DIM): how many non-finite numbers of keys or values each query is paired with."""
    rows = first_row + tl.arange(0, BLOCK_M)[:, None]
    count = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    for first in tl.range(start, stop, BLOCK_N, num_stages=1):
        columns = first + tl.arange(0, BLOCK_N)[None, :]
        keep = _take_part(head, inputs, sizes, rows, columns, variant, False)[0]
        x = _load_rows(pointer, strides, first, head.keys, BLOCK_N, DIM, BLOCK_DIM, False)
        count = _count_non_finite(keep, x, count)
    return count


@triton.jit(do_not_specialize=["sizes"])
def attention_forward_kernel(
    inputs,
    out,  # (B, H, Lq, Ev)
    lse,  # (B, H, Lq) float32, contiguous
    sizes,
    variant: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Output and logsumexp.

    A program owns BLOCK_M queries of one head of one sequence. It reads them once, and the keys and
    values that they see; it writes BLOCK_M rows of ``out`` and of ``lse``. Programs of one head are
    neighbours in the grid, so keys and values come from the L2 cache for all but the first.

    Floor: 2 · pairs · (E + Ev) operations of the matrix unit and pairs of the exponential unit, for
    B · H · (Lq · (E + Ev) + Lk · (E + Ev)) elements of memory.
    """
    blocks = tl.cdiv(sizes.Lq, BLOCK_M)
    block, h, b = _program(sizes, blocks, variant)
    first = block * BLOCK_M
    if variant.packed:
        if b == sizes.B:
            # Tokens past the last sequence.
            start = tl.load(inputs.cu_seqlens_q + b).to(tl.int32) + first
            step = blocks * BLOCK_M
            _store_zero_rows(
                out, h, start, sizes.total_q, step, BLOCK_M, variant.Ev, variant.BLOCK_EV
            )
            for token in range(start, sizes.total_q, step):
                rows = token + tl.arange(0, BLOCK_M)
                pointers = lse + h.to(tl.int64) * sizes.total_q + rows
                tl.store(pointers, tl.full((BLOCK_M,), -INF, tl.float32), rows < sizes.total_q)
            return
    head = _load_head(inputs, sizes, b, h, variant)
    if first >= head.queries:
        return
    last = tl.minimum(first + BLOCK_M, head.queries)
    start, inside, outside, stop = _visible_keys(
        head, inputs, sizes, first, last, variant, BLOCK_N
    )
    query = _load_rows(
        head.query, inputs.query.strides, first, head.queries, BLOCK_M, variant.E, variant.BLOCK_E,
        False,
    )  # fmt: skip
    if not variant.float_mask:
        # With a negative scale the largest score comes from the smallest product, unless the sign
        # goes to the query.
        query = (query * sizes.sign).to(query.dtype)
    acc = tl.zeros((BLOCK_M, variant.BLOCK_EV), tl.float32)
    peak = tl.full((BLOCK_M,), -INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc, peak, total = _attend(
        acc, peak, total, query, first, inside, outside, outside, outside, head, inputs, sizes,
        variant, BLOCK_M, BLOCK_N, True, False, True,
    )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, query, first, start, stop, inside, outside, head, inputs, sizes,
        variant, BLOCK_M, BLOCK_N, False, False, True,
    )  # fmt: skip
    if variant.selective:
        if _holds_non_finite(acc):
            acc, peak, total = _attend(
                tl.zeros_like(acc), tl.full((BLOCK_M,), -INF, tl.float32), tl.zeros_like(total),
                query, first, start, stop, stop, stop, head, inputs, sizes,
                variant, BLOCK_M, BLOCK_N, False, True, True,
            )  # fmt: skip
            count = _non_finite_keys(
                head.value, inputs.value.strides, first, start, stop, head, inputs, sizes, variant,
                BLOCK_M, BLOCK_N, variant.Ev, variant.BLOCK_EV,
            )  # fmt: skip
            acc = tl.where(count > 0.0, INF, acc)
    total = tl.where(total == 0.0, 1.0, total)
    result = _infinite_to_nan(acc * (sizes.keep_scale / total)[:, None])
    _store_rows(
        _at(out, head.batch, h, head.first_query), out.strides, first, head.queries, result,
        BLOCK_M, variant.Ev, variant.BLOCK_EV,
    )  # fmt: skip
    if variant.float_mask:
        logsumexp = peak + tl.log2(total) * LN2
    else:
        logsumexp = (peak + tl.log2(total)) * LN2
    rows = first + tl.arange(0, BLOCK_M)
    tl.store(lse + head.row + rows, logsumexp, rows < head.queries)


# Backward ----------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Per query, float32 (B, H, Lq), contiguous: what the backward needs besides the scores."""

    peak: Tensor  # the logsumexp; where that is too coarse, the largest score
    log_total: Tensor | None  # with a float mask: the rest of the logsumexp, in units of log 2
    delta: Tensor  # ∑ dO O - dlse


@triton.jit(do_not_specialize=["sizes"])
def attention_backward_rows_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    grad_lse,  # (B, H, Lq), or None
    out,  # (B, H, Lq, Ev)
    lse,  # (B, H, Lq) float32, contiguous
    results,  # Rows
    sizes,
    variant: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """delta = ∑ dO O - dlse, and with a float mask a logsumexp in two parts.

    A program owns BLOCK_M queries of one head of one sequence; it reads their rows of ``grad_out``
    and ``out`` and writes one number each. With a float mask, and only if it meets a logsumexp that
    a large mask has made coarse, it also runs through the keys for the exact sum.

    Floor: 2 · B · H · Lq · Ev elements of memory.
    """
    block, h, b = _program(sizes, tl.cdiv(sizes.Lq, BLOCK_M), variant)
    first = block * BLOCK_M
    head = _load_head(inputs, sizes, b, h, variant)
    if first >= head.queries:
        return
    rows = first + tl.arange(0, BLOCK_M)
    do = _load_rows(
        _at(grad_out, head.batch, h, head.first_query), grad_out.strides, first, head.queries, BLOCK_M, variant.Ev,
        variant.BLOCK_EV, False,
    ).to(tl.float32)  # fmt: skip
    o = _load_rows(
        _at(out, head.batch, h, head.first_query), out.strides, first, head.queries, BLOCK_M, variant.Ev,
        variant.BLOCK_EV, False,
    ).to(tl.float32)  # fmt: skip
    delta = tl.sum(do * o, 1)
    # Inf - Inf would do it too, but an output of 0 can hide an Inf from the sum.
    delta = tl.where(tl.max((~(tl.abs(do) < INF)).to(tl.int32), 1) > 0, float("nan"), delta)
    if grad_lse is not None:
        pointers = _at(grad_lse, head.batch, h, head.first_query) + rows.to(tl.int64) * grad_lse.strides[2]
        delta -= tl.load(pointers, rows < head.queries, other=0.0)
    tl.store(results.delta + head.row + rows, delta, rows < head.queries)
    if variant.float_mask:
        peak = tl.load(lse + head.row + rows, rows < head.queries, other=0.0)
        log_total = tl.zeros((BLOCK_M,), tl.float32)
        size = tl.where(peak == -INF, 0.0, tl.abs(peak))
        if tl.max(size, 0) > COARSE_LOGSUMEXP:
            start, inside, outside, stop = _visible_keys(
                head, inputs, sizes, first, tl.minimum(first + BLOCK_M, head.queries), variant,
                BLOCK_N,
            )  # fmt: skip
            query = _load_rows(
                head.query, inputs.query.strides, first, head.queries, BLOCK_M, variant.E,
                variant.BLOCK_E, False,
            )  # fmt: skip
            _, peak, total = _attend(
                log_total, tl.full((BLOCK_M,), -INF, tl.float32), log_total, query, first, start,
                stop, stop, stop, head, inputs, sizes, variant, BLOCK_M, BLOCK_N, False, False,
                False,
            )  # fmt: skip
            log_total = tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(results.peak + head.row + rows, peak, rows < head.queries)
        tl.store(results.log_total + head.row + rows, log_total, rows < head.queries)


@triton.jit
def _load_row_vectors(rows_of, head, rows, variant: tl.constexpr, INSIDE: tl.constexpr):
    """peak (with what log_total adds), log_total and delta of some queries; 0 past the last one."""
    guard = rows < head.queries
    pointers = head.row + rows
    peak = tl.load(rows_of.peak + pointers, mask=guard, other=0.0)
    log_total = peak
    if variant.float_mask:
        log_total = tl.load(rows_of.log_total + pointers, mask=guard, other=0.0)
    else:
        peak = peak * LOG2E
    delta = tl.load(rows_of.delta + pointers, mask=guard, other=0.0)
    return peak, log_total, delta


@triton.jit
def _weights(products, bias, peak, log_total, sizes, variant: tl.constexpr):
    """P = exp(score - logsumexp), broadcasting whichever way the vectors lie."""
    if variant.float_mask:
        above = tl.fma(products, sizes.scale, bias) - peak
        return tl.exp2(tl.fma(above, LOG2E, -log_total))
    return tl.exp2(tl.fma(products, sizes.scale_log2, -peak))


@triton.jit
def _collect(
    grad_key, grad_value, key, value, first_column, start, stop, gap_start, gap_stop, head,
    inputs, grad_out, grad_out_strides, rows_of, sizes,
    variant: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INSIDE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Adds to dK and dV what the queries in [start, stop) without [gap_start, gap_stop) give.

    Tiles lie with a row per key: weights computed that way round are the left operand of both
    products that follow, straight from registers.
    """
    columns = first_column + tl.arange(0, BLOCK_N)[:, None]
    STAGES: tl.constexpr = 1 if CAREFUL else None
    for step in tl.range(start, stop - (gap_stop - gap_start), BLOCK_M, num_stages=STAGES):
        first = step + tl.where(step < gap_start, 0, gap_stop - gap_start)
        rows = first + tl.arange(0, BLOCK_M)[None, :]
        query = _load_rows(
            head.query, inputs.query.strides, first, head.queries, BLOCK_M, variant.E,
            variant.BLOCK_E, INSIDE,
        )  # fmt: skip
        products = _dot(key, tl.trans(query), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        do = _load_rows(
            grad_out, grad_out_strides, first, head.queries, BLOCK_M, variant.Ev,
            variant.BLOCK_EV, INSIDE,
        )  # fmt: skip
        peak, log_total, delta = _load_row_vectors(rows_of, head, rows, variant, INSIDE)
        keep, bias = _take_part(head, inputs, sizes, rows, columns, variant, INSIDE)
        p = _weights(products, bias, peak, log_total, sizes, variant)
        if variant.masked or not INSIDE:
            p = tl.where(keep, p, 0.0)
        grad_p = _dot(value, tl.trans(do), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        dropped = p
        if variant.dropout:
            kept = tl.trans(
                dropout_keep(
                    head.seed, head.plane, first, first_column, sizes.threshold, BLOCK_M, BLOCK_N
                )
            )
            dropped = tl.where(kept, p, 0.0)
            grad_p = tl.where(kept, grad_p * sizes.keep_scale, 0.0)
        grad_scores = p * (grad_p - delta)
        if variant.masked or not INSIDE:
            grad_scores = tl.where(keep, grad_scores, 0.0)
        if CAREFUL:
            do = _zero_non_finite(do)
            query = _zero_non_finite(query)
        grad_value = _dot(dropped.to(do.dtype), do, grad_value)
        grad_key = _dot(grad_scores.to(query.dtype), query, grad_key)
    return grad_key, grad_value


@triton.jit
def _non_finite_queries(
    tensor, first_column, kv_head, b, inputs, sizes, variant: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_DIM): how many non-finite numbers of q or dO each key is paired with."""
    columns = first_column + tl.arange(0, BLOCK_N)[:, None]
    count = tl.zeros((BLOCK_N, BLOCK_DIM), tl.float32)
    for member in range(sizes.group):
        h = kv_head * sizes.group + member
        head = _load_head(inputs, sizes, b, h, variant)
        pointer = _at(tensor, head.batch, h, head.first_query)
        start, _inside, _outside, stop = _visible_queries(head, sizes, first_column, variant, BLOCK_M, BLOCK_N)
        for first in tl.range(start, stop, BLOCK_M, num_stages=1):
            rows = first + tl.arange(0, BLOCK_M)[None, :]
            keep = _take_part(head, inputs, sizes, rows, columns, variant, False)[0]
            x = _load_rows(
                pointer, tensor.strides, first, head.queries, BLOCK_M, DIM, BLOCK_DIM, False
            )
            count = _count_non_finite(keep, x, count)
    return count


@triton.jit
def _collect_group(
    grad_key, grad_value, key, value, b, kv_head, first, inputs, grad_out, rows_of, sizes,
    variant: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """All query heads that share a key head."""
    for member in range(sizes.group):
        h = kv_head * sizes.group + member
        head = _load_head(inputs, sizes, b, h, variant)
        do = _at(grad_out, head.batch, h, head.first_query)
        start, inside, outside, stop = _visible_queries(
            head, sizes, first, variant, BLOCK_M, BLOCK_N
        )
        if CAREFUL:
            grad_key, grad_value = _collect(
                grad_key, grad_value, key, value, first, start, stop, stop, stop, head, inputs, do,
                grad_out.strides, rows_of, sizes, variant, BLOCK_M, BLOCK_N, False, True,
            )  # fmt: skip
        else:
            grad_key, grad_value = _collect(
                grad_key, grad_value, key, value, first, inside, outside, outside, outside, head,
                inputs, do, grad_out.strides, rows_of, sizes, variant, BLOCK_M, BLOCK_N, True, False,
            )  # fmt: skip
            grad_key, grad_value = _collect(
                grad_key, grad_value, key, value, first, start, stop, inside, outside, head, inputs,
                do, grad_out.strides, rows_of, sizes, variant, BLOCK_M, BLOCK_N, False, False,
            )  # fmt: skip
    return grad_key, grad_value


@triton.jit(do_not_specialize=["sizes"])
def attention_backward_key_value_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    rows_of,  # Rows
    grad_key,  # (B, Hkv, Lk, E)
    grad_value,  # (B, Hkv, Lk, Ev)
    sizes,
    variant: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dV_j = ∑_i D_ij P_ij dO_i and dK_j = scale ∑_i dS_ij q_i.

    A program owns BLOCK_N keys of one key head of one sequence, and runs through the queries that
    see them, of every query head that shares the key head: no sum is split. It reads its keys and
    values once, and for each query q, dO, logsumexp and delta; it writes BLOCK_N rows of dK and dV.

    Floor: 4 · pairs · (E + Ev) operations of the matrix unit.
    """
    blocks = tl.cdiv(sizes.Lk, BLOCK_N)
    kv_heads = sizes.H // sizes.group
    program = tl.program_id(0)
    first = program % blocks * BLOCK_N  # causal: the first keys are seen most
    kv_head = program // blocks % kv_heads
    b = program // blocks // kv_heads
    batch = b
    token = b * 0
    stored = sizes.Lk
    if variant.packed:
        token = tl.load(inputs.cu_seqlens_k + b)
        if b == sizes.B:
            start = token.to(tl.int32) + first
            step = blocks * BLOCK_N
            _store_zero_rows(
                grad_key, kv_head, start, sizes.total_k, step, BLOCK_N, variant.E, variant.BLOCK_E
            )
            _store_zero_rows(
                grad_value, kv_head, start, sizes.total_k, step, BLOCK_N, variant.Ev,
                variant.BLOCK_EV,
            )  # fmt: skip
            return
        batch = b * 0
        stored = (tl.load(inputs.cu_seqlens_k + b + 1) - token).to(tl.int32)
    if first >= stored:
        return
    keys = stored
    if variant.lengths:
        keys = tl.load(inputs.key_lengths + b).to(tl.int32)
    key = _load_rows(
        _at(inputs.key, batch, kv_head, token), inputs.key.strides, first, keys, BLOCK_N, variant.E,
        variant.BLOCK_E, False,
    )  # fmt: skip
    value = _load_rows(
        _at(inputs.value, batch, kv_head, token), inputs.value.strides, first, keys, BLOCK_N,
        variant.Ev, variant.BLOCK_EV, False,
    )  # fmt: skip
    dk = tl.zeros((BLOCK_N, variant.BLOCK_E), tl.float32)
    dv = tl.zeros((BLOCK_N, variant.BLOCK_EV), tl.float32)
    dk, dv = _collect_group(
        dk, dv, key, value, b, kv_head, first, inputs, grad_out, rows_of, sizes, variant, BLOCK_M,
        BLOCK_N, False,
    )  # fmt: skip
    if variant.selective:
        if _holds_non_finite(dk) | _holds_non_finite(dv):
            dk, dv = _collect_group(
                tl.zeros_like(dk), tl.zeros_like(dv), key, value, b, kv_head, first, inputs,
                grad_out, rows_of, sizes, variant, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip
            count = _non_finite_queries(
                inputs.query, first, kv_head, b, inputs, sizes, variant, BLOCK_M, BLOCK_N,
                variant.E, variant.BLOCK_E,
            )  # fmt: skip
            dk = tl.where(count > 0.0, INF, dk)
            count = _non_finite_queries(
                grad_out, first, kv_head, b, inputs, sizes, variant, BLOCK_M, BLOCK_N,
                variant.Ev, variant.BLOCK_EV,
            )  # fmt: skip
            dv = tl.where(count > 0.0, INF, dv)
    _store_rows(
        _at(grad_key, batch, kv_head, token), grad_key.strides, first, stored,
        _infinite_to_nan(dk * sizes.scale), BLOCK_N, variant.E, variant.BLOCK_E,
    )  # fmt: skip
    _store_rows(
        _at(grad_value, batch, kv_head, token), grad_value.strides, first, stored,
        _infinite_to_nan(dv * sizes.keep_scale), BLOCK_N, variant.Ev, variant.BLOCK_EV,
    )  # fmt: skip


@triton.jit
def _grad_scores(
    query, do, peak, log_total, delta, first_row, first_column, key, head, inputs, sizes,
    variant: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """dS (BLOCK_M, BLOCK_N), 0 for pairs that don't take part."""
    rows = first_row + tl.arange(0, BLOCK_M)[:, None]
    columns = first_column + tl.arange(0, BLOCK_N)[None, :]
    products = _dot(query, tl.trans(key), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
    value = _load_rows(
        head.value, inputs.value.strides, first_column, head.keys, BLOCK_N, variant.Ev,
        variant.BLOCK_EV, INSIDE,
    )  # fmt: skip
    grad_p = _dot(do, tl.trans(value), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
    if variant.dropout:
        kept = dropout_keep(
            head.seed, head.plane, first_row, first_column, sizes.threshold, BLOCK_M, BLOCK_N
        )
        grad_p = tl.where(kept, grad_p * sizes.keep_scale, 0.0)
    keep, bias = _take_part(head, inputs, sizes, rows, columns, variant, INSIDE)
    p = _weights(products, bias, peak[:, None], log_total[:, None], sizes, variant)
    grad_scores = p * (grad_p - delta[:, None])
    if variant.masked or not INSIDE:
        grad_scores = tl.where(keep, grad_scores, 0.0)
    return grad_scores


@triton.jit
def _gather(
    grad_query, query, do, peak, log_total, delta, first_row, start, stop, gap_start, gap_stop,
    head, inputs, sizes, variant: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INSIDE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Adds to dQ what the keys in [start, stop) without [gap_start, gap_stop) give."""
    STAGES: tl.constexpr = 1 if CAREFUL else None
    for step in tl.range(start, stop - (gap_stop - gap_start), BLOCK_N, num_stages=STAGES):
        first = step + tl.where(step < gap_start, 0, gap_stop - gap_start)
        key = _load_rows(
            head.key, inputs.key.strides, first, head.keys, BLOCK_N, variant.E, variant.BLOCK_E,
            INSIDE,
        )  # fmt: skip
        grad_scores = _grad_scores(
            query, do, peak, log_total, delta, first_row, first, key, head, inputs, sizes, variant,
            BLOCK_M, BLOCK_N, INSIDE,
        )  # fmt: skip
        if CAREFUL:
            key = _zero_non_finite(key)
        grad_query = _dot(grad_scores.to(key.dtype), key, grad_query)
    return grad_query


@triton.jit(do_not_specialize=["sizes"])
def attention_backward_query_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    rows_of,  # Rows
    grad_query,  # (B, H, Lq, E)
    sizes,
    variant: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dQ_i = scale ∑_j dS_ij k_j.

    A program owns BLOCK_M queries of one head of one sequence and runs through the keys that they
    see. It reads q, dO, logsumexp and delta once, and the keys and values; it writes BLOCK_M rows.

    Floor: 2 · pairs · (2 E + Ev) operations of the matrix unit. Two of the three products are also
    made for dK and dV: the price of sums that are never split between programs.
    """
    blocks = tl.cdiv(sizes.Lq, BLOCK_M)
    block, h, b = _program(sizes, blocks, variant)
    first = block * BLOCK_M
    if variant.packed:
        if b == sizes.B:
            start = tl.load(inputs.cu_seqlens_q + b).to(tl.int32) + first
            _store_zero_rows(
                grad_query, h, start, sizes.total_q, blocks * BLOCK_M, BLOCK_M, variant.E,
                variant.BLOCK_E,
            )  # fmt: skip
            return
    head = _load_head(inputs, sizes, b, h, variant)
    if first >= head.queries:
        return
    last = tl.minimum(first + BLOCK_M, head.queries)
    start, inside, outside, stop = _visible_keys(
        head, inputs, sizes, first, last, variant, BLOCK_N
    )
    query = _load_rows(
        head.query, inputs.query.strides, first, head.queries, BLOCK_M, variant.E, variant.BLOCK_E,
        False,
    )  # fmt: skip
    do = _load_rows(
        _at(grad_out, head.batch, h, head.first_query), grad_out.strides, first, head.queries, BLOCK_M, variant.Ev,
        variant.BLOCK_EV, False,
    )  # fmt: skip
    rows = first + tl.arange(0, BLOCK_M)
    peak, log_total, delta = _load_row_vectors(rows_of, head, rows, variant, False)
    dq = tl.zeros((BLOCK_M, variant.BLOCK_E), tl.float32)
    dq = _gather(
        dq, query, do, peak, log_total, delta, first, inside, outside, outside, outside, head,
        inputs, sizes, variant, BLOCK_M, BLOCK_N, True, False,
    )  # fmt: skip
    dq = _gather(
        dq, query, do, peak, log_total, delta, first, start, stop, inside, outside, head, inputs,
        sizes, variant, BLOCK_M, BLOCK_N, False, False,
    )  # fmt: skip
    if variant.selective:
        if _holds_non_finite(dq):
            dq = _gather(
                tl.zeros_like(dq), query, do, peak, log_total, delta, first, start, stop, stop,
                stop, head, inputs, sizes, variant, BLOCK_M, BLOCK_N, False, True,
            )  # fmt: skip
            count = _non_finite_keys(
                head.key, inputs.key.strides, first, start, stop, head, inputs, sizes, variant,
                BLOCK_M, BLOCK_N, variant.E, variant.BLOCK_E,
            )  # fmt: skip
            dq = tl.where(count > 0.0, INF, dq)
    _store_rows(
        _at(grad_query, head.batch, h, head.first_query), grad_query.strides, first, head.queries,
        _infinite_to_nan(dq * sizes.scale), BLOCK_M, variant.E, variant.BLOCK_E,
    )  # fmt: skip


class MaskShape(NamedTuple):
    """Which dimensions of the mask's gradient are full; the others are sums."""

    batch: bool
    heads: bool
    rows: bool
    columns: bool


@triton.jit(do_not_specialize=["sizes", "chunk"])
def attention_backward_mask_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    grad_lse,  # (B, H, Lq), or None
    rows_of,  # Rows
    grad_mask,  # (splits, *attn_mask.shape), contiguous
    chunk,  # how many terms a split sums
    sizes,
    shape: tl.constexpr,  # MaskShape
    variant: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The float mask's gradient: dS, summed over the dimensions that the mask is broadcast in.

    A program owns a tile of the gradient (a row of a tile, where all queries share the mask) and a
    share of the sum: it computes dS again for one batch entry, head and block of queries after
    another. The shares of a tile are added up afterwards, in order.

    A mask that all keys share shifts whole rows, which moves their logsumexp and nothing else: its
    gradient is dlse, and no scores are needed.

    Floor: 2 · pairs · (E + Ev) operations of the matrix unit.
    """
    row_blocks = tl.cdiv(sizes.Lq, BLOCK_M)
    column_blocks = 1
    if shape.columns:
        column_blocks = tl.cdiv(sizes.Lk, BLOCK_N)
    # The tile: columns fastest, then rows, heads, batch and the share of the sum.
    index = tl.program_id(0)
    own_column = index % column_blocks * BLOCK_N
    index = index // column_blocks
    own_row = index * 0
    if shape.rows:
        own_row = index % row_blocks * BLOCK_M
        index = index // row_blocks
    own_head = index * 0
    if shape.heads:
        own_head = index % sizes.H
        index = index // sizes.H
    own_batch = index * 0
    if shape.batch:
        own_batch = index % sizes.B
        index = index // sizes.B
    # The sum: query blocks fastest, then heads, then batch.
    terms = index * 0 + 1
    if not shape.rows:
        terms *= row_blocks
    if not shape.heads:
        terms *= sizes.H
    if not shape.batch:
        terms *= sizes.B

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row_sums = tl.zeros((BLOCK_M,), tl.float32)
    for term in range(index * chunk, tl.minimum((index + 1) * chunk, terms)):
        rest = term
        first_row = own_row
        h = own_head
        b = own_batch
        if not shape.rows:
            first_row = rest % row_blocks * BLOCK_M
            rest = rest // row_blocks
        if not shape.heads:
            h = rest % sizes.H
            rest = rest // sizes.H
        if not shape.batch:
            b = rest
        head = _load_head(inputs, sizes, b, h, variant)
        rows = first_row + tl.arange(0, BLOCK_M)
        peak, log_total, delta = _load_row_vectors(rows_of, head, rows, variant, False)
        if shape.columns:
            start, _inside, _outside, stop = _visible_keys(
                head, inputs, sizes, first_row, tl.minimum(first_row + BLOCK_M, head.queries),
                variant, BLOCK_N,
            )  # fmt: skip
            if (first_row < head.queries) & (start <= own_column) & (own_column < stop):
                query = _load_rows(
                    head.query, inputs.query.strides, first_row, head.queries, BLOCK_M, variant.E,
                    variant.BLOCK_E, False,
                )  # fmt: skip
                do = _load_rows(
                    _at(grad_out, head.batch, h, head.first_query), grad_out.strides, first_row, head.queries,
                    BLOCK_M, variant.Ev, variant.BLOCK_EV, False,
                )  # fmt: skip
                key = _load_rows(
                    head.key, inputs.key.strides, own_column, head.keys, BLOCK_N, variant.E,
                    variant.BLOCK_E, False,
                )  # fmt: skip
                grad_scores = _grad_scores(
                    query, do, peak, log_total, delta, first_row, own_column, key, head, inputs,
                    sizes, variant, BLOCK_M, BLOCK_N, False,
                )  # fmt: skip
                acc += grad_scores
        else:
            grad = tl.zeros((BLOCK_M,), tl.float32)
            if grad_lse is not None:
                pointers = _at(grad_lse, head.batch, h, head.first_query) + rows.to(tl.int64) * grad_lse.strides[2]
                grad = tl.load(pointers, rows < head.queries, other=0.0)
            # A row that a NaN has reached says so in these two.
            grad = tl.fma(peak + delta, 0.0, grad)
            row_sums += tl.where((rows < head.queries) & (peak != -INF), grad, 0.0)

    width = 1
    if shape.columns:
        width = sizes.Lk
    height = 1
    if shape.rows:
        height = sizes.Lq
    plane = index.to(tl.int64)
    if shape.batch:
        plane = plane * sizes.B + own_batch
    if shape.heads:
        plane = plane * sizes.H + own_head
    rows = own_row + tl.arange(0, BLOCK_M)
    columns = own_column + tl.arange(0, BLOCK_N)
    pointer = grad_mask + plane * height * width
    if shape.columns and shape.rows:
        pointers = pointer + rows[:, None].to(tl.int64) * width + columns[None, :]
        guard = (rows[:, None] < height) & (columns[None, :] < width)
        tl.store(pointers, acc.to(pointer.dtype.element_ty), guard)
    elif shape.columns:
        tl.store(pointer + columns, tl.sum(acc, 0).to(pointer.dtype.element_ty), columns < width)
    elif shape.rows:
        tl.store(pointer + rows, row_sums.to(pointer.dtype.element_ty), rows < height)
    else:
        tl.store(pointer, tl.sum(row_sums, 0).to(pointer.dtype.element_ty))


# Configurations ----------------------------------------------------------------------------------


class Config(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


class Class(NamedTuple):
    """What decides between configurations; nothing that changes with batch size or lengths."""

    kernel: str
    architecture: str
    bits: int
    head_dim: int  # 64, 128 or 256: no smaller than E and Ev


CONFIGS: dict[str, Config] = {}


def configs(of: Class) -> tuple[Config, ...]:
    """The configurations worth trying for a class, the one used without autotuning first."""
    if of.architecture == "interpreter":
        return (Config(32, 32, 4, 1),)
    if of.bits == 32:
        return (Config(32, 32, 4, 1),)
    if of.kernel == "forward":
        return (Config(128, 64, 8 if of.head_dim > 64 else 4, 3),)
    return (Config(64, 64, 4 if of.head_dim <= 64 else 8, 2),)


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
    """Output and logsumexp: arguments and results of the op ``attention_forward``."""
    tensors = (query, key, value, attn_mask, key_lengths, cu_seqlens_q, cu_seqlens_k, seed)
    inputs, sizes, variant = _describe(*tensors, *options)
    out = _empty_like_layout(query, value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        blocks = triton.cdiv(sizes.Lq, meta["BLOCK_M"])
        return (blocks * sizes.H * (sizes.B + variant.packed),)

    _launch("forward", query, grid, variant, inputs, _strided(out), lse, sizes)
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
    """The gradients: arguments and results of the op ``attention_backward``."""
    *options, mask_requires_grad = options
    tensors = (query, key, value, attn_mask, key_lengths, cu_seqlens_q, cu_seqlens_k, seed)
    inputs, sizes, variant = _describe(*tensors, *options)
    do = _strided(grad_out)
    dlse = None if grad_lse is None else _strided(grad_lse)
    lse = lse.contiguous()
    rows = Rows(lse, None, torch.empty_like(lse))
    if variant.float_mask:
        rows = rows._replace(peak=torch.empty_like(lse), log_total=torch.empty_like(lse))

    def query_grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(sizes.Lq, meta["BLOCK_M"]) * sizes.H * sizes.B,)

    _launch("rows", query, query_grid, variant, inputs, do, dlse, _strided(out), lse, rows, sizes)

    grad_query, grad_key, grad_value = (
        _empty_like_layout(x, x.shape[3]) for x in (query, key, value)
    )

    def key_grid(meta: dict[str, Any]) -> tuple[int]:
        blocks = triton.cdiv(sizes.Lk, meta["BLOCK_N"])
        return (blocks * (sizes.H // sizes.group) * (sizes.B + variant.packed),)

    grads = (_strided(grad_key), _strided(grad_value))
    _launch("key_value", query, key_grid, variant, inputs, do, rows, *grads, sizes)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        blocks = triton.cdiv(sizes.Lq, meta["BLOCK_M"])
        return (blocks * sizes.H * (sizes.B + variant.packed),)

    _launch("query", query, grid, variant, inputs, do, rows, _strided(grad_query), sizes)
    if not mask_requires_grad:
        return grad_query, grad_key, grad_value, query.new_empty(0)
    assert attn_mask is not None
    grad_mask = _mask_gradient(query, attn_mask, do, dlse, rows, inputs, sizes, variant)
    return grad_query, grad_key, grad_value, grad_mask


# A sum over broadcast dimensions is shared out until there are about so many programs.
_MASK_PROGRAMS = 512


def _mask_gradient(
    query: Tensor,
    attn_mask: Tensor,
    grad_out: Strided,
    grad_lse: Strided | None,
    rows: Rows,
    inputs: Inputs,
    sizes: Sizes,
    variant: Variant,
) -> Tensor:
    full = [attn_mask.shape[0] != 1, attn_mask.shape[1] != 1, attn_mask.shape[2] != 1]
    shape = MaskShape(*full, attn_mask.shape[3] != 1)
    config = configs(_class("mask", query, variant))[0]
    blocks = triton.cdiv(sizes.Lq, config.BLOCK_M)
    counts = (sizes.B, sizes.H, blocks)
    tiles = triton.cdiv(sizes.Lk, config.BLOCK_N) if shape.columns else 1
    terms = 1
    for count, is_full in zip(counts, full, strict=True):
        if is_full:
            tiles *= count
        else:
            terms *= count
    splits = max(1, min(terms, _MASK_PROGRAMS // max(tiles, 1)))
    chunk = max(1, triton.cdiv(terms, splits))
    splits = max(1, triton.cdiv(terms, chunk))
    grad = attn_mask.new_empty(attn_mask.shape)
    parts = grad if splits == 1 else query.new_empty((splits, *grad.shape), dtype=torch.float32)
    _launch(
        "mask", query, lambda meta: (tiles * splits,), variant, inputs, grad_out, grad_lse, rows,
        parts, chunk, sizes, shape,
    )  # fmt: skip
    return grad if splits == 1 else parts.sum(0).to(grad.dtype)


_KERNELS = {
    "forward": attention_forward_kernel,
    "rows": attention_backward_rows_kernel,
    "key_value": attention_backward_key_value_kernel,
    "query": attention_backward_query_kernel,
    "mask": attention_backward_mask_kernel,
}


def _launch(kernel: str, query: Tensor, grid: Any, variant: Variant, *args: Any) -> None:
    config = configs(_class(kernel, query, variant))[0]
    with torch.cuda.device_of(query):
        _KERNELS[kernel][grid](*args, variant=variant, enable_fp_fusion=False, **config._asdict())


def _class(kernel: str, query: Tensor, variant: Variant) -> Class:
    head_dim = max(64, variant.BLOCK_E, variant.BLOCK_EV)
    return Class(kernel, _architecture(query.device), query.dtype.itemsize * 8, head_dim)


def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return "interpreter"
    return "sm90" if torch.cuda.get_device_capability(device) >= (9, 0) else "sm80"


def _describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    window_left: int,
    window_right: int,
    lower_right: bool,
    dropout_p: float,
) -> tuple[Inputs, Sizes, Variant]:
    B, H, total_q, E = query.shape
    total_k = key.shape[2]
    packed = cu_seqlens_q is not None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        B = cu_seqlens_q.numel() - 1
        # At least one block of programs has to be there for tokens past the last sequence.
        max_seqlen_q, max_seqlen_k = max(max_seqlen_q, 1), max(max_seqlen_k, 1)
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    scale = max(E, 1) ** -0.5 if scale is None else scale
    threshold = philox.threshold(dropout_p)
    mask = None
    if attn_mask is not None:
        mask = _strided(attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else attn_mask)
    inputs = Inputs(
        _strided(query),
        _strided(key),
        _strided(value),
        mask,
        None if key_lengths is None else key_lengths.contiguous(),
        cu_seqlens_q,
        cu_seqlens_k,
        seed if threshold else None,
    )
    farthest = total_q + total_k  # a window beyond it is no bound
    sizes = Sizes(
        B=B,
        H=H,
        group=max(H // max(key.shape[1], 1), 1),
        Lq=max_seqlen_q,
        Lk=max_seqlen_k,
        total_q=total_q,
        total_k=total_k,
        left=min(window_left, farthest),
        right=min(window_right, farthest),
        scale=scale,
        scale_log2=scale * LOG2E.value,
        sign=math.copysign(1.0, scale) if scale else 0.0,
        factor=abs(scale) * LOG2E.value if scale else 1.0,
        threshold=threshold,
        keep_scale=philox.keep_scale(dropout_p),
    )
    masked, left, right = mask is not None, window_left >= 0, window_right >= 0
    bool_mask = attn_mask is not None and attn_mask.dtype == torch.bool
    mask_rows = mask is not None and mask.strides[2] != 0
    mask_columns = mask is not None and mask.strides[3] != 0
    variant = Variant(
        dtype=str(query.dtype),
        E=E,
        Ev=value.shape[3],
        BLOCK_E=_block(E),
        BLOCK_EV=_block(value.shape[3]),
        bool_mask=bool_mask,
        float_mask=masked and not bool_mask,
        masked=masked,
        mask_rows=mask_rows,
        mask_columns=mask_columns,
        key_mask=mask_columns and not mask_rows,
        lengths=key_lengths is not None,
        packed=packed,
        left=left,
        right=right,
        lower_right=lower_right and (left or right),
        selective=masked or left or right,
        dropout=threshold > 0,
    )
    return inputs, sizes, variant


def _block(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _strided(x: Tensor) -> Strided:
    # The stride of a dimension of size 1 is arbitrary. 0 repeats it where it is broadcast, and
    # gives kernels fewer kinds of strides to be compiled for.
    strides = (0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
    return Strided(x, tuple(strides))


def _empty_like_layout(like: Tensor, last_dim: int) -> Tensor:
    """As the op's fake in trifuse/ops/attention.py says: in memory order (B, L, H) if ``like`` is."""
    B, H, L, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty(B, L, H, last_dim).transpose(1, 2)
    return like.new_empty(B, H, L, last_dim)
