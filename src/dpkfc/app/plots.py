"""Draw the pictures of a run without global state.

They show accuracy and ε, the signal-to-noise ratio per layer, and spectra of the factors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)
from numpy.typing import ArrayLike, NDArray

from dpkfc.app.run_folder import write_atomically, write_text
from dpkfc.report.text import ensure_mapping, number, plain, rounded_up

INK = "#22303c"
MUTED = "#6b7886"
GRID = "#e4e8ec"
PAPER = "#ffffff"
WARNING = "#b3261e"
# The style of all pictures, and its colours.
STYLE = Path(__file__).with_name("pictures.mplstyle")
_RC = rc_params_from_file(STYLE, use_default_template=False)
PALETTE: tuple[str, ...] = tuple(_RC["axes.prop_cycle"].by_key()["color"])
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY = PALETTE
PLAIN, WHITENED, SPENT = GREY, VERMILION, BLUE
COLOURS = (PLAIN, WHITENED, SPENT, GREEN, PURPLE, ORANGE)
MAX_PANELS = 16
_DASHES = (0, (4, 3))
# Eigenvalues of a float32 factor below this fraction of the largest are rounding errors.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracy and ε of a run over its steps.

    Attributes:
        label: name of the run.
        steps: steps at which accuracy was measured.
        accuracy: fractions in [0, 1], one for each of `steps`.
        epsilon_steps: steps at which ε is known.
        epsilon: ε spent after each of them.
        target_epsilon: the budget, or None.
        caption: a line below the title, for example "MNIST, ε = 1".
        measured_on: what accuracy was measured on.
        stamp: text across the picture of a run without a certified ε.
        score: name of the figures in `accuracy`.
    """

    label: str
    steps: Sequence[float]
    accuracy: Sequence[float]
    epsilon_steps: Sequence[float] = ()
    epsilon: Sequence[float] = ()
    target_epsilon: float | None = None
    caption: str = ""
    measured_on: str = "test"
    stamp: str = ""
    score: str = "accuracy"


@dataclass(frozen=True, kw_only=True)
class LayerSignal:
    """Signal-to-noise ratio of one layer, without and with the preconditioner."""

    name: str
    plain: float
    preconditioned: float


@dataclass(frozen=True, kw_only=True)
class LayerSpectra:
    """Eigenvalues of the factors of one layer.

    Attributes:
        name: path of the layer.
        values: factor name ("A", "G") to the known eigenvalues in any order; small ones may be left
            out.
        sizes: factor name to its size, where it is not the number of values.
        damping: factor name to what is added to every eigenvalue.
    """

    name: str
    values: Mapping[str, Sequence[float]]
    damping: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def points(self, side: str) -> list[tuple[float, float]]:
        """Return (rank ÷ size, eigenvalue) of a factor, largest first, without rounding errors."""
        known = self.values.get(side, ())
        size = max(1, self.sizes.get(side, len(known)) - 1)
        values = [float(value) for value in known if 0 < value < math.inf]
        values.sort(reverse=True)
        return [
            (rank / size, value)
            for rank, value in enumerate(values)
            if value >= values[0] * _ROUNDING
        ]


def _figure(width: float, height: float, title: str, caption: str = "") -> Figure:
    figure = Figure(
        figsize=(width, height),
        facecolor=PAPER,
        dpi=150,
    )
    FigureCanvasAgg(figure)
    left = 0.35 / width
    figure.text(
        left,
        1 - 0.28 / height,
        title,
        fontsize=13.5,
        fontweight="bold",
        color=INK,
        va="center",
    )
    if caption:
        figure.text(
            left,
            1 - 0.56 / height,
            caption,
            fontsize=9.5,
            color=MUTED,
            va="center",
        )
    return figure


