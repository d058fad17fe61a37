"""The backward of attention: gradients of query, key and value.

Three kernels run one after another: numbers per query that the other two need, then dK and dV, then
dQ. With scores s, weights P = exp(s - logsumexp), and dropout's D, which is 0 or keep_scale::

    dV_j = ∑_i D_ij P_ij dO_i        delta_i = ∑ dO_i O_i - dlse_i
    dS_ij = P_ij (D_ij dO_i · v_j - delta_i)
    dQ_i = scale ∑_j dS_ij k_j       dK_j = scale ∑_i dS_ij q_i

With a cap, dS_ij is multiplied by its slope in dQ and dK.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trifuse.kernels.arithmetic import dot
from trifuse.kernels.attention_arguments import Sizes
from trifuse.kernels.attention_forward import accumulate_softmax, scores_in_nats, slope_of_cap
from trifuse.kernels.attention_non_finite import (
    any_non_finite,
    infinite_to_nan,
    sums_of_non_finite_keys,
    sums_of_non_finite_queries,
    zero_non_finite,
)
from trifuse.kernels.attention_pairs import (
    all_blocks,
    edge_blocks,
    full_blocks,
    keep_and_bias,
    query_rows,
    visible_keys,
    visible_queries,
)
from trifuse.kernels.attention_tiles import (
    INF,
    LOG2E,
    HeadTile,
    Operand,
    group_size,
    load_head,
    load_operand,
    load_tile,
    pair_products,
    program_place,
    row_pointer,
    store_tile,
    store_zeros,
    tile_at,
    tile_like_query,
    tile_of_keys,
    tile_of_queries,
    tile_of_values,
    weights_kept,
)
from trifuse.reference import attention as reference

COARSE_LOGSUMEXP = tl.constexpr(reference.COARSE_LOGSUMEXP)


# Numbers per query -------------------------------------------------------------------------------


@triton.jit(do_not_specialize=Sizes._fields)
def attention_backward_rows_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    grad_lse,  # (B, H, Lq), or None
    out,  # (B, H, Lq, Ev)
    lse,  # (B, H, Lq) float32, contiguous
    vectors,  # RowVectors, all written, except an lse_base that is lse itself
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
    """delta = ∑ dO O - dlse and, with Variant.large_scores, the logsumexp in two parts.

    A program owns M queries of one head of one sequence; it reads their rows of ``grad_out`` and
    ``out`` and writes a few numbers for each. With Variant.large_scores, and only if one of its
    rows has a coarse logsumexp, it also walks through the keys for the exact sum.

    Floor: 2 · B · H · Lq · Ev elements of memory.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    index, h, b = program_place(tl.cdiv(sizes.Lq, block.M), sizes.H)
    first = index * block.M
    head = load_head(inputs, sizes, b, h, variant)
    if first >= head.num_queries:
        return
    rows = first + tl.arange(0, block.M)
    exists = rows < head.num_queries
    do_tile = tile_like_query(grad_out, head, first)
    do = load_tile(do_tile, block.M, variant.Ev, variant.BLOCK_EV, False).to(tl.float32)
    o_tile = tile_like_query(out, head, first)
    o = load_tile(o_tile, block.M, variant.Ev, variant.BLOCK_EV, False).to(tl.float32)
    # An Inf in dO makes its row NaN, for any output that it multiplies.
    delta = tl.sum(tl.fma(do, 0.0, do) * o, 1)
    if grad_lse is not None:
        pointers = row_pointer(grad_lse, head.batch, h, head.first_query)
        pointers += rows.to(tl.int64) * grad_lse.strides[2]
        delta -= tl.load(pointers, exists, other=0.0)
    delta = infinite_to_nan(delta)
    tl.store(vectors.delta + head.row_offset + rows, delta, exists)
    if variant.large_scores:
        lse_base, lse_rest = _split_logsumexp(lse, first, head, variant, block)
        pointers = vectors.lse_base + head.row_offset + rows
        tl.store(pointers, tl.where(lse_base == -INF, INF, lse_base), exists)
        tl.store(vectors.lse_rest + head.row_offset + rows, lse_rest, exists)


