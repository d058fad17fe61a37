"""Dropout + residual + LayerNorm: argument checks, choice of backend, registration."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from trifuse import backends
from trifuse.ops import _batching, _checks, _draws, _explained, _fast_path, _operator
from trifuse.ops._checks import fail
from trifuse.reference import dropout_add_layer_norm as reference
from trifuse.reference.results import accumulation_dtype


@overload
def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    *,
    training: bool = False,
    prenorm: Literal[False] = False,
    x_bias: Tensor | None = None,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor: ...
@overload
def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    *,
    training: bool = False,
    prenorm: Literal[True],
    x_bias: Tensor | None = None,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]: ...
def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    *,
    training: bool = False,
    prenorm: bool = False,
    x_bias: Tensor | None = None,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm(residual + dropout(x + x_bias)), the end of a Transformer's sublayer, fused.

    Vaswani et al., "Attention Is All You Need" (2017), 5.4; Ba et al., "Layer Normalization"
    (2016), equation 4. Rows are read once and written once; the backward draws the dropout again
    instead of storing it. Without ``residual`` and dropout it is ``torch.nn.functional.layer_norm``
    over the last dimension.

    Args:
        x: (..., N), float32, bfloat16, float16 or float64; a sublayer's output.
        residual: broadcastable to (..., N), in the dtype of x or float32; the sublayer's input.
        weight: (N,), in the dtype of x or float32. Default: ones.
        bias: (N,), likewise. Default: zeros.
        dropout_p: probability of dropping an element of x, with a resolution of 2⁻¹⁶. Drawn from
            torch's default generator for the device; the same seed drops the same elements on every
            backend.
        eps: added to the variance.
        training: if False, nothing is dropped, whatever ``dropout_p`` is.
        prenorm: also return the sum, as the next sublayer's residual (pre-norm Transformers).
        x_bias: (N,), in the dtype of x or float32, added to x before dropout: the bias of the
            preceding linear layer, if that layer omits it.
        rms_norm: divide by the root mean square instead (Zhang and Sennrich, 2019): no mean is
            subtracted.
        residual_in_fp32: with ``prenorm``, return the sum in float32, or float64 for float64. A
            float32 residual gives a float32 sum in any case.

    Returns:
        (..., N) in the dtype of x, contiguous; with ``prenorm`` also the sum, (..., N), in the
        dtype of the residual or else of x, unless ``residual_in_fp32`` is set.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that doesn't fit the others.
        ValueError: a shape, device or range that doesn't fit (``trifuse.ArgumentError``).
        RuntimeError: the backend asked for by name can't serve the call.

    Example:
        >>> x, residual = torch.randn(2, 5, 768), torch.randn(2, 5, 768)
        >>> weight, bias = torch.ones(768), torch.zeros(768)
        >>> dropout_add_layer_norm(x, residual, weight, bias, 0.1, training=True).shape
        torch.Size([2, 5, 768])
    """
    on_gpu = None
    if getattr(x, "is_cuda", False):
        on_gpu = backends.Call("dropout_add_layer_norm", "cuda", x.dtype)
    fast = _fast_path.extension(dropout_p, on_gpu)
    if fast is not None and residual_in_fp32 is False:
        results: Tensor | tuple[Tensor, Tensor] | None = fast.dropout_add_layer_norm(
            x, residual, weight, bias, dropout_p, eps, training, prenorm, x_bias, rms_norm
        )
        if results is not None:
            return results
    call = _prepare(
        x,
        residual,
        weight,
        bias,
        dropout_p,
        eps,
        training,
        prenorm,
        x_bias,
        rms_norm,
        residual_in_fp32,
    )
    out, total = _run(call)
    return (out, total) if prenorm else out


# Arguments --------------------------------------------------------------------------------------


class _CheckedNorm(NamedTuple):
    """A checked call of the forward op, without the seed."""

    tensors: _Tensors
    options: _Options
    choice: backends.Choice


def _prepare(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    dropout_p: float,
    eps: float,
    training: bool,
    prenorm: bool,
    x_bias: Tensor | None,
    rms_norm: bool,
    residual_in_fp32: bool,
) -> _CheckedNorm:
    x = _checks.tensor("x", x)
    _checks.floating("x", x)
    dtype = x.dtype
    if x.dim() == 0:
        raise fail("x", "at least 1 dimension", "a scalar")
    sum_dtype = dtype
    if residual is not None:
        residual = _checks.matching("residual", residual, "x", x)
        if residual.shape != x.shape:
            residual = _expand(residual, x)
        sum_dtype = residual.dtype
    for argument, value in (
        ("training", training),
        ("prenorm", prenorm),
        ("rms_norm", rms_norm),
        ("residual_in_fp32", residual_in_fp32),
    ):
        _checks.flag(argument, value)
    if residual_in_fp32 and dtype != torch.float64:
        sum_dtype = torch.float32
    features = x.shape[-1:]
    if weight is not None:
        weight = _vector("weight", weight, x, features)
    if bias is not None:
        bias = _vector("bias", bias, x, features)
    if x_bias is not None:
        x_bias = _vector("x_bias", x_bias, x, features)
    dropout_p = _checks.probability("dropout_p", dropout_p)
    eps = _checks.epsilon(eps)
    choice = backends.choose(backends.Call("dropout_add_layer_norm", x.device.type, dtype))
    return _CheckedNorm(
        _Tensors(x, residual, weight, bias, x_bias),
        _Options(dropout_p if training else 0.0, eps, rms_norm, prenorm, sum_dtype),
        choice,
    )


