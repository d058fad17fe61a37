"""ELMo eager and fused: the published size timed, and a small one trained on the same text.

The text is the prose of the standard library's language reference, in sentences.

At the published size (cells of 4096, projected to 512, two layers in two directions, random
weights) a call reads a batch of ragged sentences, in evaluation and in a training step: forward,
loss and backward, without the optimizer, which is the same for both. The memory of such a step is
measured in separate processes, for the fused model also with ``recompute``.

The small model learns to predict the words of the reference in both directions, eager, fused and
eager in float64, on the same batches without dropout, so that the losses can be compared step by
step. Fused models of further seeds show how far the held-out perplexity varies. Then the models of
the first seed are frozen. A classifier learns the help topic of a sentence from the mean of its
words' vectors: from the words by themselves, from the top layer, and from a learnt mix of all
layers. Their spread is that of the classifier's seeds alone, because one ELMo serves all of them.
Last, occurrences of one word in different sentences are compared by their vectors.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import operator
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import ceilings, command_line, demo, machine, pictures, report, timing
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.cases import select
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.memory import peak_extra_memory
from trifuse.benchmarks.terminal import console, learnt_share, print_table, progress_bars
from trifuse.benchmarks.transformer import (
    Batch,
    Curves,
    Task,
    Trained,
    curves_table,
    empty_table,
    train,
)
from trifuse.models.elmo import (
    BiLM,
    BiLMForPreTraining,
    ElmoConfig,
    ScalarMix,
    batch_to_char_ids,
)

END, BEGIN, UNKNOWN, WORDS = range(4)  # the ids of words start at WORDS
VOCABULARY = 2000
MAX_LENGTH = 30  # words of a sentence
TOPICS = 8  # the topics with the most sentences are the classes
BATCH = 32
SMALL = "small"  # --cases: the training of the small model
MEMORY = "memory"  # --cases: the memory of a training step

# Text -------------------------------------------------------------------------------------------


class Sentence(NamedTuple):
    """The words of a sentence and the class of its topic, or None for all other topics."""

    words: list[str]
    label: int | None


class Corpus(NamedTuple):
    """The text in two parts, and the vocabulary."""

    train: list[Sentence]
    validation: list[Sentence]  # every fifth sentence of each topic
    places: dict[str, int]  # the ids of the commonest words, in order of falling frequency


def read() -> Corpus:
    """The reference's prose in sentences of at least five words, each once."""
    found: dict[tuple[str, ...], str] = {}
    for passage in demo.passages():
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z])", passage.text):
            words = re.findall(r"\w+|[^\w\s]", sentence)[:MAX_LENGTH]
            if len(words) >= 5:
                found.setdefault(tuple(words), passage.topic)
    by_topic: dict[str, list[list[str]]] = {}
    for key, topic in found.items():
        by_topic.setdefault(topic, []).append(list(key))
    counts = Counter(word for key in found for word in key)
    commonest = counts.most_common(VOCABULARY - WORDS)
    places = {word: WORDS + n for n, (word, _) in enumerate(commonest)}
    largest = sorted(by_topic, key=lambda topic: len(by_topic[topic]), reverse=True)[:TOPICS]
    corpus = Corpus([], [], places)
    for topic, texts in by_topic.items():
        label = largest.index(topic) if topic in largest else None
        for place, words in enumerate(texts):
            part = corpus.validation if place % 5 == 4 else corpus.train
            part.append(Sentence(words, label))
    return corpus


def encode(sentences: Sequence[Sentence], places: dict[str, int], max_characters: int) -> Batch:
    """Character ids (B, T, C) and the words' places in the vocabulary (B, T), both int64."""
    ids = [torch.tensor([places.get(word, UNKNOWN) for word in row.words]) for row in sentences]
    characters = batch_to_char_ids([row.words for row in sentences], max_characters)
    return characters, nn.utils.rnn.pad_sequence(ids, batch_first=True)


# The small model's training ---------------------------------------------------------------------


def small() -> ElmoConfig:
    # Not ReLU, where rounding decides whether a unit passes a gradient.
    return ElmoConfig(
        char_embedding_dim=8,
        filters=((1, 16), (2, 16), (3, 32), (4, 32), (5, 32)),
        n_highway=1,
        max_characters_per_token=20,
        activation="tanh",
        lstm_dim=256,
        projection_dim=64,
        dropout=0.0,
    )


