"""Texts and numbers of a page. Whatever a run folder says stays text in a plot and in a shell."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dpkfc.report.numbers import is_visible, number, plain, rounded_up

_MOST_ITEMS = 50
_MOST_NESTED = 4
_SETTING_NAME = re.compile(r"[a-z][a-z0-9_]*")


def plot_text(value: Any, most: int = 80) -> str:
    """Return text for a plot. The plotting library reads a few tags and entities."""
    return html.escape(plain(value, most), quote=False)


def count_text(number: int, noun: str) -> str:
    """Return a number of things in words."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def score_text(value: float | None, score: str = "accuracy", digits: int = 2) -> str:
    """Return an accuracy in per cent, and any other score as a number."""
    if value is None:
        return "–"
    if "accuracy" in score:
        return f"{100 * value:.{digits}f} %"
    return f"{value:.{digits + 1}f}"


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


def command_of(settings: Mapping[str, Any]) -> str:
    """Return `dpkfc train` with settings as flags, each value quoted for a shell.

    Returns:
        An empty text where a value cannot stand in a command.
    """
    words = ["dpkfc", "train"]
    for name, value in settings.items():
        is_plain = isinstance(value, (str, int, float, bool))
        if not _SETTING_NAME.fullmatch(str(name)) or not is_plain:
            return ""
        flag = name.replace("_", "-")
        text = str(value)
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif not all(is_visible(character) for character in text):
            return ""
        elif text.startswith("-"):
            words.append(f"--{flag}={shlex.quote(text)}")
        else:
            words.append(f"--{flag} {shlex.quote(text)}")
    return " ".join(words)
