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
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.checkpoint import StrPath
from dpkfc.federated.app import App, Settings
from dpkfc.federated.messages import Message, Received, make_failure
from dpkfc.federated.node import Node
from dpkfc.federated.remote_rounds import serve
from dpkfc.federated.runs import OnRound, SimulatedRun

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
    figure = f", evaluation {run.history[-1][2]}" if run.history else ""
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
        ValueError: the path of Python has a space, with which Ray's workers do not start.
        TooFewClients: fewer clients answered than a round needs.
    """
    if len(sys.executable.split()) > 1:
        raise ValueError(
            f"Ray does not start workers where the path of Python has a space: {sys.executable};"
            " make the environment in another folder"
        )
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
