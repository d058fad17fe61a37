"""Attention that a model writes out, as two products and a softmax, run as one call.

    scores = query @ key.transpose(-1, -2) / math.sqrt(head_dim) + mask
    weights = F.dropout(scores.softmax(-1), p)
    out = weights @ value

Inside ``with trifuse.attention()`` the first product is put off: its result is a :class:`Deferred`
tensor, which holds the factors instead of numbers. A step that keeps the form of an attention gives
another deferred tensor: a factor, a term, a mask, the softmax, dropout, a dtype, a split of the
batch into batch and heads. The last product is then one call of
:func:`trifuse.scaled_dot_product_attention`.

Every other use of a deferred tensor computes it first, by the functions that the model called. So
code of any form gives the results it gave, and only what is recognised runs fused.

The same code serves packed tokens, queries of (1, H, T, E): a :class:`PackedTerm` in place of the
mask makes the last product a call of :func:`trifuse.varlen_attention`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from trifuse.nn import packing
from trifuse.nn.packing import CrossSequences, PackedSequences
from trifuse.ops._checks import FLOATING
from trifuse.ops.attention import scaled_dot_product_attention

Packed = PackedSequences | CrossSequences


class Form(NamedTuple):
    """The parts of an attention, as far as the model has written them.

    The leading dimensions are (N,) or (B, H), the finest split that the model has used. If the
    tokens are packed, they are (1, H), there is no mask, and the bias has the shape that
    :func:`trifuse.nn.packing.attend` takes.
    """

    query: Tensor  # (..., Lq, E)
    key: Tensor  # (..., Lk, E)
    scale: float = 1.0
    bias: Tensor | None = None  # floating, broadcastable to (..., Lq, Lk)
    mask: Tensor | None = None  # boolean, likewise; False leaves the pair out
    packed: Packed | None = None  # where each sequence of packed tokens begins
    normalized: bool = False  # whether the softmax was taken
    dropout_p: float = 0.0

    @property
    def leading(self) -> torch.Size:
        return self.query.shape[:-2]


class Deferred(Tensor):
    """A tensor that is not computed yet.

    Raises:
        RuntimeError: it must be computed, but a tensor that it is made of may have changed.
    """

    _call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # computes it
    _versions: list[tuple[Tensor, int | None]]  # of the tensors in the call; None: unknown
    _value: Tensor | None
    _derived: list[weakref.ref[Deferred]]
    _attended: bool  # whether the product with the values was taken
    _recorded: bool  # whether gradients were recorded when it was made

    @classmethod
    def _of(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        call: tuple[Any, Any, Any],
    ) -> Any:
        """Return the tensor that a call would compute."""
        leaves = [leaf for leaf in tree_leaves(call[1:]) if isinstance(leaf, Tensor)]
        grad = torch.is_grad_enabled()
        differentiable = grad and any(leaf.requires_grad for leaf in leaves)
        made: Any = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=differentiable
        )
        if differentiable:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        made._call, made._value = call, None
        made._derived, made._attended, made._recorded = [], False, grad
        made._versions = [
            (leaf, None if leaf.is_inference() else leaf._version)
            for leaf in leaves
            if not isinstance(leaf, Deferred)
        ]
        for leaf in leaves:
            if isinstance(leaf, Deferred):
                leaf._derived.append(weakref.ref(made))
        return made

    def compute(self) -> Tensor:
        """Return the values, as the model's own functions compute them."""
        if self._value is None:
            for tensor, version in self._versions:
                # In inference mode tensors count no changes. Until the product with the values
                # there is nothing that would make any.
                if self._attended if version is None else tensor._version != version:
                    raise RuntimeError(_TOO_LATE)
            function, args, kwargs = self._call
            with _undeferred(), torch.set_grad_enabled(self._recorded):
                self._value = function(*_computed(args), **_computed(kwargs))
        return self._value

    def settle(self) -> None:
        """Compute this tensor and all that depend on it, before it is changed in place."""
        for reference in self._derived:
            if (derived := reference()) is not None:
                derived.settle()
        self.compute()

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (rule := _RULES.get(func)) is not None and _still_deferred(args):
            found = rule(func, args, kwargs)
            if found is not None:
                return found
        if func in _IN_PLACE:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Deferred):
                    leaf.settle()
        return func(*_computed(args), **_computed(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} got attention scores that trifuse.attention() has not computed; call this "
            "part of the model outside of it"
        )


