"""Parallelism across processes, beyond the sharding rules of the operators.

Context parallelism splits sequences between processes: each holds a part of every sequence's
queries, keys and values. Attention then needs all keys for every query. :func:`ring_attention`
brings them together in one of three ways, and :func:`shard_sequence` and :func:`unshard_sequence`
split and join sequences.

:class:`SequenceParallel` is the style for a norm that also takes a residual.
:func:`part_of_batch` makes processes drop together what one process drops. The other parallelisms
need nothing from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from trifuse import _meshes, _pipeline_draws
from trifuse._pipelined_lstm import PipelinedLSTM
from trifuse._ring_attention import ring_attention
from trifuse._sequence_parts import shard_sequence, unshard_sequence
from trifuse.ops import _checks, _draws
from trifuse.ops._checks import fail
from trifuse.reference.philox import draw_seed

__all__ = [
    "PipelinedLSTM",
    "SequenceParallel",
    "part_of_batch",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
]


@contextmanager
def part_of_batch(
    mesh: DeviceMesh | None = None,
    *,
    sequence: DeviceMesh | None = None,
    heads: DeviceMesh | None = None,
    balanced: bool = False,
    batch: tuple[int, int, int] | None = None,
    batch_dim: int = 0,
    stages: Any = None,
    microbatches: int | None = None,
) -> Iterator[None]:
    """Makes the processes drop together what one process drops on the whole batch.

    Inside the ``with`` block, dropout and zoneout of trifuse's operators and modules draw the
    random numbers that belong to this process's part. So a step drops the same elements on any
    number of processes, each of which runs the same program::

        with trifuse.distributed.part_of_batch(mesh):
            loss = model(x)  # this process's part of the batch
            loss.backward()

    The first process draws a seed and broadcasts it (8 bytes for each mesh). It determines the
    block's random numbers, in every process and on its current device. After the block, each
    process's own generators continue as before. Calls on DTensors find their part in their layout.

    Put the backward inside the block too if activations are checkpointed. Padded batches are
    computed with their padding, and padding rows are numbered too. ``torch.compile`` serves a model
    inside the block, and compiles it once more for each part.

    Args:
        mesh: one dimension of a mesh: the processes that have equal parts of the batch, in order,
            as under DDP and FSDP2. None: the batch is not split, as in one process.
        sequence: the processes that have parts of every sequence: norms and dropout then get
            tensors (batch, part of the sequence, ...). For attention see :func:`ring_attention`.
        heads: the processes that have parts of attention's heads as plain tensors, which
            ``ColwiseParallel`` returns.
        balanced: whether the parts of sequences are balanced, as :func:`shard_sequence` makes them.
        batch: (first, count, total): the part of the batch that this process has, if the parts are
            not equal. ``mesh`` then only defines which processes share the seed.
        batch_dim: 0, or 1 if norms and dropout get tensors (sequence, batch, ...). Attention and
            recurrent layers have a dimension of their own for the batch.
        stages: this process's stages of a pipeline (``torch.distributed.pipelining``), one or a
            list. The block is then one step of their schedule, in all processes of the pipeline.
        microbatches: how many equal parts the schedule cuts this process's batch into.

    Raises:
        NotImplementedError: in the block, dropout of a tensor that is split in more than two
            dimensions, or in two of which neither is the first.
        RuntimeError: a second step of a schedule in the block.
        TypeError: an argument of the wrong type.
        ValueError: a shape or value that doesn't fit (``trifuse.ArgumentError``).
    """
    meshes = (mesh, sequence, heads)
    for name, given in zip(("mesh", "sequence", "heads"), meshes, strict=True):
        if given is not None:
            _meshes.check(name, given)
    if batch_dim not in (0, 1):
        raise fail("batch_dim", "0 or 1", batch_dim)
    along_sequence = _share(sequence)
    if _checks.flag("balanced", balanced) and sequence is not None:
        n, r = sequence.size(), sequence.get_local_rank()
        along_sequence = _draws.Share(r, 2, 2 * n, second=2 * n - 1 - r)
    along_batch = _share(mesh)
    if batch is not None:
        first, count, total = batch
        if not 0 <= first < first + count <= total:
            raise fail("batch", "(first, count, total), count > 0, within total", batch)
        along_batch = _draws.Share(first, count, total)
    part = _draws.Part(along_batch, along_sequence, _share(heads), batch_dim)
    found = [] if stages is None else _pipeline_draws.check(stages, microbatches)
    with _shared_generators([m for m in meshes if m is not None]), _draws.part(part):
        if not found:
            yield
            return
        with _pipeline_draws.drawing_as_one(found, part, microbatches or 1):
            yield


def _share(mesh: DeviceMesh | None) -> _draws.Share:
    """Returns the share of a process that has one of equal parts."""
    if mesh is None:
        return _draws.WHOLE
    return _draws.Share(mesh.get_local_rank(), 1, mesh.size())


@contextmanager
def _shared_generators(meshes: Sequence[DeviceMesh]) -> Iterator[None]:
    """Seeds torch's generators identically in all processes, and restores them afterwards."""
    seed = draw_seed(torch.empty(0))
    for mesh in meshes:
        seed = _meshes.broadcast(seed.to(mesh.device_type), mesh)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        yield


class SequenceParallel(ParallelStyle):
    """Runs a norm on sequences split between processes, its weights replicated.

    It is ``torch.distributed.tensor.parallel.SequenceParallel`` for modules that take several
    tensors, as :class:`trifuse.nn.DropoutAddLayerNorm` takes a residual. torch's style passes only
    the first positional argument, so a residual would be lost without an error.

    Args:
        sequence_dim: the dimension of the inputs that is split. Tensors that are not DTensors are
            this process's part.
        use_local_output: whether to return this process's part instead of a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, p in list(module.named_parameters(recurse=False)):
            if not isinstance(p, DTensor):
                whole = distribute_tensor(p, device_mesh, [Replicate()])
                module.register_parameter(name, nn.Parameter(whole, p.requires_grad))
        split = [Shard(self.sequence_dim)]

        def sharded(t: Any) -> Any:
            if isinstance(t, DTensor):
                return t.redistribute(placements=split)
            if isinstance(t, Tensor):
                return DTensor.from_local(t, device_mesh, split, run_check=False)
            return t

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return tuple(map(sharded, args)), {name: sharded(t) for name, t in kwargs.items()}

        def after(_: nn.Module, args: Any, results: Any) -> Any:
            if not self.use_local_output:
                return results
            if isinstance(results, tuple):
                return tuple(t.to_local() for t in results)
            return results.to_local()

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module
