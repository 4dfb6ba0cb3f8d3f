"""Audit linear heads in one run at four ε, and with a fifth of the noise missing: audit.json.

Needs $DPKFC_DATA, and about an hour of one thread. --scores DIR keeps the scores of the canaries,
on which `audit_peers.py` runs other auditors. A row that is there is kept, unless --again is given.
Times are of the processor: the median over five rounds of the training with canaries divided by
the one without, up to the judgement of the canaries.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import dpkfc.release_pipeline
from common import RESULTS, read_json, stamp, write_json
from dpkfc.app.assembly import Prepared, make_optimizer
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.audit import one_run
from dpkfc.config import Plan
from dpkfc.session import Session

OUTPUT = RESULTS / "audit.json"
DELTA, EPSILONS, KEPT, ROUNDS = 1e-5, (1.0, 2.0, 4.0, 8.0), 0.8, 5
# Number of canaries, the recipe that has the examples, and settings that keep a run short.
SHORT = {"method": "dp-sgd", "expected_batch_size": 1024, "epochs": 3}
HEADS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "MNIST, pixels": (2_000, "mnist-cnn", SHORT),
    "IMDB, words": (2_000, "imdb-logistic", SHORT),
}


def weaken_noise(kept: float) -> Any:
    """Let a context add a part of the noise that plan and ledger speak of."""
    whole = dpkfc.release_pipeline.release

    def weak(clipped: Any, plan: Plan, *others: Any) -> Any:
        released = whole(clipped, plan, *others)
        bare = {name: x / plan.expected_batch_size for name, x in clipped.tensors.items()}
        noisy = released.gradients.items()
        return replace(released, gradients={n: bare[n] + kept * (x - bare[n]) for n, x in noisy})

    return patch.object(dpkfc.release_pipeline, "release", weak)


def judge_by(judge: Callable[..., Any]) -> Any:
    """Let a function of ours take the canaries at the end of a training in a context."""
    return patch.object(one_run, "judge_canaries", judge)


def train_with_canaries(name: str, prepared: Prepared, whole: Plan, epsilon: float) -> Any:
    """Train a copy of the model with canaries, and return the audit."""
    model = copy.deepcopy(prepared.model)
    optimizer = make_optimizer(prepared.config, model)
    settings = {"canaries": HEADS[name][0], "claimed_epsilon": epsilon}
    train, loss = prepared.data.train, prepared.recipe.task.loss
    return one_run.audit_one_run(whole, model, optimizer, train, loss, **settings)


def train_without(prepared: Prepared, plan: Plan) -> None:
    """Train a copy of the model without canaries."""
    model = copy.deepcopy(prepared.model)
    optimizer = make_optimizer(prepared.config, model)
    with Session(plan, model, optimizer, prepared.data.train) as session:
        for batch in session.batches():
            session.step(batch, prepared.recipe.task.loss)


def measure_price(name: str, prepared: Prepared, epsilon: float) -> dict[str, Any]:
    """Return processor seconds with and without canaries, and quartiles of their ratio."""
    plan = prepared.plan.config.calibrate(epsilon, DELTA, prepared.data.size)
    whole = one_run.plan_for_canaries(plan, prepared.data.size, HEADS[name][0])
    plain, planted = [], []
    for _ in range(ROUNDS):
        begin = time.process_time()
        train_without(prepared, plan)
        middle = time.process_time()
        with judge_by(lambda *_: None):
            train_with_canaries(name, prepared, whole, epsilon)
        plain.append(middle - begin)
        planted.append(time.process_time() - middle)
    ratios = [
        planted_seconds / seconds for seconds, planted_seconds in zip(plain, planted, strict=True)
    ]
    low, ratio, high = quantiles(ratios, n=4)
    times = {"cpu_seconds": median(planted), "plain_cpu_seconds": median(plain)}
    return times | {"time_ratio": ratio, "time_ratio_quartiles": [low, high], "rounds": ROUNDS}


def audit_head(
    name: str, prepared: Prepared, epsilon: float, kept: float, scores: Path | None
) -> dict[str, Any]:
    """Train with canaries, and return one row."""
    size = prepared.data.size
    plan = prepared.plan.config.calibrate(epsilon, DELTA, size)
    whole = one_run.plan_for_canaries(plan, size, HEADS[name][0])
    usual = one_run.judge_canaries

    def judge(planted: Any, *others: Any) -> Any:
        if scores is not None:
            np.savez(scores, scores=planted.scores(), coins=planted.coins)
        return usual(planted, *others)

    with weaken_noise(kept), judge_by(judge):
        result = train_with_canaries(name, prepared, whole, whole.curve.epsilon(whole.steps))
    row = {"head": name, "examples": size, "target": epsilon, "noise_kept": kept}
    return row | result.describe()


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
                if row is None:
                    row = audit_head(name, prepared, epsilon, kept, path)
                    if kept == 1.0:
                        row |= measure_price(name, prepared, epsilon)
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
                write_json(OUTPUT, stamp(1) | {"rows": list((others | rows).values())})
                print(row, flush=True)


if __name__ == "__main__":
    main()
