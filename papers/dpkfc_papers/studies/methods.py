"""Every method of `dpkfc methods` on scikit-learn's digits at one ε, tuned alike on a validation
split of the training set.

    python -m dpkfc_papers.studies.methods  # resumable; twenty minutes
    python -m dpkfc_papers.studies.methods --only disk doppler

Of the 1,437 training images 200, chosen by a public seed, play the public data and are private for
no method. Each method gets five learning rates on a validation split with one tuning seed, then
three seeds, with their own initialisation, on the test set at the rate that won. Noise is secure
and never seeded. What it cannot say: the task is small and easy, and 112 steps are too few for the
methods that need long runs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dpkfc_papers.store import hash_values
from dpkfc_papers.studies import harness

PATH = harness.RESULTS / "methods.json"
PUBLIC, VALIDATION, SPLIT_SEED, TUNING_SEED, SEEDS = 200, 250, 7, 100, (0, 1, 2)
COMMON: dict[str, Any] = {
    "recipe": "digits",
    "epsilon": 3.0,
    "delta": 1e-5,
    "epochs": 20.0,
    "expected_batch_size": 256,
}
RATES = {"sgd": (0.02, 0.06, 0.2, 0.6, 2.0), "adam": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)}
MORE: dict[str, dict[str, Any]] = {
    "dp-sgd-pt": {"pretrain_epochs": 50},
    "gep": {"gep_rank": 100},
    "b-gep": {"gep_rank": 100},
}


def data(evaluate_on: str):
    """(public, private, evaluation) examples of the digits."""
    from dpkfc.app.recipes.catalogue import find_recipe, run_config

    whole = find_recipe("digits").data(run_config(COMMON))
    order = torch.randperm(len(whole.train[1]), generator=torch.Generator().manual_seed(SPLIT_SEED))
    first = PUBLIC + VALIDATION
    public = tuple(x[order[:PUBLIC]] for x in whole.train)
    validation = tuple(x[order[PUBLIC:first]] for x in whole.train)
    rest = tuple(x[order[first:]] for x in whole.train)
    if evaluate_on == "validation":
        return public, rest, validation
    private = tuple(torch.cat(pair) for pair in zip(rest, validation, strict=True))
    return public, private, whole.test


def train_once(settings: dict[str, Any]) -> dict[str, Any]:
    """One private run; returns its settings with accuracy, ε, σ and seconds."""
    from safetensors.torch import save_file

    from dpkfc.app.assembly import learning_rate, make_augment, make_optimizer
    from dpkfc.app.curvature_settings import Facts
    from dpkfc.app.plan_settings import make_plan
    from dpkfc.app.pretraining import pretrain
    from dpkfc.app.recipes.catalogue import find_recipe, run_config
    from dpkfc.app.recipes.objective import cross_entropy, evaluate
    from dpkfc.app.results import evaluated_weights
    from dpkfc.session import Session

    torch.set_num_threads(1)
    public, private, held_out = data(settings["evaluate_on"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "public.safetensors"
        save_file({"inputs": public[0].clone(), "labels": public[1].clone()}, path)
        config = run_config(
            {**COMMON, **settings["chosen"], "seed": settings["seed"], "public_data": str(path)}
        )
        recipe = find_recipe("digits")
        model = recipe.model(config.run.seed)
        plan = make_plan(config, Facts(recipe.input_shape, len(private[1])))
        if config.model.pretrain_epochs:
            pretrain(config, model, recipe.input_shape, private)
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
    found = {
        "accuracy": judged.accuracy,
        "epsilon": epsilon,
        "noise_multiplier": plan.noise_multiplier,
    }
    return {**settings, **found, "steps": plan.steps, "seconds": round(seconds, 2), "notes": notes}


def choose_settings(method: str, rate: float, sgd_rate: float) -> dict[str, Any]:
    """The settings of one trial; λ_safe of DP-NGD comes from the tuned DP-SGD, as Eq. 16 says."""
    chosen = {"method": method, "lr": rate, **MORE.get(method, {})}
    if method == "dp-ngd":
        chosen["lambda_safe"] = (rate * 10.0 / sgd_rate) ** 2
    return chosen


def rates_of(method: str) -> tuple[float, ...]:
    from dpkfc.app.methods import METHODS

    optimizer = METHODS[method].settings.get("optimizer", "sgd")
    rates = RATES["adam" if optimizer in ("adam", "adam-bc") else "sgd"]
    return tuple(round(rate / 10, 6) for rate in rates) if method == "dp-ngd" else rates


def settings_of(chosen: dict[str, Any], seed: int, evaluate_on: str) -> dict[str, Any]:
    from dpkfc.app.methods import METHODS

    preset = dict(METHODS[chosen["method"]].settings)
    if chosen["method"] == "dp-kfc" or chosen["method"].startswith("dp-kfc-"):
        preset["optimizer"] = "sgd"
    return {
        "chosen": {**preset, **chosen},
        "seed": seed,
        "evaluate_on": evaluate_on,
        "common": COMMON,
    }


def table(results: dict[str, Any], only: tuple[str, ...] = ()) -> str:
    """Markdown: accuracy on the test set, mean and 95 % interval, and the rate that
    validation chose.
    """
    from dpkfc.app.methods import METHODS
    from dpkfc_papers.studies.harness import interval, markdown

    rows = []
    base = results["chosen"].get("dp-sgd", {}).get("seconds")
    for method in METHODS:
        found = results["chosen"].get(method)
        if found is None or (only and method not in only):
            continue
        runs = [
            run
            for run in results["runs"].values()
            if run["evaluate_on"] == "test" and run["chosen"]["method"] == method
        ]
        runs = [run for run in runs if run["chosen"]["lr"] == found["lr"]]
        if len(runs) < 2:
            continue
        scores = [100 * run["accuracy"] for run in runs]
        cost = statistics.median(run["seconds"] for run in runs)
        relative = f"{cost / base:.1f}×" if base else "–"
        rows.append(
            [
                METHODS[method].label,
                f"`{method}`",
                interval(scores),
                f"{found['lr']:g}",
                found["edge"],
                relative,
            ]
        )
    head = ["method", "`--method`", "test accuracy, %", "rate", "edge of the grid", "time of a run"]
    return markdown(head, rows) if rows else "*Not measured yet.*"


def main() -> None:
    from dpkfc.app.methods import METHODS
    from dpkfc_papers.studies.harness import read_json

    parser = harness.make_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=list(METHODS), help="methods to run")
    options = parser.parse_args()
    results = read_json(PATH) or {"runs": {}, "chosen": {}}
    results |= harness.stamp(1)

    def all_of(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for settings in trials:
            if hash_values(settings) in results["runs"]:
                continue
            run = results["runs"][hash_values(settings)] = train_once(settings)
            PATH.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(
                f"{settings['chosen']['method']:>18} lr {settings['chosen']['lr']:<8g}"
                f" {run['accuracy']:.3f}",
                flush=True,
            )
        return [results["runs"][hash_values(settings)] for settings in trials]

    sgd_rate = 0.0
    for method in ["dp-sgd", *[name for name in options.only if name != "dp-sgd"]]:
        rates = rates_of(method)
        trials = [
            settings_of(choose_settings(method, r, sgd_rate or 1.0), TUNING_SEED, "validation")
            for r in rates
        ]
        tuned = all_of(trials)
        best = max(range(len(rates)), key=lambda i: tuned[i]["accuracy"])
        sgd_rate = sgd_rate or rates[best]
        chosen = trials[best]["chosen"]
        final = all_of([settings_of(chosen, seed, "test") for seed in SEEDS])
        edge = {0: "lower", len(rates) - 1: "upper"}.get(best, "no")
        seconds = statistics.median(run["seconds"] for run in final)
        results["chosen"][method] = {"lr": rates[best], "edge": edge, "seconds": seconds}
        PATH.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
