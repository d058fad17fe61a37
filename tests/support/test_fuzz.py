"""The fuzzer: some calls of every operator, and planted mistakes that it must find."""

from __future__ import annotations

import importlib
import multiprocessing.connection
from random import Random

import fuzz_workers
import pytest
import torch
from fuzz import __main__ as fuzzing
from fuzz import philox as their_philox
from fuzz import worker
from fuzz.call import Call, Failure, program
from fuzz.draws import Draws, shrink
from fuzz.rounding import Rounding, units_off
from fuzz.tensors import Layout, Values
from tested_kernels import CPP_KERNELS

import trifuse
from trifuse.reference import philox

needs_cpp = pytest.mark.skipif(not CPP_KERNELS, reason="the C++ extension is not built")


@pytest.mark.parametrize("operator", worker.OPERATORS)
@pytest.mark.parametrize("backend", ["cpp", "eager"])
def test_some_calls(operator, backend):
    if not worker.runs(operator, backend):
        pytest.skip("not one of its backends")
    if backend == "cpp" and not CPP_KERNELS:
        pytest.skip("the C++ extension is not built")
    with worker.prepared(operator, backend):
        for seed in range(40):
            call, _ = worker.draw(operator, backend, Random(seed))
            call.check()


def fuzz(monkeypatch, seed: int, calls: int) -> int:
    monkeypatch.setattr(fuzzing, "work", fuzz_workers.work)
    arguments = ["--operator", "dropout", "--backend", "cpp", "--workers", "1"]
    return fuzzing.main([*arguments, "--seed", str(seed), "--calls", str(calls)])


def test_nothing_found(monkeypatch, capsys):
    assert fuzz(monkeypatch, fuzz_workers.CRASHES - 3, 3) == 0
    assert "3 calls from seed 5, 0 failed" in capsys.readouterr().out


def test_a_crash_is_reported(monkeypatch, capsys):
    """A new worker makes the remaining calls."""
    assert fuzz(monkeypatch, fuzz_workers.CRASHES - 3, 4) == 1
    out = capsys.readouterr().out
    assert "dropout crashed with exit code -6" in out
    assert "make fuzz CALLS=1 SEED=8 OPERATOR=dropout BACKEND=cpp" in out
    assert "4 calls from seed 5, 1 failed" in out


def test_a_hang_is_reported(monkeypatch):
    monkeypatch.setattr(fuzzing, "work", fuzz_workers.work)
    worker = fuzzing._Worker("dropout", "cpp", 0.0)

    def found(seed: int) -> tuple[str, str] | None:
        worker.begin(seed)
        finished = False
        while not finished:
            multiprocessing.connection.wait([worker.reports], timeout=0.05)
            found, finished = worker.poll()
        return found

    try:
        assert found(1) is None
        hanging = worker.process
        monkeypatch.setattr(fuzzing, "HANGS_AFTER", 0.2)
        again = "make fuzz CALLS=1 SEED=9 OPERATOR=dropout BACKEND=cpp"
        assert found(fuzz_workers.HANGS) == ("dropout hangs", again)
        assert not hanging.is_alive()
        monkeypatch.undo()  # a new worker takes time to start
        assert found(2) is None
    finally:
        worker.end()


def test_generators_agree():
    """The fuzzer's generator and the reference's were written independently."""
    seed = their_philox.drawn_seed(3)
    plane, row, column = (
        x.flatten().numpy() for x in torch.meshgrid(*map(torch.arange, (3, 5, 21)), indexing="ij")
    )
    mine = their_philox.keep(seed, 0.3, plane, row, column)
    theirs = philox.dropout_keep(torch.tensor([seed]), torch.arange(3), 5, 21, 0.3)
    assert torch.equal(mine, theirs.flatten())


def _rows_past_the_first_too_large(result, given):
    if "residual" not in given or not isinstance(result, torch.Tensor) or result.dim() < 2:
        return result
    return torch.cat([result[:1], result[1:] * (1 + 1e-4)])


