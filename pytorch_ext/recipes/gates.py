"""Gated feed-forward networks, found in any module's code.

A gate is the product of two halves of a linear layer, or of two layers of the same input, one of
them after an activation. Libraries write it in these ways, with the factors in either order::

    x = self.act(self.gate(x)) * self.up(x)

    g = self.act(self.gate(x))
    u = self.up(x)
    x = g * u

    g, u = self.gate_up(x).chunk(2, dim=-1)
    x = self.act(g) * u

A call of the operator replaces the product. The earlier statements that made its factors are
removed.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple

from trifuse.recipes import code

_MOST_STATEMENTS = 4  # that make a gate, without the statement of the product


class Gate(NamedTuple):
    """A gate in the last of some statements, which alone remains."""

    statement: ast.stmt  # with a call in place of the product
    consumed: int  # the number of statements


class _Half(NamedTuple):
    """One half of a linear layer's result, divided along its last dimension."""

    of: ast.expr
    divided: int  # the statement that divides it
    place: int  # 0: the first


class _Found(NamedTuple):
    """The names and statements that a gate consists of."""

    x: str
    linears: tuple[str, ...]  # that of the gate and that of the other factor, or one for both
    activation: str
    first: int  # if one linear layer makes both: the half that the activation gets


def find(body: Sequence[ast.stmt], roles: dict[str, str], method: ast.FunctionDef) -> Gate | None:
    """Match a gate at the start of some statements.

    Args:
        body: the statements.
        roles: the submodules of a module that take part, by name.
        method: the method of which the statements are a part.
    """
    for last in range(min(len(body), _MOST_STATEMENTS + 1)):
        for product in _products(body[last]):
            match = _Match(body, last, roles)
            found = match.gate(product)
            whole = found is not None and match.used == set(range(last))
            if found is not None and whole and match.may_leave_out(found.x, product, method):
                return Gate(_replaced(body[last], product, found), last + 1)
        if not isinstance(body[last], ast.Assign):
            break
    return None


def _products(statement: ast.stmt) -> list[ast.BinOp]:
    """Return the products that a statement computes exactly once whenever it runs."""
    if not isinstance(statement, (ast.Assign, ast.Return)) or statement.value is None:
        return []
    nodes = list(ast.walk(statement.value))
    if any(isinstance(node, code.LATER) for node in nodes):
        return []
    return [n for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]


class _Match:
    """The search for the statements that make a product's factors."""

    def __init__(self, body: Sequence[ast.stmt], last: int, roles: dict[str, str]) -> None:
        self.body = body
        self.last = last
        self.roles = roles
        self.used: set[int] = set()  # the statements that make the factors

    def gate(self, product: ast.BinOp) -> _Found | None:
        """Match activation(linear(x)) * linear(x), the factors in either order."""
        for activated, other in (
            (product.left, product.right),
            (product.right, product.left),
        ):
            self.used = set()
            activation = self.called(self.definition(activated, self.last), "activation")
            if activation is None:
                continue
            name, inner, at = activation
            gate, up = self.definition(inner, at), self.definition(other, self.last)
            if isinstance(gate[0], _Half) and isinstance(up[0], _Half):
                found = self.halves(gate[0], up[0], name)
            else:
                found = self.two(gate, up, name)
            if found is not None:
                return found
        return None

    def two(self, gate: Any, up: Any, activation: str) -> _Found | None:
        """Match two linear layers of the same variable."""
        first, second = self.called(gate, "linear"), self.called(up, "linear")
        if first is None or second is None or first[0] == second[0]:
            return None
        x, other = first[1], second[1]
        if not (isinstance(x, ast.Name) and isinstance(other, ast.Name) and x.id == other.id):
            return None
        return _Found(x.id, (first[0], second[0]), activation, 0)

    def halves(self, gate: _Half, up: _Half, activation: str) -> _Found | None:
        """Match the two halves of one linear layer of a variable."""
        if gate.divided != up.divided or gate.place == up.place:
            return None
        both = self.called(self.definition(gate.of, gate.divided), "linear")
        if both is None or not isinstance(both[1], ast.Name):
            return None
        return _Found(both[1].id, (both[0],), activation, gate.place)

    def definition(self, value: ast.expr, at: int) -> tuple[ast.expr | _Half, int]:
        """Return what a variable holds in statement ``at``, and the statement that assigns it.

        Any other expression, or a variable that isn't assigned in the statements, is returned as it
        is.
        """
        if not isinstance(value, ast.Name):
            return value, at
        for before in range(at - 1, -1, -1):
            statement = self.body[before]
            assert isinstance(statement, ast.Assign)
            (target, *more) = statement.targets
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            held = [name.id if isinstance(name, ast.Name) else None for name in names]
            if value.id not in held:
                continue
            self.used.add(before)
            if more or None in held:
                return value, at
            if not isinstance(target, ast.Tuple):
                return statement.value, before
            divided = _divided(statement.value)
            if divided is None or len(held) != 2 or held[0] == held[1]:
                return value, at
            return _Half(divided, before, held.index(value.id)), before
        return value, at

    def called(self, defined: Any, role: str) -> tuple[str, ast.expr, int] | None:
        """Match ``self.name(argument)``, where the submodule has a role."""
        value, at = defined
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and isinstance(value.func.value, ast.Name)
            and value.func.value.id == "self"
            and len(value.args) == 1
            and not value.keywords
            and self.roles.get(value.func.attr) == role
        ):
            return value.func.attr, value.args[0], at
        return None

    def may_leave_out(self, x: str, product: ast.BinOp, method: ast.FunctionDef) -> bool:
        """Whether only the gate reads what the statements before the last one assign."""
        *before, last = self.body[: self.last + 1]
        assigned = {name for statement in before for name in _assigned(statement)}
        if x in assigned:
            return False
        gate = {id(node) for each in (*before, product) for node in ast.walk(each)}
        elsewhere = _read(method, gate)
        return not (assigned & _read(last, gate) or (assigned - _assigned(last)) & elsewhere)


def _assigned(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _read(tree: ast.AST, without: set[int]) -> set[str]:
    """Return the variables that a tree reads or deletes, without some of its nodes, by id."""
    return {
        node.id
        for each in ast.walk(tree)
        if id(each) not in without
        for node in (each.target if isinstance(each, ast.AugAssign) else each,)
        if isinstance(node, ast.Name)
        and (isinstance(node.ctx, (ast.Load, ast.Del)) or node is not each)
    }


def _divided(value: ast.expr) -> ast.expr | None:
    """Match ``y.chunk(2, dim=-1)``, and return y."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
        return None
    arguments = [ast.unparse(argument) for argument in value.args]
    arguments += [f"{option.arg}={ast.unparse(option.value)}" for option in value.keywords]
    if value.func.attr != "chunk" or arguments not in (["2", "dim=-1"], ["2", "-1"]):
        return None
    return value.func.value


def _replaced(statement: ast.stmt, product: ast.BinOp, found: _Found) -> ast.stmt:
    def attribute(name: str) -> ast.expr:
        return ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())

    modules = [attribute(name) for name in (*found.linears, found.activation)]
    arguments: list[ast.expr] = [ast.Name(found.x, ast.Load()), *modules]
    helper = "_trifuse_gate"
    if len(found.linears) == 1:
        helper = "_trifuse_gate_halves"
        arguments.append(ast.Constant(found.first))
    call = ast.Call(attribute(helper), arguments, [])
    code.Replaced(product, call).visit(statement)
    return statement
