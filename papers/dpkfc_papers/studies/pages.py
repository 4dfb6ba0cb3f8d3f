"""Tables and pictures of studies for README.md and docs/*.md, from papers/results/*.json alone.

    python -m dpkfc_papers.studies.pages    # draws the pictures

`benchmarks/tables.py` writes the tables at their markers, and `make results` does both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

from dpkfc_papers import tables
from dpkfc_papers.store import Store
from dpkfc_papers.studies import (
    claims,
    disk_pages,
    features_table,
    figure_tables,
    grids,
    headline,
    ngd_pages,
    scores,
    task_pages,
)
from dpkfc_papers.studies.harness import (
    IMAGES,
    RESULTS,
    ROOT,
    machine,
    machine_of_rows,
    markdown,
    read_json,
)

FEDERATED = "papers/results/federated_accuracy.json"
SPEED = ROOT / "benchmarks" / "results" / "speed.json"
VERDICTS = ("reproduced", "better", "not reproduced", "no verdict", "not run")


def name_missing(command: str) -> str:
    return f"*Not measured in this checkout yet; `{command}` writes it.*"


def fill_table(name: str) -> str:
    """The table of a study with one file of results, and where it was measured."""
    study = import_module(f"dpkfc_papers.studies.{name}")
    results = read_json(study.PATH)
    if not results:
        return name_missing(f"python -m dpkfc_papers.studies.{name}")
    return study.table(results) + "\n\n" + machine(results)


def run_by_run(name: str) -> str:
    """The table of a study that keeps every run."""
    study = import_module(f"dpkfc_papers.studies.{name}")
    text = study.table()
    if not text:
        return name_missing(f"python -m dpkfc_papers.studies.{name}")
    rows = read_json(study.PATH)["rows"].values()
    return f"{text}\n\n{machine_of_rows(list(rows))}"


def studies() -> list[Any]:
    """Return the results of the accuracy studies."""
    return [Store(path) for path in sorted((RESULTS / "accuracy").glob("*.json"))]


def accuracy_study(recipe: str) -> str:
    """The arms of the accuracy study on one recipe."""
    from dpkfc_papers.accuracy import table

    rows = [row for store in studies() for row in store if row["run"]["recipe"] == recipe]
    rows = [row for row in rows if "tag" in row]
    if not rows:
        return name_missing("python -m dpkfc_papers.studies.accuracy_study")
    more = {
        arm: scores.grid_cells(name)[arm]
        for (of_recipe, arm), name in scores.MORE_SEEDS.items()
        if of_recipe == recipe
    }
    return table(rows, recipe, more) + "\n\n" + machine_of_rows(rows)


def grid(name: str) -> str:
    """The best point of each arm of a grid, judged on the test set; `NAME-points`: all of them, on
    the validation split.
    """
    of = name.removesuffix("-points")
    store = Store(grids.RESULTS / f"{of}.json")
    rows = list(store)
    if not rows:
        return name_missing(f"python -m dpkfc_papers.studies.grids --grid {of}")
    made = grids.table if of == name else grids.every_point
    return made(of, store) + "\n\n" + machine_of_rows(rows)


def claim_table(make: Callable[[scores.Accuracies, Sequence[features_table.Row]], str]) -> str:
    """Claims beside what was measured."""
    return make(scores.read_measured(), features_table.read_rows())


def dp_ngd(part: str) -> str:
    """The variations of the DP-NGD paper on a small CNN, by the parts of their page."""
    command = "ngd_duality" if part == "duality" else "ngd_ablation"
    return ngd_pages.page(part) or name_missing(f"python -m dpkfc_papers.studies.{command}")


def disk_figures() -> str:
    """Figures 1, 2 and 8 of the DiSK paper on the CNN of MNIST."""
    return disk_pages.page() or name_missing("python -m dpkfc_papers.studies.grids --grid disk")


def task(name: str) -> str:
    """A few methods of a task, with 95 % intervals and what papers print."""
    return task_pages.task_page(name) or name_missing("python -m dpkfc_papers.studies.features")


def conditions() -> str:
    """How far from white the two factors of each network are."""
    return figure_tables.condition_table() or name_missing("dpkfc reproduce kfc-theorem-5.4")


# --------------------------------------------------------------------------------------------------
# Printed tables of papers.


@cache
def _tuning() -> Any:
    # Table 7 of DP-KFC has its CIFAR-10 runs from a grid.
    return tables.Tuning([*studies(), Store(grids.RESULTS / "cifar.json")])


def _published(name: str) -> tuple[Any, list[Any]]:
    """Return a printed table, and its cells beside ours."""
    nothing, times = Store(RESULTS / "accuracy" / "none.json"), read_json(SPEED)
    table = tables.load(name)
    return table, tables.outcomes(table, nothing, _tuning(), range(3), times=times)


def _count_verdicts(cells: Sequence[Any], words: Sequence[str]) -> list[int]:
    return [sum(cell.verdict.startswith(word) for cell in cells) for word in words]


def published(name: str = "") -> str:
    """The cells of a printed table beside ours, or how many of each table came out how."""
    if name:
        return tables.markdown(*_published(name))
    rows = []
    for one in tables.names():
        table, found = _published(one)
        counts = map(str, _count_verdicts(found, VERDICTS))
        rows.append([f"`{one}`", table.title, str(len(found)), *counts])
    return markdown(["table", "what it is", "cells", *VERDICTS], rows)


def published_groups() -> str:
    """How the cells of the DP-KFC paper that were run came out, by table and recipe."""
    words = ("better", "reproduced", "not reproduced")
    rows = []
    for number in (1, 2, 5, 6, 7):
        table, found = _published(f"dp-kfc-{number}")
        for recipe in dict.fromkeys(one.cell.recipe for one in found if one.values):
            of = [one for one in found if one.values and one.cell.recipe == recipe]
            counts = [sum(one.verdict == word for one in of) for word in words]
            below = sum(statistics.mean(one.values) < one.cell.published.mean for one in of)
            title = table.title.partition(":")[0]
            rows.append([f"{title}, `{recipe}`", *map(str, (len(of), *counts, below))])
    head = ["table, recipe", "cells run", *words, "below in the mean"]
    return markdown(head, rows)


def paper_cells() -> str:
    """How the printed numbers of each paper came out."""
    words = ("better", "reproduced", "not reproduced", "no verdict", "not run")
    cells: dict[str, list[Any]] = {}
    for name in tables.names():
        table, found = _published(name)
        cells.setdefault(table.title.partition(",")[0], []).extend(found)
    directions = {"DP-NGD": ngd_pages.directions_in_short()}
    rows = []
    for paper, of in cells.items():
        counts = map(str, (len(of), *_count_verdicts(of, words)))
        rows.append([paper, *counts, directions.get(paper, "–")])
    more = "direction on a small CNN: same, other, not significant"
    return markdown(["paper", "cells of its tables", *words, more], rows)


# --------------------------------------------------------------------------------------------------


def methods(page: str = "") -> str:
    """The methods on the digits: all, or the methods of one page of docs/methods."""
    from dpkfc.app.methods import METHODS
    from dpkfc_papers.studies import methods as study

    store = Store(study.PATH)
    if not len(store):
        return name_missing("python -m dpkfc_papers.studies.grids --grid methods")
    only = [
        name
        for name, method in METHODS.items()
        if not page or method.page == f"{page}.md" or name == "dp-sgd"
    ]
    return study.table(store, only) + "\n\n" + machine_of_rows(store.figures())


def federated_accuracy(part: str) -> str:
    """The federated study: `arms-TASK`, accuracies, `gains-TASK`, differences between arms, or
    `noise`, ε seen from two sides.
    """
    from dpkfc_papers import federated_tables
    from dpkfc_papers.federated_study import STUDY

    if part == "noise":
        return federated_tables.noise(STUDY)
    store = Store(ROOT / FEDERATED)
    rows = list(store)
    if not rows:
        return name_missing(f"dpkfc reproduce dp-fedsofim --results {FEDERATED}")
    kind, _, task = part.partition("-")
    if kind == "gains":
        return federated_tables.second_order(STUDY, store, task)
    origin = next((row["features"] for row in rows if row["run"]["task"] == task), "")
    accuracies = federated_tables.accuracies(STUDY, store, task)
    return f"{accuracies} Features: {origin}.\n\n{machine_of_rows(rows)}"


def features(part: str = "") -> str:
    """Linear heads on features: all rows, the controls, sentence vectors, or a matrix."""
    files = {"": features_table.MEASURED, "controls": features_table.CONTROLS}
    made = {"matrix": features_table.matrix, "sentences": features_table.sentence_table}
    found = made[part]() if part in made else features_table.table(files[part])
    return found or name_missing("python -m dpkfc_papers.studies.features")


def language(part: str) -> str:
    """Heads on layer means of a set of texts."""
    from dpkfc_papers.studies import language as study

    return study.table(part) or name_missing(
        f"python -m dpkfc_papers.studies.language --task {part}"
    )


TABLES: dict[str, Callable[[], str]] = {
    "which-method": headline.choice_table,
    "headline": headline.table,
    "published": published,
    "paper-groups": published_groups,
    "paper-cells": paper_cells,
    "claims": partial(claim_table, claims.table),
    "verdicts": partial(claim_table, claims.verdict_table),
    "paper-claims": partial(claim_table, claims.paper_table),
    "methods": methods,
    "features": features,
    "conditions": conditions,
    "disk-figures": disk_figures,
    "probe-whitening": partial(fill_table, "probe_whitening"),
    "which-side": partial(fill_table, "which_side"),
    "sklearn": partial(fill_table, "sklearn_estimators"),
    "convergence": partial(fill_table, "convergence"),
    "federated-ablation": partial(run_by_run, "federated_ablation"),
    "federated-variations": partial(run_by_run, "federated_variations"),
    "generation": partial(run_by_run, "generation"),
    "fine-tuning": partial(run_by_run, "fine_tuning"),
    "head-search": partial(run_by_run, "head_search"),
    "small-transformer": partial(run_by_run, "small_transformer"),
    "byte-gpt2": partial(run_by_run, "byte_gpt2"),
    "correlated-accuracy": partial(run_by_run, "correlated_noise"),
}
# Before a dash and the name of a part: a recipe, a page, a section, ...
PARTS: dict[str, Callable[[str], str]] = {
    "accuracy-study": accuracy_study,
    "task": task,
    "features": features,
    "published": published,
    "methods": methods,
    "federated-accuracy": federated_accuracy,
    "dp-ngd": dp_ngd,
    "figures": figure_tables.make_part,
    "grid": grid,
    "language": language,
}


def main() -> int:
    """Draw the pictures of what has been measured."""
    from dpkfc_papers.federated_study import STUDY
    from dpkfc_papers.federated_tables import figure
    from dpkfc_papers.studies import federated_variations

    figure_tables.draw(IMAGES)
    figure(STUDY, Store(ROOT / FEDERATED), IMAGES / "federated-accuracy.png")
    headline.picture(IMAGES / "accuracy.png")
    for module in (task_pages, ngd_pages, disk_pages, federated_variations):
        module.draw(IMAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
