"""The product with the values runs the whole attention as one call."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trifuse import spellings
from trifuse.deferred import Again, computing
from trifuse.nn import packing
from trifuse.ops import _modes
from trifuse.ops.attention import scaled_dot_product_attention
from trifuse.spellings import Operation
from trifuse.written_out.biases import MaskedKeyBias, PackedTerm, split, split_mask
from trifuse.written_out.key_biases import (
    biases_by_distance,
    fits_a_feature,
    of_each_head,
    with_feature,
)
from trifuse.written_out.parts import (
    DROPPED,
    Form,
    Scores,
    add,
    autocast_dtype,
    fitting,
    is_plain,
    rule,
)


class _State(threading.local):
    attended = 0  # number of attentions that became one call

    def __init__(self) -> None:
        self.results: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


_state = _State()


def is_result(x: Any) -> bool:
    """Whether a tensor is the result of an attention that this thread ran as one call."""
    return _state.results.get(id(x)) is x


def attended() -> int:
    """Return how many attentions this thread has run as one call so far."""
    return _state.attended


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run a call of torch's function, whose mask may be a :class:`PackedTerm`."""
    if not torch.compiler.is_compiling():
        _state.attended += 1
    if isinstance(attn_mask, MaskedKeyBias) and attn_mask._value is None and not is_causal:
        E = query.shape[-1]
        form = Form(query, key, 1 / math.sqrt(E) if scale is None else scale, dropout_p=dropout_p)
        form = form._replace(by_key=attn_mask.by_key, bias=attn_mask.mask)
        form = form._replace(factors=autocast_dtype(query))
        dtype = autocast_dtype(value) or value.dtype
        with computing():
            return _call(form, value.to(dtype), dtype)
    if not isinstance(attn_mask, PackedTerm):
        mask, tables = split_mask(attn_mask, query.dtype)
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, **tables
        )
    queries, _ = packing.sides(attn_mask.packed)
    causal = is_causal or bool(queries.causal)
    bias, table = split(attn_mask.bias, query.dtype)
    options: Any = {"dropout_p": dropout_p, "scale": scale, "attn_mask": bias}
    return packing.attend(
        query, key, value, attn_mask.packed, is_causal=causal, relative_bias=table, **options
    )


@rule("matmul", "einsum")
def _attend(call: Operation, again: Again) -> Tensor | None:
    """The product with the values."""
    weights, value, result = call.get("input"), call.get("other"), None
    if call.op == "einsum":
        for read in spellings.outer(call):
            if isinstance(read.weights, Scores) and is_plain(read.value):
                weights, value, result = read.weights, read.value, read.result
                value = value if read.order is None else value.permute(read.order)
                break
        else:
            return None
    if not isinstance(weights, Scores) or not weights.form.normalized or not is_plain(value):
        return None
    shape = weights.shape
    autocast = torch.is_autocast_enabled(value.device.type)
    if value.dim() != len(shape) or value.shape[-2] != shape[-1] or value.device != weights.device:
        return None
    if value.dtype != weights.dtype and not autocast:
        return None
    if any(theirs not in (1, ours) for ours, theirs in zip(shape, value.shape[:-2], strict=False)):
        return None
    form = weights.form
    value = value.expand(*shape[:-2], -1, -1)
    if value.shape[:-2] != form.leading:
        value = value.unflatten(0, form.leading) if value.dim() == 3 else value.flatten(0, 1)
    for part in _chain(weights):
        if part.form.dropout_p > 0 and part.was_attended:  # another call would drop others
            raise RuntimeError(DROPPED)
        part.check_unchanged()
    if autocast:
        dtype = autocast_dtype(value) or value.dtype
        value = value.to(dtype)
    else:
        dtype = weights.dtype
    with computing():
        out = _call(form, value, dtype)
    for part in _chain(weights):
        part._attended = True
    _state.attended += 1
    out = out.reshape(*shape[:-1], value.shape[-1])
    out = out if result is None else out.permute(result)
    _state.results[id(out)] = out
    return out


