"""The look that all figures share with the plots of a run folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dpkfc.report.plots import GRID, INK, MUTED, PAPER, PLAIN, SPENT, WARNING, WHITENED

__all__ = ["SOURCES", "decades", "dressed", "grid", "legend", "marks", "sheet", "unscored"]

SOURCES: dict[str, dict[str, Any]] = {
    "none": {"color": "#b8a9c9", "label": "no preconditioner"},
    "nothing": {"color": "#b8a9c9", "label": "no preconditioner"},
    "white noise": {"color": PLAIN},
    "pink noise": {"color": WHITENED},
    "public": {"color": SPENT, "label": "public (the other set)"},
    "oracle": {"color": INK, "linestyle": (0, (5, 2)), "label": "oracle (private data)"},
    "oracle, other examples": {"color": INK, "linestyle": (0, (1, 1.4)), "label": "oracle, other examples"},
    "random directions": {"color": "#c23b80", "linestyle": (0, (2, 1.5)), "label": "random directions (control)"},
}
_NOTE = "NOT private: compared with the factors of private examples. A research measurement on public benchmark data."


def sheet(width: float, height: float, title: str, caption: str = "", *, private: bool = False) -> Figure:
    """An empty figure with a title, a line below it, and the mark of what is not private."""
    figure = Figure(figsize=(width, height), facecolor=PAPER, dpi=130)
    FigureCanvasAgg(figure)
    figure.text(0.3 / width, 1 - 0.27 / height, title, fontsize=13.5, fontweight="bold", color=INK, va="center")
    figure.text(0.3 / width, 1 - 0.54 / height, caption, fontsize=9.5, color=MUTED, va="center")
    if private:
        figure.text(0.3 / width, 0.16 / height, _NOTE, fontsize=8.5, color=WARNING, va="center")
    return figure


def grid(figure: Figure, rows: int, columns: int, *, top: float = 1.3, left: float = 0.75, **more: Any) -> Any:
    """Axes `[rows, columns]`, with room (inches) above for title and legend and at the left for numbers."""
    width, height = figure.get_size_inches()
    axes: Any = figure.subplots(rows, columns, squeeze=False, **more)
    figure.subplots_adjust(
        left=left / width, right=1 - 0.3 / width, top=1 - top / height, bottom=0.82 / height, wspace=0.34, hspace=0.42
    )
    return axes


def dressed(axes: Axes, title: str = "", below: str = "") -> Axes:
    """Axes without a frame, with a pale grid."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=8, length=0, which="both")
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left", pad=5)
    axes.set_xlabel(below, color=MUTED, fontsize=8.5)
    return axes


def legend(figure: Figure, sources: Sequence[str], *, marker: bool = False) -> None:
    """The sources in one line below the caption."""
    width, height = figure.get_size_inches()
    axes = figure.axes[0]
    handles = []
    for source in sources:
        look = dict(SOURCES[source])
        label = look.pop("label", source)
        if marker:
            look = {"linestyle": "", "markersize": 7, "markeredgecolor": look["color"]} | marks(source)
        handles += axes.plot([], [], linewidth=2, label=label, **look)
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.27 / width, 1 - 0.66 / height), ncols=min(6, len(handles)),
        frameon=False, fontsize=9, labelcolor=INK, borderaxespad=0, borderpad=0.2, columnspacing=1.4,
        handlelength=0.8 if marker else 2.4,
    )  # fmt: skip


def marks(source: str) -> dict[str, Any]:
    """The marker of a source: a dot, a diamond for the oracle, an open one for the oracle's other examples."""
    colour = SOURCES[source]["color"]
    marker = "D" if source.startswith("oracle") else "o"
    return {"marker": marker, "color": PAPER if source == "oracle, other examples" else colour}


def decades(axis: Any, low: float, high: float) -> None:
    """Ticks of a logarithmic axis that are read also where it spans less than two decades."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,), numticks=7))
    axis.set_major_formatter(FuncFormatter(_power))
    axis.set_minor_formatter(NullFormatter())


def _power(x: float, _: Any) -> str:
    exponent = math.floor(math.log10(x) + 1e-9) if x > 0 else 0
    first = round(x / 10.0**exponent)
    if -3 <= exponent < 4:
        return f"{x:g}"
    return f"$10^{{{exponent}}}$" if first == 1 else f"${first} \\cdot 10^{{{exponent}}}$"


def unscored(source: str) -> dict[str, Any]:
    """The look of a source's line, without a label of its own."""
    return {k: v for k, v in SOURCES[source].items() if k != "label"} | {"linewidth": 1.9}
