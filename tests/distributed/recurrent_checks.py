"""Stacked LSTMs whose layers lie in several processes: the bits of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import check
from tested_kernels import CPP_KERNELS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import trifuse
from trifuse.distributed import PipelinedLSTM, part_of_batch

T, B, FEATURES, H, L = 11, 3, 7, 20, 5


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def weighted(*tensors: Tensor) -> Tensor:
    """Returns a sum whose gradients differ between elements."""
    total = tensors[0].new_zeros((), dtype=torch.float64)
    for t in tensors:
        total = total + (t * torch.arange(1.0, 1 + t.numel(), dtype=t.dtype).view_as(t).sin()).sum()
    return total


def compare(
    chunk: int,
    dtype: torch.dtype = torch.float32,
    states: bool = True,
    lengths: Tensor | None = None,
    exact: bool = True,
    **options: Any,
) -> None:
    """Compares a pass forward and backward with the LSTM in one process."""
    torch.manual_seed(1)
    lstm = trifuse.nn.LSTM(FEATURES, H, L, **options).to(dtype)
    R = lstm.proj_size or H
    shape = (B, T, FEATURES) if lstm.batch_first else (T, B, FEATURES)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    hx = None
    if states:
        hx = [torch.randn(L, B, n, dtype=dtype, requires_grad=True) for n in (R, H)]
    torch.manual_seed(2)
    out, (h_n, c_n) = lstm(x, hx, lengths=lengths)
    pipeline = PipelinedLSTM(lstm, line(), chunk)
    layers = slice(pipeline.layers.start, pipeline.layers.stop)
    # Each process's loss has the last states of its own layers.
    size = dist.get_world_size()
    bounds = [(r * L // size, (r + 1) * L // size) for r in range(size)]
    losses = [weighted(h_n[a:b], c_n[a:b]) for a, b in bounds]
    sum([weighted(out), *losses]).backward()
    wanted = {name: p.grad.clone() for name, p in lstm.named_parameters()}
    grads = [None if t is None else t.grad.clone() for t in (x, *(hx or (None, None)))]

    lstm.zero_grad()
    mine = x.detach().requires_grad_() if dist.get_rank() == 0 else None
    own = None if hx is None else [t.detach()[layers].clone().requires_grad_() for t in hx]
    torch.manual_seed(2 + dist.get_rank())  # the first process's generator decides
    found, (h, c) = pipeline(mine, own, lengths=lengths)
    (weighted(h, c) + (weighted(found) if is_last() else found.sum())).backward()

    def same(actual: Tensor, expected: Tensor, what: str) -> None:
        difference = (actual - expected).abs().max()
        if exact:
            assert torch.equal(actual, expected), (what, difference)
        else:
            roundings = 4 * torch.finfo(dtype).eps * expected.abs().max()
            assert difference <= roundings, (what, difference, roundings)

    if is_last():
        same(found, out, "output")
    else:
        assert found.shape == (0,)
    same(h, h_n[layers], "h_n")
    same(c, c_n[layers], "c_n")
    if mine is not None:
        same(mine.grad, grads[0], "gradient of the input")
    for t, grad, what in zip(own or (), grads[1:], ("h0", "c0"), strict=False):
        same(t.grad, grad[layers], f"gradient of {what}")
    assert dict(pipeline.named_parameters()).keys() <= wanted.keys()
    for name, p in pipeline.named_parameters():
        same(p.grad, wanted[name], f"gradient of {name}")


@check
def pipelined_lstm() -> None:
    for chunk in (1, 4, 11, 100):
        compare(chunk)
    compare(4, states=False)


@check
def pipelined_lstm_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        compare(4, dtype)


@check
def pipelined_lstm_with_options() -> None:
    for options in (
        {"batch_first": True},
        {"bias": False},
        {"proj_size": 6},
        {"proj_size": 6, "cell_clip": 0.3, "proj_clip": 0.2},
        {"peephole": True, "forget_bias": 1.0},
        {"coupled": True},
        {"layer_norm": True},
        {"recompute": True},
        {"dropout": 0.4},
    ):
        compare(4, **options)


@check
def pipelined_lstm_with_lengths() -> None:
    lengths = torch.tensor([11, 3, 6])
    for chunk, options in itertools.product((2, 4), ({}, {"proj_size": 6}, {"recompute": True})):
        compare(chunk, lengths=lengths, **options)


@check
def pipelined_lstm_on_every_kernel() -> None:
    for kernel in CPP_KERNELS:
        with kernel.serving():
            compare(4)
            compare(4, torch.bfloat16)
    with trifuse.backend("eager"):
        compare(4, exact=False)
        compare(4, torch.bfloat16, exact=False)


@check
def pipelined_lstm_without_gradients() -> None:
    torch.manual_seed(1)
    lstm = trifuse.nn.LSTM(FEATURES, H, L).eval()
    x = torch.randn(T, B, FEATURES)
    expected, _ = lstm(x)
    pipeline = PipelinedLSTM(lstm, line(), 4)
    with torch.no_grad():
        out, _ = pipeline(x)
    assert not out.requires_grad
    assert torch.equal(out, expected) if is_last() else out.numel() == 0


@check
def pipelined_lstm_with_frozen_layers() -> None:
    """Processes without gradients of their own take part in the backward."""
    for frozen in range(dist.get_world_size()):
        torch.manual_seed(1)
        alone, lstm = (trifuse.nn.LSTM(FEATURES, H, L) for _ in range(2))
        lstm.load_state_dict(alone.state_dict())
        x = torch.randn(T, B, FEATURES)
        alone(x)[0].square().sum().backward()
        pipeline = PipelinedLSTM(lstm, line(), 4)
        if dist.get_rank() == frozen:
            pipeline.requires_grad_(False)
        pipeline(x)[0].square().sum().backward()
        for name, p in pipeline.named_parameters():
            if dist.get_rank() == frozen:
                assert p.grad is None
            else:
                assert torch.equal(p.grad, alone.get_parameter(name).grad), name


@check
def pipelined_lstm_under_part_of_batch() -> None:
    """Dropout between layers, on the second half of a batch."""
    torch.manual_seed(1)
    lstm = trifuse.nn.LSTM(FEATURES, H, L, dropout=0.5)
    x = torch.randn(T, 4, FEATURES)
    torch.manual_seed(5)
    with part_of_batch():
        expected, _ = lstm(x)
    pipeline = PipelinedLSTM(lstm, line(), 4)
    torch.manual_seed(5)
    with part_of_batch(batch=(2, 2, 4)):
        out, _ = pipeline(x[:, 2:])
    if is_last():
        assert torch.equal(out, expected[:, 2:])


@check
def pipelined_lstm_refuses_by_name() -> None:
    mesh = line()
    with pytest.raises(NotImplementedError, match="bidirectional"):
        PipelinedLSTM(trifuse.nn.LSTM(FEATURES, H, L, bidirectional=True), mesh)
    with pytest.raises(ValueError, match="mesh: expected at most 1 processes"):
        PipelinedLSTM(trifuse.nn.LSTM(FEATURES, H, 1), mesh)
    with pytest.raises(ValueError, match="chunk"):
        PipelinedLSTM(trifuse.nn.LSTM(FEATURES, H, L), mesh, 0)
    with pytest.raises(TypeError, match=r"lstm: expected a trifuse\.nn\.LSTM"):
        PipelinedLSTM(torch.nn.LSTM(FEATURES, H, L), mesh)
    with pytest.raises(TypeError, match="mesh"):
        PipelinedLSTM(trifuse.nn.LSTM(FEATURES, H, L), None)
    with pytest.raises(NotImplementedError, match="zoneout"):
        PipelinedLSTM(trifuse.nn.LSTM(FEATURES, H, L, zoneout_h=0.1), mesh)(
            torch.randn(T, B, FEATURES)
        )
    with pytest.raises(ValueError, match=r"lengths: expected lengths in \[0, 11\]"):
        PipelinedLSTM(trifuse.nn.LSTM(FEATURES, H, L), mesh)(
            torch.randn(T, B, FEATURES), lengths=torch.tensor([1, 2, 12])
        )
    normed = PipelinedLSTM(trifuse.nn.LSTM(FEATURES, H, L, layer_norm=True), mesh)
    with pytest.raises(NotImplementedError, match="lengths"):
        normed(torch.randn(T, B, FEATURES), lengths=torch.tensor([1, 2, 3]))


@check
def pipelined_lstm_raises_in_every_process() -> None:
    """An argument that is wrong in one process leaves no other process waiting."""
    torch.manual_seed(1)
    lstm = trifuse.nn.LSTM(FEATURES, H, L).eval()
    pipeline = PipelinedLSTM(lstm, line(), 4)
    x, n = torch.randn(T, B, FEATURES), len(pipeline.layers)
    first, last = dist.get_rank() == 0, is_last()
    for mine, wrong, message in (
        (first, {"input": None}, "input: expected a Tensor; got NoneType"),
        (first, {"input": x[0]}, r"input: expected shape \(T, B, I\)"),
        (first, {"input": x[..., 1:]}, "input: expected 7 features"),
        (first, {"input": x.double()}, "weight_ih: expected .*float64"),
        (last, {"hx": x}, "hx: expected a pair"),
        (last, {"hx": (torch.zeros(n, B + 1, H), None)}, "h0: expected shape"),
        (
            last,
            {"hx": (torch.zeros(n, B, H), torch.zeros(n + 1, B, H))},
            f"c0: expected {n} layers",
        ),
        (last, {"lengths": torch.tensor([1, 2, T + 1])}, "lengths: expected lengths in"),
    ):
        given = {"input": x} | (wrong if mine else {})
        # A dtype is wrong for the layers of every process.
        elsewhere = f"process . of the mesh raised|{message}"
        with pytest.raises(Exception, match=message if mine else elsewhere):
            pipeline(**given)
    expected, _ = lstm(x)
    out, _ = pipeline(x)
    assert torch.equal(out, expected) if last else out.numel() == 0
