"""Reads attention that is written out, softmax(scale · Q Kᵀ + mask) V, in many spellings.

The walk begins at the product with V and goes back to the product Q Kᵀ. Each step must be one that
the operator supports. Anything else ends the walk with a reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from trifuse import spellings
from trifuse.compiler.calls import (
    Refused,
    as_held,
    is_last,
    number,
    plain,
    read,
    require,
    same,
    same_shape,
    tensor,
)
from trifuse.compiler.rewriter import Rewriter
from trifuse.spellings import Operation


class Operand(NamedTuple):
    """A tensor of a graph, and the order in which the operator takes its dimensions."""

    node: Node
    order: tuple[int, ...] | None = None  # None: as they are
    skipped: Node | None = None  # the view of it that the graph uses

    @property
    def shape(self) -> tuple[Any, ...]:
        sizes = tuple(plain(self.node).shape)
        return sizes if self.order is None else tuple(sizes[i] for i in self.order)

    def insert(self, rewriter: Rewriter) -> Node:
        """Inserts the permutation, if there is one."""
        if self.order is None:
            return self.node
        return rewriter.call("permute", self.node, *self.order)


class Mask(NamedTuple):
    """A step that leaves out pairs of queries and keys, or adds to their scores."""

    kind: str  # "added", "kept" (boolean; True takes part) or "dropped" (the opposite)
    node: Node
    leading: tuple[Any, ...]  # the dimensions of the scores there, without the last two
    fill: float = -math.inf  # the score of a pair that is left out
    factor: float = 1.0  # of what is added: -1 where it is subtracted


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention that was read from a graph, as far as the walk has come."""

    query: Operand
    key: Operand
    leading: tuple[Any, ...]  # the dimensions of Q Kᵀ without the last two
    nodes: tuple[Node, ...]  # from the first product to the weights
    scale: float = 1.0
    factors: tuple[tuple[str, Node], ...] = ()  # "mul" or "div", and a tensor for rows of scores
    softcap: float | None = None
    masks: tuple[Mask, ...] = ()
    dropout_p: float = 0.0
    value: Operand | None = None
    order: tuple[int, ...] | None = None  # of the result's dimensions

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Q, K and V."""
        assert self.value is not None
        return self.query, self.key, self.value


def is_candidate(call: Operation) -> bool:
    """Returns whether one factor of a product comes from a softmax over the last dimension."""
    return any(
        _has_softmax(each.weights) or _has_changed_softmax(each.weights)
        for each in _outer_products(call)
    )


def find(call: Operation) -> Attention:
    """Reads the attention whose last product is ``call``, a candidate.

    Raises:
        Refused: it has something that the operator does not compute.
    """
    for weights, value, order, between in _outer_products(call):
        if _has_softmax(weights):
            found = _Walk()(weights, after_softmax=True)
            found = dataclasses.replace(found, nodes=(*found.nodes, *between))
            dtype = plain(value.node).dtype
            for node in found.nodes:
                require(_holds(plain(node).dtype, dtype), f"{node.name} is less precise")
            shared = found.dropout_p and _widens(value.shape[:-2], plain(weights).shape[:-2])
            require(not shared, "several values share dropped weights")
            return dataclasses.replace(found, value=value, order=order)
    raise Refused("its weights are changed after the softmax")


def _holds(dtype: torch.dtype, operands: torch.dtype) -> bool:
    """Returns whether an intermediate result is at least as precise as the operands."""
    return dtype == operands or torch.promote_types(dtype, operands) == dtype


def _widens(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns whether broadcasting to ``shape`` may widen ``other``."""
    pairs = itertools.zip_longest(reversed(shape), reversed(other), fillvalue=1)
    return not all(same(x, 1) or same(x, y) for x, y in pairs)


# The product with V -----------------------------------------------------------------------------


class _Product(NamedTuple):
    """A way to read a product as that of weights and values."""

    weights: Any
    value: Operand
    order: tuple[int, ...] | None = None  # of the result's dimensions
    between: tuple[Node, ...] = ()  # views of the weights


