"""Samplers: how the examples of one logical batch are chosen, and which privacy event that makes.

A sampler is a frozen value that holds public information only. The event, the neighbouring relation and the sensitivity
come from the object that draws the indices, so that they cannot be paired wrongly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
from numpy.typing import NDArray

if TYPE_CHECKING:
    import dp_accounting

__all__ = ["ADD_OR_REMOVE_ONE", "REPLACE_ONE", "FixedSize", "Poisson", "Sampler", "Shuffle", "TruncatedPoisson"]

ADD_OR_REMOVE_ONE = "add_or_remove_one"
REPLACE_ONE = "replace_one"


def _check_size(name: str, value: int, largest: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if largest is not None and value > largest:
        raise ValueError(f"{name} is {value}, more than the {largest} examples of the dataset; make it smaller")


def _gaussian(noise_multiplier: float) -> dp_accounting.GaussianDpEvent:
    import dp_accounting

    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier must be finite and >= 0, got {noise_multiplier}")
    return dp_accounting.GaussianDpEvent(float(noise_multiplier))


def _poisson_event(sample_rate: float, noise_multiplier: float) -> dp_accounting.DpEvent:
    import dp_accounting

    gaussian = _gaussian(noise_multiplier)
    return gaussian if sample_rate == 1.0 else dp_accounting.PoissonSampledDpEvent(sample_rate, gaussian)


@dataclass(frozen=True)
class Poisson:
    """Every example is in the batch with probability `sample_rate`, independently of all others and of all steps.

    The batch size varies and may be 0. Neighbours: one example added or removed.

    Attributes:
        sample_rate: q in (0, 1].
        dataset_size: number of examples N.

    Raises:
        ValueError: a rate outside (0, 1], or a size below 1.
    """

    sample_rate: float
    dataset_size: int

    certified = True
    neighbouring_relation = ADD_OR_REMOVE_ONE
    steps_per_draw = 1

    def __post_init__(self) -> None:
        _check_size("dataset_size", self.dataset_size)
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")

    @property
    def expected_batch_size(self) -> float:
        """Mean number of examples in a batch, q N."""
        return self.sample_rate * self.dataset_size

    def sensitivity(self, max_grad_norm: float) -> float:
        """Largest change of the clipped sum between neighbours: C."""
        return max_grad_norm

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event of one step whose noise has standard deviation noise_multiplier · C."""
        return _poisson_event(self.sample_rate, noise_multiplier)

    def indices(self, step: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Indices of one batch, increasing, possibly none; `step` plays no part."""
        return np.flatnonzero(generator.random(self.dataset_size) < self.sample_rate)

    def describe(self) -> dict[str, Any]:
        """Public description for the card, the header of the ledger and the hash of the plan."""
        return {"name": "poisson", "sample_rate": self.sample_rate, **_common(self)}


@dataclass(frozen=True)
class TruncatedPoisson:
    """A Poisson batch, of which a uniform subset of `max_batch_size` is kept where it is larger; so memory is bounded.

    Neighbours: one example added or removed. In a full batch an example takes the place of another, which moves the sum by
    up to 2 C; the event counts that in, so `noise_multiplier` stays noise over C (Ganesh 2025, arXiv 2508.15089).

    Attributes:
        sample_rate: q in (0, 1], before anything is left out.
        dataset_size: number of examples N.
        max_batch_size: most examples in a batch, B_max >= 1.

    Raises:
        ValueError: a rate outside (0, 1], or a size below 1.
    """

    sample_rate: float
    dataset_size: int
    max_batch_size: int

    certified = True
    neighbouring_relation = ADD_OR_REMOVE_ONE
    steps_per_draw = 1

    def __post_init__(self) -> None:
        _check_size("max_batch_size", self.max_batch_size)
        Poisson(self.sample_rate, self.dataset_size)

    @property
    def expected_batch_size(self) -> float:
        """Mean number of examples in a batch, min(Binomial(N, q), B_max); at most q N."""
        below = np.arange(min(self.max_batch_size, self.dataset_size))
        return float(scipy.stats.binom.sf(below, self.dataset_size, self.sample_rate).sum())

    def sensitivity(self, max_grad_norm: float) -> float:
        """C, on which the noise multiplier of the event is based; the 2 C of full batches are part of the event."""
        return max_grad_norm

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event of one step whose noise has standard deviation noise_multiplier · C."""
        import dp_accounting

        return dp_accounting.TruncatedSubsampledGaussianDpEvent(
            int(self.dataset_size),
            self.sample_rate,
            int(self.max_batch_size),
            _gaussian(noise_multiplier).noise_multiplier,
        )

    def indices(self, step: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Indices of one batch, increasing, possibly none; `step` plays no part."""
        drawn = Poisson(self.sample_rate, self.dataset_size).indices(step, generator)
        if drawn.size <= self.max_batch_size:
            return drawn
        return np.sort(generator.choice(drawn, size=self.max_batch_size, replace=False, shuffle=False))

    def describe(self) -> dict[str, Any]:
        """Public description for the card, the header of the ledger and the hash of the plan."""
        public = {"sample_rate": self.sample_rate, "max_batch_size": int(self.max_batch_size)}
        return {"name": "truncated_poisson", **public, **_common(self)}


@dataclass(frozen=True)
class FixedSize:
    """Exactly `batch_size` distinct examples, drawn anew and uniformly at every step. Neighbours: one example replaced.

    Attributes:
        batch_size: examples in every batch, at most `dataset_size`.
        dataset_size: number of examples N.

    Raises:
        ValueError: a size below 1, or a batch larger than the dataset.
    """

    batch_size: int
    dataset_size: int

    certified = True
    neighbouring_relation = REPLACE_ONE
    steps_per_draw = 1

    def __post_init__(self) -> None:
        _check_size("dataset_size", self.dataset_size)
        _check_size("batch_size", self.batch_size, self.dataset_size)

    @property
    def expected_batch_size(self) -> float:
        """The number of examples in every batch."""
        return float(self.batch_size)

    def sensitivity(self, max_grad_norm: float) -> float:
        """Largest change of the clipped sum between neighbours: 2 C, one vector of norm C leaves, another comes."""
        return 2.0 * max_grad_norm

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event of one step whose noise has standard deviation noise_multiplier · 2 C."""
        import dp_accounting

        # The bound behind this event (Wang, Balle and Kasiviswanathan 2019, Theorem 27, as in dp-accounting's
        # RdpAccountant with REPLACE_ONE) takes the Renyi curve of the base mechanism on two batches of size m that
        # differ in one example: alpha Delta^2 / (2 s^2) for noise of standard deviation s and a sum that moves by at
        # most Delta between such batches. dp-accounting evaluates alpha / (2 z^2) with the z of the Gaussian event and
        # does not rescale it for the relation, so z must be s / Delta. Here Delta = 2 C and s = noise_multiplier * 2 C,
        # hence z = noise_multiplier. The documentation of GaussianDpEvent calls z "s / C": taken literally that would
        # be 2 * noise_multiplier, half the true cost.
        return dp_accounting.SampledWithoutReplacementDpEvent(
            int(self.dataset_size), int(self.batch_size), _gaussian(noise_multiplier)
        )

    def indices(self, step: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Indices of one batch, increasing; `step` plays no part."""
        return np.sort(generator.choice(self.dataset_size, size=self.batch_size, replace=False, shuffle=False))

    def describe(self) -> dict[str, Any]:
        """Public description for the card, the header of the ledger and the hash of the plan."""
        return {"name": "fixed", "batch_size": self.batch_size, **_common(self)}


@dataclass(frozen=True)
class Shuffle:
    """Fixed batches along a permutation that is drawn once an epoch; the incomplete last batch is left out.

    UNCERTIFIED: `event` is that of a Poisson sampler of the same rate, for comparison with papers only. The true loss
    of shuffled batches can be several times larger (Chua et al. 2024).

    Attributes:
        batch_size: examples in every batch, at most `dataset_size`.
        dataset_size: number of examples N.

    Raises:
        ValueError: a size below 1, or a batch larger than the dataset.
    """

    batch_size: int
    dataset_size: int

    certified = False
    neighbouring_relation = ADD_OR_REMOVE_ONE

    def __post_init__(self) -> None:
        _check_size("dataset_size", self.dataset_size)
        _check_size("batch_size", self.batch_size, self.dataset_size)

    @property
    def steps_per_draw(self) -> int:
        """Batches of one epoch: they are cut from one permutation."""
        return self.dataset_size // self.batch_size

    @property
    def expected_batch_size(self) -> float:
        """The number of examples in every batch."""
        return float(self.batch_size)

    def sensitivity(self, max_grad_norm: float) -> float:
        """The C of the Poisson sampler it is compared with; no guarantee follows from it."""
        return max_grad_norm

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event of a Poisson step of the same rate: a figure for comparison, NOT a bound for this sampler."""
        return _poisson_event(self.batch_size / self.dataset_size, noise_multiplier)

    def indices(self, step: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Indices of one batch; the steps of one epoch must come with equal generators."""
        position = step % self.steps_per_draw
        permutation = generator.permutation(self.dataset_size)
        return permutation[position * self.batch_size : (position + 1) * self.batch_size]

    def describe(self) -> dict[str, Any]:
        """Public description for the card, the header of the ledger and the hash of the plan."""
        return {"name": "shuffle", "batch_size": self.batch_size, **_common(self)}


Sampler = Poisson | TruncatedPoisson | FixedSize | Shuffle


def _common(sampler: Sampler) -> dict[str, Any]:
    return {
        "dataset_size": int(sampler.dataset_size),
        "neighbouring_relation": sampler.neighbouring_relation,
        "certified": sampler.certified,
    }
