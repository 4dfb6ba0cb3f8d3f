"""What a recipe is: data, a model, public constants and defaults. One module per recipe holds one of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, resources
from typing import Any

from torch import nn

from dpkfc.recipes.config import ConfigError, RunConfig, layered, nearest, tomllib
from dpkfc.recipes.datasets import ImageSet, Normalisation, Pixels
from dpkfc.recipes.datasets.split import with_validation
from dpkfc.recipes.models import seeded

__all__ = ["RECIPES", "Recipe", "find_recipe", "run_config"]

RECIPES = ("digits", "mnist-cnn", "fashion-mnist-cnn", "cifar10-cnn")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task: everything in it is public.

    Attributes:
        name: what `--recipe` takes; its TOML of defaults has the same name.
        title: name of the data set for people.
        pixels: folder or None to raw images.
        build: makes the model.
        image_shape: (height, width, channels) of an image.
        num_classes: number of labels.
        normalisation: public constants.
    """

    name: str
    title: str
    pixels: Callable[[str | None], Pixels]
    build: Callable[[], nn.Module]
    image_shape: tuple[int, int, int]
    num_classes: int
    normalisation: Normalisation

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of what the model reads."""
        height, width, channels = self.image_shape
        return channels, height, width

    def data(self, config: RunConfig) -> ImageSet:
        """The tensors of a run.

        Raises:
            DatasetError: files are missing or damaged, or the validation split takes everything.
        """
        pixels = self.pixels(config.data_dir or None).check(self.title, self.image_shape, self.num_classes)
        return with_validation(pixels.tensors(self.normalisation), config.validation_size, config.split_seed)

    def model(self, seed: int) -> nn.Module:
        """The model with initial weights of a public seed."""
        return seeded(self.build, seed)

    @property
    def defaults(self) -> dict[str, Any]:
        """The recipe's TOML."""
        text = resources.files("dpkfc.recipes").joinpath(f"{self.name}.toml").read_text("utf-8")
        return tomllib.loads(text)


def find_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        ConfigError: there is none; the nearest one is named.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, RECIPES)} ({' | '.join(RECIPES)})")
    module = import_module(f"dpkfc.recipes.{name.replace('-', '_')}")
    recipe: Recipe = module.RECIPE
    return recipe


def run_config(chosen: dict[str, Any]) -> RunConfig:
    """The settings of a run: the recipe's defaults under what the user chose.

    Raises:
        ConfigError: no recipe, an unknown one, or bad settings.
    """
    name = chosen.get("recipe", "")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"which recipe? give --recipe, one of {' | '.join(RECIPES)}")
    return layered(find_recipe(name).defaults, chosen, f"{name}.toml")
