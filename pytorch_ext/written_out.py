"""Attention that a model writes out, as two products and a softmax, run as one call.

    scores = query @ key.transpose(-1, -2) / math.sqrt(head_dim) + mask
    weights = F.dropout(scores.softmax(-1), p)
    out = weights @ value

Inside ``with trifuse.attention()`` the first product is deferred: its result is a :class:`Deferred`
tensor, which holds the factors instead of numbers. A step that keeps the form of an attention
returns another deferred tensor. Such steps are a factor, a term, a mask, the softmax, dropout, a
change of dtype, and a split of the batch into batch and heads. The last product is then one call of
:func:`trifuse.scaled_dot_product_attention`.

Every other use of a deferred tensor computes it first, with the functions that the model called. So
code of any form has the same results as before, and only the recognised forms run fused.

The same code serves packed tokens, queries of (1, H, T, E): a :class:`PackedTerm` in place of the
mask makes the last product a call of :func:`trifuse.varlen_attention`.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trifuse import spellings
from trifuse.deferred import Again, Deferred, collect, computing, is_computing
from trifuse.nn import packing
from trifuse.nn.packing import CrossSequences, PackedSequences
from trifuse.ops import _modes
from trifuse.ops._checks import FLOATING
from trifuse.ops.attention import scaled_dot_product_attention
from trifuse.spellings import Operation

Packed = PackedSequences | CrossSequences


class Form(NamedTuple):
    """The parts of an attention, as far as the model's code has run.

    The leading dimensions are (N,) or (B, H), the finest split that the model has used. If the
    tokens are packed, they are (1, H), there is no mask, and the bias has the shape that
    :func:`trifuse.nn.packing.attend` takes. A mask with biases of the keys may be combined with
    fewer key heads than query heads.
    """

    query: Tensor  # (..., Lq, E)
    key: Tensor  # (..., Lk, E)
    scale: float = 1.0
    bias: Tensor | None = None  # floating, broadcastable to (..., Lq, Lk)
    mask: Tensor | None = None  # boolean, likewise; False leaves the pair out
    filled: Tensor | None = None  # boolean, likewise; True: a fill stops the gradient of the score
    tied: Tensor | None = None  # boolean, likewise; True: a maximum halves the gradient
    table: Tensor | None = None  # biases by distance, (H, Lq + Lk - 1), or by an index, (H, n)
    columns: Tensor | None = None  # the index, (Lq, Lk); None: by distance
    by_key: Tensor | None = None  # biases of the keys, the same for all queries, (..., 1, Lk)
    packed: Packed | None = None  # where each sequence of packed tokens begins
    softcap: float | None = None
    normalized: bool = False  # whether the softmax was taken
    dropout_p: float = 0.0
    factors: torch.dtype | None = None  # to which autocast casts queries and keys; None: neither

    @property
    def leading(self) -> torch.Size:
        return self.query.shape[:-2]

    @property
    def adds_something(self) -> bool:
        return any(x is not None for x in (self.bias, self.table, self.by_key))


class _Part(Deferred):
    """A part of an attention."""

    @staticmethod
    def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        call = spellings.read_call(func, args, kwargs)
        rule = None if call is None else _RULES.get(call.op)
        if call is None or rule is None or not _still_deferred((*args, *kwargs.values())):
            return None
        return (_in_place(rule) if call.in_place else rule)(call, (func, args, kwargs))


class Scores(_Part):
    """Scores or weights (..., Lq, Lk) that are not computed yet."""

    _form: Form

    @staticmethod
    def of(form: Form, shape: Sequence[int], dtype: torch.dtype, call: Again) -> Scores:
        """Return the scores that a call would compute."""
        made: Scores = Scores._of(shape, dtype, form.query.device, call)
        made._form = form
        collect(made)
        return made

    def _numbers(self) -> Tensor:
        if self.was_attended and self._form.dropout_p > 0:
            raise RuntimeError(_DROPPED)
        return super()._numbers()


_DROPPED = (
    "these attention weights were dropped out inside the attention, which doesn't store them; call "
    "the model without trifuse.attention() to use them again"
)


class DistanceBias(_Part):
    """Biases of the scores by distance, (B or 1, H, Lq, Lk), as a table instead of a matrix."""

    table: Tensor | None  # (H, Lq + Lk - 1), as ``relative_bias``; None: 0 for all pairs
    mask: Tensor | None  # also added to the scores, without a gradient

    @staticmethod
    def of(table: Tensor, Lq: int, Lk: int, batch: int = 1) -> DistanceBias:
        """Return the biases that a table holds."""
        shape = (batch, table.shape[0], Lq, Lk)
        return DistanceBias._made(table, None, shape, table.dtype, table.device)

    @staticmethod
    def _made(
        table: Tensor | None,
        mask: Tensor | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> DistanceBias:
        call: Again = (_matrix, (table, torch.Size(shape), mask), {})
        if table is None:
            options = {"dtype": dtype, "device": device}
            call = (_zeros, (torch.Size(shape), mask), options)
        made: DistanceBias = DistanceBias._of(shape, dtype, device, call)
        made.table, made.mask = table, mask
        return made

    @staticmethod
    def zero(shape: Sequence[int], like: Tensor) -> DistanceBias:
        """Return a bias of 0 for all pairs, in the dtype of ``like``."""
        return DistanceBias._made(None, None, shape, like.dtype, like.device)

    def with_mask(self, mask: Tensor) -> DistanceBias:
        """Return the sum of the biases and a mask, (B or 1, 1, Lq or 1, Lk)."""
        assert self.mask is None
        assert not mask.requires_grad
        dtype = torch.promote_types(self.dtype, mask.dtype)
        shape = torch.broadcast_shapes(self.shape, mask.shape)
        return DistanceBias._made(self.table, mask, shape, dtype, self.device)

    def _require_gradient(self) -> None:
        table, shape, _ = self._call[1]
        _Gathered.apply(table, lambda table: _matrix(table, shape), [self])

    @property
    def is_usable(self) -> bool:
        """Whether the table still holds the biases: they were not computed, and so not changed."""
        return self._value is None and self._modes.grad == torch.is_grad_enabled()

    def cut(self, Lq: int, Lk: int) -> DistanceBias:
        """Return the biases of the first queries and keys."""
        batch, H, rows, _ = self.shape
        assert self.mask is None
        if self.table is None:
            return DistanceBias.zero((batch, H, Lq, Lk), self)
        first = rows - Lq
        return DistanceBias.of(self.table[:, first : first + Lq + Lk - 1], Lq, Lk, batch)


class IndexedBias(_Part):
    """Biases of the scores, (1 or B, H, Lq, Lk), as a table and an index of all pairs.

    Swin's blocks add the mask of shifted windows to them. Models make them from (H, Lq, Lk), and
    SwinV2 applies a function to each number.
    """

    table: Tensor  # (H, n), as ``relative_bias``
    columns: Tensor  # (Lq, Lk), as ``relative_index``
    mask: Tensor | None  # (1 or B, 1 or H, Lq, Lk), added

    @staticmethod
    def of(
        table: Tensor,
        index: Tensor,
        mask: Tensor | None = None,
        leading: Sequence[int] | None = None,
    ) -> IndexedBias:
        """Return the biases that an index picks from a table.

        Args:
            table: (H, n).
            index: (Lq, Lk), integers in [0, n).
            mask: added to the biases, without a gradient.
            leading: the dimensions before those of the pairs, including the heads, if no mask is
                added. None: (1, H).
        """
        leading = torch.Size((1, table.shape[0]) if leading is None else leading)
        shape, dtype = torch.Size((*leading, *index.shape)), table.dtype
        if mask is not None:
            shape = torch.broadcast_shapes(shape, mask.shape)
            dtype = torch.promote_types(dtype, mask.dtype)
        call: Again = (_picked, (table, index, mask, leading), {})
        made: IndexedBias = IndexedBias._of(shape, dtype, table.device, call)
        made.table, made.columns, made.mask = table, index, mask
        return made

    def _require_gradient(self) -> None:
        own, index, _, leading = self._call[1]
        shape = self.shape
        _Gathered.apply(
            own, lambda table: _picked(table, index, None, leading).expand(shape), [self]
        )

    @property
    def is_usable(self) -> bool:
        """Whether table and mask still make up the biases, never computed or changed since."""
        known = self._value is None and self._call[0] is _picked
        return known and self._modes.grad == torch.is_grad_enabled()

    @staticmethod
    def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        bias = args[0] if args else None
        if func is nn.functional.interpolate and isinstance(bias, IndexedBias):
            return bias if bias.is_usable and _keeps_size(bias, *args[1:], **kwargs) else None
        return _Part._step(func, args, kwargs)


def _keeps_size(
    x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *_: Any, **__: Any
) -> bool:
    """Whether a call of torch's ``interpolate`` returns its input unchanged."""
    same = isinstance(size, (tuple, list)) and tuple(size) == tuple(x.shape[-2:])
    return same and x.dim() == 4 and scale_factor is None and mode in ("nearest", "bilinear")


