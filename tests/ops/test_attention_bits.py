"""Bitwise tests: results depend neither on threads nor on the batch; all backends drop the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import (
    SEED,
    Case,
    Results,
    assert_same_bits,
    boundaries,
    cases,
    drawn_seed,
    make,
    normal,
    packed,
    run,
    run_packed,
)
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention.bias import CausalVariant
from torch_checks import check_generator

import trifuse
from trifuse.reference import philox

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_of_the_formula(dtype):
    torch.set_num_threads(2)

    @settings(max_examples=settings.default.max_examples // 10)
    @given(cases(dtype))
    def call(case: Case) -> None:
        with trifuse.backend("eager"):
            assert_same_bits(run(case), run(case))

    call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads(cpp_kernels, dtype):
    """Runs with 2 threads twice, so that a race shows."""

    @settings(max_examples=settings.default.max_examples // 5)
    @given(cases(dtype))
    def call(case: Case) -> None:
        with cpp_kernels[-1].serving():
            torch.set_num_threads(1)
            alone = run(case)
            for threads in (2, 3, 2):
                torch.set_num_threads(threads)
                assert_same_bits(run(case), alone)

    call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"dropout_p": 0.2}, {"mask": normal(1, 2, 515, 515, seed=8)}],
    ids=["plain", "causal", "dropout", "float mask"],
)
@pytest.mark.covering
def test_threads_share_one_long_sequence(cpp_kernel, dtype, options):
    """One head has so many blocks that threads meet at their edges several times."""
    case = make(B=1, Lq=515, Lk=515, E=64, dtype=dtype, **options)
    torch.set_num_threads(1)
    expected = run(case)
    for threads in (2, 4, 2, 4):
        torch.set_num_threads(threads)
        assert_same_bits(run(case), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiny_gradients_do_not_depend_on_the_keys_past_a_length(cpp_kernel, dtype):
    """With more keys, grad_query is a sum over chunks. Its subnormal numbers stay alike."""
    tiny = 1000 * torch.finfo(dtype).tiny  # of some 2000 gradients, a few are subnormal
    query, key, value = (normal(1, 2, n, 16, seed=n).to(dtype) for n in (70, 400, 401))
    grads = []
    for length in (400, 1100):
        padding = (0, 0, 0, length)
        keys, values = (torch.nn.functional.pad(x, padding)[:, :, :length] for x in (key, value))
        leaf = query.clone().requires_grad_()
        out = trifuse.scaled_dot_product_attention(
            leaf, keys, values, key_lengths=torch.tensor([400])
        )
        (grad,) = torch.autograd.grad(out, leaf, normal(*out.shape, seed=3).to(dtype) * tiny)
        grads.append(grad.view(torch.int32 if dtype == torch.float32 else torch.int16))
    assert torch.equal(*grads)
    assert (grads[0] != 0).any()


def _sequence(results: Results, b: int, Lq: int, Lk: int) -> Results:
    """Returns a batch's results for sequence ``b``."""
    rows = (b, slice(None), slice(Lq))
    columns = (b, slice(None), slice(Lk))
    index = (rows, rows, rows, columns, columns)
    parts = [x[i][None] for x, i in zip(results[:5], index, strict=True)]
    return Results(*parts, None)


