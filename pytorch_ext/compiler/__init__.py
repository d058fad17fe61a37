"""Puts trifuse's operators into the graphs that ``torch.compile`` traces.

``torch.compile(model, backend="trifuse")`` finds attention, norms and linear layers in any model's
graph, replaces them by trifuse's operators, and leaves the rest to Inductor. calls.py reads a
graph's calls; attention.py, scores.py, norms.py, linear.py and gated.py hold the patterns;
rewriter.py decides whether an exchange is safe; rewrite.py applies the patterns; backend.py is what
torch calls.
"""

from __future__ import annotations

from trifuse.compiler.rewrite import RewriteReport, rewrite

__all__ = ["RewriteReport", "rewrite"]
