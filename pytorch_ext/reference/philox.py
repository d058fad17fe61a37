"""Philox4x32, the counter-based generator behind every dropout mask in trifuse.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). It works
like a small block cipher: it maps 128 bits of counter and 64 bits of key to 128 random bits, and
carries no state from one call to the next. So an element's random number depends on *where the
element is* and on the seed, never on the backend, tile or thread that draws it. A backward pass
draws the forward's mask again instead of storing it.

This file is the specification: the C++, Triton and CUDA generators must agree with it bit for bit.

Conventions, chosen once for all backends:

- 7 rounds, the fewest that pass BigCrush in the paper (its table 2);
- 16 bits per element: one call serves 8 neighbours along the last axis; p is a multiple of 2⁻¹⁶;
- an element is dropped where its 16 bits are below ``threshold = round(p · 2¹⁶)``, and kept
  elements are scaled by 2¹⁶ / (2¹⁶ - threshold), the exact inverse of the probability that is
  actually used;
- p = 1 drops every element, and only p = 1 does.

An element's position may be counted in a larger call. Then a call on a part, such as one process's
part of a batch, drops the same elements of that part as the call on the whole. The seed of such a
call is followed by its *place*: see ``Place``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 7
LONG_ROW = 1 << 30
_MASK32 = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Place(NamedTuple):
    """Where the elements of a call lie in the whole of which the call is a part.

    An operator numbers *units* in order: attention the matrices of its heads, the norm its rows,
    a recurrent layer the rows of its batch, and dropout alone its elements. Runs of ``block`` units
    lie ``stride`` units apart in the whole, the first at ``offset``. In each run the units from
    ``fold`` on lie ``jump`` further.
    """

    offset: int
    block: int = 1 << 62
    stride: int = 0
    fold: int = 1 << 62
    jump: int = 0
    row: int = 0  # attention's first query
    column: int = 0  # attention's first key, a multiple of 8


SEED_AND_PLACE = 1 + len(Place._fields)


def draw_seed(like: Tensor) -> Tensor:
    """Draws the key of a call's random numbers, int64 (1,), from torch's default generator."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (1,), device=like.device)


def is_placed(seed: Tensor) -> bool:
    """Returns whether a place follows the seed."""
    return seed.numel() > 1


def placed_units(seed: Tensor, units: Tensor) -> Tensor:
    """Returns where units of a call, int64, lie in the whole."""
    if not is_placed(seed):
        return units
    place = Place(*seed[1:].unbind())  # type: ignore[arg-type]
    rest = units % place.block
    jump = torch.where(rest >= place.fold, place.jump, 0)
    return place.offset + units // place.block * place.stride + rest + jump


def threshold(dropout_p: float) -> int:
    """Returns how many of the 65,536 16-bit values drop an element; all of them only at p = 1."""
    return min(round(dropout_p * 65536), 65535) if dropout_p < 1 else 65536


def keep_scale(dropout_p: float) -> float:
    """Returns the factor of a kept element, 1 / (the probability of keeping it), or 0 at p = 1."""
    return 65536 / (65536 - threshold(dropout_p)) if dropout_p < 1 else 0.0


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> list[Tensor]:
    """Returns four 32-bit words for every counter.

    Args:
        counter: four int64 tensors, broadcastable together, holding 32-bit words.
        seed: int64, one element; its low half is the first key word.

    Returns:
        Four int64 tensors of the broadcast shape, each value in [0, 2³²).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2⁶⁴ and >> copies the sign, so the halves need their masks.
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK32) ^ c1 ^ key0,
            p1 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ key1,
            p0 & _MASK32,
        )
        key0, key1 = (key0 + _WEYL[0]) & _MASK32, (key1 + _WEYL[1]) & _MASK32
    return [c0, c1, c2, c3]


def dropout_keep(
    seed: Tensor,
    plane: Tensor,
    rows: int | Tensor,
    columns: int,
    dropout_p: float,
    first_column: int | Tensor = 0,
) -> Tensor:
    """Returns which elements of a stack of matrices survive dropout.

    Element (row, column) of a plane takes half-word ``column % 8`` of the 128 bits drawn at counter
    ``(column // 8, row, plane, 0)``; half-words are counted from the low end of the first word.

    Args:
        seed: int64; only its first element is read.
        plane: int64 (...), the number of each matrix: ``b · H + h`` for attention.
        rows: the number of rows of each matrix, or the numbers of its rows, int64 (rows,).
        columns: the number of columns of each matrix.
        dropout_p: the probability of dropping an element, in [0, 1].
        first_column: the number of the first column, a multiple of 8.

    Returns:
        bool (..., rows, columns), True where the element is kept.
    """
    device = plane.device
    groups = (columns + 7) // 8
    column = torch.arange(groups, device=device) + first_column // 8
    row = rows if isinstance(rows, Tensor) else torch.arange(rows, device=device)
    counter = (column, row[:, None], plane[..., None, None], torch.zeros_like(column))
    words = philox4x32(counter, seed.flatten()[:1])
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    bits = torch.stack(halves, dim=-1).flatten(-2)[..., :columns]
    return bits >= threshold(dropout_p)


def dropout_keep_flat(seed: Tensor, count: int, dropout_p: float) -> Tensor:
    """Returns which of ``count`` elements in a line survive dropout: bool (count,).

    The line is cut into rows of 2³⁰, so that column numbers fit in 32 bits: element i is in row
    i // 2³⁰ and column i mod 2³⁰ of plane 0. A place may put them anywhere in a longer line.
    """
    if is_placed(seed):
        return _keep_units(seed, count, dropout_p)
    rows = -(-count // LONG_ROW)
    plane = torch.zeros((), dtype=torch.int64, device=seed.device)
    keep = dropout_keep(seed, plane, rows, min(count, LONG_ROW), dropout_p)
    return keep.flatten()[:count]


def _keep_units(seed: Tensor, count: int, dropout_p: float) -> Tensor:
    """:func:`dropout_keep_flat` with a place: draws for each element by itself."""
    i = placed_units(seed, torch.arange(count, device=seed.device))
    row, column = i // LONG_ROW, i % LONG_ROW
    zero = torch.zeros_like(i)
    words = torch.stack(philox4x32((column // 8, row, zero, zero), seed[:1]), -1)
    word = words.gather(-1, (column % 8 // 2)[:, None]).squeeze(-1)
    return ((word >> (16 * (column % 2))) & 0xFFFF) >= threshold(dropout_p)
