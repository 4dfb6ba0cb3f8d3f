"""Tuning: equal trials in rounds, resumed after a kill, pruned on validation, and honest about what
ε says.
"""

import json
import math
import re
import shlex
import statistics
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest

from dpkfc import PrivacyConfig
from dpkfc.app.run_folder import RunFolderError
from dpkfc.app.tuning import tune
from dpkfc.app.tuning.arms import CONTROLS, Choice, arm_of, arms_for
from dpkfc.app.tuning.cost import StudyLedgers, bound_selection, cost_of, draw, trial_law
from dpkfc.app.tuning.members import Member
from dpkfc.app.tuning.runs import Run, StudyError
from dpkfc.app.tuning.tune import TuneSettings, report_at_end
from dpkfc.app.tuning.tuned import Tuned
from dpkfc.report.text import round_up
from dpkfc_papers import accuracy
from dpkfc_papers.accuracy import AccuracyStudy
from dpkfc_papers.store import Store
from tests.tuning.test_search import row_of, score

pytest.importorskip("optuna")
pytest.importorskip("sklearn")

EVENT = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0))


def answer(source, place=None, *, most=10_000, **_):
    """`drive` without workers: one cell after the other; returns the tasks."""
    seen = []
    while len(seen) < most and (task := source.next(lambda run: True)) is not None:
        seen.append(task)
        value = score(task.run)
        judge = task.judge or (lambda *_: True)
        source.take_row(task, row_of(task.run), not all(judge(n, value) for n in (1, 2, 3)))
    return seen


@pytest.fixture
def fake_scores(monkeypatch):
    monkeypatch.setattr(tune, "drive", answer)


def settings(**changed):
    values = {
        "recipe": "digits",
        "methods": ("dp-sgd",),
        "trials": 6,
        "controls": False,
        "settings": {"steps": 4},
    }
    return TuneSettings(**{**values, **changed})


def test_controls_stand_beside_every_method_and_have_its_trials():
    names = [arm.name for arm in arms_for("digits", ["dp-kfc", "dp-kfc-a"])]
    assert names == [
        "dp-kfc",
        "dp-kfc-a",
        *(name for name in CONTROLS if name != "dp-kfc-a"),
        "dp-kfc-a-random",
    ]
    assert [arm.name for arm in arms_for("digits", ["disk"])] == ["disk", *CONTROLS]
    assert [arm.name for arm in arms_for("digits", ["disk"], controls=False)] == ["disk"]
    assert [arm.name for arm in arms_for("digits", ["dp-kfc-a", "dp-sgd"]) if not arm.control] == [
        "dp-kfc-a",
        "dp-sgd",
    ]
    with pytest.raises(StudyError, match="twice"):
        arms_for("digits", ["disk", "disk"])
    with pytest.raises(StudyError, match="did you mean 'dp-kfc'"):
        arm_of("digits", "dp-kfk")


def test_an_optimizer_that_is_asked_for_brings_its_ranges():
    adam = arm_of("digits", "disk", "adam").space
    assert adam["lr"] == arm_of("digits", "dp-adam").space["lr"] and "filter_kappa" in adam
    assert arm_of("digits", "disk", "sgd").space["lr"] == arm_of("digits", "disk").space["lr"]


def test_every_method_has_a_space_that_its_recipe_takes():
    from dpkfc.app.methods import METHODS

    for name in METHODS:
        arm = arm_of("mnist-cnn", name)
        assert "lr" in arm.space
        drawn = {
            key: of.values[0] if isinstance(of, Choice) else of.low for key, of in arm.space.items()
        }
        Run.make(
            "mnist-cnn", name, {"public_data": "x.safetensors", **arm.settings, **drawn}
        ).config()


