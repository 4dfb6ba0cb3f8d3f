"""The command line: what it prints, and one line on stderr with exit code 2 for every mistake."""

import io
import re
import runpy

import pytest
from rich.cells import cell_len
from rich.console import Console

from dpkfc.app import results, train
from dpkfc.app.picture_data import Curve
from dpkfc.app.run_config import SETTINGS
from dpkfc.cli import main
from tests.app.accounting import remember_accounting
from tests.command_line import call

QUICK = [
    "--steps",
    "4",
    "--expected-batch-size",
    "24",
    "--accountant",
    "rdp",
    "--epsilon",
    "0.5",
    "--probe-size",
    "8",
]


@pytest.fixture(autouse=True, scope="module")
def _remembered_accounting(blank_figures):
    with remember_accounting():
        yield


def _refused(*arguments):
    """The one line on stderr of a call that must fail."""
    result = call(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("dpkfc: "), result.stderr
    assert "Traceback" not in result.output
    return lines[0]


def test_a_number_of_thousands_of_digits_is_shortened_in_its_message():
    message = _refused("calibrate", "--epsilon", "1", "--dataset-size", "1" * 5000)
    assert "--dataset-size" in message and len(message) <= 160
    assert "threads must be at most 1024" in _refused(
        "train", "--recipe", "digits", "--threads", str(2**62)
    )
    tune = ("tune", "--recipe", "digits", "--method", "dp-sgd", "--out", "out")
    assert "a method takes at most" in _refused(*tune, "--trials", "1" * 400)
    assert "choose 1 to" in _refused(*tune, "--workers", "1" * 400)
    assert "validation_size must be an integer" in _refused(*tune, "--validation-size", "1e999")


def test_help_says_what_an_argument_is():
    assert "A ledger.jsonl, or a run folder." in call("ledger", "verify", "--help").output


def test_help_names_every_command():
    text = call("--help").output
    for command in ("train", "demo", "calibrate", "epsilon", "doctor", "ledger"):
        assert command in text


@pytest.mark.parametrize("command", ["train", "doctor", "audit", "demo", "settings"])
def test_help_fits_a_screen_and_has_an_example(command):
    narrow = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    text = call(command, "--help", env=narrow).output
    assert len(text.splitlines()) <= (45 if command == "train" else 55)
    assert f"\ndpkfc {command}" in text


def test_every_setting_is_a_flag():
    text = call("settings").output
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", text))
    wanted = {"--" + f.name.replace("_", "-") for f in SETTINGS.values()}
    assert wanted <= flags


def test_an_error_that_nobody_expected_repeats_no_value(monkeypatch, capsys):
    def fail(words):
        raise KeyError("Mrs Miller")

    monkeypatch.delenv("DPKFC_DEBUG", raising=False)
    monkeypatch.setattr("dpkfc.cli.app", fail)
    with pytest.raises(SystemExit):
        main(["recipes"])
    assert capsys.readouterr().err.startswith("dpkfc: KeyError (line ")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "--recipe", "digits", "--epsilom", "3"], "did you mean '--epsilon'?"),
        (["train", "--recipe", "digts"], "did you mean 'digits'"),
        (["train"], "which recipe"),
        (["train", "--recipe", "digits", "--epsilon", "-1"], "epsilon must be above 0, got -1"),
        (["train", "--recipe", "digits", "--config", "none.toml"], "none.toml: does not exist"),
        (["train", "--recipe", "digits", "--resume", "x"], "leave out every other setting"),
        (["train", "--resume", "no-such-folder"], "no-such-folder does not exist"),
        (["predict", "gone", "--data", "x.csv"], "gone does not exist"),
        (["schema", "gone.csv"], "gone.csv: does not exist"),
        (["train", "--data", ".", "--label-file", "gone.csv"], "gone.csv: does not exist"),
        (["doctor", "runs/gone"], "runs/gone does not exist"),
        (["train", "--recipe", "mnist-cnn", "--data-dir", "no-such-folder"], "is not a folder"),
        (
            ["calibrate", "-e", "0", "-n", "100", "-b", "10", "--epochs", "1"],
            "epsilon must be positive",
        ),
        (
            ["calibrate", "-e", "1", "-n", "10", "-b", "100", "--epochs", "1"],
            "more than dataset_size = 10",
        ),
        (
            ["epsilon", "-s", "1", "--steps", "3"],
            "--dataset-size and --batch-size, or --sample-rate",
        ),
        (["epsilon", "-s", "1", "-q", "0.1"], "exactly one of epochs and steps"),
        (
            ["epsilon", "-s", "1", "-q", "0.1", "-n", "100", "-b", "50", "--epochs", "3"],
            "--dataset-size and --batch-size only",
        ),
        (["epsilon", "-s", "1", "-q", "2", "--steps", "3"], "sample_rate"),
        (
            ["epsilon", "-s", "1", "-q", "0.1", "--steps", "3", "--sampler", "fixed"],
            "for --sampler fixed give",
        ),
        (["doctor", "no_such_module:f"], "cannot be imported"),
        (
            ["ledger", "verify", "none.jsonl"],
            "the ledger none.jsonl does not exist; give a run folder or its ledger.jsonl",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, arguments, what):
    monkeypatch.chdir(tmp_path)
    assert what in _refused(*arguments)
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "runs"])


