"""Attention over sequences that are split between processes.

The queries of each process attend to one process's keys after another. A part of the queries and a
part of the keys meet in blocks: calls of the operators, in which distances, masks and dropout are
those of the whole sequence. The blocks' outputs are joined by their logsumexp.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trifuse import _meshes, backends
from trifuse._sequence_parts import Layout, Travel, all_gather, joined, reduce_scatter, swap
from trifuse.ops import _checks, _draws
from trifuse.ops._alibi import alibi_bias
from trifuse.ops._checks import fail
from trifuse.ops._modes import without_autocast
from trifuse.ops._sinks import join_sinks
from trifuse.ops.attention import (
    CheckedAttention,
    attend,
    attention_gradients,
    band_of,
    check_max_seqlen,
    check_scale,
    check_sinks,
    check_sizes,
    check_softcap,
    check_tensors,
    choose,
    mask_to_4d,
    normalises_again,
    prepare,
    prepare_varlen,
    relative_bias_to_3d,
    scaled_dot_product_attention,
    slopes_to_2d,
    varlen_attention,
    with_seed,
)
from trifuse.reference.philox import draw_seed, is_placed, placed_units
from trifuse.reference.results import accumulation_dtype

Method = Literal["ring", "all_gather", "all_to_all"]
_METHODS = get_args(Method)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mesh: DeviceMesh,
    method: Method = "ring",
    balanced: bool = False,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this process's queries to the keys of all processes.

    Liu et al., "Ring Attention with Blockwise Transformers" (2023): keys and values go round the
    processes, and the attention to each part is joined by its logsumexp. Query and key positions
    are those in the whole sequence. With n processes, a process holds O(L / n) tokens at a time.

    Args:
        query: (B, H, L / n, E), this process's part: see :func:`shard_sequence`. With
            ``cu_seqlens``, (T / n, H, E), a part of T tokens.
        key: (B, Hkv, L / n, E), or (T / n, Hkv, E).
        value: (B, Hkv, L / n, Ev), or (T / n, Hkv, Ev).
        attn_mask: this process's rows for all keys, broadcastable to (B, H, L / n, L), the columns
            in the order of the whole sequence. Not beside ``cu_seqlens``.
        dropout_p: probability of dropping a weight, drawn from the first process's generator. The
            call drops what one process drops. But for ``method="all_to_all"``, pieces must be
            multiples of 8; a cut inside a packed sequence must lie at a multiple of 8 from its
            start.
        is_causal, scale, enable_gqa, window, softcap, return_lse: as in
            :func:`trifuse.scaled_dot_product_attention`. ``is_causal`` is a bool.
        mesh: one dimension of a mesh: the processes among which sequences are split.
        method: "ring" sends the keys and values to the next process while it attends to the last
            received; "all_gather" brings all keys to every process at once, in O(L) memory;
            "all_to_all" gives each process all tokens of H / n heads (Jacobs et al., "DeepSpeed
            Ulysses", 2023), for which n must divide H and Hkv.
        balanced: whether the parts are balanced, as :func:`shard_sequence` makes them.
        key_lengths: int32 or int64 (B,), lengths in the whole sequence, the same in every process.
        cu_seqlens: int32 or int64 (N + 1,), where each of N sequences begins among T tokens packed
            end to end, as in :func:`trifuse.varlen_attention`; the same in every process. Its
            values are read, so that a GPU waits. Pieces are cut at equal numbers of tokens.
        max_seqlen: an upper bound on the lengths of packed sequences. Default: T.
        sinks: (H,), as in :func:`trifuse.scaled_dot_product_attention`: in each row once.
        relative_bias, alibi_slopes: as in :func:`trifuse.scaled_dot_product_attention`, the same in
            every process: a table is of the distances in whole sequences, 2 L - 1, or 2
            ``max_seqlen`` - 1 for packed ones.

    Returns:
        (B, H, L / n, Ev), and with ``return_lse`` the logsumexp, (B, H, L / n); with ``cu_seqlens``
        (T / n, H, Ev) and (T / n, H). Both are differentiable once.

        The gradient of a tensor that all processes have, as sinks, tables and slopes, and a mask of
        one row, is this process's share: the shares of all processes add up to one process's
        gradient. The gradient of a mask's row is whole, in the process that has the row.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape or value that doesn't fit (``trifuse.ArgumentError``).
        NotImplementedError: a mask or ``key_lengths`` beside ``cu_seqlens``; dropout with pieces
            that 8 does not divide.
    """
    layout = Layout(mesh, balanced)
    if method not in _METHODS:
        raise fail("method", " or ".join(map(repr, _METHODS)), repr(method))
    packed = cu_seqlens is not None
    _check_parts(query, key, value, attn_mask, layout, packed)
    query, key, value, attn_mask = check_tensors(query, key, value, attn_mask)
    if packed:
        query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    _checks.flag("enable_gqa", enable_gqa)
    _checks.flag("return_lse", return_lse)
    is_causal = _checks.flag("is_causal", is_causal)
    check_sizes(query, key, value, enable_gqa)
    dropout_p = _checks.probability("dropout_p", dropout_p)
    B, L = query.shape[0], layout.parts * query.shape[2]
    bounds: tuple[int, ...] = (0, L)
    longest = L
    if cu_seqlens is not None:
        for name, given in (("attn_mask", attn_mask), ("key_lengths", key_lengths)):
            if given is not None:
                raise NotImplementedError(f"{name}: not beside cu_seqlens in ring_attention")
        longest = L if max_seqlen is None else check_max_seqlen("max_seqlen", max_seqlen, query)
        bounds = _bounds_of_sequences(cu_seqlens, query, L, longest)
        B = len(bounds) - 1
    if attn_mask is not None:
        attn_mask = mask_to_4d(attn_mask, query, (*query.shape[:3], L))
    if key_lengths is not None:
        key_lengths = _checks.integers("key_lengths", key_lengths, "(B,)", B, query)
        if key_lengths.device.type == "cpu" and not ((key_lengths >= 0) & (key_lengths <= L)).all():
            raise fail("key_lengths", f"lengths in [0, {L}]", key_lengths.tolist())
    if relative_bias is not None:
        relative_bias = relative_bias_to_3d(relative_bias, query, B, max(2 * longest - 1, 0))
    if alibi_slopes is not None:
        alibi_slopes = slopes_to_2d(alibi_slopes, query, B)
    sinks = check_sinks(sinks, query)
    call = _Call(
        layout,
        max(query.shape[3], 1) ** -0.5 if scale is None else check_scale(scale),
        enable_gqa,
        check_softcap(softcap),
        *_sides(window, is_causal),
        bounds,
        longest,
        packed,
        choose(query, value),
        key_lengths,
        dropout_p,
    )
    operands = _Operands(query, key, value, attn_mask, relative_bias, alibi_slopes)
    if method == "all_to_all":
        out, lse = _by_heads(call, operands)
    else:
        if dropout_p > 0:
            _check_eights(call, query.shape[2] // layout.per_part)
            call = call._replace(seed=_whole_seed(query, B, layout))
        whole = _Ring if method == "ring" else _Gathered
        out, lse = whole.apply(call, *operands)
    if sinks is not None:
        out, lse = join_sinks(out, lse, sinks)
    if packed:
        out, lse = (t[0].transpose(0, 1) for t in (out, lse))
    return (out, lse) if return_lse else out


def _check_parts(
    query: Any, key: Any, value: Any, attn_mask: Any, layout: Layout, packed: bool
) -> None:
    given = (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask))
    for name, t in given:
        if name == "attn_mask" and t is None:
            continue
        _checks.tensor(name, t)
        if type(t) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{name}: expected this process's part, a Tensor; got {type(t)}")
    dims, along = (3, 0) if packed else (4, 2)
    for name, t in given[:3]:
        if t.dim() != dims:
            expected = "(T / n, heads, head_dim)" if packed else "(B, heads, L / n, head_dim)"
            raise fail(name, f"shape {expected}", tuple(t.shape))
        same_batch = packed or t.shape[0] == query.shape[0]
        if t.shape[along] != query.shape[along] or not same_batch:
            raise fail(name, f"batch and length of query's {tuple(query.shape)}", tuple(t.shape))
        if t.shape[along] % layout.per_part:
            raise fail(name, "an even length, as balanced parts have", t.shape[along])


