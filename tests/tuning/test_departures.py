"""A report lists of a run what its recipe and method do not say, and equal runs of a folder and of
a study are one group.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dpkfc.app.html import group_runs, read_all
from dpkfc.app.html.render import build
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.settings import flatten, to_toml, tomllib
from dpkfc.app.tuning.runs import Run, departures
from tests.report.page_cases import row, run_folder, study


def list_departures(recipe, method, written, **settings):
    """Of a run folder whose config.toml holds every setting, or of the settings as they stand."""
    given = {"recipe": recipe, "method": method, **settings}
    full = (
        flatten(tomllib.loads(to_toml(run_config(given))), "config.toml") if written else settings
    )
    return departures({"recipe": recipe, "method": method, "settings": full})


@pytest.mark.parametrize("method", ["dp-sgd", "dp-kfc", "dp-kfc-a", "dp-adambc", "disk", "dp-ngd"])
def test_a_run_of_the_defaults_departs_in_nothing(method):
    public = {"public_data": "file"} if method == "dp-ngd" else {}
    assert list_departures("digits", method, True, **public) == public
    assert list_departures("digits", method, True, smoke=True, **public) == public


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.3}, {"optimizer": "sgd"}, {"damping": 1, "every": 3}, {"lr": 0.3, "smoke": True}],
)
def test_what_a_folder_and_a_study_tell_of_equal_runs_is_equal(settings):
    assert (
        list_departures("mnist-cnn", "dp-kfc", True, **settings)
        == list_departures("mnist-cnn", "dp-kfc", False, **settings)
        != {}
    )


def test_what_cannot_be_resolved_is_left_as_it_stands():
    for recipe, settings in (
        ("no-recipe", {"lr": 0.3}),
        ("digits", {"lr": "fast"}),
        ("digits", {"sampler": 3}),
    ):
        assert list_departures(recipe, "dp-kfc", False, **settings) == settings
    assert list_departures("digits", "dp-kfc", False, epochs=20, unknown=7) == {"unknown": 7}


def stored(accuracy, settings, **more):
    run = Run.of("digits", "dp-kfc", settings)
    return row(
        accuracy=accuracy,
        run=run.describe(),
        **{"hash": run.hash, "steps": 4, "target_epsilon": None, **more},
    )


def as_written(folder: Path, **settings) -> Path:
    """A run folder with the settings that `dpkfc train` writes."""
    config = run_config({"recipe": "digits", "method": "dp-kfc", **settings})
    (folder / "config.toml").write_text(to_toml(config), "utf-8")
    return folder


def test_equal_runs_of_both_kinds_are_one_group_and_no_defaults_are_listed(tmp_path: Path):
    folders = [
        as_written(run_folder(tmp_path / "a"), lr=0.3),
        as_written(run_folder(tmp_path / "b"), lr=0.1),
    ]
    rows = [
        stored(0.7, {"lr": 0.3}),
        stored(0.6, {"lr": 0.3}, hash="made by other defaults", steps=5),
    ]
    contents = read_all([*folders, study(tmp_path / "s.json", rows)], departures)
    found = group_runs(contents.runs)
    assert [len(group.runs) for group in found] == [2, 1, 1]
    assert found[0].mean == pytest.approx(0.6) and {bool(run.card) for run in found[0].runs} == {
        True,
        False,
    }
    usual = run_config({"recipe": "digits", "method": "dp-kfc"}).lr
    assert found[0].differs == "lr 0.3" and found[1].differs == ("" if usual == 0.1 else "lr 0.1")
    assert "certified, or stated without a card" in build(contents, "", "Report")
    apart = group_runs(read_all(folders).runs)[0].runs[0].settings
    assert len(apart) > 40 > 2 > len(found[0].first.settings)


def test_rows_made_with_other_defaults_are_not_filled_in():
    run = Run.of("digits", "dp-kfc", {"epochs": 20.0})
    known = dataclasses.asdict(run) | {"settings": {"epochs": 20.0}}
    assert departures({**known, "hash": run.hash}) == {}
    assert departures({**known, "hash": "0" * 16}) == {"epochs": 20.0}
