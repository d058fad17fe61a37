"""Attention in graphs of Dynamo: the spellings that become trifuse's, and near misses that stay."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from attention_spellings import BIAS, INF, KEPT, SPELLINGS, B, E, H, L, S, tensors
from rewritten import Rewritten, check
from torch import nn

import trifuse


@pytest.mark.parametrize("function", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_spelling_is_served(function):
    ours = check(function, *tensors(), replaced={"attention": 1})
    assert not ours.calls("softmax")


def returned_weights(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def returned_scores(q, k, v):
    scores = q @ k.mT
    return scores.softmax(-1) @ v, scores.amax(-1)


def transposed_without_gradient(q, k, v):
    k = k * 1
    with torch.no_grad():
        transposed = k.transpose(-2, -1)
    return (q @ transposed).softmax(-1) @ v


def changed_view(q, k, v):
    scores = q * 1 @ k.mT
    scores.view(-1)[::2] = 0.5
    return scores.softmax(-1) @ v


def scores_without_gradient(q, k, v):
    with torch.no_grad():
        scores = q @ k.mT
    return scores.softmax(-1) @ v


def dropped_twice(q, k, v):
    weights = F.dropout((q @ k.mT).softmax(-1), 1.0)
    return F.dropout(weights, 1.0) @ v


def changed_scale(q, k, v):
    scale = torch.tensor(2.0)
    scores = q.detach() @ k.detach().mT * scale
    scale.view(1).add_(1)
    return scores.softmax(-1) @ v


MIXING = torch.eye(H).roll(1, 0)
NEAR_MISSES = {
    "softmax over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, None),
    "softmax over heads": (lambda q, k, v: (q @ k.mT).softmax(1) @ v, None),
    "weights used": (returned_weights, "used elsewhere"),
    "scores used": (returned_scores, "used elsewhere"),
    "scores changed": (changed_view, "used elsewhere"),
    "transposed in another mode": (transposed_without_gradient, "may change a mode"),
    "too many steps": (
        lambda q, k, v: functools.reduce(torch.add, [q @ k.mT] * 2 + [BIAS] * 400).softmax(-1) @ v,
        "too many steps"),
    "too many ways": (
        lambda q, k, v: functools.reduce(lambda x, _: (x + x) * 0.5, range(20), q @ k.mT)
        .softmax(-1) @ v,
        "used elsewhere"),
    "mode changed": (scores_without_gradient, "may change a mode"),
    "a number in a tensor that changes": (changed_scale, "may change a tensor meanwhile"),
    "finite fill": (
        lambda q, k, v: (q @ k.mT).masked_fill(~KEPT, -1e9).softmax(-1) @ v, "other than -inf"),
    "subtracted scores": (lambda q, k, v: (BIAS - q @ k.mT).softmax(-1) @ v, "no step"),
    "negative scale after a mask": (
        lambda q, k, v: ((q @ k.mT).masked_fill(~KEPT, -INF) * -1).nan_to_num(0).softmax(-1) @ v,
        "no step of attention"),
    "a factor for each pair": (lambda q, k, v: (q @ k.mT * BIAS).softmax(-1) @ v, "is a matrix"),
    "a factor that widens": (
        lambda q, k, v: (q[:, :, :1] @ k.mT * BIAS[..., :1]).softmax(-1) @ v, "is a matrix"),
    "a scale that rounds": (
        lambda q, k, v: torch.div(q @ k.mT, 2.0, rounding_mode="floor").softmax(-1) @ v, "rounds"),
    "dropped scores": (
        lambda q, k, v: F.dropout(q @ k.mT, 1.0).softmax(-1) @ v, "before the softmax"),
    "dropped twice": (dropped_twice, "no plain dropout"),
    "less precise scores": (
        lambda q, k, v: (q @ k.mT).bfloat16().softmax(-1).float() @ v, "less precise"),
    "regrouped scores": (
        lambda q, k, v: (q @ k.mT).view(B, H, S, L).softmax(-1).view(B, H, L, S) @ v, "cuts rows"),
    "mixed heads": (
        lambda q, k, v: torch.einsum(
            "bhqk,bgkd->bgqd", (q @ k.mT).softmax(-1), v), None),
    "heads mixed after the softmax": (
        lambda q, k, v: F.conv2d((q @ k.mT).softmax(-1), MIXING[..., None, None]) @ v,
        "changed after the softmax"),
    "a gate of two softmaxes": (
        lambda q, k, v: (0.3 * (q @ k.mT).softmax(-1) + 0.7 * BIAS.softmax(-1)) @ v,
        "changed after the softmax"),
    "weights first, transposed over the queries": (
        lambda q, k, v: v.mT @ (q @ k.mT).softmax(-2).transpose(-2, -1), None),
    "a mask of integers": (
        lambda q, k, v: (q @ k.mT + KEPT.int()).softmax(-1) @ v, "dtype torch.int32"),
    "a wider mask": (
        lambda q, k, v: (q[0] @ k[0].mT + BIAS).softmax(-1) @ v, "widens the scores"),
    "tanh after the mask": (
        lambda q, k, v: torch.tanh(q @ k.mT + BIAS).softmax(-1) @ v, "no plain softcap"),
    "a negative cap": (
        lambda q, k, v: (torch.tanh(q @ k.mT) * -2.0).softmax(-1) @ v, "change their sign"),
    "integers as values": (
        lambda q, k, v: (q @ k.mT).softmax(-1).double() @ v.double(), "less precise"),
    "a classifier": (lambda q, k, v: F.relu(q @ k.mT).softmax(-1) @ v, "no step of attention"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_miss_stays(function, reason):
    ours = check(function, *tensors(), replaced={})
    assert ours.calls("softmax")
    assert [reason in each for each in ours.reasons] == ([] if reason is None else [True])


LOWEST = torch.finfo(torch.float32).min
LEFT_OUT = ~KEPT
LEFT_OUT[:, :, 2] = True  # a row of no keys attends to all


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: (q @ k.mT).masked_fill(LEFT_OUT, LOWEST).softmax(-1) @ v,
        lambda q, k, v: torch.where(~LEFT_OUT, q @ k.mT, LOWEST).softmax(-1) @ v,
        lambda q, k, v: torch.where(LEFT_OUT, -1e30, q @ k.mT).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT + BIAS).masked_fill(LEFT_OUT, LOWEST).softmax(-1) @ v,
        lambda q, k, v: ((q @ k.mT).masked_fill(LEFT_OUT, LOWEST) + BIAS).softmax(-1) @ v,
        lambda q, k, v: (
            (q @ k.mT).masked_fill(LEFT_OUT, LOWEST).masked_fill(~KEPT.flip(-1), -1e30).softmax(-1)
            @ v
        ),
    ],
)
def test_scores_filled_with_the_lowest_number(function):
    with torch.no_grad():
        ours = check(function, *(t.detach() for t in tensors()), replaced={"attention": 1})
    assert not ours.calls("softmax")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda q, k, v: (q @ k.mT).masked_fill(~KEPT, -INF).masked_fill(LEFT_OUT, LOWEST),
            "and then with another number",
        ),
        (lambda q, k, v: (q @ k.mT).masked_fill(LEFT_OUT, LOWEST) * 0.5, "mask is scaled"),
        (lambda q, k, v: (q @ k.mT).masked_fill(LEFT_OUT, -1e29), "other than -inf"),
        (lambda q, k, v: (q @ k.mT).half().masked_fill(LEFT_OUT, -6e4).float(), "other than -inf"),
    ],
)
def test_scores_filled_with_other_numbers_stay(function, reason):
    with torch.no_grad():
        ours = check(
            lambda q, k, v: function(q, k, v).softmax(-1) @ v,
            *(t.detach() for t in tensors()),
            replaced={},
        )
    assert [reason in each for each in ours.reasons] == [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_lowest_number_is_kept_in_few_bits(monkeypatch, dtype, biased):
    """A mask of 16 bits would hold -inf there, and a row of nothing else would give 0."""
    bias = BIAS.to(dtype)

    def function(q, k, v):
        scores = (q @ k.mT).float()
        scores = scores + bias if biased else scores
        return scores.masked_fill(LEFT_OUT, LOWEST).softmax(-1).to(dtype) @ v

    q, k, v = (t.detach().to(dtype) for t in tensors())
    ours = Rewritten(function)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.no_grad():
            out = ours(q, k, v)
    finally:
        torch.set_default_dtype(default)
    assert ours.replaced == {"attention": 1}
    torch.testing.assert_close(out, function(q, k, v), rtol=0.02, atol=0.02)


def test_filled_scores_that_need_a_gradient_stay():
    ours = check(
        lambda q, k, v: (q @ k.mT).masked_fill(LEFT_OUT, LOWEST).softmax(-1) @ v,
        *tensors(),
        replaced={},
    )
    assert ours.reasons == ["scores of a number other than -inf need a gradient"]


def test_copies_of_scores_that_nothing_uses_are_no_obstacle():
    def function(q, k, v):
        scores = q @ k.mT
        kept = scores.clone(), scores.view(-1), scores.double()
        return kept and scores.softmax(-1) @ v

    check(function, *tensors(), replaced={"attention": 1})


def test_a_query_changed_meanwhile_is_respected():
    def function(q, k, v):
        q = q * 2
        scores = q @ k.mT
        q.add_(1)
        return scores.softmax(-1) @ v, q

    ours = check(function, *(t.detach() for t in tensors()), replaced={})
    assert ours.reasons == ["add_ may change a tensor meanwhile"]


def test_masks_built_meanwhile_are_served():
    """The mask is written to after the scores are computed, and before it is added to them."""

    def function(q, k, v):
        scores = q @ k.mT
        mask = q.new_zeros(L, S)
        mask[:, 3:] = -1.0
        return (scores + mask).softmax(-1) @ v

    check(function, *tensors(), replaced={"attention": 1})


def test_a_copy_stays_a_copy():
    """torch's result must be copied to be flattened, trifuse's need not be."""

    def function(q, k, v):
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        out = (q @ k.mT).softmax(-1) @ v
        flat = out.transpose(1, 2).reshape(B, L, H * E)
        flat.add_(1)
        return flat, out.sum()

    check(function, *(t.detach() for t in tensors()), replaced={"attention": 1})


def test_strides_are_known_after_another_replacement():
    """The first result has the queries' strides, which the second takes over from it."""

    def function(q, k, v):
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        q = ((q @ k.mT).softmax(-1) @ v) * 1
        return ((q @ k.mT).softmax(-1) @ v).view(B * H, L, E)

    check(function, *tensors(), replaced={"attention": 2}, aot=True)


