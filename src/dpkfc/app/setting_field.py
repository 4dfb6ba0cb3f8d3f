"""Declare a setting with its help and its range, and check the values of a section.

Many settings are fields of dataclasses of the library, which give them default and meaning;
`library_values` gives them back under the names of the fields.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

from dpkfc.app.owndata.cells import is_unicode
from dpkfc.app.toml import ConfigError, nearest


def declare(
    default: Any,
    text: str = "",
    *,
    owners: str = "",
    key: str = "",
    choices: Iterable[str] = (),
    words: Mapping[str, float] | None = None,
    **bounds: float,
) -> Any:
    """Declare a setting.

    Args:
        default: its value where nothing is given.
        text: what it means; empty takes the docstring of the first owner.
        owners: names of the dataclasses of the library with that field, which need torch and are
            not imported here. The default is the field's, except where 0 or an empty text means
            "not given".
        key: name of the field, where it is another one.
        choices: allowed texts.
        words: words that may be given for numbers, as the library takes some of them.
        bounds: least, above, most or below: what a number must keep.
    """
    metadata = {
        "help": text,
        "key": key,
        "owners": owners.split(),
        "choices": tuple(choices),
        "words": words or {},
        "bounds": bounds,
    }
    return field(default=default, metadata=metadata)


class Section:
    """Settings that check themselves.

    Raises:
        ConfigError: a value of the wrong type or outside its range, or an unknown choice.
    """

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):  # type: ignore[arg-type]
            value = _check_value(setting, getattr(self, setting.name))
            object.__setattr__(self, setting.name, value)


_ACCEPTED = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text in quotes",
    "bool": "true or false",
}


def _check_value(setting: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value in the type of its setting.

    Raises:
        ConfigError: naming the setting, the value and what is expected.
    """
    name, kind = setting.name, str(setting.type)
    if isinstance(value, str):
        value = setting.metadata["words"].get(value, value)
    if not isinstance(value, _ACCEPTED[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{name} must be {_KINDS[kind]}, got {value!r} ({type(value).__name__})")
    if isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"{name} must be a number of at most 64 bits")
    if isinstance(value, str) and not is_unicode(value):
        raise ConfigError(f"{name} contains half a character, which UTF-8 cannot store: {value!r}")
    if kind == "float":
        value = float(value)
        if not math.isfinite(value):
            raise ConfigError(f"{name} must be finite, got {value}; give a number")
    _check_range(setting, value)
    return value


def _check_range(setting: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value outside the choices or the range of its setting, before any data are read."""
    name, rules = setting.name, setting.metadata
    if rules["choices"] and value not in rules["choices"]:
        known = [choice for choice in rules["choices"] if choice]
        raise ConfigError(f"unknown {name} {value!r}; {nearest(value, known)}")
    for bound, limit in rules["bounds"].items():
        is_kept, words = _BOUNDS[bound]
        if not is_kept(value, limit):
            raise ConfigError(f"{name} must be {words} {limit:g}, got {value}")


_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}
