"""Attention takes these terms of the scores without a matrix of all pairs.

A recipe passes such a term to a model in place of a bias or a mask. When the model adds it to
scores that are not computed, ``added_to`` gives the form of the attention. Any other function gets
the term as a tensor of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trifuse.deferred import Again
from trifuse.nn import packing
from trifuse.written_out.parts import (
    Form,
    Packed,
    Part,
    Scores,
    add,
    fitting,
    is_plain,
    itself,
)


class DistanceBias(Part):
    """Biases of the scores by distance, (B or 1, H, Lq, Lk), as a table instead of a matrix."""

    table: Tensor | None  # (H, Lq + Lk - 1), as ``relative_bias``; None: 0 for all pairs
    mask: Tensor | None  # also added to the scores, without a gradient

    @staticmethod
    def of(table: Tensor, Lq: int, Lk: int, batch: int = 1) -> DistanceBias:
        """Return the biases that a table holds."""
        shape = (batch, table.shape[0], Lq, Lk)
        return DistanceBias._made(table, None, shape, table.dtype, table.device)

    @staticmethod
    def _made(
        table: Tensor | None,
        mask: Tensor | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> DistanceBias:
        call: Again = (_matrix, (table, torch.Size(shape), mask), {})
        if table is None:
            options = {"dtype": dtype, "device": device}
            call = (_zeros, (torch.Size(shape), mask), options)
        made: DistanceBias = DistanceBias._of(shape, dtype, device, call)
        made.table, made.mask = table, mask
        return made

    @staticmethod
    def zero(shape: Sequence[int], like: Tensor) -> DistanceBias:
        """Return a bias of 0 for all pairs, in the dtype of ``like``."""
        return DistanceBias._made(None, None, shape, like.dtype, like.device)

    def with_mask(self, mask: Tensor) -> DistanceBias:
        """Return the sum of the biases and a mask, (B or 1, 1, Lq or 1, Lk)."""
        assert self.mask is None
        assert not mask.requires_grad
        dtype = torch.promote_types(self.dtype, mask.dtype)
        shape = torch.broadcast_shapes(self.shape, mask.shape)
        return DistanceBias._made(self.table, mask, shape, dtype, self.device)

    def _require_gradient(self) -> None:
        table, shape, _ = self._call[1]
        _Gathered.apply(table, lambda table: _matrix(table, shape), [self])

    @property
    def is_usable(self) -> bool:
        """Whether the table still holds the biases: they were not computed, and so not changed."""
        return self._value is None and self._modes.grad == torch.is_grad_enabled()

    def cut(self, Lq: int, Lk: int) -> DistanceBias:
        """Return the biases of the first queries and keys."""
        batch, H, rows, _ = self.shape
        assert self.mask is None
        if self.table is None:
            return DistanceBias.zero((batch, H, Lq, Lk), self)
        first = rows - Lq
        return DistanceBias.of(self.table[:, first : first + Lq + Lk - 1], Lq, Lk, batch)

    def added_to(self, scores: Scores) -> Form | None:
        form, (B, H, *pairs) = scores.form, self.shape
        if not self.is_usable or form.packed is not None or form.leading != scores.shape[:-2]:
            return None
        if len(form.leading) != 2 or form.leading[1] != H or B not in (1, form.leading[0]):
            return None
        if form.table is not None or scores.shape[2:] != torch.Size(pairs):
            return None
        form = form._replace(table=self.table)
        return form if self.mask is None else scores.with_bias(self.mask, form)


def _matrix(table: Tensor, shape: torch.Size, mask: Tensor | None = None) -> Tensor:
    """Return the biases of all pairs, and a mask added to them."""
    _, _, Lq, Lk = shape
    rows, columns = (torch.arange(length, device=table.device) for length in (Lq, Lk))
    matrix = table[:, columns - rows[:, None] + Lq - 1]
    return matrix.expand(shape) if mask is None else matrix + mask


def _zeros(shape: torch.Size, mask: Tensor | None, **options: Any) -> Tensor:
    zeros = torch.zeros(shape, **options)
    return zeros if mask is None else zeros + mask


class IndexedBias(Part):
    """Biases of the scores, (1 or B, H, Lq, Lk), as a table and an index of all pairs.

    Swin's blocks add the mask of shifted windows to them. Models make them from (H, Lq, Lk), and
    SwinV2 applies a function to each number.
    """

    table: Tensor  # (H, n), as ``relative_bias``
    columns: Tensor  # (Lq, Lk), as ``relative_index``
    mask: Tensor | None  # (1 or B, 1 or H, Lq, Lk), added

    @staticmethod
    def of(
        table: Tensor,
        index: Tensor,
        mask: Tensor | None = None,
        leading: Sequence[int] | None = None,
    ) -> IndexedBias:
        """Return the biases that an index picks from a table.

        Args:
            table: (H, n).
            index: (Lq, Lk), integers in [0, n).
            mask: added to the biases, without a gradient.
            leading: the dimensions before those of the pairs, including the heads, if no mask is
                added. None: (1, H).
        """
        leading = torch.Size((1, table.shape[0]) if leading is None else leading)
        shape, dtype = torch.Size((*leading, *index.shape)), table.dtype
        if mask is not None:
            shape = torch.broadcast_shapes(shape, mask.shape)
            dtype = torch.promote_types(dtype, mask.dtype)
        call: Again = (_picked, (table, index, mask, leading), {})
        made: IndexedBias = IndexedBias._of(shape, dtype, table.device, call)
        made.table, made.columns, made.mask = table, index, mask
        return made

    def _require_gradient(self) -> None:
        own, index, _, leading = self._call[1]
        shape = self.shape
        _Gathered.apply(
            own, lambda table: _picked(table, index, None, leading).expand(shape), [self]
        )

    @property
    def is_usable(self) -> bool:
        """Whether table and mask still make up the biases, never computed or changed since."""
        known = self._value is None and self._call[0] is _picked
        return known and self._modes.grad == torch.is_grad_enabled()

    @staticmethod
    def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        bias = args[0] if args else None
        if func is nn.functional.interpolate and isinstance(bias, IndexedBias):
            return bias if bias.is_usable and _keeps_size(bias, *args[1:], **kwargs) else None
        return Part._step(func, args, kwargs)

    def _become(self, made: Tensor | None, again: Again) -> Tensor | None:
        if not isinstance(made, IndexedBias):
            return None
        if (made.shape, made.dtype) != (self.shape, self.dtype):
            return None
        # Code that still holds this tensor gets the same numbers.
        self._call, self._versions, self._parents = (itself, (made,), {}), [], [made]
        return made

    def added_to(self, scores: Scores) -> Form | None:
        form, shape = scores.form, self.shape
        if not self.is_usable or form.packed is not None or form.leading != scores.shape[:-2]:
            return None
        if len(form.leading) != 2 or form.leading[1] != self.table.shape[0]:
            return None
        if shape[-3] != form.leading[1] or self.columns.shape != scores.shape[2:]:
            return None
        if self.dim() > 4 or shape[:-3] not in ((), (1,), form.leading[:1]):
            return None
        table = self.table
        if form.table is not None:
            if form.columns is None or not _is_same(form.columns, self.columns):
                return None
            table = form.table + table
        form = form._replace(table=table, columns=self.columns)
        return form if self.mask is None else scores.with_bias(self.mask, form)

    def plus(self, other: Any) -> IndexedBias | None:
        """Return the sum with a mask, or with biases of the same index; None if it isn't biases."""
        if not self.is_usable or self.dim() != 4 or self.shape[1] != self.table.shape[0]:
            return None
        if isinstance(other, IndexedBias):
            return self._plus_biases(other)
        if self.mask is not None or not is_plain(other) or other.requires_grad:
            return None
        if other.dim() != 4 or other.device != self.device:
            return None
        if torch.broadcast_shapes(other.shape, self.shape)[1:] != self.shape[1:]:
            return None
        return IndexedBias.of(self.table, self.columns, other)

    def _plus_biases(self, other: IndexedBias) -> IndexedBias | None:
        """Return the sum with biases that all layers share, which may include a mask."""
        if not other.is_usable or other.dim() != 4 or other.table.shape != self.table.shape:
            return None
        if self.table.device != other.table.device or not _is_same(self.columns, other.columns):
            return None
        if self.mask is not None and other.mask is not None:
            return None
        mask = other.mask if self.mask is None else self.mask
        return IndexedBias.of(self.table + other.table, self.columns, mask)

    def with_table(self, change: Callable[[Tensor], Tensor]) -> IndexedBias | None:
        """Return the biases after a function of each number, which is one of the table's numbers.

        None if a mask was added.
        """
        if self.mask is not None or not self.is_usable:
            return None
        return IndexedBias.of(change(self.table), self.columns, leading=self.shape[:-2])

    def viewed(self, again: Again) -> IndexedBias | None:
        """Return a view with more, or fewer, dimensions before those of the pairs."""
        func, (_, *rest), kwargs = again
        result = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *rest, **kwargs)
        if result.dtype != self.dtype or result.shape[-2:] != self.columns.shape:
            return None
        if not self.is_usable or self.mask is not None:
            return None
        return IndexedBias.of(self.table, self.columns, leading=result.shape[:-2])


