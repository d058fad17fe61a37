"""Dropout that doesn't depend on the number of processes: they drop what one process drops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_checks import R, S, close
from model_checks import (
    bert,
    gradients,
    huggingface_bert,
    loss_of,
    part,
    same_gradients,
    sharded,
    split_by_heads,
    tokens,
)
from processes import check
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

import trifuse
from trifuse.distributed import part_of_batch, ring_attention, shard_sequence
from trifuse.ops.dropout import dropout


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def grid() -> DeviceMesh:
    """Returns a mesh with two processes along its second dimension."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("a", "b"))


def seeded() -> None:
    """Seeds the generators differently in each process: the first process's decides."""
    torch.manual_seed(5 + 100 * dist.get_rank())


# Models ------------------------------------------------------------------------------------------


def alone(make: Callable[[float], nn.Module]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the gradients of one process."""
    model = make(0.3)
    torch.manual_seed(5)
    with part_of_batch():
        loss = loss_of(model, *tokens())
        loss.backward()
    return loss.detach(), gradients(model)


def trained_on_parts(wrap: Callable[[nn.Module], nn.Module]) -> None:
    expected, grads = alone(bert)
    model = wrap(bert(0.3))
    seeded()
    with part_of_batch(line()):
        loss = loss_of(model, *map(part, tokens()))
        loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    close(mean / dist.get_world_size(), expected, "loss")
    same_gradients(gradients(model), grads)


@check
def dropout_under_ddp() -> None:
    trained_on_parts(nn.parallel.DistributedDataParallel)


@check
def dropout_under_fsdp2() -> None:
    trained_on_parts(lambda model: sharded(model, line()))


@check
def dropout_under_tensor_parallelism() -> None:
    expected, grads = alone(huggingface_bert)
    model = split_by_heads(huggingface_bert(0.3), line())
    seeded()
    with part_of_batch(heads=line()):
        loss = loss_of(model, *tokens())
        loss.backward()
    close(loss, expected, "loss")
    same_gradients(gradients(model), grads)


@check
def dropout_under_parts_of_batch_and_heads() -> None:
    mesh = grid()
    expected, _ = alone(huggingface_bert)
    model = split_by_heads(huggingface_bert(0.3), mesh["b"])
    seeded()
    groups, group = mesh["a"].size(), mesh["a"].get_local_rank()
    with part_of_batch(mesh["a"], heads=mesh["b"]):
        loss = loss_of(model, *(t.chunk(groups)[group] for t in tokens())).detach()
    dist.all_reduce(loss, group=mesh["a"].get_group())
    close(loss / groups, expected, "loss")


# DTensors ----------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "dropout": (lambda x: dropout(x, 0.5), (8, 8, 16)),
    "dropout of few": (lambda x: dropout(x, 0.5), (8, 4, 3)),
    "norm": (
        lambda x: trifuse.dropout_add_layer_norm(x, x, dropout_p=0.5, training=True),
        (8, 8, 16),
    ),
    "attention": (
        lambda x: trifuse.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        (8, 4, 5, 16),
    ),
}


def compare(name: str, mesh: DeviceMesh, *placements: Placement) -> None:
    """Compares a call on DTensors, and its gradient, with the call in one process."""
    function, shape = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    torch.manual_seed(5)
    expected = function(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    seeded()
    spread = distribute_tensor(x.detach(), mesh, placements).requires_grad_()
    actual = function(spread)
    (found,) = torch.autograd.grad(actual.square().sum().full_tensor(), spread)
    assert isinstance(found, DTensor)
    close(actual.full_tensor(), expected, name)
    close(found.full_tensor(), grad, f"gradient of {name}")


@check
def dropout_of_dtensors() -> None:
    for name in ("dropout", "dropout of few", "norm", "attention"):
        for placement in (S(0), S(1), R):
            compare(name, line(), placement)
    compare("dropout", line(), S(2))


@check
def dropout_of_dtensors_on_two_dimensions_of_a_mesh() -> None:
    for name in ("dropout", "norm", "attention"):
        for placements in ([S(0), S(1)], [S(1), S(0)], [S(0), S(0)], [R, S(1)]):
            compare(name, grid(), *placements)


@check
def zoneout_of_dtensors() -> None:
    x = torch.randn(3, 8, 5, dtype=torch.float64)
    weights = [torch.randn(8, n, dtype=torch.float64) for n in (5, 2)]

    def lstm(x: Tensor, *weights: Tensor) -> Tensor:
        return trifuse.lstm(x, None, *weights, zoneout_h=0.5, recurrent_dropout=0.3, training=True)[
            0
        ]

    torch.manual_seed(5)
    expected = lstm(x, *weights)
    seeded()
    mesh = line()
    spread = [distribute_tensor(x, mesh, [S(1)])]
    spread += [distribute_tensor(weight, mesh, [R]) for weight in weights]
    close(lstm(*spread).full_tensor(), expected)


@check
def dropout_of_dtensors_under_part_of_batch() -> None:
    """Two processes have the batch's halves, or all of it; in each the tokens are DTensors."""
    mesh = grid()
    x = torch.randn(8, 8, 16, dtype=torch.float64)
    torch.manual_seed(5)
    with part_of_batch():
        expected = dropout(x, 0.5)
    groups, group = mesh["a"].size(), mesh["a"].get_local_rank()
    seeded()
    with part_of_batch(mesh["a"], heads=mesh["b"]):
        mine = distribute_tensor(x.chunk(groups)[group], mesh["b"], [S(1)])
        close(dropout(mine, 0.5).full_tensor(), expected.chunk(groups)[group])


# Parts of sequences ------------------------------------------------------------------------------


@check
def dropout_of_ring_attention() -> None:
    mesh, n = line(), dist.get_world_size()
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 4, 16 * n, 8, dtype=torch.float64) for _ in range(3))
    for method in ("ring", "all_gather", "all_to_all"):
        for balanced in (False, True):
            for options in ({}, {"is_causal": True}, {"window": (5, 1)}):
                whole = [t.clone().requires_grad_() for t in (query, key, value)]
                torch.manual_seed(5)
                expected = trifuse.scaled_dot_product_attention(*whole, dropout_p=0.4, **options)
                expected.square().sum().backward()
                parts = [
                    shard_sequence(t.detach(), mesh, 2, balanced).requires_grad_() for t in whole
                ]
                seeded()
                out = ring_attention(
                    *parts, dropout_p=0.4, mesh=mesh, method=method, balanced=balanced, **options
                )
                out.square().sum().backward()
                what = f"{method} {balanced} {options}"
                close(out, shard_sequence(expected, mesh, 2, balanced), what)
                for t, all_of_it in zip(parts, whole, strict=True):
                    close(t.grad, shard_sequence(all_of_it.grad, mesh, 2, balanced), what)


