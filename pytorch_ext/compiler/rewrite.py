"""Puts trifuse's operators into a graph of Dynamo."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

from torch import fx
from torch.fx import Node

from trifuse.compiler import attention, gated, linear, norms
from trifuse.compiler.calls import Refused
from trifuse.compiler.rewriter import Rewriter

log = logging.getLogger("trifuse")

# By the name of a pattern, the module that finds and replaces it, in the order of the passes.
_PATTERNS: dict[str, ModuleType] = {
    "attention": attention,
    "norm": norms,
    "gated linear": gated,
    "linear": linear,
}


@dataclass
class RewriteReport:
    """A report of what :func:`rewrite` did. ``print(report)`` shows it as a table.

    Attributes:
        replaced: how many nodes of each pattern ("attention", "norm", "gated linear", "linear")
            became trifuse's.
        left: the pattern, the node's name and the reason for each that stayed torch's.
    """

    replaced: Counter[str] = field(default_factory=Counter)
    left: list[tuple[str, str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"  {count} × {name}" for name, count in self.replaced.items()]
        alike: dict[tuple[str, str], list[str]] = {}
        for name, node, reason in self.left:
            alike.setdefault((name, reason), []).append(node)
        for (name, reason), (first, *others) in alike.items():
            nodes = f"{first}, …" if others else first
            lines.append(f"  {1 + len(others)} × {name} left, because {reason} ({nodes})")
        return "\n".join(lines) or "  nothing that trifuse can serve"


def rewrite(graph: fx.GraphModule) -> RewriteReport:
    """Replaces attention, norms and linear layers of a graph by trifuse's, in place.

    ``torch.compile(model, backend="trifuse")`` does this to each graph before Inductor compiles it.

    Args:
        graph: a graph as Dynamo passes it to a backend, before AOTAutograd: its nodes have fake
            tensors in ``meta["example_value"]``. Without them nothing is replaced.

    Returns:
        A count of what was replaced, and why the rest stayed.

    Example:
        >>> import torch, trifuse
        >>> from trifuse.compiler import rewrite
        >>> def backend(graph, inputs):
        ...     print(rewrite(graph))
        ...     return graph
        >>> norm = torch.nn.LayerNorm(16)
        >>> compiled = torch.compile(lambda x, y: norm(x + y), backend=backend)
        >>> _ = compiled(torch.randn(3, 16), torch.randn(3, 16))
          1 × norm
    """
    report = RewriteReport()
    for module in _graphs(graph):
        _rewrite_one(module, report)
        module.recompile()
    if report.replaced or report.left:
        log.info("torch.compile:\n%s", report)
    return report


def _graphs(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yields a graph, and the bodies of the checkpoints and regions that it calls."""
    yield graph
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", "") in _CALLS_A_GRAPH:
            for argument in node.all_input_nodes:
                if argument.op == "get_attr":
                    body = graph.get_submodule(str(argument.target))
                    if isinstance(body, fx.GraphModule):
                        yield from _graphs(body)


_CALLS_A_GRAPH = ("tag_activation_checkpoint", "wrap", "invoke_subgraph")


def _rewrite_one(module: fx.GraphModule, report: RewriteReport) -> None:
    rewriter = Rewriter(module.graph)
    if rewriter.fake_mode is None:
        return
    rewriter.erase_unused_copies()
    for name, pattern in _PATTERNS.items():
        candidates: list[Node] = [n for n in module.graph.nodes if pattern.is_candidate(n)]
        for node in candidates:
            if node._erased:  # it was part of an earlier pattern
                continue
            try:
                pattern.replace(rewriter, node)
                report.replaced[name] += 1
            except Refused as reason:
                report.left.append((name, node.name, str(reason)))
