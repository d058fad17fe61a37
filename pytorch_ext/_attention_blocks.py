"""Blocks of attention: some queries of one process and some keys of another, and their sums.

A block is a call of the operator, in which distances, masks and dropout are those of the whole
sequence. The outputs of blocks are joined by their logsumexp. Their gradients are added up.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse import backends
from trifuse._sequence_parts import Layout
from trifuse.ops import _draws
from trifuse.ops._alibi import alibi_bias
from trifuse.ops._attention_arguments import CheckedAttention, prepare, prepare_varlen
from trifuse.ops._modes import without_autocast
from trifuse.ops.attention import (
    attend,
    attention_gradients,
    has_large_scores,
    normalises_again,
    with_seed,
)
from trifuse.reference.philox import placed_units
from trifuse.reference.results import accumulation_dtype


class Call(NamedTuple):
    """The arguments of a call that are the same in every block."""

    layout: Layout
    scale: float | None
    enable_gqa: bool
    softcap: float | None
    left: int | None
    right: int | None
    bounds: tuple[int, ...]  # where sequences begin and end: (0, L), or those of cu_seqlens
    longest: int  # a bound on their lengths, for the place of distance 0 in a table
    packed: bool
    choice: backends.Choice  # the backend of the forward and the backward
    key_lengths: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None  # with the place of this process's batch and heads


class Operands(NamedTuple):
    """The tensors of a call, or their gradients, or what a block needs of either."""

    query: Any  # a Tensor; among gradients, None where there is none
    key: Any
    value: Any
    mask: Tensor | None
    table: Tensor | None  # relative_bias
    slopes: Tensor | None
    query_bias: Tensor | None = None  # tables of each query and of each key, read by the index
    key_bias: Tensor | None = None
    relative_index: Tensor | None = None

    def of_keys(self) -> list[Tensor]:
        """Returns the tensors of each key, which go from process to process together."""
        return [t for t in (self.key, self.value, self.key_bias) if t is not None]

    def with_keys(self, tensors: Sequence[Tensor]) -> Operands:
        """Returns the operands with those of another process's keys."""
        key, value, *others = tensors
        return self._replace(key=key, value=value, key_bias=others[0] if others else None)


# Blocks -----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Attention of some of the local queries to some of a part's keys.

    They belong to one sequence, or to several packed sequences. In the latter case the block starts
    at the first token of each sequence, and its queries and keys are the same tokens.
    """

    rows: slice  # of the local queries
    columns: slice  # of the part's keys
    first_query: int  # their positions in their sequence
    first_key: int
    sequence: int = 0  # the number of the packed sequence, or of the first
    cu_seqlens: tuple[int, ...] = ()  # where several sequences begin

    @property
    def sequences(self) -> slice:
        return slice(self.sequence, self.sequence + max(len(self.cu_seqlens) - 1, 1))

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys, at most, of a sequence."""
        if self.cu_seqlens:
            each = itertools.pairwise(self.cu_seqlens)
            longest = max(after - before for before, after in each)
            return longest, longest
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def least_distance(self) -> int:
        """The distance of the first key from the last query."""
        return self.first_key - self.first_query - self.lengths[0] + 1


def blocks(call: Call, owner: int, length: int) -> Iterator[Block]:
    """Yields the blocks that have pairs; ``owner`` is the process that the keys come from."""
    layout, bounds = call.layout, call.bounds
    size = length // layout.per_part
    for i, query_piece in enumerate(layout.pieces(layout.rank)):
        for j, key_piece in enumerate(layout.pieces(owner)):
            # Tokens of the whole, and how far those of this process lie from them.
            queries = range(query_piece * size, (query_piece + 1) * size)
            keys = range(key_piece * size, (key_piece + 1) * size)
            to_rows, to_columns = i * size - queries.start, j * size - keys.start
            # Sequences with tokens in both pieces. If the pieces differ, only one sequence spans
            # both.
            first = bisect_right(bounds, max(queries.start, keys.start)) - 1
            last = min(bisect_left(bounds, min(queries.stop, keys.stop)), len(bounds) - 1)
            # Several sequences that begin in one piece form one block; every other sequence is a
            # block.
            begun = first if bounds[first] == queries.start else first + 1
            if query_piece != key_piece or last - begun < 2:
                begun = last
            for number in range(first, begun):
                yield from _block_of_sequence(call, number, queries, keys, to_rows, to_columns)
            if begun < last:
                start, stop = bounds[begun], min(bounds[last], queries.stop)
                if start == stop:
                    continue  # all of them are empty
                rows, columns = (slice(start + to, stop + to) for to in (to_rows, to_columns))
                starts = tuple(min(b, stop) - start for b in bounds[begun : last + 1])
                yield Block(rows, columns, 0, 0, begun, starts)


