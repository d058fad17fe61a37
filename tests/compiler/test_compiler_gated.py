"""Linear layers with an activation or a gate in graphs of Dynamo: what is fused, what stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rewritten import Rewritten, check
from torch import nn

from trifuse.ops._linear_choice import Choice

B, L, K, N = 4, 16, 12, 10


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """A CPU where trifuse's product is faster in every use."""
    choice = Choice("a test", True, True)
    monkeypatch.setattr("trifuse.compiler.linear.choose", lambda dtype: choice)


def tensors(gradient):
    """x, the weights of a gate and of what it multiplies, those of both as one, and a bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = (B, L, K), (N, K), (N, K), (2 * N, K), (2 * N,)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [t.requires_grad_(gradient) for t in drawn]


def fused(function, gradient=False, **options):
    """Checks results and gradients; returns what was fused, and the graphs."""
    ours = check(function, *tensors(gradient), replaced={}, **options)
    return {k: n for report in ours.reports for k, n in report.replaced.items()}, ours


def x_transformers(x, gate, up, both, bias):
    up, gate = F.linear(x, both, bias).chunk(2, dim=-1)
    return up * F.silu(gate) * 1.0


def diffusers(x, gate, up, both, bias):
    hidden, gate = F.linear(x, both, bias).chunk(2, dim=-1)
    return hidden * F.gelu(gate)


def split(x, gate, up, both, bias):
    gate, up = F.linear(x, both).split(N, -1)
    return F.gelu(gate, approximate="tanh") * up


def transposed(x, gate, up, both, bias):
    gate, up = torch.chunk(x @ both.T, 2, -1)
    return torch.mul(F.silu(gate), up)


def two_layers(x, gate, up, both, bias):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def two_layers_with_biases(x, gate, up, both, bias):
    return F.linear(x, up, bias[N:]) * F.relu(F.linear(x, gate, bias[:N]))


def two_transposed(x, gate, up, both, bias):
    return F.silu(x @ gate.T) * (x @ up.T)


GATED = {  # the forms, and how many linear layers they have
    "x-transformers": (x_transformers, 1),
    "diffusers": (diffusers, 1),
    "split": (split, 1),
    "a transposed weight": (transposed, 1),
    "two layers": (two_layers, 2),
    "two layers with biases": (two_layers_with_biases, 2),
    "two transposed weights": (two_transposed, 2),
}


@pytest.mark.parametrize(("function", "layers"), GATED.values(), ids=GATED.keys())
def test_gate_is_fused_where_no_gradient_is_needed(function, layers):
    replaced, ours = fused(function)
    assert replaced == {"gated linear": 1}
    assert not any(map(ours.calls, ("chunk", "split", "silu", "gelu", "relu", "mul", "matmul")))
    replaced, ours = fused(function, gradient=True)
    assert replaced == {"linear": layers}
    assert ours.calls("mul") >= 1


def test_gate_is_fused_under_no_grad():
    def function(*args):
        with torch.no_grad():
            return two_layers(*args)

    replaced, _ = fused(function)
    assert replaced == {"gated linear": 1}


def test_a_factor_after_a_gate_stays():
    replaced, ours = fused(lambda *args: two_layers(*args) * 2.0)
    assert replaced == {"gated linear": 1}
    assert ours.calls("mul") == 1


def gated_by_itself(x, gate, up, both, bias):
    hidden = F.linear(x, gate)
    return F.silu(hidden) * hidden


def sigmoid(x, gate, up, both, bias):
    return F.glu(F.linear(x, both, bias), -1)


def several_inputs(x, gate, up, both, bias):
    return F.silu(F.linear(x, gate)) * F.linear(x + 1, up)


def other_dimension(x, gate, up, both, bias):
    gate, up = F.linear(x, both).chunk(2, 1)
    return F.silu(gate) * up


def three_parts(x, gate, up, both, bias):
    _, up, _ = F.linear(x, both).split([N // 2, N, N // 2], -1)
    return F.silu(F.linear(x, gate)) * up


def one_feature(x, gate, up, both, bias):
    return F.silu(F.linear(x, gate)) * F.linear(x, up[:1])


def gate_used_elsewhere(x, gate, up, both, bias):
    hidden = F.linear(x, gate)
    return F.silu(hidden) * F.linear(x, up), hidden


def half_used_elsewhere(x, gate, up, both, bias):
    gate, up = F.linear(x, both).chunk(2, -1)
    return F.silu(gate) * up, up


def in_place(x, gate, up, both, bias):
    return F.silu(F.linear(x, gate)).mul_(F.linear(x, up))


def few_rows(x, gate, up, both, bias):
    return two_layers(x[:1], gate, up, both, bias)


def changed_meanwhile(x, gate, up, both, bias):
    x = x * 1
    hidden = F.linear(x, gate)
    x.add_(1)
    return F.silu(hidden) * F.linear(x, up)


NEAR_MISSES = {
    "gated by itself": (gated_by_itself, 1),
    "a sigmoid": (sigmoid, 1),
    "several inputs": (several_inputs, 2),
    "another dimension": (other_dimension, 1),
    "three parts": (three_parts, 2),
    "one feature": (one_feature, 2),
    "a gate used elsewhere": (gate_used_elsewhere, 2),
    "a half used elsewhere": (half_used_elsewhere, 1),
    "in place": (in_place, 2),
    "few rows": (few_rows, 0),
    "an input that is changed meanwhile": (changed_meanwhile, 2),
}


@pytest.mark.parametrize(("function", "layers"), NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_miss_keeps_its_gate(function, layers):
    replaced, _ = fused(function)
    assert replaced == ({"linear": layers} if layers else {})


def test_one_graph_serves_two_lengths():
    def step(x, *weights):
        return x_transformers(x, *weights) + two_layers(x, *weights)

    x, *weights = tensors(gradient=False)
    ours = check(step, x, *weights, replaced={}, dynamic=True)
    assert ours.reports[0].replaced == {"gated linear": 2}
    longer = torch.randn(B + 1, L + 3, K)
    torch.testing.assert_close(ours(longer, *weights), step(longer, *weights))
    assert len(ours.graphs) == 1


def test_autocast_decides_the_dtype():
    def step(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return x_transformers(*args), two_layers(*args)

    args = tensors(gradient=False)
    ours = Rewritten(step)
    out = ours(*args)
    assert ours.reports[0].replaced == {"gated linear": 2}
    torch.testing.assert_close(out, step(*args), rtol=0.02, atol=0.1)


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x, inplace=True),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gradient", [False, True])
def test_activation_is_fused_unless_its_derivative_needs_more(name, gradient):
    def function(x, gate, up, both, bias):
        return ACTIVATIONS[name](F.linear(x, both, bias))

    replaced, ours = fused(function, gradient)
    assert replaced == {"linear": 1}
    left = sum(map(ours.calls, ("relu", "gelu", "silu")))
    assert left == (gradient and name != "relu")


@pytest.mark.slow
def test_inductor_compiles_a_gate():
    torch.manual_seed(0)

    class Feedforward(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(K, 2 * N), nn.Linear(N, K)

        def forward(self, x):
            gate, up = self.inner(x).chunk(2, -1)
            return self.outer(F.silu(gate) * up)

    model, (x, *_) = Feedforward(), tensors(gradient=False)
    compiled = torch.compile(model, backend="trifuse", fullgraph=True)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(x)  # compiles
        with torch.profiler.profile() as profile:
            out = compiled(x)
        torch.testing.assert_close(out, model(x))
    ran = {event.key for event in profile.key_averages() if event.key.startswith("trifuse::")}
    assert ran == {"trifuse::linear_unpacked", "trifuse::linear"}
