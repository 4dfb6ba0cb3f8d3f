"""Runs of the command line on the same people: their budget, their total, and whose weights lie in
a folder.
"""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from dpkfc.config import PrivacyConfig
from dpkfc.federated import FederatedConfig, LocalGradient
from dpkfc.privacy import Budget
from dpkfc.privacy.ledger import Ledger, verify
from dpkfc.report.text import round_up
from dpkfc.report.total import describe_total, total_of_ledgers
from dpkfc.report.verify import verify_ledger
from dpkfc_verify.run import add_up, verify_run
from tests.app.finished import call, read_card, refuse

RUN = ("train", "--recipe", "digits", "--method", "dp-sgd", "--steps", "3", "--quiet")
RUN += ("--expected-batch-size", "48", "--accountant", "rdp", "--epsilon", "2")


def start_run(path, noise=2.0, steps=3, delta=1e-4, **how):
    """A ledger of a plan with two releases."""
    plan = PrivacyConfig(expected_batch_size=10, steps=steps, **how).with_noise(noise, delta, 100)
    path.parent.mkdir(exist_ok=True)
    with plan.open_ledger(path) as ledger:
        for step in range(2):
            ledger.charge(step, plan.event, noise, plan.stddev, plan.sensitivity)
    return path


# -- a budget --------------------------------------------------------------------------------------


def test_runs_charge_their_budget_until_it_is_spent(tmp_path):
    path = tmp_path / "digits.toml"
    text = call("budget", path, "--epsilon", "1.4", "--delta", "1e-5", "--people", "writers").output
    assert "writers: ε = 1.4 at δ = 1e-05" in text and "1.400" in text
    assert call(*RUN, "--budget", path, "--out", tmp_path / "a").exit_code == 0
    card = read_card(tmp_path / "a")
    assert card["budget"]["people"] == "writers" and card["budget"]["before"] == 0.0
    page, _, annex = (tmp_path / "a" / "privacy_card.md").read_text("utf-8").partition("# Annex")
    assert "| budget | writers: ε of all runs 0.0000 before this one and" in annex
    total = f"ε = {round_up(card['budget']['after'], 4)}, δ = 1e-05 for all runs that the budget"
    assert f"- **Total over several runs:** {total} of writers had counted." in page
    content = path.read_bytes()
    message = refuse(*RUN, "--budget", path, "--out", tmp_path / "b")
    named = re.search(
        r"digits\.toml has ε = ([\d.]+) of 1\.4 left.*plan for ε = ([\d.]+), or", message
    )
    assert named is not None and len(message) <= 170
    assert path.read_bytes() == content and not (tmp_path / "b").exists()
    smaller = (*RUN[:-1], named[2])
    assert call(*smaller, "--budget", path, "--out", tmp_path / "b").exit_code == 0
    assert "complete" in refuse("train", "--resume", tmp_path / "b", "--quiet")
    budget = Budget(path)
    assert len(budget.charges) == 2 and budget.spent <= 1.4
    shown = call("budget", path).output
    assert str(tmp_path)[:20] in shown and "releases" not in shown
    total = json.loads(call("total", tmp_path / "a", tmp_path / "b", "--json").output)
    assert total["epsilon"] == pytest.approx(budget.spent) and total["certified"] is True
    assert total["delta"] == 1e-5 and [run["releases"] for run in total["runs"]] == [3, 3]


def test_a_ledger_that_was_moved_keeps_its_charge(tmp_path):
    path = tmp_path / "digits.toml"
    call("budget", path, "--epsilon", "1.4", "--delta", "1e-5")
    run = PrivacyConfig(expected_batch_size=8, steps=2, max_grad_norm=1.0).calibrate(1.0, 1e-5, 64)
    old, new = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    with run.open_ledger(old) as ledger:
        Budget(path).charge(run, ledger)
    old.rename(new)
    assert "no charge of" in refuse("budget", path, "--moved", new.with_name("c"), new)
    assert call("budget", path, "--moved", old, new).exit_code == 0
    with run.open_ledger(new) as ledger:
        Budget(path).charge(run, ledger)
    assert [charge.path for charge in Budget(path).charges] == [str(new)]


def test_a_budget_that_is_not_there_stops_a_run_before_it_begins(tmp_path):
    message = refuse(*RUN, "--budget", tmp_path / "none.toml", "--out", tmp_path / "run")
    assert "does not exist" in message and not list(tmp_path.iterdir())


# -- a total ---------------------------------------------------------------------------------------


def test_the_total_of_ledgers_counts_what_was_released(tmp_path):
    first, second = (
        start_run(tmp_path / "a" / "ledger.jsonl"),
        start_run(tmp_path / "b" / "x.jsonl", 3.0),
    )
    for words in (("total",), ("ledger", "total")):
        result = call(*words, tmp_path / "a", second)
        assert result.exit_code == 0 and "ε at δ = 0.0001 for one example" in result.output
    total = total_of_ledgers([first, second])
    assert (
        max(row.epsilon for row in total.rows) < total.epsilon < sum(r.epsilon for r in total.rows)
    )
    assert total_of_ledgers([first, second], 1e-6).epsilon > total.epsilon
    assert total_of_ledgers([tmp_path]).rows[0].path == first  # a folder of run folders
    assert not total.doubts and describe_total(total)["runs"][0]["ledger"] == str(first)


