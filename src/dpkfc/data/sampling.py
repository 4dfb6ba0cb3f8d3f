"""Samplers: the choice of examples in a logical batch, with the privacy event of that choice.

A sampler is a frozen value of public information. Event, neighbouring relation and sensitivity come
from the object that samples the indices, so they cannot be paired wrongly.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import scipy

from dpkfc._checks import check_not_negative
from dpkfc.data.poisson_gaps import Indices, draw_by_gaps

if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting import DpEvent

ADD_OR_REMOVE_ONE = "add_or_remove_one"
REPLACE_ONE = "replace_one"


class Sampler(Protocol):
    """The choice of the examples in every logical batch, and its privacy event.

    Inherit from it, and write `dataset_size`, `expected_batch_size`, `event`, `indices` and
    `describe`. The defaults are for neighbours that add or remove one example.

    Attributes:
        dataset_size: number of examples N.
        certified: whether `event` bounds the privacy loss of the batches of `indices`.
    """

    dataset_size: int
    certified: bool = False

    @property
    def neighbouring_relation(self) -> str:
        """Return the relation of neighbouring datasets: "add_or_remove_one" or "replace_one"."""
        return ADD_OR_REMOVE_ONE

    @property
    def steps_per_draw(self) -> int:
        """Return the number of steps whose batches come from one draw of random numbers.

        The generators of these steps are equal. By default every step has numbers of its own.
        """
        return 1

    @property
    @abstractmethod
    def expected_batch_size(self) -> float:
        """Return the mean number of examples in a batch."""

    @property
    def separation(self) -> int:
        """Return the length of a window of steps in which an example takes part at most once.

        By default it is 1: an example may take part in any step.
        """
        return 1

    def sensitivity(self, max_grad_norm: float) -> float:
        """Return the largest change of the clipped sum between neighbours, for the clip norm C.

        By default it is C, the most that one example more or less can change.
        """
        return max_grad_norm

    @abstractmethod
    def event(self, noise_multiplier: float) -> DpEvent:
        """Return the event of one step.

        Args:
            noise_multiplier: standard deviation of the noise over `sensitivity(C)`.
        """

    @abstractmethod
    def indices(self, step: int, generator: np.random.Generator) -> Indices:
        """Return the indices of one batch, possibly none."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return plain values for the card, the header of the ledger and the hash of the plan."""


