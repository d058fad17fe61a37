"""The CUDA kernels of gru and rnn: their numbers under the model of CUDA on the host.

They share their code with lstm's, whose tests, in ``test_cuda_lstm``, cover the rest of it and the
code that is compiled. Small calls fit one launch. On a device that can hold none of its blocks,
they run step by step.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import test_gru as of_both
import test_rnn as of_rnn
import torch
from attention_cases import assert_equal
from cuda_code import compile_operator
from cuda_schedules import CUDA, ONE_LAUNCH, SCHEDULES, STEP_BY_STEP, on_cuda
from fault_cases import exchanged_data_raises, short_storage_raises
from gru_cases import (
    KINDS,
    VARIANTS,
    Case,
    draw_case,
    record_accuracy,
    run,
    specification,
)
from host_build import Library, library_fixture
from lstm_cases import assert_same_bits, lay_out_any
from numerics import Accuracy
from tested_kernels import Kernel
from torch import Tensor

import trifuse
from trifuse.ops._operator import SAVE_ALL, SAVE_NOTHING

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16)

kinds = pytest.mark.parametrize("kind", KINDS)
# A GRU whose reset gate comes first always runs step by step.
one_launch_kinds = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "reset first"]
)

library = library_fixture("gru")


@pytest.fixture(autouse=True)
def _cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_cuda(request):
        yield


def check(*calls: Case) -> None:
    accuracy = Accuracy(CUDA.name)
    for call in calls:
        record_accuracy({CUDA: accuracy}, call)


def flat(case: Case) -> list[Tensor | None]:
    """Returns the parameters of all directions."""
    return [t for p in case.arguments(case.tensors)[2] for t in p]


def why_step_by_step(case: Case, backward: bool = False) -> str:
    return why_tensors_go_step_by_step(case, case.tensors["input"], flat(case), backward)


def why_tensors_go_step_by_step(
    case: Case, input: Tensor, parameters: list[Tensor | None], backward: bool
) -> str:
    op = getattr(torch.ops.trifuse, f"{case.kind.operator}_step_by_step").cuda
    order = case.kind.keywords.get("linear_before_reset", True)
    return op(input, parameters, *([order] if case.kind.operator == "gru" else []), backward)


def fits(case: Case) -> bool:
    return not why_step_by_step(case) and not why_step_by_step(case, True)


# Numbers -----------------------------------------------------------------------------------------


@kinds
@SCHEDULES
@pytest.mark.parametrize("what", VARIANTS)
@pytest.mark.covering
def test_variants(library, what, schedule, kind):
    before = count_sequences(library, kind)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(Case(kind=kind, dtype=dtype, **VARIANTS[what]))
    launched = count_sequences(library, kind) - before
    assert launched == (6 if schedule == ONE_LAUNCH and kind != "reset first" else 0)


def count_sequences(library: Library, kind: str) -> int:
    """Returns how many whole sequences have been launched, forward and backward."""
    name = KINDS[kind].operator
    return sum(library.launches(f"{name}_{way}_sequence") for way in ("forward", "backward"))


@kinds
@pytest.mark.parametrize("what", VARIANTS)
def test_float64(what, kind):
    """The formulas to 12 digits, where no rounding hides a mistake."""
    case = Case(kind=kind, dtype=torch.float64, **VARIANTS[what])
    actual = run(case)
    for name, expected in specification(case).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-12, atol=1e-12)


@kinds
@SCHEDULES
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.covering(1)
def test_many_calls(schedule, dtype, kind):
    """Any calls, each by itself and in the mean, drawn independently of each other."""
    accuracy, random = Accuracy(CUDA.name), Random(0)
    for _ in range(30):
        record_accuracy({CUDA: accuracy}, draw_case(random, kind, dtype))
    accuracy.conclude()


@one_launch_kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("multiprocessors", "options"),
    [(4, {}), (3, {"reverse": (True,)}), (1, {}), (2, {"reverse": (True, False)})],
    ids=["four blocks", "three blocks", "one block", "a block each"],
)
@pytest.mark.covering(1)
def test_several_blocks_and_tiles(library, dtype, multiprocessors, options, kind):
    """More rows than a tile, more columns than a warp takes; the last blocks own fewer or none."""
    lengths = [b % 4 for b in range(18)] if "reverse" in options else None
    case = Case(3, 18, 8, 37, kind=kind, dtype=dtype, lengths=lengths, **options)
    with library.device(seed=1, multiprocessors=multiprocessors):
        assert fits(case)
        check(case)


@one_launch_kinds
@pytest.mark.parametrize(
    ("dtype", "multiprocessors", "H"),
    [(torch.float32, 8, 300), (torch.bfloat16, 8, 300), (torch.bfloat16, 20, 540)],
)
@pytest.mark.covering(1)
def test_long_contractions(library, dtype, multiprocessors, H, kind):
    """More chunks than warps and, in 16 bits, than registers hold."""
    with library.device(seed=1, multiprocessors=multiprocessors, blocks_per_multiprocessor=1):
        case = Case(1, 2, 8, H, kind=kind, dtype=dtype)
        assert fits(case)
        check(case)


@kinds
def test_more_units_than_a_block_has_threads(library, kind):
    with library.device(seed=1, **STEP_BY_STEP):
        check(Case(2, 2, 8, 270, kind=kind, lengths=(2, 1)))


@one_launch_kinds
def test_both_ways_agree(library, kind):
    """Within a few roundings, in every result."""
    case = Case(4, 3, 5, 20, kind=kind, **{**VARIANTS["two directions, lengths"], "lengths": None})
    together = run(case)
    with library.device(**STEP_BY_STEP):
        apart = run(case)
    for name in together:
        torch.testing.assert_close(together[name], apart[name], rtol=1e-4, atol=1e-5)


# One launch or step by step ----------------------------------------------------------------------


@one_launch_kinds
def test_why_a_call_goes_step_by_step(library, kind):
    case = Case(2, 3, 8, 64, kind=kind, dtype=torch.bfloat16)
    assert fits(case)
    assert why_step_by_step(Case(kind=kind, dtype=torch.float64)) == (
        "float64 has no kernel of its own"
    )
    with library.device(blocks_per_multiprocessor=0):
        assert why_step_by_step(case) == "4 blocks would have to be resident, and 0 can be"
    with library.device(multiprocessors=1):
        two = Case(kind=kind, reverse=(False, True))
        assert why_step_by_step(two) == "the directions share one multiprocessor"


@one_launch_kinds
def test_explain_tells_which_way(library, kind):
    case = Case(2, 3, 8, 64, kind=kind)
    x, h0, (p,) = case.arguments(case.tensors)
    call = (getattr(trifuse, case.kind.operator), x, h0[0], *p)
    one_step = (getattr(trifuse, f"{case.kind.operator}_cell"), x[0], h0[0], *p)
    at_once = "one launch for the whole sequence"
    for given in (call, one_step):
        explained = trifuse.explain(*given, **case.kind.keywords)
        assert explained.backend == "cuda"
        assert explained.notes == (f"forward: {at_once}", f"backward: {at_once}")
    with library.device(blocks_per_multiprocessor=0):
        why = "step by step: 4 blocks would have to be resident, and 0 can be"
        assert trifuse.explain(*call, **case.kind.keywords).notes[0] == f"forward: {why}"
    with trifuse.backend("eager"):
        assert trifuse.explain(*call, **case.kind.keywords).notes == ()


def test_a_reset_gate_that_comes_first_needs_two_products():
    why = "a step has two products if the reset gate comes first"
    case = Case(kind="reset first")
    assert why_step_by_step(case) == why_step_by_step(case, backward=True) == why
    x, h0, (p,) = case.arguments(case.tensors)
    explained = trifuse.explain(trifuse.gru, x, h0[0], *p, linear_before_reset=False)
    assert explained.notes == (f"forward: step by step: {why}", f"backward: step by step: {why}")


@pytest.mark.parametrize(
    ("kind", "H", "directions", "dtype", "one_launch"),
    [
        ("gru", 2304, 1, torch.bfloat16, True),
        ("gru", 1536, 2, torch.bfloat16, True),
        ("gru", 2048, 2, torch.bfloat16, False),
        ("gru", 1408, 1, torch.float32, True),
        ("tanh", 4224, 1, torch.bfloat16, True),
        ("tanh", 2816, 2, torch.bfloat16, True),
        ("tanh", 3072, 2, torch.bfloat16, False),
        ("tanh", 2560, 1, torch.float32, True),
    ],
)
def test_what_fits_an_h200(library, kind, H, directions, dtype, one_launch):
    def empty(*shape: int) -> Tensor:
        return torch.empty(1, dtype=dtype).expand(shape)

    case = Case(1, 1, 1, 1, kind=kind)
    G = case.kind.gates
    parameters = [empty(G * H, 1), empty(G * H, H), None, None] * directions
    with library.device(multiprocessors=132, blocks_per_multiprocessor=1):
        for backward in (False, True):
            why = why_tensors_go_step_by_step(case, empty(1, 1, 1), parameters, backward)
            assert (why == "") == one_launch, why


# The same bits -----------------------------------------------------------------------------------


@kinds
@SCHEDULES
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_order_of_threads(library, schedule, dtype, kind):
    case = Case(3, 3, H=20, kind=kind, dtype=dtype, reverse=(False, True), lengths=(2, 3, 0))
    expected = run(case)
    for seed in range(2, 4):
        with library.device(seed=seed, **schedule):
            assert_same_bits(run(case), expected)


def with_exact_products(case: Case) -> Case:
    """Makes the input's products exact, which torch computes for all tokens at once."""
    for name, t in case.tensors.items():
        if name == "input" or name.startswith("weight_ih"):
            case.tensors[name] = (t * 16).round() / 16
    return case


