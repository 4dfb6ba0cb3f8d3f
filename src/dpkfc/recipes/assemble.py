"""From settings to the values of a run: preconditioner, plan and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.curvature import KFAC, FeatureNoise, PinkNoise, PublicData, WhiteNoise
from dpkfc.curvature.probes import Probe
from dpkfc.plan import Plan
from dpkfc.recipes.config import ConfigError, RunConfig

OwnProbe = Callable[[RunConfig], Probe]

__all__ = ["kfac", "make_optimizer", "make_plan", "privacy_config"]


def kfac(
    config: RunConfig, input_shape: tuple[int, ...], inputs: Tensor | None = None, own: OwnProbe | None = None
) -> KFAC:
    """The curvature that the settings describe, whether or not the method uses it.

    Args:
        config: settings.
        input_shape: of one input.
        inputs: public example inputs, instead of the probe that the settings name.
        own: the recipe's own probe, for `probe = "tokens"`.

    Raises:
        ConfigError: settings of the curvature that do not go together.
    """
    rules = tuple(config.layer_rules.replace(",", " ").split())
    try:
        return KFAC(
            probe=PublicData(inputs, provenance="example inputs")
            if inputs is not None
            else _probe(config, input_shape, own),
            probe_size=config.probe_size,
            labels=config.labels,
            sides=config.sides,
            damping=config.damping,
            damping_mode=config.damping_mode,
            gamma=config.gamma,
            exponent=config.exponent,
            scale=config.scale,
            every=config.every,
            sharing=config.sharing,
            max_factor_size=config.max_factor_size,
            oversize=config.oversize,
            max_rank=config.max_rank or None,
            layer_rules=rules or None,
            seed=config.seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _probe(config: RunConfig, input_shape: tuple[int, ...], own: OwnProbe | None) -> Probe:
    if config.probe == "tokens":
        if own is None:
            raise ConfigError(f"probe = 'tokens' is for text; the recipe {config.recipe!r} takes pink, white or public")
        return own(config)
    if len(input_shape) == 1 and config.probe != "public":
        return FeatureNoise(input_shape[0])
    if config.probe == "pink":
        return PinkNoise(input_shape, power_exponent=config.power_exponent)
    if config.probe == "white":
        return WhiteNoise(input_shape)
    return _public_data(Path(config.public_data), input_shape)


def _public_data(path: Path, input_shape: tuple[int, ...]) -> PublicData:
    """Public examples of a safetensors file with `inputs` `[n, *input_shape]` and, if given, `labels` `[n]`.

    Raises:
        ConfigError: the file cannot be read, or its inputs have another shape.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"public_data {path} cannot be read as safetensors ({error})") from None
    inputs = tensors.get("inputs")
    if inputs is None or tuple(inputs.shape[1:]) != tuple(input_shape):
        found = "no `inputs`" if inputs is None else f"inputs of shape {list(inputs.shape)}"
        expected = ", ".join(map(str, input_shape))
        raise ConfigError(f"public_data {path} holds {found}; expected `inputs` [n, {expected}]")
    return PublicData(inputs, tensors.get("labels"), provenance=f"file {path.name}, declared public by its user")


def privacy_config(config: RunConfig, input_shape: tuple[int, ...], own: OwnProbe | None = None) -> PrivacyConfig:
    """The privacy settings.

    Raises:
        ConfigError: settings that do not go together.
    """
    try:
        return PrivacyConfig(
            expected_batch_size=config.expected_batch_size,
            epochs=None if config.steps else config.epochs,
            steps=config.steps or None,
            max_grad_norm=config.max_grad_norm,
            clipping=config.clipping,
            automatic_gamma=config.automatic_gamma,
            sampler=config.sampler,
            uncertified=config.uncertified,
            accountant=config.accountant or None,
            preconditioner=kfac(config, input_shape, own=own) if config.uses_preconditioner else None,
            max_physical_batch_size="auto" if config.max_physical_batch_size < 0 else config.max_physical_batch_size or None,
            pad_to_multiple=config.pad_to_multiple or None,
            test_mode_seed=config.seed if config.test_mode else None,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def make_plan(
    config: RunConfig, input_shape: tuple[int, ...], dataset_size: int, own: OwnProbe | None = None
) -> Plan:
    """The calibrated plan.

    Raises:
        ConfigError: an impossible target, or settings that do not go together.
    """
    try:
        return privacy_config(config, input_shape, own).calibrate(config.epsilon, config.delta, dataset_size)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, or Adam with decoupled weight decay (AdamW); neither decays inside a clipped gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    # Torch adds the decay of SGD to the released gradient, so it passes through the momentum.
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
