"""Parts that the kernels of the recurrent operators, LSTM, GRU and RNN, share.

W_ih x is one matrix product over all tokens, and so are the gradients of input and weights. Only
the recurrence through h is computed step by step, in one of two ways:

- *Step by step*, for any sizes: at each step torch multiplies h by the recurrent weights, and one
  kernel does everything else. Both directions share every launch. A GRU whose reset gate precedes
  the product has two products and two kernels per step.
- *A whole sequence in one launch*, if a direction's recurrent weights fit into the shared memory of
  a multiprocessor. A program owns a block of rows from the first step to the last, and keeps the
  weights in shared memory and the states in registers. See ``fits_one_launch`` for the rule.

A program owns a tile: ``Block.rows`` rows by ``Block.columns`` units of one direction. All G gates
of a unit belong to its program; in memory they lie H columns apart. For two row blocks and three
unit blocks, with a letter for each program (an LSTM's gates; a coupled LSTM has i, g, o; a GRU has
r, z, n, but, unless its reset gate comes first, n, r, z, k in saved gates and gradients; an RNN has
one column of blocks):

                   W_ih x, W_hh h, their gradients: G·H columns           h, c: H columns
                      i             f             g             o
              +-------------+-------------+-------------+-------------+   +-------------+
    row block |  a   b   c  |  a   b   c  |  a   b   c  |  a   b   c  |   |  a   b   c  |
              +-------------+-------------+-------------+-------------+   +-------------+
    row block |  d   e   f  |  d   e   f  |  d   e   f  |  d   e   f  |   |  d   e   f  |
              +-------------+-------------+-------------+-------------+   +-------------+

The grid is (row blocks, unit blocks, directions). ``lstm_hidden_kernel`` has row blocks · T in the
first dimension; projection kernels have R columns. A kernel that multiplies by W_hh or normalises
needs whole rows: it has one unit block, whose width is a power of 2.

Both ways call the same functions for the parts of a step. Lengths stay on the device. A row that
has ended stays in the tile, but only writes zeros to its outputs. Nothing waits for the host, so a
call can be captured into a CUDA graph.

The backward writes the gradients of the gates' preactivations at all steps into one tensor, from
which matrix products give the weights' gradients. There are no atomics, so results are reproducible
bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels.arithmetic import round_to
from trifuse.kernels.launch import Block, Config, launch
from trifuse.reference.lstm import masked, valid_steps
from trifuse.reference.results import accumulation_dtype

INF = tl.constexpr(math.inf)


class UnitTile(NamedTuple):
    """The tile of a program: rows of the batch by units of one direction."""

    T: Any
    B: Any
    d: Any  # the direction
    block_row: Any
    first_row: Any
    first_column: Any
    row: Any  # (block.rows, 1), int64
    column: Any  # (1, block.columns)
    exists: Any  # (block.rows, 1): whether the batch has that row
    length: Any  # (block.rows, 1), int32: the number of steps of the row


class Step(NamedTuple):
    """One step of a tile. Fields are (block.rows, 1), except ``number``."""

    number: Any  # the same for all rows
    t: Any  # int64, the position; past a row's length, the step's number, at which it writes zeros
    active: Any  # whether the row has that step
    has_previous: Any  # whether it is not the row's first step
    previous_t: Any  # int64, the position of the previous step


# Arithmetic --------------------------------------------------------------------------------------


@triton.jit
def sigmoid(x):
    """Returns the logistic function without overflow, with a small relative error at both ends."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def tanh(x):
    """Returns tanh(x) with a small relative error everywhere, even in float64.

    Below 1/2 it is Lambert's continued fraction (1768), x / (1 + x² / (3 + x² / (5 + …))), cut off
    after 15, where the next term is less than 1e-18 of the result.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    from_exp = (1.0 - e) / (1.0 + e)
    y = tl.where(tl.abs(x) < 0.5, x * x, 0.0)
    numerator = ((36.0 * y + 6930.0) * y + 270270.0) * y + 2027025.0
    denominator = (((y + 630.0) * y + 51975.0) * y + 945945.0) * y + 2027025.0
    small = tl.abs(x) < 0.5
    return tl.where(small, x * (numerator / denominator), tl.where(x >= 0, from_exp, -from_exp))


# Memory ------------------------------------------------------------------------------------------


@triton.jit
def load(pointers, inside, dtype: tl.constexpr):
    """Loads as ``dtype``, 0 outside."""
    return tl.load(pointers, mask=inside, other=0.0).to(dtype)


@triton.jit
def store(pointers, values, inside):
    """Stores values inside, rounded to the dtype of ``pointers``."""
    tl.store(pointers, round_to(values, pointers.dtype.element_ty), mask=inside)


@triton.jit
def load_weights(weight_hh, number, tile, H: tl.constexpr, G: tl.constexpr, block: tl.constexpr):
    """Loads one gate's matrix from (D, G, H, H): (units of the gate, units of h), 0 outside."""
    unit = tl.arange(0, block.columns)[:, None]
    pointers = weight_hh + ((tile.d * G + number) * H + unit) * H + tile.column
    return tl.load(pointers, (unit < H) & (tile.column < H), other=0.0)


