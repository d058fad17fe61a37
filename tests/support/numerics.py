"""The numerics rule, and tensors laid out in memory as callers lay them out.

A kernel's error may be at most twice eager torch's in the same dtype: both the largest error of a
tensor and the root mean square, measured against the specification in float64. There are no
tolerances to choose, and 16-bit kernels may err at most twice as much as torch itself.

One small tensor says little about either error. Eager torch is exact by luck on a softmax over one
key, and unlucky on another tensor. So errors are measured in *roundings*: one is the error that
comes from rounding each term of the underlying sums once. The rule applies to the mean over many
calls. For a single call the limit is doubled, and refers to eager torch's error or to the error
that a few roundings can reach by chance, whichever is larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

FACTOR = 2.0
# In a mean, a call counts as at most this many roundings, however ill-conditioned it is.
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
        elsewhere: Callable[[], list[Tensor]] | None = None,
        in_mean: bool = True,
    ) -> None:
        """Holds one tensor of one call to the rule, in the weaker form for a single call.

        Args:
            name: which result it is.
            actual: the kernel's result.
            expected: the specification's result, float64. ``actual`` must be infinite where it is.
            eager: eager torch's result in the dtype of ``actual``.
            rounding: float64, broadcastable, the error of rounding each term of each element once.
            independent: number of independent errors. Default: the number of rows, as the errors of
                a row may share a weight.
            in_mean: whether the call counts in the mean.
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
        # How far a statistic of this many errors may exceed its expectation by chance. With few
        # independent errors, eager torch's may also fall below its expectation.
        few = independent is not None
        if independent is None:
            independent = expected.numel() // max(1, expected.shape[-1])
        for statistic, measure, chance in (
            ("maximum", torch.Tensor.max, 3.0),
            ("RMS", _root_mean_square, 1 + 2 / math.sqrt(max(1, independent))),
        ):
            mine, theirs, one = (measure(x).item() for x in (error, eager_error, unit))
            if actual.dtype == expected.dtype:
                # The specification rounds too, and both round partial sums, which grow larger than
                # the terms by which a rounding is measured.
                theirs += 30 * one
            allowed = 2 * FACTOR * max(theirs * chance if few else theirs, chance * one)
            if mine > allowed and elsewhere is not None:
                nearby = [measure(e).item() for e in elsewhere()]
                allowed = max(allowed, 2 * FACTOR * max(nearby))
                theirs = sum(nearby) / len(nearby)
            assert mine <= allowed, (  # NaN fails too
                f"{self.kernel}, {name}: {statistic} error {mine:.3g} is over {allowed:.3g}; "
                f"eager torch's is {theirs:.3g}, one rounding {one:.3g}"
            )
            if in_mean and one > 0 and actual.dtype != expected.dtype:
                pair = (min(mine / one, CAP), min(theirs / one, CAP))
                self._errors[f"{name}: {statistic}"].append(pair)

    def conclude(self, fewest: int = 1) -> None:
        """Holds the mean over all calls to the rule. This needs a dtype narrower than float64.

        Args:
            fewest: a result of fewer calls than this has no mean.
        """
        means = {what: errors for what, errors in self._errors.items() if len(errors) >= fewest}
        for what, errors in means.items():
            mine, theirs = (sum(column) / len(errors) for column in zip(*errors, strict=True))
            assert mine <= FACTOR * theirs, (
                f"{self.kernel}, {what} error over {len(errors)} calls is {mine:.2f} roundings, "
                f"eager torch's {theirs:.2f}"
            )


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], narrow: float) -> None:
    """Asserts equality within a tolerance: ``narrow`` in 16 bits. It catches wrong results;
    ``Accuracy`` checks their rounding."""
    assert actual.keys() == expected.keys()
    for name, a in actual.items():
        rtol = {torch.float64: 1e-9, torch.float32: 1e-4}.get(a.dtype, narrow)
        torch.testing.assert_close(
            a.double(),
            expected[name].double(),
            rtol=rtol,
            atol=rtol,
            msg=lambda why, name=name: f"{name}: {why}",
        )


def rounding_error(dtype: torch.dtype) -> float:
    """Returns the RMS relative error of rounding a number to nearest.

    The error is uniform within half a unit in the last place: eps / √12. The inverse squares of
    mantissas have the mean 3 / (8 ln 2).
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
    """Returns ``x`` in another memory layout; gaps between its elements hold NaN, or True.

    "transposed" swaps dimensions 1 and 2 in memory, as in a model's split heads; "gaps" keeps every
    second element of the last dimension; "offset" starts at an odd element; "expanded" repeats the
    first entry of the first dimension with stride 0, so it is the only one that changes values.
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
