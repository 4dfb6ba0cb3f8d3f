"""PLD, RDP, PRV (Opacus) and a numerical integration on a grid with its hard corners; published
values; order; calibration.

Tolerances: RDP is at least PLD - 10⁻³; PLD is the integral within 0.1 % and 2·10⁻³, above it also
by what its grid of losses can add, for a delta less what rounding may take from it; RDP / PLD is at
most 1.4 for 1 <= ε <= 15 and q >= 0.01 (2 for a single release, which RDP bounds badly); PRV
exceeds PLD by no more than its own error and a half.
"""

import itertools
import math
import warnings

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from dpkfc import PrivacyConfig, Session
from dpkfc.data.sampling import Poisson, TruncatedPoisson
from dpkfc.privacy import accounting, dp_accountants
from dpkfc.privacy.accounting import EpsilonCurve, epsilon
from dpkfc.privacy.cross_check import cross_check
from dpkfc.privacy.dp_accountants import deltas_of_epsilons, pld_resolves
from dpkfc.privacy.gaussian_pairs import gaussian_epsilon
from tests.audit.integration import integrated_epsilon
from tests.audit.sizes import FULL, size

QUICK = [
    *itertools.product((1e-3, 1e-2, 0.1), (1.6, 3.0, 8.0), (100, 2000), (1e-5,)),
    (1.0, 8.0, 100, 1e-5),
    (1.0, 0.45, 2000, 1e-10),
    (1.0, 60.0, 100_000, 1e-10),
    (0.5, 4.0, 100, 1e-10),
    (0.1, 2.0, 1, 1e-10),
    (1.0, 0.4, 1, 1e-5),
    (1e-4, 8.0, 100_000, 1e-3),
    (0.01, 8.0, 100_000, 1e-10),
]
RATES, NOISES, COUNTS = (
    (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0),
    (0.3, 0.45, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0),
    (1, 100, 2000, 100_000),
)
LARGEST = (
    60.0  # of ε, about, beyond which a point of the full grid says nothing (the corners above stay)
)


def full_grid():
    """All combinations with an ε that is one, at three δ in turn, and at 1e-10 too where T = 1 or
    10⁵.
    """
    points = []
    for number, (q, noise, count) in enumerate(itertools.product(RATES, NOISES, COUNTS)):
        for delta in {(1e-5, 1e-8, 1e-3)[number % 3], *([1e-10] if count in (1, 100_000) else [])}:
            one = noise**-2 if q == 1 else math.expm1(noise**-2)
            spread = q * math.sqrt(count * one)  # of the loss, by the central limit theorem
            if gaussian_epsilon(1 / spread, delta) <= LARGEST:
                points.append((q, noise, count, delta))
    return sorted(points + [p for p in QUICK if p not in points])


GRID = full_grid() if FULL else QUICK
GROUPS = sorted({(q, count) for q, _, count, _ in GRID})


def grid_slack(count, delta):
    """What a grid of 1e-4 can add to ε: half a step of standard deviation a release."""
    return 0.5e-4 * math.sqrt(2 * count * math.log(1 / delta))


def prv(q, noise, count, delta):
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise, q, count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


@pytest.mark.quick("q 0.5*", "q 0.01, T 2000", "q 0.001, T 100", "q 1,*", "q 0.0001*")
@pytest.mark.parametrize("group", GROUPS, ids=[f"q {q:g}, T {count}" for q, count in GROUPS])
def test_the_grid(group, evidence):
    below = above = ratio = 0.0
    points = [point for point in GRID if (point[0], point[2]) == group]
    for q, noise, count, delta in points:
        event = Poisson(q, 10).event(noise)
        by_pld, by_rdp = epsilon(event, count, delta), epsilon(event, count, delta, "rdp")
        integral = integrated_epsilon(event, count, delta)
        point = (q, noise, count, delta, by_pld, by_rdp, integral)
        assert by_pld <= by_rdp + 1e-3 + grid_slack(count, delta), point
        assert by_rdp >= integral - 1e-3, point
        slack = 2e-3 + 1e-3 * integral
        # what PLD is asked for
        resolved = integrated_epsilon(
            event, count, delta - dp_accountants.bound_pld_rounding(event, count)
        )
        assert integral - slack <= by_pld <= resolved + slack + grid_slack(count, delta), point
        if q >= 0.01 and 1 <= by_pld <= 15:
            assert by_rdp <= (1.4 if count > 1 else 2.0) * by_pld, point
            ratio = max(ratio, by_rdp / by_pld)
        assert cross_check(event, count, delta) == {"pld": by_pld, "rdp": by_rdp}
        below, above = (
            max(below, (integral - by_pld) / (1 + integral)),
            max(above, (by_pld - integral) / (1 + integral)),
        )
    figures = {"points": len(points), "pld_below": below, "pld_above": above, "rdp_over_pld": ratio}
    evidence("accounting", f"grid, q {group[0]:g}, T {group[1]}", **figures)


