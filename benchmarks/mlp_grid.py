"""A finer search for the baselines of the MLP's study: every rate and clip of a grid to its end, then the test set with the best.

    python benchmarks/mlp_grid.py --data-dir DIR     # start or continue; Ctrl-C loses no finished cell
    python benchmarks/mlp_grid.py --table            # the Markdown table of what has been run

Twenty trials in wide ranges find DP-KFC's settings more easily than those of DP-SGD, which are a narrow ridge along lr · C.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "mlp_grid.json"
COMMON = {"delta": 1e-5, "epochs": 5.0, "expected_batch_size": 256, "epsilon": 1.0}
GRIDS: dict[str, list[tuple[float, float]]] = {
    "dp-sgd": [(lr, clip) for lr in (0.03, 0.06, 0.1, 0.2) for clip in (0.3, 1.0, 3.0)],
    "dp-adam": [(0.001, 0.3), (0.001, 1.0), (0.002, 1.0), (0.002, 2.0)],
}
SEEDS = (0, 1, 2)


def run(method: str, lr: float, clip: float, seed: int, test: bool) -> Any:
    from dpkfc.studies.cell import Run

    settings = {**COMMON, "lr": lr, "max_grad_norm": clip, **({} if test else {"validation_size": 5000})}
    return Run.of("mnist-mlp", method, settings, seed=seed, evaluate_on="test" if test else "validation")


def best(store: Any, method: str) -> tuple[tuple[float, float], float] | None:
    """The point of the grid that won on the validation split, once all have been run."""
    rows = {point: store.get(run(method, *point, seed=100, test=False)) for point in GRIDS[method]}
    if None in rows.values():
        return None
    point = max(rows, key=lambda p: rows[p]["accuracy"])
    return point, rows[point]["accuracy"]


def table(store: Any) -> str:
    from common import markdown

    lines = []
    for method, grid in GRIDS.items():
        found = best(store, method)
        if found is None:
            continue
        (lr, clip), validation = found
        tests = [row["accuracy"] for seed in SEEDS if (row := store.get(run(method, lr, clip, seed, True))) is not None]
        spread = f" ± {100 * statistics.stdev(tests):.2f}" if len(tests) > 1 else ""
        test = f"{100 * statistics.mean(tests):.2f}{spread} ({len(tests)})" if tests else "–"
        lines.append([method, str(len(grid)), f"{100 * validation:.2f}", test, f"lr = {lr:g}, max_grad_norm = {clip:g}"])
    return markdown(["method", "points", "best validation %", "test %, ε = 1 (seeds)", "settings"], lines)


def main() -> int:
    from dpkfc.studies.listed import Listed
    from dpkfc.studies.pool import Place, Task, drive, worker_count
    from dpkfc.studies.store import Store

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="", help="folder with the data sets; default: $DPKFC_DATA")
    parser.add_argument("--out", type=Path, default=Path("runs/mlp-grid"), help="ledgers")
    parser.add_argument("--workers", type=int, help="cells at once; default: every core")
    parser.add_argument("--table", action="store_true", help="print what has been run and stop")
    arguments = parser.parse_args()
    if not arguments.table:
        place, workers = Place(arguments.out, arguments.data_dir), worker_count(arguments.workers)
        try:
            with Store(RESULTS) as store:
                for stage in (False, True):
                    tasks = [Task(one, tag=None, label=name) for name, one in _cells(store, stage)]
                    source = Listed(tasks, store)
                    drive(source, place, workers=workers)
                    for name, why in source.failures.items():
                        print(f"{name}: {why}", file=sys.stderr)
        except KeyboardInterrupt:
            print("stopped; the same command continues it", file=sys.stderr)
            return 130
    print(table(Store(RESULTS)))
    return 0


def _cells(store: Any, test: bool) -> list[tuple[str, Any]]:
    if not test:
        return [(method, run(method, *point, seed=100, test=False)) for method, grid in GRIDS.items() for point in grid]
    won = {method: best(store, method) for method in GRIDS}
    return [(method, run(method, *found[0], seed, True)) for method, found in won.items() if found for seed in SEEDS]


if __name__ == "__main__":
    sys.exit(main())
