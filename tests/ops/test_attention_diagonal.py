"""``diagonal``: a causal mask or a window on any diagonal, one for all sequences or one for each.

Accuracy is held to the numerics rule where that of all options is, and derivatives are checked
where those of all options are.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from attention_cases import (
    Case,
    Results,
    assert_equal,
    assert_near,
    assert_same_bits,
    boundaries,
    dense,
    make,
    normal,
    packed,
    pairs,
    run,
    run_packed,
)
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

import trifuse

attention = trifuse.scaled_dot_product_attention
LOWER_RIGHT = CausalVariant.LOWER_RIGHT
Lq, Lk = 70, 75
N = Lq + Lk - 1

DIAGONALS: dict[str, int | Tensor] = {
    "above": 20,
    "below": -33,
    "beyond": -Lq,
    "each": torch.tensor([31, -18]),
    "each, int32": torch.tensor([-66, 70], dtype=torch.int32),
}

BANDS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"window": (20, 5)},
    "causal window": {"is_causal": True, "window": 9},
    "left": {"window": (3, None)},
    "lengths, dropout": {
        "is_causal": True,
        "key_lengths": torch.tensor([75, 31]),
        "dropout_p": 0.3,
    },
    "mask, softcap": {"window": 30, "mask": normal(1, 2, Lq, Lk, seed=3), "softcap": 0.8},
    "groups, sinks": {"is_causal": True, "H": 4, "Hkv": 2, "sinks": normal(4, seed=6)},
    "one query": {"is_causal": True, "Lq": 1},
    "few queries": {"window": (40, 2), "Lq": 3, "H": 4, "Hkv": 2},
    "several chunks of keys": {"is_causal": True, "Lk": 530, "window": 300},
}


def with_diagonal(case: Case, diagonal: int | Tensor | None) -> Case:
    return dataclasses.replace(case, options={**case.options, "diagonal": diagonal})


def as_mask(case: Case) -> Case:
    """Returns the case with its bounds as a mask."""
    options = {n: v for n, v in case.options.items() if n not in ("diagonal", "window")}
    keep = pairs(case)
    mask = keep if case.attn_mask is None else case.attn_mask.masked_fill(~keep, float("-inf"))
    return dataclasses.replace(case, attn_mask=mask, options={**options, "is_causal": False})


@pytest.mark.parametrize("diagonal", DIAGONALS)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.covering
def test_as_a_mask_of_the_same_pairs(kernel, band, diagonal):
    case = with_diagonal(make(**BANDS[band]), DIAGONALS[diagonal])
    actual, expected = run(case), run(as_mask(case))
    if case.attn_mask is not None:  # the other mask has a row for each sequence
        assert actual.grad_mask is not None
        assert expected.grad_mask is not None
        summed = expected.grad_mask.sum_to_size(case.attn_mask.shape)
        expected = expected._replace(grad_mask=summed)
    assert_near(actual, expected)


@pytest.mark.parametrize("diagonal", DIAGONALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_are_those_of_the_mask(cpp_kernel, dtype, diagonal):
    case = with_diagonal(make(dtype=dtype, window=(15, 4)), DIAGONALS[diagonal])
    assert_same_bits(run(case), run(as_mask(case)))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": True, "window": 20}])
def test_the_corners_are_two_of_the_diagonals(kernel, options):
    """By a number or by one for each sequence: 0 is upper left, Lk - Lq lower right."""
    case = make(**options)
    lower_right = make(**options | {"is_causal": LOWER_RIGHT})
    for expected, offset in ((run(case), 0), (run(lower_right), Lk - Lq)):
        for diagonal in (offset, torch.tensor([offset, offset])):
            assert_same_bits(run(with_diagonal(case, diagonal)), expected)


def test_each_sequence_has_its_own(kernel):
    """In a batch as alone, to the last bit."""
    case = make(is_causal=True, window=(40, None), key_lengths=torch.tensor([75, 31]))
    together = run(with_diagonal(case, torch.tensor([3, -39])))
    for b, diagonal in enumerate((3, -39)):
        one = {f: getattr(case, f)[b : b + 1] for f in ("query", "key", "value", "grad_out")}
        lengths = {"key_lengths": case.options["key_lengths"][b : b + 1]}
        alone = dataclasses.replace(
            with_diagonal(case, diagonal), **one, grad_lse=case.grad_lse[b : b + 1]
        )
        alone = dataclasses.replace(alone, options=alone.options | lengths)
        for name, whole, part in zip(Results._fields, together, run(alone), strict=True):
            if part is not None:
                assert_equal(whole[b : b + 1], part, name)


def test_lower_right_beside_lengths(kernel):
    """Each sequence's last query is aligned with its last key, as if padding were cut off."""
    # torch's product of fewer keys may add in another order.
    compare = torch.testing.assert_close if kernel.backend == "eager" else assert_equal
    lengths = torch.tensor([75, 72])
    case = make(is_causal=True, key_lengths=lengths)
    together = run(with_diagonal(case, lengths - Lq))
    for b, length in enumerate(lengths.tolist()):
        cut = {f: getattr(case, f)[b : b + 1, :, :length] for f in ("key", "value")}
        rows = {f: getattr(case, f)[b : b + 1] for f in ("query", "grad_out", "grad_lse")}
        alone = run(dataclasses.replace(make(is_causal=LOWER_RIGHT), **rows, **cut))
        compare(together.out[b : b + 1], alone.out)
        compare(together.lse[b : b + 1], alone.lse)
        compare(together.grad_query[b : b + 1], alone.grad_query)
        compare(together.grad_key[b : b + 1, :, :length], alone.grad_key)


