"""The machine and the versions that figures were taken with, and the machine's ceilings."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import trifuse
from trifuse import backends
from trifuse.__main__ import version_of
from trifuse.benchmarks import ceilings


def facts(device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions that the figures were taken with, and its measured rates."""
    out: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": backends.cpu_capability(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trifuse": trifuse.__version__,
    }
    if device == "cuda":
        out["gpu"] = torch.cuda.get_device_name()
        out["driver"] = _driver()
        out["cuda"] = torch.version.cuda
        out["cudnn"] = torch.backends.cudnn.version()
        out["triton"] = version_of("triton")
    for dtype in (torch.float32, torch.bfloat16):
        rate = ceilings.matrix_rate(dtype, device=device)
        out[f"{dtype} matrix products".removeprefix("torch.")] = rate._asdict()
    out["copies"] = ceilings.copy_rate(device=device)._asdict()
    return out


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.partition("\n")[0]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def describe(facts: Mapping[str, Any]) -> str:
    """The machine and its versions, then its ceilings; on a GPU the driver and libraries too."""
    place, libraries = f"{facts['cpu']}, {facts['threads']} of {facts['cores']} cores", ""
    if "gpu" in facts:
        place = f"{facts['gpu']}, driver {facts['driver']}"
        names = {"cuda": "CUDA", "cudnn": "cuDNN", "triton": "Triton"}
        versions = (f"{name} {facts[key] or 'none'}" for key, name in names.items())
        libraries = f" ({', '.join(versions)})"
    elif facts["cpu_capability"]:
        place += f", kernels for {facts['cpu_capability']}"
    fp32, bf16 = facts["float32 matrix products"], facts["bfloat16 matrix products"]
    return (
        f"{place}, torch {facts['torch']}{libraries}, trifuse {facts['trifuse']}\n"
        f"matrix products at most {fp32['value'] / 1e9:.0f} GFLOP/s in fp32 ({fp32['source']}), "
        f"{bf16['value'] / 1e9:.0f} in bf16 ({bf16['source']}); "
        f"copies {facts['copies']['value'] / 1e9:.1f} GB/s"
    )
