"""Biases of windows that models pick from a table of relative positions, one matrix per head.

    bias = table[index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1).contiguous()

Swin, SwinV2, BEiT, Data2Vec and models with their code have such statements, in an attention or in
a separate module. That module gets a subclass in which a call replaces the statements. The result
of the call is a :class:`trifuse.written_out.IndexedBias`. Attention takes it as ``relative_bias``
and ``relative_index``, beside the mask of shifted windows. So no matrix is made for a head, and no
gradient of one.
"""

from __future__ import annotations

import ast
import copy
import inspect
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.ops import _modes
from trifuse.recipes import code, sublayers
from trifuse.written_out import IndexedBias, is_plain


class WindowBias(nn.Module):
    """Mixin for fused classes of modules that pick biases from a table."""

    def _trifuse_picked(self, table: Tensor, index: Tensor, rows: int, columns: int) -> Tensor:
        """Return the biases, (H, rows, columns).

        Args:
            table: (n, H).
            index: integers in [0, n), rows · columns of them.
            rows, columns: the numbers of queries and of keys.
        """
        # First, because Dynamo can't trace the checks of the tensors.
        traced = _modes.transform_active() or torch.jit.is_tracing()
        if not traced and is_plain(table) and table.dim() == 2 and type(index) is Tensor:
            return IndexedBias.of(
                table.T, index.view(rows, columns).to(table.device), leading=table.shape[1:]
            )
        picked = table[index.view(-1)].view(rows, columns, -1)
        return picked.permute(2, 0, 1).contiguous()


def picks(module: nn.Module) -> bool:
    """Whether a module of transformers picks biases of windows from a table."""
    cls = sublayers.original(type(module))
    return sublayers.is_of_transformers(cls) and _is_known(cls)


# Keyed by the class and its method, which may be replaced.
_known: dict[tuple[Any, Any], bool] = {}


def _is_known(cls: Any) -> bool:
    key = cls, getattr(cls, "forward", None)
    if key not in _known:
        _known[key] = _rewritten(cls) is not None
    return _known[key]


def window_bias_class(source: Any) -> type[nn.Module]:
    """Return the subclass of a module's class that reads its biases from a table."""
    key = source, source.forward
    if key not in _classes:
        forward = _rewritten(source)
        if forward is None:
            return source
        origin = sublayers.origin_of(source, (window_bias_class, (source,)))
        _classes[key] = sublayers.subclass(WindowBias, origin, {"forward": forward})
    return _classes[key]


_classes: dict[tuple[Any, Any], type[nn.Module]] = {}


def _rewritten(cls: Any) -> types.FunctionType | None:
    """Return a class's ``forward`` with a call in place of the statements, or None."""
    forward = getattr(cls, "forward", None)
    if not isinstance(forward, types.FunctionType):
        return None
    if "permute" not in inspect.unwrap(forward).__code__.co_names:
        return None
    tree = code.parse(forward)
    if tree is None or not tree.args.args or tree.args.args[0].arg != "self":
        return None
    found = []
    for node in ast.walk(tree):
        block = getattr(node, "body", None)
        if isinstance(block, list):
            found += [each for at in range(len(block)) if (each := _statements(block, at))]
    if len(found) != 1:
        return None
    block, at, end, statement = found[0]
    block[at:end] = [statement]
    return code.compile_like(tree, forward)


class _Found(NamedTuple):
    """Statements that pick biases from a table, and the one that replaces them."""

    block: list[ast.stmt]  # the block that holds them
    at: int
    end: int
    statement: ast.stmt


def _statements(block: list[ast.stmt], at: int) -> _Found | None:
    """Return the statements, from a place on, that pick numbers from a table; None for others.

    All assign to the same name. Each statement except the first reads that name once, as its input.
    """
    first = block[at]
    name = _assigned(first)
    if name is None or not isinstance(first, ast.Assign):
        return None
    value, subscript = first.value, first.value
    while isinstance(subscript, ast.Call) and isinstance(subscript.func, ast.Attribute):
        subscript = subscript.func.value
    if not isinstance(subscript, ast.Subscript):
        return None
    for end in range(at + 2, min(at + 3, len(block)) + 1):
        statement: Any = copy.deepcopy(block[end - 1])
        if not isinstance(statement, ast.Return) and _assigned(statement) != name:
            return None
        reads = [
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        ]
        if len(reads) != 1:
            return None
        code.Replaced(reads[0], value).visit(statement)
        value = statement.value
        for node in ast.walk(value):
            if (call := _call(node)) is not None:
                code.Replaced(node, call).visit(statement)
                for each in ast.walk(call):
                    ast.copy_location(each, first)
                return _Found(block, at, end, statement)
    return None


def _assigned(statement: ast.stmt) -> str | None:
    """Return the name that a statement assigns its result to; None if it isn't one name."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def _call(node: ast.AST) -> ast.expr | None:
    """Return the call that replaces an expression that picks biases; None for any other."""
    if (permuted := _method(node, "contiguous")) is None:
        return None
    if (viewed := _method(permuted.value, "permute", "2, 0, 1")) is None:
        return None
    view = viewed.value
    if not isinstance(view, ast.Call) or len(view.args) != 3 or view.keywords:
        return None
    if not isinstance(view.func, ast.Attribute) or view.func.attr != "view":
        return None
    picked, rest = view.func.value, view.args[2]
    if not isinstance(picked, ast.Subscript) or ast.unparse(rest) != "-1":
        return None
    index = picked.slice
    if (flat := _method(index, "view", "-1")) is not None:
        index = flat.value
    if isinstance(index, (ast.Slice, ast.Tuple)):
        return None
    function = ast.Attribute(ast.Name("self", ast.Load()), "_trifuse_picked", ast.Load())
    return ast.Call(function, [picked.value, index, *view.args[:2]], [])


def _method(node: ast.AST, name: str, arguments: str = "") -> ast.Attribute | None:
    """Return ``x.name`` from a call ``x.name(arguments)``; None for other code."""
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if not isinstance(node.func, ast.Attribute) or node.func.attr != name:
        return None
    return node.func if ", ".join(map(ast.unparse, node.args)) == arguments else None
