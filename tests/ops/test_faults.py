"""Faults raise errors: failed allocations, tensors exchanged before a backward, absurd sizes.

Calls that could crash or hang run in a separate process.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fault_cases import (
    ALL,
    CASES,
    INFERENCE,
    SHRUNK,
    Case,
    calls_of_ops,
    equal,
    exchanged_data_raises,
    failing,
    flat,
    for_each_allocation,
    in_process,
    normal,
    short_storage_raises,
    smaller,
    unless_out_of_memory,
)
from torch import Tensor

import trifuse
from trifuse import backends

pytestmark = pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")


# Allocations that fail ----------------------------------------------------------------------------


def each_allocation_fails(threads: int) -> None:
    torch.set_num_threads(threads)
    for case in (CASES | INFERENCE).values():
        each_allocation_of_a_call_fails(case)


def each_allocation_of_a_call_fails(case: Case) -> None:
    """Fails allocation 1, 2, ... of a call, alone or with all later ones, until none is left."""
    small, large = case.results(1), case.results(2)

    def attempt(number: int) -> int:
        count = ALL if number % 2 else 2  # 2: the kernels retry each of their own allocations
        assert equal(case.results(1), small)
        with failing(number, count):
            results = unless_out_of_memory(lambda: case.results(2))
        made = backends._C.counted_allocations()
        if results is not None:
            # Two threads that allocate at once may fail once each; both then succeed on the retry.
            both_served = count == 2 and torch.get_num_threads() > 1
            message = f"{number} of {made} failed, and nothing was raised"
            assert made < number or both_served, message
            assert equal(results, large)
        assert equal(case.results(1), small)
        assert number % 4 or equal(case.results(2), large)
        return made

    assert for_each_allocation(attempt) > (4 if case.trains else 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_each_allocation_fails(threads):
    """Every operator, forward and backward."""
    in_process(each_allocation_fails, threads, seconds=300)


# Threads that wait --------------------------------------------------------------------------------


def one_of_two_threads_fails() -> None:
    """Two chunks of keys: at each block of queries, one thread adds its part after the other."""
    torch.set_num_threads(2)
    tensors = [normal(1, 1, rows, 16).requires_grad_() for rows in (256, 1000, 1000)]
    out = trifuse.scaled_dot_product_attention(*tensors)

    def backward() -> list[Tensor]:
        return list(torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True))

    expected = backward()
    raised = 0

    def attempt(number: int) -> int:
        nonlocal raised
        with failing(number, 2):
            results = unless_out_of_memory(backward)
        made = backends._C.counted_allocations()
        raised += results is None
        assert results is None or equal(results, expected)
        assert equal(backward(), expected)
        return made

    # Which thread allocates first varies from run to run.
    for _ in range(10):
        for_each_allocation(attempt)
    assert raised > 10


def test_a_thread_without_memory_releases_the_one_that_waits_for_it():
    in_process(one_of_two_threads_fails)


def throw_in_each_thread() -> None:
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for thread in range(threads):
            with pytest.raises(RuntimeError, match=f"thrown in thread {thread}"):
                backends._C.throw_in_crew(threads, thread)


def test_a_thread_that_throws_releases_its_crew():
    in_process(throw_in_each_thread)


def address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def kept_memory_is_given_back() -> None:
    def result(rows: int) -> Tensor:  # rows of 4 KiB
        return trifuse.dropout_add_layer_norm(torch.ones(()).expand(rows, 1024))

    torch.set_num_threads(1)
    result(300)
    before = address_space()
    freed = [result(16_000) for _ in range(6)]  # 384 MiB, of which the cache keeps 256
    freed.clear()
    assert address_space() < before + (350 << 20)
    number, made, served = 0, 0, 0
    while number <= made:
        number += 1
        freed = [result(16_000), result(16_000)]  # 64 MiB each, cached when freed
        freed.clear()
        before = address_space()
        # The first attempt fails, the retry doesn't. Cached blocks are too large for this result.
        with failing(number, 1):
            results = unless_out_of_memory(partial(result, 300 + 300 * number))
        made = backends._C.counted_allocations()
        if results is not None and number <= made:
            served += 1
            assert address_space() < before - (100 << 20), f"allocation {number}"
    assert served >= 4  # a large result's block and its header, and two small tensors


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_kept_memory_is_given_back_before_an_allocation_is_given_up():
    in_process(kept_memory_is_given_back)


# Exchanged data -----------------------------------------------------------------------------------


def test_data_exchanged_between_forward_and_backward():
    in_process(exchanged_data_raises)


@pytest.mark.parametrize("name", SHRUNK)
def test_data_exchanged_between_forward_and_backward_in_triton(triton, name):
    exchanged_data_raises(name, any_type=True)


# Backwards of lstm, gru and rnn convert these tensors. The others compute in grad_out's dtype.
ANY_TYPE = ("output", "gates", "cells", "clipped", "grad_output", "grad_h_n", "grad_c_n")
ANY_TYPE += ("grad_out", "grad_sum", "grad_logsumexp")


def unsound(t: Tensor, argument: str, backward: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors that an op must refuse in place of ``t``, and what is wrong with each."""
    for kept in (0, t.nbytes - t.itemsize):
        short = t.clone()
        short.untyped_storage().resize_(kept)
        yield f"{kept} bytes", short
    if argument == "seed":  # one number, in any shape
        yield "two numbers", t.repeat(2)
    else:
        yield "one dimension more", t[None]
        yield "one dimension more", t[..., None]
    if not backward:
        return
    yield "one dimension less", t[0]
    for other in smaller(t):
        one_head = argument in ("attn_mask", "relative_bias") and other.shape[1] == 1
        if not one_head:  # which would broadcast
            yield f"shape {tuple(other.shape)}", other
    if argument not in ANY_TYPE:
        yield "wrong type", t.double()
        yield "wrong type", t.half()
    else:
        yield "another type", t.double()
    if argument.endswith(("lengths", "cu_seqlens_q", "cu_seqlens_k")):
        yield "large numbers", t * 1000
        yield "negative numbers", -t


