"""Published tables: every number has a run or a reason, and verdicts follow the stated rule."""

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest

from dpkfc.app.recipes.catalogue import RECIPES, run_config
from dpkfc.app.tuning.runs import Run, StudyError
from dpkfc_papers import store as store_module
from dpkfc_papers import tables as published
from dpkfc_papers import tables as reproduce
from dpkfc_papers.store import Store
from dpkfc_papers.tables import (
    NOT_PRINTED,
    Cell,
    Published,
    Table,
    Tuning,
    load,
    markdown,
    names,
    outcomes,
    verdict,
)
from tests.app.files import write_cifar
from tests.tuning.rows import row_of

ROOT = Path(__file__).resolve().parents[2]
TINY = {"steps": 3, "expected_batch_size": 32, "accountant": "rdp"}


def table_of(*cells):
    return Table(name="made-up", title="made up", seeds=5, accounting="none", note="", cells=cells)


def cell(recipe="digits", method="dp-sgd", **more):
    values = {
        "row": method,
        "column": "ε = 3",
        "published": Published.parse("90.0 ± 0.2"),
        "settings": TINY,
    }
    return Cell(**{**values, "recipe": recipe, "method": method, **more})


@pytest.mark.parametrize("name", names())
def test_every_cell_has_a_run_or_a_reason(name):
    table = load(name)
    assert table.cells and table.accounting
    for one in table.cells:
        assert one.not_run or one.run({}, 0).config().run.recipe == one.recipe, (
            one.row,
            one.column,
        )


def test_a_point_that_is_not_printed_has_a_reason_and_no_verdict():
    cells = [
        (name, one)
        for name in names()
        for one in load(name).cells
        if one.published.text == NOT_PRINTED
    ]
    assert len(cells) > 10 and all(one.not_run for _, one in cells)
    assert {name for name, _ in cells} == {f"disk-fig{n}" for n in (1, 2, 6, 8)} | {
        f"dp-ngd-fig{n}" for n in (2, 3, 4)
    }
    bare = {"label": "DiSK", "values": {"all": NOT_PRINTED}, "method": "disk", "recipe": "digits"}
    with pytest.raises(StudyError, match="a point that is not printed needs a reason"):
        published._cell({}, {"label": "all ε"}, bare, "all")


@pytest.mark.parametrize(
    "name, row, column, text",
    [
        ("dp-kfc-1", "Synthetic DP-KFC + DP-AdamBC", "ε = 1", "95.5 ± 0.3"),
        (
            "dp-kfc-5",
            "StackOverflow (head on BERT; here on MiniLM), Pub. KFAC",
            "ε = 10",
            "98.3 ± 0.2",
        ),
        ("dp-kfc-7", "DP-KFC", "CIFAR-10", "59.1"),
        ("dp-ngd-2", "SVHN (WRN-16-4), DP-NGD (Ours)", "ε = 1", "84.65 ± 0.37"),
        ("dp-ngd-3", "Private DP-NGD (ε split 20/80)", "ε = 4", "64.50"),
        ("disk-1", "SST-2", "ε = 1, KF-DPLora", "92.9"),
        ("disk-4", "KF-DPAdamW, ε = 3", "BLEU, %", "68.35"),
        ("disk-6", "CIFAR-10 (CNN), DiSK", "ε = 2", "68.8"),
        ("dp-ngd-fig2", "CIFAR-10 (ε = 1), DP-NGD", "360 steps", "59.75"),
        ("dp-ngd-fig3", "DP-NGD", "50 images", "69.29"),
        (
            "throughput",
            "DP-KFC, NVIDIA A100",
            "examples a second of DP-SGD ÷ of DP-KFC",
            "2.2",
        ),
    ],
)
def test_numbers_stand_as_they_are_printed(name, row, column, text):
    assert [
        one.published.text for one in load(name).cells if (one.row, one.column) == (row, column)
    ] == [text]


def test_an_unknown_table_is_named_with_the_nearest():
    with pytest.raises(StudyError, match="did you mean 'dp-kfc-1'"):
        load("dpkfc-1")


