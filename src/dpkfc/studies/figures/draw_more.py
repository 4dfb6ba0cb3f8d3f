"""Pictures of mean-field theory beside networks, and of accuracy over settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from dpkfc.report.plots import INK, MUTED, PAPER, PLAIN, SPENT, WHITENED
from dpkfc.studies.figures.canvas import dressed, grid, sheet
from dpkfc.studies.figures.landscape import METHODS, NAMES, importance, maps, plateau

__all__ = ["landscape", "mean_field"]

Row = Mapping[str, Any]
_WHAT = (
    ("forwards", "variance forwards"),
    ("backwards", "variance backwards"),
    ("traces", "tr F of the layer"),
)
_MAP = LinearSegmentedColormap.from_list("accuracy", ["#f3f5f7", "#b9cfdc", "#2f6f8f", "#173647"])


def mean_field(row: Row) -> Figure:
    """Measured ÷ predicted by layer, for every activation and width at the greatest depth."""
    networks = row["networks"]
    depth = max(one["depth"] for one in networks)
    names = list(dict.fromkeys(one["activation"] for one in networks))
    widths = list(dict.fromkeys(one["width"] for one in networks))
    caption = f"measured ÷ predicted; {depth} layers, mean ± one standard deviation over {row['seeds']} networks; no data read"
    figure = sheet(1.2 + 2.8 * len(names), 7.4, "Mean-field theory beside random networks", caption)
    axes = grid(figure, len(_WHAT), len(names))
    shades = dict(zip(widths, (PLAIN, SPENT, WHITENED), strict=False))
    for line, (what, label) in enumerate(_WHAT):
        for column, name in enumerate(names):
            panel = dressed(axes[line, column], name if line == 0 else "", "layer" if line == len(_WHAT) - 1 else "")
            panel.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            for one in networks:
                if one["activation"] == name and one["depth"] == depth:
                    _band(panel, one[what], shades[one["width"]])
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            panel.set_ylim(0, max(2.0, panel.get_ylim()[1]))
            if column == 0:
                panel.set_ylabel(label, fontsize=9.5, color=INK)
    handles = [figure.axes[0].plot([], [], color=c, linewidth=2, label=f"width {w}")[0] for w, c in shades.items()]
    width, height = figure.get_size_inches()
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.2 / width, 1 - 0.66 / height), ncols=3, frameon=False, fontsize=9,
        labelcolor=INK, borderaxespad=0,
    )  # fmt: skip
    return figure


def _band(panel: Axes, values: Mapping[str, Sequence[float]], colour: str) -> None:
    mean, std = np.array(values["ratio"]), np.array(values["std"])
    layers = np.arange(1, len(mean) + 1)
    panel.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    panel.plot(layers, mean, color=colour, linewidth=2)


def landscape(rows: Sequence[Row]) -> Figure:
    """Accuracy over clipping norm and learning rate for each method, and how much each setting explains."""
    recipe, epsilon = rows[0]["run"]["recipe"], max(row["epsilon"] for row in rows)
    caption = f"{recipe}, ε = {epsilon:.2f}, SGD; accuracy on a validation split; the search is not in ε"
    figure = sheet(13.4, 4.9, "How sensitive accuracy is to clipping norm and learning rate", caption)
    axes = grid(figure, 1, 3, top=1.1, gridspec_kw={"width_ratios": [1, 1, 0.8]})
    figure.subplots_adjust(wspace=0.42)
    for panel, method in zip(axes[0], METHODS, strict=False):
        held = [row for row in rows if row["run"]["method"] == method]
        if held:
            _heat(panel, method, held)
    _bars(axes[0, 2], rows)
    return figure


def _heat(panel: Axes, method: str, rows: Sequence[Row]) -> None:
    (one,) = maps(rows)
    values = 100 * np.array(one.values, dtype=float)
    dressed(panel, f"{method}: {100 * plateau(rows):.0f} % of cells within 2 points of the best", "learning rate").grid(False)
    panel.imshow(values, cmap=_MAP, vmin=0, vmax=100, aspect="auto", origin="lower")
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value):
            best = value == np.nanmax(values)
            panel.text(
                j, i, f"{value:.1f}", ha="center", va="center", fontsize=9, color=PAPER if value > 55 else INK,
                fontweight="bold" if best else "normal",
            )  # fmt: skip
    panel.set_xticks(range(len(one.x_values)), [f"{x:g}" for x in one.x_values])
    panel.set_yticks(range(len(one.y_values)), [f"{x:g}" for x in one.y_values])
    panel.set_ylabel("clipping norm", fontsize=9, color=MUTED)


def _bars(panel: Axes, rows: Sequence[Row]) -> None:
    dressed(panel, "share of the variance of accuracy", "explained by the setting alone").grid(False, axis="y")
    found = {
        f"{label}\n{method}": importance([r for r in rows if r["run"]["method"] == method], [name]).get(name)
        for method in METHODS
        for name, label in NAMES.items()
    }
    held = {name: one for name, one in found.items() if one is not None}
    colours = [WHITENED if name.endswith("kfc") else PLAIN for name in held]
    panel.barh(list(held), [one.explained for one in held.values()], color=colours, height=0.55)
    for place, one in enumerate(held.values()):
        panel.text(one.explained + 0.02, place, f"{one.explained:.2f}", va="center", fontsize=9, color=INK)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.08)
    panel.tick_params(axis="y", labelcolor=INK)
    panel.xaxis.set_minor_formatter(NullFormatter())
