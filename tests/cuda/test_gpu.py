"""Triton and CUDA kernels on a GPU, compared with the formulas in float64 on the CPU.

Other tests run the Triton kernels in Triton's interpreter and the CUDA kernels under a model of
CUDA, neither of which shows races or compiler bugs. So calls are also repeated here, and must give
the same bits.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import attention_cases as attention
import dropout_add_layer_norm_cases as dropout_add_layer_norm
import gru_cases as gru
import lstm_cases as lstm
import pytest
import torch
from numerics import Accuracy
from test_kernels_attention import FEATURES, INDEXED, ONE_HEAD, indexed
from tested_kernels import Kernel
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

import trifuse
from trifuse import backends
from trifuse.models import bert
from trifuse.nn import packing, post_norm
from trifuse.ops import _fast_path

# cuBLAS repeats its bits only with a workspace of fixed size; without this setting torch raises.
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
    """Runs cases on the GPU, with the seeds that the CPU draws.

    The fast path draws its own from the GPU's generator, so it has a test of its own."""
    monkeypatch.setattr(_fast_path, "_cuda_serves", lambda call: False)
    draw = torch.randint

    def randint(*args: Any, device: Any = None, **options: Any) -> Tensor:
        return draw(*args, **options).to(device or "cpu")

    for module, name in (
        (attention, "run"),
        (attention, "run_packed"),
        (dropout_add_layer_norm, "run"),
        (lstm, "run"),
        (gru, "run"),
    ):
        run = getattr(module, name)

        def there(*args: Any, _run: Any = run, **options: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(torch, "randint", randint)
                return moved(_run(*moved(args, DEVICE), **options), "cpu")

        monkeypatch.setattr(module, name, there)


@pytest.fixture(autouse=True)
def _a_lost_gpu_is_nobody_else_s() -> Iterator[None]:
    """Ends a worker whose GPU is lost, as all its later calls would fail; xdist starts another."""
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"the GPU is lost: {error}", returncode=1)
        print(f"the GPU is lost: {error}", file=sys.__stderr__, flush=True)
        os._exit(1)


def moved(value: Any, device: str) -> Any:
    """Moves all tensors in a value to another device, keeping their memory layouts."""
    if isinstance(value, Tensor):
        # Copies the whole storage, with the gaps between elements.
        flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        return flat.to(device).as_strided(value.size(), value.stride(), value.storage_offset())
    if isinstance(value, gru.Case):
        there = copy.copy(value)
        there.tensors, there.lengths = moved(value.tensors, device), moved(value.lengths, device)
        there.upstream = [moved(t, device) for t in value.upstream]
        return there
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


# A gradient that fewer calls have is not held to the rule for means: Triton draws five calls of a
# recurrent layer, and one of them may be the only one with biases.
CALLS_OF_A_MEAN = 4


