"""Reads the calls of a graph of Dynamo, whose code has many spellings of one operation."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node


class Refused(Exception):  # noqa: N818 - it is no error
    """Nodes look like a pattern, and stay; the message is the reason."""


def require(condition: Any, reason: str) -> None:
    """Raises :class:`Refused` unless the condition holds."""
    if not condition:
        raise Refused(reason)


class Operation(NamedTuple):
    """One operation, however it is spelled.

    Attributes:
        op: its name below, such as "matmul".
        args: the arguments that were passed, by name.
        in_place: whether it writes its result over the first argument.
    """

    op: str
    args: dict[str, Any]
    in_place: bool

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an argument, or ``default`` if the call leaves it out."""
        return self.args.get(name, default)


# The operation, its parameters, and its targets in a graph: functions, and names of methods. An
# operation occurs once for each order of parameters.
_SPELLINGS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("matmul", "input other", (torch.matmul, operator.matmul, "matmul", "__matmul__")),
    ("matmul", "input mat2", (torch.bmm, "bmm")),
    ("baddbmm", "input batch1 batch2 beta alpha", (torch.baddbmm, "baddbmm")),
    ("add", "input other alpha", (torch.add, operator.add, operator.iadd, "add", "add_")),
    ("mul", "input other", (torch.mul, torch.multiply, operator.mul, operator.imul, "mul", "mul_")),
    ("div", "input other rounding_mode", (torch.div, operator.truediv, operator.itruediv)),
    ("div", "input other rounding_mode", (torch.true_divide, "div", "div_")),
    ("pow", "input exponent", (torch.pow, operator.pow, operator.ipow, "pow", "pow_")),
    ("square", "input", (torch.square, "square")),
    ("sqrt", "input", (torch.sqrt, "sqrt")),
    ("rsqrt", "input", (torch.rsqrt, "rsqrt")),
    ("tanh", "input", (torch.tanh, "tanh")),
    ("mean", "input dim keepdim dtype", (torch.mean, "mean")),
    ("softmax", "input dim dtype", (torch.softmax, "softmax")),
    ("softmax", "input dim _stacklevel dtype", (F.softmax,)),
    ("masked_fill", "input mask value", (torch.masked_fill, "masked_fill", "masked_fill_")),
    ("where", "condition input other", (torch.where,)),
    ("where", "input condition other", ("where",)),
    ("dropout", "input p training inplace", (F.dropout,)),
    ("dropout", "input p train", (torch.dropout,)),
    ("layer_norm", "input normalized_shape weight bias eps", (F.layer_norm,)),
    ("layer_norm", "input normalized_shape weight bias eps cudnn_enable", (torch.layer_norm,)),
    ("rms_norm", "input normalized_shape weight eps", (F.rms_norm, torch.rms_norm)),
    ("linear", "input weight bias", (F.linear,)),
    ("relu", "input inplace", (F.relu,)),
    ("relu", "input", (torch.relu, "relu", "relu_")),
    ("gelu", "input approximate", (F.gelu,)),
    (
        "sdpa",
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        (F.scaled_dot_product_attention,),
    ),
    ("transpose", "input dim0 dim1", (torch.transpose, "transpose", torch.swapaxes, "swapaxes")),
    ("transpose", "input dim0 dim1", (torch.swapdims, "swapdims")),
    # The patterns compare the tensors that these return, and read no arguments.
    ("view", "input", ("view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze")),
    ("view", "input", (torch.reshape, torch.flatten, torch.unsqueeze, torch.squeeze)),
    ("cast", "input", ("to", "float", "half", "bfloat16", "double", "type_as", "type")),
    ("cast", "input", ("contiguous", "clone", torch.clone)),
)

_BY_TARGET: dict[Any, tuple[str, list[str]]] = {
    target: (op, names.split()) for op, names, targets in _SPELLINGS for target in targets
}
_IN_PLACE = {
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ipow,
    operator.imatmul,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ifloordiv,
    operator.imod,
    operator.ilshift,
    operator.irshift,
    operator.setitem,
    operator.delitem,
}
_FEW_ARGUMENTS = ("view", "cast")


def read(node: Any) -> Operation | None:
    """Returns the call of a node, or None if it is no node or none of the operations above."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    if node.target is torch.functional.einsum:
        equation, *operands = node.args
        return Operation("einsum", {"equation": equation, "operands": operands}, False)
    found = _BY_TARGET.get(node.target)
    if found is None:
        return None
    op, names = found
    if op in _FEW_ARGUMENTS:
        return Operation(op, {"input": node.args[0]}, False) if node.args else None
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None  # such as Tensor.softmax with names of dimensions, or out=
    args = dict(zip(names, node.args, strict=False)) | node.kwargs
    if node.target in (torch.bmm, "bmm"):
        args["other"] = args.pop("mat2")
    return Operation(op, args, writes(node))


def writes(node: Node) -> bool:
    """Returns whether a call changes one of its arguments, or may do so."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return False
    target: Any = node.target
    if target in _IN_PLACE or node.kwargs.get("out") is not None:
        return True
    if node.kwargs.get("inplace"):
        return True
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    name = getattr(target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    found = _BY_TARGET.get(target)
    if found is not None and "inplace" in found[1]:
        place = found[1].index("inplace")
        return len(node.args) > place and bool(node.args[place])
    return False


def value(node: Any) -> Any:
    """Returns what Dynamo saw a node return: a fake tensor, a symbolic number or another object."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def tensor(node: Any) -> Tensor | None:
    """Returns the fake tensor that a node returned; None for anything else.

    Subclasses of tensors, nested and sparse tensors, and the tensors inside of ``torch.func``'s
    transforms count as something else.
    """
    from torch._subclasses import FakeTensor

    found = value(node) if isinstance(node, Node) else None
    if type(found) is not FakeTensor or found.layout != torch.strided or found.is_nested:
        return None
    return found


def plain(node: Any) -> Tensor:
    """As :func:`tensor`; raises :class:`Refused` instead of returning None."""
    found = tensor(node)
    if found is None:
        raise Refused(f"{node.name if isinstance(node, Node) else node} is no plain tensor")
    return found


def number(node: Any) -> float | None:
    """Returns a number that is the same in every call of the graph, or None."""
    found = value(node)
    if isinstance(found, (torch.SymInt, torch.SymFloat)):
        inner = found.node
        expression = inner.shape_env.replace(inner.expr)
        return None if expression.free_symbols else float(expression)
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return float(found)
    return None


def same(a: Any, b: Any) -> bool:
    """Returns whether two sizes are equal whatever the graph's inputs are."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def same_shape(a: Any, b: Any) -> bool:
    """Returns whether two shapes are equal whatever the graph's inputs are."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def is_last(dim: Any, rank: int) -> bool:
    """Returns whether ``dim`` is the last of ``rank`` dimensions, as a number or a list of it."""
    if isinstance(dim, (tuple, list)):
        return len(dim) == 1 and is_last(dim[0], rank)
    return dim in (-1, rank - 1) and not isinstance(dim, bool)
