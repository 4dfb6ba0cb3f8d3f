"""What a client does in a round, as values: which sum it forms, how that is bounded, and how many releases it costs.

    LocalGradient   one clipped sum of per-example gradients (a client-level model clips the mean gradient as one)
    LocalSteps      K steps of SGD, and the change of the parameters (FedAvg)
    ScaffoldSteps   the same, each step corrected by control variates (SCAFFOLD)
    FedNewStep      (H + (α + ρ) I)⁻¹ (g − λ + ρ y), all of it clipped as one (FedNew)

Every sum is un-normalised: no client divides by the number of its records, so that each record weighs the same against the
noise, whatever the sizes are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

# --------------------------------------------------------------------------------------------------
# Privacy models: whose data are protected, from whom, and who adds the noise. Each is a value with
# its own accounting.
#
#     TrustedServer       the server sees single sums and adds the noise (or the clients share it); models are protected
#     SecureAggregation   the server sees nothing but the sum over clients; every client adds a share of the noise
#     PerUpload           the server sees every message; each carries the whole noise, √n times more of it in the sum
#     ClientLevel         the unit is a client: all that it sends in a round is clipped as one; any of the three above
#
# Shares are sized for the fewest clients whose noise is unknown to whoever looks at a sum: with t
# survivors, m of them looking together (or telling the server), every client adds noise of variance
# stddev² / (t − m). A client knows its own share, so m = 1 is what it takes to be protected from
# any single other client. More survivors only add noise.


@runtime_checkable
class PrivacyModel(Protocol):
    """What a plan asks of a privacy model.

    Attributes:
        name: for plans and cards.
        unit: "example" or "client".
        noise_by: "server" or "clients".
        masked: whether messages are added under masks (secure aggregation).
        alone: whether each message has to hide its client's data without the others' noise.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102
    @property
    def noise_by(self) -> str: ...  # noqa: D102
    @property
    def masked(self) -> bool: ...  # noqa: D102
    @property
    def alone(self) -> bool: ...  # noqa: D102

    def against(self, colluding: int) -> str:
        """From whom the unit is protected, for the card: with noise for m clients that put what they know together."""
        ...

    def share(self, stddev: float, honest: int) -> float:
        """Standard deviation of the noise that one client adds, for `honest` clients at least in a sum."""
        ...


@dataclass(frozen=True)
class TrustedServer:
    """One example is protected from whoever sees the models; the server sees single messages and keeps them to itself.

    Attributes:
        noise_by: "server" adds all of it to the sum; "clients" add a share each, `colluding` of which may be known.

    Raises:
        ValueError: another value.
    """

    noise_by: str = "server"
    name = "example-level, trusted server"
    unit = "example"
    masked = False
    alone = False

    def __post_init__(self) -> None:
        if self.noise_by not in ("server", "clients"):
            raise ValueError(f"noise_by of TrustedServer must be 'server' or 'clients', got {self.noise_by!r}")

    def against(self, colluding: int) -> str:
        """For the card."""
        server = "NOT the server, which sees what every client sends"
        if self.noise_by == "server":
            return f"everyone who sees the models of all rounds; {server}"
        return f"everyone who sees the models of all rounds{_others(colluding)}; {server}"

    def share(self, stddev: float, honest: int) -> float:
        """Nothing, or stddev / √honest."""
        return 0.0 if self.noise_by == "server" else stddev / math.sqrt(honest)


@dataclass(frozen=True)
class SecureAggregation:
    """One example is protected from everyone, the server included, which learns the sum over clients and no message.

    The server has to follow the protocol of `secagg`. It may collude with fewer clients than `min_survivors` and still learn only
    the sum of the others. Clients know their own noise: ε is computed for `colluding` of them, 1 by default.
    A round of `Server.open_round` without `request_keys` has one exchange and the same guarantee, and a lost client costs it.
    """

    name = "example-level, secure aggregation"
    unit = "example"
    noise_by = "clients"
    masked = True
    alone = False

    def against(self, colluding: int) -> str:
        """For the card."""
        server = "the server included, which follows the protocol and learns only the sum over clients (secure aggregation)"
        collusion = " and may tell the server" if colluding else ""
        return f"everyone, {server}{_others(colluding)}{collusion}"

    def share(self, stddev: float, honest: int) -> float:
        """Standard deviation stddev / √honest."""
        return stddev / math.sqrt(honest)


@dataclass(frozen=True)
class PerUpload:
    """One example is protected from a server that sees every message: each message carries the whole noise."""

    name = "example-level, per upload"
    unit = "example"
    noise_by = "clients"
    masked = False
    alone = True

    def against(self, colluding: int) -> str:
        """For the card."""
        return "everyone, the server included, which sees the message of every client"

    def share(self, stddev: float, honest: int) -> float:
        """The whole standard deviation, whoever else takes part."""
        return stddev


@dataclass(frozen=True)
class ClientLevel:
    """One client, with all of its examples, is protected: its whole contribution to a round is clipped to C.

    Where one person's records lie with several clients, this protects the share of one client and not the person.

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
                f"server of ClientLevel must be TrustedServer, SecureAggregation or PerUpload, got {type(self.server).__name__}"
            )

    @property
    def name(self) -> str:
        """For plans and cards."""
        return self.server.name.replace("example-level", "client-level")

    @property
    def noise_by(self) -> str:
        """That of the server's model."""
        return self.server.noise_by

    @property
    def masked(self) -> bool:
        """That of the server's model."""
        return self.server.masked

    @property
    def alone(self) -> bool:
        """That of the server's model."""
        return self.server.alone

    def against(self, colluding: int) -> str:
        """For the card."""
        return self.server.against(colluding)

    def share(self, stddev: float, honest: int) -> float:
        """That of the server's model."""
        return self.server.share(stddev, honest)