class Perplexities(NamedTuple):
    """The perplexity per word in each direction."""

    forward: float
    backward: float


def pretraining(corpus: Corpus, config: ElmoConfig, seen: list[Perplexities]) -> Task:
    """The task of predicting words; each training step appends its perplexities to ``seen``."""

    def batch(sentences: Sequence[Sentence]) -> Batch:
        return encode(sentences, corpus.places, config.max_characters_per_token)

    def draw(generator: torch.Generator) -> Batch:
        rows = torch.randint(len(corpus.train), (BATCH,), generator=generator)
        return batch([corpus.train[row] for row in rows.tolist()])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        losses = model(*batch)
        if model.training:
            seen.append(
                Perplexities(losses.forward_perplexity.item(), losses.backward_perplexity.item())
            )
        return losses.loss

    def make(dropout: float) -> nn.Module:
        own = copy.copy(config)
        own.dropout = dropout
        return BiLMForPreTraining(own, WORDS + len(corpus.places), BEGIN, END)

    starts = range(0, len(corpus.validation), 2 * BATCH)
    held_out = [batch(corpus.validation[start : start + 2 * BATCH]) for start in starts]
    return Task(SMALL, make, draw, held_out, loss, learning_rate=4e-3)


@torch.no_grad()
def held_out_perplexities(task: Task, model: nn.Module, device: str) -> Perplexities:
    """The perplexities over all predictions in the held-out sentences."""
    totals, count = [0.0, 0.0], 0
    for char_ids, token_ids in task.held_out:
        losses = model(char_ids.to(device), token_ids.to(device))
        predictions = int((char_ids != 0).any(-1).sum()) + len(char_ids)
        for direction, mean in enumerate((losses.forward, losses.backward)):
            totals[direction] += predictions * mean.item()
        count += predictions
    return Perplexities(*(math.exp(total / count) for total in totals))


@dataclass(frozen=True)
class Learnt:
    """The small model's trainings, with its perplexities before, during and after."""

    curves: Curves
    untrained: Perplexities  # of the held-out sentences
    trained: dict[str, Perplexities]
    steps: dict[str, list[Perplexities]]  # of the training batches
    others: Sequence[Perplexities] = ()  # of the fused models of other seeds, held-out sentences

    @property
    def seeds(self) -> list[Perplexities]:
        """The held-out perplexities of the fused models of all seeds."""
        return [self.trained["fused"], *self.others]

    def record(self) -> dict[str, Any]:
        return {
            "curves": self.curves.record(),
            "held_out_perplexity": {
                "untrained": self.untrained._asdict(),
                **{name: values._asdict() for name, values in self.trained.items()},
            },
            "fused_held_out_perplexity_by_seed": [values._asdict() for values in self.seeds],
            "perplexity": {
                name: {"forward": [p.forward for p in values], "backward": [p[1] for p in values]}
                for name, values in self.steps.items()
            },
        }


def learn(
    corpus: Corpus,
    config: ElmoConfig,
    steps: int,
    device: str,
    seeds: int = 1,
    advance: Callable[[], object] = lambda: None,
) -> Learnt:
    """Train eager, fused and eager in float64 from seed 0, and fused from ``seeds`` − 1 others."""
    seen: dict[str, list[Perplexities]] = {"eager": [], "fused": [], "exact": []}
    tasks = {name: pretraining(corpus, config, values) for name, values in seen.items()}

    def run(name: str, **how: Any) -> Trained:
        return train(tasks[name], steps, device=device, advance=advance, **how)

    curves = Curves(
        SMALL,
        run("eager", fused=False),
        run("fused", fused=True),
        run("exact", fused=False, dtype=torch.float64),
    )
    task = pretraining(corpus, config, [])
    others = [
        train(task, steps, device=device, advance=advance, fused=True, seed=seed).model
        for seed in range(1, seeds)
    ]
    torch.manual_seed(0)  # as train does
    untrained = task.make(0.0).to(device).eval()
    return Learnt(
        curves,
        held_out_perplexities(task, untrained, device),
        {
            name: held_out_perplexities(task, getattr(curves, name).model, device)
            for name in ("eager", "fused")
        },
        {name: seen[name] for name in ("eager", "fused")},
        [held_out_perplexities(task, model, device) for model in others],
    )


