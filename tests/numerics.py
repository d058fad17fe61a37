"""The numerics rule, and tensors laid out in memory as callers lay them out.

A kernel may be wrong by at most twice what eager torch is wrong by in the same dtype, both measured
against the specification in float64: the largest error of a tensor, and its root mean square. There
are no tolerances to choose, and 16-bit kernels get no leave that torch itself doesn't take.

Eager torch is sometimes exact by luck: a softmax over one key has no error at all. So the allowance
has a floor, the error of rounding each term of a sum once. Rounding errors are as good as
independent, so that floor is eps times the root of the sum of the squared terms; callers supply it.
It is of the size of eager torch's own errors and shrinks with them, which a fixed tolerance would
not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FACTOR = 2.0


def assert_accurate(
    name: str, actual: Tensor, expected: Tensor, eager: Tensor, rounding: Tensor
) -> None:
    """Apply the rule to one tensor.

    Args:
        name: for the message.
        actual: what the kernel computed.
        expected: float64, what the specification says; where it is infinite, so must ``actual`` be.
        eager: what eager torch computed in the dtype of ``actual``.
        rounding: float64 (broadcastable), the error of rounding each term of each element once.
    """
    assert actual.shape == expected.shape, f"{name}: {actual.shape} instead of {expected.shape}"
    infinite = expected.isinf()
    assert torch.equal(actual.double()[infinite], expected[infinite]), f"{name}: infinities differ"
    error = _error(actual, expected)
    assert not error.isnan().any(), f"{name}: {int(error.isnan().sum())} elements are NaN"
    eager_error = _error(eager, expected)
    floor = rounding.expand(expected.shape)[~infinite]
    for statistic, measure in (("maximum", _maximum), ("RMS", _rms)):
        allowed = max(FACTOR * measure(eager_error), measure(floor))
        assert measure(error) <= allowed, (
            f"{name}: {statistic} error {measure(error):.3g} is over {allowed:.3g}; "
            f"eager torch's is {measure(eager_error):.3g}, one rounding {measure(floor):.3g}"
        )


def _error(actual: Tensor, expected: Tensor) -> Tensor:
    finite = ~expected.isinf()
    return (actual.double()[finite] - expected[finite]).abs()


def _maximum(x: Tensor) -> float:
    return x.max().item() if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


# Memory layouts ---------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "transposed", "gaps", "offset", "expanded")


def lay_out(x: Tensor, layout: str) -> Tensor:
    """``x`` in another memory layout; what lies between its elements is NaN, or True.

    "transposed" swaps dimensions 1 and 2 in memory, as a model's split heads are; "gaps" keeps
    every second element of the last dimension; "offset" starts at an odd address; "expanded"
    repeats the first entry of the first dimension with stride 0, so it alone changes values.
    """
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "gaps":
        wide = _poison(x, math.prod(x.shape) * 2).view(*x.shape, 2)[..., 0]
        return wide.copy_(x)
    if layout == "offset":
        return _poison(x, x.numel() + 1)[1:].view(x.shape).copy_(x)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x.contiguous()


def _poison(like: Tensor, count: int) -> Tensor:
    return like.new_full((count,), True if like.dtype == torch.bool else float("nan"))
