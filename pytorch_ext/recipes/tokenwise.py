"""Whether a module treats tokens one by one, except in attention that takes packed tokens.

The code of its class is followed from ``forward`` on, with the layout of each value: tokens,
(B, L, ...), or heads, (B, H, L, E). Only what keeps the tokens apart is allowed: submodules (which
are examined by themselves), elementwise functions, the way to heads and back, and transformers'
attention interface, if it gets the mask that came in. Whatever else is used is the reason why the
module isn't known to treat tokens one by one. So code that nobody has seen before is either
understood or left alone.

A decoder's tokens attend to its memory too, the tokens of an encoder. These are packed by
themselves, and never meet the decoder's tokens outside of attention.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from trifuse.nn import packing
from trifuse.recipes import attention, code, norms, sublayers

# Arguments that are None wherever tokens are packed: :mod:`trifuse.recipes.stacks` sees to it.
ABSENT = frozenset(
    {
        "cache",
        "cross_attn_layer_head_mask",
        "encoder_attention_mask",
        "encoder_decoder_position_bias",
        "encoder_hidden_states",
        "head_mask",
        "key_value_states",
        "layer_head_mask",
        "past_key_value",
        "past_key_values",
        "position_bias",
    }
)
# Arguments that are false there: the caller wants nothing but the result.
WISHES = frozenset({"output_attentions", "output_hidden_states"})
MASK = "attention_mask"  # the argument in whose place packed sequences come
MEMORY, MEMORY_MASK = "encoder_hidden_states", "encoder_attention_mask"  # of a decoder's layers
BIAS, MEMORY_BIAS = "position_bias", "encoder_decoder_position_bias"  # (B or 1, H, L, L or S)

# The arguments of a module by which packed sequences, a memory or a bias come in, with their kind.
# All others hold tokens, or are None as in ``ABSENT``.
Inputs = frozenset[tuple[str, "_Value"]]


def layer_inputs(names: Collection[str], memory: bool) -> Inputs:
    """Return the inputs of a stack's layer.

    Args:
        names: of the layer's arguments.
        memory: whether it gets a memory.
    """
    known = {MASK: _Value("mask"), BIAS: _Value("bias")}
    if memory:
        known |= {
            MEMORY: _Value("tokens", 1, _MEMORY),
            MEMORY_MASK: _Value("mask", 0, _MEMORY),
            MEMORY_BIAS: _Value("bias", 0, _MEMORY),
        }
    return frozenset((name, kind) for name, kind in known.items() if name in names)


class Examiner:
    """Examines the modules of a stack, in the order in which they hold each other.

    Args:
        layers: the stack's layers.
        memory: whether they get a memory.
    """

    def __init__(self, layers: Iterable[nn.Module], memory: bool = False) -> None:
        self.inputs: dict[nn.Module, Inputs | None] = {
            layer: layer_inputs(_arguments(type(layer)).named, memory) for layer in layers
        }
        self.verdicts: dict[nn.Module, _Verdict | str | None] = {}

    def why_not(self, module: nn.Module) -> str | None:
        """Return why a module of transformers isn't known to treat tokens one by one, or None."""
        verdict = self._verdict(module)
        if not isinstance(verdict, _Verdict):
            return verdict
        unknown = packing.why_unknown(sublayers.original(type(module)))
        if verdict.uses is not None:
            return f"{unknown}: it uses {verdict.uses}"
        for call in verdict.calls:
            for child in call.modules(module):
                key = call, type(child)
                if key not in verdict.given:
                    verdict.given[key] = _given_to(child, call)
                given = verdict.given[key]
                if given is None:
                    name = f"{type(module).__module__}.{type(module).__qualname__}"
                    passes = f"doesn't pass its mask to {call.name}, or under another name"
                    return f"is a {name}, which {passes}"
                if self.inputs.setdefault(child, given) != given:
                    self.inputs[child] = None
                    self.verdicts.pop(child, None)
                within = self._verdict(child)
                whole = getattr(within, "returns_tuple", None)
                if (call[:2], whole) in verdict.results:
                    return f"{unknown}: it uses a part of what {call.name} returns"
        return None

    def _verdict(self, module: nn.Module) -> _Verdict | str | None:
        """Follow a module's code; or say why that is in vain, or None if it needn't be followed."""
        if module not in self.verdicts:
            self.verdicts[module] = self._follow(module)
        return self.verdicts[module]

    def _follow(self, module: nn.Module) -> _Verdict | str | None:
        source = sublayers.original(type(module))
        if not sublayers.is_of_transformers(source):
            return packing.why_unknown(type(module))
        if _is_elementary(source):
            return None
        inputs = self.inputs.get(module, _ONLY_A_MASK)
        if inputs is None:
            return f"{packing.why_unknown(source)}: its calls differ in their arguments"
        return _examine(module, source, inputs, sublayers.attends(module))


