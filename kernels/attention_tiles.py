"""Tiles of attention: where rows lie in memory, loads, stores, and products of two tiles."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from trifuse.kernels.arithmetic import dot
from trifuse.kernels.philox import dropout_keep, placed_units
from trifuse.reference import attention as reference

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
INF = tl.constexpr(math.inf)
FARTHEST = tl.constexpr(reference.FARTHEST)


# Places ------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """One query head of one sequence: the call's arguments, and where its rows lie in them.

    With Variant.heads_in_rows it is a query head for each row of a tile. ``h`` and what depends on
    it are then tensors (M, 1); key and value remain pointers, because the heads share them.
    """

    inputs: Any
    sizes: Any
    h: Any
    query: Any  # pointers to the first row
    key: Any
    value: Any
    mask: Any
    relative_bias: Any  # pointer to the number of query 0 and key 0; lower distances precede it
    relative_index: Any  # pointer to the column that query 0 and key 0 read
    table: Any  # pointers to the first number
    query_bias: Any
    key_bias: Any
    batch: Any  # batch index and first row in query, out and their gradients
    first_query: Any
    row_offset: Any  # int64: offset of the head in a contiguous (B, H, L)
    num_queries: Any
    num_keys: Any  # cut off at key_lengths
    left: Any  # query i attends to keys from i - left on; read with Variant.left_bound
    right: Any  # query i attends to keys up to i + right; read with Variant.right_bound
    plane: Any  # the number of this head's matrix in dropout, and of its first row and column
    drawn_row: Any
    drawn_column: Any
    seed: Any


class HeadTile(NamedTuple):
    """The place of a tile: rows of one head from ``first`` on. The head has ``length`` rows."""

    pointer: Any  # to the head's first row
    strides: Any
    first: Any
    length: Any


class Operand(NamedTuple):
    """A factor of ``pair_products``: a tile's numbers, and the place from which to reload them."""

    place: Any  # a HeadTile
    data: Any


@triton.jit
def program_place(blocks, heads):
    """Returns the program's block, head and sequence."""
    program = tl.program_id(0)
    return program % blocks, program // blocks % heads, program // blocks // heads


