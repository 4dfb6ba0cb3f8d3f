"""What the methods reach on the CNN of the DP-KFC paper: the front page and docs/which-method.md.

Settings were chosen on a validation split at ε = 1, and are judged on the test set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpkfc_papers.studies.harness import (
    RESULTS,
    draw_means,
    finish,
    interval,
    markdown,
    read_json,
    sheet,
)
from dpkfc_papers.studies.scores import TITLES as TASKS
from dpkfc_papers.studies.scores import Cells, grid_cells, read_measured, study_cells

TITLES = {"mnist-cnn": "MNIST", "fashion-mnist-cnn": "Fashion-MNIST"}
FEWEST = 2  # seeds below which a cell stands in no picture


@dataclass(frozen=True)
class Line:
    """A method on the front page."""

    arm: str
    label: str
    sees: str
    colour: str
    marker: str
    style: str = "-"


# Colours of the style of all pictures; DP-KFC has triangles, what sees public images squares.
LINES = (
    Line("dp-kfc-natural", "DP-KFC, natural", "synthetic dead leaves", "C1", "^"),
    Line("dp-kfc-a", "DP-KFC, inputs", "synthetic pink noise", "C4", "^"),
    Line("dp-kfc-pink", "DP-KFC, both sides", "synthetic pink noise", "C3", "^"),
    Line("dp-ngd", "DP-NGD", "500 public images", "C0", "s", "--"),
    Line("adadps", "AdaDPS", "500 public images", "C5", "s", "--"),
    Line("disk", "DiSK", "–", "C2", "o"),
    Line("dp-adambc", "DP-AdamBC", "–", "C3", "o"),
    Line("dp-adam", "DP-Adam", "–", "C6", "o"),
    Line("dp-sgd", "DP-SGD", "–", "black", "o"),
    Line("dp-kfc-oracle", "both sides, oracle: NOT PRIVATE", "private images", "black", "D", ":"),
)


def table(folder: Path = RESULTS, recipe: str = "mnist-cnn") -> str:
    """A method a line, its mean and 95 % interval at each ε."""
    found = study_cells(recipe, folder)
    epsilons = sorted(set().union(*found.values()))
    rows = []
    for line in LINES:
        if line.arm in found:
            values = [found[line.arm].get(epsilon, []) for epsilon in epsilons]
            rows.append([line.label, line.sees, *map(_format_accuracy, values)])
    if recipe == "mnist-cnn":
        rows.insert(0, _head_on_features(epsilons))
    return markdown(
        [
            f"{TITLES[recipe]}, test %",
            "curvature measured on",
            *(f"ε = {e:g} (seeds)" for e in epsilons),
        ],
        rows,
    )


def _head_on_features(epsilons: Sequence[float]) -> list[str]:
    """Return the line of the linear head that the recipe `mnist` trains."""
    controls = read_json(RESULTS / "features_controls.json")
    values = {
        row["epsilon"]: [100 * accuracy for accuracy in row["test"]]
        for row in controls.get("rows", [])
        if (row["data"], row["arm"]) == ("mnist", "scattering+encoder2, synthetic, dp-kfc")
    }
    cells = [_format_accuracy(values.get(epsilon, [])) for epsilon in epsilons]
    return ["linear head on features, DP-KFC natural", "synthetic images", *cells]


def _format_accuracy(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{interval(values)}\u00a0({len(values)})"


def picture(path: Path, folder: Path = RESULTS) -> None:
    """Accuracy against ε with 95 % intervals, a panel a data set."""
    tested = {recipe: _select_tested(study_cells(recipe, folder)) for recipe in TITLES}
    shown = {recipe: found for recipe, found in tested.items() if found}
    figure, panels = sheet(len(shown), 1, height=2.9 * len(shown) + 0.6)
    for panel, (recipe, found) in zip(panels[:, 0], shown.items(), strict=True):
        epsilons = sorted({epsilon for of in found.values() for epsilon in of})
        for number, line in enumerate(one for one in LINES if one.arm in found):
            # Neighbouring error bars must not overlap.
            shift = 0.05 * (number - len(LINES) / 2)
            known = sorted(found[line.arm])
            values = [found[line.arm][epsilon] for epsilon in known]
            places = [epsilons.index(epsilon) + shift for epsilon in known]
            text = f"{line.label} ({line.sees})" if "public" in line.sees else line.label
            draw_means(
                panel,
                places,
                values,
                color=line.colour,
                linestyle=line.style,
                marker=line.marker,
                label=text,
            )
        panel.set_xticks(range(len(epsilons)), [f"ε = {epsilon:g}" for epsilon in epsilons])
        panel.set_title(f"{TITLES[recipe]}, CNN: test accuracy, %")
    finish(figure, path, 2)


def _select_tested(found: Cells) -> Cells:
    """The cells with several seeds, of arms that have as many of them as any: the others are not
    tested yet.
    """
    kept = {}
    for arm, cells in found.items():
        tested = {epsilon: values for epsilon, values in cells.items() if len(values) >= FEWEST}
        if tested:
            kept[arm] = tested
    most = max(map(len, kept.values()), default=0)
    return {arm: tested for arm, tested in kept.items() if len(tested) == most}


# --------------------------------------------------------------------------------------------------
# The table of docs/which-method.md.

CHOICES = ("dp-sgd", "dp-adam", "dp-kfc-a", "dp-kfc-natural", "adadps", "dp-ngd")


def choice_table() -> str:
    """Return a task a line and a method a column, with mean and 95 % interval."""
    found = dict(read_measured())
    for recipe in ("mnist-cnn", "fashion-mnist-cnn"):
        found[TASKS[recipe]] = {arm: of[1.0] for arm, of in study_cells(recipe).items()}
    cifar = "CIFAR-10, CNN"
    found[cifar] = {arm: of[2.0] for arm, of in grid_cells("cifar").items()}
    lines = []
    for title in (*list(TASKS.values())[:2], cifar, TASKS["mnist-mlp"], TASKS["imdb-logistic"]):
        values, epsilon = found[title], "2" if title == cifar else "1"
        cells = {arm: interval(values[arm]) for arm in CHOICES if len(values.get(arm, ())) > 1}
        lines.append([title, epsilon, *(cells.get(arm, "–") for arm in CHOICES)])
    return markdown(["test %", "ε", *(f"`{arm}`" for arm in CHOICES)], lines)
