"""The benchmark of torch.compile counts, compares and times what it claims to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from trifuse.benchmarks import compile as benchmark
from trifuse.compiler import RewriteReport

SMALL = benchmark.Sizes(width=16, heads=2, layers=1, batch=2, length=5)


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both backends run the graphs as they are: Inductor takes minutes for these models."""

    def compile_without_inductor(model, *, backend):
        if backend == "trifuse":

            def backend(graph, inputs):
                benchmark.rewrite(graph)
                return graph

        elif backend == "inductor":
            backend = "eager"
        return compiler(model, backend=backend)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", compile_without_inductor)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


# The attentions and the norms of a model of one layer; of Swin's four stages of one layer.
COUNTS = {
    "nn.TransformerEncoder": (1, 2),
    "nn.Transformer": (3, 7),
    "BERT, written out": (1, 2),
    "BERT, SDPA": (1, 2),
    "GPT, written out": (1, 3),
    "Llama, written out": (1, 3),
    "timm ViT": (1, 3),
    "timm DeiT 3": (1, 3),
    "timm EVA-02": (1, 4),  # one in its gated feed-forward network
    "timm Swin": (4, 13),
    "torchvision ViT": (1, 3),
    "torchvision Swin": (4, 13),
    "x-transformers": (1, 3),
}


@pytest.mark.parametrize("model", benchmark.MODELS)
def test_every_attention_and_norm_is_counted(model: str) -> None:
    if (reason := benchmark.missing(model)) is not None:
        pytest.skip(reason)
    case = benchmark.Case(model, "forward + backward", SMALL)
    outcome = benchmark.run(case, 0.01)
    assert outcome.replaced == dict(zip(("attention", "norm"), COUNTS[model], strict=True))
    assert outcome.left == {"attention": 0, "norm": 0}
    assert set(outcome.timings) == {"trifuse", "inductor", "eager"}


def test_command_writes_its_table_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = benchmark.Case("Llama, written out", "forward", SMALL)
    monkeypatch.setattr(benchmark, "CASES", [case])
    path = tmp_path / "figures.json"
    assert benchmark.main(["--quick", "--json", str(path)]) == 0
    assert "1 of 1" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["times"]
    assert row["case"] == "Llama, written out, forward"
    assert row["ratio"] == row["seconds"]["inductor"] / row["seconds"]["trifuse"]


def test_models_without_their_library_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    cases = [benchmark.Case(model, "forward", SMALL) for model in ("timm ViT", "GPT, written out")]
    monkeypatch.setattr(benchmark, "CASES", cases)
    assert benchmark.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "timm is not installed" in printed
    assert "timm ViT" not in printed
    assert "GPT, written out" in printed


def test_models_that_differ_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = benchmark.Case("BERT, SDPA", "forward", SMALL)
    monkeypatch.setattr(benchmark, "CASES", [case])

    def wrong(graph):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        with graph.graph.inserting_before(output):
            output.args = ((graph.graph.call_method("neg", output.args[0][:1]),),)
        graph.recompile()
        return RewriteReport()

    monkeypatch.setattr(benchmark, "rewrite", wrong)
    assert benchmark.main(["--quick"]) == 1
    assert "we are off by" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["BERT, SDPA", "nn.Transformer"])
def test_float64_decides_where_both_differ(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    def differ(*results: object) -> None:
        raise AssertionError

    monkeypatch.setattr(benchmark, "check_agreement", differ)
    outcome = benchmark.run(benchmark.Case(model, "forward + backward", SMALL), 0.01)
    assert set(outcome.timings) == {"trifuse", "inductor", "eager"}