def _chain(weights: Scores) -> Iterator[Scores]:
    """Yield weights, and the scores and weights that they were made of."""
    found, seen = [weights], {id(weights)}
    for part in found:
        yield part
        for parent in part._parents:
            if isinstance(parent, Scores) and id(parent) not in seen:
                seen.add(id(parent))
                found.append(parent)


def _call(form: Form, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Run the attention that was written, and return its result in a dtype.

    Autocast may have been on for one product and off for the other. So the factors are cast here.
    """
    query, key = form.query, form.key
    if form.factors is not None:
        query, key = query.to(form.factors), key.to(form.factors)
    # A model may compute its scores in float32 and its weights in fewer bits.
    wide = torch.promote_types(query.dtype, value.dtype)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    query = _with_their_gradients(query, form)
    if not torch.is_autocast_enabled(query.device.type):
        return _operate(form, query, key, value).to(dtype)
    with torch.autocast(query.device.type, enabled=False):
        return _operate(form, query, key, value).to(dtype)


def without_biases_of_keys(form: Form) -> Form | None:
    """Return the form with biases of the keys as biases by distance, or in the matrix.

    Returns:
        None if they become a feature of the keys instead.
    """
    if form.by_key is None:
        return form
    by_distance = None if form.table is not None else biases_by_distance(form.by_key, form)
    if by_distance is not None:
        return form._replace(table=by_distance, by_key=None)
    if fits_a_feature(form.by_key, form):
        return None
    return form._replace(bias=add(form.bias, form.by_key), by_key=None)


def _operate(form: Form, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scale = form.scale
    if (plain := without_biases_of_keys(form)) is not None:
        form = plain
    elif form.by_key is not None:
        key, value = (of_each_head(x, query.shape[1]) for x in (key, value))
        query, key, scale = with_feature(query, key, form.by_key, scale)
    bias, table = form.bias, form.table
    bias = fitting(bias, query.dtype)
    if form.mask is not None:
        bias = form.mask if bias is None else bias.masked_fill(~form.mask, -math.inf)
    heads = len(form.leading) == 2
    if not heads:
        query, key, value = query[:, None], key[:, None], value[:, None]
        bias = None if bias is None else bias[:, None]
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    options: Any = {
        "attn_mask": bias,
        "dropout_p": form.dropout_p,
        "scale": scale,
        "softcap": form.softcap,
        "relative_bias": fitting(table, query.dtype),
    }
    if form.packed is None:
        options["enable_gqa"] = key.shape[1] != query.shape[1]
        options["relative_index"] = form.columns
        out = scaled_dot_product_attention(query, key, value, **options)
    else:
        queries, _ = packing.sides(form.packed)
        causal = bool(queries.causal)  # None: the code decides, and it has nothing but a mask
        out = packing.attend(query, key, value, form.packed, is_causal=causal, **options)
    return out if heads else out[:, 0]


def _with_their_gradients(query: Tensor, form: Form) -> Tensor:
    """Return the queries, with factors where the scores of a row get no gradient or half of one.

    A fill stops the gradient of a score, and a maximum halves it where both sides are equal. Such
    a score is so low that its weight is 0, and with it the gradient, except in a row whose scores
    are all of this kind, or of this kind and -inf. The weights of such a row are all the same,
    whatever its query is. So the factor of the gradients can be a factor of the query.
    """
    if form.filled is None and form.tied is None:
        return query
    stopped = torch.zeros((), dtype=torch.bool, device=query.device)
    for each in (form.filled, None if form.mask is None else ~form.mask):
        stopped = stopped if each is None else stopped | each
    for added in (form.bias, form.by_key):
        if added is not None:
            stopped = stopped | added.isneginf()
    halved = stopped if form.tied is None else stopped | form.tied
    rows, half = (x.all(-1, keepdim=True) for x in (stopped, halved))
    if _modes.is_readable(half) and not half.any():
        return query
    return torch.where(half, query * 0.5, query).masked_fill(rows, 0.0)
