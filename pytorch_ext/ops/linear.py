"""Linear layers on oneDNN's product, where that is faster than torch's own.

torch multiplies float32 matrices by MKL, which runs at half of oneDNN's rate on some CPUs. torch
carries oneDNN too, but reaches it for such products only through private operators. They are used
here where a short measurement, made once per process and dtype, says that they gain; everywhere
else (other devices and dtypes, torch.func, tracing) this is ``torch.nn.functional.linear``.

The environment variable ``TRIFUSE_LINEAR`` decides instead of the measurement: "onednn" or "torch".
"""

from __future__ import annotations

import math
import os
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trifuse.ops import _registration


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gelu: str | None = None,
    packed: PackedWeight | None = None,
) -> Tensor:
    """``torch.nn.functional.linear``, optionally followed by ``torch.nn.functional.gelu``.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,).
        gelu: apply it, with this ``approximate``: "none" or "tanh". Part of the product where
            nothing needs a gradient.
        packed: where this weight's packed form is kept between calls that need no gradient.

    Returns:
        (..., out_features).
    """
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
    if not _serves(x, weight, bias, dtype, autocast):
        return _torch(x, weight, bias, gelu)
    needs_grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if needs_grad and packed is not None:
        packed.clear()
    if needs_grad or torch.compiler.is_compiling():
        return _differentiable(x, weight, bias, gelu, dtype)
    return _infer(x, weight, bias, gelu, packed, dtype)


def _torch(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str | None) -> Tensor:
    out = F.linear(x, weight, bias)
    return out if gelu is None else F.gelu(out, approximate=gelu)


def _serves(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, autocast: bool
) -> bool:
    """Whether oneDNN's product can compute this call, and is faster somewhere."""
    if torch.jit.is_tracing():
        return False
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if (
            type(tensor) not in (Tensor, torch.nn.Parameter)
            or tensor.device.type != "cpu"
            or tensor.layout != torch.strided
            or tensor.is_nested
            or not (tensor.dtype == dtype or (autocast and tensor.dtype in _AUTOCAST))
        ):
            return False
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return False  # F.linear says what is wrong
    if x.numel() == 0 or weight.numel() == 0:
        return False
    if torch.compiler.is_compiling():
        return dtype in _measured and _measured[dtype].faster
    return (
        not _registration.differentiating()
        and torch._C._len_torch_dispatch_stack() == 0
        and choose(dtype).faster
    )


_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


# The choice -------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """Where oneDNN's product serves a dtype, and why."""

    reason: str
    inference: bool = False  # where nothing needs a gradient
    training: bool = False  # where something does

    @property
    def faster(self) -> bool:
        return self.inference or self.training


def choose(dtype: torch.dtype) -> Choice:
    """Decide between the products for CPU tensors of ``dtype``; the first call may measure."""
    if dtype not in _measured:
        _measured[dtype] = _choose(dtype)
    return _measured[dtype]


_measured: dict[torch.dtype, Choice] = {}


def _requested() -> str:
    name = os.environ.get("TRIFUSE_LINEAR", "auto")
    if name not in ("auto", "onednn", "torch"):
        raise ValueError(f"TRIFUSE_LINEAR: expected auto, onednn or torch; got {name!r}")
    return name


def _choose(dtype: torch.dtype) -> Choice:
    requested = _requested()
    if requested == "torch":
        return Choice("TRIFUSE_LINEAR=torch")
    if not _available(dtype):
        return Choice(f"torch offers no product of oneDNN's for {dtype} here")
    if requested == "onednn":
        return Choice("TRIFUSE_LINEAR=onednn", inference=True, training=True)
    inference, training = measure(dtype)
    name = str(dtype).removeprefix("torch.")
    return Choice(
        f"{inference:.1f}× torch's speed in inference, {training:.1f}× in training, {name}",
        inference > _WORTH,
        training > _WORTH,
    )


# Less than this could be noise.
_WORTH = 1.05


def _available(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    try:
        names = ("_linear_pointwise", "_reorder_linear_weight")
        found = all(hasattr(torch.ops.mkldnn, name) for name in names)
        bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):
        return False
    return found and (dtype == torch.float32 or (dtype == torch.bfloat16 and bfloat16))


@torch.no_grad()
def measure(dtype: torch.dtype) -> tuple[float, float]:
    """How many times as fast as torch oneDNN is here: in inference, and in a training step.

    Several weights take turns, as a model's layers do, so that none stays in the nearest cache. Of
    each, the best of a few short rounds counts, as others may use the machine. Takes about 0.3 s.
    """

    def infer(weight: Tensor, pieces: _Pieces) -> None:
        F.linear(x, weight, bias)

    def infer_faster(weight: Tensor, pieces: _Pieces) -> None:
        _sum(x, pieces, bias, None)

    def step(weight: Tensor, pieces: _Pieces) -> None:
        out = F.linear(x, weight, bias)
        torch.mm(out, weight)
        torch.mm(out.t(), x)

    def step_faster(weight: Tensor, pieces: _Pieces) -> None:
        out = _product(x, weight, bias)
        _product(out, weight.t(), None)
        _product(out.t(), x.t(), None)

    runs = (infer, infer_faster, step, step_faster)
    with _registration.without_autocast():
        # Not random: fuse must not move the generator.
        x = torch.ones(512, 768, dtype=dtype, device="cpu")
        bias = torch.ones(768, dtype=dtype, device="cpu")
        weights = [torch.ones(768, 768, dtype=dtype, device="cpu") for _ in range(3)]
        packed = [(weight, _pack(weight, dtype)) for weight in weights]
        best = [[math.inf] * len(weights) for _ in runs]
        for _ in range(5):
            for i, arguments in enumerate(packed):
                for times, run in zip(best, runs, strict=True):
                    start = time.perf_counter()
                    run(*arguments)
                    times[i] = min(times[i], time.perf_counter() - start)
    theirs, ours, their_step, our_step = map(sum, best)
    return theirs / ours, their_step / our_step


# The product ------------------------------------------------------------------------------------


_Pieces = list[tuple[slice, Tensor]]  # columns, and a weight's part in them


