"""The ends of sublayers, and linear layers with their activation, found in any module's code.

Libraries write the end of a sublayer in only a few ways, such as ::

    hidden_states = self.dropout(hidden_states)         # may be missing
    hidden_states = residual + hidden_states
    residual = hidden_states                            # pre-norm; missing in post-norm layers
    hidden_states = self.post_attention_layernorm(hidden_states)

Such statements are replaced by one call of the operator, and all others stay as they are. So the
rest of a method may compute anything. The method is compiled again from its source, into a subclass
that adds nothing else, so a module with this class computes the same.
"""

from __future__ import annotations

import ast
import copy
import copyreg
import functools
import inspect
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.nn import packing
from trifuse.nn.dropout import Dropout, drop
from trifuse.nn.dropout_add_layer_norm import norm_alone, same_dtype
from trifuse.nn.linear import (
    activation_name,
    gated_halves,
    gated_linear,
    is_intercepted,
    is_plain,
    linear_activation,
)
from trifuse.ops.activations import Activation
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm
from trifuse.recipes import boundaries, code, gates, norms

# The submodules of a module that take part, by name: "norm", "dropout", "linear", "activation".
Roles = tuple[tuple[str, str], ...]


class Origin(NamedTuple):
    """The class and the names that a fused class was made from."""

    source: type[nn.Module]
    made_by: tuple[Any, tuple[Any, ...]]  # the function that made it, and its arguments
    roles: Roles = ()
    norms: tuple[str, ...] = ()  # the attributes whose norms are fused with the sum
    alone: tuple[str, ...] = ()  # those of them that another branch of the code calls alone
    parts: tuple[str, ...] = ()  # of a stack without padding, the submodules with packed tokens
    closes: bool = False  # whether it ends with a sum
    only_closes: bool = False  # whether nothing else was changed
    # Further norms that are fused with the sum, by the value of the attribute named "flag".
    flag: str = ""
    norms_by_flag: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # if it is false, or true

    def norms_of(self, module: nn.Module) -> tuple[str, ...]:
        """Return the attributes of a module whose norms are fused with the sum at present."""
        if not self.flag:
            return self.norms
        return self.norms + self.norms_by_flag[bool(getattr(module, self.flag, False))]


class FusedType(type):
    """The type of the classes made here. With it, pickle can make them again in another process.

    Its properties belong to the classes, so they hide no attribute of a module.
    """

    _trifuse_origin: Origin

    @property
    def origin(cls) -> Origin:
        """The class and the names that this class was made from."""
        return cls._trifuse_origin


def _reduce(cls: FusedType) -> Any:
    if "_trifuse_origin" not in vars(cls):  # another library's subclass of such a class
        return cls.__qualname__
    return cls.origin.made_by


copyreg.pickle(FusedType, _reduce)


class Fused(nn.Module):
    """The methods that compiled methods call in place of the replaced statements."""

    def _trifuse_add_norm(self, x: Tensor, residual: Tensor, dropout: Any, norm: Any) -> Tensor:
        return add_then_norm(x, residual, dropout, norm, prenorm=False)[0]

    def _trifuse_add_then_norm(
        self, x: Tensor, residual: Tensor, dropout: Any, norm: Any
    ) -> tuple[Tensor, Tensor]:
        return add_then_norm(x, residual, dropout, norm, prenorm=True)

    def _trifuse_close(self, x: Tensor, residual: Tensor, dropout: Any, clamped: bool) -> Tensor:
        return boundaries.close(self, x, residual, dropout, clamped)

    def _trifuse_drop(self, x: Tensor, options: tuple[float, bool]) -> Tensor:
        return drop(x, *options)

    def _trifuse_activate(self, x: Tensor, linear: Any, activation: Any) -> Tensor:
        name = name_of(activation)
        if name is None or is_intercepted(activation):
            out: Tensor = activation(linear(x))
            return out
        return linear_activation(linear, x, name)

    def _trifuse_gate(self, x: Tensor, gate: Any, up: Any, activation: Any) -> Tensor:
        name = name_of(activation)
        if name is None or is_intercepted(activation):
            out: Tensor = activation(gate(x)) * up(x)
            return out
        return gated_linear(gate, up, x, name)

    def _trifuse_gate_halves(self, x: Tensor, both: Any, activation: Any, first: int) -> Tensor:
        name = name_of(activation)
        if name is None or is_intercepted(activation):
            halves = both(x).chunk(2, dim=-1)
            out: Tensor = activation(halves[first]) * halves[1 - first]
            return out
        return gated_halves(both, x, name, first)


