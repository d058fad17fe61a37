"""Finds attention in a graph: torch's function, torch's multi-head function, or written out.

scores.py reads attention that is written out, as softmax(scale · Q Kᵀ + mask) V.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from trifuse import backends
from trifuse.compiler import scores
from trifuse.compiler.calls import plain, read, require
from trifuse.compiler.rewriter import Rewriter
from trifuse.ops.attention import scaled_dot_product_attention


def is_candidate(node: Node) -> bool:
    """Returns whether a node may be the result of attention."""
    call = read(node)
    if call is None:
        return node.target is F.multi_head_attention_forward
    return call.op == "sdpa" or scores.is_candidate(call)


def replace(rewriter: Rewriter, node: Node) -> None:
    """Replaces the attention that ends at ``node``, a candidate.

    Raises:
        Refused: it has something that the operator does not compute.
    """
    call = read(node)
    if call is None:
        _replace_multi_head(rewriter, node)
        return
    if call.op == "sdpa":
        mask = call.get("attn_mask")
        require(mask is None or plain(mask) is not None, "the mask is no tensor")
        operands = [call.get(name) for name in ("query", "key", "value")]
        _require_kernel(operands, [plain(each).shape[-1] for each in operands])
        with rewriter.inserting(node):
            new = rewriter.call(scaled_dot_product_attention, *node.args, **node.kwargs)
            rewriter.replace([node], [new], ())
        return
    found = scores.find(call)
    operands = [each.node for each in found.operands]
    _require_kernel(operands, [each.shape[-1] for each in found.operands])
    with rewriter.inserting(node):
        arguments = scores.arguments(rewriter, found)
        new = rewriter.call(scaled_dot_product_attention, **arguments)
        skipped = [each.skipped for each in found.operands if each.skipped is not None]
        rewriter.replace([node], [scores.result(rewriter, found, new)], found.nodes, skipped)


def _require_kernel(operands: Sequence[Any], head_dims: Sequence[Any]) -> None:
    """Refuses what ``auto`` would leave to the eager formula, and operands of several dtypes."""
    query, *others = map(plain, operands)
    require(all(t.dtype == query.dtype for t in others), "query, key and value differ in dtype")
    require(all(t.dim() >= 2 for t in (query, *others)), "an operand is a vector")
    largest = max(int(size) for size in head_dims)  # specialises: one graph per head_dim
    call = backends.Call("attention", query.device.type, query.dtype, largest)
    require(backends.has_kernel(call), f"no kernel for {query.dtype} on {query.device.type}")


# Torch's multi-head function --------------------------------------------------------------------


def _replace_multi_head(rewriter: Rewriter, node: Node) -> None:
    bound = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    require(not bound.arguments["need_weights"], "the attention weights are requested")
    operands = [bound.arguments[name] for name in ("query", "key", "value")]
    head_dim = bound.arguments["embed_dim_to_check"] // bound.arguments["num_heads"]
    _require_kernel(operands, [head_dim])
    with rewriter.inserting(node):
        new = rewriter.call(multi_head_attention, *node.args, **node.kwargs)
        results = list(node.users)  # the getitem that takes the output from the returned pair
        chosen = [rewriter.call(operator.getitem, new, old.args[1]) for old in results]
        rewriter.replace(results, chosen, {node})


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` with trifuse's attention inside."""
    results: tuple[Tensor, Tensor | None] = _multi_head_attention()(*args, **kwargs)
    return results


@functools.cache
def _multi_head_attention() -> Any:
    """Returns torch's own function, in which the name of the attention means trifuse's."""
    theirs = F.multi_head_attention_forward
    names = {
        **vars(F),
        "scaled_dot_product_attention": scaled_dot_product_attention,
        # AOTAutograd's tensors override torch's functions, which would run torch's own code again.
        "has_torch_function": lambda tensors: False,
    }
    ours = types.FunctionType(
        theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__
    )
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours
