"""ε of `dpkfc-verify` is never below closed forms, and at most 1e-3 above them and above PLD."""

import json
import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from scipy import optimize
from scipy.stats import norm

from dpkfc.privacy.group_epsilon import group_epsilon as of_dpkfc
from dpkfc_verify.accountant import Composition, attack_rates, epsilon, group_epsilon
from dpkfc_verify.ledger import Mismatch, Unchecked
from tests.documents import ROOT

DELTA = 1e-5


def event(rate, noise):
    inner = {"type": "GaussianDpEvent", "noise_multiplier": noise}
    return {"type": "PoissonSampledDpEvent", "sampling_probability": rate, "event": inner}


def gaussian(mu, delta):
    def excess(e):
        left = norm.logcdf(mu / 2 - e / mu)
        right = e + norm.logcdf(-mu / 2 - e / mu)
        return float(left + math.log(-math.expm1(right - left)) - math.log(delta))

    return float(optimize.brentq(excess, 1e-9, 10 * mu * mu + 100 * mu))


def is_close_above(found, exact):
    return exact <= found <= exact + 1e-3 * max(1.0, exact)


@pytest.mark.parametrize("delta", [1e-5, 1e-12])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "noise, count", [(30.0, 1), (20.0, 400), (0.5, 7), (3.0, 100_000), (0.02, 1)]
)
def test_a_composition_on_the_grid_is_not_below_the_closed_form(noise, count, sign, delta):
    composed = Composition({((1.0, 1.0, noise, 1),): count}, delta, sign, 1 << 14)
    assert is_close_above(composed.epsilon(), gaussian(math.sqrt(count) / noise, delta))


@pytest.mark.parametrize(
    "rate, noise", [(0.3, 1.0), (0.01, 0.4), (1e-3, 0.3), (0.9, 0.7), (0.02, 0.03)]
)
def test_one_release_is_not_below_its_hockey_stick(rate, noise):
    """The loss grows with x, so the exact δ is a difference of two tails."""

    def excess(e):
        if math.exp(-e) * (1 - rate) >= 1:
            return 1.0
        x = 0.5 + noise**2 * (e + math.log1p(-(1 - rate) * math.exp(-e)) - math.log(rate))
        absent, present = norm.sf(x / noise), norm.sf((x - 1) / noise)
        return float(rate * present + (1 - rate) * absent - math.exp(e) * absent - DELTA)

    exact = float(optimize.brentq(excess, 1e-6, 700))
    assert is_close_above(epsilon([(event(rate, noise), 1)], DELTA), exact)


def test_events_of_a_ledger_are_composed():
    one, full = event(0.05, 1.1), {"type": "GaussianDpEvent", "noise_multiplier": 4.0}
    both = epsilon([(one, 60), (full, 2)], DELTA)
    nested = {"type": "SelfComposedDpEvent", "event": one, "count": 30}
    nested = {"type": "ComposedDpEvent", "events": [nested, full]}
    assert epsilon([(nested, 2)], DELTA) == pytest.approx(both, abs=1e-6)
    assert both > max(epsilon([(one, 60)], DELTA), epsilon([(full, 2)], DELTA))
    assert epsilon([], DELTA) == epsilon([({"type": "NoOpDpEvent"}, 5)], DELTA) == 0
    for without_noise in ({"type": "NonPrivateDpEvent"}, event(0.1, 1e-5)):
        with pytest.raises(Mismatch, match="no noise to speak of"):
            epsilon([(without_noise, 1)], DELTA)
    with pytest.raises(Unchecked, match="LaplaceDpEvent"):
        epsilon([({"type": "LaplaceDpEvent", "noise_multiplier": 1.0}, 1)], DELTA)


def test_full_batches_that_are_cut_cost_what_their_larger_neighbour_does():
    cut = {"type": "TruncatedSubsampledGaussianDpEvent", "dataset_size": 100}
    cut |= {"sampling_probability": 1.0, "truncated_batch_size": 100, "noise_multiplier": 16.0}
    assert epsilon([(cut, 10)], DELTA) == epsilon([(event(100 / 101, 8.0), 10)], DELTA)


@pytest.mark.parametrize("units", [2, 10])
@pytest.mark.parametrize("rate, noise, count", [(0.01, 1.1, 500), (0.5, 5.0, 40), (1.0, 8.0, 10)])
def test_a_group_costs_what_dpkfc_says(rate, noise, count, units):
    inner = GaussianDpEvent(noise)
    theirs = inner if rate == 1 else PoissonSampledDpEvent(rate, inner)
    known, by = of_dpkfc(theirs, count, DELTA, units)
    charges = [(event(rate, noise), count)]
    found = group_epsilon(charges, DELTA, units, independent=True)
    assert by == "exact" and found == pytest.approx(known, rel=1e-4)
    bound, _ = of_dpkfc(theirs, count, DELTA, units, independent=False)
    assert group_epsilon(charges, DELTA, units, independent=False) <= bound + 1e-3


def test_attack_rates_are_those_of_a_gaussian():
    right, found = attack_rates([({"type": "GaussianDpEvent", "noise_multiplier": 2.0}, 1)], 10.0)
    assert norm.cdf(0.25) <= right <= norm.cdf(0.25) + 1e-3
    exact = norm.sf(norm.isf(0.01) - 0.5)
    assert exact <= found <= exact + 1e-3


@pytest.mark.parametrize("rate, noise", [(0.03, 0.74), (1e-4, 0.5), (0.3, 20.0), (0.9, 0.2)])
def test_attack_rates_of_a_small_sample_are_not_too_large(rate, noise):
    """The best attack at even odds knows the total variation, q · (2 Φ(1 / 2σ) − 1)."""
    right, _ = attack_rates([(event(rate, noise), 1)], 10.0)
    exact = 0.5 + 0.5 * rate * (2 * norm.cdf(0.5 / noise) - 1)
    assert exact <= right <= exact + 1e-3


def test_the_comparison_with_pld_covers_the_range():
    """`benchmarks/verifier.py` measured it; PLD may lie above, by the error of its own grid."""
    path = ROOT / "benchmarks" / "results" / "verifier.json"
    results = json.loads(path.read_text("utf-8"))
    points, summary = results["points"], results["summary"]
    assert len(points) == summary["compared"] == 200 and summary["folders_judged_rightly"] == 12
    assert summary["largest_gap"] <= 1e-3
    point = min(points, key=lambda x: abs(x["epsilon"] - 3))
    found = epsilon([(event(point["q"], point["noise"]), point["steps"])], DELTA)
    assert found == pytest.approx(point["epsilon"], abs=1e-6)
