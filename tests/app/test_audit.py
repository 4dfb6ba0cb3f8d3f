"""`dpkfc audit`: a run folder is audited with its own settings, the verdict goes into its card,
mistakes are one line.
"""

import json

import pytest

from dpkfc.app import audit_folder as audits
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import run
from dpkfc.audit.findings import Finding
from dpkfc.audit.one_run import COPY, RELEASED
from dpkfc_verify.run import HOLDS, verify_run
from tests.app.finished import flags, read_card
from tests.audit.quick import make_statistics_quick
from tests.audit.sizes import size
from tests.command_line import call

SETTINGS = {
    "recipe": "digits",
    "method": "dp-kfc",
    "epsilon": 3.0,
    "steps": 3,
    "expected_batch_size": 48,
    "accountant": "rdp",
    "probe_size": 16,
    "every": 10,
}


@pytest.mark.slow
def test_a_run_folder_is_audited_and_its_card_says_so(tmp_path, monkeypatch, evidence):
    folder = run(run_config({**SETTINGS, "out": str(tmp_path / "run")})).folder
    if size(True, False):  # few canaries: the whole list is run by the full size
        monkeypatch.setattr("dpkfc.audit.step_canaries.LAYERS", 2)
        monkeypatch.setattr("dpkfc.audit.replay.SIZES", (1,))
        make_statistics_quick(monkeypatch)
    arguments = [
        "audit",
        str(folder),
        "--kind",
        "step",
        "--kind",
        "membership",
        "--runs",
        str(size(12, 1500)),
        "--quiet",
    ]
    result = call(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "held" in result.output and "FAILED" not in result.output
    card = read_card(folder)
    assert card["audit"]["passed"] and card["audit"]["step"]["plan_hash"] == card["plan_hash"]
    hidden = card["not_private"]
    assert {"audit.json", "audit: step", "audit: membership"} <= set(
        hidden
    ) and "without noise" in hidden["audit: membership"]
    text = (folder / "privacy_card.md").read_text()
    assert "audit: membership" in text
    assert (
        "## Audit" in text
        and "sensitivity" in text
        and "Every check held" in text
        and "membership" in text
    )
    assert json.loads((folder / "audit.json").read_text())["step"]["canaries"] >= 20
    evidence(
        "audit",
        "dpkfc audit, digits, DP-KFC",
        checks=len(card["audit"]["step"]["findings"]),
        passed=True,
        seconds=card["audit"]["step"]["seconds"],
    )


def test_a_check_that_fails_fails_the_command_and_stays_on_the_card(tmp_path, monkeypatch):
    folder = run(run_config({**SETTINGS, "out": str(tmp_path / "run")})).folder
    wrong = Finding(
        check="sensitivity", measured="2 × sensitivity", bound="at most 1", passed=False
    )
    found = audits.Audit(findings=(wrong,), plan_hash="x", canaries=1, seconds=1.0, date="today")
    monkeypatch.setattr(audits, "audit_step", lambda *_, **__: found)
    result = call("audit", str(folder), "--quiet")
    assert (
        result.exit_code == 2
        and "the audit FAILED" in result.stderr
        and len(result.stderr.strip().splitlines()) == 1
    )
    assert "FAILED: sensitivity" in (folder / "privacy_card.md").read_text()


@pytest.mark.parametrize("is_harmful", [False, True])
def test_canaries_train_along_unless_they_would_harm_the_model(is_harmful, tmp_path, monkeypatch):
    if is_harmful:
        monkeypatch.setattr("dpkfc.audit.one_run.HARM", 0.0)
    folder, settings = tmp_path / "run", {**SETTINGS, "method": "dp-sgd", "audit": 60}
    done = call("train", *flags(settings), "--out", folder, "--quiet")
    assert done.exit_code == 0 and "audit: ε >= " in done.stdout, done.output
    found = json.loads((folder / "audit.json").read_text())["one_run"]
    header = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])
    assert found["passed"] and found["canaries"] == 60
    assert found["where"] == (COPY if is_harmful else RELEASED)
    assert header["dataset_size"] == 1437 + (0 if is_harmful else 60)
    card = read_card(folder)
    assert card["audit"]["passed"] and ("audit: one_run" in card["not_private"]) is is_harmful
    assert verify_run(folder).verdict == HOLDS
    if not is_harmful:
        again = call("train", "--resume", folder, "--quiet")
        assert again.exit_code == 2 and "cannot be continued; train anew" in again.stderr


def test_canaries_of_a_run_that_ends_early_are_judged_by_its_releases(tmp_path):
    early = {"stop_on": "private-loss", "patience": 1, "validation_size": 60, "lr": 1e-9}
    given = {"method": "dp-sgd", "audit": 200, "steps": 60, "evaluate_every": 5, **early}
    found = run(run_config({**SETTINGS, **given, "out": str(tmp_path / "run")})).audit
    assert found is not None and found.steps < 60 and found.passed


def test_canaries_are_refused_where_they_make_noise_correlated(tmp_path):
    given = {"method": "dp-sgd", "audit": 60, "steps": 9, "expected_batch_size": 720}
    given |= {"noise": "auto", "epsilon": 8.0, "accountant": "pld"}
    with pytest.raises(ConfigError, match="bands=2 correlates it"):
        run(run_config({**SETTINGS, **given, "out": str(tmp_path / "run")}))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "nowhere"),
        (
            ["--recipe", "digits", "--kind", "magic"],
            "unknown audit 'magic'; choose from step, one-run, membership",
        ),
        (["--recipe", "digits", "--kind", "membership"], "give the run folder of a finished run"),
        (["nowhere", "--epsilon", "3"], "leave out every other setting"),
        (
            ["--recipe", "digits", "--runs", "-5"],
            "needs 10 releases of each world or more (--runs), got -5",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    result = call("audit", *arguments, "--quiet")
    assert (
        result.exit_code == 2
        and message in result.stderr
        and len(result.stderr.strip().splitlines()) == 1
    )
