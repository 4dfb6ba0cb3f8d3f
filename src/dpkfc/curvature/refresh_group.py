"""A refresh over several processes.

Every process runs its part of the probe and adds up what its examples contribute. The parts of a
layer go to the process that owns it. The owner joins them in the order of the probe, decomposes
the sum and sends the result to all. The result equals one process's, except for the order in which
sums over many examples are added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from dpkfc.curvature.model_inputs import device_of_model
from dpkfc.tensors import copy_to_device

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")


class RefreshGroup(Protocol):
    """The processes that share a refresh. All call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run work on all processes; an error on one is raised on all."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, in their order."""
        ...

    def gather(self, value: T, to: int) -> list[T] | None:
        """Return the values of all on one process, None on the others."""
        ...


def gather_from_all(team: RefreshGroup | None, work: Callable[[], T]) -> list[T]:
    """Run work on every process, and return all results in their order."""
    if team is None:
        return [work()]
    return team.all_gather(team.run_on_all(work))


def rows_of_process(team: RefreshGroup | None, size: int, first: int = 0) -> slice:
    """Return the consecutive examples from `first` to `size` that this process runs.

    All processes run about the same number.
    """
    if team is None:
        return slice(first, size)
    count = size - first
    start = count * team.rank // team.world_size
    stop = count * (team.rank + 1) // team.world_size
    return slice(first + start, first + stop)


def send_to_owners(
    team: RefreshGroup, parts: Mapping[str, P], cost: Callable[[P], float]
) -> dict[str, list[P]]:
    """Send the parts of each layer to its owner.

    Args:
        team: the processes.
        parts: layer name to the sums of this process; layers that its examples do not reach may be
            missing.
        cost: cost of finishing a layer, in any unit.

    Returns:
        The layers that this process owns to their parts, in the order of the processes, on the CPU.
    """
    costs = {name: cost(part) for name, part in parts.items()}
    owners = assign_owners(team.all_gather(costs))
    own: dict[str, list[P]] = defaultdict(list)
    cpu = torch.device("cpu")
    for owner in range(team.world_size):
        own_parts = {name: part for name, part in parts.items() if owners[name] == owner}
        sent = copy_to_device(own_parts, cpu)
        received = team.gather(sent, owner)
        for of_process in received or ():
            for name, part in of_process.items():
                own[name].append(part)
    # In the order of the layers.
    return {name: own[name] for name in owners if name in own}


def finish_on_owners(
    finish: Callable[[], dict[str, R]], model: nn.Module, team: RefreshGroup | None
) -> dict[str, R]:
    """Return what all processes make of the layers that they own.

    Args:
        finish: returns layer name to result, for the layers of this process.
        model: on whose device the results are wanted.
        team: the processes, None for this one alone.

    Returns:
        The same on every process, in one order, since owners hold consecutive layers.
    """
    if team is None:
        return finish()
    own = copy_to_device(team.run_on_all(finish), torch.device("cpu"))
    merged = {}
    for part in team.all_gather(own):
        for name, x in part.items():
            merged[name] = copy_to_device(x, device_of_model(model))
    return merged


def assign_owners(costs: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Return the process that finishes each layer.

    A process owns consecutive layers, which often share a factor, at about equal cost.

    Args:
        costs: of the layers that each process knows.
    """
    known: dict[str, float] = defaultdict(float)
    for own_costs in costs:
        for name, cost in own_costs.items():
            known[name] = max(cost, known[name])
    total = sum(known.values())
    processes = len(costs)
    done = 0.0
    owners = {}
    for name, cost in known.items():
        middle = done + cost / 2
        owner = 0
        if total > 0:
            owner = int(processes * middle / total)
        owners[name] = min(processes - 1, owner)
        done += cost
    return owners


def check_same_probe(digests: Sequence[str]) -> None:
    """Refuse, on every process, a probe whose hashes differ between the processes.

    Raises:
        RuntimeError: naming the first process whose hash differs from rank 0's.
    """
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RuntimeError(
                f"the probe returns other inputs on rank {rank} than on rank 0; "
                "sample(n, generator) must depend on its generator alone"
            )
