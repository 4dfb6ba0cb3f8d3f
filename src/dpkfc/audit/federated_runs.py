"""Checks of clients and server from outside: the law of the noise, what one record moves, and what a server keeps.

They see messages as an adversary would, so they hold for any client, an engine's wrapper around one included. Run them on random
records of the right shapes; they spend the releases of the plan that they are given.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import torch
from scipy import stats
from torch import Tensor

from dpkfc.federated.local_training import total_norm
from dpkfc.federated.messages import Message, add_prefix, select_prefix
from dpkfc.federated.plan import FederatedPlan

_ALARM = 1e-6  # false alarms of a check that holds


class Answers(Protocol):
    """A client, or anything that answers like one."""

    def answer(self, message: Mapping[str, Any]) -> Message: ...  # noqa: D102


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: its name.
        passed: whether it held.
        detail: what was measured, against what.
    """

    check: str
    passed: bool
    detail: str


def round_message(plan_contract: str, number: int, theta: Mapping[str, Tensor]) -> Message:
    """A round as a server without metric and control variates would send it."""
    return {"kind": "round", "round": number, "contract": plan_contract, **add_prefix("theta", theta)}


def noise_law(
    plan: FederatedPlan, clients: Sequence[Answers], contract: str, theta: Mapping[str, Tensor], pairs: int = 20
) -> list[Finding]:
    """Do clients add the noise that the plan says, independently of each other, and is it enough for t − m of them?

    The same parameters are sent twice, so that the data cancel in the difference of two answers and noise of variance 2 share²
    is left. Needs full participation, one release a round, messages in clear and 2 · `pairs` rounds of budget.

    Raises:
        ValueError: masked messages, or a plan whose answers also differ by sampling.
    """
    config = plan.config
    if config.privacy.masked or config.example_rate < 1 or plan.per_round != 1:
        raise ValueError("audit the same shares with TrustedServer('clients'), full participation and LocalGradient()")
    noise = []
    for client in clients:
        answers = [client.answer(round_message(contract, k, theta)) for k in range(2 * pairs)]
        sums = [
            torch.cat([x.double().flatten() for x in select_prefix(a, "sum").values()]) for a in answers if a["kind"] == "sum"
        ]
        even, odd = sums[: 2 * pairs : 2], sums[1 : 2 * pairs : 2]
        noise.append(torch.stack([a - b for a, b in zip(even, odd, strict=False)]).flatten() / math.sqrt(2))
    variances = [float(x.square().mean()) for x in noise]
    return [
        _variance(plan, variances, noise[0].numel()),
        _independence(noise),
        _enough(plan, variances, noise[0].numel()),
    ]


def _variance(plan: FederatedPlan, variances: Sequence[float], numbers: int) -> Finding:
    """χ² of each client's noise, both sides."""
    alarm = _ALARM / (2 * len(variances))
    low, high = stats.chi2.ppf([alarm, 1 - alarm], numbers) / numbers
    ratios = [v / plan.client_stddev**2 if plan.client_stddev > 0 else (1.0 if v == 0 else math.inf) for v in variances]
    wrong = [i for i, ratio in enumerate(ratios) if not low <= ratio <= high]
    detail = f"variance over the share's: {min(ratios):.4g} to {max(ratios):.4g}, allowed {low:.4g} to {high:.4g}"
    return Finding("variance of the noise", not wrong, f"{detail}; wrong: {wrong}")


def _independence(noise: Sequence[Tensor]) -> Finding:
    """The largest correlation of two clients, over all pairs; noise that is absent is correlated with everything."""
    pairs = list(combinations(range(len(noise)), 2))
    bound = float(stats.norm.isf(_ALARM / (2 * max(1, len(pairs))))) / math.sqrt(noise[0].numel())
    worst, who = 0.0, (0, 0)
    for i, j in pairs:
        scale = float(noise[i].norm() * noise[j].norm())
        found = abs(float(noise[i] @ noise[j])) / scale if scale > 0 else 1.0
        worst, who = max((worst, who), (found, (i, j)))
    return Finding(
        "independence of the noise", worst <= bound, f"correlation {worst:.3g} of clients {who}, allowed {bound:.3g}"
    )


def _enough(plan: FederatedPlan, variances: Sequence[float], numbers: int) -> Finding:
    """The noise of the t − m clients that add least, against what the guarantee needs."""
    config = plan.config
    if config.privacy.noise_by == "server":
        return Finding("noise of the survivors", True, "the server adds it")
    honest = 1 if config.privacy.has_full_noise else config.survivors - config.known_shares
    found = math.sqrt(sum(sorted(variances)[:honest]))
    slack = 1 - stats.norm.isf(_ALARM) * math.sqrt(0.5 / (numbers * honest)) * 2
    detail = f"{honest} clients that add least: stddev {found:.4g}, needed {plan.stddev:.4g}"
    return Finding("noise of the survivors", found >= plan.stddev * slack, detail)


def record_bound(plan: FederatedPlan, answer: Message, neighbour: Message) -> Finding:
    """How far one record moves a client's message, by two clients that share their noise (test mode, the same number).

    Args:
        plan: in test mode.
        answer: of a client with the record.
        neighbour: of the same client without it (or with another in its place, under "replace_one").
    """
    one, other = select_prefix(answer, "sum"), select_prefix(neighbour, "sum")
    if not one or one.keys() != other.keys():
        return Finding("one record", False, "a client did not answer")
    moved = total_norm({name: x.double() - other[name].double() for name, x in one.items()})
    bound = plan.config.sensitivity * (1 + 1e-5)
    return Finding("one record", moved <= bound, f"moves the sum by {moved:.6g}, allowed {bound:.6g}")


def kept_messages(roots: Sequence[Any], messages: Sequence[Mapping[str, Any]]) -> Finding:
    """Is anything of single clients' sums reachable from a server, its log records or what it wrote?

    Args:
        roots: objects to search: server, records of rounds, log records, tensors of a checkpoint.
        messages: what clients sent.
    """
    sums = {id(x) for message in messages for x in select_prefix(message, "sum").values()}
    values = [x for message in messages for x in select_prefix(message, "sum").values()]
    seen: set[int] = set()
    todo: list[Any] = list(roots)
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, (type, str, bytes, int, float, logging.Logger)) or _is_code(found):
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            same = id(found) in sums or any(
                x.shape == found.shape and x.dtype == found.dtype and bool((x == found).all()) and bool(x.any())
                for x in values
            )
            if same:
                held = f"the sum of one client, of shape {tuple(found.shape)}, is still held"
                return Finding("what the server keeps", False, held)
            continue
        todo.extend(gc.get_referents(found))
    return Finding("what the server keeps", True, f"{len(seen)} objects hold no sum of a single client")


def _is_code(found: Any) -> bool:
    return type(found).__name__ in (
        "module",
        "function",
        "builtin_function_or_method",
        "code",
        "frame",
        "getset_descriptor",
    )
