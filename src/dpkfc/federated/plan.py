"""The settings of a federated run, and the one place where they become a plan.

One release is a Gaussian mechanism on a sum over clients. Over T rounds of full participation, ε
is the exact hockey-stick divergence of μ = √T · sensitivity / stddev (Balle and Wang 2018;
Gaussian DP composes exactly). Where examples or clients are Poisson-sampled, ε is dp-accounting's
PLD, for the samplings whose amplification is proved:

    examples at rate q, secretly, by each client        example-level models
    clients at rate q, secretly, by a trusted server    client-level with central noise

No amplification is proved for an example when clients are sampled. The other examples of its
client join and leave with it and reveal whether it was there, so the product of both rates is not
a bound (tests/federated/test_accounting.py has the counter-example).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dpkfc._checks import (
    check_in_range,
    check_integer,
    check_one_of,
    check_optional_integer,
    check_positive,
)
from dpkfc.checkpoint import StrPath
from dpkfc.curvature.base import Preconditioner
from dpkfc.data.sampling import ADD_OR_REMOVE_ONE, REPLACE_ONE, Poisson
from dpkfc.federated.local_work import LocalGradient, LocalSteps, LocalWork
from dpkfc.federated.privacy_models import Description, PrivacyModel, SecureAggregation
from dpkfc.federated.server_rules import FedGD, ServerRule
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.postprocess.protocol import PostProcess
from dpkfc.privacy import accounting, cross_check
from dpkfc.privacy.accounting import EpsilonCurve
from dpkfc.privacy.calibration import (
    PlanBase,
    calibrate_noise_multiplier,
    check_noise_multiplier,
    check_target,
)
from dpkfc.privacy.events import event_to_dict
from dpkfc.privacy.grid import GAUSSIAN, NOISES, ROUNDED, grid_of, widen_sensitivity
from dpkfc.privacy.ledger import Ledger
from dpkfc.report.text import json_number

if TYPE_CHECKING:
    import dp_accounting

FORMAT = 1
# No draw of `privacy.rng` exceeds this number of standard deviations.
_MAX_DEVIATION = 12.2
# Norms of messages are taken in the messages' own precision.
_NORM_SLACK = 1.01
# Square roots meet the noise of the guarantee up to rounding.
_EQUAL_NOISE = 1e-9


@dataclass(frozen=True, kw_only=True)
class FederatedPlan(PlanBase):
    """What one federated run does and costs.

    Make it with `FederatedConfig.calibrate` or `with_noise`.

    Attributes:
        config: the settings it was made from.
        noise_multiplier: standard deviation of the noise that hides a unit, over the sensitivity.
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
        self._check_noise_and_target()

    @property
    def sensitivity(self) -> float:
        """Return the largest change of the clipped sum between neighbouring datasets."""
        return self.config.sensitivity

    @property
    def units(self) -> int:
        """Return the number of privacy units."""
        return self.config.units

    @property
    def privacy_unit(self) -> str:
        """Return what is added, removed or replaced between neighbouring datasets."""
        return f"one {self.config.privacy.unit}"

    @property
    def neighbouring_relation(self) -> str:
        """Return which datasets count as neighbours."""
        return self.config.adjacency

    @property
    def client_stddev(self) -> float:
        """Return the standard deviation of the noise that one client adds to its message."""
        privacy = self.config.privacy
        if privacy.noise_by == "server":
            return 0.0
        if privacy.has_full_noise:
            return self.stddev
        return self.stddev / math.sqrt(self.config.survivors - self.config.known_shares)

    def sum_stddev(self, survivors: int) -> float:
        """Return the standard deviation of the noise in a sum, the server's noise included."""
        if self.config.privacy.noise_by == "server":
            return self.stddev
        return self.client_stddev * math.sqrt(survivors)

    def mean_variance(self, survivors: int) -> float | None:
        """Return the variance of the noise in every entry of the released mean.

        Return None after private local steps, where the variance is unknown.
        """
        if self.config.has_private_steps:
            return None
        return (self.sum_stddev(survivors) / self.config.divisor) ** 2

    def hiding_stddev(self, survivors: int, colluding: int = 0) -> float:
        """Return the standard deviation of the noise that hides a unit from an adversary.

        This is the noise of a single message where each message carries all of it. Elsewhere it is
        the noise in the sum that the adversary does not know.

        Args:
            survivors: messages in the sum.
            colluding: survivors whose noise the adversary knows; 1 for another client.
        """
        if self.config.privacy.has_full_noise:
            return self.client_stddev
        return self.sum_stddev(max(0, survivors - colluding))

    @cached_property
    def event(self) -> dp_accounting.DpEvent:
        """Return the event of one release."""
        return self.config.event(self.noise_multiplier)

    @property
    def releases(self) -> int:
        """Return the number of releases of the whole run."""
        return self.config.releases

    @property
    def per_round(self) -> int:
        """Return the number of releases of one round."""
        return self.config.local.releases(self.config.privacy)

    @cached_property
    def curve(self) -> EpsilonCurve:
        """Return ε as a function of the number of releases.

        The noise is relative to the sensitivity, so both adjacencies have the same curve.
        """
        return EpsilonCurve(self.event, self.delta, ADD_OR_REMOVE_ONE, "pld", horizon=self.releases)

    def epsilon(self, releases: int | None = None) -> float:
        """Return ε after a number of releases, by default all planned ones; infinite without noise.

        A round has `per_round` releases.
        """
        self._warn_of_caveats(stacklevel=2)
        return self.curve.epsilon(self.releases if releases is None else releases)

    def epsilon_at(self, stddev: float) -> float:
        """Return ε of the whole run for noise of another standard deviation; infinite for 0."""
        event = self.config.event(stddev / self.config.sensitivity)
        return accounting.epsilon(event, self.releases, self.delta)

    def views(self) -> dict[str, float]:
        """Return ε against adversaries that the guarantee does not name, by adversary.

        The ε of the released models is left out where clients take several private steps. A later
        step depends on the noise of an earlier step, so one record can move the sum by far more
        than its own clipped gradients.
        """
        survivors = self.config.survivors
        steps_depend_on_noise = self.config.has_private_steps and self.per_round > 1
        stddevs = {}
        if not steps_depend_on_noise:
            stddevs["the released models alone"] = self.sum_stddev(survivors)
        stddevs["a server that sees every message"] = self.client_stddev
        if self.config.shares_noise and self.config.clients > 1:
            stddevs["another client, which knows its own noise"] = self.hiding_stddev(survivors, 1)
        epsilons = {}
        for adversary, stddev in stddevs.items():
            if not math.isclose(stddev, self.stddev, rel_tol=_EQUAL_NOISE):
                epsilons[adversary] = self.epsilon_at(stddev)
        return epsilons

    def largest_message(self, numbers: int) -> float:
        """Return a norm that no honest client's message of d numbers exceeds.

        It depends on no data.
        """
        config = self.config
        noise = _MAX_DEVIATION * self.client_stddev * math.sqrt(numbers)
        contributions = 1 if config.privacy.unit == "client" else config.expected_records
        largest = config.max_grad_norm * contributions + noise
        if config.privacy.unit == "example" and isinstance(config.local, LocalSteps):
            largest_step = 2 * largest / config.local_divisor
            largest = config.local.steps * config.local.learning_rate * largest_step
        return largest * _NORM_SLACK

    def check_accounting(self) -> None:
        """Refuse a plan on whose ε the accountants disagree, before a ledger is opened.

        Raises:
            ValueError: the accountants contradict each other.
        """
        if self.certified:
            cross_check.check_before_a_run(self.event, self.releases, self.delta, ADD_OR_REMOVE_ONE)

    def open_ledger(self, path: StrPath | None, **header: Any) -> Ledger:
        """Return the ledger of one party, in memory without a path.

        Args:
            path: of the file.
            header: what the first line says next to `ledger_header`.
        """
        header = {**self.ledger_header, "steps": self.releases, **header}
        return Ledger.open(path, self.hash, header, self.releases)

    def grid(self, numbers: int) -> float:
        """Return the grid of rounded sums of d numbers; clients and server have the same.

        Raises:
            ValueError: no grid fits this noise.
        """
        return grid_of(self.config.sensitivity, max(1, numbers), self.client_stddev)

    def describe_mechanism(self) -> Description:
        """Return all that decides what is released, as plain values."""
        return {
            "format": FORMAT,
            **self.config.describe(),
            "noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
        }

    def describe(self) -> Description:
        """Return the plan for the privacy card as plain values; an infinite ε is the text "inf"."""
        return {
            "plan_hash": self.hash,
            **self.config.describe(),
            "epsilon": json_number(self.curve.epsilon(self.releases)),
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "certified": self.certified,
            "caveats": list(self.caveats),
            "against": self.config.adversaries,
            "noise_multiplier": self.noise_multiplier,
            "sensitivity": self.config.sensitivity,
            "stddev": self.stddev,
            "share_of_a_client": self.client_stddev,
            "releases": self.releases,
            "event": event_to_dict(self.event),
            "epsilon_for_others": {who: json_number(x) for who, x in self.views().items()},
        }


