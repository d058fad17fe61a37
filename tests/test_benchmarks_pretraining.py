"""The pretraining comparison asks what BERT was asked, of data that it has not seen."""

from __future__ import annotations

import json

import pytest
import torch

from trifuse.benchmarks import pretraining


@pytest.fixture(scope="module")
def split() -> pretraining.Split:
    return pretraining.read()


def test_topics_are_split_in_order(split):
    assert 4 <= len(split.train) / len(split.validation) < 5
    for part in split:
        assert {passage.label for passage in part} == {None, *range(pretraining.TOPICS)}
        for passage in part:
            assert len(passage.tokens) >= 8
            assert passage.tokens.max() < pretraining.VOCABULARY
    known = torch.cat([passage.tokens for part in split for passage in part])
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
    starts = [passage.tokens[:limit].tolist() for passage in passages]
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
            (starts[n], starts[n + 1]) == (first[1:-1], second[:-1])
            for n in range(len(passages) - 1)
        )
        assert follows or is_other[row]


def test_frozen_classifier_fits_what_is_linear():
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(pretraining.TOPICS, 16, generator=generator)
    labels = torch.randint(pretraining.TOPICS, (300,), generator=generator)
    points = centres[labels] + torch.randn(300, 16, generator=generator)
    logits = pretraining._classify(points[:200], labels[:200], points[200:])
    assert pretraining._accuracy(logits, labels[200:]) > 0.95


def test_both_know_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--quick", "--device", "cpu", "--json", str(figures), "--plot", str(picture)]
    assert pretraining.main([*arguments, "--steps", "5"]) == 0
    printed = capsys.readouterr().out
    for words in ("without dropout, 5 steps", "frozen features", "told right (8 topics)"):
        assert words in printed
    content = json.loads(figures.read_text())
    assert content["curves"]["fused_from_eager"] < 1e-4
    assert content["features_apart"] < 1e-4
    eager, fused = content["accuracy"]["eager"], content["accuracy"]["fused"]
    assert fused["frozen"] == pytest.approx(eager["frozen"], abs=0.02)
    assert fused["fine_tuned"] == pytest.approx(eager["fine_tuned"], abs=0.02)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        pretraining.main(["--steps", "0"])
