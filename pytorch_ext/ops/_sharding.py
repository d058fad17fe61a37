"""Sharding rules: how the ops run on DTensors, the tensors that torch.distributed shards.

A rule names the dimensions in which an op computes independently: attention in its batch and heads,
the recurrent layers in their batch, dropout and the norm in every dimension but the last. Such a
dimension is *shared* by several tensors and results. If one of them is sharded in it, the op runs
on every process's shards: tensors with the dimension are sharded alike, and the others are
replicated. The gradient of a replicated tensor is then a partial sum. Everything else follows from
the rule, for the forward op and for the backward op.

The rules are handlers of DTensor's dispatcher, which torch's own loss_parallel and context_parallel
use too. ``register_sharding`` takes no op that returns a list of tensors, as the backward ops of
the recurrent layers do, and its rules could not add the place of a part to its seed (_draws.py).
The handlers are registered when ``torch.distributed.tensor`` is imported, which this module does
not import itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trifuse import backends
from trifuse._imports import when_imported
from trifuse.ops import _draws
from trifuse.ops._checks import fail

if TYPE_CHECKING:
    from trifuse.ops._operator import Operator

# For each shared dimension, its index in each tensor and result, by name.
Rule = Mapping[str, Mapping[str, int]]
# A tensor, and those of its dimensions in which an op numbers elements to draw random numbers.
Units = tuple[str, tuple[int, ...]]


def _attention(tensors: Mapping[str, Any]) -> Rule:
    if tensors["cu_seqlens_q"] is not None:
        raise NotImplementedError(
            "varlen_attention takes no DTensors: packed sequences have no batch dimension to "
            "shard; call it on each process's own sequences (DTensor.to_local)"
        )
    tables = ("relative_bias", "query_bias", "key_bias")
    by_head = ("query", "key", "value", "attn_mask", *tables, "out", "logsumexp")
    return {
        "batch": dict.fromkeys((*by_head, "key_lengths", "diagonal"), 0),
        "heads": dict.fromkeys(by_head, 1),
    }


def _norm(tensors: Mapping[str, Any]) -> Rule:
    names = ("x", "residual", "out", "sum", "mean", "rstd")
    return {f"dimension {d}": dict.fromkeys(names, d) for d in range(tensors["x"].dim() - 1)}


def dropout(tensors: Mapping[str, Any]) -> Rule:
    return {f"dimension {d}": {"x": d, "out": d} for d in range(tensors["x"].dim())}


def linear(arguments: Mapping[str, Any]) -> Rule:
    last = arguments["x"].dim() - 1
    rule = {f"dimension {d}": {"x": d, "out": d} for d in range(last)}
    rule["columns"] = {"weight": 0, "bias": 0, "out": last}
    if arguments["bias"] is None and arguments.get("activation") is None:
        rule["terms"] = {"x": last, "weight": 1}  # the result is a partial sum
    return rule


def elements(arguments: Mapping[str, Any]) -> Units:
    return "x", tuple(range(arguments["x"].dim()))


# Operators that are not listed are sharded only in their batch dimension: ``Operator.axes``.
_RULES: dict[str, Callable[[Mapping[str, Any]], Rule]] = {
    "attention": _attention,
    "dropout_add_layer_norm": _norm,
}
_UNITS: dict[str, Callable[[Mapping[str, Any]], Units]] = {
    "attention": lambda tensors: ("query", (0, 1)),
    "dropout_add_layer_norm": lambda tensors: ("x", tuple(range(tensors["x"].dim() - 1))),
    "lstm": lambda tensors: ("input", (1,)),
}


def register(operator: Operator) -> None:
    """Registers the rules of an operator's ops once ``torch.distributed.tensor`` is imported."""
    for ops, handle in ((operator.forward, _forward), (operator.backward, _backward)):
        for op in ops.values():
            when_imported(_DTENSOR, functools.partial(_register, op, operator, handle))


def register_single(
    op: Any,
    rule: Callable[[Mapping[str, Any]], Rule],
    units: Callable[[Mapping[str, Any]], Units] | None = None,
    first: str | None = None,
) -> None:
    """Registers the rule of an op with one result, "out", that has no :class:`Operator`.

    Args:
        rule: makes the rule from the op's arguments, by name. A result without a sharded dimension
            is a partial sum.
        units: computes from the op's arguments what the op numbers, if it draws random numbers.
        first: as :class:`Layout` takes it.
    """
    when_imported(_DTENSOR, functools.partial(_register, op, (rule, units, first), _single))


_DTENSOR = "torch.distributed.tensor"


