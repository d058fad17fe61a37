"""Serve attention in code that calls torch's function or computes the softmax itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor
from torch.nn.functional import normalize as torch_normalize
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointFunction

from trifuse import deferred, written_out
from trifuse.ops._checks import FLOATING


@contextlib.contextmanager
def attention() -> Iterator[None]:
    """Let attention in other libraries' code run on trifuse's kernels inside the ``with``.

    It serves models that :func:`trifuse.fuse` cannot swap, in two forms:

    - calls of ``F.scaled_dot_product_attention``, also by a name it was imported under: timm's
      vision transformers, nanoGPT and many others;
    - attention that is written out, as ``softmax(q @ k.mT * scale + mask) @ v``, with dropout,
      changes of dtype, and splits of batch and heads in between: see :mod:`trifuse.written_out`.
      Its scores and weights are not computed unless something else uses them.

    On a CPU it also serves ``F.normalize`` of the last dimension, as in cosine attention, in calls
    that need a gradient.

    Activation checkpoints (``torch.utils.checkpoint``) that are made inside the context recompute
    inside it, wherever the backward runs.

    The context holds for the current thread, and may be around a call of a model compiled with
    ``fullgraph=True``, in which it serves the first form. Inside itself it changes nothing.

    Three things differ from torch's attention. A row whose keys are all masked gives 0. Dropout
    draws other elements from the same seed. Arguments are checked, and
    :class:`trifuse.ArgumentError` names the one that is wrong. ``F.normalize`` differs by more than
    rounding only for vectors shorter than 1e-8.

    These calls still run on torch's function: those with nested or sparse tensors, those of a
    dtype that trifuse does not have, and those that torch makes inside its own functions
    (``F.multi_head_attention_forward``; :func:`trifuse.fuse` swaps the modules that call it).

    Example:
        >>> import trifuse
        >>> import torch.nn.functional as F
        >>> q = torch.randn(2, 4, 5, 16)
        >>> expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> with trifuse.attention():
        ...     out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.testing.assert_close(out, expected)
    """
    # Graphs are traced with a context of their own: Dynamo can't read which ones are active.
    if torch.compiler.is_compiling():
        with _Attention():
            yield
    elif _is_active():
        yield
    else:
        _watch_checkpoints()
        with deferred.collecting(), _Attention():
            yield


def _is_active() -> bool:
    return any(isinstance(mode, _Attention) for mode in _get_current_function_mode_stack())


class _Attention(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch_attention and _serves(*args, **kwargs):
            return written_out.attend(*args, **kwargs)
        if not torch.compiler.is_compiling():
            scores = written_out.begin(func, args, kwargs)
            if scores is not None:
                return scores
            if func is torch_normalize:
                unit = written_out.normalize(*args, **kwargs)
                if unit is not None:
                    return unit
            if deferred.changes_in_place(func, kwargs):
                deferred.settle_before(kwargs.get("out", args[0] if args else None))
            if func in _SETTERS:  # they read the memory of what they get
                args = deferred.computed(args)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # The result of a product is contiguous, but an attention's has its query's layout.
            if func is Tensor.view and written_out.is_result(args[0]):
                return func(args[0].contiguous(), *args[1:], **kwargs)
            raise


_SETTERS = {getattr(Tensor, name).__set__ for name in ("data", "grad")}


def _serves(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> bool:
    return not isinstance(options.get("scale"), Tensor) and all(
        t.layout == torch.strided and not t.is_nested and t.dtype in FLOATING
        for t in (query, key, value)
    )


# Checkpoints --------------------------------------------------------------------------------------


def _in_context(function: Callable[..., Any], results: bool) -> Callable[..., Any]:
    """Return a function that runs in the context if it is active now.

    Args:
        function: of a checkpoint.
        results: whether its results are used when it runs again. Otherwise it may only save what it
            saved before, and what is deferred at its end stays so.
    """
    if torch.compiler.is_compiling() or not _is_active():
        return function

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if results or _is_active():
            with attention():
                return function(*args, **kwargs)
        with _Attention():
            return function(*args, **kwargs)

    return run


class _Checkpoint(CheckpointFunction):
    """torch's reentrant checkpoint, of a function in the context."""

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return CheckpointFunction.forward(ctx, _in_context(run_function, True), *args)


@functools.cache
def _watch_checkpoints() -> None:
    """Let the checkpoints of torch recompute in the context in which they were made.

    Their backward runs the function again, most often after the context has ended. Without it the
    function would save other tensors and drop other elements. torch keeps autocast's state for
    them, but no modes, and has no place to say so.
    """
    generator = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoints, f"{generator}_impl"):  # the one that checkpoint calls since torch 2.15
        generator += "_impl"
    original = getattr(checkpoints, generator)

    @functools.wraps(original)
    def run_again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(_in_context(function, False), *args, **kwargs)

    setattr(checkpoints, generator, run_again)
    checkpoints.CheckpointFunction = _Checkpoint  # type: ignore[misc]
