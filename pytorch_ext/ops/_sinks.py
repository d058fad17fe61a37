"""Attention sinks, joined to the results of attention without them.

A sink s of a head is one more score in the softmax of each of its rows, without a value (OpenAI,
"gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.2; Xiao et al., "Efficient Streaming
Language Models with Attention Sinks", 2024). It scales a whole row and enters its logsumexp:

    out'_i = out_i exp(lse_i) / (exp(lse_i) + exp(s))
    lse'_i = log(exp(lse_i) + exp(s))

So the kernels need no code for sinks. They return a differentiable logsumexp, and the rest is one
pass over the output, the same on every backend. In 16 bits the output is rounded twice. That error
is smaller than that of eager torch, which rounds scores and weights; the tests check it against the
numerics rule with all other options.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trifuse.ops._modes import requires_grad
from trifuse.ops._runs import expand_in_runs


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output and the logsumexp of attention with sinks.

    Args:
        out: (B, H, L, E), the output without sinks.
        lse: (B, H, L), the logsumexp without sinks; -inf in a row without a key.
        sinks: (H,).
    """
    B, H, L = lse.shape
    sinks = sinks.to(lse.dtype)
    # A compiler orders sums itself, and would specialise on the number of runs.
    ordered = requires_grad(sinks) and not torch.compiler.is_compiling()
    sink = sinks[:, None]
    if ordered:
        sink = expand_in_runs(sinks, B * L).reshape(H, B, L).transpose(0, 1)
    no_key = lse == -torch.inf
    # The larger one only shifts the exponents, so no gradient goes through it. If both are -inf, 0
    # replaces it and 1 replaces the sum, as in the reference formula.
    nothing = no_key & (sink == -torch.inf)
    highest = torch.maximum(lse, sink).detach().masked_fill(nothing, 0)
    of_keys, of_sink = torch.exp(lse - highest), torch.exp(sink - highest)
    total = (of_keys + of_sink).masked_fill(nothing, 1)
    # A row without a key is 0 and passes no gradient, whatever its sink and its gradient are.
    share = (of_keys / total).masked_fill(no_key, 0)
    # For 16-bit outputs the product is float32, and rounded once.
    factor = share[..., None].expand(*share.shape, out.shape[-1])
    if requires_grad(share) and not torch.compiler.is_compiling():
        factor = _GradientInRows.apply(factor)
    scaled = (out * factor).to(out.dtype)
    return scaled, (total.log() + highest).masked_fill(nothing, -torch.inf)


class _GradientInRows(torch.autograd.Function):
    """The identity, whose gradient is made contiguous.

    torch sums a gradient over features in an order that depends on its layout and on the number of
    rows. If rows are contiguous, each is summed by itself.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)
