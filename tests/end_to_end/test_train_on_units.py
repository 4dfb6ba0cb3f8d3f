"""Train for whole patients: all records of one share one gradient, one clip and one draw."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dpkfc.config import PrivacyConfig
from dpkfc.session import Session
from tests.test_session import loss_fn, net, weights

COUNTS = (1, 4, 2, 7, 3, 1, 5, 2)  # records of each of the 8 patients
OWNERS = np.repeat(np.arange(len(COUNTS)), COUNTS)
LIMIT = 4


def records():
    generator = torch.Generator().manual_seed(3)
    n = len(OWNERS)
    return torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.randint(
        0, 3, (n,), generator=generator
    )


def plan(noise=0.0, units=8, **settings):
    values = {
        "expected_batch_size": units,
        "steps": 3,
        "test_mode_seed": 5,
        "unit": "patient",
        "max_records_per_unit": LIMIT,
        **settings,
    }
    return PrivacyConfig(**values).with_noise(noise, 1e-3, units)


def session(p, model, dataset=None, units=OWNERS, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    return Session(
        p, model, optimizer, records() if dataset is None else dataset, units=units, **options
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bound", [None, 4, 9, "auto"])
def test_all_records_of_a_unit_share_one_clip(reduction, bound):
    """Against a loop over patients: one gradient, one norm, one factor each; expected batch size
    counts patients.
    """
    mine, theirs = net(), net()
    x, y = records()
    p = plan(max_grad_norm=0.3, unit_reduction=reduction, max_physical_batch_size=bound)
    reference = torch.optim.SGD(theirs.parameters(), 0.1)
    with session(p, mine) as s:
        for batch in s.batches():
            total = [torch.zeros_like(q) for q in theirs.parameters()]
            assert batch.records.shape == (len(COUNTS), LIMIT)
            for row in batch.records:
                own = torch.from_numpy(row[row >= 0])
                losses = loss_fn(theirs, (x[own], y[own]))
                grads = torch.autograd.grad(getattr(losses, reduction)(), list(theirs.parameters()))
                factor = min(1.0, 0.3 / float(torch.sqrt(sum(g.square().sum() for g in grads))))
                total = [t + factor * g for t, g in zip(total, grads, strict=True)]
            for q, t in zip(theirs.parameters(), total, strict=True):
                q.grad = t / len(COUNTS)
            reference.step()
            record = s.step(batch, loss_fn)
            assert record.batch_size == len(COUNTS)
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-9, atol=1e-11)


def test_dict_batches_an_own_collate_and_a_column_of_the_dataset():
    x, y = records()

    class Table(torch.utils.data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return OWNERS.tolist() if i == "patient" else {"inputs": x[i], "labels": y[i]}

    def dict_loss(model, batch):
        return F.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="none")

    def own_collate(rows):
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    results = []
    for dataset, units, loss, collate in (
        (None, OWNERS, loss_fn, None),
        (Table(), "patient", dict_loss, None),
        (Table(), torch.from_numpy(OWNERS), dict_loss, own_collate),
    ):
        model = net()
        p = plan(1.0, expected_batch_size=3, max_physical_batch_size=5)
        with session(p, model, dataset, units, collate_fn=collate) as s:
            for batch in s.batches():
                s.step(batch, loss)
        results.append(weights(model))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "patient"}, "needs a name and the most records"),
        ({"max_records_per_unit": 4}, "needs a name and the most records"),
        ({"unit": "", "max_records_per_unit": 4}, "unit must be a name"),
        (
            {"unit": "patient", "max_records_per_unit": 0},
            "max_records_per_unit must be an integer >= 1",
        ),
        (
            {"unit": "patient", "max_records_per_unit": 4, "unit_reduction": "max"},
            "unit_reduction must be one of mean, sum; got 'max'",
        ),
        (
            {"unit": "patient", "max_records_per_unit": 4, "max_physical_batch_size": 3},
            "max_physical_batch_size=3 is less than max_records_per_unit=4.*never split",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        PrivacyConfig(expected_batch_size=4, steps=1, **settings)


def test_units_and_plan_must_agree():
    with pytest.raises(ValueError, match="protects one patient, so the session needs units="):
        session(plan(), net(), units=None)
    plain = PrivacyConfig(expected_batch_size=8, steps=3).with_noise(1.0, 1e-3, len(OWNERS))
    with pytest.raises(ValueError, match="the plan protects single examples"):
        session(plain, net())
    with pytest.raises(ValueError, match="units has 24 ids for the 25 records"):
        session(plan(), net(), units=OWNERS[1:])
    with pytest.raises(
        ValueError,
        match=r"calibrated for 25 patients but the dataset has 8.*number of distinct ids",
    ):
        session(plan(units=25), net())
    with pytest.raises(ValueError, match="no column 'patient'"):
        session(plan(), net(), units="patient")
