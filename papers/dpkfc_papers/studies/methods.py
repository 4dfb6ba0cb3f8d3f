"""The methods of `dpkfc methods` for networks on scikit-learn's digits at one ε, tuned alike on a
validation split of the training set.

    python -m dpkfc_papers.studies.grids --grid methods  # resumable; twenty minutes

Of the 1,437 training images 200, chosen by a public seed, play the public data and are private for
no method. Each method gets five learning rates on a validation split with one tuning seed, then
three seeds, with their own initialisation, on the test set at the rate that won. Noise is secure
and never seeded. What it cannot say: the task is small and easy, and a hundred steps are too few
for the methods that need long runs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from dpkfc.app.methods import METHODS
from dpkfc_papers.studies import grids
from dpkfc_papers.studies.harness import interval, markdown

PATH = grids.RESULTS / "methods.json"
GRID = grids.GRIDS["methods"]
PUBLIC, VALIDATION, SPLIT_SEED = 200, GRID.validation, 7


def divide(whole: Any, evaluate_on: str) -> tuple[Any, Any, Any]:
    """Return public, private and evaluation examples of the digits."""
    order = torch.randperm(len(whole.train[1]), generator=torch.Generator().manual_seed(SPLIT_SEED))
    first = PUBLIC + VALIDATION
    public = tuple(x[order[:PUBLIC]] for x in whole.train)
    validation = tuple(x[order[PUBLIC:first]] for x in whole.train)
    rest = tuple(x[order[first:]] for x in whole.train)
    if evaluate_on == "validation":
        return public, rest, validation
    private = tuple(torch.cat(pair) for pair in zip(rest, validation, strict=True))
    return public, private, whole.test


def train_once(run: Any, place: Any, judge: Any = None) -> dict[str, Any]:
    """Train privately, and return the row of a run with accuracy, ε, σ and seconds."""
    from safetensors.torch import save_file

    from dpkfc.app.assembly import learning_rate, make_augment, make_optimizer
    from dpkfc.app.curvature_settings import Facts
    from dpkfc.app.plan_settings import make_plan
    from dpkfc.app.pretraining import pretrain
    from dpkfc.app.recipes.catalogue import find_recipe
    from dpkfc.app.recipes.objective import cross_entropy, evaluate
    from dpkfc.app.results import evaluated_weights
    from dpkfc.app.tuning.runs import hardware
    from dpkfc.session import Session

    torch.set_num_threads(1)
    recipe = find_recipe(run.recipe)
    whole = recipe.data(run.config(validation_size=0, eval_on="test"))
    public, private, held_out = divide(whole, run.evaluate_on)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "public.safetensors"
        save_file({"inputs": public[0].clone(), "labels": public[1].clone()}, path)
        config = run.config(public_data=str(path))
        model = recipe.model(config.run.seed)
        plan = make_plan(config, Facts(recipe.input_shape, len(private[1])))
        if config.model.pretrain_epochs:
            pretrain(config, model, recipe.input_shape)
    optimizer, started = make_optimizer(config, model), time.perf_counter()
    augment = make_augment(config, recipe.input_shape)
    notes: dict[str, float] = {}
    with Session(plan, model, optimizer, private, augment=augment) as session:
        for batch in session.batches():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, batch.step, plan.steps)
            notes = dict(session.step(batch, cross_entropy).notes)
        seconds = time.perf_counter() - started
        with evaluated_weights(session):
            judged = evaluate(model, held_out)
        epsilon = session.epsilon
    return {
        "run": run.describe(),
        "hash": run.hash,
        "accuracy": judged.accuracy,
        "measured_on": run.evaluate_on,
        "epsilon": epsilon,
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "seconds": round(seconds, 2),
        "notes": notes,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware(),
    }


def table(store: Any, only: Sequence[str] = tuple(METHODS)) -> str:
    """Return accuracies on the test set with 95 % intervals, and the rate that validation chose."""
    rows = []
    base = _find_seconds(store, "dp-sgd")
    for method in only:
        tests = GRID.tests(store, method) if method in GRID.arms else []
        if len(tests) < 2:
            continue
        _, points = GRID.arms[method]
        best = GRID.points(store, method)[0][0]
        edge = {0: "lower", len(points) - 1: "upper"}.get(points.index(best), "no")
        cells = [METHODS[method].label, f"`{method}`"]
        cells += [interval([100 * row["accuracy"] for row in tests]), f"{best['lr']:g}", edge]
        rows.append([*cells, f"{_find_seconds(store, method) / base:.1f}×"])
    head = ["method", "`--method`", "test accuracy, %", "rate", "edge of the grid", "time of a run"]
    return markdown(head, rows) if rows else "*Not measured yet.*"


def _find_seconds(store: Any, method: str) -> float:
    return statistics.median(row["seconds"] for row in GRID.tests(store, method))