PRV = [(0.1, 3.0, 100, 1e-5), (0.01, 3.0, 2000, 1e-5)]
PRV += (
    [p for p in GRID if p[0] < 1 and p[3] >= 1e-8 and 1 < p[2] < 100_000 and p[1] >= 0.6]
    if FULL
    else []
)


def test_prv_of_opacus(evidence):
    worst = checked = 0.0
    for q, noise, count, delta in PRV:
        by_pld = epsilon(Poisson(q, 10).event(noise), count, delta)
        if 0.1 <= by_pld <= 15:
            difference = prv(q, noise, count, delta) - by_pld
            assert -1e-3 <= difference <= 0.015, (q, noise, count, delta, difference)
            worst, checked = max(worst, abs(difference)), checked + 1
    evidence(
        "accounting", "PRV of Opacus", points=int(checked), largest_difference=worst, allowed=0.015
    )


# -- anchors and published values ------------------------------------------------------------------


@pytest.mark.quick("1e-05-*")
@pytest.mark.parametrize(
    "noise, count", [(5.0, 100), (2.0, 1), (0.4, 3), (20.0, 50), (200.0, 100_000)]
)
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
def test_full_batches_are_the_analytic_gaussian(noise, count, delta):
    exact = gaussian_epsilon(noise / math.sqrt(count), delta)
    for event in (Poisson(1.0, 5).event(noise), dp_accounting.GaussianDpEvent(noise)):
        assert exact <= epsilon(event, count, delta) <= exact * (1 + 1e-6) + 1e-8
    if FULL or noise > 1:
        assert (
            epsilon(event, count, delta)
            <= pld.PLDAccountant().compose(event, count).get_epsilon(delta) + 1e-6
        )


ONE_RELEASE = [(0.1, 1.0, 0.5), (0.5, 2.0, 0.1), (1.0, 0.8, 3.0)] + (
    [(0.02, 0.7, 1.0), (0.01, 0.45, 2.0)] if FULL else []
)


@pytest.mark.parametrize("q, noise, eps", ONE_RELEASE)
def test_one_release_is_the_closed_hockey_stick(q, noise, eps):
    from tests.audit.integration import one_release_delta

    exact = one_release_delta(q, noise, eps)
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise))
    (ours,) = deltas_of_epsilons(event, 1, np.array([eps]), "add_or_remove_one")
    assert exact - 1e-12 <= ours <= exact * (1 + 1e-4) + 1e-9


ABADI = [float(order) for order in range(2, 34)]  # the moments of Abadi et al. (2016), up to 32
BU = [1 + x / 10 for x in range(1, 100)] + [float(order) for order in range(11, 64)]


def older_conversion(q, noise, count, delta, orders):
    """ε = min (RDP + log(1/δ) / (α - 1)), looser than the one in use (Abadi et al. 2016, Mironov
    2017).
    """
    accountant = rdp.RdpAccountant(orders).compose(Poisson(q, 5).event(noise), count)
    return min(
        r + math.log(1 / delta) / (a - 1)
        for a, r in zip(accountant.orders, accountant.rdp, strict=True)
    )


