"""One name for each operation that torch code spells in many ways.

A product is ``torch.matmul(a, b)``, ``a @ b``, ``a.matmul(b)`` or an einsum. :func:`read_call`
reads the calls of functions, as torch's function modes get them; :func:`read_node` reads those in a
graph of Dynamo, where methods are identified by name. Both return the operation, and its arguments
by name.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trifuse.ops.dropout import dropout


class Operation(NamedTuple):
    """One operation, however it is spelled.

    Attributes:
        op: its name below, such as "matmul".
        args: the arguments that were passed, by name.
        in_place: whether it writes its result over the first argument.
    """

    op: str
    args: dict[str, Any]
    in_place: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an argument, or ``default`` if the call leaves it out."""
        return self.args.get(name, default)


# The operation, its parameters, and its spellings: functions, Python's operators, and names of
# methods. An operation occurs once for each order of parameters.
_SPELLINGS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("matmul", "input other", (torch.matmul, operator.matmul, "matmul", "__matmul__")),
    ("matmul", "input mat2", (torch.bmm, "bmm")),
    ("baddbmm", "input batch1 batch2 beta alpha", (torch.baddbmm, "baddbmm")),
    ("add", "input other alpha", (torch.add, operator.add, operator.iadd, "add", "add_")),
    ("add", "other input", ("__radd__",)),
    ("sub", "input other alpha", (torch.sub, operator.sub, operator.isub, "sub", "sub_")),
    ("sub", "input other alpha", (torch.subtract, "subtract", "subtract_")),
    ("mul", "input other", (torch.mul, torch.multiply, operator.mul, operator.imul)),
    ("mul", "input other", ("mul", "mul_", "multiply")),
    ("mul", "other input", ("__rmul__",)),
    ("div", "input other rounding_mode", (torch.div, operator.truediv, operator.itruediv)),
    ("div", "input other rounding_mode", (torch.true_divide, torch.divide)),
    ("div", "input other rounding_mode", ("div", "div_", "true_divide", "divide")),
    ("pow", "input exponent", (torch.pow, operator.pow, operator.ipow, "pow", "pow_")),
    ("square", "input", (torch.square, "square")),
    ("sqrt", "input", (torch.sqrt, "sqrt")),
    ("rsqrt", "input", (torch.rsqrt, "rsqrt")),
    ("tanh", "input", (torch.tanh, "tanh")),
    ("sigmoid", "input", (torch.sigmoid, "sigmoid")),
    ("max", "input other", (torch.max, torch.maximum, "max", "maximum")),
    ("mean", "input dim keepdim dtype", (torch.mean, "mean")),
    ("var", "input dim unbiased keepdim correction", (torch.var, "var")),
    ("softmax", "input dim dtype", (torch.softmax, torch.special.softmax, "softmax")),
    ("softmax", "input dim _stacklevel dtype", (F.softmax,)),
    ("masked_fill", "input mask value", (torch.masked_fill, "masked_fill", "masked_fill_")),
    ("where", "condition input other", (torch.where,)),
    ("where", "input condition other", ("where",)),
    ("dropout", "input p training inplace", (F.dropout,)),
    ("dropout", "input p train", (torch.dropout,)),
    ("dropout", "input p training", (dropout,)),
    ("layer_norm", "input normalized_shape weight bias eps", (F.layer_norm,)),
    ("layer_norm", "input normalized_shape weight bias eps cudnn_enable", (torch.layer_norm,)),
    ("rms_norm", "input normalized_shape weight eps", (F.rms_norm, torch.rms_norm)),
    ("linear", "input weight bias", (F.linear,)),
    ("relu", "input inplace", (F.relu,)),
    ("relu", "input", (torch.relu, "relu", "relu_")),
    ("gelu", "input approximate", (F.gelu,)),
    ("silu", "input inplace", (F.silu,)),
    ("sdpa", "query key value attn_mask dropout_p is_causal scale enable_gqa", (
        F.scaled_dot_product_attention,
    )),
    ("transpose", "input dim0 dim1", (torch.transpose, "transpose", torch.swapaxes, "swapaxes")),
    ("transpose", "input dim0 dim1", (torch.swapdims, "swapdims")),
    ("t", "input", (torch.t, "t")),
    ("expand_as", "input other", ("expand_as",)),
    # These are identified by the tensors that they return; only their first argument is read.
    ("view", "input", ("view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze")),
    ("view", "input", (torch.reshape, torch.flatten, torch.unsqueeze, torch.squeeze)),
    ("cast", "input", ("to", "float", "half", "bfloat16", "double", "type_as", "type")),
    ("cast", "input", ("contiguous", "clone", torch.clone)),
    ("split", "input", ("chunk", "split", "tensor_split")),
    ("split", "input", (torch.chunk, torch.split, torch.tensor_split)),
)  # fmt: skip
_TOLD_BY_RESULT = ("view", "cast", "split")
_AS_IN_NUMPY = {"axis": "dim", "keepdims": "keepdim"}  # torch's functions take both names

_Entry = tuple[str, list[str]]
_OF_NODES: dict[Any, _Entry] = {
    spelling: (op, names.split()) for op, names, spellings in _SPELLINGS for spelling in spellings
}


def _functions(spelling: Any) -> Iterator[Any]:
    """Yields what torch passes to ``__torch_function__`` for a spelling."""
    if isinstance(spelling, str):
        yield getattr(Tensor, spelling)
    elif getattr(spelling, "__module__", None) == "_operator":
        yield getattr(Tensor, f"__{spelling.__name__}__")
    else:
        yield spelling


