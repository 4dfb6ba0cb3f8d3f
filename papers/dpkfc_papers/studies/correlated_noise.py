"""Accuracy of a CNN on MNIST with independent and with correlated noise, at the same ε.

    python -m dpkfc_papers.studies.correlated_noise --data-dir DATA
    python -m dpkfc_papers.studies.correlated_noise --table

Five epochs of plain DP-SGD without momentum, batch 256, C = 1, as the predicted error assumes. Each
kind of noise has the same four rates, tried at ε = 3 on 10,000 validation images; the best is
judged on the test split at both ε. Rows are in papers/results/correlated_noise.json, and one that
is in the file is not run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dpkfc import PrivacyConfig, Session
from dpkfc.app.datasets.examples import ExampleSet
from dpkfc.app.models import build_seeded, mnist_cnn
from dpkfc.app.recipes.images import MNIST_CNN
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.app.run_config import RunConfig
from dpkfc_papers.studies.harness import RESULTS, interval, markdown
from dpkfc_papers.studies.rows import Row, RowFile, Stopwatch, run_rows

PATH = RESULTS / "correlated_noise.json"
DELTA = 1e-5
BATCH, EPOCHS, CLIP = 256, 5, 1.0
EPSILONS, SEEDS, TUNED_AT = (1.0, 3.0), 5, 3.0
RATES = (0.5, 1.0, 2.0, 4.0)
VALIDATION = 10_000
NOISES = {"gaussian": "independent", "auto": "correlated, bands by search"}

Labelled = tuple[Tensor, Tensor]


def accuracy(model: nn.Module, judged: Labelled) -> float:
    """Return the share of right classes in percent."""
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in judged[0].split(1000)])
    return 100 * float((found == judged[1]).float().mean())


def read_images(data_dir: str, validation_size: int) -> ExampleSet:
    """Return MNIST, with a validation split of the training images where its size is above 0."""
    config = RunConfig()
    chosen = replace(config.data, data_dir=data_dir, validation_size=validation_size)
    return MNIST_CNN.data(replace(config, data=chosen))


def execute(
    noise: str, epsilon: float, rate: float, seed: int, train: Labelled, judged: Labelled
) -> Row:
    """Train from the initial weights of a seed, and return the row of the results."""
    watch = Stopwatch()
    config = PrivacyConfig(
        expected_batch_size=BATCH, epochs=EPOCHS, max_grad_norm=CLIP, noise=noise
    )
    plan = config.calibrate(epsilon, DELTA, len(train[0]))
    model = build_seeded(mnist_cnn, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with Session(plan, model, optimizer, train) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
        spent = session.epsilon
    return {
        "noise": noise,
        "epsilon": epsilon,
        "spent": spent,
        "rate": rate,
        "seed": seed,
        "bands": plan.bands,
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "accuracy": accuracy(model.eval(), judged),
        **watch.read(),
    }


def validation_keys(noise: str) -> list[str]:
    """Return the keys of the runs on validation images."""
    return [f"validation/{noise}/{rate:g}" for rate in RATES]


def run(data_dir: str, noises: Sequence[str], seeds: int) -> None:
    """Run what is missing: rates first, then tests at each ε, seed by seed."""
    file = RowFile(PATH)
    data = read_images(data_dir, VALIDATION)
    if data.validation is None:
        raise RuntimeError(f"validation_size = {VALIDATION} gave no validation split")
    for noise in noises:
        for rate, key in zip(RATES, validation_keys(noise), strict=True):
            of = partial(execute, noise, TUNED_AT, rate, 100, data.train, data.validation)
            file.fill(key, of)
    data = read_images(data_dir, 0)
    for epsilon in reversed(EPSILONS):
        for seed in range(seeds):
            for noise in noises:
                rate = file.best_rate(validation_keys(noise))
                if rate is not None:
                    of = partial(execute, noise, epsilon, rate, seed, data.train, data.test)
                    file.fill(f"{noise}/{epsilon:g}/{seed}", of)


def table() -> str:
    """Return accuracies on validation images by rate, then on the test split by ε."""
    rows = RowFile(PATH).rows
    return "\n\n".join(part for part in (validation_table(rows), test_table(rows)) if part)


def validation_table(rows: Mapping[str, Row]) -> str:
    """Return the accuracies on validation images: one run a kind and rate."""
    lines = []
    for noise, title in NOISES.items():
        found = [rows.get(key) for key in validation_keys(noise)]
        if any(found):
            cells = [f"{row['accuracy']:.2f}" if row else "–" for row in found]
            one = max((row for row in found if row), key=lambda row: row["date"])
            seconds = f"{one['processor_seconds'] / one['steps']:.2f}"
            lines.append([title, *cells, f"{one['bands']}", seconds])
    if not lines:
        return ""
    rates = [f"rate {rate:g}" for rate in RATES]
    return markdown(["validation %, ε = 3", *rates, "bands", "processor seconds a step"], lines)


def test_table(rows: Mapping[str, Row]) -> str:
    """Return accuracies on the test split by kind and ε, and the gain seed by seed."""
    lines = []
    for epsilon in EPSILONS:
        pairs = []
        for seed in range(SEEDS):
            found = [rows.get(f"{noise}/{epsilon:g}/{seed}") for noise in NOISES]
            if all(found):
                pairs.append([row["accuracy"] for row in found if row])
        if not pairs:
            continue
        means = [interval(values) for values in zip(*pairs, strict=True)]
        gains = [correlated - independent for independent, correlated in pairs]
        lines.append([f"{epsilon:g}", *means, interval(gains), f"{len(pairs)}"])
    if not lines:
        return ""
    head = ["test %: ε", *NOISES.values(), "gain", "seeds"]
    return markdown(head, lines)


def main() -> int:
    """Run, or print the table."""
    return run_rows(__doc__, NOISES, SEEDS, run, table)


if __name__ == "__main__":
    raise SystemExit(main())
