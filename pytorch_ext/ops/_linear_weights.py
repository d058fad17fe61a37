"""Weights of linear layers in the layout that trifuse's product reads.

:class:`PackedWeight` notices every change of a weight. :class:`FrozenWeight` replaces it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes

from trifuse import backends
from trifuse.ops._linear_choice import is_available


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


PANEL = 64  # features of a panel: kTile of csrc/cpu/operand.h


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
        if rest or features % PANEL:
            return None
        return self.rows(0, features), self.rows(features, 2 * features)

    def rows(self, first: int, last: int) -> FrozenWeight:
        """Returns rows [first, last) of the weight, which share the memory of the whole.

        They begin with a panel of the packed form, and end with one or with the weight.
        """
        size = self.packed.numel() // -(-self.shape[0] // PANEL)  # of a panel
        part = FrozenWeight.__new__(FrozenWeight)
        part.shape = torch.Size((last - first, self.shape[1]))
        part.dtype, part.device, part.capability = self.dtype, self.device, self.capability
        part.packed = self.packed[first // PANEL * size : -(-last // PANEL) * size]
        part._constant = None
        return part

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
        if not is_available(state["weight"].dtype):
            raise RuntimeError(
                "a frozen model needs trifuse's C++ extension to be loaded; "
                "call revert() of fuse's report before saving it"
            )
        self.__init__(state["weight"])  # type: ignore[misc]


def frozen_message(what: str) -> str:
    """Returns the message of an error that a frozen weight raises."""
    return f"{what}: the model is frozen (trifuse.fuse(model, freeze=True)); call revert() first"


# The packed form depends on these besides the bits, because equal bits may represent different
# matrices.
_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.dtype, str | None]


def _kind(weight: Tensor, dtype: torch.dtype) -> _Kind:
    return weight.shape, weight.stride(), weight.dtype, dtype, backends.cpu_capability()


class _Kept(NamedTuple):
    """A packed weight and the state it was packed from.

    :class:`PackedWeight` replaces it as a whole, because threads may share a model.
    """

    sums: Tensor
    kind: _Kind
    packed: Tensor | None
