"""What low-rank sides, small averaged probes and kept metrics cost in accuracy: DP-KFC on MNIST,
everything else alike.

    python -m dpkfc_papers.studies.rank_accuracy --data-dir DIR  # resumable
    python -m dpkfc_papers.studies.rank_accuracy --smoke
    python -m dpkfc_papers.studies.rank_accuracy --table  # the table

Accuracy is that of a validation split of 5,000 training images, at ε = 1 with the settings of the
recipe and two epochs; nothing is chosen on the test set. Seeds have their own initial weights, and
every row has the same ones. Noise is secure, so that the standard error of a difference is about √2
times that of a mean.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from dpkfc_papers.studies import harness

RESULTS = harness.RESULTS / "rank_accuracy.json"
ROWS: dict[str, dict[str, Any]] = {
    "all eigenpairs": {"max_rank": 0},
    "at most 64": {"max_rank": 64},
    "at most 32 (default)": {"max_rank": 32},
    "at most 16": {"max_rank": 16},
    "95 % of the trace": {"max_rank": 0, "tail_mass": 0.05},
    "at most 64, 32 probe examples": {"max_rank": 64, "probe_size": 32},
    "at most 64, 32 probe examples averaged": {
        "max_rank": 64,
        "probe_size": 32,
        "factor_decay": 0.875,
    },
    "at most 64, 256 probe examples, then 32 averaged": {
        "max_rank": 64,
        "later_probe_size": 32,
        "factor_decay": 0.875,
    },
    "at most 64, metric kept below a drift of 0.2": {"max_rank": 64, "factor_drift": 0.2},
    "inputs alone": {"method": "dp-kfc-a"},
    "inputs alone, 64 probe examples": {"method": "dp-kfc-a", "probe_size": 64},
    "inputs alone, 32 probe examples": {"method": "dp-kfc-a", "probe_size": 32},
    "inputs alone, 1024 probe examples": {"method": "dp-kfc-a", "probe_size": 1024},
    "no preconditioner": {"method": "dp-adam"},
}
COMMON = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "epochs": 2.0,
    "expected_batch_size": 256,
    "validation_size": 5000,
}
SMOKE = {
    "epsilon": 3.0,
    "steps": 6,
    "expected_batch_size": 64,
    "validation_size": 200,
    "probe_size": 32,
}


def runs(smoke: bool, seeds: int) -> list[tuple[str, Any]]:
    from dpkfc.app.tuning.runs import Run

    recipe, common = ("digits", SMOKE) if smoke else ("mnist-cnn", COMMON)
    found = []
    for seed in range(seeds):
        for name, own in ROWS.items():
            settings = {**common, **{key: value for key, value in own.items() if key != "method"}}
            method = own.get("method", "dp-kfc")
            found.append(
                (name, Run.of(recipe, method, settings, seed=seed, evaluate_on="validation"))
            )
    return found


def table(rows: list[tuple[str, Any]], store: Any) -> str:
    from dpkfc_papers.studies.harness import markdown

    lines = []
    for name in ROWS:
        found = [row for of, run in rows if of == name and (row := store.get(run)) is not None]
        if found:
            values = [100 * row["accuracy"] for row in found]
            error = (
                f" ± {statistics.stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
            )
            lines.append([name, f"{statistics.mean(values):.2f}{error}", str(len(values))])
    return markdown(["DP-KFC with", "validation accuracy, % (± standard error)", "seeds"], lines)


def main() -> int:
    from dpkfc_papers.store import Store
    from dpkfc_papers.studies.harness import cells_parser, run_cells

    parser = cells_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps on the digits, results below --out"
    )
    arguments = parser.parse_args()
    out = arguments.out or Path("runs/ranks")
    path = arguments.results or (out / "smoke.json" if arguments.smoke else RESULTS)
    rows = runs(arguments.smoke, arguments.seeds)
    if not arguments.table and (code := run_cells([lambda _: rows], path, out, arguments)):
        return code
    print(table(rows, Store(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
