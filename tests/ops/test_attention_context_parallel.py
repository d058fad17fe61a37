"""Attention raises inside torch's context parallelism, which it does not support."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
import trifuse

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
cu = torch.tensor([0, 8])
before = trifuse.scaled_dot_product_attention(q, k, v)
layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
for frozen in (layer, encoder):
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    trifuse.fuse(frozen, freeze=True)
x = torch.randn(1, 8, 8)
expected = encoder(x)
calls = {
    "padded": lambda: trifuse.scaled_dot_product_attention(q, k, v),
    "packed": lambda: trifuse.varlen_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), cu),
    "module": lambda: trifuse.nn.MultiheadAttention(8, 2, batch_first=True)(
        *[q[0, :1]] * 3, need_weights=False
    ),
    "frozen layer": lambda: layer(x),
    "frozen encoder": lambda: encoder(x),
}
with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
    assert q.shape[2] == 8
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert "context parallelism" in str(error), error
            assert "trifuse.distributed.ring_attention" in str(error), error
        else:
            raise AssertionError(name + " did not raise")
assert torch.equal(trifuse.scaled_dot_product_attention(q, k, v), before)
assert torch.equal(encoder(x), expected)
try:
    from torch.distributed.tensor.experimental._attention import (
        _disable_context_parallel_dispatcher as disable,
        _enable_context_parallel_dispatcher as enable,
    )
except ImportError:
    pass
else:
    enable()
    try:
        calls["padded"]()
    except RuntimeError as error:
        assert "context parallelism" in str(error), error
    else:
        raise AssertionError("the dispatcher alone did not raise")
    finally:
        disable()
    calls["padded"]()
dist.destroy_process_group()
print("raised")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed")
def test_each_rank_raises_instead_of_attending_to_its_own_part(tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, errors in answers:
        assert "raised" in out, errors
