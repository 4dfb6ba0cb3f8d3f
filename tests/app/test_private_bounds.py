"""Bounds of numbers that one release finds: counts against brute force, and runs that find some."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dpkfc.app import train
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.folder_findings import card_finding, ledger_finding
from dpkfc.app.owndata import recipes as own_recipes
from dpkfc.app.owndata.bounds import (
    BINS,
    DEFAULT_BOUNDS,
    NO_BIN,
    _edges_of_bin,
    bin_numbers,
    choose_bounds,
    count_bins,
    norm_of,
)
from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.files import encode_table
from dpkfc.app.owndata.predictions import load_run
from dpkfc.app.owndata.schema import read_schema
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import recipe_of, run_config
from dpkfc.app.run_folder import RunFolder, RunFolderError
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import read_settings, resume, run
from dpkfc.privacy.accounting import event_from_dict, total_epsilon
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.ledger import verify
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.report.verify import verify_ledger
from dpkfc.report.written_card import CardError
from tests.app.finished import read_card
from tests.app.own_files import QUICK, write_rows
from tests.command_line import call

ODD = ["", "NA", "nan", "inf", "-inf", "1e400", "-1e999", "x", "0", "-0.0", "5e-324", "1e308"]
TEXTS = [*ODD, "1", "-1", "3.5", "-1e-30", "127.9", "128", "-4096"]
HEADER = ["key", "age", "debt", "empty", "outcome"]
SCHEMA = """\
target = "outcome"
classes = ["no", "yes"]

[columns.age]
kind = "number"

[columns.debt]
kind = "number"

