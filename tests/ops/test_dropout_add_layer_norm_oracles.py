"""dropout_add_layer_norm against independent oracles: ONNX's node tests and torch's own samples."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from onnx_cases import onnx_cases
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import trifuse

# ONNX -------------------------------------------------------------------------------------------

OPERATORS = {"LayerNormalization": False, "RMSNormalization": True}


class Node(NamedTuple):
    """A case of one of ONNX's operators."""

    rms_norm: bool
    axis: int  # first dimension that is normalised over
    eps: float
    inputs: list[Tensor]  # x, and scale and bias if present
    outputs: list[Tensor]  # out, and LayerNormalization's mean and inverse standard deviation


@functools.cache
def onnx_nodes() -> dict[str, Node]:
    return {
        case.name: Node(
            OPERATORS[case.operator],
            case.attributes.get("axis", -1),
            case.attributes.get("epsilon", 1e-5),
            case.inputs,
            case.outputs,
        )
        for case in onnx_cases(*OPERATORS)
    }


@pytest.mark.parametrize("name", sorted(onnx_nodes()))
def test_onnx(kernel, name):
    """ONNX normalises over any number of trailing dimensions; here they are flattened into one."""
    node = onnx_nodes()[name]
    x, weight, bias = itertools.islice(itertools.chain(node.inputs, itertools.repeat(None)), 3)
    axis = node.axis % x.dim()
    flat = x.reshape(*x.shape[:axis], -1)
    vectors = [None if v is None else v.expand(x.shape[axis:]).flatten() for v in (weight, bias)]
    forward = getattr(torch.ops.trifuse.dropout_add_layer_norm_forward, kernel.backend)
    out, _, mean, rstd = forward(
        flat, None, *vectors, None, None, 0.0, node.eps, node.rms_norm, False, x.dtype
    )
    expected = [out.view(x.shape), *(t.view(x.shape[:axis]) for t in (mean, rstd))]
    for actual, wanted in zip(expected, node.outputs, strict=False):
        torch.testing.assert_close(actual, wanted.view(actual.shape))
    public = trifuse.dropout_add_layer_norm(
        flat, None, *vectors, eps=node.eps, rms_norm=node.rms_norm
    )
    torch.testing.assert_close(public.view(x.shape), node.outputs[0])


def test_all_of_onnx_s_cases_run():
    """No case is skipped unnoticed."""
    counted = [sum(n.rms_norm is rms for n in onnx_nodes().values()) for rms in (False, True)]
    assert counted[0] >= 19
    assert counted[1] >= 19


# torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_torch_s_samples(kernel, name, dtype):
    """Output and gradients against torch in float64."""
    (info,) = (op for op in op_db if op.name == f"nn.functional.{name}")
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) >= 6
    for sample in samples:
        shape, *vectors = sample.args
        # torch accepts a negative eps; trifuse does not.
        eps = abs(sample.kwargs.get("eps", 1e-5))
        leaves = [sample.input, *vectors]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        expected = getattr(F, name)(wide[0], shape, *wide[1:], eps=eps)
        out = trifuse.dropout_add_layer_norm(
            sample.input.flatten(-len(shape)),
            None,
            *(v.flatten() for v in vectors),
            eps=eps,
            rms_norm=name == "rms_norm",
        ).view(expected.shape)
        upstream = torch.randn(out.shape, dtype=torch.float64).to(dtype)
        grads = torch.autograd.grad(out, leaves, upstream)
        wanted = torch.autograd.grad(expected, wide, upstream.double())
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 2e-2)
        for actual, want in zip((out, *grads), (expected, *wanted), strict=True):
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.double(), want, rtol=tolerance, atol=tolerance)
