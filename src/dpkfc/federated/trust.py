"""Privacy models: whose data are protected, from whom, and who adds the noise. Each is a value with its own accounting.

    TrustedServer       the server sees single sums and adds the noise (or the clients share it); models are protected
    SecureAggregation   the server sees nothing but the sum over clients; every client adds a share of the noise
    PerUpload           the server sees every message; each carries the whole noise, √n times more of it in the sum
    ClientLevel         the unit is a client: all that it sends in a round is clipped as one; any of the three above

Shares are sized for the fewest clients whose noise is unknown to whoever looks at a sum: with t survivors, m of them looking
together (or telling the server), every client adds noise of variance stddev² / (t − m). A client knows its own share, so m = 1 is
what it takes to be protected from any single other client. More survivors only add noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["ClientLevel", "PerUpload", "PrivacyModel", "SecureAggregation", "TrustedServer"]


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
