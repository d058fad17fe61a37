"""Checkpoints written by some processes and read by others, fused or not."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model_checks import bert, whole
from processes import check
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from trifuse.models.bert import BertModel


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def another(fused: bool) -> BertModel:
    """Returns a BERT whose weights are 0."""
    model = bert() if fused else BertModel(bert().config, add_pooling_layer=False).double()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


@check
def checkpoint_of_two_processes_is_read_by_one_and_by_all() -> None:
    pair = dist.new_group([0, 1])
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = bert().state_dict()
    for writer in (True, False):  # whether the model that writes, or reads, is fused
        folder = Path(os.environ["TRIFUSE_TEST_FOLDER"]) / f"checkpoint {writer}"
        if dist.get_rank() < 2:
            model = another(writer)
            model.load_state_dict(expected)
            written = sharded(model, DeviceMesh.from_group(pair, "cpu"))
            dcp.save(written.state_dict(), checkpoint_id=folder, process_group=pair)
        dist.barrier()
        for reader in (True, False):
            read = sharded(another(reader), everyone).state_dict()
            dcp.load(read, checkpoint_id=folder)
            assert read.keys() == expected.keys()
            for name, t in expected.items():
                assert torch.equal(whole(read[name]), t), name
            alone = another(reader)
            state = alone.state_dict()
            dcp.load(state, checkpoint_id=folder, no_dist=True)
            alone.load_state_dict(state)
            for name, t in expected.items():
                assert torch.equal(alone.state_dict()[name], t), name
