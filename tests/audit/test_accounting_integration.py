"""Every kind of event against a numerical integration of the neighbours themselves, which knows
nothing of dp-accounting.

Two integrations of the loss, by FFT under a tilt and along a line of complex orders, must agree
before either counts.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dpkfc import PrivacyConfig, Session
from dpkfc.curvature.gep import GEP
from dpkfc.data.sampling import FixedSize, TruncatedPoisson
from dpkfc.postprocess import DiSK
from dpkfc.privacy import accounting
from tests.audit import integration as by_hand
from tests.audit.integration import _tilt, epsilon_of, integrated_epsilon, sampled_losses
from tests.audit.sizes import FULL, size

DELTA = 1e-5

# -- the integrations themselves -------------------------------------------------------------------


@pytest.mark.parametrize(
    "q, noise", [(0.1, 1.0), (0.02, 0.7), (0.5, 2.0), (1e-3, 0.45), (1.0, 3.0)]
)
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_one_release_has_its_closed_form(q, noise, delta):
    found = epsilon_of(sampled_losses(q, noise), 1, delta)
    if found == 0:
        assert by_hand.one_release_delta(q, noise, 0.0) <= delta
    else:
        assert by_hand.one_release_delta(q, noise, found) == pytest.approx(delta, rel=5e-3)


CONTOUR = [(0.1, 2.0, 500, 1e-10)]
if FULL:
    CONTOUR += [(0.01, 0.8, 2000, 1e-5), (0.5, 4.0, 100, 1e-6), (0.001, 0.45, 100_000, 1e-10)]
    CONTOUR += [(0.01, 8.0, 100_000, 1e-12), (0.2, 1.0, 1000, 1e-8)]


@pytest.mark.parametrize("q, noise, count, delta", CONTOUR)
def test_the_second_integration_agrees(q, noise, count, delta, evidence):
    losses = sampled_losses(q, noise)
    found = epsilon_of(losses, count, delta)
    tilt = _tilt(losses, count, delta)
    by_contour = by_hand.contour_delta(losses, count, found, tilt)
    assert by_contour == pytest.approx(delta, rel=5e-3)
    row = f"two integrations, q {q}, sigma {noise}, T {count}, delta {delta}"
    evidence("accounting", row, epsilon=found, relative_difference_in_delta=by_contour / delta - 1)


# -- fixed size ------------------------------------------------------------------------------------


FIXED = [(10, 2, 1.5, 20), (1000, 50, 1.0, 100), (10, 9, 3.0, 10), (10, 10, 4.0, 10)]


@pytest.mark.parametrize("n, m, noise, count", FIXED)
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_fixed_size_batches_claim_no_less_than_their_neighbours_cost(
    n, m, noise, count, delta, evidence
):
    """Noise of noise_multiplier · 2C on sums of terms within C: the example replaced, the others
    -C, 0 or C.
    """
    sampler = FixedSize(m, n)
    claimed = accounting.epsilon(sampler.event(noise), count, delta, "rdp", "replace_one")
    stddev = noise * sampler.sensitivity(1.0)
    true = max(
        by_hand.epsilon_of_pair(both, count, delta) for both in by_hand.fixed_size(n, m, stddev)
    )
    assert claimed >= true
    assert integrated_epsilon(sampler.event(noise), count, delta) == pytest.approx(true, abs=2e-3)
    assert claimed <= 12 * true + 1
    evidence(
        "accounting",
        f"fixed size, n {n}, m {m}, delta {delta}",
        claimed=claimed,
        integrated=true,
        ratio=claimed / true,
    )


# -- truncated Poisson -----------------------------------------------------------------------------

TRUNCATED = [(50, 0.1, 9, 5.0, 100), (30, 0.5, 15, 8.0, 50)]
if FULL:
    TRUNCATED += [
        (50, 0.1, 6, 2.0, 20),
        (200, 0.05, 14, 2.0, 200),
        (50, 0.1, 20, 2.0, 100),
        (3, 0.4, 2, 3.0, 10),
    ]
    TRUNCATED += [(8, 0.125, 1, 3.0, 30), (1000, 0.02, 30, 1.0, 500), (1000, 0.02, 61, 0.8, 100)]


@pytest.mark.parametrize("n, q, most, noise, count", TRUNCATED)
def test_truncated_poisson_claims_no_less_than_its_neighbours_cost(
    n, q, most, noise, count, evidence
):
    event = TruncatedPoisson(q, n, most).event(noise)
    by_pld, by_rdp = (accounting.epsilon(event, count, DELTA, by) for by in ("pld", "rdp"))
    bound = integrated_epsilon(event, count, DELTA)
    assert bound - 1e-3 <= by_pld <= bound + 5e-3
    assert by_pld <= by_rdp + 1e-3
    for size_ in (n, n + 1):  # without an example of its own, and with one more
        for others in (-1.0, -0.5, 0.0, 1.0):
            both = by_hand.list_truncated_pairs(size_, q, most, noise, others)
            true = by_hand.epsilon_of_pair(both, count, DELTA)
            assert by_pld >= true - 1e-6 or by_hand.holds_delta(both, count, by_pld, DELTA), (
                size_,
                others,
            )
            assert by_rdp >= true - 1e-6
    evidence(
        "accounting",
        f"truncated Poisson, n {n}, q {q}, at most {most}",
        pld=by_pld,
        rdp=by_rdp,
        integrated=bound,
    )


# -- units, joint releases, filters ----------------------------------------------------------------


def test_units_are_the_examples_of_the_integration():
    """A patient's records share one clip, whichever of them are drawn: shifts within C, mixed at
    random, cost at most C.
    """
    config = PrivacyConfig(expected_batch_size=10, steps=80, unit="patient", max_records_per_unit=3)
    plan = config.with_noise(1.3, DELTA, 100)
    q = 10 / 100
    assert plan.sensitivity == 1.0
    worst = by_hand.epsilon_of_pair(by_hand.poisson(q, plan.stddev), 80, DELTA)
    assert plan.epsilon() == pytest.approx(worst, abs=2e-3)
    # by which records of the unit were drawn
    for shifts in (
        (1.0, -1.0, 0.5),
        (1.0, 1.0, 1.0),
        (-0.2, 0.9, 1.0),
    ):
        p = [(1 - q, 0.0), *((q / 3, s) for s in shifts)]
        assert (
            by_hand.epsilon_of_pair(by_hand.pair(p, [(1.0, 0.0)], plan.stddev), 80, DELTA)
            <= plan.epsilon() + 1e-3
        )


def test_the_two_parts_of_gep_are_one_release(evidence):
    """Embedding and residual, each clipped to C, one coin for both: two coordinates that move
    together by (C, C).
    """
    from tests.test_gep import split

    plan = split(1.3, sampler="poisson")
    q, steps = plan.sampler.sample_rate, plan.steps
    assert isinstance(plan.config.preconditioner, GEP)
    c = plan.sensitivity / math.sqrt(2)
    assert c == pytest.approx(plan.max_grad_norm)
    both = by_hand.pair(
        [(1 - q, (0.0, 0.0)), (q, (c, c))], [(1.0, (0.0, 0.0))], plan.stddev, fine=14
    )
    true = by_hand.epsilon_of_pair(both, steps, plan.delta)
    assert plan.epsilon() == pytest.approx(true, abs=3e-3)
    alone = by_hand.pair([(1 - q, 0.0), (q, c)], [(1.0, 0.0)], plan.stddev)
    assert by_hand.epsilon_of_pair(alone, steps, plan.delta) < true  # one part costs less
    evidence(
        "accounting",
        "GEP, embedding and residual as one release",
        plan=plan.epsilon(),
        integrated=true,
    )


def test_the_two_points_of_disk_are_one_release():
    """Gradients at two points are combined, then clipped: one release a step of the event of plain
    DP-SGD.
    """
    config = PrivacyConfig(expected_batch_size=4, steps=6, max_grad_norm=0.7)
    plain = config.with_noise(1.5, DELTA, 20)
    plan = replace(config, postprocess=(DiSK(kappa=0.7, gamma=0.5),)).with_noise(1.5, DELTA, 20)
    assert plan.event == plain.event
    assert plan.sensitivity == plain.sensitivity == 0.7
    torch.manual_seed(0)
    model, data = nn.Linear(3, 1), (torch.randn(20, 3), torch.randn(20, 1))
    with Session(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), data) as session:
        for batch in session.batches():
            session.step(batch, lambda m, b: ((m(b[0]) - b[1]) ** 2).sum(1))
        assert session.ledger.count == 6
        true = by_hand.epsilon_of_pair(
            by_hand.pair([(0.8, 0.0), (0.2, 0.7)], [(1.0, 0.0)], plan.stddev), 6, DELTA
        )
        assert session.epsilon == pytest.approx(true, abs=2e-3)


@pytest.mark.parametrize("seed", range(size(1, 40)))
def test_calibrated_noise_keeps_the_target_by_integration_too(seed, evidence):
    """Random targets of all samplers: ε of the noise found is at most the target, of a little less
    noise above it.
    """
    g = np.random.default_rng(seed)
    n, delta = int(10 ** g.uniform(2, 5)), float(10 ** g.uniform(-8, -4))
    b = max(1, round(n * 10 ** g.uniform(-3, -0.5)))
    kind = (
        ["poisson", "fixed", "truncated_poisson"][seed % 3]
        if FULL
        else ["poisson", "fixed", "poisson"][seed % 3]
    )
    most = (
        {"max_batch_size": math.ceil(b + 7 * math.sqrt(b)) + 10}
        if kind == "truncated_poisson"
        else {}
    )
    target, steps = float(g.uniform(0.3, 8)), int(10 ** g.uniform(0, 3.5))
    # Larger δ are refused with a certificate.
    config = PrivacyConfig(
        expected_batch_size=b, steps=steps, sampler=kind, uncertified=delta >= 1 / n, **most
    )
    try:
        plan = config.calibrate(target, delta, n)
    except ValueError as error:  # already private with the least noise there is
        assert "all spend less" in str(error)
        return
    assert plan.epsilon() <= target
    less = config.with_noise(0.999 * plan.noise_multiplier, delta, n)
    assert less.epsilon() > target * (1 - 1e-2)
    true = integrated_epsilon(plan.event, steps, delta)
    assert true <= target * (1 + 1e-3) + 1e-3
    row = f"calibrated, seed {seed}"
    evidence(
        "accounting",
        row,
        sampler=kind,
        target=target,
        claimed=plan.epsilon(),
        integrated=true,
        sigma=plan.noise_multiplier,
    )
