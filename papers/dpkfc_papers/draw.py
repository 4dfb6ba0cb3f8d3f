"""The figures of papers as pictures, in the style of the plots of a run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dpkfc.app.picture_data import evenly_spaced
from dpkfc.app.picture_style import (
    GRID,
    INK,
    MUTED,
    PAPER,
    PLAIN,
    PURPLE,
    SKY,
    SPENT,
    WARNING,
    WHITENED,
)
from dpkfc_papers.noise_sweep import Point, best, points
from dpkfc_papers.recipes.regression import REGRESSION_ERROR
from dpkfc_papers.sensitivity import LANDSCAPE_METHODS, NAMES, importance, plateau, tabulate

OTHER_EXAMPLES = "oracle, other examples"
# Offset and lengths of dashes and gaps.
_LONG_DASHES = (0, (5, 2))
_DASHES = (0, (4, 3))
_SHORT_DASHES = (0, (2, 1.5))
_DOTS = (0, (1, 1.4))
SOURCES: dict[str, dict[str, Any]] = {
    "none": {"color": SKY, "label": "no preconditioner"},
    "nothing": {"color": SKY, "label": "no preconditioner"},
    "white noise": {"color": PLAIN},
    "pink noise": {"color": WHITENED},
    "public": {"color": SPENT, "label": "public (the other set)"},
    "oracle": {"color": INK, "linestyle": _LONG_DASHES, "label": "oracle (private data)"},
    OTHER_EXAMPLES: {"color": INK, "linestyle": _DOTS, "label": OTHER_EXAMPLES},
    "random directions": {
        "color": PURPLE,
        "linestyle": _SHORT_DASHES,
        "label": "random directions (control)",
    },
}
_NOTE = (
    "NOT private: compared with the factors of private examples. "
    "A research measurement on public benchmark data."
)
Row = Mapping[str, Any]


def sheet(
    width: float, height: float, title: str, caption: str = "", *, private: bool = False
) -> Figure:
    """Return an empty figure with title, caption, and the mark of what is not private."""
    figure = Figure(figsize=(width, height), facecolor=PAPER, dpi=130)
    FigureCanvasAgg(figure)
    left = 0.3 / width

    title_y = 1 - 0.27 / height
    caption_y = 1 - 0.54 / height
    figure.text(left, title_y, title, color=INK, fontsize=13.5, fontweight="bold", va="center")
    figure.text(left, caption_y, caption, color=MUTED, fontsize=9.5, va="center")
    if private:
        figure.text(left, 0.16 / height, _NOTE, color=WARNING, fontsize=8.5, va="center")
    return figure


def grid(
    figure: Figure, rows: int, columns: int, *, top: float = 1.3, left: float = 0.75, **options: Any
) -> Any:
    """Return axes `[rows, columns]` with room (inches) above for a title and at the left."""
    width, height = figure.get_size_inches()
    axes: Any = figure.subplots(rows, columns, squeeze=False, **options)
    figure.subplots_adjust(
        left=left / width,
        right=1 - 0.3 / width,
        top=1 - top / height,
        bottom=0.9 / height,
        wspace=0.34,
        hspace=0.42,
    )
    return axes


def dress(axes: Axes, title: str = "", below: str = "") -> Axes:
    """Style axes, with texts above and below."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=8, length=0, which="both")
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left", pad=5)
    axes.set_xlabel(below, color=MUTED, fontsize=8.5)
    return axes


def _dress_table(axes: Any, titles: Sequence[str], below: str) -> None:
    """Style axes `[rows, columns]`, with titles above the first row and a text below the last."""
    last = len(axes) - 1
    for line, panels in enumerate(axes):
        for panel, title in zip(panels, titles, strict=True):
            dress(panel, title if line == 0 else "", below if line == last else "")


def add_legend(
    figure: Figure, handles: Sequence[Any], *, left: float, fontsize: float = 9, **options: Any
) -> None:
    """Add a legend below the caption, `left` inches from the edge."""
    width, height = figure.get_size_inches()
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left / width, 1 - 0.66 / height),
        frameon=False,
        fontsize=fontsize,
        labelcolor=INK,
        borderaxespad=0,
        **options,
    )


