"""ε of a random search counts all releases of each method, and is computed without noise on the
terminal; what says that something is wrong is still heard.
"""

import logging

import dp_accounting
import pytest
from dp_accounting import dp_event, rdp

from dpkfc import PrivacyConfig
from dpkfc.app.tuning.cost import StudyLedgers, bound_selection, cost_of, trial_law
from dpkfc.privacy import dp_accountants
from dpkfc.privacy.extra_releases import ExtraRelease
from dpkfc.report.text import round_up

DELTA = 1e-5
LAW = trial_law("geometric", 4)


@pytest.fixture
def heard(monkeypatch):
    """What reaches the handler of absl's logger, which writes to standard error."""
    monkeypatch.setattr(dp_accountants, "_forwarded", set())
    lines = []

    class Ear(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    ear, absl = Ear(), logging.getLogger("absl")
    absl.addHandler(ear)
    yield lines
    absl.removeHandler(ear)


def test_orders_that_are_left_out_are_not_told_one_by_one(heard):
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(0.6))
    assert (
        bound_selection(
            event, 1, 1e-5, trial_law("geometric", 20), "add_or_remove_one", then=(event, 1)
        )
        > 0
    )
    assert heard == [] and not logging.getLogger("absl").filters


def test_another_warning_passes(heard):
    with dp_accountants.quiet_accountants():
        logging.getLogger("absl").warning("Negative Renyi divergence of %s", -1)
        logging.getLogger("absl").warning(
            "of %d. Excluding this order from the epsilon computation.", 3
        )
    assert heard == ["Negative Renyi divergence of -1"]


def selection_by_hand(charges, then=()):
    """ε of the best of a geometric number of trials, and of one training after it."""
    trial = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(*one) for one in charges])
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, LAW.mean, LAW.shape))
    for one in then:
        accountant.compose(*one)
    return pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)


def test_releases_beside_the_steps_of_each_trial_are_counted():
    bounds = ExtraRelease(purpose="bounds", noise_multiplier=2.0, norm=1.0)
    config = PrivacyConfig(expected_batch_size=50, steps=20, extra_releases=(bounds,))
    plan = config.with_noise(2.0, DELTA, 900)
    charges = [(plan.event, 20), (dp_accounting.GaussianDpEvent(2.0), 1)]
    cost = cost_of([plan], StudyLedgers(), LAW)
    assert cost.epsilon_with_tuning == selection_by_hand(charges)
    assert cost.epsilon_with_training == selection_by_hand(charges, charges)
    assert f"(ε = {round_up(plan.epsilon())}, " in cost.statement


@pytest.mark.parametrize("order", [1, -1])
def test_the_figures_of_several_methods_hold_for_each(order):
    plans = [
        PrivacyConfig(expected_batch_size=900, steps=40).calibrate(1.0, DELTA, 900),
        PrivacyConfig(expected_batch_size=9, steps=200).calibrate(1.0, DELTA, 900),
    ][::order]
    both = cost_of(plans, StudyLedgers(), LAW)
    alone = [cost_of([plan], StudyLedgers(), LAW) for plan in plans]
    assert alone[0].epsilon_with_tuning != alone[1].epsilon_with_tuning
    for name in ("epsilon_with_tuning", "epsilon_with_training"):
        assert getattr(both, name) == max(getattr(cost, name) for cost in alone)
    largest = max(plan.epsilon() for plan in plans)
    assert f"(ε = {round_up(largest)}, " in both.statement
