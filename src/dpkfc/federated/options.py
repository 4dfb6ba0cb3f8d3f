"""Settings of a federated run: who is protected from whom, what clients and the server do.

    LocalGradient   one clipped sum of per-example gradients; a client-level model clips the mean
                    gradient as one
    LocalSteps      K steps of SGD, and the change of the parameters (FedAvg)
    ScaffoldSteps   the same, each step corrected by control variates (SCAFFOLD)
    FedNewStep      (H + (α + ρ) I)⁻¹ (g − λ + ρ y), all of it clipped as one (FedNew)

No client divides its sum by the number of its records. Hence each record has the same weight
relative to the noise, whatever the number of records of each client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpkfc._checks import check_in_range, check_integer, check_one_of, check_positive
from dpkfc.postprocess.optimizers import SOFIM
from dpkfc.postprocess.pipeline import PostProcess

# --------------------------------------------------------------------------------------------------
# Privacy models: whose data are protected, from whom, and who adds the noise.
#
#     TrustedServer       the server sees single sums and adds the noise (or the clients share it)
#     SecureAggregation   the server sees only the sum over clients; each client adds noise shares
#     PerUpload           the server sees every message; each carries the whole noise, √n times more
#                         in the sum
#     ClientLevel         the unit is a client, whose message is clipped as one; any of the above
#
# Noise shares are sized for the fewest clients whose noise an adversary does not know. With t
# survivors, m of which collude (or tell the server), every client adds noise of variance
# stddev² / (t − m). A client knows its own share, so protection from any single other client takes
# m = 1. More survivors only add noise.


class PrivacyModel:
    """What a plan asks of a privacy model.

    Attributes:
        name: for plans and privacy cards.
        unit: "example" or "client".
        noise_by: "server" or "clients".
        masked: whether messages are added under masks (secure aggregation).
        has_full_noise: whether each message carries the whole noise, and hides its client's data by
            itself.
    """

    name = ""
    unit = "example"
    noise_by = "clients"
    masked = False
    has_full_noise = False

    def describe_adversaries(self, colluding: int) -> str:
        """Return from whom the unit is protected, for the privacy card."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrustedServer(PrivacyModel):
    """Protects one example from everyone who sees the models; the server sees single messages.

    Attributes:
        noise_by: "server" adds all of it to the sum; "clients" add a share each, `colluding` of
            which may be known.

    Raises:
        ValueError: another value.
    """

    noise_by: str = "server"
    name = "example-level, trusted server"

    def __post_init__(self) -> None:
        check_one_of("noise_by of TrustedServer", self.noise_by, ("server", "clients"))

    def describe_adversaries(self, colluding: int) -> str:
        """Return from whom the unit is protected."""
        server = "NOT the server, which sees what every client sends"
        if self.noise_by == "server":
            return f"everyone who sees the models of all rounds; {server}"
        return (
            f"everyone who sees the models of all rounds{_describe_other_clients(colluding)};"
            f" {server}"
        )


@dataclass(frozen=True)
class SecureAggregation(PrivacyModel):
    """Protects one example from everyone.

    The server learns the sum over clients and no single message.

    The server has to follow the protocol of `secure_aggregation`. It may collude with fewer clients
    than `min_survivors` and still learn only the sum of the others. Clients know their own noise: ε
    is computed for `colluding` of them, 1 by default. A round of `Server.open_round` without
    `request_keys` has one exchange of messages and the same guarantee, but is lost with the first
    client that is lost.
    """

    name = "example-level, secure aggregation"
    masked = True

    def describe_adversaries(self, colluding: int) -> str:
        """Return from whom the unit is protected."""
        server = (
            "the server included, which follows the protocol and learns only the sum over clients"
            " (secure aggregation)"
        )
        collusion = " and may tell the server" if colluding else ""
        return f"everyone, {server}{_describe_other_clients(colluding)}{collusion}"


@dataclass(frozen=True)
class PerUpload(PrivacyModel):
    """Protects one example from a server that sees every message, which has the whole noise."""

    name = "example-level, per upload"
    has_full_noise = True

    def describe_adversaries(self, colluding: int) -> str:
        """Return from whom the unit is protected."""
        return "everyone, the server included, which sees the message of every client"


