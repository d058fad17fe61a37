"""Attention in graphs of Dynamo: the spellings that become trifuse's, and near misses that stay."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from rewritten import Rewritten, check
from torch import nn

import trifuse

B, H, L, S, E = 2, 3, 5, 7, 8
INF = math.inf
FLAT = (B * H, -1, E)


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, L, E), (B, H, S, E), (B, H, S, E))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


# A boolean mask with a key in each row, and a float one.
KEPT = torch.rand(B, 1, L, S, generator=torch.Generator().manual_seed(1)) < 0.6
KEPT[..., 0] = True
BIAS = torch.linspace(-1, 1, H * L * S).view(1, H, L, S)
SPELLINGS = {
    "torch's function": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, KEPT, scale=0.3),
    "torch's function, causal": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True
    ),
    "torch's function, grouped": lambda q, k, v: F.scaled_dot_product_attention(
        torch.cat([q, q], 1), k, v, enable_gqa=True
    ),
    "operators": lambda q, k, v: ((q @ k.transpose(-2, -1)) / math.sqrt(E)).softmax(-1) @ v,
    "mT": lambda q, k, v: F.softmax(torch.matmul(q, k.mT) * 0.2, dim=3).matmul(v),
    "permute": lambda q, k, v: torch.softmax(0.2 * (q @ k.permute(0, 1, 3, 2)), -1) @ v,
    "without a scale": lambda q, k, v: nn.Softmax(dim=-1)(q @ k.transpose(2, 3)) @ v,
    "masked_fill": lambda q, k, v: (q @ k.mT * 0.3).masked_fill(~KEPT, -INF).softmax(-1) @ v,
    "masked_fill before the scale": lambda q, k, v: (
        ((q @ k.mT).masked_fill(KEPT == 0, -INF) * 0.3).softmax(-1) @ v
    ),
    "where": lambda q, k, v: torch.where(KEPT, q @ k.mT, -INF).softmax(-1) @ v,
    "where, the other way": lambda q, k, v: torch.where(~KEPT, -INF, q @ k.mT).softmax(-1) @ v,
    "two boolean masks": lambda q, k, v: (
        (q @ k.mT).masked_fill(~KEPT, -INF).masked_fill(BIAS > 0.9, -INF).softmax(-1) @ v
    ),
    "float mask": lambda q, k, v: (q @ k.mT + BIAS).softmax(-1) @ v,
    "float mask first": lambda q, k, v: (BIAS + q @ k.mT).softmax(-1) @ v,
    "both masks": lambda q, k, v: torch.where(KEPT, q @ k.mT * 0.5 + BIAS, -INF).softmax(-1) @ v,
    "two float masks": lambda q, k, v: (q @ k.mT + BIAS + KEPT.float()).softmax(-1) @ v,
    "baddbmm": lambda q, k, v: (
        torch.baddbmm(BIAS[0].repeat(B, 1, 1), q.reshape(FLAT), k.reshape(FLAT).mT, alpha=0.3)
        .softmax(-1)
        .bmm(v.reshape(FLAT))
    ),
    "bmm": lambda q, k, v: torch.bmm(
        torch.bmm(q.reshape(FLAT), k.reshape(FLAT).transpose(1, 2)).softmax(-1), v.reshape(FLAT)
    ),
    "bmm with a mask for each head": lambda q, k, v: (
        (torch.bmm(q.reshape(FLAT), k.reshape(FLAT).mT).view(B, H, L, S) + BIAS)
        .view(B * H, L, S)
        .softmax(-1)
        .bmm(v.reshape(FLAT))
        .view(B, H, L, E)
    ),
    "masks in two shapes": lambda q, k, v: (
        (((q @ k.mT) + BIAS).view(1, B, H, L, S) + KEPT.float().view(1, B, 1, L, S))
        .view(B, H, L, S)
        .softmax(-1)
        @ v
    ),
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.3).softmax(-1), v
    ),
    "einsum, heads third": lambda q, k, v: torch.einsum(
        "bhls,bshd->blhd",
        torch.einsum("blhe,bshe->bhls", q.transpose(1, 2), k.transpose(1, 2)).softmax(-1),
        v.transpose(1, 2),
    ),
    "einsum, swapped": lambda q, k, v: torch.einsum(
        "bhkd, bhqk -> bhdq", v, torch.einsum("bhkd, bhqd -> bhqk", k, q).softmax(-1)
    ),
    "softcap": lambda q, k, v: (torch.tanh(q @ k.mT * 0.3 / 2.0) * 2.0 + BIAS).softmax(-1) @ v,
    "cosine": lambda q, k, v: (
        (
            F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * BIAS[..., :1, :1].exp() + BIAS
        ).softmax(-1)
        @ v
    ),
    "a temperature": lambda q, k, v: ((q @ k.mT) / BIAS[0, 0, :, :1].exp()).softmax(-1) @ v,
    "a temperature first": lambda q, k, v: (BIAS[:, :, :1, :1].exp() * (q @ k.mT)).softmax(-1) @ v,
    "in place": lambda q, k, v: (
        (q @ k.mT).mul_(0.3).add_(BIAS).masked_fill_(~KEPT, -INF).softmax(-1) @ v
    ),
    "casts": lambda q, k, v: (
        F.softmax((q @ k.mT).float() * 0.3, dim=-1, dtype=torch.float32).type_as(q).contiguous() @ v
    ),
    "inactive dropout": lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5, training=False) @ v,
    "a view of the result": lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).view(B * H, L, E) * 2,
    "a value of another width": lambda q, k, v: (q @ k.mT).softmax(-1) @ v[..., :3],
    "one matrix": lambda q, k, v: (q[0, 0] @ k[0, 0].T).softmax(-1) @ v[0, 0],
    "heads as a batch": lambda q, k, v: (q[0] @ k[0].mT).softmax(-1) @ v[0],
    "many leading dimensions": lambda q, k, v: (
        (q[None] @ k[None].mT + KEPT.float()).softmax(-1) @ v[None]
    ),
}


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


NEAR_MISSES = {
    "softmax over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, None),
    "softmax over heads": (lambda q, k, v: (q @ k.mT).softmax(1) @ v, None),
    "weights used": (returned_weights, "used elsewhere"),
    "scores used": (returned_scores, "used elsewhere"),
    "scores changed": (changed_view, "used elsewhere"),
    "mode changed": (scores_without_gradient, "may change a mode"),
    "finite fill": (
        lambda q, k, v: (q @ k.mT).masked_fill(~KEPT, -1e9).softmax(-1) @ v,
        "other than -inf",
    ),
    "scaled mask": (lambda q, k, v: ((q @ k.mT + BIAS) * 0.3).softmax(-1) @ v, "mask is scaled"),
    "negative scale after a mask": (
        lambda q, k, v: ((q @ k.mT).masked_fill(~KEPT, -INF) * -1).nan_to_num(0).softmax(-1) @ v,
        "no step of attention",
    ),
    "a factor for each pair": (lambda q, k, v: (q @ k.mT * BIAS).softmax(-1) @ v, "is a matrix"),
    "a factor that widens": (
        lambda q, k, v: (q[:, :, :1] @ k.mT * BIAS[..., :1]).softmax(-1) @ v,
        "is a matrix",
    ),
    "a scale that rounds": (
        lambda q, k, v: torch.div(q @ k.mT, 2.0, rounding_mode="floor").softmax(-1) @ v,
        "rounds",
    ),
    "dropped scores": (
        lambda q, k, v: F.dropout(q @ k.mT, 1.0).softmax(-1) @ v,
        "before the softmax",
    ),
    "dropped twice": (dropped_twice, "no plain dropout"),
    "less precise scores": (
        lambda q, k, v: (q @ k.mT).bfloat16().softmax(-1).float() @ v,
        "less precise",
    ),
    "regrouped scores": (
        lambda q, k, v: (q @ k.mT).view(B, H, S, L).softmax(-1).view(B, H, L, S) @ v,
        "cuts rows",
    ),
    "mixed heads": (
        lambda q, k, v: torch.einsum("bhqk,bgkd->bgqd", (q @ k.mT).softmax(-1), v),
        None,
    ),
    "a mask of integers": (
        lambda q, k, v: (q @ k.mT + KEPT.int()).softmax(-1) @ v,
        "dtype torch.int32",
    ),
    "a wider mask": (lambda q, k, v: (q[0] @ k[0].mT + BIAS).softmax(-1) @ v, "widens the scores"),
    "tanh after the mask": (
        lambda q, k, v: torch.tanh(q @ k.mT + BIAS).softmax(-1) @ v,
        "no plain softcap",
    ),
    "integers as values": (
        lambda q, k, v: (q @ k.mT).softmax(-1).double() @ v.double(),
        "less precise",
    ),
    "a classifier": (lambda q, k, v: F.relu(q @ k.mT).softmax(-1) @ v, "no step of attention"),
}


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_miss_stays(function, reason):
    ours = check(function, *tensors(), replaced={})
    assert ours.calls("softmax")
    assert [reason in each for each in ours.reasons] == ([] if reason is None else [True])


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
