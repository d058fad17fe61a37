"""The programs of docs/distributed.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

from processes import check

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def _programs() -> tuple[str, list[tuple[str, str]]]:
    """Returns what all programs begin with, and each program with its name."""
    head, *programs = re.split(r"^```python\n", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    codes = [code.partition("\n```")[0] for code in (head, *programs)]
    return codes[0], [(f"program_{i}_of_the_page", code) for i, code in enumerate(codes[1:], 1)]


def _run(name: str, code: str) -> None:
    import torch.distributed as dist

    given: dict[str, Any] = {"__name__": "program"}
    with mock.patch.object(dist, "init_process_group"):  # the tests have joined the processes
        exec(compile(_HEAD, f"{PAGE.name}, head", "exec"), given)
    exec(compile(code, f"{PAGE.name}, {name}", "exec"), given)


def _add(name: str, code: str) -> None:
    def program() -> None:
        _run(name, code)

    program.__name__ = name
    check(program)


_HEAD, _PROGRAMS = _programs()
assert "init_process_group" in _HEAD
assert len(_PROGRAMS) >= 7
for _name, _code in _PROGRAMS:
    _add(_name, _code)
