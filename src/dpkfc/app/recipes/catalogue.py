"""The recipes by name, and the settings of a run from a recipe's defaults and what a user chose."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from dpkfc.app.datasets.examples import ExampleSet
from dpkfc.app.defaults import layer_settings
from dpkfc.app.owndata.recipes import own_recipe
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.owndata.sources import OWN_KINDS, own_settings, own_source
from dpkfc.app.recipes.images import (
    BREASTMNIST_HEAD,
    CIFAR10_HEAD,
    DIGITS,
    FASHION_MNIST_HEAD,
    IMAGE_RECIPES,
    MNIST_HEAD,
    PNEUMONIAMNIST_HEAD,
)
from dpkfc.app.recipes.objective import cross_entropy, evaluate, score_model
from dpkfc.app.recipes.recipe import Recipe, read_defaults
from dpkfc.app.recipes.smoke import cap_for_smoke
from dpkfc.app.recipes.text import IMDB_HEAD, IMDB_WORDS, SST2_HEAD
from dpkfc.app.run_config import RunConfig
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
        IMDB_HEAD,
        SST2_HEAD,
    )
}
# Recipes of other installed packages.
for _point in entry_points(group="dpkfc.recipes"):
    RECIPES |= {recipe.name: recipe for recipe in _point.load()}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name.

    Raises:
        ConfigError: an unknown recipe; the message names the nearest.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]


def recipe_of(config: RunConfig, schema: Schema | None = None) -> Recipe:
    """Return the recipe of a run: a built-in one, or one made from the user's own data or task.

    Args:
        config: settings.
        schema: of own data, where it has been read.

    Raises:
        ConfigError: no such recipe, or own data without what a recipe needs.
        DatasetError: own data that cannot be read.
    """
    if config.run.recipe in OWN_KINDS:
        return _weigh_classes(own_recipe(config, schema), config)
    return _weigh_classes(find_recipe(config.run.recipe), config)


def _weigh_classes(recipe: Recipe, config: RunConfig) -> Recipe:
    """Return a recipe with the class weights and the threshold of the settings.

    The largest weight becomes 1, so that a clip that is longer than every gradient stays so.

    Raises:
        ConfigError: weights that are not one number a class, or a recipe that does not take them.
    """
    given, threshold = config.data.class_weights, config.data.threshold
    if not given and threshold == 0.5:
        return recipe
    name, value = ("class_weights", repr(given)) if given else ("threshold", f"{threshold:g}")
    if recipe.task.loss is not cross_entropy or recipe.task.scores is None:
        raise ConfigError(
            f"{name} = {value:.40} is for classes with cross-entropy, and {recipe.title[:40]!r} has"
            " a loss of its own; leave it out"
        )
    if threshold != 0.5 and recipe.num_classes != 2:
        raise ConfigError(
            f"threshold = {threshold:g} is for two classes, and {recipe.title[:40]!r} has"
            f" {recipe.num_classes}; leave it out"
        )
    weights = read_weights(given, recipe.num_classes)
    loss = partial(cross_entropy, weights=weights) if weights else cross_entropy
    task = replace(
        recipe.task,
        loss=loss,
        judge=partial(evaluate, threshold=threshold),
        scores=partial(score_model, threshold=threshold),
    )
    constants = dict(recipe.constants)
    if weights:
        shown = ", ".join(f"{weight:g}" for weight in weights)
        constants["class weights"] = (
            shown,
            "stated by the user; losses are multiplied, then clipped",
        )
    constants["threshold"] = (f"{threshold:g}", "of the second class; stated by the user")
    answer = recipe.answer and partial(recipe.answer, threshold=threshold)
    return replace(recipe, task=task, answer=answer, constants=constants)


def read_weights(text: str, classes: int) -> tuple[float, ...]:
    """Return one weight a class, the largest 1; nothing for an empty text.

    Raises:
        ConfigError: another number of weights, or one that is not a number above 0.
    """
    words = text.replace(",", " ").split()
    if not words:
        return ()
    try:
        weights = [float(word) for word in words]
    except ValueError:
        raise ConfigError(
            f"class_weights = {text!r:.40} must be public numbers in the order of the classes, as"
            " '1 5'; counts of labels are private"
        ) from None
    if len(weights) != classes or not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(
            f"class_weights = {text!r:.60} must be {classes} numbers above 0, one a class"
        )
    return tuple(weight / max(weights) for weight in weights)


def read_data(config: RunConfig) -> ExampleSet:
    """Return the examples of a run, as `Recipe.data` of its recipe and public weights gives them.

    Raises:
        ConfigError: no such recipe, or settings that do not go together.
        DatasetError: files are missing or damaged.
    """
    recipe = recipe_of(config).start_from(config.model.pretrained)
    return recipe.data(config)


def run_config(chosen: dict[str, Any]) -> RunConfig:
    """Return the settings of a run: the recipe's defaults under what the user chose.

    Own data (`data`) and own tasks (`task`) stand in the place of a recipe.

    Raises:
        ConfigError: no recipe, an unknown one, or bad settings.
    """
    return _layer(chosen)[0]


def configure(chosen: dict[str, Any]) -> tuple[RunConfig, Recipe]:
    """Return the settings of a run, as `run_config`, and its recipe; a schema is read once.

    Raises:
        ConfigError, DatasetError: as `run_config` and `recipe_of`.
    """
    config, schema = _layer(chosen)
    return config, recipe_of(config, schema)


def _layer(chosen: dict[str, Any]) -> tuple[RunConfig, Schema | None]:
    """Return the settings of a run, and the schema that they name."""
    own, schema = own_source(chosen)
    name = own or chosen.get("recipe", "")
    if not ensure_text(name):
        raise ConfigError(
            "which recipe or data? give --recipe NAME (see dpkfc recipes), --data FILE or FOLDER,"
            " or --task module:function"
        )
    heavy = False
    if name in OWN_KINDS:
        chosen = own_settings({**chosen, "recipe": name}, schema)
        defaults = read_defaults(name)
    else:
        recipe = find_recipe(name)
        heavy, defaults = recipe.heavy, recipe.defaults
    config = layer_settings(defaults, chosen, f"{name}.toml")
    if config.run.smoke:
        config = cap_for_smoke(config, heavy=heavy)
    return config, schema
