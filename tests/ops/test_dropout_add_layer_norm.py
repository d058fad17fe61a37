"""dropout_add_layer_norm: results, gradients, dropout, and bits that do not depend on the batch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numerics
import pytest
import torch
import torch.nn.functional as F
from attention_cases import SEED, assert_equal, drawn_seed, normal
from dropout_add_layer_norm_cases import (
    TENSORS,
    Case,
    assert_same_bits,
    cases,
    check_past_two_to_the_31,
    lay_out_rows,
    layouts,
    make,
    run,
    specification,
    sum_dtype,
)
from hypothesis import given, settings
from torch import Tensor
from torch_checks import check_generator

import trifuse
from trifuse.reference import philox

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OP = trifuse.dropout_add_layer_norm


assert_near = functools.partial(numerics.assert_near, narrow=3e-2)


# Results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_options_it_is_layer_norm(kernel, dtype):
    x, weight, bias = (
        normal(*s, seed=i, dtype=dtype) for i, s in enumerate([(6, 40), (40,), (40,)])
    )
    expected = F.layer_norm(x.double(), (40,), weight.double(), bias.double(), 0.01)
    actual = OP(x, None, weight, bias, eps=0.01)
    torch.testing.assert_close(actual, expected.to(dtype))
    torch.testing.assert_close(OP(x), F.layer_norm(x.double(), (40,)).to(dtype))
    expected = F.rms_norm(x.double(), (40,), weight.double(), 0.01)
    actual = OP(x, None, weight, eps=0.01, rms_norm=True)
    torch.testing.assert_close(actual, expected.to(dtype))


@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_that_of_the_returned_sum(cpp_kernel, dtype, rms_norm):
    """By all bits: a layer that gets the sum of another one may normalise it."""
    for N in (5, 64, 100, 768, 3000):
        x, residual, weight = (
            normal(*s, seed=i, dtype=dtype) for i, s in enumerate([(200, N), (200, N), (N,)])
        )
        out, total = OP(x, residual, weight, prenorm=True, rms_norm=rms_norm)
        assert_equal(out, OP(total, None, weight, rms_norm=rms_norm))


@pytest.mark.parametrize("present", list(itertools.product((False, True), repeat=4)), ids=str)
@pytest.mark.parametrize("prenorm", [False, True])
def test_tensors_that_are_left_out(kernel, present, prenorm):
    whole = make(7, 20, dropout_p=0.2)
    absent: dict[str, Any] = {
        name: None for name, there in zip(TENSORS[1:], present, strict=True) if not there
    }
    case = dataclasses.replace(whole, **absent, grad_sum=whole.grad_sum if prenorm else None)
    assert_near(run(case), specification(case))


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [
        *((dtype, residual_dtype) for dtype in DTYPES for residual_dtype in (None, dtype)),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_dtypes_of_results(kernel, dtype, residual_dtype, in_fp32):
    """The sum has the residual's dtype, or float32 on request, and keeps all of its bits."""
    x = normal(3, 70, seed=1, dtype=dtype).requires_grad_()
    residual = None
    if residual_dtype is not None:
        residual = normal(3, 70, seed=2, dtype=residual_dtype).requires_grad_()
    out, total = OP(x, residual, prenorm=True, residual_in_fp32=in_fp32)
    assert out.dtype == dtype
    assert total.dtype == sum_dtype(x, residual, in_fp32)
    exact = x.double() if residual is None else x.double() + residual.double()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert_equal(total, exact.to(wide).to(total.dtype))
    # The sum is normalised as returned, in its dtype.
    torch.testing.assert_close(out, F.layer_norm(total.double(), (70,)).to(dtype))
    inputs = [t for t in (x, residual) if t is not None]
    for grad, t in zip(torch.autograd.grad(out.sum() + total.sum(), inputs), inputs, strict=True):
        assert grad.dtype == t.dtype
    # Without prenorm, no sum is returned and the flag does not matter.
    assert OP(x, residual, residual_in_fp32=in_fp32).dtype == dtype


