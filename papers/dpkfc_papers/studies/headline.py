"""What the methods reach on the CNN of the DP-KFC paper, as a small table and a picture: the front
page's numbers.

    python -m dpkfc_papers.studies.headline  # docs/img/accuracy.png; prints the table

Every number is one of the accuracy study (`accuracy_study.py`), or of a grid with more seeds of the
same settings: settings chosen on a validation split, judged on the test set.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc_papers.studies.harness import (
    IMAGES,
    RESULTS,
    finish,
    half_interval,
    interval,
    markdown,
    read_json,
    sheet,
)

PICTURE = IMAGES / "accuracy.png"
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
    Line("dp-kfc-natural", "DP-KFC, natural", "nothing: dead leaves", "C1", "^"),
    Line("dp-kfc-a", "DP-KFC, inputs", "nothing: pink noise", "C4", "^"),
    Line("dp-kfc-pink", "DP-KFC, both sides", "nothing: pink noise", "C3", "^"),
    Line("dp-ngd", "DP-NGD", "500 public images", "C0", "s", "--"),
    Line("adadps", "AdaDPS", "500 public images", "C5", "s", "--"),
    Line("disk", "DiSK", "nothing", "C2", "o"),
    Line("dp-adambc", "DP-AdamBC", "nothing", "C3", "o"),
    Line("dp-adam", "DP-Adam", "nothing", "C6", "o"),
    Line("dp-sgd", "DP-SGD", "nothing", "black", "o"),
    Line("dp-kfc-oracle", "both sides, oracle: NOT PRIVATE", "private images", "black", "D", ":"),
)

Cells = Mapping[str, Mapping[float, Sequence[float]]]  # arm to ε to accuracies, %


# A grid has run the settings that the study chose with more seeds, which stand on every page that
# has one number for the cell: grid and label by recipe and arm.
MORE_SEEDS = {("fashion-mnist-cnn", "dp-sgd"): ("fashion-baselines", "DP-SGD")}


def cells(results: Mapping[str, Any], recipe: str) -> Cells:
    """Accuracies on the test set by arm and ε, a value a seed.

    README, docs/results.md and docs/which-method.md take each of their cells from here.
    """
    from dpkfc_papers.store import Store, winners_tests
    from dpkfc_papers.studies import grids

    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in winners_tests(results.get("rows", {}).values()):
        if row["run"]["recipe"] == recipe:
            found[row["tag"]["arm"]][row["target_epsilon"]].append(100 * row["accuracy"])
    for (of_recipe, arm), (name, label) in MORE_SEEDS.items():
        if of_recipe == recipe and arm in found:
            grid = grids.GRIDS[name]
            tests = grid.tests(Store(grids.RESULTS / f"{name}.json"), label)
            found[arm][grid.common["epsilon"]] = [100 * test["accuracy"] for test in tests]
    return found


def table(results: Mapping[str, Any], recipe: str = "mnist-cnn") -> str:
    """A method a line, its mean and 95 % interval at each ε."""
    found = cells(results, recipe)
    epsilons = sorted({epsilon for of in found.values() for epsilon in of})
    rows = [
        [
            line.label,
            line.sees,
            *(_format_accuracy(found[line.arm].get(epsilon, [])) for epsilon in epsilons),
        ]
        for line in LINES
        if line.arm in found
    ]
    if recipe == "mnist-cnn":
        rows.insert(0, _head_on_features(epsilons))
    return markdown(
        [
            f"{TITLES[recipe]}, test %",
            "its curvature sees",
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
    return ["linear head on features, DP-KFC natural", "nothing: synthetic images", *cells]


def _format_accuracy(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{interval(values)}\u00a0({len(values)})"


def picture(results: Mapping[str, Any], path: Path) -> None:
    """Accuracy against ε with 95 % intervals, a panel a data set."""
    shown = {recipe: found for recipe in TITLES if (found := _enough(cells(results, recipe)))}
    figure, panels = sheet(len(shown), 1, height=2.9 * len(shown) + 0.6)
    for panel, (recipe, found) in zip(panels[:, 0], shown.items(), strict=True):
        epsilons = sorted({epsilon for of in found.values() for epsilon in of})
        for number, line in enumerate(one for one in LINES if one.arm in found):
            # Neighbouring error bars must not overlap.
            shift = 0.05 * (number - len(LINES) / 2)
            known = sorted(found[line.arm])
            values = [found[line.arm][epsilon] for epsilon in known]
            text = f"{line.label} ({line.sees})" if "public" in line.sees else line.label
            panel.errorbar(
                [epsilons.index(epsilon) + shift for epsilon in known],
                [statistics.mean(of) for of in values],
                yerr=[half_interval(of) for of in values],
                color=line.colour,
                linestyle=line.style,
                marker=line.marker,
                capsize=2,
                label=text,
            )
        panel.set_xticks(range(len(epsilons)), [f"ε = {epsilon:g}" for epsilon in epsilons])
        panel.set_title(f"{TITLES[recipe]}, CNN: test accuracy, %")
    finish(figure, path, 2)


def _enough(found: Cells) -> dict[str, dict[float, Sequence[float]]]:
    """The cells with several seeds, of arms that have as many of them as any: the others are not
    tested yet.
    """
    kept = {
        arm: {e: values for e, values in of.items() if len(values) >= FEWEST}
        for arm, of in found.items()
    }
    most = max((len(of) for of in kept.values()), default=0)
    return {arm: of for arm, of in kept.items() if of and len(of) == most}


def main() -> int:
    results = read_json(RESULTS / "accuracy" / "cnn.json")
    if not results:
        print("nothing measured yet: run dpkfc_papers.studies.accuracy_study", file=sys.stderr)
        return 1
    picture(results, PICTURE)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
