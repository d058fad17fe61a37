"""Tables of biases that an index picks from: ``relative_index`` with ``relative_bias``,
``query_bias`` and ``key_bias``.

Accuracy is held to the numerics rule where that of all options is, and derivatives are checked
where those of all options are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_cases import (
    BIASES,
    Case,
    Results,
    assert_equal,
    assert_near,
    assert_same_bits,
    boundaries,
    check_one_nan,
    dense_tables,
    make,
    normal,
    packed,
    run,
    run_packed,
    tables,
)
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

import trifuse

# The tests that other files collect too, with their kernels.
__all__ = [
    "test_a_number_that_is_not_finite_reaches_the_pairs_that_read_it",
    "test_an_expanded_table_has_a_gradient_for_each_sequence",
    "test_as_the_same_numbers_in_a_mask",
    "test_columns_that_no_pair_reads_may_be_nan",
    "test_deberta_s_disentangled_terms",
    "test_empty_tensors",
    "test_nan_reaches_what_it_is_paired_with",
    "test_numbers_of_more_than_32_bits",
    "test_numbers_outside_the_tables",
    "test_other_numbers_of_dimensions",
    "test_packed_sequences",
    "test_rows_without_a_key",
    "test_shapes",
    "test_sizes_of_gradients",
    "test_swin_s_windows",
]

attention = trifuse.scaled_dot_product_attention
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LOWER_RIGHT = CausalVariant.LOWER_RIGHT
Lq, Lk, COLUMNS = 70, 75, 40


def index_of(kind: str, queries: int, keys: int, columns: int = COLUMNS, seed: int = 9) -> Tensor:
    """Returns an index of pairs, or of distances, with any columns."""
    shape = (queries, keys) if kind == "pairs" else (max(queries + keys - 1, 0),)
    return torch.randint(columns, shape, generator=torch.Generator().manual_seed(seed))


def with_tables(
    case: Case, names: str, kind: str, leading: tuple[int, int] = (1, 2), seed: int = 20
) -> Case:
    """Returns the case with tables, some of whose numbers are -inf.

    Args:
        names: of the tables, as "relative query".
        leading: B and H of the relative bias.
    """
    (B, H, queries), keys = case.query.shape[:3], case.key.shape[2]
    shapes = {
        "relative": (*leading, COLUMNS),
        "query": (B, H, queries, COLUMNS),
        "key": (B, H, keys, COLUMNS),
    }
    wide = torch.float64 if case.query.dtype == torch.float64 else torch.float32
    drawn = {}
    for name in names.split():
        table = normal(*shapes[name], seed=seed + len(drawn), dtype=wide)
        drawn[f"{name}_bias"] = table.masked_fill(table > 1.5, -INF)
    return dataclasses.replace(case, relative_index=index_of(kind, queries, keys), **drawn)


def as_mask(case: Case) -> Case:
    """Returns the case with its tables as a float mask, added to the one that it has."""
    B, H = case.query.shape[:2]
    masks = dense_tables(case.query.shape[2], case.key.shape[2], **tables(case))
    mask = sum(masks[1:], masks[0]).expand(B, H, -1, -1)
    if case.attn_mask is not None:
        given = case.attn_mask
        mask = mask.masked_fill(~given, -INF) if given.dtype == torch.bool else mask + given
    none = dict.fromkeys(tables(case))
    return dataclasses.replace(case, attn_mask=mask.contiguous(), **none)


def table_gradients(case: Case, grad: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of a case's tables, by the gradient of the mask that they make."""
    leaves = {
        name: t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t
        for name, t in tables(case).items()
    }
    wanted = [t for t in leaves.values() if t is not None and t.is_floating_point()]
    masks = dense_tables(case.query.shape[2], case.key.shape[2], **leaves)
    spread = [mask.nan_to_num(neginf=0.0).expand_as(grad) for mask in masks]
    grads = torch.autograd.grad(sum(spread), wanted, grad.double())
    names = [name for name in BIASES[2:] if leaves[name] is not None]
    return dict(zip(names, grads, strict=True))


COMBINATIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": LOWER_RIGHT},
    "window": {"window": (20, 5)},
    "diagonal": {"is_causal": True, "diagonal": torch.tensor([3, -9])},
    "lengths": {"key_lengths": torch.tensor([75, 31])},
    "bool mask": {"mask": normal(2, 1, 1, Lk, seed=3) > -1},
    "float mask": {"mask": normal(1, 2, Lq, Lk, seed=3)},
    "groups, dropout": {"H": 4, "Hkv": 2, "dropout_p": 0.3},
    "softcap, sinks": {"softcap": 0.8, "sinks": torch.tensor([0.7, -1.5])},
    "few queries": {"Lq": 3},
    "one query": {"Lq": 1, "H": 8, "Hkv": 2},
    "one pair": {"Lq": 1, "Lk": 1},
    "several chunks of keys": {"Lk": 530, "is_causal": LOWER_RIGHT},
    "many sequences": {"B": 67, "H": 1, "Lq": 5, "Lk": 6},
}
GIVEN = ("relative", "query", "key", "relative query key")


@pytest.mark.parametrize("leading", [(1, 1), (1, 0), (0, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("kind", ["pairs", "distances"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("what", COMBINATIONS)
@pytest.mark.covering
def test_as_the_same_numbers_in_a_mask(kernel, what, given, kind, leading):
    """All results, and the tables' gradients: the mask's, summed by column."""
    case = make(**COMBINATIONS[what])
    sizes = [one or full for one, full in zip(leading, case.query.shape[:2], strict=True)]
    case = with_tables(case, given, kind, (sizes[0], sizes[1]))
    actual, expected = run(case), run(as_mask(case))
    assert expected.grad_mask is not None
    shared = actual._replace(**{f"grad_{name}": None for name in BIASES[2:]})
    assert_near(shared, expected._replace(grad_mask=actual.grad_mask))
    for name, sums in table_gradients(case, expected.grad_mask).items():
        grad = getattr(actual, f"grad_{name}")
        torch.testing.assert_close(grad, sums.to(grad.dtype), rtol=2e-4, atol=5e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_mask(cpp_kernel, dtype):
    """The C++ kernels add the same numbers at the same place."""
    case = with_tables(make(dtype=dtype, is_causal=True), "query", "pairs")
    actual, expected = run(case), run(as_mask(case))
    for name in Results._fields[:5]:
        assert_equal(getattr(actual, name), getattr(expected, name), name)


@pytest.mark.parametrize("shape", [(9,), (2, 9), (1, 9), (1, 1, 9), (2, 1, 9), (1, 2, 9)], ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_shapes(backend, shape, integers):
    case = make()
    index = index_of("pairs", Lq, Lk, 9).to(integers)
    given = normal(*shape, seed=6).requires_grad_()
    full = given.expand(2, 2, 9).detach()
    rows = (case.query, case.key, case.value)
    out = attention(*rows, relative_bias=given, relative_index=index)
    expected = attention(*rows, full[..., index.long()])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(out.sin().sum(), given)
    assert grad.shape == shape
    assert grad.count_nonzero() > 0


@pytest.mark.parametrize("leading", [(), (3,), (2, 3, 2), (2, 1, 3, 2)], ids=str)
def test_other_numbers_of_dimensions(backend, leading):
    """Tables of queries and keys have the dimensions of queries and keys before their own."""
    query, key, value = (normal(*leading, L, 4, seed=L) for L in (5, 6, 6))
    index, numbers = index_of("pairs", 5, 6, 9), dict.fromkeys(tables(make()))
    query_bias, key_bias = (normal(*leading, L, 9, seed=L + 1) for L in (5, 6))
    options = {"query_bias": query_bias, "key_bias": key_bias, "relative_index": index}
    out = attention(query, key, value, **options)
    flat = {
        name: t.reshape(-1, 1, *t.shape[-2:])
        for name, t in (("query_bias", query_bias), ("key_bias", key_bias))
    }
    masks = dense_tables(5, 6, **numbers | flat | {"relative_index": index})
    expected = attention(query, key, value, (masks[0] + masks[1]).reshape(*leading, 5, 6))
    torch.testing.assert_close(out, expected)


def test_sizes_of_gradients(backend):
    """A table's gradient has its shape, layout aside, and its dtype."""
    for dtype in (torch.bfloat16, torch.float32):
        case = with_tables(make(dtype=torch.bfloat16), "relative query key", "pairs")
        cast = {name: getattr(case, name).to(dtype) for name in BIASES[2:]}
        results = run(dataclasses.replace(case, **cast))
        for name, table in cast.items():
            grad = getattr(results, f"grad_{name}")
            assert (grad.shape, grad.dtype) == (table.shape, dtype)


@pytest.mark.parametrize(("B", "masked"), [(2, True), (40, False)])
def test_an_expanded_table_has_a_gradient_for_each_sequence(backend, B, masked):
    """It has one table in memory, beside a mask that is one for all sequences, or in so many that
    tasks share its sums."""
    case = with_tables(make(B=B, H=2, Lq=9, Lk=11), "relative", "pairs")
    if masked:
        case = dataclasses.replace(case, attn_mask=normal(1, 1, 9, 1, seed=5))
    table = case.relative_bias
    assert table is not None
    expanded = dataclasses.replace(case, relative_bias=table.expand(B, -1, -1))
    copied = dataclasses.replace(case, relative_bias=table.repeat(B, 1, 1))
    assert_same_bits(run(expanded), run(copied))


# The models that they are for -------------------------------------------------------------------


@pytest.mark.parametrize("shifted", [False, True])
def test_swin_s_windows(backend, shifted):
    """transformers' bias, and a shifted window's mask beside it."""
    pytest.importorskip("transformers")
    from transformers import DonutSwinConfig
    from transformers.models.donut.modeling_donut_swin import DonutSwinSelfAttention

    windows, batch, H, M = 4, 3, 2, 7
    layer = DonutSwinSelfAttention(DonutSwinConfig(), 16, H, M).eval()
    table = layer.relative_position_bias_table
    torch.nn.init.normal_(table)
    hidden = normal(batch * windows, M * M, 16, seed=3)
    mask = None
    if shifted:
        mask = torch.where(normal(windows, M * M, M * M, seed=4) > -1, 0.0, -100.0)
    expected = layer(hidden, mask)[0]
    query, key, value = (
        projection(hidden).unflatten(-1, (H, -1)).transpose(1, 2)
        for projection in (layer.query, layer.key, layer.value)
    )
    given = None if mask is None else mask.repeat(batch, 1, 1)[:, None]
    index = layer.relative_position_index
    out = attention(query, key, value, given, relative_bias=table.T, relative_index=index)
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), expected, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(out.transpose(1, 2).flatten(2).sin().sum(), table)
    (theirs,) = torch.autograd.grad(expected.sin().sum(), table)
    torch.testing.assert_close(grad, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("buckets", [-1, 8])
def test_deberta_s_disentangled_terms(backend, buckets):
    """transformers' scores: content to position and position to content, with one index."""
    pytest.importorskip("transformers")
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2 import modeling_deberta_v2 as theirs

    B, H, L, E = 2, 3, 40, 8
    config = DebertaV2Config(
        hidden_size=H * E,
        num_attention_heads=H,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=buckets,
        max_relative_positions=16,
    )
    layer = theirs.DisentangledSelfAttention(config).eval()
    hidden, embeddings = normal(B, L, H * E, seed=1), normal(2 * layer.pos_ebd_size, H * E, seed=2)
    embeddings.requires_grad_()
    mask = torch.ones(B, 1, L, L, dtype=torch.bool)
    expected = layer(hidden, mask, rel_embeddings=embeddings)[0]

    def heads(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (H, E)).transpose(-2, -3)

    query, key, value = (
        heads(projection(hidden))
        for projection in (layer.query_proj, layer.key_proj, layer.value_proj)
    )
    scale = (3 * E) ** -0.5
    distances = torch.arange(L - 1, -L, -1)  # of a query from a key
    if buckets > 0:
        distances = theirs.make_log_bucket_position(distances, buckets, 16)
    span = layer.pos_ebd_size
    index = (distances.long() + span).clamp(0, 2 * span - 1)
    out = attention(
        query,
        key,
        value,
        scale=scale,
        query_bias=scale * query @ heads(layer.pos_key_proj(embeddings)).mT,
        key_bias=scale * key @ heads(layer.pos_query_proj(embeddings)).mT,
        relative_index=index,
    )
    ours = out.transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(ours.sin().sum(), embeddings)
    (expected_grad,) = torch.autograd.grad(expected.sin().sum(), embeddings)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-3, atol=1e-4)


# Special values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BIASES[2:])
def test_rows_without_a_key(kernel, name):
    """A table of -inf leaves nothing: zeros, and no gradient."""
    case = with_tables(make(), name.removesuffix("_bias"), "pairs")
    table = getattr(case, name)
    results = run(dataclasses.replace(case, **{name: torch.full_like(table, -INF)}))
    assert results.out.eq(0).all()
    assert results.lse.eq(-INF).all()
    for grad in (*results[2:5], getattr(results, f"grad_{name}")):
        assert grad is not None
        assert grad.eq(0).all()


@pytest.mark.parametrize("where", ["query", "key", "value", "grad_out", "grad_lse"])
def test_nan_reaches_what_it_is_paired_with(kernel, where):
    case = with_tables(make(is_causal=True), "relative query key", "pairs")
    check_one_nan(case, where, lambda a, c, name: torch.testing.assert_close(a, c))


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", BIASES[2:])
def test_a_number_that_is_not_finite_reaches_the_pairs_that_read_it(kernel, name, value):
    case = with_tables(make(), name.removesuffix("_bias"), "pairs")
    table, index = getattr(case, name).clone(), case.relative_index
    assert index is not None
    row, column = 3, int(index[3, 3])
    places = {"relative_bias": (0, 0, column)}
    table[places.get(name, (0, 0, row, column))] = value
    reached = index == column
    if name != "relative_bias":
        own = torch.zeros_like(reached)
        own[(row,) if name == "query_bias" else (slice(None), row)] = True
        reached &= own
    rows = reached.any(1)
    results, finite = run(dataclasses.replace(case, **{name: table})), run(case)
    assert results.out[0, 0, rows].isnan().all()
    assert results.lse[0, 0, rows].isnan().all()
    for a, f in zip(results[:3], finite[:3], strict=True):
        assert_equal(a[0, 1], f[0, 1])
        assert_equal(a[0, 0, ~rows], f[0, 0, ~rows])


def test_columns_that_no_pair_reads_may_be_nan(kernel):
    case = with_tables(make(), "relative query key", "pairs")
    index = case.relative_index
    assert index is not None
    case = dataclasses.replace(case, relative_index=index.clamp(max=COLUMNS - 2))
    poisoned = {}
    for name in BIASES[2:]:
        poisoned[name] = getattr(case, name).clone()
        poisoned[name][..., -1] = NAN
    assert_same_bits(run(dataclasses.replace(case, **poisoned)), run(case))


# Packed sequences -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True, LOWER_RIGHT])
@pytest.mark.parametrize("kind", ["pairs", "distances"])
@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize("more", [0, 30])
@pytest.mark.covering
def test_packed_sequences(kernel, causal, kind, B, more):
    """Each sequence as by itself, with its own part of the index; bounds may be too large."""
    lengths_q, lengths_k = [5, 0, 70, 3], [7, 4, 65, 0]
    longest_q, longest_k = 70 + more, 65 + more
    case = packed(lengths_q, lengths_k, rest=2, is_causal=causal)
    case = with_tables(case, "relative query key", kind, (B, 2))
    index = index_of(kind, longest_q, longest_k)
    case = dataclasses.replace(case, relative_index=index)
    bounds = (boundaries(lengths_q), boundaries(lengths_k))
    results = run_packed(case, *bounds, max_seqlen_q=longest_q, max_seqlen_k=longest_k)
    assert case.relative_bias is not None
    assert case.query_bias is not None
    assert case.key_bias is not None
    grads = {name: torch.zeros_like(getattr(case, name)) for name in BIASES[2:]}
    zero = (longest_k if causal is LOWER_RIGHT else longest_q) - 1
    query = key = 0
    for b, (queries, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, columns = slice(query, query + queries), slice(key, key + keys)
        own_zero = (keys if causal is LOWER_RIGHT else queries) - 1
        if kind == "pairs":
            own_index = index[:queries, :keys]
        else:
            first = max(zero - own_zero, 0)
            own_index = index[first : first + max(queries + keys - 1, 0)]
        own = b if B > 1 else 0
        alone = Case(
            case.query[:, :, rows],
            case.key[:, :, columns],
            case.value[:, :, columns],
            None,
            case.grad_out[:, :, rows],
            None if case.grad_lse is None else case.grad_lse[:, :, rows],
            case.options,
            relative_bias=case.relative_bias[own : own + 1],
            query_bias=case.query_bias[:, :, rows],
            key_bias=case.key_bias[:, :, columns],
            relative_index=own_index,
        )
        query, key = query + queries, key + keys
        if queries == 0:
            continue
        expected = run(alone)
        torch.testing.assert_close(results.out[:, :, rows], expected.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(results.lse[:, :, rows], expected.lse, rtol=1e-4, atol=1e-5)
        grads["relative_bias"][own : own + 1] += expected.grad_relative_bias
        grads["query_bias"][:, :, rows] += expected.grad_query_bias
        grads["key_bias"][:, :, columns] += expected.grad_key_bias
    for name, grad in grads.items():
        actual = getattr(results, f"grad_{name}")
        torch.testing.assert_close(actual, grad, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("kind", ["pairs", "distances"])
@pytest.mark.parametrize(
    ("B", "H", "queries", "keys"),
    [(0, 2, 5, 6), (2, 0, 5, 6), (2, 2, 0, 6), (2, 2, 5, 0), (2, 2, 0, 0), (2, 2, 1, 0)],
)
def test_empty_tensors(kernel, kind, B, H, queries, keys):
    case = Case(
        *(normal(B, H, L, 4) for L in (queries, keys, keys)),
        None,
        normal(B, H, queries, 4),
        None,
        {},
    )
    case = with_tables(case, "relative query key", kind, (1, 1))
    results = run(case)
    assert results.out.eq(0).all()
    for name in BIASES[2:]:
        grad = getattr(results, f"grad_{name}")
        assert_equal(grad, torch.zeros_like(getattr(case, name)))


# Bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(1, 3), (3, 1)], ids=str)
@pytest.mark.covering
def test_neither_threads_nor_the_batch_change_bits(cpp_kernel, dtype, leading):
    lengths = torch.tensor([530, 10, 0])
    case = make(3, 3, 200, 530, dtype=dtype, key_lengths=lengths)
    case = with_tables(case, "relative query key", "pairs", leading)
    torch.set_num_threads(1)
    whole = run(case)
    for threads in (2, 3, 2):
        torch.set_num_threads(threads)
        assert_same_bits(run(case), whole)
    for b in range(3):
        own = slice(b, b + 1)
        fields = ["query", "key", "value", "grad_out", "grad_lse", "query_bias", "key_bias"]
        fields += ["relative_bias"] * (leading[0] > 1)
        alone = dataclasses.replace(
            case,
            **{name: getattr(case, name)[own] for name in fields},
            options={**case.options, "key_lengths": lengths[own]},
        )
        results = run(alone)
        names = [*Results._fields[:5], "grad_query_bias", "grad_key_bias"]
        names += ["grad_relative_bias"] * (leading[0] > 1)
        for name in names:
            assert_equal(getattr(results, name), getattr(whole, name)[own], name)


def test_sums_over_many_sequences_have_a_fixed_order(cpp_kernel):
    """Sequences are dealt to a fixed number of sums, whatever the number of threads."""
    case = with_tables(make(B=71, H=2, Lq=9, Lk=9, is_causal=True), "relative", "pairs")
    torch.set_num_threads(1)
    whole = run(case)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same_bits(run(case), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_change_nothing(kernel, dtype):
    case = with_tables(make(dtype=dtype), "relative query key", "pairs", (2, 2))
    strided = {}
    for name in BIASES[2:]:
        given = getattr(case, name).to(dtype)
        case = dataclasses.replace(case, **{name: given})
        shape = (*reversed(given.shape), 2)
        strided[name] = torch.full(shape, NAN, dtype=dtype)[..., 0].permute(
            *reversed(range(given.dim()))
        )
        strided[name].copy_(given)
        assert not strided[name].is_contiguous()
    assert case.relative_index is not None
    strided["relative_index"] = case.relative_index.mT.contiguous().mT
    assert_same_bits(run(dataclasses.replace(case, **strided)), run(case))


# Checks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["pairs", "distances"])
@pytest.mark.parametrize("wrong", [-1, COLUMNS, 2**31 - 1])
def test_numbers_outside_the_tables(backend, wrong, kind, integers):
    case = with_tables(make(), "relative", kind)
    assert case.relative_index is not None
    index = case.relative_index.to(integers)
    index.view(-1)[11] = wrong
    with pytest.raises(ValueError, match=r"relative_index: expected .*in \[0, 39\]"):
        run(dataclasses.replace(case, relative_index=index))


def test_numbers_of_more_than_32_bits(backend):
    case = with_tables(make(), "query", "pairs")
    assert case.relative_index is not None
    index = case.relative_index.clone()
    index[3, 5] += 2**32
    with pytest.raises(ValueError, match="relative_index: expected"):
        run(dataclasses.replace(case, relative_index=index))


def test_explain_checks_tables():
    query, index = normal(1, 2, 3, 4), index_of("pairs", 3, 3, 5)
    given: dict[str, Any] = {"relative_bias": normal(2, 5), "relative_index": index}
    choice = trifuse.explain(attention, query, query, query, **given)
    assert choice.backend == trifuse.explain(attention, query, query, query).backend
    with pytest.raises(trifuse.ArgumentError, match="relative_index: expected shape"):
        trifuse.explain(attention, query, query, query, **given | {"relative_index": index[:2]})