def _picked(table: Tensor, index: Tensor, mask: Tensor | None, leading: Sequence[int]) -> Tensor:
    biases = table[:, index].view(*leading, *index.shape)
    return biases if mask is None else biases + mask


def _add_to_bias(call: Operation) -> Tensor | None:
    """The sum of biases from a table and a mask, or of two of them with the same index."""
    sides = call.get("input"), call.get("other")
    bias, other = sides if isinstance(sides[0], IndexedBias) else sides[::-1]
    if call.op != "add" or _number(call.get("alpha", 1)) != 1:
        return None
    if not bias.is_usable or bias.dim() != 4 or bias.shape[1] != bias.table.shape[0]:
        return None
    if isinstance(other, IndexedBias):
        return _add_biases(bias, other)
    if bias.mask is not None or not is_plain(other) or other.requires_grad:
        return None
    if other.dim() != 4 or other.device != bias.device:
        return None
    if torch.broadcast_shapes(other.shape, bias.shape)[1:] != bias.shape[1:]:
        return None
    return IndexedBias.of(bias.table, bias.columns, other)


def _add_biases(bias: IndexedBias, other: IndexedBias) -> Tensor | None:
    """The sum of a layer's biases and of those that all layers share, which may include a mask."""
    if not other.is_usable or other.dim() != 4 or other.table.shape != bias.table.shape:
        return None
    if bias.table.device != other.table.device or not _is_same(bias.columns, other.columns):
        return None
    if bias.mask is not None and other.mask is not None:
        return None
    mask = other.mask if bias.mask is None else bias.mask
    return IndexedBias.of(bias.table + other.table, bias.columns, mask)


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two indices are known to be the same without waiting for a device."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return True
    return first.device.type == second.device.type == "cpu" and torch.equal(first, second)


