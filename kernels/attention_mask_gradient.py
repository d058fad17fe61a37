"""The gradient of attention's float mask: dS, summed over the dimensions of its broadcasts."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trifuse.kernels.arithmetic import end_run
from trifuse.kernels.attention_arguments import Sizes
from trifuse.kernels.attention_backward import grad_scores, load_row_values
from trifuse.kernels.attention_tiles import (
    INF,
    load_head,
    load_operand,
    row_pointer,
    tile_like_query,
    tile_of_keys,
    tile_of_queries,
)

# Number of terms of a mask's gradient that are summed as one chain.
RUN = tl.constexpr(16)


@triton.jit(do_not_specialize=("terms_per_share", *Sizes._fields))
def attention_backward_mask_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    grad_lse,  # (B, H, Lq), or None
    vectors,  # RowVectors
    grad_mask,  # (shares, *attn_mask.shape), contiguous
    terms_per_share,
    B,
    H,
    group,
    Lq,
    Lk,
    total_q,
    total_k,
    left,
    right,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    shape: tl.constexpr,  # MaskShape
    SEVERAL_RUNS: tl.constexpr,  # a share has more terms than a run
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """The float mask's gradient: dS, summed over the dimensions in which the mask is broadcast.

    A program owns a tile of the gradient (a single row if all queries share the mask) and a share
    of the sum. It reads q, dO, k and v of one sequence, head and query block after another,
    computes dS again, and writes the tile once. Shares are added up afterwards.

    A mask that all keys share shifts whole rows and changes only their logsumexp. So its gradient
    is dlse, and no scores are needed.

    Floor: 2 · pairs · (E + Ev) operations of the matrix unit.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    row_blocks = tl.cdiv(sizes.Lq, block.M)
    share = _share_of_program(row_blocks, sizes, shape, block)
    # The terms of the sum: blocks of queries fastest, then heads, then sequences.
    terms = 1
    if not shape.rows:
        terms *= row_blocks
    if not shape.heads:
        terms *= sizes.H
    if not shape.batch:
        terms *= sizes.B

    # If the mask differs between keys a tile is summed, otherwise one number per query.
    tile_run = tl.full((block.M, block.N), 0.0, tl.float32)
    rows_run = tl.full((block.M,), 0.0, tl.float32)
    tile_sum = tl.full((block.M, block.N), 0.0, tl.float32)
    rows_sum = tl.full((block.M,), 0.0, tl.float32)
    begin = share.index * terms_per_share
    for term in range(begin, tl.minimum(begin + terms_per_share, terms)):
        rest = term
        if shape.rows:
            first = share.first_row
        else:
            first = rest % row_blocks * block.M
            rest = rest // row_blocks
        if shape.heads:
            h = share.head
        else:
            h = rest % sizes.H
            rest = rest // sizes.H
        if shape.batch:
            b = share.batch
        else:
            b = rest
        head = load_head(inputs, sizes, b, h, variant)
        if shape.columns:
            tile_run = add_grad_scores(
                tile_run, first, share.first_column, head, grad_out, vectors, variant, block
            )
        else:
            rows_run = _add_grad_lse(rows_run, first, head, grad_lse, vectors, variant, block)
        if SEVERAL_RUNS:
            if (term - begin) % RUN == RUN - 1:
                if shape.columns:
                    tile_run, tile_sum = end_run(tile_run, tile_sum)
                else:
                    rows_run, rows_sum = end_run(rows_run, rows_sum)
    if SEVERAL_RUNS:
        tile_run += tile_sum
        rows_run += rows_sum
    _store_share(grad_mask, tile_run, rows_run, share, sizes, shape, block)


class Share(NamedTuple):
    """The part of the work that a program owns: a tile of the gradient, with index 0 in dimensions
    that are summed over, and the ``index``-th share of its terms."""

    index: Any
    batch: Any
    head: Any
    first_row: Any
    first_column: Any


