"""``torch.compile(model, backend="trifuse")``: registration, and graphs that Inductor compiles."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import trifuse
from trifuse.compiler import RewriteReport, rewrite
from trifuse.compiler.linear import linear
from trifuse.ops._linear_choice import Choice

ROOT = Path(__file__).parents[2]


def kernels_of(call):
    """Calls a function; returns its result, and the ops of trifuse that ran.

    Compiled code does not run under a mode of the dispatcher.
    """
    with torch.profiler.profile() as profile:
        result = call()
    return result, {e.key for e in profile.key_averages() if e.key.startswith("trifuse::")}


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def reporting():
    """A list, and a backend that rewrites each graph and appends its report to the list."""
    reports = []

    def backend(graph, inputs):
        reports.append(rewrite(graph))
        return graph

    return reports, backend


@pytest.mark.parametrize("first", ["trifuse", "torch._dynamo"])
def test_import_registers_the_backend_in_either_order(first):
    script = f"""
import {first}, sys
alone = "torch._dynamo.eval_frame" in sys.modules
import torch, trifuse
print(alone, "trifuse" in torch._dynamo.list_backends())
"""
    assert run(script) == f"{first == 'torch._dynamo'} True"  # trifuse does not import Dynamo


def test_entry_point_registers_the_backend_without_an_import():
    """torch finds the entry point, loads it, and does not get the name twice."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["torch_dynamo_backends"]["trifuse"]
    module, _, name = value.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    script = f"""
import importlib.metadata
import torch._dynamo.backends.registry as registry
entry = importlib.metadata.EntryPoint("trifuse", {value!r}, "torch_dynamo_backends")
registry._lazy_import()
registry._BACKENDS["trifuse"] = entry
print(registry.lookup_backend("trifuse") is entry.load())
"""
    assert run(script) == "True"


