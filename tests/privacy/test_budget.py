"""The budget of a dataset: what is charged and when, once a ledger, by several processes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace

import dp_accounting
import pytest

from dpkfc.privacy import Budget, BudgetError
from dpkfc.privacy.accounting import epsilon, total_epsilon
from dpkfc.privacy.extra_releases import ExtraRelease
from dpkfc.privacy.ledger import BudgetExhausted, Ledger
from tests import forked

DELTA = 1e-5


@dataclass(frozen=True)
class Run:
    """A plan, as far as a budget reads it."""

    event: dp_accounting.DpEvent
    hash: str = "plan"
    delta: float = DELTA
    privacy_unit: str = "one example"
    neighbouring_relation: str = "add_or_remove_one"
    caveats: tuple[str, ...] = ()
    extra_releases: tuple[ExtraRelease, ...] = ()

    def count_events(self, releases):
        return releases


def poisson(rate, noise):
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))


RUN = Run(dp_accounting.GaussianDpEvent(10.0))  # ε of 4 releases at 1e-5 is about 0.8
OTHER = Run(poisson(0.1, 2.0), hash="other")


def budget(folder, limit=3.0, delta=DELTA, **more):
    return Budget(folder / "ward.toml", epsilon=limit, delta=delta, **more)


def ledger(path, run=RUN, releases=4):
    if path is None:
        return Ledger.open(None, run.hash, max_releases=releases)
    return Ledger.open(path, run.hash, max_releases=releases)


# -- the total ----


def test_equal_runs_cost_what_one_long_run_costs():
    event = poisson(0.1, 1.0)
    assert total_epsilon([(event, 20), (event, 30)], DELTA) == epsilon(event, 50, DELTA)
    assert total_epsilon([], DELTA) == 0.0


def test_the_total_of_two_plans_lies_between_the_larger_and_the_sum():
    parts = [(poisson(0.1, 1.0), 50), (poisson(0.2, 1.3), 30)]
    alone = [total_epsilon([part], DELTA) for part in parts]
    for accountant in ("pld", "rdp"):
        total = total_epsilon(parts, DELTA, accountant)
        assert max(alone) < total
    assert total_epsilon(parts, DELTA) < total_epsilon(parts, DELTA, "rdp")
    assert total_epsilon(parts, DELTA) == total_epsilon(parts[::-1], DELTA)


def test_relations_are_not_mixed_and_missing_noise_is_infinite():
    fixed = dp_accounting.SampledWithoutReplacementDpEvent(
        100, 10, dp_accounting.GaussianDpEvent(2.0)
    )
    with pytest.raises(ValueError, match="no common ε"):
        total_epsilon([(poisson(0.1, 1.0), 3), (fixed, 3)], DELTA)
    assert total_epsilon([(fixed, 3)], DELTA) > 0
    bare = dp_accounting.GaussianDpEvent(0.0)
    assert total_epsilon([(bare, 1), (poisson(0.1, 1.0), 3)], DELTA) == float("inf")


# -- charges ----


def test_runs_add_up_until_one_does_not_fit(tmp_path):
    ward = budget(tmp_path, people="patients of ward 7")
    first = ward.charge(RUN, ledger(tmp_path / "a.jsonl"))
    assert first.before == 0.0 and first.after == pytest.approx(epsilon(RUN.event, 4, DELTA))
    second = ward.charge(OTHER, ledger(tmp_path / "b.jsonl", OTHER, 5))
    assert second.before == first.after
    assert second.after == ward.spent == total_epsilon([(RUN.event, 4), (OTHER.event, 5)], DELTA)
    assert second.people == "patients of ward 7"


def test_a_run_that_does_not_fit_is_refused_and_nothing_is_written(tmp_path):
    ward = budget(tmp_path)
    ward.charge(RUN, ledger(None))
    before = ward.path.read_bytes()
    large = replace(RUN, event=dp_accounting.GaussianDpEvent(1.0))
    with pytest.raises(BudgetExhausted, match=r"ward\.toml has ε = .* of 3 left.*plan for ε = "):
        ward.charge(large, ledger(None, large))
    assert ward.path.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"ward.toml", "ward.toml.lock"}


def test_the_plan_that_a_refusal_names_fits_and_uses_the_rest(tmp_path):
    ward = budget(tmp_path, 1.5)
    ward.charge(RUN, ledger(None))
    large = replace(RUN, event=dp_accounting.GaussianDpEvent(1.0))
    with pytest.raises(BudgetExhausted) as no:
        ward.check(large, 4)
    named = float(str(no.value).partition("plan for ε = ")[2].partition(",")[0])
    noise = 1.0
    while epsilon(dp_accounting.GaussianDpEvent(noise), 4, DELTA) > named:
        noise *= 1.01
    fitting = replace(RUN, event=dp_accounting.GaussianDpEvent(noise))
    assert 1.3 < ward.check(fitting, 4).after <= 1.5
    with pytest.raises(BudgetExhausted, match=r"; name another budget$"):
        full = Budget(tmp_path / "full.toml", epsilon=1e-9, delta=DELTA)
        full.check(large, 4)


def reopen(ward, path, releases=0):
    """Charge a run that goes on with a ledger; the number of charges."""
    with ledger(path) as opened:
        ward.charge(RUN, opened)
        for _ in range(releases):
            opened.charge(0, RUN.event, 10.0, 10.0, 1.0)
    return len(ward.charges)


def test_a_moved_ledger_is_charged_again_unless_the_budget_knows(tmp_path):
    ward = budget(tmp_path, 9.0)
    old, new, third = tmp_path / "run.jsonl", tmp_path / "new.jsonl", tmp_path / "third.jsonl"
    reopen(ward, old, releases=1)
    kept = old.read_bytes()
    with pytest.raises(BudgetError, match=r"run\.jsonl is still there"):
        ward.move(old, new)
    old.rename(new)
    with pytest.raises(BudgetError, match=r"no charge of new\.jsonl has the path other\.jsonl"):
        ward.move(tmp_path / "other.jsonl", new)
    text = ward.path.read_text("utf-8")
    ward.move(old, new)
    assert ward.path.read_text("utf-8").count("\n") == text.count("\n")
    assert reopen(ward, new, releases=1) == 1
    new.rename(third)
    for copy in (old, new):
        copy.write_bytes(kept)
    assert reopen(ward, old) == 2  # a copy, where the charged file was first
    assert reopen(ward, new) == 3  # an earlier state, where it was last
    new.unlink()
    third.rename(new)
    assert reopen(ward, new) == 3
    new.rename(third)
    new.write_bytes(kept)
    assert reopen(ward, third) == 4  # moved, and nobody said so


def test_an_earlier_state_of_a_ledger_is_charged_again(tmp_path, caplog):
    ward = budget(tmp_path, 9.0)
    path = tmp_path / "run.jsonl"
    reopen(ward, path, releases=1)
    kept = path.read_bytes()
    assert reopen(ward, path, releases=2) == 1
    assert (ward.charges[0].released, caplog.text) == (3, "")
    path.write_bytes(kept)
    assert reopen(ward, path, releases=1) == 2
    assert "--moved OLD NEW" in caplog.text
    assert reopen(ward, path) == 2
    assert [charge.released for charge in ward.charges] == [3, 2]
    # The last release of a plan is noted also where nobody closes the ledger.
    opened = ledger(path)
    ward.charge(RUN, opened)
    for _ in range(2):
        opened.charge(0, RUN.event, 10.0, 10.0, 1.0)
    assert ward.charges[1].released == 4
    ward.path.unlink()
    opened.close()
    assert "does not know the end" in caplog.text


def test_a_copy_of_a_ledger_and_a_second_ledger_are_charged(tmp_path):
    ward = budget(tmp_path, 9.0)
    with ledger(tmp_path / "run.jsonl") as opened:
        ward.charge(RUN, opened)
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "run.jsonl").read_bytes())
    for path in (tmp_path / "copy.jsonl", tmp_path / "new.jsonl", None):
        with ledger(path) as opened:
            ward.charge(RUN, opened)
    assert len(ward.charges) == 4


# -- what is refused ----


def test_what_cannot_be_counted_is_refused(tmp_path):
    ward = budget(tmp_path)
    ward.charge(RUN, ledger(None))
    before = ward.path.read_bytes()
    patient = replace(RUN, privacy_unit="one patient (all records; up to 4 of them)")
    with pytest.raises(BudgetError, match="counts one example, this plan has one patient"):
        ward.charge(patient, ledger(None))
    with pytest.raises(BudgetError, match="counts add_or_remove_one, this plan has replace_one"):
        ward.charge(replace(RUN, neighbouring_relation="replace_one"), ledger(None))
    with pytest.raises(BudgetError, match="certified plans alone.*test mode"):
        ward.charge(replace(RUN, caveats=("NOT PRIVATE: test mode",)), ledger(None))
    with pytest.raises(BudgetError, match="make_private_with_epsilon"):
        ward.charge(RUN, Ledger.open(None, "plan"))
    assert ward.path.read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"epsilon": 4.0}, r"has epsilon = 3\.0, not 4\.0"),
        ({"delta": 1e-6}, "has delta = 1e-05, not 1e-06"),
        ({"people": "others"}, "has people = 'ward', not 'others'"),
        ({"epsilon": -1.0}, "epsilon must be positive"),
        ({"delta": 1.0}, "delta must lie in"),
    ],
)
def test_a_budget_keeps_its_terms(tmp_path, settings, match):
    budget(tmp_path)
    with pytest.raises(ValueError, match=match):
        Budget(tmp_path / "ward.toml", **settings)


def test_a_missing_budget_is_one_error_and_no_file(tmp_path):
    with pytest.raises(
        BudgetError, match=r"the budget .* does not exist; create it: dpkfc budget 'ty po\.toml' --"
    ):
        Budget(tmp_path / "ty po.toml")
    with pytest.raises(BudgetError, match="cannot be written"):
        budget(tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        ("releases = 4", "releases = -4"),
        ("releases = 4", 'releases = "4"'),
        ("releases = 4\n", ""),
        ("released = 0", "released = -1"),
        ("epsilon = 3.0", "epsilon = nan"),
        ("epsilon = 3.0", "epsilon = true"),
        ("epsilon = 3.0", 'epsilon = "3"'),
        ("\n[[charge]]", "\n[[charges]]"),
        ("GaussianDpEvent", "NoSuchEvent"),
        ("delta = 1e-05", "delta ="),
    ],
)
def test_a_damaged_budget_is_one_error(tmp_path, change):
    ward = budget(tmp_path)
    ward.charge(RUN, ledger(None))
    text = ward.path.read_text("utf-8")
    assert change[0] in text
    ward.path.write_text(text.replace(*change, 1), "utf-8")
    with pytest.raises(BudgetError, match=r"ward\.toml is damaged"):
        Budget(ward.path)


def test_what_a_person_wrote_stays(tmp_path):
    path = tmp_path / "ward.toml"
    path.write_text(
        'people = "Station 7 \\"B\\""\nepsilon = 3 # board, 3 May\ndelta = 1e-5', "utf-8"
    )
    path.chmod(0o640)
    ward = Budget(path)
    ward.charge(RUN, ledger(tmp_path / 'a "b".jsonl'))
    assert "# board, 3 May" in path.read_text("utf-8")
    assert path.stat().st_mode & 0o777 == 0o640
    again = Budget(path)
    assert again.people == 'Station 7 "B"' and again.charges[0].path.endswith('a "b".jsonl')


# -- several processes, and crashes ----


def charge_often(path, times):
    for _ in range(times):
        try:
            Budget(path, epsilon=1.5, delta=DELTA).charge(RUN, ledger(None))
        except BudgetExhausted:
            return


def test_processes_that_charge_at_once_do_not_overspend(tmp_path):
    path = tmp_path / "ward.toml"
    processes = [forked.start(charge_often, path, 5) for _ in range(4)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    ward = Budget(path)
    fitting = next(n for n in range(1, 99) if epsilon(RUN.event, 4 * (n + 1), DELTA) > 1.5)
    assert len(ward.charges) == fitting
    assert [charge.before for charge in ward.charges[1:]] == [c.after for c in ward.charges[:-1]]
    assert ward.spent <= 1.5
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"ward.toml", "ward.toml.lock"}


def die_after_the_charge(folder):
    with ledger(folder / "run.jsonl") as opened:
        budget(folder).charge(RUN, opened)
        os.kill(os.getpid(), signal.SIGKILL)


def die_before_the_rename(folder):
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = die  # type: ignore[assignment]
    with ledger(folder / "run.jsonl") as opened:
        budget(folder).charge(RUN, opened)


@pytest.mark.parametrize(
    ("work", "charged"), [(die_after_the_charge, 1), (die_before_the_rename, 0)]
)
def test_a_killed_run_is_counted_before_it_starts(tmp_path, work, charged):
    process = forked.start(work, tmp_path)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    ward = budget(tmp_path)
    assert len(ward.charges) == charged
    with ledger(tmp_path / "run.jsonl") as opened:  # the run is started again
        assert opened.count == 0
        ward.charge(RUN, opened)
    assert len(ward.charges) == 1
