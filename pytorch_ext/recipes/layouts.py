"""Layouts of the values in a module's code: where a value's tokens are, if that is known.

Each function here takes the layouts of the arguments of torch's functions and methods and returns
the layout of the result, or None if tokens might mix. Tokens may mix only in attention. If that is
written out, queries and keys make scores, to which the mask must be added before their softmax.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class Value(NamedTuple):
    """A value in the code, as far as it can be known without running it.

    Its kind is one of

    - tokens: (B, L, ...), with ``trailing`` further dimensions; or a tuple of such;
    - rows: the same with the sequences one after another, (B·L, ...);
    - picked: some of these rows, as in :mod:`trifuse.recipes.picks`;
    - heads: (B, H, L, E), with ``trailing`` dimensions after the tokens;
    - head: (B, 1, L, E), one head for all of the others;
    - parts: (B, H, n, L, E), n sets of heads, such as queries, keys and values;
    - keys: (B, H, E, L), transposed heads;
    - scores: (B, H, L, L) of queries and keys; masked: these with the mask added; weights: the
      softmax of the latter. ``held`` is which tokens (see below) the queries and the keys are;
    - mask: the packed sequences;
    - bias: a value that is added to the scores of attention;
    - distances: a value from which an attention makes its own bias, without a row for each token;
    - places: the places of the tokens in the padded sequences;
    - cache: an empty cache, in which a layer keeps its keys and values;
    - caches: two such caches, for a decoder's own keys and for those of its memory; filled: their
      record of the layers that have kept the latter;
    - shared: a dictionary of keys and values, which layers add to and read;
    - constant: a Python value, ``held``;
    - own: the module's attribute named ``held``;
    - weight: a part of a tensor of the module, with ``trailing`` dimensions;
    - context: that of an autograd function;
    - module: a submodule in the list named ``held``;
    - function: a function that the method defines, ``held`` as its code;
    - tuple: ``held`` are the items;
    - dict: a dictionary of which no item is used by name;
    - results: those of a submodule, tokens or a tuple that begins with them; ``held`` are these
      tokens, and the call;
    - size: the shape of tokens; lead: its first two numbers; shape: those and ``trailing`` others;
      rows' size: the shape of rows;
      heads' size: the shape of heads; heads' lead: without its last number; heads' shape: with
      ``trailing`` others in its place;
    - length: a number that depends on how many tokens there are;
    - rest: the keyword arguments that the method doesn't name;
    - attention: transformers' attention interface;
    - verdict: whether something holds for all tokens, or for any of them;
    - plain: a Python value or a vector over the features;
    - mixed: one of two values that differ.

    Tokens, heads, keys, masks, biases, shapes and the cache of the memory are ``held`` as such.
    """

    kind: str
    trailing: int = 0
    held: Any = None


OF_MEMORY = "memory"
TOKENS = Value("tokens", 1)
ROWS = Value("rows", 1)
HEADS = Value("heads", 1)
PLAIN = Value("plain")
WIDTH = Value("plain", 0, "width")  # the number of features
NUMBER_OF_HEADS = Value("plain", 0, "heads")
LENGTH = Value("length")
NONE = Value("constant", 0, None)
NUMBERS = ("constant", "plain")
SCORES = ("scores", "masked", "weights")
# The kinds of values in which each token has its features, and the first dimension of these.
FEATURES = {"tokens": 2, "rows": 1, "heads": 3, "head": 3, "picked": 1}
TENSORS = (*FEATURES, "parts", "keys", *SCORES)
GIVEN = ("mask", "bias", "cache", "caches", *TENSORS)  # the kinds of values that aren't None

_ELEMENTWISE = {
    nn.functional.dropout, nn.functional.gelu, nn.functional.relu, nn.functional.silu,
    nn.functional.softplus, nn.functional.tanh, nn.functional.sigmoid, torch.abs, torch.add,
    torch.clamp, torch.empty_like, torch.erf, torch.exp, torch.floor, torch.full_like,
    torch.isfinite, torch.isinf, torch.isnan, torch.log, torch.log1p, torch.logical_or, torch.mul,
    torch.ones_like, torch.pow, torch.rand_like, torch.relu, torch.rsqrt, torch.sigmoid, torch.sqrt,
    torch.tanh, torch.zeros_like,
}  # fmt: skip
CASTS = {"bfloat16", "contiguous", "float", "half", "to", "type", "type_as"}
ELEMENTWISE_METHODS = {
    "abs", "add", "bool", "clamp", "clamp_", "clone", "copy_", "exp", "exponential_", "int",
    "log", "long", "masked_fill", "mul", "pow", "rsqrt", "sigmoid", "sqrt", "square", "tanh",
    "uniform_", *CASTS,
}  # fmt: skip
# Functions over the features, and the place of the dimension among their arguments after the
# tensor. They are methods too.
_OVER_FEATURES = {
    "amax": 0, "gather": 0, "max": 0, "mean": 0, "scatter": 0, "scatter_": 0, "scatter_add_": 0,
    "softmax": 0, "sum": 0, "topk": 1,
}  # fmt: skip
_ARITHMETIC = {bool, float, int, len, max, min, range, math.log, math.sqrt}
_QUESTIONS = {hasattr, isinstance, type, torch.finfo, torch.is_autocast_enabled}
_CAPS = {nn.functional.tanh, torch.tanh}
_SOFTMAX = {nn.functional.softmax, torch.softmax}


def constant(held: Any) -> Value:
    """Return the value for a Python constant."""
    return Value("constant", 0, held)


def join(values: Sequence[Value]) -> Value:
    """Return the value of something that may be any of several values."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if all(value.kind in (*NUMBERS, "own") for value in values):
        return PLAIN
    return Value("mixed")


