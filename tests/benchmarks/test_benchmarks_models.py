"""The benchmark of transformers' models reads, counts, compares and times what it claims to."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from model_sizes import (
    DISTILBERT_SIZES,
    GPT_SIZES,
    GROUPED_QUERIES,
    PADDED_SIZES,
    SIZES,
    SPECIAL_TOKENS,
    T5_SIZES,
    VIT_SIZES,
    WHISPER_SIZES,
)

from trifuse.benchmarks import command_line, families
from trifuse.benchmarks import models as benchmark
from trifuse.benchmarks.timing import Timing

TINY = {
    "Bert": PADDED_SIZES,
    "Roberta": PADDED_SIZES | {"max_position_embeddings": 66},
    "DistilBert": DISTILBERT_SIZES,
    "MPNet": PADDED_SIZES | {"max_position_embeddings": 66},
    "DebertaV2": PADDED_SIZES | {"position_buckets": 8},
    "ModernBert": PADDED_SIZES | SPECIAL_TOKENS | {"local_attention": 8},
    "T5": T5_SIZES | {"pad_token_id": 0},
    "GPT2": GPT_SIZES | {"bos_token_id": 1, "eos_token_id": 2},
    "Llama": SIZES | GROUPED_QUERIES,
    "ViT": VIT_SIZES,
    "Beit": VIT_SIZES,
    "Swin": {"image_size": 64, "embed_dim": 8, "num_heads": [1, 1, 2, 2], "window_size": 2},
    "Swinv2": {"image_size": 64, "embed_dim": 8, "num_heads": [1, 1, 2, 2], "window_size": 2},
    "Whisper": WHISPER_SIZES,
}


def tiny(family: families.Family) -> families.Family:
    """The family at a tiny size."""
    options = {**family.options, **TINY[family.model]}
    for name in family.layers:
        options.pop(name, None)
    length = 10 if family.reads == "sounds" else min(family.length, 40)
    return dataclasses.replace(family, options=options, length=length, batches=(2, 3))


FAMILIES = {family.name: tiny(family) for family in families.FAMILIES}


@pytest.fixture(autouse=True)
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile returns the model as it is: Inductor takes minutes for these models."""
    monkeypatch.setattr(torch, "compile", lambda model=None, **options: model)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    benchmark.load.cache_clear()


@pytest.mark.parametrize("step", [benchmark.INFERENCE, benchmark.TRAINING])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.covering(1)
def test_every_family_is_compared_and_timed(name: str, step: str) -> None:
    family = FAMILIES[name]
    for batch in family.batches:
        case = benchmark.Case(family, torch.float32, batch, step, layers=2)
        result = benchmark.run(case, {}, seconds=0.0, min_rounds=1).result
        peers = {"transformers", "torch.compile"} if batch == 2 else {"transformers"}
        assert set(result.peers) == peers
        assert result.fastest_peer == "transformers"
        assert set(result.met_against) == peers - {"transformers"}
        assert ("valid" in result.shape) == family.is_padded
        assert result.fraction > 0


def test_work_is_that_of_the_linear_layers_and_of_the_pairs() -> None:
    lengths, E, inner = (7, 7, 4), 32, 48
    layers = 2 * (4 * E * E + 2 * E * inner)
    pairs = sum(length**2 for length in lengths)
    wanted = 2 * layers * sum(lengths) + 2 * 4 * E * pairs
    assert families.operations(FAMILIES["BERT"], 2, lengths) == wanted
    causal = sum(length * (length + 1) / 2 for length in lengths)
    wanted = 2 * layers * sum(lengths) + 2 * 4 * E * causal
    options = FAMILIES["GPT-2"].options | {"n_inner": inner}
    gpt = dataclasses.replace(FAMILIES["GPT-2"], options=options)
    assert families.operations(gpt, 2, lengths) == pytest.approx(wanted, rel=1e-12)


def test_work_of_a_whole_batch_counts_once() -> None:
    """DeBERTa projects its distances once, for all sequences; four tokens have seven of them."""
    family = FAMILIES["DeBERTa-v3"]
    one, two, three = (families.operations(family, 2, (4,) * n) for n in (1, 2, 3))
    E = families.build(family, 1).config.hidden_size
    in_a_layer = 2 * (2 * 7 * E * E)  # to keys and to queries
    assert one - (two - one) == 2 * in_a_layer
    assert three - two == two - one


