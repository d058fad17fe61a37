"""Triton's attention of few queries over many keys, computed in chunks of keys.

Its backward is that of other calls. Chunks of 64 keys are two blocks of the interpreter's tiles, so
140 keys make three chunks.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from attention_cases import (
    Case,
    assert_equal,
    boundaries,
    judge,
    make,
    normal,
    packed,
    pairs,
    record_accuracy,
)
from numerics import Accuracy, lay_out
from tested_kernels import Kernel
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

import trifuse

NAN, INF = float("nan"), float("inf")
LOWER_RIGHT = CausalVariant.LOWER_RIGHT
CHUNK = 64
Lq, Lk = 2, 140
SIZES: dict[str, Any] = {"B": 2, "H": 2, "Hkv": 1, "Lq": Lq, "Lk": Lk}
IN_CHUNKS, AT_ONCE = ["chunk", "join"], ["forward"]


@pytest.fixture(autouse=True)
def launched(triton: Kernel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that calls have launched."""
    attention = pytest.importorskip("trifuse.kernels.attention")
    names: list[str] = []
    launch = attention._AttentionCall.launch

    def record(call: Any, kernel: str, *args: Any, **constants: Any) -> None:
        names.append(kernel)
        launch(call, kernel, *args, **constants)

    monkeypatch.setattr(attention, "_CHUNK", CHUNK)
    monkeypatch.setattr(attention._AttentionCall, "launch", record)
    return names


def forward(case: Case) -> tuple[Tensor, Tensor]:
    """Returns the output and the logsumexp."""
    names = ("sinks", "relative_bias", "query_bias", "key_bias", "relative_index")
    with torch.no_grad():
        return trifuse.scaled_dot_product_attention(
            *(case.query, case.key, case.value, case.attn_mask),
            return_lse=True,
            **{name: getattr(case, name) for name in names},
            **case.options,
        )


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for name, a, e in zip(("out", "lse"), actual, expected, strict=True):
        assert_equal(a, e, name)


def with_keys(case: Case, keys: slice, **options: Any) -> Case:
    """Returns the case with a part of its keys."""
    return dataclasses.replace(
        case,
        key=case.key[:, :, keys],
        value=case.value[:, :, keys],
        options=case.options | options,
    )


def padded(case: Case, more: int, **options: Any) -> Case:
    """Returns the case with keys of NaN past its own."""
    nan = {
        f: torch.cat([x, x.new_full((*x.shape[:2], more, x.shape[3]), NAN)], 2)
        for f, x in (("key", case.key), ("value", case.value))
    }
    return dataclasses.replace(case, **nan, options=case.options | options)


# Numbers ----------------------------------------------------------------------------------------


def of_keys(*kept: slice) -> Tensor:
    """Returns a boolean mask (1, 1, 1, Lk) that keeps these keys."""
    mask = torch.zeros(1, 1, 1, Lk, dtype=torch.bool)
    for keys in kept:
        mask[..., keys] = True
    return mask


def bias(*shape: int) -> Tensor:
    """Returns a float mask that leaves a third of the pairs out."""
    mask = normal(*shape, seed=9)
    return mask.masked_fill(mask > 0.4, -INF)


def indexed(kind: str) -> dict[str, Any]:
    """Returns three tables of 9 columns, and an index of pairs or of distances."""
    shape = (Lq, Lk) if kind == "pairs" else (Lq + Lk - 1,)
    return {
        "relative_bias": normal(1, 2, 9, seed=9),
        "query_bias": normal(2, 2, Lq, 9, seed=10),
        "key_bias": normal(2, 2, Lk, 9, seed=11),
        "relative_index": torch.randint(9, shape, generator=torch.Generator().manual_seed(12)),
    }


