"""Compares the bits of some thousand random calls before and after a change that must keep them.

    PYTHONPATH=tests/support python -m fuzz.bits before.json    # records
    PYTHONPATH=tests/support python -m fuzz.bits before.json    # compares, because the file exists

Each call runs in 1 thread and in 2. A result that differs is listed with the seed of its call.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
from pathlib import Path
from random import Random

import torch
from rich.progress import track
from torch import Tensor

from .call import run
from .worker import BACKENDS, OPERATORS, draw, prepared, runs

CALLS = {"cpp": 1000, "eager": 100, "triton": 100, "cuda": 100}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz.bits", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--operator", nargs="*", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--backend", nargs="*", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--calls", type=int, help=f"of each operator; default: {CALLS}")
    options = parser.parse_args(argv)
    jobs = [
        (operator, backend, range(start, min(start + 25, calls)))
        for backend in options.backend
        for operator in options.operator
        if runs(operator, backend)
        for calls in [options.calls or CALLS[backend]]
        for start in range(0, calls, 25)
    ]
    bits: dict[str, str] = {}
    # One process per job, because each loads CUDA's host model for one operator.
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=1) as pool:
        for found in track(pool.imap_unordered(hashes, jobs), total=len(jobs)):
            bits |= found
    if not options.file.exists():
        options.file.write_text(json.dumps(bits, indent=0, sort_keys=True))
        print(f"{len(bits)} results recorded")
        return 0
    recorded = json.loads(options.file.read_text())
    changed = [name for name, value in sorted(bits.items()) if recorded.get(name) != value]
    print(*changed[:50], f"{len(changed)} of {len(bits)} results changed", sep="\n")
    return 1 if changed else 0


def hashes(job: tuple[str, str, range]) -> dict[str, str]:
    """Returns a hash of each result of each call."""
    operator, backend, seeds = job
    found = {}
    with prepared(operator, backend):
        for seed in seeds:
            call, _ = draw(operator, backend, Random(seed))
            for threads in (1, 2):
                torch.set_num_threads(threads)
                name = f"{backend} {operator} SEED={seed}, {threads} threads, {call.kernel}"
                upstream = {name: values.build() for name, values in call.upstream.items()}
                try:
                    results = run(call, call.build(), upstream)
                except Exception as error:
                    found[name] = type(error).__name__
                    continue
                found |= {f"{name}: {key}": digest(result) for key, result in results.items()}
    return found


def digest(t: Tensor) -> str:
    """Hashes shape, dtype, strides and values. A NaN has many bit patterns and counts as one."""
    values = t.masked_fill(t.isnan(), float("nan")) if t.is_floating_point() else t
    data = values.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    layout = f"{t.dtype} {tuple(t.shape)} {t.stride()}"
    return hashlib.blake2b(layout.encode() + data, digest_size=8).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
