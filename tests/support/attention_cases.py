"""Attention cases for tests: arguments, results, and eager torch's results."""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from numerics import LAYOUTS, Accuracy, lay_out, rounding_error
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

import trifuse
from trifuse.reference import philox

SEED = 1234  # seeds the default generator before a call with dropout


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """Arguments of ``scaled_dot_product_attention`` and its upstream gradients."""

    query: Tensor  # (B, H, Lq, E)
    key: Tensor  # (B, Hkv, Lk, E)
    value: Tensor  # (B, Hkv, Lk, Ev)
    attn_mask: Tensor | None
    grad_out: Tensor  # (B, H, Lq, Ev)
    grad_lse: Tensor | None  # (B, H, Lq), in the accumulation type
    options: dict[str, Any]
    sinks: Tensor | None = None  # (H,)
    # (B, H, Lq + Lk - 1) or, with an index, (B, H, n), B and H full or 1
    relative_bias: Tensor | None = None
    query_bias: Tensor | None = None  # (B, H, Lq, n)
    key_bias: Tensor | None = None  # (B, H, Lk, n)
    relative_index: Tensor | None = None  # (Lq, Lk) or (Lq + Lk - 1,)

    def double(self) -> Case:
        """Returns the case in float64."""
        wide: dict[str, Any] = {
            field: value.double()
            for field, value in vars(self).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return dataclasses.replace(self, **wide)

    def __repr__(self) -> str:
        def show(x: Tensor | None) -> str:
            return "None" if x is None else f"{tuple(x.shape)} strides {x.stride()} {x.dtype}"

        tensors = ("query", "key", "value", *BIASES, "relative_index", "grad_out", "grad_lse")
        return "\n".join([*(f"{t}: {show(getattr(self, t))}" for t in tensors), str(self.options)])


BIASES = ("attn_mask", "sinks", "relative_bias", "query_bias", "key_bias")


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    grad_mask: Tensor | None
    grad_sinks: Tensor | None = None
    grad_relative_bias: Tensor | None = None
    grad_query_bias: Tensor | None = None
    grad_key_bias: Tensor | None = None


def run(case: Case) -> Results:
    """Runs the operator, forward and backward, on the current backend."""
    torch.manual_seed(SEED)
    return _differentiate(
        case,
        lambda query, key, value, attn_mask, **biases: trifuse.scaled_dot_product_attention(
            query, key, value, attn_mask, return_lse=True, **biases, **case.options
        ),
    )


def specification(case: Case) -> Results:
    """Evaluates the reference formula in float64."""
    with trifuse.backend("eager"):
        return run(case.double())


def eager_torch(case: Case) -> Results:
    """Evaluates the formula in plain torch, in the dtype of the arguments."""
    keep, multiplier = pairs(case), dropout_multiplier(case)

    def formula(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        sinks: Tensor | None,
        **tables: Any,
    ) -> tuple[Tensor, Tensor]:
        groups = query.shape[1] // max(key.shape[1], 1)
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = (query @ key.mT) * scale(case)
        if (softcap := case.options.get("softcap")) is not None:
            scores = softcap * (scores / softcap).tanh()
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            scores = scores + attn_mask
        for bias in dense_tables(query.shape[2], key.shape[2], **tables):
            scores = scores + bias
        scores = scores.masked_fill(~keep, float("-inf"))
        scores = _with_sinks(scores, sinks)
        weights = scores.softmax(-1)[..., : key.shape[2]].masked_fill(~keep, 0).to(query.dtype)
        lse = scores.to(_accumulation(query)).logsumexp(-1)
        return (weights * multiplier.to(query.dtype)) @ value, lse

    return _differentiate(case, formula)


def dense(relative_bias: Tensor, Lq: int, Lk: int) -> Tensor:
    """Returns a relative bias as the mask (B, H, Lq, Lk) that models build from it."""
    return relative_bias[..., torch.arange(Lk) - torch.arange(Lq)[:, None] + Lq - 1]


def dense_tables(
    Lq: int,
    Lk: int,
    relative_bias: Tensor | None,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    relative_index: Tensor | None,
) -> list[Tensor]:
    """Returns each of a call's tables as the mask (B, H, Lq, Lk) that models build from it."""
    if relative_index is None:
        return [] if relative_bias is None else [dense(relative_bias, Lq, Lk)]
    index = relative_index.long()
    if index.dim() == 1:
        index = dense(index, Lq, Lk)
    masks = []
    if relative_bias is not None:
        masks.append(relative_bias[..., index])
    if query_bias is not None:
        masks.append(query_bias.gather(3, index.expand(*query_bias.shape[:2], -1, -1)))
    if key_bias is not None:
        masks.append(key_bias.gather(3, index.mT.expand(*key_bias.shape[:2], -1, -1)).mT)
    return masks


def tables(case: Case) -> dict[str, Any]:
    """Returns a case's tables and their index, by name."""
    return {name: getattr(case, name) for name in (*BIASES[2:], "relative_index")}


def _with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Appends a column of sinks to the scores, as models without fused attention do."""
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1)


def scale(case: Case) -> float:
    given = case.options.get("scale")
    return case.query.shape[-1] ** -0.5 if given is None else given


def pairs(case: Case) -> Tensor:
    """Returns the pairs that take part, bool (B, H, Lq, Lk), from the public arguments alone."""
    (B, H, Lq), Lk = case.query.shape[:3], case.key.shape[2]
    i, j = torch.arange(Lq)[:, None], torch.arange(Lk)
    causal = case.options.get("is_causal", False)
    distance = j - i - (Lk - Lq if causal is CausalVariant.LOWER_RIGHT else 0)
    diagonal = case.options.get("diagonal")
    if diagonal is not None:
        each = diagonal.long()[:, None, None, None] if isinstance(diagonal, Tensor) else diagonal
        distance = distance - each
    keep = torch.ones(B, H, Lq, Lk, dtype=torch.bool)
    if causal is not False:
        keep &= distance <= 0
    window = case.options.get("window")
    left, right = window if isinstance(window, tuple) else (window, window)
    if left is not None:
        keep &= distance >= -left
    if right is not None:
        keep &= distance <= right
    if case.options.get("key_lengths") is not None:
        keep &= j < case.options["key_lengths"][:, None, None, None]
    if case.attn_mask is not None:
        mask = case.attn_mask
        keep &= mask if mask.dtype == torch.bool else mask != float("-inf")
    for bias in dense_tables(Lq, Lk, **tables(case)):
        keep &= bias != float("-inf")
    return keep


def dropout_multiplier(case: Case) -> Tensor:
    """Returns each weight's dropout multiplier, float64, broadcastable to (B, H, Lq, Lk)."""
    (B, H, Lq), Lk = case.query.shape[:3], case.key.shape[2]
    dropout_p = case.options.get("dropout_p", 0.0)
    if dropout_p == 0:
        return torch.ones((), dtype=torch.float64)
    plane = torch.arange(B)[:, None] * H + torch.arange(H)
    keep = philox.dropout_keep(drawn_seed(), plane, Lq, Lk, dropout_p)
    return keep.double() * philox.keep_scale(dropout_p)


def drawn_seed() -> Tensor:
    """Returns the seed that a call draws after ``torch.manual_seed(SEED)``."""
    limits = torch.iinfo(torch.int64)
    torch.manual_seed(SEED)
    return torch.randint(limits.min, limits.max, (1,))


class Judged(NamedTuple):
    """The inputs of the numerics rule for a case; they do not depend on the kernel."""

    expected: Results
    eager: Results
    rounding: Results


def judge(case: Case) -> Judged:
    eager = eager_torch(case)
    if case.query.dtype.itemsize == 2:
        # The logsumexp is float32, so it can't be compared with eager torch's in 16 bits.
        narrow = ("query", "key", "value", "grad_out")
        single = {field: getattr(case, field).float() for field in narrow}
        eager = eager._replace(lse=eager_torch(dataclasses.replace(case, **single)).lse)
    return Judged(specification(case), eager, one_rounding(case))


_OF_TABLES = tuple(f"grad_{name}" for name in BIASES[2:])
_LARGE = 2**31 - 1


def record_accuracy(accuracy: Accuracy, case: Case, judged: Judged) -> None:
    """Runs a case on the current backend and holds each result to the numerics rule."""
    actual, cancels = run(case), _score_gradients_cancel(case)
    for name in Results._fields:
        if getattr(judged.expected, name) is not None:
            accuracy.record(
                name,
                getattr(actual, name),
                *(getattr(x, name) for x in judged),
                in_mean=not (cancels and name in _OF_TABLES),
            )


def _score_gradients_cancel(case: Case) -> bool:
    """Returns whether rows have few keys on average, or often read only one column of a table.

    The score gradients of a row sum to 0, and those of few keys nearly cancel. The rounding errors
    of eager torch cancel too, because its softmax subtracts the sum of the same products. Those of
    a kernel that subtracts dO·O do not.
    """
    if case.relative_index is None:
        return False
    keep, index = pairs(case), case.relative_index.long()
    if index.dim() == 1:
        index = dense(index, *keep.shape[2:])
    rows = keep.any(-1).sum()
    lowest, highest = (index.where(keep, x) for x in (_LARGE, -1))
    alone = (lowest.amin(-1) == highest.amax(-1)).sum() if index.numel() else 0
    return bool(keep.sum() < 16 * rows or alone > rows / 10)


def one_rounding(case: Case) -> Results:
    """Returns the error of each result if every term of every sum in it were rounded once.

    An error ∂S of a score adds P ∂S to the weight's own rounding. The terms of the other sums
    follow from the formulas at the head of ``trifuse/reference/attention.py``. The backward
    computes its weights from the logsumexp and inherits the rounding of it.

    Scores, the logsumexp and dO·v are sums in the accumulation type. The two products are summed
    over head_dim term by term, and each partial sum is rounded. With n terms of random sign, the
    mean square of a partial sum is n/2 times that of a term.
    """
    eps = rounding_error(case.query.dtype)
    sum_eps = rounding_error(_accumulation(case.query))
    exact = case.double()
    query, key, value, grad_out = exact.query, exact.key, exact.value, exact.grad_out
    groups = query.shape[1] // max(key.shape[1], 1)
    keep, multiplier = pairs(case), dropout_multiplier(case)
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.mT * scale(case)
    terms = (query.square() @ key.square().mT).sqrt() * abs(scale(case))
    score_error = sum_eps * terms * _of_partial_sums(query.shape[-1])
    slope: Tensor | float = 1.0
    if (softcap := case.options.get("softcap")) is not None:
        scores = softcap * (scores / softcap).tanh()
        slope = 1 - (scores / softcap).square()
        score_error = (score_error * slope).hypot(sum_eps * scores)  # the tanh is rounded too
    if exact.attn_mask is not None and exact.attn_mask.dtype != torch.bool:
        scores = scores + exact.attn_mask
        # Adding the lowest finite number absorbs a score completely, with its error.
        added = score_error + sum_eps * scores.abs()
        score_error = torch.where(scores.abs() < 1e30, added, 0)
    for bias in dense_tables(query.shape[2], key.shape[2], **tables(exact)):
        scores = scores + bias
        added = score_error + sum_eps * scores.abs()
        score_error = torch.where(scores.abs() < 1e30, added, 0)
    scores = scores.masked_fill(~keep, float("-inf"))
    with_sinks = _with_sinks(scores, exact.sinks)
    weights = with_sinks.softmax(-1)[..., : key.shape[2]].masked_fill(~keep, 0)
    score_error = score_error.masked_fill(~keep, 0)
    weight_error = weights * (eps + score_error)
    lse = with_sinks.logsumexp(-1)
    lse = torch.where(lse.abs() < 1e30, lse.abs(), 0)

    grad_weights = (grad_out.square() @ value.square().mT).masked_fill(~keep, 0) * multiplier**2
    inner = (weights.square() * grad_weights).sum(-1, keepdim=True)
    if exact.grad_lse is not None:
        inner = inner + exact.grad_lse.square()[..., None]
    weight_error_again = weight_error + weights * sum_eps * lse[..., None]
    product_error = weights * sum_eps * _of_partial_sums(value.shape[-1])
    ds = ((weight_error_again.square() + product_error.square()) * (grad_weights + inner)).sqrt()

    grad_mask = None
    if case.attn_mask is not None and case.attn_mask.dtype != torch.bool:
        grad_mask = ds.square().sum_to_size(case.attn_mask.shape).sqrt()
        if torch.finfo(case.attn_mask.dtype).eps > torch.finfo(case.query.dtype).eps:
            grad_mask = grad_mask * rounding_error(case.attn_mask.dtype) / eps
    of_tables = {}
    for name in BIASES[2:]:
        given = getattr(exact, name)
        if given is not None:
            table = torch.zeros_like(given).requires_grad_()
            alone = dict.fromkeys(BIASES[2:]) | {name: table}
            (spread,) = dense_tables(*ds.shape[2:], relative_index=exact.relative_index, **alone)
            (squares,) = torch.autograd.grad(spread.expand_as(ds), table, ds.square())
            of_tables[f"grad_{name}"] = squares.sqrt()
    grad_sinks = None
    if exact.sinks is not None:  # as of a key whose value is 0
        of_sink = with_sinks.softmax(-1)[..., -1:]
        ds_of_sink = of_sink * (eps + sum_eps * lse[..., None]) * inner.sqrt()
        grad_sinks = ds_of_sink.square().sum((0, 2, 3)).sqrt()
    heads = (key.shape[1] // max(groups, 1), groups)
    return Results(
        out=_root_of_squares(weight_error * multiplier, value),
        lse=sum_eps * (1 + lse) + (weights * score_error).square().sum(-1).sqrt(),
        grad_query=abs(scale(case)) * _root_of_squares(ds * slope, key),
        grad_key=abs(scale(case)) * _grouped_root((ds * slope).mT, query, heads),
        grad_value=_grouped_root((weight_error_again * multiplier).mT, grad_out, heads),
        grad_mask=grad_mask,
        grad_sinks=grad_sinks,
        **of_tables,
    )


def _of_partial_sums(terms: int) -> float:
    return math.sqrt(max(terms, 2) / 2)


def _root_of_squares(weights: Tensor, terms: Tensor) -> Tensor:
    return (weights.square() @ terms.square()).sqrt()


def _grouped_root(weights: Tensor, terms: Tensor, heads: tuple[int, int]) -> Tensor:
    return _root_of_squares(weights, terms).square().unflatten(1, heads).sum(2).sqrt()


def _accumulation(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _differentiate(case: Case, function: Any) -> Results:
    inputs = {
        name: getattr(case, name) for name in ("query", "key", "value", *BIASES, "relative_index")
    }
    wanted = {
        name: x.detach().requires_grad_()
        for name, x in inputs.items()
        if x is not None and x.is_floating_point()
    }
    out, lse = function(**(inputs | wanted))
    outputs, upstream = [out], [case.grad_out]
    if case.grad_lse is not None:
        outputs.append(lse)
        upstream.append(case.grad_lse)
    grads = dict(
        zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), upstream), strict=True)
    )
    return Results(
        out.detach(),
        lse.detach(),
        grads["query"],
        grads["key"],
        grads["value"],
        grads.get("attn_mask"),
        *(grads.get(name) for name in BIASES[1:]),
    )