def _keeps_size(
    x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *_: Any, **__: Any
) -> bool:
    """Whether a call of torch's ``interpolate`` returns its input unchanged."""
    same = isinstance(size, (tuple, list)) and tuple(size) == tuple(x.shape[-2:])
    return same and x.dim() == 4 and scale_factor is None and mode in ("nearest", "bilinear")


def _picked(table: Tensor, index: Tensor, mask: Tensor | None, leading: Sequence[int]) -> Tensor:
    biases = table[:, index].view(*leading, *index.shape)
    return biases if mask is None else biases + mask


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two indices are known to be the same without waiting for a device."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return True
    return first.device.type == second.device.type == "cpu" and torch.equal(first, second)


class _Gathered(torch.autograd.Function):
    """Uncomputed biases of all pairs, from a table.

    A custom function may get them, such as those of reentrant checkpoints and of FSDP2. It may then
    return their gradient, which is not yet that of the table.
    """

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, numbers: Callable[[Tensor], Tensor], made: list[Tensor]
    ) -> Tensor:
        ctx.table, ctx.numbers = table.shape, numbers
        return made[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            table = grad.new_zeros(ctx.table, requires_grad=True)
            matrix = ctx.numbers(table)
        return torch.autograd.grad(matrix, table, grad, create_graph=again)[0], None, None


class PackedTerm(Part):
    """A term of the scores of packed tokens, (1, 1 or H, Tq, Tk): a mask or a bias.

    It is -inf for pairs of tokens that don't attend to each other.
    """

    packed: Packed
    bias: Tensor | None

    @staticmethod
    def of(
        packed: Packed, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> PackedTerm:
        """Return the term for packed tokens.

        Args:
            packed: where each sequence begins.
            bias: that of the pairs of one sequence, (1 or B, 1 or H, longest queries, longest
                keys), as :func:`trifuse.nn.packing.attend` takes it. None: 0.
            dtype: that of the term, and of the bias.
            device: that of the tokens.
        """
        counts = (each.indices.shape[0] for each in packing.sides(packed))
        shape = (1, 1 if bias is None else bias.shape[1], *counts)
        arguments = (packed, bias, dtype, device)
        made: PackedTerm = PackedTerm._of(shape, dtype, device, (packing.dense_term, arguments, {}))
        made.packed, made.bias = packed, bias
        return made

    def added_to(self, scores: Scores) -> Form | None:
        form = scores.form
        if self._value is not None:  # which may have been changed in place
            return None
        if scores.shape[:2] != form.leading or scores.shape[2:] != self.shape[2:]:
            return None
        if form.packed is None:
            if form.adds_something or form.mask is not None:
                return None
        elif form.packed is not self.packed:
            return None
        bias, table = split(self.bias, form.query.dtype)
        if table is not None and form.table is not None:
            return None
        return form._replace(
            packed=self.packed,
            bias=add(form.bias, bias),
            table=form.table if table is None else table,
        )


class MaskedKeyBias(Part):
    """A bias of the keys, and the least number for pairs that are left out, (B, H, Lq, Lk).

    Falcon's model makes this from ALiBi and its mask, for all of its layers.
    """

    by_key: Tensor  # (B, H, 1, Lk)
    mask: Tensor  # (B, 1, Lq, Lk), 0, or the least number for pairs that are left out

    @staticmethod
    def of(by_key: Tensor, mask: Tensor, least: float) -> MaskedKeyBias:
        """Return the bias with the least number where ``mask`` is below -1."""
        shape = torch.broadcast_shapes(by_key.shape, mask.shape)
        call: Again = (_filled, (by_key, mask, least), {})
        made: MaskedKeyBias = MaskedKeyBias._of(shape, by_key.dtype, by_key.device, call)
        made.by_key, made.mask = by_key, torch.clamp(mask, max=0.0)
        return made

    def added_to(self, scores: Scores) -> Form | None:
        form = None if self._value is not None else scores.with_bias(self.by_key)
        return None if form is None else scores.with_bias(self.mask, form)


def _filled(by_key: Tensor, mask: Tensor, least: float) -> Tensor:
    return torch.masked_fill(by_key, mask < -1, least)


def split(bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Split the term that a model adds to its scores into a plain bias and biases by distance.

    Args:
        bias: the term.
        dtype: of the queries.
    """
    if not isinstance(bias, DistanceBias):
        return bias, None
    if not bias.is_usable:
        return bias.compute(), None
    return bias.mask, fitting(bias.table, dtype)


def split_mask(mask: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return a layer's mask without biases from a table, and these biases as arguments.

    Args:
        mask: the term that a layer adds to its scores, or any other mask.
        dtype: of the queries.
    """
    if not isinstance(mask, IndexedBias):
        return mask, {}
    if not mask.is_usable:
        return mask.compute(), {}
    tables = {"relative_bias": fitting(mask.table, dtype), "relative_index": mask.columns}
    return fitting(mask.mask, dtype), tables
