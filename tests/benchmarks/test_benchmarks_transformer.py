"""The Transformer comparison: both models train alike, and its counts are right."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from trifuse.benchmarks import text, transformer
from trifuse.benchmarks.ceilings import Rate
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.timing import Timing
from trifuse.models.transformer import (
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
)

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")


def tiny_puzzle(name: text.Puzzle) -> transformer.Task:
    task = transformer.puzzle(name)
    config = TransformerConfig(text.SYMBOLS + 20, 16, 2, 1, 1, 32, max_length=16)
    (held_out,) = task.held_out
    return dataclasses.replace(
        task,
        make=lambda dropout: Transformer(dataclasses.replace(config, dropout=dropout)),
        held_out=[tuple(x[:16] for x in held_out)],
    )


def tiny_language() -> transformer.Task:
    task = transformer.language(batch_size=2, length=32)
    config = LanguageModelConfig(text.BYTES, 16, 2, 1, 32, max_length=32)
    return dataclasses.replace(
        task,
        make=lambda dropout: LanguageModel(dataclasses.replace(config, dropout=dropout)),
        held_out=task.held_out[-2:],
    )


@pytest.mark.parametrize("task", [tiny_puzzle("sorting"), tiny_language()], ids=lambda x: x.name)
def test_both_learn_alike(task):
    eager, fused, exact = (
        transformer.train(task, 12, device="cpu", **how)
        for how in ({"fused": False}, {"fused": True}, {"fused": False, "dtype": torch.float64})
    )
    curves = transformer.Curves(task.name, eager, fused, exact)
    assert curves.furthest("fused", "exact") <= max(2 * curves.furthest("eager", "exact"), 1e-5)
    assert eager.losses[-1] < eager.losses[0]
    assert not eager.model.training
    assert {type(module).__module__ for module in fused.model.modules()} & {"trifuse.nn.attention"}


def test_the_seed_decides_everything():
    task = tiny_puzzle("reversal")
    runs = [
        transformer.train(task, 3, device="cpu", fused=False, seed=seed, dropout=dropout).losses
        for seed, dropout in ((0, 0.1), (0, 0.1), (1, 0.1), (0, 0.0))
    ]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert runs[0][0] != runs[3][0]


def test_held_out_loss_counts_rows_alike():
    task = tiny_language()
    torch.manual_seed(0)
    model = task.make(0.0).eval()
    (first,), (last,) = task.held_out
    assert len(first) > len(last)
    together = dataclasses.replace(task, held_out=[(torch.cat((first, last)),)])
    assert transformer.evaluate(task, model, "cpu") == pytest.approx(
        transformer.evaluate(together, model, "cpu"), rel=1e-6
    )


def test_standard_errors_are_welchs():
    eager, fused = [1.0, 1.2, 1.1, 1.3], [1.4, 1.2, 1.6]
    wanted = (statistics.mean(fused) - statistics.mean(eager)) / math.sqrt(
        statistics.variance(eager) / 4 + statistics.variance(fused) / 3
    )
    assert transformer.Seeds("", eager, fused).standard_errors == pytest.approx(wanted)


@pytest.mark.parametrize("case", transformer.CASES, ids=lambda case: case.name)
def test_tokens_and_operations_are_those_of_a_step(case):
    """Operations agree with torch's count of the linear layers, less the output projection."""
    model, batch = case.make(), case.batch()
    into_encoder, into_decoder = transformer.tokens(batch)
    if isinstance(model, LanguageModel):
        assert (into_encoder, into_decoder) == (0, 12 * 96)
    elif "pair" in case.name:
        share = 0.5 if "padding" in case.name else 1.0
        assert (into_encoder, into_decoder) == pytest.approx((share * 1024,) * 2, rel=0.02)
    else:
        source, _, target, _ = batch
        wanted = (source != text.PAD).sum(), (target[:, :-1] != text.PAD).sum()
        assert (into_encoder, into_decoder) == wanted
    if into_decoder != batch[-1][:, :-1].numel():
        return  # torch counts the padding too
    with FlopCounterMode(display=False) as counter:
        case.loss(model, batch).backward()
    products = sum(
        count
        for operator, count in counter.get_flop_counts()["Global"].items()
        if str(operator) in ("aten.mm", "aten.addmm")  # attention uses aten.bmm
    )
    vocabulary = 6 * into_decoder * model.output.weight.numel()
    assert transformer.operations(model, batch) == pytest.approx(products - vocabulary, rel=0.01)


def test_a_fused_model_that_differs_stops_the_run(monkeypatch):
    @torch.no_grad()
    def spoil(model, unpad):
        model.output.weight.mul_(2.0)

    monkeypatch.setattr(transformer.trifuse, "fuse", spoil)
    with pytest.raises(AssertionError, match="tiny: fused loss"):
        transformer.time_steps(tiny_case(("eager",)), "cpu", seconds=0.0)