def test_pairs_outside_of_a_window_are_no_work() -> None:
    """Two of ModernBERT's three layers see four tokens to either side."""
    family, length = FAMILIES["ModernBERT"], 20
    model = families.build(family, 3)
    distance = (torch.arange(length) - torch.arange(length)[:, None]).abs()
    near = (distance <= 4).double().mean().item()
    share = families._share_of_pairs(family, model, length)
    assert share == pytest.approx((1 + 2 * near) / 3)


@pytest.mark.parametrize(("batch_size", "longest"), [(8, 128), (32, 128), (8, 1024), (2, 1024)])
def test_texts_fill_about_the_promised_part_of_a_batch(batch_size: int, longest: int) -> None:
    lengths = families.text_lengths(batch_size, longest)
    assert len(lengths) == batch_size
    assert max(lengths) == longest
    assert min(lengths) >= longest / 4
    assert sum(lengths) / (batch_size * longest) == pytest.approx(families.VALID, abs=0.08)


def test_all_sizes_of_the_models_are_bases() -> None:
    """By the weights of a layer, those of embeddings left out."""
    expected = {"BERT": 7.1e6, "DeBERTa-v3": 7.1e6, "ModernBERT": 5.0e6, "Llama": 6.3e6}
    expected["Whisper's encoder"] = 3.15e6
    for name, wanted in expected.items():
        (family,) = (each for each in families.FAMILIES if each.name == name)
        counts = []
        for layers in (1, 2):
            with torch.device("meta"):
                model = families.build(family, layers)
            counts.append(sum(p.numel() for p in model.parameters()))
        assert counts[1] - counts[0] == pytest.approx(wanted, rel=0.02)


def test_base_depths_give_the_published_numbers_of_parameters() -> None:
    """Except for Llama's, whose size is our own. Without poolers and heads, in millions."""
    published = {
        "BERT": 108.9,
        "RoBERTa": 124.1,
        "DistilBERT": 66.4,
        "MPNet": 108.9,
        "DeBERTa-v3": 183.8,
        "ModernBERT": 149.0,
        "ModernBERT, long texts": 149.0,
        "T5": 222.9,
        "GPT-2": 124.4,
        "ViT": 85.8,
        "BEiT": 85.8,
        "Swin-T": 27.5,
        "SwinV2-T": 27.6,
        "Whisper's encoder": 20.6,
    }
    for family in families.FAMILIES:
        case = benchmark.Case(family, torch.float32, 8, benchmark.INFERENCE).with_layers(None)
        with torch.device("meta"):
            model = families.build(family, case.layers)
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        assert count == pytest.approx(published.get(family.name, count), rel=0.01)
        assert str(case.layers) in case.name
    assert {family.name for family in families.FAMILIES} - set(published) == {"Llama"}