@triton.jit
def _share_of_program(row_blocks, sizes, shape: tl.constexpr, block: tl.constexpr):
    """The program's number counts columns fastest, then rows, heads, sequences, and shares last."""
    index = tl.program_id(0)
    first_column = 0
    if shape.columns:
        column_blocks = tl.cdiv(sizes.Lk, block.N)
        first_column = index % column_blocks * block.N
        index = index // column_blocks
    first_row = 0
    if shape.rows:
        first_row = index % row_blocks * block.M
        index = index // row_blocks
    head = 0
    if shape.heads:
        head = index % sizes.H
        index = index // sizes.H
    batch = 0
    if shape.batch:
        batch = index % sizes.B
        index = index // sizes.B
    return Share(index, batch, head, first_row, first_column)


@triton.jit
def add_grad_scores(
    tile_run,
    first,
    first_column,
    head,
    grad_out,
    vectors,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """Adds dS of the block of pairs at ``first`` and ``first_column``, unless it holds no pair."""
    rows = first + tl.arange(0, block.M)
    row_values = load_row_values(vectors, head, rows, variant, False)
    last = tl.minimum(first + block.M, head.num_queries) - 1
    seen = (first < head.num_queries) & (first_column < head.num_keys)
    if variant.left_bound:
        seen = seen & (first_column + block.N > first - head.left)
    if variant.right_bound:
        seen = seen & (first_column <= last + head.right)
    if seen:
        query_tile = tile_of_queries(head, first)
        key_tile = tile_of_keys(head, first_column)
        do_tile = tile_like_query(grad_out, head, first)
        query = load_operand(query_tile, block.M, variant.E, variant.BLOCK_E, False)
        key = load_operand(key_tile, block.N, variant.E, variant.BLOCK_E, False)
        do = load_operand(do_tile, block.M, variant.Ev, variant.BLOCK_EV, False)
        tile_run += grad_scores(query, do, key, row_values, head, variant, block, FULL=False)
    return tile_run


@triton.jit
def _add_grad_lse(
    rows_run, first, head, grad_lse, vectors, variant: tl.constexpr, block: tl.constexpr
):
    """Adds dlse of the queries at ``first`` that have a pair."""
    rows = first + tl.arange(0, block.M)
    row_values = load_row_values(vectors, head, rows, variant, False)
    exists = rows < head.num_queries
    grad = tl.full((block.M,), 0.0, tl.float32)
    if grad_lse is not None:
        pointers = row_pointer(grad_lse, head.batch, head.h, head.first_query)
        grad = tl.load(pointers + rows.to(tl.int64) * grad_lse.strides[2], exists, other=0.0)
    # lse_base and delta are NaN in rows that a NaN has reached.
    grad = tl.fma(row_values.lse_base + row_values.delta, 0.0, grad)
    return rows_run + tl.where(exists & (row_values.lse_base != INF), grad, 0.0)


@triton.jit
def _store_share(
    grad_mask, tile_sum, rows_sum, share, sizes, shape: tl.constexpr, block: tl.constexpr
):
    """Stores a program's share: its tile, summed over the dimensions that ``shape`` leaves out."""
    plane = tl.cast(share.index, tl.int64)
    if shape.batch:
        plane = plane * sizes.B + share.batch
    if shape.heads:
        plane = plane * sizes.H + share.head
    rows = share.first_row + tl.arange(0, block.M)
    columns = share.first_column + tl.arange(0, block.N)
    if shape.rows and shape.columns:
        offsets = (plane * sizes.Lq + rows[:, None]) * sizes.Lk + columns[None, :]
        inside = (rows[:, None] < sizes.Lq) & (columns[None, :] < sizes.Lk)
        tl.store(grad_mask + offsets, tile_sum.to(grad_mask.dtype.element_ty), inside)
    elif shape.columns:
        result = tl.sum(tile_sum, 0).to(grad_mask.dtype.element_ty)
        tl.store(grad_mask + plane * sizes.Lk + columns, result, columns < sizes.Lk)
    elif shape.rows:
        result = rows_sum.to(grad_mask.dtype.element_ty)
        tl.store(grad_mask + plane * sizes.Lq + rows, result, rows < sizes.Lq)
    else:
        tl.store(grad_mask + plane, tl.sum(rows_sum, 0).to(grad_mask.dtype.element_ty))
