"""Dropout's random bits inside a Triton kernel, as trifuse/reference/philox.py specifies them.

Triton's own ``tl.philox`` is the same generator; this file adds the numbering of elements, the
number of rounds and the 16 bits per element that all backends share.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def dropout_keep(
    seed,  # int64, scalar
    plane,  # int32, scalar: the number of the matrix
    row,  # int32, scalar: the tile's first row
    column,  # int32, scalar: the tile's first column, a multiple of 8
    threshold,  # int32, scalar: 16-bit values below it drop an element
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a multiple of 8
):
    """int1 (ROWS, COLUMNS), True where an element is kept.

    One generator call serves 8 neighbours of a row, at about 7 integer instructions per element.
    One thread holds all 8 of them; using the tile in another layout costs an exchange of one byte
    per element through shared memory.
    """
    rows = row + tl.arange(0, ROWS)[:, None]
    groups = column // 8 + tl.arange(0, COLUMNS // 8)[None, :]
    word0, word1, word2, word3 = tl.philox(seed, groups, rows, plane, 0, ROUNDS)
    # (ROWS, COLUMNS / 8, 2, 2, 2): each join adds the next lower bit of a half-word's index.
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (ROWS, COLUMNS)) >= threshold.to(tl.uint32)
