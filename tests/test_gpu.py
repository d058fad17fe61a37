"""Triton's and CUDA's kernels on a GPU, held to what the formulas give on the CPU in float64.

Elsewhere Triton's kernels run in its interpreter and CUDA's under a model of CUDA, which see
neither races nor compilers' mistakes. So besides the numbers, calls are repeated and must give the
same bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from random import Random
from typing import Any

import attention_cases as attention
import dropout_add_layer_norm_cases as dropout_add_layer_norm
import lstm_cases as lstm
import pytest
import torch
from conftest import Kernel
from numerics import Accuracy
from test_kernels_attention import FEATURES
from torch import Tensor

import trifuse
from trifuse import backends

# cuBLAS gives the same bits every time only with a workspace of a fixed size, and torch insists.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DEVICE = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["triton", "cuda"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    (operator,) = request.node.iter_markers("operator")
    call = backends.Call(operator.args[0], DEVICE, torch.float32)
    why_not = backends._WHY_NOT[request.param](call)
    if why_not is not None:
        pytest.skip(why_not)
    return Kernel(request.param)


@pytest.fixture(autouse=True)
def _calls_go_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``run`` of the three modules of cases computes there, with the seeds that the CPU draws."""
    draw = torch.randint

    def randint(*args: Any, device: Any = None, **options: Any) -> Tensor:
        return draw(*args, **options).to(device or "cpu")

    monkeypatch.setattr(torch, "randint", randint)
    for module in (attention, dropout_add_layer_norm, lstm):

        def there(case: Any, *args: Any, _run: Any = module.run, **options: Any) -> Any:
            return moved(_run(moved(case, DEVICE), *args, **options), "cpu")

        monkeypatch.setattr(module, "run", there)


def moved(value: Any, device: str) -> Any:
    """All tensors in a value on another device, each in its own memory layout."""
    if isinstance(value, Tensor):
        # What lies between its elements goes along.
        flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        return flat.to(device).as_strided(value.size(), value.stride(), value.storage_offset())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: moved(field, device) for name, field in vars(value).items()}
        return dataclasses.replace(value, **fields)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, tuple):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


operator = pytest.mark.operator


# Attention --------------------------------------------------------------------------------------


def check_attention(kernel: Kernel, *cases: attention.Case) -> Accuracy:
    accuracy = Accuracy(kernel.name)
    for case in cases:
        judged = attention.judge(case)
        with kernel.serving():
            attention.record_accuracy(accuracy, case, judged)
    return accuracy


@operator("attention")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(kernel, dtype, feature):
    check_attention(kernel, attention.make(**{"Lq": 70, "Lk": 45} | FEATURES[feature], dtype=dtype))


@operator("attention")
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_calls_drawn_at_random(kernel, dtype):
    random = Random(3)
    drawn = (attention.draw_case(random, dtype) for _ in itertools.count())
    given = (case for case in drawn if case.query.numel() and case.key.shape[-1] <= 256)
    check_attention(kernel, *itertools.islice(given, 100)).conclude()


@operator("attention")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("E", "Ev"), [(1, 256), (33, 64), (64, 64), (128, 40), (256, 3)])
def test_attention_of_many_tiles(kernel, dtype, E, Ev):
    mask = attention.normal(300, 500)
    for options in ({}, {"is_causal": True}, {"dropout_p": 0.1}, {"mask": mask}):
        check_attention(kernel, attention.make(2, 3, 300, 500, E, Ev, dtype=dtype, **options))


# Dropout + residual + LayerNorm -----------------------------------------------------------------


