"""Masked scaled dot-product attention in Triton: the launchers of the forward and the backward.

The formulas are those at the head of ``trifuse/reference/attention.py``. Nothing of size Lq × Lk is
stored: the forward keeps a running softmax over blocks of keys (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023), the backward computes
the weights again from the logsumexp. There are no atomics. Every sum has a fixed order, so results
are reproducible bit for bit.

Read the files in this order:

- this one: a call, its grids and launches;
- ``attention_arguments.py``: the kernels' arguments;
- ``attention_forward.py``, ``attention_decoding.py`` (few queries over many keys),
  ``attention_backward.py``, ``attention_mask_gradient.py``,
  ``attention_relative_bias_gradient.py``, ``attention_table_gradients.py``: the kernels;
- ``attention_pairs.py``: the blocks that a program walks through, with a picture, and masks;
- ``attention_tiles.py``: rows in memory, and products of tiles;
- ``attention_non_finite.py``: NaN and Inf in rows that take no part;
- ``attention_configurations.py``: sizes of tiles.

Four ideas run through all kernels:

- *Full and edge blocks.* For a block of queries, lengths, causality and window bound the range of
  keys that can hold a pair, and an inner range from which they leave nothing out. The loop over the
  inner range has no comparisons, and its loads have no guards; only the few blocks at its ends have
  guards. Keys at the ends of the outer range that a mask leaves out are cut off before the loops
  begin.
- *Two attempts.* A NaN or Inf in a row that the mask leaves out must not reappear as 0 · NaN from a
  matrix product. The kernels multiply as if all numbers were finite. Only a program that ends with
  a non-finite sum starts again, and then replaces NaN and Inf by 0 in the rows that it sums.
- *Powers of 2.* exp(x) is exp2(x · log2 e), with the factor folded into the scale. With a float
  mask the maximum is subtracted before the factor is applied, because masks hold numbers near the
  end of float32's range, and multiplying them would overflow.
- *Explicit rounding.* A product and a sum that are rounded once are written as ``tl.fma``, and the
  compiler may fuse nothing else (``enable_fp_fusion``). So full and edge blocks give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trifuse.kernels.arguments import check_shape, seed_shape
from trifuse.kernels.attention_arguments import (
    ABSENT,
    Inputs,
    MaskShape,
    RowVectors,
    Sizes,
    Strided,
    Variant,
)
from trifuse.kernels.attention_backward import (
    attention_backward_key_value_kernel,
    attention_backward_query_kernel,
    attention_backward_rows_kernel,
)
from trifuse.kernels.attention_configurations import (
    Config,
    Workload,
    configs,
    launch_options,
    multiplying_unit,
)
from trifuse.kernels.attention_decoding import attention_chunk_kernel, attention_join_kernel
from trifuse.kernels.attention_forward import attention_forward_kernel
from trifuse.kernels.attention_mask_gradient import RUN, attention_backward_mask_kernel
from trifuse.kernels.attention_pairs import MASK_RUN
from trifuse.kernels.attention_relative_bias_gradient import (
    attention_backward_relative_bias_kernel,
    sums_by_offset,
)
from trifuse.kernels.attention_table_gradients import (
    attention_backward_key_bias_kernel,
    attention_backward_query_bias_kernel,
    attention_backward_table_kernel,
)
from trifuse.reference import attention as reference
from trifuse.reference import philox
from trifuse.reference.results import empty_like_layout

# A sum over broadcast dimensions is split until there are about this many programs. That is enough
# for any GPU, and it bounds the memory for the shares.
_MASK_PROGRAMS = 512

# Calls of few queries over more keys than one chunk are computed in chunks of keys; see
# ``attention_decoding.py``. Rows are the queries of the heads that share a key head. More of them
# fill more programs, and have more partial sums: in 16 bits, those of 128 rows are a quarter of the
# bytes of their chunk of keys and values. In every configuration a head's few queries are at most
# one block of queries, and a chunk is whole blocks of keys.
_FEW_QUERIES = 16
_FEW_ROWS = 128
_CHUNK = 512

_AUTOTUNE = os.environ.get("TRIFUSE_TRITON_AUTOTUNE") == "1"


# The ops -----------------------------------------------------------------------------------------


def attention_forward(
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
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Implements the op ``attention_forward``: returns the output and the logsumexp."""
    tables = (relative_bias, query_bias, key_bias, relative_index)
    sequences = (key_lengths, diagonal, cu_seqlens_q, cu_seqlens_k)
    tensors = _Tensors(query, key, value, attn_mask, *tables, *sequences, seed)
    call = _AttentionCall(tensors, _Options(*options))
    out = empty_like_layout(query, value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    if call.is_for_decoding():
        _forward_in_chunks(call, out, lse)
    else:
        call.launch("forward", call.query_grid(tail=True), _strided(out), lse)
    return out, lse


def _forward_in_chunks(call: _AttentionCall, out: Tensor, lse: Tensor) -> None:
    """Writes the output and the logsumexp of few queries; see ``attention_decoding.py``."""
    sizes, variant = call.sizes, call.variant
    batch, chunks = sizes.B, triton.cdiv(sizes.Lk, _CHUNK)
    if variant.packed:  # the chunks of all sequences lie side by side
        batch, chunks = 1, min(sizes.total_k, sizes.B * sizes.Lk) // _CHUNK + sizes.B
    sums = lse.new_empty((batch, sizes.H, chunks, sizes.Lq, variant.Ev))
    softmax = lse.new_empty((batch, sizes.H, chunks, sizes.Lq, 2))

    def chunk_grid(meta: dict[str, Any]) -> tuple[int]:
        tiles = triton.cdiv(sizes.Lq * sizes.group, meta["block"].M)
        return (tiles * chunks * (sizes.H // sizes.group) * batch,)

    def join_grid(meta: dict[str, Any]) -> tuple[int]:
        return (sizes.Lq * sizes.H * (sizes.B + variant.packed),)

    of_chunks = variant._replace(heads_in_rows=variant.grouped)
    partial = (sums, softmax, chunks)
    call.launch("chunk", chunk_grid, *partial, CHUNK=_CHUNK, variant=of_chunks)
    call.launch("join", join_grid, _strided(out), lse, *partial, CHUNK=_CHUNK)


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
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
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Implements the op ``attention_backward``: returns the gradients."""
    *values, (_, _, _, mask_requires_grad, *tables_require_grad) = options
    call_options = _Options(*values)
    tables = (relative_bias, query_bias, key_bias, relative_index)
    sequences = (key_lengths, diagonal, cu_seqlens_q, cu_seqlens_k)
    tensors = _Tensors(query, key, value, attn_mask, *tables, *sequences, seed)
    _check_backward(tensors, call_options, grad_out, grad_lse, out, lse)
    call = _AttentionCall(tensors, call_options)
    do = _strided(grad_out)
    dlse = None if grad_lse is None else _strided(grad_lse)
    lse = lse.contiguous()
    vectors = RowVectors(lse_base=lse, lse_rest=None, delta=torch.empty_like(lse))
    if call.variant.large_scores:
        vectors = vectors._replace(lse_base=torch.empty_like(lse), lse_rest=torch.empty_like(lse))
    grad_query, grad_key, grad_value = (
        empty_like_layout(x, x.shape[3]) for x in (query, key, value)
    )
    call.launch("rows", call.query_grid(tail=False), do, dlse, _strided(out), lse, vectors)
    grads = (_strided(grad_key), _strided(grad_value))
    call.launch("key_value", call.key_grid, do, vectors, *grads)
    call.launch("query", call.query_grid(tail=True), do, vectors, _strided(grad_query))
    grad_mask, *grad_tables = (query.new_empty(0) for _ in range(4))
    if mask_requires_grad:
        assert attn_mask is not None
        grad_mask = _mask_gradient(call, attn_mask, do, dlse, vectors)
    if tables_require_grad[0]:
        if relative_index is None:
            grad_tables[0] = _relative_bias_gradient(call, tensors, call_options, do, vectors)
        else:
            grad_tables[0] = _table_gradient(call, relative_bias, do, vectors)
    for i, (kernel, table, grid) in enumerate(
        (
            ("query_bias", query_bias, call.query_grid(tail=False)),
            ("key_bias", key_bias, call.grid_of_keys_and_heads),
        ),
        start=1,
    ):
        if tables_require_grad[i]:
            grad_tables[i] = _gradient_of_rows(call, kernel, table, grid, do, vectors)
    return grad_query, grad_key, grad_value, grad_mask, *grad_tables


def _mask_gradient(
    call: _AttentionCall, attn_mask: Tensor, do: Strided, dlse: Strided | None, vectors: RowVectors
) -> Tensor:
    """Returns the float mask's gradient. Several programs share a long sum; torch adds them up."""
    if attn_mask.numel() == 0:
        return attn_mask.new_empty(attn_mask.shape)
    shape = MaskShape(*(size != 1 for size in attn_mask.shape))
    block = call.configs("mask")[0]
    sizes = (call.sizes.B, call.sizes.H, triton.cdiv(call.sizes.Lq, block.M))
    terms = math.prod(n for n, full in zip(sizes, shape, strict=False) if not full)
    tiles = math.prod(n for n, full in zip(sizes, shape, strict=False) if full)
    tiles *= triton.cdiv(call.sizes.Lk, block.N) if shape.columns else 1
    num_shares, terms_per_share = _shares(tiles, terms)
    grad = attn_mask.new_empty(attn_mask.shape)
    shares = grad
    if num_shares > 1:
        shares = grad.new_empty((num_shares, *grad.shape), dtype=torch.float32)
    grid = (tiles * num_shares,)
    constants = {"shape": shape, "SEVERAL_RUNS": terms_per_share > RUN.value}
    call.launch("mask", lambda meta: grid, do, dlse, vectors, shares, terms_per_share, **constants)
    return grad if num_shares == 1 else shares.sum(0).to(grad.dtype)


def _relative_bias_gradient(
    call: _AttentionCall, tensors: _Tensors, options: _Options, do: Strided, vectors: RowVectors
) -> Tensor:
    """Returns the relative bias's gradient; see ``attention_relative_bias_gradient.py``."""
    table, sizes = tensors.relative_bias, call.sizes
    assert table is not None
    if 0 in (table.numel(), sizes.Lq, sizes.Lk):
        return torch.zeros_like(table)
    # Packed sequences with a lower right diagonal count distances separately; they are summed
    # below.
    apart = call.variant.packed and call.variant.lower_right
    shape = MaskShape(table.shape[0] != 1 or apart, table.shape[1] != 1, False, False)
    M, N = call.configs("relative_bias")[0][:2]
    row_blocks, B, H = triton.cdiv(sizes.Lq, M), sizes.B, sizes.H
    bands = (row_blocks - 1) * (M // N) + triton.cdiv(sizes.Lk, N)
    full = (B if shape.batch else 1, H if shape.heads else 1)
    terms = row_blocks * (1 if shape.batch else B) * (1 if shape.heads else H)
    num_shares, terms_per_share = _shares(bands * math.prod(full), terms)
    tiles = table.new_empty((num_shares, *full, bands, M, N), dtype=torch.float32)
    grid = (bands * math.prod(full) * num_shares,)
    constants = {"shape": shape, "SEVERAL_RUNS": terms_per_share > RUN.value}
    launched = (do, vectors, tiles, terms_per_share)
    call.launch("relative_bias", lambda meta: grid, *launched, **constants)
    sums = sums_by_offset(tiles.sum(0))
    # Each distance's index among the offsets j - i, of which the first is 1 - row_blocks * M.
    places = torch.arange(table.shape[2], device=table.device) - _zero_distance(options)
    places = places + (row_blocks * M - 1)
    if apart:
        cu_seqlens_q, cu_seqlens_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        places = places + (cu_seqlens_k.diff() - cu_seqlens_q.diff())[:, None, None]
    elif call.variant.lower_right:
        places = places + (sizes.Lk - sizes.Lq)
    inside = (places >= 0) & (places < sums.shape[2])
    places = places.clamp(0, sums.shape[2] - 1).expand(*full, -1)
    grad = sums.gather(2, places).masked_fill(~inside, 0)
    return grad.sum_to_size(table.shape).to(table.dtype)


def _table_gradient(
    call: _AttentionCall, table: Tensor | None, do: Strided, vectors: RowVectors
) -> Tensor:
    """Returns the gradient of a table that all rows share; see ``attention_table_gradients.py``."""
    assert table is not None
    if not call.variant.indexed:
        return torch.zeros_like(table)
    sizes, (M, N) = call.sizes, call.configs("table")[0][:2]
    # Packed sequences with a lower right diagonal count distances separately.
    apart = call.variant.packed and call.variant.lower_right and call.variant.index_by_distance
    shape = MaskShape(table.shape[0] != 1 or apart, table.shape[1] != 1, False, False)
    full = (sizes.B if shape.batch else 1, sizes.H if shape.heads else 1)
    tiles = triton.cdiv(sizes.Lq, M) * triton.cdiv(sizes.Lk, N)
    terms = (1 if shape.batch else sizes.B) * (1 if shape.heads else sizes.H)
    groups, terms_per_group = _shares(tiles * math.prod(full), terms)
    num_shares, groups_per_share = _shares(math.prod(full), tiles * groups)
    columns = table.shape[2]
    sums = table.new_zeros((num_shares, *full, columns), dtype=torch.float32)
    grid = (math.prod(full) * num_shares,)
    constants = {"shape": shape, "SEVERAL_RUNS": terms_per_group > RUN.value}
    launched = (do, vectors, sums, columns, groups, terms_per_group, groups_per_share)
    call.launch("table", lambda meta: grid, *launched, **constants)
    return sums.sum(0).sum_to_size(table.shape).to(table.dtype)


def _gradient_of_rows(
    call: _AttentionCall,
    kernel: str,
    table: Tensor | None,
    grid: Grid,
    do: Strided,
    vectors: RowVectors,
) -> Tensor:
    """Returns the gradient of the tables of all queries, or of all keys."""
    assert table is not None
    grad = table.new_zeros(table.shape, dtype=torch.float32)
    if call.variant.indexed:
        call.launch(kernel, grid, do, vectors, _strided(grad))
    return grad.to(table.dtype)


def _shares(tiles: int, terms: int) -> tuple[int, int]:
    """Returns the number of shares of the sum of a tile's terms, and the terms of a share."""
    terms_per_share = triton.cdiv(terms, max(_MASK_PROGRAMS // max(tiles, 1), 1))
    return triton.cdiv(terms, terms_per_share) if terms else 1, terms_per_share


def _zero_distance(options: _Options) -> int:
    """Returns the place of distance 0 in the relative bias."""
    return (options.max_seqlen_k if options.lower_right else options.max_seqlen_q) - 1


def _check_backward(
    tensors: _Tensors,
    options: _Options,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Raises ValueError unless the tensors of a backward still fit one call."""
    query, value, attn_mask, seed = tensors.query, tensors.value, tensors.attn_mask, tensors.seed
    relative_bias, cu_seqlens_q = tensors.relative_bias, tensors.cu_seqlens_q
    index = tensors.relative_index
    (B, H, Lq, E), (Hkv, Lk, Ev) = query.shape, value.shape[1:]
    shapes: list[Sequence[int]] = [(B, H, Lq, E), (B, Hkv, Lk, E), (B, Hkv, Lk, Ev)]
    if cu_seqlens_q is not None:
        B, Lq, Lk = cu_seqlens_q.numel() - 1, options.max_seqlen_q, options.max_seqlen_k
    if attn_mask is None:
        shapes.append(())
    else:
        sizes = zip(attn_mask.shape, (B, H, Lq, Lk), strict=True)
        shapes.append([1 if given == 1 else full for given, full in sizes])
    if relative_bias is None:
        shapes.append(())
    else:
        full_or_one = zip(relative_bias.shape, (B, H), strict=False)
        leading = [1 if given == 1 else full for given, full in full_or_one]
        distances = max(Lq + Lk - 1, 0)
        shapes.append([*leading, distances if index is None else relative_bias.shape[2]])
    if index is None:
        shapes += [(), (), ()]
    else:
        columns = {t.shape[-1] for t in tensors[4:7] if t is not None}
        if len(columns) != 1:
            raise ValueError(f"relative_index: expected tables of as many columns; got {columns}")
        (n,) = columns
        shapes += [(*query.shape[:3], n), (query.shape[0], H, value.shape[2], n)]
        shapes.append((max(Lq + Lk - 1, 0),) if index.dim() == 1 else (Lq, Lk))
    shapes += [(B,), (B,), (B + 1,), (B + 1,), seed_shape(seed)]
    for name, t, shape in zip(_Tensors._fields, tensors, shapes, strict=True):
        check_shape(name, t, shape)
    check_shape("grad_out", grad_out, (*query.shape[:3], Ev))
    check_shape("out", out, grad_out.shape)
    check_shape("logsumexp", lse, query.shape[:3])
    check_shape("grad_logsumexp", grad_lse, query.shape[:3])


# A call ------------------------------------------------------------------------------------------


class _Tensors(NamedTuple):
    """The tensors of the op ``attention_forward``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    relative_bias: Tensor | None
    query_bias: Tensor | None
    key_bias: Tensor | None
    relative_index: Tensor | None
    key_lengths: Tensor | None
    diagonal: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None


class _Options(NamedTuple):
    """The op's other arguments."""

    max_seqlen_q: int
    max_seqlen_k: int
    scale: float | None
    softcap: float | None
    window_left: int | None
    window_right: int | None
    lower_right: bool
    dropout_p: float


_KERNELS = {
    "forward": attention_forward_kernel,
    "chunk": attention_chunk_kernel,
    "join": attention_join_kernel,
    "rows": attention_backward_rows_kernel,
    "key_value": attention_backward_key_value_kernel,
    "query": attention_backward_query_kernel,
    "mask": attention_backward_mask_kernel,
    "relative_bias": attention_backward_relative_bias_kernel,
    "table": attention_backward_table_kernel,
    "query_bias": attention_backward_query_bias_kernel,
    "key_bias": attention_backward_key_bias_kernel,
}

Grid = Callable[[dict[str, Any]], tuple[int]]


class _AttentionCall:
    """A call of the operator, converted to the kernels' arguments."""

    def __init__(self, tensors: _Tensors, options: _Options) -> None:
        self.query = tensors.query
        self.sizes = _sizes(tensors, options)
        inputs = _inputs(tensors, options, with_seed=self.sizes.threshold > 0)
        self.variant = _variant(tensors, options, inputs, self.sizes)
        self.inputs = Inputs._make(ABSENT if t is None else t for t in inputs)

    def is_for_decoding(self) -> bool:
        """Whether the forward is computed in chunks of keys; the batch doesn't matter.

        For packed sequences the bounds on their lengths decide, which the host has.
        """
        sizes = self.sizes
        few = sizes.Lq <= _FEW_QUERIES and sizes.Lq * sizes.group <= _FEW_ROWS
        return few and sizes.Lk > _CHUNK and not self.variant.dropout

    def query_grid(self, tail: bool) -> Grid:
        """The grid over blocks of queries; ``tail`` adds packed tokens past the last sequence."""
        sequences = self.sizes.B + (tail and self.variant.packed)
        return lambda meta: (
            triton.cdiv(self.sizes.Lq, meta["block"].M) * self.sizes.H * sequences,
        )

    def key_grid(self, meta: dict[str, Any]) -> tuple[int]:
        """The grid over blocks of keys, with packed tokens past the last sequence."""
        blocks = triton.cdiv(self.sizes.Lk, meta["block"].N)
        return (blocks * (self.sizes.H // self.sizes.group) * (self.sizes.B + self.variant.packed),)

    def grid_of_keys_and_heads(self, meta: dict[str, Any]) -> tuple[int]:
        """The grid over blocks of keys, for each query head."""
        return (triton.cdiv(self.sizes.Lk, meta["block"].N) * self.sizes.H * self.sizes.B,)

    def workload(self, kernel: str) -> Workload:
        """Returns the properties of a launch that decide its configurations."""
        variant = self.variant
        head_dim = max(64, variant.BLOCK_E, variant.BLOCK_EV)
        unit = multiplying_unit(self.query.device, self.query.dtype)
        biased = variant.masked or variant.relative_bias or variant.indexed
        extras = biased or variant.dropout or variant.softcap != 0
        return Workload(kernel, unit, head_dim, extras=extras)

    def configs(self, kernel: str) -> tuple[Config, ...]:
        return configs(self.workload(kernel))

    def launch(self, kernel: str, grid: Grid, *args: Any, **constants: Any) -> None:
        """Launches a kernel of ``_KERNELS``; its ``args`` come between the inputs and the sizes."""
        workload = self.workload(kernel)
        arguments = (self.inputs, *args, *self.sizes)
        constants = {"variant": self.variant, "enable_fp_fusion": False} | constants
        first, *others = configs(workload)
        with torch.cuda.device_of(self.query):
            if _AUTOTUNE and others:
                _tuner(workload)[grid](*arguments, **constants)
            else:
                _KERNELS[kernel][grid](*arguments, **constants, **launch_options(first))


@functools.cache
def _tuner(workload: Workload) -> Any:
    """Times a workload's configurations once for each variant, and keeps the fastest."""
    candidates = [
        triton.Config({"block": options.pop("block")}, **options)
        for options in map(launch_options, configs(workload))
    ]
    return triton.autotune(candidates, key=["variant"])(_KERNELS[workload.kernel])


def _inputs(tensors: _Tensors, options: _Options, with_seed: bool) -> Inputs:
    """Returns the tensors that every kernel reads; a boolean mask as bytes."""
    mask, relative_bias = tensors.attn_mask, tensors.relative_bias
    index, n = tensors.relative_index, 0
    tables = (relative_bias, tensors.query_bias, tensors.key_bias)
    if index is None:
        tables = (None, None, None)
    else:
        relative_bias = None
        lengths = (options.max_seqlen_q, options.max_seqlen_k)
        if 0 in (*lengths, *(t.numel() for t in tables if t is not None)):  # no pair reads a table
            index, tables = None, (None, None, None)
        else:
            tables = (_with_rows(tables[0]), _with_rows(tables[1]), _with_rows(tables[2]))
            n = next(t.shape[-1] for t in tables if t is not None)
    if relative_bias is not None and relative_bias.numel() > 0:
        relative_bias = relative_bias.float().contiguous()[:, :, _zero_distance(options) :]
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    return Inputs(
        query=_strided(tensors.query),
        key=_strided(tensors.key),
        value=_strided(tensors.value),
        attn_mask=None if mask is None else _strided(mask),
        relative_bias=None if relative_bias is None else _strided(relative_bias),
        table=None if tables[0] is None else _strided(tables[0].unsqueeze(2)),
        query_bias=None if tables[1] is None else _strided(tables[1]),
        key_bias=None if tables[2] is None else _strided(tables[2]),
        relative_index=None if index is None else _index(index, n, options),
        key_lengths=_contiguous(tensors.key_lengths),
        diagonal=_contiguous(tensors.diagonal),
        cu_seqlens_q=_contiguous(tensors.cu_seqlens_q),
        cu_seqlens_k=_contiguous(tensors.cu_seqlens_k),
        seed=tensors.seed if with_seed else None,
    )


def _index(index: Tensor, n: int, options: _Options) -> Strided:
    """Returns an index in the form that the kernels read, with all numbers inside n columns."""
    index = index.clamp(0, n - 1).to(torch.int32)
    if index.dim() == 1:
        return Strided(index[_zero_distance(options) :], (-1, 1))
    return Strided(index, index.stride())


def _sizes(tensors: _Tensors, options: _Options) -> Sizes:
    """Returns the run-time numbers of a call; see ``Sizes``."""
    query, key, value, attn_mask = tensors[:4]
    diagonal, cu_seqlens_q = tensors.diagonal, tensors.cu_seqlens_q
    B, H, total_q, E = query.shape
    total_k = value.shape[2]
    max_seqlen_q, max_seqlen_k = options.max_seqlen_q, options.max_seqlen_k
    if cu_seqlens_q is not None:
        B = cu_seqlens_q.numel() - 1
        # No sequence is longer than the total, but a mask may be sized for a longer one.
        if attn_mask is None or attn_mask.shape[2] == 1:
            max_seqlen_q = min(max_seqlen_q, total_q)
        if attn_mask is None or attn_mask.shape[3] == 1:
            max_seqlen_k = min(max_seqlen_k, total_k)
        # Programs are needed for tokens past the last sequence even if all sequences are empty.
        max_seqlen_q, max_seqlen_k = max(max_seqlen_q, 1), max(max_seqlen_k, 1)
    scale = max(E, 1) ** -0.5 if options.scale is None else options.scale
    # A bound farther than this leaves out all pairs, or none. A diagonal may move it nearer.
    farthest = max(total_q, total_k) if diagonal is None else reference.FARTHEST // 2
    return Sizes(
        B=B,
        H=H,
        group=max(H // max(key.shape[1], 1), 1),
        Lq=max_seqlen_q,
        Lk=max_seqlen_k,
        total_q=total_q,
        total_k=total_k,
        left=max(-farthest, min(options.window_left or 0, farthest)),
        right=max(-farthest, min(options.window_right or 0, farthest)),
        scale=ctypes.c_float(scale).value,  # 0 or ∞ outside float32's range
        scale_log2=ctypes.c_float(scale * math.log2(math.e)).value,
        threshold=philox.threshold(options.dropout_p),
        keep_scale=philox.keep_scale(options.dropout_p),
    )


def _variant(tensors: _Tensors, options: _Options, inputs: Inputs, sizes: Sizes) -> Variant:
    """Returns the compile-time parameters of a call; see ``Variant``."""
    query, key, value, attn_mask = tensors.query, tensors.key, tensors.value, tensors.attn_mask
    E, Ev = query.shape[3], value.shape[3]
    mask = inputs.attn_mask
    bool_mask = attn_mask is not None and attn_mask.dtype == torch.bool
    float_mask = attn_mask is not None and not bool_mask
    mask_rows = mask is not None and mask.strides[2] != 0
    mask_columns = mask is not None and mask.strides[3] != 0
    left_bound, right_bound = options.window_left is not None, options.window_right is not None
    softcap = options.softcap or 0.0
    relative_bias, indexed = inputs.relative_bias is not None, inputs.relative_index is not None
    by_distance = tensors.relative_index is not None and tensors.relative_index.dim() == 1
    by_distance = indexed and by_distance
    large_scale = abs(sizes.scale) > reference.LARGE_SCALE
    large_scores = float_mask or relative_bias or indexed or softcap != 0 or large_scale
    return Variant(
        dtype=str(query.dtype),
        E=E,
        Ev=Ev,
        BLOCK_E=max(16, triton.next_power_of_2(E)),
        BLOCK_EV=max(16, triton.next_power_of_2(Ev)),
        bool_mask=bool_mask,
        float_mask=float_mask,
        masked=mask is not None,
        mask_rows=mask_rows,
        mask_columns=mask_columns,
        mask_runs=attn_mask is not None and attn_mask.shape[3] % MASK_RUN.value == 0,
        trim_by_mask=mask_columns and (bool_mask or not mask_rows),
        relative_bias=relative_bias,
        indexed=indexed,
        table=inputs.table is not None,
        query_bias=inputs.query_bias is not None,
        key_bias=inputs.key_bias is not None,
        index_by_distance=by_distance,
        softcap=softcap,
        large_scores=large_scores,
        scores_in_nats=large_scores or not sizes.scale > 0,  # true for NaN
        key_lengths=tensors.key_lengths is not None,
        packed=tensors.cu_seqlens_q is not None,
        left_bound=left_bound,
        right_bound=right_bound,
        lower_right=options.lower_right
        and (left_bound or right_bound or relative_bias or by_distance),
        diagonal=tensors.diagonal is not None and (left_bound or right_bound),
        selective=mask is not None or relative_bias or indexed or left_bound or right_bound,
        dropout=sizes.threshold > 0,
        placed=tensors.seed is not None and philox.is_placed(tensors.seed),
        grouped=key.shape[1] != query.shape[1],
    )


def _strided(x: Tensor) -> Strided:
    """Returns a tensor with its strides, 0 along dimensions of size 1."""
    # The stride of a dimension of size 1 is arbitrary. 0 broadcasts the dimension, and there are
    # fewer kinds of strides for which kernels are compiled.
    return Strided(x, tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)))


def _with_rows(x: Tensor | None) -> Tensor | None:
    """Returns a tensor whose last dimension is contiguous."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