_SURVIVING_FRACTION = 0.8
# Keeps a product such as 0.8 · 10 from being rounded up to the next integer.
_ROUNDING = 1e-9
_KINDS: tuple[tuple[str, type, str], ...] = (
    ("privacy", PrivacyModel, "SecureAggregation()"),
    ("local", LocalWork, "LocalGradient()"),
    ("rule", ServerRule, "FedSOFIM()"),
)


def default_survivors(clients: float) -> int:
    """Return four fifths of the expected participants, rounded up."""
    return max(1, math.ceil(_SURVIVING_FRACTION * clients - _ROUNDING))


@dataclass(frozen=True, kw_only=True)
class FederatedConfig:
    """Settings of a federated private run; all of them are public.

    Attributes:
        clients: n, registered clients.
        rounds: T.
        expected_records: records of all clients together, as a public constant. With the rate it
            makes the divisor, and no client may hold more. It is never measured from messages.
        privacy: one of the models in `privacy_models`.
        local: what a client does in a round.
        rule: what the server does with the release.
        max_grad_norm: C, in preconditioned space: of one example, or of all that a client sends.
        min_survivors: t, fewest messages in a sum. A round with fewer is dropped and stays charged.
            None: ⌈0.8 n⌉.
        colluding: m, clients that may use their own noise, or tell the server. The noise of t − m
            others has to suffice. None: 1 where clients share the noise, so that ε holds against
            any single other client, which knows its own share; 0 elsewhere.
        adjacency: "add_or_remove_one" (an example is there or not) or "replace_one" (twice the
            sensitivity).
        example_rate: q at which every client samples its examples, secretly and anew in every
            release.
        client_rate: q at which the server samples clients in every round.
        noise: "gaussian", or "rounded" to a grid, which secure aggregation always uses.
        preconditioner: for example `KFAC(probe=...)`. The server builds it from synthetic probes
            and released weights, and sends it with its hash.
        readout, postprocess: as in `PrivacyConfig`; filters stand before the rule.
        max_physical_batch_size: most rows of a micro-batch on a client.
        test_mode_seed: makes noise and sampling repeatable; such a run is NOT PRIVATE.

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
    readout: str = "whitened"
    postprocess: tuple[PostProcess, ...] = ()
    max_physical_batch_size: int | None = None
    test_mode_seed: int | None = None

    def __post_init__(self) -> None:
        steps = self.postprocess
        steps = (steps,) if isinstance(steps, PostProcess) else tuple(steps)
        object.__setattr__(self, "postprocess", steps)
        for name, kind, example in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, type):
                raise ValueError(
                    f"{name} must be a value of dpkfc.federated, got {value!r}; use for example "
                    f"{example}"
                )
        check_integer("clients", self.clients, 1)
        check_integer("rounds", self.rounds, 1)
        check_integer("expected_records", self.expected_records, 1)
        check_optional_integer("colluding", self.colluding, 0)
        check_optional_integer("test_mode_seed", self.test_mode_seed, 0)
        check_positive("max_grad_norm", self.max_grad_norm)
        check_one_of("adjacency", self.adjacency, (ADD_OR_REMOVE_ONE, REPLACE_ONE))
        check_one_of("noise", self.noise, NOISES)
        if self.privacy.masked:
            object.__setattr__(self, "noise", ROUNDED)
        check_in_range("example_rate", self.example_rate, "(0, 1]")
        check_in_range("client_rate", self.client_rate, "(0, 1]")
        check_optional_integer("min_survivors", self.min_survivors, 0)
        check_optional_integer("max_physical_batch_size", self.max_physical_batch_size, 1)
        self.local.check(self.privacy)
        self._check_conflicts()
        if self.preconditioner is not None:
            self.preconditioner.check_plan(self.rounds, self.readout)

    def _check_conflicts(self) -> None:
        """Refuse settings that contradict each other."""
        samples_examples = self.example_rate < 1
        samples_clients = self.client_rate < 1
        is_client_level = self.privacy.unit == "client"
        if (samples_examples or samples_clients) and self.adjacency == REPLACE_ONE:
            raise ValueError(
                "adjacency='replace_one' has no accounting for sampling; use "
                "adjacency='add_or_remove_one', or rates of 1"
            )
        if is_client_level and samples_examples:
            raise ValueError(
                f"example_rate={self.example_rate} has no effect, because a client's message is "
                "clipped as one; use 1"
            )
        if is_client_level and samples_clients and self.privacy.noise_by != "server":
            raise ValueError(
                f"client_rate={self.client_rate} hides no client from a server that knows which"
                " clients it sampled; use ClientLevel(TrustedServer()), or 1"
            )
        fewest = self.survivors
        if fewest > self.clients:
            raise ValueError(
                f"min_survivors is {fewest}, more than the {self.clients} clients; make it smaller"
            )
        if self.samples_clients_secretly and fewest > 0:
            raise ValueError(
                f"min_survivors={fewest} would let a dropped round reveal how many clients were "
                "secretly sampled; use None or 0"
            )
        if self.shares_noise and fewest <= self.known_shares:
            raise ValueError(
                f"min_survivors={fewest} must exceed colluding={self.known_shares}: raise"
                " min_survivors, or give colluding=0, and ε does not hold against other clients"
            )
        if self.preconditioner is not None:
            self._check_preconditioner()
        pipeline = PostprocessPipeline(self.filters, self.readout)
        for step in self.filters:
            if step.needs_variance and self.has_private_steps:
                raise ValueError(
                    f"{type(step).__name__} needs the variance of the noise, which private local"
                    " steps do not give; use local=LocalGradient(), or another filter"
                )
        if pipeline.has_lookahead:
            raise ValueError(
                "DiSK takes gradients away from the weights of a round; use EMA(kappa=...)"
            )

    def _check_preconditioner(self) -> None:
        preconditioner = self.preconditioner
        name = type(preconditioner).__name__
        if not isinstance(preconditioner, Preconditioner):
            raise ValueError(
                f"preconditioner must derive from dpkfc.curvature.Preconditioner, got {name}; "
                "use KFAC(...)"
            )
        if preconditioner.required_clipping is not None:
            raise ValueError(
                f"{name} does not run federated; use KFAC(...), or preconditioner=None"
            )
        if bool(preconditioner.describe().get("uses_private_data")):
            raise ValueError(
                f"{name} measures curvature on private data, which is a release of its own; use a "
                "synthetic or public probe"
            )
        is_over_clients = self.local.counts == "clients"
        if is_over_clients and self.privacy.unit == "client":
            raise ValueError(
                f"local={type(self.local).__name__} is clipped in parameter space, where a"
                " preconditioner would do nothing; use local=LocalGradient()"
            )
        if is_over_clients and self.readout != "whitened":
            raise ValueError(
                f"readout={self.readout!r} does not go with local steps, which are taken in"
                " preconditioned space; use readout='whitened'"
            )

    @property
    def filters(self) -> Sequence[PostProcess]:
        """Return the steps between a release and the rule's step, including the rule's own."""
        return (*self.postprocess, *self.rule.postprocess)

    @property
    def samples_clients_secretly(self) -> bool:
        """Return whether clients are sampled and nobody may learn how many take part."""
        return self.privacy.unit == "client" and self.client_rate < 1

    @property
    def survivors(self) -> int:
        """Return t in force."""
        if self.min_survivors is not None:
            return self.min_survivors
        if self.samples_clients_secretly:
            return 0
        return default_survivors(self.clients * self.client_rate)

    @property
    def shares_noise(self) -> bool:
        """Return whether noise of several clients hides a unit; each client knows its own share."""
        return self.privacy.noise_by == "clients" and not self.privacy.has_full_noise

    @property
    def has_private_steps(self) -> bool:
        """Return whether a client sends a change by noisy steps, and not a noisy sum."""
        return self.privacy.unit == "example" and isinstance(self.local, LocalSteps)

    @property
    def known_shares(self) -> int:
        """Return m in force."""
        if self.colluding is not None:
            return self.colluding
        return int(self.shares_noise and self.clients > 1)

    @property
    def adversaries(self) -> str:
        """Return from whom the unit is protected, for the privacy card."""
        return self.privacy.describe_adversaries(self.known_shares)

    @property
    def divisor(self) -> int:
        """Return the public divisor of every sum: its expected number of examples or clients."""
        if self.local.counts == "clients" or self.privacy.unit == "client":
            return max(1, round(self.clients * self.client_rate))
        return max(1, round(self.expected_records * self.example_rate * self.client_rate))

    @property
    def local_divisor(self) -> int:
        """Return the public divisor of a local step's sum: one client's expected records."""
        return max(1, round(self.expected_records * self.example_rate / self.clients))

    @property
    def sensitivity(self) -> float:
        """Return how far neighbouring data move the clipped sum, rounding included."""
        bound = self.max_grad_norm
        if self.adjacency == REPLACE_ONE:
            bound *= 2
        return widen_sensitivity(bound) if self.noise == ROUNDED else bound

    @property
    def rate(self) -> float:
        """Return the sampling rate whose amplification is proved for the unit."""
        return self.client_rate if self.privacy.unit == "client" else self.example_rate

    @property
    def releases(self) -> int:
        """Return the number of releases of the whole run: T times the releases of a round."""
        return self.rounds * self.local.releases(self.privacy)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return the event of one release."""
        return Poisson(self.rate, max(self.expected_records, self.clients)).event(noise_multiplier)

    def calibrate(self, epsilon: float, delta: float) -> FederatedPlan:
        """Return the plan with the least noise whose ε is at most the target.

        Raises:
            ValueError: an impossible or unreachable target.
        """
        check_target(epsilon, delta, self.units)
        noise_multiplier = calibrate_noise_multiplier(epsilon, delta, self.event, self.releases)
        return FederatedPlan(
            config=self, noise_multiplier=noise_multiplier, delta=delta, target_epsilon=epsilon
        )

    def with_noise(self, noise_multiplier: float, delta: float) -> FederatedPlan:
        """Return the plan with a given noise multiplier; 0 means no noise and no privacy.

        Raises:
            ValueError: a value outside its range.
        """
        check_noise_multiplier(noise_multiplier)
        check_target(None, delta, self.units)
        return FederatedPlan(config=self, noise_multiplier=float(noise_multiplier), delta=delta)

    @property
    def units(self) -> int:
        """Return the number of units: clients, or the expected records of all clients."""
        return self.clients if self.privacy.unit == "client" else self.expected_records

    def describe(self) -> Description:
        """Return all that decides what is released, as plain values."""
        preconditioner = None
        if self.preconditioner is not None:
            preconditioner = dict(self.preconditioner.describe())
        return {
            "clients": self.clients,
            "rounds": self.rounds,
            "expected_records": self.expected_records,
            "privacy": {
                "name": self.privacy.name,
                "unit": self.privacy.unit,
                "noise_by": self.privacy.noise_by,
            },
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
            "preconditioner": preconditioner,
            "readout": self.readout,
            "postprocess": [step.describe() for step in self.postprocess],
            "test_mode_seed": self.test_mode_seed,
        }
