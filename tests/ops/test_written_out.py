"""``with trifuse.attention()``: attention that code writes out runs as one call."""

from __future__ import annotations

import contextlib
import copy
import math

import attention_spellings
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import Accuracy, rounding_error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse import backends
from trifuse.deferred import Deferred
from trifuse.written_out import DistanceBias

B, H, LQ, LK, E = 2, 4, 5, 7, 8
LOWEST = torch.finfo(torch.float32).min


class Ops(TorchDispatchMode):
    """Counts the calls of the operator and of torch's softmax."""

    def __init__(self):
        super().__init__()
        self.ours = self.softmax = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ours += str(func).startswith("trifuse.attention_forward")
        self.softmax += "softmax.default" in str(func)
        return func(*args, **(kwargs or {}))


def tensors(dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, LQ, E), (B, H, LK, E), (B, H, LK, E))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [t.requires_grad_(grad) for t in (q, k, v)]


BIAS = torch.linspace(-1, 1, B * H * LQ * LK).view(B, H, LQ, LK)
PADDING = torch.arange(LK) < torch.tensor([[LK], [4]])  # (B, LK), True where a token is real
MASK = torch.where(PADDING, 0.0, LOWEST)[:, None, None]
CAUSAL = torch.ones(LQ, LK, dtype=torch.bool).tril()
ALIBI = -torch.rand(B * H, 1, LK, generator=torch.Generator().manual_seed(1))


def plain(q, k, v):
    return F.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(E), dim=-1) @ v


def masked(q, k, v):
    scores = q @ k.transpose(-2, -1) * E**-0.5 + MASK
    return torch.matmul(nn.Softmax(dim=-1)(scores), v)


def in_place(q, k, v):
    scores = torch.matmul(q, k.mT)
    scores /= math.sqrt(E)
    scores += BIAS
    scores = scores.masked_fill_(~CAUSAL, LOWEST)
    return scores.softmax(-1).matmul(v)


def flat_heads(q, k, v):
    """XGLM's form."""
    q, k, v = (t.reshape(B * H, -1, E) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, LQ, LK) + MASK
    scores = torch.max(scores, torch.full((), LOWEST)).view(B * H, LQ, LK)
    return torch.bmm(F.dropout(F.softmax(scores, dim=-1), 0.3, training=False), v).view(B, H, LQ, E)


def alibi(q, k, v):
    """BLOOM's form."""
    q, k, v = (t.reshape(B * H, -1, E) for t in (q, k, v))
    scores = ALIBI.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.3)
    weights = F.softmax(scores.view(B, H, LQ, -1) + MASK, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(B * H, LQ, -1), v).view(B, H, LQ, E)


def scaled_with_bias(q, k, v):
    """Falcon's form: the factor also multiplies the bias."""
    scores = (q @ k.transpose(-1, -2)).to(torch.float32) + ALIBI.view(B, H, 1, LK)
    scores *= 0.3
    return (F.softmax(scores + MASK, dim=-1, dtype=v.dtype) @ v).flatten(0, 1).view(B, H, LQ, E)


def replaced(q, k, v):
    """GPT-Neo's form."""
    scores = torch.where(CAUSAL, torch.matmul(q, k.transpose(-1, -2)), torch.tensor(LOWEST))
    return torch.matmul(nn.Dropout(0.5).eval()((scores + MASK).softmax(-1)), v)


def without_rest(q, k, v):
    scores = q @ k.mT
    scores = scores.masked_fill(~CAUSAL, -torch.inf).masked_fill(
        ~PADDING[:, None, None], -torch.inf
    )
    return (scores + BIAS).softmax(dim=3) @ v


def by_einsum(q, k, v):
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.5
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def by_einsum_of_tokens(q, k, v):
    """Heads after the tokens, and the factors of the last product in the other order."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.5
    out = torch.einsum("bjhd,bhij->bihd", v, scores.softmax(-1))
    return out.transpose(1, 2)


def capped(q, k, v):
    """Gemma 2's form."""
    scores = torch.matmul(q, k.mT) * 0.6
    scores = torch.tanh(scores / 2.0) * 2.0
    return (scores + MASK).softmax(-1) @ v


def channels_first(q, k, v):
    """SqueezeBERT's form: convolutions leave the tokens next to each other."""
    q, k, v = (t.mT.contiguous() for t in (q, k, v))
    scores = torch.matmul(q.permute(0, 1, 3, 2), k) / math.sqrt(E)
    return torch.matmul(nn.Softmax(dim=-1)(scores + MASK), v.permute(0, 1, 3, 2))


def expanded_mask(q, k, v):
    """XLM's form."""
    scores = torch.matmul(q, k.transpose(2, 3))
    left_out = (~PADDING).view(B, 1, 1, LK).expand_as(scores)
    scores.masked_fill_(left_out, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v)


