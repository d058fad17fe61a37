"""Runs functions through the graphs that the compiler's patterns have rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.utils._pytree import tree_leaves

from trifuse.compiler import RewriteReport, rewrite


class Rewritten:
    """A function as Dynamo traces it and :func:`trifuse.compiler.rewrite` rewrites it.

    The graphs run as they are, without AOTAutograd and Inductor; with ``aot``, AOTAutograd runs
    them.
    """

    def __init__(
        self, function: Callable[..., Any], dynamic: bool | None = None, aot: bool = False
    ) -> None:
        self.reports: list[RewriteReport] = []
        self.graphs: list[torch.fx.GraphModule] = []
        self._aot = aot
        torch._dynamo.reset()
        self._compiled = torch.compile(function, backend=self._backend, dynamic=dynamic)

    def _backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.reports.append(rewrite(graph))
        graph.graph.lint()
        self.graphs.append(graph)
        return aot_eager_decomp_partition(graph, inputs) if self._aot else graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    @property
    def replaced(self) -> dict[str, int]:
        """How many attentions and norms became trifuse's, in all graphs."""
        return {
            name: count
            for name in ("attention", "norm")
            if (count := sum(report.replaced[name] for report in self.reports))
        }

    @property
    def reasons(self) -> list[str]:
        """Why attentions and norms stayed torch's."""
        found = [each for report in self.reports for each in report.left]
        return [reason for name, _, reason in found if name != "linear"]

    def calls(self, name: str) -> int:
        """How many calls of a function or method of this name the graphs hold."""
        nodes = [node for graph in self.graphs for node in graph.graph.nodes]
        return sum(name in (node.target, getattr(node.target, "__name__", None)) for node in nodes)


def floats(result: Any) -> list[Tensor]:
    """The floating tensors of a result of any structure."""
    return [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]


def results_and_gradients(
    function: Callable[..., Any], args: Iterable[Any], parameters: Iterable[Tensor], **kwargs: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Runs a function from one seed, and differentiates a weighted sum of its results."""
    torch.manual_seed(1)
    args = [
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
        for a in args
    ]
    results = floats(function(*args, **kwargs))
    wanted = [t for t in (*args, *parameters) if isinstance(t, Tensor) and t.requires_grad]
    if not wanted:
        return results, []
    total = sum((t * torch.linspace(0.5, 1, t.numel()).view(t.shape)).sum() for t in results)
    grads = torch.autograd.grad(total, wanted, materialize_grads=True)  # type: ignore[arg-type]
    return [t.detach() for t in results], list(grads)


def check(
    function: Callable[..., Any],
    *args: Any,
    replaced: dict[str, int],
    dynamic: bool | None = None,
    aot: bool = False,
    **kwargs: Any,
) -> Rewritten:
    """Checks what is replaced, and that results, their strides and gradients are eager torch's."""
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    expected, expected_grads = results_and_gradients(function, args, parameters, **kwargs)
    ours = Rewritten(function, dynamic, aot)
    actual, grads = results_and_gradients(ours, args, parameters, **kwargs)
    assert ours.replaced == replaced, ours.reports
    torch.testing.assert_close(actual, expected)
    assert [t.stride() for t in actual] == [t.stride() for t in expected]
    scale = max([1.0, *(g.abs().max().item() for g in expected_grads if g.numel())])
    for grad, one in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, one, rtol=1e-4, atol=2e-6 * scale)
    return ours
