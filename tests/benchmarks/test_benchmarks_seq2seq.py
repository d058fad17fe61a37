"""The seq2seq comparison: unambiguous data, equal training of both models, right counts."""

from __future__ import annotations

import dataclasses
import datetime
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trifuse.benchmarks import seq2seq, transformer
from trifuse.benchmarks.text import BOS, EOS, PAD

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")

TINY = {"embedding_dim": 8, "hidden_size": 16}


def test_formats_are_as_people_write():
    day = datetime.date(1998, 3, 3)
    written = [seq2seq.write(day, form) for form in seq2seq.FORMATS]
    assert len(set(written)) == len(seq2seq.FORMATS)
    for text in (
        "3 March 1998",
        "March 3rd, 1998",
        "Tuesday, the third of March, 1998",
        "Tue, 03 Mar 98",
        "Mar 3 '98",
        "3. III. 1998",
        "03.03.1998",
        "3/3/98",
        "19980303",
    ):
        assert any(text in line for line in written), text
    suffixes = {number: seq2seq.write(day.replace(day=number), "{nth}") for number in range(1, 32)}
    special = {1: "1st", 2: "2nd", 3: "3rd", 21: "21st", 22: "22nd", 23: "23rd", 31: "31st"}
    assert suffixes == {number: f"{number}th" for number in range(1, 32)} | special


def test_every_date_reads_one_way_only():
    """No two days, close together or far apart, share a text in any of the formats."""
    read: dict[str, datetime.date] = {}
    for among in seq2seq.days():
        for day in among[::37]:
            for form in seq2seq.FORMATS:
                text = seq2seq.write(day, form)
                assert read.setdefault(text, day) == day
                assert set(text) <= set(seq2seq.SOURCE_CHARACTERS)
                assert set(day.isoformat()) <= set(seq2seq.TARGET_CHARACTERS)
    for day in (datetime.date(2004, 5, 6), datetime.date(2004, 6, 5), datetime.date(2005, 4, 6)):
        for form in seq2seq.FORMATS:
            text = seq2seq.write(day, form)
            assert read.setdefault(text, day) == day


def test_held_out_days_are_never_trained_on():
    training, held_out = seq2seq.days()
    assert not set(training) & set(held_out)
    assert len(training) + len(held_out) == 36525
    assert len(held_out) == 3652
    years = {day.year for day in held_out}
    assert years == set(range(1969, 2069))


def test_batches_hold_dates_and_their_answers():
    training, _ = seq2seq.days()
    batch = seq2seq.draw(training, 300, torch.Generator().manual_seed(0))
    for row in range(300):
        source = batch.source[row][batch.source_mask[row]].tolist()
        target = batch.target[row].tolist()
        assert source[-1] == target[-1] == EOS
        assert target[0] == BOS
        assert len(target) == len("1998-03-03") + 2  # and the tokens that begin and end it
        answer = seq2seq._decode(target[1:], seq2seq.TARGET_CHARACTERS)
        day = datetime.date.fromisoformat(answer)
        forms = [seq2seq.write(day, form) for form in seq2seq.FORMATS]
        assert seq2seq._decode(source, seq2seq.SOURCE_CHARACTERS) in forms
        assert (batch.source[row][~batch.source_mask[row]] == PAD).all()
    assert batch.target_mask.all()
    assert seq2seq._decode([BOS, 4, EOS, 5], seq2seq.TARGET_CHARACTERS) == "?1"