def test_a_federated_run_is_composed_with_a_central_one(tmp_path):
    config = FederatedConfig(clients=4, rounds=2, expected_records=100, local=LocalGradient())
    plan = config.with_noise(3.0, 1e-4)
    with plan.open_ledger(tmp_path / "server.jsonl") as ledger:
        ledger.charge(0, plan.event, 3.0, plan.stddev, plan.sensitivity)
    central = start_run(tmp_path / "a" / "ledger.jsonl")
    total = total_of_ledgers([tmp_path / "server.jsonl", central])
    assert total.epsilon > total.rows[1].epsilon


def test_a_total_without_a_guarantee_says_so(tmp_path):
    first = start_run(tmp_path / "a" / "ledger.jsonl", test_mode_seed=3)
    second = start_run(tmp_path / "b" / "ledger.jsonl")
    output = call("total", first, second).output
    assert "NOT PRIVATE: the noise repeats from a seed" in output and "NO" in output
    assert json.loads(call("total", first, "--json").output)["certified"] is False


def test_what_has_no_common_total_is_one_error(tmp_path):
    first = start_run(tmp_path / "a" / "ledger.jsonl")
    fixed = start_run(tmp_path / "b" / "ledger.jsonl", sampler="fixed", accountant="rdp")
    assert "counts add_or_remove_one" in refuse("total", first, fixed)
    patient = start_run(tmp_path / "c" / "ledger.jsonl", unit="patient", max_records_per_unit=2)
    assert "counts one example, " in refuse("total", first, patient)
    other = start_run(tmp_path / "d" / "ledger.jsonl", delta=1e-5)
    assert "do not state one δ" in refuse("total", first, other)
    assert call("total", first, other, "--delta", "1e-5").exit_code == 0
    assert "given twice" in refuse("total", first, first)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert "is a copy of" in refuse("total", first, tmp_path / "copy")
    (tmp_path / "empty").mkdir()
    assert "is not a ledger and holds none" in refuse("total", tmp_path / "empty")
    assert "delta must be in (0, 1)" in refuse("total", first, "--delta", "2")


def test_copies_that_went_apart_both_count(tmp_path):
    first = start_run(tmp_path / "a" / "ledger.jsonl")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    plan = PrivacyConfig(expected_batch_size=10, steps=3).with_noise(2.0, 1e-4, 100)
    for path in (first, tmp_path / "copy" / "ledger.jsonl"):
        # The same step: what both release differs in its noise alone.
        with Ledger.open(path, plan.hash, plan.ledger_header, 3) as ledger:
            ledger.charge(5, plan.event, 2.0, plan.stddev, plan.sensitivity)
    total = total_of_ledgers([first, tmp_path / "copy"])
    assert total.epsilon > total.rows[0].epsilon
    reports = [verify_run(tmp_path / name) for name in ("a", "copy")]
    counted = re.search(r"ε = ([\d.]+)", add_up(reports))
    assert counted and float(counted[1]) == pytest.approx(total.epsilon, abs=1e-3)


# -- the weights in a folder -----------------------------------------------------------------------


FACT = "weights of the last release"


def test_a_folder_says_whether_its_weights_are_those_of_its_ledger(folder):
    ledger = folder / "ledger.jsonl"
    assert verify_ledger(ledger)[FACT].startswith("equal to model.safetensors")
    for name in ("privacy_card.json", "privacy_card.md"):
        (folder / name).unlink()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")  # the same weights in another file
    assert verify_ledger(ledger)[FACT].startswith("equal to model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1e-7}, folder / "model.safetensors")
    assert "does not hold the weights of the last release" in refuse("ledger", "verify", folder)
    assert call("audit", folder, "--kind", "membership", "--quiet").exit_code == 2
    (folder / "model.safetensors").unlink()
    assert verify_ledger(ledger)[FACT].startswith("not compared: no safetensors file")
    (folder / "ledger.weights.json").unlink()
    assert verify_ledger(ledger)[FACT] == "not compared: the ledger carries no digest of them"


def test_a_record_that_was_edited_or_exchanged_is_found(folder, tmp_path):
    record = folder / "ledger.weights.json"
    content = json.loads(record.read_text("utf-8"))
    assert content["releases"] == len(verify(folder / "ledger.jsonl").releases)
    name = next(iter(content["weights"]))
    edited = {**content, "weights": {**content["weights"], name: "0" * 64}}
    for text in (json.dumps(edited), "{", "[]", json.dumps({**content, "format": 9})):
        record.write_text(text, "utf-8")
        assert "record of the weights" in refuse("ledger", "verify", folder)
    start_run(tmp_path / "other" / "ledger.jsonl")
    record.write_text(json.dumps(content), "utf-8")
    shutil.copy(record, tmp_path / "other")
    assert "is the record of another ledger" in refuse("ledger", "verify", tmp_path / "other")
