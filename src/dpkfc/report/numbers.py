"""Write numbers and foreign texts for readers: ε never below its value, any text as one visible line."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

__all__ = ["is_visible", "number", "plain", "rounded_up"]

# What a terminal, a parser of HTML or a reader could take for something else than text: control characters and those that turn
# the direction of writing.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def rounded_up(epsilon: float, decimals: int = 3) -> str:
    """ε with a fixed number of decimals, rounded up; ∞ where there is no guarantee."""
    if not math.isfinite(epsilon):
        return "∞"
    unit = 10**decimals
    # What is already written with so many decimals stays: the product may land just above a whole number.
    whole = round(epsilon * unit)
    return f"{(whole if whole / unit >= epsilon else math.ceil(epsilon * unit)) / unit:.{decimals}f}"


def plain(value: Any, most: int = 600) -> str:
    """Any value as one line of visible text, cut after `most` characters."""
    text = value if isinstance(value, str) else str(value)
    text = "".join(" " if c in "\n\t\r" else c for c in text[: 4 * most] if c in "\n\t\r" or is_visible(c))
    return text if len(text) <= most else text[: most - 1] + "…"


def is_visible(character: str) -> bool:
    """Return whether a reader sees a character and cannot take it for something else."""
    return unicodedata.category(character) not in _HIDDEN


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