def test_copies_are_their_sources():
    batch = seq2seq.draw_copies(300, torch.Generator().manual_seed(0))
    texts = []
    for source, target in zip(batch.source.tolist(), batch.target.tolist(), strict=True):
        texts.append(seq2seq._decode(source, seq2seq.SOURCE_CHARACTERS))
        assert seq2seq._decode(target[1:], seq2seq.TARGET_CHARACTERS) == texts[-1]
        assert texts[-1].isdigit()
    lengths = [len(text) for text in texts]
    assert set(lengths) == set(range(1, seq2seq.LONGEST + 1))
    answers = batch.target[:, 1:].masked_fill(~batch.target_mask[:, 1:], EOS)
    assert seq2seq.right(answers, batch) == 1.0
    shares = seq2seq.right_by_length(answers, batch)
    assert shares == dict.fromkeys(["1 to 6", "7 to 12", "13 to 18", "19 to 24"], 1.0)
    answers[[length > 18 for length in lengths], 0] += 1
    assert seq2seq.right_by_length(answers, batch) == shares | {"19 to 24": 0.0}


def test_an_answer_is_right_as_a_whole():
    _, held_out = seq2seq.days()
    batch = seq2seq.draw(held_out, 8, torch.Generator().manual_seed(0))
    answers = batch.target[:, 1:].clone()
    assert seq2seq.right(answers, batch) == 1.0
    answers[0, 3] += 1
    answers[5, -1] = PAD
    assert seq2seq.right(answers, batch) == 0.75


def test_tasks_compare_a_fixed_state_with_attention_in_each_cell():
    """Bahdanau's models have the paper's cell."""
    configs = {task.name: task.make(0.0).config for task in seq2seq.tasks()}
    copies = {config.cell: set() for config in configs.values()}
    for name, config in configs.items():
        if name.startswith(seq2seq.COPYING):
            copies[config.cell].add(config.attention == "none")
        if "bahdanau" in name:
            assert config.cell == "gru"
            assert config.attends_first
    assert copies == {cell: {True, False} for cell in ("rnn", "gru", "lstm")}


def tiny_task(attention: str = "additive") -> transformer.Task:
    task = seq2seq.task(attention, held_out=16, **TINY)
    training, _ = seq2seq.days()
    return dataclasses.replace(task, draw=lambda generator: seq2seq.draw(training, 8, generator))


@pytest.mark.parametrize("attention", ["additive", "scaled_dot"])
def test_both_learn_alike(attention):
    eager, fused, exact = (
        transformer.train(tiny_task(attention), 12, device="cpu", **how)
        for how in ({"fused": False}, {"fused": True}, {"fused": False, "dtype": torch.float64})
    )
    curves = transformer.Curves("", eager, fused, exact)
    assert curves.furthest("fused", "exact") <= max(2 * curves.furthest("eager", "exact"), 1e-5)
    assert eager.losses[-1] < eager.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["additive", "dot"])
@pytest.mark.covering(0)
def test_dates_are_learnt(attention):
    task = seq2seq.task(attention)
    trained = transformer.train(task, 200, device="cpu", fused=True)
    answers = seq2seq.Answers.of(trained.model, task.held_out[0])
    assert seq2seq.right(answers.greedy, task.held_out[0]) >= 0.95
    assert seq2seq.right(answers.beam, task.held_out[0]) >= 0.95


def test_tables_show_the_spread_over_seeds():
    task = tiny_task()
    trained = transformer.train(task, 1, device="cpu", fused=True)
    curves = transformer.Curves(task.name, trained, trained, trained)
    (held_out,) = task.held_out
    answer = held_out[2][:, 1:]
    whole = seq2seq.Answers(answer, answer)
    half = seq2seq.Answers(answer * (torch.arange(len(answer)) % 2)[:, None], answer)
    table = seq2seq.accuracy_table([seq2seq.Learnt(curves, held_out, whole, whole, [half])])
    assert [next(iter(column.cells)) for column in table.columns] == [
        *("additive", "100.0%", "100.0%", "75.0% ± 35.4%", "100.0% ± 0.0%", "100.0%")
    ]


def tiny_case() -> transformer.Case:
    return seq2seq.case("tiny", seq2seq.config("additive", dropout=0.1, **TINY), 4, 8)


