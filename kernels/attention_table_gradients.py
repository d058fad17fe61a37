"""The gradients of attention's tables that an index reads: dS, summed by column.

Pairs of one tile read any columns, and several pairs may read the same column. To sum them in a
fixed order without atomics, the rows of a table that belong to different queries (or keys) are
assigned to different lanes. For one key of a tile after another (or one query), each lane adds its
pair's dS to its own row in memory. A table that all rows share has no such lanes. Its programs
first add up the tiles of many heads and sequences, because they read the same columns. Then they
compare the columns of one key after another with all columns of the table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trifuse.kernels.arithmetic import end_run
from trifuse.kernels.attention_arguments import Sizes
from trifuse.kernels.attention_mask_gradient import RUN, add_grad_scores
from trifuse.kernels.attention_pairs import columns_read, visible_keys, visible_queries
from trifuse.kernels.attention_tiles import load_head, program_place, row_pointer

# Columns of a shared table that are compared at a time.
COLUMNS = tl.constexpr(32)


@triton.jit(do_not_specialize=Sizes._fields)
def attention_backward_query_bias_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    vectors,  # RowVectors
    grad_table,  # (B, H, Lq, n) float32, 0 before
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
    """Adds dS_ij to column c_ij of query i's table, one key after another.

    A program owns M queries of one head of one sequence, and walks through the keys that they
    attend to. It reads k, v and the index, and q and dO again for each block of keys; it reads and
    writes one number of the gradient for each pair.

    Floor: 2 · pairs · (E + Ev) operations of the matrix unit, and 8 bytes of cache for each pair.
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
    tables = row_pointer(grad_table, head.batch, h, head.first_query)
    tables += rows.to(tl.int64) * grad_table.strides[2]
    keys = tl.arange(0, block.N)[None, :]
    visible = visible_keys(head, first, variant, block)
    for first_column in range(visible.start, visible.stop, block.N):
        ds = tl.full((block.M, block.N), 0.0, tl.float32)
        ds = add_grad_scores(ds, first, first_column, head, grad_out, vectors, variant, block)
        for j in range(block.N):
            of_key = tl.sum(tl.where(keys == j, ds, 0.0), 1)
            column = tl.full((block.M,), first_column + j, tl.int32)
            exists = (rows < head.num_queries) & (column < head.num_keys)
            pointers = tables + columns_read(head, rows, column, exists)
            tl.store(pointers, tl.load(pointers, exists, other=0.0) + of_key, exists)


