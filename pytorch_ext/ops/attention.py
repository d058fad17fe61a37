"""Masked scaled dot-product attention: the public functions and the registered operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

from torch import Tensor

from trifuse import backends
from trifuse.ops import _checks, _draws, _explained, _fast_path, _op, _operator
from trifuse.ops._attention_arguments import (
    DIFFERENTIABLE,
    CheckedAttention,
    Options,
    Tensors,
    call_on_gpu,
    check_values,
    prepare,
    prepare_varlen,
    refuse_context_parallel,
)
from trifuse.ops._sinks import join_sinks
from trifuse.reference import attention as reference
from trifuse.reference.results import accumulation_dtype, empty_like_layout

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalVariant


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
            on a CPU, and asserts on a GPU. Not beside ``alibi_slopes``.
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
        >>> import torch
        >>> query, key, value = (torch.randn(2, 8, 5, 64) for _ in range(3))
        >>> lengths = torch.tensor([5, 3])  # the second sequence has two keys of padding
        >>> scaled_dot_product_attention(query, key, value, key_lengths=lengths).shape
        torch.Size([2, 8, 5, 64])
    """
    fast = _fast_path.extension(dropout_p, call_on_gpu(query, value, attn_mask))
    # The fast path takes none of the options that this condition names, and would ignore them.
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
            blocks than needed, and Triton's kernels divide the keys of few queries among programs.
            Bounds that are too small raise on a CPU, and assert on a GPU.
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
        >>> import torch
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
    fast = _fast_path.extension(dropout_p, call_on_gpu(query, value, None))
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


# The operator -----------------------------------------------------------------------------------


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


def _fake(tensors: Tensors, options: Options, save: int) -> _Results:
    query, value = tensors.query, tensors.value
    lse = query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))
    return _Results(empty_like_layout(query, value.shape[3]), lse)


def _grad_fake(call: _operator.BackwardCall) -> tuple[Tensor, ...]:
    query, key, value, *biases = call.tensors[:DIFFERENTIABLE]
    grads = [empty_like_layout(x, x.shape[3]) for x in (query, key, value)]
    wanted = zip(biases, call.needs_grad[3:DIFFERENTIABLE], strict=True)
    return (*grads, *(x.new_empty(x.shape) if n else query.new_empty(0) for x, n in wanted))


def _formula(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
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


def _pairs(tensors: Tensors, options: Options) -> int:
    """Counts the query-key pairs of all heads, masked pairs included, as torch does."""
    (B, H, Lq, _), Lk = tensors.query.shape, tensors.key.shape[2]
    cu_seqlens_q, cu_seqlens_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return B * H * Lq * Lk
    from torch._subclasses.fake_tensor import FakeTensor

    if cu_seqlens_q.is_meta or isinstance(cu_seqlens_q, FakeTensor):
        return H * Lq * min(Lk, options.max_seqlen_k)  # no sequence has more keys
    return H * int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())


def _flops(tensors: Tensors, options: Options) -> int:
    """Counts the operations of the forward's products: Q Kᵀ and P V."""
    E, Ev = tensors.query.shape[3], tensors.value.shape[3]
    return 2 * _pairs(tensors, options) * (E + Ev)


def _grad_flops(tensors: Tensors, options: Options) -> int:
    """Counts the operations of the backward's products: Q Kᵀ again, dQ, dK, dP and dV."""
    E, Ev = tensors.query.shape[3], tensors.value.shape[3]
    return 2 * _pairs(tensors, options) * (3 * E + 2 * Ev)


_OPERATOR = _operator.Operator(
    name="attention",
    tensors=Tensors,
    options=Options,
    results=_Results,
    returned=2,
    differentiable=DIFFERENTIABLE,
    saved=("out", "logsumexp"),
    # All sequences share an index.
    axes=dict.fromkeys(
        (
            *Tensors._fields[:DIFFERENTIABLE],
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
    check=check_values,
    head_dim=lambda tensors: max(tensors.query.shape[3], tensors.value.shape[3]),
)

# The backward of csrc/fast_path/attention_call.h for query, key and value that lie side by side.
_op.library.define(
    "attention_backward_side_by_side(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor? key_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seed, Tensor out, Tensor logsumexp, int max_seqlen_q, int max_seqlen_k, float? scale, "
    "int? window_right, float dropout_p, bool query_too) -> (Tensor, Tensor)"
)

_explained.explains(scaled_dot_product_attention, prepare)
_explained.explains(varlen_attention, prepare_varlen)
