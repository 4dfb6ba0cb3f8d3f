"""Flower as the engine of a federated app: its simulation, and its deployment on hosts far apart. The one module that knows flwr.

    server_app(app)   a `flwr.serverapp.ServerApp` whose main drives `Server`
    client_app(app)   a `flwr.clientapp.ClientApp` that answers with `Node`
    simulate(app)     both in Flower's simulation engine, on this machine

Flower carries messages and nothing else: it draws no clients, adds no noise, counts no survivors and sees no exception of ours.
Its telemetry, its look for updates and Ray's usage statistics are off unless the environment says otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dpkfc import checkpoint
from dpkfc.federated.client import Client
from dpkfc.federated.local_training import LocalModel
from dpkfc.federated.messages import CLIENT_FAILED, FLOATS, Message, TooFewKeys, select_prefix
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.secure_aggregation import KEY_BYTES, new_key
from dpkfc.federated.server import RoundRecord, Server
from dpkfc.federated.simulation import Run, check_unused, federate
from dpkfc.gradients.clipped_sum import LossFn
from dpkfc.privacy.ledger import BudgetExhausted

# --------------------------------------------------------------------------------------------------
# A federated app: what server and clients of a run have to agree on, as functions of a few public
# settings.
#
# Every process makes its own plan and model from the settings, and the contract
# (`messages.contract_of`) is compared before the first round. One and the same value runs inside
# one process (`App.here`), on an engine's simulation and on hosts far apart.

Settings = Mapping[str, Any]
# Of the server alone: its folder, seconds that a message may take, seconds to wait for clients.
SERVER: dict[str, Any] = {"folder": "", "timeout": 120.0, "wait": 120.0}


@dataclass(frozen=True)
class App:
    """What is trained, on what, under which promise. The functions are called in every process and give the same every time.

    Attributes:
        plan: settings to the plan. On hosts with unlike libraries give the noise by `with_noise`: a calibration may differ in its
            last digit, and then the clients are refused.
        model: settings to the model; weights that are not trained are part of the contract.
        loss_fn: maps (model, batch) to one loss an example.
        records: (number of a client, settings) to its own records; called where they lie, and nowhere else.
        defaults: settings that a run may change, with their values: numbers, texts and truth values.
        evaluate: (model, settings) to a plain figure for `Run.history`, on data that are no client's; None for nothing.
        finish: (run, settings, folder) writes what a finished run leaves; None for nothing.
        collate_fn: list of examples to a batch.
    """

    plan: Callable[[Settings], FederatedPlan]
    model: Callable[[Settings], nn.Module]
    loss_fn: LossFn
    records: Callable[[int, Settings], Any]
    defaults: Settings = field(default_factory=dict, hash=False)
    evaluate: Callable[[nn.Module, Settings], Any] | None = None
    finish: Callable[[Run, Settings, Path], None] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None

    def settings(self, *given: Settings | None) -> dict[str, Any]:
        """The defaults, replaced by what was given, the last one first.

        Raises:
            ValueError: an unknown name, or a value of another kind than the default.
        """
        known = {**SERVER, **self.defaults}
        for values in given:
            for name, value in (values or {}).items():
                if name not in known:
                    raise ValueError(f"unknown setting {name!r} of the federated app; it has {', '.join(sorted(known))}")
                known[name] = _as(name, value, {**SERVER, **self.defaults}[name])
        return known

    def evaluated(self, settings: Settings) -> Callable[[nn.Module], Any] | None:
        """`evaluate` with its settings."""
        found = self.evaluate
        return None if found is None else lambda model: found(model, settings)

    def here(
        self,
        settings: Settings | None = None,
        *,
        folder: str | Path,
        on_round: Callable[[RoundRecord, Run], None] | None = None,
    ) -> Run:
        """Run it inside this process; with the folder of a run that was interrupted it goes on after its last round.

        Args:
            settings: instead of the defaults.
            folder: of the server's ledger, its checkpoint and what `finish` writes.
            on_round: called after every round.

        Raises:
            BudgetExhausted: all rounds are spent by the ledger in the folder.
            ValueError: as `runner.federate`.
        """
        chosen, place = self.settings(settings), Path(folder)
        plan = self.plan(chosen)
        place.mkdir(parents=True, exist_ok=True)
        run = federate(
            plan,
            self.model(chosen),
            self.loss_fn,
            [self.records(number, chosen) for number in range(plan.config.clients)],
            ledger_path=place / "ledger.jsonl",
            checkpoint=place / "checkpoint",
            resume=checkpoint.is_there(place / "checkpoint"),
            evaluate=self.evaluated(chosen),
            on_round=on_round,
            collate_fn=self.collate_fn,
        )
        if self.finish is not None:
            self.finish(run, chosen, place)
        return run


def _as(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ValueError(f"the setting {name!r} is of type {type(default).__name__}, got {value!r}")
    return value


# --------------------------------------------------------------------------------------------------
# A client on a machine of its own: whatever has to outlive a process lies in its folder, and
# nothing of it is ever sent.
#
#     ledger.jsonl    its own releases; the file is locked while a message is answered
#     metric/         the preconditioner that the server sent, with its hash
#     channel.key     the private key that the other clients seal their shares for, under secure aggregation
#     state/          control variates of local methods; keys of a round, the shares it holds, the survivor set it answered for
#     last_error.txt  what went wrong last, for the operator of this client; the server is told a constant
#
# Engines start a process for every message, or several for one client in turn, so a client is built
# from its folder each time.

HELLO: Message = {"kind": "hello"}
_Chosen = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=8)
def _local(app: App, chosen: _Chosen) -> LocalModel:
    """One model a process; every message loads its parameters anew."""
    settings = dict(chosen)
    return LocalModel(app.plan(settings), app.model(settings), app.loss_fn)


@lru_cache(maxsize=256)
def _records(app: App, chosen: _Chosen, number: int) -> Any:
    return app.records(number, dict(chosen))


def _channel_key(path: Path) -> bytes:
    """Read the client's private channel key, or make a file with a new one that its owner alone can read.

    Raises:
        ValueError: a file of another length.
    """
    if not path.exists():
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(new_key())
        fresh.replace(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path.name} has {len(key)} bytes and a channel key has {KEY_BYTES}; delete the file and start anew")
    return key


def failure(number: int, message: Mapping[str, Any], contract: str = "") -> Message:
    """The answer of a client that cannot answer: the constant reason and what the message itself said."""
    found = message.get("round")
    place: Message = {"round": found if type(found) is int else -1, "contract": contract, "client": number}
    return {"kind": "error", **place, "reason": CLIENT_FAILED}


class Node:
    """A client of an app and its folder.

    Args:
        app: of the run.
        settings: all of them, from `App.settings`.
        number: of the client.
        folder: of this client; each plan has a folder of its own in it, so budgets of several plans add up.
    """

    def __init__(self, app: App, settings: Settings, number: int, folder: str | os.PathLike[str]) -> None:
        self.app, self.number = app, number
        self._chosen: _Chosen = tuple(sorted(settings.items()))
        self._folder = Path(folder).expanduser() / f"client-{number}"

    def answer(self, message: Mapping[str, Any]) -> Message:
        """The answer to a server's message; never raises."""
        contract = ""
        try:
            local = _local(self.app, self._chosen)
            contract = local.contract
            place = self._own_folder() / local.plan.hash[:16]
            place.mkdir(exist_ok=True, mode=0o700)
            client = self._client(local, place)
            try:
                return self._answered(client, message, place)
            finally:
                client.close()
        except Exception as error:
            self._note(error)
            return failure(self.number, message, contract)

    def _client(self, local: LocalModel, place: Path) -> Client:
        client = Client(
            self.number,
            local.plan,
            local,
            _records(self.app, self._chosen, self.number),
            collate_fn=self.app.collate_fn,
            ledger_path=place / "ledger.jsonl",
            channel=_channel_key(place / "channel.key") if local.plan.config.privacy.masked else None,
        )
        if (place / "state").exists() or (place / "state.old").exists():
            client.load_state_dict(checkpoint.read(place / "state")[1]["state"])
        return client

    def _answered(self, client: Client, message: Mapping[str, Any], place: Path) -> Message:
        if message.get("kind") == HELLO["kind"]:
            return client.hello()
        self._bring_metric(client.local, message, place / "metric")
        answer = client.answer(message)
        if client.last_error is not None:
            self._note(client.last_error)
        state = client.state_dict()
        if any(state[name] for name in ("control", "last", "keys", "shares")):  # on the disk before the answer leaves
            checkpoint.write(place / "state", {}, {"state": state}, private=True)
        if answer["kind"] == "sum":
            self._keep_metric(client.local, message, place / "metric")
        return answer

    def _bring_metric(self, local: LocalModel, message: Mapping[str, Any], place: Path) -> None:
        """The metric of an earlier message, where this process has another and the server sent none."""
        wanted = message.get("metric_digest", "")
        if wanted in ("", local.digest) or select_prefix(message, "metric") or not place.exists():
            return
        held: dict[str, Tensor]
        tensors, meta = checkpoint.read(place)
        held = dict(tensors.get("metric", {}))
        if meta.get("digest") == wanted:
            local.take_metric(held)

    def _keep_metric(self, local: LocalModel, message: Mapping[str, Any], place: Path) -> None:
        wanted, current = message.get("metric_digest", ""), local.coordinates.current
        if wanted == "" or current is None:
            return
        if not place.exists() or checkpoint.read(place)[1].get("digest") != wanted:
            checkpoint.write(place, {"metric": current.state_dict()}, {"digest": wanted})

    def _own_folder(self) -> Path:
        """The client's folder, for its operator alone: a mode given to `mkdir` does not reach the folders above."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._folder

    def _note(self, error: BaseException) -> None:
        """For this client's operator; where even that cannot be written, nothing is said."""
        try:
            path = self._own_folder() / "last_error.txt"
            path.touch(0o600)
            path.write_text("".join(traceback.format_exception(error)), "utf-8")
        except OSError:
            return