def elementwise(values: Sequence[Value]) -> Value | None:
    """Return the result of a function that computes each element by itself."""
    tensors = []
    for value in values:
        if value.kind in (*FEATURES, "length"):
            tensors.append(LENGTH if value.kind == "length" else value)
        elif value.kind not in (*NUMBERS, "own"):
            return None
    heads = [value for value in tensors if value.kind == "heads"]
    if heads:  # one head counts for all of them
        tensors = [v._replace(kind="heads") if v.kind == "head" else v for v in tensors]
    if len(set(tensors)) > 1:
        return None
    return tensors[0] if tensors else PLAIN


def operation(operator: ast.operator, first: Value, second: Value) -> Value | None:
    """Return the result of a binary operator of two tensors or numbers."""
    if isinstance(operator, ast.MatMult):
        return _product(first, second)
    lengths = [side.held for side in (first, second) if side.kind == "length" and side.held]
    if isinstance(operator, ast.Mult) and [each[0] for each in lengths] in ([0, 1], [1, 0]):
        same = lengths[0][1] == lengths[1][1]
        return Value("length", 0, (_OF_ROWS, lengths[0][1])) if same else None
    if first.kind not in SCORES and second.kind not in SCORES:
        return elementwise([first, second])
    scores, other = (first, second) if first.kind in SCORES else (second, first)
    if scores.kind == "weights":
        return None
    if isinstance(operator, ast.Add) and scores.kind == "scores" and other == scores:
        return scores  # the scores of other queries and keys of the same tokens
    if isinstance(operator, ast.Add) and other.kind in ("mask", "bias"):
        if other.held != scores.held[1]:
            return None
        return scores._replace(kind="masked") if other.kind == "mask" else scores
    scaled = isinstance(operator, ast.Mult) or (isinstance(operator, ast.Div) and scores is first)
    return scores if scaled and other.kind in (*NUMBERS, "own") else None


_OF_ROWS = "rows"  # the number of all tokens, as a length


def _zeros(values: Sequence[Value]) -> Value | None:
    """Return the result of ``torch.zeros`` of a shape that begins with the number of rows."""
    sizes = values[0].held if values[0].kind == "tuple" else values
    first, *others = sizes
    known = all(each.kind in (*NUMBERS, "own") for each in others)
    if first.kind != "length" or first.held is None or first.held[0] != _OF_ROWS or not known:
        return None
    return Value("rows", len(others), first.held[1])


def _product(first: Value, second: Value) -> Value | None:
    """Return Q Kᵀ, or the product of weights and V."""
    if (first.kind, second.kind) == ("heads", "keys") and first.trailing == second.trailing == 1:
        return Value("scores", 0, (first.held, second.held))
    if first.kind == "weights" and second == HEADS._replace(held=first.held[1]):
        return HEADS._replace(held=first.held[0])
    return None


def _softmax(scores: Value, dim: Value | None, others: Sequence[Value]) -> Value | None:
    if scores.kind != "masked" or dim not in (constant(-1), constant(3)):
        return None
    return scores._replace(kind="weights") if all(o.kind in NUMBERS for o in others) else None


def is_question(called: Any) -> bool:
    """Whether a function's result is the same for any tokens."""
    return called in _QUESTIONS