def test_a_recipe_that_does_not_exist_yet_is_a_reason(monkeypatch):
    monkeypatch.setattr(
        published, "RECIPES", tuple(name for name in RECIPES if name != "mnist-cnn")
    )
    assert {one.not_run for one in load("dp-kfc-1").cells} == {"recipe missing: mnist-cnn"}


@pytest.mark.parametrize(
    "ours, says",
    [
        ([90.0, 90.1, 89.9], "reproduced"),
        ([89.75, 89.75, 89.75], "reproduced"),
        ([91.0, 91.1, 91.2], "better"),
        ([89.0, 89.1, 89.2], "not reproduced"),
        ([88.0, 92.0, 86.0], "reproduced"),
    ],
)
def test_verdicts_by_the_rule(ours, says):
    assert verdict(Published.parse("90.0 ± 0.2"), 5, ours) == says


def test_a_printed_number_without_a_deviation_takes_ours():
    assert verdict(Published.parse("90.0"), 1, [91.0, 93.0, 89.0]) == "reproduced"
    with pytest.raises(StudyError, match="not a printed number"):
        Published.parse("about 90")


def test_outcomes_take_what_was_tuned_and_runs_that_were_made_there(tmp_path):
    one = cell(tuned="dp-sgd")
    tuned = Store(tmp_path / "tuned.json")
    trial = Run.make(
        "digits", "dp-sgd", {**TINY, "lr": 0.3, "validation_size": 50}, evaluate_on="validation"
    )
    tag = {"arm": "dp-sgd", "params": {"lr": 0.3}, "pruned": False}
    tuned.put(trial, row_of(trial, 0.8, tag=tag))
    worse = Run.make(
        "digits", "dp-sgd", {**TINY, "lr": 0.4, "validation_size": 50}, evaluate_on="validation"
    )
    tuned.put(worse, row_of(worse, 0.9, tag={**tag, "params": {"lr": 0.4}, "pruned": True}))
    test = one.run({"lr": 0.3}, 0)
    tuned.put(test, row_of(test, 0.95))
    store = Store(tmp_path / "results.json")
    (found,) = outcomes(table_of(one), store, Tuning([tuned]), (0, 1))
    assert (
        found.values == [95.0]
        and found.verdict == "better"
        and found.settings == {"lr": 0.3}
        and found.sigma == 1.25
    )
    text = markdown(table_of(one), [found])
    assert "tuned: lr = 0.3" in text and "95.00 (1)" in text and "two standard errors" in text


def test_settings_are_taken_from_trials_of_the_same_protocol_and_budget(tmp_path):
    stores = []

    def tune_cell(accuracy, lr, **settings):
        store = Store(tmp_path / f"{len(stores)}.json")
        trial = Run.make(
            "digits",
            "dp-sgd",
            {**TINY, "lr": lr, "validation_size": 50, **settings},
            evaluate_on="validation",
        )
        store.put(
            trial,
            row_of(trial, accuracy, tag={"arm": "dp-sgd", "params": {"lr": lr}, "pruned": False}),
        )
        stores.append(store)

    tune_cell(0.8, 0.3)
    tune_cell(0.99, 9.9, expected_batch_size=64)
    one = cell(tuned="dp-sgd")
    assert Tuning(stores).settings(one) == {"lr": 0.3}
    tune_cell(0.97, 9.8, epsilon=8.0)
    assert Tuning(stores).settings(one) == {"lr": 0.3}
    # one budget alone: its settings serve at others
    assert Tuning(stores[1:]).settings(one) == {"lr": 9.8}
    tune_cell(0.98, 9.7, epsilon=7.0)
    with pytest.raises(
        StudyError, match="tuned at ε = 7, 8, and not at 3; give one study's results"
    ):
        Tuning(stores[1:]).settings(one)


