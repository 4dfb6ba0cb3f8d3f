"""Linear regression on synthetic data, for sweeps of the noise multiplier."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.models import linear_from_zero
from dpkfc.app.number_scores import score_numbers
from dpkfc.app.recipes.objective import Judged, Objective, model_outputs, squared_error
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig
from dpkfc.app.scores import Scores

# Linear regression on synthetic data, for sweeps of the noise multiplier. DiSK, Figure 6a, is a
# study of this kind.
#
# Data come from a public seed: standard normal inputs, a fixed unit vector of weights, small normal
# errors. With such inputs the mean squared error on new examples is the variance of the errors plus
# the squared distance to the weights that made the data. A point of a sweep is one run:
# `--noise-multiplier 2.0`, with a filter by `--method` or `--filter`.

_FEATURES = 32
_TRAIN = 10_000
_TEST = 2_000
REGRESSION_ERROR = 0.1
_SEED = 0


def _draw_regression(config: RunConfig) -> ExampleSet:
    """Return the same data for every run."""
    generator = torch.Generator().manual_seed(_SEED)
    truth = torch.randn(_FEATURES, generator=generator)
    truth /= truth.norm()

    def draw(count: int) -> Examples:
        inputs = torch.randn(count, _FEATURES, generator=generator)
        errors = torch.randn(count, generator=generator)
        return inputs, inputs @ truth + REGRESSION_ERROR * errors

    source = f"drawn from the public seed {_SEED}"
    return ExampleSet(train=draw(_TRAIN), test=draw(_TEST), source=source)


@torch.no_grad()
def _judge_numbers(model: nn.Module, examples: Examples) -> Judged:
    device = next(model.parameters()).device
    inputs, targets = examples[0].to(device), examples[1].to(device)
    error = float((model(inputs).squeeze(1) - targets).square().mean())
    return Judged(1.0 - error / float(targets.var(correction=0)), error)


def _score_numbers(model: nn.Module, examples: Examples) -> Scores:
    predicted = torch.cat([output.squeeze(1).cpu() for output in model_outputs(model, examples[0])])
    return score_numbers(predicted.numpy(), examples[1].cpu().numpy())


def _distance(judged: Judged) -> dict[str, float]:
    excess = judged.loss - REGRESSION_ERROR**2
    return {"squared error above the error of the weights behind the data": excess}


LINEAR_REGRESSION = Recipe(
    name="linear-regression",
    title="synthetic linear regression",
    load=_draw_regression,
    build=partial(linear_from_zero, _FEATURES, 1, bias=False),
    input_shape=(_FEATURES,),
    num_classes=1,
    constants={
        "data": (
            f"{_FEATURES} normal features, errors of deviation {REGRESSION_ERROR}",
            "drawn from a public seed",
        )
    },
    task=Objective(
        loss=squared_error,
        judge=_judge_numbers,
        score="share of variance explained",
        mean_loss="mean squared error",
        also=_distance,
        scores=_score_numbers,
    ),
)
