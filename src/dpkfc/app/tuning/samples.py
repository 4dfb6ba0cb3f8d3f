"""Settings of a trial and the values that Optuna samples.

Where good values of several settings lie along a ridge, Optuna samples their product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dpkfc.app.tuning.arms import Choice, Range, Space
from dpkfc.app.tuning.runs import Plain

_DIGITS = 4


def name_sample(name: str, values: Range | Choice) -> str:
    """Return the name by which Optuna knows a setting."""
    factors = [name]
    if isinstance(values, Range):
        factors += [f"{other}^{power:g}" for other, power in values.times]
    return " * ".join(factors)


def make_settings(space: Space, sampled: Mapping[str, Any]) -> dict[str, Plain]:
    """Return the settings of a trial: a sampled product is divided by its other factors."""
    settings = {}
    for name, values in space.items():
        settings[name] = round_value(sampled[name_sample(name, values)])
    for name, values in space.items():
        if isinstance(values, Range) and values.times:
            product = sampled[name_sample(name, values)]
            settings[name] = round_value(product / _other_factors(values, settings.__getitem__))
    return settings


def make_sample(space: Space, settings: Mapping[str, Any]) -> dict[str, Plain]:
    """Reverse `make_settings`."""
    sampled: dict[str, Plain] = {}
    for name, values in space.items():
        value = settings[name]
        if isinstance(values, Range):
            value *= _other_factors(values, settings.__getitem__)
        sampled[name_sample(name, values)] = value
    return sampled


def sample_defaults(space: Space, default: Callable[[str], Any]) -> dict[str, Plain]:
    """Return the settings of a run as Optuna would sample them, put into the ranges.

    Args:
        space: what is searched.
        default: returns a setting of the run by its name.
    """
    sampled: dict[str, Plain] = {}
    for name, values in space.items():
        value = default(name)
        if isinstance(values, Choice):
            sampled[name] = value if value in values.values else values.values[0]
            continue
        product = max(float(value) * _other_factors(values, default), values.low)
        sampled[name_sample(name, values)] = min(product, values.high)
    return sampled


def round_value(value: Any) -> Any:
    """Round to few digits, so that a number in a table is the number that ran."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _other_factors(values: Range, value_of: Callable[[str], Any]) -> float:
    """Return what a setting is multiplied by where the product is searched."""
    return math.prod(float(value_of(name)) ** power for name, power in values.times)
