"""Pictures of a run, drawn without global state: accuracy and ε, signal-to-noise per layer, spectra of the factors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from numpy.typing import ArrayLike, NDArray

from dpkfc.app.run_folder import placed
from dpkfc.report.numbers import number, plain, rounded_up

INK, MUTED, GRID, PAPER = "#22303c", "#6b7886", "#e4e8ec", "#ffffff"
PLAIN, WHITENED, SPENT, WARNING = "#8a97a6", "#d1662b", "#2f6f8f", "#b3261e"
COLOURS = (PLAIN, WHITENED, SPENT, "#5b8c5a", "#7d5ba6", "#a6813c")
MAX_PANELS = 16
_ROUNDING = 1e-6  # eigenvalues of a float32 factor below this share of the largest are rounding, whatever they say


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a run did over its steps.

    Attributes:
        label: name of the run.
        steps: steps at which accuracy was measured.
        accuracy: fractions in [0, 1], one a step of `steps`.
        epsilon_steps: steps at which ε is known.
        epsilon: ε spent after each of them.
        target_epsilon: the budget, or None.
        caption: a line below the title, for example "MNIST, ε = 1".
        measured_on: what accuracy was measured on.
        stamp: text across the picture of a run without a certified ε.
        score: what the figures in `accuracy` are.
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
        values: factor name ("A", "G") to the known eigenvalues in any order; small ones may be left out.
        sizes: factor name to its size, where it is not the number of values.
        damping: factor name to what is added to every eigenvalue.
    """

    name: str
    values: Mapping[str, Sequence[float]]
    damping: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


