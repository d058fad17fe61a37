"""Fused models cut into stages, one for each process, by torch.distributed.pipelining."""

from __future__ import annotations

import torch
import torch.distributed as dist
from dtensor_checks import close
from model_checks import BATCH, LENGTH, bert, tokens
from processes import check
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    pipeline,
)

import trifuse

CHUNKS = 4


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def hidden() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    x, target = (torch.randn(BATCH, LENGTH, 32, dtype=torch.float64) for _ in range(2))
    return x, target


def transformer() -> nn.Sequential:
    """Returns as many fused Transformer layers as there are processes."""
    torch.manual_seed(1)
    layers = [
        nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, dtype=torch.float64)
        for _ in range(dist.get_world_size())
    ]
    model = nn.Sequential(*layers)
    assert trifuse.fuse(model).swapped
    return model


def run(stage, schedule_class, expected: Tensor, x: Tensor | None = None) -> None:
    """Runs a step, and compares the loss with that of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given, target = hidden()
    x = given if x is None else x
    schedule = schedule_class(stage, CHUNKS, loss_fn=loss_of)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=target, losses=losses)
        close(torch.stack(losses).mean(), expected, "loss")
    else:
        schedule.step()


@check
def pipeline_of_transformer_layers() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = transformer()
    x, target = hidden()
    expected = loss_of(alone(x), target)
    expected.backward()
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        layer = transformer()[rank]
        stage = PipelineStage(layer, rank, size, torch.device("cpu"))
        run(stage, schedule_class, expected)
        for (name, p), q in zip(layer.named_parameters(), alone[rank].parameters(), strict=True):
            close(p.grad, q.grad, name)


class Layers(nn.Module):
    """The layers of a fused BERT, as many as there are processes."""

    def __init__(self) -> None:
        super().__init__()
        encoder = bert().encoder
        self.layer = nn.ModuleList(
            [bert().encoder.layer[i % len(encoder.layer)] for i in range(dist.get_world_size())]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


@check
def pipeline_traced_from_bert_layers() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, model = Layers(), Layers()
    x, target = hidden()
    expected = loss_of(alone(x), target)
    expected.backward()
    split = {f"layer.{i}": SplitPoint.BEGINNING for i in range(1, size)}
    pipe = pipeline(model, mb_args=(x.chunk(CHUNKS)[0],), split_spec=split)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    run(stage, ScheduleGPipe, expected)
    found = dict(stage.submod.named_parameters())
    wanted = dict(alone.named_parameters())
    mine = {name: p for name, p in wanted.items() if name.startswith(f"layer.{rank}.")}
    assert found.keys() == mine.keys(), (found.keys(), mine.keys())
    for name, p in mine.items():
        close(found[name].grad, p.grad, name)


@check
def pipeline_of_a_bert_from_its_tokens() -> None:
    """The first stage has the embeddings too."""

    def stages() -> nn.Sequential:
        layers: list[nn.Module] = list(Layers().layer)
        layers[0] = nn.Sequential(bert().embeddings, layers[0])
        return nn.Sequential(*layers)

    rank, size = dist.get_rank(), dist.get_world_size()
    alone, mine = stages(), stages()[rank]
    ids, _ = tokens()
    expected = loss_of(alone(ids), hidden()[1])
    expected.backward()
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        mine.zero_grad()
        run(PipelineStage(mine, rank, size, torch.device("cpu")), schedule_class, expected, ids)
        for (name, p), q in zip(mine.named_parameters(), alone[rank].parameters(), strict=True):
            close(p.grad, q.grad, name)
