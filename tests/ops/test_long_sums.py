"""Sums of 10⁵ and 10⁶ terms are held to the numerics rule too.

If a gradient sums rows, tokens or a mask's broadcast dimensions in one chain of additions, its
error grows with their number, unlike in torch's own sums. Equal terms are the worst case: every
addition rounds the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from dropout_add_layer_norm_cases import Case, eager_torch, run, specification
from host_build import build_operator, serving_as_cuda
from numerics import Accuracy, rounding_error
from tested_kernels import CPP_KERNELS, Kernel
from torch import Tensor

import trifuse

KINDS = ("random", "one-signed", "equal")
BEST = CPP_KERNELS[-1:]  # for slow cases: sums are split alike on all instruction sets

Gradients = dict[str, Tensor]


def terms(kind: str, *shape: int) -> Tensor:
    """Upstream gradients. Columns differ; for the kind "equal", all rows are equal."""
    generator = torch.Generator().manual_seed(sum(shape))
    if kind == "equal":
        return torch.rand(shape[-1], generator=generator).expand(shape).contiguous()
    x = torch.randn(shape, generator=generator)
    return x.abs() if kind == "one-signed" else x


def hold(
    kernels: Iterable[Kernel],
    calls: Iterable[Callable[[], tuple[Callable[[], Gradients], Gradients, Gradients]]],
) -> None:
    """Holds each kernel's gradients to the numerics rule.

    Each call returns a function for our gradients, eager torch's gradients, and the exact ones. The
    unit is a rounding of the result, which does not grow with the number of terms.
    """
    accuracies = {kernel: Accuracy(kernel.name) for kernel in kernels}
    if not accuracies:
        pytest.skip("the C++ extension is not built")
    for call in calls:
        ours, eager, exact = call()
        for kernel, accuracy in accuracies.items():
            with kernel.serving():
                actual = ours()
            for name, expected in exact.items():
                unit = rounding_error(torch.float32) * expected.abs().max()
                # With few results, torch's error is below one rounding only by luck.
                lucky = (eager[name].double() - expected).abs().max() < unit
                theirs = expected + unit if lucky else eager[name]
                accuracy.record(name, actual[name], expected, theirs, unit, independent=1)
    for accuracy in accuracies.values():
        accuracy.conclude()


@contextmanager
def cuda_of(operator: str) -> Iterator[Kernel]:
    """An operator's CUDA kernels under the model of CUDA. The device holds few blocks at a time, so
    each block has many rows."""
    library = build_operator(operator)
    small = library.device(multiprocessors=1, blocks_per_multiprocessor=1, seed=1)
    with serving_as_cuda(library), small:
        yield Kernel("cuda")


# dropout_add_layer_norm --------------------------------------------------------------------------


def norm_call(rows: int, N: int, kind: str, rms_norm: bool):
    def call():
        generator = torch.Generator().manual_seed(rows + N)
        x = torch.randn(rows, N, generator=generator)
        residual, weight, bias, x_bias = (torch.randn(N, generator=generator) for _ in range(4))
        case = Case(x, residual, weight, bias, x_bias, terms(kind, rows, N), None)
        case = dataclasses.replace(case, rms_norm=rms_norm)
        # grad_residual is left out: where rows share a residual, torch sums its gradient.
        vectors = ("grad_weight", "grad_bias", "grad_x_bias")

        def of_vectors(results: Gradients) -> Gradients:
            return {name: results[name] for name in vectors}

        exact = of_vectors(specification(case))
        return lambda: of_vectors(run(case)), of_vectors(eager_torch(case)), exact

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_norm_of_10_to_the_5_rows(kind):
    hold(CPP_KERNELS, [norm_call(100_000, N, kind, rms) for N in (7, 8) for rms in (True, False)])


def test_norm_of_10_to_the_6_rows():
    hold(BEST, [norm_call(1_000_000, 4, kind, True) for kind in ("random", "equal")])


def test_norm_in_triton(triton, monkeypatch):
    """Four programs with nearly the most tiles that a program gets, of 32 rows each.

    The interpreter adds up a tile's rows in one chain, where a GPU's threads form a tree: with more
    rows to a tile, this chain would be what is measured.
    """
    from trifuse.kernels import dropout_add_layer_norm as kernels

    monkeypatch.setattr(kernels, "_MAX_WARPS", 4)
    monkeypatch.setattr(kernels, "_BACKWARD_TILES", ((32 * 4, 4),))
    calls = (15_500, "random"), (16_000, "equal")
    hold([triton], [norm_call(rows, 8, kind, True) for rows, kind in calls])


def test_runs_of_a_triton_program_add_up(triton, monkeypatch):
    """Programs take runs of tiles and part of another: each row is counted once."""
    from trifuse.kernels import dropout_add_layer_norm as kernels

    monkeypatch.setattr(kernels, "_MAX_WARPS", 4)
    monkeypatch.setattr(kernels, "_BACKWARD_TILES", ((8, 4),))  # tiles of one row
    most = kernels._MAX_TILES  # of one program
    for rows in (2 * kernels.RUN.value + 5, most, most + 1, 3 * most - 1):
        ours, _, exact = norm_call(rows, 8, "random", False)()
        for name, actual in ours().items():
            torch.testing.assert_close(actual.double(), exact[name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("N", [7, 8], ids=["a row for each warp", "a row for each block"])
def test_norm_in_cuda(N):
    """A thread sums 250 rows, or 1000."""
    with cuda_of("dropout_add_layer_norm") as cuda:
        hold([cuda], [norm_call(4000, N, kind, True) for kind in KINDS])


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 127, 128, 129, 512, 513, 1030])
def test_runs_of_a_cuda_block_add_up(rows):
    """Runs end with the last row, before it, or with only some warps of a block."""
    with cuda_of("dropout_add_layer_norm") as cuda, cuda.serving():
        for N in (7, 8):
            ours, _, exact = norm_call(rows, N, "random", False)()
            for name, actual in ours().items():
                torch.testing.assert_close(actual.double(), exact[name], rtol=1e-5, atol=1e-4)


# Attention's mask --------------------------------------------------------------------------------


def mask_call(
    lead: tuple[int, int],
    Lq: int,
    Lk: int,
    mask_shape: tuple[int, ...],
    kind: str,
    keys: int | None = None,  # attend to these alone, the first of Lk
):
    lengths = {} if keys is None else {"key_lengths": torch.full(lead[:1], keys)}

    def call():
        generator = torch.Generator().manual_seed(Lq)
        heads = (1, 1) if kind == "equal" else lead  # equal: all heads the same
        q, do = (torch.randn(*heads, Lq, 4, generator=generator) for _ in range(2))
        k, v = (torch.randn(*heads, Lk, 4, generator=generator) for _ in range(2))
        q, k, v, do = (t.expand(*lead, *t.shape[2:]).contiguous() for t in (q, k, v, do))
        do = do.abs() if kind == "one-signed" else do
        mask = torch.randn(mask_shape, generator=generator)

        def gradient(attention: Callable[..., Tensor], dtype: torch.dtype) -> Gradients:
            leaf = mask.to(dtype).requires_grad_()
            out = attention(*(t.to(dtype) for t in (q, k, v)), leaf)
            return {"mask": torch.autograd.grad(out, leaf, do.to(dtype))[0]}

        def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            scores = q @ k[..., :keys, :].transpose(-1, -2) / 2 + mask[..., :keys]
            return torch.softmax(scores, -1) @ v[..., :keys, :]

        def ours() -> Gradients:
            attention = functools.partial(trifuse.scaled_dot_product_attention, **lengths)
            return gradient(attention, torch.float32)

        return ours, gradient(formula, torch.float32), gradient(formula, torch.float64)

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_mask_of_512_heads(kind):
    shapes = ((1, 1, 16, 16), (16,))
    hold(CPP_KERNELS, [mask_call((64, 8), 16, 16, shape, kind) for shape in shapes])


@pytest.mark.parametrize("kind", KINDS)
def test_mask_of_10_to_the_5_queries(kind):
    hold(BEST, [mask_call((16, 8), 800, Lk, (Lk,), kind) for Lk in (5, 6, 7, 8)])


@pytest.mark.parametrize("kind", KINDS)
def test_mask_of_10_to_the_6_queries(kind):
    hold(BEST, [mask_call((64, 16), 1000, 4, (4,), kind)])


def test_mask_in_triton(triton, monkeypatch):
    """One program takes all heads."""
    from trifuse.kernels import attention as kernels

    monkeypatch.setattr(kernels, "_MASK_PROGRAMS", 1)
    hold([triton], [mask_call((8, 8), 4, 4, (4, 4), "equal")])


def test_mask_in_cuda():
    """Adds up 512 partial sums, or two partial sums over 64 heads each.

    Two, because the mask has 4096 elements. The kernels leave out keys that are not attended to, so
    the model of CUDA has little to do.
    """
    calls = [
        mask_call((64, 8), 16, 16, (16, 16), "equal"),
        mask_call((16, 8), 1, 4096, (4096,), "equal", keys=64),
    ]
    with cuda_of("attention") as cuda:
        hold([cuda], calls)


# Attention's biases by distance, slopes and sinks -------------------------------------------------


def vector_call(name: str, lead: tuple[int, int], L: int, kind: str):
    """The gradient of ``relative_bias``, ``alibi_slopes`` or ``sinks``, in which all rows meet.

    "table" is a relative bias with an index.
    """

    def call():
        B, H = lead
        generator = torch.Generator().manual_seed(L)
        count = 2 * L - 1 if name in ("relative_bias", "table") else H
        vector = torch.rand(count, generator=generator)
        heads = (1, 1) if kind == "equal" else lead  # equal: all heads the same
        drawn = (torch.randn(*heads, L, 4, generator=generator) for _ in range(4))
        q, k, v, do = (t.expand(B, H, L, 4).contiguous() for t in drawn)
        do = do.abs() if kind == "one-signed" else do
        ahead = torch.arange(L) - torch.arange(L)[:, None]

        def formula(q: Tensor, k: Tensor, v: Tensor, vector: Tensor) -> Tensor:
            scores = q @ k.mT / 2
            if name in ("relative_bias", "table"):
                scores = scores + vector[ahead + L - 1]
            elif name == "alibi_slopes":
                scores = scores - vector[:, None, None] * ahead.abs()
            else:
                scores = torch.cat([scores, vector[:, None, None].expand(B, H, L, 1)], -1)
            return torch.softmax(scores, -1)[..., :L] @ v

        def operated(q: Tensor, k: Tensor, v: Tensor, vector: Tensor) -> Tensor:
            given = {name: vector}
            if name == "table":
                given = {"relative_bias": vector, "relative_index": ahead + L - 1}
            return trifuse.scaled_dot_product_attention(q, k, v, **given)

        def gradient(attention: Callable[..., Tensor], dtype: torch.dtype) -> Gradients:
            leaf = vector.to(dtype).requires_grad_()
            out = attention(*(t.to(dtype) for t in (q, k, v)), leaf)
            return {name: torch.autograd.grad(out, leaf, do.to(dtype))[0]}

        def ours() -> Gradients:
            return gradient(operated, torch.float32)

        return ours, gradient(formula, torch.float32), gradient(formula, torch.float64)

    return call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["relative_bias", "table", "alibi_slopes", "sinks"])
def test_vectors_of_10_to_the_5_rows(name, kind):
    """The sum of one head's sequences, or of few heads'; by few queries and by more."""
    sizes = (((12_500, 1), 8), ((1250, 8), 10))
    hold(BEST, [vector_call(name, lead, L, kind) for lead, L in sizes])


@pytest.mark.parametrize("name", ["relative_bias", "table", "sinks"])
def test_vectors_in_triton(triton, name, monkeypatch):
    """One program takes all heads. ALiBi's gradient follows from that of its table of biases."""
    from trifuse.kernels import attention as kernels

    monkeypatch.setattr(kernels, "_MASK_PROGRAMS", 1)
    hold([triton], [vector_call(name, (32, 1), 4, "equal")])