def style_axes(
    axes: Axes, *, grid: Literal["both", "x", "y"] = "both", labelsize: float = 9
) -> None:
    """Style axes without a frame and with a pale grid."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(
        colors=MUTED,
        labelsize=labelsize,
        length=0,
        which="both",
    )
    _draw_grid(axes, grid)


def _draw_grid(axes: Axes, axis: Literal["both", "x", "y"]) -> None:
    axes.grid(
        True,
        axis=axis,
        color=GRID,
        linewidth=0.8,
    )
    axes.set_axisbelow(True)


def _stamp(figure: Figure, text: str) -> None:
    if text:
        figure.text(
            0.5,
            0.5,
            text,
            fontsize=30,
            color=WARNING,
            alpha=0.16,
            rotation=20,
            ha="center",
            va="center",
            weight="bold",
        )


def _label(axes: Axes, text: str) -> None:
    """Write a name above axes, such as that of the vertical axis."""
    axes.set_title(
        text,
        fontsize=10,
        color=INK,
        loc="left",
        pad=7,
    )


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG.

    Raises:
        RunFolderError: the path cannot be written.
    """
    return write_atomically(path, lambda part: figure.savefig(part, facecolor=PAPER, format="png"))


def history(curve: Curve) -> Figure:
    """Draw accuracy above and ε spent below, against the same steps."""
    figure = _figure(8, 5.6, curve.label, curve.caption)
    layout = {"height_ratios": [1.7, 1], "hspace": 0.32, "left": 0.09, "right": 0.9}
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw=layout)
    figure.subplots_adjust(top=0.82, bottom=0.1)
    style_axes(top)
    style_axes(bottom)
    _label(top, f"{curve.score} on the {curve.measured_on} set")
    _draw_accuracy(top, curve)
    _label(bottom, "ε spent")
    steps, epsilon = curve.epsilon_steps, curve.epsilon
    bottom.plot(
        steps,
        epsilon,
        color=SPENT,
        linewidth=2.2,
        solid_capstyle="round",
    )
    if len(epsilon):
        bottom.fill_between(
            steps,
            epsilon,
            color=SPENT,
            alpha=0.10,
            linewidth=0,
        )
        _label_end(bottom, steps[-1], epsilon[-1], rounded_up(epsilon[-1]), SPENT)
    if curve.target_epsilon is not None:
        bottom.axhline(
            curve.target_epsilon,
            color=MUTED,
            linewidth=1,
            linestyle=_DASHES,
        )
        bottom.annotate(
            f"budget ε = {curve.target_epsilon:g}",
            (0, curve.target_epsilon),
            xycoords=("axes fraction", "data"),
            xytext=(4, -11),
            textcoords="offset points",
            fontsize=8.5,
            color=MUTED,
        )
        bottom.set_ylim(0, curve.target_epsilon * 1.12)
    else:
        bottom.set_ylim(bottom=0)
    bottom.set_xlabel("steps", color=MUTED, fontsize=9.5)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_xlim(0, max([1, *curve.steps, *curve.epsilon_steps]))
    _stamp(figure, curve.stamp)
    return figure


def _draw_accuracy(axes: Axes, curve: Curve) -> None:
    _draw_curve(axes, curve, WHITENED, 2.2)
    if len(curve.accuracy):
        low = _floor(curve.accuracy)
        axes.fill_between(
            curve.steps,
            curve.accuracy,
            low,
            color=WHITENED,
            alpha=0.10,
            linewidth=0,
        )
        axes.set_ylim(bottom=low)
        last = curve.accuracy[-1]
        _label_end(axes, curve.steps[-1], last, f"{100 * last:.1f} %", WHITENED)


def _draw_curve(axes: Axes, curve: Curve, colour: str, width: float) -> None:
    """Draw accuracy against steps, with a marker at each point where they are few."""
    axes.plot(
        curve.steps,
        curve.accuracy,
        color=colour,
        linewidth=width,
        marker="o" if len(curve.steps) <= 40 else None,
        markersize=4.5,
        markeredgecolor=PAPER,
        solid_capstyle="round",
        label=curve.label,
        clip_on=False,
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _floor(accuracy: Iterable[float]) -> float:
    return max(0.0, math.floor(10 * min(accuracy) - 0.2) / 10)


def _label_end(
    axes: Axes, x: float, y: float, text: str, colour: str, *, shift: float = 0.0
) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(8, shift),
        textcoords="offset points",
        color=colour,
        fontsize=10.5,
        fontweight="bold",
        va="center",
        annotation_clip=False,
    )


