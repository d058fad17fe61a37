"""bfloat16 products by two multiply-adds for a pair have the bits of the dot product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import trifuse
from trifuse import backends

pytestmark = pytest.mark.skipif(
    backends._C is None or "AVX512_BF16" not in backends._C.cpu_capabilities(),
    reason="this machine has no dot product of bfloat16",
)


@pytest.fixture(autouse=True)
def _avx512_bf16() -> Iterator[None]:
    assert backends._C is not None
    capability = backends._C.set_cpu_capability("AVX512_BF16")
    split = backends._C.split_pairs(False)
    yield
    backends._C.split_pairs(split)
    backends._C.set_cpu_capability(capability)


def assert_equal_bits(call: Callable[[], list[Tensor]]) -> None:
    results = []
    for split in (True, False):
        backends._C.split_pairs(split)
        torch.manual_seed(0)
        results.append(call())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def numbers(*shape: int) -> Tensor:
    """Returns numbers of many magnitudes, some of them subnormal."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape).float())
    return torch.where(torch.rand(shape) < 0.02, 1e-39 * x, x).bfloat16()


def with_gradients(call: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = call(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, torch.randn_like(result))]


@pytest.mark.parametrize("M", [1, 3, 6, 7, 13, 100])
def test_linear(M):
    for N, K in itertools.product((1, 33, 130), (1, 2, 31, 64, 255, 600)):
        x, weight = numbers(M, K), numbers(N, K)
        assert_equal_bits(lambda: [torch.ops.trifuse.linear(x, weight, None, None)])  # noqa: B023


def test_products_that_are_subnormal_overflow_or_are_undefined():
    """Products and sums below 2^-126 count as 0 in either form."""
    small = torch.full((20, 64), 2e-20).bfloat16() * torch.randn(20, 64).bfloat16()
    large, other = torch.full((20, 64), 3e38).bfloat16(), torch.full((16, 64), 2.0).bfloat16()
    other[1::2, 1::2] *= -1
    large[3, 5], large[4, 7] = torch.nan, torch.inf
    for x, weight in ((small, small[:16]), (large, other)):
        assert_equal_bits(lambda: [torch.ops.trifuse.linear(x, weight, None, None)])  # noqa: B023


@pytest.mark.parametrize("Lq", [1, 3, 16, 17, 80])
@pytest.mark.parametrize("E", [64, 80, 5])
def test_attention(Lq, E):
    query, key, value = (torch.randn(2, 4, L, E).bfloat16() for L in (Lq, 90, 90))
    for options in ({"key_lengths": torch.tensor([90, 71])}, {"is_causal": True}):
        assert_equal_bits(
            lambda: with_gradients(
                lambda *qkv: trifuse.scaled_dot_product_attention(*qkv, **options),  # noqa: B023
                query,
                key,
                value,
            )
        )


@pytest.mark.parametrize("module", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_recurrent_layers(module, rows):
    for inputs, units in ((5, 24), (64, 72), (300, 40)):
        layer = getattr(trifuse.nn, module)(inputs, units).bfloat16()
        x = torch.randn(3, rows, inputs).bfloat16()

        def call() -> list[Tensor]:
            layer.zero_grad()  # noqa: B023
            leaf = x.detach().requires_grad_()  # noqa: B023
            output = layer(leaf)[0]  # noqa: B023
            output.backward(torch.randn_like(output))
            gradients = [leaf.grad, *(p.grad for p in layer.parameters())]  # noqa: B023
            return [output.detach(), *(g for g in gradients if g is not None)]

        assert_equal_bits(call)