@dataclass(frozen=True)
class ClientLevel(PrivacyModel):
    """Protects one client with all of its examples: its whole message is clipped to C.

    Where the records of one person lie with several clients, the person is not protected.

    Attributes:
        server: one of the three models above, which says who sees what and who adds the noise.

    Raises:
        ValueError: a client-level model inside another.
    """

    server: TrustedServer | SecureAggregation | PerUpload = TrustedServer()
    unit = "client"

    def __post_init__(self) -> None:
        if not isinstance(self.server, TrustedServer | SecureAggregation | PerUpload):
            raise ValueError(
                "server of ClientLevel must be TrustedServer, SecureAggregation or PerUpload, got "
                f"{type(self.server).__name__}"
            )
        # All but the unit is as of the model inside.
        name = self.server.name.replace("example-level", "client-level")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "noise_by", self.server.noise_by)
        object.__setattr__(self, "masked", self.server.masked)
        object.__setattr__(self, "has_full_noise", self.server.has_full_noise)

    def describe_adversaries(self, colluding: int) -> str:
        """Return from whom the unit is protected."""
        return self.server.describe_adversaries(colluding)


def _describe_other_clients(colluding: int) -> str:
    """Return whether the noise protects from other clients, each of which knows its own share."""
    if colluding == 0:
        return ", except for the other clients, each of which knows its own noise (colluding=0)"
    if colluding == 1:
        return ", and any single other client, which knows its own noise"
    return f", and any {colluding} other clients together, which know their own noise"


# --------------------------------------------------------------------------------------------------


class LocalWork:
    """A client's work in a round; most is one release of bound C under any privacy model.

    Attributes:
        counts: what the sum is over: "examples" or "clients".
    """

    counts = "clients"

    def describe(self) -> dict[str, Any]:
        """Return plain values that say all that decides what is released."""
        raise NotImplementedError

    def releases(self, privacy: PrivacyModel) -> int:
        """Return the number of releases of one round."""
        return 1

    def check(self, privacy: PrivacyModel) -> None:
        """Refuse a privacy model under which this work has no bound.

        Raises:
            ValueError: with the reason and the fix.
        """

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """Return how far one unit that joins or leaves moves the sum of a release."""
        return max_grad_norm


@dataclass(frozen=True)
class LocalGradient(LocalWork):
    """One clipped sum a round, over all records or a Poisson sample (DP-FedGD, DP-KFC).

    Under a client-level model the gradient of the mean loss over the client's records is clipped as
    one.
    """

    counts = "examples"

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": "gradient"}


@dataclass(frozen=True)
class LocalSteps(LocalWork):
    """K local steps; a client sends θ₀ − θ_K.

    Client-level: plain SGD on all records, the change clipped to C. Example-level: K steps of
    DP-SGD on Poisson samples. Each step is a release with the whole noise, so T rounds cost K T
    releases. These steps run under `PerUpload` only, because a client's own steps do not contain
    the noise of other clients.

    Attributes:
        steps: K >= 1.
        learning_rate: of the local steps, > 0.

    Raises:
        ValueError: a value outside its range, by name.
    """

    steps: int = 5
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        check_integer(f"steps of {type(self).__name__}", self.steps, 1)
        check_positive(f"learning_rate of {type(self).__name__}", self.learning_rate)

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": "steps", "steps": self.steps, "learning_rate": self.learning_rate}

    def releases(self, privacy: PrivacyModel) -> int:
        """Return 1 for a change that is clipped as a whole, K for steps that are private each."""
        return 1 if privacy.unit == "client" else self.steps

    def check(self, privacy: PrivacyModel) -> None:
        """Refuse example-level models that share the noise: each step needs the whole noise.

        Raises:
            ValueError: an example-level model that shares the noise between clients.
        """
        if privacy.unit == "example" and not privacy.has_full_noise:
            raise ValueError(
                f"{type(self).__name__} depend on a client's own last step, which no noise of other"
                " clients covers; use PerUpload(), ClientLevel() or LocalGradient()"
            )