def subtracted(q, k, v):
    """XLNet's form: its masks are subtracted, and terms may be 0."""
    scores = torch.einsum("ibnd,jbnd->bnij", (q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3)))
    scores = (scores + BIAS + 0) * 0.3
    scores = scores - 65500 * (~PADDING).float()[:, None, None]
    weights = F.softmax(scores - 1.0, dim=3)
    return torch.einsum("bnij,jbnd->ibnd", weights, v.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)


def chosen(q, k, v):
    scores = torch.where(~CAUSAL, -torch.inf, torch.multiply(q @ k.mT, 0.5))
    weights = torch.softmax(scores.flatten(0, 1), -1).unflatten(0, (B, H))
    return torch.matmul(F.dropout(weights, 0.5, False, True).clone(), other=v)


def one_key_head(q, k, v):
    """Multi-query attention: all heads share their keys and values."""
    return ((q @ k[:, :1].mT).mul(0.2).float().softmax(-1).type_as(v)) @ v[:, :1]


SPELLINGS = [
    plain, masked, in_place, flat_heads, alibi, scaled_with_bias, replaced, without_rest, by_einsum,
    by_einsum_of_tokens, capped, channels_first, expanded_mask, subtracted, chosen, one_key_head,
]  # fmt: skip


IN_GRAPHS_ALONE = {
    *("one matrix", "many leading dimensions"),
    *("values first", "values first, with a mask for each head"),
}


@pytest.mark.parametrize("name", attention_spellings.SPELLINGS)
def test_spellings_that_graphs_serve_are_one_call(name):
    spelling, inputs = attention_spellings.SPELLINGS[name], attention_spellings.tensors()
    if name not in IN_GRAPHS_ALONE:
        check_one_call(spelling, inputs)
        return
    expected = spelling(*inputs)
    with trifuse.attention():
        assert torch.equal(spelling(*inputs), expected)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_one_call(spelling):
    check_one_call(spelling, tensors())


