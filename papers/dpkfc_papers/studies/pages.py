"""Tables of the studies by the names of their markers in README.md and docs/*.md.

`benchmarks/tables.py` writes them there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module

from dpkfc_papers.studies.harness import (
    RESULTS,
    ROOT,
    machine,
    machine_of_rows,
    markdown,
    read_json,
)

SPEED = ROOT / "benchmarks" / "results" / "speed.json"


def missing(command: str) -> str:
    return f"*Not measured in this checkout yet; `{command}` writes it.*"


def accuracy() -> str:
    from dpkfc_papers.studies import accuracy as study

    results = read_json(RESULTS / "accuracy.json")
    return (
        study.table() + "\n\n" + machine(results)
        if results
        else missing("python -m dpkfc_papers.studies.accuracy")
    )


def studies():
    """Results of the accuracy studies, by the name of their file."""
    from dpkfc_papers.store import Store

    return {path.stem: Store(path) for path in sorted((RESULTS / "accuracy").glob("*.json"))}


def accuracy_study(recipe: str) -> str:
    """The arms of the accuracy study on one recipe."""
    from dpkfc_papers.accuracy import table

    rows = [
        row
        for store in studies().values()
        for row in store
        if row["run"]["recipe"] == recipe and "tag" in row
    ]
    if not rows:
        return missing("python -m dpkfc_papers.studies.accuracy_study")
    return table(rows, recipe) + "\n\n" + machine_of_rows(rows)


def grid(name: str) -> str:
    """The best point of each arm of a grid, judged on the test set; `NAME-points`: all of them, on
    the validation split.
    """
    from dpkfc_papers.store import Store
    from dpkfc_papers.studies import grids

    of = name.removesuffix("-points")
    store = Store(grids.RESULTS / f"{of}.json")
    rows = list(store)
    if not rows:
        return missing(f"python -m dpkfc_papers.studies.grids --grid {of}")
    made = grids.table if of == name else grids.every_point
    return made(of, store) + "\n\n" + machine_of_rows(rows)


def claims() -> str:
    """What the papers say, and what was found here."""
    from dpkfc_papers.studies import claims as said
    from dpkfc_papers.studies.features_table import read_rows

    return said.table(said.measured(RESULTS), read_rows())


def verdicts() -> str:
    """The verdict on each claim alone."""
    from dpkfc_papers.studies import claims as said
    from dpkfc_papers.studies.features_table import read_rows

    return said.verdict_table(said.measured(RESULTS), read_rows())


def paper_claims() -> str:
    """What became of the claims of papers, and the controls that explain it."""
    from dpkfc_papers.studies import claims as said
    from dpkfc_papers.studies.features_table import read_rows

    return said.paper_table(said.measured(RESULTS), read_rows())


def paper_cells() -> str:
    """How the printed numbers of each paper came out."""
    from dpkfc_papers.studies import ngd_pages
    from dpkfc_papers.tables import names

    words = ("better", "reproduced", "not reproduced", "no verdict", "not run")
    counts: dict[str, list[int]] = {}
    for name in names():
        table, found = _published(name)
        of = counts.setdefault(table.title.partition(",")[0], [0] * (len(words) + 1))
        of[0] += len(found)
        for number, word in enumerate(words, start=1):
            of[number] += sum(cell.verdict.startswith(word) for cell in found)
    directions = {"DP-NGD": ngd_pages.directions_in_short()}
    rows = [[paper, *map(str, of), directions.get(paper, "–")] for paper, of in counts.items()]
    more = "direction on a small CNN: same, other, not significant"
    return markdown(["paper", "cells of its tables", *words, more], rows)


def script(name: str) -> str:
    """The table of a script with runs of its own."""
    study = import_module(f"dpkfc_papers.studies.{name}")
    text = study.table()
    if not text:
        return missing(f"python -m dpkfc_papers.studies.{name}")
    rows = read_json(study.PATH)["rows"].values()
    return f"{text}\n\n{machine_of_rows(list(rows))}"


def dp_ngd(part: str) -> str:
    """The variations of the DP-NGD paper on a small CNN, by the parts of their page."""
    from dpkfc_papers.studies import ngd_pages

    command = "ngd_duality" if part == "duality" else "ngd_ablation"
    return ngd_pages.page(part) or missing(f"python -m dpkfc_papers.studies.{command}")


def hessian() -> str:
    """The ends of the spectrum of the Hessian, before and after training."""
    from dpkfc_papers.studies import hessian as study

    results = read_json(study.PATH)
    if not results:
        return missing("python -m dpkfc_papers.studies.hessian")
    picture = f"![spectrum of the Hessian](img/{study.PICTURE})"
    return f"{study.table(results)}\n\n{picture}\n\n{machine(results)}"


def disk_figures() -> str:
    """Figures 1, 2 and 8 of the DiSK paper on the CNN of MNIST."""
    from dpkfc_papers.studies import disk_pages

    return disk_pages.page() or missing("python -m dpkfc_papers.studies.grids --grid disk")


def task(name: str) -> str:
    """A few methods of a task, with 95 % intervals and what papers print."""
    from dpkfc_papers.studies import result_pages

    return result_pages.task_page(name) or missing("python -m dpkfc_papers.studies.features")


def conditions() -> str:
    """How far from white the two factors of each network are."""
    from dpkfc_papers.studies import result_pages

    return result_pages.condition_table() or missing("dpkfc reproduce kfc-theorem-5.4")


def convergence() -> str:
    """The least gradient norm over the number of steps, beside the rate of a theorem."""
    from dpkfc_papers.studies import convergence as study

    results = read_json(RESULTS / "convergence.json")
    if not results:
        return missing("python -m dpkfc_papers.studies.convergence")
    return study.table() + "\n\n" + machine(results)


def rank_accuracy() -> str:
    """What low-rank sides and smaller probes cost in accuracy."""
    from dpkfc_papers.store import Store
    from dpkfc_papers.studies import rank_accuracy as study

    store = Store(study.RESULTS)
    rows = list(store)
    if not rows:
        return missing("python -m dpkfc_papers.studies.rank_accuracy")
    return study.table(study.runs(False, 9), store) + "\n\n" + machine_of_rows(rows)


def which_side() -> str:
    """Signal, curvature and noise of a private step, by what is whitened."""
    from dpkfc_papers.studies import which_side as study

    results = read_json(study.PATH)
    return (
        study.table(results) + "\n\n" + machine(results)
        if results
        else missing("python -m dpkfc_papers.studies.which_side")
    )


def probe_whitening() -> str:
    """How white each probe makes the inputs of layers."""
    from dpkfc_papers.studies import probe_whitening as study

    results = read_json(study.PATH)
    return (
        study.table(results) + "\n\n" + machine(results)
        if results
        else missing("python -m dpkfc_papers.studies.probe_whitening")
    )


def _tuning():
    from dpkfc_papers.store import Store
    from dpkfc_papers.tables import Tuning

    # Table 7 of DP-KFC has its CIFAR-10 runs from a grid.
    return Tuning([*studies().values(), Store(RESULTS / "grids" / "cifar.json")])


def _published(name: str):
    from dpkfc_papers.store import Store
    from dpkfc_papers.tables import load, outcomes

    nothing, times = Store(RESULTS / "accuracy" / "none.json"), read_json(SPEED)
    return load(name), outcomes(load(name), nothing, _tuning(), range(3), times=times)


def published(name: str = "") -> str:
    """The cells of a published table beside ours, or how many of each table came out how."""
    from dpkfc_papers.tables import markdown as cells
    from dpkfc_papers.tables import names

    if name:
        return cells(*_published(name))
    rows = []
    for one in names():
        table, found = _published(one)
        words = ("reproduced", "better", "not reproduced", "no verdict", "not run")
        counts = [sum(cell.verdict.startswith(word) for cell in found) for word in words]
        rows.append([f"`{one}`", table.title, str(len(found)), *map(str, counts)])
    return markdown(
        [
            "table",
            "what it is",
            "cells",
            "reproduced",
            "better",
            "not reproduced",
            "no verdict",
            "not run",
        ],
        rows,
    )


def published_groups() -> str:
    """How the cells of the DP-KFC paper that were run came out, by table and recipe."""
    rows = []
    for number in (1, 2, 5, 6, 7):
        table, found = _published(f"dp-kfc-{number}")
        for recipe in dict.fromkeys(one.cell.recipe for one in found if one.values):
            of = [one for one in found if one.values and one.cell.recipe == recipe]
            words = ("better", "reproduced", "not reproduced")
            counts = [sum(one.verdict == word for one in of) for word in words]
            below = sum(statistics.mean(one.values) < one.cell.published.mean for one in of)
            title = table.title.partition(":")[0]
            rows.append([f"{title}, `{recipe}`", str(len(of)), *map(str, counts), str(below)])
    head = ["table, recipe", "cells run", "better", "reproduced", "not reproduced"]
    return markdown([*head, "below in the mean"], rows)


def methods(page: str = "") -> str:
    """The methods on the digits, all or those of one page of docs/methods."""
    from dpkfc.app.settings import METHODS
    from dpkfc_papers.studies import methods as study

    results = read_json(RESULTS / "methods.json")
    if not results:
        return missing("python -m dpkfc_papers.studies.methods")
    only = tuple(
        name
        for name, method in METHODS.items()
        if not page or method.page == f"{page}.md" or name == "dp-sgd"
    )
    return study.table(results, only) + "\n\n" + machine(results)


def federated_accuracy(part: str) -> str:
    """The federated study: `arms-TASK`, accuracies, `gains-TASK`, differences between arms, or
    `noise`, ε seen from two sides.
    """
    from dpkfc_papers import federated_study
    from dpkfc_papers.federated_study import STUDY
    from dpkfc_papers.store import Store

    if part == "noise":
        return federated_study.noise(STUDY)
    store = Store(RESULTS / "federated_accuracy.json")
    rows = list(store)
    if not rows:
        return missing(
            "dpkfc reproduce dp-fedsofim --results papers/results/federated_accuracy.json"
        )
    kind, _, task = part.partition("-")
    if kind == "gains":
        return federated_study.second_order(STUDY, store, task)
    origin = next((row["features"] for row in rows if row["run"]["task"] == task), "")
    accuracies = federated_study.accuracies(STUDY, store, task)
    return f"{accuracies} Features: {origin}.\n\n{machine_of_rows(rows)}"


def figures(part: str) -> str:
    """What the figures of the DP-KFC paper show here, as numbers."""
    from dpkfc_papers.studies import figure_tables

    return figure_tables.PARTS[part]()


def headline() -> str:
    """What the methods reach on the CNN of the DP-KFC paper."""
    from dpkfc_papers.studies import headline as front

    results = read_json(RESULTS / "accuracy" / "cnn.json")
    return (
        front.table(results)
        if results
        else missing("python -m dpkfc_papers.studies.accuracy_study")
    )


def sklearn_estimators() -> str:
    """The estimators of `dpkfc.sklearn` beside a guess and a model without privacy."""
    from dpkfc_papers.studies import sklearn_estimators as study

    results = read_json(RESULTS / "sklearn.json")
    if not results:
        return missing("python -m dpkfc_papers.studies.sklearn_estimators")
    return study.table() + "\n\n" + machine(results)


def which_method() -> str:
    """What the methods to choose from reach on each task."""
    from dpkfc_papers.studies import which_method as page

    return page.table()


def own_data() -> str:
    """A user's own table and images by the command line."""
    from dpkfc_papers.studies import own_data as study

    results = read_json(RESULTS / "own_data.json")
    if not results:
        return missing("python -m dpkfc_papers.studies.own_data")
    return study.table_of_results() + "\n\n" + machine(results)


