"""Masked scaled dot-product attention: argument checks, choice of backend, registration."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard, overload

import torch
from torch import Tensor
from torch.nn import functional

from trifuse import backends
from trifuse.ops import _checks, _draws, _explained, _fast_path, _modes, _operator
from trifuse.ops._alibi import alibi_bias
from trifuse.ops._checks import fail
from trifuse.ops._sinks import join_sinks
from trifuse.reference import attention as reference
from trifuse.reference.results import accumulation_dtype, empty_like_layout

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias, CausalVariant


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | CausalVariant = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    diagonal: int | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    relative_index: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | CausalVariant = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    diagonal: int | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    relative_index: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | CausalVariant = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    diagonal: int | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    relative_index: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""softmax(scale · Q Kᵀ + mask) V, with masks, dropout and gradients fused.

    Vaswani et al., "Attention Is All You Need" (2017), equation 1, computed block by block with the
    running softmax of Milakov and Gimelshein (2018), so that no (Lq, Lk) matrix is stored. It is
    ``torch.nn.functional.scaled_dot_product_attention`` with more arguments; the shared ones mean
    the same, and all masks combine.

    Args:
        query: (..., H, Lq, E), float32, bfloat16, float16 or float64. (N, L, E) and (L, E) work
            too.
        key: (..., Hkv, Lk, E). Leading dimensions broadcast with the query's.
        value: (..., Hkv, Lk, Ev).
        attn_mask: broadcastable to (..., H, Lq, Lk), read through its own strides. Boolean: True
            takes part. Floating: added to the scores, -inf leaves the pair out; float32 or the
            query's dtype. ``torch.nn.attention.bias.causal_lower_right(Lq, Lk)`` is accepted, and
            combines with ``is_causal`` as the equivalent dense mask does.
        dropout_p: probability of dropping an attention weight, in [0, 1], with a resolution of
            2⁻¹⁶. Always applied: pass 0 in evaluation. Drawn from torch's default generator for the
            device; the same seed drops the same weights on every backend.
        is_causal: query i attends to keys up to i. ``CausalVariant.LOWER_RIGHT`` puts the diagonal
            at i + Lk - Lq instead.
        scale: multiplies q·k. Default: 1/√E.
        enable_gqa: let H be a multiple of Hkv; consecutive query heads share a key head.
        key_lengths: int32 or int64 (B,), B the flattened leading dimensions before the heads. Keys
            at or past their sequence's length take no part and are never read.
        window: query i attends to keys within ``left`` before and ``right`` after the diagonal. One
            number sets both; None sets no bound. The window moves with the diagonal of
            ``is_causal`` or, if that is False, of a causal ``attn_mask``.
        diagonal: moves the diagonal of ``is_causal`` and ``window`` from key i to key i +
            ``diagonal``, as if query i were at position i + ``diagonal`` of its sequence. An int,
            or int32 or int64 (B,), one for each sequence: with ``key_lengths - Lq`` each sequence's
            last query is aligned with its last key. Not beside a lower right diagonal or a causal
            bias as ``attn_mask``, which have their own.
        softcap: c > 0; caps scaled scores s to c · tanh(s / c), before a float mask is added
            (Gemma Team, "Gemma 2", 2024).
        sinks: (H,), one more score in each row of a head, without a value. It takes its share of
            the softmax and adds nothing to the output (OpenAI, "gpt-oss" model card, 2025). -inf is
            no sink. float32 or the query's dtype. The output is scaled after the kernel.
        relative_bias: biases by distance, added to the scores: (n,), (H, n) or (B, H, n) with n =
            Lq + Lk - 1, and B and H full or 1. The first element is for the smallest distance: key
            j and query i use element j - i + Lq - 1. Distances are counted from the diagonal of
            ``is_causal`` and ``diagonal``. So the first distance is 1 - Lq, or 1 - Lk from a lower
            right diagonal, or 1 - Lq - ``diagonal``. If ``diagonal`` is a tensor, B is full,
            because each sequence has its own distances. -inf leaves pairs out. float32 or the
            query's dtype. Its gradient takes no (Lq, Lk) memory (T5's buckets: Raffel et al.,
            2020). With ``relative_index`` it is a table of any n instead.
        query_bias: (B, H, Lq, n), a table of each query: adds ``query_bias[b, h, i, c]`` to the
            score of a pair whose index is c, after ``scale`` and ``softcap``, like a float mask.
            DeBERTa's content-to-position term: scale · q_i · K'ᵀ, K' the n embeddings of distances
            as keys (He et al., "DeBERTa", 2021). dtype and -inf as in ``relative_bias``. Its
            gradient has its size. Needs ``relative_index``.
        key_bias: (B, H, Lk, n), a table of each key: adds ``key_bias[b, h, j, c]``. DeBERTa's
            position-to-content term, scale · k_j · Q'ᵀ. Otherwise as ``query_bias``.
        relative_index: int32 or int64, the column, among n, of ``relative_bias``, ``query_bias``
            and ``key_bias`` that a pair reads: (Lq, Lk), such as Swin's ``relative_position_index``
            (Liu et al., 2021), or (Lq + Lk - 1,) by distance, in the order of ``relative_bias``
            without an index. All heads and sequences share it. The tables are read inside the
            kernels, and their gradients are summed in a fixed order. A number outside [0, n) raises
            on a CPU, and asserts on a GPU. Not beside ``alibi_slopes``. The CUDA C++ kernels take
            no index.
        alibi_slopes: (H,) or (B, H), m ≥ 0; adds -m times the absolute distance to the scores
            (Press et al., "ALiBi", 2022), with distances as in ``relative_bias``. float32 or the
            query's dtype.
        return_lse: also return the logsumexp of each row's scores, differentiable. It includes the
            sink.

    Returns:
        (..., H, Lq, Ev) in the query's dtype, in the query's memory order. With ``return_lse`` also
        (..., H, Lq) in float32 (float64 for float64).

        A row with no key gives 0 and a logsumexp of -inf, or of its sink. A NaN or Inf in a pair
        left out by a mask reaches neither outputs nor gradients.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that doesn't fit the others.
        ValueError: a shape, device, range or value that doesn't fit (``trifuse.ArgumentError``).
        RuntimeError: the backend asked for by name can't serve the call; or torch's context
            parallelism is active, under which a rank holds only a part of every sequence.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 5, 64) for _ in range(3))
        >>> lengths = torch.tensor([5, 3])  # the second sequence has two keys of padding
        >>> scaled_dot_product_attention(query, key, value, key_lengths=lengths).shape
        torch.Size([2, 8, 5, 64])
    """
    fast = _fast_path.extension(dropout_p, _call_on_gpu(query, value, attn_mask))
    tables = (relative_bias, query_bias, key_bias, relative_index, alibi_slopes)
    plain = sinks is None and all(table is None for table in tables)
    if fast is not None and plain and window is None and diagonal is None and softcap is None:
        refuse_context_parallel()
        results: Tensor | tuple[Tensor, Tensor] | None = fast.attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            key_lengths,
            return_lse,
        )
        if results is not None:
            return results
    _checks.flag("return_lse", return_lse)
    call = prepare(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        key_lengths,
        window,
        diagonal,
        softcap,
        sinks,
        relative_bias,
        query_bias,
        key_bias,
        relative_index,
        alibi_slopes,
    )
    out, lse = _run(call)
    if call.batch_shape is not None:
        out = out.reshape(*call.batch_shape, *out.shape[-2:])
        lse = lse.reshape(*call.batch_shape, lse.shape[-1])
    return (out, lse) if return_lse else out


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | CausalVariant = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int | None, int | None] | None = None,
    diagonal: int | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    relative_index: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | CausalVariant = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int | None, int | None] | None = None,
    diagonal: int | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    relative_index: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | CausalVariant = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int | None, int | None] | None = None,
    diagonal: int | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    relative_index: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences packed end to end, without padding.

    Args:
        query: (total_q, H, E), the sequences one after another.
        key: (total_k, Hkv, E).
        value: (total_k, Hkv, Ev).
        cu_seqlens_q: int32 or int64 (N + 1,), where each sequence begins: 0 first, never
            decreasing, at most total_q. Tokens past the last boundary get 0.
        cu_seqlens_k: the same for keys. Default: ``cu_seqlens_q``.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths. With them a GPU launches no more
            blocks than needed. Bounds that are too small raise on a CPU, and assert on a GPU.
        attn_mask: broadcastable to (N, H, max_seqlen_q, max_seqlen_k), indexed by position within
            the sequence.
        relative_bias: as in :func:`scaled_dot_product_attention`, with n = max_seqlen_q +
            max_seqlen_k - 1 and B = N. The first element is for a distance of 1 - max_seqlen_q or,
            with a lower right diagonal, 1 - max_seqlen_k; with ``diagonal`` d, for 1 -
            max_seqlen_q - d. With ``relative_index`` it has any n.
        query_bias: (total_q, H, n), as in :func:`scaled_dot_product_attention`.
        key_bias: (total_k, H, n).
        relative_index: (max_seqlen_q, max_seqlen_k), indexed by position within the sequence, or
            (max_seqlen_q + max_seqlen_k - 1,), in the order of ``relative_bias``.
        diagonal: as in :func:`scaled_dot_product_attention`; a tensor is (N,).
        others: as in :func:`scaled_dot_product_attention`; each sequence has its own diagonal.

    Returns:
        (total_q, H, Ev); with ``return_lse`` also (total_q, H).

    Raises:
        As :func:`scaled_dot_product_attention`.

    Example:
        >>> lengths = torch.tensor([5, 3])
        >>> cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        >>> query, key, value = (torch.randn(int(lengths.sum()), 8, 64) for _ in range(3))
        >>> varlen_attention(query, key, value, cu_seqlens).shape
        torch.Size([8, 8, 64])
    """
    _checks.flag("return_lse", return_lse)
    call = prepare_varlen(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window,
        diagonal,
        softcap,
        sinks,
        relative_bias,
        query_bias,
        key_bias,
        relative_index,
        alibi_slopes,
    )
    out, lse = _run(call)
    out, lse = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    return (out, lse) if return_lse else out


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    """As :func:`varlen_attention`, for (1, H, T, E) tensors and calls that are plain and valid.

    Returns:
        (1, H, T, Ev); None for a call that the fast path does not serve.
    """
    fast = _fast_path.extension(dropout_p, _call_on_gpu(query, value, None))
    if fast is None:
        return None
    refuse_context_parallel()
    out: Tensor | None = fast.packed_attention(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        is_causal,
        scale,
        True,
    )
    return out


# Arguments --------------------------------------------------------------------------------------


class CheckedAttention(NamedTuple):
    """A checked call of the forward op, without the seed."""

    tensors: _Tensors
    options: _Options
    choice: backends.Choice
    batch_shape: tuple[int, ...] | None  # the caller's leading dimensions, if not (B, H)
    sinks: Tensor | None


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool | CausalVariant,
    scale: float | None,
    enable_gqa: bool,
    key_lengths: Tensor | None,
    window: int | tuple[int | None, int | None] | None,
    diagonal: int | Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    relative_index: Tensor | None,
    alibi_slopes: Tensor | None,
    choice: backends.Choice | None = None,
) -> CheckedAttention:
    """Checks the arguments of :func:`scaled_dot_product_attention`.

    Args:
        choice: the backend, if it has been chosen before.
    """
    query, key, value, attn_mask = check_tensors(query, key, value, attn_mask)
    _checks.flag("enable_gqa", enable_gqa)
    batch_shape = None
    if not query.dim() == key.dim() == value.dim() == 4:
        query, key, value, attn_mask, batch_shape = _to_4d(query, key, value, attn_mask, enable_gqa)
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        query, key, value = _broadcast_batch(query, key, value, enable_gqa)
    check_sizes(query, key, value, enable_gqa)
    B, H, Lq, Lk = *query.shape[:3], key.shape[2]
    if diagonal is not None and _is_causal_bias(attn_mask):
        raise fail("diagonal", "None beside a causal bias, which has its own", diagonal)
    variant = is_causal  # distances are counted from its diagonal
    offset, offsets = _diagonal(diagonal, is_causal, B, query)
    if _is_causal_bias(attn_mask):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (Lq, Lk):
            got = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
            raise fail("attn_mask", f"a causal bias for lengths ({Lq}, {Lk})", got)
        variant = attn_mask.variant if is_causal is False else is_causal
        band, attn_mask = _band_with_bias(is_causal, window, attn_mask.variant, query, Lk - Lq)
    else:
        band = _moved(band_of(is_causal, window), offset)
    if attn_mask is not None:
        attn_mask = mask_to_4d(attn_mask, query, (B, H, Lq, Lk))
    if key_lengths is not None:
        key_lengths = _checks.integers("key_lengths", key_lengths, "(B,)", B, query)
    zero = _zero_distance(Lq, Lk, variant) + offset
    tables = Tables(relative_bias, query_bias, key_bias, relative_index)
    if are_indexed(tables, alibi_slopes):
        rows = (B, H) if batch_shape is None else batch_shape
        tables = indexed(tables, query, B, (Lq, Lk), (*rows, Lq), (*rows, Lk))
        tables = tables.map_rows(lambda table: table.reshape(B, H, *table.shape[-2:]))
    else:
        by_distance = _by_distance(relative_bias, alibi_slopes, query, B, Lq, Lk, zero, offsets)
        tables = Tables(relative_bias=by_distance)
    dropout_p = _checks.probability("dropout_p", dropout_p)
    return CheckedAttention(
        _Tensors(query, key, value, attn_mask, *tables, key_lengths, offsets),
        _Options(Lq, Lk, check_scale(scale), check_softcap(softcap), *band, dropout_p),
        choice or choose(query, value, _masked(attn_mask, tables)),
        batch_shape,
        check_sinks(sinks, query),
    )


def prepare_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool | CausalVariant,
    scale: float | None,
    enable_gqa: bool,
    window: int | tuple[int | None, int | None] | None,
    diagonal: int | Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    relative_index: Tensor | None,
    alibi_slopes: Tensor | None,
    choice: backends.Choice | None = None,
) -> CheckedAttention:
    """Checks the arguments of :func:`varlen_attention`.

    Args:
        choice: the backend, if it has been chosen before.
    """
    query, key, value, attn_mask = check_tensors(query, key, value, attn_mask)
    _checks.flag("enable_gqa", enable_gqa)
    for name, packed in (("query", query), ("key", key), ("value", value)):
        if packed.dim() != 3:
            raise fail(name, "shape (total, heads, head_dim)", tuple(packed.shape))
    shape = "(sequences + 1,)"
    cu_seqlens_q = _checks.integers("cu_seqlens_q", cu_seqlens_q, shape, None, query)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    cu_seqlens_k = _checks.integers(
        "cu_seqlens_k", cu_seqlens_k, "of cu_seqlens_q", cu_seqlens_q.shape[0], query
    )
    if cu_seqlens_q.shape[0] == 0:
        raise fail("cu_seqlens_q", "at least one boundary", "an empty tensor")
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    check_sizes(query, key, value, enable_gqa)
    max_seqlen_q = check_max_seqlen("max_seqlen_q", max_seqlen_q, query)
    max_seqlen_k = check_max_seqlen("max_seqlen_k", max_seqlen_k, key)
    N, lengths = cu_seqlens_q.shape[0] - 1, (max_seqlen_q, max_seqlen_k)
    offset, offsets = _diagonal(diagonal, is_causal, N, query)
    band = _moved(band_of(is_causal, window), offset)
    if attn_mask is not None:
        if _is_causal_bias(attn_mask):
            raise fail("attn_mask", "a tensor (is_causal takes a CausalVariant)", "a CausalBias")
        attn_mask = mask_to_4d(attn_mask, query, (N, query.shape[1], *lengths))
    zero = _zero_distance(*lengths, is_causal) + offset
    tables = Tables(relative_bias, query_bias, key_bias, relative_index)
    if are_indexed(tables, alibi_slopes):
        rows = ((x.shape[2], query.shape[1]) for x in (query, key))
        tables = indexed(tables, query, N, lengths, *rows)
        tables = tables.map_rows(lambda table: table.transpose(0, 1).unsqueeze(0))
    else:
        by_distance = _by_distance(relative_bias, alibi_slopes, query, N, *lengths, zero, offsets)
        tables = Tables(relative_bias=by_distance)
    dropout_p = _checks.probability("dropout_p", dropout_p)
    return CheckedAttention(
        _Tensors(query, key, value, attn_mask, *tables, None, offsets, cu_seqlens_q, cu_seqlens_k),
        _Options(
            max_seqlen_q, max_seqlen_k, check_scale(scale), check_softcap(softcap), *band, dropout_p
        ),
        choice or choose(query, value, _masked(attn_mask, tables)),
        None,
        check_sinks(sinks, query),
    )


def check_tensors(
    query: Any, key: Any, value: Any, attn_mask: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Checks types, dtypes and devices; returns the tensors after autocast."""
    query = _checks.tensor("query", query)
    key = _checks.tensor("key", key)
    value = _checks.tensor("value", value)
    if attn_mask is not None and not _is_causal_bias(attn_mask):
        attn_mask = _checks.tensor("attn_mask", attn_mask)
    dtype = _modes.autocast_dtype(query)
    if dtype is not None:
        query, key, value = (_autocast(x, dtype) for x in (query, key, value))
        # A float32 mask stays float32; rounding it would only lose accuracy.
        if attn_mask is not None and attn_mask.dtype != torch.float32:
            attn_mask = _autocast(attn_mask, dtype)
    dtype = query.dtype
    if dtype not in _checks.FLOATING:
        raise TypeError(f"query: expected float32, bfloat16, float16 or float64; got {dtype}")
    for name, other in (("key", key), ("value", value)):
        if other.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, as query; got {other.dtype}")
        _checks.same_device(name, other, "query", query)
    return query, key, value, attn_mask


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts as autocast does: float64 and non-floating tensors stay as they are."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _to_4d(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """Reshapes (..., H, L, E) to (B, H, L, E); also returns the result's leading dimensions.

    As in torch, 3-D tensors are batches of one head, unless ``enable_gqa`` is set.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise fail(name, "at least 2 dimensions", tuple(tensor.shape))
    dims = (query.dim(), key.dim(), value.dim())
    if max(dims) <= 3 and not (enable_gqa and min(dims) == 3):
        batch_shape = _broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        if isinstance(attn_mask, Tensor) and not _is_causal_bias(attn_mask):
            # (N, Lq, Lk) lacks the head dimension between the batch and Lq.
            attn_mask = attn_mask.unsqueeze(-3) if attn_mask.dim() == 3 else attn_mask
        N = math.prod(batch_shape)
        query, key, value = (
            x.expand(*batch_shape, *x.shape[-2:]).reshape(N, 1, *x.shape[-2:])
            for x in (query, key, value)
        )
        return query, key, value, attn_mask, batch_shape
    # Heads may differ between query and key; everything before them must broadcast.
    batch = _broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if isinstance(attn_mask, Tensor) and not _is_causal_bias(attn_mask) and attn_mask.dim() > 3:
        wanted = torch.Size((*batch, *attn_mask.shape[-3:]))
        attn_mask = _expand("attn_mask", attn_mask, wanted).flatten(0, -4)
    B = math.prod(batch)
    with_heads = (x.unsqueeze(-3) if x.dim() == 2 else x for x in (query, key, value))
    query, key, value = (
        x.expand(*batch, *x.shape[-3:]).reshape(B, *x.shape[-3:]) for x in with_heads
    )
    query, key, value = _broadcast_batch(query, key, value, enable_gqa)
    return query, key, value, attn_mask, (*batch, query.shape[1])


