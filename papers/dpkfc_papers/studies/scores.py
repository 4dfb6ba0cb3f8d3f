"""Test accuracies of all studies in percent, by task, arm and ε."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpkfc_papers.studies import grids
from dpkfc_papers.studies.harness import RESULTS, read_json

# Arm, then ε, then accuracies, one a seed.
Cells = dict[str, dict[float, list[float]]]
# Task, then arm, then accuracies at ε = 1.
Accuracies = Mapping[str, Mapping[str, Sequence[float]]]

# The file of the accuracy study that holds a recipe.
FILES = {
    "mnist-cnn": "cnn",
    "fashion-mnist-cnn": "cnn",
    "imdb-logistic": "imdb",
    "mnist-mlp": "mlp",
    "stackoverflow-head": "sentences",
}
TITLES = {
    "mnist-cnn": "MNIST, CNN",
    "fashion-mnist-cnn": "Fashion-MNIST, CNN",
    "imdb-logistic": "IMDB, logistic regression",
    "mnist-mlp": "MNIST, MLP",
    "mnist-vit": "MNIST, ViT (with Adam)",
    "stackoverflow-head": "StackOverflow, head on sentences",
}
FEDERATED = {
    "cifar10": "CIFAR-10 features",
    "mnist": "MNIST features",
    "pneumoniamnist": "PneumoniaMNIST features",
}
# Whitening from noise has two names.
NOISE = ("dp-kfc-pink", "dp-kfc-tokens")
# A grid has run the settings that the study chose with more seeds, which stand on every page that
# has one number for the cell: grid by recipe and arm.
MORE_SEEDS = {("fashion-mnist-cnn", "dp-sgd"): "fashion-baselines"}
# Arms of IMDB that have another damping and clip in its grid, or none: the trials are not compared
# with the grid.
ONLY_TRIALS = ("dp-ngd", "dp-kfc-random", "dp-kfc-oracle")


def study_cells(recipe: str, folder: Path = RESULTS) -> Cells:
    """Return what the accuracy study measured on a recipe, with settings tuned at ε = 1.

    README, docs/results.md and docs/which-method.md take each of their cells from here.
    """
    from dpkfc_papers.store import winners_tests

    found: Cells = defaultdict(lambda: defaultdict(list))
    results = read_json(folder / "accuracy" / f"{FILES[recipe]}.json")
    for row in winners_tests(results.get("rows", {}).values()):
        if row["run"]["recipe"] == recipe:
            found[row["tag"]["arm"]][row["target_epsilon"]].append(100 * row["accuracy"])
    for (of_recipe, arm), name in MORE_SEEDS.items():
        if of_recipe == recipe and arm in found:
            found[arm] |= grid_cells(name, folder).get(arm, {})
    return found


def grid_cells(name: str, folder: Path = RESULTS) -> Cells:
    """Return the tests of the arms of a grid that have a key and whose every point was run."""
    from dpkfc_papers.store import Store

    grid = grids.GRIDS[name]
    store, epsilon = Store(folder / "grids" / f"{name}.json"), grid.common["epsilon"]
    found = {}
    for label, key in grid.keys.items():
        if values := [100 * row["accuracy"] for row in grid.tests(store, label)]:
            found[key] = {epsilon: values}
    return found


def read_measured(folder: Path = RESULTS) -> Accuracies:
    """Return all that two arms were compared in at ε = 1.

    Where a grid holds an arm, whose every point ran to its end, its tests stand for the tests of
    the twenty trials, most of which were pruned.
    """
    found: dict[str, dict[str, Sequence[float]]] = defaultdict(dict)
    for recipe in FILES:
        for arm, cells in study_cells(recipe, folder).items():
            if cells.get(1.0):
                name = "dp-kfc-noise" if arm in NOISE else arm
                found[TITLES[recipe]][name] = cells[1.0]
    for (task, arm), values in _federated(folder).items():
        found[FEDERATED[task]][arm] = values
    imdb = found[TITLES["imdb-logistic"]]
    if "dp-ngd" in imdb:
        trials = {arm: imdb[arm] for arm in ("dp-ngd", "dp-sgd") if arm in imdb}
        found["IMDB, twenty trials"] = trials
    for arm in ONLY_TRIALS:
        imdb.pop(arm, None)
    for name, grid in grids.GRIDS.items():
        if grid.keys and grid.common["epsilon"] == 1.0:
            cells = grid_cells(name, folder)
            found[TITLES[grid.recipe]] |= {arm: of[1.0] for arm, of in cells.items()}
    return found


def _federated(folder: Path) -> dict[tuple[str, str], list[float]]:
    """Return tests at ε = 1 with independent parts, by task and arm."""
    found = defaultdict(list)
    for row in read_json(folder / "federated_accuracy.json").get("rows", {}).values():
        is_test = row["measured_on"] == "test" and row.get("target_epsilon") == 1.0
        if is_test and "arm" in row["tag"] and row["run"]["partition"] == "iid":
            found[row["run"]["task"], row["tag"]["arm"]].append(100 * row["accuracy"])
    return found