@triton.jit
def _split_logsumexp(lse, first, head, variant: tl.constexpr, block: tl.constexpr):
    """Returns lse_base, -∞ for rows without a pair, and lse_rest of the queries at ``first``."""
    rows = first + tl.arange(0, block.M)
    lse_base = tl.load(lse + head.row_offset + rows, rows < head.num_queries, other=0.0)
    lse_rest = tl.full((block.M,), 0.0, tl.float32)
    is_nan = lse_base != lse_base
    magnitude = tl.where((lse_base == -INF) | is_nan, 0.0, tl.abs(lse_base))
    if tl.max(magnitude, 0) > COARSE_LOGSUMEXP:
        walk = all_blocks(visible_keys(head, first, variant, block))
        query_tile = tile_of_queries(head, first)
        query = load_operand(query_tile, block.M, variant.E, variant.BLOCK_E, False)
        row_max = tl.full((block.M,), -INF, tl.float32)
        _acc, lse_base, row_sum = accumulate_softmax(
            0.0, row_max, lse_rest, query, walk, head, variant, block, VALUES=False
        )
        lse_rest = tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))
        lse_base = tl.where(is_nan, float("nan"), lse_base)
    return lse_base, lse_rest


class RowValues(NamedTuple):
    """The RowVectors of some queries, in the units of ``_weights``. They may run along rows or
    columns of a tile."""

    lse_base: Any
    lse_rest: Any
    delta: Any


@triton.jit
def load_row_values(vectors, head, rows, variant: tl.constexpr, FULL: tl.constexpr):
    """Loads the RowValues of the head's ``rows``; 0 past the last. FULL: no row is past it."""
    lse_base = _load_row_vector(vectors.lse_base, head, rows, FULL)
    delta = _load_row_vector(vectors.delta, head, rows, FULL)
    if variant.large_scores:
        lse_rest = _load_row_vector(vectors.lse_rest, head, rows, FULL)
    else:
        lse_rest = lse_base  # not used
        lse_base *= LOG2E
    return RowValues(lse_base, lse_rest, delta)


@triton.jit
def _load_row_vector(vector, head, rows, FULL: tl.constexpr):
    """Loads a vector's values, shaped as ``rows``; 0 past the head's last query."""
    if FULL:
        x = tl.load(vector + head.row_offset + rows)
    else:
        x = tl.load(vector + head.row_offset + rows, mask=rows < head.num_queries, other=0.0)
    return x


@triton.jit
def _weights(products, bias, lse_base, lse_rest, sizes, variant: tl.constexpr):
    """P = exp(score - logsumexp)."""
    if variant.large_scores:
        above = scores_in_nats(products, bias, sizes, variant) - lse_base
        p = tl.exp2(tl.fma(above, LOG2E, -lse_rest))
    else:
        p = tl.exp2(tl.fma(products, sizes.scale_log2, -lse_base))
    return p


