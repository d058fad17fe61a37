"""The numerics rule itself: it passes what it should, and can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

import attention_cases
import pytest
import torch
from attention_cases import Case, Results, draw_case, eager_torch, judge, make, record_accuracy
from numerics import LAYOUTS, Accuracy, lay_out, rounding_error
from torch import Tensor

# The rule, on synthetic errors ------------------------------------------------------------------

UNIT = 1e-6


def sample(factor: float, seed: int = 0, rows: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """actual, expected, eager, rounding: ``actual`` is ``factor`` times as wrong as ``eager``."""
    generator = torch.Generator().manual_seed(seed)
    expected, mine, theirs = torch.randn(3, rows, 32, generator=generator, dtype=torch.float64)
    actual = (expected + factor * UNIT * mine).float()
    return actual, expected, (expected + UNIT * theirs).float(), torch.tensor([UNIT]).double()


@pytest.mark.parametrize("factor", [0.0, 1.0, 1.8])
def test_up_to_twice_the_error_passes(factor):
    accuracy = Accuracy("kernel")
    for seed in range(20):
        accuracy.record("out", *sample(factor, seed))
    accuracy.conclude()


def test_more_than_twice_the_error_fails_in_the_mean():
    accuracy = Accuracy("kernel")
    for seed in range(20):
        accuracy.record("out", *sample(2.3, seed))
    with pytest.raises(AssertionError, match=r"kernel, out: \w+ error over 20 calls is 8\.\d+ r"):
        accuracy.conclude()


def test_one_call_far_off_fails_at_once():
    with pytest.raises(AssertionError, match="kernel, out: maximum error"):
        Accuracy("kernel").record("out", *sample(6.0))


def test_one_element_far_off_fails_at_once():
    actual, *rest = sample(1.0)
    actual[17, 3] += 30 * UNIT
    with pytest.raises(AssertionError, match="kernel, out: maximum error"):
        Accuracy("kernel").record("out", actual, *rest)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_fails(value):
    actual, *rest = sample(0.0)
    actual[5, 5] = value
    with pytest.raises(AssertionError):
        Accuracy("kernel").record("out", actual, *rest)


def test_infinities_must_be_the_specification_s():
    actual, expected, eager, rounding = sample(1.0)
    expected[3] = -float("inf")
    with pytest.raises(AssertionError, match="infinities differ"):
        Accuracy("kernel").record("out", actual, expected, eager, rounding)
    actual[3] = eager[3] = -float("inf")
    Accuracy("kernel").record("out", actual, expected, eager, rounding)


def test_shapes_must_be_the_specification_s():
    actual, *rest = sample(1.0)
    with pytest.raises(AssertionError, match="out: "):
        Accuracy("kernel").record("out", actual[:1], *rest)


def test_a_lucky_baseline_leaves_room_for_a_few_roundings():
    actual, expected, _, rounding = sample(1.0, rows=1)
    Accuracy("kernel").record("out", actual, expected, expected.float().double(), rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_error_is_what_rounding_does(dtype):
    x = torch.exp(torch.empty(200_000, dtype=torch.float64).uniform_(-5, 5))
    measured = ((x.to(dtype).double() - x) / x).square().mean().sqrt().item()
    assert rounding_error(dtype) == pytest.approx(measured, rel=0.02)


# The rule, on attention -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rounding_is_of_the_size_of_real_errors(dtype):
    """A unit far above real errors would hide mistakes; one far below would fail good kernels."""
    accuracy, random = Accuracy("eager torch"), Random(1)
    for _ in range(60):
        judged = judge(draw_case(random, dtype))
        for name in Results._fields:
            values = [getattr(x, name) for x in judged]
            if values[0] is not None:
                accuracy.record(name, values[1], *values)
    assert len(accuracy._errors) == 2 * len(Results._fields)
    for what, errors in accuracy._errors.items():
        mean = sum(mine for mine, _ in errors) / len(errors)
        assert 0.1 < mean < 5, what


def _values_in_bfloat16(case: Case) -> Results:
    return eager_torch(dataclasses.replace(case, value=case.value.bfloat16().float()))


def _a_key_forgotten(case: Case) -> Results:
    lengths = torch.full((case.query.shape[0],), case.key.shape[2] - 1)
    return eager_torch(dataclasses.replace(case, options={"key_lengths": lengths}))


def _scale_a_little_off(case: Case) -> Results:
    return eager_torch(dataclasses.replace(case, options={"scale": 0.251}))


def _output_a_little_off(case: Case) -> Results:
    results = eager_torch(case)
    return results._replace(out=results.out * 0.97)


def _one_tile_not_written(case: Case) -> Results:
    results = eager_torch(case)
    results.grad_key[-1, -1, 64:] = 0
    return results


def _no_gradient_of_the_logsumexp(case: Case) -> Results:
    return eager_torch(dataclasses.replace(case, grad_lse=None))


SINGLE_ONLY = {_values_in_bfloat16}  # which is no mistake in 16 bits
MISTAKES = [
    _values_in_bfloat16,
    _a_key_forgotten,
    _scale_a_little_off,
    _output_a_little_off,
    _one_tile_not_written,
    _no_gradient_of_the_logsumexp,
]


@pytest.mark.parametrize(
    ("mistake", "dtype"),
    [
        (mistake, dtype)
        for mistake in MISTAKES
        for dtype in (torch.float32, torch.bfloat16)
        if dtype == torch.float32 or mistake not in SINGLE_ONLY
    ],
)
def test_the_rule_finds_mistakes(monkeypatch, mistake: Callable[[Case], Results], dtype):
    case = make(dtype=dtype)
    judged = judge(case)
    monkeypatch.setattr(attention_cases, "run", mistake)
    with pytest.raises(AssertionError, match="mistaken kernel"):
        record_accuracy(Accuracy("mistaken kernel"), case, judged)


# Layouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_layouts_keep_the_values(layout, dtype):
    x = torch.rand(3, 4, 5, 6) > 0.5 if dtype == torch.bool else torch.rand(3, 4, 5, 6)
    laid = lay_out(x, layout)
    assert torch.equal(laid, x[:1].expand(x.shape) if layout == "expanded" else x)
    strides = {
        "contiguous": (120, 30, 6, 1),
        "transposed": (120, 6, 24, 1),
        "gaps": (240, 60, 12, 2),
        "offset": (120, 30, 6, 1),
        "expanded": (0, 30, 6, 1),
    }
    assert laid.stride() == strides[layout]
    assert laid.storage_offset() == (layout == "offset")
