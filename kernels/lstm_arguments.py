"""Arguments of the LSTM's kernels: named tuples of tensors, and the compile-time parameters.

T is the number of steps, B of rows (sequences), D of directions, H of units, G of gates, P of
peepholes (G - 1), and R the size of h. A tensor that a call does not have is None, so that its code
is not compiled.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Tensors that both passes read.

    Vectors are in the accumulation dtype: float32, or float64 for float64.
    """

    lengths: Tensor | None  # (B,) int64
    seed: Tensor | None  # int64, for zoneout in training
    dropout: Tensor | None  # (D, B, R): the recurrent dropout's multipliers
    bias: Tensor | None  # (D, G, H): both biases and the forget bias
    peephole: Tensor | None  # (D, P, H)
    norm_hh: Tensor | None  # (D, G, H)
    norm_cell_weight: Tensor | None  # (D, H)
    norm_cell_bias: Tensor | None  # (D, H)


class State(NamedTuple):
    """The state that one step passes to the next."""

    h: Tensor  # (D, B, R)
    h_dropped: Tensor | None  # (D, B, R): h after recurrent dropout, if there is any
    c: Tensor  # (D, B, H), in the accumulation dtype


class Saved(NamedTuple):
    """Results that the forward saves for the backward; None if not saved."""

    gates: Tensor | None  # (D, T, B, G, H): i, f, g, o; with coupled i, g, o
    cells: Tensor | None  # (D, T, B, H): c_t
    clipped: Tensor | None  # bool (D, T, B, ...): H columns if c has a clip, then R if h has one


class Gradients(NamedTuple):
    """Gradients that the backward carries from step to step (h, c) or writes for all tokens.

    The latter may first hold products of the forward, which each step reads and overwrites.
    """

    h: Tensor  # (D, B, R), in the accumulation dtype, without the part through W_hh
    c: Tensor  # (D, B, H), in the accumulation dtype
    gates: Tensor  # (T, B, D, G, H): of the preactivations; with recompute, first their products
    products_hh: Tensor | None  # with layer norm, in the same shape: of W_hh h; first W_hh h


class Past(NamedTuple):
    """Results of the forward that the backward reads."""

    saved: Saved
    c0: Tensor  # (D, B, H), in the accumulation dtype


class Shares(NamedTuple):
    """Gradients of vectors, per row block of the backward; None if the call has no such vector.

    The dimension of 2 holds two sums that are added at the end: that of the current run of steps,
    and that of all earlier runs.
    """

    peephole: Tensor | None  # (D, row blocks, P, 2, H)
    norm_hh: Tensor | None  # (D, row blocks, G, 2, H)
    norm_cell: Tensor | None  # (D, row blocks, 2, 2, H): weight and bias


class Variant(NamedTuple):
    """Compile-time parameters of a kernel, besides which tensors are None."""

    H: int
    R: int  # size of h: H, or the size of the projection
    D: int  # directions
    G: int  # gates: 4, or 3 if coupled
    reverse: int  # bit d: direction d reads rows from their ends
    coupled: bool
    projected: bool
    training: bool
    recompute: bool  # in the backward: gates weren't saved
    cell_clip: float
    proj_clip: float
    eps: float
    clip_columns: int  # the number of columns of Saved.clipped
    zoneout_h: float
    zoneout_c: float
    threshold_h: int  # zoneout_h as the threshold of random 16-bit values
    threshold_c: int
    placed: bool  # a place follows the seed
