"""Finds norms over the last dimension, with the sum before them and the dropout before that."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from trifuse import backends
from trifuse.compiler.calls import (
    Refused,
    is_last,
    number,
    plain,
    read,
    require,
    same,
    same_shape,
    tensor,
    value,
)
from trifuse.compiler.rewriter import Rewriter
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm
from trifuse.spellings import Operation


class Norm(NamedTuple):
    """A norm that was read from a graph."""

    result: Node
    nodes: tuple[Node, ...]  # the nodes between x and the result
    x: Any
    weight: Any
    bias: Any
    eps: float
    rms: bool
    skipped: tuple[Node, ...] = ()  # casts of x that the rest of the graph uses


def is_candidate(node: Node) -> bool:
    """Returns whether a node may compute a norm over the last dimension."""
    call = read(node)
    return call is not None and (
        call.op in ("layer_norm", "rms_norm") or next(_quotients(node), None) is not None
    )


def replace(rewriter: Rewriter, node: Node) -> None:
    """Replaces the norm at ``node``, a candidate, with the sum and the dropout that belong to it.

    Raises:
        Refused: it has something that the operator does not compute.
    """
    reason = Refused("it is no norm over the last dimension")
    for norm in _norms(node):
        try:
            _require_served(norm)
        except Refused as refused:
            reason = refused
            continue
        for insert in (_with_sum, _alone):
            try:
                insert(rewriter, norm)
                return
            except Refused as refused:
                reason = refused
    raise reason


def _require_served(norm: Norm) -> None:
    x = plain(norm.x)
    for vector in (norm.weight, norm.bias):
        require(vector is None or plain(vector) is not None, "a parameter is no tensor")
    call = backends.Call("dropout_add_layer_norm", x.device.type, x.dtype)
    require(backends.has_kernel(call), f"no kernel for {x.dtype} on {x.device.type}")


# Norms ------------------------------------------------------------------------------------------


def _norms(node: Node) -> Iterator[Norm]:
    """Yields the ways to read a node as a norm, the largest part of the graph first."""
    call = read(node)
    assert call is not None
    if call.op not in ("layer_norm", "rms_norm"):
        for norm in _quotients(node):
            yield from _with_parameters(norm)
        return
    x, shape, eps = call.get("input"), call.get("normalized_shape"), call.get("eps")
    fake, rms = tensor(x), call.op == "rms_norm"
    if fake is None:
        return
    (last, *others) = shape if isinstance(shape, (tuple, list)) else (shape,)
    if others or not same(value(last), fake.shape[-1]):
        return
    if eps is None and rms and fake.dtype in (torch.float32, torch.float64):
        eps = torch.finfo(fake.dtype).eps
    eps = number(1e-5 if eps is None and not rms else eps)
    if eps is not None:
        norm = Norm(node, (), x, call.get("weight"), call.get("bias"), eps, rms)
        below, casts = _without_casts(x)
        if casts:
            inner, skipped = _inner(node, (), casts)
            yield from _with_parameters(norm._replace(nodes=inner, x=below, skipped=skipped))
        yield from (each for each in _with_parameters(norm) if each.result is not node)
        yield norm


def _with_parameters(norm: Norm) -> Iterator[Norm]:
    """Yields a norm with the casts, the weight and the bias after it, then with fewer of them."""
    x, result, nodes = value(norm.x), norm.result, norm.nodes
    weight, bias = norm.weight, norm.bias
    found = []
    while True:
        if value(result).dtype == x.dtype:
            found.append(norm._replace(result=result, nodes=nodes, weight=weight, bias=bias))
        if len(result.users) != 1:
            break
        (user,) = result.users
        call = read(user)
        if call is None or call.in_place or not _keeps(user, x):
            break
        if call.op != "cast":
            first, second = call.get("input"), call.get("other")
            vector = second if first is result else first
            fake = tensor(vector)
            if fake is None or not same_shape(fake.shape, x.shape[-1:]):
                break
            if call.op == "mul" and weight is None and bias is None:
                weight = vector
            elif call.op == "add" and bias is None and number(call.get("alpha", 1)) == 1:
                bias = vector
            else:
                break
        nodes, result = (*nodes, result), user
    yield from reversed(found)


def _keeps(node: Node, x: Tensor) -> bool:
    """Returns whether a node has the shape and the device of x, and at least its precision."""
    fake = tensor(node)
    return (
        fake is not None
        and same_shape(fake.shape, x.shape)
        and fake.device == x.device
        and torch.promote_types(fake.dtype, x.dtype) == fake.dtype
    )


def _quotients(node: Node) -> Iterator[Norm]:
    """Reads (x - μ) / √(mean((x - μ)²) + eps): yields LayerNorm, then RMSNorm of x - μ."""
    call = read(node)
    if call is None or call.op not in ("mul", "div") or call.in_place or call.get("rounding_mode"):
        return
    first, second = call.get("input"), call.get("other")
    pairs = [(first, second)] if call.op == "div" else [(first, second), (second, first)]
    for numerator, root in pairs:
        found = _mean_square(root, 0.5 if call.op == "div" else -0.5)
        if found is None or not isinstance(numerator, Node):
            continue
        squared, eps, nodes, is_variance = found
        centred = _Steps(squared, ()) if is_variance else _centred(squared)
        above = _centred(numerator)
        if centred is not None and above is not None:
            yield from _quotient(node, (above, centred), eps, nodes, rms=False)
        if not is_variance:
            both = _Steps(numerator, ()), _Steps(squared, ())
            yield from _quotient(node, both, eps, nodes, rms=True)


class _Steps(NamedTuple):
    """A tensor, and the nodes that were read after it."""

    x: Node
    nodes: tuple[Node, ...]


def _quotient(
    node: Node, both: tuple[_Steps, _Steps], eps: float, nodes: Collection[Node], *, rms: bool
) -> Iterator[Norm]:
    """Yields the norm whose quotient is ``node``, if numerator and root are made of one tensor."""
    (x, above), (other, aside) = (_without_casts(each.x) for each in both)
    if x is not other or tensor(x) is None or not _keeps(node, value(x)):
        return
    nodes = (*nodes, *both[0].nodes, *both[1].nodes)
    inner, skipped = _inner(node, nodes, [*above, *aside])
    yield Norm(node, inner, x, None, None, eps, rms, skipped)


def _inner(
    result: Node, nodes: Collection[Node], casts: Collection[Node]
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Returns nodes and casts that only ``result`` uses, and casts that have other users too."""
    inner = {result, *nodes}
    for cast in casts:
        if inner.issuperset(cast.users):
            inner.add(cast)
    return tuple(inner - {result}), tuple({*casts} - inner)