def _add_source_legend(figure: Figure, sources: Sequence[str], *, marker: bool = False) -> None:
    handles = []
    for source in sources:
        style = {"label": source, **SOURCES[source]}
        if marker:
            style |= {"linestyle": "", "markersize": 7, "markeredgecolor": style["color"]}
            style |= _marker(source)
        handles.append(Line2D([], [], linewidth=2, **style))
    add_legend(
        figure,
        handles,
        left=0.27,
        ncols=min(4, len(handles)),
        borderpad=0.2,
        columnspacing=1.4,
        handlelength=0.8 if marker else 2.4,
    )


def _marker(source: str) -> dict[str, Any]:
    """Return a dot, a diamond for the oracle, or an open one for the oracle's other examples."""
    colour = PAPER if source == OTHER_EXAMPLES else SOURCES[source]["color"]
    return {"marker": "D" if source.startswith("oracle") else "o", "color": colour}


def _line_style(source: str) -> dict[str, Any]:
    """Return the style of a source's line, without a label."""
    style = {**SOURCES[source], "linewidth": 1.9}
    style.pop("label", None)
    return style


def _set_decades(axis: Any, low: float, high: float) -> None:
    """Set ticks of a logarithmic axis that stay readable below two decades."""
    subs = (1, 2, 5) if high < 60 * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=7))
    axis.set_major_formatter(FuncFormatter(_power_text))
    axis.set_minor_formatter(NullFormatter())


def _power_text(x: float, _: Any) -> str:
    exponent = 0
    if x > 0:
        exponent = math.floor(math.log10(x) + 1e-9)
    if -3 <= exponent < 4:
        return f"{x:g}"
    first = round(x / 10.0**exponent)
    factor = "" if first == 1 else f"{first} \\cdot "
    return f"${factor}10^{{{exponent}}}$"


def _set_log_scales(panel: Axes) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")


def _draw_reference(panel: Axes, value: float) -> None:
    """Draw a dashed line at a value to compare with."""
    panel.axhline(value, color=MUTED, linewidth=1, linestyle=_DASHES)


def _label_rows(panel: Axes, label: str) -> None:
    panel.set_ylabel(label, fontsize=9.5, color=INK)


# --------------------------------------------------------------------------------------------------
# The figures of a training run: spectra, tracking, densities, signal to noise, the realised map.

# Layers side by side.
MOST = 4
# Below this fraction of the largest eigenvalue float32 rows hold rounding.
_SMALLEST = 1e-7


def _describe(row: Row) -> str:
    run = row["run"]
    last = row["checkpoints"][-1]
    accuracy = ""
    if last.get("accuracy"):
        accuracy = f", {100 * last['accuracy']:.1f} % after {last['step']} steps"
    epsilon = f"ε = {row['epsilon']:.2f}"
    return f"{run['recipe']}, trained with {run['method']} at {epsilon}{accuracy}"


def _caption(row: Row) -> str:
    return f"{_describe(row)}; {row['sizes']['probe']} examples a factor"


def _ends(row: Row) -> tuple[Row, Row]:
    """Return the first and the last checkpoint."""
    return row["checkpoints"][0], row["checkpoints"][-1]


def _select_layers(row: Row) -> Sequence[str]:
    return evenly_spaced(list(row["checkpoints"][0]["layers"]), MOST)


def _select_sources(known: Any) -> list[str]:
    """Return the sources that were measured, in the order of the legend."""
    return [source for source in SOURCES if source in known]


def _layer_title(row: Row, name: str) -> str:
    layer = row["checkpoints"][0]["layers"][name]
    sizes = layer["sizes"]
    return f"{layer['module']} {name}\n({sizes['A']} → {sizes['G']})"


def _time_text(checkpoint: Row) -> str:
    return "at initialisation" if checkpoint["step"] == 0 else f"after {checkpoint['step']} steps"


