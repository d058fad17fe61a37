"""Serve attention in code that calls torch's function or computes the softmax itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from trifuse import written_out
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

    The context holds for the current thread. It may surround a call of a model compiled with
    ``fullgraph=True``, in which it serves the first form. Nesting it changes nothing.

    Three things differ from torch's function. A row whose keys are all masked gives 0. Dropout
    draws other elements from the same seed. Arguments are checked, and
    :class:`trifuse.ArgumentError` names the one that is wrong.

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
    # A traced graph enters its own context, because Dynamo can't read which ones are active.
    if not torch.compiler.is_compiling() and _is_active():
        yield
        return
    with _Attention():
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
            deferred = written_out.begin(func, args, kwargs)
            if deferred is not None:
                return deferred
        return func(*args, **kwargs)


def _serves(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> bool:
    return all(
        t.layout == torch.strided and not t.is_nested and t.dtype in FLOATING
        for t in (query, key, value)
    )