class Scores(Deferred):
    """Scores or weights (..., Lq, Lk) that are not computed yet."""

    _form: Form

    @staticmethod
    def of(
        form: Form, shape: Sequence[int], dtype: torch.dtype, call: tuple[Any, Any, Any]
    ) -> Scores:
        """Return the scores that a call would compute."""
        made: Scores = Scores._of(shape, dtype, form.query.device, call)
        made._form = form
        return made


class PackedTerm(Deferred):
    """A term of the scores of packed tokens, (1, 1 or H, Tq, Tk): a mask or a bias.

    It is -inf for pairs of tokens that don't attend to each other.
    """

    packed: Packed
    bias: Tensor | None

    @staticmethod
    def of(
        packed: Packed, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> PackedTerm:
        """Return the term for packed tokens.

        Args:
            packed: where each sequence begins.
            bias: of the pairs of one sequence, (1 or B, 1 or H, longest queries, longest keys), as
                :func:`trifuse.nn.packing.attend` takes it. None: 0.
            dtype: of the term, and of the bias.
            device: of the tokens.
        """
        counts = (each.indices.shape[0] for each in packing.sides(packed))
        shape = (1, 1 if bias is None else bias.shape[1], *counts)
        arguments = (packed, bias, dtype, device)
        made: PackedTerm = PackedTerm._of(shape, dtype, device, (_dense, arguments, {}))
        made.packed, made.bias = packed, bias
        return made


def _dense(packed: Packed, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    (queries, rows), (keys, columns) = map(packing.places, packing.sides(packed))
    side, *_ = packing.sides(packed)
    takes_part = queries[:, None] == keys
    distance = columns - rows[:, None]
    if side.causal:
        takes_part &= distance <= 0
    if side.window is not None:
        takes_part &= distance.abs() <= side.window
    if bias is None:
        term = torch.zeros(1, 1, *takes_part.shape, dtype=dtype, device=device)
    else:
        whole = bias.expand(side.cu_seqlens.shape[0] - 1, -1, side.max_seqlen, -1)
        # A row's own sequence has no place for each place of a longer one.
        columns = columns.clamp(max=whole.shape[-1] - 1)
        term = whole[queries[:, None], :, rows[:, None], columns].permute(2, 0, 1)[None]
    return term.masked_fill(~takes_part, -math.inf)


_TOO_LATE = (
    "these attention weights were not computed, and a tensor that they are made of may have "
    "changed since; ask for them by output_attentions=True, or call the model without "
    "trifuse.attention()"
)


def _refuse_gradient(grad: Tensor) -> Tensor:
    """Raise. A deferred tensor is in no graph, unless it is the input of a custom function."""
    raise RuntimeError(
        "a function with a backward of its own got attention scores that trifuse.attention() has "
        "not computed; call this part of the model outside of it"
    )


def _still_deferred(args: Iterable[Any]) -> bool:
    """Whether no deferred tensor among the arguments has been computed by now.

    Inside the forward of a custom function, which records no gradients, they count as computed.
    """
    grad = torch.is_grad_enabled()
    return all(
        arg._value is None and arg._recorded == grad for arg in args if isinstance(arg, Scores)
    )


def _computed(arguments: Any) -> Any:
    return tree_map(lambda x: x.compute() if isinstance(x, Deferred) else x, arguments)


class _State(threading.local):
    computing = False  # whether the functions that compute deferred tensors run now
    attended = 0  # number of attentions that became one call


_state = _State()


def attended() -> int:
    """Return how many attentions this thread has run as one call so far."""
    return _state.attended


@contextlib.contextmanager
def _undeferred() -> Iterator[None]:
    before, _state.computing = _state.computing, True
    try:
        yield
    finally:
        _state.computing = before


# The first product --------------------------------------------------------------------------------


def begin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """Put off the product of queries and keys; None if a call is not one."""
    if _state.computing or (read := _PRODUCTS.get(func)) is None:
        return None
    operands = read(*args, **kwargs)
    if operands is None:
        return None
    query, transposed, scale, bias = operands
    if not (_is_plain(query) and _is_plain(transposed) and _fit(query, transposed)):
        return None
    key = transposed.mT
    if key.shape[:-2] != query.shape[:-2]:
        key = key.expand(*query.shape[:-2], -1, -1)
    form = Form(query, key, scale)
    shape = (*query.shape[:-1], key.shape[-2])
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    made = Scores.of(form, shape, dtype, (func, args, kwargs))
    if bias is not None:
        with_bias = _with_bias(made, bias)
        if with_bias is None:
            return None
        made._form = with_bias
    return made


def _is_plain(x: Any) -> bool:
    """Whether x is an ordinary tensor that the operator takes."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.layout == torch.strided
        and not x.is_nested
        and x.dtype in FLOATING
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _fit(query: Tensor, transposed: Tensor) -> bool:
    """Whether the factors can be queries (..., Lq, E) and keys (..., E, Lk).

    Keys that were transposed have their features next to each other. That tells them from values.
    """
    return (
        query.dim() == transposed.dim()
        and query.dim() in (3, 4)
        and query.dtype == transposed.dtype
        and query.device == transposed.device
        and query.shape[-1] == transposed.shape[-2] > 0
        and (transposed.stride(-2) == 1 or transposed.shape[-2] == 1)
        and all(
            theirs in (1, ours)
            for ours, theirs in zip(query.shape[:-2], transposed.shape[:-2], strict=True)
        )
    )


_Operands = tuple[Any, Any, float, "Tensor | None"]


def _matmul(query: Any, key: Any, *_: Any, **__: Any) -> _Operands | None:
    return None if _ or __ else (query, key, 1.0, None)


def _baddbmm(
    bias: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1, **other: Any
) -> _Operands | None:
    if other or not (isinstance(beta, (int, float)) and isinstance(alpha, (int, float))):
        return None
    if not _is_plain(bias):
        return None
    return batch1, batch2, float(alpha), bias if beta == 1 else bias * beta


def _einsum(equation: Any, *operands: Any) -> _Operands | None:
    """Read "b h i d, b h j d -> b h i j", and the same with (N, L, E)."""
    if not (isinstance(equation, str) and len(operands) == 2):
        return None
    terms = _terms(equation)
    if terms is None:
        return None
    query, key, scores = terms
    lead, i, j = scores[:-2], scores[-2], scores[-1]
    feature = query[-1:]
    if query != lead + i + feature or key != lead + j + feature or feature in scores:
        return None
    return operands[0], operands[1].mT, 1.0, None


def _terms(equation: str) -> tuple[str, str, str] | None:
    """Split an equation of two operands; None if it has another form."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or len(operands) != 2 or not 3 <= len(result) <= 4:
        return None
    return operands[0], operands[1], result


_PRODUCTS: dict[Any, Callable[..., _Operands | None]] = {
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _matmul
    ),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _baddbmm),
    torch.einsum: _einsum,
}