# LSTM, GRU and RNN --------------------------------------------------------------------------------


def recurrent_call(operator: str, tokens: tuple[int, int], kind: str, with_options: bool = False):
    def call():
        (T, B), H = tokens, 4
        gates = {"lstm": 4, "gru": 3, "rnn": 1}[operator]
        generator = torch.Generator().manual_seed(T * B)
        shapes = {
            "weight_ih": (gates * H, H),
            "weight_hh": (gates * H, H),
            "bias_ih": (gates * H,),
            "bias_hh": (gates * H,),
        }
        if with_options and operator == "lstm":
            shapes |= {
                "weight_peephole": (3, H),
                "norm_ih_weight": (4 * H,),
                "norm_hh_weight": (4 * H,),
                "norm_cell_weight": (H,),
                "norm_cell_bias": (H,),
            }
        parameters = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        x = torch.randn(T, B, H, generator=generator)
        grad = terms(kind, T, B, H)

        def gradients(layer: Callable[..., Tensor], dtype: torch.dtype) -> Gradients:
            leaves = {n: p.to(dtype).requires_grad_() for n, p in parameters.items()}
            found = torch.autograd.grad(
                layer(x.to(dtype), leaves), list(leaves.values()), grad.to(dtype)
            )
            return dict(zip(leaves, found, strict=True))

        # With a small eps, normalising four nearly equal numbers would amplify their rounding
        # errors, and the error of a sum would be that of a few such rows.
        of = {"lstm": {"eps": 1.0}, "gru": {"linear_before_reset": False}}
        options = of[operator] if with_options else {}

        def operated(x: Tensor, leaves: Gradients) -> Tensor:
            return getattr(trifuse, operator)(x, None, **leaves, **options)[0]

        def eager(x: Tensor, leaves: Gradients) -> Tensor:
            if with_options:
                with trifuse.backend("eager"):
                    return operated(x, leaves)
            layer = getattr(torch.nn, operator.upper())(H, H).to(x.dtype)
            named = {f"{n}_l0": leaf for n, leaf in leaves.items()}
            return torch.func.functional_call(layer, named, (x,))[0]

        def ours() -> Gradients:
            return gradients(operated, torch.float32)

        return ours, gradients(eager, torch.float32), gradients(eager, torch.float64)

    return call


