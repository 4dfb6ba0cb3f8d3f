"""The public rule of a text head against the best of twenty random settings.

    python -m dpkfc_papers.studies.head_search --data-dir DATA
    python -m dpkfc_papers.studies.head_search --table

C, rate and steps of a setting are drawn from ranges that are the same for all sets of texts. The
most accurate one on validation rows trains on all training rows, five times, and so does the rule;
test rows choose nothing. The steps are written out here, since hundreds of runs on public sets need
no ledger. Rows are in papers/results/head_search.json, and one that is in the file is not run
again; layer means are kept by `DPKFC_CACHE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dpkfc.app.pretrained import public_means, sentence_encoder
from dpkfc.convex import (
    AVERAGE,
    MOMENTUM,
    STEPS,
    gaussian_noise,
    whitened_clip,
    whitened_rate,
)
from dpkfc_papers.studies.harness import RESULTS, compare_means, interval, markdown
from dpkfc_papers.studies.language import (
    DELTA,
    EPSILONS,
    SEEDS,
    TASKS,
    feature_map,
    map_rows,
    split_sentences,
)
from dpkfc_papers.studies.rows import Row, RowFile, Stopwatch, run_rows

PATH = RESULTS / "head_search.json"
TRIALS, VALIDATION = 20, 2000
# Natural logarithms of C, rate and steps are uniform between these.
LOWEST, HIGHEST = (0.04, 32.0, 10.0), (0.64, 1024.0, 160.0)
# The runs that share ε: the last one alone, or all trials and the last one.
SHARES = {"rule": 1, "search": 1, "counted": TRIALS + 1}

Labelled = tuple[Tensor, Tensor]


class Setting(NamedTuple):
    """What the rule or a trial sets."""

    clip: float
    rate: float
    steps: int


def train(
    data: Labelled, classes: int, whole: float, settings: Sequence[Setting], seed: int = 0
) -> Tensor:
    """Return heads `[S, classes, d]` that `dpkfc.Session` trains with such plans, in law.

    Args:
        data: rows of norm 1 and their labels.
        classes: of the labels.
        whole: the noise multiplier 1 / μ of all steps of a head together.
        settings: of each head.
        seed: of the noise.
    """
    rows, labels = data
    generator = torch.Generator().manual_seed(seed)
    known = functional.one_hot(labels, classes)[:, None]
    clip, rate, steps = (
        torch.tensor(values)[:, None, None] for values in zip(*settings, strict=True)
    )
    weights = torch.zeros(len(settings), classes, rows.shape[1])
    momentum, average = torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(int(steps.max())):
        logits = (rows @ weights.flatten(0, 1).T).unflatten(1, weights.shape[:2])
        errors = logits.softmax(2) - known
        errors *= (clip[:, 0] / errors.norm(dim=2, keepdim=True)).clamp(max=1.0)
        summed = (errors.flatten(1).T @ rows).view_as(weights)
        summed += whole * steps.sqrt() * clip * torch.randn(weights.shape, generator=generator)
        momentum = MOMENTUM * momentum + summed / len(rows)
        goes_on = (step < steps).float()
        weights -= goes_on * rate * momentum
        average.lerp_(weights, goes_on * (1 - AVERAGE.decay))
    return average


def draw_settings() -> list[Setting]:
    """Return the settings of the trials."""
    places = torch.rand(TRIALS, 3, generator=torch.Generator().manual_seed(0))
    low, high = torch.tensor([LOWEST, HIGHEST]).log()
    drawn = (low + places * (high - low)).exp().tolist()
    return [Setting(clip, rate, round(steps)) for clip, rate, steps in drawn]


def rule(rows: Tensor, whole: float) -> Setting:
    """Return what the public rule sets."""
    features = rows.shape[1]
    clip = whitened_clip(len(rows), whole, features, "categorical")
    return Setting(clip, whitened_rate(features), STEPS)


class Parts(NamedTuple):
    """The features of a set of texts: its two splits, and the parts of the trials."""

    classes: int
    train: Labelled
    test: Labelled
    trial: Labelled
    validation: Labelled


def read_parts(name: str, data_dir: str) -> Parts:
    """Return the features of a set, as the recipes make them."""
    task = TASKS[name]
    texts = task.texts(data_dir)
    encoder = sentence_encoder(task.length)
    change = feature_map("zipf", task, data_dir, encoder)
    (rows, labels), test = (
        (map_rows(change, public_means(encoder, lines, task.title)), torch.tensor(labels))
        for lines, labels in (texts.train, texts.test)
    )
    if name == "sst2":
        chosen = split_sentences(texts.train[0])
    else:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
        chosen = order[VALIDATION:], order[:VALIDATION]
    trial, validation = ((rows[part], labels[part]) for part in chosen)
    return Parts(task.classes, (rows, labels), test, trial, validation)


def judge(heads: Tensor, data: Labelled) -> list[float]:
    """Return the accuracy of each head in percent."""
    found = torch.einsum("nd,skd->snk", data[0], heads).argmax(2)
    return (100 * (found == data[1]).float().mean(1)).tolist()


def execute(parts: Parts, kind: str, epsilon: float, seeds: int) -> Row:
    """Return the row of the rule or of a search."""
    watch = Stopwatch()
    whole = gaussian_noise(epsilon, DELTA)
    chosen, trials = rule(parts.train[0], whole), list[float]()
    whole *= math.sqrt(SHARES[kind])
    if kind != "rule":
        settings = draw_settings()
        trials = judge(train(parts.trial, parts.classes, whole, settings), parts.validation)
        chosen = settings[trials.index(max(trials))]
    heads = train(parts.train, parts.classes, whole, [chosen] * seeds, seed=1)
    values = judge(heads, parts.test)
    return {
        "chosen": chosen._asdict(),
        "validation": trials,
        "test": values,
        "accuracy": sum(values) / seeds,
        **watch.read(),
    }


def run(data_dir: str, names: Sequence[str], seeds: int) -> None:
    """Run what the file lacks."""
    # Where a processor has matrices of bfloat16, it multiplies in them.
    torch.set_float32_matmul_precision("medium")
    file = RowFile(PATH)
    for name in names:
        parts = read_parts(name, data_dir)
        for epsilon, kind in product(EPSILONS, SHARES):
            file.fill(f"{name}/{epsilon:g}/{kind}", partial(execute, parts, kind, epsilon, seeds))


def table() -> str:
    """Return accuracies of rule and searches, and what these gain."""
    rows = RowFile(PATH).rows
    lines = []
    for name, epsilon in product(TASKS, EPSILONS):
        keys = [f"{name}/{epsilon:g}/{kind}" for kind in SHARES]
        if not rows.keys() >= {*keys}:
            continue
        found = [rows[key] for key in keys]
        cells = [f"{TASKS[name].title}, ε = {epsilon:g}"]
        for row in found:
            cells.append(interval(row["test"]))
            if row is not found[0]:
                gain, half = compare_means(row["test"], found[0]["test"])
                cells.append(f"{gain:+.2f}\u00a0±\u00a0{half:.2f}")
        for row in found[:2]:
            setting = row["chosen"]
            cells.append(f"{setting['clip']:.2f}, {setting['rate']:.0f}, {setting['steps']}")
        lines.append(cells)
    head = ["test %", "the rule", "best of 20", "gain", "search counted in ε", "gain"]
    head += ["C, rate, steps: rule", "best of 20"]
    return markdown(head, lines) if lines else ""


if __name__ == "__main__":
    raise SystemExit(run_rows(__doc__, TASKS, SEEDS, run, table))
