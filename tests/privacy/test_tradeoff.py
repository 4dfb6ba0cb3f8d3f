"""What ε means: bounds of every attack against brute force, and ε for several records."""

import math

import dp_accounting
import numpy as np
import pytest
import scipy

from dpkfc.privacy.accounting import epsilon, total_epsilon
from dpkfc.privacy.attack_rates import attack_rates, bound_found, bound_right
from dpkfc.privacy.events import join_charges
from dpkfc.privacy.group_epsilon import group_epsilon

Gaussian, Poisson = dp_accounting.GaussianDpEvent, dp_accounting.PoissonSampledDpEvent
Fixed = dp_accounting.SampledWithoutReplacementDpEvent
DELTA = 1e-5


def best_attack(present, absent, false_alarms):
    """Return the success at even odds and the share of members found, of the best test of all.

    The test takes atoms in the order of their likelihood ratio, the last of them in part
    (Neyman and Pearson).
    """
    order = np.argsort(-(present / absent))
    alarms = np.concatenate([[0.0], np.cumsum(absent[order])])
    found = np.concatenate([[0.0], np.cumsum(present[order])])
    right = 0.5 + 0.5 * float(np.max(found - alarms))
    return right, float(np.interp(false_alarms, alarms, found))


def densities(noise, shifts, weights):
    """Return the probabilities of fine cells under a mixture of Gaussians and under one at 0."""
    edges = np.linspace(-12 * noise, shifts.max() + 12 * noise, 200_001)
    cells = [np.diff(scipy.stats.norm.cdf(edges, shift, noise)) for shift in shifts]
    absent = np.diff(scipy.stats.norm.cdf(edges, 0, noise))
    present = np.sum([w * cell for w, cell in zip(weights, cells, strict=True)], axis=0)
    kept = (absent > 0) & (present > 0)
    return present[kept], absent[kept]


@pytest.mark.parametrize(("noise", "count"), [(0.7, 1), (2.0, 1), (4.0, 9), (30.0, 400)])
@pytest.mark.parametrize("false_alarms", [0.01, 0.2])
def test_the_rates_of_a_gaussian_mechanism_are_those_of_the_best_attack(noise, count, false_alarms):
    event = Gaussian(noise)
    spent = epsilon(event, count, DELTA)
    rates = attack_rates(event, count, spent, DELTA, false_alarms=false_alarms)
    composed = noise / math.sqrt(count)  # `count` releases tell as much as one with less noise
    parts = densities(composed, np.array([1.0]), np.array([1.0]))
    right, found = best_attack(*parts, false_alarms)
    assert right - 1e-6 <= rates.right <= right + 2e-4
    assert found - 1e-6 <= rates.found <= found * 1.02
    mu = 1 / composed
    assert rates.right == pytest.approx(scipy.stats.norm.cdf(mu / 2), abs=1e-9)
    pair = attack_rates(None, count, spent, DELTA, false_alarms=false_alarms)
    assert pair.right >= rates.right and pair.found >= rates.found and pair.by == "ε and δ"


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_the_rates_under_poisson_sampling_bound_the_best_attack(rate):
    event = Poisson(rate, Gaussian(1.0))
    rates = attack_rates(event, 1, epsilon(event, 1, DELTA), DELTA)
    present, absent = densities(1.0, np.array([0.0, 1.0]), np.array([1 - rate, rate]))
    for one, other in ((present, absent), (absent, present)):
        right, found = best_attack(one, other, 0.01)
        assert right <= rates.right + 1e-6 and found <= rates.found + 1e-6
    right, found = best_attack(present, absent, 0.01)
    assert rates.right <= right + 1e-3 and rates.found <= found * 1.05


