"""Calls that reach every C++ kernel, in every pattern of threads, for ``make sanitize``.

``python tests/support/sanitized_calls.py AVX2 2 3`` runs them on the kernels of one instruction
set, alternately in two and in three threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import attention_cases as attention
import dropout_add_layer_norm_cases as norm
import fault_cases as faults
import gru_cases as gru
import lstm_cases as lstm
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

import trifuse
from trifuse import backends
from trifuse.nn import plans
from trifuse.ops import _linear_choice, encoder_model
from trifuse.ops.dropout import dropout
from trifuse.ops.heads import split_heads
from trifuse.ops.linear import linear

Call = Callable[[], Any]
Calls = Iterator[Call]

# Smaller calls are not split among threads (csrc/cpu/parallel.h, csrc/cpu/lstm.cpp).
_LONG = {"B": 1, "Lq": 70, "Lk": 260}
_TURNS = 3  # this many equal calls in a row run with every number of threads


def attention_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    """Covers several chunks of keys, which add to the queries' gradient in turn, each kind of mask,
    and each way of splitting the gradient of a broadcast mask."""

    def mask(*shape: int) -> Tensor:
        return attention.normal(*shape, seed=8, dtype=dtype)

    # A chunk has 128 keys, so these have two chunks or three.
    wide = {**_LONG, "Lk": 140 if brief else 260, "E": 140, "Ev": 140, "dtype": dtype}
    two = {**wide, "B": 2, "Lq": 9 if brief else 70}
    full = mask(2, 2, 70, wide["Lk"])
    made = [
        attention.make(**wide),
        attention.make(**_LONG, E=40, Ev=72, H=4, Hkv=2, dtype=dtype, is_causal=True),
        attention.make(**wide, is_causal=CausalVariant.LOWER_RIGHT, dropout_p=0.2),
        attention.make(
            **wide, window=(50, 9), key_lengths=torch.tensor([wide["Lk"] - 10]), softcap=3.0
        ),
        attention.make(**wide, mask=full[:1] > 0, scale=-0.3),
        *(
            attention.make(1, 4, 2, wide["Lk"], 40, 72, Hkv=2, dtype=dtype, **options)
            for options in (
                {"dropout_p": 0.2},
                {"is_causal": CausalVariant.LOWER_RIGHT, "softcap": 3.0},
                {"mask": mask(1, 4, 2, wide["Lk"]) > 0},
                {"mask": mask(1, 4, 2, wide["Lk"])},
                {"is_causal": True, "diagonal": torch.tensor([wide["Lk"] // 2])},
            )
        ),
        # Values of a whole number of vectors: 8 rows of a key head, and one.
        *(attention.make(1, 4 * n, n, wide["Lk"], 40, 160, Hkv=4, dtype=dtype) for n in (1, 2)),
        *(
            attention.make(**two, mask=part[..., : two["Lq"], :], dropout_p=0.1)
            for part in (full, full[:1], full[:, :1], full[:1, :1, :1], full[..., :1])
        ),
    ]
    for B, H, Lq, options in (
        (2, 2, two["Lq"], {"dropout_p": 0.1}),
        (1, 4, 2, {"mask": mask(1, 4, 2, 1)}),
    ):
        bias = mask(B, 1, 1, Lq + wide["Lk"] - 1)[:, 0]
        given = {"is_causal": CausalVariant.LOWER_RIGHT, "relative_bias": bias, **options}
        made.append(attention.make(B, H, Lq, wide["Lk"], 40, dtype=dtype, **given))
    for options in ({"is_causal": CausalVariant.LOWER_RIGHT}, {"mask": full[..., : two["Lq"], :]}):
        made.append(attention.make(**two, **options, **tables(two["Lq"], wide["Lk"], dtype)))
    # One query, whose last keys fill no vector. Sanitized builds have no matrix unit, so OneRow
    # does not serve it.
    made.append(attention.make(1, 2, 1, 130, 64, 32, dtype=dtype))
    # Three chunks of keys in the forward: of a block of queries, and of one query, whose chunks are
    # tasks of several threads. So many sequences that a task computes all chunks.
    made.append(attention.make(1, 1, 70, 1100, 24, dtype=dtype))
    made.append(attention.make(1, 8, 1, 1100, 64, 40, Hkv=1, dtype=dtype))
    made.append(attention.make(13, 1, 1, 600, 16, dtype=dtype))
    # Two rows that share a key head, and vectors of rows of every length. The keys fill no block.
    for H in (2, 3, 7, 15, 33):
        made.append(attention.make(1, H, 1, 87, 32, Hkv=1, dtype=dtype))
    few = mask(2, 2, 9, 1)  # the gradients of so few pairs add up without float64
    made.append(attention.make(Lq=9, Lk=20, mask=few, dtype=dtype))
    made.append(attention.make(Lq=9, Lk=20, mask=full[:1, :1, :1, :20] > 0, dtype=dtype))
    # A NaN reaches some rows of a tile and not others, first in a tile of many queries, then of
    # few.
    for case, names in ((made[3], ("query", "key", "value")), (made[7], ("key", "value"))):
        spoilt = {name: getattr(case, name).clone() for name in names}
        for rows in spoilt.values():
            rows[:, :, 17] = float("nan")
        made.append(dataclasses.replace(case, **spoilt))
    for case in made:
        yield partial(attention.run, case)
    for heads in (1, 3, 7, 15, 33):
        yield partial(few_queries_of_many_keys, heads, dtype)
    lengths_q, lengths_k = [0, 131, 1, 64], [5, 170, 0, 65]
    case = attention.packed(lengths_q, lengths_k, rest=3, E=64, dtype=dtype)
    bounds = attention.boundaries(lengths_q), attention.boundaries(lengths_k, torch.int32)
    yield partial(attention.run_packed, case, *bounds)


def tables(Lq: int, Lk: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns three tables for two sequences and heads, and an index by distance."""
    shapes = {"relative_bias": (1, 2), "query_bias": (2, 2, Lq), "key_bias": (2, 2, Lk)}
    made = {name: attention.normal(*s, 5, seed=9, dtype=dtype) for name, s in shapes.items()}
    return {**made, "relative_index": torch.arange(Lq + Lk - 1) % 5}


