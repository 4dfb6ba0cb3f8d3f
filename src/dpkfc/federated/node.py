"""A client on its own machine.

All that has to outlive a process lies in the client's folder, which is never sent.

    ledger.jsonl    its own releases; the file is locked while a message is answered
    metric/         the preconditioner that the server sent, with its hash
    channel.key     the private key that the other clients seal their shares for
    state/          keys of a round, shares of others, the answered survivor set
    last_error.txt  the last error, for the operator of this client; the server gets a constant

Engines start a process for every message, or several for one client in turn, so a client is built
from its folder each time.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from dpkfc import checkpoint
from dpkfc.checkpoint import StrPath
from dpkfc.federated.app import App, Settings
from dpkfc.federated.client import Client
from dpkfc.federated.key_agreement import KEY_BYTES, new_key
from dpkfc.federated.local_model import LocalModel
from dpkfc.federated.messages import (
    HELLO,
    Message,
    Received,
    check_mapping,
    make_failure,
    select_prefix,
)

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
        if any(state.values()):
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
