"""Leaks between processes: two of them over gloo share every logical batch, as in distributed
training.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dpkfc.audit.findings import Finding, select_failed
from dpkfc.audit.harness import open_session, script_plan
from dpkfc.audit.noise_samples import judge_noise
from dpkfc.audit.replay import SEED, distance
from dpkfc.distributed.context import DistributedContext
from dpkfc.privacy.mechanism import release
from dpkfc.privacy.rng import NoiseStream
from dpkfc.session import Session
from tests.injected_bugs.leak import swap_function
from tests.injected_bugs.subjects import C, canaries_of, select, subject_of
from tests.ports import free_port

RANKS, SUBJECT, NOISE_STEPS = 2, "DP-SGD", 60
BATCHES = [[0, 1, 2, 3, 4], [5], [], [6, 7]]


def add_noise_nowhere(m):
    """Every rank takes the whole batch, so that each example counts once a rank."""
    m.setattr(DistributedContext, "shard", lambda self, indices: indices)


def noise_of_its_own(m):
    """Every rank adds noise of its own to the common sum: who averages their weights averages the
    noise away.
    """
    m.setattr(
        Session,
        "_release",
        lambda self, x: release(x, self.plan, self._pipeline.noise, self.ledger, self._step),
    )


def share_seed(m):
    """Every rank adds its part of the noise before sums are reduced, from the same seed."""

    def total(real, self, tensors):
        noise = NoiseStream.repeatable(0)
        parts = enumerate(tensors.items())
        own = {n: noise.normal(x.numel(), k, "float64").reshape(x.shape) for k, (n, x) in parts}
        return real(
            self,
            {n: x + C * RANKS**-0.5 * torch.from_numpy(own[n]) for n, x in tensors.items()},
        )

    swap_function(m, DistributedContext, "sum", total)
    m.setattr(
        "dpkfc.privacy.mechanism.gaussian_release",
        lambda x, _, divisor, __: {n: y / divisor for n, y in x.items()},
    )


PATCHES = {
    "no leak": lambda m: None,
    "every rank takes the whole batch": add_noise_nowhere,
    "noise of its own on every rank": noise_of_its_own,
    "noise per rank from the same seed": share_seed,
}


def release_on_script(subject, script, seed):
    """What a session on a script releases; the examples behind the last are without a loss."""
    canaries = select(canaries_of(SUBJECT), "nothing else")
    plan = script_plan(subject.plan, script, subject.size + 1, seed=seed)
    found = []
    with open_session(subject, plan, canaries.dataset(subject), verify=False)[0] as session:
        for batch in session.batches():
            session.step(batch, canaries.loss(subject))
            found.append(dict(session.released.pop().gradients))
    return found


def _worker(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for number, patch in enumerate(PATCHES.values()):
        with pytest.MonkeyPatch.context() as m:
            patch(m)
            subject = subject_of(SUBJECT)
            zero = [[subject.size] * 4 * (k % 2) for k in range(NOISE_STEPS)]
            found = {
                "noise": release_on_script(subject, zero, None),
                "sums": release_on_script(subject, BATCHES, SEED),
            }
        torch.save(found, Path(folder) / f"{number}-{rank}.pt")
    dist.destroy_process_group()


def run(folder):
    """What is found wrong with each of `PATCHES`."""
    mp.spawn(_worker, args=(free_port(), str(folder)), nprocs=RANKS, join=True)
    alone = release_on_script(subject_of(SUBJECT), BATCHES, SEED)
    results = {}
    for number, name in enumerate(PATCHES):
        ranks = [
            torch.load(folder / f"{number}-{rank}.pt", weights_only=True) for rank in range(RANKS)
        ]
        results[name] = select_failed(list(_judged(ranks, alone)))
    return results


def _judged(ranks, alone):
    plan = subject_of(SUBJECT).plan
    unit = plan.expected_batch_size / plan.sensitivity
    apart = (
        max(
            distance(*pair)
            for kind in ranks[0]
            for pair in zip(*(r[kind] for r in ranks), strict=True)
        )
        * unit
    )
    yield Finding(
        check="ranks agree",
        measured=f"{apart:.2g} × sensitivity",
        bound="equal to the bit",
        passed=apart == 0,
    )
    moved = max(distance(*pair) for pair in zip(ranks[0]["sums"], alone, strict=True)) * unit
    yield Finding(
        check="one process and two",
        measured=f"{moved:.2g} × sensitivity",
        bound="equal",
        passed=moved < 1e-9,
    )
    stddev = plan.stddev / plan.expected_batch_size
    drawn = [
        np.concatenate([x.double().numpy().ravel() for x in one.values()]) / stddev
        for one in ranks[0]["noise"]
    ]
    yield from judge_noise(drawn)