# --------------------------------------------------------------------------------------------------
# The rounds of a server whose clients are far away: who is there, who answers in time, what is
# written after every round.
#
# An engine is a `Carrier`: it knows which nodes are connected and carries messages to them. Which
# node is which client, who takes part and who survives is decided here and by `Server`, never by
# the engine.

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


# --------------------------------------------------------------------------------------------------

SWITCHES = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
PLAIN, TENSORS = "plain", "tensors"
_KINDS = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
_DTYPES = {"float32", "float64", "int64", "int32", "uint8", "bool"}
_LONGEST = 256  # characters of a text in a message
_OBJECTS = 200 * 2**20  # bytes of Ray's object store
_PATIENT = {"timeout": 900.0, "wait": 900.0}  # nobody drops out of a simulation, and a busy machine starts Ray slowly
logger = logging.getLogger(__name__)


class Unreachable(RuntimeError):
    """The SuperLink does not answer."""


def quiet_environment() -> None:
    """Switch telemetry off wherever the environment does not say otherwise; before flwr is imported for the first time."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


def _flwr(name: str) -> Any:
    """A module of flwr.

    Raises:
        ImportError: it is not installed.
    """
    quiet_environment()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Flower is not installed ({error.name} is missing): pip install 'dpkfc[federated]', with Python 3.11 or later"
        ) from None


def check_installed() -> None:
    """Raise where Flower or its simulation is missing.

    Raises:
        ImportError: with what to install.
    """
    _flwr("flwr")
    if importlib.util.find_spec("ray") is None:
        raise ImportError("Flower's simulation is not installed (ray is missing): pip install 'dpkfc[federated]'")


# -- messages ----------------------------------------------------------------------------------------------------------


def to_record(message: Mapping[str, Any], made: dict[int, Any] | None = None) -> Any:
    """A message as a RecordDict: tensors in one ArrayRecord, integers and texts in one ConfigRecord, and nothing else.

    Args:
        message: of `dpkfc.federated.messages`.
        made: arrays by the id of their tensor, for messages that share some and live as long.

    Raises:
        ValueError: a value that no message has.
    """
    flwr, known = _flwr("flwr.app"), {} if made is None else made
    plain, arrays = {}, {}
    for name, value in message.items():
        if isinstance(value, Tensor):
            if value.dtype not in _KINDS:
                raise ValueError(f"tensors of type {value.dtype} are not sent; '{name}' is one")
            if id(value) not in known:
                known[id(value)] = flwr.Array(value.detach().cpu().contiguous().numpy())
            arrays[name] = known[id(value)]
        elif type(value) in (int, str):
            plain[name] = value
        else:
            raise ValueError(f"a value of type {type(value).__name__} is not sent; '{name}' is one")
    return flwr.RecordDict({PLAIN: flwr.ConfigRecord(plain), TENSORS: flwr.ArrayRecord(arrays)})


def from_record(record: Any) -> Message:
    """The message in a RecordDict; what it may hold is decided by whoever receives it.

    Raises:
        ValueError: other records, values of other types, or an array whose bytes are not what it says.
    """
    flwr = _flwr("flwr.app")
    if set(record) != {PLAIN, TENSORS}:
        raise ValueError("other records than a message has")
    plain, arrays = record[PLAIN], record[TENSORS]
    if not isinstance(plain, flwr.ConfigRecord) or not isinstance(arrays, flwr.ArrayRecord):
        raise ValueError("other records than a message has")
    message: Message = {}
    for name, value in plain.items():
        if type(value) not in (int, str) or (isinstance(value, str) and len(value) > _LONGEST):
            raise ValueError("a value that no message has")
        message[name] = value
    for name, array in arrays.items():
        if name in message:
            raise ValueError("a name that is there twice")
        message[name] = _tensor(array)
    return message


def _tensor(array: Any) -> Tensor:
    """The numbers of an array in NumPy's format; its header decides nothing about how much memory is taken."""
    if array.stype != "numpy.ndarray":
        raise ValueError("an array of another format")
    stream = BytesIO(array.data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("another version")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:  # whatever a stranger's bytes can do to a parser
        raise ValueError("an array of another format") from None
    numbers = array.data[stream.tell() :]
    size = 1
    for length in shape:
        size *= length
    if fortran or dtype.name not in _DTYPES or not dtype.isnative or size * dtype.itemsize != len(numbers):
        raise ValueError("an array whose bytes are not what it says")
    return torch.from_numpy(np.frombuffer(numbers, dtype).reshape(shape).copy())


# -- server ------------------------------------------------------------------------------------------------------------


class _Grid:
    """Flower's grid as a `drive.Carrier`."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def nodes(self) -> list[int]:
        """Connected SuperNodes."""
        with _reached():
            return sorted(self._grid.get_node_ids())

    def ask(self, requests: Mapping[int, Message], timeout: float) -> Iterable[tuple[int, Message | None]]:
        """Answers in time; whatever Flower itself reports instead of an answer is an absence, and its text is not read."""
        flwr, made = _flwr("flwr.app"), {}  # type: ignore[var-annotated]
        sent = [
            flwr.Message(to_record(m, made), node, "train", ttl=timeout, group_id=str(m.get("round", "hello")))
            for node, m in requests.items()
        ]
        with _reached():
            replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        for reply in replies:
            if reply.has_content():
                yield reply.metadata.src_node_id, _readable(reply.content)


def _readable(content: Any) -> Message | None:
    try:
        return from_record(content)
    except Exception:  # counted by the server as a message that cannot be read
        return None


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Unreachable(
            f"the SuperLink does not answer ({type(error).__name__}); ledger and checkpoint are on the disk: start the SuperLink "
            "and the same run again, and it goes on after its last round"
        ) from error


def server_app(
    app: App,
    settings: Settings | None = None,
    *,
    on_round: OnRound | None = None,
    done: Callable[[Run], None] | None = None,
) -> Any:
    """The ServerApp of an app. Settings of `flwr run --run-config` come last.

    Args:
        app: of the run.
        settings: instead of its defaults.
        on_round: called after every round; None writes one line to the log.
        done: called with the finished run.
    """
    made = _flwr("flwr.serverapp").ServerApp()

    @made.main()
    def main(grid: Any, context: Any) -> None:
        chosen = app.settings(settings, dict(context.run_config))
        run = serve(app, chosen, _Grid(grid), on_round=on_round or _logged)
        if done is not None:
            done(run)

    return made


def _logged(record: Any, run: Run) -> None:
    """One line a round, of public figures."""
    figure = f", {run.history[-1][2]}" if run.history else ""
    state = "dropped, and charged" if record.dropped else f"{record.survivors} survivors"
    text = f"round {record.round + 1}: {state}, ε = {run.server.epsilon:.4f}{figure}, {record.seconds:.1f} s"
    logging.getLogger("flwr").info("%s", text)


# -- clients -----------------------------------------------------------------------------------------------------------


def client_app(app: App, settings: Settings | None = None, *, folder: str = "") -> Any:
    """The ClientApp of an app. The node's configuration says which client it is, and where that client keeps its ledger.

    `partition-id` is the client's number; `folder` replaces the argument of that name.

    Args:
        app: of the run.
        settings: instead of its defaults; those of the run come last.
        folder: of the clients' own files; by default `dpkfc` below Flower's home.
    """
    made = _flwr("flwr.clientapp").ClientApp()
    flwr = "flwr.app"

    def answer(message: Any, context: Any) -> Any:
        record = _answer(app, message, context, settings=settings, place=folder)
        return _flwr(flwr).Message(record, reply_to=message)

    made.train()(answer)
    return made


def _answer(app: App, message: Any, context: Any, *, settings: Settings | None, place: str) -> Any:
    """The answer of the client that this node is, as a record; whatever fails becomes the constant reason."""
    number = -1
    asked: Message = {}
    try:
        node = context.node_config
        number = int(node["partition-id"])
        asked = from_record(message.content)
        chosen = app.settings(settings, dict(context.run_config))
        folder = str(node.get("folder", "")) or place or _home()
        return to_record(Node(app, chosen, number, folder).answer(asked))
    except Exception as error:
        logger.error("this client cannot answer (%s); has its node a partition-id?", type(error).__name__)
        return to_record(failure(number, asked))


def _home() -> str:
    return str(Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "dpkfc")


# -- simulation --------------------------------------------------------------------------------------------------------


def simulate(
    app: App,
    settings: Settings | None = None,
    *,
    folder: str | os.PathLike[str],
    on_round: OnRound | None = None,
    processes: int | None = None,
) -> Run:
    """Run an app on Flower's simulation engine: every client in a process of Ray's, with a ledger of its own on the disk.

    Args:
        app: of the run; its functions have to be importable, or small, since every message carries them.
        settings: instead of the app's defaults; "timeout" and "wait" are 900 s here.
        folder: of the run; the clients' own files lie below it.
        on_round: called after every round.
        processes: of clients at once; by default one a core.

    Raises:
        ImportError: Flower or Ray is not installed.
        TooFewClients: fewer clients answered than a round needs.
    """
    place = Path(folder).absolute()
    chosen = app.settings(_PATIENT, settings, {"folder": str(place)})
    clients = app.plan(chosen).config.clients
    simulation, runs = _flwr("flwr.simulation"), []  # type: ignore[var-annotated]
    backend = {
        "init_args": {
            "num_cpus": processes or os.cpu_count() or 1,
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
            "object_store_memory": _OBJECTS,
        },
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    with _silent():
        simulation.run_simulation(
            server_app=server_app(app, chosen, on_round=on_round, done=runs.append),
            client_app=client_app(app, chosen, folder=str(place / "clients")),
            num_supernodes=clients,
            backend_config=backend,
        )
    return runs[0]


@contextmanager
def _silent() -> Iterator[None]:
    """Flower's own messages below an error are left out while our progress is drawn."""
    found = logging.getLogger("flwr")
    before = found.level
    found.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="ray")  # Ray's hints about its next version
            yield
    finally:
        found.setLevel(before)
