"""What a checkpoint says of the data: nothing that releases do not say.

Two sessions walk along the same weights over different examples. With no post-processing, whose states are made of releases,
what they write must be equal to the bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpkfc import checkpoint
from dpkfc.assurance.canaries import Canaries
from dpkfc.assurance.replay import World
from dpkfc.assurance.subject import Subject
from dpkfc.assurance.verdict import Finding

__all__ = ["checkpoints"]

STEPS = 3
OWN = ("ledger_head", "torch_rng")  # the time at which a ledger began; the state of the repeatable mode


def checkpoints(subject: Subject) -> Finding:
    """Save both sessions after a few steps, and compare what they wrote."""
    canaries = Canaries()
    canaries.add("loss × 1e4", tuple(x[-1] for x in subject.dataset), 1e4)
    bare = replace(subject, plan=replace(subject.plan, config=replace(subject.plan.config, postprocess=(), readout="whitened")))
    rows = list(range(min(4, max(1, subject.size // 2))))
    scripts = ([rows] * STEPS, [[*rows[1:], subject.size]] * STEPS)
    state, found = torch.get_rng_state(), []
    for script in scripts:
        torch.set_rng_state(state)
        with tempfile.TemporaryDirectory() as folder, World(bare, canaries, script) as world:
            for _ in script:
                world.session.step(next(world.batches), world.loss)
            world.session.save(f"{folder}/checkpoint")
            tensors, meta = checkpoint.read(f"{folder}/checkpoint")
        if hasattr(subject.plan.config.preconditioner, "observe"):  # made from the releases, which differ
            tensors = {group: held for group, held in tensors.items() if group not in ("past", "preconditioner")}
        found.append({"tensors": tensors, "meta": {name: x for name, x in meta.items() if name not in OWN}})
    where = _difference(found[0], found[1])
    return Finding(
        check="checkpoint",
        measured=f"'{where}' differs" if where else "equal to the bit",
        bound="equal for different data and equal weights",
        passed=not where,
        detail=f"after {STEPS} steps, without post-processing",
    )


def _difference(one: Any, other: Any, where: str = "") -> str:
    """The path of the first value that differs, "" where none does."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return f"{where}/{sorted(map(str, one.keys() ^ other.keys()))[0]}"
        return next((d for name in one if (d := _difference(one[name], other[name], f"{where}/{name}"))), "")
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return "" if one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num()) else where
    return "" if type(one) is type(other) and one == other else where
