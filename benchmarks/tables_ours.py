"""Train the default of `dpkfc train`, and what it is compared with, on seven public tables.

    python benchmarks/tables_ours.py --data-dir DIR                # resumable; about an hour
    python benchmarks/tables_ours.py --tables compas --seeds 1
    python benchmarks/tables_ours.py --tables adult --models additive-schema --seeds 1 \\
        --validation 5000 --try damping=0.5 damping=1.5 damping=5

The splits are as in `dpkfc train --split-seed`. Settings are chosen on a validation part of Adult's
training rows: `--validation` scores that part, and no test row. docs/results/tables.md has the
tables.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, make_parser, read_json, stamp, write_json

HERE = Path(__file__).resolve().parent
OUTPUT = RESULTS / "tables_ours.json"
CHOICE = RESULTS / "tables_choice.json"
DELTA = 1e-5
# Of a table: the key of each row, and what makes it.
Jobs = Callable[[str], Iterable[tuple[str, Callable[[Path, Any], dict[str, Any]]]]]
FILES = {
    "adult": "adult.data.gz",
    "credit": "UCI_Credit_Card.csv.gz",
    "cardio": "cardio_train.csv.gz",
    "telco": "WA_Fn-UseC_-Telco-Customer-Churn.csv.gz",
    "compas": "compas_9_columns.csv.gz",
    "bean": "Dry_Bean_Dataset.csv.gz",
    "diamonds": "diamonds.csv.gz",
}
FULL_BATCH = {
    "steps": 40,
    "expected_batch_size": 0,
    "momentum": 0.0,
    "weight_average": 0.87,
    "average_from_start": True,
    "max_physical_batch_size": 4096,
}
# Rows at which the rates below were searched: a part of Adult's training rows. On 5,000 of them a
# rate of 8 was best without curvature, so rates go with the root of the rows.
ROWS = 26_000
# Title and settings of each model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "additive": ("dpkfc, additive model", {}),
    "additive-schema": (
        "the same, K-FAC of rows drawn from the schema",
        {
            **FULL_BATCH,
            "method": "dp-kfc-natural",
            "scale": "raw",
            "max_grad_norm": 7.0,
            "damping": 1.5,
            "lr": 0.2,
        },
    ),
    "additive-none": (
        "the same, no curvature",
        {
            **FULL_BATCH,
            "method": "dp-sgd",
            "steps": 150,
            "weight_average": 0.957,
            "max_grad_norm": 1.4,
            "lr": 16.0,
        },
    ),
    "linear": ("dpkfc, straight lines", {"knots": 0}),
}
# Models and ε; the comparison of curvatures is at ε = 1.
EPSILONS = {"additive": (1.0, 0.5, 3.0)}


def unpack(data_dir: Path, name: str, folder: Path) -> Path:
    """Write a table as a CSV file, and return it."""
    path = folder / f"{name}.csv"
    if not path.exists():
        with gzip.open(data_dir / "tables" / FILES[name]) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file)
    return path


def train(
    path: Path,
    records: Any,
    *,
    name: str,
    model: str,
    epsilon: float,
    seed: int,
    validation: int = 0,
    tried: str = "",
) -> dict[str, Any]:
    """Train one model on one split, and return its scores on the test rows.

    Args:
        path: of the table.
        records: of the table.
        name: of the table.
        model: of `MODELS`.
        epsilon: of the run.
        seed: of the split.
        validation: training rows that are scored instead of the test rows, if not 0.
        tried: NAME=VALUE, a setting in place of the model's.
    """
    from dpkfc import Session
    from dpkfc.app.assembly import make_optimizer
    from dpkfc.app.owndata.records import split_records
    from dpkfc.app.prepare import prepare
    from dpkfc.app.recipes.catalogue import run_config

    title, settings = MODELS[model]
    if tried:
        setting, value = tried.split("=")
        settings = {**settings, setting: float(value)}
    begun = time.process_time()
    data = split_records(records, validation, seed, path.name)
    if "lr" in settings:
        rate = settings["lr"] * min(1.0, (len(data.train[1]) / ROWS) ** 0.5)
        settings = {**settings, "lr": rate / 2 if name == "diamonds" else rate}
    config = run_config(
        {
            **settings,
            "data": str(path),
            "schema": str(HERE / "schemas" / f"{name}.toml"),
            "epsilon": epsilon,
            "delta": DELTA,
            "split_seed": seed,
            "seed": seed,
        }
    )
    prepared = prepare(config, data)
    head, examples = prepared.training_parts()
    optimizer = make_optimizer(prepared.config, head)
    with Session(prepared.plan, head, optimizer, examples) as session:
        for batch in session.batches():
            session.step(batch, prepared.recipe.task.loss)
        seconds = time.process_time() - begun
        with session.averaged_weights():
            scores = prepared.recipe.task.scores(prepared.model, data.validation or data.test)
    return {
        "title": title,
        "scores": {score.name: score.value for score in scores.scores},
        "guess": {score.name: score.guess for score in scores.scores},
        "train_rows": len(data.train[1]),
        "test_rows": scores.examples,
        "seconds": round(seconds, 3),
        "spent": session.epsilon,
        "max_grad_norm": prepared.plan.max_grad_norm,
    }


def tables_parser(
    description: str | None, models: Iterable[str], seeds: int, tables: Iterable[str] = FILES
) -> argparse.ArgumentParser:
    """Return the options of a benchmark on tables."""
    parser = make_parser(description)
    data_dir = os.environ.get("DPKFC_DATA", "")
    parser.add_argument("--data-dir", type=Path, default=data_dir or None, required=not data_dir)
    parser.add_argument("--tables", nargs="+", choices=FILES, default=list(tables))
    parser.add_argument("--models", nargs="+", choices=list(models), default=list(models))
    parser.add_argument("--seeds", type=int, default=seeds)
    return parser


def add_row(results: dict[str, Any], key: str, row: dict[str, Any], path: Path) -> None:
    """Add a row with its machine and day, and write all of them."""
    results["rows"][key] = row | stamp(1)
    write_json(path, results)
    print(key, row.get("error") or row["scores"], row.get("seconds", ""), flush=True)


def train_missing(arguments: argparse.Namespace, output: Path, jobs: Jobs) -> int:
    """Train what a file of results lacks.

    Args:
        arguments: of `tables_parser`.
        output: the file.
        jobs: yields the key of each row of a table, and what makes it of its path and records.
    """
    from dpkfc.app.owndata.files import encode_table
    from dpkfc.app.owndata.schema import read_schema

    results = read_json(output) or {"delta": DELTA, "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.tables:
            path = unpack(arguments.data_dir, name, Path(folder))
            records = encode_table(path, read_schema(HERE / "schemas" / f"{name}.toml"))
            for key, make in jobs(name):
                if key not in results["rows"]:
                    add_row(results, key, make(path, records), output)
    return 0


def main() -> int:
    parser = tables_parser(__doc__, MODELS, 5)
    parser.add_argument("--validation", type=int, default=0, help="training rows to score instead")
    parser.add_argument("--try", dest="tried", nargs="+", default=[""], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    if arguments.tried != [""] and not arguments.validation:
        parser.error("--try chooses a setting: give --validation, so that no test row decides")

    def jobs(name: str) -> Iterator[tuple[str, Callable[[Path, Any], dict[str, Any]]]]:
        for model in arguments.models:
            for epsilon in EPSILONS.get(model, (1.0,)):
                for seed, tried in product(range(arguments.seeds), arguments.tried):
                    key = f"{name}/{model}/{epsilon:g}/{seed}{tried and '/' + tried}"
                    yield (
                        key,
                        partial(
                            train,
                            name=name,
                            model=model,
                            epsilon=epsilon,
                            seed=seed,
                            validation=arguments.validation,
                            tried=tried,
                        ),
                    )

    return train_missing(arguments, CHOICE if arguments.validation else OUTPUT, jobs)


if __name__ == "__main__":
    sys.exit(main())
