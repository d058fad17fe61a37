"""Code of transformers that reads hidden states where they may be those of padding.

SigLIP's text model takes its pooled output from the last position of its encoder's result, whatever
the mask says; so does the summary of ELECTRA's sequences, if its configuration selects the last
one, or the mean of all. An encoder that leaves padding out has nothing but 0 there.

Only reads at fixed positions are found. A position that is computed from the ids is that of a real
token, and so is the last of ``x[eos_mask].view(...)[:, -1]``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch import nn

from trifuse.recipes import arguments, code, sublayers


def reads_padding(model: nn.Module, path: str, result: str) -> bool:
    """Whether the code of a stack or of what holds it reads its result at fixed places.

    Args:
        model: the model.
        path: the stack's name in it.
        result: the variable that holds the stack's hidden states in its own ``forward``.
    """
    holder = model
    for name in path.split(".") if path else ():
        child = holder._modules[name]
        if _reads(holder, child=name):
            return True
        assert child is not None
        holder = child
    return _reads(holder, variable=result)


def _reads(module: nn.Module, variable: str | None = None, child: str | None = None) -> bool:
    """Whether a module's code reads fixed places of a variable, or of what a child returns."""
    cls: Any = sublayers.original(type(module))
    if not sublayers.is_of_transformers(cls):
        return False
    tree = code.parse(cls.forward, to_read=True)
    if tree is None:
        return False
    return _Reading(module, child).finds(tree, variable)


class _Reading:
    """Follow the hidden states that a child of a module returns through its code."""

    def __init__(self, module: nn.Module, child: str | None) -> None:
        self.module = module
        self.child = child
        self.held: set[str] = set()  # the variables that hold hidden states

    def finds(self, tree: ast.FunctionDef, variable: str | None) -> bool:
        """Whether a method reads fixed places of hidden states, or hands them to one that does."""
        self.held = set() if variable is None else {variable}
        nodes = list(self._run(tree))
        before = None
        while before != self.held:  # variables may be assigned in any order, in a loop
            before = set(self.held)
            for node in nodes:
                if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if self._holds(node.value):
                        self.held.update(filter(None, map(_first, targets)))
        return any(map(self._is_read, nodes))

    def _run(self, tree: ast.FunctionDef) -> Iterator[ast.AST]:
        """Yield the nodes of a method; but not of branches that a module's options rule out."""
        waiting: list[ast.AST] = [*tree.body]
        while waiting:
            node = waiting.pop()
            yield node
            if isinstance(node, ast.If) and (chosen := self._chosen(node.test)) is not None:
                waiting += node.body if chosen else node.orelse
            else:
                waiting += ast.iter_child_nodes(node)

    def _chosen(self, test: ast.expr) -> bool | None:
        """The value of ``self.option == "value"``; None for other code."""
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)):
            return None
        if len(test.ops) != 1 or not isinstance(test.comparators[0], ast.Constant):
            return None
        option = code.own_attribute(test.left)
        if option is None or not hasattr(self.module, option):
            return None
        return bool(getattr(self.module, option) == test.comparators[0].value)

    def _holds(self, value: ast.expr) -> bool:
        """Whether an expression's value is the hidden states, each position in its place."""
        if isinstance(value, ast.Name):
            return value.id in self.held
        if isinstance(value, ast.Attribute):
            return value.attr in _HIDDEN_STATES and self._holds(value.value)
        if isinstance(value, ast.Subscript):
            return ast.unparse(value.slice) == "0" and self._holds(value.value)
        if isinstance(value, ast.Call) and (called := code.own_attribute(value.func)) is not None:
            alone = len(value.args) == 1 and not value.keywords  # a norm or a dropout
            return called == self.child or (alone and self._holds(value.args[0]))
        return False

    def _is_read(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            return _is_at_the_end(node.slice) and self._holds(node.value)
        if not isinstance(node, ast.Call):
            return False
        called = code.own_attribute(node.func)
        if called is None:
            # A module that gets only the hidden states can't tell padding from real tokens.
            averages = isinstance(node.func, ast.Attribute) and node.func.attr == "mean"
            return self.child is None and averages and self._holds_mean(node)
        part = self.module._modules.get(called)
        if part is None or called == self.child or not node.args or not self._holds(node.args[0]):
            return False
        return _reads(part, variable=_first_parameter(part))

    def _holds_mean(self, call: ast.Call) -> bool:
        """Match ``x.mean(1)``, with the axis of positions by name or not."""
        assert isinstance(call.func, ast.Attribute)
        given = [*call.args, *(each.value for each in call.keywords if each.arg == "dim")]
        return [ast.unparse(each) for each in given] == ["1"] and self._holds(call.func.value)


_HIDDEN_STATES = ("last_hidden_state", "logits")  # attributes of what models return


def _first(target: ast.expr) -> str | None:
    """The variable that gets the first of what is assigned, or all of it."""
    if isinstance(target, ast.Tuple):
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) else None


def _first_parameter(module: nn.Module) -> str | None:
    positional = arguments.of(module).positional
    return positional[0] if positional else None


def _is_at_the_end(index: ast.expr) -> bool:
    """Match ``[:, -1]``, ``[:, -1, ...]`` and ``[:, -1:]``, of any number."""
    if not (isinstance(index, ast.Tuple) and len(index.elts) > 1):
        return False
    first, second = index.elts[:2]
    if isinstance(second, ast.Slice):
        second = second.lower or second
    negative = isinstance(second, ast.UnaryOp) and isinstance(second.op, ast.USub)
    return ast.unparse(first) == ":" and negative and ast.unparse(second)[1:].isdigit()
