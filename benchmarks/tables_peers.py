"""Fit models of other libraries on seven public tables, on the rows of `dpkfc train`.

    python benchmarks/tables_peers.py --data-dir DIR               # resumable; hours
    python benchmarks/tables_peers.py --tables compas --seeds 1

Each library has an environment of its own, made below --environments with pinned versions. A table
of the results is in docs/results/tables.md, written by `benchmarks/tables.py`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, read_json
from tables_ours import DELTA, FILES, HERE, add_row, tables_parser

OUTPUT = RESULTS / "tables_peers.json"
EPSILONS = (1.0, 0.5, 3.0)
SEEDS = 5
ENVIRONMENTS = {
    "interpret": ("interpret-core==0.7.8", "scikit-learn==1.9.1", "numpy==2.4.6"),
    # It does not import with scikit-learn 1.9.
    "diffprivlib": ("diffprivlib==0.6.6", "scikit-learn==1.5.2", "numpy==2.4.6"),
}


@dataclass(frozen=True)
class Peer:
    """A model of another library.

    Attributes:
        title: for tables.
        environment: in which it runs.
        private: whether it takes ε.
        numbers: whether it predicts numbers.
    """

    title: str
    environment: str
    private: bool
    numbers: bool = True


PEERS = {
    "dp-ebm": Peer("DP-EBM, interpret 0.7.8", "interpret", private=True),
    "diffprivlib-linear": Peer("diffprivlib 0.6.6, linear", "diffprivlib", private=True),
    "diffprivlib-bayes": Peer("diffprivlib 0.6.6, GaussianNB", "diffprivlib", True, False),
    "diffprivlib-forest": Peer("diffprivlib 0.6.6, forest", "diffprivlib", True, False),
    "boosting": Peer("HistGradientBoosting, no privacy", "interpret", private=False),
    "ebm": Peer("EBM (1 bag), no privacy", "interpret", private=False),
    "linear": Peer("linear, no privacy", "interpret", private=False),
}


# --------------------------------------------------------------------------------------------------
# Rows.


def write_rows(name: str, data_dir: Path, seed: int, out: Path) -> Mapping[str, Any]:
    """Write a table as numbers, codes and labels, split as `dpkfc train --split-seed` does.

    Returns:
        What was written, by name.
    """
    import torch

    from dpkfc.app.owndata.files import encode_table
    from dpkfc.app.owndata.records import split_records
    from dpkfc.app.owndata.schema import read_schema
    from dpkfc.app.owndata.tables import read_table

    path = data_dir / "tables" / FILES[name]
    schema = read_schema(HERE / "schemas" / f"{name}.toml", "")
    records = encode_table(path, schema)
    places = torch.arange(len(records))
    split = split_records(replace(records, inputs=places, file=None), 0, seed, name)
    table = read_table(path, [*schema.features, schema.target], schema)
    numbers, bounds, codes, sizes = [], [], [], []
    for column_name, column in schema.features.items():
        meanings = [column.meaning(text) for text in table.columns[column_name].texts]
        if column.limits:
            (limits,) = column.limits
            values = [np.nan if meaning is None else meaning[0] for meaning in meanings]
            numbers.append(values)
            bounds.append(limits)
        else:
            known = {column.meaning(text): place for place, text in enumerate(column.categories)}
            # One code for other categories, one for a missing value.
            other = len(known)
            codes.append([other + 1 if m is None else known.get(m, other) for m in meanings])
            sizes.append(other + 2)
    labels = records.labels.double().numpy()
    if schema.target_bounds:
        labels = _numbers(table.columns[schema.target].texts, schema)
    rows = {
        "bounds": np.array(bounds, float).reshape(-1, 2),
        "sizes": np.array(sizes, int),
        "classes": len(schema.classes),
        "target_bounds": np.array(schema.target_bounds or (0, 0), float),
    }
    all_numbers = np.array(numbers, float).reshape(len(bounds), len(records)).T
    all_codes = np.array(codes, int).reshape(len(sizes), len(records)).T
    for part, chosen in (("train", split.train[0]), ("test", split.test[0])):
        places = chosen.numpy()
        is_known = np.isfinite(labels[places])
        if schema.classes:
            is_known &= labels[places] >= 0
        places = places[is_known]
        rows[f"{part}_numbers"] = all_numbers[places]
        rows[f"{part}_codes"] = all_codes[places]
        rows[f"{part}_labels"] = labels[places].astype(int) if rows["classes"] else labels[places]
    np.savez(out, **rows)
    return rows


def _numbers(texts: Sequence[str | None], schema: Any) -> np.ndarray:
    from dpkfc.app.owndata.columns import Column

    column = Column(kind="number", bounds=schema.target_bounds)
    meanings = [column.meaning(text) for text in texts]
    return np.array([np.nan if meaning is None else meaning[0] for meaning in meanings])


# --------------------------------------------------------------------------------------------------
# Fits.


def make_environment(folder: Path, name: str) -> Path:
    """Return the interpreter of an environment, which is made where it is missing."""
    place = folder / name
    python = place / "bin" / "python"
    if not (place / "made").is_file():
        venv.create(place, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", *ENVIRONMENTS[name]]
        subprocess.run(command, check=True)
        (place / "made").write_text("\n".join(ENVIRONMENTS[name]), "utf-8")
    return python


def fit(
    python: Path, peer: str, rows: Path, data: Mapping[str, Any], epsilon: float, seed: int
) -> dict[str, Any]:
    """Fit a peer in its environment and return its scores, or the last line of its error."""
    from dpkfc.app.class_scores import score_classes
    from dpkfc.app.number_scores import score_numbers

    out = rows.with_name("out.npz")
    words = [str(epsilon), str(DELTA), str(seed), str(out)]
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = {**os.environ, **threads}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, HERE / "table_peer.py", rows, peer, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": lines[-1][:200]}
    found = np.load(out)
    if data["classes"]:
        scores = score_classes(found["outputs"], data["test_labels"])
    else:
        least, most = data["target_bounds"]
        targets = data["test_labels"].clip(least, most)
        scores = score_numbers(found["outputs"].clip(least, most), targets)
    return {
        "scores": {score.name: score.value for score in scores.scores},
        "guess": {score.name: score.guess for score in scores.scores},
        "train_rows": len(data["train_labels"]),
        "test_rows": scores.examples,
        "seconds": round(float(found["seconds"]), 3),
        "versions": found["versions"].tolist(),
    }


def main() -> int:
    parser = tables_parser(__doc__, PEERS, SEEDS)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--environments", type=Path, default=cache / "dpkfc-peers")
    arguments = parser.parse_args()
    results = read_json(OUTPUT) or {"delta": DELTA, "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.npz"
        for seed in range(arguments.seeds):
            for name in arguments.tables:
                _fit_all(results, arguments, name, seed, rows)
    return 0


def _fit_all(
    results: dict[str, Any], arguments: argparse.Namespace, name: str, seed: int, rows: Path
) -> None:
    """Fit what is missing of a table and a seed; results are written after each fit."""
    missing = {}
    for epsilon in EPSILONS:
        for peer in arguments.models:
            at = f"{epsilon:g}" if PEERS[peer].private else "none"
            key = f"{name}/{peer}/{at}/{seed}"
            if key not in results["rows"]:
                missing[key] = peer, epsilon
    if not missing:
        return
    data = write_rows(name, arguments.data_dir, seed, rows)
    for key, (peer, epsilon) in missing.items():
        if not (data["classes"] or PEERS[peer].numbers):
            continue
        python = make_environment(arguments.environments, PEERS[peer].environment)
        add_row(results, key, fit(python, peer, rows, data, epsilon, seed), OUTPUT)


if __name__ == "__main__":
    sys.exit(main())
