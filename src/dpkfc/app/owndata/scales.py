"""Where a number lies between public bounds, on a linear or a logarithmic scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

SCALES = ("", "log")
Floats = NDArray[np.float64]
# A logarithmic scale of bounds that hold zero is linear below this part of the larger bound.
_LINEAR = 1e-3


def to_share(values: Floats, least: float, greatest: float, scale: str = "") -> Floats:
    """Return where values within bounds lie: 0 at the least, 1 at the greatest.

    Args:
        values: between the bounds.
        least: public bound.
        greatest: public bound.
        scale: "log" where factors count rather than differences. Bounds above zero have the
            logarithm, others asinh, which is linear around zero.
    """
    forward, _ = _functions(least, greatest, scale)
    low, high = forward(np.array([least, greatest], np.float64))
    share: Floats = (forward(values) - low) / (high - low)
    return share.clip(0.0, 1.0)


def from_share(share: Floats, least: float, greatest: float, scale: str = "") -> Floats:
    """Return the values that lie so far between bounds; `to_share` undone."""
    forward, back = _functions(least, greatest, scale)
    low, high = forward(np.array([least, greatest], np.float64))
    return back(low + share * (high - low)).clip(least, greatest)


_Function = Callable[[Floats], Floats]


def _functions(least: float, greatest: float, scale: str) -> tuple[_Function, _Function]:
    if scale != "log":
        return np.array, np.array
    if least > 0:
        return np.log, np.exp
    unit = _LINEAR * max(abs(least), abs(greatest))
    return lambda values: np.arcsinh(values / unit), lambda values: np.sinh(values) * unit