def _is_causal_bias(attn_mask: object) -> TypeGuard[CausalBias]:
    """Finds the class in sys.modules, because importing its module would load torch.compile."""
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(attn_mask, bias.CausalBias)


def _broadcast_shapes(query: torch.Size, key: torch.Size, value: torch.Size) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(query, key, value))
    except RuntimeError:
        got = f"{tuple(query)}, {tuple(key)} and {tuple(value)}"
        raise fail("query, key, value", "leading dimensions that broadcast", got) from None


def _broadcast_batch(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Expands to one batch size and, without ``enable_gqa``, to one number of heads."""
    (B,) = _broadcast_shapes(query.shape[:1], key.shape[:1], value.shape[:1])
    query, key, value = (x.expand(B, -1, -1, -1) for x in (query, key, value))
    if not enable_gqa:
        H = next((x.shape[1] for x in (query, key, value) if x.shape[1] != 1), 1)
        query, key, value = (
            x.expand(-1, H, -1, -1) if x.shape[1] == 1 else x for x in (query, key, value)
        )
    return query, key, value


def check_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    H, Hkv = query.shape[1], key.shape[1]
    if key.shape[3] != query.shape[3]:
        raise fail("key", f"head_dim {query.shape[3]}, as query", key.shape[3])
    if value.shape[2] != key.shape[2]:
        raise fail("value", f"length {key.shape[2]}, as key", value.shape[2])
    if value.shape[1] != Hkv:
        raise fail("value", f"{Hkv} heads, as key", value.shape[1])
    if Hkv != H:
        if not enable_gqa:
            raise fail("key", f"{H} heads, as query (or enable_gqa=True)", Hkv)
        if Hkv == 0 or H % Hkv:
            raise fail("key", f"a number of heads that divides query's {H}", Hkv)


def mask_to_4d(attn_mask: Tensor, query: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Views the caller's mask with four dimensions, each full or 1."""
    dtype = attn_mask.dtype
    if dtype not in (torch.bool, torch.float32, query.dtype):
        expected = "torch.bool, torch.float32 or the query's dtype"
        raise TypeError(f"attn_mask: expected {expected} ({query.dtype}); got {dtype}")
    _checks.same_device("attn_mask", attn_mask, "query", query)
    got = attn_mask.shape
    if len(got) < 4:
        attn_mask = attn_mask[(None,) * (4 - len(got))]
    if attn_mask.dim() > 4 or any(
        size not in (1, full) for size, full in zip(attn_mask.shape, shape, strict=True)
    ):
        raise fail("attn_mask", f"a shape broadcastable to {shape}", tuple(got))
    return attn_mask


def _expand(argument: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise fail(
            argument, f"a shape broadcastable to {tuple(shape)}", tuple(tensor.shape)
        ) from None


def check_scale(scale: float | None) -> float | None:
    return None if scale is None else _checks.number("scale", scale)


def check_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    softcap = _checks.number("softcap", softcap)
    if not 2.0**-126 <= softcap <= 2.0**126:  # normal in float32, and so is its inverse
        raise fail("softcap", "a number in [2⁻¹²⁶, 2¹²⁶]", softcap)
    return softcap


def check_sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    """Checks the sinks of a call; ``query`` is (B, H, L, E), after autocast."""
    if sinks is None:
        return None
    sinks = _beside_query("sinks", sinks, query)
    if sinks.shape != query.shape[1:2]:
        raise fail("sinks", f"shape ({query.shape[1]},), a number a head", tuple(sinks.shape))
    return sinks


def _diagonal(
    diagonal: int | Tensor | None, is_causal: bool | CausalVariant, B: int, query: Tensor
) -> tuple[int, Tensor | None]:
    """Checks the offset of a call's diagonal; returns one number, or 0 and a tensor of offsets."""
    if diagonal is None:
        return 0, None
    if _is_lower_right(is_causal):
        raise fail("diagonal", "None beside a lower right diagonal", diagonal)
    if isinstance(diagonal, Tensor):
        return 0, _checks.integers("diagonal", diagonal, "(B,), one a sequence", B, query)
    return _checks.offset("diagonal", diagonal), None


def _is_lower_right(is_causal: bool | CausalVariant) -> bool:
    return getattr(is_causal, "name", None) == "LOWER_RIGHT"


def _zero_distance(Lq: int, Lk: int, is_causal: bool | CausalVariant) -> int:
    """Returns the place of distance 0 in the biases by distance of a call without an offset."""
    return (Lk if _is_lower_right(is_causal) else Lq) - 1


def _by_distance(
    relative_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    query: Tensor,
    B: int,
    Lq: int,
    Lk: int,
    zero: int,
    offsets: Tensor | None,
) -> Tensor | None:
    """Checks the biases by distance of a call, and returns their sum: (B, H, Lq + Lk - 1).

    ``query`` is (B, H, L, E), after autocast, ``B`` the number of sequences, and ``zero`` the place
    of distance 0, which ``offsets`` (B,) move for each sequence.
    """
    if relative_bias is None and alibi_slopes is None:
        return None
    length = max(Lq + Lk - 1, 0)
    if relative_bias is not None:
        relative_bias = relative_bias_to_3d(relative_bias, query, B, length)
        if offsets is not None and relative_bias.shape[0] != B:
            shape = f"shape ({B}, {query.shape[1]} or 1, {length})"
            expected = f"{shape} if each sequence has a diagonal of its own"
            raise fail("relative_bias", expected, tuple(relative_bias.shape))
    if alibi_slopes is None:
        return relative_bias
    slopes = slopes_to_2d(alibi_slopes, query, B)
    if offsets is None:
        alibi = alibi_bias(slopes, length, zero)
    else:
        farthest = reference.FARTHEST
        zeros = zero + offsets.long().clamp(-farthest, farthest)
        alibi = alibi_bias(slopes.expand(B, -1), length, zeros)
    return alibi if relative_bias is None else relative_bias + alibi


def relative_bias_to_3d(relative_bias: Tensor, query: Tensor, B: int, length: int | None) -> Tensor:
    """Checks a table of ``length`` biases by distance, and views it with three dimensions.

    Args:
        length: None for a table with an index, of any length.
    """
    relative_bias = _beside_query("relative_bias", relative_bias, query)
    got, H = tuple(relative_bias.shape), query.shape[1]
    *leading, n = got or (0,)
    sizes = zip(reversed(leading), (H, B), strict=False)
    fits = length in (None, n) and all(size in (1, full) for size, full in sizes)
    if not fits or not 1 <= len(got) <= 3:
        last = "n" if length is None else length
        expected = f"shape ({B} or 1, {H} or 1, {last}), or its last dimensions"
        raise fail("relative_bias", expected, got)
    return relative_bias[(None,) * (3 - len(got))]


class Tables(NamedTuple):
    """Biases as tables, from a call's arguments or from those of the op."""

    relative_bias: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    relative_index: Tensor | None = None

    def map_rows(self, view: Callable[[Tensor], Tensor]) -> Tables:
        """Returns the tables with those of every query and every key viewed by ``view``."""
        query, key = (None if t is None else view(t) for t in (self.query_bias, self.key_bias))
        return self._replace(query_bias=query, key_bias=key)


def are_indexed(tables: Tables, alibi_slopes: Tensor | None) -> bool:
    """Returns whether an index selects the column of the tables that a pair reads."""
    if tables.relative_index is None:
        for name in ("query_bias", "key_bias"):
            if getattr(tables, name) is not None:
                raise fail(name, "None without relative_index", "a tensor")
        return False
    if all(table is None for table in tables[:3]):
        expected = "None without relative_bias, query_bias and key_bias"
        raise fail("relative_index", expected, "a tensor")
    if alibi_slopes is not None:
        raise fail("alibi_slopes", "None beside relative_index", "a tensor")
    return True


def indexed(
    tables: Tables,
    query: Tensor,
    B: int,
    lengths: tuple[int, int],
    queries: tuple[int, ...],
    keys: tuple[int, ...],
) -> Tables:
    """Checks tables that are read by an index, and views ``relative_bias`` as (B, H, n).

    Args:
        query: (B, H, L, E), after autocast.
        lengths: Lq and Lk; those of the longest sequences if they are packed.
        queries, keys: the shapes of ``query_bias`` and ``key_bias`` without the last dimension.
    """
    relative_bias, query_bias, key_bias, index = tables
    Lq, Lk = lengths
    index = _checks.tensor("relative_index", index)
    if index.dtype not in _checks.INTEGER:
        raise TypeError(f"relative_index: expected int32 or int64; got {index.dtype}")
    _checks.same_device("relative_index", index, "query", query)
    if tuple(index.shape) not in ((Lq, Lk), (max(Lq + Lk - 1, 0),)):
        expected = f"shape ({Lq}, {Lk}) or, by distance, ({max(Lq + Lk - 1, 0)},)"
        raise fail("relative_index", expected, tuple(index.shape))
    if relative_bias is not None:
        relative_bias = relative_bias_to_3d(relative_bias, query, B, None)
    if query_bias is not None:
        query_bias = _table_of_rows("query_bias", query_bias, query, queries)
    if key_bias is not None:
        key_bias = _table_of_rows("key_bias", key_bias, query, keys)
    checked = Tables(relative_bias, query_bias, key_bias, index)
    given = {name: t.shape[-1] for name, t in checked._asdict().items() if t is not None}
    (first, n), *others = list(given.items())[:-1]
    if n == 0:
        raise fail(first, "a column at least", tuple(getattr(checked, first).shape))
    for name, columns in others:
        if columns != n:
            raise fail(name, f"{n} columns, as {first}", columns)
    return checked


def _table_of_rows(name: str, table: Any, query: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Checks a table of every query or key, ``rows``."""
    table = _beside_query(name, table, query)
    if tuple(table.shape[:-1]) != rows or table.dim() != len(rows) + 1:
        raise fail(name, f"shape ({', '.join(map(str, rows))}, n)", tuple(table.shape))
    return table


def _masked(attn_mask: Tensor | None, tables: Tables) -> bool:
    """Returns whether a call has a mask or a table."""
    return attn_mask is not None or any(table is not None for table in tables)


def slopes_to_2d(alibi_slopes: Tensor, query: Tensor, B: int) -> Tensor:
    """Checks ALiBi's slopes, and views them with two dimensions, the first full or 1."""
    alibi_slopes = _beside_query("alibi_slopes", alibi_slopes, query)
    got, H = tuple(alibi_slopes.shape), query.shape[1]
    if got not in ((H,), (B, H)):
        raise fail("alibi_slopes", f"shape ({H},) or ({B}, {H})", got)
    return alibi_slopes if len(got) == 2 else alibi_slopes[None]


def _beside_query(name: str, bias: Any, query: Tensor) -> Tensor:
    """Checks a bias in the query's dtype, or in float32, which stays float32 as for a mask."""
    bias = _checks.tensor(name, bias)
    dtype = _modes.autocast_dtype(query)
    if dtype is not None and bias.dtype != torch.float32:
        bias = _autocast(bias, dtype)
    return _checks.matching(name, bias, "query", query)


Band = tuple[int | None, int | None, bool]


def band_of(
    is_causal: bool | CausalVariant, window: int | tuple[int | None, int | None] | None
) -> Band:
    """Returns (left, right, lower_right), bounds around the diagonal; None means no bound."""
    left = right = None
    if window is not None:
        pair = window if isinstance(window, (tuple, list)) else (window, window)
        sides = [None if side is None else _checks.whole_number(side) for side in pair]
        wrong = any(n is None and side is not None for n, side in zip(sides, pair, strict=True))
        if len(sides) != 2 or wrong:
            expected = "a number ≥ 0 or a pair (left, right) of them or None"
            raise fail("window", expected, window)
        left, right = (None if n is None or n >= _checks.MAX_DISTANCE else n for n in sides)
    if is_causal is False:
        return left, right, False
    if is_causal is True:
        return left, 0, False
    from torch.nn.attention.bias import CausalVariant  # late: loads torch.compile

    if not isinstance(is_causal, CausalVariant):
        raise TypeError(f"is_causal: expected a bool or a CausalVariant; got {is_causal!r}")
    return left, 0, is_causal is CausalVariant.LOWER_RIGHT


def _moved(band: Band, offset: int) -> Band:
    """Returns bounds around key i that include the same pairs as a band around key i + ``offset``.

    One of them may be negative: then key i is outside.
    """
    left, right, lower_right = band
    return (
        None if left is None else _checks.within_distance(left - offset),
        None if right is None else _checks.within_distance(right + offset),
        lower_right,
    )


def _band_with_bias(
    is_causal: bool | CausalVariant,
    window: int | tuple[int | None, int | None] | None,
    bias: CausalVariant,
    query: Tensor,
    shift: int,
) -> tuple[Band, Tensor | None]:
    """Returns the band of a call whose mask is a causal bias, and a mask if the band needs one.

    ``shift`` is Lk - Lq, the offset of the lower-right diagonal from the upper-left diagonal.
    """
    if is_causal is False:
        return band_of(bias, window), None
    left, right, lower_right = band_of(is_causal, window)
    bias_lower_right = bias.name == "LOWER_RIGHT"
    before = shift * (lower_right - bias_lower_right)  # our diagonal's offset from the bias's
    if before <= 0:
        return (left, right, lower_right), None  # ours is the tighter bound
    # Around the bias's diagonal the right bound is 0, and the left bound shrinks by ``before``.
    if left is None or left >= before:
        return (None if left is None else left - before, 0, bias_lower_right), None
    return (None, None, False), query.new_zeros((1, 1, 1, 1), dtype=torch.bool)  # no pair is left


def check_max_seqlen(argument: str, value: int | None, packed: Tensor) -> int:
    if value is None:
        return packed.shape[2]
    checked = _checks.whole_number(value)
    if checked is None:
        raise fail(argument, "an int ≥ 0", repr(value))
    return checked


def refuse_context_parallel() -> None:
    """Raises where torch's context parallelism has split every sequence between ranks.

    It exchanges keys by replacing ``F.scaled_dot_product_attention`` or by a handler in DTensor's
    dispatcher. A trifuse call bypasses both and would attend to its own rank's part alone. Context
    parallelism is in use only if its module, which torch has moved once, is loaded.
    """
    for name in _CONTEXT_PARALLEL:
        if name in sys.modules:
            dtensor = getattr(sys.modules[name], "DTensor", None)
            dispatcher = getattr(dtensor, "_op_dispatcher", None)
            handlers = getattr(dispatcher, "_custom_op_handlers", ())
            replaced = getattr(functional.scaled_dot_product_attention, "__module__", None) == name
            if replaced or _FLASH_ATTENTION in handlers:
                raise RuntimeError(
                    "trifuse's attention does not support torch's context parallelism, under which "
                    "each rank would attend to its own part of the sequence alone: leave "
                    "context_parallel, split the inputs by trifuse.distributed.shard_sequence and "
                    "call trifuse.distributed.ring_attention; or take "
                    "torch.nn.functional.scaled_dot_product_attention in this model (of "
                    "trifuse.fuse, FuseReport.revert() restores it)"
                )


_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
_CONTEXT_PARALLEL = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)


def choose(query: Tensor, value: Tensor, masked: bool = False) -> backends.Choice:
    """Chooses the backend of a call.

    Args:
        masked: whether it has a mask, a relative bias or tables.
    """
    refuse_context_parallel()
    return backends.choose(_call(query, value, masked))


def _call(query: Tensor, value: Tensor, masked: bool) -> backends.Call:
    head_dim = max(query.shape[3], value.shape[3])
    return backends.Call("attention", query.device.type, query.dtype, head_dim, masked)


def _call_on_gpu(query: Any, value: Any, attn_mask: Any) -> backends.Call | None:
    """Returns the properties that decide the backend, if the tensors are on an NVIDIA GPU and have
    four dimensions, as the fast path takes them."""
    if not getattr(query, "is_cuda", False) or not isinstance(value, Tensor):
        return None
    if query.dim() != 4 or value.dim() != 4:
        return None
    return _call(query, value, attn_mask is not None)


# Values of integer tensors ----------------------------------------------------------------------


def _check_values(tensors: _Tensors, options: _Options) -> None:
    """Checks the contents of ``key_lengths``, ``cu_seqlens`` and ``relative_index``; runs inside
    the ops.

    On a CPU it raises. Elsewhere reading them would wait for the device, so the device asserts.
    """
    Lq, Lk, key_lengths = tensors.query.shape[2], tensors.key.shape[2], tensors.key_lengths
    if tensors.cu_seqlens_q is not None:
        if key_lengths is not None:
            raise fail("key_lengths", "None beside cu_seqlens_q", "a tensor")
        if tensors.query.shape[0] != 1:
            raise fail("query", "batch size 1 beside cu_seqlens_q", tensors.query.shape[0])
    if key_lengths is not None:
        ok = (key_lengths >= 0) & (key_lengths <= Lk)
        _require(ok.all(), "key_lengths", f"lengths in [0, {Lk}]", key_lengths)
    for name, cu, total, longest in (
        ("cu_seqlens_q", tensors.cu_seqlens_q, Lq, options.max_seqlen_q),
        ("cu_seqlens_k", tensors.cu_seqlens_k, Lk, options.max_seqlen_k),
    ):
        if cu is not None:
            steps = cu.diff()
            ok = (cu[0] == 0) & (cu[-1] <= total) & (steps >= 0).all() & (steps <= longest).all()
            expected = f"0 first, no decrease, no step over {longest}, the last at most {total}"
            _require(ok, name, expected, cu)
    if tensors.relative_index is not None:
        tables = (tensors.relative_bias, tensors.query_bias, tensors.key_bias)
        check_index(tensors.relative_index, tables)


def check_index(index: Tensor, tables: Sequence[Tensor | None]) -> None:
    """Checks the numbers of a ``relative_index``; the first table has the number of columns."""
    if index.numel() > 0:
        n = next(table.shape[-1] for table in tables if table is not None)
        least, greatest = index.aminmax()
        ok, expected = (least >= 0) & (greatest < n), f"least and greatest number in [0, {n - 1}]"
        _require(ok, "relative_index", expected, torch.stack((least, greatest)))


def _require(ok: Tensor, argument: str, expected: str, got: Tensor) -> None:
    if ok.device.type == "cpu":
        if not ok:
            raise fail(argument, expected, got.tolist())
    else:
        torch._assert_async(ok, f"{argument}: expected {expected}")


# The operator -----------------------------------------------------------------------------------


class _Tensors(NamedTuple):
    """See :func:`trifuse.reference.attention.attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    relative_bias: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    relative_index: Tensor | None = None
    key_lengths: Tensor | None = None
    diagonal: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seed: Tensor | None = None


_DIFFERENTIABLE = _Tensors._fields.index("relative_index")  # tensors that have gradients


class _Options(NamedTuple):
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float | None
    softcap: float | None
    window_left: int | None
    window_right: int | None
    lower_right: bool
    dropout_p: float


class _Results(NamedTuple):
    out: Tensor
    logsumexp: Tensor


def _run(call: CheckedAttention) -> tuple[Tensor, Tensor]:
    out, lse = attend(with_seed(call))
    return (out, lse) if call.sinks is None else join_sinks(out, lse, call.sinks)


def with_seed(call: CheckedAttention) -> CheckedAttention:
    """Draws the seed of a call that drops weights."""
    if call.options.dropout_p == 0:
        return call
    query, cu_seqlens_q = call.tensors.query, call.tensors.cu_seqlens_q
    batch = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    place = _draws.place_of_heads(batch, query.shape[1])
    return call._replace(tensors=call.tensors._replace(seed=_draws.draw(query, place)))


def attend(call: CheckedAttention) -> tuple[Tensor, Tensor]:
    """Runs the forward op: returns the output and the logsumexp without sinks."""
    out, lse = _OPERATOR(call.choice.backend, call.tensors, call.options)
    return out, lse


def attention_gradients(
    call: CheckedAttention,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Runs the backward op: returns the gradients of query, key, value, mask and tables.

    A weight is exp(score - logsumexp). So the call may have only a part of the keys from which the
    results were computed. Its gradients are then the terms of that part (Dao, "FlashAttention-2",
    2023, section 3.1). This does not hold if :func:`normalises_again` returns True, or for the
    gradient of a mask with one column, which the kernels compute from ``grad_lse`` alone, as a sum
    over all keys.

    Args:
        out: (B, H, Lq, Ev), a result of the forward.
        lse: (B, H, Lq), a result of the forward.
        grad_out, grad_lse: the gradients of ``out`` and ``lse``.
        needs_grad: a flag for each gradient; one that is not needed may have shape (0,).
    """
    found: tuple[Tensor, ...] = _OPERATOR.backward[call.choice.backend](
        grad_out, grad_lse, *call.tensors, out, lse, *call.options, list(needs_grad)
    )
    return found


def normalises_again(
    choice: backends.Choice, lse: Tensor, large_scores: bool, is_cuda: bool
) -> bool:
    """Returns whether the backward op normalises weights by the sum over its call's own keys.

    The formula always does. The kernels do if a logsumexp is so large that float32 has too few
    digits for it. On a GPU they do so only if scores may be large. Only in that case is ``lse``
    read, because reading it waits for the GPU.

    Args:
        lse: (B, H, Lq), over all keys.
        large_scores: what :func:`has_large_scores` returns for the call.
        is_cuda: whether the kernels run on a GPU.
    """
    if choice.backend == "eager":
        return True
    if is_cuda and not large_scores:
        return False
    return bool(((lse.abs() > reference.COARSE_LOGSUMEXP) & lse.isfinite()).any())


def has_large_scores(biased: bool, scale: float | None, softcap: float | None) -> bool:
    """Returns whether the GPU kernels handle scores that are too large for a float32 logsumexp.

    Triton's do with a cap too, CUDA's do not.

    Args:
        biased: whether the call has a float mask or a relative bias.
    """
    return biased or softcap is not None or abs(scale or 0) > reference.LARGE_SCALE


def _fake(tensors: _Tensors, options: _Options, save: int) -> _Results:
    query, value = tensors.query, tensors.value
    lse = query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))
    return _Results(empty_like_layout(query, value.shape[3]), lse)


