"""The meaning of attention's arguments: masks, structure, shapes and layouts, on every kernel."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    Case,
    Results,
    assert_equal,
    assert_near,
    assert_same_bits,
    boundaries,
    check_one_nan,
    check_parts_of_keys,
    check_parts_of_keys_beside_large_scores,
    check_parts_of_keys_with_tables,
    check_past_two_to_the_31,
    make,
    normal,
    packed,
    pairs,
    run,
    run_packed,
)
from numerics import LAYOUTS, lay_out
from tested_kernels import CPP_KERNELS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalVariant, causal_lower_right, causal_upper_left

import trifuse

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# Pairs that take part ---------------------------------------------------------------------------

STRUCTURES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "causal upper left": {"is_causal": CausalVariant.UPPER_LEFT},
    "causal lower right": {"is_causal": CausalVariant.LOWER_RIGHT},
    "lengths": {"key_lengths": torch.tensor([64, 33])},
    "lengths int32": {"key_lengths": torch.tensor([0, 75], dtype=torch.int32)},
    "window": {"window": 5},
    "window left": {"window": (3, None)},
    "window right": {"window": (None, 7)},
    "window of nothing else": {"window": 0},
    "window wider than all": {"window": (1000, 1000)},
    "sliding causal": {"window": (66, 3), "is_causal": True},
    "window at the lower right": {"window": (9, 2), "is_causal": CausalVariant.LOWER_RIGHT},
    "all": {
        "window": (40, None),
        "is_causal": CausalVariant.LOWER_RIGHT,
        "key_lengths": torch.tensor([70, 41]),
    },
}


@pytest.mark.parametrize("sizes", [(70, 75), (75, 70), (1, 75), (130, 130)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_is_a_dense_mask_not_stored(kernel, structure, sizes):
    Lq, Lk = sizes
    options = dict(STRUCTURES[structure])
    if "key_lengths" in options:
        options["key_lengths"] = options["key_lengths"].clamp(max=Lk)
    case = make(Lq=Lq, Lk=Lk, **options)
    dense = dataclasses.replace(case, attn_mask=pairs(case), options={})
    assert_near(run(case), run(dense))


@pytest.mark.parametrize("structure", ["causal", "lengths", "window", "all"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_structure_and_mask_combine(kernel, structure, kind):
    keep = normal(2, 1, 70, 75, seed=8) > 0
    mask = keep if kind == torch.bool else torch.zeros(keep.shape).masked_fill(~keep, -INF)
    case = make(mask=mask, **STRUCTURES[structure])
    dense = dataclasses.replace(case, attn_mask=pairs(case), options={})
    assert_near(run(case)._replace(grad_mask=None), run(dense))


@pytest.mark.parametrize("shape", list(itertools.product((1, 2), (1, 2), (1, 70), (1, 75))))
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_broadcast(kernel, shape, kind):
    mask = normal(*shape, seed=8) > -1 if kind == torch.bool else normal(*shape, seed=8)
    case = make(mask=mask)
    full = dataclasses.replace(case, attn_mask=mask.expand(2, 2, 70, 75).contiguous())
    actual, expected = run(case), run(full)
    if expected.grad_mask is not None:
        summed = expected.grad_mask.double().sum_to_size(shape)
        expected = expected._replace(grad_mask=summed)
        assert actual.grad_mask.shape == shape
    assert_near(actual, expected)


@pytest.mark.parametrize("shape", [(), (75,), (70, 75), (1, 75), (2, 70, 75), (2, 1, 75)])
def test_masks_of_fewer_dimensions(kernel, shape):
    mask = normal(*shape, seed=8)
    case = make(mask=mask)
    full = make(mask=mask[(None,) * (4 - len(shape))])
    actual, expected = run(case), run(full)
    assert actual.grad_mask.shape == shape
    assert_same_bits(actual._replace(grad_mask=None), expected._replace(grad_mask=None))
    assert_equal(actual.grad_mask, expected.grad_mask.view(shape))


@pytest.mark.parametrize("layout", [*LAYOUTS[:-1], "columns first", "heads last", "reversed batch"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_are_read_through_their_strides(kernel, layout, kind):
    mask = normal(2, 2, 70, 75, seed=8)
    mask = mask > 0 if kind == "bool" else mask
    if layout == "columns first":
        strided = mask.mT.contiguous().mT
    elif layout == "heads last":
        strided = mask.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    elif layout == "reversed batch":
        strided = mask.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        strided = lay_out(mask, layout)
    assert_same_bits(run(make(mask=strided)), run(make(mask=mask)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float_masks_of_minus_infinity_are_boolean_masks(kernel, dtype):
    keep = normal(2, 2, 70, 75, seed=8) > 0
    keep[0, 1, 3] = False
    mask = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, -INF)
    actual, expected = run(make(mask=mask, dtype=dtype)), run(make(mask=keep, dtype=dtype))
    assert_near(actual, expected)
    assert actual.grad_mask[~keep].eq(0).all()


@pytest.mark.parametrize("rows", ["some", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_number_is_a_number(kernel, dtype, rows):
    """Models mask with ``finfo.min``, which absorbs every score: a row of it is a mean."""
    mask = torch.zeros(2, 1, 70, 75, dtype=dtype)
    lowest = torch.finfo(dtype).min
    mask[0, 0, 5] = lowest
    mask[1, 0, :, 20:] = lowest
    if rows == "all":
        mask[:] = lowest
    # torch's derivative of the logsumexp is exp(0) for each key of such a row, not the key's share.
    case = dataclasses.replace(make(mask=mask, dtype=dtype), grad_lse=None)
    inputs = [x.clone().requires_grad_() for x in (case.query, case.key, case.value, mask)]
    query, key, value, bias = inputs
    scores = query @ key.mT / math.sqrt(16) + bias
    out = scores.softmax(-1) @ value
    grads = torch.autograd.grad(out, inputs, case.grad_out)
    assert_near(run(case), Results(out, scores.logsumexp(-1), *grads))


# Rows and pairs that take no part ---------------------------------------------------------------

EMPTY: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor | None]]] = {
    "bool mask": ({}, lambda rows: ~rows),
    "float mask": ({}, lambda rows: torch.zeros(rows.shape).masked_fill(rows, -INF)),
    "lengths": ({"key_lengths": torch.tensor([0, 75])}, lambda rows: None),
    "lower right": ({"is_causal": CausalVariant.LOWER_RIGHT}, lambda rows: None),
    "window": ({"window": (3, 2)}, lambda rows: None),
}


def empty_rows(exclusion: str) -> tuple[Case, Tensor]:
    """Returns a case in which some rows have no key, and which rows: bool (B, H, Lq)."""
    rows = torch.zeros(2, 2, 70, 1, dtype=torch.bool)
    rows[0, 1, 3], rows[1, :, 64:] = True, True
    options, mask = EMPTY[exclusion]
    Lk = 20 if exclusion in ("lower right", "window") else 75
    case = make(Lk=Lk, mask=mask(rows), **options)
    empty = ~pairs(case).any(-1)
    assert empty.any()
    assert not empty.all()
    return case, empty


@pytest.mark.parametrize("exclusion", EMPTY)
def test_rows_without_a_key_are_zero(kernel, exclusion):
    case, empty = empty_rows(exclusion)
    results = run(case)
    assert results.out[empty].eq(0).all()
    assert results.lse[empty].eq(-INF).all()
    assert results.grad_query[empty].eq(0).all()
    if results.grad_mask is not None:
        assert results.grad_mask.isfinite().all()
    # Empty rows add nothing to the gradients of the keys either.
    silent = dataclasses.replace(
        case,
        grad_out=case.grad_out.masked_fill(empty[..., None], 0),
        grad_lse=case.grad_lse.masked_fill(empty, 0),
    )
    assert_same_bits(results, run(silent))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("exclusion", EMPTY)
def test_rows_without_a_key_pass_on_no_poison(kernel, exclusion, poison):
    case, empty = empty_rows(exclusion)
    poisoned = dataclasses.replace(
        case,
        query=case.query.masked_fill(empty[..., None], poison),
        grad_out=case.grad_out.masked_fill(empty[..., None], poison),
        grad_lse=case.grad_lse.masked_fill(empty, poison),
    )
    assert_same_bits(run(poisoned), run(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("exclusion", ["bool mask", "float mask", "lengths", "causal", "window"])
def test_keys_left_out_pass_on_no_poison(kernel, exclusion, poison, dropout_p, dtype):
    """Poison in keys and values that no query of their sequence sees."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "dtype": dtype}
    out = torch.zeros(2, 1, 1, 75, dtype=torch.bool)  # keys left out
    if exclusion == "bool mask":
        out[0, ..., 3], out[1, ..., 60:] = True, True
        options["mask"] = ~out
    elif exclusion == "float mask":
        out[0, ..., 3], out[1, ..., 60:] = True, True
        options["mask"] = torch.zeros(2, 1, 70, 75, dtype=dtype).masked_fill(out, -INF)
    elif exclusion == "lengths":
        options["key_lengths"] = torch.tensor([63, 0])
        out[0, ..., 63:], out[1] = True, True
    elif exclusion == "causal":
        options["is_causal"] = True
        out[..., 70:] = True
    else:
        options["window"] = (None, 1)
        out[..., 71:] = True
    case = make(**options)
    keys = out.mT.expand(2, 2, 75, 1)
    poisoned = dataclasses.replace(
        case,
        key=case.key.masked_fill(keys, poison),
        value=case.value.masked_fill(keys, poison),
    )
    assert_same_bits(run(poisoned), run(case))


