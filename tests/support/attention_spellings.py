"""The spellings of attention that the compiler replaces in graphs of torch.compile."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

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


def softmax_module(scores):
    return nn.Softmax(dim=-1)(scores)


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
    "values first": lambda q, k, v: (
        v.mT @ ((q.mT.clone().transpose(-2, -1) @ k.mT) * 0.2).softmax(-1).transpose(-2, -1)
    ),
    "values first, with a mask for each head": lambda q, k, v: torch.bmm(
        v.reshape(FLAT).mT.contiguous(),
        (torch.bmm(q.reshape(FLAT), k.reshape(FLAT).mT).view(B, H, L, S) + BIAS)
        .softmax(-1).view(B * H, L, S).swapaxes(1, 2),
    ),
    "permute": lambda q, k, v: torch.softmax(0.2 * (q @ k.permute(0, 1, 3, 2)), -1) @ v,
    "without a scale": lambda q, k, v: softmax_module(q @ k.transpose(2, 3)) @ v,
    "masked_fill": lambda q, k, v: (
        (q @ k.mT * 0.3).masked_fill(~KEPT, -INF).softmax(-1) @ v
    ),
    "masked_fill before the scale": lambda q, k, v: (
        ((q @ k.mT).masked_fill(KEPT == 0, -INF) * 0.3).softmax(-1) @ v
    ),
    "where": lambda q, k, v: torch.where(KEPT, q @ k.mT, -INF).softmax(-1) @ v,
    "where, the other way": lambda q, k, v: torch.where(~KEPT, -INF, q @ k.mT).softmax(-1) @ v,
    "where, with tensors": lambda q, k, v: torch.where(
        KEPT, torch.where(KEPT.flip(0), q @ k.mT, torch.tensor(-INF)), torch.full([], -INF)
    ).masked_fill(BIAS > 2, torch.tensor(-INF)).div(torch.tensor(2.0)).softmax(-1) @ v,
    "two boolean masks": lambda q, k, v: (
        (q @ k.mT).masked_fill(~KEPT, -INF).masked_fill(BIAS > 0.9, -INF).softmax(-1) @ v
    ),
    "float mask": lambda q, k, v: (q @ k.mT + BIAS).softmax(-1) @ v,
    "float mask first": lambda q, k, v: (BIAS + q @ k.mT).softmax(-1) @ v,
    "float mask subtracted": lambda q, k, v: ((q @ k.mT) / 2 - BIAS).softmax(-1) @ v,
    "float mask before the scale": lambda q, k, v: (
        torch.special.softmax(((q @ k.mT).subtract_(BIAS, alpha=2) + KEPT.float()) * 0.3, -1) @ v
    ),
    "both masks": lambda q, k, v: (
        torch.where(KEPT, q @ k.mT * 0.5 + BIAS, -INF).softmax(-1) @ v
    ),
    "two float masks": lambda q, k, v: (q @ k.mT + BIAS + KEPT.float()).softmax(-1) @ v,
    "baddbmm": lambda q, k, v: torch.baddbmm(
        BIAS[0].repeat(B, 1, 1), q.reshape(FLAT), k.reshape(FLAT).mT, alpha=0.3
    ).softmax(-1).bmm(v.reshape(FLAT)),
    "bmm": lambda q, k, v: torch.bmm(
        torch.bmm(q.reshape(FLAT), k.reshape(FLAT).transpose(1, 2)).softmax(-1), v.reshape(FLAT)
    ),
    "bmm with a mask for each head": lambda q, k, v: (
        (torch.bmm(q.reshape(FLAT), k.reshape(FLAT).mT).view(B, H, L, S) + BIAS)
        .view(B * H, L, S).softmax(-1).bmm(v.reshape(FLAT)).view(B, H, L, E)
    ),
    "masks in two shapes": lambda q, k, v: (
        (((q @ k.mT) + BIAS).view(1, B, H, L, S) + KEPT.float().view(1, B, 1, L, S))
        .view(B, H, L, S).softmax(-1) @ v
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
    "softcap in two factors": lambda q, k, v: (
        (torch.tanh(q @ k.mT * 0.15) * 4.0 / 2.0).masked_fill(~KEPT, -INF).softmax(-1) @ v
    ),
    "cosine": lambda q, k, v: (
        (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * BIAS[..., :1, :1].exp() + BIAS)
        .softmax(-1) @ v
    ),
    "a temperature": lambda q, k, v: ((q @ k.mT) / BIAS[0, 0, :, :1].exp()).softmax(-1) @ v,
    "a temperature first": lambda q, k, v: (
        (BIAS[:, :, :1, :1].exp() * (q @ k.mT)).softmax(-1) @ v
    ),
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
}  # fmt: skip