def spectra(row: Row) -> Figure:
    """Draw eigenvalues of undamped A and G by rank, at both ends of training (Figs 2 and 6)."""
    names = _select_layers(row)
    ends = _ends(row)
    title = "Spectra of undamped curvature factors"
    width = max(8, 1.1 + 1.9 * len(names))
    figure = sheet(width, 9.6, title, _caption(row), private=True)
    axes = grid(figure, 4, len(names), top=1.5)
    first_layer = ends[0]["layers"][names[0]]
    sources = _select_sources(first_layer["spectra"]["A"])
    _dress_table(axes, [_layer_title(row, name) for name in names], "rank of the eigenvalue")
    lines = [(side, checkpoint) for side in "AG" for checkpoint in ends]
    for panels, (side, checkpoint) in zip(axes, lines, strict=True):
        for panel, name in zip(panels, names, strict=True):
            spectra = checkpoint["layers"][name]["spectra"]
            _draw_spectrum(panel, spectra[side], sources)
        _label_rows(panels[0], f"{side}, {_time_text(checkpoint)}")
    _add_source_legend(figure, sources)
    return figure


def _draw_spectrum(
    panel: Axes, spectra: Mapping[str, Sequence[Sequence[float]]], sources: Sequence[str]
) -> None:
    _set_log_scales(panel)
    for source in sources:
        ranks, values = np.array(spectra[source]).T
        is_shown = values > _SMALLEST * values[0]
        if is_shown.any():
            panel.plot(ranks[is_shown], values[is_shown], **_line_style(source))
    _set_decades(panel.yaxis, *panel.get_ylim())
    _set_decades(panel.xaxis, 1, 1e3)


_TRACKED = (
    ("undamped", "A", "cosine", "cos A"),
    ("undamped", "G", "cosine", "cos G"),
    ("undamped", "F", "cosine", "cos A ⊗ G"),
    ("undamped", "F", "error", "error A ⊗ G"),
)


def tracking(row: Row) -> Figure:
    """Draw similarity to the oracle through training (Figs 3, 8 and 9), of undamped factors.

    A line has the range of the authors' sums, whose added identity hides every difference.
    """
    names = _select_layers(row)
    checkpoints = row["checkpoints"]
    title = "Undamped factors of probes and of private data"
    width = max(8, 1.1 + 1.9 * len(names))
    figure = sheet(width, 7.4, title, _caption(row), private=True)
    figure.text(0.3 / width, 0.36 / 7.4, _describe_sums(row, names), color=MUTED, fontsize=8.5)
    axes = grid(figure, len(_TRACKED), len(names), top=1.5, left=0.75)
    steps = [checkpoint["step"] for checkpoint in checkpoints]
    first_layer = checkpoints[0]["layers"][names[0]]
    sources = _select_sources(first_layer["tracking"]["undamped"])
    _dress_table(axes, [_layer_title(row, name) for name in names], "steps")
    for panels, (convention, side, number, label) in zip(axes, _TRACKED, strict=True):
        for panel, name in zip(panels, names, strict=True):
            layers = [
                checkpoint["layers"][name]["tracking"][convention] for checkpoint in checkpoints
            ]
            for source in sources:
                values = [layer[source][side][number] for layer in layers]
                style = _line_style(source) | {"marker": "o", "markersize": 3.5}
                panel.plot(steps, values, markeredgecolor=PAPER, **style)
            top = 1.02 if number == "cosine" else max(1.5, panel.get_ylim()[1])
            panel.set_ylim(0, top)
            panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        _label_rows(panels[0], label)
    _add_source_legend(figure, sources)
    return figure


def _describe_sums(row: Row, names: Sequence[str]) -> str:
    """Return the range of G on the authors' sums, where nothing differs."""
    found: dict[str, list[float]] = {"cosine": [], "error": []}
    for checkpoint in row["checkpoints"]:
        for name in names:
            for source in checkpoint["layers"][name]["tracking"]["authors"].values():
                for number, values in found.items():
                    values.append(source["G"][number])
    least, most = min(found["cosine"]), max(found["error"])
    return (
        f"Not shown: with the authors' + ε·I, cos G of all sources (random too) is at least"
        f" {least:.3f}, and the error at most {most:.3f}"
    )


