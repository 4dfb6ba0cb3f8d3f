"""Mix examples in a loss: refused before anything is released, charged or moved.

`tests/zoo` holds the many ways to mix.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.test_session import loss_fn, net, plan, session, weights

Batch = tuple[Tensor, Tensor]


def contrast(model, batch):
    """Take every other example of the batch as a negative."""
    one, two = (F.normalize(model(x), dim=1) for x in (batch[0], batch[0] + 0.1))
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(one)), reduction="none")


def weigh_by_frequency(model, batch):
    """Count classes in the batch."""
    counts = torch.bincount(batch[1], minlength=3).clamp(min=1)
    return loss_fn(model, batch) / counts[batch[1]]


@pytest.mark.parametrize("loss", [contrast, weigh_by_frequency])
def test_a_loss_that_mixes_examples_is_refused_each_time(loss):
    model = net()
    before = weights(model)
    with session(plan(1.0), model) as s:
        for _ in range(2):
            with pytest.raises(ValueError, match="mixes examples|depends on the batch"):
                s.step(next(s.batches()), loss)
        assert s.ledger.count == 0 and s.epsilon == 0
    assert torch.equal(weights(model), before)
    assert all(p.grad is None for p in model.parameters())