# dK and dV ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=Sizes._fields)
def attention_backward_key_value_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    vectors,  # RowVectors
    grad_key,  # (B, Hkv, Lk, E)
    grad_value,  # (B, Hkv, Lk, Ev)
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
    """dV_j = ∑_i D_ij P_ij dO_i and dK_j = scale ∑_i dS_ij q_i.

    A program owns N keys of one key head of one sequence, and walks through the queries that attend
    to them, in every query head that shares the key head. So no sum is split. It reads its keys and
    values once, and q, dO and 2 or 3 numbers per query; it writes N rows of dK and of dV.

    Floor: 4 · pairs · (E + Ev) operations of the matrix unit.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    blocks = tl.cdiv(sizes.Lk, block.N)
    # In causal attention the most queries attend to the first keys, so their programs begin first.
    index, kv_head, b = program_place(blocks, sizes.H // sizes.group)
    first = index * block.N
    if variant.packed:
        token = tl.load(inputs.cu_seqlens_k + b)
        if b == sizes.B:  # tokens past the last sequence
            start = token.to(tl.int32) + first
            step = blocks * block.N
            stop = sizes.total_k
            store_zeros(grad_key, kv_head, start, stop, step, block.N, variant.E, variant.BLOCK_E)
            store_zeros(
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
    num_keys = stored
    if variant.key_lengths:
        num_keys = tl.load(inputs.key_lengths + b).to(tl.int32)
    key_pointer = row_pointer(inputs.key, batch, kv_head, token)
    key_tile = HeadTile(key_pointer, inputs.key.strides, first, num_keys)
    value_pointer = row_pointer(inputs.value, batch, kv_head, token)
    value_tile = HeadTile(value_pointer, inputs.value.strides, first, num_keys)
    key = load_operand(key_tile, block.N, variant.E, variant.BLOCK_E, False)
    value = load_operand(value_tile, block.N, variant.Ev, variant.BLOCK_EV, False)
    dk = tl.full((block.N, variant.BLOCK_E), 0.0, tl.float32)
    dv = tl.full((block.N, variant.BLOCK_EV), 0.0, tl.float32)
    dk, dv = _accumulate_dk_dv_of_group(
        dk, dv, key, value, b, kv_head, grad_out, vectors, inputs, sizes, variant, block, False
    )
    if variant.selective:
        if any_non_finite(dk) | any_non_finite(dv):
            dk, dv = _sanitized_dk_dv(
                key, value, b, kv_head, grad_out, vectors, inputs, sizes, variant, block
            )
    if variant.key_lengths:
        # Keys past the lengths have weights of 0, but the other factor may have been NaN.
        take_part = (first + tl.arange(0, block.N) < num_keys)[:, None]
        dk = tl.where(take_part, dk, 0.0)
        dv = tl.where(take_part, dv, 0.0)
    dk_tile = HeadTile(
        row_pointer(grad_key, batch, kv_head, token), grad_key.strides, first, stored
    )
    dk = infinite_to_nan(dk * sizes.scale)
    store_tile(dk_tile, dk, block.N, variant.E, variant.BLOCK_E)
    dv_pointer = row_pointer(grad_value, batch, kv_head, token)
    dv_tile = HeadTile(dv_pointer, grad_value.strides, first, stored)
    dv = infinite_to_nan(dv * sizes.keep_scale)
    store_tile(dv_tile, dv, block.N, variant.Ev, variant.BLOCK_EV)


@triton.jit
def _sanitized_dk_dv(
    key,
    value,
    b,
    kv_head,
    grad_out,
    vectors,
    inputs,
    sizes,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """Returns dK and dV without NaN and Inf in q and dO; a sum that one of them enters is ∞."""
    first = key.place.first
    dk = sums_of_non_finite_queries(
        inputs.query, first, b, kv_head, inputs, sizes, variant, block, variant.E, variant.BLOCK_E
    )
    dv = sums_of_non_finite_queries(
        grad_out, first, b, kv_head, inputs, sizes, variant, block, variant.Ev, variant.BLOCK_EV
    )
    return _accumulate_dk_dv_of_group(
        dk, dv, key, value, b, kv_head, grad_out, vectors, inputs, sizes, variant, block, True
    )


@triton.jit
def _accumulate_dk_dv_of_group(
    dk,
    dv,
    key,
    value,
    b,
    kv_head,
    grad_out,
    vectors,
    inputs,
    sizes,
    variant: tl.constexpr,
    block: tl.constexpr,
    SANITIZE: tl.constexpr,
):
    """Adds the terms of all query heads that share a key head to dK and dV."""
    for member in range(group_size(sizes, variant)):
        h = kv_head * group_size(sizes, variant) + member
        head = load_head(inputs, sizes, b, h, variant)
        grad_rows = tile_like_query(grad_out, head, 0)
        visible = visible_queries(head, key.place.first, variant, block)
        if SANITIZE:
            walk = all_blocks(visible)
            dk, dv = _accumulate_dk_dv(
                dk, dv, key, value, walk, head, grad_rows, vectors, variant, block, SANITIZE=True
            )
        else:
            walk = full_blocks(visible)
            dk, dv = _accumulate_dk_dv(
                dk, dv, key, value, walk, head, grad_rows, vectors, variant, block, FULL=True
            )
            walk = edge_blocks(visible)
            dk, dv = _accumulate_dk_dv(
                dk, dv, key, value, walk, head, grad_rows, vectors, variant, block
            )
    return dk, dv


@triton.jit
def _accumulate_dk_dv(
    dk,
    dv,
    key,
    value,
    walk,
    head,
    grad_rows,
    vectors,
    variant: tl.constexpr,
    block: tl.constexpr,
    FULL: tl.constexpr = False,
    SANITIZE: tl.constexpr = False,
):
    """Adds the terms of the queries of ``walk`` to dK and dV. ``grad_rows`` is the head's dO.

    Score tiles have a row per key, so that the weights are the left operand of both following
    products, directly from registers.
    """
    columns = key.place.first + tl.arange(0, block.N)[:, None]
    STAGES: tl.constexpr = 1 if SANITIZE else None
    gap = walk.gap_stop - walk.gap_start
    for step in tl.range(walk.start, walk.stop - gap, block.M, num_stages=STAGES):
        first = step + tl.where(step < walk.gap_start, 0, gap)
        rows = first + tl.arange(0, block.M)[None, :]
        row_values = load_row_values(vectors, head, rows, variant, FULL)
        query_tile = tile_of_queries(head, first)
        query = load_tile(query_tile, block.M, variant.E, variant.BLOCK_E, FULL)
        if SANITIZE and variant.softcap == 0:
            query = zero_non_finite(query)
        right = Operand(query_tile, query)
        products = pair_products(key, right, block.N, block.M, variant.E, variant.BLOCK_E, block)
        if SANITIZE and variant.softcap != 0:
            query = zero_non_finite(query)  # after the scores, which the cap makes finite
        keep, bias = keep_and_bias(head, rows, columns, variant, FULL)
        p = _weights(products, bias, row_values.lse_base, row_values.lse_rest, head.sizes, variant)
        if variant.bool_mask or not FULL:
            p = tl.where(keep, p, 0.0)
        do_tile = tile_at(grad_rows, first)
        do = load_tile(do_tile, block.M, variant.Ev, variant.BLOCK_EV, FULL)
        if SANITIZE:
            do = zero_non_finite(do)
        right = Operand(do_tile, do)
        grad_p = pair_products(value, right, block.N, block.M, variant.Ev, variant.BLOCK_EV, block)
        dropped = p
        if variant.dropout:
            kept = tl.trans(weights_kept(head, first, key.place.first, block))
            dropped = tl.where(kept, p, 0.0)
            grad_p = tl.where(kept, grad_p * head.sizes.keep_scale, 0.0)
        grad_scores = p * (grad_p - row_values.delta)
        if variant.softcap != 0:
            grad_scores *= slope_of_cap(products, head.sizes, variant)
        if not FULL:
            grad_scores = tl.where(keep, grad_scores, 0.0)
        dv = dot(dropped.to(do.dtype), do, dv)
        dk = dot(grad_scores.to(query.dtype), query, dk)
    return dk, dv


# dQ ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=Sizes._fields)
def attention_backward_query_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    vectors,  # RowVectors
    grad_query,  # (B, H, Lq, E)
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
    """dQ_i = scale ∑_j dS_ij k_j.

    A program owns M queries of one head of one sequence and walks through the keys that they attend
    to. It reads q, dO and 2 or 3 numbers per query once, and the keys and values; it writes M rows.

    Floor: 2 · pairs · (2 E + Ev) operations of the matrix unit. Two of the three products are also
    computed for dK and dV, so that no sum is split between programs.
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
        if b == sizes.B:  # tokens past the last sequence
            start = tl.load(inputs.cu_seqlens_q + b).to(tl.int32) + first
            step = blocks * block.M
            store_zeros(
                grad_query, h, start, sizes.total_q, step, block.M, variant.E, variant.BLOCK_E
            )
            return
    head = load_head(inputs, sizes, b, h, variant)
    if first >= head.num_queries:
        return
    visible = visible_keys(head, first, variant, block)
    query_tile = tile_of_queries(head, first)
    do_tile = tile_like_query(grad_out, head, first)
    query = load_operand(query_tile, block.M, variant.E, variant.BLOCK_E, False)
    do = load_operand(do_tile, block.M, variant.Ev, variant.BLOCK_EV, False)
    rows = first + tl.arange(0, block.M)
    row_values = load_row_values(vectors, head, rows, variant, False)
    dq = tl.full((block.M, variant.BLOCK_E), 0.0, tl.float32)
    dq = _accumulate_dq(
        dq, query, do, row_values, full_blocks(visible), head, variant, block, FULL=True
    )
    dq = _accumulate_dq(dq, query, do, row_values, edge_blocks(visible), head, variant, block)
    if variant.selective:
        if any_non_finite(dq):
            keys = tile_of_keys(head, 0)
            dq = sums_of_non_finite_keys(
                keys, first, visible, head, variant, block, variant.E, variant.BLOCK_E
            )
            walk = all_blocks(visible)
            dq = _accumulate_dq(
                dq, query, do, row_values, walk, head, variant, block, SANITIZE=True
            )
    dq_tile = tile_like_query(grad_query, head, first)
    dq = infinite_to_nan(dq * sizes.scale)
    store_tile(dq_tile, dq, block.M, variant.E, variant.BLOCK_E)


