"""The benchmark of training by several processes."""

from __future__ import annotations

import json
import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")
if not torch.distributed.is_available():
    pytest.skip("torch has no distributed", allow_module_level=True)

from trifuse.benchmarks import distributed, memory
from trifuse.benchmarks.timing import Timing


@pytest.mark.parametrize("chosen", [["DDP"], ["FSDP2"], ["TP"], ["CP ring"]])
def test_bytes_and_times(chosen, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert (
        distributed.main(["--quick", "--rounds", "2", "--cases", *chosen, "--json", str(path)]) == 0
    )
    printed = capsys.readouterr().out
    assert chosen[0] in printed
    records = json.loads(path.read_text())["times"]
    assert [r["processes"] for r in records] == [1, 2, 4] * (len(records) // 3)
    for r in records:
        for name in distributed.NAMES:
            figures = r[name]
            assert figures["memory"] > 0
            assert (figures["tokens_per_second"] is None) == (r["processes"] == 4)
            for of_two in ("of_linear", "added", "waiting"):
                assert (figures[of_two] is None) == (r["processes"] != 2)
        # Barriers and the framing of messages add a little to what is sent.
        sent, least = r["ours"]["sent"], r["least_sent"]
        if r["processes"] == 1:
            assert least == 0
            assert sent < 10_000
        else:
            # In tiny BERTs of two layers, and in a ring of keys, values and their gradients.
            kinds = {
                "DDP": {"broadcast": 1, "reduce": 1},  # the former of buffers
                "FSDP2": {"gather": 5, "reduce_scatter": 3},
                "TP": {"reduce": 12},
                "CP ring": {"send": 6 * (r["processes"] - 1)},
            }
            found = r["ours"]["collectives"]
            assert {kind: each["calls"] for kind, each in found.items()} == kinds[chosen[0]]
            assert sum(each["bytes"] for each in found.values()) > 0
            assert 0.95 * least < sent < 2 * least + 50_000


def test_sent_bytes_are_those_of_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = distributed.sent_bytes()
        with socket.create_connection(server.getsockname()) as ours, server.accept()[0] as theirs:
            ours.sendall(b"x" * 50_000)
            received = 0
            while received < 50_000:
                received += len(theirs.recv(1 << 16))
            assert 50_000 <= distributed.sent_bytes() - before < 51_000


def test_figures_of_an_outcome():
    times = {
        "alone": Timing((2.0, 4.0)),
        "together": Timing((1.5, 3.0)),
        "computed": Timing((1.0, 2.5)),
    }
    outcome = distributed.Outcome(
        "DDP",
        "shape",
        2,
        30,
        dict.fromkeys(distributed.NAMES, 5),
        4.0,
        dict.fromkeys(distributed.NAMES, 6),
        {name: {} for name in distributed.NAMES},
        **{name: dict.fromkeys(distributed.NAMES, t) for name, t in times.items()},
    )
    assert outcome.of_linear("ours") == pytest.approx((1 + 0.8) / 2)
    assert outcome.added("ours") == pytest.approx((0.0 + 0.5) / 2)
    assert outcome.waiting("ours") == pytest.approx(0.5)
    assert outcome.tokens_per_second("ours") == pytest.approx(30 / 2.25)
    assert outcome.met


def _hold(sizes: list[int]) -> int:
    return memory.peak_here(lambda: [torch.zeros(n) for n in sizes])


def test_peak_here():
    """In a process of its own, whose pages no earlier test has left."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        peak = pool.submit(_hold, [1 << 22, 1 << 22]).result()
    assert 2**25 <= peak < 2**25 + 2**22


def test_unknown_cases_are_refused(capsys):
    with pytest.raises(SystemExit):
        distributed.main(["--cases", "bogus"])
    assert "DDP" in capsys.readouterr().err
