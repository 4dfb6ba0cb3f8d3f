"""The settings of a federated run, checked when they are made, and the one place where they become a plan."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import dp_accounting
import numpy as np

from dpkfc.curvature.base import Preconditioner
from dpkfc.data.sampling import ADD_OR_REMOVE_ONE, REPLACE_ONE, Poisson
from dpkfc.federated.options import (
    FedNewStep,
    LocalGradient,
    LocalSteps,
    LocalWork,
    PrivacyModel,
    ScaffoldSteps,
    SecureAggregation,
)
from dpkfc.federated.server_rules import FedGD, ServerRule
from dpkfc.postprocess.pipeline import Chain
from dpkfc.postprocess.protocol import PostProcess
from dpkfc.privacy import accounting
from dpkfc.privacy.accounting import NEGLIGIBLE_NOISE, EpsilonCurve
from dpkfc.privacy.calibration import calibrate_noise_multiplier, check_target, vacuous
from dpkfc.privacy.mechanism import GAUSSIAN, NOISES, ROUNDED, grid_of, widened

if TYPE_CHECKING:
    pass


# --------------------------------------------------------------------------------------------------
# The plan of a federated run: who is protected from whom, what a client sends, how noise is shared,
# what it costs.
#
# One release is a Gaussian mechanism on a sum over clients. Over T rounds of full participation its
# ε is the exact hockey-stick divergence of μ = √T · sensitivity / stddev (Balle and Wang 2018;
# Gaussian DP composes exactly); where examples or clients are Poisson-sampled it is dp-accounting's
# PLD, for those samplings whose amplification is proved:
#
#     examples at rate q, secretly, by each client        example-level models
#     clients at rate q, secretly, by a trusted server    client-level with central noise
#
# Sampling clients gives an example nothing that is proved: the other examples of its client come
# and go with it and show whether it was there, so the product of both rates is no bound
# (tests/federated/test_accounting.py has the counter-example).

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
            accounting.check_before_a_run(self.event, self.releases, self.delta, ADD_OR_REMOVE_ONE)

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
            "event": accounting.event_to_dict(self.event),
            "epsilon_for_others": {who: e if math.isfinite(e) else "inf" for who, e in self.views().items()},
        }


# --------------------------------------------------------------------------------------------------

FACTORS, SEED = METRICS = ("factors", "seed")
_SHARE_OF_SURVIVORS = 0.8
_EXAMPLES = {"privacy": "SecureAggregation()", "local": "LocalGradient()", "rule": "FedSOFIM()"}


def default_survivors(clients: float) -> int:
    """Four fifths of the expected participants, rounded up."""
    return max(1, math.ceil(_SHARE_OF_SURVIVORS * clients - 1e-9))


@dataclass(frozen=True, kw_only=True)
class FederatedConfig:
    """Settings of a federated private run; everything in it is public.

    Attributes:
        clients: n, registered clients.
        rounds: T.
        expected_records: records of all clients together, as a public constant. With the rate it makes the divisor, and no
            client may hold more. Never measured from what was sent.
        privacy: a privacy model of `trust`.
        local: what a client does in a round.
        rule: what the server does with the release.
        max_grad_norm: C, in the coordinates of the preconditioner: of one example, or of all that a client sends.
        min_survivors: t, fewest messages in a sum; a round with fewer is dropped and stays charged. None: ⌈0.8 n⌉.
        colluding: m, clients that may use their own noise, or tell the server; that of t − m others has to do. None: 1 where
            clients share the noise, so that ε holds against any single other client, which knows its share; 0 elsewhere.
        adjacency: "add_or_remove_one" (an example is there or not) or "replace_one" (twice the sensitivity).
        example_rate: q at which every client draws its examples, secretly and anew in every release.
        client_rate: q at which the server draws clients in every round.
        noise: "gaussian", or "rounded" to a grid, which secure aggregation always uses.
        preconditioner: for example `KFAC(probe=...)`; built by the server from synthetic probes and released weights.
        metric: "factors" sends the preconditioner with its hash; "seed" lets clients rebuild it and compares the hash.
        readout, postprocess: as in `PrivacyConfig`: filters stand before the rule.
        max_physical_batch_size: most rows of a micro-batch on a client.
        test_mode_seed: repeatable noise and sampling; such a run is NOT PRIVATE.

    Raises:
        ValueError: a value outside its range, or settings that do not go together.
    """

    clients: int
    rounds: int
    expected_records: int
    privacy: PrivacyModel = field(default_factory=SecureAggregation)
    local: LocalWork = field(default_factory=LocalGradient)
    rule: ServerRule = field(default_factory=FedGD)
    max_grad_norm: float = 1.0
    min_survivors: int | None = None
    colluding: int | None = None
    adjacency: str = ADD_OR_REMOVE_ONE
    example_rate: float = 1.0
    client_rate: float = 1.0
    noise: str = GAUSSIAN
    preconditioner: Any = None
    metric: str = FACTORS
    readout: str = "whitened"
    postprocess: tuple[PostProcess, ...] = ()
    max_physical_batch_size: int | None = None
    test_mode_seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "postprocess", tuple(self.postprocess))
        for name, kind in (("privacy", PrivacyModel), ("local", LocalWork), ("rule", ServerRule)):
            if not isinstance(getattr(self, name), kind) or isinstance(getattr(self, name), type):
                raise ValueError(
                    f"{name} must be a value of dpkfc.federated such as {_EXAMPLES[name]}, got {getattr(self, name)!r}"
                )
        for name, least in (("clients", 1), ("rounds", 1), ("expected_records", 1)):
            _check_integer(name, getattr(self, name), least)
        for name in ("colluding", "test_mode_seed"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0)
        if not (self.max_grad_norm > 0 and math.isfinite(self.max_grad_norm)):
            raise ValueError(f"max_grad_norm must be positive and finite, got {self.max_grad_norm}")
        for name, found, known in (
            ("adjacency", self.adjacency, (ADD_OR_REMOVE_ONE, REPLACE_ONE)),
            ("noise", self.noise, NOISES),
            ("metric", self.metric, METRICS),
        ):
            if found not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {found!r}")
        if self.privacy.masked:
            object.__setattr__(self, "noise", ROUNDED)
        self.local.check(self.privacy)
        self.rule.check(self.local)
        self._check_rates()
        self._check_survivors()
        self._check_steps()

    def _check_rates(self) -> None:
        for name in ("example_rate", "client_rate"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        sampled = self.example_rate < 1 or self.client_rate < 1
        if sampled and self.adjacency == REPLACE_ONE:
            raise ValueError("sampling is accounted for under adjacency='add_or_remove_one'; use that, or rates of 1")
        if self.privacy.unit == "client" and self.example_rate < 1:
            raise ValueError(
                "example_rate has no meaning where all that a client sends is clipped as one; leave it at 1"
            )
        if self.example_rate < 1 and self.local.bound(1.0, self.privacy) != 1.0:
            name = type(self.local).__name__
            raise ValueError(
                f"example_rate does not go with local={name}, whose contribution is clipped as one; leave it at 1"
            )
        if self.privacy.unit == "client" and self.client_rate < 1 and self.privacy.noise_by != "server":
            raise ValueError(
                f"client_rate={self.client_rate} under '{self.privacy.name}': the server knows which clients it drew, so "
                "sampling hides none from it. Use ClientLevel(TrustedServer()), or client_rate=1"
            )

    def _check_survivors(self) -> None:
        fewest = self.survivors
        if self.min_survivors is not None:
            _check_integer("min_survivors", self.min_survivors, 0)
        if fewest > self.clients:
            raise ValueError(f"min_survivors is {fewest}, more than the {self.clients} clients; make it smaller")
        if self._secret_cohort and fewest > 0:
            raise ValueError(
                "with secretly drawn clients a round that is dropped would tell how many were drawn; leave min_survivors at "
                "None (0: an empty round is a release of noise alone)"
            )
        if self.shares_noise and fewest <= self.known_shares:
            raise ValueError(
                f"min_survivors={fewest} must exceed colluding={self.known_shares}: a record is hidden by the noise of the other "
                "survivors. Raise min_survivors, or give colluding=0, and ε does not hold against other clients"
            )

    def _check_steps(self) -> None:
        made = self.preconditioner
        if made is not None and not isinstance(made, Preconditioner):
            raise ValueError(
                f"preconditioner must derive from dpkfc.curvature.Preconditioner, got {type(made).__name__}; use KFAC(...)"
            )
        if made is not None and (made.uses_past_releases or made.required_clipping is not None):
            raise ValueError(f"{type(made).__name__} does not run federated; use KFAC(...), or preconditioner=None")
        if made is not None and self.metric == SEED and made.uses_previous_state:
            raise ValueError("clients that rebuild the metric from its seed know no earlier refresh; use metric='factors'")
        if made is not None and made.describe().get("uses_private_data"):
            raise ValueError("curvature of private data would be a release of its own; use a synthetic or public probe")
        by_clients = self.local.counts == "clients" and self.privacy.unit == "client"
        if made is not None and (by_clients or isinstance(self.local, FedNewStep)):
            raise ValueError(
                f"local={type(self.local).__name__} under '{self.privacy.name}' is clipped in the coordinates of the parameters, "
                "where a preconditioner would do nothing; use local=LocalGradient()"
            )
        if made is not None and self.local.counts == "clients" and self.readout != "whitened":
            raise ValueError("local steps are taken in the coordinates of the preconditioner; use readout='whitened'")
        steps = (*self.postprocess, *self.rule.postprocess)
        chain = Chain(steps, self.readout)
        needing = [type(step).__name__ for step in steps if step.needs_variance]
        if needing and self.walks_privately:
            raise ValueError(
                f"{needing[0]} needs the variance of the noise, which is not known of the change by private local steps; use "
                "local=LocalGradient(), or another filter"
            )
        if chain.needs_points:
            raise ValueError("DiSK at two points needs a second sum; use EMA, or DiSK with gamma=(1 - kappa) / kappa")

    @property
    def _secret_cohort(self) -> bool:
        return self.privacy.unit == "client" and self.client_rate < 1

    @property
    def survivors(self) -> int:
        """t in force."""
        if self.min_survivors is not None:
            return self.min_survivors
        return 0 if self._secret_cohort else default_survivors(self.clients * self.client_rate)

    @property
    def shares_noise(self) -> bool:
        """Whether a unit is hidden by noise of several clients, each of which knows its own share."""
        return self.privacy.noise_by == "clients" and not self.privacy.alone

    @property
    def walks_privately(self) -> bool:
        """Whether a client sends the change by steps that are noisy each, and not a noisy sum."""
        return self.privacy.unit == "example" and isinstance(self.local, LocalSteps)

    @property
    def known_shares(self) -> int:
        """m in force."""
        if self.colluding is not None:
            return self.colluding
        return int(self.shares_noise and self.clients > 1)

    @property
    def against(self) -> str:
        """From whom the unit is protected, for the card."""
        return self.privacy.against(self.known_shares)

    @property
    def divisor(self) -> int:
        """The public constant that every sum is divided by: expected examples, or clients, in a sum."""
        if self.local.counts == "clients" or self.privacy.unit == "client":
            return max(1, round(self.clients * self.client_rate))
        return max(1, round(self.expected_records * self.example_rate * self.client_rate))

    @property
    def local_divisor(self) -> int:
        """The public constant that a client divides the sum of a local step by: expected records of one client in it."""
        return max(1, round(self.expected_records * self.example_rate / self.clients))

    @property
    def sensitivity(self) -> float:
        """How far neighbouring data move the clipped sum; that of the rounded sum where it is rounded."""
        found = self.local.bound(self.max_grad_norm, self.privacy)
        if (
            self.adjacency == REPLACE_ONE and found <= self.max_grad_norm
        ):  # a contribution clipped as one has 2 C already
            found *= 2
        return widened(found) if self.noise == ROUNDED else found

    @property
    def rate(self) -> float:
        """The sampling rate whose amplification is proved for the unit."""
        return self.client_rate if self.privacy.unit == "client" else self.example_rate

    @property
    def releases(self) -> int:
        """Releases of the whole run: T times those of a round."""
        return self.rounds * self.local.releases(self.privacy)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event of one release."""
        return Poisson(self.rate, max(self.expected_records, self.clients)).event(noise_multiplier)

    def calibrate(self, epsilon: float, delta: float) -> FederatedPlan:
        """The plan with the least noise whose ε is at most the target: the upper, safe end of the bracket.

        Raises:
            ValueError: an impossible or unreachable target.
        """
        check_target(epsilon, delta, self.units)
        noise_multiplier = calibrate_noise_multiplier(epsilon, delta, self.event, self.releases)
        return FederatedPlan(config=self, noise_multiplier=noise_multiplier, delta=delta, target_epsilon=epsilon)

    def with_noise(self, noise_multiplier: float, delta: float) -> FederatedPlan:
        """The plan with a given noise multiplier, stddev over sensitivity; 0 is no noise and no privacy.

        Raises:
            ValueError: a value outside its range.
        """
        check_target(None, delta, self.units)
        return FederatedPlan(config=self, noise_multiplier=float(noise_multiplier), delta=delta)

    @property
    def units(self) -> int:
        """Number of units, of which one is protected: clients, or the records expected of all of them."""
        return self.clients if self.privacy.unit == "client" else self.expected_records

    def describe(self) -> dict[str, Any]:
        """All that decides what is released, as plain values; what changes only memory is left out."""
        server = getattr(self.privacy, "server", self.privacy)
        return {
            "clients": self.clients,
            "rounds": self.rounds,
            "expected_records": self.expected_records,
            "privacy": {"name": self.privacy.name, "unit": self.privacy.unit, "noise_by": server.noise_by},
            "local": self.local.describe(),
            "rule": self.rule.describe(),
            "max_grad_norm": self.max_grad_norm,
            "min_survivors": self.survivors,
            "colluding": self.known_shares,
            "adjacency": self.adjacency,
            "example_rate": self.example_rate,
            "client_rate": self.client_rate,
            "divisor": self.divisor,
            "noise": self.noise,
            "preconditioner": None if self.preconditioner is None else dict(self.preconditioner.describe()),
            "metric": None if self.preconditioner is None else self.metric,
            "readout": self.readout,
            "postprocess": [step.describe() for step in self.postprocess],
            "test_mode_seed": self.test_mode_seed,
        }


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