# Cases with given options -----------------------------------------------------------------------


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def make(
    B: int = 2,
    H: int = 2,
    Lq: int = 70,
    Lk: int = 75,
    E: int = 16,
    Ev: int | None = None,
    *,
    Hkv: int | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    relative_index: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Case:
    """Makes a case of these sizes. Lengths of 70 and 75 extend into a kernel's second tile."""
    Hkv, Ev = Hkv or H, Ev or E
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        normal(B, H, Lq, E, seed=1, dtype=dtype),
        normal(B, Hkv, Lk, E, seed=2, dtype=dtype),
        normal(B, Hkv, Lk, Ev, seed=3, dtype=dtype),
        mask,
        normal(B, H, Lq, Ev, seed=4, dtype=dtype),
        normal(B, H, Lq, seed=5, dtype=wide),
        {"enable_gqa": Hkv != H, **options},
        sinks,
        relative_bias,
        query_bias,
        key_bias,
        relative_index,
    )


def packed(lengths_q: list[int], lengths_k: list[int], rest: int = 0, **sizes: Any) -> Case:
    """Makes packed sequences, with ``rest`` tokens behind the last: (1, H, total, E)."""
    return make(B=1, Lq=sum(lengths_q) + rest, Lk=sum(lengths_k) + rest, **sizes)


