"""The choice between trifuse's matrix product and torch's, for linear layers on a CPU.

A table of CPUs that were measured decides. The environment variable ``TRIFUSE_LINEAR`` ("cpp" or
"torch") overrides it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from trifuse import backends


class Choice(NamedTuple):
    """Whether trifuse's product serves a dtype, and why."""

    reason: str
    inference: bool = False  # if nothing needs a gradient
    training: bool = False  # if something needs a gradient

    @property
    def faster(self) -> bool:
        return self.inference or self.training

    @property
    def product(self) -> str:
        """The product that serves: cpp, torch, or one in inference and the other in training."""
        if self.inference == self.training:
            return "cpp" if self.inference else "torch"
        ours, theirs = ("inference", "training") if self.inference else ("training", "inference")
        return f"cpp in {ours}, torch in {theirs}"


class Gain(NamedTuple):
    """torch's time over trifuse's with 64 and 512 rows: the mean, on AMD's CPUs the smallest."""

    inference: float
    training: float


# By dtype, instruction set and the CPU's maker. The maker matters for torch's speed, because MKL,
# which multiplies float32, uses its fastest kernels only on Intel's CPUs. The figures are those of
# ``python -m trifuse.benchmarks linear``. With fewer rows the gain in inference is larger.
_GAINS: dict[tuple[torch.dtype, str, str], Gain] = {
    (torch.float32, "AVX2", "AMD"): Gain(1.1, 1.03),
    (torch.float32, "AVX512", "AMD"): Gain(1.31, 1.08),
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
    if dtype not in _made:
        _made[dtype] = _choose(dtype)
    return _made[dtype]


def chosen(dtype: torch.dtype) -> Choice:
    """Returns what :func:`choose` returned before, or a choice that serves nothing."""
    return _made.get(dtype, _NOT_CHOSEN)


_made: dict[torch.dtype, Choice] = {}
_NOT_CHOSEN = Choice("not chosen yet")

# Training uses trifuse's product, which packs the weight or parts of it, from this many rows on.
ROWS_WORTH_PACKING = 64


def _requested() -> str:
    name = os.environ.get("TRIFUSE_LINEAR", "auto")
    if name not in ("auto", "cpp", "torch"):
        raise ValueError(f"TRIFUSE_LINEAR: expected auto, cpp or torch; got {name!r}")
    return name


def _choose(dtype: torch.dtype) -> Choice:
    requested = _requested()
    if requested == "torch":
        return Choice("TRIFUSE_LINEAR=torch")
    if not is_available(dtype):
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
    return _requested() != "torch" and is_available(dtype)


def is_available(dtype: torch.dtype) -> bool:
    return backends.cpu_capability() is not None and dtype in (torch.float32, torch.bfloat16)
