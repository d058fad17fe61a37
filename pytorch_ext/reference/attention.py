r"""Masked scaled dot-product attention, forward and backward, as mathematics.

Vaswani et al., "Attention Is All You Need" (2017), equation 1, with a mask and dropout. For one
head, with M the pairs (i, j) that take part, b the float mask and D the dropout multiplier (0 where
a weight is dropped, 1/(1-p) where it is kept):

    S_ij   = scale · q_i·k_j + b_ij                  for (i, j) in M, else -∞
    lse_i  = log ∑_j exp S_ij
    P_ij   = exp(S_ij - lse_i)
    O_i    = ∑_j D_ij P_ij v_j

and, for upstream gradients dO and dlse:

    dV_j   = ∑_i D_ij P_ij dO_i
    dP_ij  = D_ij dO_i·v_j
    dS_ij  = P_ij (dP_ij - ∑_j P_ij dP_ij + dlse_i)
    dQ_i   = scale ∑_j dS_ij k_j,   dK_j = scale ∑_i dS_ij q_i,   db = dS

With a cap c ("Gemma 2", 2024), S_ij = c tanh(scale · q_i·k_j / c) + b_ij, and dS_ij is multiplied
by the slope 1 - tanh²(scale · q_i·k_j / c) in dQ and dK, but not in db.

A relative bias is a float mask b_ij = t(j - i), a table of numbers by distance, added to any other
mask. The gradient of a number of the table is the sum of dS along one diagonal. With an index c,
which selects the column that a pair reads, it is b_ij = t(c_ij), as in Swin (Liu et al., 2021). Two
more tables may then be added, b_ij = u_i(c_ij) + w_j(c_ij), one for every query and one for every
key. These are DeBERTa's disentangled terms (He et al., 2021), with u_i = q_i·K'ᵀ and w_j = k_j·Q'ᵀ
of the embeddings of distances. The gradient of a number is the sum of dS over the pairs that read
it.

Sums run over pairs in M only. This settles two cases that 0 · x leaves open: a row with no pair
gives O = 0, lse = -∞ and no gradient, and a NaN or Inf in a key, value or query reaches only the
rows that it is paired with. Everything that it reaches becomes NaN, except scores. As in any
softmax, S_ij = -∞ for a pair in M gives P_ij = 0. A row whose scores are all -∞, or that has a
score of +∞, is NaN, and so is its lse.

Every backend is tested against this file in float64. 16-bit inputs are computed in float32. The
code stores whole (Lq, Lk) matrices: it is meant to be readable and correct, not fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trifuse.reference import philox
from trifuse.reference.results import accumulation_dtype

# Offsets of a diagonal beyond this are limited to it. With bounds of up to half of it, all such
# offsets leave out the same pairs, and sums with positions do not overflow.
FARTHEST = 1 << 61

# Beyond this magnitude a float32 logsumexp is too coarse to normalise scores. Near the lowest
# finite number, a common value in float masks, log ∑ exp is lost in it completely.
COARSE_LOGSUMEXP = 1024.0

# Beyond this scale a float32 score may have no bits left for the logarithm of a sum, and rounding
# its product with log2 e may change it by more than 1.
LARGE_SCALE = 2.0**20


class _Weights(NamedTuple):
    keep: Tensor  # bool (B, H, Lq, Lk): the set M
    probability: Tensor  # (B, H, Lq, Lk): P
    multiplier: Tensor | None  # (B, H, Lq, Lk): D
    logsumexp: Tensor  # (B, H, Lq)
    slope: Tensor | None  # (B, H, Lq, Lk): the derivative of the cap


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    relative_bias: Tensor | None,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    relative_index: Tensor | None,
    key_lengths: Tensor | None,
    diagonal: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    softcap: float | None,
    window_left: int | None,
    window_right: int | None,
    lower_right: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Computes the output and the logsumexp.

    Args:
        query: (B, H, Lq, E). With ``cu_seqlens_q``, (1, H, total, E), the sequences end to end.
        key: (B, Hkv, Lk, E), H a multiple of Hkv; head h attends to key head h // (H / Hkv).
        value: (B, Hkv, Lk, Ev).
        attn_mask: bool (True takes part) or float (added); every dimension of (B, H, Lq, Lk) is
            full or 1. With ``cu_seqlens_q``, B counts sequences and Lq, Lk are the ``max_seqlen``.
        relative_bias: float (B, H, Lq + Lk - 1), B and H full or 1; its last dimension is the
            distance j - d(i) of a key from the query's place, from the smallest one on. Added to
            the scores; -∞ leaves pairs out. With ``cu_seqlens_q``, B, Lq and Lk as for the mask,
            and the smallest distance is 1 - Lq - n_b or, with ``lower_right``, 1 - Lk - n_b. With
            ``relative_index``, (B, H, n) of any n.
        query_bias: float (B, H, Lq, n) or, packed, (1, H, total, n): each query's own table.
        key_bias: float (B, H, Lk, n), each key's own table.
        relative_index: integers in [0, n), the column of these tables that a pair reads: (Lq, Lk),
            or (Lq + Lk - 1,) by distance, as ``relative_bias`` without it. With ``cu_seqlens_q``,
            Lq and Lk as for the mask.
        key_lengths: integers (B,); keys at or past the length take no part.
        diagonal: integers (B,): n_b, how far each sequence's diagonal is moved; None means 0.
        cu_seqlens_q, cu_seqlens_k: integers (sequences + 1,), where each sequence begins; tokens
            past the last boundary belong to no sequence.
        seed: int64, keys the dropout; a place may follow it (``philox.Place``).
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths of packed sequences. They affect the
            results only in that they decide which element of a table belongs to a distance.
        scale: multiplies q·k; None means 1/√E.
        softcap: c; None means that scores are not capped.
        window_left, window_right: query i attends to keys from ``d(i) - left`` to ``d(i) + right``;
            None means no bound. Causal attention is ``window_right = 0``. A negative bound leaves
            out the diagonal.
        lower_right: the diagonal is d(i) = i + n_b + Lk - Lq instead of d(i) = i + n_b.
        dropout_p: the probability of dropping a weight.

    Returns:
        (B, H, Lq, Ev) in the query's dtype, and (B, H, Lq) in float32, or float64 for float64.
    """
    wide = accumulation_dtype(query.dtype)
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    tables = _Tables(relative_bias, query_bias, key_bias, relative_index)
    outs, logsumexps = [], []
    for part in _sequences(query, key, cu_seqlens_q, cu_seqlens_k):
        q, k = query[part.query], _grouped(key, query)[part.key]
        v = _grouped(value, query)[part.key]
        weights = _weights(
            q,
            k,
            part.mask(attn_mask),
            part.biases(tables, max_seqlen_q, max_seqlen_k, lower_right),
            key_lengths,
            part.diagonal(diagonal),
            seed,
            scale,
            softcap,
            window_left,
            window_right,
            lower_right,
            dropout_p,
            part.number,
        )
        dropped = _multiply(weights.probability, weights.multiplier)
        outs.append(_matmul_over_pairs(dropped, weights.keep, v.to(wide)))
        logsumexps.append(weights.logsumexp)
    return (
        _join(outs, (*query.shape[:-1], value.shape[-1]), query),
        _join(logsumexps, query.shape[:-1], query.new_empty(0, dtype=wide), float("-inf")),
    )


