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

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.secure_aggregation import (
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    ByClient,
    NamedTensors,
)
from dpkfc.gradients.discovery import find_layers
from dpkfc.preconditioning import PreconditionerManager

Value = Tensor | bytes | int | float | str
Message = dict[str, Value]
# A message that was not checked yet.
Received = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, Tensor]
CLIENT_FAILED = "client-failed"
CONTRACT_DIFFERS = "contract-differs"
METRIC_DIFFERS = "metric-differs"
METRIC_MISSING = "metric-missing"
REPEATED = "repeated-round"
SPENT = "budget-spent"
REASONS = (CLIENT_FAILED, CONTRACT_DIFFERS, METRIC_DIFFERS, METRIC_MISSING, REPEATED, SPENT)
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


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """Return the type of sums and releases: float64 for a float64 parameter, else float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def zero_sums(parameters: NamedTensors) -> Tensors:
    """Return zeros that sums over messages or records start from."""
    sums = {}
    for name, p in parameters.items():
        dtype = accumulation_dtype(p)
        sums[name] = torch.zeros(p.shape, dtype=dtype, device=p.device)
    return sums


def total_norm(tensors: NamedTensors) -> float:
    """Return the norm over all tensors together, in float64."""
    squares = []
    for x in tensors.values():
        square = x.double().square()
        squares.append(square.sum())
    total = torch.stack(squares).sum()
    return float(total.sqrt())


def contract_of(plan_hash: str, model: nn.Module) -> str:
    """Return the SHA-256 of the plan, of the form of trained parameters, and of all frozen values.

    Clients compare it at the start, so that a different plan, model or pre-trained weights are
    found before a round.
    """
    digest = hashlib.sha256(plan_hash.encode())
    trained = trainable_tensors(model)
    frozen = {name: x for name, x in model.state_dict().items() if name not in trained}
    tensors = [*sorted(trained.items()), *sorted(frozen.items())]
    for name, x in tensors:
        form = f"{name} {tuple(x.shape)} {x.dtype}\n"
        digest.update(form.encode())
        if name in frozen and x.numel():
            flat = x.detach().cpu().contiguous().flatten()
            digest.update(to_bytes(flat.view(torch.uint8)))
    return digest.hexdigest()


class PartyModel:
    """The model of one party of a run, and its preconditioner.

    Args:
        plan: of the run.
        model: any module that a `Session` takes; its trained parameters are overwritten.

    Attributes:
        numbers: of the trained parameters, d.

    Raises:
        ValueError: no plan, or a model that the gradient engine does not cover.
    """

    def __init__(self, plan: FederatedPlan, model: nn.Module) -> None:
        if not isinstance(plan, FederatedPlan):
            raise ValueError(
                f"plan must be a FederatedPlan, got {type(plan).__name__}; make it with"
                " FederatedConfig(...).calibrate(epsilon, delta)"
            )
        self.plan = plan
        self._config = plan.config
        self.model = model
        self.layers = find_layers(model)
        self.parameters: Tensors = trainable_tensors(model)
        self.shapes: Shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.numbers = sum(p.numel() for p in self.parameters.values())
        self.contract = contract_of(plan.hash, model)
        self.coordinates = PreconditionerManager(plan.config.preconditioner, model, self.layers)


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


def first_reason(checks: Mapping[str, bool]) -> str | None:
    """Return the first reason that applies; None if none does.

    Args:
        checks: reason to whether it applies.
    """
    return next((reason for reason, applies in checks.items() if applies), None)


def _find_plain_problem(message: Received, plain: Plain, contract: str) -> str | None:
    """Return whether a value is not of its type, or is of another run or list."""
    for name, type_ in plain.items():
        if type(message[name]) is not type_:
            return "wrong-type"
    is_known_reason = message.get("reason", CLIENT_FAILED) in REASONS
    return first_reason(
        {"other-contract": message["contract"] != contract, "other-reason": not is_known_reason}
    )


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
    return first_reason({"not-finite": not math.isfinite(norm), "oversized": norm > max_norm})


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
