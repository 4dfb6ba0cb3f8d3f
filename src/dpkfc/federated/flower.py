"""Flower as the engine of a federated app, in simulation and on separate hosts.

Only this module imports flwr.

    server_app(app)   a `flwr.serverapp.ServerApp` whose main drives `Server`
    client_app(app)   a `flwr.clientapp.ClientApp` that answers with `Node`
    simulate(app)     both in Flower's simulation engine, on this machine

Flower carries messages and does nothing else: it samples no clients, adds no noise, counts no
survivors and sees no exception of dpkfc. Its telemetry, its search for updates and Ray's usage
statistics are off unless the environment says otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dpkfc import checkpoint
from dpkfc.checkpoint import StrPath
from dpkfc.data.loading import Collate
from dpkfc.federated.client import Client
from dpkfc.federated.key_exchange import TooFewKeys
from dpkfc.federated.local_model import LocalModel
from dpkfc.federated.messages import (
    CLIENT_FAILED,
    FLOATS,
    Message,
    Received,
    check_mapping,
    make_failure,
    select_prefix,
)
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.secure_aggregation import KEY_BYTES, new_key
from dpkfc.federated.server import Server
from dpkfc.federated.simulation import OnRound, SimulatedRun, federate, open_run
from dpkfc.gradients.clipped_sum import LossFn

# --------------------------------------------------------------------------------------------------
# A federated app holds what server and clients of a run have to agree on, as functions of public
# settings. Every process makes its own plan and model from the settings, and the contract
# (`messages.contract_of`) is compared before the first round. The same app runs inside one process
# (`App.here`), in an engine's simulation and on separate hosts.

Settings = Mapping[str, Any]
# Settings of the server: its folder, seconds that a message may take, seconds to wait for clients.
SERVER: dict[str, Any] = {"folder": "", "timeout": 120.0, "wait": 120.0}


@dataclass(frozen=True)
class App:
    """What is trained, on which data, with which guarantee.

    Every process calls the functions, and they return the same each time.

    Attributes:
        plan: settings to the plan. On hosts with different libraries give the noise by
            `with_noise`: a calibration may differ in its last digit, and then the clients are
            refused.
        model: settings to the model; weights that are not trained are part of the contract.
        loss_fn: maps (model, batch) to one loss per example.
        records: (number of a client, settings) to its own records; called only on that client's
            machine.
        defaults: settings that a run may change, with their values: numbers, texts and truth
            values.
        evaluate: (model, settings) to a plain figure for `Run.history`, on data of no client; None
            for no figure.
        finish: (run, settings, folder) writes what a finished run leaves; None for nothing.
        collate_fn: maps a list of examples to a batch.
    """

    plan: Callable[[Settings], FederatedPlan]
    model: Callable[[Settings], nn.Module]
    loss_fn: LossFn
    records: Callable[[int, Settings], Any]
    defaults: Settings = field(default_factory=dict, hash=False)
    evaluate: Callable[[nn.Module, Settings], Any] | None = None
    finish: Callable[[SimulatedRun, Settings, Path], None] | None = None
    collate_fn: Collate | None = None

    def settings(self, *given: Settings | None) -> dict[str, Any]:
        """Return the defaults, replaced by given settings; later ones win.

        Raises:
            ValueError: an unknown name, or a value of a type that the default has not.
        """
        defaults = {**SERVER, **self.defaults}
        chosen = dict(defaults)
        for values in given:
            for name, value in (values or {}).items():
                if name not in defaults:
                    raise ValueError(
                        f"unknown setting {name!r} of the federated app; it has "
                        f"{', '.join(sorted(defaults))}"
                    )
                chosen[name] = _convert(name, value, defaults[name])
        return chosen

    def bind_evaluate(self, settings: Settings) -> Callable[[nn.Module], Any] | None:
        """Return `evaluate` as a function of the model alone."""
        evaluate = self.evaluate
        if evaluate is None:
            return None
        return lambda model: evaluate(model, settings)

    def here(
        self,
        settings: Settings | None = None,
        *,
        folder: str | Path,
        on_round: OnRound | None = None,
    ) -> SimulatedRun:
        """Run the app inside this process; continue an interrupted run after its last round.

        Args:
            settings: in place of the defaults.
            folder: of the server's ledger, its checkpoint and what `finish` writes.
            on_round: called after every round.

        Raises:
            BudgetExhausted: the ledger in the folder holds all rounds.
            ValueError: as `federate`.
        """
        chosen = self.settings(settings)
        folder = Path(folder)
        plan = self.plan(chosen)
        folder.mkdir(parents=True, exist_ok=True)
        run = federate(
            plan,
            self.model(chosen),
            self.loss_fn,
            [self.records(number, chosen) for number in range(plan.config.clients)],
            ledger_path=folder / "ledger.jsonl",
            checkpoint=folder / "checkpoint",
            resume=checkpoint.exists(folder / "checkpoint"),
            evaluate=self.bind_evaluate(chosen),
            on_round=on_round,
            collate_fn=self.collate_fn,
        )
        if self.finish is not None:
            self.finish(run, chosen, folder)
        return run


def _convert(name: str, value: Any, default: Any) -> Any:
    """Return a setting as the type of its default; an integer may stand for a float."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ValueError(f"the setting {name!r} is of type {type(default).__name__}, got {value!r}")
    return value


