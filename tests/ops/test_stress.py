"""Calls from many threads, in forked processes, among signals and changing numbers of threads."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from fault_cases import CASES, floating, in_process, normal
from torch import Tensor

import trifuse
from trifuse import backends

pytestmark = [
    pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built"),
    pytest.mark.skipif(sys.platform == "win32", reason="forks"),
]


def equal(results: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# Drawing a seed moves torch's generator, which threads share.
DRAWN = {"norm", "norm_bf16", "dropout", "attention_bf16", "lstm_random"}
FIXED = [name for name in CASES if name not in DRAWN]


# Threads ------------------------------------------------------------------------------------------


def calls_from_many_threads() -> None:
    torch.set_num_threads(2)
    expected = {name: CASES[name].results() for name in FIXED}
    wrong: list[str] = []

    def work(seed: int) -> None:
        names = random.Random(seed).sample(FIXED, len(FIXED))
        for name in names:
            if seed % 2:
                torch.set_num_threads(1 + seed % 3)
            if not equal(CASES[name].results(), expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_calls_from_many_threads():
    in_process(calls_from_many_threads)


def changed_numbers_of_threads() -> None:
    """The number of threads also changes between forward and backward."""
    for name, case in CASES.items():
        torch.set_num_threads(1)
        expected = case.results()
        for forward, backward in ((2, 1), (1, 3), (4, 2)):
            torch.set_num_threads(forward)
            torch.manual_seed(0)
            tensors = case.tensors()
            outputs = floating(case.call(tensors))
            torch.set_num_threads(backward)
            inputs = [t for t in tensors.values() if t.requires_grad]
            grads = torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs])
            assert equal([*outputs, *grads], expected), name


def test_changed_numbers_of_threads():
    in_process(changed_numbers_of_threads)


# Forks --------------------------------------------------------------------------------------------


def ends(child: int, seconds: float) -> int | None:
    """Waits for a child; returns its exit status, or None if it had to be killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def forked(body: Callable[[], bool], seconds: float = 60) -> None:
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = body()
        finally:
            os._exit(0 if ok else 3)
    assert ends(child, seconds) == 0


def fork_while_threads_allocate() -> None:
    torch.set_num_threads(1)
    # A result of more than 1 MiB. The input has no autograd metadata: torch guards that by a mutex,
    # and a child of any op, torch's own included, hangs if another thread held it at the fork.
    rows = torch.ones(300, 1024)
    expected = trifuse.dropout_add_layer_norm(rows)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            trifuse.dropout_add_layer_norm(rows)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            forked(lambda: torch.equal(trifuse.dropout_add_layer_norm(rows), expected))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_fork_while_threads_allocate():
    in_process(fork_while_threads_allocate)


def every_operator_in_a_child() -> None:
    # One thread, because a child has none of the threads that torch has started.
    torch.set_num_threads(1)
    expected = {name: case.results() for name, case in CASES.items()}
    forked(lambda: all(equal(CASES[name].results(), expected[name]) for name in CASES))


def test_every_operator_in_a_child():
    in_process(every_operator_in_a_child)


# Signals ------------------------------------------------------------------------------------------


def for_ever(call: Callable[[], object]) -> None:
    while True:
        call()


def calls_among_signals() -> None:
    torch.set_num_threads(2)
    expected = {name: CASES[name].results() for name in FIXED}
    fired, cell = 0, CASES["lstm_cell"]
    tensors = cell.tensors()

    def handler(*_: object) -> None:
        nonlocal fired
        fired += 1
        if fired % 3 == 0:
            cell.call(tensors)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        while fired < 10:
            for name in FIXED:
                assert equal(CASES[name].results(), expected[name]), name
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    large = normal(4, 4, 1500, 64)
    for delay in (0.001, 0.01, 0.03):
        signal.setitimer(signal.ITIMER_REAL, delay)
        with pytest.raises(KeyboardInterrupt):
            for_ever(lambda: trifuse.scaled_dot_product_attention(large, large, large))
        for name in FIXED:
            assert equal(CASES[name].results(), expected[name]), name


def test_calls_among_signals():
    in_process(calls_among_signals)


# Many calls ---------------------------------------------------------------------------------------


def many_calls(count: int) -> None:
    torch.set_num_threads(1)
    q = normal(1, 1, 4, 8)
    x, w = normal(2, 8), normal(8)
    step, weights = normal(1, 4), (normal(16, 4), normal(16, 4))
    sizes = [(300 + 37 * (i % 9), 1024) for i in range(count // 100)]

    def small() -> None:
        trifuse.scaled_dot_product_attention(q, q, q)
        trifuse.dropout_add_layer_norm(x, weight=w)
        trifuse.lstm_cell(step, None, *weights)
        trifuse.gru_cell(step, None, weights[0][:12], weights[1][:12])
        trifuse.rnn_cell(step, None, weights[0][:4], weights[1][:4])

    def resident() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(2000):
        small()
    for size in sizes[:40]:
        trifuse.dropout_add_layer_norm(torch.ones(()).expand(size))
    before = resident()
    for _ in range(count // 4):
        small()
    for size in sizes:
        trifuse.dropout_add_layer_norm(torch.ones(()).expand(size))
    assert resident() - before < 4 << 10, f"grew by {resident() - before} KiB"


def test_many_calls_do_not_grow():
    in_process(many_calls, 100_000)
