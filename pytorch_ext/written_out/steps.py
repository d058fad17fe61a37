"""Each step between the two products changes the form of an attention.

Each rule takes a call that has scores, or a term of scores, among its arguments.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from trifuse import spellings
from trifuse.deferred import Again, Deferred
from trifuse.ops import _modes
from trifuse.ops._checks import FLOATING
from trifuse.spellings import Operation
from trifuse.written_out.biases import IndexedBias
from trifuse.written_out.key_biases import are_small, is_readable
from trifuse.written_out.parts import (
    Form,
    Part,
    Scores,
    add,
    as_number,
    is_plain,
    rule,
    split_leading,
)

_P = TypeVar("_P", bound=Part)


def _sides(call: Operation, kind: type[_P]) -> tuple[_P, Any] | None:
    """An operand of a kind, the first if both are, and the other operand; None if none is."""
    first, second = call.get("input"), call.get("other")
    if isinstance(first, kind):
        return first, second
    return (second, first) if isinstance(second, kind) else None


@rule("sigmoid")
def _sigmoid(call: Operation, again: Again) -> Tensor | None:
    bias = call.get("input")
    return bias.with_table(torch.sigmoid) if isinstance(bias, IndexedBias) else None


@rule("mul", "div")
def _scale(call: Operation, again: Again) -> Tensor | None:
    sides = _sides(call, Scores)
    if sides is None and call.op == "mul" and (pair := _sides(call, IndexedBias)) is not None:
        return _scale_bias(*pair)
    if sides is None or call.get("rounding_mode") is not None:
        return None
    scores, form = sides[0], sides[0].form
    if call.op == "div" and scores is not call.get("input"):
        return None
    if (factor := as_number(sides[1])) is None:
        return _scale_rows(scores, sides[1], call, again)
    if call.op == "div":
        factor = 1 / factor if factor else 0.0
    if form.normalized or not math.isfinite(factor) or factor == 0:
        return None
    # A negative factor would make inf of -inf, and a negative cap, and the largest of a low fill.
    limits = form.mask, form.packed, form.softcap, form.filled, form.tied
    if factor < 0 and any(limit is not None for limit in limits):
        return None
    bias, table, by_key = (
        x if x is None else x * factor for x in (form.bias, form.table, form.by_key)
    )
    softcap = None if form.softcap is None else form.softcap * factor
    scaled = form._replace(scale=form.scale * factor, softcap=softcap)
    return scores.after(again, scaled._replace(bias=bias, table=table, by_key=by_key))


def _scale_bias(bias: IndexedBias, factor: Any) -> Tensor | None:
    by = as_number(factor)
    return None if by is None else bias.with_table(lambda table: table * by)


def _scale_rows(scores: Scores, factor: Any, call: Operation, again: Again) -> Tensor | None:
    """A factor for each head or query. The queries can be multiplied by it instead."""
    form = scores.form
    if form.normalized or form.adds_something or not form.mask is form.softcap is None:
        return None
    if not is_plain(factor):
        return None
    if torch.is_autocast_enabled(scores.device.type):  # it computes some factors in float32
        dtype = torch.promote_types(scores.dtype, factor.dtype)
    elif factor.dtype == scores.dtype == form.query.dtype:
        dtype = scores.dtype
    else:
        return None
    aligned = scores.align(factor) if factor.device == scores.device else None
    if aligned is None or aligned.shape[-1] != 1:
        return None
    query = form.query * aligned if call.op == "mul" else form.query / aligned
    return scores.after(again, form._replace(query=query), dtype)


@rule("tanh")
def _cap(call: Operation, again: Again) -> Tensor | None:
    scores = call.get("input")
    if not isinstance(scores, Scores):
        return None
    form = scores.form
    if form.normalized or form.adds_something:
        return None
    if not form.mask is form.packed is form.softcap is None:
        return None
    return scores.after(again, form._replace(softcap=1.0))


@rule("add", "sub")
def _add(call: Operation, again: Again) -> Tensor | None:
    if (alpha := as_number(call.get("alpha", 1))) is None:
        return None
    factor = alpha if call.op == "add" else -alpha
    if (sides := _sides(call, Scores)) is None:
        pair = _sides(call, IndexedBias) if factor == 1 else None
        return None if pair is None else pair[0].plus(pair[1])
    scores, bias = sides
    if isinstance(bias, Scores):
        return _join(scores, bias, again) if factor == 1 else None
    if scores.form.normalized:
        return None
    if factor != 1:
        if scores is not call.get("input") or isinstance(bias, Deferred):
            return None
        bias = bias * factor
    if type(bias) in (int, float):
        bias = torch.tensor(bias, dtype=scores.dtype, device=scores.device)
    if isinstance(bias, Part):
        form = bias.added_to(scores)
    elif is_plain(bias) and bias.device == scores.device:
        form = scores.with_bias(bias)
    else:
        return None
    dtype = torch.promote_types(scores.dtype, bias.dtype) if bias.dim() else scores.dtype
    return None if form is None else scores.after(again, form, dtype)


def _join(first: Scores, second: Scores, again: Again) -> Tensor | None:
    """Write the sum of two products as one product of queries and keys with the features of both.

    LiLT adds the scores of its text and those of the layout.
    """
    forms = first.form, second.form
    for form in forms:
        if form.normalized or form.adds_something:
            return None
        if not form.mask is form.packed is form.softcap is None:
            return None
    ours, theirs = forms
    if first.shape != second.shape or first.dtype != second.dtype or ours.leading != theirs.leading:
        return None
    if ours.query.dtype != theirs.query.dtype:
        return None
    query = torch.cat([form.query * form.scale for form in forms], -1)
    return first.after(again, Form(query, torch.cat([ours.key, theirs.key], -1)))


@rule("masked_fill", "where")
def _fill(call: Operation, again: Again) -> Tensor | None:
    """Scores with a value so low that its weight is 0, for some pairs."""
    scores, left_out, value = (call.get(name) for name in ("input", "mask", "value"))
    if call.op == "where":
        left_out, value = call.get("condition"), call.get("other")
        if isinstance(value, Scores):
            scores, value = value, scores
        elif _is_boolean(left_out):
            left_out = ~left_out
    if not (isinstance(scores, Scores) and _is_boolean(left_out)):
        return None
    form, number = scores.form, as_number(value)
    if number is None or form.normalized or (aligned := scores.align(left_out)) is None:
        return None
    if number == -math.inf:
        takes_part = ~aligned
        mask = takes_part if form.mask is None else form.mask & takes_part
        return scores.after(again, form._replace(mask=mask))
    if not spellings.is_low(number, scores.dtype):
        return None
    by_key, table = form.by_key, form.table
    # The fill replaces biases that would get a gradient or, added to it, make another number of it.
    if by_key is not None and (not is_readable(by_key) or not are_small(by_key)):
        form = form._replace(bias=add(form.bias, by_key), by_key=None)
    if table is not None and is_readable(table) and not are_small(table):
        return None
    bias = form.bias
    if bias is None:
        bias = torch.zeros((), dtype=scores.dtype, device=scores.device)
    bias = bias.to(torch.promote_types(bias.dtype, scores.dtype))  # which holds the number
    form = form._replace(bias=bias.masked_fill(aligned, number))
    if form.mask is not None:  # the fill replaces -inf, too
        form = form._replace(mask=form.mask | aligned)
    if scores.requires_grad:
        if form.tied is not None or (form.table is not None and form.table.requires_grad):
            return None  # in a row of nothing else, these would get a gradient
        form = _with_filled(form, aligned)
    return scores.after(again, form)


def _with_filled(form: Form, filled: Tensor) -> Form:
    """A form with more scores that a fill keeps from getting a gradient."""
    return form._replace(filled=filled if form.filled is None else form.filled | filled)


def _is_boolean(x: Any) -> bool:
    return type(x) is Tensor and x.dtype == torch.bool


@rule("max")
def _no_lower(call: Operation, again: Again) -> Tensor | None:
    """``torch.max(scores, lowest)`` changes only scores that a bias has made lower still."""
    sides = _sides(call, Scores)
    if sides is None or not isinstance(sides[1], Tensor):
        return None
    scores, number = sides[0], as_number(sides[1])
    form = scores.form
    if (
        number is None
        or number > spellings.LOW
        or form.normalized
        or not form.mask is form.packed is form.tied is None
    ):
        return None
    bias, by_key = form.bias, form.by_key
    if bias is not None and by_key is not None:  # two lowest numbers would add up to -inf
        bias, by_key = bias + by_key, None
    added = by_key if bias is None else bias
    if added is not None and scores.requires_grad:
        limited = _with_maximum(form, added, number)
        if limited is None:
            return None
        form = limited
    bias, by_key = (x if x is None else _at_least(x, number) for x in (bias, by_key))
    return scores.after(again, form._replace(bias=bias, by_key=by_key))


def _at_least(x: Tensor, number: float) -> Tensor:
    if not x.requires_grad:
        return x.clamp(min=number)
    return torch.maximum(x, x.new_tensor(number))  # which also halves the gradient of a tie


def _with_maximum(form: Form, added: Tensor, number: float) -> Form | None:
    """Return a form whose scores get the gradients that ``torch.max(scores, number)`` passes on.

    These are none to a lower score and half of one to an equal score.

    Args:
        added: the biases of the scores. A bias as low as the number is the score.
    """
    if form.table is not None and form.table.requires_grad:
        return None  # in a row of nothing else, the table would get a gradient
    lower = added < number
    stopped = lower if form.filled is None else form.filled | lower
    tied = (added == number) & ~stopped
    if _modes.is_readable(added):
        both = stopped.any(-1) & tied.any(-1) & (stopped | tied).all(-1)
        if both.any():
            return None  # the pairs of a row of nothing else would need factors of their own
    return _with_filled(form, lower)._replace(tied=tied)


@rule("softmax")
def _softmax(call: Operation, again: Again) -> Tensor | None:
    scores, dtype = call.get("input"), call.get("dtype")
    if not isinstance(scores, Scores) or scores.form.normalized:
        return None
    if call.get("dim") not in (-1, scores.dim() - 1):
        return None
    if dtype is None and torch.is_autocast_enabled(scores.device.type):
        dtype = _empty(scores).softmax(-1).dtype  # float32 on a GPU, that of the scores on a CPU
    return scores.after(again, scores.form._replace(normalized=True), dtype)


@rule("dropout")
def _dropout(call: Operation, again: Again) -> Tensor | None:
    weights, p = call.get("input"), call.get("p", 0.5)
    if not isinstance(weights, Scores):
        return None
    form = weights.form
    if not call.get("training", call.get("train", True)) or p == 0:
        return weights  # as torch returns its argument
    if not form.normalized or form.dropout_p > 0 or not 0 < p < 1:
        return None
    return weights.after(again, form._replace(dropout_p=p))


@rule("cast")
def _cast(call: Operation, again: Again) -> Tensor | None:
    """A change of dtype. The operator computes in float32 or wider for any dtype."""
    func, args, kwargs = again
    scores = call.get("input")
    if not isinstance(scores, Scores):
        return None
    # The call on an empty tensor shows which dtype and device it gives, without computing scores.
    empty, *rest = (_empty(arg) if isinstance(arg, Deferred) else arg for arg in args)
    result = func(empty, *rest, **kwargs)
    if result is empty:
        return scores
    if not isinstance(result, Tensor):  # ``x.type()`` is a name
        return None
    if result.device != scores.device or result.dtype not in FLOATING:
        return None
    return scores.after(again, scores.form, result.dtype)


def _empty(x: Tensor) -> Tensor:
    return torch.empty((0,) * x.dim(), dtype=x.dtype, device=x.device)


@rule("expand_as")
def _expand_as(call: Operation, again: Again) -> Tensor | None:
    """A mask expanded to the shape of the scores, which is known."""
    mask, scores = call.get("input"), call.get("other")
    if isinstance(mask, Deferred) or not isinstance(scores, Scores):
        return None
    expanded: Tensor = mask.expand(scores.shape)
    return expanded


@rule("view")
def _view(call: Operation, again: Again) -> Tensor | None:
    """Batch and heads joined in one dimension or split; or the batch as images and windows."""
    func, (scores, *rest), kwargs = again
    if isinstance(scores, IndexedBias):
        return scores.viewed(again)
    if not isinstance(scores, Scores):
        return None
    result = func(torch.empty(scores.shape, dtype=scores.dtype, device="meta"), *rest, **kwargs)
    shape, form = result.shape, scores.form
    if result.dtype != scores.dtype or shape[-2:] != scores.shape[-2:]:
        return None
    if len(shape) == 5 and form.packed is None:
        if (shape[0] * shape[1], shape[2]) != form.leading:
            return None
    elif len(shape) not in (3, 4):
        return None
    if len(shape) == 4 and len(form.leading) == 1:
        leading = shape[:-2]
        form = form._replace(
            query=form.query.unflatten(0, leading),
            key=form.key.unflatten(0, leading),
            bias=None if form.bias is None else split_leading(form.bias, leading),
            by_key=None if form.by_key is None else split_leading(form.by_key, leading),
            mask=None if form.mask is None else split_leading(form.mask, leading),
            filled=None if form.filled is None else split_leading(form.filled, leading),
            tied=None if form.tied is None else split_leading(form.tied, leading),
        )
    elif len(shape) == 4 and shape[:-2] != form.leading:
        return None
    whole = scores.shared()
    view = Scores.of(form, shape, scores.dtype, (func, (whole, *rest), kwargs))
    view._shares = whole
    return view
