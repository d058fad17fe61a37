"""Registers operators with torch: one declaration provides everything that torch needs.

An operator is two ops, ``<name>_forward`` and ``<name>_backward``, with one overload per backend:
``torch.ops.trifuse.attention_forward.cpp``. The ops are opaque, because a backward traced piecewise
over saved outputs gives silently wrong second derivatives. There is one overload per backend, so
that a profile shows which one ran, and so that a backward runs on its forward's backend.

An :class:`Operator` declares its tensors, options and results as named tuples. From these follow,
for every overload:

- the schemas, and fakes that return the true shapes, dtypes and strides;
- derivatives, registered for the op itself, so that whatever traces the op can differentiate it
  (torch.compile, torch.export, pipelines);
- batching rules for ``torch.vmap`` and for the older ``autograd.grad(is_grads_batched=True)``;
- the decomposition into the formula, for ONNX and other lowerings of graphs. The formula also
  serves forward-mode AD;
- floating-point operations for ``torch.utils.flop_counter``;
- a fallback for devices that the overload's backend does not serve, as when an exported program was
  moved to a GPU: the backend chosen there serves the call.

A single op with a kernel per dispatch key would not do: several backends serve one device, so the
op would take the backend's name as an argument, and its C++ kernel for CPUs would have to call the
other backends' Python. Registering the rules for several overloads is a loop.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trifuse import backends
from trifuse._imports import when_imported
from trifuse.backends import ORDER, Call
from trifuse.ops._checks import fail

if "library" in globals():
    raise ImportError("trifuse can't be reloaded: torch keeps its ops; start Python anew")
library = torch.library.Library("trifuse", "DEF")


# The last argument of a forward op with ``Operator.saves``: how much it keeps for its backward.
SAVE_NOTHING, SAVE_STATES, SAVE_ALL = range(3)

# In ``Operator.axes``: all dimensions before the last are batch dimensions.
LEADING = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """The declaration of an operator.

    The forward op takes ``tensors``, ``options`` and, with ``saves``, what to save; it returns
    ``results``. The backward op takes the gradients of the results that a caller gets,
    ``tensors``, the ``saved`` results, ``options``, and a flag for each tensor that can have a
    gradient: whether that gradient is wanted. It returns the gradients; one that is not wanted may
    have shape (0,).

    Attributes:
        name: the operator's name, as in :class:`trifuse.backends.Call`.
        tensors: a named tuple of the forward op's tensors; at most one field is a list.
        options: a named tuple of numbers and flags.
        results: a named tuple of the forward op's results.
        returned: number of results that a caller gets; they come first. In the backward op the
            first always has a gradient; the gradients of the others may be None.
        differentiable: number of tensors that can have a gradient; they come first.
        saved: names of the results that the backward op reads.
        axes: the batch dimension of each tensor and result that has one, by name. vmap folds N
            samples into one call with a batch N times as large. It calls the op once per sample if
            a tensor without a batch dimension differs between samples or needs a gradient.
        unfoldable: names of tensors that prevent the folding unless they are None.
        saves: whether the forward op takes, as its last argument, what to save.
        fake: the forward op's results without their values: (tensors, options, save) -> results.
        grad_fake: the gradients without their values: (:class:`BackwardCall`) -> a flat sequence.
        formula: the forward op in plain torch: (tensors, options) -> results.
        grad_formula: the backward op in plain torch, differentiable. It takes the same argument as
            ``grad_fake``, recomputes saved results that are None, and may return None for a
            gradient that is not wanted.
        flops: floating-point operations of the forward op's products: (tensors, options) -> int.
        grad_flops: those of the backward op, with the same arguments. Default: twice ``flops``, as
            each factor of a product has a gradient.
        fakes: by backend, replacements of ``fake`` for backends that save something else.
        keep: replaces the ``tensors`` that the backward gets: (tensors, results, options) ->
            tensors.
        shares_gradient: whether the first two tensors have the same gradient:
            (tensors, options) -> bool.
        check: raises for wrong values in tensors: (tensors, options) -> None. The Triton and
            eager kernels run it first.
        head_dim: returns the head_dim of a call's tensors, for the choice of a backend.
        backends: the backends that have the ops.
    """

    name: str
    tensors: type[Any]
    options: type[Any]
    results: type[Any]
    returned: int
    differentiable: int
    saved: tuple[str, ...]
    axes: Mapping[str, int]
    fake: Callable[[Any, Any, int], Sequence[Tensor]]
    grad_fake: Callable[[BackwardCall], Sequence[Tensor]]
    formula: Callable[[Any, Any], Sequence[Tensor]]
    grad_formula: Callable[[BackwardCall], Sequence[Tensor | None]]
    flops: Callable[[Any, Any], int] | None = None
    grad_flops: Callable[[Any, Any], int] | None = None
    unfoldable: tuple[str, ...] = ("seed",)
    saves: bool = False
    fakes: Mapping[str, Callable[[Any, Any, int], Sequence[Tensor]]] = field(default_factory=dict)
    keep: Callable[..., Any] | None = None
    shares_gradient: Callable[..., bool] | None = None
    check: Callable[[Any, Any], None] = lambda tensors, options: None
    head_dim: Callable[[Any], int] = lambda tensors: 0
    backends: Sequence[str] = ORDER

    def __post_init__(self) -> None:
        forward = Op(
            f"{self.name}_forward",
            self._forward_signature(),
            fake=self._flat_fake(self.fake),
            fakes={backend: self._flat_fake(fake) for backend, fake in self.fakes.items()},
            vmap=self._forward_vmap,
            derivative=self._forward_derivative,
            decomposition=self._forward_decomposition,
            flops=None if self.flops is None else self._forward_flops,
            describe=self._describe,
            backends=self.backends,
        )
        backward = Op(
            f"{self.name}_backward",
            self._backward_signature(),
            fake=self._backward_fake,
            vmap=self._backward_vmap,
            derivative=self._backward_derivative,
            decomposition=self._backward_decomposition,
            flops=None if self.flops is None else self._backward_flops,
            describe=lambda *args: self._describe(*args[self.returned :]),
            backends=self.backends,
        )
        saved = tuple(self._names(self.results).index(name) for name in self.saved)
        object.__setattr__(self, "saved_places", saved)
        object.__setattr__(self, "forward", forward.overloads)
        object.__setattr__(self, "backward", backward.overloads)
        if "eager" in self.backends:
            implement(f"{self.name}_forward", "eager")(self._eager_forward)
            implement(f"{self.name}_backward", "eager")(self._eager_backward)
        if "triton" in self.backends:
            forward.implement_triton(self.name, self._check)
            backward.implement_triton(self.name)

    saved_places: tuple[int, ...] = field(init=False, repr=False)  # indices of ``saved``
    forward: dict[str, Any] = field(init=False, repr=False)
    backward: dict[str, Any] = field(init=False, repr=False)

    # The call ----------------------------------------------------------------------------------

    def __call__(
        self, backend: str, tensors: Sequence[Any], options: Sequence[Any], save: int = SAVE_ALL
    ) -> tuple[Tensor, ...]:
        """Runs the forward op on a backend; returns the results that a caller gets.

        Args:
            save: what the forward keeps if a gradient is wanted.
        """
        flat = tensors if self._list_index is None else self.flatten(tensors)
        needs_grad = requires_grad(*flat)
        results: tuple[Tensor, ...]
        if needs_grad and not transform_active():
            # The op would get here too, but through the dispatcher.
            results = apply(_Forward, self, backend, options, save, *flat)
        else:
            last = (save if needs_grad else SAVE_NOTHING,) if self.saves else ()
            results = self.forward[backend](*tensors, *options, *last)
        return results[: self.returned]

    # Schemas -----------------------------------------------------------------------------------

    def _forward_signature(self) -> str:
        arguments = _schema(self.tensors) + _schema(self.options) + ["int save"] * self.saves
        return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * self._count(self.results))})"

    def _backward_signature(self) -> str:
        first, *others = self._names(self.results)[: self.returned]
        grads = [f"Tensor grad_{first}", *(f"Tensor? grad_{name}" for name in others)]
        saved = [f"Tensor {name}" for name in self.saved]
        if self._list_index is None:
            n = self.differentiable
            wanted, returns = f"bool[{n}] wanted", f"({', '.join(['Tensor'] * n)})"
        else:
            wanted, returns = "bool[] wanted", "Tensor[]"
        arguments = [*grads, *_schema(self.tensors), *saved, *_schema(self.options), wanted]
        return f"({', '.join(arguments)}) -> {returns}"

    @staticmethod
    def _names(fields: Any) -> tuple[str, ...]:
        names: tuple[str, ...] = fields._fields
        return names

    def _count(self, fields: Any) -> int:
        return len(self._names(fields))

    # Arguments ---------------------------------------------------------------------------------

    @functools.cached_property
    def _list_index(self) -> int | None:
        """The index of the tensor field that is a list, or None."""
        kinds = [schema.startswith("Tensor?[]") for schema in _schema(self.tensors)]
        return kinds.index(True) if any(kinds) else None

    def flatten(self, tensors: Sequence[Any]) -> Sequence[Tensor | None]:
        if self._list_index is None:
            return tensors
        before, after = self._list_index, self._list_index + 1
        return [*tensors[:before], *tensors[before], *tensors[after:]]

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        if self._list_index is None:
            return list(flat)
        after = self._count(self.tensors) - self._list_index - 1
        end = len(flat) - after
        return [*flat[: self._list_index], list(flat[self._list_index : end]), *flat[end:]]

    def count_differentiable(self, flat: Sequence[Any]) -> int:
        """Returns how many of the flattened tensors can have a gradient; they come first."""
        return len(flat) - (self._count(self.tensors) - self.differentiable)

    def _forward_call(self, args: Sequence[Any]) -> tuple[Any, Any, int]:
        """Returns the forward op's arguments as its tensors, its options, and what to save."""
        t = self._count(self.tensors)
        o = t + self._count(self.options)
        return (
            self.tensors(*args[:t]), self.options(*args[t:o]), args[o] if self.saves else SAVE_ALL
        )  # fmt: skip

    def _split_backward(self, args: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Splits the backward op's arguments: gradients, tensors, saved, options, and wanted."""
        parts: list[Sequence[Any]] = []
        start = 0
        for size in (self.returned, self._count(self.tensors), len(self.saved)):
            parts.append(args[start : start + size])
            start += size
        return (*parts, args[start:-1], args[-1])

    def _backward_call(
        self,
        grads: Sequence[Any],
        tensors: Sequence[Any],
        saved: Sequence[Any] | None,
        options: Sequence[Any],
        wanted: Sequence[bool],
    ) -> BackwardCall:
        """Names the backward op's arguments. Without ``saved``, the formula recomputes them."""
        results = self._names(self.results)
        by_name = {} if saved is None else dict(zip(self.saved, saved, strict=True))
        without = self._count(self.tensors) - self.differentiable
        return BackwardCall(
            grads=self.results(*grads, *(None,) * (len(results) - len(grads))),
            tensors=self.tensors(*tensors),
            saved=self.results(*map(by_name.get, results)),
            options=self.options(*options),
            wanted=self.tensors(*self.unflatten((*wanted, *(False,) * without))),
        )

    def _describe(self, *args: Any) -> Call:
        tensors = self.tensors(*args[: self._count(self.tensors)])
        first = tensors[0]
        return Call(self.name, first.device.type, first.dtype, self.head_dim(tensors))

    # Fakes and checks --------------------------------------------------------------------------

    def _flat_fake(self, fake: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *args: tuple(fake(*self._forward_call(args)))

    def _backward_fake(self, *args: Any) -> Sequence[Tensor]:
        return self._returns(self.grad_fake(self._backward_call(*self._split_backward(args))))

    def _check(self, *args: Any) -> None:
        tensors, options, _ = self._forward_call(args)
        self.check(tensors, options)

    # Derivatives -------------------------------------------------------------------------------

    def _forward_derivative(self, backend: str, *args: Any) -> tuple[Tensor, ...]:
        tensors, options, save = self._forward_call(args)
        if forward_mode():
            with without_autocast():
                return tuple(self.formula(tensors, options))
        # The caller expected no gradient and asked to save nothing, but the backward needs it all.
        save = SAVE_ALL if save == SAVE_NOTHING else save
        return apply(_Forward, self, backend, options, save, *self.flatten(tensors))

    def _backward_derivative(self, backend: str, *args: Any) -> Sequence[Tensor]:
        if forward_mode():
            return self._backward_decomposition(backend, *args)
        grads, tensors, saved, options, wanted = self._split_backward(args)
        flat = self.flatten(tensors)
        return self._returns(
            apply(_Backward, self, backend, options, tuple(wanted), *grads, *flat, *saved)
        )

    def _returns(self, grads: Sequence[Any]) -> Any:
        return tuple(grads) if self._list_index is None else list(grads)

    # The formula -------------------------------------------------------------------------------

    def _forward_decomposition(self, backend: str, *args: Any) -> tuple[Tensor, ...]:
        tensors, options, save = self._forward_call(args)
        with without_autocast():
            results = self.formula(tensors, options)
        # The other results may be placeholders: a decomposed backward recomputes them.
        others = self.fakes.get(backend, self.fake)(tensors, options, save)[self.returned :]
        return (*results[: self.returned], *others)

    def _backward_decomposition(self, backend: str, *args: Any) -> Sequence[Tensor]:
        grads, tensors, _, options, wanted = self._split_backward(args)
        call = self._backward_call(grads, tensors, None, options, wanted)
        with without_autocast():
            found = self.grad_formula(call)
        placeholders = self.grad_fake(call)
        return self._returns(
            [
                g if w and g is not None else p
                for g, p, w in zip(found, placeholders, wanted, strict=True)
            ]
        )

    def _eager_forward(self, *args: Any) -> tuple[Tensor, ...]:
        tensors, options, save = self._forward_call(args)
        self.check(tensors, options)
        results = self.fake(tensors, options, save)  # first: it raises for sizes beyond memory
        return _copied(self.formula(tensors, options), results)

    def _eager_backward(self, *args: Any) -> Sequence[Tensor]:
        call = self._backward_call(*self._split_backward(args))
        return self._returns(_copied(self.grad_formula(call), self.grad_fake(call)))

    # Operations --------------------------------------------------------------------------------

    def _forward_flops(self, *args: Any) -> int:
        assert self.flops is not None
        tensors, options, _ = self._forward_call(args)
        return self.flops(tensors, options)

    def _backward_flops(self, *args: Any) -> int:
        assert self.flops is not None
        _, tensors, _, options, _ = self._split_backward(args)
        named = self.tensors(*tensors), self.options(*options)
        return 2 * self.flops(*named) if self.grad_flops is None else self.grad_flops(*named)

    # Batching ----------------------------------------------------------------------------------

    def _forward_vmap(self, op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
        names = (*self._names(self.tensors),)
        if not self._foldable(names, in_dims, args):
            return one_by_one(op, info, in_dims, args)
        N, B = info.batch_size, self._batch(args[0], in_dims[0], self.axes[names[0]])
        folded = [
            self._fold(name, t, dim, N, B)
            for name, t, dim in zip(names, args, in_dims, strict=False)
        ]
        results = op(*folded, *args[len(names) :])
        return _unzip(
            self._unfold(name, r, N)
            for name, r in zip(self._names(self.results), results, strict=True)
        )

    def _backward_vmap(self, op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
        inputs, results = self._names(self.tensors), self._names(self.results)
        names = (*results[: self.returned], *inputs, *self.saved)
        wanted = args[-1]
        first = self.returned  # index of the first tensor
        flat: list[tuple[str, Tensor | None, int | None]] = []
        for name, t, dim in zip(inputs, args[first:], in_dims[first:], strict=False):
            if isinstance(t, (list, tuple)):
                flat += [(name, *pair) for pair in zip(t, dim or [None] * len(t), strict=True)]
            else:
                flat.append((name, t, dim))
        apart = any(
            w and name not in self.axes for (name, *_), w in zip(flat, wanted, strict=False)
        )

        def call(*each: Any) -> Any:
            # Kernels expect saved results in the layout that the forward gave them.
            start = first + len(inputs)
            end = start + len(self.saved)
            return op(*each[:start], *(t.contiguous() for t in each[start:end]), *each[end:])

        if apart or not self._foldable(names, in_dims, args):
            results, dims = one_by_one(call, info, in_dims, args)
            return self._returns(results), self._returns(dims)
        N, B = info.batch_size, self._batch(args[first], in_dims[first], self.axes[inputs[0]])
        shared = dict(zip(inputs, wanted, strict=False)) if self._list_index is None else {}
        folded = [
            self._fold(name, t, dim, N, B, expand_shared=shared.get(name, False))
            for name, t, dim in zip(names, args, in_dims, strict=False)
        ]
        grads = call(*folded, *args[len(names) :])
        pairs = []
        for (name, t, dim), g, w in zip(flat, grads, wanted, strict=False):
            g, out_dim = self._unfold(name, g, N) if w else (g.expand(N, *g.shape), 0)
            if w and self._batch(t, dim, self.axes[name]) != B:  # it was broadcast
                g = g.sum(self.axes[name] + 1, keepdim=True)
            pairs.append((g, out_dim))
        results, dims = _unzip(pairs)
        return self._returns(results), self._returns(dims)

    def _foldable(self, names: Sequence[str], in_dims: Any, args: Sequence[Any]) -> bool:
        for name, t, dim in zip(names, args, in_dims, strict=False):
            if name in self.unfoldable and t is not None:
                return False
            dims = dim if isinstance(dim, (list, tuple)) else [dim]
            if name not in self.axes and any(d is not None for d in dims):
                return False
        return True

    @staticmethod
    def _batch(t: Tensor | None, dim: int | None, axis: int) -> int:
        """Returns the size of one sample's batch."""
        if t is None or axis == LEADING:
            return 1
        sample = t.shape if dim is None else t.movedim(dim, 0).shape[1:]
        return sample[axis]

    def _fold(
        self, name: str, t: Any, dim: Any, N: int, B: int, expand_shared: bool = False
    ) -> Any:
        """Folds N samples into one batch.

        A tensor that all samples share and that broadcasts over the batch stays as it is, unless
        ``expand_shared``.
        """
        axis = self.axes.get(name)
        if t is None or axis is None:
            return t
        if axis == LEADING:
            return t.expand(N, *t.shape) if dim is None else t.movedim(dim, 0)
        size = self._batch(t, dim, axis) if t.dim() > axis + (dim is not None) else None
        if size is None:  # nothing was saved
            return t if dim is None else t.movedim(dim, 0)[0]
        if dim is None and size == 1 != B and not expand_shared:
            return t
        t = t.expand(N, *t.shape) if dim is None else t.movedim(dim, 0)
        if size != B:
            t = t.expand(*t.shape[: axis + 1], B, *t.shape[axis + 2 :])
        return t.movedim(0, axis).flatten(axis, axis + 1)

    def _unfold(self, name: str, t: Tensor, N: int) -> tuple[Tensor, int]:
        """Unfolds a result into its samples; returns it and the dimension of the samples."""
        axis = self.axes[name]
        if axis == LEADING:
            return (t, 0) if t.shape[0] == N else (t.expand(N, *t.shape), 0)
        if t.dim() <= axis:  # nothing was saved
            return t.expand(N, *t.shape), 0
        return t.unflatten(axis, (N, t.shape[axis] // N)), axis


class BackwardCall(NamedTuple):
    """The arguments of a backward op, by name.

    Attributes:
        grads: gradients of the results; None for those without one.
        tensors: those of the forward.
        saved: results of the forward; None for those that are not saved, or to be recomputed.
        options: those of the forward.
        wanted: for each tensor, whether its gradient is wanted: a flag, or a list of flags for a
            list. False for tensors that can't have a gradient.
    """

    grads: Any  # Operator.results
    tensors: Any  # Operator.tensors
    saved: Any  # Operator.results
    options: Any  # Operator.options
    wanted: Any  # Operator.tensors


def _copied(values: Sequence[Tensor | None], to: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies a formula's results, which may alias arguments or each other; an op's must not."""
    return tuple(
        t if v is None or t.numel() == 0 else t.copy_(v) for t, v in zip(to, values, strict=True)
    )


def _unzip(pairs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    first, second = zip(*pairs, strict=True)
    return first, second


# Derivatives -------------------------------------------------------------------------------------


class _Forward(torch.autograd.Function):
    """A forward op with its backward op."""

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, backend: str, options: Any, save: int, *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        tensors: Any = operator.unflatten(flat)
        last = (save,) if operator.saves else ()
        results: tuple[Tensor, ...] = call_below_autograd(
            operator.forward[backend], *tensors, *options, *last
        )
        ctx.operator, ctx.backend, ctx.options = operator, backend, options
        ctx.first = results[0].shape, results[0].dtype
        ctx.shares_gradient = False
        if operator.shares_gradient is not None or operator.keep is not None:
            named = operator.tensors(*tensors), operator.options(*options)
            if operator.shares_gradient is not None:
                ctx.shares_gradient = operator.shares_gradient(*named)
            if operator.keep is not None:
                tensors = operator.keep(named[0], operator.results(*results), named[1])
                flat = tuple(operator.flatten(tensors))
        ctx.set_materialize_grads(False)
        if len(results) > operator.returned:
            # A result that was not requested has shape (0,).
            returned, rest = results[1 : operator.returned], results[operator.returned :]
            absent = (t for t in returned if t.shape == (0,) != results[0].shape)
            ctx.mark_non_differentiable(*rest, *absent)
        ctx.save_for_backward(*[results[i] for i in operator.saved_places], *flat)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operator: Operator = ctx.operator
        grads = grads[: operator.returned]
        count = len(ctx.needs_input_grad)
        if all(g is None for g in grads):
            return (None,) * count
        if grads[0] is None:
            shape, dtype = ctx.first
            other = next(g for g in grads if g is not None)
            grads = (other.new_zeros(shape, dtype=dtype), *grads[1:])
        tensors = ctx.saved_tensors  # read once: a checkpoint provides them once
        saved, flat = tensors[: len(operator.saved)], tensors[len(operator.saved) :]
        needs_grad = ctx.needs_input_grad[4 : 4 + operator.count_differentiable(flat)]
        wanted = list(needs_grad)
        if ctx.shares_gradient:
            wanted[:2] = [needs_grad[0] or needs_grad[1], False]
        found = list(
            operator.backward[ctx.backend](
                *grads, *operator.unflatten(flat), *saved, *ctx.options, wanted
            )
        )
        if ctx.shares_gradient:
            found[1] = found[0]
        results = [g if n else None for g, n in zip(found, needs_grad, strict=True)]
        return (*(None,) * 4, *results, *(None,) * (count - 4 - len(results)))


class _Backward(torch.autograd.Function):
    """A backward op, differentiated through its formula.

    The saved results are functions of the other inputs. The formula recomputes them, so that the
    derivatives are complete without gradients for the saved results.
    """

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, backend: str, options: Any, wanted: tuple[bool, ...],
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        grads = flat[: operator.returned]
        inputs = flat[operator.returned : len(flat) - len(operator.saved)]
        saved = flat[len(flat) - len(operator.saved) :]
        ctx.operator, ctx.options, ctx.wanted = operator, options, wanted
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*grads, *inputs)
        return tuple(
            call_below_autograd(
                operator.backward[backend],
                *grads,
                *operator.unflatten(inputs),
                *saved,
                *options,
                list(wanted),
            )
        )

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        operator: Operator = ctx.operator
        given = ctx.saved_tensors
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        needed = ctx.needs_input_grad[4 : 4 + len(given)]
        places = [i for i, need in enumerate(needed) if need]
        used = [w and u is not None for w, u in zip(ctx.wanted, upstream, strict=True)]
        if not any(used):
            return tuple(found)

        def gradients(*values: Tensor) -> tuple[Tensor, ...]:
            inputs = list(given)
            for i, value in zip(places, values, strict=True):
                inputs[i] = value
            call = operator._backward_call(
                inputs[: operator.returned],
                operator.unflatten(inputs[operator.returned :]),
                None,
                ctx.options,
                ctx.wanted,
            )
            grads = operator.grad_formula(call)
            return tuple(g for g, u in zip(grads, used, strict=True) if g is not None and u)

        with without_autocast():
            # vjp returns two values here: the third in its annotation comes only with has_aux.
            _, vjp = torch.func.vjp(gradients, *(given[i] for i in places))  # type: ignore[misc]
            derivatives = vjp(tuple(g for g, u in zip(upstream, used, strict=True) if u))
        for i, derivative in zip(places, derivatives, strict=True):
            found[4 + i] = derivative
        return tuple(found)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Calls ``function.apply`` at the level of differentiation that is being dispatched.

    torch's own ``apply`` looks up the arguments' defaults in every call, which takes longer than
    kernels on small tensors, and applies the transforms of ``torch.func`` to the call. Here the
    dispatcher applies them to the op instead.
    """
    if torch._C._are_functorch_transforms_active():
        from torch._functorch.autograd_function import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return _single_level(function).apply(*args)
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*torch._functorch.utils.unwrap_dead_wrappers(args))


@functools.cache
def _single_level(function: type[torch.autograd.Function]) -> Any:
    """Returns a Function with the same forward and backward, to which torch applies no transforms.

    Since torch 2.15, every subclass of ``torch.autograd.Function`` applies them itself.
    """
    methods = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)


def call_below_autograd(op: Any, *args: Any) -> Any:
    """Calls an op from within the Function that differentiates it.

    The Function has disabled gradients, also for outer transforms, which need them.
    """
    if not torch._C._are_functorch_transforms_active():
        return op(*args)
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return op(*args)


# One op ------------------------------------------------------------------------------------------


class Op:
    """An op with one overload per backend, and the rules registered for each overload.

    Args:
        name: such as "attention_forward".
        signature: arguments and returns in torch's schema language, without the name.
        fake: shapes, dtypes and strides of the results.
        vmap: the batching rule, as :func:`torch.library.register_vmap` takes it, with the overload
            to call as an extra first argument.
        derivative: the results if a transform needs their derivatives. Its extra first argument is
            the backend.
        decomposition: the results in plain torch. Its extra first argument is the backend.
        describe: makes a :class:`Call` from the arguments, to choose a backend for it.
        flops: floating-point operations of the op's products, from its arguments.
        fakes: by backend, replacements of ``fake`` for backends that save something else.
        backends: the backends that have the op.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        *,
        fake: Callable[..., Any],
        vmap: Callable[..., Any],
        derivative: Callable[..., Any],
        decomposition: Callable[..., Any],
        describe: Callable[..., Call],
        flops: Callable[..., int] | None = None,
        fakes: Mapping[str, Callable[..., Any]] | None = None,
        backends: Sequence[str] = ORDER,
    ) -> None:
        if name in _OPS:
            raise ImportError(f"{name} can't be reloaded: torch keeps its ops; start Python anew")
        _OPS.add(name)
        self.name = name
        self.describe = describe
        self.overloads: dict[str, Any] = {}
        for backend in backends:
            overload = f"{name}.{backend}"
            library.define(f"{overload}{signature}")
            self.overloads[backend] = op = getattr(getattr(torch.ops.trifuse, name), backend)
            meta = self._fake(backend, fake, fakes or {})
            torch.library.register_fake(f"trifuse::{overload}", meta, lib=library)
            register_batching(overload, functools.partial(vmap, op))
            register_derivative(overload, signature, functools.partial(derivative, backend))
            register_decomposition(op, functools.partial(decomposition, backend), meta)
            if backend not in _IN_PYTHON:  # its kernel is registered for one device only
                library.impl(overload, self._fallback(backend), "CompositeExplicitAutograd")
        if flops is not None:
            register_flops(getattr(torch.ops.trifuse, name), flops)

    def _fake(
        self, backend: str, fake: Callable[..., Any], fakes: Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        if not fakes:
            return fake

        def of_backend(*args: Any) -> Any:
            call = self.describe(*args)
            served = backend if call.device == "meta" else backends.fallback_backend(call, backend)
            return fakes.get(served, fake)(*args)

        return of_backend

    def _fallback(self, backend: str) -> Callable[..., Any]:
        """Returns a kernel for programs moved to a device that the backend does not serve."""

        def call(*args: Any) -> Any:
            served = backends.fallback_backend(self.describe(*args), backend)
            if served == backend:
                raise NotImplementedError(
                    f"trifuse::{self.name}.{backend} has no kernel for {args[0].device}"
                )
            return self.overloads[served](*args)

        return call

    def implement_triton(self, operator: str, check: Callable[..., None] | None = None) -> None:
        """Implements the op by its namesake, a launcher in ``trifuse.kernels.<operator>``.

        Args:
            check: raises for wrong values in the arguments.
        """
        fallback = self._fallback("triton")

        def launch(*args: Any) -> Any:
            if not (args[0].is_cuda or backends.interpreting()):
                return fallback(*args)
            if check is not None:
                check(*args)
            # Imported when called, because Triton may not be installed.
            return getattr(importlib.import_module(f"trifuse.kernels.{operator}"), self.name)(*args)

        implement(self.name, "triton")(launch)


_OPS: set[str] = set()

# Backends whose implementations are registered for any device.
_IN_PYTHON = ("triton", "eager")


def implement(op: str, backend: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as an op's implementation, for ``backend`` if given."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def kernel(*args: Any) -> Any:
            if backend in _IN_PYTHON:  # C++ checks it itself
                _check_storages(args)
            with without_autocast():
                return function(*args)

        key = "CompositeExplicitAutograd"
        overload = f"{op}.{backend}" if backend else op
        library.impl(overload, kernel, key)
        return function

    return register


def _check_storages(args: Iterable[Any]) -> None:
    """Checks that each tensor's storage is large enough for its sizes and strides.

    Raises:
        ValueError: a storage was resized under its tensor (``trifuse.ArgumentError``).
    """
    for t in args:
        if isinstance(t, list):
            _check_storages(t)
        elif type(t) in (Tensor, torch.nn.Parameter) and t.numel() > 0:
            if t.is_contiguous():  # the usual case, and the faster
                last = t.numel() - 1
            else:
                last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            needed = (t.storage_offset() + last + 1) * t.itemsize
            if needed > t.untyped_storage().nbytes() and t.device.type != "meta":
                shape, held = tuple(t.shape), t.untyped_storage().nbytes()
                raise fail(f"a tensor of shape {shape}", f"{needed} bytes of storage", held)


def register_derivative(overload: str, signature: str, derivative: Callable[..., Any]) -> None:
    """Makes ``derivative`` compute an op's results if a gradient or a tangent is wanted.

    Otherwise the op's kernel runs. The extension decides in C++, so that such a call does not enter
    Python; without the extension, Python decides.
    """
    if backends._C is not None:
        name, _, suffix = overload.partition(".")
        companion = f"{name}_autograd.{suffix}" if suffix else f"{name}_autograd"
        library.define(f"{companion}{signature}")
        library.impl(companion, derivative, "CompositeImplicitAutograd")
        backends._C.register_autograd(overload, companion)
        return
    name, _, suffix = overload.partition(".")
    op = getattr(getattr(torch.ops.trifuse, name), suffix or "default")

    def decide(*args: Any) -> Any:
        tensors = (t for t in tree_leaves(args) if isinstance(t, Tensor))
        if forward_mode() or requires_grad(*tensors):
            return derivative(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    library.impl(overload, decide, "Autograd")


def register_decomposition(
    op: Any, decomposition: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Registers a decomposition for ``torch.onnx.export`` and :func:`decompositions`.

    The fake is registered too: fake tensors of symbolic sizes would otherwise go through the
    decomposition.
    """
    torch._decomp.decomposition_table[op] = decomposition
    torch._decomp.meta_table[op] = fake
    _DECOMPOSITIONS[op] = decomposition
    when_imported("torch._inductor.lowering", functools.partial(_register_with_inductor, op))


def _register_with_inductor(op: Any) -> None:
    """Makes Inductor call ``op`` as it is, with the strides that the tracer saw.

    Inductor does so by default, except if the environment variable ``CI`` is set, as most services
    that run tests do: then it refuses an op that has a decomposition.
    """
    lowering = importlib.import_module("torch._inductor.lowering")
    with contextlib.suppress(AttributeError):  # another version of torch: this is not a public API
        tag = lowering.get_layout_constraint_tag(op, with_default=True)
        lowering.make_fallback(op, lowering.tag_to_layout_constraint(tag), warn=False)


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns a dict from each op of trifuse to its formula in plain torch.

    For lowering graphs: ``exported.run_decompositions(trifuse.decompositions())`` leaves a program
    without ops of trifuse.
    """
    return dict(_DECOMPOSITIONS)


def register_flops(packet: Any, flops: Callable[..., int]) -> None:
    """Registers a formula with ``torch.utils.flop_counter`` once that module is imported."""

    def register() -> None:
        from torch.utils.flop_counter import register_flop_formula

        @register_flop_formula(packet, get_raw=True)
        def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            return flops(*args)

    when_imported("torch.utils.flop_counter", register)


# Batching ----------------------------------------------------------------------------------------


def register_batching(overload: str, rule: Callable[..., Any]) -> None:
    """Registers a rule with ``torch.func.vmap`` and the older vmap behind ``is_grads_batched``."""
    torch.library.register_vmap(f"trifuse::{overload}", rule, lib=library)
    if hasattr(torch._C, "_vmapmode_increment_nesting"):
        library.impl(overload, functools.partial(_older_vmap, rule), "Batched")


class _Info(NamedTuple):
    """The part of torch.func.vmap's first argument that a batching rule reads."""

    batch_size: int


def is_batched(t: Tensor) -> bool:
    """Returns whether the older vmap batches t: ``autograd.grad(is_grads_batched=True)``."""
    return torch._C._functorch.is_legacy_batchedtensor(t)


def _older_vmap(rule: Callable[..., Any], *args: Any) -> Any:
    """Applies a batching rule to the batched tensors of ``torch._vmap_internals``."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    sizes: list[int] = []

    def unwrap(t: Any) -> Any:
        if isinstance(t, (list, tuple)):
            pairs = [unwrap(each) for each in t]
            return [p[0] for p in pairs], [p[1] for p in pairs]
        if not isinstance(t, Tensor) or not is_batched(t):
            return t, None
        t = torch._remove_batch_dim(t, level, -1, 0)
        sizes.append(t.shape[0])
        return t, 0

    values, in_dims = unwrap(args)
    results, dims = rule(_Info(sizes[0]), tuple(in_dims), *values)
    if isinstance(results, Tensor):
        return torch._add_batch_dim(results, dims, level)
    wrapped = [torch._add_batch_dim(r, d, level) for r, d in zip(results, dims, strict=True)]
    return wrapped if isinstance(results, list) else tuple(wrapped)


def one_by_one(op: Any, info: Any, in_dims: Any, args: tuple[Any, ...]) -> Any:
    """A batching rule that calls the op once per sample, for calls that can't be folded."""

    def sample(x: Any, dim: Any, i: int) -> Any:
        if isinstance(dim, (list, tuple)):  # a list of tensors has a list of dimensions
            return [sample(*pair, i) for pair in zip(x, dim, strict=True)]
        return x.select(dim, i) if isinstance(dim, int) else x

    calls = (
        [sample(*pair, i) for pair in zip(args, in_dims, strict=True)]
        for i in range(info.batch_size)
    )
    results = zip(*(op(*call) for call in calls), strict=True)
    stacked = tuple(torch.stack(r) for r in results)
    return stacked, (0,) * len(stacked)


# Schemas -----------------------------------------------------------------------------------------

_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    int: "SymInt",
    float: "float",
    bool: "bool",
    torch.dtype: "ScalarType",
}


def _schema(fields: Any) -> list[str]:
    """Returns the fields of a named tuple as arguments in torch's schema language."""
    hints = typing.get_type_hints(fields)
    return [f"{_schema_type(hints[name])} {name}" for name in fields._fields]


def _schema_type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (kind,) = (a for a in arguments if a is not type(None))
        return f"{_schema_type(kind)}?"
    if origin is not None:
        return f"{_schema_type(arguments[0])}[]"
    return _TYPES[hint]


# Context of a call -------------------------------------------------------------------------------


def requires_grad(*tensors: Tensor | None) -> bool:
    """Returns whether autograd records a call on these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def draw_seed(like: Tensor) -> Tensor:
    """Draws the key of a call's random numbers, int64 (1,), from torch's default generator."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (1,), device=like.device)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast sets for x's device, or None if autocast is off."""
    device = "cpu" if x.is_cpu else x.device.type  # device.type takes a microsecond
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


# See backends._capability. torch 2.11's Dynamo can't trace into it.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def without_autocast() -> AbstractContextManager[None]:
    """Disables autocast: the arguments have been cast, and operators choose their own dtypes."""
    return torch._C._DisableAutocast()


def transform_active() -> bool:
    """Returns whether a transform may apply to a call, so that it must go by the dispatcher."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def forward_mode() -> bool:
    """Returns whether a tensor may carry a tangent. The formula serves such calls."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    # A compiled jvp enters its level without setting it in torch.autograd.forward_ad.
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return any(each.key() == torch._C._functorch.TransformType.Jvp for each in transforms)
