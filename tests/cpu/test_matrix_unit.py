"""bfloat16 products on AMX: the software that stands in where there is no unit has its bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from bfloat16_inputs import MASKINGS, masked, numbers
from torch import Tensor

import trifuse
from trifuse import backends

pytestmark = pytest.mark.skipif(
    backends._C is None or not backends._C.has_matrix_unit(), reason="this machine has no AMX"
)


@pytest.fixture(autouse=True)
def _amx() -> Iterator[None]:
    assert backends._C is not None
    before = backends._C.set_cpu_capability("AMX_BF16")
    yield
    backends._C.use_matrix_unit(True)
    backends._C.set_cpu_capability(before)


T = TypeVar("T")


def in_both_ways(call: Callable[[], T]) -> tuple[T, T]:
    assert backends._C is not None
    results = []
    for use in (True, False):
        backends._C.use_matrix_unit(use)
        results.append(call())
    return results[0], results[1]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.trifuse.linear(x, weight, None, None)


@pytest.mark.parametrize("M", [1, 2, 15, 16, 17, 31, 32, 33, 100])
def test_products_have_the_bits_of_the_unit(M):
    for N, K in itertools.product((1, 16, 33, 64, 130), (1, 2, 31, 32, 33, 64, 95, 256, 600)):
        x, weight = numbers(M, K), numbers(N, K)
        unit, software = in_both_ways(lambda: linear(x, weight))  # noqa: B023
        assert torch.equal(unit, software), (M, N, K)


def test_sums_that_overflow_or_are_undefined():
    x, weight = torch.full((20, 64), 3e38).bfloat16(), torch.full((16, 64), 2.0).bfloat16()
    weight[1::2, 1::2] *= -1
    x[3, 5], x[4, 7] = torch.nan, torch.inf
    unit, software = in_both_ways(lambda: linear(x, weight))
    torch.testing.assert_close(unit, software, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("Lq", [1, 3, 16, 17, 80])
@pytest.mark.parametrize("E", [64, 80, 5])
def test_attention_has_the_bits_of_the_unit(Lq, E):
    query, key, value = (torch.randn(2, 4, L, E).bfloat16() for L in (Lq, 90, 90))
    lengths = torch.tensor([90, 71])
    unit, software = in_both_ways(
        lambda: trifuse.scaled_dot_product_attention(query, key, value, key_lengths=lengths)
    )
    assert torch.equal(unit, software)


@pytest.mark.parametrize("masking", MASKINGS)
def test_one_query_has_the_bits_of_many(masking):
    """Its scores are a product with one column, and vectors multiply its values."""
    f = trifuse.scaled_dot_product_attention
    for E, Ev, Lk in itertools.product((32, 64, 160), (32, 64, 96), (1, 2, 15, 17, 47, 64, 130)):
        query, key, value = numbers(2, 3, 1, E), numbers(2, 3, Lk, E), numbers(2, 3, Lk, Ev)
        options = masked(masking, value)

        def call(q: Tensor) -> Tensor:
            torch.manual_seed(0)
            return f(q, key, value, **options)  # noqa: B023

        unit, software = in_both_ways(lambda: call(query))  # noqa: B023
        torch.testing.assert_close(unit, software, rtol=0, atol=0, equal_nan=True)
        backends._C.use_matrix_unit(True)
        many = call(query.repeat(1, 1, 20, 1))[:, :, :1]
        torch.testing.assert_close(unit, many, rtol=0, atol=0, equal_nan=True)


def test_other_code_may_shape_the_registers_between_calls():
    """torch's products of bfloat16 use AMX too."""
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(128, 256).bfloat16()
    expected = linear(x, weight)
    for _ in range(3):
        torch.nn.functional.linear(x, weight)
        assert torch.equal(linear(x, weight), expected)


def recurrent_layer(module: str, rows: int, inputs: int, units: int) -> list[Tensor]:
    """Returns the results of a layer's forward and backward, from the seed."""
    torch.manual_seed(0)
    projection = {"proj_size": 21} if module == "projected LSTM" else {}
    layer = getattr(trifuse.nn, module.split()[-1])(inputs, units, **projection).bfloat16()
    x = torch.randn(3, rows, inputs).bfloat16().requires_grad_()
    output = layer(x)[0]
    output.backward(torch.randn(output.shape).bfloat16())
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(isinstance(g, Tensor) for g in gradients)
    return [output.detach(), *gradients]


RECURRENT = ("LSTM", "projected LSTM", "GRU", "RNN")


@pytest.mark.parametrize("module", RECURRENT)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33])
def test_recurrent_layers_have_the_bits_of_the_unit(module, rows):
    """Their weights are in tiles, of which the last may lack columns and pairs."""
    for sizes in ((5, 24), (64, 72), (300, 40)):
        results = in_both_ways(lambda: recurrent_layer(module, rows, *sizes))  # noqa: B023
        assert all(map(torch.equal, *results)), sizes


@pytest.mark.parametrize("module", RECURRENT)
@pytest.mark.parametrize("rows", [1, 5, 19])
def test_tiles_past_a_recurrent_layers_sizes_are_never_seen(module, rows):
    """Calls work in memory of the calls before, which here held NaN wherever they wrote."""
    expected = recurrent_layer(module, rows, 5, 24)
    for inputs in (5, 70):
        layer = getattr(trifuse.nn, module.split()[-1])(inputs, 90).bfloat16()
        x = torch.full((3, 40, inputs), torch.nan).bfloat16().requires_grad_()
        layer(x)[0].sum().backward()
        results = recurrent_layer(module, rows, 5, 24)
        assert all(map(torch.equal, results, expected))
