"""The figures of a training run as pictures: spectra, tracking, densities, signal to noise, the realised map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpkfc.report.plots import INK, PAPER
from dpkfc.studies.figures.canvas import SOURCES, decades, dressed, grid, legend, marks, sheet, unscored

__all__ = ["densities", "realised_map", "signal", "spectra", "tracking"]

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