def check_one_call(spelling, inputs):
    expected = spelling(*inputs)
    with Ops() as ops, trifuse.attention():
        out = spelling(*inputs)
    assert (ops.ours, ops.softmax) == (1, 0)
    assert type(out) is torch.Tensor
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)
    upstream = torch.linspace(-1, 1, out.numel()).view_as(out)
    for actual, exact in zip(
        torch.autograd.grad(out, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(actual, exact)


def test_a_low_fill_replaces_low_biases_of_keys():
    """The sum of both is -inf. A query that sees no key attends to all of them alike."""
    q, k, v = tensors(grad=False)

    def padded_left():
        return (q @ k.mT + MASK.flip(-1)).masked_fill(~CAUSAL, LOWEST).softmax(-1) @ v

    expected = padded_left()
    with Ops() as ops, trifuse.attention():
        out = padded_left()
    assert (ops.ours, ops.softmax) == (1, 0)
    torch.testing.assert_close(out, expected)


def test_gradient_of_a_bias():
    q, k, v = tensors()
    bias = BIAS[:1, :, :1].clone().requires_grad_()
    plain_out = (q @ k.mT + bias).softmax(-1) @ v
    with trifuse.attention():
        out = (q @ k.mT + bias).softmax(-1) @ v
    (expected,) = torch.autograd.grad(plain_out.sin().sum(), bias)
    (actual,) = torch.autograd.grad(out.sin().sum(), bias)
    torch.testing.assert_close(actual, expected)


def test_the_sum_of_two_products_is_one():
    """Each with a scale of its own, and used in two sums."""
    q, k, v = tensors()
    others = [t[..., :2].detach().clone().requires_grad_() for t in (q, k)]

    def attend():
        first, second = q @ k.mT / math.sqrt(E), others[0] @ others[1].mT * 0.25
        a = ((first + second) + MASK).softmax(-1) @ v
        b = torch.where(CAUSAL, second + first, LOWEST).softmax(-1) @ v[..., :3]
        return torch.cat([a, b], -1)

    expected = attend()
    with Ops() as ops, trifuse.attention():
        out = attend()
    assert (ops.ours, ops.softmax) == (2, 0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    inputs = (q, k, v, *others)
    for actual, exact in zip(
        torch.autograd.grad(out.sin().sum(), inputs),
        torch.autograd.grad(expected.sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.4), trifuse.nn.Dropout(0.4)])
def test_dropout_is_the_operators(dropout):
    q, k, v = tensors()
    torch.manual_seed(3)
    expected = trifuse.scaled_dot_product_attention(q, k, v, dropout_p=0.4, scale=1.0)
    torch.manual_seed(3)
    with trifuse.attention():
        out = dropout((q @ k.mT).softmax(-1)) @ v
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for grad, exact in zip(grads, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        assert torch.equal(grad, exact)


def test_weights_after_dropout_are_used_once():
    """The kernel stores no weights, and another product would drop others."""
    q, k, v = tensors()
    with trifuse.attention():
        weights = F.dropout((q @ k.mT).softmax(-1), 0.5)
        weights @ v
        for use in (lambda: weights.clone() @ v, lambda: weights @ v, lambda: weights.sum()):
            with pytest.raises(RuntimeError, match="dropped out inside the attention"):
                use()


def low_fill(q, k, v):
    return (q @ k.mT).masked_fill(~FILLED, LOWEST).softmax(-1) @ v


def low_where(q, k, v):
    return torch.where(FILLED, q @ k.mT, -1e35).softmax(-1) @ v


def low_fills(q, k, v):
    scores = (q @ k.mT).masked_fill(~FILLED & CAUSAL, LOWEST)
    return scores.masked_fill(~FILLED & ~CAUSAL, LOWEST).softmax(-1) @ v


def low_fill_over_left_out(q, k, v):
    scores = (q @ k.mT).masked_fill(~CAUSAL, -torch.inf)
    return scores.masked_fill(~FILLED, LOWEST).softmax(-1) @ v


def low_fill_that_rises(q, k, v):
    return ((q @ k.mT).masked_fill(~FILLED, LOWEST) * -1.0).softmax(-1) @ v


FILLED = CAUSAL.clone()  # where no fill is
FILLED[1] = False


@pytest.mark.parametrize(
    "code", [low_fill, low_where, low_fills, low_fill_over_left_out, low_fill_that_rises]
)
def test_a_fill_stops_the_gradient(code):
    """In a row of nothing else, too, whose weights are not 0."""
    inputs = tensors()
    with trifuse.attention():
        out = code(*inputs)
    expected = code(*inputs)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("extreme", [-torch.inf, torch.inf, torch.nan, -3e38])
@pytest.mark.parametrize("kind", ["of keys", "by distance"])
def test_a_low_fill_replaces_biases_of_any_size(kind, extreme):
    """In a row of nothing else, too, whose weights are all the same."""
    q, k, v = tensors(grad=False)
    if kind == "of keys":
        left_out, bias = ~FILLED | (torch.arange(LK) == 2), torch.zeros(H, 1, LK)
        bias[1, 0, 2] = extreme
        matrix = bias
    else:
        table = torch.zeros(H, LQ + LK - 1)
        table[1, LQ + 1] = extreme  # of keys 2 after their query
        distances = torch.arange(LK) - torch.arange(LQ)[:, None]
        left_out = ~FILLED | (distances == 2)
        bias, matrix = DistanceBias.of(table, LQ, LK), table[:, distances + LQ - 1]
    with trifuse.attention():
        out = (q @ k.mT + bias).masked_fill(left_out, LOWEST).softmax(-1) @ v
    expected = (q @ k.mT + matrix).masked_fill(left_out, LOWEST).softmax(-1) @ v
    assert expected.isfinite().all()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("low", "low_key"), [(-torch.inf, 0), (LOWEST, 0), (LOWEST, LOWEST)])
def test_a_maximum_with_the_lowest_number_keeps_rows_of_nothing_else(low, low_key, learned):
    """It stops the gradients of their scores or, where these are the lowest number, halves them."""
    inputs = tensors()
    bias = torch.zeros(LQ, LK).masked_fill(~FILLED, low)
    by_key = torch.full((LK,), float(low_key))
    inputs = [*inputs, bias.requires_grad_()] if learned else inputs

    def attend(q, k, v, bias=bias):
        scores = q @ k.mT + bias + by_key
        return torch.max(scores, torch.tensor(LOWEST)).softmax(-1) @ v

    expected = attend(*inputs)
    with Ops() as ops, trifuse.attention():
        out = attend(*inputs)
        unrecorded = attend(*(t.detach() for t in inputs))
    # In a row of -inf and the lowest number, the gradients of pairs have different factors.
    assert ops.ours == 1 + (low_key == 0)
    for each in (out, unrecorded):
        torch.testing.assert_close(each, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
    )


def test_a_product_with_beta_0_ignores_its_input():
    q, k, v = (t.flatten(0, 1) for t in tensors(grad=False))

    def attend(fill):
        scores = torch.baddbmm(torch.full((B * H, LQ, LK), fill), q, k.mT, beta=0, alpha=0.3)
        return torch.bmm(scores.softmax(-1), v)

    with Ops() as ops, trifuse.attention():
        out = attend(math.nan)
    assert ops.ours == 1
    torch.testing.assert_close(out, attend(0.0))


def test_scores_in_float32_of_values_in_bfloat16():
    q, k, v = tensors(torch.bfloat16, grad=False)

    def attend(q, k, v):
        return ((q.float() @ k.float().mT).softmax(-1).to(v.dtype)) @ v

    with Ops() as ops, trifuse.attention():
        out = attend(q, k, v)
    assert ops.ours == 1
    assert out.dtype == torch.bfloat16
    exact = attend(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


def test_autocast():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(q, k, v)
        with Ops() as ops, trifuse.attention():
            out = plain(q, k, v)
    assert ops.ours == 1
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("first", [True, False], ids=["scores", "values"])
def test_autocast_for_one_of_the_products(first):
    """The factors of each have the dtype that autocast gave them when the product was written."""
    q, k, v = tensors(grad=False)

    def attend(q, k, v, dtype=torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=first and dtype != torch.float64):
            weights = (q @ k.mT).softmax(-1).to(dtype if dtype == torch.float64 else torch.float32)
        with torch.autocast("cpu", dtype, enabled=not first and dtype != torch.float64):
            return weights @ v

    with Ops() as ops, trifuse.attention():
        out = attend(q, k, v)
    expected, exact = attend(q, k, v), attend(q.double(), k.double(), v.double(), torch.float64)
    assert ops.ours == 1
    assert out.dtype == expected.dtype
    errors = [(x - exact).square().mean().sqrt() for x in (out, expected)]
    assert errors[0] <= 1.2 * errors[1]


def test_numbers_are_those_of_the_modes_in_which_code_ran():
    q, k, _ = tensors()
    with trifuse.attention():
        with torch.autocast("cpu"):
            low, wide = q @ k.mT, q.double() @ k.double().mT
            with torch.autocast("cpu", enabled=False):
                exact = q @ k.mT
            assert exact.abs().dtype == torch.float32
        assert low.dtype == low.abs().dtype == torch.bfloat16
        with torch.autocast("cpu"):
            weights = (q @ k.mT).softmax(-1)
        assert weights.dtype == weights.abs().dtype == torch.bfloat16
        assert wide.dtype == wide.abs().dtype == torch.float64
        scores = q @ k.mT
        with torch.inference_mode():
            assert scores.max().item() > 0
        scores.sum().backward()
    assert q.grad.abs().sum() > 0


# Other uses ---------------------------------------------------------------------------------------


def other_axis(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def other_function(q, k, v):
    scores = q @ k.mT
    return (scores - scores.amax(-1, keepdim=True)).exp() @ v


def changed_weights(q, k, v):
    return ((q @ k.mT).softmax(-1) * BIAS) @ v


def talking_heads(q, k, v):
    return torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), torch.eye(H).flip(0)) @ v


def high_fill(q, k, v):
    return (q @ k.mT).masked_fill(~CAUSAL, -1.0).softmax(-1) @ v


def scores_alone(q, k, v):
    return (q @ k.mT * 0.5 + BIAS).relu().sum(-1)


def larger_bias(q, k, v):
    return (q[:1] @ k[:1].mT + BIAS).softmax(-1) @ v


def changed_part(q, k, v):
    scores = q @ k.mT
    scores[:, 0] = 1.0
    return scores.softmax(-1) @ v


def changed_view(q, k, v):
    scores = q @ k.mT
    flat = scores.view(B * H, LQ, LK)
    scores += BIAS
    return flat.softmax(-1).view(B, H, LQ, LK) @ v


def changed_through_a_view(q, k, v):
    scores = q @ k.mT
    flat = scores.view(B * H, LQ, LK)
    flat *= 0.3
    return scores.softmax(-1) @ v


def filled_through_a_view(q, k, v):
    scores = q @ k.mT
    scores.view(B * H, LQ, LK).masked_fill_(~CAUSAL, -1e4)
    return scores.softmax(-1) @ v


def view_of_a_changed_part(q, k, v):
    scores = q @ k.mT
    flat = scores.view(B * H, LQ, LK)
    scores[..., 0].fill_(-3.0)
    return flat.softmax(-1).view(B, H, LQ, LK) @ v


def sum_with_a_bias(q, k, v):
    return ((q @ k.mT + BIAS) + q @ k.mT).softmax(-1) @ v


def difference(q, k, v):
    return (q @ k.mT - q.flip(-1) @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    "code",
    [
        other_axis, other_function, changed_weights, talking_heads, high_fill, scores_alone,
        larger_bias, changed_part, changed_view, changed_through_a_view, filled_through_a_view,
        view_of_a_changed_part, sum_with_a_bias, difference,
    ],
)  # fmt: skip
def test_other_code_computes_what_it_did(code):
    inputs = tensors()
    expected = code(*inputs)
    with Ops() as ops, trifuse.attention():
        out = code(*inputs)
    assert ops.ours == 0
    assert torch.equal(out, expected)
    wanted = inputs[:2] if code is scores_alone else inputs
    for actual, exact in zip(
        torch.autograd.grad(out.sum(), wanted),
        torch.autograd.grad(expected.sum(), wanted),
        strict=True,
    ):
        assert torch.equal(actual, exact)


OPERATORS = {
    "attention": lambda s: trifuse.scaled_dot_product_attention(s, s, s),
    "attention with a window": lambda s: trifuse.scaled_dot_product_attention(s, s, s, window=2),
    "norm": lambda s: trifuse.dropout_add_layer_norm(s, None, torch.ones(LK), torch.zeros(LK)),
    "residual": lambda s: trifuse.dropout_add_layer_norm(BIAS, s, torch.ones(LK), torch.zeros(LK)),
    "dropout": lambda s: trifuse.nn.Dropout(0.5)(s),
    "linear": lambda s: trifuse.nn.Linear(LK, 3)(s),
    "lstm": lambda s: trifuse.nn.LSTM(LK, 3)(s.flatten(0, 1))[0],
    "gru": lambda s: trifuse.nn.GRU(LK, 3)(s.flatten(0, 1))[0],
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_operators_get_the_numbers(operator):
    q, k, _ = tensors()
    results = []
    for context in (trifuse.attention(), contextlib.nullcontext()):
        torch.manual_seed(4)
        with context:
            out = operator(q @ k.mT) * 1
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k))))
    for actual, exact in zip(*results, strict=True):
        assert torch.equal(actual, exact)


