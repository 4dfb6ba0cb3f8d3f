"""The settings of a private run, checked when they are made, and the one place where they become a plan."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from dpkfc.curvature.base import Preconditioner
from dpkfc.data.sampling import FixedSize, Poisson, Sampler, Shuffle, TruncatedPoisson
from dpkfc.gradients.clipping import SPLIT, Clip, contribution_bound
from dpkfc.linalg.norms import check_methods
from dpkfc.postprocess.optimizers import WeightEMA
from dpkfc.postprocess.pipeline import check_chain, check_not_a_step
from dpkfc.postprocess.protocol import PostProcess
from dpkfc.privacy import accounting
from dpkfc.privacy.accounting import ACCOUNTANTS, NEGLIGIBLE_NOISE, EpsilonCurve
from dpkfc.privacy.calibration import calibrate_noise_multiplier, check_target, vacuous
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.mechanism import GAUSSIAN, NOISES, ROUNDED, widened
from dpkfc.privacy.rng import NoiseStream, SamplingStream

# --------------------------------------------------------------------------------------------------
# The plan: sampler, sensitivity, noise and event of one run, frozen together so that they cannot
# disagree.

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one private run does and costs. Make it with `PrivacyConfig.calibrate` or `PrivacyConfig.with_noise`.

    Everything in it is public, the number of examples included.

    Attributes:
        config: the settings it was made from.
        dataset_size: number of examples N, or of units where `config.unit` is larger than a record.
        sampler: how a logical batch is drawn.
        noise_multiplier: standard deviation of the noise over the sensitivity; 0 is no noise and no privacy.
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
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(f"noise_multiplier must be finite and >= 0, got {self.noise_multiplier}")
        if self.steps < 1:
            raise ValueError(f"a plan needs at least one step, got {self.steps}")
        if self.sampler.dataset_size != self.dataset_size:
            raise ValueError(
                f"the sampler draws from {self.sampler.dataset_size} examples, the plan is for {self.dataset_size}"
            )
        check_target(self.target_epsilon, self.delta)
        if self.config.preconditioner is not None:
            self.config.preconditioner.check_plan(self.steps, self.config.readout)

    @property
    def max_grad_norm(self) -> float:
        """C, the norm to which one example is clipped."""
        return self.config.max_grad_norm

    @property
    def clipping(self) -> str:
        """Flat, normalised or automatic."""
        return self.config.clipping

    @property
    def expected_batch_size(self) -> int:
        """The one divisor of every noisy sum; public, and never the size of a batch that was drawn."""
        return self.config.expected_batch_size

    @property
    def sensitivity(self) -> float:
        """Largest change of the clipped sum between neighbouring datasets, in the coordinates of the noise.

        That of the sum as it is rounded, where the noise is.
        """
        found = self.sampler.sensitivity(contribution_bound(self.config.clipping, self.config.max_grad_norm))
        return widened(found) if self.noise == ROUNDED else found

    @property
    def noise(self) -> str:
        """Kind of the noise: "gaussian" or "rounded"."""
        return self.config.noise

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on the sum: noise_multiplier · sensitivity."""
        return self.noise_multiplier * self.sensitivity

    @cached_property
    def event(self) -> dp_accounting.DpEvent:
        """The event of one release."""
        return self.sampler.event(self.noise_multiplier)

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
        """What is added, removed or replaced between neighbouring datasets."""
        most = self.config.max_records_per_unit
        if most is None:
            return "one example"
        return f"one {self.config.unit} (all records; up to {most} of them, drawn anew, count in a step)"

    @property
    def test_mode(self) -> bool:
        """Whether the random streams are repeatable; such a run is not private."""
        return self.config.test_mode_seed is not None

    @property
    def certified(self) -> bool:
        """Whether ε is a guarantee of what is run: there is noise, it is secret, and the event fits the sampler."""
        return not self.caveats

    @property
    def _curvature_is_private(self) -> bool:
        return bool((self.config.describe_preconditioner() or {}).get("uses_private_data"))

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why this run has no certified guarantee, one sentence each; empty where it has."""
        told = vacuous(self.delta, self.dataset_size)
        return tuple(
            text
            for applies, text in (
                (self.noise_multiplier == 0, "NOT PRIVATE: no noise is added, epsilon is infinite"),
                (0 < self.noise_multiplier < NEGLIGIBLE_NOISE, "NOT PRIVATE: the noise is below a thousandth of the sensitivity"),
                (self.test_mode, "NOT PRIVATE: test mode, the noise can be repeated from a seed"),
                (self._curvature_is_private, "NOT PRIVATE: curvature is measured on the private data themselves"),
                (
                    not self.sampler.certified,
                    "UNCERTIFIED: shuffled batches; epsilon is that of Poisson sampling at the same rate, which these "
                    "batches can exceed several times over",
                ),
                (told, f"UNCERTIFIED: {told}"),
            )
            if applies
        )

    @cached_property
    def curve(self) -> EpsilonCurve:
        """ε as a function of the number of releases, remembered."""
        return EpsilonCurve(self.event, self.delta, self.neighbouring_relation, self.accountant, horizon=self.steps)

    def epsilon(self, steps: int | None = None) -> float:
        """ε after a number of releases, by default all the planned ones; infinite without noise.

        A plan without a certified guarantee warns once that this number is none.

        Raises:
            ValueError: a negative number.
        """
        self._warn_once  # noqa: B018 - computed once
        return self.curve.at(self.steps if steps is None else steps)

    @cached_property
    def _warn_once(self) -> None:
        """Without noise ε is infinite, which needs no warning."""
        if self.caveats and self.noise_multiplier > 0:
            warnings.warn(f"epsilon is no guarantee of this run. {'. '.join(self.caveats)}", stacklevel=4)

    def cross_check(self) -> dict[str, float | None]:
        """ε of the whole run by PLD (None where it does not apply) and by RDP.

        Raises:
            ValueError: the two contradict each other.
        """
        return accounting.cross_check(self.event, self.steps, self.delta, self.neighbouring_relation)

    def check_accounting(self) -> None:
        """Refuse a plan whose ε is in dispute; done before a ledger is opened, so that nothing is charged.

        A plan without a certified guarantee claims no ε that could be wrong.

        Raises:
            ValueError: the accountants contradict each other.
        """
        if self.certified:
            accounting.check_before_a_run(self.event, self.steps, self.delta, self.neighbouring_relation)

    def open_ledger(self, path: str | os.PathLike[str] | None) -> Ledger:
        """The ledger of a run of this plan, in memory where there is no path.

        Raises:
            ValueError: as `check_accounting`.
        """
        self.check_accounting()
        header = {**self.ledger_header, "steps": self.steps}
        if path is None:
            return Ledger.in_memory(self.hash, header, self.steps)
        return Ledger.open(path, self.hash, header, self.steps)

    @property
    def ledger_header(self) -> dict[str, Any]:
        """What the first line of a ledger says of its plan, so that it can be read alone: whom ε protects, and at which δ.

        The number of steps is left to who opens the ledger: an engine may have no limit.
        """
        return {
            "certified": self.certified,
            "rng": "repeatable" if self.test_mode else "secure",
            "unit": self.privacy_unit,
            "neighbouring_relation": self.neighbouring_relation,
            "delta": self.delta,
            "dataset_size": int(self.dataset_size),
        }

    def noise_stream(self) -> NoiseStream:
        """A new noise stream: secure, or repeatable in test mode."""
        seed = self.config.test_mode_seed
        return NoiseStream.secure() if seed is None else NoiseStream.repeatable(seed)

    def sampling_stream(self) -> SamplingStream:
        """A new stream for the sampler: secure, or repeatable in test mode."""
        seed = self.config.test_mode_seed
        return SamplingStream.secure() if seed is None else SamplingStream.repeatable(seed)

    def draw(self, step: int, stream: SamplingStream) -> NDArray[np.int64]:
        """Indices of the examples of one logical batch, possibly none."""
        return self.sampler.indices(step, self.generator(step, stream))

    def generator(self, step: int, stream: SamplingStream) -> np.random.Generator:
        """The generator from which a step is sampled: first the units, then, from what follows, their records."""
        return stream.generator(step, self.sampler.steps_per_draw)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical public description: two plans with one hash run the same mechanism.

        Raises:
            ValueError: the description of the preconditioner holds something else than plain values.
        """
        try:
            text = json.dumps(self._mechanism(), sort_keys=True, separators=(",", ":"))
        except TypeError as error:
            raise ValueError(
                f"preconditioner.describe() must return plain values that JSON can hold: {error}"
            ) from error
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def _mechanism(self) -> dict[str, Any]:
        """All that decides what is released; settings that change only speed or memory are left out."""
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
        """The plan for the privacy card: plain values that JSON can hold; an infinite ε is the text "inf"."""
        total = self.curve.at(self.steps)  # with the caveats beside it
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
            "noise_multiplier": self.noise_multiplier,
            "sensitivity": self.sensitivity,
            "stddev": self.stddev,
            "accountant": self.accountant,
            "event": accounting.event_to_dict(self.event),
            "preconditioner": self.config.describe_preconditioner(),
            "readout": self.config.readout,
            "postprocess": [step.describe() for step in self.config.postprocess],
            "weight_average": None if self.config.weight_average is None else self.config.weight_average.describe(),
            "augmentations": self.config.augmentations,
            "assumed_public": ["dataset_size", "expected_batch_size", "max_grad_norm", "steps", "delta"],
        }