def _outer_products(call: Operation) -> Iterator[_Product]:
    if call.op == "matmul":
        first, second = call.get("input"), call.get("other")
        if not _is_tensor(second):
            return
        yield _Product(first, Operand(second))
        turned = read(second)
        rank = plain(second).dim()
        alike = _is_tensor(first) and plain(first).dim() == rank
        if alike and turned is not None and _swaps_last(turned, rank):
            # Vᵀ Pᵀ, as where the values of a convolution are (batch, channels, pixels)
            yield _Product(turned.get("input"), _transposed(first), _swapped(rank), (second,))
    elif call.op == "einsum":
        for product in spellings.outer(call):
            if tensor(product.weights) is not None and tensor(product.value) is not None:
                value = Operand(product.value, product.order)
                yield _Product(product.weights, value, product.result)


# From the weights to the scores -----------------------------------------------------------------


def _has_softmax(node: Any) -> bool:
    while (call := read(node)) is not None:
        if call.op == "softmax":
            fake = tensor(node)
            return fake is not None and is_last(call.get("dim"), fake.dim())
        if call.op not in ("dropout", "cast", "view"):
            return False
        node = call.get("input")
    return False


def _has_changed_softmax(node: Any) -> bool:
    """Returns whether weights are a function of a softmax of their shape, such as a mixture of
    heads. No kernel computes it; the report says so."""
    if (wanted := tensor(node)) is None or wanted.dim() < 3:
        return False
    waiting: list[Any] = [node]
    seen: set[Node] = set()
    while waiting and len(seen) < _CHANGES_AT_MOST:
        each = waiting.pop()
        if each in seen or not isinstance(each, Node):
            continue
        seen.add(each)
        call = read(each)
        if call is not None and call.op in _PRODUCTS:
            continue
        if call is not None and call.op == "softmax":
            fake = tensor(each)
            alike = fake is not None and same_shape(fake.shape, wanted.shape)
            if alike and is_last(call.get("dim"), wanted.dim()):
                return True
        waiting += each.all_input_nodes
    return False


_CHANGES_AT_MOST = 16
_PRODUCTS = ("matmul", "baddbmm", "einsum", "sdpa")