@check
def dropout_of_ring_attention_with_biases_and_packed_sequences() -> None:
    """Sequences are numbered as a batch, of which processes may have parts too."""
    mesh = grid()
    group, line_of = mesh["a"], mesh["b"]
    groups = group.size()
    torch.manual_seed(1)
    # Each group has three sequences of 40, 8 and 13 tokens, and three tokens left over.
    bounds = [0, 40, 48, 61]
    tokens = torch.randn(3, 64 * groups, 4, 8, dtype=torch.float64)
    slopes = torch.rand(4, dtype=torch.float64)
    for method in ("ring", "all_gather", "all_to_all"):
        for balanced in (False, True):
            torch.manual_seed(5)
            options = {"dropout_p": 0.4, "is_causal": balanced, "alibi_slopes": slopes}
            mine = [t.chunk(groups)[group.get_local_rank()] for t in tokens]
            # One process has the sequences of all groups, with the tokens between left out.
            kept = [t.view(groups, 64, 4, 8)[:, :61].flatten(0, 1) for t in tokens]
            starts = [61 * g + b for g in range(groups) for b in bounds[:-1]]
            with part_of_batch():
                cu_seqlens = torch.tensor([*starts, 61 * groups])
                expected = trifuse.varlen_attention(*kept, cu_seqlens, **options)
            wanted = expected.view(groups, 61, 4, 8)[group.get_local_rank()]
            wanted = torch.cat([wanted, wanted.new_zeros(3, 4, 8)])
            parts = [shard_sequence(t, line_of, 0, balanced) for t in mine]
            seeded()
            with part_of_batch(group, sequence=line_of, balanced=balanced):
                out = ring_attention(
                    *parts,
                    mesh=line_of,
                    method=method,
                    balanced=balanced,
                    cu_seqlens=torch.tensor(bounds),
                    **options,
                )
            close(out, shard_sequence(wanted, line_of, 0, balanced), f"{method} {balanced}")