def test_views_are_known_after_another_replacement():
    def function(q, k, v):
        out = (q @ k.mT).softmax(-1) @ v
        flat = out.view(-1)
        total = out + q
        flat.mul_(2)
        return F.layer_norm(total, (E,)), out

    ours = check(function, *(t.detach() for t in tensors()), replaced={"attention": 1, "norm": 1})
    assert ours.calls("add") == 1


def test_code_that_reads_the_memory_finds_it_in_order():
    def function(q, k, v):
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        out = (q @ k.mT).softmax(-1) @ v
        return out.as_strided((H, B, L, E), (L * E, H * L * E, E, 1)) * 2

    check(function, *tensors(), replaced={"attention": 1})


def test_mask_gets_its_gradient():
    bias = BIAS.clone().requires_grad_()
    check(
        lambda q, k, v, bias: ((q @ k.mT) * 0.3 + bias).softmax(-1) @ v,
        *tensors(),
        bias,
        replaced={"attention": 1},
    )


def test_dropout_drops_weights():
    """With the identity for V the result is the weights after dropout."""
    q, k, _ = (t.detach() for t in tensors())
    v = torch.eye(S).expand(B, H, S, S)
    q, k = q.repeat(50, 1, 1, 1), k.repeat(50, 1, 1, 1)
    v = v.repeat(50, 1, 1, 1)

    def function(q, k, v):
        return F.dropout((q @ k.mT).softmax(-1), 0.25) @ v

    ours = Rewritten(function)
    torch.manual_seed(0)
    out = ours(q, k, v)
    assert ours.replaced == {"attention": 1}
    weights, dropped = (q @ k.mT).softmax(-1), out == 0
    torch.testing.assert_close(out[~dropped], (weights / 0.75)[~dropped])
    assert abs(dropped.float().mean().item() - 0.25) < 0.02  # four standard deviations


