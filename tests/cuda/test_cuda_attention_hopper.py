"""Attention's kernels for Hopper GPUs, under the model of CUDA on the host.

The requirements are those of the other kernels, whose tests run on these too, in 16 bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import attention_cases
import placed_cases
import pytest
import torch
from attention_cases import (
    SEED,
    Case,
    assert_equal,
    assert_near,
    assert_same_bits,
    boundaries,
    check_one_nan,
    check_past_two_to_the_31,
    draw_case,
    judge,
    make,
    normal,
    packed,
    record_accuracy,
    run,
    run_packed,
    specification,
)
from host_build import Library, library_fixture
from numerics import Accuracy
from test_attention_infinities import CAPPED, PLACES, assert_alike, poisoned, structured
from test_attention_relative_index import (  # noqa: F401 - collected here, with this file's kernel
    INF,
    test_a_number_that_is_not_finite_reaches_the_pairs_that_read_it,
    test_columns_that_no_pair_reads_may_be_nan,
    test_packed_sequences,
    with_tables,
)
from test_attention_relative_index import (
    test_rows_without_a_key as rows_without_a_key_in_a_table,
)
from test_kernels_attention import (  # noqa: F401 - collected here, with this file's kernel
    BY_DISTANCE,
    FEATURES,
    INDEXED,
    LOWER_RIGHT,
    NAN,
    ONE_HEAD,
    bias,
    by_distance,
    indexed,
    packed_with_a_mask_and_dropout,
    shows_weights,
    some,
    test_alone_in_a_batch_and_padded_further,
    test_diagonals_beyond_all_keys,
    test_keys_left_out_pass_on_no_poison,
    test_masks_of_the_lowest_number,
    test_nan_in_a_query_reaches_no_key_past_its_length,
    test_nan_reaches_exactly_what_it_is_paired_with,
    test_rows_without_a_key,
    test_upstream_gradients_expanded_from_one_number,
)
from test_kernels_attention import (
    test_packed_is_each_sequence_by_itself as packed_is_each_sequence_by_itself,
)
from test_kernels_attention import test_packed_without_tokens as packed_without_tokens
from tested_kernels import Kernel
from torch import Tensor

import trifuse

CUDA = Kernel("cuda")
FORWARD = "attention_forward_hopper"
BACKWARD = "attention_backward_key_value_hopper", "attention_backward_query_hopper"

library = library_fixture("attention")


@pytest.fixture(autouse=True)
def _hopper(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in test_cuda_attention, on a Hopper GPU. Cases are in bfloat16 by default."""
    monkeypatch.setitem(make.__kwdefaults__, "dtype", torch.bfloat16)
    before = library.launches(FORWARD)
    with library.device(seed=1, compute_capability=90), library.guarded_memory(), CUDA.serving():
        yield
    assert library.launches(FORWARD) > before


@pytest.fixture
def kernel(_hopper: None) -> Kernel:
    return CUDA


def forward(case: Case) -> tuple[Tensor, Tensor]:
    torch.manual_seed(SEED)
    return attention_cases.forward(case)


def check_forward(case: Case) -> None:
    accuracy, judged = Accuracy(CUDA.name), judge(case)
    for name, actual in zip(("out", "lse"), forward(case), strict=True):
        accuracy.record(name, actual, *(getattr(x, name) for x in judged))


def check(library: Library, *calls: Case) -> None:
    """Checks calls, and that the kernels for Hopper serve their forward and backward."""
    accuracy = Accuracy(CUDA.name)
    before = launches(library)
    for case in calls:
        record_accuracy(accuracy, case, judge(case))
    assert launches(library) == {name: count + len(calls) for name, count in before.items()}


def launches(library: Library) -> dict[str, int]:
    return {name: library.launches(name) for name in (FORWARD, *BACKWARD)}