def each_tensor_of_an_op_is_checked(case: Case) -> None:
    """Includes tensors saved for a backward. In a forward, other shapes may be meant."""
    for op, args in calls_of_ops(case):
        expected = flat(op(*args))
        for i, given in enumerate(args):
            listed, argument = isinstance(given, list), op._schema.arguments[i].name
            for j, t in enumerate(given if listed else [given]):
                if not isinstance(t, Tensor) or t.numel() == 0:
                    continue
                for what, other in unsound(t, argument, "backward" in op.name()):
                    changed = [*given[:j], other, *given[j + 1 :]] if listed else other
                    where = (op.name(), argument, j, what)
                    try:
                        found, message = flat(op(*args[:i], changed, *args[i + 1 :])), ""
                    except (ValueError, TypeError) as error:
                        found, message = [], str(error)
                    if message:
                        assert re.search("expected|not a", message), (where, message)
                    else:  # accepted only if the results stay the same
                        assert not re.search("bytes|more|wrong|numbers", what), where
                        assert equal(found, expected), where


def each_tensor_is_checked() -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        if name != "dropout":
            each_tensor_of_an_op_is_checked(case)


def arguments_that_do_not_fit_raise() -> None:
    """Several bad arguments at once, or arguments that are not tensors."""

    def raises(case: str, **changed: Any) -> None:
        op, args = calls_of_ops(CASES[case])[0]
        names = [a.name for a in op._schema.arguments]
        for name, value in changed.items():
            args[names.index(name)] = value
        with pytest.raises((ValueError, TypeError), match="expected"):
            op(*args)

    heads = normal(2, 3, 540, 16)
    raises("attention", key=heads, value=heads)
    raises("varlen", cu_seqlens_k=None)
    raises("varlen", cu_seqlens_q=torch.empty(0).long(), cu_seqlens_k=torch.empty(0).long())
    rest = dict.fromkeys(["residual", "weight", "bias", "x_bias", "seed"])
    raises("norm", x=normal(), **rest)
    for recurrent in ("lstm", "gru", "rnn"):
        _, args = calls_of_ops(CASES[recurrent])[0]
        parameters = next(a for a in args if isinstance(a, list) and isinstance(a[0], Tensor))
        states = dict.fromkeys(["h0", "c0"] if recurrent == "lstm" else ["h0"])
        raises(recurrent, input=normal(12, 40, 1, 12), **states)
        raises(recurrent, reverse=[], parameters=[], **states)
        raises(recurrent, reverse=[False] * 3, parameters=parameters * 3, **states)
        raises(recurrent, parameters=parameters[:-1])
        for missing in (0, 1):
            some = [*parameters[:missing], None, *parameters[missing + 1 :]]
            raises(recurrent, parameters=some)
    _, args = calls_of_ops(CASES["lstm_projected"])[0]
    raises("lstm_projected", parameters=[*args[3][:4], None, *args[3][5:]])

    ops, x, weight = torch.ops.trifuse, normal(5, 8), normal(6, 8)
    packed = ops.pack_linear(weight)
    short = packed.clone()
    short.untyped_storage().resize_(packed.nbytes - 1)
    for call in (
        lambda: ops.linear(x, weight.double(), None),
        lambda: ops.linear(x, weight[:, :4], None),
        lambda: ops.linear(x, weight[0], None),
        lambda: ops.linear(x[0], weight, None),
        lambda: ops.linear(x, weight, normal(5)),
        lambda: ops.pack_linear(weight[0]),
        lambda: ops.linear_packed(x[0], packed, 6, None),
        lambda: ops.linear_packed(x, packed[:-1], 6, None),
        lambda: ops.linear_packed(x, short, 6, None),
    ):
        with pytest.raises((ValueError, TypeError), match=r"expected|not a weight"):
            call()