# Steps between the products -----------------------------------------------------------------------

# A rule returns the result of a function of a deferred tensor; None if the function must run.
_Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], "Tensor | None"]


def _next(scores: Scores, call: Any, form: Form, dtype: torch.dtype | None = None) -> Scores:
    return Scores.of(form, scores.shape, dtype or scores.dtype, call)


def _number(x: Any) -> float | None:
    """The value of a number, or of a tensor that is one and needs no gradient."""
    if isinstance(x, Scores):
        return None
    if isinstance(x, Tensor):
        return x.item() if x.dim() == 0 and x.device.type == "cpu" and not x.requires_grad else None
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Scores, Any, bool] | None:
    """Scores and the other operand, and whether they come first; None unless one is scores."""
    if len(args) != 2 or kwargs:
        return None
    first = isinstance(args[0], Scores)
    scores, other = args if first else args[::-1]
    return (
        (scores, other, first)
        if isinstance(scores, Scores) is not isinstance(other, Scores)
        else None
    )


def _scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    operands = _two(args, kwargs)
    if operands is None or (factor := _number(operands[1])) is None:
        return None
    scores, _, first = operands
    if func in _DIVISIONS:
        if not first or factor == 0:
            return None
        factor = 1 / factor
    form = scores._form
    if form.normalized or not math.isfinite(factor) or factor == 0:
        return None
    if factor < 0 and not form.mask is form.packed is None:  # -inf would become inf
        return None
    bias = None if form.bias is None else form.bias * factor
    return _next(scores, (func, args, kwargs), form._replace(scale=form.scale * factor, bias=bias))


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    operands = _two(args, kwargs)
    if operands is None:
        return None
    scores, bias, _ = operands
    if scores._form.normalized:
        return None
    if isinstance(bias, PackedTerm):
        form = _with_term(scores, bias)
    elif _is_plain(bias) and bias.device == scores.device:
        form = _with_bias(scores, bias)
    else:
        return None
    dtype = torch.promote_types(scores.dtype, bias.dtype) if bias.dim() else scores.dtype
    return None if form is None else _next(scores, (func, args, kwargs), form, dtype)


