"""A recipe: data, a model, public constants and defaults.

The defaults of the recipe NAME are settings in NAME.toml, in the package of the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.app.datasets.examples import Examples, ExampleSet, split_off_validation
from dpkfc.app.datasets.pixels import Normalisation, Pixels
from dpkfc.app.models import build_seeded
from dpkfc.app.owndata.records import Records
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.pretrained import multiplies_bfloat16
from dpkfc.app.progress import track
from dpkfc.app.recipes.objective import CLASSIFICATION, Objective
from dpkfc.app.recipes.smoke import slice_for_smoke
from dpkfc.app.run_config import RunConfig
from dpkfc.app.toml import ConfigError, tomllib
from dpkfc.config import Plan
from dpkfc.curvature.probes import Probe
from dpkfc.features import JoinedFeatures, build_features
from dpkfc.privacy.ledger import Ledger

# Inputs of a forward pass of features; scattering of twice as many takes a third longer for each.
_FEATURE_CHUNK = 50


@torch.no_grad()
def compute_features(settings: JoinedFeatures, inputs: Tensor, name: str) -> Tensor:
    """Return features `[N, d]` of images in half precision, which halves their memory.

    Args:
        settings: of the features.
        inputs: images `[N, C, H, W]`.
        name: of the images, for the progress bar.
    """
    features = build_features(settings)
    parts = []
    # An encoder in half precision gives the same accuracy (docs/results/scaling.md).
    with torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bfloat16()):
        for chunk in track(inputs.split(_FEATURE_CHUNK), f"features, {name}"):
            parts.append(features(chunk).half())
    return torch.cat(parts)


def _map_examples(data: ExampleSet, settings: JoinedFeatures) -> ExampleSet:
    """Return the features of every split in the place of its images."""

    def change(split: str, examples: Examples) -> Examples:
        images, labels = examples
        return compute_features(settings, images, f"{split} split"), labels

    return data.map_splits(change)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task with everything that is public about it.

    Attributes:
        name: what `--recipe` takes; its TOML of defaults has the same name.
        title: name of the data set for people.
        load: maps settings to the tensors of a training and a test split.
        build: makes the model.
        input_shape: of one input.
        num_classes: number of labels.
        constants: public constants of the preparation: name to (value, where it comes from).
        probe: the recipe's own source of probe inputs, for `source = "tokens"`.
        task: loss and score.
        variant: maps a folder of public weights to the recipe that starts from it.
        features: maps images to the inputs of the model; it needs no data.
        is_whitened: whether inputs have norm 1 and were whitened by public examples, so that C and
            rate of a linear head follow by rule.
        heavy: whether an example takes a tenth of a second or more, so that smoke runs take few.
        classes: names of the labels; empty for labels without names.
        unit: what ε protects: an example, or a person with several records.
        max_records_per_unit: most records of one unit that count in a step.
        read: maps another file of the same form to its records, for predictions. Of a folder of
            images it may also take a table of labels.
        answer: maps outputs `[N, ...]` to the columns of a file of predictions.
        schema: what is public of a user's own data, as TOML.
        public_schema: the same as a value, of a table.
        columns: name, kind, bounds and an example of each of its columns, from the schema.
        reason: why its defaults name the method that they name.
        private_bounds: number of columns whose bounds a release decides.
        find_bounds: maps examples, plan and ledger to the schema with bounds, as TOML; None where
            all bounds are known.
        package: whose folder holds NAME.toml.
    """

    name: str
    title: str
    load: Callable[[RunConfig], ExampleSet]
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    num_classes: int
    constants: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    probe: Callable[[RunConfig], Probe] | None = None
    task: Objective = CLASSIFICATION
    variant: Callable[[str], Recipe] | None = None
    features: JoinedFeatures | None = None
    is_whitened: bool = False
    heavy: bool = False
    classes: tuple[str, ...] = ()
    unit: str = "example"
    max_records_per_unit: int | None = None
    read: Callable[..., Records] | None = None
    answer: Callable[..., dict[str, list[str]]] | None = None
    schema: str = ""
    public_schema: Schema | None = None
    columns: tuple[tuple[str, str, str, str], ...] = ()
    reason: str = ""
    private_bounds: int = 0
    find_bounds: Callable[[ExampleSet, Plan, Ledger], str] | None = None
    package: str = "dpkfc.app.recipes"

    def data(self, config: RunConfig, *, is_training: bool = False) -> ExampleSet:
        """Return the tensors of a run, or a slice of them for a smoke run.

        A set with its own validation split gives that split whole where `validation_size` is above
        0.

        Args:
            config: settings.
            is_training: refuse a batch larger than the training split before features are made; a
                default stands for all examples then (`dpkfc.app.assembly.settle`).

        Raises:
            DatasetError: files are missing or damaged, or the validation split takes everything.
            ConfigError: a vocabulary of private text, or a batch that is too large.
        """
        if config.data.vocabulary != "hashed":
            raise ConfigError(
                f"vocabulary = {config.data.vocabulary!r} is refused: fitted on private text it "
                "has no clip or noise, so no ε would hold; leave it out (hashed features)"
            )
        data = self.load(config)
        if config.run.smoke:
            data = slice_for_smoke(data, config.data.split_seed, heavy=self.heavy)
        if data.validation is None:
            data = split_off_validation(data, config.data.validation_size, config.data.split_seed)
        elif not config.data.validation_size:
            data = replace(data, validation=None)
        size = config.privacy.expected_batch_size
        usual = self.defaults.get("privacy", {}).get("expected_batch_size")
        if is_training and not data.share and size > data.size and size != usual:
            counted = "examples" if data.units is None else "units"
            raise ConfigError(
                f"expected_batch_size = {size} is more than the {data.size} {counted}; choose at"
                f" most {data.size}"
            )
        return _map_examples(data, self.features) if self.features else data

    def model(self, seed: int) -> nn.Module:
        """Return the model with initial weights of a public seed."""
        return build_seeded(self.build, seed)

    def start_from(self, folder: str) -> Recipe:
        """Return the recipe, with public weights from a folder where one is given.

        Raises:
            ConfigError: a folder, and a recipe that does not start from one.
            DatasetError: the folder lacks what is needed.
        """
        if not folder:
            return self
        if self.variant is None:
            raise ConfigError(
                f"pretrained = {folder!r}: the recipe {self.name!r} starts from no folder of"
                " weights; leave it out"
            )
        return replace(self.variant(folder), package=self.package)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The content of the recipe's TOML."""
        return read_defaults(self.name, self.package)


@cache
def read_defaults(name: str, package: str = "dpkfc.app.recipes") -> Mapping[str, Any]:
    """Return the defaults of a recipe: the content of NAME.toml in its package."""
    file = resources.files(package).joinpath(f"{name}.toml")
    return tomllib.loads(file.read_text("utf-8"))


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
    """Return a recipe on images of shape (height, width, channels), normalised by constants."""
    height, width, channels = image_shape
    mean, std = list(normalisation.mean), list(normalisation.std)
    constants = f"mean {mean}, std {std}, scale {normalisation.scale:g}"

    def load(config: RunConfig) -> ExampleSet:
        images = pixels(config.data.data_dir or None)
        return images.check(title, image_shape, num_classes).tensors(normalisation)

    return Recipe(
        name=name,
        title=title,
        load=load,
        build=build,
        input_shape=(channels, height, width),
        num_classes=num_classes,
        constants={"normalisation": (constants, normalisation.origin)},
    )
