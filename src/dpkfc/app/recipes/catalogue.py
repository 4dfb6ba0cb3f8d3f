"""The recipes by name, and the settings of a run from a recipe's defaults and what a user chose."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from dpkfc.app.datasets.examples import ExampleSet
from dpkfc.app.defaults import layer_settings
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
from dpkfc.app.recipes.recipe import Recipe, read_defaults
from dpkfc.app.recipes.smoke import cap_for_smoke
from dpkfc.app.recipes.text import (
    IMDB_LOGISTIC,
    IMDB_WORDS,
    SST2_MINILM,
)
from dpkfc.app.settings import RunConfig
from dpkfc.app.toml import ConfigError, ensure_text, nearest

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
        IMDB_LOGISTIC,
        SST2_MINILM,
    )
}
# Recipes of other installed packages.
for _point in entry_points(group="dpkfc.recipes"):
    RECIPES |= {recipe.name: recipe for recipe in _point.load()}


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
    if config.run.recipe in OWN_KINDS:
        return own_recipe(config)
    return find_recipe(config.run.recipe)


def read_data(config: RunConfig) -> ExampleSet:
    """Return the examples of a run, as `Recipe.data` of its recipe and public weights gives them.

    Raises:
        ConfigError: no such recipe, or settings that do not go together.
        DatasetError: files are missing or damaged.
    """
    recipe = recipe_of(config).starting_from(config.model.pretrained)
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
        defaults = read_defaults(name)
    else:
        recipe = find_recipe(name)
        heavy, defaults = recipe.heavy, recipe.defaults
    config = layer_settings(defaults, chosen, f"{name}.toml")
    return cap_for_smoke(config, heavy=heavy) if config.run.smoke else config
