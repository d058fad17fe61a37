"""The benchmark of generation, on models of toy size."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trifuse.benchmarks import generation
from trifuse.benchmarks.generation import Case, Outcome, Sizes, Words

pytest.importorskip("transformers")

SMALL = {
    "GPT-2": Sizes(2, 16, 2, 2, 32, 50, gated=False),
    "Llama": Sizes(2, 16, 4, 2, 32, 50, gated=True),
}


@pytest.fixture(autouse=True)
def _toy_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def in_this_process(
        names: Sequence[str], start: Callable[..., None], *arguments: Any
    ) -> Iterator[dict[str, Callable[..., Any]]]:
        def call(name: str, function: Callable[..., Any], *job: Any) -> Any:
            start(name, *arguments)
            return function(*job)

        yield {name: lambda *job, name=name: call(name, *job) for name in names}

    monkeypatch.setattr(generation, "MODELS", SMALL)
    monkeypatch.setattr(generation, "WORDS", dict.fromkeys(SMALL, Words(5, 3)))
    monkeypatch.setattr(generation.processes, "each_in_a_process", in_this_process)


@pytest.mark.parametrize("model", SMALL)
def test_all_engines_write_the_same_words(model: str, tmp_path: Path) -> None:
    case = Case(model, torch.float32, 3)
    outcome = generation.run(case, tmp_path, quick=True)
    assert set(outcome.prompt) == set(outcome.step) == set(generation.names(case, False))
    assert {"transformers", "eager", *generation.OURS} <= set(outcome.prompt)


def test_eager_llama_has_the_eager_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    generation.write_weights("Llama", SMALL["Llama"], tmp_path)
    load, formulas = transformers.AutoModelForCausalLM.from_pretrained, []

    def recorded(*args: Any, **options: Any) -> Any:
        formulas.append(options["attn_implementation"])
        return load(*args, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", recorded)
    for name in ("transformers", "eager", "fused"):
        generation.load(name, "Llama", tmp_path, torch.float32)
    assert formulas == ["sdpa", "eager", "sdpa"]


def test_other_words_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, *_: Any) -> generation.Generator:
        return lambda prompt, words: torch.full((len(prompt), words), int(name == "fused"))

    monkeypatch.setattr(generation, "load", load)
    with pytest.raises(AssertionError, match=r"^fused writes other words than transformers$"):
        generation.run(Case("Llama", torch.float32, 1), tmp_path, quick=True)
    generation.run(Case("Llama", torch.bfloat16, 1), tmp_path, quick=True)


def test_weights_and_operations_are_those_of_the_model(tmp_path: Path) -> None:
    import transformers

    for model, sizes in SMALL.items():
        generation.write_weights(model, sizes, tmp_path / model)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / model)
        matrices = [
            parameter.numel()
            for name, parameter in theirs.named_parameters()
            if parameter.dim() == 2 and not any(x in name for x in ("wte", "wpe", "embed", "head"))
        ]
        assert sum(matrices) == sizes.layers * sizes.layer_weights
        read = sizes.bytes(2, 7, 4)
        cache = 2 * 2 * sizes.layers * sizes.key_heads * 7 * (sizes.hidden // sizes.heads)
        assert read == 4 * (sum(matrices) + sizes.hidden * sizes.vocabulary + cache)
        # Words one by one take the operations of all at once, but for the logits of each.
        steps = sum(sizes.flops(2, past, 1) for past in range(5))
        assert steps == sizes.flops(2, 0, 5) + 4 * 2 * 2 * sizes.hidden * sizes.vocabulary


def test_figures_follow_from_the_times() -> None:
    sizes = SMALL["Llama"]
    case = Case("Llama", torch.float32, 2)
    flops, read = sizes.flops(2, 0, 5), sizes.bytes(2, 6, 4)
    seconds = {"transformers": 4.0, "fused": 2.0}
    outcome = Outcome(case, sizes, seconds, {"transformers": 3.0, "fused": 1.0}, read, flops)
    assert outcome.rates("fused") == (5.0, 2.0)
    assert outcome.of_ceiling("fused") == (0.5, 1.0)
    against = generation.table(outcome).columns[-2]
    assert list(against.cells) == ["", "2.00×, 3.00×"]
    assert outcome.record()["engines"]["fused"]["fractions of the ceilings"] == (0.5, 1.0)


def test_command_prints_the_table_and_writes_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "generation.json"
    arguments = ["--quick", "--threads", "1", "--cases", "Llama, fp32*1", "--json", str(path)]
    assert generation.main(arguments) == 0
    assert "words/s" in capsys.readouterr().out
    (found,) = json.loads(path.read_text())["times"]
    assert found["case"] == "Llama, fp32, batch 1"
    assert {"transformers", *generation.OURS} <= found["engines"].keys()


def test_a_table_appears_before_the_next_case_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = []

    def run(case: Case, *_: Any) -> Outcome:
        printed.append(capsys.readouterr().out)
        return Outcome(case, SMALL[case.model], {"fused": 1.0}, {"fused": 1.0}, 1.0, 1.0)

    monkeypatch.setattr(generation, "run", run)
    assert generation.main(["--quick"]) == 0
    names = ["GPT-2, fp32, batch 1", "GPT-2, bf16, batch 1", "Llama, fp32, batch 1"]
    shown = [[name in text for name in names] for text in printed]
    assert shown == [
        [False, False, False],
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]


@pytest.mark.parametrize(
    ("seconds", "quick", "rounds"), [(0.0, False, 3), (1e9, False, 5), (1e9, True, 1)]
)
def test_slow_cases_have_fewer_rounds(
    seconds: float, quick: bool, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def time(prompt: torch.Tensor, new: int) -> tuple[float, float]:
        timed.append(prompt.shape)
        return 1.0, 1.0

    monkeypatch.setattr(generation, "_time", time)
    monkeypatch.setattr(generation, "SECONDS", seconds)
    case = Case("Llama", torch.bfloat16, 1)
    generation.run(case, tmp_path, quick)
    assert len(timed) == rounds * len(generation.names(case, False))


def test_torch_compile_takes_part_once_for_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def names(case: Case, compiled: bool) -> tuple[str, ...]:
        asked.append((case.name, compiled))
        raise InterruptedError

    monkeypatch.setattr(generation, "names", names)
    for case in generation.CASES:
        for quick in (False, True):
            with pytest.raises(InterruptedError):
                generation.run(case, tmp_path, quick)
    wanted = [("GPT-2, fp32, batch 1", True), ("Llama, fp32, batch 1", True)]
    assert [each for each in asked if each[1]] == wanted
    assert len(asked) == 16
