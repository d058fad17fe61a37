"""Registers the backend of torch.compile once Dynamo is imported."""

from __future__ import annotations

from trifuse._imports import when_imported


def register_when_imported() -> None:
    """Makes ``torch.compile(model, backend="trifuse")`` work after ``import trifuse``.

    An installed trifuse is also found by its entry point, without being imported before.
    """
    when_imported("torch._dynamo.backends.registry", _register)


def _register() -> None:
    from torch._dynamo.backends import registry

    from trifuse.compiler.backend import trifuse

    # torch refuses to register a name twice, and loading the entry point registers it too.
    if "trifuse" not in registry._BACKENDS:
        registry.register_backend(trifuse, name="trifuse")
