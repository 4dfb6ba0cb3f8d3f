"""From settings to the values of a run: plan, augmentation, optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.optimizers import SGD, AdamW
from dpkfc.app.owndata.bounds import norm_of
from dpkfc.app.private_scores import PURPOSE as SCORES
from dpkfc.app.private_scores import CountForm
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.settings import RECIPE_DEFAULTS, SECTION_OF, RunConfig, library_values
from dpkfc.app.toml import ConfigError
from dpkfc.config import Plan, PrivacyConfig, count_steps
from dpkfc.convex import convex_clip, gaussian_noise, moments_release, whitened_clip
from dpkfc.curvature.base import Preconditioner
from dpkfc.curvature.diagonal import AdaDPS
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.ngd import NGD
from dpkfc.curvature.noise_probes import DeadLeaves, FeatureNoise, PinkNoise, WhiteNoise
from dpkfc.curvature.private_oracle import PrivateOracle
from dpkfc.curvature.probes import Probe, PublicData
from dpkfc.curvature.refined import Refined
from dpkfc.curvature.second_moments import SecondMoments
from dpkfc.data.augment import Augment, horizontal_flip, random_crop, reflect_pad_crop_flip
from dpkfc.early_stopping import NORM, PURPOSE, EarlyStopping, PrivateEarlyStopping
from dpkfc.features import AdditiveModel
from dpkfc.postprocess import EMA, SOFIM, AdamBC, DiSK, LowPass
from dpkfc.postprocess.protocol import PostProcess
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.privacy.calibration import share_noise
from dpkfc.privacy.extra_releases import ExtraRelease

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


# --------------------------------------------------------------------------------------------------
# Preconditioner, post-processing, and where curvature comes from.

RecipeProbe = Callable[[RunConfig], Probe]


@contextmanager
def library_errors() -> Iterator[None]:
    """Raise what the library says about a setting as a `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def make_kfac(
    config: RunConfig,
    input_shape: tuple[int, ...],
    inputs: Tensor | None = None,
    recipe_probe: RecipeProbe | None = None,
    private: Any = None,
) -> KFAC:
    """Return the K-FAC curvature that the settings describe, whether or not the method uses it.

    Args:
        config: settings.
        input_shape: of one input.
        inputs: public example inputs, instead of the source that the settings name.
        recipe_probe: the recipe's own probe, for `source = "tokens"`.
        private: the private training set, for `source = "private-oracle"`.

    Raises:
        ConfigError: settings of the curvature that do not go together.
    """
    output_probe = None
    with library_errors():
        if inputs is not None:
            probe: Probe = PublicData(inputs, provenance="example inputs")
        else:
            probe = _main_probe(config, input_shape, recipe_probe, private)
            if config.preconditioner.output_source:
                output_probe = _make_probe(
                    config, config.preconditioner.output_source, input_shape, recipe_probe, private
                )
        values = library_values(config, KFAC)
        return KFAC(probe=probe, output_probe=output_probe, seed=config.run.seed, **values)


def make_preconditioner(
    config: RunConfig,
    input_shape: tuple[int, ...],
    steps: int,
    recipe_probe: RecipeProbe | None = None,
    private: Any = None,
) -> Preconditioner | None:
    """Return the preconditioner of the method, None for a method without one.

    Args:
        config: settings.
        input_shape: of one input.
        steps: of the plan, for schedules.
        recipe_probe: the recipe's own probe.
        private: the private training set, for an oracle.

    Raises:
        ConfigError: settings that do not go together.
    """
    preconditioner = config.preconditioner
    kind = preconditioner.preconditioner
    if kind == "none":
        return None
    if kind == "moments":
        return SecondMoments()
    if kind == "kfac":
        return make_kfac(config, input_shape, recipe_probe=recipe_probe, private=private)
    probe = _main_probe(config, input_shape, recipe_probe, private)
    # A file of public data is used whole.
    size = None if preconditioner.source == "public" else preconditioner.probe_size
    common: dict[str, Any] = {"probe": probe, "probe_size": size, "seed": config.run.seed}
    if kind == "adadps":
        batch_size = 20 if size is None else min(20, size)
        return AdaDPS(batch_size=batch_size, **common, **library_values(config, AdaDPS))
    if kind == "ngd":
        return NGD(steps=steps, **common, **library_values(config, NGD))
    return GEP(**common, **library_values(config, GEP))


def make_postprocess(config: RunConfig) -> tuple[PostProcess, ...]:
    """Return the steps between release and optimizer.

    Raises:
        ConfigError: a setting outside its range.
    """
    steps: list[PostProcess] = []
    with library_errors():
        if config.postprocess.filter != "none":
            steps.append(_make_filter(config))
        if config.optimizer.optimizer == "adam-bc":
            steps.append(AdamBC(**library_values(config, AdamBC)))
        if config.optimizer.optimizer == "sofim":
            steps.append(SOFIM(**library_values(config, SOFIM)))
    return tuple(steps)


def _make_filter(config: RunConfig) -> PostProcess:
    """Return the filter that the settings name."""
    postprocess = config.postprocess
    kappa = postprocess.filter_kappa
    momentum: dict[str, Any] = {"momentum_allowed": postprocess.filter_momentum}
    filters: dict[str, Callable[[], PostProcess]] = {
        "disk": lambda: DiSK(kappa, postprocess.disk_gamma, **momentum),
        "disk-look-ahead": lambda: DiSK(kappa, mode="look_ahead", **momentum),
        "storm": lambda: DiSK(kappa, mode="storm", **momentum),
        "ema": lambda: EMA(kappa, **momentum),
        "doppler": lambda: LowPass.butterworth(2, postprocess.doppler_cutoff, **momentum),
        "doppler-first-order": lambda: LowPass.first_order(kappa, **momentum),
        "doppler-chebyshev": lambda: LowPass.chebyshev(**momentum),
    }
    return filters[postprocess.filter]()


def _main_probe(
    config: RunConfig,
    input_shape: tuple[int, ...],
    recipe_probe: RecipeProbe | None,
    private: Any,
) -> Probe:
    """Return the probe of `source`, refined where the settings say so."""
    preconditioner = config.preconditioner
    probe = _make_probe(config, preconditioner.source, input_shape, recipe_probe, private)
    if not preconditioner.refine:
        return probe
    _check_refine(config)
    return Refined(probe, steps=preconditioner.refine)


def _check_refine(config: RunConfig) -> None:
    preconditioner = config.preconditioner
    if preconditioner.source in ("tokens", "private-oracle"):
        raise ConfigError(
            f"refine moves images, and source = {preconditioner.source!r} gives others; "
            "leave it out, or take dead-leaves"
        )
    if preconditioner.labels == "given":
        raise ConfigError(
            "refine moves images to classes of its own, and labels = 'given' do not fit; take "
            "'model'"
        )
    if preconditioner.likelihood == "gaussian":
        raise ConfigError(
            "refine moves images towards classes, and likelihood = 'gaussian' has none; leave it "
            "out"
        )


NOISE_PROBES = {"pink": PinkNoise, "dead-leaves": DeadLeaves, "white": WhiteNoise}


def _make_probe(
    config: RunConfig,
    source: str,
    input_shape: tuple[int, ...],
    recipe_probe: RecipeProbe | None,
    private: Any,
) -> Probe:
    """Return the probe of a source; every kind of noise is `FeatureNoise` for inputs `[d]`."""
    if source == "tokens":
        if recipe_probe is None:
            raise ConfigError(
                f"source = 'tokens' is for text; the recipe {config.run.recipe!r} takes pink, "
                "dead-leaves, white or public"
            )
        return recipe_probe(config)
    if source == "private-oracle":
        if private is None:
            raise ConfigError(
                "source = 'private-oracle' needs the private training set; use it with `dpkfc"
                " train`"
            )
        return PrivateOracle(private)
    if source == "public":
        path = Path(config.data.public_data)
        inputs, labels = read_public_data(path, input_shape)
        return PublicData(
            inputs, labels, provenance=f"file {path.name}, declared public by its user"
        )
    if len(input_shape) == 1:
        return FeatureNoise(input_shape[0])
    kind = NOISE_PROBES[source]
    return kind(input_shape, **library_values(config, kind))


