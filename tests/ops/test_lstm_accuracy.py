"""Errors of lstm against the specification, and the specification against the definition."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lstm_cases import (
    VARIANTS,
    draw_case,
    draws,
    eager_torch,
    kernel_fixture,
    make,
    record_accuracy,
    run,
    serving,
    specification,
)
from numerics import Accuracy
from tested_kernels import KERNELS as EVERY_KERNEL
from tested_kernels import Kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KERNELS = serving("lstm", EVERY_KERNEL)
kernel = kernel_fixture("lstm")


def accuracies(kernels: list[Kernel] = KERNELS) -> dict[Kernel, Accuracy]:
    return {kernel: Accuracy(kernel.name) for kernel in kernels}


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_call(dtype):
    """Results and every gradient of calls drawn by Hypothesis, on every kernel."""

    @settings(max_examples=settings.default.max_examples // 3)
    @given(st.randoms(use_true_random=False))
    def call(random: Random) -> None:
        record_accuracy(accuracies(), draw_case(random, dtype))

    call()


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_many_calls(dtype):
    """Mean errors over calls drawn independently of each other."""
    measured, random = accuracies(), Random(0)
    for _ in range(40):
        record_accuracy(measured, draw_case(random, dtype))
    for accuracy in measured.values():
        accuracy.conclude()


@pytest.mark.parametrize("what", VARIANTS)
def test_variants(what):
    """Each option alone and all together, in two dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        record_accuracy(accuracies(), make(**VARIANTS[what], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"projection": 40, "cell_clip": 0.8, "proj_clip": 0.5, "reverse": (False, True)},
        {"norm": True, "lengths": [9, 12, 1, 0, 5, 12, 7, 3, 8, 2, 11, 4, 6, 10, 12, 12, 12]},
    ],
    ids=["plain", "projection and clips", "layer norm, lengths"],
)
@pytest.mark.covering(1)
def test_models_sizes(options, dtype):
    """More rows than a tile has, more columns than a strip."""
    measured = accuracies()
    for seed in range(3):  # one maximum is too much a matter of chance
        record_accuracy(measured, make(12, 17, 50, 130, dtype=dtype, seed=seed, **options))
    for accuracy in measured.values():
        accuracy.conclude()


def test_no_drift_over_many_steps():
    """Over 2000 steps, errors stay within twice eager torch's and don't grow."""
    case = make(2000, 2, 3, 5, projection=3, cell_clip=3.0)
    expected, eager = specification(case), eager_torch(case)
    for kernel in KERNELS:
        with kernel.serving():
            actual = run(case)
        for name in ("output", "grad_input", "grad_weight_hh", "grad_weight_hr"):
            mine, theirs = (r[name] - expected[name] for r in (actual, eager))
            assert mine.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt(), name
        error = (actual["output"] - expected["output"]).square().mean((1, 2)).sqrt()
        assert error[-200:].mean() <= 3 * error[:200].mean()


