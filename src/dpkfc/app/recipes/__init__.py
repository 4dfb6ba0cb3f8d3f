"""One recipe: data, a model, public constants and defaults.

The defaults of the recipe NAME are settings in NAME.toml, beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.app.datasets import (
    Examples,
    ExampleSet,
    Normalisation,
    Pixels,
    split_off_validation,
)
from dpkfc.app.models import seeded
from dpkfc.app.owndata import Records
from dpkfc.app.settings import ConfigError, RunConfig, tomllib
from dpkfc.config import Plan
from dpkfc.curvature.probes import Probe
from dpkfc.features import JoinedFeatures, build_features
from dpkfc.gradients.state import evaluation_mode
from dpkfc.privacy.ledger import Ledger

# --------------------------------------------------------------------------------------------------
# The task of a recipe: loss of a batch, and score and mean loss of held-out examples.


@dataclass(frozen=True)
class Judged:
    """Score and mean loss of a model on held-out examples.

    Attributes:
        accuracy: the score of the task, 1 for a perfect model; for classes the fraction of right
            answers.
        loss: mean loss.
    """

    accuracy: float
    loss: float


def cross_entropy(model: nn.Module, batch: Examples) -> Tensor:
    """Return the per-example losses `[B]` of a batch (inputs `[B, ...]`, labels `[B]`).

    An example whose label is no class has loss 0: a private label must not end a run.
    """
    inputs, labels = batch
    outputs = model(inputs)
    known = _known_labels(labels, outputs.shape[1])
    return functional.cross_entropy(outputs, known, reduction="none", ignore_index=_NO_CLASS)


_NO_CLASS = -100


def _known_labels(labels: Tensor, classes: int) -> Tensor:
    """Return labels with `_NO_CLASS` where one is no class; shares of classes stay."""
    if labels.is_floating_point():
        return labels
    labels = labels.long()
    is_known = (labels >= 0) & (labels < classes)
    return labels.where(is_known, _NO_CLASS)


def squared_error(model: nn.Module, batch: Examples) -> Tensor:
    """Return half the squared error `[B]` of a model with one output for targets `[B]`.

    An example whose target is NaN has loss 0: a private target must not end a run.
    """
    inputs, targets = batch
    is_known = ~targets.isnan()
    errors = (model(inputs).squeeze(1) - targets.nan_to_num()) * is_known
    return 0.5 * errors.square()


@torch.no_grad()
def model_outputs(model: nn.Module, inputs: Tensor, chunk: int = 250) -> Iterator[Tensor]:
    """Yield outputs of inputs `[N, ...]` in evaluation mode, and restore all modes at the end.

    Args:
        model: on any device.
        inputs: on any device.
        chunk: inputs of a forward pass, so that activations fit the caches of a core.
    """
    device = next(model.parameters()).device
    with evaluation_mode(model):
        for part in inputs.split(chunk):
            yield model(part.to(device))


def evaluate(model: nn.Module, examples: Examples, chunk: int = 250) -> Judged:
    """Return accuracy and mean cross-entropy, and restore the model's mode afterwards.

    Examples whose label is no class are left out.

    Args:
        model: on any device.
        examples: inputs `[N, ...]` and labels `[N]`.
        chunk: examples of a forward pass.
    """
    right = 0
    total = 0
    loss = 0.0
    outputs = model_outputs(model, examples[0], chunk)
    for output, batch in zip(outputs, examples[1].split(chunk), strict=True):
        labels = _known_labels(batch.to(output.device), output.shape[1])
        right += int((output.argmax(1) == labels).sum())
        total += int((labels != _NO_CLASS).sum())
        losses = functional.cross_entropy(output, labels, reduction="sum", ignore_index=_NO_CLASS)
        loss += float(losses)
    total = max(1, total)
    return Judged(right / total, loss / total)


@dataclass(frozen=True)
class ClassScore:
    """How well a model knows one class, on held-out examples.

    Attributes:
        label: of the class.
        examples: held-out examples of the class.
        recall: fraction of them that the model gives this label; None without examples.
        precision: fraction of the examples with this answer that are of the class; None where the
            model gives no such answer.
    """

    label: int
    examples: int
    recall: float | None
    precision: float | None


def score_classes(model: nn.Module, examples: Examples) -> list[ClassScore]:
    """Return recall and precision of every class, and restore the model's mode afterwards.

    Args:
        model: on any device, with one output a class.
        examples: inputs `[N, ...]` and labels `[N]`.
    """
    answers = []
    count = 0
    for output in model_outputs(model, examples[0]):
        count = output.shape[1]
        answers.append(output.argmax(1).cpu())
    labels = _known_labels(examples[1].cpu(), count)
    given = torch.cat(answers)[labels != _NO_CLASS]
    labels = labels[labels != _NO_CLASS]
    scores = []
    for label in range(count):
        of_class = int((labels == label).sum())
        answered = int((given == label).sum())
        right = int(((labels == label) & (given == label)).sum())
        score = ClassScore(
            label=label,
            examples=of_class,
            recall=right / of_class if of_class else None,
            precision=right / answered if answered else None,
        )
        scores.append(score)
    return scores


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss, and a score of held-out examples.

    Attributes:
        loss: maps model and batch to per-example losses `[B]`.
        judge: maps model and held-out examples to score and mean loss.
        score: name of the score, which is 1 for a perfect model.
        mean_loss: name of the mean loss.
        also: more figures that follow from score and mean loss, by name.
        classes: maps model and held-out examples to the scores of classes; None without classes.
    """

    loss: Callable[[nn.Module, Examples], Tensor] = cross_entropy
    judge: Callable[[nn.Module, Examples], Judged] = evaluate
    score: str = "accuracy"
    mean_loss: str = "mean loss"
    also: Callable[[Judged], dict[str, float]] | None = None
    classes: Callable[[nn.Module, Examples], list[ClassScore]] | None = None

    def figures(self, score: float | None, loss: float | None) -> dict[str, float | None]:
        """Return score, mean loss and what follows from them, by name."""
        return {self.score: score, self.mean_loss: loss, **self.further(score, loss)}

    def further(self, score: float | None, loss: float | None) -> dict[str, float]:
        """Return the figures that follow from score and mean loss, by name."""
        if self.also is None or score is None or loss is None:
            return {}
        return self.also(Judged(score, loss))


