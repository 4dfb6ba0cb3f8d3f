"""The figures of papers as pictures, in the style of the plots of a run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from dpkfc.app.picture_data import evenly_spaced
from dpkfc.app.picture_style import (
    INK,
    MUTED,
    PAPER,
    PLAIN,
    PURPLE,
    SKY,
    SPENT,
    WARNING,
    WHITENED,
    apply_style,
    make_figure,
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


def _name_panels(axes: Any, titles: Sequence[str], below: str, labels: Sequence[str]) -> None:
    """Name axes `[rows, columns]`: above the first row, below the last, and at the left."""
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set_title(title)
    for panel in axes[-1]:
        panel.set_xlabel(below)
    for panel, label in zip(axes[:, 0], labels, strict=True):
        panel.set_ylabel(label)


def add_legend(figure: Figure, handles: Sequence[Any], **options: Any) -> Legend:
    """Add a legend below the panels."""
    return figure.legend(handles=handles, loc="outside lower left", **options)


def _add_source_legend(figure: Figure, sources: Sequence[str], *, marker: bool = False) -> None:
    """Add a legend of sources, under the mark of what is not private."""
    handles = []
    for source in sources:
        style = {"label": source, **SOURCES[source]}
        if marker:
            style |= {"linestyle": "", "markersize": 7, "markeredgecolor": style["color"]}
            style |= _marker(source)
        handles.append(Line2D([], [], **style))
    columns = min(4, len(handles))
    legend = add_legend(figure, handles, ncols=columns, title=_NOTE, alignment="left")
    legend.get_title().set(color=WARNING)


def _marker(source: str) -> dict[str, Any]:
    """Return a dot, a diamond for the oracle, or an open one for the oracle's other examples."""
    colour = PAPER if source == OTHER_EXAMPLES else SOURCES[source]["color"]
    return {"marker": "D" if source.startswith("oracle") else "o", "color": colour}


def _line_style(source: str) -> dict[str, Any]:
    """Return the style of a source's line, without a label."""
    return {name: value for name, value in SOURCES[source].items() if name != "label"}


def _set_decades(axis: Any, low: float, high: float) -> None:
    """Set ticks of a logarithmic axis that stay readable below two decades."""
    subs = (1, 2, 5) if high < 60 * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=7))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_reference(panel: Axes, value: float) -> None:
    """Draw a dashed line at a value to compare with."""
    panel.axhline(value, color=MUTED, linewidth=1, linestyle=_DASHES)


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


@apply_style
def spectra(row: Row) -> Figure:
    """Draw eigenvalues of undamped A and G by rank, at both ends of training (Figs 2 and 6)."""
    names = _select_layers(row)
    ends = _ends(row)
    title = "Spectra of undamped curvature factors"
    figure = make_figure(max(8, 1.1 + 1.9 * len(names)), 9.6, title, _caption(row))
    axes = figure.subplots(4, len(names), squeeze=False)
    first_layer = ends[0]["layers"][names[0]]
    sources = _select_sources(first_layer["spectra"]["A"])
    lines = [(side, checkpoint) for side in "AG" for checkpoint in ends]
    labels = [f"{side}, {_time_text(checkpoint)}" for side, checkpoint in lines]
    titles = [_layer_title(row, name) for name in names]
    _name_panels(axes, titles, "rank of the eigenvalue", labels)
    for panels, (side, checkpoint) in zip(axes, lines, strict=True):
        for panel, name in zip(panels, names, strict=True):
            spectra = checkpoint["layers"][name]["spectra"]
            _draw_spectrum(panel, spectra[side], sources)
    _add_source_legend(figure, sources)
    return figure


def _draw_spectrum(
    panel: Axes, spectra: Mapping[str, Sequence[Sequence[float]]], sources: Sequence[str]
) -> None:
    panel.set(xscale="log", yscale="log")
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