def _is_elementary(source: type[nn.Module]) -> bool:
    """Whether a class of transformers computes an activation or a norm."""
    return source.__module__ == "transformers.activations" or norms.is_rms_norm(source)


def why_not(module: nn.Module) -> str | None:
    """As :meth:`Examiner.why_not`, for a module that gets no memory."""
    return Examiner(()).why_not(module)


class _SubmoduleCall(NamedTuple):
    """A call of a submodule, and what it gets."""

    name: str
    at: int | None  # its index in a list of modules; None: the module, or each of the list
    special: frozenset[tuple[int | str, _Value]]  # inputs, by their place among the arguments

    def modules(self, owner: nn.Module) -> list[nn.Module]:
        """Return the submodules of ``owner`` that are called."""
        child: Any = owner._modules[self.name]
        if not isinstance(child, nn.ModuleList):
            return [child]
        return list(child) if self.at is None else [child[self.at]]


class _Verdict(NamedTuple):
    """The result of following the code of a class."""

    uses: str | None  # what isn't known to keep tokens apart
    calls: frozenset[_SubmoduleCall]
    results: frozenset[tuple[Any, bool]]  # of calls; True: used as a tensor, False: as a tuple
    returns_tuple: bool | None  # whether it returns a tuple; None: what a submodule returns
    read: dict[str, Any]  # the attributes on which this verdict rests
    given: dict[
        tuple[_SubmoduleCall, type], Inputs | None
    ]  # what calls give to submodules of a class


_verdicts: dict[tuple[type, Inputs, bool], list[_Verdict]] = {}


def _examine(module: nn.Module, source: type[nn.Module], inputs: Inputs, attends: bool) -> _Verdict:
    known = _verdicts.setdefault((source, inputs, attends), [])
    for verdict in known:
        if all(_trait(module, name) == trait for name, trait in verdict.read.items()):
            return verdict
    reader = _Reader(module, source, dict(inputs), attends)
    uses, returned = None, None
    try:
        returned = reader.method("forward", None)
    except _Unknown as unknown:
        uses = str(unknown)
    except (IndexError, TypeError, ValueError):  # code that wouldn't run with what we know of it
        uses = "what can't be followed"
    kind = "results" if returned is None else returned.kind
    returns_tuple = None if kind == "results" else kind == "tuple"
    results = frozenset(reader.results)
    verdict = _Verdict(uses, frozenset(reader.calls), results, returns_tuple, reader.read, {})
    known.append(verdict)
    return verdict


def _trait(module: nn.Module, name: str) -> Any:
    """Return what a verdict may rest on: a constant's value, or the kind of anything else."""
    if name in module._modules:  # looked up there, since this happens in each forward
        return None if module._modules[name] is None else nn.Module
    value = vars(module)[name] if name in vars(module) else getattr(module, name, None)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dim()
    return type(value)


def _given_to(child: nn.Module, call: _SubmoduleCall) -> Inputs | None:
    """Return the inputs of a child in a call; None if it takes a mask that it doesn't get."""
    arguments = _arguments(type(child))
    given: dict[str, _Value] = {}
    for place, value in call.special:
        if isinstance(place, int):
            if place >= len(arguments.positional):
                return None
            place = arguments.positional[place]
        if place not in arguments.named:
            return None
        given[place] = value
    masked = any(value.kind == "mask" for value in given.values())
    return None if MASK in arguments.named and not masked else frozenset(given.items())


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments that a module takes by position."""
    return _arguments(type(module)).positional


class _Arguments(NamedTuple):
    """The names of the arguments of a class's ``forward``."""

    positional: list[str]
    named: set[str]  # positional ones too


_arguments_of: dict[type, _Arguments] = {}


def _arguments(cls: type[nn.Module]) -> _Arguments:
    if cls not in _arguments_of:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        _arguments_of[cls] = _Arguments(
            [parameter.name for parameter in parameters if parameter.kind in positional],
            {parameter.name for parameter in parameters},
        )
    return _arguments_of[cls]


class _Unknown(Exception):  # noqa: N818 - an answer, not an error
    """A method uses something that isn't known to keep tokens apart; the message names it."""


class _Value(NamedTuple):
    """A value in the code, as far as it can be known without running it.

    Its kind is one of

    - tokens: (B, L, ...), with ``trailing`` further dimensions; or a tuple of such;
    - heads: (B, H, L, E);
    - mask: the packed sequences;
    - bias: what is added to the scores of attention;
    - constant: a Python value, ``held``;
    - own: the module's attribute of the name ``held``;
    - module: a submodule in the list of the name ``held``;
    - tuple: ``held`` are the items;
    - results: of a submodule, tokens or a tuple that begins with them; ``held`` are these tokens,
      and the name and the place of the submodule;
    - size: the shape of tokens; lead: its first two numbers; shape: those and ``trailing`` others;
    - length: a number that depends on how many tokens there are;
    - attention: transformers' attention interface;
    - verdict: whether something holds for all tokens, or for any;
    - plain: a Python value or a vector over the features;
    - mixed: one of two that differ.

    Tokens, heads, masks, biases and shapes of the memory are ``held`` as such.
    """

    kind: str
    trailing: int = 0
    held: Any = None


