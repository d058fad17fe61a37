"""Attention with infinities in its tensors, its scores or its scale.

docs/semantics.md defines the results. The formula here uses eager torch's softmax and shares
nothing with ``trifuse.reference``; gradients are compared with the reference in float64.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from attention_cases import (
    Case,
    Results,
    assert_same_bits,
    boundaries,
    make,
    normal,
    packed,
    pairs,
    run,
    run_packed,
    scale,
    specification,
)
from torch import Tensor
from torch.nn.attention.bias import CausalVariant, causal_lower_right, causal_upper_left

import trifuse

# The tests that other files collect too, with their kernels.
__all__ = [
    "test_a_score_of_minus_infinity_is_a_weight_of_zero",
    "test_an_infinite_key_beside_an_odd_number_of_queries",
    "test_bounds_of_packed_lengths_wider_than_numbers",
    "test_dropout_of_everything",
    "test_infinities_that_take_part",
    "test_scales_from_end_to_end",
    "test_scales_that_leave_no_score_finite",
    "test_windows_wider_than_numbers",
]

NAN, INF = float("nan"), float("inf")
Lq, Lk = 70, 45  # two blocks of either for every kernel
STRUCTURES = ("all pairs", "causal", "bool mask", "float mask")
CAPPED = (*STRUCTURES, "causal, capped")  # infinite scores are finite under a cap
PLACES = ("key", "every key", "query", "value", "grad_out", "grad_lse", "attn_mask")


def by_torch(case: Case) -> tuple[Tensor, Tensor]:
    """Returns output and logsumexp in float64; an infinite value makes its sums NaN."""
    exact, keep = case.double(), pairs(case)
    scores = exact.query @ exact.key.mT * scale(case)
    if (softcap := case.options.get("softcap")) is not None:
        scores = softcap * (scores / softcap).tanh()
    if exact.attn_mask is not None and exact.attn_mask.dtype != torch.bool:
        scores = scores + exact.attn_mask
    scores = scores.masked_fill(~keep, -INF)
    empty = ~keep.any(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(empty, 0)
    finite = exact.value.isfinite()
    out = weights @ exact.value.masked_fill(~finite, 0)
    reached = keep.double() @ (~finite).double() > 0
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse.isinf() & ~empty[..., 0], NAN)
    return out.masked_fill(reached, NAN), lse


def structured(structure: str, rows: int = Lq, **options: Any) -> Case:
    """Returns a case in which each key is seen by some rows only or, with "all pairs", by all."""
    keep = normal(1, 2, rows, Lk, seed=8) > 0
    keep[..., 3, :] = False
    if structure.startswith("causal"):
        options["is_causal"] = True
    elif structure == "bool mask":
        options["mask"] = keep
    elif structure == "float mask":
        options["mask"] = normal(1, 2, rows, Lk, seed=9).masked_fill(~keep, -INF)
    if structure.endswith("capped"):
        options["softcap"] = 2.0
    return make(B=1, Lq=rows, Lk=Lk, **options)


def poisoned(case: Case, place: str) -> Case:
    """Returns the case with infinities of either sign in two rows of a tensor."""
    name = "key" if place == "every key" else place
    x = getattr(case, name).clone()
    if place == "every key":  # makes every score -inf
        positive = case.query.clone()
        positive[..., 4] = positive[..., 4].abs() + 1
        x[..., 4] = -INF
        return dataclasses.replace(case, query=positive, key=x)
    if place == "attn_mask":
        i, j = (x[0, 0] > -INF).nonzero()[40].tolist()
        x[0, 0, i, j] = INF
    elif x.dim() == 4:
        x[0, 0, 5, 4], x[0, 1, 17, 2] = -INF, INF
    else:
        x[0, 0, 5], x[0, 1, 17] = -INF, INF
    return dataclasses.replace(case, **{name: x})


def assert_alike(actual: Results, expected: Results, dtype: torch.dtype) -> None:
    """Asserts NaN in the same places, infinities in the same places, and near numbers elsewhere."""
    for name, a, e in zip(Results._fields, actual, expected, strict=True):
        if a is None or e is None:
            continue
        assert torch.equal(a.isnan(), e.isnan()), name
        assert torch.equal(a.isinf(), e.isinf()), name
        rtol = {torch.float64: 1e-9, torch.float32: 2e-4}.get(dtype, 4e-2)
        torch.testing.assert_close(a.double(), e.double(), rtol=rtol, atol=rtol, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("structure", CAPPED)
@pytest.mark.covering
def test_infinities_that_take_part(kernel, structure, place, dtype):
    if place == "attn_mask" and structure != "float mask":
        pytest.skip("only a float mask holds one")
    case = poisoned(structured(structure, dtype=dtype), place)
    expected = specification(case)
    assert any(x is not None and x.isnan().any() for x in expected)
    assert_alike(run(case), expected, dtype)


@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("structure", CAPPED)
def test_infinities_that_take_part_with_few_queries(kernel, structure, rows):
    """A kernel of its own on CPUs. Row 3 has no keys, if there is a mask."""
    for place in ("key", "every key", "value", *(["attn_mask"] * (structure == "float mask"))):
        for dtype in (torch.float32, torch.bfloat16):
            case = poisoned(structured(structure, rows, dtype=dtype), place)
            expected = specification(case)
            # A causal row this early doesn't see the later infinity.
            assert structure.startswith("causal") or expected.out.isnan().any()
            assert_alike(run(case), expected, dtype)


@pytest.mark.parametrize("rows", [5, 69])
@pytest.mark.parametrize("structure", ["all pairs, capped", *CAPPED])
@pytest.mark.covering(1)
def test_an_infinite_key_beside_an_odd_number_of_queries(kernel, structure, rows):
    """Kernels that multiply pairs of queries have one too many: its zeros times Inf are NaN."""
    for dtype in (torch.float32, torch.bfloat16):
        case = poisoned(structured(structure, rows, dtype=dtype), "key")
        expected = specification(case)
        assert structure != "all pairs, capped" or expected.grad_value.isfinite().all()
        assert_alike(run(case), expected, dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("structure", CAPPED)
def test_the_reference_does_as_torch_s_softmax(structure, place):
    if place == "attn_mask" and structure != "float mask":
        pytest.skip("only a float mask holds one")
    case = poisoned(structured(structure), place)
    (out, lse), expected = by_torch(case), specification(case)
    assert_alike(expected._replace(out=out, lse=lse), expected, torch.float64)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_score_of_minus_infinity_is_a_weight_of_zero(kernel, structure):
    """Rows that see such a key have the same results as if it were masked."""
    case = structured(structure)
    query, key = case.query.abs() + 0.1, case.key.clone()
    key[..., 7, 2] = -INF
    with_it = dataclasses.replace(case, query=query, key=key, grad_lse=None)
    keep = torch.ones(1, 1, 1, Lk, dtype=torch.bool)
    keep[..., 7] = False
    masked = keep if case.attn_mask is None else case.attn_mask
    masked = masked & keep if masked.dtype == torch.bool else masked.masked_fill(~keep, -INF)
    without = dataclasses.replace(with_it, attn_mask=masked)
    actual, expected = run(with_it), run(without)
    rows = pairs(without).any(-1)
    torch.testing.assert_close(actual.out[rows], expected.out[rows])
    torch.testing.assert_close(actual.lse[rows], expected.lse[rows])
    torch.testing.assert_close(actual.grad_value, expected.grad_value)


@pytest.mark.parametrize("given", [1e-300, -1e-300, 1e-40, 3e-38, 1e-30, -1e-39, 1e30, 0.0])
@pytest.mark.parametrize("structure", ["all pairs", "causal", "float mask"])
@pytest.mark.covering(1)
def test_scales_from_end_to_end(kernel, structure, given):
    """Results are finite wherever the scores are."""
    case = structured(structure, scale=given)
    expected = specification(case)
    assert expected.grad_query.isfinite().all()
    if abs(given) <= 1:
        assert_alike(run(case), expected, torch.float32)
    else:  # rounding may decide which key has all of the weight
        assert run(case).out.isfinite().all()


@pytest.mark.parametrize("given", [1e300, -1e300, INF, -INF, NAN])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.covering(1)
def test_scales_that_leave_no_score_finite(kernel, structure, given):
    case = structured(structure, scale=given)
    actual = run(case)
    seen = pairs(case).any(-1)
    assert torch.equal(actual.out.isnan().all(-1), seen)
    assert torch.equal(actual.lse.isnan(), seen)
    assert actual.grad_query[seen].isnan().all()
    assert actual.out[~seen].eq(0).all()


def test_scales_of_float64(backend):
    for given in (1e-300, 1e-310, 1e300):
        case = structured("causal", scale=given, dtype=torch.float64)
        assert run(case).out.isfinite().all()


# Dropout of everything ---------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_dropout_of_everything(kernel, structure):
    case = structured(structure, dropout_p=1.0)
    actual, whole = run(case), run(dataclasses.replace(case, options={}))
    assert actual.out.eq(0).all()
    assert actual.grad_value.eq(0).all()
    if structure != "causal":
        assert torch.equal(actual.lse, whole.lse)
    nothing = run(dataclasses.replace(case, grad_lse=None))
    assert all(g is None or g.eq(0).all() for g in nothing[2:])


def test_a_dropped_weight_adds_nothing_to_grad_value(kernel):
    """Even in a NaN row. There, kept weights make the value's gradient NaN."""
    case = make(B=1, H=1, Lq=1, Lk=200, dropout_p=0.5)
    key = case.key.clone()
    key[:, :, 17] = float("nan")
    spoilt, plain = run(dataclasses.replace(case, key=key)), run(case)
    assert spoilt.out.isnan().all()
    dropped = plain.grad_value.eq(0).all(-1)
    assert 50 < dropped.sum() < 150
    assert spoilt.grad_value[dropped].eq(0).all()
    assert spoilt.grad_value[~dropped].isnan().all()