class _Walk:
    """Reads the scores that end at a node, or the weights if ``after_softmax``.

    Each node is read once: a graph may lead back to a node in very many ways.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, bool], Attention | Refused] = {}
        self._depth = 0

    def __call__(self, node: Any, after_softmax: bool = False) -> Attention:
        require(isinstance(node, Node), f"{node} is no step of attention")
        key = node, after_softmax
        if key not in self._found:
            require(self._depth < _STEPS_AT_MOST, "the scores pass too many steps")
            self._depth += 1
            try:
                self._found[key] = _read_step(self, node, after_softmax)
            except Refused as reason:
                self._found[key] = reason
            self._depth -= 1
        found = self._found[key]
        if isinstance(found, Refused):
            raise found
        return found


_STEPS_AT_MOST = 50  # Python limits the depth of calls


def _read_step(walk: _Walk, node: Node, after_softmax: bool) -> Attention:
    call, fake = read(node), tensor(node)
    if call is None or fake is None:
        raise Refused(f"{node.name} is no step of attention")
    if not after_softmax and (product := _inner_product(node, call)) is not None:
        return product
    step = _STEPS.get(call.op)
    if after_softmax and call.op == "softmax":
        found = walk(call.get("input"))
    elif step is not None and (not after_softmax or call.op in ("dropout", "cast", "view")):
        found = step(walk, node, call, after_softmax)
    else:
        raise Refused(f"{node.name} is no step of attention")
    return dataclasses.replace(found, nodes=(*found.nodes, node))


def _inner_product(node: Node, call: Operation) -> Attention | None:
    """Reads Q Kᵀ."""
    if call.op == "matmul":
        query, transposed = call.get("input"), call.get("other")
    elif call.op == "baddbmm":
        query, transposed = call.get("batch1"), call.get("batch2")
    else:
        product = spellings.inner(call) if call.op == "einsum" else None
        if product is None or tensor(product.query) is None or tensor(product.key) is None:
            return None
        rows, columns = product.orders
        return _plain_scores(Operand(product.query, rows), Operand(product.key, columns), node)
    ranks = plain(query).dim(), plain(transposed).dim()
    require(ranks[0] == ranks[1] >= 2, f"{node.name} is no product of queries and keys")
    found = _plain_scores(Operand(query), _transposed(transposed), node)
    if call.op == "baddbmm":
        found = dataclasses.replace(found, scale=_constant(call.get("alpha", 1), "alpha"))
        beta = _constant(call.get("beta", 1), "beta")
        if beta != 0:  # torch doesn't read the input then
            mask = Mask("added", call.get("input"), found.leading, factor=beta)
            return dataclasses.replace(found, masks=(mask,))
    return found


def _plain_scores(query: Operand, key: Operand, node: Node) -> Attention:
    int(query.shape[-1])  # head_dim is the same in all calls, as the kernels and the scale have it
    return Attention(query, key, tuple(plain(node).shape[:-2]), (node,))


def _transposed(node: Node) -> Operand:
    """Returns K, given Kᵀ: the tensor before a transpose that the graph shows, or a new one."""
    call, rank = read(node), plain(node).dim()
    if call is not None and _swaps_last(call, rank):
        return Operand(call.get("input"), skipped=node)
    return Operand(node, _swapped(rank))


def _swaps_last(call: Operation, rank: int) -> bool:
    """Returns whether a call exchanges the last two of ``rank`` dimensions."""
    if call.op != "transpose":
        return False
    dims = {call.get("dim0"), call.get("dim1")}
    return dims <= {-1, -2, rank - 1, rank - 2} and len({dim % rank for dim in dims}) == 2


def _swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


# Steps: each reads what precedes a call, and adds what the call does ------------------------------


def _constant(argument: Any, name: str) -> float:
    found = number(argument)
    if found is None or not math.isfinite(found):
        raise Refused(f"{name} is no constant")
    return found


def _scaled(walk: _Walk, node: Node, call: Operation, after_softmax: bool) -> Attention:
    scores, factor = call.get("input"), call.get("other")
    require(call.get("rounding_mode") is None, f"{node.name} rounds scores")
    swaps = call.op == "mul" and _is_tensor(factor)
    if swaps and not (_is_tensor(scores) and _leads_to_product(walk, scores)):
        scores, factor = factor, scores
    found = walk(scores)  # first: it fixes head_dim, of which the factor is a function
    if _is_tensor(factor) and number(factor) is None:
        return _with_factor(found, node, call.op, scores, factor)
    by = _constant(factor, f"a factor of {node.name}")
    if call.op == "div":
        require(by != 0, f"{node.name} divides by 0")
        by = 1 / by
    added = all(mask.kind == "added" for mask in found.masks)
    filled = any(mask.fill != -math.inf for mask in found.masks)
    require(by == 1 or added or (by > 0 and not filled), "a mask is scaled")
    require(by > 0 or found.softcap is None, "capped scores change their sign")
    softcap = None if found.softcap is None else found.softcap * by
    masks = tuple(mask._replace(factor=mask.factor * by) for mask in found.masks)
    return dataclasses.replace(found, scale=found.scale * by, softcap=softcap, masks=masks)


def _is_tensor(node: Any) -> bool:
    return tensor(node) is not None


def _leads_to_product(walk: _Walk, node: Any) -> bool:
    try:
        walk(node)
    except Refused:
        return False
    return True


def _with_factor(found: Attention, node: Node, op: str, scores: Node, factor: Node) -> Attention:
    """Reads a factor for each head or query. The queries can be multiplied by it instead."""
    fake, before, after = plain(factor), plain(scores), plain(node)
    first = not (found.masks or found.softcap) and same_shape(after.shape[:-2], found.leading)
    column = fake.dim() == 0 or same(fake.shape[-1], 1)
    alike = fake.dtype == after.dtype and same_shape(before.shape, after.shape)
    require(first and column and alike, f"a factor of {node.name} is a matrix")
    return dataclasses.replace(found, factors=(*found.factors, (op, factor)))


def _capped(walk: _Walk, node: Node, call: Operation, after_softmax: bool) -> Attention:
    found = walk(call.get("input"))
    require(not (found.softcap or found.masks), f"{node.name} is no plain softcap")
    return dataclasses.replace(found, softcap=1.0)


def _added(walk: _Walk, node: Node, call: Operation, after_softmax: bool) -> Attention:
    first, second = call.get("input"), call.get("other")
    factor = _constant(call.get("alpha", 1), "alpha")
    if call.op == "sub":
        factor = -factor
    try:
        return _masked(walk(first), node, first, "added", second, factor=factor)
    except Refused as reason:
        if call.in_place or factor != 1:
            raise
        try:
            return _masked(walk(second), node, second, "added", first)
        except Refused:
            raise reason from None


def _filled(walk: _Walk, node: Node, call: Operation, after_softmax: bool) -> Attention:
    scores, kind = call.get("input"), "dropped"
    if call.op == "masked_fill":
        mask, fill = call.get("mask"), call.get("value")
    else:
        mask, fill, kind = call.get("condition"), call.get("other"), "kept"
        if number(fill) is None:  # torch.where(mask, -inf, scores)
            scores, fill, kind = fill, scores, "dropped"
    low, filled = number(fill), plain(node)
    if low is not None:
        low = as_held(low, filled.dtype)  # -inf in few bits
    if low != -math.inf:
        # A row whose scores are all filled has weights, and their gradient must not reach the
        # scores.
        fits = low is not None and low >= _LEAST and spellings.is_low(low, filled.dtype)
        require(fits, "scores are filled with a number other than -inf")
        require(not filled.requires_grad, "scores of a number other than -inf need a gradient")
    found = _masked(walk(scores), node, scores, kind, mask, low)
    before = found.masks[:-1]
    exact = low == -math.inf or all(m.kind == "added" or m.fill != -math.inf for m in before)
    require(exact, "scores are filled with -inf and then with another number")
    return found


_LEAST = torch.finfo(torch.float32).min


def _masked(
    found: Attention,
    node: Node,
    scores: Any,
    kind: str,
    mask: Any,
    fill: float | None = -math.inf,
    factor: float = 1.0,
) -> Attention:
    whole, fake = plain(scores), plain(mask)
    require(same_shape(plain(node).shape, whole.shape), f"a mask of {node.name} widens the scores")
    fits = fake.is_floating_point() if kind == "added" else fake.dtype == torch.bool
    require(fits, f"a mask of {node.name} has dtype {fake.dtype}")
    assert fill is not None
    step = Mask(kind, mask, tuple(whole.shape[:-2]), fill, factor)
    return dataclasses.replace(found, masks=(*found.masks, step))


def _dropped(walk: _Walk, node: Node, call: Operation, after_softmax: bool) -> Attention:
    p, training = call.get("p", 0.5), call.get("training", call.get("train", True))
    found = walk(call.get("input"), after_softmax)
    if training is False or number(p) == 0:
        return found
    require(after_softmax, "scores are dropped before the softmax")
    require(training is True and found.dropout_p == 0, f"{node.name} is no plain dropout")
    return dataclasses.replace(found, dropout_p=_constant(p, "dropout's p"))


def _viewed(walk: _Walk, node: Node, call: Operation, after_softmax: bool) -> Attention:
    """Reads a view, a copy or a cast, as long as it keeps each row of scores a row."""
    fake, before = plain(node), plain(call.get("input"))
    rows = fake.dim() >= 2 <= before.dim() and same_shape(fake.shape[-2:], before.shape[-2:])
    require(rows, f"{node.name} cuts rows of scores")
    require(fake.device == before.device, f"{node.name} moves scores")
    return walk(call.get("input"), after_softmax)


_STEPS: dict[str, Callable[[_Walk, Node, Operation, bool], Attention]] = {
    "mul": _scaled,
    "div": _scaled,
    "tanh": _capped,
    "add": _added,
    "sub": _added,
    "masked_fill": _filled,
    "where": _filled,
    "dropout": _dropped,
    "view": _viewed,
    "cast": _viewed,
}


# The operator's arguments -----------------------------------------------------------------------


def arguments(rewriter: Rewriter, found: Attention) -> dict[str, Any]:
    """Inserts the nodes that prepare the operator's arguments, and returns the arguments.

    Raises:
        Refused: the masks can't be brought to one shape.
    """
    leading = _common(found)
    given: dict[str, Any] = {}
    for name, operand in zip(("query", "key", "value"), found.operands, strict=True):
        given[name] = operand.insert(rewriter)
        if name == "query":
            for op, factor in found.factors:
                given[name] = rewriter.call(getattr(torch, op), given[name], factor)
        shape = operand.shape
        if not same_shape(shape[:-2], leading) and _reshapes(found):
            sizes = [rewriter.size(size) for size in (*leading, *shape[-2:])]
            given[name] = rewriter.call("reshape", given[name], *sizes)
    mask = _joined(rewriter, found, leading)
    if mask is not None:
        given["attn_mask"] = mask
    if found.dropout_p:
        given["dropout_p"] = found.dropout_p
    if found.softcap is not None:
        given["softcap"] = found.softcap
    return {**given, "scale": found.scale}


def result(rewriter: Rewriter, found: Attention, out: Node) -> Node:
    """Inserts the nodes that give the operator's result the shape of the product with V."""
    fake, leading = plain(out), tuple(plain(found.nodes[-1]).shape[:-2])
    if _reshapes(found) and not same_shape(fake.shape[:-2], leading):
        sizes = [rewriter.size(size) for size in (*leading, *fake.shape[-2:])]
        out = rewriter.call("reshape", out, *sizes)
    return out if found.order is None else rewriter.call("permute", out, *found.order)