@torch.no_grad()
def few_queries_of_many_keys(heads: int, dtype: torch.dtype) -> Tensor:
    """A call whose keys and values have more than 8 MiB by shape, though batches share memory."""
    query, key = (
        attention.normal(1, H, L, 64, seed=9, dtype=dtype) for H, L in ((heads, 1), (1, 512))
    )
    query, key = (t.expand(80, -1, -1, -1) for t in (query, key))
    return trifuse.scaled_dot_product_attention(query, key, key, enable_gqa=True)


_STREAMED_BYTES = 2**23  # a result of this size is written past the caches


def streamed_shape(dtype: torch.dtype) -> tuple[int, int]:
    return _STREAMED_BYTES // (1024 * dtype.itemsize), 1024


def streamed_calls(dtype: torch.dtype) -> Calls:
    x = torch.randn(*streamed_shape(dtype)).to(dtype)
    weight = torch.randn(1024).to(dtype)
    yield partial(trifuse.dropout_add_layer_norm, x, None, weight, None)


def training_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    """Nodes of C++ in training: dropout, linear layers, and attention on a joint projection."""
    H, E, length = 2, 24, 40 if brief else 140
    x = attention.normal(2, length, 3 * H * E, dtype=dtype)
    weight = attention.normal(3 * H * E, 3 * H * E, seed=1, dtype=dtype)
    bias = attention.normal(3 * H * E, seed=2, dtype=dtype)

    def project(*tensors: Tensor) -> Tensor:
        return linear(*tensors, activation="relu")

    def attend(joint: Tensor, batch_first: bool) -> Tensor:
        heads = split_heads(joint, 3, H, batch_first)
        return trifuse.scaled_dot_product_attention(*heads, dropout_p=0.1)

    def train(f: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        given = [t.detach().requires_grad_() for t in tensors]
        out = f(*given)
        return (out.detach(), *torch.autograd.grad(out.sum(), given))

    yield partial(train, partial(dropout, p=0.2), x)
    for batch_first in (True, False):
        yield partial(train, partial(attend, batch_first=batch_first), x)
    if dtype in (torch.float32, torch.bfloat16):
        # On some CPUs, torch's product would serve training.
        _linear_choice._made[dtype] = _linear_choice.Choice("", inference=True, training=True)
        yield partial(train, project, x, weight, bias)


def norm_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    yield from streamed_calls(dtype)
    # Blocks of more rows than a run of sums has; rows that end in part of a strip, and in half of
    # one.
    sizes = [(4200, 9), (700, 65), (40, 2016), (1, 70_000), streamed_shape(dtype)]
    for shape in sizes[: 4 if brief else None]:
        case = norm.make(*shape, dtype=dtype, dropout_p=0.1)
        plain = dataclasses.replace(
            case, dropout_p=0.0, residual=None, x_bias=None, bias=None, grad_sum=None, rms_norm=True
        )
        yield partial(norm.run, case)
        yield partial(norm.run, plain)


def dropout_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    x = torch.randn(2 * 2**15 + 77).to(dtype)

    def draw(p: float) -> Tensor:
        torch.manual_seed(3)
        return dropout(x, p)

    yield partial(draw, 0.1)
    yield partial(draw, 0.9)


def encoder_layer_calls(dtype: torch.dtype) -> Calls:
    if dtype not in (torch.float32, torch.bfloat16):
        return
    ops, D, H, E, F = torch.ops.trifuse, 33, 3, 7, 50

    ends = [(D, H * E), (F, D), (D, F)]
    norms = [torch.randn(D).to(dtype) for _ in range(4)]
    for projections in ([(H * E, D)] * 3, [(3 * H * E, D)]):
        shapes = [*projections, *ends]
        weights = [torch.randn(shape).to(dtype) for shape in shapes]
        biases = [torch.randn(shape[0]).to(dtype) for shape in shapes]
        packed = [ops.pack_linear(weight) for weight in weights]
        by_columns = [weight.t().contiguous().t() for weight in weights]
        options = (biases, norms, (1e-5, 1e-5), H, H, E, F, 0.4, 1.0, None, "gelu")
        for stored in (weights, by_columns):
            for rows in (1, 3, 40):
                x = torch.randn(1, rows, D).to(dtype)
                rest = (stored, *options, *(False,) * 10, -1, -1)
                yield partial(ops.encoder_layer, x, None, None, 0, *rest)
        for first in (False, True):
            rest = (packed, *options, first, *(False,) * 9, -1, -1)
            x = torch.randn(2, 70, D).to(dtype)
            keep = torch.rand(2, 1, 1, 70) < 0.7
            yield partial(ops.encoder_layer, x, keep, None, 0, *rest)
            starts = torch.tensor([0, 1, 40, 69])
            yield partial(ops.encoder_layer, x[:1], None, starts, 39, *rest)
    yield from _gated_layer_calls(dtype)
    yield from _decoder_layer_calls(dtype)
    yield from _encoder_model_calls(dtype)


def _encoder_model_calls(dtype: torch.dtype) -> Calls:
    """Yields whole models with BERT's code."""
    D, H, E, F, words = 33, 3, 7, 50, 20
    shapes = [*[(H * E, D)] * 3, (D, H * E), (F, D), (D, F), (D, D)]
    stored = [torch.randn(shape).to(dtype) for shape in shapes]
    biases = tuple(torch.randn(shape[0]).to(dtype) for shape in shapes)
    norms = tuple(torch.randn(D).to(dtype) for _ in range(4))
    options = ((1e-5, 1e-5), H, H, E, F, 0.4, 1.0, None, "gelu", *(False,) * 10, -1, -1)
    tables = tuple(torch.randn(rows, D).to(dtype) for rows in (words, 2, 80))
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2)).eval()
    own: Any = module[1]._parameters
    values = (own, "weight", own["weight"]), (own, "none"), (own, 2)
    checks = plans.checks(plans.modules_in(module), (*values, *(plans.forwards_of(module) or ())))
    zero, positions = torch.zeros(1, 1, dtype=torch.long), torch.arange(80)[None]
    for packs, counts in itertools.product((False, True), repeat=2):
        weights = [torch.ops.trifuse.pack_linear(each) for each in stored] if packs else stored
        parts = encoder_model.Parts(
            checks.compiled,
            encoder_model.Embeddings(tables, *norms[:2], 1e-5, counts),
            encoder_model.Ids(zero, zero, zero._version, None if counts else positions, 1),
            ((tuple(weights[:-1]), biases[:-1], norms, options),) * 2,
            encoder_model.Pooler(weights[-1], biases[-1], D, 0 if packs else 512),
            0,
            True,
            (str(backends.cpu_capability()),),
        ).as_tuple()
        for L in (1, 70):
            ids = torch.randint(words, (2, L))
            for keep in (None, torch.ones(2, L), torch.arange(L) < torch.tensor([[L], [1]])):
                yield partial(_run_model, parts, ids, keep)


