"""The ELMo comparison: both models train alike, and its counts are right."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics

import pytest
import torch
from model_sizes import TINY_ELMO
from torch.utils.flop_counter import FlopCounterMode

from trifuse.benchmarks import elmo
from trifuse.models.elmo import BiLMForPreTraining, ElmoConfig

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")


def tiny() -> ElmoConfig:
    return ElmoConfig(**TINY_ELMO)


def wide() -> ElmoConfig:
    return dataclasses.replace(tiny(), lstm_dim=512)


@pytest.fixture(scope="module")
def whole() -> elmo.Corpus:
    return elmo.read()


@pytest.fixture
def corpus(whole: elmo.Corpus) -> elmo.Corpus:
    """The three shortest sentences of every labelled topic, from each part."""
    parts = []
    for part in (whole.train, whole.validation):
        by_topic = [[x for x in part if x.label == n] for n in range(elmo.TOPICS)]
        parts.append([x for topic in by_topic for x in sorted(topic, key=_length)[:3]])
    return elmo.Corpus(*parts, whole.places)


def _length(sentence: elmo.Sentence) -> int:
    return len(sentence.words)


def test_sentences_are_split_and_each_is_once(whole):
    assert 4 <= len(whole.train) / len(whole.validation) < 5
    everything = [*whole.train, *whole.validation]
    assert len({tuple(sentence.words) for sentence in everything}) == len(everything)
    for part in (whole.train, whole.validation):
        assert {sentence.label for sentence in part} == {None, *range(elmo.TOPICS)}
        assert all(5 <= len(sentence.words) <= elmo.MAX_LENGTH for sentence in part)


def test_the_vocabulary_is_in_order_of_frequency(whole):
    words = [word for part in whole[:2] for sentence in part for word in sentence.words]
    assert set(whole.places.values()) == set(range(elmo.WORDS, elmo.VOCABULARY))
    counts = [words.count(word) for word in list(whole.places)[:200:20]]
    assert counts == sorted(counts, reverse=True)
    _, token_ids = elmo.encode(whole.validation, whole.places, 8)
    sizes = [len(sentence.words) for sentence in whole.validation]
    real = torch.cat([row[:size] for row, size in zip(token_ids, sizes, strict=True)])
    assert 0 < (real == elmo.UNKNOWN).double().mean() < 0.1
    assert ((real >= elmo.WORDS) | (real == elmo.UNKNOWN)).all()


def test_both_learn_alike(corpus):
    learnt = elmo.learn(corpus, tiny(), 40, "cpu", seeds=2)
    curves = learnt.curves
    assert curves.furthest("fused", "exact") <= max(2 * curves.furthest("eager", "exact"), 1e-5)
    for name in ("eager", "fused"):
        assert len(learnt.steps[name]) == 40
        for direction in range(2):
            assert learnt.trained[name][direction] < 0.9 * learnt.untrained[direction]
            assert learnt.steps[name][-1][direction] < learnt.steps[name][0][direction] * 0.9
    first, second = learnt.seeds
    assert first == learnt.trained["fused"]
    assert max(second) < 0.9 * min(learnt.untrained)
    assert abs(first.forward - second.forward) > 1e-3  # another seed's weights and batches
    (loss, (forward, backward)) = curves.eager.losses[0], learnt.steps["eager"][0]
    assert loss == pytest.approx((math.log(forward) + math.log(backward)) / 2, rel=1e-5)


def test_held_out_perplexity_counts_every_prediction_alike(corpus):
    task = elmo.pretraining(corpus, tiny(), [])
    torch.manual_seed(0)
    model = task.make(0.0).eval()
    together = elmo.held_out_perplexities(task, model, "cpu")
    totals, count = [0.0, 0.0], 0
    for sentence in corpus.validation:
        with torch.no_grad():
            losses = model(*elmo.encode([sentence], corpus.places, 8))
        count += len(sentence.words) + 1
        for direction in range(2):
            totals[direction] += (len(sentence.words) + 1) * losses[1 + direction].item()
    wanted = [math.exp(total / count) for total in totals]
    assert list(together) == pytest.approx(wanted, rel=1e-5)


def test_features_are_means_of_real_words(corpus):
    torch.manual_seed(0)
    bilm = BiLMForPreTraining(tiny(), 10, 0, 1).bilm.eval()
    found = elmo.features(bilm, corpus.train, "cpu")
    assert found.labels.tolist() == [sentence.label for sentence in corpus.train]
    for place, sentence in enumerate(corpus.train):
        with torch.no_grad():
            layers, _ = bilm(elmo.encode([sentence], corpus.places, 8)[0])
        torch.testing.assert_close(found.means[:, place, 0], layers[:, 0].mean(1))


def test_a_classifier_finds_the_layer_that_tells():
    """Only the second of three layers separates the topics."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(160) % elmo.TOPICS
    means = torch.randn(3, 160, 1, 12, generator=generator)
    means[1, :, 0] += 6 * torch.eye(elmo.TOPICS, 12)[labels]
    known = elmo.Features(means[:, :120], labels[:120])
    asked = elmo.Features(means[:, 120:], labels[120:])
    mixed, other = (elmo.classify(known, asked, slice(*x), 100, 0) for x in ((None,), (0, 1)))
    assert mixed.accuracy > 0.95
    assert max(mixed.weights) == mixed.weights[1] > 0.5
    assert sum(mixed.weights) == pytest.approx(1)
    assert other.accuracy < 0.4
    assert other.weights == [1.0]
    assert elmo.classify(known, asked, slice(None), 100, 0) == mixed
    assert elmo.classify(known, asked, slice(None), 100, 1) != mixed


