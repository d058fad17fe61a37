"""The pretraining comparison: BERT's two tasks, scored on held-out passages."""

from __future__ import annotations

import json

import pytest
import torch

from trifuse.benchmarks import pretraining

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")


@pytest.fixture(scope="module")
def split() -> pretraining.Split:
    return pretraining.read()


def test_topics_are_split_in_all_parts(split):
    everything = [passage for part in split for passage in part]
    sizes = [len(part) / len(everything) for part in split]
    assert sizes == pytest.approx([0.7, 0.1, 0.2], abs=0.03)
    assert len({(passage.topic, passage.place) for passage in everything}) == len(everything)
    for part in split:
        assert {passage.label for passage in part} == {None, *range(pretraining.TOPICS)}
        for passage in part:
            assert len(passage.tokens) >= 8
            assert passage.tokens.max() < pretraining.VOCABULARY
    known = torch.cat([passage.tokens for passage in everything])
    assert (known == pretraining.UNKNOWN).double().mean() < 0.1


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
    starts = {(x.topic, x.place): x.tokens[:limit].tolist() for x in passages}
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
            start == first[1:-1] and starts.get((topic, place + 1)) == second[:-1]
            for (topic, place), start in starts.items()
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
    fine_tuned = {
        low: [pretraining.Accuracy(0.5, 0.9), pretraining.Accuracy(0.6, 0.9)],
        high: [pretraining.Accuracy(0.7, 0.1), pretraining.Accuracy(0.5, 0.1)],
    }
    results = pretraining.TopicResults(fine_tuned, 0.0, torch.empty(0))
    assert pretraining.best_rate([results, results]) == high


def test_both_know_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--quick", "--device", "cpu", "--json", str(figures), "--plot", str(picture)]
    assert pretraining.main([*arguments, "--steps", "5", "--tuning-steps", "3"]) == 0
    printed = capsys.readouterr().out
    for words in ("without dropout, 5 steps", "without dropout, 3 steps", "stopped early"):
        assert words in printed
    content = json.loads(figures.read_text())
    for curves in content["curves"]:
        assert curves["fused_from_eager"] < 1e-4
    assert content["learning_rate"] in pretraining.LEARNING_RATES
    assert content["features_apart"] < 1e-4
    eager, fused = content["accuracy"]["eager"], content["accuracy"]["fused"]
    assert fused["frozen"] == pytest.approx(eager["frozen"], abs=0.02)
    assert len(fused["fine_tuned"]) == len(eager["fine_tuned"]) == pretraining.SEEDS
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--steps", "--tuning-steps"])
def test_options_are_checked(option, capsys):
    with pytest.raises(SystemExit):
        pretraining.main([option, "0"])
    assert f"{option}: expected at least 1" in capsys.readouterr().err