def test_weights_can_be_read_afterwards():
    q, k, v = tensors()
    expected = (q @ k.mT).softmax(-1)
    with trifuse.attention():
        weights = (q @ k.mT).softmax(-1)
        weights @ v
    assert isinstance(weights, Deferred)
    assert weights.shape == expected.shape
    assert weights.requires_grad
    assert torch.equal(copy.deepcopy(weights.detach()), expected)
    (grad,) = torch.autograd.grad(weights.square().sum(), q)
    (exact,) = torch.autograd.grad(expected.square().sum(), q)
    assert torch.equal(grad, exact)


def test_weights_read_too_late_raise():
    q, k, v = tensors(grad=False)
    with trifuse.attention():
        weights = (q @ k.mT).softmax(-1)
        weights @ v
        k.zero_()
        with pytest.raises(RuntimeError, match="a tensor that they are made of may have changed"):
            weights.sum()
    with torch.inference_mode(), trifuse.attention():
        q, k, v = (t.clone() for t in (q, k, v))
        early = (q @ k.mT).softmax(-1)
        assert early.sum() > 0  # before the product with the values
        weights = (q @ k.mT).softmax(-1)
        weights @ v
        with pytest.raises(RuntimeError, match="output_attentions=True"):
            weights.sum()


@pytest.mark.parametrize("inference", [False, True])
def test_a_change_of_the_factors_before_the_product(inference):
    """Also of another part of the memory that holds them, as of a cache of keys and values."""
    q, k, v = tensors(grad=False)

    def erased(k):
        scores = q @ k.mT
        k.zero_()
        return scores.softmax(-1) @ v

    def filled(k):
        cache = torch.zeros(2, *k.shape)
        cache[0] = k
        weights = (q @ cache[0].mT).softmax(-1)
        cache[1] = v
        return weights @ cache[1]

    def written(k):
        scores = q @ k.mT
        torch.add(v, 1, out=k)
        return scores.softmax(-1) @ v

    def named(k):
        scores = q @ k.mT
        torch.relu_(k)
        return scores.softmax(-1) @ v

    def asked(k):
        scores = q @ k.mT
        F.relu(k, inplace=True)
        return scores.softmax(-1) @ v

    with torch.inference_mode(inference):
        for code in (erased, filled, written, named, asked):
            with trifuse.attention():
                out = code(k.clone())
            assert torch.equal(out, code(k.clone()))


