"""Define linear regression on synthetic data, for sweeps of the noise multiplier.

DiSK, Figure 6a, is a study of this kind.

Data come from a public seed: standard normal inputs, a fixed unit vector of weights, small normal
errors. With such inputs the mean squared error on new examples is the variance of the errors plus
the squared distance to the weights that made the data. A point of a sweep is one run:
`--noise-multiplier 2.0`, with a filter by `--method` or `--filter`.
"""

from __future__ import annotations

import torch
from torch import nn

from dpkfc.app.datasets import Examples, ExampleSet
from dpkfc.app.recipes import Judged, Recipe, Task, squared_error
from dpkfc.app.settings import RunConfig

FEATURES = 32
TRAIN = 10_000
TEST = 2_000
ERROR = 0.1
_SEED = 0


def _load(config: RunConfig) -> ExampleSet:
    """Return the same data for every run."""
    generator = torch.Generator().manual_seed(_SEED)
    truth = torch.randn(FEATURES, generator=generator)
    truth /= truth.norm()

    def draw(count: int) -> Examples:
        inputs = torch.randn(count, FEATURES, generator=generator)
        errors = torch.randn(count, generator=generator)
        return inputs, inputs @ truth + ERROR * errors

    source = f"drawn from the public seed {_SEED}"
    return ExampleSet(train=draw(TRAIN), test=draw(TEST), source=source)


def _model() -> nn.Linear:
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@torch.no_grad()
def _judge(model: nn.Module, examples: Examples) -> Judged:
    device = next(model.parameters()).device
    inputs, targets = examples[0].to(device), examples[1].to(device)
    error = float((model(inputs).squeeze(1) - targets).square().mean())
    return Judged(1.0 - error / float(targets.var(correction=0)), error)


def _distance(judged: Judged) -> dict[str, float]:
    return {"squared error above that of the weights behind the data": judged.loss - ERROR**2}


LINEAR_REGRESSION = Recipe(
    name="linear-regression",
    title="synthetic linear regression",
    load=_load,
    build=_model,
    input_shape=(FEATURES,),
    num_classes=1,
    constants={
        "data": (
            f"{FEATURES} normal features, errors of deviation {ERROR}",
            "drawn from a public seed",
        )
    },
    task=Task(
        loss=squared_error,
        judge=_judge,
        score="share of variance explained",
        mean_loss="mean squared error",
        also=_distance,
    ),
)
