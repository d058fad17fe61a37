"""Finds attention in a graph: torch's function, torch's multi-head function, or written out.

written_out.py reads attention that is written out, as softmax(scale · Q Kᵀ + mask) V.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from trifuse import backends
from trifuse.compiler import written_out
from trifuse.compiler.calls import read, tensor
from trifuse.compiler.rewriter import Rewriter, require
from trifuse.ops.attention import scaled_dot_product_attention


def is_candidate(node: Node) -> bool:
    """Returns whether a node may be the result of attention."""
    call = read(node)
    if call is None:
        return node.target is F.multi_head_attention_forward
    return call.op == "sdpa" or written_out.is_candidate(call)


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
        require(mask is None or tensor(mask) is not None, "the mask is no plain tensor")
        _require_kernel(*(tensor(call.get(name)) for name in ("query", "key", "value")))
        with rewriter.inserting(node):
            new = rewriter.call(scaled_dot_product_attention, *node.args, **node.kwargs)
            rewriter.replace([node], [new], ())
        return
    found = written_out.find(call)
    _require_kernel(*found.tensors)
    with rewriter.inserting(node):
        arguments = written_out.arguments(rewriter, found)
        new = rewriter.call(scaled_dot_product_attention, **arguments)
        rewriter.replace([node], [written_out.result(rewriter, found, new)], found.nodes)


def _require_kernel(*tensors: Tensor | None) -> None:
    """Refuses what ``auto`` would leave to the eager formula."""
    sizes = []
    for t in tensors:
        require(t is not None and t.dim() >= 2, "an operand is no plain tensor")
        assert t is not None
        sizes.append(int(t.shape[-1]))  # a graph for each head_dim, as kernels have
        last = t
    call = backends.Call("attention", last.device.type, last.dtype, max(sizes))
    require(backends.has_kernel(call), f"no kernel for {last.dtype} on {last.device.type}")


# Torch's multi-head function --------------------------------------------------------------------


def _replace_multi_head(rewriter: Rewriter, node: Node) -> None:
    bound = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    require(not bound.arguments["need_weights"], "the attention weights are requested")
    query, key, value = (tensor(bound.arguments[name]) for name in ("query", "key", "value"))
    _require_kernel(query, key, value)
    with rewriter.inserting(node):
        new = rewriter.call(multi_head_attention, *node.args, **node.kwargs)
        results = list(node.users)  # the choice of the output from the pair that is returned
        chosen = [rewriter.call(old.target, new, *old.args[1:]) for old in results]  # type: ignore[arg-type]
        rewriter.replace(results, chosen, {node})


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` with trifuse's attention inside."""
    results: tuple[Tensor, Tensor | None] = _multi_head_attention()(*args, **kwargs)
    return results


@functools.cache
def _multi_head_attention() -> Any:
    """Returns torch's own function, in which the name of the attention means trifuse's."""
    theirs = F.multi_head_attention_forward
    names = {**vars(F), "scaled_dot_product_attention": scaled_dot_product_attention}
    ours = types.FunctionType(
        theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__
    )
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours
