"""The benchmark of one request at a time, on small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trifuse
from trifuse.benchmarks import one_request
from trifuse.benchmarks.one_request import Case, Model

pytest.importorskip("transformers", minversion="5")

ENCODER = Model(
    "encoder",
    "Bert",
    "Model",
    "tokens",
    {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48},
)
GENERATOR = Model(
    "generator",
    "T5",
    "ForConditionalGeneration",
    "tokens",
    {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 48},
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    cases = [Case(model, torch.float32) for model in (ENCODER, GENERATOR)]
    monkeypatch.setattr(one_request, "CASES", cases)
    monkeypatch.setattr(one_request, "_VOCABULARY", 50)
    monkeypatch.setattr(one_request, "WORDS", 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    return cases


@pytest.mark.usefixtures("ceilings_measured_once")
def test_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    assert one_request.main(["--quick", "--json", str(figures)]) == 0
    assert "generator, fp32" in capsys.readouterr().out
    encoder, generator = json.loads(figures.read_text())["times"]
    assert encoder["case"] == "encoder, fp32"
    assert encoder["first word"] == {}
    for row in (encoder, generator):
        assert list(row["seconds"]) == ["transformers", "fused", "frozen"]
        assert row["floor"] > 0
    assert list(generator["first word"]) == list(generator["seconds"])


@pytest.mark.usefixtures("ceilings_measured_once")
@pytest.mark.parametrize("name", ["encoder", "generator"])
def test_another_result_fails(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse = trifuse.fuse

    def broken(model: Any, **options: Any) -> Any:
        report = fuse(model, **options)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1
        return report

    monkeypatch.setattr(trifuse, "fuse", broken)
    assert one_request.main(["--quick", "--cases", f"{name}*"]) == 1
    assert "we differ from transformers" in capsys.readouterr().out


def test_work_of_a_word(small: list[Case]) -> None:
    """The operations of a further word are those of the decoder and of the logits."""
    model = one_request.build(GENERATOR)
    inputs = one_request.draw(GENERATOR, torch.float32, model.config)
    with torch.no_grad():
        one, two = (
            one_request._flops(lambda words=words: one_request._write(model, inputs, words))
            for words in (1, 2)
        )
    # Self-attention, attention to a memory, network, and logits of 50 words; torch's counter leaves
    # its attention on a CPU out.
    weights = 4 * 32 * 32 + 2 * 32 * 32 + 2 * 32 * 48 + 50 * 32
    assert two - one == 2 * weights
