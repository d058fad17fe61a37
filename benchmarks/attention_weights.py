"""Drawing what each head of a BERT layer attends to, a panel a head, with a table of shares.

The pretrained MiniLM-L6 of ``demo`` reads a sentence. A panel's rows are the attending words, and
its columns the words that they attend to; a row adds up to 1. The table gives the mean share of a
word's weight on itself, on its neighbours and on the marks [CLS] and [SEP] (Clark, Khandelwal, Levy
and Manning, "What Does BERT Look At? An Analysis of BERT's Attention", 2019), and the entropy of
its weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

import trifuse
from trifuse.benchmarks import command_line, demo, pictures
from trifuse.benchmarks.terminal import console, print_table
from trifuse.benchmarks.transformer import empty_table
from trifuse.models.bert import BertModel

SENTENCE = "The river rises in summer, because it rains more than in the other seasons."


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = parse(argv)
    try:
        directory = demo.model_directory()
    except FileNotFoundError as missing:
        console.print(str(missing), style="red", markup=False)
        return 1
    tokenizer = demo.load_tokenizer(directory)
    demo.warn_unknown(tokenizer, [arguments.sentence])
    encoding = tokenizer.encode(arguments.sentence)
    model = BertModel.from_pretrained(directory)
    trifuse.fuse(model)
    with torch.no_grad():
        output = model(torch.tensor([encoding.ids]), output_attentions=True)
    layers = len(output.attentions)
    number = arguments.layer
    if not 1 <= number <= layers:
        console.print(f"--layer: expected 1 to {layers}; got {number}", style="red", markup=False)
        return 2
    weights = output.attentions[number - 1][0]
    title = f"MiniLM-L6, layer {number} of {layers}"
    print_table(heads_table(weights, f"{title}: mean share of a word's weight on"))
    plot(weights, encoding.tokens, title, arguments.output)
    console.print(f"picture: {arguments.output}", markup=False)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.plain_parser("attention_weights", __doc__)
    parser.add_argument("sentence", nargs="?", default=SENTENCE)
    parser.add_argument("--layer", type=int, default=3, help="counted from 1; default: %(default)s")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("docs/attention_weights.png"),
        help="the picture; default: %(default)s",
    )
    return parser.parse_args(argv)


def shares(weights: Tensor) -> Tensor:
    """The figures of the table, from weights (H, L, L) to (H, 6).

    The rows of [CLS] and [SEP], the first and the last, are left out. A word's neighbours may be
    these marks.
    """
    words = weights[:, 1:-1]
    return torch.stack(
        [words.diagonal(offset, 1, 2).mean(-1) for offset in (1, 0, 2)]  # itself, previous, next
        + [words[..., place].mean(-1) for place in (0, -1)]
        + [torch.special.entr(words).sum(-1).mean(-1)],
        -1,
    )


def heads_table(weights: Tensor, title: str) -> Table:
    names = ("itself", "previous", "next", r"\[CLS]", r"\[SEP]", "entropy, nats")
    table = empty_table(title, names)
    for head, row in enumerate(shares(weights).tolist(), 1):
        table.add_row(f"head {head}", *(f"{share:.0%}" for share in row[:-1]), f"{row[-1]:.2f}")
    return table


def plot(weights: Tensor, words: Sequence[str], title: str, path: Path) -> None:
    """Write weights (H, L, L) as an image of one panel a head, words on both axes."""
    from matplotlib.figure import Figure

    heads = len(weights)
    columns = math.ceil(math.sqrt(heads))
    rows = math.ceil(heads / columns)
    size = 1.0 + 0.16 * len(words)  # inches a panel
    figure = Figure(figsize=(size * columns, size * rows + 0.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False)
    for head, axes in enumerate(grid.flat):
        if head >= heads:
            axes.set_visible(False)
            continue
        axes.imshow(weights[head].numpy(), cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"head {head + 1}", fontsize=8, loc="left")
        axes.set_xticks(range(len(words)), words, rotation=90)
        axes.set_yticks(range(len(words)), words)
        axes.tick_params(length=0, labelsize=6)
        axes.spines[:].set_visible(False)
    pictures.save(figure, path, dpi=130)
