"""Tables 4 and 5 of the DiSK paper at a small shape: E2E and DART, by DP-AdamW and DiSK behind it.

    python -m dpkfc_papers.studies.generation --data-dir DIR --out runs/generation  # resumable
    python -m dpkfc_papers.studies.generation --table  # the tables

A GPT-2 of two blocks stands for GPT-2-small. Public pairs stand for its pretraining: for E2E the
pairs of DART's development split without restaurants, which are E2E's; for DART some of E2E's
training split. The vocabulary is pieces of public pairs, of E2E's development split or those just
named, and the first words of WordPiece's list. Names and numbers of a prompt become slots, in the
prompt and wherever its own reference has them, and are put back before anything is judged. Rates
are chosen at ε = 3 on a validation split. The privacy unit is one pair.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpkfc.app.datasets.errors import DatasetError
from dpkfc_papers.store import Store, StudyRun, make_missing
from dpkfc_papers.studies.generation_model import (
    BATCH,
    BLOCKS,
    DELTA,
    GAMMA,
    KAPPA,
    STEPS,
    WIDTH,
    make_model,
    perplexity,
    train_plainly,
    train_privately,
    write_texts,
)
from dpkfc_papers.studies.generation_texts import (
    DECODED,
    PROMPT,
    REFERENCE,
    VALIDATION,
    WORDS,
    Task,
    make_task,
    score,
    score_cider,
)
from dpkfc_papers.studies.harness import RESULTS, interval, markdown, run_script, stamp

PATH = RESULTS / "generation.json"
SEEDS, EPSILONS = (0, 1, 2), (3.0, 8.0)
METHODS = {
    "adamw": "AdamW (not private)",
    "dp-adamw": "DP-AdamW",
    "disk": "DiSK (KF-DPAdamW)",
    "ema": "its filter at one point",
}
PRIVATE_RATES = (6e-3, 1.2e-2, 2.4e-2)
RATES = {method: PRIVATE_RATES for method in METHODS} | {"adamw": (3e-3, 6e-3, 1.2e-2)}
START_BATCH, START_STEPS, START_RATE = 64, 250, 3e-3
# Figures of a run, and whether more is better.
FIGURES = {
    "perplexity": ("perplexity", False),
    "bleu": ("BLEU", True),
    "rouge": ("ROUGE-L", True),
    "meteor": ("METEOR", True),
    "nist": ("NIST", True),
    "cider": ("CIDEr", True),
}
DATA = {"e2e": ("E2E", 4), "dart": ("DART", 5)}

# --------------------------------------------------------------------------------------------------
# Runs: one public start a data set, rates on the validation split, then tests.


@dataclass(frozen=True)
class GenerationRun(StudyRun):
    """A run from the public start.

    Attributes:
        data: in `DATA`.
        method: in `METHODS`.
        epsilon: ε; 0 for AdamW.
        rate: learning rate.
        seed: of AdamW's batches; sampling and noise of a private run are never seeded.
        evaluate_on: "validation" or "test".
    """

    data: str
    method: str
    epsilon: float
    rate: float
    seed: int
    evaluate_on: str = "test"

    common = {
        # A row with a measure of its own needs no accuracy.
        "measure": "generation",
        "width": WIDTH,
        "blocks": BLOCKS,
        "prompt": PROMPT,
        "reference": REFERENCE,
        "start_steps": START_STEPS,
        "start_batch": START_BATCH,
        "start_rate": START_RATE,
        "words": WORDS,
        "validation": VALIDATION,
        "decoded": DECODED,
        "batch": BATCH,
        "steps": STEPS,
        "kappa": KAPPA,
        "gamma": GAMMA,
        "delta": DELTA,
    }


def epsilons_of(method: str) -> tuple[float, ...]:
    """Return the privacy budgets of a method."""
    return (0.0,) if method == "adamw" else EPSILONS


def rate_run(data: str, method: str, rate: float) -> GenerationRun:
    """Return the run that judges a rate on the validation split."""
    return GenerationRun(data, method, epsilons_of(method)[0], rate, 100, "validation")


def best_rate(store: Any, data: str, method: str) -> float | None:
    """Return the rate of the least perplexity; None before all have been run."""
    rows = {rate: store.get(rate_run(data, method, rate)) for rate in RATES[method]}
    if not all(rows.values()):
        return None
    return min(rows, key=lambda rate: rows[rate]["perplexity"])


def test_runs(store: Any, data: str, method: str, epsilon: float) -> list[GenerationRun]:
    """Return the runs of the best rate on the test set; none before the grid is complete."""
    rate = best_rate(store, data, method)
    if rate is None:
        return []
    return [GenerationRun(data, method, epsilon, rate, seed) for seed in SEEDS]


def stages(store: Any) -> Iterator[list[GenerationRun]]:
    """Yield lists of runs; a list may need the results of those before it."""
    main = [method for method in METHODS if method != "ema"]
    yield [start_run(data) for data in DATA]
    for methods, data in itertools.product((main, ["ema"]), DATA):
        yield [rate_run(data, method, rate) for method in methods for rate in RATES[method]]
        tests: list[GenerationRun] = []
        for method in methods:
            for epsilon in epsilons_of(method):
                tests += test_runs(store, data, method, epsilon)
        yield sorted(tests, key=lambda run: run.seed)


def load_start(task: Task, data: str, folder: Path) -> nn.Module:
    """Return the model after training on public pairs; its weights are kept in a folder."""
    model = make_model(len(task.vocabulary), 0)
    shape = f"{WIDTH}x{BLOCKS}-{START_STEPS}x{START_BATCH}-{START_RATE:g}-{len(task.vocabulary)}"
    path = folder / f"{data}-{shape}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    train_plainly(model, task.start, START_BATCH, START_STEPS, START_RATE, 0)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def judge(model: nn.Module, task: Task) -> dict[str, Any]:
    """Return the figures of a model on the test set, and the first text that it writes."""
    texts = write_texts(model, list(task.references), task.vocabulary)
    references = list(task.references.values())
    figures = {**score(references, texts), "cider": score_cider(references, texts)}
    rounded = {name: round(value, 4) for name, value in figures.items()}
    return {"perplexity": round(perplexity(model, task.test), 4), **rounded, "text": texts[0]}


def execute_run(run: GenerationRun, task: Task, model: nn.Module) -> dict[str, Any]:
    """Train a model from the public start, and return the record of the run as plain values."""
    began = time.perf_counter()
    ids, spent = task.train, {}
    if run.method == "start":
        ids = task.start
    elif run.evaluate_on == "test":
        ids = torch.cat([task.train, task.validation])
    if run.method == "adamw":
        train_plainly(model, ids, BATCH, STEPS, run.rate, run.seed)
    elif run.method != "start":
        spent = train_privately(model, ids, run.rate, run.epsilon, run.method)
    if run.evaluate_on == "test":
        figures = judge(model, task)
    else:
        figures = {"perplexity": perplexity(model, task.validation)}
    return {
        "run": run.describe(),
        "hash": run.hash,
        **figures,
        **spent,
        "measured_on": run.evaluate_on,
        "pairs": len(ids),
        "seconds": round(time.perf_counter() - began, 1),
        **stamp(1),
    }


def start_run(data: str) -> GenerationRun:
    """Return what stands for the public start itself among the runs."""
    return GenerationRun(data, "start", 0.0, 0.0, 0)


def execute(folder: Path, data_dir: str) -> None:
    """Make the runs that are missing; each is on the disk before the next starts."""
    from dpkfc_papers.recipes.pairs import DART, E2E, load_pairs

    torch.set_num_threads(1)
    e2e, dart = (load_pairs(source, data_dir or None) for source in (E2E, DART))
    tasks = functools.cache(functools.partial(make_task, e2e=e2e, dart=dart))

    def execute_one(run: GenerationRun) -> dict[str, Any]:
        task = tasks(run.data)
        return execute_run(run, task, load_start(task, run.data, folder))

    make_missing(PATH, stages, execute_one)


# --------------------------------------------------------------------------------------------------
# Tables.


def values_of(store: Any, runs: Sequence[GenerationRun], figure: str) -> list[float]:
    """Return a figure of the runs that have been made."""
    rows = [store.get(run) for run in runs]
    return [row[figure] for row in rows if row]


def data_table(store: Any, data: str) -> str:
    """Return the table of a data set and what holds of the paper's directions; "" without runs."""
    runs = {}
    for method in METHODS:
        for epsilon in epsilons_of(method):
            tests = test_runs(store, data, method, epsilon)
            if any(map(store.get, tests)):
                runs[method, epsilon] = tests
    if not runs:
        return ""
    rows = []
    start = store.get(start_run(data))
    if start:
        rows.append(["public start", *(f"{start[figure]:.2f}" for figure in FIGURES), "–"])
    for (method, epsilon), made in runs.items():
        label = METHODS[method] + (f", ε = {epsilon:g}" if epsilon else "")
        cells = [interval(values_of(store, made, figure)) for figure in FIGURES]
        rows.append([label, *cells, f"{made[0].rate:g}"])
    title, number = DATA[data]
    head = [f"{title} (Table {number})", *(label for label, _ in FIGURES.values()), "rate"]
    return markdown(head, rows)


def table() -> str:
    """Return the tables; "" before anything was run."""
    store = Store(PATH)
    tables = [data_table(store, data) for data in DATA]
    return "\n\n".join(filter(None, tables))


def main() -> int:
    try:
        return run_script(__doc__, execute, table)
    except DatasetError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