def add_then_norm(
    x: Tensor,
    residual: Tensor,
    dropout: nn.Module | tuple[float, bool] | None,
    norm: nn.Module,
    prenorm: bool,
) -> tuple[Tensor, Tensor]:
    """Return norm(s) and s = residual + dropout(x), fused if the modules allow it.

    Args:
        x, residual: the two terms of the sum.
        dropout: a module; or the p and the training flag of ``torch.nn.functional.dropout``.
        norm: a module.
        prenorm: whether the caller uses the sum; otherwise the second result may be anything.
    """
    x, p, training = _before_sum(x, dropout)
    if p == 0 and x.shape != residual.shape:
        # One row of positions may serve all sequences. Broadcast, so that one sequence is rounded
        # like a batch.
        x, residual = torch.broadcast_tensors(x, residual)
    x, residual = _both_contiguous(x, residual)
    if x.shape == residual.shape:
        wide, wide_residual = same_dtype(x, residual)
        if (arguments := norms.parameters(norm, wide)) is not None:
            arguments |= {"dropout_p": p, "training": training}
            if prenorm:
                return dropout_add_layer_norm(wide, wide_residual, prenorm=True, **arguments)
            return dropout_add_layer_norm(wide, wide_residual, **arguments), x
    total = residual + (drop(x, p, training) if p else x)
    return norm_alone(total, norm), total


def _before_sum(x: Tensor, dropout: Any) -> tuple[Tensor, float, bool]:
    """Return a term of a sum, and the p and training flag of the dropout that remains.

    p is 0 unless it applies.
    """
    p, training = 0.0, False
    if isinstance(dropout, tuple):
        p, training = dropout
        if p >= 1:
            x, p = drop(x, p, training), 0.0
    elif dropout is not None:
        if type(dropout) in (nn.Dropout, Dropout) and not is_intercepted(dropout):
            p, training = dropout.p, dropout.training
        if p >= 1 or p == 0:
            x, p = dropout(x), 0.0
    return x, p if training else 0.0, training