@pytest.mark.parametrize("layout", layouts(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_change_nothing(kernel, layout, dtype):
    case = make(2, 3, 4, 70, dtype=dtype, dropout_p=0.3)
    fields = ("x", "residual", "grad_out", "grad_sum")
    if layout == "expanded":  # it repeats the first entry, so the dense tensors must do so too
        dense = {f: getattr(case, f)[:1].repeat(2, 1, 1, 1) for f in fields}
        case = dataclasses.replace(case, **dense)
    laid = {f: lay_out_rows(getattr(case, f), layout) for f in fields}
    if layout in ("gaps", "offset", "slices"):
        vectors = TENSORS[2:]
        laid |= {f: lay_out_rows(getattr(case, f), layout) for f in vectors}
    results = run(dataclasses.replace(case, **laid))
    assert all(t.is_contiguous() for name, t in results.items())
    if kernel.backend == "eager":
        assert_near(results, run(case))
    else:
        assert_same_bits(results, run(case))


def test_more_dimensions_than_a_kernel_has_strides_for(kernel):
    case = make(2, 2, 3, 2, 2, 17)
    laid = {f: lay_out_rows(getattr(case, f), "reversed") for f in ("x", "residual", "grad_out")}
    assert_near(run(dataclasses.replace(case, **laid)), run(case))


@pytest.mark.parametrize("layout", ["contiguous", "gaps", "reversed"])
@pytest.mark.parametrize(
    "shape", [(0,), (0, 5), (3, 0), (2, 0, 5), (2, 3, 0), (0, 0), (2, 0, 3, 2, 2, 5)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_tensors(kernel, shape, layout, dtype):
    """No rows, or rows without columns, with any strides."""
    case = make(*shape, dtype=dtype, dropout_p=0.5)
    laid = {f: lay_out_rows(getattr(case, f), layout) for f in ("x", "residual", "grad_out")}
    results = run(dataclasses.replace(case, **laid))
    assert results["out"].shape == results["sum"].shape == results["grad_x"].shape == shape
    for name in ("weight", "bias", "x_bias"):
        assert_equal(results[f"grad_{name}"], torch.zeros(shape[-1], dtype=dtype))


def test_one_row_one_column(kernel):
    """1-D inputs; and a row of one number, which is its own mean."""
    case = make(20, dropout_p=0.3)
    assert_near(run(case), specification(case))
    one = make(1, grad_sum=None)
    results = run(one)
    assert_equal(results["out"], one.bias)
    assert_equal(results["grad_bias"], one.grad_out)
    for name in ("grad_x", "grad_residual", "grad_weight", "grad_x_bias"):
        assert results[name].eq(0).all(), name


@pytest.mark.parametrize("eps", [0.0, 1e-5, 3])
def test_rows_without_variance(kernel, eps):
    """(x - mean) · rstd: 0 where there is an eps, 0 · ∞ where there is none, as in torch."""
    x = torch.full((2, 70), 3.0)
    torch.testing.assert_close(OP(x, eps=eps), F.layer_norm(x, (70,), eps=eps), equal_nan=True)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5), (1, 1, 5), (2, 1, 5), (1, 3, 1)], ids=str)
def test_residual_is_broadcast(kernel, shape):
    """Its gradient is summed over the dimensions that it is broadcast in."""
    case = make(2, 3, 5, residual=normal(*shape, seed=7))
    results = run(case)
    assert results["grad_residual"].shape == shape
    assert_near(results, specification(case))


def test_inputs_are_not_modified(kernel):
    case = make(5, 70, dropout_p=0.2)
    tensors = [t for t in vars(case).values() if isinstance(t, Tensor)]
    before = [(t.clone(), t._version) for t in tensors]
    run(case)
    for t, (value, version) in zip(tensors, before, strict=True):
        assert_equal(t, value)
        assert t._version == version


def test_results_are_nobody_else_s_memory(kernel):
    """The sum of x alone is a copy, and equal gradients have memory of their own."""
    x, residual = (normal(4, 20, seed=i).requires_grad_() for i in range(2))
    out, total = OP(x, prenorm=True)
    assert_equal(total, x)
    assert len({t.data_ptr() for t in (x, out, total)}) == 3
    OP(x, residual).sin().sum().backward()
    assert_equal(x.grad, residual.grad)
    residual.grad.zero_()
    assert x.grad.ne(0).any()


# Gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize(
    "wanted", [w for n in (1, 2, 4) for w in itertools.combinations(range(5), n)], ids=str
)
def test_gradients_asked_for_one_by_one(backend, wanted, dropout_p):
    """Each subset of gradients equals the same gradients computed all together."""
    for prenorm in (False, True):
        case = make(9, 20, dropout_p=dropout_p)
        case = case if prenorm else dataclasses.replace(case, grad_sum=None)
        everything = run(case)
        inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(case.tensors)]
        torch.manual_seed(SEED)
        results = OP(*inputs[:4], dropout_p, training=True, x_bias=inputs[4], prenorm=prenorm)
        outputs, upstream = (results,), (case.grad_out,)
        if prenorm:
            outputs, upstream = results, (case.grad_out, case.grad_sum)
        grads = torch.autograd.grad(outputs, [inputs[i] for i in wanted], upstream)
        for i, grad in zip(wanted, grads, strict=True):
            assert_equal(grad, everything[f"grad_{TENSORS[i]}"], TENSORS[i])


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("missing", ["grad_out", "grad_sum"])
def test_one_of_two_outputs_has_no_gradient(kernel, missing, dropout_p, mixed):
    """The missing one counts as zeros. The output has none where a model drops a branch."""
    case = make(5, 20, dtype=torch.bfloat16 if mixed else torch.float32, dropout_p=dropout_p)
    if mixed:
        wide = {f: getattr(case, f).float() for f in ("residual", "grad_sum")}
        case = dataclasses.replace(case, **wide)
    zeros = torch.zeros_like(getattr(case, missing))
    expected = run(dataclasses.replace(case, **{missing: zeros}))
    inputs = [t.detach().requires_grad_() for t in case.tensors]
    torch.manual_seed(SEED)
    out, total = OP(*inputs[:4], dropout_p, training=True, prenorm=True, x_bias=inputs[4])
    output, upstream = (total, case.grad_sum) if missing == "grad_out" else (out, case.grad_out)
    grads = torch.autograd.grad(output, inputs, upstream, materialize_grads=True)
    for name, grad in zip(TENSORS, grads, strict=True):
        assert (grad == expected[f"grad_{name}"]).all(), name


