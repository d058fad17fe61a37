"""Dropout's random bits inside a Triton kernel, as pytorch_ext/reference/philox.py specifies them.

Triton's own ``tl.philox`` is the same generator; this file adds the numbering of elements, the
number of rounds and the 16 bits per element that all backends share.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def placed_units(place, units):
    """Returns where units of a call lie in the whole: ``placed_units`` of the specification.

    ``place`` points to the seed, which the place follows.
    """
    offset = tl.load(place + 1)
    block = tl.load(place + 2)
    stride = tl.load(place + 3)
    fold = tl.load(place + 4)
    jump = tl.load(place + 5)
    units = tl.cast(units, tl.int64)
    rest = units % block
    return offset + units // block * stride + rest + tl.where(rest >= fold, jump, 0)


@triton.jit
def dropout_keep(
    seed,  # int64, scalar
    plane,  # int32, scalar: the number of the matrix
    row,  # int32, scalar: the tile's first row
    column,  # int32, scalar: the tile's first column, a multiple of 8
    threshold,  # int32, scalar: 16-bit values below it drop an element
    place,  # of the rows, as ``placed_units`` takes it; or None
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a multiple of 8
):
    """Returns int1 (ROWS, COLUMNS), True where an element is kept."""
    rows = row + tl.arange(0, ROWS)[:, None]
    if place is not None:
        rows = placed_units(place, rows).to(tl.int32)
    groups = column // 8 + tl.arange(0, COLUMNS // 8)[None, :]
    return keep_groups(seed, plane, rows, groups, threshold, ROWS, COLUMNS)


@triton.jit
def keep_groups(
    seed,
    plane,
    rows,  # int32, broadcastable to (ROWS, COLUMNS // 8)
    groups,  # int32, likewise: the numbers of eight columns each
    threshold,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Returns int1 (ROWS, COLUMNS), True where an element is kept.

    One generator call serves 8 neighbours of a row, at about 7 integer instructions per element.
    One thread holds all 8 of them; using the tile in another layout costs an exchange of one byte
    per element through shared memory.
    """
    word0, word1, word2, word3 = tl.philox(seed, groups, rows, plane, 0, ROUNDS)
    # (ROWS, COLUMNS / 8, 2, 2, 2): each join adds the next lower bit of a half-word's index.
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (ROWS, COLUMNS)) >= threshold.to(tl.uint32)
