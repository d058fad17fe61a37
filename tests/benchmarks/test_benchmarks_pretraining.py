"""The pretraining comparison: BERT's two tasks, scored on held-out passages."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

from trifuse.benchmarks import pretraining, transformer

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")


@pytest.fixture(scope="module")
def split() -> pretraining.Split:
    return pretraining.read()


def test_every_module_is_split_in_order(split):
    everything = [passage for part in split for passage in part]
    sizes = [len(part) / len(everything) for part in split]
    assert sizes == pytest.approx([0.7, 0.1, 0.2], abs=0.08)
    assert len({(passage.module, passage.place) for passage in everything}) == len(everything)
    last: dict[str, int] = {}
    for part in split:
        assert {passage.label for passage in part} == {None, *range(pretraining.TOPICS)}
        for passage in part:
            assert passage.place == last.get(passage.module, -1) + 1
            last[passage.module] = passage.place
            assert passage.tokens.max() < pretraining.VOCABULARY
    known = torch.cat([passage.tokens for passage in everything])
    assert (known == pretraining.UNKNOWN).double().mean() < 0.1


def test_only_a_module_s_last_passage_is_short(split):
    lengths: dict[str, list[int]] = {}
    for part in split:
        for passage in part:
            lengths.setdefault(passage.module, []).append(len(passage.tokens))
    for module, counts in lengths.items():
        assert min(counts[:-1], default=pretraining.PASSAGE) >= pretraining.PASSAGE, module


def test_few_examples_of_each_class(split):
    chosen = pretraining.few(split.train)
    assert {id(passage) for passage in chosen} <= {id(passage) for passage in split.train}
    counts = torch.tensor([passage.label for passage in chosen]).bincount()
    assert counts.tolist() == [pretraining.EXAMPLES] * pretraining.TOPICS
    assert pretraining.few(split.train) == chosen


def test_masking_is_the_papers():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(pretraining.VOCABULARY, (400, 500), generator=generator)
    hidden, targets = pretraining.hide(ids, generator)
    asked = targets != -100
    special = (ids < pretraining.WORDS) & (ids != pretraining.UNKNOWN)
    assert not (asked & special).any()
    assert torch.equal(targets[asked], ids[asked])
    assert torch.equal(hidden[~asked], ids[~asked])
    share = asked[~special].double().mean().item()
    masked, kept = hidden[asked] == pretraining.MASK, hidden[asked] == ids[asked]
    assert share == pytest.approx(0.15, abs=0.005)
    assert masked.double().mean().item() == pytest.approx(0.8, abs=0.01)
    assert kept.double().mean().item() == pytest.approx(0.1, abs=0.01)
    assert hidden[asked][~masked].min() >= pretraining.UNKNOWN


def test_pairs_follow_half_the_time(split):
    passages = split.train[:200]
    generator = torch.Generator().manual_seed(0)
    ids, mask, types, targets, is_other = pretraining.pairs(passages, 400, generator)
    assert ids.shape == mask.shape == types.shape == targets.shape
    assert ids.shape[1] <= pretraining.LENGTH
    assert is_other.double().mean().item() == pytest.approx(0.5, abs=0.1)
    whole = targets.where(targets != -100, ids)
    limit = (pretraining.LENGTH - 3) // 2
    starts = {(x.module, x.place): x.tokens[:limit].tolist() for x in passages}
    for row in range(400):
        length = int(mask[row].sum())
        assert (ids[row, length:] == pretraining.PAD).all()
        first, second = (whole[row, :length][types[row, :length] == n].tolist() for n in range(2))
        assert (first[0], first[-1], second[-1]) == (
            pretraining.CLS,
            pretraining.SEP,
            pretraining.SEP,
        )
        follows = any(
            start == first[1:-1] and starts.get((module, place + 1)) == second[:-1]
            for (module, place), start in starts.items()
        )
        assert follows or is_other[row]


def test_frozen_classifier_fits_what_is_linear():
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(pretraining.TOPICS, 16, generator=generator)
    labels = torch.randint(pretraining.TOPICS, (300,), generator=generator)
    points = centres[labels] + torch.randn(300, 16, generator=generator)
    (logits,) = pretraining.classify(points[:200], labels[:200], [points[200:]], decay=1e-2)
    assert pretraining.accuracy(logits, labels[200:]) > 0.95


def test_the_rate_is_chosen_on_validation_passages():
    low, high = pretraining.LEARNING_RATES
    results = [
        pretraining.TopicResults(
            {low: pretraining.Accuracy(0.5, 0.9), high: pretraining.Accuracy(validation, 0.1)}, 0.0
        )
        for validation in (0.4, 0.7)
    ]
    assert pretraining.best_rate(results) == high


def test_predictions_are_counted():
    """A model that has seen the answers is always right; one that says 0, as often as 0 is."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(6, (5, 7), generator=generator)
    targets[torch.rand(5, 7, generator=generator) < 0.5] = -100
    is_other = torch.tensor([0, 1, 1, 0, 1])
    batch = (targets, targets != -100, targets, targets, is_other)
    task = transformer.Task("", None, None, [batch], None)

    class Oracle(torch.nn.Module):
        def forward(self, ids, mask, types):
            return F.one_hot(ids.clamp_min(0), 6).float(), F.one_hot(is_other, 2).float()

    class Constant(torch.nn.Module):
        def forward(self, ids, mask, types):
            return F.one_hot(0 * ids, 6).float(), F.one_hot(0 * is_other, 2).float()

    counted = pretraining.predictions(task, Oracle(), "cpu")
    chosen = targets[targets != -100]
    commonest = chosen.bincount().max().item() / len(chosen)
    assert counted == (1.0, 1.0, pytest.approx(commonest))
    counted = pretraining.predictions(task, Constant(), "cpu")
    assert counted[:2] == (pytest.approx(0.4), pytest.approx((chosen == 0).double().mean().item()))


def test_tables_json_and_picture(split, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(pretraining, "read", lambda: split)
    small = pretraining.config
    monkeypatch.setattr(
        pretraining,
        "config",
        lambda dropout: dataclasses.replace(
            small(dropout), hidden_size=16, intermediate_size=32, num_hidden_layers=1
        ),
    )
    monkeypatch.setattr(pretraining, "BATCH", 4)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--device", "cpu", "--json", str(figures), "--plot", str(picture)]
    arguments += ["--curve-steps", "4", "--steps", "3", "--tuning-steps", "2", "--seeds", "2"]
    for quick in ([], ["--quick"]):
        assert pretraining.main([*arguments, *quick]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        for words in (
            "without dropout, 4 steps",
            "correct after 3 steps",
            "random weights",
            "frozen features",
        ):
            assert words in printed
        assert ("stopped early" in printed) == bool(quick)
        assert ("too short to learn" in printed) == bool(quick)
    content = json.loads(figures.read_text())
    for curves in content["curves"]:
        assert curves["fused_from_eager"] < 1e-4
    assert len(content["predictions"]) == 2
    for results in content["topics"].values():
        assert results["learning_rate"] in pretraining.LEARNING_RATES
        assert len(results["fine_tuned"]) == len(results["frozen"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--curve-steps", "--steps", "--tuning-steps"])
def test_options_are_checked(option, capsys):
    with pytest.raises(SystemExit):
        pretraining.main([option, "0"])
    assert f"{option}: expected at least 1" in capsys.readouterr().err


def test_there_are_no_cases_to_choose(capsys):
    with pytest.raises(SystemExit):
        pretraining.main(["--quick", "--cases", "random"])
    assert "unrecognized arguments: --cases" in capsys.readouterr().err