@triton.jit
def load_head(inputs, sizes, b, h, variant: tl.constexpr):
    """Returns the Head with query head h of sequence b."""
    return load_heads(inputs, sizes, b, h, h // sizes.group, variant)


@triton.jit
def load_heads(inputs, sizes, b, h, key_head, variant: tl.constexpr):
    """Returns the Head with query head h, or a head for each row, of a key head of sequence b."""
    if variant.packed:
        batch = 0
        first_query = tl.load(inputs.cu_seqlens_q + b)
        first_key = tl.load(inputs.cu_seqlens_k + b)
        num_queries = (tl.load(inputs.cu_seqlens_q + b + 1) - first_query).to(tl.int32)
        num_keys = (tl.load(inputs.cu_seqlens_k + b + 1) - first_key).to(tl.int32)
    else:
        batch = b
        first_query = 0
        first_key = 0
        num_queries = sizes.Lq
        num_keys = sizes.Lk
    if variant.lower_right:
        corner = num_keys - num_queries
    else:
        corner = 0
    left = sizes.left - corner
    right = sizes.right + corner
    if variant.diagonal:
        offset = tl.load(inputs.diagonal + b).to(tl.int64)
        offset = tl.minimum(tl.maximum(offset, -FARTHEST), FARTHEST)
        left = _within_head(left - offset, num_queries, num_keys)
        right = _within_head(right + offset, num_queries, num_keys)
    if variant.key_lengths:
        num_keys = tl.load(inputs.key_lengths + b).to(tl.int32)
    if variant.masked:
        mask = row_pointer(inputs.attn_mask, b, h, 0)
    else:
        mask = 0
    if variant.relative_bias:
        relative_bias = row_pointer(inputs.relative_bias, b, h, 0) - corner
    else:
        relative_bias = 0
    relative_index = 0
    table = 0
    query_bias = 0
    key_bias = 0
    if variant.indexed:
        relative_index = inputs.relative_index.data
        if variant.index_by_distance:
            relative_index -= corner
    if variant.table:
        table = row_pointer(inputs.table, b, h, 0)
    if variant.query_bias:
        query_bias = row_pointer(inputs.query_bias, batch, h, first_query)
    if variant.key_bias:
        key_bias = row_pointer(inputs.key_bias, batch, h, first_key)
    if variant.dropout:
        seed = tl.load(inputs.seed)
    else:
        seed = 0
    plane = b * sizes.H + h
    drawn_row = 0
    drawn_column = 0
    if variant.dropout and variant.placed:
        plane = placed_units(inputs.seed, plane).to(tl.int32)
        drawn_row = tl.load(inputs.seed + 6).to(tl.int32)
        drawn_column = tl.load(inputs.seed + 7).to(tl.int32)
    return Head(
        inputs=inputs,
        sizes=sizes,
        h=h,
        query=row_pointer(inputs.query, batch, h, first_query),
        key=row_pointer(inputs.key, batch, key_head, first_key),
        value=row_pointer(inputs.value, batch, key_head, first_key),
        mask=mask,
        relative_bias=relative_bias,
        relative_index=relative_index,
        table=table,
        query_bias=query_bias,
        key_bias=key_bias,
        batch=batch,
        first_query=first_query,
        row_offset=tl.cast(batch * sizes.H + h, tl.int64) * sizes.total_q + first_query,
        num_queries=num_queries,
        num_keys=num_keys,
        left=left,
        right=right,
        plane=plane,
        drawn_row=drawn_row,
        drawn_column=drawn_column,
        seed=seed,
    )


@triton.jit
def _within_head(bound, num_queries, num_keys):
    """Returns an int64 bound as int32. Beyond the head's length it leaves out all, or none."""
    farthest = tl.cast(num_queries, tl.int64) + num_keys
    return tl.minimum(tl.maximum(bound, -farthest), farthest).to(tl.int32)


@triton.jit
def row_pointer(tensor, batch, head, row):
    """Returns a pointer to a row. Offsets are int64, because a tensor may exceed 2³¹ elements."""
    return (
        tensor.data
        + tl.cast(batch, tl.int64) * tensor.strides[0]
        + tl.cast(head, tl.int64) * tensor.strides[1]
        + tl.cast(row, tl.int64) * tensor.strides[2]
    )


@triton.jit
def tile_at(rows, first):
    """Returns the HeadTile from row ``first`` on of the head of ``rows``, another HeadTile."""
    return HeadTile(rows.pointer, rows.strides, first, rows.length)


@triton.jit
def tile_of_queries(head, first):
    """Returns the HeadTile of the head's queries from ``first`` on."""
    return HeadTile(head.query, head.inputs.query.strides, first, head.num_queries)


@triton.jit
def tile_of_keys(head, first):
    """Returns the HeadTile of the head's keys from ``first`` on."""
    return HeadTile(head.key, head.inputs.key.strides, first, head.num_keys)


@triton.jit
def tile_of_values(head, first):
    """Returns the HeadTile of the head's values from ``first`` on."""
    return HeadTile(head.value, head.inputs.value.strides, first, head.num_keys)


@triton.jit
def tile_like_query(tensor, head, first):
    """Returns the HeadTile from ``first`` on in a tensor with the rows of query, (B, H, Lq, ·)."""
    pointer = row_pointer(tensor, head.batch, head.h, head.first_query)
    return HeadTile(pointer, tensor.strides, first, head.num_queries)


# Loads and stores --------------------------------------------------------------------------------


@triton.jit
def load_tile(
    tile, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FULL: tl.constexpr
):
    """Loads (ROWS, BLOCK_DIM), 0 past the last row and past DIM. FULL: no row is past the last."""
    pointers = _pointers(tile, 0, ROWS, BLOCK_DIM)
    if FULL and DIM == BLOCK_DIM:
        x = tl.load(pointers)
    elif FULL:
        x = tl.load(pointers, mask=tl.arange(0, BLOCK_DIM)[None, :] < DIM, other=0.0)
    else:
        x = tl.load(pointers, mask=_inside(tile, 0, ROWS, BLOCK_DIM, DIM), other=0.0)
    return x


@triton.jit
def load_operand(
    place, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FULL: tl.constexpr
):
    """Loads a tile as an Operand; see ``load_tile``."""
    return Operand(place, load_tile(place, ROWS, DIM, BLOCK_DIM, FULL))


@triton.jit
def store_tile(tile, x, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Stores x (ROWS, BLOCK_DIM), except past the last row and past DIM."""
    x = x.to(tile.pointer.dtype.element_ty)
    tl.store(_pointers(tile, 0, ROWS, BLOCK_DIM), x, mask=_inside(tile, 0, ROWS, BLOCK_DIM, DIM))


@triton.jit
def store_zeros(
    tensor, h, start, stop, step, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Writes zeros for packed tokens in [start, stop): ROWS tokens of every ``step``."""
    for first in range(start, stop, step):
        tile = HeadTile(row_pointer(tensor, 0, h, 0), tensor.strides, first, stop)
        store_tile(tile, tl.zeros((ROWS, BLOCK_DIM), tl.float32), ROWS, DIM, BLOCK_DIM)


@triton.jit
def _pointers(tile, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns pointers to the tile's elements from its column ``column`` on, (ROWS, COLUMNS)."""
    rows = tl.arange(0, ROWS)[:, None].to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    first = tile.pointer + tl.cast(tile.first, tl.int64) * tile.strides[2]
    first += tl.cast(column, tl.int64) * tile.strides[3]
    return first + (rows * tile.strides[2] + columns * tile.strides[3])


@triton.jit
def _inside(tile, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr):
    """Returns whether an element exists, in the layout of ``_pointers``."""
    rows = tile.first + tl.arange(0, ROWS)[:, None]
    columns = column + tl.arange(0, COLUMNS)[None, :]
    return (rows < tile.length) & (columns < DIM)


# Arithmetic --------------------------------------------------------------------------------------


@triton.jit
def pair_products(
    a,
    b,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    block: tl.constexpr,
):
    """Returns a @ bᵀ (ROWS, COLUMNS) of two Operands, at once or in steps of block.K along DIM.

    In float32, products run on the ordinary arithmetic units, and the compiler keeps all operands
    of a thread in registers. Steps bound their number, but load both tiles again through the cache.
    """
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    if block.K == 0 or block.K >= BLOCK_DIM:
        products = dot(a.data, tl.trans(b.data), products)
    else:
        for k in range(0, BLOCK_DIM, block.K):
            inside = _inside(a.place, k, ROWS, block.K, DIM)
            x = tl.load(_pointers(a.place, k, ROWS, block.K), mask=inside, other=0.0)
            inside = _inside(b.place, k, COLUMNS, block.K, DIM)
            y = tl.load(_pointers(b.place, k, COLUMNS, block.K), mask=inside, other=0.0)
            products = dot(x, tl.trans(y), products)
    return products


@triton.jit
def weights_kept(head, row, column, block: tl.constexpr):
    """Returns which weights dropout keeps in the tile at ``row`` and ``column``, (M, N)."""
    threshold = head.sizes.threshold
    row += head.drawn_row
    column += head.drawn_column
    return dropout_keep(head.seed, head.plane, row, column, threshold, None, block.M, block.N)


@triton.jit
def group_size(sizes, variant: tl.constexpr):
    """Returns query heads per key head. A 1 is a compile-time constant, which removes a loop."""
    if variant.grouped:
        group = sizes.group
    else:
        group = 1
    return group