def boundaries(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def check_past_two_to_the_31(**sizes: Any) -> None:
    """Checks offsets of more than 32 bits, in views of memory that is mostly never touched."""
    far = torch.frombuffer(mmap.mmap(-1, 2 * (2**31 + 2**16)), dtype=torch.bfloat16)
    case = make(H=1, dtype=torch.bfloat16, **sizes)
    views = {}
    for name in ("query", "key", "value", "grad_out"):
        near = getattr(case, name)
        views[name] = far.as_strided(near.shape, (2**31, *near.stride()[1:])).copy_(near)
        far = far[near[0].numel() :]
    assert_same_bits(run(dataclasses.replace(case, **views)), run(case))


def run_packed(case: Case, cu_q: Tensor, cu_k: Tensor | None, **options: Any) -> Results:
    """As :func:`run`, with ``varlen_attention``."""

    def packed(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **biases: Any
    ) -> Any:
        for name in ("query_bias", "key_bias"):
            if biases[name] is not None:
                biases[name] = packed(biases[name])
        out, lse = trifuse.varlen_attention(
            packed(query),
            packed(key),
            packed(value),
            cu_q,
            cu_k,
            attn_mask=attn_mask,
            return_lse=True,
            **biases,
            **case.options,
            **options,
        )
        return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]

    torch.manual_seed(SEED)
    return _differentiate(case, attend)