def _reshapes(found: Attention) -> bool:
    """Returns whether the scores are viewed with other leading dimensions along the way."""
    return not all(same_shape(plain(node).shape[:-2], found.leading) for node in found.nodes)


def _common(found: Attention) -> tuple[Any, ...]:
    """Returns the leading dimensions in which all masks are combined.

    Where the scores are (batch · heads, Lq, Lk) and a mask is (batch, 1, Lq, Lk), these are batch
    and heads: the mask needs no copy for each head.
    """
    if len(found.leading) < 2:
        for mask in found.masks:
            if len(mask.leading) == 2:
                return mask.leading
    return found.leading


def _joined(rewriter: Rewriter, found: Attention, leading: tuple[Any, ...]) -> Node | None:
    """Inserts the combination of all masks: boolean, or float with -inf for pairs left out."""
    added = kept = None
    for kind, node, here, fill, factor in found.masks:
        if factor != 1 and kind == "added":
            node = rewriter.call(torch.mul, node, factor)
        mask = _brought(rewriter, node, here, leading)
        if kind == "added":
            added = mask if added is None else rewriter.call(torch.add, added, mask)
            continue
        if kind == "dropped":
            mask = rewriter.call(torch.logical_not, mask)
        if fill != -math.inf:
            if added is None:
                added = rewriter.call("new_zeros", mask, (), dtype=torch.float32)
            elif fill < torch.finfo(plain(added).dtype).min:
                added = rewriter.call("float", added)  # it would hold -inf instead
            added = rewriter.call(torch.where, mask, added, fill)
            continue
        kept = mask if kept is None else rewriter.call(torch.logical_and, kept, mask)
    if added is None or kept is None:
        return kept if added is None else added
    return rewriter.call(torch.where, kept, added, -math.inf)


def _brought(
    rewriter: Rewriter, mask: Node, here: tuple[Any, ...], leading: tuple[Any, ...]
) -> Node:
    """Inserts the nodes that bring a mask from the dimensions of its use to the common ones.

    The last of the leading dimensions may be the same in both, such as the heads; a mask that is
    broadcast in them stays so.
    """
    if same_shape(here, leading):
        return mask
    shared = 0
    while shared < min(len(here), len(leading)) and same(here[-1 - shared], leading[-1 - shared]):
        shared += 1
    fake, rest = plain(mask), shared + 2
    kept = tuple(fake.shape[max(0, fake.dim() - rest) :])
    if all(same(size, 1) for size in fake.shape[: max(0, fake.dim() - rest)]):
        if fake.dim() <= rest:
            return mask
        return rewriter.call("reshape", mask, *map(rewriter.size, kept))
    before = [rewriter.size(size) for size in here[: len(here) - shared]]
    after = [rewriter.size(size) for size in leading[: len(leading) - shared]]
    whole = rewriter.call("expand", mask, *before, *(-1,) * rest)
    return rewriter.call("reshape", whole, *after, *map(rewriter.size, kept))
