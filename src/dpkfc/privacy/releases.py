"""Say what a plan releases: the kind of noise, the grid of rounded noise, releases beside steps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dpkfc._checks import check_integer, check_positive
from dpkfc.privacy.ledger import Ledger

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# --------------------------------------------------------------------------------------------------
# The grid of rounded noise: multiples of a power of two, so fine that rounding costs almost
# nothing.
#
# Gaussian noise in floating point is not Gaussian: the possible values of `x + noise` depend on x,
# and an observer of the low bits can tell two sums apart (Mironov 2012). Rounded noise prevents
# this attack. With d released numbers, C the sensitivity of the clipped sum and s the grid,
#
#     x̂ = x rounded to multiples of s
#     y = x̂ + (noise rounded to multiples of s) = (x̂ + noise) rounded to multiples of s
#
# so that y is a rounding, hence a post-processing, of the ideal Gaussian mechanism on x̂, whose
# sensitivity is at most C + s √d. Every y lies on the same grid, whatever the data are.

# Bound of sum and noise each, in steps of the grid. Float64 then holds their total exactly.
# Rounding the sum may widen its sensitivity by a fraction of 2⁻²⁰.
# Standard deviations that no draw exceeds (the tails of `rng` end below 12.2).

GAUSSIAN = "gaussian"
ROUNDED = "rounded"
NOISES = (GAUSSIAN, ROUNDED)
MOST_STEPS = 2.0**51
_WIDENING_BITS = 20
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
        ValueError: there is no such power of two, or float64 cannot hold the noise in multiples of
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


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExtraRelease:
    """One kind of release beside the steps: a vector of all private records with Gaussian noise.

    `release_vector` makes one. Vector and noise are rounded to one grid, which the
    sensitivity accounts for.

    Attributes:
        purpose: what it is for, such as "bounds"; its name in a ledger.
        noise_multiplier: standard deviation of the noise over `sensitivity`.
        norm: the largest L2 change of the vector when one record (unit) is added or removed.
        count: how many a plan allows.

    Raises:
        ValueError: a value outside its range.
    """

    purpose: str
    noise_multiplier: float
    norm: float
    count: int = 1

    def __post_init__(self) -> None:
        if not self.purpose.isidentifier():
            raise ValueError(f"purpose must be a word, got {self.purpose!r}; take 'bounds'")
        check_positive("noise_multiplier", self.noise_multiplier)
        check_positive("norm", self.norm)
        check_integer("count", self.count, 1)

    @property
    def sensitivity(self) -> float:
        """Return the largest change of the rounded vector between neighbouring datasets."""
        return widen_sensitivity(self.norm)

    @property
    def stddev(self) -> float:
        """Return the standard deviation of the noise on each entry."""
        return self.noise_multiplier * self.sensitivity

    @property
    def event(self) -> DpEvent:
        """Return the event of one release."""
        import dp_accounting

        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    def describe(self) -> dict[str, Any]:
        """Return all that decides what is released, as plain values."""
        return asdict(self)


def charge_extra(ledger: Ledger, kind: ExtraRelease, step: int) -> None:
    """Charge one release of a kind; errors are those of `Ledger.charge`."""
    noise = kind.noise_multiplier
    ledger.charge(step, kind.event, noise, kind.stddev, kind.sensitivity, kind.purpose)