def features(part: str = "") -> str:
    """Linear heads on features: all rows, the controls, sentence vectors, or a matrix."""
    from dpkfc_papers.studies import features_table

    if part == "matrix":
        found = features_table.matrix()
    elif part == "sentences":
        found = features_table.sentence_table()
    else:
        files = {"": features_table.MEASURED, "controls": features_table.CONTROLS}
        found = features_table.table(files[part])
    return found or missing("python -m dpkfc_papers.studies.features")


TABLES: dict[str, Callable[[], str]] = {
    "which-method": which_method,
    "accuracy": accuracy,
    "published": published,
    "methods": methods,
    "rank-accuracy": rank_accuracy,
    "probe-whitening": probe_whitening,
    "which-side": which_side,
    "features": features,
    "own-data": own_data,
    "sklearn": sklearn_estimators,
    "claims": claims,
    "verdicts": verdicts,
    "conditions": conditions,
    "convergence": convergence,
    "paper-groups": published_groups,
    "paper-claims": paper_claims,
    "paper-cells": paper_cells,
    "federated-ablation": partial(script, "federated_ablation"),
    "headline": headline,
    "disk-figures": disk_figures,
    "generation": partial(script, "generation"),
    "federated-variations": partial(script, "federated_variations"),
    "hessian": hessian,
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
    "figures": figures,
    "grid": grid,
}
