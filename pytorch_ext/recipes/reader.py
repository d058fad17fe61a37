"""Follows the code of a module, to find out whether it treats tokens one by one.

A :class:`Reader` runs the statements of a method on the layouts of its values instead of the
values: see :mod:`trifuse.recipes.layouts`. It raises :class:`Unknown` at anything that isn't known
to keep tokens apart.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from trifuse.nn.linear import FrozenLinear, Linear
from trifuse.recipes import code, layouts, norms, own_biases, picks, rotations, sublayers
from trifuse.recipes.arguments import ABSENT, BIAS, MASK, PLACES, POSITIONS, SHARED, WISHES
from trifuse.recipes.layouts import Value, constant
from trifuse.recipes.own_biases import OwnBias
from trifuse.recipes.written_out import WrittenOut


class Unknown(Exception):  # noqa: N818 - an answer, not an error
    """A method uses something that isn't known to keep tokens apart; the message names it."""


class SubmoduleCall(NamedTuple):
    """A call of a submodule, and its inputs."""

    name: str  # or the path to it, with dots
    at: int | None  # its index in a list of modules; None: the module, or each one in the list
    special: frozenset[tuple[int | str, Value]]  # inputs, by their place among the arguments

    @property
    def drops_weights(self) -> bool:
        """Whether the submodule gets the weights of attention, as a dropout does."""
        return any(value.kind == "weights" for _, value in self.special)

    def modules(self, owner: nn.Module) -> list[nn.Module]:
        """Return the submodules of ``owner`` that are called."""
        child: Any = owner
        for name in self.name.split("."):
            child = child._modules[name]
        if not isinstance(child, nn.ModuleList):
            return [child]
        return list(child) if self.at is None else [child[self.at]]


Scope = dict[str, Value]
# Represents arguments that are passed on by name, ``**kwargs``.
_REST = "**"
# Kinds of values that are passed to a submodule as such.
_SPECIAL = (
    "mask", "bias", "cache", "caches", "distances", "head", "heads", "length", "places", "rows",
    "shared",
)  # fmt: skip

_KEYS_AND_VALUES = Value("tuple", 0, (layouts.HEADS, layouts.HEADS))
_OF_CACHES = {
    "self_attention_cache": Value("cache"),
    "cross_attention_cache": Value("cache", 0, layouts.OF_MEMORY),
    "is_updated": Value("filled"),
}

# A method of X-MOD: each token goes through the adapter of its language. If tokens are packed,
# ``arguments.LANGUAGES`` has the language number of each token.
_ADAPTED = code.normal(
    """
if not self.ln_before_adapter:
    residual = hidden_states
if self.adapter_layer_norm is not None:
    hidden_states = self.adapter_layer_norm(hidden_states)
elif self.adapter_reuse_layer_norm:
    hidden_states = self.LayerNorm(hidden_states)
if self.ln_before_adapter:
    residual = hidden_states
new_hidden_states = torch.zeros_like(hidden_states)
for adapter_idx, lang_key in enumerate(self.adapter_modules.keys()):
    lang_mask = lang_ids == adapter_idx
    lang_hidden_states = hidden_states[lang_mask]
    adapted_lang_hidden_states = self.adapter_modules[lang_key](lang_hidden_states)
    new_hidden_states[lang_mask] = adapted_lang_hidden_states
hidden_states = self.dropout(new_hidden_states)
hidden_states += residual
return hidden_states
"""
)