@check
def dropout_of_a_layer_on_parts_of_sequences() -> None:
    """Attention, norm and dropout under one context, with parts of the batch too."""
    mesh = grid()
    batch, sequence = mesh["a"], mesh["b"]
    torch.manual_seed(1)
    x = torch.randn(4, 64, 32, dtype=torch.float64)

    def layer(x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        x = attention(q, q, q, dropout_p=0.3, is_causal=True).transpose(1, 2).flatten(2)
        return trifuse.dropout_add_layer_norm(dropout(x, 0.2), x, dropout_p=0.4, training=True)

    torch.manual_seed(5)
    with part_of_batch():
        expected = layer(x, trifuse.scaled_dot_product_attention)
    mine = [t.chunk(batch.size())[batch.get_local_rank()] for t in (x, expected)]
    for method in ("ring", "all_to_all"):
        for balanced in (False, True):
            local, wanted = (shard_sequence(t, sequence, 1, balanced) for t in mine)
            seeded()
            with part_of_batch(batch, sequence=sequence, balanced=balanced):
                out = layer(
                    local,
                    lambda *qkv, balanced=balanced, method=method, **options: ring_attention(
                        *qkv, mesh=sequence, balanced=balanced, method=method, **options
                    ),
                )
            close(out, wanted, f"{method} {balanced}")


# Pipelines ---------------------------------------------------------------------------------------

CHUNKS = 4


class Block(nn.Module):
    """Dropout of every kind that a stage may have: in attention, in a norm, alone, in an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = trifuse.nn.MultiheadAttention(
            16, 2, dropout=0.3, batch_first=True, dtype=torch.float64
        )
        self.norm = trifuse.nn.DropoutAddLayerNorm(16, p=0.3, dtype=torch.float64)
        self.drop = trifuse.nn.Dropout(0.2)
        self.lstm = trifuse.nn.LSTM(16, 16, batch_first=True, zoneout_h=0.3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.attention(x, x, x, need_weights=False)[0], x)
        return self.lstm(self.drop(x))[0].contiguous()  # torch sends no other


def blocks(count: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(count)))


def batch_and_target() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(16, 5, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, target


def compare_pipeline(
    schedule_class: Any,
    mesh: DeviceMesh,
    batch: DeviceMesh | None = None,
    per_process: int = 1,
    checkpointed: bool = False,
) -> None:
    """Compares the loss and gradients of a pipeline with one process's."""
    from torch.distributed.pipelining import PipelineStage
    from torch.utils.checkpoint import checkpoint

    rank, size = mesh.get_local_rank(), mesh.size()
    count = size * per_process
    alone, model = blocks(count), blocks(count)
    if checkpointed:
        for block in model:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    x, target = batch_and_target()
    torch.manual_seed(5)
    with part_of_batch():
        expected = nn.functional.mse_loss(alone(x), target)
        expected.backward()
    group = mesh.get_group()
    stages = [
        PipelineStage(model[i], i, count, torch.device("cpu"), group=group)
        for i in range(rank, count, size)
    ]
    given = stages if per_process > 1 else stages[0]
    schedule = schedule_class(given, CHUNKS, loss_fn=nn.functional.mse_loss)
    if batch is not None:
        x, target = (t.chunk(batch.size())[batch.get_local_rank()] for t in (x, target))
    seeded()
    losses: list[Tensor] = []
    with part_of_batch(batch, stages=given, microbatches=CHUNKS):
        last = {"target": target, "losses": losses} if rank == size - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **last)
    if losses:
        loss = torch.stack(losses).mean().detach()
        if batch is not None:
            dist.all_reduce(loss, group=batch.get_group())
            loss /= batch.size()
        close(loss, expected, "loss")
    for i in range(rank, count, size):
        for (name, p), q in zip(model[i].named_parameters(), alone[i].parameters(), strict=True):
            grad = p.grad
            if batch is not None:
                dist.all_reduce(grad, group=batch.get_group())
                grad /= batch.size()
            close(grad, q.grad, f"{i} {name}")


@check
def dropout_in_a_pipeline() -> None:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        compare_pipeline(schedule_class, line())
    compare_pipeline(Schedule1F1B, line(), checkpointed=True)


