"""Runs actions once another package is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Calls ``action`` once ``name`` has been imported: immediately if it already has been."""
    if name in sys.modules:
        action()
    else:
        _FINDER.actions.setdefault(name, []).append(action)


class _Finder(importlib.abc.MetaPathFinder):
    """Delegates to the other finders, and runs the actions after the module has executed."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[], object]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        actions = self.actions.pop(name, None)
        if actions is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            self.actions[name] = actions
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            try:
                execute(module)
            except BaseException:
                self.actions[name] = actions  # the import may be retried
                raise
            for action in actions:
                action()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)
