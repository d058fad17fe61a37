"""Biases by distance: ``relative_bias`` and ``alibi_slopes``.

Accuracy is held to the numerics rule where that of all options is, and derivatives are checked
where those of all options are.
"""

from __future__ import annotations

import dataclasses
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
    check_one_nan,
    dense,
    make,
    normal,
    packed,
    run,
    run_packed,
)
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

import trifuse
from trifuse.ops._alibi import alibi_bias

attention = trifuse.scaled_dot_product_attention
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LOWER_RIGHT = CausalVariant.LOWER_RIGHT
Lq, Lk = 70, 75
N = Lq + Lk - 1


def table(*shape: int, seed: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a relative bias, some of whose numbers are -inf."""
    bias = normal(*shape, seed=seed, dtype=dtype)
    return bias.masked_fill(bias > 1.5, -INF)


def diagonal_sums(grad: Tensor, shape: torch.Size) -> Tensor:
    """Sums (B, H, Lq, Lk) over pairs of the same distance, one distance after another."""
    rows, columns = grad.shape[-2:]
    offsets = range(1 - rows, columns)
    sums = torch.stack([grad.diagonal(d, -2, -1).sum(-1) for d in offsets], -1)
    return sums.sum_to_size(shape)


def as_mask(case: Case) -> Case:
    """Returns the case with its relative bias as a float mask, added to the one that it has."""
    assert case.relative_bias is not None
    B, H = case.query.shape[:2]
    mask = dense(case.relative_bias, case.query.shape[2], case.key.shape[2])
    mask = mask.expand(B, H, -1, -1)
    if case.attn_mask is not None:
        given = case.attn_mask
        mask = mask.masked_fill(~given, -INF) if given.dtype == torch.bool else mask + given
    return dataclasses.replace(case, attn_mask=mask.contiguous(), relative_bias=None)


COMBINATIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": LOWER_RIGHT},
    "window": {"window": (20, 5)},
    "lengths": {"key_lengths": torch.tensor([75, 31])},
    "bool mask": {"mask": normal(2, 1, 1, Lk, seed=3) > -1},
    "float mask": {"mask": table(1, 2, Lq, Lk, seed=3)},
    "float mask of queries": {"mask": table(2, 1, Lq, 1, seed=3)},
    "groups, dropout": {"H": 4, "Hkv": 2, "dropout_p": 0.3},
    "softcap, sinks": {"softcap": 0.8, "sinks": torch.tensor([0.7, -1.5])},
    "few queries": {"Lq": 3},
    "one query": {"Lq": 1, "H": 8, "Hkv": 2},
    "one pair": {"Lq": 1, "Lk": 1},
    "several chunks of keys": {"Lk": 530, "is_causal": LOWER_RIGHT},
}


@pytest.mark.parametrize("leading", [(1, 1), (1, 0), (2, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("what", COMBINATIONS)
@pytest.mark.covering
def test_as_the_same_numbers_in_a_mask(kernel, what, leading):
    """All results, and the table's gradient: the mask's, summed along its diagonals."""
    case = make(**COMBINATIONS[what])
    queries, keys = case.query.shape[2], case.key.shape[2]
    B, H = leading[0], leading[1] or case.query.shape[1]
    case = dataclasses.replace(case, relative_bias=table(B, H, queries + keys - 1))
    assert case.relative_bias is not None
    actual, expected = run(case), run(as_mask(case))
    assert expected.grad_mask is not None
    shared = actual._replace(grad_relative_bias=None)
    assert_near(shared, expected._replace(grad_mask=actual.grad_mask))
    sums = diagonal_sums(expected.grad_mask, case.relative_bias.shape)
    torch.testing.assert_close(actual.grad_relative_bias, sums, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_mask(cpp_kernel, dtype):
    """The C++ kernels add the same numbers at the same place."""
    bias = table(1, 2, N, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    case = make(dtype=dtype, relative_bias=bias, is_causal=True)
    actual, expected = run(case), run(as_mask(case))
    for name in Results._fields[:5]:
        assert_equal(getattr(actual, name), getattr(expected, name), name)


@pytest.mark.parametrize("shape", [(N,), (2, N), (1, N), (1, 1, N), (2, 1, N), (1, 2, N)], ids=str)
def test_shapes(backend, shape):
    case = make()
    given = table(*shape).requires_grad_()
    full = given.expand(2, 2, N).detach().clone()
    out = attention(case.query, case.key, case.value, relative_bias=given)
    expected = attention(case.query, case.key, case.value, dense(full, Lq, Lk))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(out.sin().sum(), given)
    assert grad.shape == shape
    assert grad.count_nonzero() > 0


@pytest.mark.parametrize("causal", [True, LOWER_RIGHT])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (1, 9), (70, 75)])
def test_distances_are_counted_from_the_diagonal(backend, causal, queries, keys):
    """A table that is -inf but for distance 0 leaves each query the key on its diagonal."""
    zero = (keys if causal is LOWER_RIGHT else queries) - 1
    bias = torch.full((queries + keys - 1,), -INF)
    bias[zero] = 0.3
    query = normal(1, 1, queries, 4)
    key, value = normal(1, 1, keys, 4, seed=1), normal(1, 1, keys, 4, seed=2)
    out = attention(query, key, value, is_causal=causal, relative_bias=bias)
    on_diagonal = torch.arange(queries) + (keys - queries if causal is LOWER_RIGHT else 0)
    for i, j in enumerate(on_diagonal.tolist()):
        expected = value[0, 0, j] if 0 <= j < keys else torch.zeros(4)
        torch.testing.assert_close(out[0, 0, i], expected)


def test_a_gathered_table(backend):
    """As in T5: the parameter is a row of numbers for each bucket of distances."""
    case = make()
    buckets = (torch.arange(N) - (Lq - 1)).clamp(-4, 4) + 4
    weight = normal(9, 2, seed=7).requires_grad_()

    def loss(biases: dict[str, Tensor]) -> Tensor:
        return attention(case.query, case.key, case.value, **biases).sin().sum()

    (actual,) = torch.autograd.grad(loss({"relative_bias": weight[buckets].T}), weight)
    mask = dense(weight[buckets].T, Lq, Lk)[None]
    (expected,) = torch.autograd.grad(loss({"attn_mask": mask}), weight)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# The models that they are for -------------------------------------------------------------------


@pytest.mark.parametrize("decoder", [False, True])
def test_t5_s_buckets(backend, decoder):
    """transformers' matrix of biases, and the gradient of its parameter."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    L, H = 300, 4  # longer than the farthest bucket
    config = transformers.T5Config(d_model=32, d_kv=8, num_heads=H, is_decoder=decoder)
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    weight = layer.relative_attention_bias.weight
    torch.nn.init.normal_(weight)
    rows = [normal(2, H, L, 8, seed=i) for i in range(3)]
    bucket = layer._relative_position_bucket(
        torch.arange(2 * L - 1) - (L - 1),
        bidirectional=not decoder,
        num_buckets=config.relative_attention_num_buckets,
        max_distance=config.relative_attention_max_distance,
    )
    options: dict[str, Any] = {"scale": 1.0, "is_causal": decoder}
    out = attention(*rows, relative_bias=layer.relative_attention_bias(bucket).T, **options)
    expected = attention(*rows, layer.compute_bias(L, L), **options)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(out.sin().sum(), weight)
    (theirs,) = torch.autograd.grad(expected.sin().sum(), weight)
    torch.testing.assert_close(grad, theirs, rtol=1e-3, atol=1e-3)


def test_bloom_s_slopes(backend):
    """BLOOM adds slope · j. From the diagonal this is another number for each whole row."""
    pytest.importorskip("transformers")
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    B, H, L = 2, 6, 20
    alibi = build_alibi_tensor(torch.ones(B, L), H, torch.float32).view(B, H, 1, L)
    rows = [normal(B, H, L, 8, seed=i) for i in range(3)]
    out = attention(*rows, is_causal=True, alibi_slopes=alibi[0, :, 0, 1])
    expected = attention(*rows, alibi, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


# Special values ---------------------------------------------------------------------------------


def test_minus_infinity_leaves_pairs_out(kernel):
    """NaN in keys and values that no query sees any more reaches nothing."""
    case = make(B=1, relative_bias=table(1, 2, N))
    assert case.relative_bias is not None
    seen = dense(case.relative_bias, Lq, Lk) > -INF
    assert not seen.all()
    near = case.relative_bias.clone()
    near[..., : Lq - 30] = -INF  # no query after the first 30 sees key 0
    near[..., Lq + 40 :] = -INF
    near[..., Lq - 1] = -INF
    case = dataclasses.replace(case, relative_bias=near)
    assert_near(
        run(case)._replace(grad_relative_bias=None), run(as_mask(case))._replace(grad_mask=None)
    )


def test_rows_without_a_key(kernel):
    """A table of -inf leaves nothing: zeros, and no gradient."""
    results = run(make(relative_bias=torch.full((1, 2, N), -INF)))
    assert results.out.eq(0).all()
    assert results.lse.eq(-INF).all()
    for grad in (*results[2:5], results.grad_relative_bias):
        assert grad is not None
        assert grad.eq(0).all()


def test_keys_past_the_end_of_a_band_may_be_nan(kernel):
    """A pair that the table leaves out takes no part."""
    bias = normal(1, 2, N, seed=8)
    bias[..., 15:] = -INF  # only far keys before the query
    case = make(relative_bias=bias)
    key, value = case.key.clone(), case.value.clone()
    for x in (key, value):
        x[:, :, 15:] = NAN  # key j is seen by queries from j + 55 on
    assert_same_bits(run(dataclasses.replace(case, key=key, value=value)), run(case))


@pytest.mark.parametrize("where", ["query", "key", "value", "grad_out", "grad_lse"])
def test_nan_reaches_what_it_is_paired_with(kernel, where):
    case = make(relative_bias=table(1, 2, N), is_causal=True)
    check_one_nan(case, where, lambda a, c, name: torch.testing.assert_close(a, c))


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_number_that_is_not_finite_reaches_its_diagonal(kernel, value):
    bias = normal(1, 2, N, seed=8)
    bias[0, 0, Lq - 1 + 40] = value  # of the 35 first queries
    results = run(make(relative_bias=bias))
    finite = run(make(relative_bias=normal(1, 2, N, seed=8)))
    assert results.out[:, 0, :35].isnan().all()
    assert results.lse[:, 0, :35].isnan().all()
    assert results.out[:, 0, 35:].isfinite().all()
    for a, f in zip(results[:3], finite[:3], strict=True):
        assert_equal(a[:, 1], f[:, 1])
        assert_equal(a[:, :, 35:], f[:, :, 35:])


# Packed sequences -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True, LOWER_RIGHT])
@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize("more", [0, 30])
@pytest.mark.covering
def test_packed_sequences(kernel, causal, B, more):
    """Each sequence as by itself, with its own part of the table; bounds may be too large."""
    lengths_q, lengths_k = [5, 0, 70, 3], [7, 4, 65, 0]
    longest_q, longest_k = 70 + more, 65 + more
    bias = table(B, 2, longest_q + longest_k - 1)
    case = packed(lengths_q, lengths_k, rest=2, relative_bias=bias, is_causal=causal)
    results = run_packed(
        case,
        boundaries(lengths_q),
        boundaries(lengths_k),
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
    )
    assert results.grad_relative_bias is not None
    expected_grad = torch.zeros_like(bias)
    zero = (longest_k if causal is LOWER_RIGHT else longest_q) - 1
    query = key = 0
    for b, (Lq, Lk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, columns = slice(query, query + Lq), slice(key, key + Lk)
        own_zero = (Lk if causal is LOWER_RIGHT else Lq) - 1
        part = slice(max(zero - own_zero, 0), max(zero - own_zero, 0) + max(Lq + Lk - 1, 0))
        own = b if B > 1 else 0
        alone = Case(
            case.query[:, :, rows],
            case.key[:, :, columns],
            case.value[:, :, columns],
            None,
            case.grad_out[:, :, rows],
            None if case.grad_lse is None else case.grad_lse[:, :, rows],
            case.options,
            relative_bias=bias[own : own + 1, :, part],
        )
        query, key = query + Lq, key + Lk
        if Lq == 0:
            continue
        expected = run(alone)
        torch.testing.assert_close(results.out[:, :, rows], expected.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(results.lse[:, :, rows], expected.lse, rtol=1e-4, atol=1e-5)
        assert expected.grad_relative_bias is not None
        expected_grad[own : own + 1, :, part] += expected.grad_relative_bias
    torch.testing.assert_close(results.grad_relative_bias, expected_grad, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("B", "H", "queries", "keys"),
    [(0, 2, 5, 6), (2, 0, 5, 6), (2, 2, 0, 6), (2, 2, 5, 0), (2, 2, 0, 0), (2, 2, 1, 0)],
)
def test_empty_tensors(kernel, B, H, queries, keys):
    length = max(queries + keys - 1, 0)
    for leading in ((1, 1), (B, H)):
        bias = normal(*leading, length, seed=3)
        case = Case(
            *(normal(B, H, L, 4) for L in (queries, keys, keys)),
            None,
            normal(B, H, queries, 4),
            None,
            {},
            relative_bias=bias,
        )
        results = run(case)
        assert results.out.eq(0).all()
        assert_equal(results.grad_relative_bias, torch.zeros_like(bias))


# Bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(1, 1), (1, 3), (3, 1), (3, 3)], ids=str)
@pytest.mark.covering
def test_neither_threads_nor_the_batch_change_bits(cpp_kernel, dtype, leading):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = normal(*leading, 300 + 530 - 1, seed=9, dtype=wide)
    lengths = torch.tensor([530, 10, 0])
    case = make(3, 3, 300, 530, dtype=dtype, relative_bias=bias, key_lengths=lengths)
    torch.set_num_threads(1)
    whole = run(case)
    for threads in (2, 3, 2):
        torch.set_num_threads(threads)
        assert_same_bits(run(case), whole)
    for b in range(3):
        own = slice(b, b + 1)
        fields = ("query", "key", "value", "grad_out", "grad_lse")
        alone = dataclasses.replace(
            case,
            **{name: getattr(case, name)[own] for name in fields},
            options={**case.options, "key_lengths": lengths[own]},
            relative_bias=bias[own] if leading[0] > 1 else bias,
        )
        results = run(alone)
        for name in Results._fields[:5]:
            assert_equal(getattr(results, name), getattr(whole, name)[own], name)
        if leading[0] > 1:
            assert_equal(results.grad_relative_bias, whole.grad_relative_bias[own])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_change_nothing(kernel, dtype):
    case = make(relative_bias=table(2, 2, N, dtype=dtype), dtype=dtype)
    given = case.relative_bias
    assert given is not None
    strided = torch.full((N, 2, 2, 2), NAN, dtype=dtype)[..., 0].permute(2, 1, 0).copy_(given)
    assert not strided.is_contiguous()
    assert_same_bits(run(dataclasses.replace(case, relative_bias=strided)), run(case))


# ALiBi ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (2,)], ids=["heads", "batch and heads"])
@pytest.mark.parametrize("causal", [False, True, LOWER_RIGHT])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a relative bias"])
def test_alibi(backend, leading, causal, beside):
    """-slope · |distance from the diagonal|, with gradients."""
    case = make()
    slopes = normal(*leading, 2, seed=6).abs().requires_grad_()
    bias = normal(2, N, seed=7).requires_grad_() if beside else None
    offset = torch.arange(Lk) - torch.arange(Lq)[:, None]
    distance = (offset - (Lk - Lq if causal is LOWER_RIGHT else 0)).abs()
    mask = -slopes[..., None, None] * distance
    if bias is not None:
        mask = mask + dense(bias, Lq, Lk)
    mask = mask if leading else mask[None]
    wanted = [slopes] if bias is None else [slopes, bias]
    rows = (case.query, case.key, case.value)
    out = attention(*rows, is_causal=causal, alibi_slopes=slopes, relative_bias=bias)
    expected = attention(*rows, mask, is_causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(out.sin().sum(), wanted)
    theirs = torch.autograd.grad(expected.sin().sum(), wanted)
    torch.testing.assert_close(grads, theirs, rtol=1e-3, atol=1e-4)


def test_alibi_of_a_step_of_decoding(backend):
    """The last query of a sequence gets the row that it has in the whole sequence."""
    query, key, value = (normal(2, 4, 20, 8, seed=i) for i in range(3))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    whole = attention(query, key, value, is_causal=True, alibi_slopes=slopes)
    step = attention(query[:, :, -1:], key, value, is_causal=LOWER_RIGHT, alibi_slopes=slopes)
    torch.testing.assert_close(step, whole[:, :, -1:])


def test_alibi_of_packed_sequences(backend):
    lengths = [5, 0, 12]
    case = packed(lengths, lengths)
    slopes = torch.tensor([0.5, 0.1])
    rows = [x[0].transpose(0, 1) for x in (case.query, case.key, case.value)]
    out = trifuse.varlen_attention(*rows, boundaries(lengths), alibi_slopes=slopes)
    first = 0
    for length in lengths:
        own = slice(first, first + length)
        first += length
        if length:
            alone = [x[:, :, own] for x in (case.query, case.key, case.value)]
            expected = attention(*alone, alibi_slopes=slopes)[0].transpose(0, 1)
            torch.testing.assert_close(out[own], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi_in_each_dtype(backend, dtype):
    """Slopes in 16 bits are widened before they are multiplied by distances."""
    case = make(dtype=dtype)
    slopes = torch.tensor([0.3, 0.7], dtype=dtype)
    rows = (case.query, case.key, case.value)
    wide = slopes.double() if dtype == torch.float64 else slopes.float()
    assert_equal(attention(*rows, alibi_slopes=slopes), attention(*rows, alibi_slopes=wide))


@pytest.mark.parametrize("H", [1, 3])
@pytest.mark.parametrize("length", [70_001, 300_007])
def test_gradients_of_slopes_have_a_fixed_order(H, length):
    """A sum over all distances of one head at once would be split between threads."""
    upstream = normal(1, H, length)
    grads: list[Tensor] = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        slopes = normal(1, H, seed=9).requires_grad_()
        grads += torch.autograd.grad(alibi_bias(slopes, length, length // 2), slopes, upstream)
        assert_equal(grads[-1], grads[0])
    distance = (torch.arange(length) - length // 2).abs().double()
    expected = -(upstream.double() * distance).sum(-1)
    torch.testing.assert_close(grads[0].double(), expected, rtol=1e-5, atol=1e-2)


# Checks -----------------------------------------------------------------------------------------


def test_explain_checks_biases():
    query = normal(1, 2, 3, 4)
    choice = trifuse.explain(attention, query, query, query, relative_bias=normal(2, 5))
    assert choice.backend == trifuse.explain(attention, query, query, query).backend
    with pytest.raises(trifuse.ArgumentError, match="relative_bias: expected shape"):
        trifuse.explain(attention, query, query, query, relative_bias=normal(2, 6))