# --------------------------------------------------------------------------------------------------

SAMPLERS = ("poisson", "truncated_poisson", "fixed", "shuffle")


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Settings of a private run.

    Attributes:
        expected_batch_size: B, the mean (or fixed) size of a logical batch and the divisor of every noisy sum.
        epochs: passes over the dataset, in expectation; exactly one of `epochs` and `steps` is given.
        steps: number of releases.
        max_grad_norm: C, in the coordinates of the preconditioner.
        clipping: "flat", "normalised", "automatic" or "per_layer" (C / √L for each of L layers); with a basis along which
            gradients are split (GEP) "embedding_residual", or "embedding" where it drops the residual.
        automatic_gamma: γ of automatic clipping.
        noise: "gaussian" in floating-point numbers, or "rounded": sum and noise on a grid that no data move, against attacks
            on low bits, for a sensitivity wider by 2⁻²⁰.
        sampler: "poisson", "truncated_poisson" (at most `max_batch_size`), "fixed" (without replacement, drawn anew at every
            step) or "shuffle" (uncertified).
        max_batch_size: most examples that a batch of "truncated_poisson" keeps, at least `expected_batch_size`; a larger one
            costs less. Bounds memory without making a batch's size known; the divisor stays `expected_batch_size`.
        uncertified: must be True for "shuffle", whose ε is no guarantee.
        accountant: "pld" or "rdp"; None takes PLD, or RDP for "fixed", which PLD cannot treat.
        preconditioner: a preconditioner such as `curvature.KFAC`, or None for plain DP-SGD.
        readout: "whitened" steps along the release itself (DP-KFC), "natural" maps it once more (DP-NGD), "inverse" back.
        postprocess: what happens to releases before the optimizer, in order, such as `DiSK(...)` and `AdamBC(...)`.
        weight_average: an average of the weights for evaluation, see `Session.averaged_weights`; it changes no training.
        augmentations: K, views of every example whose mean gradient is clipped (De et al. 2022); the session's `augment`, or
            a dataset that is random itself, makes them.
        unit: what is protected: "example", or the name of a larger unit such as "patient". All records of a unit share one
            clip; `expected_batch_size` and `dataset_size` then count units, and the session is given `units`.
        max_records_per_unit: most records of one unit that count in a step, drawn anew at every step; for a unit that is not
            an example.
        unit_reduction: a unit's loss is the "mean" or the "sum" of those of its records (both are clipped).
        max_physical_batch_size: most rows of a micro-batch; "auto" finds what fits into memory; None takes the whole batch.
            Changes memory and speed, never a result. A refresh runs no more examples of its probe at once than that, or than
            there are in a batch; see `refresh_rows`.
        pad_to_multiple: micro-batches are padded to a multiple of it by rows that count nothing, so that few shapes occur
            (for kernels that are tuned for each shape). Changes speed, never a result.
        norm_methods: layer name to "gram" or "materialised", how its per-example norms are computed, instead of the rule by the
            layer's widths; `dpkfc doctor --cost` measures what is fastest. Must be chosen without looking at private data.
            Changes speed, memory and rounding, never the guarantee.
        test_mode_seed: makes noise and sampling repeatable; such a run is NOT PRIVATE and its card says so.

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
    pad_to_multiple: int | None = None
    norm_methods: Mapping[str, str] = field(default_factory=dict, hash=False)
    test_mode_seed: int | None = None

    def __post_init__(self) -> None:
        _check_integer("expected_batch_size", self.expected_batch_size, 1)
        _check_integer("steps", self.steps, 1)
        _check_integer("max_records_per_unit", self.max_records_per_unit, 1)
        _check_integer("augmentations", self.augmentations, 1)
        alone = isinstance(self.postprocess, PostProcess)
        object.__setattr__(self, "postprocess", (self.postprocess,) if alone else tuple(self.postprocess))
        check_chain(self.postprocess, self.readout)
        self._check_micro_batches()
        object.__setattr__(self, "norm_methods", dict(self.norm_methods))
        check_methods(self.norm_methods)
        _check_integer("test_mode_seed", self.test_mode_seed, 0)
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"give exactly one of epochs and steps, got epochs={self.epochs} and steps={self.steps}")
        if self.epochs is not None and not (self.epochs > 0 and math.isfinite(self.epochs)):
            raise ValueError(f"epochs must be positive and finite, got {self.epochs}")
        contribution_bound(self.clipping, self.max_grad_norm)
        if not (self.automatic_gamma > 0 and math.isfinite(self.automatic_gamma)):
            raise ValueError(f"automatic_gamma must be positive and finite, got {self.automatic_gamma}")
        if self.noise not in NOISES:
            raise ValueError(f"unknown noise {self.noise!r}; choose one of {', '.join(NOISES)}")
        self._check_sampler()
        check_not_a_step(self.preconditioner, self.weight_average)
        if self.preconditioner is not None and not isinstance(self.preconditioner, Preconditioner):
            raise ValueError(
                f"preconditioner must derive from dpkfc.curvature.Preconditioner, got {type(self.preconditioner).__name__}; "
                "use KFAC(probe=...), or see docs/extending.md"
            )
        self._check_split()

    def _check_split(self) -> None:
        """A basis along which gradients are split goes with a clipping of its own, from which the sensitivity follows."""
        needed = None if self.preconditioner is None else self.preconditioner.required_clipping
        if self.clipping in SPLIT and needed is None:
            raise ValueError(f"clipping={self.clipping!r} clips along a public basis; it needs preconditioner=GEP(...)")
        if needed is not None and self.clipping != needed:
            name = type(self.preconditioner).__name__
            raise ValueError(
                f"this {name} splits a gradient and clips its parts, which needs clipping={needed!r}, not {self.clipping!r}"
            )
        if needed is not None and self.readout != "whitened":
            raise ValueError(
                f"readout={self.readout!r} maps by a metric, and {type(self.preconditioner).__name__} has none: leave it out"
            )

    def _check_micro_batches(self) -> None:
        most, multiple, unit = self.max_physical_batch_size, self.pad_to_multiple, self.max_records_per_unit
        if not isinstance(self.unit, str) or not self.unit.strip():
            raise ValueError(f"unit must be a name such as 'patient', got {self.unit!r}")
        if (self.unit == "example") != (unit is None):
            raise ValueError(
                f"unit={self.unit!r} and max_records_per_unit={unit} do not go together: a unit larger than an example needs "
                "a name and the most records of one unit that count in a step"
            )
        if self.unit_reduction not in ("mean", "sum"):
            raise ValueError(f"unit_reduction must be 'mean' or 'sum', got {self.unit_reduction!r}")
        _check_integer("pad_to_multiple", multiple, 1)
        if most == "auto":
            return
        if isinstance(most, str):
            raise ValueError(f"max_physical_batch_size must be an integer >= 1, 'auto' or None, got {most!r}")
        _check_integer("max_physical_batch_size", most, 1)
        if most is not None and unit is not None and unit > most:
            raise ValueError(
                f"max_physical_batch_size={most} is less than max_records_per_unit={unit}, but the records of a unit are "
                f"clipped together and never split; make the first at least {unit}, or the second smaller"
            )
        if most is not None and multiple is not None and most % multiple:
            raise ValueError(
                f"max_physical_batch_size={most} must be a multiple of pad_to_multiple={multiple}, to which micro-batches are "
                "padded"
            )

    @property
    def micro_batch(self) -> tuple[int | None, bool, int]:
        """Micro-batches in rows: (most, None for no bound; whether the bound is found by trying; what is never divided)."""
        most, multiple = self.max_physical_batch_size, self.pad_to_multiple or 1
        rows = (self.max_records_per_unit or 1) * self.augmentations
        least = -(-rows // multiple) * multiple
        return most if isinstance(most, int) else None, most == "auto", least

    @property
    def expected_rows(self) -> int:
        """Rows of a batch of the expected size: every view of every record of its units, rounded up by padding."""
        multiple = self.pad_to_multiple or 1
        rows = self.expected_batch_size * self.augmentations * (self.max_records_per_unit or 1)
        return -(-rows // multiple) * multiple

    def refresh_rows(self, processes: int = 1) -> tuple[int, bool]:
        """Examples of a probe that a refresh may run at once: (most, whether fewer are tried where memory runs out).

        As many as a step holds on each of so many processes, from public settings alone, so that memory need not be larger for
        a refresh. `KFAC.chunk` bounds it further.
        """
        most, automatic, _ = self.micro_batch
        batch = -(-self.expected_batch_size * self.augmentations // processes)
        return min(batch, most or batch), automatic

    def _check_sampler(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ValueError(f"unknown sampler {self.sampler!r}; choose one of {', '.join(SAMPLERS)}")
        if self.sampler == "shuffle" and not self.uncertified:
            raise ValueError(
                "sampler='shuffle' has no certified guarantee; use 'poisson' or 'fixed', or set uncertified=True "
                "to run it anyway with that stamped on the privacy card"
            )
        if self.accountant is not None and self.accountant not in ACCOUNTANTS:
            raise ValueError(f"unknown accountant {self.accountant!r}; choose one of {', '.join(ACCOUNTANTS)}")
        _check_integer("max_batch_size", self.max_batch_size, 1)
        if (self.sampler == "truncated_poisson") != (self.max_batch_size is not None):
            raise ValueError(
                f"sampler={self.sampler!r} and max_batch_size={self.max_batch_size} do not go together: 'truncated_poisson' "
                "needs the most examples that a batch keeps, and no other sampler takes it"
            )
        if self.max_batch_size is not None and self.max_batch_size < self.expected_batch_size:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is less than expected_batch_size={self.expected_batch_size}, so more than "
                "half of the batches would be cut; choose it so large that a full batch is rarer than delta, such as "
                f"{math.ceil(self.expected_batch_size + 7 * math.sqrt(self.expected_batch_size)) + 10}"
            )
        if self.sampler == "fixed" and self.accountant == "pld":
            raise ValueError("PLD cannot account for sampler='fixed'; use accountant='rdp' or leave it out")

    @property
    def resolved_accountant(self) -> str:
        """The accountant in force."""
        return self.accountant or ("rdp" if self.sampler == "fixed" else "pld")

    def calibrate(self, epsilon: float, delta: float, dataset_size: int) -> Plan:
        """The plan with the least noise whose ε is at most the target.

        Args:
            epsilon: target ε > 0 of the whole run.
            delta: target δ; a warning where it is not below 1 / N.
            dataset_size: number of examples N (of units where `unit` is larger), taken as public.

        Raises:
            ValueError: an impossible or unreachable target, or a batch larger than the dataset.
        """
        sampler = self._sampler(dataset_size)
        steps = self._steps(dataset_size)
        check_target(epsilon, delta, dataset_size)
        noise_multiplier = calibrate_noise_multiplier(
            epsilon,
            delta,
            sampler.event,
            steps,
            self.resolved_accountant,
            relation=sampler.neighbouring_relation,
        )
        return self._plan(sampler, steps, noise_multiplier, delta, epsilon)

    def with_noise(self, noise_multiplier: float, delta: float, dataset_size: int) -> Plan:
        """The plan with a given noise multiplier; 0 means no noise, no privacy and an infinite ε.

        Args:
            noise_multiplier: standard deviation of the noise over the sensitivity, >= 0.
            delta: δ at which ε is reported; a warning where it is not below 1 / N.
            dataset_size: number of examples N (of units where `unit` is larger), taken as public.

        Raises:
            ValueError: a value outside its range, or a batch larger than the dataset.
        """
        sampler = self._sampler(dataset_size)
        check_target(None, delta, dataset_size)
        return self._plan(sampler, self._steps(dataset_size), noise_multiplier, delta, None)

    def _plan(self, sampler: Sampler, steps: int, noise_multiplier: float, delta: float, target: float | None) -> Plan:
        return Plan(
            config=self,
            dataset_size=sampler.dataset_size,
            sampler=sampler,
            noise_multiplier=float(noise_multiplier),
            delta=float(delta),
            steps=steps,
            target_epsilon=target,
        )

    def _sampler(self, dataset_size: int) -> Sampler:
        _check_integer("dataset_size", dataset_size, 1)
        if self.expected_batch_size > dataset_size:
            raise ValueError(
                f"expected_batch_size is {self.expected_batch_size}, more than the {dataset_size} examples of the "
                f"dataset; choose at most {dataset_size}"
            )
        if self.sampler == "poisson":
            return Poisson(self.expected_batch_size / dataset_size, dataset_size)
        if self.max_batch_size is not None:
            return TruncatedPoisson(self.expected_batch_size / dataset_size, dataset_size, self.max_batch_size)
        return (FixedSize if self.sampler == "fixed" else Shuffle)(self.expected_batch_size, dataset_size)

    def _steps(self, dataset_size: int) -> int:
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        try:
            return max(1, round(self.epochs * dataset_size / self.expected_batch_size))
        except OverflowError:
            raise ValueError(f"epochs = {self.epochs} are more steps than can be counted; choose fewer") from None

    def clip(self, layers: Iterable[str]) -> Clip:
        """How examples are clipped in a model with these layers.

        Raises:
            ValueError: `norm_methods` names another layer.
        """
        check_methods(self.norm_methods, layers)
        return Clip(self.max_grad_norm, self.clipping, self.automatic_gamma, self.norm_methods)

    def describe_preconditioner(self) -> dict[str, Any] | None:
        """The public description of the preconditioner, None without one."""
        return None if self.preconditioner is None else dict(self.preconditioner.describe())

    def describe_mechanism(self) -> dict[str, Any]:
        """The settings that decide what is released; the hash of a plan covers these."""
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
        """What comes before the clip and after the noise; defaults are left out, so that older plans keep their hash."""
        said = {
            "noise": (self.noise, GAUSSIAN),
            "readout": (self.readout, "whitened"),
            "postprocess": ([step.describe() for step in self.postprocess], []),
            "augmentations": (self.augmentations, 1),
            "norm_methods": (dict(self.norm_methods), {}),
        }
        return {name: value for name, (value, default) in said.items() if value != default}


def _check_integer(name: str, value: int | None, least: int) -> None:
    if value is None and name not in {"expected_batch_size", "dataset_size"}:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