def test_a_pair_alone_bounds_randomised_response():
    """Its trade-off function is that of (ε, 0), so the bounds are attained."""
    e = 1.5
    p = math.exp(e) / (1 + math.exp(e))
    right, found = best_attack(np.array([p, 1 - p]), np.array([1 - p, p]), 0.01)
    assert bound_right([(e, 0.0)]) == pytest.approx(right)
    assert bound_found([(e, 0.0)], 0.01) == pytest.approx(found)
    assert bound_found([(e, 0.0)], 0.9) == pytest.approx(
        best_attack(np.array([p, 1 - p]), np.array([1 - p, p]), 0.9)[1]
    )


def test_without_a_guarantee_every_attack_may_succeed():
    rates = attack_rates(Gaussian(0.0), 1, math.inf, DELTA)
    assert (rates.right, rates.found) == (1.0, 1.0)
    huge = attack_rates(Gaussian(0.01), 11, 1e5, DELTA)
    assert (huge.right, huge.found) == (1.0, 1.0)
    assert attack_rates(Gaussian(1.0), 0, 0.0, DELTA).right <= 0.5 + DELTA


# -- several records -------------------------------------------------------------------------------


def delta_at(present, absent, e):
    reach = np.maximum(present - math.exp(e) * absent, 0).sum()
    return float(max(reach, np.maximum(absent - math.exp(e) * present, 0).sum()))


@pytest.mark.parametrize("size", [2, 5])
def test_several_records_in_one_poisson_batch(size):
    rate, noise = 0.2, 2.0
    value, by = group_epsilon(Poisson(rate, Gaussian(noise)), 1, DELTA, size)
    shifts = np.arange(size + 1.0)
    weights = scipy.stats.binom.pmf(shifts, size, rate)
    parts = densities(noise, shifts, weights)
    exact = scipy.optimize.brentq(lambda e: delta_at(*parts, e) - DELTA, 0, 60)
    assert by == "exact" and exact <= value <= exact * (1 + 1e-4)


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (Poisson(0.02, Gaussian(2.0)), "add_or_remove_one"),
        (Fixed(1000, 50, Gaussian(3.0)), "replace_one"),
    ],
)
def test_the_general_bound_is_above_the_exact_value(event, relation):
    bound, by = group_epsilon(event, 100, DELTA, 2, relation, independent=False)
    one = epsilon(event, 100, DELTA, "rdp", relation)
    assert by == "bound" and bound > 2 * one
    if relation == "add_or_remove_one":
        assert group_epsilon(event, 100, DELTA, 2)[0] < bound


def test_records_that_take_turns_have_a_bound():
    """Several records move a release most if they all take the same turns; they need not."""
    value, by = group_epsilon(Gaussian(2.0), 10, DELTA, 3, independent=False)
    assert by == "bound" and (value, "exact") == group_epsilon(Gaussian(2.0), 10, DELTA, 3)


def test_where_no_bound_is_known_the_answer_is_infinite():
    event = Poisson(0.02, Gaussian(0.5))
    assert group_epsilon(event, 5000, DELTA, 10, independent=False) == (math.inf, "bound")
    assert group_epsilon(Gaussian(0.0), 1, DELTA, 2)[0] == math.inf
    assert group_epsilon(Gaussian(1.0), 0, DELTA, 2)[0] == 0.0


def test_gaussian_releases_of_two_kinds_cost_as_one():
    """The default of tables: second moments once, then steps on all rows."""
    charges = [(Gaussian(15.0), 40), (Gaussian(3.6), 1), (Poisson(0.1, Gaussian(1.0)), 0)]
    event, count = join_charges(charges)
    apart = total_epsilon(charges[:2], DELTA)
    assert epsilon(event, count, DELTA) == pytest.approx(apart, rel=1e-3)
    rates = attack_rates(event, count, apart, DELTA)
    assert rates.right < 0.62 < attack_rates(None, 41, apart, DELTA).right
    assert join_charges(charges[:1]) == charges[0]
    for others in (
        charges[:2] + [(Poisson(0.1, Gaussian(1.0)), 3)],
        [(Gaussian(0.0), 1), charges[0]],
        [],
    ):
        assert join_charges(others) == (None, 0)
