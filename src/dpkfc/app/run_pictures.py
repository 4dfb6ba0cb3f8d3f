"""Draw the pictures of a run: effects of columns, signal-to-noise ratio of each layer, spectra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from dpkfc.app.picture_data import (
    ColumnEffect,
    Curve,
    LayerSignal,
    LayerSpectra,
    RunFigures,
    evenly_spaced,
)
from dpkfc.app.picture_style import (
    COLOURS,
    GRID,
    INK,
    MUTED,
    PALETTE,
    PLAIN,
    SPENT,
    WHITENED,
    apply_style,
    make_figure,
)
from dpkfc.report.text import plain

MAX_PANELS = 16
_DASHES = (0, (4, 3))
# Points of a curve up to which each has a marker.
_MARKED = 40
# Inches across, so that text can be read on a narrow screen too.
_WIDTH = 5.4


def draw_run(figures: RunFigures, columns: Sequence[ColumnEffect]) -> dict[str, Figure]:
    """Return the pictures of a run by the names of their files."""
    drawn = {}
    if columns:
        caption = f"{figures.label}; band: ± 2 standard deviations of the noise"
        drawn["effects.png"] = effects(columns, caption, figures.stamp)
    if figures.signal:
        caption = f"{figures.caption}; {figures.batch_size:,} examples"
        drawn["signal_to_noise.png"] = signal_to_noise(figures.signal, caption, figures.stamp)
    if figures.spectra:
        drawn["spectra.png"] = spectra(figures.spectra, figures.caption, figures.stamp)
    return drawn


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    """Draw accuracy against steps, with a marker at each point where they are few."""
    marker = "o" if len(curve.steps) <= _MARKED else None
    # matplotlib finds no room for an empty line that may leave its axes.
    if len(curve.steps):
        axes.plot(curve.steps, curve.accuracy, color=colour, marker=marker, clip_on=False)
    axes.set_title(f"{curve.score} on the {curve.measured_on} set")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _set_steps(axes: Axes, steps: Sequence[float]) -> None:
    """Make the horizontal axis one of whole steps, from 0 to the last."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("steps")
    axes.set_xlim(0, max([1, *steps]))


def _label_end(axes: Axes, x: float, y: float, text: str, colour: str, *, shift: float) -> None:
    """Write a text beside the end of a curve, moved up by so many points."""
    axes.annotate(
        text,
        (x, y),
        xytext=(8, shift),
        textcoords="offset points",
        color=colour,
        fontweight="bold",
        va="center",
        annotation_clip=False,
    )


@apply_style
def comparison(curves: Sequence[Curve], title: str, caption: str = "") -> Figure:
    """Draw the accuracy of one or more runs against steps, each labelled where it ends."""
    stamp = next((curve.stamp for curve in curves if curve.stamp), "")
    figure = make_figure(8, 4.6, title, caption, stamp)
    axes = figure.subplots()
    for curve, colour, shift in zip(curves, COLOURS, _label_shifts(curves), strict=False):
        _draw_curve(axes, curve, colour)
        if len(curve.accuracy):
            last = curve.accuracy[-1]
            text = f"{curve.label}  {100 * last:.1f} %"
            _label_end(axes, curve.steps[-1], last, text, colour, shift=shift)
    _set_steps(axes, [step for curve in curves for step in curve.steps])
    return figure


# Height of the axes of a comparison and of a label, in points.
_HEIGHT = 215.0
_LINE = 14.0


def _label_shifts(curves: Sequence[Curve]) -> list[float]:
    """Return vertical shifts, in points, that keep labels at the ends of curves from touching."""
    values: list[float] = []
    ends = []
    for curve in curves:
        values += curve.accuracy
        ends.append(curve.accuracy[-1] if len(curve.accuracy) else 0.0)
    span = max(max(values) - min(values), 1e-3) if values else 1.0
    heights = [_HEIGHT * end / span for end in ends]
    shifted = list(heights)
    from_below = sorted(range(len(curves)), key=heights.__getitem__)
    for lower, upper in zip(from_below, from_below[1:], strict=False):
        shifted[upper] = max(shifted[upper], shifted[lower] + _LINE)
    # Labels have only been moved up. All of them together are moved back down.
    rise = (sum(shifted) - sum(heights)) / max(1, len(curves))
    return [new - old - rise for new, old in zip(shifted, heights, strict=True)]