_MEMORY = "memory"
_TOKENS = _Value("tokens", 1)
_HEADS = _Value("heads", 1)
_ONLY_A_MASK = frozenset({(MASK, _Value("mask"))})
_PLAIN = _Value("plain")
_LENGTH = _Value("length")
_NONE = _Value("constant", 0, None)
_NUMBERS = ("constant", "plain")

_ELEMENTWISE = {
    nn.functional.dropout,
    nn.functional.gelu,
    nn.functional.relu,
    nn.functional.silu,
    nn.functional.tanh,
    nn.functional.sigmoid,
    torch.clamp,
    torch.isfinite,
    torch.isinf,
    torch.erf,
    torch.isnan,
    torch.relu,
    torch.sigmoid,
    torch.tanh,
}
_ELEMENTWISE_METHODS = {
    "bfloat16",
    "clamp",
    "clone",
    "contiguous",
    "float",
    "half",
    "sigmoid",
    "tanh",
    "to",
    "type",
    "type_as",
}
_ARITHMETIC = {bool, float, int, max, min, math.log, math.sqrt}
_QUESTIONS = {hasattr, isinstance, type, torch.finfo, torch.is_autocast_enabled}
_GIVEN = ("mask", "bias", "tokens", "heads")  # kinds of what isn't None
_Scope = dict[str, _Value]


