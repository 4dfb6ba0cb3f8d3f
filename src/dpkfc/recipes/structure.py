"""`structure = "auto"`: sides, norm methods and the interval of refreshes by what they cost on this machine.

What is measured becomes settings before the plan is made (`structure = "measured"`, with `ranks`, `norm_methods` and `every`), so
that the plan's hash holds it, a run that goes on keeps it, and its config.toml replays it anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from dpkfc.recipes.axes import kfac
from dpkfc.recipes.catalogue import find_recipe
from dpkfc.recipes.settings import ConfigError, RunConfig
from dpkfc.report.costs import default_cache
from dpkfc.report.structure import measured_structure

__all__ = ["as_asked", "structured", "told"]


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
        found = measured_structure(model, curvature, expected_batch_size=rows, cache=default_cache())
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
