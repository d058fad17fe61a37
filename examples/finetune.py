"""Fine-tune a sentence encoder: the summary of a docstring is to find the rest of it.

    pip install . sentence-transformers    # in a checkout of trifuse, after torch
    python examples/finetune.py --save finetuned
    python examples/search.py --model finetuned "parse the arguments of a program"

The docstrings are those that ``examples/search.py`` searches. Each batch holds pairs of a summary
and the rest of its docstring, and the loss is the cross entropy of the summary's similarities to
all the rests in the batch. One docstring of five is held out, and shows how often a summary finds
its own rest among the held-out ones, before and after.

Texts of different lengths share a batch, and one line leaves out its padding, in training too:
``trifuse.fuse(model, unpad=True)``. The model has the same weights under the same names as before,
and is saved as one of sentence-transformers.
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.nn.functional as F
from search import documentation
from sentence_transformers import SentenceTransformer
from torch import Tensor

import trifuse

SCALE = 20.0  # of the similarities, which lie between -1 and 1


def pairs() -> list[tuple[str, str]]:
    """The first paragraph of each docstring that has several, and the rest."""
    different = dict.fromkeys(documentation().values())  # some names have the same one
    halves = (text.split("\n\n", maxsplit=1) for text in different)
    return [(half[0], half[1]) for half in halves if len(half) == 2]


def embed(model: SentenceTransformer, texts: list[str]) -> Tensor:
    """Embeddings with their gradients, of norm 1: (B, embedding_dim)."""
    return F.normalize(model(model.preprocess(texts))["sentence_embedding"], dim=-1)


def loss(model: SentenceTransformer, batch: list[tuple[str, str]]) -> Tensor:
    """The cross entropy of finding the rest of each docstring among all of the batch."""
    summaries, rests = (embed(model, list(texts)) for texts in zip(*batch, strict=True))
    return F.cross_entropy(SCALE * summaries @ rests.T, torch.arange(len(batch)))


def found(model: SentenceTransformer, held_out: list[tuple[str, str]]) -> float:
    """The share of summaries whose own rest is the most similar one."""
    summaries, rests = (
        model.encode(list(texts), convert_to_tensor=True) for texts in zip(*held_out, strict=True)
    )
    best = model.similarity(summaries, rests).argmax(1)
    return (best == torch.arange(len(best))).float().mean().item()


def main() -> None:
    """Train, and print what the model finds before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--save", help="a folder for the fine-tuned model")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="how many docstrings")
    parser.add_argument("--lr", type=float, default=2e-5)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = SentenceTransformer(options.model, device="cpu")
    report = trifuse.fuse(model, unpad=True)
    print(f"without padding: {', '.join(report.unpadded)}")

    every = pairs()
    held_out = every[::5]
    training = [pair for at, pair in enumerate(every) if at % 5]
    print(f"before: {found(model, held_out):.1%} of {len(held_out)} found")
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    for epoch in range(options.epochs):
        model.train()
        total = 0.0
        for rows in torch.randperm(len(training)).split(options.batch):
            step = loss(model, [training[row] for row in rows])
            optimizer.zero_grad()
            step.backward()
            optimizer.step()
            total += step.item() * len(rows)
        model.eval()
        print(f"epoch {epoch + 1}: loss {total / len(training):.3f}")
    print(f"after: {found(model, held_out):.1%} of {len(held_out)} found")
    if options.save:
        model.save(options.save)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of old modules
    main()
