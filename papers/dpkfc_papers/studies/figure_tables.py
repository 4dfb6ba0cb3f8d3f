"""Figures as tables, from what `dpkfc reproduce kfc-fig3 kfc-fig7 kfc-theorem-5.4 disk-fig6` has
measured.

make results     # writes them into docs/figures.md
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpkfc_papers.studies.harness import RESULTS, markdown, read_json

SOURCES = ("pink noise", "white noise", "public", "random directions", "oracle, other examples")
MAPS = (
    "nothing",
    "pink noise",
    "white noise",
    "public",
    "random directions",
    "oracle, other examples",
    "oracle",
)
SPECTRA = ("pink noise", "white noise", "public", "oracle")
NAMES = {"public": "Fashion-MNIST", "oracle, other examples": "other private examples"}


def likeness() -> str:
    """Cosines of undamped factors and of the authors' sums with the oracle's, and how far traces
    are off.
    """
    head = [
        "model",
        "steps",
        "source",
        "cos A",
        "cos G",
        "cos G, authors' sums",
        "tr A ÷ oracle's",
        "tr G ÷ oracle's",
    ]
    rows = []
    for model, checkpoint in _ends("kfc-fig3"):
        for source in SOURCES:
            tracking = [layer["tracking"] for layer in checkpoint["layers"].values()]
            undamped = [found["undamped"][source] for found in tracking]
            authors = [found["authors"][source]["G"]["cosine"] for found in tracking]
            cells = [model, str(checkpoint["step"]), NAMES.get(source, source)]
            for side in ("A", "G"):
                cells.append(_range([found[side]["cosine"] for found in undamped], "{:.2f}"))
            cells.append(f"≥ {min(authors):.4f}")
            for side in ("A", "G"):
                cells.append(_range([found[side]["scale"] for found in undamped], "{:.2g}"))
            rows.append(cells)
    return f"Median over layers (least … most)\n\n{markdown(head, rows)}"


def maps() -> str:
    """Condition numbers of the realised map on what holds 99 % of the trace."""
    names = [NAMES.get(name, name) for name in MAPS]
    rows = []
    for model, checkpoint in _ends("kfc-theorem-5.4"):
        for side in ("A", "G", "F"):
            found = [_mean_condition(checkpoint, source, side, ",.3g") for source in MAPS]
            name = "A ⊗ G" if side == "F" else side
            rows.append([model, str(checkpoint["step"]), name, *found])
    return f"Geometric mean over layers\n\n{markdown(['model', 'steps', 'of', *names], rows)}"


def spectra() -> str:
    """Trace and largest eigenvalue of the whole Fisher matrix by Lanczos quadrature."""
    rows = []
    for model, checkpoint in _ends("kfc-fig7"):
        density = checkpoint["density"]
        cells = []
        for name in SPECTRA:
            largest = max(_nodes(density[name]))
            cells.append(f"{density[name]['trace']:.3g}; {largest:.3g}")
        rows.append([model, str(checkpoint["step"]), *cells])
    names = [NAMES.get(name, name) for name in SPECTRA]
    return f"Trace; largest eigenvalue\n\n{markdown(['model', 'steps', *names], rows)}"


def noise() -> str:
    """Mean squared errors of a regression under noise: no filter, DOPPLER and DiSK at every
    rate.
    """
    from dpkfc_papers.noise_sweep import SWEEP_METHODS, best, points

    rows = read_json(RESULTS / "figures" / "disk-fig6a.json")["rows"]
    found = points({"run": row["run"], **row["values"]} for row in rows)
    at = {(one.method, one.lr, one.noise): one for one in found}
    noises = sorted({one.noise for one in found})
    lines = []
    for lr in sorted({one.lr for one in found}):
        cells = [_three([at[method, lr, sigma] for method in SWEEP_METHODS]) for sigma in noises]
        lines.append([f"{lr:g}", *cells])
    lowest = {(one.method, one.noise): one for one in best(found)}
    best_rates = []
    for sigma in noises:
        rates = [f"{lowest[method, sigma].lr:g}" for method in SWEEP_METHODS]
        best_rates.append(" / ".join(rates))
    lines.append(["best rate of each", *best_rates])
    head = ["learning rate", *(f"σ = {sigma:g}" for sigma in noises)]
    said = (
        f"Mean squared error of {found[0].runs} runs, no filter / DOPPLER / DiSK; DiSK is ↓ below"
        " or ↑ above no filter by"
    )
    return f"{said} more than two standard errors of the difference\n\n{markdown(head, lines)}"


def _three(of: Sequence[Any]) -> str:
    """The means of three methods, and where the last is apart from the first."""
    first, last = of[0], of[-1]
    error = (first.std**2 / first.runs + last.std**2 / last.runs) ** 0.5
    apart = (last.mean - first.mean) / error if error else 0.0
    mark = " ↓" if apart < -2 else " ↑" if apart > 2 else ""
    return " / ".join(f"{one.mean:.4g}" for one in of) + mark


def condition_table() -> str:
    """Return condition numbers of private factors on what holds 99 % of the trace."""
    rows = []
    for model, checkpoint in _ends("kfc-theorem-5.4"):
        cells = [_mean_condition(checkpoint, "nothing", side, ",.0f") for side in ("A", "G")]
        rows.append([model, str(checkpoint["step"]), *cells])
    return markdown(["model", "steps", "condition number of A", "of G"], rows) if rows else ""


def _mean_condition(checkpoint: Any, source: str, side: str, form: str) -> str:
    """Return the geometric mean of condition numbers over layers, or a dash."""
    known = []
    for layer in checkpoint["layers"].values():
        held = layer["realised"].get(source, {}).get(side, {}).get("held")
        if held:
            known.append(held)
    return format(statistics.geometric_mean(known), form) if known else "–"


PARTS: Mapping[str, Callable[[], str]] = {
    "likeness": likeness,
    "maps": maps,
    "spectra": spectra,
    "noise": noise,
}


def make_part(name: str) -> str:
    """Return a figure as numbers."""
    return PARTS[name]()


def _ends(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Recipe, and its first and last checkpoint."""
    for row in read_json(RESULTS / "figures" / f"{name}.json")["rows"]:
        for checkpoint in (row["values"][0], row["values"][-1]):
            yield row["run"]["recipe"], checkpoint


