"""Sums that a norm takes, and that stay torch's: most are those of embeddings.

    hidden_states = inputs_embeds + position_embeds
    hidden_states = self.drop(hidden_states)
    for block in self.h:                            # each begins with a norm
        hidden_states = block(hidden_states)

:mod:`trifuse.recipes.sublayers` computes a sum with a norm of the same module, and
:mod:`trifuse.recipes.boundaries` the last sum of a layer with a norm of another module. This module
finds all other sums that a norm takes, for the report. It follows values through the code of
modules. A sum under a condition counts if it is in both branches, or if the condition is known from
the module's attributes.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from trifuse.nn.dropout import DROPOUTS
from trifuse.recipes import boundaries, code, norms, sublayers


class LoneSum(NamedTuple):
    """A sum of torch's, and the norm that takes it."""

    module: nn.Module  # whose code adds
    holder: nn.Module  # of the norm
    norm: str
    how: str  # "in place", "under a condition", or ""


def find(model: nn.Module) -> Iterator[LoneSum]:
    """Yield the sums in a model that stay torch's, except those at the ends of layers."""
    found = _Found()
    seen = {(layer, _LAST) for _, layer, _ in boundaries.find(model)}
    for module in model.modules():
        for use in found.flow(module).uses:
            place, made = found.norm_of(module, use), found.made(module, use.value)
            if place is None or made is None or made in seen:
                continue
            seen.add(made)
            if module is not place[0] or not boundaries.takes_sum(*place):
                yield LoneSum(made[0], *place, use.value.how)


class _Value(NamedTuple):
    """A value that a variable of a method holds."""

    kind: str  # "sum", made there; "given", an argument of the method; "child", a module's result
    name: str  # of the argument or of the module; a sum's place in the code
    how: str = ""  # as in LoneSum


_LAST = ""  # the place of a module's last sum, for other modules


class _Use(NamedTuple):
    """A call of a submodule with a value."""

    value: _Value
    child: str  # the submodule; or a list whose first module is called
    argument: int | str  # its place or its name


class _Flow(NamedTuple):
    """Where the values of a module's ``forward`` go."""

    arguments: tuple[str, ...] = ()
    uses: tuple[_Use, ...] = ()
    returned: _Value | None = None


class _Found:
    """Reads the code of a model's modules, and finds the norms that take the sums in it."""

    def __init__(self) -> None:
        self.flows: dict[nn.Module, _Flow] = {}

    def flow(self, module: nn.Module) -> _Flow:
        """Return where the values of a module's ``forward`` go."""
        if module not in self.flows:
            self.flows[module] = _read(module)
        return self.flows[module]

    def norm_of(self, module: nn.Module, use: _Use) -> tuple[nn.Module, str] | None:
        """Return the norm that gets a value first: its holder and its name there; or None."""
        child = module._modules.get(use.child)
        if isinstance(child, nn.ModuleList):
            child = next(iter(boundaries.modules_of(child)), None)
        if child is None:
            return None
        if norms.is_known(child):
            return module, use.child
        flow = self.flow(child)
        name = use.argument
        if isinstance(name, int):
            name = flow.arguments[name] if name < len(flow.arguments) else ""
        given = (each for each in flow.uses if each.value == _Value("given", name))
        places = (self.norm_of(child, each) for each in given)
        return next((place for place in places if place is not None), None)

    def made(self, module: nn.Module, value: _Value) -> tuple[nn.Module, str] | None:
        """Return the module that adds up a value in a module, and where; None for other values."""
        if value.kind == "sum":
            return module, value.name
        child = module._modules.get(value.name) if value.kind == "child" else None
        returned = None if child is None else self.flow(child).returned
        made = None if child is None or returned is None else self.made(child, returned)
        return None if made is None else (made[0], _LAST)


def _read(module: nn.Module) -> _Flow:
    source: Any = sublayers.original(type(module))
    tree = _tree(source.forward) if sublayers.is_of_transformers(source) else None
    if tree is None:
        return _Flow()
    reader = _Reader(module, source.forward)
    arguments = tuple(each.arg for each in tree.args.args[1:])
    values: dict[str, _Value | None] = {name: _Value("given", name) for name in arguments}
    reader.block(tree.body, values)
    returned = set(reader.returned)
    return _Flow(arguments, tuple(reader.uses), returned.pop() if len(returned) == 1 else None)


@functools.cache  # by function, because that of a class may be replaced
def _tree(function: Any) -> ast.FunctionDef | None:
    return code.parse(function, to_read=True)


_Values = dict[str, "_Value | None"]


