"""Several processes are one: the same releases, and the same parameters on all to the bit."""

import functools

import pytest
import torch
import torch.distributed as dist

from tests.distributed.cases import CASES, Case
from tests.distributed.group import run, start
from tests.test_session import loss_fn

# Two processes take every case. Three divide a batch, a probe and the owners of layers unevenly; of
# four some hold nothing.
WORLDS = {
    2: tuple(CASES),
    3: (
        "DP-SGD",
        "augmentations",
        "units",
        "per layer",
        "DP-KFC",
        "DP-KFC, averaged over refreshes",
        "DP-KFC, wide sides from drawn rows",
        "NGD",
        "GEP",
        "correlated noise",
    ),
    4: (
        "DP-SGD",
        "shares that are empty",
        "layers that some processes do not call",
        "micro-batches found by trying",
        "DP-KFC with a probe of three examples",
        "DP-KFC on words",
        "AdaDPS",
        "DiSK",
    ),
}


def _outcome(case):
    s, weights = case.train()
    metric = None if s.preconditioner is None else s.preconditioner.digest
    return {"weights": weights, "steps": s.steps_done, "metric": metric}


def _worker(rank, folder):
    found = {}
    for world, names in WORLDS.items():
        if rank < world:
            start(rank, world, folder / f"store-{world}")
            found[str(world)] = {name: _outcome(CASES[name]) for name in names}
            dist.destroy_process_group()
    return found


@functools.cache
def results():
    for case in CASES.values():
        case.plan().check_accounting()  # remembered, and told to the processes
    return run(_worker, max(WORLDS))


@pytest.mark.quick(
    "DP-SGD*", "DP-KFC", "DiSK", "DP-KFC on words", "*micro*", "*NGD*", "DP-KFC, two probes*"
)
@pytest.mark.parametrize("name", CASES)
def test_several_processes_equal_one(name):
    alone = _outcome(CASES[name])
    exact = alone["weights"].dtype == torch.float64
    for world in (world for world, names in WORLDS.items() if name in names):
        first, *others = [of[str(world)][name] for of in results()[:world]]
        assert first["steps"] == alone["steps"] > 0
        assert all(other == first for other in others)
        bounds = {"rtol": 1e-10, "atol": 1e-11} if exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(
            torch.tensor(first["weights"], dtype=alone["weights"].dtype), alone["weights"], **bounds
        )


def _draw_without_a_seed(rank, folder):
    start(rank, 2, folder / "store")
    drawn = []
    with Case({"test_mode_seed": None}).open(None)[0] as session:
        for batch in session.batches():
            drawn.append(batch.indices.tolist())
            session.step(batch, loss_fn)
    dist.destroy_process_group()
    return drawn


def test_processes_take_parts_of_one_batch_where_no_seed_makes_them_draw_alike():
    """If each drew its own batch, a record could be in several and count more than once."""
    one, other = run(_draw_without_a_seed, 2)
    assert any(one) and one == other