def test_the_report_says_that_tuning_is_not_in_epsilon(tmp_path, fake_scores):
    tuned = tune.tune(settings(), tmp_path)
    assert (
        tuned.complete
        and [arm.trials for arm in tuned.arms] == [6]
        and tuned.epsilon_with_tuning is None
    )
    text, content = (
        (tmp_path / "tune.md").read_text(),
        json.loads((tmp_path / "tune.json").read_text()),
    )
    assert (
        "Tuning is NOT in ε" in text
        and "no tighter figure exists" in text
        and "dpkfc train --recipe digits" in text
    )
    assert content["arms"][0]["params"]["lr"] == tuned.arms[0].params["lr"]
    words = shlex.split(tuned.arms[0].command)
    assert (
        words[words.index("--chosen-by") + 1]
        == "6 trials of dpkfc tune on a validation split; not in ε"
    )


def test_runs_of_the_truncated_sampler_are_counted_and_its_choice_is_refused(tmp_path, fake_scores):
    config = PrivacyConfig(
        expected_batch_size=20, steps=5, sampler="truncated_poisson", max_batch_size=40
    )
    plan = config.with_noise(1.0, 1e-5, 1000)
    cost = cost_of([plan], StudyLedgers(3, ((plan.event, 3 * plan.steps),)))
    assert cost.epsilon_with_tuning is None and cost.epsilon_composed > plan.epsilon()
    with pytest.raises(StudyError, match="cannot be counted"):
        tune.tune(
            settings(search="random", settings={"steps": 4, "sampler": "truncated_poisson"}),
            tmp_path,
        )


def test_a_study_of_other_settings_is_refused_and_left_as_it_is(tmp_path, fake_scores):
    tune.tune(settings(), tmp_path)
    report = (tmp_path / "tune.md").read_text("utf-8")
    with pytest.raises(StudyError, match="steps = 4, not 5"):
        tune.tune(settings(settings={"steps": 5}), tmp_path)
    assert (tmp_path / "tune.md").read_text("utf-8") == report


def test_trials_go_in_rounds_of_five_and_a_call_goes_on_where_another_stopped(
    tmp_path, monkeypatch
):
    seen = []

    def stop_after_seven(source, place, **_):
        seen.extend(answer(source, most=7))
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "drive", stop_after_seven)
    study = settings(methods=("dp-sgd", "dp-adam"))
    with pytest.raises(KeyboardInterrupt):
        tune.tune(study, tmp_path)
    assert "Not finished" in (tmp_path / "tune.md").read_text("utf-8")
    monkeypatch.setattr(tune, "drive", lambda source, *_, **__: seen.extend(answer(source)))
    tuned = tune.tune(study, tmp_path)
    first = ["dp-sgd"] * 5 + ["dp-adam"] * 5 + ["dp-sgd"] + ["dp-adam"]
    assert [task.label for task in seen[:12]] == first
    assert tuned.complete and [arm.trials for arm in tuned.arms] == [6, 6]
    rows = list(Store(tmp_path / "results.json"))
    assert {row["hash"] for row in rows} == {task.run.hash for task in seen}
    run = Run.make(**rows[0]["run"])
    assert run.evaluate_on == "validation" and dict(run.settings)["validation_size"] == 143


def test_a_full_disk_is_told_and_not_the_report_that_does_not_fit_either():
    def report():
        raise RunFolderError("tune.json cannot be written")

    with pytest.raises(StudyError, match="the first"), report_at_end(report):
        raise StudyError("the first")
    with pytest.raises(RunFolderError), report_at_end(report):
        pass


JOINS = """
import sys, time
from pathlib import Path
from dpkfc.app.tuning import tune
from tests.tuning.test_tune import answer, settings

def slowly(source, place, **_):
    while answer(source, most=1):
        time.sleep(0.05)
    print(source.searches[0].member.name)

tune.drive = slowly
tune.tune(settings(search="random", trials=12), Path(sys.argv[1]))
"""