def forward(case: Case) -> tuple[Tensor, Tensor]:
    """Returns the output and the logsumexp."""
    names = ("sinks", "relative_bias", "query_bias", "key_bias", "relative_index")
    with torch.no_grad():
        return trifuse.scaled_dot_product_attention(
            *(case.query, case.key, case.value, case.attn_mask),
            return_lse=True,
            **{name: getattr(case, name) for name in names},
            **case.options,
        )


def forward_packed(
    case: Case, lengths_q: list[int], lengths_k: list[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """As :func:`forward`, with ``varlen_attention``."""
    bounds = {"max_seqlen_q": max(lengths_q, default=0), "max_seqlen_k": max(lengths_k, default=0)}
    rows = {
        name: None if (x := getattr(case, name)) is None else x[0].transpose(0, 1)
        for name in ("query", "key", "value", "query_bias", "key_bias")
    }
    names = ("attn_mask", "sinks", "relative_bias", "relative_index")
    with torch.no_grad():
        out, lse = trifuse.varlen_attention(
            cu_seqlens_q=boundaries(lengths_q),
            cu_seqlens_k=boundaries(lengths_k, torch.int32),
            return_lse=True,
            **rows,
            **{name: getattr(case, name) for name in names},
            **case.options | bounds | options,
        )
    return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]


def by_itself(case: Case, lengths_q: list[int], lengths_k: list[int], b: int) -> Case:
    """Returns a case of the packed sequence ``b`` of these."""
    nq, nk, longest = lengths_q[b], lengths_k[b], (max(lengths_q), max(lengths_k))
    q, k = (slice(sum(lengths[:b]), sum(lengths[: b + 1])) for lengths in (lengths_q, lengths_k))
    mask, relative_bias, index = case.attn_mask, case.relative_bias, case.relative_index
    # The elements of a bias or an index by distance begin with the least distance.
    lower_right = case.options.get("is_causal") is CausalVariant.LOWER_RIGHT
    corner = longest[1] - nk if lower_right else longest[0] - nq
    distances = slice(corner, corner + max(nq + nk - 1, 0))
    if mask is not None:
        mask = (mask if len(mask) == 1 else mask[b : b + 1])[:, :, :nq, :nk]
    if index is not None:
        index = index[distances] if index.dim() == 1 else index[:nq, :nk]
    elif relative_bias is not None:
        relative_bias = relative_bias.expand(len(lengths_q), -1, -1)[b : b + 1, :, distances]
    of_queries = {f: getattr(case, f)[:, :, q] for f in ("query", "grad_out", "grad_lse")}
    options = case.options
    if isinstance(options.get("diagonal"), Tensor):
        options = options | {"diagonal": options["diagonal"][b : b + 1]}
    return dataclasses.replace(
        case,
        **of_queries,
        key=case.key[:, :, k],
        value=case.value[:, :, k],
        attn_mask=mask,
        relative_bias=relative_bias,
        query_bias=None if case.query_bias is None else case.query_bias[:, :, q],
        key_bias=None if case.key_bias is None else case.key_bias[:, :, k],
        relative_index=index,
        options=options,
    )


def with_more_keys(case: Case, more: int) -> Case:
    """Returns a sequence with keys past its own, which key_lengths leaves out.

    They are NaN, and so are the numbers of masks and biases for them. Lower right becomes a
    diagonal, which counts from the sequence's own keys.
    """
    (nq, nk), options = (case.query.shape[2], case.key.shape[2]), dict(case.options)
    if options.get("is_causal") is CausalVariant.LOWER_RIGHT:
        options |= {"is_causal": True, "diagonal": nk - nq}

    def longer(x: Tensor | None, dim: int) -> Any:
        if x is None:
            return None
        shape = [more if d == dim % x.dim() else size for d, size in enumerate(x.shape)]
        return torch.cat([x, x.new_full(shape, math.nan)], dim)  # in a boolean mask it is True

    return dataclasses.replace(
        case,
        key=longer(case.key, 2),
        value=longer(case.value, 2),
        attn_mask=longer(case.attn_mask, -1),
        relative_bias=longer(case.relative_bias, -1),
        options=options | {"key_lengths": torch.tensor([nk])},
    )


# Comparisons ------------------------------------------------------------------------------------


def assert_same_bits(actual: Results, expected: Results) -> None:
    for name, a, e in zip(Results._fields, actual, expected, strict=True):
        assert (a is None) == (e is None), name
        if a is not None and e is not None:
            assert_equal(a, e, name)


def assert_equal(actual: Tensor, expected: Tensor, name: str = "result") -> None:
    """Asserts equality to the last bit. All NaNs are equal, whatever their bits."""
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda why: f"{name}: {why}"
    )
    if actual.is_floating_point():
        assert torch.equal(
            actual.signbit() | actual.isnan(), expected.signbit() | actual.isnan()
        ), f"{name}: zeros of different sign"