# Windows -----------------------------------------------------------------------------------------

WIDE = (sys.maxsize, 2**31, 2**32 + 1, 2**63, 2**100, (2**40, None), (None, sys.maxsize))


@pytest.mark.parametrize("window", WIDE, ids=str)
@pytest.mark.parametrize("variant", [False, True, CausalVariant.LOWER_RIGHT], ids=str)
@pytest.mark.parametrize("sizes", [(70, 45), (37, 66)], ids=str)
@pytest.mark.covering
def test_windows_wider_than_numbers(kernel, window, variant, sizes):
    case = make(B=1, H=1, Lq=sizes[0], Lk=sizes[1], is_causal=variant)
    wide = dataclasses.replace(case, options={**case.options, "window": window})
    assert_same_bits(run(wide), run(case))


@pytest.mark.parametrize("bound", [2**31, sys.maxsize, 2**80])
def test_bounds_of_packed_lengths_wider_than_numbers(kernel, bound):
    case, cu = packed([20, 0, 25], [20, 0, 25], H=1), boundaries([20, 0, 25])
    actual = run_packed(case, cu, cu, max_seqlen_q=bound, max_seqlen_k=bound)
    assert_same_bits(actual, run_packed(case, cu, cu))


# Causal biases beside is_causal ------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 0, 2, (1, 3), (None, 2), (9, None)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True, *CausalVariant], ids=str)
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("sizes", [(5, 8), (8, 5), (6, 6)], ids=str)
def test_causal_biases_combine_with_is_causal(backend, sizes, bias, is_causal, window):
    """Both bounds hold, and a window moves with is_causal's diagonal."""
    rows, columns = sizes
    mask, case = bias(rows, columns), make(B=1, H=1, Lq=rows, Lk=columns, E=4)
    distance = torch.arange(columns) - torch.arange(rows)[:, None]
    shift = {"UPPER_LEFT": 0, "LOWER_RIGHT": columns - rows}
    own = mask.variant if is_causal is False else CausalVariant(is_causal)
    keep = distance <= shift[mask.variant.name]
    if is_causal is not False:
        keep &= distance <= shift[own.name]
    left, right = window if isinstance(window, tuple) else (window, window)
    if left is not None:
        keep &= distance - shift[own.name] >= -left
    if right is not None:
        keep &= distance - shift[own.name] <= right
    tensors = (case.query, case.key, case.value)
    actual = trifuse.scaled_dot_product_attention(
        *tensors, attn_mask=mask, is_causal=is_causal, window=window
    )
    expected = trifuse.scaled_dot_product_attention(*tensors, attn_mask=keep)
    assert torch.equal(actual, expected)