def drawn(kernel: Kernel, count: int) -> range:
    """The calls to draw at random: fewer for Triton, which takes seconds to compile each."""
    return range(count // 8 if kernel.backend == "triton" else count)


# Attention --------------------------------------------------------------------------------------


def check_attention(kernel: Kernel, *cases: attention.Case) -> Accuracy:
    accuracy = Accuracy(kernel.name)
    for case in cases:
        judged = attention.judge(case)
        with kernel.serving():
            attention.record_accuracy(accuracy, case, judged)
    return accuracy


@operator("attention")
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_calls_drawn_at_random(kernel, dtype):
    random = Random(3)
    cases = (attention.draw_case(random, dtype) for _ in itertools.count())
    given = (case for case in cases if case.query.numel() and case.key.shape[-1] <= 256)
    # Seven of the calls count for a table of queries. Eager torch's errors in its gradient nearly
    # cancel, so a mean over so few says little; other tests take it over more calls.
    check_attention(kernel, *(next(given) for _ in drawn(kernel, 80))).conclude(fewest=8)


@operator("attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("longest", [600, 9000])
def test_attention_of_few_queries_drawn_at_random(kernel, dtype, longest):
    random = Random(4)
    cases = (attention.draw_decoding_case(random, dtype, longest) for _ in drawn(kernel, 40))
    check_attention(kernel, *cases).conclude()


def check_packed_few_queries(
    kernel: Kernel, dtype: torch.dtype, lengths_q: list[int], lengths_k: list[int]
) -> None:
    """Checks that packed sequences have the bits of each padded, and follow the numerics rule.

    Padding makes the keys of each sequence more than Triton's kernels compute at once.
    """
    sizes: dict[str, Any] = {"H": 8, "Hkv": 2, "E": 128, "dtype": dtype}
    case = attention.packed(
        lengths_q, lengths_k, rest=9, is_causal=CausalVariant.LOWER_RIGHT, **sizes
    )
    cu = (attention.boundaries(lengths_q), attention.boundaries(lengths_k))
    accuracy = Accuracy(kernel.name)
    with kernel.serving():
        bounds = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
        together = attention.run_packed(case, *cu, **bounds)
        for b, (begin, end) in enumerate(itertools.pairwise(cu[0].tolist())):
            if begin == end:
                continue
            alone = attention.by_itself(case, lengths_q, lengths_k, b)
            padded = attention.run(attention.with_more_keys(alone, 600))
            judged = attention.judge(alone) if lengths_k[b] > 0 else None
            for name in ("out", "lse"):
                mine = getattr(together, name)[:, :, begin:end]
                attention.assert_equal(mine, getattr(padded, name), name)
                if judged is not None:
                    accuracy.record(name, mine, *(getattr(x, name) for x in judged))
    assert together.out[:, :, -9:].eq(0).all()
    assert together.lse[:, :, -9:].eq(-float("inf")).all()


@operator("attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 3])
def test_packed_few_queries_over_keys_of_very_different_lengths(kernel, dtype, queries):
    random = Random(6)
    lengths_k = [9000, 0, 1, 700, *(random.choice((2, 40, 256, 600, 3000)) for _ in range(40))]
    lengths_q = [queries, *(random.randint(0, queries) for _ in lengths_k[1:])]
    check_packed_few_queries(kernel, dtype, lengths_q, lengths_k)


@operator("attention")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(kernel, dtype, feature):
    check_attention(kernel, attention.make(**{"Lq": 70, "Lk": 45} | FEATURES[feature], dtype=dtype))


@operator("attention")
@pytest.mark.parametrize("feature", INDEXED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_tables(kernel, dtype, feature):
    options = ONE_HEAD | INDEXED[feature]
    kind = "distances" if "distances" in feature else "pairs"
    tables = indexed(options["Lq"], options["Lk"], 2, options["H"], kind)
    case = attention.make(**options | tables, dtype=dtype)
    check_attention(kernel, case)


@operator("attention")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("E", "Ev"), [(1, 256), (33, 64), (64, 64), (128, 40), (256, 3)])
def test_attention_of_many_tiles(kernel, dtype, E, Ev):
    mask = attention.normal(300, 500)
    for options in ({}, {"is_causal": True}, {"dropout_p": 0.1}, {"mask": mask}):
        check_attention(kernel, attention.make(2, 3, 300, 500, E, Ev, dtype=dtype, **options))


@operator("attention")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_packed_sequences_are_what_each_is_by_itself(kernel, dtype, head_dim):
    """Bit for bit, wherever a sequence begins. Tokens past the last sequence give 0."""
    lengths, rest = [200, 0, 70, 129], 9
    sizes: dict[str, Any] = {"H": 4, "Hkv": 2, "E": head_dim, "dtype": dtype, "is_causal": True}
    case = attention.packed(lengths, lengths, rest=rest, **sizes)
    cu = attention.boundaries(lengths)
    fields = ("query", "key", "value", "grad_out", "grad_lse")
    with kernel.serving():
        together = attention.run_packed(case, cu, None)
        for begin, end in itertools.pairwise(cu.unique().tolist()):
            tokens = {field: getattr(case, field)[:, :, begin:end] for field in fields}
            alone = attention.run(dataclasses.replace(case, **tokens))
            whole = [None if t is None else t[:, :, begin:end] for t in together]
            attention.assert_same_bits(attention.Results(*whole), alone)
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        assert not getattr(together, name)[:, :, -rest:].any(), name


WRONG_LENGTHS = {
    "key_lengths": "trifuse.scaled_dot_product_attention(x, x, x, key_lengths=wrong[:1] + 9)",
    "cu_seqlens_q": "trifuse.varlen_attention(x[0], x[0], x[0], wrong, right)",
    "cu_seqlens_k": "trifuse.varlen_attention(x[0], x[0], x[0], right, wrong)",
    "relative_index": "trifuse.scaled_dot_product_attention(x, x, x, relative_bias=x[0, 0, 0, :5], "
    "relative_index=(wrong - right + 5).repeat(2).expand(8, 8))",
}


@operator("attention")
@pytest.mark.parametrize("kernel", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", WRONG_LENGTHS)
def test_lengths_that_do_not_fit_fail_on_the_device(kernel, name):
    """In a process of its own: after a failed assertion it can't use the GPU any more."""
    script = f"""
import torch, trifuse
x = torch.ones(1, 8, 8, 16, device="cuda")
wrong, right = torch.tensor([0, 5, 4, 8]).cuda(), torch.tensor([0, 4, 5, 8]).cuda()
with trifuse.backend("cuda"):
    {WRONG_LENGTHS[name]}
torch.cuda.synchronize()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode != 0
    assert f"{name}: expected" in ended.stdout + ended.stderr


# Dropout + residual + LayerNorm -----------------------------------------------------------------


@operator("dropout_add_layer_norm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_add_layer_norm_calls_drawn_at_random(kernel, dtype):
    random, accuracy = Random(0), Accuracy(kernel.name)
    for _ in drawn(kernel, 150):
        case = dropout_add_layer_norm.draw_case(random, dtype)
        dropout_add_layer_norm.record_accuracy({kernel: accuracy}, case)
    accuracy.conclude()


@operator("dropout_add_layer_norm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [256, 768, 1000, 1024, 2048, 4096, 8192, 12_288, 70_001])
def test_dropout_add_layer_norm_of_any_width(kernel, dtype, N):
    rows = min(3_000_000 // N, 3000) if N < 10_000 else 5  # more rows than a GPU holds at once
    for options in ({}, {"x_bias": None, "grad_sum": None}):  # the second has specialised kernels
        case = dropout_add_layer_norm.make(rows, N, dtype=dtype, dropout_p=0.1, **options)
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
    for _ in drawn(kernel, 40):
        lstm.record_accuracy({kernel: accuracy}, lstm.draw_case(random, dtype))
    accuracy.conclude(fewest=CALLS_OF_A_MEAN)


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
    """By the occupancy that the driver reports, one launch fits on 132 multiprocessors."""
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


# GRU and RNN ------------------------------------------------------------------------------------

each_kind = pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=operator(of.operator)) for k, of in gru.KINDS.items()],
)


@each_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_gru_and_rnn_calls_drawn_at_random(kernel, dtype, kind):
    random, accuracy = Random(0), Accuracy(kernel.name)
    for _ in drawn(kernel, 40):
        gru.record_accuracy({kernel: accuracy}, gru.draw_case(random, kind, dtype))
    accuracy.conclude(fewest=CALLS_OF_A_MEAN)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("H", [96, 512])
def test_gru_and_rnn_of_many_blocks(kernel, dtype, H, kind):
    lengths = [9 - b % 9 for b in range(20)]
    case = gru.Case(9, 20, 40, H, kind=kind, dtype=dtype, lengths=lengths, reverse=(False, True))
    gru.record_accuracy({kernel: Accuracy(kernel.name)}, case)


# Each kernel, races, graphs, devices -------------------------------------------------------------

MODULES: dict[str, Any] = {
    "attention": attention,
    "dropout_add_layer_norm": dropout_add_layer_norm,
    "lstm": lstm,
    "gru": gru,
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = {"Lq": 70, "Lk": 45, "dtype": BF16} | FEATURES["everything"]
EVERYTHING = {"dtype": BF16} | lstm.VARIANTS["everything"]

# By operator: cases that together launch each of its CUDA kernels, which test_cuda_kernels checks.
# compute-sanitizer runs these cases.
EACH_KERNEL: dict[str, dict[str, Callable[[], Any]]] = {
    "attention": {
        "float32": lambda: attention.make(**SMALL | {"dtype": FP32}),
        "Hopper's": lambda: attention.make(**SMALL),
        "Hopper's, many tiles": lambda: attention.make(
            1, 2, 200, 300, 128, dtype=BF16, is_causal=True
        ),
        "Hopper's, wide": lambda: attention.make(1, 2, 140, 150, 256, dtype=FP16),
        "Hopper's, capped": lambda: attention.make(
            1, 2, 200, 300, 128, dtype=BF16, is_causal=True, softcap=1.5
        ),
        "Hopper's, capped, wide": lambda: attention.make(
            1, 2, 140, 150, 256, dtype=FP16, softcap=1.5
        ),
        "Hopper's, a mask and a bias by distance": lambda: attention.make(
            **SMALL | {"relative_bias": attention.normal(1, 1, 114)}
        ),
        "Hopper's, tables": lambda: attention.make(**SMALL | indexed(70, 45, 2, 4, "pairs")),
        "Hopper's, tables, many tiles": lambda: attention.make(
            1, 2, 200, 300, 128, dtype=BF16, softcap=1.5, **indexed(200, 300, 1, 2, "distances")
        ),
        "rows that TMA can't copy": lambda: attention.make(**SMALL | {"E": 33}),
        "a mask for all": lambda: attention.make(**SMALL | {"mask": attention.normal(70, 45)}),
        "a mask of rows": lambda: attention.make(**SMALL | {"mask": attention.normal(70, 1)}),
        "one query over a cache": lambda: attention.make(
            2, 8, 1, 600, 128, Hkv=2, dtype=BF16, key_lengths=torch.tensor([600, 300])
        ),
        "few queries over a cache": lambda: attention.make(
            1, 4, 4, 600, 64, Hkv=1, dtype=FP16, is_causal=CausalVariant.LOWER_RIGHT
        ),
        "a bias by distance": lambda: attention.make(
            **SMALL | {"mask": None, "relative_bias": attention.normal(1, 1, 114)}
        ),
        "a mask and a bias by distance": lambda: attention.make(
            **SMALL | {"E": 33, "relative_bias": attention.normal(1, 1, 114)}
        ),
        "both, in float32": lambda: attention.make(
            **SMALL | {"dtype": FP32, "relative_bias": attention.normal(1, 1, 114)}
        ),
        "tables": lambda: attention.make(**SMALL | {"E": 33} | indexed(70, 45, 2, 4, "pairs")),
        "tables, in float32": lambda: attention.make(
            **SMALL | {"dtype": FP32} | indexed(70, 45, 2, 4, "pairs")
        ),
        "both, one query over a cache": lambda: attention.make(
            2,
            8,
            1,
            600,
            128,
            Hkv=2,
            dtype=BF16,
            mask=attention.normal(2, 1, 1, 600) > -1,
            relative_bias=attention.normal(1, 8, 600),
        ),
    },
    "dropout_add_layer_norm": {
        "rows in registers": lambda: dropout_add_layer_norm.make(
            40, 1000, dtype=BF16, dropout_p=0.1
        ),
        "usual calls": lambda: dropout_add_layer_norm.make(
            40, 1000, dtype=BF16, dropout_p=0.1, x_bias=None, grad_sum=None
        ),
        "rows in shared memory": lambda: dropout_add_layer_norm.make(
            5, 12_288, dtype=BF16, dropout_p=0.1
        ),
        "rows too wide for it": lambda: dropout_add_layer_norm.make(2, 70_001, dropout_p=0.1),
    },
    "lstm": {
        "one launch": lambda: lstm.make(
            4, 20, 8, 40, dtype=BF16, lengths=[b % 5 for b in range(20)]
        ),
        "one launch, everything": lambda: lstm.make(
            **EVERYTHING | {"norm": False, "H": 40, "projection": 12}
        ),
        "layers side by side": lambda: lstm.make(33, 3, 8, 20, dtype=BF16, layers=2),
        "steps": lambda: lstm.make(**EVERYTHING),
    },
    "gru": {
        f"{kind}, {way}": functools.partial(
            gru.Case, 4, 20, 8, 40, kind=kind, dtype=dtype, lengths=[b % 5 for b in range(20)]
        )
        for kind in gru.KINDS
        for way, dtype in (("one launch", BF16), ("steps", torch.float64))
    },
}


@pytest.mark.parametrize("kernel", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=operator(name), id=f"{name}: {what}")
        for name, cases in EACH_KERNEL.items()
        for what, case in cases.items()
    ],
)
def test_each_kernel(kernel, name, case):
    if name == "attention":
        check_attention(kernel, case())
    else:
        MODULES[name].record_accuracy({kernel: Accuracy(kernel.name)}, case())


@pytest.mark.parametrize("kernel", ["cuda"], indirect=True)
@operator("attention")
def test_each_kernel_of_packed_attention(kernel):
    """The kernels of few queries, as compiled for packed sequences."""
    check_packed_few_queries(kernel, BF16, [1, 0, 2, 1], [600, 3, 0, 300])


CALLS: dict[str, Any] = {
    "attention": lambda: attention.make(
        4, 8, 300, 500, 64, dtype=BF16, mask=attention.normal(300, 500)
    ),
    "dropout_add_layer_norm": lambda: dropout_add_layer_norm.make(
        2000, 1024, dtype=BF16, dropout_p=0.1
    ),
    "lstm": lambda: lstm.make(50, 16, 128, 512, dtype=BF16, reverse=(False, True)),
    "gru": lambda: gru.Case(50, 16, 128, 512, dtype=BF16, reverse=(False, True)),
}
OPERATORS = [pytest.param(name, marks=operator(name)) for name in CALLS]
each_operator = pytest.mark.parametrize("name", OPERATORS)


@each_operator
def test_repeated_calls_give_the_same_bits(kernel, name):
    module, case = MODULES[name], CALLS[name]()
    with kernel.serving():
        first = module.run(case)
        for _ in range(20):
            module.assert_same_bits(module.run(case), first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@each_operator
def test_tensors_on_another_gpu_than_the_current_one(kernel, name, monkeypatch):
    module, case = MODULES[name], CALLS[name]()
    with kernel.serving(), torch.cuda.device(0):
        expected = module.run(case)
        monkeypatch.setattr(f"{__name__}.DEVICE", "cuda:1")
        module.assert_same_bits(module.run(case), expected)


Call = Callable[[], tuple[Tensor, ...]]


def differentiated(function: Callable[[], Tensor], *variables: Tensor) -> Call:
    """Returns a function that computes the output and the gradients."""

    def call() -> tuple[Tensor, ...]:
        out = function()
        return out.detach(), *torch.autograd.grad(out, variables, out.detach())

    return call


def captured(call: Call) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """Captures a call; returns the graph and the tensors that its replays write."""
    # Deterministic mode fills new memory with NaN, and the graph would capture that kernel too.
    torch.use_deterministic_algorithms(False)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = call()
    return graph, results


def on_the_gpu(*shape: int) -> Tensor:
    return attention.normal(*shape, dtype=BF16).to(DEVICE)


def fast_calls() -> Iterator[tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Calls that the fast path serves, and their tensors."""
    attend, norm = trifuse.scaled_dot_product_attention, trifuse.dropout_add_layer_norm
    query, key, value = (on_the_gpu(2, 4, 40, 64) for _ in range(3))
    lengths, cu_seqlens = (torch.tensor(t, device=DEVICE) for t in ([40, 7], [0, 25, 40]))
    packed = packing.PackedSequences(torch.arange(40, device=DEVICE), cu_seqlens, 25)
    for options in (
        {"dropout_p": 0.5},
        {"is_causal": True},
        {"key_lengths": lengths},
        {"return_lse": True},
    ):
        yield functools.partial(attend, **options), (query, key, value)
    yield functools.partial(attend, enable_gqa=True), (query, key[:, :2], value[:, :2])
    for options in ({"dropout_p": 0.5}, {"is_causal": True}):
        tokens = tuple(x[:1] for x in (query, key, value))
        yield functools.partial(packing.attend, packed=packed, **options), tokens
    for options in ({}, {"prenorm": True}, {"dropout_p": 0.5, "training": True}):
        yield functools.partial(norm, **options), (query, key, *on_the_gpu(2, 64).unbind())


@pytest.mark.skipif(not backends._CUDA_OPERATORS, reason="this build holds no CUDA kernels")
def test_the_fast_path_gives_the_bits_of_the_slow_path(monkeypatch):
    monkeypatch.undo()  # the calls go to the GPU by themselves
    served: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = function(*args)
            assert found is not None
            served.append(function.__name__)
            return found

        return call

    for name in ("attention", "packed_attention", "dropout_add_layer_norm"):
        monkeypatch.setattr(backends._C, name, counted(getattr(backends._C, name)))

    def results(call: Callable[..., Any], tensors: tuple[Tensor, ...]) -> list[Tensor]:
        torch.manual_seed(0)
        given = [t.detach().requires_grad_() for t in tensors]
        out = call(*given)
        found = list(out) if isinstance(out, tuple) else [out]
        grads = torch.autograd.grad(sum(y.float().sin().sum() for y in found), given)
        return [*found, *grads, torch.rand((), device=DEVICE)]

    calls = list(fast_calls())
    fast = [results(*each) for each in calls]
    assert len(served) == len(calls)
    monkeypatch.setattr(_fast_path, "_cuda_serves", lambda call: False)
    for each, actual in zip(calls, fast, strict=True):
        torch.testing.assert_close(actual, results(*each), rtol=0, atol=0)
    assert len(served) == len(calls)


@pytest.mark.skipif(not backends._CUDA_OPERATORS, reason="this build holds no CUDA kernels")
@pytest.mark.parametrize("training", [False, True])
def test_layers_in_one_call_give_the_bits_of_their_parts(monkeypatch, training):
    """So does a batch whose padding is left out; a second step repeats the bits of the first."""
    monkeypatch.undo()  # the calls go to the GPU by themselves
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = bert.BertConfig(num_attention_heads=4, **sizes, **({} if training else rates))
    model = bert.BertModel(config, add_pooling_layer=False).to(DEVICE, BF16)
    trifuse.fuse(model, unpad=True)
    ids = torch.randint(97, (3, 50), device=DEVICE)
    keep = torch.arange(50, device=DEVICE) < torch.tensor([50, 31, 7], device=DEVICE)[:, None]

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        out = model(ids, keep).last_hidden_state
        grads = torch.autograd.grad(out.float().sin().sum(), list(model.parameters()))
        return [out.detach(), *grads]

    served: list[bool] = []
    op = post_norm.post_norm_layers

    def watched(*args: Any) -> Tensor | None:
        out = op(*args)
        served.append(out is not None)
        return out

    monkeypatch.setattr(post_norm, "post_norm_layers", watched)
    first = step()
    for one, other in zip(first, step(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert served == [True, True]
    if training:
        return  # the parts draw other seeds
    monkeypatch.setattr(post_norm, "DEVICES", set())
    parts = step()
    torch.testing.assert_close(first[0], parts[0], rtol=0, atol=0)
    one, other = (torch.cat([grad.flatten() for grad in grads[1:]]) for grads in (first, parts))
    assert (one - other).float().norm() < 0.02 * other.float().norm()


@pytest.mark.parametrize(
    "what",
    [
        *OPERATORS,
        pytest.param("lstm, two layers", marks=operator("lstm")),
    ],
)
def test_a_graph_repeats_the_call(kernel, what):
    """Forward and backward, captured once, replayed on other numbers."""
    x = on_the_gpu(4, 40, 8, 64).requires_grad_()
    w_ih, w_hh = (on_the_gpu(4 * 64, 64) / 8 for _ in range(2))
    layers = trifuse.nn.LSTM(64, 64, num_layers=2, device=DEVICE, dtype=BF16)
    call = {
        "attention": lambda: trifuse.scaled_dot_product_attention(x, x, x),
        "dropout_add_layer_norm": lambda: trifuse.dropout_add_layer_norm(x, x),
        "lstm": lambda: trifuse.lstm(x[0], None, w_ih, w_hh)[0],
        "gru": lambda: trifuse.gru(x[0], None, w_ih[64:], w_hh[64:])[0],
        "lstm, two layers": lambda: layers(x[0])[0],
    }[what]
    weights = layers.parameters() if what == "lstm, two layers" else ()
    call = differentiated(call, x, *weights)
    with kernel.serving():
        graph, results = captured(call)
        for seed in range(3):
            with torch.no_grad():
                x.copy_(attention.normal(*x.shape, seed=seed))
            graph.replay()
            torch.testing.assert_close(results, call(), rtol=0, atol=0)


@pytest.mark.parametrize("name", [o for o in OPERATORS if o.values != ("gru",)])  # draws nothing
def test_each_replay_of_a_graph_draws_anew(kernel, name):
    """As with torch's dropout, replays draw what calls outside a graph draw from the same seed."""
    x = on_the_gpu(4, 40, 8, 64).requires_grad_()
    w_ih, w_hh = (on_the_gpu(4 * 64, 64) / 8 for _ in range(2))
    draws: dict[str, Any] = {"recurrent_dropout": 0.5, "zoneout_h": 0.5, "training": True}
    call = {
        "attention": lambda: trifuse.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "dropout_add_layer_norm": lambda: trifuse.dropout_add_layer_norm(
            x, x, dropout_p=0.5, training=True
        ),
        "lstm": lambda: trifuse.lstm(x[0], None, w_ih, w_hh, **draws)[0],
    }[name]
    call = differentiated(call, x)
    with kernel.serving():
        graph, results = captured(call)
        seen: list[Tensor] = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = [call() for _ in range(2)]
            torch.manual_seed(seed)
            for alone in expected:
                graph.replay()
                torch.testing.assert_close(results, alone, rtol=0, atol=0)
                assert not any(torch.equal(results[0], other) for other in seen)
                seen.append(results[0].clone())
