"""The server: a round at a time, charged before it is sent out, closed before anything is opened, and forgotten after its sum.

    request_keys    draw the cohort and ask it for keys, under secure aggregation; nothing is charged yet. May be left out:
                    the round then has one exchange and no recovery, and a lost client costs it (`secagg`)
    open_round      charge (on the disk), draw the cohort, build the metric, messages for the clients
    receive         one answer: accepted, or rejected and counted
    fix_survivors   no answer counts from here on; requests for the survivors' shares, under secure aggregation
    close_round     the sum of the survivors, noise where the server adds it, / public divisor, filters, rule

Fewer than `min_survivors` answers end a round without a release; it stays charged. What single clients sent is dropped with the
round: no attribute, log or checkpoint holds it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import dp_accounting
import torch
from torch import Tensor, nn

from dpkfc import checkpoint
from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.probe_pass import copy_to_device
from dpkfc.federated.local_training import accumulated, norm_of
from dpkfc.federated.messages import (
    METRIC_DIFFERS,
    METRIC_MISSING,
    KeyExchange,
    Message,
    contract_of,
    flat,
    group,
    problem,
    shapes_of,
    split_rows,
    to_bytes,
)
from dpkfc.federated.plan import FACTORS, FederatedPlan, Mechanism, stream_seed
from dpkfc.federated.secure_aggregation import decoded, round_scope, total, unmask
from dpkfc.federated.server_rules import Shares
from dpkfc.gradients.discovery import find_layers
from dpkfc.postprocess.pipeline import Chain
from dpkfc.preconditioning import PreconditionerManager
from dpkfc.privacy.ledger import BudgetExhausted, Ledger
from dpkfc.privacy.mechanism import ClippedSum, Released, release
from dpkfc.privacy.rng import NoiseStream, SamplingStream

# --------------------------------------------------------------------------------------------------
# What a server holds of a round while it is open, and what it says of it afterwards.

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


# --------------------------------------------------------------------------------------------------
# Which client has which preconditioner: it is sent once to each client that needs it, and its
# digest in every round.


class MetricDelivery:
    """The server's record of the metrics that its clients have.

    Args:
        to_all: whether every client is sent the metric, or only those that could not build it from its seed.
    """

    def __init__(self, to_all: bool) -> None:
        self._to_all = to_all
        self._digests: dict[int, str] = {}  # client to the digest of the metric that it has
        self._asked: set[int] = set()  # clients that could not build the metric from its seed
        self._last: tuple[PreconditionerState | None, str] = (None, "")

    def round_fields(self, client: int, current: PreconditionerState | None) -> Message:
        """Return what a round tells a client of the metric in force, without what the server keeps for its next refresh."""
        if current is None:
            return {}
        digest = self._digest(current)
        message: Message = {"metric_digest": digest, "metric_step": current.step}
        wanted = self._to_all or client in self._asked
        if wanted and self._digests.get(client) != digest:
            message |= flat("metric", replace(current, running=()).state_dict())
        return message

    def note_answer(self, client: int, current: PreconditionerState | None) -> None:
        """Note that a client answered under the metric in force."""
        self._digests[client] = self._digest(current)

    def note_failure(self, client: int, reason: Any) -> None:
        """Note that a client refused a round: it may have lost the metric, or have none."""
        self._digests.pop(client, None)
        if reason in (METRIC_DIFFERS, METRIC_MISSING):
            self._asked.add(client)

    def forget(self) -> None:
        """Forget what clients have, after a resume."""
        self._digests.clear()

    def _digest(self, current: PreconditionerState | None) -> str:
        """Hash a metric once."""
        if current is not self._last[0]:
            self._last = (current, "" if current is None else replace(current, running=()).digest)
        return self._last[1]


# --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


class Server:
    """Holds the model, the ledger and the state of filters and rule. Engines carry its messages; it knows none.

    Args:
        plan: of the run.
        model: any module that a `Session` takes; trained in place.
        ledger_path: file of the ledger; None keeps it in memory.

    Raises:
        ValueError: a model that the gradient engine does not cover.
        LedgerError: the ledger belongs to another plan, or cannot be written.

    Guarantee:
        What leaves the server are functions of `plan.releases` releases at most, each in the ledger before its round was sent.
    """

    def __init__(
        self, plan: FederatedPlan, model: nn.Module, *, ledger_path: str | os.PathLike[str] | None = None
    ) -> None:
        self.plan, self.model = plan, model
        self.layers = find_layers(model)
        self.parameters: Tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.shapes = shapes_of(model)
        self.numbers = sum(p.numel() for p in self.parameters.values())
        self.contract = contract_of(plan.hash, model)
        plan.check_accounting()
        opened = Ledger.in_memory if ledger_path is None else lambda *a: Ledger.open(ledger_path, *a)
        self.ledger: Ledger = opened(plan.hash, plan.ledger_header, plan.releases)
        seed = stream_seed(plan, 0)
        self._noise = NoiseStream.secure() if seed is None else NoiseStream.repeatable(seed)
        self._sampling = SamplingStream.secure() if seed is None else SamplingStream.repeatable(seed)
        self._coordinates = PreconditionerManager(plan.config.preconditioner, model, self.layers)
        self._chain = Chain((*plan.config.postprocess, *plan.config.rule.postprocess), plan.config.readout)
        self._state: Tensors = {}
        self._stepped = -1  # number of the last round with a release
        self._delivery = MetricDelivery(plan.config.metric == FACTORS)
        self._exchange: KeyExchange | None = None
        self._open: OpenRound | None = None
        self._channels: dict[int, bytes] = {}  # client to its public channel key, under secure aggregation
        self.enrolled: set[int] = set()
        self.rejected: Counter[str] = Counter()

    # -- the protocol --------------------------------------------------------------------------------------------------

    def enroll(self, message: Mapping[str, Any]) -> bool:
        """Take a client's hello: the same plan, model and frozen weights, or it does not take part.

        Returns:
            Whether it takes part; a rejection is counted.
        """
        masked, number = self.plan.config.privacy.masked, message.get("client")
        found = problem(message, self.shapes, self.contract, masked=masked)
        if found is None and (message["kind"] != "hello" or not self._is_client(number)):
            found = "unknown-client"
        if found is None and number in self.enrolled:
            found = "duplicate"
        if found is not None:
            self.rejected[found] += 1
            return False
        self.enrolled.add(cast(int, number))
        if masked:
            self._channels[cast(int, number)] = to_bytes(message["key"])
        return True

    def request_keys(self) -> dict[int, Message]:
        """Draw the next round's cohort and ask it for keys, client to message; none in clear. Nothing is charged.

        Raises:
            BudgetExhausted: every release of the plan is spent.
            RuntimeError: the round before was not closed, or fewer clients are enrolled than the plan needs.
        """
        self._check_ready()
        if not self.plan.config.privacy.masked:
            return {}
        self._exchange = self._new_exchange(recovers=True)
        return self._exchange.requests(self.contract, self.plan.config.survivors)

    def open_round(self) -> dict[int, Message]:
        """Charge the next round, then make its messages, client to message.

        Under secure aggregation without a call of `request_keys` the round has no recovery: all clients of its cohort must
        answer, or it ends without a release and stays charged.

        Raises:
            BudgetExhausted: every release of the plan is spent; nothing was charged, nothing may be sent.
            RuntimeError: the round before was not closed, or too few clients are enrolled.
            TooFewKeys: fewer clients have keys than the plan needs; nothing was charged, nothing may be sent.
            LedgerError: the charge could not be written; nothing may be sent.
        """
        self._check_ready()
        number, exchange = self.next_round, self._exchange
        if self.plan.config.privacy.masked and exchange is None:
            exchange = self._new_exchange(recovers=False)
        cohort = self._cohort(number) if exchange is None else exchange.ready_clients(self.plan.config.survivors)
        self._coordinates.refresh(number)
        extra = self.plan.config.rule.broadcast(self._state)
        control = sum(float(x.double().square().sum()) for x in extra.values()) ** 0.5
        ticket = Charged.write(self.ledger, self.plan, number)
        self._open = OpenRound(number, cohort, ticket, time.perf_counter(), control)
        self._exchange = None
        theta = {name: p.detach().cpu().clone() for name, p in self.parameters.items()}
        common: Message = {"kind": "round", "round": number, "contract": self.contract}
        common |= flat("theta", theta) | flat("extra", extra) | ({"extra_round": self._stepped} if extra else {})
        sent = {client: common | self._delivery.round_fields(client, self.preconditioner) for client in cohort}
        if exchange is not None:
            self._open.keys, self._open.recovers = exchange.keys, exchange.recovers
            self._open.rejected = exchange.rejected
            sent = {client: message | exchange.round_fields(client) for client, message in sent.items()}
        return sent

    def receive(self, message: Mapping[str, Any]) -> bool:
        """Take an answer; what is not valid is counted and changes nothing.

        Returns:
            Whether it was accepted. A client's error is, and counts as its absence.
        """
        stage = self._open or self._exchange
        found = "no-round" if stage is None else self._problem(message, stage)
        if found is not None or stage is None:
            self._reject(cast(str, found), stage)
            return False
        client = message["client"]
        if message["kind"] == "error":
            stage.failed.add(client)
            self._reject(message["reason"], stage)
            self._delivery.note_failure(client, message["reason"])
            return True
        stage.take(message)
        if message["kind"] == "sum":
            self._delivery.note_answer(client, self.preconditioner)
        return True

    def _reject(self, reason: str, stage: KeyExchange | OpenRound | None) -> None:
        self.rejected[reason] += 1
        if stage is not None:
            stage.rejected[reason] += 1

    def fix_survivors(self) -> dict[int, Message]:
        """From here on no answer counts. Requests for the survivors' shares, client to message; none without recovery.

        Raises:
            RuntimeError: no round is open.
        """
        open_ = self._opened()
        if open_.survivors is None:
            open_.survivors = tuple(sorted(open_.sums))
        if not open_.recovers or len(open_.survivors) < self.plan.config.survivors:
            return {}
        request: Message = {
            "kind": "unmask",
            "round": open_.number,
            "contract": self.contract,
            "survivors": torch.tensor(open_.survivors, dtype=torch.int64),
        }
        return dict.fromkeys(open_.survivors, request)

    def close_round(self) -> RoundRecord:
        """Release the sum of the survivors and step, or drop the round.

        Raises:
            RuntimeError: no round is open.
        """
        self.fix_survivors()
        open_, self._open = self._opened(), None  # whatever happens below, no message outlives the round
        survivors = cast(tuple[int, ...], open_.survivors)
        added = self._sum_of_survivors(open_, survivors)
        notes: Mapping[str, float] = {}
        if added is not None:
            notes = self._step(self._released(open_, added, len(survivors)), len(survivors))
            self._stepped = open_.number
        hidden = self.plan.config.privacy.unit == "client" and self.plan.config.client_rate < 1
        return RoundRecord(
            round=open_.number,
            cohort=None if hidden else len(open_.cohort),
            survivors=None if hidden else len(survivors),
            dropped=added is None,
            rejected=dict(open_.rejected),
            seconds=0.0 if hidden else time.perf_counter() - open_.started,  # the time tells how many were drawn
            notes=notes,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _opened(self) -> OpenRound:
        if self._open is None:
            raise RuntimeError("no round is open")
        return self._open

    def _check_ready(self) -> None:
        """Refuse to begin a round, before anything is charged or sent."""
        if self._open is not None:
            raise RuntimeError("close the round in progress first")
        if len(self.enrolled) < self.plan.config.survivors:
            raise RuntimeError(
                f"{len(self.enrolled)} clients are enrolled and a round needs {self.plan.config.survivors}; start more clients, "
                "or make a plan with a smaller min_survivors"
            )
        if self.rounds_left < 1:
            spent = f"all {self.plan.config.rounds} rounds of the plan are spent (ε = {self.epsilon:.3g})"
            raise BudgetExhausted(f"{spent}; nothing was sent")

    def _new_exchange(self, *, recovers: bool) -> KeyExchange:
        """Draw the next round's cohort for an exchange of keys."""
        drawn = self._cohort(self.next_round)
        channels = {client: self._channels[client] for client in drawn if client in self.enrolled}
        return KeyExchange(self.next_round, drawn, channels, recovers)

    def _is_client(self, number: Any) -> bool:
        return type(number) is int and 0 <= number < self.plan.config.clients

    def _cohort(self, number: int) -> tuple[int, ...]:
        """Every registered client with the plan's rate; a client that is not there is one that drops out."""
        rate = self.plan.config.client_rate
        if rate == 1:
            return tuple(range(self.plan.config.clients))
        drawn = self._sampling.generator(number).random(self.plan.config.clients) < rate
        return tuple(int(client) for client in drawn.nonzero()[0])

    def _problem(self, message: Mapping[str, Any], stage: KeyExchange | OpenRound) -> str | None:
        """Why an answer does not count; None where it does."""
        control = stage.control if isinstance(stage, OpenRound) else 0.0
        most, masked = self.plan.largest_message(self.numbers, control), self.plan.config.privacy.masked
        rows = len(stage.cohort)
        found = problem(message, self.shapes, self.contract, most=most, masked=masked, rows=rows)
        return found or stage.problem(message, self.enrolled)

    def _sum_of_survivors(self, open_: OpenRound, survivors: Sequence[int]) -> Tensors | None:
        """The sum of the survivors' messages; None where it cannot be computed: too few clients or shares, or wrong ones."""
        if len(survivors) < self.plan.config.survivors:
            return None
        if not self.plan.config.privacy.masked:
            return open_.sum_survivors(self.parameters)
        try:
            integers = open_.unmask_survivors(self.plan.config.survivors, self.contract)
        except ValueError as error:
            logger.error("round %d: %s. The round ends without a release and stays charged", open_.number, error)
            self._reject("wrong-shares", open_)
            return None
        if integers is None:
            return None
        added = decoded(integers, self.plan.grid(self.numbers), self.parameters)
        if norm_of(added) > len(survivors) * self.plan.largest_message(self.numbers, open_.control):
            self._reject("oversized", open_)  # no honest messages add up to it: a client sent a wrong message or share
            return None
        return added

    def _released(self, open_: OpenRound, added: Tensors, survivors: int) -> Released:
        """The noisy mean over the public divisor. Shares of noise are in the messages; a trusted server adds its own here."""
        plan, divisor = self.plan, self.plan.config.divisor
        step = open_.number * plan.per_round
        if plan.config.privacy.noise_by == "server":
            mechanism = Mechanism(plan, plan.stddev, divisor)
            ticket = cast(Ledger, open_.ticket)
            return release(ClippedSum(added, plan.config.max_grad_norm), mechanism, self._noise, ticket, step)
        number = open_.ticket.charge(step, plan.event)
        mean = {name: x.div_(divisor).to(accumulated(self.parameters[name])) for name, x in added.items()}
        return Released(gradients=mean, noise_variance=plan.mean_variance(survivors), step=step, release=number)

    def _step(self, released: Released, survivors: int) -> Mapping[str, float]:
        config = self.plan.config
        direction = self._chain.apply(released, self._coordinates.metric, self.layers, spare=True)
        hidden = config.privacy.unit == "client" and config.client_rate < 1
        took_part = config.client_rate if hidden else survivors / config.clients
        shares = Shares(divided=config.divisor / config.clients, took_part=took_part)
        with torch.no_grad():
            update, self._state = config.rule.step(direction.gradients, self._state, shares)
            for name, p in self.parameters.items():
                p.sub_(update[name].to(p.dtype))
        return direction.notes

    # -- what was spent, and checkpoints -------------------------------------------------------------------------------

    @property
    def rounds_left(self) -> int:
        """Rounds that may still be sent out."""
        return cast(int, self.ledger.remaining) // self.plan.per_round

    @property
    def next_round(self) -> int:
        """Number of the next round that is charged."""
        return self.ledger.count // self.plan.per_round

    @property
    def round(self) -> int:
        """Number of the round in progress.

        Raises:
            RuntimeError: no round is open.
        """
        return self._opened().number

    @property
    def epsilon(self) -> float:
        """ε of all releases in the ledger at the plan's δ; dropped rounds are in it."""
        return self.plan.curve.at(self.ledger.count)

    @property
    def preconditioner(self) -> PreconditionerState | None:
        """The preconditioner in force."""
        return self._coordinates.current

    def save(self, folder: str | os.PathLike[str], extra: Any = None) -> None:
        """Write a checkpoint between rounds: released parameters, states of filters and rule, metric; never a message.

        Raises:
            RuntimeError: a round is open.
            CheckpointError: the folder cannot be written.
        """
        if self._open is not None:
            raise RuntimeError("a round is open: its messages are in no checkpoint; close it first")
        groups = {
            "model": checkpoint.unique_tensors(self.model.state_dict()),
            "filters": self._chain.state_dict(),
            "rule": self._state,
            "preconditioner": {} if self.preconditioner is None else self.preconditioner.state_dict(),
        }
        meta = {
            "plan": self.plan.hash,
            "contract": self.contract,
            "ledger_count": self.ledger.count,
            "ledger_head": self.ledger.head,
            "stepped": self._stepped,
            "extra": extra,
        }
        checkpoint.write(folder, {name: held for name, held in groups.items() if held}, meta)

    def restore(self, folder: str | os.PathLike[str]) -> Any:
        """Continue from a checkpoint of the same plan and ledger; rounds charged since then stay charged.

        Returns:
            The `extra` that was given to `save`.

        Raises:
            CheckpointError: damaged, or of another plan, model or ledger; nothing is loaded then.
        """
        tensors, meta = checkpoint.read(folder)
        if meta.get("contract") != self.contract or "model" not in tensors:
            raise checkpoint.CheckpointError(f"the checkpoint {Path(folder)} belongs to another plan or model")
        if not self.ledger.contains(meta["ledger_count"], meta["ledger_head"]):
            raise checkpoint.CheckpointError(
                f"the ledger does not contain the {meta['ledger_count']} releases that the checkpoint {Path(folder)} was written "
                "after; resume with the ledger of the same run"
            )
        with checkpoint.fitting(folder):
            checkpoint.check_same_tensors(checkpoint.unique_tensors(self.model.state_dict()), tensors["model"])
            held, device = tensors.get("preconditioner"), next(iter(self.parameters.values())).device
            current = None if held is None else self._coordinates.restore(held)
            self._chain.load_state_dict(copy_to_device(tensors.get("filters", {}), device))
            self._state = copy_to_device(dict(tensors.get("rule", {})), device)
            self._coordinates.current = current
            self._stepped = int(meta.get("stepped", -1))
            self.model.load_state_dict(tensors["model"], strict=False)
        self._delivery.forget()
        return meta["extra"]

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()
