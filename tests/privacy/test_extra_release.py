"""Releases beside the steps: their charge, their noise, and ε of a plan that has some."""

import math

import dp_accounting
import numpy as np
import pytest

from dpkfc import PrivacyConfig
from dpkfc.privacy.accounting import total_epsilon
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.calibration import share_noise
from dpkfc.privacy.extra_releases import ExtraRelease
from dpkfc.privacy.ledger import BudgetExhausted, Ledger, verify
from dpkfc.privacy.ledger_lines import LedgerError, encode_line
from dpkfc.privacy.mechanism import release_vector

BOUNDS = ExtraRelease(purpose="bounds", noise_multiplier=4.0, norm=2.0)
LOOKS = ExtraRelease(purpose="looks", noise_multiplier=9.0, norm=1.0, count=3)


def _plan(*extra, accountant="rdp", seed=None):
    config = PrivacyConfig(
        expected_batch_size=50,
        steps=20,
        accountant=accountant,
        test_mode_seed=seed,
        extra_releases=extra,
    )
    return config.calibrate(2.0, 1e-5, 1000)


@pytest.mark.quick("rdp")
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_whole_plan_costs_what_was_asked(accountant):
    plan, alone = _plan(BOUNDS, LOOKS, accountant=accountant), _plan(accountant=accountant)
    charges = [(plan.event, 20), (BOUNDS.event, 1), (LOOKS.event, 3)]
    assert plan.epsilon() == pytest.approx(total_epsilon(charges, 1e-5, accountant))
    assert 1.99 < plan.epsilon() <= 2.0
    assert plan.noise_multiplier > alone.noise_multiplier
    assert plan.epsilon(0) == pytest.approx(total_epsilon(charges[1:], 1e-5, accountant))
    fewer = plan.epsilon(5, {"looks": 1})
    assert fewer == pytest.approx(
        total_epsilon([(plan.event, 5), (LOOKS.event, 1)], 1e-5, accountant)
    )
    assert plan.cross_check()[accountant] == pytest.approx(plan.epsilon())
    assert plan.curve.upper_bound(0) == plan.epsilon(0) <= plan.curve.upper_bound(3)


def test_plans_without_such_releases_keep_their_hash():
    assert "extra_releases" not in _plan().config.describe_mechanism()
    assert "extra" not in _plan().open_ledger(None).header
    hashes = {_plan().hash, _plan(BOUNDS).hash, _plan(LOOKS).hash, _plan(BOUNDS, LOOKS).hash}
    assert len(hashes) == 4


@pytest.mark.parametrize("sampler", ["fixed", "shuffle"])
def test_neighbours_that_replace_a_record_do_not_add_up(sampler):
    with pytest.raises(ValueError, match="add up with sampler='poisson'"):
        PrivacyConfig(
            expected_batch_size=5, steps=2, sampler=sampler, uncertified=True,
            extra_releases=(BOUNDS,),
        )  # fmt: skip
    with pytest.raises(ValueError, match="one purpose"):
        PrivacyConfig(expected_batch_size=5, steps=2, extra_releases=(BOUNDS, BOUNDS))


@pytest.mark.parametrize(
    "change", [{"noise_multiplier": 0.0}, {"norm": math.nan}, {"count": 0}, {"purpose": "a b"}]
)
def test_a_kind_has_noise(change):
    fields = {"purpose": "bounds", "noise_multiplier": 1.0, "norm": 1.0}
    with pytest.raises(ValueError):
        ExtraRelease(**{**fields, **change})


def test_a_release_is_charged_once_and_before_it_exists(tmp_path):
    plan, path = _plan(BOUNDS, LOOKS), tmp_path / "ledger.jsonl"
    vector = np.zeros(5)
    with plan.open_ledger(path) as ledger:
        release_vector(vector, BOUNDS, plan, ledger, 20)
        with pytest.raises(BudgetExhausted, match="allows 1 releases for bounds"):
            release_vector(vector, BOUNDS, plan, ledger, 20)
        with pytest.raises(LedgerError, match="another run"):
            plan.open_ledger(path)
        assert (ledger.steps, ledger.extra, ledger.count) == (0, {"bounds": 1}, 1)
        assert ledger.remaining == 20
    with plan.open_ledger(path) as ledger:
        # A second process, or a second start, finds the charge.
        with pytest.raises(BudgetExhausted):
            release_vector(vector, BOUNDS, plan, ledger, 20)
        release_vector(vector, LOOKS, plan, ledger, 21)
    lines = verify(path).releases
    assert [line["purpose"] for line in lines] == ["bounds", "looks"]
    assert lines[0]["stddev"] == BOUNDS.stddev == 4.0 * BOUNDS.sensitivity


