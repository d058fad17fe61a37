"""The CUDA kernels of attention with tables that an index reads, under the model of CUDA on the
host.

Most requirements are the same as for the other backends, whose tests run on these too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import test_attention_relative_index
import torch
from attention_cases import (
    BIASES,
    Case,
    assert_same_bits,
    boundaries,
    check_parts_of_keys_with_tables,
    judge,
    make,
    normal,
    packed,
    record_accuracy,
    run,
    run_packed,
)
from host_build import Library, library_fixture
from numerics import Accuracy
from test_attention_relative_index import *  # noqa: F403 - collected here, with this file's kernel
from test_attention_relative_index import table_gradients, with_tables
from test_kernels_attention import (  # noqa: F401 - collected here, with this file's kernel
    INDEXED,
    ONE_HEAD,
    indexed,
    test_each_feature_beside_tables,
    test_packed_with_tables,
)
from tested_kernels import Kernel
from torch.nn.attention.bias import CausalVariant

import trifuse

CUDA = Kernel("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = "relative query key"


library = library_fixture("attention")


@pytest.fixture(autouse=True)
def _cuda(library: Library) -> Iterator[None]:
    """Runs tests on the CUDA kernels, with guarded memory and threads in a random order."""
    with library.device(seed=1), library.guarded_memory(), CUDA.serving():
        yield


@pytest.fixture
def kernel(_cuda: None) -> Kernel:
    return CUDA


@pytest.fixture
def backend(_cuda: None) -> str:
    return CUDA.backend


def check(case: Case) -> None:
    record_accuracy(Accuracy(CUDA.name), case, judge(case))


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", INDEXED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_feature_on_tensor_cores(feature, dtype):
    options = ONE_HEAD | INDEXED[feature]
    kind = "distances" if "distances" in feature else "pairs"
    tables = indexed(options["Lq"], options["Lk"], 2, options["H"], kind)
    check(make(**options | tables, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("E", "Ev"), [(16, 16), (40, 72), (136, 24), (72, 200)])
@pytest.mark.parametrize("given", ["relative", "query", "key", ALL])
@pytest.mark.parametrize("mask", [None, "bool", "float", "large"])
@pytest.mark.covering
def test_head_dims_and_masks(dtype, E, Ev, given, mask):
    """A mask has a gradient beside the tables'."""
    masks = {
        None: None,
        "bool": normal(2, 1, 70, 45, seed=3) > -1,
        "float": normal(1, 2, 70, 45, seed=3),
        "large": 2000 * normal(1, 1, 70, 45, seed=3),
    }
    case = make(2, 2, 70, 45, E, Ev, Hkv=1, mask=masks[mask], dtype=dtype, dropout_p=0.2)
    check(with_tables(case, given, "pairs"))


# Calls divide the sums of a shared table among blocks in different ways. Few tiles of many heads
# and sequences make groups. With more of these, a group has runs of terms. Of many tiles, a block
# has several.
SHARES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "many sequences": ({"B": 700, "H": 3, "Lq": 3, "Lk": 4}, (1, 3)),
    "many heads": ({"B": 2, "H": 400, "Lq": 2, "Lk": 3}, (2, 1)),
    "runs of terms": ({"B": 20, "H": 260, "Lq": 2, "Lk": 3}, (1, 260)),
    "many tiles": ({"B": 1, "H": 3, "Lq": 330, "Lk": 770, "window": 9}, (1, 3)),
    "many tables": ({"B": 40, "H": 15, "Lq": 2, "Lk": 3}, (40, 15)),
    "one of all": ({"B": 30, "H": 5, "Lq": 20, "Lk": 30}, (1, 1)),
}


@pytest.mark.parametrize(
    ("what", "dtype"), list(zip(SHARES, itertools.cycle((torch.float32, torch.bfloat16))))
)
def test_shares_of_a_table_s_gradient(what, dtype):
    """The terms are float32 at each dtype, so each share is put to one of them."""
    sizes, leading = SHARES[what]
    check(with_tables(make(E=4, dtype=dtype, **sizes), "relative", "pairs", leading))


