"""Triton's attention of few queries over many keys, computed in chunks of keys.

Its backward is that of other calls. Chunks of 64 keys are two blocks of the interpreter's tiles, so
140 keys make three chunks. Packed sequences are compared with each sequence by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from attention_cases import (
    Case,
    Results,
    assert_equal,
    boundaries,
    by_itself,
    forward,
    forward_packed,
    judge,
    make,
    normal,
    packed,
    pairs,
    record_accuracy,
    run,
    run_packed,
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


# Packed sequences -------------------------------------------------------------------------------

# Neither the sequences nor the tokens past the last begin with a chunk of the tensor.
LENGTHS_Q, LENGTHS_K = [2, 1, 0, 3, 1, 2], [140, 0, 30, 100, 64, 7]
LONGEST = (max(LENGTHS_Q), max(LENGTHS_K))
REST = 5  # tokens past the last sequence


def packed_tables(kind: str) -> dict[str, Any]:
    """As :func:`indexed`, for packed sequences."""
    shape = LONGEST if kind == "pairs" else (sum(LONGEST) - 1,)
    return {
        "relative_bias": normal(1, 2, 9, seed=9),
        "query_bias": normal(1, 2, sum(LENGTHS_Q) + REST, 9, seed=10),
        "key_bias": normal(1, 2, sum(LENGTHS_K) + REST, 9, seed=11),
        "relative_index": torch.randint(9, shape, generator=torch.Generator().manual_seed(12)),
    }


N = len(LENGTHS_Q)
PACKED_FEATURES: dict[str, dict[str, Any]] = {
    "shared heads": {},
    "a key head each": {"Hkv": 2, "E": 24, "Ev": 40},
    "more rows than a tile, bfloat16": {"H": 23, "E": 5, "dtype": torch.bfloat16},
    "softcap, negative scale": {"softcap": 1.5, "scale": -0.3},
    "causal": {"is_causal": True},
    "lower right, window": {"is_causal": LOWER_RIGHT, "window": 70, "sinks": normal(2, seed=7)},
    "window in the second chunk": {"diagonal": 80, "window": (9, 5)},
    "a diagonal each": {
        "diagonal": torch.tensor([131, 3, 0, 98, -2, 2**63 - 1]),
        "is_causal": True,
        "window": 50,
    },
    "bool mask": {"mask": normal(N, 2, *LONGEST, seed=8) > 0},
    "bool mask of keys": {"mask": of_keys(slice(70, 80), slice(130, 133))},
    "float mask": {"mask": bias(N, 2, *LONGEST)},
    "float mask of keys": {"mask": bias(N, 1, 1, LONGEST[1]), "Hkv": 2},
    "relative bias": {"relative_bias": bias(N, 2, sum(LONGEST) - 1), "is_causal": LOWER_RIGHT},
    "relative bias, shared": {"relative_bias": bias(1, 1, sum(LONGEST) - 1)},
    "tables by pairs": packed_tables("pairs"),
    "tables by distances": {**packed_tables("distances"), "is_causal": LOWER_RIGHT},
}


@pytest.mark.parametrize("feature", PACKED_FEATURES)
def test_packed_is_each_sequence_by_itself(feature, triton, launched):
    """Bit for bit, in chunks or at once, and against the formula in float64."""
    case = packed(LENGTHS_Q, LENGTHS_K, REST, **{"H": 2, "Hkv": 1} | PACKED_FEATURES[feature])
    for field in ("query", "key", "value"):
        getattr(case, field)[:, :, -REST:] = NAN
    together = forward_packed(case, LENGTHS_Q, LENGTHS_K)
    assert launched == IN_CHUNKS
    accuracy = Accuracy(triton.name)
    for b, nq in enumerate(LENGTHS_Q):
        launched.clear()
        alone = by_itself(case, LENGTHS_Q, LENGTHS_K, b)
        mine = tuple(x[:, :, sum(LENGTHS_Q[:b]) :][:, :, :nq] for x in together)
        assert_same(mine, forward(alone))
        assert launched == (IN_CHUNKS if LENGTHS_K[b] > CHUNK else AT_ONCE)
        if LENGTHS_K[b] == 0:
            assert mine[0].eq(0).all()
            assert mine[1].eq(-INF if case.sinks is None else case.sinks[:, None]).all()
        elif nq > 0:
            judged = judge(alone)
            for name, x in zip(("out", "lse"), mine, strict=True):
                accuracy.record(name, x, *(getattr(y, name) for y in judged))
    accuracy.conclude()
    out, lse = (x[:, :, -REST:] for x in together)
    assert out.eq(0).all()
    assert lse.eq(-INF if case.sinks is None else case.sinks[:, None]).all()


def test_packed_gradients(launched):
    case = packed(LENGTHS_Q, LENGTHS_K, H=2, Hkv=1, is_causal=LOWER_RIGHT)
    cu = (boundaries(LENGTHS_Q), boundaries(LENGTHS_K))
    together = run_packed(case, *cu, max_seqlen_q=LONGEST[0], max_seqlen_k=LONGEST[1])
    assert launched[:2] == IN_CHUNKS
    alone = [run(by_itself(case, LENGTHS_Q, LENGTHS_K, b)) for b in range(N)]
    for name, t, *parts in zip(Results._fields[:5], together, *alone, strict=False):
        assert_equal(t, torch.cat(parts, 2), name)


@pytest.mark.parametrize("rest", [0, 150])
def test_a_query_each_over_keys_of_very_different_lengths(launched, rest):
    """Places of chunks are exactly as many as lengths of 1, or of one more than a chunk, need."""
    lengths_k = [1, 1, CHUNK, CHUNK + 1, 1, 0, 0, 3 * CHUNK + 1, CHUNK - 1, 2, 200, 0, 1]
    lengths_q = [1] * len(lengths_k)
    case = packed(lengths_q, lengths_k, rest, H=2, Hkv=1, E=4)
    expected = forward_packed(case, lengths_q, lengths_k)
    assert launched == IN_CHUNKS
    # A loose bound on the lengths only adds programs.
    assert_same(forward_packed(case, lengths_q, lengths_k, max_seqlen_k=9999), expected)
    for b, keys in enumerate(itertools.pairwise(boundaries(lengths_k))):
        alone = dataclasses.replace(
            with_keys(case, slice(*keys)), query=case.query[:, :, b : b + 1]
        )
        launched.clear()
        same = forward(padded(alone, 2 * CHUNK, key_lengths=torch.tensor([lengths_k[b]])))
        assert launched == IN_CHUNKS
        assert_same(tuple(x[:, :, b : b + 1] for x in expected), same)
    assert expected[0][:, :, len(lengths_q) :].eq(0).all()
    assert expected[1][:, :, len(lengths_q) :].eq(-INF).all()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_packed_without_tokens(launched, lengths):
    """Tokens past the last sequence, and none before them."""
    case = packed(lengths, lengths, rest=CHUNK + 1, H=2, Hkv=1)
    case = dataclasses.replace(case, query=case.query[:, :, :3])
    out, lse = forward_packed(case, lengths, lengths, max_seqlen_q=16, max_seqlen_k=CHUNK + 1)
    assert launched == IN_CHUNKS
    assert out.eq(0).all()
    assert lse.eq(-INF).all()


@pytest.mark.parametrize(
    ("bounds", "kernels"),
    [
        ({}, IN_CHUNKS),
        ({"max_seqlen_q": 16, "max_seqlen_k": 4000}, IN_CHUNKS),
        ({"max_seqlen_q": None}, AT_ONCE),  # 18 tokens
        ({"max_seqlen_k": None}, IN_CHUNKS),
        ({"max_seqlen_q": 17}, AT_ONCE),
        ({"max_seqlen_k": CHUNK}, AT_ONCE),
    ],
    ids=str,
)
def test_bounds_decide_which_packed_calls_are_computed_in_chunks(launched, bounds, kernels):
    """The lengths do not: no sequence has more keys than a chunk."""
    lengths_q, lengths_k = [1] * 18, [CHUNK, 9] * 9
    case = packed(lengths_q, lengths_k, H=1, E=4)
    given = {"max_seqlen_q": 1, "max_seqlen_k": CHUNK + 1} | bounds
    out, _lse = forward_packed(case, lengths_q, lengths_k, **given)
    assert launched == kernels
    assert not out.isnan().any()


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