def _with_bias(scores: Scores, bias: Tensor) -> Form | None:
    form = scores._form
    aligned = _align(scores, bias)
    if aligned is None:
        return None
    return form._replace(bias=aligned if form.bias is None else form.bias + aligned)


def _with_term(scores: Scores, term: PackedTerm) -> Form | None:
    form = scores._form
    if scores.shape[:2] != form.leading or scores.shape[2:] != term.shape[2:]:
        return None
    if form.packed is None:
        if not form.bias is form.mask is None:
            return None
    elif form.packed is not term.packed:
        return None
    both = [bias for bias in (form.bias, term.bias) if bias is not None]
    return form._replace(packed=term.packed, bias=sum(both[1:], both[0]) if both else None)


def _align(scores: Scores, x: Tensor) -> Tensor | None:
    """A tensor that broadcasts to the scores, with the form's leading dimensions instead."""
    leading, shape = scores._form.leading, scores.shape
    if scores._form.packed is not None:
        return None
    if x.dim() > len(shape) or torch.broadcast_shapes(x.shape, shape) != shape:
        return None
    x = x[(None,) * (len(shape) - x.dim())]
    if len(leading) == len(shape) - 2:
        return x
    return _split(x, leading) if len(leading) == 2 else None


def _split(x: Tensor, leading: Sequence[int]) -> Tensor:
    """(N or 1, ...) as (B or 1, H or 1, ...), N = B · H."""
    return x[None] if x.shape[0] == 1 else x.unflatten(0, tuple(leading))


def _masked(scores: Scores, call: Any, left_out: Any, value: Any) -> Tensor | None:
    """The scores with a value so low that its weight is 0 where a mask is True."""
    number = _number(value)
    form = scores._form
    if number is None or form.normalized or not isinstance(left_out, Tensor):
        return None
    if isinstance(left_out, Scores) or left_out.dtype != torch.bool:
        return None
    if (aligned := _align(scores, left_out)) is None:
        return None
    if number == -math.inf:
        takes_part = ~aligned
        mask = takes_part if form.mask is None else form.mask & takes_part
        return _next(scores, call, form._replace(mask=mask))
    if number > _LOW or scores.dtype == torch.float16:
        return None
    # Added to a score of any size, so low a number stays as it is.
    dtype = scores.dtype if form.bias is None else form.bias.dtype
    bias = torch.zeros((), dtype=dtype, device=scores.device) if form.bias is None else form.bias
    return _next(scores, call, form._replace(bias=bias.masked_fill(aligned, number)))


_LOW = -1e30


def _masked_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    if kwargs or len(args) != 3 or not isinstance(args[0], Scores):
        return None
    return _masked(args[0], (func, args, kwargs), args[1], args[2])


def _where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    if kwargs or len(args) != 3:
        return None
    condition, chosen, other = args if func is torch.where else (args[1], args[0], args[2])
    if not isinstance(chosen, Scores) or not _is_boolean(condition):
        return None
    return _masked(chosen, (func, args, kwargs), ~condition, other)


def _is_boolean(x: Any) -> bool:
    return type(x) is Tensor and x.dtype == torch.bool


