"""Finds linear layers, with an activation after them, where trifuse's product is faster.

A layer is a call of ``F.linear``, or a product with a transposed parameter, such as ``x @ W.T``.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from trifuse.compiler.calls import Refused, plain, read, require, same_shape, tensor
from trifuse.compiler.rewriter import Rewriter
from trifuse.ops._linear_choice import choose
from trifuse.ops.activations import Activation


def is_candidate(node: Node) -> bool:
    """Returns whether a node is a linear layer of a kind for which trifuse's product is faster.

    In a graph a weight can't be kept packed, so the figures that count are those of training.
    """
    out = tensor(node)
    if out is None or out.device.type != "cpu" or _operands(node) is None:
        return False
    return choose(out.dtype).training


def _operands(node: Node) -> tuple[Any, Any, Any] | None:
    """Returns the input, weight and bias of a linear layer; None if it isn't a linear layer."""
    call = read(node)
    if call is not None and call.op == "linear":
        return call.get("input"), call.get("weight"), call.get("bias")
    if call is not None and call.op == "matmul":
        weight = _untransposed(call.get("other"))
        if weight is not None and weight.op in ("placeholder", "get_attr"):
            return call.get("input"), weight, None
    return None


def _untransposed(node: Any) -> Node | None:
    """Returns the matrix that a node is the transpose of, if the graph shows it."""
    matrix, call = tensor(node), read(node)
    if matrix is None or matrix.dim() != 2:
        return None
    found: Any = None
    if call is not None and call.op == "transpose":
        dims = {call.get("dim0"), call.get("dim1")}
        if len({dim % 2 for dim in dims}) == 2:
            found = call.get("input")
    elif call is not None and call.op == "t":
        found = call.get("input")
    elif node.target in _TRANSPOSES or (node.target is getattr and node.args[1] in ("T", "mT")):
        found = node.args[0]
    return found if isinstance(found, Node) else None


# Since torch 2.15, graphs hold these ops for .T and .mT, instead of getattr.
_TRANSPOSES = (torch.ops.aten.numpy_T, torch.ops.aten.mT)


def replace(rewriter: Rewriter, node: Node) -> None:
    """Replaces the linear layer at ``node``, a candidate, and the activation after it.

    Raises:
        Refused: it has something that the operator does not compute, or few rows.
    """
    x, weight, bias = operands(node)
    dtype = plain(node).dtype

    def insert(end: Node, activation: Activation | None) -> None:
        with rewriter.inserting(end):
            new = rewriter.call(linear, x, weight, bias, dtype, activation)
            rewriter.replace([end], [new], {node} - {end}, skipped(node, weight))

    end = _activation(node)
    if end is not None:
        with contextlib.suppress(Refused):
            insert(end, activation_name(end))
            return
    insert(node, None)


def operands(node: Node) -> tuple[Node, Node, Node | None]:
    """Returns the input, weight and bias of a linear layer that trifuse's product serves.

    Raises:
        Refused: it has something that the operator does not compute, or few rows.
    """
    found = _operands(node)
    assert found is not None
    x, weight, bias = found
    rows, matrix = plain(x), plain(weight)
    require(bias is None or _is_row(plain(bias), matrix), "its bias is no row of the result")
    require(matrix.dim() == 2 and matrix.numel() > 0 and rows.dim() >= 1, "its weight is no matrix")
    require(_many(rows.shape[:-1]), "it has few rows")
    return x, weight, bias


def skipped(node: Node, weight: Node) -> set[Node]:
    """Returns the transpose of the weight, if a linear layer reads one."""
    return {*node.all_input_nodes} & {*weight.users}


def _is_row(bias: Tensor, weight: Tensor) -> bool:
    return same_shape(bias.shape, weight.shape[:1])


def _many(sizes: torch.Size) -> bool:
    """Returns whether the traced call has as many rows as the measurements were made for."""
    hints = [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]
    return None not in hints and math.prod(hints) >= 64


def _activation(node: Node) -> Node | None:
    """Returns the activation that alone uses a linear layer's result, if it can be fused.

    If a gradient is needed, only ReLU can be: the others' derivatives need the layer's result.
    """
    users = list(node.users)
    name = activation_name(users[0]) if len(users) == 1 else None
    fusible = name == "relu" or (name is not None and not plain(node).requires_grad)
    return users[0] if fusible else None


def activation_name(node: Any) -> Activation | None:
    """Returns the name of the activation that a node computes; None if it computes none."""
    call = read(node)
    if call is not None and call.op in ("relu", "silu"):
        return call.op  # type: ignore[return-value]
    if call is not None and call.op == "gelu":
        names: dict[Any, Activation] = {"none": "gelu", "tanh": "gelu_tanh"}
        return names.get(call.get("approximate", "none"))
    return None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: Activation | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """Computes activation(x Wᵀ + b) in ``dtype`` by trifuse's product.

    With ``up``, a weight of the same shape, the result is multiplied by x upᵀ + up_bias.
    """
    rows, weight = x.to(dtype).reshape(-1, x.shape[-1]), weight.to(dtype)
    bias, up, up_bias = (None if t is None else t.to(dtype) for t in (bias, up, up_bias))
    if up is None:
        product = torch.ops.trifuse.linear(rows, weight, bias, activation)
    else:
        product = torch.ops.trifuse.linear_unpacked(rows, weight, bias, activation, up, up_bias)
    out: Tensor = product.view(*x.shape[:-1], weight.shape[0])
    return out
