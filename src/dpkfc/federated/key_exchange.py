"""The cohort of a round that is not charged yet, and its keys under secure aggregation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from dpkfc.federated.messages import (
    Message,
    Received,
    split_rows,
    stack_rows,
    to_bytes,
)


class TooFewKeys(RuntimeError):
    """Fewer clients sent keys for a round than the round needs; nothing was charged."""


@dataclass
class KeyExchange:
    """The cohort of a round that is not charged yet, and its keys under secure aggregation.

    A round without recovery requests no keys: all pairs of `cohort` mask with their channel keys.

    Attributes:
        number: of the round.
        sampled: clients that the round was sampled for.
        channels: the public channel key of each enrolled client of `sampled`.
        recovers: whether keys and shares are requested, so that the sum survives lost clients.
        masked: whether there is secure aggregation.
        keys: the public mask key of each client that answered.
        sealed: what each client that answered sealed for each client of the cohort.
        failed: clients that refused.
        rejected: number of invalid messages, by reason.
    """

    number: int
    sampled: tuple[int, ...]
    channels: dict[int, bytes]
    recovers: bool
    masked: bool
    keys: dict[int, bytes] = field(default_factory=dict)
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    rejected: Counter[str] = field(default_factory=Counter)

    @property
    def cohort(self) -> tuple[int, ...]:
        """Return the clients that keys are requested from."""
        return tuple(self.channels)

    @property
    def masking_clients(self) -> list[int]:
        """Return the clients that can mask a sum, sorted."""
        return sorted(self.keys if self.recovers else self.channels)

    def find_problem(self, message: Received, enrolled: Collection[int]) -> str | None:
        """Return why a valid message does not count among the keys; None if it counts."""
        client = message["client"]
        if message["kind"] not in ("keys", "error"):
            return "no-round"
        if client not in self.channels or client not in enrolled:
            return "unknown-client"
        if message["round"] != self.number:
            return "stale"
        return "duplicate" if client in self.keys or client in self.failed else None

    def store(self, message: Received) -> None:
        """Store a client's valid keys."""
        client = message["client"]
        self.keys[client] = to_bytes(message["key"])
        self.sealed[client] = split_rows(message["sealed"], self.cohort)

    def requests(self, contract: str, needed: int) -> dict[int, Message]:
        """Return the requests for keys, by client; none for fewer clients than a round needs."""
        if len(self.channels) < needed:
            return {}
        request: Message = {
            "kind": "keys",
            "round": self.number,
            "contract": contract,
            "cohort": torch.tensor(self.cohort, dtype=torch.int64),
            "channels": stack_rows(self.channels),
        }
        return dict.fromkeys(self.channels, request)

    def select_cohort(self, needed: int) -> tuple[int, ...]:
        """Return the clients of the round; under secure aggregation those that can mask a sum.

        It is empty if fewer were sampled than such a round needs.

        Raises:
            TooFewKeys: enough clients were sampled, and fewer than a round needs have keys.
        """
        if not self.masked:
            return self.sampled
        clients = self.masking_clients
        if len(clients) >= needed:
            return tuple(clients)
        if len(self.sampled) < needed:
            return ()
        raise TooFewKeys(
            f"{len(clients)} of {len(self.sampled)} clients sent keys and round {self.number} needs"
            f" {needed}; nothing was charged. Call request_keys again"
        )

    def round_fields(self, client: int) -> Message:
        """Return what a client needs to mask its sum: cohort, keys and sealed shares."""
        if not self.masked:
            return {}
        clients = self.masking_clients
        channels = {other: self.channels[other] for other in clients}
        fields: Message = {
            "cohort": torch.tensor(clients, dtype=torch.int64),
            "channels": stack_rows(channels),
        }
        if self.recovers:
            sealed = {other: self.sealed[other][client] for other in clients}
            fields["mask_keys"] = stack_rows(self.keys)
            fields["sealed"] = stack_rows(sealed)
        return fields
