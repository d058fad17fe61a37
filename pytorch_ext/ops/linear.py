"""Linear layers on trifuse's CPU matrix product, where it is faster than torch's own.

torch multiplies float32 matrices with MKL, which reaches less than half of some CPUs' peak. Here
the activation is fused into the product, an unchanged weight is packed only once, and results come
from cached memory (csrc/cpu/memory.h). A table of CPUs decides whether this product is used; in all
other cases (other devices and dtypes, few rows, torch.func, tracing) this is
``torch.nn.functional.linear``.

The environment variable ``TRIFUSE_LINEAR`` ("cpp" or "torch") overrides the table.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes

from trifuse import backends
from trifuse.ops import _autograd, _fast_path, _modes, _op, _sharding


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    packed: PackedWeight | None = None,
) -> Tensor:
    """``torch.nn.functional.linear``, optionally followed by an activation.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,).
        activation: "relu", "gelu", "gelu_tanh" (``approximate="tanh"``) or "silu". Fused into the
            product; if a gradient is needed, only ReLU is fused.
        packed: keeps this weight's packed form between calls that need no gradient.

    Returns:
        (..., out_features).
    """
    if is_elsewhere(x, weight):
        return _torch(x, weight, bias, activation)
    trusted = isinstance(packed, TrustedWeight)
    if not trusted and (fast := _fast_path.extension()) is not None and _few_rows_are_ours(x.dtype):
        out: Tensor | None = fast.linear(
            x, weight, bias, activation, None, None, _ROWS_WORTH_CHECKING
        )
        if out is not None:
            return out
    if _sharding.placements(weight) is not None:
        return _distributed(x, weight, bias, activation)
    autocast, dtype = _compute_dtype(x)
    if not _serves(x, weight, bias, dtype, autocast, trusted):
        return _torch(x, weight, bias, activation)
    needs_grad = _modes.requires_grad(x, weight, bias)
    if needs_grad and packed is not None:
        packed.clear()
    if needs_grad or torch.compiler.is_compiling():
        return _differentiable(x, weight, bias, activation, dtype)
    out = _infer(x, (weight,), (bias,), activation, (packed,), dtype)
    return _torch(x, weight, bias, activation) if out is None else out


def gated_linear(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    *,
    activation: Activation,
    packed: tuple[PackedWeight | None, PackedWeight | None] = (None, None),
) -> Tensor | None:
    """Computes activation(x Gᵀ + b) * (x Uᵀ + c) as one product, in inference.

    This is the first half of gated feed-forward networks: SwiGLU with SiLU, GEGLU with GELU
    (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        x: (..., in_features).
        weights: G and U, (out_features, in_features) each.
        biases: b and c, (out_features,) each.
        activation: as in :func:`linear`.
        packed: keep the packed forms of G and U, as in :func:`linear`.

    Returns:
        (..., out_features); None if a gradient is needed, or if trifuse's product doesn't serve the
        call. Then the two linear layers must be computed separately.
    """
    (weight, up), (bias, up_bias) = weights, biases
    if weight.shape != up.shape or is_elsewhere(x, weight):
        return None
    trusted = isinstance(packed[0], TrustedWeight)
    if not trusted and (fast := _fast_path.extension()) is not None and _few_rows_are_ours(x.dtype):
        out: Tensor | None = fast.linear(
            x, weight, bias, activation, up, up_bias, _ROWS_WORTH_CHECKING
        )
        if out is not None:
            return out
    autocast, dtype = _compute_dtype(x)
    if torch.compiler.is_compiling() or not all(
        _serves(x, *each, dtype, autocast, trusted) for each in zip(weights, biases, strict=True)
    ):
        return None
    if _modes.requires_grad(x, weight, up, bias, up_bias):
        for each in packed:
            if each is not None:
                each.clear()
        return None
    return _infer(x, weights, biases, activation, packed, dtype)


Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


_PLAIN = (Tensor, torch.nn.Parameter)


def is_elsewhere(x: Tensor, weight: Tensor) -> bool:
    """Returns whether plain tensors are on another device than a CPU, so that torch serves them.

    This is checked first, because on a GPU every microsecond of Python counts.
    """
    return type(x) is Tensor and type(weight) in _PLAIN and not x.is_cpu


def _torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    if type(x) is Tensor and x.dtype == torch.bfloat16 and x.is_cpu and not x.is_contiguous():
        # On AMX, torch 2.13 multiplies the memory between such rows by 0, so a NaN there would
        # spread.
        x = x.contiguous()
    out = F.linear(x, weight, bias)
    return out if activation is None else ACTIVATIONS[activation](out)


def _compute_dtype(x: Tensor) -> tuple[bool, torch.dtype]:
    """Returns whether autocast is on, and the dtype in which a product with x is computed."""
    autocast = torch.is_autocast_enabled("cpu")
    return autocast, torch.get_autocast_dtype("cpu") if autocast else x.dtype


def _serves(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    autocast: bool,
    trusted: bool,
) -> bool:
    """Returns whether trifuse's product can compute this call, and is faster in some use."""
    if torch.jit.is_tracing():
        return False
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if (
            type(tensor) not in _PLAIN
            or not tensor.is_cpu
            or tensor.layout != torch.strided
            or tensor.is_nested
            or not (tensor.dtype == dtype or (autocast and tensor.dtype in _AUTOCAST))
        ):
            return False
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return False  # F.linear raises the error
    if bias is not None and bias.shape != weight.shape[:1]:
        return False  # F.linear broadcasts it
    if x.numel() == 0 or weight.numel() == 0:
        return False
    if torch.compiler.is_compiling():
        return dtype in _chosen and _chosen[dtype].faster
    return not _modes.is_watched() and (choose(dtype).faster or (trusted and can_freeze(dtype)))


def _distributed(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None
) -> Tensor:
    """Computes a linear layer of DTensors; each process multiplies its own parts."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    ours = (
        all(_sharding.placements(t) is not None for t in tensors)
        and all(t.dtype == x.dtype and t.device.type == "cpu" for t in tensors)
        and weight.dim() == 2
        and x.dim() > 1
        and x.shape[-1] == weight.shape[1]
        and math.prod(x.shape[:-1]) >= _ROWS_WORTH_PACKING
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing() or _modes.is_watched())
        and not _compute_dtype(x)[0]
    )
    if not ours or not choose(x.dtype).training:
        return _torch(x, weight, bias, activation)
    # The bias is added to the sum of the partial products, because each of them would add it.
    sharded = _sharding.is_sharded
    partial = sharded(weight, 1) or sharded(x, x.dim() - 1)
    out = _autograd.apply(_LinearOfParts, x, weight, None if partial else bias)
    if partial and bias is not None:
        out = out + bias
    return out if activation is None else ACTIVATIONS[activation](out)


_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


# Choice of a backend ----------------------------------------------------------------------------


class Choice(NamedTuple):
    """Whether trifuse's product serves a dtype, and why."""

    reason: str
    inference: bool = False  # if nothing needs a gradient
    training: bool = False  # if something needs a gradient

    @property
    def faster(self) -> bool:
        return self.inference or self.training


class Gain(NamedTuple):
    """torch's time over trifuse's: the mean for 64 and 512 rows; on AMD's CPUs the smallest."""

    inference: float
    training: float


# By dtype, instruction set and the CPU's maker. The maker matters for torch's speed, because MKL,
# which multiplies float32, uses its fastest kernels only on Intel's CPUs. The figures are those of
# ``python -m trifuse.benchmarks linear``. With fewer rows the gain in inference is larger.
_GAINS: dict[tuple[torch.dtype, str, str], Gain] = {
    (torch.float32, "AVX2", "AMD"): Gain(1.1, 1.03),
    (torch.float32, "AVX512", "AMD"): Gain(2.2, 1.8),
    (torch.bfloat16, "AVX2", "AMD"): Gain(5.66, 19.9),
    (torch.bfloat16, "AVX512_BF16", "AMD"): Gain(1.02, 0.91),
    (torch.float32, "AVX512", "Intel"): Gain(1.2, 0.94),
    (torch.bfloat16, "AVX512_BF16", "Intel"): Gain(1.65, 1.38),
    (torch.bfloat16, "AMX_BF16", "Intel"): Gain(1.06, 0.91),
}


def choose(dtype: torch.dtype) -> Choice:
    """Chooses a product for CPU tensors of ``dtype``, by a table of the CPUs that were measured.

    On another CPU trifuse's product serves inference, where the weight is packed once.
    """
    if dtype not in _chosen:
        _chosen[dtype] = _choose(dtype)
    return _chosen[dtype]


_chosen: dict[torch.dtype, Choice] = {}


def _requested() -> str:
    name = os.environ.get("TRIFUSE_LINEAR", "auto")
    if name not in ("auto", "cpp", "torch"):
        raise ValueError(f"TRIFUSE_LINEAR: expected auto, cpp or torch; got {name!r}")
    return name


def _choose(dtype: torch.dtype) -> Choice:
    requested = _requested()
    if requested == "torch":
        return Choice("TRIFUSE_LINEAR=torch")
    if not _available(dtype):
        return Choice(f"no product of ours for {dtype} here")
    if requested == "cpp":
        return Choice("TRIFUSE_LINEAR=cpp", inference=True, training=True)
    name = str(dtype).removeprefix("torch.")
    capability, maker = _capability(dtype), str(backends.cpu_maker())
    machine = f"{name} on CPUs of {maker} with {capability}"
    if capability == "DEFAULT":
        return Choice(f"ours is portable code; {machine}")
    gain = _GAINS.get((dtype, capability, maker))
    if gain is None:
        return Choice(f"not measured: {machine}", inference=True)
    inference, training = gain
    return Choice(
        f"{inference}× torch's speed in inference, {training}× in training; {machine}",
        inference > 1,
        training > 1,
    )


def _capability(dtype: torch.dtype) -> str:
    """Returns the instruction set of the kernels for a dtype: csrc/cpu/capability.h."""
    capability = str(backends.cpu_capability())
    if dtype == torch.float32 and capability in ("AVX512_BF16", "AMX_BF16"):
        return "AVX512"
    return capability


def can_freeze(dtype: torch.dtype) -> bool:
    """Returns whether a frozen weight of ``dtype`` can be served.

    The kind of CPU doesn't matter: weights are frozen for calls of few rows, and for these, reading
    a packed weight takes less time than torch's product.
    """
    return _requested() != "torch" and _available(dtype)


def _available(dtype: torch.dtype) -> bool:
    return backends.cpu_capability() is not None and dtype in (torch.float32, torch.bfloat16)


# Without gradients ------------------------------------------------------------------------------


class PackedWeight:
    """A weight in the layout that the product reads, valid while the weight is unchanged.

    A weight can change in ways that the tensor does not record: by ``weight.data.mul_(0.9)``, or
    through an array or another process that shares its memory. So each use computes checksums of
    the weight, in which every 32-bit word is multiplied by a factor that depends on its position.
    The packed form is used only if its checksums match. This takes as long as reading the weight.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def clear(self) -> None:
        """Frees the memory."""
        self._kept = None

    @property
    def is_kept(self) -> bool:
        return self._kept is not None and self._kept.packed is not None

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Returns the weight packed in ``dtype`` if the last call got the same bits, else None."""
        stored = weight if weight.is_contiguous() else weight.t()
        if not stored.is_contiguous() or weight.numel() * weight.itemsize % 4:
            return None
        sums, cached = torch.ops.trifuse.checksum(stored), self._kept
        kind = _kind(weight, dtype)
        packed = None
        if cached is not None and cached.kind == kind and torch.equal(sums, cached.sums):
            packed = cached.packed
            if packed is not None:
                return packed
            packed = torch.ops.trifuse.pack_linear(weight.detach().to(dtype))
        self._kept = _Kept(sums, kind, packed)
        return packed


class TrustedWeight(PackedWeight):
    """As :class:`PackedWeight`, for a weight whose owner guarantees that it won't change.

    Only properties that take no time to compare are compared: the address, torch's version counter,
    the shape and the dtypes. If one of them has changed, ``get`` raises. A change that torch does
    not count, such as ``weight.data.mul_(2)``, has no effect.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trusted: tuple[Any, ...] | None = None
        self._memory: Tensor | None = None  # so that no other weight gets the same address

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Returns the weight packed in ``dtype``.

        Raises:
            RuntimeError: the weight has changed since the first call.
        """
        version = None if weight.is_inference() else weight._version
        now = (weight.data_ptr(), version, weight.shape, weight.stride(), weight.dtype)
        if self._trusted not in (None, now):
            raise RuntimeError(frozen_message("changing a weight"))
        kind, cached = _kind(weight, dtype), self._kept
        if cached is None or cached.kind != kind or cached.packed is None:
            packed = torch.ops.trifuse.pack_linear(weight.detach().to(dtype))
            cached = self._kept = _Kept(torch.empty(0), kind, packed)
        if self._trusted is None:
            self._trusted, self._memory = now, weight.detach()
        return cached.packed


_PANEL = 64  # features of a panel: kTile of csrc/cpu/operand.h


class FrozenWeight:
    """A weight (out_features, in_features) that exists only in its packed form.

    It is pickled and copied as an ordinary tensor, since the packed form depends on the CPU.
    """

    def __init__(self, weight: Tensor, packed: Tensor | None = None) -> None:
        weight = weight.detach()
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.capability = backends.cpu_capability()
        self.packed = torch.ops.trifuse.pack_linear(weight) if packed is None else packed
        self._constant: tuple[weakref.ref[Any], weakref.ref[Tensor]] | None = None

    @classmethod
    def pack_all(cls, weights: Sequence[Tensor]) -> list[FrozenWeight]:
        """Packs weights of one dtype into one allocation, which is freed with the last of them."""
        packed = torch.ops.trifuse.pack_linears([weight.detach() for weight in weights])
        return [cls(*each) for each in zip(weights, packed, strict=True)]

    def is_readable(self) -> bool:
        """Returns whether the packed form is the one for the instruction set in use."""
        return self.capability == backends.cpu_capability()

    @functools.cached_property
    def halves(self) -> tuple[FrozenWeight, FrozenWeight] | None:
        """The two halves of the features, which share the memory of the whole.

        None if they don't begin and end with a panel of the packed form.
        """
        features, rest = divmod(self.shape[0], 2)
        if rest or features % _PANEL:
            return None
        halves = [FrozenWeight.__new__(FrozenWeight) for _ in range(2)]
        for half, packed in zip(halves, self.packed.chunk(2), strict=True):
            shape = torch.Size((features, self.shape[1]))
            own = {"shape": shape, "packed": packed, "_constant": None}
            vars(half).update(vars(self) | own)
        return halves[0], halves[1]

    def unpack(self) -> Tensor:
        """Returns a copy of the weight."""
        weight: Tensor = torch.ops.trifuse.unpack_linear(
            self.packed, *self.shape, self.dtype, self.capability
        )
        return weight

    def as_constant(self) -> Tensor:
        """Returns a copy of the weight for a program that torch.export is tracing.

        The program may be saved and run on another CPU, which can't read this packed form. All
        calls of the layer in one trace get the same copy. Each trace gets its own copy, because
        programs own their constants.
        """
        trace = TracingContext.try_get()
        if trace is not None and self._constant is not None:
            traced, constant = (reference() for reference in self._constant)
            if traced is trace and constant is not None:
                return constant
        # An ordinary tensor, even in inference mode, computed outside the tracing modes.
        with _disable_current_modes(), torch.inference_mode(False):
            copy = self.unpack()
        if trace is not None:
            self._constant = weakref.ref(trace), weakref.ref(copy)
        return copy

    # torch.compiler.assume_constant_result sets this too, but it imports the compiler.
    as_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Tensor]:
        return {"weight": self.unpack()}

    def __setstate__(self, state: dict[str, Tensor]) -> None:
        if not _available(state["weight"].dtype):
            raise RuntimeError(
                "a frozen model needs trifuse's C++ extension to be loaded; "
                "call revert() of fuse's report before saving it"
            )
        self.__init__(state["weight"])  # type: ignore[misc]