@pytest.mark.parametrize("where", ["query", "key", "value", "grad_out", "grad_lse", "attn_mask"])
def test_nan_reaches_exactly_what_it_is_paired_with(kernel, where):
    """One NaN in one place, each key seen by some rows and not by others."""
    keep = normal(2, 2, 70, 75, seed=8) > 0
    mask = normal(2, 2, 70, 75, seed=9).masked_fill(~keep, -INF)
    case = make(mask=mask, is_causal=True)
    check_one_nan(case, where, assert_equal)


@pytest.mark.parametrize("kernel", CPP_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_parts_of_the_keys(kernel, dtype):
    with kernel.serving():
        check_parts_of_keys(dtype)


@pytest.mark.parametrize("kernel", CPP_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_parts_of_the_keys_with_tables(kernel, dtype):
    with kernel.serving():
        check_parts_of_keys_with_tables(dtype)


@pytest.mark.parametrize("kernel", CPP_KERNELS, ids=lambda kernel: kernel.name)
def test_gradients_of_parts_of_the_keys_beside_large_scores(kernel):
    with kernel.serving():
        check_parts_of_keys_beside_large_scores(is_cuda=False)


def test_poison_stays_out_of_second_derivatives(backend):
    """Masked pairs do not exist for the gradient of a gradient either."""

    def penalty(poison: float) -> tuple[Tensor, ...]:
        case = make(B=1, Lq=6, Lk=7, E=3, is_causal=True, dtype=torch.float64)
        key, value = case.key.clone(), case.value.clone()
        key[:, :, 6], value[:, :, 6] = poison, poison
        inputs = [x.requires_grad_() for x in (case.query, key, value)]
        out = trifuse.scaled_dot_product_attention(*inputs, is_causal=True)
        first = torch.autograd.grad(out, inputs, case.grad_out, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    for actual, expected in zip(penalty(NAN), penalty(0.0), strict=True):
        assert_equal(actual, expected)


# Packed sequences -------------------------------------------------------------------------------


def take(case: Case, q: slice, k: slice) -> Case:
    return dataclasses.replace(
        case,
        query=case.query[:, :, q],
        key=case.key[:, :, k],
        value=case.value[:, :, k],
        grad_out=case.grad_out[:, :, q],
        grad_lse=case.grad_lse[:, :, q],
    )


LENGTHS_Q, LENGTHS_K = [70, 0, 1, 33, 5], [40, 7, 1, 66, 0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": CausalVariant.LOWER_RIGHT},
        {"window": (20, 4), "scale": -0.2},
        {"H": 4, "Hkv": 2},
        {"E": 3, "Ev": 70},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_is_each_sequence_by_itself(kernel, options, dtype):
    """Bit for bit, forward and backward, with tokens left over that belong to no sequence."""
    case = packed(LENGTHS_Q, LENGTHS_K, rest=9, dtype=dtype, **options)
    cu_q, cu_k = boundaries(LENGTHS_Q), boundaries(LENGTHS_K, torch.int32)
    together = run_packed(case, cu_q, cu_k)
    for b in range(len(LENGTHS_Q)):
        q, k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = run(take(case, q, k))
        for name, a, t in zip(Results._fields[:5], alone, together, strict=False):
            assert_equal(t[:, :, k if name in ("grad_key", "grad_value") else q], a, name)
    assert together.out[:, :, cu_q[-1] :].eq(0).all()
    assert together.lse[:, :, cu_q[-1] :].eq(-INF).all()
    assert together.grad_query[:, :, cu_q[-1] :].eq(0).all()
    assert together.grad_key[:, :, cu_k[-1] :].eq(0).all()
    assert together.grad_value[:, :, cu_k[-1] :].eq(0).all()


@pytest.mark.parametrize("mask", [None, "bool", "float", "shared"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_packed_is_padded_without_the_padding(kernel, mask, dropout_p):
    """Dropout drops the same weights too: it counts positions within the sequence."""
    lengths, H, E = [33, 70, 0, 12], 2, 16
    N, longest = len(lengths), max(lengths)
    bias = None
    if mask is not None:
        bias = normal(1 if mask == "shared" else N, H, longest, longest, seed=8)
        bias = bias > 0 if mask == "bool" else bias
    case = packed(lengths, lengths, H=H, E=E, mask=bias, dropout_p=dropout_p)
    cu = boundaries(lengths)
    actual = run_packed(case, cu, None, max_seqlen_q=longest, max_seqlen_k=longest)

    def pad(x: Tensor) -> Tensor:
        rows = [x[0, :, cu[b] : cu[b + 1]] for b in range(N)]
        gaps = [r.new_zeros(H, longest - r.shape[1], *r.shape[2:]) for r in rows]
        return torch.stack([torch.cat(pair, 1) for pair in zip(rows, gaps, strict=True)])

    padded = Case(
        *(pad(x) for x in (case.query, case.key, case.value)),
        bias,
        pad(case.grad_out),
        pad(case.grad_lse),
        {"key_lengths": torch.tensor(lengths), "dropout_p": dropout_p},
    )
    expected = run(padded)

    def unpad(x: Tensor) -> Tensor:
        return torch.cat([x[b, :, : lengths[b]] for b in range(N)], 1)[None]

    unpadded = Results(*(unpad(x) for x in expected[:5]), expected.grad_mask)
    assert_near(actual, unpadded)


def test_packed_tokens_of_no_sequence_pass_on_no_poison(kernel):
    lengths = [33, 5]
    case = packed(lengths, lengths, rest=40)
    past = slice(38, None)
    poisoned = dataclasses.replace(
        case,
        **{name: getattr(case, name).clone() for name in ("query", "key", "value")},
        grad_out=case.grad_out.clone(),
        grad_lse=case.grad_lse.clone(),
    )
    for name in ("query", "key", "value", "grad_out", "grad_lse"):
        getattr(poisoned, name)[:, :, past] = NAN
    cu = boundaries(lengths)
    assert_same_bits(run_packed(poisoned, cu, None), run_packed(case, cu, None))


@pytest.mark.parametrize("heads", [1, 2])
def test_packed_results_are_laid_out_as_their_inputs(kernel, heads):
    """(total, H, E) in, (total, H, Ev) out: dense, tokens outermost."""
    inputs = [normal(9, heads, E, seed=E).requires_grad_() for E in (4, 4, 3)]
    out = trifuse.varlen_attention(*inputs, torch.tensor([0, 4, 9]))
    assert out.is_contiguous()
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(g.is_contiguous() for g in grads)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_packed_without_tokens(kernel, lengths):
    results = run_packed(packed(lengths, lengths, rest=3), boundaries(lengths), None)
    assert results.out.eq(0).all()
    assert results.lse.eq(-INF).all()
    assert all(g.eq(0).all() for g in results[2:5])


def test_gradient_of_a_mask_without_elements(kernel):
    case = dataclasses.replace(packed([], [], rest=3), attn_mask=normal(1, 1, 0, 0))
    results = run_packed(case, boundaries([]), None, max_seqlen_q=0, max_seqlen_k=0)
    assert results.out.eq(0).all()
    assert results.grad_mask.shape == (1, 1, 0, 0)


# Shapes and memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", ["B", "H", "Lq", "Lk", "E", "Ev"])
def test_empty_tensors(kernel, size, dtype):
    sizes = {"B": 2, "H": 2, "Lq": 3, "Lk": 4, "E": 5, "Ev": 6} | {size: 0}
    B, H, Lq, Lk, E, Ev = sizes.values()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for mask in (None, torch.zeros(1, 1, Lq, Lk), torch.ones(B, 1, 1, Lk, dtype=torch.bool)):
        shapes = (B, H, Lq, E), (B, H, Lk, E), (B, H, Lk, Ev), (B, H, Lq, Ev)
        query, key, value, grad_out = (normal(*shape, dtype=dtype) for shape in shapes)
        grad_lse = normal(B, H, Lq, dtype=wide)
        case = Case(query, key, value, mask, grad_out, grad_lse, {})
        results = run(case)
        assert results.out.shape == (B, H, Lq, Ev)
        assert results.lse.shape == (B, H, Lq)
        for grad, x in zip(results[2:6], (case.query, case.key, case.value, mask), strict=True):
            if grad is not None:
                assert grad.shape == x.shape
                assert grad.dtype == x.dtype
                assert grad.isfinite().all()
        if size == "Lk":
            assert results.out.eq(0).all()
            assert results.lse.eq(-INF).all()
        if size == "E":  # every score is 0: a mean
            mean = case.value.mean(2, keepdim=True, dtype=torch.float64).expand(B, H, Lq, Ev)
            torch.testing.assert_close(results.out.double(), mean, rtol=1e-2, atol=1e-2)


def test_one_element(kernel):
    one = torch.ones(1, 1, 1, 1)
    results = run(Case(2 * one, 3 * one, 5 * one, 7 * one, one, one[0], {}))
    assert results.out.item() == 5
    assert results.lse.item() == 13
    # The backward computes its weight from the logsumexp, 13 here, and inherits its rounding.
    assert [g.item() for g in results[2:6]] == pytest.approx([3, 2, 1, 1], rel=1e-6)


@pytest.mark.parametrize("E", [1, 2, 63, 65, 255, 256, 257, 300])
def test_head_dims(kernel, E):
    case = make(B=1, H=1, E=E, Ev=301 - E)
    with trifuse.backend("eager"):
        expected = run(case.double())
    assert_near(run(case), expected)


def _ranks() -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    q, kv = (3, 4), (5, 4)
    return [
        (q, kv, kv),
        ((2, *q), (2, *kv), (2, *kv)),
        ((1, *q), (2, *kv), (2, *kv)),
        ((2, *q), kv, (2, *kv)),
        ((2, 3, *q), (2, 3, *kv), (2, 3, *kv)),
        ((1, 3, *q), (2, 3, *kv), (2, 3, *kv)),
        ((2, 3, *q), (1, 3, *kv), (2, 1, *kv)),
        ((2, 3, *q), (2, 1, *kv), (2, 1, *kv)),
        ((2, 1, *q), (2, 3, *kv), (2, 3, *kv)),
        ((2, 3, *q), (2, 3, *kv), (2, 1, *kv)),
        ((3, *q), (2, 3, *kv), (2, 3, *kv)),
        (q, (2, 3, *kv), (2, 3, *kv)),
        ((2, 1, 3, *q), (1, 4, 3, *kv), (2, 4, 1, *kv)),
        ((2, 4, 1, *q), (2, 4, 3, *kv), (4, 3, *kv)),
        ((0, 3, *q), (0, 3, *kv), (0, 3, *kv)),
        ((0, *q), (0, *kv), (0, *kv)),
        ((2, 0, 3, *q), (1, 3, *kv), (2, 1, 3, *kv)),
    ]


@pytest.mark.parametrize("masked", ["none", "last two", "every dimension"])
@pytest.mark.parametrize("shapes", _ranks(), ids=str)
def test_ranks_and_broadcasting_as_in_torch(backend, shapes, masked):
    inputs = [normal(*s, seed=i, dtype=torch.float64) for i, s in enumerate(shapes)]
    lead = torch.broadcast_shapes(*(s[:-2] for s in shapes))
    mask = None
    if masked != "none":
        shape = (3, 5) if masked == "last two" else (*lead, 3, 5)
        mask = normal(*shape, seed=8, dtype=torch.float64)
    _compare_with_torch([*inputs, mask], {})


def _compare_with_torch(inputs: list[Tensor | None], options: dict[str, Any]) -> None:
    ours = [None if x is None else x.detach().requires_grad_() for x in inputs]
    theirs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    out = trifuse.scaled_dot_product_attention(*ours, **options)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*theirs, **options)
    torch.testing.assert_close(out, expected)
    upstream = normal(*out.shape, seed=9, dtype=out.dtype)
    grads = torch.autograd.grad(out, [x for x in ours if x is not None], upstream)
    wanted = torch.autograd.grad(
        expected, [x for x in theirs if x is not None], upstream, materialize_grads=True
    )
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_grouped_heads_as_in_torch(backend, lead):
    """Also without a batch: three dimensions are then (heads, length, head_dim)."""
    shapes = ((*lead, 6, 3, 4), (*lead, 2, 5, 4), (*lead, 2, 5, 4))
    inputs = [normal(*s, seed=i, dtype=torch.float64) for i, s in enumerate(shapes)]
    _compare_with_torch([*inputs, None], {"enable_gqa": True})


@pytest.mark.parametrize(
    ("bias", "variant"),
    [
        (causal_lower_right, CausalVariant.LOWER_RIGHT),
        (causal_upper_left, CausalVariant.UPPER_LEFT),
    ],
)
def test_causal_bias_objects(backend, bias, variant):
    case = make(Lq=5, Lk=9)
    expected = run(make(Lq=5, Lk=9, is_causal=variant)).out
    out = trifuse.scaled_dot_product_attention(case.query, case.key, case.value, bias(5, 9))
    assert_equal(out, expected)
    one = (x[0, 0] for x in (case.query, case.key, case.value))
    out = trifuse.scaled_dot_product_attention(*one, bias(5, 9))
    torch.testing.assert_close(out, expected[0, 0])


@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=3)))
def test_results_are_laid_out_as_their_inputs(kernel, transposed):
    """Heads split by a view are joined by a view: the output and gradients need no copy."""
    case = make(B=2, H=3, Lq=7, Lk=9, E=4, Ev=5)
    fields = ("query", "key", "value")
    laid = {
        name: lay_out(getattr(case, name), "transposed" if t else "contiguous")
        for name, t in zip(fields, transposed, strict=True)
    }
    results = run(dataclasses.replace(case, **laid))
    like = (results.out, results.grad_query, results.grad_key, results.grad_value)
    for x, t in zip(like, (transposed[0], *transposed), strict=True):
        assert (x.transpose(1, 2) if t else x).is_contiguous()
    assert results.lse.is_contiguous()
    assert_same_bits(results, run(case))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_change_nothing(kernel, layout, dtype):
    fields = ("query", "key", "value", "grad_out")
    case = make(dtype=dtype, E=24, Ev=20)
    if layout == "expanded":
        case = dataclasses.replace(
            case, **{f: getattr(case, f)[:1].repeat(2, 1, 1, 1) for f in fields}
        )
    laid = {f: lay_out(getattr(case, f), layout) for f in fields}
    assert_same_bits(run(dataclasses.replace(case, **laid)), run(case))


def test_upstream_gradients_expanded_from_one_number(kernel):
    """The upstream gradients of ``out.sum().backward()``: stride 0 in every dimension."""
    case = make()
    ones = torch.ones(())
    expanded = dataclasses.replace(
        case, grad_out=ones.expand(case.grad_out.shape), grad_lse=ones.expand(case.grad_lse.shape)
    )
    dense = dataclasses.replace(
        case, grad_out=torch.ones(case.grad_out.shape), grad_lse=torch.ones(case.grad_lse.shape)
    )
    assert_same_bits(run(expanded), run(dense))


def test_inputs_are_not_modified(kernel):
    case = make(mask=normal(1, 2, 70, 75, seed=8), key_lengths=torch.tensor([3, 75]), dropout_p=0.2)
    tensors = [x for x in vars(case).values() if isinstance(x, Tensor)]
    tensors.append(case.options["key_lengths"])
    before = [(x.clone(), x._version) for x in tensors]
    run(case)
    for x, (value, version) in zip(tensors, before, strict=True):
        assert_equal(x, value)
        assert x._version == version


@pytest.mark.parametrize(
    "wanted", [w for n in (1, 2, 3) for w in itertools.combinations(range(4), n)]
)
def test_gradients_asked_for_one_by_one(backend, wanted):
    """Each subset of gradients equals the same gradients computed all together."""
    case = make(B=1, Lq=7, Lk=9, mask=normal(1, 2, 7, 9, seed=8))
    everything = run(case)
    inputs = [case.query, case.key, case.value, case.attn_mask]
    inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    out, lse = trifuse.scaled_dot_product_attention(*inputs, return_lse=True)
    grads = torch.autograd.grad(
        (out, lse), [inputs[i] for i in wanted], (case.grad_out, case.grad_lse)
    )
    for i, grad in zip(wanted, grads, strict=True):
        assert_equal(grad, everything[2 + i])


def test_no_gradient_without_grad_mode(backend):
    case = make()
    query = case.query.clone().requires_grad_()
    with torch.no_grad():
        assert not trifuse.scaled_dot_product_attention(query, case.key, case.value).requires_grad
    with torch.inference_mode():
        out = trifuse.scaled_dot_product_attention(query, case.key, case.value)
    assert_equal(out, run(case).out)


@pytest.mark.parametrize("packed", [False, True])
def test_results_can_be_changed_in_place(cpp_kernel, packed):
    """Also where a caller's layout makes them views: adding 1 in place gives the result + 1."""
    x = normal(1, 9, 2, 4, seed=1).requires_grad_()

    def attend() -> tuple[Tensor, ...]:
        if packed:
            q = x[0]
            return trifuse.varlen_attention(q, q, q, boundaries([4, 5]), return_lse=True)
        q = x.transpose(1, 2)
        return trifuse.scaled_dot_product_attention(q, q, q, return_lse=True)

    for changed, result in zip(attend(), attend(), strict=True):
        assert torch.equal(changed.add_(1), result + 1)
        assert changed.requires_grad


def test_elements_past_two_to_the_31(cpp_kernel):
    check_past_two_to_the_31()
