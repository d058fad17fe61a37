"""The examples in docs/ run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = re.findall(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```$",
    (DOCS / "models.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)


def test_each_model_has_an_example():
    modules = {"seq2seq", "transformer", "bert", "elmo", "decoding"}
    assert modules == {
        m for m in modules if any(f"models.{m} import" in code for _, code in EXAMPLES)
    }
    assert len(EXAMPLES) == (DOCS / "models.md").read_text(encoding="utf-8").count("```python")


@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_example_runs(code: str):
    torch.manual_seed(0)
    exec(compile(code, str(DOCS / "models.md"), "exec"), {"__name__": "example"})