def _zero_padded(x: Tensor | None, length: int, fill: float) -> Tensor | None:
    """Pads dimension 2 to ``length`` with ``fill``."""
    if x is None:
        return None
    more = x.new_full((*x.shape[:2], length - x.shape[2], *x.shape[3:]), fill)
    return torch.cat([x, more], 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"window": (30, 9)},
        {"H": 4, "Hkv": 2},
        {"E": 100, "Ev": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_alone_in_a_batch_and_padded_further(cpp_kernel, dtype, options, poison):
    """A sequence gets the same bits alone, in a batch, and padded further with 0 or NaN."""
    together = make(B=3, dtype=dtype, **options)
    lengths = torch.tensor([75, 75, 40])
    b = 1

    def only(x: Tensor) -> Tensor:
        return x[b : b + 1]

    fields = ("query", "key", "value", "grad_out", "grad_lse")
    alone = dataclasses.replace(together, **{f: only(getattr(together, f)) for f in fields})
    expected = run(alone)
    torch.set_num_threads(2)
    assert_same_bits(_sequence(run(together), b, 70, 75), expected._replace(grad_mask=None))
    for Lq, Lk in ((70, 76), (70, 200), (71, 128), (140, 129)):
        longer = dataclasses.replace(
            together,
            query=_zero_padded(together.query, Lq, 0.0),
            key=_zero_padded(together.key, Lk, poison),
            value=_zero_padded(together.value, Lk, poison),
            grad_out=_zero_padded(together.grad_out, Lq, 0.0),
            grad_lse=_zero_padded(together.grad_lse, Lq, 0.0),
            options=together.options | {"key_lengths": lengths},
        )
        results = run(longer)
        assert_same_bits(_sequence(results, b, 70, 75), expected)
        assert results.grad_key[:, :, 75:].eq(0).all()
        assert results.grad_value[:, :, 75:].eq(0).all()


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, CausalVariant.UPPER_LEFT, CausalVariant.LOWER_RIGHT])
@pytest.mark.parametrize("window", [None, (0, 0), (15, 16), (40, 1), (7, 90)])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}, {"softcap": 3.0}], ids=str)
def test_a_window_has_the_bits_of_a_dense_mask(cpp_kernel, dtype, causal, window, options):
    """A kernel leaves out what a window cuts off a tile, but computes all of a masked tile."""
    Lq, Lk = 130, 151
    distance = torch.arange(Lk) - torch.arange(Lq)[:, None]
    if causal is CausalVariant.LOWER_RIGHT:
        distance -= Lk - Lq
    left, right = window or (Lk, Lk)
    visible = (distance >= -left) & (distance <= (min(right, 0) if causal else right))
    sizes = {"Lq": Lq, "Lk": Lk, "E": 40, "dtype": dtype, **options}
    expected = run(make(mask=visible[None, None], **sizes))
    assert_same_bits(run(make(is_causal=causal, window=window, **sizes)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True, CausalVariant.LOWER_RIGHT])
def test_alone_in_a_pack(cpp_kernel, dtype, causal):
    """The same tokens packed with others before and after them, at any offset."""
    alone = make(B=1, Lq=67, Lk=67, dtype=dtype, is_causal=causal)
    expected = run(alone)
    torch.set_num_threads(2)
    for before, after in ((1, 0), (64, 5), (13, 200)):
        lengths = [before, 67, after]
        batch = packed(lengths, lengths, dtype=dtype, is_causal=causal)
        mine = slice(before, before + 67)
        for f in ("query", "key", "value", "grad_out", "grad_lse"):
            getattr(batch, f)[:, :, mine] = getattr(alone, f)
        results = run_packed(batch, boundaries(lengths), None)
        assert_same_bits(Results(*(x[:, :, mine] for x in results[:5]), None), expected)


# Dropout ----------------------------------------------------------------------------------------


