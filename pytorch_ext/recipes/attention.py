"""Attention that a module computes itself, found in its code and replaced by the operator.

Models that don't call their attention through transformers' interface write it out ::

    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(self.attention_head_size)
    scores += position_bias                          # terms like this one: any number, also none,
    if attention_mask is not None:                   # each perhaps under such a test
        scores = scores + attention_mask
    probs = nn.functional.softmax(scores, dim=-1)
    probs = self.dropout(probs)
    context = torch.matmul(probs, value)
    outputs = (context, probs) if output_attentions else (context,)

These statements become one call, if the weights go nowhere but to a caller that requests them.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor, nn

from trifuse.nn import packing
from trifuse.nn.dropout import Dropout
from trifuse.nn.linear import is_intercepted
from trifuse.nn.packing import PackedSequences
from trifuse.ops.attention import scaled_dot_product_attention
from trifuse.recipes import code

HELPER = "_trifuse_attend"  # the method that the rewritten code calls
WEIGHTS = "output_attentions"  # the argument that requests the weights


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    divisor: float,
    terms: tuple[Tensor | PackedSequences | None, ...],
    dropout: nn.Module,
    weights: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return dropout(softmax(Q Kᵀ / divisor + terms)) V, fused if the arguments allow it.

    Args:
        query, key, value: (B, H, L, E), or (1, H, T, E) if a term is :class:`PackedSequences`.
        divisor: a positive number.
        terms: broadcastable to (B, H, L, L); at most one is :class:`PackedSequences`, in the place
            of a mask. None is left out.
        dropout: a module.
        weights: whether to return the weights too.

    Returns:
        (B, H, L, E), and the weights or None.
    """
    given = [term for term in terms if term is not None]
    packed = next((term for term in given if isinstance(term, PackedSequences)), None)
    added = [term for term in given if isinstance(term, Tensor)]
    known = type(dropout) in (nn.Dropout, Dropout) and not is_intercepted(dropout)
    if packed is None and (
        weights
        or not known
        or query.dim() != 4
        or not all(term.is_floating_point() and term.dim() == 4 for term in added)
    ):
        scores = torch.matmul(query, key.transpose(-1, -2)) / divisor
        for term in added:
            scores = scores + term
        probs = dropout(nn.functional.softmax(scores, dim=-1))
        return torch.matmul(probs, value), probs
    mask = None
    for term in added:
        mask = term if mask is None else mask + term
    p: Any = dropout.p if dropout.training else 0.0
    scale = 1 / divisor
    if packed is not None:
        return packing.attend(query, key, value, packed, p, scale=scale, attn_mask=mask), None
    return scaled_dot_product_attention(query, key, value, mask, p, scale=scale), None


def rewrite(tree: ast.FunctionDef, dropouts: set[str], scope: dict[str, Any]) -> bool:
    """Replace attention that is written out in a method; return whether there was any.

    Args:
        tree: the method.
        dropouts: the names of the module's dropouts.
        scope: the method's globals.
    """
    if WEIGHTS not in {argument.arg for argument in (*tree.args.args, *tree.args.kwonlyargs)}:
        return False
    for at in range(len(tree.body)):
        matched = _Matcher(tree.body[at:], dropouts, scope).match()
        if matched is None:
            continue
        call, count, scores, probs = matched
        rest = tree.body[at + count :]
        uses = [node for node in _nodes(rest) if isinstance(node, ast.Name)]
        if any(use.id == scores for use in uses) or not _only_on_request(rest, probs):
            return False
        ast.copy_location(call, tree.body[at])
        tree.body[at : at + count] = [call]
        return True
    return False


