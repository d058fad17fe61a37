"""Philox4x32 with 7 rounds, from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(2011), section 3.3: a second implementation of the generator of trifuse's dropout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def words(seed: int, counters: np.ndarray) -> np.ndarray:
    """Returns four 32-bit words for each counter.

    Args:
        seed: the key, 64 bits.
        counters: (count, 4), 32-bit words.
    """
    a, b, c, d = counters.astype(np.uint64).T
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(7):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (right >> _HALF) ^ b ^ key[0], right & _LOW
        c, d = (left >> _HALF) ^ d ^ key[1], left & _LOW
        key = [key[0] + np.uint64(0x9E3779B9) & _LOW, key[1] + np.uint64(0xBB67AE85) & _LOW]
    return np.stack([a, b, c, d], -1)


def dropped_values(p: float) -> int:
    """Returns how many of the 65,536 values of an element's bits drop it; all only if p = 1."""
    return 65536 if p == 1 else min(round(p * 65536), 65535)


def scale(p: float) -> float:
    """Returns the factor of kept elements."""
    return 0.0 if p == 1 else 65536 / (65536 - dropped_values(p))


def keep(seed: int, p: float, plane: np.ndarray, row: np.ndarray, column: np.ndarray) -> Tensor:
    """Returns which elements are kept, one bool per place.

    Eight neighbours in a row share the 128 bits of the counter (column // 8, row, plane, 0): 16
    bits each, lowest first.
    """
    places = np.stack([column // 8, row, plane, np.zeros_like(row)], -1)
    bits = words(seed, places)
    eighth = column % 8
    word = np.take_along_axis(bits, (eighth // 2)[:, None], 1)[:, 0]
    number = word >> (16 * (eighth % 2)).astype(np.uint64) & np.uint64(0xFFFF)
    return torch.from_numpy(number >= np.uint64(dropped_values(p)))


def drawn_seed(generator_seed: int) -> int:
    """Returns the seed that a call draws after ``torch.manual_seed(generator_seed)``."""
    limits = torch.iinfo(torch.int64)
    torch.default_generator.manual_seed(generator_seed)
    return int(torch.randint(limits.min, limits.max, (1,)))
