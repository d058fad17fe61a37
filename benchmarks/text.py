"""Training data: the standard library's language reference and docstrings, and two puzzles.

The reference (``pydoc_data.topics``) is half a megabyte of English and Python that comes with every
Python. Language models read its bytes. The docstrings have six times as many words. The puzzles are
to reverse and to sort sequences of symbols, in batches of ragged lengths.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator, Set
from pathlib import Path
from pydoc_data import topics
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# Text -------------------------------------------------------------------------------------------

BYTES = 256  # the vocabulary of a model of bytes


class Split(NamedTuple):
    """Bytes for training and bytes for validation, uint8 (length,)."""

    train: Tensor
    validation: Tensor


def reference() -> Split:
    """The reference's paragraphs; every tenth is for validation.

    Topics quote each other at length. Each paragraph is taken once, so that none is in both halves.
    """
    paragraphs = list(
        dict.fromkeys(
            paragraph.strip("\n")
            for text in topics.topics.values()
            for paragraph in re.split(r"\n\s*\n", text)
            if paragraph.strip()
        )
    )
    held_out = paragraphs[9::10]
    del paragraphs[9::10]
    return Split(encode("\n\n".join(paragraphs)), encode("\n\n".join(held_out)))


def count_tokens(text: str) -> int:
    """The number of words and punctuation marks, about that of a model's tokens."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def encode(text: str) -> Tensor:
    """The bytes of a text in UTF-8, uint8 (length,)."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    """The text of bytes (length,); invalid UTF-8 shows as U+FFFD."""
    return bytes(tokens.tolist()).decode(errors="replace")


def windows(text: Tensor, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
    """Cut int64 (batch_size, length) out of a text, at random places."""
    starts = torch.randint(len(text) - length + 1, (batch_size, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def cover(text: Tensor, length: int) -> Tensor:
    """Cut a text into windows, int64 (batch, length), that overlap by one byte.

    So a model that predicts each window's bytes after the first predicts every byte of the text
    except the first. A tail that does not fill a window is left out.
    """
    return text.unfold(0, length, length - 1).long()


def docstrings() -> dict[str, list[str]]:
    """The paragraphs of each module's docstrings, in order, by the module's dotted name.

    Paragraphs of up to three words are left out.
    """
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
    found = {}
    for parts, groups in modules(Path(sysconfig.get_path("stdlib")), left_out):
        paragraphs = [each for group in groups for each in group if len(each.split()) > 3]
        if paragraphs:
            found[".".join(parts)] = paragraphs
    return found


def python_files(folder: Path, left_out: Set[str]) -> Iterator[Path]:
    """The Python files below a folder, in order, without the folders named in ``left_out``."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in left_out:
                yield from python_files(path, left_out)
        elif path.suffix == ".py":
            yield path


def modules(
    root: Path, left_out: Set[str]
) -> Iterator[tuple[tuple[str, ...], Iterator[list[str]]]]:
    """The modules below a folder: the parts of a name, and the paragraphs of each docstring.

    Modules and folders with the names in ``left_out``, and files that do not parse, are left out.
    """
    for path in python_files(root, left_out):
        if path.stem in left_out:
            continue
        parts = path.relative_to(root).with_suffix("").parts
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in old strings
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        yield parts, _paragraphs(tree)


def _paragraphs(tree: ast.Module) -> Iterator[list[str]]:
    """The paragraphs of each docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            yield re.split(r"\n\s*\n", docstring)


# Puzzles ----------------------------------------------------------------------------------------

PAD, BOS, EOS, SYMBOLS = 0, 1, 2, 3  # the ids of symbols start at SYMBOLS

Puzzle = Literal["reversal", "sorting"]


class Pairs(NamedTuple):
    """Ragged sources and their targets, padded with PAD at the end."""

    source: Tensor  # int64 (B, S), ending with EOS
    source_mask: Tensor  # bool (B, S), True where a token is real
    target: Tensor  # int64 (B, S + 1), the answer between BOS and EOS
    target_mask: Tensor  # bool (B, S + 1)


def pairs(
    puzzle: Puzzle,
    batch_size: int,
    generator: torch.Generator,
    *,
    symbols: int = 20,
    min_length: int = 3,
    max_length: int = 12,
) -> Pairs:
    """Random sequences of ``min_length`` to ``max_length`` symbols with their answers.

    The vocabulary has SYMBOLS + ``symbols`` entries.
    """
    lengths = torch.randint(min_length, max_length + 1, (batch_size, 1), generator=generator)
    places = torch.arange(max_length + 2)
    drawn = torch.randint(SYMBOLS, SYMBOLS + symbols, (batch_size, max_length), generator=generator)
    drawn = drawn.masked_fill(places[:max_length] >= lengths, PAD)
    source = torch.cat((drawn, torch.full_like(lengths, PAD)), 1).scatter(1, lengths, EOS)

    if puzzle == "reversal":
        backwards = lengths - 1 - places[:max_length]
        answer = drawn.gather(1, backwards.clamp(min=0)).masked_fill(backwards < 0, PAD)
    else:
        past_all = SYMBOLS + symbols
        ordered = drawn.masked_fill(drawn == PAD, past_all).sort(1).values
        answer = ordered.masked_fill(ordered == past_all, PAD)
    begin = torch.full_like(lengths, BOS)
    target = torch.cat((begin, answer, torch.full_like(lengths, PAD)), 1)
    target = target.scatter(1, lengths + 1, EOS)
    return Pairs(source, places[:-1] <= lengths, target, places <= lengths + 1)
