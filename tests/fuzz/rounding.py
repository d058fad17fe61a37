"""How far off a result may be: Monte Carlo arithmetic (Parker, 1997).

A formula in float64 marks each intermediate result, as ``r(x)``. It is evaluated for several
replicas at once, stacked in a first dimension. The first is exact. In each of the others a mark
adds an error of its own, as large as rounding to the dtype of the call is, to what passes it and to
the gradient that comes back. How far the replicas lie from the first is then how far eager torch
would, computing the formula in that dtype, without the luck of one particular call: the *unit* that
errors are measured in.

A kernel is allowed ``LIMIT`` units for a single number. Its own errors are mostly under two, and
what is computed wrongly is off by thousands in float32. With few replicas a unit can come out small
by chance, so a number that seems wrong is judged again by many.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

REPLICAS, MANY_REPLICAS = 4, 48
LIMIT, SUSPECT = 24.0, 12.0
# What both have that are computed in float64, beside the units of one that is exact.
SAME_DTYPE = 1e-13

_NOISE = 1 << 19


class Rounding:
    """The marks of one evaluation: ``r = Rounding(torch.float32, 4)``, then ``r(x)``.

    Args:
        dtype: what eager torch would compute in.
        replicas: how many beside the exact one.
        overflow: whether numbers past the end of the dtype become infinite in some of the replicas.
    """

    def __init__(self, dtype: torch.dtype, replicas: int, overflow: bool = False) -> None:
        self.replicas = replicas
        self._place = 0
        self.dtype = dtype
        self._factor, self._absolute = _pool(dtype)
        self.highest = torch.finfo(dtype).max if overflow else None

    def __call__(self, x: Tensor) -> Tensor:
        return _Mark.apply(x, self)

    def of(self, x: Tensor) -> Tensor:
        """A tensor, once for each replica, as a leaf."""
        return x.detach().to(torch.float64).expand(1 + self.replicas, *x.shape).contiguous()

    def noisy(self, x: Tensor) -> Tensor:
        inexact = x[1:]
        factor, absolute = (n.view_as(inexact) for n in self._some(inexact.numel()))
        moved = torch.addcmul(absolute, inexact, factor)
        if self.highest is not None and self.replicas:
            # In the first early, in the last never: where they differ, nothing can be expected.
            for replica, highest in ((0, self.highest / 64), (1, self.highest)):
                one = moved[replica]
                one.copy_(torch.where(one.abs() > highest, one * torch.inf, one))
        return torch.cat([x[:1], moved])

    def _some(self, count: int) -> tuple[Tensor, Tensor]:
        """Others at every mark, or errors would cancel as they do not in a kernel."""
        if count > _NOISE:  # numbers so far apart do not meet
            repeats = -(-count // _NOISE)
            return self._factor.repeat(repeats)[:count], self._absolute.repeat(repeats)[:count]
        if self._place + count > _NOISE:
            self._place = 0
        some = slice(self._place, self._place + count)
        self._place += count
        return self._factor[some], self._absolute[some]


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rounding: Rounding) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.rounding = rounding
        return rounding.noisy(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return _Mark.apply(grad, ctx.rounding), None


@functools.cache
def _pool(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """1 plus relative errors, and absolute ones: what is lost of numbers below the smallest."""
    # Rounded to nearest, a number is off by eps / √12 of itself on average, or somewhat less.
    normal = 0.3 * torch.randn(_NOISE, generator=_generator, dtype=torch.float64)
    return 1 + torch.finfo(dtype).eps * normal, _smallest(dtype) * normal.roll(1)


_generator = torch.Generator().manual_seed(0)


def _smallest(dtype: torch.dtype) -> float:
    """Below it digits are lost: kernels may take such numbers for 0, but for float16's."""
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal


def sigmoid(x: Tensor, r: Rounding) -> Tensor:
    """r(sigmoid(x)), whose derivative is computed of what was rounded, as it is in torch."""
    return _Activation.apply(x, r, torch.sigmoid, lambda y: y * r(1 - y))


def tanh(x: Tensor, r: Rounding) -> Tensor:
    """Likewise: near ±1 few digits of 1 - tanh² are left."""
    return _Activation.apply(x, r, torch.tanh, lambda y: 1 - r(y * y))


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r, function, derivative):  # type: ignore[no-untyped-def]
        y = r.noisy(function(x))
        ctx.save_for_backward(y)
        ctx.r, ctx.derivative = r, derivative
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        return ctx.r(grad * ctx.derivative(y)), None, None, None


def units_off(actual: Tensor, replicas: Tensor, computed_in: torch.dtype) -> Tensor:
    """How many units each number is off; infinite where it is NaN or not, and should be the other.

    Args:
        actual: what a kernel gave.
        replicas: float64, (1 + replicas, ...), what the formula gave.
        computed_in: the dtype of the call.
    """
    returned_in = actual.dtype
    exact, actual = replicas[0], actual.detach().to(torch.float64)
    eps = torch.finfo(computed_in).eps
    # Nothing is known of what passes the end of a dtype.
    known = (replicas.abs() <= torch.finfo(returned_in).max / 2).all(0)
    inexact = (replicas[1:] - exact).square_().mean(0)
    if not known.all():
        inexact = torch.where(known, inexact, 0.0)
    # Its neighbours' errors have the same causes, and of more of them more is known.
    around = inexact.mean(-1, keepdim=True) if inexact.dim() else inexact
    # The last rounding, into what is returned.
    last = (0.3 * eps * exact).square_()
    unit = (inexact + around + last).sqrt_() + _smallest(computed_in)
    error = (actual - exact).abs_()
    if computed_in == torch.float64:
        size = torch.where(known, exact, 0.0).abs()
        size = size.amax(-1, keepdim=True) if size.dim() and size.shape[-1] else size
        error = (error - SAME_DTYPE * size).clamp_min_(0)
    units = error / unit
    if known.all() and actual.isfinite().all():
        return units
    return _where_infinite(units, actual, replicas, known)


def _where_infinite(units: Tensor, actual: Tensor, replicas: Tensor, known: Tensor) -> Tensor:
    exact = replicas[0]
    expected_nan, expected_infinite = exact.isnan(), exact.isinf()
    wrong = (expected_nan & ~actual.isnan()) | (expected_infinite & (actual != exact))
    wrong |= known & ~actual.isfinite()
    units = torch.where(known, units, 0.0)
    return torch.where(wrong, torch.inf, units)
