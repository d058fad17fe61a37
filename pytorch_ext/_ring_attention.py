"""Attention over sequences that are split between processes.

The queries of each process attend to one process's keys after another, in blocks
(_attention_blocks.py).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trifuse import _meshes
from trifuse._attention_blocks import Call, Gradients, Operands, Sum, packed_arguments
from trifuse._sequence_parts import Layout, Travel, all_gather, joined, reduce_scatter, swap
from trifuse.ops import _checks, _draws
from trifuse.ops._attention_arguments import (
    Tables,
    are_indexed,
    band_of,
    check_index,
    check_max_seqlen,
    check_scale,
    check_sinks,
    check_sizes,
    check_softcap,
    check_tensors,
    choose,
    indexed,
    mask_to_4d,
    relative_bias_to_3d,
    slopes_to_2d,
)
from trifuse.ops._checks import fail
from trifuse.ops._sinks import join_sinks
from trifuse.ops.attention import scaled_dot_product_attention, varlen_attention
from trifuse.reference.philox import draw_seed, is_placed

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
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    relative_index: Tensor | None = None,
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
            call drops what one process drops. Except with ``method="all_to_all"``, the length of a
            piece must be a multiple of 8, and a cut inside a packed sequence must lie at a multiple
            of 8 from its start.
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
            values are read on the host, which waits for a GPU. Pieces are cut at equal numbers of
            tokens.
        max_seqlen: an upper bound on the lengths of packed sequences. Default: T.
        sinks: (H,), as in :func:`trifuse.scaled_dot_product_attention`, counted once per row.
        relative_bias, alibi_slopes: as in :func:`trifuse.scaled_dot_product_attention`, the same in
            every process. A table covers the distances in whole sequences: 2 L - 1, or 2
            ``max_seqlen`` - 1 for packed ones. With ``relative_index`` a table has any n columns.
        query_bias: (B, H, L / n, columns), or (T / n, H, columns), for this process's queries.
        key_bias: the same for this process's keys. It is sent together with them.
        relative_index: int32 or int64, the column of these tables that a pair reads, as in
            :func:`trifuse.scaled_dot_product_attention`. By distance it is (2 L - 1,), the same in
            every process. By pairs it is (L / n, L), this process's rows for all keys, as a mask
            has them. For packed sequences it is (2 ``max_seqlen`` - 1,) or (``max_seqlen``,
            ``max_seqlen``), the same in every process.

    Returns:
        (B, H, L / n, Ev), and with ``return_lse`` the logsumexp, (B, H, L / n); with ``cu_seqlens``
        (T / n, H, Ev) and (T / n, H). Both are differentiable once.

        For a tensor that all processes have (sinks, tables, slopes, and a mask of one row), the
        gradient is this process's share. The shares of all processes add up to one process's
        gradient. The gradient of a mask's row is whole, in the process that has the row, and so are
        those of ``query_bias`` and ``key_bias``.

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
    tables = Tables(relative_bias, query_bias, key_bias, relative_index)
    if are_indexed(tables, alibi_slopes):
        tables = _tables_of_part(tables, query, B, longest, packed)
    elif relative_bias is not None:
        by_distance = relative_bias_to_3d(relative_bias, query, B, max(2 * longest - 1, 0))
        tables = Tables(by_distance)
    if alibi_slopes is not None:
        alibi_slopes = slopes_to_2d(alibi_slopes, query, B)
    sinks = check_sinks(sinks, query)
    call = Call(
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
    operands = Operands(query, key, value, attn_mask, tables[0], alibi_slopes, *tables[1:])
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


def _tables_of_part(tables: Tables, query: Tensor, B: int, longest: int, packed: bool) -> Tables:
    """Checks tables that are read by an index, and views those of rows as (B, H, rows, columns).

    Args:
        query: (B, H, L / n, E), or (1, H, T / n, E) of ``B`` packed sequences.
        longest: L, or the largest number of tokens of a packed sequence.
    """
    rows, H = query.shape[2], query.shape[1]
    of_tokens = (rows, H) if packed else (B, H, rows)
    given = _checks.tensor("relative_index", tables.relative_index)
    # An index of pairs has this process's rows; one by distance covers the whole sequence.
    pairs, distances = (longest if packed else rows, longest), max(2 * longest - 1, 0)
    if tuple(given.shape) not in (pairs, (distances,)):
        expected = f"shape {pairs} or, by distance, ({distances},)"
        raise fail("relative_index", expected, tuple(given.shape))
    lengths = pairs if given.dim() == 2 else (longest, longest)
    tables = indexed(tables, query, B, lengths, of_tokens, of_tokens)
    if packed:
        tables = tables.map_rows(lambda table: table.transpose(0, 1).unsqueeze(0))
    index = tables.relative_index
    assert index is not None
    check_index(index, tables)
    return tables._replace(relative_index=index.to(torch.int32))  # once, not in each block


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


# Dropout ----------------------------------------------------------------------------------------


def _whole_seed(query: Tensor, batch: int, layout: Layout) -> Tensor:
    """Draws the seed of a call, followed by the place of this process's batch and heads."""
    place = _draws.place_of_heads(batch, query.shape[1])
    seed = _meshes.broadcast(_draws.draw(query, place), layout.mesh)
    return seed if is_placed(seed) else _draws.with_place(seed, _draws.Place(0))


