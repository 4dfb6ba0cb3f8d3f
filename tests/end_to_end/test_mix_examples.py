"""Mix examples in a model or in a loss: refused before anything is released, charged or moved.

`tests/zoo` holds the many ways to mix.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.mutation_cases import Handed, N, data, flat, net, plan, session, weights
from tests.sessions import assert_refused
from tests.sessions import cross_entropy as loss_fn


class Mixer(nn.Module):
    """Subtracts the mean over the batch, which one example alone cannot show to be wrong."""

    def forward(self, x):
        return x - 0.5 * x.mean(0, keepdim=True)


def mixing_loss(model, batch):
    losses = loss_fn(model, batch)
    return losses * losses.detach().mean()


class Read(torch.utils.data.Dataset):
    """Private rows that say which of them were read."""

    def __init__(self):
        self.x, self.y = data()
        self.rows = []

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.rows.append(int(i))
        return self.x[i], self.y[i]


class TrainingMixer(nn.Module):
    """Mixes examples in training mode only."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True) if self.training else x


class GroupsOfFour(nn.Module):
    """Mixes examples two apart: a pair cannot show it."""

    def forward(self, x):
        return x + 0.1 * x.roll(2, 0) if len(x) > 2 else x


MIXERS = {
    "loss": (net, mixing_loss),
    "module": (lambda: net(Mixer()), loss_fn),
    "fours": (lambda: net(GroupsOfFour()), loss_fn),
    "training": (lambda: net(TrainingMixer(), nn.Dropout(0.3)), loss_fn),
}


@pytest.mark.parametrize("where", MIXERS)
def test_mixing_is_refused_before_a_private_batch_is_read(where):
    """A few records in places that depend on no batch tell types and shapes; no other is read."""
    make, losses = MIXERS[where]
    model, rows = make(), Read()
    before = weights(model)
    s = session(plan(), model, dataset=rows)
    rows.rows.clear()
    assert_refused(s, "mixes examples|depends on the batch", losses, times=2)
    assert set(rows.rows) <= set(np.linspace(0, N - 1, 16).astype(int))
    assert s.epsilon == 0 and torch.equal(weights(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_begins_to_mix_later_gives_every_example_its_own_gradient():
    """A margin loss is zero on easy examples, and zeros agree with anything; the operations of
    every pass are followed.
    """

    def margin(model, batch):
        return F.relu(mixing_loss(model, batch)) if switch[0] else loss_fn(model, batch) * 0

    handed = []
    for bound in (None, 1):
        switch, model = [0.0], net()
        optimizer = Handed(model)
        with session(plan(max_physical_batch_size=bound), model, optimizer) as s:
            for batch in s.batches():
                s.step(batch, margin)
                switch[0] = 1.0
        handed.append(flat(g for step in optimizer.handed for g in step.values()))
    assert torch.allclose(*handed, rtol=1e-12)


def test_verification_happens_in_every_session_even_one_that_continues(tmp_path):
    """A checkpoint does not carry "verified" along: the loss of the next run may be another one."""
    p = plan()
    model = net()
    with session(p, model, ledger_path=tmp_path / "ledger.jsonl") as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
            break
        s.save(tmp_path / "checkpoint")
    model = net()
    with session(p, model, ledger_path=tmp_path / "ledger.jsonl") as s:
        s.restore(tmp_path / "checkpoint")
        with pytest.raises(ValueError, match="mixes examples"):
            s.step(next(s.batches()), mixing_loss)
        assert s.ledger.count == 1
