"""Try what could follow the additive model on public tables: products of numbers, trees with random
splits, and a small network, each at the same ε.

    python benchmarks/tables_tried.py --data-dir DIR               # resumable; minutes

Splits are as in `tables_ours.py`. Shapes and weights of the blocks are those that cost least on a
validation part of Adult's training rows; the network has the defaults of `dpkfc.sklearn`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import RESULTS
from dpkfc.features.additive import AdditiveFeatures, InputColumn
from tables_ours import DELTA, HERE, tables_parser, train_missing

OUTPUT = RESULTS / "tables_tried.json"
TABLES = ("adult", "credit", "cardio", "telco", "compas", "diamonds")
# Title of each model.
MODELS = {
    "products": "with products of numbers",
    "trees": "with trees of random splits",
    "network": "network of 32 tanh units",
}
EPSILON = 1.0
TREES = 24
DEPTH = 3


def _places(columns: Sequence[InputColumn]) -> list[int]:
    """Return where each column of an encoded row begins."""
    widths = [column.values + 1 for column in columns]
    return [sum(widths[:number]) for number in range(len(widths))]


class Products(nn.Module):
    """Products of each two numbers of an encoded row, of norm at most 1."""

    def __init__(self, columns: Sequence[InputColumn]) -> None:
        super().__init__()
        places = [
            place + number
            for place, column in zip(_places(columns), columns, strict=True)
            for number in range(column.numbers)
        ]
        self.pairs = torch.combinations(torch.tensor(places), 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the products `[N, pairs]`."""
        first, second = self.pairs.T
        return x[:, first] * x[:, second] / math.sqrt(max(1, len(self.pairs)))


