"""Epsilon equals dp-accounting's own value and analytic anchors; what cannot be accounted for is
refused.
"""

import json
import logging
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp

from dpkfc.privacy import accounting, dp_accountants
from dpkfc.privacy import cross_check as comparison
from dpkfc.privacy.accounting import EpsilonCurve, epsilon, total_epsilon
from dpkfc.privacy.cross_check import cross_check
from dpkfc.privacy.dp_accountants import deltas_of_epsilons, pld_of_one
from dpkfc.privacy.events import event_from_dict, event_to_dict
from tests.audit.integration import integrated_epsilon

DELTA = 1e-5
ADD, REPLACE = (
    dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    dp_accounting.NeighboringRelation.REPLACE_ONE,
)


def poisson(rate, noise):
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))


def make_fixed_event(n, b, noise):
    return dp_accounting.SampledWithoutReplacementDpEvent(
        n, b, dp_accounting.GaussianDpEvent(noise)
    )


CASES = [
    (poisson(0.01, 1.0), 200, "pld", "add_or_remove_one"),
    (dp_accounting.GaussianDpEvent(6.0), 30, "pld", "add_or_remove_one"),
    (poisson(0.01, 1.0), 200, "rdp", "add_or_remove_one"),
    (dp_accounting.GaussianDpEvent(6.0), 30, "rdp", "add_or_remove_one"),
    (make_fixed_event(1000, 20, 1.5), 100, "rdp", "replace_one"),
]


@pytest.mark.parametrize(("event", "count", "accountant", "relation"), CASES)
def test_epsilon_is_that_of_dp_accounting(event, count, accountant, relation):
    kind = pld.PLDAccountant if accountant == "pld" else rdp.RdpAccountant
    theirs = kind(neighboring_relation=ADD if relation == "add_or_remove_one" else REPLACE)
    theirs.compose(event, count)
    # PLD is asked for a δ that is smaller by what rounding may have taken, and full batches have a
    # closed form
    assert epsilon(event, count, DELTA, accountant, relation) == pytest.approx(
        theirs.get_epsilon(DELTA), rel=1e-6
    )
    is_sampled = not isinstance(event, dp_accounting.GaussianDpEvent)
    if is_sampled and accountant == ("rdp" if relation == "replace_one" else "pld"):
        (delta,) = deltas_of_epsilons(event, count, np.array([1.0]), relation)
        assert delta == pytest.approx(theirs.get_delta(1.0), rel=1e-9, abs=2.0**-50 * (count + 256))


def test_nothing_released_costs_nothing_and_no_noise_costs_everything(monkeypatch):
    assert epsilon(poisson(0.1, 1.0), 0, DELTA) == 0
    monkeypatch.setattr(EpsilonCurve, "_compute", None)
    assert epsilon(poisson(0.1, 0.0), 1, DELTA) == math.inf
    assert epsilon(dp_accounting.NonPrivateDpEvent(), 1, DELTA, "rdp") == math.inf


@pytest.mark.parametrize(
    ("event", "accountant", "relation", "message"),
    [
        (
            make_fixed_event(100, 5, 1.0),
            "pld",
            "replace_one",
            "PLD cannot account .* use accountant='rdp'",
        ),
        (
            make_fixed_event(100, 5, 1.0),
            "rdp",
            "add_or_remove_one",
            "use 'replace_one' for sampling without replacement",
        ),
        (poisson(0.1, 1.0), "rdp", "replace_one", "cannot be accounted for under 'replace_one'"),
        (poisson(0.1, 1.0), "pld", "replace_one", "cannot be accounted for under 'replace_one'"),
        (
            dp_accounting.GaussianDpEvent(1.0),
            "pld",
            "replace_one",
            "cannot be accounted for under 'replace_one'",
        ),
        (
            dp_accounting.UnsupportedDpEvent(),
            "pld",
            "add_or_remove_one",
            "'pld' does not support the event",
        ),
        (
            poisson(0.1, 1.0),
            "prv",
            "add_or_remove_one",
            "unknown accountant 'prv'; choose one of pld, rdp",
        ),
        (poisson(0.1, 1.0), "pld", "zero_out", "unknown neighbouring relation 'zero_out'"),
    ],
)
def test_pairs_that_cannot_be_accounted_for_are_refused(event, accountant, relation, message):
    with pytest.raises(ValueError, match=message):
        epsilon(event, 1, DELTA, accountant, relation)


@pytest.mark.quick("0.3")
@pytest.mark.parametrize("noise", [0.3, 0.1, 0.02])
def test_little_noise_is_accounted_for_on_a_wider_grid_and_bounds_an_integration(noise):
    event, count = poisson(0.004, noise), 300
    found, true = epsilon(event, count, DELTA), integrated_epsilon(event, count, DELTA)
    assert true * (1 - 1e-5) <= found <= true * 1.001 + 0.01
    assert pld_of_one(event, "add_or_remove_one")._pmf_remove.size < 2_000_000
    cross_check(event, count, DELTA)


@pytest.mark.parametrize("noise", [9.9e-4, 1e-300])
def test_noise_that_hides_nothing_is_none(noise):
    for accountant in ("pld", "rdp"):
        assert epsilon(poisson(0.004, noise), 10, DELTA, accountant) == math.inf


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got 0"):
        epsilon(poisson(0.1, 1.0), 1, 0)
    with pytest.raises(ValueError, match="number of releases must be >= 0, got -1"):
        epsilon(poisson(0.1, 1.0), -1, DELTA)


