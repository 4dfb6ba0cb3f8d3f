"""Our own distribution of the privacy loss: with dp-accounting, never below what can be integrated
exactly, and rising along a run up to what the card says.
"""

import math

import dp_accounting
import numpy as np
import pytest
from scipy.stats import binom, norm

from dpkfc import PrivacyConfig
from dpkfc.data.sampling import Poisson, TruncatedPoisson
from dpkfc.privacy import accounting, cross_check, dp_accountants, loss_distribution
from dpkfc.privacy import quick_epsilon as quick
from dpkfc.privacy.accounting import EpsilonCurve, epsilon, total_epsilon
from dpkfc.privacy.cross_check import check_before_a_run
from dpkfc.privacy.gaussian_pairs import Pair, gaussian_epsilon
from dpkfc.privacy.quick_epsilon import quick_epsilon
from tests.audit.integration import (
    _tilt,
    contour_delta,
    epsilon_of,
    one_release_delta,
    sampled_losses,
)

DELTA = 1e-5
CASES = 500
QUICK = 10


def draw(seed):
    """q, σ, number of releases and δ, most of them with an ε that says something."""
    g = np.random.default_rng(seed)
    while True:
        # Little noise and many releases take dp-accounting seconds.
        least, most = (-0.7, 4.5) if seed >= QUICK else (-0.1, 2.7)
        q, noise = 10 ** g.uniform(-5, 0), 10 ** g.uniform(least, 1.5)
        count, delta = round(10 ** g.uniform(0, most)), 10 ** g.uniform(-9, -3)
        event = Poisson(q, 10).event(noise)
        own = quick_epsilon([(event, count)], delta)
        if own is not None and own.value < 200:
            return q, noise, event, count, delta, own


def check_setting(seed):
    q, noise, event, count, delta, own = draw(seed)
    theirs = epsilon(event, count, delta)
    slack = cross_check._agreement(own, event, count, delta)
    assert abs(own.value - theirs) <= slack, (q, noise, count, delta)
    if own.value > 0.1:
        assert slack <= 3e-3 * own.value + 1e-3 * (dp_accountants._INTERVAL / 1e-4) ** 2 * count
    if own.value > 1e-3:
        losses = sampled_losses(q, noise)
        try:
            exact = contour_delta(losses, count, own.value, _tilt(losses, count, delta))
        except ValueError:  # too few releases for that quadrature
            return
        assert exact <= delta * (1 + 1e-6), (q, noise, count, delta)


@pytest.mark.quick("0")
@pytest.mark.parametrize("fives", range(CASES // 5))
def test_random_settings_agree_with_dp_accounting(fives):
    for seed in range(5 * fives, 5 * fives + 5):
        check_setting(seed)


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0, 4.0, 50.0])
@pytest.mark.parametrize("q", [1e-6, 1e-3, 0.2, 0.9])
def test_one_release_is_not_below_its_closed_form(q, noise):
    for share in (1e-6, 1e-3, 0.1, 0.9):
        # q bounds the δ of one release
        delta = share * q
        own = quick_epsilon([(Poisson(q, 10).event(noise), 1)], delta).value
        exact = one_release_delta(q, noise, own)
        assert exact <= delta * (1 + 1e-9)
        if own > 1e-3 and delta > 1e-10:
            assert exact >= delta * (1 - 2e-3)


@pytest.mark.parametrize("noise", [0.02, 0.4, 5.0, 300.0])
def test_full_batches_on_a_grid_are_the_closed_form(noise):
    for count in (1, 30, 1000):
        release = (Pair(1.0, 1.0, noise),)
        exact = gaussian_epsilon(noise / math.sqrt(count), DELTA)
        found = loss_distribution.epsilon_of_releases([(release, count)], DELTA)
        assert exact <= found <= exact * (1 + 1e-4)


@pytest.mark.parametrize(
    ("q", "noise", "count", "delta"),
    [
        (0.01, 8.0, 100_000, 1e-12),
        (0.1, 2.0, 500, 1e-15),
        (0.1, 2.0, 500, 1e-30),
        (0.9, 1.0, 10, 1e-18),
    ],
)
def test_a_delta_that_rounding_would_hide_is_resolved_by_a_tilt(q, noise, count, delta):
    event = Poisson(q, 10).event(noise)
    own = quick_epsilon([(event, count)], delta).value
    losses = sampled_losses(q, noise)
    assert contour_delta(losses, count, own, _tilt(losses, count, delta)) <= delta * (1 + 1e-6)
    assert own <= epsilon_of(losses, count, delta) * (1 + 1e-4) + 1e-4
    assert own <= epsilon(event, count, delta, "rdp")


