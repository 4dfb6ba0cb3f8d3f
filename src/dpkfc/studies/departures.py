"""Of a run's settings those that its recipe and method do not say by themselves: how a report tells equal runs from others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from dpkfc.recipes.catalogue import run_config
from dpkfc.recipes.config import ConfigError, RunConfig
from dpkfc.studies.cell import Run
from dpkfc.studies.errors import StudyError

__all__ = ["departures"]

_FIELDS = {setting.name for setting in dataclasses.fields(RunConfig)}


def departures(run: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that differ from what the recipe and the method come to; all that were given where that is not known.

    Args:
        run: `recipe`, `method` and `settings`: all of them, as a run folder keeps them, or those laid over the defaults. With
            `hash`, the one it was stored under (`Run.hash`; with `seed` and `evaluate_on`), defaults are filled in only where
            they are still those that the run was made with.
    """
    given = {str(name): value for name, value in run["settings"].items()}
    try:
        if "hash" in run:
            held = Run.stored({"run": {**run, "settings": given}, "hash": run["hash"]})
            if held.hash != run["hash"]:
                return given
            given = dict(held.settings)
        chosen = {name: value for name, value in given.items() if name in _FIELDS}
        said = {"recipe": run["recipe"], "method": run["method"]}
        full = dataclasses.asdict(run_config({**chosen, **said}))
        usual = _usual(run["recipe"], run["method"], full["smoke"], bool(full["public_data"]))
    except (ConfigError, StudyError, TypeError):
        return given
    unknown = {name: value for name, value in given.items() if name not in _FIELDS}
    return {name: value for name, value in full.items() if value != usual[name]} | unknown


@functools.cache
def _usual(recipe: str, method: str, smoke: bool, public: bool) -> dict[str, Any]:
    """What a recipe and a method come to; in the place of public data a name that no file has."""
    said = {"recipe": recipe, "method": method, "smoke": smoke, **({"public_data": "@"} if public else {})}
    return dataclasses.asdict(run_config(said))