@apply_style
def tracking(row: Row) -> Figure:
    """Draw similarity to the oracle through training (Figs 3, 8 and 9), of undamped factors.

    A line has the range of the authors' sums, whose added identity hides every difference.
    """
    names = _select_layers(row)
    checkpoints = row["checkpoints"]
    title = "Undamped factors of probes and of private data"
    caption = f"{_caption(row)}. {_describe_sums(row, names)}"
    figure = make_figure(max(8, 1.1 + 1.9 * len(names)), 7.4, title, caption)
    axes = figure.subplots(len(_TRACKED), len(names), squeeze=False)
    steps = [checkpoint["step"] for checkpoint in checkpoints]
    first_layer = checkpoints[0]["layers"][names[0]]
    sources = _select_sources(first_layer["tracking"]["undamped"])
    titles = [_layer_title(row, name) for name in names]
    _name_panels(axes, titles, "steps", [label for *_, label in _TRACKED])
    for panels, (convention, side, number, _) in zip(axes, _TRACKED, strict=True):
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


@apply_style
def densities(row: Row) -> Figure:
    """Draw eigenvalues of the whole Fisher matrix by rank, from Lanczos quadrature (Fig. 7)."""
    ends = _ends(row)
    sizes = row["sizes"]
    caption = (
        f"{_describe(row)}; {sizes['lanczos_examples']} examples, "
        f"{sizes['lanczos_steps']} Lanczos steps, {sizes['starts']} start vectors"
    )
    figure = make_figure(10.4, 4.9, "Spectrum of the whole Fisher matrix", caption)
    axes = figure.subplots(1, 2)
    sources = _select_sources(ends[0]["density"])
    for panel, checkpoint in zip(axes, ends, strict=True):
        density = checkpoint["density"]
        dim = next(iter(density.values()))["dim"]
        title = f"{_time_text(checkpoint)}; d = {dim:,}"
        panel.set(title=title, xlabel="eigenvalues at least as large", ylabel="eigenvalue")
        panel.set(xscale="log", yscale="log")
        for source in sources:
            aboves = np.array(density[source]["above"])
            nodes = np.array(density[source]["nodes"])
            is_shown = (nodes > 1e-6 * nodes[0]) & (aboves > 0.3)
            if is_shown.any():
                style = _line_style(source)
                panel.step(aboves[is_shown], nodes[is_shown], where="pre", **style)
        _set_decades(panel.yaxis, *panel.get_ylim())
        _set_decades(panel.xaxis, 1, 1e3)
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


@apply_style
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
    figure = make_figure(8.8, 1.3 + lines * panel_height, title, _caption(row))
    axes = figure.subplots(lines, 2, squeeze=False, sharey="row")
    labels = [_short_label(row, name) for name in names]
    for panel, (panel_title, layers, below) in zip(axes.flat, panels, strict=True):
        panel.set(title=panel_title, xlabel=below)
        for source in sources:
            # A layer without the source, or with zero, has no place on a logarithmic axis.
            places = [place for place, values in enumerate(layers) if values.get(source)]
            measured = [layers[place][source] for place in places]
            style = {"s": 44, "zorder": 3, **_marker(source)}
            edge = SOURCES[source]["color"] if source == OTHER_EXAMPLES else PAPER
            panel.scatter(measured, places, edgecolor=edge, **style)
        panel.set_yticks(range(len(names)), labels)
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


@apply_style
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
    figure = make_figure(1.1 + 1.9 * len(activations), 7.4, title, caption)
    axes = figure.subplots(len(_VARIANCES), len(activations), squeeze=False)
    colours = dict(zip(widths, (PLAIN, SPENT, WHITENED), strict=False))
    deepest = [network for network in networks if network["depth"] == depth]
    _name_panels(axes, activations, "layer", [label for _, label in _VARIANCES])
    for panels, (quantity, _) in zip(axes, _VARIANCES, strict=True):
        for panel, activation in zip(panels, activations, strict=True):
            _draw_reference(panel, 1)
            for network in deepest:
                if network["activation"] == activation:
                    _draw_band(panel, network[quantity], colours[network["width"]])
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            panel.set_ylim(0, max(2.0, panel.get_ylim()[1]))
    handles = []
    for width, colour in colours.items():
        handles.append(Line2D([], [], color=colour, label=f"width {width}"))
    add_legend(figure, handles, ncols=3)
    return figure


