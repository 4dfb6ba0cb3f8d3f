"""What a server holds of a round while it is open, and what it says of it afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import dp_accounting
import torch
from torch import Tensor

from dpkfc.federated.messages import group, split_rows
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.secagg import round_scope, total, unmask
from dpkfc.federated.work import accumulated
from dpkfc.privacy.ledger import BudgetExhausted, Ledger

__all__ = ["Charged", "OpenRound", "RoundRecord"]

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

    @classmethod
    def write(cls, ledger: Ledger, plan: FederatedPlan, number: int) -> Charged:
        """Charge a round's releases to a ledger, and return the ticket for its release."""
        first = ledger.count + 1
        for step in range(number * plan.per_round, (number + 1) * plan.per_round):
            ledger.charge(step, plan.event, plan.noise_multiplier, plan.stddev, plan.config.sensitivity)
        return cls(plan.hash, first)

    def charge(self, step: int, event: dp_accounting.DpEvent, *more: float) -> int:
        """The number of the release that the ledger holds already."""
        if self._used:
            raise BudgetExhausted("a round is one release, and this one has been made")
        self._used = True
        return self._number


@dataclass
class OpenRound:
    """The round in progress. PRIVATE: what clients sent lies here and nowhere else."""

    number: int
    cohort: tuple[int, ...]
    ticket: Charged
    started: float
    control: float
    recovers: bool = False
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
            late = not self.recovers or self.survivors is None or client not in self.survivors
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

    def take(self, message: Mapping[str, Any]) -> None:
        """Store a valid sum or valid shares of a client."""
        client = message["client"]
        if message["kind"] == "shares":
            self.shares[client] = split_rows(message["shares"], self.cohort)
        else:
            self.sums[client] = group(message, "sum")

    def sum_survivors(self, parameters: Mapping[str, Tensor]) -> Tensors:
        """Sum the survivors' messages in the order of their numbers, so that equal messages give an equal sum; new tensors."""
        summed: Tensors = {}
        for name, p in parameters.items():
            summed[name] = torch.zeros(p.shape, dtype=accumulated(p), device=p.device)
            for client in self.survivors or ():
                summed[name].add_(self.sums[client][name].to(summed[name]))
        return summed

    def unmask_survivors(self, threshold: int, contract: str) -> Tensors | None:
        """Compute the survivors' sum of integers from the shares that they revealed.

        Returns:
            The sum; None where a client is missing in a round without recovery.

        Raises:
            ValueError: shares of fewer clients than the threshold, or wrong ones.
        """
        sums = {client: self.sums[client] for client in self.survivors or ()}
        if not self.recovers:
            return total(sums.values()) if self.survivors == self.cohort else None
        return unmask(sums, self.keys, self.shares, threshold, round_scope(contract, self.number))