def read_public_data(
    path: Path, input_shape: tuple[int, ...], setting: str = "public_data"
) -> tuple[Tensor, Tensor | None]:
    """Return public examples: `inputs` `[n, *input_shape]` and, if given, `labels` `[n]`.

    Args:
        path: a safetensors file.
        input_shape: of one input.
        setting: the setting that names the file, for messages.

    Raises:
        ConfigError: the file cannot be read, its inputs have another shape or are not finite
            numbers, or its labels are not one whole number for each input.
    """
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{setting} {path} does not exist; check the name") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{setting} {path} cannot be read as safetensors ({error})") from None
    inputs, labels = tensors.get("inputs"), tensors.get("labels")
    expected = ", ".join(map(str, input_shape))
    if inputs is None:
        raise ConfigError(f"{setting} {path} holds no `inputs`; expected `inputs` [n, {expected}]")
    if tuple(inputs.shape[1:]) != tuple(input_shape):
        raise ConfigError(
            f"{setting} {path} holds inputs of shape {list(inputs.shape)}; "
            f"expected `inputs` [n, {expected}]"
        )
    _check_values(f"{setting} {path}", inputs, labels, images=len(input_shape) > 1)
    return inputs, labels


_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_values(what: str, inputs: Tensor, labels: Tensor | None, *, images: bool) -> None:
    """Refuse public examples that a model cannot run on.

    Raises:
        ConfigError: naming the file and what is wrong.
    """
    wrong_kind = images and not inputs.is_floating_point()
    if len(inputs) == 0 or wrong_kind or not bool(torch.isfinite(inputs).all()):
        wanted = "finite floats" if images else "finite numbers"
        raise ConfigError(f"{what}: `inputs` must be {wanted}, one example or more")
    if labels is None:
        return
    if labels.shape != inputs.shape[:1] or labels.dtype not in _WHOLE_NUMBERS:
        given = f"{str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}"
        raise ConfigError(
            f"{what}: `labels` are {given}; expected a whole number for each of "
            f"{len(inputs)} inputs"
        )


