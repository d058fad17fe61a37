"""Dropout + residual + LayerNorm: arguments, autograd, and the road to a backend."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from trifuse import backends
from trifuse.ops import _checks, _registration
from trifuse.ops._checks import fail
from trifuse.reference import dropout_add_layer_norm as reference


@overload
def dropout_add_layer_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, dropout_p: float = 0.0, eps: float = 1e-5, *,
    training: bool = False, prenorm: Literal[False] = False, x_bias: Tensor | None = None,
    rms_norm: bool = False, residual_in_fp32: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def dropout_add_layer_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, dropout_p: float = 0.0, eps: float = 1e-5, *,
    training: bool = False, prenorm: Literal[True], x_bias: Tensor | None = None,
    rms_norm: bool = False, residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
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
        x: (..., N), float32, bfloat16, float16 or float64; what a sublayer computed.
        residual: broadcastable to (..., N), in the dtype of x or float32; what it was given.
        weight: (N,), in the dtype of x or float32. Default: ones.
        bias: (N,), likewise. Default: zeros.
        dropout_p: probability of dropping an element of x, honoured to 2⁻¹⁶. Drawn from torch's
            default generator for the device; the same seed drops the same elements on every
            backend.
        eps: added to the variance.
        training: without it nothing is dropped, whatever ``dropout_p`` is.
        prenorm: also return the sum, as the next sublayer's residual (pre-norm Transformers).
        x_bias: (N,), in the dtype of x or float32, added to x before dropout: the bias of the
            linear layer before, if that left it out.
        rms_norm: divide by the root mean square instead (Zhang and Sennrich, 2019): no mean is
            subtracted.
        residual_in_fp32: with ``prenorm``, return the sum in float32, or of float64 in float64. A
            float32 residual gives a float32 sum without being asked.

    Returns:
        (..., N) in the dtype of x, contiguous; with ``prenorm`` also the sum, (..., N), in the
        dtype of the residual or else of x.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that doesn't fit the others.
        ValueError: a shape, device or range that doesn't fit (``trifuse.ArgumentError``).
        RuntimeError: the backend asked for by name can't serve the call.
    """
    call = _prepare(
        x, residual, weight, bias, dropout_p, eps, training, prenorm, x_bias, rms_norm,
        residual_in_fp32,
    )  # fmt: skip
    out, total = _run(call)
    return (out, total) if prenorm else out


# Arguments --------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call as the forward op takes it, but for the seed."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    x_bias: Tensor | None
    dropout_p: float
    eps: float
    rms_norm: bool
    prenorm: bool
    sum_dtype: torch.dtype
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
) -> _Call:
    x = _checks.tensor("x", x)
    dtype = x.dtype
    if dtype not in _checks.FLOATING:
        raise TypeError(f"x: expected float32, bfloat16, float16 or float64; got {dtype}")
    if x.dim() == 0:
        raise fail("x", "at least 1 dimension", "a scalar")
    sum_dtype = dtype
    if residual is not None:
        residual = _checks.beside("residual", residual, "x", x)
        if residual.shape != x.shape:
            residual = _expand(residual, x)
        sum_dtype = residual.dtype
    for argument, value in (
        ("training", training), ("prenorm", prenorm), ("rms_norm", rms_norm),
        ("residual_in_fp32", residual_in_fp32),
    ):  # fmt: skip
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
    eps = _checks.number("eps", eps)
    if not eps >= 0:
        raise fail("eps", "a number ≥ 0", eps)
    choice = backends.choose(backends.Call("dropout_add_layer_norm", x.device.type, dtype))
    return _Call(
        x, residual, weight, bias, x_bias, dropout_p if training else 0.0, eps, rms_norm, prenorm,
        sum_dtype, choice,
    )  # fmt: skip


def _vector(argument: str, value: Any, x: Tensor, features: torch.Size) -> Tensor:
    value = _checks.beside(argument, value, "x", x)
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


# Autograd ---------------------------------------------------------------------------------------


