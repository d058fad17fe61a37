"""bfloat16 products by two multiply-adds for a pair have the bits of the dot product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from bfloat16_inputs import MASKINGS, masked, numbers
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


def bits(x: Tensor) -> Tensor:
    """Returns the bits of bfloat16 numbers; all NaN have the same."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int16)


def assert_equal_bits(call: Callable[[], list[Tensor]]) -> None:
    assert backends._C is not None
    results = []
    for split in (True, False):
        backends._C.split_pairs(split)
        torch.manual_seed(0)
        results.append(call())
    for one, other in zip(*results, strict=True):
        assert torch.equal(bits(one), bits(other))


def with_gradients(call: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = call(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, torch.randn_like(result))]


@pytest.mark.parametrize("M", [1, 3, 6, 7, 13, 100])
def test_linear(M):
    for N, K in itertools.product((1, 33, 130), (1, 2, 31, 64, 255, 600)):
        x, weight = numbers(M, K), numbers(N, K)
        assert_equal_bits(lambda: [torch.ops.trifuse.linear(x, weight, None, None)])  # noqa: B023


def test_subnormal_products_and_sums_count_as_zero():
    """The products are 4e-40; without the mode, 64 of them are a normal number."""
    small = torch.full((20, 64), 2e-20).bfloat16()
    assert_equal_bits(lambda: [torch.ops.trifuse.linear(small, small[:16], None, None)])
    assert torch.ops.trifuse.linear(small, small[:16], None, None).eq(0).all()


def test_a_sum_that_is_rounded_up_to_the_smallest_normal_number():
    x, weight = torch.zeros(20, 64), torch.zeros(16, 64)
    x[:, 0], weight[:, 0] = -(2.0**-76), 2.0**-76
    x[:, 1], weight[:, 1] = 2.0**-63, 2.0**-63
    assert_equal_bits(
        lambda: [torch.ops.trifuse.linear(x.bfloat16(), weight.bfloat16(), None, None)]
    )


def test_products_that_overflow_or_are_undefined():
    large, other = torch.full((20, 64), 3e38).bfloat16(), torch.full((16, 64), 2.0).bfloat16()
    other[1::2, 1::2] *= -1
    large[3, 5], large[4, 7] = torch.nan, torch.inf
    assert_equal_bits(lambda: [torch.ops.trifuse.linear(large, other, None, None)])


@pytest.mark.parametrize("Lq", [1, 3, 6, 8, 17, 80])
@pytest.mark.parametrize("E", [64, 80, 5, 300])
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


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("masking", MASKINGS)
def test_few_queries_have_the_bits_of_many(split, masking):
    """Theirs are multiplied by the values as they are stored, others' by pairs of them."""
    assert backends._C is not None
    backends._C.split_pairs(split)
    sizes = itertools.product((1, 3, 4), (1, 2), (32, 7), (32, 64, 96), (1, 47, 192))
    for heads, Lq, E, Ev, Lk in sizes:  # heads of one key head: a task has heads · Lq rows
        query, key, value = numbers(2, heads, 20, E), numbers(2, 1, Lk, E), numbers(2, 1, Lk, Ev)
        value[0, 0, :, 0] *= 2.0**-126  # partial outputs near the smallest normal number
        options = masked(masking, value)

        def call(q: Tensor) -> Tensor:
            torch.manual_seed(0)
            return trifuse.scaled_dot_product_attention(
                q,
                key,  # noqa: B023
                value,  # noqa: B023
                enable_gqa=True,
                **options,  # noqa: B023
            )

        few, many = call(query[:, :, :Lq]), call(query)[:, :, :Lq]
        assert torch.equal(bits(few), bits(many)), (heads, Lq, E, Ev, Lk)


def test_a_partial_output_that_is_subnormal():
    """It is added as it is, whatever the number of queries: only products have the mode."""
    smallest, zero = 2.0**-126, torch.zeros(1, 1, 192, 32).bfloat16()
    value, mask = zero.clone(), torch.zeros(1, 1, 1, 192, dtype=torch.bool)
    mask[..., ::64] = True
    value[0, 0, ::64] = smallest * torch.tensor([[1.5], [-1.0], [3.0]]).bfloat16()
    outs = [
        trifuse.scaled_dot_product_attention(zero[:, :, :n], zero, value, mask) for n in (1, 2, 20)
    ]
    for out in outs:
        assert torch.equal(bits(out), bits(outs[0][:, :, :1].expand_as(out).contiguous()))


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
