"""How the settings of a run were chosen, in one line for its card."""

from __future__ import annotations

from dpkfc.app.plan_settings import settle
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.run_config import SECTION_OF, RunConfig
from dpkfc.app.settings import RECIPE_DEFAULTS

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
    "data",
    "schema",
    "text",
    "bounds",
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


def describe_choice(config: RunConfig, rows: int) -> str:
    """Return how the settings were chosen, as a line of the card.

    Without a statement of the user, the line lists the settings that differ from the recipe's.
    Budget, sampler and settings that only decide speed are left out. A learning rate that the
    recipe itself derives from other settings counts as the recipe's.

    Args:
        config: of the run.
        rows: number of examples (or units), which a batch of all of them follows from.
    """
    run = config.run
    try:
        recipe_config = settle(_recipe_config(config, _KIND), rows)
        stated = run.chosen_by != recipe_config.run.chosen_by
        names = [] if stated else _list_differences(config, recipe_config)
    except ValueError:
        # The recipe's own settings do not go together with this method or optimizer, or the data
        # have been moved since the run began.
        names = ["settings"] if run.chosen_by == RECIPE_DEFAULTS else []
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
    own = recipe_config.values
    names = {name for name in _SEARCHED.difference(_KIND) if config.values[name] != own[name]}
    if "lr" in names and _recipe_config(config, _ALL_BUT_RATE).optimizer.lr == config.optimizer.lr:
        names.remove("lr")
    of_method = ("recipe", "method", "public_data", "task")
    if _recipe_config(config, of_method).optimizer.optimizer != config.optimizer.optimizer:
        names.add("optimizer")
    return [name for name in _FIRST if name in names] + sorted(names.difference(_FIRST))


def _recipe_config(config: RunConfig, names: tuple[str, ...]) -> RunConfig:
    """Return the recipe's settings for a run in which only the named settings are given."""
    return run_config({name: config.values[name] for name in names})
