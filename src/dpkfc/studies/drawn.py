"""Settings of a trial and what is drawn for it: a search draws the product of settings whose good values lie along a ridge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpkfc.studies.arms import Choice, Range, Space
from dpkfc.studies.cell import Plain

__all__ = ["drawn_as", "drawn_of", "first_of", "rounded", "settings_of"]

_DIGITS = 4


def drawn_as(name: str, of: Range | Choice) -> str:
    """The name that a setting is drawn by."""
    return " * ".join([name, *(f"{other}^{power:g}" for other, power in of.times)]) if isinstance(of, Range) else name


def settings_of(space: Space, drawn: Mapping[str, Any]) -> dict[str, Plain]:
    """What a trial runs with, of what was drawn for it: a product is divided by its other factors."""
    found = {name: rounded(drawn[drawn_as(name, of)]) for name, of in space.items()}
    for name, of in space.items():
        if isinstance(of, Range) and of.times:
            found[name] = rounded(drawn[drawn_as(name, of)] / _others(of, found))
    return found


def drawn_of(space: Space, settings: Mapping[str, Any]) -> dict[str, Plain]:
    """The reverse of `settings_of`, of those that there are: a trial of an earlier space may lack some."""
    found: dict[str, Plain] = {}
    for name, of in space.items():
        needed = {name, *(other for other, _ in of.times)} if isinstance(of, Range) else {name}
        if needed <= settings.keys():
            found[drawn_as(name, of)] = settings[name] if isinstance(of, Choice) else settings[name] * _others(of, settings)
    return found


def first_of(space: Space, config: Any) -> dict[str, Plain]:
    """The settings of a run as they would be drawn, put into the ranges."""
    found: dict[str, Plain] = {}
    for name, of in space.items():
        value = getattr(config, name)
        if isinstance(of, Choice):
            found[name] = value if value in of.values else of.values[0]
        elif of.times:
            product = float(value) * _others(of, vars(config))
            found[drawn_as(name, of)] = min(max(product, of.low), of.high)
        else:
            found[name] = min(max(float(value), of.low), of.high)
    return found


def rounded(value: Any) -> Any:
    """Few digits, so that a number in a table is the number that ran."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _others(of: Range, settings: Mapping[str, Any]) -> float:
    """What a setting is multiplied by where the product is searched."""
    return math.prod(float(settings[name]) ** power for name, power in of.times)