class _Reader:
    """Follows the methods of one module."""

    def __init__(
        self, module: nn.Module, source: type[nn.Module], inputs: dict[str, _Value], attends: bool
    ) -> None:
        self.module = module
        self.attends = attends  # whether attention that is written out runs as one operator
        self.inputs = inputs
        self.methods = dict(code.methods(source))
        self.read: dict[str, Any] = {}
        self.calls: set[_SubmoduleCall] = set()
        self.results: set[tuple[Any, bool]] = set()
        self.depth = 0
        self.globals: dict[str, Any] = {}

    def method(
        self, name: str, given: list[_Value] | None, named: dict[str, _Value] | None = None
    ) -> _Value:
        """Follow a method; its arguments are told by their names unless they are given."""
        if name not in self.methods:
            raise _Unknown(f"a {name} that can't be read")
        return self.function(self.methods[name], given, named or {}, skip=1)

    def function(
        self,
        function: types.FunctionType,
        given: list[_Value] | None,
        named: dict[str, _Value],
        skip: int = 0,
    ) -> _Value:
        tree = code.parse(function)
        function = inspect.unwrap(function)
        if tree is None:
            raise _Unknown(f"{function.__name__}, whose code can't be read")
        outer, self.globals = self.globals, function.__globals__
        if self.attends and skip:
            sublayers.rewrite_attention(tree, sublayers.roles(self.module), self.globals)
        self.depth += 1
        if self.depth > 8:
            raise _Unknown(f"{function.__name__}, which calls itself")
        for decorator in tree.decorator_list:
            self._decorator(decorator)
        scope = self._parameters(function, given, named, skip)
        returned: list[_Value] = []
        self.block(tree.body, scope, returned)
        self.depth -= 1
        self.globals = outer
        return _join(returned) if returned else _NONE

    def _decorator(self, decorator: ast.expr) -> None:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        module = getattr(code.value_of(called, self.globals), "__module__", None) or ""
        if not module.startswith(("transformers.utils", "transformers.integrations")):
            raise _Unknown(ast.unparse(decorator))

    def _parameters(
        self,
        function: types.FunctionType,
        given: list[_Value] | None,
        named: dict[str, _Value],
        skip: int,
    ) -> _Scope:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
        scope: _Scope = {}
        for position, parameter in enumerate(parameters):
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                value = _PLAIN
            elif given is None:
                value = self._input(parameter.name)
            elif position < len(given):
                value = given[position]
            elif parameter.name in named:
                value = named[parameter.name]
            elif isinstance(parameter.default, (bool, int, float, str, types.NoneType)):
                value = _Value("constant", 0, parameter.default)
            else:
                value = _PLAIN
            scope[parameter.name] = value
        return scope

    def _input(self, name: str) -> _Value:
        """Return an argument of the module by its name."""
        if name in self.inputs:
            return self.inputs[name]
        if name in WISHES:
            return _Value("constant", 0, False)
        return _NONE if name in ABSENT else _TOKENS

    # Statements ---------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt], scope: _Scope, returned: list[_Value]) -> bool:
        """Follow statements, which change ``scope``; return whether they leave the function."""
        for statement in body:
            if isinstance(statement, ast.Return):
                value = _NONE if statement.value is None else self.any(statement.value, scope)
                returned.append(value)
                return True
            if isinstance(statement, ast.Raise):
                return True
            if isinstance(statement, ast.If):
                if self._branches(statement, scope, returned):
                    return True
            elif isinstance(statement, ast.For):
                self._loop(statement, scope, returned)
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], self.any(statement.value, scope), scope)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign(statement.target, self.value(statement.value, scope), scope)
            elif isinstance(statement, ast.AugAssign):
                sides = [self.value(side, scope) for side in (statement.target, statement.value)]
                self._assign(statement.target, self._combined(sides, statement), scope)
            elif isinstance(statement, ast.Expr):
                if not isinstance(statement.value, ast.Constant) and not _is_message(statement):
                    self.value(statement.value, scope)
            elif not isinstance(statement, ast.Pass):
                raise _Unknown(ast.unparse(statement).splitlines()[0])
        return False

    def _branches(self, statement: ast.If, scope: _Scope, returned: list[_Value]) -> bool:
        if isinstance(statement.body[-1], ast.Raise) and not statement.orelse:
            return False
        test = self.truth(self.value(statement.test, scope))
        if test is not None:
            return self.block(statement.body if test else statement.orelse, scope, returned)
        either = [dict(scope), dict(scope)]
        bodies = (statement.body, statement.orelse)
        left = [self.block(body, each, returned) for body, each in zip(bodies, either, strict=True)]
        going = [each for each, gone in zip(either, left, strict=True) if not gone]
        names = {name for each in going for name in each}
        for name in names:
            found = [each.get(name, _Value("mixed")) for each in going]
            same = all(value == found[0] for value in found)
            scope[name] = found[0] if same else _join([self._whole(value) for value in found])
        return not going

    def _loop(self, statement: ast.For, scope: _Scope, returned: list[_Value]) -> None:
        """Follow a loop over the module's own modules; a second round must find the same."""
        name = own_list(statement.iter)
        if name is None or statement.orelse:
            raise _Unknown(f"a loop over {ast.unparse(statement.iter)}")
        self._note(name)
        targets = [statement.target]
        if isinstance(statement.target, ast.Tuple):
            targets = statement.target.elts
        for target in targets:
            self._assign(target, _PLAIN, scope)
        self._assign(targets[-1], _Value("module", 0, name), scope)
        before = dict(scope)
        left = self.block(statement.body, scope, returned)
        scope.update({name: self._whole(scope[name]) for name in before})
        if left or any(scope[name] != self._whole(value) for name, value in before.items()):
            raise _Unknown(f"a loop over {ast.unparse(statement.iter)}")

    def _assign(self, target: ast.expr, value: _Value, scope: _Scope) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one, item in zip(target.elts, self._items(value, len(target.elts)), strict=True):
                self._assign(one, item, scope)
        else:
            raise _Unknown(ast.unparse(target))

    def _items(self, value: _Value, count: int) -> list[_Value]:
        if value.kind == "tuple" and len(value.held) == count:
            return list(value.held)
        if value.kind == "results":
            return [self._first(value)] * count
        if value.kind == "tokens":  # a tuple that came in
            return [value] * count
        if value.kind == "size":
            return [self._length(value, position) for position in range(2)] + [_PLAIN] * (count - 2)
        raise _Unknown(f"{count} parts of a {value.kind}")

    def _length(self, size: _Value, position: int) -> _Value:
        return _Value("length", 0, (position, size.held))

    # Expressions --------------------------------------------------------------------------------

    def truth(self, value: _Value) -> bool | None:
        """Return the truth of a value, if it is known and not up to the tokens."""
        if value.kind == "constant":
            return bool(value.held)
        if value.kind == "own" and value.held != "training":
            trait = self._note(value.held)
            return bool(trait) if trait is None or isinstance(trait, (bool, int, str)) else None
        # A verdict is one on the whole batch, with its padding or without.
        if value.kind not in ("own", "plain", "tokens", "heads", "verdict"):
            raise _Unknown(f"a test of a {value.kind}")
        return None

    def value(self, node: ast.expr, scope: _Scope) -> _Value:
        """Return what is known of an expression's value, which isn't a submodule's tuple."""
        return self._whole(self.any(node, scope))

    def _whole(self, value: _Value) -> _Value:
        """Return the tokens that a submodule returned, if the value is such."""
        if value.kind != "results":
            return value
        tokens, *call = value.held
        self.results.add((tuple(call), True))
        return tokens

    def _first(self, results: _Value) -> _Value:
        """Return the tokens at the beginning of a tuple that a submodule returned."""
        tokens, *call = results.held
        self.results.add((tuple(call), False))
        return tokens

    def any(self, node: ast.expr, scope: _Scope) -> _Value:
        """Return what is known of an expression's value."""
        follow: Callable[[Any, _Scope], _Value] | None
        follow = getattr(self, f"_{type(node).__name__.lower()}", None)
        if follow is None:
            raise _Unknown(ast.unparse(node))
        return follow(node, scope)

    def _constant(self, node: ast.Constant, scope: _Scope) -> _Value:
        return _Value("constant", 0, node.value)

    def _name(self, node: ast.Name, scope: _Scope) -> _Value:
        value = scope.get(node.id, _PLAIN)
        if value.kind == "mixed":
            raise _Unknown(f"one of two {node.id}")
        if node.id not in scope and isinstance(self.globals.get(node.id), torch.Tensor):
            raise _Unknown(node.id)
        return value

    def _attribute(self, node: ast.Attribute, scope: _Scope) -> _Value:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return _Value("own", 0, node.attr)
        if node.attr in ("device", "dtype") and _root(node) == "self":
            return _PLAIN
        base = self.value(node.value, scope)
        if base.kind in ("tokens", "heads"):
            if node.attr == "shape" and base.kind == "tokens":
                return _Value("size", base.trailing, base.held)
            if node.attr not in ("device", "dtype"):
                raise _Unknown(ast.unparse(node))
        elif base.kind == "own":
            held = getattr(getattr(self.module, base.held, None), node.attr, None)
            self._note(base.held)
            if isinstance(held, torch.Tensor) and held.dim() > 1:
                raise _Unknown(ast.unparse(node))
        elif base.kind != "plain":
            raise _Unknown(ast.unparse(node))
        return _PLAIN

    def _subscript(self, node: ast.Subscript, scope: _Scope) -> _Value:
        base = self.any(node.value, scope)
        index = node.slice
        if base.kind == "size":
            text = ast.unparse(index)
            if text in (f":-{base.trailing}", ":2"):
                return _Value("lead", 0, base.held)
            if text in ("-1", "2"):
                return _PLAIN
            if text in ("0", "1"):
                return self._length(base, int(text))
        elif base.kind == "tuple" and isinstance(index, ast.Constant):
            item: _Value = base.held[index.value]
            return item
        elif base.kind == "results":
            first = self._first(base)
            if isinstance(index, ast.Constant) and isinstance(index.value, int):
                return first
            if ast.unparse(index) == "1:":
                return _Value("tuple", 0, ())  # its items are unknown, and so can't be used
        elif (
            base.kind in ("tokens", "heads")
            and isinstance(index, ast.Tuple)
            and len(index.elts) == 2
            and isinstance(index.elts[0], ast.Constant)
            and index.elts[0].value is ...
            and isinstance(index.elts[1], ast.Slice)
        ):
            return base  # some of the features
        raise _Unknown(ast.unparse(node))

    def _tuple(self, node: ast.Tuple, scope: _Scope) -> _Value:
        if (shape := self._shape(node.elts, scope)) is not None:
            return shape
        if any(isinstance(item, ast.Starred) for item in node.elts):
            raise _Unknown(ast.unparse(node))
        return _Value("tuple", 0, tuple(self.value(item, scope) for item in node.elts))

    _list = _tuple

    def _shape(self, nodes: list[ast.expr], scope: _Scope) -> _Value | None:
        """Match the numbers of a shape whose first two dimensions are those of the tokens."""
        if not nodes:
            return None
        if isinstance(nodes[0], ast.Starred):
            first = self.value(nodes[0].value, scope)
            if first.kind == "shape" and len(nodes) == 1:
                return first
            if first.kind != "lead":
                return None
            held, rest = first.held, nodes[1:]
        else:
            lead = [self.value(node, scope) for node in nodes[:2]]
            if lead[0].kind == "shape" and len(nodes) == 1:
                return lead[0]
            held = lead[0].held[1] if isinstance(lead[0].held, tuple) else None
            if lead != [_Value("length", 0, (position, held)) for position in range(2)]:
                return None
            rest = nodes[2:]
        if any(isinstance(node, ast.Starred) for node in rest):
            return None
        kinds = {self.value(node, scope).kind for node in rest}
        return _Value("shape", len(rest), held) if kinds <= {"constant", "plain", "own"} else None

    def _binop(self, node: ast.BinOp, scope: _Scope) -> _Value:
        sides = [self.value(side, scope) for side in (node.left, node.right)]
        kinds = [side.kind for side in sides]
        if isinstance(node.op, ast.Mult) and kinds == ["tuple", "constant"]:
            return sides[0]._replace(held=sides[0].held * sides[1].held)
        if isinstance(node.op, ast.Add) and kinds == ["tuple", "tuple"]:
            return sides[0]._replace(held=sides[0].held + sides[1].held)
        if (
            isinstance(node.op, ast.Add)
            and kinds == ["lead", "tuple"]
            and {item.kind for item in sides[1].held} <= {"constant", "plain", "own"}
        ):
            return _Value("shape", len(sides[1].held), sides[0].held)
        if isinstance(node.op, ast.MatMult):
            raise _Unknown(ast.unparse(node))
        return self._combined(sides, node)

    def _combined(self, values: list[_Value], node: ast.AST) -> _Value:
        """Return the result of an elementwise function."""
        tensors = []
        for value in values:
            if value.kind == "own":
                trait = self._note(value.held)
                if trait is nn.Module or (isinstance(trait, tuple) and trait[1] > 1):
                    raise _Unknown(f"self.{value.held}")
            elif value.kind in ("tokens", "heads", "length"):
                tensors.append(value)
            elif value.kind not in _NUMBERS:
                raise _Unknown(ast.unparse(node).splitlines()[0])
        kinds = {_LENGTH if value.kind == "length" else value for value in tensors}
        if len(kinds) > 1:
            raise _Unknown(ast.unparse(node).splitlines()[0])
        return kinds.pop() if kinds else _PLAIN

    def _unaryop(self, node: ast.UnaryOp, scope: _Scope) -> _Value:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            truth = self.truth(value)
            return _PLAIN if truth is None else _Value("constant", 0, not truth)
        if isinstance(node.op, ast.USub) and value.kind == "constant":
            return value._replace(held=-value.held)
        return self._combined([value], node)

    def _boolop(self, node: ast.BoolOp, scope: _Scope) -> _Value:
        decides = isinstance(node.op, ast.Or)
        known = True
        for operand in node.values:
            truth = self.truth(self.value(operand, scope))
            if truth is decides:
                return _Value("constant", 0, decides)
            known = known and truth is not None
        return _Value("constant", 0, not decides) if known else _PLAIN

    def _compare(self, node: ast.Compare, scope: _Scope) -> _Value:
        sides = [self.value(side, scope) for side in (node.left, *node.comparators)]
        if len(sides) == 2 and isinstance(node.ops[0], (ast.Is, ast.IsNot)) and sides[1] == _NONE:
            is_none = isinstance(node.ops[0], ast.Is)
            if sides[0].kind == "own":
                return _Value("constant", 0, (self._note(sides[0].held) is None) is is_none)
            if sides[0].kind == "constant":
                return _Value("constant", 0, (sides[0].held is None) is is_none)
            if sides[0].kind in _GIVEN:
                return _Value("constant", 0, not is_none)
            return _PLAIN
        if len(sides) == 2 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            numbers = [self._number(side) for side in sides]
            if None not in numbers:
                same = numbers[0] == numbers[1]
                return _Value("constant", 0, same is isinstance(node.ops[0], ast.Eq))
        if any(side.kind not in (*_NUMBERS, "own") for side in sides):
            raise _Unknown(ast.unparse(node))
        return _PLAIN

    def _number(self, value: _Value) -> Any:
        if value.kind == "own" and value.held != "training":
            trait = self._note(value.held)
            return trait if isinstance(trait, (bool, int, str)) else None
        return value.held if value.kind == "constant" else None

    def _ifexp(self, node: ast.IfExp, scope: _Scope) -> _Value:
        test = self.truth(self.value(node.test, scope))
        if test is not None:
            return self.value(node.body if test else node.orelse, scope)
        return _join([self.value(node.body, scope), self.value(node.orelse, scope)])

    def _call(self, node: ast.Call, scope: _Scope) -> _Value:
        function = node.func
        if isinstance(function, ast.Name) and function.id in scope:
            called = scope[function.id]
            if called.kind == "attention":
                return self._attention(node, scope)
            if called.kind == "module":
                return self._submodule(called.held, None, node, scope)
            raise _Unknown(ast.unparse(function))
        if isinstance(function, ast.Subscript):
            place = self.value(function.slice, scope)
            name = own_list(function.value)
            if name is None or place.kind != "constant" or self._note(name) is not nn.Module:
                raise _Unknown(ast.unparse(function))
            return self._submodule(name, place.held, node, scope)
        if isinstance(function, ast.Attribute):
            owner = function.value
            if isinstance(owner, ast.Name) and owner.id == "self":
                if function.attr == attention.HELPER:
                    return self._written_out(node, scope)
                if function.attr in self.methods:
                    return self.method(function.attr, *self._given(node, scope))
                if self._note(function.attr) is nn.Module:
                    return self._submodule(function.attr, None, node, scope)
                raise _Unknown(ast.unparse(function))
            known = None if _root(owner) in scope else code.value_of(function, self.globals)
            if known is not None:
                if function.attr == "get_interface" and _is_attention_table(owner, self.globals):
                    return _Value("attention")
                return self._known(known, node, scope)
            return self._method_of_value(function, node, scope)
        known = code.value_of(function, self.globals | vars(builtins))
        return self._known(known, node, scope)

    def _given(self, node: ast.Call, scope: _Scope) -> tuple[list[_Value], dict[str, _Value]]:
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            raise _Unknown(ast.unparse(node.func) + " with unknown arguments")
        named = {k.arg: self.value(k.value, scope) for k in node.keywords if k.arg is not None}
        return [self.value(argument, scope) for argument in node.args], named

    def _submodule(self, name: str, index: int | None, node: ast.Call, scope: _Scope) -> _Value:
        values, named = self._given(node, scope)
        places: list[tuple[int | str, _Value]] = [*enumerate(values), *named.items()]
        first = next((value for _, value in places if value.kind == "tokens"), _TOKENS)
        special = set()
        for place, value in places:
            if value.kind in ("mask", "bias") or value.held == _MEMORY:
                special.add((place, value))
            elif (
                value.kind not in ("tokens", "plain", "own", "constant", "tuple")
                or (value.kind == "tuple" and any(item != _TOKENS for item in value.held))
                or (place in ABSENT and value != _NONE)
            ):
                raise _Unknown(f"self.{name} with a {value.kind}")
        self.calls.add(_SubmoduleCall(name, index, frozenset(special)))
        children = _SubmoduleCall(name, index, frozenset()).modules(self.module)
        if all(sublayers.is_of_transformers(sublayers.original(type(c))) for c in children):
            return _Value("results", 0, (first, name, index))
        return first

    def _attention(self, node: ast.Call, scope: _Scope) -> _Value:
        values, named = self._given(node, scope)
        mask = values[4] if len(values) > 4 else named.pop(MASK, _NONE)
        bias = named.pop(BIAS, _NONE)
        others = [*values[5:], *named.values()]
        keys = _HEADS._replace(held=mask.held)
        if (
            values[1:4] != [_HEADS, keys, keys]
            or mask.kind != "mask"
            or bias not in (_NONE, _Value("bias", 0, mask.held))
            or any(value.kind not in ("plain", "own", "constant") for value in others)
        ):
            raise _Unknown(f"{ast.unparse(node.func)} with more than packed tokens")
        return _Value("tuple", 0, (_Value("tokens", 2), _PLAIN))

    def _written_out(self, node: ast.Call, scope: _Scope) -> _Value:
        query, key, value, _, terms, *_ = node.args
        heads = [self.value(each, scope) for each in (query, key, value)]
        given = [term for term in self.value(terms, scope).held if term != _NONE]
        masks = [term for term in given if term == _Value("mask")]
        biases = [term for term in given if term == _Value("bias")]
        if heads != [_HEADS] * 3 or len(masks) != 1 or len(masks + biases) != len(given):
            raise _Unknown("attention with more than packed tokens")
        return _Value("tuple", 0, (_HEADS, _NONE))

    def _known(self, function: Any, node: ast.Call, scope: _Scope) -> _Value:
        """Follow the call of a function that isn't the module's own."""
        if _is_chunking(function):
            return self._chunked(node, scope)
        if function is isinstance:
            return self._instance(node, scope)
        values, named = self._given(node, scope)
        try:
            if function in _QUESTIONS:
                return _PLAIN
            if function in _ELEMENTWISE:
                return self._combined([*values, *named.values()], node)
            if function in _ARITHMETIC and all(v.kind in _NUMBERS for v in values):
                return _PLAIN
        except TypeError:  # not hashable
            raise _Unknown(ast.unparse(node.func)) from None
        if function is torch.where and values[:1] == [_Value("verdict")]:
            return self._combined([*values[1:], *named.values()], node)
        if function is torch.cat and [value.kind for value in values[:1]] == ["tuple"]:
            dim = [*values[1:], *named.values()]
            if dim == [_Value("constant", 0, -1)]:
                return self._combined(list(values[0].held), node)
        if isinstance(function, types.FunctionType):
            library = function.__module__.split(".")[0]
            if library in ("transformers", "transformers_modules"):
                return self.function(function, values, named)
        raise _Unknown(ast.unparse(node.func))

    def _instance(self, node: ast.Call, scope: _Scope) -> _Value:
        """Follow ``isinstance``, whose answer is known for None and other constants."""
        if _root(node.args[0]) != "self":
            value = self.value(node.args[0], scope)
            kind = code.value_of(node.args[1], self.globals)
            if value.kind == "constant" and isinstance(kind, type):
                return _Value("constant", 0, isinstance(value.held, kind))
        return _PLAIN

    def _chunked(self, node: ast.Call, scope: _Scope) -> _Value:
        """Follow transformers' ``apply_chunking_to_forward`` where it makes no chunks."""
        function, size, *_ = node.args
        name = function.attr if isinstance(function, ast.Attribute) else ""
        if self._number(self.value(size, scope)) != 0 or name not in self.methods:
            raise _Unknown(f"{ast.unparse(node.func)}, which chunks the tokens")
        return self.method(name, [self.value(argument, scope) for argument in node.args[3:]])

    def _method_of_value(self, function: ast.Attribute, node: ast.Call, scope: _Scope) -> _Value:
        base = self.value(function.value, scope)
        name = function.attr
        if base.kind in ("plain", "own"):
            if base.kind == "own" or name not in ("get", "pop", *_ELEMENTWISE_METHODS):
                raise _Unknown(ast.unparse(function))
            return _PLAIN
        if base.kind not in ("tokens", "heads"):
            raise _Unknown(ast.unparse(function))
        if name in ("view", "reshape") and base.kind == "tokens":
            shape = self._shape(node.args, scope)
            if shape is None or shape.held != base.held:
                raise _Unknown(ast.unparse(node))
            return base._replace(trailing=shape.trailing)
        values, named = self._given(node, scope)
        constants = [value.held for value in values if value.kind == "constant"]
        if len(constants) < len(values):
            constants = []
        after = 1 if name in ("chunk", "split") else 0
        dim = constants[after] if len(constants) > after else named.get("dim", _NONE).held
        if name in _ELEMENTWISE_METHODS:
            return self._combined([base, *values, *named.values()], node)
        if name in ("all", "any") and not values:
            return _Value("verdict")
        layout = base.kind, base.trailing
        if name == "size" and base.kind == "tokens":
            size = _Value("size", base.trailing, base.held)
            if not values:
                return size
            return self._length(size, dim) if dim in (0, 1) else _PLAIN
        if (
            sorted(constants) == [1, 2]
            if name == "transpose"
            else (name == "permute" and constants == [0, 2, 1, 3])
        ):
            if layout == ("tokens", 2):
                return _Value("heads", 1, base.held)
            if layout == ("heads", 1):
                return _Value("tokens", 2, base.held)
        if name == "unsqueeze":
            if layout == ("tokens", 1) and dim == 1:
                return _Value("heads", 1, base.held)
            if layout == ("tokens", 1) and dim in (2, -2):
                return _Value("tokens", 2, base.held)
        if name == "flatten" and layout == ("tokens", 2) and constants in ([2], [-2]):
            return _Value("tokens", 1, base.held)
        if name == "chunk" and dim == -1 and values[:1] and values[0].kind == "constant":
            return _Value("tuple", 0, (base,) * values[0].held)
        if name == "unbind" and base.kind == "tokens" and dim in range(-base.trailing, 0):
            # One item stands for any number of them: they are all alike.
            return base._replace(trailing=base.trailing - 1)
        raise _Unknown(ast.unparse(function))

    def _note(self, name: str) -> Any:
        """Return the trait of an attribute, on which the verdict rests from now on."""
        self.read[name] = _trait(self.module, name)
        return self.read[name]


