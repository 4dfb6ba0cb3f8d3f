"""`dpkfc tune` and `dpkfc reproduce`: every mistake is one line."""

from __future__ import annotations

import sys

import pytest

from dpkfc.cli import app
from dpkfc.studies import commands, tune
from dpkfc.studies.commands import _settings
from dpkfc.studies.errors import StudyError


def called(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_tables_are_listed_with_what_can_be_run_here(capsys):
    code, out, _ = called(capsys, "reproduce", "--list")
    assert code == 0 and "dp-kfc-1" in out and "DP-NGD, Table 6" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("reproduce",), "which table"),
        (("reproduce", "dp-kfc-11"), "did you mean"),
        (("reproduce", "dp-kfc-1", "--seeds", "0"), "seeds = 0"),
        (("reproduce", "dp-kfc-1", "--workers", "4000"), "one core"),
        (("tune", "--recipe", "digits", "--method", "dp-kfk"), "did you mean 'dp-kfc'"),
        (("tune", "--recipe", "digit", "--method", "dp-sgd"), "unknown recipe"),
        (("tune", "--recipe", "digits", "--method", "dp-sgd", "--set", "steps"), "KEY=VALUE"),
        (("tune", "--recipe", "digits", "--method", "dp-sgd", "--set", "stps=3"), "did you mean 'steps'"),
        (("tune", "--recipe", "digits", "--method", "dp-sgd", "--search", "grid"), "tpe | random"),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = called(capsys, *arguments)
    assert code == 2 and says in err and err.count("\n") == 1 and not out


def test_optuna_that_is_missing_is_one_line_with_the_fix(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = called(capsys, "tune", "--recipe", "digits", "--method", "dp-sgd", "--out", str(tmp_path / "study"))
    assert code == 2 and "pip install 'dpkfc[tune]'" in err and err.count("\n") == 1


def test_an_interrupted_study_says_how_to_go_on(capsys, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", interrupted)
    code, out, _ = called(capsys, "tune", "--recipe", "digits", "--method", "dp-sgd", "--out", str(tmp_path))
    assert code == commands.INTERRUPTED and "go on with the same command" in out


def test_settings_are_read_as_what_they_are():
    found = _settings(["steps=3", "lr=0.5", "expected-batch-size=64", "uncertified=false", "source=white"])
    assert found == {"steps": 3, "lr": 0.5, "expected_batch_size": 64, "uncertified": False, "source": "white"}
    with pytest.raises(StudyError, match="KEY=VALUE"):
        _settings(["steps"])
