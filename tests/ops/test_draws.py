"""Dropout that depends on where a call's elements lie in the whole batch, not in the call."""

from __future__ import annotations

import contextlib

import placed_cases
import pytest
import torch
from placed_cases import HALF
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import trifuse
from trifuse.ops import _draws
from trifuse.ops._draws import Part, Share, place_of_box
from trifuse.ops.dropout import dropout
from trifuse.reference import philox
from trifuse.reference.philox import LONG_ROW, Place

CHECKS = [
    placed_cases.check_dropout,
    placed_cases.check_norm,
    placed_cases.check_attention,
    placed_cases.check_block_of_attention,
    placed_cases.check_lstm,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_part_drops_what_the_whole_drops(check, kernel):
    torch.manual_seed(0)
    check()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_in_triton(check, triton):
    torch.manual_seed(0)
    check()


def test_eight_elements_that_do_not_stay_together():
    """The formula draws for each by itself, whatever backend was to serve."""
    placed_cases.check_dropout(columns=5)


def test_packed_sequences_are_counted_as_sequences():
    q = torch.randn(9, 2, 8)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    torch.manual_seed(7)
    both = trifuse.varlen_attention(q, q, q, bounds, dropout_p=0.5)
    torch.manual_seed(7)
    with _draws.part(Part(HALF)):
        last = trifuse.varlen_attention(q[4:], q[4:], q[4:], bounds[1:] - 4, dropout_p=0.5)
    torch.testing.assert_close(last, both[4:])


# Places ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "firsts", "sizes"),
    [
        ((4, 6, 5), (1, 0, 0), (2, 6, 5)),
        ((4, 6, 5), (0, 2, 0), (4, 3, 5)),
        ((4, 6, 5), (1, 2, 0), (3, 1, 5)),
        ((4, 6, 5), (1, 0, 2), (3, 6, 2)),
        ((4, 6, 5), (1, 2, 0), (1, 3, 5)),
        ((4, 6, 5), (2, 3, 1), (1, 1, 3)),
        ((4, 6), (4, 0), (0, 6)),
        ((), (), ()),
    ],
    ids=str,
)
def test_places_of_boxes(whole, firsts, sizes):
    place = place_of_box(whole, firsts, sizes)
    box = tuple(slice(f, f + n) for f, n in zip(firsts, sizes, strict=True))
    numbers = torch.arange(torch.Size(whole).numel()).view(whole)[box].flatten()
    seed = _draws.with_place(torch.tensor([1]), place)
    assert torch.equal(philox.placed_units(seed, torch.arange(len(numbers))), numbers)


def test_boxes_that_have_no_place_raise():
    with pytest.raises(NotImplementedError, match=r"dimensions \[1, 2\]"):
        place_of_box((4, 6, 5), (0, 1, 1), (4, 2, 2))


def test_parts_of_wrong_lengths_raise():
    part = Part(Share(1, 3, 4))
    with _draws.part(part), pytest.raises(ValueError, match="part_of_batch"):
        dropout(torch.randn(4, 8))


def test_rows_without_a_sequence_raise():
    part = Part(sequence=HALF)
    with _draws.part(part), pytest.raises(NotImplementedError, match="sequence"):
        dropout(torch.randn(4, 8))
    with _draws.part(part), pytest.raises(NotImplementedError, match="recurrent"):
        trifuse.lstm(
            torch.randn(2, 2, 3),
            None,
            torch.randn(8, 3),
            torch.randn(8, 2),
            zoneout_h=0.5,
            training=True,
        )


def test_across_the_rows_of_a_long_line(every_kernel):
    """Runs of elements on both sides of a boundary of the generator's rows."""
    x = torch.randn(1000)
    place = Place(3 * LONG_ROW - 200, block=400, stride=LONG_ROW, fold=40, jump=64)
    seed = _draws.with_place(torch.tensor([5]), place)
    expected = torch.ops.trifuse.dropout.eager(x, seed, 0.5)
    units = philox.placed_units(seed, torch.arange(1000))
    for i in (0, 39, 40, 199, 200, 399, 400, 999):
        one = Place(int(units[i]))
        alone = torch.ops.trifuse.dropout.eager(x[i : i + 1], _draws.with_place(seed[:1], one), 0.5)
        assert torch.equal(expected[i : i + 1], alone)
    for kernel in every_kernel:
        with kernel.serving():
            assert torch.equal(
                getattr(torch.ops.trifuse.dropout, kernel.backend)(x, seed, 0.5), expected
            )


@pytest.mark.parametrize("numbers", [(1, 2), (1, 0, 0, 0, 0, 0, 0, 0), (1, 0, 1, 1, 1, 0, 0, 3)])
def test_wrong_numbers_raise(numbers):
    with pytest.raises(ValueError, match="seed"):
        torch.ops.trifuse.dropout.cpp(torch.randn(5), torch.tensor(numbers), 0.5)


def test_fake_tensors_do_not_stay():
    """Numbers of a place are kept between calls, but not those that a mode made."""
    place = Part(Share(3, 5, 77))
    _draws._numbers.cache_clear()
    with _draws.part(place):
        with FakeTensorMode():
            assert dropout(torch.ones(5, 24), 0.5).shape == (5, 24)
        assert type(dropout(torch.ones(5, 24), 0.5)) is torch.Tensor


# Programs ----------------------------------------------------------------------------------------


def test_places_compile(fresh_dynamo):
    x = torch.randn(4, 6, 16)

    def call(x):
        x = trifuse.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return trifuse.dropout_add_layer_norm(dropout(x, 0.5), x, dropout_p=0.5, training=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for part in (None, Part(HALF), Part(Share(0, 1, 2)), None):
        found = []
        for function in (call, compiled):
            torch.manual_seed(7)
            with contextlib.nullcontext() if part is None else _draws.part(part):
                found.append(function(x))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_repeat_their_places(reentrant):
    x = torch.randn(4, 6, 16, requires_grad=True)

    def call(x):
        return dropout(trifuse.scaled_dot_product_attention(x, x, x, dropout_p=0.5), 0.5)

    grads = []
    for kept in (True, False):
        torch.manual_seed(7)
        with _draws.part(Part(HALF)):
            out = call(x) if kept else checkpoint(call, x, use_reentrant=reentrant)
            out.square().sum().backward()
            grads.append(x.grad)
            x.grad = None
    torch.testing.assert_close(*grads)