def test_c_adds_up_in_float32(kernel):
    """c grows by 2⁻⁸ a step, which bfloat16 would lose from 1 on."""
    T, H = 1000, 4
    case = make(T, 2, 1, H, dtype=torch.bfloat16, states=False)
    bias = torch.tensor([20.0, 20.0, math.atanh(2**-8), 20.0]).repeat_interleave(H)
    p = case.parameters[0]._replace(
        weight_ih=torch.zeros(4 * H, 1, dtype=torch.bfloat16),
        weight_hh=torch.zeros(4 * H, H, dtype=torch.bfloat16),
        bias_ih=bias,
        bias_hh=None,
    )
    c_n = run(dataclasses.replace(case, parameters=(p,)))["c_n"]
    torch.testing.assert_close(c_n, torch.full_like(c_n, T * 2**-8), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_saturation(kernel, sign, dtype):
    """Gates at ±80, where e^80 is near float32's limit: open or shut, never NaN."""
    T, B, H = 4, 2, 5
    case = make(T, B, 1, H, dtype=dtype, states=True)
    p = case.parameters[0]._replace(
        weight_ih=torch.full((4 * H, 1), 80.0 * sign, dtype=dtype),
        weight_hh=torch.zeros(4 * H, H, dtype=dtype),
        bias_ih=None,
        bias_hh=None,
    )
    case = dataclasses.replace(case, input=torch.ones(T, B, 1, dtype=dtype), parameters=(p,))
    results = run(case)
    if sign > 0:  # c counts the steps
        expected = case.c0[0] + torch.arange(1, T + 1).view(-1, 1, 1)
        torch.testing.assert_close(results["output"], expected.tanh().to(dtype))
        torch.testing.assert_close(results["grad_c0"][0] != 0, torch.ones(B, H, dtype=torch.bool))
    else:  # shut: no c, no gradient
        for name in ("output", "c_n", "grad_h0"):
            assert results[name].abs().max() <= 1e-30, name
    expected = specification(case)
    for name, actual in results.items():
        tolerance = 1e-2 if dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(
            actual.double(), expected[name], rtol=tolerance, atol=tolerance, msg=name
        )


def test_specification_is_the_definition():
    """The reference agrees with the equations, evaluated one Python float at a time."""
    options = {**VARIANTS["everything"], "reverse": (True,), "lengths": (2, 3), "eps": 0.01}
    case = make(3, 2, 2, 3, dtype=torch.float64, **{**options, "projection": 2})
    p, o, results = case.parameters[0], case.op_options, specification(case)
    drawn = draws(case, 0)

    def product(matrix: Any, x: list[float]) -> list[float]:
        return [sum(w * v for w, v in zip(row, x, strict=True)) for row in matrix.tolist()]

    def norm(x: list[float], gain: Any) -> list[float]:
        mean = sum(x) / len(x)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x) + o.eps)
        return [g * (v - mean) / deviation for g, v in zip(gain.tolist(), x, strict=True)]

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    for b in range(2):
        h, c = case.h0[0, b].tolist(), case.c0[0, b].tolist()
        for t in reversed(range(case.lengths[b])):
            hd = [v * d for v, d in zip(h, drawn.dropout[b].tolist(), strict=True)]
            x = norm(product(p.weight_ih, case.input[t, b].tolist()), p.norm_ih_weight)
            y = norm(product(p.weight_hh, hd), p.norm_hh_weight)
            biases = (p.bias_ih + p.bias_hh).tolist()
            a = [sum(terms) for terms in zip(x, y, biases, strict=True)]
            peephole = p.weight_peephole.tolist()
            new_c, gate = [], []
            for j in range(3):
                i = sigmoid(a[j] + peephole[0][j] * c[j])
                f = sigmoid(a[3 + j] + peephole[1][j] * c[j] + o.forget_bias)
                u = f * c[j] + i * math.tanh(a[6 + j])
                new_c.append(min(max(u, -o.cell_clip), o.cell_clip))
                gate.append(sigmoid(a[9 + j] + peephole[2][j] * new_c[j]))
            n = norm(new_c, p.norm_cell_weight)
            shifts = p.norm_cell_bias.tolist()
            m = [g * math.tanh(v + s) for g, v, s in zip(gate, n, shifts, strict=True)]
            q = [min(max(v, -o.proj_clip), o.proj_clip) for v in product(p.weight_hr, m)]
            keep_h, keep_c = drawn.keep_h[t, b].tolist(), drawn.keep_c[t, b].tolist()
            h = [new if keep else old for new, old, keep in zip(q, h, keep_h, strict=True)]
            c = [new if keep else old for new, old, keep in zip(new_c, c, keep_c, strict=True)]
            assert results["output"][t, b].tolist() == pytest.approx(h, rel=1e-12)
        assert results["h_n"][0, b].tolist() == pytest.approx(h, rel=1e-12)
        assert results["c_n"][0, b].tolist() == pytest.approx(c, rel=1e-12)