def _kept(B: int, H: int, Lq: int, Lk: int, dropout_p: float) -> Tensor:
    """Returns which weights the specification keeps: bool (B, H, Lq, Lk)."""
    plane = torch.arange(B)[:, None] * H + torch.arange(H)
    return philox.dropout_keep(drawn_seed(), plane, Lq, Lk, dropout_p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_same_seed_drops_the_same_weights(kernel, dtype, dropout_p, groups):
    """With unit vectors for values, the output shows the weights; so does the values' gradient."""
    B, H, Lq, Lk = 2, 4, 70, 75
    value = torch.eye(Lk, dtype=dtype).expand(B, H // groups, Lk, Lk)
    grad_out = torch.eye(Lq, Lk, dtype=dtype).expand(B, H, Lq, Lk)
    case = make(B, H, Lq, Lk, Hkv=H // groups, dtype=dtype, dropout_p=dropout_p)
    case = dataclasses.replace(case, query=case.query / 4, value=value, grad_out=grad_out)
    results = run(case)
    kept = _kept(B, H, Lq, Lk, dropout_p)
    assert torch.equal(results.out != 0, kept)
    # dV[j, i] is the weight of the pair (i, j), dropped or kept, summed over the group.
    kept_in_group = kept.unflatten(1, (-1, groups)).any(2)
    dropped_and_kept = results.grad_value[..., :Lq].mT != 0
    assert torch.equal(dropped_and_kept, kept_in_group)


def test_triton_drops_the_same_weights(triton):
    """All other tests of Triton's kernels are in test_kernels_attention."""
    B, H, Lq, Lk = 2, 2, 5, 19
    case = make(B, H, Lq, Lk, dropout_p=0.3)
    case = dataclasses.replace(
        case,
        value=torch.eye(Lk).expand(B, H, Lk, Lk),
        grad_out=torch.eye(Lq, Lk).expand(B, H, Lq, Lk),
    )
    results, kept = run(case), _kept(B, H, Lq, Lk, 0.3)
    assert torch.equal(results.out != 0, kept)
    assert torch.equal(results.grad_value[..., :Lq].mT != 0, kept)


def test_dropout_scales_what_it_keeps_exactly(kernel):
    """Equal scores over 8 keys: each kept weight is 2¹⁶ / (2¹⁶ - round(p · 2¹⁶)) eighths."""
    zero, eye = torch.zeros(1, 1, 64, 4), torch.eye(8).expand(1, 1, 8, 8)
    torch.manual_seed(SEED)
    out = trifuse.scaled_dot_product_attention(zero, zero[:, :, :8], eye, dropout_p=0.3)
    kept = 65536 / (65536 - round(0.3 * 65536)) / 8
    assert set(out.unique().tolist()) == {0.0, torch.tensor(kept).item()}


@pytest.mark.parametrize("structure", [{}, {"is_causal": True}, {"window": (9, 70)}])
def test_packed_sequences_drop_what_padded_ones_do(kernel, structure):
    """The index of a packed sequence serves as its batch index."""
    lengths = [33, 70, 0, 12]
    N, H, longest = len(lengths), 2, max(lengths)
    case = packed(lengths, lengths, H=H, Ev=longest, dropout_p=0.4, **structure)
    eye = torch.cat([torch.eye(longest)[:length] for length in lengths])
    case = dataclasses.replace(case, value=eye.expand(1, H, -1, -1))
    cu = boundaries(lengths)
    actual = run_packed(case, cu, None).out != 0
    kept = _kept(N, H, longest, longest, 0.4)
    without = dataclasses.replace(case, options=case.options | {"dropout_p": 0.0})
    taking_part = run_packed(without, cu, None).out != 0
    for b, length in enumerate(lengths):
        rows = slice(cu[b], cu[b + 1])
        expected = kept[b, :, :length] & taking_part[0, :, rows]
        assert torch.equal(actual[0, :, rows], expected)


def test_the_generator_decides(backend):
    x = normal(1, 2, 20, 8)
    check_generator(lambda: trifuse.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    before = torch.get_rng_state()
    trifuse.scaled_dot_product_attention(*(normal(1, 1, 3, 2),) * 3)
    assert torch.equal(torch.get_rng_state(), before)  # no dropout, no draw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("H", "Hkv", "E", "Ev"),
    [
        (2, 2, 64, 33),
        (6, 2, 40, 96),
        (9, 1, 7, 33),
        (4, 1, 30, 64),
        (45, 1, 18, 32),  # several tasks for a key head
        (3, 1, 520, 32),  # keys far apart
    ],
)
def test_few_queries_have_the_bits_of_many(cpp_kernel, dtype, H, Hkv, E, Ev):
    """Few queries have a kernel of their own, in which heads share a tile."""
    L, Lk = 70, 150
    q, k = (normal(2, heads, n, E, seed=n).to(dtype) for heads, n in ((H, L), (Hkv, Lk)))
    v = normal(2, Hkv, Lk, Ev, seed=1).to(dtype)
    bias = normal(2, H, L, Lk, seed=2).to(dtype)
    bias = bias.masked_fill(bias < -1, -torch.inf)
    options = {"enable_gqa": True, "key_lengths": torch.tensor([Lk, 67])}
    for mask in (None, bias > 0, bias):
        for more in ({}, {"softcap": 2.0}, {"is_causal": True}):
            many = trifuse.scaled_dot_product_attention(q, k, v, mask, **options, **more)
            for n in (1, 3, 8):
                part = None if mask is None else mask[:, :, :n]
                few = trifuse.scaled_dot_product_attention(
                    q[:, :, :n], k, v, part, **options, **more
                )
                assert torch.equal(few, many[:, :, :n])
