"""The examples in docs/ run as they stand."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest
import torch

from trifuse import models

PAGE = Path(__file__).parents[1] / "docs/models.md"


def examples() -> list[tuple[str, str]]:
    """Returns the page's Python blocks, each with the heading that it stands under."""
    found, heading = [], ""
    for part in re.split(
        r"(^## [^\n]*$|^```python\n.*?^```$)",
        PAGE.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    ):
        if part.startswith("## "):
            heading = part[3:]
        elif part.startswith("```python\n"):
            found.append((heading, part.removeprefix("```python\n").removesuffix("```")))
    return found


def test_each_module_has_an_example():
    code = "\n".join(code for _, code in examples())
    for module in pkgutil.iter_modules(models.__path__):
        assert f"from trifuse.models.{module.name} import" in code, module.name


@pytest.mark.parametrize(("heading", "code"), examples())
def test_example_runs(heading: str, code: str):
    torch.manual_seed(0)
    exec(compile(code, f"{PAGE.name}: {heading}", "exec"), {"__name__": "example"})