@check
def dropout_in_a_pipeline_of_two_stages_a_process() -> None:
    from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

    for schedule_class in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        compare_pipeline(schedule_class, line(), per_process=2)


@check
def dropout_in_pipelines_of_parts_of_the_batch() -> None:
    from torch.distributed.pipelining import Schedule1F1B

    compare_pipeline(Schedule1F1B, grid()["b"], grid()["a"])


@check
def wrong_stages_raise() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, pipeline

    of_torch = "stages: expected stages of torch"
    with (
        pytest.raises(TypeError, match=of_torch),
        part_of_batch(stages=nn.Linear(1, 1), microbatches=1),
    ):
        pass
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    stage = PipelineStage(trifuse.nn.Dropout(0.5), 0, 1, torch.device("cpu"), group=alone)
    with pytest.raises(ValueError, match="microbatches"), part_of_batch(stages=stage):
        pass
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    x = torch.randn(4, 3, requires_grad=True)
    with part_of_batch(stages=stage, microbatches=2):
        schedule.step(x, target=x)
        with pytest.raises(RuntimeError, match="one step"):
            schedule.step(x, target=x)
    traced = pipeline(trifuse.nn.Dropout(0.5), mb_args=(x,)).build_stage(
        0, torch.device("cpu"), alone
    )
    with (
        pytest.raises(NotImplementedError, match=r"stages: .* traced"),
        part_of_batch(stages=traced, microbatches=2),
    ):
        pass
    x = torch.randn(3, 3, requires_grad=True)
    divides = "microbatches: expected a batch that 2 divides"
    with pytest.raises(ValueError, match=divides), part_of_batch(stages=stage, microbatches=2):
        schedule.step(x, target=x)


# Bits -------------------------------------------------------------------------------------------

EIGHT = 8  # sequences, heads, pieces of sequences and layers: the most processes


def dropped_rows(x: Tensor) -> tuple[Tensor, ...]:
    """Returns results in which what is dropped is 0, for x of ones, (8 or a part, length, 16)."""
    _, total = trifuse.dropout_add_layer_norm(
        x, torch.zeros_like(x), dropout_p=0.5, training=True, prenorm=True
    )
    return dropout(x, 0.5), total