def assert_near(actual: Results, expected: Results) -> None:
    """Asserts equality up to rounding. test_attention_accuracy bounds the rounding."""
    for a, e in zip(actual, expected, strict=True):
        if a is not None and e is not None:
            rtol = {torch.float64: 1e-9, torch.float32: 2e-4}.get(a.dtype, 2e-2)
            torch.testing.assert_close(a.double(), e.double(), rtol=rtol, atol=rtol / 10)


def check_parts_of_keys(dtype: torch.dtype) -> None:
    """Checks that the backward accepts a part of the keys with the forward results of all keys."""
    mask = normal(2, 1, 70, 75, seed=6)
    mask[0, 0, 3] = mask[1, 0, 5, :50] = -torch.inf  # a row without keys; a part without pairs
    group: dict[str, Any] = {"H": 2, "Hkv": 1, "dtype": dtype, "dropout_p": 0.2}
    _check_parts(make(mask=mask, softcap=2.0, window=(60, 20), **group))
    table = normal(2, 2, 70 + 75 - 1, seed=7, dtype=dtype)
    _check_parts(make(relative_bias=table, is_causal=True, dtype=dtype, dropout_p=0.2))
    case = packed([30, 0, 40], [45, 20, 40], window=(40, 9), **group)
    _check_parts(case, cu_q=boundaries([30, 0, 40]), lengths_k=[45, 20, 40])


def check_parts_of_keys_with_tables(dtype: torch.dtype) -> None:
    """As :func:`check_parts_of_keys`, with biases that an index reads from tables."""
    index = torch.randint(9, (70, 75), generator=torch.Generator().manual_seed(8))
    shapes = {"relative_bias": (1, 2), "query_bias": (2, 2, 70), "key_bias": (2, 2, 75)}
    tables = {name: normal(*shape, 9, seed=9, dtype=dtype) for name, shape in shapes.items()}
    group: dict[str, Any] = {"Hkv": 1, "dtype": dtype, "is_causal": True, "dropout_p": 0.2}
    _check_parts(make(relative_index=index, **tables, **group))


def check_parts_of_keys_beside_large_scores(is_cuda: bool) -> None:
    """Checks parts whose logsumexps are just precise enough, and that coarser ones are detected.

    Args:
        is_cuda: whether the parts are computed as on a GPU.
    """
    from trifuse.ops import attention

    case = make(scale=250.0, softcap=1018.0)
    whole = _check_parts(case, is_cuda=is_cuda)
    assert 900 < whole.lse.abs().max() < 1024
    for options in ({"softcap": 5000.0}, {"mask": normal(70, 75)}, {"scale": 2.0**21}):
        large = make(**{"scale": 250.0, **options})
        checked, whole = _part(large, slice(0, 32)), run(large)
        assert whole.lse.abs().max() > 1024
        assert _normalises_again(checked, whole.lse, is_cuda), options
    if is_cuda:  # kernels of a GPU allow for no large scores here, so that lse need not be read
        case = make(scale=2.0**20)
        case = dataclasses.replace(case, query=case.query * 2.0**-10)
        whole = _check_parts(case, is_cuda=True)
        assert whole.lse.abs().max() > 1024
        assert not attention.has_large_scores(False, 2.0**20, None)


