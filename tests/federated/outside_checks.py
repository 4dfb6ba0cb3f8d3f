"""Check federated clients and servers from outside.

The checks see messages as an adversary would. So they hold for every client, including one that an
engine wraps. Run them on random records of the right shapes: they spend the releases of the given
plan.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Protocol

import torch
from scipy import stats
from torch import Tensor

from dpkfc.audit.findings import Finding
from dpkfc.audit.replay import distance
from dpkfc.distributed.context import flatten
from dpkfc.federated.messages import Message, add_prefix, select_prefix
from dpkfc.federated.plan import FederatedPlan

ALARM = 1e-6  # false alarms of one check
_CODE = (
    "module",
    "function",
    "builtin_function_or_method",
    "code",
    "frame",
    "getset_descriptor",
)


class Answers(Protocol):
    """A client, or anything that answers like a client."""

    def answer(self, message: Mapping[str, Any]) -> Message: ...  # noqa: D102


def round_message(contract: str, number: int, theta: Mapping[str, Tensor]) -> Message:
    """Return the message of a round that a server without metric and control variates sends."""
    prefixed = add_prefix("theta", theta)
    return {"kind": "round", "round": number, "contract": contract, **prefixed}


def check_client_noise(
    plan: FederatedPlan,
    clients: Sequence[Answers],
    contract: str,
    theta: Mapping[str, Tensor],
    pairs: int = 20,
) -> list[Finding]:
    """Check that clients add the planned noise, independently, and enough for t − m of them.

    The same parameters are sent twice. The data cancel in the difference of two answers, which
    leaves noise of variance 2 share².

    Args:
        plan: with full participation, one release a round and messages in the clear.
        clients: to be checked.
        contract: of the plan.
        theta: parameters of the model.
        pairs: answers compared for each client; 2 · `pairs` rounds of budget are spent.

    Raises:
        ValueError: masked messages, or a plan whose answers also differ by sampling.
    """
    config = plan.config
    if config.privacy.masked or config.example_rate < 1 or plan.per_round != 1:
        raise ValueError(
            "audit the same shares with TrustedServer('clients'), full participation and "
            "LocalGradient()"
        )
    noise = [_noise_of(client, contract, theta, pairs) for client in clients]
    variances = [float(x.square().mean()) for x in noise]
    size = noise[0].numel()
    return [
        _check_variance(plan, variances, size),
        _check_independence(noise),
        _check_survivors(plan, variances, size),
    ]


def _noise_of(client: Answers, contract: str, theta: Mapping[str, Tensor], pairs: int) -> Tensor:
    """Return the noise of a client from the differences of its answers, with variance share²."""
    sums = []
    for number in range(2 * pairs):
        answer = client.answer(round_message(contract, number, theta))
        if answer["kind"] == "sum":
            sums.append(flatten(select_prefix(answer, "sum"), torch.float64))
    pairs_of_sums = zip(sums[::2], sums[1::2], strict=False)
    differences = torch.stack([a - b for a, b in pairs_of_sums])
    return differences.flatten() / math.sqrt(2)


def _check_variance(plan: FederatedPlan, variances: Sequence[float], size: int) -> Finding:
    """Apply a two-sided χ² test to each client's noise."""
    alarm = ALARM / (2 * len(variances))
    quantiles = stats.chi2.ppf([alarm, 1 - alarm], size)
    low, high = quantiles / size
    ratios = []
    for variance in variances:
        if plan.client_stddev > 0:
            ratios.append(variance / plan.client_stddev**2)
        else:
            ratios.append(1.0 if variance == 0 else math.inf)
    wrong = [i for i, ratio in enumerate(ratios) if not low <= ratio <= high]
    return Finding(
        check="variance of the noise",
        measured=f"{min(ratios):.4g} to {max(ratios):.4g} × the share's",
        bound=f"{low:.4g} to {high:.4g}",
        passed=not wrong,
        detail=f"wrong: {wrong}",
    )