FEATURES: dict[str, dict[str, Any]] = {
    "shared heads": {},
    "a key head each": {"Hkv": 2, "E": 24, "Ev": 40},
    "one query, bfloat16": {"Lq": 1, "H": 6, "Hkv": 2, "B": 1, "dtype": torch.bfloat16},
    "more rows than a tile": {"B": 1, "H": 5, "Lq": 15, "is_causal": LOWER_RIGHT},
    "softcap, negative scale": {"softcap": 1.5, "scale": -0.3},
    "causal": {"is_causal": True},
    "lengths, one of them 0": {"key_lengths": torch.tensor([70, 0])},
    "window in the second chunk": {"diagonal": 100, "window": (20, 5)},
    "a diagonal each": {
        "diagonal": torch.tensor([3, 131]),
        "is_causal": True,
        "window": 50,
        "sinks": normal(2, seed=7),
    },
    "bool mask": {"mask": normal(2, 2, Lq, Lk, seed=8) > 0, "sinks": normal(2, seed=7)},
    "bool mask of keys": {"mask": of_keys(slice(70, 80), slice(130, 133))},
    "bool mask of heads": {"mask": torch.tensor([True, False])[:, None, None]},
    "float mask": {"mask": bias(2, 2, Lq, Lk)},
    "float mask of keys": {"mask": bias(2, 2, 1, Lk), "Hkv": 2},
    "relative bias": {"relative_bias": bias(2, 2, Lq + Lk - 1), "is_causal": LOWER_RIGHT},
    "tables by pairs": indexed("pairs"),
    "tables by distances": {**indexed("distances"), "key_lengths": torch.tensor([Lk, 100])},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature(feature, triton, launched):
    """The output and the logsumexp, against the formula in float64."""
    case = make(**SIZES | FEATURES[feature])
    actual = forward(case)
    assert launched == IN_CHUNKS
    accuracy, judged = Accuracy(triton.name), judge(case)
    for name, a in zip(("out", "lse"), actual, strict=True):
        accuracy.record(name, a, *(getattr(x, name) for x in judged))


@pytest.mark.parametrize("options", [{"is_causal": LOWER_RIGHT}, {"mask": bias(2, 1, Lq, Lk)}])
def test_gradients(triton, launched, options):
    case = make(**SIZES, sinks=normal(2, seed=7), **options)
    record_accuracy(Accuracy(triton.name), case, judge(case))
    assert launched[:2] == IN_CHUNKS


# Bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exclusion", ["lengths", "bool mask", "float mask", "window"])
def test_one_chunk_with_keys_has_the_bits_of_a_call_at_once(launched, exclusion):
    """The chunk may be any that is left."""
    keys, alone, options = slice(CHUNK, 2 * CHUNK), {}, {}
    mask = None
    if exclusion == "lengths":
        keys = slice(50)
        options = {"key_lengths": torch.tensor([50, 50])}
    elif exclusion == "window":  # the first query's begins with the chunk, the last's ends with it
        alone = {"diagonal": 0, "window": (0, CHUNK - Lq)}
        options = alone | {"diagonal": CHUNK}
    else:
        mask = of_keys(keys) if exclusion == "bool mask" else of_keys(keys).float().log()
    case = make(**SIZES)
    part = with_keys(case, keys, **alone)
    if mask is not None:
        part = dataclasses.replace(part, attn_mask=mask[..., keys])
    expected = forward(part)
    whole = dataclasses.replace(case, attn_mask=mask, options=case.options | options)
    assert_same(forward(whole), expected)
    assert launched == AT_ONCE + IN_CHUNKS


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "diagonal": torch.tensor([70, 98])}, {"softcap": 1.5, "window": 90}],
    ids=["all", "causal", "window, softcap"],
)
def test_alone_in_a_batch_and_padded_further(launched, options):
    """A sequence has the same bits with NaN for padding, up to the end of its chunk or past it."""
    case = with_keys(make(**SIZES, **options), slice(100))
    expected = forward(case)
    lengths = {"key_lengths": torch.tensor([100, 100])}
    for more in (10, 250):
        assert_same(forward(padded(case, more, **lengths)), expected)
    each = {k: v[1:] if isinstance(v, Tensor) else v for k, v in case.options.items()}
    fields = ("query", "key", "value")
    alone = dataclasses.replace(case, **{f: getattr(case, f)[1:] for f in fields}, options=each)
    assert_same(forward(alone), tuple(x[1:] for x in expected))
    assert launched == 4 * IN_CHUNKS


