"""The plan: sampler, sensitivity, noise and event of one run, frozen together so that they cannot disagree."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from dpkfc.data.sampling import Sampler
from dpkfc.gradients.clipping import contribution_bound
from dpkfc.privacy import events
from dpkfc.privacy.calibration import check_target, vacuous
from dpkfc.privacy.event_values import NEGLIGIBLE_NOISE
from dpkfc.privacy.events import EpsilonCurve
from dpkfc.privacy.grid import ROUNDED, widened
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.rng import NoiseStream, SamplingStream

if TYPE_CHECKING:
    from dpkfc.config import PrivacyConfig

__all__ = ["Plan"]

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
        check_plan = getattr(self.config.preconditioner, "check_plan", None)
        if check_plan is not None:  # a schedule must fit the run
            check_plan(self.steps, self.config.readout)

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
        return events.cross_check(self.event, self.steps, self.delta, self.neighbouring_relation)

    def check_accounting(self) -> None:
        """Refuse a plan whose ε is in dispute; done before a ledger is opened, so that nothing is charged.

        A plan without a certified guarantee claims no ε that could be wrong.

        Raises:
            ValueError: the accountants contradict each other.
        """
        if self.certified:
            events.check_before_a_run(self.event, self.steps, self.delta, self.neighbouring_relation)

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
            "event": events.event_to_dict(self.event),
            "preconditioner": self.config.describe_preconditioner(),
            "readout": self.config.readout,
            "postprocess": [step.describe() for step in self.config.postprocess],
            "weight_average": None if self.config.weight_average is None else self.config.weight_average.describe(),
            "augmentations": self.config.augmentations,
            "assumed_public": ["dataset_size", "expected_batch_size", "max_grad_norm", "steps", "delta"],
        }
