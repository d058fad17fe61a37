"""Attention's forward for Hopper GPUs, under the model of CUDA on the host.

It has to do what the other kernels do, so their tests are put to it, in 16 bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from attention_cases import (
    SEED,
    Case,
    assert_equal,
    draw_case,
    judge,
    make,
    record_accuracy,
)
from conftest import Kernel
from host_build import Library, library_fixture
from numerics import Accuracy
from test_kernels_attention import (  # noqa: F401 - collected here, with this file's kernel
    FEATURES,
    LOWER_RIGHT,
    NAN,
    ONE_HEAD,
    bias,
    packed_with_a_mask_and_dropout,
    some,
    test_alone_in_a_batch_and_padded_further,
    test_keys_left_out_pass_on_no_poison,
    test_masks_of_the_lowest_number,
    test_nan_reaches_exactly_what_it_is_paired_with,
    test_packed_without_tokens,
    test_rows_without_a_key,
)
from test_kernels_attention import (
    test_packed_is_each_sequence_by_itself as packed_is_each_sequence_by_itself,
)
from torch import Tensor

import trifuse

CUDA = Kernel("cuda")
HOPPER = "attention_forward_hopper"

library = library_fixture("attention")


@pytest.fixture(autouse=True)
def _hopper(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in test_cuda_attention, on a Hopper GPU; calls are in bfloat16 if a test doesn't say."""
    monkeypatch.setitem(make.__kwdefaults__, "dtype", torch.bfloat16)
    before = library.launches(HOPPER)
    with library.device(seed=1, compute_capability=90), library.guarded_memory(), CUDA.serving():
        yield
    assert library.launches(HOPPER) > before


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


def served_by_hopper(library: Library, case: Case) -> bool:
    before = library.launches(HOPPER)
    forward(case)
    return library.launches(HOPPER) > before


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature(feature):
    """With the backward of the general kernels after it."""
    case = make(**ONE_HEAD | FEATURES[feature])
    record_accuracy(Accuracy(CUDA.name), case, judge(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calls_drawn_at_random(dtype):
    random = Random(4)

    def fits(case: Case) -> bool:
        pairs = math.prod(case.query.shape[:3]) * case.key.shape[2]
        return 0 < pairs < 12_000 and case.query.shape[-1] % 8 == case.value.shape[-1] % 8 == 0

    drawn = (draw_case(random, dtype) for _ in itertools.count())
    for case in itertools.islice(filter(fits, drawn), 20):
        query, key, value = (x.contiguous() for x in (case.query, case.key, case.value))
        check_forward(dataclasses.replace(case, query=query, key=key, value=value))


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
def test_tiles_follow_each_other_through_both_stages(options, E, Ev):
    """By two consumers, and in the second block by one."""
    dropout_p = 0.1 if E == 128 else 0.0
    check_forward(make(1, 1, 190, 700, E, Ev, dropout_p=dropout_p, **LONG[options]))


@pytest.mark.parametrize("options", [{"is_causal": LOWER_RIGHT, "Hkv": 1}, {"window": (20, 4)}])
def test_packed_is_each_sequence_by_itself(kernel, options):
    packed_is_each_sequence_by_itself(kernel, torch.float16, options)


def test_packed_with_a_mask_and_dropout():
    actual, expected = packed_with_a_mask_and_dropout(140)
    torch.testing.assert_close(actual.out.double(), expected.out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(actual.lse.double(), expected.lse, rtol=1e-4, atol=1e-4)


def test_tiles_that_a_mask_leaves_empty_are_not_read():
    mask = torch.zeros(1, 1, 150, 600, dtype=torch.bool)
    mask[..., 128:140] = mask[..., 599:] = True
    case = make(1, 1, 150, 600, 64, mask=mask)
    left_out = ~mask[0, 0, 0, :, None]
    poisoned = dataclasses.replace(
        case, key=case.key.masked_fill(left_out, NAN), value=case.value.masked_fill(left_out, NAN)
    )
    for a, b in zip(forward(poisoned), forward(case), strict=True):
        assert_equal(a, b)


# The same bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("E", [64, 128, 256])
def test_bits_do_not_depend_on_the_order_of_threads(library, E):
    """Nor on when copies come; nor do those of a call that meets a NaN, with values cleaned."""
    mask = bias(1, 1, 190, 300)
    case = make(1, 2, 190, 300, E, Hkv=1, mask=mask, dropout_p=0.2)
    value = case.value.clone()
    value[0, 0, 150, 3] = NAN
    for call in (case, dataclasses.replace(case, value=value)):
        with library.device(compute_capability=90):
            expected = forward(call)
        for seed in range(2, 5):
            with library.device(seed=seed, compute_capability=90):
                for a, e in zip(forward(call), expected, strict=True):
                    assert_equal(a, e)


# Which calls it serves ---------------------------------------------------------------------------


def test_which_calls_it_serves(library, monkeypatch):
    case = make(1, 2, 5, 6, 40)
    assert served_by_hopper(library, case)
    wide = make(1, 2, 5, 6, 80)
    halves = {f: getattr(wide, f)[..., :33] for f in ("query", "key", "value")}
    assert served_by_hopper(library, dataclasses.replace(wide, **halves))
    expanded = case.key[:, :1].expand(-1, 2, -1, -1)
    assert served_by_hopper(library, dataclasses.replace(case, key=expanded))

    for E, dtype in ((33, torch.bfloat16), (40, torch.float32)):
        assert not served_by_hopper(library, make(1, 2, 5, 6, E, dtype=dtype))
    shifted = torch.empty(case.value.numel() + 1, dtype=case.value.dtype)[1:].view_as(case.value)
    one_for_all = case.key[:, :, :1].expand(-1, -1, 6, -1)
    for changed in (
        {"value": shifted.copy_(case.value)},
        {"key": one_for_all},
        {"query": case.query.mT.contiguous().mT},
    ):
        assert not served_by_hopper(library, dataclasses.replace(case, **changed))
    with library.device(compute_capability=100):
        assert not served_by_hopper(library, case)
    monkeypatch.setenv("TRIFUSE_CUDA_CAPABILITY", "8.0")
    assert not served_by_hopper(library, case)
    monkeypatch.setenv("TRIFUSE_CUDA_CAPABILITY", "ampere")
    message = "TRIFUSE_CUDA_CAPABILITY: expected a number such as 8.0; got 'ampere'"
    with pytest.raises(RuntimeError, match=message):
        forward(case)


@pytest.mark.parametrize(("E", "KiB"), [(64, 161), (128, 169), (256, 197)])
def test_shared_memory_keeps_to_its_budget(library, E, KiB):
    with library.device(shared_memory=KiB << 10, compute_capability=90):
        forward(make(1, 1, 2, 3, E))