@dataclass(frozen=True)
class ScaffoldSteps(LocalSteps):
    """K local steps along g − c_i + c, then c_i ← c_i − c + change / (K η) (SCAFFOLD, option II).

    The change is the change as it is sent: under a client-level model the clipped change.
    Example-level steps take noisy gradients, and c_i is the mean of the last K of them. This is
    post-processing, and the sensitivity stays C.
    """

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {**super().describe(), "name": "scaffold"}


@dataclass(frozen=True)
class FedNewStep(LocalWork):
    """One pass of FedNew's ADMM: ŷ_i = clip_C((H_i + (α + ρ) I)⁻¹ (g_i − λ_i + ρ y)).

    Then λ_i ← λ_i + ρ (ŷ_i − y). H_i is the empirical Fisher matrix of the client's own records.
    All of the contribution is clipped as one. A client that joins moves the sum by C. An example
    (added or replaced) moves the sum by 2 C, because it turns one vector of norm C into another.
    Source: Elgabli et al. 2022 (FedNew); the server steps θ ← θ − y.

    Attributes:
        alpha: α > 0.
        rho: ρ > 0.

    Raises:
        ValueError: a value outside its range, by name.
    """

    alpha: float = 1.0
    rho: float = 0.1

    def __post_init__(self) -> None:
        check_positive("alpha of FedNewStep", self.alpha)
        check_positive("rho of FedNewStep", self.rho)

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": "fednew", "alpha": self.alpha, "rho": self.rho}

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """Return C for a client, 2 C for an example."""
        return max_grad_norm if privacy.unit == "client" else 2 * max_grad_norm


# --------------------------------------------------------------------------------------------------
# What the server does with a release. All rules are post-processing in O(d) time and a few vectors
# of memory.
#
#     FedGD, FedAvg   θ ← θ − η ḡ
#     FedAvgM         m ← β m + ḡ,  θ ← θ − η m
#     FedSOFIM        θ ← θ − η (ρI + MMᵀ)⁻¹ ḡ            (`postprocess.SOFIM`; DP-FedSOFIM)
#     FedNew          θ ← θ − y                            (y is a Newton direction, not an iterate)
#     Scaffold        θ ← θ − η ḡ,  c ← c + Σ (c_i⁺ − c_i) / n

State = Mapping[str, Tensor]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Two public fractions of the registered clients.

    Attributes:
        divisor_fraction: the divisor of a sum over clients, over n. The direction times this is the
            sum over n.
        survivor_fraction: survivors over n; the rate where clients were sampled secretly.
    """

    divisor_fraction: float
    survivor_fraction: float


class ServerRule:
    """A server's step: maps a direction and a state to an update and the next state."""

    @property
    def postprocess(self) -> tuple[PostProcess, ...]:
        """Return steps behind the plan's own filters."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Return plain values that say all that decides the result."""
        raise NotImplementedError

    def check(self, local: LocalWork) -> None:
        """Refuse work of clients that does not go with this rule.

        Raises:
            ValueError: with the fix.
        """
        raise NotImplementedError

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return what is subtracted from the parameters, and the next state.

        Args:
            direction: of the release, after filters; nobody reads it afterwards.
            state: of the rule; empty before the first round.
            participation: fractions of the registered clients.
        """
        raise NotImplementedError

    def broadcast(self, state: State) -> Tensors:
        """Return what clients need of the state, by parameter name; empty for most rules."""
        return {}


@dataclass(frozen=True)
class FedGD(ServerRule):
    """θ ← θ − η ḡ.

    Attributes:
        learning_rate: η > 0.

    Raises:
        ValueError: a value outside its range.
    """

    learning_rate: float = 0.1
    name = "fedgd"

    def __post_init__(self) -> None:
        check_positive(f"learning_rate of {type(self).__name__}", self.learning_rate)

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": self.name, "learning_rate": self.learning_rate}

    def check(self, local: LocalWork) -> None:
        """Refuse work that has a rule of its own."""
        if isinstance(local, FedNewStep | ScaffoldSteps):
            raise ValueError(
                f"rule={type(self).__name__} does not go with local={type(local).__name__}: "
                "give rule=FedNew() or rule=Scaffold(...)"
            )

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return η ḡ and no state."""
        return {name: self.learning_rate * g for name, g in direction.items()}, {}