def _check_size(name: str, value: int, largest: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if largest is not None and value > largest:
        raise ValueError(
            f"{name} is {value}, more than the {largest} examples of the dataset; make it smaller"
        )


def _gaussian(noise_multiplier: float) -> dp_accounting.GaussianDpEvent:
    import dp_accounting

    check_not_negative("noise_multiplier", noise_multiplier)
    return dp_accounting.GaussianDpEvent(float(noise_multiplier))


def _poisson_event(sample_rate: float, noise_multiplier: float) -> DpEvent:
    import dp_accounting

    gaussian = _gaussian(noise_multiplier)
    if sample_rate == 1.0:
        return gaussian
    return dp_accounting.PoissonSampledDpEvent(sample_rate, gaussian)


def _describe_common(sampler: Sampler) -> dict[str, Any]:
    return {
        "dataset_size": int(sampler.dataset_size),
        "neighbouring_relation": sampler.neighbouring_relation,
        "certified": sampler.certified,
    }


@dataclass(frozen=True)
class Poisson(Sampler):
    """Every example is in the batch with probability `sample_rate`, independently of all else.

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

    def __post_init__(self) -> None:
        _check_size("dataset_size", self.dataset_size)
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")

    @property
    def expected_batch_size(self) -> float:
        """Return the mean number of examples in a batch, q N."""
        return self.sample_rate * self.dataset_size

    def event(self, noise_multiplier: float) -> DpEvent:
        """Return the event of one step whose noise has standard deviation noise_multiplier · C."""
        return _poisson_event(self.sample_rate, noise_multiplier)

    def indices(self, step: int, generator: np.random.Generator) -> Indices:
        """Return the indices of one batch, increasing, possibly none; `step` is not used."""
        return draw_by_gaps(self.dataset_size, self.sample_rate, generator)

    def describe(self) -> dict[str, Any]:
        """Return plain values for the card, the header of the ledger and the hash of the plan."""
        return {"name": "poisson", "sample_rate": self.sample_rate, **_describe_common(self)}


@dataclass(frozen=True)
class CyclicPoisson(Sampler):
    """Poisson batches from one of `groups` fixed groups of examples in turn.

    An example takes part in at most one of `groups` consecutive steps, as correlated noise needs
    it. The groups are of equal size (but for one example), and follow from the place of an example
    in the dataset by a fixed permutation. Neighbours: one example added or removed, where the place
    of a removed example stays empty ("zero-out" neighbours), so that no other example changes its
    group. This fits a number of examples that is public.

    Attributes:
        sample_rate: probability in (0, 1] of an example of the group whose turn it is.
        dataset_size: number of examples N.
        groups: number of groups, at most N.

    Raises:
        ValueError: a rate outside (0, 1], a size below 1, or more groups than examples.
    """

    sample_rate: float
    dataset_size: int
    groups: int

    certified = True

    def __post_init__(self) -> None:
        Poisson(self.sample_rate, self.dataset_size)
        _check_size("groups", self.groups, self.dataset_size)

    @property
    def separation(self) -> int:
        """Return the number of groups."""
        return self.groups

    @property
    def expected_batch_size(self) -> float:
        """Return the mean number of examples in a batch."""
        return self.sample_rate * self.dataset_size / self.groups

    def event(self, noise_multiplier: float) -> DpEvent:
        """Return the event of one turn: it costs the examples of one group, and no others."""
        return _poisson_event(self.sample_rate, noise_multiplier)

    @cached_property
    def _order(self) -> Indices:
        """A permutation that is the same in every run; group g has every `groups`-th from g on."""
        # Raw numbers are the same in every version of NumPy, its permutations may not be.
        numbers = np.random.Philox(key=0).random_raw(self.dataset_size)
        return np.argsort(numbers, kind="stable")

    def indices(self, step: int, generator: np.random.Generator) -> Indices:
        """Return the indices of one batch, increasing, possibly none.

        Args:
            step: number of releases before this one, which says whose turn it is.
            generator: of the sampling stream.
        """
        group = self._order[step % self.groups :: self.groups]
        drawn = draw_by_gaps(len(group), self.sample_rate, generator)
        return np.sort(group[drawn])

    def describe(self) -> dict[str, Any]:
        """Return plain values for the card, the header of the ledger and the hash of the plan."""
        return {
            "name": "cyclic_poisson",
            "sample_rate": self.sample_rate,
            "groups": int(self.groups),
            "removed_example": "its place stays empty",
            **_describe_common(self),
        }


@dataclass(frozen=True)
class TruncatedPoisson(Sampler):
    """A Poisson batch, cut to a uniform subset of `max_batch_size` where it is larger.

    Memory is therefore bounded. Neighbours: one example added or removed. In a full batch an
    example takes the place of another one, which moves the sum by up to 2 C. The event accounts for
    this, so `noise_multiplier` stays noise over C (Ganesh 2025, arXiv 2508.15089).

    Attributes:
        sample_rate: q in (0, 1], before the cut.
        dataset_size: number of examples N.
        max_batch_size: most examples in a batch, B_max >= 1.

    Raises:
        ValueError: a rate outside (0, 1], or a size below 1.
    """

    sample_rate: float
    dataset_size: int
    max_batch_size: int

    certified = True

    def __post_init__(self) -> None:
        _check_size("max_batch_size", self.max_batch_size)
        Poisson(self.sample_rate, self.dataset_size)

    @property
    def expected_batch_size(self) -> float:
        """Return the mean number of examples in a batch, min(Binomial(N, q), B_max) ≤ q N."""
        sizes = np.arange(min(self.max_batch_size, self.dataset_size))
        return float(scipy.stats.binom.sf(sizes, self.dataset_size, self.sample_rate).sum())

    def event(self, noise_multiplier: float) -> DpEvent:
        """Return the event of one step whose noise has standard deviation noise_multiplier · C.

        The 2 C of full batches are part of the event.
        """
        import dp_accounting

        return dp_accounting.TruncatedSubsampledGaussianDpEvent(
            int(self.dataset_size),
            self.sample_rate,
            int(self.max_batch_size),
            _gaussian(noise_multiplier).noise_multiplier,
        )

    def indices(self, step: int, generator: np.random.Generator) -> Indices:
        """Return the indices of one batch, increasing, possibly none; `step` is not used."""
        indices = Poisson(self.sample_rate, self.dataset_size).indices(step, generator)
        if indices.size <= self.max_batch_size:
            return indices
        return np.sort(
            generator.choice(indices, size=self.max_batch_size, replace=False, shuffle=False)
        )

    def describe(self) -> dict[str, Any]:
        """Return plain values for the card, the header of the ledger and the hash of the plan."""
        return {
            "name": "truncated_poisson",
            "sample_rate": self.sample_rate,
            "max_batch_size": int(self.max_batch_size),
            **_describe_common(self),
        }


@dataclass(frozen=True)
class _EqualBatches(Sampler):
    """A sampler whose batches all have one size."""

    batch_size: int
    dataset_size: int

    def __post_init__(self) -> None:
        _check_size("dataset_size", self.dataset_size)
        _check_size("batch_size", self.batch_size, self.dataset_size)

    @property
    def expected_batch_size(self) -> float:
        """Return the number of examples in every batch."""
        return float(self.batch_size)


@dataclass(frozen=True)
class FixedSize(_EqualBatches):
    """Exactly `batch_size` distinct examples, uniform and new at every step.

    Neighbours: one example replaced.

    Attributes:
        batch_size: examples in every batch, at most `dataset_size`.
        dataset_size: number of examples N.

    Raises:
        ValueError: a size below 1, or a batch larger than the dataset.
    """

    certified = True
    neighbouring_relation = REPLACE_ONE

    def sensitivity(self, max_grad_norm: float) -> float:
        """Return 2 C: one vector of norm C leaves the sum, and another one enters."""
        return 2.0 * max_grad_norm

    def event(self, noise_multiplier: float) -> DpEvent:
        """Return the event of one step whose noise has stddev noise_multiplier · 2 C."""
        import dp_accounting

        # The bound behind this event is Theorem 27 of Wang, Balle and Kasiviswanathan (2019), as in
        # dp-accounting's RdpAccountant with REPLACE_ONE. It takes the Renyi curve of the base
        # mechanism on two batches that differ in one example: alpha Delta^2 / (2 s^2), for noise of
        # standard deviation s and a sum that moves by at most Delta between such batches.
        # dp-accounting evaluates alpha / (2 z^2) with the z of the Gaussian event and does not
        # rescale z for the relation, so z must be s / Delta. Here Delta = 2 C and s =
        # noise_multiplier * 2 C, hence z = noise_multiplier. The documentation of GaussianDpEvent
        # calls z "s / C". Taken literally, z would be 2 * noise_multiplier, half the true cost.
        return dp_accounting.SampledWithoutReplacementDpEvent(
            int(self.dataset_size), int(self.batch_size), _gaussian(noise_multiplier)
        )

    def indices(self, step: int, generator: np.random.Generator) -> Indices:
        """Return the indices of one batch, increasing; `step` is not used."""
        return np.sort(
            generator.choice(self.dataset_size, size=self.batch_size, replace=False, shuffle=False)
        )

    def describe(self) -> dict[str, Any]:
        """Return plain values for the card, the header of the ledger and the hash of the plan."""
        return {"name": "fixed", "batch_size": self.batch_size, **_describe_common(self)}


@dataclass(frozen=True)
class Shuffle(_EqualBatches):
    """Fixed batches along one permutation an epoch; the incomplete last batch is skipped.

    UNCERTIFIED: `event` belongs to a Poisson sampler of the same rate, for comparison with papers
    only. The true loss of shuffled batches can be several times larger (Chua et al. 2024).

    Attributes:
        batch_size: examples in every batch, at most `dataset_size`.
        dataset_size: number of examples N.

    Raises:
        ValueError: a size below 1, or a batch larger than the dataset.
    """

    @property
    def steps_per_draw(self) -> int:
        """Return the number of batches of an epoch: they are cut from one permutation."""
        return self.dataset_size // self.batch_size

    def event(self, noise_multiplier: float) -> DpEvent:
        """Return the event of a Poisson step of the same rate: NOT a bound for this sampler."""
        return _poisson_event(self.batch_size / self.dataset_size, noise_multiplier)

    def indices(self, step: int, generator: np.random.Generator) -> Indices:
        """Return the indices of one batch; the steps of one epoch need equal generators."""
        start = (step % self.steps_per_draw) * self.batch_size
        return generator.permutation(self.dataset_size)[start : start + self.batch_size]

    def describe(self) -> dict[str, Any]:
        """Return plain values for the card, the header of the ledger and the hash of the plan."""
        return {"name": "shuffle", "batch_size": self.batch_size, **_describe_common(self)}
