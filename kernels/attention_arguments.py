"""Arguments of attention's kernels: tensors, numbers and compile-time parameters."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Placeholder for a tensor that a call does not have, where a jitted function returns the tuple that
# would hold the tensor. Triton 3.6 can't return None in a tuple, but it treats a 1 as a constant
# too.
ABSENT = 1


class Strided(NamedTuple):
    """A tensor and its strides, in elements; 0 where a dimension is broadcast."""

    data: Tensor
    strides: tuple[int, ...]


class Inputs(NamedTuple):
    """The tensors of a call. Packed sequences lie end to end: query, key and value then have B = 1,
    and L is the total. Kernels get ``ABSENT`` for None, and read only what the Variant includes."""

    query: Strided  # (B, H, Lq, E)
    key: Strided  # (B, Hkv, Lk, E)
    value: Strided  # (B, Hkv, Lk, Ev)
    attn_mask: Strided | None  # (B, H, Lq, Lk): uint8 for a boolean mask, or floating
    relative_bias: Strided | None  # (B, H, ·) float32, from the element of distance 0 on
    # Tables that an index reads: one for all rows, and those of every query and every key.
    table: Strided | None  # (B, H, 1, n)
    query_bias: Strided | None  # (B, H, Lq, n)
    key_bias: Strided | None  # (B, H, Lk, n)
    # int32, in [0, n): (Lq, Lk), or by distance, from the element of distance 0 on, with strides -1
    # and 1.
    relative_index: Strided | None
    key_lengths: Tensor | None  # (B,)
    diagonal: Tensor | None  # (B,)
    cu_seqlens_q: Tensor | None  # (B + 1,)
    cu_seqlens_k: Tensor | None  # (B + 1,)
    seed: Tensor | None  # int64


class RowVectors(NamedTuple):
    """Per-query numbers that the backward needs: float32 (B, H, Lq), contiguous."""

    # The logsumexp or, if that is too coarse, the largest score. With Variant.large_scores it is ∞
    # for a row without a pair; subtracting it from any score gives -∞, so the weights are 0.
    lse_base: Tensor
    lse_rest: Tensor | None  # with Variant.large_scores: logsumexp - lse_base, in units of log 2
    delta: Tensor  # ∑ dO O - dlse


class Sizes(NamedTuple):
    """Numbers that change from call to call without compiling a kernel again.

    Kernels take them one by one. For numbers in a tuple Triton ignores ``do_not_specialize``, so a
    1 or a multiple of 16 would compile another kernel.
    """

    B: int  # sequences
    H: int
    group: int  # query heads per key head
    Lq: int  # queries of the longest sequence
    Lk: int
    total_q: int  # rows of the query tensor: Lq unless sequences are packed
    total_k: int
    left: int  # keys before its place that a query attends to; read only with Variant.left_bound
    right: int  # keys after its place; read only with Variant.right_bound
    scale: float
    scale_log2: float  # scale · log2 e
    threshold: int  # random 16-bit values below it drop a weight
    keep_scale: float


# Shapes made of fields of the next two classes go to tl.full. tl.zeros is itself a jitted function,
# in which Triton 3.6 no longer treats the fields as constants.
class Variant(NamedTuple):
    """Compile-time parameters of a kernel: the parts of the operator that a call uses."""

    dtype: str
    E: int
    Ev: int
    BLOCK_E: int  # E in tiles: a power of 2, at least the 16 of a tensor core
    BLOCK_EV: int
    bool_mask: bool
    float_mask: bool
    masked: bool  # bool_mask or float_mask
    mask_rows: bool  # the mask differs between queries
    mask_columns: bool  # the mask differs between keys
    mask_runs: bool  # rows of the mask are whole runs of MASK_RUN columns
    trim_by_mask: bool  # cut off the ends of a range of keys or queries that the mask leaves out
    softcap: float  # c; 0: scores are not capped. Compiled in, because a model has only one.
    relative_bias: bool
    indexed: bool  # there is an index, and so at least one of the next three:
    table: bool
    query_bias: bool
    key_bias: bool
    index_by_distance: bool
    # Scores may be so large that adding the logarithm of a sum to them loses it: with a float mask,
    # a relative bias, or a large scale. Also set with softcap.
    large_scores: bool
    scores_in_nats: bool  # not in units of log 2: with large_scores, or if the scale is not above 0
    key_lengths: bool
    packed: bool
    left_bound: bool  # the window has one
    right_bound: bool
    lower_right: bool  # a query's place is i + Lk - Lq, not i
    diagonal: bool  # each sequence adds an offset to its queries' places
    selective: bool  # masks or bounds leave out pairs whose rows are still loaded
    dropout: bool
    placed: bool  # a place follows the seed
    grouped: bool  # query heads share key heads
    # The rows of a tile are the queries of all heads that share a key head, query by query, not
    # those of one head. Only in the forward of few queries; see ``attention_decoding.py``.
    heads_in_rows: bool = False


class AttentionBlock(NamedTuple):
    """Sizes of tiles."""

    M: int  # queries
    N: int  # keys
    K: int  # step along the head dimension in products of two loaded tiles; 0 for one step


class MaskShape(NamedTuple):
    """The dimensions of the mask's gradient that are full. It is summed over the others."""

    batch: bool
    heads: bool
    rows: bool
    columns: bool
