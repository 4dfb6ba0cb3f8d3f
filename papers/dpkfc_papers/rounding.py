"""Figures of a row with four digits."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from dpkfc.app.tuning.samples import round_value


def round_all(values: Tensor) -> list[float]:
    """Return four digits of each value."""
    return [round_value(value) for value in values.tolist()]


def round_values(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return four digits of each value; None for infinity, which JSON does not have."""
    rounded: dict[str, float | None] = {}
    for name, value in values.items():
        rounded[name] = round_value(value) if math.isfinite(value) else None
    return rounded