def test_heads_that_share_keys_have_the_bits_of_heads_with_copies(launched):
    case = make(
        **SIZES | {"H": 4, "Hkv": 2, "Lq": 3}, mask=bias(2, 4, 3, Lk), is_causal=LOWER_RIGHT
    )
    copies = {f: getattr(case, f).repeat_interleave(2, 1) for f in ("key", "value")}
    assert_same(forward(case), forward(dataclasses.replace(case, **copies)))


def test_one_query_has_the_bits_of_several(launched):
    case = make(**SIZES | {"Lq": 5, "H": 4})
    one = dataclasses.replace(case, query=case.query[:, :, 3:4])
    assert_same(forward(one), tuple(x[:, :, 3:4] for x in forward(case)))


@pytest.mark.parametrize("layout", ["transposed", "gaps", "offset"])
def test_layouts_change_nothing(layout):
    case = make(**SIZES, dtype=torch.bfloat16, mask=bias(2, 2, Lq, Lk))
    fields = ("query", "key", "value", "attn_mask")
    laid_out = {f: lay_out(getattr(case, f), layout) for f in fields}
    assert_same(forward(dataclasses.replace(case, **laid_out)), forward(case))


def test_packed_sequences_are_computed_at_once(launched):
    """Bit for bit as each of them by itself, if it has no more keys than a chunk."""
    lengths_q, lengths_k = [2, 1, 0, 2], [100, 30, 7, 0]
    case = packed(lengths_q, lengths_k, rest=3, H=2, Hkv=1, is_causal=LOWER_RIGHT)
    cu_q, cu_k = boundaries(lengths_q), boundaries(lengths_k)
    tokens = [x[0].transpose(0, 1) for x in (case.query, case.key, case.value)]
    with torch.no_grad():
        out, lse = trifuse.varlen_attention(
            *tokens, cu_q, cu_k, 2, 100, return_lse=True, **case.options
        )
    assert launched == AT_ONCE
    for q, k in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        if k[1] - k[0] > CHUNK:
            continue
        alone = dataclasses.replace(with_keys(case, slice(*k)), query=case.query[:, :, slice(*q)])
        mine = tuple(x[slice(*q)].transpose(0, 1)[None] for x in (out, lse))
        assert_same(mine, forward(alone))
    assert launched[1:] == 3 * AT_ONCE
    assert out[5:].eq(0).all()
    assert lse[5:].eq(-INF).all()


# Pairs that take no part, and numbers that are not finite -----------------------------------------


@pytest.mark.parametrize("exclusion", ["bool mask", "float mask", "window"])
def test_keys_left_out_pass_on_no_poison(exclusion):
    """Some keys of each chunk take part, or those of a window in the second chunk."""
    options: dict[str, Any] = {"diagonal": 75, "window": 20}
    if exclusion != "window":
        keep = normal(2, 1, 1, Lk, seed=8) > 0
        options = {"mask": keep if exclusion == "bool mask" else keep.float().log()}
    case = make(**SIZES, **options)
    seen = pairs(case).any(2).any(1)[:, None, :, None]
    assert not seen.all()
    poison = {f: getattr(case, f).where(seen, NAN) for f in ("key", "value")}
    assert_same(forward(dataclasses.replace(case, **poison)), forward(case))