# --------------------------------------------------------------------------------------------------
# Privacy settings, plan, augmentation and optimizer.


def make_privacy_config(
    config: RunConfig,
    input_shape: tuple[int, ...],
    recipe_probe: RecipeProbe | None = None,
    *,
    dataset_size: int = 0,
    private: Any = None,
    unit: str = "example",
    max_records_per_unit: int | None = None,
    private_bounds: int = 0,
    scores_norm: float = 0.0,
    head_inputs: int = 1,
) -> PrivacyConfig:
    """Return the privacy settings.

    Args:
        config: settings.
        input_shape: of one input.
        recipe_probe: the recipe's own probe.
        dataset_size: number of examples, or of units.
        private: the private training set, for an oracle.
        unit: what ε protects.
        max_records_per_unit: most records of a unit that count in a step.
        private_bounds: number of columns whose bounds a release decides.
        scores_norm: the most that a test row adds to the counts of noisy scores; 0 for none.
        head_inputs: inputs of the trained layer, for the rule of C.

    Raises:
        ConfigError: settings that do not go together.
    """
    privacy = config.privacy
    with library_errors():
        steps = count_steps(
            privacy.steps, privacy.epochs, dataset_size, privacy.expected_batch_size
        )
        preconditioner = make_preconditioner(config, input_shape, steps, recipe_probe, private)
        values = library_values(config, PrivacyConfig)
        average = None
        if privacy.weight_average:
            average = WeightEMA(privacy.weight_average, not privacy.average_from_start)
        extra = []
        if isinstance(preconditioner, SecondMoments):
            whole = _whole_noise(config, steps, privacy.moments_share)
            extra.append(moments_release(whole, privacy.moments_share))
            if not privacy.max_grad_norm:
                likelihood = config.preconditioner.likelihood
                values["max_grad_norm"] = convex_clip(dataset_size, whole, head_inputs, likelihood)
        elif not privacy.max_grad_norm:
            whole = _whole_noise(config, steps)
            likelihood = config.preconditioner.likelihood
            values["max_grad_norm"] = whitened_clip(dataset_size, whole, head_inputs, likelihood)
        if private_bounds:
            extra.append(_bounds_release(config, private_bounds))
        if scores_norm:
            noise = share_noise(privacy.private_scores, privacy.epsilon, privacy.delta)
            kind = ExtraRelease(purpose=SCORES, noise_multiplier=noise, norm=scores_norm)
            extra.append(kind)
        if config.stops_privately:
            extra.append(_evaluation_releases(config, steps))
        # GEP splits each gradient and clips its parts separately, so it decides the clipping.
        if preconditioner is not None and preconditioner.required_clipping is not None:
            values["clipping"] = preconditioner.required_clipping
        return PrivacyConfig(
            epochs=None if privacy.steps else privacy.epochs,
            steps=privacy.steps or None,
            postprocess=make_postprocess(config),
            weight_average=average,
            preconditioner=preconditioner,
            test_mode_seed=config.run.seed if privacy.test_mode else None,
            unit=unit,
            max_records_per_unit=max_records_per_unit,
            extra_releases=tuple(extra),
            **values,
        )