_OF_FUNCTIONS: dict[Any, _Entry] = {
    function: entry for spelling, entry in _OF_NODES.items() for function in _functions(spelling)
}


def read_node(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Operation | None:
    """Returns the call of a graph's node; None if it isn't one of the operations above.

    Args:
        target: a function, or the name of a method.
        args, kwargs: its arguments.
    """
    return _read(_OF_NODES, target, args, kwargs)


def read_call(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Operation | None:
    """Returns the call of a function, as a function mode gets it; None as in :func:`read_node`."""
    call = _read(_OF_FUNCTIONS, function, args, kwargs)
    if call is None:
        return None
    name = getattr(function, "__name__", "")
    augmented = name.startswith("__i") or is_in_place_name(name)
    return call._replace(in_place=augmented or bool(call.get("inplace")))


def is_in_place_name(name: str) -> bool:
    """Returns whether torch gives such a name, as ``relu_``, to what changes its first argument."""
    return name.endswith("_") and not name.endswith("__")


def _read(
    spellings: dict[Any, _Entry], target: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Operation | None:
    if target is torch.functional.einsum:
        if not args or kwargs:
            return None
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = list(operands[0])
        return Operation("einsum", {"equation": equation, "operands": operands})
    found = spellings.get(target)
    if found is None:
        return None
    op, names = found
    if op in _TOLD_BY_RESULT:
        return Operation(op, {"input": args[0]}) if args else None
    kwargs = {_AS_IN_NUMPY.get(name, name): each for name, each in kwargs.items()}
    if len(args) > len(names) or not set(kwargs) <= set(names):
        return None  # such as Tensor.softmax with names of dimensions, or out=
    given = dict(zip(names, args, strict=False)) | kwargs
    if "mat2" in given:
        given["other"] = given.pop("mat2")
    return Operation(op, given)


# Scores that are left out -------------------------------------------------------------------------

LOW = -1e30  # so low that adding a score of any size does not change it


def is_low(fill: float, dtype: torch.dtype) -> bool:
    """Returns whether filling scores of a dtype with a finite number leaves them out.

    It does, except in rows of nothing else. A fill in float16 isn't low enough.
    """
    return fill <= LOW and dtype != torch.float16


# Products written as an einsum --------------------------------------------------------------------

Order = tuple[int, ...]  # of a tensor's dimensions


class Inner(NamedTuple):
    """Q Kᵀ: the factors, and the orders in which their dimensions are (..., L, E)."""

    query: Any
    key: Any
    orders: tuple[Order | None, Order | None]  # None: unchanged


class Outer(NamedTuple):
    """The product of weights and V, and the orders of the dimensions of V and of the result."""

    weights: Any
    value: Any
    order: Order | None  # the order in which V is (..., Lk, Ev)
    result: Order | None  # the order that turns (..., Lq, Ev) into the einsum's result


def inner(einsum: Operation) -> Inner | None:
    """Returns an einsum read as Q Kᵀ, with the scores (..., Lq, Lk), or None."""
    for (a, query), (b, key), out in _pairs(einsum):
        parts = _parts(a, b, out)
        if parts is not None and [*out] == [*parts[0], *parts[1:3]]:
            batch, q, k, e = parts
            return Inner(query, key, (_order(a, [*batch, q, e]), _order(b, [*batch, k, e])))
    return None


def outer(einsum: Operation) -> Iterator[Outer]:
    """Yields the ways to read an einsum as the product of weights (..., Lq, Lk) and V."""
    for (w, weights), (v, value), out in _pairs(einsum):
        parts = _parts(w, v, out)
        if parts is not None:
            batch, q, d, k = parts
            batch = [letter for letter in w if letter in batch]  # the scores have this order too
            if [*w] == [*batch, q, k]:
                yield Outer(weights, value, _order(v, [*batch, k, d]), _order([*batch, q, d], out))


def _pairs(einsum: Operation) -> Iterator[tuple[Any, Any, str]]:
    """Yields the two operands of an einsum in either order, each with its letters, and the letters
    of the result."""
    equation, operands = einsum.get("equation"), einsum.get("operands")
    if not isinstance(equation, str):
        return
    left, _, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    plain = all(term.isalpha() and len(set(term)) == len(term) for term in (*terms, out))
    if not (plain and len(terms) == len(operands) == 2):
        return
    for first, second in itertools.permutations(zip(terms, operands, strict=True)):
        yield first, second, out


def _parts(first: str, second: str, out: str) -> tuple[list[str], str, str, str] | None:
    """Returns the letters of a product of matrices: those of the batch in the order of ``out``,
    that of the rows of ``first``, that of the columns of ``second``, and the one summed over."""
    batch = [letter for letter in out if letter in first and letter in second]
    rows = [letter for letter in out if letter not in second]
    columns = [letter for letter in out if letter not in first]
    summed = [letter for letter in first if letter not in out]
    whole = {*first} == {*batch, *rows, *summed} and {*second} == {*batch, *columns, *summed}
    if not (whole and len(rows) == len(columns) == len(summed) == 1):
        return None
    return batch, rows[0], columns[0], summed[0]


def _order(letters: Sequence[str], wanted: Sequence[str]) -> Order | None:
    order = tuple(letters.index(letter) for letter in wanted)
    return None if order == tuple(range(len(order))) else order