def comparison(curves: Sequence[Curve], title: str, caption: str = "") -> Figure:
    """Draw the accuracy of one or more runs against steps, each labelled where it ends."""
    figure = _figure(8, 4.6, title, caption)
    # Labels such as "DP-SGD  86.4 %" stand to the right of the axes.
    longest = max(len(curve.label) + 8 for curve in curves)
    right = min(0.8, max(0.5, 0.97 - 0.0122 * longest))
    axes = figure.subplots(gridspec_kw={"left": 0.09, "right": right})
    figure.subplots_adjust(top=0.78, bottom=0.13)
    style_axes(axes)
    _label(axes, f"{curves[0].score} on the {curves[0].measured_on} set")
    for curve, colour, shift in zip(curves, COLOURS, _label_shifts(curves), strict=False):
        _draw_curve(axes, curve, colour, 2.4)
        if len(curve.accuracy):
            last = curve.accuracy[-1]
            text = f"{curve.label}  {100 * last:.1f} %"
            _label_end(axes, curve.steps[-1], last, text, colour, shift=shift)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("steps", color=MUTED, fontsize=9.5)
    axes.set_xlim(0, max(step for curve in curves for step in [1, *curve.steps]))
    _stamp(figure, next((curve.stamp for curve in curves if curve.stamp), ""))
    return figure


# Height of the axes of a comparison, in points.
_HEIGHT = 215.0


def _label_shifts(curves: Sequence[Curve]) -> list[float]:
    """Return vertical shifts, in points, that keep labels at the ends of curves from touching."""
    ends = [[0.0, *curve.accuracy][-1] for curve in curves]
    values = [value for curve in curves for value in curve.accuracy] or [0.0, 1.0]
    span = max(max(values) - min(values), 1e-3)
    places = [_HEIGHT * end / span for end in ends]
    shifted = list(places)
    order = sorted(range(len(ends)), key=lambda i: places[i])
    for lower, upper in zip(order, order[1:], strict=False):
        shifted[upper] = max(shifted[upper], shifted[lower] + 14)
    middle = (sum(shifted) - sum(places)) / max(1, len(places))
    return [new - old - middle for new, old in zip(shifted, places, strict=True)]


def signal_to_noise(layers: Sequence[LayerSignal], caption: str = "", stamp: str = "") -> Figure:
    """Draw the signal-to-noise ratio of each layer on a logarithmic axis.

    Rows are in the order of the network, as in Fig. 1 of the DP-KFC paper.

    Args:
        layers: a ratio that is zero leaves its layer out.
        caption: a line below the title.
        stamp: text across the picture of a run without a certified ε.
    """
    shown = [layer for layer in layers if layer.plain > 0 and layer.preconditioned > 0]
    longest = max((len(layer.name) for layer in shown), default=4)
    height = 1.75 + 0.38 * max(3, len(shown))
    figure = _figure(8, height, "Signal-to-noise ratio of each layer", caption)
    left = min(0.4, 0.04 + 0.011 * max(8, longest))
    axes = figure.subplots(gridspec_kw={"left": left, "right": 0.95})
    figure.subplots_adjust(top=1 - 1.2 / height, bottom=0.62 / height)
    style_axes(axes, grid="x")
    rows = np.arange(len(shown))
    plain_ratios = [layer.plain for layer in shown]
    ratios = [layer.preconditioned for layer in shown]
    axes.hlines(
        rows,
        plain_ratios,
        ratios,
        color=GRID,
        linewidth=5,
        zorder=1,
    )
    dots: dict[str, Any] = {"s": 62, "edgecolor": PAPER}
    label = "without the preconditioner"
    axes.scatter(plain_ratios, rows, color=PLAIN, label=label, zorder=3, **dots)
    label = "with the preconditioner"
    axes.scatter(ratios, rows, color=WHITENED, label=label, zorder=4, **dots)
    axes.set_yticks(rows, [layer.name for layer in shown], color=INK)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    if shown:
        axes.set_xscale("log")
        _set_log_limits(axes, plain_ratios + ratios)
    axes.set_xlabel(
        "norm of a batch of clipped gradients that agree ÷ norm of the noise",
        color=MUTED,
        fontsize=9.5,
    )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=2,
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        handletextpad=0.2,
        columnspacing=1.6,
        borderaxespad=0.2,
    )
    _stamp(figure, stamp)
    return figure