def _figure(width: float, height: float, title: str, caption: str = "") -> Figure:
    figure = Figure(figsize=(width, height), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(figure)
    figure.text(0.35 / width, 1 - 0.28 / height, title, fontsize=13.5, fontweight="bold", color=INK, va="center")
    if caption:
        figure.text(0.35 / width, 1 - 0.56 / height, caption, fontsize=9.5, color=MUTED, va="center")
    return figure


def _dress(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, which="both")
    axes.grid(True, axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _stamp(figure: Figure, text: str) -> None:
    if text:
        figure.text(
            0.5, 0.5, text, fontsize=30, color=WARNING, alpha=0.16, rotation=20, ha="center", va="center", weight="bold"
        )


def _label(axes: Axes, text: str) -> None:
    """The name of the vertical axis, written where it is read: above the axis."""
    axes.set_title(text, fontsize=10, color=INK, loc="left", pad=7)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG.

    Raises:
        RunFolderError: the path cannot be written.
    """
    return placed(path, lambda part: figure.savefig(part, facecolor=PAPER, format="png"))


def history(curve: Curve) -> Figure:
    """Accuracy above, ε spent below, against the same steps."""
    figure = _figure(8, 5.6, curve.label, curve.caption)
    top, bottom = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [1.7, 1], "hspace": 0.32, "left": 0.09, "right": 0.9}
    )
    figure.subplots_adjust(top=0.82, bottom=0.1)
    _dress(top)
    _dress(bottom)
    _label(top, f"{curve.score} on the {curve.measured_on} set")
    _accuracy(top, curve, WHITENED, fill=True)
    _label(bottom, "ε spent")
    bottom.plot(curve.epsilon_steps, curve.epsilon, color=SPENT, linewidth=2.2, solid_capstyle="round")
    if len(curve.epsilon):
        bottom.fill_between(curve.epsilon_steps, curve.epsilon, color=SPENT, alpha=0.10, linewidth=0)
        _end_label(bottom, curve.epsilon_steps[-1], curve.epsilon[-1], rounded_up(curve.epsilon[-1]), SPENT)
    if curve.target_epsilon is not None:
        bottom.axhline(curve.target_epsilon, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        bottom.annotate(
            f"budget ε = {curve.target_epsilon:g}", (0, curve.target_epsilon), xycoords=("axes fraction", "data"),
            xytext=(4, -11), textcoords="offset points", fontsize=8.5, color=MUTED,
        )  # fmt: skip
        bottom.set_ylim(0, curve.target_epsilon * 1.12)
    else:
        bottom.set_ylim(bottom=0)
    bottom.set_xlabel("steps", color=MUTED, fontsize=9.5)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_xlim(0, max([1, *curve.steps, *curve.epsilon_steps]))
    _stamp(figure, curve.stamp)
    return figure


def _accuracy(axes: Axes, curve: Curve, colour: str, *, fill: bool = False) -> None:
    few = len(curve.steps) <= 40
    axes.plot(
        curve.steps, curve.accuracy, color=colour, linewidth=2.2, marker="o" if few else None, markersize=4.5,
        markeredgecolor=PAPER, solid_capstyle="round", label=curve.label, clip_on=False,
    )  # fmt: skip
    if len(curve.accuracy):
        if fill:
            low = _floor(curve.accuracy)
            axes.fill_between(curve.steps, curve.accuracy, low, color=colour, alpha=0.10, linewidth=0)
            axes.set_ylim(bottom=low)
        _end_label(axes, curve.steps[-1], curve.accuracy[-1], f"{100 * curve.accuracy[-1]:.1f} %", colour)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _floor(accuracy: Iterable[float]) -> float:
    return max(0.0, math.floor(10 * min(accuracy) - 0.2) / 10)


def _end_label(axes: Axes, x: float, y: float, text: str, colour: str, *, shift: float = 0.0) -> None:
    axes.annotate(
        text, (x, y), xytext=(8, shift), textcoords="offset points", color=colour, fontsize=10.5, fontweight="bold",
        va="center", annotation_clip=False,
    )  # fmt: skip


def comparison(curves: Sequence[Curve], title: str, caption: str = "") -> Figure:
    """Accuracy of several runs against steps, each labelled where it ends."""
    figure = _figure(8, 4.6, title, caption)
    axes = figure.subplots(gridspec_kw={"left": 0.09, "right": 0.8})
    figure.subplots_adjust(top=0.78, bottom=0.13)
    _dress(axes)
    _label(axes, f"{curves[0].score} on the {curves[0].measured_on} set" if curves else "accuracy")
    shifts = _apart([curve.accuracy[-1] if len(curve.accuracy) else 0.0 for curve in curves], curves)
    for curve, colour, shift in zip(curves, COLOURS, shifts, strict=False):
        marker = "o" if len(curve.steps) <= 40 else None
        axes.plot(
            curve.steps, curve.accuracy, color=colour, linewidth=2.4, marker=marker, markersize=4.5,
            markeredgecolor=PAPER, solid_capstyle="round", clip_on=False,
        )  # fmt: skip
        if len(curve.accuracy):
            text = f"{curve.label}  {100 * curve.accuracy[-1]:.1f} %"
            _end_label(axes, curve.steps[-1], curve.accuracy[-1], text, colour, shift=shift)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("steps", color=MUTED, fontsize=9.5)
    axes.set_xlim(0, max([1, *(step for curve in curves for step in curve.steps)]))
    _stamp(figure, next((curve.stamp for curve in curves if curve.stamp), ""))
    return figure


def _apart(ends: Sequence[float], curves: Sequence[Curve], height_points: float = 215.0) -> list[float]:
    """Vertical shifts in points that keep labels at the ends of curves from touching."""
    values = [a for curve in curves for a in curve.accuracy] or [0.0, 1.0]
    span = max(max(values) - min(values), 1e-3)
    places = [height_points * end / span for end in ends]
    shifted = list(places)
    order = sorted(range(len(ends)), key=lambda i: places[i])
    for lower, upper in zip(order, order[1:], strict=False):
        shifted[upper] = max(shifted[upper], shifted[lower] + 14)
    middle = (sum(shifted) - sum(places)) / max(1, len(places))
    return [new - old - middle for new, old in zip(shifted, places, strict=True)]


def signal_to_noise(layers: Sequence[LayerSignal], caption: str = "", stamp: str = "") -> Figure:
    """Per-layer signal-to-noise ratio, one row a layer in the order of the network, on a logarithmic axis.

    What Fig. 1 of the DP-KFC paper shows.

    Args:
        layers: a ratio that is zero leaves its layer out.
        caption: a line below the title.
        stamp: text across the picture of a run without a certified ε.
    """
    shown = [layer for layer in layers if layer.plain > 0 and layer.preconditioned > 0]
    longest = max((len(layer.name) for layer in shown), default=4)
    height = 1.75 + 0.38 * max(3, len(shown))
    figure = _figure(8, height, "Signal-to-noise ratio of each layer", caption)
    axes = figure.subplots(gridspec_kw={"left": min(0.4, 0.04 + 0.011 * max(8, longest)), "right": 0.95})
    figure.subplots_adjust(top=1 - 1.2 / height, bottom=0.62 / height)
    _dress(axes, grid="x")
    rows = np.arange(len(shown))
    plain, whitened = [s.plain for s in shown], [s.preconditioned for s in shown]
    axes.hlines(rows, plain, whitened, color=GRID, linewidth=5, zorder=1)
    axes.scatter(plain, rows, s=62, color=PLAIN, label="without the preconditioner", zorder=3, edgecolor=PAPER)
    axes.scatter(whitened, rows, s=62, color=WHITENED, label="with the preconditioner", zorder=4, edgecolor=PAPER)
    axes.set_yticks(rows, [layer.name for layer in shown], color=INK)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    if shown:
        axes.set_xscale("log")
        _log_limits(axes, plain + whitened)
    axes.set_xlabel("norm of a batch of clipped gradients that agree ÷ norm of the noise", color=MUTED, fontsize=9.5)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, frameon=False, fontsize=9.5, labelcolor=INK,
        handletextpad=0.2, columnspacing=1.6, borderaxespad=0.2,
    )  # fmt: skip
    _stamp(figure, stamp)
    return figure


def _log_limits(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    axes.set_xlim(low / 1.6, high * 1.6)
    if high / low < 30:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def spectra(layers: Sequence[LayerSpectra], caption: str = "", stamp: str = "") -> Figure:
    """Eigenvalues of A and G of every layer, largest first; dashed lines are the damping. At most 16 panels.

    Args:
        layers: of more than 16, evenly spaced ones are shown and the caption says so.
        caption: a line below the title.
        stamp: text across the picture of a run without a certified ε.
    """
    chosen = _evenly(layers, MAX_PANELS)
    rows = max(1, math.ceil(len(chosen) / 4))
    columns = max(1, math.ceil(len(chosen) / rows))
    width, height = 1.2 + 2.35 * max(columns, 3), 1.55 + 2.0 * rows
    if len(chosen) < len(layers):
        caption = f"{caption}{'; ' if caption else ''}{len(chosen)} of {len(layers)} layers shown"
    figure = _figure(width, height, "Spectra of the curvature factors", caption)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left=0.7 / width, right=1 - 0.3 / width, top=1 - 1.25 / height, bottom=0.62 / height, wspace=0.3, hspace=0.5
    )
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    for axes, layer in zip(grid.flat, chosen, strict=False):
        _spectrum(axes, layer)
    for column in range(columns):
        below = [row for row in range(rows) if row * columns + column < len(chosen)]
        if below:
            grid[below[-1], column].set_xlabel("rank of the eigenvalue ÷ size", color=MUTED, fontsize=8.5)
    handles = [
        figure.axes[0].plot([], [], color=colour, linewidth=2.2, label=name)[0]
        for name, colour in (("A, of the inputs", SPENT), ("G, of the output gradients", WHITENED))
    ]
    handles += figure.axes[0].plot([], [], color=MUTED, linewidth=1.1, linestyle=(0, (4, 3)), label="damping")
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.28 / width, 1 - 0.68 / height), ncols=3, frameon=False,
        fontsize=9, labelcolor=INK, borderaxespad=0,
    )  # fmt: skip
    _stamp(figure, stamp)
    return figure


def _evenly(items: Sequence[LayerSpectra], most: int) -> list[LayerSpectra]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _spectrum(axes: Axes, layer: LayerSpectra) -> None:
    _dress(axes)
    axes.set_title(layer.name, fontsize=9.5, color=INK, loc="left", pad=5)
    axes.set_yscale("log")
    seen = []
    for name, colour in (("A", SPENT), ("G", WHITENED)):
        values = np.sort(np.asarray(layer.values.get(name, ()), dtype=float))[::-1]
        values = values[np.isfinite(values) & (values > 0)]
        if not len(values):
            continue
        kept = values[values >= values[0] * _ROUNDING]
        total = max(1, layer.sizes.get(name, len(layer.values[name])) - 1)
        axes.plot(
            np.arange(len(kept)) / total, kept, color=colour, linewidth=2, solid_capstyle="round",
            marker="o" if len(kept) <= 12 else None, markersize=3,
        )  # fmt: skip
        seen += [kept[0], kept[-1]]
        if layer.damping.get(name, 0) > 0:
            axes.axhline(layer.damping[name], color=colour, linewidth=1.1, linestyle=(0, (4, 3)), alpha=0.8)
            seen.append(layer.damping[name])
    if seen:
        axes.set_ylim(min(seen) / 3, max(seen) * 3)
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(-0.03, 1.03)
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    axes.tick_params(labelsize=8)


# --------------------------------------------------------------------------------------------------
# Figures of the curvature as numbers: `figures.json` of a run folder, from which a page draws what
# PNG files only show.

FILE = "figures.json"
KIND, VERSION = "dpkfc figures", 1
_POINTS, _PIXELS, _LAYERS = 256, 256, 200


@dataclass(frozen=True, kw_only=True)
class SensitivityMap:
    """How sensitive the accuracy of a method is to two of its settings.

    Attributes:
        name: what is shown, for example the task.
        method: whose runs.
        x: the setting that runs across.
        x_values: its values, from left to right.
        y: the setting that runs upwards.
        y_values: its values, the lowest line first.
        values: accuracies in [0, 1], a row for each value of `y`; None where a run is missing.
        measured_on: the set that judged them: "validation" or "test".
        note: what else is to be told of them, in words.
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
        """For JSON; `read_map` takes it back."""
        return {**asdict(self), "values": [list(row) for row in self.values]}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is drawn of a run beside its curves; spectra and ratios are measured on a probe, so public where the probe is.

    Attributes:
        measured: on what and when, in words.
        spectra: eigenvalues of the factors, layer by layer.
        signal_to_noise: of each layer.
        sensitivity_maps: accuracy over settings.
    """

    measured: str = ""
    spectra: Sequence[LayerSpectra] = ()
    signal_to_noise: Sequence[LayerSignal] = ()
    sensitivity_maps: Sequence[SensitivityMap] = ()

    def write(self, path: Path) -> Path:
        """The figures as JSON; of a long spectrum 256 values are kept, evenly spaced in rank. What is not finite is left out.

        Raises:
            RunFolderError: the disk cannot take it.
        """
        content = {
            "kind": KIND,
            "version": VERSION,
            "measured": self.measured,
            "spectra": [_thinned(layer) for layer in self.spectra],
            "signal_to_noise": [
                {"name": s.name, "plain": s.plain, "preconditioned": s.preconditioned}
                for s in self.signal_to_noise
                if math.isfinite(s.plain + s.preconditioned)
            ],
            "sensitivity_maps": [one.as_dict() for one in self.sensitivity_maps],
        }
        text = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
        return placed(path, lambda part: part.write_text(text, "utf-8"))

    @classmethod
    def read(cls, content: Any) -> Figures:
        """Figures from what `write` wrote, already parsed.

        Raises:
            ValueError: not such a file, of another version, or damaged.
        """
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ValueError(f"{FILE} holds no figures")
        if content.get("version") != VERSION:
            raise ValueError(f"{FILE} is of version {plain(content.get('version'), 20)}, this dpkfc reads {VERSION}")
        try:
            return cls(
                measured=str(content.get("measured", "")),
                spectra=[_spectra(row) for row in content.get("spectra", [])[:_LAYERS]],
                signal_to_noise=[_signal(row) for row in content.get("signal_to_noise", [])[:_LAYERS]],
                sensitivity_maps=[read_map(row) for row in content.get("sensitivity_maps", [])[:_LAYERS]],
            )
        except (TypeError, KeyError, AttributeError, IndexError):
            raise ValueError(f"{FILE} is damaged") from None


def _thinned(layer: LayerSpectra) -> dict[str, Any]:
    """Largest first; sizes are those of the factors, and `ranks` says which values were kept."""
    values, ranks, sizes = {}, {}, {}
    for side, found in layer.values.items():
        ordered = sorted((float(v) for v in found if math.isfinite(v)), reverse=True)
        if not ordered:
            continue
        count = min(len(ordered), _POINTS)
        chosen = sorted({round(i * (len(ordered) - 1) / max(1, count - 1)) for i in range(count)})
        values[side], ranks[side] = [ordered[i] for i in chosen], chosen
        sizes[side] = int(layer.sizes.get(side, len(ordered)))
    damping = {side: float(value) for side, value in layer.damping.items() if math.isfinite(value)}
    return {"name": layer.name, "values": values, "ranks": ranks, "sizes": sizes, "damping": damping}


def _numbers(found: Any) -> list[float]:
    values = [number(value) for value in found]
    if any(value is None for value in values):
        raise TypeError("not a number")
    return [value for value in values if value is not None]


def _spectra(row: Mapping[str, Any]) -> LayerSpectra:
    """A layer; values that were left out are bridged by those beside them, so that ranks stay what they were."""
    values: dict[str, list[float]] = {}
    for side in ("A", "G"):
        if side in row["values"]:
            found = _numbers(row["values"][side])
            ranks = row.get("ranks", {}).get(side)
            values[side] = found if ranks is None else _filled(found, [int(r) for r in _numbers(ranks)])
    damping = {side: value for side, value in row.get("damping", {}).items() if side in values and number(value) is not None}
    sizes = {side: int(number(size) or 0) for side, size in row.get("sizes", {}).items() if side in values}
    return LayerSpectra(name=str(row["name"]), values=values, damping=damping, sizes=sizes)


def _filled(found: list[float], ranks: list[int]) -> list[float]:
    if len(found) != len(ranks) or not ranks or ranks != sorted(ranks) or ranks[0] < 0 or ranks[-1] > 100_000:
        raise TypeError("ranks")
    values = list(found[:1])
    for value, before, rank in zip(found[1:], ranks, ranks[1:], strict=False):
        values += [value] * (rank - before)
    return values


def _signal(row: Mapping[str, Any]) -> LayerSignal:
    without, with_it = _numbers([row["plain"], row["preconditioned"]])
    return LayerSignal(name=str(row["name"]), plain=without, preconditioned=with_it)


def read_map(row: Mapping[str, Any]) -> SensitivityMap:
    """A map from what `as_dict` gave, already parsed.

    Raises:
        TypeError, KeyError, AttributeError: damaged.
    """
    x_values, y_values = _numbers(row["x_values"]), _numbers(row["y_values"])
    values = [[None if value is None else _numbers([value])[0] for value in line] for line in row["values"]]
    wide, high = len(x_values), len(y_values)
    if not (0 < wide <= _PIXELS and 0 < high <= _PIXELS) or [len(line) for line in values] != [wide] * high:
        raise TypeError("not a map")
    texts = {name: str(row[name]) for name in ("name", "method", "x", "y", "measured_on")}
    return SensitivityMap(x_values=x_values, y_values=y_values, values=values, note=str(row.get("note", "")), **texts)


# --------------------------------------------------------------------------------------------------
# A picture of a partition: which client holds how many records of which label.

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