def _grad_fake(call: _operator.BackwardCall) -> tuple[Tensor, ...]:
    query, key, value, *biases = call.tensors[:_DIFFERENTIABLE]
    grads = [empty_like_layout(x, x.shape[3]) for x in (query, key, value)]
    wanted = zip(biases, call.needs_grad[3:_DIFFERENTIABLE], strict=True)
    return (*grads, *(x.new_empty(x.shape) if n else query.new_empty(0) for x, n in wanted))


def _formula(tensors: _Tensors, options: _Options) -> tuple[Tensor, Tensor]:
    return reference.attention(*tensors, *options)


def _grad_formula(call: _operator.BackwardCall) -> tuple[Tensor | None, ...]:
    return reference.attention_backward(
        call.grads.out,
        call.grads.logsumexp,
        **call.tensors._asdict(),
        **call.options._asdict(),
        mask_requires_grad=call.needs_grad.attn_mask,
        relative_bias_requires_grad=call.needs_grad.relative_bias,
        query_bias_requires_grad=call.needs_grad.query_bias,
        key_bias_requires_grad=call.needs_grad.key_bias,
    )


def _pairs(tensors: _Tensors, options: _Options) -> int:
    """Counts the query-key pairs of all heads, masked pairs included, as torch does."""
    (B, H, Lq, _), Lk = tensors.query.shape, tensors.key.shape[2]
    cu_seqlens_q, cu_seqlens_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return B * H * Lq * Lk
    from torch._subclasses.fake_tensor import FakeTensor

    if cu_seqlens_q.is_meta or isinstance(cu_seqlens_q, FakeTensor):
        return H * Lq * min(Lk, options.max_seqlen_k)  # no sequence has more keys
    return H * int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())


