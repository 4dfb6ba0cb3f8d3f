"""The rounds of a server whose clients are far away: who is there, who answers in time, what is written after every round.

An engine is a `Carrier`: it knows which nodes are connected and carries messages to them. Which node is which client, who takes
part and who survives is decided here and by `Server`, never by the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from dpkfc import checkpoint
from dpkfc.federated.app import App, Settings
from dpkfc.federated.exchange import TooFewKeys
from dpkfc.federated.messages import CLIENT_FAILED, FLOATS, Message
from dpkfc.federated.node import HELLO
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.runner import Run, check_unused
from dpkfc.federated.server import Server
from dpkfc.privacy.ledger import BudgetExhausted

__all__ = ["Carrier", "Roster", "TooFewClients", "serve"]

OnRound = Callable[[RoundRecord, Run], None]
_PAUSE = 0.5  # seconds between two looks at who is there
_REFUSED = {
    "other-contract": "with another plan, model or frozen weights",
    "duplicate": "whose number another node has",
    CLIENT_FAILED: "that failed to start (their own last_error.txt says why)",
}
_MAY_CHANGE = ("duplicate", CLIENT_FAILED)  # a number becomes free, a disk is mounted


class TooFewClients(RuntimeError):
    """Fewer clients than a round needs; nothing was charged for it."""


class Carrier(Protocol):
    """An engine: nodes are its numbers for connected machines."""

    def nodes(self) -> Iterable[int]:
        """Who is connected now."""
        ...

    def ask(self, requests: Mapping[int, Message], timeout: float) -> Iterable[tuple[int, Message | None]]:
        """Send a message to each node and give the answers that come in time, in any order; None for one that cannot be read."""
        ...


class Roster:
    """Which node is which client of the plan. A number belongs to one connected node; a second one that claims it is refused.

    Args:
        server: enrols the clients.
        carrier: of the messages.
        timeout: seconds that an answer may take.
    """

    def __init__(self, server: Server, carrier: Carrier, timeout: float) -> None:
        self._server, self._carrier, self._timeout = server, carrier, timeout
        self._clients: dict[int, int] = {}  # node to client
        self._asked: set[int] = set()
        self._refused: dict[int, str] = {}

    def present(self) -> dict[int, int]:
        """Client to node, of those who are connected."""
        here = set(self._carrier.nodes())
        return {client: node for node, client in self._clients.items() if node in here}

    def greet(self, again: bool = False) -> None:
        """Say hello to nodes that came since; with `again` also to those that did not answer."""
        here = set(self._carrier.nodes())
        unknown = here - set(self._clients) - {n for n, why in self._refused.items() if why not in _MAY_CHANGE}
        new = sorted(unknown if again else unknown - self._asked)
        if not new:
            return
        self._asked |= set(new)
        for node, message in self._carrier.ask(dict.fromkeys(new, HELLO), self._timeout):
            if node in new and node not in self._clients:
                self._welcome(node, message or {}, here)

    def _welcome(self, node: int, message: Mapping[str, Any], here: set[int]) -> None:
        number, server = message.get("client"), self._server
        holder = next((n for n, client in self._clients.items() if client == number), None)
        right = message.get("kind") == HELLO["kind"] and message.get("contract") == server.contract
        if holder is not None and holder not in here and right:  # the same client, connected anew
            del self._clients[holder]
            server.enrolled.discard(self._number(number))
        before = Counter(server.rejected)
        if server.enroll(message):
            self._clients[node] = self._number(number)
            self._refused.pop(node, None)
            return
        found = next(iter(server.rejected - before), "unknown-client")
        self._refused[node] = CLIENT_FAILED if message.get("kind") == "error" else found
        if found == "duplicate":
            self._asked.discard(node)  # its number may become free

    @staticmethod
    def _number(found: Any) -> int:
        return int(found)

    def gather(self, wanted: int, least: int, wait: float) -> None:
        """Wait until `wanted` clients are there, or as many as a round needs when the time is over.

        Raises:
            TooFewClients: fewer.
        """
        end = time.monotonic() + wait
        while len(self.present()) < wanted:
            self.greet(again=True)
            found = len(self.present())
            if found >= wanted or (found >= least and time.monotonic() >= end):
                return
            if time.monotonic() >= end:
                raise TooFewClients(self._too_few(found, least, wait))
            time.sleep(min(_PAUSE, wait))

    def _too_few(self, found: int, least: int, wait: float) -> str:
        counts = Counter(_REFUSED.get(why, "without a valid hello") for why in self._refused.values())
        refused = "".join(f"; refused: {n} {why}" for why, n in counts.items())
        clients = self._server.plan.config.clients
        return (
            f"{found} of {clients} clients are there after {wait:g} s and a round needs {least}{refused}. Start more clients, or "
            "make a plan with a smaller min_survivors; nothing was charged for this round"
        )

    def exchange(self, requests: Mapping[int, Message]) -> None:
        """Carry messages to clients and their answers to the server; whoever answers for another client is not heard."""
        nodes = self.present()
        sent = {nodes[client]: message for client, message in requests.items() if client in nodes}
        if not sent:
            return
        for node, message in self._carrier.ask(sent, self._timeout):
            if node not in sent:
                self._server.rejected["unknown-client"] += 1
            elif message is None:
                self._server.receive({})  # counted, and absent
            elif message.get("client") != self._clients[node]:
                self._server.rejected["other-client"] += 1
            else:
                self._server.receive(message)


def _round(server: Server, roster: Roster, wait: float) -> RoundRecord:
    roster.exchange(_open_round(server, roster, wait))
    roster.exchange(server.fix_survivors())
    return server.close_round()


def _open_round(server: Server, roster: Roster, wait: float) -> dict[int, Message]:
    """Open a round with enough clients, and under secure aggregation with keys of enough clients.

    Raises:
        TooFewClients: fewer after `wait` seconds; nothing was charged.
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


