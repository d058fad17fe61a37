"""Parallelism across processes, beyond the sharding rules of the operators.

Context parallelism splits sequences between processes: each holds a part of every sequence's
queries, keys and values. Attention then needs all keys for every query. :func:`ring_attention`
brings them together in one of three ways, and :func:`shard_sequence` and :func:`unshard_sequence`
split and join sequences.

:class:`SequenceParallel` is the style for a norm that also takes a residual.
:func:`part_of_batch` makes processes drop together what one process drops. The other parallelisms
need nothing from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from trifuse import _meshes
from trifuse._pipelined_lstm import PipelinedLSTM
from trifuse.ops import _checks, _draws
from trifuse.ops._checks import fail
from trifuse.ops._sinks import join_sinks
from trifuse.ops.attention import band_of, mask_to_4d, scaled_dot_product_attention
from trifuse.reference.philox import draw_seed, is_placed
from trifuse.reference.results import accumulation_dtype

__all__ = [
    "PipelinedLSTM",
    "SequenceParallel",
    "part_of_batch",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
]

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
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this process's queries to the keys of all processes.

    Liu et al., "Ring Attention with Blockwise Transformers" (2023): keys and values go round the
    processes, and the attention to each part is joined by its logsumexp. Query and key positions
    are those in the whole sequence. With n processes, a process holds O(L / n) tokens at a time.

    Args:
        query: (B, H, L / n, E), this process's part: see :func:`shard_sequence`.
        key: (B, Hkv, L / n, E).
        value: (B, Hkv, L / n, Ev).
        attn_mask: this process's rows for all keys, broadcastable to (B, H, L / n, L), the columns
            in the order of the whole sequence. The gradient of a mask is that of this process's
            rows. Not with ``method="all_to_all"``.
        dropout_p: probability of dropping a weight, drawn from the first process's generator. The
            call drops what one process drops. Pieces, and a
            window's bound on the left, must then be multiples of 8.
        is_causal, scale, enable_gqa, window, softcap, return_lse: as in
            :func:`trifuse.scaled_dot_product_attention`. ``is_causal`` is a bool.
        mesh: one dimension of a mesh: the processes among which sequences are split.
        method: "ring" sends the keys and values to the next process while it attends to the last
            received; "all_gather" brings all keys to every process at once, in O(L) memory;
            "all_to_all" gives each process all tokens of H / n heads (Jacobs et al., "DeepSpeed
            Ulysses", 2023), for which n must divide H and Hkv.
        balanced: whether the parts are balanced, as :func:`shard_sequence` makes them.
        key_lengths: int32 or int64 (B,), lengths in the whole sequence, the same in every process.
        sinks: (H,), as in :func:`trifuse.scaled_dot_product_attention`: in each row once. Their
            gradient is that of this process's rows.

    Returns:
        (B, H, L / n, Ev), and with ``return_lse`` the logsumexp, (B, H, L / n). Both are
        differentiable once. The backward computes the parts of the attention again.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape or value that doesn't fit (``trifuse.ArgumentError``).
        NotImplementedError: a mask with ``method="all_to_all"``; dropout with pieces, or a
            window's bound on the left, that 8 does not divide.
    """
    layout = _layout(query, key, value, mesh, balanced)
    if method not in _METHODS:
        raise fail("method", " or ".join(map(repr, _METHODS)), repr(method))
    dropout_p = _checks.probability("dropout_p", dropout_p)
    is_causal = _checks.flag("is_causal", is_causal)
    if sinks is not None:
        sinks = _checks.matching("sinks", _checks.tensor("sinks", sinks), "query", query)
        if sinks.shape != query.shape[1:2]:
            raise fail("sinks", f"shape ({query.shape[1]},), a number a head", tuple(sinks.shape))
    _checks.flag("enable_gqa", enable_gqa)
    _checks.flag("return_lse", return_lse)
    L = layout.parts * query.shape[2]
    if key_lengths is not None:
        key_lengths = _checks.integers("key_lengths", key_lengths, "(B,)", query.shape[0], query)
        if key_lengths.device.type == "cpu" and not ((key_lengths >= 0) & (key_lengths <= L)).all():
            raise fail("key_lengths", f"lengths in [0, {L}]", key_lengths.tolist())
    if method == "all_to_all":
        if attn_mask is not None:
            raise NotImplementedError(
                'attn_mask: method="all_to_all" takes no mask, whose rows other processes hold; '
                'take "ring" or "all_gather"'
            )
        out, lse = _by_heads(
            query,
            key,
            value,
            layout,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            key_lengths=key_lengths,
            window=window,
            softcap=softcap,
            dropout_p=dropout_p,
        )
        return _finished(out, lse, sinks, return_lse)
    if attn_mask is not None:
        _checks.tensor("attn_mask", attn_mask)
        attn_mask = mask_to_4d(attn_mask, query, (*query.shape[:3], L))
    if scale is None:
        scale = query.shape[3] ** -0.5
    bounds = _bounds(window, is_causal)
    seed = None
    if dropout_p > 0:
        _check_eights(query.shape[2] // layout.per_part, bounds[0])
        seed = _whole_seed(query, layout)
    call = _SharedArguments(
        layout, scale, enable_gqa, softcap, *bounds, key_lengths, dropout_p, seed
    )
    whole = _Ring if method == "ring" else _Gathered
    out, lse = whole.apply(call, query, key, value, attn_mask)
    return _finished(out, lse, sinks, return_lse)


def _finished(
    out: Tensor, lse: Tensor, sinks: Tensor | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the results of a call on all keys: its sinks enter once, after the parts."""
    if sinks is not None:
        out, lse = join_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def shard_sequence(t: Tensor, mesh: DeviceMesh, dim: int, balanced: bool = False) -> Tensor:
    """Returns this process's part of a whole tensor along ``dim``, of length L.

    Args:
        balanced: cut L into 2 n pieces, and give process r pieces r and 2 n - 1 - r, so that under
            a causal mask every process has as many pairs to compute. Otherwise process r has the
            r-th of n pieces.

    Raises:
        ValueError: the pieces would not have the same length.
    """
    layout = _Layout(mesh, balanced)
    count, L = layout.parts * layout.per_part, t.shape[dim]
    if L % count:
        raise fail("t", f"a length along dim {dim} that {count} divides", L)
    pieces = t.chunk(count, dim) if L else [t] * count
    return torch.cat([pieces[i] for i in layout.pieces(layout.rank)], dim)


def unshard_sequence(t: Tensor, mesh: DeviceMesh, dim: int, balanced: bool = False) -> Tensor:
    """Joins the parts of all processes along ``dim``: the inverse of :func:`shard_sequence`.

    It is differentiable: the gradients of all processes' results are summed.
    """
    layout = _Layout(mesh, balanced)
    return layout.in_order(_Gather.apply(t, layout, dim), dim)


@contextmanager
def part_of_batch(
    mesh: DeviceMesh | None = None,
    *,
    sequence: DeviceMesh | None = None,
    heads: DeviceMesh | None = None,
    balanced: bool = False,
    batch: tuple[int, int, int] | None = None,
    batch_dim: int = 0,
) -> Iterator[None]:
    """Makes the processes drop together what one process drops on the whole batch.

    Inside the ``with`` block, dropout and zoneout of trifuse's operators and modules draw the
    random numbers that belong to this process's part. So a step drops the same elements on any
    number of processes, each of which runs the same program::

        with trifuse.distributed.part_of_batch(mesh):
            loss = model(x)  # this process's part of the batch
            loss.backward()

    The first process draws a seed and broadcasts it (8 bytes for each mesh). From it the block's
    random numbers follow, in every process and on its current device; after the block each
    process's own generators go on as before. Calls on DTensors find their part in their layout.

    Put the backward inside the block too if activations are checkpointed. Padded batches are
    computed with their padding, whose rows count. ``torch.compile`` serves a model inside the
    block, and compiles it once more for each part.

    Args:
        mesh: one dimension of a mesh: the processes that have equal parts of the batch, in order,
            as under DDP and FSDP2. None: the batch is not split, as in one process.
        sequence: the processes that have parts of every sequence: norms and dropout then get
            tensors (batch, part of the sequence, ...). For attention see :func:`ring_attention`.
        heads: the processes that have parts of attention's heads as plain tensors, which
            ``ColwiseParallel`` returns.
        balanced: whether the parts of sequences are balanced, as :func:`shard_sequence` makes them.
        batch: (first, count, total): the part of the batch that this process has, if the parts are
            not equal. ``mesh`` then only says who shares the seed.
        batch_dim: 0, or 1 if norms and dropout get tensors (sequence, batch, ...). Attention and
            recurrent layers have a dimension of their own for the batch.

    Raises:
        NotImplementedError: in the block, dropout of a tensor that is split in more than two
            dimensions, or in two of which neither is the first.
        TypeError: an argument of the wrong type.
        ValueError: a shape or value that doesn't fit (``trifuse.ArgumentError``).
    """
    meshes = (mesh, sequence, heads)
    for name, given in zip(("mesh", "sequence", "heads"), meshes, strict=True):
        if given is not None:
            _meshes.check(name, given)
    if batch_dim not in (0, 1):
        raise fail("batch_dim", "0 or 1", batch_dim)
    along_sequence = _share(sequence)
    if _checks.flag("balanced", balanced) and sequence is not None:
        n, r = sequence.size(), sequence.get_local_rank()
        along_sequence = _draws.Share(r, 2, 2 * n, second=2 * n - 1 - r)
    along_batch = _share(mesh)
    if batch is not None:
        first, count, total = batch
        if not 0 <= first < first + count <= total:
            raise fail("batch", "(first, count, total), count > 0, within total", batch)
        along_batch = _draws.Share(first, count, total)
    part = _draws.Part(along_batch, along_sequence, _share(heads), batch_dim)
    with _shared_generators([m for m in meshes if m is not None]), _draws.part(part):
        yield


def _share(mesh: DeviceMesh | None) -> _draws.Share:
    """Returns the share of a process that has one of equal parts."""
    if mesh is None:
        return _draws.WHOLE
    return _draws.Share(mesh.get_local_rank(), 1, mesh.size())


@contextmanager
def _shared_generators(meshes: Sequence[DeviceMesh]) -> Iterator[None]:
    """Seeds torch's generators alike in all processes, and restores them afterwards."""
    seed = draw_seed(torch.empty(0))
    for mesh in meshes:
        seed = _meshes.broadcast(seed.to(mesh.device_type), mesh)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        yield


class SequenceParallel(ParallelStyle):
    """Runs a norm on sequences split between processes, its weights replicated.

    It is ``torch.distributed.tensor.parallel.SequenceParallel`` for modules that take several
    tensors, as :class:`trifuse.nn.DropoutAddLayerNorm` takes a residual. torch's style passes the
    first positional argument alone, so that a residual would be lost without an error.

    Args:
        sequence_dim: the dimension of the inputs that is split. Tensors that are not DTensors are
            this process's part.
        use_local_output: whether to return this process's part instead of a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, p in list(module.named_parameters(recurse=False)):
            if not isinstance(p, DTensor):
                whole = distribute_tensor(p, device_mesh, [Replicate()])
                module.register_parameter(name, nn.Parameter(whole, p.requires_grad))
        split = [Shard(self.sequence_dim)]

        def sharded(t: Any) -> Any:
            if isinstance(t, DTensor):
                return t.redistribute(placements=split)
            if isinstance(t, Tensor):
                return DTensor.from_local(t, device_mesh, split, run_check=False)
            return t

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return tuple(map(sharded, args)), {name: sharded(t) for name, t in kwargs.items()}

        def after(_: nn.Module, args: Any, results: Any) -> Any:
            if not self.use_local_output:
                return results
            if isinstance(results, tuple):
                return tuple(t.to_local() for t in results)
            return results.to_local()

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module


# Where tokens are -------------------------------------------------------------------------------


class _Layout:
    """Which pieces of a sequence each process holds. Pieces have one length."""

    def __init__(self, mesh: DeviceMesh, balanced: bool) -> None:
        _meshes.check("mesh", mesh)
        self.mesh = mesh
        self.balanced = _checks.flag("balanced", balanced)
        self.group = mesh.get_group()
        self.parts, self.rank = mesh.size(), mesh.get_local_rank()
        self.per_part = 2 if balanced else 1

    def pieces(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.parts - 1 - rank) if self.balanced else (rank,)

    def in_order(self, t: Tensor, dim: int) -> Tensor:
        """Puts the pieces of all processes, one process after another, in the sequence's order."""
        if not self.balanced or t.shape[dim] == 0:
            return t
        held = self._held()
        pieces = t.chunk(len(held), dim)
        return torch.cat([pieces[held.index(i)] for i in range(len(held))], dim)

    def by_process(self, t: Tensor, dim: int) -> Tensor:
        """The inverse of :meth:`in_order`."""
        if not self.balanced or t.shape[dim] == 0:
            return t
        held = self._held()
        pieces = t.chunk(len(held), dim)
        return torch.cat([pieces[i] for i in held], dim)

    def _held(self) -> list[int]:
        """Returns the pieces of all processes, one process after another."""
        return [piece for rank in range(self.parts) for piece in self.pieces(rank)]


def _layout(query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh, balanced: bool) -> _Layout:
    layout = _Layout(mesh, balanced)
    for name, t in (("query", query), ("key", key), ("value", value)):
        _checks.tensor(name, t)
        if type(t) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{name}: expected this process's part, a Tensor; got {type(t)}")
        if t.dim() != 4:
            raise fail(name, "shape (B, heads, L / n, head_dim)", tuple(t.shape))
        if t.shape[2] != query.shape[2] or t.shape[0] != query.shape[0]:
            raise fail(name, f"batch and length of query's {tuple(query.shape)}", tuple(t.shape))
        if t.shape[2] % layout.per_part:
            raise fail(name, "an even length, as balanced parts have", t.shape[2])
    return layout


def _bounds(window: Any, is_causal: bool) -> tuple[int | None, int | None]:
    """Returns how many keys before and after its own position a query attends to."""
    left, right, _ = band_of(is_causal, window)
    return left, right


# Attention to one part of the keys --------------------------------------------------------------


class _SharedArguments(NamedTuple):
    """The arguments of a call that are the same in every part."""

    layout: _Layout
    scale: float
    enable_gqa: bool
    softcap: float | None
    left: int | None
    right: int | None
    key_lengths: Tensor | None
    dropout_p: float = 0.0
    seed: Tensor | None = None  # with the place of this process's batch and heads


class _PairBlock(NamedTuple):
    """Attention of some of the local queries to some of a part's keys."""

    rows: slice  # of the local queries
    columns: slice  # of the part's keys
    mask_columns: slice  # of the whole sequence's keys
    window: tuple[int | None, int | None]
    first_query: int  # their positions in the whole sequence
    first_key: int


def _blocks(call: _SharedArguments, owner: int, length: int) -> Iterator[_PairBlock]:
    """Yields the blocks that have pairs; ``owner`` is the process that the keys come from.

    A block is a piece of the queries against a piece of the keys. In it the diagonal of the whole
    sequence lies ``shift`` keys to the right of the block's own. An operator's window has bounds
    ≥ 0, so a bound on the other side of the diagonal is moved onto it: the rows and columns that it
    leaves empty are cut off.
    """
    layout = call.layout
    size = length // layout.per_part
    for i, query_piece in enumerate(layout.pieces(layout.rank)):
        for j, key_piece in enumerate(layout.pieces(owner)):
            shift = (query_piece - key_piece) * size
            left = None if call.left is None else call.left - shift
            right = None if call.right is None else call.right + shift
            skip_keys = 0 if left is None else max(0, -left)
            skip_rows = 0 if right is None else max(0, -right)
            if size - skip_keys - skip_rows <= 0:
                continue
            # Cutting keys off the front moves the diagonal to the left, rows to the right.
            if left is not None:
                left = min(left + skip_keys - skip_rows, size)
            if right is not None:
                right = min(right + skip_rows - skip_keys, size)
            if min(0 if left is None else left, 0 if right is None else right) < 0:
                continue  # the bounds leave no pair between them
            rows = slice(i * size + skip_rows, (i + 1) * size - skip_keys)
            columns = slice(j * size + skip_keys, (j + 1) * size - skip_rows)
            first = key_piece * size + skip_keys
            span = columns.stop - columns.start
            mask_columns = slice(first, first + span)
            first_query = query_piece * size + skip_rows
            yield _PairBlock(rows, columns, mask_columns, (left, right), first_query, first)


def _attend(
    call: _SharedArguments,
    block: _PairBlock,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    lengths = call.key_lengths
    if lengths is not None:
        lengths = (lengths - block.first_key).clamp(0, key.shape[2])
    seed: AbstractContextManager[None] = nullcontext()
    if call.seed is not None:
        at = call.seed.new_tensor([block.first_query, block.first_key])
        seed = _draws.given(torch.cat([call.seed[: -len(at)], at]))
    with seed:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            call.dropout_p,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
            key_lengths=lengths,
            window=block.window,
            softcap=call.softcap,
            return_lse=True,
        )


def _whole_seed(query: Tensor, layout: _Layout) -> Tensor:
    """Draws the seed of a call; the place of this process's batch and heads follows it."""
    place = _draws.place_of_heads(*query.shape[:2])
    seed = _meshes.broadcast(_draws.draw(query, place), layout.mesh)
    return seed if is_placed(seed) else _draws.with_place(seed, _draws.Place(0))


def _check_eights(piece: int, left: int | None) -> None:
    """Checks that every block of keys begins at a multiple of 8: eight keys share random bits."""
    if piece % 8 or (left is not None and left % 8):
        raise NotImplementedError(
            "dropout_p: ring_attention drops weights only if the lengths of pieces, and a window's "
            f"bound on the left, are multiples of 8; got {piece} and {left}"
        )


def _mask_of(mask: Tensor | None, block: _PairBlock) -> Tensor | None:
    if mask is None:
        return None
    rows = block.rows if mask.shape[2] > 1 else slice(None)
    columns = block.mask_columns if mask.shape[3] > 1 else slice(None)
    return mask[:, :, rows, columns]


class _Sum:
    """Attention to the parts so far: their outputs joined by the logsumexp of each."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        wide = accumulation_dtype(query.dtype)
        self.dtype = query.dtype
        self.out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=wide)
        self.lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        before = self.lse[:, :, rows]
        after = torch.logaddexp(before, lse)
        self.out[:, :, rows] *= _weight(before, after).unsqueeze(-1)
        self.out[:, :, rows] += _weight(lse, after).unsqueeze(-1) * out
        self.lse[:, :, rows] = after

    def results(self) -> tuple[Tensor, Tensor]:
        return self.out.to(self.dtype), self.lse


def _weight(lse: Tensor, whole: Tensor) -> Tensor:
    """Returns the share of a part in the softmax; 0 in a row without keys."""
    return torch.where(lse == -torch.inf, 0.0, (lse - whole).exp())


def _forward_part(
    call: _SharedArguments,
    owner: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    total: _Sum,
) -> None:
    for block in _blocks(call, owner, query.shape[2]):
        out, lse = _attend(
            call,
            block,
            query[:, :, block.rows],
            key[:, :, block.columns],
            value[:, :, block.columns],
            _mask_of(mask, block),
        )
        total.add(block.rows, out, lse)


class _Gradients:
    """The backward of attention to one part after another.

    With w the share of a part in the softmax, the output is the sum of w · out over the parts.
    """

    def __init__(
        self,
        call: _SharedArguments,
        needs: Sequence[bool],
        query: Tensor,
        mask: Tensor | None,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
    ) -> None:
        self.call, self.query, self.mask, self.lse = call, query, mask, lse
        self.wide = accumulation_dtype(query.dtype)
        self.needs = tuple(needs)
        self.grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        self.grad_out = self.grad_out.to(self.wide)
        along = (self.grad_out * out).sum(-1)
        self.grad_lse = -along if grad_lse is None else grad_lse - along
        self.of_query = torch.zeros_like(query, dtype=self.wide)
        self.of_mask = None
        if mask is not None and needs[3]:
            self.of_mask = torch.zeros_like(mask, dtype=self.wide)

    def add(self, owner: int, key: Tensor, value: Tensor, of_key: Tensor, of_value: Tensor) -> None:
        """Adds one part's gradients; ``of_key`` and ``of_value`` are of the part's tensors."""
        for block in _blocks(self.call, owner, self.query.shape[2]):
            tensors: list[Any] = [
                self.query[:, :, block.rows],
                key[:, :, block.columns],
                value[:, :, block.columns],
                _mask_of(self.mask, block),
            ]
            tensors = [
                t if t is None else t.detach().requires_grad_(need)
                for t, need in zip(tensors, self.needs, strict=True)
            ]
            with torch.enable_grad():
                out, lse = _attend(self.call, block, *tensors)
            share = _weight(lse.detach(), self.lse[:, :, block.rows])
            grad_out = self.grad_out[:, :, block.rows]
            along = (grad_out * out.detach()).sum(-1)
            grads = torch.autograd.grad(
                (out, lse),
                [t for t, need in zip(tensors, self.needs, strict=True) if need],
                (
                    (grad_out * share.unsqueeze(-1)).to(out.dtype),
                    share * (along + self.grad_lse[:, :, block.rows]),
                ),
            )
            found = iter(grads)
            of_query, of_key_, of_value_, of_mask = (
                next(found) if need else None for need in self.needs
            )
            if of_query is not None:
                self.of_query[:, :, block.rows] += of_query
            if of_key_ is not None:
                of_key[:, :, block.columns] += of_key_
            if of_value_ is not None:
                of_value[:, :, block.columns] += of_value_
            if of_mask is not None:
                _mask_of(self.of_mask, block).add_(of_mask)  # type: ignore[union-attr]

    def results(self, of_key: Tensor, of_value: Tensor) -> tuple[Tensor | None, ...]:
        found = (self.of_query, of_key, of_value, self.of_mask)
        dtypes = (self.query.dtype,) * 3 + (None if self.mask is None else self.mask.dtype,)
        return (
            None,
            *(
                g.to(dtype) if need and g is not None else None
                for g, dtype, need in zip(found, dtypes, self.needs, strict=True)
            ),
        )


# Three ways to bring queries and keys together --------------------------------------------------


class _Travel:
    """Tensors on their way to the next process, while the present ones are computed on."""

    def __init__(self, layout: _Layout, tensors: Sequence[Tensor]) -> None:
        sent = [t.contiguous() for t in tensors]
        self.received = [torch.empty_like(t) for t in sent]
        to, source = (
            dist.get_global_rank(layout.group, (layout.rank + step) % layout.parts)
            for step in (1, -1)
        )
        operations = [
            *(dist.P2POp(dist.isend, t, to, layout.group) for t in sent),
            *(dist.P2POp(dist.irecv, t, source, layout.group) for t in self.received),
        ]
        self.sent = sent  # kept until it has been sent
        self.work = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        for work in self.work:
            work.wait()
        return self.received


def _finish(
    ctx: Any,
    call: _SharedArguments,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    total: _Sum,
) -> tuple[Tensor, Tensor]:
    """Ends the forward of a Function; returns its results."""
    out, lse = total.results()
    ctx.call = call
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, mask, out, lse)
    return out, lse


def _begin_backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[_Gradients, Tensor, Tensor]:
    """Begins the backward of a Function; returns the sums of gradients, and its key and value."""
    query, key, value, mask, out, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad[1:]
    return _Gradients(ctx.call, needs, query, mask, out, lse, grad_out, grad_lse), key, value


class _Ring(torch.autograd.Function):
    """Keys and values go round. In the backward their gradients go with them."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _SharedArguments,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        layout, total = call.layout, _Sum(query, value)
        here = [key, value]
        for step in range(layout.parts):
            last = step == layout.parts - 1
            travel = None if last else _Travel(layout, here)
            owner = (layout.rank - step) % layout.parts
            _forward_part(call, owner, query, here[0], here[1], mask, total)
            if travel is not None:
                here = travel.wait()
        return _finish(ctx, call, query, key, value, mask, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gradients, key, value = _begin_backward(ctx, grad_out, grad_lse)
        layout = gradients.call.layout
        here = [key, value]
        sums = [torch.zeros_like(t, dtype=gradients.wide) for t in here]
        for step in range(layout.parts):
            last = step == layout.parts - 1
            travel = None if last else _Travel(layout, here)
            gradients.add((layout.rank - step) % layout.parts, *here, *sums)
            # After n steps each sum is back where its keys are.
            sums = _Travel(layout, sums).wait() if layout.parts > 1 else sums
            if travel is not None:
                here = travel.wait()
        return gradients.results(*sums)


class _Gathered(torch.autograd.Function):
    """Every process holds all keys and values during the call."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _SharedArguments,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        total = _Sum(query, value)
        keys, values = (_all_gather(t, call.layout) for t in (key, value))
        for owner in range(call.layout.parts):
            _forward_part(call, owner, query, keys[owner], values[owner], mask, total)
        return _finish(ctx, call, query, key, value, mask, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gradients, key, value = _begin_backward(ctx, grad_out, grad_lse)
        layout = gradients.call.layout
        keys, values = (_all_gather(t, layout) for t in (key, value))
        sums = [[torch.zeros_like(t, dtype=gradients.wide) for t in x] for x in (keys, values)]
        for owner in range(layout.parts):
            gradients.add(owner, keys[owner], values[owner], sums[0][owner], sums[1][owner])
        return gradients.results(*(_reduce_scatter(x, layout) for x in sums))


def _by_heads(
    query: Tensor, key: Tensor, value: Tensor, layout: _Layout, **options: Any
) -> tuple[Tensor, Tensor]:
    """Exchanges tokens for heads, computes whole sequences, and exchanges back."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.shape[1] % layout.parts:
            raise fail(name, f"a number of heads that {layout.parts} divides", t.shape[1])
    whole = [layout.in_order(_swap(t, layout, 1, 2), 2) for t in (query, key, value)]
    seed: AbstractContextManager[None] = nullcontext()
    if options["dropout_p"] > 0:
        seed = _draws.given(_seed_of_heads(query, layout))
    with seed:
        out, lse = scaled_dot_product_attention(  # type: ignore[call-overload]
            *whole, return_lse=True, **options
        )
    out, lse = (layout.by_process(t, 2) for t in (out, lse))
    return _swap(out, layout, 2, 1), _swap(lse, layout, 2, 1)


def _seed_of_heads(query: Tensor, layout: _Layout) -> Tensor:
    """Draws the seed of a call on this process's share of the heads."""
    part = _draws.current()
    n, (first, count, whole, _) = layout.parts, part.heads
    heads = _draws.Share(first * n + layout.rank * count, count, whole * n)
    with _draws.part(part._replace(heads=heads)):
        place = _draws.place_of_heads(query.shape[0], query.shape[1] // layout.parts)
    assert place is not None
    return _draws.with_place(_meshes.broadcast(draw_seed(query), layout.mesh), place)


# Communication ----------------------------------------------------------------------------------


def _all_gather(t: Tensor, layout: _Layout) -> list[Tensor]:
    t = t.contiguous()
    parts = [torch.empty_like(t) for _ in range(layout.parts)]
    dist.all_gather(parts, t, group=layout.group)
    return parts


def _reduce_scatter(parts: Sequence[Tensor], layout: _Layout) -> Tensor:
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, list(parts), group=layout.group)
    return out


class _Gather(torch.autograd.Function):
    """The parts of all processes, one after another along ``dim``."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: _Layout, dim: int) -> Tensor:
        ctx.layout, ctx.dim = layout, dim
        return torch.cat(_all_gather(t, layout), dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = [t.contiguous() for t in grad.chunk(ctx.layout.parts, ctx.dim)]
        return _reduce_scatter(parts, ctx.layout), None, None


class _Swap(torch.autograd.Function):
    """Cuts dimension ``cut`` between the processes and joins their parts along ``join``."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: _Layout, cut: int, join: int) -> Tensor:
        ctx.constants = (layout, join, cut)
        return _exchange(t, layout, cut, join)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, *ctx.constants), None, None, None


_swap: Callable[[Tensor, _Layout, int, int], Tensor] = _Swap.apply


def _exchange(t: Tensor, layout: _Layout, cut: int, join: int) -> Tensor:
    sent = torch.stack(t.chunk(layout.parts, cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=layout.group)
    return torch.cat(received.unbind(0), join)
