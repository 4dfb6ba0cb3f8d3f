"""A client on a machine of its own: whatever has to outlive a process lies in its folder, and nothing of it is ever sent.

    ledger.jsonl    its own releases; the file is locked while a message is answered
    metric/         the preconditioner that the server sent, with its hash
    state/          control variates of local methods; the secret of its own mask, and the survivor set that it answered for
    last_error.txt  what went wrong last, for the operator of this client; the server is told a constant

Engines start a process for every message, or several for one client in turn, so a client is built from its folder each time.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from dpkfc import checkpoint
from dpkfc.federated.app import App, Settings
from dpkfc.federated.client import Client
from dpkfc.federated.messages import CLIENT_FAILED, Message, group
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.secagg import Pairs
from dpkfc.federated.work import LocalModel

__all__ = ["HELLO", "Node", "failure", "new_secret"]

HELLO: Message = {"kind": "hello"}
_SHORTEST = 32  # bytes of a secret
_Chosen = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=8)
def _local(app: App, chosen: _Chosen) -> LocalModel:
    """One model a process; every message loads its parameters anew."""
    settings = dict(chosen)
    return LocalModel(app.plan(settings), app.model(settings), app.loss_fn)


@lru_cache(maxsize=256)
def _records(app: App, chosen: _Chosen, number: int) -> Any:
    return app.records(number, dict(chosen))


def new_secret(path: str | os.PathLike[str]) -> Path:
    """A file with a new secret of a run, readable by its owner; the clients share it, the server never sees it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(_SHORTEST))
    return target


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
        secret: file with the secret that the clients share, for secure aggregation; a new one for every run.
    """

    def __init__(
        self, app: App, settings: Settings, number: int, folder: str | os.PathLike[str], secret: str | os.PathLike[str] = ""
    ) -> None:
        self.app, self.number, self._secret = app, number, secret
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
            pairs=self._pairs(local.plan),
        )
        if (place / "state").exists() or (place / "state.old").exists():
            client.load_state_dict(checkpoint.read(place / "state")[1]["state"])
        return client

    def _pairs(self, plan: FederatedPlan) -> Pairs | None:
        """Seeds of this plan: masks of two plans under one secret must not be the same."""
        if not plan.config.privacy.masked:
            return None
        if not self._secret:
            raise ValueError("secure aggregation needs the file of the secret that the clients share (pairs-secret)")
        secret = Path(self._secret).expanduser().read_bytes().strip()
        if len(secret) < _SHORTEST:
            raise ValueError(f"the secret of the clients has {len(secret)} bytes and needs {_SHORTEST}; make it anew")
        return Pairs(hashlib.sha256(secret + plan.hash.encode()).digest())

    def _answered(self, client: Client, message: Mapping[str, Any], place: Path) -> Message:
        if message.get("kind") == HELLO["kind"]:
            return client.hello()
        self._bring_metric(client.local, message, place / "metric")
        answer = client.answer(message)
        if client.last_error is not None:
            self._note(client.last_error)
        state = client.state_dict()
        if any(state[name] for name in ("control", "last", "own")):  # on the disk before the answer leaves
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