# Places ------------------------------------------------------------------------------------------


@triton.jit
def make_tile(block_row, lengths, T, B, block: tl.constexpr):
    """Returns the program's UnitTile in row block ``block_row``."""
    first_row = block_row * block.rows
    first_column = tl.program_id(1) * block.columns
    row = first_row + tl.arange(0, block.rows)[:, None]
    column = first_column + tl.arange(0, block.columns)[None, :]
    exists = row < B
    if lengths is None:
        length = tl.where(exists, T, 0)
    else:
        length = tl.load(lengths + row, mask=exists, other=0).to(tl.int32)
    d = tl.program_id(2)
    row = row.to(tl.int64)
    return UnitTile(T, B, d, block_row, first_row, first_column, row, column, exists, length)


@triton.jit
def make_step(tile, step, reverse: tl.constexpr):
    """Returns step ``step`` of the tile. Bit d of ``reverse`` is set if direction d reads rows from
    their last step to the first."""
    active = step < tile.length
    backwards = ((reverse >> tile.d) & 1) != 0
    t = tl.where(backwards & active, tile.length - 1 - step, step).to(tl.int64)
    return Step(step, t, active, tl.zeros_like(tile.length) < step, t + tl.where(backwards, 1, -1))


@triton.jit
def longest_row(tile):
    """Returns the number of steps of the tile's longest row."""
    return tl.max(tl.max(tile.length, 1), 0)


@triton.jit
def state_offsets(tile, N: tl.constexpr):
    """Returns offsets into (D, B, N), int64, because a tensor may exceed 2³¹ elements."""
    return (tile.d * tile.B + tile.row) * N + tile.column


@triton.jit
def token_offsets(tile, t, D: tl.constexpr, N: tl.constexpr):
    """Returns offsets into (T, B, D, N), int64."""
    return ((t * tile.B + tile.row) * D + tile.d) * N + tile.column


@triton.jit
def saved_offsets(tile, t, N: tl.constexpr):
    """Returns offsets into (D, T, B, N), int64."""
    return ((tl.cast(tile.d, tl.int64) * tile.T + t) * tile.B + tile.row) * N + tile.column


# States and steps --------------------------------------------------------------------------------


@triton.jit
def load_state(state, tile, N: tl.constexpr):
    """Loads the tile's part of (D, B, N), 0 outside."""
    return tl.load(state + state_offsets(tile, N), tile.exists & (tile.column < N), other=0.0)


@triton.jit
def store_state(state, values, tile, N: tl.constexpr):
    """Stores the tile's part of (D, B, N), rounded to its dtype."""
    store(state + state_offsets(tile, N), values, tile.exists & (tile.column < N))


@triton.jit
def load_product(products, number, tile, G: tl.constexpr, H: tl.constexpr):
    """Loads gate ``number`` of products (D, B, G, H) in the accumulation dtype, 0 outside."""
    dtype: tl.constexpr = tl.float64 if products.dtype.element_ty == tl.float64 else tl.float32
    pointers = products + state_offsets(tile, G * H) + number * H
    return load(pointers, tile.exists & (tile.column < H), dtype)


