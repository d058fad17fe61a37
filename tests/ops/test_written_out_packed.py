"""``with trifuse.attention()``: attention that code writes out, on packed tokens."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import trifuse
from trifuse.nn import packing
from trifuse.nn.packing import CrossSequences, PackedSequences
from trifuse.written_out import PackedTerm

B, H, E = 3, 2, 4
OWN, MEMORY = [4, 1, 3], [2, 5, 3]  # the lengths of the sequences


def sequences(lengths, **options):
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return packing.find(keep)._replace(**options)


PACKED = {
    "one side": sequences(OWN),
    "causal": sequences(OWN, causal=True),
    "window": sequences(OWN, window=1),
    "two sides": CrossSequences(sequences(OWN), sequences(MEMORY)),
}


def tensors(packed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    counts = [len(side.indices) for side in packing.sides(packed)]
    return [
        torch.randn(1, H, count, E, generator=generator).to(dtype).requires_grad_()
        for count in (counts[0], counts[1], counts[1])
    ]


def bias_of(packed, batch):
    queries, keys = packing.sides(packed)
    shape = (batch, H, queries.max_seqlen, keys.max_seqlen)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return bias.requires_grad_()


def mask_of(packed, bias):
    """The term as it is defined, a pair at a time."""
    queries, keys = packing.sides(packed)
    places = [
        [(b, i) for b, n in enumerate(side.cu_seqlens.diff().tolist()) for i in range(n)]
        for side in (queries, keys)
    ]
    rows = []
    for b, i in places[0]:
        row = []
        for c, j in places[1]:
            apart = b != c or (queries.causal and j > i)
            apart = apart or (queries.window is not None and abs(i - j) > queries.window)
            if apart:
                row.append(torch.full((H,), -math.inf))
            else:
                row.append(torch.zeros(H) if bias is None else bias[b % len(bias), :, i, j])
        rows.append(torch.stack(row, 1))
    return torch.stack(rows, 1)[None]


def plain(q, k, v, *terms):
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(E)
    for term in terms:
        scores = scores + term
    return F.softmax(scores, dim=-1) @ v


def in_place(q, k, v, *terms):
    scores = q @ k.mT
    for term in terms:
        scores += term
    scores *= 0.5
    return scores.softmax(-1).matmul(v)


def mask_first(q, k, v, *terms):
    scores = terms[-1] + (q * 0.3) @ k.mT
    for term in terms[:-1]:
        scores = term + scores
    return torch.matmul(F.dropout(scores.float().softmax(-1), 0.3, training=False), v)


def flat_heads(q, k, v, *terms):
    scores = torch.bmm(q[0], k[0].mT).view(1, H, q.shape[2], -1)
    for term in terms:
        scores = scores + term
    return torch.bmm(scores.softmax(-1).view(H, q.shape[2], -1), v[0])[None]


def capped(q, k, v, *terms):
    scores = torch.tanh((q @ k.mT) / 3) * 3
    for term in terms:
        scores = scores + term
    return scores.softmax(-1) @ v


def by_einsum(q, k, v, *terms):
    scores = torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2))
    for term in terms:
        scores = scores + term
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.transpose(1, 2))
    return out.transpose(1, 2)


@pytest.fixture
def attended(monkeypatch):
    """The packed sequences of each attention that ran packed."""
    seen = []
    attend = packing.attend

    def spy(query, key, value, packed, *args, **kwargs):
        seen.append(packed)
        return attend(query, key, value, packed, *args, **kwargs)

    monkeypatch.setattr(packing, "attend", spy)
    return seen


def run(code, packed, batch):
    """The result and the gradients, by packed terms and by dense ones."""
    found = []
    for dense in (False, True):
        inputs = tensors(packed)
        bias = None if batch is None else bias_of(packed, batch)
        if dense:
            terms = [mask_of(packed, each) for each in ([] if bias is None else [bias])]
            out = code(*inputs, *terms, mask_of(packed, None))
        else:
            like = torch.float32, torch.device("cpu")
            terms = [] if bias is None else [PackedTerm.of(packed, bias, *like)]
            with trifuse.attention():
                out = code(*inputs, *terms, PackedTerm.of(packed, None, *like))
        wanted = inputs if bias is None else [*inputs, bias]
        upstream = torch.linspace(-1, 1, out.numel()).view_as(out)
        found.append((out, *torch.autograd.grad(out, wanted, upstream)))
    return found


@pytest.mark.parametrize("batch", [None, 1, B], ids=["no bias", "one bias", "a bias for each"])
@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("code", [plain, in_place, mask_first, flat_heads, capped, by_einsum])
def test_every_spelling_is_one_call(code, packed, batch, attended):
    mine, exact = run(code, packed, batch)
    assert attended == [packed]
    assert type(mine[0]) is torch.Tensor
    torch.testing.assert_close(mine, exact)


def clipped(q, k, v, *terms):
    scores = (q @ k.mT).relu()
    for term in terms:
        scores = scores + term
    return scores.softmax(-1) @ v


def weighted(q, k, v, *terms):
    weights = sum((q @ k.mT, *terms)).softmax(-1)
    return (weights * weights) @ v


def with_more(q, k, v, *terms):
    more = torch.linspace(-1, 1, k.shape[2])
    return (q @ k.mT + more + sum(terms[1:], terms[0]) * 1.0).softmax(-1) @ v


@pytest.mark.parametrize("batch", [None, 1, B], ids=["no bias", "one bias", "a bias for each"])
@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("code", [clipped, weighted, with_more])
def test_other_code_gets_the_dense_terms(code, packed, batch, attended):
    mine, exact = run(code, packed, batch)
    assert not attended
    torch.testing.assert_close(mine, exact)


def test_dropout_is_the_operators():
    packed = PACKED["one side"]
    q, k, v = tensors(packed)
    torch.manual_seed(3)
    expected = packing.attend(q, k, v, packed, 0.4, scale=1.0)
    torch.manual_seed(3)
    with trifuse.attention():
        mask = PackedTerm.of(packed, None, q.dtype, q.device)
        out = F.dropout((q @ k.mT + mask).softmax(-1), 0.4) @ v
    assert torch.equal(out, expected)


def test_weights_can_be_read_afterwards():
    packed = PACKED["two sides"]
    q, k, v = tensors(packed)
    with trifuse.attention():
        weights = (q @ k.mT + PackedTerm.of(packed, None, q.dtype, q.device)).softmax(-1)
        weights @ v
    assert torch.equal(weights * 1, (q @ k.mT + mask_of(packed, None)).softmax(-1))


def test_terms_of_other_tokens_are_no_masks_of_these(attended):
    """Scores whose terms disagree in where the sequences begin are computed."""
    one, other = PACKED["one side"], sequences([3, 2, 3])
    q, k, v = tensors(one)
    terms = [PackedTerm.of(packed, None, q.dtype, q.device) for packed in (one, other)]
    with trifuse.attention():
        out = plain(q, k, v, *terms)
    assert not attended
    exact = plain(q, k, v, mask_of(one, None), mask_of(other, None))
    torch.testing.assert_close(out, exact, equal_nan=True)


def test_a_term_that_was_changed_in_place(attended):
    packed = PACKED["one side"]
    q, k, v = tensors(packed)
    with trifuse.attention():
        term = PackedTerm.of(packed, None, q.dtype, q.device)
        term[..., 0] = 2.0
        out = plain(q, k, v, term)
    assert not attended
    dense = mask_of(packed, None)
    dense[..., 0] = 2.0
    torch.testing.assert_close(out, plain(q, k, v, dense))


def test_scores_in_bfloat16_with_a_bias_in_float32(attended):
    """In place, they stay in bfloat16, as under autocast."""
    packed = PACKED["one side"]
    q, k, v = tensors(packed, torch.bfloat16)
    bias = bias_of(packed, 1)
    with trifuse.attention():
        scores = q @ k.mT
        scores += PackedTerm.of(packed, bias, bias.dtype, bias.device)
        weights = scores.softmax(-1)
        out = weights @ v
    assert len(attended) == 1
    assert out.dtype == weights.dtype == torch.bfloat16
    exact = q.double() @ k.double().mT + mask_of(packed, bias).double()
    torch.testing.assert_close(out.double(), exact.softmax(-1) @ v.double(), rtol=2e-2, atol=2e-2)
    assert (weights * 1).dtype == torch.bfloat16


def test_places():
    sequence, place = packing.places(PackedSequences(*sequences([2, 0, 3])))
    assert sequence.tolist() == [0, 0, 2, 2, 2]
    assert place.tolist() == [0, 1, 0, 1, 2]
