"""One recipe: data, a model, public constants and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from torch import nn

from dpkfc.curvature.probes import Probe
from dpkfc.recipes.config import ConfigError, RunConfig, tomllib
from dpkfc.recipes.datasets import ExampleSet, Normalisation, Pixels
from dpkfc.recipes.datasets.split import with_validation
from dpkfc.recipes.evaluate import CLASSIFICATION, Task
from dpkfc.recipes.models import seeded
from dpkfc.recipes.smoke import sliced

__all__ = ["Recipe", "image_recipe"]

@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task: everything in it is public.

    Attributes:
        name: what `--recipe` takes; its TOML of defaults has the same name.
        title: name of the data set for people.
        load: settings to the tensors of a training and a test split.
        build: makes the model.
        input_shape: of one input.
        num_classes: number of labels.
        constants: what the preparation of the data takes as public: name to (value, where it comes from).
        probe: the recipe's own source of probe inputs, for `source = "tokens"`.
        task: what is minimised and what a model is judged by.
        variant: this recipe, started from a folder of public weights, for `pretrained`.
        heavy: whether one example takes a tenth of a second and more, so that smoke runs take few.
    """

    name: str
    title: str
    load: Callable[[RunConfig], ExampleSet]
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    num_classes: int
    constants: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    probe: Callable[[RunConfig], Probe] | None = None
    task: Task = CLASSIFICATION
    variant: Callable[[str], Recipe] | None = None
    heavy: bool = False

    def data(self, config: RunConfig) -> ExampleSet:
        """The tensors of a run; a slice of them for a smoke run.

        With `validation_size` above 0 a set that has a validation split of its own gives that one, whole.

        Raises:
            DatasetError: files are missing or damaged, or the validation split takes everything.
            ConfigError: a vocabulary of private text.
        """
        if config.vocabulary != "hashed":
            raise ConfigError(
                f"vocabulary = {config.vocabulary!r} is refused: words, document frequencies or TF-IDF weights fitted on private "
                "text depend on every example without clip or noise, so no ε would hold; leave it out (hashed features)"
            )
        loaded = self.load(config)
        if config.smoke:
            loaded = sliced(loaded, config.split_seed, heavy=self.heavy)
        if loaded.validation is not None:
            return loaded if config.validation_size else replace(loaded, validation=None)
        return with_validation(loaded, config.validation_size, config.split_seed)

    def model(self, seed: int) -> nn.Module:
        """The model with initial weights of a public seed."""
        return seeded(self.build, seed)

    def starting_from(self, folder: str) -> Recipe:
        """The recipe, with public weights from a folder where one is given.

        Raises:
            ConfigError: a folder, and a recipe that starts from none.
            DatasetError: the folder does not hold what is needed.
        """
        if not folder:
            return self
        if self.variant is None:
            raise ConfigError(f"pretrained = {folder!r}: the recipe {self.name!r} starts from no folder of weights; leave it out")
        return self.variant(folder)

    @property
    def defaults(self) -> dict[str, Any]:
        """The recipe's TOML."""
        return dict(_defaults_of(self.name))


@cache
def _defaults_of(name: str) -> dict[str, Any]:
    """Return the settings in a recipe's TOML."""
    return tomllib.loads(resources.files("dpkfc.recipes").joinpath(f"{name}.toml").read_text("utf-8"))


def image_recipe(
    *,
    name: str,
    title: str,
    pixels: Callable[[str | None], Pixels],
    build: Callable[[], nn.Module],
    image_shape: tuple[int, int, int],
    num_classes: int,
    normalisation: Normalisation,
) -> Recipe:
    """A recipe on images of shape (height, width, channels), normalised by public constants."""
    height, width, channels = image_shape
    constants = f"mean {list(normalisation.mean)}, std {list(normalisation.std)}, scale {normalisation.scale:g}"

    def load(config: RunConfig) -> ExampleSet:
        return pixels(config.data_dir or None).check(title, image_shape, num_classes).tensors(normalisation)

    return Recipe(
        name=name,
        title=title,
        load=load,
        build=build,
        input_shape=(channels, height, width),
        num_classes=num_classes,
        constants={"normalisation": (constants, normalisation.origin)},
    )