@one_launch_kinds
def test_a_row_does_not_depend_on_its_batch(kind):
    """In one launch, which computes its own products. Padding does not change a row either."""
    lengths = [b % 5 for b in range(18)]
    case = Case(4, 18, H=20, kind=kind, lengths=lengths, reverse=(False, True))
    case = with_exact_products(case)
    together = run(case)
    for b in (0, 3, 17):
        length, alone = lengths[b], case.rows(slice(b, b + 1)).steps(slice(lengths[b]))
        alone.lengths = None
        expected = run(alone)
        assert_equal(together["output"][:length, b : b + 1], expected["output"])
        for name in ("h_n", "grad_h0"):
            assert_equal(together[name][:, b : b + 1], expected[name], name)
        assert not together["output"][length:, b].any()
        assert not together["grad_input"][length:, b].any()


@kinds
@SCHEDULES
def test_padding_does_not_exist(schedule, kind):
    case, poisoned = (
        Case(4, 3, kind=kind, lengths=(2, 4, 0), reverse=(False, True)) for _ in range(2)
    )
    past = torch.arange(4)[:, None, None] >= case.lengths[:, None]
    poisoned.tensors["input"] = case.tensors["input"].masked_fill(past, NAN)
    poisoned.upstream[0] = case.upstream[0].masked_fill(past, NAN)
    assert_same_bits(run(poisoned), run(case))


