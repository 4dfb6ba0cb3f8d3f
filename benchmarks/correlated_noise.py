"""The error of correlated noise ÷ the error of independent noise at the same ε, beside theory.

    python benchmarks/correlated_noise.py            # results/correlated_noise.json and the picture
    python benchmarks/correlated_noise.py --steps    # adds what a step costs, by commit
    python benchmarks/correlated_noise.py --smoke    # small; writes nothing

The error is the root mean square of the noise in the sums of the first t steps, over all t. Theory
is what `PrivacyConfig(noise="auto")` minimises; "measured" draws the noise of all steps from a
`NoiseStream` and sums it.

The cost is the processor time of a step of the CNN with 24 bands ÷ one with independent noise, in
turns, late in a run: after 600 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import RESULTS, markdown, read_json, stamp, write_json
from dpkfc import PrivacyConfig, Session
from dpkfc.app.models import build_seeded, mnist_cnn
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.privacy.correlated_noise import BandedNoise
from dpkfc.privacy.rng import NoiseStream
from dpkfc_papers.studies.harness import finish, sheet

OUTPUT = RESULTS / "correlated_noise.json"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "correlated-noise.png"
DELTA = 1e-5
EPSILONS = (0.5, 1.0, 3.0, 8.0)
BANDS = 24  # of the steps that are timed
NUMBERS = 1000  # drawn in each step
MOST_STEPS = 500  # of a task whose noise is drawn
# Task: examples, batch, epochs.
TASKS = {
    "CIFAR-10, batch 512, 5 epochs": (50_000, 512, 5),
    "IMDB, batch 500, 10 epochs": (25_000, 500, 10),
    "MNIST, batch 256, 5 epochs": (60_000, 256, 5),
    "CIFAR-10, batch 4,096, 70 epochs": (50_000, 4096, 70),
    "full batch of 10,001, 60 steps": (10_001, 10_001, 60),
}


def measure_error(bands: int, steps: int, numbers: int = NUMBERS) -> float:
    """Return the error of noise that is drawn, in units of `stddev`."""
    noise, stream = BandedNoise(bands), NoiseStream.secure()
    total, squares = np.zeros(numbers), 0.0
    for step in range(steps):
        draw = stream.correlated_draw(numbers, step, "float32", step + 1, noise)
        total += np.concatenate(list(draw))
        squares += float(np.mean(total**2))
    return math.sqrt(squares / steps)


def compare(size: int, batch: int, epochs: float, epsilon: float) -> dict[str, Any]:
    """Return noise, bands and errors of both kinds of noise at one ε, for a sum clipped to 1."""
    settings: dict[str, Any] = {"expected_batch_size": batch, "epochs": epochs}
    found: dict[str, Any] = {"epsilon": epsilon}
    for noise in ("gaussian", "auto"):
        plan = PrivacyConfig(**settings, noise=noise).calibrate(epsilon, DELTA, size)
        scale = plan.noise_multiplier / batch
        found[noise] = {
            "bands": plan.bands,
            "noise_multiplier": plan.noise_multiplier,
            "theory": scale * BandedNoise(plan.bands).error(plan.steps),
        }
        if plan.steps <= MOST_STEPS:
            found[noise]["measured"] = scale * measure_error(plan.bands, plan.steps)
    return found


def measure_steps(earlier: int = 600, timed: int = 40) -> dict[str, Any]:
    """Return the medians of the processor time of a step with independent and correlated noise.

    Args:
        earlier: steps whose noise is drawn, without steps, before the first one is timed.
        timed: steps of each kind.
    """
    torch.set_num_threads(1)
    images, labels = torch.randn(60_000, 1, 28, 28), torch.randint(10, (60_000,))
    loops = {}
    for bands in (1, BANDS):
        plan = PrivacyConfig(
            expected_batch_size=256, epochs=5, noise="correlated", bands=bands
        ).with_noise(1.0, DELTA, len(images))
        model = build_seeded(mnist_cnn, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = Session(plan, model, optimizer, (images, labels))
        numbers = sum(p.numel() for p in model.parameters())
        for release in range(1 - earlier, 1):
            session._pipeline.noise.correlated_draw(
                numbers, 0, "float32", release, BandedNoise(bands)
            )
        loops[bands] = session, session.batches()

    def step(bands: int) -> float:
        session, batches = loops[bands]
        batch = next(batches)
        start = time.process_time()
        session.step(batch, cross_entropy)
        return time.process_time() - start

    for bands in loops:
        step(bands)
    seconds = [[step(bands) for bands in loops] for _ in range(timed)]
    medians = [1e3 * statistics.median(of) for of in zip(*seconds, strict=True)]
    return {
        "bands": BANDS,
        "independent_ms": medians[0],
        "correlated_ms": medians[1],
        "ratio": medians[1] / medians[0],
        "after_steps": earlier,
        **stamp(1),
    }


def table(results: Mapping[str, Any]) -> str:
    """Return error ÷ error of independent noise by theory, with the bands, a row for each task."""
    tasks = results["tasks"]
    epsilons = [row["epsilon"] for row in next(iter(tasks.values()))]
    rows = []
    for task, found in tasks.items():
        cells = [
            f"{row['auto']['theory'] / row['gaussian']['theory']:.2f} ({row['auto']['bands']})"
            for row in found
        ]
        rows.append([task, *cells])
    return markdown(["error ÷ independent (bands)", *[f"ε = {e:g}" for e in epsilons]], rows)


def steps_table(results: Mapping[str, Any]) -> str:
    """Return what a step costs with both kinds of noise, a row for each commit."""
    rows = [
        [
            row["hardware"]["commit"].rstrip("+"),
            f"{row['independent_ms']:.0f}",
            f"{row['correlated_ms']:.0f}",
            f"{row['ratio']:.2f}×",
        ]
        for row in results.get("steps", ())
    ]
    return markdown(["commit", "independent, ms", f"{BANDS} bands, ms", "ratio"], rows)


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw the error over ε: lines are theory, points are measured."""
    tasks = {task: found for task, found in results["tasks"].items() if "full" not in task}
    figure, panels = sheet(2, 2, height=5)
    looks = (("gaussian", "C0", "independent"), ("auto", "C1", "correlated, bands by search"))
    for panel, (task, found) in zip(panels.flat, tasks.items(), strict=True):
        epsilons = [row["epsilon"] for row in found]
        for noise, colour, label in looks:
            theory = [row[noise]["theory"] for row in found]
            panel.plot(epsilons, theory, color=colour, label=f"{label}, theory")
            drawn = [row[noise].get("measured", math.nan) for row in found]
            panel.plot(epsilons, drawn, "o", color=colour, label=f"{label}, measured")
        panel.set(xscale="log", yscale="log", title=task.rpartition(",")[0], xlabel="ε")
        panel.set_ylabel("error of sums ÷ C")
        panel.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
        panel.minorticks_off()
        panel.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        panel.yaxis.set_major_formatter("{x:g}")
    finish(figure, path, 2)


def main() -> None:
    """Measure, and write results and picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="one task, one ε; write nothing")
    parser.add_argument("--steps", action="store_true", help="only what a step costs")
    arguments = parser.parse_args()
    results: dict[str, Any] = read_json(OUTPUT)
    if arguments.steps:
        cost = measure_steps(*((30, 3) if arguments.smoke else ()))
        print(json.dumps(cost, indent=2))
        if not arguments.smoke:
            results.setdefault("steps", []).append(cost)
            write_json(OUTPUT, results)
        return
    tasks = dict(list(TASKS.items())[:1]) if arguments.smoke else TASKS
    epsilons = (3.0,) if arguments.smoke else EPSILONS
    measured = {
        task: [compare(*setting, epsilon) for epsilon in epsilons]
        for task, setting in tasks.items()
    }
    results |= stamp(1) | {"tasks": measured}
    if not arguments.smoke:
        write_json(OUTPUT, results)
        plot(results, PICTURE)
    print(table(results))


if __name__ == "__main__":
    main()
