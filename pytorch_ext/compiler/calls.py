"""Reads the nodes of a graph of Dynamo: their calls, and what is known of the values."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from trifuse import spellings
from trifuse.spellings import Operation


class Refused(Exception):  # noqa: N818 - it is no error
    """Nodes look like a pattern but stay as they are; the message is the reason."""


def require(condition: Any, reason: str) -> None:
    """Raises :class:`Refused` unless the condition holds."""
    if not condition:
        raise Refused(reason)


_IN_PLACE = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ifloordiv,
    operator.imod, operator.ilshift, operator.irshift, operator.setitem, operator.delitem,
}  # fmt: skip


def read(node: Any) -> Operation | None:
    """Returns the call of a node; None if it is no node, or no operation in the spellings."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    call = spellings.read_node(node.target, node.args, dict(node.kwargs))
    return None if call is None else call._replace(in_place=writes(node))


def writes(node: Node) -> bool:
    """Returns whether a call changes one of its arguments, or may do so."""
    if is_in_place(node):
        return True
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    given = dict(zip(_parameters(target), node.args, strict=False)) | node.kwargs
    asked = (given.get(name) for name in ("inplace", "out", "max_norm"))
    return any(each is not None and each is not False for each in asked)


def is_in_place(node: Node) -> bool:
    """Returns whether a call changes the argument that it takes first, and no other."""
    target: Any = node.target
    if node.op == "call_method":
        name = str(target)
    elif node.op == "call_function" and not isinstance(target, torch._ops.OperatorBase):
        name = getattr(target, "__name__", "")
    else:
        return False
    return spellings.is_in_place_name(name) or name == "__setitem__" or target in _IN_PLACE


@functools.cache
def _parameters(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function in C++, which takes ``out`` by its name only
        return ()


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
    return _number_held(node) if isinstance(node, Node) else None


def _number_held(node: Node) -> float | None:
    """Returns the number in a tensor without dimensions that the graph makes of it."""
    fake: Any = tensor(node)
    if fake is None or fake.dim() or fake.dtype == torch.bool or fake.is_complex():
        return None
    if fake.requires_grad or fake._version:  # it changes in place
        return None
    if fake.constant is not None:  # made by torch.tensor, perhaps with steps after it
        return float(fake.constant)
    if node.target is torch.full and len(node.args) == 2:
        filled = number(node.args[1])
        return None if filled is None else as_held(filled, fake.dtype)
    return None


def as_held(x: float, dtype: torch.dtype) -> float:
    """Returns the number that a tensor of this dtype holds for x."""
    return float(torch.tensor(x, dtype=dtype, device="cpu"))


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
