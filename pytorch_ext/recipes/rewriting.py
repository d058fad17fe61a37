"""The statements of a method that become calls of the operators, found and replaced.

The ends of sublayers have the forms in the docstring of :mod:`trifuse.recipes.sublayers`. A method
of :class:`trifuse.recipes.sublayers.Fused` takes the place of each. A linear layer with its
activation is replaced too, in one statement or in two. So are torch's dropout, and functions that
rotate queries and keys.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import types
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from trifuse.recipes import boundaries, code, gates, rotary_functions

if TYPE_CHECKING:
    from trifuse.recipes.sublayers import Roles


def rewrite(tree: ast.FunctionDef, roles: Roles, scope: dict[str, Any]) -> Rewriter:
    """Replace what is recognised in a method, whose globals are ``scope``."""
    rewriter = Rewriter(dict(roles), scope, tree)
    tree.body = rewriter.method_body(tree.body)
    _WithoutReadingWeights(rewriter.roles).visit(tree)
    return rewriter


def may_match(roles: Roles, method: Any) -> bool:
    """Whether a method uses enough of the submodules, or of the functions, to be worth reading."""
    names = set(inspect.unwrap(method).__code__.co_names)
    kinds = {kind for name, kind in roles if name in names}
    if "norm" in kinds or any(each <= kinds for each in _PAIRS):
        return True
    if "linear" in kinds and _calls_activation(method):
        return True
    return drops(method) or rotary_functions.uses_any(method)


def _calls_activation(method: Any) -> bool:
    """Whether a method of transformers calls a function that computes a known activation."""
    if not (inspect.unwrap(method).__module__ or "").startswith("transformers."):
        return False
    from trifuse.recipes import activations

    return activations.uses_any(method)


def drops(method: Any) -> bool:
    """Whether a method may call torch's dropout, or a function beside its class that uses it."""
    function = inspect.unwrap(method)
    names = set(function.__code__.co_names)
    values = [function.__globals__.get(name) for name in names]
    functional = "functional" in names or any(each is nn.functional for each in values)
    if "dropout" in names and functional:
        return True
    return any(
        isinstance(each, types.FunctionType)
        and each.__module__ == function.__module__
        and bool(_parameters_of_dropout_add(each))
        for each in values
    )


_PAIRS = {"linear", "activation"}, {"linear", "dropout"}


class _WithoutReadingWeights(ast.NodeTransformer):
    """Replaces reads of a linear layer's weight for its dtype or type alone.

    Reading a frozen weight unpacks it. T5's network compares dtypes in every call.
    """

    def __init__(self, roles: dict[str, str]) -> None:
        self.roles = roles

    def _layer(self, node: ast.expr) -> ast.expr | None:
        """The linear layer whose weight an expression reads, or None."""
        if not (isinstance(node, ast.Attribute) and node.attr == "weight"):
            return None
        layer = node.value
        if not (isinstance(layer, ast.Attribute) and ast.unparse(layer.value) == "self"):
            return None
        return layer if self.roles.get(layer.attr) == "linear" else None

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        layer = self._layer(node.value) if node.attr == "dtype" else None
        return node if layer is None else _of_weight("_trifuse_weight_dtype", layer, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) != "isinstance" or len(node.args) != 2:
            return node
        layer = self._layer(node.args[0])
        if layer is None or ast.unparse(node.args[1]) != "torch.Tensor":
            return node
        return _of_weight("_trifuse_has_weight", layer, node)


def _of_weight(helper: str, layer: ast.expr, at: ast.expr) -> ast.AST:
    return ast.fix_missing_locations(ast.copy_location(_call(helper, layer), at))


class _End(NamedTuple):
    """Statements that become one call of the operator."""

    statements: list[ast.stmt]
    consumed: int
    norm: str


