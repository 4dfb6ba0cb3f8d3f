"""Compare the checkpoints of two sessions over different examples.

A checkpoint says nothing about the data that the releases do not say. Two sessions walk along the
same weights over different examples. Post-processing is off, because its state is made of releases.
Then the checkpoints of both must be equal to the bit.
"""

from __future__ import annotations

import tempfile

import torch

from dpkfc import checkpoint
from dpkfc.audit.findings import Finding
from dpkfc.audit.harness import Subject, first_difference
from dpkfc.audit.replay import World, first_units
from dpkfc.audit.step_canaries import Canaries

STEPS = 3
# The time at which a ledger began, and the state of the repeatable mode.
IGNORED = ("ledger_head", "torch_rng")


def check_checkpoints(subject: Subject) -> Finding:
    """Compare the checkpoints of two sessions over different examples."""
    canaries = Canaries()
    canaries.add("loss × 1e4", subject.example(-1), 1e4)
    rows = first_units(subject, 4)
    state = torch.get_rng_state()
    contents = []
    for batch in (rows, [*rows[1:], subject.size]):
        torch.set_rng_state(state)
        script = [batch] * STEPS
        with (
            tempfile.TemporaryDirectory() as folder,
            World(subject.bare, canaries, script) as world,
        ):
            for _ in script:
                world.session.step(next(world.batches), world.loss)
            world.session.save(f"{folder}/checkpoint")
            tensors, meta = checkpoint.read(f"{folder}/checkpoint")
        meta = {name: x for name, x in meta.items() if name not in IGNORED}
        contents.append({"tensors": tensors, "meta": meta})
    where = first_difference(contents[0], contents[1])
    return Finding(
        check="checkpoint",
        measured=f"'{where}' differs" if where else "equal to the bit",
        bound="equal for different data and equal weights",
        passed=not where,
        detail=f"after {STEPS} steps, without post-processing",
    )
