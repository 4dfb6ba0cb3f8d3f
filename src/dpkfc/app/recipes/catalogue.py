"""The recipes by name, and the settings of a run from a recipe's defaults and what a user chose."""

from __future__ import annotations

from typing import Any

from dpkfc.app.recipes.generation import DART_GPT2_LORA, E2E_GPT2_LORA
from dpkfc.app.recipes.images import (
    BREASTMNIST_CNN,
    CIFAR10_CNN,
    CIFAR10_CROSSVIT,
    CIFAR10_RESNET20,
    CIFAR10_VIT,
    CIFAR10_VIT_SMALL,
    CIFAR10_WRN,
    CIFAR100_CROSSVIT,
    CIFAR100_VIT,
    CIFAR100_WRN,
    DIGITS,
    FASHION_MNIST_CNN,
    MNIST_CNN,
    MNIST_MLP,
    MNIST_VIT,
    PATHMNIST_CNN,
    PNEUMONIAMNIST_CNN,
    SVHN_WRN,
    UTKFACE_RESNET20,
)
from dpkfc.app.recipes.recipe import Recipe, cap_for_smoke
from dpkfc.app.recipes.regression import LINEAR_REGRESSION
from dpkfc.app.recipes.sentences import AG_NEWS_MINILM, SST2_MINILM, STACKOVERFLOW_MINILM
from dpkfc.app.recipes.words import IMDB_LOGISTIC
from dpkfc.app.settings import ConfigError, RunConfig, layer_settings, nearest

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        DIGITS,
        MNIST_CNN,
        MNIST_MLP,
        MNIST_VIT,
        FASHION_MNIST_CNN,
        CIFAR10_CNN,
        CIFAR10_WRN,
        CIFAR10_RESNET20,
        CIFAR10_VIT,
        CIFAR10_VIT_SMALL,
        CIFAR10_CROSSVIT,
        CIFAR100_WRN,
        CIFAR100_VIT,
        CIFAR100_CROSSVIT,
        SVHN_WRN,
        UTKFACE_RESNET20,
        PNEUMONIAMNIST_CNN,
        BREASTMNIST_CNN,
        PATHMNIST_CNN,
        LINEAR_REGRESSION,
        IMDB_LOGISTIC,
        SST2_MINILM,
        AG_NEWS_MINILM,
        STACKOVERFLOW_MINILM,
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


def run_config(chosen: dict[str, Any]) -> RunConfig:
    """Return the settings of a run: the recipe's defaults under what the user chose.

    Raises:
        ConfigError: no recipe, an unknown one, or bad settings.
    """
    name = chosen.get("recipe", "")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"which recipe? give --recipe, one of {' | '.join(RECIPES)}")
    recipe = find_recipe(name)
    config = layer_settings(recipe.defaults, chosen, f"{name}.toml")
    return cap_for_smoke(config, heavy=recipe.heavy) if config.smoke else config