def _whole_noise(config: RunConfig, steps: int, share: float = 0.0) -> float:
    """Return the noise multiplier of one release that would take the whole budget."""
    privacy = config.privacy
    if privacy.noise_multiplier:
        return privacy.noise_multiplier * math.sqrt((1 - share) / steps)
    return gaussian_noise(privacy.epsilon, privacy.delta)


def settle(config: RunConfig, rows: int) -> RunConfig:
    """Replace a batch size of 0, or one above the number of examples (or units), by this number."""
    if 0 < config.privacy.expected_batch_size <= rows:
        return config
    return config.change(expected_batch_size=rows)


def _evaluation_releases(config: RunConfig, steps: int) -> ExtraRelease:
    """Return the noisy evaluations that decide an early end; none follows the last step.

    Raises:
        ConfigError: settings that a private early end needs are missing, or no step is evaluated.
    """
    privacy = config.privacy
    run = config.run
    needed = {
        "patience": run.patience,
        "validation_size": config.data.validation_size,
        "evaluate_every": run.evaluate_every,
    }
    if not all(needed.values()) or config.data.public_validation or privacy.noise_multiplier:
        raise ConfigError(
            f"stop_on = {run.stop_on!r} needs {', '.join(needed)} above 0, epsilon instead of"
            " noise_multiplier, and no public_validation"
        )
    count = (steps - 1) // run.evaluate_every
    if count < 1:
        raise ConfigError(
            f"evaluate_every = {run.evaluate_every} leaves no evaluation within {steps} steps:"
            " lower it"
        )
    noise = share_noise(privacy.stop_share, privacy.epsilon, privacy.delta, count)
    return ExtraRelease(
        purpose=PURPOSE,
        noise_multiplier=noise,
        norm=NORM,
        count=count,
    )


def _bounds_release(config: RunConfig, private_bounds: int) -> ExtraRelease:
    privacy = config.privacy
    if privacy.noise_multiplier:
        raise ConfigError(
            "bounds = 'private' takes a part of ε; give epsilon instead of noise_multiplier ="
            f" {privacy.noise_multiplier:g}"
        )
    noise = share_noise(privacy.bounds_share, privacy.epsilon, privacy.delta)
    norm = norm_of(private_bounds)
    return ExtraRelease(purpose="bounds", noise_multiplier=noise, norm=norm)


