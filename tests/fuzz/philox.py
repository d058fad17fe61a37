"""Philox4x32 with 7 rounds, from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(2011), section 3.3: what trifuse's dropout draws by, written a second time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def words(seed: int, counters: np.ndarray) -> np.ndarray:
    """Four words of 32 bits for each counter.

    Args:
        seed: 64 bits, the key.
        counters: (count, 4), words of 32 bits.
    """
    a, b, c, d = counters.astype(np.uint64).T
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(7):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (right >> _HALF) ^ b ^ key[0], right & _LOW,
            (left >> _HALF) ^ d ^ key[1], left & _LOW,
        )  # fmt: skip
        key = [key[0] + np.uint64(0x9E3779B9) & _LOW, key[1] + np.uint64(0xBB67AE85) & _LOW]
    return np.stack([a, b, c, d], -1)


def dropped_values(p: float) -> int:
    """How many of the 65,536 values of an element's bits drop it: all of them only at p = 1."""
    return 65536 if p == 1 else min(round(p * 65536), 65535)


def scale(p: float) -> float:
    """The factor of a kept element."""
    return 0.0 if p == 1 else 65536 / (65536 - dropped_values(p))


def keep(seed: int, p: float, plane: np.ndarray, row: np.ndarray, column: np.ndarray) -> Tensor:
    """Which elements stay: bool, as many as there are places.

    Eight neighbours of a row share the 128 bits at the counter (column // 8, row, plane, 0), 16
    bits each, the first the lowest.
    """
    places = np.stack([column // 8, row, plane, np.zeros_like(row)], -1)
    bits = words(seed, places)
    eighth = column % 8
    word = np.take_along_axis(bits, (eighth // 2)[:, None], 1)[:, 0]
    number = word >> (16 * (eighth % 2)).astype(np.uint64) & np.uint64(0xFFFF)
    return torch.from_numpy(number >= np.uint64(dropped_values(p)))


def drawn_seed(generator_seed: int) -> int:
    """The seed that a call draws from torch's default generator, seeded so."""
    limits = torch.iinfo(torch.int64)
    torch.manual_seed(generator_seed)
    return int(torch.randint(limits.min, limits.max, (1,)))