def densities(row: Row) -> Figure:
    """Draw eigenvalues of the whole Fisher matrix by rank, from Lanczos quadrature (Fig. 7)."""
    ends = _ends(row)
    sizes = row["sizes"]
    caption = (
        f"{_describe(row)}; {sizes['lanczos_examples']} examples, "
        f"{sizes['lanczos_steps']} Lanczos steps, {sizes['starts']} start vectors"
    )
    figure = sheet(10.4, 4.9, "Spectrum of the whole Fisher matrix", caption, private=True)
    axes = grid(figure, 1, 2)
    sources = _select_sources(ends[0]["density"])
    for panel, checkpoint in zip(axes[0], ends, strict=True):
        density = checkpoint["density"]
        dim = next(iter(density.values()))["dim"]
        title = f"{_time_text(checkpoint)}; d = {dim:,}"
        dress(panel, title, "eigenvalues at least as large")
        _set_log_scales(panel)
        for source in sources:
            aboves = np.array(density[source]["above"])
            nodes = np.array(density[source]["nodes"])
            is_shown = (nodes > 1e-6 * nodes[0]) & (aboves > 0.3)
            if is_shown.any():
                style = _line_style(source)
                panel.step(aboves[is_shown], nodes[is_shown], where="pre", **style)
        _set_decades(panel.yaxis, *panel.get_ylim())
        _set_decades(panel.xaxis, 1, 1e3)
        panel.set_ylabel("eigenvalue", fontsize=9, color=INK)
    _add_source_legend(figure, sources)
    return figure


def signal(row: Row) -> Figure:
    """Draw the signal-to-noise ratio of private gradients under each metric, by layer (Fig. 1)."""
    ends = _ends(row)
    names = list(ends[0]["signal"])
    below = "norm of a batch of clipped gradients that agree ÷ norm of the noise"
    panels = []
    for checkpoint in ends:
        values = [checkpoint["signal"][name] for name in names]
        panels.append((_time_text(checkpoint), values, below))
    measured = ends[0]["signal"][names[0]] if names else {}
    sources = _select_sources(measured)
    return _draw_dots(row, "Signal-to-noise ratio of each layer", names, sources, panels)


_REALISED = (
    ("held", "condition number", "over the directions that hold\n99 % of the trace of A and of G"),
    ("flatness", "cosine to the identity", "1: a multiple of the identity"),
)


def realised_map(row: Row) -> Figure:
    """Draw what the preconditioner makes of the private curvature (theorem 5.4).

    The condition number of F̃^(−½) F F̃^(−½) is over the directions that hold 99 % of each side.
    The cosine is to the identity.
    """
    ends = _ends(row)
    names = list(ends[0]["layers"])
    sources = _select_sources(ends[0]["layers"][names[0]]["realised"])
    panels = []
    for number, title, below in _REALISED:
        for checkpoint in ends:
            values = []
            for name in names:
                by_source = checkpoint["layers"][name]["realised"]
                values.append({source: by_source[source]["F"][number] for source in sources})
            panels.append((f"{title}, {_time_text(checkpoint)}", values, below))
    title = "What the preconditioner makes of the private curvature"
    return _draw_dots(row, title, names, sources, panels)


def _draw_dots(
    row: Row,
    title: str,
    names: Sequence[str],
    sources: Sequence[str],
    panels: Sequence[tuple[str, Sequence[Mapping[str, float | None]], str]],
) -> Figure:
    """Draw a dot for each layer and source.

    Args:
        row: the run.
        title: of the figure.
        names: of the layers.
        sources: of curvature.
        panels: title, values by layer, and text below, for each panel.
    """
    lines = math.ceil(len(panels) / 2)
    panel_height = 1.1 + 0.33 * max(3, len(names))
    height = 2.25 + lines * panel_height
    figure = sheet(8.8, height, title, _caption(row), private=True)
    axes = grid(figure, lines, 2, left=1.9, sharey="row")
    labels = [_short_label(row, name) for name in names]
    for panel, (panel_title, layers, below) in zip(axes.flat, panels, strict=True):
        dress(panel, panel_title, below)
        for source in sources:
            # A layer without the source, or with zero, has no place on a logarithmic axis.
            places = [place for place, values in enumerate(layers) if values.get(source)]
            measured = [layers[place][source] for place in places]
            style = {"s": 44, "zorder": 3, **_marker(source)}
            edge = SOURCES[source]["color"] if source == OTHER_EXAMPLES else PAPER
            panel.scatter(measured, places, edgecolor=edge, **style)
        panel.set_yticks(range(len(names)), labels, color=INK)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.set_xscale("log")
        _set_decades(panel.xaxis, *panel.get_xlim())
    _add_source_legend(figure, sources, marker=True)
    return figure


def _short_label(row: Row, name: str) -> str:
    layers = row["checkpoints"][0]["layers"]
    module = layers.get(name, {}).get("module", "")
    return f"{module} {name}".strip()


