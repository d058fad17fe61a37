"""Declares operators: one declaration provides everything that torch needs.

An operator is two ops, ``<name>_forward`` and ``<name>_backward``, with one overload per backend:
``torch.ops.trifuse.attention_forward.cpp``. The ops are opaque, because a backward that is traced
piece by piece over saved outputs silently gives wrong second derivatives. There is one overload per
backend, so that a profile shows which one ran, and so that a backward runs on the backend of its
forward.

An :class:`Operator` declares its tensors, options and results as named tuples. From these follow,
for every overload:

- the schemas, and fakes that return the true shapes, dtypes and strides;
- derivatives, registered for the op itself, so that any tracer can differentiate it (torch.compile,
  torch.export, pipelines): see _autograd.py;
- batching rules for ``torch.vmap`` and for the older ``autograd.grad(is_grads_batched=True)``: see
  _batching.py;
- the decomposition into the formula, for ONNX and other lowerings of graphs. The formula also
  serves forward-mode AD;
- floating-point operations for ``torch.utils.flop_counter``;
- sharding rules for the DTensors of torch.distributed: see _sharding.py;
- a fallback for devices that the overload's backend does not serve, such as after an exported
  program was moved to a GPU. The backend chosen there serves the call.

_op.py registers them with torch.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse.backends import ORDER, Call
from trifuse.ops import _batching, _sharding
from trifuse.ops._autograd import Backward, Forward, apply
from trifuse.ops._modes import forward_mode, requires_grad, transform_active, without_autocast
from trifuse.ops._op import Op, implement

if "Operator" in globals():
    raise ImportError("trifuse can't be reloaded: torch keeps its ops; start Python anew")

# The last argument of a forward op with ``Operator.saves``: how much it keeps for its backward.
SAVE_NOTHING, SAVE_STATES, SAVE_ALL = range(3)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """The declaration of an operator.

    The forward op takes ``tensors``, ``options`` and, with ``saves``, what to save; it returns
    ``results``. The backward op takes the gradients of the results that a caller gets, ``tensors``,
    the ``saved`` results, ``options``, and, for each tensor that can have a gradient, a flag for
    whether that gradient is needed. It returns the gradients; one that is not needed may have shape
    (0,).

    Attributes:
        name: the operator's name, as in :class:`trifuse.backends.Call`.
        tensors: a named tuple of the forward op's tensors; at most one of its fields is a list.
        options: a named tuple of numbers and flags.
        results: a named tuple of the forward op's results.
        returned: number of results that a caller gets; they come first. In the backward op the
            first of them always has a gradient; the gradients of the others may be None.
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
            gradient that is not needed.
        flops: floating-point operations of the forward op's products: (tensors, options) -> int.
        grad_flops: those of the backward op, with the same arguments. Default: twice ``flops``,
            because each factor of a product has a gradient.
        fakes: by backend, replacements of ``fake`` for backends that save something else.
        keep: replaces the ``tensors`` that the backward gets: (tensors, results, options) ->
            tensors.
        output_may_change: whether a caller may change the first result in place before the
            backward, which then computes it again; it is the first of ``saved``.
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
    output_may_change: bool = False
    shares_gradient: Callable[..., bool] | None = None
    check: Callable[[Any, Any], None] = lambda tensors, options: None
    head_dim: Callable[[Any], int] = lambda tensors: 0
    backends: Sequence[str] = ORDER
    saved_places: tuple[int, ...] = field(init=False, repr=False)  # indices of ``saved``
    list_index: int | None = field(init=False, repr=False)  # of the tensor field that is a list
    forward: dict[str, Any] = field(init=False, repr=False)  # overloads by backend
    backward: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        is_list = [schema.startswith("Tensor?[]") for schema in _schema(self.tensors)]
        places = tuple(self.results._fields.index(name) for name in self.saved)
        object.__setattr__(self, "list_index", is_list.index(True) if any(is_list) else None)
        object.__setattr__(self, "saved_places", places)
        forward = Op(
            f"{self.name}_forward",
            self._forward_signature(),
            fake=self._flat_fake(self.fake),
            fakes={backend: self._flat_fake(fake) for backend, fake in self.fakes.items()},
            vmap=functools.partial(_batching.fold_forward, self),
            derivative=self._forward_derivative,
            decomposition=self._forward_decomposition,
            flops=None if self.flops is None else self._forward_flops,
            describe=lambda *args: self._describe(self._parse_forward(args)[0]),
            backends=self.backends,
        )
        backward = Op(
            f"{self.name}_backward",
            self._backward_signature(),
            fake=self._backward_fake,
            vmap=functools.partial(_batching.fold_backward, self),
            derivative=self._backward_derivative,
            decomposition=self._backward_decomposition,
            flops=None if self.flops is None else self._backward_flops,
            describe=self._describe_backward,
            backends=self.backends,
        )
        object.__setattr__(self, "forward", forward.overloads)
        object.__setattr__(self, "backward", backward.overloads)
        if "eager" in self.backends:
            implement(f"{self.name}_forward", "eager")(self._eager_forward)
            implement(f"{self.name}_backward", "eager")(self._eager_backward)
        if "triton" in self.backends:
            forward.implement_triton(self.name, self._check)
            backward.implement_triton(self.name)
        _sharding.register(self)

    # The call ----------------------------------------------------------------------------------

    def __call__(
        self, backend: str, tensors: Sequence[Any], options: Sequence[Any], save: int = SAVE_ALL
    ) -> tuple[Tensor, ...]:
        """Runs the forward op on a backend; returns the results that a caller gets.

        Args:
            save: what the forward keeps if a gradient is needed.
        """
        flat = tensors if self.list_index is None else self.flatten(tensors)
        needs_grad = requires_grad(*flat)
        results: tuple[Tensor, ...]
        if needs_grad and not transform_active():
            # Calling the op would lead here too, but through the dispatcher.
            results = apply(Forward, (self, backend, options, save), *flat)
        else:
            last = (save if needs_grad else SAVE_NOTHING,) if self.saves else ()
            results = self.forward[backend](*tensors, *options, *last)
        return results[: self.returned]

    def first_result(
        self, backend: str, flat: Sequence[Tensor | None], options: Sequence[Any]
    ) -> Tensor:
        """Runs the forward op for its first result alone, without gradients."""
        last = (SAVE_NOTHING,) if self.saves else ()
        with torch.no_grad():
            result: Tensor = self.forward[backend](*self.unflatten(flat), *options, *last)[0]
        return result

    # Arguments of the ops ----------------------------------------------------------------------

    def _forward_signature(self) -> str:
        arguments = _schema(self.tensors) + _schema(self.options) + ["int save"] * self.saves
        returns = ", ".join("Tensor" for _ in self.results._fields)
        return f"({', '.join(arguments)}) -> ({returns})"

    def _backward_signature(self) -> str:
        first, *others = self.results._fields[: self.returned]
        grads = [f"Tensor grad_{first}", *(f"Tensor? grad_{name}" for name in others)]
        saved = [f"Tensor {name}" for name in self.saved]
        if self.list_index is None:
            n = self.differentiable
            needs_grad, returns = f"bool[{n}] needs_grad", f"({', '.join(['Tensor'] * n)})"
        else:
            needs_grad, returns = "bool[] needs_grad", "Tensor[]"
        arguments = [*grads, *_schema(self.tensors), *saved, *_schema(self.options), needs_grad]
        return f"({', '.join(arguments)}) -> {returns}"

    def split_forward(self, args: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Splits the forward op's arguments: tensors, options, and what to save, () or (save,)."""
        t = len(self.tensors._fields)
        o = t + len(self.options._fields)
        return args[:t], args[t:o], args[o:]

    def split_backward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Splits the backward op's arguments: gradients, tensors, saved, options and needs_grad."""
        g = self.returned
        t = g + len(self.tensors._fields)
        s = t + len(self.saved)
        return args[:g], args[g:t], args[t:s], args[s:-1], args[-1]

    def _parse_forward(self, args: Sequence[Any]) -> ForwardCall:
        tensors, options, last = self.split_forward(args)
        (save,) = last or (SAVE_ALL,)
        return ForwardCall(self.tensors(*tensors), self.options(*options), save)

    def _parse_backward(self, args: Sequence[Any]) -> BackwardCall:
        return self.backward_call(*self.split_backward(args))

    def backward_call(
        self,
        grads: Sequence[Any],
        tensors: Sequence[Any],
        saved: Sequence[Any] | None,
        options: Sequence[Any],
        needs_grad: Sequence[bool],
    ) -> BackwardCall:
        """Names the backward op's arguments. Without ``saved``, the formula recomputes them."""
        by_name = {} if saved is None else dict(zip(self.saved, saved, strict=True))
        without_grad = len(self.tensors._fields) - self.differentiable
        absent = len(self.results._fields) - self.returned
        return BackwardCall(
            grads=self.results(*grads, *(None,) * absent),
            tensors=self.tensors(*tensors),
            saved=self.results(*map(by_name.get, self.results._fields)),
            options=self.options(*options),
            needs_grad=self.tensors(*self.unflatten((*needs_grad, *(False,) * without_grad))),
        )

    def flatten(self, tensors: Sequence[Any]) -> Sequence[Tensor | None]:
        """Returns the tensors, with the list field replaced by its tensors."""
        if self.list_index is None:
            return tensors
        before, after = self.list_index, self.list_index + 1
        return [*tensors[:before], *tensors[before], *tensors[after:]]

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        """The inverse of :meth:`flatten`."""
        if self.list_index is None:
            return list(flat)
        after = len(self.tensors._fields) - self.list_index - 1
        end = len(flat) - after
        return [*flat[: self.list_index], list(flat[self.list_index : end]), *flat[end:]]

    def count_differentiable(self, flat: Sequence[Any]) -> int:
        """Returns how many of the flattened tensors can have a gradient; they come first."""
        return len(flat) - (len(self.tensors._fields) - self.differentiable)

    def returns(self, grads: Sequence[Any]) -> Any:
        """Returns gradients in the type of the backward op's schema."""
        return tuple(grads) if self.list_index is None else list(grads)

    # Rules of the ops --------------------------------------------------------------------------

    def _describe(self, tensors: Any) -> Call:
        """Describes a call for the choice of a backend; the first tensor represents all."""
        first, *_ = tensors
        return Call(self.name, first.device.type, first.dtype, self.head_dim(tensors))

    def _describe_backward(self, *args: Any) -> Call:
        call = self._parse_backward(args)
        return self._describe(call.tensors)

    def _flat_fake(self, fake: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *args: tuple(fake(*self._parse_forward(args)))

    def _backward_fake(self, *args: Any) -> Sequence[Tensor]:
        return self.returns(self.grad_fake(self._parse_backward(args)))

    def _forward_derivative(self, backend: str, *args: Any) -> tuple[Tensor, ...]:
        tensors, options, save = self._parse_forward(args)
        if forward_mode():
            with without_autocast():
                return tuple(self.formula(tensors, options))
        # The caller expected no gradient and saves nothing, but the backward needs everything.
        save = SAVE_ALL if save == SAVE_NOTHING else save
        return apply(Forward, (self, backend, options, save), *self.flatten(tensors))

    def _backward_derivative(self, backend: str, *args: Any) -> Sequence[Tensor]:
        if forward_mode():
            return self._backward_decomposition(backend, *args)
        grads, tensors, saved, options, needs_grad = self.split_backward(args)
        constants = (self, backend, options, tuple(needs_grad))
        return self.returns(apply(Backward, constants, *grads, *self.flatten(tensors), *saved))

    def _forward_decomposition(self, backend: str, *args: Any) -> tuple[Tensor, ...]:
        tensors, options, save = self._parse_forward(args)
        with without_autocast():
            results = self.formula(tensors, options)
        # The other results may be placeholders: a decomposed backward recomputes them.
        others = self.fakes.get(backend, self.fake)(tensors, options, save)[self.returned :]
        return (*results[: self.returned], *others)

    def _backward_decomposition(self, backend: str, *args: Any) -> Sequence[Tensor]:
        grads, tensors, _, options, needs_grad = self.split_backward(args)
        call = self.backward_call(grads, tensors, None, options, needs_grad)
        with without_autocast():
            found = self.grad_formula(call)
        placeholders = self.grad_fake(call)
        return self.returns(
            [
                g if w and g is not None else p
                for g, p, w in zip(found, placeholders, needs_grad, strict=True)
            ]
        )

    def _forward_flops(self, *args: Any) -> int:
        assert self.flops is not None
        call = self._parse_forward(args)
        return self.flops(call.tensors, call.options)

    def _backward_flops(self, *args: Any) -> int:
        assert self.flops is not None
        call = self._parse_backward(args)
        if self.grad_flops is not None:
            return self.grad_flops(call.tensors, call.options)
        return 2 * self.flops(call.tensors, call.options)

    # Implementations ---------------------------------------------------------------------------

    def _check(self, *args: Any) -> None:
        call = self._parse_forward(args)
        self.check(call.tensors, call.options)

    def _eager_forward(self, *args: Any) -> tuple[Tensor, ...]:
        tensors, options, save = self._parse_forward(args)
        self.check(tensors, options)
        results = self.fake(tensors, options, save)  # first, as it raises for sizes beyond memory
        return _copied(self.formula(tensors, options), results)

    def _eager_backward(self, *args: Any) -> Sequence[Tensor]:
        call = self._parse_backward(args)
        return self.returns(_copied(self.grad_formula(call), self.grad_fake(call)))


class ForwardCall(NamedTuple):
    """The arguments of a forward op, by name."""

    tensors: Any  # Operator.tensors
    options: Any  # Operator.options
    save: int


class BackwardCall(NamedTuple):
    """The arguments of a backward op, by name.

    Attributes:
        grads: gradients of the results; None for those without one.
        tensors: those of the forward.
        saved: results of the forward; None for those that are not saved, or to be recomputed.
        options: those of the forward.
        needs_grad: for each tensor, whether its gradient is needed: a flag, or a list of flags for
            a list of tensors. False for tensors that can't have a gradient.
    """

    grads: Any  # Operator.results
    tensors: Any  # Operator.tensors
    saved: Any  # Operator.results
    options: Any  # Operator.options
    needs_grad: Any  # Operator.tensors


def _copied(values: Sequence[Tensor | None], to: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies a formula's results, which may alias arguments or each other; an op's must not."""
    return tuple(
        t if v is None or t.numel() == 0 else t.copy_(v) for t, v in zip(to, values, strict=True)
    )


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