def function(called: Any, values: list[Value], named: dict[str, Value]) -> Value | None:
    """Return the result of one of Python's or torch's functions."""
    given = [*values, *named.values()]
    try:
        if called in _QUESTIONS:
            return PLAIN
        if called in _ARITHMETIC and all(value.kind in (*NUMBERS, "own") for value in values):
            return PLAIN
        if called in _SOFTMAX:
            first, *rest = values
            others = dict(named)
            dim = rest.pop(0) if rest else others.pop("dim", None)
            if first.kind in FEATURES:
                return _over_features(first, "softmax", [dim or NONE, *rest], others)
            return _softmax(first, dim, [*rest, *others.values()])
        if called in _ELEMENTWISE:
            if called is nn.functional.dropout and given[0].kind == "weights":
                return given[0] if elementwise(given[1:]) == PLAIN else None
            if called in _CAPS and given[0].kind == "scores":
                return given[0]
            return elementwise(given)
    except TypeError:  # not hashable
        return None
    if called is torch.zeros:
        return _zeros(values)
    if called is torch.matmul and len(given) == 2:
        return _product(*given)
    name = getattr(called, "__name__", "")
    if (name in _SPLITS or name in _OVER_FEATURES) and called is getattr(torch, name, None):
        if name in _OVER_FEATURES and elementwise(given) == PLAIN:
            return PLAIN
        return method(values[0], name, values[1:], named) if values else None
    if called is torch.view_as_complex and len(given) == 1 and given[0].trailing > 1:
        known = given[0].kind in FEATURES
        return given[0]._replace(trailing=given[0].trailing - 1) if known else None
    if called is torch.view_as_real and len(given) == 1 and given[0].kind in FEATURES:
        return given[0]._replace(trailing=given[0].trailing + 1)
    if called is torch.where and values[:1] == [Value("verdict")]:
        return elementwise(given[1:])
    if called in (torch.cat, torch.concat, torch.stack) and given[0].kind == "tuple":
        if given[1:] != [constant(-1)]:
            return None
        parts = {value.kind for value in given[0].held}
        joined = None if {"head", "heads"} <= parts else elementwise(given[0].held)
        more = 0 if called is not torch.stack or joined in (None, PLAIN, LENGTH) else 1
        return None if joined is None else joined._replace(trailing=joined.trailing + more)
    return None


def method(base: Value, name: str, values: list[Value], named: dict[str, Value]) -> Value | None:
    """Return the result of a method of tokens, heads, keys or scores; ``view`` is left out."""
    if base.kind in SCORES:
        return _method_of_scores(base, name, values, named)
    constants = [value.held for value in values if value.kind == "constant"]
    if len(constants) < len(values):
        constants = []
    after = 1 if name in (*_SPLITS, "repeat_interleave") else 0
    dim = constants[after] if len(constants) > after else named.get("dim", NONE).held
    layout = base.kind, base.trailing
    if name in ELEMENTWISE_METHODS:
        if base.kind == "keys":
            return base if name in CASTS else None
        return elementwise([base, *values, *named.values()])
    if name in ("all", "any") and not values:
        return Value("verdict")
    if name == "matmul" and len(values) == 1:
        return _product(base, values[0])
    if name == "size" and base.kind == "tokens":
        if not values:
            return Value("size", base.trailing, base.held)
        if dim is None:
            return None
        dim %= 2 + base.trailing
        if dim in (0, 1):
            return Value("length", 0, (dim, base.held))
        return WIDTH if base.trailing == 1 else PLAIN
    if name == "size" and layout == ("rows", 1) and dim in (1, -1):
        return WIDTH
    if name in ("transpose", "permute", "swapaxes"):
        return _permuted(base, constants if name == "permute" else _swapped(base, constants))
    if name == "unsqueeze" and layout == ("tokens", 1) and dim == 1:
        return Value("head", 1, base.held)
    if name == "unsqueeze" and base.kind in FEATURES:
        longer = base._replace(trailing=base.trailing + 1)
        return longer if _is_of_features(longer, dim) else None
    if name == "expand":
        return _expanded(base, values)
    if name == "repeat" and layout == ("heads", 1):
        others = [*constants[:1], *constants[2:]]  # all but the number of heads
        return base if others == [1, 1, 1] else None
    if name in _OVER_FEATURES and base.kind in FEATURES:
        return _over_features(base, name, values, named)
    if name == "flatten" and layout == ("tokens", 1) and constants == [0, 1]:
        return ROWS._replace(held=base.held)
    if name == "flatten" and len(constants) == 1 and base.kind in FEATURES:
        start = constants[0] % (FEATURES[base.kind] + base.trailing) - FEATURES[base.kind]
        return base._replace(trailing=start + 1) if 0 <= start < base.trailing else None
    if name == "repeat_interleave" and base.kind in FEATURES and len(values) > 0:
        return base if values[0].kind in (*NUMBERS, "own") and dim == -1 else None
    if name == "reshape_as" and len(values) == 1:
        other = values[0]
        return other if (other.kind, other.held) == (base.kind, base.held) else None
    if name in _SPLITS and base.kind in FEATURES:
        heads = name == "chunk" and layout == ("heads", 1) and dim == 1
        return _parts(base, name, values[:1]) if heads or _is_of_features(base, dim) else None
    if name == "unbind" and base.kind == "tokens" and dim in range(-base.trailing, 0):
        # One item represents any number of them, because all are alike.
        return base._replace(trailing=base.trailing - 1)
    if name == "unbind" and base.kind == "parts" and dim in (2, -3):
        return Value("heads", 1, base.held)  # likewise
    return None


