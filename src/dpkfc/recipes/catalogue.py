"""The recipes by name, and the settings of a run from a recipe's defaults and what a user chose."""

from __future__ import annotations

from typing import Any

from dpkfc.recipes.ag_news_minilm import RECIPE as AG_NEWS_MINILM
from dpkfc.recipes.base import Recipe
from dpkfc.recipes.breastmnist_cnn import RECIPE as BREASTMNIST_CNN
from dpkfc.recipes.cifar10_cnn import RECIPE as CIFAR10_CNN
from dpkfc.recipes.cifar10_crossvit import RECIPE as CIFAR10_CROSSVIT
from dpkfc.recipes.cifar10_resnet20 import RECIPE as CIFAR10_RESNET20
from dpkfc.recipes.cifar10_vit import RECIPE as CIFAR10_VIT
from dpkfc.recipes.cifar10_vit_small import RECIPE as CIFAR10_VIT_SMALL
from dpkfc.recipes.cifar10_wrn import RECIPE as CIFAR10_WRN
from dpkfc.recipes.cifar100_crossvit import RECIPE as CIFAR100_CROSSVIT
from dpkfc.recipes.cifar100_vit import RECIPE as CIFAR100_VIT
from dpkfc.recipes.cifar100_wrn import RECIPE as CIFAR100_WRN
from dpkfc.recipes.config import ConfigError, RunConfig, layered, nearest
from dpkfc.recipes.dart_gpt2_lora import RECIPE as DART_GPT2_LORA
from dpkfc.recipes.digits import RECIPE as DIGITS
from dpkfc.recipes.e2e_gpt2_lora import RECIPE as E2E_GPT2_LORA
from dpkfc.recipes.fashion_mnist_cnn import RECIPE as FASHION_MNIST_CNN
from dpkfc.recipes.imdb_logistic import RECIPE as IMDB_LOGISTIC
from dpkfc.recipes.linear_regression import RECIPE as LINEAR_REGRESSION
from dpkfc.recipes.mnist_cnn import RECIPE as MNIST_CNN
from dpkfc.recipes.mnist_mlp import RECIPE as MNIST_MLP
from dpkfc.recipes.mnist_vit import RECIPE as MNIST_VIT
from dpkfc.recipes.pathmnist_cnn import RECIPE as PATHMNIST_CNN
from dpkfc.recipes.pneumoniamnist_cnn import RECIPE as PNEUMONIAMNIST_CNN
from dpkfc.recipes.smoke import capped
from dpkfc.recipes.sst2_minilm import RECIPE as SST2_MINILM
from dpkfc.recipes.stackoverflow_minilm import RECIPE as STACKOVERFLOW_MINILM
from dpkfc.recipes.svhn_wrn import RECIPE as SVHN_WRN
from dpkfc.recipes.utkface_resnet20 import RECIPE as UTKFACE_RESNET20

__all__ = ["RECIPES", "find_recipe", "run_config"]

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
    """The recipe of a name.

    Raises:
        ConfigError: there is none; the nearest one is named.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, RECIPES)} ({' | '.join(RECIPES)})")
    return RECIPES[name]


def run_config(chosen: dict[str, Any]) -> RunConfig:
    """The settings of a run: the recipe's defaults under what the user chose.

    Raises:
        ConfigError: no recipe, an unknown one, or bad settings.
    """
    name = chosen.get("recipe", "")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"which recipe? give --recipe, one of {' | '.join(RECIPES)}")
    recipe = find_recipe(name)
    config = layered(recipe.defaults, chosen, f"{name}.toml")
    return capped(config, heavy=recipe.heavy) if config.smoke else config
