"""Processes that hold a part of the records each release what one process with all releases."""

import functools
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Subset, TensorDataset

from dpkfc import PrivacyConfig
from dpkfc.distributed.context import DistributedContext
from dpkfc.distributed.shares import check_shares
from tests.distributed.cases import Case
from tests.distributed.group import run, start
from tests.test_session import N, data, kfac, loss_fn

ENDS = {2: (0, 5, N), 3: (0, 4, N - 1, N)}
# Every record is in every batch.
FULL = {"expected_batch_size": N, "sampler": "poisson"}
CASES = {
    "DP-SGD": Case(FULL),
    "micro-batches": Case({**FULL, "max_physical_batch_size": 2}),
    "DP-KFC": Case({**FULL, "preconditioner": kfac()}),
}


def part(rank, world):
    ends = ENDS[world]
    return Subset(TensorDataset(*data()), range(ends[rank], ends[rank + 1]))


def train_shares(rank, folder, world):
    start(rank, world, folder / "store")
    found = []
    for case in CASES.values():
        own = replace(case, dataset=functools.partial(part, rank, world), options={"share": True})
        session, weights = own.train()
        found.append({"weights": weights, "steps": session.steps_done})
    # Rows of one process are drawn by it alone, and by no two alike.
    sampled = Case({"expected_batch_size": 5, "steps": 40})
    named = {"share": "all:" + rows(rank, world)}
    sampled = replace(sampled, dataset=functools.partial(part, rank, world), options=named)
    session, _ = sampled.open(folder / "ledger.jsonl")
    batches = []
    with session:
        for batch in session.batches():
            batches.append(batch.indices.tolist())
            session.step(batch, loss_fn)
    found.append(batches)
    dist.destroy_process_group()
    return found


def rows(rank, world):
    return f"{ENDS[world][rank]}-{ENDS[world][rank + 1]}"


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shares_release_what_one_process_releases(world):
    outcomes = run(train_shares, world, world)
    for number, case in enumerate(CASES.values()):
        _, alone = case.train()
        for outcome in outcomes:
            found = torch.tensor(outcome[number]["weights"], dtype=torch.float64)
            assert float((found - alone).abs().max()) < 1e-10
            assert outcome[number]["steps"] == 4
    sizes = [[len(batch) for batch in outcome[-1]] for outcome in outcomes]
    for rank, counts in enumerate(sizes):
        held = ENDS[world][rank + 1] - ENDS[world][rank]
        mean = 40 * held * 5 / N
        assert abs(sum(counts) - mean) < 4 * mean**0.5 + 1
        assert max(max(batch, default=0) for batch in outcomes[rank][-1]) < held
    assert sizes[0] != sizes[1]


SETTINGS = {
    "fixed": ({"sampler": "fixed"}, "share= needs sampler='poisson'.*with 'fixed' give every"),
    "cut": (
        {"sampler": "truncated_poisson", "max_batch_size": 9},
        "share= needs sampler='poisson'.*'truncated_poisson'",
    ),
    "units": (
        {"unit": "patient", "max_records_per_unit": 2},
        "share= does not go with units; give every process all records",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_batches_that_are_no_unions_of_parts_are_refused(name):
    settings, message = SETTINGS[name]
    case = Case({"expected_batch_size": 8, **settings}, options={"share": True})
    with pytest.raises(ValueError, match=message):
        case.train()


class Ranks:
    """Processes that hold what they are said to."""

    def __init__(self, shares):
        self.shares = shares

    def all_gather(self, value):
        return self.shares


def gather_shares(held, data=None):
    """Check shares of processes with these records and names."""
    given = []

    class First(Ranks):
        def all_gather(self, value):
            given.append(value)
            return [value]

    total = sum(count for count, _ in held)
    for count, facts in held:
        with suppress(ValueError):
            check_shares(First([]), count, count, facts, data)
    check_shares(Ranks(given), held[0][0], total, held[0][1], data)


@pytest.mark.parametrize(
    "held, message",
    [
        ([(5, True), (0, True)], "process 1 holds no record"),
        ([(5, "a.csv"), (5, "a.csv")], "processes 0 and 1 hold the same records"),
        ([(5, ["a", "b"]), (5, "c"), (9, ["d", "b"])], "processes 0 and 2 hold the same records"),
        ([(5, "a.csv:0-500"), (5, "a.csv:400-900")], "processes 0 and 1 hold the same records"),
        ([(5, "a.csv:0-500"), (5, "a.csv")], "processes 0 and 1 hold the same records"),
        ([(5, "a.csv:0-500"), (5, "a.csv:500-900")], ""),
        ([(5, "a.csv:0-500"), (5, "b.csv:0-500")], ""),
        ([(5, True), (5, True)], ""),
    ],
)
def test_parts_that_overlap_by_name_are_refused(held, message):
    if not message:
        gather_shares(held)
        return
    with pytest.raises(ValueError, match=message) as refused:
        gather_shares(held)
    assert len(str(refused.value)) <= 160


def test_views_of_the_same_rows_and_a_wrong_sum_are_refused():
    views = Subset(TensorDataset(*data()), range(2, 7))
    with pytest.raises(ValueError, match="processes 0 and 1 hold the same records"):
        gather_shares([(5, True), (5, True)], views)
    ranks = DistributedContext.current()
    with pytest.raises(ValueError, match="hold 5 records together, the plan is for 9"):
        check_shares(ranks, 5, 9, True, views)
    plan = PrivacyConfig(expected_batch_size=5, steps=1).with_noise(1.0, 1e-3, 9)
    assert plan.sampler.dataset_size == 9