def _method_of_scores(
    base: Value, name: str, values: list[Value], named: dict[str, Value]
) -> Value | None:
    if name in CASTS or (name == "tanh" and base.kind == "scores"):
        return base
    if name == "softmax":
        dim = values[0] if values else named.get("dim")
        others = [*values[1:], *(value for key, value in named.items() if key != "dim")]
        return _softmax(base, dim, others)
    return _product(base, values[0]) if name == "matmul" and len(values) == 1 else None


_SPLITS = ("chunk", "split")


def _parts(base: Value, name: str, by: list[Value]) -> Value | None:
    """Return the parts of a value's features, or of its heads; all parts have the same layout."""
    if by and by[0].kind == "constant" and name == "chunk":
        return Value("tuple", 0, (base,) * by[0].held)
    if by and by[0].kind == "tuple" and name == "split":
        numbers = all(value.kind in (*NUMBERS, "own") for value in by[0].held)
        return Value("tuple", 0, (base,) * len(by[0].held)) if numbers else None
    # One part represents any number of them, because all are alike.
    whole = name == "split" and by and by[0].kind in (*NUMBERS, "own") and base.kind == "tokens"
    return base if whole else None


def _is_of_features(base: Value, dim: Any) -> bool:
    """Whether a dimension is one of the features of each token."""
    first = FEATURES[base.kind]
    count = first + base.trailing
    return isinstance(dim, int) and -count <= dim < count and dim % count >= first


def _over_features(
    base: Value, name: str, values: list[Value], named: dict[str, Value]
) -> Value | None:
    """Return the result of a function over the features of each token, as in a router."""
    at = _OVER_FEATURES[name]
    others = [*values[:at], *values[at + 1 :]]
    others += [value for key, value in named.items() if key != "dim"]
    dim = values[at] if len(values) > at else named.get("dim", constant(-1 if at else None))
    if dim.kind != "constant" or not _is_of_features(base, dim.held):
        return None
    tensors = [value for value in others if value.kind not in (*NUMBERS, "own")]
    if name in ("gather", "scatter", "scatter_", "scatter_add_"):
        places = {(value.kind, value.held) for value in tensors}
        if places != {(base.kind, base.held)}:
            return None
        return tensors[0] if name == "gather" else base
    if tensors:
        return None
    if name == "softmax":
        return base
    if name == "topk":
        return Value("tuple", 0, (base, base))
    keeps = named.get("keepdim", values[1] if len(values) > 1 else constant(False))
    if keeps.kind != "constant":
        return None
    reduced = base if keeps.held else base._replace(trailing=base.trailing - 1)
    return Value("tuple", 0, (reduced, reduced)) if name == "max" else reduced


def _expanded(base: Value, values: list[Value]) -> Value | None:
    """Return the result of ``expand(-1, ...)``, which repeats features, or one head."""
    if base.kind not in FEATURES or len(values) != FEATURES[base.kind] + base.trailing:
        return None
    lead, more = values[: FEATURES[base.kind]], values[FEATURES[base.kind] :]
    if any(value.kind not in (*NUMBERS, "own") for value in more):
        return None
    kept = constant(-1)
    if base.kind == "head" and [lead[0], lead[2]] == [kept, kept]:
        known = lead[1].kind in (*NUMBERS, "own")
        return base._replace(kind="heads") if known else None
    return base if all(value == kept for value in lead) else None


def _swapped(base: Value, dims: list[int]) -> list[int]:
    """Return the order of dimensions after two are exchanged."""
    count = FEATURES.get(base.kind, 0) + base.trailing
    order = list(range(count))
    if len(dims) == 2 and all(-count <= dim < count for dim in dims):
        first, second = dims
        order[first], order[second] = order[second], order[first]
    return order


def transposed(base: Value) -> Value | None:
    """Return the result of ``.mT``."""
    return _permuted(base, _swapped(base, [-1, -2]))


def _permuted(base: Value, order: list[int]) -> Value | None:
    layout = base.kind, base.trailing
    if order == [0, 2, 1, 3]:
        if layout == ("tokens", 2):
            return Value("heads", 1, base.held)
        if layout in (("heads", 1), ("head", 1)):
            return Value("tokens", 2, base.held)
    if order == [0, 3, 2, 1, 4] and layout == ("tokens", 3):
        return Value("parts", 1, base.held)
    if order == [0, 1, 3, 2] and layout == ("heads", 1):
        return Value("keys", 1, base.held)
    lead = FEATURES.get(base.kind, 0)
    among_features = (
        lead and order[:lead] == list(range(lead)) and sorted(order) == list(range(len(order)))
    )
    return base if among_features and len(order) == lead + base.trailing else None