# --------------------------------------------------------------------------------------------------
# Mean-field theory next to networks, and accuracy over settings.

_VARIANCES = (
    ("forwards", "variance forwards"),
    ("backwards", "variance backwards"),
    ("traces", "tr F of the layer"),
)
_HEAT = LinearSegmentedColormap.from_list("accuracy", ["#f3f5f7", "#b9cfdc", "#2f6f8f", "#173647"])


def mean_field(row: Row) -> Figure:
    """Draw measured ÷ predicted by layer, for every activation and width at the greatest depth."""
    networks = row["networks"]
    depth = max(network["depth"] for network in networks)
    activations = list(dict.fromkeys(network["activation"] for network in networks))
    widths = list(dict.fromkeys(network["width"] for network in networks))
    caption = (
        f"measured ÷ predicted; {depth} layers, mean ± one standard deviation over "
        f"{row['seeds']} networks; no data read"
    )
    title = "Mean-field theory next to random networks"
    width = 1.1 + 1.9 * len(activations)
    figure = sheet(width, 7.4, title, caption)
    axes = grid(figure, len(_VARIANCES), len(activations))
    colours = dict(zip(widths, (PLAIN, SPENT, WHITENED), strict=False))
    deepest = [network for network in networks if network["depth"] == depth]
    _dress_table(axes, activations, "layer")
    for panels, (quantity, label) in zip(axes, _VARIANCES, strict=True):
        for panel, activation in zip(panels, activations, strict=True):
            _draw_reference(panel, 1)
            for network in deepest:
                if network["activation"] == activation:
                    _draw_band(panel, network[quantity], colours[network["width"]])
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            panel.set_ylim(0, max(2.0, panel.get_ylim()[1]))
        _label_rows(panels[0], label)
    handles = []
    for width, colour in colours.items():
        handles.append(Line2D([], [], color=colour, linewidth=2, label=f"width {width}"))
    add_legend(figure, handles, left=0.2, ncols=3)
    return figure


def _draw_band(panel: Axes, values: Mapping[str, Sequence[float]], colour: str) -> None:
    mean = np.array(values["ratio"])
    std = np.array(values["std"])
    layers = np.arange(1, len(mean) + 1)
    low = mean - std
    high = mean + std
    panel.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.plot(layers, mean, color=colour, linewidth=2)


def landscape(rows: Sequence[Row]) -> Figure:
    """Draw accuracy over clipping norm and learning rate, and how much each setting explains."""
    recipe = rows[0]["run"]["recipe"]
    epsilon = max(row["epsilon"] for row in rows)
    caption = f"{recipe}, ε = {epsilon:.2f}, SGD; accuracy on a validation split; "
    caption += "the search is not in ε"
    title = "How sensitive accuracy is to clipping norm and learning rate"
    figure = sheet(9.2, 4.9, title, caption)
    widths = {"width_ratios": [1, 1, 0.8]}
    axes = grid(figure, 1, 3, top=1.1, gridspec_kw=widths)
    figure.subplots_adjust(wspace=0.42)
    for panel, method in zip(axes[0], LANDSCAPE_METHODS, strict=False):
        of_method = _rows_of(rows, method)
        if of_method:
            _draw_heat_map(panel, method, of_method)
    _draw_importance(axes[0, 2], rows)
    return figure


def _rows_of(rows: Sequence[Row], method: str) -> list[Row]:
    return [row for row in rows if row["run"]["method"] == method]


def _draw_heat_map(panel: Axes, method: str, rows: Sequence[Row]) -> None:
    found_rates, found_clips, accuracies = tabulate(rows)
    values = 100 * np.array(accuracies)
    best = np.nanmax(values)
    title = f"{method}: {100 * plateau(rows):.0f} % within 2 points of the best"
    dress(panel, title, "learning rate").grid(False)
    panel.imshow(values, cmap=_HEAT, vmin=0, vmax=100, aspect="auto", origin="lower")
    for (i, j), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        colour = PAPER if value > 55 else INK
        weight = "bold" if value == best else "normal"
        panel.text(
            j,
            i,
            f"{value:.1f}",
            ha="center",
            va="center",
            fontsize=9,
            color=colour,
            fontweight=weight,
        )
    rates = [f"{x:g}" for x in found_rates]
    clips = [f"{y:g}" for y in found_clips]
    panel.set_xticks(range(len(rates)), rates)
    panel.set_yticks(range(len(clips)), clips)
    panel.set_ylabel("clipping norm", fontsize=9, color=MUTED)


