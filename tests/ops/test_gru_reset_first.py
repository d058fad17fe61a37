"""Tests of what only a GRU whose reset gate precedes the recurrent product has.

``test_gru`` tests its results, gradients and transforms, ``test_lstm_oracles`` holds it to ONNX
Runtime and ONNX's node tests.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from attention_cases import normal
from gru_cases import Case, record_accuracy, reset_first_cell, run, specification
from lstm_cases import assert_near, assert_same_bits, backend_fixture, kernel_fixture, serving
from numerics import Accuracy
from tested_kernels import KERNELS
from torch import Tensor, nn

import trifuse
from trifuse import backends

kernel = kernel_fixture("gru")
served = backend_fixture("gru", "triton")

needs_cpp = pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")


def module(**options: Any) -> Any:
    torch.manual_seed(0)
    return trifuse.nn.GRU(4, 5, linear_before_reset=False, **options)


def layer_by_formula(gru: Any, x: Tensor, h0: Tensor, k: int, d: int) -> tuple[Tensor, Tensor]:
    """One layer and direction of a module, step by step: (T, B, I), (B, H) -> output, h_n."""
    suffix = f"_l{k}" + "_reverse" * d
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    parameters = [getattr(gru, name + suffix, None) for name in names]
    h, ys = h0, []
    for step in x.flip(0) if d else x:
        h = reset_first_cell(step, h, *parameters)
        ys.append(h)
    output = torch.stack(ys)
    return output.flip(0) if d else output, h


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(9, 18, 70, 130), (3, 30, 150, 64), (2, 40, 9, 17)], ids=str)
def test_gradients_over_many_tokens(sizes, dtype):
    """Weights' gradients from several tasks, panels and, in C++, four panels multiplied at once."""
    accuracies = {k: Accuracy(k.name) for k in serving("gru", KERNELS) if k.backend != "triton"}
    record_accuracy(
        accuracies, Case(*sizes, kind="reset first", dtype=dtype, reverse=(False, True))
    )


@pytest.mark.parametrize("units", [5, 16, 33])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_spread_as_in_the_formula(kernel, value, units):
    """From the input to later steps, and from a gradient to earlier ones: in their rows alone."""
    for name in ("input", "upstream"):
        case = Case(4, 3, 3, units, kind="reset first")
        t = case.tensors["input"] if name == "input" else case.upstream[0]
        t[1 if name == "input" else 3, 1, 0] = value
        actual, expected = run(case), specification(case)
        for key, t in expected.items():
            assert torch.equal(actual[key].isnan(), t.isnan()), key
        assert actual["output"][:, ::2].isfinite().all()
        assert actual["grad_input"][:, ::2].isfinite().all()


def test_both_forms_agree_where_the_reset_gate_is_open():
    """r = 1 makes them equal, and only then."""
    case, plain = Case(kind="reset first"), Case()
    for some in (case, plain):
        some.tensors["bias_ih"][:6] = 80
    open_gate = run(plain)
    assert_near(run(case), open_gate)
    for some in (case, plain):
        some.tensors["bias_ih"][:6] = 0
    assert not torch.allclose(run(case)["output"], run(plain)["output"], atol=1e-3)


@pytest.mark.parametrize("wanted", ["input", "h0", "weight_ih", "weight_hh", "bias_hh"])
@pytest.mark.parametrize("T", [1, 3])
def test_each_gradient_alone(kernel, T, wanted):
    """One step too, where the gradient of r still needs W_hn."""
    case = Case(T, 2, 4, 20, kind="reset first")
    every = run(case)
    input, h0, (p,) = case.arguments(
        {n: t.clone().requires_grad_(n == wanted) for n, t in case.tensors.items()}
    )
    leaf = next(t for t in (input, h0, *p) if t is not None and t.requires_grad)
    results = case.kind.layer(input, h0, [p])
    (grad,) = torch.autograd.grad(results, leaf, case.upstream)
    assert_same_bits({"grad": grad}, {"grad": every[f"grad_{wanted}"]})


