"""What goes wrong raises: memory that runs out, tensors exchanged under a backward, absurd sizes.

What would crash or hang otherwise is called in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fault_cases import CASES, Case, floating, in_new_thread, in_process, normal
from torch import Tensor

import trifuse
from trifuse import backends

pytestmark = pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")

ALL = 1 << 40  # allocations: every one from some number on


def equal(results: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# Allocations that fail ----------------------------------------------------------------------------


@contextlib.contextmanager
def failing(first: int, count: int) -> Iterator[None]:
    backends._C.fail_allocations(first, count)
    try:
        yield
    finally:
        backends._C.fail_allocations(0)


def unless_out_of_memory(call: Callable[[], Any]) -> Any:
    """Its result; None if there was no memory for it."""
    try:
        return call()
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return None


def each_allocation_fails(threads: int) -> None:
    torch.set_num_threads(threads)
    for case in CASES.values():
        each_allocation_of_a_call_fails(case)


def each_allocation_of_a_call_fails(case: Case) -> None:
    """The first, the second, and so on, until a call makes no more; by itself or with all after."""
    small, large = case.results(1), case.results(4)
    number, succeeded = 1, False
    while not succeeded:
        count = ALL if number % 2 else 2  # of the kernels' own, each is asked for twice

        def call(first: int = number, count: int = count) -> None:
            nonlocal succeeded
            assert equal(case.results(1), small)
            with failing(first, count):
                results = unless_out_of_memory(lambda: case.results(4))
            made = backends._C.counted_allocations()
            succeeded = results is not None
            if results is not None:
                assert made < first, f"{first} of {made} failed, and nothing was raised"
                assert equal(results, large)
            assert equal(case.results(1), small)
            assert first % 4 or equal(case.results(4), large)

        in_new_thread(call)
        number += 1
    assert number > 4


@pytest.mark.parametrize("threads", [1, 2])
def test_each_allocation_fails(threads):
    """Every operator, forward and backward."""
    in_process(each_allocation_fails, threads, seconds=240)


def address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_kept_memory_is_given_back_before_an_allocation_is_given_up():
    def result(rows: int) -> Tensor:
        return trifuse.dropout_add_layer_norm(torch.ones(()).expand(rows, 1024))

    kept = [result(8000 + 10 * i) for i in range(6)]
    kept.clear()
    before = address_space()
    with failing(ALL, 1):
        result(30_000)  # larger than any that is kept
        made = backends._C.counted_allocations()
    served = 0
    for number in range(1, made + 1):
        # The first attempt fails, the second doesn't.
        with contextlib.suppress(RuntimeError), failing(number, 1):
            result(40_000 + 10_000 * number)
            served += 1
    assert served >= 1
    assert address_space() < before - (64 << 20)


# Exchanged data -----------------------------------------------------------------------------------


def smaller(t: Tensor) -> list[Tensor]:
    """Of other shapes, each less along one dimension."""
    return [
        t.detach().narrow(d, 0, max(t.shape[d] // 2, 0)).clone()
        for d in range(t.dim())
        if t.shape[d] > 1
    ]


def exchanged_data_raises() -> None:
    for name, case in CASES.items():
        for argument, t in case.tensors().items():
            for other in smaller(t):
                exchange(name, case, argument, other)


def exchange(name: str, case: Case, argument: str, other: Tensor) -> None:
    """Where a forward keeps a view of a tensor, or a backward reads nothing of it, all is well."""

    def gradients(exchanged: bool) -> list[Tensor]:
        torch.manual_seed(0)
        tensors = case.tensors()
        outputs = floating(case.call(tensors))
        if exchanged:
            tensors[argument].data = other
        inputs = [t for k, t in tensors.items() if t.requires_grad and k != argument]
        ones = [torch.ones_like(o) for o in outputs]
        return list(torch.autograd.grad(outputs, inputs, ones)) if inputs else []

    message = ""
    try:
        found = gradients(True)
    except (ValueError, TypeError, RuntimeError) as error:
        message = str(error)
    if not message:
        assert equal(found, gradients(False)), (name, argument)
        return
    if "invalid gradient" in message:  # a sound one, of another shape: autograd says so
        return
    # torch multiplies in the backward of linear.
    assert re.search(r": expected .*; got |same dtype", message), (name, argument, message)
    # Of tensors that say how large others are, one of the others may be blamed.
    if argument.startswith(("weight", "bias", "x_bias", "norm", "residual", "lengths")):
        assert message.startswith(argument), (name, argument, message)


def test_data_exchanged_between_forward_and_backward():
    in_process(exchanged_data_raises)


def exchanged_types_raise() -> None:
    for name, case in CASES.items():
        for argument, t in case.tensors().items():
            if t.is_floating_point():
                for dtype in (torch.float64, torch.float16):
                    exchange(name, case, argument, t.detach().to(dtype))


def test_types_exchanged_between_forward_and_backward():
    in_process(exchanged_types_raise)


# Storage ------------------------------------------------------------------------------------------


def short_storage_raises() -> None:
    for case in CASES.values():
        for argument, t in case.make(1).items():
            for kept in (0, t.nbytes - t.itemsize):
                tensors = case.make(1)
                tensors[argument] = t.clone()
                tensors[argument].untyped_storage().resize_(kept)
                # torch says it itself where it is asked for a view.
                with pytest.raises((ValueError, RuntimeError), match="storage"):
                    case.call(tensors)


def test_storage_shorter_than_the_tensor():
    in_process(short_storage_raises)


# Real limits --------------------------------------------------------------------------------------


@contextlib.contextmanager
def room(mib: int) -> Iterator[None]:
    """Let the process's address space grow by so much and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (mib << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def small_after_large(operator: str) -> None:
    torch.set_num_threads(1)
    call, small, large = {
        "attention": (trifuse.scaled_dot_product_attention, (1, 1, 64, 16), (1, 1, 64, 400_000)),
        "norm": (trifuse.dropout_add_layer_norm, (1, 16), (1, 30 << 20)),
    }[operator]
    tensors = 3 if operator == "attention" else 1
    first = call(*[normal(*small)] * tensors)
    arguments = [normal(*large)] * tensors
    with room(150), pytest.raises(RuntimeError, match=r"can't allocate memory.*\d+ bytes for"):
        call(*arguments)
    assert torch.equal(call(*[normal(*small)] * tensors), first)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