def _centred(node: Any) -> _Steps | None:
    """Reads x - mean(x): returns x and the nodes after it."""
    call = read(node)
    if call is None or call.op != "sub" or call.in_place or number(call.get("alpha", 1)) != 1:
        return None
    x, mean = call.get("input"), call.get("other")
    return _Steps(x, (node, mean)) if isinstance(x, Node) and _averaged(mean) is x else None


def _averaged(mean: Any) -> Node | None:
    """Reads the mean over the last dimension, which is kept: returns the tensor it averages."""
    call = _over_last_dimension("mean", mean)
    if call is None:
        return None
    x: Node = call.get("input")
    return x if value(mean).dtype == value(x).dtype else None


def _variance(node: Any) -> Node | None:
    """Reads the variance over the last dimension, which is kept: returns the tensor."""
    call = _over_last_dimension("var", node)
    if call is None:
        return None
    by_count = call.get("unbiased") is False or call.get("correction") == 0
    return call.get("input") if by_count else None


def _over_last_dimension(op: str, node: Any) -> Operation | None:
    """Reads a reduction of a tensor over its last dimension, which is kept."""
    call = read(node)
    if call is None or call.op != op or call.get("keepdim") is not True:
        return None
    fake = tensor(call.get("input"))
    return call if fake is not None and is_last(call.get("dim"), fake.dim()) else None


def _mean_square(root: Any, exponent: float) -> tuple[Node, float, list[Node], bool] | None:
    """Reads (m + eps) to the power of ±½, where m is mean(x²) or the variance of x: returns x, eps,
    the nodes after x, and whether m is the variance."""
    if not isinstance(root, Node):
        return None
    root, casts = _without_casts(root)
    call = read(root)
    if call is None or _power(call, {"sqrt": 0.5, "rsqrt": -0.5}) != exponent:
        return None
    total = read(call.get("input"))
    if total is None or total.op != "add" or total.in_place or number(total.get("alpha", 1)) != 1:
        return None
    mean, eps = total.get("input"), number(total.get("other"))
    if eps is None:
        mean, eps = total.get("other"), number(total.get("input"))
    if eps is None:
        return None
    nodes = [*casts, root, call.get("input"), mean]
    if (x := _variance(mean)) is not None:
        return x, eps, nodes, True
    square = _averaged(mean)
    squared = read(square)
    if square is None or squared is None:
        return None
    x = squared.get("input")
    product = squared.op == "mul" and squared.get("other") is x
    if isinstance(x, Node) and (product or _power(squared, {"square": 2.0}) == 2):
        return x, eps, [*nodes, square], False
    return None