def test_two_figures_of_one_run_are_not_mixed(tmp_path):
    run = cell().run({}, 0)
    stores = [Store(tmp_path / f"{n}.json") for n in range(2)]
    for store, accuracy in zip(stores, (0.9, 0.9), strict=True):
        store.put(run, row_of(run, accuracy))
    assert Tuning(stores).row(run)["accuracy"] == 0.9
    stores[1].put(run, row_of(run, 0.8))
    with pytest.raises(StudyError, match="differ in run"):
        Tuning(stores)


@pytest.mark.parametrize("name", ["dp-kfc-1", "dp-kfc-6"])
def test_runs_of_the_accuracy_study_are_those_of_the_table(name):
    from dpkfc.app.tuning.arms import Choice
    from dpkfc_papers.accuracy import PROTOCOL, arms

    found = {arm.name: arm for arm in arms("mnist-cnn")}
    for one in load(name).cells:
        arm = found[one.tuned.split()[0]]
        params = {
            key: of.values[0] if isinstance(of, Choice) else of.low for key, of in arm.space.items()
        }
        epsilon = one.settings["epsilon"]
        study = Run.make(
            "mnist-cnn",
            arm.method,
            {**PROTOCOL, **arm.settings, **params, "epsilon": epsilon},
            seed=2,
        )
        assert study.hash == one.run(params, 2).hash, one.row


def test_tables_are_run_seed_by_seed_resumed_and_written(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    cells = (
        cell(),
        cell(method="dp-adam"),
        cell(method="disk", not_run="no reason"),
        cell(method="doppler", needs="a GPU"),
    )
    monkeypatch.setattr(reproduce, "load", lambda name: table_of(*cells))
    seen = []

    def answer(source, place, **_):
        while (task := source.next(lambda run: True)) is not None:
            seen.append((task.run.method, task.run.seed))
            source.take_row(task, row_of(task.run, 0.9), False)

    monkeypatch.setattr(reproduce, "drive", answer)
    for _ in range(2):
        found = reproduce.reproduce(["made-up"], tmp_path, seeds=(0, 1))["made-up"]
    assert seen == [("dp-sgd", 0), ("dp-adam", 0), ("dp-sgd", 1), ("dp-adam", 1)]
    assert [one.verdict for one in found] == [
        "reproduced",
        "reproduced",
        "not run (no reason)",
        "not run (needs a GPU)",
    ]
    content = json.loads((tmp_path / "made-up.json").read_text())
    assert (
        content["cells"][0]["values"] == [90.0, 90.0]
        and "| dp-adam |" in (tmp_path / "made-up.md").read_text()
    )


def test_a_missing_data_set_is_said_once_and_stops_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "load", lambda name: table_of(cell(recipe="mnist-cnn")))
    monkeypatch.setenv("DPKFC_DATA", "")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    found = reproduce.reproduce(["made-up"], tmp_path)["made-up"]
    assert re.match(r"not run \(MNIST .*", found[0].verdict)


def test_what_runs_nothing_reads_no_data(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "load", lambda name: table_of(cell(recipe="mnist-cnn")))
    monkeypatch.setattr(store_module, "find_recipe", lambda name: pytest.fail("the data were read"))
    found = reproduce.reproduce(["made-up"], tmp_path, end=0.0)["made-up"]
    assert [one.verdict for one in found] == ["not run (not yet run)"]


def test_files_that_hold_a_part_of_a_set_give_no_verdict(tmp_path, monkeypatch):
    write_cifar(tmp_path / "cifar100")
    monkeypatch.setattr(reproduce, "load", lambda name: table_of(cell(recipe="cifar100-wrn")))
    found = reproduce.reproduce(["made-up"], tmp_path / "out", data_dir=str(tmp_path))["made-up"]
    assert found[0].verdict == (
        "not run (the files hold 12 of 50,000 training images, and the published number is of all)"
    )