class _Reader:
    """Follows the values in a module's ``forward``."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        self.module = module
        self.scope = inspect.unwrap(forward).__globals__
        self.loops: dict[str, str] = {}  # by variable, the list whose modules it runs through
        self.is_inside = False  # of a branch
        self.uses: list[_Use] = []
        self.returned: list[_Value | None] = []

    def block(self, body: list[ast.stmt], values: _Values) -> None:
        """Follow the values through statements, from ``values`` before them to those after."""
        for statement in body:
            if isinstance(statement, ast.If):
                self._calls(statement.test, values)
                self._branches(statement, values)
            elif isinstance(statement, ast.For):
                self._loop(statement, values)
            elif isinstance(statement, ast.With):
                self.block(statement.body, values)
            else:
                self._calls(statement, values)
                self._step(statement, values)

    def _step(self, statement: ast.stmt, values: _Values) -> None:
        if isinstance(statement, ast.Return):
            self.returned.append(self._value(boundaries.result_of(statement.value), values))
            return
        target = boundaries.first_target(statement)
        value = self._value(boundaries.assigned_value(statement), values)
        values.update(dict.fromkeys(boundaries.stored_names(statement)))
        if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            target, value = ast.unparse(statement.target), self._sum(statement)
        if target is not None:
            values[target] = value

    def _branches(self, statement: ast.If, values: _Values) -> None:
        holds = self._holds(statement.test)
        after = []
        for taken, body in ((True, statement.body), (False, statement.orelse)):
            if holds is (not taken):
                continue
            branch = dict(values)
            outside, self.is_inside = self.is_inside, True
            self.block(body, branch)
            self.is_inside = outside
            if not body or not isinstance(body[-1], _LEAVES):
                after.append(branch)
        if after:
            first, other = after[0], after[-1]
            for name in first.keys() | other.keys():
                values[name] = _in_both(first.get(name), other.get(name))

    def _loop(self, statement: ast.For, values: _Values) -> None:
        target = statement.target
        if isinstance(target, ast.Tuple) and target.elts:
            target = target.elts[-1]
        name = code.own_list(statement.iter)
        if isinstance(target, ast.Name) and name is not None:
            self.loops[target.id] = name
        self.block(statement.body, values)
        values.update(dict.fromkeys(boundaries.stored_names(statement)))

    def _calls(self, node: ast.AST, values: _Values) -> None:
        for call in ast.walk(node):
            if not isinstance(call, ast.Call) or not (child := self._called(call)):
                continue
            given: list[tuple[int | str, ast.expr]] = [*enumerate(call.args)]
            given += [(each.arg, each.value) for each in call.keywords if each.arg is not None]
            for argument, expression in given:
                if (value := self._value(expression, values)) is not None:
                    self.uses.append(_Use(value, child, argument))

    def _called(self, call: ast.Call) -> str:
        """Return the submodule that a call runs, or the list that a loop runs through."""
        name = code.own_attribute(call.func)
        if name is None:
            return self.loops.get(ast.unparse(call.func), "")
        return name if name in self.module._modules else ""

    def _value(self, expression: ast.expr | None, values: _Values) -> _Value | None:
        if isinstance(expression, ast.Name):
            return values.get(expression.id)
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
            return self._sum(expression)
        if isinstance(expression, ast.Tuple) and expression.elts:
            return self._value(expression.elts[0], values)
        if isinstance(expression, (ast.Subscript, ast.Attribute)):
            whole = boundaries.whole(expression)
            return None if whole == ast.unparse(expression) else values.get(whole)
        if not isinstance(expression, ast.Call):
            return None
        child = self._called(expression)
        drops = type(self.module._modules.get(child)) in DROPOUTS
        if drops or code.value_of(expression.func, self.scope) is nn.functional.dropout:
            return self._value(expression.args[0], values) if expression.args else None
        return _Value("child", child) if child in self.module._modules else None

    def _sum(self, node: ast.expr | ast.stmt) -> _Value:
        how = (
            "in place" if isinstance(node, ast.AugAssign) else "under a condition" * self.is_inside
        )
        return _Value("sum", f"{node.lineno}:{node.col_offset}", how)

    def _holds(self, test: ast.expr) -> bool | None:
        """Return whether a condition on one of the module's attributes holds; None for others."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            holds = self._holds(test.operand)
            return None if holds is None else not holds
        tested = test.left if isinstance(test, ast.Compare) else test
        name = code.own_attribute(tested)
        if name is None:
            return None
        try:
            value = getattr(self.module, name)
        except Exception:  # of a property; the model may never read it
            return None
        rest = ast.unparse(test).removeprefix(f"self.{name}")
        if rest in (" is None", " is not None"):
            return (value is None) is (rest == " is None")
        return value if isinstance(value, bool) and not rest else None


_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def _in_both(one: _Value | None, other: _Value | None) -> _Value | None:
    """Return what a variable holds after two branches."""
    if one is not None and other is not None and one.kind == other.kind == "sum":
        return one
    return one if one == other else None
