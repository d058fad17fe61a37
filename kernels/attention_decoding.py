"""The forward of few queries over many keys, such as one query over a cache in a step of decoding.

The programs of ``attention_forward_kernel`` own queries, so a call of few queries has few programs,
and leaves most of a GPU idle. Here keys are cut into chunks of CHUNK keys, counted from key 0, and
each chunk has its own programs and its own softmax. A second kernel joins the chunks.

A chunk is what ``attention_forward_kernel`` would compute if there were no other keys: its programs
walk through the same blocks, in the same order and with the same tiles. Where a chunk begins
depends only on the key's place, and a chunk without a visible key adds exact zeros. So neither the
batch around a sequence nor the padding after its keys changes a bit of its results, even if the
keys fill more than one chunk only with their padding. A packed sequence has the bits of a padded
one.

Packed sequences may differ much in length, and the host does not read their lengths. So their
chunks lie side by side: ``total_k // CHUNK`` places and one more per sequence hold the chunks of
any lengths, and a chunk's program searches for its sequence in ``cu_seqlens_k``.

More queries than a few are not computed in chunks, because a program would need the registers of a
second sum. So over more keys than a chunk, the last bits of a query's results depend on whether the
call has few queries. As in ``attention_forward_kernel``, they also depend on whether bounds or a
mask leave out keys, because edge blocks come after full ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trifuse.kernels.attention_arguments import Sizes
from trifuse.kernels.attention_forward import fill_tail, normalise, softmax_of_keys
from trifuse.kernels.attention_pairs import Visible, blocks_of_keys, keys_by_position
from trifuse.kernels.attention_tiles import (
    INF,
    LOG2E,
    HeadTile,
    group_size,
    load_head,
    load_heads,
    load_operand,
    program_place,
    store_tile,
    tile_like_query,
    tile_of_queries,
)

# The sum of weights of a row whose scores in a chunk are all -∞. No other sum is negative.
INFINITE = tl.constexpr(-1.0)


@triton.jit(do_not_specialize=("chunks", *Sizes._fields))
def attention_chunk_kernel(
    inputs,
    sums,  # (B, H, chunks, Lq, Ev) float32, contiguous: values by weight. B = 1 if packed
    softmax,  # (B, H, chunks, Lq, 2) float32, contiguous: the largest score, and the sum of weights
    chunks,  # of a sequence; those of all sequences if packed
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
    CHUNK: tl.constexpr,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """Computes the softmax of one chunk of keys, without normalising it.

    A program owns a chunk of a key head of one sequence, and M rows: queries of all query heads
    that share the key head, so that a key is read once for all of them. (If they are more than M
    rows, their programs are neighbours in the grid.) It reads these queries, and the keys and
    values of the chunk that they attend to; it writes M rows of ``sums`` and of ``softmax``. A
    chunk that by position has no visible key is not written.

    Floor: B · Hkv · Lk · (E + Ev) elements of memory. ``sums`` and ``softmax`` are written and read
    again: 4 (Ev + 2) bytes per row and chunk, for the CHUNK · (E + Ev) elements of a chunk. With
    packed sequences, a program first reads log2 B boundaries, which other programs read too.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    members = group_size(sizes, variant)
    tiles = tl.cdiv(sizes.Lq * members, block.M)
    index, key_head, b = program_place(chunks * tiles, sizes.H // members)
    place = index // tiles
    first = index % tiles * block.M
    if variant.packed:
        b = _sequence_of_chunk(place, inputs, sizes, CHUNK, variant)
    chunk = place - _first_chunk(b, inputs, CHUNK, variant)
    if variant.heads_in_rows:
        h = key_head * members + (first + tl.arange(0, block.M)[:, None]) % members
        head = load_heads(inputs, sizes, b, h, key_head, variant)
    else:
        head = load_head(inputs, sizes, b, key_head, variant)
    if first >= head.num_queries * members:
        return
    # All programs of a chunk have the same blocks, those of attention_forward_kernel.
    keys = keys_by_position(head, 0, head.num_queries, variant)
    start = tl.maximum(keys.start, chunk * CHUNK)
    stop = tl.minimum(keys.stop, chunk * CHUNK + CHUNK)
    if start >= stop:
        return
    keys = Visible(start, keys.full_start, keys.full_stop, stop)
    visible = blocks_of_keys(head, keys, first, variant, block)
    if variant.heads_in_rows:
        query_tile = _tile_of_heads(head, first, members, block)
    else:
        query_tile = tile_of_queries(head, first)
    query = load_operand(query_tile, block.M, variant.E, variant.BLOCK_E, False)
    acc, row_max, row_sum = softmax_of_keys(query, visible, head, INFINITE, variant, block)
    rows = first + tl.arange(0, block.M)[:, None]
    exists = rows < query_tile.length
    at = _place_of_chunk(head, place, chunks) * sizes.Lq + rows // members
    columns = tl.arange(0, variant.BLOCK_EV)[None, :]
    tl.store(sums + (at * variant.Ev + columns), acc, exists & (columns < variant.Ev))
    tl.store(softmax + 2 * at, row_max[:, None], exists)
    tl.store(softmax + 2 * at + 1, row_sum[:, None], exists)


@triton.jit
def _tile_of_heads(head, first, members, block: tl.constexpr):
    """Returns the HeadTile whose rows, from ``first`` on, are queries of all heads.

    It has a pointer for each row.
    """
    strides = head.inputs.query.strides
    rows = (first + tl.arange(0, block.M)[:, None]) // members
    pointers = head.query + rows.to(tl.int64) * strides[2]
    return HeadTile(pointers, (0, 0, 0, strides[3]), first, head.num_queries * members)


@triton.jit(do_not_specialize=("chunks", *Sizes._fields))
def attention_join_kernel(
    inputs,
    out,  # (B, H, Lq, Ev)
    lse,  # (B, H, Lq) float32, contiguous
    sums,  # as attention_chunk_kernel writes them
    softmax,
    chunks,
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
    CHUNK: tl.constexpr,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """Adds up the chunks of a row relative to the largest score of all, and normalises the sum.

    A program owns a row, a query of one head of one sequence. It reads the row's chunks that were
    written, N at a time in ascending order; it writes one row of ``out`` and of ``lse``. If only
    one chunk has visible keys, its numbers are multiplied by 1 and added to 0. Programs of one more
    sequence fill the packed tokens past the last.

    Floor: B · H · Lq · chunks · (Ev + 2) float32 numbers of memory.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    query, h, b = program_place(sizes.Lq, sizes.H)
    if variant.packed:
        if b == sizes.B:
            first, step = query * block.N, sizes.Lq * block.N
            fill_tail(out, lse, h, b, first, step, inputs, sizes, block.N, variant)
            return
    head = load_head(inputs, sizes, b, h, variant)
    if query >= head.num_queries:
        return
    keys = keys_by_position(head, 0, head.num_queries, variant)
    start = keys.start // CHUNK
    stop = tl.where(keys.start < keys.stop, tl.cdiv(keys.stop, CHUNK), start)
    place = _first_chunk(b, inputs, CHUNK, variant)
    row = _place_of_chunk(head, place, chunks) * sizes.Lq + query
    row_max = tl.full((1,), -INF, tl.float32)
    for first in range(start // block.N * block.N, stop, block.N):
        written = _chunks_written(first, start, stop, block)
        at = row + (first + tl.arange(0, block.N)) * sizes.Lq
        largest = tl.load(softmax + 2 * at, written, other=-INF)
        row_max = tl.maximum(row_max, tl.max(largest, 0))
    base = tl.where(row_max == -INF, 0.0, row_max)
    columns = tl.arange(0, variant.BLOCK_EV)[None, :]
    acc = tl.full((1, variant.BLOCK_EV), 0.0, tl.float32)
    row_sum = tl.full((1,), 0.0, tl.float32)
    infinite = tl.full((1,), 0, tl.int32)
    for first in range(start // block.N * block.N, stop, block.N):
        written = _chunks_written(first, start, stop, block)
        at = row + (first + tl.arange(0, block.N)) * sizes.Lq
        largest = tl.load(softmax + 2 * at, written, other=-INF)
        weights = tl.load(softmax + 2 * at + 1, written, other=0.0)
        pointers = sums + (at[:, None] * variant.Ev + columns)
        parts = tl.load(pointers, written[:, None] & (columns < variant.Ev), other=0.0)
        if variant.scores_in_nats:
            share = tl.exp2((largest - base) * LOG2E)
        else:
            share = tl.exp2(largest - base)
        only_infinite = weights == INFINITE
        infinite = tl.maximum(infinite, tl.max(only_infinite.to(tl.int32), 0))
        row_sum += tl.sum(tl.where(only_infinite, 0.0, weights) * share, 0)
        acc += tl.sum(parts * share[:, None], 0)[None, :]
    # All of the row's scores are -∞.
    row_sum = tl.where((row_sum == 0.0) & (infinite > 0), float("nan"), row_sum)
    result, logsumexp = normalise(acc, row_max, row_sum, sizes, variant)
    store_tile(tile_like_query(out, head, query), result, 1, variant.Ev, variant.BLOCK_EV)
    tl.store(lse + head.row_offset + query + tl.arange(0, 1), logsumexp)


@triton.jit
def _chunks_written(first, start, stop, block: tl.constexpr):
    """Returns which of the chunks from ``first`` on are in [start, stop), (N,)."""
    chunks = first + tl.arange(0, block.N)
    return (chunks >= start) & (chunks < stop)


@triton.jit
def _first_chunk(b, inputs, CHUNK: tl.constexpr, variant: tl.constexpr):
    """Returns the place of a sequence's first chunk: 0 or, if packed, after those of earlier ones.

    From one packed sequence to the next, places advance by at least the chunks that it needs.
    """
    place = 0
    if variant.packed:
        place = (tl.load(inputs.cu_seqlens_k + b) // CHUNK).to(tl.int32) + b
    return place


@triton.jit
def _sequence_of_chunk(place, inputs, sizes, CHUNK: tl.constexpr, variant: tl.constexpr):
    """Returns the packed sequence with a chunk at ``place``: the last that begins by there."""
    b = 0
    stop = sizes.B
    while stop - b > 1:
        middle = (b + stop) // 2
        begun = _first_chunk(middle, inputs, CHUNK, variant) <= place
        b = tl.where(begun, middle, b)
        stop = tl.where(begun, stop, middle)
    return b


@triton.jit
def _place_of_chunk(head, place, chunks):
    """Returns the place of a head's chunk among those of all heads, int64."""
    return tl.cast(head.batch * head.sizes.H + head.h, tl.int64) * chunks + place
