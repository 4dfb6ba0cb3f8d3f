"""The plan of a federated run: who is protected from whom, what a client sends, how noise is shared, what it costs.

One release is a Gaussian mechanism on a sum over clients. Over T rounds of full participation its ε is the exact hockey-stick
divergence of μ = √T · sensitivity / stddev (Balle and Wang 2018; Gaussian DP composes exactly); where examples or clients are
Poisson-sampled it is dp-accounting's PLD, for those samplings whose amplification is proved:

    examples at rate q, secretly, by each client        example-level models
    clients at rate q, secretly, by a trusted server    client-level with central noise

Sampling clients gives an example nothing that is proved: the other examples of its client come and go with it and show whether
it was there, so the product of both rates is no bound (tests/federated/test_accounting.py has the counter-example).
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import dp_accounting

from dpkfc.data.sampling import ADD_OR_REMOVE_ONE
from dpkfc.federated.local import FedNewStep, LocalSteps, ScaffoldSteps
from dpkfc.privacy import events
from dpkfc.privacy.calibration import check_target, vacuous
from dpkfc.privacy.event_values import NEGLIGIBLE_NOISE
from dpkfc.privacy.events import EpsilonCurve
from dpkfc.privacy.grid import grid_of

if TYPE_CHECKING:
    from dpkfc.federated.config import FederatedConfig

__all__ = ["FederatedPlan"]

FORMAT = 1
_FARTHEST = 12.2  # standard deviations that no draw of `privacy.rng` exceeds


@dataclass(frozen=True, kw_only=True)
class FederatedPlan:
    """What one federated run does and costs. Make it with `FederatedConfig.calibrate` or `with_noise`.

    Attributes:
        config: the settings it was made from.
        noise_multiplier: standard deviation of the noise that hides a unit over the sensitivity.
        delta: δ of the guarantee.
        target_epsilon: the ε it was calibrated for, None where the noise was given.

    Raises:
        ValueError: a value outside its range.
    """

    config: FederatedConfig
    noise_multiplier: float
    delta: float
    target_epsilon: float | None = None

    def __post_init__(self) -> None:
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(f"noise_multiplier must be finite and >= 0, got {self.noise_multiplier}")
        check_target(self.target_epsilon, self.delta)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise that the guarantee needs, on a sum (per upload: on each message)."""
        return self.noise_multiplier * self.config.sensitivity

    @property
    def share(self) -> float:
        """Standard deviation of the noise that one client adds to its message."""
        return self.config.privacy.share(self.stddev, self.config.survivors - self.config.known_shares)

    def sum_stddev(self, survivors: int) -> float:
        """Standard deviation of the noise in a sum of so many messages, the server's own included."""
        if self.config.privacy.noise_by == "server":
            return self.stddev
        return self.share * math.sqrt(survivors)

    def mean_variance(self, survivors: int) -> float | None:
        """Variance of the noise in every entry of the released mean; None where it is not known, after private local steps."""
        if self.config.walks_privately:
            return None
        return (self.sum_stddev(survivors) / self.config.divisor) ** 2

    def hiding_stddev(self, survivors: int, colluding: int = 0) -> float:
        """Standard deviation of the noise between a unit and others: in its own message, or what they do not know of the sum's.

        Args:
            survivors: messages in the sum.
            colluding: of them, those whose noise is known to whoever looks; 1 for another client.
        """
        if self.config.privacy.alone:
            return self.share
        return self.sum_stddev(max(0, survivors - colluding))

    @cached_property
    def event(self) -> dp_accounting.DpEvent:
        """The event of one release."""
        return self.config.event(self.noise_multiplier)

    @property
    def releases(self) -> int:
        """Releases of the whole run."""
        return self.config.releases

    @property
    def per_round(self) -> int:
        """Releases of one round."""
        return self.config.local.releases(self.config.privacy)

    @property
    def test_mode(self) -> bool:
        """Whether the random streams are repeatable; such a run is not private."""
        return self.config.test_mode_seed is not None

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why this run has no certified guarantee; empty where it has."""
        told = vacuous(self.delta, self.config.units)
        texts = (
            (self.noise_multiplier == 0, "NOT PRIVATE: no noise is added, epsilon is infinite"),
            (0 < self.noise_multiplier < NEGLIGIBLE_NOISE, "NOT PRIVATE: the noise is below a thousandth of the sensitivity"),
            (self.test_mode, "NOT PRIVATE: test mode, the noise can be repeated from a seed"),
            (told, f"UNCERTIFIED: {told}"),
        )
        return tuple(text for applies, text in texts if applies)

    @property
    def certified(self) -> bool:
        """Whether ε is a guarantee of what is run."""
        return not self.caveats

    @cached_property
    def curve(self) -> EpsilonCurve:
        """ε by the number of releases. The noise is relative to the sensitivity, so either adjacency has the same curve."""
        return EpsilonCurve(self.event, self.delta, ADD_OR_REMOVE_ONE, "pld", horizon=self.releases)

    def epsilon(self, releases: int | None = None) -> float:
        """ε after so many releases (a round has `per_round` of them), by default all planned; infinite without noise."""
        if self.caveats and self.noise_multiplier > 0:
            warnings.warn(f"epsilon is no guarantee of this run. {'. '.join(self.caveats)}", stacklevel=2)
        return self.curve.at(self.releases if releases is None else releases)

    def epsilon_at(self, stddev: float) -> float:
        """ε of the whole run were the noise of another standard deviation; infinite for none. For the card and for tests."""
        if stddev == 0:
            return math.inf
        event = self.config.event(stddev / self.config.sensitivity)
        return EpsilonCurve(event, self.delta, ADD_OR_REMOVE_ONE, "pld").at(self.releases)

    def views(self) -> dict[str, float]:
        """ε for others than the one that the guarantee names: what the same noise is worth to them.

        What the models alone are worth is left out where clients take several private steps: a later step follows the noise of an
        earlier one, so that one record can move the sum by far more than its own clipped gradients.
        """
        t, local = self.config.survivors, self.config.local
        follow = self.config.walks_privately and (isinstance(local, ScaffoldSteps) or self.per_round > 1)
        found = {"a server that sees every message": self.share}
        if self.config.shares_noise and self.config.clients > 1:
            found["another client, which knows its own noise"] = self.hiding_stddev(t, 1)
        if not follow:
            found = {"the released models alone": self.sum_stddev(t), **found}
        same = 1e-9  # of the noise that the guarantee names, which square roots meet but for rounding
        others = {who: stddev for who, stddev in found.items() if not math.isclose(stddev, self.stddev, rel_tol=same)}
        return {who: self.epsilon_at(stddev) for who, stddev in others.items()}

    def largest_message(self, numbers: int, control: float = 0.0) -> float:
        """A norm that no honest client's message exceeds, so that refusing larger ones depends on nobody's data.

        Args:
            numbers: d.
            control: norm of the control variate that was sent out.
        """
        config, noise = self.config, _FARTHEST * self.share * math.sqrt(numbers)
        if config.privacy.unit == "client" or isinstance(config.local, FedNewStep):  # clipped as one
            most = config.max_grad_norm + noise
        else:
            most = config.max_grad_norm * config.expected_records + noise
        if config.privacy.unit == "example" and isinstance(config.local, LocalSteps):
            most = config.local.steps * config.local.learning_rate * (2 * most / config.local_divisor + control)
        return most * 1.01  # norms of messages are taken in their own precision

    def check_accounting(self) -> None:
        """Refuse a plan whose ε is in dispute between accountants; before a ledger is opened.

        Raises:
            ValueError: they contradict each other.
        """
        if self.certified:
            events.check_before_a_run(self.event, self.releases, self.delta, ADD_OR_REMOVE_ONE)

    @property
    def ledger_header(self) -> dict[str, Any]:
        """What the first line of a ledger says of its plan: whom ε protects, at which δ, in how many releases."""
        return {
            "certified": self.certified,
            "rng": "repeatable" if self.test_mode else "secure",
            "unit": f"one {self.config.privacy.unit}",
            "neighbouring_relation": self.config.adjacency,
            "delta": self.delta,
            "dataset_size": int(self.config.units),
            "steps": self.releases,
        }

    def grid(self, numbers: int) -> float:
        """The grid of rounded sums of so many numbers: the same for every client and the server.

        Raises:
            ValueError: there is none for this noise.
        """
        return grid_of(self.config.sensitivity, max(1, numbers), self.share)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical public description: two plans with one hash run the same mechanism."""
        held = {
            "format": FORMAT,
            **self.config.describe(),
            "noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
        }
        return hashlib.sha256(json.dumps(held, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """The plan for the card: plain values that JSON can hold; an infinite ε is the text "inf"."""
        total = self.curve.at(self.releases)
        return {
            "plan_hash": self.hash,
            **self.config.describe(),
            "epsilon": total if math.isfinite(total) else "inf",
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "certified": self.certified,
            "caveats": list(self.caveats),
            "against": self.config.against,
            "noise_multiplier": self.noise_multiplier,
            "sensitivity": self.config.sensitivity,
            "stddev": self.stddev,
            "share_of_a_client": self.share,
            "releases": self.releases,
            "event": events.event_to_dict(self.event),
            "epsilon_for_others": {who: e if math.isfinite(e) else "inf" for who, e in self.views().items()},
        }
