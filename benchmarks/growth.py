"""What a run costs besides its arithmetic, as ratios within one run.

    python benchmarks/growth.py                    # everything; then the table
    python benchmarks/growth.py --only steps

Seconds are of the processor, since other work on the machine adds none; the least of the repeats
counts.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    make_parser,
    markdown,
    processor_seconds,
    read_json,
    stamp,
    write_json,
)
from dpkfc_papers.studies.harness import finish, sheet
from growth_embeddings import embedding_rows, embeddings
from growth_files import file_rows, files, pair, pair_rows
from growth_images import image_rows, image_run_rows, image_runs, images

OUTPUT = RESULTS / "growth.json"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "growth.png"
# q, steps and ε of common settings.
SETTINGS = [
    (0.32, 30, 3.0),
    (0.00427, 1170, 1.0),
    (0.01, 3000, 3.0),
    (0.04, 100, 1.0),
    (0.00205, 30, 3.0),
    (0.01, 10000, 8.0),
]
SIZES = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
BATCH = 1000
SCHEMA = """\
target = "y"
classes = ["no", "yes"]
[columns.age]
kind = "number"
bounds = [18, 90]
[columns.income]
kind = "number"
bounds = [0, 100]
[columns.city]
kind = "category"
categories = ["a", "b", "c"]
"""


def calibrate(repeats: int) -> dict[str, Any]:
    """Seconds of a search for σ, without imports and without dp-accounting's own value."""
    import dp_accounting  # noqa: F401
    import scipy

    from dpkfc.data.sampling import Poisson
    from dpkfc.privacy import accounting, calibration

    assert scipy.fft and scipy.special
    theirs = accounting.epsilon_by_pld
    spent: list[float] = []

    def time_theirs(*arguments: Any) -> float:
        begun = time.process_time()
        found = theirs(*arguments)
        spent.append(time.process_time() - begun)
        return found

    vars(accounting)["epsilon_by_pld"] = time_theirs
    rows = []
    for rate, steps, epsilon in SETTINGS:
        times = []
        for _ in range(repeats):
            accounting._values.clear()
            spent.clear()
            begun = time.process_time()
            noise = calibration.calibrate_noise_multiplier(
                epsilon, 1e-5, Poisson(rate, 1000).event, steps
            )
            beyond = time.process_time() - begun - sum(spent)
            times.append((beyond, sum(spent), len(spent), noise))
        beyond, check, checks, noise = min(times)
        rows.append(
            {
                "rate": rate,
                "steps": steps,
                "epsilon": epsilon,
                "noise_multiplier": noise,
                "seconds": beyond,
                "seconds_of_dp_accounting": check,
                "values_by_dp_accounting": checks,
            }
        )
    return {"rows": rows, "worst_seconds": max(row["seconds"] for row in rows), "goal": 0.6}


# A process that draws batches among so many records, and prints its peak memory in KiB. What the
# system counts of a child has the memory of its parent in it.
DRAWS = """
import sys, numpy
from dpkfc.data.sampling import Poisson
size = int(sys.argv[1])
sampler = Poisson(min(1.0, 1000 / size), size)
for step in range(50):
    sampler.indices(step, numpy.random.default_rng(step))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def steps(repeats: int) -> dict[str, Any]:
    """Milliseconds of a private step of 1,000 records among N, made when they are read."""
    import torch

    from dpkfc import PrivacyConfig, Session

    class Made(torch.utils.data.Dataset[Any]):
        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((20,), (index % 7) / 7.0), torch.tensor(index % 2)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    opened = {}
    for size in SIZES:
        model = torch.nn.Linear(20, 2)
        config = PrivacyConfig(expected_batch_size=BATCH, steps=10_000)
        plan = config.with_noise(2.0, 1e-10, size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = [(torch.zeros(20), torch.tensor(k % 2)) for k in range(4)]
        session = Session(plan, model, optimizer, Made(size), public_records=rows)
        opened[size] = (session, session.batches())
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(5 * repeats + 2):
        for size, (session, batches) in opened.items():
            begun = time.process_time()
            session.step(next(batches), loss)
            seconds[size].append(time.process_time() - begun)
    least = {size: min(found[2:]) for size, found in seconds.items()}
    return {
        "batch_size": BATCH,
        "peak_gib_of_draws": {str(size): peak_of_draws(size) for size in SIZES},
        "milliseconds": {str(size): 1000 * value for size, value in least.items()},
        "ratio": least[10**8] / least[10**5],
        "goal": 1.5,
    }


def peak_of_draws(size: int) -> float:
    """Return the peak GiB of a process that draws batches among so many records."""
    words = [sys.executable, "-c", DRAWS, str(size)]
    return round(int(subprocess.check_output(words)) / 2**20, 3)


def small_table(repeats: int) -> dict[str, Any]:
    """Seconds of `dpkfc train` on a table of 1,000 rows, over the seconds of `import torch`."""
    import numpy as np

    g = np.random.default_rng(0)
    lines = ["age,income,city,y"]
    for _ in range(1000):
        age, income = int(g.integers(18, 90)), float(g.normal(50, 15))
        answer = "yes" if age + income + g.normal(0, 20) > 100 else "no"
        lines.append(f"{age},{min(max(income, 0), 100):.1f},{'abc'[g.integers(3)]},{answer}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "table.csv").write_text("\n".join(lines) + "\n", "utf-8")
        (Path(folder) / "table.toml").write_text(SCHEMA, "utf-8")
        words = "-m dpkfc train --data table.csv --schema table.toml --epsilon 3 --delta 1e-4"
        words += " --steps 30 --batch-size 320 --quiet --out run"
        whole, reference = [], []
        for number in range(repeats):
            whole.append(processor_seconds([*words.split()[:-1], f"run{number}"], folder))
            reference.append(processor_seconds(["-c", "import torch"], folder))
    return {
        "seconds": min(whole),
        "seconds_of_import_torch": min(reference),
        "ratio": min(whole) / min(reference),
        "goal": 2.5,
    }


MEASURED = {
    "calibrate": calibrate,
    "steps": steps,
    "small table": small_table,
    "files": files,
    "pair": pair,
    "images": images,
    "image runs": image_runs,
    "embeddings": embeddings,
}


def single_row(name: str, figure: str, found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return the one row of a measurement, and its goal."""
    return [(name, found[figure], found["goal"])]


