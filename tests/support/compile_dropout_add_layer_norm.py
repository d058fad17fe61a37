"""Compiles the Triton kernels of dropout_add_layer_norm without a GPU, and reports their resources.

``python tests/support/compile_dropout_add_layer_norm.py`` prints the table of all its calls;
``test_kernels_dropout_add_layer_norm`` holds a few of them to a budget.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import torch
from ahead_of_time import compile_launches, main
from torch import Tensor

from trifuse.kernels import dropout_add_layer_norm as kernels
from trifuse.reference.philox import SEED_AND_PLACE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Call(NamedTuple):
    architecture: int = 90
    dtype: str = "fp32"
    N: int = 768
    dropout_p: float = 0.0
    wide_residual: bool = False  # residual and vectors in float32, whatever the dtype of x
    full: bool = False  # with x_bias, the returned sum and its gradient
    rows: int = 4096
    placed: bool = False  # a place follows the seed


CALLS = tuple(
    Call(architecture, dtype, N, *rest)
    for architecture in (80, 90)
    for dtype in DTYPES
    for N in (64, 768, 1000, 1024, 2048, 4096, 8192, 16384, 65536)
    for rest in ((), (0.1,), (0.1, True, True))
)


class Usage(NamedTuple):
    kernel: str
    registers: int
    stack: int
    shared: int
    loads: dict[str, int]  # from global memory: number by bits per thread
    stores: dict[str, int]
    hash: str


def compile_call(call: Call) -> list[Usage]:
    """Returns the resources of a call's kernels, forward and backward."""
    return [
        Usage(
            code.kernel.removeprefix("dropout_add_layer_norm_").removesuffix("_kernel"),
            *code[1:4],
            _widths("LDG(?:STS)?", code.sass),
            _widths("STG", code.sass),
            code.hash,
        )
        for code in compile_launches(call.architecture, lambda: _launch(call))
    ]


def _widths(instruction: str, sass: str) -> dict[str, int]:
    """Counts an instruction's occurrences by width in bits."""
    found = re.findall(rf"\b{instruction}\.([\w.]*)", sass)
    widths = Counter((re.search(r"\b(8|U8|16|U16|64|128)\b", f) or ["32"])[0] for f in found)
    return {width.removeprefix("U"): n for width, n in sorted(widths.items())}


def _launch(call: Call) -> None:
    dtype = DTYPES[call.dtype]
    wide = torch.float32 if call.wide_residual else dtype

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, grad_out = empty(call.rows, call.N), empty(call.rows, call.N)
    residual = empty(call.rows, call.N, dtype=wide)
    weight, bias, x_bias = (empty(call.N, dtype=wide) for _ in range(3))
    numbers = SEED_AND_PLACE if call.placed else 1
    seed = empty(numbers, dtype=torch.int64) if call.dropout_p else None
    tensors = (x, residual, weight, bias, x_bias if call.full else None, seed)
    options = (call.dropout_p, 1e-5, False)
    _, total, mean, rstd = kernels.dropout_add_layer_norm_forward(
        *tensors, *options, call.full, wide
    )
    if call.full:
        tensors = (total, None, *tensors[2:])
    kernels.dropout_add_layer_norm_backward(
        grad_out,
        total if call.full else None,
        *tensors,
        mean,
        rstd,
        *options,
        call.full,
        wide,
        (True, True, True, True, call.full),
    )


if __name__ == "__main__":
    main(CALLS, compile_call)
