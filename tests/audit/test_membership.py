"""Loss-threshold membership inference: known answers, honest silence on a private model, and a
model that learnt by heart.
"""

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from dpkfc.audit.membership import compute_losses, infer_membership, infer_membership_from_losses
from dpkfc.config import PrivacyConfig
from dpkfc.session import Session
from tests.audit.sizes import size
from tests.sessions import cross_entropy as loss

DELTA, N = 1e-5, size(600, 2000)


def examples(count, seed):
    """Classes that cannot be told from the inputs fully, so that there is something to learn by
    heart.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 20, generator=generator)
    return x, (x[:, 0] + torch.randn(count, generator=generator) > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Dropout(0.1), nn.Linear(200, 2))


def test_a_model_that_learnt_by_heart_is_caught(evidence):
    model, members = network(), examples(N // 3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        loss(model, members).mean().backward()
        optimizer.step()
    found = infer_membership(model, loss, members, examples(N, 2), delta=DELTA, claimed_epsilon=0.5)
    assert not found.passed and found.epsilon_lower > 0.5 and found.auc > 0.6
    assert not found.finding().passed
    evidence("membership", "no privacy", **found.describe())


def test_a_private_model_gives_nothing_away(evidence):
    config = PrivacyConfig(expected_batch_size=100, steps=size(40, 150), test_mode_seed=1)
    model, members = network(), examples(N, 1)
    plan = config.with_noise(2.0, DELTA, N)
    with Session(plan, model, torch.optim.SGD(model.parameters(), lr=0.5), members) as session:
        for batch in session.batches():
            session.step(batch, loss)
    claimed = plan.curve.epsilon(plan.steps)
    found = infer_membership(
        model, loss, members, examples(N, 2), delta=DELTA, claimed_epsilon=claimed
    )
    assert found.passed and found.epsilon_lower < 0.2
    assert abs(found.auc - 0.5) < 6 * math.sqrt(1 / 12 * (2 / N))
    assert all(rate.low <= rate.tpr <= rate.high for rate in found.rates)
    evidence("membership", "DP-SGD", **found.describe())


@pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
def test_losses_of_known_laws(mu):
    rng = np.random.default_rng(0)
    n = 20_000
    found = infer_membership_from_losses(rng.normal(size=n), rng.normal(mu, size=n), delta=DELTA)
    assert found.auc == pytest.approx(norm.cdf(mu / math.sqrt(2)), abs=0.015)
    for rate in found.rates:
        assert rate.tpr == pytest.approx(norm.cdf(norm.ppf(rate.fpr) + mu), abs=0.04)
        assert rate.low < rate.tpr < rate.high
        assert rate.fpr <= rate.fpr_high < 2.2 * rate.fpr
    true = {0.0: 0.0, 1.0: 4.377, 3.0: 17.0}[mu]
    assert found.epsilon_lower <= true
    assert found.epsilon_lower > {0.0: -1.0, 1.0: 1.9, 3.0: 5.0}[mu]
    assert found.passed  # nothing is claimed


def test_the_bound_holds_as_often_as_it_says():
    """Losses of the worst law for ε = 1: the test that the bound belongs to is randomised
    response.
    """
    rng, epsilon, runs, n = np.random.default_rng(1), 1.0, 300, 500
    right = 1 / (1 + math.exp(-epsilon))
    misses = 0
    for _ in range(runs):
        members, others = (
            (rng.random(n) > right).astype(float),
            (rng.random(n) < right).astype(float),
        )
        found = infer_membership_from_losses(members, others, delta=0.0, claimed_epsilon=epsilon)
        misses += not found.passed
    assert misses <= 45  # 300 runs at α = 0.05: more than that with a probability below 1e-9


def test_losses_are_those_of_evaluation_and_modes_are_put_back():
    model, held = network(), examples(130, 3)
    model[2].eval()
    model[0].train()
    first, second = compute_losses(model, loss, held, 50), compute_losses(model, loss, held, 200)
    assert np.allclose(first, second) and first.shape == (130,)
    assert model.training and model[0].training and not model[2].training
    model.eval()
    assert np.allclose(first, loss(model, held).detach().numpy())


def test_the_description_is_plain_and_what_makes_no_sense_is_refused():
    found = infer_membership_from_losses(
        [0.0, 1.0, 2.0, 0.5], [1.0, 2.0, 3.0, 4.0], delta=DELTA, claimed_epsilon=1.0
    )
    assert json.loads(json.dumps(found.describe()))["rates"][0]["fpr"] == 0.01
    assert "AUC" in found.finding().detail
    for bad in ([1.0], [1.0, 2.0, 3.0, math.nan]):
        with pytest.raises(ValueError, match="losses|scores"):
            infer_membership_from_losses(bad, [1.0, 2.0, 3.0, 4.0], delta=DELTA)
