"""The forward of attention: the output and the logsumexp."""

from __future__ import annotations

import triton
import triton.language as tl

from trifuse.kernels.arithmetic import dot
from trifuse.kernels.attention_arguments import Sizes
from trifuse.kernels.attention_non_finite import (
    any_non_finite,
    infinite_to_nan,
    sums_of_non_finite_keys,
    zero_non_finite,
)
from trifuse.kernels.attention_pairs import (
    all_blocks,
    edge_blocks,
    full_blocks,
    have_pairs,
    keep_and_bias,
    query_rows,
    visible_keys,
)
from trifuse.kernels.attention_tiles import (
    INF,
    LN2,
    LOG2E,
    load_head,
    load_operand,
    load_tile,
    pair_products,
    program_place,
    store_tile,
    store_zeros,
    tile_like_query,
    tile_of_keys,
    tile_of_queries,
    tile_of_values,
    weights_kept,
)
from trifuse.kernels.recurrent import tanh


@triton.jit(do_not_specialize=Sizes._fields)
def attention_forward_kernel(
    inputs,
    out,  # (B, H, Lq, Ev)
    lse,  # (B, H, Lq) float32, contiguous
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
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """Computes the output and the logsumexp.

    A program owns M queries of one head of one sequence. It reads them once, and the keys and
    values that they attend to; it writes M rows of ``out`` and of ``lse``. Programs of one head are
    neighbours in the grid, so all except the first read the head's keys and values from the L2
    cache.

    Floor: 2 · pairs · (E + Ev) operations of the matrix unit and one exponential per pair, for
    B · H · (Lq · (E + Ev) + Lk · (E + Ev)) elements of memory.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    blocks = tl.cdiv(sizes.Lq, block.M)
    index, h, b = program_place(blocks, sizes.H)
    if variant.right_bound:
        index = blocks - 1 - index  # blocks that attend to the most keys begin first
    first = index * block.M
    if variant.packed:
        if b == sizes.B:
            step = blocks * block.M
            fill_tail(out, lse, h, b, first, step, inputs, sizes, block.M, variant)
            return
    head = load_head(inputs, sizes, b, h, variant)
    if first >= head.num_queries:
        return
    visible = visible_keys(head, first, variant, block)
    query_tile = tile_of_queries(head, first)
    query = load_operand(query_tile, block.M, variant.E, variant.BLOCK_E, False)
    acc, row_max, row_sum = softmax_of_keys(query, visible, head, float("nan"), variant, block)
    result, logsumexp = normalise(acc, row_max, row_sum, sizes, variant)
    out_tile = tile_like_query(out, head, first)
    store_tile(out_tile, result, block.M, variant.Ev, variant.BLOCK_EV)
    rows = first + tl.arange(0, block.M)
    tl.store(lse + head.row_offset + rows, logsumexp, rows < head.num_queries)


@triton.jit
def softmax_of_keys(query, visible, head, infinite, variant: tl.constexpr, block: tl.constexpr):
    """Returns the sums of ``accumulate_softmax`` over the visible keys of a tile of queries.

    ``row_sum`` is 0 for a row without a pair, and ``infinite`` for one whose scores are all -∞.
    """
    first = query.place.first
    acc = tl.full((block.M, variant.BLOCK_EV), 0.0, tl.float32)
    row_max = tl.full((block.M,), -INF, tl.float32)
    row_sum = tl.full((block.M,), 0.0, tl.float32)
    acc, row_max, row_sum = accumulate_softmax(
        acc, row_max, row_sum, query, full_blocks(visible), head, variant, block, FULL=True
    )
    acc, row_max, row_sum = accumulate_softmax(
        acc, row_max, row_sum, query, edge_blocks(visible), head, variant, block
    )
    if variant.selective:
        # ``row_sum`` is tested too, because dropout may have removed a NaN from ``acc``.
        if any_non_finite(acc) | any_non_finite(row_sum):
            values = tile_of_values(head, 0)
            acc = sums_of_non_finite_keys(
                values, first, visible, head, variant, block, variant.Ev, variant.BLOCK_EV
            )
            row_max = tl.full((block.M,), -INF, tl.float32)
            row_sum = tl.zeros_like(row_sum)
            walk = all_blocks(visible)
            acc, row_max, row_sum = accumulate_softmax(
                acc, row_max, row_sum, query, walk, head, variant, block, SANITIZE=True
            )
    # A sum of 0 means no pair, or only scores of -∞.
    nothing = (row_sum == 0.0) & (first + tl.arange(0, block.M) < query.place.length)
    if tl.max(nothing.to(tl.int32), 0) > 0:
        have = have_pairs(first, visible, head, variant, block)
        row_sum = tl.where(nothing & have, infinite, row_sum)
    return acc, row_max, row_sum


@triton.jit
def normalise(acc, row_max, row_sum, sizes, variant: tl.constexpr):
    """Returns rows of the output and their logsumexp, from the sums of ``accumulate_softmax``."""
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    result = infinite_to_nan(acc * (sizes.keep_scale / row_sum)[:, None])
    if variant.scores_in_nats:
        logsumexp = tl.fma(tl.log2(row_sum), LN2, row_max)
    else:
        logsumexp = (row_max + tl.log2(row_sum)) * LN2
    return result, logsumexp


@triton.jit
def accumulate_softmax(
    acc,
    row_max,
    row_sum,
    query,
    walk,
    head,
    variant: tl.constexpr,
    block: tl.constexpr,
    FULL: tl.constexpr = False,
    SANITIZE: tl.constexpr = False,
    VALUES: tl.constexpr = True,
):
    """Adds the keys of ``walk`` to the softmax of a block of queries.

    ``acc`` (M, BLOCK_EV) is ∑ p v and ``row_sum`` (M,) is ∑ p, where p = exp(score - row_max) and
    ``row_max`` (M,) is the largest score so far, in units of log 2 unless Variant.scores_in_nats.

    Args:
        FULL: all keys of the blocks exist, and only a mask leaves out pairs.
        SANITIZE: replaces NaN and Inf in values by 0.
        VALUES: if false, ``acc`` is not changed.
    """
    rows = query_rows(head, query.place.first, block.M, FULL, variant)
    STAGES: tl.constexpr = 1 if SANITIZE else None
    gap = walk.gap_stop - walk.gap_start
    for step in tl.range(walk.start, walk.stop - gap, block.N, num_stages=STAGES):
        first = step + tl.where(step < walk.gap_start, 0, gap)
        columns = first + tl.arange(0, block.N)[None, :]
        key = load_operand(tile_of_keys(head, first), block.N, variant.E, variant.BLOCK_E, FULL)
        scores = pair_products(query, key, block.M, block.N, variant.E, variant.BLOCK_E, block)
        keep, bias = keep_and_bias(head, rows, columns, variant, FULL)
        if variant.scores_in_nats:
            scores = scores_in_nats(scores, bias, head.sizes, variant)
        if variant.bool_mask or not FULL:
            scores = tl.where(keep, scores, -INF)
        block_max = tl.max(scores, 1)
        if not variant.scores_in_nats:
            # One product per row instead of one per score.
            block_max *= head.sizes.scale_log2
        new_max = tl.maximum(row_max, block_max)
        # A row without a pair so far has a maximum of -∞; subtracting that would give NaN.
        base = tl.where(new_max == -INF, 0.0, new_max)
        if variant.scores_in_nats:
            p = tl.exp2((scores - base[:, None]) * LOG2E)
            rescale = tl.exp2((row_max - base) * LOG2E)
        else:
            p = tl.exp2(tl.fma(scores, head.sizes.scale_log2, -base[:, None]))
            rescale = tl.exp2(row_max - base)
        row_sum = tl.fma(row_sum, rescale, tl.sum(p, 1))
        row_max = new_max
        if VALUES:
            if variant.dropout:
                p = tl.where(weights_kept(head, query.place.first, first, block), p, 0.0)
            value_tile = tile_of_values(head, first)
            value = load_tile(value_tile, block.N, variant.Ev, variant.BLOCK_EV, FULL)
            if SANITIZE:
                value = zero_non_finite(value)
            acc = dot(p.to(value.dtype), value, acc * rescale[:, None])
    return acc, row_max, row_sum


@triton.jit
def scores_in_nats(products, bias, sizes, variant: tl.constexpr):
    """Returns the scores of products q·k: times the scale, capped, plus the bias."""
    if variant.softcap != 0:
        scores = tl.fma(_tanh_of_scores(products, sizes, variant), variant.softcap, bias)
    else:
        scores = tl.fma(products, sizes.scale, bias)
    return scores


@triton.jit
def slope_of_cap(products, sizes, variant: tl.constexpr):
    """Returns the derivative of c · tanh(s / c) with respect to the score s."""
    y = _tanh_of_scores(products, sizes, variant)  # the compiler reuses it from scores_in_nats
    return 1.0 - y * y


@triton.jit
def _tanh_of_scores(products, sizes, variant: tl.constexpr):
    return tanh(products * sizes.scale * (1.0 / variant.softcap))


@triton.jit
def fill_tail(
    out, lse, h, b, first, step, inputs, sizes, ROWS: tl.constexpr, variant: tl.constexpr
):
    """Writes the rows of packed tokens past the last sequence: 0 and a logsumexp of -∞.

    They are ROWS tokens of every ``step``, from the ``first`` past the last sequence on.
    """
    start = tl.load(inputs.cu_seqlens_q + b).to(tl.int32) + first
    store_zeros(out, h, start, sizes.total_q, step, ROWS, variant.Ev, variant.BLOCK_EV)
    for token in range(start, sizes.total_q, step):
        rows = token + tl.arange(0, ROWS)
        pointers = lse + tl.cast(h, tl.int64) * sizes.total_q + rows
        tl.store(pointers, tl.full((ROWS,), -INF, tl.float32), rows < sizes.total_q)