def test_a_product_after_an_unseen_change_of_its_factors_raises():
    q, k, v = tensors(grad=False)
    with trifuse.attention():
        scores = q @ k.mT
        with torch._C.DisableTorchFunction():
            k.zero_()
        with pytest.raises(RuntimeError, match="a tensor that they are made of may have changed"):
            scores.softmax(-1) @ v


def test_weights_keep_their_numbers_when_the_scores_change():
    q, k, _ = tensors(grad=False)
    expected = (q @ k.mT).softmax(-1)
    with trifuse.attention():
        for change in (
            lambda s: s[..., 0].zero_(),
            lambda s: s.detach().zero_(),
            torch.relu_,
            lambda s: torch.add(BIAS, 1, out=s),
        ):
            scores = q @ k.mT
            weights = scores.softmax(-1)
            change(scores)
            assert torch.equal(weights * 1, expected)


def test_a_change_of_a_view_runs_fused_if_nothing_else_sees_it():
    def attend(q, k, v):
        scores = (q @ k.mT).view(B * H, LQ, LK)
        scores += BIAS.view(B * H, LQ, LK)
        scores = scores.view(B, H, LQ, LK)
        scores *= 0.5
        return scores.softmax(-1) @ v

    check_one_call(attend, tensors())


def plain_weights(q, k):
    return (q @ k.mT).softmax(-1)


