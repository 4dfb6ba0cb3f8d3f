"""The grid of rounded noise: multiples of a power of two, so fine that rounding costs little.

Gaussian noise in floating point is not Gaussian: the possible values of `x + noise` depend on x,
and an observer of the low bits can tell two sums apart (Mironov 2012). Rounded noise prevents
this attack. With d released numbers, C the sensitivity of the clipped sum and s the grid,

    x̂ = x rounded to multiples of s
    y = x̂ + (noise rounded to multiples of s) = (x̂ + noise) rounded to multiples of s

so that y is a rounding, hence a post-processing, of the ideal Gaussian mechanism on x̂, whose
sensitivity is at most C + s √d. Every y lies on the same grid, whatever the data are.
"""

from __future__ import annotations

import math
from fractions import Fraction

GAUSSIAN = "gaussian"
ROUNDED = "rounded"
NOISES = (GAUSSIAN, ROUNDED)
# Of the plan of a session alone: `correlated_noise`, and the search for the better of both.
CORRELATED = "correlated"
AUTO = "auto"
# Bound of sum and noise each, in steps of the grid. Float64 then holds their total exactly.
MOST_STEPS = 2.0**51
# Rounding the sum may widen its sensitivity by a fraction of 2⁻²⁰.
_WIDENING_BITS = 20
# Standard deviations that no draw exceeds (the tails of `rng` end below 12.2).
_MAX_DEVIATIONS = 16.0


def widen_sensitivity(sensitivity: float) -> float:
    """Return C · (1 + 2⁻²⁰), rounded up: an upper bound of the sensitivity of the rounded sum.

    Args:
        sensitivity: C, of the sum before it is rounded.
    """
    wide = sensitivity * (1 + 2.0**-_WIDENING_BITS)
    return math.nextafter(wide, math.inf)


def grid_of(sensitivity: float, numbers: int, stddev: float = 0.0) -> float:
    """Return the largest power of two s for which rounding stays within the widened sensitivity.

    Args:
        sensitivity: the result of `widen_sensitivity(C)`.
        numbers: d, the number of released numbers, >= 1.
        stddev: the standard deviation of the noise.

    Returns:
        The step s of the grid: C + s √d <= sensitivity.

    Raises:
        ValueError: no power of two fits, or float64 cannot hold the noise in multiples of
            s.
    """
    if not (sensitivity > 0 and math.isfinite(sensitivity)) or numbers < 1:
        raise ValueError(
            f"need a positive finite sensitivity and at least one number, got {sensitivity} and"
            f" {numbers}"
        )
    # Rounding needs s √d <= widening. Fractions compare exactly.
    widening = Fraction(sensitivity) / (2**_WIDENING_BITS + 1)
    estimate = math.log2(sensitivity) - _WIDENING_BITS - math.log2(numbers) / 2
    exponent = math.floor(estimate) + 1
    while Fraction(2) ** (2 * exponent) * numbers > widening**2:
        exponent -= 1
    if exponent < -1000:
        raise ValueError(
            f"a sensitivity of {sensitivity} is too small for noise='rounded'; raise max_grad_norm"
        )
    grid = math.ldexp(1.0, exponent)
    if not stddev * _MAX_DEVIATIONS / grid <= MOST_STEPS:
        raise ValueError(
            f"noise of standard deviation {stddev:.3g} is too large for noise='rounded' with"
            f" sensitivity {sensitivity:.3g}; lower noise_multiplier, or use noise='gaussian'"
        )
    return grid