def tiny_case(peers: tuple[str, ...], at_least: float | None = None) -> transformer.Case:
    task = tiny_language()
    return transformer.Case(
        "tiny",
        lambda: task.make(transformer.DROPOUT),
        lambda: task.draw(torch.Generator().manual_seed(0)),
        task.loss,
        peers,
        at_least,
    )


def test_tables_json_and_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transformer, "tasks", lambda: [tiny_puzzle("reversal"), tiny_language()])
    case = dataclasses.replace(tiny_case(("eager",), at_least=999.0), at_least_fraction=9.99)
    monkeypatch.setattr(transformer, "CASES", (case,))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    figures, picture = tmp_path / "a" / "figures.json", tmp_path / "b" / "picture.png"
    arguments = ["--quick", "--device", "cpu", "--json", str(figures), "--plot", str(picture)]
    assert transformer.main([*arguments, "--steps", "6"]) == 0

    printed = capsys.readouterr().out
    for words in (
        "without dropout, 6 steps from one seed",
        "with dropout 0.1, 2 seeds",
        "standard errors",
        "training step: tokens per second",
        "999× eager",
        "≥ 999%",
        "language model: held-out perplexity",
        "reversal: held-out sequences decoded without a mistake: stopped early eager",
        transformer.PROMPT,
    ):
        assert words in printed
    content = json.loads(figures.read_text())
    for curves, seeds in zip(content["curves"], content["seeds"], strict=True):
        assert curves["task"] == seeds["task"]
        assert {len(losses) for losses in curves["losses"].values()} == {6}
        assert curves["fused_from_eager"] < 1e-4
        assert len(seeds["eager"]) == len(seeds["fused"]) == 2
    reversal, language_model = (seeds["decoded"] for seeds in content["seeds"])
    assert language_model == {}
    assert len(reversal["eager"]) == len(reversal["fused"]) == 2
    perplexity = content["learnt"]["language model"]
    assert perplexity["eager"] == pytest.approx(perplexity["fused"], rel=1e-4)
    assert perplexity["eager"] == math.exp(content["curves"][1]["held_out"]["eager"])
    assert content["learnt"]["reversal"].keys() == {"eager", "fused"}
    (row,) = content["times"]
    assert row["work"] == 64
    assert row["at_least_fraction"] == 9.99
    assert row["met"] is False
    assert row["achieved"] == pytest.approx(64 / row["ours"]["median"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("only", ["training", "speed"])
def test_a_part_runs_alone(only, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transformer, "tasks", lambda: [tiny_puzzle("reversal")])
    monkeypatch.setattr(transformer, "CASES", (tiny_case(("eager",)),))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    picture = tmp_path / "picture.png"
    arguments = ["--quick", "--device", "cpu", "--only", only, "--plot", str(picture)]
    assert transformer.main([*arguments, "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert ("2 steps from one seed" in printed) == picture.exists() == (only == "training")
    assert ("training step: tokens per second" in printed) == (only == "speed")


class Oracle(Transformer):
    """Decodes a batch's sources to their answers; the first ``mistaken`` end in a wrong token."""

    def __init__(self, batch: transformer.Batch, mistaken: int) -> None:
        super().__init__(TransformerConfig(text.SYMBOLS + 20, 16, 2, 1, 1, 32, max_length=16))
        _, _, target, target_mask = batch
        self.answers = target[:, 1:].masked_fill(~target_mask[:, 1:], text.EOS)
        ends = target_mask.sum(1) - 2
        self.answers[torch.arange(mistaken), ends[:mistaken]] = text.SYMBOLS

    def step(self, tokens, state):
        place = state.past.length
        ones = torch.ones(len(tokens), 1, 1, 1)
        state.past.append(0, ones, ones)
        return torch.nn.functional.one_hot(self.answers[:, place, None], text.SYMBOLS + 20).float()


def test_a_sequence_counts_when_all_of_it_is_right():
    batch = text.pairs("sorting", 10, torch.Generator().manual_seed(0))
    for mistaken in (0, 3):
        model = Oracle(batch, mistaken).eval()
        assert transformer.decoded_right(model, batch) == 1 - mistaken / 10


def test_tables_fit_a_terminal():
    timing = Timing((1e-3,))
    ceiling = Rate(1.0, "")
    peers = {"eager": timing, "compiled": timing}
    results = [
        Result(
            case.name,
            "",
            "fp32, 2048 tokens",
            timing,
            peers,
            {},
            99_999.0,
            ceiling,
            at_least=1.8,
            at_least_fraction=0.8,
        )
        for case in transformer.CASES
    ]
    width = Console(width=200).measure(transformer.speed_table(results)).maximum
    assert width <= 100


def test_ratio_to_a_peer_is_taken_within_rounds():
    ours, peer = Timing((1.0, 2.0, 4.0)), Timing((3.0, 6.0, 1.0))
    ceiling = Rate(1.0, "")
    result = Result("", "", "", ours, {"eager": peer}, {}, 1.0, ceiling, "token")
    assert transformer.over(result, "eager") == 3.0


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seeds", "1"]])
def test_options_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        transformer.main(arguments)
    assert f"{arguments[0]}: expected at least" in capsys.readouterr().err
