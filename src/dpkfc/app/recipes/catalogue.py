"""The recipes by name, and the settings of a run from a recipe's defaults and what a user chose."""

from __future__ import annotations

from typing import Any

from dpkfc.app.owndata.recipes import OWN_KINDS, own_kind, own_recipe, own_settings
from dpkfc.app.recipes import Recipe, cap_for_smoke, read_defaults
from dpkfc.app.recipes.images import (
    BREASTMNIST_HEAD,
    CIFAR10_HEAD,
    DIGITS,
    FASHION_MNIST_HEAD,
    IMAGE_RECIPES,
    MNIST_HEAD,
    PNEUMONIAMNIST_HEAD,
)
from dpkfc.app.recipes.regression import LINEAR_REGRESSION
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
from dpkfc.app.settings import ConfigError, RunConfig, layer_settings, nearest

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


def run_config(chosen: dict[str, Any]) -> RunConfig:
    """Return the settings of a run: the recipe's defaults under what the user chose.

    Own data (`data`) and own tasks (`task`) stand in the place of a recipe.

    Raises:
        ConfigError: no recipe, an unknown one, or bad settings.
    """
    own = own_kind(chosen)
    name = own or chosen.get("recipe", "")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            "which recipe or data? give --recipe NAME (see dpkfc recipes), --data FILE or FOLDER,"
            " or --task module:function"
        )
    if name in OWN_KINDS:
        chosen = own_settings({**chosen, "recipe": name})
        return _capped(layer_settings(read_defaults(name), chosen, f"{name}.toml"), heavy=False)
    recipe = find_recipe(name)
    return _capped(layer_settings(recipe.defaults, chosen, f"{name}.toml"), heavy=recipe.heavy)


def _capped(config: RunConfig, *, heavy: bool) -> RunConfig:
    return cap_for_smoke(config, heavy=heavy) if config.smoke else config
