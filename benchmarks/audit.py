"""Audit linear heads in one run at four ε, and with a fifth of the noise missing: audit.json.

Needs $DPKFC_DATA, and about an hour of one thread. --scores DIR keeps the scores of the canaries,
on which `audit_peers.py` runs other auditors. Times are of the processor. A row that is there is
kept, unless --again is given.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dpkfc.release_pipeline
from common import RESULTS, hardware, now, read_json, write_json
from dpkfc.app.assembly import Prepared, make_optimizer
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.audit import one_run
from dpkfc.config import Plan
from dpkfc.session import Session

OUTPUT = RESULTS / "audit.json"
DELTA, EPSILONS, KEPT = 1e-5, (1.0, 2.0, 4.0, 8.0), 0.8
# Number of canaries, the recipe that has the examples, and settings that keep a run short.
SHORT = {"method": "dp-sgd", "expected_batch_size": 1024, "epochs": 3}
HEADS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "MNIST, pixels": (2_000, "mnist-cnn", SHORT),
    "IMDB, words": (2_000, "imdb-logistic", SHORT),
}


@contextmanager
def weaken_noise(kept: float) -> Iterator[None]:
    """Add a part of the noise that plan and ledger speak of."""
    whole = dpkfc.release_pipeline.release

    def weak(clipped: Any, plan: Plan, *others: Any) -> Any:
        released = whole(clipped, plan, *others)
        bare = {name: x / plan.expected_batch_size for name, x in clipped.tensors.items()}
        noisy = released.gradients.items()
        return replace(released, gradients={n: bare[n] + kept * (x - bare[n]) for n, x in noisy})

    dpkfc.release_pipeline.release = weak
    try:
        yield
    finally:
        dpkfc.release_pipeline.release = whole


@contextmanager
def keep_scores(path: Path | None) -> Iterator[list[float]]:
    """Write scores and coins of the canaries to a file, and note when training ends."""
    judge, ends = one_run.judge_canaries, list[float]()

    def write(planted: Any, *others: Any) -> Any:
        ends.append(time.process_time())
        if path is not None:
            np.savez(path, scores=planted.scores(), coins=planted.coins)
        return judge(planted, *others)

    one_run.judge_canaries = write
    try:
        yield ends
    finally:
        one_run.judge_canaries = judge


def time_training(prepared: Prepared, plan: Plan) -> float:
    """Return processor seconds of the training without canaries."""
    model = copy.deepcopy(prepared.model)
    optimizer = make_optimizer(prepared.config, model)
    begin = time.process_time()
    with Session(plan, model, optimizer, prepared.data.train) as session:
        for batch in session.batches():
            session.step(batch, prepared.recipe.task.loss)
    return time.process_time() - begin


def audit_head(
    name: str, prepared: Prepared, epsilon: float, kept: float, scores: Path | None
) -> dict:
    """Train with canaries, and return one row."""
    size = prepared.data.size
    plan = prepared.plan.config.calibrate(epsilon, DELTA, size)
    plain = time_training(prepared, plan)
    model = copy.deepcopy(prepared.model)
    optimizer = make_optimizer(prepared.config, model)
    whole = one_run.plan_for_canaries(plan, size, HEADS[name][0])
    begin = time.process_time()
    with weaken_noise(kept), keep_scores(scores) as ends:
        result = one_run.audit_one_run(
            whole,
            model,
            optimizer,
            prepared.data.train,
            prepared.recipe.task.loss,
            canaries=HEADS[name][0],
        )
    seconds = ends[0] - begin
    row = {"head": name, "examples": size, "target": epsilon, "noise_kept": kept}
    row |= result.describe() | {"cpu_seconds": seconds, "plain_cpu_seconds": plain}
    return row | {"time_ratio": seconds / plain}


def prepare_head(name: str) -> Prepared:
    """Return a linear head and its training examples."""
    _, recipe, settings = HEADS[name]
    prepared = prepare(run_config({"recipe": recipe, **settings}))
    if recipe != "mnist-cnn":
        return prepared
    x, y = prepared.data.train
    data = replace(prepared.data, train=(x[:].flatten(1), y[:]))
    return replace(prepared, data=data, model=nn.Linear(784, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="measure rows that are there")
    parser.add_argument("--scores", type=Path, help="folder for the scores of the canaries")
    parser.add_argument("--head", choices=HEADS, action="append")
    parser.add_argument("--repeats", type=int, default=0, help="further runs of rows without them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = [] if options.again else (read_json(OUTPUT) or {"rows": []})["rows"]
    rows = {(row["head"], row["target"], row["noise_kept"]): row for row in known}
    for name in options.head or HEADS:
        prepared = prepare_head(name)
        for kept in (1.0, KEPT):
            for epsilon in EPSILONS:
                path = options.scores and options.scores / f"{name}-{epsilon:g}-{kept:g}.npz"
                row = rows.get((name, epsilon, kept))
                if row is not None and ("further" in row or not options.repeats):
                    continue
                row = row or audit_head(name, prepared, epsilon, kept, path)
                rows[name, epsilon, kept] = row
                if options.repeats:
                    runs = [
                        audit_head(name, prepared, epsilon, kept, None)
                        for _ in range(options.repeats)
                    ]
                    row["further"] = [
                        {"gaussian_lower": run["gaussian_lower"], "passed": run["passed"]}
                        for run in runs
                    ]
                known = (read_json(OUTPUT) or {"rows": []})["rows"]
                others = {(x["head"], x["target"], x["noise_kept"]): x for x in known}
                content = {"hardware": hardware(1), "date": now()}
                write_json(OUTPUT, content | {"rows": list((others | rows).values())})
                print(row, flush=True)


if __name__ == "__main__":
    main()