class _Matcher:
    """Matches the statements of attention, from the first one on."""

    def __init__(self, body: list[ast.stmt], dropouts: set[str], scope: dict[str, Any]) -> None:
        self.body = body
        self.dropouts = dropouts
        self.scope = scope

    def match(self) -> tuple[ast.stmt, int, str, str] | None:
        """Return the call, the number of statements, and the names of scores and weights."""
        products = self._product(self.body[0])
        if products is None or len(self.body) < 5:
            return None
        scores, query, transposed = products
        key = self._transposed(transposed)
        divisor = self._divisor(self.body[1], scores)
        if key is None or divisor is None:
            return None
        terms: list[ast.expr] = []
        at = 2
        while at < len(self.body) and (term := _term(self.body[at], scores)) is not None:
            terms.append(term)
            at += 1
        if len(self.body) < at + 3:
            return None
        probs = self._softmax(self.body[at], scores)
        dropout = None if probs is None else self._dropout(self.body[at + 1], probs)
        context = self._product(self.body[at + 2])
        if probs is None or dropout is None or context is None:
            return None
        if ast.unparse(context[1]) != probs:
            return None
        arguments = [query, key, context[2], divisor, ast.Tuple(terms, ast.Load()), dropout]
        method = ast.Attribute(ast.Name("self", ast.Load()), HELPER, ast.Load())
        call = ast.Call(method, [*arguments, ast.Name(WEIGHTS, ast.Load())], [])
        names: list[ast.expr] = [ast.Name(name, ast.Store()) for name in (context[0], probs)]
        return ast.Assign([ast.Tuple(names, ast.Store())], call), at + 3, scores, probs

    def _assigned_call(self, statement: ast.stmt, *functions: Any) -> tuple[str, ast.Call] | None:
        """Match ``x = function(...)``."""
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
            return None
        (target, *others), call = statement.targets, statement.value
        if others or not isinstance(target, ast.Name):
            return None
        if code.value_of(call.func, self.scope) not in functions:
            return None
        return target.id, call

    def _product(self, statement: ast.stmt) -> tuple[str, ast.expr, ast.expr] | None:
        """Match ``x = torch.matmul(a, b)``."""
        assigned = self._assigned_call(statement, torch.matmul)
        if assigned is None or len(assigned[1].args) != 2 or assigned[1].keywords:
            return None
        return assigned[0], assigned[1].args[0], assigned[1].args[1]

    @staticmethod
    def _transposed(expression: ast.expr) -> ast.expr | None:
        """Match ``k.transpose(-1, -2)``."""
        if not (isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute)):
            return None
        key = expression.func.value
        forms = (f"{ast.unparse(key)}.transpose({dims})" for dims in ("-1, -2", "-2, -1"))
        return key if ast.unparse(expression) in forms else None

    @staticmethod
    def _divisor(statement: ast.stmt, scores: str) -> ast.expr | None:
        """Match ``scores = scores / divisor``."""
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp)):
            return None
        divided = statement.value
        if not isinstance(divided.op, ast.Div) or ast.unparse(divided.left) != scores:
            return None
        return divided.right if ast.unparse(statement.targets[0]) == scores else None

    def _softmax(self, statement: ast.stmt, scores: str) -> str | None:
        """Match ``probs = softmax(scores, dim=-1)``."""
        assigned = self._assigned_call(statement, nn.functional.softmax, torch.softmax)
        if assigned is None:
            return None
        arguments = [ast.unparse(each) for each in (*assigned[1].args, *assigned[1].keywords)]
        return assigned[0] if arguments in ([scores, "dim=-1"], [scores, "-1"]) else None

    def _dropout(self, statement: ast.stmt, probs: str) -> ast.expr | None:
        """Match ``probs = self.dropout(probs)``."""
        for name in self.dropouts:
            if ast.unparse(statement) == f"{probs} = self.{name}({probs})":
                return ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())
        return None


def _term(statement: ast.stmt, scores: str) -> ast.expr | None:
    """Match the addition of a variable to the scores, perhaps if it isn't None."""
    text = ast.unparse(statement)
    if isinstance(statement, ast.If):
        if len(statement.body) != 1 or statement.orelse:
            return None
        term = _term(statement.body[0], scores)
        tested = (
            term is not None and ast.unparse(statement.test) == f"{ast.unparse(term)} is not None"
        )
        return term if tested else None
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id != scores:
            added = f"{scores} = {scores} + {node.id}", f"{scores} += {node.id}"
            return node if text in added else None
    return None


def _only_on_request(statements: list[ast.stmt], probs: str) -> bool:
    """Whether the weights are used only where the caller requests them."""
    requested: set[ast.AST] = set()
    for node in _nodes(statements):
        if isinstance(node, (ast.If, ast.IfExp)) and ast.unparse(node.test) == WEIGHTS:
            body = node.body if isinstance(node.body, list) else [node.body]
            requested.update(_nodes(body))
    return all(
        node in requested
        for node in _nodes(statements)
        if isinstance(node, ast.Name) and node.id == probs
    )


def _nodes(trees: list[Any]) -> list[ast.AST]:
    return [node for tree in trees for node in ast.walk(tree)]
