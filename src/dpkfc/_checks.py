"""Checks of single settings, shared by all classes of settings."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

_MAX_SHOWN = 60
LARGEST_INTEGER = 2**63 - 1  # of NumPy and torch


def check_positive(name: str, value: Any) -> None:
    """Check that a setting is a positive finite number.

    Raises:
        ValueError: the value is something else.
    """
    if not (is_number(value) and value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {show_value(value)}")


def check_not_negative(name: str, value: Any) -> None:
    """Check that a setting is a finite number >= 0.

    Raises:
        ValueError: the value is something else.
    """
    if not (is_number(value) and value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and >= 0, got {show_value(value)}")


def check_in_range(name: str, value: Any, interval: str) -> None:
    """Check that a setting lies in an interval.

    Args:
        name: of the setting.
        value: of the setting.
        interval: two numbers in round (open) or square (closed) brackets, such as "[0, 1)".

    Raises:
        ValueError: the value lies outside, or is not a number.
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    is_inside = is_number(value) and low <= value <= high
    if is_inside and interval[0] == "(":
        is_inside = value > low
    if is_inside and interval[-1] == ")":
        is_inside = value < high
    if not is_inside:
        raise ValueError(f"{name} must lie in {interval}, got {show_value(value)}")


def check_one_of(name: str, value: Any, choices: Collection[Any]) -> None:
    """Check that a setting is one of some values.

    Raises:
        ValueError: the value is something else.
    """
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(str, choices))}; got {show_value(value)}"
        )


def check_integer(name: str, value: Any, least: int) -> None:
    """Check that a setting is an integer of a least size; a truth value is not an integer.

    Raises:
        ValueError: the value is something else, or more than 64 bits hold.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {show_value(value)}")
    if value > LARGEST_INTEGER:
        raise ValueError(f"{name} must be an integer below 2**63, got {show_value(value)}")


def check_optional_integer(name: str, value: Any, least: int) -> None:
    """Check that a setting is None or an integer of a least size.

    Raises:
        ValueError: the value is something else.
    """
    if value is not None:
        check_integer(name, value, least)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, of Python or NumPy, that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def show_value(value: Any, most: int = _MAX_SHOWN) -> str:
    """Return the text of a value, shortened so that a message stays readable."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "an integer of more than 4,300 digits"
    if len(text) > most:
        return f"{text[:most]}…"
    return text