def _kept_elements_negated(result, given):
    return -result if given["x"].dim() == 2 and given["x"].dtype == torch.bfloat16 else result


@needs_cpp
@pytest.mark.parametrize(
    ("operator", "module", "wrong"),
    [
        ("dropout_add_layer_norm", trifuse, _rows_past_the_first_too_large),
        ("dropout", trifuse.ops.dropout, _kept_elements_negated),
    ],
)
def test_planted_mistakes_are_found_and_shrunk(operator, module, wrong, monkeypatch):
    right = getattr(module, operator)
    monkeypatch.setattr(module, operator, lambda **given: wrong(right(**given), given))
    with worker.prepared(operator, "cpp"):
        found = None
        for seed in range(300):
            call, made = worker.draw(operator, "cpp", Random(seed))
            try:
                call.check()
            except Failure as failure:
                found = failure.kind
                break
        assert found is not None
        shrunk = worker.shrunk(operator, "cpp", made, found, 20.0)
        with pytest.raises(Failure, match=found):
            shrunk.check()
    assert sum(torch.Size(v.shape).numel() for v in shrunk.tensors.values()) <= 40
    # Only the arguments that the mistake needs remain.
    needed = {"x", "residual"} if operator == "dropout_add_layer_norm" else {"x"}
    assert shrunk.tensors.keys() == needed
    assert shrunk.poison is None
    assert not shrunk.second


@pytest.mark.filterwarnings("ignore:Lower right causal bias")  # from torch
def test_a_failure_can_be_pasted():
    """The printed program makes the same call."""
    with worker.prepared("attention", "eager"):
        for seed in range(12):
            call, _ = worker.draw("attention", "eager", Random(seed))
            names: dict[str, object] = {"Values": Values, "Layout": Layout}
            exec(program(call), names)
            path, arguments = importlib.import_module("fuzz.attention").arguments(
                call, call.build()
            )
            if not call.samples:
                torch.manual_seed(call.seed)
                with trifuse.backend("eager"):
                    again = getattr(trifuse, path.removeprefix("trifuse."))(**arguments)
                torch.testing.assert_close(names["result"], again, rtol=0, atol=0, equal_nan=True)


def test_shrinking():
    def fails(made: list[int]) -> bool:
        d = Draws(made)
        numbers = [d.integer(0, 99) for _ in range(d.integer(0, 20))]
        return any(n > 41 for n in numbers)

    assert shrink([7, 3, 99, 50, 20, 64, 8, 8], fails) == [1, 42]


def test_units():
    """Numbers off by half a rounding pass; numbers wrong in the fifth digit fail."""
    r = Rounding(torch.float32, 40)
    x = torch.linspace(1, 2, 30)
    replicas = r(r(r.of(x)) ** 2)
    assert units_off(x * x, replicas, torch.float32).max() < 3
    assert units_off(x * x * (1 + 1e-5), replicas, torch.float32).min() > 20
    nan = torch.where(x > 1.5, torch.nan, x * x)
    assert units_off(nan, replicas, torch.float32).max() == torch.inf


def test_layouts_hold_the_same_numbers():
    x = torch.arange(24.0).view(2, 3, 4)
    apart, swapped = Layout(gaps=(1, 3, 2), offset=2), Layout((1, 2, 0), (2, 1, 1))
    for layout in (Layout(), Layout((2, 0, 1)), apart, swapped):
        assert torch.equal(layout.of(x), x), layout
    assert Layout(repeated=(1,)).of(x).stride(1) == 0
    for dim in range(3):
        apart = Layout((2, 0, 1), (1, 3, 2), 1, far=dim).of(x)
        assert torch.equal(apart, x)
        assert apart.stride(dim) * (x.shape[dim] - 1) > 2**31


@needs_cpp
def test_calls_name_what_they_need():
    call = Call("dropout", "eager", "float32", {"x": Values((2, 3))}, {"p": 0.5})
    assert repr(call).startswith("Call('dropout', kernel='eager'")
    assert eval(repr(call)) == call
