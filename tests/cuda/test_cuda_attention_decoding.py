"""Attention's CUDA kernel for few queries beside many keys, under the model of CUDA on the host.

Its backward is that of the other kernels, so the tests run the forward alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from attention_cases import (
    Case,
    assert_equal,
    by_itself,
    check_past_two_to_the_31,
    draw_decoding_case,
    eager_torch,
    forward,
    forward_packed,
    judge,
    make,
    normal,
    packed,
    pairs,
    with_more_keys,
)
from host_build import Library, library_fixture
from numerics import Accuracy
from tested_kernels import Kernel
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

CUDA = Kernel("cuda")
DECODING, SUM = KERNELS = "attention_decoding", "attention_decoding_sum"
SPLIT = 256  # keys
LOWER_RIGHT = CausalVariant.LOWER_RIGHT
NAN, INF = float("nan"), float("inf")

library = library_fixture("attention")


@pytest.fixture(autouse=True)
def _decoding(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs tests with guarded memory and threads in a random order. Cases are in bfloat16."""
    monkeypatch.setitem(make.__kwdefaults__, "dtype", torch.bfloat16)
    with library.device(seed=1), library.guarded_memory(), CUDA.serving():
        yield


def served(library: Library, case: Case) -> bool:
    """Returns whether the kernel serves a call. Splits must be added up if there are several."""
    before = [library.launches(kernel) for kernel in KERNELS]
    forward(case)
    launches = [library.launches(k) - b for k, b in zip(KERNELS, before, strict=True)]
    assert launches[1] == (launches[0] and case.key.shape[2] > SPLIT)
    return launches[0] == 1


def check(library: Library, *cases: Case) -> None:
    accuracy = Accuracy(CUDA.name)
    for case in cases:
        judged = judge(case)
        before = library.launches(DECODING)
        for name, actual in zip(("out", "lse"), forward(case), strict=True):
            accuracy.record(name, actual, *(getattr(x, name) for x in judged))
        assert library.launches(DECODING) == before + 1
    if len(cases) > 1:
        accuracy.conclude()


def some(*shape: int) -> Tensor:
    """Returns a boolean mask that keeps half the pairs."""
    return normal(*shape, seed=8) > 0


