"""Tests of what only an rnn has: two activations, and NaN and infinity as in torch.

``test_gru`` tests the rest.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import normal
from gru_cases import Case, record_accuracy, run, specification
from lstm_cases import kernel_fixture, serving
from numerics import Accuracy
from tested_kernels import KERNELS
from torch import Tensor, nn

import trifuse
from trifuse import backends

kernel = kernel_fixture("rnn")

NONLINEARITIES = ("tanh", "relu")
nonlinearities = pytest.mark.parametrize("nonlinearity", NONLINEARITIES)


def twins(nonlinearity: str, *sizes: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Returns torch's module and ours, with the same parameters."""
    torch.manual_seed(0)
    theirs = nn.RNN(*sizes, nonlinearity=nonlinearity).to(dtype)
    ours = trifuse.nn.RNN(*sizes, nonlinearity=nonlinearity).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def results(module: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    output = module(x)[0]
    return [output, *torch.autograd.grad(output, [x, *module.parameters()], upstream)]


# Non-finite numbers -------------------------------------------------------------------------------


@nonlinearities
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("units", [5, 16, 33])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_spread_as_in_torch(kernel, value, units, dtype, nonlinearity):
    """From the input to later steps, and from a gradient to earlier ones: in their rows alone."""
    modules = twins(nonlinearity, 3, units, dtype=dtype)
    x, upstream = normal(4, 3, 3, dtype=dtype), normal(4, 3, units, seed=1, dtype=dtype)
    spoilt_x, spoilt_upstream = x.clone(), upstream.clone()
    spoilt_x[1, 1, 0], spoilt_upstream[3, 2, 1] = value, value
    for given in ((spoilt_x, upstream), (x, spoilt_upstream)):
        theirs, ours = (results(module, *given) for module in modules)
        for actual, expected in zip(ours, theirs, strict=True):
            assert torch.equal(actual.isnan(), expected.isnan())
            assert torch.equal(actual.isposinf(), expected.isposinf())
            assert torch.equal(actual.isneginf(), expected.isneginf())
        output, grad_input, *_ = ours
        assert output[:, ::2].isfinite().all()
        assert grad_input[:, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_derivative_of_relu_at_0_is_0(kernel, dtype):
    """As in torch; an infinite gradient gives 0 there, not NaN."""
    case = Case(3, 2, 4, 5, kind="relu", dtype=dtype, biases=False, states=False)
    case.tensors["input"].zero_()
    case.upstream[0].fill_(math.inf)
    found = run(case)
    for name, t in found.items():
        assert t.eq(0).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relu_grows_without_bound(kernel, dtype):
    """Nothing clamps h: 2 · h at every step."""
    case = Case(40, 2, 1, 1, kind="relu", dtype=dtype, biases=False)
    case.tensors["h0"].fill_(1)
    case.tensors["input"].zero_()
    case.tensors["weight_hh"].fill_(2)
    output = run(case)["output"]
    wanted = 2.0 ** torch.arange(1, 41, dtype=dtype)
    torch.testing.assert_close(output[:, 0, 0], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", NONLINEARITIES)
def test_saturation(kernel, kind, sign):
    """Sums of ±80: tanh is ±1 and passes no gradient, relu is 0 or the sum itself."""
    case = Case(4, 2, 1, 5, kind=kind, biases=False)
    case.tensors["input"].fill_(1)
    case.tensors["weight_ih"].fill_(80 * sign)
    case.tensors["weight_hh"].zero_()
    found, expected = run(case), specification(case)
    wanted = float(sign) if kind == "tanh" else max(80.0 * sign, 0.0)
    assert found["output"].eq(wanted).all()
    for name, t in found.items():
        torch.testing.assert_close(t.double(), expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(9, 18, 70, 130), (3, 30, 150, 64), (2, 40, 9, 17)], ids=str)
@pytest.mark.covering(1)
def test_gradients_over_many_tokens(sizes, dtype):
    """In C++ a task owns up to four panels of 16 units: full and partial groups of them."""
    accuracies = {k: Accuracy(k.name) for k in serving("rnn", KERNELS)}
    for kind in NONLINEARITIES:
        record_accuracy(accuracies, Case(*sizes, kind=kind, dtype=dtype, reverse=(False, True)))


# Modules ------------------------------------------------------------------------------------------


def test_the_default_is_tanh():
    x, w_ih, w_hh = normal(3, 2, 4), normal(5, 4, seed=1), normal(5, 5, seed=2)
    for function, given in ((trifuse.rnn, x), (trifuse.rnn_cell, x[0])):
        default = function(given, None, w_ih, w_hh)
        for nonlinearity in NONLINEARITIES:
            other = function(given, None, w_ih, w_hh, nonlinearity=nonlinearity)
            same = torch.equal(torch.as_tensor(default[0]), torch.as_tensor(other[0]))
            assert same is (nonlinearity == "tanh")
    assert trifuse.nn.RNN(4, 5).nonlinearity == trifuse.nn.RNNCell(4, 5).nonlinearity == "tanh"


def test_arguments_of_the_constructor():
    """The fourth argument is the activation, as in torch, and a wrong one raises there."""
    module = trifuse.nn.RNN(4, 5, 2, "relu", False, True)
    assert (module.nonlinearity, module.bias, module.batch_first) == ("relu", False, True)
    assert module.mode == nn.RNN(4, 5, 2, "relu").mode == "RNN_RELU"
    for cls in (nn.RNN, trifuse.nn.RNN):
        with pytest.raises(ValueError, match="'tanh' or 'relu'"):
            cls(4, 5, nonlinearity="gelu")


def test_a_fused_module_keeps_its_activation():
    """torch computes by the mode of the constructor, even if the attribute is changed."""
    model = nn.ModuleList([nn.RNN(4, 5, nonlinearity=name) for name in NONLINEARITIES])
    for module in model:
        module.nonlinearity = "tanh"
    x = normal(3, 2, 4)
    expected = [module(x)[0] for module in model]
    trifuse.fuse(model)
    for module, wanted in zip(model, expected, strict=True):
        assert type(module) is trifuse.nn.RNN
        torch.testing.assert_close(module(x)[0], wanted)


def test_explain_reports_a_module(backend):
    """torch's as not fused, ours with the operator and the backend."""
    model = nn.ModuleDict({"layer": nn.RNN(4, 5), "cell": nn.RNNCell(4, 5)})

    def said() -> list[tuple[str, str]]:
        return [(row.path, row.runs) for row in trifuse.explain(model).modules]

    assert said() == [("layer", "not fused"), ("cell", "not fused")]
    trifuse.fuse(model)
    assert said() == [("layer", f"rnn by {backend}"), ("cell", f"rnn by {backend}")]
    assert trifuse.explain(nn.RNN(4, 5)).modules[0].runs == "not fused"


# The fast path ------------------------------------------------------------------------------------


@pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")
@nonlinearities
def test_the_plain_op_serves_plain_calls(nonlinearity):
    """Layers and steps without lengths take the op that checks its arguments in C++."""
    _, module = twins(nonlinearity, 4, 5)
    cell = trifuse.nn.RNNCell(4, 5, nonlinearity=nonlinearity)
    x = normal(3, 2, 4)
    for call in (lambda: module(x), lambda: cell(x[0])):
        with torch.profiler.profile() as profile:
            call()
        ran = {event.key for event in profile.key_averages()}
        assert "trifuse::rnn_plain" in ran
        assert "trifuse::rnn_forward" not in ran
