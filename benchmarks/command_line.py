"""The options that every benchmark has."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from trifuse import backends


def default_threads() -> int:
    """Two, so that figures from different machines compare; one on a machine with one core."""
    return min(2, os.cpu_count() or 1)


def plain_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser without options."""
    return argparse.ArgumentParser(
        prog=f"python -m trifuse.benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parser(
    name: str,
    description: str | None,
    devices: Sequence[str] = ("cpu", "cuda"),
    plots: bool = True,
    cases: bool = True,
) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has.

    Args:
        name, description: of the command.
        devices: the choices of ``--device``.
        plots: whether there is a ``--plot``.
        cases: whether there is a ``--cases``, because the benchmark has several.
    """
    out = plain_parser(name, description)
    gpu = torch.cuda.is_available() and "cuda" in devices
    out.add_argument("--quick", action="store_true", help="a fraction of the rounds")
    if cases:
        out.add_argument(
            "--cases", nargs="+", metavar="NAME", help="only these; * and ? match anything"
        )
    out.add_argument("--device", choices=devices, default="cuda" if gpu else "cpu")
    out.add_argument("--backend", choices=("auto", *backends.ORDER), default="auto", help="ours")
    out.add_argument("--threads", type=int, default=default_threads(), help="default: %(default)s")
    out.add_argument("--json", type=Path, metavar="PATH", help="write all figures")
    if plots:
        plot = "write a picture (PNG, SVG or PDF)"
        out.add_argument("--plot", type=Path, metavar="PATH", help=plot)
    return out


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], picture: Path
) -> argparse.Namespace:
    """Parse the options. Without ``--plot`` a full run draws ``picture``, a quick one nothing."""
    options = parser.parse_args(argv)
    if options.plot is None and not options.quick:
        options.plot = picture
    return options


def add_count(
    to: argparse.ArgumentParser,
    option: str,
    default: int,
    of: str = "",
    least: int = 1,
    words: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Add an option that takes a whole number of at least ``least``, or a word with its value."""

    def count(text: str) -> Any:
        if text in words:
            return words[text]
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}")
        return value

    text = "; ".join(filter(None, (of, f"default: {default}")))
    to.add_argument(option, type=count, default=default, help=text)
