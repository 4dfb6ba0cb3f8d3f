"""A picture of a partition: which client holds how many records of which label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

__all__ = ["counts", "partition"]

INK, MUTED, GRID, PAPER, BARS = "#22303c", "#6b7886", "#e4e8ec", "#ffffff", "#2f6f8f"
_SHADES = LinearSegmentedColormap.from_list("records", ["#f4f7f9", "#7fb0c6", "#1d4f68"])
_WRITTEN = 260  # cells up to which every count is written


def counts(labels: ArrayLike, pieces: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], list[str]]:
    """Records of each label with each client `[clients, labels]`, and the labels' names in sorted order."""
    names, kinds = np.unique(np.asarray(labels), return_inverse=True)
    kinds = kinds.reshape(-1)
    return np.stack([np.bincount(kinds[piece], minlength=len(names)) for piece in pieces]), [
        str(name) for name in names
    ]


def partition(
    labels: ArrayLike,
    pieces: Sequence[NDArray[np.int64]],
    *,
    title: str = "What each client holds",
    caption: str = "",
    clients: Sequence[str] | None = None,
) -> Figure:
    """Labels by client as shaded counts, and each client's size beside them. The counts are of a study's public data.

    Args:
        labels: of all records `[n]`.
        pieces: records of each client.
        title: above the picture.
        caption: below the title.
        clients: names; by default their numbers.
    """
    table, kinds = counts(labels, pieces)
    names = [str(i) for i in range(len(table))] if clients is None else list(clients)
    height = min(12.0, 1.9 + 0.3 * len(table))
    figure = Figure(figsize=(8.4, height), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(figure)
    figure.text(0.04, 1 - 0.3 / height, title, fontsize=13.5, fontweight="bold", color=INK, va="center")
    figure.text(0.04, 1 - 0.6 / height, caption, fontsize=9.5, color=MUTED, va="center")
    longest = max(map(len, names))
    left, bottom, top = 0.08 + 0.009 * longest, 0.62 / height, 1 - 1.08 / height
    cells = figure.add_axes((left, bottom, 0.7 - left, top - bottom))
    sizes = figure.add_axes((0.73, bottom, 0.21, top - bottom), sharey=cells)
    cells.imshow(table, aspect="auto", cmap=_SHADES, vmin=0, vmax=max(1, int(table.max())))
    _write(cells, table)
    cells.set_yticks(range(len(names)), names)
    cells.set_xticks(range(len(kinds)), kinds)
    if len(names) > 30:
        cells.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    cells.set_xlabel("label", color=MUTED, fontsize=9)
    cells.set_ylabel("client", color=MUTED, fontsize=9)
    cells.set_title("records of each label", fontsize=10, color=INK, loc="left", pad=7)
    _bars(sizes, table.sum(1))
    for axes in (cells, sizes):
        axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def _write(axes: Any, table: NDArray[np.int64]) -> None:
    if table.size > _WRITTEN:
        return
    dark = 0.55 * table.max()
    for (row, column), count in np.ndenumerate(table):
        if count:
            colour = PAPER if count > dark else INK
            axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=7.5, color=colour)


def _bars(axes: Any, totals: NDArray[np.int64]) -> None:
    axes.barh(range(len(totals)), totals, color=BARS, height=0.62)
    axes.set_title("all records", fontsize=10, color=INK, loc="left", pad=7)
    axes.tick_params(labelleft=False)
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.grid(True, axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(0, 1.05 * max(1, int(totals.max())))
