"""Text of strangers on a page: whatever a run folder says stays text, in HTML, in JSON, in a plot and in a shell."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from dpkfc.report.numbers import is_visible, number, plain, rounded_up

_MOST = 600  # characters
_DEPTH = 4  # of settings in settings
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def escaped(value: Any, most: int = _MOST) -> str:
    """Text for HTML, also inside quoted attributes."""
    return html.escape(plain(value, most), quote=True)


def drawn(value: Any, most: int = 80) -> str:
    """Text for a plot, whose library reads a few tags and entities."""
    return html.escape(plain(value, most), quote=False)


def embedded(content: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def percent(value: float | None, score: str = "accuracy", digits: int = 2) -> str:
    """A score as a reader expects it: an accuracy in per cent, anything else as a number."""
    if value is None:
        return "–"
    return f"{100 * value:.{digits}f} %" if "accuracy" in score else f"{value:.{digits + 1}f}"


def epsilon_text(value: Any, decimals: int = 3) -> str:
    """ε rounded up; ∞ where a card says "inf", – where nothing is known."""
    if value == "inf":
        return "∞"
    known = number(value)
    return "–" if known is None else rounded_up(known, decimals)


def delta_text(delta: float | None) -> str:
    """δ, with a hyphen at which no line breaks."""
    return "–" if delta is None else f"{delta:g}".replace("-", "\u2011")


def show(value: Any, depth: int = 0) -> str:
    """A setting of any shape as a line."""
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**15):
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    if isinstance(value, (list, tuple, Mapping)):
        return _show_all(value, depth + 1) if depth < _DEPTH else "…"
    return plain(value)


def _show_all(values: Mapping[Any, Any] | list[Any] | tuple[Any, ...], depth: int) -> str:
    if isinstance(values, Mapping):
        items = list(values.items())[:50]
        return ", ".join(f"{plain(name, 60).replace('_', ' ')} {show(item, depth)}" for name, item in items)
    return ", ".join(show(item, depth) for item in values[:50])


def command_of(settings: Mapping[str, Any]) -> str:
    """`dpkfc train` with settings as flags, each value quoted for a shell; empty where a value cannot stand in a command."""
    words = ["dpkfc", "train"]
    for name, value in settings.items():
        if not _NAME.fullmatch(str(name)) or not isinstance(value, (str, int, float, bool)):
            return ""
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        text = str(value)
        if any(not is_visible(c) for c in text):
            return ""
        words.append(f"--{flag}={shlex.quote(text)}" if text.startswith("-") else f"--{flag} {shlex.quote(text)}")
    return " ".join(words)