def _pieces(terms: int, dtype: torch.dtype) -> list[slice]:
    """Cut a sum of ``terms`` products where oneDNN's rounding error would outgrow torch's.

    oneDNN adds up to 512 terms one after the other in float32, MKL about 200; its error is then
    over twice MKL's. Pieces of at most 448 terms, or of 640 to 960, which oneDNN itself cuts in
    two, keep it under that. In bfloat16 the rounding of the result outweighs all of this.
    """
    count = 1
    if dtype == torch.float32:
        while not ((longest := -(-terms // count)) <= 448 or 640 <= longest <= 960):
            count += 1
    size = -(-terms // count)
    return [slice(start, min(start + size, terms)) for start in range(0, terms, size)]


def _call(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str | None) -> Tensor:
    attr, algorithm = ("none", "") if gelu is None else ("gelu", gelu)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, attr, [], algorithm)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str | None = None) -> Tensor:
    """gelu(x weightᵀ + bias) of 2-D tensors with any strides."""
    pieces = _pieces(x.shape[1], x.dtype)
    return _sum(x, [(piece, _dense(weight[:, piece])) for piece in pieces], bias, gelu)


def _dense(matrix: Tensor) -> Tensor:
    """Without gaps, in either order. Gaps would send oneDNN to a loop a thousand times slower."""
    return matrix if matrix.t().is_contiguous() else matrix.contiguous()


def _sum(x: Tensor, pieces: _Pieces, bias: Tensor | None, gelu: str | None) -> Tensor:
    if len(pieces) == 1:
        return _call(_dense(x), pieces[0][1], bias, gelu)
    out = None
    for columns, weight in pieces:
        part = _dense(x[:, columns])
        if out is None:
            out = _call(part, weight, bias, None)
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(part, out, weight, None, "add")
    assert out is not None
    return out if gelu is None else F.gelu(out, approximate=gelu)


# Without gradients ------------------------------------------------------------------------------


class PackedWeight:
    """A weight in the layout that oneDNN's product reads fastest, for as long as it stays the same.

    Weights change in ways that leave no trace on the tensor: ``weight.data.mul_(0.9)``, an array or
    another process sharing its memory. So each use sums the weight's bits, by rows and by columns,
    in exact integer arithmetic, and the packed form is used only where all sums are those of the
    bits that it was made from. That takes about 2% of the product's own time.
    """

    def __init__(self) -> None:
        # Sums, dtype and pieces; replaced as one, as threads may share a model.
        self._kept: tuple[tuple[Tensor, Tensor], torch.dtype, _Pieces | None] | None = None

    def clear(self) -> None:
        """Give the memory back."""
        self._kept = None

    @property
    def is_kept(self) -> bool:
        return self._kept is not None and self._kept[2] is not None

    def get(self, weight: Tensor, dtype: torch.dtype) -> _Pieces | None:
        """The weight packed in ``dtype``, from the second time on that it is seen unchanged."""
        words = _words(weight.detach())
        if words is None:
            return None
        sums, kept = (words.sum(0), words.sum(1)), self._kept
        pieces = None
        if kept is not None and kept[1] == dtype and all(map(torch.equal, sums, kept[0])):
            pieces = kept[2]
            if pieces is not None:
                return pieces
            pieces = _pack(weight.detach(), dtype)
        self._kept = sums, dtype, pieces
        return pieces


def _words(weight: Tensor) -> Tensor | None:
    """The bits of a contiguous matrix as integers of the widest type that fits its rows."""
    if not weight.is_contiguous():
        return None
    row, offset = weight.shape[1] * weight.itemsize, weight.storage_offset() * weight.itemsize
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row % dtype.itemsize == 0 and offset % dtype.itemsize == 0:
            return weight.view(dtype)
    return None


def _pack(weight: Tensor, dtype: torch.dtype) -> _Pieces:
    weight = weight.to(dtype)
    pack = torch.ops.mkldnn._reorder_linear_weight.default
    pieces = _pieces(weight.shape[1], dtype)
    return [(piece, pack(weight[:, piece].contiguous())) for piece in pieces]


# Below this many rows, looking whether the weight changed takes as long as its packed form saves.
_ROWS_WORTH_PACKING = 192


def _infer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gelu: str | None,
    packed: PackedWeight | None,
    dtype: torch.dtype,
) -> Tensor:
    if not _measured[dtype].inference:
        return _torch(x, weight, bias, gelu)
    with _registration.without_autocast():
        rows = x.to(dtype).reshape(-1, x.shape[-1])
        bias = None if bias is None else bias.to(dtype)
        pieces = None
        if packed is not None and rows.shape[0] >= _ROWS_WORTH_PACKING:
            pieces = packed.get(weight, dtype)
        if pieces is None:
            out = _product(rows, weight.to(dtype), bias, gelu)
        else:
            out = _sum(rows, pieces, bias, gelu)
    return out.view(*x.shape[:-1], weight.shape[0])


# Autograd ---------------------------------------------------------------------------------------


def _differentiable(
    x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str | None, dtype: torch.dtype
) -> Tensor:
    if not _measured[dtype].training:
        return _torch(x, weight, bias, gelu)
    bias = None if bias is None else bias.to(dtype)
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    out = _Linear.apply(rows, weight.to(dtype), bias).view(*x.shape[:-1], weight.shape[0])
    return out if gelu is None else F.gelu(out, approximate=gelu)


class _Linear(torch.autograd.Function):
    """x weightᵀ + bias of 2-D tensors. Its gradients are two more of these."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.trifuse.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _ = inputs
        # Each is needed for the other's gradient.
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None
        )

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _Linear.apply(grad_out, weight.t(), None) if needs_x else None,
            _Linear.apply(grad_out.t(), x.t(), None) if needs_weight else None,
            grad_out.sum(0) if needs_bias else None,
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if 0 in x.shape or 0 in weight.shape:
        return F.linear(x, weight, bias)
    return _product(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_registration.library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_registration.library.impl("linear", _linear, "CPU")
torch.library.register_fake("trifuse::linear", _fake, lib=_registration.library)
