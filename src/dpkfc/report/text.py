"""Numbers and foreign texts as a reader may see them.

ε is never below its value, and a text is one line.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

# Categories of characters that a terminal, an HTML parser or a reader could mistake for something
# other than text: control characters, and characters that change the direction of writing.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_BREAKS = "\n\t\r"


def round_up(epsilon: float, decimals: int = 3) -> str:
    """Return ε with a fixed number of decimals, rounded up; ∞ without a guarantee."""
    if not math.isfinite(epsilon):
        return "∞"
    unit = 10**decimals
    # A value that already has so many decimals stays, although its product may be rounded up.
    units = round(epsilon * unit)
    if units / unit < epsilon:
        units = math.ceil(epsilon * unit)
    return f"{units / unit:.{decimals}f}"


def plain(value: Any, most: int = 600) -> str:
    """Return any value as one line of visible text, cut after `most` characters."""
    characters = []
    for character in str(value)[: 4 * most]:
        if character in _BREAKS:
            characters.append(" ")
        elif is_visible(character):
            characters.append(character)
    text = "".join(characters)
    return text if len(text) <= most else text[: most - 1] + "…"


def is_visible(character: str) -> bool:
    """Return whether a reader sees a character and cannot mistake it for something else."""
    return unicodedata.category(character) not in _HIDDEN


def number(value: Any) -> float | None:
    """Return a finite number as a float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def json_number(value: float) -> float | str:
    """Return a finite number itself, and "inf" for an infinite one, which JSON has not."""
    return value if math.isfinite(value) else "inf"


def ensure_mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping itself, an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}