def _bounds_of_sequences(
    cu_seqlens: Tensor, query: Tensor, total: int, longest: int
) -> tuple[int, ...]:
    """Checks the boundaries of packed sequences and reads them."""
    cu_seqlens = _checks.integers("cu_seqlens", cu_seqlens, "(sequences + 1,)", None, query)
    bounds: list[int] = cu_seqlens.tolist()
    steps = [after - before for before, after in itertools.pairwise(bounds)]
    if not bounds or bounds[0] or bounds[-1] > total or any(not 0 <= n <= longest for n in steps):
        expected = f"0 first, no decrease, no step over {longest}, the last at most {total}"
        raise fail("cu_seqlens", expected, bounds)
    return tuple(bounds)


def _sides(window: Any, is_causal: bool) -> tuple[int | None, int | None]:
    """Returns how many keys before and after its own position a query attends to."""
    left, right, _ = band_of(is_causal, window)
    return left, right


class _Call(NamedTuple):
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


class _Operands(NamedTuple):
    """The tensors of a call, or their gradients, or what a block needs of either."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    table: Tensor | None  # relative_bias
    slopes: Tensor | None


# Blocks -----------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Attention of some of the local queries to some of a part's keys.

    They are of one sequence; or of several packed sequences, each with its first tokens, the same
    as queries and as keys.
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


def _blocks(call: _Call, owner: int, length: int) -> Iterator[_Block]:
    """Yields the blocks that have pairs; ``owner`` is the process that the keys come from."""
    layout, bounds = call.layout, call.bounds
    size = length // layout.per_part
    for i, query_piece in enumerate(layout.pieces(layout.rank)):
        for j, key_piece in enumerate(layout.pieces(owner)):
            # Tokens of the whole, and how far those of this process lie from them.
            queries = range(query_piece * size, (query_piece + 1) * size)
            keys = range(key_piece * size, (key_piece + 1) * size)
            to_rows, to_columns = i * size - queries.start, j * size - keys.start
            # Sequences with tokens in both pieces: only one spans two different pieces.
            first = bisect_right(bounds, max(queries.start, keys.start)) - 1
            last = min(bisect_left(bounds, min(queries.stop, keys.stop)), len(bounds) - 1)
            # Several that begin in one piece are one block; each of the others is a block.
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
                yield _Block(rows, columns, 0, 0, begun, starts)


def _block_of_sequence(
    call: _Call, number: int, queries: range, keys: range, to_rows: int, to_columns: int
) -> Iterator[_Block]:
    """Yields the block of one sequence's tokens, if it has pairs."""
    start, stop = call.bounds[number : number + 2]
    first_query, first_key = max(start, queries.start), max(start, keys.start)
    last_query, last_key = min(stop, queries.stop) - 1, min(stop, keys.stop) - 1
    too_late = call.right is not None and first_key - last_query > call.right
    too_early = call.left is not None and first_query - last_key > call.left
    if last_query < first_query or too_late or too_early:
        return
    yield _Block(
        slice(first_query + to_rows, last_query + 1 + to_rows),
        slice(first_key + to_columns, last_key + 1 + to_columns),
        first_query - start,
        first_key - start,
        number,
    )


