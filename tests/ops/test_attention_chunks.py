"""Chunks of keys: calls longer than a chunk have the same bits in every form and on any number of
threads, which may share the keys of a few queries."""

from __future__ import annotations

from random import Random

import pytest
import torch
from attention_cases import draw_decoding_case, judge, make, normal, record_accuracy
from numerics import Accuracy
from torch import Tensor

import trifuse

CHUNK = 512  # keys; kChunkKeys in csrc/cpu/attention_chunks.h
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors(dtype: torch.dtype, H: int, Hkv: int, Lk: int, E: int = 64, B: int = 1) -> list[Tensor]:
    """Returns 70 queries, keys and values."""
    shapes = ((B, H, 70, E), (B, Hkv, Lk, E), (B, Hkv, Lk, E))
    return [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("H", "Hkv"), [(4, 4), (8, 1)])
def test_one_query_in_every_form(cpp_kernel, dtype, H, Hkv):
    """Alone, among other queries, with keys padded by lengths or by a mask, and packed."""
    Lk = 2 * CHUNK + 276
    q, k, v = tensors(dtype, H, Hkv, Lk)
    more_k, more_v = (torch.cat([x, normal(1, Hkv, 300, 64).to(dtype)], 2) for x in (k, v))
    lengths = torch.tensor([Lk])
    mask = (torch.arange(Lk + 300) < Lk)[None]
    flat = [x[0].transpose(0, 1) for x in (q[:, :, :1], more_k, more_v)]
    for threads in (1, 3):
        torch.set_num_threads(threads)

        def attend(*args: Tensor | None, **options: object) -> Tensor:
            return trifuse.scaled_dot_product_attention(*args, enable_gqa=True, **options)

        alone = attend(q[:, :, :1], k, v)
        assert torch.equal(attend(q, k, v)[:, :, :1], alone)
        assert torch.equal(attend(q[:, :, :3], k, v)[:, :, :1], alone)
        assert torch.equal(attend(q[:, :, :1], more_k, more_v, key_lengths=lengths), alone)
        assert torch.equal(attend(q, more_k, more_v, key_lengths=lengths)[:, :, :1], alone)
        assert torch.equal(attend(q[:, :, :1], more_k, more_v, mask), alone)
        assert torch.equal(attend(q, more_k, more_v, mask)[:, :, :1], alone)
        packed = trifuse.varlen_attention(
            *flat,
            torch.tensor([0, 1, 1]),
            torch.tensor([0, Lk, Lk + 300]),
            1,
            Lk,
            enable_gqa=True,
        )
        assert torch.equal(packed.transpose(0, 1)[None], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (100, 0)},  # some chunks have no visible key
        {"dropout_p": 0.3},
        {"key_lengths": (3 * CHUNK + 1, 0)},
        {"key_lengths": (CHUNK, 2 * CHUNK)},
    ],
    ids=str,
)
def test_threads_share_the_keys_of_a_query(cpp_kernel, dtype, options):
    """With one key head, a sequence is one task, which is split for several threads."""
    q, k, v = tensors(dtype, 6, 1, 3 * CHUNK + 200, B=2)
    options = dict(options)
    if "key_lengths" in options:
        options["key_lengths"] = torch.tensor(options["key_lengths"])
    if "window" in options:
        options["diagonal"] = k.size(2) - 1
    results = []
    for threads in (1, 2, 3, 8, 8):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        results.append(
            trifuse.scaled_dot_product_attention(
                q[:, :, :1], k, v, enable_gqa=True, return_lse=True, **options
            )
        )
    for out, logsumexp in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(logsumexp, results[0][1])
    with trifuse.backend("eager"):
        torch.manual_seed(0)
        expected, lse = trifuse.scaled_dot_product_attention(
            q[:, :, :1], k, v, enable_gqa=True, return_lse=True, **options
        )
    rounding = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(results[0][0], expected, rtol=8 * rounding, atol=rounding)
    torch.testing.assert_close(results[0][1], lse)


@pytest.mark.parametrize("queries", [1, 70])
def test_a_chunk_without_a_key_changes_no_bit(cpp_kernel, queries):
    """Masked chunks before and after the visible keys, with NaN in them."""
    q, k, v = (x[:, :, -2 * CHUNK :] for x in tensors(torch.float32, 4, 2, 3 * CHUNK))
    q = q[:, :, :queries]
    mask = torch.zeros(1, 3 * CHUNK, dtype=torch.bool)
    mask[:, CHUNK : 2 * CHUNK] = True
    nan = torch.full((1, 2, CHUNK, 64), torch.nan)
    alone = trifuse.scaled_dot_product_attention(
        q, k[:, :, :CHUNK], v[:, :, :CHUNK], enable_gqa=True
    )
    around = [torch.cat([nan, x[:, :, :CHUNK], nan], 2) for x in (k, v)]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        within = trifuse.scaled_dot_product_attention(q, *around, mask, enable_gqa=True)
        assert torch.equal(within, alone)


@pytest.mark.parametrize("queries", [1, 70])
def test_scores_that_overflow_later(cpp_kernel, queries):
    """+inf or NaN in one chunk makes the row NaN, whatever the others hold."""
    q, k, v = tensors(torch.float32, 2, 2, 3 * CHUNK)
    q = q[:, :, :queries]
    for bad in (torch.inf, torch.nan):
        for key in (3, CHUNK + 3, 2 * CHUNK + 3):
            worse = k.clone()
            worse[0, 0, key] = bad
            for threads in (1, 3):
                torch.set_num_threads(threads)
                out = trifuse.scaled_dot_product_attention(q, worse, v)
                assert out[0, 0].isnan().all()
                assert torch.equal(out[0, 1], trifuse.scaled_dot_product_attention(q, k, v)[0, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_calls_keep_to_the_numerics_rule(cpp_kernels, dtype):
    """Few and many queries over several chunks: outputs, logsumexp and every gradient."""
    torch.set_num_threads(3)
    random = Random(0)
    long = [
        make(B=1, Lq=70, Lk=3 * CHUNK - 60, E=16, dtype=dtype),
        make(B=2, H=4, Hkv=1, Lq=1, Lk=2 * CHUNK + 1, E=32, dtype=dtype),
    ]
    for case in [*long, *(draw_decoding_case(random, dtype, 3 * CHUNK) for _ in range(12))]:
        judged = judge(case)
        for kernel in cpp_kernels:
            with kernel.serving():
                record_accuracy(Accuracy(kernel.name), case, judged)