# --------------------------------------------------------------------------------------------------
# A client on its own machine. All that has to outlive a process lies in the client's folder, which
# is never sent.
#
#     ledger.jsonl    its own releases; the file is locked while a message is answered
#     metric/         the preconditioner that the server sent, with its hash
#     channel.key     the private key that the other clients seal their shares for
#     state/          keys of a round, shares of others, the answered survivor set
#     last_error.txt  the last error, for the operator of this client; the server gets a constant
#
# Engines start a process for every message, or several for one client in turn, so a client is built
# from its folder each time.

HELLO: Message = {"kind": "hello"}
_FrozenSettings = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=8)
def _local_model(app: App, frozen: _FrozenSettings) -> LocalModel:
    """Return the one model of a process; every message loads its parameters."""
    settings = dict(frozen)
    return LocalModel(app.plan(settings), app.model(settings), app.loss_fn)


@lru_cache(maxsize=256)
def _records(app: App, frozen: _FrozenSettings, number: int) -> Any:
    return app.records(number, dict(frozen))


def _channel_key(path: Path) -> bytes:
    """Return the client's private channel key; make a file that only its owner can read.

    Raises:
        ValueError: a file of another length.
    """
    if not path.exists():
        checkpoint.place_file(path, lambda part: part.write_bytes(new_key()), private=True)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"{path.name} has {len(key)} bytes and a channel key has {KEY_BYTES}; delete the file "
            "and start anew"
        )
    return key


