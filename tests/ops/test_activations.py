"""Activations by themselves, as in training: the numerics rule, gradients of every order, gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics import Accuracy, rounding_error
from torch import Tensor

import trifuse
from trifuse.backends import _C
from trifuse.ops.activations import ACTIVATIONS, activate, gate, gate_halves

pytestmark = pytest.mark.skipif(_C is None, reason="no C++ extension")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KERNELS = ["gelu", "gelu_tanh", "quick_gelu", "silu"]
FORMS = ["alone", "gate", "first half", "last half"]


def inputs_of(form: str, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    *rows, features = shape
    widths = {"alone": [features], "gate": [features] * 2}.get(form, [2 * features])
    return [(3 * torch.randn(*rows, width)).to(dtype).requires_grad_() for width in widths]


def run(form: str, activation: Any, inputs: Sequence[Tensor]) -> Tensor:
    if form == "alone":
        return activate(*inputs, activation)
    if form == "gate":
        return gate(*inputs, activation)
    return gate_halves(*inputs, activation, int(form == "last half"))


def by_torch(form: str, activation: Any, inputs: Sequence[Tensor]) -> Tensor:
    function = ACTIVATIONS[activation]
    if form == "alone":
        return function(*inputs)
    first, second = inputs if form == "gate" else inputs[0].chunk(2, -1)
    return function(second) * first if form == "last half" else function(first) * second


def with_gradients(out: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients_obey_the_numerics_rule(cpp_kernel, dtype, activation, form):
    torch.manual_seed(0)
    accuracy = Accuracy("activate")
    for shape in ((7, 129), (3, 5, 64), (300, 96)):
        inputs = inputs_of(form, *shape, dtype=dtype)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        grad = torch.randn(shape).to(dtype)
        exact = with_gradients(by_torch(form, activation, wide), wide, grad.double())
        eager = with_gradients(by_torch(form, activation, inputs), inputs, grad)
        ours = with_gradients(run(form, activation, inputs), inputs, grad)
        for i, each in enumerate(zip(ours, exact, eager, strict=True)):
            assert each[0].dtype == dtype
            accuracy.record(f"{i}", *each, rounding_error(dtype) * each[1].abs())
    accuracy.conclude()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", KERNELS)
def test_derivatives(cpp_kernel, activation, form):
    inputs = inputs_of(form, 3, 5, dtype=torch.float64)
    call = lambda *inputs: run(form, activation, inputs)  # noqa: E731
    torch.autograd.gradcheck(call, inputs)
    torch.autograd.gradgradcheck(call, inputs)


@given(st.data())
def test_any_layout(data):
    form, activation = data.draw(st.sampled_from(FORMS)), data.draw(st.sampled_from(KERNELS))
    shape = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    torch.manual_seed(0)
    inputs = [x.detach() for x in inputs_of(form, *shape)]
    expected = run(form, activation, inputs)
    laid_out = []
    for x in inputs:
        layout = data.draw(st.sampled_from(["dense", "rows apart", "transposed", "every other"]))
        if layout == "rows apart":
            x = torch.cat((x, x), -1)[..., : x.shape[-1]]
        elif layout == "transposed":
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        elif layout == "every other":
            x = x.repeat_interleave(2, -1)[..., ::2]
        laid_out.append(x.requires_grad_())
    out = run(form, activation, laid_out)
    assert torch.equal(out, expected)
    grad = torch.randn(1).expand_as(out)  # every stride is 0
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for a, e in zip(
        torch.autograd.grad(out, laid_out, grad),
        torch.autograd.grad(by_torch(form, activation, exact), exact, grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_threads_and_batches(form):
    """Results of 64 KiB and of 8 MiB are stored past the caches, by several threads or by any."""
    for rows in (3, 100, 6000):
        inputs = inputs_of(form, rows, 384)
        grad = torch.randn(rows, 384)
        results, before = [], torch.get_num_threads()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(with_gradients(run(form, "gelu", inputs), inputs, grad))
        torch.set_num_threads(before)
        for each in results[1:]:
            assert all(map(torch.equal, results[0], each))
        few = [x.detach()[:2].requires_grad_() for x in inputs]
        alone = with_gradients(run(form, "gelu", few), few, grad[:2])
        assert all(torch.equal(each[:2], a) for each, a in zip(results[0], alone, strict=True))


@pytest.mark.parametrize("activation", KERNELS)
def test_far_out(cpp_kernel, activation):
    """Derivatives tend to 0 and 1, and nothing overflows on the way."""
    x = torch.tensor([-3e38, -1e20, -1e3, -200.0, -90, 90, 200, 1e3, 1e20, 3e38]).requires_grad_()
    up = torch.ones_like(x).requires_grad_()
    slope, value = torch.autograd.grad(gate(x, up, activation).sum(), (x, up))
    assert torch.equal(slope[5:], torch.ones(5))
    assert slope[:5].abs().max() < 1e-29
    assert torch.equal(value[5:], x[5:])
    assert value[:5].abs().max() < 1e-29
    x = torch.tensor([float("nan"), 1.0], requires_grad=True)
    (slope,) = torch.autograd.grad(activate(x, activation).sum(), x)
    assert slope.isnan().tolist() == [True, False]


@pytest.mark.parametrize("activation", ["quick_gelu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_far_out_with_a_graph(activation, dtype):
    """1.702 x, which overflows, is no factor of the derivative."""
    far = torch.finfo(dtype).max
    x = torch.tensor([far, -far, 4e4, -4e4], dtype=dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(activate(x, activation).sum(), x, create_graph=True)
    assert slope.requires_grad
    assert slope.tolist() == [1, 0, 1, 0]


def test_relu_and_other_calls_are_torchs():
    x = torch.randn(3, 4)
    assert torch.equal(activate(x, "relu"), x.relu())
    assert torch.equal(gate(x, x, "relu"), x.relu() * x)
    with trifuse.backend("eager"):
        assert torch.equal(activate(x, "gelu"), torch.nn.functional.gelu(x))
    assert activate(x.to("meta"), "gelu").device.type == "meta"
    assert activate(x[:0], "gelu").shape == (0, 4)
    # These broadcast, or have the wider dtype, as torch's products do.
    assert gate(x, x[:1], "silu").shape == (3, 4)
    assert gate(x.bfloat16(), x, "silu").dtype == torch.float32


def test_transforms():
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(
        torch.vmap(lambda x: activate(x, "gelu"))(x), torch.nn.functional.gelu(x)
    )
    _, tangent = torch.func.jvp(lambda x: gate(x, x, "silu"), (x,), (torch.ones_like(x),))
    _, expected = torch.func.jvp(
        lambda x: torch.nn.functional.silu(x) * x, (x,), (torch.ones_like(x),)
    )
    torch.testing.assert_close(tangent, expected)
    compiled = torch.compile(lambda x: gate_halves(x, "gelu", 0), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), gate_halves(x, "gelu", 0))


def test_a_gate_saves_its_factors_only():
    sizes = []

    def keep(t: Tensor) -> Tensor:
        sizes.append(t.numel())
        return t

    inputs = inputs_of("gate", 8, 16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        gate(*inputs, "silu")
    assert sizes == [128, 128]


def test_errors():
    ops = torch.ops.trifuse
    x = torch.randn(3, 4)
    with pytest.raises(
        ValueError, match="activation: expected gelu, gelu_tanh, quick_gelu or silu"
    ):
        ops.activate(x, None, "relu")
    with pytest.raises(ValueError, match=r"x: expected 2 dimensions; got shape \[4\]"):
        ops.activate(x[0], None, "gelu")
    with pytest.raises(ValueError, match=r"up: expected shape \[3, 4\]"):
        ops.activate(x, x[:2], "gelu")
    with pytest.raises(TypeError, match=r"grad: expected Float; got Double"):
        ops.activate_backward(x.double(), x, "gelu")
    with pytest.raises(ValueError, match=r"both: expected 2 dimensions, the last one even"):
        ops.gate_halves_backward(x, x[:, :3], 0, "gelu")
    with pytest.raises(ValueError, match=r"first: expected 0 or 1; got 2"):
        ops.gate_halves_backward(x, x, 2, "gelu")