def _check_eights(call: Call, piece: int) -> None:
    """Checks that every block of keys begins at a multiple of 8: eight keys share random bits."""
    cuts = range(piece, piece * call.layout.parts * call.layout.per_part, max(piece, 1))
    starts = [call.bounds[bisect_right(call.bounds, cut) - 1] for cut in cuts]
    if any((cut - start) % 8 for cut, start in zip(cuts, starts, strict=True)):
        raise NotImplementedError(
            "dropout_p: ring_attention drops weights only if pieces are cut at multiples of 8 in "
            f'each sequence; got pieces of {piece} tokens. method="all_to_all" takes any'
        )


# Three ways to bring queries and keys together --------------------------------------------------


def _finish(ctx: Any, call: Call, given: Operands, total: Sum) -> tuple[Tensor, Tensor]:
    """Ends the forward of a Function; returns its results."""
    out, highest, log_weight = total.results()
    ctx.call = call
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given, out, highest, log_weight)
    return out, highest + log_weight


def _begin_backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Gradients, list[Tensor]]:
    """Begins the backward of a Function; returns the sums of gradients, and the tensors of keys."""
    *operands, out, highest, log_weight = ctx.saved_tensors
    given, needs = Operands(*operands), ctx.needs_input_grad[1:]
    results = (out, highest, log_weight, grad_out, grad_lse)
    gradients = Gradients(ctx.call, needs, given, *results)
    return gradients, given.of_keys()


class _Ring(torch.autograd.Function):
    """Keys and values go round the ring. In the backward their gradients follow them."""

    @staticmethod
    def forward(ctx: Any, call: Call, *operands: Any) -> tuple[Tensor, Tensor]:
        layout, given = call.layout, Operands(*operands)
        total, here = Sum(given.query, given.value), given.of_keys()
        for step in range(layout.parts):
            last = step == layout.parts - 1
            travel = None if last else Travel(layout, here)
            owner = (layout.rank - step) % layout.parts
            total.attend(call, owner, given.with_keys(here))
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
        they are back in the process that owns the keys, which adds those of its own queries."""
        gradients, here = _begin_backward(ctx, grad_out, grad_lse)
        layout = gradients.call.layout
        own: list[Tensor] = []
        coming: Travel | None = None
        for step in range(layout.parts):
            last = step == layout.parts - 1
            travel = None if last else Travel(layout, here)
            sums = [gradients.zeros(t) for t in here]
            gradients.add((layout.rank - step) % layout.parts, here, sums)
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
        return gradients.results(own)


def _add(sums: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    for total, t in zip(sums, more, strict=True):
        total += t


class _Gathered(torch.autograd.Function):
    """Every process holds all keys and values during the call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *operands: Any) -> tuple[Tensor, Tensor]:
        layout, given = call.layout, Operands(*operands)
        total = Sum(given.query, given.value)
        gathered = [all_gather(t, layout) for t in given.of_keys()]
        for owner, of_keys in enumerate(zip(*gathered, strict=True)):
            total.attend(call, owner, given.with_keys(of_keys))
        return _finish(ctx, call, given, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gradients, of_keys = _begin_backward(ctx, grad_out, grad_lse)
        layout = gradients.call.layout
        gathered = [all_gather(t, layout) for t in of_keys]
        sums = [[gradients.zeros(t) for t in parts] for parts in gathered]
        for owner in range(layout.parts):
            gradients.add(owner, [x[owner] for x in gathered], [x[owner] for x in sums])
        return gradients.results([reduce_scatter(x, layout) for x in sums])


def _by_heads(call: Call, given: Operands) -> tuple[Tensor, Tensor]:
    """Exchanges tokens for heads, computes whole sequences, and exchanges back."""
    query, key, value, mask, table, slopes, query_bias, key_bias, index = given
    layout, n = call.layout, call.layout.parts
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.shape[1] % n:
            raise fail(name, f"a number of heads that {n} divides", t.shape[1])
    H, part = query.shape[1], query.shape[2]
    whole = [_tokens_of_heads(t, layout) for t in (query, key, value)]
    of_rows = (None if t is None else _tokens_of_heads(t, layout) for t in (query_bias, key_bias))
    if call.packed:
        of_rows = (None if t is None else t[0].transpose(0, 1) for t in of_rows)
    elif index is not None and index.dim() == 2:
        index = joined(index, layout, 0)
    options: dict[str, Any] = {
        **dict(zip(("query_bias", "key_bias"), of_rows, strict=True)),
        "relative_index": index,
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
            packed = packed_arguments(whole, call.bounds, (call.longest, call.longest))
            found = varlen_attention(*packed, **options)
            out, lse = (t.transpose(0, 1).unsqueeze(0) for t in found)
        else:
            rows = None if mask is None else _rows_of_heads(mask, H, part, layout)
            out, lse = scaled_dot_product_attention(  # type: ignore[call-overload]
                *whole, rows, key_lengths=call.key_lengths, **options
            )
    out, lse = (layout.by_process(t, 2) for t in (out, lse))
    return swap(out, layout, 2, 1), swap(lse, layout, 2, 1)


def _tokens_of_heads(t: Tensor, layout: Layout) -> Tensor:
    """Returns all tokens of this process's heads."""
    return layout.in_order(swap(t, layout, 1, 2), 2)


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
        return _tokens_of_heads(mask, layout)
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
