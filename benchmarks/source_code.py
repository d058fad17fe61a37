"""Tagged text: the functions of the standard library's source, with a tag for every name in them.

The words are the tokens of :mod:`tokenize`. A tag says what a name stands for where it occurs: a
parameter of the function, a local variable, an attribute, an imported name and so on. It follows
from the whole file's syntax tree, while a tagger reads the function alone. So "path" is a parameter
where the function's head has it, and an imported name or an attribute elsewhere. Whether a name is
an imported one, a class or a global variable can only be guessed from its spelling and its use.

The tags are Python's own because no package on PyPI was found that ships text tagged by people,
enough of it to learn from, under a free licence. The standard library is on every machine, under
the PSF licence.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import random
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trifuse.benchmarks.text import python_files

TAGS = (
    "other",  # keywords, operators, literals and layout
    "parameter",
    "local",
    "attribute",
    "method",  # an attribute that is called
    "keyword",  # the name of an argument in a call
    "imported",
    "function",
    "class",
    "global",  # any other variable of the module
    "builtin",
)
OTHER = 0
_ID = {tag: number for number, tag in enumerate(TAGS)}

SHORTEST, LONGEST = 15, 80  # words of a function, unless others are given

# Folders of the standard library with tests, and those with other people's packages.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class Function(NamedTuple):
    """The words of a function, and their tags' places in :data:`TAGS`."""

    words: list[str]
    tags: list[int]


class Source(NamedTuple):
    """Functions of different files, each function once in all."""

    train: list[Function]
    test: list[Function]
    unlabelled: list[Function]  # functions whose tags must not be used


def read(
    train: int, test: int, unlabelled: int, longest: int = LONGEST, root: Path | None = None
) -> Source:
    """Read functions from the files below a folder, by default the standard library.

    The files come in random order, which is the same in each call. No file is in two parts.

    Args:
        train, test, unlabelled: how many functions at most.
        longest: words of a function.
        root: the folder.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = list(python_files(root, _LEFT_OUT))
    random.Random(0).shuffle(paths)
    source = Source([], [], [])
    wanted = [(source.test, test), (source.train, train), (source.unlabelled, unlabelled)]
    seen: set[tuple[str, ...]] = set()
    for path in paths:
        if not wanted:
            break
        part, count = wanted[0]
        for function in functions_of(path, longest):
            if tuple(function.words) not in seen:
                seen.add(tuple(function.words))
                part.append(function)
        if len(part) >= count:
            del part[count:]
            del wanted[0]
    return source


def functions_of(path: Path, longest: int = LONGEST) -> list[Function]:
    """The functions of a file; none if the file is not ASCII or does not parse."""
    try:
        return list(functions(path.read_text(encoding="ascii"), longest))
    except (UnicodeDecodeError, SyntaxError):
        return []


def functions(code: str, longest: int = LONGEST) -> Iterator[Function]:
    """The outermost functions and methods of SHORTEST to ``longest`` words, without decorators.

    Comments are left out. Line ends and changes of indentation are words. All strings are one word,
    and all numbers are. A function is left out if nothing in the file binds one of its names.

    Raises:
        SyntaxError: the code does not parse.
    """
    tree = ast.parse(code)
    module = _bindings(tree.body)
    lines = code.split("\n")
    for node in _outermost(tree):
        assert node.end_lineno is not None
        found = list(_tokens(lines, node.lineno, node.end_lineno))
        if found[0].type == tokenize.INDENT:
            del found[0]
        if SHORTEST <= len(found) <= longest:
            tags = _tag(node, found, module)
            if tags is not None:
                yield Function([_word(token) for token in found], tags)


def _tokens(lines: Sequence[str], first: int, last: int) -> Iterator[tokenize.TokenInfo]:
    """The tokens of some lines, counted from 1, except comments and blank lines.

    An f-string is one token in every Python version.
    """
    code = "\n".join(lines[first - 1 : last]) + "\n"
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        line, column = token.start
        if line > last - first + 1:  # the tokens that close the blocks at the end
            return
        kind = tokenize.tok_name[token.type]
        begins, ends = kind.endswith("STRING_START"), kind.endswith("STRING_END")
        depth += begins - ends
        here = token._replace(start=(line + first - 1, column))
        if begins and depth == 1:
            yield here._replace(type=tokenize.STRING)
        elif not (depth or ends or token.type in (tokenize.COMMENT, tokenize.NL)):
            yield here


_WORDS = {
    tokenize.STRING: '""',
    tokenize.NUMBER: "0",
    tokenize.NEWLINE: "<line>",
    tokenize.INDENT: "<indent>",
    tokenize.DEDENT: "<dedent>",
}


def _word(token: tokenize.TokenInfo) -> str:
    return _WORDS.get(token.type, token.string)


# Tags -------------------------------------------------------------------------------------------

_Scope = dict[str, str]  # names and their tags
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _outermost(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions below a node that are in no other function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield child
        else:
            yield from _outermost(child)


def _bindings(nodes: Iterable[ast.AST]) -> _Scope:
    """The names that statements bind in their own scope, not in nested functions and classes."""
    found: _Scope = {}
    for node in nodes:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            found[node.name] = "class" if isinstance(node, ast.ClassDef) else "function"
        elif not isinstance(node, _COMPREHENSIONS):
            found |= _bindings(ast.iter_child_nodes(node)) | _bound(node, "global")
    return found


def _bound(node: ast.AST, variable: str) -> _Scope:
    """The names that one node binds; ``variable`` is the tag of those that are assigned to."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(each.asname or each.name).partition(".")[0]: "imported" for each in node.names}
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return {node.id: variable}
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        return {node.name: variable}
    return {}


def _scope(function: ast.AST, module: _Scope) -> _Scope:
    """The meaning of every name in a function, with its nested functions and classes."""
    scope = dict.fromkeys(dir(builtins), "builtin") | module
    inside = list(ast.walk(function))
    outside = {
        name
        for node in inside
        if isinstance(node, (ast.Global, ast.Nonlocal))
        for name in node.names
    }
    for node in inside:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node is not function:
            scope[node.name] = "class" if isinstance(node, ast.ClassDef) else "function"
        for name, tag in _bound(node, "local").items():
            if name not in outside:
                scope[name] = tag
    return scope | {node.arg: "parameter" for node in inside if isinstance(node, ast.arg)}


def _tag(
    function: ast.AST, tokens: Sequence[tokenize.TokenInfo], module: _Scope
) -> list[int] | None:
    """A tag for each token; None if nothing in the file binds a name."""
    scope = _scope(function, module)
    called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    by_place: dict[tuple[int, int], str] = {}
    import_lines: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            place = node.end_lineno, node.end_col_offset - len(node.attr)
            by_place[place] = "method" if id(node) in called else "attribute"
        elif isinstance(node, ast.keyword) and node.arg is not None:
            by_place[node.lineno, node.col_offset] = "keyword"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            assert node.end_lineno is not None
            import_lines.update(range(node.lineno, node.end_lineno + 1))
    tags = []
    previous = ""
    for token in tokens:
        if token.type != tokenize.NAME or keyword.iskeyword(token.string):
            tag = "other"
        elif token.start in by_place:
            tag = by_place[token.start]
        elif previous in ("def", "class"):
            tag = "class" if previous == "class" else "function"
        elif token.start[0] in import_lines:
            tag = "imported"
        elif token.string in scope:
            tag = scope[token.string]
        else:
            return None
        tags.append(_ID[tag])
        previous = token.string
    return tags
