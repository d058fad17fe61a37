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

import placed_cases
import pytest
import torch
from attention_cases import (
    SEED,
    Case,
    assert_equal,
    assert_near,
    assert_same_bits,
    check_past_two_to_the_31,
    draw_case,
    judge,
    make,
    normal,
    record_accuracy,
    run,
    specification,
)
from host_build import Library, library_fixture
from numerics import Accuracy
from test_attention_infinities import PLACES, STRUCTURES, assert_alike, poisoned, structured
from test_kernels_attention import (  # noqa: F401 - collected here, with this file's kernel
    BY_DISTANCE,
    FEATURES,
    LOWER_RIGHT,
    NAN,
    ONE_HEAD,
    bias,
    by_distance,
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
    with torch.no_grad():
        return trifuse.scaled_dot_product_attention(
            case.query, case.key, case.value, case.attn_mask, return_lse=True, **case.options
        )


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


@pytest.mark.parametrize("feature", [f for f in FEATURES if not f.startswith("softcap")])
def test_each_feature(library, feature):
    check(library, make(**ONE_HEAD | FEATURES[feature]))


@pytest.mark.parametrize("feature", [f for f in BY_DISTANCE if "mask" not in BY_DISTANCE[f]])
def test_each_feature_beside_a_relative_bias(library, feature):
    """Without softcap or a mask, which these kernels do not serve."""
    options = {"relative_bias": by_distance(1, 1)} | BY_DISTANCE[feature]
    options.pop("softcap", None)
    check(library, make(**ONE_HEAD | options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calls_drawn_at_random(library, dtype):
    random = Random(4)

    def fits(case: Case) -> bool:
        pairs = math.prod(case.query.shape[:3]) * case.key.shape[2]
        E, Ev = case.query.shape[-1], case.value.shape[-1]
        fit = 0 < pairs < 12_000 and E % 8 == Ev % 8 == 0 and max(E, Ev) <= 128
        # Others have few queries beside many keys, for which there is another kernel.
        fit = fit and (case.key.shape[2] <= 128 or case.query.shape[2] > 16)
        fit = fit and (case.attn_mask is None or case.relative_bias is None)
        return fit and case.options["softcap"] is None and case.relative_index is None

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


@pytest.mark.parametrize("options", [{"is_causal": LOWER_RIGHT, "Hkv": 1}, {"window": (20, 4)}])
def test_packed_is_each_sequence_by_itself(kernel, options):
    packed_is_each_sequence_by_itself(kernel, torch.float16, options)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_packed_without_tokens(kernel, lengths):
    packed_without_tokens(kernel, lengths, biased=False)


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
    assert served_by_hopper(library, make(1, 2, 5, 6, 40, softcap=2.0)) == (False, False)
    biased = make(1, 2, 5, 6, 40, relative_bias=normal(1, 2, 10))
    assert served_by_hopper(library, biased) == (True, True)
    masked = dataclasses.replace(biased, attn_mask=some(1, 1, 1, 6))
    assert served_by_hopper(library, masked) == (False, False)
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


@pytest.mark.parametrize("structure", STRUCTURES)
def test_infinities_that_take_part(library, structure):
    for place in PLACES:
        if place == "attn_mask" and structure != "float mask":
            continue
        case = poisoned(structured(structure), place)
        assert_alike(run(case), specification(case), torch.bfloat16)
    assert served_by_hopper(library, structured(structure)) == (True, True)