def bias(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a float mask that leaves half the pairs out."""
    return (scale * normal(*shape, seed=9)).masked_fill(~some(*shape), -INF).to(dtype)


# Numbers -----------------------------------------------------------------------------------------

Lk = 600  # two splits, and part of a third
ONE: dict[str, Any] = {"B": 2, "H": 4, "Lq": 1, "Lk": Lk, "E": 64, "Hkv": 2}
SEVERAL = ONE | {"Lq": 4}
OWN_KEYS = ONE | {"H": 2}  # each query head has its own key head

FEATURES: dict[str, dict[str, Any]] = {
    "nothing": ONE,
    "own keys": OWN_KEYS,
    "8 heads": ONE | {"H": 8, "Hkv": 1},
    "16 rows": ONE | {"H": 16, "Hkv": 1},
    "scale": ONE | {"scale": 0.5},
    "negative scale": ONE | {"scale": -0.3},
    "large scale": ONE | {"scale": 2.0**21},
    "softcap": ONE | {"softcap": 1.5},
    "lengths": ONE | {"key_lengths": torch.tensor([Lk, 300])},
    "lengths, one of them 0": ONE | {"key_lengths": torch.tensor([0, 7], dtype=torch.int32)},
    "lengths that end a split": ONE | {"key_lengths": torch.tensor([2 * SPLIT, SPLIT])},
    "causal": ONE | {"is_causal": True},
    "causal, lower right": ONE | {"is_causal": LOWER_RIGHT},
    "window": ONE | {"is_causal": LOWER_RIGHT, "window": (100, None)},
    "window that leaves all out": ONE | {"window": (0, 5), "diagonal": -9},
    "diagonals": ONE | {"is_causal": True, "window": 290, "diagonal": torch.tensor([Lk - 9, 100])},
    "bool mask": ONE | {"mask": some(2, 1, 1, Lk)},
    "bool mask of heads": ONE | {"mask": some(2, 4, 1, Lk)},
    "bool mask that leaves all out": ONE | {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)},
    "float mask": ONE | {"mask": bias(1, 1, 1, Lk)},
    "float mask of heads": ONE | {"mask": bias(2, 4, 1, Lk)},
    "float mask in 16 bits": ONE | {"mask": bias(2, 1, 1, Lk, dtype=torch.bfloat16)},
    "steep float mask": ONE | {"mask": bias(2, 1, 1, Lk, scale=2000.0), "softcap": 3.0},
    "relative bias": ONE | {"relative_bias": normal(1, 4, Lk, seed=9)},
    "bool mask beside a relative bias": ONE
    | {"relative_bias": normal(1, 4, Lk, seed=9), "mask": some(2, 1, 1, Lk)},
    "float mask of heads beside a relative bias": ONE
    | {
        "relative_bias": bias(2, 4, 1, Lk)[:, :, 0],
        "mask": bias(1, 4, 1, Lk),
        "is_causal": LOWER_RIGHT,
    },
    "float mask in 16 bits beside a relative bias": ONE
    | {
        "relative_bias": bias(2, 1, 1, Lk)[:, :, 0],
        "mask": bias(2, 1, 1, Lk, dtype=torch.bfloat16),
        "key_lengths": torch.tensor([Lk, 300]),
    },
    "several queries": SEVERAL,
    "several queries, causal": SEVERAL | {"is_causal": LOWER_RIGHT},
    "several queries, window": SEVERAL | {"window": (1, 2), "diagonal": SPLIT - 2},
    "several queries, mask of keys": SEVERAL
    | {"mask": some(2, 1, 1, Lk), "is_causal": LOWER_RIGHT},
    "several queries, bool mask": OWN_KEYS | {"Lq": 3, "mask": some(2, 2, 3, Lk)},
    "several queries, float mask": OWN_KEYS | {"Lq": 16, "mask": bias(2, 2, 16, Lk)},
    "several queries, mask of queries": OWN_KEYS | {"Lq": 3, "mask": some(2, 2, 3, 1)},
    "several queries, relative bias": OWN_KEYS
    | {"Lq": 3, "relative_bias": normal(2, 1, Lk + 2, seed=9), "is_causal": LOWER_RIGHT},
    "several queries, bool mask beside a relative bias": OWN_KEYS
    | {"Lq": 3, "relative_bias": bias(1, 2, 1, Lk + 2)[:, :, 0], "mask": some(2, 1, 1, Lk)},
    "several queries, float mask beside a relative bias": OWN_KEYS
    | {
        "Lq": 16,
        "relative_bias": bias(2, 2, 1, Lk + 15)[:, :, 0],
        "mask": bias(2, 1, 16, Lk),
        "is_causal": LOWER_RIGHT,
    },
    "everything": OWN_KEYS
    | {
        "Lq": 5,
        "mask": bias(2, 2, 5, Lk),
        "is_causal": LOWER_RIGHT,
        "window": (270, None),
        "key_lengths": torch.tensor([Lk, 500]),
        "softcap": 2.0,
    },
}


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature(library, feature):
    check(library, make(**FEATURES[feature]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("E", "Ev"), [(8, 8), (40, 64), (64, 40), (128, 128), (128, 72), (72, 136), (256, 256)]
)
@pytest.mark.parametrize("keys", [129, SPLIT, 530])
@pytest.mark.covering(1)
def test_head_dims(library, dtype, E, Ev, keys):
    check(library, make(1, 4, 1, keys, E, Ev, Hkv=2, dtype=dtype))
    causal = {"is_causal": LOWER_RIGHT, "key_lengths": torch.tensor([keys - 1])}
    check(library, make(1, 2, 3, keys, E, Ev, Hkv=1, dtype=dtype, **causal))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calls_drawn_at_random(library, dtype):
    random = Random(5)
    check(library, *(draw_decoding_case(random, dtype, longest=600) for _ in range(30)))


def test_row_max_rises_by_little_and_by_more(library):
    case = make(1, 1, 1, 700, 64)
    case.query[..., 0] = 4
    case.key[..., 0] = torch.linspace(-20, 40, 700)
    check(library, case)


@pytest.mark.parametrize("layout", ["keys beside heads", "queries after heads", "odd queries"])
def test_layouts_change_nothing(library, layout):
    case = make(**SEVERAL)
    fields = {}
    if layout == "keys beside heads":
        fields = {f: getattr(case, f).transpose(1, 2).contiguous().transpose(1, 2)
                  for f in ("key", "value")}  # fmt: skip
    elif layout == "queries after heads":
        fields = {"query": case.query.transpose(1, 2).contiguous().transpose(1, 2)}
    else:
        apart = torch.full((*case.query.shape, 3), NAN, dtype=case.query.dtype)
        fields = {"query": apart[..., 1].copy_(case.query)}
    laid_out = dataclasses.replace(case, **fields)
    assert served(library, laid_out)
    for a, e in zip(forward(laid_out), forward(case), strict=True):
        assert_equal(a, e)


def test_elements_past_two_to_the_31(library):
    before = library.launches(DECODING)
    check_past_two_to_the_31(Lq=1, Lk=300)
    assert library.launches(DECODING) == before + 2


# Packed sequences -------------------------------------------------------------------------------

# No sequence but the first begins with a split of the tensor, and the tokens past the last don't.
LENGTHS_Q, LENGTHS_K = [2, 1, 0, 3, 1, 2], [600, 0, 30, 300, 256, 7]
N, REST = len(LENGTHS_K), 5
PACKED: dict[str, Any] = {"H": 4, "Hkv": 2, "E": 64, "lengths_q": [1, 1, 0, 1, 1, 1]}
PACKED_SEVERAL = PACKED | {"lengths_q": LENGTHS_Q}
PACKED_OWN_KEYS = PACKED_SEVERAL | {"H": 2}

PACKED_FEATURES: dict[str, dict[str, Any]] = {
    "nothing": PACKED,
    "16 rows": PACKED | {"H": 16, "Hkv": 1},
    "softcap, negative scale": PACKED | {"softcap": 1.5, "scale": -0.3},
    "causal": PACKED | {"is_causal": True},
    "lower right, window, sinks": PACKED
    | {"is_causal": LOWER_RIGHT, "window": 270, "sinks": normal(4, seed=7)},
    "window in the second split": PACKED | {"diagonal": SPLIT + 40, "window": (9, 5)},
    "a diagonal each": PACKED
    | {
        "diagonal": torch.tensor([Lk - 9, 3, 0, 290, -2, 2**63 - 1]),
        "is_causal": True,
        "window": 280,
    },
    "bool mask of heads": PACKED | {"mask": some(N, 4, 1, Lk)},
    "bool mask, shared": PACKED | {"mask": some(1, 1, 1, Lk)},
    "float mask of heads": PACKED | {"mask": bias(N, 4, 1, Lk), "softcap": 2.0},
    "float mask in 16 bits": PACKED | {"mask": bias(N, 1, 1, Lk, dtype=torch.bfloat16)},
    "relative bias": PACKED | {"relative_bias": bias(N, 4, 1, Lk)[:, :, 0]},
    "relative bias, lower right": PACKED
    | {"relative_bias": bias(1, 4, 1, Lk)[:, :, 0], "is_causal": LOWER_RIGHT},
    "bool mask beside a relative bias": PACKED
    | {"relative_bias": normal(N, 4, Lk, seed=9), "mask": some(N, 1, 1, Lk)},
    "several queries": PACKED_SEVERAL,
    "several queries, lower right": PACKED_SEVERAL | {"is_causal": LOWER_RIGHT},
    "several queries, mask of keys": PACKED_SEVERAL
    | {"mask": some(N, 1, 1, Lk), "is_causal": LOWER_RIGHT},
    "several queries, bool mask": PACKED_OWN_KEYS | {"mask": some(N, 2, 3, Lk)},
    "several queries, float mask": PACKED_OWN_KEYS | {"mask": bias(N, 1, 3, Lk)},
    "several queries, relative bias": PACKED_OWN_KEYS
    | {"relative_bias": bias(N, 2, 1, Lk + 2)[:, :, 0], "is_causal": LOWER_RIGHT},
    "several queries, float mask beside a relative bias": PACKED_OWN_KEYS
    | {"relative_bias": bias(N, 2, 1, Lk + 2)[:, :, 0], "mask": bias(1, 2, 3, Lk)},
}


def check_packed(
    library: Library, lengths_q: list[int], lengths_k: list[int], **options: Any
) -> None:
    """Checks that each sequence has the bits of a padded call, and follows the numerics rule.

    The tokens past the last sequence and the keys of the padding are NaN.
    """
    case = packed(lengths_q, lengths_k, REST, **options)
    for field in ("query", "key", "value"):
        getattr(case, field)[:, :, -REST:] = NAN
    before = [library.launches(kernel) for kernel in KERNELS]
    together = forward_packed(case, lengths_q, lengths_k)
    assert [library.launches(kernel) for kernel in KERNELS] == [n + 1 for n in before]
    accuracy, first = Accuracy(CUDA.name), 0
    for b, (queries, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        mine = tuple(x[:, :, first : first + queries] for x in together)
        first += queries
        if queries == 0:
            continue
        alone = by_itself(case, lengths_q, lengths_k, b)
        padded = with_more_keys(alone, max(keys, 2 * SPLIT) + 1 - keys)
        assert served(library, padded)
        for name, a, e in zip(("out", "lse"), mine, forward(padded), strict=True):
            assert_equal(a, e, name)
        if keys > 0:
            judged = judge(alone)
            for name, a in zip(("out", "lse"), mine, strict=True):
                accuracy.record(name, a, *(getattr(x, name) for x in judged))
    out, lse = (x[:, :, first:] for x in together)
    assert out.shape[2] == REST
    assert out.eq(0).all()
    assert lse.eq(-INF if case.sinks is None else case.sinks[:, None]).all()


@pytest.mark.parametrize("feature", PACKED_FEATURES)
def test_packed_is_each_sequence_padded(library, feature):
    check_packed(library, lengths_k=LENGTHS_K, **PACKED_FEATURES[feature])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("E", "Ev"), [(8, 8), (40, 64), (128, 72), (256, 256)])
@pytest.mark.covering(1)
def test_packed_head_dims(library, dtype, E, Ev):
    options = {"E": E, "Ev": Ev, "H": 2, "Hkv": 1, "dtype": dtype, "is_causal": LOWER_RIGHT}
    check_packed(library, [1, 3, 2], [1, 300, 140], **options)


def in_a_batch(case: Case, lengths_k: list[int]) -> Case:
    """Returns packed sequences of one query each, padded with NaN to a split and more."""
    longest = max(*lengths_k, SPLIT) + 9
    fields = {"query": case.query[0, :, : len(lengths_k)].transpose(0, 1)[:, :, None]}
    for name in ("key", "value"):
        tokens = getattr(case, name)[0]
        fields[name] = tokens.new_full((len(lengths_k), len(tokens), longest, tokens.shape[2]), NAN)
        first = 0
        for b, keys in enumerate(lengths_k):
            fields[name][b, :, :keys] = tokens[:, first : first + keys]
            first += keys
    return dataclasses.replace(
        case, **fields, options=case.options | {"key_lengths": torch.tensor(lengths_k)}
    )


@pytest.mark.parametrize("rest", [0, 300])
@pytest.mark.parametrize("sequences", [13, 33, 1100])
def test_a_query_each_over_keys_of_very_different_lengths(library, sequences, rest):
    """Places of splits are exactly as many as lengths of 1, or of one more than a split, need."""
    lengths_k = [1, 1, SPLIT, SPLIT + 1, 1, 0, 0, 3 * SPLIT + 1, SPLIT - 1, 2, 400, 0, 1]
    # The last sequence of each number of sequences has keys that are found only behind all others.
    lengths_k += [(0, 1, 3)[b % 3] for b in range(sequences - 14)] + [700] * (sequences > 13)
    lengths_q = [1] * sequences
    case = packed(lengths_q, lengths_k, rest, H=2, Hkv=1, E=8)
    before = library.launches(DECODING)
    expected = forward_packed(case, lengths_q, lengths_k)
    # A loose bound on the lengths only adds blocks.
    loose = forward_packed(case, lengths_q, lengths_k, max_seqlen_q=7, max_seqlen_k=9999)
    assert library.launches(DECODING) == before + 2
    same = forward(in_a_batch(case, lengths_k))
    for e, a, s in zip(expected, loose, same, strict=True):
        assert_equal(a, e)
        assert_equal(e[0, :, :sequences], s[:, :, 0].transpose(0, 1))
    assert expected[0][:, :, sequences:].eq(0).all()
    assert expected[1][:, :, sequences:].eq(-INF).all()


def test_packed_sequences_do_not_touch_each_other():
    """NaN in all queries, keys and values of the others."""
    lengths_q, lengths_k = [2, 1, 3, 1], [300, 257, 5, 400]
    case = packed(lengths_q, lengths_k, REST, H=2, Hkv=1, E=64, is_causal=LOWER_RIGHT)
    expected = forward_packed(case, lengths_q, lengths_k)
    for b in range(4):
        queries, keys = (
            slice(sum(lengths[:b]), sum(lengths[: b + 1])) for lengths in (lengths_q, lengths_k)
        )
        poisoned = {}
        for field, kept in (("query", queries), ("key", keys), ("value", keys)):
            x = getattr(case, field)
            poisoned[field] = torch.full_like(x, NAN)
            poisoned[field][:, :, kept] = x[:, :, kept]
        actual = forward_packed(dataclasses.replace(case, **poisoned), lengths_q, lengths_k)
        for a, e in zip(actual, expected, strict=True):
            assert_equal(a[:, :, queries], e[:, :, queries])
            assert_equal(a[:, :, -REST:], e[:, :, -REST:])


@pytest.mark.parametrize(
    ("lengths", "launches"), [([], 0), ([0, 0], 1)], ids=["no sequence", "empty sequences"]
)
def test_packed_without_tokens(library, lengths, launches):
    """Tokens past the last sequence, and none before them. There are more than a block fills."""
    case = packed(lengths, lengths, 300, H=2, Hkv=1, E=64)
    before = library.launches(DECODING)
    out, lse = forward_packed(case, lengths, lengths, max_seqlen_q=3, max_seqlen_k=300)
    assert library.launches(DECODING) == before + launches
    assert out.eq(0).all()
    assert lse.eq(-INF).all()


@pytest.mark.parametrize(
    ("bounds", "launches"),
    [
        ({}, 1),
        ({"max_seqlen_q": 16, "max_seqlen_k": 4000}, 1),
        ({"max_seqlen_q": None}, 0),  # 18 tokens
        ({"max_seqlen_k": None}, 1),
        ({"max_seqlen_q": 17}, 0),
        ({"max_seqlen_k": 128}, 0),
    ],
    ids=str,
)
def test_bounds_decide_which_packed_calls_it_serves(library, bounds, launches):
    """The lengths do not: no sequence has more than 128 keys."""
    lengths_q, lengths_k = [1] * 18, [128, 9] * 9
    case = packed(lengths_q, lengths_k, H=1, E=8)
    before = [library.launches(kernel) for kernel in KERNELS]
    given = {"max_seqlen_q": 1, "max_seqlen_k": 129} | bounds
    out, _lse = forward_packed(case, lengths_q, lengths_k, **given)
    assert [library.launches(kernel) for kernel in KERNELS] == [n + launches for n in before]
    assert not out.isnan().any()


@pytest.mark.parametrize(
    ("lengths_k", "rest", "places"),
    [([6000] + [1] * 99, 0, 6099 // SPLIT + 100), ([300, 200], 9000, 600 // SPLIT + 2)],
    ids=["one long sequence", "many tokens past the last"],
)
def test_packed_workspace_grows_with_the_keys_of_all_sequences(library, lengths_k, rest, places):
    """Not with the longest sequence times the number of sequences, nor with unused tokens."""
    case = packed([1] * len(lengths_k), lengths_k, H=1, E=8)
    unused = torch.full((1, 1, rest, 8), NAN, dtype=torch.bfloat16)
    longer = {f: torch.cat([getattr(case, f), unused], 2) for f in ("key", "value")}
    case = dataclasses.replace(case, **longer)
    library.largest_tensor()
    forward_packed(case, [1] * len(lengths_k), lengths_k)
    assert library.largest_tensor() == places * (64 + 2) * 4


# The same bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("Lq", [1, 3])
@pytest.mark.parametrize("keys", [200, 600])
def test_alone_in_a_batch_and_padded_further(Lq, keys):
    """A sequence gets the same bits alone, in a batch, and with NaN for padding."""
    batch = make(3, 4, Lq, keys, 64, Hkv=2)
    alone = forward(
        dataclasses.replace(batch, **{f: getattr(batch, f)[1:2] for f in ("query", "key", "value")})
    )

    def pad(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full((3, 2, 400, x.shape[3]), NAN, dtype=x.dtype)], 2)

    lengths = torch.tensor([keys + 300, keys, 0])
    padded = dataclasses.replace(
        batch,
        key=pad(batch.key),
        value=pad(batch.value),
        options=batch.options | {"key_lengths": lengths},
    )
    for together in (batch, padded):
        for a, e in zip(forward(together), alone, strict=True):
            assert_equal(a[1:2], e)


@pytest.mark.parametrize("poisoned", [False, True])
def test_bits_do_not_depend_on_the_order_of_threads(library, poisoned):
    case = make(2, 2, 4, 600, 128, Hkv=1, is_causal=LOWER_RIGHT)
    if poisoned:  # seen by some rows only, which takes further passes
        case.value[:, :, -2, 3] = NAN
    with library.device():
        expected = forward(case)
    with library.device(seed=2):
        results = forward(case)
    for a, e in zip(results, expected, strict=True):
        assert_equal(a, e)


# NaN and infinity --------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "feature", [f for f in FEATURES if not f.startswith(("nothing", "own", "scale", "8", "16"))]
)
@pytest.mark.covering(1)
def test_keys_left_out_pass_on_no_poison(library, feature, poison):
    """Neither keys and values that no row sees, nor those that other rows see."""
    case = make(**FEATURES[feature])
    seen = pairs(case)
    by_key_head = seen.unflatten(1, (case.key.shape[1], -1)).flatten(2, 3)
    unseen = ~by_key_head.any(2)[..., None]
    poisoned = dataclasses.replace(
        case,
        key=case.key.masked_fill(unseen, poison),
        value=case.value.masked_fill(unseen, poison),
    )
    clean = forward(case)
    for a, e in zip(forward(poisoned), clean, strict=True):
        assert_equal(a, e)

    # A value that some rows see makes one column of theirs NaN.
    partly = by_key_head.any(2) & ~by_key_head.all(2)
    some_only = partly.nonzero()
    if len(some_only) == 0:
        return
    b, head, key = some_only[len(some_only) // 2].tolist()
    value = case.value.clone()
    value[b, head, key, 5] = poison
    reached = torch.zeros_like(clean[0], dtype=torch.bool)
    groups = case.query.shape[1] // case.key.shape[1]
    heads = slice(head * groups, (head + 1) * groups)
    reached[b, heads, :, 5] = seen[b, heads, :, key]
    out, lse = forward(dataclasses.replace(case, value=value))
    assert out[reached].isnan().all()
    assert_equal(out.masked_fill(reached, 0), clean[0].masked_fill(reached, 0))
    assert_equal(lse, clean[1])


def test_nan_in_a_query_reaches_its_row_alone():
    case = make(**SEVERAL)
    clean = forward(case)
    case.query[0, 1, 2, 4] = NAN
    for a, e in zip(forward(case), clean, strict=True):
        assert a[0, 1, 2].isnan().all()
        a[0, 1, 2] = e[0, 1, 2]
        assert_equal(a, e)


@pytest.mark.parametrize("keys", [200, 600])
def test_scores_that_are_infinite(library, keys):
    """A score of inf makes its row NaN, so do scores of -inf alone; else -inf weighs nothing."""
    case = make(1, 4, 1, keys, 64, Hkv=2)
    case.query[..., 3] = torch.tensor([1.0, -1.0, 1.0, -1.0])[None, :, None]
    case.key[:, 0, 5] = 0
    case.key[:, 0, 5, 3] = INF
    case.key[:, 1] = 0
    case.key[:, 1, :, 3] = -INF
    assert served(library, case)
    out, lse = forward(case)
    for result in (out, lse[..., None]):
        assert result[0, 0].isnan().all()
        assert not result[0, 1].isnan().any()
        assert result[0, 2:].isnan().all()
    expected = eager_torch(dataclasses.replace(case.double(), grad_lse=None)).out
    torch.testing.assert_close(out[0, 1].double(), expected[0, 1], rtol=2e-2, atol=2e-2)


def test_rows_without_a_key():
    for options in ({"key_lengths": torch.tensor([0, 300])}, {"mask": some(2, 1, 1, 1)}):
        case = make(2, 4, 1, 300, 64, Hkv=2, **options)
        empty = ~pairs(case).any(-1)
        assert empty.any() or "mask" in options
        out, lse = forward(case)
        assert out[empty].eq(0).all()
        assert lse[empty].eq(-INF).all()


def test_masks_of_the_lowest_number(library):
    """A row of lowest numbers weighs all keys alike, and beside others they weigh nothing."""
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((2, 1, 1, 600), lowest)
    mask[1, ..., 400:410] = 0
    case = make(2, 2, 1, 600, 64, mask=mask)
    out, lse = forward(case)
    everything, ten = case.value.double().mean(2), forward(
        dataclasses.replace(case, attn_mask=mask == 0)
    )[0]  # fmt: skip
    torch.testing.assert_close(out[0, :, 0].double(), everything[0], rtol=2e-2, atol=2e-3)
    assert_equal(out[1], ten[1])
    assert math.isfinite(lse[1].max())


# Calls that it serves ----------------------------------------------------------------------------


def test_which_calls_it_serves(library):
    for case in (
        make(**ONE),
        make(1, 4, 4, 129, 40, Hkv=1),
        make(1, 1, 16, 300, 256),
        make(1, 16, 1, 300, 64, Hkv=1, softcap=2.0),
    ):
        assert served(library, case)
        with library.device(compute_capability=90):
            assert served(library, case)
    case = make(**ONE)
    for field in ("key", "value"):
        x = getattr(case, field)
        expanded = x[:, :1].expand(-1, 2, -1, -1)
        assert served(library, dataclasses.replace(case, **{field: expanded}))
        odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)
        assert not served(library, dataclasses.replace(case, **{field: odd}))
        columns = x.mT.contiguous().mT
        assert not served(library, dataclasses.replace(case, **{field: columns}))
    for case in (
        make(1, 4, 1, 128, 64, Hkv=1),
        make(1, 17, 1, 300, 64, Hkv=1),
        make(1, 1, 17, 300, 64),
        make(1, 2, 1, 300, 33),
        make(1, 2, 1, 300, 64, dtype=torch.float32),
        make(1, 2, 1, 300, 64, dropout_p=0.1),
        make(1, 2, 2, 300, 64, Hkv=1, mask=some(1, 1, 2, 300)),
        make(1, 2, 2, 300, 64, Hkv=1, mask=some(1, 2, 1, 300)),
        make(1, 2, 2, 300, 64, Hkv=1, relative_bias=normal(1, 1, 301)),
        make(1, 2, 2, 300, 64, Hkv=1, relative_bias=normal(1, 1, 301), mask=some(1, 1, 1, 300)),
    ):
        assert not served(library, case)


@pytest.mark.parametrize(("E", "KiB"), [(64, 66), (128, 68), (256, 72)])
def test_shared_memory_keeps_to_its_budget(library, E, KiB):
    with library.device(shared_memory=KiB << 10):
        assert served(library, make(1, 2, 1, 300, E))


def test_launches_name_the_kernel_and_the_sizes(library):
    message = (
        r"attention_decoding \(B 1, H 4, Hkv 2, Lq 1, Lk 300, E 64, Ev 64, grid 2x2x1, "
        r"block 128x1x1, shared 67584 bytes\): too much shared memory"
    )
    with library.device(shared_memory=1024), pytest.raises(RuntimeError, match=message):
        forward(make(1, 4, 1, 300, 64, Hkv=2))
