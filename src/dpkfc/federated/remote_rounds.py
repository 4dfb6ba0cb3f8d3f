"""The rounds of a server with remote clients.

An engine is a `Transport`: it knows which nodes are connected and carries messages to them.
`Roster` and `Server` decide which node is which client, who takes part and who survives; the engine
does not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from torch import nn

from dpkfc import checkpoint
from dpkfc.federated.app import App, Settings
from dpkfc.federated.key_exchange import TooFewKeys
from dpkfc.federated.messages import CLIENT_FAILED, FLOATS, HELLO, Message, Received
from dpkfc.federated.runs import OnRound, SimulatedRun, open_run
from dpkfc.federated.server import Server

# Seconds between two lists of connected nodes.
_PAUSE = 0.5
_REFUSALS = {
    "other-contract": "with another plan, model or frozen weights",
    "duplicate": "whose number another node has",
    CLIENT_FAILED: "that failed to start (their own last_error.txt says why)",
}
# These refusals are not final: a number becomes free, or a disk is mounted.
_TEMPORARY = ("duplicate", CLIENT_FAILED)


class TooFewClients(RuntimeError):
    """Fewer clients are connected than a round needs; nothing was charged."""


class Transport(Protocol):
    """An engine; nodes are its numbers for connected machines."""

    def nodes(self) -> Iterable[int]:
        """Return the nodes that are connected now."""
        ...

    def ask(
        self, requests: Mapping[int, Message], timeout: float
    ) -> Iterable[tuple[int, Message | None]]:
        """Send messages to nodes and return the answers in time; None if unreadable."""
        ...


class Roster:
    """Which node is which client of the plan.

    A number belongs to one connected node; a second claim is refused.

    Args:
        server: enrols the clients.
        transport: of the messages.
        timeout: seconds that an answer may take.
    """

    def __init__(self, server: Server, transport: Transport, timeout: float) -> None:
        self._server = server
        self._transport = transport
        self._timeout = timeout
        # Client of each node.
        self._clients: dict[int, int] = {}
        # Nodes that were sent a hello.
        self._greeted: set[int] = set()
        # Reason of each refused node.
        self._refused: dict[int, str] = {}

    def present(self) -> dict[int, int]:
        """Return the node of each connected client."""
        connected = set(self._transport.nodes())
        return {client: node for node, client in self._clients.items() if node in connected}

    def greet(self, again: bool = False) -> None:
        """Say hello to new nodes; with `again` also to nodes that did not answer."""
        connected = set(self._transport.nodes())
        refused = {node for node, reason in self._refused.items() if reason not in _TEMPORARY}
        unknown = connected - set(self._clients) - refused
        if not again:
            unknown -= self._greeted
        new = sorted(unknown)
        if not new:
            return
        self._greeted |= unknown
        for node, message in self._transport.ask(dict.fromkeys(new, HELLO), self._timeout):
            if node in unknown and node not in self._clients:
                self._welcome(node, message or {}, connected)

    def _welcome(self, node: int, message: Received, connected: set[int]) -> None:
        """Enrol the client of a node that answered a hello, or note why it is refused."""
        server = self._server
        number = message.get("client")
        holder = next((n for n, client in self._clients.items() if client == number), None)
        is_hello = message.get("kind") == HELLO["kind"]
        is_valid = is_hello and message.get("contract") == server.contract
        if holder is not None and holder not in connected and is_valid:
            # The same client has connected again.
            server.enrolled.discard(self._clients.pop(holder))
        before = Counter(server.rejected)
        if server.enroll(message):
            self._clients[node] = int(message["client"])
            self._refused.pop(node, None)
            return
        reason = next(iter(server.rejected - before), "unknown-client")
        self._refused[node] = CLIENT_FAILED if message.get("kind") == "error" else reason
        if reason == "duplicate":
            # The number may become free.
            self._greeted.discard(node)

    def gather(self, wanted: int, least: int, wait: float) -> None:
        """Wait for `wanted` clients, or for as many as a round needs when the time is over.

        Raises:
            TooFewClients: fewer are connected.
        """
        end = time.monotonic() + wait
        while len(self.present()) < wanted:
            self.greet(again=True)
            count = len(self.present())
            is_over = time.monotonic() >= end
            if count >= wanted or (count >= least and is_over):
                return
            if is_over:
                raise TooFewClients(self._describe_shortage(count, least, wait))
            time.sleep(min(_PAUSE, wait))

    def _describe_shortage(self, count: int, least: int, wait: float) -> str:
        reasons = Counter(
            _REFUSALS.get(reason, "without a valid hello") for reason in self._refused.values()
        )
        refused = "".join(f"; refused: {number} {reason}" for reason, number in reasons.items())
        clients = self._server.plan.config.clients
        return (
            f"{count} of {clients} clients are there after {wait:g} s and a round needs "
            f"{least}{refused}. "
            "Start more clients, or lower min_survivors; nothing was charged for this round"
        )

    def exchange(self, requests: Mapping[int, Message]) -> None:
        """Carry messages to clients and answers back; refuse an answer in another client's name."""
        nodes = self.present()
        messages = {
            nodes[client]: message for client, message in requests.items() if client in nodes
        }
        if not messages:
            return
        for node, message in self._transport.ask(messages, self._timeout):
            if node not in messages:
                self._server.rejected["unknown-client"] += 1
            elif message is None:
                # The server counts an empty message as invalid, and the client as absent.
                self._server.receive({})
            elif message.get("client") != self._clients[node]:
                self._server.rejected["other-client"] += 1
            else:
                self._server.receive(message)


