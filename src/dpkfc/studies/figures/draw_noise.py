"""A picture of a regression's loss over the noise, with and without filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from dpkfc.recipes.linear_regression import ERROR
from dpkfc.report.plots import INK, MUTED, PLAIN, SPENT, WHITENED
from dpkfc.studies.figures.canvas import decades, dressed, grid, sheet
from dpkfc.studies.figures.noise_sweep import Point, best, points

__all__ = ["noise_sweep"]

_LOOKS: Mapping[str, dict[str, Any]] = {
    "dp-sgd": {"color": PLAIN, "marker": "o", "label": "DP-SGD, no filter"},
    "doppler": {"color": SPENT, "marker": "s", "label": "DOPPLER"},
    "disk": {"color": WHITENED, "marker": "D", "label": "DiSK, two gradients a step"},
}


def noise_sweep(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Mean squared error over the noise multiplier, one panel a learning rate, and each method at its best rate."""
    found, first = points(rows), rows[0]
    rates = sorted({one.lr for one in found})
    caption = (
        f"{first['steps']} steps of {first['expected_batch_size']} examples, C = 1; mean ± one standard deviation of "
        f"{max(one.runs for one in found)} runs, on validation examples; dashed: the weights behind the data"
    )
    groups = {f"learning rate {lr:g}": [one for one in found if one.lr == lr] for lr in rates}
    groups["each at its best rate"] = best(found)
    columns = -(-len(groups) // 2)
    figure = sheet(1.0 + 3.6 * columns, 7.2, "Linear regression under more and more noise", caption)
    axes = grid(figure, 2, columns)
    for panel, (title, group) in zip(axes.flat, groups.items(), strict=False):
        _losses(dressed(panel, title, "noise multiplier σ"), group, found if title.startswith("learning rate") else group)
    for panel in list(axes.flat)[len(groups) :]:
        panel.set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("mean squared error", fontsize=9, color=INK)
    width, height = figure.get_size_inches()
    handles = [axes[0, 0].plot([], [], linewidth=2, markersize=5, **look)[0] for look in _LOOKS.values()]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.27 / width, 1 - 0.66 / height), ncols=3, frameon=False, fontsize=9,
        labelcolor=INK, borderaxespad=0,
    )  # fmt: skip
    return figure


def _losses(panel: Axes, group: Sequence[Point], scaled_to: Sequence[Point]) -> None:
    """The lines of some points, on an axis that all of `scaled_to` have room on."""
    noises = sorted({one.noise for one in group})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.axhline(ERROR**2, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    for name, look in _LOOKS.items():
        held = [one for one in group if one.method == name]
        if held:
            means, deviations = [one.mean for one in held], [one.std for one in held]
            panel.errorbar([one.noise for one in held], means, yerr=deviations, linewidth=1.9, markersize=4.5, capsize=2, **look)
    panel.set_xticks(noises, [f"{noise:g}" for noise in noises])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_ylim(0.8 * ERROR**2, 1.4 * max(one.mean + one.std for one in scaled_to))
    decades(panel.yaxis, *panel.get_ylim())
