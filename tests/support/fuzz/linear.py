"""``trifuse.ops.linear``, always by our product, even where torch's is faster."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .call import Call, Tensors, draw_modes
from .draws import Draws
from .recurrent import product
from .rounding import Rounding, sigmoid, tanh
from .tensors import Values, draw_layout

# Forces our product; by default a measurement chooses.
os.environ["TRIFUSE_LINEAR"] = "cpp"

# torch multiplies fewer than 64 rows, or fewer than 16 with a packed weight.
ROWS = (64, 65, 67, 70, 80, 16, 17, 31, 33, 1, 0)
MANY_ROWS = (121, 250, 520)
FEATURES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33)
# A panel has 64 output features, and a block 128 input features, or 256 in bfloat16.
MANY_FEATURES = (63, 64, 65, 127, 128, 130, 200, 257, 530)
MOST = 2_000_000  # products of numbers


def draw(d: Draws, kernel: str, dtype: str) -> Call:
    rows = d.choice(MANY_ROWS if d.flag(10) else ROWS)
    features, units = (d.choice(MANY_FEATURES if d.flag(25) else FEATURES) for _ in range(2))
    units = min(units, MOST // max(1, rows * features))
    shape = (rows, features) if d.flag(70) or rows % 2 else (2, rows // 2, features)
    tensors = {}

    def make(name: str, *shape: int, **rest: Any) -> None:
        layout = draw_layout(d, shape)
        tensors[name] = Values(shape, dtype, d.integer(0, 255), layout=layout, **rest)

    make("x", *shape)
    make("weight", units, features, scale=1 / math.sqrt(features))
    if d.flag(60):
        make("bias", units)
    options: dict[str, Any] = {}
    if d.flag(50):
        options["activation"] = d.choice(("relu", "gelu", "gelu_tanh", "quick_gelu", "silu"))
    entry_point = d.choice(("once", "packed", "gated", "frozen", "gated_frozen"))
    frozen = entry_point.endswith("frozen")
    if entry_point.startswith("gated"):
        options.setdefault("activation", "silu")
        make("up", units, features, scale=1 / math.sqrt(features))
        if d.flag(60):
            make("up_bias", units)
    call = Call("linear", kernel, dtype, tensors, options, entry_point)
    differentiable = [n for n in tensors if not (frozen and n in ("weight", "up"))]
    results = {"out": Values((*shape[:-1], units), dtype)}
    call = draw_modes(d, call, differentiable, results, second=False)
    ours = entry_point == "once" and rows >= 64
    return dataclasses.replace(call, same_bits=call.same_bits and ours)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Calls with one PackedWeight, for the weight, for another, and for the first again."""
    from trifuse.ops._linear_weights import PackedWeight
    from trifuse.ops.linear import linear

    packed = PackedWeight()
    with torch.no_grad():
        for _ in range(3):
            linear(x, weight, bias, packed=packed, **options)
        other = weight.detach().mT.reshape(weight.shape).contiguous() * 2
        linear(x, other, bias, packed=packed, **options)
    return linear(x, weight, bias, packed=packed, **options)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: Any,
) -> Tensor:
    """Calls with packed weights that held others before, and in parts if one product can't."""
    from trifuse.ops._linear_weights import PackedWeight
    from trifuse.ops.activations import ACTIVATIONS
    from trifuse.ops.linear import gated_linear, linear

    packed, biases = (PackedWeight(), PackedWeight()), (bias, up_bias)
    with torch.no_grad():
        for weights in ((up, weight), (weight, up), (weight, up)):
            gated_linear(x, weights, biases, activation=activation, packed=packed)
    out = gated_linear(x, (weight, up), biases, activation=activation, packed=packed)
    if out is not None:
        return out
    return ACTIVATIONS[activation](linear(x, weight, bias)) * linear(x, up, up_bias)


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    from trifuse.ops._linear_weights import FrozenWeight
    from trifuse.ops.linear import linear_frozen

    return linear_frozen(x, FrozenWeight(weight), bias, **options)


def gated_frozen_linear(
    x: Tensor,
    weight: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: Any,
) -> Tensor:
    """Calls with weights in one allocation, and in parts if one product can't serve the call."""
    from trifuse.ops._linear_weights import FrozenWeight
    from trifuse.ops.linear import gated_linear_frozen, linear_frozen

    first, second = FrozenWeight.pack_all([weight, up])
    biases = (bias, up_bias)
    out = gated_linear_frozen(x, (first, second), biases, activation=activation)
    if out is not None:
        return out
    gate = linear_frozen(x, first, bias, activation=activation)
    return gate * linear_frozen(x, second, up_bias)


_PATHS = {
    "once": "trifuse.ops.linear.linear",
    "packed": "fuzz.linear.packed_linear",
    "gated": "fuzz.linear.gated_linear",
    "frozen": "fuzz.linear.frozen_linear",
    "gated_frozen": "fuzz.linear.gated_frozen_linear",
}


def arguments(call: Call, tensors: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return _PATHS[call.entry_point], {**tensors, **call.options}


def outputs(call: Call, result: Any) -> Tensors:
    return {"out": result}


def formula(call: Call, tensors: Tensors, r: Rounding) -> Tensors:
    x = tensors["x"]
    flat = x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])
    out = product(flat, tensors["weight"], r)
    if "bias" in tensors:
        out = r(out + tensors["bias"][:, None])
    match call.options.get("activation"):
        case "relu":
            # By the sign of each replica, because rounding decides whether a number near 0 passes.
            out = r(out * (out.detach() > 0))
        case "gelu":
            out = r(r(out) * r(0.5 * (1 + r(torch.erf(r(out) / math.sqrt(2))))))
        case "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (out + 0.044715 * out**3)
            out = r(r(out) * r(0.5 * (1 + tanh(r(inner), r))))
        case "quick_gelu":
            out = r(r(out) * sigmoid(r(1.702 * out), r))
        case "silu":
            out = r(r(out) * sigmoid(out, r))
    if "up" in tensors:
        other = product(flat, tensors["up"], r)
        if "up_bias" in tensors:
            other = r(other + tensors["up_bias"][:, None])
        out = r(r(out) * r(other))
    return {
        "out": out.view(*x.shape[:-1], -1)
        if x.numel()
        else out.new_zeros(*x.shape[:-1], out.shape[-1])
    }


def poison(call: Call, tensors: Tensors, value: float) -> None:
    """Does nothing: every element is read."""


def first(call: Call, tensors: Tensors) -> tuple[Tensors, Mapping[str, Any]] | None:
    """Returns None: torch may multiply the rows of a smaller batch."""
    return None