PUBLISHED = [
    # Abadi et al. 2016, section 3.2: q = 0.01, sigma = 4, T = 10,000, delta = 1e-5: the moments
    # accountant gives 1.26
    ("Abadi et al. 2016", 0.01, 4.0, 10_000, 1.26, 0.01, ABADI),
    # Bu et al. 2020, figure 4: MNIST, p = 256 / 60,000, delta = 1e-5: the moments accountant, 20
    # and 70 epochs
    ("Bu et al. 2020, sigma 1.3", 256 / 60_000, 1.3, round(20 * 60_000 / 256), 1.34, 0.01, BU),
    ("Bu et al. 2020, sigma 0.7", 256 / 60_000, 0.7, round(70 * 60_000 / 256), 8.68, 0.02, BU),
    # Opacus, page compute_dp_sgd_privacy: 60,000 examples, batches of 256, sigma 1.12, 60 epochs,
    # orders 10, 20 and 100
    (
        "Opacus documentation",
        256 / 60_000,
        1.12,
        round(60 * 60_000 / 256),
        2.95,
        0.01,
        [10.0, 20.0, 100.0],
    ),
    # Opacus, tests of its accountants: sigma = 1.5, q = 0.04, T = 2,249 (90 // 0.04)
    ("Opacus tests, RDP", 0.04, 1.5, int(90 // 0.04), 7.32911117143, 2e-3, "rdp"),
    ("Opacus tests, PRV", 0.04, 1.5, int(90 // 0.04), 6.777395712150674, 0.015, "pld"),
    # MNIST of DP-KFC, five epochs of 60,000 / 256: noise for which RDP gives 1 and 8, and what PLD
    # says of it
    ("MNIST, sigma 1.064, RDP", 256 / 60_000, 1.064, 1172, 1.0, 5e-3, "rdp"),
    ("MNIST, sigma 0.518, RDP", 256 / 60_000, 0.518, 1172, 8.0, 2e-2, "rdp"),
    ("MNIST, sigma 1.064, PLD", 256 / 60_000, 1.064, 1172, 0.69, 6e-3, "pld"),
    ("MNIST, sigma 0.518, PLD", 256 / 60_000, 0.518, 1172, 6.61, 2e-2, "pld"),
]
PUBLISHED = PUBLISHED if FULL else [row for row in PUBLISHED if row[2] > 1]


@pytest.mark.parametrize("row", PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_published_values(row, evidence):
    source, q, noise, count, value, tolerance, how = row
    ours = epsilon(Poisson(q, 5).event(noise), count, 1e-5, "pld" if how == "pld" else "rdp")
    if isinstance(how, list):  # the orders of an older conversion, then ours below it
        assert older_conversion(q, noise, count, 1e-5, how) == pytest.approx(value, abs=tolerance)
        assert 0.8 * value <= ours <= value
    else:
        assert ours == pytest.approx(value, abs=tolerance)
    way = "older conversion" if isinstance(how, list) else how
    evidence("accounting", f"published: {source}", published=value, ours=ours, way=way)


# -- order -----------------------------------------------------------------------------------------


@settings(max_examples=size(6, 200))
@given(
    log_q=st.floats(-4, 0),
    noise=st.floats(0.3, 20),
    log_count=st.floats(0, 5),
    log_delta=st.floats(-10, -2),
    more=st.floats(1.02, 4),
)
@example(log_q=math.log10(0.75), noise=1.0, log_count=4.0, log_delta=-2.0, more=4 / 3)
def test_epsilon_by_rdp_is_monotonic(log_q, noise, log_count, log_delta, more):
    q, count, delta = 10**log_q, round(10**log_count), 10**log_delta

    def spend(q, noise, count, delta):
        return epsilon(Poisson(min(1.0, q), 5).event(noise), count, delta, "rdp")

    base = spend(q, noise, count, delta)
    # From q < 1 to q = 1 RDP changes to another formula: equal up to their error.
    slack = 1e-6 * (1 + base)
    assert spend(q * more, noise, count, delta) >= base - slack
    assert spend(q, noise, math.ceil(count * more), delta) >= base - slack
    assert spend(q, noise * more, count, delta) <= base + slack
    assert spend(q, noise, count, min(0.5, delta * more)) <= base + slack


def test_a_smaller_maximum_costs_more():
    values = [
        epsilon(TruncatedPoisson(0.1, 50, most).event(5.0), 50, 1e-5, "rdp")
        for most in (30, 12, 8, 6)
    ]
    assert values == sorted(values)
    assert values[0] < values[-1]


# -- faults of the accountant itself ---------------------------------------------------------------


def test_a_small_delta_after_many_releases_is_not_rounded_away(evidence):
    """dp-accounting convolves without a tilt: its δ of 1e-10 after 10⁵ releases is short by 8 %,
    its ε by 0.07. Ours is not.
    """
    q, noise, count, delta = (0.001, 0.45, 100_000, 1e-10) if FULL else (0.01, 8.0, 100_000, 1e-12)
    event = Poisson(q, 5).event(noise)
    integral = integrated_epsilon(event, count, delta)
    if pld_resolves(event, count, delta):
        theirs = privacy_loss_distribution.from_gaussian_mechanism(
            noise, sampling_prob=q
        ).self_compose(count)
        assert theirs.get_epsilon_for_delta(delta) < integral - 0.05
        assert epsilon(event, count, delta) >= integral
        values = {
            "theirs": theirs.get_epsilon_for_delta(delta),
            "ours": epsilon(event, count, delta),
            "integral": integral,
        }
        evidence("accounting", "rounding of dp-accounting", **values)
    else:
        with pytest.raises(
            ValueError,
            match=r"PLD cannot resolve delta = 1e-12 in 100,000 releases.*accountant='rdp'",
        ):
            epsilon(event, count, delta)
        checked = cross_check(event, count, delta)
        assert checked["pld"] is None
        assert checked["rdp"] >= integral


def test_a_divergence_that_rounds_to_nothing_is_not_free(monkeypatch):
    """dp-accounting reports an ε of 0 where a divergence came out as zero or below."""
    event = Poisson(0.01, 5).event(1.0)
    honest = EpsilonCurve(event, 1.1e-5, accountant="rdp").epsilon(7)

    class Rounded(dp_accounting.rdp.RdpAccountant):
        def compose(self, event, count=1):
            super().compose(event, count)
            self._rdp[3:9] = -1e-18
            return self

    monkeypatch.setattr(accounting, "_values", {})
    monkeypatch.setattr(dp_accountants, "_divergences", {})
    monkeypatch.setattr(dp_accounting.rdp, "RdpAccountant", Rounded)
    assert EpsilonCurve(event, 1.1e-5, accountant="rdp").epsilon(7) >= honest > 0
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    assert Rounded(neighboring_relation=relation).compose(event, 7).get_epsilon(1.1e-5) == 0


def test_a_mixture_that_rounds_to_nothing_is_not_free():
    """1 - q + q exp((α - 1) R) is 1 in floating point at little R."""
    gaussian = dp_accounting.GaussianDpEvent(1e8)
    fixed = dp_accounting.SampledWithoutReplacementDpEvent(2, 1, gaussian)
    poisson = dp_accounting.PoissonSampledDpEvent(0.5, gaussian)
    by_rdp = epsilon(fixed, 10**6, 1e-14, "rdp", "replace_one")
    assert by_rdp >= epsilon(poisson, 10**6, 1e-14, "rdp") > 0


# -- a disagreement stops a run before its first step ----------------------------------------------


def claim_less_by_pld(monkeypatch, factor):
    found = privacy_loss_distribution.PrivacyLossDistribution.get_epsilon_for_delta
    kind = privacy_loss_distribution.PrivacyLossDistribution
    monkeypatch.setattr(
        kind, "get_epsilon_for_delta", lambda self, delta: factor * found(self, delta)
    )


def claim_less_by_rdp(monkeypatch, factor):
    found = rdp.compute_epsilon
    monkeypatch.setattr(rdp, "compute_epsilon", lambda *a: (factor * found(*a)[0], 2))


TRUNCATED = {"sampler": "truncated_poisson", "max_batch_size": 12}
FAULTS = {
    "PLD claims a tenth less": ({}, claim_less_by_pld, 0.9),
    "PLD claims a tenth more": ({}, claim_less_by_pld, 1.1),
    "RDP claims half": ({}, claim_less_by_rdp, 0.5),
    "RDP claims half, and is reported": ({"accountant": "rdp"}, claim_less_by_rdp, 0.5),
    "RDP claims a quarter of fixed-size batches": ({"sampler": "fixed"}, claim_less_by_rdp, 0.25),
    "PLD claims a tenth less of truncated batches": (TRUNCATED, claim_less_by_pld, 0.9),
}


def build(plan, ledger):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Session(
        plan, model, optimizer, (torch.randn(40, 3), torch.randn(40, 1)), ledger_path=ledger
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_disagreement_stops_a_run_before_anything_is_charged(
    name, tmp_path, monkeypatch, evidence
):
    settings_, plant, factor = FAULTS[name]
    plan = PrivacyConfig(expected_batch_size=4, steps=37, **settings_).with_noise(6.3, 1e-4, 40)
    # what this process has computed, by the honest accountants
    monkeypatch.setattr(accounting, "_values", {})
    with monkeypatch.context() as planted:
        plant(planted, factor)
        with pytest.raises(ValueError, match="the accountants disagree on 37 x .* do not train"):
            build(plan, tmp_path / "ledger.jsonl")
    assert not (tmp_path / "ledger.jsonl").exists()
    monkeypatch.setattr(accounting, "_values", {})
    fresh = PrivacyConfig(expected_batch_size=4, steps=37, **settings_).with_noise(6.3, 1e-4, 40)
    build(fresh, tmp_path / "ledger.jsonl").close()
    assert (tmp_path / "ledger.jsonl").exists()
    evidence(
        "accounting", f"planted: {name}", stopped="before the ledger was opened", factor=factor
    )