def test_values_that_share_dropped_weights_stay():
    """trifuse would drop other weights for each head of the values."""

    def function(q, k, v):
        return F.dropout((q[:, :1] @ k[:, :1].mT).softmax(-1), 0.5) @ v

    ours = Rewritten(function)
    q, k, _ = tensors()
    dropped = ours(q, k, torch.eye(S).expand(B, H, S, S)) == 0
    assert ours.reasons == ["several values share dropped weights"]
    assert (dropped == dropped[:, :1]).all()


@pytest.mark.parametrize("name", ["masked_fill", "bmm", "einsum, heads third", "torch's function"])
def test_one_graph_serves_two_lengths(name):
    def function(q, k, v):
        q, k = q * 1, k * 1
        if name == "masked_fill":
            scores = (q @ k.mT) * (1.0 / math.sqrt(k.size(-1)))
            return (
                scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1) > 0, -INF).softmax(-1)
                @ v
            )
        if name == "bmm":
            batch, heads, length, _ = q.shape
            flat = (batch * heads, -1, E)
            scores = torch.bmm(q.reshape(flat), k.reshape(flat).mT).view(batch, heads, length, -1)
            scores = (scores + scores.new_zeros(batch, 1, 1, 1)).flatten(0, 1)
            return scores.softmax(-1).bmm(v.reshape(flat)).unflatten(0, (batch, heads))
        if name == "torch's function":
            return F.scaled_dot_product_attention(q, k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        weights = torch.einsum("blhe,bshe->bhls", q, k).softmax(-1)
        return torch.einsum("bhls,bshd->blhd", weights, v)

    ours = Rewritten(function, dynamic=True)
    for batch, length in ((2, 5), (4, 9)):
        q, k, v = torch.randn(3, batch, H, length, E)
        torch.testing.assert_close(ours(q, k, v), function(q, k, v))
    assert ours.replaced == {"attention": 1}
    assert len(ours.graphs) == 1


@pytest.mark.parametrize("masks", [False, True])
def test_multi_head_attention_is_served(masks):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    options = {}
    if masks:
        padding = torch.arange(S).expand(B, S) >= torch.tensor([[S], [4]])
        options = {"key_padding_mask": padding, "attn_mask": torch.ones(L, S).triu(2).bool()}

    def function(q, k):
        return module(q, k, k, need_weights=False, **options)[0]

    q, k = torch.randn(B, L, 16, requires_grad=True), torch.randn(B, S, 16, requires_grad=True)
    check(function, q, k, replaced={"attention": 1})
    ours = check(lambda q, k: module(q, k, k), q, k, replaced={})
    assert ours.reasons == ["the attention weights are requested"]


def test_autocast_inside_the_graph_is_followed():
    def function(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v)

    ours = Rewritten(function)
    q, k, v = tensors()
    out = ours(q, k, v)
    assert ours.replaced == {"attention": 1}
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, function(q, k, v), rtol=0.02, atol=0.02)


def test_the_requested_backend_decides():
    q, k, v = tensors()
    with trifuse.backend("eager"):
        ours = check(F.scaled_dot_product_attention, q, k, v, replaced={})
    assert ours.reasons == ["no kernel for torch.float32 on cpu"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_forward_and_backward_drop_the_same(checkpointed):
    """The result is linear in V, so its product with any gradient is that of V with V's own."""

    def body(q, k, v):
        return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v

    def function(q, k, v):
        if checkpointed:
            return torch.utils.checkpoint.checkpoint(body, q, k, v, use_reentrant=False)
        return body(q, k, v)

    ours = Rewritten(function, aot=True)
    q, k, v = tensors()
    out = ours(q, k, v)
    assert ours.replaced == {"attention": 1}
    upstream = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, v, upstream)
    torch.testing.assert_close((out * upstream).sum(), (v * grad).sum())
    assert not torch.allclose(out, (q @ k.mT).softmax(-1) @ v)


def test_checkpointed_bodies_are_served():
    def function(q, k, v):
        body = SPELLINGS["masked_fill"]
        return torch.utils.checkpoint.checkpoint(body, q, k, v, use_reentrant=False)

    check(function, *tensors(), replaced={"attention": 1})