def test_what_leaves_the_context_is_ordinary():
    q, k, v = tensors()
    with trifuse.attention():
        scores, weights, viewed = BIAS + 0.5 * (q @ k.mT), plain_weights(q, k), plain_weights(q, k)
        weights @ v
        viewed.view(B * H, LQ, LK) @ v.flatten(0, 1)
        first = q @ k.mT
        second = first * 2
        second *= 3
    for left in (scores, first, second):
        assert type(left) is torch.Tensor
    for spent in (weights, viewed):  # they have done their part, and are computed if they are read
        assert isinstance(spent, Deferred)
        assert torch.equal(spent * 1, plain_weights(q, k))
    expected = BIAS + 0.5 * (q @ k.mT)
    assert torch.equal(scores, expected)
    grads = [torch.autograd.grad(x.sin().sum(), (q, k)) for x in (scores, expected)]
    for actual, exact in zip(*grads, strict=True):
        assert torch.equal(actual, exact)
    torch.testing.assert_close(torch.vmap(torch.sum)(scores.detach()), scores.sum((1, 2, 3)))


def test_the_memory_of_other_tensors_is_set_to_numbers():
    q, k, _ = tensors(grad=False)
    parameter = nn.Parameter(torch.zeros(B, H, LQ, LK))
    with trifuse.attention():
        parameter.data = q @ k.mT
        parameter.grad = q @ k.mT
    assert torch.equal(parameter.data, q @ k.mT)
    assert type(parameter.grad) is torch.Tensor


def test_hooks_on_weights_after_their_product_raise():
    q, k, v = tensors()
    with trifuse.attention():
        weights = (q @ k.mT).softmax(-1)
        out = weights @ v
        for use in (
            weights.retain_grad,
            lambda: weights.register_hook(lambda grad: None),
            lambda: torch.autograd.grad(out.sum(), weights),
        ):
            with pytest.raises(RuntimeError, match="has no gradient with respect to them"):
                use()


def test_names_of_types():
    q, k, _ = tensors(grad=False)
    with trifuse.attention():
        assert (q @ k.mT).type() == "torch.FloatTensor"


