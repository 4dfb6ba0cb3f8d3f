"""One round of the server: its charge, its messages, and the preconditioner that clients have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dpkfc.curvature.base import PreconditionerState
from dpkfc.federated.messages import (
    Message,
    Received,
    add_prefix,
    select_prefix,
    split_rows,
)
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.secure_aggregation import round_scope, total, unmask
from dpkfc.federated.sums import zero_sums
from dpkfc.privacy.ledger import BudgetExhausted, Ledger
from dpkfc.tensors import NamedTensors, Tensors

if TYPE_CHECKING:
    import dp_accounting


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What a round did; public, and of constant size.

    Attributes:
        round: its number, by the ledger.
        cohort: clients that the round was sent to; None where clients were sampled secretly.
        survivors: messages in the sum; None where clients were sampled secretly.
        dropped: whether the round ended without a release. Its charge stays.
        rejected: number of invalid messages, by reason.
        notes: public numbers of filters and rule.
    """

    round: int
    cohort: int | None
    survivors: int | None
    dropped: bool
    rejected: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, float] = field(default_factory=dict)


class RoundCharge:
    """Stands for the ledger in the one release of a round that was charged before it was sent."""

    def __init__(self, plan_hash: str, number: int) -> None:
        self.plan_hash = plan_hash
        self._number = number
        self._is_used = False

    @classmethod
    def write(cls, ledger: Ledger, plan: FederatedPlan, number: int) -> RoundCharge:
        """Charge the releases of a round to a ledger."""
        first = ledger.count + 1
        for step in range(number * plan.per_round, (number + 1) * plan.per_round):
            ledger.charge(
                step, plan.event, plan.noise_multiplier, plan.stddev, plan.config.sensitivity
            )
        return cls(plan.hash, first)

    def charge(self, step: int, event: dp_accounting.DpEvent, *more: float) -> int:
        """Return the number of the release, which the ledger holds already."""
        if self._is_used:
            raise BudgetExhausted(
                "the release of this round has been made, and a round has one; open another round"
            )
        self._is_used = True
        return self._number


@dataclass(kw_only=True)
class OpenRound:
    """PRIVATE: the round in progress. Only this object holds the messages of clients.

    Attributes:
        number: of the round.
        cohort: clients that the round was sent to.
        round_charge: the charge that its release uses.
        recovers: whether the sum survives lost clients, under secure aggregation.
        keys: public mask key of each client.
        rejected: number of invalid messages, by reason.
        sums: message of each client that answered.
        failed: clients that refused.
        shares: what each survivor revealed, by client of the cohort.
        survivors: clients whose messages count; None before they are fixed.
    """

    number: int
    cohort: tuple[int, ...]
    round_charge: RoundCharge
    recovers: bool
    keys: dict[int, bytes]
    rejected: Counter[str]
    sums: dict[int, Tensors] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    shares: dict[int, dict[int, bytes]] = field(default_factory=dict)
    survivors: tuple[int, ...] | None = None

    def find_problem(self, message: Received, enrolled: Collection[int]) -> str | None:
        """Return why a valid message does not count in this round; None if it counts."""
        client = message["client"]
        kind = message["kind"]
        if kind == "hello" or client not in self.cohort or client not in enrolled:
            return "unknown-client"
        if message["round"] != self.number:
            return "stale"
        is_late = self.survivors is not None or kind == "keys"
        is_duplicate = client in self.sums or client in self.failed
        if kind == "shares":
            is_late = not self.recovers or client not in (self.survivors or ())
            is_duplicate = client in self.shares
        if is_late:
            return "late"
        return "duplicate" if is_duplicate else None

    def store(self, message: Received) -> None:
        """Store a valid sum or valid shares of a client."""
        client = message["client"]
        if message["kind"] == "shares":
            self.shares[client] = split_rows(message["shares"], self.cohort)
        else:
            self.sums[client] = select_prefix(message, "sum")

    def sum_survivors(self, parameters: NamedTensors) -> Tensors:
        """Return the sum of the survivors' messages, as new tensors.

        The messages are added in the order of the clients' numbers, so that equal messages give an
        equal sum.
        """
        summed = zero_sums(parameters)
        for client in self.survivors or ():
            for name, x in summed.items():
                x.add_(self.sums[client][name].to(x))
        return summed

    def unmask_survivors(self, threshold: int, contract: str) -> Tensors | None:
        """Compute the survivors' sum of integers from the shares that they revealed.

        Returns:
            The sum; None if a client is missing in a round without recovery.

        Raises:
            ValueError: shares of fewer clients than the threshold, or wrong shares.
        """
        sums = {client: self.sums[client] for client in self.survivors or ()}
        if not self.recovers:
            return total(sums.values()) if self.survivors == self.cohort else None
        return unmask(sums, self.keys, self.shares, threshold, round_scope(contract, self.number))


class MetricDelivery:
    """The server's record of the preconditioners that its clients have.

    A preconditioner is sent once to each client, and its digest in every round.
    """

    def __init__(self) -> None:
        # Digest of the preconditioner that each client has.
        self._digests: dict[int, str] = {}
        # The preconditioner that was hashed last, and its digest.
        self._last: tuple[PreconditionerState | None, str] = (None, "")

    def round_fields(self, client: int, current: PreconditionerState | None) -> Message:
        """Return a round's fields on the preconditioner, without the server's running averages."""
        if current is None:
            return {}
        digest = self._digest(current)
        message: Message = {"metric_digest": digest, "metric_step": current.step}
        if self._digests.get(client) != digest:
            message |= add_prefix("metric", replace(current, running=()).state_dict())
        return message

    def note_answer(self, client: int, current: PreconditionerState | None) -> None:
        """Note that a client answered, so it has the current preconditioner."""
        self._digests[client] = self._digest(current)

    def note_failure(self, client: int) -> None:
        """Note that a client refused a round: it may have no preconditioner, or a different one."""
        self._digests.pop(client, None)

    def forget(self) -> None:
        """Forget what clients have, after a resume."""
        self._digests.clear()

    def _digest(self, current: PreconditionerState | None) -> str:
        """Return the digest of a preconditioner, hashed once."""
        if current is not self._last[0]:
            digest = "" if current is None else replace(current, running=()).digest
            self._last = (current, digest)
        return self._last[1]