def _run_model(parts: tuple[Any, ...], ids: Tensor, keep: Tensor | None) -> Any:
    out = encoder_model.encoder_model(parts, None, ids, keep)
    assert out is not None
    return out


def _gated_layer_calls(dtype: torch.dtype) -> Calls:
    """Yields layers of Llama's kind, with a cache."""
    ops, D, H, G, E, F = torch.ops.trifuse, 33, 4, 2, 7, 50
    shapes = [(H * E, D), (G * E, D), (G * E, D), (D, H * E), (F, D), (F, D), (D, F)]
    stored = [torch.randn(shape).to(dtype) for shape in shapes]
    packed = [ops.pack_linear(weight) for weight in stored]
    biases = [None] * len(shapes)
    switches = itertools.product((1, 70), *[(False, True)] * 3)
    for new, from_one, results, together in switches:
        eps = (1e-5, 1e-5, -1, 1e-5, 1e-5, *(1e-5 if results else -1,) * 2)
        of_heads = (H * E, G * E) if together else (E, E)
        vectors = [torch.randn(N).to(dtype) for N in (D, D, D, *of_heads, D, D)]
        norms = [each for vector in vectors for each in (vector, None)]
        order = (True, True, from_one, False, False, False, together)
        options = (eps, H, G, E, F, 0.4, 1.0, None, "silu", *order)
        x = torch.randn(2, new, D).to(dtype)
        past = [torch.zeros(2, G, 75, E, dtype=dtype) for _ in range(2)]
        for per_pair, weights in itertools.product((False, True), (packed, stored)):
            cos, sin = (torch.randn(B, new, 3 if per_pair else 6).to(dtype) for B in (1, 2))
            rest = (*options, results, together, per_pair, 5, 0, *past, 3, cos, sin)
            yield partial(ops.encoder_layer, x, None, None, 0, weights, biases, norms, *rest)