def test_no_noise_is_drawn_where_the_charge_fails():
    plan = _plan(BOUNDS)
    ledger = plan.open_ledger(None)
    ledger.close()
    drawn = []

    class Watched:
        hash = plan.hash

        def noise_stream(self):
            stream = plan.noise_stream()
            normal = stream.normal
            stream.normal = lambda *given: drawn.append(given) or normal(*given)
            return stream

    with pytest.raises(LedgerError):
        release_vector(np.zeros(3), BOUNDS, Watched(), ledger, 0)
    assert not drawn
    release_vector(np.zeros(3), BOUNDS, Watched(), plan.open_ledger(None), 0)
    assert len(drawn) == 1
    with pytest.raises(ValueError, match="another plan"):
        release_vector(np.zeros(3), BOUNDS, plan, _plan().open_ledger(None), 0)


def test_steps_cannot_spend_what_is_kept_for_others_nor_the_reverse():
    plan = _plan(BOUNDS)
    ledger = plan.open_ledger(None)
    for step in range(20):
        assert ledger.charge(step, plan.event, 1.0, 1.0, 1.0) == step + 1
    with pytest.raises(BudgetExhausted):
        ledger.charge(20, plan.event, 1.0, 1.0, 1.0)
    with pytest.raises(BudgetExhausted, match="allows 0 releases for other"):
        ledger.charge(20, plan.event, 1.0, 1.0, 1.0, "other")
    assert ledger.charge(20, BOUNDS.event, 4.0, 8.0, 2.0, "bounds") == 1
    unlimited = Ledger.open(None, "plan")
    with pytest.raises(BudgetExhausted):
        unlimited.charge(0, BOUNDS.event, 4.0, 8.0, 2.0, "bounds")


@pytest.mark.parametrize("purpose", ["", 3, None, ["bounds"], {"a": 1}, "a b"])
def test_a_forged_purpose_is_refused(tmp_path, purpose):
    path = tmp_path / "ledger.jsonl"
    plan = _plan(BOUNDS)
    with plan.open_ledger(path) as ledger:
        release_vector(np.zeros(2), BOUNDS, plan, ledger, 0)
    first, second = path.read_bytes().splitlines(keepends=True)
    line = {**verify(path).releases[0], "purpose": purpose}
    line.pop("hash")
    path.write_bytes(first + encode_line(line)[0])
    with pytest.raises(LedgerError, match="purpose"):
        plan.open_ledger(path)
    path.write_bytes(first + second.replace(b'"bounds"', b'"looks"'))
    with pytest.raises(LedgerError, match="was changed"):
        plan.open_ledger(path)


def test_the_noise_has_the_stated_scale_and_lies_on_a_grid():
    plan, vector = _plan(BOUNDS), np.full(40_000, 7.0)
    noisy = release_vector(vector, BOUNDS, plan, plan.open_ledger(None), 0)
    noise = noisy - vector
    assert noise.mean() == pytest.approx(0.0, abs=5 * BOUNDS.stddev / 200)
    assert noise.std() == pytest.approx(BOUNDS.stddev, rel=0.02)
    steps = noisy * 2.0**40
    assert np.array_equal(steps, np.round(steps)), "low bits of the sum would show"
    again = release_vector(vector, BOUNDS, plan, plan.open_ledger(None), 0)
    assert not np.any(again == noisy)


def test_a_budget_is_charged_with_the_whole_plan(tmp_path):
    plan, alone = _plan(BOUNDS, LOOKS), _plan()
    budget = Budget(tmp_path / "ward.toml", epsilon=4.0, delta=1e-5)
    with plan.open_ledger(tmp_path / "ledger.jsonl") as ledger:
        receipt = budget.charge(plan, ledger)
        release_vector(np.zeros(2), BOUNDS, plan, ledger, 0)
    whole = total_epsilon([(plan.event, 20), (BOUNDS.event, 1), (LOOKS.event, 3)], 1e-5)
    assert receipt.after == pytest.approx(whole) == pytest.approx(budget.spent)
    with plan.open_ledger(tmp_path / "ledger.jsonl") as ledger:
        assert budget.charge(plan, ledger) == receipt
    assert len(budget.charges) == 1
    both = total_epsilon([charge.cost for charge in budget.charges] + [(alone.event, 20)], 1e-5)
    assert budget.check(alone, 20).after == pytest.approx(both)


def test_a_share_is_what_the_release_costs_alone():
    noise = share_noise(0.25, 2.0, 1e-5)
    event = dp_accounting.GaussianDpEvent(noise)
    assert 0.499 < total_epsilon([(event, 1)], 1e-5) <= 0.5
