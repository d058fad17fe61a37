"""Finds gated linear layers, activation(x Gᵀ + b) * (x Uᵀ + c), where no gradient is needed.

G and U are the weights of two layers, or the halves of one layer's weight. The derivative of the
gate needs what both products return, so where a gradient is needed the layers stay apart.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch.fx import Node

from trifuse.compiler.calls import number, plain, read, require, same, same_shape, tensor, value
from trifuse.compiler.linear import activation_name, linear, operands, skipped
from trifuse.compiler.linear import is_candidate as is_layer
from trifuse.compiler.rewriter import Rewriter
from trifuse.ops.activations import Activation


class _Part(NamedTuple):
    """A linear layer, or one half of its features."""

    result: Node
    layer: Node
    nodes: tuple[Node, ...]  # from the layer to the result
    half: int | None = None  # the first or the second


class _Gated(NamedTuple):
    """A gated linear layer that was read from a graph."""

    gate: _Part
    up: _Part
    activation: Activation
    active: Node  # the activation's result


def is_candidate(node: Node) -> bool:
    """Returns whether a node is the product of a linear layer and an activated one."""
    out = tensor(node)
    return out is not None and not out.requires_grad and _find(node) is not None


def _find(node: Node) -> _Gated | None:
    call = read(node)
    if call is None or call.op != "mul" or call.in_place:
        return None
    first, second = call.get("input"), call.get("other")
    for active, other in ((first, second), (second, first)):
        activation, before = activation_name(active), read(active)
        if activation is not None and before is not None:
            gate, up = _part(before.get("input")), _part(other)
            if gate is not None and up is not None and gate.result is not up.result:
                return _Gated(gate, up, activation, active)
    return None


def _part(node: Any) -> _Part | None:
    if tensor(node) is None:
        return None
    if is_layer(node):
        return _Part(node, node, (node,))
    if node.target is not operator.getitem:
        return None
    pieces, index = node.args
    split = read(pieces)
    if split is None or split.op != "split" or index not in (0, 1):
        return None
    layer = split.get("input")
    if tensor(layer) is None or not is_layer(layer) or len(value(pieces)) != 2:
        return None
    if not same(2 * plain(node).shape[-1], plain(layer).shape[-1]):  # of another dimension
        return None
    return _Part(node, layer, (layer, pieces, node), index)


def replace(rewriter: Rewriter, node: Node) -> None:
    """Replaces the gated linear layer that ends at ``node``, a candidate.

    Raises:
        Refused: it has something that the operator does not compute, or few rows.
    """
    found = _find(node)
    assert found is not None
    parts = found.gate, found.up
    (x, weight, bias), (other, up_weight, up_bias) = (operands(part.layer) for part in parts)
    require(x is other, "its layers have different inputs")
    shapes = (plain(part.result).shape for part in parts)
    require(same_shape(*shapes), "its layers have different sizes")
    dtypes = {plain(part.layer).dtype for part in parts}
    require(len(dtypes) == 1, "its layers have different dtypes")
    result, nodes = node, {found.active, *found.gate.nodes, *found.up.nodes}
    while (after := _unchanged(result)) is not None:
        nodes.add(result)
        result = after
    turned = skipped(found.gate.layer, weight) | skipped(found.up.layer, up_weight)
    with rewriter.inserting(result):
        gate = [_half(rewriter, each, found.gate) for each in (weight, bias)]
        up = [_half(rewriter, each, found.up) for each in (up_weight, up_bias)]
        new = rewriter.call(linear, x, *gate, *dtypes, found.activation, *up)
        rewriter.replace([result], [new], nodes, turned)


def _half(rewriter: Rewriter, parameter: Node | None, part: _Part) -> Node | None:
    """Returns the rows of a layer's parameter that make the part."""
    if parameter is None or part.half is None:
        return parameter
    size = int(plain(part.result).shape[-1])
    return rewriter.call("narrow", parameter, 0, part.half * size, size)


def _unchanged(node: Node) -> Node | None:
    """Returns the product with 1 that alone uses a node, as where a model has no factor."""
    users = list(node.users)
    call = read(users[0]) if len(users) == 1 else None
    if call is None or call.op != "mul" or call.in_place:
        return None
    factor = call.get("other") if call.get("input") is node else call.get("input")
    fits = number(factor) == 1 and tensor(users[0]) is not None
    return users[0] if fits and plain(users[0]).dtype == plain(node).dtype else None