def test_decoding_into_a_cache(kernel):
    """A token at place d sees the cache up to there: row d of the whole call."""
    case = make(Lq=75, is_causal=True, alibi_slopes=torch.tensor([0.5, 0.1]))
    whole = run(case)
    places = torch.tensor([40, 74])
    rows = torch.stack([case.query[b, :, d : d + 1] for b, d in enumerate(places.tolist())])
    out, lse = attention(
        rows, case.key, case.value, diagonal=places, return_lse=True, **case.options
    )
    for b, d in enumerate(places.tolist()):
        torch.testing.assert_close(out[b, :, 0], whole.out[b, :, d])
        torch.testing.assert_close(lse[b, :, 0], whole.lse[b, :, d])


# Far away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [2**31, 2**60, 2**61 + 7, 2**63 - 1])
@pytest.mark.parametrize("window", [None, 3, (sys.maxsize, 0)], ids=str)
def test_diagonals_beyond_all_keys(kernel, far, window):
    """Every key is before the diagonal of one sequence, and after that of the other."""
    case = make(is_causal=True, window=window)
    both = run(with_diagonal(case, torch.tensor([far, -far])))
    for b, diagonal in enumerate((far, -far)):
        alone = run(with_diagonal(case, diagonal))
        for name, a, e in zip(Results._fields, both, alone, strict=True):
            if a is not None:
                assert_equal(a[b], e[b], name)
    without_keys = [1] if window != 3 else [0, 1]
    for name, a in zip(Results._fields, both, strict=True):
        if a is not None:
            wanted = float("-inf") if name == "lse" else 0
            assert a[without_keys].eq(wanted).all(), name
    if window != 3:
        assert_equal(both.out[0], run(make()).out[0])


@pytest.mark.parametrize("far", [2**63, 2**100])
def test_numbers_of_any_size(kernel, far):
    case = make(is_causal=True, window=(sys.maxsize, 5))
    assert_same_bits(run(with_diagonal(case, far)), run(with_diagonal(case, 2**40)))
    assert_same_bits(run(with_diagonal(case, -far)), run(with_diagonal(case, -(2**40))))


@pytest.mark.parametrize("cut", [0, 5, 60])
def test_a_wide_window_around_a_far_diagonal(kernel, cut):
    """The bound and the diagonal are added before anything is clamped."""
    far = 2**40
    for offset, window, near in (
        (far, (far - cut, 0), (0, None)),  # query i sees keys from i + cut on
        (-far, (0, far + cut), (None, 0)),  # query i sees keys up to i + cut
    ):
        wanted = run(with_diagonal(make(window=near), cut))
        assert not wanted.out.equal(run(make()).out)
        for diagonal in (offset, torch.tensor([offset, offset])):
            assert_same_bits(run(with_diagonal(make(window=window), diagonal)), wanted)


# Biases by distance -------------------------------------------------------------------------------


