"""The CUDA kernels of attention, under the model of CUDA on the host.

Most requirements are the same as for Triton's kernels, whose tests run on these too.
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
    Case,
    assert_near,
    assert_same_bits,
    boundaries,
    check_parts_of_keys,
    check_past_two_to_the_31,
    draw_case,
    judge,
    make,
    normal,
    packed,
    record_accuracy,
    run,
    run_packed,
)
from cuda_code import Code, compile_operator
from fault_cases import exchanged_data_raises, short_storage_raises
from host_build import Library, library_fixture
from numerics import Accuracy
from test_attention_infinities import *  # noqa: F403 - collected here, with this file's kernel
from test_kernels_attention import (  # noqa: F401 - collected here, with this file's kernel
    FEATURES,
    NAN,
    ONE_HEAD,
    bias,
    some,
    test_alone_in_a_batch_and_padded_further,
    test_diagonals_beyond_all_keys,
    test_each_feature,
    test_each_feature_beside_a_relative_bias,
    test_empty_tensors,
    test_gradient_of_a_mask_without_elements,
    test_gradients_of_broadcast_masks,
    test_gradients_of_parts_of_the_keys_beside_large_scores,
    test_head_dims,
    test_keys_left_out_pass_on_no_poison,
    test_layouts_change_nothing,
    test_masks_of_the_lowest_number,
    test_nan_in_a_query_reaches_no_key_past_its_length,
    test_nan_reaches_exactly_what_it_is_paired_with,
    test_packed_is_each_sequence_by_itself,
    test_packed_with_a_diagonal_each,
    test_packed_with_a_mask_and_dropout,
    test_packed_with_a_relative_bias,
    test_packed_without_tokens,
    test_rows_without_a_key,
    test_the_same_weights_are_dropped_as_elsewhere,
    test_upstream_gradients_expanded_from_one_number,
)
from tested_kernels import Kernel
from torch.nn.attention.bias import CausalVariant

import trifuse

CUDA = Kernel("cuda")


library = library_fixture("attention")


@pytest.fixture(autouse=True)
def _cuda(library: Library) -> Iterator[None]:
    """Runs tests on the CUDA kernels, with guarded memory and threads in a random order."""
    with library.device(seed=1), library.guarded_memory(), CUDA.serving():
        yield


@pytest.fixture
def kernel(_cuda: None) -> Kernel:
    return CUDA


def check(*calls: Case) -> None:
    accuracy = Accuracy(CUDA.name)
    for call in calls:
        record_accuracy(accuracy, call, judge(call))
    accuracy.conclude()


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_feature_on_tensor_cores(feature, dtype):
    case = make(**ONE_HEAD | FEATURES[feature], dtype=dtype)
    record_accuracy(Accuracy(CUDA.name), case, judge(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_calls(dtype):
    random = Random(2)

    def pairs_of(case: Case) -> int:
        return math.prod(case.query.shape[:3]) * case.key.shape[2]

    drawn = (draw_case(random, dtype) for _ in itertools.count())
    check(*itertools.islice((case for case in drawn if 0 < pairs_of(case) < 12_000), 40))


# Beside a relative bias: the mask, and what decides which distances and which pairs it meets.
MASKS: dict[str, dict[str, Any]] = {
    "bool": {"mask": some(2, 2, 70, 45)},
    "bool, of keys": {"mask": some(2, 1, 1, 45), "key_lengths": torch.tensor([32, 45])},
    "float": {"mask": bias(2, 2, 70, 45), "is_causal": CausalVariant.LOWER_RIGHT},
    "float, of queries": {"mask": bias(1, 2, 70, 1), "window": (20, 5)},
    "float, capped scores": {"mask": bias(2, 1, 70, 45), "softcap": 1.5},
    "the query's": {"mask": bias(1, 1, 70, 45), "dropout_p": 0.3},
    "the query's, lower right": {
        "mask": bias(2, 1, 1, 45),
        "is_causal": CausalVariant.LOWER_RIGHT,
        "scale": -0.3,
    },
    "large": {"mask": 2000 * bias(1, 1, 70, 45)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", [(1, 1), (1, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(("E", "Ev"), [(16, 16), (40, 72), (136, 24), (72, 200)])
@pytest.mark.covering
def test_masks_beside_a_relative_bias(mask, dtype, table, E, Ev):
    options = dict(MASKS[mask])
    if mask.startswith("the query's"):
        options["mask"] = options["mask"].to(dtype)
    relative_bias = normal(*table, 70 + 45 - 1, seed=9)
    relative_bias[..., ::5] = -math.inf
    case = make(2, 2, 70, 45, E, Ev, Hkv=1, relative_bias=relative_bias, dtype=dtype, **options)
    record_accuracy(Accuracy(CUDA.name), case, judge(case))


@pytest.mark.parametrize("causal", [True, CausalVariant.LOWER_RIGHT])
def test_packed_with_a_mask_beside_a_relative_bias(causal):
    lengths_q, lengths_k = [70, 3, 9], [45, 20, 7]
    table, mask = normal(3, 1, 75 + 50 - 1, seed=9), bias(3, 1, 75, 50)
    case = packed(
        lengths_q, lengths_k, 2, H=1, E=16, relative_bias=table, mask=mask, is_causal=causal
    )
    bounds = {"max_seqlen_q": 75, "max_seqlen_k": 50}
    arguments = (case, boundaries(lengths_q), boundaries(lengths_k))
    actual = run_packed(*arguments, **bounds)
    with trifuse.backend("eager"):
        assert_near(actual, run_packed(*arguments, **bounds))


def test_no_matrix_is_made_of_a_mask_and_a_relative_bias(library):
    """Nor of their gradients; the largest tensors are the workspaces of these."""
    L = 2048
    case = make(
        1, 2, L, L, 16, mask=normal(1, 1, 1, L), relative_bias=normal(1, 2, 2 * L - 1), window=8
    )
    library.largest_tensor()
    run(case)
    assert 0 < library.largest_tensor() < 4 * L * L


LONG: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (30, 40)},
    "bool mask": {"mask": some(1, 1, 150, 200)},
    "float mask": {"mask": bias(1, 1, 150, 200)},
}


@pytest.mark.parametrize("options", LONG)
@pytest.mark.parametrize(("E", "Ev"), [(64, 64), (128, 40), (72, 160)])
@pytest.mark.covering(1)
def test_tiles_follow_each_other_through_both_stages(options, E, Ev):
    case = make(1, 1, 150, 200, E, Ev, dtype=torch.bfloat16, dropout_p=0.1, **LONG[options])
    record_accuracy(Accuracy(CUDA.name), case, judge(case))


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (1, 1, 2, 3), (1, 1, 2, 1)], ids=str)
def test_more_terms_of_a_mask_gradient_than_blocks(shape):
    case = make(300, 2, 2, 3, 4, mask=normal(*shape, seed=8))
    record_accuracy(Accuracy(CUDA.name), case, judge(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_poison_in_tiles_that_a_mask_leaves_empty(dtype):
    """Empty tiles at the start and in the middle of a row of tiles."""
    mask = torch.zeros(1, 1, 100, 200, dtype=torch.bool)
    mask[..., 64:80] = mask[..., 192:] = True
    case = make(1, 1, 100, 200, 20, dtype=dtype, mask=mask)
    left_out = ~mask[0, 0, 0, :, None]
    poisoned = dataclasses.replace(
        case, key=case.key.masked_fill(left_out, NAN), value=case.value.masked_fill(left_out, NAN)
    )
    assert_same_bits(run(poisoned), run(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_parts_of_the_keys(dtype):
    check_parts_of_keys(dtype)


# The same bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("E", [40, 200])
def test_bits_do_not_depend_on_the_order_of_threads(library, dtype, E):
    """Also with a NaN in the values, which makes passes clean tiles in place."""
    mask = bias(1, 1, 70, 90)
    case = make(1, 2, 70, 90, E, Hkv=1, dtype=dtype, mask=mask, dropout_p=0.2)
    value = case.value.clone()
    value[0, 0, 50, 3] = NAN
    for call in (case, dataclasses.replace(case, value=value)):
        with library.device():
            expected = run(call)
        with library.device(seed=2):
            assert_same_bits(run(call), expected)


# Edges -------------------------------------------------------------------------------------------


def test_elements_past_two_to_the_31(kernel):
    check_past_two_to_the_31()


def test_launches_name_the_kernel_and_the_sizes(library):
    message = (
        r"attention_forward \(B 1, H 2, Hkv 2, Lq 70, Lk 75, E 16, Ev 16, grid 4x1x1, "
        r"block 128x1x1, shared \d+ bytes\): too much shared memory"
    )
    with library.device(shared_memory=1024), pytest.raises(RuntimeError, match=message):
        run(make(1))


def test_values_of_integer_tensors_are_checked():
    with pytest.raises(ValueError, match=r"key_lengths: expected lengths in \[0, 75\]"):
        run(make(key_lengths=torch.tensor([3, 76])))
    case = make(1, 2, 20, 20)
    with pytest.raises(ValueError, match="cu_seqlens_k: expected 0 first, no decrease, no step"):
        run_packed(case, boundaries([10, 10]), boundaries([5, 16]))


@pytest.mark.parametrize("name", ["query", "key"])
def test_longer_sequences_are_refused(name):
    """Before anything of their size is allocated."""
    tensors = {"query": torch.ones(1, 1, 1, 8), "key": torch.ones(1, 1, 1, 8)}
    tensors[name] = tensors[name].expand(1, 1, 2**30 + 1, 8)
    arguments = (tensors["query"], tensors["key"], tensors["key"])
    with pytest.raises(ValueError, match=f"{name}: .* at most 1073741824 tokens; got 1073741825"):
        torch.ops.trifuse.attention_forward.cuda(
            *arguments, *[None] * 10, 1, 1, *[None] * 4, False, 0.0
        )


@pytest.mark.parametrize(("E", "Ev"), [(257, 8), (8, 257)])
def test_wider_heads_are_refused(E, Ev):
    with pytest.raises(RuntimeError, match="head_dim 257 is over 256"):
        run(make(1, 1, 2, 2, E, Ev))


# Code for GPUs -----------------------------------------------------------------------------------


# Upper bounds for a kernel, by whether its type runs on tensor cores and by its padded head_dim:
# registers and stack bytes per thread. Stack is spills.
BUDGET: dict[str, dict[tuple[bool, int], tuple[int, int]]] = {
    "attention_forward_kernel": {
        (True, 64): (168, 8), (True, 128): (255, 16), (True, 256): (255, 0),
        (False, 64): (168, 32), (False, 128): (168, 24), (False, 256): (255, 0),
    },
    "attention_forward_kernel, tables": {(True, 256): (255, 0), (False, 256): (255, 16)},
    "attention_forward_hopper_kernel": {
        (True, 64): (128, 64), (True, 128): (128, 64), (True, 256): (168, 88),
    },
    "attention_forward_hopper_kernel, all": {
        (True, 64): (168, 64), (True, 128): (168, 64), (True, 256): (168, 136),
    },
    "attention_decoding_kernel": {
        (True, 64): (168, 8), (True, 128): (168, 0), (True, 256): (255, 0),
    },
    "attention_decoding_kernel, packed": {
        (True, 64): (168, 0), (True, 128): (168, 40), (True, 256): (255, 0),
    },
    "attention_decoding_sum_kernel": {
        (True, 64): (64, 0), (True, 128): (80, 0), (True, 256): (128, 0),
    },
    "attention_backward_key_value_kernel": {
        (True, 64): (255, 0), (True, 128): (255, 40), (True, 256): (255, 16),
        (False, 64): (255, 0), (False, 128): (255, 144), (False, 256): (255, 16),
    },
    "attention_backward_query_kernel": {
        (True, 64): (168, 0), (True, 128): (240, 0), (True, 256): (255, 0),
        (False, 64): (168, 64), (False, 128): (168, 32), (False, 256): (255, 0),
    },
    "attention_backward_key_value_kernel, tables": {
        (True, 256): (255, 16), (False, 256): (255, 24),
    },
    "attention_backward_query_kernel, tables": {(True, 256): (255, 0), (False, 256): (255, 32)},
    "attention_backward_key_value_hopper_kernel": {(True, 64): (168, 0), (True, 128): (168, 120)},
    "attention_backward_key_value_hopper_kernel, all": {
        (True, 64): (168, 0), (True, 128): (168, 208),
    },
    "attention_backward_query_hopper_kernel": {(True, 64): (168, 32), (True, 128): (168, 32)},
    "attention_backward_query_hopper_kernel, all": {
        (True, 64): (168, 40), (True, 128): (168, 24),
    },
    "attention_backward_rows_kernel": {(True, 0): (96, 0), (False, 0): (96, 0)},
    "attention_backward_rows_kernel, two masks": {(True, 0): (112, 0), (False, 0): (96, 16)},
    "attention_backward_rows_kernel, tables": {(True, 0): (128, 40), (False, 0): (96, 0)},
    "attention_backward_mask_kernel, two masks": {(True, 0): (128, 8), (False, 0): (128, 8)},
    "attention_backward_mask_kernel, tables": {(True, 0): (168, 0), (False, 0): (128, 0)},
    "attention_backward_row_tables_kernel": {(True, 0): (128, 16), (False, 0): (128, 40)},
    "attention_backward_table_kernel": {(True, 0): (168, 0), (False, 0): (128, 24)},
    "attention_backward_table_sum_kernel": {(False, 0): (32, 0)},
    "attention_lengths_kernel": {(False, 0): (40, 0)},
    "attention_index_kernel": {(False, 0): (40, 0)},
    "attention_backward_row_mask_kernel": {(False, 0): (32, 0)},
    "attention_backward_mask_sum_kernel": {(False, 0): (32, 0)},
    "attention_backward_band_kernel": {(True, 0): (128, 0), (False, 0): (112, 0)},
    "attention_backward_band_sum_kernel": {(True, 0): (48, 0), (False, 0): (120, 0)},
}  # fmt: skip


def test_shared_memory_keeps_to_its_budget(library):
    """At most 99 KiB, which every GPU from sm_80 on has."""
    for E, dtype, KiB in (
        (64, torch.bfloat16, 40),
        (128, torch.bfloat16, 80),
        (256, torch.bfloat16, 99),
        (128, torch.float32, 99),
        (256, torch.float32, 99),
    ):
        with library.device(shared_memory=KiB << 10):
            run(make(1, 1, 2, 3, E, dtype=dtype, mask=bias(1, 1, 2, 3)))


@pytest.fixture(scope="module")
def code(request) -> list[Code]:
    return compile_operator("attention", request.config)


TABLES, TWO, ALL = "Masks 2", "Masks 3", "Masks 5"  # OneAndTables, Two and All


def _kind(code: Code) -> tuple[str, tuple[bool, int]]:
    name, _, arguments = code.kernel.rstrip(">").partition("<")
    dtype, *rest = arguments.split(", ")
    if TABLES in rest:
        name += ", tables"
    elif ALL in rest:
        name += ", all"
    elif rest == [TWO]:
        name += ", two masks"
    elif name == "attention_decoding_kernel" and rest[-1] == "true":
        name += ", packed"
    return name, (dtype not in ("", "float"), next((int(x) for x in rest if x.isdigit()), 0))


def test_compiled_kernels_keep_to_their_budget(code, request):
    for_hopper = {name for name in BUDGET if "hopper" in name}
    assert {_kind(c)[0] for c in code if c.architecture == "80"} == BUDGET.keys() - for_hopper
    assert {_kind(c)[0] for c in code if c.architecture == "90a"} == for_hopper
    if request.config.getoption("exhaustive"):
        expected = {(name, kind) for name, kinds in BUDGET.items() for kind in kinds}
        assert {_kind(c) for c in code} == expected
    for c in code:
        name, kind = _kind(c)
        registers, stack = BUDGET[name][kind]
        assert c.registers <= registers, c[:4]
        assert c.stack <= stack, c[:4]


def test_tiles_are_copied_and_multiplied_by_the_instructions_meant_for_it(code):
    """cp.async, and in 16 bits ldmatrix and the tensor cores."""
    for c in code:
        name, (tensor_core, _) = _kind(c)
        copying_none = ("lengths_kernel", "index_kernel", "row_mask_kernel", "sum_kernel")
        if "hopper" in name or name.endswith(copying_none):
            continue
        assert c.sass.count("LDGSTS.E.BYPASS.128") >= 2, c[:4]
        assert (c.sass.count("HMMA.16816") >= 8) == tensor_core, c[:4]
        assert (c.sass.count("LDSM") >= 4) == tensor_core, c[:4]


def test_hopper_s_kernels_use_what_only_hopper_has(code, request):
    """The copy engine, setmaxnreg, and warpgroup products, two groups in flight in the forward."""
    of_hopper = [c for c in code if "hopper" in c.kernel]
    assert len(of_hopper) == 34 if request.config.getoption("exhaustive") else of_hopper
    for c in of_hopper:
        name, (_, head_dim) = _kind(c)
        columns = 64  # of a tile
        # The code has scores of the first tile and of later ones; sums of later tiles, of the last,
        # and of Mode::Locate. The backward also has dO v and, by key, two kinds of sums.
        products, sums = (2, 3) if "forward" in name else (3, 6 if "key_value" in name else 3)
        # Not counted: HGMMA.64x8x16, which adds nothing, and ends a group without a product.
        found = c.count("HGMMA.64x\\d{2,3}x.*")
        assert found == (products * head_dim + sums * columns) // 16, c[:4]
        tensors = 3 if "forward" in name else 4
        assert c.count("UTMALDG.4D.*") >= tensors * head_dim // 64, c[:4]
        assert c.count("USETMAXREG.*") == 2, c[:4]
        if "forward" in name:
            assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in c.sass, c[:4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_drops_what_the_whole_drops(dtype):
    placed_cases.check_attention(dtype=dtype)
    placed_cases.check_block_of_attention(dtype)


@pytest.mark.parametrize("name", ["attention", "attention, diagonal", "varlen"])
def test_data_exchanged_between_forward_and_backward(name):
    exchanged_data_raises(name)


@pytest.mark.parametrize("name", ["attention", "attention, diagonal", "varlen"])
def test_storage_shorter_than_the_tensor(name):
    short_storage_raises(name, shrunk=True)
