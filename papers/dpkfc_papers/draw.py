"""The look that all figures share with the plots of a run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dpkfc.app.plots import GRID, INK, MUTED, PAPER, PLAIN, SPENT, WARNING, WHITENED
from dpkfc.app.recipes.regression import ERROR
from dpkfc_papers.measurements import LANDSCAPE_METHODS, NAMES, Point, best, importance, maps, plateau, points

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


# --------------------------------------------------------------------------------------------------
# The figures of a training run as pictures: spectra, tracking, densities, signal to noise, the
# realised map.

MOST = 4  # layers side by side
_SMALLEST = 1e-7  # of the largest eigenvalue: below it float32 rows hold rounding
Row = Mapping[str, Any]


def _about(row: Row) -> str:
    run, last = row["run"], row["checkpoints"][-1]
    accuracy = f", {100 * last['accuracy']:.1f} % after {last['step']} steps" if last.get("accuracy") else ""
    trained = f"{run['recipe']}, trained with {run['method']} at ε = {row['epsilon']:.2f}{accuracy}"
    return f"{trained}; {row['sizes']['probe']} examples a factor"


def _chosen(row: Row) -> list[str]:
    names = list(row["checkpoints"][0]["layers"])
    if len(names) <= MOST:
        return names
    return [names[round(i * (len(names) - 1) / (MOST - 1))] for i in range(MOST)]


def _label(row: Row, name: str) -> str:
    layer = row["checkpoints"][0]["layers"][name]
    return f"{layer['module']} {name}  ({layer['sizes']['A']} → {layer['sizes']['G']})"


def _when(checkpoint: Row) -> str:
    return "at initialisation" if checkpoint["step"] == 0 else f"after {checkpoint['step']} steps"


def spectra(row: Row) -> Figure:
    """Eigenvalues of undamped A and G by rank, first and last checkpoint (Figs 2 and 6)."""
    names, ends = _chosen(row), (row["checkpoints"][0], row["checkpoints"][-1])
    figure = sheet(1.2 + 2.9 * len(names), 9.6, "Spectra of undamped curvature factors", _about(row), private=True)
    axes = grid(figure, 4, len(names))
    sources = [s for s in SOURCES if s in ends[0]["layers"][names[0]]["spectra"]["A"]]
    for line, (side, checkpoint) in enumerate((side, checkpoint) for side in "AG" for checkpoint in ends):
        for column, name in enumerate(names):
            title = _label(row, name) if line == 0 else ""
            panel = dressed(axes[line, column], title, "rank of the eigenvalue" if line == 3 else "")
            _spectrum(panel, checkpoint["layers"][name]["spectra"][side], sources)
            if column == 0:
                panel.set_ylabel(f"{side}, {_when(checkpoint)}", fontsize=9.5, color=INK)
    legend(figure, sources)
    return figure


def _spectrum(panel: Axes, spectra: Mapping[str, Sequence[Sequence[float]]], sources: Sequence[str]) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")
    for source in sources:
        largest = spectra[source][0][1]
        kept = [(rank, value) for rank, value in spectra[source] if value > _SMALLEST * largest]
        if kept:
            panel.plot(*zip(*kept, strict=True), **unscored(source))
    low, high = panel.get_ylim()
    decades(panel.yaxis, low, high)
    decades(panel.xaxis, 1, 1e3)


_TRACKED = (
    ("undamped", "A", "cosine", "cos A, undamped"),
    ("undamped", "G", "cosine", "cos G, undamped"),
    ("authors", "G", "cosine", "cos G, + ε·I (artefact)"),
    ("undamped", "F", "cosine", "cos A ⊗ G, undamped"),
    ("undamped", "F", "error", "error A ⊗ G, undamped"),
    ("authors", "G", "error", "error G, + ε·I (artefact)"),
)


def tracking(row: Row) -> Figure:
    """Similarity to the oracle through training, undamped beside the sums of the authors' code (Figs 3, 8 and 9)."""
    names = _chosen(row)
    title = "How alike a probe's factors are to those of the private data"
    figure = sheet(1.4 + 2.7 * len(names), 12.4, title, _about(row), private=True)
    axes = grid(figure, len(_TRACKED), len(names), top=1.5, left=0.95)
    steps = [checkpoint["step"] for checkpoint in row["checkpoints"]]
    sources = [s for s in SOURCES if s in row["checkpoints"][0]["layers"][names[0]]["tracking"]["undamped"]]
    for line, (convention, side, number, label) in enumerate(_TRACKED):
        for column, name in enumerate(names):
            last = line == len(_TRACKED) - 1
            panel = dressed(axes[line, column], _label(row, name) if line == 0 else "", "steps" if last else "")
            for source in sources:
                values = [c["layers"][name]["tracking"][convention][source][side][number] for c in row["checkpoints"]]
                panel.plot(steps, values, marker="o", markersize=3.5, markeredgecolor=PAPER, **unscored(source))
            panel.set_ylim(0, 1.02 if number == "cosine" else max(1.5, panel.get_ylim()[1]))
            panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            if column == 0:
                panel.set_ylabel(label, fontsize=9.5, color=INK)
    legend(figure, sources)
    return figure


