"""The grid of rounded noise: multiples of a power of two, fine enough that rounding to it costs almost nothing.

Gaussian noise in floating point is not Gaussian: which numbers `x + noise` can come out as depends on x, and an observer
who looks at the low bits can tell two sums apart (Mironov 2012). Rounded noise closes that. With d released numbers, C the
sensitivity of the clipped sum and s the grid,

    x̂ = x rounded to multiples of s,   y = x̂ + (noise rounded to multiples of s) = (x̂ + noise) rounded to multiples of s

so that y is a rounding, hence a post-processing, of the ideal Gaussian mechanism on x̂, whose sensitivity is at most
C + s √d. Every y lies on the same grid whatever the data are.
"""

from __future__ import annotations

import math
from fractions import Fraction

__all__ = ["GAUSSIAN", "MOST_STEPS", "NOISES", "ROUNDED", "grid_of", "widened"]

GAUSSIAN, ROUNDED = NOISES = ("gaussian", "rounded")
MOST_STEPS = 2.0**51  # of sum and noise each: their sum is then an integer that float64 holds exactly
_SHARE = 20  # rounding the sum may widen its sensitivity by a share of 2⁻²⁰
_FARTHEST = 16.0  # standard deviations that no draw exceeds (`rng`: below 12.2)


def widened(sensitivity: float) -> float:
    """At least (1 + 2⁻²⁰) times a sensitivity: what it is at most after rounding to the grid."""
    return math.nextafter(sensitivity * (1 + 2.0**-_SHARE), math.inf)


def grid_of(sensitivity: float, numbers: int, stddev: float = 0.0) -> float:
    """The largest power of two s for which rounding `numbers` numbers keeps to the widened sensitivity.

    Args:
        sensitivity: `widened`, of the rounded sum.
        numbers: d, released numbers, >= 1.
        stddev: of the noise.

    Returns:
        s with C + s √d <= sensitivity for every C whose widened value it is.

    Raises:
        ValueError: there is no such power of two, or so much noise that float64 cannot hold it in multiples of s.
    """
    if not (sensitivity > 0 and math.isfinite(sensitivity)) or numbers < 1:
        raise ValueError(f"need a positive finite sensitivity and at least one number, got {sensitivity} and {numbers}")
    most = Fraction(sensitivity) / (2**_SHARE + 1)  # s √d <= most, compared exactly below
    exponent = math.floor(math.log2(sensitivity) - _SHARE - math.log2(numbers) / 2) + 1
    while Fraction(2) ** (2 * exponent) * numbers > most**2:
        exponent -= 1
    if exponent < -1000:
        raise ValueError(f"a sensitivity of {sensitivity} is too small for noise='rounded'; raise max_grad_norm")
    grid = math.ldexp(1.0, exponent)
    if not stddev * _FARTHEST / grid <= MOST_STEPS:
        raise ValueError(
            f"noise of standard deviation {stddev:.3g} on a sum of sensitivity {sensitivity:.3g} is too large for "
            f"noise='rounded' with {numbers:,} numbers; lower noise_multiplier, or use noise='gaussian'"
        )
    return grid
