"""TOML files, and what their errors say."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpkfc.terminal import MEANT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class ConfigError(ValueError):
    """A setting that does not exist, has the wrong type, or lies outside its range."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the nearest known word, or those that fit a line."""
    known = sorted(set(known))
    word = str(word)
    same = [name for name in known if _letters(name) == _letters(word)]
    longer = [name for name in known if word and name.startswith(word)]
    meant = [name for name in known if name == MEANT.get(word.replace("-", "_"))]
    close = meant or same or longer or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {shorten(known)}"


def _letters(name: str) -> str:
    return "".join(name.casefold().split())


def shorten(names: Iterable[str], most: int = 90) -> str:
    """Return names in one text, cut after `most` characters."""
    text = ", ".join(names)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: does not exist; check the name") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); check the name and its permissions"
        ) from None
    # Bad syntax, bytes that are not UTF-8, or brackets without end.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def ensure_text(value: Any) -> str:
    """Return a text itself, an empty one for anything else."""
    return value if isinstance(value, str) else ""
