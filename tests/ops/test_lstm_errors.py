"""Bad arguments raise before a kernel runs; the error names the argument and what was expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_checks import Kernels

import trifuse
from trifuse import backends
from trifuse.ops import gru as gru_ops
from trifuse.ops import lstm as lstm_ops
from trifuse.ops import rnn as rnn_ops

T, B, I, H = 3, 2, 4, 5  # noqa: E741


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "input": ones(T, B, I, dtype=dtype),
        "hx": None,
        "weight_ih": ones(4 * H, I, dtype=dtype),
        "weight_hh": ones(4 * H, H, dtype=dtype),
    }


NARROW, WIDE = arguments(torch.bfloat16), arguments(torch.float64)
NORM = {
    "norm_ih_weight": ones(4 * H),
    "norm_hh_weight": ones(4 * H),
    "norm_cell_weight": ones(H),
}
VECTORS = ("bias_ih", "bias_hh", "weight_peephole", *NORM, "norm_cell_bias")
MATRICES = ("weight_ih", "weight_hh", "weight_hr")
PROBABILITIES = ("zoneout_h", "zoneout_c", "recurrent_dropout")
PAIR = r"^hx: expected a pair \(h0, c0\); got"
NOT_FLOATING = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)

ARGUMENTS: list[tuple[str, dict[str, Any], type, str]] = [
    # Not a tensor, or of a kind that is not served.
    ("input a list", {"input": [1.0]}, TypeError, r"^input: expected a Tensor; got list"),
    ("input sparse", {"input": ones(T, B, I).to_sparse()}, ValueError, r"^input: expected a dense"),
    (
        "input packed",
        {"input": torch.nn.utils.rnn.pack_padded_sequence(ones(T, B, I), [3, 2])},
        TypeError,
        r"^input: expected a Tensor; got PackedSequence",
    ),
    ("hx a tensor", {"hx": ones(2, B, H)}, TypeError, rf"{PAIR} Tensor"),
    ("hx of one", {"hx": (ones(B, H),)}, TypeError, rf"{PAIR} 1 of them"),
    ("h0 a number", {"hx": (1.0, None)}, TypeError, r"^h0: expected a Tensor; got float"),
    ("c0 a number", {"hx": (None, 1.0)}, TypeError, r"^c0: expected a Tensor; got float"),
    *(
        (f"{n} a number", {n: 1.0}, TypeError, rf"^{n}: expected a Tensor; got float")
        for n in (*MATRICES, *VECTORS)
    ),
    *(
        (f"{n} None", {n: None}, TypeError, rf"^{n}: expected a Tensor; got NoneType")
        for n in ("input", "weight_ih", "weight_hh")
    ),
    ("lengths a list", {"lengths": [3, 2]}, TypeError, r"^lengths: expected a Tensor; got list"),
    # Dtypes.
    *(
        (
            f"input {dtype}",
            {"input": ones(T, B, I).to(dtype)},
            TypeError,
            rf"^input: expected float32, bfloat16, float16 or float64; got {dtype}",
        )
        for dtype in NOT_FLOATING
    ),
    *(
        (
            f"{n} of another dtype",
            {n: ones(1, 1, dtype=torch.float64)},
            TypeError,
            rf"^{n}: expected torch.float32, as input; got torch.float64",
        )
        for n in (*MATRICES, *VECTORS)
    ),
    *(
        (
            f"{n} of float32 beside 16 bits",
            {**NARROW, n: ones(4 * H, I)},
            TypeError,
            rf"^{n}: expected torch.bfloat16, as input; got torch.float32",
        )
        for n in MATRICES
    ),
    *(
        (
            f"{n} of the other 16 bits",
            {**NARROW, n: ones(H, dtype=torch.float16)},
            TypeError,
            rf"^{n}: expected torch.bfloat16, as input, or torch.float32; got torch.float16",
        )
        for n in VECTORS
    ),
    (
        "h0 in float32 beside 16 bits",
        {**NARROW, "hx": (ones(B, H), None)},
        TypeError,
        r"^h0: expected torch.bfloat16; got torch.float32",
    ),
    (
        "c0 of the other 16 bits",
        {**NARROW, "hx": (None, ones(B, H, dtype=torch.float16))},
        TypeError,
        r"^c0: expected torch.bfloat16 or torch.float32; got torch.float16",
    ),
    (
        "c0 of float32 beside float64",
        {**WIDE, "hx": (None, ones(B, H))},
        TypeError,
        r"^c0: expected torch.float64; got torch.float32",
    ),
    (
        "lengths of floats",
        {"lengths": ones(B)},
        TypeError,
        r"^lengths: expected int32 or int64; got torch.float32",
    ),
    # Devices.
    *(
        (
            f"{n} on another device",
            {n: ones(4 * H, I, device="meta")},
            ValueError,
            rf"^{n}: expected a tensor on cpu, as input; got meta",
        )
        for n in (*MATRICES, *VECTORS)
    ),
    (
        "h0 on another device",
        {"hx": (ones(B, H, device="meta"), None)},
        ValueError,
        r"^h0: expected a tensor on cpu, as input; got meta",
    ),
    (
        "lengths on another device",
        {"lengths": torch.ones(B, dtype=torch.int64, device="meta")},
        ValueError,
        r"^lengths: expected a tensor on cpu, as input; got meta",
    ),
    # Shapes.
    *(
        (
            f"input {shape}",
            {"input": ones(*shape)},
            ValueError,
            rf"^input: expected shape \(T, B, I\) or \(T, I\); got {got}",
        )
        for shape, got in (((), r"\(\)"), ((4,), r"\(4,\)"), ((1, T, B, I), r"\(1, 3, 2, 4\)"))
    ),
    (
        "input 1-D, batch first",
        {"input": ones(4), "batch_first": True},
        ValueError,
        r"^input: expected shape \(B, T, I\) or \(T, I\); got \(4,\)",
    ),
    (
        "input without features",
        {"input": ones(T, B, 0), "weight_ih": ones(4 * H, 0)},
        ValueError,
        r"^input: expected at least one feature; got none",
    ),
    (
        "weight_ih for other features",
        {"weight_ih": ones(4 * H, I + 1)},
        ValueError,
        r"^input: expected 5 features, as weight_ih; got 4$",
    ),
    (
        "weight_ih 1-D",
        {"weight_ih": ones(I)},
        ValueError,
        r"^weight_ih: expected shape \(rows, 4\); got \(4,\)",
    ),
    *(
        (
            f"weight_ih of {rows} rows",
            {"weight_ih": ones(rows, I)},
            ValueError,
            rf"^weight_ih: expected shape \(4·H, 4\) with H ≥ 1; got \({rows}, 4\)",
        )
        for rows in (0, 3, 21)
    ),
    (
        "weight_ih of four gates, coupled",
        {"coupled": True},
        ValueError,
        r"^weight_ih: expected shape \(3·H, 4\) with H ≥ 1; got \(20, 4\)",
    ),
    (
        "weight_hh for another h",
        {"weight_hh": ones(4 * H, H + 1)},
        ValueError,
        r"^weight_hh: expected shape \(20, 5\); got \(20, 6\)",
    ),
    (
        "weight_hh for h before its projection",
        {"weight_hr": ones(2, H)},
        ValueError,
        r"^weight_hh: expected shape \(20, 2\); got \(20, 5\)",
    ),
    (
        "weight_hr of another c",
        {"weight_hr": ones(2, H + 1)},
        ValueError,
        r"^weight_hr: expected shape \(rows, 5\); got \(2, 6\)",
    ),
    (
        "weight_hr without rows",
        {"weight_hr": ones(0, H)},
        ValueError,
        r"^weight_hr: expected shape \(R, 5\) with R ≥ 1; got \(0, 5\)",
    ),
    *(
        (
            f"{n} of another shape",
            {**NORM, n: ones(7)},
            ValueError,
            rf"^{n}: expected shape {shape}; got \(7,\)",
        )
        for n, shape in (
            ("bias_ih", r"\(20,\)"),
            ("bias_hh", r"\(20,\)"),
            ("weight_peephole", r"\(3, 5\)"),
            ("norm_ih_weight", r"\(20,\)"),
            ("norm_hh_weight", r"\(20,\)"),
            ("norm_cell_weight", r"\(5,\)"),
            ("norm_cell_bias", r"\(5,\)"),
        )
    ),
    *(
        (
            f"{n} of another {what}",
            {"hx": (state, None) if n == "h0" else (None, state)},
            ValueError,
            rf"^{n}: expected shape \(2, 5\); got {got}",
        )
        for n in ("h0", "c0")
        for what, state, got in (
            ("size", ones(B, H + 1), r"\(2, 6\)"),
            ("batch", ones(B + 1, H), r"\(3, 5\)"),
            ("rank, as nn.LSTM has it", ones(1, B, H), r"\(1, 2, 5\)"),
        )
    ),
    (
        "h0 of an unbatched input",
        {"input": ones(T, I), "hx": (ones(1, H), None)},
        ValueError,
        r"^h0: expected shape \(5,\); got \(1, 5\)",
    ),
    *(
        (
            f"lengths {tuple(lengths.shape)}",
            {"lengths": lengths},
            ValueError,
            r"^lengths: expected shape \(B,\); got",
        )
        for lengths in (torch.tensor(3), torch.tensor([[3, 2]]), torch.tensor([3, 2, 1]))
    ),
    # Combinations.
    *(
        (
            f"layer norm without {n}",
            {k: v for k, v in NORM.items() if k != n},
            ValueError,
            rf"^{n}: expected a tensor, as norm_\w+_weight; got None",
        )
        for n in NORM
    ),
    (
        "norm_cell_bias alone",
        {"norm_cell_bias": ones(H)},
        ValueError,
        r"^norm_cell_bias: expected None without norm_cell_weight; got a tensor",
    ),
    (
        "proj_clip without a projection",
        {"proj_clip": 3.0},
        ValueError,
        r"^proj_clip: expected None without weight_hr; got 3.0",
    ),
    (
        "forget_bias, coupled",
        {"coupled": True, "forget_bias": 1.0, "weight_ih": ones(15, I), "weight_hh": ones(15, H)},
        ValueError,
        r"^forget_bias: expected 0 with coupled; got 1.0",
    ),
    # Numbers.
    *(
        (
            f"{n} {value}",
            {n: value, "weight_hr": ones(H, H)},
            ValueError,
            rf"^{n}: expected a number > 0 or None; got {value}",
        )
        for n in ("cell_clip", "proj_clip")
        for value in (0.0, -1.0, float("nan"))
    ),
    *(
        (
            f"{n} a tensor",
            {n: torch.ones(()), "weight_hr": ones(H, H)},
            TypeError,
            rf"^{n}: expected a number; got Tensor",
        )
        for n in ("cell_clip", "proj_clip", "forget_bias", "eps", *PROBABILITIES)
    ),
    *(
        (f"forget_bias {v}", {"forget_bias": v}, ValueError, rf"^forget_bias: .* finite .* {v}")
        for v in (float("nan"), float("inf"))
    ),
    *(
        (f"eps {v}", {"eps": v}, ValueError, rf"^eps: expected a number ≥ 0; got {v}")
        for v in (-1e-5, float("nan"))
    ),
    *(
        (
            f"{n} {value}",
            {n: value, "training": training},
            ValueError,
            rf"^{n}: expected a probability in \[0, 1\); got {value}",
        )
        for n in PROBABILITIES
        for value in (-0.1, 1.0, float("nan"))
        for training in (False, True)
    ),
    *(
        (f"{n} {value!r}", {n: value}, TypeError, rf"^{n}: expected True or False; got {kind}")
        for n in ("reverse", "coupled", "training", "recompute", "batch_first")
        for value, kind in (("x", "str"), (2**70, "int"))
    ),
    ("eps a flag", {"eps": True}, TypeError, r"^eps: expected a number; got bool"),
    ("eps too large", {"eps": 2**1100}, ValueError, r"^eps: expected a number that a float can"),
]


@pytest.mark.parametrize("name", ["auto", "eager", "cuda"])
@pytest.mark.parametrize(
    ("changed", "error", "message"), [a[1:] for a in ARGUMENTS], ids=[a[0] for a in ARGUMENTS]
)
def test_arguments(name, changed, error, message):
    """Arguments are checked first, on any selected backend, and in ``explain`` too."""
    call = arguments() | changed
    with trifuse.backend(name):
        with Kernels() as kernels, pytest.raises(error, match=message) as caught:
            trifuse.lstm(**call)
        with pytest.raises(error, match=message):
            trifuse.explain(trifuse.lstm, **call)
    assert type(caught.value) in (error, trifuse.ArgumentError)
    assert kernels.called == []


GRU = {"weight_ih": ones(3 * H, I), "weight_hh": ones(3 * H, H)}
RNN = {"weight_ih": ones(H, I), "weight_hh": ones(H, H)}
WEIGHTS: dict[str, dict[str, Tensor]] = {"lstm": {}, "gru": GRU, "rnn": RNN}  # unlike arguments()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"input": [1.0]}, TypeError, r"^input: expected a Tensor; got list"),
        ({"hx": (ones(B, H), None)}, TypeError, r"^hx: expected a Tensor; got tuple"),
        ({"hx": ones(1, B, H)}, ValueError, r"^hx: expected shape \(2, 5\); got \(1, 2, 5\)"),
        ({"hx": ones(B, H, dtype=torch.float64)}, TypeError, r"^hx: expected torch.float32; got"),
        ({"weight_ih": ones(20, I)}, ValueError, r"^weight_ih: .* \(3·H, 4\) .*; got \(20, 4\)"),
        ({"weight_hh": ones(15, 4)}, ValueError, r"^weight_hh: expected shape \(15, 5\); got"),
        ({"bias_ih": ones(5)}, ValueError, r"^bias_ih: expected shape \(15,\); got \(5,\)"),
        ({"bias_hh": 1.0}, TypeError, r"^bias_hh: expected a Tensor; got float"),
        ({"lengths": ones(B)}, TypeError, r"^lengths: expected int32 or int64; got"),
        (
            {"linear_before_reset": 0},
            TypeError,
            r"^linear_before_reset: expected True or False; got int",
        ),
    ],
)
def test_arguments_of_gru(changed, error, message):
    call = arguments() | GRU | changed
    with Kernels() as kernels, pytest.raises(error, match=message):
        trifuse.gru(**call)
    with pytest.raises(error, match=message):
        trifuse.explain(trifuse.gru, **call)
    if "linear_before_reset" in changed:
        with pytest.raises(error, match=message):
            trifuse.gru_cell(**call | {"input": call["input"][0]})
        for module in (trifuse.nn.GRU, trifuse.nn.GRUCell):
            with pytest.raises(error, match=message):
                module(I, H, **changed)
    assert kernels.called == []


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"input": [1.0]}, TypeError, r"^input: expected a Tensor; got list"),
        ({"hx": (ones(B, H), None)}, TypeError, r"^hx: expected a Tensor; got tuple"),
        ({"hx": ones(1, B, H)}, ValueError, r"^hx: expected shape \(2, 5\); got \(1, 2, 5\)"),
        ({"weight_ih": ones(20, 3)}, ValueError, "^input: expected 3 features, .*; got 4$"),
        ({"weight_hh": ones(5, 4)}, ValueError, r"^weight_hh: expected shape \(5, 5\); got"),
        ({"bias_ih": ones(4)}, ValueError, r"^bias_ih: expected shape \(5,\); got \(4,\)"),
        ({"lengths": ones(B)}, TypeError, r"^lengths: expected int32 or int64; got"),
        ({"reverse": 1}, TypeError, r"^reverse: expected True or False; got int"),
        (
            {"nonlinearity": "sigmoid"},
            ValueError,
            r"^nonlinearity: expected 'tanh' or 'relu'; got 'sigmoid'",
        ),
        ({"nonlinearity": None}, ValueError, r"^nonlinearity: .*; got None"),
    ],
)
def test_arguments_of_rnn(changed, error, message):
    call = arguments() | RNN | changed
    with Kernels() as kernels, pytest.raises(error, match=message):
        trifuse.rnn(**call)
    with pytest.raises(error, match=message):
        trifuse.explain(trifuse.rnn, **call)
    if not {"lengths", "reverse"} & changed.keys():
        call["input"] = call["input"][0] if isinstance(call["input"], Tensor) else call["input"]
        with pytest.raises(error, match=message):
            trifuse.rnn_cell(**call)
    assert kernels.called == []


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"input": [1.0]}, TypeError, "input: expected a Tensor; got list"),
        ({"input": None}, TypeError, "input: expected a Tensor; got NoneType"),
        ({"input": ones(B, I).to_sparse()}, ValueError, "input: expected a dense"),
        ({"input": ones(B, I).int()}, TypeError, "input: expected float32, .*; got torch.int32"),
        ({"input": ones(B, I + 1)}, ValueError, "input: expected 4 features, as weight_ih; got 5"),
        ({"input": ones(B, 0)}, ValueError, "input: expected 4 features, as weight_ih; got 0"),
        ({"hx": ones(B, H)}, TypeError, r"hx: expected a pair \(h0, c0\); got Tensor"),
        ({"hx": (ones(B, H),)}, TypeError, r"hx: expected a pair \(h0, c0\); got 1 of them"),
        ({"hx": (ones(B, H), 1.0)}, TypeError, "c0: expected a Tensor; got float"),
        ({"hx": (ones(B + 1, H), None)}, ValueError, r"h0: .* \(2, 5\); got \(3, 5\)"),
        ({"hx": (None, ones(H))}, ValueError, r"c0: expected shape \(2, 5\); got \(5,\)"),
        ({"hx": (None, ones(B, H).double())}, TypeError, "c0: expected torch.float32; got"),
        ({"weight_ih": None}, TypeError, "weight_ih: expected a Tensor; got NoneType"),
        ({"weight_ih": ones(19, I)}, ValueError, r"weight_ih: expected shape \(4·H, 4\)"),
        ({"weight_hh": ones(20, 4)}, ValueError, r"weight_hh: expected shape \(20, 5\); got"),
        ({"weight_hh": ones(20)}, ValueError, r"weight_hh: expected shape \(20, 5\); got"),
        ({"weight_hh": ones(20, H).bfloat16()}, TypeError, "weight_hh: expected torch.float32"),
        ({"bias_ih": ones(5)}, ValueError, r"bias_ih: expected shape \(20,\); got \(5,\)"),
        ({"bias_hh": ones(20).double()}, TypeError, "bias_hh: expected torch.float32"),
        ({"bias_hh": ones(20, device="meta")}, ValueError, "bias_hh: expected a tensor on cpu"),
    ],
)
def test_arguments_of_a_cell(changed, error, message):
    """A cell's op has its own checks, but its error messages come from the checks in Python."""
    call = {**arguments(), "input": ones(B, I), **changed}
    with pytest.raises(error, match=f"^{message}"):
        trifuse.lstm_cell(**call)