def _run(call: _Call) -> tuple[Tensor, Tensor]:
    tensors, options, backend = call[:5], call[5:10], call.choice.backend
    seed = None
    if call.dropout_p > 0:
        limits = torch.iinfo(torch.int64)
        seed = torch.randint(limits.min, limits.max, (1,), device=call.x.device)
    if _registration.differentiating() or (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    ):
        given = _registration.for_dynamo(*tensors)
        return _registration.apply(_DropoutAddLayerNorm, *given, seed, backend, *options)[:2]
    return _FORWARD[backend](*tensors, seed, *options)[:2]


class _DropoutAddLayerNorm(torch.autograd.Function):
    generate_vmap_rule = True

    # Dynamo counts the parameters to tell whether a context comes first, so they are spelt out.
    @staticmethod
    def forward(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        x_bias: Tensor | None, seed: Tensor | None, backend: str, dropout_p: float, eps: float,
        rms_norm: bool, prenorm: bool, sum_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        return _FORWARD[backend](
            x, residual, weight, bias, x_bias, seed, dropout_p, eps, rms_norm, prenorm, sum_dtype
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, residual, weight, bias, x_bias, seed, backend, dropout_p, eps, rms_norm, prenorm, _ = (
            inputs
        )
        out, total, mean, rstd = output
        ctx.set_materialize_grads(False)
        ctx.dtype = out.dtype
        if prenorm:
            # The sum lives on as an output, so keeping it costs nothing, where x would.
            ctx.mark_non_differentiable(mean, rstd)
            ctx.save_for_backward(total, None, weight, bias, x_bias, seed, mean, rstd)
        else:
            ctx.mark_non_differentiable(total, mean, rstd)
            ctx.save_for_backward(x, residual, weight, bias, x_bias, seed, mean, rstd)
        ctx.backend, ctx.options = backend, (dropout_p, eps, rms_norm, prenorm)
        # Without dropout the two gradients are one and the same tensor.
        ctx.one_gradient = seed is None and (residual is None or residual.dtype == x.dtype)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_sum: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        *inputs, mean, rstd = ctx.saved_tensors
        needed = ctx.needs_input_grad[:5]
        prenorm = ctx.options[-1]
        if not prenorm:
            grad_sum = None  # Dynamo makes up zeros for an output that has no gradient.
        if grad_out is None and grad_sum is None:
            return (None,) * 12
        if grad_out is None:
            assert grad_sum is not None
            grad_out = torch.zeros_like(grad_sum, dtype=ctx.dtype)
        wanted = (needed[0] or needed[1], False, *needed[2:]) if ctx.one_gradient else needed
        args = (grad_out, grad_sum, *inputs, mean, rstd, ctx.backend, *ctx.options, wanted)
        if torch.is_grad_enabled() or _registration.forward_mode():
            grads = list(_registration.apply(_DropoutAddLayerNormBackward, *args))
        else:
            grads = list(_BACKWARD[ctx.backend](*args[:10], *args[11:]))
        if ctx.one_gradient:
            grads[1] = grads[0]
        return (*(g if n else None for g, n in zip(grads, needed, strict=True)), *(None,) * 7)


class _DropoutAddLayerNormBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated in turn.

    The mean and rstd are functions of the other inputs; the reference formula computes them again,
    so its derivative is whole without theirs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        tensors, backend, options = args[:10], args[10], args[11:]
        return tuple(_BACKWARD[backend](*tensors, *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:8])
        ctx.options, ctx.wanted = inputs[11:15], inputs[15]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = _registration.second_derivatives(
            lambda *inputs: reference.dropout_add_layer_norm_backward(*inputs, *ctx.options),
            ctx.saved_tensors,
            [i for i in range(7) if ctx.needs_input_grad[i]],
            grads,
            ctx.wanted,
        )
        return (*found, *(None,) * 8)


# Registration -----------------------------------------------------------------------------------

_TENSORS = "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? x_bias, Tensor? seed"


def _forward_fake(
    x: Tensor, residual: Tensor | None, weight: Any, bias: Any, x_bias: Any, seed: Any,
    dropout_p: float, eps: float, rms_norm: bool, prenorm: bool, sum_dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=wide) for _ in range(2))
    total = x.new_empty(x.shape if prenorm else (0,), dtype=sum_dtype)
    return x.new_empty(x.shape), total, mean, rstd


def _backward_fake(
    grad_out: Tensor, grad_sum: Tensor | None, x: Tensor, residual: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, x_bias: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    like = (
        grad_out,
        x if residual is None else residual,
        *(grad_out if v is None else v for v in (weight, bias, x_bias)),
    )
    return tuple(
        t.new_empty(t.shape if wanted else (0,)) for t, wanted in zip(like, rest[-1], strict=True)
    )


def _forward_vmap(op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    if _rows_matter(in_dims[2:5], args[5]):
        return _registration.one_by_one(op, info, in_dims, args)
    N, dims = info.batch_size, iter(in_dims)
    x, residual = (_fold(t, next(dims), N) for t in args[:2])
    out, total, mean, rstd = op(x, residual, *args[2:])
    if not args[9]:
        total = total.expand(N, 0)
    return (out, total, mean, rstd), (0, 0, 0, 0)


def _backward_vmap(op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    wanted = args[-1]
    # A sample's gradients of weight and the like are a sum over its own rows.
    if _rows_matter(in_dims[4:7], args[7]) or any(wanted[2:]):
        return _registration.one_by_one(op, info, in_dims, args)
    N = info.batch_size
    rows = {i: _fold(args[i], in_dims[i], N) for i in (0, 1, 2, 3, 8, 9)}
    results = op(*(rows.get(i, arg) for i, arg in enumerate(args)))
    results = tuple(r if w else r.expand(N, 0) for r, w in zip(results, wanted, strict=True))
    return results, (0,) * 5


def _rows_matter(vector_dims: Any, seed: Tensor | None) -> bool:
    """Samples with weights of their own can't share a call, nor with dropout, which counts rows."""
    return seed is not None or any(dim is not None for dim in vector_dims)


def _fold(t: Tensor | None, dim: int | None, N: int) -> Tensor | None:
    """The samples as one more leading dimension: more rows."""
    if t is None:
        return None
    return t.expand(N, *t.shape) if dim is None else t.movedim(dim, 0)


_registration.define(
    "dropout_add_layer_norm_forward",
    f"({_TENSORS}, float dropout_p, float eps, bool rms_norm, bool prenorm, ScalarType sum_dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _forward_fake,
    _forward_vmap,
)
_registration.define(
    "dropout_add_layer_norm_backward",
    f"(Tensor grad_out, Tensor? grad_sum, {_TENSORS}, Tensor mean, Tensor rstd, float dropout_p, "
    "float eps, bool rms_norm, bool x_is_sum, bool[5] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_fake,
    _backward_vmap,
)


@_registration.implement("dropout_add_layer_norm_forward", "eager")
def _eager_forward(*args: Any) -> tuple[Tensor, ...]:
    out, total, mean, rstd = reference.dropout_add_layer_norm(*args)
    prenorm = args[9]
    results = (out, total if prenorm else total.new_empty(0), mean, rstd)
    # An op's results may be none of its arguments, which the formula can return.
    return tuple(to.copy_(r) for to, r in zip(_forward_fake(*args), results, strict=True))


@_registration.implement("dropout_add_layer_norm_backward", "eager")
def _eager_backward(*args: Any) -> tuple[Tensor, ...]:
    tensors, options, wanted = args[:8], args[10:14], args[14]
    grads = reference.dropout_add_layer_norm_backward(*tensors, *options)
    empty = _backward_fake(*args)
    return tuple(
        e.copy_(g) if w and g is not None else e
        for e, g, w in zip(empty, grads, wanted, strict=True)
    )


_registration.implement_triton("dropout_add_layer_norm")


_FORWARD = {
    name: getattr(torch.ops.trifuse.dropout_add_layer_norm_forward, name) for name in backends.ORDER
}
_BACKWARD = {
    name: getattr(torch.ops.trifuse.dropout_add_layer_norm_backward, name)
    for name in backends.ORDER
}