def _block_of_sequence(
    call: Call, number: int, queries: range, keys: range, to_rows: int, to_columns: int
) -> Iterator[Block]:
    """Yields the block of one sequence's tokens, if it has pairs."""
    start, stop = call.bounds[number : number + 2]
    first_query, first_key = max(start, queries.start), max(start, keys.start)
    last_query, last_key = min(stop, queries.stop) - 1, min(stop, keys.stop) - 1
    too_late = call.right is not None and first_key - last_query > call.right
    too_early = call.left is not None and first_query - last_key > call.left
    if last_query < first_query or too_late or too_early:
        return
    yield Block(
        slice(first_query + to_rows, last_query + 1 + to_rows),
        slice(first_key + to_columns, last_key + 1 + to_columns),
        first_query - start,
        first_key - start,
        number,
    )


def _needed(call: Call, block: Block, given: Operands) -> Operands:
    """Returns views of what a block needs."""
    rows, columns = block.rows, block.columns
    query, key, value, mask, table, slopes, query_bias, key_bias, index = given
    # A mask and an index of pairs have the columns of the whole sequence.
    all_keys = slice(block.first_key, block.first_key + block.lengths[1])
    if mask is not None:
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        mask = mask[..., all_keys] if mask.shape[3] > 1 else mask
    first = block.least_distance + call.longest - 1
    distances = slice(first, first + sum(block.lengths) - 1)
    if table is not None:
        table = _of_sequences(call, block, table)
        table = table[..., distances] if index is None else table
    if index is not None and index.dim() == 1:
        index = index[distances]
    elif index is not None:
        # Its rows are those of a packed sequence, or those of this process.
        first = block.first_query
        index = index[slice(first, first + block.lengths[0]) if call.packed else rows, all_keys]
    return Operands(
        query[:, :, rows],
        key[:, :, columns],
        value[:, :, columns],
        mask,
        table,
        None if slopes is None else _of_sequences(call, block, slopes),
        None if query_bias is None else query_bias[:, :, rows],
        None if key_bias is None else key_bias[:, :, columns],
        index,
    )


def _of_sequences(call: Call, block: Block, t: Tensor) -> Tensor:
    return t[block.sequences] if call.packed and t.shape[0] > 1 else t