class Rewriter:
    """Replaces what it recognises in one method's statements."""

    def __init__(
        self, roles: dict[str, str], scope: dict[str, Any], method: ast.FunctionDef
    ) -> None:
        self.roles = roles
        self.scope = scope  # the method's globals
        self.method = method
        self.norms: list[str] = []
        self.flag = ""  # an attribute that decides if norms come before or after sublayers
        self.norms_by_flag: tuple[list[str], list[str]] = [], []
        # By name, the functions that drop and add, whose calls were replaced.
        self.adders: dict[str, types.FunctionType] = {}
        self.changes = 0

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of a block, rewritten."""
        body = self._with_ends_in_branches(self._with_sums_written_out(body))
        out: list[ast.stmt] = []
        at = 0
        while at < len(body):
            if (end := self._end(body[at:])) is not None:
                self.norms.append(end.norm)
            elif (gate := gates.find(body[at:], self.roles, self.method)) is not None:
                end = _End([gate.statement], gate.consumed, "")
            else:
                end = (
                    self._activation(body[at:]) or self._drop(body[at]) or self._rotation(body[at])
                )
            if end is None:
                statement = body[at]
                if isinstance(statement, (ast.If, ast.For)):
                    statement.body = self.block(statement.body)
                    statement.orelse = self.block(statement.orelse)
                out.append(statement)
                at += 1
                continue
            for made in end.statements:
                ast.copy_location(made, body[at])
            out += end.statements
            at += end.consumed
            self.changes += 1
        return out

    def method_body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return a method's statements, rewritten.

        In a layer such as OPT's, an attribute decides whether norms come before sublayers or after
        them. So, for one of its values, ``if self.flag: norm`` separates a norm from its sum. Such
        statements are written, and rewritten, once for each value of the flag.
        """
        tests = [each for each in body if isinstance(each, ast.If)]
        flags = (_flag(each.test) for each in tests if self._is_optional_norm(each))
        norms = Counter(flag for flag in flags if flag is not None)
        flag = max(norms, key=norms.__getitem__, default="")
        if norms[flag] < 2:
            return self.block(body)
        self.flag = flag
        branches = []
        for value in (False, True):
            self.norms = self.norms_by_flag[value]
            branches.append(self.block(_with_flag(copy.deepcopy(body), flag, value)))
        self.norms = []
        chosen = ast.If(test=_attribute(flag), body=branches[True], orelse=branches[False])
        return [ast.copy_location(chosen, body[0])]

    def _with_sums_written_out(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Write ``y = dropout_add(x, residual, p, training)`` as a dropout and a sum.

        Also write ``y = dropout(x, ...)`` with torch's function as ``y = x; y = dropout(y, ...)``.
        """
        out: list[ast.stmt] = []
        for statement in body:
            assigned = _assigned(statement)
            target, call = assigned or ("", None)
            lines: tuple[str, ...] = ()
            if (terms := _added_by_function(call, self.scope)) is not None:
                assert isinstance(call, ast.Call)
                self.adders[ast.unparse(call.func)] = code.value_of(call.func, self.scope)
                x, residual, *options = map(ast.unparse, terms)
                dropped = f"self.{_DROP}({_DROPPED}, ({', '.join(options)}))"
                total = f"{target} = {residual} + {_DROPPED}"
                lines = f"{_DROPPED} = {x}", f"{_DROPPED} = {dropped}", total
            elif isinstance(call, ast.Call) and call.args and self._is_torchs_dropout(call.func):
                x = ast.unparse(call.args[0])
                again = copy.deepcopy(call)
                again.args[0] = ast.Name(target, ast.Load())
                if x != target and target not in _names(call.keywords):
                    lines = f"{target} = {x}", f"{target} = {ast.unparse(again)}"
            if not lines:
                out.append(statement)
                continue
            made = ast.parse("\n".join(lines)).body
            for node in (node for each in made for node in ast.walk(each)):
                ast.copy_location(node, statement)
            out += made
        return out

    def guard(self, tree: ast.FunctionDef, original: ast.FunctionDef) -> None:
        """Run a method's original statements while another function has the name of an adder.

        Args:
            tree: the rewritten method.
            original: the same method as it was.
        """
        if not self.adders:
            return
        names = ", ".join(self.adders)
        test = ast.parse(f"self._trifuse_adds({names})", mode="eval").body
        chosen = ast.If(test=test, body=tree.body, orelse=original.body)
        for node in ast.walk(test):
            ast.copy_location(node, tree.body[0])
        tree.body = [ast.copy_location(chosen, tree.body[0])]

    def _is_torchs_dropout(self, function: ast.expr) -> bool:
        return code.value_of(function, self.scope) is nn.functional.dropout

    def _is_optional_norm(self, statement: ast.If) -> bool:
        """Match ``if ...: x = self.norm(x)``."""
        if len(statement.body) != 1 or statement.orelse:
            return False
        assigned = _assigned(statement.body[0])
        called = None if assigned is None else self._called(assigned[1])
        return called is not None and self.roles.get(called[0]) == "norm"

    def _with_ends_in_branches(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Move a sum and its norm into the branches of an optional sublayer between them.

        ``sum; if c: cross_attention; norm`` becomes ``if c: sum; cross_attention; norm`` and
        ``else: sum; norm``, if the sum can't change what c tests.
        """
        for at in range(1, len(body) - 1):
            if (moved := self._with_end_in_branches(body, at)) is not None:
                return self._with_ends_in_branches(moved)
        return body

    def _with_end_in_branches(self, body: list[ast.stmt], at: int) -> list[ast.stmt] | None:
        """Return the statements with the sum before ``body[at]``, an optional sublayer, and the
        norm after it in its branches; None if they aren't of this form."""
        before, test, after = body[at - 1], body[at], body[at + 1 :]
        if not (isinstance(test, ast.If) and not test.orelse and _is_simple(test.test)):
            return None
        tested = _names([test.test])
        if not isinstance(before, ast.Assign) or _names(before.targets) & tested:
            return None
        for count in (2, 1):  # with and without a statement that keeps the residual
            tail = after[:count]
            if len(tail) < count or self._end([before, *tail]) is None:
                continue
            head, first = body[: at - 1], [before]
            dropout = head[-1] if head else None
            if isinstance(dropout, ast.Assign) and not _names(dropout.targets) & tested:
                end = self._end([dropout, before, *tail])
                if end is not None and end.consumed == count + 2:
                    head, first = head[:-1], [dropout, before]
            branch = ast.If(
                test=test.test,
                body=copy.deepcopy([*first, *test.body, *tail]),
                orelse=copy.deepcopy([*first, *tail]),
            )
            return [*head, ast.copy_location(branch, test), *after[count:]]
        return None

    def _end(self, body: list[ast.stmt]) -> _End | None:
        """Match a sum and its norm, with the dropout before them, at the start of ``body``."""
        if not body:
            return None
        if (dropout := self._dropout(body[0])) is not None:
            name, expression = dropout
            end = self._sum_and_norm(body[1:], name, expression)
            return None if end is None else end._replace(consumed=end.consumed + 1)
        return self._sum_and_norm(body, None, ast.Constant(None))

    def close(self, body: list[ast.stmt]) -> bool:
        """Replace the sum that a method returns first, with the dropout before it, by a call."""
        body[:] = _with_last_sum_in_branches(_with_returned_sum_named(body))
        last = body[-1]
        if isinstance(last, ast.If) and all(map(_returns, (last.body, last.orelse))):
            branches = [self.close(branch) for branch in (last.body, last.orelse)]
            return any(branches)
        at = len(body) - 1
        while at >= 0 and (boundaries.only_packs(body[at]) or boundaries.clamps(body[at])):
            at -= 1
        assigned = _assigned(body[at]) if 0 <= at < len(body) - 1 else None
        if assigned is None:
            return False
        target, total = assigned
        dropout = self._dropout(body[at - 1]) if at else None
        dropped, expression = dropout or (None, ast.Constant(None))
        terms = _terms(total, dropped)
        if terms is None and dropped is not None:
            dropped, expression = None, ast.Constant(None)
            terms = _terms(total, None)
        rest = body[at + 1 :]
        if terms is None or (dropped not in (None, target) and dropped in _names(rest)):
            return False
        if not boundaries.is_returned_first(target, rest):
            return False
        if dropped is None:
            terms = _terms_as_written(total)  # added in that order: left + right
        clamped = ast.Constant(any(boundaries.clamps(each) for each in rest))
        made = _assign(
            ast.Name(target, ast.Store()), _call("_trifuse_close", *terms, expression, clamped)
        )
        first = at if dropped is None else at - 1
        body[first : at + 1] = [ast.copy_location(made, body[first])]
        self.changes += 1
        return True

    def _sum_and_norm(
        self, body: list[ast.stmt], dropped: str | None, dropout: ast.expr
    ) -> _End | None:
        if not body or (assigned := _assigned(body[0])) is None:
            return None
        target, value = assigned
        keeps: list[str] = []  # the names that hold the sum
        if (called := self._called(value)) is not None:  # target = self.norm(a + b)
            norm, argument = called
            consumed, result = 1, target
        else:  # total = a + b; perhaps residual = total; result = self.norm(total)
            argument, consumed, keeps = value, 1, [target]
            if (rows := self._rows_and_norm(body, target, value, dropped, dropout)) is not None:
                return rows
            same = _assigned(body[consumed]) if len(body) > consumed else None
            if same is not None and isinstance(same[1], ast.Name) and same[1].id == target:
                keeps.append(same[0])
                consumed += 1
            last = _assigned(body[consumed]) if len(body) > consumed else None
            called = None if last is None else self._called(last[1])
            if last is None or called is None or self.roles.get(called[0]) != "norm":
                return self._sum_and_inner_norm(body, consumed, keeps, argument, dropped, dropout)
            result = last[0]
            norm, of = called
            if not (isinstance(of, ast.Name) and of.id in keeps):
                return None
            consumed += 1
        if self.roles.get(norm) != "norm" or (terms := _terms(argument, dropped)) is None:
            return None
        if dropped not in (None, _DROPPED, result, *keeps):
            return None  # what was dropped may be used again
        keeps = [name for name in dict.fromkeys(keeps) if name != result]
        if not keeps:
            call = _call("_trifuse_add_norm", *terms, dropout, _attribute(norm))
            made = [_assign(ast.Name(result, ast.Store()), call)]
        else:
            made = _assign_both(result, keeps, terms, dropout, norm)
        return _End(made, consumed, norm)

    def _rows_and_norm(
        self,
        body: list[ast.stmt],
        target: str,
        total: ast.expr,
        dropped: str | None,
        dropout: ast.expr,
    ) -> _End | None:
        """Match ``x = a + b``, then rows made of x, a copy of them, and ``x = self.norm(x)``.

        The rows are ``x = x.reshape(-1, x.size(-1))``, perhaps after the shape of x is kept.
        """
        rows = f"{target} = {target}.reshape(-1, {target}.size(-1))"
        texts = [ast.unparse(each) for each in body[1:5]]
        if rows not in texts:
            return None
        at = 1 + texts.index(rows)
        kept = [ast.unparse(each.value) for each in body[1:at] if isinstance(each, ast.Assign)]
        assigned = [_assigned(each) for each in body[at + 1 : at + 3]]
        if kept != [f"{target}.shape"] * (at - 1) or len(assigned) < 2 or None in assigned:
            return None
        (_, copied), (result, normed) = assigned  # type: ignore[misc]
        called = self._called(normed)
        if called is None or self.roles.get(called[0]) != "norm" or result != target:
            return None
        if [ast.unparse(copied), ast.unparse(called[1])] != [target, target]:
            return None
        if dropped not in (None, target) or (terms := _terms(total, dropped)) is None:
            return None
        made = _assign_both(_NORMED, [target], terms, dropout, called[0])
        again = f"{target} = {_NORMED}.reshape(-1, {_NORMED}.size(-1))"
        return _End([*made, *body[1 : at + 2], *ast.parse(again).body], at + 3, called[0])

    def _sum_and_inner_norm(
        self,
        body: list[ast.stmt],
        at: int,
        keeps: list[str],
        total: ast.expr,
        dropped: str | None,
        dropout: ast.expr,
    ) -> _End | None:
        """Match ``x = a + b`` and then ``y = ... self.norm(x) ...``, the statement at ``at``."""
        statement = copy.deepcopy(body[at]) if len(body) > at else None
        if not isinstance(statement, ast.Assign):
            return None
        nodes = list(ast.walk(statement))
        calls = [node for node in nodes if self._is_norm_of(node, keeps)]
        if len(calls) != 1 or any(isinstance(node, code.LATER) for node in nodes):
            return None
        if (terms := _terms(total, dropped)) is None:
            return None
        if dropped not in (None, _DROPPED, *keeps):
            return None
        norm: str = calls[0].func.attr  # type: ignore[attr-defined]
        made = _assign_both(_NORMED, keeps, terms, dropout, norm)
        code.Replaced(calls[0], ast.Name(_NORMED, ast.Load())).visit(statement)
        return _End([*made, statement], at + 1, norm)

    def _is_norm_of(self, node: ast.AST, names: list[str]) -> bool:
        """Whether an expression is ``self.norm(x)``, x one of the names."""
        called = self._called(node) if isinstance(node, ast.expr) else None
        if called is None or self.roles.get(called[0]) != "norm":
            return False
        return isinstance(called[1], ast.Name) and called[1].id in names

    def _activation(self, body: list[ast.stmt]) -> _End | None:
        """Match ``y = self.act(self.linear(x))``, in one statement or in two.

        Also match ``return self.down(self.act(self.linear(x)))``.
        """
        if body and isinstance(body[0], ast.Return):
            return self._returned_activation(body[0])
        if not body or (assigned := _assigned(body[0])) is None:
            return None
        if (called := self._called(assigned[1])) is None:
            return None
        name, argument = called
        consumed, target = 1, assigned[0]
        if self.roles.get(name) == "activation":
            activation = name
            if (inner := self._called(argument)) is None:
                return None
            linear, argument = inner
        else:
            linear = name
            if len(body) < 2 or (second := _assigned(body[1])) is None:
                return None
            if second[0] != target:
                return None
            if self._is_activated(second[1], target) and self.roles.get(linear) == "linear":
                assert isinstance(second[1], ast.Call)
                call = _call("_trifuse_activate", argument, _attribute(linear), second[1].func)
                return _End([_assign(ast.Name(target, ast.Store()), call)], 2, "")
            if (called := self._called(second[1])) is None:
                return None
            activation, of = called
            if not (isinstance(of, ast.Name) and of.id == target):
                return None
            consumed = 2
        if (self.roles.get(linear), self.roles.get(activation)) != ("linear", "activation"):
            return None
        call = _call("_trifuse_activate", argument, _attribute(linear), _attribute(activation))
        return _End([_assign(ast.Name(target, ast.Store()), call)], consumed, "")

    def _is_activated(self, expression: ast.expr, name: str) -> bool:
        """Match ``gelu(name)``, where a function of the model computes a known activation."""
        if not (isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name)):
            return False
        if [ast.unparse(each) for each in expression.args] != [name] or expression.keywords:
            return False
        function = self.scope.get(expression.func.id)
        if not isinstance(function, types.FunctionType):
            return False
        if not (function.__module__ or "").startswith("transformers."):
            return False
        from trifuse.recipes import activations

        return activations.activation_name(function) is not None

    def _returned_activation(self, statement: ast.Return) -> _End | None:
        """Match ``return self.down(self.act(self.linear(x)))``."""
        last = None if statement.value is None else self._called(statement.value)
        activated = None if last is None else self._called(last[1])
        called = None if activated is None else self._called(activated[1])
        if last is None or activated is None or called is None:
            return None
        if (self.roles.get(called[0]), self.roles.get(activated[0])) != ("linear", "activation"):
            return None
        call = _call(
            "_trifuse_activate", called[1], _attribute(called[0]), _attribute(activated[0])
        )
        returned = ast.Call(_attribute(last[0]), [call], [])
        return _End([ast.Return(returned)], 1, "")

    def _drop(self, statement: ast.stmt) -> _End | None:
        """Match ``x = dropout(x)`` with torch's function, if no sum and norm follow it."""
        dropout = self._dropout(statement)
        if dropout is None or not isinstance(dropout[1], ast.Tuple):
            return None
        name, options = dropout
        call = _call(_DROP, ast.Name(name, ast.Load()), options)
        return _End([_assign(ast.Name(name, ast.Store()), call)], 1, "")

    def _rotation(self, statement: ast.stmt) -> _End | None:
        """Match ``q, k = rotate(q, k, cos, sin)`` with a known function."""
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            return None
        call = statement.value
        known = rotary_functions.rotation_of(code.value_of(call.func, self.scope))
        if known is None or len(call.args) != known.tensors + 2:
            return None
        options = {option.arg for option in call.keywords}
        if any(isinstance(each, ast.Starred) for each in call.args) or None in options:
            return None
        made = copy.deepcopy(statement)
        replaced = _call("_trifuse_rotate", call.func, *call.args)
        replaced.keywords = copy.deepcopy(call.keywords)
        made.value = replaced
        return _End([made], 1, "")

    def _dropout(self, statement: ast.stmt) -> tuple[str, ast.expr] | None:
        """Match ``x = dropout(x)``, a module or torch's function."""
        if (assigned := _assigned(statement)) is None or not isinstance(assigned[1], ast.Call):
            return None
        target, call = assigned
        assert isinstance(call, ast.Call)
        if not call.args or not (isinstance(call.args[0], ast.Name) and call.args[0].id == target):
            return None
        if ast.unparse(call.func) == f"self.{_DROP}":
            return target, call.args[1]
        if (called := self._called(call)) is not None:
            return (target, call.func) if self.roles.get(called[0]) == "dropout" else None
        if not self._is_torchs_dropout(call.func):
            return None
        options = {option.arg: option.value for option in call.keywords}
        if len(call.args) > 1 or set(options) != {"p", "training"}:
            return None
        return target, ast.Tuple([options["p"], options["training"]], ast.Load())

    def _called(self, expression: ast.expr) -> tuple[str, ast.expr] | None:
        """Match ``self.name(argument)``."""
        if (
            isinstance(expression, ast.Call)
            and isinstance(expression.func, ast.Attribute)
            and isinstance(expression.func.value, ast.Name)
            and expression.func.value.id == "self"
            and len(expression.args) == 1
            and not expression.keywords
        ):
            return expression.func.attr, expression.args[0]
        return None


