"""Refresh a metric in the memory of a step."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc import memory
from dpkfc.config import PrivacyConfig
from dpkfc.curvature import (
    GEP,
    KFAC,
    NGD,
    AdaDPS,
    FeatureNoise,
    Preconditioner,
    PublicData,
)
from dpkfc.gradients.discovery import find_layers
from dpkfc.memory import peak_bytes
from dpkfc.preconditioning import PreconditionerManager, refresh_microbatch_size
from dpkfc.session import Session
from tests.distributed.cases import loss
from tests.distributed.group import run, start
from tests.recording import Heard
from tests.test_session import kfac, loss_fn, net, plan, session, train, weights

T, WIDE, N = 32, 40, 60


class Tokens(nn.Module):
    """Few parameters and many positions, so that activations are nearly all of the memory."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, WIDE)
        self.body = nn.Sequential(
            *(m for _ in range(4) for m in (nn.Linear(WIDE, WIDE), nn.Tanh()))
        )
        self.head = nn.Linear(WIDE, 3)

    def forward(self, x):
        return self.head(self.body(self.table(x)).mean(1))


def tokens(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, (n, T), generator=generator), torch.randint(
        3, (n,), generator=generator
    )


# More than the last 64, which run backward too.
ROWS = 96
PUBLIC = PublicData(*tokens(ROWS, 1), provenance="drawn")
METHODS = {
    "inputs": KFAC(probe=PUBLIC, probe_size=ROWS),
    "both": KFAC(probe=PUBLIC, probe_size=ROWS, sides="both"),
    "NGD": NGD(probe=PUBLIC, lambda_safe=0.1, steps=2),
    "AdaDPS": AdaDPS(probe=PUBLIC, batch_size=32),
    "AdaDPS, one mini-batch": AdaDPS(probe=PUBLIC, batch_size=None),
    "GEP": GEP(probe=PUBLIC, rank=3),
}
MORE = {"NGD": {"readout": "natural"}, "GEP": {"clipping": "embedding_residual"}}


@pytest.mark.quick("NGD-settings1", "GEP-settings0")
@pytest.mark.parametrize(
    "settings",
    [{"expected_batch_size": 6}, {"expected_batch_size": 30, "max_physical_batch_size": 5}],
)
@pytest.mark.parametrize("name", METHODS)
def test_a_refresh_takes_no_more_memory_than_a_step(name, settings):
    """But for what it adds up: the sums of its factors, a layer's products in float64,
    eigenvectors.
    """
    torch.manual_seed(0)
    model = Tokens()
    config = PrivacyConfig(
        preconditioner=METHODS[name], steps=2, sampler="fixed", **settings, **MORE.get(name, {})
    )
    with Session(
        config.with_noise(1.0, 1e-3, N),
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        tokens(N),
        verify=False,
    ) as s:
        batch = next(s.batches())
        refresh = peak_bytes(lambda: s._pipeline.preconditioning.refresh(0))
        assert s.preconditioner is not None
        step = peak_bytes(partial(s.step, batch, loss_fn))
    whole = peak_bytes(lambda: _refresh(METHODS[name], Tokens()))
    assert refresh < 1.3 * step < whole


def _refresh(config, model):
    """A refresh that knows of no run."""
    coordinates = PreconditionerManager(config, model, find_layers(model))
    coordinates.refresh(0)
    assert coordinates.current is not None
    return coordinates.current


def test_the_number_is_a_public_one():
    """The smaller of micro-batch and batch, of which each process has its part; nothing that a step
    has found.
    """
    for settings, processes, expected in (
        ({}, 1, (12, False)),
        ({}, 5, (3, False)),
        ({"augmentations": 2}, 1, (24, False)),
        ({"max_physical_batch_size": 4}, 1, (4, False)),
        ({"max_physical_batch_size": 4}, 6, (2, False)),
        ({"max_physical_batch_size": 50}, 1, (12, False)),
        ({"max_physical_batch_size": "auto"}, 1, (12, True)),
    ):
        config = PrivacyConfig(expected_batch_size=12, steps=1, **settings)
        limit = config.refresh_rows(processes)
        assert (limit.most, limit.automatic) == expected


def test_half_as_many_where_the_examples_of_the_scale_run_a_second_time_anyway():
    def compute_size(most, *, first=True, **settings):
        return refresh_microbatch_size(KFAC(probe=FeatureNoise(6), **settings), most, first=first)

    assert [compute_size(most) for most in (1, 2, 5, 32, 63, 64, 65, 4096)] == [
        1,
        1,
        3,
        16,
        32,
        64,
        64,
        64,
    ]
    # a number of the user's own, where a step holds it
    assert [compute_size(most, chunk=8) for most in (3, 8, 4096)] == [
        2,
        8,
        8,
    ]
    assert compute_size(100, chunk=256) == 100
    # the whole probe at once has one pass
    assert [compute_size(most, probe_size=24) for most in (23, 24, 30)] == [
        12,
        24,
        30,
    ]
    assert [compute_size(30, first=first, later_probe_size=24) for first in (True, False)] == [
        15,
        30,
    ]
    assert (
        refresh_microbatch_size(AdaDPS(probe=FeatureNoise(6), probe_size=24, batch_size=12), 12)
        == 6
    )
    assert (
        refresh_microbatch_size(
            AdaDPS(probe=PublicData(*tokens(10), provenance="x"), batch_size=5), 12
        )
        == 12
    )
    # a user's own, which says nothing of its probe
    assert refresh_microbatch_size(_Own(), 12) == 12