@pytest.mark.parametrize("units", [2, 7, 40])
def test_losses_of_several_units_are_those_of_their_densities(units):
    pair = Pair(1.0, 0.2, 3.0, units)
    x = np.linspace(-20, units + 20, 500)
    shifts = np.arange(units + 1)[:, None]
    densities = binom.pmf(shifts, units, 0.2) * norm.pdf(x, shifts, 3.0)
    losses = pair.losses(x)
    assert losses == pytest.approx(np.log(densities.sum(0) / norm.pdf(x, 0, 3.0)), abs=1e-9)
    rises = losses > losses[0] + 1e-6
    assert pair.places(losses)[rises] == pytest.approx(x[rises], abs=1e-6)
    present, absent = (np.exp(logs) for logs in pair.log_masses(x))
    assert absent == pytest.approx(np.diff(norm.cdf(x, 0, 3.0), prepend=0, append=1), abs=1e-12)
    cumulative = (binom.pmf(shifts, units, 0.2) * norm.cdf(x, shifts, 3.0)).sum(0)
    assert present == pytest.approx(np.diff(cumulative, prepend=0, append=1), abs=1e-12)


MORE = [
    [(Poisson(0.02, 100).event(1.2), 200), (dp_accounting.GaussianDpEvent(9.0), 7)],
    [(Poisson(0.02, 100).event(1.2), 200), (Poisson(0.3, 100).event(4.0), 50)],
    [(TruncatedPoisson(0.1, 50, 9).event(5.0), 100)],
    [(TruncatedPoisson(0.1, 50, 9).event(5.0), 60), (Poisson(0.02, 100).event(2.0), 30)],
    [(dp_accounting.SelfComposedDpEvent(Poisson(0.1, 10).event(3.0), 20), 4)],
    [(dp_accounting.GaussianDpEvent(3.0), 5)],
]


@pytest.mark.parametrize("charges", MORE, ids=range(len(MORE)))
def test_different_events_compose_by_their_spectra(charges):
    own = quick_epsilon(charges, DELTA)
    assert own.value == pytest.approx(total_epsilon(charges, DELTA, "pld"), rel=1e-3)
    assert own.value <= total_epsilon(charges, DELTA, "rdp")


def test_what_it_does_not_know_it_leaves_to_others():
    fixed = dp_accounting.SampledWithoutReplacementDpEvent(
        100, 5, dp_accounting.GaussianDpEvent(2.0)
    )
    assert quick_epsilon([(fixed, 3)], DELTA) is None
    assert quick_epsilon([(Poisson(0.1, 10).event(0.0), 10)], DELTA).value == math.inf
    assert quick_epsilon([], DELTA).value == 0


@pytest.mark.parametrize(
    ("q", "noise", "steps", "delta"),
    [(0.1, 1.3, 60, 1e-5), (0.01, 0.6, 300, 1e-9), (1e-4, 5.0, 100, 1e-5), (0.3, 0.1, 20, 1e-6)],
)
def test_the_epsilon_of_a_run_never_falls_and_ends_at_the_card(q, noise, steps, delta):
    curve = EpsilonCurve(Poisson(q, 10).event(noise), delta, horizon=steps)
    shown = [curve.running_epsilon(n) for n in range(steps + 1)]
    assert shown == sorted(shown)
    assert shown[0] == 0
    assert shown[-1] == curve.epsilon(steps)
    bounds = [curve.upper_bound(n, 7) for n in range(steps + 1)]
    assert all(a <= b <= shown[-1] for a, b in zip(shown, bounds, strict=True))
    assert bounds == sorted(bounds)


def test_a_run_with_releases_beside_its_steps_shows_them_from_the_start():
    also = [(dp_accounting.GaussianDpEvent(8.0), 3)]
    curve = EpsilonCurve(Poisson(0.05, 10).event(1.5), DELTA, horizon=40, also=also)
    shown = [curve.running_epsilon(n) for n in range(41)]
    assert shown == sorted(shown)
    assert shown[0] == pytest.approx(total_epsilon(also, DELTA))
    assert shown[-1] == curve.epsilon(40)


@pytest.mark.parametrize("factor", [0.995, 1.005])
def test_a_small_disagreement_of_two_programs_stops_a_run(factor, monkeypatch):
    event, count = Poisson(0.1, 100).event(1.1), 40
    check_before_a_run(event, count, DELTA, "add_or_remove_one")
    honest = loss_distribution.epsilon_of_releases
    monkeypatch.setattr(quick, "epsilon_of_releases", lambda *a: factor * honest(*a))
    with pytest.raises(ValueError, match="disagree .* our own distribution .* do not train"):
        check_before_a_run(event, count, DELTA, "add_or_remove_one")


@pytest.mark.parametrize("noise", [0.111, 0.115, 0.13])
def test_a_run_of_an_epsilon_without_meaning_may_begin(noise):
    event = Poisson(0.106, 100).event(noise)
    own = quick_epsilon([(event, 94)], DELTA)
    assert own is not None and 600 < own.value < 1000
    check_before_a_run(event, 94, DELTA, "add_or_remove_one")


def test_a_search_asks_dp_accounting_once(monkeypatch):
    asked = []
    compute = EpsilonCurve._compute
    monkeypatch.setattr(accounting, "_values", {})
    monkeypatch.setattr(
        EpsilonCurve, "_compute", lambda self, n: asked.append(n) or compute(self, n)
    )
    monkeypatch.setattr(dp_accountants, "_INTERVAL", 1e-4)
    plan = PrivacyConfig(expected_batch_size=32, steps=30).calibrate(3.0, DELTA, 100)
    assert plan.epsilon() <= 3.0
    assert asked == [30]
