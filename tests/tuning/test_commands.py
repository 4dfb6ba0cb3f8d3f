"""`dpkfc tune` and `dpkfc reproduce`: every mistake is one line."""

import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest

from dpkfc.app.tuning import tune
from dpkfc.cli import main
from dpkfc.terminal import INTERRUPTED
from dpkfc_papers.store import Store, winners_tests

ROOT = Path(__file__).resolve().parents[2]
SHIPPED, DOCUMENT = (
    ROOT / "papers" / "results" / "accuracy" / "cnn.json",
    ROOT / "docs" / "results" / "papers.md",
)


def called(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_tables_are_listed_with_what_can_be_run_here(capsys):
    code, out, _ = called(capsys, "reproduce", "--list")
    assert code == 0 and "dp-kfc-1" in out and "DP-NGD, Table 6" in out
    for name in (
        "disk-fig1",
        "disk-fig2",
        "disk-fig6",
        "disk-fig8",
        "dp-ngd-fig2",
        "dp-ngd-fig3",
        "dp-ngd-fig4",
        "throughput",
    ):
        assert f"│ {name} " in out
    text = " ".join(re.sub("[│ ]+", " ", out).split())
    assert (
        "0: read off a plot, no number is printed" in text and "0: taken on another machine" in text
    )


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("reproduce",), "which table"),
        (("reproduce", "dp-kfc-11"), "did you mean"),
        (("reproduce", "quux"), "known: disk-1, disk-3"),
        (("reproduce", "quux"), "dpkfc reproduce --list shows all"),
        (("reproduce", "dp-kfc-1", "--seeds", "0"), "seeds = 0"),
        (("reproduce", "dp-kfc-1", "--workers", "4000"), "one core"),
        (
            ("reproduce", "dp-kfc-1", "--budget=-1"),
            "--budget -1: give minutes, 0 (nothing is run) or more",
        ),
        (("reproduce", "dp-fedsofim", "--budget", "inf"), "leave it out for no bound"),
        (
            ("reproduce", "dp-kfc-1", "--column", "ε = 3"),
            "no column 'ε = 3'; it has: ε = 1 | ε = 2 | ε = 8",
        ),
        (("reproduce", "dp-kfc-1", "kfc-fig2", "--column", "ε = 1"), "leave out 'kfc-fig2'"),
        (("reproduce", "dp-fedsofim", "dp-kfc-1", "--results", "rows.json"), "a call of its own"),
        (
            ("tune", "--recipe", "digits", "--method", "dp-sgd", "--budget=-1"),
            "--budget -1: give minutes",
        ),
        (
            ("tune", "--recipe", "digits", "--method", "dp-sgd", "--stps", "3"),
            "did you mean '--steps'",
        ),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = called(capsys, *arguments)
    assert code == 2 and says in err and err.count("\n") == 1 and not out


def test_the_results_that_are_shipped_are_what_the_command_of_the_document_finds_done(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("DPKFC_DATA", "")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(ROOT)
    page = DOCUMENT.read_text("utf-8").replace("\\\n", " ")
    (command,) = re.findall(rf"dpkfc (reproduce .* --tuned papers/\S+/{SHIPPED.name}) ", page)
    held = SHIPPED.read_bytes()
    code, out, _ = called(
        capsys, *shlex.split(command), "--out", str(tmp_path), "--budget", "0", "--quiet"
    )
    arms = {"dp-sgd", "disk", "dp-adambc"}  # columns of the paper's table
    tests = [
        row
        for row in winners_tests(Store(SHIPPED))
        if row["tag"]["arm"] in arms and row["run"]["recipe"] == "mnist-cnn"
    ]
    values = {
        arm: [
            100 * x["accuracy"]
            for x in tests
            if x["tag"]["arm"] == arm and x["target_epsilon"] == 1
        ]
        for arm in arms
    }
    assert code == 0 and all(
        len(of) == 3 and f"{statistics.mean(of):.2f}" in out for of in values.values()
    )
    assert "ε = 2" not in out and "ε = 2" in (tmp_path / "dp-kfc-1.md").read_text("utf-8")
    assert held == SHIPPED.read_bytes()


def test_optuna_that_is_missing_is_one_line_with_the_fix(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = called(
        capsys, "tune", "--recipe", "digits", "--method", "dp-sgd", "--out", str(tmp_path / "study")
    )
    assert code == 2 and "pip install '.[tune]'" in err and err.count("\n") == 1


def test_an_interrupted_study_says_how_to_go_on(capsys, monkeypatch, tmp_path):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", interrupt)
    code, out, _ = called(
        capsys, "tune", "--recipe", "digits", "--method", "dp-sgd", "--out", str(tmp_path)
    )
    assert code == INTERRUPTED and "go on with the same command" in out