def _needed(call: _Call, block: _Block, given: _Operands) -> _Operands:
    """Returns views of what a block needs."""
    rows, columns = block.rows, block.columns
    query, key, value, mask, table, slopes = given
    if mask is not None:
        # A mask has the columns of the whole sequence.
        all_keys = slice(block.first_key, block.first_key + block.lengths[1])
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        mask = mask[..., all_keys] if mask.shape[3] > 1 else mask
    if table is not None:
        first = block.least_distance + call.longest - 1
        table = _of_sequences(call, block, table)[..., first : first + sum(block.lengths) - 1]
    return _Operands(
        query[:, :, rows],
        key[:, :, columns],
        value[:, :, columns],
        mask,
        table,
        None if slopes is None else _of_sequences(call, block, slopes),
    )


def _of_sequences(call: _Call, block: _Block, t: Tensor) -> Tensor:
    return t[block.sequences] if call.packed and t.shape[0] > 1 else t


def _bias(block: _Block, table: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    """Returns a block's biases by distance, (B, H, distances)."""
    if slopes is None:
        return table
    alibi = alibi_bias(slopes, sum(block.lengths) - 1, -block.least_distance)
    return alibi if table is None else table + alibi


def _checked(call: _Call, block: _Block, given: _Operands, bias: Tensor | None) -> CheckedAttention:
    """Returns a block as a call of the operator. ``given`` has what it needs, but for the bias."""
    query, key, value, mask, *_ = given
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
        "alibi_slopes": None,
    }
    with without_autocast(), _seeded(call, block, query.shape[1]):
        if block.cu_seqlens:
            packed = _packed_arguments((query, key, value), block.cu_seqlens, block.lengths)
            checked = prepare_varlen(*packed, **options)
        else:
            lengths = call.key_lengths
            if lengths is not None:
                lengths = (lengths - block.first_key).clamp(0, key.shape[2])
            checked = prepare(query, key, value, key_lengths=lengths, **options)
        return with_seed(checked._replace(choice=call.choice))


