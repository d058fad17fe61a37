"""The parts that benchmarks' pictures share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def add_caption(figure: Figure, caption: str, fontsize: float = 6.5, **more: Any) -> None:
    """Write a grey caption below a figure, at the left."""
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=fontsize, color="#555555", **more)


def draw_means(
    axes: Axes,
    names: Sequence[Any],
    values: Sequence[Sequence[float]],
    label: str = "{:.1f}",
    color: str | Sequence[str] = "#d1603d",
) -> list[float]:
    """Draw a horizontal bar for each mean, with a line over two standard deviations.

    ``label`` formats a mean. Returns the means.
    """
    means = [statistics.mean(each) for each in values]
    spreads = [statistics.stdev(each) for each in values]
    bars = axes.barh(names, means, xerr=spreads, color=color, height=0.6)
    axes.bar_label(bars, [label.format(mean) for mean in means], padding=6, fontsize=8)
    return means


def leave_bars(axes: Axes) -> None:
    """Remove the ticks and the frame around horizontal bars, except the line below them."""
    axes.tick_params(length=0, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure on white; its folder is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, facecolor="white")