_NORMED = "_trifuse_normed"  # a variable
_SUM = "_trifuse_sum"  # a variable
_DROPPED = "_trifuse_dropped"  # a variable that only the sum after it reads
_DROP = "_trifuse_drop"  # a method of Fused


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            return target.id, statement.value
    return None


def _terms(total: ast.expr, dropped: str | None) -> tuple[ast.expr, ast.expr] | None:
    """Return the sublayer's output and the residual from ``a + b``; one of them is a variable.

    Those of ``(a + b).view(shape)`` are ``a.reshape(shape)`` and ``b.reshape(shape)``.
    """
    if (viewed := _viewed(total)) is not None:
        terms = _terms(viewed.func.value, dropped)  # type: ignore[attr-defined]
        if terms is None:
            return None
        return _as_viewed(terms[0], viewed), _as_viewed(terms[1], viewed)
    if not (isinstance(total, ast.BinOp) and isinstance(total.op, ast.Add)):
        return None
    names = [side.id if isinstance(side, ast.Name) else None for side in (total.left, total.right)]
    if names[0] == names[1]:  # x + x; or no variables, so that the order might matter
        return None
    if dropped is not None:
        if dropped not in names:
            return None
        if names.index(dropped) == 1:
            return total.right, total.left
        return total.left, total.right
    if names[1] is None:
        return total.right, total.left
    return total.left, total.right


