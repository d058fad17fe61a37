"""Compiles the Triton kernels of lstm, gru and rnn without a GPU, and reports their resources.

``python tests/support/compile_lstm.py`` prints the table of all its calls; ``test_kernels_lstm``
and ``test_kernels_gru`` hold a few of them to a budget.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from ahead_of_time import compile_launches, main
from torch import Tensor

from trifuse.kernels import gru, lstm, rnn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Options of a call that add to a kernel's registers.
_FLAGS = dict.fromkeys(("peephole", "lengths", "training", "recompute"), True)
_ALL = {"cell_clip": 3.0, "zoneout": 0.1, "recurrent_dropout": 0.1, **_FLAGS}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": _ALL,
    "norm": {"norm": True},
    "norm, all": {**_ALL, "norm": True},
    "projected": {"projection": 512, "cell_clip": 3.0, "proj_clip": 3.0},
    "gru": {},
    "gru, reset first": {},
    "rnn": {},
    "rnn, relu": {},
}


class Call(NamedTuple):
    architecture: int
    dtype: str
    H: int
    options: str
    B: int = 16


CALLS = tuple(
    Call(architecture, dtype, H, options)
    for architecture in (80, 90)
    for dtype in DTYPES
    for H in (32, 64, 128, 512, 1000, 2048)
    for options in OPTIONS
)


class Usage(NamedTuple):
    kernel: str
    registers: int
    stack: int
    shared: int
    matrix: bool  # whether it uses the matrix unit
    hash: str


def compile_call(call: Call) -> list[Usage]:
    """Returns the resources of a call's kernels, forward and backward."""
    launches = {"gru": _launch_gru, "rnn": _launch_rnn}
    launch = launches.get(call.options.partition(",")[0], _launch_lstm)
    codes = {
        code.kernel: code  # a step's kernels are launched repeatedly
        for code in compile_launches(call.architecture, lambda: launch(call))
        if code.kernel.startswith(("lstm", "gru", "rnn"))
    }
    return [
        Usage(name.removesuffix("_kernel"), *code[1:4], "mma.sync" in code.ptx, code.hash)
        for name, code in codes.items()
    ]


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launch_lstm(call: Call) -> None:
    of = OPTIONS[call.options]
    T, B, H, I = 2, call.B, call.H, 64  # noqa: E741
    R, dtype = of.get("projection", H), DTYPES[call.dtype]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return _empty(*shape, dtype=dtype)

    norm = of.get("norm")
    biases = (empty(4 * H), empty(4 * H))
    parameters = [
        empty(4 * H, I),
        empty(4 * H, R),
        *biases,
        empty(R, H) if "projection" in of else None,
        empty(3, H) if "peephole" in of else None,
        *((empty(4 * H), empty(4 * H), empty(H), empty(H)) if norm else (None,) * 4),
    ]
    lengths = empty(B, dtype=torch.int64) if "lengths" in of else None
    inputs = (empty(T, B, I), None, None, parameters, lengths, empty(1, dtype=torch.int64))
    zoneout = of.get("zoneout", 0.0)
    clips = (of.get("cell_clip"), of.get("proj_clip"))
    noise = (zoneout, zoneout, of.get("recurrent_dropout", 0.0), of.get("training", False))
    options = ([False], False, 0.0, *clips, 1e-5, *noise)
    out, h_n, c_n, *kept = lstm.lstm_forward(*inputs, *options, 1 if "recompute" in of else 2)
    wanted = [True, False, False, *(p is not None for p in parameters)]
    lstm.lstm_backward(out, h_n, c_n, *inputs, out, *kept, *options, wanted)


def _launch_gru(call: Call) -> None:
    inputs, options = _without_cells(call, 3 * call.H), ([False], call.options == "gru")
    out, h_n, gates = gru.gru_forward(*inputs, *options, 2)
    gru.gru_backward(out, h_n, *inputs, out, gates, *options, [True] * 6)


def _launch_rnn(call: Call) -> None:
    inputs, options = _without_cells(call, call.H), ([False], "relu" in call.options)
    out, h_n = rnn.rnn_forward(*inputs, *options)
    rnn.rnn_backward(out, h_n, *inputs, out, *options, [True] * 6)


def _without_cells(call: Call, rows: int) -> tuple[Any, ...]:
    """Returns the tensors of a gru or an rnn, whose weights have ``rows`` rows."""
    T, B, H, I = 2, call.B, call.H, 64  # noqa: E741
    dtype = DTYPES[call.dtype]
    shapes = ((rows, I), (rows, H), (rows,), (rows,))
    parameters = [_empty(*shape, dtype=dtype) for shape in shapes]
    return _empty(T, B, I, dtype=dtype), None, parameters, None


if __name__ == "__main__":
    main(CALLS, compile_call)
