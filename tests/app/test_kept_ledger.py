"""A run folder whose ledger was cut, taken away or never fitted is no evidence: resume,
`ledger verify` and `audit` say so.
"""

import pytest

from dpkfc.app.folder_findings import ledger_finding
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.checkpoint import CheckpointError, read_ledger_state
from dpkfc.privacy.ledger import Ledger
from dpkfc.report.verify import verify_ledger
from tests.app.finished import SETTINGS, call


def cut(folder, lines):
    kept = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)[:lines]
    (folder / "ledger.jsonl").write_bytes(b"".join(kept))


def test_a_cut_ledger_does_not_pass_for_whole_beside_its_checkpoint(folder):
    (folder / "privacy_card.json").unlink()
    assert verify_ledger(folder / "ledger.jsonl")["releases"] == 3
    cut(folder, 2)
    for command in (("train", "--resume", folder, "--quiet"), ("ledger", "verify", folder)):
        result = call(*command)
        assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1
    assert "the checkpoint next to it was written after 3 with another head" in result.stderr


def test_a_ledger_of_another_plan_or_of_other_releases_fails(folder, tmp_path):
    plan = prepare(run_config(SETTINGS)).plan
    assert ledger_finding(folder / "ledger.jsonl", plan).passed
    other = prepare(run_config({**SETTINGS, "max_grad_norm": 2.0})).plan
    assert "another plan" in ledger_finding(folder / "ledger.jsonl", other).detail
    for name, certified, noise, releases, message in (
        ("noise", True, 2.0, 1, "another noise_multiplier"),
        ("many", True, 1.0, 4, "more releases than the plan's 3"),
        ("open", False, 1.0, 1, "certified: False"),
        ("none", True, 1.0, 0, ""),
    ):
        path = tmp_path / f"{name}.jsonl"
        with Ledger.open(path, plan.hash, {"certified": certified, "rng": "secure"}) as ledger:
            for step in range(releases):
                ledger.charge(
                    step, plan.event, noise * plan.noise_multiplier, plan.stddev, plan.sensitivity
                )
        found = ledger_finding(path, plan)
        assert found.passed is (not message) and message in found.detail
    assert not ledger_finding(tmp_path / "nowhere.jsonl", plan).passed


def test_a_run_in_test_mode_is_not_audited(folder):
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("test_mode = false", "test_mode = true"))
    result = call("audit", folder, "--quiet")
    assert (
        result.exit_code == 2
        and "NOT PRIVATE" in result.stderr
        and not (folder / "audit.json").exists()
    )


def test_what_a_checkpoint_remembers(folder, tmp_path):
    kept = read_ledger_state(folder / "checkpoint")
    assert kept is not None and kept[0] == 3
    assert read_ledger_state(tmp_path / "nowhere") is None
    (folder / "checkpoint").rename(folder / "checkpoint.old")  # a crash between two renames
    assert read_ledger_state(folder / "checkpoint") == kept
    manifest = folder / "checkpoint.old" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(kept[1], kept[1][::-1]))
    with pytest.raises(CheckpointError, match="its hash does not fit"):
        read_ledger_state(folder / "checkpoint")
