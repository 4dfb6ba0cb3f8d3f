"""Tables and pictures of docs/results.md: a few rows a task, from results files alone.

Figures of papers are in `published.toml`. Of the rows of
`features.py` those that did best on the validation split are shown; no arm is named here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpkfc_papers.studies import features_table, scores
from dpkfc_papers.studies.features_table import Arm, Row
from dpkfc_papers.studies.harness import (
    IMAGES,
    RESULTS,
    draw_means,
    finish,
    interval,
    markdown,
    read_json,
    read_toml,
    sheet,
)

PUBLISHED = read_toml(Path(__file__).with_name("published.toml"))
# Feature arms and networks of a task's table beside those that were also trained without privacy.
SHOWN, NETWORKS = 3, 2
# Published figures at other ε are shown where something was measured at the same one.
USUAL = {1.0, 2.0, 3.0, 8.0}
Cells = Mapping[float, Sequence[float]]


@dataclass(frozen=True)
class Line:
    """A method of a task.

    Attributes:
        label: in the table.
        cells: accuracies in percent by ε, one a seed; of a paper one.
        kind: "features", "network", "here" (of another study) or "published".
        link: of the source of a published figure.
        group: the data set, where a task has several; its lines have dashes of their own.
    """

    label: str
    cells: Cells
    kind: str = "here"
    link: str = ""
    group: int = 0

    @property
    def linked_label(self) -> str:
        """Return the label with a link where there is one."""
        if not self.link:
            return self.label
        name, _, source = self.label.partition(", ")
        return f"{name}, [{source}]({self.link})"

    @property
    def seeds(self) -> str:
        """Return how many seeds its cells have."""
        if self.kind == "published":
            return "–"
        counts = sorted({len(values) for values in self.cells.values()})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


# --------------------------------------------------------------------------------------------------
# Rows of one task.


def feature_lines(*data: str) -> list[Line]:
    """Return the best arms on the validation split, and those that were trained without privacy."""
    lines = []
    for group, name in enumerate(data):
        rows = [row for row in features_table.read_rows() if row.data == name]
        arms = _group_by_arm(rows)
        best = sorted(arms, key=lambda arm: -_validation(arms[arm]))
        heads = [arm for arm in best if not arm.is_network]
        networks = [arm for arm in best if arm.is_network]
        few = SHOWN if len(data) == 1 else SHOWN - 1
        shown = heads[:few] + networks[:NETWORKS]
        shown += [arm for arm in heads[few:] + networks[NETWORKS:] if _has_reference(arms[arm])]
        several = len(data) > 1 and rows
        title = rows[0].title.removesuffix("MNIST") + ": " if several else ""
        for arm in shown:
            cells = {row.epsilon: row.test for row in arms[arm]}
            kind = "network" if arm.is_network else "features"
            lines.append(Line(title + arm.label, cells, kind, group=group))
    return lines


def _group_by_arm(rows: Sequence[Row]) -> dict[Arm, list[Row]]:
    """Return rows by arm; one without privacy stands beside plain DP-SGD."""
    arms: dict[Arm, list[Row]] = {}
    for row in rows:
        arm = row.arm
        if arm.method == features_table.WITHOUT:
            arm = Arm(arm.maps, arm.scales, "dp-sgd", arm.more)
        arms.setdefault(arm, []).append(row)
    return arms


def _validation(rows: Sequence[Row]) -> float:
    """Return the accuracy of the search at the smallest ε; lowest where there is none."""
    first = min(rows, key=lambda row: row.epsilon)
    unknown = math.isnan(first.validation) or math.isinf(first.epsilon)
    return -math.inf if unknown else first.validation


def _has_reference(rows: Sequence[Row]) -> bool:
    return any(math.isinf(row.epsilon) for row in rows)


CNN = {
    "dp-kfc-natural": "CNN, DP-KFC natural, dead leaves",
    "dp-kfc-a": "CNN, DP-KFC inputs, pink noise",
    "dp-ngd": "CNN, DP-NGD, 500 public images",
    "dp-adam": "CNN, DP-Adam",
    "dp-sgd": "CNN, DP-SGD",
}
WORDS = {
    "dp-kfc-a": "DP-KFC inputs, random words",
    "dp-kfc-noise": "DP-KFC both sides, random words",
    "adadps": "AdaDPS, random words",
    "dp-adam": "DP-Adam",
    "dp-sgd": "DP-SGD",
}


def study_lines(labels: Mapping[str, str], found: scores.Cells) -> list[Line]:
    """Return methods of a study or a grid."""
    lines = []
    for arm, label in labels.items():
        if cells := found.get(arm):
            lines.append(Line(label, {epsilon: cells[epsilon] for epsilon in sorted(cells)}))
    return lines


def word_lines() -> list[Line]:
    """Return methods on IMDB: ε = 1 from the grid, other ε from twenty trials."""
    found = scores.study_cells("imdb-logistic")
    found["dp-kfc-noise"] = found["dp-kfc-tokens"]
    for arm, cells in scores.grid_cells("imdb").items():
        found[arm] |= cells
    return study_lines(WORDS, found)


def published_lines(task: str) -> list[Line]:
    """Return what papers print for a task."""
    lines = []
    for one in PUBLISHED["figure"]:
        if one["task"] != task:
            continue
        if "table" in one:
            cells = _printed_cells(one)
        else:
            cells = {float(epsilon): [value] for epsilon, value in one["accuracy"].items()}
        label = f"{one['label']}, {one['source']}"
        lines.append(Line(label, cells, "published", one.get("url", "")))
    return lines


def _printed_cells(figure: Mapping[str, Any]) -> dict[float, list[float]]:
    """Return the cells of a row of a table in papers/dpkfc_papers/printed."""
    from dpkfc_papers.tables import load

    found = {}
    for cell in load(figure["table"]).cells:
        if (cell.row, cell.recipe) == (figure["row"], figure["recipe"]):
            found[float(cell.settings["epsilon"])] = [cell.published.mean]
    return found


# --------------------------------------------------------------------------------------------------
# Tasks.


@dataclass(frozen=True)
class Task:
    """A task with one table and one picture.

    Attributes:
        title: of the picture.
        data: names in the files of features.
        baselines: makes the lines of other studies.
    """

    title: str
    data: tuple[str, ...] = ()
    baselines: Callable[[], list[Line]] = list

    def lines(self, name: str) -> list[Line]:
        """Return what was measured here, then what papers print."""
        return [*feature_lines(*self.data), *self.baselines(), *published_lines(name)]


TASKS = {
    "mnist": Task("MNIST", ("mnist",), lambda: study_lines(CNN, scores.study_cells("mnist-cnn"))),
    "fashion-mnist": Task(
        "Fashion-MNIST",
        ("fashion-mnist",),
        lambda: study_lines(CNN, scores.study_cells("fashion-mnist-cnn")),
    ),
    "cifar10": Task("CIFAR-10", ("cifar10",), lambda: study_lines(CNN, scores.grid_cells("cifar"))),
    "medical": Task("Medical images", ("pneumoniamnist", "breastmnist")),
    "imdb": Task("IMDB, linear model of hashed words", ("imdb",), word_lines),
}


def task_page(name: str) -> str:
    """Return the table of a task and, where it was drawn, its picture."""
    made = {"tables": tabular_table, "federated": federated_table}
    table = made[name]() if name in made else task_table(name)
    title = TASKS[name].title if name in TASKS else name.capitalize()
    file = f"results-{name}.png"
    if not table or not (IMAGES / file).exists():
        return table
    return f"{table}\n\n![{title}: test accuracy against ε](img/{file})"


def task_table(name: str) -> str:
    """Return a method a line and an ε a column, with 95 % intervals; "" without results."""
    lines = TASKS[name].lines(name)
    if not lines:
        return ""
    epsilons = _epsilons(lines)
    rows = []
    for line in lines:
        cells = [interval(line.cells.get(epsilon, ())) for epsilon in epsilons]
        if line.kind == "published":
            cells = [cell.removesuffix("0") if cell != "–" else cell for cell in cells]
        rows.append([line.linked_label, *cells, line.seeds])
    heads = ["not private" if math.isinf(epsilon) else f"ε = {epsilon:g}" for epsilon in epsilons]
    return markdown(["test %", *heads, "seeds"], rows)


def _epsilons(lines: Sequence[Line]) -> list[float]:
    """Return the ε of what was measured here, and the usual ones of papers."""
    shown: set[float] = set()
    for line in lines:
        shown |= line.cells.keys() & USUAL if line.kind == "published" else line.cells.keys()
    return sorted(shown)


def _percent(row: Mapping[str, Any]) -> list[float]:
    return [100 * score for score in row["scores"]]


def tabular_table() -> str:
    """Return linear models beside a guess and one without privacy; "" without results."""
    rows = []
    for entry in read_json(RESULTS / "sklearn.json").get("tables", []):
        found = {
            one["method"]: _percent(one)
            for one in entry["private"]
            if one["epsilon"] == 1.0 and one["model"] == "logistic"
        }
        if not found:
            continue
        known = {key: _percent(one) for key, one in entry["references"].items()}
        cells = [found["dp-kfc"], found["dp-sgd"], known["not private"]]
        intervals = [interval(values) for values in cells]
        seeds = str(min(map(len, cells)))
        title = f"{entry['name']} ({entry['rows']:,} × {entry['features']})"
        majority = f"{statistics.mean(known['majority']):.1f}"
        rows.append([title, *intervals, majority, seeds])
    head = ["test %, ε = 1", "DP-KFC", "DP-SGD", "not private", "guess", "seeds"]
    return markdown(head, rows) if rows else ""


FEDERATED = {
    "sofim-momentum": "DP-FedSOFIM, momentum",
    "fedavgm-matched": "DP-FedAvgM at its η/ρ, β (control)",
    "fedavgm": "DP-FedAvgM",
    "dp-kfc": "federated DP-KFC",
    "sofim": "DP-FedSOFIM, gradient",
    "fedgd-matched": "DP-FedGD at its η/ρ (control)",
    "fedgd": "DP-FedGD",
}


def federated_table() -> str:
    """Return federated methods at ε = 1 and a task a column; "" without results."""
    found = scores.read_measured()
    places = [place for place in scores.FEDERATED.values() if found.get(place)]
    rows = []
    for arm, label in FEDERATED.items():
        values = [found[place].get(arm, ()) for place in places]
        counts = [str(len(of)) for of in values]
        if any(values):
            rows.append([label, *map(interval, values), ", ".join(counts)])
    return markdown(["test %, ε = 1", *places, "seeds"], rows) if rows else ""


# --------------------------------------------------------------------------------------------------
# Pictures.

# Lines of one kind share a marker, and no two lines of a panel share colour and marker.
MARKERS = {"features": "o", "network": "s", "here": "^"}
STYLES = {"features": "-", "network": "--", "here": "-"}


def picture(name: str, path: Path) -> bool:
    """Draw accuracy against ε with 95 % intervals, a panel a data set.

    Returns:
        False where nothing was measured.
    """
    lines = _private(TASKS[name].lines(name))
    if not any(line.kind != "published" for line in lines):
        return False
    groups = sorted({line.group for line in lines})
    labels = dict.fromkeys(_arm_label(line, groups) for line in lines)
    height = (2.8 if len(groups) == 1 else 2.3) * len(groups) + 0.17 * len(labels)
    figure, panels = sheet(len(groups), 1, height=height)
    # An arm has one colour in all panels.
    numbers: dict[tuple[str, str], int] = {}
    for line in lines:
        key = line.kind, _arm_label(line, groups)
        numbers.setdefault(key, sum(kind == line.kind for kind, _ in numbers))
    for panel, group in zip(panels[:, 0], groups, strict=True):
        own = [line for line in lines if line.group == group]
        epsilons = _epsilons(own)
        measured = [line for line in own if line.kind != "published"]
        for line in own:
            label = _arm_label(line, groups)
            # Neighbouring points and error bars must not hide each other.
            apart = measured.index(line) - (len(measured) - 1) / 2 if line in measured else 0
            _draw(panel, line, epsilons, numbers[line.kind, label], 0.05 * apart, label)
        panel.set_xticks(range(len(epsilons)), [f"ε = {epsilon:g}" for epsilon in epsilons])
        panel.set_xlim(-0.35, len(epsilons) - 0.65)
        data = TASKS[name].title
        if len(groups) > 1:
            data, _, _ = own[0].label.partition(": ")
        panel.set_title(f"{data}: test accuracy, %")
    finish(figure, path, 1)
    return True


def _arm_label(line: Line, groups: Sequence[int]) -> str:
    """Return the label of a line without its data set where that has a panel."""
    return line.label if len(groups) == 1 else line.label.partition(": ")[2]


def _private(lines: Sequence[Line]) -> list[Line]:
    """Return lines without what is not private."""
    kept = []
    for line in lines:
        cells = {e: values for e, values in line.cells.items() if math.isfinite(e)}
        if cells:
            kept.append(replace(line, cells=cells))
    return kept


def _draw(
    panel: Any, line: Line, epsilons: Sequence[float], number: int, shift: float, label: str
) -> None:
    published = line.kind == "published"
    known = sorted(set(line.cells) & set(epsilons))
    values = [line.cells[epsilon] for epsilon in known]
    colour = "black" if published else f"C{number % 7}"
    draw_means(
        panel,
        [epsilons.index(epsilon) + shift for epsilon in known],
        values,
        **({"yerr": None} if published else {}),
        label=label,
        color=colour,
        linestyle=":" if published else STYLES[line.kind],
        linewidth=1 if published else None,
        marker="Dvsp"[number % 4] if published else MARKERS[line.kind],
        markerfacecolor="white" if published else None,
        zorder=2 if published else 3,
    )


def tabular_picture(path: Path) -> bool:
    """Draw accuracy of linear models on tables against ε; False where nothing was measured."""
    tables = [
        entry
        for entry in read_json(RESULTS / "sklearn.json").get("tables", [])
        if any(one["model"] == "logistic" for one in entry["private"])
    ]
    if not tables:
        return False
    figure, panels = sheet(len(tables), 1, height=2.2 * len(tables))
    for panel, entry in zip(panels[:, 0], tables, strict=True):
        rows = [one for one in entry["private"] if one["model"] == "logistic"]
        epsilons = sorted({one["epsilon"] for one in rows})
        for number, (method, label) in enumerate((("dp-kfc", "DP-KFC"), ("dp-sgd", "DP-SGD"))):
            cells = {one["epsilon"]: _percent(one) for one in rows if one["method"] == method}
            kind = ("here", "network")[number]
            line = Line(label, cells, kind)
            _draw(panel, line, epsilons, 1 - number, 0.12 * number - 0.06, label)
        reference = statistics.mean(_percent(entry["references"]["not private"]))
        panel.axhline(reference, color="C6", linestyle="--", label="not private")
        panel.set_xticks(range(len(epsilons)), [f"ε = {epsilon:g}" for epsilon in epsilons])
        panel.set_xlim(-0.4, len(epsilons) - 0.6)
        panel.set_title(f"{entry['name']}: test accuracy, %")
    finish(figure, path, 3)
    return True


def draw(folder: Path) -> None:
    """Draw the pictures of all tasks, as far as they were measured."""
    for name in TASKS:
        picture(name, folder / f"results-{name}.png")
    tabular_picture(folder / "results-tables.png")
