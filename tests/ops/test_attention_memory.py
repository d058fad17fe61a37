"""No (Lq, Lk) matrix is ever stored."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from fault_cases import in_process

import trifuse
from trifuse import backends


def status(field: str) -> float:
    """Returns a number of MiB from what /proc says of this process."""
    with open("/proc/self/status") as lines:
        (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 1024


def step(L: int, options: str, B: int = 1, E: int = 64) -> float:
    """Returns the peak of a training step in MiB, beyond inputs, outputs and gradients.

    It is read from /proc: getrusage's begins with the peak of the parent process. Peaks of import
    and warm-up count too, which can only make the figure too large.
    """
    given: dict[str, Any] = eval(options, {"L": L, "torch": torch})
    x = [torch.randn(B, 2, L, E, requires_grad=True) for _ in range(3)]
    grad = torch.randn(B, 2, L, E)
    before = status("VmRSS")
    out = trifuse.scaled_dot_product_attention(*x, **given)
    biases = [bias for bias in given.values() if getattr(bias, "requires_grad", False)]
    grads = torch.autograd.grad(out, x + biases, grad)
    return status("VmHWM") - before - sum(t.nbytes for t in (out, *grads)) / 2**20


def peak_is_small(options: str) -> None:
    torch.set_num_threads(2)
    step(64, options)
    extra = step(8192, options)
    assert 0 < extra < 16, f"{extra:.0f} MiB beyond inputs, outputs and gradients"


@pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "options",
    [
        "{}",
        "{'is_causal': True}",
        "{'dropout_p': 0.1}",
        "{'relative_bias': torch.randn(2, 2 * L - 1, requires_grad=True)}",
        "{'alibi_slopes': torch.rand(2, requires_grad=True)}",
        "{'relative_index': torch.randint(40, (2 * L - 1,)), **{name: torch.randn(*shape, 40, "
        "requires_grad=True) for name, shape in (('relative_bias', (2,)), ('query_bias', (1, 2, "
        "L)), ('key_bias', (1, 2, L)))}}",
    ],
)
def test_peak_memory_of_a_long_sequence(options):
    """(1, 2, 8192, 64) in float32, forward and backward: under 16 MiB, where L x L is 512 MiB.

    In a separate process, because the peak is per process.
    """
    in_process(peak_is_small, options)


def peak_of_a_batch_is_small() -> None:
    torch.set_num_threads(2)
    table = "{'relative_bias': torch.randn(2, 2 * L - 1, requires_grad=True)}"
    step(64, table)
    extra = step(2048, table, B=64, E=8)
    assert 0 < extra < 9, f"{extra:.0f} MiB beyond inputs, outputs and gradients"


@pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_a_table_that_a_batch_shares():
    """(64, 2, 2048, 8): sums of the table's gradient for each sequence would take 10 MiB."""
    in_process(peak_of_a_batch_is_small)


def test_saved_tensors_are_the_inputs_and_two_results(backend):
    """A training step saves nothing of size (Lq, Lk) for the backward."""
    saved = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    inputs = [torch.randn(2, 2, 9, 4, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trifuse.scaled_dot_product_attention(*inputs, dropout_p=0.5, is_causal=True)
    shapes = sorted(tuple(x.shape) for x in saved)
    assert shapes == [(1,), (2, 2, 9), *[(2, 2, 9, 4)] * 4]
