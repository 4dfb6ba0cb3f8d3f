"""What a server holds of a round while it is open, and what it says of it afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import dp_accounting
import torch
from torch import Tensor

from dpkfc.federated.messages import stacked
from dpkfc.privacy.ledger import BudgetExhausted

__all__ = ["Charged", "KeyExchange", "OpenRound", "RoundRecord", "TooFewKeys"]

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What a round did; public, and of constant size.

    Attributes:
        round: its number, by the ledger.
        cohort: clients that were asked; None where they were drawn secretly.
        survivors: messages in the sum; None likewise.
        dropped: whether it ended without a release. Its charge stays.
        rejected: reason to number of messages that were not valid.
        seconds: wall time since it was opened; 0 where clients were drawn secretly.
        notes: public numbers of filters and rule.
    """

    round: int
    cohort: int | None
    survivors: int | None
    dropped: bool
    rejected: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    notes: Mapping[str, float] = field(default_factory=dict)


class Charged:
    """A charge that was made when its round was sent out, to be used by one release."""

    def __init__(self, plan_hash: str, number: int) -> None:
        self.plan_hash, self._number = plan_hash, number
        self._used = False

    def charge(self, step: int, event: dp_accounting.DpEvent, *more: float) -> int:
        """The number of the release that the ledger holds already."""
        if self._used:
            raise BudgetExhausted("a round is one release, and this one has been made")
        self._used = True
        return self._number


class TooFewKeys(RuntimeError):
    """Fewer clients sent keys for a round than it needs; nothing was charged for it."""


@dataclass
class KeyExchange:
    """The keys of a round that is not charged yet, under secure aggregation.

    Attributes:
        number: of the round.
        drawn: clients that the round was drawn for.
        channels: client that was asked to its public channel key.
        keys: client that answered to its public mask key.
        sealed: client that answered to what it sealed for each client that was asked.
        failed: clients that refused.
        rejected: reason to number of messages that were not valid.
    """

    number: int
    drawn: tuple[int, ...]
    channels: dict[int, bytes]
    keys: dict[int, bytes] = field(default_factory=dict)
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    rejected: Counter[str] = field(default_factory=Counter)

    @property
    def cohort(self) -> tuple[int, ...]:
        """Clients that were asked."""
        return tuple(self.channels)

    def problem(self, message: Mapping[str, Any], enrolled: Collection[int]) -> str | None:
        """Why a valid message does not count among the keys; None where it does."""
        client = message["client"]
        reasons = (
            (message["kind"] not in ("keys", "error"), "no-round"),
            (client not in self.channels or client not in enrolled, "unknown-client"),
            (message.get("round") != self.number, "stale"),
            (client in self.keys or client in self.failed, "duplicate"),
        )
        return next((reason for applies, reason in reasons if applies), None)

    def round_fields(self, client: int) -> dict[str, Tensor]:
        """What a client needs to mask its sum: the clients that sent keys, and what they sealed for it."""
        ready = sorted(self.keys)
        return {
            "cohort": torch.tensor(ready, dtype=torch.int64),
            "channels": stacked({other: self.channels[other] for other in ready}),
            "mask_keys": stacked(self.keys),
            "sealed": stacked({other: self.sealed[other][client] for other in ready}),
        }


@dataclass
class OpenRound:
    """The round in progress. PRIVATE: what clients sent lies here and nowhere else."""

    number: int
    cohort: tuple[int, ...]
    ticket: Charged
    started: float
    control: float
    sums: dict[int, Tensors] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    keys: dict[int, bytes] = field(default_factory=dict)
    shares: dict[int, dict[int, bytes]] = field(default_factory=dict)
    survivors: tuple[int, ...] | None = None
    rejected: Counter[str] = field(default_factory=Counter)

    def problem(self, message: Mapping[str, Any], enrolled: Collection[int]) -> str | None:
        """Why a valid message does not count in this round; None where it does."""
        client, kind = message["client"], message["kind"]
        if kind == "shares":
            late = self.survivors is None or client not in self.survivors
            again = client in self.shares
        else:
            late = self.survivors is not None or kind == "keys"
            again = client in self.sums or client in self.failed
        reasons = (
            (kind == "hello" or client not in self.cohort or client not in enrolled, "unknown-client"),
            (message.get("round") != self.number, "stale"),
            (late, "late"),
            (again, "duplicate"),
        )
        return next((reason for applies, reason in reasons if applies), None)
