"""Calls on parts of a batch, which draw the same random numbers as a call on the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import trifuse
from trifuse.ops import _draws
from trifuse.ops._draws import Part, Share
from trifuse.ops.dropout import dropout
from trifuse.reference.philox import Place, draw_seed

HALF = Share(1, 1, 2)  # the second of two
THREE_QUARTERS = Share(1, 3, 4)  # the last three of four
THIRD = Share(1, 1, 3)  # the second of three
# A balanced part: the second of three processes has the second and the fifth of six tokens.
BALANCED = Share(1, 2, 6, second=4)

# Parts of a tensor (batch 4, sequence 6, ...), each with a function that cuts it out.
TOKENS: Mapping[str, tuple[Part, Callable[[Tensor], Tensor]]] = {
    "batch": (Part(HALF), lambda t: t[2:]),
    "unequal batch": (Part(THREE_QUARTERS), lambda t: t[1:]),
    "sequence": (Part(sequence=THIRD), lambda t: t[:, 2:4]),
    "batch and sequence": (Part(HALF, THIRD), lambda t: t[2:, 2:4]),
    "balanced": (Part(HALF, BALANCED), lambda t: t[2:, 1:5:3]),
}
HEADS: Mapping[str, tuple[Part, Callable[[Tensor], Tensor]]] = {
    "batch": (Part(HALF), lambda t: t[2:]),
    "unequal batch": (Part(THREE_QUARTERS), lambda t: t[1:]),
    "heads": (Part(heads=HALF), lambda t: t.chunk(2, 1)[1]),
    "both": (Part(HALF, heads=HALF), lambda t: t[2:].chunk(2, 1)[1]),
}


def differentiated(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], part: Part | None
) -> list[Tensor]:
    """Returns a call's result and the gradients of its sum of squares, all from one seed."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(7)
    if part is None:
        out = function(*leaves)
    else:
        with _draws.part(part):
            out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def compare(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    part: Part,
    cut: Callable[[Tensor], Tensor],
    cut_out: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Compares a call on a part with that part of the call on the whole."""
    whole = differentiated(function, tensors, None)
    found = differentiated(function, [cut(t) for t in tensors], part)
    cuts = [cut_out or cut, *[cut] * len(tensors)]
    for actual, expected, cut in zip(found, whole, cuts, strict=True):
        torch.testing.assert_close(actual, cut(expected))
        # Without the part's position in the whole, other elements would be dropped.
        assert torch.equal(actual == 0, cut(expected) == 0)


def check_dropout(columns: int = 16) -> None:
    x = torch.randn(4, 6, columns)
    for part, cut in TOKENS.values():
        compare(lambda x: dropout(x, 0.5), [x], part, cut)
        time_major = part._replace(batch_dim=1)
        if part.batch is _draws.WHOLE or part.sequence is _draws.WHOLE:
            compare(lambda x: dropout(x.transpose(0, 1), 0.5).transpose(0, 1), [x], time_major, cut)
    compare(lambda x: dropout(x, 0.5), [x.flatten(0, 1)], Part(HALF), lambda t: t[12:])


def check_norm(columns: int = 40) -> None:
    x = torch.randn(4, 6, columns)
    weight = torch.randn(columns)

    def norm(x: Tensor) -> Tensor:
        """Returns the sum, whose zeros show what was dropped, times the norm."""
        out, total = trifuse.dropout_add_layer_norm(
            x, None, weight, dropout_p=0.5, training=True, prenorm=True
        )
        return out * total

    for part, cut in TOKENS.values():
        compare(norm, [x], part, cut)


def check_attention(
    E: int = 16, dtype: torch.dtype = torch.float32, lengths: tuple[int, int] = (9, 19)
) -> None:
    Lq, Lk = lengths
    query, key, value = (
        torch.randn(4, heads, L, E).to(dtype) for heads, L in ((4, Lq), (2, Lk), (2, Lk))
    )

    def attention(*tensors: Tensor) -> Tensor:
        return trifuse.scaled_dot_product_attention(*tensors, dropout_p=0.5, enable_gqa=True)

    for part, cut in HEADS.values():
        compare(attention, [query, key, value], part, cut)


def check_block_of_attention(dtype: torch.dtype = torch.float32) -> None:
    """Queries from the 9th on and keys from the 17th on, as in a part of ring attention."""
    query, key = (torch.randn(2, 2, L, 64).to(dtype) / 4 for L in (12, 64))
    value = torch.eye(64, dtype=dtype).expand(2, 2, 64, 64)  # the output shows the weights
    torch.manual_seed(7)
    whole = trifuse.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(7)
    seed = _draws.with_place(draw_seed(query), Place(0, row=8, column=16))
    with _draws.given(seed):
        part = trifuse.scaled_dot_product_attention(
            query[:, :, 8:], key[:, :, 16:], value[:, :, 16:, 16:], dropout_p=0.5
        )
    assert torch.equal(part != 0, whole[:, :, 8:, 16:] != 0)


def check_lstm() -> None:
    x = torch.randn(3, 4, 5)
    weights = (torch.randn(24, 5) / 2, torch.randn(24, 6) / 2)

    def lstm(x: Tensor) -> Tensor:
        out, _ = trifuse.lstm(
            x, None, *weights, zoneout_h=0.5, zoneout_c=0.3, recurrent_dropout=0.4, training=True
        )
        return out

    for name in ("batch", "unequal batch"):
        part, cut = TOKENS[name]
        compare(lstm, [x], part, lambda t, cut=cut: cut(t.transpose(0, 1)).transpose(0, 1))