def _bias(block: Block, table: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    """Returns a block's biases by distance, (B, H, distances), or the table of an index."""
    if slopes is None:
        return table
    alibi = alibi_bias(slopes, sum(block.lengths) - 1, -block.least_distance)
    return alibi if table is None else table + alibi


def _checked(call: Call, block: Block, given: Operands, bias: Tensor | None) -> CheckedAttention:
    """Returns a block as a call of the operator; ``given`` has all that it needs but the bias."""
    query, key, value, mask, _, _, query_bias, key_bias, index = given
    if block.cu_seqlens:  # as varlen_attention takes them
        query_bias, key_bias = (
            None if t is None else t[0].transpose(0, 1) for t in (query_bias, key_bias)
        )
    bounded = call.left is not None or call.right is not None
    options: dict[str, Any] = {
        "attn_mask": mask,
        "dropout_p": call.dropout_p,
        "is_causal": False,
        "scale": call.scale,
        "enable_gqa": call.enable_gqa,
        "window": (call.left, call.right) if bounded else None,
        "diagonal": block.first_query - block.first_key if bounded else None,
        "softcap": call.softcap,
        "sinks": None,
        "relative_bias": bias,
        "query_bias": query_bias,
        "key_bias": key_bias,
        "relative_index": index,
        "alibi_slopes": None,
        "choice": call.choice,
    }
    with without_autocast(), _seeded(call, block, query.shape[1]):
        if block.cu_seqlens:
            packed = packed_arguments((query, key, value), block.cu_seqlens, block.lengths)
            checked = prepare_varlen(*packed, **options)
        else:
            lengths = call.key_lengths
            if lengths is not None:
                lengths = (lengths - block.first_key).clamp(0, key.shape[2])
            checked = prepare(query, key, value, key_lengths=lengths, **options)
        return with_seed(checked)


def packed_arguments(
    tensors: Sequence[Tensor], bounds: Sequence[int], longest: tuple[int, int]
) -> tuple[Any, ...]:
    """Returns the arguments of attention in packed sequences; the tensors are (1, H, tokens, E)."""
    cu_seqlens = torch.tensor(bounds, device=tensors[0].device)
    return (*(t[0].transpose(0, 1) for t in tensors), cu_seqlens, cu_seqlens, *longest)


def _seeded(call: Call, block: Block, heads: int) -> AbstractContextManager[None]:
    """Gives a block the seed of the call, with the block's own place."""
    seed = call.seed
    if seed is None:
        return nullcontext()
    matrix = placed_units(seed, seed.new_tensor([block.sequence * heads]))
    at = seed.new_tensor([block.first_query, block.first_key])
    return _draws.given(torch.cat([seed[:1], matrix, seed[2:-2], at]))


# Sums over blocks -------------------------------------------------------------------------------


class Sum:
    """Attention to the parts so far: their outputs, weighted by exp(logsumexp - highest).

    The highest logsumexp and the sum of the weights are stored separately. If the logsumexp is near
    the lowest finite number, a common value in float masks, adding the logarithm of the sum to it
    would lose that logarithm.
    """

    def __init__(self, query: Tensor, value: Tensor) -> None:
        wide = accumulation_dtype(query.dtype)
        self.dtype = query.dtype
        self.out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=wide)
        self.highest = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
        self.weight = torch.zeros_like(self.highest)

    def attend(self, call: Call, owner: int, given: Operands) -> None:
        """Adds the attention to the keys of one process."""
        for block in blocks(call, owner, self.out.shape[2]):
            needed = _needed(call, block, given)
            bias = _bias(block, needed.table, needed.slopes)
            out, lse = attend(_checked(call, block, needed, bias))
            rows = (slice(None), slice(None), block.rows)
            highest = torch.maximum(self.highest[rows], lse)
            before, now = (_weight(x, highest) for x in (self.highest[rows], lse))
            self.out[rows] *= before.unsqueeze(-1)
            self.out[rows] += now.unsqueeze(-1) * out
            self.weight[rows] = self.weight[rows] * before + now
            self.highest[rows] = highest

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, and two numbers whose sum is the logsumexp."""
        weight = self.weight.masked_fill(self.weight == 0, 1)  # in a row without keys
        self.out /= weight.unsqueeze(-1)
        return self.out.to(self.dtype), self.highest, weight.log()


def _weight(lse: Tensor, whole: Tensor) -> Tensor:
    """Returns exp(lse - whole); 0 in a row without keys."""
    return torch.where(lse == -torch.inf, 0.0, (lse - whole).exp())


class _Results(NamedTuple):
    """The attention of some rows, and its gradients."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    def of_rows(self, rows: slice) -> _Results:
        return _Results._make(None if t is None else t[:, :, rows] for t in self)


