"""The numerics rule, and tensors laid out in memory as callers lay them out.

A kernel may be wrong by at most twice what eager torch is wrong by in the same dtype, both measured
against the specification in float64: the largest error of a tensor, and its root mean square. There
are no tolerances to choose, and 16-bit kernels get no leave that torch itself doesn't take.

One small tensor says little about either: eager torch is exact by luck on a softmax over one key,
and unlucky on another. So every error is measured in *roundings*, what rounding each term of the
sums behind it once would come to. The rule holds for the mean over many calls; a single call is
held to twice as much, of eager torch's error or of what a few roundings come to by chance.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

FACTOR = 2.0
# In a mean no call counts for more roundings than this, however ill-conditioned it is.
CAP = 10.0


class Accuracy:
    """The numerics rule over many calls of one kernel: record each, then conclude."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self._errors: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def record(
        self,
        name: str,
        actual: Tensor,
        expected: Tensor,
        eager: Tensor,
        rounding: Tensor,
        independent: int | None = None,
    ) -> None:
        """Hold one tensor of one call to the rule, as far as a single call can be.

        Args:
            name: which result it is.
            actual: what the kernel computed.
            expected: float64, what the specification says; where it is infinite, so must ``actual``
                be.
            eager: what eager torch computed in the dtype of ``actual``.
            rounding: float64, broadcastable, the error of rounding each term of each element once.
            independent: how many of its errors are independent of one another. Default: its rows,
                as the errors of a row may share a weight.
        """
        assert actual.shape == expected.shape, f"{name}: {actual.shape}, not {expected.shape}"
        infinite = expected.isinf()
        assert torch.equal(actual.double()[infinite], expected[infinite]), (
            f"{self.kernel}, {name}: infinities differ"
        )
        if infinite.all():
            return
        error, eager_error = _error(actual, expected), _error(eager, expected)
        unit = rounding.expand(expected.shape)[~infinite]
        # How far above its expectation a statistic of that many errors may come out by chance. Of
        # few that are independent, eager torch's may as well come out below.
        few = independent is not None
        if independent is None:
            independent = expected.numel() // max(1, expected.shape[-1])
        for statistic, measure, chance in (
            ("maximum", torch.Tensor.max, 3.0),
            ("RMS", _root_mean_square, 1 + 2 / math.sqrt(max(1, independent))),
        ):
            mine, theirs, one = (measure(x).item() for x in (error, eager_error, unit))
            if actual.dtype == expected.dtype:
                # The specification rounds too. Beside its errors stand those of partial sums, which
                # outgrow the terms that a rounding is measured by.
                theirs += 30 * one
            allowed = 2 * FACTOR * max(theirs * chance if few else theirs, chance * one)
            assert mine <= allowed, (  # so written that NaN fails
                f"{self.kernel}, {name}: {statistic} error {mine:.3g} is over {allowed:.3g}; "
                f"eager torch's is {theirs:.3g}, one rounding {one:.3g}"
            )
            if one > 0 and actual.dtype != expected.dtype:
                pair = (min(mine / one, CAP), min(theirs / one, CAP))
                self._errors[f"{name}: {statistic}"].append(pair)

    def conclude(self) -> None:
        """Hold the mean over all calls to the rule. float64 has nothing wider to be measured by."""
        for what, errors in self._errors.items():
            mine, theirs = (sum(column) / len(errors) for column in zip(*errors, strict=True))
            assert mine <= FACTOR * theirs, (
                f"{self.kernel}, {what} error over {len(errors)} calls is {mine:.2f} roundings, "
                f"eager torch's {theirs:.2f}"
            )


def rounding_error(dtype: torch.dtype) -> float:
    """The root mean square of what rounding a number to nearest changes it by, relatively.

    Uniform within half a unit in the last place, eps / √12, over mantissas whose inverse squares
    have the mean 3 / (8 ln 2).
    """
    return torch.finfo(dtype).eps * math.sqrt(3 / (8 * math.log(2)) / 12)


def _error(actual: Tensor, expected: Tensor) -> Tensor:
    finite = ~expected.isinf()
    return (actual.double()[finite] - expected[finite]).abs()


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


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