@pytest.mark.parametrize("case", seq2seq.cases(), ids=lambda case: case.name)
def test_operations_are_those_of_a_step(case):
    """Agrees with torch's count of products with weights, for a batch without padding. On meta
    tensors that count includes the recurrent layers.
    """
    source, mask, target, _ = (x[:2] for x in case.batch())
    batch = source, torch.ones_like(mask), target, torch.ones_like(mask)
    assert transformer.tokens(batch) == (source.numel(), target[:, 1:].numel())
    with torch.device("meta"):
        model = case.make()
    with FlopCounterMode(display=False) as counter:
        model(source.to("meta"), target[:, :-1].to("meta")).sum().backward()
    products = sum(
        count
        for operator, count in counter.get_flop_counts()["Global"].items()
        if str(operator) in ("aten.mm", "aten.addmm")  # attention uses aten.bmm
    )
    assert seq2seq.operations(model, batch) == pytest.approx(products, rel=0.05)


def test_a_fused_model_that_differs_stops_the_run(monkeypatch):
    @torch.no_grad()
    def spoil(model, unpad):
        model.output.weight.mul_(1.01)

    monkeypatch.setattr(seq2seq.trifuse, "fuse", spoil)
    with pytest.raises(AssertionError, match="tiny: fused loss"):
        transformer.time_steps(tiny_case(), "cpu", seconds=0.0)


def test_tables_json_and_picture(tmp_path, capsys, monkeypatch):
    copies = seq2seq.copying("rnn", "none", held_out=100, **TINY)
    monkeypatch.setattr(seq2seq, "tasks", lambda: [tiny_task(), tiny_task("dot"), copies])
    monkeypatch.setattr(seq2seq, "cases", lambda: [tiny_case()])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--quick", "--device", "cpu", "--json", str(figures), "--plot", str(picture)]
    assert seq2seq.main([*arguments, "--steps", "4"]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # narrow tables break their titles
    for words in (
        "without dropout, 4 steps from one seed",
        "16 held-out answers right",
        "strings copied right, by the number of digits",
        "same answers",
        "stopped early",
        "tokens per second",
    ):
        assert words in printed
    assert " 0.0%" not in printed
    content = json.loads(figures.read_text())
    named = [result["task"] for result in content["learnt"]]
    assert named == ["additive", "dot", "copying, RNN, none"]
    assert content["learnt"][2]["accuracy_by_length"]["fused"].keys() >= {"1 to 6", "19 to 24"}
    for result in content["learnt"]:
        assert {len(losses) for losses in result["losses"].values()} == {4}
        assert result["fused_from_eager"] < 1e-4
        assert result["accuracy"]["eager"] == result["accuracy"]["fused"]
        assert result["same_answers"] == 1.0
        by_seed = result["fused_accuracy_by_seed"]
        assert [len(by_seed[search]) for search in seq2seq.SEARCHES] == [2, 2]
        assert by_seed["greedy"][0] == result["accuracy"]["fused"]["greedy"]
    (row,) = content["times"]
    assert row["work"] == sum(transformer.tokens(tiny_case().batch()))
    assert row["achieved"] == pytest.approx(row["work"] / row["ours"]["median"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        seq2seq.main(["--steps", "0"])
    with pytest.raises(SystemExit, match="nothing is named 'nothing'"):
        seq2seq.main(["--cases", "nothing"])


def test_pictures_show_what_the_answer_attended_to():
    task = tiny_task()
    trained = transformer.train(task, 1, device="cpu", fused=True)
    curves = transformer.Curves(task.name, trained, trained, trained)
    answers = seq2seq.Answers.of(trained.model, task.held_out[0])
    result = seq2seq.Learnt(curves, task.held_out[0], answers, answers)
    lengths = task.held_out[0][1].sum(1)
    rows = seq2seq.examples(result, 3)
    assert lengths[rows[0]] == lengths.max()
    assert lengths[rows[2]] == lengths.min()
    for row in rows:
        written, read, weights = seq2seq.attention(result, row)
        assert weights.shape == (len(read), len(written))
        torch.testing.assert_close(weights.sum(1), torch.ones(len(read)))
        assert written.endswith("¶")
        assert len(written) == lengths[row]