def served_by_hopper(library: Library, case: Case) -> tuple[bool, bool]:
    """Returns whether the kernels for Hopper serve the forward, and the backward."""
    before = launches(library)
    run(case)
    served = [count > before[name] for name, count in launches(library).items()]
    assert served[1] == served[2]
    return served[0], served[1]


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature(library, feature):
    check(library, make(**ONE_HEAD | FEATURES[feature]))


@pytest.mark.parametrize("feature", BY_DISTANCE)
def test_each_feature_beside_a_relative_bias(library, feature):
    options = {"relative_bias": by_distance(1, 1)} | BY_DISTANCE[feature]
    check(library, make(**ONE_HEAD | options))


@pytest.mark.parametrize("feature", INDEXED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_feature_beside_tables(library, feature, dtype):
    options = ONE_HEAD | INDEXED[feature]
    kind = "distances" if "distances" in feature else "pairs"
    tables = indexed(options["Lq"], options["Lk"], 2, options["H"], kind)
    check(library, make(**options | tables, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calls_drawn_at_random(library, dtype):
    random = Random(4)

    def fits(case: Case) -> bool:
        pairs = math.prod(case.query.shape[:3]) * case.key.shape[2]
        E, Ev = case.query.shape[-1], case.value.shape[-1]
        fit = 0 < pairs < 12_000 and E % 8 == Ev % 8 == 0 and max(E, Ev) <= 128
        # Others have few queries beside many keys, for which there is another kernel.
        return fit and (case.key.shape[2] <= 128 or case.query.shape[2] > 16)

    def aligned(case: Case) -> Case:
        tensors = {f: getattr(case, f) for f in ("query", "key", "value", "grad_out")}
        copies = {f: torch.empty(x.shape, dtype=dtype).copy_(x) for f, x in tensors.items()}
        return dataclasses.replace(case, **copies)

    drawn = (draw_case(random, dtype) for _ in itertools.count())
    check(library, *map(aligned, itertools.islice(filter(fits, drawn), 20)))


LONG: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, lower right": {"is_causal": LOWER_RIGHT},
    "window": {"window": (30, 40)},
    "lengths": {"key_lengths": torch.tensor([699])},
    "bool mask": {"mask": some(1, 1, 190, 700)},
    "float mask": {"mask": bias(1, 1, 190, 700)},
    "negative scale": {"scale": -0.1},
}


@pytest.mark.parametrize("options", LONG)
@pytest.mark.parametrize(("E", "Ev"), [(64, 64), (128, 40), (72, 256)])
@pytest.mark.covering(1)
def test_tiles_follow_each_other_through_the_forward_s_stages(options, E, Ev):
    """The first block has two consumers, the second block one."""
    dropout_p = 0.1 if E == 128 else 0.0
    check_forward(make(1, 1, 190, 700, E, Ev, dropout_p=dropout_p, **LONG[options]))


@pytest.mark.parametrize("options", LONG)
@pytest.mark.parametrize(("E", "Ev"), [(64, 64), (128, 40)])
@pytest.mark.covering(1)
def test_tiles_follow_each_other_through_the_backward_s_stages(library, options, E, Ev):
    """Tiles of queries come from two heads, one after the other."""
    changed = {"lengths": {"key_lengths": torch.tensor([299])}}
    changed["bool mask"] = {"mask": some(1, 2, 190, 300)}
    changed["float mask"] = {"mask": bias(1, 2, 190, 300)}
    dropout_p = 0.1 if E == 128 else 0.0
    options = changed.get(options, LONG[options])
    check(library, make(1, 2, 190, 300, E, Ev, Hkv=1, dropout_p=dropout_p, **options))


# The kernels of Masks::All serve these calls of 190 queries and 300 keys: a cap, a bias by distance
# beside a mask, and tables. The tables are named beside the options. An index of pairs, or of
# distances, reads them.
DISTANCES = normal(1, 2, 190 + 300 - 1, seed=7).masked_fill(normal(489, seed=6) > 1.5, -INF)
EVERYTHING: dict[str, tuple[dict[str, Any], str]] = {
    "capped": ({"softcap": 0.7}, ""),
    "capped, causal": ({"softcap": 0.7, "is_causal": True}, ""),
    "capped, bool mask": ({"softcap": 0.7, "mask": some(1, 2, 190, 300)}, ""),
    "capped, float mask": ({"softcap": 0.7, "mask": bias(1, 1, 190, 300)}, ""),
    "bias, bool mask": (
        {"relative_bias": DISTANCES, "mask": some(1, 1, 190, 300), "is_causal": LOWER_RIGHT},
        "",
    ),
    "bias, mask of keys": (
        {"relative_bias": DISTANCES, "mask": bias(1, 2, 1, 300), "window": (50, 20)},
        "",
    ),
    "bias, float mask, capped": (
        {"relative_bias": DISTANCES, "mask": bias(1, 2, 190, 300), "softcap": 1.5},
        "",
    ),
    "a table": ({"key_lengths": torch.tensor([299])}, "relative"),
    "a table of queries, causal": ({"is_causal": True}, "query"),
    "a table of keys, window": ({"window": (30, 40), "scale": -0.1}, "key"),
    "tables, capped": ({"softcap": 1.5}, "relative query key"),
    "tables, bool mask": ({"mask": some(1, 1, 190, 300)}, "relative query key"),
    "tables, float mask, capped": (
        {"mask": bias(1, 2, 190, 300), "softcap": 1.5},
        "relative query key",
    ),
}


def everything(what: str, E: int, Ev: int, kind: str = "pairs", **more: Any) -> Case:
    options, tables = EVERYTHING[what]
    case = make(1, 2, 190, 300, E, Ev, Hkv=1, **options, **more)
    return with_tables(case, tables, kind, (1, 2)) if tables else case


@pytest.mark.parametrize("what", EVERYTHING)
@pytest.mark.parametrize("kind", ["pairs", "distances"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("E", "Ev", "dropout_p"), [(64, 64, 0.0), (128, 40, 0.1), (40, 128, 0.0)])
@pytest.mark.covering
def test_caps_and_biases_beside_masks_and_tables(library, what, kind, dtype, E, Ev, dropout_p):
    check(library, everything(what, E, Ev, kind, dtype=dtype, dropout_p=dropout_p))


@pytest.mark.parametrize("what", EVERYTHING)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.covering(1)
def test_caps_and_biases_beside_masks_and_tables_in_wide_heads(what, dropout_p, dtype):
    check_forward(everything(what, 72, 256, dtype=dtype, dropout_p=dropout_p))


def test_scores_far_above_the_cap():
    """They are the cap, up to their sign, and pass no gradient on."""
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    query, key = torch.full((1, 1, 3, 64), 9.0), 9 * signs[:, None].expand(1, 1, 4, 64)
    given = {"query": query, "key": key, "value": torch.eye(4, 64).expand(1, 1, 4, 64)}
    given = {name: x.bfloat16() for name, x in given.items()}
    results = run(dataclasses.replace(make(1, 1, 3, 4, 64, softcap=math.log(2)), **given))
    expected = torch.tensor([0.4, 0.1, 0.4, 0.1]).expand(3, 4)
    torch.testing.assert_close(results.out[0, 0, :, :4].float(), expected, rtol=0, atol=1e-3)
    assert results.out[..., 4:].eq(0).all()
    assert results.lse[0, 0] == pytest.approx([math.log(5)] * 3, abs=1e-5)
    assert results.grad_query.eq(0).all()
    assert results.grad_key.eq(0).all()


@pytest.mark.parametrize("kind", ["pairs", "distances"])
@pytest.mark.parametrize("table", ["query_bias", "key_bias", "relative_bias"])
def test_tables_that_leave_all_but_the_diagonal_out(library, kind, table):
    """Query i sees key i alone, even if the other keys are NaN, and the last query sees none."""
    queries, keys = 131, 130
    case = make(1, 1, queries, keys, 64)
    far = torch.arange(keys) - torch.arange(queries)[:, None]
    index = torch.arange(1 - queries, keys) if kind == "distances" else far
    numbers = torch.tensor([-INF, 3.0])
    shape = {"query_bias": (1, 1, queries, 2), "key_bias": (1, 1, keys, 2)}.get(table, (1, 1, 2))
    case = dataclasses.replace(
        case, relative_index=(index == 0).int(), **{table: numbers.expand(shape).clone()}
    )
    assert served_by_hopper(library, case) == (True, True)
    results = run(case)
    assert torch.equal(results.out[:, :, :keys], case.value)
    assert results.out[:, :, keys].eq(0).all()
    scores = (case.query[:, :, :keys].float() * case.key.float()).sum(-1) / 8 + 3
    torch.testing.assert_close(results.lse[:, :, :keys], scores, rtol=1e-5, atol=1e-5)
    assert results.lse[:, :, keys].eq(-INF).all()
    assert torch.equal(results.grad_value, case.grad_out[:, :, :keys])
    assert results.grad_query[:, :, keys].eq(0).all()
    # Keys 5, 70 and 129 reach their own queries alone.
    poisoned, own = case.key.clone(), [5, 70, 129]
    poisoned[:, :, own] = NAN
    spoilt = run(dataclasses.replace(case, key=poisoned))
    for name in ("out", "grad_query"):
        others = torch.ones(queries, dtype=torch.bool)
        others[own] = False
        x, clean = getattr(spoilt, name), getattr(results, name)
        assert x[:, :, own].isnan().all()
        assert_equal(x[:, :, others], clean[:, :, others], name)


@pytest.mark.parametrize("what", ["bias", "tables"])
def test_keys_that_biases_leave_out_pass_on_no_poison(library, what):
    """Keys 64 to 127, a whole tile, and 299, which only a bias or a table leaves out."""
    case = make(1, 2, 190, 300, 64, Hkv=1, mask=some(1, 1, 190, 1), is_causal=False)
    left_out = torch.zeros(300, dtype=torch.bool)
    left_out[64:128] = left_out[299] = True
    if what == "tables":
        case = with_tables(case, "relative query key", "pairs", (1, 2))
        assert case.key_bias is not None
        key_bias = case.key_bias.masked_fill(left_out[:, None], -INF)
        case = dataclasses.replace(case, key_bias=key_bias)
    else:  # the other queries have these distances to other keys, so they are masked
        table = torch.zeros(1, 1, 489)
        table[..., :-300] = table[..., 189 + 64 : 189 + 128] = table[..., 189 + 299] = -INF
        mask = torch.zeros(1, 1, 190, 1, dtype=torch.bool)
        mask[:, :, 0] = True
        case = dataclasses.replace(case, attn_mask=mask, relative_bias=table)
    fields = {f: getattr(case, f).clone() for f in ("key", "value")}
    for x in fields.values():
        x[:, :, left_out] = NAN
    assert served_by_hopper(library, case) == (True, True)
    results = run(dataclasses.replace(case, **fields))
    assert results.out.isfinite().all()
    assert results.grad_key[:, :, left_out].eq(0).all()
    assert results.grad_value[:, :, left_out].eq(0).all()
    assert_same_bits(results, run(case))


@pytest.mark.parametrize("name", ["relative_bias", "query_bias", "key_bias"])
def test_rows_without_a_key_in_a_table(library, name):
    before = launches(library)
    rows_without_a_key_in_a_table(CUDA, name)
    assert launches(library) == {name: count + 1 for name, count in before.items()}


@pytest.mark.parametrize("where", ["query", "key", "value", "grad_out", "grad_lse"])
@pytest.mark.parametrize("beside", ["tables", "bias", "cap"])
def test_nan_reaches_exactly_what_it_is_paired_with_by_all(library, beside, where):
    case = make(is_causal=True, softcap=2.0 if beside == "cap" else None)
    if beside == "tables":
        case = with_tables(case, "relative query key", "pairs")
    else:
        table = normal(1, 2, 70 + 75 - 1, seed=9)
        table = table.masked_fill(table > 1, -INF) if beside == "bias" else None
        case = dataclasses.replace(case, attn_mask=bias(2, 1, 70, 75), relative_bias=table)
    before = launches(library)
    check_one_nan(case, where, lambda a, c, name: torch.testing.assert_close(a, c))
    assert launches(library) == {name: count + 2 for name, count in before.items()}


@pytest.mark.parametrize("causal", [True, LOWER_RIGHT])
@pytest.mark.parametrize("beside", ["pairs", "distances", "mask"])
def test_packed_with_biases(library, beside, causal):
    """Each sequence has its own diagonal and its own part of the bias, index and mask."""
    lengths_q, lengths_k = [70, 3, 9], [45, 20, 7]
    biases: dict[str, Any] = indexed(84, 74, 1, 1, beside)
    if beside == "mask":
        biases = {"relative_bias": normal(3, 1, 75 + 50 - 1, seed=9), "mask": bias(3, 1, 75, 50)}
    case = packed(lengths_q, lengths_k, 2, H=1, E=16, is_causal=causal, softcap=2.0, **biases)
    arguments = (boundaries(lengths_q), boundaries(lengths_k))
    bounds = {"max_seqlen_q": 75, "max_seqlen_k": 50} if beside == "mask" else {}
    before = launches(library)
    actual = run_packed(case, *arguments, **bounds)
    assert launches(library) == {name: count + 1 for name, count in before.items()}
    with trifuse.backend("eager"):
        expected = run_packed(case.double(), *arguments, **bounds)
    for a, e in zip(actual, expected, strict=True):
        if a is not None:
            torch.testing.assert_close(a.double(), e, rtol=2e-2, atol=4e-2)
    torch.testing.assert_close(actual.lse.double(), expected.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"is_causal": LOWER_RIGHT, "Hkv": 1}, {"window": (20, 4)}])
def test_packed_is_each_sequence_by_itself(kernel, options):
    packed_is_each_sequence_by_itself(kernel, torch.float16, options)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_packed_without_tokens(kernel, lengths, biased):
    packed_without_tokens(kernel, lengths, biased)


def test_elements_past_two_to_the_31(library):
    before = launches(library)
    check_past_two_to_the_31()
    assert launches(library) == {name: count + 2 for name, count in before.items()}


def test_packed_with_a_mask_and_dropout(library):
    before = launches(library)
    actual, expected = packed_with_a_mask_and_dropout(140)
    assert launches(library) == {name: count + 1 for name, count in before.items()}
    for a, e in zip(actual, expected, strict=True):
        if a is not None:
            torch.testing.assert_close(a.double(), e, rtol=2e-2, atol=4e-2)
    torch.testing.assert_close(actual.lse.double(), expected.lse, rtol=1e-4, atol=1e-4)


def test_the_same_weights_are_dropped_as_elsewhere(library):
    case = make(1, 2, 128, 120, Hkv=1, dropout_p=0.3, window=(90, 40))
    case = shows_weights(case)
    assert served_by_hopper(library, case) == (True, True)
    results = run(case)
    with trifuse.backend("eager"):
        expected = run(case)
    assert torch.equal(results.out != 0, expected.out != 0)
    assert torch.equal(results.grad_value != 0, expected.grad_value != 0)
    assert_near(results, expected)


def test_tiles_that_a_mask_leaves_empty_are_not_read():
    mask = torch.zeros(1, 1, 150, 600, dtype=torch.bool)
    mask[..., 128:140] = mask[..., 599:] = True
    case = make(1, 1, 150, 600, 64, mask=mask)
    left_out = ~mask[0, 0, 0, :, None]
    poisoned = dataclasses.replace(
        case, key=case.key.masked_fill(left_out, NAN), value=case.value.masked_fill(left_out, NAN)
    )
    assert_same_bits(run(poisoned), run(case))


def test_queries_that_a_mask_leaves_out_pass_on_no_poison(library):
    """A whole tile of queries, and part of another one."""
    mask = torch.ones(1, 1, 300, 130, dtype=torch.bool)
    mask[..., 64:128, :] = mask[..., 290:, :] = False
    case = make(1, 1, 300, 130, 64, mask=mask)
    left_out = ~mask[0, 0, :, :1]
    fields = {f: getattr(case, f).masked_fill(left_out, NAN) for f in ("query", "grad_out")}
    assert_same_bits(run(dataclasses.replace(case, **fields)), run(case))


def test_an_infinite_key_that_all_queries_see():
    """A score of inf makes its row NaN; a score of -inf is a weight of 0."""
    case = make(1, 1, 70, 300, 64)
    case.key[..., 5, :] = 0
    case.key[..., 5, 3] = math.inf
    out, lse = forward(case)
    infinite = case.query[..., 3] > 0
    assert torch.equal(out.isnan().all(-1), infinite)
    assert torch.equal(out.isnan().any(-1), infinite)
    assert torch.equal(lse.isnan(), infinite)


@pytest.mark.parametrize(
    ("E", "place"),
    [(64, "query"), (64, "key"), (64, "value"), (64, "grad_out"), (128, "key"), (128, "value")],
)
def test_nan_in_tiles_that_all_rows_see(E, place):
    """Their pairs are not written down. So many tiles that one takes another's place."""
    case = make(1, 1, 450, 450, E, is_causal=True)
    x = getattr(case, place).clone()
    x[0, 0, [60, 300], 3] = NAN
    case = dataclasses.replace(case, **{place: x})
    assert_alike(run(case), specification(case), torch.bfloat16)


def test_row_max_rises_by_little_and_by_more():
    case = make(1, 1, 70, 700, 64)
    case.query[..., 0] = 4
    case.key[..., 0] = torch.linspace(-20, 40, 700)
    check_forward(case)


# The same bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("E", "poisoned"), [(64, "query"), (128, "value"), (256, "value")])
def test_bits_do_not_depend_on_the_order_of_threads(library, E, poisoned):
    """Nor on when copies complete. Also with a NaN, for which tiles are cleaned."""
    of_call = forward if E == 256 else run
    mask = bias(1, 1, 190, 300)
    case = make(1, 2, 190, 300, E, Hkv=1, mask=mask, dropout_p=0.2)
    x = getattr(case, poisoned).clone()
    x[0, 0, 150, 3] = NAN
    for call in (case, dataclasses.replace(case, **{poisoned: x})):
        with library.device(compute_capability=90):
            expected = of_call(call)
        with library.device(seed=2, compute_capability=90):
            results = of_call(call)
        for a, e in zip(results, expected, strict=True):
            if a is not None:
                assert_equal(a, e)


@pytest.mark.parametrize(("E", "poisoned"), [(64, "query"), (128, "value")])
@pytest.mark.parametrize("what", ["bias, float mask, capped", "tables, float mask, capped"])
def test_bits_of_everything_do_not_depend_on_the_order_of_threads(library, E, poisoned, what):
    case = everything(what, E, E, dropout_p=0.2)
    x = getattr(case, poisoned).clone()
    x[0, 0, 150, 3] = NAN
    for call in (case, dataclasses.replace(case, **{poisoned: x})):
        with library.device(compute_capability=90):
            expected = run(call)
        with library.device(seed=2, compute_capability=90):
            assert_same_bits(run(call), expected)


# Calls that it serves ----------------------------------------------------------------------------


def test_which_calls_they_serve(library, monkeypatch):
    case = make(1, 2, 5, 6, 40)
    assert served_by_hopper(library, case) == (True, True)
    wide = make(1, 2, 5, 6, 80)
    fields = ("query", "key", "value", "grad_out")
    halves = {f: getattr(wide, f)[..., :33] for f in fields}
    assert served_by_hopper(library, dataclasses.replace(wide, **halves)) == (True, True)
    for f in ("key", "grad_out"):
        expanded = getattr(case, f)[:, :1].expand(-1, 2, -1, -1)
        assert served_by_hopper(library, dataclasses.replace(case, **{f: expanded})) == (True, True)

    for E, dtype in ((33, torch.bfloat16), (40, torch.float32)):
        assert served_by_hopper(library, make(1, 2, 5, 6, E, dtype=dtype)) == (False, False)
    assert served_by_hopper(library, make(1, 2, 5, 6, 40, softcap=2.0)) == (True, True)
    biased = make(1, 2, 5, 6, 40, relative_bias=normal(1, 2, 10))
    assert served_by_hopper(library, biased) == (True, True)
    masked = dataclasses.replace(biased, attn_mask=some(1, 1, 1, 6))
    assert served_by_hopper(library, masked) == (True, True)
    # Few queries with tables beside many keys have no other kernels.
    for few in (make(1, 2, 5, 6, 40), make(1, 2, 1, 300, 128, Hkv=1)):
        for name in ("relative", "query", "key"):
            tables = with_tables(few, name, "pairs")
            assert served_by_hopper(library, tables) == (True, True)
    shifted = torch.empty(case.value.numel() + 1, dtype=case.value.dtype)[1:].view_as(case.value)
    one_for_all = case.key[:, :, :1].expand(-1, -1, 6, -1)
    for changed in (
        {"value": shifted.copy_(case.value)},
        {"key": one_for_all},
        {"query": case.query.mT.contiguous().mT},
    ):
        assert served_by_hopper(library, dataclasses.replace(case, **changed)) == (False, False)
    for case_of_forward in (
        make(1, 2, 5, 6, 128, 136),
        dataclasses.replace(case, grad_out=case.grad_out.mT.contiguous().mT),
    ):
        assert served_by_hopper(library, case_of_forward) == (True, False)
    with library.device(compute_capability=100):
        assert served_by_hopper(library, case) == (False, False)
    monkeypatch.setenv("TRIFUSE_CUDA_CAPABILITY", "8.0")
    assert served_by_hopper(library, case) == (False, False)
    monkeypatch.setenv("TRIFUSE_CUDA_CAPABILITY", "ampere")
    message = "TRIFUSE_CUDA_CAPABILITY: expected a number such as 8.0; got 'ampere'"
    with pytest.raises(RuntimeError, match=message):
        forward(case)


@pytest.mark.parametrize(("E", "KiB"), [(64, 105), (128, 183), (256, 195)])
def test_shared_memory_of_the_forward_keeps_to_its_budget(library, E, KiB):
    with library.device(shared_memory=KiB << 10, compute_capability=90):
        forward(make(1, 1, 2, 3, E))


@pytest.mark.parametrize(("E", "KiB"), [(64, 108), (128, 204)])
def test_shared_memory_of_the_backward_keeps_to_its_budget(library, E, KiB):
    case = make(1, 1, 2, 3, E)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    out = trifuse.scaled_dot_product_attention(*inputs)
    with library.device(shared_memory=KiB << 10, compute_capability=90):
        torch.autograd.grad(out, inputs, case.grad_out)


def test_a_part_drops_what_the_whole_drops(library):
    before = launches(library)
    placed_cases.check_attention(64, torch.bfloat16, lengths=(64, 128))
    placed_cases.check_block_of_attention(torch.bfloat16)
    assert all(count > before[name] for name, count in launches(library).items())


@pytest.mark.parametrize("structure", CAPPED)
def test_infinities_that_take_part(library, structure):
    for place in PLACES:
        if place == "attn_mask" and structure != "float mask":
            continue
        case = poisoned(structured(structure), place)
        assert_alike(run(case), specification(case), torch.bfloat16)
    assert served_by_hopper(library, structured(structure)) == (True, True)