def _terms_as_written(total: ast.expr) -> tuple[ast.expr, ast.expr]:
    """Return b and a from ``a + b``, or from ``(a + b).view(shape)``, a sum with terms."""
    if (viewed := _viewed(total)) is not None:
        terms = _terms_as_written(viewed.func.value)  # type: ignore[attr-defined]
        return _as_viewed(terms[0], viewed), _as_viewed(terms[1], viewed)
    assert isinstance(total, ast.BinOp)
    return total.right, total.left


def _viewed(total: ast.expr) -> ast.Call | None:
    """Match ``(...).view(shape)``, of an operation and a variable."""
    if not (isinstance(total, ast.Call) and isinstance(total.func, ast.Attribute)):
        return None
    shape = [type(each) for each in (*total.args, *total.keywords)]
    fits = total.func.attr == "view" and isinstance(total.func.value, ast.BinOp)
    return total if fits and shape == [ast.Name] else None


def _as_viewed(term: ast.expr, viewed: ast.Call) -> ast.expr:
    """Return a term of a sum in the shape of the viewed sum. Its layout may differ."""
    # torch.export gives rows of a symbolic number strides with a minimum, from which it can't tell
    # that their views are contiguous. A flat tensor has none.
    flat = ast.Call(ast.Attribute(term, "reshape", ast.Load()), [ast.Constant(-1)], [])
    return ast.Call(ast.Attribute(flat, "reshape", ast.Load()), copy.deepcopy(viewed.args), [])


