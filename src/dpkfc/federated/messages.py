"""Messages: flat dictionaries of tensors, numbers and texts, and the list of what they may hold.

Only the sum and constants of the plan leave a client: no number of examples, no loss, no accuracy,
no text of an error. A message with anything that is not on the list is invalid. Invalid messages
are counted and dropped.

    server → client
        keys     round, contract, cohort, channels      secure aggregation only
        round    round, contract, theta/*, metric_digest, metric_step, metric/*
                 cohort, channels                       secure aggregation only
                 mask_keys, sealed                      where keys were requested
        unmask   round, contract, survivors             secure aggregation only
    client → server
        hello    contract, client, key                  key: secure aggregation only
        keys     round, contract, client, key, sealed
        sum      round, contract, client, sum/*
        shares   round, contract, client, shares        of a survivor
        error    round, contract, client, reason

Keys and sealed shares are bytes, one row a client, in the order of `cohort`. The `key` of a hello
is the client's public channel key, and the `key` of `keys` its public mask key. `sealed` holds what
the client sealed for the others, or the others for the client. The ledger numbers the rounds. A
round that was charged and lost keeps its number, so no round is requested twice. `contract` is the
hash of the plan and of the model that both sides were started with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.federated.key_agreement import KEY_BYTES, ByClient
from dpkfc.federated.secure_aggregation import SEALED_BYTES
from dpkfc.federated.shamir import SHARE_BYTES
from dpkfc.tensors import NamedTensors

Value = Tensor | bytes | int | float | str
Message = dict[str, Value]
# A message that was not checked yet.
Received = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
HELLO: Message = {"kind": "hello"}
CLIENT_FAILED = "client-failed"
CONTRACT_DIFFERS = "contract-differs"
METRIC_DIFFERS = "metric-differs"
METRIC_MISSING = "metric-missing"
REPEATED = "repeated-round"
SPENT = "budget-spent"
REASONS = (CLIENT_FAILED, CONTRACT_DIFFERS, METRIC_DIFFERS, METRIC_MISSING, REPEATED, SPENT)


class Refusal(Exception):
    """Refuses a round, with one of the constant reasons above."""


# Names of plain values to their types.
Plain = dict[str, type]
_OF_CLIENT: Plain = {"contract": str, "client": int}
_OF_ROUND = {"round": int, **_OF_CLIENT}
_PLAIN = {
    "hello": _OF_CLIENT,
    "keys": _OF_ROUND,
    "sum": _OF_ROUND,
    "shares": _OF_ROUND,
    "error": {**_OF_ROUND, "reason": str},
}
_Types = tuple[torch.dtype, ...]
# Name of a tensor to its permitted types and its shape.
_Fields = dict[str, tuple[_Types, tuple[int, ...]]]
# Types of parameters that are sent.
FLOATS: _Types = (torch.float32, torch.float64)
_INTEGERS: _Types = (torch.int64,)
_BYTES: _Types = (torch.uint8,)


def add_prefix(prefix: str, tensors: NamedTensors) -> Message:
    """Return tensors under the names `prefix/name`."""
    return {f"{prefix}/{name}": x for name, x in tensors.items()}


def select_prefix(message: Received, prefix: str) -> dict[str, Tensor]:
    """Return the tensors under a prefix, by their names without it."""
    start = prefix + "/"
    tensors = {}
    for key, x in message.items():
        if key.startswith(start):
            tensors[key.removeprefix(start)] = x
    return tensors


def check_mapping(message: Any) -> None:
    """Check that a message has names and values; what it may hold is checked elsewhere.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(message, Mapping):
        raise ValueError(
            f"a message must be a dictionary, got {type(message).__name__}; hand on what the server"
            " made for this client"
        )


def make_failure(
    client: int, message: Received, contract: str = "", reason: str = CLIENT_FAILED
) -> Message:
    """Return the answer of a client that does not answer a message: a constant reason.

    It names the round that the message claims to belong to, or -1.
    """
    number = message.get("round") if isinstance(message, Mapping) else None
    return {
        "kind": "error",
        "round": number if type(number) is int else -1,
        "contract": contract,
        "client": client,
        "reason": reason,
    }