def _packed_arguments(
    tensors: Sequence[Tensor], bounds: Sequence[int], longest: tuple[int, int]
) -> tuple[Any, ...]:
    """Returns the arguments of attention in packed sequences; the tensors are (1, H, tokens, E)."""
    cu_seqlens = torch.tensor(bounds, device=tensors[0].device)
    return (*(t[0].transpose(0, 1) for t in tensors), cu_seqlens, cu_seqlens, *longest)


# Dropout ----------------------------------------------------------------------------------------


def _whole_seed(query: Tensor, batch: int, layout: Layout) -> Tensor:
    """Draws the seed of a call; the place of this process's batch and heads follows it."""
    place = _draws.place_of_heads(batch, query.shape[1])
    seed = _meshes.broadcast(_draws.draw(query, place), layout.mesh)
    return seed if is_placed(seed) else _draws.with_place(seed, _draws.Place(0))


def _seeded(call: _Call, block: _Block, heads: int) -> AbstractContextManager[None]:
    """Gives a block the seed of the call, with the block's own place."""
    seed = call.seed
    if seed is None:
        return nullcontext()
    matrix = placed_units(seed, seed.new_tensor([block.sequence * heads]))
    at = seed.new_tensor([block.first_query, block.first_key])
    return _draws.given(torch.cat([seed[:1], matrix, seed[2:-2], at]))


def _check_eights(call: _Call, piece: int) -> None:
    """Checks that every block of keys begins at a multiple of 8: eight keys share random bits."""
    cuts = range(piece, piece * call.layout.parts * call.layout.per_part, max(piece, 1))
    starts = [call.bounds[bisect_right(call.bounds, cut) - 1] for cut in cuts]
    if any((cut - start) % 8 for cut, start in zip(cuts, starts, strict=True)):
        raise NotImplementedError(
            "dropout_p: ring_attention drops weights only if pieces are cut at multiples of 8 in "
            f'each sequence; got pieces of {piece} tokens. method="all_to_all" takes any'
        )


# Sums over blocks -------------------------------------------------------------------------------