def _draw_importance(panel: Axes, rows: Sequence[Row]) -> None:
    title = "share of the variance"
    dress(panel, title, "explained by the setting alone").grid(False, axis="y")
    labels = []
    fractions = []
    colours = []
    for method in LANDSCAPE_METHODS:
        of_method = _rows_of(rows, method)
        for setting, fraction in importance(of_method, NAMES).items():
            labels.append(f"{NAMES[setting]}\n{method}")
            fractions.append(fraction)
            colours.append(WHITENED if method.endswith("kfc") else PLAIN)
    panel.barh(labels, fractions, color=colours, height=0.55)
    for place, fraction in enumerate(fractions):
        text = f"{fraction:.2f}"
        panel.text(fraction + 0.02, place, text, va="center", fontsize=9, color=INK)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.08)
    panel.tick_params(axis="y", labelcolor=INK)
    panel.xaxis.set_minor_formatter(NullFormatter())


# --------------------------------------------------------------------------------------------------
# The loss of a regression over the noise, with and without filters.

_FILTERS: Mapping[str, dict[str, Any]] = {
    "dp-sgd": {"color": PLAIN, "marker": "o", "label": "DP-SGD, no filter"},
    "doppler": {"color": SPENT, "marker": "s", "label": "DOPPLER"},
    "disk": {"color": WHITENED, "marker": "D", "label": "DiSK, two gradients a step"},
}


def noise_sweep(rows: Sequence[Row]) -> Figure:
    """Draw mean squared error over the noise multiplier.

    Each learning rate has a panel, and the last panel shows each method at its best rate.
    """
    measured = points(rows)
    first = rows[0]
    rates = sorted({point.lr for point in measured})
    runs = max(point.runs for point in measured)
    caption = (
        f"{first['steps']} steps, C = 1; "
        f"mean ± one standard deviation of {runs} runs, "
        "on validation examples; dashed: the weights behind the data"
    )
    panels = []
    for rate in rates:
        of_rate = [point for point in measured if point.lr == rate]
        panels.append((f"learning rate {rate:g}", of_rate, measured))
    best_points = best(measured)
    panels.append(("each at its best rate", best_points, best_points))
    columns = -(-len(panels) // 2)
    title = "Linear regression under more and more noise"
    width = 1.0 + 2.6 * columns
    figure = sheet(width, 7.2, title, caption)
    axes = grid(figure, 2, columns)
    for panel, (title, shown, scaled_to) in zip(axes.flat, panels, strict=False):
        _draw_losses(dress(panel, title, "noise multiplier σ"), shown, scaled_to)
    unused = list(axes.flat)[len(panels) :]
    for panel in unused:
        panel.set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("mean squared error", fontsize=9, color=INK)
    handles = []
    for style in _FILTERS.values():
        handles.append(Line2D([], [], linewidth=2, markersize=5, **style))
    add_legend(figure, handles, left=0.27, ncols=3)
    return figure


def _draw_losses(panel: Axes, shown: Sequence[Point], scaled_to: Sequence[Point]) -> None:
    """Draw the lines of some points, on an axis that has room for all of `scaled_to`."""
    noises = sorted({point.noise for point in shown})
    labels = [f"{noise:g}" for noise in noises]
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    _draw_reference(panel, REGRESSION_ERROR**2)
    for method, style in _FILTERS.items():
        of_method = [point for point in shown if point.method == method]
        if of_method:
            panel.errorbar(
                [point.noise for point in of_method],
                [point.mean for point in of_method],
                yerr=[point.std for point in of_method],
                linewidth=1.9,
                markersize=4.5,
                capsize=2,
                **style,
            )
    panel.set_xticks(noises, labels)
    panel.xaxis.set_minor_formatter(NullFormatter())
    highest = max(point.mean + point.std for point in scaled_to)
    panel.set_ylim(0.8 * REGRESSION_ERROR**2, 1.4 * highest)
    _set_decades(panel.yaxis, *panel.get_ylim())