@pytest.mark.parametrize(("where", "number"), [("key", NAN), ("value", NAN), ("value", INF)])
def test_a_number_that_is_not_finite_reaches_the_rows_that_see_it(where, number):
    """Key 3 of the second chunk is seen by the first query alone; its column is 4."""
    keep = torch.ones(Lq, Lk, dtype=torch.bool)
    keep[1:, CHUNK + 3] = False
    case = make(**SIZES, mask=keep)
    x = getattr(case, where).clone()
    x[1, 0, CHUNK + 3, 4] = number
    poisoned = dataclasses.replace(case, **{where: x})
    actual, clean = forward(poisoned), forward(case)
    with trifuse.backend("eager"):
        expected = forward(poisoned.double())
    for a, e, c in zip(actual, expected, clean, strict=True):
        assert torch.equal(a.isnan(), e.isnan())
        assert_equal(a[~a.isnan()], c[~a.isnan()])
    assert actual[0][1, :, 0].isnan().any()
    assert not actual[0][1, :, 1].isnan().any()


@pytest.mark.parametrize("chunks", ["one", "all"])
def test_scores_of_minus_infinity(chunks):
    """A chunk of them weighs nothing. A row of nothing else is NaN, unless it has no pair."""
    # The query has no other column than that of the infinite key.
    case = make(**SIZES | {"E": 1}, key_lengths=torch.tensor([Lk, 0]))
    query, key = case.query.abs(), case.key.clone()
    key[:, :, slice(CHUNK, 2 * CHUNK) if chunks == "one" else slice(None)] = -INF
    case = dataclasses.replace(case, query=query, key=key)
    out, lse = forward(case)
    assert out[1].eq(0).all()
    assert lse[1].eq(-INF).all()
    if chunks == "all":
        assert out[0].isnan().all()
        assert lse[0].isnan().all()
    else:
        others = dataclasses.replace(case, attn_mask=of_keys(slice(CHUNK), slice(2 * CHUNK, Lk)))
        assert_same((out, lse), forward(others))


def test_large_scores():
    """Chunks whose largest scores are near the two ends of float32's range."""
    mask = torch.zeros(1, 1, 1, Lk)
    mask[..., :CHUNK], mask[..., CHUNK : 2 * CHUNK] = -3e38, 3e38
    case = make(**SIZES, mask=mask)
    out, lse = forward(case)
    assert lse.eq(3e38).all()
    # The mask absorbs the scores.
    mean = case.value[:, :, CHUNK : 2 * CHUNK].mean(2, keepdim=True)
    torch.testing.assert_close(out, mean.expand_as(out))


# The choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({}, IN_CHUNKS),
        ({"Lk": CHUNK + 1, "Lq": 16}, IN_CHUNKS),
        ({"Lk": CHUNK}, AT_ONCE),
        ({"Lq": 17}, AT_ONCE),
        ({"dropout_p": 0.1}, AT_ONCE),
        ({"Lq": 0}, IN_CHUNKS),
        ({"B": 0}, IN_CHUNKS),
    ],
    ids=str,
)
def test_calls_that_are_computed_in_chunks(launched, options, kernels):
    out, _lse = forward(make(**{"B": 1, "H": 1, "Lq": 1, "Lk": Lk, "E": 4} | options))
    assert launched == kernels
    assert not out.isnan().any()


def test_chunks_fit_every_configuration(monkeypatch):
    """Chunks are whole blocks of keys, and few queries are at most one block. So the blocks of a
    chunk are those of a call without chunks."""
    monkeypatch.undo()
    attention = pytest.importorskip("trifuse.kernels.attention")
    for unit, head_dim, extras in itertools.product(
        ("fma", "mma", "wgmma"), (64, 128, 256), (False, True)
    ):
        workload = attention.Workload("forward", unit, head_dim, extras)
        configs = attention.configs(workload)
        assert attention.configs(workload._replace(kernel="chunk")) == configs
        for config in configs:
            assert attention._CHUNK % config.N == 0
            assert attention._FEW_QUERIES <= config.M