def _check_independence(noise: Sequence[Tensor]) -> Finding:
    """Check the largest correlation of two clients, over all pairs.

    Absent noise counts as fully correlated.
    """
    pairs = list(combinations(range(len(noise)), 2))
    tests = 2 * max(1, len(pairs))
    score = float(stats.norm.isf(ALARM / tests))
    bound = score / math.sqrt(noise[0].numel())
    worst = 0.0
    clients = (0, 0)
    for i, j in pairs:
        scale = float(noise[i].norm() * noise[j].norm())
        product = abs(float(noise[i] @ noise[j]))
        correlation = 1.0
        if scale > 0:
            correlation = product / scale
        worst, clients = max((worst, clients), (correlation, (i, j)))
    return Finding(
        check="independence of the noise",
        measured=f"correlation {worst:.3g}",
        bound=f"at most {bound:.3g}",
        passed=worst <= bound,
        detail=f"of clients {clients}",
    )


def _check_survivors(plan: FederatedPlan, variances: Sequence[float], size: int) -> Finding:
    """Compare the noise of the t − m clients that add least with what the guarantee needs."""
    config = plan.config
    check = "noise of the survivors"
    if config.privacy.noise_by == "server":
        return Finding(check=check, measured="the server adds it", bound="none", passed=True)
    honest = 1 if config.privacy.has_full_noise else config.survivors - config.known_shares
    smallest = sorted(variances)[:honest]
    stddev = math.sqrt(sum(smallest))
    standard_error = math.sqrt(0.5 / (size * honest))
    slack = 1 - stats.norm.isf(ALARM) * standard_error * 2
    return Finding(
        check=check,
        measured=f"stddev {stddev:.4g}",
        bound=f"at least {plan.stddev:.4g}",
        passed=stddev >= plan.stddev * slack,
        detail=f"{honest} clients that add least",
    )


def check_record_bound(plan: FederatedPlan, answer: Message, neighbour: Message) -> Finding:
    """Check how far one record moves a client's message.

    Two clients in test mode with the same number share their noise, so it cancels.

    Args:
        plan: in test mode.
        answer: of a client with the record.
        neighbour: of the same client without the record, or with another record in its place under
            "replace_one".
    """
    one = select_prefix(answer, "sum")
    other = select_prefix(neighbour, "sum")
    bound = plan.config.sensitivity * (1 + 1e-5)
    measured = "a client did not answer"
    is_bounded = False
    if one and one.keys() == other.keys():
        moved = distance(one, other)
        measured = f"moves the sum by {moved:.6g}"
        is_bounded = moved <= bound
    return Finding(
        check="one record", measured=measured, bound=f"at most {bound:.6g}", passed=is_bounded
    )


def check_kept_messages(roots: Sequence[Any], messages: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that no client's sum is reachable from a server, its log records or its files.

    Args:
        roots: objects to search: server, records of rounds, log records, tensors of a checkpoint.
        messages: what clients sent.
    """
    sums: list[Tensor] = []
    for message in messages:
        sums += select_prefix(message, "sum").values()
    skipped = type, str, bytes, int, float, logging.Logger
    seen: set[int] = set()
    todo: list[Any] = list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, skipped) or type(item).__name__ in _CODE:
            continue
        seen.add(id(item))
        if not isinstance(item, Tensor):
            todo.extend(gc.get_referents(item))
        elif any(_is_copy(item, x) for x in sums):
            return _leftover_finding(False, f"the sum of one client, of shape {tuple(item.shape)}")
    return _leftover_finding(True, f"{len(seen)} objects hold no sum of a single client")


def _is_copy(x: Tensor, message: Tensor) -> bool:
    """Return whether a tensor is a message, or equals one that is not all zero."""
    if x is message:
        return True
    if x.shape != message.shape or x.dtype != message.dtype:
        return False
    return bool((x == message).all()) and bool(message.any())


def _leftover_finding(passed: bool, measured: str) -> Finding:
    return Finding(
        check="what the server keeps", measured=measured, bound="no client's sum", passed=passed
    )
