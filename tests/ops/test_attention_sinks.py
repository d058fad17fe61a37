"""Attention sinks: special values, bits, and layouts.

Accuracy with sinks is held to the numerics rule where that of all options is, and derivatives are
checked where those of all options are.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import (
    Case,
    Results,
    assert_equal,
    assert_near,
    assert_same_bits,
    boundaries,
    make,
    normal,
    packed,
    run,
    run_packed,
)
from torch import Tensor

import trifuse
from trifuse.ops._sinks import join_sinks

attention = trifuse.scaled_dot_product_attention
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SINKS = torch.tensor([0.7, -1.5])


def with_empty_rows(sinks: Tensor | None, **options: object) -> Case:
    """Returns a case whose second sequence has no key, and some rows of the first have none."""
    keep = normal(1, 1, 70, 1, seed=8) > 0
    lengths = torch.tensor([60, 0])
    return make(mask=keep, key_lengths=lengths, sinks=sinks, **options)  # type: ignore[arg-type]


def empty_rows(case: Case) -> Tensor:
    assert case.attn_mask is not None
    empty = ~case.attn_mask[..., 0].expand(2, 2, -1).clone()
    empty[1] = True
    return empty


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_of_minus_infinity_is_none(kernel, dtype):
    """The results are those of the call without sinks, and the sink has no gradient."""
    for case in (make(dtype=dtype, is_causal=True, dropout_p=0.2), with_empty_rows(None)):
        sinks = torch.full((2,), -INF, dtype=case.query.dtype)
        actual = run(dataclasses.replace(case, sinks=sinks))
        assert actual.grad_sinks is not None
        assert_equal(actual.grad_sinks.abs(), torch.zeros_like(sinks))
        expected = run(case)
        assert_equal(actual.out, expected.out)
        assert_equal(actual.lse, expected.lse)
        assert_near(actual._replace(grad_sinks=None), expected)


def test_rows_without_a_key(kernel):
    """They are 0, and their logsumexp is the sink, with a gradient of 1."""
    case = with_empty_rows(SINKS)
    results, empty = run(case), empty_rows(case)
    assert results.out[empty].eq(0).all()
    assert torch.equal(results.lse[empty], SINKS[:, None].expand(2, 2, 70)[empty])
    assert results.out[~empty].ne(0).all()
    assert case.grad_lse is not None
    # With no gradient for the other rows, only the logsumexp of empty rows reaches the sinks.
    only = dataclasses.replace(
        case,
        grad_out=case.grad_out.masked_fill(~empty[..., None], 0),
        grad_lse=case.grad_lse.masked_fill(~empty, 0),
    )
    results = run(only)
    torch.testing.assert_close(results.grad_sinks, only.grad_lse.sum((0, 2)))
    for grad in results[2:5]:
        assert grad is not None
        assert grad.eq(0).all()


@pytest.mark.parametrize("upstream", [NAN, INF])
def test_gradients_of_empty_outputs_reach_nothing(kernel, upstream):
    case = with_empty_rows(SINKS)
    wrong = case.grad_out.masked_fill(empty_rows(case)[..., None], upstream)
    assert_same_bits(
        run(dataclasses.replace(case, grad_out=wrong)),
        run(dataclasses.replace(case, grad_out=wrong.nan_to_num(0, 0, 0))),
    )


def test_what_is_masked_reaches_no_sink(kernel):
    case = make(key_lengths=torch.tensor([60, 0]), is_causal=True, sinks=SINKS)
    key, value = case.key.clone(), case.value.clone()
    for x in (key, value):
        x[0, :, 60:] = NAN
        x[1] = INF
    assert_same_bits(run(dataclasses.replace(case, key=key, value=value)), run(case))


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_sink_that_is_not_a_number_reaches_its_head_alone(kernel, value):
    case = with_empty_rows(torch.tensor([value, 0.3]))
    results, finite = run(case), run(with_empty_rows(torch.tensor([0.0, 0.3])))
    empty = empty_rows(case)
    assert results.out[:, 0][empty[:, 0]].eq(0).all()
    assert results.out[:, 0][~empty[:, 0]].isnan().all()
    assert results.lse[:, 0].isnan().all()
    for name in Results._fields:
        actual, expected = getattr(results, name), getattr(finite, name)
        if name == "grad_sinks":
            assert_equal(actual[1:], expected[1:])
        elif actual is not None:
            assert_equal(actual[:, 1], expected[:, 1], name)


@pytest.mark.parametrize("sink", [-1e4, -200.0, 200.0, 1e4])
def test_sinks_far_from_the_scores(kernel, sink):
    """Nothing overflows: the sink takes nothing or everything, in second derivatives too."""
    case = make(Lq=5, Lk=7, sinks=torch.full((2,), sink))
    results = run(case)
    without = run(dataclasses.replace(case, sinks=None))
    assert case.grad_lse is not None
    if sink < 0:
        assert_near(results._replace(grad_sinks=None), without)
        assert results.grad_sinks is not None
        assert results.grad_sinks.eq(0).all()
    else:
        assert results.out.eq(0).all()
        assert results.lse.eq(sink).all()
        torch.testing.assert_close(results.grad_sinks, case.grad_lse.sum((0, 2)))
    args = [x.requires_grad_() for x in (case.query, case.key, case.value, case.sinks)]
    out, lse = attention(*args[:3], sinks=args[3], return_lse=True)
    grads = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), args, create_graph=True)
    for grad in torch.autograd.grad(sum(g.square().sum() for g in grads), args):
        assert grad.isfinite().all()


def test_sinks_of_the_first_key_s_score(kernel):
    """As if the sink were one more key, which scores the same in all rows and has a value of 0."""
    case = make(H=1, E=4, Ev=3, Lk=20, scale=1.0)
    query, key, value = case.query.clone(), case.key.clone(), case.value.clone()
    query[..., 0], key[..., 0] = 1, 0
    key[:, :, 0] = 0
    key[:, :, 0, 0] = 0.8
    value[:, :, 0] = 0
    whole = run(dataclasses.replace(case, query=query, key=key, value=value))
    rest = dataclasses.replace(
        case, query=query, key=key[:, :, 1:], value=value[:, :, 1:], sinks=torch.tensor([0.8])
    )
    actual = run(rest)
    assert_near(
        actual._replace(grad_query=actual.grad_query[..., 1:], grad_sinks=None),
        whole._replace(
            grad_query=whole.grad_query[..., 1:],
            grad_key=whole.grad_key[:, :, 1:],
            grad_value=whole.grad_value[:, :, 1:],
        ),
    )
    # In the first feature every query is 1, so the first key's gradient is that of its score.
    torch.testing.assert_close(actual.grad_sinks, whole.grad_key[:, :, 0, 0].sum(0))


def test_packed_sequences(kernel):
    """Tokens past the last boundary give 0, and the sink as their logsumexp."""
    lengths_q, lengths_k = [5, 0, 70, 3], [7, 4, 65, 0]
    case = packed(lengths_q, lengths_k, rest=2, sinks=SINKS)
    results = run_packed(case, boundaries(lengths_q), boundaries(lengths_k))
    assert results.out[:, :, -5:].eq(0).all()
    assert torch.equal(results.lse[0, :, -5:], SINKS[:, None].expand(2, 5))
    query = key = 0
    for Lq, Lk in zip(lengths_q, lengths_k, strict=True):
        rows, columns = slice(query, query + Lq), slice(key, key + Lk)
        alone = attention(
            case.query[:, :, rows], case.key[:, :, columns], case.value[:, :, columns], sinks=SINKS
        )
        torch.testing.assert_close(results.out[:, :, rows], alone)
        query, key = query + Lq, key + Lk


@pytest.mark.parametrize("shape", [(3, 2, 5, 2, 6, 4), (2, 6, 4), (6, 4)])
def test_any_number_of_dimensions(backend, shape):
    """The sinks are those of the heads, which 3-D tensors have only with ``enable_gqa``."""
    query, key, value = (normal(*shape, seed=i) for i in range(3))
    H = shape[-3] if len(shape) > 3 else 1
    sinks = normal(H, seed=9)
    scores = query @ key.mT * 4**-0.5
    column = (sinks[:, None, None] if len(shape) > 3 else sinks).expand(*scores.shape[:-1], 1)
    expected = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value
    torch.testing.assert_close(attention(query, key, value, sinks=sinks), expected)
    if len(shape) == 3:
        with pytest.raises(trifuse.ArgumentError, match=r"sinks: expected shape \(2,\)"):
            attention(query, key, value, enable_gqa=True, sinks=sinks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 1, 0, 2)])
def test_the_output_has_the_query_s_memory_order(backend, dtype, order):
    query = normal(2, 3, 5, 4, dtype=dtype)
    query = query.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())
    out = attention(query, query, query, sinks=normal(3, dtype=dtype))
    assert out.stride() == attention(query, query, query).stride()


def test_neither_threads_nor_the_batch_change_bits(cpp_kernel):
    case = make(H=3, B=3, sinks=normal(3, seed=9), key_lengths=torch.tensor([75, 10, 0]))
    whole = run(case)
    for b in range(3):
        own = slice(b, b + 1)
        alone = run(
            dataclasses.replace(
                case,
                **{
                    name: getattr(case, name)[own]
                    for name in ("query", "key", "value", "grad_out", "grad_lse")
                },
                options={**case.options, "key_lengths": case.options["key_lengths"][own]},
            )
        )
        for name in Results._fields[:5]:
            assert_equal(getattr(alone, name), getattr(whole, name)[own], name)


@pytest.mark.parametrize(
    ("B", "H", "L"), [(2, 1, 50_001), (1, 1, 200_003), (7, 1, 40_001), (2, 3, 50_001)]
)
def test_sums_over_many_rows_have_a_fixed_order(B, H, L):
    """A sum over all rows of one head at once would be split between threads."""
    out, lse = normal(B, H, L, 2), normal(B, H, L, seed=1)
    grads: list[Tensor] = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        sinks = normal(H, seed=9).requires_grad_()
        joined, joined_lse = join_sinks(out, lse, sinks)
        grads += torch.autograd.grad(joined.sum() + joined_lse.sin().sum(), sinks)
        assert_equal(grads[-1], grads[0])
    exact = normal(H, seed=9).double().requires_grad_()
    joined, joined_lse = join_sinks(out.double(), lse.double(), exact)
    (expected,) = torch.autograd.grad(joined.sum() + joined_lse.sin().sum(), exact)
    torch.testing.assert_close(grads[0].double(), expected, rtol=1e-6, atol=1e-3)


def test_explain_checks_sinks():
    query = normal(1, 2, 3, 4)
    choice = trifuse.explain(attention, query, query, query, sinks=normal(2))
    assert choice.backend == trifuse.explain(attention, query, query, query).backend
    with pytest.raises(trifuse.ArgumentError, match="sinks: expected shape"):
        trifuse.explain(attention, query, query, query, sinks=normal(3))


def test_gradients_do_not_depend_on_the_batch():
    """The upstream gradient's features are its slowest dimension, and its sequences the fastest."""
    B, H, L, E = 2, 3, 3, 5
    query, key = torch.randn(B, H, L, 1), torch.randn(B, H, 1, 1)
    value, sinks, upstream = torch.randn(B, H, 1, E), torch.randn(H), torch.randn(E, H, L, B)

    def grad(n: int) -> torch.Tensor:
        q = query[:n].clone().requires_grad_()
        out = trifuse.scaled_dot_product_attention(q, key[:n], value[:n], sinks=sinks)
        given = upstream[..., :n].contiguous().permute(3, 1, 2, 0)
        (result,) = torch.autograd.grad(out, q, given)
        return result

    for _ in range(20):
        query, upstream = torch.randn_like(query), torch.randn_like(upstream)
        assert torch.equal(grad(1), grad(B)[:1])
