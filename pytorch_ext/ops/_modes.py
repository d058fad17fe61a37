"""The modes of torch under which a call runs: gradients, autocast and transforms."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def requires_grad(*tensors: Tensor | None) -> bool:
    """Returns whether autograd records a call on these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def transform_active() -> bool:
    """Returns whether a transform may apply to a call, which must then use the dispatcher."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def is_exporting() -> bool:
    """Returns whether torch.export traces the call.

    In a trace of torch 2.11's Dynamo, ``torch.compiler.is_exporting()`` is true under torch.compile
    as well.
    """
    return torch.compiler._is_exporting_flag


def is_readable(x: Tensor) -> bool:
    """Returns whether code may depend on the values of x.

    It may not if reading them waits for a device, if a transform or a fake tensor has none, or if a
    trace would keep what they are now.
    """
    if transform_active() or torch.jit.is_tracing():  # first: Dynamo can't trace the rest
        return False
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def is_known_nonzero(x: Tensor) -> bool:
    """Returns whether code may depend on the values of x, and none of them is 0."""
    return is_readable(x) and bool(x.all())


def is_watched() -> bool:
    """Returns whether torch.func transforms a call or a dispatch mode is active."""
    return transform_active() or torch._C._len_torch_dispatch_stack() > 0


def forward_mode() -> bool:
    """Returns whether a tensor may carry a tangent. The formula serves such calls."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    # A compiled jvp enters its level without setting it in torch.autograd.forward_ad.
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return any(each.key() == torch._C._functorch.TransformType.Jvp for each in transforms)


def is_batched(t: Tensor) -> bool:
    """Returns whether the older vmap batches t: ``autograd.grad(is_grads_batched=True)``."""
    return torch._C._functorch.is_legacy_batchedtensor(t)


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