@kinds
@SCHEDULES
@pytest.mark.parametrize("layout", ["gaps", "offset", "swapped"])
def test_layouts_change_nothing(schedule, layout, kind):
    case, laid = (Case(kind=kind, **VARIANTS["two directions, lengths"]) for _ in range(2))
    laid.tensors = {n: lay_out_any(t, layout) for n, t in case.tensors.items()}
    laid.upstream = [lay_out_any(g, layout) for g in case.upstream]
    assert_same_bits(run(laid), run(case))


@kinds
@SCHEDULES
def test_a_sequence_cut_in_two(schedule, kind):
    case = with_exact_products(Case(5, 3, kind=kind))
    whole = run(case)
    for T1 in (0, 2, 5):
        first, then = run(case.steps(slice(T1))), case.steps(slice(T1, None))
        then.tensors["h0"] = first["h_n"]
        second = run(then)
        assert_equal(torch.cat([first["output"], second["output"]]), whole["output"])
        assert_equal(second["h_n"], whole["h_n"])


# The ops -----------------------------------------------------------------------------------------


def save_all(case: Case) -> list[int]:
    """Returns the forward op's last argument, which only a GRU's has."""
    return [SAVE_ALL] if case.kind.operator == "gru" else []


def of_ops(case: Case) -> tuple[Any, Any, list[Any], list[Any]]:
    """Returns the forward op, the backward op, their tensors and their options."""
    ops, name = torch.ops.trifuse, case.kind.operator
    forward, backward = (getattr(ops, f"{name}_{way}").cuda for way in ("forward", "backward"))
    input, h0, _ = case.arguments(case.tensors)
    tensors = [input, h0, flat(case), case.lengths]
    return forward, backward, tensors, list(case.kind.options(case.reverse))


@pytest.mark.parametrize(("kind", "saved"), [("gru", 4), ("reset first", 3)])
def test_a_gru_keeps_gates_only_if_asked(kind, saved):
    case = Case(kind=kind, dtype=torch.bfloat16)
    forward, _, tensors, options = of_ops(case)
    *with_gates, gates = forward(*tensors, *options, SAVE_ALL)
    *without, none = forward(*tensors, *options, SAVE_NOTHING)
    assert (gates.shape, none.shape) == ((1, 5, 3, 6 * saved), (0,))
    assert all(torch.equal(a, b) for a, b in zip(with_gates, without, strict=True))