def densities(row: Row) -> Figure:
    """Eigenvalues of the whole Fisher matrix by rank, from Lanczos quadrature (Fig. 7)."""
    ends = (row["checkpoints"][0], row["checkpoints"][-1])
    sizes = row["sizes"]
    how = f"{sizes['lanczos_examples']} examples, {sizes['lanczos_steps']} Lanczos steps, {sizes['starts']} start vectors"
    figure = sheet(10.4, 4.9, "Spectrum of the whole Fisher matrix", f"{_about(row).split(';')[0]}; {how}", private=True)
    axes = grid(figure, 1, 2)
    sources = [s for s in SOURCES if s in ends[0]["density"]]
    for panel, checkpoint in zip(axes[0], ends, strict=True):
        dim = next(iter(checkpoint["density"].values()))["dim"]
        dressed(panel, f"{_when(checkpoint)}; d = {dim:,}", "eigenvalues at least as large")
        panel.set_xscale("log")
        panel.set_yscale("log")
        for source in sources:
            one = checkpoint["density"][source]
            largest = one["nodes"][0]
            kept = [(a, n) for a, n in zip(one["above"], one["nodes"], strict=True) if n > 1e-6 * largest and a > 0.3]
            if kept:
                panel.step(*zip(*kept, strict=True), where="pre", **unscored(source))
        decades(panel.yaxis, *panel.get_ylim())
        decades(panel.xaxis, 1, 1e3)
        panel.set_ylabel("eigenvalue", fontsize=9, color=INK)
    legend(figure, sources)
    return figure


def signal(row: Row) -> Figure:
    """Signal-to-noise ratio of private gradients under the metric of each source, layer by layer (Fig. 1)."""
    ends = (row["checkpoints"][0], row["checkpoints"][-1])
    sources = [s for s in SOURCES if s in next(iter(ends[0]["signal"].values()), {})]
    values = [[checkpoint["signal"][name] for name in ends[0]["signal"]] for checkpoint in ends]
    return _dots(
        row, "Signal-to-noise ratio of each layer", [_when(c) for c in ends], names=list(ends[0]["signal"]), sources=sources,
        values=values, below=["norm of a batch of clipped gradients that agree ÷ norm of the noise"] * 2,
    )  # fmt: skip


def realised_map(row: Row) -> Figure:
    """Condition number of F̃^(−½) F F̃^(−½) on the directions that hold 99 % of each side, and its cosine to the identity."""
    ends = (row["checkpoints"][0], row["checkpoints"][-1])
    names = list(ends[0]["layers"])
    every = ends[0]["layers"][names[0]]["realised"]
    sources = [s for s in SOURCES if s in every]

    def of(checkpoint: Row, number: str) -> list[dict[str, float | None]]:
        layers = checkpoint["layers"]
        return [{s: layers[name]["realised"][s]["F"][number] for s in sources} for name in names]

    titles = [f"condition number, {_when(c)}" for c in ends] + [f"cosine to the identity, {_when(c)}" for c in ends]
    return _dots(
        row, "What the preconditioner makes of the private curvature", titles, names=names, sources=sources,
        values=[of(c, "held") for c in ends] + [of(c, "flatness") for c in ends],
        below=["over the directions that hold 99 % of the trace of A and of G"] * 2 + ["1: a multiple of the identity"] * 2,
    )  # fmt: skip


def _dots(
    row: Row, title: str, titles: Sequence[str], *, names: Sequence[str], sources: Sequence[str],
    values: Sequence[Sequence[Mapping[str, float | None]]], below: Sequence[str],
) -> Figure:  # fmt: skip
    lines = math.ceil(len(titles) / 2)
    figure = sheet(12.4, 2.25 + lines * (0.7 + 0.33 * max(3, len(names))), title, _about(row), private=True)
    axes = grid(figure, lines, 2, left=1.9, sharey="row")
    labels = [_short(row, name) for name in names]
    for panel, text, rows, under in zip(axes.flat, titles, values, below, strict=True):
        dressed(panel, text, under)
        for source in sources:
            found = [(one[source], place) for place, one in enumerate(rows) if one.get(source)]
            edge = SOURCES[source]["color"] if source == "oracle, other examples" else PAPER
            panel.scatter(*zip(*found, strict=True), edgecolor=edge, s=44, zorder=3, **marks(source))
        panel.set_yticks(range(len(names)), labels, color=INK)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.set_xscale("log")
        decades(panel.xaxis, *panel.get_xlim())
    legend(figure, sources, marker=True)
    return figure


def _short(row: Row, name: str) -> str:
    module = row["checkpoints"][0]["layers"].get(name, {}).get("module", "")
    return f"{module} {name}".strip()


# --------------------------------------------------------------------------------------------------
# Pictures of mean-field theory beside networks, and of accuracy over settings.

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
    for panel, method in zip(axes[0], LANDSCAPE_METHODS, strict=False):
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
        for method in LANDSCAPE_METHODS
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


# --------------------------------------------------------------------------------------------------
# A picture of a regression's loss over the noise, with and without filters.

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