def _draw_band(panel: Axes, values: Mapping[str, Sequence[float]], colour: str) -> None:
    mean = np.array(values["ratio"])
    std = np.array(values["std"])
    layers = np.arange(1, len(mean) + 1)
    low = mean - std
    high = mean + std
    panel.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.plot(layers, mean, color=colour)


@apply_style
def landscape(rows: Sequence[Row]) -> Figure:
    """Draw accuracy over clipping norm and learning rate, and how much each setting explains."""
    recipe = rows[0]["run"]["recipe"]
    epsilon = max(row["epsilon"] for row in rows)
    caption = f"{recipe}, ε = {epsilon:.2f}, SGD; accuracy on a validation split; "
    caption += "the search is not in ε"
    title = "How sensitive accuracy is to clipping norm and learning rate"
    figure = make_figure(9.2, 4.0, title, caption)
    axes = figure.subplots(1, 3, width_ratios=[1, 1, 0.8])
    for panel, method in zip(axes, LANDSCAPE_METHODS, strict=False):
        of_method = _rows_of(rows, method)
        if of_method:
            _draw_heat_map(panel, method, of_method)
    _draw_importance(axes[2], rows)
    return figure


def _rows_of(rows: Sequence[Row], method: str) -> list[Row]:
    return [row for row in rows if row["run"]["method"] == method]


def _draw_heat_map(panel: Axes, method: str, rows: Sequence[Row]) -> None:
    found_rates, found_clips, accuracies = tabulate(rows)
    values = 100 * np.array(accuracies)
    best = np.nanmax(values)
    title = f"{method}: {100 * plateau(rows):.0f} % within 2 points of the best"
    panel.set(title=title, xlabel="learning rate", ylabel="clipping norm")
    panel.grid(False)
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


def _draw_importance(panel: Axes, rows: Sequence[Row]) -> None:
    panel.set(title="share of the variance", xlabel="explained by the setting alone")
    panel.grid(False, axis="y")
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
        panel.text(fraction + 0.02, place, text, va="center")
    panel.invert_yaxis()
    panel.set_xlim(0, 1.2)


# --------------------------------------------------------------------------------------------------
# The loss of a regression over the noise, with and without filters.

_FILTERS: Mapping[str, dict[str, Any]] = {
    "dp-sgd": {"color": PLAIN, "marker": "o", "label": "DP-SGD, no filter"},
    "doppler": {"color": SPENT, "marker": "s", "label": "DOPPLER"},
    "disk": {"color": WHITENED, "marker": "D", "label": "DiSK, two gradients a step"},
}


@apply_style
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
    figure = make_figure(1.0 + 2.6 * columns, 7.2, title, caption)
    axes = figure.subplots(2, columns, squeeze=False)
    for panel, (title, shown, scaled_to) in zip(axes.flat, panels, strict=False):
        panel.set(title=title, xlabel="noise multiplier σ")
        _draw_losses(panel, shown, scaled_to)
    unused = list(axes.flat)[len(panels) :]
    for panel in unused:
        panel.set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("mean squared error")
    handles = [Line2D([], [], **style) for style in _FILTERS.values()]
    add_legend(figure, handles, ncols=3)
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
                capsize=2,
                **style,
            )
    panel.set_xticks(noises, labels)
    panel.xaxis.set_minor_formatter(NullFormatter())
    highest = max(point.mean + point.std for point in scaled_to)
    panel.set_ylim(0.8 * REGRESSION_ERROR**2, 1.4 * highest)
    _set_decades(panel.yaxis, *panel.get_ylim())
