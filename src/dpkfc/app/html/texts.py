"""Numbers and settings as the texts of a page."""

from __future__ import annotations

from typing import Any

from dpkfc.report.text import number, plain, round_up


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


def epsilon_text(value: Any) -> str:
    """Return ε rounded up: ∞ where a card says "inf", a dash where ε is unknown."""
    if value == "inf":
        return "∞"
    known = number(value)
    return "–" if known is None else round_up(known)


def delta_text(delta: float | None) -> str:
    """Return δ with a hyphen at which no line breaks."""
    return "–" if delta is None else f"{delta:g}".replace("-", "\u2011")


def show(value: Any) -> str:
    """Return a setting as one line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else plain(value)
