"""Accuracy of a CNN on MNIST with independent and with correlated noise, at the same ε.

    python -m dpkfc_papers.studies.correlated_noise --data-dir DATA
    python -m dpkfc_papers.studies.correlated_noise --table

Five epochs of plain DP-SGD without momentum, batch 256, C = 1, as the predicted error assumes. Each
kind of noise has the same four rates, tried at ε = 3 on 10,000 validation images; the best is
judged on the test split at both ε. A run that is in the file of results is not made again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from dpkfc_papers.store import Store
from dpkfc_papers.studies import grids
from dpkfc_papers.studies.harness import interval, markdown, run_script

PATH = grids.RESULTS / "correlated.json"
GRID = grids.GRIDS["correlated"]
EPSILONS = (1.0, 3.0)
NOISES = {"gaussian": "independent", "auto": "correlated, bands by search"}


def test_runs(store: Any, noise: str, epsilon: float) -> list[Any]:
    """Return the runs of the best rate on the test split; none before it is known."""
    if not GRID.is_done(store, noise):
        return []
    point = {**GRID.points(store, noise)[0][0], "epsilon": epsilon}
    return [GRID.run(noise, point, seed, True) for seed in GRID.seeds]


def stages(store: Any) -> Iterator[list[Any]]:
    """Yield the runs that choose rates, then tests at each ε, seed by seed."""
    yield [run for _, run in GRID.cells(store, False)]
    for epsilon in reversed(EPSILONS):
        tests = [test_runs(store, noise, epsilon) for noise in NOISES]
        yield [run for pair in zip(*tests, strict=True) for run in pair]


def table() -> str:
    """Return accuracies on validation images by rate, then on the test split by ε."""
    store = Store(PATH)
    return "\n\n".join(filter(None, (validation_table(store), test_table(store))))


def validation_table(store: Any) -> str:
    """Return the accuracies on validation images: one run a kind and rate."""
    lines = []
    for noise, title in NOISES.items():
        _, points = GRID.arms[noise]
        rates = [f"rate {point['lr']:g}" for point in points]
        found = [store.get(GRID.run(noise, point, *GRID.tuned_with, False)) for point in points]
        if known := [row for row in found if row]:
            cells = [f"{100 * row['accuracy']:.2f}" if row else "–" for row in found]
            one = max(known, key=lambda row: row["date"])
            seconds = f"{one['cpu_seconds'] / one['steps']:.2f}"
            lines.append([title, *cells, f"{one['bands']}", seconds])
    if not lines:
        return ""
    return markdown(["validation %, ε = 3", *rates, "bands", "processor seconds a step"], lines)


def test_table(store: Any) -> str:
    """Return accuracies on the test split by kind and ε, and the gain seed by seed."""
    lines = []
    for epsilon in EPSILONS:
        tests = [test_runs(store, noise, epsilon) for noise in NOISES]
        rows = [tuple(map(store.get, pair)) for pair in zip(*tests, strict=True)]
        pairs = [[100 * row["accuracy"] for row in pair] for pair in rows if all(pair)]
        if not pairs:
            continue
        means = [interval(values) for values in zip(*pairs, strict=True)]
        gains = [correlated - independent for independent, correlated in pairs]
        lines.append([f"{epsilon:g}", *means, interval(gains), f"{len(pairs)}"])
    head = ["test %: ε", *NOISES.values(), "gain", "seeds"]
    return markdown(head, lines) if lines else ""


if __name__ == "__main__":
    run = functools.partial(grids.make_runs, PATH, stages)
    raise SystemExit(run_script(__doc__, run, table, "runs/correlated"))