def test_calibrate_and_epsilon_agree():
    text = call("calibrate", "-e", "0.5", "-n", "1000", "-b", "100", "--epochs", "2").output
    assert re.search(r"protected unit +│ one example", text)
    sigma = re.search(r"σ *│ ([\d.]+)", text).group(1)
    back = call("epsilon", "-s", sigma, "-n", "1000", "-b", "100", "--epochs", "2").output
    by_rate = call("epsilon", "-s", sigma, "-q", "0.1", "--steps", "20").output
    for output in (text, back, by_rate):
        pld, rdp = (
            float(re.search(rf"{name} *│ ([\d.]+)", output).group(1)) for name in ("PLD", "RDP")
        )
        assert pld == pytest.approx(0.5, abs=2e-3) and rdp >= pld
        assert "add_or_remove_one" in output


def test_fixed_size_sampling_has_no_pld():
    text = call(
        "epsilon", "-s", "4", "-n", "100", "-b", "10", "--steps", "2", "--sampler", "fixed"
    ).output
    assert "does not apply" in text and "replace_one" in text


def _result(folder, **changed):
    values = {
        "folder": folder,
        "accuracy": 0.5,
        "measured_on": "test",
        "epsilon": 0.1,
        "steps": 3,
        "seconds": 1.0,
        "interrupted": False,
        "curve": Curve(label="DP-KFC on digits", steps=[0], accuracy=[0.5]),
    }
    return results.Result(**{**values, **changed})


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Collect the settings of runs instead of making them."""
    found = []
    monkeypatch.setattr(
        train, "run", lambda config, console, **_: found.append(config) or _result(tmp_path)
    )
    return found


def test_an_interrupted_run_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(
        train, "run", lambda config, console, **_: _result(tmp_path, interrupted=True)
    )
    result = call("train", "--recipe", "digits")
    assert result.exit_code == 130
    assert f"continue with: dpkfc train --resume {tmp_path}" in result.stderr


def test_flags_beat_the_file_and_the_file_beats_the_recipe(tmp_path, seen):
    (tmp_path / "my.toml").write_text("recipe = 'digits'\nlr = 0.25\nepsilon = 5\n")
    result = call("train", "--config", str(tmp_path / "my.toml"), "--epsilon", "7", "--uncertified")
    assert result.exit_code == 0, (result.output, result.exception)
    assert (seen[0].optimizer.lr, seen[0].privacy.epsilon, seen[0].privacy.uncertified) == (
        0.25,
        7.0,
        True,
    )


def test_an_unexpected_error_is_one_line_unless_debugging(monkeypatch):
    def broken(config, console, **_):
        raise KeyError("inside")

    monkeypatch.setattr(train, "run", broken)
    assert "KeyError" in _refused("train", "--recipe", "digits")
    monkeypatch.setenv("DPKFC_DEBUG", "1")
    assert isinstance(call("train", "--recipe", "digits").exception, KeyError)


@pytest.mark.slow
def test_the_demo_ends_with_a_table(tmp_path):
    result = call("demo", *QUICK, "--out", str(tmp_path / "demo"), "--quiet")
    assert result.exit_code == 0, (result.output, result.exception)
    for part in ("DP-SGD", "DP-KFC", "accuracy", "ε spent", "steps", "seconds", "demo"):
        assert part in result.output
    assert (tmp_path / "demo" / "comparison.png").is_file()


def test_a_delta_that_is_too_large_is_warned_of_in_one_line():
    words = ("epsilon", "-s", "4", "-n", "1000", "-b", "100", "--epochs", "1", "-d", "0.01")
    assert "is not below 1 / N" in _refused(*words)
    result = call(*words, "--uncertified")
    assert result.exit_code == 0
    assert (
        "delta = 0.01 is not below 1 / N" in result.stderr
        and len(result.stderr.strip().splitlines()) == 1
    )


def test_names_of_other_libraries_lead_to_ours(tmp_path):
    (tmp_path / "run.toml").write_text("learning_rate = 0.1\n")
    for words in (
        ("train", "--learning-rate", "0.1"),
        ("train", "--config", str(tmp_path / "run.toml")),
    ):
        assert re.search("did you mean '(--)?lr'", _refused(*words))


def test_python_m_is_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dpkfc", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("dpkfc", run_name="__main__")
    assert end.value.code == 0 and "calibrate" in capsys.readouterr().out


def test_epsilon_and_a_noise_multiplier_are_not_both_taken(tmp_path, seen):
    both = ("--recipe", "digits", "--epsilon", "2", "--noise-multiplier", "0.5")
    for command in ("train", "audit", "demo"):
        assert "leave one out" in _refused(command, *(both[2:] if command == "demo" else both))
    given = ("--noise-multiplier", "0.5", "--epsilon", "2", "--out", str(tmp_path / "tuned"))
    assert "leave one out" in _refused("tune", "--recipe", "digits", "--method", "dp-sgd", *given)
    (tmp_path / "my.toml").write_text("recipe = 'digits'\nnoise_multiplier = 0.5\n")
    for flags, noise in (((), 0.5), (("--epsilon", "2"), 0.0), (("--noise-multiplier", "3"), 3.0)):
        call("train", "--config", str(tmp_path / "my.toml"), *flags)
        assert seen.pop().privacy.noise_multiplier == noise


def test_settings_are_printed_as_a_file_that_train_takes(tmp_path, seen):
    arguments = ("--recipe", "mnist-cnn", "--method", "disk", "--epsilon", "2")
    printed = call("settings", *arguments)
    assert printed.exit_code == 0 and "epsilon = 2.0" in printed.output
    (tmp_path / "all.toml").write_text(printed.output)
    for given in (arguments, ("--config", str(tmp_path / "all.toml"))):
        assert call("train", *given).exit_code == 0
    assert seen[0] == seen[1]


def test_the_doctor_looks_at_recipes_and_factories(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))\n"
        "def mixing():\n    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = call("doctor", "digits", "--probe-size", "16")
    assert (
        recipe.exit_code == 0
        and "rank-one" in recipe.output
        and "not covered: nothing" in recipe.output
    )
    mine = call("doctor", "my_models:net", "--input-shape", "3,2,2", "--probe-size", "16")
    assert mine.exit_code == 0 and "A 13" in mine.output, (mine.output, mine.exception)
    assert "mixes the examples" in _refused("doctor", "my_models:mixing", "--input-shape", "4")
    assert "--input-shape 3,32,32" in _refused("doctor", "my_models:net")


def test_a_method_takes_one_line_of_80_columns_and_its_sheet_says_the_rest():
    from dpkfc.app.commands.methods import methods_table
    from dpkfc.app.methods import METHODS

    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(methods_table())
    lines = console.file.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= 80 and len(lines) == len(METHODS) + 2
    assert "one pass over the probe a refresh" in "\n".join(lines)
    sheet = call("methods", "gep").output
    assert "extra privacy cost" in sheet and METHODS["gep"].source[:20] in sheet


def test_the_list_of_recipes_gives_a_regression_no_classes():
    lines = call("recipes").stdout.splitlines()
    (line,) = (line for line in lines if "linear-regression" in line)
    assert [cell.strip() for cell in line.split("│")][4] == "–"


def test_the_name_of_a_file_is_printed_as_it_is(tmp_path):
    table, out = tmp_path / "table.csv", tmp_path / "[bold]schema[1].toml"
    table.write_text("age,died\n", "utf-8")
    assert str(out) in call("schema", table, "--target", "died", "--out", out).stdout
