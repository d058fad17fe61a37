"""Attention against independent oracles: ONNX's node tests and torch's own samples."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from onnx_cases import onnx_cases
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalVariant
from torch.testing._internal.common_methods_invocations import op_db

import trifuse

# ONNX -------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A case of ONNX's Attention operator: its attributes, named inputs and expected output."""

    attributes: dict[str, Any]
    inputs: dict[str, Tensor]
    expected: Tensor
    rtol: float
    atol: float


INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


@functools.cache
def onnx_nodes() -> dict[str, Node]:
    nodes = {}
    for case in onnx_cases("Attention"):
        named = zip(INPUTS, case.inputs, strict=False)
        inputs = {name: t for name, t in named if t is not None}
        name = case.name.removeprefix("attention_")
        nodes[name] = Node(case.attributes, inputs, case.outputs[0], case.rtol, case.atol)
    return nodes


def attend(node: Node) -> Tensor:
    """Computes an ONNX node with trifuse."""
    attributes, inputs = node.attributes, dict(node.inputs)
    flat = inputs["Q"].dim() == 3
    if flat:  # (B, L, H · E)
        heads = {"Q": "q_num_heads", "K": "kv_num_heads", "V": "kv_num_heads"}
        for name, count in heads.items():
            inputs[name] = inputs[name].unflatten(-1, (attributes[count], -1)).transpose(1, 2)
    query, key, value = (inputs[name] for name in "QKV")
    past = 0
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        key = torch.cat([inputs["past_key"], key], 2)
        value = torch.cat([inputs["past_value"], value], 2)
    Lq, Lk = query.shape[2], key.shape[2]

    mask = inputs.get("attn_mask")
    if mask is not None and mask.shape[-1] not in (1, Lk):  # keys past its end are left out
        fill = False if mask.dtype == torch.bool else float("-inf")
        mask = F.pad(mask, (0, Lk - mask.shape[-1]), value=fill)
    options: dict[str, Any] = {
        "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap") or None,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    sides = [attributes.get(f"{side}_window_size", -1) for side in ("left", "right")]
    left, right = (None if side < 0 else side for side in sides)
    if attributes.get("is_causal"):
        right = 0
    lengths = inputs.get("nonpad_kv_seqlen")
    if lengths is not None and (left, right) != (None, None):
        # A cache that is filled up to each sequence's length: the diagonal ends at that length.
        rows = [
            trifuse.scaled_dot_product_attention(
                query[b : b + 1],
                key[b : b + 1, :, :n],
                value[b : b + 1, :, :n],
                mask if mask is None else _of_sequence(mask, b, n),
                is_causal=CausalVariant.LOWER_RIGHT,
                window=(left, None),
                **options,
            )
            for b, n in enumerate(lengths.tolist())
        ]
        out = torch.cat(rows)
    else:
        if past and (left, right) != (None, None):
            # The diagonal begins after the past, wherever the keys end.
            distance = torch.arange(Lk) - torch.arange(Lq)[:, None] - past
            band = (distance <= (Lk if right is None else right)) & (
                distance >= (-Lk - Lq if left is None else -left)
            )
            mask = band if mask is None else mask.masked_fill(~band, float("-inf"))
        else:
            options["window"] = (left, right)
        out = trifuse.scaled_dot_product_attention(
            query, key, value, mask, key_lengths=lengths, **options
        )
    return out.transpose(1, 2).flatten(2) if flat else out


def _of_sequence(mask: Tensor, b: int, length: int) -> Tensor:
    mask = mask[b : b + 1] if mask.dim() == 4 and mask.shape[0] > 1 else mask
    return mask if mask.shape[-1] == 1 else mask[..., :length]


@pytest.mark.parametrize("name", sorted(onnx_nodes()))
def test_onnx(kernel, name):
    node = onnx_nodes()[name]
    actual = attend(node)
    assert actual.dtype == node.expected.dtype
    # ONNX's expectations in 16 bits are rounded between steps, as in a composition of operators.
    rtol = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(actual.dtype, node.rtol)
    torch.testing.assert_close(actual, node.expected, rtol=rtol, atol=max(node.atol, rtol / 10))


def test_onnx_s_cases_are_found():
    assert len(onnx_nodes()) >= 90
    assert sum(bool(node.attributes.get("softcap")) for node in onnx_nodes().values()) >= 8


# torch ------------------------------------------------------------------------------------------

(SDPA,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_torch_s_samples(kernel, dtype):
    """Output and gradients against F.scaled_dot_product_attention in float64.

    In 16 bits only the output: scores reach 100 in these samples, and gradients then cancel until
    little but rounding is left. Only the numerics rule can judge that (test_attention_accuracy).
    """
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 1e-2)

    def close(actual: Tensor, expected: Tensor) -> None:
        atol = tolerance * expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=atol, check_dtype=False)

    samples = list(SDPA.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) >= 25
    compared = Counter()
    for sample in samples:
        tensors = [sample.input, *sample.args]
        options = dict(sample.kwargs)
        mask = options.get("attn_mask")
        torch.manual_seed(0)
        out = trifuse.scaled_dot_product_attention(*tensors, **options)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        if options["dropout_p"] > 0:
            # torch drops other weights than trifuse, so only the shapes are compared.
            with sdpa_kernel(SDPBackend.MATH):
                expected = F.scaled_dot_product_attention(*wide, **options)
            assert out.shape == expected.shape
            compared["dropout"] += 1
            continue
        if mask is not None and mask.is_floating_point():
            tensors.append(mask)
            wide.append(mask.detach().double().requires_grad_(mask.requires_grad))
            options["attn_mask"] = wide[-1]
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(*wide[:3], **options)
        close(out, expected)
        compared["exact"] += 1
        if dtype.itemsize == 2:
            continue
        upstream = torch.randn(out.shape, dtype=torch.float64)
        ours = [x for x in tensors if x.requires_grad]
        theirs = [x for x in wide if x.requires_grad]
        grads = torch.autograd.grad(out, ours, upstream.to(dtype))
        wanted = torch.autograd.grad(expected, theirs, upstream.to(dtype).double())
        for grad, want, x in zip(grads, wanted, ours, strict=True):
            assert grad.dtype == x.dtype
            close(grad, want)
    assert compared["exact"] >= 13
    assert compared["dropout"] >= 12
    assert SDPA.error_inputs_func is None  # torch has no samples of errors to go by