def _register(op: Any, declared: Any, handle: Callable[..., Any]) -> None:
    from torch.distributed.tensor import DTensor

    def handler(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        rest = op._schema.arguments[len(args) :]
        args = [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]
        with torch.no_grad():
            return handle(op, declared, args)

    DTensor._op_dispatcher._custom_op_handlers[op] = handler  # type: ignore[assignment]


def placements(t: Tensor) -> Sequence[Any] | None:
    """Returns how a DTensor is placed, as :func:`placed` takes it; None for another tensor."""
    return getattr(t, "placements", None)


def is_sharded(t: Tensor, dim: int) -> bool:
    """Returns whether a tensor is a DTensor that is sharded in a dimension."""
    return any(place.is_shard(dim) for place in placements(t) or ())


def placed(t: Tensor, placements: Sequence[Any] | None) -> Tensor:
    """Places a gradient like the forward's tensor, so that both draw the same random numbers."""
    if placements is None:
        return t
    from torch.distributed.tensor import Replicate

    return t.redistribute(  # type: ignore[attr-defined]
        placements=[Replicate() if place.is_partial() else place for place in placements]
    )


def replicated(t: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor that is the same in all processes as a DTensor on the mesh of ``like``."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


# The ops ----------------------------------------------------------------------------------------


def _forward(op: Any, operator: Operator, args: Sequence[Any]) -> Any:
    tensors, _, _ = operator.split_forward(args)
    by_name = dict(zip(operator.tensors._fields, tensors, strict=True))
    layout = Layout(operator.name, _rule(operator, by_name), by_name, _UNITS.get(operator.name))
    count = len(tensors)
    local = [layout.local(name, t) for name, t in by_name.items()]
    results = op(*local, *args[count:])
    whole = _whole(op, args)
    return tuple(
        layout.result(name, t, like)
        for name, t, like in zip(operator.results._fields, results, whole, strict=True)
    )


def _backward(op: Any, operator: Operator, args: Sequence[Any]) -> Any:
    grads, tensors, saved, options, needs_grad = operator.split_backward(args)
    by_name = dict(zip(operator.tensors._fields, tensors, strict=True))
    saved_by_name = dict(zip(operator.saved, saved, strict=True))
    layout = Layout(operator.name, _rule(operator, by_name), by_name, _UNITS.get(operator.name))
    local = [
        *(layout.local(name, g) for name, g in zip(operator.results._fields, grads, strict=False)),
        *(layout.local(name, t) for name, t in by_name.items()),
        *(layout.local(name, t) for name, t in saved_by_name.items()),
    ]
    found = op(*local, *options, needs_grad)
    names = [
        name
        for name, t in by_name.items()
        for _ in range(len(t) if isinstance(t, (list, tuple)) else 1)
    ]
    results = [
        layout.gradient(name, g, like, needed=needed)
        for name, g, like, needed in zip(names, found, _whole(op, args), needs_grad, strict=False)
    ]
    return operator.returns(results)


def _single(op: Any, declared: tuple[Any, Any, str | None], args: Sequence[Any]) -> Any:
    from torch.distributed.tensor import Partial

    rule, units, first = declared
    by_name = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
    layout = Layout(op._schema.name, rule(by_name), by_name, units, first)
    local = [layout.local(name, t) if isinstance(t, Tensor) else t for name, t in by_name.items()]
    if not _draws.is_aligned(layout.place):
        # Kernels of dropout draw for eight elements at once, which no longer lie together here.
        op = getattr(op._overloadpacket, backends.FALLBACK)
    return layout.result("out", op(*local), _whole(op, args), Partial())


def _rule(operator: Operator, by_name: Mapping[str, Any]) -> Rule:
    if operator.name in _RULES:
        return _RULES[operator.name](by_name)
    return {"batch": operator.axes}


def _whole(op: Any, args: Sequence[Any]) -> Any:
    """Returns the op's results on whole tensors, without their values: for sizes and strides."""

    def meta(t: Any) -> Any:
        if isinstance(t, (list, tuple)):
            return [meta(each) for each in t]
        if not isinstance(t, Tensor):
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    return op(*map(meta, args))


# Layouts ----------------------------------------------------------------------------------------


class Layout:
    """Which shared dimension of a call each dimension of the mesh of processes shards, if any.

    Tensors are sharded like the first of them that is sharded in a shared dimension. ``place`` is
    the place of this process's part in the random numbers, if the call draws any.

    Args:
        operator: its name, for errors.
        rule: the dimensions in which the operator computes independently.
        by_name: the operator's arguments.
        units: computes from its arguments what it numbers, if it draws random numbers.
        first: the tensor whose sharding takes precedence over that of the others.
    """

    def __init__(
        self,
        operator: str,
        rule: Rule,
        by_name: Mapping[str, Any],
        units: Callable[[Mapping[str, Any]], Units] | None = None,
        first: str | None = None,
    ) -> None:
        self.operator, self.rule, self.first = operator, rule, first
        tensors = {name: t for name, t in by_name.items() if isinstance(t, Tensor)}
        self.sizes = {
            shared: {tensors[name].shape[d] for name, d in dims.items() if name in tensors}
            for shared, dims in rule.items()
        }
        flat = [t for value in by_name.values() for t in _flat(value)]
        self.mesh = next(t.device_mesh for t in flat if _is_dtensor(t))
        if any(t.device_mesh != self.mesh for t in flat if _is_dtensor(t)):
            raise fail(f"the tensors of {operator}", "DTensors of one mesh", "several meshes")
        self.shared: list[str | None] = []
        for i in range(self.mesh.ndim):
            self.shared.append(self._choose(i, tensors))
        self.place = None
        if units is not None and tensors.get("seed") is not None and any(self.shared):
            self.place = self._place(by_name, *units(by_name))

    def _choose(self, i: int, tensors: Mapping[str, Any]) -> str | None:
        for name in sorted(tensors, key=lambda name: name != self.first):
            t = tensors[name]
            if not _is_dtensor(t) or not t.placements[i].is_shard():
                continue
            for shared, dims in self.rule.items():
                if dims.get(name) == t.placements[i].dim and self._divides(shared, i):
                    return shared
        return None

    def _divides(self, shared: str, i: int) -> bool:
        """Returns whether mesh dimension ``i`` can shard a dimension, besides earlier ones.

        If sizes differ, as with grouped heads, equal parts keep the groups together.
        """
        sizes = self.sizes[shared] - {1}
        if len(sizes) < 2:
            return bool(sizes)
        parts = self.mesh.size(i)
        for earlier, other in enumerate(self.shared):
            parts *= self.mesh.size(earlier) if other == shared else 1
        return all(size % parts == 0 for size in sizes)

    def _dim(self, name: str, shape: Sequence[int], shared: str | None) -> int | None:
        """Returns the dimension in which a tensor of this shape is sharded, or None."""
        if shared is None:
            return None
        d = self.rule[shared].get(name)
        if d is None or d >= len(shape) or shape[d] not in self.sizes[shared] - {1}:
            return None
        return d

    def _placements(self, name: str, shape: Sequence[int], absent: Any) -> list[Any]:
        """Returns a tensor's placements; ``absent`` is for dimensions that it does not have."""
        from torch.distributed.tensor import Replicate, Shard

        dims = [(shared, self._dim(name, shape, shared)) for shared in self.shared]
        return [
            Replicate() if shared is None else absent if d is None else Shard(d)
            for shared, d in dims
        ]

    def local(self, name: str, t: Any) -> Any:
        """Returns this process's part of a tensor, moved between processes where needed.

        Args:
            name: that of an argument or a result in the rule.
            t: a DTensor, a list of them, or None; as the seed, any tensor.
        """
        from torch.distributed.tensor import Replicate

        if isinstance(t, (list, tuple)):
            return [self.local(name, each) for each in t]
        if t is None:
            return None
        if name == "seed":
            return self._seed(t)
        if not _is_dtensor(t):
            raise TypeError(
                f"{name}: expected a DTensor, as the other tensors of {self.operator}; got a "
                "tensor of this process alone (see DTensor.from_local)"
            )
        placements = tuple(self._placements(name, t.shape, Replicate()))
        moved = t if t.placements == placements else t.redistribute(placements=placements)
        return moved.to_local()

    def result(self, name: str, t: Tensor, whole: Tensor, absent: Any = None) -> Tensor:
        """Returns a result as a DTensor.

        Args:
            name: that of the result in the rule.
            t: this process's part.
            whole: a tensor with the sizes and strides of the whole.
            absent: its placement if it lacks the sharded dimension; by default, every process has
                all of it.
        """
        from torch.distributed.tensor import Replicate

        return self._wrap(t, self._placements(name, whole.shape, absent or Replicate()), whole)

    def gradient(self, name: str, t: Tensor, whole: Tensor, *, needed: bool = True) -> Tensor:
        """Returns the gradient of the tensor ``name`` as a DTensor; see :meth:`result`.

        Args:
            needed: False for a gradient without values, which no process adds up.
        """
        from torch.distributed.tensor import Partial, Replicate

        absent = Partial() if needed else Replicate()
        return self._wrap(t, self._placements(name, whole.shape, absent), whole)

    def _wrap(self, t: Tensor, placements: Sequence[Any], whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            t,
            self.mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def _place(self, tensors: Mapping[str, Any], name: str, dims: Sequence[int]) -> _draws.Place:
        """Returns the place of this process's part among the units that the op numbers."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        whole = tensors[name].shape
        placements = self._placements(name, whole, Replicate())
        sizes, firsts = compute_local_shape_and_global_offset(whole, self.mesh, placements)
        box = ([t[d] for d in dims] for t in (whole, firsts, sizes))
        return _draws.place_of_box(*box)  # type: ignore[arg-type]

    def _seed(self, seed: Tensor) -> Tensor:
        """Returns the seed of this process's part: that of the first process, and the place."""
        from torch.distributed.tensor import DTensor, Replicate

        seed = seed.to_local() if _is_dtensor(seed) else seed  # type: ignore[attr-defined]
        everywhere = [Replicate()] * self.mesh.ndim
        seed = DTensor.from_local(seed.clone(), self.mesh, everywhere, run_check=True).to_local()
        return seed if self.place is None else _draws.with_place(seed, self.place)


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _is_dtensor(t: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(t, DTensor)
