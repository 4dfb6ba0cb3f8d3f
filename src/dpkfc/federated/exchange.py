"""What a server stores of the keys of a round before the round is charged, under secure aggregation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dpkfc.federated.messages import Message, split_rows, stack_rows, to_bytes

__all__ = ["KeyExchange", "TooFewKeys"]


class TooFewKeys(RuntimeError):
    """Fewer clients sent keys for a round than it needs; nothing was charged for it."""


@dataclass
class KeyExchange:
    """The keys of a round that is not charged yet, under secure aggregation.

    In a round without recovery no client is asked: all pairs of `cohort` mask with their channel keys.

    Attributes:
        number: of the round.
        sampled: clients that the round was drawn for.
        channels: client of `sampled` that is enrolled to its public channel key.
        recovers: whether clients are asked for keys and shares, so that the sum survives lost clients.
        keys: client that answered to its public mask key.
        sealed: client that answered to what it sealed for each client that was asked.
        failed: clients that refused.
        rejected: reason to number of messages that were not valid.
    """

    number: int
    sampled: tuple[int, ...]
    channels: dict[int, bytes]
    recovers: bool = True
    keys: dict[int, bytes] = field(default_factory=dict)
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    rejected: Counter[str] = field(default_factory=Counter)

    @property
    def cohort(self) -> tuple[int, ...]:
        """Clients that are asked for keys."""
        return tuple(self.channels)

    @property
    def ready(self) -> list[int]:
        """Clients that can mask a sum, sorted."""
        return sorted(self.keys if self.recovers else self.channels)

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

    def take(self, message: Mapping[str, Any]) -> None:
        """Store a client's valid keys."""
        client = message["client"]
        self.keys[client] = to_bytes(message["key"])
        self.sealed[client] = split_rows(message["sealed"], self.cohort)

    def requests(self, contract: str, needed: int) -> dict[int, Message]:
        """Make the requests for keys, client to message; none where fewer clients are there than a round needs."""
        if len(self.channels) < needed:
            return {}
        cohort = torch.tensor(self.cohort, dtype=torch.int64)
        request: Message = {"kind": "keys", "round": self.number, "contract": contract, "cohort": cohort}
        return dict.fromkeys(self.channels, request | {"channels": stack_rows(self.channels)})

    def ready_clients(self, needed: int) -> tuple[int, ...]:
        """Return the clients that can mask a sum; none where fewer were drawn than a round needs.

        Raises:
            TooFewKeys: enough clients were drawn, and fewer than a round needs have keys.
        """
        if len(self.ready) >= needed:
            return tuple(self.ready)
        if len(self.sampled) < needed:
            return ()
        raise TooFewKeys(
            f"{len(self.ready)} of {len(self.sampled)} clients sent keys and round {self.number} needs {needed}; "
            "nothing was charged. Call request_keys again"
        )

    def round_fields(self, client: int) -> Message:
        """What a client needs to mask its sum: the clients of the round and their keys, and what they sealed for it."""
        cohort = torch.tensor(self.ready, dtype=torch.int64)
        fields: Message = {"cohort": cohort, "channels": stack_rows({other: self.channels[other] for other in self.ready})}
        if self.recovers:
            sealed = stack_rows({other: self.sealed[other][client] for other in self.ready})
            fields |= {"mask_keys": stack_rows(self.keys), "sealed": sealed}
        return fields
