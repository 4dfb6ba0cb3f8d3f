"""The variations of the DP-NGD paper on a small CNN: Tables 4 and 6, Figures 2, 3 and 4.

    python -m dpkfc_papers.studies.ngd_ablation --data-dir DIR  # resumable
    make results                                        # the tables and pictures

Private images come from Fashion-MNIST, public images from MNIST. A run takes 96 steps of 256 images
at ε = 2. Every method has a small grid of learning rates and clipping norms, judged on 5,000 images
cut from the training set; that search is not in ε. A variation changes one setting of DP-NGD's best
point and nothing else. The paper's models and sets are others, so no accuracy here is compared with
a printed one: only the order of the variations is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dpkfc_papers.store import Store
from dpkfc_papers.studies import grids
from dpkfc_papers.studies.harness import run_script

PATH = grids.RESULTS / "ngd.json"
GRID = grids.GRIDS["ngd"]
STEPS, PUBLIC = GRID.common["steps"], 500
SEEDS, MORE_SEEDS = GRID.seeds, (0, 1, 2, 3, 4)
Settings = Mapping[str, Any]
ORDERS = ("whitened", "before", "after")
BASELINES = ("dp-sgd", "pretrained", "adadps")


def _public(count: int) -> dict[str, Any]:
    return {"public_data": f"@mnist-cnn:{count}"}


# Variations of a method's best point by the name of their group; the value of the paper's default,
# whose runs are the point's own, is not among them.
EVERY = {value: {"every": value} for value in (1, 4, 16, 32)}
POWERS = {value: {"ngd_power": float(value)} for value in (2, 3, 5, 15)}
WARM = {value: {"ngd_warm": value} for value in (0.05, 0.15, 0.2, 0.25)}
IMAGES = {count: _public(count) for count in (50, 200, 1000, 5000)}
LENGTHS = {steps: {"steps": steps, "evaluate_every": steps} for steps in (24, 48, 192)}
FIXED = {"lambda_base": 0.0025}
NO_FLOOR = {"lambda_safe": 1e-30, "lambda_base": 1e-30, "evaluate_every": 4}
PRIVATE = {"public_data": "", "source": "private-oracle", "probe_size": PUBLIC}
# Of the floor, also the course through training is kept.
COURSE = {"evaluate_every": 12}
UNTIL_FAILURE = "dpkfc_papers.studies.ngd_ablation:measure_until_failure"


def best_point(store: Any, method: str) -> Settings | None:
    """Return the best point of a grid; None before all of them have been run."""
    return GRID.points(store, method)[0][0] if GRID.is_done(store, method) else None


def test_run(
    store: Any, method: str, seed: int, varied: Settings | None = None, measure: str = ""
) -> Any:
    """Return a run on the test set; None before the grid of its method is complete."""
    point = best_point(store, method)
    if point is None:
        return None
    course = COURSE if method == "whitened" and not varied else {}
    settings = {**point, **course, **(varied or {})}
    kept = {name: value for name, value in settings.items() if value != ""}
    return GRID.run(method, kept, seed, True, measure)


def grid_runs(store: Any, methods: tuple[str, ...]) -> list[Any]:
    """Return the runs of all points of some methods, on the validation split."""
    return [run for method, run in GRID.cells(store, False) if method in methods]


def stages(store: Any) -> Iterator[list[Any]]:
    """Yield lists of runs, the most important first; a list may need the results of those before
    it.
    """
    yield grid_runs(store, ORDERS)
    yield [test_run(store, method, seed) for seed in SEEDS for method in ORDERS]
    yield [test_run(store, "whitened", seed, EVERY[32]) for seed in SEEDS]
    first = [{**FIXED, **COURSE}, IMAGES[50], POWERS[2], WARM[0.25], EVERY[4]]
    for seed in SEEDS:
        yield [test_run(store, "whitened", seed, one) for one in first]
        yield [test_run(store, "whitened", seed, NO_FLOOR, UNTIL_FAILURE)]
        yield [test_run(store, "whitened", seed, PRIVATE)]
    yield grid_runs(store, BASELINES)
    yield [test_run(store, method, seed) for seed in SEEDS for method in BASELINES]
    # Runs that take twice as long and more.
    yield [test_run(store, "whitened", seed, EVERY[1]) for seed in SEEDS]
    yield [test_run(store, "whitened", seed, IMAGES[5000]) for seed in SEEDS]
    for one in LENGTHS.values():
        yield [
            test_run(store, method, seed, one)
            for seed in SEEDS
            for method in ("whitened", "pretrained", "adadps")
        ]
    rest = [EVERY[16], *POWERS.values(), *WARM.values(), *IMAGES.values()]
    for seed in SEEDS:
        yield [test_run(store, "whitened", seed, one) for one in rest if one not in first]
    yield [
        test_run(store, method, seed, IMAGES[count])
        for seed in SEEDS
        for count in (50, 5000)
        for method in ("pretrained", "adadps")
    ]
    yield [test_run(store, method, seed) for seed in MORE_SEEDS for method in ORDERS]


def measure_until_failure(run: Any, place: Any, judge: Any = None) -> dict[str, Any]:
    """Run a cell that may diverge.

    Returns:
        The row of `run_cell`, or where the run fails the message and the last evaluated step. The
        message is about the probe, which is public.
    """
    from dpkfc.app.tuning.runs import run_cell

    evaluated = []

    def watch(number: int, accuracy: float) -> bool:
        evaluated.append(round(accuracy, 4))
        return True

    try:
        row = run_cell(run, place, watch)
    except ValueError as error:
        return {
            "run": run.describe(),
            "hash": run.hash,
            "failed": str(error),
            "accuracies": evaluated,
        }
    return {**row, "accuracies": evaluated}


def values(store: Any, method: str, varied: Settings | None = None) -> list[float]:
    """Return test accuracies in percent, a seed each, of what has been run."""
    found = []
    for seed in MORE_SEEDS:
        run = test_run(store, method, seed, varied)
        row = None if run is None else store.get(run)
        if row is not None:
            found.append(100 * row["accuracy"])
    return found


def main() -> int:
    run = functools.partial(grids.make_runs, PATH, stages)
    return run_script(__doc__, run, lambda: grids.table("ngd", Store(PATH)), "runs/ngd")


if __name__ == "__main__":
    sys.exit(main())