def _check_parts(
    case: Case,
    *,
    cu_q: Tensor | None = None,
    lengths_k: list[int] | None = None,
    is_cuda: bool = False,
) -> Results:
    """Checks that the gradients of two parts of the keys add up; returns those of all keys.

    Args:
        cu_q, lengths_k: of packed sequences, whose first 16 keys are one part.
    """
    from trifuse.ops import attention

    if cu_q is None or lengths_k is None:
        whole = run(case)
        parts = [(keys, _part(case, keys)) for keys in (slice(0, 32), slice(32, 75))]
    else:
        whole = run_packed(case, cu_q, boundaries(lengths_k))
        firsts = boundaries(lengths_k).tolist()
        parts = []
        for part in (slice(0, 16), slice(16, None)):
            each = [torch.arange(n)[part] for n in lengths_k]
            keys = torch.cat([at + first for at, first in zip(each, firsts, strict=False)])
            cu_k = boundaries([len(at) for at in each])
            parts.append((keys, _part(case, keys, part.start, cu_q, cu_k)))
    names = Results._fields[2:]
    sums = {
        name: torch.zeros_like(t, dtype=torch.float64)
        for name, t in zip(names, whole[2:], strict=True)
        if t is not None
    }
    wanted = ("grad_mask", *(f"grad_{name}" for name in BIASES[2:]))
    needs_grad = (True, True, True, *(name in sums for name in wanted))
    for keys, checked in parts:
        assert not _normalises_again(checked, whole.lse, is_cuda)
        found = attention.attention_gradients(
            checked, whole.out, whole.lse, case.grad_out, case.grad_lse, needs_grad
        )
        sums["grad_query"] += found[0]
        sums["grad_key"][:, :, keys] += found[1]
        sums["grad_value"][:, :, keys] += found[2]
        if "grad_mask" in sums:
            sums["grad_mask"][..., keys] += found[3]
        if "grad_relative_bias" in sums:
            places = slice(None) if case.relative_index is not None else _distances(case, keys)
            sums["grad_relative_bias"][..., places] += found[4]
        if "grad_query_bias" in sums:
            sums["grad_query_bias"] += found[5]
        if "grad_key_bias" in sums:
            sums["grad_key_bias"][:, :, keys] += found[6]
    for name, total in sums.items():
        expected = getattr(whole, name)
        rtol = {torch.float64: 1e-9, torch.float32: 2e-4}.get(expected.dtype, 2e-2)
        each_is_rounded = torch.finfo(expected.dtype).eps / 2 * float(expected.abs().max())
        torch.testing.assert_close(
            total, expected.double(), rtol=rtol, atol=rtol / 10 + each_is_rounded
        )
    return whole


def _part(
    case: Case,
    keys: Any,
    first: int | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
) -> Any:
    """Returns the checked call with some of a case's keys.

    Args:
        keys: the keys' positions in the tensors.
        first: the position of the first in its sequence. Default: that of ``keys``, a slice.
    """
    from trifuse.ops import _draws, attention

    first = keys.start if first is None else first
    mask, table, index, key_bias = (
        getattr(case, name) for name in ("attn_mask", "relative_bias", "relative_index", "key_bias")
    )
    if index is None and table is not None:
        table = table[..., _distances(case, keys)]
    arguments: dict[str, Any] = {
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "window": None,
        "softcap": None,
        **case.options,
        "attn_mask": None if mask is None else mask[..., keys],
        "diagonal": -first,
        "sinks": None,
        "relative_bias": table,
        "query_bias": case.query_bias,
        "key_bias": None if key_bias is None else key_bias[:, :, keys],
        "relative_index": None if index is None else index[:, keys],
        "alibi_slopes": None,
    }
    if arguments["window"] is None and not arguments["is_causal"] and table is None:
        arguments["diagonal"] = None
    tensors = (case.query, case.key[:, :, keys], case.value[:, :, keys])
    if cu_q is None or cu_k is None:
        checked = attention.prepare(*tensors, key_lengths=None, **arguments)
    else:
        tokens = (t[0].transpose(0, 1) for t in tensors)
        longest = (int(cu.diff().max()) for cu in (cu_q, cu_k))
        checked = attention.prepare_varlen(*tokens, cu_q, cu_k, *longest, **arguments)
    torch.manual_seed(SEED)
    seed = philox.draw_seed(case.query)
    with _draws.given(_draws.with_place(seed, philox.Place(0, column=first))):
        return attention.with_seed(checked)


def _distances(case: Case, keys: slice) -> slice:
    """Returns the positions of some keys' distances in a table of all keys' distances."""
    return slice(keys.start, keys.stop + case.query.shape[2] - 1)


def _normalises_again(checked: Any, lse: Tensor, is_cuda: bool) -> bool:
    from trifuse.ops import attention

    tensors, options = checked.tensors, checked.options
    mask = tensors.attn_mask
    tables = (tensors.relative_bias, tensors.relative_index)
    biased = any(t is not None for t in tables) or (mask is not None and mask.is_floating_point())
    large = attention.has_large_scores(biased, options.scale, options.softcap)
    return attention.normalises_again(checked.choice, lse, large, is_cuda)


