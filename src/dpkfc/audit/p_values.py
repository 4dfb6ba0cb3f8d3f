"""P-values of exact tests, and the finding on the smallest of several."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpkfc.audit.findings import Finding

ALPHA = 1e-9
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def two_sided(lower: ArrayLike, upper: ArrayLike) -> Floats:
    """Return the two-sided p-value for the probabilities of the two tails."""
    p_values: Floats = np.minimum(1.0, 2 * np.minimum(lower, upper))
    return p_values


def p_value_finding(check: str, p_value: float, tests: int, detail: str) -> Finding:
    """Return the finding on the smallest of `tests` p-values."""
    limit = ALPHA / tests
    return Finding(
        check=check,
        measured=f"p = {p_value:.2g}",
        bound=f"at least {limit:.1g}",
        passed=p_value >= limit,
        detail=detail,
    )
