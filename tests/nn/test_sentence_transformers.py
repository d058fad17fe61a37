"""A whole SentenceTransformer, fused by one line: embeddings, gradients and the way back."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import PADDED_SIZES, SPECIAL_TOKENS
from torch import Tensor, nn

import trifuse

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXTS = [
    "the window of a shop on the corner",
    "rain",
    "a train left the station before the rain began and came back at night with nobody in it",
    "nobody saw it",
]
# By model: its configuration, and what leaves padding out.
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Bert": (PADDED_SIZES, ["", ".encoder"]),
    "XLMRoberta": (PADDED_SIZES, ["", ".encoder"]),
    "MPNet": (PADDED_SIZES, [".encoder"]),
    "ModernBert": (PADDED_SIZES | SPECIAL_TOKENS | {"local_attention": 4}, [""]),
}


def tokenizer(texts: Iterable[str] = TEXTS) -> Any:
    """A tokenizer of the texts' words, the most frequent ones if there are more than fit."""
    counts = Counter(word for text in texts for word in re.findall(r"\w+", text))
    words = sorted(counts, key=lambda word: (-counts[word], word))[: PADDED_SIZES["vocab_size"] - 4]
    marks = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    vocabulary = {word: number for number, word in enumerate([*marks, *words])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_max_length=32,
        model_input_names=["input_ids", "attention_mask"],
    )


def encoder(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name][0], **options)
    return getattr(transformers, f"{name}Model")(config).eval()


class Transformer(nn.Module):
    """The first module of a SentenceTransformer: from a dict of features to the same, and more."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ("input_ids", "attention_mask")
        out = self.model(**{name: features[name] for name in names}, return_dict=True)
        return features | {"token_embeddings": out.last_hidden_state}


class Pooling(nn.Module):
    """The second: the mean of the real tokens."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        keep = features["attention_mask"][:, :, None].float()
        total = (features["token_embeddings"] * keep).sum(1)
        return features | {"sentence_embedding": total / keep.sum(1)}


def embed(model: nn.Module) -> Tensor:
    features = tokenizer()(TEXTS, padding=True, return_tensors="pt")
    return model(dict(features))["sentence_embedding"]


def gradients(model: nn.Module) -> Tensor:
    model.zero_grad()
    out = embed(model)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return grads / grads.abs().max()


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", MODELS)
def test_modules_in_a_row(name, warned):
    model = nn.Sequential(Transformer(encoder(name)), Pooling(), nn.Identity())
    wanted, grads = embed(model), gradients(model)
    report = trifuse.fuse(model, unpad=True)
    assert report.unpadded == [f"0.model{path}" for path in MODELS[name][1]]
    assert not report.padded
    assert not report.left
    close(embed(model), wanted)
    close(gradients(model), grads)
    report.revert()
    assert torch.equal(embed(model), wanted)
    assert not warned


def sentence_transformer(
    name: str, folder: Path, texts: Iterable[str] = TEXTS, **options: Any
) -> nn.Module:
    """A model of sentence_transformers, made from files as from the hub."""
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    encoder(name, **options).save_pretrained(folder)
    tokenizer(texts).save_pretrained(folder)
    first = modules.Transformer(str(folder))
    pooling = modules.Pooling(first.get_embedding_dimension())
    return library.SentenceTransformer(modules=[first, pooling, modules.Normalize()], device="cpu")


@pytest.mark.parametrize("name", MODELS)
def test_sentence_transformer(name, tmp_path, warned):
    model = sentence_transformer(name, tmp_path)
    wanted = model.encode(TEXTS, convert_to_tensor=True)
    report = trifuse.fuse(model, unpad=True)
    assert report.unpadded == [f"0.model{path}" for path in MODELS[name][1]]
    assert not report.padded
    close(model.encode(TEXTS, convert_to_tensor=True), wanted)
    report.revert()
    assert torch.equal(model.encode(TEXTS, convert_to_tensor=True), wanted)
    assert not warned


def test_the_example_finds_a_text_by_itself(tmp_path):
    model = sentence_transformer("Bert", tmp_path / "encoder")
    model.save(str(tmp_path / "model"))
    program = EXAMPLES / "search.py"
    question = inspect.getdoc(textwrap.dedent)
    command = [sys.executable, program, "--model", tmp_path / "model", "--best", "3", question]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    said, _, *rest = run.stdout.splitlines()
    found = rest[len(question.splitlines()) :]
    assert said == "without padding: 0.model, 0.model.encoder"
    scores = [float(line.split()[0]) for line in found]
    assert len(found) == 3
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 1.0


def test_the_example_fine_tunes_as_without_fuse(tmp_path, monkeypatch, capsys, packed, warned):
    """The losses are those without fuse; it finds more than before, and saves what it trained."""
    library = pytest.importorskip("sentence_transformers")
    monkeypatch.syspath_prepend(EXAMPLES)
    program = EXAMPLES / "finetune.py"
    texts = [text for pair in runpy.run_path(program)["pairs"]() for text in pair]
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = sentence_transformer("XLMRoberta", tmp_path / "encoder", texts, **dropouts)
    model.save(str(tmp_path / "model"))

    def printed(folder: str) -> list[str]:
        options = {"model": tmp_path / "model", "save": tmp_path / folder, "epochs": 4, "lr": 5e-3}
        flags = [str(each) for name, value in options.items() for each in (f"--{name}", value)]
        monkeypatch.setattr(sys, "argv", [str(program), *flags])
        runpy.run_path(program, run_name="__main__")
        return capsys.readouterr().out.splitlines()

    without, before, *epochs, after = printed("ours")
    assert without == "without padding: 0.model, 0.model.encoder"
    assert packed
    assert not warned
    packed.clear()
    monkeypatch.setattr(trifuse, "fuse", lambda model, unpad: trifuse.FuseReport())
    _, _, *theirs, _ = printed("theirs")
    assert not packed
    losses, wanted = ([float(line.split()[-1]) for line in each] for each in (epochs, theirs))
    assert len(losses) == 4
    assert losses == pytest.approx(wanted, abs=0.002)
    assert losses[-1] < losses[0] - 0.5
    found_before, found_after = (float(line.split()[1][:-1]) for line in (before, after))
    assert found_after > found_before
    ours, others = (
        library.SentenceTransformer(str(tmp_path / each)) for each in ("ours", "theirs")
    )
    assert type(ours[0].model) is transformers.XLMRobertaModel
    embeddings = [each.encode(TEXTS, convert_to_tensor=True) for each in (ours, others, model)]
    torch.testing.assert_close(*embeddings[:2], rtol=0, atol=1e-3)
    assert (embeddings[0] - embeddings[2]).abs().max() > 0.05  # training changed them
