"""The benchmark of transformers' models reads, counts, compares and times what it claims to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

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

from trifuse.benchmarks import families
from trifuse.benchmarks import models as benchmark

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
    "Swin": {"image_size": 64, "embed_dim": 8, "num_heads": [1, 1, 2, 2], "window_size": 2},
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
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    benchmark.load.cache_clear()


@pytest.mark.parametrize("step", [benchmark.INFERENCE, benchmark.TRAINING])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_compared_and_timed(name: str, step: str) -> None:
    family = FAMILIES[name]
    for batch in family.batches:
        case = benchmark.Case(family, torch.float32, batch, step)
        result = benchmark.run(case, layers=2, seconds=0.0, min_rounds=1).result
        peers = {"transformers", "torch.compile"} if batch == 2 else {"transformers"}
        assert set(result.peers) == peers
        assert result.fastest_peer == "transformers"
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
    assert "we differ from transformers" in capsys.readouterr().out


def test_command_writes_its_tables_figures_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        benchmark.Case(FAMILIES[name], dtype, batch, step)
        for name in ("BERT", "ViT")
        for dtype in (torch.float32, torch.bfloat16)
        for batch in (2, 3)
        for step in (benchmark.INFERENCE, benchmark.TRAINING)
    ]
    monkeypatch.setattr(benchmark, "CASES", cases)
    figures, picture = tmp_path / "models.json", tmp_path / "models.png"
    command = ["--quick", "--layers", "1", "--json", str(figures), "--plot", str(picture)]
    assert benchmark.main([*command, "--cases", "*batch 2"]) == 0
    out = capsys.readouterr().out
    assert "against torch.compile" in out
    assert picture.stat().st_size > 10_000
    content = json.loads(figures.read_text())
    assert set(content["machine"]["torch's product"]) == {"fp32", "bf16"}
    rows = content["times"]
    assert len(rows) == 8
    assert {row["case"] for row in rows} == {"BERT, layers: 1", "ViT, layers: 1"}
    bars = {(row["case"][:3], row["step"]): row["at_least"] for row in rows}
    slow = content["machine"]["torch's product"]["bf16"] < benchmark.SLOW
    assert bars["BER", "inference"] == (3.5 if slow else 2.2)