def test_upstream_gradients_expanded_from_one_number(kernel):
    """The upstream gradients of ``out.sum().backward()``: stride 0 in every dimension."""
    case = make(5, 70)
    expanded = dict.fromkeys(("grad_out", "grad_sum"), torch.ones(()).expand(5, 70))
    dense = dict.fromkeys(("grad_out", "grad_sum"), torch.ones(5, 70))
    assert_near(run(dataclasses.replace(case, **expanded)), run(dataclasses.replace(case, **dense)))


def test_a_backward_can_be_run_again(kernel):
    inputs = [t.requires_grad_() for t in make(5, 20).tensors]
    out = OP(*inputs[:4], 0.5, training=True, x_bias=inputs[4]).sin().sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, inputs), strict=True):
        assert_equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs)


def test_no_gradient_without_grad_mode(backend):
    case = make(3, 20, grad_sum=None)
    x = case.x.clone().requires_grad_()
    with torch.no_grad():
        assert not OP(x).requires_grad
    with torch.inference_mode():
        out = OP(x, *case.tensors[1:4], x_bias=case.x_bias)
    assert_equal(out, run(case)["out"])


def keep_in(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    return pack


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1}, {"rms_norm": True}], ids=str)
def test_saved_tensors_are_inputs_and_one_number_a_row(backend, options):
    """No mask and no normalised rows; with prenorm, the returned sum instead of x and residual."""
    x, residual, weight, bias = (
        normal(*s, seed=i).requires_grad_() for i, s in enumerate([(9, 20), (9, 20), (20,), (20,)])
    )
    for prenorm in (False, True):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(keep_in(saved), lambda t: t):
            results = OP(x, residual, weight, bias, training=True, prenorm=prenorm, **options)
        outputs = results if prenorm else (results,)
        known = {t.data_ptr() for t in (x, residual, weight, bias, *outputs)}
        small = sorted(tuple(t.shape) for t in saved if t.data_ptr() not in known)
        assert small == [*([(1,)] if "dropout_p" in options else []), (9,), (9,)]
        big = [t.data_ptr() for t in saved if t.shape == x.shape]
        assert big == ([outputs[1].data_ptr()] if prenorm else [x.data_ptr(), residual.data_ptr()])


