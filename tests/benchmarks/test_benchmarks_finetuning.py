"""The fine-tuning comparison: what is labelled, what is held out, what is shown."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

import trifuse
from trifuse.benchmarks import finetuning
from trifuse.benchmarks.pretraining import Accuracy

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")


@pytest.fixture(scope="module")
def split() -> finetuning.Split:
    return finetuning.read()


def write_library(root: Path) -> None:
    """Ten packages; those with later names have more docstrings. All their words differ."""
    for number in range(10):
        word = chr(ord("a") + number)
        lines = []
        for n in range(10 * (number + 1)):
            first, second = (f"{word * (n + 1)}{part} " * 12 for part in "xy")
            lines.append(f'def f{n}():\n    """{first}\n\n    {second}\n\n    Short.\n    """\n')
        package = root / f"package{number}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("\n".join(lines))
    (root / "package0" / "test").mkdir()
    (root / "package0" / "test" / "module.py").write_text(f'"""{"tested " * 20}"""')
    (root / "broken.py").write_text(f'"""{"broken " * 20}"""\nnot Python at all')
    (root / "repeated.py").write_text(f'"""{"ax " * 12}"""')


def test_docstrings_are_split_whole(tmp_path):
    write_library(tmp_path)
    groups = finetuning.docstrings(tmp_path)
    assert [len(groups[f"package{n}"]) for n in range(10)] == [10 * (n + 1) for n in range(10)]
    assert not {"broken", "repeated"} & set(groups)
    assert all("tested" not in text for group in groups["package0"] for text in group)
    split = finetuning.read(tmp_path)
    assert split.packages == [f"package{n}" for n in range(9, 1, -1)]
    for label, count in enumerate(range(10, 2, -1)):
        sizes = [sum(each.label == label for each in part) for part in split[:3]]
        assert sizes == [2 * size * count for size in (7, 1, 2)]
    for part in split[:3]:
        for first, second in zip(part[::2], part[1::2], strict=True):
            assert first.label == second.label  # both paragraphs of one docstring


def test_passages_have_both_marks_and_known_words(split):
    everything = [passage for part in split[:3] for passage in part]
    sizes = [len(part) / len(everything) for part in split[:3]]
    assert sizes == pytest.approx([0.7, 0.1, 0.2], abs=0.03)
    for tokens, _ in everything:
        assert finetuning.LEAST + 2 <= len(tokens) <= finetuning.LENGTH
        assert (tokens[0], tokens[-1]) == (finetuning.BEGIN, finetuning.END)
        assert tokens.max() < finetuning.VOCABULARY
        assert not torch.isin(tokens[1:-1], torch.tensor([0, 2, 3])).any()
    words = torch.cat([tokens for tokens, _ in everything])
    assert (words == finetuning.UNKNOWN).double().mean() < 0.1


def test_few_are_labelled_and_none_of_them_is_held_out(split):
    one, other = (finetuning.few(split.train, seed) for seed in range(2))
    for chosen in (one, other):
        labels = torch.tensor([each.label for each in chosen])
        assert torch.equal(labels.bincount(), torch.full((finetuning.CLASSES,), 16))
    assert any(a is not b for a, b in zip(one, other, strict=True))
    trained = {tuple(each.tokens.tolist()) for each in one}
    same = [tuple(each.tokens.tolist()) in trained for each in split.test]
    assert sum(same) / len(same) < 0.01  # paragraphs alike but for unknown words


def test_models_are_about_as_large():
    sizes = [finetuning.count_parameters(make(0.0)) for make, _ in finetuning.MODELS.values()]
    assert max(sizes) / min(sizes) < 1.06


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", finetuning.MODELS)
def test_losses_leave_padding_out(name, fused, split):
    torch.manual_seed(0)
    model = finetuning.MODELS[name][0](0.0).eval()
    if fused:
        trifuse.fuse(model, unpad=True)
    passages = [*split.test[:3], *sorted(split.test, key=lambda each: -len(each.tokens))[:1]]
    with torch.no_grad():
        together = finetuning.text_loss(model, (finetuning.join(passages),)).item()
        alone = [
            finetuning.text_loss(model, (each.tokens[None],)).item() * (len(each.tokens) - 1)
            for each in passages
        ]
    total = sum(len(each.tokens) - 1 for each in passages)
    assert together == pytest.approx(sum(alone) / total, rel=1e-5)
    assert together == pytest.approx(math.log(finetuning.VOCABULARY), abs=1.5)


def test_tuning_starts_from_the_pretrained_weights(split):
    torch.manual_seed(0)
    pretrained = finetuning.transformer(0.0)
    for begin in (pretrained, None):
        model = finetuning.tuning("Transformer", split, 0, begin, 1e-3).make(0.1)
        same = torch.equal(model.language_model.embedding.weight, pretrained.embedding.weight)
        assert same == (begin is not None)


def test_the_rate_is_chosen_on_validation_passages():
    rows = [
        finetuning.Row("LSTM", "from scratch", 1e-3, [Accuracy(0.5, 0.9), Accuracy(0.6, 0.9)]),
        finetuning.Row("LSTM", "from scratch", 1e-2, [Accuracy(0.7, 0.1), Accuracy(0.5, 0.1)]),
    ]
    assert finetuning.best(rows) is rows[1]
    assert finetuning.spread(rows[0]) == "90.0% ± 0.0%"


def test_command_says_that_quick_learns_nothing(tmp_path, capsys, monkeypatch, split):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    small = split._replace(validation=split.validation[::4], test=split.test[::4])
    monkeypatch.setattr(finetuning, "read", lambda: small)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--quick", "--steps", "3", "--tuning-steps", "2", "--device", "cpu"]
    assert finetuning.main([*arguments, "--json", str(figures), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert finetuning.TOO_SHORT in printed
    assert " 0.0%" not in printed
    for start in finetuning.STARTS:
        assert printed.count(f"{start}  ") >= 2
    content = json.loads(figures.read_text())
    assert content["quick"] is True
    assert content["accuracy"] == []
    assert [each["model"] for each in content["learnt"]] == ["Transformer", "LSTM"]
    for each in content["learnt"]:
        assert len(each["pretraining_loss"]) == 2
        assert [len(curves["losses"]["fused"]) for curves in each["curves"]] == [3, 3]
        for curves in each["curves"]:
            assert curves["fused_from_eager"] < 1e-4
        assert each["tokens_per_second"]["fused"] > 0


def test_command_writes_all_rows(tmp_path, capsys, monkeypatch, split):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    small = split._replace(validation=split.validation[::4], test=split.test[::4])
    monkeypatch.setattr(finetuning, "read", lambda: small)
    monkeypatch.setattr(finetuning, "token_rates", lambda *_: {"eager": 1.0, "fused": 2.0})
    figures = tmp_path / "figures.json"
    arguments = ["--steps", "2", "--tuning-steps", "1", "--seeds", "2", "--cases", "LSTM"]
    assert finetuning.main([*arguments, "--device", "cpu", "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["accuracy"]
    assert [row["start"] for row in rows] == [*finetuning.STARTS, "which words occur"]
    for row in rows:
        assert len(row["test"]) == len(row["validation"]) == 2
        assert all(0 <= share <= 1 for share in row["test"])
    assert mean_test(rows[-1]) > 2 / finetuning.CLASSES
    assert "too short" not in capsys.readouterr().out


def mean_test(row: dict) -> float:
    return sum(row["test"]) / len(row["test"])


def test_options_are_checked(capsys):
    with pytest.raises(SystemExit):
        finetuning.main(["--seeds", "1"])
    assert "--seeds: expected at least 2" in capsys.readouterr().err