class _Own(Preconditioner):
    """A user's own preconditioner with a micro-batch size and no probe."""

    microbatch_size = 64

    def describe(self):
        return {}

    def is_due(self, step):
        return True

    def build(self, *_):
        raise AssertionError


# -- nothing else changes --------------------------------------------------------------------------


# -- out of memory ---------------------------------------------------------------------------------


class Refreshed(nn.Module):
    """A device whose memory holds so many examples of a probe (a model is in evaluation mode then),
    and any step.
    """

    def __init__(self, capacity, kind=torch.cuda.OutOfMemoryError):
        super().__init__()
        self.capacity, self.kind, self.seen, self.failed = capacity, kind, Heard(), Heard()

    def forward(self, x):
        if not self.training:
            (self.failed if len(x) > self.capacity else self.seen).append(len(x))
            if len(x) > self.capacity:
                raise self.kind()
        return x


def limited(capacity, kind=torch.cuda.OutOfMemoryError):
    return nn.Sequential(*net(), Refreshed(capacity, kind))


@pytest.fixture(autouse=True)
def _no_estimate(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 50)


def cpu():
    return RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 bytes"
    )


AUTO = {"expected_batch_size": 12, "max_physical_batch_size": "auto", "steps": 4}


@pytest.mark.quick("*-MemoryError")
@pytest.mark.parametrize("kind", [torch.cuda.OutOfMemoryError, MemoryError, cpu])
@pytest.mark.parametrize(
    "own",
    [kfac(probe_size=24), AdaDPS(probe=FeatureNoise(6), probe_size=24, batch_size=12, every=2)],
)
def test_an_automatic_run_makes_its_refresh_smaller_and_goes_on(own, kind):
    whole, model = net(), limited(5, kind)
    with session(plan(1.0, preconditioner=own, **AUTO), whole) as s:
        train(s)
    with session(plan(1.0, preconditioner=own, **AUTO), model, verify=False) as s:
        train(s)
        assert s.ledger.count == 4 and s._size.bound != 4  # what a step holds is another number
    assert max(model[-1].seen) == 4
    # half of the batch, in the first refresh; the second one remembers
    assert model[-1].failed == [6]
    assert_close(weights(model), weights(whole), rtol=1e-9, atol=1e-10)


def test_a_given_size_is_named_and_nothing_is_charged():
    for size, capacity, message in ((6, 2, "3 probe examples"), ("auto", 0, "one probe example")):
        model = limited(capacity)
        before = weights(model)
        with session(
            plan(1.0, preconditioner=kfac(), expected_batch_size=12, max_physical_batch_size=size),
            model,
        ) as s:
            with pytest.raises(
                RuntimeError, match=f"{message} .*not fit into memory .*nothing was released"
            ):
                train(s)
            assert s.ledger.count == 0
        assert torch.equal(before, weights(model))


def test_on_a_cpu_the_bytes_of_a_few_probe_examples_are_looked_at(monkeypatch):
    seen = {}
    for free in (1 << 50, 12_000):
        monkeypatch.setattr(memory, "available_bytes", lambda free=free: free)
        model, whole = limited(100), kfac(probe_size=24, decay=0.0)
        settings = {**AUTO, "expected_batch_size": 30, "preconditioner": whole}
        with session(plan(1.0, **settings), model, verify=False) as s:
            s._pipeline.preconditioning.refresh(0)
            model[-1].seen.clear()
            s._pipeline.preconditioning._config = replace(whole, seed=1)
            s._pipeline.preconditioning.refresh(2)
        seen[free] = max(model[-1].seen)
    assert seen[1 << 50] == 24 and 1 <= seen[12_000] < 24


def test_a_loss_that_draws_numbers_keeps_the_examples_it_draws_for():
    """How many it is called with decides what it draws, so it must not follow the settings of a
    run.
    """
    model = limited(100)
    with session(
        plan(1.0, preconditioner=kfac(loss=loss, probe_size=24), expected_batch_size=4),
        model,
        verify=False,
    ) as s:
        s._pipeline.preconditioning.refresh(0)
    assert set(model[-1].seen) == {24}


def _run_short_of_memory(rank, folder):
    """What both processes do when the probe does not fit on the second one: with "auto", and with a
    number.
    """
    start(rank, 2, folder / "store")
    found = list[list[Any]]()
    for size in ("auto", 8):
        model = limited(3 if rank else 100, MemoryError)
        settings = {
            "preconditioner": kfac(probe_size=24),
            "expected_batch_size": 16,
            "max_physical_batch_size": size,
            "steps": 3,
        }
        with session(
            plan(1.0, **settings), model, ledger_path=folder / f"ledger-{size}.jsonl", verify=False
        ) as s:
            try:
                train(s)
                found.append(
                    [weights(model), s.ledger.count, s.preconditioner.digest, max(model[-1].seen)]
                )
            except (RuntimeError, MemoryError) as error:
                found.append([str(error), s.ledger.count])
    return found


def test_what_does_not_fit_on_one_process_is_made_smaller_on_all():
    whole = net()
    with session(
        plan(1.0, preconditioner=kfac(probe_size=24), expected_batch_size=16, steps=3), whole
    ) as s:
        train(s)
    (first, *refused), (second, *others) = run(_run_short_of_memory, 2)
    assert first[:3] == second[:3] and first[1] == 3
    # 4, half of a step's, was begun with on both, and 2 is what the second one can hold
    assert (first[3], second[3]) == (
        4,
        2,
    )
    assert_close(torch.tensor(first[0], dtype=torch.float64), weights(whole), rtol=1e-9, atol=1e-10)
    for message, charged in (*refused, *others):
        assert (
            "4 probe examples does not fit into memory" in message
            and "nothing was released" in message
            and charged == 0
        )