def serve(app: App, settings: Settings, carrier: Carrier, *, on_round: OnRound | None = None) -> Run:
    """Run the rounds that the ledger of a folder has left: all of them, or those after a crash.

    Args:
        app: of the run.
        settings: all of them, from `App.settings`; "folder" holds ledger, checkpoint and what the run leaves.
        carrier: of the messages.
        on_round: called after every round.

    Raises:
        ValueError: no absolute path of a folder; trained parameters of a type that is not sent; a ledger that is in use and has
            lost its checkpoint.
        TooFewClients: fewer clients than a round needs; checkpoint and ledger are there to go on from.
        BudgetExhausted: every round of the plan is spent in this folder; nothing was sent.
        LedgerError, CheckpointError: those of another run lie in the folder.
    """
    folder = Path(settings["folder"]).expanduser()
    if not folder.is_absolute():
        raise ValueError(f"the server needs folder=, an absolute path for its ledger and checkpoint; got {str(folder)!r}")
    folder.mkdir(parents=True, exist_ok=True)
    model = app.model(settings)
    _check_types(model)
    server = Server(app.plan(settings), model, ledger_path=folder / "ledger.jsonl")
    run, started = Run(server), time.perf_counter()
    try:
        _resume(run, folder / "checkpoint")
        if not server.rounds_left:
            raise BudgetExhausted(f"all rounds of this plan are spent by the ledger in {folder}; nothing was sent")
        _rounds(app, settings, carrier, run, place=folder / "checkpoint", on_round=on_round)
    finally:
        run.seconds = time.perf_counter() - started
        server.close()
    if app.finish is not None:
        app.finish(run, settings, folder)
    return run


def _check_types(model: nn.Module) -> None:
    """Refuse what an engine cannot carry before a ledger is there: the first round would be charged and then not be sent."""
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype not in FLOATS:
            raise ValueError(
                f"the parameter '{name}' is {p.dtype}; engines carry trained parameters of float32 and float64: give a model in "
                "one of them, or run it inside one process. Nothing was charged"
            )


def _resume(run: Run, place: Path) -> None:
    """Continue from a checkpoint; a new run, whose ledger is empty, writes its first one before its first round."""
    if checkpoint.is_there(place):
        run.restore(place)
    else:
        check_unused(run.server)
        run.save(place)


def _rounds(
    app: App, settings: Settings, carrier: Carrier, run: Run, *, place: Path, on_round: OnRound | None
) -> None:
    server, evaluate = run.server, app.evaluated(settings)
    roster = Roster(server, carrier, settings["timeout"])
    roster.gather(server.plan.config.clients, max(1, server.plan.config.survivors), settings["wait"])
    while server.rounds_left:
        record = _round(server, roster, settings["wait"])
        run.records.append(record)
        if evaluate is not None:
            run.history.append((record.round + 1, server.epsilon, evaluate(server.model)))
        run.save(place)
        if on_round is not None:
            on_round(record, run)
