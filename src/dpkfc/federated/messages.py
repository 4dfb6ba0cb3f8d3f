"""Messages: flat dictionaries of tensors, numbers and texts, and the list of what may be in them.

Nothing but the sum and constants of the plan leaves a client: no number of examples, no loss, no accuracy, no text of an error.
Whatever is not on the list makes a message invalid, and invalid messages are counted and dropped.

    server → client   keys        round, contract, cohort, channels                          secure aggregation alone
                      round       round, contract, theta/*, extra/*, extra_round, metric_digest, metric_step, metric/*
                                  cohort, channels                                           secure aggregation alone
                                  mask_keys, sealed                                          where keys were requested
                      unmask      round, contract, survivors                                 secure aggregation alone
    client → server   hello       contract, client, key                                      key: secure aggregation alone
                      keys        round, contract, client, key, sealed
                      sum         round, contract, client, sum/*
                      shares      round, contract, client, shares                            of a survivor
                      error       round, contract, client, reason

Keys and sealed shares are bytes, one row a client, in the order of `cohort`. The `key` of a hello is the client's public channel
key, and that of `keys` its public mask key. `sealed` holds what the client sealed for the others, or the others for the client.
`extra` is what the rule shares, and `extra_round` the number of the round it was made in: the last one with a release.
Rounds are numbered by the ledger: a round that was charged and lost has a number of its own, so none is ever asked for twice.
`contract` is the hash of the plan and of the model that both sides were started with.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpkfc.federated.secure_aggregation import KEY_BYTES, SEALED_BYTES, SHARE_BYTES

Value = Tensor | bytes | int | float | str
Message = dict[str, Value]
Shapes = dict[str, tuple[int, ...]]
CLIENT_FAILED = "client-failed"
CONTRACT_DIFFERS, METRIC_DIFFERS, METRIC_MISSING = "contract-differs", "metric-differs", "metric-missing"
REPEATED, SPENT = "repeated-round", "budget-spent"
REASONS = (CLIENT_FAILED, CONTRACT_DIFFERS, METRIC_DIFFERS, METRIC_MISSING, REPEATED, SPENT)
_PLAIN: dict[str, dict[str, type]] = {
    "hello": {"contract": str, "client": int},
    "keys": {"round": int, "contract": str, "client": int},
    "sum": {"round": int, "contract": str, "client": int},
    "shares": {"round": int, "contract": str, "client": int},
    "error": {"round": int, "contract": str, "client": int, "reason": str},
}
_Types = tuple[torch.dtype, ...]
_Fields = dict[str, tuple[_Types, tuple[int, ...]]]  # name of a tensor to its types and its shape
FLOATS: _Types = (torch.float32, torch.float64)  # that are sent
_INTEGERS: _Types = (torch.int64,)
_BYTES: _Types = (torch.uint8,)


def shapes_of(model: nn.Module) -> Shapes:
    """Trainable parameter name to shape."""
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def contract_of(plan_hash: str, model: nn.Module) -> str:
    """SHA-256 of the plan, the names, shapes and types of trained parameters, and the values of everything frozen.

    Clients compare it at the start: another plan, another model or other pre-trained weights are found before a round.
    """
    digest = hashlib.sha256(plan_hash.encode())
    trained = shapes_of(model)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    for name, shape in sorted(trained.items()):
        digest.update(f"{name} {shape} {dtypes[name]}\n".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if name not in trained:
            x = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
            digest.update(x.flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return digest.hexdigest()


def flat(prefix: str, tensors: Mapping[str, Tensor]) -> Message:
    """Tensors under `prefix/name`."""
    return {f"{prefix}/{name}": x for name, x in tensors.items()}


def group(message: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, by name."""
    start = prefix + "/"
    return {key[len(start) :]: x for key, x in message.items() if key.startswith(start)}


def to_tensor(text: bytes) -> Tensor:
    """Bytes as a tensor of uint8."""
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor of uint8."""
    return tensor.numpy().tobytes()


def stack_rows(rows: Mapping[int, bytes]) -> Tensor:
    """Texts of one length as rows of uint8, in the order of their clients' numbers."""
    return to_tensor(b"".join(rows[client] for client in sorted(rows))).view(len(rows), -1)


def split_rows(tensor: Tensor, clients: Sequence[int]) -> dict[int, bytes]:
    """Client to its row of uint8.

    Raises:
        ValueError: another number of rows than clients.
    """
    return {client: to_bytes(row) for client, row in zip(clients, tensor, strict=True)}


