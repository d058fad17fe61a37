"""How large an error may be: Monte Carlo arithmetic (Parker, 1997).

A formula in float64 marks each intermediate result, as ``r(x)``. It is evaluated for several
replicas at once, stacked in a first dimension. The first replica is exact. In each of the others, a
mark adds a random error to its input, and to the gradient in the backward. This error is as large
as that of rounding to the dtype of the call. The distance of the replicas from the first is then
the typical error of eager torch in that dtype, without the luck of one particular call. This
distance is the *unit* of errors.

A kernel is allowed ``LIMIT`` units for a single number. Errors of a correct kernel are mostly below
two units; a wrong result is off by thousands in float32. With few replicas a unit can come out
small by chance, so a suspect number is judged again with many.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

REPLICAS, MANY_REPLICAS = 4, 48
AT_ONCE = 8  # replicas evaluated together
LIMIT, SUSPECT = 24.0, 12.0
# In float64 the formula rounds too. This is its error, relative to the largest number of a row.
SAME_DTYPE = 1e-13

_NOISE = (1 << 19) - 1  # a prime, so marks of round sizes start at different places


class Rounding:
    """The marks of one evaluation: ``r = Rounding(torch.float32, 4)``, then ``r(x)``.

    Args:
        dtype: the dtype that eager torch would compute in.
        replicas: number of replicas in addition to the exact one.
        overflow: whether numbers beyond the range of the dtype become infinite in some replicas.
        to_nearest: whether marks round to the nearest number of the dtype instead.
        part: a number; evaluations with different numbers have different errors.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        replicas: int,
        overflow: bool = False,
        to_nearest: bool = False,
        part: int = 0,
    ) -> None:
        self.replicas, self.to_nearest = replicas, to_nearest
        self._place = part * (_NOISE // 7) % _NOISE
        self.dtype = dtype
        self._factor, self._absolute = _pool(dtype)
        self.highest = torch.finfo(dtype).max if overflow else None

    def __call__(self, x: Tensor) -> Tensor:
        return _Mark.apply(x, self)

    def of(self, x: Tensor) -> Tensor:
        """Returns copies of a tensor, one per replica, as a leaf."""
        return x.detach().to(torch.float64).expand(1 + self.replicas, *x.shape).contiguous()

    def noisy(self, x: Tensor) -> Tensor:
        inexact = x[1:]
        if self.to_nearest:
            return torch.cat([x[:1], inexact.to(self.dtype).to(x.dtype)])
        factor, absolute = (n.view_as(inexact) for n in self._some(inexact.numel()))
        moved = torch.addcmul(absolute, inexact, factor)
        if self.highest is not None and self.replicas:
            # The first replica overflows early, the second where the dtype does, the others never.
            # If they disagree, no result is expected.
            for replica, highest in ((0, self.highest / 64), (1, self.highest)):
                one = moved[replica]
                one.copy_(torch.where(one.abs() > highest, one * torch.inf, one))
        return torch.cat([x[:1], moved])

    def _some(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns new errors for every mark. Shared errors would cancel, unlike a kernel's."""
        start, self._place = self._place, (self._place + count) % _NOISE
        if start + count <= _NOISE:
            return self._factor[start : start + count], self._absolute[start : start + count]
        # Repeats the pool. Numbers that then get the same error are too far apart to meet.
        return self._round(self._factor, start, count), self._round(self._absolute, start, count)

    @staticmethod
    def _round(pool: Tensor, start: int, count: int) -> Tensor:
        turns = -(-(start + count) // _NOISE)
        return pool.repeat(turns)[start : start + count]


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
    """Returns 1 + relative errors, and absolute errors: the digits that tiny numbers lose."""
    # The RMS error of rounding to nearest is eps / √12 of the number, or somewhat less.
    normal = 0.3 * torch.randn(_NOISE, generator=_generator, dtype=torch.float64)
    return 1 + torch.finfo(dtype).eps * normal, _smallest(dtype) * normal.roll(1)


_generator = torch.Generator().manual_seed(0)


def _smallest(dtype: torch.dtype) -> float:
    """Returns the error of tiny numbers. Kernels may flush subnormals to 0, except float16's."""
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal


def _smallest_error(dtype: torch.dtype) -> float:
    """Returns the smallest error that counts. The square of a smaller one is 0 in float64."""
    return max(_smallest(dtype), torch.finfo(torch.float64).smallest_normal ** 0.5)


def sigmoid(x: Tensor, r: Rounding) -> Tensor:
    """Returns r(sigmoid(x)). Its derivative is computed from the rounded result, as in torch."""
    return _Activation.apply(x, r, torch.sigmoid, lambda y: y * r(1 - y))


def tanh(x: Tensor, r: Rounding) -> Tensor:
    """Returns r(tanh(x)), likewise. Near ±1, few digits of 1 - tanh² are left."""
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
    """Returns each number's error in units; infinite if NaN or infinity is missing or unexpected.

    Args:
        actual: the kernel's result.
        replicas: the formula's result, float64, (1 + replicas, ...).
        computed_in: the dtype of the call.
    """
    returned_in = actual.dtype
    exact, actual = replicas[0], actual.detach().to(torch.float64)
    eps = torch.finfo(computed_in).eps
    # Near the end of a dtype's range, overflow is a matter of rounding.
    known = (replicas.abs() <= torch.finfo(returned_in).max / 2).all(0)
    inexact = (replicas[1:] - exact).square_().mean(0)
    if not known.all():
        inexact = torch.where(known, inexact, 0.0)
    # The errors of a number's neighbours have the same causes, and more samples are more reliable.
    around = inexact.mean(-1, keepdim=True) if inexact.dim() else inexact
    # The rounding of the result itself.
    last = (0.3 * eps * exact).square_()
    unit = (inexact + around + last).sqrt_() + _smallest_error(computed_in)
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
