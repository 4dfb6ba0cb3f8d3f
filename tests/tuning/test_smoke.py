"""`dpkfc reproduce TABLE --smoke`: every recipe of a table for a few steps, no number, and what
fails is named.
"""

import json
import re
from dataclasses import replace

import pytest

from dpkfc.cli import main
from dpkfc_papers import tables
from dpkfc_papers.tables import RAN, Cell, Published, load, names, run_small
from tests.tuning.rows import row_of
from tests.tuning.test_reproduce import table_of


def cell(row="DP-SGD", epsilon=1.0, **more):
    values = {
        "recipe": "digits",
        "method": "dp-sgd",
        "settings": {"epsilon": epsilon, "epochs": 9.0},
    }
    return Cell(
        row=row, column=f"ε = {epsilon:g}", published=Published.parse("90.0"), **{**values, **more}
    )


TABLE = table_of(
    cell(),
    cell(epsilon=8.0),
    cell("broken", method="dp-kfc", settings={"source": "tokens"}),
    cell("later", needs="a GPU"),
    cell("wrong", method="dp-ngd"),
    cell("none", not_run="no reason"),
)


@pytest.mark.slow
def test_each_run_is_tried_once_small_and_apart_and_what_fails_is_named(tmp_path):
    pytest.importorskip("sklearn")
    found = {one.row: one for one in run_small([TABLE], tmp_path)}
    assert len(found) == 5 and found["DP-SGD"].said == found["later"].said == RAN
    assert re.match("failed: .*tokens", found["broken"].said) and re.match(
        "failed: .*public_data", found["wrong"].said
    )
    assert found["none"].said == "no run: no reason" and [
        one.row for one in found.values() if one.failed
    ] == ["broken", "wrong"]
    rows = json.loads((tmp_path / "smoke" / "results.json").read_text())["rows"]
    assert len(rows) == 1 and all(
        row["steps"] <= 3 and row["run"]["settings"]["smoke"] for row in rows.values()
    )
    assert not list(tmp_path.glob("*.md")) and not (tmp_path / "results.json").exists()


def test_the_command_shows_no_number_and_ends_with_an_error_where_something_failed(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(
        tables, "load", lambda name: replace(TABLE, cells=(cell(), TABLE.cells[-1]))
    )

    def answer(source, place, **_):
        while (task := source.next(lambda run: True)) is not None:
            source.take_row(task, row_of(task.run, 0.4321), False)

    monkeypatch.setattr(tables, "drive", answer)
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "dp-kfc-1", "--smoke", "--out", str(tmp_path)])
    shown = capsys.readouterr()
    assert (
        ended.value.code == 0
        and "No number is meant" in shown.out
        and "43" not in shown.out
        and "90" not in shown.out
    )
    monkeypatch.setattr(tables, "load", lambda name: TABLE)
    monkeypatch.setattr(tables, "drive", lambda source, *_, **__: None)
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "dp-kfc-1", "--smoke", "--out", str(tmp_path), "--quiet"])
    assert ended.value.code == 1


def test_data_that_are_not_there_are_said_and_are_no_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("DPKFC_DATA", "")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    (one,) = run_small([table_of(cell(recipe="mnist-cnn"))], tmp_path)
    assert one.said.startswith("no data: MNIST") and not one.failed
    (two,) = run_small([table_of(cell(recipe="mnist-cnn"))], tmp_path, end=0.0)
    assert two.said == "not yet run"


@pytest.mark.parametrize("name", names())
def test_every_cell_has_a_smoke_run_or_says_why_not(name):
    for one in load(name).cells:
        run = tables._small(one)
        assert (
            one.not_run if run is None else not tables._find_mistake(run) and run.config().run.smoke
        )
