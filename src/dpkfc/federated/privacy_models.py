"""Privacy models: whose data are protected, from whom, and who adds the noise.

    TrustedServer       the server sees single sums and adds the noise (or the clients share it)
    SecureAggregation   the server sees only the sum over clients; each client adds noise shares
    PerUpload           the server sees every message; each carries the whole noise, √n times more
                        in the sum
    ClientLevel         the unit is a client, whose message is clipped as one; any of the above

Noise shares are sized for the fewest clients whose noise an adversary does not know. With t
survivors, m of which collude (or tell the server), every client adds noise of variance
stddev² / (t − m). A client knows its own share, so protection from any single other client takes
m = 1. More survivors only add noise.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dpkfc._checks import check_one_of

# Plain values that say what decides a result.
Description = dict[str, Any]


@runtime_checkable
class PrivacyModel(Protocol):
    """What a plan asks of a privacy model.

    Attributes:
        name: for plans and privacy cards.
        unit: "example" or "client".
        noise_by: "server" or "clients".
        masked: whether messages are added under masks (secure aggregation).
        has_full_noise: whether each message carries the whole noise, and hides its client's data by
            itself.
    """

    name: str = ""
    unit: str = "example"
    noise_by: str = "clients"
    masked: bool = False
    has_full_noise: bool = False

    @abstractmethod
    def describe_adversaries(self, colluding: int) -> str:
        """Return from whom the unit is protected, for the privacy card."""


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
        others = "" if self.noise_by == "server" else _describe_other_clients(colluding)
        return f"everyone who sees the models of all rounds{others}; {server}"


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
    """Protects one example from a server that sees each message: each has the whole noise."""

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
        name = self.server.name.replace("example-level", "client-level")
        object.__setattr__(self, "name", name)
        # All but the unit is as of the model inside.
        for setting in ("noise_by", "masked", "has_full_noise"):
            object.__setattr__(self, setting, getattr(self.server, setting))

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
