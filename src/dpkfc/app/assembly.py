"""A run before its first step, and its augmentation, optimizer and learning rate from settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from dpkfc.app.count_forms import CountForm
from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.optimizers import SGD, AdamW
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig
from dpkfc.app.toml import ConfigError
from dpkfc.config import Plan
from dpkfc.data.augment import Augment, horizontal_flip, random_crop, reflect_pad_crop_flip
from dpkfc.early_stopping import EarlyStopping, PrivateEarlyStopping
from dpkfc.features import AdditiveModel

# Features that are kept for all steps: a gigabyte in float32.
_KEPT_ENTRIES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything a run needs before its first step.

    Attributes:
        config: settings.
        recipe: the task.
        data: examples.
        model: on its device, with its initial weights.
        plan: calibrated for the training set.
        start: where the initial weights come from, if not from the seed alone.
        stopping: ends the run early, None for no early end.
        counts: how test rows are counted for noisy scores; None for scores without noise.
        canaries: that train along with the released model, and that the plan counts.
    """

    config: RunConfig
    recipe: Recipe
    data: ExampleSet
    model: nn.Module
    plan: Plan
    start: str = ""
    stopping: EarlyStopping | PrivateEarlyStopping | None = None
    counts: CountForm | None = None
    canaries: int = 0

    def training_parts(self) -> tuple[nn.Module, Examples]:
        """Return what a session trains, and its examples.

        They are the head of an additive model and features of all rows, where these fit into memory
        and a row is read more than once on average. The weights of the head are the model's.
        """
        model, (rows, targets) = self.model, self.data.train
        kind = self.config.preconditioner.preconditioner
        # K-FAC draws its rows in the form of the file.
        if not isinstance(model, AdditiveModel) or kind not in ("none", "moments"):
            return model, self.data.train
        last = model[1]
        assert isinstance(last, nn.Linear)
        plan = self.plan
        is_read_often = plan.steps * plan.expected_batch_size > plan.dataset_size
        if not is_read_often or len(rows) * last.in_features > _KEPT_ENTRIES:
            return model, self.data.train
        head, features = model.split_off_features(rows)
        return head, (features, targets)

    @property
    def evaluation_examples(self) -> Examples:
        """Return the examples that the run is judged on."""
        if self.config.run.eval_on == "validation" and self.data.validation:
            return self.data.validation
        return self.data.test


_AUGMENTS = {
    "reflect-pad-crop-flip": reflect_pad_crop_flip,
    "random-crop": random_crop,
    "horizontal-flip": horizontal_flip,
}


def make_augment(config: RunConfig, input_shape: tuple[int, ...]) -> Augment | None:
    """Return the augmentation that the settings name, None where they name none.

    Raises:
        ConfigError: the recipe has no images.
    """
    data = config.data
    if not data.augment:
        return None
    if len(input_shape) != 3:
        raise ConfigError(
            f"augment = {data.augment!r} is for images; the recipe {config.run.recipe!r} has none: "
            "leave it out"
        )
    return _AUGMENTS[data.augment]()


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD, or Adam with decoupled weight decay (AdamW).

    With adam-bc or sofim the post-processing computes the step, and SGD without momentum takes it.
    """
    optimizer = config.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer.optimizer == "adam":
        return AdamW(parameters, lr=optimizer.lr, weight_decay=optimizer.weight_decay)
    # Torch adds the decay of SGD to the released gradient, so it passes through the momentum.
    return SGD(
        parameters,
        lr=optimizer.lr,
        momentum=optimizer.momentum if optimizer.optimizer == "sgd" else 0.0,
        weight_decay=optimizer.weight_decay,
        nesterov=optimizer.nesterov,
    )


def learning_rate(config: RunConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step (from 0).

    A linear warm-up comes first, then a constant rate, or one that falls to zero, linearly or as a
    cosine. The rate follows from public numbers, so a resumed run takes up where it was.

    Raises:
        ConfigError: warm-up and schedule are longer than the plan.
    """
    optimizer = config.optimizer
    length = optimizer.schedule_steps or steps
    longest = max(length, optimizer.warmup_steps)
    if longest > steps:
        raise ConfigError(f"a schedule of {longest} steps is longer than the plan of {steps}")
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    done = min(1.0, (step - optimizer.warmup_steps) / max(1, length - optimizer.warmup_steps))
    if optimizer.schedule == "linear":
        return optimizer.lr * (1 - done)
    return optimizer.lr * (0.5 * (1 + math.cos(math.pi * done)))