def make_plan(
    config: RunConfig,
    input_shape: tuple[int, ...],
    dataset_size: int,
    recipe_probe: RecipeProbe | None = None,
    private: Any = None,
    **units: Any,
) -> Plan:
    """Return the calibrated plan; arguments as of `make_privacy_config`.

    Raises:
        ConfigError: an impossible target, or settings that do not go together.
    """
    with library_errors():
        privacy = make_privacy_config(
            config,
            input_shape,
            recipe_probe,
            dataset_size=dataset_size,
            private=private,
            **units,
        )
        if config.privacy.noise_multiplier:
            return privacy.with_noise(
                config.privacy.noise_multiplier, config.privacy.delta, dataset_size
            )
        return privacy.calibrate(config.privacy.epsilon, config.privacy.delta, dataset_size)


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


# --------------------------------------------------------------------------------------------------
# How the settings of a run were chosen, for its card.

# Settings that a search may choose: all settings of these sections, and single ones of others.
_SEARCHED_SECTIONS = ("optimizer", "postprocess", "preconditioner")
_SEARCHED = {
    "epochs",
    "steps",
    "expected_batch_size",
    "max_grad_norm",
    "clipping",
    "automatic_gamma",
    "augmentations",
    "augment",
    "readout",
    "norm_methods",
    "weight_average",
    "pretrain_epochs",
    "pretrain_lr",
    "class_weights",
    "threshold",
}
_SEARCHED |= {name for name, section in SECTION_OF.items() if section in _SEARCHED_SECTIONS}
_ALL_BUT_RATE = tuple(name for name in SECTION_OF if name not in ("lr", "out"))
# Settings on which a recipe's defaults depend.
_KIND = (
    "recipe",
    "task",
    "method",
    "optimizer",
    "smoke",
    "public_data",
    "validation_size",
    "eval_on",
)
# A description begins with these settings, and lists at most so many.
_FIRST = ("lr", "max_grad_norm", "damping")
_MOST = 8


def describe_choice(config: RunConfig) -> str:
    """Return how the settings were chosen, as a line of the card.

    Without a statement of the user, the line lists the settings that differ from the recipe's.
    Budget, sampler and settings that only decide speed are left out. A learning rate that the
    recipe itself derives from other settings counts as the recipe's.
    """
    run = config.run
    try:
        recipe_config = _recipe_config(config, _KIND)
    except ConfigError:
        # The recipe's own settings do not go together with this method or optimizer.
        names = ["settings"] if run.chosen_by == RECIPE_DEFAULTS else []
    else:
        stated = run.chosen_by != recipe_config.run.chosen_by
        names = [] if stated else _list_differences(config, recipe_config)
    if not names:
        return run.chosen_by
    listed = ", ".join(names[:_MOST])
    if len(names) > _MOST:
        listed += f" and {len(names) - _MOST} more"
    return (
        f"{listed}: given, not stated how they were found; not covered by ε. "
        f"All others: {run.chosen_by}"
    )


def _list_differences(config: RunConfig, recipe_config: RunConfig) -> list[str]:
    """Return names of settings that a search may choose, and that differ from the recipe's."""
    names = set()
    for name in _SEARCHED.difference(_KIND):
        if config.values[name] != recipe_config.values[name]:
            names.add(name)
    if "lr" in names and _recipe_config(config, _ALL_BUT_RATE).optimizer.lr == config.optimizer.lr:
        names.remove("lr")
    of_method = ("recipe", "method", "public_data", "task")
    if _recipe_config(config, of_method).optimizer.optimizer != config.optimizer.optimizer:
        names.add("optimizer")
    return [name for name in _FIRST if name in names] + sorted(names.difference(_FIRST))


def _recipe_config(config: RunConfig, names: tuple[str, ...]) -> RunConfig:
    """Return the recipe's settings for a run in which only the named settings are given."""
    return run_config({name: config.values[name] for name in names})