def _change_each(call: Operation) -> Tensor | None:
    """An elementwise function of the biases is the same function of the table's numbers."""
    sides = call.get("input"), call.get("other")
    bias, other = sides if isinstance(sides[0], IndexedBias) else sides[::-1]
    if not isinstance(bias, IndexedBias) or bias.mask is not None or not bias.is_usable:
        return None
    if call.op == "sigmoid":
        table = torch.sigmoid(bias.table)
    elif call.op == "mul" and (factor := _number(other)) is not None:
        table = bias.table * factor
    else:
        return None
    return IndexedBias.of(table, bias.columns, leading=bias.shape[:-2])


class _Gathered(torch.autograd.Function):
    """Uncomputed biases of all pairs, from a table.

    A custom function may get them, such as those of reentrant checkpoints and of FSDP2. It may then
    return their gradient, which is not yet that of the table.
    """

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, numbers: Callable[[Tensor], Tensor], made: list[Tensor]
    ) -> Tensor:
        ctx.table, ctx.numbers = table.shape, numbers
        return made[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            table = grad.new_zeros(ctx.table, requires_grad=True)
            matrix = ctx.numbers(table)
        return torch.autograd.grad(matrix, table, grad, create_graph=again)[0], None, None


def _matrix(table: Tensor, shape: torch.Size, mask: Tensor | None = None) -> Tensor:
    """Return the biases of all pairs, and a mask added to them."""
    _, _, Lq, Lk = shape
    rows, columns = (torch.arange(length, device=table.device) for length in (Lq, Lk))
    matrix = table[:, columns - rows[:, None] + Lq - 1]
    return matrix.expand(shape) if mask is None else matrix + mask


def _zeros(shape: torch.Size, mask: Tensor | None, **options: Any) -> Tensor:
    zeros = torch.zeros(shape, **options)
    return zeros if mask is None else zeros + mask


class PackedTerm(_Part):
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
            bias: that of the pairs of one sequence, (1 or B, 1 or H, longest queries, longest
                keys), as :func:`trifuse.nn.packing.attend` takes it. None: 0.
            dtype: that of the term, and of the bias.
            device: that of the tokens.
        """
        counts = (each.indices.shape[0] for each in packing.sides(packed))
        shape = (1, 1 if bias is None else bias.shape[1], *counts)
        arguments = (packed, bias, dtype, device)
        made: PackedTerm = PackedTerm._of(shape, dtype, device, (packing.dense_term, arguments, {}))
        made.packed, made.bias = packed, bias
        return made


class MaskedKeyBias(_Part):
    """A bias of the keys, and the least number for pairs that are left out, (B, H, Lq, Lk).

    Falcon's model makes this from ALiBi and its mask, for all of its layers.
    """

    by_key: Tensor  # (B, H, 1, Lk)
    mask: Tensor  # (B, 1, Lq, Lk), 0, or the least number for pairs that are left out

    @staticmethod
    def of(by_key: Tensor, mask: Tensor, least: float) -> MaskedKeyBias:
        """Return the bias with the least number where ``mask`` is below -1."""
        shape = torch.broadcast_shapes(by_key.shape, mask.shape)
        call: Again = (_filled, (by_key, mask, least), {})
        made: MaskedKeyBias = MaskedKeyBias._of(shape, by_key.dtype, by_key.device, call)
        made.by_key, made.mask = by_key, torch.clamp(mask, max=0.0)
        return made


def _filled(by_key: Tensor, mask: Tensor, least: float) -> Tensor:
    return torch.masked_fill(by_key, mask < -1, least)


def _still_deferred(args: Iterable[Any]) -> bool:
    """Whether all deferred tensors among the arguments are still uncomputed.

    Inside the forward of a custom function, which records no gradients, they count as computed.
    """
    grad = torch.is_grad_enabled()
    return all(
        arg.is_pending and arg._modes.grad == grad for arg in args if isinstance(arg, Scores)
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
        form = form._replace(factors=_autocast_dtype(query))
        dtype = _autocast_dtype(value) or value.dtype
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


def split(bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Split the term that a model adds to its scores into a plain bias and biases by distance.

    Args:
        bias: the term.
        dtype: of the queries.
    """
    if not isinstance(bias, DistanceBias):
        return bias, None
    if not bias.is_usable:
        return bias.compute(), None
    return bias.mask, _fitting(bias.table, dtype)


def split_mask(mask: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return a layer's mask without biases from a table, and these biases as arguments.

    Args:
        mask: the term that a layer adds to its scores, or any other mask.
        dtype: of the queries.
    """
    if not isinstance(mask, IndexedBias):
        return mask, {}
    if not mask.is_usable:
        return mask.compute(), {}
    tables = {"relative_bias": _fitting(mask.table, dtype), "relative_index": mask.columns}
    return _fitting(mask.mask, dtype), tables


def _fitting(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a bias in a dtype that the operator accepts with the queries' dtype."""
    wide = torch.promote_types(torch.float32, dtype)
    return bias if bias is None or bias.dtype in (wide, dtype) else bias.to(wide)


# The first product --------------------------------------------------------------------------------


def begin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """Defer the product of queries and keys; return None for any other call."""
    if is_computing() or (call := spellings.read_call(func, args, kwargs)) is None:
        return None
    if (factors := _factors(call)) is None:
        return None
    query, transposed, scale, bias = factors
    if not (is_plain(query) and is_plain(transposed) and _fit(query, transposed)):
        return None
    key = transposed.mT
    if key.shape[:-2] != query.shape[:-2]:
        key = key.expand(*query.shape[:-2], -1, -1)
    form = Form(query, key, scale, factors=_autocast_dtype(query))
    shape = (*query.shape[:-1], key.shape[-2])
    made = Scores.of(form, shape, form.factors or query.dtype, (func, args, kwargs))
    if bias is not None:
        with_bias = _with_bias(made, bias)
        if with_bias is None:
            return None
        made._form = with_bias
    return made


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts a factor of a product; None if it doesn't."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def is_plain(x: Any) -> bool:
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

    Keys that were transposed have their features next to each other, which distinguishes them from
    values. After convolutions, the tokens of both are next to each other, which distinguishes them
    from weights and values.
    """
    rows = transposed.shape[-2] == 1 or transposed.stride(-2) == 1
    columns = query.shape[-1] > 1 and query.stride(-2) == transposed.stride(-1) == 1
    return (
        query.dim() == transposed.dim()
        and query.dim() in (3, 4)
        and query.dtype == transposed.dtype
        and query.device == transposed.device
        and query.shape[-1] == transposed.shape[-2] > 0
        and (rows or columns)
        and all(
            theirs in (1, ours)
            for ours, theirs in zip(query.shape[:-2], transposed.shape[:-2], strict=True)
        )
    )


def _factors(call: Operation) -> tuple[Any, Any, float, Tensor | None] | None:
    """The queries, the transposed keys, the scale and the bias of a product."""
    if call.op == "matmul":
        return call.get("input"), call.get("other"), 1.0, None
    if call.op == "baddbmm":
        alpha, beta = (_number(call.get(name, 1)) for name in ("alpha", "beta"))
        bias = call.get("input")
        if alpha is None or beta is None or not is_plain(bias):
            return None
        if beta == 0:  # torch doesn't read the input then, which may hold anything
            return call.get("batch1"), call.get("batch2"), alpha, None
        return call.get("batch1"), call.get("batch2"), alpha, bias if beta == 1 else bias * beta
    product = spellings.inner(call) if call.op == "einsum" else None
    if product is None or not (is_plain(product.query) and is_plain(product.key)):
        return None
    query, key = (
        factor if order is None else factor.permute(order)
        for factor, order in zip(product[:2], product.orders, strict=True)
    )
    return query, key.mT, 1.0, None


# Steps between the products -----------------------------------------------------------------------

# A rule returns the result of a call that has scores among its arguments; None if it must run.
_Rule = Callable[[Operation, Again], "Tensor | None"]


def _in_place(rule: _Rule) -> _Rule:
    """The rule of an operator such as ``*=``, from the rule of its out-of-place form."""

    def changed(call: Operation, again: Again) -> Tensor | None:
        func, args, kwargs = again
        scores = args[0] if args else None
        if not isinstance(scores, _Part) or _is_seen_elsewhere(scores):
            return None
        if isinstance(scores, IndexedBias):
            return _changed_bias(scores, rule(call._replace(in_place=False), again))
        if not isinstance(scores, Scores):
            return None
        made = rule(call, again)
        if not isinstance(made, Scores):
            return None
        # The call must not refer to the tensor that it now describes.
        before = _same_numbers(scores)
        for parent in scores._parents:
            parent._derived = [each for each in parent._derived if each() is not scores]
        scores._form, scores._call = made._form, (_on_a_copy, (func, before, *args[1:]), kwargs)
        scores._versions, scores._shares = made._versions, None
        scores._parents, scores._derived = [before], []
        return scores

    return changed


def _is_seen_elsewhere(part: Deferred) -> bool:
    """Whether anything was derived from a tensor, or shares its numbers."""
    own: set[int] = set()
    for node in part.and_wholes():
        own.add(id(node))
        others = [each for reference in node._derived if (each := reference()) is not None]
        if any(id(each) not in own for each in others):
            return True
    return False


def _same_numbers(scores: Scores) -> Scores:
    """Return scores that stay as these are now, when these are changed."""
    # Nothing outside of this module gets hold of it, so it isn't collected.
    same: Scores = Scores._of(scores.shape, scores.dtype, scores.device, scores._call)
    same._form = scores._form
    same._versions, same._shares, same._modes = scores._versions, scores._shares, scores._modes
    return same


def _viewed(scores: Scores) -> Scores:
    """Return what scores and their views share.

    Nothing else refers to it. So once the scores themselves are gone, a view may be changed in
    place without being computed.
    """
    if scores._shares is None or scores._call[0] is not _itself:
        whole = _same_numbers(scores)
        scores._call, scores._versions = (_itself, (whole,), {}), []
        scores._parents, scores._shares = [whole], whole
        whole._derived.append(weakref.ref(scores))
    return cast(Scores, scores._shares)


def _changed_bias(bias: IndexedBias, made: Tensor | None) -> Tensor | None:
    """Return the changed bias. Code that still holds the bias itself gets the same numbers."""
    if not isinstance(made, IndexedBias) or (made.shape, made.dtype) != (bias.shape, bias.dtype):
        return None
    bias._call, bias._versions, bias._parents = (_itself, (made,), {}), [], [made]
    return made


def _itself(x: Tensor) -> Tensor:
    return x


def _on_a_copy(func: Callable[..., Any], before: Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(before.clone(), *args, **kwargs)


def _next(scores: Scores, again: Again, form: Form, dtype: torch.dtype | None = None) -> Scores:
    return Scores.of(form, scores.shape, dtype or scores.dtype, again)


def _number(x: Any) -> float | None:
    """The value of a number, or of a tensor that holds one and needs no gradient."""
    if isinstance(x, Deferred):
        return None
    if isinstance(x, Tensor):
        plain = x.dim() == 0 and x.device.type == "cpu" and not x.requires_grad
        return x.item() if plain and not _modes.transform_active() else None
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _sides(call: Operation) -> tuple[Scores, Any] | None:
    """Scores and the other operand; None if both are scores."""
    sides = call.get("input"), call.get("other")
    scores, other = sides if isinstance(sides[0], Scores) else sides[::-1]
    if isinstance(other, Scores) or not isinstance(scores, Scores):
        return None
    return scores, other


def _sigmoid(call: Operation, again: Again) -> Tensor | None:
    return _change_each(call)


def _scale(call: Operation, again: Again) -> Tensor | None:
    sides = _sides(call)
    if sides is None and any(isinstance(call.get(x), IndexedBias) for x in ("input", "other")):
        return _change_each(call)
    if sides is None or call.get("rounding_mode") is not None:
        return None
    scores, form = sides[0], sides[0]._form
    if call.op == "div" and scores is not call.get("input"):
        return None
    if (factor := _number(sides[1])) is None:
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
    return _next(scores, again, scaled._replace(bias=bias, table=table, by_key=by_key))


def _scale_rows(scores: Scores, factor: Any, call: Operation, again: Again) -> Tensor | None:
    """A factor for each head or query. The queries can be multiplied by it instead."""
    form = scores._form
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
    aligned = _align(scores, factor) if factor.device == scores.device else None
    if aligned is None or aligned.shape[-1] != 1:
        return None
    query = form.query * aligned if call.op == "mul" else form.query / aligned
    return _next(scores, again, form._replace(query=query), dtype)


def _cap(call: Operation, again: Again) -> Tensor | None:
    scores = call.get("input")
    if not isinstance(scores, Scores):
        return None
    form = scores._form
    if form.normalized or form.adds_something:
        return None
    if not form.mask is form.packed is form.softcap is None:
        return None
    return _next(scores, again, form._replace(softcap=1.0))


def _add(call: Operation, again: Again) -> Tensor | None:
    both = call.get("input"), call.get("other")
    scores = next((side for side in both if isinstance(side, Scores)), None)
    if scores is None:
        return _add_to_bias(call) if any(isinstance(side, IndexedBias) for side in both) else None
    if isinstance(both[0], Scores) and isinstance(both[1], Scores) and call.op == "add":
        return _join(both[0], both[1], again) if _number(call.get("alpha", 1)) == 1 else None
    sides = _sides(call)
    if sides is None or _number(call.get("alpha", 1)) != 1:
        return None
    scores, bias = sides
    if scores._form.normalized:
        return None
    if call.op == "sub":
        if scores is not call.get("input") or isinstance(bias, Deferred):
            return None
        bias = -bias
    if type(bias) in (int, float):
        bias = torch.tensor(bias, dtype=scores.dtype, device=scores.device)
    if isinstance(bias, PackedTerm):
        form = _with_term(scores, bias)
    elif isinstance(bias, MaskedKeyBias) and bias._value is None:
        form = _with_bias(scores, bias.by_key)
        if form is not None:
            form = _with_bias(scores, bias.mask, form)
    elif isinstance(bias, DistanceBias):
        form = _with_table(scores, bias)
    elif isinstance(bias, IndexedBias):
        form = _with_indexed(scores, bias)
    elif is_plain(bias) and bias.device == scores.device:
        form = _with_bias(scores, bias)
    else:
        return None
    dtype = torch.promote_types(scores.dtype, bias.dtype) if bias.dim() else scores.dtype
    return None if form is None else _next(scores, again, form, dtype)


def _join(first: Scores, second: Scores, again: Again) -> Tensor | None:
    """Write the sum of two products as one product of queries and keys with the features of both.

    LiLT adds the scores of its text and those of the layout.
    """
    forms = first._form, second._form
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
    return _next(first, again, Form(query, torch.cat([ours.key, theirs.key], -1)))


def _with_bias(scores: Scores, bias: Tensor, form: Form | None = None) -> Form | None:
    form = scores._form if form is None else form
    aligned = _align(scores, bias)
    if aligned is None:
        return None
    if aligned.shape[-2] == 1:
        return form._replace(by_key=_sum(form.by_key, aligned))
    return form._replace(bias=_sum(form.bias, aligned))


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _with_table(scores: Scores, bias: DistanceBias) -> Form | None:
    form, (B, H, *pairs) = scores._form, bias.shape
    if not bias.is_usable or form.packed is not None or form.leading != scores.shape[:-2]:
        return None
    if len(form.leading) != 2 or form.leading[1] != H or B not in (1, form.leading[0]):
        return None
    if form.table is not None or scores.shape[2:] != torch.Size(pairs):
        return None
    form = form._replace(table=bias.table)
    return form if bias.mask is None else _with_bias(scores, bias.mask, form)


def _with_indexed(scores: Scores, bias: IndexedBias) -> Form | None:
    form, shape = scores._form, bias.shape
    if not bias.is_usable or form.packed is not None or form.leading != scores.shape[:-2]:
        return None
    if len(form.leading) != 2 or form.leading[1] != bias.table.shape[0]:
        return None
    if shape[-3] != form.leading[1] or bias.columns.shape != scores.shape[2:]:
        return None
    if bias.dim() > 4 or shape[:-3] not in ((), (1,), form.leading[:1]):
        return None
    table = bias.table
    if form.table is not None:
        if form.columns is None or not _is_same(form.columns, bias.columns):
            return None
        table = form.table + table
    form = form._replace(table=table, columns=bias.columns)
    return form if bias.mask is None else _with_bias(scores, bias.mask, form)


def _with_term(scores: Scores, term: PackedTerm) -> Form | None:
    form = scores._form
    if term._value is not None:  # which may have been changed in place
        return None
    if scores.shape[:2] != form.leading or scores.shape[2:] != term.shape[2:]:
        return None
    if form.packed is None:
        if form.adds_something or form.mask is not None:
            return None
    elif form.packed is not term.packed:
        return None
    bias, table = split(term.bias, form.query.dtype)
    if table is not None and form.table is not None:
        return None
    return form._replace(
        packed=term.packed,
        bias=_sum(form.bias, bias),
        table=form.table if table is None else table,
    )


def _align(scores: Scores, x: Tensor) -> Tensor | None:
    """A tensor that broadcasts to the scores, viewed with the form's leading dimensions."""
    leading, shape = scores._form.leading, scores.shape
    if scores._form.packed is not None:
        return None
    if x.dim() > len(shape) or torch.broadcast_shapes(x.shape, shape) != shape:
        return None
    x = x[(None,) * (len(shape) - x.dim())]
    if len(leading) == len(shape) - 2:
        return x
    if len(shape) == 5:  # scores (images, windows, H, Lq, Lk): the mask has a row for each window
        if x.shape[:2] == (1, 1):
            return x[0]
        return x.expand(*shape[:2], -1, -1, -1).flatten(0, 1)
    return _split(x, leading) if len(leading) == 2 else None


def _split(x: Tensor, leading: Sequence[int]) -> Tensor:
    """(N or 1, ...) as (B or 1, H or 1, ...), N = B · H."""
    return x[None] if x.shape[0] == 1 else x.unflatten(0, tuple(leading))


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
    form, number = scores._form, _number(value)
    if number is None or form.normalized or (aligned := _align(scores, left_out)) is None:
        return None
    if number == -math.inf:
        takes_part = ~aligned
        mask = takes_part if form.mask is None else form.mask & takes_part
        return _next(scores, again, form._replace(mask=mask))
    if not spellings.is_low(number, scores.dtype):
        return None
    by_key = form.by_key
    # The fill replaces biases that would get a gradient or, added to it, make it -inf.
    if by_key is not None and (not _is_readable(by_key) or (by_key <= spellings.LOW).any()):
        form = form._replace(bias=_sum(form.bias, by_key), by_key=None)
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
    return _next(scores, again, form)


def _with_filled(form: Form, filled: Tensor) -> Form:
    """A form with more scores that a fill keeps from getting a gradient."""
    return form._replace(filled=filled if form.filled is None else form.filled | filled)


def _is_boolean(x: Any) -> bool:
    return type(x) is Tensor and x.dtype == torch.bool


def _no_lower(call: Operation, again: Again) -> Tensor | None:
    """``torch.max(scores, lowest)`` changes only scores that a bias has made lower still."""
    sides = _sides(call)
    if sides is None or not isinstance(sides[1], Tensor):
        return None
    scores, number = sides[0], _number(sides[1])
    form = scores._form
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
    return _next(scores, again, form._replace(bias=bias, by_key=by_key))


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
    if added.device.type == "cpu" and not _modes.transform_active():
        both = stopped.any(-1) & tied.any(-1) & (stopped | tied).all(-1)
        if both.any():
            return None  # the pairs of a row of nothing else would need factors of their own
    return _with_filled(form, lower)._replace(tied=tied)


def _softmax(call: Operation, again: Again) -> Tensor | None:
    scores, dtype = call.get("input"), call.get("dtype")
    if not isinstance(scores, Scores) or scores._form.normalized:
        return None
    if call.get("dim") not in (-1, scores.dim() - 1):
        return None
    if dtype is None and torch.is_autocast_enabled(scores.device.type):
        dtype = _empty(scores).softmax(-1).dtype  # float32 on a GPU, that of the scores on a CPU
    return _next(scores, again, scores._form._replace(normalized=True), dtype)


def _dropout(call: Operation, again: Again) -> Tensor | None:
    weights, p = call.get("input"), call.get("p", 0.5)
    if not isinstance(weights, Scores):
        return None
    form = weights._form
    if not call.get("training", call.get("train", True)) or p == 0:
        return weights  # as torch returns its argument
    if not form.normalized or form.dropout_p > 0 or not 0 < p < 1:
        return None
    return _next(weights, again, form._replace(dropout_p=p))


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
    return _next(scores, again, scores._form, result.dtype)


def _empty(x: Tensor) -> Tensor:
    return torch.empty((0,) * x.dim(), dtype=x.dtype, device=x.device)


def _expand_as(call: Operation, again: Again) -> Tensor | None:
    """A mask expanded to the shape of the scores, which is known."""
    mask, scores = call.get("input"), call.get("other")
    if isinstance(mask, Deferred) or not isinstance(scores, Scores):
        return None
    expanded: Tensor = mask.expand(scores.shape)
    return expanded


def _view(call: Operation, again: Again) -> Tensor | None:
    """Batch and heads joined in one dimension or split; or the batch as images and windows."""
    func, (scores, *rest), kwargs = again
    if isinstance(scores, IndexedBias):
        return _view_of_bias(scores, again)
    if not isinstance(scores, Scores):
        return None
    result = func(torch.empty(scores.shape, dtype=scores.dtype, device="meta"), *rest, **kwargs)
    shape, form = result.shape, scores._form
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
            bias=None if form.bias is None else _split(form.bias, leading),
            by_key=None if form.by_key is None else _split(form.by_key, leading),
            mask=None if form.mask is None else _split(form.mask, leading),
            filled=None if form.filled is None else _split(form.filled, leading),
            tied=None if form.tied is None else _split(form.tied, leading),
        )
    elif len(shape) == 4 and shape[:-2] != form.leading:
        return None
    whole = _viewed(scores)
    view = Scores.of(form, shape, scores.dtype, (func, (whole, *rest), kwargs))
    view._shares = whole
    return view


def _view_of_bias(bias: IndexedBias, again: Again) -> Tensor | None:
    """More, or fewer, dimensions before those of the pairs."""
    func, (_, *rest), kwargs = again
    result = func(torch.empty(bias.shape, dtype=bias.dtype, device="meta"), *rest, **kwargs)
    if result.dtype != bias.dtype or result.shape[-2:] != bias.columns.shape:
        return None
    if not bias.is_usable or bias.mask is not None:
        return None
    return IndexedBias.of(bias.table, bias.columns, leading=result.shape[:-2])


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
    if not isinstance(weights, Scores) or not weights._form.normalized or not is_plain(value):
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
    for part in _chain(weights):
        if part._form.dropout_p > 0 and part.was_attended:  # another call would drop others
            raise RuntimeError(_DROPPED)
        part.check_unchanged()
    if autocast:
        dtype = _autocast_dtype(value) or value.dtype
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


def _operate(form: Form, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bias, table, scale = form.bias, form.table, form.scale
    if form.by_key is not None:
        by_distance = None if table is not None else _by_distance(form.by_key, form)
        if by_distance is not None:
            table = by_distance
        elif _fits_a_feature(form.by_key, form):
            key, value = (_of_each_head(x, query.shape[1]) for x in (key, value))
            query, key, scale = _with_feature(query, key, form.by_key, scale)
        else:
            bias = _sum(bias, form.by_key)
    bias = _fitting(bias, query.dtype)
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
        "relative_bias": _fitting(table, query.dtype),
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
    if half.device.type == "cpu" and not _modes.transform_active() and not half.any():
        return query
    return torch.where(half, query * 0.5, query).masked_fill(rows, 0.0)


def _by_distance(by_key: Tensor, form: Form) -> Tensor | None:
    """Return biases of keys that grow evenly, as ALiBi's, as biases by distance; or None.

    The softmax is the same with m · (j - i) as with m · j + c. So they need not be combined with
    the mask of all pairs into a matrix. Keys that no query attends to may have any bias.

    Args:
        by_key: (B or 1, H, 1, Lk).
        form: that of the attention; it decides which keys are attended to.

    Returns:
        (B or 1, H, Lq + Lk - 1). None if there is nothing to gain, if the biases have gradients or
        don't grow evenly, or if reading them would wait for a device.
    """
    bias, Lq, Lk = form.bias, form.query.shape[-2], form.key.shape[-2]
    masks = [x for x in (bias, form.mask) if x is not None and x.shape[-2] > 1]
    if not masks or len(form.leading) != 2 or by_key.dim() != 4 or by_key.shape[1] == 1:
        return None
    if not _is_readable(by_key) or Lk <= 1 or by_key.shape[-1] != Lk:
        return None
    seen = torch.ones(1, 1, Lk, dtype=torch.bool)
    for mask in masks:
        takes_part = mask if mask.dtype == torch.bool else mask.detach() > spellings.LOW
        seen = seen & takes_part.expand(*takes_part.shape[:-1], Lk).any(-2)
    batch = torch.broadcast_shapes(seen.shape[:1], by_key.shape[:1])
    seen = seen.any(1).expand(*batch, Lk)  # of any head
    values, keys = by_key.detach()[:, :, 0].double(), torch.arange(Lk)
    first = keys.masked_fill(~seen, Lk - 1).amin(-1)[:, None, None]
    last = keys.masked_fill(~seen, 0).amax(-1)[:, None, None]
    values = values.expand(seen.shape[0], -1, -1)
    ends = [values.gather(-1, end.expand(-1, values.shape[1], 1)) for end in (first, last)]
    slopes = (ends[1] - ends[0]) / (last - first).clamp(min=1)
    off = (ends[0] + slopes * (keys - first) - values).masked_fill(~seen[:, None], 0).abs()
    inside = values.where(seen[:, None], ends[0])
    spread = inside.amax(-1, keepdim=True) - inside.amin(-1, keepdim=True)
    if not (off <= 2 * torch.finfo(by_key.dtype).eps * spread).all():
        return None
    distances = torch.arange(Lq + Lk - 1) - (Lq - 1)
    return (slopes * distances).to(torch.promote_types(by_key.dtype, torch.float32))


def _fits_a_feature(by_key: Tensor, form: Form) -> bool:
    """Whether biases of keys can become a feature of the keys, and would otherwise be a matrix."""
    query, rows = form.query, [x for x in (form.bias, form.mask) if x is not None]
    if len(form.leading) != 2 or by_key.dim() != 4 or by_key.shape[1] == 1:
        return False
    Lk = form.key.shape[-2]
    if all(x.shape[-2] == 1 for x in rows) or Lk == 0 or by_key.shape[-1] != Lk:
        return False
    if form.softcap is not None or form.packed is not None:
        return False
    if query.device.type != "cpu" and _widens_tiles(query.shape[-1]):
        return False  # the features beside the one would cost more than a matrix
    # 16 bits hold the biases as they are, beside the reciprocal of the scale.
    exact = _is_power_of_two(form.scale) and by_key.dtype == query.dtype
    return exact or query.dtype in (torch.float32, torch.float64)


def _widens_tiles(E: int) -> bool:
    """Whether a GPU's tiles, whose width is a power of 2, would be wider with 8 more features."""
    return (E - 1).bit_length() != (E + 7).bit_length()


def _is_power_of_two(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


def _with_feature(
    query: Tensor, key: Tensor, by_key: Tensor, scale: float
) -> tuple[Tensor, Tensor, float]:
    """Return queries, keys and a scale whose scores have the biases of the keys added to them.

    The new feature comes last, so its product, the largest, is added once, to the sum of the
    others. Kernels read rows in groups of 8 numbers, so the other features added with it are 0.
    """
    if not _is_power_of_two(scale):  # 1 / scale would be rounded, and so would each bias
        query, scale = query * scale, 1.0
    ones = query.new_zeros(8)
    ones[0] = 1 / scale
    if key.dtype in (torch.float32, torch.float64):
        by_key = _nearer_to_zero(by_key, key.dtype)
    biases = nn.functional.pad(by_key.mT.to(key.dtype), (0, 7)).expand(*key.shape[:-1], 8)
    return (
        torch.cat([query, ones.expand(*query.shape[:-1], 8)], -1),
        torch.cat([key, biases], -1),
        scale,
    )


def _of_each_head(x: Tensor, heads: int) -> Tensor:
    """Return keys or values with one head for each query head."""
    if x.shape[1] == 1:
        return x.expand(-1, heads, -1, -1)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _nearer_to_zero(by_key: Tensor, dtype: torch.dtype) -> Tensor:
    """Subtract from each row its bias nearest to 0, if all biases of the row have one sign.

    The softmax stays the same, no bias grows in magnitude, and scores lose fewer bits to the
    biases.
    """
    by_key = by_key.to(torch.promote_types(by_key.dtype, dtype))
    read = by_key.detach()
    least = read.amin(-1, keepdim=True).clamp(min=0)
    most = read.amax(-1, keepdim=True).clamp(spellings.LOW, 0)  # below LOW, biases leave keys out
    return by_key - (least + most)


def _is_readable(by_key: Tensor) -> bool:
    """Whether code may read the numbers: no gradient, no transform, no waiting for a device."""
    cpu = by_key.device.type == "cpu"
    return cpu and not by_key.requires_grad and not _modes.transform_active()


def _chain(weights: Scores) -> Iterator[Scores]:
    """Yield weights, and the scores and weights that they were made of."""
    found, seen = [weights], {id(weights)}
    for part in found:
        yield part
        for parent in part._parents:
            if isinstance(parent, Scores) and id(parent) not in seen:
                seen.add(id(parent))
                found.append(parent)


_RULES: dict[str, _Rule] = {
    "sigmoid": _sigmoid,
    "mul": _scale,
    "div": _scale,
    "tanh": _cap,
    "add": _add,
    "sub": _add,
    "masked_fill": _fill,
    "where": _fill,
    "max": _no_lower,
    "softmax": _softmax,
    "dropout": _dropout,
    "expand_as": _expand_as,
    "view": _view,
    "cast": _cast,
    "matmul": _attend,
    "einsum": _attend,
}