CLASSIFICATION = Objective(classes=score_classes)


# --------------------------------------------------------------------------------------------------
# Smoke runs: a few steps on a slice of the data, to see that files, model, method and report go
# together.
#
# The slice is drawn by a public seed and the plan is calibrated for it, so the ε of a smoke run is
# valid for the examples in it. Its accuracy says nothing.

_MOST = {
    "steps": 3,
    "expected_batch_size": 16,
    "probe_size": 16,
    "every": 2,
    "augmentations": 2,
    "validation_size": 64,
    "gep_rank": 8,
    "pretrain_epochs": 1,
    "schedule_steps": 3,
    "warmup_steps": 1,
}
_MOST_HEAVY = {**_MOST, "expected_batch_size": 4, "probe_size": 4, "validation_size": 16}
# Examples of a training and of a test split.
_EXAMPLES = (320, 128)
_EXAMPLES_HEAVY = (80, 16)


def cap_for_smoke(config: RunConfig, *, heavy: bool = False) -> RunConfig:
    """Return the settings with no number larger than a smoke run needs.

    Args:
        config: settings of a run of the usual size.
        heavy: whether the model is slow, so that the smoke run takes fewer examples.
    """
    capped: dict[str, Any] = {}
    for name, most in (_MOST_HEAVY if heavy else _MOST).items():
        capped[name] = min(getattr(config, name), most)
    capped["steps"] = capped["steps"] or _MOST["steps"]
    if not config.accountant and config.sampler != "shuffle":
        # PLD takes longer.
        capped["accountant"] = "rdp"
    return replace(config, **capped)