def problem(
    message: Mapping[str, Any],
    shapes: Shapes,
    contract: str,
    *,
    most: float = math.inf,
    masked: bool = False,
    rows: int = 0,
) -> str | None:
    """Why a client's message is not valid, in one word that depends on no value but finiteness and size; None where it is.

    Args:
        message: as it came.
        shapes: of the trained parameters.
        contract: of this run.
        most: largest norm of a sum; no honest client can exceed it.
        masked: whether sums are masked integers, and keys are exchanged.
        rows: clients that keys or shares are sent for.
    """
    kind = message.get("kind")
    wanted = _PLAIN.get(kind) if isinstance(kind, str) else None
    if wanted is None or not all(isinstance(key, str) for key in message):
        return "unknown-kind"
    if kind in ("keys", "shares") and not masked:
        return "unknown-kind"
    tensors = _tensors(str(kind), shapes, masked, rows)
    reasons = (
        (lambda: set(message) != {"kind", *wanted, *tensors}, "other-fields"),
        (lambda: any(type(message[name]) is not of for name, of in wanted.items()), "wrong-type"),
        (lambda: message["contract"] != contract, "other-contract"),
        (lambda: kind == "error" and message["reason"] not in REASONS, "other-reason"),
        (lambda: not all(isinstance(message[name], Tensor) for name in tensors), "wrong-type"),
        (lambda: not all(message[name].dtype in types for name, (types, _) in tensors.items()), "wrong-type"),
        (lambda: not all(tuple(message[name].shape) == shape for name, (_, shape) in tensors.items()), "wrong-shape"),
    )
    reason = next((word for applies, word in reasons if applies()), None)
    if reason is not None or kind != "sum" or masked:
        return reason
    norm = math.hypot(*(float(torch.linalg.vector_norm(message[name])) for name in tensors))
    if not math.isfinite(norm):
        return "not-finite"
    return "oversized" if norm > most else None


def _tensors(kind: str, shapes: Shapes, masked: bool, rows: int) -> _Fields:
    """Types and shape of every tensor of a client's message."""
    if kind == "sum":
        types = _INTEGERS if masked else FLOATS
        return {f"sum/{name}": (types, shape) for name, shape in shapes.items()}
    if not masked or kind == "error":
        return {}
    key: _Fields = {"key": (_BYTES, (KEY_BYTES,))}
    fields: dict[str, _Fields] = {
        "hello": key,
        "keys": {**key, "sealed": (_BYTES, (rows, SEALED_BYTES))},
        "shares": {"shares": (_BYTES, (rows, SHARE_BYTES))},
    }
    return fields[kind]


# --------------------------------------------------------------------------------------------------
# What a server stores of the keys of a round before the round is charged, under secure aggregation.


class TooFewKeys(RuntimeError):
    """Fewer clients sent keys for a round than it needs; nothing was charged for it."""


@dataclass
class KeyExchange:
    """The keys of a round that is not charged yet, under secure aggregation.

    In a round without recovery no client is asked: all pairs of `cohort` mask with their channel keys.

    Attributes:
        number: of the round.
        sampled: clients that the round was drawn for.
        channels: client of `sampled` that is enrolled to its public channel key.
        recovers: whether clients are asked for keys and shares, so that the sum survives lost clients.
        keys: client that answered to its public mask key.
        sealed: client that answered to what it sealed for each client that was asked.
        failed: clients that refused.
        rejected: reason to number of messages that were not valid.
    """

    number: int
    sampled: tuple[int, ...]
    channels: dict[int, bytes]
    recovers: bool = True
    keys: dict[int, bytes] = field(default_factory=dict)
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    rejected: Counter[str] = field(default_factory=Counter)

    @property
    def cohort(self) -> tuple[int, ...]:
        """Clients that are asked for keys."""
        return tuple(self.channels)

    @property
    def ready(self) -> list[int]:
        """Clients that can mask a sum, sorted."""
        return sorted(self.keys if self.recovers else self.channels)

    def problem(self, message: Mapping[str, Any], enrolled: Collection[int]) -> str | None:
        """Why a valid message does not count among the keys; None where it does."""
        client = message["client"]
        reasons = (
            (message["kind"] not in ("keys", "error"), "no-round"),
            (client not in self.channels or client not in enrolled, "unknown-client"),
            (message.get("round") != self.number, "stale"),
            (client in self.keys or client in self.failed, "duplicate"),
        )
        return next((reason for applies, reason in reasons if applies), None)

    def take(self, message: Mapping[str, Any]) -> None:
        """Store a client's valid keys."""
        client = message["client"]
        self.keys[client] = to_bytes(message["key"])
        self.sealed[client] = split_rows(message["sealed"], self.cohort)

    def requests(self, contract: str, needed: int) -> dict[int, Message]:
        """Make the requests for keys, client to message; none where fewer clients are there than a round needs."""
        if len(self.channels) < needed:
            return {}
        cohort = torch.tensor(self.cohort, dtype=torch.int64)
        request: Message = {"kind": "keys", "round": self.number, "contract": contract, "cohort": cohort}
        return dict.fromkeys(self.channels, request | {"channels": stack_rows(self.channels)})

    def ready_clients(self, needed: int) -> tuple[int, ...]:
        """Return the clients that can mask a sum; none where fewer were drawn than a round needs.

        Raises:
            TooFewKeys: enough clients were drawn, and fewer than a round needs have keys.
        """
        if len(self.ready) >= needed:
            return tuple(self.ready)
        if len(self.sampled) < needed:
            return ()
        raise TooFewKeys(
            f"{len(self.ready)} of {len(self.sampled)} clients sent keys and round {self.number} needs {needed}; "
            "nothing was charged. Call request_keys again"
        )

    def round_fields(self, client: int) -> Message:
        """What a client needs to mask its sum: the clients of the round and their keys, and what they sealed for it."""
        cohort = torch.tensor(self.ready, dtype=torch.int64)
        fields: Message = {"cohort": cohort, "channels": stack_rows({other: self.channels[other] for other in self.ready})}
        if self.recovers:
            sealed = stack_rows({other: self.sealed[other][client] for other in self.ready})
            fields |= {"mask_keys": stack_rows(self.keys), "sealed": sealed}
        return fields
