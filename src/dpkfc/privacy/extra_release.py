"""Gaussian releases beside the steps of a run: in the same ledger, and part of the same ε."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dpkfc._checks import check_integer, check_positive
from dpkfc.privacy.accounting import event_from_dict, total_epsilon
from dpkfc.privacy.calibration import calibrate_noise_multiplier
from dpkfc.privacy.mechanism import widened

if TYPE_CHECKING:
    import dp_accounting


@dataclass(frozen=True, kw_only=True)
class ExtraRelease:
    """One kind of release beside the steps: a vector of all private records with Gaussian noise.

    `mechanism.release_vector` makes one. Vector and noise are rounded to one grid, which the
    sensitivity accounts for.

    Attributes:
        purpose: what it is for, such as "bounds"; its name in a ledger.
        noise_multiplier: standard deviation of the noise over `sensitivity`.
        norm: most that one record (unit), added or removed, changes the vector, in the L2 norm.
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
        return widened(self.norm)

    @property
    def stddev(self) -> float:
        """Return the standard deviation of the noise on each entry."""
        return self.noise_multiplier * self.sensitivity

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Return the event of one release."""
        import dp_accounting

        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    def describe(self) -> dict[str, Any]:
        """Return all that decides what is released, as plain values."""
        return asdict(self)


def share_noise(share: float, epsilon: float, delta: float, count: int = 1) -> float:
    """Return the noise multiplier at which `count` releases alone cost a share of ε at δ."""
    import dp_accounting

    return calibrate_noise_multiplier(share * epsilon, delta, dp_accounting.GaussianDpEvent, count)


def describe_extra(releases: Sequence[Mapping[str, Any]], delta: float) -> list[dict[str, Any]]:
    """Return what a ledger holds beside the steps, with ε of each kind alone at δ.

    Args:
        releases: lines of a ledger.
        delta: δ in (0, 1).
    """
    kinds: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in releases:
        if line.get("purpose"):
            scale = line["noise_multiplier"], line["stddev"], line["sensitivity"]
            kinds.setdefault((line["purpose"], *scale), []).append(line)
    rows = []
    for (purpose, noise_multiplier, stddev, sensitivity), lines in kinds.items():
        charges = [(event_from_dict(line["event"]), 1) for line in lines]
        row = {
            "purpose": purpose,
            "releases": len(lines),
            "noise_multiplier": noise_multiplier,
            "stddev": stddev,
            "sensitivity": sensitivity,
            "epsilon_alone": total_epsilon(charges, delta),
        }
        rows.append(row)
    return rows