def _set_log_limits(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    axes.set_xlim(low / 1.6, high * 1.6)
    if high / low < 30:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def spectra(layers: Sequence[LayerSpectra], caption: str = "", stamp: str = "") -> Figure:
    """Draw the eigenvalues of A and G of every layer, largest first, with the damping dashed.

    Args:
        layers: of more than 16, evenly spaced ones are drawn and the caption says so.
        caption: a line below the title.
        stamp: text across the picture of a run without a certified ε.
    """
    chosen = evenly_spaced(layers, MAX_PANELS)
    rows = max(1, math.ceil(len(chosen) / 4))
    columns = max(1, math.ceil(len(chosen) / rows))
    width = 1.2 + 2.35 * max(columns, 3)
    height = 1.55 + 2.0 * rows
    if len(chosen) < len(layers):
        count = f"{len(chosen)} of {len(layers)} layers shown"
        caption = f"{caption}; {count}" if caption else count
    figure = _figure(width, height, "Spectra of the curvature factors", caption)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left=0.7 / width,
        right=1 - 0.3 / width,
        top=1 - 1.25 / height,
        bottom=0.62 / height,
        wspace=0.3,
        hspace=0.5,
    )
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    for axes, layer in zip(grid.flat, chosen, strict=False):
        _draw_spectrum(axes, layer)
    for column in range(columns):
        below = [row for row in range(rows) if row * columns + column < len(chosen)]
        if below:
            grid[below[-1], column].set_xlabel(
                "rank of the eigenvalue ÷ size", color=MUTED, fontsize=8.5
            )
    handles = [
        Line2D([], [], color=SPENT, linewidth=2.2, label="A, of the inputs"),
        Line2D([], [], color=WHITENED, linewidth=2.2, label="G, of the output gradients"),
        Line2D([], [], color=MUTED, linewidth=1.1, linestyle=_DASHES, label="damping"),
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.28 / width, 1 - 0.68 / height),
        ncols=3,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        borderaxespad=0,
    )
    _stamp(figure, stamp)
    return figure


