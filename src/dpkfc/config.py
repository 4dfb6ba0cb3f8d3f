"""Hold the settings of a private run, check them, and turn them into a plan."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpkfc._checks import (
    check_integer,
    check_one_of,
    check_optional_integer,
    check_positive,
)
from dpkfc.clipping import SPLIT, contribution_bound
from dpkfc.data.sampling import (
    CyclicPoisson,
    FixedSize,
    Poisson,
    Sampler,
    Shuffle,
    TruncatedPoisson,
)
from dpkfc.privacy import cross_check
from dpkfc.privacy.accounting import EpsilonCurve
from dpkfc.privacy.calibration import (
    PlanBase,
    calibrate_noise_multiplier,
    check_noise_multiplier,
    check_target,
    estimate_noise_multiplier,
)
from dpkfc.privacy.correlated_noise import choose_bands
from dpkfc.privacy.dp_accountants import ACCOUNTANTS
from dpkfc.privacy.events import NEGLIGIBLE_NOISE, event_to_dict
from dpkfc.privacy.extra_releases import ExtraRelease
from dpkfc.privacy.grid import AUTO, CORRELATED, GAUSSIAN, NOISES, ROUNDED, widen_sensitivity
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.rng import NoiseStream, SamplingStream

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    # A plan of plain settings is made without torch, which takes seconds to import.
    from dpkfc.curvature.base import Preconditioner
    from dpkfc.gradients.clip import Clip
    from dpkfc.memory import RowLimit
    from dpkfc.postprocess.protocol import PostProcess
    from dpkfc.postprocess.weight_average import WeightEMA
    from dpkfc.privacy.events import Charges


# --------------------------------------------------------------------------------------------------
# The plan: sampler, sensitivity, noise and event of one run, frozen together so that they cannot
# disagree.

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Plan(PlanBase):
    """Says what one private run does and costs.

    Make it with `PrivacyConfig.calibrate` or `PrivacyConfig.with_noise`.

    Everything in it is public, the number of examples included.

    Attributes:
        config: the settings it was made from.
        dataset_size: number of examples N, or of units where `config.unit` is larger than a record.
        sampler: how a logical batch is drawn.
        noise_multiplier: standard deviation of the noise over the sensitivity; 0 means no noise and
            no privacy.
        delta: δ of the guarantee.
        steps: planned number of releases.
        target_epsilon: the ε it was calibrated for, None where the noise was given.

    Raises:
        ValueError: a value outside its range.
    """

    config: PrivacyConfig
    dataset_size: int
    sampler: Sampler
    noise_multiplier: float
    delta: float
    steps: int
    target_epsilon: float | None = None

    def __post_init__(self) -> None:
        self._check_noise_and_target()
        if self.steps < 1:
            raise ValueError(f"a plan needs at least one step, got {self.steps}")
        if self.sampler.dataset_size != self.dataset_size:
            raise ValueError(
                f"the sampler draws from {self.sampler.dataset_size} examples, the plan is for"
                f" {self.dataset_size}"
            )
        if self.noise == AUTO or (self.noise == CORRELATED and self.config.bands is None):
            raise ValueError(
                f"noise={self.noise!r} without bands is settled by PrivacyConfig.calibrate; make"
                " the plan with it, or name the bands"
            )
        if self.sampler.separation < self.bands:
            raise ValueError(
                f"the sampler {self.sampler.describe()['name']!r} may draw an example twice in"
                f" {self.bands} steps, too often for {self.bands} bands; use CyclicPoisson"
            )
        if self.config.preconditioner is not None:
            self.config.preconditioner.check_plan(self.steps, self.config.readout)

    @cached_property
    def max_grad_norm(self) -> float:
        """C, the norm to which one example is clipped."""
        return self.config.max_grad_norm

    @cached_property
    def clipping(self) -> str:
        """Flat, normalised or automatic."""
        return self.config.clipping

    @cached_property
    def expected_batch_size(self) -> int:
        """The public divisor of every noisy sum, which does not depend on the sampled batch."""
        return self.config.expected_batch_size

    @cached_property
    def sensitivity(self) -> float:
        """Return the largest change of the clipped sum between neighbouring datasets.

        It is measured in the preconditioned space.

        Where the noise is rounded, it is the sensitivity of the rounded sum.
        """
        bound = contribution_bound(self.clipping, self.max_grad_norm)
        sensitivity = self.sampler.sensitivity(bound)
        return widen_sensitivity(sensitivity) if self.noise == ROUNDED else sensitivity

    @cached_property
    def noise(self) -> str:
        """Kind of the noise: "gaussian", "rounded" or "correlated"."""
        return self.config.noise

    @property
    def bands(self) -> int:
        """Consecutive steps over which the noise is correlated; 1 for independent noise."""
        return self.config.bands or 1

    @cached_property
    def event(self) -> DpEvent:
        """The event of one release."""
        return self.sampler.event(self.noise_multiplier)

    def count_events(self, releases: int) -> int:
        """Return how many events so many steps cost a unit: one for each turn of its group."""
        return math.ceil(releases / self.sampler.separation)

    @property
    def ledger_header(self) -> dict[str, Any]:
        """Return what a ledger says of its plan, so that the ledger can be read alone."""
        separation = self.sampler.separation
        return {**super().ledger_header, **({"groups": separation} if separation > 1 else {})}

    @property
    def accountant(self) -> str:
        """The accountant of the reported ε: "pld" or "rdp"."""
        return self.config.resolved_accountant

    @property
    def neighbouring_relation(self) -> str:
        """Which datasets count as neighbours: "add_or_remove_one" or "replace_one"."""
        return self.sampler.neighbouring_relation

    @property
    def privacy_unit(self) -> str:
        """The unit that neighbouring datasets differ in."""
        most = self.config.max_records_per_unit
        if most is None:
            return "one example"
        return (
            f"one {self.config.unit} (all records; up to {most} of them, drawn anew, count in a"
            " step)"
        )

    @property
    def units(self) -> int:
        """Return the number of privacy units N."""
        return self.dataset_size

    def _further_caveats(self) -> Iterable[str]:
        for kind in self.extra_releases:
            if kind.noise_multiplier < NEGLIGIBLE_NOISE:
                yield f"NOT PRIVATE: the release for {kind.purpose} has no noise to speak of"
        preconditioner = self.config.describe_preconditioner() or {}
        if preconditioner.get("uses_private_data"):
            yield "NOT PRIVATE: curvature is measured on the private data themselves"
        if not self.sampler.certified:
            yield (
                "UNCERTIFIED: shuffled batches; epsilon is computed for Poisson sampling at the"
                " same rate, which these batches can exceed several times over"
            )

    @property
    def extra_releases(self) -> tuple[ExtraRelease, ...]:
        """Kinds of releases beside the steps."""
        return self.config.extra_releases

    def extra_release(self, purpose: str) -> ExtraRelease:
        """Return the kind of releases beside the steps with this purpose.

        Raises:
            ValueError: the plan has no such kind.
        """
        for kind in self.extra_releases:
            if kind.purpose == purpose:
                return kind
        raise ValueError(f"the plan has no releases for {purpose}; name them in extra_releases")

    @property
    def extra_counts(self) -> dict[str, int]:
        """Planned number of releases beside the steps, by purpose."""
        return {kind.purpose: kind.count for kind in self.extra_releases}

    @cached_property
    def curve(self) -> EpsilonCurve:
        """ε as a function of the number of steps, with all releases beside them, remembered."""
        return self._curve()

    def _curve(self, extra: Mapping[str, int] | None = None) -> EpsilonCurve:
        return EpsilonCurve(
            self.event,
            self.delta,
            self.neighbouring_relation,
            self.accountant,
            horizon=self.steps,
            also=self.extra_charges(extra),
            separation=self.sampler.separation,
        )

    def extra_charges(self, extra: Mapping[str, int] | None = None) -> Charges:
        """Return events and numbers of releases beside the steps, by default all planned ones."""
        counts = self.extra_counts if extra is None else extra
        charges = [(kind.event, counts.get(kind.purpose, 0)) for kind in self.extra_releases]
        return tuple(charge for charge in charges if charge[1])

    def epsilon(self, steps: int | None = None, extra: Mapping[str, int] | None = None) -> float:
        """Return ε after a number of steps, by default all planned ones; infinite without noise.

        A plan without a certified guarantee warns once that this ε is not a guarantee.

        Args:
            steps: number of steps.
            extra: number of releases beside the steps by purpose, by default all planned ones.

        Raises:
            ValueError: a negative number.
        """
        count = self.steps if steps is None else steps
        return self._curve_with(extra).epsilon(count)

    def running_epsilon(self, steps: int, extra: Mapping[str, int] | None = None) -> float:
        """Return ε to show after a number of steps; arguments as of `epsilon`, and milliseconds.

        An upper bound that needs no dp-accounting before the last step and never exceeds the ε of
        all planned releases: `EpsilonCurve.running_epsilon`.
        """
        return self._curve_with(extra).running_epsilon(steps)

    def _curve_with(self, extra: Mapping[str, int] | None) -> EpsilonCurve:
        self._warn_once  # noqa: B018 - computed once
        return self.curve if extra in (None, self.extra_counts) else self._curve(extra)

    @cached_property
    def _warn_once(self) -> None:
        self._warn_of_caveats(stacklevel=5)

    def cross_check(
        self, steps: int | None = None, extra: Mapping[str, int] | None = None
    ) -> dict[str, float | None]:
        """Return ε by PLD (None if it does not apply) and by RDP; arguments as of `epsilon`.

        Raises:
            ValueError: the two contradict each other.
        """
        return cross_check.cross_check(
            self.event,
            self.count_events(self.steps if steps is None else steps),
            self.delta,
            self.neighbouring_relation,
            self.extra_charges(extra),
        )

    def check_accounting(self) -> None:
        """Refuse a plan whose ε is in dispute, before a ledger is opened and charged.

        A plan without a certified guarantee claims no ε that could be wrong.

        Raises:
            ValueError: the accountants contradict each other.
        """
        if self.certified:
            cross_check.check_before_a_run(
                self.event,
                self.count_events(self.steps),
                self.delta,
                self.neighbouring_relation,
                self.extra_charges(),
            )

    def open_ledger(self, path: str | os.PathLike[str] | None) -> Ledger:
        """Open the ledger of a run of this plan, in memory without a path.

        Raises:
            ValueError: as `check_accounting`.
        """
        self.check_accounting()
        header = {**self.ledger_header, "steps": self.steps}
        extra = self.extra_counts
        if extra:
            header["extra"] = extra
        return Ledger.open(path, self.hash, header, self.steps, extra)

    def noise_stream(self) -> NoiseStream:
        """Return a new noise stream: secure, or repeatable in test mode."""
        return NoiseStream(self.config.test_mode_seed)

    def sampling_stream(self, rank: int = 0) -> SamplingStream:
        """Return a new stream for the sampler: secure, or repeatable in test mode.

        Args:
            rank: of a process that samples from records of its own.
        """
        seed = self.config.test_mode_seed
        return SamplingStream(None if seed is None else seed + (rank << 64))

    def draw(self, step: int, stream: SamplingStream) -> NDArray[np.int64]:
        """Return the indices of the examples of one logical batch, possibly none."""
        return self.sampler.indices(step, self.generator(step, stream))

    def generator(self, step: int, stream: SamplingStream) -> np.random.Generator:
        """Return the generator that samples a step: first the units, then their records."""
        return stream.generator(step, self.sampler.steps_per_draw)

    def describe_mechanism(self) -> dict[str, Any]:
        """Return all that decides what is released, without settings for speed or memory alone."""
        return {
            "format": FORMAT,
            "config": self.config.describe_mechanism(),
            "sampler": self.sampler.describe(),
            "dataset_size": int(self.dataset_size),
            "noise_multiplier": self.noise_multiplier,
            "sensitivity": self.sensitivity,
            "delta": self.delta,
            "steps": self.steps,
        }

    def describe(self) -> dict[str, Any]:
        """Return the plan for the privacy card, as plain JSON; an infinite ε is the text "inf"."""
        total = self.curve.epsilon(self.steps)
        average = self.config.weight_average
        return {
            "plan_hash": self.hash,
            "epsilon": total if math.isfinite(total) else "inf",
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "certified": self.certified,
            "caveats": list(self.caveats),
            "test_mode": self.test_mode,
            "privacy_unit": self.privacy_unit,
            "neighbouring_relation": self.neighbouring_relation,
            "sampler": self.sampler.describe(),
            "dataset_size": int(self.dataset_size),
            "expected_batch_size": self.expected_batch_size,
            "steps": self.steps,
            "clipping": self.clipping,
            "max_grad_norm": self.max_grad_norm,
            "noise": self.noise,
            "bands": self.bands,
            "noise_multiplier": self.noise_multiplier,
            "sensitivity": self.sensitivity,
            "stddev": self.stddev,
            "accountant": self.accountant,
            "event": event_to_dict(self.event),
            "preconditioner": self.config.describe_preconditioner(),
            "readout": self.config.readout,
            "postprocess": [step.describe() for step in self.config.postprocess],
            "extra_releases": [kind.describe() for kind in self.extra_releases],
            "weight_average": None if average is None else average.describe(),
            "augmentations": self.config.augmentations,
            "assumed_public": [
                "dataset_size",
                "expected_batch_size",
                "max_grad_norm",
                "steps",
                "delta",
            ],
        }


# --------------------------------------------------------------------------------------------------


def check_plan(plan: Any) -> None:
    """Check that a loop is given a plan, and not the settings that make one.

    Raises:
        ValueError: naming the fix.
    """
    if not isinstance(plan, Plan):
        kind = type(plan).__name__
        raise ValueError(f"plan is a {kind}; pass what PrivacyConfig(...).calibrate(...) returns")


SAMPLERS = ("poisson", "truncated_poisson", "fixed", "shuffle")


MOST_STEPS = 1_000_000


def count_steps(
    steps: int | None, epochs: float | None, dataset_size: int, batch_size: float
) -> int:
    """Return the given steps, or the steps of the expected passes over the data.

    Raises:
        ValueError: more than `MOST_STEPS`, whose accounting would take minutes.
    """
    count = steps or (epochs or 0.0) * dataset_size / batch_size
    if count > MOST_STEPS:
        raise ValueError(
            f"{count!s:.20} steps are planned, more than {MOST_STEPS:,}; choose fewer steps or"
            " epochs, or a larger batch"
        )
    return max(1, round(count))


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Settings of a private run.

    Attributes:
        expected_batch_size: B, the mean (or fixed) size of a logical batch and the divisor of every
            noisy sum.
        epochs: expected passes over the dataset. Give either `epochs` or `steps`.
        steps: the number of releases.
        max_grad_norm: C, in the preconditioned space.
        clipping: "flat", "normalised", "automatic" or "per_layer" (C / √L for each of L layers).
            For a basis along which gradients are split (GEP), "embedding_residual", or "embedding"
            if GEP drops the residual.
        automatic_gamma: γ of automatic clipping.
        noise: "gaussian" in floating-point numbers, "rounded", "correlated" or "auto". "rounded"
            puts sum and noise on a grid that does not depend on data, against attacks on low bits,
            and widens the sensitivity by 2⁻²⁰. "correlated" noise of one step is partly taken back
            by the next ones; batches then come from `bands` groups of examples in turn. "auto"
            takes it where it has the smaller predicted error in the sums of steps, and "gaussian"
            elsewhere.
        bands: for "correlated": number of consecutive steps that share noise; 1 is "gaussian". None
            takes the number, from 2 on, with the smallest predicted error.
        sampler: "poisson", "truncated_poisson" (at most `max_batch_size`), "fixed" (without
            replacement, a new draw at every step) or "shuffle" (uncertified).
        max_batch_size: the most examples in a batch of "truncated_poisson", at least
            `expected_batch_size`. A larger value costs less ε. It bounds memory without revealing
            the size of a batch, and the divisor stays `expected_batch_size`.
        uncertified: must be True for "shuffle", whose ε is not a guarantee.
        accountant: "pld" or "rdp". None uses PLD, or RDP for "fixed", which PLD cannot treat.
        preconditioner: a preconditioner such as `curvature.KFAC`, or None for plain DP-SGD.
        readout: "whitened" uses the preconditioned gradient (DP-KFC), "natural" applies the
            preconditioner again (DP-NGD), "inverse" undoes it.
        postprocess: steps that change releases before the optimizer, in order, such as `DiSK(...)`
            and `AdamBC(...)`.
        weight_average: an average of the weights for evaluation, see `Session.averaged_weights`. It
            does not change training.
        augmentations: K views of every example, whose mean gradient is clipped (De et al. 2022).
            The session's `augment`, or a random dataset, makes them.
        unit: the protected unit: "example", or the name of a larger unit such as "patient". All
            records of a unit share one clip. `expected_batch_size` and `dataset_size` then count
            units, and the session is given `units`.
        max_records_per_unit: the most records of one unit that count in a step, drawn again at
            every step. For a unit that is not an example.
        unit_reduction: a unit's loss is the "mean" or the "sum" of the losses of its records. Both
            are clipped.
        max_physical_batch_size: the most rows of a micro-batch. "auto" finds what fits into memory,
            and None takes the whole batch. It changes memory and speed, never a result. It also
            bounds the examples that a refresh runs at once, see `refresh_rows`.
        test_mode_seed: makes noise and sampling repeatable. Such a run is NOT PRIVATE and its card
            says so.
        extra_releases: kinds of releases beside the steps, in the same ledger; ε of the plan
            includes them. For samplers whose neighbours add or remove one record.

    Raises:
        ValueError: a value outside its range, or settings that do not go together.
    """

    expected_batch_size: int
    epochs: float | None = None
    steps: int | None = None
    max_grad_norm: float = 1.0
    clipping: str = "flat"
    automatic_gamma: float = 0.01
    noise: str = GAUSSIAN
    bands: int | None = None
    sampler: str = "poisson"
    max_batch_size: int | None = None
    uncertified: bool = False
    accountant: str | None = None
    preconditioner: Preconditioner | None = None
    readout: str = "whitened"
    postprocess: tuple[PostProcess, ...] = ()
    weight_average: WeightEMA | None = None
    augmentations: int = 1
    unit: str = "example"
    max_records_per_unit: int | None = None
    unit_reduction: str = "mean"
    max_physical_batch_size: int | str | None = None
    test_mode_seed: int | None = None
    extra_releases: tuple[ExtraRelease, ...] = ()

    def __post_init__(self) -> None:
        check_integer("expected_batch_size", self.expected_batch_size, 1)
        check_optional_integer("steps", self.steps, 1)
        check_optional_integer("max_records_per_unit", self.max_records_per_unit, 1)
        check_integer("augmentations", self.augmentations, 1)
        steps = self.postprocess
        steps = tuple(steps) if isinstance(steps, Iterable) else (steps,)
        object.__setattr__(self, "postprocess", steps)
        self._check_parts()
        self._check_micro_batches()
        check_optional_integer("test_mode_seed", self.test_mode_seed, 0)
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"give exactly one of epochs and steps, got epochs={self.epochs} and"
                f" steps={self.steps}"
            )
        if self.epochs is not None:
            check_positive("epochs", self.epochs)
        contribution_bound(self.clipping, self.max_grad_norm)
        check_positive("automatic_gamma", self.automatic_gamma)
        check_one_of("noise", self.noise, (*NOISES, CORRELATED, AUTO))
        self._check_sampler()
        self._check_extra()
        self._check_split()
        self._check_correlation()

    def _check_parts(self) -> None:
        """Check what torch computes: the steps after the noise, and the preconditioner."""
        average = self.weight_average
        if self.postprocess or average is not None or self.readout != "whitened":
            from dpkfc.postprocess.pipeline import check_fields, check_pipeline

            check_pipeline(self.postprocess, self.readout, self._may_be_correlated)
            check_fields(self.preconditioner, average)
        if self.preconditioner is not None:
            from dpkfc.curvature.base import Preconditioner
            from dpkfc.postprocess.pipeline import check_fields

            check_fields(self.preconditioner, average)
            if not isinstance(self.preconditioner, Preconditioner):
                raise ValueError(
                    "preconditioner must derive from dpkfc.curvature.Preconditioner, got"
                    f" {type(self.preconditioner).__name__}; "
                    "use KFAC(probe=...), or see docs/extending.md"
                )
            _ = self.preconditioner.probes  # a probe of an unknown class is an error

    def _check_extra(self) -> None:
        kinds = tuple(self.extra_releases)
        object.__setattr__(self, "extra_releases", kinds)
        purpose = "" if self.preconditioner is None else self.preconditioner.purpose
        if purpose and purpose not in [kind.purpose for kind in kinds]:
            name = type(self.preconditioner).__name__
            raise ValueError(
                f"{name} is built from a release: add ExtraRelease(purpose={purpose!r}, norm=1.0,"
                " noise_multiplier=...) to extra_releases, or take convex_config"
            )
        if kinds and self.sampler not in ("poisson", "truncated_poisson"):
            raise ValueError(
                f"releases beside the steps add up with sampler='poisson', not with"
                f" {self.sampler!r}, whose neighbours replace a record"
            )
        if len({kind.purpose for kind in kinds}) < len(kinds):
            raise ValueError("two kinds in extra_releases have one purpose; name them apart")

    def _check_split(self) -> None:
        """Check that a basis that splits gradients has the clipping that sets its sensitivity."""
        needed = None if self.preconditioner is None else self.preconditioner.required_clipping
        if self.clipping in SPLIT and needed is None:
            raise ValueError(
                f"clipping={self.clipping!r} clips along a public basis; it needs"
                " preconditioner=GEP(...)"
            )
        if needed is not None and self.clipping != needed:
            name = type(self.preconditioner).__name__
            raise ValueError(
                f"this {name} splits a gradient and clips its parts, which needs"
                f" clipping={needed!r}, not {self.clipping!r}"
            )
        if needed is not None and self.readout != "whitened":
            raise ValueError(
                f"readout={self.readout!r} maps by a metric, and"
                f" {type(self.preconditioner).__name__} has none: leave it out"
            )

    @property
    def _may_be_correlated(self) -> bool:
        return self.noise in (CORRELATED, AUTO)

    def _check_correlation(self) -> None:
        check_optional_integer("bands", self.bands, 1)
        if self.bands is not None and self.noise != CORRELATED:
            raise ValueError(
                f"bands={self.bands} belongs to noise='correlated', not to {self.noise!r}; leave it"
                " out"
            )
        if not self._may_be_correlated:
            return
        if self.sampler != "poisson":
            raise ValueError(
                f"noise={self.noise!r} needs sampler='poisson', not {self.sampler!r}: it draws"
                " batches from groups of examples in turn"
            )
        if self.preconditioner is not None and self.preconditioner.required_clipping is not None:
            raise ValueError(
                f"noise={self.noise!r} does not go with {type(self.preconditioner).__name__}, whose"
                " coordinates change with its basis; use noise='gaussian'"
            )

    def _check_micro_batches(self) -> None:
        most = self.max_physical_batch_size
        unit = self.max_records_per_unit
        if not isinstance(self.unit, str) or not self.unit.strip():
            raise ValueError(f"unit must be a name such as 'patient', got {self.unit!r}")
        if (self.unit == "example") != (unit is None):
            raise ValueError(
                f"unit={self.unit!r} does not go with max_records_per_unit={unit}; a unit larger"
                " than an example needs a name and the most records that count"
            )
        check_one_of("unit_reduction", self.unit_reduction, ("mean", "sum"))
        if most == "auto":
            return
        if isinstance(most, str):
            raise ValueError(
                f"max_physical_batch_size must be an integer >= 1, 'auto' or None, got {most!r}"
            )
        check_optional_integer("max_physical_batch_size", most, 1)
        if most is not None and unit is not None and unit > most:
            raise ValueError(
                f"max_physical_batch_size={most} is less than max_records_per_unit={unit}, but a"
                " unit is never split; raise the first or lower the second"
            )

    @property
    def micro_batch(self) -> RowLimit:
        """The limit of a micro-batch in rows."""
        from dpkfc.memory import RowLimit

        most = self.max_physical_batch_size
        bound = most if isinstance(most, int) else None
        return RowLimit(bound, most == "auto", self._rows_of_unit)

    @property
    def _rows_of_unit(self) -> int:
        return (self.max_records_per_unit or 1) * self.augmentations

    @property
    def expected_rows(self) -> int:
        """Rows of a batch of the expected size: every view of every record of its units."""
        return self.expected_batch_size * self._rows_of_unit

    def refresh_rows(self, processes: int = 1) -> RowLimit:
        """Return the limit of the probe examples that a refresh runs at once.

        A refresh runs as many examples as a step holds on each process, so it needs no more memory
        than a step. Only public settings decide the number. `KFAC.chunk` bounds it further.
        """
        from dpkfc.memory import RowLimit

        limit = self.micro_batch
        batch = math.ceil(self.expected_batch_size * self.augmentations / processes)
        return RowLimit(min(batch, limit.most or batch), limit.automatic)

    def _check_sampler(self) -> None:
        check_one_of("sampler", self.sampler, SAMPLERS)
        if self.sampler == "shuffle" and not self.uncertified:
            raise ValueError(
                "sampler='shuffle' has no certified guarantee; use 'poisson' or 'fixed', or set"
                " uncertified=True to run it anyway with that stamped on the privacy card"
            )
        if self.accountant is not None:
            check_one_of("accountant", self.accountant, ACCOUNTANTS)
        check_optional_integer("max_batch_size", self.max_batch_size, 1)
        if (self.sampler == "truncated_poisson") != (self.max_batch_size is not None):
            raise ValueError(
                f"sampler={self.sampler!r} does not go with max_batch_size={self.max_batch_size};"
                " give max_batch_size with sampler='truncated_poisson' and only with it"
            )
        if self.max_batch_size is not None and self.max_batch_size < self.expected_batch_size:
            mean = self.expected_batch_size
            raise ValueError(
                f"max_batch_size={self.max_batch_size} cuts most batches, because"
                f" expected_batch_size={mean}; take about"
                f" {math.ceil(mean + 7 * math.sqrt(mean)) + 10}, rarely filled"
            )
        if self.sampler == "fixed" and self.accountant == "pld":
            raise ValueError(
                "PLD cannot account for sampler='fixed'; use accountant='rdp' or leave it out"
            )

    @property
    def resolved_accountant(self) -> str:
        """The accountant in force."""
        return self.accountant or ("rdp" if self.sampler == "fixed" else "pld")

    def calibrate(self, epsilon: float, delta: float, dataset_size: int) -> Plan:
        """Return the plan with the least noise whose ε is at most the target.

        Args:
            epsilon: target ε > 0 of the whole run.
            delta: target δ, below 1 / N unless `uncertified`.
            dataset_size: number of examples N (of units where `unit` is larger), taken as public.

        Raises:
            ValueError: an impossible or unreachable target, or a batch larger than the dataset.
        """
        sampler = self._sampler(dataset_size)
        steps = self._steps(dataset_size)
        check_target(epsilon, delta, dataset_size, uncertified=self.uncertified)
        also = tuple((kind.event, kind.count) for kind in self.extra_releases)
        if self._may_be_correlated and self.bands is None:

            def estimate_noise(bands: int) -> float:
                event = self._with_bands(bands)._sampler(dataset_size).event
                return estimate_noise_multiplier(
                    epsilon, delta, event, math.ceil(steps / bands), also
                )

            least = 2 if self.noise == CORRELATED else 1
            most = self._most_bands(dataset_size)
            if most < least:
                self._check_bands(least, dataset_size)
            bands = choose_bands(least, most, steps, estimate_noise)
            return self._with_bands(bands).calibrate(epsilon, delta, dataset_size)
        noise_multiplier = calibrate_noise_multiplier(
            epsilon,
            delta,
            sampler.event,
            math.ceil(steps / sampler.separation),
            self.resolved_accountant,
            relation=sampler.neighbouring_relation,
            also=also,
        )
        return self._plan(sampler, noise_multiplier, delta, epsilon)

    def _with_bands(self, bands: int) -> PrivacyConfig:
        """Return the settings with a number of bands, which for one band are `noise="gaussian"`."""
        if bands == 1:
            return replace(self, noise=GAUSSIAN, bands=None)
        return replace(self, noise=CORRELATED, bands=bands)

    def _most_bands(self, dataset_size: int) -> int:
        """Return the most bands: as many as steps, and as batches in the dataset."""
        return min(self._steps(dataset_size), dataset_size // self.expected_batch_size)

    def with_noise(self, noise_multiplier: float, delta: float, dataset_size: int) -> Plan:
        """Return the plan with a given noise multiplier; 0 means no noise and an infinite ε.

        Args:
            noise_multiplier: standard deviation of the noise over the sensitivity, >= 0.
            delta: δ at which ε is reported, below 1 / N unless `uncertified`.
            dataset_size: number of examples N (of units where `unit` is larger), taken as public.

        Raises:
            ValueError: a value outside its range, or a batch larger than the dataset.
        """
        check_noise_multiplier(noise_multiplier)
        sampler = self._sampler(dataset_size)
        check_target(None, delta, dataset_size, uncertified=self.uncertified)
        return self._plan(sampler, noise_multiplier, delta)

    def _plan(
        self, sampler: Sampler, noise_multiplier: float, delta: float, target: float | None = None
    ) -> Plan:
        config = self._with_bands(1) if self.bands == 1 else self
        return Plan(
            config=config,
            dataset_size=sampler.dataset_size,
            sampler=sampler,
            noise_multiplier=float(noise_multiplier),
            delta=float(delta),
            steps=self._steps(sampler.dataset_size),
            target_epsilon=target,
        )

    def _sampler(self, dataset_size: int) -> Sampler:
        check_integer("dataset_size", dataset_size, 1)
        if self.expected_batch_size > dataset_size:
            raise ValueError(
                f"expected_batch_size is {self.expected_batch_size}, more than dataset_size ="
                f" {dataset_size}; choose at most {dataset_size}"
            )
        rate = self.expected_batch_size / dataset_size
        bands = self.bands or 1
        if bands > 1:
            self._check_bands(bands, dataset_size)
            return CyclicPoisson(min(1.0, bands * rate), dataset_size, bands)
        if self.sampler == "poisson":
            return Poisson(rate, dataset_size)
        if self.max_batch_size is not None:
            return TruncatedPoisson(rate, dataset_size, self.max_batch_size)
        kinds = {"fixed": FixedSize, "shuffle": Shuffle}
        return kinds[self.sampler](self.expected_batch_size, dataset_size)

    def _check_bands(self, bands: int, dataset_size: int) -> None:
        steps = self._steps(dataset_size)
        if bands > steps:
            advice = f"choose at most {steps}" if steps > 1 else "use noise='gaussian'"
            raise ValueError(f"bands={bands} exceeds the number of steps, {steps}; {advice}")
        most = dataset_size // self.expected_batch_size
        if most < 2:
            raise ValueError(
                "noise='correlated' gains nothing where a batch holds more than half of the data"
                f" ({self.expected_batch_size} of {dataset_size}); use noise='gaussian'"
            )
        if bands > most:
            raise ValueError(
                f"bands={bands} groups of {dataset_size} examples are smaller than"
                f" expected_batch_size={self.expected_batch_size}; choose at most {most} bands"
            )

    def _steps(self, dataset_size: int) -> int:
        return count_steps(self.steps, self.epochs, dataset_size, self.expected_batch_size)

    @property
    def clip(self) -> Clip:
        """Return how examples are clipped."""
        from dpkfc.gradients.clip import Clip

        return Clip(self.max_grad_norm, self.clipping, self.automatic_gamma)

    def describe_preconditioner(self) -> dict[str, Any] | None:
        """Return the public description of the preconditioner, None without one."""
        return None if self.preconditioner is None else dict(self.preconditioner.describe())

    def describe_mechanism(self) -> dict[str, Any]:
        """Return the settings that decide what is released; the hash of a plan covers these."""
        units = {
            "unit": self.unit,
            "max_records_per_unit": self.max_records_per_unit,
            "unit_reduction": self.unit_reduction,
        }
        return {
            **({} if self.max_records_per_unit is None else units),
            "expected_batch_size": self.expected_batch_size,
            "max_grad_norm": self.max_grad_norm,
            "clipping": self.clipping,
            "automatic_gamma": self.automatic_gamma if self.clipping == "automatic" else None,
            "accountant": self.resolved_accountant,
            "test_mode_seed": self.test_mode_seed,
            "preconditioner": self.describe_preconditioner(),
            **self._describe_steps(),
        }

    def _describe_steps(self) -> dict[str, Any]:
        """Return what comes before the clip and after the noise.

        Defaults are left out.
        """
        settings: dict[str, tuple[Any, Any]] = {
            "noise": (self.noise, GAUSSIAN),
            "bands": (self.bands, None),
            "readout": (self.readout, "whitened"),
            "postprocess": ([step.describe() for step in self.postprocess], []),
            "augmentations": (self.augmentations, 1),
            "extra_releases": ([kind.describe() for kind in self.extra_releases], []),
        }
        return {name: value for name, (value, default) in settings.items() if value != default}