# Bits that do not depend on other rows ----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_and_any_number_of_threads(every_kernel, dtype):
    """Also gradients summed over rows. Runs with 2 threads twice, so that a race shows."""

    @settings(max_examples=settings.default.max_examples // 10)
    @given(cases(dtype))
    def call(case: Case) -> None:
        for kernel in (every_kernel[0], every_kernel[-1]):
            with kernel.serving():
                torch.set_num_threads(1)
                alone = run(case)
                # How torch splits its own sums may depend on the number of threads.
                for threads in (1,) if kernel.backend == "eager" else (2, 3, 2):
                    torch.set_num_threads(threads)
                    assert_same_bits(run(case), alone)

    call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1500, 65), (40, 2000)], ids=str)
def test_threads_share_many_blocks_of_rows(cpp_kernels, shape, dtype):
    case = make(*shape, dtype=dtype, dropout_p=0.1)
    with cpp_kernels[-1].serving():
        torch.set_num_threads(1)
        expected = run(case)
        for threads in (2, 4):
            torch.set_num_threads(threads)
            assert_same_bits(run(case), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [5, 130])
def test_a_row_does_not_depend_on_the_others(cpp_kernel, N, dtype):
    """Alone, among others, beside NaN: the same bits."""
    rows = ("x", "residual", "grad_out", "grad_sum")
    per_row = ("out", "sum", "grad_x", "grad_residual")
    together = make(101, N, dtype=dtype)
    results = run(together)
    torch.set_num_threads(2)
    for part in (slice(0, 1), slice(7, 8), slice(30, 101)):
        alone = run(dataclasses.replace(together, **{f: getattr(together, f)[part] for f in rows}))
        poisoned = {f: torch.full_like(getattr(together, f), NAN) for f in rows}
        for f in rows:
            poisoned[f][part] = getattr(together, f)[part]
        beside_nan = run(dataclasses.replace(together, **poisoned))
        for name in per_row:
            assert_equal(alone[name], results[name][part], name)
            assert_equal(beside_nan[name][part], results[name][part], name)


def test_rows_are_numbered_from_the_first(cpp_kernel):
    """So with dropout, the first rows have the same bits whatever follows them."""
    together = make(64, 130, dropout_p=0.3)
    results = run(together)
    fields = ("x", "residual", "grad_out", "grad_sum")
    alone = run(dataclasses.replace(together, **{f: getattr(together, f)[:9] for f in fields}))
    for name in ("out", "sum", "grad_x", "grad_residual"):
        assert_equal(alone[name], results[name][:9], name)


# Dropout ----------------------------------------------------------------------------------------


def kept(shape: tuple[int, ...], dropout_p: float) -> Tensor:
    """Returns which elements the specification keeps."""
    rows, N = torch.Size(shape[:-1]).numel(), shape[-1]
    return philox.dropout_keep(drawn_seed(), torch.tensor(0), rows, N, dropout_p).view(shape)


def dropped_ones(shape: tuple[int, ...], dtype: torch.dtype, dropout_p: float) -> list[Tensor]:
    """Returns the sum for an x of ones, and the gradient of x for an upstream gradient of ones."""
    torch.manual_seed(SEED)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    _, total = OP(x, None, None, None, dropout_p, training=True, prenorm=True)
    return [total, torch.autograd.grad(total.sum(), x)[0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.5, 0.99])
def test_the_same_seed_drops_the_same_elements(kernel, dtype, dropout_p):
    """Forward and backward drop the elements that the reference drops, and scale exactly."""
    shape = (3, 11, 137)
    scale = torch.tensor(65536 / (65536 - round(dropout_p * 65536)), dtype=torch.float64)
    expected = (kept(shape, dropout_p) * scale).to(dtype)
    total, grad = dropped_ones(shape, dtype, dropout_p)
    assert_equal(total, expected)
    assert_equal(grad, expected)


def test_triton_drops_the_same_elements(triton):
    """All other tests of Triton's kernels are in test_kernels_dropout_add_layer_norm."""
    expected = kept((2, 3, 37), 0.3) * torch.tensor(philox.keep_scale(0.3))
    for t in dropped_ones((2, 3, 37), torch.float32, 0.3):
        assert_equal(t, expected)


@pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5, 0.9])
def test_the_probability_is_honoured(backend, dropout_p):
    count = 40 * 2500
    total, _ = dropped_ones((40, 2500), torch.float32, dropout_p)
    share = total.eq(0).double().mean().item()
    assert abs(share - dropout_p) < 4 * (dropout_p * (1 - dropout_p) / count) ** 0.5


