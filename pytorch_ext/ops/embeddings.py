"""The LayerNorm of a sum of embeddings, as BERT begins, for inference on a CPU.

Written out, it is two lookups of ids, three of embeddings, two additions and a norm: for a short
sentence nine calls of torch, each of which takes longer than it computes. The results have the same
bits.
"""

from __future__ import annotations

from torch import Tensor

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
        ids: int64, of two or more tables, (B, L) the first, (B or 1, L or 1) the others.
        tables: of each, (rows, features), on the CPU.
        weight, bias: of the norm, (features,).
        eps: added to the variance.
        last_is_residual: whether the last sum is taken in the norm, as its residual, and so isn't
            rounded to the dtype of the tables. The other sums are.

    Returns:
        (B, L, features); None if the call isn't plain (csrc/fast_path.cpp), needs a gradient, or
        isn't valid.
    """
    fast = _fast_path.extension()
    out: Tensor | None = None
    if fast is not None:
        out = fast.embed(ids, tables, weight, bias, eps, last_is_residual)
    return out


# The sum alone: its norm is dropout_add_layer_norm's op.
_op.library.define("embedding_sum(Tensor[] ids, Tensor[] tables) -> Tensor")