def test_occurrences_are_compared_pairwise():
    torch.manual_seed(0)
    bilm = BiLMForPreTraining(tiny(), 10, 0, 1).bilm.eval()
    texts = (
        ["the", "type", "of", "it"],
        ["a", "type"],
        ["no"],
        ["the", "type", "of", "it", "type"],
        ["one", "no", "no"],
        ["any", "no", "no"],
    )
    sentences = [elmo.Sentence(words, None) for words in texts]
    found = elmo.occurrences(bilm, sentences, "type", "cpu")
    assert found is not None
    assert found.times == 3
    with torch.no_grad():
        vectors = [bilm(elmo.encode([sentences[n]], {}, 8)[0]).layers[:, 0, 1] for n in (0, 1, 3)]
    cosines = torch.stack(
        [torch.cosine_similarity(a, b, -1) for a, b in itertools.combinations(vectors, 2)]
    )
    assert found.means == pytest.approx(cosines.mean(0).tolist(), rel=1e-5)
    assert found.means[0] == pytest.approx(1)
    # Sentences 0 and 3 share the words around "type", so nearest and farthest skip that pair.
    others = sorted(cosines[[0, 2], -1].tolist())
    assert [found.farthest[0], found.nearest[0]] == pytest.approx(others, rel=1e-5)
    contexts = {found.nearest[1:], found.farthest[1:]}
    assert contexts == {("the type of it", "a type"), ("a type", "the type of it type")}
    assert elmo.occurrences(bilm, sentences[4:], "no", "cpu") is None
    assert elmo.occurrences(bilm, sentences, "absent", "cpu") is None


def test_operations_are_those_that_torch_counts(whole):
    config = tiny()
    model = BiLMForPreTraining(config, 10, 0, 1).eval()
    (sentence,) = elmo.sentences_to_time(whole, 1)
    char_ids, _ = elmo.encode([sentence], {}, 8)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.bilm(char_ids)
    tokens, wanted = len(sentence.words) + 2, counter.get_total_flops()
    assert elmo.operations(config, tokens, tokens) == pytest.approx(wanted, rel=1e-6)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.bilm.characters(char_ids)  # all words but the two marks
    wanted -= counter.get_total_flops()
    assert elmo.operations(config, tokens, 2) == pytest.approx(wanted, rel=1e-6)


def test_a_fused_model_that_differs_stops_the_run(corpus, monkeypatch):
    @torch.no_grad()
    def spoil(model):
        for parameter in model.parameters():
            parameter.mul_(1.01)

    monkeypatch.setattr(elmo.trifuse, "fuse", spoil)
    with pytest.raises(AssertionError, match="we differ from eager"):
        elmo.time_case(elmo.Case("tiny", tiny, 2), corpus, "cpu", 0.0, 1)