def test_a_result_can_be_viewed_as_one_of_torch():
    """Queries that are split from tokens give a result in their layout, which torch's has not."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors(grad=False))
    with trifuse.attention():
        out = plain(q, k, v).view(B * H, LQ, E)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            q.view(B * H, LQ, E)
    torch.testing.assert_close(out, plain(q, k, v).view(B * H, LQ, E))


def test_logging_without_gradients_keeps_those_of_the_scores():
    q, k, v = tensors()
    with trifuse.attention():
        scores = q @ k.mT
        with torch.no_grad():
            largest = scores.max()
        out = scores.softmax(-1) @ v
    assert not largest.requires_grad
    for actual, exact in zip(
        torch.autograd.grad(out.sum(), (q, k)),
        torch.autograd.grad(((q @ k.mT).softmax(-1) @ v).sum(), (q, k)),
        strict=True,
    ):
        torch.testing.assert_close(actual, exact)


class Rounded(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_backward_of_its_own_raises_instead_of_losing_the_gradient():
    q, k, v = tensors()
    with trifuse.attention():
        out = Rounded.apply(q @ k.mT).softmax(-1) @ v
    assert torch.equal(out, (q @ k.mT).round().softmax(-1) @ v)
    with pytest.raises(RuntimeError, match="a function with a backward of its own"):
        out.sum().backward()
    with torch.no_grad(), trifuse.attention():
        assert torch.equal(Rounded.apply(q @ k.mT), (q @ k.mT).round())


def test_contexts_nest_and_end():
    q, k, v = tensors(grad=False)
    with trifuse.attention():
        with Ops() as ops, trifuse.attention():
            plain(q, k, v)
        assert ops.ours == 1
        assert isinstance(q @ k.mT, Deferred)
    assert type(q @ k.mT) is torch.Tensor


def test_transforms_of_functorch_are_left_alone():
    q, k, v = tensors(grad=False)
    with trifuse.attention():
        out = torch.vmap(plain)(q, k, v)
    torch.testing.assert_close(out, plain(q, k, v))


def test_forward_mode_keeps_the_tangent_of_a_factor():
    q, k, v = tensors(grad=False)

    def attend(temperature):
        return ((q @ k.mT) * temperature / temperature.exp()).softmax(-1) @ v

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.tensor(0.3), torch.tensor(1.0))
        expected = torch.autograd.forward_ad.unpack_dual(attend(dual)).tangent
        with trifuse.attention():
            out = torch.autograd.forward_ad.unpack_dual(attend(dual)).tangent
    torch.testing.assert_close(out, expected)
    temperatures = torch.tensor([0.3, 0.7])
    with trifuse.attention():
        out = torch.vmap(attend)(temperatures)
    torch.testing.assert_close(out, torch.vmap(attend)(temperatures))


STEPS = {
    "scale": lambda s: s * 0.7,
    "divide": lambda s: s / math.sqrt(E),
    "scale in place": lambda s: s.mul_(-0.5),
    "bias": lambda s: s + BIAS[:, :1],
    "bias first": lambda s: BIAS[0, 0, 0] + s,
    "bias in place": lambda s: s.add_(BIAS),
    "lowest": lambda s: s.masked_fill(~PADDING[:, None, None], LOWEST),
    "left out": lambda s: s.masked_fill(~CAUSAL, -torch.inf),
    "where": lambda s: torch.where(CAUSAL, s, torch.tensor(-1e35)),
    "cap": lambda s: s.tanh() * 3.0,
    "subtracted": lambda s: s.add(BIAS, alpha=-1),
    "minus": lambda s: s - BIAS,
    "minus in place": lambda s: s.sub_(BIAS, alpha=2.0),
    "from": lambda s: 1.5 - s,
    "a number": lambda s: 2 + s,
    "type as": lambda s: s.type_as(s),
    "divided": lambda s: 1 / s,
    "floor": lambda s: torch.div(s, 0.3, rounding_mode="floor"),
    "relu": torch.relu,
    "clamp": lambda s: s.clamp(max=1.0),
    "float": lambda s: s.float(),
    "double": lambda s: s.to(torch.float64),
    "reshape": lambda s: s.reshape(B, H, LQ, LK),
    "dropout in place": lambda s: F.dropout(s, 0.5, False, True),
    "one more dimension": lambda s: s.unsqueeze(0).squeeze(0),
    "flattened and back": lambda s: s.flatten(0, 1).unflatten(0, (B, H)),
    "flat and back": lambda s: s.view(B * H, LQ, LK).view(B, H, LQ, LK),
    "softmax": lambda s: F.softmax(s, dim=-1),
    "dropout": lambda s: F.dropout(s, 0.5, training=False),
    "contiguous": lambda s: s.contiguous(),
    "clone": lambda s: s.clone(),
}


@settings(max_examples=150)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=6), st.booleans())
def test_any_sequence_of_steps_computes_what_it_did(steps, attends):
    def code(q, k, v):
        scores = q @ k.mT
        for step in steps:
            scores = STEPS[step](scores)
        return scores.softmax(-1) @ v.to(scores.dtype) if attends else scores * 1

    inputs = tensors()
    expected = code(*inputs)
    with trifuse.attention():
        out = code(*inputs)
        out = out * 1  # a deferred tensor is computed here at the latest
    out = out.compute() if isinstance(out, Deferred) else out
    assert out.dtype == expected.dtype
    # Rows whose keys are all masked differ: there are none in these masks.
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    if not attends:
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("boolean", [False, True])
def test_shifted_windows_are_one_call(images, boolean):
    """Swin adds a bias of the heads, then a mask of each image's windows in another shape."""
    windows, heads, length = 4, 3, 9
    n = images * windows
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(n, heads, length, 8, generator=generator) for _ in range(3))
    bias = torch.randn(1, heads, length, length, generator=generator)
    kept = torch.rand(1, windows, 1, length, length, generator=generator) < 0.6
    kept[..., 0] = True

    def attend(q, k, v, bias):
        scores = (q @ k.mT + bias).view(images, windows, heads, length, length)
        if boolean:
            scores = scores.masked_fill(~kept, -math.inf)
        else:
            scores = scores + torch.where(kept, 0.0, -100.0)
        return scores.view(n, heads, length, length).softmax(-1) @ v

    check_one_call(attend, [t.requires_grad_() for t in (q, k, v, bias)])


def test_a_batch_without_sequences():
    """Biases of keys that are made for each sequence have no sequence either."""
    query, key, value = (torch.randn(0, H, L, E) for L in (LQ, LK, LK))
    by_key = torch.arange(float(LK)).expand(0, H, 1, LK)
    with torch.no_grad(), trifuse.attention():
        weights = (query @ key.mT + by_key + torch.where(CAUSAL, 0.0, LOWEST)).softmax(-1)
        assert (weights @ value).shape == (0, H, LQ, E)


# Cosine attention ---------------------------------------------------------------------------------


def cosine(q, k, v, scale):
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return F.softmax(scores * scale, dim=-1) @ v


