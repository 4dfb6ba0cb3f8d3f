"""A printed ε is never below the true one, and at most one unit above it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.report.text import round_up


@given(st.floats(0, 1e4), st.integers(0, 5))
def test_it_is_rounded_up_by_less_than_a_unit(epsilon, decimals):
    printed = float(round_up(epsilon, decimals))
    assert epsilon <= printed < epsilon + 10**-decimals * (1 + 1e-9)


@pytest.mark.parametrize(
    "epsilon, text", [(2.9996, "3.000"), (3.0, "3.000"), (1.1, "1.100"), (math.inf, "∞")]
)
def test_examples(epsilon, text):
    assert round_up(epsilon) == text
