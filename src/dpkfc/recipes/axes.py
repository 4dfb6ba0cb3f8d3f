"""From settings to the values on the axes: preconditioner, post-processing, and where curvature comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dpkfc.config import Preconditioner
from dpkfc.curvature import (
    DP2,
    GEP,
    KFAC,
    NGD,
    AdaDPS,
    DeadLeaves,
    FeatureNoise,
    PinkNoise,
    PrivateOracle,
    PublicData,
    Refined,
    WhiteNoise,
)
from dpkfc.curvature.probes import Probe
from dpkfc.postprocess import EMA, SOFIM, AdamBC, DiSK, LowPass
from dpkfc.postprocess.base import PostProcess
from dpkfc.recipes.settings import ConfigError, RunConfig, named_values

OwnProbe = Callable[[RunConfig], Probe]

__all__ = ["OwnProbe", "kfac", "postprocess", "preconditioner", "public_data"]


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
