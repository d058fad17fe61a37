"""Linear layers on trifuse's CPU matrix product, where it is faster than torch's own.

torch multiplies float32 matrices with MKL, which reaches less than half of some CPUs' peak. Here
the activation is fused into the product, an unchanged weight is packed only once, and results come
from cached memory (csrc/cpu/memory.h). A table of CPUs decides whether this product is used; in all
other cases (other devices and dtypes, few rows, torch.func, tracing) this is
``torch.nn.functional.linear``.

The environment variable ``TRIFUSE_LINEAR`` ("cpp" or "torch") overrides the table.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from trifuse.ops import _fast_path, _modes, _sharding
from trifuse.ops._linear_choice import ROWS_WORTH_PACKING, choose, chosen
from trifuse.ops._linear_of_parts import linear_of_parts
from trifuse.ops._linear_product import product, torch_linear
from trifuse.ops._linear_weights import FrozenWeight, PackedWeight
from trifuse.ops.activations import Activation, activate


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    packed: PackedWeight | None = None,
) -> Tensor:
    """``torch.nn.functional.linear``, optionally followed by an activation.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,).
        activation: "relu", "gelu", "gelu_tanh" (``approximate="tanh"``), "quick_gelu"
            (x sigmoid(1.702 x)) or "silu". Fused into the product; if a gradient is needed, only
            ReLU is fused.
        packed: keeps this weight's packed form between calls that need no gradient.

    Returns:
        (..., out_features).
    """
    if is_elsewhere(x, weight):
        return torch_linear(x, weight, bias, activation)
    choice = chosen(x.dtype)
    if choice.faster and (fast := _fast_path.extension()) is not None:
        unpacked_below = ROWS_WORTH_CHECKING if choice.inference else 0
        recorded_from = ROWS_WORTH_PACKING if choice.training else _NEVER
        out: Tensor | None = fast.linear(
            x, weight, bias, activation, None, None, unpacked_below, recorded_from
        )
        if out is not None:
            if packed is not None and out.requires_grad:
                packed.clear()
            return out
    if _sharding.placements(weight) is not None:
        return linear_of_parts(x, weight, bias, activation)
    autocast, dtype = _compute_dtype(x)
    if not _serves(x, weight, bias, dtype, autocast):
        return torch_linear(x, weight, bias, activation)
    needs_grad = _modes.requires_grad(x, weight, bias)
    if needs_grad and packed is not None:
        packed.clear()
    if needs_grad or torch.compiler.is_compiling():
        return _differentiable(x, weight, bias, activation, dtype)
    out = _infer(x, (weight,), (bias,), activation, (packed,), dtype)
    return torch_linear(x, weight, bias, activation) if out is None else out


def gated_linear(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    *,
    activation: Activation,
    packed: tuple[PackedWeight | None, PackedWeight | None] = (None, None),
) -> Tensor | None:
    """Computes activation(x Gᵀ + b) * (x Uᵀ + c) as one product, in inference.

    This is the first half of gated feed-forward networks: SwiGLU with SiLU, GEGLU with GELU
    (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        x: (..., in_features).
        weights: G and U, (out_features, in_features) each.
        biases: b and c, (out_features,) each.
        activation: as in :func:`linear`.
        packed: keep the packed forms of G and U, as in :func:`linear`.

    Returns:
        (..., out_features); None if a gradient is needed, or if trifuse's product doesn't serve the
        call. Then the two linear layers must be computed separately.
    """
    (weight, up), (bias, up_bias) = weights, biases
    if weight.shape != up.shape or is_elsewhere(x, weight):
        return None
    if (fast := _fast_path.extension()) is not None and chosen(x.dtype).inference:
        out: Tensor | None = fast.linear(
            x, weight, bias, activation, up, up_bias, ROWS_WORTH_CHECKING, _NEVER
        )
        if out is not None:
            return out
    autocast, dtype = _compute_dtype(x)
    if torch.compiler.is_compiling() or not all(
        _serves(x, *each, dtype, autocast) for each in zip(weights, biases, strict=True)
    ):
        return None
    if _modes.requires_grad(x, weight, up, bias, up_bias):
        for each in packed:
            if each is not None:
                each.clear()
        return None
    return _infer(x, weights, biases, activation, packed, dtype)


def linear_frozen(
    x: Tensor,
    weight: FrozenWeight,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """As :func:`linear`, with a frozen weight.

    The packed product serves calls of any number of rows that need no gradient, in the weight's own
    dtype. All others, such as those under ``torch.func``, unpack the weight first. A program of
    torch.export holds the unpacked weight as a constant.
    """
    fast = _fast_path.extension()
    if fast is not None and x.dtype == weight.dtype and weight.is_readable():
        served: Tensor | None = fast.linear_packed(
            x, weight.packed, *weight.shape, bias, activation, None, None
        )
        if served is not None:
            return served
    if _modes.is_exporting():
        return torch_linear(x, weight.as_constant(), bias, activation)
    if not _serves_frozen(x, weight, bias):
        return linear(x, weight.unpack(), bias, activation=activation)
    out: Tensor = torch.ops.trifuse.linear_packed(
        x.reshape(-1, x.shape[-1]), weight.packed, weight.shape[0], bias, activation
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def gated_linear_frozen(
    x: Tensor,
    weights: tuple[FrozenWeight, FrozenWeight],
    biases: tuple[Tensor | None, Tensor | None],
    *,
    activation: Activation,
) -> Tensor | None:
    """As :func:`gated_linear`, with frozen weights."""
    (weight, up), (bias, up_bias) = weights, biases
    if weight.shape != up.shape or weight.dtype != up.dtype:
        return None
    fast = _fast_path.extension()
    if fast is not None and x.dtype == weight.dtype and weight.is_readable() and up.is_readable():
        served: Tensor | None = fast.linear_packed(
            x, weight.packed, *weight.shape, bias, activation, up.packed, up_bias
        )
        if served is not None:
            return served
    if _modes.is_exporting() or not all(
        _serves_frozen(x, *each) for each in zip(weights, biases, strict=True)
    ):
        return None
    out: Tensor = torch.ops.trifuse.linear_packed(
        x.reshape(-1, x.shape[-1]), weight.packed, weight.shape[0], bias, activation, up.packed,
        up_bias,
    )  # fmt: skip
    return out.view(*x.shape[:-1], weight.shape[0])


_PLAIN = (Tensor, torch.nn.Parameter)
_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def is_elsewhere(x: Tensor, weight: Tensor) -> bool:
    """Returns whether plain tensors are on another device than a CPU, so that torch serves them.

    This is checked first, because on a GPU every microsecond of Python counts.
    """
    return type(x) is Tensor and type(weight) in _PLAIN and not x.is_cpu


def _compute_dtype(x: Tensor) -> tuple[bool, torch.dtype]:
    """Returns whether autocast is on, and the dtype in which a product with x is computed."""
    autocast = torch.is_autocast_enabled("cpu")
    return autocast, torch.get_autocast_dtype("cpu") if autocast else x.dtype


def _serves(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    autocast: bool,
) -> bool:
    """Returns whether trifuse's product can compute this call, and is faster in some use."""
    if torch.jit.is_tracing():
        return False
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if (
            type(tensor) not in _PLAIN
            or not tensor.is_cpu
            or tensor.layout != torch.strided
            or tensor.is_nested
            or not (tensor.dtype == dtype or (autocast and tensor.dtype in _AUTOCAST))
        ):
            return False
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return False  # F.linear raises the error
    if bias is not None and bias.shape != weight.shape[:1]:
        return False  # F.linear broadcasts it
    if x.numel() == 0 or weight.numel() == 0:
        return False
    if torch.compiler.is_compiling():
        # An exported program serves any number of rows, on any CPU.
        return chosen(dtype).faster and not _modes.is_exporting()
    return not _modes.is_watched() and choose(dtype).faster


def _serves_frozen(x: Tensor, weight: FrozenWeight, bias: Tensor | None) -> bool:
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != weight.dtype:
        return False
    tensors = (x,) if bias is None else (x, bias)
    if any(t.dtype != weight.dtype or t.device.type != "cpu" for t in tensors):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    if x.dim() == 0 or x.shape[-1] != weight.shape[1] or x.numel() == 0:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if torch.compiler.is_compiling():
        return True
    return (
        all(type(t) in _PLAIN and not t.is_nested for t in tensors)
        and x.layout == torch.strided
        and weight.is_readable()
        and not torch.jit.is_tracing()
        and not _modes.is_watched()
    )


# Inference keeps a packed weight, and checks that it is unchanged, from this many rows on. With
# fewer rows, each task of a product packs the part that it reads. Then 16 rows take 0.6 times as
# long, and 512 rows as long as with a kept weight.
ROWS_WORTH_CHECKING = 512
_NEVER = sys.maxsize
# The same under autocast, where a weight is converted before it is packed.
_CONVERTED_ROWS_WORTH_CHECKING = 16


def _infer(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    activation: Activation | None,
    packed: tuple[PackedWeight | None, ...],
    dtype: torch.dtype,
) -> Tensor | None:
    """Computes a linear layer, or a gated one of two weights; None if torch's product is better."""
    rows = math.prod(x.shape[:-1])
    if not chosen(dtype).inference:
        return None
    converted = any(weight.dtype != dtype for weight in weights)
    if rows < (_CONVERTED_ROWS_WORTH_CHECKING if converted else ROWS_WORTH_CHECKING):
        packed = (None,) * len(weights)
    if None in packed and converted:
        return None  # autocast keeps the converted weight
    with _modes.without_autocast():
        found = [
            None if each is None else each.get(weight, dtype)
            for each, weight in zip(packed, weights, strict=True)
        ]
        unpacked = any(each is None for each in found) and rows < ROWS_WORTH_CHECKING
        by_columns = any(weight.stride(1) != 1 for weight in weights)
        if unpacked and len(weights) == 2 and by_columns and rows < ROWS_WORTH_PACKING:
            return None  # with few rows, the gated product reads the rows of the weights
        if unpacked:
            forms = [weight.to(dtype) for weight in weights]
        else:
            forms = [
                torch.ops.trifuse.pack_linear(weight.to(dtype)) if each is None else each
                for each, weight in zip(found, weights, strict=True)
            ]
        added = [None if bias is None else bias.to(dtype) for bias in biases]
        flat, N = x.to(dtype).reshape(rows, x.shape[-1]), weights[0].shape[0]
        up = (forms[1], added[1]) if len(weights) == 2 else ()
        if unpacked:
            out = torch.ops.trifuse.linear_unpacked(flat, forms[0], added[0], activation, *up)
        else:
            out = torch.ops.trifuse.linear_packed(flat, forms[0], N, added[0], activation, *up)
    return out.view(*x.shape[:-1], N)


def _differentiable(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    dtype: torch.dtype,
) -> Tensor:
    if not chosen(dtype).training or math.prod(x.shape[:-1]) < ROWS_WORTH_PACKING:
        return torch_linear(x, weight, bias, activation)
    bias = None if bias is None else bias.to(dtype)
    relu = activation == "relu"
    out = product(x.to(dtype), weight.to(dtype), bias, relu)
    # GELU's derivative needs GELU's input, which a fused product does not return.
    return out if activation is None or relu else activate(out, activation)