@pytest.mark.parametrize("dropout_p", [2**-18, 1 - 2**-20])
def test_the_probabilities_next_to_none_and_all(kernel, dropout_p):
    """Below half of 2⁻¹⁶ nothing is dropped; just below 1, one element in 2¹⁶ is kept."""
    expected = (kept((700, 600), dropout_p) * philox.keep_scale(dropout_p)).float()
    assert set(expected.unique().tolist()) == ({1.0} if dropout_p < 0.5 else {0.0, 65536.0})
    for t in dropped_ones((700, 600), torch.float32, dropout_p):
        assert_equal(t, expected)


def test_nothing_is_dropped_without_training(backend):
    case = make(5, 70)
    state = torch.get_rng_state()
    out = OP(case.x, case.residual, case.weight, case.bias, 0.9)
    assert_equal(out, OP(case.x, case.residual, case.weight, case.bias))
    OP(case.x, dropout_p=0.0, training=True)
    assert torch.equal(torch.get_rng_state(), state)  # no dropout, no draw


def test_the_generator_decides(backend):
    x = normal(4, 20)
    check_generator(lambda: OP(x, dropout_p=0.5, training=True))


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("prenorm", [False, True])
def test_what_is_dropped_does_not_exist(kernel, poison, prenorm):
    """NaN or Inf in a dropped element of x reaches neither results nor gradients."""
    case = make(6, 70, dropout_p=0.5, x_bias=None)
    case = case if prenorm else dataclasses.replace(case, grad_sum=None)
    poisoned = case.x.masked_fill(~kept((6, 70), 0.5), poison)
    assert_same_bits(run(dataclasses.replace(case, x=poisoned)), run(case))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bias_dropped_in_every_row_does_not_exist(kernel, poison):
    case = make(3, 70, dropout_p=0.7)
    dropped = ~kept((3, 70), 0.7).any(0)
    assert 0 < dropped.sum() < 70
    assert case.x_bias is not None
    poisoned = case.x_bias.masked_fill(dropped, poison)
    assert_same_bits(run(dataclasses.replace(case, x_bias=poisoned)), run(case))


@pytest.mark.parametrize("prenorm", [False, True])
def test_what_is_dropped_does_not_exist_in_second_derivatives(backend, prenorm):
    case = make(4, 9, dropout_p=0.5, dtype=torch.float64, x_bias=None)

    def penalty(x: Tensor) -> tuple[Tensor, ...]:
        inputs = [t.detach().requires_grad_() for t in (x, *case.tensors[1:4])]
        torch.manual_seed(SEED)
        results = OP(*inputs, 0.5, training=True, prenorm=prenorm)
        out = results[1] * results[0] if prenorm else results
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    poisoned = case.x.masked_fill(~kept((4, 9), 0.5), NAN)
    for actual, expected in zip(penalty(poisoned), penalty(case.x), strict=True):
        assert_equal(actual, expected)


# Sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N", [768, 771])  # 771: rows begin anywhere in a vector
@pytest.mark.covering(1)
def test_results_too_large_for_a_cache(cpp_kernel, dtype, N):
    """They are written past the cache, and equal the results of fewer rows, which are not."""
    case = make(2**23 // (N * dtype.itemsize) + 3, N, dtype=dtype)
    whole, part = run(case), slice(1000, 2000)
    rows = {name: getattr(case, name)[part] for name in ("x", "residual", "grad_out", "grad_sum")}
    of_rows = run(dataclasses.replace(case, **rows))
    for name in ("out", "sum", "grad_x", "grad_residual"):
        assert_equal(whole[name][part], of_rows[name])


def test_elements_past_two_to_the_31(cpp_kernel):
    check_past_two_to_the_31(2, 3, 70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_everything(kernel, dtype):
    """The result is the residual's norm and the gradient of x is 0, even where x is NaN.

    16 random bits decide an element, so x has more elements than 16 bits have values.
    """
    x, residual = (torch.randn(700, 300, dtype=dtype, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        x.fill_(float("nan"))
    out = trifuse.dropout_add_layer_norm(x, residual, dropout_p=1.0, training=True)
    expected = trifuse.dropout_add_layer_norm(torch.zeros_like(x), residual)
    assert torch.equal(out, expected)
    assert torch.autograd.grad(out.sum(), x)[0].eq(0).all()