# --------------------------------------------------------------------------------------------------
# What clients and server have in common as parties that add noise: a plan as a release reads it,
# and streams of their own.


@dataclass(frozen=True)
class Mechanism:
    """A plan as `privacy.mechanism.release` reads it, with the noise of one party and its divisor."""

    plan: FederatedPlan
    stddev: float
    expected_batch_size: int = 1
    clipping = "flat"

    @property
    def max_grad_norm(self) -> float:
        """C."""
        return self.plan.config.max_grad_norm

    @property
    def noise(self) -> str:
        """Kind of the noise; a sum without noise of its own is rounded by whoever adds the noise."""
        return self.plan.config.noise if self.stddev > 0 or self.plan.config.privacy.masked else GAUSSIAN

    @property
    def noise_multiplier(self) -> float:
        """Of the guarantee."""
        return self.plan.noise_multiplier

    @property
    def sensitivity(self) -> float:
        """Of the sum."""
        return self.plan.config.sensitivity

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Of one release."""
        return self.plan.event

    @property
    def test_mode(self) -> bool:
        """Whether noise is repeatable."""
        return self.plan.test_mode

    @property
    def hash(self) -> str:
        """Of the plan."""
        return self.plan.hash


def stream_seed(plan: FederatedPlan, party: int) -> int | None:
    """The test-mode seed of one party's streams, different for every client; None outside test mode."""
    seed = plan.config.test_mode_seed
    if seed is None:
        return None
    return int(np.random.SeedSequence(entropy=seed, spawn_key=(party,)).generate_state(1, np.uint64)[0])