def evenly_spaced(items: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most so many of the items, the first and the last among them."""
    if len(items) <= most:
        return items
    last = len(items) - 1
    return [items[round(i * last / (most - 1))] for i in range(most)]


def _draw_spectrum(axes: Axes, layer: LayerSpectra) -> None:
    style_axes(axes, labelsize=8)
    axes.set_title(
        layer.name,
        fontsize=9.5,
        color=INK,
        loc="left",
        pad=5,
    )
    axes.set_yscale("log")
    seen = []
    for name, colour in (("A", SPENT), ("G", WHITENED)):
        points = layer.points(name)
        if not points:
            continue
        ranks, values = zip(*points, strict=True)
        axes.plot(
            ranks,
            values,
            color=colour,
            linewidth=2,
            solid_capstyle="round",
            marker="o" if len(values) <= 12 else None,
            markersize=3,
        )
        seen += [values[0], values[-1]]
        damping = layer.damping.get(name, 0)
        if damping > 0:
            axes.axhline(
                damping,
                color=colour,
                linewidth=1.1,
                linestyle=_DASHES,
                alpha=0.8,
            )
            seen.append(damping)
    if seen:
        axes.set_ylim(min(seen) / 3, max(seen) * 3)
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(-0.03, 1.03)
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])


# --------------------------------------------------------------------------------------------------
# Figures of the curvature as numbers: `figures.json` of a run folder, from which a page draws what
# PNG files only show.

FILE = "figures.json"
KIND, VERSION = "dpkfc figures", 1
_POINTS, _PIXELS, _LAYERS = 256, 256, 200
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class SensitivityMap:
    """Accuracy of a method over two of its settings.

    Attributes:
        name: for example the task.
        method: of the runs.
        x: the setting that runs across.
        x_values: its values, from left to right.
        y: the setting that runs upwards.
        y_values: its values, the lowest line first.
        values: accuracies in [0, 1], a row for each value of `y`; None where a run is missing.
        measured_on: the set of the accuracies: "validation" or "test".
        note: a remark on the map.
    """

    name: str
    method: str
    x: str
    x_values: Sequence[float]
    y: str
    y_values: Sequence[float]
    values: Sequence[Sequence[float | None]]
    measured_on: str
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which `read_map` takes."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a run next to its curves.

    Spectra and ratios are measured on a probe, so they are public where the probe is.

    Attributes:
        measured: on what and when they were measured, in words.
        spectra: eigenvalues of the factors, layer by layer.
        signal_to_noise: of each layer.
        sensitivity_maps: accuracy over settings.
    """

    measured: str = ""
    spectra: Sequence[LayerSpectra] = ()
    signal_to_noise: Sequence[LayerSignal] = ()
    sensitivity_maps: Sequence[SensitivityMap] = ()

    def write(self, path: Path) -> Path:
        """Write the figures as JSON, without those that are not finite.

        Of a long spectrum 256 values are kept, evenly spaced in rank.

        Raises:
            RunFolderError: the disk cannot take the file.
        """
        signal = [
            asdict(layer)
            for layer in self.signal_to_noise
            if math.isfinite(layer.plain + layer.preconditioned)
        ]
        content = {
            "kind": KIND,
            "version": VERSION,
            "measured": self.measured,
            "spectra": [_thin_spectra(layer) for layer in self.spectra],
            "signal_to_noise": signal,
            "sensitivity_maps": [one.as_dict() for one in self.sensitivity_maps],
        }
        text = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
        return write_text(path, text)

    @classmethod
    def read(cls, content: Any) -> Figures:
        """Return figures from the parsed content of a file that `write` wrote.

        Raises:
            ValueError: another kind of file, another version, or a damaged file.
        """
        if ensure_mapping(content).get("kind") != KIND:
            raise ValueError(f"{FILE} holds no figures")
        if content.get("version") != VERSION:
            version = plain(content.get("version"), 20)
            raise ValueError(f"{FILE} is of version {version}, this dpkfc reads {VERSION}")
        try:
            return cls(
                measured=str(content.get("measured", "")),
                spectra=_read_list(content, "spectra", _read_spectra),
                signal_to_noise=_read_list(content, "signal_to_noise", _read_signal),
                sensitivity_maps=_read_list(content, "sensitivity_maps", read_map),
            )
        except (TypeError, KeyError, AttributeError, IndexError):
            raise ValueError(f"{FILE} is damaged") from None


def _read_list(content: Any, name: str, read: Callable[[Any], Item]) -> list[Item]:
    return [read(row) for row in content.get(name, [])[:_LAYERS]]


def _thin_spectra(layer: LayerSpectra) -> dict[str, Any]:
    """Return the values of a layer, largest first, with the ranks of those that were kept."""
    values, ranks, sizes = {}, {}, {}
    for side, eigenvalues in layer.values.items():
        ordered = sorted((float(v) for v in eigenvalues if math.isfinite(v)), reverse=True)
        if not ordered:
            continue
        ranks[side] = list(evenly_spaced(range(len(ordered)), _POINTS))
        values[side] = [ordered[rank] for rank in ranks[side]]
        sizes[side] = int(layer.sizes.get(side, len(ordered)))
    damping = {side: float(value) for side, value in layer.damping.items() if math.isfinite(value)}
    return {
        "name": layer.name,
        "values": values,
        "ranks": ranks,
        "sizes": sizes,
        "damping": damping,
    }


def _read_number(value: Any) -> float:
    parsed = number(value)
    if parsed is None:
        raise TypeError("not a number")
    return parsed


def _read_numbers(values: Any) -> list[float]:
    return [_read_number(value) for value in values]


def _read_spectra(row: Mapping[str, Any]) -> LayerSpectra:
    """Return a layer, with values that were left out repeated from their neighbours."""
    values: dict[str, list[float]] = {}
    for side in ("A", "G"):
        if side in row["values"]:
            values[side] = _read_numbers(row["values"][side])
            ranks = row.get("ranks", {}).get(side)
            if ranks is not None:
                whole_ranks = [int(rank) for rank in _read_numbers(ranks)]
                values[side] = _fill_gaps(values[side], whole_ranks)
    damping = {}
    for side, value in row.get("damping", {}).items():
        if side in values and number(value) is not None:
            damping[side] = value
    sizes = {}
    for side, size in row.get("sizes", {}).items():
        if side in values:
            sizes[side] = int(number(size) or 0)
    return LayerSpectra(
        name=str(row["name"]),
        values=values,
        damping=damping,
        sizes=sizes,
    )


def _fill_gaps(known: list[float], ranks: list[int]) -> list[float]:
    """Return one value for each rank up to the last known rank."""
    is_sorted = ranks == sorted(ranks) and len(known) == len(ranks) > 0
    if not is_sorted or ranks[0] < 0 or ranks[-1] > 100_000:
        raise TypeError("ranks")
    values = list(known[:1])
    for value, before, rank in zip(known[1:], ranks, ranks[1:], strict=False):
        values += [value] * (rank - before)
    return values


def _read_signal(row: Mapping[str, Any]) -> LayerSignal:
    return LayerSignal(
        name=str(row["name"]),
        plain=_read_number(row["plain"]),
        preconditioned=_read_number(row["preconditioned"]),
    )


def read_map(row: Mapping[str, Any]) -> SensitivityMap:
    """Return a map from the parsed output of `as_dict`.

    Raises:
        TypeError, KeyError, AttributeError: the values are damaged.
    """
    x_values = _read_numbers(row["x_values"])
    y_values = _read_numbers(row["y_values"])
    values = []
    for line in row["values"]:
        values.append([None if value is None else _read_number(value) for value in line])
    sizes = (len(x_values), len(y_values))
    lengths = [len(line) for line in values]
    if not all(0 < size <= _PIXELS for size in sizes) or lengths != [sizes[0]] * sizes[1]:
        raise TypeError("not a map")
    return SensitivityMap(
        name=str(row["name"]),
        method=str(row["method"]),
        x=str(row["x"]),
        x_values=x_values,
        y=str(row["y"]),
        y_values=y_values,
        values=values,
        measured_on=str(row["measured_on"]),
        note=str(row.get("note", "")),
    )


# --------------------------------------------------------------------------------------------------
# A picture of a partition: which client holds how many records of which label.

_SHADES = LinearSegmentedColormap.from_list("records", ["#f4f7f9", "#7fb0c6", "#1d4f68"])
# Counts are written into up to this many cells.
_WRITTEN = 260


def counts(
    labels: ArrayLike, pieces: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], list[str]]:
    """Return the records of each label with each client, and the names of the labels in order.

    Returns:
        Counts `[clients, labels]`, and the sorted names.
    """
    names, kinds = np.unique(np.asarray(labels), return_inverse=True)
    kinds = kinds.reshape(-1)
    table = np.stack([np.bincount(kinds[piece], minlength=len(names)) for piece in pieces])
    return table, [str(name) for name in names]