def _both_contiguous(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return both terms of a sum contiguous if one of them is.

    torch's sum has the layout of the term that is written first, and code may view it.
    """
    if not (isinstance(x, Tensor) and isinstance(residual, Tensor)):
        return x, residual  # numbers, or tuples
    if x.shape != residual.shape or x.is_contiguous() == residual.is_contiguous():
        return x, residual
    return x.contiguous(), residual.contiguous()


def add(x: Tensor, residual: Tensor, dropout: Any, saved: bool = True) -> Tensor:
    """Return residual + dropout(x), as :func:`add_then_norm` computes it.

    Args:
        x, residual, dropout: as there.
        saved: whether the backward may need the result, which then can't be changed in place.
    """
    x, p, training = _before_sum(x, dropout)
    x, residual = _both_contiguous(x, residual)
    if p and (x.shape, x.dtype) == (residual.shape, residual.dtype):
        # A standalone dropout would drop other elements.
        _, total = dropout_add_layer_norm(x, residual, dropout_p=p, training=training, prenorm=True)
        return total if saved else total.clone()
    return residual + (drop(x, p, training) if p else x)


def roles(module: nn.Module) -> Roles:
    """Return the submodules that may take part in a fused operator."""
    found = []
    for name, child in module.named_children():
        if norms.is_known(child):
            found.append((name, "norm"))
        elif type(child) in (nn.Dropout, Dropout):
            found.append((name, "dropout"))
        elif type(child) is nn.Linear or is_plain(child) or is_conv1d(child):
            found.append((name, "linear"))
        elif name_of(child) is not None:
            found.append((name, "activation"))
    return tuple(sorted(found))


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, a linear layer whose weight is transposed."""
    cls = type(module)
    return (cls.__module__, cls.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def name_of(activation: nn.Module) -> Activation | None:
    """The name of an activation that the linear layer's product can apply, or None."""
    if (name := activation_name(activation)) is not None:
        return name
    if type(activation).__module__ == "transformers.activations":
        from trifuse.recipes import activations

        return activations.activation_name(activation)
    return None


# The key includes the methods that were compiled again, because those of a class may be replaced.
_classes: dict[tuple[type, Roles, tuple[Any, ...]], type[nn.Module]] = {}


def fused_class(source: type[nn.Module], roles: Roles) -> type[nn.Module]:
    """Return the subclass of ``source`` whose methods run fused, or ``source`` if none does.

    Args:
        source: the class of a module.
        roles: what :func:`roles` returned for the module.
    """
    key = source, roles, tuple(code.methods(source))
    if key not in _classes:
        _classes[key] = _make(source, roles)
    return _classes[key]


def _make(source: type[nn.Module], roles: Roles) -> type[nn.Module]:
    first: type[nn.Module] = Fused
    closes = False
    found: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    flag = ""
    by_flag: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
    only_closes = False
    members: dict[str, Any] = {}
    if norms.has_known_form(source):
        first = norms.FusedNorm
        members["forward"] = norms.FusedNorm.forward
        members["_trifuse_form"] = norms.form_of(source)
    else:
        for name, method in code.methods(source):
            if not _may_match(roles, method) or (tree := code.parse(method)) is None:
                continue
            rewriter = rewrite(tree, roles, inspect.unwrap(method).__globals__)
            ends = any(role in ("norm", "dropout") for _, role in roles) or _drops(method)
            if name == "forward" and ends:
                changes = rewriter.changes
                closes = rewriter.close(tree.body)
                only_closes = closes and not changes
            if not rewriter.changes:
                continue
            if (made := code.compile_like(tree, method)) is not None:
                members[name] = made
                fused, called = _named(rewriter.norms), _called(tree)
                found += fused
                alone += tuple(name for name in fused if name in called)
                if rewriter.flag and name == "forward":
                    flag = rewriter.flag
                    by_flag = _named(rewriter.norms_by_flag[0]), _named(rewriter.norms_by_flag[1])
    if not members:
        return source
    made_by = fused_class, (source, roles)
    only_closes = only_closes and len(members) == 1
    origin = Origin(source, made_by, roles, found, alone, (), closes, only_closes, flag, by_flag)
    return subclass(first, origin, members)


def _called(tree: ast.FunctionDef) -> set[str | None]:
    """Return the names of the submodules that a method calls; None if it calls anything else."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {code.own_attribute(call.func) for call in calls}


def _named(norms: list[str]) -> tuple[str, ...]:
    return tuple(name for name in dict.fromkeys(norms) if name)


def subclass(first: type[nn.Module], origin: Origin, members: dict[str, Any]) -> type[nn.Module]:
    """Return a subclass of a module's class, ``origin.source``, that runs fused.

    Args:
        first: the first base, whose methods come before those of the source.
        members: further members of the class.
    """
    source = origin.source
    made: Any = FusedType(
        source.__name__,
        (first, source),
        {
            "__module__": "trifuse.recipes",
            "__qualname__": source.__qualname__,
            "__doc__": source.__doc__,
            "_trifuse_origin": origin,
            **members,
        },
    )
    _let_record(made)
    return made


def _let_record(cls: Any) -> None:
    """Make transformers find, by the class, which intermediate results a model can return."""
    if not hasattr(cls, "_can_record_outputs"):
        return
    from transformers.modeling_utils import _CAN_RECORD_REGISTRY

    dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), cls._can_record_outputs)


def origin_of(source: Any, made_by: tuple[Any, tuple[Any, ...]]) -> Origin:
    """Return the origin of a subclass; it keeps what recipes found in the source."""
    origin = source.origin if isinstance(source, FusedType) else Origin(source, made_by)
    return origin._replace(source=source, made_by=made_by)


def rewrite(tree: ast.FunctionDef, roles: Roles, scope: dict[str, Any]) -> _Rewriter:
    """Replace what is recognised in a method, whose globals are ``scope``."""
    rewriter = _Rewriter(dict(roles), scope, tree)
    tree.body = rewriter.method_body(tree.body)
    return rewriter


def _may_match(roles: Roles, method: Any) -> bool:
    """Whether a method uses enough of the submodules, or torch's dropout, to be worth reading."""
    names = set(inspect.unwrap(method).__code__.co_names)
    kinds = {kind for name, kind in roles if name in names}
    return "norm" in kinds or any(each <= kinds for each in _PAIRS) or _drops(method)


def _drops(method: Any) -> bool:
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


class _End(NamedTuple):
    """Statements that become one call of the operator."""

    statements: list[ast.stmt]
    consumed: int
    norm: str


class _Rewriter:
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
                end = self._activation(body[at:]) or self._drop(body[at])
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
            before, test, after = body[at - 1], body[at], body[at + 1 :]
            if not (isinstance(test, ast.If) and not test.orelse and _is_simple(test.test)):
                continue
            if not isinstance(before, ast.Assign) or _names(before.targets) & _names([test.test]):
                continue
            for count in (2, 1):  # with and without a statement that keeps the residual
                tail = after[:count]
                if len(tail) == count and self._end([before, *tail]) is not None:
                    head = body[: at - 1]
                    dropped = head[-1:] if self._end([*head[-1:], before, *tail]) else []
                    if dropped and self._end([*dropped, before, *tail]).consumed != count + 2:  # type: ignore[union-attr]
                        dropped = []
                    if dropped and _names([test.test]) & _names(dropped[0].targets):  # type: ignore[attr-defined]
                        dropped = []
                    if dropped:
                        head = head[:-1]
                    first = [*dropped, before]
                    branch = ast.If(
                        test=test.test,
                        body=copy.deepcopy([*first, *test.body, *tail]),
                        orelse=copy.deepcopy([*first, *tail]),
                    )
                    rest = [*head, ast.copy_location(branch, test), *after[count:]]
                    return self._with_ends_in_branches(rest)
        return body

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
        """Match ``y = self.act(self.linear(x))``, in one statement or in two."""
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
            if (called := self._called(second[1])) is None or second[0] != target:
                return None
            activation, of = called
            if not (isinstance(of, ast.Name) and of.id == target):
                return None
            consumed = 2
        if (self.roles.get(linear), self.roles.get(activation)) != ("linear", "activation"):
            return None
        call = _call("_trifuse_activate", argument, _attribute(linear), _attribute(activation))
        return _End([_assign(ast.Name(target, ast.Store()), call)], consumed, "")

    def _drop(self, statement: ast.stmt) -> _End | None:
        """Match ``x = dropout(x)`` with torch's function, if no sum and norm follow it."""
        dropout = self._dropout(statement)
        if dropout is None or not isinstance(dropout[1], ast.Tuple):
            return None
        name, options = dropout
        call = _call(_DROP, ast.Name(name, ast.Load()), options)
        return _End([_assign(ast.Name(name, ast.Store()), call)], 1, "")

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

    ``x = a + b; if c: x = x + adapter(x); return x`` becomes ``if
    c:`` with all of it, and ``else:`` with the rest without the sublayer, if the sum can't change
    what c tests.
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


def _call(helper: str, *arguments: ast.expr) -> ast.expr:
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


def original(cls: Any) -> type[nn.Module]:
    """Return the class from which recipes, or FSDP2, have made a class, or the class itself."""
    source: Any = cls
    while True:
        made = source
        source = made.origin.source if isinstance(made, FusedType) else packing.unsharded(made)
        if source is made:
            return source


def is_of_transformers(cls: type) -> bool:
    """Whether a class belongs to transformers or to code that it loads."""
    return cls.__module__.split(".")[0] in ("transformers", "transformers_modules")


def norms_alone(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's LayerNorms that are not fused with the sum before them.

    A norm that only some branches of the module's code fuse is among them, as in GPT-NeoX.
    """
    cls: Any = type(module)
    taken: set[str] = set()
    if isinstance(cls, FusedType):
        taken = set(cls.origin.norms_of(module)) - set(cls.origin.alone)
    for name, child in module.named_children():
        if type(child) is nn.LayerNorm and name not in taken:
            yield name


def norms_apart(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of a module's norms that no operator serves, and why."""
    alone = set(norms_alone(module))
    for name, child in module.named_children():
        kind = type(child)
        if name in alone:
            yield name, _why_alone(child)
        elif isinstance(child, nn.RMSNorm) or (
            kind.__name__.endswith("Norm")
            and is_of_transformers(kind)
            and not norms.is_known(child)
            and not any(child.children())  # a norm, not an encoder named by its norms
        ):
            yield name, f"{kind.__name__} isn't a known form of LayerNorm or RMSNorm"


def _why_alone(norm: nn.Module) -> str:
    """Return why a LayerNorm that isn't fused with a sum runs on torch."""
    if not norms.is_known(norm):
        return "it is a norm over several dimensions"
    if "forward" in vars(norm):
        return "its forward was replaced on the instance"
    return "no kernel of ours serves it here"


def ends_stay_apart(module: nn.Module) -> bool:
    """Whether a fused module holds a norm that must be called separately at present."""
    cls: Any = type(module)
    if not isinstance(cls, FusedType):
        return False
    for name in cls.origin.norms_of(module):
        norm = getattr(module, name, None)
        if not isinstance(norm, nn.Module) or is_intercepted(norm) or not norms.is_known(norm):
            return True
    return False
