"""What a page reads: run folders and results files, and one clear line for each that cannot be
read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dpkfc.app.html import (
    assign_styles,
    command_of,
    comparable_panels,
    epsilon_text,
    group_runs,
    read_all,
    show,
)
from dpkfc.app.html.render import make_environment, write_page
from dpkfc.app.plots import Figures
from dpkfc.report.text import number, plain
from tests.report.page_cases import FIGURES, chart, plan, row, run_folder, study, tuning

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_folder_is_read_as_it_was_written(tmp_path: Path):
    (run,) = read_all([run_folder(tmp_path / "a", figures=FIGURES)]).runs
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
    assert run.warnings == [] and run.settings == {"lr": 0.1}
    assert run.figures is not None and run.figures.signal_to_noise[0].preconditioned == 2.0
    assert "/where/the/data" not in run.config and 'data_dir = ""' in run.config


def test_a_run_in_test_mode_is_marked(tmp_path: Path):
    (run,) = read_all([run_folder(tmp_path / "a", test_mode=True)]).runs
    assert run.warnings[0] == "NOT PRIVATE: test mode"


def test_a_card_that_is_not_certified_is_never_shown_as_certified(tmp_path: Path):
    path = run_folder(tmp_path / "a")
    card = json.loads((path / "privacy_card.json").read_text())
    card["guarantee"]["certified"] = "true"
    (path / "privacy_card.json").write_text(json.dumps(card))
    assert read_all([path]).runs[0].warnings == ["UNCERTIFIED"]


def test_a_folder_of_runs_is_opened_and_nothing_counts_twice(tmp_path: Path):
    run_folder(tmp_path / "a")
    run_folder(tmp_path / "b", "dp-sgd")
    study(tmp_path / "results.json", [row()])
    assert len(read_all([tmp_path, tmp_path / "a", tmp_path / "results.json"]).runs) == 3


def _damage(path: Path, how: str) -> None:
    card = path / "privacy_card.json"
    if how == "half-written":
        card.unlink()
    elif how == "torn card":
        card.write_text(card.read_text()[:100])
    elif how == "other format":
        card.write_text(json.dumps({**json.loads(card.read_text()), "format": 7}))
    elif how == "no epsilon":
        content = json.loads(card.read_text())
        content["guarantee"]["epsilon"] = "<b>1</b>"
        card.write_text(json.dumps(content))
    elif how == "torn settings":
        (path / "config.toml").write_text("[run\n")
    elif how == "torn metrics":
        (path / "metrics.parquet").write_bytes(b"PAR1")
    elif how == "other figures":
        (path / "figures.json").write_text('{"kind": "dpkfc figures", "version": 9}')
    elif how == "deep":
        card.write_text("[" * 200_000)
    elif how == "gone":
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("half-written", "has not ended; go on with dpkfc train --resume"),
        ("torn card", "is damaged"),
        ("other format", "is of format 7, this dpkfc reads 1"),
        ("no epsilon", "states no ε"),
        ("torn settings", "is damaged"),
        ("torn metrics", "metrics.parquet is damaged"),
        ("other figures", "is of version 9"),
        ("deep", "is damaged"),
        ("gone", "there is no such file"),
    ],
)
def test_a_broken_run_is_one_line_and_the_others_are_shown(tmp_path: Path, how: str, message: str):
    run_folder(tmp_path / "good")
    _damage(run_folder(tmp_path / "bad"), how)
    found = read_all([tmp_path / "good", tmp_path / "bad"])
    assert [run.source for run in found.runs] == [str(tmp_path / "good")]
    ((path, why),) = found.broken
    assert path == str(tmp_path / "bad") and message in why and "\n" not in why
    with pytest.raises(ValueError, match="nothing to report"):
        read_all([tmp_path / "bad"])


def test_where_nothing_can_be_shown_every_reason_is_told(tmp_path: Path):
    old, half = study(tmp_path / "v9.json", [row()], version=9), tmp_path / "half.json"
    half.write_text('{"kind": ')
    with pytest.raises(
        ValueError,
        match=r"^nothing to report: .*v9\.json: is of version 9.*; .*half\.json: .*damaged",
    ) as told:
        read_all([old, half])
    assert "\n" not in str(told.value)
    with pytest.raises(ValueError, match="; and 3 more$"):
        read_all([tmp_path / f"{number}.json" for number in range(15)])


def test_results_of_another_version_or_of_something_else_are_named(tmp_path: Path):
    study(tmp_path / "old.json", [row()], version=2)
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "list.json").write_text("[1]")
    study(tmp_path / "empty.json", [{"run": 3}, row(accuracy="x")])
    bad = [tmp_path / f"{name}.json" for name in ("old", "other", "list", "empty")]
    found = read_all([study(tmp_path / "good.json", [row()]), *bad])
    assert len(found.runs) == 1
    assert [why.split(" (")[0] for _, why in found.broken] == [
        "is of version 2, this dpkfc reads 1; use the version that wrote it",
        "is no results file of dpkfc",
        "is no results file of dpkfc",
        "none of its entries can be read",
    ]


def test_a_figure_of_reproduce_is_named_with_its_picture(tmp_path: Path):
    for name in ("kfc-fig1", "kfc-fig10"):
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"kind": "dpkfc figure", "version": 1, "name": name, "rows": []})
        )
    (tmp_path / "kfc-fig1-digits.png").write_bytes(b"")
    study(tmp_path / "good.json", [row()])
    reasons = [why.split(": ") for _, why in read_all([tmp_path]).broken]
    assert {what for what, _ in reasons} == {
        "is a figure of dpkfc reproduce, which has its own picture"
    }
    assert [where for _, where in reasons] == [
        "open kfc-fig1-digits.png",
        "there is no picture; dpkfc reproduce kfc-fig10 draws it",
    ]


def test_accuracy_over_settings_is_read_from_a_figure_and_from_the_folder_it_lies_in(
    tmp_path: Path,
):
    (one,) = read_all([chart(tmp_path / "kfc-fig10.json")]).charts
    assert one.notes == ["NOT PRIVATE: said", "Missing: a: no"] and [
        held.method for held in one.maps
    ] == ["dp-kfc", "dp-sgd"]
    assert one.maps[0].values == [[0.0, 1.0], [0.5, None]]
    found = read_all([tmp_path])
    assert len(found.charts) == 1 and not found.runs and not found.broken
    content = json.loads((tmp_path / "kfc-fig10.json").read_text())
    content["sensitivity_maps"][0]["values"] = [[1.0]]
    (tmp_path / "torn.json").write_text(json.dumps(content))
    (tmp_path / "old.json").write_text(json.dumps({**content, "version": 2}))
    reasons = [why for _, why in read_all([tmp_path]).broken]
    assert reasons == [
        "is of version 2, this dpkfc reads 1; use the version that wrote it",
        "torn.json is damaged; dpkfc reproduce torn writes it again",
    ]


def test_smoke_runs_share_neither_group_nor_panel_with_others(tmp_path: Path):
    small = run_folder(tmp_path / "small")
    text = (small / "config.toml").read_text()
    (small / "config.toml").write_text(text.replace("[optimizer]", "smoke = true\n[optimizer]"))
    rows = [
        row(),
        row(seed=1, run={**row()["run"], "settings": {**row()["run"]["settings"], "smoke": True}}),
    ]
    runs = read_all([small, run_folder(tmp_path / "real"), study(tmp_path / "s.json", rows)]).runs
    assert [run.smoke for run in runs] == [True, False, False, True]
    groups = group_runs(runs)
    assert len(groups) == len(comparable_panels(groups)) == 4
    tasks = {panel.task for panel in comparable_panels(groups)}
    assert tasks == {"digits", "digits (smoke run)", "mnist-cnn", "mnist-cnn (smoke run)"}


def test_pruned_trials_measurements_and_incomplete_rows_are_left_out_and_counted(tmp_path: Path):
    measured = {**row(), "accuracy": None}
    measured["run"] = {**measured["run"], "measure": "module:function"}
    rows = [row(), row(tag={"arm": "dp-kfc", "pruned": True}), measured, {"run": {}}]
    found = read_all([study(tmp_path / "s.json", rows)])
    assert len(found.runs) == 1 and len(found.notes) == 3


def test_tests_of_settings_that_a_search_has_left_behind_are_counted_and_not_shown(tmp_path: Path):
    def of(accuracy: float, lr: float, measured_on: str, **more: object) -> dict[str, object]:
        settings = {"params": {"lr": lr}} if measured_on == "validation" else {"tuned": {"lr": lr}}
        return row(
            accuracy=accuracy, measured_on=measured_on, tag={"arm": "dp-kfc", **settings}, **more
        )

    rows = [
        of(0.8, 0.1, "validation"),
        of(0.7, 0.2, "validation"),
        of(0.91, 0.1, "test"),
        of(0.5, 0.2, "test"),
    ]
    found = read_all([study(tmp_path / "s.json", rows)])
    assert [run.accuracy for run in found.runs] == [0.8, 0.7, 0.91]
    assert [note.split(": ")[1] for note in found.notes] == [
        "1 tests of settings that are no longer the best trial of their method are not shown"
    ]
    strange = [
        of(0.5, 0.2, "test", run={"recipe": ["x"]}),
        {**row(), "tag": {"arm": 3}},
        {**row(), "measured_on": None},
    ]
    assert len(read_all([study(tmp_path / "t.json", [*rows, *strange])]).runs) == 6


def test_the_results_that_are_shipped_hold_each_method_once_at_an_epsilon():
    path = ROOT / "papers" / "results" / "accuracy" / "cnn.json"
    runs = [run for run in read_all([path]).runs if run.measured_on == "test"]
    assert len({(run.task, run.method, run.target, run.seed) for run in runs}) == len(runs) > 200


def test_tuning_and_published_tables_become_sheets(tmp_path: Path):
    table = {
        "kind": "dpkfc table",
        "version": 1,
        "name": "dp-kfc-table-1",
        "title": "Table 1",
        "rule": "a rule",
        "cells": [],
    }
    table["cells"] = [
        {
            "row": "DP-SGD",
            "column": "ε = 1",
            "published": "91.7",
            "ours": "92.0 ± 0.1",
            "verdict": "better",
        }
    ]
    (tmp_path / "table.json").write_text(json.dumps(table))
    tuned, published = read_all([tuning(tmp_path / "tune.json"), tmp_path / "table.json"]).tables
    assert "NOT PRIVATE" in tuned.header[1] and tuned.rows[0][:2] == ("DP-KFC", "26.00 %")
    assert published.rows == [("DP-SGD", "ε = 1", "91.7", "92.0 ± 0.1", "better")]
    assert published.header[2:4] == ("published %", "ours %")
    (tmp_path / "times.json").write_text(json.dumps(table | {"unit": "×"}))
    assert read_all([tmp_path / "times.json"]).tables[0].header[2:4] == ("published ×", "ours ×")
    assert list(published.commands) == ["dpkfc reproduce dp-kfc-table-1"]


RESULTS = ROOT / "papers" / "results"


@pytest.mark.parametrize(
    "path",
    list(RESULTS.glob("accuracy/*.json")),
    ids=lambda path: path.name,
)
def test_stored_results_can_be_read(path: Path):
    found = read_all([path])
    assert found.runs and not found.broken


def test_the_page_does_not_say_that_runs_of_one_seed_differ(tmp_path: Path):
    path = study(tmp_path / "s.json", [row(seed=0, accuracy=a) for a in (0.8, 0.9)])
    write_page([path], tmp_path / "page.html")
    assert "equal but for the public seed" in (tmp_path / "page.html").read_text("utf-8")


def test_seeds_become_one_group_with_mean_and_deviation(tmp_path: Path):
    rows = [row(seed=s, accuracy=a) for s, a in enumerate((0.8, 0.9, 1.0))]
    rows += [
        row(epsilon=8.0),
        row(caveats=["NOT PRIVATE: looked"]),
        row("dp-sgd", measured_on="validation"),
    ]
    groups = group_runs(read_all([study(tmp_path / "s.json", rows)]).runs)
    assert [len(group.runs) for group in groups] == [3, 1, 1, 1]
    assert (
        groups[0].mean == pytest.approx(0.9)
        and groups[0].std == pytest.approx(0.1)
        and groups[1].std is None
    )
    assert [(panel.measured_on, len(panel.groups)) for panel in comparable_panels(groups)] == [
        ("test", 3),
        ("validation", 1),
    ]


def test_each_method_has_a_look_of_its_own_and_the_common_ones_a_fixed_one(tmp_path: Path):
    runs = read_all(
        [
            study(
                tmp_path / "s.json",
                [row(f"m{i}") for i in range(50)] + [row("dp-kfc"), row("dp-sgd")],
            )
        ]
    ).runs
    every = assign_styles(runs)
    assert len({(look.colour, look.symbol) for look in every.values()}) == 52
    alone = assign_styles([run for run in runs if run.method in {"dp-kfc", "m7"}])
    assert alone["dp-kfc"] == every["dp-kfc"]


def test_figures_come_back_as_they_were_written_and_long_spectra_keep_their_ranks(tmp_path: Path):
    from dpkfc.app.plots import LayerSpectra

    layer = LayerSpectra(
        name="long", values={"A": [float(i + 1) for i in range(1000)]}, sizes={"A": 1000}
    )
    path = Figures(spectra=[layer], sensitivity_maps=FIGURES.sensitivity_maps).write(
        tmp_path / "figures.json"
    )
    found = Figures.read(json.loads(path.read_text()))
    values = found.spectra[0].values["A"]
    assert (
        len(values) == 1000
        and values[0] == 1000.0
        and values[-1] == 1.0
        and path.stat().st_size < 10_000
    )
    assert all(abs(value - (1000 - rank)) <= 4 for rank, value in enumerate(values))
    assert list(found.sensitivity_maps) == list(FIGURES.sensitivity_maps)


def test_what_is_not_finite_is_left_out_of_figures(tmp_path: Path):
    from dpkfc.app.plots import LayerSignal, LayerSpectra

    nan, inf = float("nan"), float("inf")
    layer = LayerSpectra(name="a", values={"A": [1.0, nan, inf], "G": [nan]}, damping={"A": nan})
    figures = Figures(
        spectra=[layer], signal_to_noise=[LayerSignal(name="a", plain=nan, preconditioned=1.0)]
    )
    found = Figures.read(json.loads(figures.write(tmp_path / "figures.json").read_text()))
    assert (
        found.spectra[0].values == {"A": [1.0]}
        and not found.signal_to_noise
        and not found.spectra[0].damping
    )


@pytest.mark.parametrize(
    "content",
    [
        {"spectra": [{"name": "a", "values": {"A": ["x"]}}]},
        {"signal_to_noise": [{"name": "a", "plain": None}]},
        {"sensitivity_maps": [{"name": "a", "values": [[1.0], [1.0, 2.0]]}]},
        {"spectra": 3},
        {"spectra": [{"name": "a", "values": {"A": [1.0]}, "ranks": {"A": [10**9]}}]},
    ],
)
def test_damaged_figures_are_an_error(content: dict[str, object]):
    with pytest.raises(ValueError, match="is damaged"):
        Figures.read({"kind": "dpkfc figures", "version": 1, **content})


def test_text_stays_text():
    assert plain("a\nb\x1b[31m\u202ec") == "a b[31mc" and len(plain("x" * 10_000)) == 600
    environment = make_environment()
    page = environment.from_string("{{ text }}|{{ text | cut(4) }}").render(
        text="<a href='x'>&\"\x1b\u202e\n"
    )
    assert page == "&lt;a href=&#39;x&#39;&gt;&amp;&#34; |&lt;a …"
    content = {"a": "</script>&'"}
    data = environment.from_string("{{ content | tojson }}").render(content=content)
    assert not set("<>&'") & set(data) and json.loads(data) == content
    assert (
        show({"a_b": [1.23456, True, None, {"c": {"d": {"e": {"f": 1}}}}]})
        == "a b 1.235, yes, –, c d …"
    )
    assert (number(True), number("1"), number(float("nan")), number(10**400), number(2)) == (
        None,
        None,
        None,
        None,
        2.0,
    )
    assert (epsilon_text("inf"), epsilon_text(0.99951), epsilon_text("x")) == ("∞", "1.000", "–")


def test_a_command_quotes_what_it_is_given():
    assert (
        command_of({"recipe": "digits", "lr": 0.1, "verbose": False})
        == "dpkfc train --recipe digits --lr 0.1 --no-verbose"
    )
    assert (
        command_of({"recipe": "a; rm -rf ~", "lr": -1})
        == "dpkfc train --recipe 'a; rm -rf ~' --lr=-1"
    )
    assert (
        command_of({"recipe": "a\x03b"}) == ""
        and command_of({"a b": 1}) == ""
        and command_of({"a": [1]}) == ""
    )
