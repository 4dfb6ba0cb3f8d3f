"""Private baselines on MNIST and Fashion-MNIST, each at its own best rate.

    python benchmarks/baselines.py --data-dir DIR    # resumable, about two hours of one core
    make results                                     # the table of docs/results/methods.md

The CNN of the DP-KFC paper takes three epochs of 512 images at ε = 1. Rates double from the first
one on 5,000 images cut from the training set, and the grid grows until its best rate lies inside.
Then five seeds are measured on the test set. Public images are 500 of the other set.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common import RESULTS, interval, machine, markdown, read_json

PATH = RESULTS / "baselines.json"
PUBLIC = {"fashion-mnist-cnn": "@mnist-cnn:500", "mnist-cnn": "@fashion-mnist-cnn:500"}
TITLES = {"fashion-mnist-cnn": "Fashion-MNIST", "mnist-cnn": "MNIST"}
COMMON = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "expected_batch_size": 512,
    "epochs": 3.0,
    "max_grad_norm": 1.0,
}
TUNED_WITH, SEEDS, LONGEST = 100, (0, 1, 2, 3, 4), 8
PUBLIC_SOURCE = {"gep_rank": 100}
# Label to method, settings beside the common ones, and the first rate.
METHODS: Mapping[str, tuple[str, Mapping[str, Any], float]] = {
    "DP-SGD": ("dp-sgd", {}, 0.06),
    "automatic clipping": ("dp-sgd", {"clipping": "automatic"}, 0.06),
    "normalised": ("dp-sgd-normalised", {}, 0.06),
    "per-layer clipping": ("dp-sgd", {"clipping": "per_layer"}, 0.06),
    "DOPPLER": ("doppler", {}, 0.2),
    "DP²": ("dp2", {"dp2_phase": 44}, 1.0),
    "GEP": ("gep", PUBLIC_SOURCE, 0.06),
    "B-GEP": ("b-gep", PUBLIC_SOURCE, 0.03),
    "De et al., four views, batches of 2,048": (
        "de-et-al",
        {"expected_batch_size": 2048, "weight_average": 0.95, "augment": "random-crop"},
        1.0,
    ),
}


def make_run(recipe: str, label: str, rate: float, seed: int, evaluate_on: str) -> Any:
    """Return a run of a method at a rate."""
    from dpkfc.app.tuning.runs import Run

    method, more, _ = METHODS[label]
    settings = {**COMMON, **more, "lr": rate}
    if method.endswith("gep"):
        settings["public_data"] = PUBLIC[recipe]
    if evaluate_on == "validation":
        settings["validation_size"] = 5000
    return Run.of(recipe, method, settings, seed=seed, evaluate_on=evaluate_on)


def search(store: Any, recipe: str, label: str) -> tuple[Any, float | None]:
    """Return the next run of the search, or None and the best rate."""
    first = METHODS[label][2]
    rates = [first, 2 * first]
    while True:
        scores = {}
        for rate in rates:
            run = make_run(recipe, label, rate, TUNED_WITH, "validation")
            row = store.get(run)
            if row is None:
                return run, None
            scores[rate] = row["accuracy"]
        best = max(rates, key=lambda rate: scores[rate])
        if best == rates[0] and len(rates) < LONGEST:
            rates = [best / 2, *rates]
        elif best == rates[-1] and len(rates) < LONGEST:
            rates = [*rates, 2 * best]
        else:
            return None, best


def missing(store: Any) -> Iterator[Any]:
    """Yield what has not been run: of a data set searches first, then seed after seed."""
    for recipe in PUBLIC:
        for label in METHODS:
            while (run := search(store, recipe, label)[0]) is not None:
                yield run
        for seed in SEEDS:
            for label in METHODS:
                rate = search(store, recipe, label)[1]
                run = make_run(recipe, label, rate or 0.0, seed, "test")
                if store.get(run) is None:
                    yield run


def execute(folder: Path, data_dir: str) -> None:
    """Make the runs that are missing; each is on the disk before the next starts."""
    import torch

    from dpkfc.app.tuning.runs import Store

    torch.set_num_threads(1)
    with Store(PATH) as store:
        for run in missing(store):
            started = time.process_time()
            row = run.measuring()(run, folder / "runs", data_dir=data_dir, public=folder / "public")
            store.put(run, {**row, "cpu_seconds": round(time.process_time() - started, 1)})
            print(run.recipe, run.method, dict(run.settings)["lr"], row["accuracy"], flush=True)


def table() -> str:
    """Return the table: accuracy on the test set by method and data set, in percent."""
    from dpkfc.app.tuning.runs import Store

    if read_json(PATH) is None:
        return "*Not measured yet.*"
    rows = []
    with Store(PATH) as store:
        for label in METHODS:
            cells = [label]
            for recipe in PUBLIC:
                _, rate = search(store, recipe, label)
                runs = [make_run(recipe, label, rate or 0.0, seed, "test") for seed in SEEDS]
                found = [store.get(run) for run in runs]
                scores = [100 * row["accuracy"] for row in found if row is not None]
                cells += [interval(scores), f"{rate:g}" if rate and scores else "–"]
            rows.append(cells)
    head = ["method"]
    for title in TITLES.values():
        head += [f"{title}, test %", "rate"]
    return f"{markdown(head, rows)}\n\n{machine(read_json(PATH))}"


def main() -> int:
    """Make the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="", help="folder with the data sets")
    parser.add_argument("--out", type=Path, default=Path("runs/baselines"), help="for ledgers")
    arguments = parser.parse_args()
    execute(arguments.out, arguments.data_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
