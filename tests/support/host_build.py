"""Builds the CUDA sources with the host's C++ compiler and the model of CUDA in cuda_on_host.

A library is rebuilt when its sources change, and kept in build/cuda_on_host. Without a C++
compiler, tests that need a library are skipped.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import runpy
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch.utils.cpp_extension import include_paths, library_paths

from trifuse import backends

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).parent / "cuda_on_host"
BUILD = ROOT / "build/cuda_on_host"

# The model's headers come first, and replace those of the same name in csrc.
_INCLUDES = (f"-I{MODEL}", f"-I{ROOT / 'csrc'}")
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi")
_CODE = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")
_FLAGS = [*_CODE, *_WARNINGS, *_INCLUDES]
# AT_PER_OPERATOR_HEADERS: torch's headers include only the operators that they use.
_TORCH_FLAGS = ["-Wno-error", "-DAT_PER_OPERATOR_HEADERS"]
_TORCH_FLAGS += [f"-isystem{path}" for path in include_paths()]


class Library:
    """A library of kernels under the model, and the device that the model simulates."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions = ctypes.CDLL(str(path))
        types = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int)
        self.functions.set_device.argtypes = types
        self._set_device(4, 2, 227 << 10, 0, 80)

    @contextmanager
    def device(
        self,
        *,
        multiprocessors: int = 4,
        blocks_per_multiprocessor: int = 2,
        shared_memory: int = 227 << 10,
        seed: int = 0,
        compute_capability: int = 80,
    ) -> Iterator[None]:
        """Simulates this device inside the block. With a seed, threads run in a random order."""
        before = self._device
        self._set_device(
            multiprocessors, blocks_per_multiprocessor, shared_memory, seed, compute_capability
        )
        try:
            yield
        finally:
            self._set_device(*before)

    def launches(self, kernel: str) -> int:
        """Returns how often a kernel has been launched."""
        count: int = self.functions.launches(kernel.encode())
        return count

    def largest_tensor(self) -> int:
        """Returns the bytes of the largest tensor made in guarded memory since the last call."""
        self.functions.largest_tensor.restype = ctypes.c_size_t
        size: int = self.functions.largest_tensor()
        return size

    def _set_device(self, *device: int) -> None:
        self._device = device
        self.functions.set_device(*device)

    @contextmanager
    def guarded_memory(self) -> Iterator[None]:
        """Puts guards around tensors made inside the block, and checks them at its end."""
        self.functions.guard_memory(True)
        try:
            yield
        finally:
            self.functions.guard_memory(False)
            damaged = self.functions.damaged_tensors()
        assert damaged == 0, f"{damaged} tensors were written around"


def build(name: str, sources: Sequence[Path]) -> Library:
    """Builds a library from .cu sources, and .cpp sources, which may include torch's headers."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    settings = " ".join([compiler, torch.__version__, *_FLAGS, *_TORCH_FLAGS])
    folder = BUILD / hashlib.sha256(settings.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"lib{name}.so"
    graph = runpy.run_path(str(ROOT / "setup.py"))["Graph"](folder)
    objects = []
    for source in (*sources, MODEL / "grid.cpp"):
        flags = _FLAGS if source.suffix == ".cu" else [*_FLAGS, *_TORCH_FLAGS]
        objects.append(graph.compile([source], source.name, [compiler, *flags, "-x", "c++"]))
    libraries = []
    for path in library_paths():
        libraries += [f"-L{path}", f"-Wl,-rpath,{path}"]
    libraries += ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
    graph.link(objects, library, [compiler, "-shared"], libraries)
    with FileLock(folder / "lock"):  # another test worker may be building it
        graph.run()
    return Library(library)


# Operators that share one library, and the prefixes of its sources.
_LIBRARY_OF = {"gru": "lstm", "rnn": "lstm"}
_PREFIXES = {"lstm": ("gru", "lstm")}


def build_operator(operator: str) -> Library:
    """Builds an operator's CUDA kernels, registered as its ``cuda`` backend for CPU tensors."""
    name = _LIBRARY_OF.get(operator, operator)
    patterns = [
        f"{prefix}*{suffix}"
        for prefix in _PREFIXES.get(name, (name,))
        for suffix in (".cu", ".cpp")
    ]
    sources = [path for pattern in patterns for path in (ROOT / "csrc/cuda").glob(pattern)]
    assert sources, operator
    return build(name, sorted([*sources, MODEL / "guarded_memory.cpp"]))


@contextmanager
def serving_as_cuda(library: Library) -> Iterator[None]:
    """Makes ``trifuse.backend("cuda")`` run a library's kernels on CPU tensors inside the block."""
    torch.ops.load_library(str(library.path))
    before = backends._WHY_NOT["cuda"]
    backends._WHY_NOT["cuda"] = lambda call: None
    backends._choose.cache_clear()
    try:
        yield
    finally:
        backends._WHY_NOT["cuda"] = before
        backends._choose.cache_clear()


def library_fixture(operator: str) -> Any:
    """Returns a fixture of an operator's library, which ``trifuse.backend("cuda")`` then runs."""

    @pytest.fixture(scope="module")
    def library() -> Iterator[Library]:
        library = build_operator(operator)
        with serving_as_cuda(library):
            yield library

    return library