class Reader:
    """Follows the methods of one module."""

    def __init__(
        self,
        module: nn.Module,
        source: type[nn.Module],
        inputs: dict[str, Value],
        attends: bool,
        returned: Callable[[nn.Module, SubmoduleCall], Value | None],
    ) -> None:
        self.module = module
        self.attends = attends  # whether written-out attention runs as one operator
        self.returned = returned  # what the submodules of a call return, as far as it is known
        self.inputs = inputs
        self.source = source
        self.methods = dict(code.methods(source))
        self.read: dict[str, Any] = {}
        self.followed: dict[str, types.FunctionType] = {}  # of its methods
        self.calls: set[SubmoduleCall] = set()
        self.results: set[tuple[Any, bool]] = set()
        self.returns: set[tuple[SubmoduleCall, Value | None]] = set()  # what calls must return
        self.depth = 0
        self.globals: dict[str, Any] = {}
        self.holder: type | None = None  # the class that has the method that is followed
        self.continued: list[Scope] = []  # at each ``continue`` of a loop
        self.saved: list[Value] = []  # by an autograd function, for its backward

    def method(
        self, name: str, given: list[Value] | None, named: dict[str, Value] | None = None
    ) -> Value:
        """Follow a method. Its arguments are identified by their names unless they are given."""
        if name not in self.methods:
            raise Unknown(f"a {name} that can't be read")
        self.followed[name] = self.methods[name]
        if given is not None and code.body(self.methods[name]) == _ADAPTED:
            _, tokens = given
            if tokens.kind != "tokens":
                raise Unknown(f"self.{name} of a {tokens.kind}")
            return tokens
        return self.function(self.methods[name], given, named or {}, skip=1)

    def function(
        self,
        function: types.FunctionType,
        given: list[Value] | None,
        named: dict[str, Value],
        skip: int = 0,
        of_module: bool = False,
    ) -> Value:
        """Follow a function.

        Args:
            function: of a class or a module.
            given: its arguments in order; None: they are identified by their names.
            named: further arguments.
            skip: how many of its first arguments are missing from these.
            of_module: whether the first skipped argument is the module itself.
        """
        tree = code.parse(function, to_read=True)
        function = inspect.unwrap(function)
        if tree is None:
            raise Unknown(f"{function.__name__}, whose code can't be read")
        if of_module:
            _call_self(tree)
        outer = self.globals, self.holder
        self.globals = function.__globals__
        self.holder = inspect.getclosurevars(function).nonlocals.get("__class__")
        self.depth += 1
        if self.depth > 8:
            raise Unknown(f"{function.__name__}, which calls itself")
        for decorator in tree.decorator_list:
            self._decorator(decorator)
        scope = self._parameters(function, given, named, skip)
        returned: list[Value] = []
        self.block(tree.body, scope, returned)
        self.depth -= 1
        self.globals, self.holder = outer
        return layouts.join(returned) if returned else layouts.NONE

    def _decorator(self, decorator: ast.expr) -> None:
        if code.value_of(decorator, vars(builtins)) is staticmethod:
            return
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if code.value_of(called, self.globals) in (torch.compile, torch.no_grad):
            return
        module = getattr(code.value_of(called, self.globals), "__module__", None) or ""
        if not module.startswith(("transformers.utils", "transformers.integrations")):
            raise Unknown(ast.unparse(decorator))

    def _parameters(
        self,
        function: types.FunctionType,
        given: list[Value] | None,
        named: dict[str, Value],
        skip: int,
    ) -> Scope:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
        scope: Scope = {}
        for position, parameter in enumerate(parameters):
            if parameter.kind is parameter.VAR_KEYWORD and given is None:
                value = Value("rest")
            elif parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                value = layouts.PLAIN
            elif given is None:
                value = self._input(parameter.name)
            elif position < len(given):
                value = given[position]
            elif parameter.name in named:
                value = named[parameter.name]
            elif _REST in named:
                value = self._input(parameter.name)
            elif isinstance(parameter.default, (bool, int, float, str, types.NoneType)):
                value = constant(parameter.default)
            else:
                value = layouts.PLAIN
            scope[parameter.name] = value
        return scope

    def _input(self, name: str) -> Value:
        """Return an argument of the module by its name."""
        if name in self.inputs:
            value = self.inputs[name]
            # The bias is -inf at the pairs that the mask leaves out, so it also serves as the mask.
            masks = name == BIAS and value.kind == "bias" and isinstance(self.module, WrittenOut)
            return value._replace(kind="mask") if masks else value
        if name in WISHES:
            return constant(False)
        if name == PLACES:
            return Value("places")
        if name == SHARED:
            return Value("shared")
        if name == POSITIONS:
            return Value("tokens")  # one number each
        return layouts.NONE if name in ABSENT else layouts.TOKENS

    def experts(self) -> Value:
        """Follow experts behind transformers' interface.

        The interface sends each row to the experts chosen for it, in any of several
        implementations. Only the gate is the class's own code.
        """
        self.followed["forward"] = self.methods["forward"]
        chosen = self._note("config._experts_implementation")
        if not _is_of_experts(chosen):
            raise Unknown(f'experts_implementation="{chosen}"')
        return self.method("_apply_gate", [layouts.ROWS])

    # Statements ---------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt], scope: Scope, returned: list[Value]) -> bool:
        """Follow statements, and change ``scope``; return whether they leave the function."""
        skipped = 0
        for at, statement in enumerate(body):
            if skipped:
                skipped -= 1
                continue
            if isinstance(self.module, OwnBias) and (made := own_biases.made_at(body, at)):
                scope[BIAS] = self._own_bias(scope, made.with_mask)
                skipped = made.statements - 1
                continue
            if isinstance(statement, ast.Return):
                value = statement.value
                returned.append(layouts.NONE if value is None else self.any(value, scope))
                return True
            if isinstance(statement, ast.Raise):
                return True
            if isinstance(statement, ast.Continue):
                self.continued.append(dict(scope))
                return True
            if isinstance(statement, ast.If):
                if self._branches(statement, scope, returned):
                    return True
            elif isinstance(statement, ast.For):
                self._loop(statement, scope, returned)
            elif isinstance(statement, ast.With) and self._is_of_gradients_or_casts(statement):
                if self.block(statement.body, scope, returned):
                    return True
            elif isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
                scope[statement.name] = Value("function", 0, statement)
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], self.any(statement.value, scope), scope)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign(statement.target, self.value(statement.value, scope), scope)
            elif isinstance(statement, ast.AugAssign):
                sides = [self.value(side, scope) for side in (statement.target, statement.value)]
                self._assign(statement.target, self._combined(statement, *sides), scope)
            elif isinstance(statement, ast.Expr):
                if not isinstance(statement.value, ast.Constant) and not _is_message(statement):
                    self.value(statement.value, scope)
            elif not isinstance(statement, ast.Pass):
                raise Unknown(ast.unparse(statement).splitlines()[0])
        return False

    def _is_of_gradients_or_casts(self, statement: ast.With) -> bool:
        """Whether a ``with`` statement only turns gradients or autocast on or off."""
        calls = [item.context_expr for item in statement.items if item.optional_vars is None]
        called = [each.func for each in calls if isinstance(each, ast.Call)]
        made = [code.value_of(each, self.globals) for each in called]
        known = (torch.no_grad, torch.autocast)
        return len(made) == len(statement.items) and all(
            each in known or getattr(each, "__name__", "") == "maybe_autocast" for each in made
        )

    @staticmethod
    def _own_bias(scope: Scope, with_mask: bool) -> Value:
        """Return the bias that an attention makes in each layer, with its mask added if set."""
        return Value("mask" if with_mask else "bias", 0, scope[MASK].held)

    def _branches(self, statement: ast.If, scope: Scope, returned: list[Value]) -> bool:
        if isinstance(statement.body[-1], ast.Raise) and not statement.orelse:
            return False
        if (name := _tested_tuple(statement.test)) in scope and scope[name].kind == "results":
            scope[name] = scope[name].held[0]  # the branches take the tokens out of either
        test = self.truth(self.value(statement.test, scope))
        if test is not None:
            return self.block(statement.body if test else statement.orelse, scope, returned)
        either = [dict(scope), dict(scope)]
        bodies = (statement.body, statement.orelse)
        left = [self.block(body, each, returned) for body, each in zip(bodies, either, strict=True)]
        going = [each for each, gone in zip(either, left, strict=True) if not gone]
        names = {name for each in going for name in each}
        for name in names:
            found = [each.get(name, Value("mixed")) for each in going]
            if any(value != found[0] for value in found):
                found = [layouts.join([self._whole(value) for value in found])]
            scope[name] = found[0]
        return not going

    def _loop(self, statement: ast.For, scope: Scope, returned: list[Value]) -> None:
        """Follow a loop over the module's own modules, over experts, or over numbers.

        A second round must give the same result.
        """
        of_loop = f"a loop over {ast.unparse(statement.iter)}"
        if statement.orelse:
            raise Unknown(of_loop)
        targets = [statement.target]
        if isinstance(statement.target, ast.Tuple):
            targets = statement.target.elts
        for target in targets:
            self._assign(target, layouts.PLAIN, scope)
        if (name := code.own_list(statement.iter)) is not None:
            self._note(name)
            self._assign(targets[-1], Value("module", 0, name), scope)
        elif self.value(statement.iter, scope) not in (picks.LOADS, layouts.PLAIN):
            raise Unknown(of_loop)
        before = dict(scope)
        outer, self.continued = self.continued, []
        left = self.block(statement.body, scope, returned)
        ends = self.continued if left else [*self.continued, scope]
        self.continued = outer
        for end in ends:
            if any(self._whole(end[each]) != self._whole(value) for each, value in before.items()):
                raise Unknown(of_loop)
        if not ends:
            raise Unknown(of_loop)
        made = {name for end in ends for name in end} - before.keys()
        scope.update({name: self._whole(value) for name, value in before.items()})
        for name in made:
            found = [end.get(name, Value("mixed")) for end in ends]
            scope[name] = found[0] if all(value == found[0] for value in found) else Value("mixed")

    def _assign(self, target: ast.expr, value: Value, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one, item in zip(target.elts, self._items(value, len(target.elts)), strict=True):
                self._assign(one, item, scope)
        else:
            kind = ""
            if isinstance(target, ast.Subscript):
                kind = self.value(target.value, scope).kind
            if (kind, value) not in (("shared", _KEYS_AND_VALUES), ("filled", constant(True))):
                raise Unknown(ast.unparse(target))

    def _items(self, value: Value, count: int) -> list[Value]:
        if value.kind == "tuple" and len(value.held) == count:
            return list(value.held)
        if value.kind == "results":
            return self._items_of_results(value, count)
        if value.kind in layouts.FEATURES:  # a tuple that was passed in, or a result of unbind
            return [value] * count
        if value.kind == "rows' size" and count == 2:
            return [layouts.LENGTH, layouts.WIDTH]
        if value.kind == "heads' size" and count == 4:
            batch, length = (_length(value, position) for position in range(2))
            return [batch, layouts.NUMBER_OF_HEADS, length, layouts.PLAIN]
        if value.kind == "size" or (value.kind == "lead" and count == 2):
            lengths = [_length(value, position) for position in range(2)]
            alone = value.trailing == 1
            return lengths + [layouts.WIDTH if alone else layouts.PLAIN] * (count - 2)
        raise Unknown(f"{count} parts of a {value.kind}")

    def _items_of_results(self, results: Value, count: int) -> list[Value]:
        tokens, call = self._first(results), results.held[1]
        made = self._made(call)
        if made is None or made.kind != "tuple" or len(made.held) != count:
            return [tokens] * count  # it isn't known to keep tokens apart
        return [_of_caller(each, tokens) for each in made.held]

    def _made(self, call: SubmoduleCall) -> Value | None:
        made = self.returned(self.module, call)
        self.returns.add((call, made))
        return made

    # Expressions --------------------------------------------------------------------------------

    def truth(self, value: Value) -> bool | None:
        """Return the truth of a value, if it is known and does not depend on the tokens."""
        if value.kind == "constant":
            return bool(value.held)
        if value.kind == "own" and value.held != "training":
            trait = self._note(value.held)
            return bool(trait) if _is_known_constant(trait) else None
        # A verdict is about the whole batch, with or without its padding.
        if value.kind not in ("own", "plain", "verdict", *layouts.FEATURES):
            raise Unknown(f"a test of a {value.kind}")
        return None

    def value(self, node: ast.expr, scope: Scope) -> Value:
        """Return what is known of an expression's value, which isn't a tuple of a submodule."""
        return self._whole(self.any(node, scope))

    def _whole(self, value: Value) -> Value:
        """Return the tokens that a submodule returned, if the value is such a result."""
        if value.kind != "results":
            return value
        tokens, call = value.held
        self.results.add((call[:2], True))
        made = self._made(call)
        return tokens if made is None or made.kind == "tuple" else _of_caller(made, tokens)

    def _first(self, results: Value) -> Value:
        """Return the tokens at the beginning of a tuple that a submodule returned."""
        tokens, call = results.held
        self.results.add((call[:2], False))
        return tokens

    def any(self, node: ast.expr, scope: Scope) -> Value:
        """Return what is known of an expression's value."""
        follow: Callable[[Any, Scope], Value] | None
        follow = getattr(self, f"_{type(node).__name__.lower()}", None)
        if follow is None:
            raise Unknown(ast.unparse(node))
        return follow(node, scope)

    def _constant(self, node: ast.Constant, scope: Scope) -> Value:
        return constant(node.value)

    def _name(self, node: ast.Name, scope: Scope) -> Value:
        value = scope.get(node.id, layouts.PLAIN)
        if value.kind == "mixed":
            raise Unknown(f"one of two {node.id}")
        if value.kind == "rest":
            return layouts.PLAIN
        if node.id not in scope and isinstance(self.globals.get(node.id), torch.Tensor):
            raise Unknown(node.id)
        return value

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Value:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return Value("own", 0, node.attr)
        if node.attr in ("device", "dtype") and _root(node) == "self":
            return layouts.PLAIN
        base = self.value(node.value, scope)
        if base.kind == "own" and node.attr == "_attn_implementation":
            return constant(self._note(f"{base.held}.{node.attr}"))
        if base.kind in layouts.TENSORS:
            if node.attr == "shape" and base.kind == "tokens":
                return Value("size", base.trailing, base.held)
            if node.attr == "shape" and base.kind in ("heads", "head") and base.trailing == 1:
                return Value("heads' size", base.trailing, base.held)
            if node.attr == "shape" and (base.kind, base.trailing) == ("rows", 1):
                return Value("rows' size", base.trailing, base.held)
            if node.attr == "mT":
                return self._known_layout(layouts.transposed(base), node)
            if node.attr not in ("device", "dtype", "is_cuda"):
                raise Unknown(ast.unparse(node))
        elif base.kind == "context" and node.attr == "saved_tensors":
            return Value("tuple", 0, tuple(self.saved))
        elif base.kind == "tuple" and node.attr in _OF_PAIRS and len(base.held) == 2:
            item: Value = base.held[_OF_PAIRS.index(node.attr)]
            return item
        elif base.kind == "caches" and node.attr in _OF_CACHES:
            return _OF_CACHES[node.attr]
        elif base.kind == "own":
            held = getattr(getattr(self.module, base.held, None), node.attr, None)
            if isinstance(held, torch.Tensor) and held.dim() > 1:
                return Value("own", 0, f"{base.held}.{node.attr}")
            self._note(base.held)
            if isinstance(held, (bool, int, str, types.NoneType)) and self._is_configuration(
                base.held
            ):
                return constant(self._note(f"{base.held}.{node.attr}"))
        elif base.kind != "plain":
            raise Unknown(ast.unparse(node))
        return layouts.PLAIN

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Value:
        if _is_attention_table(node.value, self.globals):
            return Value("attention")
        base = self.any(node.value, scope)
        index = node.slice
        if base == layouts.NONE:
            return base  # one of many values, all of which are None
        if base.kind == "size":
            text = ast.unparse(index)
            if text in (f":-{base.trailing}", ":2"):
                return Value("lead", 0, base.held)
            if text == ":-1" and base.trailing > 1:
                return Value("shape", base.trailing - 1, base.held)
            if text in ("-1", "2") and base.trailing > 0:
                return layouts.WIDTH if base.trailing == 1 else layouts.PLAIN
            if text in ("0", "1"):
                return _length(base, int(text))
        elif base.kind == "lead" and ast.unparse(index) in ("0", "1"):
            return _length(base, int(ast.unparse(index)))
        elif base.kind == "heads' size" and ast.unparse(index) in ("2", "-2"):
            return _length(base, 1)
        elif base.kind == "heads' size" and ast.unparse(index) in ("1", "-3", "3", "-1"):
            return layouts.PLAIN
        elif base.kind == "heads' size" and ast.unparse(index) == ":-1":
            return base._replace(kind="heads' lead")
        elif base.kind == "rows' size" and ast.unparse(index) in ("1", "-1"):
            return layouts.WIDTH
        elif base.kind == "places" and ast.unparse(index) == "-1":
            return layouts.LENGTH
        elif base.kind == "tuple" and isinstance(index, ast.Constant):
            item: Value = base.held[index.value]
            return item
        elif base.kind == "tuple" and (first := _first_of_slice(index)) is not None:
            return base._replace(held=base.held[first:])
        elif base.kind == "results":
            tokens = self._first(base)
            if isinstance(index, ast.Constant) and isinstance(index.value, int):
                return tokens
            if ast.unparse(index) in ("1:", "2:"):
                return Value("tuple", 0, ())  # its items are unknown, and so can't be used
        elif base.kind == "shared":
            return _KEYS_AND_VALUES
        elif base.kind == "own":
            return self._item_of_own(base, node, scope)
        elif base == picks.LOADS and ast.unparse(index) == ":":
            return base
        elif base.kind == "plain" and not isinstance(index, ast.Slice):
            if self.value(index, scope).kind in layouts.NUMBERS:
                return layouts.PLAIN
        elif base.kind in layouts.FEATURES and (kept := _kept_features(index, base.trailing)):
            return base._replace(trailing=kept)
        elif base.kind in layouts.FEATURES and (longer := _with_dimensions(index, base)):
            return longer
        elif base.kind in ("chosen", "rows"):
            places = index.elts if isinstance(index, ast.Tuple) else [index]
            if not any(isinstance(place, ast.Slice) for place in places):
                found = picks.indexed(base, [self.value(place, scope) for place in places])
                return self._known_layout(found, node)
        elif base.kind == "mask":
            raise Unknown(f"its mask outside of attention, as {ast.unparse(node)}")
        raise Unknown(ast.unparse(node))

    def _item_of_own(self, base: Value, node: ast.Subscript, scope: Scope) -> Value:
        """Follow an index into the module's list of modules, or into a tensor of the module."""
        index = self.value(node.slice, scope) if not isinstance(node.slice, ast.Slice) else None
        trait = self._note(base.held)
        if trait is nn.Module and index == layouts.PLAIN:
            return Value("module", 0, base.held)
        if isinstance(trait, TensorTrait) and index is not None:
            if index.kind in layouts.FEATURES:  # a row of the tensor for each number
                return index._replace(trailing=index.trailing + trait.dim - 1)
            if index.kind in (*layouts.NUMBERS, "own"):
                return layouts.PLAIN if trait.dim <= 2 else Value("weight", trait.dim - 1)
        raise Unknown(ast.unparse(node))

    def _tuple(self, node: ast.Tuple, scope: Scope) -> Value:
        if (shape := self._shape(node.elts, scope)) is not None:
            return shape
        if any(isinstance(item, ast.Starred) for item in node.elts):
            raise Unknown(ast.unparse(node))
        return Value("tuple", 0, tuple(self.value(item, scope) for item in node.elts))

    _list = _tuple

    def _generatorexp(self, node: ast.GeneratorExp, scope: Scope) -> Value:
        """Follow ``(f(x) for x in xs)`` over the items of a tuple."""
        made, *others = node.generators
        items = self.value(made.iter, scope)
        if others or made.ifs or not isinstance(made.target, ast.Name) or items.kind != "tuple":
            raise Unknown(ast.unparse(node))
        results = [self.value(node.elt, scope | {made.target.id: item}) for item in items.held]
        return Value("tuple", 0, tuple(results))

    def _dict(self, node: ast.Dict, scope: Scope) -> Value:
        for value in node.values:
            self.value(value, scope)
        return Value("dict")

    def _shape(self, nodes: list[ast.expr], scope: Scope) -> Value | None:
        """Match the numbers of a shape whose first two dimensions are those of the tokens."""
        if not nodes:
            return None
        of_heads, more = False, 0
        if isinstance(nodes[0], ast.Starred):
            first = self.value(nodes[0].value, scope)
            if first.kind in ("shape", "heads' shape") and len(nodes) == 1:
                return first
            if first.kind == "size" and len(nodes) == 1:
                return first._replace(kind="shape")
            if first.kind not in ("lead", "heads' lead", "shape"):
                return None
            held, rest = first.held, nodes[1:]
            more = first.trailing if first.kind == "shape" else 0
            of_heads = first.kind == "heads' lead"
        else:
            lead = [self.value(node, scope) for node in nodes[:3]]
            if lead[1:2] == [layouts.NUMBER_OF_HEADS] and len(nodes) > 3:
                of_heads = True
                del lead[1]
            lead = lead[:2]
            if lead[0].kind == "shape" and len(nodes) == 1:
                return lead[0]
            if lead[0].kind == "size" and len(nodes) == 1:
                return lead[0]._replace(kind="shape")
            # The number of sequences is 1 for packed tokens, those of the memory too.
            if [each.kind for each in lead] != ["length", "length"]:
                return None
            (batch, _), (length, held) = (each.held or (None, None) for each in lead)
            if (batch, length) != (0, 1):
                return None
            rest = nodes[3 if of_heads else 2 :]
        if any(isinstance(node, ast.Starred) for node in rest):
            return None
        kinds = {self.value(node, scope).kind for node in rest}
        known = kinds <= {"constant", "plain", "own"}
        kind = "heads' shape" if of_heads else "shape"
        return Value(kind, more + len(rest), held) if known else None

    def _binop(self, node: ast.BinOp, scope: Scope) -> Value:
        return self._combined(node, *(self.value(side, scope) for side in (node.left, node.right)))

    def _combined(self, node: ast.BinOp | ast.AugAssign, *sides: Value) -> Value:
        kinds = [side.kind for side in sides]
        if isinstance(node.op, ast.Mult) and sorted(kinds) == ["constant", "tuple"]:
            times, repeated = sorted(sides, key=lambda side: side.kind)
            return repeated._replace(held=repeated.held * times.held)
        if isinstance(node.op, ast.Add) and kinds == ["tuple", "tuple"]:
            return sides[0]._replace(held=sides[0].held + sides[1].held)
        if (
            isinstance(node.op, ast.Add)
            and kinds == ["lead", "tuple"]
            and {item.kind for item in sides[1].held} <= {"constant", "plain", "own"}
        ):
            return Value("shape", len(sides[1].held), sides[0].held)
        return self._operation(node, *sides)

    def _operation(self, node: ast.BinOp | ast.AugAssign, first: Value, second: Value) -> Value:
        self._check_own([first, second])
        return self._known_layout(layouts.operation(node.op, first, second), node)

    def _check_own(self, values: Iterable[Value]) -> None:
        """Raise if values include a module attribute that isn't the same for all tokens."""
        for value in values:
            if value.kind == "own":
                trait = self._note(value.held)
                is_matrix = isinstance(trait, TensorTrait) and not trait.is_vector
                if trait is nn.Module or is_matrix:
                    raise Unknown(f"self.{value.held}")

    def _is_configuration(self, name: str) -> bool:
        from transformers import PretrainedConfig

        return isinstance(getattr(self.module, name, None), PretrainedConfig)

    def _known_layout(self, value: Value | None, node: ast.AST) -> Value:
        """Return a value; raise if it is unknown, or belongs to attention that stays in parts."""
        if value is None or (value.kind in layouts.SCORES and not self.attends):
            raise Unknown(ast.unparse(node).splitlines()[0])
        return value

    def _unaryop(self, node: ast.UnaryOp, scope: Scope) -> Value:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            truth = self.truth(value)
            return layouts.PLAIN if truth is None else constant(not truth)
        if isinstance(node.op, ast.USub) and value.kind == "constant":
            return value._replace(held=-value.held)
        self._check_own([value])
        return self._known_layout(layouts.elementwise([value]), node)

    def _boolop(self, node: ast.BoolOp, scope: Scope) -> Value:
        decides = isinstance(node.op, ast.Or)
        known = True
        for operand in node.values:
            truth = self.truth(self.value(operand, scope))
            if truth is decides:
                return constant(decides)
            known = known and truth is not None
        return constant(not decides) if known else layouts.PLAIN

    def _compare(self, node: ast.Compare, scope: Scope) -> Value:
        sides = [self.value(side, scope) for side in (node.left, *node.comparators)]
        is_none = isinstance(node.ops[0], ast.Is)
        if sides[1:] == [layouts.NONE] and (is_none or isinstance(node.ops[0], ast.IsNot)):
            if sides[0].kind == "own":
                return constant((self._note(sides[0].held) is None) is is_none)
            if sides[0].kind == "constant":
                return constant((sides[0].held is None) is is_none)
            if sides[0].kind in layouts.GIVEN:
                return constant(not is_none)
            return layouts.PLAIN
        if len(sides) == 2 and (compared := _COMPARISONS.get(type(node.ops[0]))) is not None:
            numbers = [self._number(side) for side in sides]
            ordered = all(isinstance(number, int) for number in numbers)
            if None not in numbers and (ordered or compared in (operator.eq, operator.ne)):
                return constant(compared(*numbers))
        if len(sides) == 2 and type(node.ops[0]) in _COMPARISONS:
            if sides in ([picks.COUNT, constant(0)], [picks.LOADS, constant(0)]):
                return Value("verdict") if sides[0] == picks.COUNT else sides[0]
            if any(side.kind in layouts.FEATURES for side in sides):
                self._check_own(sides)
                return self._known_layout(layouts.elementwise(sides), node)
        if any(side.kind not in (*layouts.NUMBERS, "own") for side in sides):
            raise Unknown(ast.unparse(node))
        return layouts.PLAIN

    def _number(self, value: Value) -> Any:
        """Return a number, a string, or a tuple of them; None if it isn't known."""
        if value.kind == "own" and value.held != "training":
            trait = self._note(value.held)
            return trait if _is_known_constant(trait) else None
        if value.kind == "tuple":
            items = tuple(map(self._number, value.held))
            return None if None in items else items
        return value.held if value.kind == "constant" else None

    def _ifexp(self, node: ast.IfExp, scope: Scope) -> Value:
        test = self.truth(self.value(node.test, scope))
        if test is not None:
            return self.value(node.body if test else node.orelse, scope)
        return layouts.join([self.value(node.body, scope), self.value(node.orelse, scope)])

    def _call(self, node: ast.Call, scope: Scope) -> Value:
        function = node.func
        if isinstance(function, ast.Name) and function.id in scope:
            called = scope[function.id]
            if called.kind == "attention":
                return self._attention(node, scope)
            if called.kind == "module":
                return self._submodule(called.held, None, node, scope)
            if called.kind == "function":
                return self._nested(called.held, node, scope)
            raise Unknown(ast.unparse(function))
        if isinstance(function, ast.Call):
            if code.value_of(function.func, self.globals) is not nn.Softmax or len(node.args) != 1:
                raise Unknown(ast.unparse(function))
            values, named = self._given(function, scope)
            values = [self.value(node.args[0], scope), *values]
            found = layouts.function(nn.functional.softmax, values, named)
            return self._known_layout(found, function)
        if isinstance(function, ast.Subscript):
            place = self.value(function.slice, scope)
            table = code.value_of(function.value, self.globals)
            if isinstance(table, dict) and place.kind == "constant":
                return self._of_table(table.get(place.held), node, scope)
            name = code.own_list(function.value)
            if place.kind != "constant" and place != layouts.PLAIN:
                name = None
            if name is None or self._note(name) is not nn.Module:
                raise Unknown(ast.unparse(function))
            return self._submodule(name, place.held, node, scope)
        if isinstance(function, ast.Attribute):
            owner = function.value
            if isinstance(owner, ast.Name) and owner.id == "self":
                if function.attr in self.methods:
                    return self.method(function.attr, *self._given(node, scope))
                static: Any = inspect.getattr_static(self.source, function.attr, None)
                if isinstance(static, staticmethod):
                    plain: Any = static.__func__
                    return self.function(plain, *self._given(node, scope))
                if self._note(function.attr) is nn.Module:
                    return self._submodule(function.attr, None, node, scope)
                raise Unknown(ast.unparse(function))
            if ast.unparse(owner) == "super()":
                return self._inherited(function.attr, node, scope)
            if (path := self._held_module(function)) is not None:
                return self._submodule(path, None, node, scope)
            known = None if _root(owner) in scope else code.value_of(function, self.globals)
            if known is not None:
                if function.attr == "get_interface" and _is_attention_table(owner, self.globals):
                    return Value("attention")
                return self._known(known, node, scope)
            return self._method_of_value(function, node, scope)
        known = code.value_of(function, self.globals | vars(builtins))
        return self._known(known, node, scope)

    def _inherited(self, name: str, node: ast.Call, scope: Scope) -> Value:
        """Follow ``super().forward(x)`` of a linear layer."""
        classes = self.source.__mro__
        after = classes[classes.index(self.holder) + 1 :] if self.holder in classes else ()
        values, named = self._given(node, scope)
        if next(iter(after), None) is nn.Linear and name == "forward" and not named:
            (x,) = values
            if x.kind in layouts.FEATURES and x.trailing > 0:
                return x
        raise Unknown(ast.unparse(node.func))

    def _of_table(self, function: Any, node: ast.Call, scope: Scope) -> Value:
        """Follow a function that gets the module itself, like those of ModernBERT's attention."""
        itself = bool(node.args) and ast.unparse(node.args[0]) == "self"
        if not (isinstance(function, types.FunctionType) and itself):
            raise Unknown(ast.unparse(node.func))
        values, named = self._given(node, scope)
        for keyword in node.keywords:
            rest = scope.get(ast.unparse(keyword.value)) if keyword.arg is None else None
            if rest is not None and rest.kind == "rest":
                named[_REST] = layouts.PLAIN
        return self.function(function, values[1:], named, skip=1, of_module=True)

    def _held_module(self, function: ast.Attribute) -> str | None:
        """Match ``self.child.grandchild``, a module that a submodule holds."""
        if (owner := code.own_attribute(function.value)) is None:
            return None
        child = self.module._modules.get(owner)
        if child is None or child._modules.get(function.attr) is None:
            return None
        self._note(owner)
        return f"{owner}.{function.attr}"

    def _given(self, node: ast.Call, scope: Scope) -> tuple[list[Value], dict[str, Value]]:
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            raise Unknown(ast.unparse(node.func) + " with unknown arguments")
        named = {k.arg: self.value(k.value, scope) for k in node.keywords if k.arg is not None}
        return [self.value(argument, scope) for argument in node.args], named

    def _submodule(self, name: str, index: int | None, node: ast.Call, scope: Scope) -> Value:
        values, named = self._given(node, scope)
        if [value.kind for value in values] == ["weights"] and not named:
            self.calls.add(SubmoduleCall(name, index, frozenset(enumerate(values))))
            return values[0]
        places: list[tuple[int | str, Value]] = [*enumerate(values), *named.items()]
        tensors = [value for _, value in places if value.kind in layouts.FEATURES]
        first = tensors[0] if tensors else layouts.TOKENS  # the submodule's result is like it
        children = SubmoduleCall(name, index, frozenset()).modules(self.module)
        apart = {value for value in tensors if value.kind == "picked"}
        if apart and len(set(tensors)) > 1:
            raise Unknown(f"self.{name} with {first.kind} and other rows")
        if first.kind in ("heads", "head"):
            if len(places) == 1 and all(map(_is_of_last_dimension, children)):
                return first
            if not all(map(_is_followed, children)):
                raise Unknown(f"self.{name} with heads")
        special = set()
        for place, value in places:
            if value.kind in _SPECIAL or value.held == layouts.OF_MEMORY:
                special.add((place, value))
            elif value.kind == "picked":
                special.add((place, Value("rows", value.trailing)))
            elif value == Value("tokens"):
                special.add((place, value))  # positions
            elif value.kind == "own" and self._dimensions(value) == 1:
                special.add((place, layouts.PLAIN))  # a vector over the features
            elif (
                value.kind not in ("tokens", "plain", "own", "constant", "tuple")
                or (value.kind == "tuple" and any(item != layouts.TOKENS for item in value.held))
                or (place in ABSENT and value != layouts.NONE)
            ):
                raise Unknown(f"self.{name} with a {value.kind}")
        call = SubmoduleCall(name, index, frozenset(special))
        self.calls.add(call)
        if all(rotations.is_known(child) for child in children):
            return Value("tuple", 0, (layouts.TOKENS, layouts.TOKENS))
        if all(map(_is_followed, children)):
            return Value("results", 0, (first, call))
        return first

    def _attention(self, node: ast.Call, scope: Scope) -> Value:
        values, named = self._given(node, scope)
        mask = values[4] if len(values) > 4 else named.pop(MASK, layouts.NONE)
        bias = named.pop(BIAS, layouts.NONE)
        if named.get("position_ids", layouts.NONE).kind == "tokens":
            del named["position_ids"]  # for other attentions; ours doesn't read them
        others = [*values[5:], *named.values()]
        keys = layouts.HEADS._replace(held=mask.held)
        if (
            list(map(_heads, values[1:4])) != [layouts.HEADS, keys, keys]
            or mask.kind != "mask"
            or bias not in (layouts.NONE, Value("bias", 0, mask.held))
            or any(value.kind not in ("plain", "own", "constant") for value in others)
        ):
            raise Unknown(f"{ast.unparse(node.func)} with more than packed tokens")
        return Value("tuple", 0, (Value("tokens", 2), layouts.PLAIN))

    def _torch_attention(self, node: ast.Call, scope: Scope) -> Value:
        """Follow ``F.scaled_dot_product_attention`` with the mask that was passed in."""
        values, named = self._given(node, scope)
        given = dict(zip(("query", "key", "value", "attn_mask"), values, strict=False)) | named
        mask = given.pop("attn_mask", layouts.NONE)
        keys = layouts.HEADS._replace(held=mask.held)
        tensors = [given.pop(name, None) for name in ("query", "key", "value")]
        causal = self.truth(given.pop("is_causal", constant(False)))
        if (
            not self.attends
            or len(values) > 4
            or tensors != [layouts.HEADS, keys, keys]
            or mask.kind != "mask"
            or causal is not False
            or any(value.kind not in ("plain", "own", "constant") for value in given.values())
        ):
            raise Unknown(f"{ast.unparse(node.func)} with more than packed tokens")
        return layouts.HEADS

    def _nested(self, function: ast.FunctionDef, node: ast.Call, scope: Scope) -> Value:
        """Follow a function that the method defines."""
        values, named = self._given(node, scope)
        names = [argument.arg for argument in function.args.args]
        if named or len(names) != len(values):
            raise Unknown(function.name)
        returned: list[Value] = []
        self.block(function.body, scope | dict(zip(names, values, strict=True)), returned)
        return layouts.join(returned) if returned else layouts.NONE

    def _known(self, function: Any, node: ast.Call, scope: Scope) -> Value:
        """Follow the call of a function that isn't the module's own."""
        if _is_chunking(function):
            return self._chunked(node, scope)
        if function is isinstance:
            return self._instance(node, scope)
        if function is nn.functional.scaled_dot_product_attention:
            return self._torch_attention(node, scope)
        if function is nn.functional.linear:
            return self._linear(node, scope)
        if function is hasattr and ast.unparse(node.args[0]) == "self":
            return self._has(self.value(node.args[1], scope))
        values, named = self._given(node, scope)
        if getattr(function, "__name__", "") == "apply" and _is_autograd(function):
            return self._differentiated(function.__self__, values, named)
        if (found := picks.function(function, values, named, node.lineno)) is not None:
            return found
        if function is len and values[0].kind == "own":
            return layouts.PLAIN
        if function is getattr and values[0].kind == "own":
            kind = self._note(values[0].held)
            if isinstance(kind, type) and not issubclass(kind, nn.Module):
                return layouts.PLAIN  # of a configuration, for example
        found = layouts.function(function, values, named)
        if found is not None:
            if not layouts.is_question(function):
                self._check_own([*values, *named.values()])
            return self._known_layout(found, node)
        if isinstance(function, types.FunctionType):
            library = function.__module__.split(".")[0]
            if library in ("transformers", "transformers_modules"):
                return self.function(function, values, named)
        raise Unknown(ast.unparse(node.func))

    def _has(self, name: Value) -> Value:
        """Follow ``hasattr(self, name)``."""
        if name.kind != "constant":
            raise Unknown("hasattr of an unknown name")
        return constant(self._note(f"{name.held}{_PRESENCE}"))

    def _differentiated(
        self, function: type[torch.autograd.Function], values: list[Value], named: dict[str, Value]
    ) -> Value:
        """Follow an autograd function of transformers, forward and backward."""
        if not function.__module__.startswith("transformers") or named:
            raise Unknown(f"{function.__name__}.apply")
        outer, self.saved = self.saved, []
        context = Value("context")
        steps: Any = function
        out = self.function(steps.forward, [context, *values], {})
        grads = self.function(steps.backward, [context, out], {})
        self.saved = outer
        expected = [v if v.kind in layouts.FEATURES else layouts.NONE for v in values]
        grads_of = list(grads.held) if grads.kind == "tuple" else [grads]
        known = len(grads_of) == len(expected) and all(
            grad in (wanted, layouts.NONE) for grad, wanted in zip(grads_of, expected, strict=True)
        )
        if out.kind not in layouts.FEATURES or not known:
            raise Unknown(f"{function.__name__}.apply")
        return out

    def _linear(self, node: ast.Call, scope: Scope) -> Value:
        """Follow ``F.linear`` with a weight and a bias of the module, or of one of its experts."""
        (x, *parameters), named = self._given(node, scope)
        parameters += named.values()
        dims = [self._dimensions(each) for each in parameters]
        if (
            x.kind not in layouts.FEATURES
            or x.trailing < 1
            or dims[:1] != [2]
            or any(dim not in (0, 1) for dim in dims[1:])
        ):
            raise Unknown(ast.unparse(node.func))
        return x

    def _dimensions(self, parameter: Value) -> int | None:
        """Return how many dimensions a parameter has, 0 for None; None if that isn't known."""
        if parameter.kind == "weight":
            return parameter.trailing
        if parameter == layouts.NONE:
            return 0
        trait = self._note(parameter.held) if parameter.kind == "own" else ()
        return trait.dim if isinstance(trait, TensorTrait) else 0 if trait is None else None

    def _instance(self, node: ast.Call, scope: Scope) -> Value:
        """Follow ``isinstance``, whose result is known for None and other constants."""
        if _root(node.args[0]) != "self":
            value = self.value(node.args[0], scope)
            kind = code.value_of(node.args[1], self.globals)
            if value.kind == "constant" and isinstance(kind, type):
                return constant(isinstance(value.held, kind))
            if value.kind == "cache":
                return constant(False)
            if value.kind == "caches" and isinstance(kind, type):
                return constant(issubclass(_pair_of_caches(), kind))
        return layouts.PLAIN

    def _chunked(self, node: ast.Call, scope: Scope) -> Value:
        """Follow transformers' ``apply_chunking_to_forward`` where it makes no chunks."""
        function, size, *_ = node.args
        name = function.attr if isinstance(function, ast.Attribute) else ""
        if self._number(self.value(size, scope)) != 0 or name not in self.methods:
            raise Unknown(f"{ast.unparse(node.func)}, which chunks the tokens")
        return self.method(name, [self.value(argument, scope) for argument in node.args[3:]])

    def _method_of_value(self, function: ast.Attribute, node: ast.Call, scope: Scope) -> Value:
        base = self.value(function.value, scope)
        name = function.attr
        casts = base.kind == "own" and name in layouts.CASTS
        if casts and isinstance(self._note(base.held), TensorTrait):
            return base
        if base.kind in ("chosen", "of one", "loads"):
            found = picks.method(base, name, *self._given(node, scope))
            return self._known_layout(found, function)
        if base.kind in picks.COUNTED and name == "numel":
            return picks.COUNT
        if base.kind == "context" and name == "save_for_backward":
            self.saved, _ = self._given(node, scope)
            return layouts.NONE
        if base.kind in ("plain", "own"):
            values, named = self._given(node, scope)
            if base.kind == "own":
                trait = self._note(base.held)
                is_vector = isinstance(trait, TensorTrait) and trait.is_vector
                places = {"squeeze": [], "unsqueeze": [constant(0)]}.get(name)
                if not is_vector or values != places or named:
                    raise Unknown(ast.unparse(function))
                return layouts.PLAIN
            if name not in ("get", "item", "pop", *layouts.ELEMENTWISE_METHODS):
                raise Unknown(ast.unparse(function))
            given = {value.kind for value in (*values, *named.values())}
            if name not in layouts.CASTS and not given <= {"plain", "own", "constant"}:
                raise Unknown(ast.unparse(function))
            return layouts.PLAIN
        if base.kind in ("cache", "caches"):
            return self._cached(base, name, node, scope)
        if base.kind == "filled" and name == "get":
            return constant(False)
        if base.kind not in layouts.TENSORS:
            raise Unknown(ast.unparse(function))
        if name in ("view", "reshape") and base.kind in layouts.FEATURES:
            return self._viewed(base, node, scope)
        if name == "expand" and isinstance(node.args[0], ast.Starred) and base.kind == "head":
            shape = self._shape(node.args, scope)
            heads = base._replace(kind="heads")
            if shape == Value("heads' shape", base.trailing, base.held):
                return heads
        if name == "new_empty" and base.kind in layouts.FEATURES and not node.keywords:
            return self._shaped(base, node, scope)
        values, named = self._given(node, scope)
        self._check_own([*values, *named.values()])
        if name == "index_add_" and not named:
            return self._known_layout(picks.added(base, values), function)
        if (base.kind, name) == ("rows", "permute") and base.trailing == 2:
            return self._known_layout(picks.by_expert(base, [v.held for v in values]), function)
        return self._known_layout(layouts.method(base, name, values, named), function)

    def _viewed(self, base: Value, node: ast.Call, scope: Scope) -> Value:
        """Follow ``view`` and ``reshape``, which split or join features, heads or sequences."""
        alone = base.kind in ("tokens", "head")  # no dimension comes between B and L
        if alone and (heads := self._heads(base, node, scope)) is not None:
            return base._replace(kind="tokens", trailing=heads)
        first, *others = node.args
        if base.kind in ("picked", "rows", "tokens") and ast.unparse(first) == "-1":
            sizes = [self.value(each, scope) for each in others]
            if self._are_features(base, sizes):
                kind = "picked" if base.kind == "picked" else "rows"
                return base._replace(kind=kind, trailing=len(sizes))
        if (base.kind, base.trailing) == ("tokens", 1) and len(others) == 3:
            one, *rest = others
            whole = self._shape([first, *rest], scope) == Value("shape", 1, base.held)
            if whole and ast.unparse(one) == "1":
                return base._replace(kind="head")
        return self._shaped(base, node, scope)

    def _are_features(self, base: Value, sizes: list[Value]) -> bool:
        """Whether ``view(-1, *sizes)`` makes one row of each token, or splits the features of rows.

        A number of features that a module holds is taken for that of its input: a single token
        can be viewed like this too.
        """
        if base.trailing == 1 and len(sizes) == 1:
            (size,) = sizes
            return size == layouts.WIDTH or isinstance(self._number(size), int)
        known = all(size.kind in ("constant", "plain", "own") for size in sizes)
        return base.kind == "rows" and len(sizes) > 0 and known

    def _shaped(self, base: Value, node: ast.Call, scope: Scope) -> Value:
        """Return a value of a shape that a call gets, which has as many tokens as ``base``."""
        shape = self._shape(node.args, scope)
        if shape is not None and shape.held == base.held:
            if shape.kind == "heads' shape" and base.kind in ("heads", "head"):
                return base._replace(trailing=shape.trailing)
            if shape.kind == "shape" and base.kind != "heads":
                return base._replace(kind="tokens", trailing=shape.trailing)
        raise Unknown(ast.unparse(node))

    def _heads(self, base: Value, node: ast.Call, scope: Scope) -> int | None:
        """Match ``view(batch_size, -1, heads, features)``; return how many dimensions follow.

        The second dimension is the number of tokens; otherwise nothing would fit packed sequences.
        The dimensions may be a tuple. There may be a number before the heads, such as 3 for
        queries, keys and values. Or there may be only features, those of all heads.

        Args:
            base: the tokens.
        """
        given: list[Value] = []
        for argument in node.args:
            if not isinstance(argument, ast.Starred):
                given.append(self.value(argument, scope))
                continue
            value = self.value(argument.value, scope)
            if value.kind != "tuple":
                return None
            given += value.held
        if len(given) == 1 and given[0].kind == "tuple":
            given = list(given[0].held)
        if len(given) < 3 or given[1] != constant(-1) or (len(given) == 3 and base.trailing != 2):
            return None
        first, _, *rest = given
        batch = first.kind == "length" and first.held is not None and first.held[0] == 0
        known = all(
            value.kind in ("own", "plain") or (value.kind == "constant" and value.held > 0)
            for value in rest
        )
        return len(rest) if batch and known else None

    def _cached(self, cache: Value, name: str, node: ast.Call, scope: Scope) -> Value:
        """Follow a method of a cache; it returns the keys and values that it gets."""
        values, named = self._given(node, scope)
        if name == "get_seq_length":
            return constant(0)
        heads, others = values[:2], [*values[2:], *named.values()]
        keys = layouts.HEADS._replace(held=cache.held)
        if (
            name != "update"
            or cache.kind != "cache"
            or list(map(_heads, heads)) != [keys, keys]
            or any(value.kind not in ("plain", "own", "constant", "dict") for value in others)
        ):
            raise Unknown(f"its cache's {name}")
        return Value("tuple", 0, tuple(heads))

    def _note(self, name: str) -> Any:
        """Return the trait of an attribute, on which the verdict depends from now on."""
        self.read[name] = trait_of(self.module, name)
        return self.read[name]


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _root(node: ast.expr) -> str | None:
    """The name at the beginning of a dotted name; None for other code."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _heads(value: Value) -> Value:
    """Return heads for one head, which stands for all of them as keys or values."""
    return value._replace(kind="heads") if value.kind == "head" else value


def _is_followed(module: nn.Module) -> bool:
    """Whether a submodule's code is followed with the layouts that it gets."""
    return sublayers.is_of_transformers(sublayers.original(type(module)))


def _is_of_last_dimension(module: nn.Module) -> bool:
    """Whether a module computes by the last dimension alone, as a norm or a linear layer does."""
    return norms.is_known(module) or type(module) in (nn.Linear, Linear, FrozenLinear)


_OF_PAIRS = ("values", "indices")  # the names in what torch.topk and torch.max return


def _kept_features(index: ast.expr, trailing: int) -> int:
    """Match ``..., i, :``, with slices or numbers of features.

    Returns:
        How many of ``trailing`` dimensions of features are left; 0 for other code.
    """
    if not isinstance(index, ast.Tuple) or ast.unparse(index.elts[0]) != "...":
        return 0
    _, *each = index.elts
    numbers = [part for part in each if isinstance(part, ast.Constant) and type(part.value) is int]
    slices = [part for part in each if isinstance(part, ast.Slice)]
    known = 0 < len(each) <= trailing and len(numbers) + len(slices) == len(each)
    return trailing - len(numbers) if known else 0


def _first_of_slice(index: ast.expr) -> int | None:
    """Match ``n:``, and return n; None for other code."""
    if not isinstance(index, ast.Slice) or not index.upper is index.step is None:
        return None
    lower = index.lower
    return lower.value if isinstance(lower, ast.Constant) and isinstance(lower.value, int) else None


def _of_caller(value: Value, given: Value) -> Value:
    """Return what a submodule returns as its caller knows it: rows may be the picked ones.

    Args:
        value: what the submodule returns.
        given: the tokens that it got.
    """
    if value.kind == "results":  # of another submodule
        return given
    picked = given.kind == "picked" and value.kind == "rows"
    return value._replace(kind="picked", held=given.held) if picked else value


def _with_dimensions(index: ast.expr, base: Value) -> Value | None:
    """Match ``:, None, :`` and the like, which add dimensions of size 1.

    Returns:
        The longer value: a head, if the new dimension comes after the sequences.
    """
    parts = index.elts if isinstance(index, ast.Tuple) else []
    new = [ast.unparse(part) == "None" for part in parts]
    if not any(new) or any(
        not is_new and ast.unparse(p) != ":" for p, is_new in zip(parts, new, strict=True)
    ):
        return None
    lead = layouts.FEATURES[base.kind]
    at = [sum(not each for each in new[:place]) for place, is_new in enumerate(new) if is_new]
    if all(place >= lead for place in at):
        return base._replace(trailing=base.trailing + len(at))
    if base.kind == "tokens" and at[0] == 1 and all(place >= lead for place in at[1:]):
        return base._replace(kind="head", trailing=base.trailing + len(at) - 1)
    return None


def _tested_tuple(test: ast.expr) -> str:
    """Match ``isinstance(x, tuple)``, and return x; "" for other code."""
    if isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance":
        value, kind = test.args
        if isinstance(value, ast.Name) and ast.unparse(kind) == "tuple":
            return value.id
    return ""


def _is_autograd(method: Any) -> bool:
    """Whether a method is one of the class of an autograd function."""
    owner = getattr(method, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _call_self(tree: ast.FunctionDef) -> None:
    """Rename a function's first argument, a module, to ``self``."""
    name = tree.args.args[0].arg
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = "self"


def _length(size: Value, position: int) -> Value:
    return Value("length", 0, (position, size.held))


def _is_message(statement: ast.Expr) -> bool:
    """Whether a statement logs or warns."""
    call = statement.value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return False
    return isinstance(call.func.value, ast.Name) and call.func.value.id in ("logger", "warnings")


def _is_attention_table(node: ast.expr, scope: dict[str, Any]) -> bool:
    from transformers import AttentionInterface

    return isinstance(code.value_of(node, scope), AttentionInterface)


def uses_experts_interface(source: type[nn.Module]) -> bool:
    """Whether a class of transformers leaves its forward to one of the interchangeable functions of
    experts.
    """
    moe = sys.modules.get("transformers.integrations.moe")
    forward: Any = source.forward
    if moe is None or getattr(forward, "__globals__", None) is not vars(moe):
        return False
    interface = inspect.getclosurevars(forward).nonlocals.get("experts_interface")
    return interface is not None and interface is getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)


def _pair_of_caches() -> type:
    from transformers import EncoderDecoderCache

    pair: type = EncoderDecoderCache
    return pair


def _is_of_experts(name: Any) -> bool:
    """Whether a name selects one of transformers' own implementations of experts."""
    if name == "eager":
        return True
    from transformers.integrations import moe

    function = moe.ALL_EXPERTS_FUNCTIONS.get(name, None)
    return (getattr(function, "__module__", None) or "").startswith("transformers.")


def _is_chunking(function: Any) -> bool:
    from transformers import pytorch_utils

    return function is pytorch_utils.apply_chunking_to_forward


def trait_of(module: nn.Module, name: str) -> Any:
    """Return what a verdict may depend on: a constant's value, or the kind of anything else."""
    if name.endswith(_PRESENCE):
        return hasattr(module, name.removesuffix(_PRESENCE))
    if "." in name:
        owner, _, name = name.partition(".")
        held = getattr(module, owner, None)
        return trait_of(held, name) if isinstance(held, nn.Module) else _trait(held, name)
    if name in module._modules:  # looked up there, because this runs in each forward
        return None if module._modules[name] is None else nn.Module
    return _trait(module, name)


_PRESENCE = "?"  # after the name of an attribute: whether there is one


def _trait(owner: Any, name: str) -> Any:
    own = getattr(owner, "__dict__", {})
    value = own[name] if name in own else getattr(owner, name, None)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, torch.Tensor):
        return TensorTrait(value.dim(), value.shape[:-1].numel() == 1)
    if isinstance(value, (dict, frozenset, list, set, tuple)) and not value:
        return ()
    if type(value) is tuple and all(isinstance(item, (int, str)) for item in value):
        return value
    return type(value)


class TensorTrait(NamedTuple):
    """The trait of a tensor."""

    dim: int
    is_vector: bool  # whether no dimension but the last has more than one element


def _is_known_constant(trait: Any) -> bool:
    """Whether a trait is an attribute's value, or represents any container without items."""
    return trait is None or isinstance(trait, (bool, int, str)) or type(trait) is tuple