def frozen_message(what: str) -> str:
    """Returns the message of an error that a frozen weight raises."""
    return f"{what}: the model is frozen (trifuse.fuse(model, freeze=True)); call revert() first"


def linear_frozen(
    x: Tensor,
    weight: FrozenWeight,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """As :func:`linear`, with a frozen weight.

    The packed product serves calls of any number of rows that need no gradient, in the weight's own
    dtype. All others, such as those under ``torch.func``, unpack the weight first. A program of
    torch.export holds the unpacked weight as a constant.
    """
    fast = _fast_path.extension()
    if fast is not None and x.dtype == weight.dtype and weight.is_readable():
        served: Tensor | None = fast.linear_packed(
            x, weight.packed, *weight.shape, bias, activation, None, None
        )
        if served is not None:
            return served
    if torch.compiler.is_exporting():
        return _torch(x, weight.as_constant(), bias, activation)
    if not _serves_frozen(x, weight, bias):
        return linear(x, weight.unpack(), bias, activation=activation)
    out: Tensor = torch.ops.trifuse.linear_packed(
        x.reshape(-1, x.shape[-1]), weight.packed, weight.shape[0], bias, activation
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def gated_linear_frozen(
    x: Tensor,
    weights: tuple[FrozenWeight, FrozenWeight],
    biases: tuple[Tensor | None, Tensor | None],
    *,
    activation: Activation,
) -> Tensor | None:
    """As :func:`gated_linear`, with frozen weights."""
    (weight, up), (bias, up_bias) = weights, biases
    if weight.shape != up.shape or weight.dtype != up.dtype:
        return None
    fast = _fast_path.extension()
    if fast is not None and x.dtype == weight.dtype and weight.is_readable() and up.is_readable():
        served: Tensor | None = fast.linear_packed(
            x, weight.packed, *weight.shape, bias, activation, up.packed, up_bias
        )
        if served is not None:
            return served
    if torch.compiler.is_exporting() or not all(
        _serves_frozen(x, *each) for each in zip(weights, biases, strict=True)
    ):
        return None
    out: Tensor = torch.ops.trifuse.linear_packed(
        x.reshape(-1, x.shape[-1]), weight.packed, weight.shape[0], bias, activation, up.packed,
        up_bias,
    )  # fmt: skip
    return out.view(*x.shape[:-1], weight.shape[0])


def _serves_frozen(x: Tensor, weight: FrozenWeight, bias: Tensor | None) -> bool:
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != weight.dtype:
        return False
    tensors = (x,) if bias is None else (x, bias)
    if any(t.dtype != weight.dtype or t.device.type != "cpu" for t in tensors):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    if x.dim() == 0 or x.shape[-1] != weight.shape[1] or x.numel() == 0:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if torch.compiler.is_compiling():
        return True
    return (
        all(type(t) in (Tensor, torch.nn.Parameter) and not t.is_nested for t in tensors)
        and x.layout == torch.strided
        and weight.is_readable()
        and not torch.jit.is_tracing()
        and not _modes.is_watched()
    )


# The packed form depends on these besides the bits, because equal bits may represent different
# matrices.
_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.dtype, str | None]


def _kind(weight: Tensor, dtype: torch.dtype) -> _Kind:
    return weight.shape, weight.stride(), weight.dtype, dtype, backends.cpu_capability()


class _Kept(NamedTuple):
    """A packed weight and the state it was packed from.

    :class:`PackedWeight` replaces it as a whole, because threads may share a model.
    """

    sums: Tensor  # empty for a trusted weight
    kind: _Kind
    packed: Tensor | None


# Training uses trifuse's product, which packs the weight, from this many rows on.
_ROWS_WORTH_PACKING = 64
# Inference keeps a packed weight, and checks that it is unchanged, from this many rows on. With
# fewer rows, each task of a product packs the part that it reads. Then 16 rows take 0.6 times as
# long, and 512 rows as long as with a kept weight.
_ROWS_WORTH_CHECKING = 512
# The same under autocast, where a weight is converted before it is packed.
_CONVERTED_ROWS_WORTH_CHECKING = 16


def _infer(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    activation: Activation | None,
    packed: tuple[PackedWeight | None, ...],
    dtype: torch.dtype,
) -> Tensor | None:
    """Computes a linear layer, or a gated one of two weights; None if torch's product is better."""
    rows = math.prod(x.shape[:-1])
    trusted = isinstance(packed[0], TrustedWeight)
    if not (_chosen[dtype].inference or trusted):
        return None
    converted = any(weight.dtype != dtype for weight in weights)
    if not trusted and rows < (
        _CONVERTED_ROWS_WORTH_CHECKING if converted else _ROWS_WORTH_CHECKING
    ):
        packed = (None,) * len(weights)
    if None in packed and converted:
        return None  # autocast keeps the converted weight
    with _modes.without_autocast():
        found = [
            None if each is None else each.get(weight, dtype)
            for each, weight in zip(packed, weights, strict=True)
        ]
        unpacked = any(each is None for each in found) and rows < _ROWS_WORTH_CHECKING
        by_columns = any(weight.stride(1) != 1 for weight in weights)
        if unpacked and len(weights) == 2 and by_columns and rows < _ROWS_WORTH_PACKING:
            return None  # with few rows, the gated product reads the rows of the weights
        if unpacked:
            forms = [weight.to(dtype) for weight in weights]
        else:
            forms = [
                torch.ops.trifuse.pack_linear(weight.to(dtype)) if each is None else each
                for each, weight in zip(found, weights, strict=True)
            ]
        added = [None if bias is None else bias.to(dtype) for bias in biases]
        flat, N = x.to(dtype).reshape(rows, x.shape[-1]), weights[0].shape[0]
        up = (forms[1], added[1]) if len(weights) == 2 else ()
        if unpacked:
            out = torch.ops.trifuse.linear_unpacked(flat, forms[0], added[0], activation, *up)
        else:
            out = torch.ops.trifuse.linear_packed(flat, forms[0], N, added[0], activation, *up)
    return out.view(*x.shape[:-1], N)


def _few_rows_are_ours(dtype: torch.dtype) -> bool:
    """Returns whether trifuse's product serves few rows; False before the first choice."""
    choice = _chosen.get(dtype)
    return choice is not None and choice.inference


# Autograd ---------------------------------------------------------------------------------------


def _differentiable(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    dtype: torch.dtype,
) -> Tensor:
    if not _chosen[dtype].training or math.prod(x.shape[:-1]) < _ROWS_WORTH_PACKING:
        return _torch(x, weight, bias, activation)
    bias = None if bias is None else bias.to(dtype)
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    relu = activation == "relu"
    out = _product(rows, weight.to(dtype), bias, relu).view(*x.shape[:-1], weight.shape[0])
    # GELU's derivative needs GELU's input, which a fused product does not return.
    return out if activation is None or relu else ACTIVATIONS[activation](out)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Returns x weightᵀ + bias of 2-D tensors, followed by ReLU if ``relu``."""
    activation = "relu" if relu else None
    if _modes.requires_grad(x, weight, bias) and not _modes.transform_active():
        return _autograd.apply(_Linear, x, weight, bias, activation)
    return torch.ops.trifuse.linear(x, weight, bias, activation)


class _Linear(torch.autograd.Function):
    """A product whose gradients are two more such products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        out = _autograd.call_below_autograd(torch.ops.trifuse.linear, x, weight, bias, activation)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.transposed = weight.stride(0) == 1 and not weight.is_contiguous()
        # x and the weight are each needed for the other's gradient.
        ctx.save_for_backward(
            x if needs_weight else None,
            weight if needs_x else None,
            out if activation == "relu" else None,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if out is not None:
            grad_out = torch.ops.aten.threshold_backward(grad_out, out, 0)
        return (
            _product(grad_out, weight.t()) if needs_x else None,
            _weight_gradient(grad_out, x, ctx.transposed) if needs_weight else None,
            grad_out.sum(0) if needs_bias else None,
            None,
        )


class _LinearOfParts(torch.autograd.Function):
    """A linear layer of DTensors. It multiplies this process's parts as plain tensors.

    An op on DTensors takes up to 0.1 ms of Python, and a layer and its gradients have ten of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from torch.distributed.tensor import Partial

        tensors = {"x": x, "weight": weight, "bias": bias}
        rule = _sharding.linear(tensors)
        layout = ctx.layout = _sharding.Layout("linear", rule, tensors, first=_SHARDED_FIRST)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.shapes = x.shape, weight.shape
        ctx.transposed = weight.stride(0) == 1 and not weight.is_contiguous()
        # x and the weight are each needed for the other's gradient.
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        part = layout.local("x", x)
        out = _product(
            part.flatten(0, -2), layout.local("weight", weight), layout.local("bias", bias)
        )
        out = out.view(*part.shape[:-1], out.shape[1])
        whole = _empty((*x.shape[:-1], weight.shape[0]))
        return layout.result("out", out, whole, Partial())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        layout, (x_shape, weight_shape) = ctx.layout, ctx.shapes
        of_x = of_weight = of_bias = None
        if needs_weight:
            of_weight = _autograd.apply(
                _WeightGradientOfParts, grad_out, x, layout, weight_shape, ctx.transposed
            )
        if torch.is_grad_enabled():  # for second derivatives
            if needs_x:
                of_x = _autograd.apply(_LinearOfParts, grad_out, weight.t(), None)
            if needs_bias:
                of_bias = grad_out.sum(tuple(range(grad_out.dim() - 1)))
            return of_x, of_weight, of_bias
        grad = layout.local("out", grad_out)
        rows = grad.flatten(0, -2)
        if needs_x:
            of_x = _product(rows, layout.local("weight", weight).t())
            of_x = of_x.view(*grad.shape[:-1], of_x.shape[1])
            of_x = layout.gradient("x", of_x, _empty(x_shape))
        if needs_bias:
            of_bias = layout.gradient("bias", rows.sum(0), _empty(weight_shape[:1]))
        return of_x, of_weight, of_bias


class _WeightGradientOfParts(torch.autograd.Function):
    """The gradient of the weight of :class:`_LinearOfParts`."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_out: Tensor,
        x: Tensor,
        layout: _sharding.Layout,
        shape: Sequence[int],
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(grad_out, x)
        grad, rows = (
            layout.local(name, t).flatten(0, -2) for name, t in (("out", grad_out), ("x", x))
        )
        like = _empty(shape[::-1]).t() if transposed else _empty(shape)
        return layout.gradient("weight", _weight_gradient(grad, rows, transposed), like)

    @staticmethod
    def backward(ctx: Any, of_weight: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, x = ctx.saved_tensors
        needs_grad_out, needs_x, *_ = ctx.needs_input_grad
        return (
            _autograd.apply(_LinearOfParts, x, of_weight, None) if needs_grad_out else None,
            _autograd.apply(_LinearOfParts, grad_out, of_weight.t(), None) if needs_x else None,
            None,
            None,
            None,
        )


# Where both are sharded, x is gathered and not the weight, as in torch's layer.
_SHARDED_FIRST = "weight"


def _empty(shape: Sequence[int]) -> Tensor:
    """Returns a tensor on ``meta``, which only has sizes and strides."""
    return torch.empty(shape, device="meta")


def _weight_gradient(grad_out: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """Returns the gradient of a weight in the weight's layout, so that it needs no copy."""
    if transposed:
        return _product(x.t(), grad_out.t()).t()
    return _product(grad_out.t(), x.t())


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _derivative(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    if _modes.forward_mode() or activation not in (None, "relu"):
        return _torch(x, weight, bias, activation)
    return _autograd.apply(_Linear, x, weight, bias, activation)


def _vmap(
    info: Any,
    in_dims: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None = None,
) -> Any:
    """The batching rule: torch's product, which supports batched weights."""
    x_dim, weight_dim, bias_dim, *_ = in_dims
    x, weight = (
        t if dim is None else t.movedim(dim, 0) for t, dim in ((x, x_dim), (weight, weight_dim))
    )
    out = x @ weight.mT
    if bias is not None:
        out = out + (bias if bias_dim is None else bias.movedim(bias_dim, 0).unsqueeze(-2))
    if out.dim() == 2:  # nothing is batched
        out = out.expand(info.batch_size, *out.shape)
    return out if activation is None else ACTIVATIONS[activation](out), 0


_SIGNATURE = "(Tensor x, Tensor weight, Tensor? bias, str? activation=None) -> Tensor"
_op.library.define(f"linear{_SIGNATURE}")
torch.library.register_fake("trifuse::linear", _fake, lib=_op.library)
_op.register_derivative("linear", _SIGNATURE, _derivative)
_op.register_batching("linear", _vmap)
_op.register_decomposition(torch.ops.trifuse.linear.default, _torch, _fake)
_op.register_flops(
    torch.ops.trifuse.linear, lambda x, weight, *rest: 2 * x.shape[0] * weight.numel()
)
# For programs that were moved to a device without trifuse's product.
_op.implement("linear")(_torch)
_sharding.register_single(torch.ops.trifuse.linear.default, _sharding.linear, first=_SHARDED_FIRST)

# The product with a packed weight, and the checksums that show whether the weight is unchanged. A
# trace holds the product only if the weight is frozen, because any other weight may change after
# the trace.
_op.library.define("pack_linear(Tensor weight) -> Tensor")
_op.library.define("pack_linears(Tensor[] weights) -> Tensor[]")
_op.library.define(
    "unpack_linear(Tensor packed, int out_features, int in_features, ScalarType dtype, "
    "str? instruction_set=None) -> Tensor"
)
_op.library.define(
    "linear_unpacked(Tensor x, Tensor weight, Tensor? bias, str? activation=None, "
    "Tensor? up=None, Tensor? up_bias=None) -> Tensor"
)
_op.library.define("checksum(Tensor weight) -> Tensor")
torch.library.register_fake(
    "trifuse::unpack_linear",
    lambda packed, out_features, in_features, dtype, *rest: packed.new_empty(
        out_features, in_features, dtype=dtype
    ),
    lib=_op.library,
)


def _packed_fake(x: Tensor, packed: Tensor, out_features: int, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def _packed_formula(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None,
    activation: Activation | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """linear_packed in plain torch, except for the weights, which only the extension can unpack."""
    unpack, sizes = torch.ops.trifuse.unpack_linear, (out_features, x.shape[1], x.dtype)
    out = _torch(x, unpack(packed, *sizes), bias, activation)
    return out if up is None else out * F.linear(x, unpack(up, *sizes), up_bias)


def _packed_flops(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None,
    activation: Activation | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> int:
    return 2 * x.numel() * out_features * (1 if up is None else 2)


def _packed_vmap(info: Any, in_dims: Any, x: Tensor, *rest: Any) -> Any:
    """The batching rule: one product of all rows if no weight or bias is batched; else a loop."""
    x_dim, *dims = in_dims
    product = torch.ops.trifuse.linear_packed
    if x_dim is not None and all(dim is None for dim in dims):
        x = x.movedim(x_dim, 0)
        return product(x.flatten(0, 1), *rest).unflatten(0, x.shape[:2]), 0
    args = list(zip((x, *rest), in_dims, strict=True))
    outs = [
        product(*(arg if dim is None else arg.select(dim, i) for arg, dim in args))
        for i in range(info.batch_size)
    ]
    return torch.stack(outs), 0


_PACKED_SIGNATURE = (
    "(Tensor x, Tensor packed, int out_features, Tensor? bias, str? activation=None, "
    "Tensor? up=None, Tensor? up_bias=None) -> Tensor"
)
_op.library.define(f"linear_packed{_PACKED_SIGNATURE}")
torch.library.register_fake("trifuse::linear_packed", _packed_fake, lib=_op.library)
_op.register_derivative("linear_packed", _PACKED_SIGNATURE, _packed_formula)
_op.register_batching("linear_packed", _packed_vmap)
_op.register_decomposition(torch.ops.trifuse.linear_packed.default, _packed_formula, _packed_fake)
_op.register_flops(torch.ops.trifuse.linear_packed, _packed_flops)
