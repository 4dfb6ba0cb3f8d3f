"""Rounds inside one process, for tests and small studies.

An engine does the same over a network. It sends the messages of `request_keys` and then of
`open_round`, hands answers to `receive`, sends the survivors the messages of `fix_survivors`, and
calls `close_round`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from dpkfc.checkpoint import StrPath
from dpkfc.data.duplicates import check_once
from dpkfc.federated.client import Client
from dpkfc.federated.local_model import LocalModel
from dpkfc.federated.messages import Message
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.runs import OnRound, SimulatedRun, open_run
from dpkfc.federated.server import Server
from dpkfc.gradients.loss_function import LossFn
from dpkfc.privacy.budget import Budget


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
        ValueError: the numbers of datasets and clients differ, or a record stands in two datasets.
    """
    local = LocalModel(plan, copy.deepcopy(model), loss_fn)
    if len(datasets) != plan.config.clients:
        raise ValueError(
            f"the plan has {plan.config.clients} clients, got {len(datasets)} datasets"
        )
    clients = [Client(i, plan, local, data, **options) for i, data in enumerate(datasets)]
    if plan.config.privacy.unit == "example":
        check_once(*datasets, fix="give each record to one client")
    return clients


def run_round(server: Server, clients: Mapping[int, Client]) -> RoundRecord:
    """Run one round over clients of this process.

    Args:
        server: with enrolled clients.
        clients: by number.

    Raises:
        BudgetExhausted: no round is left; nothing was sent.
        TooFewKeys: under secure aggregation fewer clients sent keys than a round needs; nothing was
            charged.
    """

    def exchange(requests: Mapping[int, Message]) -> None:
        for client, message in requests.items():
            if client in clients:
                server.receive(clients[client].answer(message))

    exchange(server.request_keys())
    exchange(server.open_round())
    exchange(server.fix_survivors())
    return server.close_round()


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
    verify: bool = True,
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
        verify: check model and loss on public rows before the first round; no value of a record
            decides.
        collate_fn: maps a list of examples to a batch, for clients that are made from `datasets`.

    Raises:
        BudgetExhausted: no round is left; the checkpoint stays as it is.
        ValueError: settings that do not fit together.
    """
    # What clients refuse is refused before the server charges the budget.
    clients = clients or make_clients(
        plan, model, loss_fn, datasets, verify=verify, collate_fn=collate_fn
    )
    server = Server(plan, model, ledger_path=ledger_path, budget=budget)
    with open_run(server, checkpoint, resume) as run:
        by_number = {client.number: client for client in clients}
        for client in clients:
            server.enroll(client.hello())
        while server.rounds_left:
            record = run_round(server, by_number)
            is_due = (len(run.records) + 1) % every == 0 or not server.rounds_left
            run.finish_round(record, evaluate if is_due else None, checkpoint, on_round)
    return run