class Node:
    """A client of an app and its folder.

    Args:
        app: of the run.
        settings: all of them, from `App.settings`.
        number: of the client.
        folder: of this client. Each plan has its own folder below it, so budgets of several plans
            add up.
    """

    def __init__(self, app: App, settings: Settings, number: int, folder: StrPath) -> None:
        self.app = app
        self.number = number
        self._settings: _FrozenSettings = tuple(sorted(settings.items()))
        self._folder = Path(folder).expanduser() / f"client-{number}"

    def answer(self, message: Received) -> Message:
        """Return the answer to a server's message; never raise."""
        contract = ""
        try:
            check_mapping(message)
            local = _local_model(self.app, self._settings)
            contract = local.contract
            folder = self._make_folder() / local.plan.hash[:16]
            folder.mkdir(exist_ok=True, mode=0o700)
            client = self._open_client(local, folder)
            try:
                return self._answer(client, message, folder)
            finally:
                client.close()
        except Exception as error:
            self._write_error(error)
            return make_failure(self.number, message, contract)

    def _open_client(self, local: LocalModel, folder: Path) -> Client:
        channel = None
        if local.plan.config.privacy.masked:
            channel = _channel_key(folder / "channel.key")
        client = Client(
            self.number,
            local.plan,
            local,
            _records(self.app, self._settings, self.number),
            collate_fn=self.app.collate_fn,
            ledger_path=folder / "ledger.jsonl",
            channel=channel,
        )
        if checkpoint.exists(folder / "state"):
            client.load_state_dict(checkpoint.read(folder / "state")[1]["state"])
        return client

    def _answer(self, client: Client, message: Received, folder: Path) -> Message:
        if message.get("kind") == HELLO["kind"]:
            return client.hello()
        self._load_metric(client.local, message, folder / "metric")
        answer = client.answer(message)
        if client.last_error is not None:
            self._write_error(client.last_error)
        state = client.state_dict()
        # The state must be on the disk before the answer leaves.
        if any(state[name] for name in ("keys", "shares")):
            checkpoint.write(folder / "state", {}, {"state": state}, private=True)
        if answer["kind"] == "sum":
            self._save_metric(client.local, message, folder / "metric")
        return answer

    def _load_metric(self, local: LocalModel, message: Received, folder: Path) -> None:
        """Load the stored preconditioner if the server sent none and this process lacks it."""
        wanted = message.get("metric_digest", "")
        if wanted in ("", local.digest) or select_prefix(message, "metric") or not folder.exists():
            return
        tensors, meta = checkpoint.read(folder)
        if meta.get("digest") == wanted:
            state: dict[str, Tensor] = dict(tensors.get("metric", {}))
            local.take_metric(state)

    def _save_metric(self, local: LocalModel, message: Received, folder: Path) -> None:
        wanted = message.get("metric_digest", "")
        current = local.coordinates.current
        if wanted == "" or current is None:
            return
        if not folder.exists() or checkpoint.read(folder)[1].get("digest") != wanted:
            checkpoint.write(folder, {"metric": current.state_dict()}, {"digest": wanted})

    def _make_folder(self) -> Path:
        """Return the client's folder; `mkdir` sets a mode for the last folder only."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._folder

    def _write_error(self, error: BaseException) -> None:
        """Write an error for this client's operator; say nothing if the file cannot be written."""
        with suppress(OSError):
            path = self._make_folder() / "last_error.txt"
            path.touch(0o600)
            path.write_text("".join(traceback.format_exception(error)), "utf-8")


# --------------------------------------------------------------------------------------------------
# The rounds of a server with remote clients. An engine is a `Transport`: it knows which nodes are
# connected and carries messages to them. `Roster` and `Server` decide which node is which client,
# who takes part and who survives; the engine does not.

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
                " the model, or use App.here. Nothing was charged"
            )


# --------------------------------------------------------------------------------------------------

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PLAIN, TENSORS = "plain", "tensors"
_KINDS = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
_DTYPES = {"float32", "float64", "int64", "int32", "uint8", "bool"}
# Most characters of a text in a message.
_MAX_TEXT = 256
_OBJECT_STORE_BYTES = 200 * 2**20
# No client leaves a simulation, and a busy machine starts Ray slowly.
_SIMULATION_WAITS = {"timeout": 900.0, "wait": 900.0}
logger = logging.getLogger(__name__)


class Unreachable(RuntimeError):
    """The SuperLink does not answer."""


