"""Search the documentation of Python's standard library by meaning.

    pip install . sentence-transformers    # in a checkout of trifuse, after torch
    python examples/search.py "parse the arguments of a program"
    python examples/search.py --model path/or/name --best 3 "wait until a thread ends"

Texts of different lengths share a batch, so much of a batch is padding. One line of this program
leaves it out: ``trifuse.fuse(model, unpad=True)``. The embeddings stay the same, to rounding.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import warnings

import torch
from sentence_transformers import SentenceTransformer

import trifuse

MODULES = (
    "argparse asyncio bisect calendar csv difflib fractions glob gzip heapq json logging queue \
random sched shutil socket statistics string subprocess tempfile textwrap threading zipfile"
)


def documentation() -> dict[str, str]:
    """The docstrings of the public functions and classes of some modules, by their names."""
    texts = {}
    for name in MODULES.split():
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", dir(module)):
            documented = getattr(module, attribute, None)
            text = inspect.getdoc(documented)
            if text and (inspect.isroutine(documented) or inspect.isclass(documented)):
                texts[f"{name}.{attribute}"] = text
    return texts


def main() -> None:
    """Embed all texts, and print those nearest to each question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--best", type=int, default=5, help="how many texts to print")
    options = parser.parse_args()

    model = SentenceTransformer(options.model, device="cpu")
    report = trifuse.fuse(model, unpad=True)
    print(f"without padding: {', '.join(report.unpadded)}")

    texts = documentation()
    embeddings = model.encode(list(texts.values()), convert_to_tensor=True)
    for question in options.questions:
        scores = model.similarity(model.encode(question, convert_to_tensor=True), embeddings)[0]
        print(f"\n{question}")
        for score, at in zip(*torch.topk(scores, options.best), strict=True):
            name = list(texts)[int(at)]
            print(f"  {score:.3f}  {name}: {texts[name].splitlines()[0]}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of old modules
    main()
