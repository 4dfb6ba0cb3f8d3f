"""A client on a machine of its own: whatever has to outlive a process lies in its folder, and nothing of it is ever sent.

    ledger.jsonl    its own releases; the file is locked while a message is answered
    metric/         the preconditioner that the server sent, with its hash
    channel.key     the private key that the other clients seal their shares for, under secure aggregation
    state/          control variates of local methods; keys of a round, the shares it holds, the survivor set it answered for
    last_error.txt  what went wrong last, for the operator of this client; the server is told a constant

Engines start a process for every message, or several for one client in turn, so a client is built from its folder each time.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from dpkfc import checkpoint
from dpkfc.federated.agreement import KEY_BYTES, new_key
from dpkfc.federated.app import App, Settings
from dpkfc.federated.client import Client
from dpkfc.federated.messages import CLIENT_FAILED, Message, group
from dpkfc.federated.work import LocalModel

__all__ = ["HELLO", "Node", "failure"]

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
        if wanted in ("", local.digest) or group(message, "metric") or not place.exists():
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