class _Sum:
    """Attention to the parts so far: their outputs, weighted by exp(logsumexp - highest).

    The highest logsumexp and the sum of the weights are kept apart. Near the lowest finite number,
    a common value in float masks, the logarithm of the sum is lost beside it.
    """

    def __init__(self, query: Tensor, value: Tensor) -> None:
        wide = accumulation_dtype(query.dtype)
        self.dtype = query.dtype
        self.out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=wide)
        self.highest = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
        self.weight = torch.zeros_like(self.highest)

    def attend(self, call: _Call, owner: int, given: _Operands) -> None:
        """Adds the attention to the keys of one process."""
        for block in _blocks(call, owner, self.out.shape[2]):
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


class _Gradients:
    """The backward of attention to one part after another.

    A block's weights follow from its scores and the logsumexp of all keys. So its forward is not
    computed again, but where the operator would normalise the weights by the block's own keys.
    """

    def __init__(
        self,
        call: _Call,
        needs: Sequence[bool],
        given: _Operands,
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
        self.of_query = self.zeros(given.query)
        self.of_others = [
            self.zeros(t) if t is not None and need else None
            for t, need in zip(given[3:], needs[3:], strict=True)
        ]
        biased = any(t is not None and t.is_floating_point() for t in given[3:])
        self.again = normalises_again(call.choice, lse, biased, call.scale)
        of_mask = self.of_others[0]
        if of_mask is not None and of_mask.shape[3] == 1:
            of_mask += self._of_row_mask(of_mask.shape)

    def _of_row_mask(self, shape: torch.Size) -> Tensor:
        """Returns the gradient of a mask that all keys share.

        It shifts whole rows, which changes their logsumexp and nothing else: its gradient is that
        of the logsumexp, or NaN in a row that has one, and 0 in a row without keys.
        """
        out, lse, grad_out, grad_lse = self.whole
        rows = lse + (grad_out.to(self.wide) * out).sum(-1)
        found = rows * 0 if grad_lse is None else grad_lse + rows * 0
        found = found.masked_fill(lse == -torch.inf, 0)
        return found.double().unsqueeze(-1).sum_to_size(shape)

    def zeros(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t, dtype=self.wide)

    def add(self, owner: int, key: Tensor, value: Tensor, of_key: Tensor, of_value: Tensor) -> None:
        """Adds one part's gradients; ``of_key`` and ``of_value`` are of the part's tensors."""
        call = self.call
        given = self.given._replace(key=key, value=value)
        sums = _Operands(self.of_query, of_key, of_value, *self.of_others)
        for block in _blocks(call, owner, self.whole.lse.shape[2]):
            found = self._of_block(block, _needed(call, block, given))
            for total, grad in zip(_needed(call, block, sums), found, strict=True):
                if grad is not None:
                    assert total is not None
                    total += grad

    def _of_block(self, block: _Block, given: _Operands) -> _Operands:
        """Returns a block's gradients; None for those of the mask and biases that have none."""
        table, slopes = (
            None if t is None else t.detach().requires_grad_(need)
            for t, need in zip(given[4:], self.needs[4:], strict=True)
        )
        with torch.enable_grad():
            bias = _bias(block, table, slopes)
        checked = _checked(self.call, block, given, None if bias is None else bias.detach())
        of_mask = self.of_others[0] is not None and self.of_others[0].shape[3] > 1
        whole = self.whole.of_rows(block.rows)
        # The operator's gradient of a mask with one column is a sum over all keys.
        if self.again or (of_mask and block.lengths[1] == 1):
            whole = self._of_block_alone(checked, block.rows, whole)
        of_query, of_key, of_value, grad_mask, grad_bias = attention_gradients(
            checked, *whole, (*self.needs[:3], of_mask, bias is not None and bias.requires_grad)
        )
        of_table = of_slopes = None
        if bias is not None and bias.requires_grad:
            leaves = [t for t in (table, slopes) if t is not None and t.requires_grad]
            found = list(torch.autograd.grad([bias], leaves, [grad_bias]))
            of_slopes = found.pop() if slopes is not None and slopes.requires_grad else None
            of_table = found.pop() if found else None
        return _Operands(
            of_query, of_key, of_value, grad_mask if of_mask else None, of_table, of_slopes
        )

    def _of_block_alone(self, checked: CheckedAttention, rows: slice, whole: _Results) -> _Results:
        """Returns the attention of a block to its own keys, and the gradients of that.

        With w the share of a block in the softmax, the output is the sum of w · out over blocks.
        """
        out, lse = attend(checked)
        share = _weight(lse, self.highest[:, :, rows]) * (-self.log_weight[:, :, rows]).exp()
        grad_out = whole.grad_out.to(self.wide) * share.unsqueeze(-1)
        grad_lse = (grad_out * (out - whole.out)).sum(-1)
        if whole.grad_lse is not None:
            grad_lse += share * whole.grad_lse
        return _Results(out, lse, grad_out.to(out.dtype), grad_lse)

    def results(self, of_key: Tensor, of_value: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of a Function's arguments."""
        found = _Operands(self.of_query, of_key, of_value, *self.of_others)
        return (
            None,
            *(
                g.to(t.dtype) if need and g is not None and t is not None else None
                for g, t, need in zip(found, self.given, self.needs, strict=True)
            ),
        )


# Three ways to bring queries and keys together --------------------------------------------------


def _finish(ctx: Any, call: _Call, given: _Operands, total: _Sum) -> tuple[Tensor, Tensor]:
    """Ends the forward of a Function; returns its results."""
    out, highest, log_weight = total.results()
    ctx.call = call
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given, out, highest, log_weight)
    return out, highest + log_weight


def _begin_backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[_Gradients, Tensor, Tensor]:
    """Begins the backward of a Function; returns the sums of gradients, and its key and value."""
    *operands, out, highest, log_weight = ctx.saved_tensors
    given, needs = _Operands(*operands), ctx.needs_input_grad[1:]
    results = (out, highest, log_weight, grad_out, grad_lse)
    gradients = _Gradients(ctx.call, needs, given, *results)
    return gradients, given.key, given.value


class _Ring(torch.autograd.Function):
    """Keys and values go round. In the backward their gradients follow them."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Any) -> tuple[Tensor, Tensor]:
        layout, given = call.layout, _Operands(*operands)
        total, here = _Sum(given.query, given.value), [given.key, given.value]
        for step in range(layout.parts):
            last = step == layout.parts - 1
            travel = None if last else Travel(layout, here)
            owner = (layout.rank - step) % layout.parts
            total.attend(call, owner, given._replace(key=here[0], value=here[1]))
            if travel is not None:
                here = travel.wait()
        return _finish(ctx, call, given, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of a part begin in the process that first receives its keys. They follow
        the keys, one step behind, and so travel while the next part is computed. After n - 1 steps
        they are back where the keys are from, where those of its own queries wait."""
        gradients, key, value = _begin_backward(ctx, grad_out, grad_lse)
        layout = gradients.call.layout
        here = [key, value]
        own: list[Tensor] = []
        coming: Travel | None = None
        for step in range(layout.parts):
            last = step == layout.parts - 1
            travel = None if last else Travel(layout, here)
            sums = [gradients.zeros(t) for t in here]
            gradients.add((layout.rank - step) % layout.parts, *here, *sums)
            if coming is not None:
                _add(sums, coming.wait())
            if step == 0:
                own = sums
            else:
                coming = Travel(layout, sums)
            if travel is not None:
                here = travel.wait()
        if coming is not None:
            _add(own, coming.wait())
        return gradients.results(*own)


def _add(sums: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    for total, t in zip(sums, more, strict=True):
        total += t


class _Gathered(torch.autograd.Function):
    """Every process holds all keys and values during the call."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Any) -> tuple[Tensor, Tensor]:
        layout, given = call.layout, _Operands(*operands)
        total = _Sum(given.query, given.value)
        keys, values = (all_gather(t, layout) for t in (given.key, given.value))
        for owner in range(layout.parts):
            total.attend(call, owner, given._replace(key=keys[owner], value=values[owner]))
        return _finish(ctx, call, given, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gradients, key, value = _begin_backward(ctx, grad_out, grad_lse)
        layout = gradients.call.layout
        keys, values = (all_gather(t, layout) for t in (key, value))
        sums = [[gradients.zeros(t) for t in x] for x in (keys, values)]
        for owner in range(layout.parts):
            gradients.add(owner, keys[owner], values[owner], sums[0][owner], sums[1][owner])
        return gradients.results(*(reduce_scatter(x, layout) for x in sums))


def _by_heads(call: _Call, given: _Operands) -> tuple[Tensor, Tensor]:
    """Exchanges tokens for heads, computes whole sequences, and exchanges back."""
    query, key, value, mask, table, slopes = given
    layout, n = call.layout, call.layout.parts
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.shape[1] % n:
            raise fail(name, f"a number of heads that {n} divides", t.shape[1])
    H, part = query.shape[1], query.shape[2]
    whole = [layout.in_order(swap(t, layout, 1, 2), 2) for t in (query, key, value)]
    options: dict[str, Any] = {
        "dropout_p": call.dropout_p,
        "scale": call.scale,
        "enable_gqa": call.enable_gqa,
        "window": (call.left, call.right),
        "softcap": call.softcap,
        "relative_bias": None if table is None else _heads(table, H, layout),
        "alibi_slopes": None if slopes is None else _heads(slopes, H, layout).squeeze(0),
        "return_lse": True,
    }
    sequences = len(call.bounds) - 1 if call.packed else query.shape[0]
    seed: AbstractContextManager[None] = nullcontext()
    if call.dropout_p > 0:
        seed = _draws.given(_seed_of_heads(query, sequences, layout))
    with seed:
        if call.packed:
            packed = _packed_arguments(whole, call.bounds, (call.longest, call.longest))
            found = varlen_attention(*packed, **options)
            out, lse = (t.transpose(0, 1).unsqueeze(0) for t in found)
        else:
            rows = None if mask is None else _rows_of_heads(mask, H, part, layout)
            out, lse = scaled_dot_product_attention(  # type: ignore[call-overload]
                *whole, rows, key_lengths=call.key_lengths, **options
            )
    out, lse = (layout.by_process(t, 2) for t in (out, lse))
    return swap(out, layout, 2, 1), swap(lse, layout, 2, 1)


def _heads(t: Tensor, H: int, layout: Layout) -> Tensor:
    """Returns this process's share of dimension 1, if that has H heads."""
    return t.chunk(layout.parts, 1)[layout.rank] if t.shape[1] == H else t


def _rows_of_heads(mask: Tensor, H: int, part: int, layout: Layout) -> Tensor:
    """Returns the rows of all processes for this process's heads.

    Args:
        mask: this process's rows, (B or 1, H or 1, ``part`` or 1, L or 1).
    """
    if mask.dtype == torch.bool:  # some collectives take no booleans
        rows = _rows_of_heads(mask.view(torch.uint8), H, part, layout)
        return rows.view(torch.bool)
    if mask.shape[2] != part:
        return _heads(mask, H, layout)
    if mask.shape[1] == H:
        return layout.in_order(swap(mask, layout, 1, 2), 2)
    return joined(mask, layout, 2)


def _seed_of_heads(query: Tensor, batch: int, layout: Layout) -> Tensor:
    """Draws the seed of a call on this process's share of the heads."""
    part = _draws.current()
    n, (first, count, whole, _) = layout.parts, part.heads
    heads = _draws.Share(first * n + layout.rank * count, count, whole * n)
    with _draws.part(part._replace(heads=heads)):
        place = _draws.place_of_heads(batch, query.shape[1] // layout.parts)
    assert place is not None
    return _draws.with_place(_meshes.broadcast(draw_seed(query), layout.mesh), place)
