"""The estimators of `dpkfc.sklearn` against a model without privacy and a guess.

    python -m dpkfc_papers.studies.sklearn_estimators  # minutes; papers/results/sklearn.json
    python -m dpkfc_papers.studies.sklearn_estimators --table  # the table

Every figure is the accuracy on a quarter of the rows that the fit has not seen (R² for numbers),
over five splits and seeds. Bounds of wine and breast cancer are the ranges that their description
prints; they come from these rows, so a real user needs a schema in their place. Numbers in the
defaults of the estimators were set on other tables: iris, draws of `make_classification`, and four
generated tables of indicators. `adult-like` had shown the need for a rule for the clip norm, and
for features that keep their 0.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, clone
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_friedman1
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from dpkfc.sklearn import DPLogisticRegression, DPMLPClassifier, DPMLPRegressor
from dpkfc_papers.studies.harness import (
    RESULTS,
    figures,
    figures_parser,
    half_interval,
    markdown,
)

PATH = RESULTS / "sklearn.json"
SEEDS = range(5)
EPSILONS = (1.0, 3.0)
METHODS = ("dp-kfc", "dp-sgd")
REFERENCES = ("majority", "not private")


@dataclass(frozen=True)
class Table:
    """Rows, targets, and public bounds `[d, 2]`."""

    name: str
    rows: np.ndarray
    targets: np.ndarray
    bounds: np.ndarray
    target_bounds: tuple[float, float] | None = None


def adult_like(count: int = 10_000) -> Table:
    """A synthetic table with the columns of a census: numbers, a heavy tail and categories."""
    random = np.random.default_rng(0)
    age = random.uniform(17, 90, count)
    education = random.binomial(15, 0.6, count) + 1
    hours = random.normal(40, 12, count).clip(1, 99)
    gain = random.exponential(800, count) * (random.random(count) < 0.1)
    sizes = (7, 6, 12, 2)
    categories = [random.choice(k, count, p=random.dirichlet(np.ones(k))) for k in sizes]
    effects = [random.normal(0, 0.6, k) for k in sizes]
    logit = -0.0016 * (age - 48) ** 2 + 0.35 * (education - 10) + 0.03 * (hours - 40)
    logit = logit + 0.002 * gain - 1.2
    for chosen, effect in zip(categories, effects, strict=True):
        logit = logit + effect[chosen]
    labels = (random.random(count) < 1 / (1 + np.exp(-logit))).astype(int)
    one_hot = [np.eye(k)[chosen] for chosen, k in zip(categories, sizes, strict=True)]
    rows = np.column_stack([age, education, hours, gain, *one_hot])
    of_numbers = [(17, 90), (1, 16), (1, 99), (0, 5000)]
    of_categories = [(0, 1)] * sum(sizes)
    bounds = np.array(of_numbers + of_categories, dtype=float)
    return Table("adult-like", rows, labels, bounds)


def tables() -> Iterator[Table]:
    for name, load in (("breast cancer", load_breast_cancer), ("wine", load_wine)):
        rows, labels = load(return_X_y=True)
        yield Table(name, rows, labels, np.column_stack([rows.min(0), rows.max(0)]))
    rows, labels = load_digits(return_X_y=True)
    yield Table("digits", rows, labels, np.tile((0.0, 16.0), (rows.shape[1], 1)))
    yield adult_like()
    rows, targets = make_friedman1(5000, noise=1.0, random_state=0)
    yield Table("friedman1", rows, targets, np.tile((0.0, 1.0), (10, 1)), (0.0, 30.0))


def private_estimator(model: str, table: Table, **settings: Any) -> BaseEstimator:
    if table.target_bounds is not None:
        return DPMLPRegressor(bounds=table.bounds, target_bounds=table.target_bounds, **settings)
    kind = {"logistic": DPLogisticRegression, "network": DPMLPClassifier}[model]
    return kind(bounds=table.bounds, classes=np.unique(table.targets), **settings)


def reference(name: str, table: Table) -> BaseEstimator:
    is_number = table.target_bounds is not None
    if name == "majority":
        return DummyRegressor() if is_number else DummyClassifier()
    low, high = table.bounds.T
    scale = FunctionTransformer(lambda rows: (2 * (rows - low) / (high - low) - 1).clip(-1, 1))
    return make_pipeline(scale, Ridge() if is_number else LogisticRegression(max_iter=2000))


def score(table: Table, estimator: BaseEstimator) -> dict[str, Any]:
    """Return all scores, their mean and half the width of a 95 % interval."""
    stratify = table.targets if table.target_bounds is None else None
    values = []
    for seed in SEEDS:
        train, test, y_train, y_test = train_test_split(
            table.rows, table.targets, random_state=seed, stratify=stratify
        )
        fresh: Any = clone(estimator)
        if "random_state" in fresh.get_params():
            fresh.set_params(random_state=seed)
        values.append(fresh.fit(train, y_train).score(test, y_test))
    return {
        "scores": values,
        "mean": statistics.mean(values),
        "half_width": half_interval(values),
    }


def measure(_: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {
        "command": "python -m dpkfc_papers.studies.sklearn_estimators",
        "tables": [],
    }
    for table in tables():
        entry: dict[str, Any] = {"name": table.name, "rows": len(table.rows)}
        entry["features"] = table.rows.shape[1]
        entry["references"] = {name: score(table, reference(name, table)) for name in REFERENCES}
        entry["private"] = []
        models = ("network",) if table.target_bounds else ("logistic", "network")
        for epsilon, model, method in product(EPSILONS, models, METHODS):
            estimator = private_estimator(model, table, epsilon=epsilon, method=method)
            found = score(table, estimator)
            row = {"epsilon": epsilon, "model": model, "method": method, **found}
            entry["private"].append(row)
            print(table.name, epsilon, model, method, f"{found['mean']:.3f}", flush=True)
        results["tables"].append(entry)
    return results


def _cell(found: dict[str, Any]) -> str:
    return f"{100 * found['mean']:.1f} ± {100 * found['half_width']:.1f}"


def table(results: dict[str, Any]) -> str:
    """The Markdown table of the results."""
    rows = []
    for entry in results["tables"]:
        references = [_cell(entry["references"][name]) for name in REFERENCES]
        for epsilon in EPSILONS:
            found = {}
            for row in entry["private"]:
                if row["epsilon"] == epsilon:
                    found[row["model"], row["method"]] = _cell(row)
            cells = [found.get(key, "–") for key in product(("logistic", "network"), METHODS)]
            name = f"{entry['name']} ({entry['rows']:,} × {entry['features']})"
            rows.append([name, f"{epsilon:g}", references[0], *cells, references[1]])
    header = ["accuracy %; R² % of friedman1", "ε", "majority"]
    header += [", ".join(pair) for pair in product(("linear", "MLP"), ("DP-KFC", "DP-SGD"))]
    return markdown([*header, "linear, not private"], rows)


if __name__ == "__main__":
    raise SystemExit(figures(figures_parser(__doc__, PATH).parse_args(), measure, table))
