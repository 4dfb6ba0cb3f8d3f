"""What the methods reach on the CNN of the DP-KFC paper, as a small table and a picture: the front
page's numbers.

    python benchmarks/headline.py     # docs/img/accuracy.png; prints the table

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

from common import RESULTS, half_interval, interval, markdown, read_json

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "accuracy.png"
TITLES = {"mnist-cnn": "MNIST", "fashion-mnist-cnn": "Fashion-MNIST"}
FEWEST = 2  # seeds below which a cell stands in no picture


@dataclass(frozen=True)
class Line:
    """A method on the front page."""

    arm: str
    label: str
    sees: str
    colour: str
    style: str = "-"


LINES = (
    Line("dp-kfc-natural", "DP-KFC, natural", "nothing: dead leaves", "#b2182b"),
    Line("dp-kfc-a", "DP-KFC, inputs", "nothing: pink noise", "#ef6548"),
    Line("dp-kfc-pink", "DP-KFC, both sides", "nothing: pink noise", "#fdae6b"),
    Line("dp-ngd", "DP-NGD", "500 public images", "#2166ac", "--"),
    Line("adadps", "AdaDPS", "500 public images", "#67a9cf", "--"),
    Line("disk", "DiSK", "nothing", "#1b7837"),
    Line("dp-adambc", "DP-AdamBC", "nothing", "#7fbf7b"),
    Line("dp-adam", "DP-Adam", "nothing", "#999999"),
    Line("dp-sgd", "DP-SGD", "nothing", "#333333"),
    Line("dp-kfc-oracle", "both sides, oracle: NOT PRIVATE", "private images", "#bbbbbb", ":"),
)

Cells = Mapping[str, Mapping[float, Sequence[float]]]  # arm to ε to accuracies, %


# A grid has run the settings that the study chose with more seeds, which stand on every page that
# has one number for the cell: grid and label by recipe and arm.
MORE_SEEDS = {("fashion-mnist-cnn", "dp-sgd"): ("fashion-baselines", "DP-SGD")}


def cells(results: Mapping[str, Any], recipe: str) -> Cells:
    """Accuracies on the test set by arm and ε, a value a seed.

    README, docs/results.md and docs/which-method.md take each of their cells from here.
    """
    import grids
    from dpkfc.app.html import winners_tests
    from dpkfc.app.tuning.runs import Store

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
    """Accuracy against ε with 95 % intervals, a panel a data set, a label at the end of a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {recipe: found for recipe in TITLES if (found := _enough(cells(results, recipe)))}
    figure, panels = plt.subplots(
        1, len(shown), figsize=(7.2 * len(shown), 4.6), constrained_layout=True, squeeze=False
    )
    for panel, (recipe, found) in zip(panels[0], shown.items(), strict=True):
        epsilons = sorted({epsilon for of in found.values() for epsilon in of})
        ends = []
        for number, line in enumerate(one for one in LINES if one.arm in found):
            # Neighbouring error bars must not overlap.
            shift = 0.018 * (number - len(LINES) / 2)
            x = [epsilons.index(epsilon) + shift for epsilon in sorted(found[line.arm])]
            values = [found[line.arm][epsilon] for epsilon in sorted(found[line.arm])]
            y = [statistics.mean(v) for v in values]
            panel.errorbar(
                x,
                y,
                yerr=[half_interval(v) for v in values],
                color=line.colour,
                linestyle=line.style,
                marker="o",
                markersize=4,
                linewidth=2.4 if line.arm == "dp-kfc-natural" else 1.5,
                capsize=2,
            )
            ends.append((y[-1], x[-1] - shift + 0.08, line))
        low, high = panel.get_ylim()
        for (_, x_end, line), y_text in zip(
            ends, _spread_heights([end[0] for end in ends], (high - low) / 19), strict=True
        ):
            text = f"{line.label} ({line.sees})" if "public" in line.sees else line.label
            panel.annotate(
                text,
                (x_end, y_text),
                (8, 0),
                textcoords="offset points",
                va="center",
                color=line.colour,
                fontsize=9,
            )
        panel.set_xticks(range(len(epsilons)), [f"ε = {epsilon:g}" for epsilon in epsilons])
        panel.set_xlim(-0.15, len(epsilons) - 1 + 0.95)
        panel.set(
            title=f"{TITLES[recipe]}, CNN, δ = 10⁻⁵, 5 epochs, batches of 256",
            ylabel="test accuracy, %",
        )
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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


def _spread_heights(heights: Sequence[float], least: float) -> list[float]:
    """Heights of labels, moved up and down until none is nearer to the next than `least`."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    moved = [heights[i] for i in order]
    for _ in range(200):
        for i in range(len(moved) - 1):
            short = least - (moved[i + 1] - moved[i])
            if short > 1e-9:
                moved[i], moved[i + 1] = moved[i] - short / 2, moved[i + 1] + short / 2
    return [moved[order.index(i)] for i in range(len(heights))]


def main() -> int:
    results = read_json(RESULTS / "accuracy" / "cnn.json")
    if not results:
        print("nothing measured yet: python benchmarks/accuracy_study.py", file=sys.stderr)
        return 1
    picture(results, PICTURE)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
