"""The end of a sublayer: as a module, and as functions for modules that hold its parts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.nn import sizes
from trifuse.nn.dropout import DROPOUTS
from trifuse.nn.linear import is_intercepted
from trifuse.nn.quantization import Unquantizable
from trifuse.ops import _checks
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm


class DropoutAddLayerNorm(nn.LayerNorm):
    """LayerNorm(residual + dropout(x)) over the last dimension, fused.

    It has the parameters of ``torch.nn.LayerNorm``, loads its state_dict, and takes its arguments
    first.

    Args:
        normalized_shape: the size of the last dimension, or a list of that one number.
        eps: added to the variance.
        elementwise_affine: whether there is a weight, and with ``bias`` a bias.
        bias: whether there is a bias.
        device, dtype: of the parameters.
        p: probability of dropping an element of x while training.
        prenorm: also return the sum, as the residual of the next sublayer.
        rms_norm: RMSNorm instead of LayerNorm: no mean is subtracted. With ``bias=False`` the
            state_dict is that of ``torch.nn.RMSNorm``.
        residual_in_fp32: with ``prenorm``, return the sum in float32.

    Raises:
        TypeError: ``p`` or ``eps`` is not a number, or a flag is not a bool.
        ValueError: ``normalized_shape`` is not one size ≥ 0, ``p`` is not in [0, 1], or ``eps`` is
            below 0.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        p: float = 0.0,
        prenorm: bool = False,
        rms_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, Sequence) else [normalized_shape]
        if [*map(_checks.whole_number, shape)] != [*shape] or len(shape) != 1:
            raise _checks.fail("normalized_shape", "one size ≥ 0", repr(normalized_shape))
        super().__init__(
            normalized_shape,
            _checks.epsilon(eps),
            _checks.flag("elementwise_affine", elementwise_affine),
            _checks.flag("bias", bias),
            device,
            dtype,
        )
        self.p = _checks.probability("p", p)
        self.prenorm = _checks.flag("prenorm", prenorm)
        self.rms_norm = _checks.flag("rms_norm", rms_norm)
        self.residual_in_fp32 = _checks.flag("residual_in_fp32", residual_in_fp32)

    def extra_repr(self) -> str:
        flags = ("prenorm", "rms_norm", "residual_in_fp32")
        named = "".join(f", {flag}=True" for flag in flags if getattr(self, flag))
        return f"{super().extra_repr()}, p={self.p}{named}"

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalises; see :func:`trifuse.dropout_add_layer_norm`.

        Args:
            x: (..., N), a sublayer's output.
            residual: broadcastable to (..., N), the sublayer's input.

        Returns:
            (..., N), and with ``prenorm`` the sum, (..., N).

        Raises:
            TypeError, ValueError, RuntimeError: as the operator does.
        """
        return dropout_add_layer_norm(  # type: ignore[call-overload]
            x,
            residual,
            self.weight,
            self.bias,
            self.p,
            self.eps,
            training=self.training,
            prenorm=self.prenorm,
            rms_norm=self.rms_norm,
            residual_in_fp32=self.residual_in_fp32,
        )


@sizes.checked("normalized_shape")
class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension on trifuse's operator (CPU only).

    The constructor, the parameters and their initialisation are torch's own. Norms over several
    dimensions and on other devices are torch's, and so are those that ``torch.compile`` traces:
    Inductor fuses them with the surrounding code.

    Raises:
        ValueError: a size is above 2^60.
    """

    qconfig = Unquantizable(nn.LayerNorm)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises (..., N); see :func:`trifuse.dropout_add_layer_norm`."""
        if (before := normed_before(input, self)) is not None:
            return before
        weight = self.weight
        if (
            input.device.type != "cpu"
            or not input.is_floating_point()
            or input.shape[-1:] != self.normalized_shape
            or not (weight is None or weight.dtype == input.dtype)
            or torch.compiler.is_compiling()
        ):
            return super().forward(input)
        return dropout_add_layer_norm(input, None, weight, self.bias, 0.0, self.eps)


LAYER_NORMS = (nn.LayerNorm, LayerNorm)  # the classes that compute a LayerNorm and nothing else


def add_norm(x: Tensor, residual: Tensor, dropout: nn.Module, norm: nn.Module) -> Tensor:
    """Returns norm(residual + dropout(x)), fused if the modules are torch's own.

    Modules of another class, or with hooks, are called as they are. If the dtypes of x and residual
    differ, as under autocast, the wider one is used, as in torch.
    """
    if (parts := _torch_parts(dropout, norm)) is None:
        out: Tensor = norm(residual + dropout(x))
        return out
    x, residual = same_dtype(x, residual)
    return dropout_add_layer_norm(x, residual, **parts)


def add_then_norm(
    x: Tensor, residual: Tensor, dropout: nn.Module, norm: nn.Module
) -> tuple[Tensor, Tensor]:
    """Returns norm(s) and s = residual + dropout(x): the end of a pre-norm sublayer and the
    beginning of the next. Fused as :func:`add_norm` is."""
    if (parts := _torch_parts(dropout, norm)) is None:
        total = residual + dropout(x)
        return norm(total), total
    x, residual = same_dtype(x, residual)
    return dropout_add_layer_norm(x, residual, prenorm=True, **parts)


def norm_alone(x: Tensor, norm: nn.Module) -> Tensor:
    """Returns norm(x), by the operator if the module is torch's own."""
    if not _is_torch_norm(norm):
        out: Tensor = norm(x)
        return out
    return dropout_add_layer_norm(x, None, norm.weight, norm.bias, 0.0, norm.eps)  # type: ignore