def partition(
    labels: ArrayLike,
    pieces: Sequence[NDArray[np.int64]],
    *,
    caption: str = "",
) -> Figure:
    """Draw labels by client as shaded counts, with each client's size next to them.

    The counts are of a study's public data.

    Args:
        labels: of all records `[n]`.
        pieces: records of each client.
        caption: below the title.
    """
    table, kinds = counts(labels, pieces)
    names = [str(i) for i in range(len(table))]
    height = min(12.0, 1.9 + 0.3 * len(table))
    figure = _figure(8.4, height, "What each client holds", caption)
    left = 0.08 + 0.009 * len(names[-1])
    bottom = 0.62 / height
    top = 1 - 1.08 / height
    cells = figure.add_axes((left, bottom, 0.7 - left, top - bottom))
    sizes = figure.add_axes((0.73, bottom, 0.21, top - bottom), sharey=cells)
    cells.imshow(
        table,
        aspect="auto",
        cmap=_SHADES,
        vmin=0,
        vmax=max(1, int(table.max())),
    )
    _write_counts(cells, table)
    cells.set_yticks(range(len(names)), names)
    cells.set_xticks(range(len(kinds)), kinds)
    if len(names) > 30:
        cells.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    cells.set_xlabel("label", color=MUTED, fontsize=9)
    cells.set_ylabel("client", color=MUTED, fontsize=9)
    _label(cells, "records of each label")
    _draw_totals(sizes, table.sum(1))
    for axes in (cells, sizes):
        axes.tick_params(
            colors=MUTED,
            labelsize=8.5,
            length=0,
        )
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def _write_counts(axes: Any, table: NDArray[np.int64]) -> None:
    if table.size > _WRITTEN:
        return
    dark = 0.55 * table.max()
    for (row, column), count in np.ndenumerate(table):
        if count:
            colour = PAPER if count > dark else INK
            axes.text(
                column,
                row,
                f"{count:,}",
                ha="center",
                va="center",
                fontsize=7.5,
                color=colour,
            )


def _draw_totals(axes: Any, totals: NDArray[np.int64]) -> None:
    axes.barh(range(len(totals)), totals, color=SPENT, height=0.62)
    _label(axes, "all records")
    axes.tick_params(labelleft=False)
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    _draw_grid(axes, "x")
    axes.set_xlim(0, 1.05 * max(1, int(totals.max())))
