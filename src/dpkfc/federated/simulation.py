"""Rounds inside one process, for tests and small studies: no sockets, no copies, with places where something can be killed.

An engine does the same over a network. It sends what `request_keys` and then `open_round` made, hands answers to `receive`, sends
the survivors what `fix_survivors` made, and calls `close_round`.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from dpkfc.federated.client import Client
from dpkfc.federated.local_training import LocalModel
from dpkfc.federated.messages import Message
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.server import RoundRecord, Server
from dpkfc.gradients.clipped_sum import LossFn
from dpkfc.privacy.ledger import BudgetExhausted

# Where something can be killed: a client before it sends keys, before or after it has computed, or before it reveals shares; the
# server anywhere after its charge.
STAGES = ("keys", "opened", "client", "answered", "received", "fixed", "unmask", "closed")
Fault = Callable[[str, int, int], bool]  # (stage, round, client or -1 for the server) to whether it dies there


class Killed(RuntimeError):
    """The server was killed by a fault; start another from its checkpoint and ledger."""


@dataclass
class Run:
    """What a run came to.

    Attributes:
        server: with the trained model and the ledger.
        records: one a round, public.
        history: (rounds done, ε, what `evaluate` gave), by round.
    """

    server: Server
    records: list[RoundRecord] = field(default_factory=list)
    history: list[tuple[int, float, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the server's checkpoint, and with it what the run has come to.

        Raises:
            CheckpointError: the folder cannot be written, or `evaluate` gave more than plain values and tensors.
        """
        points = [list(point) for point in self.history]
        self.server.save(folder, {"records": [asdict(record) for record in self.records], "history": points})

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint: rounds, also those without a release, figures and rejected messages are those of before.

        Raises:
            CheckpointError: damaged, or of another plan, model or ledger.
        """
        held = self.server.restore(folder) or {}
        self.records.extend(RoundRecord(**record) for record in held.get("records", []))
        self.history.extend(tuple(point) for point in held.get("history", []))
        for record in self.records:
            self.server.rejected.update(record.rejected)


def make_clients(
    plan: FederatedPlan,
    model: nn.Module,
    loss_fn: LossFn,
    datasets: Sequence[Any],
    *,
    verify: bool | str = True,
    **options: Any,
) -> list[Client]:
    """Clients of one process: one copy of the model between them, records of their own.

    Args:
        plan: of the run.
        model: of the server; copied.
        loss_fn: maps (model, batch) to one loss an example.
        datasets: one a client.
        verify: check model and loss on public rows before the first round; no value of a record decides. "strict" refuses
            operations without a batch rule.
        options: of `Client`.

    Raises:
        ValueError: another number of datasets than clients.
    """
    if len(datasets) != plan.config.clients:
        raise ValueError(f"the plan has {plan.config.clients} clients, got {len(datasets)} datasets")
    local = LocalModel(plan, copy.deepcopy(model), loss_fn)
    return [Client(i, plan, local, data, verify=verify, **options) for i, data in enumerate(datasets)]


def one_round(server: Server, clients: Mapping[int, Client], fault: Fault | None = None) -> RoundRecord:
    """One round over clients of this process.

    Args:
        server: with enrolled clients.
        clients: by number.
        fault: says who dies where.

    Raises:
        Killed: the server died.
        BudgetExhausted: no round is left; nothing was sent.
        TooFewKeys: under secure aggregation fewer clients sent keys than a round needs; nothing was charged.
    """
    dies = fault or (lambda stage, number, client: False)
    number = server.next_round

    def server_at(stage: str) -> None:
        if dies(stage, number, -1):
            raise Killed(f"the server died at '{stage}' of round {number}")

    def answers(requests: Mapping[int, Message], before: str, after: str) -> None:
        for client, message in requests.items():
            if client not in clients or dies(before, number, client):
                continue
            answer = clients[client].answer(message)
            if not dies(after, number, client):
                server.receive(answer)

    answers(server.request_keys(), "keys", "keys")
    sent = server.open_round()
    server_at("opened")
    answers(sent, "client", "answered")
    server_at("received")
    asked = server.fix_survivors()
    server_at("fixed")
    answers(asked, "unmask", "unmask")
    server_at("unmask")
    record = server.close_round()
    server_at("closed")
    return record


def check_unused(server: Server) -> None:
    """Refuse to begin at new weights where rounds were spent on others.

    Raises:
        ValueError: the ledger holds releases.
    """
    if server.ledger.count:
        raise ValueError(
            f"the ledger holds {server.ledger.count} releases of an earlier run, which began at other weights; go on with it "
            "from its checkpoint (resume=True), or choose another ledger: the two ε then add up"
        )


def _begin(run: Run, checkpoint: str | os.PathLike[str] | None, resume: bool) -> None:
    """Go on from the checkpoint, or write the first one: a ledger that is in use has other weights behind it."""
    server = run.server
    if resume and checkpoint is not None:
        run.restore(checkpoint)
    else:
        check_unused(server)
    if not server.rounds_left:
        raise BudgetExhausted("all rounds of this plan are spent by its ledger; nothing was sent")
    if checkpoint is not None and not resume:
        run.save(checkpoint)


def _raise_where_all_failed(record: RoundRecord, clients: Mapping[int, Client]) -> None:
    """A fault that all clients have, a wrong loss or records of another width, would fail in every other round too.

    Clients of this process are known to it; to a server far away such a round looks like any other, and is noise.
    """
    holding = [client for client in clients.values() if len(client.records)]
    errors = [client.last_error for client in holding if client.failed]
    if errors and len(errors) == len(holding):
        raise RuntimeError(
            f"every client failed in round {record.round}: {errors[0]}. The round stays charged; the run can go on once that is "
            "mended"
        ) from errors[0]


def federate(
    plan: FederatedPlan,
    model: nn.Module,
    loss_fn: LossFn,
    datasets: Sequence[Any],
    *,
    clients: Sequence[Client] | None = None,
    ledger_path: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    evaluate: Callable[[nn.Module], Any] | None = None,
    every: int = 1,
    on_round: Callable[[RoundRecord, Run], None] | None = None,
    fault: Fault | None = None,
    verify: bool | str = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Run:
    """Run a plan in this process.

    Args:
        plan: what to run.
        model: trained in place.
        loss_fn: maps (model, batch) to one loss an example.
        datasets: records of each client.
        clients: made before, with state of their own; None makes them from `datasets`.
        ledger_path: of the server's ledger; None keeps it in memory.
        checkpoint: folder that is written after every round, with the records of the rounds and the history.
        resume: begin from `checkpoint`; rounds that the ledger holds beyond it stay charged.
        evaluate: maps the model to a figure for `history`, on data that are not the clients'; plain values and tensors where a
            checkpoint is written.
        every: rounds between evaluations; the last round is always evaluated.
        on_round: called after every round.
        fault: says who dies where, for tests.
        verify: check model and loss on public rows before the first round; no value of a record decides. "strict" refuses
            operations without a batch rule.
        collate_fn: list of examples to a batch, of clients that are made from `datasets`.

    Raises:
        Killed: the server died of a fault.
        BudgetExhausted: no round is left; the checkpoint stays as it is.
        ValueError: settings that do not fit together.
        RuntimeError: every client that holds records has failed in a round, with what the first of them met; that round stays
            charged.
    """
    server = Server(plan, model, ledger_path=ledger_path)
    run, started = Run(server), time.perf_counter()
    try:
        _begin(run, checkpoint, resume)
        made = clients or make_clients(plan, model, loss_fn, datasets, verify=verify, collate_fn=collate_fn)
        known = {client.number: client for client in made}
        for client in known.values():
            server.enroll(client.hello())
        while server.rounds_left:
            record = one_round(server, known, fault)
            run.records.append(record)
            if evaluate is not None and (len(run.records) % every == 0 or not server.rounds_left):
                run.history.append((record.round + 1, server.epsilon, evaluate(model)))
            if checkpoint is not None:
                run.save(checkpoint)
            if on_round is not None:
                on_round(record, run)
            _raise_where_all_failed(record, known)
    finally:
        run.seconds = time.perf_counter() - started
        server.close()
    return run


# --------------------------------------------------------------------------------------------------
# Ways to divide a dataset between clients. Every record goes to exactly one client; all of it is
# public bookkeeping of a study.
#
# Partitions are index arrays, so that any dataset can be cut by them; `parts` cuts tensors.

Partition = list[NDArray[np.int64]]


def iid(size: int, clients: int, seed: int = 0) -> Partition:
    """Sizes that differ by one at most, records at random.

    Raises:
        ValueError: fewer records than clients.
    """
    _check(size, clients)
    order = np.random.default_rng(seed).permutation(size)
    return [np.sort(piece) for piece in np.array_split(order, clients)]


def dirichlet(labels: ArrayLike, clients: int, alpha: float, seed: int = 0, least: int = 0) -> Partition:
    """Label skew: of every label the clients get shares drawn from Dirichlet(alpha, …, alpha).

    Args:
        labels: `[n]`, of any type.
        clients: n.
        alpha: > 0; 0.1 leaves most clients with few labels, ∞ is even.
        seed: of the draw.
        least: fewest records of a client; the draw is repeated until it holds (100 times).

    Raises:
        ValueError: alpha not positive, or `least` out of reach.
    """
    kinds = np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    _check(kinds.size, clients)
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    generator = np.random.default_rng(seed)
    for _ in range(100):
        owner = np.empty(kinds.size, dtype=np.int64)
        for kind in range(int(kinds.max()) + 1):
            mine = generator.permutation(np.flatnonzero(kinds == kind))
            even = np.full(clients, 1 / clients)
            share = generator.dirichlet(np.full(clients, alpha)) if np.isfinite(alpha) else even
            owner[mine] = np.searchsorted(np.cumsum(share)[:-1], (np.arange(mine.size) + 0.5) / mine.size)
        found = [np.flatnonzero(owner == client) for client in range(clients)]
        if min(len(piece) for piece in found) >= least:
            return found
    raise ValueError(f"no draw of 100 gives every client {least} records; lower least, or raise alpha = {alpha}")


def quantity_skew(size: int, clients: int, alpha: float, seed: int = 0) -> Partition:
    """Sizes drawn from Dirichlet(alpha, …, alpha), records at random.

    Raises:
        ValueError: alpha not positive.
    """
    _check(size, clients)
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    generator = np.random.default_rng(seed)
    order = generator.permutation(size)
    cuts = np.round(np.cumsum(generator.dirichlet(np.full(clients, alpha)))[:-1] * size).astype(np.int64)
    return [np.sort(piece) for piece in np.split(order, cuts)]


def by_column(values: ArrayLike) -> tuple[Partition, list[str]]:
    """One client a value of a column: a hospital, a scanner, an author.

    Returns:
        (records of each, names in sorted order).
    """
    names, owner = np.unique(np.asarray(values), return_inverse=True)
    owner = owner.reshape(-1)
    return [np.flatnonzero(owner == i) for i in range(len(names))], [str(name) for name in names]


def parts(tensors: Sequence[Tensor], partition: Partition) -> list[tuple[Tensor, ...]]:
    """Tensors with a common first axis, cut into one tuple a client."""
    return [tuple(x[piece] for x in tensors) for piece in partition]


def _check(size: int, clients: int) -> None:
    if clients < 1 or size < clients:
        raise ValueError(f"{size} records cannot be divided between {clients} clients")
