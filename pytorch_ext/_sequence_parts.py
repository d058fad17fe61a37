"""Sequences split between processes: which tokens each holds, and how they are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trifuse import _meshes
from trifuse.ops import _checks
from trifuse.ops._checks import fail


def shard_sequence(t: Tensor, mesh: DeviceMesh, dim: int, balanced: bool = False) -> Tensor:
    """Returns this process's part of a whole tensor along ``dim``, of length L.

    Args:
        balanced: cut L into 2 n pieces, and give process r pieces r and 2 n - 1 - r, so that under
            a causal mask every process has as many pairs to compute. Otherwise process r has the
            r-th of n pieces.

    Raises:
        ValueError: the pieces would not have the same length.
    """
    layout = Layout(mesh, balanced)
    count, L = layout.parts * layout.per_part, t.shape[dim]
    if L % count:
        raise fail("t", f"a length along dim {dim} that {count} divides", L)
    pieces = t.chunk(count, dim) if L else [t] * count
    return torch.cat([pieces[i] for i in layout.pieces(layout.rank)], dim)


def unshard_sequence(t: Tensor, mesh: DeviceMesh, dim: int, balanced: bool = False) -> Tensor:
    """Joins the parts of all processes along ``dim``: the inverse of :func:`shard_sequence`.

    It is differentiable: the gradients of all processes' results are summed.
    """
    return joined(t, Layout(mesh, balanced), dim)


class Layout:
    """The pieces of a sequence that each process holds. Pieces have one length."""

    def __init__(self, mesh: DeviceMesh, balanced: bool) -> None:
        _meshes.check("mesh", mesh)
        self.mesh = mesh
        self.balanced = _checks.flag("balanced", balanced)
        self.group = mesh.get_group()
        self.parts, self.rank = mesh.size(), mesh.get_local_rank()
        self.per_part = 2 if balanced else 1

    def pieces(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.parts - 1 - rank) if self.balanced else (rank,)

    def in_order(self, t: Tensor, dim: int) -> Tensor:
        """Puts the pieces of all processes, one process after another, in the sequence's order."""
        if not self.balanced or t.shape[dim] == 0:
            return t
        held = self._held()
        pieces = t.chunk(len(held), dim)
        return torch.cat([pieces[held.index(i)] for i in range(len(held))], dim)

    def by_process(self, t: Tensor, dim: int) -> Tensor:
        """The inverse of :meth:`in_order`."""
        if not self.balanced or t.shape[dim] == 0:
            return t
        held = self._held()
        pieces = t.chunk(len(held), dim)
        return torch.cat([pieces[i] for i in held], dim)

    def _held(self) -> list[int]:
        """Returns the pieces of all processes, one process after another."""
        return [piece for rank in range(self.parts) for piece in self.pieces(rank)]


# Communication ----------------------------------------------------------------------------------


class Travel:
    """Tensors on their way to the next process, while the present ones are computed on."""

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        sent = [t.contiguous() for t in tensors]
        self.received = [torch.empty_like(t) for t in sent]
        to, source = (
            dist.get_global_rank(layout.group, (layout.rank + step) % layout.parts)
            for step in (1, -1)
        )
        operations = [
            *(dist.P2POp(dist.isend, t, to, layout.group) for t in sent),
            *(dist.P2POp(dist.irecv, t, source, layout.group) for t in self.received),
        ]
        self.sent = sent  # kept until it has been sent
        self.work = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        for work in self.work:
            work.wait()
        return self.received


def all_gather(t: Tensor, layout: Layout) -> list[Tensor]:
    """Returns the tensors of all processes."""
    t = t.contiguous()
    parts = [torch.empty_like(t) for _ in range(layout.parts)]
    dist.all_gather(parts, t, group=layout.group)
    return parts


def reduce_scatter(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """Returns the sum of all processes' tensors for this process."""
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, list(parts), group=layout.group)
    return out


class _Gather(torch.autograd.Function):
    """The parts of all processes, one after another along ``dim``."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: Layout, dim: int) -> Tensor:
        ctx.layout, ctx.dim = layout, dim
        return torch.cat(all_gather(t, layout), dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = [t.contiguous() for t in grad.chunk(ctx.layout.parts, ctx.dim)]
        return reduce_scatter(parts, ctx.layout), None, None


def joined(t: Tensor, layout: Layout, dim: int) -> Tensor:
    """Returns the parts of all processes along ``dim`` in the sequence's order."""
    return layout.in_order(_Gather.apply(t, layout, dim), dim)


class _Swap(torch.autograd.Function):
    """Cuts dimension ``cut`` between the processes and joins their parts along ``join``."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: Layout, cut: int, join: int) -> Tensor:
        ctx.constants = (layout, join, cut)
        return _exchange(t, layout, cut, join)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, *ctx.constants), None, None, None


swap: Callable[[Tensor, Layout, int, int], Tensor] = _Swap.apply


def _exchange(t: Tensor, layout: Layout, cut: int, join: int) -> Tensor:
    sent = torch.stack(t.chunk(layout.parts, cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=layout.group)
    return torch.cat(received.unbind(0), join)