@pytest.mark.parametrize("operator", ["gru", "rnn"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.covering(1)
def test_gru_and_rnn_of_10_to_the_5_tokens(kind, operator):
    calls = [recurrent_call(operator, tokens, kind) for tokens in ((10, 10_000), (100, 1000))]
    hold(CPP_KERNELS, calls)


@pytest.mark.parametrize("kind", KINDS)
def test_gru_with_the_reset_gate_first_of_10_to_the_5_tokens(kind):
    sizes = ((10, 10_000), (100, 1000))
    hold(CPP_KERNELS, [recurrent_call("gru", tokens, kind, with_options=True) for tokens in sizes])


@pytest.mark.parametrize("kind", KINDS)
def test_lstm_of_10_to_the_5_tokens(kind):
    hold(CPP_KERNELS, [recurrent_call("lstm", (20, 5000), kind)])


@pytest.mark.parametrize("kind", KINDS)
def test_lstm_with_options_of_10_to_the_5_tokens(kind):
    """Several calls: a vector of four sums may be exact by luck in one."""
    sizes = ((5, 20_000), (10, 10_000), (25, 4000))
    hold(CPP_KERNELS, [recurrent_call("lstm", tokens, kind, with_options=True) for tokens in sizes])


def steady_call(tokens: tuple[int, int]):
    """An LSTM with equal steps after the first few; gradients of the vectors within its cell."""

    def call():
        (T, B), H = tokens, 4
        shapes = {
            "weight_ih": (4 * H, H),
            "weight_hh": (4 * H, H),
            "norm_ih_weight": (4 * H,),
            "norm_hh_weight": (4 * H,),
            "weight_peephole": (3, H),
            "norm_cell_weight": (H,),
            "norm_cell_bias": (H,),
        }
        generator = torch.Generator().manual_seed(T)
        parameters = {n: 0.1 * torch.randn(s, generator=generator) for n, s in shapes.items()}
        parameters["norm_cell_weight"] += 1
        x, grad = terms("equal", T, B, H) - 0.5, terms("equal", T, B, H)
        vectors = list(shapes)[4:]

        def gradients(dtype: torch.dtype) -> Gradients:
            leaves = {n: p.to(dtype).requires_grad_() for n, p in parameters.items()}
            out = trifuse.lstm(x.to(dtype), None, **leaves, eps=1e-2)[0]
            wanted = [leaves[n] for n in vectors]
            return dict(zip(vectors, torch.autograd.grad(out, wanted, grad.to(dtype)), strict=True))

        with trifuse.backend("eager"):
            eager, exact = gradients(torch.float32), gradients(torch.float64)
        return lambda: gradients(torch.float32), eager, exact

    return call


def test_steps_of_an_lstm_in_triton(triton):
    """One program takes all steps."""
    hold([triton], [steady_call((150, 1))])


def test_steps_of_an_lstm_in_cuda():
    with cuda_of("lstm") as cuda:
        hold([cuda], [steady_call((T, 1)) for T in (150, 700)])


@pytest.mark.parametrize("operator", ["gru", "lstm", "rnn"])
def test_recurrent_of_10_to_the_6_tokens(operator):
    hold(BEST, [recurrent_call(operator, (5, 200_000), "equal")])


# Threads -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not CPP_KERNELS, reason="the C++ extension is not built")
@pytest.mark.parametrize(
    "call",
    [
        norm_call(5000, 8, "random", False),
        mask_call((4, 4), 200, 20, (20,), "random"),
        recurrent_call("lstm", (5, 700), "random", with_options=True),
        recurrent_call("gru", (5, 700), "random"),
        recurrent_call("rnn", (5, 700), "random"),
    ],
    ids=["norm", "mask", "lstm", "gru", "rnn"],
)
def test_threads_change_no_bit(call):
    ours, _, _ = call()
    alone = ours()
    torch.set_num_threads(3)
    together = ours()
    assert all(torch.equal(alone[name], together[name]) for name in alone)
