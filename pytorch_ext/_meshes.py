"""Functions of a DeviceMesh that trifuse.distributed uses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trifuse.ops._checks import fail


def check(name: str, mesh: Any) -> None:
    """Checks for a mesh of one dimension."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{name}: expected a DeviceMesh; got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise fail(name, "one dimension (mesh['name'] takes one of several)", mesh.ndim)


def broadcast(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the tensor of the mesh's first process."""
    t = t.clone()
    dist.broadcast(t, group=mesh.get_group(), group_src=0)
    return t


def raise_together(error: Exception | None, mesh: DeviceMesh, device: torch.device) -> None:
    """Raises in every process of the mesh if one of them has an error.

    A process raises its own error, or a RuntimeError that names the first process that has one.
    """
    n = mesh.size()
    first = torch.tensor(n if error is None else mesh.get_local_rank(), device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=mesh.get_group())
    if error is not None:
        raise error
    if first < n:
        raise RuntimeError(f"process {first.item()} of the mesh raised an error, which says more")