@kinds
@pytest.mark.parametrize("half", [0, 1])
def test_gradients_not_wanted_are_empty(half, kind):
    case = Case(2, 2, kind=kind, reverse=(True, False))
    forward, backward, tensors, options = of_ops(case)
    output, _, *gates = forward(*tensors, *options, *save_all(case))
    wanted = [i % 2 == half for i in range(2 + len(tensors[2]))]

    def gradients(wanted: list[bool]) -> list[Tensor]:
        return backward(*case.upstream, *tensors, output, *gates, *options, wanted)

    for some, every, want in zip(
        gradients(wanted), gradients([True] * len(wanted)), wanted, strict=True
    ):
        assert some.dtype == case.tensors["input"].dtype
        assert torch.equal(some, every) if want else some.shape == (0,)


@kinds
def test_tensors_that_do_not_fit_are_refused(kind):
    """A tensor may be exchanged between the forward and the backward."""
    case = Case(kind=kind)
    forward, backward, tensors, options = of_ops(case)
    output, _, *gates = forward(*tensors, *options, *save_all(case))
    input, h0, parameters, lengths = tensors
    wanted = [True] * (2 + len(parameters))

    def refuses(match: str, tensors: list[Any], output: Tensor, gates: list[Tensor]) -> None:
        with pytest.raises(ValueError, match=match):
            backward(*case.upstream, *tensors, output, *gates, *options, wanted)

    refuses("^input: ", [input[:3], h0, parameters, lengths], output, gates)
    refuses("^hx: ", [input, h0[:, :2], parameters, lengths], output, gates)
    refuses("^weight_hh: ", [input, h0, [*parameters[:1], *parameters[:3]], lengths], output, gates)
    refuses("^bias_ih: ", [input, h0, [*parameters[:2], input[0, 0], None], None], output, gates)
    refuses("^weight_hh: ", tensors, output[..., :5], gates)
    if case.kind.operator == "gru":
        refuses("^gates: ", tensors, output, [input.new_empty(0)])
        refuses("^gates: ", tensors, output, [gates[0][..., :12]])


@kinds
def test_lengths_out_of_range_are_refused(kind):
    with pytest.raises(RuntimeError, match=r"lengths: expected lengths in \[0, 5\]"):
        run(Case(kind=kind, lengths=(3, 6, 0)))


# As on other backends ----------------------------------------------------------------------------


@pytest.fixture
def kernel() -> Kernel:
    return CUDA


@pytest.fixture
def backend() -> str:
    return "cuda"


@pytest.fixture
def served() -> str:
    return "cuda"


test_saturation = of_both.test_saturation
test_the_public_functions = of_both.test_the_public_functions
test_no_steps_and_no_rows = of_both.test_no_steps_and_no_rows
test_gradcheck = of_both.test_gradcheck
test_opcheck = of_both.test_opcheck
test_vmap = of_both.test_vmap
test_compile = of_both.test_compile
test_forward_mode = of_both.test_forward_mode
test_autocast = of_both.test_autocast
test_saved_tensors = of_both.test_saved_tensors
test_numbers_that_are_not_finite_spread_as_in_torch = (
    of_rnn.test_numbers_that_are_not_finite_spread_as_in_torch
)
test_the_derivative_of_relu_at_0_is_0 = of_rnn.test_the_derivative_of_relu_at_0_is_0
test_relu_grows_without_bound = of_rnn.test_relu_grows_without_bound


# Code for GPUs -----------------------------------------------------------------------------------

# Registers and stack bytes per thread, of single steps; test_cuda_lstm has those of sequences.
BUDGET = {
    "forward_step_kernel": (48, 0),
    "backward_step_kernel": (40, 0),
    "forward_reset_kernel": (40, 0),
    "forward_reset_first_kernel": (34, 0),
    "backward_reset_first_kernel": (32, 0),
    "backward_reset_kernel": (32, 0),
}


def test_compiled_kernels_keep_to_their_budget(request):
    compiled = compile_operator("gru", request.config)
    assert {code.kernel.partition("<")[0] for code in compiled} == BUDGET.keys()
    for code in compiled:
        registers, stack = BUDGET[code.kernel.partition("<")[0]]
        assert code.registers <= registers, f"{code.kernel}: {code.registers} registers"
        assert code.stack <= stack, f"{code.kernel}: {code.stack} bytes of stack"
        if "GruUnit" in code.kernel:  # a unit's four gates are one access
            bits = 128 if "<float>" in code.kernel or "<double>" in code.kernel else 64
            way = "STG" if code.kernel.startswith("forward") else "LDG"
            assert code.count(rf"{way}\.E\.{bits}\S*") >= 1, code.kernel


@pytest.mark.parametrize("name", ["gru", "gru, reset first", "rnn"])
def test_data_exchanged_between_forward_and_backward(name):
    exchanged_data_raises(name)


@pytest.mark.parametrize("name", ["gru", "gru, reset first", "rnn"])
def test_storage_shorter_than_the_tensor(name):
    short_storage_raises(name, shrunk=True)