class Block(nn.Module):
    """Attention, a sum and a norm: Inductor has little left to compile."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        q = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return self.norm(x + out.transpose(1, 2).reshape(x.shape))


@pytest.mark.slow
def test_inductor_trains_one_graph_of_dynamic_shapes():
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = Block()
    compiled = torch.compile(block, backend="trifuse", dynamic=True, fullgraph=True)

    def step(x):
        out = compiled(x)
        return out, torch.autograd.grad(out.square().sum(), [x, *block.parameters()])

    for batch, length in ((2, 5), (3, 9)):
        x = torch.randn(batch, length, 16, requires_grad=True)
        variables = [x, *block.parameters()]
        expected = block(x)
        expected_grads = torch.autograd.grad(expected.square().sum(), variables)
        step(x)  # compiles
        (out, grads), ran = kernels_of(lambda: step(x))  # noqa: B023 - called at once
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)
        operators = ("attention", "dropout_add_layer_norm")
        steps = ("forward", "backward")
        assert ran == {f"trifuse::{name}_{step}" for name in operators for step in steps}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_options_are_those_of_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(Block(), backend="trifuse", options={"no such option": True})
    with pytest.raises(Exception, match="no such option"):
        compiled(torch.randn(1, 2, 16))


def test_report_counts_and_gives_reasons(caplog):
    reports, backend = reporting()

    def function(x):
        return F.layer_norm(F.layer_norm(x, (4,)), (3, 4))

    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "trifuse"):
        torch.compile(function, backend=backend)(torch.randn(3, 4))
    (report,) = reports
    assert report.replaced == {"norm": 1}
    ((pattern, node, reason),) = report.left
    assert (pattern, reason) == ("norm", "it is no norm over the last dimension")
    assert str(report) == f"  1 × norm\n  1 × norm left, because {reason} ({node})"
    more = RewriteReport(left=[*report.left, ("norm", "another", reason)])
    assert str(more) == f"  2 × norm left, because {reason} ({node}, …)"
    assert str(report) in caplog.text
    assert str(RewriteReport()) == "  nothing that trifuse can serve"


def test_graph_without_fake_tensors_is_left():
    graph = torch.fx.symbolic_trace(lambda x: F.layer_norm(x, (4,)))
    assert rewrite(graph).replaced == {}


def test_symbolic_sizes_need_no_torch_that_says_it_compiles(monkeypatch):
    reports = []

    def backend(graph, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: False)
            reports.append(rewrite(graph))
            return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, backend=backend, dynamic=True)
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    torch.testing.assert_close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert reports[0].replaced == {"attention": 1}


@pytest.mark.parametrize("bfloat16", [False, True])
def test_multi_head_attention_is_traced_to_the_operators(bfloat16):
    """AOTAutograd traces torch's own code with trifuse's attention inside."""

    def backend(graph, inputs):
        rewrite(graph)
        return aot_eager(graph, inputs)

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(2, 6, 16, requires_grad=True)
    torch._dynamo.reset()

    def step(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            out = model(x)
        return out, *torch.autograd.grad(out.float().square().sum(), x)

    step(compiled)  # compiles
    results, ran = kernels_of(lambda: step(compiled))
    tolerance = {"rtol": 0.05, "atol": 0.3} if bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(results, step(layer), **tolerance)
    assert {"trifuse::attention_forward", "trifuse::attention_backward"} <= ran


# Linear layers ----------------------------------------------------------------------------------


def test_product_is_that_of_torch():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 40, 12), torch.randn(8, 12), torch.randn(8)
    variables = [t.requires_grad_() for t in (x, weight, bias)]
    for activation, function in (
        (None, lambda t: t),
        ("relu", F.relu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda t: F.gelu(t, approximate="tanh")),
    ):
        ours = linear(x, weight, bias, torch.float32, activation)
        theirs = function(F.linear(x, weight, bias))
        torch.testing.assert_close(ours, theirs)
        grads = (torch.autograd.grad(t.square().sum(), variables) for t in (ours, theirs))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("faster", [True, False])
def test_linear_layers_are_served_where_the_table_says_so(monkeypatch, faster):
    choice = Choice("a test", faster, faster)
    monkeypatch.setattr("trifuse.compiler.linear.choose", lambda dtype: choice)
    reports, backend = reporting()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.GELU(),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8, bias=False),
        nn.Tanh(),
    )
    x = torch.randn(2, 32, 8, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    (out, grad), ran = kernels_of(
        lambda: (out := compiled(x), *torch.autograd.grad(out.sum(), x)),
    )
    assert reports[0].replaced == ({"linear": 3} if faster else {})
    assert ("trifuse::linear" in ran) == faster
    torch.testing.assert_close(out, model(x))
    torch.testing.assert_close(grad, *torch.autograd.grad(model(x).sum(), x))


TRANSPOSES = {
    "T": lambda weight: weight.T,
    "mT": lambda weight: weight.mT,
    "t": lambda weight: weight.t(),
    "torch.t": torch.t,
    "transpose": lambda weight: weight.transpose(-1, -2),
    "swapaxes": lambda weight: torch.swapaxes(weight, 0, 1),
}


@pytest.mark.parametrize("spelling", TRANSPOSES)
def test_products_with_a_transposed_parameter_are_linear_layers(monkeypatch, spelling):
    choice = Choice("a test", True, True)
    monkeypatch.setattr("trifuse.compiler.linear.choose", lambda dtype: choice)
    reports, backend = reporting()
    torch.manual_seed(0)
    weight, square = (nn.Parameter(torch.randn(n, 8)) for n in (6, 8))
    x = torch.randn(2, 32, 8, requires_grad=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        turned = TRANSPOSES[spelling](weight)
        # Not transposed, transposed twice, and no parameter: products that stay torch's.
        rest = x @ square + x @ square.t().T + x @ (2 * square).T
        return F.relu(x @ turned).sum(-1, keepdim=True) + rest

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    (out, *grads), ran = kernels_of(
        lambda: (out := compiled(x), *torch.autograd.grad(out.sum(), (x, weight, square))),
    )
    assert reports[0].replaced == {"linear": 1}
    assert "trifuse::linear" in ran
    torch.testing.assert_close(out, model(x))
    expected = torch.autograd.grad(model(x).sum(), (x, weight, square))
    torch.testing.assert_close(grads, list(expected))


def test_a_product_keeps_what_the_weight_and_bias_mean(monkeypatch):
    choice = Choice("a test", True, True)
    monkeypatch.setattr("trifuse.compiler.linear.choose", lambda dtype: choice)
    reports, backend = reporting()
    torch.manual_seed(0)
    x, weight = torch.randn(64, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    biases = [torch.randn(shape) for shape in ((), (1,), (1, 6), (64, 6))]

    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            transposed = weight.T
        return x @ transposed + sum(F.linear(x, weight, bias) for bias in biases)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    results = (
        (out := function(x), *torch.autograd.grad(out.sum(), (x, weight)))
        for function in (compiled, model)
    )
    torch.testing.assert_close(*results)
    assert reports[0].replaced == {}


def test_linear_layers_of_few_rows_stay(monkeypatch):
    choice = Choice("a test", True, True)
    monkeypatch.setattr("trifuse.compiler.linear.choose", lambda dtype: choice)
    reports, backend = reporting()
    torch._dynamo.reset()
    torch.compile(nn.Linear(8, 8), backend=backend)(torch.randn(63, 8))
    assert reports[0].replaced == {}
    assert [reason for *_, reason in reports[0].left] == ["it has few rows"]


def test_kernels_are_found_as_backends_are_chosen():
    for device, dtype in (("cpu", torch.float32), ("cpu", torch.float64), ("mps", torch.float32)):
        call = trifuse.backends.Call("attention", device, dtype, 64)
        for name in ("auto", "eager"):
            with trifuse.backend(name):
                expected = trifuse.backends.choose(call).backend != "eager"
                assert trifuse.backends.has_kernel(call) == expected
        with trifuse.backend("cuda"):
            assert not trifuse.backends.has_kernel(call)
