"""One recipe: data, a model, public constants and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.app.datasets.formats import Examples, ExampleSet, Normalisation, Pixels, with_validation
from dpkfc.app.models import seeded
from dpkfc.app.settings import ConfigError, RunConfig, tomllib
from dpkfc.curvature.probes import Probe

# --------------------------------------------------------------------------------------------------
# What a recipe minimises and is judged by: loss of a batch, and score and mean loss of held-out
# examples.


@dataclass(frozen=True)
class Judged:
    """How good a model is on held-out examples.

    Attributes:
        accuracy: the score of the task, 1 where it is perfect; for classes the share of right answers.
        loss: mean loss.
    """

    accuracy: float
    loss: float


def cross_entropy(model: nn.Module, batch: Examples) -> Tensor:
    """Per-example losses `[B]` of a batch (inputs `[B, ...]`, labels `[B]`)."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels, reduction="none")


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples, chunk: int = 250) -> Judged:
    """Accuracy and mean cross-entropy; the model's mode is put back afterwards.

    Args:
        model: on any device.
        examples: inputs `[N, ...]` and labels `[N]`.
        chunk: examples a forward pass; what they leave behind then fits the caches of a core.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    right, loss = 0, 0.0
    for inputs, on_cpu in zip(examples[0].split(chunk), examples[1].split(chunk), strict=True):
        output, labels = model(inputs.to(device)), on_cpu.to(device)
        right += int((output.argmax(1) == labels).sum())
        loss += float(functional.cross_entropy(output, labels, reduction="sum"))
    model.train(training)
    return Judged(right / len(examples[1]), loss / len(examples[1]))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is minimised, and what a model is judged by.

    Attributes:
        loss: model and batch to one loss an example `[B]`.
        judge: model and held-out examples to score and mean loss.
        score: what the score is called; it is 1 where a model is perfect, and higher is better.
        mean_loss: what the mean loss is called.
        also: more figures that follow from those two, by name.
    """

    loss: Callable[[nn.Module, Examples], Tensor] = cross_entropy
    judge: Callable[[nn.Module, Examples], Judged] = evaluate
    score: str = "accuracy"
    mean_loss: str = "mean loss"
    also: Callable[[Judged], dict[str, float]] | None = None


CLASSIFICATION = Task()


# --------------------------------------------------------------------------------------------------
# Smoke runs: a few steps on a slice of the data, to see that files, model, method and report go
# together.
#
# The slice is drawn by a public seed and the plan is calibrated for it, so the ε of a smoke run is
# true of the examples in it. Its accuracy says nothing.

_MOST = {"steps": 3, "expected_batch_size": 16, "probe_size": 16, "every": 2, "augmentations": 2, "validation_size": 64}
_MOST |= {"gep_rank": 8, "dp2_phase": 1, "pretrain_epochs": 1, "schedule_steps": 3, "warmup_steps": 1}
_EXAMPLES = {"train": 320, "test": 128}
_MOST_HEAVY = {**_MOST, "expected_batch_size": 4, "probe_size": 4, "validation_size": 16}
_EXAMPLES_HEAVY = {"train": 80, "test": 16}


def capped(config: RunConfig, *, heavy: bool = False) -> RunConfig:
    """The settings with nothing larger than a smoke run needs; those of a smoke run are left as they are.

    Args:
        config: of a run of the usual size.
        heavy: whether the model is slow, so that the smoke run takes fewer examples.
    """
    most_of = _MOST_HEAVY if heavy else _MOST
    least: dict[str, Any] = {name: min(getattr(config, name), most) for name, most in most_of.items()}
    least["steps"] = least["steps"] or _MOST["steps"]
    if not config.accountant and config.sampler != "shuffle":
        least["accountant"] = "rdp"  # PLD takes longer
    return replace(config, **least)


def sliced(data: ExampleSet, seed: int, *, heavy: bool = False) -> ExampleSet:
    """A few hundred examples of each split, or a few dozen for a slow model, by a public permutation."""
    count = _EXAMPLES_HEAVY if heavy else _EXAMPLES
    train, test = _slice(data.train, count["train"], seed), _slice(data.test, count["test"], seed)
    validation = None if data.validation is None else _slice(data.validation, count["test"], seed)
    return replace(
        data, train=train, test=test, validation=validation, source=f"{data.source}, a slice of {len(train[1])}"
    )


def _slice(examples: Examples, count: int, seed: int) -> Examples:
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(examples[1]))[:count]
    rows = torch.from_numpy(np.sort(order))
    return examples[0][rows], examples[1][rows]


# --------------------------------------------------------------------------------------------------


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
    return tomllib.loads(resources.files("dpkfc.app.recipes").joinpath(f"{name}.toml").read_text("utf-8"))


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
