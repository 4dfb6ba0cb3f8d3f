"""From settings to the plan: noise, clip, releases beside the steps, and what follows a release."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dpkfc.app.curvature_settings import Facts, library_errors, make_preconditioner
from dpkfc.app.library_values import library_values
from dpkfc.app.owndata.bounds import norm_of
from dpkfc.app.private_scores import PURPOSE as SCORES
from dpkfc.app.run_config import RunConfig
from dpkfc.app.toml import ConfigError
from dpkfc.config import Plan, PrivacyConfig, count_steps
from dpkfc.convex import convex_clip, gaussian_noise, moments_release, whitened_clip
from dpkfc.curvature.second_moments import SecondMoments
from dpkfc.early_stopping import NORM, PURPOSE
from dpkfc.postprocess import EMA, SOFIM, AdamBC, DiSK, LowPass
from dpkfc.postprocess.protocol import PostProcess
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.privacy.calibration import share_noise
from dpkfc.privacy.extra_releases import ExtraRelease


def make_plan(config: RunConfig, facts: Facts) -> Plan:
    """Return the calibrated plan.

    Raises:
        ConfigError: an impossible target, or settings that do not go together.
    """
    privacy, size = config.privacy, facts.dataset_size
    with library_errors():
        made = make_privacy_config(config, facts)
        if privacy.noise_multiplier:
            return made.with_noise(privacy.noise_multiplier, privacy.delta, size)
        return made.calibrate(privacy.epsilon, privacy.delta, size)


def settle(config: RunConfig, rows: int) -> RunConfig:
    """Replace a batch size of 0, or one above the number of examples (or units), by this number."""
    if 0 < config.privacy.expected_batch_size <= rows:
        return config
    return config.change(expected_batch_size=rows)


def make_privacy_config(config: RunConfig, facts: Facts) -> PrivacyConfig:
    """Return the privacy settings.

    Raises:
        ConfigError: settings that do not go together.
    """
    privacy = config.privacy
    likelihood = config.preconditioner.likelihood
    with library_errors():
        steps = count_steps(
            privacy.steps, privacy.epochs, facts.dataset_size, privacy.expected_batch_size
        )
        preconditioner = make_preconditioner(config, facts, steps)
        values = library_values(config, PrivacyConfig)
        average = None
        if privacy.weight_average:
            average = WeightEMA(privacy.weight_average, not privacy.average_from_start)
        extra = []
        if isinstance(preconditioner, SecondMoments):
            whole = _whole_noise(config, steps, privacy.moments_share)
            extra.append(moments_release(whole, privacy.moments_share))
            if not privacy.max_grad_norm:
                values["max_grad_norm"] = convex_clip(
                    facts.dataset_size, whole, facts.head_inputs, likelihood
                )
        elif not privacy.max_grad_norm:
            whole = _whole_noise(config, steps)
            values["max_grad_norm"] = whitened_clip(
                facts.dataset_size, whole, facts.head_inputs, likelihood
            )
        if facts.private_bounds:
            extra.append(_bounds_release(config, facts.private_bounds))
        if facts.scores_norm:
            noise = share_noise(privacy.private_scores, privacy.epsilon, privacy.delta)
            kind = ExtraRelease(purpose=SCORES, noise_multiplier=noise, norm=facts.scores_norm)
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
            unit=facts.unit,
            max_records_per_unit=facts.max_records_per_unit,
            extra_releases=tuple(extra),
            **values,
        )


def _whole_noise(config: RunConfig, steps: int, share: float = 0.0) -> float:
    """Return the noise multiplier of one release that would take the whole budget."""
    privacy = config.privacy
    if privacy.noise_multiplier:
        return privacy.noise_multiplier * math.sqrt((1 - share) / steps)
    return gaussian_noise(privacy.epsilon, privacy.delta)


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
        "doppler-chebyshev": lambda: LowPass.chebyshev(**momentum),
    }
    return filters[postprocess.filter]()
