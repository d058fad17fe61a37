"""The examples in README.md, in docs/ and in docstrings run as they stand."""

from __future__ import annotations

import doctest
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import trifuse
import trifuse.compiler
from trifuse import models, reference

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "docs/models.md"
# tests/distributed runs the programs of docs/distributed.md, in several processes.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "distributed"),
]


def examples(page: Path) -> list[tuple[str, str]]:
    """Returns the page's Python blocks, each with the heading that it stands under."""
    found, heading = [], ""
    for part in re.split(
        r"(^## [^\n]*$|^```python\n.*?^```$)",
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    ):
        if part.startswith("## "):
            heading = part[3:]
        elif part.startswith("```python\n"):
            found.append((heading, part.removeprefix("```python\n").removesuffix("```")))
    return found


def public() -> dict[str, Any]:
    """Returns the public functions and classes by name."""
    spaces = (trifuse, trifuse.compiler, trifuse.nn)
    return {
        f"{space.__name__}.{name}": getattr(space, name)
        for space in spaces
        for name in space.__all__
        if callable(getattr(space, name))
    }


def docstring_examples(name: str) -> list[doctest.DocTest]:
    function = inspect.unwrap(public()[name])
    found = doctest.DocTestFinder(recurse=False).find(
        function, name, globs=dict(vars(inspect.getmodule(function)))
    )
    return [test for test in found if test.examples]


def test_each_model_has_an_example():
    code = "\n".join(code for _, code in examples(MODELS))
    for module in sorted(modules_below(models)):
        assert f"from {module} import" in code, module


def sections_on_models() -> list[str]:
    _, *sections = re.split(r"^## ", MODELS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return sections


def test_each_section_on_models_has_a_formula():
    """A block that is indented, outside of the fences of code."""
    for section in sections_on_models():
        prose = re.sub(r"^```.*?^```$", "", section, flags=re.MULTILINE | re.DOTALL)
        formulas = re.findall(r"\n\n    \S.* = .*\S\n(?:    .*\n)*\n", prose)
        assert formulas, section.partition("\n")[0]


def test_each_section_on_models_names_a_command():
    commands = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    for section in sections_on_models():
        named = set(re.findall(r"`python -m trifuse\.benchmarks ([a-z0-9_]+)", section))
        assert named, section.partition("\n")[0]
        assert named <= commands


def test_each_picture_is_on_a_page():
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == set((ROOT / "docs").glob("*.png"))


def modules_below(package: ModuleType) -> set[str]:
    names = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return {f"{package.__name__}.{name}" for name in names if not name.startswith("_")}


def test_each_module_is_in_the_reference_or_called_private():
    """The pages of docs/api list the public ones, and docs/index.md the others."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/api").glob("*.md")]
    listed = re.findall(r"^\.\. automodule:: (\S+)$", "\n".join(pages), re.MULTILINE)
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    sentence = index[index.index("All others are private") :]
    private = {f"trifuse.{name}" for name in re.findall("`([a-z_]+)`", sentence)} - {
        "trifuse.trifuse"  # which has the functions of some of them
    }
    # An editable install finds these two elsewhere than below trifuse.
    there = modules_below(trifuse) | {"trifuse.benchmarks", "trifuse.kernels"}
    assert private < there
    public = there - private
    for package in (models, reference):
        public |= modules_below(package)
    assert sorted(listed) == sorted({"trifuse"} | public)


def test_each_operator_has_an_example():
    attention = ["scaled_dot_product_attention", "varlen_attention"]
    for name in (*attention, "dropout_add_layer_norm", "lstm", "gru", "rnn"):
        assert docstring_examples(f"trifuse.{name}"), name


@pytest.mark.parametrize(
    ("page", "heading", "code"),
    [(page.name, *example) for page in PAGES for example in examples(page)],
)
def test_example_of_a_page_runs(page: str, heading: str, code: str):
    torch.manual_seed(0)
    query = torch.randn(1, 2, 5, 64)
    # Examples use a model of the reader's and tensors that they do not define.
    given = {"model": torch.nn.TransformerEncoderLayer(64, 4), "torch": torch, "trifuse": trifuse}
    given |= {"query": query, "key": query, "value": query, "__name__": "example"}
    exec(compile(code, f"{page}: {heading}", "exec"), given)
    torch._dynamo.reset()  # its graphs refer to the example's globals


@pytest.mark.parametrize("name", [name for name in public() if docstring_examples(name)])
def test_example_of_a_docstring_runs(name: str):
    for test in docstring_examples(name):
        assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0
        torch._dynamo.reset()
