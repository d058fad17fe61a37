"""A worker process: it receives seeds, and makes and checks the call of each."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from .call import Call, Failure, kernels, program
from .draws import Draws, shrink

OPERATORS = ("attention", "dropout_add_layer_norm", "lstm", "gru", "rnn", "dropout", "linear")
BACKENDS = ("cpp", "eager", "triton", "cuda")


def runs(operator: str, backend: str) -> bool:
    if operator == "linear":
        return backend == "cpp"
    return (operator, backend) != ("dropout", "cuda")  # no CUDA kernel


def dtypes(operator: str, backend: str) -> tuple[str, ...]:
    if operator == "linear":
        return ("float32", "bfloat16")
    if backend == "triton":  # its interpreter does not round bfloat16
        return ("float32", "float16")
    return ("float32", "bfloat16", "float16", *(["float64"] if backend in ("cpp", "eager") else []))


def draw(operator: str, backend: str, source: Any) -> tuple[Call, list[int]]:
    """Returns a call and the decisions by which it was drawn."""
    d = Draws(source)
    kernel, dtype = d.choice(kernels(backend)), d.choice(dtypes(operator, backend))
    return importlib.import_module(f".{operator}", __package__).draw(d, kernel, dtype), d.made


def shrunk(operator: str, backend: str, made: list[int], kind: str, seconds: float) -> Call:
    """Returns the smallest call found that fails in the same way."""

    def fails(decisions: list[int]) -> bool:
        try:
            draw(operator, backend, decisions)[0].check()
        except Failure as failure:
            return failure.kind == kind
        except Exception:
            return False  # the decisions draw no valid call
        return False

    return draw(operator, backend, shrink(made, fails, seconds))[0]


def report(operator: str, backend: str, seed: int, shrink_seconds: float) -> tuple[str, str] | None:
    """Checks the call of a seed. Returns the kind of its failure and a text to print, or None."""
    call, made = draw(operator, backend, Random(seed))
    try:
        call.check()
    except Failure as failure:
        small = shrunk(operator, backend, made, failure.kind, shrink_seconds)
        message = str(failure)
        with contextlib.suppress(Exception):
            try:
                small.check()
            except Failure as again:
                message = str(again)
        again = f"make fuzz CALLS=1 SEED={seed} OPERATOR={operator} BACKEND={backend}"
        return failure.kind, f"{again}\n{message}\n\n{small}\n\n{program(small)}\n"
    return None


@contextlib.contextmanager
def prepared(operator: str, backend: str) -> Iterator[None]:
    """Sets torch up as the tests do and, for backend "cuda", its kernels on the host model."""
    torch.set_num_threads(1)
    # Fills uninitialised memory with NaN, to reveal elements that a kernel does not write.
    torch.use_deterministic_algorithms(True)
    with contextlib.ExitStack() as stack:
        if backend == "cuda":
            from host_build import build_operator, serving_as_cuda

            library = build_operator(operator)
            stack.enter_context(serving_as_cuda(library))
            stack.enter_context(library.device(seed=1))
            stack.enter_context(library.guarded_memory())
        yield


def work(operator: str, backend: str, seeds: Any, reports: Any, shrink_seconds: float) -> None:
    """Reports on the call of each seed received, until None comes."""
    known: set[str] = set()
    with prepared(operator, backend):
        while (seed := seeds.recv()) is not None:
            try:
                # Only a worker's first failure is shrunk.
                found = report(operator, backend, seed, 0.0 if known else shrink_seconds)
            except Exception as error:
                found = "the fuzzer itself", f"SEED={seed}: {type(error).__name__}: {error}"
            if found is not None:
                known.add(found[0])
            reports.send(found)
