"""Processes that are not about to do the same thing are told so, all of them, before anything is
spent.
"""

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.distributed.context import DistributedContext
from dpkfc.session import Session
from tests.distributed.cases import Case
from tests.distributed.group import run, start
from tests.test_session import N, data, kfac, loss_fn, net


class Drifting(FeatureNoise):
    """A probe that describes itself alike on all processes and returns something else on each."""

    def sample(self, n, generator):
        x, _ = super().sample(n, generator)
        return x + DistributedContext.current().rank, None


def _move_weights(rank):
    model = net()
    with torch.no_grad():
        model[2].bias += 1e-15 * rank
    return model


def _roll_records(rank):
    x, y = data()
    return x.roll(rank, 0), y


class Files(Dataset[Any]):
    """Records that are read one by one: an image that is augmented at random on every reading, a
    label and a name.
    """

    def __init__(self, order):
        self.order, (self.x, self.y) = order.tolist(), data()

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        i = self.order[index]
        return {
            "x": self.x[i] + torch.randn(6),
            "y": self.y[i],
            "name": f"{i}.png",
            "size": [i] * (i % 3),
        }


def _files(rank, shuffled):
    generator = torch.Generator().manual_seed(rank * shuffled)
    model, files = net(), Files(torch.randperm(N, generator=generator))
    torch.manual_seed(100 + rank)
    before = torch.get_rng_state()
    _session(rank, model=model, dataset=files).close()
    assert torch.equal(torch.get_rng_state(), before)


def _session(
    rank,
    *,
    model=None,
    dataset=None,
    lr=0.1,
    **settings,
):
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    return Session(Case(settings).plan(), model, optimizer, data() if dataset is None else dataset)


def _wrap_model(rank):
    _session(rank, model=nn.parallel.DistributedDataParallel(net()))


def _drift(rank):
    """A learning rate of its own on one process is seen before a checkpoint is written."""
    with _session(rank) as s:
        for group in s.optimizer.param_groups:
            group["lr"] = 0.1 + 0.1 * rank
        s.step(next(s.batches()), loss_fn)
        s.save("never-written")


def _fails_on_one(rank):
    def loss(model, batch):
        if rank == 1:
            raise KeyError("boom")
        return loss_fn(model, batch)

    with _session(rank) as s:
        s._verify = False
        try:
            s.step(next(s.batches()), loss)
        finally:
            assert s.ledger.count == 0


def _bad_probe_on_one(rank):
    probe = _NanBehind(6)
    with _session(rank, preconditioner=kfac(probe=probe)) as s:
        s.step(next(s.batches()), loss_fn)


class _NanBehind(FeatureNoise):
    """A probe whose last example, which the last process runs, is not finite."""

    def sample(self, n, generator):
        x, _ = super().sample(n, generator)
        x[-1] = torch.nan
        return x, None


def _lose_step(rank):
    with _session(rank) as s:
        if rank == 0:
            s.batches()
            s._ranks.broadcast_from_rank0(lambda: None, "save")
        else:
            next(s.batches())
            return
    raise RuntimeError("rank 0 at 'save'")


def _ledger_that_cannot_be_written(rank):
    Session(
        Case().plan(),
        m := net(),
        torch.optim.SGD(m.parameters(), 0.1),
        data(),
        ledger_path="no such folder/ledger.jsonl",
    )


# name: what is done on each rank, what the error of both says
REFUSED = {
    "plan": (
        lambda rank: _session(rank, max_grad_norm=1.0 + rank),
        "rank 1 has another plan than rank 0",
    ),
    "preconditioner": (
        lambda rank: _session(rank, preconditioner=kfac(seed=rank)),
        "rank 1 has another plan .*same probe",
    ),
    "values": (
        lambda rank: _session(rank, model=_move_weights(rank)),
        r"another parameter '2.bias' than rank 0; .*torch.manual_seed",
    ),
    "shapes": (
        lambda rank: _session(rank, model=nn.Linear(6, 3 + rank).double()),
        r"another parameter 'weight' than rank 0 \(\(4, 6\) float64, not \(3, 6\) float64\)",
    ),
    "names": (
        lambda rank: _session(
            rank, model=[nn.Sequential(nn.Linear(6, 3)), nn.Linear(6, 3)][rank].double()
        ),
        r"another parameter '0.weight' than rank 0 \(none, not ",
    ),
    "frozen": (
        lambda rank: _session(rank, model=net().requires_grad_(False) if rank else net()),
        "another parameter '0.weight' .*frozen",
    ),
    "number of records": (
        lambda rank: _session(rank, dataset=data(N + rank)),
        r"\(41, not 40\); .*WHOLE dataset.*DistributedSampler",
    ),
    "order of files": (
        lambda rank: _files(rank, True),
        "another some records than rank 0; .*sort file names",
    ),
    "augmented files": (lambda rank: _files(rank, False), "nothing was refused"),
    "records": (
        lambda rank: _session(rank, dataset=_roll_records(rank)),
        r"another some records than rank 0; ",
    ),
    "optimizer": (lambda rank: _session(rank, lr=0.1 + rank), "another optimizer than rank 0"),
    "wrapped": (_wrap_model, r"the model is wrapped in DistributedDataParallel.*model\.module"),
    "drifted": (_drift, "another parameter '0.weight' after steps than rank 0; .*learning rate"),
    "probe": (
        lambda rank: _step(_session(rank, preconditioner=kfac(probe=Drifting(6)))),
        "the probe returns other inputs on rank 1 than on rank 0",
    ),
    "failure": (_fails_on_one, "boom"),
    "probe that fails on one": (_bad_probe_on_one, "NaN or infinity"),
    "ledger": (_ledger_that_cannot_be_written, "cannot be written"),
    "out of step": (_lose_step, "rank 0 .*at 'save'"),
}


def _step(s):
    s.step(next(s.batches()), loss_fn)


def _worker(rank, folder):
    start(rank, 2, folder / "store")
    found = {}
    for name, (work, _) in REFUSED.items():
        try:
            work(rank)
            found[name] = "nothing was refused"
        except (ValueError, RuntimeError, KeyError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return found


@functools.cache
def results():
    return run(_worker, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_on_every_process(name):
    pattern = REFUSED[name][1]
    for found in results():
        assert re.search(pattern, found[name]), found[name]


def test_a_failure_tells_the_others_where_and_what():
    zero, one = (found["failure"] for found in results())
    assert one == "KeyError: 'boom'"
    assert zero == (
        "RuntimeError: another process failed, rank 1, so nothing was released. It says:"
        " KeyError: 'boom'"
    )


def test_nothing_that_is_private_is_in_an_error():
    for found in results():
        assert not re.search(r"[0-9a-f]{12}", found["records"])