# How the rows of the table are read from what was measured, in their order.
ROWS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "small table": partial(single_row, "table of 1,000 rows, 30 steps ÷ `import torch`", "ratio"),
    "calibrate": partial(
        single_row,
        "search for σ without dp-accounting's value, worst of six settings, s",
        "worst_seconds",
    ),
    "steps": partial(single_row, "step among 10⁸ records ÷ among 10⁵", "ratio"),
    "files": file_rows,
    "pair": pair_rows,
    "images": image_rows,
    "image runs": image_run_rows,
    "embeddings": embedding_rows,
}


def table(results: dict[str, Any]) -> str:
    """Return figures against goals, and the steps by the number of records."""
    rows = [row for name, read in ROWS.items() if name in results for row in read(results[name])]
    cells = [
        [name, f"{value:.2f}" + (f" (≤ {goal:g} {'✓' if value <= goal else '✗'})" if goal else "")]
        for name, value, goal in rows
    ]
    text = markdown(["ratio or figure", "found"], cells)
    if found := results.get("steps"):
        names = [f"{int(size):.0e}" for size in found["milliseconds"]]
        values = [f"{value:.1f}" for value in found["milliseconds"].values()]
        text += "\n\n" + markdown(["records", *names], [["ms a step of 1,000", *values]])
    return text


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw seconds and peak memory against records, both logarithmic."""
    found, batches = results["files"], results["steps"]
    lines = {
        kind: [(row["records"], row["processor_seconds"], row["peak_gib"]) for row in found[kind]]
        for kind in ("table", "texts")
    }
    lines["sampler"] = [
        (int(size), value / 1000, batches["peak_gib_of_draws"][size])
        for size, value in batches["milliseconds"].items()
    ]
    labels = {"table": "table", "texts": "texts", "sampler": "a step of 1,000"}
    figure, panels = sheet(1, 2, height=3.4)
    for name, points in lines.items():
        records, *columns = zip(*(point for point in points if point[0] <= 10**8), strict=True)
        for panel, values in zip(panels.flat, columns, strict=True):
            panel.plot(records, values, marker="o", label=labels[name])
    for panel, title in zip(panels.flat, ("processor seconds", "peak memory, GiB"), strict=True):
        panel.set(xscale="log", title=title, xlabel="records")
        panel.set_xticks([10**n for n in range(3, 9)])
        panel.minorticks_off()
    panels.flat[0].set_yscale("log")
    panels.flat[1].set_ylim(bottom=0)
    finish(figure, path, 3)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(MEASURED), default=list(MEASURED))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    results = read_json(arguments.output) or {}
    for name in arguments.only:
        before = stamp(1)
        results |= before | {name: before | MEASURED[name](arguments.repeats)}
        write_json(arguments.output, results)
    if {"files", "steps"} <= results.keys() and arguments.output == OUTPUT:
        plot(results, PICTURE)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