def what_ops_are_handed_is_checked() -> None:
    each_tensor_is_checked()
    arguments_that_do_not_fit_raise()


def test_what_ops_are_handed():
    in_process(what_ops_are_handed_is_checked)


@pytest.mark.parametrize("overload", ["cpp", "eager", "triton"])
def test_packed_sequences_have_no_other_batch(triton, overload):
    """The public functions never call an op with both."""
    op, args = calls_of_ops(CASES["varlen"])[0]
    op = getattr(torch.ops.trifuse.attention_forward, overload)
    names = [a.name for a in op._schema.arguments]
    lengths, pairs = list(args), list(args)
    lengths[names.index("key_lengths")] = torch.tensor([300])
    for name in ("query", "key", "value"):
        pairs[names.index(name)] = normal(2, 2, 300, 16)
    with pytest.raises(ValueError, match="key_lengths: expected None beside cu_seqlens_q"):
        op(*lengths)
    with pytest.raises(ValueError, match="query: expected batch size 1 beside cu_seqlens_q; got 2"):
        op(*pairs)


# Storage ------------------------------------------------------------------------------------------


def test_storage_shorter_than_the_tensor():
    in_process(short_storage_raises)


def short_storage_raises_in_eager() -> None:
    with trifuse.backend("eager"):
        short_storage_raises(*CASES)


def test_storage_shorter_than_the_tensor_in_eager():
    in_process(short_storage_raises_in_eager)


@pytest.mark.parametrize("name", CASES)
def test_storage_shorter_than_the_tensor_in_triton(triton, name):
    """Raises before anything is computed."""
    short_storage_raises(name)


# Real limits --------------------------------------------------------------------------------------


@contextlib.contextmanager
def room(mib: int) -> Iterator[None]:
    """Limits the growth of the process's address space to ``mib`` MiB."""
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


# Sizes --------------------------------------------------------------------------------------------