def is_fused(dropout: nn.Module, norm: nn.Module) -> bool:
    """Returns whether :func:`add_norm` and :func:`add_then_norm` fuse the two modules."""
    return _torch_parts(dropout, norm) is not None


def _torch_parts(dropout: nn.Module, norm: nn.Module) -> dict[str, Any] | None:
    """Returns the operator's arguments from two modules, or None if the modules must be called."""
    if (
        not isinstance(dropout, DROPOUTS)
        or type(dropout) not in DROPOUTS
        or dropout.p >= 1
        or is_intercepted(dropout)
        or not _is_torch_norm(norm)
    ):
        return None
    return {
        "weight": norm.weight,
        "bias": norm.bias,
        "dropout_p": dropout.p,
        "eps": norm.eps,
        "training": dropout.training,
    }


def _is_torch_norm(norm: nn.Module) -> bool:
    return (
        isinstance(norm, LAYER_NORMS)
        and type(norm) in LAYER_NORMS
        and len(norm.normalized_shape) == 1
        and not is_intercepted(norm)
    )


# The norm at the beginning of the next layer ------------------------------------------------------


_State = list[tuple[Tensor | None, int | None]]


def _state(norm: nn.Module) -> _State:
    """Returns a norm's parameters with their versions, which change with their values."""
    return [
        (p, None if p is None or p.is_inference() else p._version)
        for p in norm._parameters.values()
    ]


def _is_same(weights: _State, norm: nn.Module) -> bool:
    now = _state(norm)
    return len(now) == len(weights) and all(
        a is b and before == after for (a, before), (b, after) in zip(weights, now, strict=True)
    )


class _Normed(NamedTuple):
    """The sum at a layer's end, and its norm by the norm module at the next layer's beginning."""

    total: weakref.ref[Tensor]
    version: int
    norm: nn.Module
    weights: _State  # of the norm
    normed: Tensor
    grad: bool  # whether gradients were recorded


class _Slot:
    """A thread's place for the one norm that it keeps."""

    kept: _Normed | None = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.slot = _Slot()


_local = _Local()


def keep_normed(total: Tensor, norm: nn.Module, normed: Tensor) -> None:
    """Keeps the norm of a sum, which the module ``norm`` returns if it gets the sum next.

    It is kept no longer than the sum, and each thread keeps at most one. No norm of an inference
    tensor is kept, because such a tensor has no version counter; see :func:`counting_changes`.
    """
    if total.is_inference():
        return
    slot = _local.slot

    def forget(reference: weakref.ref[Tensor]) -> None:  # in any thread
        if slot.kept is not None and slot.kept.total is reference:
            slot.kept = None

    reference = weakref.ref(total, forget)
    grad = torch.is_grad_enabled()
    slot.kept = _Normed(reference, total._version, norm, _state(norm), normed, grad)


def counting_changes(x: Tensor) -> Tensor:
    """Returns x if it has a version counter; otherwise a tensor with one that shares x's storage.

    Inference tensors have none. The tensor returned for one is not an inference tensor.
    """
    if not x.is_inference():
        return x
    with torch.inference_mode(False), torch.no_grad():
        same: Any = torch.empty(0, dtype=x.dtype, device=x.device)
        counting: Tensor = same.set_(x)
    return counting


def saves_its_tensors(grad: bool = True) -> bool:
    """Returns whether tensors that are saved for the backward go through hooks.

    A checkpoint sets them around the code that it recomputes, and then counts the saved tensors. So
    the computation inside must not depend on what was computed before.
    """
    return grad and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def normed_before(x: Tensor, norm: nn.Module) -> Tensor | None:
    """Returns the norm of x if it was kept for this module; None for another or a changed x."""
    if torch.compiler.is_compiling():
        return None
    kept = _local.slot.kept
    if kept is None or kept.norm is not norm or kept.total() is not x:
        return None
    if saves_its_tensors(kept.grad):
        return None
    _local.slot.kept = None
    unchanged = x._version == kept.version and kept.grad == torch.is_grad_enabled()
    return kept.normed if unchanged and _is_same(kept.weights, norm) else None


def same_dtype(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both in the wider of their dtypes."""
    if x.dtype == residual.dtype:
        return x, residual
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.to(dtype), residual.to(dtype)
