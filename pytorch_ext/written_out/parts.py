"""These classes hold the form of an attention so far, in place of its scores."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trifuse import spellings
from trifuse.deferred import Again, Deferred, collect
from trifuse.nn.packing import CrossSequences, PackedSequences
from trifuse.ops import _modes
from trifuse.ops._checks import FLOATING
from trifuse.spellings import Operation

Packed = PackedSequences | CrossSequences

# A rule returns the result of a call that has parts among its arguments; None if it must run.
Rule = Callable[[Operation, Again], "Tensor | None"]

_RULES: dict[str, Rule] = {}  # by the operation's name in ``spellings``


def rule(*operations: str) -> Callable[[Rule], Rule]:
    """Return a decorator that makes a function the rule of operations."""

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(operations, function))
        return function

    return register


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


class Part(Deferred):
    """A part of an attention: its scores, or something that is added to them."""

    @staticmethod
    def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        call = spellings.read_call(func, args, kwargs)
        known = None if call is None else _RULES.get(call.op)
        if call is None or known is None or not _still_deferred((*args, *kwargs.values())):
            return None
        again = func, args, kwargs
        if not call.in_place:
            return known(call, again)
        changed = args[0] if args else None
        if not isinstance(changed, Part) or changed._is_seen_elsewhere():
            return None
        return changed._become(known(call._replace(in_place=False), again), again)

    def _is_seen_elsewhere(self) -> bool:
        """Whether anything was derived from this tensor, or shares its numbers."""
        own: set[int] = set()
        for node in self.and_wholes():
            own.add(id(node))
            others = [each for reference in node._derived if (each := reference()) is not None]
            if any(id(each) not in own for each in others):
                return True
        return False

    def _become(self, made: Tensor | None, again: Again) -> Tensor | None:
        """Return this tensor after a change in place; None if the function must run.

        Args:
            made: what the out-of-place form of the call returns.
            again: the call.
        """
        return None

    def added_to(self, scores: Scores) -> Form | None:
        """Return the form of the scores with this term added; None if it doesn't fit."""
        return None


def _still_deferred(args: Iterable[Any]) -> bool:
    """Whether all deferred tensors among the arguments are still uncomputed.

    Inside the forward of a custom function, which records no gradients, they count as computed.
    """
    grad = torch.is_grad_enabled()
    return all(
        arg.is_pending and arg._modes.grad == grad for arg in args if isinstance(arg, Scores)
    )


class Scores(Part):
    """Scores or weights (..., Lq, Lk) that are not computed yet."""

    form: Form

    @staticmethod
    def of(form: Form, shape: Sequence[int], dtype: torch.dtype, call: Again) -> Scores:
        """Return the scores that a call would compute."""
        made: Scores = Scores._of(shape, dtype, form.query.device, call)
        made.form = form
        collect(made)
        return made

    def _numbers(self) -> Tensor:
        if self.was_attended and self.form.dropout_p > 0:
            raise RuntimeError(DROPPED)
        return super()._numbers()

    def after(self, again: Again, form: Form, dtype: torch.dtype | None = None) -> Scores:
        """Return the scores of the same shape that a call makes of these."""
        return Scores.of(form, self.shape, dtype or self.dtype, again)

    def align(self, x: Tensor) -> Tensor | None:
        """Return a tensor that broadcasts to the scores with the form's leading dimensions.

        None if it doesn't broadcast, or if tokens are packed.
        """
        leading, shape = self.form.leading, self.shape
        if self.form.packed is not None:
            return None
        if x.dim() > len(shape) or torch.broadcast_shapes(x.shape, shape) != shape:
            return None
        x = x[(None,) * (len(shape) - x.dim())]
        if len(leading) == len(shape) - 2:
            return x
        if len(shape) == 5:  # (images, windows, H, Lq, Lk): the mask has a row for each window
            if x.shape[:2] == (1, 1):
                return x[0]
            return x.expand(*shape[:2], -1, -1, -1).flatten(0, 1)
        return split_leading(x, leading) if len(leading) == 2 else None

    def with_bias(self, bias: Tensor, form: Form | None = None) -> Form | None:
        """Return the form, or another form of these scores, with a plain bias added."""
        form = self.form if form is None else form
        aligned = self.align(bias)
        if aligned is None:
            return None
        if aligned.shape[-2] == 1:
            return form._replace(by_key=add(form.by_key, aligned))
        return form._replace(bias=add(form.bias, aligned))

    def shared(self) -> Scores:
        """Return what these scores and their views share.

        Nothing else refers to it. So once the scores themselves are gone, a view may be changed in
        place without being computed.
        """
        if self._shares is None or self._call[0] is not itself:
            whole = self._copy()
            self._call, self._versions = (itself, (whole,), {}), []
            self._parents, self._shares = [whole], whole
            whole._derived.append(weakref.ref(self))
        return cast(Scores, self._shares)

    def _copy(self) -> Scores:
        """Return scores that stay as these are now, when these are changed."""
        # Nothing outside of this module gets hold of it, so it isn't collected.
        same: Scores = Scores._of(self.shape, self.dtype, self.device, self._call)
        same.form = self.form
        same._versions, same._shares, same._modes = self._versions, self._shares, self._modes
        return same

    def _become(self, made: Tensor | None, again: Again) -> Tensor | None:
        if not isinstance(made, Scores):
            return None
        # The call must not refer to the tensor that it now describes.
        before = self._copy()
        for parent in self._parents:
            parent._derived = [each for each in parent._derived if each() is not self]
        func, args, kwargs = again
        self.form, self._call = made.form, (_on_a_copy, (func, before, *args[1:]), kwargs)
        self._versions, self._shares = made._versions, None
        self._parents, self._derived = [before], []
        return self


DROPPED = (
    "these attention weights were dropped out inside the attention, which doesn't store them; call "
    "the model without trifuse.attention() to use them again"
)


def itself(x: Tensor) -> Tensor:
    return x


def _on_a_copy(func: Callable[..., Any], before: Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(before.clone(), *args, **kwargs)


def split_leading(x: Tensor, leading: Sequence[int]) -> Tensor:
    """Return (N or 1, ...) as (B or 1, H or 1, ...), N = B · H."""
    return x[None] if x.shape[0] == 1 else x.unflatten(0, tuple(leading))


def add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def as_number(x: Any) -> float | None:
    """The value of a number, or of a tensor that holds one and needs no gradient."""
    if isinstance(x, Deferred):
        return None
    if isinstance(x, Tensor):
        plain = x.dim() == 0 and not x.requires_grad
        return x.item() if plain and _modes.is_readable(x) else None
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def is_plain(x: Any) -> bool:
    """Whether x is an ordinary tensor that the operator takes."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.layout == torch.strided
        and not x.is_nested
        and x.dtype in FLOATING
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts a factor of a product; None if it doesn't."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def fitting(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a bias in a dtype that the operator accepts with the queries' dtype."""
    wide = torch.promote_types(torch.float32, dtype)
    return bias if bias is None or bias.dtype in (wide, dtype) else bias.to(wide)