def own_list(iterated: ast.expr) -> str | None:
    """Match ``self.name``, a part of it such as ``self.name[:n]``, or one of these enumerated."""
    if (
        isinstance(iterated, ast.Call)
        and isinstance(iterated.func, ast.Name)
        and iterated.func.id == "enumerate"
        and len(iterated.args) == 1
    ):
        iterated = iterated.args[0]
    if isinstance(iterated, ast.Subscript) and isinstance(iterated.slice, ast.Slice):
        iterated = iterated.value
    if isinstance(iterated, ast.Attribute) and isinstance(iterated.value, ast.Name):
        return iterated.attr if iterated.value.id == "self" else None
    return None


def _root(node: ast.expr) -> str | None:
    """The name at the beginning of a dotted name; None for other code."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _join(values: list[_Value]) -> _Value:
    first = values[0]
    if all(value == first for value in values):
        return first
    if all(value.kind in (*_NUMBERS, "own") for value in values):
        return _PLAIN
    return _Value("mixed")


def _is_message(statement: ast.Expr) -> bool:
    """Whether a statement logs or warns."""
    call = statement.value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return False
    return isinstance(call.func.value, ast.Name) and call.func.value.id in ("logger", "warnings")


def _is_attention_table(node: ast.expr, scope: dict[str, Any]) -> bool:
    from transformers import AttentionInterface

    return isinstance(code.value_of(node, scope), AttentionInterface)


def _is_chunking(function: Any) -> bool:
    from transformers import pytorch_utils

    return function is pytorch_utils.apply_chunking_to_forward
