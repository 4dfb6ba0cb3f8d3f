"""The tables of docs/results.md: intervals, and rows that appear without further code."""

import json
import math

import pytest


@pytest.fixture
def features_table(study_module):
    return study_module("features_table")


@pytest.fixture
def task_pages(study_module):
    return study_module("task_pages")


def row(arm, *test, epsilon=1.0, best=0.9, data="mnist"):
    """A row as `papers/dpkfc_papers/studies/features.py` writes it."""
    return {
        "data": data,
        "arm": arm,
        "epsilon": epsilon,
        "rate": 0.25,
        "epochs": 15,
        "validation": [[0.25, 15, best], [0.5, 15, 0.1]],
        "test": test,
        "seconds a run": 5.6,
        "device": "NVIDIA H200",
    }


def write(folder, name, *rows):
    (folder / name).write_text(json.dumps({"rows": rows}), "utf-8")


def place(monkeypatch, module, folder):
    """Let the tables read their rows from a folder."""
    read = module.read_rows
    monkeypatch.setattr(module, "read_rows", lambda *files: read(*files, folder=folder))


def test_an_interval_is_that_of_student(study_module):
    from scipy.stats import t, tstd

    common, values = study_module("harness"), [97.0, 97.5, 98.0]
    half = t.ppf(0.975, 2) * tstd(values) / math.sqrt(3)
    assert common.half_interval(values) == pytest.approx(half)
    assert common.interval(values) == f"97.50\u00a0±\u00a0{half:.2f}"
    assert common.interval([97.0]) == "97.00" and common.interval([]) == "–"


def test_rows_of_both_files_are_shown_once(features_table, tmp_path, monkeypatch):
    write(tmp_path, "features.json", row("scattering, synthetic, dp-sgd", 0.9, 0.91))
    place(monkeypatch, features_table, tmp_path)
    assert (
        len(features_table.read_rows()) == 1
        and features_table.table("features_controls.json") == ""
    )
    twice = row("scattering, synthetic, dp-sgd", 0.1, 0.11)
    infinite = row("scattering, synthetic, without privacy", 0.99, 0.98, epsilon=math.inf)
    new = row("scattering, none, dp-sgd", 0.8, 0.82, data="other data")
    write(tmp_path, "features_controls.json", twice, infinite, new)
    found = features_table.read_rows()
    assert [one.data for one in found] == ["mnist", "mnist", "other data"]
    assert found[0].test == pytest.approx((90.0, 91.0))
    assert "| other data | 1 | scattering | one number for all |" in features_table.table(
        "features_controls.json"
    )
    head, _, *lines = features_table.matrix().splitlines()
    assert head.endswith("| MNIST | other data |") and len(lines) == 3


def test_a_task_shows_the_best_on_validation_the_networks_and_what_is_not_private(
    task_pages, features_table, tmp_path, monkeypatch
):
    arms = [
        row(f"scattering, {scales}, dp-sgd", test, test + 0.01, best=best)
        for scales, test, best in (
            ("synthetic", 0.90, 0.91),
            ("leaves", 0.91, 0.93),
            ("pink", 0.92, 0.92),
            ("white", 0.99, 0.80),
        )
    ]
    more = [
        row("network, tanh, dp-sgd", 0.7, 0.71),
        row("scattering, none, without privacy", 0.97, 0.98, epsilon=math.inf),
    ]
    write(tmp_path, "features.json", *arms, *more)
    place(monkeypatch, features_table, tmp_path)
    task = task_pages.Task("MNIST", ("mnist",))
    monkeypatch.setitem(task_pages.TASKS, "mnist", task)
    head, _, *lines = task_pages.task_table("mnist").splitlines()
    labels = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert head == "| test % | ε = 1 | ε = 2 | ε = 3 | ε = 8 | not private | seeds |"
    assert labels[:5] == [
        "scattering, scales: dead leaves",
        "scattering, scales: pink noise",
        "scattering",
        "CNN, large batches, tanh",
        "scattering, scales: one number for all",
    ]
    assert "ScatterNet, [Tramèr, Boneh 2021](https://arxiv.org/abs/2011.11660)" in labels[5]
    assert "| 98.7 | – | – | – |" in lines[5] and lines[0].endswith("| – | 2 |")
    assert task_pages.picture("mnist", tmp_path / "mnist.png")
    assert (tmp_path / "mnist.png").stat().st_size > 5000


def test_every_published_figure_belongs_to_a_task_and_has_a_source(task_pages):
    assert {one["task"] for one in task_pages.PUBLISHED["figure"]} <= set(task_pages.TASKS)
    for name in task_pages.TASKS:
        for line in task_pages.published_lines(name):
            assert line.cells and ", " in line.label
