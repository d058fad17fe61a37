"""What torch.compile makes of every operator's autograd Function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_cases import normal
from torch import Tensor

import trifuse
from trifuse.ops.dropout import dropout
from trifuse.ops.linear import linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E = 4
WEIGHT, BIAS, GATES = normal(E, E), normal(E), normal(4 * E, E)

# Of (3, 2, E); x comes more than once where an operator takes several tensors.
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: trifuse.scaled_dot_product_attention(x, x, x),
    "dropout_add_layer_norm": lambda x: trifuse.dropout_add_layer_norm(x, x, BIAS, BIAS),
    "dropout": lambda x: dropout(x, 0.5, True),
    "linear": lambda x: linear(x, WEIGHT, BIAS),
    "lstm": lambda x: trifuse.lstm(x, (x[0], x[0]), GATES, GATES)[0],
    "lstm_cell": lambda x: trifuse.lstm_cell(x[0], None, GATES, GATES)[0],
    "gru": lambda x: trifuse.gru(x, x[0], GATES[E:], GATES[E:])[0],
    "gru_cell": lambda x: trifuse.gru_cell(x[0], x[0], GATES[E:], GATES[E:]),
}

operators = pytest.mark.parametrize("operator", OPERATORS)


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@operators
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_same_tensor_twice(operator, requires_grad):
    """And where nothing needs a gradient, though it might be asked for."""
    x = normal(3, 2, E).requires_grad_(requires_grad)
    results = []
    for function in (compiled(OPERATORS[operator]), OPERATORS[operator]):
        torch.manual_seed(0)
        y = function(x)
        assert y.requires_grad == requires_grad
        results.append([y, *(torch.autograd.grad(y.sin().sum(), x) if requires_grad else ())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@operators
def test_gradients_taken_inside(operator):
    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: OPERATORS[operator](x).sin().sum())(x)

    x, results = normal(3, 2, E), []
    for function in (compiled(gradient), gradient):
        torch.manual_seed(0)
        results.append(function(x))
    assert results[1].abs().max() > 0
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "linear"])
def test_forward_mode_raises(operator):
    """Rather than returning no derivative. (Linear layers are left to torch's product.)"""
    x = normal(3, 2, E)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="NotImplementedError"):
        compiled(lambda x: torch.func.jvp(OPERATORS[operator], (x,), (x,)))(x)


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "linear"])
def test_gradients_of_gradients_taken_inside_raise(operator):
    def penalty(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: OPERATORS[operator](x).sin().sum())(x).square().sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="gradients of gradients"):
        compiled(torch.func.grad(penalty))(normal(3, 2, E))