# Topics -----------------------------------------------------------------------------------------


class Features(NamedTuple):
    """For each sentence with a class: the mean of its words' frozen vectors, by layer.

    The mix of these means is the mean of the mixed vectors.
    """

    means: Tensor  # (L + 1, N, 1, 2 · P), as if each sentence had a single word
    labels: Tensor  # int64 (N,)


@torch.no_grad()
def features(bilm: BiLM, sentences: Sequence[Sentence], device: str) -> Features:
    known = [sentence for sentence in sentences if sentence.label is not None]
    char_ids = batch_to_char_ids(
        [sentence.words for sentence in known], bilm.config.max_characters_per_token
    )
    means = []
    for part in char_ids.split(2 * BATCH):
        layers, mask = bilm(part.to(device))
        means.append((layers.sum(2, keepdim=True) / mask.sum(1)[:, None, None]).cpu())
    return Features(torch.cat(means, 1), torch.tensor([sentence.label for sentence in known]))


class TopicClassifier(nn.Module):
    """A linear layer on a mix of vectors."""

    def __init__(self, n_layers: int, features: int) -> None:
        super().__init__()
        self.mix = ScalarMix(n_layers)
        self.output = nn.Linear(features, TOPICS)

    def forward(self, means: Tensor) -> Tensor:
        """From (n_layers, N, 1, features) to logits (N, TOPICS)."""
        return self.output(self.mix(means).squeeze(1))


class Classified(NamedTuple):
    accuracy: float  # of the held-out sentences
    weights: list[float]  # of the layers in the mix