@pytest.mark.parametrize("shape", [(), (1, B, I)], ids=str)
@pytest.mark.parametrize("cell", [trifuse.lstm_cell, trifuse.gru_cell, trifuse.rnn_cell])
def test_arguments_of_cells(cell, shape):
    message = r"^input: expected shape \(B, I\) or \(I,\); got"
    for function in (cell, lambda *a: trifuse.explain(cell, *a)):
        with pytest.raises(ValueError, match=message):
            function(ones(*shape), None, ones(12, I), ones(12, 3))


def test_arguments_of_layers():
    parameters = lstm_ops.Parameters(ones(4 * H, I), ones(4 * H, H))
    other = parameters._replace(bias_ih=ones(4 * H))
    x = ones(T, B, I)
    for call, message in (
        (lambda: lstm_ops.layer(x, None, None, []), "parameters: .* one or two .*; got 0"),
        (lambda: lstm_ops.layer(x, None, None, [parameters] * 2), "reverse: expected 2 flags"),
        (
            lambda: lstm_ops.layer(x, None, None, [parameters, other], reverse=(False, True)),
            r"bias_ih: expected shape None, as the first direction's; got \(20,\)",
        ),
        (
            lambda: lstm_ops.layer(x, ones(B, H), None, [parameters]),
            r"h0: expected shape \(1, 2, 5\); got \(2, 5\)",
        ),
        (
            lambda: gru_ops.layer(x, None, [gru_ops.Parameters(*GRU.values())], reverse=()),
            "reverse: expected 1 flags",
        ),
        (
            lambda: rnn_ops.layer(x, None, [rnn_ops.Parameters(*RNN.values())], nonlinearity=""),
            "nonlinearity: expected 'tanh' or 'relu'; got ''",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


LSTM_MODULE, GRU_MODULE = trifuse.nn.LSTM(I, H), trifuse.nn.GRU(I, H)
RNN_MODULE = trifuse.nn.RNN(I, H)
LSTM_CELL, RNN_CELL = trifuse.nn.LSTMCell(I, H), trifuse.nn.RNNCell(I, H, nonlinearity="elu")


@pytest.mark.parametrize(
    ("module", "input", "hx", "error", "message"),
    [
        (LSTM_MODULE, [1.0], None, TypeError, "input: expected a Tensor; got list"),
        (LSTM_MODULE, ones(I), None, ValueError, r"input: .* \(T, B, I\) or \(T, I\); got \(4,\)"),
        (
            trifuse.nn.LSTM(I, H, batch_first=True),
            ones(1, B, T, I),
            None,
            ValueError,
            r"input: expected shape \(B, T, I\) or \(T, I\); got \(1, 2, 3, 4\)",
        ),
        (
            LSTM_MODULE,
            ones(T, B, I),
            ones(1, B, H),
            TypeError,
            r"hx: expected a pair \(h0, c0\); got Tensor",
        ),
        (
            LSTM_MODULE,
            ones(T, B, I),
            (ones(1, B, H),),
            TypeError,
            r"hx: expected a pair \(h0, c0\); got 1 of them",
        ),
        (LSTM_MODULE, ones(T, B, I), (1.0, None), TypeError, "h0: expected a Tensor; got float"),
        (
            LSTM_MODULE,
            ones(T, B, I),
            (ones(1, B, H), ones(B, H)),
            ValueError,
            r"c0: expected shape \(1, 2, 5\); got \(2, 5\)",
        ),
        (
            LSTM_MODULE,
            ones(T, I),
            (ones(2, H), None),
            ValueError,
            r"h0: expected shape \(1, 5\); got \(2, 5\)",
        ),
        (
            LSTM_CELL,
            ones(B, I),
            ones(B, H),
            TypeError,
            r"hx: expected a pair \(h0, c0\); got Tensor",
        ),
        (LSTM_CELL, ones(B, I), (1.0, None), TypeError, "h0: expected a Tensor; got float"),
        (GRU_MODULE, ones(I), None, ValueError, r"input: .* \(T, B, I\) or \(T, I\); got \(4,\)"),
        (GRU_MODULE, ones(T, B, I), (None,), TypeError, "hx: expected a Tensor; got tuple"),
        (GRU_MODULE, ones(T, B, I), ones(B, H), ValueError, r"hx: .* \(1, 2, 5\); got \(2, 5\)"),
        (RNN_MODULE, ones(I), None, ValueError, r"input: .* \(T, B, I\) or \(T, I\); got \(4,\)"),
        (RNN_MODULE, ones(T, B, I), ones(B, H), ValueError, r"hx: .* \(1, 2, 5\); got \(2, 5\)"),
        (RNN_CELL, ones(B, I), None, RuntimeError, "nonlinearity: .* 'relu'; got 'elu'"),
    ],
)
def test_arguments_of_modules(module, input, hx, error, message):
    """Errors show the caller's shapes, not those that the module passes on."""
    with Kernels() as kernels, pytest.raises(error, match=f"^{message}"):
        module(input, hx)
    assert kernels.called == []


@pytest.mark.parametrize("lengths", [[4, 1], [-1, 2]])
@pytest.mark.parametrize("name", ["eager", "cpp", "triton"])
@pytest.mark.parametrize("operator", WEIGHTS)
def test_lengths_out_of_range(operator, name, lengths):
    """Only the values show this, so the op checks them."""
    why_not = backends._WHY_NOT[name](backends.Call(operator, "cpu", torch.float32))
    if why_not is not None:
        pytest.skip(why_not)
    call = arguments() | WEIGHTS[operator]
    message = rf"lengths: expected lengths in \[0, 3\]; got \[{lengths[0]}, {lengths[1]}\]"
    with trifuse.backend(name), pytest.raises(ValueError, match=message):
        getattr(trifuse, operator)(**call, lengths=torch.tensor(lengths))


def test_kernels_are_seen_where_arguments_are_good():
    """Good arguments reach a kernel; otherwise the tests above would prove nothing."""
    with Kernels() as kernels, trifuse.backend("eager"):
        trifuse.lstm(**arguments())
        trifuse.gru(**arguments() | GRU)
        trifuse.rnn(**arguments() | RNN)
    assert kernels.called == [f"trifuse.{name}_forward.eager" for name in WEIGHTS]


def test_positional_arguments_end_with_the_parameters():
    with pytest.raises(TypeError, match="positional"):
        trifuse.lstm(*arguments().values(), None, None, None, None)
    with pytest.raises(TypeError, match="positional"):
        trifuse.gru(*(arguments() | GRU).values(), None, None, None)
    with pytest.raises(TypeError, match="positional"):
        trifuse.rnn(*(arguments() | RNN).values(), None, None, "tanh")


# Backends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", WEIGHTS)
@pytest.mark.parametrize(
    ("name", "device", "dtype", "why"),
    [
        ("cuda", "cpu", torch.float32, "no CUDA kernels|tensors are on cpu"),
        ("cpp", "meta", torch.float32, r"tensors are on meta|the C\+\+ extension is missing"),
        ("triton", "meta", torch.float32, "tensors are on meta|triton is not installed"),
        ("triton", "cpu", torch.float64, "no kernel for torch.float64|not installed|on cpu"),
    ],
)
def test_a_backend_that_cannot_serve_the_call(operator, name, device, dtype, why):
    call = arguments() | WEIGHTS[operator]
    call = {k: v.to(device, dtype) for k, v in call.items() if v is not None} | {"hx": None}
    function = getattr(trifuse, operator)
    message = rf"{operator}: backend '{name}' can't serve this call: .*({why})"
    with trifuse.backend(name):
        with pytest.raises(RuntimeError, match=message):
            function(**call)
        with pytest.raises(RuntimeError, match=message):
            trifuse.explain(function, **call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_explain(dtype):
    """explain() takes a call's arguments, positional or by name, and draws no random numbers."""
    state = torch.get_rng_state()
    call = arguments(dtype)
    choice = trifuse.explain(trifuse.lstm, **call, zoneout_h=0.5, training=True, batch_first=False)
    assert choice == trifuse.explain(trifuse.lstm, *call.values())
    cell = {**call, "input": call["input"][0]}
    assert choice == trifuse.explain(trifuse.lstm_cell, **cell)
    assert [name for name, _ in choice.refused][:2] == ["cuda", "triton"]
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("gru", "rnn"):
        weights = {k: v.to(dtype) for k, v in WEIGHTS[name].items()}
        function, one_step = getattr(trifuse, name), getattr(trifuse, f"{name}_cell")
        assert trifuse.explain(function, **call | weights).backend == choice.backend
        assert trifuse.explain(one_step, **cell | weights).backend == choice.backend
    with pytest.raises(TypeError, match=r"missing a required argument: 'weight_hh'"):
        trifuse.explain(trifuse.lstm, call["input"], None, call["weight_ih"])


def test_explain_checks_the_states_of_all_layers_of_a_module():
    module, x, c0 = trifuse.nn.LSTM(4, 5, 2), torch.ones(3, 2, 4), torch.ones(2, 2, 5)
    for call in (module, lambda *a: trifuse.explain(module, *a)):
        with pytest.raises(ValueError, match=r"^h0: expected shape \(2, 2, 5\); got \(3, 2, 5\)"):
            call(x, (torch.ones(3, 2, 5), c0))
        with pytest.raises(TypeError, match=r"^hx: expected a pair"):
            call(x, c0)


def test_explain_takes_packed_sequences():
    module, x = trifuse.nn.LSTM(4, 5, 2), torch.ones(3, 2, 4)
    lengths = torch.tensor([3, 1])
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    assert trifuse.explain(module, packed) == trifuse.explain(module, x, lengths=lengths)
    for call in (module, lambda *a, **k: trifuse.explain(module, *a, **k)):
        with pytest.raises(ValueError, match=r"^lengths: expected None beside a PackedSequence"):
            call(packed, lengths=lengths)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cell_clip": "x"}, TypeError, "cell_clip: expected a number; got str"),
        ({"cell_clip": -1.0}, ValueError, "cell_clip: expected a number > 0 or None"),
        ({"proj_clip": 1.0}, ValueError, "proj_clip: expected None without weight_hr; got 1.0"),
        ({"forget_bias": float("nan")}, ValueError, "forget_bias: expected a finite number"),
        ({"coupled": 1}, TypeError, "coupled: expected True or False; got int"),
        ({"coupled": True, "forget_bias": 1.0}, ValueError, "forget_bias: expected 0 with coupled"),
        ({"peephole": "x"}, TypeError, "peephole: expected True or False; got str"),
        ({"layer_norm": 2}, TypeError, "layer_norm: expected True or False; got int"),
        ({"recompute": 2}, TypeError, "recompute: expected True or False; got int"),
        ({"eps": -1.0}, ValueError, "eps: expected a number ≥ 0; got -1.0"),
        ({"zoneout_h": 1.0}, ValueError, r"zoneout_h: expected a probability in \[0, 1\)"),
        ({"zoneout_c": -0.5}, ValueError, r"zoneout_c: expected a probability in \[0, 1\)"),
        ({"recurrent_dropout": None}, TypeError, "recurrent_dropout: expected a number"),
    ],
)
def test_module_arguments(arguments, error, message):
    """Arguments that torch.nn.LSTM lacks; its constructor checks the others."""
    with pytest.raises(error, match=message):
        trifuse.nn.LSTM(I, H, **arguments)
