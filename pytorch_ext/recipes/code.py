"""The code of classes: parsed, comparable, and compiled again after a change."""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag,
    __future__.all_feature_names,
    0,
)


def methods(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the names and functions of a class's own and inherited methods, except torch's."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("builtins", "torch"):
            continue
        for name, value in vars(base).items():
            if name in seen:
                continue
            seen.add(name)
            if isinstance(value, types.FunctionType) and not name.startswith("__"):
                yield name, value


def names_used(cls: type) -> frozenset[str]:
    """Return the attributes and global names that the methods of a module's class use."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else None
            if isinstance(function, types.FunctionType):
                names.update(function.__code__.co_names)
    return frozenset(names)


def names_used_by_helpers(cls: type) -> frozenset[str]:
    """Return the same for the functions that a class calls and that are defined beside it."""
    beside = vars(sys.modules.get(cls.__module__, object))
    names: set[str] = set()
    for name in names_used(cls):
        function = beside.get(name)
        if isinstance(function, types.FunctionType) and function.__module__ == cls.__module__:
            names.update(function.__code__.co_names)
    return frozenset(names)


def parse(function: types.FunctionType, to_read: bool = False) -> ast.FunctionDef | None:
    """Parse a function's source, decorators included.

    Returns None if the function has no source, is nested, or is wrapped by something that isn't in
    its source. (``functools.wraps`` makes a replacement look like the original function.)

    The lines keep the numbers of the source file, so that tracebacks through the compiled code
    point to it.

    Args:
        function: of a class or a module.
        to_read: whether a method that calls ``super()`` is parsed too. It can be read, but not
            compiled again.
    """
    outermost, function = function, inspect.unwrap(function)
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    if function.__code__.co_freevars not in ((), ("__class__",) if to_read else ()):
        return None  # super() refers to __class__
    if outermost is not function and not _decorates(tree.body[0], outermost, function):
        return None
    ast.increment_lineno(tree, first - 1)
    return tree.body[0]


def _decorates(
    tree: ast.FunctionDef, outermost: types.FunctionType, function: types.FunctionType
) -> bool:
    """Whether every wrapper of a function can come from the decorators in its source.

    Decorators may use their own package, that of the function, and torch. transformers wraps some
    functions without decorators, too.
    """
    scope = function.__globals__
    own = _package(function)
    packages = {"transformers"} if own == "transformers" else set()
    for decorator in tree.decorator_list:
        made_by = decorator.func if isinstance(decorator, ast.Call) else decorator
        packages |= {own, "torch", _package(value_of(made_by, scope))}
    wrapper: Any = outermost
    while wrapper is not function:
        if _package(wrapper) not in packages:
            return False
        wrapper = wrapper.__wrapped__
    return True


def _package(value: Any) -> str:
    """The package whose code runs if a value is called."""
    # functools.wraps does not change a function's globals.
    scope = getattr(value, "__globals__", None)
    module = getattr(value, "__module__", None) if scope is None else scope.get("__name__")
    return (module or "").partition(".")[0]


def compile_like(tree: ast.FunctionDef, function: types.FunctionType) -> types.FunctionType | None:
    """Compile a changed method, with the globals and the decorators of the method it changes.

    It is compiled in the body of a class of the same name, which some decorators look up.

    Returns:
        The function; None if its decorators or defaults can't be evaluated again.
    """
    function = inspect.unwrap(function)
    name = function.__qualname__.split(".")[0]
    around = ast.parse(f"class {name}: pass").body[0]
    assert isinstance(around, ast.ClassDef)
    around.body = [tree]
    module = ast.fix_missing_locations(ast.Module(body=[around], type_ignores=[]))
    code = compile(
        module,
        function.__code__.co_filename,
        "exec",
        flags=function.__code__.co_flags & _FUTURES,
        dont_inherit=True,
    )
    scope: dict[str, Any] = {}
    try:
        exec(code, function.__globals__, scope)
    except Exception:  # whatever a decorator or a default raises
        return None
    made = vars(scope[name])[tree.name]
    return made if isinstance(made, types.FunctionType) else None


@functools.cache  # by function, because that of a class may be replaced
def body(function: types.FunctionType) -> str | None:
    """Return a function's statements in one normal form: no comments, docstring or annotations."""
    tree = parse(function)
    if tree is None:
        return None
    statements = tree.body
    if ast.get_docstring(tree) is not None:
        statements = statements[1:]
    return ast.unparse(ast.Module(body=statements, type_ignores=[]))


@functools.cache
def body_if_function(value: Any) -> str | None:
    """The statements of a function as :func:`body` returns them; None for any other value."""
    return body(value) if inspect.isfunction(value) else None


def _method(cls: type, name: str) -> str | None:
    """The statements of a class's own or inherited method; None if another package replaced it."""
    function = getattr(cls, name, None)
    if not isinstance(function, types.FunctionType):
        return None
    return body(function) if _package(function) == cls.__module__.partition(".")[0] else None


def same_methods(cls: type, other: type, *names: str) -> bool:
    """Whether methods of two classes have sources, with the same statements."""
    return all(
        (own := _method(cls, name)) is not None and own == _method(other, name) for name in names
    )


def modeling(model: str) -> types.ModuleType:
    """Return the module of transformers with a model's classes."""
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def returned_class(function: types.FunctionType) -> Any:
    """Return the class C of a function whose last statement is ``return C(...)``."""
    function = inspect.unwrap(function)
    tree: Any = parse(function)
    return function.__globals__[tree.body[-1].value.func.id]


def normal(statements: str) -> str:
    """Return statements in the normal form of :func:`body`."""
    return ast.unparse(ast.parse(statements))


def value_of(expression: ast.expr, scope: dict[str, Any]) -> Any:
    """Return the value of a dotted name such as ``nn.functional.dropout``; None for other code."""
    if isinstance(expression, ast.Name):
        return scope.get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(value_of(expression.value, scope), expression.attr, None)
    return None


def own_attribute(expression: ast.expr) -> str | None:
    """Match ``self.name``; return the name."""
    if isinstance(expression, ast.Attribute) and ast.unparse(expression.value) == "self":
        return expression.attr
    return None


def own_list(iterated: ast.expr) -> str | None:
    """Match ``self.name``, a part of it such as ``self.name[:n]``, or one of these enumerated."""
    if (
        isinstance(iterated, ast.Call)
        and isinstance(iterated.func, ast.Name)
        and iterated.func.id == "enumerate"
        and len(iterated.args) == 1
    ):
        iterated = iterated.args[0]
    if isinstance(iterated, ast.Subscript) and isinstance(iterated.slice, ast.Slice):
        iterated = iterated.value
    return own_attribute(iterated)


# Nodes whose code may run later, or more than once.
LATER = (
    ast.Lambda,
    ast.IfExp,
    ast.BoolOp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.NamedExpr,
)


class Replaced(ast.NodeTransformer):
    """Replaces one expression with another."""

    def __init__(self, old: ast.AST, new: ast.expr) -> None:
        self.old = old
        self.new = new

    def visit(self, node: ast.AST) -> Any:
        """Return the replacement of a node."""
        return self.new if node is self.old else self.generic_visit(node)
