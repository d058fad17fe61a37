"""BERT's embeddings, which run as one call (:mod:`trifuse.ops.embeddings`) in inference.

The embeddings are described by their :class:`Parts`. Before each call it is checked that they
still consist of these modules, that none of them trains or has hooks, and that nothing watches the
call. Otherwise the parts are called.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from trifuse.backends import _C
from trifuse.nn.dropout_add_layer_norm import TORCHS
from trifuse.nn.plans import PlannedModule, PlannedValue, may_run, modules_in, present_values
from trifuse.ops import embeddings as ops


class Parts(NamedTuple):
    """The modules that embeddings consist of, and the dropout after them, left out here."""

    tables: tuple[nn.Module, ...]  # each an nn.Embedding, in the order in which they are added
    norm: nn.Module
    # Whether the norm takes in the last sum, if its terms have one shape: see ops.embed.
    last_is_residual: bool = False


class _Plan(NamedTuple):
    """A plan holds what a call passes to the op, and names what each call checks before."""

    modules: tuple[PlannedModule, ...]
    values: tuple[PlannedValue, ...]
    tables: tuple[Tensor, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float


# Kept outside the modules, so that plans are neither copied nor saved with them.
_plans: WeakKeyDictionary[nn.Module, _Plan] = WeakKeyDictionary()


def run(module: nn.Module, parts: Parts, ids: tuple[Tensor, ...]) -> Tensor | None:
    """Computes the embeddings of tokens, (B, L, features), in one call.

    Args:
        module: the embeddings.
        parts: the modules in it.
        ids: int64, for each of ``parts.tables``: (B, L) the first, the others may be broadcast.

    Returns:
        The embeddings; None if the module must call its parts.
    """
    if not may_run():
        return None
    plan = _plans.get(module)
    if plan is None or not _C.values_as_planned(plan.values):
        made = _make(module, parts)
        if made is None:
            return None
        plan = _plans[module] = made
    if not _C.modules_as_planned(plan.modules):
        return None
    is_residual = parts.last_is_residual and ids[-1].shape == ids[0].shape
    return ops.embed(ids, plan.tables, plan.weight, plan.bias, plan.eps, is_residual)


def _make(module: nn.Module, parts: Parts) -> _Plan | None:
    norm: Any = parts.norm
    tables: tuple[Any, ...] = parts.tables
    if type(norm) not in TORCHS or len(norm.normalized_shape) != 1:
        return None
    if any(type(each) is not nn.Embedding or each.max_norm is not None for each in tables):
        return None
    weights = [(table._parameters, "weight") for table in tables]
    attributes = [*((vars(table), "max_norm") for table in tables), (vars(norm), "eps")]
    norms = [(norm._parameters, name) for name in ("weight", "bias")]
    return _Plan(
        modules_in(module),
        present_values([*weights, *norms, *attributes]),
        tuple([table.weight for table in tables]),
        norm.weight,
        norm.bias,
        norm.eps,
    )