def test_two_processes_share_the_trials_that_were_drawn_once(tmp_path):
    words = [sys.executable, "-c", JOINS, str(tmp_path)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = {process.communicate(timeout=300)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(names) == 2
    tuned = Tuned.read(json.loads((tmp_path / "tune.json").read_text("utf-8")))
    lines = (tmp_path / "trials.log").read_text("utf-8").splitlines()
    drawn = [a for line in lines for a in [json.loads(line).get("user_attr", {})] if "trials" in a]
    assert len(drawn) == 1 and tuned.arms[0].trials == drawn[0]["trials"]
    assert tuned.complete and tuned.epsilon_with_tuning > tuned.epsilon
    assert not list((tmp_path / "processes").iterdir())


def test_a_process_takes_the_trials_of_one_that_has_died_and_of_no_other(tmp_path):
    study, common = settings(trials=4), {"steps": 4, "validation_size": 50}

    def join(member):
        opened = tune._open_searches(study, common, tmp_path / "trials.log", member)
        return tune.Trials(opened, turn=member.turn)

    with Member(tmp_path) as one, Member(tmp_path) as other:
        assert one.is_alone and not other.is_alone
        dying, living = join(one), join(other)
        lost = dying.next(lambda run: True)
        theirs = [living.next(lambda run: True) for _ in range(3)]
        assert living.next(lambda run: True) is None and not living.is_over
        assert len({task.run.hash for task in [lost, *theirs]}) == 4
        one.__exit__()
        again = living.next(lambda run: True)
        assert again.run == lost.run and living.next(lambda run: True) is None
        for task in [*theirs, again]:
            living.take_row(task, row_of(task.run), False)
        assert living.is_over and living.searches[0].counts()["full"] == 4


def test_a_random_search_states_epsilon_with_its_tuning(tmp_path, fake_scores, monkeypatch):
    monkeypatch.setattr(tune, "draw", lambda law: 3)
    tuned = tune.tune(settings(search="random", trials=5), tmp_path)
    assert (
        tuned.arms[0].trials == 3 and tuned.epsilon < tuned.epsilon_with_tuning < 5 * tuned.epsilon
    )
    assert (
        tuned.epsilon_with_tuning < tuned.epsilon_with_training
        and "Papernot and Steinke" in tuned.statement
    )
    monkeypatch.setattr(tune, "draw", lambda law: 99)  # drawn once, before any trial
    assert tune.tune(settings(search="random", trials=5), tmp_path).arms[0].trials == 3
    with pytest.raises(StudyError, match="another law"):
        tune.tune(settings(search="random", trials=6), tmp_path)


def test_a_random_search_that_is_not_over_states_no_epsilon_of_its_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "draw", lambda law: 3)
    monkeypatch.setattr(tune, "drive", lambda source, place, **more: answer(source, most=2))
    tuned = tune.tune(settings(search="random", trials=5), tmp_path)
    assert (
        not tuned.complete
        and tuned.epsilon_with_tuning is None
        and "once all trials that were drawn" in tuned.statement
    )
    assert "an unfinished random search of dpkfc tune" in tuned.arms[0].command
    tuned = tune.tune(settings(search="random", trials=5), tmp_path)
    assert tuned.complete and tuned.epsilon_with_tuning > tuned.epsilon


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"methods": ()}, "which methods"),
        ({"trials": 0}, "trials = 0"),
        ({"search": "grid"}, "tpe | random"),
        ({"settings": {"lr": 0.1}}, "lr is searched"),
        ({"settings": {"max_grad_norm": 0.1}}, "max_grad_norm is searched"),
        (
            {"methods": ("dp-adambc",), "settings": {"adam_bc_floor": 1e-6}},
            "adam_bc_resolution is searched",
        ),
        ({"search": "random", "count": "fixed"}, "geometric"),
    ],
)
def test_settings_that_make_no_study_are_refused(changed, says):
    with pytest.raises(StudyError, match=says.replace("|", r"\|")):
        settings(**changed)


@pytest.mark.parametrize(
    "name, mean", [("geometric", 10.0), ("poisson", 10.0), ("0.5", 10.0), ("2.5", 4.0)]
)
def test_numbers_of_trials_have_the_law_that_is_accounted_for(name, mean):
    from dp_accounting.rdp.rdp_privacy_accountant import (
        _gamma_truncated_negative_binomial as gamma_of,
    )

    from dpkfc.app.tuning.cost import _find_gamma

    law, generator = trial_law(name, mean), np.random.default_rng(5)
    drawn = [draw(law, generator) for _ in range(4000)]
    error = statistics.stdev(drawn) / math.sqrt(len(drawn))
    assert abs(statistics.mean(drawn) - mean) < 4 * error
    assert min(drawn) >= (0 if name == "poisson" else 1)
    if name != "poisson":
        assert _find_gamma(law) == pytest.approx(gamma_of(law.shape, mean), rel=1e-4)


@pytest.mark.parametrize("name", ["geometric", "0.5", "3"])
def test_a_law_of_mean_one_is_one_trial(name):
    assert draw(trial_law(name, 1), np.random.default_rng(5)) == 1


def test_numbers_of_trials_are_not_cut_off():
    # Poisson of a mean of 20,000 has a standard deviation of 141.
    assert draw(trial_law("poisson", 20_000), np.random.default_rng(5)) > 19_000


def test_selection_costs_more_than_a_run_and_less_than_all_of_them():
    from dpkfc.privacy.accounting import epsilon

    one, law = epsilon(EVENT, 100, 1e-5, "rdp"), trial_law("geometric", 20)
    chosen = bound_selection(EVENT, 100, 1e-5, law, "add_or_remove_one")
    assert one < chosen < epsilon(EVENT, 2000, 1e-5, "rdp") * 1.5
    assert chosen < bound_selection(
        EVENT, 100, 1e-5, trial_law("geometric", 200), "add_or_remove_one"
    )


def test_a_choice_and_the_training_with_it_are_composed_on_one_accountant():
    from dp_accounting import dp_event, rdp

    trial = PrivacyConfig(expected_batch_size=50, steps=20).with_noise(2.0, 1e-5, 900)
    final = PrivacyConfig(expected_batch_size=50, steps=22).with_noise(2.1, 1e-5, 1000)
    accountant = rdp.RdpAccountant()
    accountant.compose(
        dp_event.RepeatAndSelectDpEvent(dp_accounting.SelfComposedDpEvent(trial.event, 20), 4, 1.0)
    )
    alone = accountant.get_epsilon(1e-5)
    accountant.compose(final.event, 22)
    cost = cost_of([trial], StudyLedgers(), trial_law("geometric", 4), finals=[final])
    assert cost.epsilon_with_tuning == pytest.approx(alone)
    assert cost.epsilon_with_training == pytest.approx(accountant.get_epsilon(1e-5))
    for epsilon in (alone, accountant.get_epsilon(1e-5)):
        assert f"ε = {round_up(epsilon)}" in cost.statement
    # A second method has a plan for validation alone.
    dear = PrivacyConfig(expected_batch_size=50, steps=40).with_noise(2.0, 1e-5, 900)
    both = cost_of([trial, dear], StudyLedgers(), trial_law("geometric", 4), finals=[final, None])
    assert both.epsilon_with_tuning > cost.epsilon_with_tuning
    assert both.epsilon_with_training == cost.epsilon_with_training


def test_the_number_of_random_trials_is_told_to_the_operator_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "draw", lambda law: 13)
    monkeypatch.setattr(tune, "drive", answer)
    monkeypatch.setattr(StudyLedgers, "read", lambda folder: StudyLedgers(13, ((EVENT, 13),)))
    tuned = tune.tune(settings(search="random", trials=5), tmp_path)
    assert tuned.arms[0].trials == 13 and "All 13 runs started compose" in tuned.unpublished
    words = shlex.split(tuned.arms[0].command)
    chosen = "a random search of dpkfc tune (geometric, mean 5) on a validation split; not in ε"
    assert words[words.index("--chosen-by") + 1] == chosen
    text = (tmp_path / "tune.md").read_text("utf-8")
    # no decimals: an accuracy of 88.13 % tells no number of trials
    number = re.compile(r"(?<![\d.])13(?!\.?\d)")
    numbers = [line for line in text.splitlines() if number.search(line)]
    assert numbers == [tuned.unpublished] and numbers[0].startswith("Not to be published")
    assert not number.search(tuned.markdown(for_owner=False))


