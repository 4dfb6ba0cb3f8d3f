"""A small transformer on AG News, by each method of the papers.

    python -m dpkfc_papers.studies.small_transformer --data-dir DATA
    python -m dpkfc_papers.studies.small_transformer --table

Two blocks of width 32 with random weights read the first 16 tokens of a text, as frozen vectors:
the principal components of the public token table of MiniLM-L6. C is the median norm of gradients
of Zipf texts with drawn labels, at the initial weights. Every method has three rates, tried at
ε = 1 on validation rows; ranges were moved once, where the best stood at an edge. The best is
judged on the test split, seed by seed. Rows are in papers/results/small_transformer.json, and one
that is in the file is not run again.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc import KFAC, AdamBC, DiSK, Plan, PrivacyConfig, PublicData, Session
from dpkfc.app.models import seeded
from dpkfc.app.pretrained import minilm_classifier, minilm_tokens
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.features import ZipfWords
from dpkfc_papers.recipes.networks import TransformerBlock
from dpkfc_papers.studies.harness import RESULTS, markdown
from dpkfc_papers.studies.language import DELTA, TASKS, accuracy
from dpkfc_papers.studies.rows import (
    RowFile,
    Stopwatch,
    median_gradient_norm,
    run_rows,
    seeds_cell,
)

PATH = RESULTS / "small_transformer.json"
TASK = TASKS["ag-news"]
EPSILONS, SEEDS = (1.0, 8.0), 5
VALIDATION, DRAWN = 2000, 256
TUNED_AT = 1.0
# Tokens of a text, width and heads.
LENGTH, WIDTH, HEADS = 16, 32, 4
BATCH, STEPS, EVERY = 256, 24, 8


@dataclass(frozen=True)
class Method:
    """A method of the papers.

    Attributes:
        title: in the table.
        rates: tried on the validation rows.
        adam: whether Adam steps, or SGD.
        momentum: of SGD.
        postprocess: of the releases.
        sides: of K-FAC; empty without a preconditioner.
        readout: of K-FAC.
    """

    title: str
    rates: tuple[float, ...]
    adam: bool = False
    momentum: float = 0.0
    postprocess: tuple[Any, ...] = ()
    sides: str = ""
    readout: str = "whitened"


SMALL, LARGE = (6e-3, 2e-2, 6e-2), (0.1, 0.3, 1.0)
METHODS = {
    "dp-sgd": Method("DP-SGD", LARGE, momentum=0.9),
    "dp-adam": Method("DP-Adam", SMALL, adam=True),
    "dp-adambc": Method("DP-AdamBC", SMALL, postprocess=(AdamBC(),)),
    "disk": Method("DiSK", LARGE, postprocess=(DiSK(),)),
    "kfc-inputs": Method("DP-KFC, inputs", SMALL, adam=True, sides="input"),
    "kfc-both": Method("DP-KFC, both sides", SMALL, adam=True, sides="both"),
    "kfc-natural": Method(
        "DP-KFC, natural", (0.03, 0.1, 0.3), momentum=0.9, sides="input", readout="natural"
    ),
}


class SmallEncoder(nn.Module):
    """Learned positions, two blocks, the mean over positions, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(TransformerBlock(WIDTH, HEADS) for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TASK.classes)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return logits of token vectors `[N, LENGTH, WIDTH]`."""
        x = self.blocks(vectors + self.positions)
        return self.head(self.norm(x).mean(1))


@functools.cache
def token_table() -> Tensor:
    """Return the first principal components of the public token vectors, of mean square 1."""
    table = minilm_classifier(trained_blocks=0).encoder.get_input_embeddings().weight.detach()
    centred = table - table.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    found = centred @ vectors[:, -WIDTH:]
    found = found / found.std(0)
    found[0] = 0
    return found


def token_vectors(texts: Sequence[str]) -> Tensor:
    """Return vectors `[N, LENGTH, WIDTH]` of the first tokens of texts; 0 fills a short one."""
    return token_table()[minilm_tokens(texts, LENGTH)]


@functools.cache
def draw_texts() -> Tensor:
    """Return vectors of Zipf texts, which are not data."""
    return token_vectors(ZipfWords(shortest=10, longest=60).draw(DRAWN))


def public_clip(model: nn.Module) -> float:
    """Return the median norm of gradients of Zipf texts with drawn labels."""
    rows = draw_texts()[:64]
    labels = torch.randint(TASK.classes, (64,), generator=torch.Generator().manual_seed(0))
    batches = [(rows[row : row + 1], labels[row : row + 1]) for row in range(len(rows))]
    return median_gradient_norm(model, cross_entropy, batches)


@functools.cache
def noise_multiplier(epsilon: float, rows: int) -> float:
    """Return the noise multiplier of the steps."""
    config = PrivacyConfig(expected_batch_size=BATCH, steps=STEPS)
    return config.calibrate(epsilon, DELTA, rows).noise_multiplier


def make_plan(method: Method, epsilon: float, rows: int, clip: float) -> Plan:
    """Return the plan of a method."""
    probe = PublicData(draw_texts(), provenance="texts drawn by Zipf's law")
    kfac = None
    if method.sides:
        kfac = KFAC(probe=probe, probe_size=DRAWN, sides=method.sides, every=EVERY)
    config = PrivacyConfig(
        expected_batch_size=BATCH,
        steps=STEPS,
        max_grad_norm=clip,
        preconditioner=kfac,
        readout=method.readout,
        postprocess=method.postprocess,
    )
    return config.with_noise(noise_multiplier(epsilon, rows), DELTA, rows)


Labelled = tuple[Tensor, Tensor]


def execute(
    name: str, epsilon: float, rate: float, seed: int, train: Labelled, judged: Labelled
) -> Any:
    """Train from the initial weights of a seed, and return the row of the results."""
    watch = Stopwatch()
    method = METHODS[name]
    model = seeded(SmallEncoder, seed)
    clip = public_clip(model)
    plan = make_plan(method, epsilon, len(train[0]), clip)
    if method.adam:
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=method.momentum)
    # The check on public rows is of the model, which tests make; passes are proved either way.
    with Session(plan, model, optimizer, train, verify=False) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
        spent = session.epsilon
    return {
        "method": name,
        "epsilon": epsilon,
        "spent": spent,
        "rate": rate,
        "seed": seed,
        "accuracy": accuracy(model, *judged),
        "clip": clip,
        "noise": plan.noise_multiplier,
        "steps": plan.steps,
        "rows": len(train[0]),
        **watch.read(),
    }


def best_rate(file: RowFile, name: str) -> float | None:
    """Return the rate with the best accuracy on the validation rows; None before all ran."""
    return file.best_rate(f"validation/{name}/{rate:g}" for rate in METHODS[name].rates)


def run(data_dir: str, names: Sequence[str], seeds: int) -> None:
    """Run what is missing: rates first, then tests, seed by seed."""
    texts = TASK.texts(data_dir)
    x, labels = token_vectors(texts.train[0]), torch.tensor(texts.train[1])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, kept = order[:VALIDATION], order[VALIDATION:]
    train, validation = (x[kept], labels[kept]), (x[held], labels[held])
    test = token_vectors(texts.test[0]), torch.tensor(texts.test[1])
    file = RowFile(PATH)
    for name in names:
        for rate in METHODS[name].rates:
            trial = functools.partial(execute, name, TUNED_AT, rate, 100, train, validation)
            file.fill(f"validation/{name}/{rate:g}", trial)
    for seed in range(seeds):
        for epsilon in EPSILONS:
            for name in names:
                chosen = best_rate(file, name)
                if chosen is not None:
                    judge = functools.partial(execute, name, epsilon, chosen, seed, train, test)
                    file.fill(f"{name}/{epsilon:g}/{seed}", judge)


def table() -> str:
    """Return accuracies by method and ε; "" before anything was run."""
    file = RowFile(PATH)
    lines = []
    for name, method in METHODS.items():
        cells = []
        for epsilon in EPSILONS:
            start = f"{name}/{epsilon:g}/"
            found = [row["accuracy"] for key, row in file.rows.items() if key.startswith(start)]
            cells.append(seeds_cell(found))
        seconds = [row["processor_seconds"] for row in file.rows.values() if row["method"] == name]
        if seconds:
            rate = best_rate(file, name)
            shown = "–" if rate is None else f"{rate:g}"
            lines.append([method.title, *cells, shown, f"{statistics.mean(seconds):.1f}"])
    if not lines:
        return ""
    head = [f"ε = {epsilon:g} (seeds)" for epsilon in EPSILONS]
    return markdown(["test %", *head, "rate", "processor seconds"], lines)


if __name__ == "__main__":
    raise SystemExit(run_rows(__doc__, METHODS, SEEDS, run, table))