def test_packed_sequences_that_read_other_columns_at_the_same_place():
    """Their terms can't be added up before they are sorted by column."""
    lengths_q, lengths_k = [20, 3, 33, 9] * 3, [25, 20, 1, 17] * 3
    case = packed(lengths_q, lengths_k, H=2, E=4, is_causal=CausalVariant.LOWER_RIGHT)
    index = torch.randint(40, (33 + 25 - 1,), generator=torch.Generator().manual_seed(1))
    table = normal(1, 2, 40, seed=2)
    case = dataclasses.replace(case, relative_bias=table, relative_index=index)
    arguments = (case, boundaries(lengths_q), boundaries(lengths_k))
    bounds = {"max_seqlen_q": 33, "max_seqlen_k": 25}
    actual = run_packed(*arguments, **bounds)
    with trifuse.backend("eager"):
        expected = run_packed(*arguments, **bounds)
    torch.testing.assert_close(
        actual.grad_relative_bias, expected.grad_relative_bias, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("columns", [1, 3])
def test_many_pairs_of_one_column(columns):
    """A thread adds up a column's terms that follow each other; here most of a tile do."""
    case = with_tables(make(2, 2, 70, 75, 8), ALL, "pairs")
    assert case.relative_index is not None
    case = dataclasses.replace(case, relative_index=case.relative_index // 30 % columns)
    mask = torch.zeros(2, 2, 70, 75)
    actual = run(case)
    for name, sums in table_gradients(case, _grad_of_scores(case, mask)).items():
        grad = getattr(actual, f"grad_{name}")
        torch.testing.assert_close(grad, sums.to(grad.dtype), rtol=1e-3, atol=1e-4)


def _grad_of_scores(case: Case, mask: torch.Tensor) -> torch.Tensor:
    """Returns dS, the gradient of a mask of zeros beside the tables, by the formula."""
    with trifuse.backend("eager"):
        grad = run(dataclasses.replace(case, attn_mask=mask)).grad_mask
    assert grad is not None
    return grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_parts_of_the_keys_with_tables(dtype):
    check_parts_of_keys_with_tables(dtype)


# The same bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(1, 1), (2, 2)], ids=str)
def test_bits_do_not_depend_on_the_order_of_threads(library, dtype, leading):
    case = make(2, 2, 70, 90, 40, Hkv=1, dtype=dtype, dropout_p=0.2, is_causal=True)
    case = with_tables(case, ALL, "pairs", leading)
    with library.device():
        expected = run(case)
    with library.device(seed=2):
        assert_same_bits(run(case), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_change_nothing(kernel, dtype):
    test_attention_relative_index.test_layouts_change_nothing(kernel, dtype)


# Memory ------------------------------------------------------------------------------------------


def test_no_matrix_is_made(library):
    """The largest tensors are the tables of every row, and the parts of the shared table's sum."""
    L, n = 1024, 8
    case = make(1, 1, L, L, 4, window=8)
    index = torch.arange(2 * L - 1).clamp(L - 4, L + 3) - (L - 4)
    tables = [normal(1, 1, n), normal(1, 1, L, n), normal(1, 1, L, n)]
    given = dict(zip(BIASES[2:], tables, strict=True))
    case = dataclasses.replace(case, relative_index=index, **given)
    library.largest_tensor()
    run(case)
    assert 0 < library.largest_tensor() < 4 * 512 * 8 * n < L * L


@pytest.mark.parametrize("wanted", [(), ("query_bias",), BIASES[3:], ("relative_bias",)], ids=str)
def test_only_the_wanted_gradients_are_computed(library, wanted):
    case = with_tables(make(1, 2, 5, 6, 4), ALL, "pairs")
    kernels = ("attention_backward_table", "attention_backward_row_tables")
    before = [library.launches(name) for name in kernels]
    tables = {name: getattr(case, name).requires_grad_(name in wanted) for name in BIASES[2:]}
    query = case.query.detach().requires_grad_()
    out = trifuse.scaled_dot_product_attention(
        query, case.key, case.value, relative_index=case.relative_index, **tables
    )
    out.sum().backward()
    launched = [library.launches(name) - b for name, b in zip(kernels, before, strict=True)]
    shared = "relative_bias" in wanted
    assert launched == [shared, len(wanted) - shared]
