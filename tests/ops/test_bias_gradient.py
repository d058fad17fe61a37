"""The op trifuse::bias_gradient: the gradient of a linear layer's bias, and of ReLU after it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics import Accuracy, rounding_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trifuse.backends import _C
from trifuse.ops import _linear_choice
from trifuse.ops.linear import linear

pytestmark = pytest.mark.skipif(_C is None, reason="no C++ extension")

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (33, 65), (128, 512), (129, 513), (700, 96), (3000, 7)]


def op(grad: Tensor, out: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
    found: tuple[Tensor | None, Tensor] = torch.ops.trifuse.bias_gradient(grad, out)
    return found


def through_relu(grad: Tensor, out: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(grad, out, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_obey_the_numerics_rule(cpp_kernel, dtype):
    torch.manual_seed(0)
    accuracy = Accuracy("bias_gradient")
    for M, N in SHAPES:
        for shift in (0, 3):  # equal signs add up
            grad = (torch.randn(M, N) + shift).to(dtype)
            exact = grad.double().sum(0)
            rounding = grad.double().square().sum(0).sqrt() * rounding_error(dtype)
            accuracy.record("sums", op(grad)[1], exact, grad.sum(0), rounding)
    accuracy.conclude()


@given(st.data())
def test_any_layout(data):
    M, N = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 140))
    dtype = data.draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def matrix() -> Tensor:
        layout = data.draw(st.sampled_from(["rows", "columns", "padded", "one row", "one number"]))
        full = torch.randn(M, N + 3, generator=generator).to(dtype)
        return {
            "rows": full[:, :N].contiguous(),
            "columns": full[:, :N].t().contiguous().t(),
            "padded": full[:, 2 : N + 2],
            "one row": full[:1, :N].expand(M, N),
            "one number": full[0, 0].expand(M, N),
        }[layout]

    grad, out = matrix(), matrix().relu()
    if data.draw(st.booleans()):
        grad_y, grad_bias = op(grad, out)
        assert grad_y is not None
        assert torch.equal(grad_y, through_relu(grad, out))
        assert torch.equal(grad_bias, op(grad_y)[1])
    else:
        grad_y, grad_bias = op(grad)
        assert grad_y is None
    exact = (grad if grad_y is None else grad_y).double().sum(0)
    tolerance = {"rtol": 1e-2, "atol": 0.1} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(grad_bias, exact.to(dtype), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads(cpp_kernel, dtype):
    """Two threads share these sizes, and store the gradient past the caches."""
    grad, out = torch.randn(1030, 640).to(dtype), torch.randn(1030, 640).to(dtype).relu()
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append((*op(grad, out), *op(grad)[1:]))
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_what_is_not_finite_stays_in_its_place(cpp_kernel):
    """As in torch: 0 stops every gradient, and a NaN of ReLU passes its gradient on."""
    out = torch.tensor([[0.0, 1.0, torch.nan, torch.inf, 0.0]] * 3)
    grad = torch.tensor([[torch.nan, 2.0, 3.0, 4.0, torch.inf]] * 3)
    grad_y, grad_bias = op(grad, out)
    assert torch.equal(grad_y, torch.tensor([[0.0, 2.0, 3.0, 4.0, 0.0]] * 3))
    assert torch.equal(grad_bias, torch.tensor([0.0, 6.0, 9.0, 12.0, 0.0]))
    grad_bias = op(torch.tensor([[torch.nan, 1.0], [1.0, torch.inf]]))[1]
    assert grad_bias[0].isnan()
    assert grad_bias[1] == torch.inf


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_nothing(shape):
    grad_y, grad_bias = op(torch.ones(shape), torch.ones(shape))
    assert grad_y is not None
    assert grad_y.shape == shape
    assert torch.equal(grad_bias, torch.zeros(shape[1]))


def test_layers_call_it(monkeypatch):
    """With a graph of the gradients, or beside a transform, torch's operations serve instead."""
    choice = _linear_choice.Choice("a test's", inference=True, training=True)
    monkeypatch.setattr(_linear_choice, "_made", {torch.float32: choice})
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(80, 16, requires_grad=True)
    weight, bias = torch.randn(8, 16, requires_grad=True), torch.randn(8, requires_grad=True)
    inputs = (x, weight, bias)

    def gradients(**options: bool) -> tuple[Tensor, ...]:
        out = linear(x, weight, bias, activation="relu")
        return torch.autograd.grad(out.square().sum(), inputs, **options)

    with torch.profiler.profile() as profile:
        plain = gradients()
    called = {event.key for event in profile.key_averages()}
    assert "trifuse::bias_gradient" in called
    assert "aten::threshold_backward" not in called
    for found, wanted in zip(gradients(create_graph=True), plain, strict=True):
        torch.testing.assert_close(found, wanted)
    with Recorder():
        watched = gradients()
    assert "trifuse.bias_gradient.default" not in names
    for found, wanted in zip(watched, plain, strict=True):
        torch.testing.assert_close(found, wanted)


def test_errors():
    grad = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"grad: expected 2 dimensions; got shape \[4\]"):
        op(grad[0])
    with pytest.raises(TypeError, match="grad: expected float32 or bfloat16; got Double"):
        op(grad.double())
    with pytest.raises(ValueError, match=r"out: expected shape \[3, 4\]; got \[2, 4\]"):
        op(grad, grad[:2])
    with pytest.raises(TypeError, match="out: expected Float; got BFloat16"):
        op(grad, grad.bfloat16())