class RandomTrees(nn.Module):
    """Leaves of trees whose splits are drawn from the schema alone, of norm 1.

    A node asks a column at random: a number against a threshold uniform within its bounds, or
    whether a category is in a random half.
    """

    def __init__(self, columns: Sequence[InputColumn], seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        places = _places(columns)
        self.weights = torch.zeros(places[-1] + columns[-1].values + 1, TREES * (2**DEPTH - 1))
        self.thresholds = torch.full((TREES * (2**DEPTH - 1),), 0.5)
        for node in range(len(self.thresholds)):
            chosen = int(torch.randint(len(columns), (), generator=generator))
            column, place = columns[chosen], places[chosen]
            if column.numbers:
                number = int(torch.randint(column.numbers, (), generator=generator))
                self.weights[place + number, node] = 1
                self.thresholds[node] = 2 * torch.rand((), generator=generator) - 1
            else:
                half = torch.rand(column.values + 1, generator=generator) < 0.5
                self.weights[place : place + column.values + 1, node] = half.float()

    def forward(self, x: Tensor) -> Tensor:
        """Return one of `2 ** DEPTH` leaves of each tree `[N, TREES * 2 ** DEPTH]`."""
        answers = (x @ self.weights > self.thresholds).long().view(len(x), TREES, -1)
        leaf = torch.zeros(len(x), TREES, 1, dtype=torch.long)
        for depth in range(DEPTH):
            leaf = 2 * leaf + answers.gather(2, leaf + 2**depth - 1)
        leaves = nn.functional.one_hot(leaf[:, :, 0], 2**DEPTH)
        return leaves.flatten(1).to(x) / math.sqrt(TREES)


class Joined(nn.Module):
    """Features of an additive model and a block beside them, of norm at most 1."""

    def __init__(self, columns: Sequence[InputColumn], block: nn.Module) -> None:
        super().__init__()
        self.additive = AdditiveFeatures(columns)
        self.block = block
        # The row before it is scaled has the norm 1 / scale; the block adds 1 to its square.
        self.shrink = 1 / math.sqrt(1 + self.additive.scale**2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of encoded rows."""
        parts = [self.additive(x), self.block(x) * self.additive.scale]
        return torch.cat(parts, 1) * self.shrink


def train_head(
    maps: nn.Module, examples: tuple[Tensor, Tensor], outputs: int, likelihood: str
) -> nn.Module:
    """Train a linear head on features as `dpkfc train` does, and return the model."""
    from dpkfc import Session
    from dpkfc.convex import convex_config, convex_rate

    rows, labels = examples
    features = torch.cat([maps(part) for part in rows.split(4096)])
    head = nn.Linear(features.shape[1], outputs, bias=False)
    nn.init.zeros_(head.weight)
    plan = convex_config(
        len(rows), EPSILON, DELTA, features.shape[1], likelihood, max_physical_batch_size=4096
    ).calibrate(EPSILON, DELTA, len(rows))
    optimizer = torch.optim.SGD(head.parameters(), lr=convex_rate(likelihood))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        if outputs > 1:
            return nn.functional.cross_entropy(
                model(inputs), targets, ignore_index=-1, reduction="none"
            )
        return 0.5 * (model(inputs).squeeze(1) - targets).square()

    with Session(plan, head, optimizer, (features, labels)) as session:
        for batch in session.batches():
            session.step(batch, loss_fn)
        with session.averaged_weights():
            trained = head.weight.detach().clone()
    head.weight.data = trained
    return nn.Sequential(maps, head)


def train_network(examples: tuple[Tensor, Tensor], outputs: int, seed: int) -> nn.Module:
    """Train the small network of `dpkfc.sklearn` on encoded rows, and return it."""
    from dpkfc.sklearn import DPMLPClassifier, DPMLPRegressor

    rows, labels = (part.numpy() for part in examples)
    settings = {"epsilon": EPSILON, "delta": DELTA, "bounds": (-1, 1), "random_state": seed}
    if outputs > 1:
        model: Any = DPMLPClassifier(classes=range(outputs), **settings)
    else:
        model = DPMLPRegressor(target_bounds=(-1, 1), **settings)
    module: nn.Module = model.fit(rows, labels).module_
    return module.float()


def train(path: Path, records: Any, *, name: str, model: str, seed: int) -> dict[str, Any]:
    """Train one model on one split, and return its scores on the test rows."""
    from dpkfc.app.owndata.records import split_records
    from dpkfc.app.prepare import prepare
    from dpkfc.app.recipes.catalogue import run_config

    data = split_records(records, 0, seed, path.name)
    own = {"data": str(path), "schema": str(HERE / "schemas" / f"{name}.toml")}
    budget = {"epsilon": EPSILON, "delta": DELTA}
    prepared = prepare(run_config({**own, **budget, "split_seed": seed, "seed": seed}), data)
    additive: Any = prepared.model
    maps, head = additive
    examples = tuple(part[:] for part in data.train)
    begun = time.process_time()
    if model == "network":
        trained = train_network(examples, head.out_features, seed)
    else:
        block = (Products if model == "products" else RandomTrees)(maps.columns)
        likelihood = prepared.config.preconditioner.likelihood
        trained = train_head(Joined(maps.columns, block), examples, head.out_features, likelihood)
    seconds = time.process_time() - begun
    scores = prepared.recipe.task.scores(trained, data.test)
    return {
        "title": MODELS[model],
        "scores": {score.name: score.value for score in scores.scores},
        "train_rows": len(examples[0]),
        "test_rows": scores.examples,
        "seconds": round(seconds, 3),
    }


def main() -> int:
    """Train what is missing; results are written after each fit."""
    arguments = tables_parser(__doc__, MODELS, 3, TABLES).parse_args()

    def jobs(name: str) -> Iterator[tuple[str, Callable[[Path, Any], dict[str, Any]]]]:
        for model in arguments.models:
            for seed in range(arguments.seeds):
                key = f"{name}/{model}/{EPSILON:g}/{seed}"
                yield key, partial(train, name=name, model=model, seed=seed)

    return train_missing(arguments, OUTPUT, jobs)


if __name__ == "__main__":
    sys.exit(main())
