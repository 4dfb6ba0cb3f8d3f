"""How the settings of a run were chosen, as its card says it."""

from __future__ import annotations

import dataclasses

from dpkfc.recipes.catalogue import run_config
from dpkfc.recipes.settings import RECIPE_DEFAULTS, ConfigError, RunConfig

__all__ = ["how_chosen"]

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
