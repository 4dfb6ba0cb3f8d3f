"""Checks of single settings refuse what lies outside and name setting, value and range."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpkfc._checks import (
    check_in_range,
    check_integer,
    check_not_negative,
    check_one_of,
    check_optional_integer,
    check_positive,
)


def test_values_inside_are_accepted():
    check_positive("rate", np.float32(0.5))
    check_not_negative("rate", 0)
    check_in_range("rate", 0.0, "[0, 1)")
    check_in_range("rate", 1, "(0, 1]")
    check_one_of("kind", "a", ("a", "b"))
    check_integer("count", 1, 1)
    check_optional_integer("count", None, 1)


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (check_positive, (0.0,), "x must be positive and finite, got 0.0"),
        (check_positive, (math.nan,), "x must be positive and finite, got nan"),
        (check_positive, ("1",), "x must be positive and finite, got '1'"),
        (check_positive, (True,), "x must be positive and finite, got True"),
        (check_positive, (10**400,), "x must be positive and finite, got 10000"),
        (check_not_negative, (-1,), "x must be finite and >= 0, got -1"),
        (check_not_negative, (math.inf,), "x must be finite and >= 0, got inf"),
        (check_in_range, (0, "(0, 1]"), r"x must lie in \(0, 1\], got 0"),
        (check_in_range, (1, "[0, 1)"), r"x must lie in \[0, 1\), got 1"),
        (check_in_range, (math.nan, "[0, 1]"), r"x must lie in \[0, 1\], got nan"),
        (check_in_range, (None, "[0, 1]"), r"x must lie in \[0, 1\], got None"),
        (check_one_of, ("c", ("a", "b")), "x must be one of a, b; got 'c'"),
        (check_integer, (True, 1), "x must be an integer >= 1, got True"),
        (check_integer, (1.0, 1), "x must be an integer >= 1, got 1.0"),
        (check_optional_integer, (0, 1), "x must be an integer >= 1, got 0"),
    ],
)
def test_values_outside_are_refused(check, arguments, message):
    with pytest.raises(ValueError, match=message):
        check("x", *arguments)


def test_long_values_are_shortened():
    with pytest.raises(ValueError):
        check_positive("x", "a" * 1000)