def _others(colluding: int) -> str:
    """What shared noise is to the other clients, each of which knows a share of it."""
    if colluding == 0:
        return ", except for the other clients, each of which knows its own noise (colluding=0)"
    if colluding == 1:
        return ", and any single other client, which knows its own noise"
    return f", and any {colluding} other clients together, which know their own noise"


# --------------------------------------------------------------------------------------------------


@runtime_checkable
class LocalWork(Protocol):
    """What a plan asks of a client's work."""

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides what is released."""
        ...

    def releases(self, privacy: PrivacyModel) -> int:
        """Releases of one round."""
        ...

    def check(self, privacy: PrivacyModel) -> None:
        """Raise where this work has no bound under a privacy model.

        Raises:
            ValueError: with the reason and the fix.
        """
        ...

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """How far one unit that joins or leaves moves the sum of a release."""
        ...

    @property
    def counts(self) -> str:
        """What the sum is over: "examples" or "clients"; the public divisor is the expected number of them."""
        ...


@dataclass(frozen=True)
class LocalGradient:
    """One clipped sum a round, over all records or a Poisson sample of them: DP-FedGD, DP-FedSOFIM, federated DP-KFC.

    Under a client-level model the gradient of the mean loss over the client's records is clipped as one.
    """

    counts = "examples"

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": "gradient"}

    def releases(self, privacy: PrivacyModel) -> int:
        """One."""
        return 1

    def check(self, privacy: PrivacyModel) -> None:
        """It goes with every privacy model."""

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """One unit adds a vector of norm C at most."""
        return max_grad_norm


@dataclass(frozen=True)
class LocalSteps:
    """K local steps; what is sent is θ₀ − θ_K.

    Client-level: plain SGD on all records, the change clipped to C. Example-level: K steps of DP-SGD on Poisson samples, each a
    release with the whole noise of its own, so T rounds cost K T releases; under `PerUpload` only, because the noise of other
    clients is not in a client's own steps.

    Attributes:
        steps: K >= 1.
        learning_rate: of the local steps, > 0.

    Raises:
        ValueError: a value outside its range, by name.
    """

    steps: int = 5
    learning_rate: float = 0.1
    counts = "clients"

    def __post_init__(self) -> None:
        _check_integer(f"steps of {type(self).__name__}", self.steps)
        _check_positive(f"learning_rate of {type(self).__name__}", self.learning_rate)

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": "steps", "steps": self.steps, "learning_rate": self.learning_rate}

    def releases(self, privacy: PrivacyModel) -> int:
        """One for a change that is clipped as a whole, K for steps that are private each."""
        return 1 if privacy.unit == "client" else self.steps

    def check(self, privacy: PrivacyModel) -> None:
        """Steps on single examples need the whole noise each.

        Raises:
            ValueError: an example-level model that shares the noise between clients.
        """
        if privacy.unit == "example" and not privacy.alone:
            raise ValueError(
                f"{type(self).__name__} under '{privacy.name}': a client's next local step depends on its own last one, which no "
                "noise of other clients covers. Use privacy=PerUpload(), ClientLevel(...), or local=LocalGradient()"
            )

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """One unit moves the change (client) or the clipped sum of a step (example) by C at most."""
        return max_grad_norm


@dataclass(frozen=True)
class ScaffoldSteps(LocalSteps):
    """K local steps along g − c_i + c, then c_i ← c_i − c + change / (K η), the change as it is sent (SCAFFOLD, option II).

    Under a client-level model that is the clipped change. Example-level steps take noisy gradients, and c_i is the mean of the
    last K of them: it is post-processing, and the sensitivity stays C.
    """

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {**super().describe(), "name": "scaffold"}


@dataclass(frozen=True)
class FedNewStep:
    """One pass of FedNew's ADMM: clip_C((H_i + (α + ρ) I)⁻¹ (g_i − λ_i + ρ y)), then λ_i ← λ_i + ρ (ŷ_i − y).

    H_i is the empirical Fisher matrix of the client's own records. All of the contribution is clipped as one: a client that
    joins moves the sum by C, an example (added or replaced) by 2 C, since it turns one vector of norm C into another.
    Source: Elgabli et al. 2022 (FedNew); the server steps θ ← θ − y.

    Attributes:
        alpha: α > 0.
        rho: ρ > 0.

    Raises:
        ValueError: a value outside its range, by name.
    """

    alpha: float = 1.0
    rho: float = 0.1
    counts = "clients"

    def __post_init__(self) -> None:
        _check_positive("alpha of FedNewStep", self.alpha)
        _check_positive("rho of FedNewStep", self.rho)

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": "fednew", "alpha": self.alpha, "rho": self.rho}

    def releases(self, privacy: PrivacyModel) -> int:
        """One."""
        return 1

    def check(self, privacy: PrivacyModel) -> None:
        """It goes with every privacy model."""

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """C for a client, 2 C for an example."""
        return max_grad_norm if privacy.unit == "client" else 2 * max_grad_norm


def _check_integer(name: str, value: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _check_positive(name: str, value: float) -> None:
    if not (isinstance(value, int | float) and value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