def disable_telemetry() -> None:
    """Switch telemetry off unless the environment says otherwise, before flwr is imported."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


def _import_flwr(name: str) -> Any:
    """Return a module of flwr.

    Raises:
        ImportError: flwr is not installed.
    """
    disable_telemetry()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Flower is not installed ({error.name} is missing): pip install '.[federated]', "
            "with Python 3.11 or later"
        ) from None


def check_installed() -> None:
    """Check that Flower and its simulation are installed.

    Raises:
        ImportError: with what to install.
    """
    _import_flwr("flwr")
    if importlib.util.find_spec("ray") is None:
        raise ImportError(
            "Flower's simulation is not installed (ray is missing): pip install '.[federated]'"
        )


# -- messages --------------------------------------------------------------------------------------


def encode_record(message: Received, arrays_by_id: dict[int, Any] | None = None) -> Any:
    """Return a message as a RecordDict: an ArrayRecord of tensors, a ConfigRecord of the rest.

    Args:
        message: of `dpkfc.federated.messages`.
        arrays_by_id: arrays by the id of their tensor, for messages that share tensors and live as
            long.

    Raises:
        ValueError: a value that no message has.
    """
    flwr = _import_flwr("flwr.app")
    known = arrays_by_id if arrays_by_id is not None else {}
    plain = {}
    arrays = {}
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


def decode_record(record: Any) -> Message:
    """Return the message in a RecordDict; its receiver decides what the message may hold.

    Raises:
        ValueError: other records, values of other types, or an array whose bytes do not fit its
            header.
    """
    flwr = _import_flwr("flwr.app")
    kinds = {name: type(part) for name, part in record.items()}
    if kinds != {PLAIN: flwr.ConfigRecord, TENSORS: flwr.ArrayRecord}:
        raise ValueError("other records than a message has")
    message: Message = {}
    for name, value in record[PLAIN].items():
        if type(value) not in (int, str) or len(str(value)) > _MAX_TEXT:
            raise ValueError("a value that no message has")
        message[name] = value
    for name, array in record[TENSORS].items():
        if name in message:
            raise ValueError("a name that is there twice")
        message[name] = _tensor(array)
    return message


def _tensor(array: Any) -> Tensor:
    """Return the tensor of a NumPy array; its header does not decide how much is allocated."""
    if array.stype != "numpy.ndarray":
        raise ValueError("an array of another format")
    stream = BytesIO(array.data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("another version")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    # A stranger's bytes can raise any exception in the parser.
    except Exception:
        raise ValueError("an array of another format") from None
    numbers = array.data[stream.tell() :]
    is_plain = not fortran and dtype.name in _DTYPES and dtype.isnative
    if not is_plain or math.prod(shape) * dtype.itemsize != len(numbers):
        raise ValueError("an array whose bytes are not what it says")
    return torch.from_numpy(np.frombuffer(numbers, dtype).reshape(shape).copy())


# -- server ----------------------------------------------------------------------------------------


class _Grid:
    """Flower's grid as a `Transport`."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def nodes(self) -> list[int]:
        """Return the connected SuperNodes."""
        with _report_unreachable():
            return sorted(self._grid.get_node_ids())

    def ask(
        self, requests: Mapping[int, Message], timeout: float
    ) -> Iterable[tuple[int, Message | None]]:
        """Return the answers in time; Flower's own error reports count as absences."""
        flwr = _import_flwr("flwr.app")
        arrays_by_id: dict[int, Any] = {}
        messages = []
        for node, request in requests.items():
            record = encode_record(request, arrays_by_id)
            group = str(request.get("round", "hello"))
            messages.append(flwr.Message(record, node, "train", ttl=timeout, group_id=group))
        with _report_unreachable():
            replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if reply.has_content():
                message = None
                # The server counts an unreadable message.
                with suppress(Exception):
                    message = decode_record(reply.content)
                yield reply.metadata.src_node_id, message


@contextmanager
def _report_unreachable() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Unreachable(
            f"the SuperLink does not answer ({type(error).__name__}); ledger and checkpoint are on"
            " the disk: start the SuperLink and this run again to resume"
        ) from error


def server_app(
    app: App,
    settings: Settings | None = None,
    *,
    on_round: OnRound | None = None,
    done: Callable[[SimulatedRun], None] | None = None,
) -> Any:
    """Return the ServerApp of an app. Settings of `flwr run --run-config` win.

    Args:
        app: of the run.
        settings: in place of the app's defaults.
        on_round: called after every round; None writes one line to the log.
        done: called with the finished run.
    """
    server = _import_flwr("flwr.serverapp").ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        chosen = app.settings(settings, dict(context.run_config))
        run = serve(app, chosen, _Grid(grid), on_round=on_round or _log_round)
        if done is not None:
            done(run)

    return server