class Gradients:
    """The backward of attention to one part after another.

    A block's weights follow from its scores and the logsumexp of all keys. So its forward is
    computed again only where the operator would normalise the weights by the block's own keys.
    """

    def __init__(
        self,
        call: Call,
        needs: Sequence[bool],
        given: Operands,
        out: Tensor,
        highest: Tensor,
        log_weight: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
    ) -> None:
        self.call, self.given, self.needs = call, given, tuple(needs)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        lse = highest + log_weight
        self.whole = _Results(out, lse, grad_out, grad_lse)
        self.highest, self.log_weight = highest, log_weight
        self.wide = accumulation_dtype(given.query.dtype)
        # The caller keeps the sums of the keys' gradients. The index stays, because _needed cuts a
        # table by distance only where there is no index.
        sums = (
            self.zeros(t) if t is not None and need else None
            for t, need in zip(given, needs, strict=True)
        )
        self.sums = Operands._make(sums)._replace(
            query=self.zeros(given.query),
            key=None,
            value=None,
            key_bias=None,
            relative_index=given.relative_index,
        )
        biased = any(t is not None and t.is_floating_point() for t in given[3:])
        large = has_large_scores(biased, call.scale, call.softcap)
        self.again = normalises_again(call.choice, lse, large, lse.is_cuda)
        of_mask = self.sums.mask
        if of_mask is not None and of_mask.shape[3] == 1:
            of_mask += self._of_row_mask(of_mask.shape)

    def _of_row_mask(self, shape: torch.Size) -> Tensor:
        """Returns the gradient of a mask that all keys share.

        The mask shifts whole rows, which changes their logsumexp and nothing else. So its gradient
        is that of the logsumexp. A row with a NaN gets NaN, and a row without keys gets 0.
        """
        out, lse, grad_out, grad_lse = self.whole
        rows = lse + (grad_out.to(self.wide) * out).sum(-1)
        found = rows * 0 if grad_lse is None else grad_lse + rows * 0
        found = found.masked_fill(lse == -torch.inf, 0)
        return found.double().unsqueeze(-1).sum_to_size(shape)

    def zeros(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t, dtype=self.wide)

    def add(self, owner: int, of_keys: Sequence[Tensor], sums_of_keys: Sequence[Tensor]) -> None:
        """Adds one part's gradients.

        Args:
            of_keys: the part's tensors of each key, as :meth:`Operands.of_keys` has them.
            sums_of_keys: the gradients of these, to which terms are added.
        """
        call = self.call
        given, sums = self.given.with_keys(of_keys), self.sums.with_keys(sums_of_keys)
        for block in blocks(call, owner, self.whole.lse.shape[2]):
            found = self._of_block(block, _needed(call, block, given))
            for total, grad in zip(_needed(call, block, sums), found, strict=True):
                if grad is not None:
                    assert total is not None
                    total += grad

    def _of_block(self, block: Block, given: Operands) -> Operands:
        """Returns a block's gradients; None for those that are not needed."""
        table, slopes = (
            None if t is None else t.detach().requires_grad_(need)
            for t, need in zip(given[4:6], self.needs[4:6], strict=True)
        )
        with torch.enable_grad():
            bias = _bias(block, table, slopes)
        checked = _checked(self.call, block, given, None if bias is None else bias.detach())
        of_mask = self.sums.mask is not None and self.sums.mask.shape[3] > 1
        whole = self.whole.of_rows(block.rows)
        # The operator's gradient of a mask with one column is a sum over all keys.
        if self.again or (of_mask and block.lengths[1] == 1):
            whole = self._of_block_alone(checked, block.rows, whole)
        of_bias_needed = bias is not None and bias.requires_grad
        needs = (*self.needs[:3], of_mask, of_bias_needed, *self.needs[6:8])
        grads = attention_gradients(checked, *whole, needs)
        of_query, of_key, of_value, of_mask_rows, of_bias, of_query_bias, of_key_bias = (
            grad if need else None for grad, need in zip(grads, needs, strict=True)
        )
        of_table = of_slopes = None
        if bias is not None and bias.requires_grad:
            leaves = [t for t in (table, slopes) if t is not None and t.requires_grad]
            found = list(torch.autograd.grad([bias], leaves, [of_bias]))
            of_slopes = found.pop() if slopes is not None and slopes.requires_grad else None
            of_table = found.pop() if found else None
        return Operands(
            of_query,
            of_key,
            of_value,
            of_mask_rows,
            of_table,
            of_slopes,
            of_query_bias,
            of_key_bias,
        )

    def _of_block_alone(self, checked: CheckedAttention, rows: slice, whole: _Results) -> _Results:
        """Returns the attention of a block to its own keys, and the gradients of that.

        With w the share of a block in the softmax, the output is the sum of w · out over blocks.
        """
        out, lse = attend(checked)
        share = _weight(lse, self.highest[:, :, rows]) * (-self.log_weight[:, :, rows]).exp()
        grad_out = whole.grad_out.to(self.wide) * share.unsqueeze(-1)
        grad_lse = (grad_out * (out.to(self.wide) - whole.out)).sum(-1)
        if whole.grad_lse is not None:
            grad_lse += share * whole.grad_lse
        return _Results(out, lse, grad_out.to(out.dtype), grad_lse)

    def results(self, sums_of_keys: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Returns the gradients of a Function's arguments."""
        found = self.sums.with_keys(sums_of_keys)
        return (
            None,
            *(
                g.to(t.dtype) if need and g is not None and t is not None else None
                for g, t, need in zip(found, self.given, self.needs, strict=True)
            ),
        )
