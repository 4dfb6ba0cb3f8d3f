"""Releases of a plan beside its steps: vectors of all private records with Gaussian noise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dpkfc._checks import check_integer, check_positive
from dpkfc.privacy.grid import widen_sensitivity
from dpkfc.privacy.ledger import Ledger

if TYPE_CHECKING:
    from dp_accounting import DpEvent


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
    """Charge one release of a kind; errors are as in `Ledger.charge`."""
    noise = kind.noise_multiplier
    ledger.charge(step, kind.event, noise, kind.stddev, kind.sensitivity, kind.purpose)