@triton.jit(do_not_specialize=Sizes._fields)
def attention_backward_key_bias_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    vectors,  # RowVectors
    grad_table,  # (B, H, Lk, n) float32, 0 before
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
    """Adds dS_ij to column c_ij of key j's table, one query after another.

    A program owns N keys of one query head of one sequence, and walks through the queries that
    attend to them. It reads q, dO and the index, and k and v again for each block of queries; it
    reads and writes one number of the gradient for each pair.

    Floor: as that of the tables of queries.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    index, h, b = program_place(tl.cdiv(sizes.Lk, block.N), sizes.H)
    first_column = index * block.N
    head = load_head(inputs, sizes, b, h, variant)
    if first_column >= head.num_keys:
        return
    columns = first_column + tl.arange(0, block.N)
    first_key = 0
    if variant.packed:
        first_key = tl.load(inputs.cu_seqlens_k + b)
    tables = row_pointer(grad_table, head.batch, h, first_key)
    tables += columns.to(tl.int64) * grad_table.strides[2]
    queries = tl.arange(0, block.M)[:, None]
    visible = visible_queries(head, first_column, variant, block)
    for first in range(visible.start, visible.stop, block.M):
        ds = tl.full((block.M, block.N), 0.0, tl.float32)
        ds = add_grad_scores(ds, first, first_column, head, grad_out, vectors, variant, block)
        for i in range(block.M):
            of_query = tl.sum(tl.where(queries == i, ds, 0.0), 0)
            row = tl.full((block.N,), first + i, tl.int32)
            exists = (row < head.num_queries) & (columns < head.num_keys)
            pointers = tables + columns_read(head, row, columns, exists)
            tl.store(pointers, tl.load(pointers, exists, other=0.0) + of_query, exists)


@triton.jit(
    do_not_specialize=(
        "columns",
        "groups",
        "terms_per_group",
        "groups_per_share",
        *Sizes._fields,
    )
)
def attention_backward_table_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    vectors,  # RowVectors
    sums,  # (shares, B, H, n) float32, 0 before, B and H full or 1, contiguous
    columns,  # n
    groups,  # of the heads and sequences that share a table
    terms_per_group,
    groups_per_share,
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
    shape: tl.constexpr,  # MaskShape: whether batch and heads are full
    SEVERAL_RUNS: tl.constexpr,  # a group has more terms than a run
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """The gradient of a table that all rows share.

    A program owns a share of the tiles' groups. It reads q, dO, k and v of a tile in each head and
    sequence of a group, adds up dS, and then adds up the sum by column in its own n numbers in
    memory. Shares are added up afterwards.

    Floor: 2 · pairs · (E + Ev) operations of the matrix unit, and n additions for each pair of a
    group.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    row_blocks = tl.cdiv(sizes.Lq, block.M)
    # The program's number counts heads fastest, then sequences, and shares last.
    program = tl.program_id(0)
    index = program
    own_head = 0
    if shape.heads:
        own_head = index % sizes.H
        index = index // sizes.H
    own_batch = 0
    if shape.batch:
        own_batch = index % sizes.B
        index = index // sizes.B
    # The terms of a tile: heads fastest, then sequences.
    terms = 1
    if not shape.heads:
        terms *= sizes.H
    if not shape.batch:
        terms *= sizes.B
    all_groups = row_blocks * tl.cdiv(sizes.Lk, block.N) * groups
    begin = index * groups_per_share
    own_sums = sums + tl.cast(program, tl.int64) * columns
    own = load_head(inputs, sizes, own_batch, own_head, variant)
    num_queries = sizes.Lq
    num_keys = sizes.Lk
    if shape.batch:
        num_queries = own.num_queries
        num_keys = own.num_keys
    for at in range(begin, tl.minimum(begin + groups_per_share, all_groups)):
        tile = at // groups
        first = tile % row_blocks * block.M
        first_column = tile // row_blocks * block.N
        start = at % groups * terms_per_group
        run = tl.full((block.M, block.N), 0.0, tl.float32)
        total = tl.full((block.M, block.N), 0.0, tl.float32)
        for term in range(start, tl.minimum(start + terms_per_group, terms)):
            h = own_head
            rest = term
            if not shape.heads:
                h = rest % sizes.H
                rest = rest // sizes.H
            b = own_batch
            if not shape.batch:
                b = rest
            head = load_head(inputs, sizes, b, h, variant)
            run = add_grad_scores(run, first, first_column, head, grad_out, vectors, variant, block)
            if SEVERAL_RUNS:
                if (term - start) % RUN == RUN - 1:
                    run, total = end_run(run, total)
        if SEVERAL_RUNS:
            run += total
        _add_by_column(
            own_sums, run, first, first_column, columns, own, num_queries, num_keys, block
        )


@triton.jit
def _add_by_column(
    sums,
    tile,
    first,
    first_column,
    columns,
    head,
    num_queries,
    num_keys,
    block: tl.constexpr,
):
    """Adds a tile of pairs to the columns that they read, which are those of ``head``."""
    rows = first + tl.arange(0, block.M)
    keys = tl.arange(0, block.N)[None, :]
    for low in range(0, columns, COLUMNS):
        compared = low + tl.arange(0, COLUMNS)
        found = tl.full((block.M, COLUMNS), 0.0, tl.float32)
        for j in range(block.N):
            of_key = tl.sum(tl.where(keys == j, tile, 0.0), 1)
            column = tl.full((block.M,), first_column + j, tl.int32)
            exists = (rows < num_queries) & (column < num_keys)
            read = columns_read(head, rows, column, exists)
            found += tl.where(read[:, None] == compared[None, :], of_key[:, None], 0.0)
        inside = compared < columns
        pointers = sums + compared
        tl.store(pointers, tl.load(pointers, inside, other=0.0) + tl.sum(found, 0), inside)
