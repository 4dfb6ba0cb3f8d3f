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

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc_papers.studies.harness import RESULTS, make_parser

PATH = RESULTS / "ngd_ablation.json"
RECIPE, STEPS, PUBLIC = "fashion-mnist-cnn", 96, 500
TUNED_WITH, SEEDS, MORE_SEEDS = 100, (0, 1, 2), (0, 1, 2, 3, 4)
# Rényi accounting tells the ε of every step at no cost; σ is 0.735, where PRV accounting has 0.636.
COMMON = {
    "accountant": "rdp",
    "delta": 1e-5,
    "epsilon": 2.0,
    "expected_batch_size": 256,
    "steps": STEPS,
    "evaluate_every": STEPS,
}
Settings = Mapping[str, Any]


def _public(count: int) -> dict[str, Any]:
    return {"public_data": f"@mnist-cnn:{count}"}


@dataclass(frozen=True)
class Method:
    """A method with the points of its grid.

    Attributes:
        name: as of `dpkfc train --method`.
        label: in the tables.
        settings: of all its runs.
        points: learning rates and clipping norms.
    """

    name: str
    label: str
    settings: Settings
    points: Sequence[tuple[float, float]]


def _grid(first: float, clip: float, *more: tuple[float, float]) -> list[tuple[float, float]]:
    """Return four learning rates at one clipping norm, and more points."""
    return [*((rate, clip) for rate in (first, 2 * first, 4 * first, 8 * first)), *more]


RATES = [(rate, 1.0) for rate in (0.1, 0.2, 0.4, 0.8)]
METHODS = {
    "whitened": Method(
        "dp-ngd",
        "clip in the whitened space (DP-NGD)",
        _public(PUBLIC),
        _grid(0.005, 10.0, (0.02, 5.0), (0.01, 20.0)),
    ),
    "before": Method(
        "dp-ngd",
        "clip before the curvature",
        {**_public(PUBLIC), "ngd_order": "before", "readout": "inverse"},
        _grid(0.0005, 1.0, (0.001 / 3, 3.0), (0.0001, 10.0)),
    ),
    "after": Method(
        "dp-ngd",
        "clip the natural gradient",
        {**_public(PUBLIC), "ngd_order": "after", "readout": "whitened"},
        _grid(0.001, 1000.0, (2 / 300, 300.0), (2 / 3000, 3000.0)),
    ),
    "dp-sgd": Method("dp-sgd", "DP-SGD", {}, RATES),
    "pretrained": Method("dp-sgd", "DP-SGD-PT", {**_public(PUBLIC), "pretrain_epochs": 20}, RATES),
    "adadps": Method("adadps", "AdaDPS", _public(PUBLIC), RATES),
}
ORDERS = ("whitened", "before", "after")
BASELINES = ("dp-sgd", "pretrained", "adadps")

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


def point_run(method: str, point: tuple[float, float]) -> Any:
    """Return the run of a point of a grid, on the validation split."""
    from dpkfc.app.tuning.runs import Run

    one = METHODS[method]
    settings = {
        **COMMON,
        **one.settings,
        "lr": point[0],
        "max_grad_norm": point[1],
        "validation_size": 5000,
    }
    return Run.make(RECIPE, one.name, settings, seed=TUNED_WITH, evaluate_on="validation")


def best_point(store: Any, method: str) -> tuple[float, float] | None:
    """Return the best point of a grid; None before all of them have been run."""
    rows = {point: store.get(point_run(method, point)) for point in METHODS[method].points}
    if not all(rows.values()):
        return None
    return max(rows, key=lambda point: rows[point]["accuracy"])


def test_run(
    store: Any, method: str, seed: int, varied: Settings | None = None, measure: str = ""
) -> Any:
    """Return a run on the test set; None before the grid of its method is complete."""
    from dpkfc.app.tuning.runs import Run

    point = best_point(store, method)
    if point is None:
        return None
    one = METHODS[method]
    course = COURSE if method == "whitened" and not varied else {}
    settings = {
        **COMMON,
        **one.settings,
        "lr": point[0],
        "max_grad_norm": point[1],
        **course,
        **(varied or {}),
    }
    kept = {name: value for name, value in settings.items() if value != ""}
    return Run.make(RECIPE, one.name, kept, seed=seed, measure=measure)


def stages(store: Any) -> Iterator[list[Any]]:
    """Yield lists of runs, the most important first; a list may need the results of those before
    it.
    """
    yield [point_run(method, point) for method in ORDERS for point in METHODS[method].points]
    yield [test_run(store, method, seed) for seed in SEEDS for method in ORDERS]
    yield [test_run(store, "whitened", seed, EVERY[32]) for seed in SEEDS]
    first = [{**FIXED, **COURSE}, IMAGES[50], POWERS[2], WARM[0.25], EVERY[4]]
    for seed in SEEDS:
        yield [test_run(store, "whitened", seed, one) for one in first]
        yield [test_run(store, "whitened", seed, NO_FLOOR, UNTIL_FAILURE)]
        yield [test_run(store, "whitened", seed, PRIVATE)]
    yield [point_run(method, point) for method in BASELINES for point in METHODS[method].points]
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


def execute(folder: Path, data_dir: str) -> None:
    """Make the runs that are missing; each is on the disk before the next starts."""
    import torch

    from dpkfc_papers.public_examples import study_place
    from dpkfc_papers.store import make_missing

    torch.set_num_threads(1)

    def execute_one(run: Any) -> dict[str, Any]:
        started = time.process_time()
        row = run.find_measure()(run, study_place(folder, data_dir))
        return {**row, "cpu_seconds": round(time.process_time() - started, 1)}

    make_missing(PATH, stages, execute_one)


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
    parser = make_parser(__doc__)
    parser.add_argument("--data-dir", default="", help="folder with the data sets")
    parser.add_argument("--out", type=Path, default=Path("runs/ngd"), help="folder of ledgers")
    arguments = parser.parse_args()
    execute(arguments.out, arguments.data_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