def test_scales_beside_which_torch_is_finite():
    """torch too is finite with a tiny scale, and agrees."""
    case = structured("all pairs", scale=1e-300)
    tensors = (case.query, case.key, case.value)
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, scale=1e-300)
    actual = trifuse.scaled_dot_product_attention(*tensors, scale=1e-300)
    torch.testing.assert_close(actual, expected)
    assert math.isfinite(float(actual.sum()))


@pytest.mark.parametrize("keys_of_mask", [1, 3])
def test_a_nan_that_takes_part_reaches_the_mask(kernel, keys_of_mask):
    """Also where one mask element covers a whole row: its gradient needs no sum over the keys."""
    query, key, value = (normal(1, 1, rows, 4, seed=rows) for rows in (2, 3, 3))
    value[0, 0, 1, 0] = NAN
    mask = torch.zeros(1, 1, 2, keys_of_mask)
    left_out = torch.tensor([[True, False, True], [True, True, True]]).log()  # 0 or -inf
    mask = (mask + left_out if keys_of_mask == 3 else mask).requires_grad_()
    out = trifuse.scaled_dot_product_attention(query, key, value, mask)
    (grad,) = torch.autograd.grad(out.sum(), mask)
    first_row = keys_of_mask == 1
    assert grad.isnan().all(-1).flatten().tolist() == [first_row, True]
