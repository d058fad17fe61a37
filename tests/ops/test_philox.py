"""The random numbers behind dropout: known answers, frequencies, independence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from trifuse.reference import philox

# counter, key, result: Random123's published known answers for philox4x32 with 7 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def seed_of(key: tuple[int, int]) -> Tensor:
    unsigned = key[0] | key[1] << 32
    return torch.tensor([unsigned - (unsigned >> 63 << 64)])


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox.philox4x32(tuple(torch.tensor([c]) for c in counter), seed_of(key))
    assert tuple(w.item() for w in words) == expected


def test_half_words_are_where_the_specification_says():
    """Checks each element (row, column) of a plane against its own counter."""
    seed, rows, columns, plane = seed_of((7, 0x9ABCDEF0)), 3, 21, 5
    dropout_p = 0.37
    keep = philox.dropout_keep(seed, torch.tensor([plane]), rows, columns, dropout_p)[0]
    for row, column in itertools.product(range(rows), range(columns)):
        counter = tuple(torch.tensor([c]) for c in (column // 8, row, plane, 0))
        words = [w.item() for w in philox.philox4x32(counter, seed)]
        half = words[column % 8 // 2] >> 16 * (column % 2) & 0xFFFF
        assert keep[row, column].item() == (half >= round(dropout_p * 65536))


def test_a_wider_matrix_begins_with_the_narrower_one():
    seed, planes = torch.tensor([42]), torch.arange(3)
    wide = philox.dropout_keep(seed, planes, 9, 40, 0.5)
    assert torch.equal(philox.dropout_keep(seed, planes, 4, 13, 0.5), wide[:, :4, :13])


@pytest.mark.parametrize(
    ("dropout_p", "expected"),
    [
        (0.0, 0),
        (1e-6, 0),
        (2**-16, 1),
        (0.1, 6554),
        (0.5, 32768),
        (1 - 2**-16, 65535),
        (0.999999, 65535),
    ],
)
def test_threshold(dropout_p, expected):
    assert philox.threshold(dropout_p) == expected
    kept = (65536 - expected) / 65536
    assert philox.keep_scale(dropout_p) * kept == 1


SEEDS = (0, 1, 2**31, -1, 2**62 + 12345)


def standard_score(hits: int, trials: int, probability: float) -> float:
    return (hits - trials * probability) / math.sqrt(trials * probability * (1 - probability))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5, 0.9])
def test_frequency(seed, dropout_p):
    """Over a million elements, in every row and column, and for every column modulo 8."""
    dropped = ~philox.dropout_keep(torch.tensor([seed]), torch.arange(4), 512, 512, dropout_p)
    p = philox.threshold(dropout_p) / 65536
    assert abs(standard_score(int(dropped.sum()), dropped.numel(), p)) < 4
    for counts, trials in ((dropped.sum(-1), 512), (dropped.sum(-2), 512)):
        scores = (counts - trials * p) / math.sqrt(trials * p * (1 - p))
        assert scores.abs().max() < 7  # the largest of 2048; at p = 0.01 the tail is skewed
        assert scores.std().item() == pytest.approx(1, abs=0.1)
    for lane in range(8):
        part = dropped[..., lane::8]
        assert abs(standard_score(int(part.sum()), part.numel(), p)) < 4.5


@pytest.mark.parametrize("seed", SEEDS)
def test_independence(seed):
    """Neighbours along columns, rows, planes and seeds agree as often as independent draws."""
    p = 0.5
    key = torch.tensor([seed])
    keep = philox.dropout_keep(key, torch.arange(4), 256, 256, p)
    other = philox.dropout_keep(key ^ 1, torch.arange(4), 256, 256, p)
    swapped = philox.dropout_keep(
        (key << 32) | ((key >> 32) & 0xFFFFFFFF), torch.arange(4), 256, 256, p
    )
    pairs = {f"column + {d}": (keep[..., d:], keep[..., :-d]) for d in (1, 2, 7, 8, 64)}
    pairs |= {f"row + {d}": (keep[:, d:], keep[:, :-d]) for d in (1, 8)}
    pairs |= {"plane + 1": (keep[1:], keep[:-1]), "seed ^ 1": (keep, other)}
    pairs |= {"transposed": (keep, keep.mT)}
    if seed not in (0, -1):  # their halves are equal
        pairs["halves of the seed swapped"] = (keep, swapped)
    for what, (a, b) in pairs.items():
        agreeing, trials = int((a == b).sum()), a.numel()
        if what == "transposed":  # each pair counted twice, and the diagonal
            agreeing, trials = (agreeing - 4 * 256) // 2, (trials - 4 * 256) // 2
        assert abs(standard_score(agreeing, trials, 0.5)) < 4.5, what
