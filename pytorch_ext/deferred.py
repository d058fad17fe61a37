"""Tensors that are computed only when something needs their numbers.

A :class:`Deferred` tensor holds the call that computes it. A subclass may return another deferred
tensor as the result of a function of it. Any other function gets the numbers.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Again = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function and its arguments


class Deferred(Tensor):
    """A tensor that is not computed yet.

    Raises:
        RuntimeError: it must be computed, but a tensor that it is computed from may have changed.
    """

    _call: Again  # computes it
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
        call: Again,
    ) -> Any:
        """Return the tensor that a call would compute."""
        leaves = [leaf for leaf in tree_leaves(call[1:]) if isinstance(leaf, Tensor)]
        grad = torch.is_grad_enabled()
        made: Any = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
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
        if grad and any(leaf.requires_grad for leaf in leaves):
            with torch._C.DisableTorchFunctionSubclass():
                made._require_gradient()
        return made

    def _require_gradient(self) -> None:
        """Make this tensor require a gradient. Its numbers get theirs through a separate graph.

        So a gradient arrives here only if this tensor was the input of a custom function.
        """
        self.requires_grad_()
        self.register_hook(_refuse_gradient)

    @staticmethod
    def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return a deferred result of a function, or None if the function must run."""
        raise NotImplementedError

    def compute(self) -> Tensor:
        """Return the values, as the model's own functions compute them."""
        if self._value is None:
            for tensor, version in self._versions:
                # In inference mode tensors have no version counter. Nothing changes them before the
                # product with the values.
                if self._attended if version is None else tensor._version != version:
                    raise RuntimeError(_TOO_LATE)
            function, args, kwargs = self._call
            with computing(), torch.set_grad_enabled(self._recorded):
                self._value = function(*computed(args), **computed(kwargs))
        if self.requires_grad and not self._recorded:
            # A custom function, such as a checkpoint, returned this tensor and receives its
            # gradient.
            numbers: Tensor = _Numbers.apply(self, [self._value])
            return numbers
        return self._value

    def settle(self) -> None:
        """Compute this tensor and all tensors that depend on it, before it is changed in place."""
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
        if (found := cls._step(func, args, kwargs)) is not None:
            return found
        if func in _IN_PLACE or kwargs.get("inplace"):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Deferred):
                    leaf.settle()
        return func(*computed(args), **computed(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} got {_UNCOMPUTED}")


class _Numbers(torch.autograd.Function):
    """The numbers of a deferred tensor. Their gradient is passed on to the tensor itself."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, numbers: list[Tensor]) -> Tensor:
        return numbers[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_UNCOMPUTED = (
    "a part of an attention that trifuse has not computed; call this part of the model outside of "
    "trifuse.attention(), and without trifuse.fuse()"
)
_TOO_LATE = (
    "these attention weights were not computed, and a tensor that they are made of may have "
    "changed since; ask for them by output_attentions=True, or call the model without "
    "trifuse.attention()"
)


def _refuse_gradient(grad: Tensor) -> Tensor:
    """Raise an error, because it is unknown where the gradient would go."""
    raise RuntimeError(f"a function with a backward of its own got {_UNCOMPUTED}")


def computed(arguments: Any) -> Any:
    """Return arguments with the numbers in place of deferred tensors."""
    return tree_map(lambda x: x.compute() if isinstance(x, Deferred) else x, arguments)


class _State(threading.local):
    computing = False


_state = _State()


def is_computing() -> bool:
    """Whether this thread computes deferred tensors now."""
    return _state.computing


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """A context in which no tensor is deferred. The code that computes deferred tensors uses it."""
    before, _state.computing = _state.computing, True
    try:
        yield
    finally:
        _state.computing = before


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
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.ndimension,
    Tensor.is_floating_point,
    Tensor.element_size,
    Tensor.__len__,
    torch.numel,
    torch.is_floating_point,
}
