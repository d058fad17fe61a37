"""The LayerNorm of a sum of embeddings, as at the start of BERT, for inference on a CPU.

Also its lookups on any device. Written out in torch, it is two lookups of ids, three of embeddings,
two additions and a norm. For a short sentence these are nine calls of torch, and the overhead of
each is longer than its computation. The results have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from trifuse import backends
from trifuse.ops import _fast_path, _op


def embed(
    ids: tuple[Tensor, ...],
    tables: tuple[Tensor, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    last_is_residual: bool,
) -> Tensor | None:
    """Computes LayerNorm(tables[0][ids[0]] + tables[1][ids[1]] + ...).

    Args:
        ids: int64, for two or more tables: (B, L) the first, (B or 1, L or 1) the others.
        tables: (rows, features) each, on the CPU.
        weight, bias: of the norm, (features,).
        eps: added to the variance.
        last_is_residual: whether the norm computes the last sum, as its residual, so that it isn't
            rounded to the dtype of the tables. The other sums are rounded.

    Returns:
        (B, L, features); None if the call isn't plain (csrc/fast_path/), needs a gradient, or
        isn't valid.
    """
    fast = _fast_path.extension()
    out: Tensor | None = None
    if fast is not None:
        out = fast.embed(ids, tables, weight, bias, eps, last_is_residual)
    return out


def embedded_rows(
    ids: tuple[Tensor, ...], tables: tuple[Tensor, ...], paddings: tuple[int, ...]
) -> tuple[Tensor, Tensor] | None:
    """Looks embeddings up, on any device, with gradients.

    Args:
        ids: int64, for two or more tables, all of one shape. Those between the first and the last
            may hold a single id for all tokens.
        tables: (rows, features) each.
        paddings: for each table, the id whose row gets no gradient, or -1.

    Returns:
        The sum of the rows of all tables except the last, rounded after each addition, and the rows
        of the last table, (..., features); None if the call isn't plain, or isn't valid.
    """
    fast = None if torch.compiler.is_compiling() or backends._C is None else backends._C
    out: tuple[Tensor, Tensor] | None = None
    if fast is not None and forward_ad._current_level < 0:
        out = fast.embedded_rows(ids, tables, paddings)
    return out


# The sum alone; its norm is the op of dropout_add_layer_norm.
_op.library.define("embedding_sum(Tensor[] ids, Tensor[] tables) -> Tensor")
