"""Tensors that are computed only when something needs their numbers.

A :class:`Deferred` tensor holds the call that computes it. A subclass may return another deferred
tensor as the result of a function of it. Any other function gets the numbers.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from trifuse import spellings

Again = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function and its arguments


class Modes(NamedTuple):
    """torch's modes that change what a function computes from the same arguments."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None  # None: off

    @staticmethod
    def now(device: torch.device) -> Modes:
        """Return those that are in force for a device."""
        kind = device.type
        on = torch.is_autocast_enabled(kind)
        return Modes(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(kind) if on else None,
        )

    @contextlib.contextmanager
    def restored(self, device: torch.device) -> Iterator[None]:
        """A context in which they are in force again."""
        now = Modes.now(device)
        with contextlib.ExitStack() as stack:
            if self.inference != now.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            if self.autocast != now.autocast:
                on = self.autocast is not None
                stack.enter_context(torch.autocast(device.type, self.autocast, on))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


class Deferred(Tensor):
    """A tensor that is not computed yet.

    Raises:
        RuntimeError: it must be computed, but a tensor that it is computed from may have changed.
    """

    _call: Again  # computes it
    _parents: list[Deferred]  # the deferred tensors in the call
    _versions: list[tuple[Tensor, int | None]]  # of the tensors in the call; None: unknown
    _value: Tensor | None
    _value_version: int | None  # of the values when they were computed; None: unknown
    _shares: Deferred | None  # what this is a view of: a change of one in place changes both
    _derived: list[weakref.ref[Deferred]]
    _attended: bool  # whether the product with the values was taken; see ``was_attended``
    _modes: Modes  # when it was made

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
        modes = Modes.now(device)
        made: Any = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        made._call, made._value, made._shares = call, None, None
        made._parents = [leaf for leaf in leaves if isinstance(leaf, Deferred)]
        made._derived, made._attended, made._modes = [], False, modes
        made._versions = [
            (leaf, _version(leaf)) for leaf in leaves if not isinstance(leaf, Deferred)
        ]
        for parent in made._parents:
            parent._derived.append(weakref.ref(made))
        if modes.grad and any(leaf.requires_grad for leaf in leaves):
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

    @property
    def is_pending(self) -> bool:
        """Whether neither this tensor nor one that it is a view of has been computed."""
        return all(part._value is None for part in self.and_wholes())

    @property
    def was_attended(self) -> bool:
        """Whether the product with the values was taken, of this tensor or of a view of it."""
        return any(part._attended for part in self.and_wholes())

    def and_wholes(self) -> Iterator[Deferred]:
        """Yield this tensor, the one that it is a view of, the one that this is a view of, ..."""
        part: Deferred | None = self
        while part is not None:
            yield part
            part = part._shares

    def compute(self) -> Tensor:
        """Return the values, as the model's own functions compute them.

        They are what the tensor holds now: a change in place of a view of them counts.
        """
        if self._value is None:
            self._value = self._numbers()
            self._value_version = _version(self._value)
        if self.requires_grad and not self._modes.grad:
            # A custom function, such as a checkpoint, returned this tensor, and takes its gradient.
            numbers: Tensor = _Numbers.apply(self, [self._value])
            return numbers
        return self._value

    def _numbers(self) -> Tensor:
        """Compute the call."""
        self.check_unchanged()

        def numbers(leaf: Any) -> Any:
            if not isinstance(leaf, Deferred):
                return leaf
            return leaf.compute() if leaf is self._shares else leaf._as_made()

        function, args, kwargs = self._call
        with computing(), self._modes.restored(self.device):
            result: Tensor = function(*tree_map(numbers, args), **tree_map(numbers, kwargs))
        return result

    def _as_made(self) -> Tensor:
        """Return the values before a change in place.

        What was derived from this tensor is computed before the tensor itself is changed. But its
        values may be changed by their views, which are ordinary tensors.
        """
        value = self.compute()
        if self._value_version is None or _version(value) == self._value_version:
            return value
        return self._numbers()

    def check_unchanged(self) -> None:
        """Raise an error if a tensor of the call may have been changed since."""
        for tensor, version in self._versions:
            # In inference mode tensors count no changes. Until the product with the values
            # there is nothing that would make any.
            if self.was_attended if version is None else tensor._version != version:
                raise RuntimeError(_TOO_LATE)

    def become_ordinary(self) -> None:
        """Turn a computed tensor that nothing depends on into an ordinary one.

        Other tools can't handle a tensor without memory: ``parameter.data = deferred`` crashes.
        """
        if any(each() is not None for each in self._derived):
            return
        numbers = self.compute()
        numbers = numbers.view_as(numbers)  # a tensor that nothing else holds
        for parent in self._parents:  # torch doesn't swap what has weak references
            parent._derived = [each for each in parent._derived if each() is not self]
        torch.utils.swap_tensors(self, numbers)

    def settle(self) -> None:
        """Compute this tensor and all that depend on it, before it is changed in place."""
        *_, whole = self.and_wholes()
        whole._settle()

    def _settle(self) -> None:
        for reference in self._derived:
            if (derived := reference()) is not None:
                derived._settle()
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
        if func in _OF_GRADIENTS and any(
            isinstance(leaf, Deferred) and leaf.was_attended for leaf in tree_leaves((args, kwargs))
        ):
            if func is not Tensor.register_hook or not _is_of_sharding(*args[1:], **kwargs):
                raise RuntimeError(_NO_GRADIENT)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if changes_in_place(func, kwargs):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Deferred):
                    leaf.settle()
        return func(*computed(args), **computed(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} got {_UNCOMPUTED}")


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


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
_NO_GRADIENT = (
    "these attention weights were not computed, so the loss has no gradient with respect to them; "
    "call the model without trifuse.attention()"
)


def _refuse_gradient(grad: Tensor | None) -> None:
    """Raise an error for a gradient, because it is unknown where it would go.

    No gradient, or zeros, arrive for a result that nothing used, as from a module's backward hooks.
    """
    if grad is not None and grad.any():
        raise RuntimeError(f"a function with a backward of its own got {_UNCOMPUTED}")


def _is_of_sharding(hook: Any) -> bool:
    """Whether a hook is FSDP's, which waits for the first gradient of any result of a module."""
    hook = getattr(hook, "func", hook)  # of functools.partial
    return getattr(hook, "__module__", "").startswith("torch.distributed.")


def computed(arguments: Any) -> Any:
    """Return arguments with the numbers in place of deferred tensors."""
    return tree_map(lambda x: x.compute() if isinstance(x, Deferred) else x, arguments)


class _State(threading.local):
    computing = False
    made: weakref.WeakValueDictionary[int, Deferred] | None = None  # since ``collecting`` began


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


def collect(made: Deferred) -> None:
    """Note a tensor that must not outlive the innermost ``collecting`` uncomputed."""
    if _state.made is not None:
        _state.made[id(made)] = made


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """A context that leaves ordinary tensors behind.

    Deferred ones that exist at its end are computed, unless they were attended with: those have
    done their part, and are computed only if something reads them. After an error none is.
    """
    before, _state.made = _state.made, weakref.WeakValueDictionary()
    try:
        yield
        left = [made for made in _state.made.values() if not made.was_attended]
    finally:
        _state.made = before
    for made in left:
        with contextlib.suppress(RuntimeError):  # which is raised where the numbers are used
            made.compute()
    for made in reversed(left):  # what others were made of comes after them
        if made._value is not None:
            with contextlib.suppress(RuntimeError):  # something else holds it: it stays as it is
                made.become_ordinary()


_is_alias_of: Callable[[Tensor, Tensor], bool] = getattr(torch._C, "_is_alias_of")  # noqa: B009


def settle_before(changed: Any) -> None:
    """Compute what is deferred and made of a tensor that is about to be changed in place.

    What was attended with has done its part: it raises an error if it is read afterwards.
    """
    if _state.made is None or not isinstance(changed, Tensor) or isinstance(changed, Deferred):
        return
    for made in list(_state.made.values()):
        waiting = made._value is None and not made.was_attended
        if waiting and any(_is_alias_of(changed, each) for each, _ in made._versions):
            made.settle()


_OPERATORS_IN_PLACE = {
    value for name, value in vars(torch._C.TensorBase).items() if name.startswith("__i")
} | {Tensor.__setitem__}


def changes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call changes ``out``, or else its first argument."""
    return bool(
        func in _OPERATORS_IN_PLACE
        or spellings.is_in_place_name(getattr(func, "__name__", ""))
        or kwargs.get("inplace")
        or "out" in kwargs
    )


_OF_GRADIENTS = {Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad}

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
