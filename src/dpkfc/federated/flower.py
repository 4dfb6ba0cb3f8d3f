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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.federated.app import App, Settings
from dpkfc.federated.drive import OnRound, serve
from dpkfc.federated.messages import Message
from dpkfc.federated.node import Node, failure
from dpkfc.federated.runner import Run

__all__ = [
    "SWITCHES",
    "Unreachable",
    "check_installed",
    "client_app",
    "from_record",
    "quiet_environment",
    "server_app",
    "simulate",
    "to_record",
]

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
