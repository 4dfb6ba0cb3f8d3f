"""A refresh over several processes: each runs its part of the probe, and each layer is finished by one of them.

Every process adds up what its own examples of the probe contribute. The parts of a layer go to the process that owns it, are
joined there in the order of the probe, decomposed, and sent to all. What comes out is what one process finds, but for the
order in which sums of many examples are added up.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dpkfc.curvature.inputs import Inputs, tensors

__all__ = [
    "Team", "agreed", "handed_over", "joined", "moved_to", "own_rows", "owners_of", "probe_digest", "told_to_all",
]  # fmt: skip

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")


class Team(Protocol):
    """The processes that share a refresh. All call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def together(self, work: Callable[[], T]) -> T:
        """Do work everywhere; an error anywhere is raised everywhere."""
        ...

    def everyone(self, value: T) -> list[T]:
        """The values of all, in their order."""
        ...

    def gather(self, value: T, to: int) -> list[T] | None:
        """The values of all on one of them."""
        ...


def own_rows(team: Team | None, size: int, first: int = 0) -> slice:
    """Of the examples from `first` to `size` of a probe, those that this process runs: consecutive ones, in equal shares."""
    if team is None:
        return slice(first, size)
    count = size - first
    return slice(first + count * team.rank // team.world_size, first + count * (team.rank + 1) // team.world_size)


def joined(
    team: Team,
    parts: Mapping[str, P],
    cost: Callable[[P], float],
    finish: Callable[[Mapping[str, list[P]]], Mapping[str, R]],
    device: torch.device,
) -> dict[str, R]:
    """Bring the parts of each layer to its owner, finish it there, and send what was made of it to all.

    Args:
        team: the processes.
        parts: layer name to what this process has added up; a layer may be missing where its examples do not reach it.
        cost: what finishing a layer costs, in any unit.
        finish: maps layer name to its parts in the order of the processes; returns what is made of each.
        device: of the model on this process.

    Returns:
        Layer name to what was made of it, the same on every process.
    """
    mine = handed_over(team, parts, cost)
    return told_to_all(team, team.together(lambda: finish(moved_to(mine, device))), device)


def handed_over(team: Team, parts: Mapping[str, P], cost: Callable[[P], float]) -> dict[str, list[P]]:
    """Bring the parts of each layer to its owner; arguments as in `joined`.

    Returns:
        The layers that this process owns to their parts, in the order of the processes, on the CPU.
    """
    owners = owners_of(team.everyone({name: cost(part) for name, part in parts.items()}))
    mine: dict[str, list[P]] = {}
    for owner in range(team.world_size):
        sent = {name: part for name, part in parts.items() if owners[name] == owner}
        for received in team.gather(moved_to(sent, torch.device("cpu")), owner) or ():
            for name in received:
                mine.setdefault(name, []).append(received[name])
    return {name: mine[name] for name in owners if name in mine}


def told_to_all(team: Team, made: Mapping[str, R], device: torch.device) -> dict[str, R]:
    """What each process has made of its layers, on all of them; in one order, as owners hold consecutive layers."""
    found = team.everyone(moved_to(dict(made), torch.device("cpu")))
    return {name: moved_to(x, device) for part in found for name, x in part.items()}


def owners_of(costs: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Which process finishes which layer: consecutive layers, which often share a factor, at about equal cost.

    Args:
        costs: of the layers that each process knows.
    """
    known: dict[str, float] = {}
    for of in costs:
        for name, cost in of.items():
            known[name] = max(cost, known.get(name, 0.0))
    total, done, owners = sum(known.values()), 0.0, {}
    for name, cost in known.items():
        owners[name] = min(len(costs) - 1, int(len(costs) * (done + cost / 2) / total)) if total > 0 else 0
        done += cost
    return owners


def moved_to(value: T, device: torch.device) -> T:
    """A copy of a value with every tensor in it on a device; what several parts of it hold stays one object."""
    known: dict[int, Any] = {}

    def copied(x: Any) -> Any:
        if id(x) not in known:
            known[id(x)] = _copied(x, device, copied)
        return known[id(x)]

    return copied(value)


def _copied(x: Any, device: torch.device, inside: Callable[[Any], Any]) -> Any:
    if isinstance(x, Tensor):
        return x.detach().to(device)
    if isinstance(x, torch.device):
        return device
    if hasattr(x, "__dict__") and (is_dataclass(x) or type(x).__module__.startswith("dpkfc.")) and not isinstance(x, type):
        twin = copy.copy(x)
        for name, item in vars(x).items():
            object.__setattr__(twin, name, inside(item))
        return twin
    if isinstance(x, Mapping):
        return {key: inside(item) for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(inside(item) for item in x)
    return x


def agreed(what: str, found: Sequence[str]) -> None:
    """Raise on every process where the hashes of all are not one.

    Raises:
        RuntimeError: naming the first process whose hash is another than that of rank 0.
    """
    other = next((rank for rank, digest in enumerate(found) if digest != found[0]), None)
    if other is not None:
        raise RuntimeError(
            f"the {what} returns other inputs on rank {other} than on rank 0; its sample(n, generator) must return the same "
            "for the same generator on every process"
        )


def probe_digest(inputs: Inputs, labels: Tensor | None) -> str:
    """Hash of what a probe has returned."""
    digest = hashlib.sha256()
    for name, x in [*tensors(inputs), ("labels", labels)]:
        if x is not None:
            digest.update(f"{name}{x.dtype}{tuple(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
