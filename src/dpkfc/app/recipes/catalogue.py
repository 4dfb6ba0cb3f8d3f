"""The recipes by name, and the settings of a run from a recipe's defaults and what a user chose."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.models import linear_from_zero
from dpkfc.app.owndata.recipes import OWN_KINDS, own_kind, own_recipe, own_settings
from dpkfc.app.recipes.images import (
    BREASTMNIST_HEAD,
    CIFAR10_HEAD,
    DIGITS,
    FASHION_MNIST_HEAD,
    IMAGE_RECIPES,
    MNIST_HEAD,
    PNEUMONIAMNIST_HEAD,
)
from dpkfc.app.recipes.objective import Judged, Objective, squared_error
from dpkfc.app.recipes.recipe import Recipe, read_defaults
from dpkfc.app.recipes.smoke import cap_for_smoke
from dpkfc.app.recipes.text import (
    AG_NEWS_MINILM,
    DART_GPT2_LORA,
    E2E_GPT2_LORA,
    IMDB_LOGISTIC,
    IMDB_WORDS,
    SST2_MINILM,
    STACKOVERFLOW_HEAD,
    STACKOVERFLOW_MINILM,
)
from dpkfc.app.settings import ConfigError, RunConfig, ensure_text, layer_settings, nearest

# --------------------------------------------------------------------------------------------------
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


def _distance(judged: Judged) -> dict[str, float]:
    return {
        "squared error above that of the weights behind the data": judged.loss - REGRESSION_ERROR**2
    }


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
    ),
)


# --------------------------------------------------------------------------------------------------

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        DIGITS,
        MNIST_HEAD,
        FASHION_MNIST_HEAD,
        CIFAR10_HEAD,
        PNEUMONIAMNIST_HEAD,
        BREASTMNIST_HEAD,
        IMDB_WORDS,
        *IMAGE_RECIPES,
        LINEAR_REGRESSION,
        IMDB_LOGISTIC,
        SST2_MINILM,
        AG_NEWS_MINILM,
        STACKOVERFLOW_MINILM,
        STACKOVERFLOW_HEAD,
        E2E_GPT2_LORA,
        DART_GPT2_LORA,
    )
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name.

    Raises:
        ConfigError: there is no such recipe; the message names the nearest.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]


def recipe_of(config: RunConfig) -> Recipe:
    """Return the recipe of a run: a built-in one, or one made from the user's own data or task.

    Raises:
        ConfigError: no such recipe, or own data without what a recipe needs.
        DatasetError: own data that cannot be read.
    """
    if config.recipe in OWN_KINDS:
        return own_recipe(config)
    return find_recipe(config.recipe)


def read_data(config: RunConfig) -> ExampleSet:
    """Return the examples of a run, as `Recipe.data` of its recipe and public weights gives them.

    Raises:
        ConfigError: no such recipe, or settings that do not go together.
        DatasetError: files are missing or damaged.
    """
    recipe = recipe_of(config).starting_from(config.pretrained)
    return recipe.data(config)


def run_config(chosen: dict[str, Any]) -> RunConfig:
    """Return the settings of a run: the recipe's defaults under what the user chose.

    Own data (`data`) and own tasks (`task`) stand in the place of a recipe.

    Raises:
        ConfigError: no recipe, an unknown one, or bad settings.
    """
    own = own_kind(chosen)
    name = own or chosen.get("recipe", "")
    if not ensure_text(name):
        raise ConfigError(
            "which recipe or data? give --recipe NAME (see dpkfc recipes), --data FILE or FOLDER,"
            " or --task module:function"
        )
    heavy = False
    if name in OWN_KINDS:
        chosen = own_settings({**chosen, "recipe": name})
    else:
        heavy = find_recipe(name).heavy
    config = layer_settings(read_defaults(name), chosen, f"{name}.toml")
    return cap_for_smoke(config, heavy=heavy) if config.smoke else config