def classify(
    training: Features, held_out: Features, layers: slice, epochs: int, seed: int
) -> Classified:
    """Learn the topics from some of the layers; the seed decides weights and batches.

    Each feature is standardised over the training sentences.
    """
    torch.manual_seed(seed)
    mean, std = (
        statistic(training.means[layers], dim=1, keepdim=True)
        for statistic in (torch.mean, torch.std)
    )
    means, held_out_means = ((part.means[layers] - mean) / std for part in (training, held_out))
    model = TopicClassifier(len(means), means.shape[-1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(training.labels)).split(4 * BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(means[:, rows]), training.labels[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        right = model(held_out_means).argmax(-1) == held_out.labels
        return Classified(right.double().mean().item(), model.mix.weights.softmax(0).tolist())


READINGS = {
    "words by themselves": slice(0, 1),
    "the top layer": slice(-1, None),
    "a learnt mix": slice(None),
}

Topics = dict[str, dict[str, list[Classified]]]  # by model and reading, one for each seed


# Words in context -------------------------------------------------------------------------------

LOOKED_AT = ("for", "class", "name", "object", "with", "type")


class Occurrences(NamedTuple):
    """A word in different sentences, and the cosines between its vectors there."""

    word: str
    times: int
    means: list[float]  # over all pairs, of each layer
    # The top layer's cosine and both contexts, among pairs that have no neighbour in common.
    nearest: tuple[float, str, str]
    farthest: tuple[float, str, str]


@torch.no_grad()
def occurrences(
    bilm: BiLM, sentences: Sequence[Sentence], word: str, device: str
) -> Occurrences | None:
    """Compare a word's occurrences; None if no two of them have different neighbours."""
    found = [row.words for row in sentences if word in row.words]
    places = [row.index(word) for row in found]
    neighbours = [
        (row[place - 1] if place else "", row[place + 1] if place + 1 < len(row) else "")
        for row, place in zip(found, places, strict=True)
    ]
    apart = torch.tensor(
        [all(map(operator.ne, one, other)) for one, other in itertools.combinations(neighbours, 2)],
        dtype=torch.bool,
    )
    if not apart.any():
        return None
    char_ids = batch_to_char_ids(found, bilm.config.max_characters_per_token)
    parts = [bilm(part.to(device)).layers.cpu() for part in char_ids.split(2 * BATCH)]
    vectors = torch.cat(parts, 1)[:, torch.arange(len(found)), torch.tensor(places)]
    unit = F.normalize(vectors.double(), dim=-1)
    one, other = torch.triu_indices(len(found), len(found), 1)
    cosines = (unit @ unit.transpose(1, 2))[:, one, other]

    def context(row: int) -> str:
        return " ".join(found[row][max(0, places[row] - 4) : places[row] + 5])

    def pair(best: Tensor) -> tuple[float, str, str]:
        cosine = cosines[-1, best].item()
        return cosine, context(int(one[best])), context(int(other[best]))

    top = cosines[-1]
    return Occurrences(
        word,
        len(found),
        cosines.mean(1).tolist(),
        pair(top.masked_fill(~apart, -math.inf).argmax()),
        pair(top.masked_fill(~apart, math.inf).argmin()),
    )


# Speed ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and a batch of sentences; ``at_least`` is a target for eager's time over ours."""

    name: str
    config: Callable[[], ElmoConfig]
    batch_size: int
    at_least: float | None = None


CASES = (
    Case("published size, batch 1", ElmoConfig, 1),
    Case("published size, batch 16", ElmoConfig, 16, at_least=4.0),
)


def sentences_to_time(corpus: Corpus, batch_size: int) -> list[Sentence]:
    """Consecutive sentences of the text; a single one has the median length."""
    if batch_size > 1:
        return corpus.train[:batch_size]
    middle = statistics.median_low(len(sentence.words) for sentence in corpus.train)
    return [next(x for x in corpus.train if len(x.words) == middle)]


def model_to_time(case: Case, corpus: Corpus, device: str) -> BiLMForPreTraining:
    torch.manual_seed(0)
    vocabulary = WORDS + len(corpus.places)
    return BiLMForPreTraining(case.config(), vocabulary, BEGIN, END).to(device)


def batch_to_time(
    model: BiLMForPreTraining, corpus: Corpus, sentences: Sequence[Sentence]
) -> Batch:
    batch = encode(sentences, corpus.places, model.bilm.config.max_characters_per_token)
    return tuple(x.to(model.softmax.output.weight.device) for x in batch)


def training_step(model: BiLMForPreTraining, batch: Batch) -> Tensor:
    model.zero_grad()
    loss = model(*batch).loss
    loss.backward()
    return loss.detach()


def operations(config: ElmoConfig, tokens: int, words: int) -> float:
    """Operations of a biLM's forward: 2 for each use of a weight in a product.

    The LSTMs run once for each token, the character encoder once for each distinct word.
    """
    C, D, P = config.max_characters_per_token, config.char_embedding_dim, config.projection_dim
    filters = sum(count for _, count in config.filters)
    convolutions = sum(D * width * count * (C - width + 1) for width, count in config.filters)
    highways = config.n_highway * 2 * filters**2
    projected = filters * P if filters != P else 0
    recurrent = 8 * config.lstm_dim * P + (config.lstm_dim * P if config.lstm_dim > P else 0)
    layers = 2 * config.n_layers * recurrent
    return 2.0 * (words * (convolutions + highways + projected) + tokens * layers)


def time_case(
    case: Case, corpus: Corpus, device: str, seconds: float, min_rounds: int
) -> list[Result]:
    """Time inference and a training step."""
    eager = model_to_time(case, corpus, device)
    models = {"ours": copy.deepcopy(eager), "eager": eager}
    trifuse.fuse(models["ours"])
    config = eager.bilm.config
    sentences = sentences_to_time(corpus, case.batch_size)
    char_ids, token_ids = batch_to_time(eager, corpus, sentences)

    def read(model: BiLMForPreTraining) -> Tensor:
        with torch.no_grad():
            return model.bilm(char_ids).layers

    def step(model: BiLMForPreTraining) -> Tensor:
        return training_step(model, (char_ids, token_ids))

    for model in models.values():
        model.eval()
    check_agreement("eager", [read(models["ours"])], [read(eager)])
    check_agreement("eager", [step(models["ours"])], [step(eager)])

    real = sum(len(sentence.words) + 2 for sentence in sentences)  # with two marks each
    words = {word for sentence in sentences for word in sentence.words}
    forward = operations(config, real, len(words) + 2)
    # Each direction predicts every real word, and one mark of each sentence.
    predicted = 2 * (real - len(sentences))
    softmax = 2.0 * predicted * eager.softmax.output.weight.numel()
    shape = f"fp32, {len(sentences)} × at most {token_ids.shape[1]} words, {real} with marks"
    results = []
    for name, function, work in (
        ("inference", read, forward),
        ("training step", step, 3 * (forward + softmax)),
    ):
        for model in models.values():
            model.train(function is step)
        functions = {
            key: lambda model=model, function=function: function(model)
            for key, model in models.items()
        }
        timings = timing.alternate(functions, device=device, seconds=seconds, min_rounds=min_rounds)
        results.append(
            Result(
                case=case.name,
                step=name,
                shape=shape if function is read else f"{shape}, dropout {config.dropout}",
                ours=timings.pop("ours"),
                peers=timings,
                refused={},
                work=work,
                ceiling=ceilings.matrix_rate(torch.float32, device=device),
                unit="FLOP",
                at_least=case.at_least,
            )
        )
    return results


# Memory -----------------------------------------------------------------------------------------


def set_recompute(model: nn.Module, recompute: bool) -> None:
    for module in model.modules():
        if isinstance(module, trifuse.nn.ProjectedLSTM):
            module.recompute = recompute


def prepare_memory(
    who: str, case: Case, device: str, backend: str
) -> Callable[[], Sequence[Tensor]]:
    """Prepare a step for :func:`peak_extra_memory`, which calls this in a fresh process."""
    # Results placed in cached free memory would not count towards the peak.
    os.environ["TRIFUSE_CPU_CACHE_MIB"] = "0"
    corpus = read()
    model = model_to_time(case, corpus, device).train()
    if who != "eager":
        trifuse.fuse(model)
    set_recompute(model, who == "recompute")

    def step(sentences: Sequence[Sentence]) -> Sequence[Tensor]:
        with trifuse.backend(backend):
            loss = model(*batch_to_time(model, corpus, sentences)).loss
            loss.backward()
        return [loss.detach()]

    step([Sentence(["once"], None)])  # allocates the gradients, which the measured step adds to
    return functools.partial(step, sentences_to_time(corpus, case.batch_size))


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a training step beyond the weights and the gradients that it adds to.

    ``time_of_recompute`` is the time of a step with ``recompute`` over that of one without.
    """

    case: str
    eager: int
    fused: int
    recompute: int
    time_of_recompute: float


def measure_memory(
    case: Case, corpus: Corpus, device: str, backend: str, min_rounds: int
) -> Memory:
    peaks = {
        who: peak_extra_memory(prepare_memory, who, case, device, backend)
        for who in ("eager", "fused", "recompute")
    }
    model = model_to_time(case, corpus, device).train()
    trifuse.fuse(model)
    batch = batch_to_time(model, corpus, sentences_to_time(corpus, case.batch_size))

    def step(recompute: bool) -> None:
        set_recompute(model, recompute)
        training_step(model, batch)

    functions = {str(recompute): functools.partial(step, recompute) for recompute in (False, True)}
    timings = timing.alternate(functions, device=device, seconds=0.0, min_rounds=min_rounds)
    pairs = zip(timings["True"].seconds, timings["False"].seconds, strict=True)
    return Memory(case.name, **peaks, time_of_recompute=statistics.median(a / b for a, b in pairs))


# Display ----------------------------------------------------------------------------------------


def memory_table(memory: Memory) -> Table:
    table = empty_table(
        "training step: peak memory beyond weights and gradients, MiB",
        ("eager", "fused", "fused, recompute", "time of recompute"),
    )
    sizes = (memory.eager, memory.fused, memory.recompute)
    time = f"{memory.time_of_recompute:.2f}×"
    table.add_row(memory.case, *(f"{size / 2**20:,.0f}" for size in sizes), time)
    return table


def perplexity_table(learnt: Learnt) -> Table:
    """One seed before and after training, and the mean ± standard deviation of all fused models."""
    table = empty_table("perplexity a word, held-out sentences", ("forwards", "backwards"))
    for name, values in (("untrained", learnt.untrained), *learnt.trained.items()):
        table.add_row(name, *(f"{value:,.1f}" for value in values))
    spread = (
        f"{statistics.mean(values):,.1f} ± {statistics.stdev(values):,.1f}"
        for values in zip(*learnt.seeds, strict=True)
    )
    table.add_row(f"fused, {len(learnt.seeds)} seeds", *spread)
    return table


def topics_table(topics: Topics, chance: float, sentences: int, early: bool) -> Table:
    table = empty_table(
        f"topics of {sentences} held-out sentences classified correctly ({TOPICS} topics; "
        f"commonest {chance:.1%}), mean ± standard deviation over seeds",
        (*READINGS, "weights of the mix"),
    )
    for model, readings in topics.items():
        accuracies = ([seed.accuracy for seed in readings[name]] for name in READINGS)
        columns = zip(*(seed.weights for seed in readings["a learnt mix"]), strict=True)
        table.add_row(
            model,
            *(learnt_share(x, early) for x in accuracies),
            " ".join(f"{statistics.mean(column):.2f}" for column in columns),
        )
    return table


def words_table(words: Sequence[Occurrences]) -> Table:
    layers = len(words[0].means)
    table = empty_table(
        "one word in different sentences: cosines of its vectors",
        ("sentences", "by itself", *(f"layer {n}" for n in range(1, layers)), "top layer"),
    )
    table.add_column("nearest, and farthest")
    for row in words:
        ends = [f"{cosine:.2f}" for cosine, _, _ in (row.nearest, row.farthest)]
        contexts = [
            f"{one}  [dim]|[/dim]  {other}" for _, one, other in (row.nearest, row.farthest)
        ]
        means = (f"{mean:.2f}" for mean in row.means)
        table.add_row(row.word, str(row.times), *means, "\n".join(ends), "\n".join(contexts))
    return table


def plot(path: Path, learnt: Learnt, topics: Topics, caption: str) -> None:
    """Draw losses, perplexities, weights of the mix, and accuracies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 3.4), layout="constrained")
    figure.suptitle("a small ELMo, eager and fused", x=0.01, ha="left", fontweight="bold")
    pictures.add_caption(figure, caption)
    loss, perplexity, mix, accuracy = figure.subplots(1, 4)
    colours = {"eager": "#b8bec7", "fused": "#d1603d"}
    widths = {"eager": 4, "fused": 1}

    for name, colour in colours.items():
        losses = getattr(learnt.curves, name).losses
        loss.plot(losses, color=colour, linewidth=widths[name], label=name)
    loss.set_title("training loss", fontsize=9, loc="left")

    styles = {"forward": "-", "backward": ":"}
    for name, colour in colours.items():
        for direction, style in styles.items():
            values = [getattr(step, direction) for step in learnt.steps[name]]
            perplexity.semilogy(
                _smooth(values),
                style,
                color=colour,
                linewidth=widths[name],
                label=f"{name}, {direction}s",
            )
    perplexity.set_title("perplexity a word, training", fontsize=9, loc="left")
    for axes in (loss, perplexity):
        axes.set_xlabel("step", fontsize=8)
        axes.legend(frameon=False, fontsize=7)

    for place, (name, readings) in enumerate(topics.items()):
        by_layer = list(zip(*(seed.weights for seed in readings["a learnt mix"]), strict=True))
        for axes, columns in (
            (mix, by_layer),
            (accuracy, [[100 * seed.accuracy for seed in readings[key]] for key in READINGS]),
        ):
            x = [n + 0.4 * (place - 0.5) for n in range(len(columns))]
            axes.bar(x, list(map(statistics.mean, columns)), 0.38, color=colours[name], label=name)
            for at, column in zip(x, columns, strict=True):
                axes.plot([at] * len(column), column, ".", color="#333333", markersize=3)
    names = ["by itself", *(f"layer {n}" for n in range(1, len(by_layer)))]
    mix.set_xticks(range(len(names)), names)
    mix.set_title("learnt weights of the mix", fontsize=9, loc="left")
    accuracy.set_xticks(range(len(READINGS)), [name.replace(" by ", "\nby ") for name in READINGS])
    accuracy.set_title("topics classified correctly, held-out, %", fontsize=9, loc="left")
    for axes in (loss, perplexity, mix, accuracy):
        axes.tick_params(which="both", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eeeeee", axis="y")
        axes.set_axisbelow(True)
    pictures.save(figure, path)


def _smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Geometric means over the last ``window`` steps, since batches differ."""
    logs = [math.log(value) for value in values]
    return [
        math.exp(statistics.fmean(logs[max(0, end - window) : end]))
        for end in range(1, len(logs) + 1)
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("elmo", __doc__)
    command_line.add_count(parser, "--steps", 200, "of training")
    command_line.add_count(parser, "--training-seeds", 3, "of the fused model", least=2)
    command_line.add_count(parser, "--seeds", 5, "to classify", least=2)
    options = command_line.parse(parser, argv, Path("docs/elmo.png"))
    if options.quick:
        options.steps, options.seeds = min(options.steps, 20), min(options.seeds, 2)
        options.training_seeds = 2
    return options


def main(argv: Sequence[str]) -> int:
    """Time, train, classify and show."""
    options = parse(argv)
    device = options.device
    torch.set_num_threads(options.threads)
    chosen = select([*(case.name for case in CASES), MEMORY, SMALL], str, options.cases)
    cases = [case for case in CASES if case.name in chosen]
    facts = machine.facts(device)
    caption = machine.describe(facts)
    console.print(caption, soft_wrap=True, markup=False)
    corpus = read()
    content: dict[str, Any] = {"machine": facts, "times": []}

    with trifuse.backend(options.backend), progress_bars() as progress:
        bar = progress.add_task("timing", total=len(cases), visible=bool(cases))
        times = []
        for case in cases:
            seconds, rounds = (0.6, 2) if options.quick else (8.0, 5)
            times += time_case(case, corpus, device, seconds, rounds)
            progress.advance(bar)
        if times:
            print_table(report.table("ELMo", times))
            content["times"] = [result.record() for result in times]
        if MEMORY in chosen:
            rounds = 2 if options.quick else 5
            memory = measure_memory(CASES[-1], corpus, device, options.backend, rounds)
            print_table(memory_table(memory))
            content["memory"] = asdict(memory)
        if SMALL in chosen:
            content |= _small(corpus, options, caption, progress)
    if options.json is not None:
        report.write_json(options.json, content)
    return 0


def _small(
    corpus: Corpus, options: argparse.Namespace, caption: str, progress: Progress
) -> dict[str, Any]:
    """Train, classify and compare; print and plot the results, and return them for the JSON."""
    device = options.device
    seeds = options.training_seeds
    bar = progress.add_task("training", total=(2 + seeds) * options.steps)
    learnt = learn(
        corpus, small(), options.steps, device, seeds, advance=lambda: progress.advance(bar)
    )
    bilms: dict[str, BiLM] = {}
    for name in learnt.trained:
        model = getattr(learnt.curves, name).model
        assert isinstance(model, BiLMForPreTraining)
        bilms[name] = model.bilm
    sets = {
        name: [features(bilm, part, device) for part in (corpus.train, corpus.validation)]
        for name, bilm in bilms.items()
    }
    bar = progress.add_task("classifying", total=len(sets) * len(READINGS) * options.seeds)
    topics: Topics = {name: {key: [] for key in READINGS} for name in sets}
    for name, (training, held_out) in sets.items():
        for key, layers in READINGS.items():
            for seed in range(options.seeds):
                epochs = 2 if options.quick else 60
                topics[name][key].append(classify(training, held_out, layers, epochs, seed))
                progress.advance(bar)
    everything = [*corpus.train, *corpus.validation]
    looked_at = [occurrences(bilms["fused"], everything, word, device) for word in LOOKED_AT]
    words = [row for row in looked_at if row is not None]

    labels = sets["eager"][1].labels
    chance = labels.bincount().max().item() / len(labels)
    apart = max(
        (eager.means - fused.means).abs().max().item()
        for eager, fused in zip(sets["eager"], sets["fused"], strict=True)
    )
    print_table(curves_table([learnt.curves]))
    print_table(perplexity_table(learnt))
    print_table(topics_table(topics, chance, len(labels), options.quick))
    console.print(f"largest difference of the frozen features: {apart:.1e}\n")
    if words:
        print_table(words_table(words))
    if options.plot is not None:
        plot(options.plot, learnt, topics, caption.partition("\n")[0])
        console.print(f"wrote {options.plot}", markup=False)
    return {
        **learnt.record(),
        "topics": {
            name: {key: [seed._asdict() for seed in seeds] for key, seeds in readings.items()}
            for name, readings in topics.items()
        },
        "commonest_topic": chance,
        "features_apart": apart,
        "words": [row._asdict() for row in words],
    }