@triton.jit
def _accumulate_dq(
    dq,
    query,
    do,
    row_values,
    walk,
    head,
    variant: tl.constexpr,
    block: tl.constexpr,
    FULL: tl.constexpr = False,
    SANITIZE: tl.constexpr = False,
):
    """Adds the terms of the keys of ``walk`` to dQ."""
    STAGES: tl.constexpr = 1 if SANITIZE else None
    gap = walk.gap_stop - walk.gap_start
    for step in tl.range(walk.start, walk.stop - gap, block.N, num_stages=STAGES):
        first = step + tl.where(step < walk.gap_start, 0, gap)
        key_tile = tile_of_keys(head, first)
        key = load_operand(key_tile, block.N, variant.E, variant.BLOCK_E, FULL)
        ds = grad_scores(query, do, key, row_values, head, variant, block, FULL, CAPPED=False)
        keys = key.data
        if SANITIZE:
            keys = zero_non_finite(keys)  # after the scores, which an infinite key can make -∞
        dq = dot(ds.to(keys.dtype), keys, dq)
    return dq


@triton.jit
def grad_scores(
    query,
    do,
    key,
    row_values,
    head,
    variant: tl.constexpr,
    block: tl.constexpr,
    FULL: tl.constexpr,
    CAPPED: tl.constexpr = True,
):
    """Returns dS (M, N), 0 for pairs left out. CAPPED: with respect to scores after the cap."""
    rows = query_rows(head, query.place.first, block.M, FULL, variant)
    columns = key.place.first + tl.arange(0, block.N)[None, :]
    products = pair_products(query, key, block.M, block.N, variant.E, variant.BLOCK_E, block)
    keep, bias = keep_and_bias(head, rows, columns, variant, FULL)
    lse_base, lse_rest = row_values.lse_base[:, None], row_values.lse_rest[:, None]
    p = _weights(products, bias, lse_base, lse_rest, head.sizes, variant)
    value_tile = tile_of_values(head, key.place.first)
    value = load_operand(value_tile, block.N, variant.Ev, variant.BLOCK_EV, FULL)
    grad_p = pair_products(do, value, block.M, block.N, variant.Ev, variant.BLOCK_EV, block)
    if variant.dropout:
        kept = weights_kept(head, query.place.first, key.place.first, block)
        grad_p = tl.where(kept, grad_p * head.sizes.keep_scale, 0.0)
    ds = p * (grad_p - row_values.delta[:, None])
    if variant.softcap != 0 and not CAPPED:
        ds *= slope_of_cap(products, head.sizes, variant)
    if variant.bool_mask or not FULL:
        ds = tl.where(keep, ds, 0.0)
    return ds