def _log_round(record: Any, run: SimulatedRun) -> None:
    """Log one line of public figures."""
    figure = f", {run.history[-1][2]}" if run.history else ""
    state = f"{record.survivors} survivors"
    if record.dropped:
        state = "dropped, and charged"
    elif record.survivors is None:
        state = "released"
    logging.getLogger("flwr").info(
        "%s", f"round {record.round + 1}: {state}, ε = {run.server.epsilon:.4f}{figure}"
    )


# -- clients ---------------------------------------------------------------------------------------


def client_app(app: App, settings: Settings | None = None, *, folder: str = "") -> Any:
    """Return the ClientApp of an app.

    The configuration of a node says which client it is and where its ledger is.

    `partition-id` is the client's number; `folder` replaces the argument of that name.

    Args:
        app: of the run.
        settings: in place of the app's defaults; settings of the run win.
        folder: of the clients' own files; by default `dpkfc` below Flower's home.
    """
    client = _import_flwr("flwr.clientapp").ClientApp()

    def answer(message: Any, context: Any) -> Any:
        """Return the answer of this node's client; an error becomes the constant reason."""
        number = -1
        request: Message = {}
        try:
            node = context.node_config
            number = int(node["partition-id"])
            request = decode_record(message.content)
            chosen = app.settings(settings, dict(context.run_config))
            own_folder = str(node.get("folder", "")) or folder or _home_folder()
            record = encode_record(Node(app, chosen, number, own_folder).answer(request))
        except Exception as error:
            logger.error(
                "this client cannot answer (%s); has its node a partition-id?", type(error).__name__
            )
            record = encode_record(make_failure(number, request))
        return _import_flwr("flwr.app").Message(record, reply_to=message)

    client.train()(answer)
    return client


def _home_folder() -> str:
    return str(Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "dpkfc")


# -- simulation ------------------------------------------------------------------------------------


def simulate(
    app: App,
    settings: Settings | None = None,
    *,
    folder: StrPath,
    on_round: OnRound | None = None,
    processes: int | None = None,
) -> SimulatedRun:
    """Run an app on Flower's simulation engine, every client in a Ray process.

    Args:
        app: of the run; its functions have to be importable, or small, because every message
            carries them.
        settings: in place of the app's defaults; "timeout" and "wait" are 900 s here.
        folder: of the run; the clients' own files lie below it.
        on_round: called after every round.
        processes: clients that run at the same time; by default one per core.

    Raises:
        ImportError: Flower or Ray is not installed.
        TooFewClients: fewer clients answered than a round needs.
    """
    folder = Path(folder).absolute()
    chosen = app.settings(_SIMULATION_WAITS, settings, {"folder": str(folder)})
    clients = app.plan(chosen).config.clients
    simulation = _import_flwr("flwr.simulation")
    runs: list[SimulatedRun] = []
    backend = {
        "init_args": {
            "num_cpus": processes or os.cpu_count() or 1,
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
            "object_store_memory": _OBJECT_STORE_BYTES,
        },
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    with _silence_flower():
        simulation.run_simulation(
            server_app=server_app(app, chosen, on_round=on_round, done=runs.append),
            client_app=client_app(app, chosen, folder=str(folder / "clients")),
            num_supernodes=clients,
            backend_config=backend,
        )
    return runs[0]


@contextmanager
def _silence_flower() -> Iterator[None]:
    """Leave out Flower's own messages below an error while progress is drawn."""
    flower_logger = logging.getLogger("flwr")
    before = flower_logger.level
    flower_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Ray warns about its next version.
            warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
            yield
    finally:
        flower_logger.setLevel(before)
