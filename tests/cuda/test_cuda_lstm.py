"""The CUDA kernels of lstm: their numbers under the model of CUDA on the host, their code for two
GPUs, with that of the kernels that gru and rnn share.

Small calls fit one launch. On a device that can hold none of its blocks, they run step by step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from random import Random
from typing import Any

import placed_cases
import pytest
import test_lstm_autograd as of_autograd
import torch
from attention_cases import assert_equal
from cuda_code import Code, compile_operator
from cuda_schedules import CUDA, ONE_LAUNCH, SCHEDULES, STEP_BY_STEP, on_cuda
from fault_cases import exchanged_data_raises, short_storage_raises
from host_build import Library, library_fixture
from lstm_cases import (
    CLIPS,
    DRAWN,
    EVERYTHING,
    VARIANTS,
    Case,
    Results,
    assert_near,
    assert_same_bits,
    check_empty,
    differentiate,
    draw_case,
    laid_out,
    layer_after_layer,
    make,
    record_accuracy,
    run,
    specification,
    with_exact_products,
)
from numerics import Accuracy
from torch import Tensor

import trifuse
from trifuse.ops import lstm as ops
from trifuse.ops import lstm_stack
from trifuse.reference.lstm import SLOTS

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16)

WHOLE_ROWS = "layer norm needs whole rows"  # such calls never fit one launch
TOO_LONG = f"{WHOLE_ROWS}, too long for shared memory"
FITTING = tuple(variant for variant, of in VARIANTS.items() if not of.get("norm"))


library = library_fixture("lstm")


@pytest.fixture(autouse=True)
def _cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_cuda(request) if "library" in request.fixturenames else nullcontext():
        yield


def check(*calls: Case) -> None:
    accuracy = Accuracy(CUDA.name)
    for call in calls:
        record_accuracy({CUDA: accuracy}, call)


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_step_by_step(library, variant):
    with library.device(seed=1, **STEP_BY_STEP):
        check(make(**VARIANTS[variant]))


@pytest.mark.parametrize("variant", FITTING)
def test_one_launch(library, variant):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(make(dtype=dtype, **VARIANTS[variant]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64(library, variant):
    """The formulas to 12 digits, where no rounding hides a mistake."""
    case = make(dtype=torch.float64, **VARIANTS[variant])
    actual = run(case)
    for name, expected in specification(case).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        (ONE_LAUNCH, torch.float32),
        (ONE_LAUNCH, torch.bfloat16),
        (STEP_BY_STEP, torch.bfloat16),
        (STEP_BY_STEP, torch.float16),
    ],
    ids=["one launch-float32", "one launch-bfloat16", "steps-bfloat16", "steps-float16"],
)
def test_many_calls(library, schedule, dtype):
    """Any calls, each by itself and in the mean, drawn independently of each other."""
    accuracy, random = Accuracy(CUDA.name), Random(0)
    for _ in range(40):
        record_accuracy({CUDA: accuracy}, draw_case(random, dtype))
    accuracy.conclude()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("multiprocessors", "options"),
    [
        (4, {}),
        (3, {**EVERYTHING, **DRAWN, "norm": False, "projection": 21}),
        (4, {"projection": 13, "cell_clip": 0.8, "proj_clip": 0.5}),
        (36, {**EVERYTHING, **DRAWN, "norm": False, "projection": 13}),
        (1, {"projection": 70, "recompute": True}),
        (2, {"reverse": (True, False), "peephole": True}),
    ],
    ids=["plain", "everything", "projection", "eight groups", "one block", "a block each"],
)
def test_several_blocks_and_tiles(library, dtype, multiprocessors, options):
    """More rows than a tile, more columns than a warp takes; the last blocks own fewer or none."""
    B = 18
    lengths = [b % 4 for b in range(B)] if "lengths" in options else None
    case = make(3, B, 8, 37, dtype=dtype, **{**options, "lengths": lengths})
    assert fits(case)
    with library.device(seed=1, multiprocessors=multiprocessors):
        check(case)


@pytest.mark.parametrize(
    ("dtype", "multiprocessors", "H"),
    [
        (torch.float32, 8, 300),
        (torch.bfloat16, 8, 300),
        (torch.bfloat16, 20, 540),
        (torch.bfloat16, 40, 540),
    ],
)
def test_long_contractions(library, dtype, multiprocessors, H):
    """More chunks than warps and, in 16 bits, than registers hold, for few and many columns."""
    with library.device(seed=1, multiprocessors=multiprocessors, blocks_per_multiprocessor=1):
        check(make(1, 2, 8, H, dtype=dtype))


# Shared memory per block that holds the sums over a row, but no row of twenty units.
LONG_ROWS = {"shared_memory": 256}
OF_LONG_ROWS = [variant for variant, of in VARIANTS.items() if of.get("norm")]


@pytest.mark.parametrize("variant", OF_LONG_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.covering(1)
def test_rows_longer_than_shared_memory(library, variant, dtype):
    """The bits stay the same, because a row is computed the same way wherever it is kept."""
    case = make(**{"H": 20, **VARIANTS[variant]}, dtype=dtype)
    expected = run(case)
    with library.device(seed=1, **LONG_ROWS):
        assert why_step_by_step(case) == TOO_LONG
        assert_same_bits(run(case), expected)
        check(case)


def test_a_row_longer_than_a_gpu_s_shared_memory(library):
    """More than 227 KiB in float64, also in blocks that have rows of several steps."""
    case = make(2, 2, 3, 6000, norm=True, projection=4, dtype=torch.float64, lengths=(2, 1))
    assert why_step_by_step(case) == TOO_LONG
    actual = run(case)
    for name, expected in specification(case).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-9, atol=1e-9)


def test_rows_wider_than_a_block(library):
    check(make(2, 2, 8, 270, norm=True, peephole=True), make(2, 2, 8, 270, norm=True, coupled=True))
    with library.device(seed=1, **STEP_BY_STEP):
        check(make(2, 2, 8, 270, projection=260))


@pytest.mark.parametrize("what", ["plain", "everything"])
def test_both_ways_agree(library, what):
    """Within a few roundings, in every result."""
    case = make(4, 3, 5, 20, **{**VARIANTS[what], "norm": False, "lengths": None})
    together = run(case)
    with library.device(**STEP_BY_STEP):
        apart = run(case)
    for name in together:
        torch.testing.assert_close(together[name], apart[name], rtol=1e-4, atol=1e-5)


@pytest.fixture(params=[ONE_LAUNCH, STEP_BY_STEP], ids=["one launch", "steps"])
def served(library: Library, request: pytest.FixtureRequest) -> Iterator[None]:
    with library.device(seed=1, **request.param):
        yield


test_gradients_pass_where_c_is_at_its_clip = of_autograd.test_gradients_pass_where_c_is_at_its_clip
test_gradients_pass_where_a_projection_is_at_its_clip = (
    of_autograd.test_gradients_pass_where_a_projection_is_at_its_clip
)
test_clips_are_those_of_the_forward_in_16_bits = (
    of_autograd.test_clips_are_those_of_the_forward_in_16_bits
)


# One launch or step by step ----------------------------------------------------------------------


def why_step_by_step(case: Case, backward: bool = False) -> str:
    parameters = [t for p in case.parameters for t in p]
    coupled = case.op_options.coupled
    return torch.ops.trifuse.lstm_step_by_step.cuda(case.input, parameters, coupled, backward)


def fits(case: Case) -> bool:
    return not why_step_by_step(case) and not why_step_by_step(case, True)


def test_why_a_call_goes_step_by_step(library):
    case = make(2, 3, 8, 64, dtype=torch.bfloat16)
    assert fits(case)
    assert why_step_by_step(make(norm=True)) == WHOLE_ROWS
    assert why_step_by_step(make(dtype=torch.float64)) == "float64 has no kernel of its own"
    # 64 columns of 64 numbers of 4 bytes, and 8 partial sums of 16 rows of 64 columns.
    with library.device(shared_memory=47 << 10):
        assert why_step_by_step(make(2, 3, 8, 64)) == (
            "the recurrent weights take 48 KiB of shared memory of each of 4 multiprocessors, "
            "which have 47"
        )
        # In 16 bits, the weights are in registers.
        assert fits(case)
    with library.device(blocks_per_multiprocessor=0):
        assert why_step_by_step(case) == "4 blocks would have to be resident, and 0 can be"
    with library.device(multiprocessors=1):
        two = make(reverse=(False, True))
        assert why_step_by_step(two) == "the directions share one multiprocessor"


def test_explain_tells_which_way(library):
    x, weight_ih, weight_hh = torch.randn(2, 3, 8), torch.randn(256, 8), torch.randn(256, 64)
    call = (trifuse.lstm, x, None, weight_ih, weight_hh)
    at_once = "one launch for the whole sequence"
    assert trifuse.explain(*call).notes == (f"forward: {at_once}", f"backward: {at_once}")
    with library.device(blocks_per_multiprocessor=0):
        printed = str(trifuse.explain(*call))
        why = "step by step: 4 blocks would have to be resident, and 0 can be"
        assert printed == f"cuda\n  forward: {why}\n  backward: {why}"
    with trifuse.backend("eager"):
        assert trifuse.explain(*call).notes == ()


@pytest.mark.parametrize(
    ("H", "projection", "directions", "dtype", "one_launch"),
    [
        (1024, None, 1, torch.bfloat16, True),
        (1024, None, 2, torch.bfloat16, True),
        (1024, None, 1, torch.float32, True),
        (1024, None, 2, torch.float32, False),
        (1408, None, 2, torch.bfloat16, True),
        (2048, None, 1, torch.bfloat16, True),
        (2048, None, 2, torch.bfloat16, False),
        (4096, 512, 1, torch.bfloat16, True),  # ELMo's
    ],
)
def test_what_fits_an_h200(library, H, projection, directions, dtype, one_launch):
    def empty(*shape: int) -> Tensor:
        return torch.empty(1, dtype=dtype).expand(shape)

    R = projection or H
    parameters = [empty(4 * H, 1), empty(4 * H, R), None, None, empty(R, H) if projection else None]
    parameters += [None] * 5
    with library.device(multiprocessors=132, blocks_per_multiprocessor=1):
        for backward in (False, True):
            why = torch.ops.trifuse.lstm_step_by_step.cuda(
                empty(1, 1, 1), parameters * directions, False, backward
            )
            assert (why == "") == one_launch, why


def test_a_launch_that_fails_names_the_kernel_and_the_sizes(library):
    message = r"lstm_forward_step \(T 5, B 3, H 6, R 6, grid 3x1x1, block 256x1x1, shared 248 "
    with library.device(shared_memory=16), pytest.raises(RuntimeError, match=message):
        run(make())


# The same bits -----------------------------------------------------------------------------------


@SCHEDULES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_bits_do_not_depend_on_the_order_of_threads(library, schedule, dtype, norm):
    options = {**EVERYTHING, **DRAWN, "norm": norm, "lengths": (2, 3, 0)}
    case = make(3, 3, H=20, dtype=dtype, **options)
    with library.device(**schedule):
        expected = run(case)
    for seed in range(2, 4):
        with library.device(seed=seed, **schedule):
            assert_same_bits(run(case), expected)


OF_ROWS = ("output", "h_n", "c_n", "grad_h0", "grad_c0")


def test_a_row_does_not_depend_on_its_batch(library):
    """In one launch, which computes its own products. Padding does not change a row either."""
    lengths = [b % 5 for b in range(18)]
    case = make(4, 18, H=20, lengths=lengths, reverse=(False, True), peephole=True)
    case = with_exact_products(case)
    together = run(case)
    for b in (0, 3, 17):
        length, keep = int(case.lengths[b]), slice(b, b + 1)
        of_input = {n: getattr(case, n)[:length, keep] for n in ("input", "grad_output")}
        of_states = {n: getattr(case, n)[:, keep] for n in ("h0", "c0", "grad_h_n", "grad_c_n")}
        alone = run(dataclasses.replace(case, lengths=None, **of_input, **of_states))
        for name in OF_ROWS:
            part = together[name][:length, keep] if name == "output" else together[name][:, keep]
            assert_equal(part, alone[name], name)
        assert not together["output"][length:, b].any()
        assert not together["grad_input"][length:, b].any()


@SCHEDULES
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"norm": True}], ids=str)
def test_padding_does_not_exist(library, schedule, options):
    clean = make(4, 3, lengths=(2, 4, 0), reverse=(True,), peephole=True, **DRAWN, **options)
    padding = torch.arange(4)[:, None] >= clean.lengths
    spoilt = dataclasses.replace(
        clean,
        input=clean.input.masked_fill(padding[..., None], NAN),
        grad_output=clean.grad_output.masked_fill(padding[..., None], NAN),
    )
    assert_same_bits(run(spoilt), run(clean))


@SCHEDULES
def test_layouts_change_nothing(library, schedule):
    case = make(3, 3, reverse=(False, True), norm=schedule == STEP_BY_STEP, peephole=True)
    for layout in ("gaps", "swapped"):
        assert_same_bits(run(laid_out(case, lambda layout=layout: layout)), run(case))


# Layers side by side -----------------------------------------------------------------------------

# A call has 33 steps. A launch runs 13 steps of two layers, or 9 of three; the last launch runs the
# rest. A call with 9 steps runs layer after layer.
STACKS: dict[str, dict[str, Any]] = {
    "plain": {"layers": 2},
    "all that fits": {
        "layers": 2,
        "projection": 5,
        "peephole": True,
        "forget_bias": 1.0,
        "lengths": (33, 20, 0),
        **CLIPS,
    },
    "a wide projection": {"layers": 2, "projection": 8, "H": 5, "lengths": (7, 14, 1)},
    "three": {"layers": 3, "coupled": True, "biases": False, "states": False},
    "recompute": {"layers": 3, "recompute": True, "projection": 3, "lengths": (14, 13, 26)},
}
stacks = pytest.mark.parametrize("stack", STACKS)


def make_stack(T: int = 33, B: int = 3, **options: Any) -> Case:
    return make(T, B, **{"layers": 2, **options})


def layers_at_once(case: Case, backward: bool = False) -> tuple[int, str]:
    parameters = [t for p in case.parameters for t in p]
    return torch.ops.trifuse.lstm_layers_at_once.cuda(
        case.input, parameters, case.op_options.coupled, backward
    )


def run_apart(case: Case) -> Results:
    """Runs each layer by a call of its own."""

    def one(input: Any, h0: Any, c0: Any, p: Any) -> Any:
        options = {"recompute": case.recompute, **case.options}
        return ops.layer(input, h0, c0, [p], case.lengths, **options)

    def call(tensors: dict[str, Tensor]) -> Any:
        return layer_after_layer(*case.of(tensors), one)

    return differentiate(case, case.tensors, call)


def with_exact_products_of_layers(case: Case) -> Case:
    """Makes products exact: above layer 0, a gate reads at most one unit, and no two the same."""
    first, *above = with_exact_products(case).parameters
    generator = torch.Generator().manual_seed(0)

    def sparse(p: Any) -> Any:
        rows, columns = p.weight_ih.shape
        weight = torch.zeros_like(p.weight_ih)
        weight[torch.randperm(rows, generator=generator)[:columns], torch.arange(columns)] = 2
        return p._replace(weight_ih=weight)

    return dataclasses.replace(
        with_exact_products(case), parameters=(first, *(sparse(p) for p in above))
    )


@stacks
def test_stacks(library, stack):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = make_stack(dtype=dtype, **STACKS[stack])
        check(case)
        assert layers_at_once(case)[0] == layers_at_once(case, True)[0] == len(case.parameters)


@stacks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.covering(1)
def test_side_by_side_gives_the_bits_of_one_after_the_other(library, stack, dtype):
    """One after the other, each layer has as many multiprocessors as it has side by side."""
    options = {"lengths": [(5 * b) % 34 for b in range(18)], **STACKS[stack]}
    if options["lengths"] is not None and len(options["lengths"]) == 3:
        options["lengths"] = [*options["lengths"]] * 6
    case = with_exact_products_of_layers(make_stack(33, 18, **{"H": 12, **options}, dtype=dtype))
    L, steps = len(case.parameters), library.launches("lstm_forward_sequence")
    with library.device(seed=2, multiprocessors=3 * L):
        actual = run(case)
    assert library.launches("lstm_forward_sequence") - steps == {2: 4, 3: 6}[L]
    with library.device(seed=1, multiprocessors=3):
        assert_same_bits(actual, run_apart(case))


@pytest.mark.parametrize(
    ("layers", "device", "at_once", "why"),
    [
        (4, {"multiprocessors": 4}, 4, ""),
        (5, {"multiprocessors": 4}, 3, "at most 4 run at once"),
        (3, {"multiprocessors": 2}, 2, "the layers share one multiprocessor"),
        (2, {"multiprocessors": 1}, 1, "the layers share one multiprocessor"),
        (
            2,
            {"blocks_per_multiprocessor": 0},
            1,
            "4 blocks would have to be resident, and 0 can be",
        ),
    ],
)
def test_as_many_layers_at_once_as_fit(library, layers, device, at_once, why):
    case = make_stack(B=2, layers=layers, lengths=(33, 10))
    with library.device(seed=1, **device):
        assert layers_at_once(case) == layers_at_once(case, True) == (at_once, why)
        assert_near(run(case), specification(case))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"T": 9}, "fewer than 32 steps"),
        ({"norm": True}, WHOLE_ROWS),
        ({"dtype": torch.float64}, "float64 has no kernel of its own"),
    ],
)
def test_stacks_that_are_none(library, options, why):
    case = make_stack(B=2, **options)
    assert layers_at_once(case) == (1, why)
    assert_same_bits(run(case), run_apart(case))


@pytest.mark.parametrize(("T", "B"), [(0, 2), (33, 0), (0, 0)])
def test_empty_stacks(library, T, B):
    case = make_stack(T, B, projection=3, peephole=True)
    check_empty(case, run(case))


@stacks
def test_a_stack_does_not_depend_on_the_order_of_threads(library, stack):
    case = make_stack(dtype=torch.bfloat16, **STACKS[stack])
    expected = run(case)
    with library.device(seed=2):
        assert_same_bits(run(case), expected)


@pytest.mark.parametrize(
    ("H", "layers", "dtype", "at_once"),
    [
        (512, 4, torch.float32, (4, 4)),
        (1024, 2, torch.bfloat16, (2, 2)),
        (1024, 4, torch.bfloat16, (4, 4)),
        (1024, 2, torch.float32, (1, 1)),
        (2048, 2, torch.bfloat16, (1, 1)),
    ],
)
def test_how_many_layers_fit_an_h200(library, H, layers, dtype, at_once):
    def empty(*shape: int) -> Tensor:
        return torch.empty(1, dtype=dtype).expand(shape)

    parameters = [empty(4 * H, H), empty(4 * H, H), *[None] * 8] * layers
    with library.device(multiprocessors=132, blocks_per_multiprocessor=1):
        found = [
            torch.ops.trifuse.lstm_layers_at_once.cuda(empty(100, 1, H), parameters, False, back)
            for back in (False, True)
        ]
    assert tuple(count for count, _ in found) == at_once, found


# Modules ---------------------------------------------------------------------------------------


def results_of(module: trifuse.nn.LSTM, x: Tensor, **given: Any) -> list[Tensor]:
    torch.manual_seed(0)
    y, (h, c) = module(x, **given)
    grads = torch.autograd.grad([y.sin().sum(), h.sum(), c.sum()], [x, *module.parameters()])
    return [y, h, c, *grads]


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({}, 4),
        ({"batch_first": True, "proj_size": 3, "cell_clip": 0.8, "recompute": True}, 4),
        ({"num_layers": 1}, 1),
        ({"bidirectional": True}, 2),
        ({"dropout": 0.5}, 4),
        ({"zoneout_h": 0.3}, 2),
    ],
    ids=str,
)
def test_modules_run_their_layers_together(library, options, launches):
    torch.manual_seed(0)
    module = trifuse.nn.LSTM(4, 6, **{"num_layers": 2, **options})
    x = torch.randn(33, 33, 4)[:, :3] if not options.get("batch_first") else torch.randn(3, 33, 4)
    x.requires_grad_()
    module.train("dropout" not in options)
    lengths, before = torch.tensor([33, 9, 0]), library.launches("lstm_forward_sequence")
    actual = results_of(module, x, lengths=lengths)
    assert library.launches("lstm_forward_sequence") - before == launches
    with trifuse.backend("eager"):
        expected = results_of(module, x, lengths=lengths)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_explain_tells_how_many_layers_run_together(library):
    x = torch.randn(33, 3, 4)

    def notes(T: int = 33, **options: Any) -> tuple[str, ...]:
        module = trifuse.nn.LSTM(4, 6, **{"num_layers": 2, **options})
        given = trifuse.explain(module, x[:T]).notes
        return tuple(note.removeprefix("forward: ") for note in given if "backward" not in note)

    at_once = "one launch for the whole sequence"
    assert notes() == ("2 layers side by side",)
    assert notes(num_layers=5) == ("3 of 5 layers side by side: at most 4 run at once",)
    assert notes(T=9) == (f"layer after layer: fewer than 32 steps; each {at_once}",)
    assert notes(num_layers=1) == (at_once,)
    for options, why in (
        ({"bidirectional": True}, "layers have two directions"),
        ({"dropout": 0.5}, "there is dropout between layers"),
        ({"zoneout_c": 0.5}, "each layer draws random numbers from its own seed"),
    ):
        assert notes(**options) == (f"layer after layer: {why}", at_once)
    with trifuse.backend("eager"):
        assert notes() == ()


def test_a_stack_is_compiled_whole(library):
    module = trifuse.nn.LSTM(4, 6, 2)
    x = torch.randn(33, 2, 4, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results_of(compiled, x), results_of(module, x), rtol=0, atol=0)


def test_gradients_of_gradients_of_a_stack(library):
    case = make_stack(T=3, B=2, H=2, I=2, dtype=torch.float64, projection=2, lengths=(3, 1))
    tensors = {name: t.requires_grad_() for name, t in case.tensors.items()}

    def call(*values: Tensor) -> Any:
        return lstm_stack.stack(*case.of(dict(zip(tensors, values, strict=True))), case.lengths)

    torch.autograd.gradgradcheck(call, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize(
    "batched", [{"input": 1}, {"input": 0, "h0": 2}, {"weight_ih_l1": 0}], ids=str
)
def test_vmap_of_a_stack(library, batched):
    case = make_stack(B=2, lengths=(33, 12))
    names = list(case.tensors)
    dims = tuple(batched.get(name) for name in names)
    args = [
        t if dim is None else torch.stack([t, t.flip(0)], dim)
        for t, dim in zip(case.tensors.values(), dims, strict=True)
    ]

    def call(*values: Tensor) -> Any:
        return lstm_stack.stack(*case.of(dict(zip(names, values, strict=True))), case.lengths)

    def gradients(*values: Tensor) -> Any:
        return torch.func.grad(lambda x, *rest: call(x, *rest)[0].sin().sum())(*values)

    for function in (call, gradients):
        actual = torch.vmap(function, dims)(*args)
        for i in range(2):
            sample = [t if d is None else t.select(d, i) for t, d in zip(args, dims, strict=True)]
            expected = function(*sample)
            for a, e in (
                zip(actual, expected, strict=True) if function is call else [(actual, expected)]
            ):
                torch.testing.assert_close(a[i], e)


@pytest.mark.parametrize("save", [0, 1, 2])
@pytest.mark.parametrize("T", [2, 33])
@pytest.mark.covering(1)
def test_opcheck_of_a_stack(library, T, save):
    case = make_stack(T, 2, projection=3, **CLIPS)
    parameters = [t for p in case.parameters for t in p]
    args = (case.input, case.h0, case.c0, parameters, None, None)
    stacked = torch.ops.trifuse
    torch.library.opcheck(stacked.lstm_stack_forward.cuda, (*args, *case.op_options, save))
    if save == 0:
        return
    output, h_n, c_n, *kept = stacked.lstm_stack_forward.cuda(*args, *case.op_options, save)
    for half in (0, 1):
        wanted = [i % 2 == half for i in range(3 + len(parameters))]
        more = (output, h_n, c_n, *args, output, *kept, *case.op_options, wanted)
        torch.library.opcheck(stacked.lstm_stack_backward.cuda, more)


# The ops -----------------------------------------------------------------------------------------


def forward(case: Case, save: int, **changes: Any) -> tuple[Tensor, ...]:
    case = dataclasses.replace(case, **changes)
    parameters = [t for p in case.parameters for t in p]
    inputs = (case.input, case.h0, case.c0, parameters, case.lengths, case.seed)
    return torch.ops.trifuse.lstm_forward.cuda(*inputs, *case.op_options, save)


@SCHEDULES
def test_a_sequence_cut_in_two(library, schedule):
    whole = with_exact_products(make(5, 3, cell_clip=0.8, peephole=True))
    y1, h, c, *_ = forward(whole, 0, input=whole.input[:2])
    y2, *last = forward(whole, 0, input=whole.input[2:], h0=h, c0=c)
    y, *expected = forward(whole, 0)
    assert torch.equal(torch.cat([y1, y2]), y)
    assert all(torch.equal(a, b) for a, b in zip(last, expected, strict=True))


@SCHEDULES
def test_gradients_of_a_sequence_cut_in_two(library, schedule):
    """The gradient of h that is passed on in float32 comes back in float32."""
    with library.device(**schedule):
        found = of_autograd.cut_in_two(torch.bfloat16, wide=True)
    for cut, whole in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(cut, whole)


@SCHEDULES
def test_nothing_is_kept_without_need(library, schedule):
    case = make(peephole=True)
    results = [forward(case, save) for save in (0, 1, 2)]
    shapes = [(tuple(gates.shape), tuple(cells.shape)) for *_, gates, cells, _ in results]
    assert shapes == [((0,), (0,)), ((0,), (1, 5, 3, 6)), ((1, 5, 3, 24), (1, 5, 3, 6))]
    for *of_results, _, _, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_results, results[0], strict=False))


@pytest.mark.parametrize(("T", "B"), [(0, 2), (2, 0), (0, 0)])
def test_empty(library, T, B):
    case = make(T, B, reverse=(False, True), norm=True, projection=3, peephole=True, **DRAWN)
    check_empty(case, run(case))


@pytest.mark.parametrize("half", [0, 1])
def test_gradients_not_wanted_are_empty(library, half):
    case = make(2, 2, **EVERYTHING | {"lengths": None, "reverse": (True,)})
    parameters = [t for p in case.parameters for t in p]
    inputs = (case.input, case.h0, case.c0, parameters, None, None)
    output, _, _, *kept = forward(case, 2)

    def backward(wanted: tuple[bool, ...]) -> list[Tensor]:
        return torch.ops.trifuse.lstm_backward.cuda(
            case.grad_output,
            case.grad_h_n,
            case.grad_c_n,
            *inputs,
            output,
            *kept,
            *case.op_options,
            wanted,
        )

    wanted = tuple(i % 2 == half for i in range(3 + SLOTS))
    pairs = zip(backward(wanted), backward((True,) * (3 + SLOTS)), wanted, strict=True)
    for some, every, want in pairs:
        assert some.dtype == case.input.dtype
        assert torch.equal(some, every) if want else some.shape == (0,)


def test_lengths_out_of_range_are_refused(library):
    with pytest.raises(RuntimeError, match=r"lengths: expected lengths in \[0, 5\]"):
        forward(make(lengths=(3, 6, 0)), 0)


# Code for GPUs -----------------------------------------------------------------------------------


def test_shared_memory_of_single_steps_keeps_to_its_budget(library):
    """Five numbers per unit: of 256 units or, with layer norm, of a whole row if it fits."""
    with library.device(shared_memory=6 << 10, **STEP_BY_STEP):
        run(make(2, 1, 3, 300))
    for KiB, why in ((20, WHOLE_ROWS), (19, TOO_LONG)):
        with library.device(shared_memory=KiB << 10):
            assert why_step_by_step(make(2, 1, 3, 1000, norm=True)) == why


# Registers and stack bytes per thread. Except in float64, two blocks of backward_step_kernel share
# a multiprocessor. A block of the last two kernels has one to itself; in 16 bits, 64 of a thread's
# registers hold weights.
BUDGET = {
    "dropout_kernel": (40, 0),
    "forward_projection_kernel": (48, 0),
    "backward_projection_kernel": (48, 0),
    "forward_step_kernel": (96, 0),
    "backward_step_kernel": (178, 16),
    "forward_sequence_kernel": (232, 0),
    "backward_sequence_kernel": (250, 0),
}


@pytest.fixture(scope="module")
def compiled(request) -> list[Code]:
    return compile_operator("lstm", request.config)


def test_compiled_kernels_keep_to_their_budget(compiled):
    names = {code.kernel.partition("<")[0] for code in compiled}
    assert names == BUDGET.keys()
    for code in compiled:
        registers, stack = BUDGET[code.kernel.partition("<")[0]]
        assert code.registers <= registers, f"{code.kernel}: {code.registers} registers"
        assert code.stack <= stack, f"{code.kernel}: {code.stack} bytes of stack"


def test_products_run_on_the_matrix_unit(compiled):
    """Except in float32, whose factors the matrix unit would round."""
    for code in compiled:
        if "sequence" in code.kernel:
            assert ("HMMA" in code.sass) == ("<float>" not in code.kernel), code.kernel


def test_parts_of_products_are_written_8_bytes_at_a_time(compiled):
    """Half a warp writes to all banks of shared memory."""
    for code in compiled:
        if "sequence" in code.kernel:
            products = 2 if "LstmUnit" in code.kernel else 1  # with W_hh, and with W_hr
            assert code.count(r"STS\.64") >= 16 * products, code.kernel
            assert code.count(r"STS \[R") == 0, code.kernel


def test_exchanged_states_are_read_16_bytes_at_a_time(compiled):
    """From the L2 cache: a multiprocessor's own cache may be stale."""
    for code in compiled:
        if "sequence" in code.kernel:
            assert code.count(r"LDG\.E\.128\.STRONG\.GPU") >= 8, code.kernel


@pytest.mark.parametrize("schedule", [ONE_LAUNCH, STEP_BY_STEP], ids=["one launch", "steps"])
def test_a_part_drops_what_the_whole_drops(library, schedule):
    with library.device(seed=1, **schedule), library.guarded_memory():
        placed_cases.check_lstm()


@pytest.mark.parametrize("name", ["lstm", "lstm_projected"])
def test_data_exchanged_between_forward_and_backward(library, name):
    exchanged_data_raises(name)


@pytest.mark.parametrize("name", ["lstm", "lstm_projected"])
def test_storage_shorter_than_the_tensor(library, name):
    short_storage_raises(name, shrunk=True)