def _power(call: Any, names: dict[str, float]) -> float | None:
    """Returns the exponent of a power of a tensor by a number."""
    return number(call.get("exponent")) if call.op == "pow" else names.get(call.op)


def _without_casts(node: Node) -> tuple[Node, list[Node]]:
    """Returns a tensor before the casts that kept its precision, and these casts, last first."""
    casts: list[Node] = []
    while (call := read(node)) is not None and call.op == "cast":
        before = call.get("input")
        fake = tensor(before)
        if fake is None or not _keeps(node, fake):
            break
        casts.append(node)
        node = before
    return node, casts


# Sum and dropout --------------------------------------------------------------------------------


def _with_sum(rewriter: Rewriter, norm: Norm) -> None:
    """Replaces a norm and the sum that it normalises."""
    call, total = read(norm.x), plain(norm.x)
    if call is None or call.op != "add" or number(call.get("alpha", 1)) != 1:
        raise Refused("it is no norm of a sum")
    operands = [call.get("input"), call.get("other")]
    for operand in operands:
        require(plain(operand).dtype == total.dtype, "its sum has several dtypes")
    # The operator applies dropout to x. So x must be the dropped operand, if either is.
    operands.sort(key=lambda operand: _dropped(operand, norm.x) is None)
    x, residual = operands
    if not same_shape(value(x).shape, total.shape):
        x, residual = residual, x
    dropped = _dropped(x, norm.x)
    inner = {*norm.nodes}
    given: dict[str, Any] = {}
    if dropped is not None:
        inner.add(x)
        x, given = dropped
    kept = not {norm.result, *norm.nodes}.issuperset(norm.x.users)
    at = _place(norm) if kept else norm.result
    if kept:
        given["prenorm"] = True
    else:
        inner.add(norm.x)
    with rewriter.inserting(at):
        out = _call(rewriter, norm, x, residual, given)
        if kept:
            results = [rewriter.call(operator.getitem, out, i) for i in range(2)]
            rewriter.replace([norm.result, norm.x], results, inner, norm.skipped)
        else:
            rewriter.replace([norm.result], [out], inner, norm.skipped)


def _place(norm: Norm) -> Node:
    """Returns the node before which the sum and the norm can both be computed."""
    if all(node is None or node < norm.x for node in (norm.weight, norm.bias)):
        return norm.x
    inner = {norm.result, *norm.nodes}
    later = all(user > norm.result for user in norm.x.users if user not in inner)
    require(later, "the sum is used before the norm's parameters are computed")
    return norm.result


def _alone(rewriter: Rewriter, norm: Norm) -> None:
    """Replaces a norm, and the dropout of its input if there is one."""
    dropped, only = _dropped(norm.x, norm.result), {norm.result, *norm.nodes}
    x, inner = norm.x, {*norm.nodes}
    given: dict[str, Any] = {}
    if dropped is not None and only.issuperset(norm.x.users):
        inner.add(norm.x)
        x, given = dropped
    with rewriter.inserting(norm.result):
        out = _call(rewriter, norm, x, None, given)
        rewriter.replace([norm.result], [out], inner, norm.skipped)


def _dropped(node: Any, user: Node) -> tuple[Node, dict[str, Any]] | None:
    """Reads dropout: returns its input, and the operator's arguments for it."""
    call = read(node)
    if call is None or call.op != "dropout" or call.get("inplace") or tensor(node) is None:
        return None
    p = number(call.get("p", 0.5))
    training = call.get("training", call.get("train", True))
    if p is None or not isinstance(training, bool) or len(node.users) != 1:
        return None
    return call.get("input"), {"dropout_p": p, "training": True} if training and p else {}


def _call(rewriter: Rewriter, norm: Norm, x: Node, residual: Any, given: dict[str, Any]) -> Node:
    if norm.rms:
        given["rms_norm"] = True
    return rewriter.call(
        dropout_add_layer_norm, x, residual, norm.weight, norm.bias, eps=norm.eps, **given
    )