@pytest.mark.parametrize("diagonal", [13, -40, torch.tensor([9, -30])], ids=str)
def test_distances_of_slopes_move_with_the_diagonal(kernel, diagonal):
    """Slopes add the mask -m |j - i - diagonal|; their gradient is that of the mask."""
    slopes = torch.tensor([0.5, 0.03], requires_grad=True)
    case = make(window=60)
    each = torch.as_tensor(diagonal).expand(2)[:, None, None, None]
    distance = torch.arange(Lk) - torch.arange(Lq)[:, None] - each
    mask = -slopes[:, None, None] * distance.abs()
    arguments = (case.query, case.key, case.value)
    options = {"window": 60, "diagonal": diagonal, "return_lse": True}
    actual = attention(*arguments, alibi_slopes=slopes, **options)
    expected = attention(*arguments, mask, **options)
    torch.testing.assert_close(actual, expected)
    grads = [
        torch.autograd.grad((out * case.grad_out).sum() + lse.exp().sum(), slopes)
        for out, lse in (actual, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("diagonal", [13, torch.tensor([9, -30])], ids=str)
def test_relative_bias_is_by_key_and_query(kernel, diagonal):
    """Its element j - i + Lq - 1 belongs to (i, j) wherever the diagonal is."""
    table = normal(2, 2, N, seed=8)
    case = with_diagonal(make(window=(30, 9), relative_bias=table), diagonal)
    actual = run(case)
    mask = dense(table, Lq, Lk).contiguous()
    expected = run(dataclasses.replace(case, relative_bias=None, attn_mask=mask))
    same = actual._replace(grad_relative_bias=None)
    assert_near(same, expected._replace(grad_mask=None))
    assert expected.grad_mask is not None
    offsets = range(1 - Lq, Lk)
    sums = torch.stack([expected.grad_mask.diagonal(d, -2, -1).sum(-1) for d in offsets], -1)
    torch.testing.assert_close(actual.grad_relative_bias, sums, rtol=2e-4, atol=2e-5)


# Packed sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slopes", [None, normal(2, seed=7).abs()], ids=["", "slopes"])
def test_packed_is_each_sequence_by_itself(kernel, slopes):
    lengths_q, lengths_k, diagonals = [70, 3, 0, 9], [45, 20, 5, 7], [-20, 17, 4, -2]
    case = packed(lengths_q, lengths_k, 2, is_causal=True, window=25)
    biases = {} if slopes is None else {"alibi_slopes": slopes}
    each = torch.tensor(diagonals)
    bounds = boundaries(lengths_q), boundaries(lengths_k)
    together = run_packed(case, *bounds, diagonal=each, **biases)
    q = k = 0
    for n, m, diagonal in zip(lengths_q, lengths_k, diagonals, strict=True):
        one = dataclasses.replace(
            with_diagonal(case, diagonal),
            **{f: getattr(case, f)[:, :, q : q + n] for f in ("query", "grad_out", "grad_lse")},
            **{f: getattr(case, f)[:, :, k : k + m] for f in ("key", "value")},
        )
        alone = run(dataclasses.replace(one, options=one.options | biases))
        pairs_of = {"grad_key": (k, m), "grad_value": (k, m)}
        for name in ("out", "lse", "grad_query", "grad_key", "grad_value"):
            start, length = pairs_of.get(name, (q, n))
            assert_equal(
                getattr(together, name)[:, :, start : start + length], getattr(alone, name)
            )
        q, k = q + n, k + m
    same = run_packed(case, *bounds, diagonal=5, **biases)
    assert_same_bits(same, run_packed(case, *bounds, diagonal=torch.full((4,), 5), **biases))


def test_packed_lower_right_is_one_of_the_diagonals(kernel):
    lengths_q, lengths_k = [70, 3, 9], [75, 20, 7]
    bounds = boundaries(lengths_q), boundaries(lengths_k)
    diagonals = torch.tensor(lengths_k) - torch.tensor(lengths_q)
    actual, expected = (
        run_packed(packed(lengths_q, lengths_k, is_causal=causal), *bounds, diagonal=diagonal)
        for causal, diagonal in ((True, diagonals), (LOWER_RIGHT, None))
    )
    assert_same_bits(actual, expected)
