"""The activations between the linear layers of feed-forward networks.

In inference they are part of the product before them. In training their derivatives need what the
product returns without them, so they are calls of their own. On a CPU, such a call is one pass over
its tensors, forward and backward; torch's GELU takes several times as long, and a gate is two or
three operations of torch in each direction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from trifuse.ops import _fast_path, _op

Activation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]


def quick_gelu(x: Tensor) -> Tensor:
    """Computes x sigmoid(1.702 x), an approximation of GELU, which CLIP uses.

    Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2.
    """
    return x * (1.702 * x).sigmoid()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Computes activation(x), of any shape."""
    out = _plain(x, None, activation)
    return ACTIVATIONS[activation](x) if out is None else out


def gate(x: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Computes activation(x) * up, rounded once.

    Shazeer, "GLU Variants Improve Transformer" (2020).

    Args:
        x, up: one shape.
        activation: of x.
    """
    out = _plain(x, up, activation)
    return ACTIVATIONS[activation](x) * up if out is None else out


def gate_halves(both: Tensor, activation: Activation, first: int) -> Tensor:
    """As :func:`gate`, of the two halves of (..., 2 features); x is half ``first``, 0 or 1."""
    out = _plain(both, None, activation, first)
    if out is None:
        halves = both.chunk(2, -1)
        out = ACTIVATIONS[activation](halves[first]) * halves[1 - first]
    return out


def _plain(x: Tensor, up: Tensor | None, activation: Activation, first: int = -1) -> Tensor | None:
    """Runs the kernels; None if the call isn't plain (csrc/fast_path/), is ReLU, or isn't valid."""
    fast = _fast_path.extension()
    out: Tensor | None = None
    if fast is not None and activation != "relu":  # torch saves ReLU's result, not its input
        out = fast.activate(x, up, activation, first)
    return out


# The kernels, which the fast path calls below autograd. Each argument is a matrix.
_op.library.define("activate(Tensor x, Tensor? up, str activation) -> Tensor")
_op.library.define("activate_backward(Tensor grad, Tensor x, str activation) -> Tensor")
_op.library.define(
    "gate_backward(Tensor grad, Tensor x, Tensor up, str activation) -> (Tensor, Tensor)"
)
_op.library.define(
    "gate_halves_backward(Tensor grad, Tensor both, int first, str activation) -> Tensor"
)
