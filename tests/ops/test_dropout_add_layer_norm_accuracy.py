"""dropout_add_layer_norm's errors against the specification, and that against the definition."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
import torch.nn.functional as F
from attention_cases import normal
from dropout_add_layer_norm_cases import (
    Case,
    cases,
    draw_case,
    dropout_multiplier,
    make,
    record_accuracy,
    run,
)
from hypothesis import given
from numerics import Accuracy

import trifuse

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_call(dtype, every_kernel):
    """Results and every gradient of calls drawn by Hypothesis, on every kernel."""

    @given(cases(dtype))
    def call(case: Case) -> None:
        record_accuracy({kernel: Accuracy(kernel.name) for kernel in every_kernel}, case)

    call()


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_many_calls(dtype, every_kernel):
    """The mean errors over calls drawn independently of each other."""
    accuracies = {kernel: Accuracy(kernel.name) for kernel in every_kernel}
    random = Random(0)
    for _ in range(100):
        record_accuracy(accuracies, draw_case(random, dtype))
    for accuracy in accuracies.values():
        accuracy.conclude()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4097), (2, 65_536), (1, 70_001), (5000, 3)], ids=str)
def test_wide_rows_and_many(every_kernel, shape, dtype):
    accuracies = {kernel: Accuracy(kernel.name) for kernel in every_kernel}
    for options in ({"dropout_p": 0.1}, {"grad_sum": None, "rms_norm": True}):
        record_accuracy(accuracies, make(*shape, dtype=dtype, **options))
    for accuracy in accuracies.values():
        accuracy.conclude()


@pytest.mark.parametrize("N", [17, 768])
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_far_from_zero(kernel, offset, N):
    """The variance of numbers that differ in their last digits only, which E[x²] - E[x]² loses."""
    x = normal(20, N) + offset
    op = getattr(torch.ops.trifuse.dropout_add_layer_norm_forward, kernel.backend)
    out, _, mean, rstd = op(
        x, None, None, None, None, None, 0.0, 1e-12, False, False, torch.float32
    )
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean(-1), rtol=1.2e-7, atol=0)
    expected = exact.var(-1, correction=0).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=0)
    expected = F.layer_norm(exact, (N,), eps=1e-12)
    error, eager_error = (
        (y - expected).abs().max() for y in (out, F.layer_norm(x, (N,), eps=1e-12))
    )
    assert error <= 2 * eager_error
    record_accuracy({kernel: Accuracy(kernel.name)}, make(20, N, x=x, residual=None, x_bias=None))


@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("N", [65, 768, 16_384])
@pytest.mark.parametrize("columns", [slice(5, 6), slice(0, 64), slice(64, None)], ids=str)
def test_some_columns_far_from_the_others(every_kernel, columns, N, rms_norm):
    """One outlier, as in residual streams, and a first strip unlike the rest of its row."""
    x = normal(8, N)
    x[:, columns] += 1e4
    case = make(8, N, x=x, residual=None, x_bias=None, rms_norm=rms_norm)
    record_accuracy({kernel: Accuracy(kernel.name) for kernel in every_kernel}, case)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout_p": 0.3, "grad_sum": None},
        {"rms_norm": True, "bias": None, "residual": None},
        {"dtype": torch.bfloat16, "residual": normal(3, 20, seed=9), "grad_sum": normal(3, 20)},
    ],
    ids=["prenorm", "dropout", "rms_norm", "bfloat16 beside float32"],
)
def test_triton_by_the_same_rule(triton, options):
    """A few calls, to check that the backends agree; Triton's own tests have all others."""
    record_accuracy({triton: Accuracy(triton.name)}, make(3, 20, **options))


@pytest.mark.parametrize("rms_norm", [False, True])
def test_specification_is_the_definition(rms_norm):
    """Compares the reference with the definition, one number at a time in Python's floats."""
    rows, N, eps = 3, 5, 0.01
    case = make(rows, N, dtype=torch.float64, dropout_p=0.4, eps=eps, rms_norm=rms_norm)
    D = dropout_multiplier(case)
    assert set(D.unique().tolist()) == {0.0, 65536 / (65536 - round(0.4 * 65536))}
    with trifuse.backend("eager"):
        results = run(case)
    for i in range(rows):
        s = [
            case.residual[i, j].item() + D[i, j].item() * (case.x[i, j] + case.x_bias[j]).item()
            for j in range(N)
        ]
        assert results["sum"][i].tolist() == pytest.approx(s, rel=1e-14)
        mean = 0.0 if rms_norm else sum(s) / N
        deviation = math.sqrt(sum((value - mean) ** 2 for value in s) / N + eps)
        expected = [
            case.weight[j].item() * (s[j] - mean) / deviation + case.bias[j].item()
            for j in range(N)
        ]
        assert results["out"][i].tolist() == pytest.approx(expected, rel=1e-12)
