"""Numbers and settings as the texts of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpkfc.report.text import number, plain, rounded_up

_MOST_ITEMS = 50
_MOST_NESTED = 4


def count_text(number: int, noun: str) -> str:
    """Return a number of things in words."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def score_text(value: float | None, score: str = "accuracy") -> str:
    """Return an accuracy in per cent, and any other score as a number."""
    if value is None:
        return "–"
    if "accuracy" in score:
        return f"{100 * value:.2f} %"
    return f"{value:.3f}"


def epsilon_text(value: Any, decimals: int = 3) -> str:
    """Return ε rounded up: ∞ where a card says "inf", a dash where ε is unknown."""
    if value == "inf":
        return "∞"
    known = number(value)
    return "–" if known is None else rounded_up(known, decimals)


def delta_text(delta: float | None) -> str:
    """Return δ with a hyphen at which no line breaks."""
    return "–" if delta is None else f"{delta:g}".replace("-", "\u2011")


def show(value: Any, depth: int = 0) -> str:
    """Return a setting of any shape as one line."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and abs(value) < 10**15:
        return f"{value:,}"
    if isinstance(value, (list, tuple, Mapping)):
        return _show_items(value, depth + 1) if depth < _MOST_NESTED else "…"
    return plain(value)


def _show_items(values: Mapping[Any, Any] | Sequence[Any], depth: int) -> str:
    if not isinstance(values, Mapping):
        return ", ".join(show(item, depth) for item in values[:_MOST_ITEMS])
    texts = []
    for name, item in list(values.items())[:_MOST_ITEMS]:
        caption = plain(name, 60).replace("_", " ")
        texts.append(f"{caption} {show(item, depth)}")
    return ", ".join(texts)
