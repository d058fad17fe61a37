"""Compiles the Triton kernels of attention without a GPU, and reports their resources.

``python tests/support/compile_attention.py`` prints registers, stack and shared memory of every
call in ``CALLS``. ``test_kernels_attention`` runs it for a few calls and holds them to a budget.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from ahead_of_time import compile_launches, main

from trifuse.kernels import attention, attention_configurations
from trifuse.reference.philox import SEED_AND_PLACE

# Options of a call that add to a kernel's registers.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "bool mask": {"mask": torch.bool},
    "causal dropout": {"causal": True, "dropout_p": 0.1},
    "placed dropout": {"causal": True, "dropout_p": 0.1, "placed": True},
    "all": {"mask": "query's", "causal": True, "dropout_p": 0.1},
    "relative bias": {"by_distance": True},
    "a diagonal each": {"causal": True, "diagonals": True},
    "tables": {"indexed": True},
    "few queries": {"queries": 4, "key_heads": 2, "causal": True},
    "few queries, mask": {"queries": 1, "key_heads": 1, "mask": "query's", "by_distance": True},
    "few queries, packed": {"queries": 1, "key_heads": 2, "causal": True, "packed": True},
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Call(NamedTuple):
    architecture: int
    dtype: str
    head_dim: int
    options: str
    kernels: Sequence[str] = ()  # kernels to compile; default: all
    B: int = 2
    L: int = 512


CALLS = tuple(
    Call(architecture, dtype, head_dim, options)
    for architecture in (80, 90)
    for dtype in DTYPES
    for head_dim in (64, 128, 256)
    for options in OPTIONS
)


class Usage(NamedTuple):
    kernel: str
    registers: int  # per thread
    stack: int  # bytes per thread, nearly all of them spills
    shared: int  # bytes per program
    hash: str
    matrix: str  # the matrix unit's instructions: HMMA, HGMMA (wgmma), both or none


def compile_call(call: Call) -> list[Usage]:
    """Returns the resources of a call's kernels, forward and backward."""
    attention_configurations._has_wgmma = lambda device: call.architecture == 90
    names = {kernel.__name__: name for name, kernel in attention._KERNELS.items()}
    wanted = tuple(name for name, short in names.items() if short in call.kernels)
    return [
        Usage(
            names[code.kernel],
            *code[1:4],
            code.hash,
            " ".join(sorted(set(re.findall(r"\bHG?MMA\b", code.sass)))),
        )
        for code in compile_launches(
            call.architecture,
            lambda: _launch(
                DTYPES[call.dtype], call.head_dim, call.B, call.L, **OPTIONS[call.options]
            ),
            wanted,
        )
    ]


def _launch(
    dtype: torch.dtype,
    head_dim: int,
    B: int,
    L: int,
    mask: torch.dtype | str | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    placed: bool = False,
    softcap: float | None = None,
    by_distance: bool = False,
    diagonals: bool = False,
    indexed: bool = False,
    queries: int = 0,  # default: L
    key_heads: int = 4,
    packed: bool = False,
) -> None:
    H = 4
    Lq = queries or L
    if queries:
        L = 4 * L  # more than one chunk

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = (1, B * Lq, B * L) if packed else (B, Lq, L)
    query, grad_out = (empty(rows[0], H, rows[1], head_dim) for _ in range(2))
    key, value = (empty(rows[0], key_heads, rows[2], head_dim) for _ in range(2))
    boundaries = [empty(B + 1, dtype=torch.int32) for _ in range(2)] if packed else [None, None]
    attn_mask = None
    if mask is not None:
        attn_mask = empty(1, H, Lq, L, dtype=dtype if isinstance(mask, str) else mask)
    seed = empty(SEED_AND_PLACE if placed else 1, dtype=torch.int64) if dropout_p else None
    relative_bias = empty(1, H, Lq + L - 1, dtype=torch.float32) if by_distance else None
    diagonal = empty(B, dtype=torch.int64) if diagonals else None
    tables: tuple[torch.Tensor | None, ...] = (relative_bias, None, None, None)
    if indexed:
        n = 64
        index = empty(L, L, dtype=torch.int64)
        tables = (empty(1, H, n), empty(B, H, L, n), empty(B, H, L, n), index)
    tensors = (query, key, value, attn_mask, *tables, None, diagonal, *boundaries, seed)
    options = (Lq, L, None, softcap, None, 0 if causal else None, False, dropout_p)
    out, lse = attention.attention_forward(*tensors, *options)
    floating = attn_mask is not None and attn_mask.is_floating_point()
    wanted = (True, True, True, floating, *(table is not None for table in tables[:3]))
    attention.attention_backward(grad_out, None, *tensors, out, lse, *options, wanted)


if __name__ == "__main__":
    main(CALLS, compile_call)
