"""The kernels that tests run on: every backend of this machine, and every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import environment  # noqa: F401 - before torch

import trifuse
from trifuse import backends


class Kernel(NamedTuple):
    """A backend, and for C++ the instruction set that its kernels are compiled for."""

    backend: str
    capability: str | None = None

    @property
    def name(self) -> str:
        return self.backend if self.capability is None else f"{self.backend} {self.capability}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Runs the calls inside the block on this kernel."""
        if self.capability is not None:
            before = backends._C.cpu_capability()
            backends._C.set_cpu_capability(self.capability)
        try:
            with trifuse.backend(self.backend):
                yield
        finally:
            if self.capability is not None:
                backends._C.set_cpu_capability(before)


CPU_CAPABILITIES = () if backends._C is None else tuple(backends._C.cpu_capabilities())
CPP_KERNELS = tuple(Kernel("cpp", name) for name in CPU_CAPABILITIES)
KERNELS = (Kernel("eager"), *CPP_KERNELS)
BACKENDS = ("eager", "cpp") if CPP_KERNELS else ("eager",)