[columns.empty]
kind = "number"
"""


def _rows(count=1200):
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        age = int(rng.integers(20, 90))
        debt = round(float(rng.normal(0, 900)), 2)
        odd = ODD[number % len(ODD)] if number % 9 == 0 else debt
        rows.append([number // 3, age, odd, "", "yes" if age > 50 else "no"])
    return rows


def _files(folder, unit=False, count=1200):
    path = write_rows(folder / "people.csv", _rows(count), HEADER)
    schema = folder / "people.toml"
    extra = '\n[columns.key]\nkind = "unit"\n' if unit else ""
    schema.write_text(SCHEMA + extra, "utf-8")
    return {"data": str(path), "schema": str(schema), "bounds": "private"}


def _config(folder, **more):
    files = _files(folder, unit=bool(more.pop("unit", False)), count=int(more.pop("count", 1200)))
    return run_config({**QUICK, **files, "out": str(folder / "run"), **more})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bounds")
    result = run(_config(folder, unit=True, count=4000))
    assert (result.steps, result.releases) == (2, 4)
    return folder / "run"


# -- the counts ------------------------------------------------------------------------------------


def _encode(texts):
    column = Column(kind="number", missing=("", "NA"))
    parts = [column.encode([row[place] for row in texts]).features for place in range(2)]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def test_a_bin_holds_its_numbers():
    for text in TEXTS:
        number = float(text) if text not in ("", "NA", "x") else math.nan
        (found,) = bin_numbers(np.array([number]))
        if not math.isfinite(number):
            assert found == NO_BIN
            continue
        least, greatest = _edges_of_bin(found)
        is_within = least <= number <= greatest
        assert is_within or abs(number) < 2.0**-20 or abs(number) >= 2.0**41
    every = bin_numbers(
        np.concatenate([-np.logspace(-9, 15, 999), [0.0], np.logspace(-9, 15, 999)])
    )
    assert every.min() == 0 and every.max() == BINS - 1
    assert (np.diff(np.sort(every)) <= 1).all()


def test_one_record_more_or_less_moves_the_counts_by_the_stated_norm():
    rng = np.random.default_rng(1)
    texts = [[str(a) for a in rng.choice(TEXTS, 2)] for _ in range(60)]
    texts += [[a, a] for a in TEXTS]
    whole = count_bins(_encode(texts), [0, 2])
    distances = []
    for gone in range(len(texts)):
        fewer = count_bins(_encode(texts[:gone] + texts[gone + 1 :]), [0, 2])
        distances.append(float(np.linalg.norm(whole - fewer)))
    assert max(distances) <= norm_of(2)
    assert max(distances) == pytest.approx(math.sqrt(2)), "the norm is reached"
    assert min(distances) == 0.0, "missing and infinite values are not counted"


def test_one_unit_more_or_less_moves_the_counts_by_the_stated_norm():
    rng = np.random.default_rng(2)
    texts = [[str(a) for a in rng.choice(TEXTS[8:], 2)] for _ in range(50)]
    texts += [["3", "5"]] * 7  # a unit whose records share a bin
    units = torch.tensor([*rng.integers(0, 9, 50), *[20] * 7])
    inputs = _encode(texts)
    whole = count_bins(inputs, [0, 2], units)
    distances = []
    for unit in units.unique():
        kept = units != unit
        fewer = count_bins(inputs[kept], [0, 2], units[kept])
        distances.append(float(np.linalg.norm(whole - fewer)))
    assert max(distances) <= norm_of(2)
    assert max(distances) == pytest.approx(math.sqrt(2), rel=1e-5)


def test_other_records_do_not_change_what_a_record_counts():
    units = torch.tensor([3, 3, 3, 8])
    inputs = _encode([["1", "2"], ["1", "4"], ["-1", "NA"], ["9", "9"]])
    alone = count_bins(inputs[:3], [0, 2], units[:3])
    other = count_bins(inputs[3:], [0, 2], units[3:])
    assert np.array_equal(count_bins(inputs, [0, 2], units), alone + other)
    assert not count_bins(inputs[:0], [0, 2]).any()


def test_bounds_are_the_edges_of_what_rises_above_the_noise():
    noisy = np.zeros((4, BINS))
    noisy[0, bin_numbers(np.array([20.0, 90.0]))] = 1000.0
    noisy[1, bin_numbers(np.array([-3.0]))] = 1000.0
    noisy[2, :] = 30.0  # below the threshold of 10 · 5.2
    noisy[3, bin_numbers(np.array([0.0]))] = 1000.0
    found = choose_bounds(noisy.ravel(), 10.0)
    assert found == [
        ((16.0, 128.0), "private"),
        ((-4.0, -2.0), "private"),
        (DEFAULT_BOUNDS, "default"),
        (DEFAULT_BOUNDS, "private"),
    ]


def test_empty_bins_seldom_rise_above_the_noise():
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(400):
        found = choose_bounds(rng.normal(0, 5.0, 3 * BINS), 5.0)
        wrong += any(origin == "private" for _, origin in found)
    assert wrong <= 2


# -- runs ------------------------------------------------------------------------------------------


def test_a_run_finds_bounds_and_its_card_says_so(finished):
    schema = read_schema(finished / "schema.toml")
    assert schema.columns["age"].bounds == (16.0, 128.0)
    assert [schema.columns[name].origin for name in ("age", "debt", "empty")] == [
        "private",
        "private",
        "default",
    ]
    least, greatest = schema.columns["debt"].bounds
    assert least <= -512 and greatest >= 512
    lines = verify(finished / "ledger.jsonl").releases
    assert [line.get("purpose") for line in lines] == ["bounds", "moments", None, None]
    assert lines[0]["sensitivity"] == pytest.approx(math.sqrt(3), rel=1e-5)
    card = read_card(finished)
    charges = [(event_from_dict(line["event"]), 1) for line in lines]
    assert card["guarantee"]["epsilon"] == pytest.approx(total_epsilon(charges, 1e-5, "rdp"))
    assert 2.9 < card["guarantee"]["epsilon"] <= 3.0
    assert card["guarantee"]["releases"] == 4
    row, moments = card["mechanism"]["extra_releases"]
    assert (row["purpose"], moments["purpose"]) == ("bounds", "moments")
    assert row["epsilon_alone"] == pytest.approx(0.75, rel=1e-3)
    text = (finished / "privacy_card.md").read_text("utf-8")
    assert "categories and all bounds without a row here are stated by the user" in text
    assert "releases for bounds" in text and "empty -1 to 1" in text and "4 of 4 planned" in text
    facts = verify_ledger(finished / "ledger.jsonl")
    assert "alone ε = 0.75" in facts["releases for bounds, part of ε"]
    assert facts["ε by RDP at δ = 1e-05"] == pytest.approx(card["guarantee"]["epsilon"])


def test_the_audit_agrees_and_finds_a_forged_line(finished, tmp_path):
    prepared = prepare(read_settings(RunFolder.locate(finished)))
    assert ledger_finding(finished / "ledger.jsonl", prepared.plan).passed
    assert card_finding(finished / "ledger.jsonl", prepared.plan, "cpu").passed
    other = prepare(_config(tmp_path, unit=True, count=4000), may_find_bounds=True).plan
    assert other.hash == prepared.plan.hash
    path = tmp_path / "ledger.jsonl"
    with other.open_ledger(path) as ledger:
        ledger.charge(0, other.event, 50.0, 100.0, 2.0, "bounds")
    assert "release 1 was charged with another" in ledger_finding(path, other).detail


def test_a_card_that_hides_the_release_is_found(finished, tmp_path):
    for name in ("ledger.jsonl", "privacy_card.json", "model.safetensors"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    card = read_card(tmp_path)
    del card["mechanism"]["extra_releases"]
    (tmp_path / "privacy_card.json").write_text(json.dumps(card), "utf-8")
    with pytest.raises(CardError, match="releases beside the steps"):
        verify_ledger(tmp_path / "ledger.jsonl", pages=False)


def test_the_folder_of_a_run_predicts_and_is_complete(finished):
    assert load_run(finished).recipe.find_bounds is None
    with pytest.raises(ConfigError, match="complete"):
        resume(finished)
    before = (finished / "ledger.jsonl").read_bytes()
    done = call("ledger", "verify", str(finished))
    assert done.exit_code == 0 and "for bounds" in done.output
    assert (finished / "ledger.jsonl").read_bytes() == before


def test_a_resumed_run_is_not_charged_for_bounds_again(tmp_path, monkeypatch):
    from dpkfc.app import training_loop

    budget = Budget(tmp_path / "ward.toml", epsilon=3.5, delta=1e-5)
    config = _config(tmp_path, steps=3, evaluate_every=1, budget=str(budget.path))
    monkeypatch.setattr(
        training_loop.TrainingLoop, "_should_go_on", lambda loop, row: row.step != 1
    )
    result = run(config)
    assert result.interrupted
    monkeypatch.undo()
    schema = (tmp_path / "run" / "schema.toml").read_text("utf-8")
    resume(tmp_path / "run")
    lines = verify(tmp_path / "run" / "ledger.jsonl").releases
    purposes = [line.get("purpose", "step") for line in lines]
    assert purposes == ["bounds", "moments", "step", "step", "step"]
    assert (tmp_path / "run" / "schema.toml").read_text("utf-8") == schema
    (charge,) = budget.charges
    charges = [(event_from_dict(line["event"]), 1) for line in lines]
    assert charge.after == pytest.approx(total_epsilon(charges, 1e-5))


def test_a_run_that_does_not_fit_into_a_budget_finds_no_bounds(tmp_path):
    from dpkfc.privacy.ledger import BudgetExhausted

    budget = Budget(tmp_path / "ward.toml", epsilon=2.0, delta=1e-5)
    with pytest.raises(BudgetExhausted):
        run(_config(tmp_path, budget=str(budget.path)))
    assert not budget.charges and not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize("place", ["choose_bounds", "write"])
def test_a_run_cut_off_behind_the_charge_makes_no_second_release(tmp_path, monkeypatch, place):
    def crash(*given):
        assert len(verify(tmp_path / "run" / "ledger.jsonl").releases) == 1
        raise KeyboardInterrupt

    if place == "write":
        monkeypatch.setattr(train, "write_text", crash)
    else:
        monkeypatch.setattr(own_recipes, "choose_bounds", crash)
    config = _config(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    for again in (lambda: run(config), lambda: resume(tmp_path / "run")):
        with pytest.raises((RunFolderError, LedgerError, ConfigError)):
            again()
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before


def test_a_schema_that_was_changed_belongs_to_another_plan(tmp_path, monkeypatch):
    from dpkfc.app import training_loop

    monkeypatch.setattr(training_loop.TrainingLoop, "_should_go_on", lambda loop, row: False)
    run(_config(tmp_path, steps=3, evaluate_every=1))
    monkeypatch.undo()
    path = tmp_path / "run" / "schema.toml"
    text = path.read_text("utf-8")
    ledger = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    for changed in (
        text.replace('origin = "private"', "", 1),
        re.sub(r"bounds = \[[^]]*\]\norigin = .*", "", text),
        re.sub(r"bounds = \[[^]]*\]\norigin = .*", "", text, count=1),
    ):
        path.write_text(changed, "utf-8")
        with pytest.raises((LedgerError, ConfigError)):
            resume(tmp_path / "run")
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == ledger


def test_the_split_does_not_depend_on_the_bounds(tmp_path):
    files = _files(tmp_path)
    config = run_config({**QUICK, **files})
    schema = read_schema(Path(files["schema"]), may_be_open=True)
    opened = encode_table(Path(files["data"]), schema)
    text = Path(files["schema"]).read_text("utf-8")
    found = text.replace('kind = "number"', 'kind = "number"\nbounds = [0, 64]\norigin = "private"')
    Path(files["schema"]).write_text(found, "utf-8")
    closed = encode_table(Path(files["data"]), read_schema(Path(files["schema"])))
    assert list(opened.contents) == list(closed.contents)
    assert recipe_of(config).find_bounds is None
    assert not torch.equal(opened.inputs, closed.inputs)


def test_bounds_come_from_training_records_alone(tmp_path, monkeypatch):
    seen = []

    def watch(inputs, places, units):
        seen.append(len(inputs))
        return count_bins(inputs, places, units)

    monkeypatch.setattr(own_recipes, "count_bins", watch)
    config = _config(tmp_path, validation_size=50)
    run(config)
    prepared = prepare(read_settings(RunFolder.locate(tmp_path / "run")))
    assert seen == [len(prepared.data.train[1])] and prepared.plan.dataset_size == seen[0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"noise_multiplier": 1.0}, "takes a part of ε"),
        ({"sampler": "fixed"}, "add up with sampler"),
        ({"bounds_share": 0.95}, "at most 0.9"),
        ({"bounds": "mine"}, "unknown bounds"),
        ({"bounds": ""}, "needs bounds"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        run(_config(tmp_path, **settings))
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_nothing_to_find_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match="has none"):
        prepare(run_config({"recipe": "digits", "bounds": "private"}))
    with pytest.raises(ConfigError, match="for dpkfc train on one process"):
        prepare(_config(tmp_path))
    found = SCHEMA.replace('"number"', '"number"\nbounds = [0, 1]\norigin = "private"')
    for text in (found, found.replace("bounds = [0, 1]\norigin", "#", 1)):
        config = _config(tmp_path)
        Path(config.data.schema).write_text(text, "utf-8")
        with pytest.raises(ConfigError, match="a run has found"):
            run(config)


@pytest.mark.parametrize("count", [0, 1])
def test_no_records_and_one_record_are_refused_before_a_charge(tmp_path, count):
    with pytest.raises(DatasetError):
        run(_config(tmp_path, count=count))
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_few_records_find_nothing_and_train(tmp_path):
    run(_config(tmp_path, count=60, delta=1e-3, bounds_share=0.05, test_mode=True))
    schema = read_schema(tmp_path / "run" / "schema.toml")
    assert {column.origin for column in schema.columns.values()} == {"default"}