def absurd_calls_without_a_backward() -> dict[str, Callable[[], Any]]:
    ops, huge, one = torch.ops.trifuse, 1 << 40, torch.zeros(1)
    weight, packed = normal(8, 4), ops.pack_linear(normal(8, 4))
    rows, ids = one.expand(huge, 4), torch.zeros(1, dtype=torch.long).expand(1, huge)
    square = ops.pack_linear(normal(16, 16))

    def encoder_layer(
        x: Tensor | None = None,
        num_heads: int = 2,
        head_dim: int = 8,
        intermediate_size: int = 16,
        cache: Tensor | None = None,
    ) -> Tensor:
        sizes = (num_heads, num_heads, head_dim, intermediate_size)
        options = ((1e-5, 1e-5), *sizes, 0.4, 1.0, None, "gelu", *(False,) * 10, -1, -1)
        lists = [square] * 6, [None] * 6, [normal(16)] * 4
        past = 0 if cache is None else huge - 3
        out: Tensor = ops.encoder_layer(
            normal(1, 3, 16) if x is None else x,
            *(None, None, 0, *lists, *options, cache, cache, past),
        )
        return out

    encoder_layer()
    return {
        "linear_packed": lambda: ops.linear_packed(rows, packed, 8, None),
        "linear_packed, gated": lambda: ops.linear_packed(
            rows, packed, 8, None, "silu", packed, None
        ),
        "linear_packed, N": lambda: ops.linear_packed(normal(2, 4), packed, huge, None),
        "linear_packed, K": lambda: ops.linear_packed(one.expand(2, 1 << 57), packed, 8, None),
        "linear_unpacked": lambda: ops.linear_unpacked(rows, weight, None),
        "linear_unpacked, gated": lambda: ops.linear_unpacked(
            rows, weight, None, "silu", weight, None
        ),
        "pack_linear, N": lambda: ops.pack_linear(rows),
        "pack_linear, K": lambda: ops.pack_linear(one.expand(4, huge)),
        "pack_linears": lambda: ops.pack_linears([weight, rows]),
        "unpack_linear, N": lambda: ops.unpack_linear(packed, huge, 4, torch.float32),
        "unpack_linear, K": lambda: ops.unpack_linear(packed, 8, 1 << 57, torch.float32),
        "embedding_sum, L": lambda: ops.embedding_sum([ids], [weight]),
        "embedding_sum, B": lambda: ops.embedding_sum([ids.T], [weight]),
        "encoder_layer, L": lambda: encoder_layer(one.expand(1, huge, 16)),
        "encoder_layer, num_heads": lambda: encoder_layer(num_heads=huge),
        "encoder_layer, head_dim": lambda: encoder_layer(head_dim=1 << 61),
        "encoder_layer, intermediate_size": lambda: encoder_layer(intermediate_size=1 << 57),
        "encoder_layer, cache": lambda: encoder_layer(cache=one.expand(1, 2, huge, 8)),
    }


def absurd_sizes_raise(backend: str) -> None:
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
        "rnn, T": lambda: trifuse.rnn(one.expand(huge, 1, 4), None, *[weights[0][:4]] * 2),
        "rnn_cell, B": lambda: trifuse.rnn_cell(one.expand(huge, 4), None, *[weights[0][:4]] * 2),
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
    }
    if backend == "cpp":
        calls |= {
            "linear": lambda: torch.ops.trifuse.linear(one.expand(huge, 4), normal(4, 4), None),
            "linear, out": lambda: torch.ops.trifuse.linear(
                one.expand((1 << 48) - 1, 1), normal(1 << 13, 1), None
            ),
            "linear, K": lambda: torch.ops.trifuse.linear(
                one.expand(1, 1 << 57), one.expand(1, 1 << 57), None
            ),
            **absurd_calls_without_a_backward(),
        }
    for name, call in calls.items():
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        with trifuse.backend(backend), pytest.raises((RuntimeError, ValueError)) as raised:
            call()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert not re.search(r"bad_alloc|-\d{9}", str(raised.value)), name
        assert time.monotonic() - started < 30, name
        assert grown < 200 << 10, name


@pytest.mark.parametrize("backend", ["cpp", "eager", "triton"])
def test_sizes_that_no_memory_holds(backend):
    in_process(absurd_sizes_raise, backend)
