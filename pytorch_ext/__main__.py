"""``python -m trifuse``: reports the build, the machine, and which backend serves what, and why.

Prints plain text to standard output. Needs nothing beyond torch, and no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
import string
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trifuse import __version__, backends

# One call per operator. The report varies its device and dtype. Add a line for a new operator.
CALLS = (
    backends.Call("attention", "cpu", torch.float32, head_dim=64),
    backends.Call("dropout_add_layer_norm", "cpu", torch.float32),
    backends.Call("lstm", "cpu", torch.float32),
    backends.Call("gru", "cpu", torch.float32),
    backends.Call("rnn", "cpu", torch.float32),
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

ENVIRONMENT = {
    "TRIFUSE_BACKEND": "serve every call by cuda, triton, cpp or eager; auto (the default) chooses",
    "TRIFUSE_CPU_CAPABILITY": "C++ kernels for this instruction set instead of the best there is",
    "TRIFUSE_CPU_CACHE_MIB": "memory of freed results that is kept for the next; 256 unless set",
    "TRIFUSE_CUDA_CAPABILITY": "CUDA kernels for this compute capability, if the GPU's is higher",
    "TRIFUSE_LINEAR": "multiply linear layers by cpp or torch instead of the faster of them",
    "TRIFUSE_TRITON_AUTOTUNE": "1 times ways to launch Triton's attention and keeps the fastest",
    "TRITON_INTERPRET": "1 lets the Triton kernels run on CPU tensors, slowly, for checking",
}


def build() -> list[tuple[str, str]]:
    """Returns (name, description) pairs of the build and the machine."""
    info: dict[str, Any] = backends.build_info()
    lines = [
        ("trifuse", __version__),
        ("torch", torch.__version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]
    if "error" in info:
        lines.append(("C++ kernels", f"none: {info['error']}"))
    else:
        lines += [
            ("C++ kernels", f"built by {info['compiler']} against torch {info['torch']}"),
            ("  built for", " ".join(info["capabilities"])),
            ("  this CPU runs", " ".join(backends._C.cpu_capabilities())),
            ("  in use", _capability_in_use()),
        ]
    lines += [
        ("CUDA kernels", _cuda_kernels(info)),
        ("Triton", version_of("triton") or "not installed"),
        ("GPU", _gpu()),
    ]
    return lines


def _capability_in_use() -> str:
    try:
        return backends._C.cpu_capability()
    except ValueError as error:  # TRIFUSE_CPU_CAPABILITY is not usable here
        return f"none: {error}"


def _cuda_kernels(info: dict[str, Any]) -> str:
    if code := info.get("cuda_code"):
        return f"{', '.join(info['cuda'])}, compiled to {code.replace(',', ', ')}"
    why = info.get("cuda_error")
    return f"none in this build: {why}" if why else "none in this build"


def version_of(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> str:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        return f"none: {'no device or no driver was found' if built else 'torch is a CPU build'}"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names)


def service() -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Tabulates which backend serves each operator, device and dtype.

    Returns:
        Rows of operator, device, dtype, ``auto``'s choice and, for each backend, "yes" or the
        letter of a reason; and the reasons by letter.
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows: list[tuple[str, ...]] = []
    letters: dict[str, str] = {}
    for call in CALLS:
        for device in devices:
            for dtype in DTYPES:
                asked = call._replace(device=device, dtype=dtype)
                answers = []
                for name in backends.ORDER:
                    why = backends._WHY_NOT[name](asked)
                    if why is not None and why not in letters:
                        letters[why] = string.ascii_letters[len(letters)]
                    answers.append("yes" if why is None else letters[why])
                with backends.backend("auto"):
                    chosen = backends.choose(asked).backend
                dtype_name = str(dtype).removeprefix("torch.")
                rows.append((call.operator, device, dtype_name, chosen, *answers))
    return rows, {letter: why for why, letter in letters.items()}


def report() -> str:
    rows, reasons = service()
    header = ("operator", "device", "dtype", "auto", *backends.ORDER)
    settings = ((name, os.environ.get(name, "unset"), use) for name, use in ENVIRONMENT.items())
    return "\n".join(
        [
            *_aligned(build()),
            "",
            "Which backend serves what, and which one `auto` takes:",
            *_aligned([header, *rows]),
            *(f"  {letter}  {why}" for letter, why in reasons.items()),
            "",
            "Environment variables:",
            *_aligned(settings),
        ]
    )


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m trifuse", description=__doc__).parse_args()
    backends.log.setLevel(logging.ERROR)  # the table says which calls fall back to eager
    print(report())