@pytest.mark.slow
def test_what_won_is_trained_on_the_whole_training_set(tmp_path, fake_scores):
    tuned = tune.tune(settings(settings={"steps": 4, "validation_size": 50}), tmp_path)
    assert tuned.validation == 50 and "--validation-size" not in tuned.arms[0].command


@pytest.mark.slow
def test_the_accuracy_study_tunes_then_tests_what_won_and_goes_on_where_it_stopped(
    tmp_path, monkeypatch
):
    common = {"steps": 4}
    study = AccuracyStudy(
        recipes=("digits",),
        epsilons=(1.0, 2.0, 8.0),
        seeds=(0, 1),
        trials=2,
        validation=50,
        common=common,
    )
    store = Store(tmp_path / "results.json")
    arms = [arm_of("digits", name) for name in ("dp-sgd", "disk")]
    monkeypatch.setattr(accuracy, "arms", lambda recipe, public=0: arms)
    sources = study.sources(store, tmp_path / "trials.log")
    first = answer(next(sources))
    first += answer(next(sources), most=2)
    assert len(first) == len(arms) * 2 + 2
    rest = []
    for source in study.sources(Store(store.path), tmp_path / "trials.log"):
        rest += answer(source)
    assert len(first) + len(rest) == len(arms) * (2 + 3 * 2)
    tests = [task for task in (*first, *rest) if task.run.evaluate_on == "test"]
    # one seed of everything before the next
    at_one, later = (
        [(0, 1.0), (1, 1.0)],
        [(0, 2.0), (0, 8.0), (1, 2.0), (1, 8.0)],
    )
    assert [(task.run.seed, dict(task.run.settings)["epsilon"]) for task in tests] == [
        cell for cell in [*at_one, *later] for _ in arms
    ]
    assert not any(task.judge for task in tests)
    text = accuracy.table(Store(store.path), "digits")
    assert text.count("\n") == len(arms) + 1 and "(2)" in text


def test_the_study_of_two_image_sets_lends_each_the_other_as_public_data():
    found = {arm.name: arm for arm in accuracy.arms("mnist-cnn")}
    assert len(found) == 15
    assert {
        found[name].settings["public_data"] for name in ("dp-kfc-public", "adadps", "dp-ngd")
    } == {"@fashion-mnist-cnn:500"}
    assert "power_exponent" not in found["dp-kfc-public"].space and found["dp-kfc-oracle"].control
    assert (natural := found["dp-kfc-natural"]).settings["source"] == "dead-leaves"
    assert {"lr", "damping", "max_grad_norm"} == set(natural.space)


def test_random_directions_control_the_sides_and_the_read_out_of_the_method_they_stand_beside():
    arms = {arm.name: arm for arm in arms_for("mnist-cnn", ["dp-kfc-natural"])}
    assert "dp-kfc-random" not in arms
    own, twin = arms["dp-kfc-natural"], arms["dp-kfc-natural-random"]
    assert twin.control and twin.space == own.space and twin.method == own.method
    described = [Run.make("mnist-cnn", arm.method, arm.settings).config() for arm in (own, twin)]
    assert described[1].change(control="none") == described[0]
    assert [described[1].values[name] for name in ("control", "sides", "readout")] == [
        "random",
        "input",
        "natural",
    ]


def test_an_exponent_is_searched_where_the_probe_has_one():
    assert "power_exponent" in arm_of("digits", "dp-kfc-natural").space
    assert "power_exponent" not in arm_of("mnist-cnn", "dp-kfc-natural").space, (
        "dead leaves have none"
    )
    assert "zipf_exponent" in arm_of("imdb-logistic", "dp-kfc-natural").space
