"""sigmoid, tanh and exp2 of the C++ kernels: errors in units of the last place, and extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from trifuse import backends

pytestmark = pytest.mark.skipif(backends._C is None, reason="the C++ extension was not built")

CAPABILITIES = [] if backends._C is None else backends._C.cpu_capabilities()


@pytest.fixture(params=CAPABILITIES, autouse=True)
def _capability(request: pytest.FixtureRequest) -> Iterator[None]:
    before = backends._C.set_cpu_capability(request.param)
    yield
    backends._C.set_cpu_capability(before)


def ulps(
    function: Callable[[Tensor], Tensor], truth: Callable[[Tensor], Tensor], x: Tensor
) -> float:
    """Returns the largest error, in units of float32's last place at the true value."""
    expected = truth(x.double())
    place = torch.exp2(expected.abs().log2().floor() - 23)
    return ((function(x).double() - expected).abs() / place).max().item()


def everywhere(low: float, high: float) -> Tensor:
    """Returns numbers spread evenly over the range, and others from tiny magnitudes up."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(200_000, generator=generator) * (high - low) + low
    small = torch.logspace(-30, 0, 50_001)  # an odd number, so that the last vector is partial
    return torch.cat([spread, small * high, -small * abs(low)])


@pytest.mark.parametrize(
    ("name", "low", "high", "bound"),
    [("sigmoid", -87.0, 87.0, 2.5), ("tanh", -20.0, 20.0, 2.5), ("exp2", -120.0, 120.0, 1.5)],
)
def test_error_in_units_of_the_last_place(name, low, high, bound):
    function = getattr(backends._C, name)
    assert ulps(function, getattr(torch, name), everywhere(low, high)) <= bound


def test_extremes():
    x = torch.tensor([math.nan, math.inf, -math.inf, 80.0, -80.0, 0.0, -0.0, 1e-40])
    sigmoid, tanh = backends._C.sigmoid(x), backends._C.tanh(x)
    assert sigmoid[0].isnan()
    assert tanh[0].isnan()
    assert sigmoid[1:3].tolist() == [1, 0]
    assert tanh[1:5].tolist() == [1, -1, 1, -1]
    assert sigmoid[3] == 1
    assert sigmoid[4] == pytest.approx(math.exp(-80), rel=1e-6)
    assert sigmoid[5:7].tolist() == [0.5, 0.5]
    assert tanh[5:7].tolist() == [0, 0]
    assert tanh[6].signbit()


def test_powers_of_two_are_normal_or_zero():
    """Weights that are subnormal would make products slow."""
    x = torch.tensor([-125.5, -126.0, -126.001, -140.0, -200.0, -math.inf, math.nan, 0.0])
    found = backends._C.exp2(x)
    smallest = torch.finfo(torch.float32).tiny
    assert found[:2].tolist() == pytest.approx([2**0.5 * smallest, smallest], rel=1e-6)
    if backends.cpu_capability() in ("AVX2", "AVX512"):
        assert found[2:6].tolist() == [0, 0, 0, 0]
    assert found[6].isnan()
    assert found[7] == 1


def test_dtypes():
    with pytest.raises(TypeError, match="x: expected float32; got Double"):
        backends._C.sigmoid(torch.zeros(1, dtype=torch.float64))