def test_cells_that_take_more_than_a_few_cores_have_a_recipe_and_a_command():
    cells = [one for name in names() for one in load(name).cells if one.needs and not one.not_run]
    asked = {
        "cifar100-wrn",
        "cifar100-vit",
        "cifar100-crossvit",
        "svhn-wrn",
        "utkface-resnet20",
        "cifar10-wrn",
        "pathmnist-cnn",
    }
    chosen = ("accelerator", "at hand")
    assert {one.recipe for one in cells} == asked
    assert all(any(words in one.needs for words in chosen) for one in cells)
    for one in cells:
        words = shlex.split(one.command)
        given = dict(zip(words[2::2], words[3::2], strict=True))
        config = run_config(
            {name[2:].replace("-", "_"): _number(text) for name, text in given.items()}
        )
        wanted = one.run({}, 0).config()
        wanted = wanted.change(eval_on=config.run.eval_on)
        assert config.change(public_data=wanted.data.public_data) == wanted, one.command
    assert not any("recipe missing" in one.not_run for name in names() for one in load(name).cells)


def _number(text):
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def test_a_command_stands_where_settings_would_until_the_cell_is_run(tmp_path):
    slow = cell(needs="a GPU", settings={"lr": 0.5, "public_data": "@digits:20"})
    store = Store(tmp_path / "rows.json")
    text = markdown(table_of(slow), outcomes(table_of(slow), store, Tuning(), (0,)))
    assert "| `dpkfc train --recipe digits --method dp-sgd --lr 0.5 --public-data FILE` |" in text
    assert "`dpkfc reproduce made-up --everything` also runs" in text
    store.put(slow.run({}, 0), row_of(slow.run({}, 0), 0.9))
    assert "dpkfc train" not in markdown(
        table_of(slow), outcomes(table_of(slow), store, Tuning(), (0,))
    )
    plain = table_of(cell())
    assert "dpkfc" not in markdown(
        plain, outcomes(plain, Store(tmp_path / "none.json"), Tuning(), (0,))
    )


def test_a_failure_is_of_its_own_cell(tmp_path):
    one, other = cell(), cell(method="dp-adam", row="dp-sgd")
    store = Store(tmp_path / "results.json")
    found = outcomes(
        table_of(one, other), store, Tuning(), (0, 1), {one.run({}, 1).hash: "out of memory"}
    )
    assert [one.verdict for one in found] == ["not run (out of memory)", "not run (not yet run)"]


def test_one_column_is_run_and_the_report_is_of_the_whole_table(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    table = table_of(cell(), cell(column="ε = 8", settings={**TINY, "epsilon": 8.0}))
    monkeypatch.setattr(reproduce, "load", lambda name: table)
    monkeypatch.setattr(
        reproduce,
        "drive",
        lambda source, *_, **__: seen.extend(iter(lambda: source.next(bool), None)),
    )
    seen = []
    found = reproduce.reproduce(
        ["made-up"], tmp_path, columns=["ε = 8"], seeds=(0,), results=tmp_path / "rows.json"
    )
    assert [task.label for task in seen] == ["dp-sgd, ε = 8"] and len(found["made-up"]) == 2
    assert (tmp_path / "rows.json.lock").exists() and "ε = 3" in (
        tmp_path / "made-up.md"
    ).read_text("utf-8")
    with pytest.raises(StudyError, match=r"made-up has no column 'ε = 1'; it has: ε = 3 \| ε = 8"):
        table.select(["ε = 8", "ε = 1"])


def test_what_is_no_results_file_of_a_tuning_study_is_named(tmp_path):
    with pytest.raises(StudyError, match=r"nothing\.json"):
        reproduce.reproduce(["dp-kfc-1"], tmp_path, tuned=[tmp_path / "nothing.json"])


def test_every_cell_that_is_below_the_paper_stands_in_the_document(study_module):
    tables, pages = study_module("pages"), (ROOT / "docs" / "results").glob("papers*.md")
    shown = "\n".join(page.read_text("utf-8") for page in pages)
    below = [
        one
        for name in names()
        for one in tables._published(name)[1]
        if one.verdict == "not reproduced"
    ]
    assert len(below) > 10
    for one in below:
        assert (
            f"| {one.cell.row} | {one.cell.column} | {one.cell.published.text} | {one.ours} ("
            in shown
        )