def _no_lower(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """``torch.max(scores, lowest)`` changes scores of -inf alone, and those only in empty rows."""
    operands = _two(args, kwargs)
    if operands is None or not isinstance(operands[1], Tensor):
        return None
    scores, other, _ = operands
    number = _number(other)
    if number is None or number > _LOW or scores._form.normalized or scores._form.mask is not None:
        return None
    return _next(scores, (func, args, kwargs), scores._form)


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    scores, rest = args[0], args[1:]
    given = {**dict(zip(("dim",), rest, strict=False)), **kwargs}
    given.pop("_stacklevel", None)
    dtype = given.pop("dtype", None)
    dim = given.pop("dim", None)
    if given or len(rest) > 1 or not isinstance(scores, Scores) or scores._form.normalized:
        return None
    if dim not in (-1, scores.dim() - 1):
        return None
    if dtype is None and torch.is_autocast_enabled(scores.device.type):
        dtype = torch.float32
    return _next(scores, (func, args, kwargs), scores._form._replace(normalized=True), dtype)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    names = ("input", "p", "training", "inplace")
    given = {"p": 0.5, "training": True, "inplace": False, **dict(zip(names, args, strict=False))}
    given |= kwargs
    weights, p = given["input"], given["p"]
    if not isinstance(weights, Scores) or given["inplace"]:
        return None
    form = weights._form
    if not given["training"] or p == 0:
        return _next(weights, (func, args, kwargs), form)
    if not form.normalized or form.dropout_p > 0 or not 0 < p < 1:
        return None
    return _next(weights, (func, args, kwargs), form._replace(dropout_p=p))


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A change of dtype. The operator computes in float32 or wider whatever the dtype."""
    scores, rest = args[0], args[1:]
    dtype = _CASTS.get(func)
    if dtype is None and len(rest) == 1 and not kwargs:
        dtype = rest[0].dtype if isinstance(rest[0], Tensor) else rest[0]
    elif dtype is None and not rest and set(kwargs) == {"dtype"}:
        dtype = kwargs["dtype"]
    elif rest or kwargs:
        return None
    if not isinstance(scores, Scores) or dtype not in FLOATING:
        return None
    return _next(scores, (func, args, kwargs), scores._form, dtype)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Batch and heads in one dimension, or apart."""
    scores = args[0]
    sizes = args[1:] if len(args) != 2 or isinstance(args[1], int) else args[1]
    if kwargs or not isinstance(scores, Scores) or not isinstance(sizes, (tuple, list)):
        return None
    if not all(type(size) is int for size in sizes) or len(sizes) not in (3, 4):
        return None
    known = math.prod(size for size in sizes if size != -1)
    count = scores.numel()
    if list(sizes).count(-1) > 1 or known == 0 or count % known:
        return None
    shape = torch.Size(count // known if size == -1 else size for size in sizes)
    if shape.numel() != count or shape[-2:] != scores.shape[-2:]:
        return None
    form = scores._form
    if len(shape) == 4 and len(form.leading) == 1:
        leading = shape[:-2]
        form = form._replace(
            query=form.query.unflatten(0, leading),
            key=form.key.unflatten(0, leading),
            bias=None if form.bias is None else _split(form.bias, leading),
            mask=None if form.mask is None else _split(form.mask, leading),
        )
    elif len(shape) == 4 and shape[:-2] != form.leading:
        return None
    return Scores.of(form, shape, scores.dtype, (func, args, kwargs))


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    scores = args[0]
    return scores if len(args) == 1 and not kwargs and isinstance(scores, Scores) else None


def _attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The product with the values."""
    if func is torch.einsum:
        terms = _terms(args[0]) if len(args) == 3 and isinstance(args[0], str) else None
        if terms is None:
            return None
        weights_term, value_term, result = terms
        j, feature = weights_term[-1:], value_term[-1:]
        lead = weights_term[:-2]
        if value_term != lead + j + feature or result != weights_term[:-1] + feature:
            return None
        args = args[1:]
    if len(args) != 2 or kwargs:
        return None
    weights, value = args
    if not isinstance(weights, Scores) or not weights._form.normalized or not _is_plain(value):
        return None
    shape = weights.shape
    autocast = torch.is_autocast_enabled(value.device.type)
    if value.dim() != len(shape) or value.shape[-2] != shape[-1] or value.device != weights.device:
        return None
    if value.dtype != weights.dtype and not autocast:
        return None
    if any(theirs not in (1, ours) for ours, theirs in zip(shape, value.shape[:-2], strict=False)):
        return None
    form = weights._form
    value = value.expand(*shape[:-2], -1, -1)
    if value.shape[:-2] != form.leading:
        value = value.unflatten(0, form.leading) if value.dim() == 3 else value.flatten(0, 1)
    with _undeferred():
        out = _call(form, value, weights.dtype)
    _spend(weights)
    _state.attended += 1
    return out.reshape(*shape[:-1], value.shape[-1])


def _call(form: Form, value: Tensor, dtype: torch.dtype) -> Tensor:
    query, key = form.query, form.key
    if not torch.is_autocast_enabled(query.device.type):
        # A model may compute its scores in float32 and its weights in fewer bits.
        wide = torch.promote_types(query.dtype, value.dtype)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
    bias = form.bias
    if bias is not None and bias.dtype not in (torch.float32, query.dtype):
        bias = bias.to(torch.promote_types(torch.float32, query.dtype))
    if form.mask is not None:
        bias = form.mask if bias is None else bias.masked_fill(~form.mask, -math.inf)
    heads = len(form.leading) == 2
    if not heads:
        query, key, value = query[:, None], key[:, None], value[:, None]
        bias = None if bias is None else bias[:, None]
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    if form.packed is None:
        out = scaled_dot_product_attention(
            query, key, value, bias, form.dropout_p, scale=form.scale
        )
    else:
        side, *_ = packing.sides(form.packed)
        causal = bool(side.causal)  # what is written out has no causality of its own
        out = packing.attend(
            query, key, value, form.packed, form.dropout_p, causal, form.scale, attn_mask=bias
        )
    out = out if heads else out[:, 0]
    return out if torch.is_autocast_enabled(out.device.type) else out.to(dtype)


def _spend(weights: Any) -> None:
    """Mark weights, and the tensors they were made of, as attended with."""
    for leaf in tree_leaves(weights._call[1:]):
        if isinstance(leaf, Scores):
            _spend(leaf)
    weights._attended = True


def _augmented(plain: Any) -> _Rule:
    """The rule of an operator such as ``*=``, from that of a function out of place."""

    def in_place(before: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = plain(before, *args, **kwargs)
        return out.to(before.dtype)

    def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        scores = args[0]
        if not isinstance(scores, Scores) or any(each() is not None for each in scores._derived):
            return None
        made = _RULES[plain](plain, args, kwargs)
        if not isinstance(made, Scores):
            return None
        # The call must not refer to the tensor that it now describes.
        before = Scores.of(scores._form, scores.shape, scores.dtype, scores._call)
        before._versions = scores._versions
        scores._form, scores._call = made._form, (in_place, (before, *args[1:]), kwargs)
        scores._versions = made._versions
        scores._derived = []
        return scores

    return rule


def _functions(*names: str) -> list[Any]:
    spaces = (torch, Tensor, F)
    return [getattr(space, name) for name in names for space in spaces if hasattr(space, name)]


_DIVISIONS = set(_functions("div", "true_divide", "divide", "__truediv__", "__div__"))
_CASTS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}
_CASTS[Tensor.double] = torch.float64

_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(_functions("mul", "multiply", "__mul__", "__rmul__"), _scale),
    **dict.fromkeys(_DIVISIONS, _scale),
    **dict.fromkeys(_functions("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(_functions("masked_fill"), _masked_fill),
    **dict.fromkeys(_functions("where"), _where),
    **dict.fromkeys(_functions("max", "maximum"), _no_lower),
    **dict.fromkeys(_functions("softmax"), _softmax),
    **dict.fromkeys(_functions("view", "reshape"), _view),
    **dict.fromkeys(_functions("contiguous"), _same),
    **dict.fromkeys((*_CASTS, Tensor.to, Tensor.type, Tensor.type_as), _to),
    **dict.fromkeys(_PRODUCTS, _attend),
    F.dropout: _dropout,
}
_RULES |= {
    augmented: _augmented(plain)
    for name, plain in (("mul", Tensor.mul), ("add", Tensor.add), ("div", Tensor.div))
    for augmented in _functions(name + "_", f"__i{name}__")
}
_RULES[Tensor.__itruediv__] = _augmented(Tensor.div)
_RULES[Tensor.masked_fill_] = _augmented(Tensor.masked_fill)

_IN_PLACE = {
    value
    for name, value in vars(torch._C.TensorBase).items()
    if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
} | {Tensor.__setitem__}

_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "layout",
            "ndim",
            "is_cuda",
            "is_cpu",
            "is_nested",
            "requires_grad",
        )
    ),
    *_functions("size", "dim", "numel", "ndimension", "is_floating_point", "element_size"),
    Tensor.__len__,
}