@operator("dropout_add_layer_norm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_add_layer_norm_calls_drawn_at_random(kernel, dtype):
    random, accuracy = Random(0), Accuracy(kernel.name)
    for _ in range(150):
        case = dropout_add_layer_norm.draw_case(random, dtype)
        dropout_add_layer_norm.record_accuracy({kernel: accuracy}, case)
    accuracy.conclude()


@operator("dropout_add_layer_norm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [256, 768, 1000, 1024, 2048, 4096, 8192, 12_288, 70_001])
def test_dropout_add_layer_norm_of_any_width(kernel, dtype, N):
    case = dropout_add_layer_norm.make(300 if N < 10_000 else 5, N, dtype=dtype, dropout_p=0.1)
    dropout_add_layer_norm.record_accuracy({kernel: Accuracy(kernel.name)}, case)


# LSTM -------------------------------------------------------------------------------------------


@operator("lstm")
@pytest.mark.parametrize("variant", lstm.VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lstm(kernel, dtype, variant):
    case = lstm.make(dtype=dtype, **lstm.VARIANTS[variant])
    lstm.record_accuracy({kernel: Accuracy(kernel.name)}, case)


@operator("lstm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_lstm_calls_drawn_at_random(kernel, dtype):
    random, accuracy = Random(0), Accuracy(kernel.name)
    for _ in range(40):
        lstm.record_accuracy({kernel: accuracy}, lstm.draw_case(random, dtype))
    accuracy.conclude()


@operator("lstm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("H", [96, 512])
def test_lstm_of_many_blocks(kernel, dtype, H):
    lengths = [9 - b % 9 for b in range(20)]
    case = lstm.make(9, 20, 40, H, dtype=dtype, lengths=lengths, reverse=(False, True))
    lstm.record_accuracy({kernel: Accuracy(kernel.name)}, case)


@operator("lstm")
@pytest.mark.parametrize("kernel", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [2, 4])
def test_lstm_layers_side_by_side(kernel, dtype, layers):
    lengths = [40 - b % 40 for b in range(20)]
    case = lstm.make(40, 20, 40, 256, dtype=dtype, lengths=lengths, layers=layers)
    lstm.record_accuracy({kernel: Accuracy(kernel.name)}, case)


@operator("lstm")
def test_lstm_that_fills_registers_and_shared_memory(kernel):
    lengths = [3 - b % 3 for b in range(20)]
    case = lstm.make(3, 20, 40, 2048, dtype=torch.bfloat16, lengths=lengths)
    lstm.record_accuracy({kernel: Accuracy(kernel.name)}, case)


@pytest.mark.parametrize(
    ("H", "projection", "directions"), [(1024, None, 2), (2048, None, 1), (4096, 512, 1)]
)
def test_lstms_that_are_one_launch(H, projection, directions):
    """By what the driver says of the compiled kernels, on a GPU with as many multiprocessors."""
    if not backends._CUDA_OPERATORS:
        pytest.skip("this build holds no CUDA kernels")
    if torch.cuda.get_device_properties(0).multi_processor_count < 132:
        pytest.skip("a smaller GPU")

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)

    R = projection or H
    weight_hr = empty(R, H) if projection else None
    parameters = [empty(4 * H, 1), empty(4 * H, R), None, None, weight_hr, *[None] * 5]
    for backward in (False, True):
        why = torch.ops.trifuse.lstm_step_by_step.cuda(
            empty(1, 1, 1), parameters * directions, False, backward
        )
        assert why == ""


@operator("lstm")
def test_elmo_s_cell(kernel):
    options: dict[str, Any] = {"projection": 512, "cell_clip": 3.0, "proj_clip": 3.0}
    case = lstm.make(3, 16, 512, 4096, dtype=torch.bfloat16, **options)
    lstm.record_accuracy({kernel: Accuracy(kernel.name)}, case)


# Races, graphs ----------------------------------------------------------------------------------

CALLS: dict[str, Any] = {
    "attention": lambda: (
        attention,
        attention.make(4, 8, 300, 500, 64, dtype=torch.bfloat16, mask=attention.normal(300, 500)),
    ),
    "dropout_add_layer_norm": lambda: (
        dropout_add_layer_norm,
        dropout_add_layer_norm.make(2000, 1024, dtype=torch.bfloat16, dropout_p=0.1),
    ),
    "lstm": lambda: (
        lstm,
        lstm.make(50, 16, 128, 512, dtype=torch.bfloat16, reverse=(False, True)),
    ),
}
each_operator = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=operator(name)) for name in CALLS]
)


@each_operator
def test_repeated_calls_give_the_same_bits(kernel, name):
    module, case = CALLS[name]()
    with kernel.serving():
        first = module.run(case)
        for _ in range(20):
            module.assert_same_bits(module.run(case), first)


@each_operator
def test_a_graph_repeats_the_call(kernel, name):
    """Forward and backward, captured once, replayed on other numbers."""
    x = torch.randn(4, 8, 128, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w_ih, w_hh = torch.randn(2, 4 * 64, 64, device=DEVICE, dtype=torch.bfloat16) / 8
    function = {
        "attention": lambda: trifuse.scaled_dot_product_attention(x, x, x),
        "dropout_add_layer_norm": lambda: trifuse.dropout_add_layer_norm(x, x),
        "lstm": lambda: trifuse.lstm(x[0], None, w_ih, w_hh)[0],
    }[name]

    def call() -> tuple[Tensor, Tensor]:
        out = function()
        (grad,) = torch.autograd.grad(out, x, out.detach())
        return out.detach(), grad

    # Poisoning memory that is not initialised is a kernel too, which a graph would repeat.
    torch.use_deterministic_algorithms(False)
    with kernel.serving():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for seed in range(3):
            with torch.no_grad():
                x.copy_(attention.normal(*x.shape, seed=seed))
            graph.replay()
            torch.testing.assert_close(captured, call(), rtol=0, atol=0)