@apply_style
def signal_to_noise(layers: Sequence[LayerSignal], caption: str = "", stamp: str = "") -> Figure:
    """Draw the signal-to-noise ratio of each layer on a logarithmic axis.

    Rows are in the order of the network, as in Fig. 1 of the DP-KFC paper.

    Args:
        layers: a ratio that is zero leaves its layer out.
        caption: a line below the title.
        stamp: text across the picture of a run without a certified ε.
    """
    shown = [layer for layer in layers if layer.plain > 0 and layer.preconditioned > 0]
    height = 2.2 + 0.32 * max(3, len(shown))
    figure = make_figure(_WIDTH, height, "Signal-to-noise ratio of each layer", caption, stamp)
    axes = figure.subplots()
    rows = np.arange(len(shown))
    without = [layer.plain for layer in shown]
    ratios = [layer.preconditioned for layer in shown]
    axes.hlines(rows, without, ratios, color=GRID, linewidth=5)
    axes.scatter(without, rows, color=PLAIN, label="without the preconditioner", zorder=3)
    axes.scatter(ratios, rows, color=WHITENED, label="with the preconditioner", zorder=4)
    axes.set_yticks(rows, [plain(layer.name, 40) for layer in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    if shown:
        axes.set_xscale("log")
        low, high = min(without + ratios), max(without + ratios)
        axes.set_xlim(low / 1.6, high * 1.6)
        if high / low < 30:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("norm of a batch of clipped gradients that agree\n÷ norm of the noise")
    figure.legend(loc="outside lower left", ncols=2)
    return figure


@apply_style
def spectra(layers: Sequence[LayerSpectra], caption: str = "", stamp: str = "") -> Figure:
    """Draw the eigenvalues of A and G of every layer, largest first, with the damping dashed.

    Args:
        layers: of more than 16, evenly spaced ones are drawn and the caption says so.
        caption: a line below the title.
        stamp: text across the picture of a run without a certified ε.
    """
    chosen = evenly_spaced(layers, MAX_PANELS)
    if len(chosen) < len(layers):
        count = f"{len(chosen)} of {len(layers)} layers shown"
        caption = f"{caption}; {count}" if caption else count
    columns = 1 if len(chosen) <= 1 else 2
    rows = max(1, math.ceil(len(chosen) / columns))
    height = 1.6 + 1.6 * rows
    figure = make_figure(_WIDTH, height, "Spectra of the curvature factors", caption, stamp)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    for place, (axes, layer) in enumerate(zip(grid.flat, chosen, strict=False)):
        _draw_spectrum(axes, layer)
        if place + columns >= len(chosen):
            axes.set_xlabel("rank of the eigenvalue ÷ size")
    handles = [
        Line2D([], [], color=SPENT, label="A, of the inputs"),
        Line2D([], [], color=WHITENED, label="G, of the output gradients"),
        Line2D([], [], color=MUTED, linewidth=1.1, linestyle=_DASHES, label="damping"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3)
    return figure


def _draw_spectrum(axes: Axes, layer: LayerSpectra) -> None:
    """Draw the eigenvalues of both factors of one layer, and their damping."""
    axes.set_title(plain(layer.name, 36))
    axes.set_yscale("log")
    # The heights that the axis has to reach.
    seen = []
    for name, colour in (("A", SPENT), ("G", WHITENED)):
        points = layer.points.get(name)
        if not points:
            continue
        ranks, values = zip(*points, strict=True)
        marker = "o" if len(values) <= 12 else None
        axes.plot(ranks, values, color=colour, marker=marker)
        seen += [values[0], values[-1]]
        damping = layer.damping.get(name, 0)
        if damping > 0:
            axes.axhline(damping, color=colour, linewidth=1.1, linestyle=_DASHES)
            seen.append(damping)
    if seen:
        axes.set_ylim(min(seen) / 3, max(seen) * 3)
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(-0.03, 1.03)
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])


# Columns of a picture of effects, and values of a column whose names can be read.
_MOST_EFFECTS = 12
_MOST_NAMES = 14


@apply_style
def effects(columns: Sequence[ColumnEffect], caption: str = "", stamp: str = "") -> Figure:
    """Draw what each column of a table adds to the output, the farthest first.

    The band is twice the standard deviation of the noise.

    Args:
        columns: of more than 12, and of more classes than colours, those are drawn that reach
            farthest, and the caption says so.
        caption: a line below the title.
        stamp: text across the picture of a run without a certified ε.
    """
    readable = [item for item in columns if item.is_curve or len(item.values) <= _MOST_NAMES]
    farthest_first = sorted(readable, key=lambda item: -item.range)
    chosen = farthest_first[:_MOST_EFFECTS]
    if len(chosen) < len(columns):
        caption = f"{caption}; {len(chosen)} of {len(columns)} columns shown"
    outputs = columns[0].outputs
    kept = _choose_outputs(chosen or columns)
    if len(kept) < len(outputs):
        caption = f"{caption}; {len(kept)} of {len(outputs)} classes shown, which reach farthest"
    rows = max(1, math.ceil(len(chosen) / 2))
    figure = make_figure(_WIDTH, 1.4 + 1.9 * rows, "Effect of each column", caption, stamp)
    grid: Any = figure.subplots(rows, 2, squeeze=False)
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    for axes, item in zip(grid.flat, chosen, strict=False):
        _draw_effect(axes, item, kept)
    if len(outputs) == 1:
        figure.supylabel(outputs[0], fontsize=9, color=INK)
    else:
        handles = [
            Line2D([], [], color=colour, label=plain(outputs[number], 28))
            for number, colour in zip(kept, PALETTE, strict=False)
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=2)
    return figure


def _choose_outputs(columns: Sequence[ColumnEffect]) -> list[int]:
    """Return the places of the outputs that are moved farthest, as many as there are colours."""
    ranges = [np.ptp(item.effects, axis=0) for item in columns]
    reach = np.max(ranges, axis=0)
    order: list[int] = np.argsort(-reach, kind="stable").tolist()
    return sorted(order[: len(PALETTE)])


def _draw_effect(axes: Axes, item: ColumnEffect, kept: Sequence[int]) -> None:
    """Draw what one column adds to the kept outputs: a curve of a number, points of categories."""
    axes.set_title(plain(item.column, 26))
    axes.axhline(0, color=MUTED, linewidth=0.8)
    known = bool(np.isfinite(item.deviation).all())
    places = np.arange(len(item.values))
    is_linear = item.is_curve and _is_linear(item.values)
    numbers: Any = item.values if is_linear else places
    for place, (number, colour) in enumerate(zip(kept, PALETTE, strict=False)):
        values = item.effects[:, number]
        band = 2 * item.deviation[:, number]
        if not item.is_curve:
            # Points of several outputs stand side by side, around the place of their category.
            middle = (len(kept) - 1) / 2
            beside = places + 0.1 * (place - middle)
            error = band if known else None
            axes.errorbar(beside, values, yerr=error, fmt="o", color=colour, elinewidth=1.1)
            continue
        axes.plot(numbers, values, color=colour)
        if known:
            axes.fill_between(
                numbers, values - band, values + band, color=colour, alpha=0.18, linewidth=0
            )
    if is_linear:
        axes.xaxis.set_major_locator(MaxNLocator(4))
        return
    marks: list[int] = places.tolist()
    if item.is_curve:
        marks = np.linspace(0, len(places) - 1, 4).round().astype(int).tolist()
    shown = 10 if _is_of_days(item.values) else 16
    names = [_name_value(item.values[mark], shown) for mark in marks]
    axes.set_xticks(marks, names, rotation=40, ha="right", fontsize=7)


def _name_value(value: Any, shown: int) -> str:
    """Return a number of three digits, so many signs of a date, or a name of a category."""
    if isinstance(value, float):
        rounded = float(f"{value:.3g}")
        return f"{rounded:g}"
    if isinstance(value, datetime):
        return str(value)[:shown]
    return plain(value, 16)


def _is_of_days(values: Sequence[Any]) -> bool:
    """Return whether values are dates over so long a time that hours say nothing."""
    if not isinstance(values[0], datetime):
        return False
    span = values[-1] - values[0]
    return bool(span.days >= len(values))


def _is_linear(values: Sequence[Any]) -> bool:
    """Return whether values in order are numbers with equal distances."""
    if not isinstance(values[0], float):
        return False
    steps = np.diff(values)
    return bool(steps.max() <= 1.01 * steps.min())