@triton.jit
def store_product(products, number, values, tile, G: tl.constexpr, H: tl.constexpr):
    """Stores gate ``number`` of (D, B, G, H), rounded to its dtype."""
    pointers = products + state_offsets(tile, G * H) + number * H
    store(pointers, values, tile.exists & (tile.column < H))


@triton.jit
def load_previous_h(h0, out, dtype: tl.constexpr, tile, at, D: tl.constexpr, N: tl.constexpr):
    """Loads h_{t-1} as ``dtype`` from h0 (D, B, N) or the output (T, B, D, N); 0 in rows that are
    not active."""
    inside = at.active & (tile.column < N)
    h = load(h0 + state_offsets(tile, N), inside & ~at.has_previous, dtype)
    previous = out + token_offsets(tile, at.previous_t, D, N)
    return h + load(previous, inside & at.has_previous, dtype)


@triton.jit
def next_h(new, h, out, tile, at, D: tl.constexpr, N: tl.constexpr):
    """Returns the next h in its dtype: ``new``, or h in rows that are not active. Writes the output
    (T, B, D, N).

    Columns past N are set to 0, because an infinite h would make them NaN, and the next product
    would spread this NaN.
    """
    inside = tile.column < N
    h = tl.where(at.active & inside, round_to(new, h.dtype), h)
    y = tl.where(at.active, h, 0.0).to(h.dtype)
    tl.store(out + token_offsets(tile, at.t, D, N), y, tile.exists & inside)
    return h


@triton.jit
def zero_steps(
    tensor,
    first,
    tile,
    G: tl.constexpr,
    H: tl.constexpr,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """Writes zeros to (T, B, D, G, H) from step ``first`` on, which no row of the tile has."""
    zeros = tl.full((block.rows, block.columns), 0.0, tensor.dtype.element_ty)
    for step in range(first, tile.T):
        at = make_step(tile, step, variant.reverse)
        pointers = tensor + token_offsets(tile, at.t, variant.D, G * H)
        for gate in tl.static_range(G):
            tl.store(pointers + gate * H, zeros, tile.exists & (tile.column < H))


# Configurations ----------------------------------------------------------------------------------


# The largest number of units of h for which a program can hold the recurrent weights. In 16 bits
# the weights are in shared memory, 128 KiB for an LSTM of 128 units. In float32, which no matrix
# unit multiplies exactly, threads multiply from registers, which spill with 64 units.
_MAX_UNITS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 32}
_EXCHANGE = 24 * 1024  # bytes of shared memory that a program needs beside the weights


