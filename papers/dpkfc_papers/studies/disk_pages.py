"""Figures 1, 2 and 8 of the DiSK paper on the CNN of MNIST, as tables and one picture.

    python -m dpkfc_papers.studies.grids --grid disk --data-dir DIR
    make results    # draws docs/img/disk.png

Figures 1 and 2 come from the accuracy study: both methods had twenty trials at ε = 1. Figure 8 is
the `disk` grid of `grids.py`, of one seed on the validation split.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpkfc_papers.studies import grids, scores
from dpkfc_papers.studies.harness import (
    RESULTS,
    compare_means,
    draw_means,
    finish,
    interval,
    machine_of_rows,
    markdown,
    read_json,
    sheet,
)

RECIPE, CURVES_AT = "mnist-cnn", 1.0
PICTURE = "disk.png"
COLOURS = {"disk": ("DiSK", "C2"), "dp-sgd": ("DP-SGD", "C6")}
KAPPA, GAMMA = "filter_kappa", "disk_gamma"


def collect_by_epsilon() -> dict[str, Mapping[float, Sequence[float]]]:
    """Return test accuracies in percent by method and ε."""
    found = scores.study_cells(RECIPE)
    return {method: found[method] for method in COLOURS}


def curves() -> dict[str, dict[int, list[float]]]:
    """Return test accuracies in percent by method and step, at ε = 1."""
    from dpkfc_papers.store import winners_tests

    found: dict[str, dict[int, list[float]]] = {method: {} for method in COLOURS}
    rows = read_json(RESULTS / "accuracy" / "cnn.json").get("rows", {}).values()
    for row in winners_tests(rows):
        method = row["tag"]["arm"]
        is_shown = row["run"]["recipe"] == RECIPE and row["target_epsilon"] == CURVES_AT
        if method not in found or not is_shown:
            continue
        for step, accuracy in row["curve"]:
            found[method].setdefault(step, []).append(100 * accuracy)
    return found


def settings_grid() -> dict[tuple[float, float], float]:
    """Return validation accuracies in percent by κ and γ."""
    from dpkfc_papers.store import Store

    points = grids.GRIDS["disk"].points(Store(grids.RESULTS / "disk.json"), "DiSK")
    return {
        (point[KAPPA], point[GAMMA]): statistics.mean(100 * row["accuracy"] for row in rows)
        for point, rows in points
    }


def _describe_epsilons(found: Mapping[str, Mapping[float, Sequence[float]]]) -> str:
    rows = [
        [label, *(interval(values) for _, values in sorted(found[method].items()))]
        for method, (label, _) in COLOURS.items()
    ]
    epsilons = sorted(found["disk"])
    gains = [compare_means(found["disk"][one], found["dp-sgd"][one]) for one in epsilons]
    row = [f"{gain:+.2f} ± {error:.2f}" for gain, error in gains]
    rows.append(["DiSK − DP-SGD", *row])
    head = ["Figure 1: test %", *(f"ε = {epsilon:g}" for epsilon in epsilons)]
    return markdown(head, rows)


def _describe_curves(found: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    # The last evaluation stands two steps after the one before it.
    steps = sorted(found["disk"])[:-1]
    means = {method: [statistics.mean(found[method][step]) for step in steps] for method in COLOURS}
    rows = [
        [label, *(f"{mean:.2f}" for mean in means[method])]
        for method, (label, _) in COLOURS.items()
    ]
    head = ["Figure 2: mean test % after steps", *map(str, steps)]
    return markdown(head, rows)


def _describe_grid(found: Mapping[tuple[float, float], float]) -> str:
    kappas = sorted({kappa for kappa, _ in found})
    gammas = sorted({gamma for _, gamma in found})
    rows = [
        [f"κ = {kappa:g}", *(f"{found[kappa, gamma]:.2f}" for gamma in gammas)] for kappa in kappas
    ]
    head = ["Figure 8: validation %, ε = 1, one seed", *(f"γ = {gamma:g}" for gamma in gammas)]
    return markdown(head, rows)


def page() -> str:
    """Return the tables of the three figures, and the picture; "" before anything was run."""
    from dpkfc_papers.store import Store

    found = settings_grid()
    if not found:
        return ""
    rows = list(Store(grids.RESULTS / "disk.json"))
    parts = [
        _describe_epsilons(collect_by_epsilon()),
        _describe_curves(curves()),
        _describe_grid(found),
        f"![Figures 1, 2 and 8 on MNIST](../img/{PICTURE})",
        machine_of_rows(rows),
    ]
    return "\n\n".join(parts)


def draw(folder: Path) -> None:
    """Draw accuracy over ε, through training, and over κ and γ, as far as they were measured."""
    found = settings_grid()
    if not found:
        return
    figure, panels = sheet(3, 1, height=7.8)
    _draw_epsilons(panels[0][0])
    _draw_curves(panels[1][0])
    _draw_grid(panels[2][0], found)
    finish(figure, folder / PICTURE)


def _draw_epsilons(panel: Any) -> None:
    for method, values in collect_by_epsilon().items():
        label, colour = COLOURS[method]
        epsilons = sorted(values)
        runs = [values[epsilon] for epsilon in epsilons]
        draw_means(panel, epsilons, runs, label=label, color=colour, marker="o")
    panel.set_xscale("log")
    panel.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    panel.minorticks_off()
    _dress(panel, "Figure 1: accuracy over ε", "ε", "test accuracy, %")
    panel.legend(loc="lower right")


def _draw_curves(panel: Any) -> None:
    for method, values in curves().items():
        label, colour = COLOURS[method]
        steps = sorted(values)[1:]
        means = [statistics.mean(values[step]) for step in steps]
        panel.plot(steps, means, label=label, color=colour, marker="o", markersize=3)
    _dress(panel, "Figure 2: through training, ε = 1", "step", "mean test accuracy, %")
    panel.legend(loc="lower right")


def _draw_grid(panel: Any, found: Mapping[tuple[float, float], float]) -> None:
    kappas = sorted({kappa for kappa, _ in found})
    gammas = sorted({gamma for _, gamma in found})
    values = [[found[kappa, gamma] for gamma in gammas] for kappa in kappas]
    panel.imshow(values, cmap="Blues", origin="lower", aspect="auto")
    middle = 0.4 * min(found.values()) + 0.6 * max(found.values())
    for row, of in enumerate(values):
        for column, value in enumerate(of):
            colour = "white" if value > middle else "black"
            panel.text(
                column, row, f"{value:.1f}", ha="center", va="center", fontsize=9, color=colour
            )
    panel.set_xticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
    panel.set_yticks(range(len(kappas)), [f"{kappa:g}" for kappa in kappas])
    panel.grid(False)
    panel.set_title("Figure 8: validation accuracy, %")
    panel.set_xlabel("γ")
    panel.set_ylabel("κ")


def _dress(panel: Any, title: str, below: str, beside: str) -> None:
    panel.set_title(title)
    panel.set_xlabel(below)
    panel.set_ylabel(beside)