@pytest.fixture
def by_norms(monkeypatch):
    """The number of calls of ``F.normalize`` that ran on the kernels of RMSNorm."""
    from trifuse.written_out import unit_vectors

    if backends._C is None:
        pytest.skip("no C++ extension")
    calls = []
    norm = unit_vectors.dropout_add_layer_norm

    def counted(*args, **kwargs):
        calls.append(args)
        return norm(*args, **kwargs)

    monkeypatch.setattr(unit_vectors, "dropout_add_layer_norm", counted)
    return lambda: len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosine_attention_obeys_the_numerics_rule(by_norms, dtype):
    torch.manual_seed(0)
    accuracy = Accuracy("cosine attention")
    for _ in range(10):
        scale = torch.linspace(1, 9, H).view(H, 1, 1)
        shapes = ((B, LQ, H, 32), (B, LK, H, 32), (B, LK, H, 32))
        qkv = [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]
        grad = torch.randn(B, H, LQ, 32).to(dtype)

        def results(qkv, scale=scale, grad=grad):
            out = cosine(*qkv, scale.to(qkv[0].dtype))
            return [out, *torch.autograd.grad(out, qkv, grad.to(out.dtype))]

        with trifuse.attention(), Ops() as ops:
            actual = results(qkv)
        assert (ops.ours, ops.softmax) == (1, 0)
        exact = results([t.detach().double().requires_grad_() for t in qkv])
        for name, mine, true, eager in zip(
            ("out", "q", "k", "v"), actual, exact, results(qkv), strict=True
        ):
            size = true.square().mean().sqrt()
            accuracy.record(name, mine, true, eager, size * rounding_error(dtype))
    accuracy.conclude()
    assert by_norms() == 20


@given(st.data())
def test_vectors_are_normalised_as_torch_does(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    E = data.draw(st.sampled_from([1, 31, 32, 70]))
    shape = [*data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)), E]
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.randn([*shape[:-1], 2 * E], generator=torch.Generator().manual_seed(0))
    x = x[..., :E].to(dtype).permute(order)
    if data.draw(st.booleans()):
        x = x[:1].expand_as(x)
    x.requires_grad_()
    expected = F.normalize(x, dim=-1)
    with trifuse.attention():
        actual = F.normalize(x, dim=-1)
    assert actual.dtype == expected.dtype
    for size, stride, wanted in zip(x.shape, actual.stride(), expected.stride(), strict=True):
        assert size == 1 or stride == wanted  # so that views of it are possible as in torch
    wide = dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6 if wide else 2e-2, atol=1e-6)
    grad = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    results = [torch.autograd.grad(out, x, grad)[0] for out in (actual, expected)]
    torch.testing.assert_close(*results, rtol=1e-4 if wide else 5e-2, atol=1e-5 if wide else 2e-2)


def vectors(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def test_vectors_of_zeros_and_of_large_numbers(by_norms):
    x = torch.zeros(5, 32)
    x[1, :2] = torch.tensor([3e19, 4e19])
    x[2, 0], x[3, 0], x[4, 0] = 1e-25, torch.nan, torch.inf
    with trifuse.attention():
        actual = F.normalize(x.requires_grad_(), dim=1)
    assert by_norms() == 1
    torch.testing.assert_close(actual, F.normalize(x, dim=1), equal_nan=True, atol=0, rtol=1e-6)


def test_defaults_of_torch_change_nothing(by_norms):
    x = vectors(3, 32)
    expected = F.normalize(x, dim=-1)
    with torch.device("meta"), trifuse.attention():
        torch.testing.assert_close(F.normalize(x, dim=-1), expected)
    torch.set_default_dtype(torch.float64)
    try:
        with trifuse.attention():
            torch.testing.assert_close(F.normalize(x, 2, 1), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert by_norms() == 2


@pytest.mark.parametrize(
    "options",
    [{"p": 1}, {"dim": 0}, {"eps": 1e-5, "dim": -1}, {"dim": (0, 1)}, {"dim": -1, "eps": 0}],
    ids=str,
)
def test_other_norms_are_torchs(by_norms, options):
    x = vectors(3, 32)
    with trifuse.attention():
        assert torch.equal(F.normalize(x, **options), F.normalize(x, **options))
        for other in (x.detach(), vectors(3, 31), x.double(), x.half()):
            assert torch.equal(F.normalize(other), F.normalize(other))
        out = torch.empty(3, 32)
        assert F.normalize(x.detach(), out=out) is out
        with trifuse.backend("eager"):
            F.normalize(x)
        traced = torch.jit.trace(lambda t: F.normalize(t, dim=-1), (x,))
    assert by_norms() == 0
    other = vectors(2, 40)
    assert torch.equal(traced(other), F.normalize(other, dim=-1))


@pytest.mark.parametrize(
    "options", [{"dim": 1.0}, {"dim": True}, {"p": torch.ones(2)}, {"dim": 5}], ids=str
)
def test_wrong_arguments_of_norms_raise_what_torch_raises(options):
    x = vectors(3, 32)
    with pytest.raises((TypeError, IndexError)) as expected:
        F.normalize(x, **options)
    with trifuse.attention(), pytest.raises(expected.type):
        F.normalize(x, **options)
