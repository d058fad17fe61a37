"""The backend of torch.compile: trifuse's operators, and Inductor for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from trifuse.compiler.rewrite import rewrite


def trifuse(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph of Dynamo: ``torch.compile(model, backend="trifuse")``.

    Args:
        graph, inputs: as Dynamo passes them to a backend.
        mode, options: those of ``torch.compile``, as for its backend "inductor".
    """
    rewrite(graph)
    inductor = torch._TorchCompileInductorWrapper(mode, options, None)
    compiled: Callable[..., Any] = inductor(graph, inputs)
    return compiled