def test_cross_check_of_fixed_size_batches_has_rdp_alone():
    both = cross_check(make_fixed_event(100, 5, 2.0), 10, DELTA, "replace_one")
    assert both["pld"] is None
    assert both["rdp"] > 0


def test_cross_check_refuses_a_contradiction(monkeypatch):
    monkeypatch.setattr(
        comparison, "epsilon", lambda e, n, d, accountant, r: 2.0 if accountant == "pld" else 1.0
    )
    with pytest.raises(
        ValueError, match=r"the accountants disagree .* PLD gives epsilon 2.0, above the 1.0 of RDP"
    ):
        cross_check(poisson(0.1, 1.0), 1, DELTA)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_cross_check_refuses_a_wrong_total(factor, monkeypatch):
    also = [(dp_accounting.GaussianDpEvent(4.0), 1)]
    honest = cross_check(poisson(0.1, 1.0), 10, DELTA, also=also)
    assert honest["pld"] < honest["rdp"]

    def total(charges, delta, accountant):
        return total_epsilon(charges, delta, accountant) * (factor if accountant == "pld" else 1)

    monkeypatch.setattr(comparison, "total_epsilon", total)
    with pytest.raises(ValueError, match="the accountants disagree on a total"):
        cross_check(poisson(0.1, 1.0), 10, DELTA, also=also)


@pytest.mark.parametrize(
    "event", [case[0] for case in CASES] + [dp_accounting.SelfComposedDpEvent(poisson(0.1, 2.0), 3)]
)
def test_events_survive_json(event):
    assert event_from_dict(json.loads(json.dumps(event_to_dict(event)))) == event


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "PrivacyAccountant"}, "unknown privacy event 'PrivacyAccountant'"),
        ({}, "unknown privacy event None"),
        (
            {"type": "GaussianDpEvent", "sigma": 1.0},
            r"the fields \['sigma'\] do not fit the event GaussianDpEvent",
        ),
    ],
)
def test_unknown_events_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        event_from_dict(data)


def test_a_curve_remembers(monkeypatch):
    curve = EpsilonCurve(poisson(0.1, 2.0), DELTA, accountant="rdp")
    first = curve.epsilon(10)
    monkeypatch.setattr(EpsilonCurve, "_compute", None)
    assert curve.epsilon(10) == first


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_upper_bound_is_one_grows_and_rarely_computes(accountant, monkeypatch):
    calls = []
    compute = EpsilonCurve._compute
    monkeypatch.setattr(
        EpsilonCurve, "_compute", lambda self, n: calls.append(n) or compute(self, n)
    )
    curve = EpsilonCurve(poisson(0.05, 2.0), DELTA, accountant=accountant, horizon=300)
    bounds = [curve.upper_bound(n) for n in range(301)]
    # Our own distribution gives what is shown before the end.
    assert calls == [300] if accountant == "pld" else len(calls) < 35 and max(calls) == 300
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert bounds[300] == curve.epsilon(300)
    assert all(bounds[n] >= curve.epsilon(n) * (1 - 1e-4) for n in (1, 7, 50, 123, 299))


def test_the_upper_bound_does_not_depend_on_what_else_was_computed():
    plain, looked_at = (
        EpsilonCurve(poisson(0.05, 2.0), DELTA, accountant="rdp", horizon=300) for _ in range(2)
    )
    for known in (7, 96, 151):
        looked_at.epsilon(known)
    assert [looked_at.upper_bound(n) for n in range(301)] == [
        plain.upper_bound(n) for n in range(301)
    ]


@pytest.mark.parametrize("every", [1, 7, 28, 1000])
def test_the_upper_bound_is_exact_at_the_counts_that_are_computed_anyway_and_never_falls(every):
    curve = EpsilonCurve(poisson(0.05, 2.0), DELTA, accountant="rdp", horizon=112)
    bounds = []
    for n in range(113):  # as a run tells it: what was computed at a step is known at the next
        bounds.append(curve.upper_bound(n, every))
        assert bounds[n] >= curve.epsilon(n)
    assert bounds == sorted(bounds)
    assert all(bounds[n] == curve.epsilon(n) for n in range(0, 113, every)) and bounds[
        112
    ] == curve.epsilon(112)


@pytest.mark.parametrize("more", [(), ((dp_accounting.GaussianDpEvent(0.1), 5),)])
def test_an_epsilon_in_the_millions_is_bounded_without_a_composition_by_pld(more, monkeypatch):
    charges = [(poisson(0.1, 0.01), 1000), *more]
    bound = total_epsilon(charges, DELTA, "rdp")
    assert bound > dp_accountants.MOST_BY_PLD
    monkeypatch.setattr(accounting, "_values", {})
    monkeypatch.setattr(dp_accountants, "_compose", None)
    assert total_epsilon(charges, DELTA, "pld") == bound
    checked = cross_check(*charges[0], DELTA, also=more)
    assert checked["pld"] == checked["rdp"]


def test_warnings_of_dp_accounting_are_said_once_by_our_logger(caplog, monkeypatch):
    monkeypatch.setattr(dp_accountants, "_forwarded", set())
    monkeypatch.setattr(accounting, "_values", {})
    # a command line that ran before in this process has quietened them
    for name in (
        "dpkfc",
        "dpkfc.privacy.dp_accountants",
    ):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            epsilon(poisson(0.1, 0.6), 1, DELTA, "rdp")
    assert [(record.name, record.levelno) for record in caplog.records] == [
        ("dpkfc.privacy.dp_accountants", logging.INFO)
    ]
    assert "failed to converge" in caplog.text
    assert "said once" in caplog.text
    assert not logging.getLogger("absl").filters
