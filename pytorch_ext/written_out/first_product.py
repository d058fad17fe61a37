"""An attention begins with the product of queries and keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trifuse import spellings
from trifuse.deferred import is_computing
from trifuse.spellings import Operation
from trifuse.written_out.parts import Form, Scores, as_number, autocast_dtype, is_plain


def begin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """Defer the product of queries and keys; return None for any other call."""
    if is_computing() or (call := spellings.read_call(func, args, kwargs)) is None:
        return None
    if (factors := _factors(call)) is None:
        return None
    query, transposed, scale, bias = factors
    if not (is_plain(query) and is_plain(transposed) and _fit(query, transposed)):
        return None
    key = transposed.mT
    if key.shape[:-2] != query.shape[:-2]:
        key = key.expand(*query.shape[:-2], -1, -1)
    form = Form(query, key, scale, factors=autocast_dtype(query))
    shape = (*query.shape[:-1], key.shape[-2])
    made = Scores.of(form, shape, form.factors or query.dtype, (func, args, kwargs))
    if bias is not None:
        with_bias = made.with_bias(bias)
        if with_bias is None:
            return None
        made.form = with_bias
    return made


def _fit(query: Tensor, transposed: Tensor) -> bool:
    """Whether the factors can be queries (..., Lq, E) and keys (..., E, Lk).

    Keys that were transposed have their features next to each other, which distinguishes them from
    values. After convolutions, the tokens of both are next to each other, which distinguishes them
    from weights and values.
    """
    rows = transposed.shape[-2] == 1 or transposed.stride(-2) == 1
    columns = query.shape[-1] > 1 and query.stride(-2) == transposed.stride(-1) == 1
    return (
        query.dim() == transposed.dim()
        and query.dim() in (3, 4)
        and query.dtype == transposed.dtype
        and query.device == transposed.device
        and query.shape[-1] == transposed.shape[-2] > 0
        and (rows or columns)
        and all(
            theirs in (1, ours)
            for ours, theirs in zip(query.shape[:-2], transposed.shape[:-2], strict=True)
        )
    )


def _factors(call: Operation) -> tuple[Any, Any, float, Tensor | None] | None:
    """The queries, the transposed keys, the scale and the bias of a product."""
    if call.op == "matmul":
        return call.get("input"), call.get("other"), 1.0, None
    if call.op == "baddbmm":
        alpha, beta = (as_number(call.get(name, 1)) for name in ("alpha", "beta"))
        bias = call.get("input")
        if alpha is None or beta is None or not is_plain(bias):
            return None
        if beta == 0:  # torch doesn't read the input then, which may hold anything
            return call.get("batch1"), call.get("batch2"), alpha, None
        return call.get("batch1"), call.get("batch2"), alpha, bias if beta == 1 else bias * beta
    product = spellings.inner(call) if call.op == "einsum" else None
    if product is None or not (is_plain(product.query) and is_plain(product.key)):
        return None
    query, key = (
        factor if order is None else factor.permute(order)
        for factor, order in zip(product[:2], product.orders, strict=True)
    )
    return query, key.mT, 1.0, None
