"""ALiBi in layers that run as one op: the mask and the biases that a layer gets, for the op.

BLOOM's layers get biases of the keys, (B · H, 1, keys), and MPT's (H, 1, the most keys of the
model), of which an attention uses the last. The attentions are written out. So the op gets what
:mod:`trifuse.written_out` makes of such biases: a table by distance or, if the mask has one row for
all queries, a mask of each head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse.ops import _modes
from trifuse.written_out import Form, fitting, without_biases_of_keys


class Terms(NamedTuple):
    """The terms that an attention adds to its scores."""

    mask: Tensor
    # Returns biases by distance, or None if the layer must call its parts. The field is None if the
    # biases are in the mask.
    make_table: Callable[[], Tensor | None] | None


def terms(
    kind: str, x: Tensor, keys: int, heads: int, scale: float, mask: Any, alibi: Any
) -> Terms | None:
    """Return what a layer's attention adds to its scores; None if the layer must call its parts.

    Args:
        kind: the form in which the layer gets mask and biases, one of "bloom" and "mpt".
        x: (B, L, features), the layer's input.
        keys: the number of keys that the attention sees.
        heads: the number of heads.
        scale: the factor of the scores.
        mask: (B or 1, 1, L, keys), as the layer gets it.
        alibi: the biases, as the layer gets them.
    """
    if type(mask) is not Tensor or type(alibi) is not Tensor or mask.dim() != 4:
        return None
    if alibi.dim() != 3 or alibi.size(1) != 1 or not _modes.is_readable(alibi):
        return None
    if mask.size(3) != keys or not alibi.is_floating_point():
        return None
    B, L = x.shape[:2]
    if kind == "bloom":
        if not mask.is_floating_point() or alibi.shape != (B * heads, 1, keys):
            return None
        by_key, bias = alibi.view(B, heads, 1, keys), mask
    else:
        if mask.dtype != torch.bool or alibi.size(0) != heads or alibi.size(2) < keys:
            return None
        by_key = alibi[None, :, :, alibi.size(2) - keys :]
        dtype, least = torch.promote_types(x.dtype, alibi.dtype), torch.finfo(x.dtype).min
        if mask.size(2) == 1:  # the least number replaces the bias, which may be infinite
            sums = fitting(by_key.to(dtype).masked_fill(mask, least), x.dtype)
            return None if sums is None else Terms(sums, None)
        bias = torch.zeros((), dtype=dtype).masked_fill(mask, least)
    stub = x.new_empty(())
    form = Form(
        stub.expand(B, heads, L, 1), stub.expand(B, heads, keys, 1), scale, bias, by_key=by_key
    )
    if mask.size(2) > 1:
        return Terms(bias, functools.partial(_table, form, x.dtype))
    found = without_biases_of_keys(form)
    sums = None if found is None else fitting(found.bias, x.dtype)
    return None if sums is None else Terms(sums, None)


def _table(form: Form, dtype: torch.dtype) -> Tensor | None:
    found = without_biases_of_keys(form)
    return None if found is None else fitting(found.table, dtype)
