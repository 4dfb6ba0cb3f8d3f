"""What a page reads: run folders and studies, and one clear line for each that cannot be
read.
"""

import shutil

import pytest

from dpkfc.app.html.contents import Contents, list_departures, read_all
from dpkfc.app.html.groups import comparable_panels, group_runs
from dpkfc.app.html.page import build, make_environment
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.settings_file import flatten, to_toml
from dpkfc.app.toml import tomllib
from dpkfc.report.text import number, plain
from tests.report.page_cases import change_card, plan, run_folder, summary, tuning


def test_a_run_folder_is_read_as_it_was_written(tmp_path):
    (run,) = read_all([run_folder(tmp_path / "a")]).runs
    assert (run.task, run.method, run.accuracy, run.seed, run.steps, run.sigma) == (
        "digits",
        "dp-kfc",
        0.5,
        0,
        4,
        1.0,
    )
    assert (
        run.epsilon == pytest.approx(plan(1.0).epsilon(4))
        and run.delta == 1e-5
        and run.seconds == 2.5
    )
    assert run.curve == [(0.0, 0.0), (2.0, 0.25), (4.0, 0.5)] and len(run.spending) == 5
    assert run.warnings == [] and run.settings == {"lr": 0.25}
    assert "/where/the/data" not in run.config and 'data_dir = ""' in run.config


def test_releases_beside_the_steps_are_no_steps(tmp_path):
    path = run_folder(tmp_path / "a")
    extra = [{"purpose": "moments", "releases": 2}]
    change_card(path, guarantee={"releases": 6}, mechanism={"extra_releases": extra})
    assert read_all([path]).runs[0].steps == 4


def test_a_run_in_test_mode_is_marked(tmp_path):
    (run,) = read_all([run_folder(tmp_path / "a", test_mode=True)]).runs
    assert run.warnings[0] == "NOT PRIVATE: test mode"


def test_a_card_that_is_not_certified_is_never_shown_as_certified(tmp_path):
    path = run_folder(tmp_path / "a")
    change_card(path, guarantee={"certified": "true"})
    assert read_all([path]).runs[0].warnings == ["UNCERTIFIED"]


def write_card(content):
    return lambda path: (path / "privacy_card.json").write_text(content)


DAMAGE = {
    "half-written": (
        lambda path: (path / "privacy_card.json").unlink(),
        "has not ended; go on with dpkfc train --resume",
    ),
    "torn card": (write_card('{"format": 1, "gu'), "is damaged"),
    "other format": (
        lambda path: change_card(path, format=7),
        "is of format 7, this dpkfc reads 1",
    ),
    "no epsilon": (
        lambda path: change_card(path, guarantee={"epsilon": "<b>1</b>"}),
        "states no ε",
    ),
    "torn settings": (lambda path: (path / "config.toml").write_text("[run\n"), "is damaged"),
    "torn metrics": (
        lambda path: (path / "metrics.parquet").write_bytes(b"PAR1"),
        "metrics.parquet is damaged",
    ),
    "deep": (write_card("[" * 200_000), "is damaged"),
    "gone": (shutil.rmtree, "does not exist"),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_a_broken_run_is_one_line_and_the_others_are_shown(tmp_path, damage, message):
    run_folder(tmp_path / "good")
    damage(run_folder(tmp_path / "bad"))
    found = read_all([tmp_path / "good", tmp_path / "bad"])
    assert [run.source for run in found.runs] == [str(tmp_path / "good")]
    ((path, why),) = found.broken
    assert path == str(tmp_path / "bad") and message in why and "\n" not in why
    with pytest.raises(ValueError, match="nothing to report"):
        read_all([tmp_path / "bad"])


def test_a_folder_of_runs_is_opened_and_nothing_counts_twice(tmp_path):
    run_folder(tmp_path / "a")
    run_folder(tmp_path / "b", "dp-sgd")
    tuning(tmp_path / "tune.json")
    (tmp_path / "results.json").write_text("{}")
    found = read_all([tmp_path, tmp_path / "a", tmp_path / "tune.json"])
    assert (len(found.runs), len(found.studies), found.broken) == (2, 1, [])


def test_where_nothing_can_be_shown_every_reason_is_told(tmp_path):
    for name, text in (("half", '{"arms": '), ("old", '{"arms": [], "version": 9}'), ("x", "[1]")):
        (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(ValueError, match=r"^nothing to report: ") as told:
        read_all(sorted(tmp_path.glob("*.json")))
    message = str(told.value)
    assert "\n" not in message and "half.json is damaged" in message
    assert "old.json: is of version 9, this dpkfc reads 1" in message
    assert "x.json: is neither a run folder nor the tune.json" in message
    with pytest.raises(ValueError, match="; and 3 more$"):
        read_all([tmp_path / f"{number}.json" for number in range(15)])


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_a_tuning_study_is_shown_without_the_number_of_trials_where_it_is_secret(tmp_path, search):
    contents = read_all([tuning(tmp_path / "tune.json", search=search)])
    page = build(contents, "Report")
    assert "26.00" in page and "lr = 0.1" in page and "not private" in page
    is_shown = search == "tpe"
    assert ("13 (1 pruned" in page) == ("trial 13: why" in page) == is_shown
    assert ("All 13 runs" in page) == is_shown


def test_seeds_become_one_group_with_mean_and_deviation():
    runs = [summary(seed=s, accuracy=a) for s, a in enumerate((0.8, 0.9, 1.0))]
    runs += [
        summary(epsilon=8.0),
        summary(warnings=["NOT PRIVATE: looked"]),
        summary(settings={"lr": 0.3}),
        summary("dp-sgd", measured_on="validation"),
    ]
    groups = group_runs(runs)
    assert [len(group.runs) for group in groups] == [3, 1, 1, 1, 1]
    assert groups[0].mean == pytest.approx(0.9) and groups[0].std == pytest.approx(0.1)
    assert groups[1].std is None and groups[3].differs == "lr 0.3"
    panels = [(panel.measured_on, len(panel.groups)) for panel in comparable_panels(groups)]
    assert panels == [("test", 4), ("validation", 1)]
    assert "equal but for the public seed" in build(Contents(runs=runs), "Report")


@pytest.mark.parametrize("method", ["dp-sgd", "dp-kfc-a", "dp-adambc", "dp-ngd"])
def test_a_run_lists_what_its_recipe_and_method_do_not_say(method):
    public = {"public_data": "file"} if method == "dp-ngd" else {}

    def list_written(**settings):
        config = run_config({"recipe": "digits", "method": method, **public, **settings})
        written = flatten(tomllib.loads(to_toml(config)), "config.toml")
        return list_departures("digits", method, written)

    assert list_written() == public == {**list_written(smoke=True)}
    assert list_written(lr=0.3) == {"lr": 0.3, **public}


def test_settings_of_an_unknown_recipe_are_listed_as_they_are():
    assert list_departures("no-recipe", "dp-kfc", {"lr": 0.3}) == {"lr": 0.3}


def test_hidden_characters_of_a_text_are_left_out():
    assert plain("a\nb\x1b[31m\u202ec") == "a b[31mc"
    assert len(plain("x" * 10_000)) == 600
    assert (number(True), number("1"), number(float("nan")), number(10**400)) == (None,) * 4
    page = make_environment().from_string("{{ text }}|{{ text | cut(4) }}")
    text = page.render(text="<a href='x'>&\"\x1b\u202e\n")
    assert text == "&lt;a href=&#39;x&#39;&gt;&amp;&#34; |&lt;a …"
