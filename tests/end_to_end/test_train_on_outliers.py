"""Hold one extreme record: it changes its own clipped gradient and nothing else."""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from dpkfc.data.loading import MicroBatches, layout
from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_sum import clipped_sum
from dpkfc.gradients.discovery import find_layers

N, D, C = 6, 4, 0.5
EXTREMES = (1e20, -3.4e38, 1.7e12, float("nan"), float("inf"), -float("inf"), 1e-42, 1.7e18)
X = torch.randn(N, D, generator=torch.Generator().manual_seed(3))
Y = torch.randn(N, generator=torch.Generator().manual_seed(4))


def squared_error(model, batch):
    return (model(batch[0])[:, 0] - batch[1]) ** 2


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), (batch[1] > 0).long(), reduction="none")


def loss_with_jitter(model, batch):
    """Add to all matrices where torch refuses one of them, as programs with covariances do."""
    is_odd = (batch[0].abs() > 1e9).any(1, keepdim=True)
    variances = 1 + model(batch[0]).nan_to_num().square()
    matrices = torch.diag_embed(torch.where(is_odd, -1.0, variances))
    try:
        factors = torch.linalg.cholesky(matrices)
    except RuntimeError:
        factors = torch.linalg.cholesky(matrices + 9 * torch.eye(3))
    return factors.diagonal(dim1=1, dim2=2).log().sum(1)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), nn.ReLU(), nn.Linear(5, 3))


def set_entry(value, place, entry):
    x = X.clone()
    x[place, entry] = value
    return x, Y


def leave_out(place):
    kept = [i for i in range(N) if i != place]
    return X[kept], Y[kept]


CASES = {
    "value": st.sampled_from(EXTREMES),
    "place": st.integers(0, N - 1),
    "entry": st.integers(0, D - 1),
    "loss": st.sampled_from([squared_error, cross_entropy, loss_with_jitter]),
}


def flat(sums):
    return torch.cat([sums[name].double().flatten() for name in sorted(sums)])


def central(data, loss, bound):
    """The clipped sum and the norms of all records."""
    model, loader = net(), MicroBatches(data)
    parts = layout(np.arange(len(data[0])), bound)
    loaded = zip(loader.load([part.records for part in parts]), parts, strict=True)
    sums, norms = clipped_sum(
        model,
        find_layers(model),
        {},
        Clip(C),
        loss_fn=loss,
        micro_batches=loaded,
        one_record=loader.load_one,
    )
    return flat(sums), norms


@settings(max_examples=30, deadline=None)
@given(**CASES, bound=st.sampled_from([None, 1, 4]))
def test_an_extreme_record_changes_its_own_clipped_gradient_and_nothing_else(
    value, place, entry, loss, bound
):
    x, y = set_entry(value, place, entry)
    total, norms = central((x, y), loss, bound)
    others, norms_of_others = central(leave_out(place), loss, bound)
    own, _ = central((x[place : place + 1], y[place : place + 1]), loss, None)
    kept = [i for i in range(N) if i != place]
    assert bool(torch.isfinite(total).all()) and float(own.norm()) <= C * (1 + 1e-6)
    assert float((total - others).norm()) <= C * (1 + 1e-5)
    assert_close(total - own, others, rtol=0, atol=1e-5 * C)
    assert_close(norms[kept], norms_of_others, rtol=1e-5, atol=0)