def _flag(test: ast.expr) -> str | None:
    """Match ``self.flag`` or ``not self.flag``; return the attribute's name."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    return code.own_attribute(test)


def _with_flag(body: list[ast.stmt], flag: str, value: bool) -> list[ast.stmt]:
    """Return statements for a given value of ``self.flag``."""
    out: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If) and _flag(statement.test) == flag:
            holds = value is isinstance(statement.test, ast.Attribute)
            out += statement.body if holds else statement.orelse
        else:
            out.append(statement)
    return out


def _added_by_function(call: ast.expr | None, scope: dict[str, Any]) -> list[ast.expr] | None:
    """Return x, residual, p and training from a call of a function that drops and adds.

    BLOOM and Falcon have such a function, ``dropout_add(x, residual, prob, training)``.
    """
    if not isinstance(call, ast.Call):
        return None
    names = _parameters_of_dropout_add(code.value_of(call.func, scope))
    given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords}
    if not names or len(call.args) + len(call.keywords) != len(names) or set(given) != set(names):
        return None
    return [given[name] for name in names]


@functools.cache
def _parameters_of_dropout_add(function: Any) -> list[str]:
    """Return the parameters of a function that drops and adds; none for any other function."""
    if not isinstance(function, types.FunctionType) or function.__code__.co_argcount != 4:
        return []
    if (tree := code.parse(function)) is None or len(tree.body) < 3:
        return []
    names = [each.arg for each in tree.args.args]
    x, residual, p, training = names
    dropped, *rest = tree.body[-3:]
    assigned = _assigned(dropped)
    if assigned is None or not isinstance(assigned[1], ast.Call):
        return []
    out, drops = assigned[0], assigned[1]
    if code.value_of(drops.func, function.__globals__) is not nn.functional.dropout:
        return []
    arguments = [ast.unparse(each) for each in (*drops.args, *drops.keywords)]
    known = arguments == [x, f"p={p}", f"training={training}"]
    ends = [ast.unparse(each) for each in rest] == [f"{out} = {residual} + {out}", f"return {out}"]
    first = tree.body[:-3]  # a docstring at most
    documented = all(isinstance(each, ast.Expr) and len(first) == 1 for each in first)
    return names if known and ends and documented else []


def _with_returned_sum_named(body: list[ast.stmt]) -> list[ast.stmt]:
    """Write ``return a + b``, the last statement of a method, as ``x = a + b; return x``."""
    last = body[-1]
    if not isinstance(last, ast.Return) or last.value is None or _terms(last.value, None) is None:
        return body
    named = _assign(ast.Name(_SUM, ast.Store()), last.value), ast.Return(ast.Name(_SUM, ast.Load()))
    return [*body[:-1], *(ast.copy_location(each, last) for each in named)]


def _with_last_sum_in_branches(body: list[ast.stmt]) -> list[ast.stmt]:
    """Move the last sum of a method into the branches of an optional sublayer that follows it.

    ``x = a + b; if c: x = x + adapter(x); return x`` becomes ``if c:`` with all of it, and
    ``else:`` with the rest without the sublayer, if the sum can't change what c tests.
    """
    at = len(body) - 1
    while at >= 0 and boundaries.only_packs(body[at]):
        at -= 1
    option, rest = body[at], body[at + 1 :]
    if at < 1 or not isinstance(option, ast.If) or option.orelse or not _returns(rest):
        return body
    first = body[at - 1]
    total = _assigned(first)
    if total is None or _terms(total[1], None) is None:
        return body
    sums = [None if each is None else each[0] for each in map(_assigned, option.body[-1:])]
    if sums != [total[0]] or not _is_simple(option.test) or total[0] in _names([option.test]):
        return body
    branch = ast.If(
        test=option.test,
        body=copy.deepcopy([first, *option.body, *rest]),
        orelse=copy.deepcopy([first, *rest]),
    )
    return [*body[: at - 1], ast.copy_location(branch, option)]


def _returns(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return)


def _is_simple(test: ast.expr) -> bool:
    """Whether a test reads variables and attributes and calls nothing."""
    allowed = (
        ast.Compare,
        ast.BoolOp,
        ast.UnaryOp,
        ast.Name,
        ast.Attribute,
        ast.Constant,
        ast.boolop,
        ast.unaryop,
        ast.Is,
        ast.IsNot,
        ast.expr_context,
    )
    return all(isinstance(node, allowed) for node in ast.walk(test))


def _names(nodes: list[Any]) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)} - {"self"}


def _attribute(name: str) -> ast.expr:
    return ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())


def _call(helper: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_attribute(helper), list(arguments), [])


def _assign_both(
    normed: str, sums: list[str], terms: tuple[ast.expr, ast.expr], dropout: ast.expr, norm: str
) -> list[ast.stmt]:
    """Return statements that assign the norm of a sum to a name, and the sum to others."""
    both = ast.Tuple([ast.Name(name, ast.Store()) for name in (normed, sums[0])], ast.Store())
    call = _call("_trifuse_add_then_norm", *terms, dropout, _attribute(norm))
    same = [
        _assign(ast.Name(name, ast.Store()), ast.Name(sums[0], ast.Load())) for name in sums[1:]
    ]
    return [_assign(both, call), *same]


def _assign(target: ast.expr, value: ast.expr) -> ast.stmt:
    return ast.Assign([target], value)