def test_second_derivatives(served):
    """They are the published formula's in float64, also after a kernel without float64."""
    torch.manual_seed(0)
    kept = trifuse.nn.GRU(3, 4, linear_before_reset=False)

    def differentiate_twice(gru: Any, run: Any) -> dict[str, Tensor]:
        dtype = gru.weight_ih_l0.dtype
        x, h0 = normal(3, 2, 3).to(dtype), normal(1, 2, 4, seed=1).to(dtype)
        leaves = {"input": x, "h0": h0, **dict(gru.named_parameters())}
        for leaf in leaves.values():
            leaf.requires_grad_()
        output, h_n = run(gru, x, h0)
        loss = output.square().sum() + h_n.sin().sum()
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        penalty = sum((grad * grad.detach().cos()).sum() for grad in first)
        return dict(zip(leaves, torch.autograd.grad(penalty, list(leaves.values())), strict=True))

    def by_formula(gru: Any, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        output, h_n = layer_by_formula(gru, x, h0[0], 0, 0)
        return output, h_n[None]

    actual = differentiate_twice(kept, lambda gru, x, h0: gru(x, h0))
    assert all(t.any() for t in actual.values())
    assert_near(actual, differentiate_twice(copy.deepcopy(kept).double(), by_formula))


# Modules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}])
def test_layers_of_a_module(options):
    gru, x = module(**options), normal(6, 3, 4)
    directions = 1 + gru.bidirectional
    h0 = normal(gru.num_layers * directions, 3, 5, seed=1)
    output, h_n = gru(x, h0)
    states = []
    for k in range(gru.num_layers):
        pairs = [layer_by_formula(gru, x, h0[k * directions + d], k, d) for d in range(directions)]
        x = torch.cat([y for y, _ in pairs], -1)
        states += [h for _, h in pairs]
    torch.testing.assert_close(output, x)
    torch.testing.assert_close(h_n, torch.stack(states))


def test_lengths_and_packed_sequences():
    gru, x, lengths = module(bidirectional=True), normal(6, 3, 4), torch.tensor([6, 4, 1])
    packed, h_n = gru(nn.utils.rnn.pack_padded_sequence(x, lengths))
    output, last = gru(x, lengths=lengths)
    assert torch.equal(nn.utils.rnn.pad_packed_sequence(packed)[0], output)
    assert torch.equal(h_n, last)


def test_a_cell():
    torch.manual_seed(0)
    cell = trifuse.nn.GRUCell(4, 5, linear_before_reset=False)
    x, h = normal(3, 4), normal(3, 5, seed=1)
    parameters = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
    torch.testing.assert_close(cell(x, h), reset_first_cell(x, h, *parameters))
    torch.testing.assert_close(cell(x[0], h[0]), cell(x, h)[0])


@pytest.mark.parametrize("cls", ["GRU", "GRUCell"])
def test_the_module_keeps_its_form(cls):
    """In copies, saved states and its repr. torch's form is the default."""
    make = getattr(trifuse.nn, cls)
    ours, default = make(4, 5, linear_before_reset=False), make(4, 5)
    assert default.linear_before_reset is True
    assert repr(ours) == f"{cls}(4, 5, linear_before_reset=False)"
    assert repr(default) == f"{cls}(4, 5)" == repr(getattr(nn, cls)(4, 5))
    ours.load_state_dict(getattr(nn, cls)(4, 5).state_dict())
    x = normal(3, 4)
    assert torch.equal(_output(copy.deepcopy(ours)(x)), _output(ours(x)))
    default.load_state_dict(ours.state_dict())
    h = normal(5) if cls == "GRUCell" else normal(1, 5)
    x = x[0] if cls == "GRUCell" else x
    assert not torch.allclose(_output(default(x, h)), _output(ours(x, h)))


def _output(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def test_fuse_leaves_a_module_its_form():
    model = nn.Sequential(module())
    expected = model(normal(3, 2, 4))[0]
    report = trifuse.fuse(model)
    assert torch.equal(model(normal(3, 2, 4))[0], expected)
    report.revert()
    assert torch.equal(model(normal(3, 2, 4))[0], expected)


# The fast path ------------------------------------------------------------------------------------


@needs_cpp
def test_the_plain_op_serves_plain_calls():
    """Layers and steps without lengths take the op that checks its arguments in C++."""
    cell, x = trifuse.nn.GRUCell(4, 5, linear_before_reset=False), normal(3, 2, 4)
    for call in (lambda: module()(x), lambda: cell(x[0])):
        with torch.profiler.profile() as profile:
            call()
        ran = {event.key for event in profile.key_averages()}
        assert "trifuse::gru_plain" in ran
        assert "trifuse::gru_forward" not in ran


@needs_cpp
def test_the_backend_that_serves_it():
    choice = trifuse.explain(
        trifuse.gru, normal(3, 2, 4), None, normal(15, 4), normal(15, 5), linear_before_reset=False
    )
    assert choice.backend == "cpp"