def test_layers_are_a_number_or_the_base_models() -> None:
    cases = {name: benchmark.Case(f, torch.float32, 2, "") for name, f in FAMILIES.items()}
    for layers, bert, distilbert, swin in ((5, 5, 5, 12), (None, 12, 6, 12)):
        wanted = {"BERT": bert, "DistilBERT": distilbert, "Swin-T": swin}
        assert {name: cases[name].with_layers(layers).layers for name in wanted} == wanted
    parser = argparse.ArgumentParser()
    command_line.add_count(parser, "--layers", 3, words={"base": None})
    for arguments, layers in (([], 3), (["--layers", "4"], 4), (["--layers", "base"], None)):
        assert parser.parse_args(arguments).layers == layers
    for wrong in ("0", "all"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--layers", wrong])


def test_models_that_differ_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = benchmark.Case(FAMILIES["BERT"], torch.float32, 2, benchmark.INFERENCE)
    monkeypatch.setattr(benchmark, "CASES", [case])

    def spoil(model: nn.Module, unpad: bool) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("output.dense.weight"):
                parameter.data *= 2

    monkeypatch.setattr(benchmark.trifuse, "fuse", spoil)
    assert benchmark.main(["--quick"]) == 1
    assert "we are off by" in capsys.readouterr().out


@pytest.mark.parametrize("step", [benchmark.INFERENCE, benchmark.TRAINING])
def test_float64_decides_where_transformers_differs(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours passes: it is as far from exact as transformers is."""
    case = benchmark.Case(FAMILIES["BERT"], torch.float32, 2, step, 1)
    asked = []

    def differ(peer: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        asked.append(peer)
        raise AssertionError

    monkeypatch.setattr(benchmark, "check_agreement", differ)
    assert benchmark.run(case, {"threads": 2}, seconds=0.0, min_rounds=1)
    assert asked == ["transformers"]


def test_an_outcome_is_read_back_from_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "FAMILIES", list(FAMILIES.values()))
    for name in ("BERT", "ViT"):
        for batch in (2, 3):
            case = benchmark.Case(FAMILIES[name], torch.bfloat16, batch, benchmark.INFERENCE, 1)
            outcome = benchmark.run(case, {"threads": 2}, seconds=0.0, min_rounds=3)
            record = json.loads(json.dumps(outcome.record()))
            assert benchmark.Outcome.from_record(record) == outcome
            assert record["name"] == f"{name}, layers: 1, inference, bf16, batch {batch}"
            peers = {"transformers", "torch.compile"} if batch == 2 else {"transformers"}
            assert {engine: len(each) for engine, each in record["seconds"].items()} == (
                dict.fromkeys({"fused", *peers}, 3)
            )
            assert record["ceiling"] == outcome.result.ceiling.value
            assert set(record["peer_ratios"]) == peers
            assert record["at_least_against"] == {"torch.compile": 1.0}


def test_a_row_below_torch_compile_misses_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster than transformers as promised, but slower than what torch compiles."""
    seconds = {"fused": 1.0, "transformers": 9.0, "torch.compile": 0.9}

    def alternate(functions: dict[str, Any], **_: Any) -> dict[str, Timing]:
        return {name: Timing((seconds.get(name, 1.0),)) for name in functions}

    monkeypatch.setattr(benchmark.timing, "alternate", alternate)
    benchmark.torchs_share.cache_clear()
    case = benchmark.Case(FAMILIES["BERT"], torch.float32, 2, benchmark.INFERENCE, 1)
    met = {}
    for compiled in (0.9, 1.0):
        seconds["torch.compile"] = compiled
        result = benchmark.run(case, {}, seconds=0.0, min_rounds=1).result
        assert result.ratio == 9.0
        met[compiled] = result.record()["met"]
    benchmark.torchs_share.cache_clear()
    assert met == {0.9: False, 1.0: True}


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[benchmark.Case]:
    """The command's cases, of two tiny families."""
    cases = [
        benchmark.Case(FAMILIES[name], dtype, batch, step)
        for name in ("BERT", "ViT")
        for dtype in (torch.float32, torch.bfloat16)
        for batch in (2, 3)
        for step in (benchmark.INFERENCE, benchmark.TRAINING)
    ]
    monkeypatch.setattr(benchmark, "CASES", cases)
    monkeypatch.setattr(benchmark, "FAMILIES", list(FAMILIES.values()))
    return cases


@pytest.mark.usefixtures("cases")
def test_command_writes_its_tables_figures_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, picture = tmp_path / "models.json", tmp_path / "models.png"
    command = ["--quick", "--layers", "1", "--json", str(figures), "--plot", str(picture)]
    assert benchmark.main([*command, "--cases", "*batch 2"]) == 0
    out = capsys.readouterr().out
    assert "against torch.compile" in out
    assert picture.stat().st_size > 10_000
    rows = json.loads(figures.read_text())["times"]
    assert len(rows) == 8
    assert {row["case"] for row in rows} == {"BERT, layers: 1", "ViT, layers: 1"}
    for row in rows:
        slow = row["torchs_share"] < benchmark.SLOW
        if row["family"] == "BERT" and row["step"] == benchmark.INFERENCE:
            assert row["at_least"] == (3.5 if slow else 2.2)
        assert row["machine"]["torch"] == torch.__version__


@pytest.mark.usefixtures("ceilings_measured_once")
def test_parts_of_a_run_are_joined_in_its_file(
    cases: list[benchmark.Case],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    broken = ""
    run = benchmark.run

    def counted(case: benchmark.Case, *args: Any, **kwargs: Any) -> benchmark.Outcome:
        ran.append(case.name)
        if case.name == broken:
            raise RuntimeError("broken")
        return run(case, *args, **kwargs)

    monkeypatch.setattr(benchmark, "run", counted)
    figures, picture = tmp_path / "models.json", tmp_path / "models.png"
    command = ["--quick", "--json", str(figures)]

    def rows() -> dict[str, Any]:
        return {row["name"]: row for row in json.loads(figures.read_text())["times"]}

    names = [case.with_layers(1).name for case in cases]
    part = ["--layers", "1", "--cases"]
    assert benchmark.main([*command, *part, "BERT*fp32, batch 2"]) == 0
    first = rows()
    assert list(first) == ran == names[:2]

    # Other cases are kept, and those with the same name replaced.
    ran.clear()
    assert benchmark.main([*command, *part, "*inference, fp32, batch 2"]) == 0
    assert ran == [names[0], names[8]]
    second = rows()
    assert set(second) == {*names[:2], names[8]}
    assert second[names[1]] == first[names[1]]
    assert second[names[0]]["seconds"] != first[names[0]]["seconds"]

    # Cases of other depths have other names.
    ran.clear()
    assert benchmark.main([*command, "--layers", "2", "--resume", "--cases", "ViT*fp32*2"]) == 0
    assert len(ran) == 2
    assert all("layers: 2" in name for name in ran)
    assert len(rows()) == 5

    # A case that fails isn't kept, and the next run repeats it.
    ran.clear()
    broken = names[0]
    assert benchmark.main([*command, *part, names[0]]) == 1
    assert names[0] not in rows()
    assert json.loads(figures.read_text())["failed"] == {names[0]: "RuntimeError: broken"}
    broken = ""
    ran.clear()
    assert benchmark.main([*command, "--layers", "1", "--resume"]) == 0
    assert ran == [name for name in names if name not in (names[1], names[8])]
    assert json.loads(figures.read_text())["failed"] == {}
    assert len(rows()) == len(names) + 2

    # With all of them there, nothing runs and nothing changes.
    ran.clear()
    before = figures.read_text()
    capsys.readouterr()
    for option in ("--resume", "--show"):
        assert benchmark.main([*command, "--layers", "1", option, "--plot", str(picture)]) == 0
        out = capsys.readouterr().out
        assert out.count("layers: 1") == len(names)
        assert "layers: 2" not in out
        assert out.count("GB/s") == 1  # one machine
        assert picture.stat().st_size > 10_000
        picture.unlink()
    assert benchmark.main([*command, "--layers", "2", "--show"]) == 0
    assert capsys.readouterr().out.count("layers: 2") == 2
    assert ran == []
    assert figures.read_text() == before


def test_machines_of_a_joined_run_are_all_named() -> None:
    rate = {"value": 4e11, "source": "tiles"}
    facts = {"cpu": "A", "cores": 2, "threads": 2, "cpu_capability": "", "torch": "2"}
    facts |= {"trifuse": "0", "float32 matrix products": rate, "bfloat16 matrix products": rate}
    facts |= {"copies": {"value": 1e10}}
    later = facts | {"float32 matrix products": rate | {"value": 5e11}}
    case = benchmark.Case(FAMILIES["BERT"], torch.float32, 2, benchmark.INFERENCE)
    outcomes = [
        benchmark.Outcome(case, None, 1.0, each) for each in (facts, facts | {"cpu": "B"}, later)
    ]
    lines = benchmark.machines(outcomes).splitlines()
    assert [line[0] for line in lines[::2]] == ["A", "B"]
    assert "500 GFLOP/s in fp32" in lines[1]


@pytest.mark.parametrize("content", ["", "[]", '{"times": [{"case": "x"}], "failed": {}}'])
def test_a_file_of_something_else_is_left(tmp_path: Path, content: str) -> None:
    figures = tmp_path / "other.json"
    figures.write_text(content)
    with pytest.raises(SystemExit, match=r"--json: .*other\.json holds no figures"):
        benchmark.main(["--quick", "--json", str(figures), "--cases", "BERT*"])
    assert figures.read_text() == content


@pytest.mark.parametrize("option", ["--resume", "--show"])
def test_what_a_file_holds_needs_a_file(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main([option])
    assert "read the file of --json" in capsys.readouterr().err
