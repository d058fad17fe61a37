"""Bad arguments raise before a kernel runs. Messages give the argument, expectation and value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_checks import Kernels

import trifuse
from trifuse import backends

OP = trifuse.dropout_add_layer_norm
N = 8


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


NARROW = {"x": x(3, N, dtype=torch.bfloat16)}
WIDE = {"x": x(3, N, dtype=torch.float64)}

ARGUMENTS: list[tuple[str, dict[str, Any], type, str]] = [
    # Not tensors, or tensors of a kind that is not supported.
    ("x a list", {"x": [1.0]}, TypeError, r"^x: expected a Tensor; got list"),
    ("x None", {"x": None}, TypeError, r"^x: expected a Tensor; got NoneType"),
    *(
        (f"{name} a number", {name: 1.0}, TypeError, rf"^{name}: expected a Tensor; got float")
        for name in ("residual", "weight", "bias", "x_bias")
    ),
    (
        "x nested",
        {"x": torch.nested.nested_tensor([x(3, N), x(5, N)], layout=torch.jagged)},
        ValueError,
        r"^x: expected a dense tensor.*; got nested",
    ),
    (
        "x sparse",
        {"x": x(3, N).to_sparse()},
        ValueError,
        r"^x: expected a dense tensor; got torch.sparse_coo",
    ),
    (
        "residual sparse",
        {"residual": x(3, N).to_sparse()},
        ValueError,
        r"^residual: expected a dense tensor; got torch.sparse_coo",
    ),
    # Dtypes.
    *(
        (
            f"x {dtype}",
            {"x": x(3, N).to(dtype)},
            TypeError,
            rf"^x: expected float32, bfloat16, float16 or float64; got {dtype}",
        )
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    ),
    *(
        (
            f"{name} narrower than x",
            {name: x(N, dtype=torch.bfloat16)},
            TypeError,
            rf"^{name}: expected torch.float32, as x; got torch.bfloat16",
        )
        for name in ("residual", "weight", "bias", "x_bias")
    ),
    *(
        (
            f"{name} of the other 16 bits",
            {**NARROW, name: x(N, dtype=torch.float16)},
            TypeError,
            rf"^{name}: expected torch.bfloat16, as x, or torch.float32; got torch.float16",
        )
        for name in ("residual", "weight", "bias", "x_bias")
    ),
    (
        "residual of float64 beside 16 bits",
        {**NARROW, "residual": x(3, N, dtype=torch.float64)},
        TypeError,
        r"^residual: expected torch.bfloat16, as x, or torch.float32; got torch.float64",
    ),
    (
        "weight of float32 beside float64",
        {**WIDE, "weight": x(N)},
        TypeError,
        r"^weight: expected torch.float64, as x; got torch.float32",
    ),
    # Devices.
    *(
        (
            f"{name} on another device",
            {name: x(N, device="meta")},
            ValueError,
            rf"^{name}: expected a tensor on cpu, as x; got meta",
        )
        for name in ("residual", "weight", "bias", "x_bias")
    ),
    # Shapes.
    ("x 0-D", {"x": x()}, ValueError, r"^x: expected at least 1 dimension; got a scalar"),
    *(
        (
            f"residual {shape}",
            {"residual": x(*shape)},
            ValueError,
            rf"^residual: expected a shape broadcastable to \(3, 8\), as x; got {got}",
        )
        for shape, got in (
            ((3, 9), r"\(3, 9\)"),
            ((2, N), r"\(2, 8\)"),
            ((1, 3, N), r"\(1, 3, 8\)"),
            ((3,), r"\(3,\)"),
            ((0, N), r"\(0, 8\)"),
        )
    ),
    *(
        (
            f"{name} {shape}",
            {name: x(*shape)},
            ValueError,
            rf"^{name}: expected shape \(8,\), the last dimension of x; got {got}",
        )
        for name in ("weight", "bias", "x_bias")
        for shape, got in (
            ((1,), r"\(1,\)"),
            ((3,), r"\(3,\)"),
            ((1, N), r"\(1, 8\)"),
            ((), r"\(\)"),
        )
    ),
    # Numbers.
    *(
        (
            f"dropout_p {value}",
            {"dropout_p": value, "training": training},
            ValueError,
            rf"^dropout_p: expected a probability in \[0, 1\]; got {value}",
        )
        for value in (-0.1, 1.01, 1.5, float("nan"), float("inf"))
        for training in (False, True)
    ),
    (
        "dropout_p a tensor",
        {"dropout_p": torch.tensor(0.1)},
        TypeError,
        r"^dropout_p: expected a number; got Tensor",
    ),
    ("dropout_p None", {"dropout_p": None}, TypeError, r"^dropout_p: expected a number; got None"),
    *(
        (f"eps {value}", {"eps": value}, ValueError, rf"^eps: expected a number ≥ 0; got {value}")
        for value in (-1e-5, float("nan"))
    ),
    ("eps None", {"eps": None}, TypeError, r"^eps: expected a number; got NoneType"),
    *(
        (
            f"{name} {value!r}",
            {name: value},
            TypeError,
            rf"^{name}: expected True or False; got {type(value).__name__}",
        )
        for name in ("training", "prenorm", "rms_norm", "residual_in_fp32")
        for value in (1, "no", None, torch.tensor(True))
    ),
    ("eps a tensor", {"eps": torch.ones(())}, TypeError, r"^eps: expected a number; got Tensor"),
]


@pytest.mark.parametrize("name", ["auto", "eager", "cpp", "triton"])
@pytest.mark.parametrize(
    ("arguments", "error", "message"), [a[1:] for a in ARGUMENTS], ids=[a[0] for a in ARGUMENTS]
)
def test_arguments(name, arguments, error, message):
    """Also from ``explain``, and with any backend selected: arguments are checked first."""
    call = {"x": x(3, N)} | arguments
    with trifuse.backend(name):
        with Kernels() as kernels, pytest.raises(error, match=message) as caught:
            OP(**call)
        with pytest.raises(error, match=message):
            trifuse.explain(OP, **call)
    assert type(caught.value) in (error, trifuse.ArgumentError)
    assert kernels.called == []


def test_kernels_are_seen_where_arguments_are_good():
    """Otherwise the tests above would prove nothing."""
    with Kernels() as kernels, trifuse.backend("eager"):
        OP(x(3, N))
    assert kernels.called == ["trifuse.dropout_add_layer_norm_forward.eager"]


def test_positional_arguments_end_with_eps():
    with pytest.raises(TypeError, match="positional"):
        OP(x(N), None, None, None, 0.1, 1e-5, True)


def test_argument_errors_are_torch_s_too():
    """torch raises RuntimeError for shapes; code that catches that keeps working."""
    with pytest.raises(RuntimeError, match="weight"):
        OP(x(3, N), weight=x(N + 1))


# Backends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("cuda", {}, r"no CUDA kernels|tensors are on cpu"),
        ("cpp", {"device": "meta"}, r"tensors are on meta|the C\+\+ extension is missing"),
        ("triton", {"device": "meta"}, r"tensors are on meta|triton is not installed"),
        ("triton", {"dtype": torch.float64}, r"no kernel for torch.float64|not installed|on cpu"),
    ],
)
def test_a_backend_that_cannot_serve_the_call(name, arguments, why):
    message = rf"dropout_add_layer_norm: backend '{name}' can't serve this call: .*({why})"
    for function in (OP, lambda t: trifuse.explain(OP, t)):
        with trifuse.backend(name), pytest.raises(RuntimeError, match=message):
            function(x(2, 3, **arguments))


@pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_explain(dtype):
    """By position or by name, with options that don't affect the choice. It draws no seed."""
    state = torch.get_rng_state()
    t = x(3, N, dtype=dtype)
    choice = trifuse.explain(
        OP, t, t, t[0], None, 0.1, training=True, prenorm=True, rms_norm=True, x_bias=t[0]
    )
    assert choice == trifuse.explain(OP, x=t)
    assert choice.backend == "cpp"
    assert [name for name, _ in choice.refused] == ["cuda", "triton"]
    with trifuse.backend("eager"):
        assert trifuse.explain(OP, t) == backends.Choice("eager", ())
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(TypeError, match=r"missing a required argument: 'x'"):
        trifuse.explain(OP)
