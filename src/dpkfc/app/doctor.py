"""The report of `dpkfc doctor` on a model."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from torch import Tensor, nn

from dpkfc.app.curvature_settings import Facts, make_kfac
from dpkfc.app.diagnosis import diagnose, layer_table, part_table
from dpkfc.app.owndata.display import print_shares, schema_table
from dpkfc.app.owndata.tasks import call_function
from dpkfc.app.recipes.catalogue import RECIPES, configure, find_recipe, recipe_of, run_config
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig, make_config
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.toml import ConfigError, nearest
from dpkfc.app.train import read_settings

# --------------------------------------------------------------------------------------------------
# The target of the report: a recipe, or a factory in any module.

Target = tuple[nn.Module, tuple[int, ...], "Tensor | None", str]


def load_target(target: str, input_shape: str = "", seed: int = 0) -> Target:
    """Return a model with the shape of its input.

    Args:
        target: name of a recipe, or `module:factory`. The factory takes nothing and returns a
            model, or a model and a batch of public example inputs (needed for token ids).
        input_shape: shape of one input, comma-separated, where the factory returns a model alone.
        seed: of a recipe's initial weights.

    Returns:
        Model, shape of one input, example inputs or None, and a name.

    Raises:
        ConfigError: no such recipe, module or factory, or a factory that returns something else.
    """
    if ":" not in target:
        if "/" in target:
            raise ConfigError(
                f"{target} does not exist, or is not a run folder (no config.toml); give one, a"
                " recipe or module:factory"
            )
        if target not in RECIPES:
            raise ConfigError(
                f"unknown recipe {target!r}; {nearest(target, RECIPES)} (or give module:factory)"
            )
        recipe = find_recipe(target)
        return recipe.model(seed), recipe.input_shape, None, target
    built = call_function(target)
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module) or not (inputs is None or isinstance(inputs, Tensor)):
        raise ConfigError(
            f"{target} returned {type(built).__name__}; it must return a torch module, or (module,"
            " inputs)"
        )
    if inputs is not None:
        return model, tuple(inputs.shape[1:]), inputs, target
    return model, _parse_shape(target, input_shape), None, target


def _parse_shape(target: str, text: str) -> tuple[int, ...]:
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{target} returns a model alone: give the shape of one input, for example"
            f" --input-shape 3,32,32 (got {text!r}), or let it return (model, inputs)"
        )
    return tuple(int(part) for part in parts)


# --------------------------------------------------------------------------------------------------


def doctor_report(
    target: str, settings: dict[str, Any], input_shape: str, console: Console
) -> None:
    """Examine a model and print how it would be trained.

    Args:
        target: a recipe, `module:factory`, or a run folder; empty for own data in the settings.
        settings: written by the user.
        input_shape: of a factory's model.
        console: where to print.

    Raises:
        ConfigError: no such target, or a model that cannot be trained privately.
    """
    found = _own_config(target, settings)
    if found is not None:
        own, recipe = found
        if recipe.columns and not target:
            console.print(schema_table(recipe.columns))
            # Its owner compares public names with the file before ε is spent.
            print_shares(console, recipe.load(own).figures)
        model, name = recipe.model(own.run.seed), recipe.title
        curvature = make_kfac(own, Facts(recipe.input_shape, probe=recipe.probe))
    else:
        seed = make_config(seed=settings.get("seed", 0)).run.seed
        model, shape, inputs, name = load_target(target, input_shape, seed)
        named, recipe_probe = "digits", None
        if ":" not in target:
            named, recipe_probe = target, find_recipe(target).probe
        config = run_config({"recipe": named, **settings})
        curvature = make_kfac(config, Facts(shape, probe=recipe_probe), inputs)
    diagnosis = diagnose(model, curvature)
    if diagnosis.problem:
        raise ConfigError(f"{name} cannot be trained privately: {diagnosis.problem}")
    if diagnosis.frozen:
        console.print(part_table(diagnosis))
    console.print(layer_table(diagnosis, f"{name}: {diagnosis.trainable:,} trainable parameters"))
    console.print(
        "not covered: nothing; every trainable parameter belongs to one of the layers above"
    )


def _own_config(target: str, settings: dict[str, Any]) -> tuple[RunConfig, Recipe] | None:
    """Return settings and recipe of a run folder, of own data or of an own task; None for others.

    Raises:
        ConfigError: nothing to examine, or settings beside a run folder.
    """
    if not target:
        return configure(settings)
    folder = RunFolder.locate(target)
    if not folder.config.is_file():
        return None
    if settings:
        raise ConfigError(
            "a run folder is examined with its own settings; leave out every other setting"
        )
    config = read_settings(folder)
    return config, recipe_of(config)
