"""What a study has released is told by its ledgers, whatever the settings of today."""

import dp_accounting
import pytest
from dp_accounting import rdp

from dpkfc import PrivacyConfig
from dpkfc.app.tuning.cost import StudyLedgers, cost_of
from dpkfc.privacy.ledger import Ledger

DELTA = 1e-5
WEAK = PrivacyConfig(expected_batch_size=100, steps=5).with_noise(0.8, DELTA, 1000)
STRONG = PrivacyConfig(expected_batch_size=100, steps=4).with_noise(3.0, DELTA, 1000)
OF_ALL = "add_or_remove_one"


def run_of(folder, name, plan, releases, header=None):
    (folder / name).mkdir(parents=True)
    path = folder / name / "ledger.jsonl"
    stated = {**plan.ledger_header, "steps": plan.steps} if header is None else header
    with Ledger.open(path, plan.hash, stated) as ledger:
        for step in range(releases):
            ledger.charge(
                step=step,
                event=plan.event,
                noise_multiplier=plan.noise_multiplier,
                stddev=1.0,
                sensitivity=1.0,
            )
    return path


def account_by_rdp(*runs):
    accountant = rdp.RdpAccountant()
    for plan, count in runs:
        accountant.compose(plan.event, count)
    return pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


def test_a_run_that_was_killed_at_another_epsilon_is_charged_with_its_own_event(tmp_path):
    run_of(tmp_path, "a", WEAK, 2)
    run_of(tmp_path, "b", STRONG, 4)
    found = StudyLedgers.read(tmp_path)
    # of the killed one what it planned
    assert found.runs == 2 and found.epsilon(DELTA, OF_ALL) == account_by_rdp(
        (WEAK, 5), (STRONG, 4)
    )
    cost = cost_of([STRONG], found)
    assert cost.epsilon_composed == found.epsilon(DELTA, OF_ALL) > 3 * STRONG.epsilon()
    assert "All 2 runs started compose" in cost.statement and not cost.unpublished


def test_a_ledger_that_states_no_plan_counts_with_its_releases(tmp_path):
    run_of(tmp_path, "a", WEAK, 2, {})
    assert StudyLedgers.read(tmp_path).epsilon(DELTA, OF_ALL) == account_by_rdp((WEAK, 2))
    run_of(tmp_path, "b", WEAK, 7, {"steps": 5})
    assert StudyLedgers.read(tmp_path).epsilon(DELTA, OF_ALL) == account_by_rdp((WEAK, 9))


def test_runs_that_were_killed_while_they_wrote_count(tmp_path):
    path = run_of(tmp_path, "a", WEAK, 2)
    path.write_bytes(path.read_bytes()[:-20])  # the second release never left
    empty = run_of(tmp_path, "b", WEAK, 0)
    found = StudyLedgers.read(tmp_path)
    assert found.runs == 2 and found.epsilon(DELTA, OF_ALL) == account_by_rdp((WEAK, 5))
    for left in (empty.read_bytes()[:20], b""):
        empty.write_bytes(left)
        assert StudyLedgers.read(tmp_path) == found


def test_a_damaged_ledger_leaves_no_figure_and_is_named(tmp_path):
    run_of(tmp_path, "a", STRONG, 4)
    path = run_of(tmp_path, "b", WEAK, 2)
    path.write_text(path.read_text("utf-8").replace("0.8", "9.8", 1), "utf-8")
    cost = cost_of([STRONG], StudyLedgers.read(tmp_path))
    assert (
        cost.epsilon_composed is None
        and "2 runs started cost together cannot be told" in cost.statement
    )
    assert "line 2 of the ledger b/ledger.jsonl" in cost.statement


def test_runs_of_two_relations_have_no_common_figure(tmp_path):
    run_of(tmp_path, "a", STRONG, 4)
    other = {"neighbouring_relation": "replace_one", "steps": 3}
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        1000, 100, dp_accounting.GaussianDpEvent(1.0)
    )
    (tmp_path / "b").mkdir()
    with Ledger.open(tmp_path / "b" / "ledger.jsonl", "0", other) as ledger:
        ledger.charge(step=0, event=event, noise_multiplier=1.0, stddev=1.0, sensitivity=1.0)
    assert StudyLedgers.read(tmp_path).epsilon(DELTA, OF_ALL) is None


def test_runs_without_noise_have_no_finite_figure_and_none_are_nothing(tmp_path):
    assert (
        StudyLedgers.read(tmp_path / "missing") == StudyLedgers()
        and StudyLedgers().epsilon(DELTA, OF_ALL) is None
    )
    run_of(
        tmp_path,
        "a",
        PrivacyConfig(expected_batch_size=100, steps=5).with_noise(0.0, DELTA, 1000),
        1,
    )
    cost = cost_of([STRONG], StudyLedgers.read(tmp_path))
    assert cost.epsilon_composed is None and "compose to ε = ∞" in cost.statement