def to_tensor(text: bytes) -> Tensor:
    """Return bytes as a tensor of uint8."""
    numbers = np.frombuffer(text, np.uint8)
    return torch.from_numpy(numbers.copy())


def to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor of uint8."""
    return tensor.numpy().tobytes()


def stack_rows(rows: ByClient) -> Tensor:
    """Return texts of one length as rows of uint8, in the order of their clients' numbers."""
    texts = [rows[client] for client in sorted(rows)]
    joined = to_tensor(b"".join(texts))
    return joined.view(len(rows), -1)


def split_rows(tensor: Tensor, clients: Sequence[int]) -> dict[int, bytes]:
    """Return the bytes of each client's row, by client.

    Raises:
        ValueError: the numbers of rows and clients differ.
    """
    rows = zip(clients, tensor, strict=True)
    return {client: to_bytes(row) for client, row in rows}


def find_problem(
    message: Received,
    shapes: Shapes,
    contract: str,
    *,
    max_norm: float = math.inf,
    masked: bool = False,
    rows: int = 0,
) -> str | None:
    """Return one word that says why a client's message is not valid; None for a valid message.

    The word depends on no value of a tensor but finiteness and norm.

    Args:
        message: as it came.
        shapes: of the trained parameters.
        contract: of this run.
        max_norm: largest norm of a sum; no honest client can exceed it.
        masked: whether sums are masked integers, and keys are exchanged.
        rows: clients that keys or shares are sent for.
    """
    kind = message.get("kind") if isinstance(message, Mapping) else None
    fields_by_kind = _tensor_fields(shapes, masked, rows)
    if not isinstance(kind, str) or kind not in fields_by_kind:
        return "unknown-kind"
    plain = _PLAIN[kind]
    fields = fields_by_kind[kind]
    if set(message) != {"kind", *plain, *fields}:
        return "other-fields"
    tensors = {name: message[name] for name in fields}
    reason = _find_plain_problem(message, plain, contract)
    reason = reason or _find_form_problem(tensors, fields)
    if reason is None and kind == "sum" and not masked:
        reason = _find_norm_problem(tensors, max_norm)
    return reason


def _find_plain_problem(message: Received, plain: Plain, contract: str) -> str | None:
    """Return whether a value is not of its type, or is of another run or list."""
    for name, type_ in plain.items():
        if type(message[name]) is not type_:
            return "wrong-type"
    if message["contract"] != contract:
        return "other-contract"
    if message.get("reason", CLIENT_FAILED) not in REASONS:
        return "other-reason"
    return None


def _find_form_problem(tensors: Mapping[str, Any], fields: _Fields) -> str | None:
    """Return what is wrong with a field: its type, or its shape. None if all are right."""
    for name, (types, shape) in fields.items():
        x = tensors[name]
        if not isinstance(x, Tensor) or x.dtype not in types:
            return "wrong-type"
        # A sparse tensor, or one without memory, has no norm.
        if x.layout != torch.strided or x.is_meta:
            return "wrong-type"
        if tuple(x.shape) != shape:
            return "wrong-shape"
    return None


def _find_norm_problem(tensors: NamedTensors, max_norm: float) -> str | None:
    """Return whether the norm over all tensors is not finite, or too large."""
    norms = [float(torch.linalg.vector_norm(x)) for x in tensors.values()]
    norm = math.hypot(*norms)
    if not math.isfinite(norm):
        return "not-finite"
    return "oversized" if norm > max_norm else None


def _tensor_fields(shapes: Shapes, masked: bool, rows: int) -> dict[str, _Fields]:
    """Return types and shape of every tensor of a client's messages, by kind of message."""
    types = _INTEGERS if masked else FLOATS
    sums = {f"sum/{name}": (types, shape) for name, shape in shapes.items()}
    if not masked:
        return {"hello": {}, "sum": sums, "error": {}}
    key: _Fields = {"key": (_BYTES, (KEY_BYTES,))}
    sealed: _Fields = {"sealed": (_BYTES, (rows, SEALED_BYTES))}
    return {
        "hello": key,
        "keys": key | sealed,
        "sum": sums,
        "shares": {"shares": (_BYTES, (rows, SHARE_BYTES))},
        "error": {},
    }