def _flops(tensors: _Tensors, options: _Options) -> int:
    """Counts the operations of the forward's products: Q Kᵀ and P V."""
    E, Ev = tensors.query.shape[3], tensors.value.shape[3]
    return 2 * _pairs(tensors, options) * (E + Ev)


def _grad_flops(tensors: _Tensors, options: _Options) -> int:
    """Counts the operations of the backward's products: Q Kᵀ again, dQ, dK, dP and dV."""
    E, Ev = tensors.query.shape[3], tensors.value.shape[3]
    return 2 * _pairs(tensors, options) * (3 * E + 2 * Ev)


_OPERATOR = _operator.Operator(
    name="attention",
    tensors=_Tensors,
    options=_Options,
    results=_Results,
    returned=2,
    differentiable=_DIFFERENTIABLE,
    saved=("out", "logsumexp"),
    # All sequences share an index.
    axes=dict.fromkeys(
        (
            *_Tensors._fields[:_DIFFERENTIABLE],
            "key_lengths",
            "diagonal",
            *_Results._fields,
        ),
        0,
    ),
    # Packed sequences have no batch dimension, and dropout depends on the index in the batch.
    unfoldable=("cu_seqlens_q", "seed"),
    fake=_fake,
    grad_fake=_grad_fake,
    formula=_formula,
    grad_formula=_grad_formula,
    flops=_flops,
    grad_flops=_grad_flops,
    check=_check_values,
    head_dim=lambda tensors: max(tensors.query.shape[3], tensors.value.shape[3]),
)

_explained.explains(scaled_dot_product_attention, prepare)
_explained.explains(varlen_attention, prepare_varlen)
