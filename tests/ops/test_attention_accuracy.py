"""Attention's errors against the specification, and the specification against the definition."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
import torch
from attention_cases import (
    Case,
    cases,
    draw_case,
    dropout_multiplier,
    judge,
    make,
    pairs,
    record_accuracy,
    run,
)
from hypothesis import given, settings
from numerics import Accuracy
from torch.nn.attention.bias import CausalVariant

import trifuse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_call(dtype, every_kernel):
    """Output, logsumexp and every gradient of calls drawn by Hypothesis, on every kernel."""

    @settings(max_examples=settings.default.max_examples // 3)
    @given(cases(dtype))
    def call(case: Case) -> None:
        judged = judge(case)
        for kernel in every_kernel:
            with kernel.serving():
                record_accuracy(Accuracy(kernel.name), case, judged)

    call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_calls(dtype, every_kernel):
    """The mean errors over calls drawn independently of each other."""
    accuracies = [(kernel, Accuracy(kernel.name)) for kernel in every_kernel]
    random = Random(0)
    for _ in range(60):
        case = draw_case(random, dtype)
        judged = judge(case)
        for kernel, accuracy in accuracies:
            with kernel.serving():
                record_accuracy(accuracy, case, judged)
    for _, accuracy in accuracies:
        accuracy.conclude()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "dropout_p": 0.3, "mask": torch.linspace(-2, 1, 7), "softcap": 2.0},
        {"window": 2, "key_lengths": torch.tensor([7, 0]), "H": 4, "Hkv": 2},
    ],
    ids=["plain", "causal, mask, dropout", "window, lengths, groups"],
)
def test_triton_by_the_same_rule(triton, options):
    """A few calls, to check that the backends agree; test_kernels_attention has all others."""
    case = make(B=2, Lq=5, Lk=7, E=4, **options)
    record_accuracy(Accuracy(triton.name), case, judge(case))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_specification_is_the_definition(with_sinks):
    """Compares the reference with the definition, one pair at a time in Python's floats."""
    B, H, Hkv, Lq, Lk, E, Ev = 2, 4, 2, 4, 5, 3, 2
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = normal(1, H, Lq, Lk)
    mask[0, 1, 2] = float("-inf")
    mask[0, 2, 0, 1] = float("-inf")
    options = {
        "enable_gqa": True,
        "is_causal": CausalVariant.LOWER_RIGHT,
        "window": (3, None),
        "scale": 0.7,
        "softcap": 1.5,
        "key_lengths": torch.tensor([5, 2]),
        "dropout_p": 0.3,
    }
    inputs = (normal(B, H, Lq, E), normal(B, Hkv, Lk, E), normal(B, Hkv, Lk, Ev), mask)
    sinks = 2 * normal(H) if with_sinks else None
    case = Case(*inputs, normal(B, H, Lq, Ev), normal(B, H, Lq), options, sinks)
    multiplier = dropout_multiplier(case)
    assert {0.0, 65536 / (65536 - round(0.3 * 65536))} == set(multiplier.unique().tolist())
    with trifuse.backend("eager"):
        results = run(case)

    empty = 0
    for b, h, i in itertools.product(range(B), range(H), range(Lq)):
        scores = {}
        diagonal = i + Lk - Lq
        for j in range(Lk):
            taking_part = (
                diagonal - 3 <= j <= diagonal
                and j < options["key_lengths"][b]
                and mask[0, h, i, j] > -math.inf
            )
            if taking_part:
                q, k = case.query[b, h, i].tolist(), case.key[b, h // 2, j].tolist()
                dot = sum(x * y for x, y in zip(q, k, strict=True))
                scores[j] = 1.5 * math.tanh(0.7 * dot / 1.5) + mask[0, h, i, j].item()
        assert set(scores) == set(pairs(case)[b, h, i].nonzero().flatten().tolist())
        if not scores:
            empty += 1
            assert results.out[b, h, i].eq(0).all()
            assert results.lse[b, h, i] == (-math.inf if sinks is None else sinks[h])
            continue
        total = sum(math.exp(s) for s in scores.values())
        total += 0.0 if sinks is None else math.exp(sinks[h].item())
        assert results.lse[b, h, i].item() == pytest.approx(math.log(total), rel=1e-12)
        weights = {j: math.exp(s) / total for j, s in scores.items()}
        for e in range(Ev):
            expected = sum(
                multiplier[b, h, i, j].item() * weight * case.value[b, h // 2, j, e].item()
                for j, weight in weights.items()
            )
            assert results.out[b, h, i, e].item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert 0 < empty < B * H * Lq
