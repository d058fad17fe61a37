"""``python -m trifuse.benchmarks NAME [options]`` runs ``benchmarks/NAME.py``."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Every benchmark's name and the first line of its docstring.

    A benchmark is a module of this folder that defines ``main(argv) -> int``. The modules are
    parsed, not imported, so that a benchmark with missing requirements is listed too.
    """
    found = {}
    for module in pkgutil.iter_modules([str(FOLDER)]):
        tree = ast.parse((FOLDER / f"{module.name}.py").read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in functions and module.name != "__main__":
            found[module.name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main(argv: Sequence[str]) -> int:
    names = benchmarks()
    if argv and argv[0] in names:
        try:
            benchmark = importlib.import_module(f"trifuse.benchmarks.{argv[0]}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "trifuse":
                raise
            print(f"{error.name} is not installed; try: pip install 'trifuse[demo,bench]'")
            return 1
        return int(benchmark.main(argv[1:]))
    print("usage: python -m trifuse.benchmarks NAME [options]    (NAME --help lists the options)\n")
    width = max(map(len, names))
    for name, line in names.items():
        print(f"  {name:{width}}  {line}")
    return 0 if argv in ([], ["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
