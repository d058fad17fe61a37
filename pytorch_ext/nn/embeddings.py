"""BERT's embeddings, which run as one call (:mod:`trifuse.ops.embeddings`) in inference on a CPU.

On a GPU, in training too, their lookups are one call. Its backward adds up the rows of small tables
(positions and segments) with a product instead of torch's sort.

The embeddings are described by their :class:`Parts`. Before each call it is checked that they still
consist of these modules, that none of them has hooks (or, on a CPU, is in training mode), and that
no compiler or mode intercepts the call. Otherwise the parts are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trifuse.nn.dropout import DROPOUTS
from trifuse.nn.dropout_add_layer_norm import LAYER_NORMS
from trifuse.nn.plans import (
    Checks,
    checks,
    forwards_of,
    kept_outside,
    may_run,
    modules_in,
    plan_of,
    present_values,
)
from trifuse.ops import embeddings as ops
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm


class Parts(NamedTuple):
    """The modules that embeddings consist of."""

    tables: tuple[nn.Module, ...]  # each an nn.Embedding, in the order in which they are added
    norm: nn.Module
    dropout: nn.Module  # after the norm; it does nothing in inference
    # Whether the norm takes in the last sum: see trifuse.ops.embeddings.embed.
    last_is_residual: bool = False


class Plan(NamedTuple):
    """The arguments that a call passes to the op, and what each call must check first."""

    checks: Checks
    tables: tuple[Tensor, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    last_is_residual: bool
    paddings: tuple[int, ...]  # of each table, the id whose row gets no gradient, or -1
    dense: bool  # whether gradients are plain sums, in dense tensors

    def needs_grad(self) -> bool:
        parameters = (*self.tables, self.weight, self.bias)
        return any(t is not None and t.requires_grad for t in parameters)


_plans: WeakKeyDictionary[nn.Module, Plan] = kept_outside()
_trained_plans: WeakKeyDictionary[nn.Module, Plan] = kept_outside()


def run(
    module: nn.Module,
    describe: Callable[[], Parts | None],
    find_ids: Callable[[], tuple[Tensor, ...] | None],
) -> Tensor | None:
    """Computes the embeddings of tokens, (B, L, features), in one call.

    Args:
        module: the embeddings.
        describe: returns the modules in it, or None if one is missing. Called for a new module and
            after a change.
        find_ids: returns int64 ids for each table: (B, L) for the first, while the others may be
            broadcast; None if the module must call its parts. Called only if all other checks pass.

    Returns:
        The embeddings; None if the module must call its parts.
    """
    if module.training or not may_run():
        return None
    plan = planned(module, describe)
    if plan is None or (torch.is_grad_enabled() and plan.needs_grad()):
        return None
    ids = find_ids()
    if ids is None:
        return None
    return ops.embed(ids, plan.tables, plan.weight, plan.bias, plan.eps, plan.last_is_residual)


def planned(module: nn.Module, describe: Callable[[], Parts | None]) -> Plan | None:
    """Returns the plan of a module, in evaluation mode, for :func:`run`; None if there is none."""
    return plan_of(module, _plans, lambda: _make(module, describe()))


def run_on_gpu(
    module: nn.Module,
    describe: Callable[[], Parts | None],
    find_ids: Callable[[], tuple[Tensor, ...] | None],
) -> Tensor | None:
    """As :func:`run`, on a GPU, in training too. Ids have one row per token, or one for all."""
    if not may_run():
        return None
    plan = plan_of(module, _trained_plans, lambda: _make(module, describe()), trained=True)
    if plan is None or not (plan.last_is_residual and plan.dense):
        return None
    ids = find_ids()
    rows = None if ids is None else ops.embedded_rows(ids, plan.tables, plan.paddings)
    if rows is None:
        return None
    out = dropout_add_layer_norm(*rows, plan.weight, plan.bias, 0.0, plan.eps)
    dropped: Tensor = module.dropout(out)  # type: ignore[operator]
    return dropped


def _make(module: nn.Module, parts: Parts | None) -> Plan | None:
    if parts is None:
        return None
    norm: Any = parts.norm
    tables: tuple[Any, ...] = parts.tables
    if type(norm) not in LAYER_NORMS or len(norm.normalized_shape) != 1:
        return None
    if any(type(each) is not nn.Embedding or each.max_norm is not None for each in tables):
        return None
    if type(parts.dropout) not in DROPOUTS:
        return None
    weights = [(table._parameters, "weight") for table in tables]
    norms = [(norm._parameters, name) for name in ("weight", "bias")]
    if any(name not in parameters for parameters, name in (*weights, *norms)):
        return None  # computed from other parameters, as by pruning, or held elsewhere, as by FSDP
    options = ("max_norm", "padding_idx", "scale_grad_by_freq", "sparse")
    attributes = [(vars(table), option) for table in tables for option in options]
    attributes.append((vars(norm), "eps"))
    forwards = forwards_of(module)
    if forwards is None:
        return None
    return Plan(
        checks(modules_in(module), (*present_values([*weights, *norms, *attributes]), *forwards)),
        tuple([table.weight for table in tables]),
        norm.weight,
        norm.bias,
        norm.eps,
        parts.last_is_residual,
        tuple([-1 if table.padding_idx is None else table.padding_idx for table in tables]),
        not any(table.scale_grad_by_freq or table.sparse for table in tables),
    )
