"""From settings to the values of a run: plan, augmentation, optimizer and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from dpkfc.config import PrivacyConfig
from dpkfc.data.augment import Augment, horizontal_flip, random_crop, reflect_pad_crop_flip
from dpkfc.plan import Plan
from dpkfc.postprocess import WeightEMA
from dpkfc.recipes.axes import OwnProbe, kfac, postprocess, preconditioner
from dpkfc.recipes.settings import ConfigError, RunConfig, named_values

__all__ = ["kfac", "learning_rate", "make_augment", "make_optimizer", "make_plan", "privacy_config"]


def privacy_config(
    config: RunConfig,
    input_shape: tuple[int, ...],
    own: OwnProbe | None = None,
    *,
    dataset_size: int = 0,
    private: Any = None,
) -> PrivacyConfig:
    """The privacy settings.

    Raises:
        ConfigError: settings that do not go together.
    """
    try:
        steps = config.steps or max(1, round(config.epochs * dataset_size / config.expected_batch_size))
        chosen = preconditioner(config, input_shape, steps, own, private)
        return PrivacyConfig(
            expected_batch_size=config.expected_batch_size,
            epochs=None if config.steps else config.epochs,
            steps=config.steps or None,
            max_grad_norm=config.max_grad_norm,
            clipping=getattr(chosen, "clipping", config.clipping),
            readout=config.readout,
            postprocess=postprocess(config),
            weight_average=WeightEMA(config.weight_average) if config.weight_average else None,
            automatic_gamma=config.automatic_gamma,
            noise=config.noise,
            augmentations=config.augmentations,
            sampler=config.sampler,
            max_batch_size=config.max_batch_size or None,
            uncertified=config.uncertified,
            accountant=config.accountant or None,
            preconditioner=chosen,
            max_physical_batch_size="auto" if config.max_physical_batch_size < 0 else config.max_physical_batch_size or None,
            norm_methods=named_values("norm_methods", config.norm_methods),
            pad_to_multiple=config.pad_to_multiple or None,
            test_mode_seed=config.seed if config.test_mode else None,
        )
    except OverflowError:
        raise ConfigError(f"epochs = {config.epochs} are more steps than can be counted; choose fewer") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def make_plan(
    config: RunConfig, input_shape: tuple[int, ...], dataset_size: int, own: OwnProbe | None = None, private: Any = None
) -> Plan:
    """The calibrated plan.

    Raises:
        ConfigError: an impossible target, settings that do not go together, or a structure that is still to be measured.
    """
    if config.structure == "auto":
        raise ConfigError("structure = 'auto' is measured when a run of `dpkfc train` begins; leave it out here")
    try:
        made = privacy_config(config, input_shape, own, dataset_size=dataset_size, private=private)
        if config.noise_multiplier:
            return made.with_noise(config.noise_multiplier, config.delta, dataset_size)
        return made.calibrate(config.epsilon, config.delta, dataset_size)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def make_augment(config: RunConfig, input_shape: tuple[int, ...]) -> Augment | None:
    """What changes every view of an example, None where nothing does.

    Raises:
        ConfigError: it is for images, and the recipe has none.
    """
    if not config.augment:
        return None
    if len(input_shape) != 3:
        raise ConfigError(f"augment = {config.augment!r} is for images; the recipe {config.recipe!r} has none: leave it out")
    makers = {"reflect-pad-crop-flip": reflect_pad_crop_flip, "random-crop": random_crop, "horizontal-flip": horizontal_flip}
    return makers[config.augment]()


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """SGD, Adam with decoupled weight decay (AdamW), or plain SGD for steps that post-processing makes (adam-bc, sofim)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    momentum = config.momentum if config.optimizer == "sgd" else 0.0
    # Torch adds the decay of SGD to the released gradient, so it passes through the momentum.
    return torch.optim.SGD(
        parameters, lr=config.lr, momentum=momentum, weight_decay=config.weight_decay, nesterov=config.nesterov
    )


def learning_rate(config: RunConfig, step: int, steps: int) -> float:
    """The learning rate of a step (from 0): a linear warm-up, then constant, or linear or cosine down to zero.

    A function of public numbers, so a resumed run takes up where it was.

    Raises:
        ConfigError: warm-up and schedule are longer than the plan.
    """
    length = config.schedule_steps or steps
    if max(length, config.warmup_steps) > steps:
        raise ConfigError(f"a schedule of {max(length, config.warmup_steps)} steps is longer than the plan of {steps}")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, length - config.warmup_steps))
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))