def _decoder_layer_calls(dtype: torch.dtype) -> Calls:
    """Yields layers that attend to a memory, and layers of GPT-NeoX's kind with more options."""
    ops, D, H, E, F = torch.ops.trifuse, 33, 3, 7, 50
    vectors = [torch.randn(D).to(dtype) for _ in range(6)]
    for new, first in itertools.product((1, 70), (False, True)):
        x = torch.randn(2, new, D).to(dtype)
        shapes = [*[(H * E, D)] * 3, (D, H * E), (H * E, D), (D, H * E), (F, D), (D, F)]
        weights = [torch.randn(shape).to(dtype) for shape in shapes]
        options = ((1e-5,) * 3, H, H, E, F, 0.4, 0.7, 3.0, "gelu", first, *(False,) * 9, -1, -1)
        memory = [torch.randn(2, H, 9, E).to(dtype) for _ in range(2)]
        mask = torch.arange(9) < torch.tensor([3, 9])[:, None, None, None]
        rest = (weights, [None] * 8, vectors, *options, *(None, None, 0, None, None, None), *memory)
        yield partial(ops.encoder_layer, x, None, None, 0, *rest, mask)
        shapes = [(3 * H * E, D), (D, H * E), (F, D), (D, F)]
        weights = [torch.randn(shape).to(dtype) for shape in shapes]
        eps = (1e-5, 1e-5 if first else -1)
        options = (eps, H, H, E, F, 0.4, 1.0, None, "gelu", True, False, False, True, first, True)
        cos, sin = (torch.randn(1, (new + 1) // 2, 4).to(dtype) for _ in range(2))
        further = (*(False,) * 4, -1, 0, None, None, 0, cos, sin)
        factors = [None, vectors[4]] if first else vectors[4:]
        rest = (weights, [*[None] * 4, *factors], vectors[:4], *options, *further)
        yield partial(ops.encoder_layer, x, None, None, 0, *rest)


def embedding_sum_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    for features in (1, 65, 128)[: 2 if brief else None]:
        tables = [torch.randn(9, features).to(dtype) for _ in range(3)]
        ids = [torch.randint(9, shape) for shape in ((2, 70), (1, 70), (2, 1))]
        yield partial(torch.ops.trifuse.embedding_sum, ids, tables)
        yield partial(torch.ops.trifuse.embedding_sum, ids[:1], tables[:1])


def rotary_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    if dtype == torch.float16:
        return  # has no kernel
    wide = [dtype, torch.float32] if dtype == torch.bfloat16 else [dtype]
    for E, R in ((2, 2), (80, 36), (64, 64))[: 2 if brief else None]:
        x = torch.randn(2, 40, 3, E).to(dtype).transpose(1, 2)
        for of_positions in wide:
            for flags in itertools.product((False, True), repeat=4):
                _, _, per_pair, _ = flags
                cos, sin = torch.randn(2, 1, 40, R // 2 if per_pair else R).to(of_positions)
                yield partial(torch.ops.trifuse.rotate, x, cos, sin, 1, *flags)


def activation_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    ops = torch.ops.trifuse
    for M, N in ((3, 1), (70, 65), (400, 128))[: 2 if brief else None]:
        x, up, grad = (torch.randn(M, N).to(dtype) for _ in range(3))
        both = torch.randn(M, 2 * N).to(dtype)
        for activation in ("gelu", "gelu_tanh", "quick_gelu", "silu"):
            yield partial(ops.activate, x, None, activation)
            yield partial(ops.activate, x, up, activation)
            yield partial(ops.activate_backward, grad, x, activation)
            yield partial(ops.gate_backward, grad, x, up, activation)
            yield partial(ops.gate_halves_backward, grad, both, 1, activation)


def bias_gradient_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    if dtype not in (torch.float32, torch.bfloat16):
        return  # has no kernel
    for M, N in ((3, 1), (131, 65), (700, 640))[: 2 if brief else None]:
        grad, out = (torch.randn(M, N).to(dtype) for _ in range(2))
        yield partial(torch.ops.trifuse.bias_gradient, grad, None)
        yield partial(torch.ops.trifuse.bias_gradient, grad, out.relu())


def linear_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    ops = torch.ops.trifuse
    sizes = [(1, 1, 1), (7, 129, 33), (130, 65, 200), (245, 257, 129)]
    for M, K, N in sizes[: 3 if brief else None]:
        x, weight, bias = (torch.randn(*s).to(dtype) for s in ((M, K), (N, K), (N,)))
        for activation in (None, "relu", "gelu", "gelu_tanh", "quick_gelu", "silu"):
            yield partial(ops.linear, x, weight, bias, activation)
        # As in gradients: products of transposed views.
        columns, rows = x.t().contiguous().t(), weight.t().contiguous().t()
        yield partial(ops.linear, columns, rows, None, None)
        packed = ops.pack_linear(weight)
        yield partial(ops.unpack_linear, packed, N, K, dtype)
        yield partial(ops.linear_packed, x, packed, N, None, None)
        yield partial(ops.linear_packed, x[:5], packed, N, bias, None)  # few rows by whole panels
        up = torch.randn(N, K).to(dtype)
        gate = (bias, "silu", ops.pack_linear(up), bias)
        yield partial(ops.linear_packed, x, packed, N, *gate)
        few = x[:15]
        yield partial(ops.linear_unpacked, few, weight, None, None)
        yield partial(ops.linear_unpacked, few, weight, bias, "silu", up, bias)
        yield partial(ops.linear_unpacked, few, rows, bias, "gelu")
        yield partial(ops.linear_unpacked, x[:1], rows, bias, None)  # multiplied three times
    yield from encoder_layer_calls(dtype)
    yield partial(  # several threads stream this result
        ops.linear, torch.randn(260, 40).to(dtype), torch.randn(160, 40).to(dtype), None, "relu"
    )
    large = torch.randn(600, 512).to(dtype)
    yield partial(ops.pack_linear, large)
    yield partial(ops.pack_linears, [large, large[:130, :65]])
    yield partial(ops.unpack_linear, ops.pack_linear(large), *large.shape, dtype)
    yield partial(ops.checksum, large)


def lstm_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    """Covers teams of threads per direction and group of rows, several such jobs per thread, and
    all threads on one job."""
    for options in lstm.VARIANTS.values():
        H = options.get("H", 40)
        projection = {"projection": 20} if "projection" in options else {}
        lengths = {"lengths": [(3 * b) % 6 for b in range(18)]} if "lengths" in options else {}
        changed = {**options, **projection, **lengths, "H": max(H, 40)}
        yield partial(lstm.run, lstm.make(5, 18, 9, dtype=dtype, **changed))
    for what in () if brief else ("plain", "two directions", "recompute"):
        options = lstm.VARIANTS[what]
        yield partial(lstm.run, lstm.make(9, 18, 5, 64, dtype=dtype, **options))
        yield partial(lstm.run, lstm.make(3, 3, 70, 200, dtype=dtype, **options))
    for _ in range(_TURNS if brief else 0):  # more groups of rows than threads that start
        yield partial(lstm.run, lstm.make(9, 18, 5, 64, dtype=dtype))
    for _ in range(2):  # several threads stream the gate gradients, and not all calls have several
        yield partial(lstm.run, lstm.make(10, 30, 5, 64, dtype=dtype))
    yield partial(lstm.run, lstm.make(1, 2, 9, 40, projection=20, dtype=dtype))
    yield partial(lstm.run, lstm.make(1, 1, 9, 40, dtype=dtype))
    yield partial(lstm.run, lstm.make(2, 3, 5, 40, lengths=[0, 2, 1], states=False, dtype=dtype))
    case = lstm.make(2, 3, 5, 40, dtype=dtype)
    yield partial(lstm.run, dataclasses.replace(case, input=case.input.mT.contiguous().mT))
    # A weight gradient too large for the caches is written past them.
    inputs = 9 * 2**20 // (4 * 256 * dtype.itemsize)
    yield partial(lstm.run, lstm.make(1, 2, inputs, 256, dtype=dtype))


def gru_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    """Covers gru and, with either activation, rnn."""
    for kind in gru.KINDS:
        for sizes in ((5, 18, 9, 40), (9, 18, 5, 64), (3, 3, 70, 200))[: 1 if brief else None]:
            for options in ({}, {"biases": False, "states": False}, {"reverse": (False, True)}):
                yield partial(gru.run, gru.Case(*sizes, kind=kind, dtype=dtype, **options))
            lengths = [b % (sizes[0] + 1) for b in range(sizes[1])]
            yield partial(gru.run, gru.Case(*sizes, kind=kind, dtype=dtype, lengths=lengths))


def infer_and_train(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        inferred = layer(x)[0]
    out = layer(x)[0]
    return [inferred, out.detach(), *torch.autograd.grad(out.sum(), list(layer.parameters()))]


def cell_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    """Covers inference, and single steps, which have a separate path."""
    for module in (trifuse.nn.LSTM, trifuse.nn.GRU, trifuse.nn.RNN):
        for sizes in ((9, 40), (40, 72) if brief else (70, 200)):
            torch.manual_seed(0)
            layer = module(*sizes, bidirectional=True).to(dtype)
            x = torch.randn(4, 6, sizes[0]).to(dtype)
            yield partial(infer_and_train, layer, x)
    for module in (trifuse.nn.LSTMCell, trifuse.nn.GRUCell, trifuse.nn.RNNCell):
        for rows, sizes in ((6, (9, 40)), (3, (40, 72)) if brief else (6, (70, 200))):
            torch.manual_seed(0)
            layer = module(*sizes).to(dtype)
            x = torch.randn(rows, sizes[0]).to(dtype)
            for _ in range(_TURNS if brief else 1):
                yield partial(infer_and_train, layer, x)


def probe_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    x = torch.linspace(-90, 90, 1001)
    if dtype in (torch.float32, torch.bfloat16):
        for name in ("exp2", "sigmoid", "tanh"):
            yield partial(getattr(backends._C, name), x)
        for name in ("float32", "bfloat16"):
            yield partial(matrix_rate_is_known, name)


def matrix_rate_is_known(name: str) -> bool:
    """Measures the matrix rate, which multiplies in every thread."""
    return backends._C.matrix_rate(name, 0.001) > 0


def each_allocation_fails(case: faults.Case) -> None:
    """Fails the first allocation and all later ones, then the second and its retry, and so on."""

    def attempt(number: int) -> int:
        with faults.failing(number, faults.ALL if number % 2 else 2):
            faults.unless_out_of_memory(lambda: case.results(2))
        return backends._C.counted_allocations()

    assert faults.for_each_allocation(attempt) > 3


def throw_in_each_thread() -> None:
    threads = torch.get_num_threads()
    for thread in range(threads):
        try:
            backends._C.throw_in_crew(threads, thread)
        except RuntimeError as error:
            if str(error) != f"thrown in thread {thread}":
                raise
        else:
            assert thread > 0  # torch may start fewer threads


def failing_calls(dtype: torch.dtype, brief: bool = False) -> Calls:
    """Covers threads that throw while others wait for them; the same in every instruction set."""
    if dtype in (torch.float32, torch.bfloat16) and not brief:
        yield throw_in_each_thread
        cases = [faults.attention(dtype), faults.norm(dtype), faults.lstm(dtype)]
        for case in (*cases, faults.lstm(dtype, projected=True)):
            yield partial(each_allocation_fails, case)


# The fields of `Kernels` in csrc/cpu/kernels.h, and the calls that reach each kernel.
CALLS: dict[str, Callable[[torch.dtype, bool], Calls]] = {
    "attention_forward": attention_calls,
    "attention_backward": attention_calls,
    "dropout_add_layer_norm_forward": norm_calls,
    "dropout_add_layer_norm_backward": norm_calls,
    "dropout": dropout_calls,
    "embedding_sum": embedding_sum_calls,
    "rotary": rotary_calls,
    "activation": activation_calls,
    "bias_gradient": bias_gradient_calls,
    "linear": linear_calls,
    "lstm_forward": lstm_calls,
    "lstm_backward": lstm_calls,
    "probe": probe_calls,
}
# The op that runs each function of these kernels. Tests alone call the probe's.
OPS: dict[str, dict[str, str]] = {
    "attention_forward": dict.fromkeys(("tasks", "run"), "attention_forward"),
    "attention_backward": dict.fromkeys(
        ("tasks", "chunk_keys", "key_chunks", "query_blocks", "table_groups", "run"),
        "attention_backward",
    ),
    "dropout_add_layer_norm_forward": {"run": "dropout_add_layer_norm_forward"},
    "dropout_add_layer_norm_backward": dict.fromkeys(
        ("run", "reduce"), "dropout_add_layer_norm_backward"
    ),
    "dropout": {"run": "dropout"},
    "embedding_sum": {"run": "embedding_sum"},
    "rotary": {"run": "rotate"},
    "activation": {"forward": "activate", "backward": "gate_backward"},
    "bias_gradient": dict.fromkeys(("run", "reduce"), "bias_gradient"),
    "linear": {
        "panel_bytes": "pack_linear",
        "pack": "pack_linear",
        "unpack": "unpack_linear",
        "run": "linear_packed",
        "run_unpacked": "linear_unpacked",
        "checksum": "checksum",
    },
    "lstm_forward": dict.fromkeys(("workspace", "run"), "lstm_forward"),
    "lstm_backward": dict.fromkeys(("workspace", "run"), "lstm_backward"),
}
# More calls, which reach some of the kernels.
_MORE = (training_calls, gru_calls, cell_calls, failing_calls)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def larger(dtype: torch.dtype, brief: bool = False) -> Calls:
    """Yields the calls above. Each gives the same bits with any number of threads."""
    for calls in dict.fromkeys([*CALLS.values(), *_MORE]):  # in order, each once
        yield from calls(dtype, brief)


def brief_calls(dtype: torch.dtype) -> Calls:
    """Yields fewer and smaller calls, and for most types only those of simple kernels."""
    if dtype == torch.float32:
        yield from larger(dtype, brief=True)
    else:
        yield from dropout_calls(dtype)
        yield from linear_calls(dtype, brief=True)
        yield from embedding_sum_calls(dtype, brief=True)
        yield from rotary_calls(dtype, brief=True)
        yield from activation_calls(dtype, brief=True)
        yield from bias_gradient_calls(dtype, brief=True)
        if dtype == torch.bfloat16:
            yield from norm_calls(dtype, brief=True)


def drawn(dtype: torch.dtype, count: int) -> Calls:
    """Yields small calls of any sizes, layouts and options, as the tests draw them."""
    random = Random(0)
    for _ in range(count):
        yield partial(attention.run, attention.draw_case(random, dtype))
        yield partial(norm.run, norm.draw_case(random, dtype))
        yield partial(lstm.run, lstm.draw_case(random, dtype))


def assert_same_bits(actual: Any, expected: Any) -> None:
    if isinstance(actual, dict):
        actual, expected = list(actual.values()), list(expected.values())
    if isinstance(actual, (list, tuple)):
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a, e)
    elif isinstance(actual, Tensor):
        attention.assert_equal(actual, expected)
    else:
        assert actual == expected


def in_two_python_threads(dtype: torch.dtype, brief: bool) -> None:
    """Makes calls from two Python threads at once, with large results, whose memory is recycled."""
    case = norm.make(300 if brief else 600, 1000, dtype=dtype)
    results: list[Any] = [None, None]

    def work(which: int) -> None:
        for _ in range(2 if brief else 3):
            results[which] = norm.run(case)

    workers = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert_same_bits(*results)


def run(calls: dict[torch.dtype, Calls], threads: Sequence[int], brief: bool) -> int:
    """Makes the calls of each dtype and some drawn ones; returns their number."""
    made = 0
    for turn, (dtype, those) in enumerate(calls.items()):
        for call in itertools.chain(those, drawn(dtype, count=4 if brief else 20)):
            torch.set_num_threads(threads[(made + turn) % len(threads)])
            call()
            made += 1
        if dtype == torch.float32 or not brief:
            in_two_python_threads(dtype, brief)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("capability", help="an instruction set")
    parser.add_argument("threads", type=int, nargs="+", help="numbers of threads, by turns")
    parser.add_argument(
        "--brief",
        action="store_true",
        help="fewer and smaller calls; sanitize.py checks that they reach the same lines",
    )
    parser.add_argument("--dtypes", nargs="+", default=[str(d).split(".")[1] for d in DTYPES])
    asked = parser.parse_args()
    assert backends._C is not None, "the extension did not load"
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    backends._C.set_cpu_capability(asked.capability)
    dtypes = [getattr(torch, name) for name in asked.dtypes]
    made = 0
    # AVX512_BF16 multiplies pairs in two forms. Each CPU prefers one.
    for split in (True, False) if asked.capability == "AVX512_BF16" else (False,):
        backends._C.split_pairs(split)
        if asked.capability.endswith("_BF16"):  # only its bfloat16 products are its own
            calls = {torch.bfloat16: larger(torch.bfloat16)}
        elif asked.brief:
            calls = {dtype: brief_calls(dtype) for dtype in dtypes}
        else:
            calls = {dtype: larger(dtype) for dtype in dtypes}
        with trifuse.backend("cpp"):
            made += run(calls, asked.threads, asked.brief)
    numbers = " and ".join(map(str, asked.threads))
    spent = f"{time.process_time():.0f} s of processors"
    print(f"{asked.capability}, {numbers} threads: {made} calls, {spent}")


if __name__ == "__main__":
    main()