def _range(values: Sequence[float], form: str) -> str:
    middle, least, most = (
        form.format(x) for x in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least} … {most})"


def _nodes(density: Mapping[str, Any]) -> list[float]:
    """Eigenvalues of every start of the quadrature."""
    flat: list[float] = []
    for node in density["nodes"]:
        flat += node if isinstance(node, list) else [node]
    return flat


def draw(folder: Path) -> None:
    """Draw the pictures of the pages anew from the values that are kept of each run.

    `dpkfc reproduce` draws them first, from all that it has measured.
    """
    from dpkfc.app.picture_style import save
    from dpkfc_papers import draw as pictures

    of_checkpoints = {
        "kfc-fig2": pictures.spectra,
        "kfc-fig3": pictures.tracking,
        "kfc-theorem-5.4": pictures.realised_map,
    }
    for name, make in of_checkpoints.items():
        for row in read_json(RESULTS / "figures" / f"{name}.json")["rows"]:
            values = row["values"]
            figure = make({**row, "checkpoints": values, "epsilon": values[-1]["epsilon"]})
            save(figure, folder / f"{name}-{row['run']['recipe']}.png")
    grid: dict[str, list[Any]] = {}
    for row in read_json(RESULTS / "figures" / "kfc-fig10.json")["rows"]:
        grid.setdefault(row["run"]["recipe"], []).append({**row, **row["values"]})
    for recipe, rows in grid.items():
        save(pictures.landscape(rows), folder / f"kfc-fig10-{recipe}.png")
    for row in read_json(RESULTS / "figures" / "kfc-mean-field.json")["rows"]:
        save(pictures.mean_field({**row, **row["values"]}), folder / "kfc-mean-field.png")
    rows = read_json(RESULTS / "figures" / "disk-fig6a.json")["rows"]
    flat = [{**row, **row["values"]} for row in rows]
    save(pictures.noise_sweep(flat), folder / "disk-fig6a-linear-regression.png")
