"""The memory that a computation needs: its peak, and the fresh pages that it touches."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import platform
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

M_MMAP_THRESHOLD = -3  # mallopt(3)


def peak_extra_memory(prepare: Callable[..., Callable[[], Sequence[Tensor]]], *args: Any) -> int:
    """Bytes that a computation held at its peak beyond its inputs and its results.

    Measured as the peak resident memory of a fresh process (on a GPU: the peak of torch's
    allocator), so that earlier measurements leave no pages behind.

    Args:
        prepare: a module-level function, called with ``args``, which can be pickled. It makes the
            inputs and returns the computation, which returns its results. It should run something
            small first, so that what a first call loads or allocates once does not count.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_peak_here, prepare, args, torch.get_num_threads()).result()


def _peak_here(
    prepare: Callable[..., Callable[[], Sequence[Tensor]]], args: Sequence[Any], threads: int
) -> int:
    torch.set_num_threads(threads)
    compute = prepare(*args)
    before = _start_peak()
    results = compute()
    peak = _peak(results[0].device.type)
    return max(0, peak - before - sum(result.nbytes for result in results))


def peak_here(compute: Callable[[], object]) -> int:
    """Bytes that a computation held at its peak beyond what this process held before."""
    before = _start_peak()
    compute()
    return max(0, _peak("cpu") - before)


def _start_peak() -> int:
    """Reset the peak, and return the bytes held now."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    _release_free_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return _peak("cpu")  # the peak so far, at which the inputs were held
    return _status("VmRSS")


def _release_free_memory() -> None:
    """Return freed pages to the system, because the computation would reuse them and count less.

    From now on a large block is returned as soon as it is freed.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # only glibc has it
        libc.mallopt(M_MMAP_THRESHOLD, 2**16)
        libc.malloc_trim(0)


def _peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    """Bytes, from proc(5)'s status, which counts in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def page_faults(function: Callable[[], object], calls: int = 8) -> float:
    """Pages of fresh memory that a call touches: the kernel maps and clears each of them."""
    function()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        function()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls
