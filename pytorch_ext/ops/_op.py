"""Registers ops with torch: one op is a packet of overloads, one per backend, with their rules.

The rules of an overload are its fake, its derivative, its batching rule, its decomposition and its
count of operations. torch applies them wherever the op appears, traced or not.

A single op with a kernel per dispatch key would not suffice. Several backends serve one device, so
the op would need the backend's name as an argument, and its C++ kernel for CPUs would have to call
the Python code of the other backends. Registering the rules for several overloads takes only a
loop.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trifuse import backends
from trifuse._imports import when_imported
from trifuse.backends import ORDER, Call
from trifuse.ops._batching import older_vmap
from trifuse.ops._checks import fail
from trifuse.ops._modes import forward_mode, requires_grad, without_autocast

if "library" in globals():
    raise ImportError("trifuse can't be reloaded: torch keeps its ops; start Python anew")
library = torch.library.Library("trifuse", "DEF")


class Op:
    """An op with one overload per backend, and the rules registered for each overload.

    Args:
        name: such as "attention_forward".
        signature: arguments and returns in torch's schema language, without the name.
        fake: shapes, dtypes and strides of the results.
        vmap: the batching rule, as :func:`torch.library.register_vmap` takes it, with the overload
            to call as an extra first argument.
        derivative: computes the results if a transform needs their derivatives. Its extra first
            argument is the backend.
        decomposition: computes the results in plain torch. Its extra first argument is the backend.
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

        def call(first: Tensor, *args: Any) -> Any:
            served = backends.fallback_backend(self.describe(first, *args), backend)
            if served == backend:
                raise NotImplementedError(
                    f"trifuse::{self.name}.{backend} has no kernel for {first.device}"
                )
            return self.overloads[served](first, *args)

        return call

    def implement_triton(self, operator: str, check: Callable[..., None] | None = None) -> None:
        """Implements the op by its namesake, a launcher in ``trifuse.kernels.<operator>``.

        Args:
            check: raises for wrong values in the arguments.
        """
        fallback = self._fallback("triton")

        def launch(first: Tensor, *args: Any) -> Any:
            if not (first.is_cuda or backends.interpreting()):
                return fallback(first, *args)
            if check is not None:
                check(first, *args)
            # Imported when called, because Triton may not be installed.
            kernels = importlib.import_module(f"trifuse.kernels.{operator}")
            return getattr(kernels, self.name)(first, *args)

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
            if t.is_contiguous():  # the usual case, and faster
                last = t.numel() - 1
            else:
                last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            needed = (t.storage_offset() + last + 1) * t.itemsize
            if needed > t.untyped_storage().nbytes() and t.device.type != "meta":
                shape, held = tuple(t.shape), t.untyped_storage().nbytes()
                raise fail(f"a tensor of shape {shape}", f"{needed} bytes of storage", held)


def register_derivative(overload: str, signature: str, derivative: Callable[..., Any]) -> None:
    """Makes ``derivative`` compute an op's results if a gradient or a tangent is needed.

    Otherwise the op's kernel runs. The extension decides this in C++, so that such a call does not
    enter Python. Without the extension, Python decides.
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


def register_batching(overload: str, rule: Callable[..., Any]) -> None:
    """Registers a rule with ``torch.func.vmap`` and the older vmap behind ``is_grads_batched``."""
    torch.library.register_vmap(f"trifuse::{overload}", rule, lib=library)
    if hasattr(torch._C, "_vmapmode_increment_nesting"):
        library.impl(overload, functools.partial(older_vmap, rule), "Batched")


def register_decomposition(
    op: Any, decomposition: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Registers a decomposition for ``torch.onnx.export`` and :func:`decompositions`.

    The fake is registered too, because fake tensors of symbolic sizes would otherwise go through
    the decomposition.
    """
    torch._decomp.decomposition_table[op] = decomposition
    torch._decomp.meta_table[op] = fake
    _DECOMPOSITIONS[op] = decomposition
    when_imported("torch._inductor.lowering", functools.partial(_register_with_inductor, op))


def _register_with_inductor(op: Any) -> None:
    """Makes Inductor call ``op`` as it is, with the strides that the tracer saw.

    Inductor does so by default, unless the environment variable ``CI`` is set, which most services
    that run tests do. Then it refuses an op that has a decomposition.
    """
    lowering = importlib.import_module("torch._inductor.lowering")
    with contextlib.suppress(AttributeError):  # another version of torch: this is not a public API
        tag = lowering.get_layout_constraint_tag(op, with_default=True)
        lowering.make_fallback(op, lowering.tag_to_layout_constraint(tag), warn=False)


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns a dict that maps each op of trifuse to its formula in plain torch.

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