@dataclass(frozen=True)
class FedAvg(FedGD):
    """θ ← θ − η · mean change (FedAvg for η = 1); every client has the same public weight."""

    learning_rate: float = 1.0
    name = "fedavg"


@dataclass(frozen=True)
class FedAvgM(FedGD):
    """FedAvg with momentum at the server: m ← β m + ḡ, θ ← θ − η m.

    Attributes:
        momentum: β in [0, 1).
    """

    learning_rate: float = 1.0
    momentum: float = 0.9
    name = "fedavgm"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_in_range("momentum of FedAvgM", self.momentum, "[0, 1)")

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {**super().describe(), "momentum": self.momentum}

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return η m and m."""
        momentum = {}
        for name, g in direction.items():
            momentum[name] = self.momentum * state[name] + g if name in state else g.clone()
        return {name: self.learning_rate * m for name, m in momentum.items()}, momentum


@dataclass(frozen=True)
class FedSOFIM(FedGD):
    """The server step of DP-FedSOFIM: θ ← θ − η (ρI + MMᵀ)⁻¹ ḡ, M a moving average of releases.

    Attributes:
        rho, beta, direction, bias_correction, warmup: of `postprocess.SOFIM`.
    """

    learning_rate: float = 0.1
    rho: float = 0.5
    beta: float = 0.9
    direction: str = "gradient"
    bias_correction: bool = False
    warmup: int = 0
    name = "fedsofim"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.postprocess  # noqa: B018 - checks the values

    @property
    def postprocess(self) -> tuple[PostProcess, ...]:
        """Return the preconditioning step."""
        return (SOFIM(self.rho, self.beta, self.direction, self.bias_correction, self.warmup),)

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return η times the direction, in place: no other object holds the tensors of `SOFIM`."""
        return {name: g.mul_(self.learning_rate) for name, g in direction.items()}, {}


@dataclass(frozen=True)
class FedNew(ServerRule):
    """The outer step of FedNew: θ ← θ − y, y the mean of the clients' directions.

    The next round sends y to clients.
    """

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": "fednew"}

    def check(self, local: LocalWork) -> None:
        """Refuse all work but `FedNewStep`."""
        _check_work("FedNew", local, FedNewStep)

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return the mean direction y, as update and as state."""
        y = {name: g.clone() for name, g in direction.items()}
        return y, dict(y)

    def broadcast(self, state: State) -> Tensors:
        """Return the last y."""
        return dict(state)


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD's server: θ ← θ − η · mean change, c ← c + Σ (change_i / (K η_local) − c) / n.

    The sum over the survivors is the release times its divisor, a public constant. Where clients
    are sampled at a rate q, about n q of them are in it. The changes of the control variates follow
    from the released mean and the old c, so messages are those of FedAvg.

    Attributes:
        local: the clients' work, whose K and η_local the rule needs.
    """

    local: ScaffoldSteps = ScaffoldSteps()
    name = "scaffold"

    def check(self, local: LocalWork) -> None:
        """Refuse all work but the same `ScaffoldSteps`."""
        _check_work("Scaffold", local, ScaffoldSteps)
        if local != self.local:
            raise ValueError(
                f"Scaffold was made for {self.local}, the clients do {local}; give both the same "
                "value"
            )

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return η times the mean change, and c moved by the survivors."""
        per_step = participation.divisor_fraction / (self.local.steps * self.local.learning_rate)
        c = {}
        for name, change in direction.items():
            old = state.get(name, torch.zeros_like(change))
            c[name] = old + change * per_step - participation.survivor_fraction * old
        return {name: self.learning_rate * g for name, g in direction.items()}, c

    def broadcast(self, state: State) -> Tensors:
        """Return the control variate c."""
        return dict(state)


def _check_work(rule: str, local: LocalWork, needed: type) -> None:
    if not isinstance(local, needed):
        raise ValueError(
            f"rule={rule} does not go with local={type(local).__name__}: give "
            f"local={needed.__name__}(...)"
        )
