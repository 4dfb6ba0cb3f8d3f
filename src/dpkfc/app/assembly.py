"""From settings to the values of a run: plan, augmentation, optimizer and its learning rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.app.settings import RECIPE_DEFAULTS, ConfigError, RunConfig, named_values
from dpkfc.config import Plan, PrivacyConfig
from dpkfc.curvature.adadps import AdaDPS
from dpkfc.curvature.base import Preconditioner
from dpkfc.curvature.diagnostics import PrivateOracle
from dpkfc.curvature.dp2 import DP2
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.ngd import NGD
from dpkfc.curvature.probes import DeadLeaves, FeatureNoise, PinkNoise, Probe, PublicData, Refined, WhiteNoise
from dpkfc.data.augment import Augment, horizontal_flip, random_crop, reflect_pad_crop_flip
from dpkfc.postprocess.filters import EMA, DiSK, LowPass
from dpkfc.postprocess.optimizers import SOFIM, AdamBC, WeightEMA
from dpkfc.postprocess.protocol import PostProcess
from dpkfc.report.costs import default_cache, measure_structure

# --------------------------------------------------------------------------------------------------
# From settings to the values on the axes: preconditioner, post-processing, and where curvature
# comes from.

OwnProbe = Callable[[RunConfig], Probe]


def kfac(
    config: RunConfig,
    input_shape: tuple[int, ...],
    inputs: Tensor | None = None,
    own: OwnProbe | None = None,
    private: Any = None,
) -> KFAC:
    """The K-FAC curvature that the settings describe, whether or not the method uses it.

    Args:
        config: settings.
        input_shape: of one input.
        inputs: public example inputs, instead of the source that the settings name.
        own: the recipe's own probe, for `source = "tokens"`.
        private: the private training set, for `source = "private-oracle"`.

    Raises:
        ConfigError: settings of the curvature that do not go together.
    """
    rules = tuple(config.layer_rules.replace(",", " ").split())
    given = None if inputs is None else PublicData(inputs, provenance="example inputs")
    other = config.output_source if given is None else ""
    try:
        return KFAC(
            probe=given or _main_probe(config, input_shape, own, private),
            output_probe=_probe(config, other, input_shape, own, private) if other else None,
            control=config.control,
            probe_size=config.probe_size,
            labels=config.labels,
            likelihood=config.likelihood,
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
            ranks=_ranks(config),
            tail_mass=config.tail_mass,
            decay=config.factor_decay,
            later_probe_size=config.later_probe_size or None,
            drift=config.factor_drift,
            layer_rules=rules or None,
            seed=config.seed,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _ranks(config: RunConfig) -> dict[str, int]:
    named = named_values("ranks", config.ranks)
    wrong = [f"{name}={value}" for name, value in named.items() if not value.isdecimal()]
    if wrong:
        raise ConfigError(f"ranks takes whole numbers, 0 for all eigenpairs; got {wrong[0]!r}")
    return {name: int(value) for name, value in named.items()}


def preconditioner(
    config: RunConfig, input_shape: tuple[int, ...], steps: int, own: OwnProbe | None = None, private: Any = None
) -> Preconditioner | None:
    """What stands in `PrivacyConfig.preconditioner`; None for plain coordinates.

    Args:
        config: settings.
        input_shape: of one input.
        steps: of the plan, for schedules.
        own: the recipe's own probe.
        private: the private training set, for an oracle.

    Raises:
        ConfigError: settings that do not go together.
    """
    kind = config.preconditioner
    if kind == "none":
        return None
    if kind == "kfac":
        return kfac(config, input_shape, own=own, private=private)
    if kind == "dp2":
        return DP2(phase=config.dp2_phase, ratio=config.dp2_ratio, corrected=config.dp2_corrected)
    probe = _main_probe(config, input_shape, own, private)
    size = None if config.source == "public" else config.probe_size
    if kind == "adadps":
        return AdaDPS(
            probe=probe, probe_size=size, floor=config.adadps_floor, every=config.every, seed=config.seed,
            batch_size=20 if size is None else min(20, size), likelihood=config.likelihood,
        )  # fmt: skip
    if kind == "ngd":
        return NGD(
            probe=probe, probe_size=size, lambda_safe=config.lambda_safe, lambda_base=config.lambda_base or None, steps=steps,
            every=config.every, order=config.ngd_order, max_factor_size=config.max_factor_size, labels=config.labels,
            seed=config.seed, likelihood=config.likelihood,
        )  # fmt: skip
    return GEP(
        probe=probe, probe_size=size, rank=config.gep_rank, embedding_norm=config.gep_embedding_norm,
        residual_norm=config.gep_residual_norm or None, every=config.every, seed=config.seed, likelihood=config.likelihood,
    )  # fmt: skip


def postprocess(config: RunConfig) -> tuple[PostProcess, ...]:
    """The steps between release and optimizer.

    Raises:
        ConfigError: a setting outside its range.
    """
    try:
        filters: dict[str, Callable[[], PostProcess]] = {
            "disk": lambda: DiSK(config.filter_kappa, config.disk_gamma, momentum_allowed=config.filter_momentum),
            "disk-look-ahead": lambda: DiSK(
                config.filter_kappa, mode="look_ahead", momentum_allowed=config.filter_momentum
            ),
            "storm": lambda: DiSK(config.filter_kappa, mode="storm", momentum_allowed=config.filter_momentum),
            "ema": lambda: EMA(config.filter_kappa, momentum_allowed=config.filter_momentum),
            "doppler": lambda: LowPass.butterworth(2, config.doppler_cutoff, config.filter_momentum),
            "doppler-first-order": lambda: LowPass.first_order(config.filter_kappa, config.filter_momentum),
            "doppler-chebyshev": lambda: LowPass.chebyshev(config.filter_momentum),
        }
        steps = [filters[config.filter]()] if config.filter != "none" else []
        if config.optimizer == "adam-bc":
            steps.append(AdamBC(floor=config.adam_bc_floor or "auto", resolution=config.adam_bc_resolution))
        if config.optimizer == "sofim":
            steps.append(SOFIM(config.sofim_rho, config.sofim_beta, config.sofim_direction))
        return tuple(steps)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _main_probe(config: RunConfig, input_shape: tuple[int, ...], own: OwnProbe | None, private: Any) -> Probe:
    """That of `source`, refined where the settings say so; `output_source` stays as it is drawn."""
    probe = _probe(config, config.source, input_shape, own, private)
    if not config.refine:
        return probe
    if config.source in ("tokens", "private-oracle"):
        raise ConfigError(f"refine moves images, and source = {config.source!r} gives others; leave it out, or take dead-leaves")
    if config.labels == "given":
        raise ConfigError("refine moves images towards classes of its own, so labels = 'given' do not fit them; take 'model'")
    if config.likelihood == "gaussian":
        raise ConfigError("refine moves images towards classes, and likelihood = 'gaussian' has none; leave it out")
    return Refined(probe, steps=config.refine)


def _probe(
    config: RunConfig, source: str, input_shape: tuple[int, ...], own: OwnProbe | None, private: Any
) -> Probe:
    if source == "tokens":
        if own is None:
            raise ConfigError(
                f"source = 'tokens' is for text; the recipe {config.recipe!r} takes pink, dead-leaves, white or public"
            )
        return own(config)
    if source == "private-oracle":
        if private is None:
            raise ConfigError("source = 'private-oracle' needs the private training set: it is for `dpkfc train`")
        return PrivateOracle(private)
    if source == "public":
        path = Path(config.public_data)
        return PublicData(*public_data(path, input_shape), provenance=f"file {path.name}, declared public by its user")
    if len(input_shape) == 1:
        return FeatureNoise(input_shape[0])
    if source == "dead-leaves":
        return DeadLeaves(input_shape, leaves=config.leaves)
    return PinkNoise(input_shape, power_exponent=config.power_exponent) if source == "pink" else WhiteNoise(input_shape)


def public_data(path: Path, input_shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Public examples of a safetensors file with `inputs` `[n, *input_shape]` and, if given, `labels` `[n]`.

    Raises:
        ConfigError: the file cannot be read, its inputs have another shape or are no finite numbers, or its labels are not one
            whole number for each.
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
    _check_values(path, inputs, tensors.get("labels"), images=len(input_shape) > 1)
    return inputs, tensors.get("labels")


def _check_values(path: Path, inputs: Tensor, labels: Tensor | None, *, images: bool) -> None:
    """Raise where a model could not run on them.

    Raises:
        ConfigError: naming the file and what is wrong.
    """
    whole = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if len(inputs) == 0 or (images and not inputs.is_floating_point()) or not bool(torch.isfinite(inputs).all()):
        wanted = "finite floats" if images else "finite numbers"
        raise ConfigError(f"public_data {path}: `inputs` must be {wanted}, one example or more")
    if labels is not None and (labels.shape != inputs.shape[:1] or labels.dtype not in whole):
        found = f"{str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}"
        raise ConfigError(f"public_data {path}: `labels` are {found}; expected a whole number for each of {len(inputs)} inputs")


# --------------------------------------------------------------------------------------------------


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
            clipping=(None if chosen is None else chosen.required_clipping) or config.clipping,
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


# --------------------------------------------------------------------------------------------------
# How the settings of a run were chosen, as its card says it.

_SECTIONS = ("optimizer", "filter", "curvature")
_OTHERS = {"epochs", "steps", "expected_batch_size", "max_grad_norm", "clipping", "automatic_gamma", "augmentations", "augment"}
_OTHERS |= {"pretrain_epochs", "pretrain_lr"}
_KIND = ("recipe", "method", "optimizer", "smoke", "public_data", "validation_size", "eval_on")  # what the recipe's follow from
_FIRST = ("lr", "max_grad_norm", "damping")
_MOST = 8


def how_chosen(config: RunConfig) -> str:
    """What was stated, or else which settings are not the recipe's own.

    Budget, sampler and what only decides speed are no matter of a search and are left out. A learning rate that the recipe
    itself derives from other settings is its own.
    """
    try:
        own = _recipe_of(config, _KIND)
        names = _given(config, own) if config.chosen_by == own.chosen_by else []
    except ConfigError:  # the recipe's own do not go together with this method or optimizer
        names = ["settings"] if config.chosen_by == RECIPE_DEFAULTS else []
    if not names:
        return config.chosen_by
    listed = ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
    return f"{listed}: given, not stated how they were found; not covered by ε. All others: {config.chosen_by}"


def _given(config: RunConfig, own: RunConfig) -> list[str]:
    """Settings that can be searched and are not what the recipe has for this method."""
    fields = dataclasses.fields(RunConfig)
    found = [f.name for f in fields if f.metadata["section"] in _SECTIONS or f.name in _OTHERS]
    found = [name for name in found if name not in _KIND and getattr(config, name) != getattr(own, name)]
    if "lr" in found and _recipe_of(config, tuple(f.name for f in fields if f.name not in ("lr", "out"))).lr == config.lr:
        found.remove("lr")
    if _recipe_of(config, ("recipe", "method", "public_data")).optimizer != config.optimizer:
        found.append("optimizer")
    return sorted(found, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))


def _recipe_of(config: RunConfig, names: tuple[str, ...]) -> RunConfig:
    """The recipe with these settings of a run."""
    return run_config({name: getattr(config, name) for name in names})


# --------------------------------------------------------------------------------------------------
# `structure = "auto"`: sides, norm methods and the interval of refreshes by what they cost on this
# machine.
#
# What is measured becomes settings before the plan is made (`structure = "measured"`, with `ranks`,
# `norm_methods` and `every`), so that the plan's hash holds it, a run that goes on keeps it, and
# its config.toml replays it anywhere.


def structured(config: RunConfig) -> RunConfig:
    """The settings with what "auto" comes to on this machine; as they are where they do not ask for it.

    Nothing but the probe and the initial weights is looked at. Times of layers are kept in the user's cache folder.

    Raises:
        ConfigError: a method without factors, curvature of private data, or choices that were made already.
    """
    if config.structure != "auto":
        return config
    if config.preconditioner != "kfac":
        raise ConfigError(f"structure = 'auto' chooses sides of K-FAC, and method = {config.method!r} has none; leave it out")
    if "private-oracle" in (config.source, config.output_source):
        raise ConfigError("structure = 'auto' would be measured on private data with source = 'private-oracle'; leave it out")
    if config.ranks or config.norm_methods:
        raise ConfigError(
            "structure = 'auto' chooses ranks and norm_methods itself, and both would be lost; leave those out (--ranks '' "
            "--norm-methods ''), or keep them and leave structure out"
        )
    if config.threads:
        torch.set_num_threads(config.threads)
    recipe = find_recipe(config.recipe).starting_from(config.pretrained)
    try:
        model = recipe.model(config.seed).to(torch.device(config.device))
        curvature = kfac(config, recipe.input_shape, own=recipe.probe)
        rows = config.expected_batch_size * config.augmentations
        found = measure_structure(model, curvature, expected_batch_size=rows, cache=default_cache())
    except ConfigError:
        raise
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"structure = 'auto' could not be measured: {str(error).splitlines()[0]}") from error
    return replace(
        config, structure="measured", every=found.every, ranks=_written(found.ranks), norm_methods=_written(found.norm_methods)
    )


def as_asked(measured: RunConfig, config: RunConfig) -> RunConfig:
    """The settings of a run with what was measured taken out again, where these settings leave it to the machine."""
    if config.structure != "auto" or measured.structure != "measured":
        return measured
    left = {name: getattr(config, name) for name in ("structure", "every", "ranks", "norm_methods")}
    return replace(measured, **left)


def told(config: RunConfig) -> str:
    """What was measured, in one line for the user; empty where nothing was."""
    if config.structure != "measured":
        return ""
    parts = [
        f"eigenpairs kept, 0 for all: {config.ranks}" if config.ranks else "no side has a choice",
        f"norms by {config.norm_methods}" if config.norm_methods else "norms by the rule",
        f"refreshes every {config.every} steps",
    ]
    return "measured on this machine: " + "; ".join(parts)


def _written(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
