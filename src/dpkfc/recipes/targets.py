"""What the doctor is asked to look at: a recipe, or a factory in any module."""

from __future__ import annotations

import importlib
import sys

from torch import Tensor, nn

from dpkfc.recipes.catalogue import RECIPES, find_recipe
from dpkfc.recipes.config import ConfigError, nearest

__all__ = ["load_target"]

Target = tuple[nn.Module, tuple[int, ...], "Tensor | None", str]


def load_target(target: str, input_shape: str = "", seed: int = 0) -> Target:
    """A model with the shape of its input.

    Args:
        target: name of a recipe, or `module:factory`. The factory takes nothing and returns a model, or a model and a
            batch of public example inputs (needed for token ids).
        input_shape: shape of one input, comma-separated, where the factory returns a model alone.
        seed: of a recipe's initial weights.

    Returns:
        Model, shape of one input, example inputs or None, and a name.

    Raises:
        ConfigError: no such recipe, module or factory, or a factory that returns something else.
    """
    if ":" not in target:
        if target not in RECIPES:
            raise ConfigError(f"unknown recipe {target!r}; {nearest(target, RECIPES)} (or give module:factory)")
        recipe = find_recipe(target)
        return recipe.model(seed), recipe.input_shape, None, target
    made = _made(target)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (inputs is None or isinstance(inputs, Tensor)):
        raise ConfigError(
            f"{target} returned {type(made).__name__}; it must return a torch module, or (module, inputs)"
        )
    if inputs is not None:
        return model, tuple(inputs.shape[1:]), inputs, target
    return model, _shape(target, input_shape), None, target


def _made(target: str) -> object:
    """What the factory returns; what it raises, whatever that is, becomes one line that names it."""
    factory = _factory(target)
    try:
        return factory()
    except Exception as error:
        raise ConfigError(f"{target} raised {type(error).__name__}: {error}; it is called without arguments") from error


def _factory(target: str):  # noqa: ANN202 - whatever the module holds under that name
    module_name, _, name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{target}: module {module_name!r} cannot be imported ({error})") from None
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(f"{target}: {module_name} has no function {name!r}; {nearest(name, vars(module))[:200]}")
    return factory


def _shape(target: str, text: str) -> tuple[int, ...]:
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{target} returns a model alone: give the shape of one input, for example --input-shape 3,32,32 "
            f"(got {text!r}), or let it return (model, inputs)"
        )
    return tuple(int(part) for part in parts)
