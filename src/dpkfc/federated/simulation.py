"""Rounds inside one process, for tests and small studies, with faults of clients and server.

An engine does the same over a network. It sends the messages of `request_keys` and then of
`open_round`, hands answers to `receive`, sends the survivors the messages of `fix_survivors`, and
calls `close_round`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from dpkfc.checkpoint import StrPath
from dpkfc.federated.client import Client
from dpkfc.federated.local_model import LocalModel
from dpkfc.federated.messages import Message
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.server import Server
from dpkfc.gradients.clipped_sum import LossFn
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.ledger import BudgetExhausted

# A client can be killed before it sends keys, before or after it computes, or before it reveals
# shares; the server anywhere after its charge.
STAGES = ("keys", "opened", "client", "answered", "received", "fixed", "unmask", "closed")
# Maps stage, round and client (-1 for the server) to whether the party dies there.
Fault = Callable[[str, int, int], bool]
_SERVER = -1
_DRAWS = 100


class Killed(RuntimeError):
    """A fault killed the server; start another from its checkpoint and ledger."""


@dataclass
class SimulatedRun:
    """The result of a run.

    Attributes:
        server: with the trained model and the ledger.
        records: one a round, public.
        history: (rounds done, ε, result of `evaluate`), by round.
        seconds: of the rounds.
    """

    server: Server
    records: list[RoundRecord] = field(default_factory=list)
    history: list[tuple[int, float, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def save(self, folder: StrPath) -> None:
        """Write the server's checkpoint, with the records and the history of the run.

        Raises:
            CheckpointError: the folder cannot be written, or `evaluate` returned more than plain
                values and tensors.
        """
        points = [list(point) for point in self.history]
        self.server.save(
            folder, {"records": [asdict(record) for record in self.records], "history": points}
        )

    def restore(self, folder: StrPath) -> None:
        """Continue from a checkpoint with its records, history and counts of rejected messages.

        Raises:
            CheckpointError: damaged, or of another plan, model or ledger.
        """
        stored = self.server.restore(folder) or {}
        for stored_record in stored.get("records", []):
            record = RoundRecord(**stored_record)
            self.records.append(record)
            self.server.rejected.update(record.rejected)
        self.history.extend(tuple(point) for point in stored.get("history", []))

    def finish_round(
        self,
        record: RoundRecord,
        evaluate: Callable[[nn.Module], Any] | None,
        checkpoint: StrPath | None,
        on_round: OnRound | None,
    ) -> None:
        """Append a round and the result of its evaluation, write the checkpoint, and report.

        Args:
            record: of the round.
            evaluate: maps the model to a figure for `history`; None for no evaluation.
            checkpoint: folder that is written; None for none.
            on_round: called with the record and the run.
        """
        self.records.append(record)
        if evaluate is not None:
            figure = evaluate(self.server.model)
            self.history.append((record.round + 1, self.server.epsilon, figure))
        if checkpoint is not None:
            self.save(checkpoint)
        if on_round is not None:
            on_round(record, self)


OnRound = Callable[[RoundRecord, SimulatedRun], None]


def make_clients(
    plan: FederatedPlan,
    model: nn.Module,
    loss_fn: LossFn,
    datasets: Sequence[Any],
    **options: Any,
) -> list[Client]:
    """Return clients of one process that share one copy of the model.

    Args:
        plan: of the run.
        model: of the server; copied.
        loss_fn: maps (model, batch) to one loss per example.
        datasets: one a client.
        options: of `Client`, such as `verify`.

    Raises:
        ValueError: the numbers of datasets and clients differ.
    """
    if len(datasets) != plan.config.clients:
        raise ValueError(
            f"the plan has {plan.config.clients} clients, got {len(datasets)} datasets"
        )
    local = LocalModel(plan, copy.deepcopy(model), loss_fn)
    return [Client(i, plan, local, data, **options) for i, data in enumerate(datasets)]


def run_round(
    server: Server, clients: Mapping[int, Client], fault: Fault | None = None
) -> RoundRecord:
    """Run one round over clients of this process.

    Args:
        server: with enrolled clients.
        clients: by number.
        fault: decides who dies where.

    Raises:
        Killed: the server died.
        BudgetExhausted: no round is left; nothing was sent.
        TooFewKeys: under secure aggregation fewer clients sent keys than a round needs; nothing was
            charged.
    """
    number = server.next_round

    def dies(stage: str, client: int) -> bool:
        return fault is not None and fault(stage, number, client)

    def check_server(stage: str) -> None:
        if dies(stage, _SERVER):
            raise Killed(
                f"the server died at '{stage}' of round {number}; start another from its "
                "checkpoint and ledger"
            )

    def exchange(requests: Mapping[int, Message], before: str, after: str) -> None:
        for client, message in requests.items():
            if client in clients and not dies(before, client):
                answer = clients[client].answer(message)
                if not dies(after, client):
                    server.receive(answer)

    exchange(server.request_keys(), "keys", "keys")
    messages = server.open_round()
    check_server("opened")
    exchange(messages, "client", "answered")
    check_server("received")
    requests = server.fix_survivors()
    check_server("fixed")
    exchange(requests, "unmask", "unmask")
    check_server("unmask")
    record = server.close_round()
    check_server("closed")
    return record


@contextmanager
def open_run(server: Server, checkpoint: StrPath | None, resume: bool) -> Iterator[SimulatedRun]:
    """Yield the run of a server, which is new or resumed; close the server at the end.

    A new run writes its first checkpoint.

    Args:
        server: of the run.
        checkpoint: folder of the checkpoint; None for none.
        resume: begin from the checkpoint.

    Raises:
        BudgetExhausted: no round is left.
        ValueError: a new run with a ledger that holds releases of other weights.
    """
    run = SimulatedRun(server)
    started = time.perf_counter()
    try:
        if resume and checkpoint is not None:
            run.restore(checkpoint)
        elif server.ledger.count:
            raise ValueError(
                f"the ledger holds {server.ledger.count} releases of an earlier run; resume from"
                " its checkpoint (resume=True), or choose another ledger: the two ε add up"
            )
        if not server.rounds_left:
            raise BudgetExhausted(
                f"all rounds of this plan are spent by the ledger {server.ledger.path}; nothing "
                "was sent"
            )
        if checkpoint is not None and not resume:
            run.save(checkpoint)
        yield run
    finally:
        run.seconds = time.perf_counter() - started
        server.close()


def federate(
    plan: FederatedPlan,
    model: nn.Module,
    loss_fn: LossFn,
    datasets: Sequence[Any],
    *,
    clients: Sequence[Client] | None = None,
    ledger_path: StrPath | None = None,
    budget: Budget | None = None,
    checkpoint: StrPath | None = None,
    resume: bool = False,
    evaluate: Callable[[nn.Module], Any] | None = None,
    every: int = 1,
    on_round: OnRound | None = None,
    fault: Fault | None = None,
    verify: bool | str = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> SimulatedRun:
    """Run a plan in this process.

    Args:
        plan: what to run.
        model: trained in place.
        loss_fn: maps (model, batch) to one loss per example.
        datasets: records of each client.
        clients: existing clients with their state; None makes new ones from `datasets`.
        ledger_path: of the server's ledger; None keeps the ledger in memory.
        budget: of the people in all clients, which the whole plan is charged to once.
        checkpoint: folder that is written after every round, with the records of the rounds and the
            history.
        resume: begin from `checkpoint`; later rounds in the ledger stay charged.
        evaluate: maps the model to a figure for `history`, on data of no client. The figure is made
            of plain values and tensors where a checkpoint is written.
        every: rounds between evaluations; the last round is always evaluated.
        on_round: called after every round.
        fault: decides who dies where, for tests.
        verify: check model and loss on public rows before the first round; no value of a record
            decides. "strict" refuses operations without a batch rule.
        collate_fn: maps a list of examples to a batch, for clients that are made from `datasets`.

    Raises:
        Killed: a fault killed the server.
        BudgetExhausted: no round is left; the checkpoint stays as it is.
        ValueError: settings that do not fit together.
    """
    server = Server(plan, model, ledger_path=ledger_path, budget=budget)
    with open_run(server, checkpoint, resume) as run:
        clients = clients or make_clients(
            plan, model, loss_fn, datasets, verify=verify, collate_fn=collate_fn
        )
        by_number = {client.number: client for client in clients}
        for client in clients:
            server.enroll(client.hello())
        while server.rounds_left:
            record = run_round(server, by_number, fault)
            is_due = (len(run.records) + 1) % every == 0 or not server.rounds_left
            run.finish_round(record, evaluate if is_due else None, checkpoint, on_round)
    return run


# --------------------------------------------------------------------------------------------------
# Ways to divide a dataset between the clients of a study. Every record goes to exactly one client.
# Partitions are index arrays, so that they can divide any dataset; `parts` divides tensors.

Partition = list[NDArray[np.int64]]


def iid(size: int, clients: int, seed: int = 0) -> Partition:
    """Divide records at random into parts whose sizes differ by one at most.

    Raises:
        ValueError: fewer records than clients.
    """
    _check_size(size, clients)
    order = np.random.default_rng(seed).permutation(size)
    return [np.sort(piece) for piece in np.array_split(order, clients)]


def dirichlet(
    labels: ArrayLike, clients: int, alpha: float, seed: int = 0, least: int = 0
) -> Partition:
    """Divide records with label skew: fractions of labels follow Dirichlet(alpha, …, alpha).

    Args:
        labels: `[n]`, of any type.
        clients: n.
        alpha: > 0; 0.1 leaves most clients with few labels, ∞ is even.
        seed: of the draw.
        least: fewest records of a client; the draw is repeated up to 100 times until all clients
            have them.

    Raises:
        ValueError: alpha not positive, or `least` out of reach.
    """
    classes = np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    _check_size(classes.size, clients)
    # It may be infinite.
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    generator = np.random.default_rng(seed)
    for _ in range(_DRAWS):
        owner = np.empty(classes.size, dtype=np.int64)
        for label in range(int(classes.max()) + 1):
            indices = generator.permutation(np.flatnonzero(classes == label))
            fractions = np.full(clients, 1 / clients)
            if np.isfinite(alpha):
                fractions = generator.dirichlet(np.full(clients, alpha))
            positions = (np.arange(indices.size) + 0.5) / indices.size
            owner[indices] = np.searchsorted(np.cumsum(fractions)[:-1], positions)
        partition = [np.flatnonzero(owner == client) for client in range(clients)]
        if min(len(piece) for piece in partition) >= least:
            return partition
    raise ValueError(
        f"no draw of {_DRAWS} gives every client {least} records; lower least, or raise alpha = "
        f"{alpha}"
    )


def parts(tensors: Sequence[Tensor], partition: Partition) -> list[tuple[Tensor, ...]]:
    """Divide tensors with a common first axis into one tuple a client."""
    return [tuple(x[piece] for x in tensors) for piece in partition]


def _check_size(size: int, clients: int) -> None:
    if clients < 1 or size < clients:
        raise ValueError(
            f"{size} records cannot be divided between {clients} clients; give each client one at "
            "least"
        )