def dropped_weights(heads: int, rows: int, attention: Callable[..., Tensor], **options) -> Tensor:
    """Returns the attention weights of ``rows`` queries, by a value that is the identity."""
    query, key = (torch.zeros(2, heads, rows, 8) for _ in range(2))
    length = 16 * EIGHT
    value = torch.eye(length).expand(2, heads, length, length)
    mesh, balanced = options.get("mesh"), options.get("balanced", False)
    if mesh is not None:
        value = shard_sequence(value, mesh, 2, balanced)
    return attention(query, key, value, dropout_p=0.5, **options)


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Checks that the same elements are dropped, and that some are."""
    assert 0.3 < (expected == 0).float().mean() < 0.7, what
    assert torch.equal(actual == 0, expected == 0), what


@check
def dropped_elements_are_those_of_one_process_bit_for_bit() -> None:
    mesh, n, rank = line(), dist.get_world_size(), dist.get_rank()
    length = 16 * EIGHT
    ones = torch.ones(EIGHT, length, 16)

    def expected(function: Callable[[], Any]) -> Any:
        torch.manual_seed(5)
        with part_of_batch():
            return function()

    rows = expected(lambda: dropped_rows(ones))
    seeded()
    with part_of_batch(mesh):
        for mine, whole in zip(dropped_rows(ones.chunk(n)[rank]), rows, strict=True):
            same(mine, whole.chunk(n)[rank], "parts of the batch")
    for balanced in (False, True):
        seeded()
        with part_of_batch(sequence=mesh, balanced=balanced):
            mine = dropped_rows(shard_sequence(ones, mesh, 1, balanced))
        for t, whole in zip(mine, rows, strict=True):
            same(t, shard_sequence(whole, mesh, 1, balanced), "parts of sequences")
    for d in (0, 1):
        torch.manual_seed(5)
        whole = dropout(ones, 0.5)
        seeded()
        mine = dropout(distribute_tensor(ones, mesh, [S(d)]), 0.5)
        same(mine.to_local(), whole.chunk(n, d)[rank], "DTensors")

    attention = trifuse.scaled_dot_product_attention
    weights = expected(lambda: dropped_weights(EIGHT, length, attention))
    seeded()
    with part_of_batch(heads=mesh):
        mine = dropped_weights(EIGHT // n, length, attention)
        same(mine, weights.chunk(n, 1)[rank], "parts of the heads")
    for method in ("ring", "all_gather", "all_to_all"):
        for balanced in (False, True):
            seeded()
            with part_of_batch(sequence=mesh, balanced=balanced):
                options = {"mesh": mesh, "method": method, "balanced": balanced}
                mine = dropped_weights(EIGHT, length // n, ring_attention, **options)
            same(mine, shard_sequence(weights, mesh, 2, balanced), f"{method} {balanced}")


@check
def a_pipeline_drops_what_one_process_drops_bit_for_bit() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    n, rank = dist.get_world_size(), dist.get_rank()

    def layers(count: int) -> nn.Sequential:
        """Each is the identity, with a parameter for the backward, and its dropout."""
        linear = [nn.Linear(16, 16, bias=False) for _ in range(count)]
        for each in linear:
            nn.init.eye_(each.weight)
        drop = [trifuse.nn.Dropout(1 / 16) for _ in range(count)]
        return nn.Sequential(*(m for pair in zip(linear, drop, strict=True) for m in pair))

    alone, x = layers(EIGHT), torch.ones(EIGHT, 3, 16)
    torch.manual_seed(5)
    with part_of_batch():
        expected = alone(x)
    mine = layers(EIGHT)[2 * rank * EIGHT // n : 2 * (rank + 1) * EIGHT // n]
    stage = PipelineStage(mine, rank, n, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=nn.functional.mse_loss)
    seeded()
    with part_of_batch(stages=stage, microbatches=CHUNKS):
        last = {"target": x} if rank == n - 1 else {}
        out = schedule.step(*([x] if rank == 0 else []), **last)
    if rank == n - 1:
        same(out, expected, "a pipeline")
        assert torch.equal(out, expected)


@check
def a_step_that_fails_leaves_no_state_to_the_next() -> None:
    """The first stage gives its state, and the step fails before the second takes it."""
    from torch.distributed.pipelining import PipelineStage

    n, rank = dist.get_world_size(), dist.get_rank()
    ones = torch.ones(EIGHT, 3, 16)
    stage = PipelineStage(trifuse.nn.Dropout(0.5), rank, n, torch.device("cpu"))
    stage.forward_one_chunk = lambda chunk, args: dropout(*args, 0.5)

    def begin() -> None:
        with part_of_batch(stages=stage, microbatches=1):
            if rank == 0:
                stage.forward_one_chunk(0, (ones,))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        begin()
    torch.manual_seed(5)
    with part_of_batch():
        expected = [dropout(ones, 0.5) for _ in range(n)]
    seeded()
    with part_of_batch(stages=stage, microbatches=1):
        out = stage.forward_one_chunk(0, (ones,))
    same(out, expected[rank], "the step after one that failed")


# The context -------------------------------------------------------------------------------------


@check
def unequal_parts_of_the_batch() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    sizes = [1 + r % 2 for r in range(n)]
    total, first = sum(sizes), sum(sizes[:rank])
    x = torch.randn(total, 3, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    with part_of_batch():
        expected = dropout(x, 0.5)
    seeded()
    with part_of_batch(line(), batch=(first, sizes[rank], total)):
        mine = dropout(x[first : first + sizes[rank]], 0.5)
    assert torch.equal(mine, expected[first : first + sizes[rank]])


@check
def generators_go_on_as_before() -> None:
    seeded()
    with part_of_batch(line()):
        shared = torch.rand(1)
    own = torch.rand(1)
    every = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(every, shared)
    assert all(torch.equal(shared, other) for other in every)
    dist.all_gather(every, own)
    assert len({t.item() for t in every}) == len(every)


@check
def wrong_parts_raise() -> None:
    for wrong in ((0, 0, 4), (3, 2, 4), (-1, 2, 4)):
        with pytest.raises(ValueError, match="batch"), part_of_batch(batch=wrong):
            pass
    with pytest.raises(ValueError, match="batch_dim"), part_of_batch(batch_dim=2):
        pass
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh"), part_of_batch("cpu"):
        pass
    with pytest.raises(ValueError, match="heads: expected one dim"), part_of_batch(heads=grid()):
        pass
