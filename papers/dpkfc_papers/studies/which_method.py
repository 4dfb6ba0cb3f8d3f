"""Write the table of docs/which-method.md and draw its chart, docs/img/which-method.svg.

    python -m dpkfc_papers.studies.which_method  # draws the chart and prints the table

The table holds test accuracies of papers/results. The chart holds no figure: it asks what a
reader has, and each of its answers names a row of the table or says that nothing was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dpkfc_papers.studies import claims, grids, headline
from dpkfc_papers.studies.harness import IMAGES, RESULTS, interval, markdown, read_json

CHART = IMAGES / "which-method.svg"
ARMS = ("dp-sgd", "dp-adam", "dp-kfc-a", "natural", "adadps", "dp-ngd")
HEAD = (
    "test %",
    "ε",
    "`dp-sgd`",
    "`dp-adam`",
    "`dp-kfc-a`",
    "`dp-kfc-natural`",
    "`adadps`",
    "`dp-ngd`",
)


@dataclass(frozen=True)
class Row:
    """A task: its recipe on the front page, or its place among the claims and arms of a grid."""

    title: str
    epsilon: str
    study: str = ""
    recipe: str = ""
    grid: str = ""
    labels: Mapping[str, str] | None = None


ROWS = (
    Row("MNIST, CNN", "1", recipe="mnist-cnn"),
    Row("Fashion-MNIST, CNN", "1", recipe="fashion-mnist-cnn"),
    Row(
        "CIFAR-10, CNN",
        "2",
        grid="cifar",
        labels={
            "dp-sgd": "DP-SGD",
            "dp-adam": "DP-Adam",
            "dp-kfc-a": "A only, pink noise, preconditioned, Adam",
            "natural": "A only, dead leaves, natural gradient",
            "dp-ngd": "DP-NGD, 500 public images of CIFAR-100",
        },
    ),
    Row(
        "MNIST, MLP",
        "1",
        "MNIST, MLP",
        grid="mlp",
        labels={"natural": "DP-KFC, A only, natural gradient, pink noise"},
    ),
    Row(
        "IMDB, logistic regression",
        "1",
        "IMDB, logistic regression",
        grid="imdb",
        labels={"natural": "DP-KFC, A only, natural gradient, random words"},
    ),
)


def accuracies(row: Row, found: claims.Accuracies) -> dict[str, Sequence[float]]:
    """Return the test accuracies of a task by arm, in percent."""
    from dpkfc_papers.store import Store

    values = dict(found[row.study]) if row.study else {}
    if row.recipe:
        study = headline.cells(read_json(RESULTS / "accuracy" / "cnn.json"), row.recipe)
        values = {arm: study[arm][float(row.epsilon)] for arm in study}
        values["natural"] = values["dp-kfc-natural"]
    if row.grid:
        store = Store(RESULTS / "grids" / f"{row.grid}.json")
        for arm, label in (row.labels or {}).items():
            tests = grids.GRIDS[row.grid].tests(store, label)
            values[arm] = [100 * test["accuracy"] for test in tests]
    return values


def table() -> str:
    """Return a task a line and a method a column, with mean and 95 % interval."""
    found, lines = claims.measured(RESULTS), []
    for row in ROWS:
        values = accuracies(row, found)
        cells = {arm: interval(values[arm]) for arm in ARMS if len(values.get(arm, ())) > 1}
        lines.append([row.title, row.epsilon, *(cells.get(arm, "–") for arm in ARMS)])
    return markdown(list(HEAD), lines)


# --------------------------------------------------------------------------------------------------
# The chart: questions down the left, an answer to the right of each.

QUESTIONS = (
    ("Do several sites keep their records?", "DP-FedAvgM", "federated: momentum gained most"),
    (
        "Images of up to 32 pixels a side?",
        "features without data",
        "a linear head, dp-sgd or dp-kfc",
    ),
    ("Texts, and no encoder for them?", "dp-sgd on weighted words", "as the recipe imdb does"),
    ("Is it a transformer or an adapter?", "dp-kfc-a", "ahead on a small transformer"),
    ("Have you public data like yours?", "dp-ngd", "best or level on 2 of 3 image sets"),
    ("Are the records images?", "dp-kfc-natural", "with dead leaves as the probe"),
)
LAST = ("dp-kfc-a", "a probe that looks like a record")
WIDTH, TOP, STEP, HIGH = 640, 12, 92, 52
LEFT, RIGHT = (10, 270), (370, 260)  # x and width of the boxes


def _box(x: int, y: int, width: int, lines: Sequence[str], colour: str) -> str:
    text = "".join(
        f'<text x="{x + width // 2}" y="{y + HIGH // 2 + 5 + shift}" '
        f'font-weight="{weight}">{escape(line)}</text>'
        for line, shift, weight in zip(
            lines, (0,) if len(lines) == 1 else (-9, 10), ("bold", "normal"), strict=False
        )
    )
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{HIGH}" rx="8" fill="{colour}" '
        f'stroke="#555"/>{text}'
    )


def _arrow(x1: int, y1: int, x2: int, y2: int, word: str) -> str:
    text_x, text_y = (x1 + x2) // 2 + (14 if x1 == x2 else 0), (y1 + y2) // 2 - (x1 != x2) * 10 + 4
    return (
        f'<path d="M{x1} {y1} L{x2} {y2}" stroke="#555" fill="none" marker-end="url(#end)"/>'
        f'<text x="{text_x}" y="{text_y}">{word}</text>'
    )


def chart() -> str:
    """Return the chart as SVG."""
    parts = []
    for number, (question, method, reason) in enumerate(QUESTIONS):
        y = TOP + number * STEP
        middle = LEFT[0] + LEFT[1] // 2
        parts.append(_box(LEFT[0], y, LEFT[1], [question], "#eef3fb"))
        parts.append(_box(RIGHT[0], y, RIGHT[1], [method, reason], "#e9f6ec"))
        parts.append(_arrow(LEFT[0] + LEFT[1], y + HIGH // 2, RIGHT[0] - 4, y + HIGH // 2, "yes"))
        parts.append(_arrow(middle, y + HIGH, middle, y + STEP - 4, "no"))
    last = TOP + len(QUESTIONS) * STEP
    parts.append(_box(LEFT[0], last, LEFT[1], LAST, "#e9f6ec"))
    height = last + HIGH + TOP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="14" '
        'text-anchor="middle" fill="#111">'
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def main() -> int:
    CHART.write_text(chart(), "utf-8")
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