@pytest.mark.parametrize("operator", ["attention", "norm"])
def test_a_small_call_after_one_that_found_no_memory(operator):
    in_process(small_after_large, operator)


def backward_in_little_room() -> None:
    torch.set_num_threads(2)
    tensors = [normal(1, 1, 256, 16384).requires_grad_() for _ in range(3)]
    out = trifuse.scaled_dot_product_attention(*tensors)
    ones = torch.ones_like(out)
    raised = 0

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, tensors, ones, retain_graph=True)

    for mib in range(60, 260, 20):

        def call(mib: int = mib) -> None:
            nonlocal raised
            small = normal(1, 8, 512, 16)
            trifuse.scaled_dot_product_attention(small, small, small)  # starts the threads
            with room(mib):
                raised += unless_out_of_memory(backward) is None

        in_new_thread(call)
    assert raised
    assert all(g.isfinite().all() for g in backward())


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_a_thread_without_memory_releases_those_that_wait_for_it():
    in_process(backward_in_little_room)


def throw_in_each_thread() -> None:
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for thread in range(threads):
            with pytest.raises(RuntimeError, match=f"thrown in thread {thread}"):
                backends._C.throw_in_crew(threads, thread)


def test_a_thread_that_throws_releases_its_crew():
    in_process(throw_in_each_thread)


# Sizes --------------------------------------------------------------------------------------------


def absurd_sizes_raise() -> None:
    limit = 4 << 30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    huge, one = 1 << 40, torch.zeros(1)
    weights = normal(16, 4), normal(16, 4), normal(12, 4), normal(12, 4)
    calls = {
        "lstm, T": lambda: trifuse.lstm(one.expand(huge, 1, 4), None, *weights[:2]),
        "lstm, B": lambda: trifuse.lstm(one.expand(1, huge, 4), None, *weights[:2]),
        "lstm_cell, B": lambda: trifuse.lstm_cell(one.expand(huge, 4), None, *weights[:2]),
        "gru, T": lambda: trifuse.gru(one.expand(huge, 1, 4), None, *weights[2:]),
        "gru_cell, B": lambda: trifuse.gru_cell(one.expand(huge, 4), None, *weights[2:]),
        "attention, L": lambda: trifuse.scaled_dot_product_attention(
            *[one.expand(1, 1, huge, 4)] * 3
        ),
        "attention, E": lambda: trifuse.scaled_dot_product_attention(
            *[one.expand(1, 1, 1, 1 << 57)] * 2, torch.zeros(1, 1, 1, 4)
        ),
        "attention, B": lambda: trifuse.scaled_dot_product_attention(
            *[one.expand(huge, 1, 1, 4)] * 3
        ),
        "varlen": lambda: trifuse.varlen_attention(
            *[one.expand(huge, 1, 4)] * 3, torch.tensor([0, huge])
        ),
        "norm, N": lambda: trifuse.dropout_add_layer_norm(one.expand(1, huge)),
        "norm, rows": lambda: trifuse.dropout_add_layer_norm(one.expand(huge, 4)),
        "dropout": lambda: CASES["dropout"].call({"x": one.expand(huge)}),
        "linear": lambda: torch.ops.trifuse.linear(one.expand(huge, 4), normal(4, 4), None),
        "linear, K": lambda: torch.ops.trifuse.linear(
            one.expand(1, 1 << 57), one.expand(1, 1 << 57), None
        ),
    }
    for name, call in calls.items():
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        with pytest.raises((RuntimeError, ValueError)) as raised:
            call()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert "bad_alloc" not in str(raised.value), name
        assert time.monotonic() - started < 5, name
        assert grown < 200 << 10, name


def test_sizes_that_no_memory_holds():
    in_process(absurd_sizes_raise)