def _open_round(server: Server, roster: Roster, wait: float) -> dict[int, Message]:
    """Open a round with enough clients, and under secure aggregation with keys of enough clients.

    Raises:
        TooFewClients: fewer clients after `wait` seconds; nothing was charged.
    """
    least = max(1, server.plan.config.survivors)
    end = time.monotonic() + wait
    while True:
        roster.greet()
        roster.gather(least, least, wait)
        roster.exchange(server.request_keys())
        try:
            return server.open_round()
        except TooFewKeys as error:
            if time.monotonic() >= end:
                raise TooFewClients(str(error)) from None
        time.sleep(min(_PAUSE, wait))


def serve(
    app: App, settings: Settings, transport: Transport, *, on_round: OnRound | None = None
) -> SimulatedRun:
    """Run the rounds that the ledger of a folder has left: all rounds, or those after a crash.

    Args:
        app: of the run.
        settings: all settings, from `App.settings`; "folder" holds ledger, checkpoint and what
            `App.finish` writes.
        transport: of the messages.
        on_round: called after every round.

    Raises:
        ValueError: no absolute path of a folder; trained parameters of a type that is not sent; a
            used ledger without its checkpoint.
        TooFewClients: fewer clients than a round needs; the same call resumes.
        BudgetExhausted: the ledger in the folder holds every round of the plan; nothing was sent.
        LedgerError, CheckpointError: the folder holds files of another run.
    """
    folder = Path(settings["folder"]).expanduser()
    if not folder.is_absolute():
        raise ValueError(
            "the server needs folder=, an absolute path for its ledger and checkpoint; got "
            f"{str(folder)!r}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    model = app.model(settings)
    _check_types(model)
    plan = app.plan(settings)
    path = folder / "checkpoint"
    resume = checkpoint.exists(path)
    server = Server(plan, model, ledger_path=folder / "ledger.jsonl")
    with open_run(server, path, resume) as run:
        roster = Roster(server, transport, settings["timeout"])
        wait = settings["wait"]
        roster.gather(plan.config.clients, max(1, plan.config.survivors), wait)
        evaluate = app.bind_evaluate(settings)
        while server.rounds_left:
            roster.exchange(_open_round(server, roster, wait))
            roster.exchange(server.fix_survivors())
            run.finish_round(server.close_round(), evaluate, path, on_round)
    if app.finish is not None:
        app.finish(run, settings, folder)
    return run


def _check_types(model: nn.Module) -> None:
    """Refuse parameters that an engine cannot carry, before a round is charged."""
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype not in FLOATS:
            raise ValueError(
                f"the parameter '{name}' is {p.dtype}; engines carry float32 and float64: convert"
                " the model, or use App.run_here. Nothing was charged"
            )