def check_one_nan(case: Case, where: str, compare: Callable[[Tensor, Tensor, str], None]) -> None:
    """Checks that one NaN reaches the elements that it reaches in the formula, and no others.

    Args:
        where: the field of the tensor that gets the NaN, at a query and a key of batch 1 and head 0
            that take part together.
        compare: compares the other elements, with the NaN and without: (actual, expected, name).
    """
    taking_part = pairs(case)[1, 0].nonzero()
    i, j = taking_part[len(taking_part) // 2].tolist()
    x = getattr(case, where).clone()
    place = {"key": (1, 0, j, 4), "value": (1, 0, j, 4), "attn_mask": (1, 0, i, j)}
    x[place.get(where, (1, 0, i, 4) if x.dim() == 4 else (1, 0, i))] = float("nan")
    poisoned = dataclasses.replace(case, **{where: x})
    clean, actual = run(case), run(poisoned)
    with trifuse.backend("eager"):
        expected = run(poisoned.double())
    assert any(r.isnan().any() for r in expected)
    for name, a, c, e in zip(Results._fields, actual, clean, expected, strict=True):
        if e is None:  # the case has no such tensor
            continue
        assert torch.equal(a.isnan(), e.isnan()), name
        compare(a[~e.isnan()], c[~e.isnan()], name)


# Random calls -----------------------------------------------------------------------------------

# The edges of every tile size that a kernel may use.
_EDGES = (0, 1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129)
_WIDE_HEADS = (96, 100, 127, 128, 192, 256)
_MASKS = ("none", "bool", "float", "float -inf", "lowest")


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    """Draws any call; Hypothesis can vary and simplify it."""
    return draw_case(draw(st.randoms(use_true_random=False)), dtype)


def draw_case(random: Random, dtype: torch.dtype) -> Case:
    """Draws any call of the operator: sizes, layouts, masks, options, standard normal numbers."""

    def length() -> int:
        return random.choice(_EDGES) if random.random() < 0.5 else random.randint(0, 150)

    def head_dim() -> int:
        return random.choice(_WIDE_HEADS) if random.random() < 0.2 else random.randint(1, 80)

    def side(longest: int) -> int | None:
        return None if random.random() < 0.3 else random.randint(0, longest)

    B, Hkv, groups = random.randint(1, 3), random.randint(1, 2), random.randint(1, 3)
    H, Lq, Lk, E = Hkv * groups, length(), length(), head_dim()
    Ev = E if random.random() < 0.5 else head_dim()
    generator = torch.Generator().manual_seed(random.getrandbits(32))

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return lay_out(x, random.choice(LAYOUTS))

    options: dict[str, Any] = {"enable_gqa": groups > 1}
    options["is_causal"] = random.choice((False, False, True, *CausalVariant))
    longest = max(Lq, Lk)
    windows = (None, None, side(longest), (side(longest), side(longest)))
    options["window"] = random.choice(windows)
    options["scale"] = random.choice((None, None, 0.5, 0.0, -0.3, 4 / math.sqrt(E)))
    options["softcap"] = random.choice((None, None, 0.7, 5.0, 50.0))
    if random.random() < 0.5:
        options["key_lengths"] = torch.tensor(
            [random.randint(0, Lk) for _ in range(B)],
            dtype=random.choice((torch.int32, torch.int64)),
        )
    if random.random() < 0.5:
        options["dropout_p"] = random.choice((0.1, 0.5, 0.9))
    # These options have their own generator, seeded by the sizes, so that they change nothing else
    # in the case of a seed.
    apart, sinks = Random(str((B, H, Lq, E))), None
    if apart.random() < 0.4:
        sinks_dtype = dtype if apart.random() < 0.5 else _accumulation(torch.empty(0, dtype=dtype))
        sinks = apart.choice((0.3, 1.0, 5.0)) * normal(1, 1, H, dtype=sinks_dtype)[0, 0]
    relative_bias = _draw_relative_bias(apart, B, H, max(Lq + Lk - 1, 0), dtype)
    drawn = {"relative_bias": relative_bias}
    if options["is_causal"] is not CausalVariant.LOWER_RIGHT and apart.random() < 0.4:
        options["diagonal"] = _draw_diagonal(apart, B, Lq, Lk, relative_bias)
    if apart.random() < 0.3:
        drawn = _draw_tables(apart, B, H, Lq, Lk, dtype)
    query = normal(B, H, Lq, E)
    kind = random.choice(_MASKS)
    grad_lse = None
    # In a row of lowest numbers, torch's derivative of the logsumexp is 1 for every key instead of
    # the key's share, so nothing can be compared with it.
    if kind != "lowest" and random.random() < 0.5:
        grad_lse = normal(B, H, Lq, 1, dtype=_accumulation(query))[..., 0]
    return Case(
        query=query,
        key=normal(B, Hkv, Lk, E),
        value=normal(B, Hkv, Lk, Ev),
        attn_mask=_draw_mask(random, kind, (B, H, Lq, Lk), dtype, generator),
        grad_out=normal(B, H, Lq, Ev),
        grad_lse=grad_lse,
        options=options,
        sinks=sinks,
        **drawn,
    )


def draw_decoding_case(random: Random, dtype: torch.dtype, longest: int) -> Case:
    """Draws a call that the CUDA kernel for decoding serves: few queries, 129 to ``longest`` keys,
    and no dropout."""
    group, B, Hkv = random.choice((1, 1, 2, 4, 5, 8)), random.randint(1, 3), random.randint(1, 2)
    Lq = 1 if random.random() < 0.5 else random.randint(1, 16 // group)
    Lk, H = random.randint(129, longest), group * Hkv
    E, Ev = (random.choice((64, 128, 8 * random.randint(1, 20))) for _ in range(2))
    Ev = E if random.random() < 0.6 else Ev

    def side() -> int | None:
        return None if random.random() < 0.3 else random.randint(0, Lk)

    options: dict[str, Any] = {}
    options["is_causal"] = random.choice((False, False, CausalVariant.LOWER_RIGHT))
    if random.random() < 0.3:
        options["window"] = (side(), side())
    options["scale"] = random.choice((None, None, 0.0, 0.2, -0.1))
    options["softcap"] = random.choice((None, None, 0.7, 50.0))
    if random.random() < 0.5:
        options["key_lengths"] = torch.tensor([random.randint(0, Lk) for _ in range(B)])
    if options["is_causal"] is False and random.random() < 0.4:
        options["diagonal"] = torch.tensor([random.randint(-Lq, Lk) for _ in range(B)])
    seed, mask, relative_bias = random.getrandbits(32), None, None
    if random.random() < 0.5:
        heads = 1 if Lq > 1 and group > 1 else random.choice((1, H))
        queries = 1 if group > 1 else random.choice((1, Lq))
        mask = normal(random.choice((1, B)), heads, queries, Lk, seed=seed)
        keep = normal(*mask.shape, seed=seed + 1) < random.choice((-1.0, 0.0, 1.5))
        left_out = mask.masked_fill(~keep, float("-inf"))
        mask = random.choice((keep, mask, left_out, left_out.to(dtype)))
    if (Lq == 1 or group == 1) and random.random() < 0.5:
        relative_bias = normal(B, random.choice((1, H)), Lq + Lk - 1, seed=seed)
    case = make(
        B, H, Lq, Lk, E, Ev, Hkv=Hkv, mask=mask, relative_bias=relative_bias, dtype=dtype, **options
    )
    if random.random() < 0.5:
        return case
    fields = {f: lay_out(getattr(case, f), "transposed") for f in ("query", "key", "value")}
    return dataclasses.replace(case, **fields)


def _draw_relative_bias(
    random: Random, B: int, H: int, length: int, dtype: torch.dtype
) -> Tensor | None:
    if random.random() < 0.6:
        return None
    return _draw_table(random, (random.choice((1, B)), random.choice((1, H)), length), dtype)


def _draw_tables(
    random: Random, B: int, H: int, Lq: int, Lk: int, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """Draws tables that are read by an index, and the index."""
    n = random.choice((1, 2, 9, 40, 300))
    by_distance = random.random() < 0.5
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    shape = (max(Lq + Lk - 1, 0),) if by_distance else (Lq, Lk)
    index = torch.randint(n, shape, generator=generator).to(
        random.choice((torch.int32, torch.int64))
    )
    shapes = {
        "relative_bias": (random.choice((1, B)), random.choice((1, H)), n),
        "query_bias": (B, H, Lq, n),
        "key_bias": (B, H, Lk, n),
    }
    names = random.choice(([*shapes], [*shapes][1:], *([name] for name in shapes)))
    given = {name: _draw_table(random, shapes[name], dtype) for name in names}
    if random.random() < 0.3 and not by_distance:
        index = index.mT.contiguous().mT
    return {**given, "relative_index": index}


def _draw_table(random: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    wide = _accumulation(torch.empty(0, dtype=dtype))
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    bias = random.choice((0.3, 1.0, 5.0)) * torch.randn(shape, generator=generator)
    if random.random() < 0.3:
        bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.2, float("-inf"))
    return lay_out(bias.to(random.choice((dtype, wide))), random.choice(LAYOUTS))


def _draw_diagonal(
    random: Random, B: int, Lq: int, Lk: int, relative_bias: Tensor | None
) -> int | Tensor:
    offsets = [random.randint(-Lq, Lk) for _ in range(B)]
    if random.random() < 0.4 or (relative_bias is not None and len(relative_bias) != B):
        return offsets[0]
    return torch.tensor(offsets, dtype=random.choice((torch.int32, torch.int64)))


def _draw_mask(
    random: Random,
    kind: str,
    full: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor | None:
    """Draws a mask of this kind in any layout; each dimension is full or 1."""
    if kind == "none":
        return None
    shape = [random.choice((1, size)) for size in full]
    layout = random.choice((*LAYOUTS, "columns first"))
    keep = torch.rand(shape, generator=generator) < random.choice((0.1, 0.5, 0.95))
    if kind == "bool":
        mask = keep
    else:
        dtype = random.choice((dtype, torch.float32))
        mask = torch.randn(shape, generator=generator).to(dtype)
        if kind == "float -inf":
            mask = mask.masked_fill(~keep, float("-inf"))
        elif kind == "lowest":
            mask = mask.masked_fill(~keep, torch.finfo(dtype).min)
    if layout == "columns first":
        return mask.mT.contiguous().mT
    return lay_out(mask, layout)
