"""How ε is written: never below its value."""

from __future__ import annotations

import math

__all__ = ["rounded_up"]


def rounded_up(epsilon: float, decimals: int = 3) -> str:
    """ε with a fixed number of decimals, rounded up; ∞ where there is no guarantee."""
    if not math.isfinite(epsilon):
        return "∞"
    unit = 10**decimals
    # What is already written with so many decimals stays: the product may land just above a whole number.
    whole = round(epsilon * unit)
    return f"{(whole if whole / unit >= epsilon else math.ceil(epsilon * unit)) / unit:.{decimals}f}"
