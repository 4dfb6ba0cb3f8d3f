"""Messages: flat dictionaries of tensors, numbers and texts, and the list of what may be in them.

Nothing but the sum and constants of the plan leaves a client: no number of examples, no loss, no accuracy, no text of an error.
Whatever is not on the list makes a message invalid, and invalid messages are counted and dropped.

    server → client   round     round, contract, theta/*, extra/*, extra_round, cohort, metric_digest, metric_step, metric/*
                      unmask    round, contract, cohort, survivors
    client → server   hello     contract, client
                      sum       round, contract, client, sum/*
                      masks     round, contract, client, mask/*                   of a survivor: one sum
                      error     round, contract, client, reason

`extra` is what the rule shares, and `extra_round` the number of the round it was made in: the last one with a release.
Rounds are numbered by the ledger: a round that was charged and lost has a number of its own, so none is ever asked for twice.
`contract` is the hash of the plan and of the model that both sides were started with.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "CLIENT_FAILED",
    "CONTRACT_DIFFERS",
    "FLOATS",
    "METRIC_DIFFERS",
    "METRIC_MISSING",
    "REASONS",
    "REPEATED",
    "SPENT",
    "Message",
    "Shapes",
    "contract_of",
    "flat",
    "group",
    "problem",
    "shapes_of",
]

Value = Tensor | bytes | int | float | str
Message = dict[str, Value]
Shapes = dict[str, tuple[int, ...]]

CLIENT_FAILED = "client-failed"
CONTRACT_DIFFERS, METRIC_DIFFERS, METRIC_MISSING = "contract-differs", "metric-differs", "metric-missing"
REPEATED, SPENT = "repeated-round", "budget-spent"
REASONS = (CLIENT_FAILED, CONTRACT_DIFFERS, METRIC_DIFFERS, METRIC_MISSING, REPEATED, SPENT)
_PLAIN: dict[str, dict[str, type]] = {
    "hello": {"contract": str, "client": int},
    "sum": {"round": int, "contract": str, "client": int},
    "masks": {"round": int, "contract": str, "client": int},
    "error": {"round": int, "contract": str, "client": int, "reason": str},
}
_TENSORS = {"sum": "sum", "masks": "mask"}
FLOATS = (torch.float32, torch.float64)  # that are sent


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


def problem(
    message: Mapping[str, Any], shapes: Shapes, contract: str, *, most: float = math.inf, integers: bool = False
) -> str | None:
    """Why a client's message is not valid, in one word that depends on no value but finiteness and size; None where it is.

    Args:
        message: as it came.
        shapes: of the trained parameters.
        contract: of this run.
        most: largest norm of a sum; no honest client can exceed it.
        integers: whether sums are masked integers.
    """
    kind = message.get("kind")
    wanted = _PLAIN.get(kind) if isinstance(kind, str) else None
    if wanted is None or not all(isinstance(key, str) for key in message):
        return "unknown-kind"
    prefix = _TENSORS.get(str(kind))
    names = {f"{prefix}/{name}" for name in shapes} if prefix else set()
    reasons = (
        (lambda: set(message) != {"kind", *wanted, *names}, "other-fields"),
        (lambda: any(type(message[name]) is not of for name, of in wanted.items()), "wrong-type"),
        (lambda: message["contract"] != contract, "other-contract"),
        (lambda: kind == "error" and message["reason"] not in REASONS, "other-reason"),
    )
    found = next((reason for applies, reason in reasons if applies()), None)
    if found is not None or prefix is None:
        return found
    return _problem_of_tensors(group(message, prefix), shapes, most, integers or kind == "masks")


def _problem_of_tensors(found: Mapping[str, Any], shapes: Shapes, most: float, integers: bool) -> str | None:
    allowed = (torch.int64,) if integers else FLOATS
    if any(not isinstance(x, Tensor) or x.dtype not in allowed for x in found.values()):
        return "wrong-type"
    if any(tuple(x.shape) != shapes[name] for name, x in found.items()):
        return "wrong-shape"
    if integers:
        return None
    norm = math.hypot(*(float(torch.linalg.vector_norm(x)) for x in found.values()))
    if not math.isfinite(norm):
        return "not-finite"
    return "oversized" if norm > most else None