def test_tables_json_and_picture(tmp_path, capsys, monkeypatch, corpus):
    monkeypatch.setattr(elmo, "read", lambda: corpus)
    monkeypatch.setattr(elmo, "small", tiny)
    monkeypatch.setattr(elmo, "CASES", (elmo.Case("tiny, batch 3", tiny, 3, at_least=999.0),))
    monkeypatch.setattr(elmo, "LOOKED_AT", ("the", "nowhere"))
    memory = elmo.Memory("tiny, batch 3", 3 << 20, 2 << 20, 1 << 20, 1.25)
    monkeypatch.setattr(elmo, "measure_memory", lambda *arguments: memory)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    figures, picture = tmp_path / "a" / "figures.json", tmp_path / "b" / "picture.png"
    arguments = ["--quick", "--device", "cpu", "--json", str(figures), "--plot", str(picture)]
    assert elmo.main([*arguments, "--steps", "6"]) == 0

    printed = capsys.readouterr().out
    for words in (
        "inference",
        "training step",
        "999×",
        "fused, recompute",
        "1.25×",
        "without dropout, 6 steps from one seed",
        "perplexity a word",
        "fused, 2 seeds",
        "a learnt mix",
        "over seeds",
        "stopped early",
        "one word in different sentences",
        "nearest, and farthest",
    ):
        assert words in printed
    content = json.loads(figures.read_text())
    assert {len(losses) for losses in content["curves"]["losses"].values()} == {6}
    assert content["curves"]["fused_from_eager"] < 1e-4
    assert content["features_apart"] < 1e-4
    perplexity = content["held_out_perplexity"]
    assert perplexity["eager"]["forward"] < perplexity["untrained"]["forward"]
    assert perplexity["fused"]["backward"] < perplexity["untrained"]["backward"]
    assert {len(values) for values in content["perplexity"]["fused"].values()} == {6}
    by_seed = [seed["forward"] for seed in content["fused_held_out_perplexity_by_seed"]]
    assert by_seed[0] == perplexity["fused"]["forward"]
    mean, spread = statistics.mean(by_seed), statistics.stdev(by_seed)
    assert f"{mean:,.1f} ± {spread:,.1f}" in printed
    for readings in content["topics"].values():
        assert {len(seeds) for seeds in readings.values()} == {2}
        assert {len(seed["weights"]) for seed in readings["a learnt mix"]} == {3}
    assert [row["word"] for row in content["words"]] == ["the"]
    assert content["memory"] == dataclasses.asdict(memory)
    steps = [row["step"] for row in content["times"]]
    assert steps == ["inference", "training step"]
    assert content["times"][1]["work"] > 3 * content["times"][0]["work"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_memory_is_that_of_a_step(whole):
    """A step that saves less for its backward needs less memory."""
    case = elmo.Case("wide", wide, 24)
    gates = 4 * 24 * max(len(x.words) + 2 for x in whole.train[:24]) * 4 * 512 * 4
    least = [math.inf] * 3
    # Memory that malloc keeps can add to a reading, so the least of two counts if one is off.
    for _ in range(2):
        memory = elmo.measure_memory(case, whole, "cpu", "auto", 1)
        assert memory.time_of_recompute > 0
        least = list(map(min, least, (memory.eager, memory.fused, memory.recompute)))
        eager, fused, recompute = least
        # Each layer recomputes its own gates.
        if eager > fused > gates and fused - recompute > gates / 3:
            return
    pytest.fail(f"MiB: {[size / 2**20 for size in least]}, gates {gates / 2**20}")


def test_cases_are_chosen_by_name():
    with pytest.raises(SystemExit, match="published size, batch 16"):
        elmo.main(["--cases", "bogus"])


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--seeds", "1"], ["--training-seeds", "1"]]
)
def test_options_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        elmo.main(arguments)
    assert f"{arguments[0]}: expected at least" in capsys.readouterr().err
