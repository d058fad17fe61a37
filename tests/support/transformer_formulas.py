"""The parts of a Transformer's layers as in the papers, for one text, in plain sums.

Nothing here calls ``torch.nn.functional``. In the shapes below L is the length of the text, M the
length of the text to which it attends, and D the number of features.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def normalised(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Layer norm of (L, D)."""
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return centred / deviation * norm.weight + norm.bias


def attended(
    attention: nn.MultiheadAttention, x: Tensor, memory: Tensor, causal: bool = False
) -> Tensor:
    """Attention of x (L, D) to memory (M, D), one query and one head at a time."""
    width, heads = x.shape[1], attention.num_heads
    size = width // heads
    weights = attention.in_proj_weight.split(width)
    biases = attention.in_proj_bias.split(width)
    q, k, v = (
        given @ weight.T + bias
        for given, weight, bias in zip((x, memory, memory), weights, biases, strict=True)
    )
    rows = []
    for place in range(len(x)):
        seen = place + 1 if causal else len(memory)
        parts = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = k[:seen, part] @ q[place, part] / math.sqrt(size)
            parts.append(scores.exp() / scores.exp().sum() @ v[:seen, part])
        rows.append(torch.cat(parts))
    return torch.stack(rows) @ attention.out_proj.weight.T + attention.out_proj.bias


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def fed_forward(
    layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer,
    x: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The feed-forward network of (L, D)."""
    inner = activation(x @ layer.linear1.weight.T + layer.linear1.bias)
    return inner @ layer.linear2.weight.T + layer.linear2.bias


def with_residual(
    sublayer: Callable[[Tensor], Tensor], x: Tensor, norm: nn.LayerNorm, norm_first: bool
) -> Tensor:
    """x + sublayer(norm(x)) with ``norm_first``, otherwise norm(x + sublayer(x))."""
    if norm_first:
        return x + sublayer(normalised(x, norm))
    return normalised(x + sublayer(x), norm)