def attention_backward(
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    relative_bias: Tensor | None,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    relative_index: Tensor | None,
    key_lengths: Tensor | None,
    diagonal: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seed: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    softcap: float | None,
    window_left: int | None,
    window_right: int | None,
    lower_right: bool,
    dropout_p: float,
    mask_requires_grad: bool,
    relative_bias_requires_grad: bool,
    query_bias_requires_grad: bool,
    key_bias_requires_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Computes gradients for query, key, value and, if requested, the float mask and the tables.

    The weights are computed again from the inputs rather than taken from the forward, so that this
    function can itself be differentiated. Every backend uses it for its double backward.

    Args:
        grad_out: (B, H, Lq, Ev).
        grad_logsumexp: (B, H, Lq) or None.
        mask_requires_grad: whether the gradient of ``attn_mask`` is needed.
        relative_bias_requires_grad: whether that of ``relative_bias`` is.
        query_bias_requires_grad: whether that of ``query_bias`` is.
        key_bias_requires_grad: whether that of ``key_bias`` is.
        others: as in :func:`attention`.

    Returns:
        Tensors shaped and typed like query, key, value, ``attn_mask`` (or None),
        ``relative_bias`` (or None), ``query_bias`` (or None) and ``key_bias`` (or None).
    """
    wide = accumulation_dtype(query.dtype)
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    kv_heads, groups = key.shape[1], query.shape[1] // max(key.shape[1], 1)
    tables = _Tables(relative_bias, query_bias, key_bias, relative_index)
    parts_q, parts_k, parts_v, parts_mask, parts_bias = [], [], [], [], []
    parts_query_bias, parts_key_bias = [], []
    for part in _sequences(query, key, cu_seqlens_q, cu_seqlens_k):
        q, do = query[part.query].to(wide), grad_out[part.query].to(wide)
        k = _grouped(key, query)[part.key].to(wide)
        v = _grouped(value, query)[part.key].to(wide)
        mask = part.mask(attn_mask)
        biases = part.biases(tables, max_seqlen_q, max_seqlen_k, lower_right)
        keep, probability, multiplier, _, slope = _weights(
            q,
            k,
            mask,
            biases,
            key_lengths,
            part.diagonal(diagonal),
            seed,
            scale,
            softcap,
            window_left,
            window_right,
            lower_right,
            dropout_p,
            part.number,
        )
        grad_p = _multiply(_pair_products(do, v).masked_fill(~keep, 0), multiplier)
        inner = grad_p - (probability * grad_p).sum(-1, keepdim=True)
        if grad_logsumexp is not None:
            inner = inner + grad_logsumexp[part.row][..., None]
        inner = inner.masked_fill(inner.isinf(), float("nan"))
        grad_s = (probability * inner).masked_fill(~keep, 0)
        dropped = _multiply(probability, multiplier)
        if multiplier is not None:  # a dropped weight adds nothing, even if it is NaN
            dropped = dropped.masked_fill(multiplier == 0, 0)

        grad_qk = _multiply(grad_s, slope)
        parts_q.append(scale * _matmul_over_pairs(grad_qk, keep, k))
        grad_k = scale * _matmul_over_pairs(grad_qk.mT, keep.mT, q)
        grad_v = _matmul_over_pairs(dropped.mT, keep.mT, do)
        parts_k.append(grad_k.unflatten(1, (kv_heads, groups)).sum(2) if groups != 1 else grad_k)
        parts_v.append(grad_v.unflatten(1, (kv_heads, groups)).sum(2) if groups != 1 else grad_v)
        if mask_requires_grad:
            assert mask is not None
            parts_mask.append(_pad_like(grad_s.sum_to_size(mask.shape), attn_mask))
        if relative_bias_requires_grad:
            assert relative_bias is not None
            if biases.column is not None:
                pairs, columns = biases.column.flatten(), relative_bias.shape[2]
                sums = _sum_columns(grad_s.flatten(2), pairs, columns)
            else:
                first, count = part.distances(
                    relative_bias, max_seqlen_q, max_seqlen_k, lower_right
                )
                ends = (first, relative_bias.shape[2] - first - count)
                sums = torch.nn.functional.pad(sum_diagonals(grad_s), ends)
            size = (1 if part.lengths else relative_bias.shape[0], *relative_bias.shape[1:])
            parts_bias.append(sums.sum_to_size(size))
        if query_bias_requires_grad:
            assert query_bias is not None
            assert biases.column is not None
            parts_query_bias.append(_sum_columns(grad_s, biases.column, query_bias.shape[3]))
        if key_bias_requires_grad:
            assert key_bias is not None
            assert biases.column is not None
            parts_key_bias.append(_sum_columns(grad_s.mT, biases.column.mT, key_bias.shape[3]))

    grad_mask = grad_bias = None
    if mask_requires_grad:
        assert attn_mask is not None
        grad_mask = _join_masks(parts_mask, attn_mask, wide)
    if relative_bias_requires_grad:
        assert relative_bias is not None
        grad_bias = _join_masks(parts_bias, relative_bias, wide)
    grad_query_bias = grad_key_bias = None
    if query_bias_requires_grad:
        assert query_bias is not None
        grad_query_bias = _join(parts_query_bias, query_bias.shape, query_bias)
    if key_bias_requires_grad:
        assert key_bias is not None
        grad_key_bias = _join(parts_key_bias, key_bias.shape, key_bias)
    return (
        _join(parts_q, query.shape, query),
        _join(parts_k, key.shape, key),
        _join(parts_v, value.shape, value),
        grad_mask,
        grad_bias,
        grad_query_bias,
        grad_key_bias,
    )


def _weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    biases: _Tables,
    key_lengths: Tensor | None,
    diagonal: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    window_left: int | None,
    window_right: int | None,
    lower_right: bool,
    dropout_p: float,
    first_batch: int,
) -> _Weights:
    wide = accumulation_dtype(query.dtype)
    (B, H, Lq), Lk, device = query.shape[:3], key.shape[2], query.device

    row, column = torch.arange(Lq, device=device)[:, None], torch.arange(Lk, device=device)
    distance = column - row - (Lk - Lq if lower_right else 0)
    if diagonal is not None:
        distance = distance - diagonal.long().clamp(-FARTHEST, FARTHEST)[:, None, None, None]
    keep = torch.ones(B, H, Lq, Lk, dtype=torch.bool, device=device)
    if window_left is not None:
        keep = keep & (distance >= -window_left)
    if window_right is not None:
        keep = keep & (distance <= window_right)
    if key_lengths is not None:
        keep = keep & (column < key_lengths[:, None, None, None])

    scores = scale * _scores(query.to(wide), key.to(wide))
    slope = None
    if softcap is not None:
        tanh = torch.tanh(scores / softcap)
        scores, slope = softcap * tanh, 1 - tanh.square()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = keep & attn_mask
    elif attn_mask is not None:
        keep = keep & (attn_mask != float("-inf"))
        scores = scores + attn_mask.to(wide)
    for bias in biases.of_pairs(Lq, Lk):
        keep = keep & (bias != float("-inf"))
        scores = scores + bias.to(wide)
    scores = scores.masked_fill(~keep, float("-inf"))
    if slope is not None:
        slope = slope.masked_fill(~keep, 0)  # 0 · NaN is NaN

    # The maximum only shifts the exponent, so no gradient goes through it. A row without a pair has
    # no maximum and a sum of 0, which 0 and 1 replace.
    empty = ~keep.any(-1, keepdim=True)
    row_max = scores.detach().amax(-1, keepdim=True) if Lk else scores.new_zeros(B, H, Lq, 1)
    exp_scores = torch.exp(scores - row_max.masked_fill(empty, 0))
    row_sum = exp_scores.sum(-1, keepdim=True).masked_fill(empty, 1)
    logsumexp = (row_sum.log() + row_max).masked_fill(empty, float("-inf")).squeeze(-1)

    multiplier = None
    if dropout_p > 0:
        assert seed is not None
        batch = torch.arange(first_batch, first_batch + B, device=device)
        plane = batch[:, None] * H + torch.arange(H, device=device)
        kept = _kept(seed, plane, Lq, Lk, dropout_p)
        multiplier = kept.to(wide) * philox.keep_scale(dropout_p)
    # Pairs that are left out have weight 0 even in a row that is NaN.
    probability = (exp_scores / row_sum).masked_fill(~keep, 0)
    return _Weights(keep, probability, multiplier, logsumexp, slope)


def _kept(seed: Tensor, plane: Tensor, Lq: int, Lk: int, dropout_p: float) -> Tensor:
    """Returns which weights of the heads' matrices dropout keeps, (*plane.shape, Lq, Lk)."""
    if not philox.is_placed(seed):
        return philox.dropout_keep(seed, plane, Lq, Lk, dropout_p)
    place = philox.Place(*seed[1:].unbind())  # type: ignore[arg-type]
    rows = torch.arange(Lq, device=seed.device) + place.row
    plane = philox.placed_units(seed, plane)
    return philox.dropout_keep(seed, plane, rows, Lk, dropout_p, place.column)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Returns ``query @ key.mT``, infinities included; an infinite product has no derivative."""
    products = query.detach() @ key.detach().mT
    return torch.where(products.isinf(), products, _pair_products(query, key))


def _pair_products(rows: Tensor, columns: Tensor) -> Tensor:
    """Returns ``rows @ columns.mT``, with NaN for all pairs of a non-finite row or column.

    With the plain product, pairs that the caller masks afterwards would still reach the derivative,
    as 0 · NaN.
    """
    finite_row = rows.isfinite().all(-1, keepdim=True)
    finite_column = columns.isfinite().all(-1, keepdim=True)
    product = rows.masked_fill(~finite_row, 0) @ columns.masked_fill(~finite_column, 0).mT
    return product.masked_fill(~(finite_row & finite_column.mT), float("nan"))


def _matmul_over_pairs(weights: Tensor, keep: Tensor, rows: Tensor) -> Tensor:
    """Returns ``weights @ rows``, summed over kept pairs only, so that 0 · NaN never enters.

    A sum over kept pairs that includes a non-finite element of ``rows`` becomes NaN.
    """
    finite = rows.isfinite()
    product = weights @ rows.masked_fill(~finite, 0)
    reached = keep.to(rows.dtype) @ (~finite).to(rows.dtype)
    return product.masked_fill(reached > 0, float("nan"))


def _sum_columns(grad_s: Tensor, index: Tensor, columns: int) -> Tensor:
    """Returns the gradient of a table with ``columns`` columns: sums of (..., pairs) by column.

    ``index`` has the column of each pair, and broadcasts.
    """
    sums = grad_s.new_zeros((*grad_s.shape[:-1], columns))
    return sums.scatter_add(-1, index.expand_as(grad_s), grad_s)


def _multiply(weights: Tensor, multiplier: Tensor | None) -> Tensor:
    return weights if multiplier is None else weights * multiplier


def _grouped(kv: Tensor, query: Tensor) -> Tensor:
    """Repeats key or value heads for the query heads that share them."""
    groups = query.shape[1] // max(kv.shape[1], 1)
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


class _Tables(NamedTuple):
    """Biases of pairs as tables, for one sequence or a padded batch."""

    relative: Tensor | None  # (B, H, Lq + Lk - 1) or, with an index, (B, H, n)
    query: Tensor | None  # (B, H, Lq, n)
    key: Tensor | None  # (B, H, Lk, n)
    column: Tensor | None  # int64 (Lq, Lk), the index

    def of_pairs(self, Lq: int, Lk: int) -> Iterator[Tensor]:
        """Yields each table's biases of all pairs, (B, H, Lq, Lk), B and H full or 1."""
        index = self.column
        if self.relative is not None:
            places = _by_distance(self.relative, Lq, Lk) if index is None else index
            yield self.relative[:, :, places]
        if self.query is not None and index is not None:
            yield self.query.gather(3, index.expand(*self.query.shape[:3], Lk))
        if self.key is not None and index is not None:
            yield self.key.gather(3, index.mT.expand(*self.key.shape[:3], Lq)).mT


def _by_distance(like: Tensor, Lq: int, Lk: int) -> Tensor:
    """Returns the place of a pair's distance among all distances, (Lq, Lk)."""
    row, column = (torch.arange(length, device=like.device) for length in (Lq, Lk))
    return column - row[:, None] + (Lq - 1)


class _Sequence(NamedTuple):
    """The place of one sequence, or of a whole padded batch, in the tensors."""

    number: int  # the first sequence's index, b in the dropout counter
    query: tuple[slice, ...]
    key: tuple[slice, ...]
    row: tuple[slice, ...]
    lengths: tuple[int, int] | None

    def mask(self, attn_mask: Tensor | None) -> Tensor | None:
        if attn_mask is None or self.lengths is None:
            return attn_mask
        if attn_mask.shape[0] != 1:
            attn_mask = attn_mask[self.number : self.number + 1]
        rows, columns = self.lengths
        attn_mask = attn_mask if attn_mask.shape[2] == 1 else attn_mask[:, :, :rows]
        return attn_mask if attn_mask.shape[3] == 1 else attn_mask[:, :, :, :columns]

    def diagonal(self, diagonal: Tensor | None) -> Tensor | None:
        if diagonal is None or self.lengths is None:
            return diagonal
        return diagonal[self.number : self.number + 1]

    def distances(
        self, table: Tensor, max_seqlen_q: int, max_seqlen_k: int, lower_right: bool
    ) -> tuple[int, int]:
        """Returns the first distance in a table (..., n) that occurs in this sequence, and the
        number of such distances."""
        n = table.shape[-1]
        if self.lengths is None:
            return 0, n
        rows, columns = self.lengths
        # The smallest distance is 1 - Lq or, from the lower right diagonal, 1 - Lk.
        first = max_seqlen_k - columns if lower_right else max_seqlen_q - rows
        count = max(rows + columns - 1, 0)
        return min(first, n - count), count

    def biases(
        self, tables: _Tables, max_seqlen_q: int, max_seqlen_k: int, lower_right: bool
    ) -> _Tables:
        """Returns the parts of the tables for this sequence."""
        relative, query, key, index = tables
        longest = (max_seqlen_q, max_seqlen_k, lower_right)
        rows, columns = self.lengths or (max_seqlen_q, max_seqlen_k)
        if relative is not None and self.lengths is not None:
            if relative.shape[0] != 1:
                relative = relative[self.number : self.number + 1]
            if index is None:
                relative = relative.narrow(2, *self.distances(relative, *longest))
        if index is not None and index.dim() == 1:
            own = index.narrow(0, *self.distances(index, *longest))
            index = own[_by_distance(own, rows, columns)]
        elif index is not None:
            index = index[:rows, :columns]
        return _Tables(
            relative,
            None if query is None else query[self.query],
            None if key is None else key[self.key],
            None if index is None else index.long(),
        )


def _sequences(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> Iterator[_Sequence]:
    everything = (slice(None),)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        yield _Sequence(0, everything, everything, everything, None)
        return
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    head = (slice(None), slice(None))
    for b in range(len(starts_q) - 1):
        q = slice(starts_q[b], starts_q[b + 1])
        k = slice(starts_k[b], starts_k[b + 1])
        lengths = (q.stop - q.start, k.stop - k.start)
        yield _Sequence(b, (*head, q), (*head, k), (*head, q), lengths)


def _join(parts: list[Tensor], shape: Sequence[int], like: Tensor, fill: float = 0.0) -> Tensor:
    """Joins parts into (B, H, L, ...), with ``fill`` for tokens that belong to no sequence."""
    B, H, L, *rest = shape
    missing = like.new_full((B, H, L - sum(part.shape[2] for part in parts), *rest), fill)
    return torch.cat([*(part.to(like.dtype) for part in parts), missing], 2)


def _pad_like(grad: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Pads a sequence's mask gradient with 0 to the mask's last two dimensions."""
    assert attn_mask is not None
    rows, columns = (attn_mask.shape[d] - grad.shape[d] for d in (2, 3))
    return torch.nn.functional.pad(grad, (0, columns, 0, rows))


def _join_masks(parts: list[Tensor], mask: Tensor, wide: torch.dtype) -> Tensor:
    """Joins the gradients of a mask from all sequences, and sums what they share."""
    stacked = torch.cat([*parts, mask.new_zeros((0, *mask.shape[1:]))])
    return stacked.to(wide).sum_to_size(mask.shape).to(mask.dtype)


def sum_diagonals(x: Tensor) -> Tensor:
    """Sums (..., Lq, Lk) along its diagonals: element j - i + Lq - 1 is the sum over all x_ij."""
    Lq, Lk = x.shape[-2:]
    if Lq == 0 or Lk == 0:
        return x.new_zeros((*x.shape[:-2], max(Lq + Lk - 1, 0)))
    # Cutting the padded matrix into shorter rows shifts each row by one more element.
    padded = torch.nn.functional.pad(x.flip(-2), (0, Lq)).flatten(-2)
    return padded[..., :-Lq].unflatten(-1, (Lq, Lq + Lk - 1)).sum(-2)
