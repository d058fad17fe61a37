"""The statements of methods of transformers, in the form in which they are compared."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections import Counter
from typing import Any, TypeGuard

from trifuse.recipes import code, sublayers


def of_class(cls: Any, *methods: str, memory: bool = False) -> str:
    """The statements of methods of a class of transformers, by default ``forward``.

    Args:
        cls: the class.
        methods: their names.
        memory: whether they get another sequence's states.

    Returns:
        "" for other classes, and if statements can't be read.
    """
    if not sublayers.is_of_transformers(cls):
        return ""
    found = [_statements(getattr(cls, name, None), memory) for name in methods or ("forward",)]
    return "\n".join(found) if all(found) else ""


def of_function(function: Any) -> str:
    """The statements of a function; "" if they can't be read."""
    return _statements(function, False)


_CACHES = ("past_key_values", "layer_past")


class _Normal(ast.NodeTransformer):
    """Removes differences between versions of transformers that do not change the meaning.

    It also removes what changes nothing where the op runs: dropout by a function, in evaluation,
    and bounds for float16.
    """

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("cache", node.ctx) if node.id in _CACHES else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for each in node.keywords:
            each.arg = "cache" if each.arg in _CACHES else each.arg
        node.keywords.sort(key=lambda each: (each.arg is None, each.arg))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value or ast.Constant(None))

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        self.generic_visit(node)
        dropped = f"nn.functional.dropout({ast.unparse(node.targets[0])}, "
        text = ast.unparse(node.value)
        drops = text.startswith(dropped) and text.endswith(", training=self.training)")
        return None if drops else node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        self.generic_visit(node)
        tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        alone = not isinstance(node.test, ast.BoolOp) or isinstance(node.test.op, ast.And)
        in_float16 = ast.unparse(tests[0]) == "hidden_states.dtype == torch.float16"
        return None if in_float16 and alone and not node.orelse else node


class _WithMemoryOrWithout(ast.NodeTransformer):
    """Leaves what a function runs with another sequence's states, or without them."""

    _PATTERN = re.compile("(encoder_hidden_states|key_value_states) is (not )?None")

    def __init__(self, memory: bool) -> None:
        self.memory = memory
        self.known: dict[str, bool] = {}  # variables that only get a constant

    def visit_Module(self, node: ast.Module) -> ast.AST:
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        assigned = Counter(name.id for name in names if isinstance(name.ctx, ast.Store))
        body: list[ast.stmt] = []
        for each in node.body:
            statement = self.visit(each)
            if isinstance(statement, ast.Assign) and _is_boolean(statement.value):
                target = statement.targets[0]
                if isinstance(target, ast.Name) and assigned[target.id] == 1:
                    self.known[target.id] = bool(statement.value.value)
                    continue
            body += statement if isinstance(statement, list) else [statement]
        return ast.Module(body, [])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(self.known[node.id]) if node.id in self.known else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        found = self._PATTERN.fullmatch(ast.unparse(node))
        return node if found is None else ast.Constant((found[2] is not None) == self.memory)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and _is_boolean(node.operand):
            return ast.Constant(not node.operand.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        absorbing = isinstance(node.op, ast.Or)
        constants = [each.value for each in node.values if _is_boolean(each)]
        others = [each for each in node.values if not _is_boolean(each)]
        if absorbing in constants or not others:
            return ast.Constant(absorbing if absorbing in constants else not absorbing)
        return others[0] if len(others) == 1 else ast.BoolOp(node.op, others)

    def visit_If(self, node: ast.If) -> Any:
        return self._chosen(node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        return self._chosen(node)

    def _chosen(self, node: ast.If | ast.IfExp) -> Any:
        self.generic_visit(node)
        if not _is_boolean(node.test):
            return node
        return node.body if node.test.value else node.orelse


def _is_boolean(node: ast.expr) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def normal(statements: str, memory: bool = False) -> str:
    """Return statements in the form in which they are compared, with a memory or without."""
    tree = _WithMemoryOrWithout(memory).visit(_Normal().visit(ast.parse(statements)))
    return ast.unparse(ast.fix_missing_locations(tree))


@functools.cache
def _statements(function: Any, memory: bool) -> str:
    """The statements of a function in normal form; "" if they can't be read."""
    if not inspect.isfunction(function):
        return ""
    body = code.body(function)
    return "" if body is None else normal(body, memory)