def step_config(B: int, columns: int, whole_rows: bool = False) -> Config:
    """Returns the configuration of a step of ``columns`` units.

    A thread has 4 elements, 16 bytes of float32; more if whole rows exceed 2048 units. A step has
    little work, so small tiles spread it over many programs.
    """
    width = max(triton.next_power_of_2(columns), 8)
    if whole_rows:
        return Config(Block(1, width), min(max(width // 128, 1), 16))
    width = min(width, 128)
    rows = min(triton.next_power_of_2(max(B, 1)), 4)
    return Config(Block(rows, width), max(rows * width // 128, 1))


def sequence_config(H: int) -> Config:
    """Returns the configuration of a whole sequence in one launch. A matrix unit takes 16 rows."""
    columns = max(triton.next_power_of_2(H), 16)
    return Config(Block(16, columns), 4 if columns <= 32 else 8)


def fits_one_launch(device: torch.device, dtype: torch.dtype, H: int, gates: int) -> bool:
    """Returns whether one program can hold a direction's recurrent weights.

    If it can, one launch should be faster, even for few rows, because a step is one small product
    on one multiprocessor instead of two launches of several microseconds each. This has not been
    timed on a GPU yet.
    """
    columns = sequence_config(H).block.columns
    weights = gates * columns**2 * dtype.itemsize
    return columns <= _MAX_UNITS.get(dtype, 0) and weights + _EXCHANGE <= _shared_memory(device)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return 1 << 30  # the interpreter has no limit
    properties = torch.cuda.get_device_properties(device)
    # The limit to which a program can opt in; AMD devices have none.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


# Calls -------------------------------------------------------------------------------------------


class Sequences:
    """The sequences and the weight matrices of a call."""

    def __init__(
        self,
        input: Tensor,
        weights_ih: Sequence[Tensor],
        weights_hh: Sequence[Tensor],
        lengths: Tensor | None,
        reverse: Sequence[bool],
    ) -> None:
        self.T, self.B, _ = input.shape
        self.D = len(reverse)
        self.reverse = sum(1 << d for d in range(self.D) if reverse[d])
        self.lengths = None if lengths is None else lengths.contiguous()
        self.dtype, self.acc_dtype = input.dtype, accumulation_dtype(input.dtype)
        self.weight_ih = torch.cat(list(weights_ih))  # (D·G·H, I)
        self.weight_hh = _stacked(weights_hh)  # (D, G·H, R)
        self.valid = valid_steps(self.T, lengths)

    def zeros_or_copy(self, t: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros or a copy of ``t``, (D, B, columns), contiguous."""
        if t is None:
            return self.weight_hh.new_zeros((self.D, self.B, columns), dtype=dtype)
        return t.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def products_ih(self, x: Tensor) -> Tensor:
        """Returns W_ih x, from (T·B, I) to (T, B, D, G·H)."""
        rows = self.weight_ih.shape[0] // self.D
        return (x @ self.weight_ih.mT).view(self.T, self.B, self.D, rows)

    def previous_h(self, output: Tensor, h0: Tensor | None) -> Tensor:
        """Returns h_{t-1} at each position, (D, T, B, R); 0 past a row's length."""
        states = output.unflatten(2, (self.D, -1)).unbind(2)
        first = self.zeros_or_copy(h0, states[0].shape[-1], self.dtype)
        position = torch.arange(self.T, device=output.device)[:, None]
        results = []
        for d, (h, begin) in enumerate(zip(states, first[:, None], strict=True)):
            if not self.reverse >> d & 1:
                shifted = torch.cat([begin, h])[:-1]
            else:
                shifted = torch.cat([h, begin])[1:]
                if self.lengths is not None:
                    at_end = (position == self.lengths - 1)[..., None]
                    shifted = torch.where(at_end, begin, shifted)
            results.append(masked(shifted, self.valid))
        return torch.stack(results)

    def tokens(self, t: Tensor, d: int) -> Tensor:
        """Returns a view of one direction of (T, B, D, N) as (T·B, N)."""
        return t[:, :, d].view(self.T * self.B, t.shape[3])

    def grid(self, config: Config, columns: int, steps: int = 1) -> tuple[int, int, int]:
        """Returns the grid over blocks of rows, blocks of units, and directions."""
        rows = triton.cdiv(self.B, config.block.rows) * steps
        return rows, triton.cdiv(columns, config.block.columns), self.D


def stack(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """Stacks one tensor per direction, contiguous; None if they are None."""
    given = [t.to(dtype) for t in tensors if t is not None]
    return _stacked(given) if given else None


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Returns (D, ...), contiguous; one tensor is not copied."""
    if len(tensors) == 1:
        return tensors[0].contiguous()[None]
    return torch.stack(list(tensors))


class PreparedLaunch:
    """A kernel with its grid and constants, to be called once or at every step.

    Args:
        kernel: its last parameters are ``variant`` and ``block``.

    Calls may differ only in numbers for which the kernel isn't specialised, such as the step. So
    the code compiled for the first call is used for all others, because looking it up again would
    take longer than the launch itself.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], config: Config, variant: NamedTuple
    ) -> None:
        self.kernel, self.grid, self.config, self.variant = kernel, grid, config, variant
        self.compiled: Any = None

    def __call__(self, *args: Any) -> None:
        if self.compiled is not None:
            self.compiled(*args, self.variant, self.config.block)
            return
        compiled = launch(self.kernel, self.grid, self.config, *args, self.variant)
        if compiled is not None:  # None in the interpreter
            self.compiled = compiled[self.grid]


def as_results(
    grads: Sequence[Tensor | None], tensors: Sequence[Tensor | None], input: Tensor
) -> list[Tensor]:
    """Returns gradients in the dtypes and shapes of their tensors; (0,) for one that is None."""
    return [
        input.new_empty(0) if grad is None or t is None else grad.to(t.dtype).view(t.shape)
        for grad, t in zip(grads, tensors, strict=True)
    ]
