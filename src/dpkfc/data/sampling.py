"""Samplers: the choice of examples in a logical batch, with the privacy event of that choice.

A sampler is a frozen value of public information. Event, neighbouring relation and sensitivity come
from the object that samples the indices, so they cannot be paired wrongly.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dpkfc._checks import check_not_negative
from dpkfc.data.loading import Indices, check_once

if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting import DpEvent

ADD_OR_REMOVE_ONE = "add_or_remove_one"
REPLACE_ONE = "replace_one"


class Sampler(Protocol):
    """The choice of the examples in every logical batch, and its privacy event.

    Inherit from it, and write `dataset_size`, `expected_batch_size`, `event`, `indices` and
    `describe`. The defaults are those of neighbours that add or remove one example.

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


SamplerBase = Sampler


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
        return np.flatnonzero(generator.random(self.dataset_size) < self.sample_rate)

    def describe(self) -> dict[str, Any]:
        """Return plain values for the card, the header of the ledger and the hash of the plan."""
        return {"name": "poisson", "sample_rate": self.sample_rate, **_describe_common(self)}


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

    UNCERTIFIED: `event` is that of a Poisson sampler of the same rate, for comparison with papers
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


# --------------------------------------------------------------------------------------------------
# Privacy units larger than a record: all records of one patient or user count as one example.
#
# The sampler draws units. Of a unit with more records than the limit, a uniform subset of the size
# of the limit is drawn anew at every step. The choice uses the secret sampling stream and the data
# of no other unit. A step therefore stays the plan's event with the unit in place of the example:
# the guarantee of a mixture is that of its components.

_MISSING_TEXTS = {"", "nan", "nat", "none", "<na>"}


@dataclass(frozen=True)
class Units:
    """The records of every unit.

    Attributes:
        records: record numbers, unit after unit `[number of records]`.
        starts: start of each unit in `records`, and their end `[units + 1]`.
        limit: most records of one unit that count in one step.
    """

    records: Indices
    starts: Indices
    limit: int

    @classmethod
    def from_ids(cls, ids: ArrayLike, limit: int) -> Units:
        """Return the units of a column of ids; a unit exists where it has a record.

        Args:
            ids: one id a record `[number of records]`: integers, texts, or anything that sorts.
            limit: most records of one unit in one step, >= 1.

        Raises:
            ValueError: ids that are not a vector, missing ids, ids of mixed kinds.
        """
        _, inverse = np.unique(check_ids(ids), return_inverse=True)
        counts = np.bincount(inverse)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(np.argsort(inverse, kind="stable").astype(np.int64), starts, limit)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def draw(self, units: Indices, generator: np.random.Generator) -> Indices:
        """Return the records of sampled units, at most `limit` of each.

        Args:
            units: unit numbers `[n]`.
            generator: from the sampling stream, after the units were sampled from it.

        Returns:
            Record numbers `[n, k]`, with k the most records of any of these units (1 for no units).
            Shorter rows end with -1.
        """
        chosen = [self._draw_records(int(unit), generator) for unit in units]
        width = max((records.size for records in chosen), default=1)
        table = np.full((len(chosen), width), -1, dtype=np.int64)
        for row, records in zip(table, chosen, strict=True):
            row[: records.size] = records
        return table

    def _draw_records(self, unit: int, generator: np.random.Generator) -> Indices:
        records = self.records[self.starts[unit] : self.starts[unit + 1]]
        if records.size <= self.limit:
            return records
        return np.sort(generator.choice(records, size=self.limit, replace=False))


def read_unit_ids(dataset: Any, units: Any) -> Any:
    """Return the column of ids: `units` itself, or the column of that name in a dataset.

    Raises:
        ValueError: the dataset has no such column.
    """
    if not isinstance(units, str):
        return units
    try:
        return list(dataset[units])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the dataset has no column {units!r} ({type(error).__name__}); give `units` as a"
            " vector with one id a record"
        ) from error


def check_ids(ids: Any) -> NDArray[Any]:
    """Return the ids of units as a vector, all present and of one kind.

    Raises:
        ValueError: ids that are not a vector, missing ids, ids of mixed kinds.
    """
    column = _make_array(ids)
    if column.ndim != 1 or not column.size:
        raise ValueError(
            f"units must be a vector with one id a record, got an array of shape {column.shape}"
        )
    missing = np.flatnonzero(_find_missing(column))
    if missing.size:
        raise ValueError(
            f"record {missing[0]} has no unit ({missing.size} records in all), so no guarantee"
            " covers it: leave it out, or give it a unit of its own"
        )
    if column.dtype == object and len({type(x) for x in column.tolist()}) > 1:
        raise ValueError("the ids of units are of mixed types; make them all integers or all texts")
    return column


def _make_array(ids: Any) -> NDArray[Any]:
    """Return the ids as an array.

    The ids of a list keep their types: next to one text numpy would make texts of all, of NaN too.
    """
    if isinstance(ids, Tensor):
        return ids.detach().cpu().numpy()
    if isinstance(ids, np.ma.MaskedArray):
        # Masked ids become None.
        ids = ids.tolist()
    elif hasattr(ids, "__array__"):
        return np.asarray(ids)
    values = []
    for x in ids:
        is_scalar = isinstance(x, (Tensor, np.number, np.str_)) and x.ndim == 0
        values.append(x.item() if is_scalar else x)
    if any(map(np.ndim, values)):
        return np.asarray(values, dtype=object)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _find_missing(column: NDArray[Any]) -> list[bool] | NDArray[np.bool_]:
    """Return which ids are None, NaN, NaT, pandas' NA, or one of their texts."""
    if column.dtype.kind in "OUS":
        return [_is_missing(x) for x in column.tolist()]
    return column != column  # noqa: PLR0124


def _is_missing(x: Any) -> bool:
    if x is None:
        return True
    if isinstance(x, bytes):
        x = x.decode("utf-8", "replace")
    if isinstance(x, str):
        return x.strip().lower() in _MISSING_TEXTS
    try:
        # NaN and NaT differ from themselves.
        return bool(x != x)  # noqa: PLR0124
    except TypeError:
        # The truth of a comparison with pandas' NA is undefined.
        return True


def make_units(config: Any, dataset: Any, column: Any, records: int, expected: int) -> Units | None:
    """Return the units of a dataset, None where each record is one.

    Args:
        config: `unit` and `max_records_per_unit` of the plan.
        dataset: the dataset.
        column: ids, or the name of a column, or None.
        records: of the dataset.
        expected: units of the plan.

    Raises:
        ValueError: units and plan do not agree.
    """
    if config.max_records_per_unit is None:
        if column is not None:
            raise ValueError(
                "units were given, but the plan protects single examples; set"
                " PrivacyConfig(unit=..., "
                "max_records_per_unit=...) and dataset_size = number of units"
            )
        check_once(dataset)
        if records != expected:
            raise ValueError(
                f"the plan was calibrated for {expected} examples but the dataset has {records};"
                " calibrate with dataset_size=len(dataset)"
            )
        return None
    if column is None:
        raise ValueError(
            f"the plan protects one {config.unit}, so the session needs units=, one id a record"
        )
    ids = read_unit_ids(dataset, column)
    if len(ids) != records:
        raise ValueError(
            f"units has {len(ids)} ids for the {records} records of the dataset; give one a record"
        )
    units = Units.from_ids(ids, config.max_records_per_unit)
    if len(units) != expected:
        raise ValueError(
            f"the plan was calibrated for {expected} {config.unit}s but the dataset has"
            f" {len(units)}; calibrate with dataset_size=the number of distinct ids"
        )
    return units
