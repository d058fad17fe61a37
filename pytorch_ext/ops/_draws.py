"""The random numbers of a call: its seed, and its place within a call on the whole batch.

A kernel numbers the elements of its call from 0. If the call computes a part, such as one process's
part of a batch, the position of that part follows the seed (``philox.Place``). Then the processes
together drop what one process drops.

Sharding rules (_sharding.py) find the place in the layout of DTensors. For other tensors,
``trifuse.distributed.part_of_batch`` defines which part they are, and the place follows from their
sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from trifuse.ops import _modes
from trifuse.ops._checks import fail
from trifuse.reference import philox
from trifuse.reference.philox import Place


class Share(NamedTuple):
    """A part of a dimension that consists of ``whole`` pieces of one length.

    The part has ``pieces`` of them, from piece ``first`` on. The call's tensors determine the
    length of a piece, so the tokens of a flattened batch are shared as its sequences are.
    """

    first: int = 0
    pieces: int = 1
    whole: int = 1
    second: int | None = None  # where the second half begins, if it does not follow the first


WHOLE = Share()


class Part(NamedTuple):
    """The part of the whole batch that the calls of this process compute."""

    batch: Share = WHOLE
    sequence: Share = WHOLE
    heads: Share = WHOLE
    batch_dim: int = 0  # of tensors (batch, sequence, ...) or (sequence, batch, ...)

    def shares(self, count: int, leading: int) -> list[Share]:
        """Returns the shares of ``count`` dimensions, the first ``leading`` of which are the batch
        and the sequence, or the batch alone."""
        if leading >= 2:
            order = [self.batch, self.sequence]
            return [*(order[::-1] if self.batch_dim == 1 else order), *[WHOLE] * (count - 2)]
        if self.sequence != WHOLE:
            raise NotImplementedError(
                "dropout of tensors that join batch and sequence in one dimension, where each "
                "process has a part of the sequence: keep the two dimensions apart"
            )
        return [self.batch, *[WHOLE] * (count - 1)]


_part: Part | None = None
_given: Tensor | None = None


def active() -> bool:
    """Returns whether a call's seed may have a place, or be given."""
    return _part is not None or _given is not None


@contextmanager
def part(value: Part) -> Iterator[None]:
    """Sets the part that the calls inside the ``with`` block compute. It is global to the process,
    so that it applies in the threads in which torch computes gradients."""
    global _part
    previous, _part = _part, value
    try:
        yield
    finally:
        _part = previous


def current() -> Part:
    """Returns the part that calls compute; by default, the whole batch."""
    return Part() if _part is None else _part


@contextmanager
def given(seed: Tensor) -> Iterator[None]:
    """Sets the seed, with its place, of the call inside the ``with`` block. The block may hold only
    a single call of an operator, because the seed applies to all threads of the process."""
    global _given
    previous, _given = _given, seed
    try:
        yield
    finally:
        _given = previous


# Places ------------------------------------------------------------------------------------------


def place_of_rows(sizes: Sequence[int]) -> Place | None:
    """Returns the place of a call that numbers rows of these dimensions; None for the whole."""
    if _part is None or not sizes:
        return None
    return _place(_part.shares(len(sizes), len(sizes)), sizes)


def place_of_elements(sizes: Sequence[int], batch_dim: int | None = None) -> Place | None:
    """Returns the place of a call that numbers elements of these dimensions, features last.

    Args:
        batch_dim: the dimension of the batch, 0 or 1. Default: that of the part.
    """
    if _part is None or not sizes:
        return None
    part = _part if batch_dim is None else _part._replace(batch_dim=batch_dim)
    return _place(part.shares(len(sizes), len(sizes) - 1), sizes)


def place_of_batch(size: int) -> Place | None:
    """Returns the place of a recurrent layer's call."""
    if _part is None:
        return None
    if _part.sequence != WHOLE:
        raise NotImplementedError("dropout or zoneout in a recurrent layer on a part of a sequence")
    return _place([_part.batch], [size])


def place_of_heads(batch: int, heads: int) -> Place | None:
    """Returns the place of an attention's call."""
    return None if _part is None else _place([_part.batch, _part.heads], [batch, heads])


def is_aligned(place: Place | None) -> bool:
    """Returns whether eight elements that share a random number stay together."""
    return place is None or all(number % 8 == 0 for number in place)


def _place(shares: Sequence[Share], sizes: Sequence[int]) -> Place:
    sizes = [int(n) for n in sizes]  # torch.compile specialises on them, as on the part
    firsts: list[int] = []
    wholes: list[int] = []
    fold: tuple[int, int, int] | None = None
    for d, (share, n) in enumerate(zip(shares, sizes, strict=True)):
        piece, rest = divmod(n, share.pieces)
        if rest:
            expected = f"a length that {share.pieces} divides, for {share.pieces} pieces of a batch"
            raise fail("part_of_batch", expected, n)
        firsts.append(share.first * piece)
        wholes.append(share.whole * piece)
        if share.second is not None:
            fold = (d, n // 2, (share.second - share.first) * piece - n // 2)
    return place_of_box(wholes, firsts, sizes, fold)


def place_of_box(
    whole: Sequence[int],
    firsts: Sequence[int],
    sizes: Sequence[int],
    fold: tuple[int, int, int] | None = None,
) -> Place:
    """Returns the place of a box in an array of units.

    Args:
        whole: sizes of the array.
        firsts: where the box begins.
        sizes: sizes of the box.
        fold: (d, i, jump): from index i of dimension d on, the box is shifted by ``jump`` in d.

    Raises:
        NotImplementedError: it is cut in several dimensions other than the first.
    """
    inner = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
    offset = sum(first * step for first, step in zip(firsts, inner, strict=True))
    cut = [d for d, n in enumerate(sizes) if n != whole[d] and math.prod(sizes[:d]) > 1]
    if fold is not None and fold[0] not in cut:
        cut.append(fold[0])
    if not cut:
        return Place(offset)
    if len(cut) > 1:
        raise NotImplementedError(
            f"dropout of tensors that are split in dimensions {sorted(cut)} at once: one of them "
            "may be split, and the first dimension"
        )
    (d,) = cut
    found = Place(offset, max(sizes[d] * inner[d], 1), whole[d] * inner[d])
    if fold is None:
        return found
    return found._replace(fold=fold[1] * inner[d], jump=fold[2] * inner[d])


# Seeds -------------------------------------------------------------------------------------------


def draw(like: Tensor, place: Place | None) -> Tensor:
    """Draws a call's seed from torch's default generator; the call's place follows it."""
    if _given is not None:
        return _given
    seed = philox.draw_seed(like)
    return seed if place is None else with_place(seed, place)


def with_place(seed: Tensor, place: Place) -> Tensor:
    """Adds a place to a seed.

    If the seed already has a place, it is that of a larger call, and the given place is relative to
    it. Then the two are added up. This requires that the larger call is one run of units.
    """
    # A tensor made under a dispatch mode or a transform may be fake or wrapped, and must not be
    # cached; Dynamo can't trace lru_cache.
    numbers = _numbers.__wrapped__ if _modes.is_watched() else _numbers
    added = numbers(place, seed.device)
    if not philox.is_placed(seed):
        return torch.cat([seed, added])
    torch._assert_async(
        seed[2] == Place(0).block,
        "dropout of DTensors under part_of_batch: only the first dimension may be split by both",
    )
    return torch.cat([seed[:1], seed[1:2] + added[:1], added[1:]])


@functools.lru_cache(maxsize=256)
def _numbers(place: Place, device: torch.device) -> Tensor:
    return torch.tensor(list(place), dtype=torch.int64, device=device)