def slice_for_smoke(data: ExampleSet, seed: int, *, heavy: bool = False) -> ExampleSet:
    """Return a few hundred examples of each split, or a few dozen, by a public permutation."""
    train_count, test_count = _EXAMPLES_HEAVY if heavy else _EXAMPLES

    def cut(split: str, examples: Examples) -> Examples:
        rows = _rows(examples, train_count if split == "training" else test_count, seed)
        return examples[0][rows], examples[1][rows]

    rows = _rows(data.train, train_count, seed)
    units = None if data.units is None else data.units[rows]
    return data.map_splits(cut, units=units, source=f"{data.source}, a slice of {len(rows)}")


def _rows(examples: Examples, count: int, seed: int) -> Tensor:
    generator = np.random.Generator(np.random.PCG64(seed))
    order = generator.permutation(len(examples[1]))
    return torch.from_numpy(np.sort(order[:count]))


# --------------------------------------------------------------------------------------------------


# Inputs of a forward pass of features.
_FEATURE_CHUNK = 100


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
    for chunk in track(inputs.split(_FEATURE_CHUNK), f"features, {name}", transient=True):
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
        heavy: whether an example takes a tenth of a second or more, so that smoke runs take few.
        classes: names of the labels; empty where they have none.
        unit: what ε protects: an example, or a person with several records.
        max_records_per_unit: most records of one unit that count in a step.
        read: maps another file of the same form to its records, for predictions. Of a folder of
            images it may also take a table of labels.
        answer: maps outputs `[N, ...]` to the columns of a file of predictions.
        schema: what is public of a user's own data, as TOML.
        columns: name, kind, bounds and an example of each of its columns, from the schema.
        reason: why its defaults name the method that they name.
        private_bounds: number of columns whose bounds a release decides.
        find_bounds: maps examples, plan and ledger to the schema with bounds, as TOML; None where
            all bounds are known.
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
    heavy: bool = False
    classes: tuple[str, ...] = ()
    unit: str = "example"
    max_records_per_unit: int | None = None
    read: Callable[..., Records] | None = None
    answer: Callable[[Tensor], dict[str, list[str]]] | None = None
    schema: str = ""
    columns: tuple[tuple[str, str, str, str], ...] = ()
    reason: str = ""
    private_bounds: int = 0
    find_bounds: Callable[[ExampleSet, Plan, Ledger], str] | None = None

    def data(self, config: RunConfig, *, is_training: bool = False) -> ExampleSet:
        """Return the tensors of a run, or a slice of them for a smoke run.

        A set with its own validation split gives that split whole where `validation_size` is above
        0.

        Args:
            config: settings.
            is_training: refuse a batch larger than the training split before features are made.

        Raises:
            DatasetError: files are missing or damaged, or the validation split takes everything.
            ConfigError: a vocabulary of private text, or a batch that is too large.
        """
        if config.vocabulary != "hashed":
            raise ConfigError(
                f"vocabulary = {config.vocabulary!r} is refused: fitted on private text it has no "
                "clip or noise, so no ε would hold; leave it out (hashed features)"
            )
        data = self.load(config)
        if config.smoke:
            data = slice_for_smoke(data, config.split_seed, heavy=self.heavy)
        if data.validation is None:
            data = split_off_validation(data, config.validation_size, config.split_seed)
        elif not config.validation_size:
            data = replace(data, validation=None)
        size = config.expected_batch_size
        if is_training and size > data.size:
            raise ConfigError(
                f"expected_batch_size = {size} is more than the {data.size} examples; choose at"
                f" most {data.size}"
            )
        return _map_examples(data, self.features) if self.features else data

    def model(self, seed: int) -> nn.Module:
        """Return the model with initial weights of a public seed."""
        return seeded(self.build, seed)

    def starting_from(self, folder: str) -> Recipe:
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
        return self.variant(folder)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The content of the recipe's TOML."""
        return read_defaults(self.name)


@cache
def read_defaults(name: str) -> Mapping[str, Any]:
    """Return the defaults of a recipe: the content of NAME.toml beside this file."""
    file = resources.files("dpkfc.app.recipes").joinpath(f"{name}.toml")
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
        images = pixels(config.data_dir or None)
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