def _vector(argument: str, value: Any, x: Tensor, features: torch.Size) -> Tensor:
    value = _checks.matching(argument, value, "x", x)
    if value.shape != features:
        raise fail(
            argument, f"shape {tuple(features)}, the last dimension of x", tuple(value.shape)
        )
    return value


def _expand(residual: Tensor, x: Tensor) -> Tensor:
    try:
        return residual.expand(x.shape)
    except RuntimeError:
        expected = f"a shape broadcastable to {tuple(x.shape)}, as x"
        raise fail("residual", expected, tuple(residual.shape)) from None


# The operator -----------------------------------------------------------------------------------


class _Tensors(NamedTuple):
    """See :func:`trifuse.reference.dropout_add_layer_norm.dropout_add_layer_norm`.

    In the backward of a call with ``prenorm``, x is the returned sum. It stays alive as an output,
    so keeping it costs nothing.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    x_bias: Tensor | None
    seed: Tensor | None = None


class _Options(NamedTuple):
    dropout_p: float
    eps: float
    rms_norm: bool
    prenorm: bool
    sum_dtype: torch.dtype


class _Results(NamedTuple):
    out: Tensor
    sum: Tensor  # shape (0,) without prenorm
    mean: Tensor
    rstd: Tensor


def _run(call: _CheckedNorm) -> tuple[Tensor, ...]:
    tensors = call.tensors
    if call.options.dropout_p > 0:
        place = _draws.place_of_rows(tensors.x.shape[:-1])
        tensors = tensors._replace(seed=_draws.draw(tensors.x, place))
    return _OPERATOR(call.choice.backend, tensors, call.options)


def _fake(tensors: _Tensors, options: _Options, save: int) -> _Results:
    x = tensors.x
    wide = accumulation_dtype(x.dtype)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=wide) for _ in range(2))
    total = x.new_empty(x.shape if options.prenorm else (0,), dtype=options.sum_dtype)
    return _Results(x.new_empty(x.shape), total, mean, rstd)


def _grad_fake(call: _operator.BackwardCall) -> tuple[Tensor, ...]:
    grad_out, (x, residual, *vectors, _) = call.grads.out, call.tensors
    like = (
        grad_out,
        x if residual is None else residual,
        *(grad_out if v is None else v for v in vectors),
    )
    *needs_grad, _ = call.needs_grad  # the seed has no gradient
    return tuple(
        t.new_empty(t.shape if needed else (0,)) for t, needed in zip(like, needs_grad, strict=True)
    )


def _formula(tensors: _Tensors, options: _Options) -> tuple[Tensor, ...]:
    return reference.dropout_add_layer_norm(*tensors, *options)


def _grad_formula(call: _operator.BackwardCall) -> tuple[Tensor | None, ...]:
    options = call.options
    return reference.dropout_add_layer_norm_backward(
        call.grads.out,
        call.grads.sum,
        **call.tensors._asdict(),
        dropout_p=options.dropout_p,
        eps=options.eps,
        rms_norm=options.rms_norm,
        x_is_sum=options.prenorm,
    )


_OPERATOR = _operator.Operator(
    name="dropout_add_layer_norm",
    tensors=_Tensors,
    options=_Options,
    results=_Results,
    returned=2,
    differentiable=5,
    saved=("mean", "rstd"),
    # Samples become more rows. Dropout numbers the rows, so with it samples are called one by one.
    axes=dict.fromkeys(("x", "residual", "out", "sum", "mean", "rstd"), _batching.LEADING),
    fake=_fake,
    grad_fake=_grad_fake,
    formula=_formula,
    grad_formula=_grad_formula,
    keep=lambda tensors, results, options: (
        tensors._replace(x=results.sum, residual=None) if options.prenorm else tensors
    ),
    shares_gradient=lambda tensors, options: (
        tensors.seed is None
        and (tensors.residual is None or tensors.residual.dtype == tensors.x.dtype)
    ),
)

_explained.explains(dropout_add_layer_norm, _prepare)
