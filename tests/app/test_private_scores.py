"""Noisy scores on test rows: what a row adds, what is charged, and that nothing else is shown."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dpkfc.app import private_scores
from dpkfc.app.count_forms import Numbers, SeveralClasses, TwoClasses
from dpkfc.app.metrics import Metrics
from dpkfc.app.number_scores import score_numbers
from dpkfc.app.prepare import prepare
from dpkfc.app.private_scores import count_rows, noisy_scores
from dpkfc.app.recipes.objective import score_model
from dpkfc.app.scores import OF_NOISY_SCORES, missing_score
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import resume, run
from dpkfc.privacy.ledger import verify
from tests.app.finished import read_card
from tests.app.own_files import own_config, write_patients

ODD = [float("nan"), float("inf"), -1e30, 1e30, 0.3]


@pytest.mark.parametrize(
    "form", [TwoClasses(), TwoClasses(0.37), SeveralClasses(4), Numbers(10.0)], ids=str
)
def test_no_row_adds_more_than_the_norm(form):
    width = {TwoClasses: 2, SeveralClasses: 4, Numbers: 1}[type(form)]
    generator = np.random.default_rng(0)
    for label in (*range(-1, 5), 7, *ODD):
        outputs = [*generator.normal(size=(20, width)), *(np.full(width, odd) for odd in ODD)]
        for values in outputs:
            values = np.nan_to_num(values, posinf=1e6, neginf=-1e6)
            added = form.add(values, label)
            assert np.linalg.norm(added) <= form.norm and np.isfinite(added).all()
    assert not form.add(np.zeros(width), float("nan") if width == 1 else -1).any()


@pytest.mark.parametrize("classes", [2, 5])
def test_without_noise_they_are_the_scores(classes):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, classes).double()
    inputs = torch.randn(400, 3).double()
    labels = torch.distributions.Categorical(logits=model(inputs)).sample()
    labels[:9] = -1
    plain = score_model(model, (inputs, labels), 0.37)
    form = TwoClasses(0.37) if classes == 2 else SeveralClasses(classes)
    noisy = noisy_scores(form, count_rows(form, model, (inputs, labels)), 1e-9)
    assert noisy.examples == 391 and noisy.confusion == plain.confusion
    known = {score.name.split(" (")[0].split(",")[0]: score for score in plain.scores}
    for score in noisy.scores:
        other = known[score.name.split(" (")[0]]
        # Calibration has other bins, and their middles.
        rough = 0.06 if score.name.startswith("calibration") else 0.02
        assert score.value == pytest.approx(other.value, abs=rough)
        if other.guess is not None:
            assert score.guess == pytest.approx(other.guess, abs=1e-6)
    assert noisy.scores[0].value == pytest.approx(plain.scores[0].value, abs=1e-9)
    assert noisy.scores[0].low == pytest.approx(plain.scores[0].low, abs=0.02)


def test_without_noise_numbers_have_their_scores():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    inputs = torch.randn(200, 3)
    labels = (model(inputs).squeeze(1).detach() / 3 + torch.randn(200) / 9).clamp(-1, 1)
    form = Numbers(50.0)
    noisy = noisy_scores(form, count_rows(form, model, (inputs, labels)), 1e-9)
    outputs = model(inputs).squeeze(1).detach().clamp(-1, 1)
    plain = score_numbers(50 * outputs, 50 * labels)
    for score, other in zip(noisy.scores, plain.scores, strict=True):
        assert score.name == other.name and score.value == pytest.approx(other.value, rel=1e-3)


def test_noise_of_the_known_size_is_in_the_intervals():
    form, generator = TwoClasses(), np.random.default_rng(1)
    truth = np.zeros((2, private_scores.BINS))
    truth[0, :10] = 120
    truth[1, 8:] = 80
    exact = {score.name: score.value for score in noisy_scores(form, truth.ravel(), 1e-9).scores}
    seen = dict.fromkeys(("accuracy", "AUROC"), 0)
    for _ in range(60):
        released = truth.ravel() + 12 * generator.normal(size=truth.size)
        for score in noisy_scores(form, released, 12.0).scores:
            if score.name in seen:
                seen[score.name] += score.low <= exact[score.name] <= score.high
    assert min(seen.values()) >= 51


FORMS = [TwoClasses(), SeveralClasses(4), Numbers(10.0)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scores_of_rows_that_may_be_none_at_all_are_not_printed(form):
    width = len(form.add(np.zeros(4), 0.0))
    scores = noisy_scores(form, 30 * np.random.default_rng(2).normal(size=width), 30.0)
    assert {score.text for score in scores.scores} == {"–"}
    assert np.isnan(private_scores.judge(form, scores).accuracy)
    assert missing_score(scores, "test").startswith("too few test rows for the noise")


def test_a_share_that_may_be_anything_is_not_printed():
    released = np.full(40, 2.0)
    released[[3, 33]] = 60.0
    accuracy, auroc, *rest = noisy_scores(TwoClasses(), released, 12.0).scores
    assert (auroc.low, auroc.high, auroc.text) == (0.0, 1.0, "–")
    assert accuracy.value is not None
    assert all(score.value is not None for score in rest)


@pytest.fixture
def config(tmp_path):
    path, schema = write_patients(tmp_path)
    return own_config(path, schema, tmp_path / "run", epsilon=4.0, private_scores=0.25)


def test_one_release_is_charged_and_nothing_else_is_computed_from_test_rows(config, monkeypatch):
    def fail_the_test(*_, **__):
        raise AssertionError("scores without noise")

    for name in ("evaluate", "score_model"):
        monkeypatch.setattr(f"dpkfc.app.recipes.objective.{name}", fail_the_test)
    prepared = prepare(config)
    assert [kind.purpose for kind in prepared.plan.extra_releases] == ["moments", "scores"]
    result = run(config)
    folder = Path(config.run.out)
    assert result.noisy and result.epsilon <= 4.0
    purposes = [line.get("purpose") for line in verify(folder / "ledger.jsonl").releases]
    assert purposes.count("scores") == 1 and purposes[-1] == "scores"
    rows = Metrics.read(folder / "metrics.parquet").rows
    assert all(row.loss is None for row in rows[:-1])
    card = read_card(folder)
    assert not any("accuracy" in name for name in card["not_private"])
    assert card["mechanism"]["extra_releases"][-1]["purpose"] == "scores"


def test_a_run_that_ends_between_release_and_card_releases_once(config, monkeypatch):
    monkeypatch.setattr("dpkfc.app.results.build_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(config)
    folder = Path(config.run.out)
    before = json.loads((folder / "scores.json").read_text("utf-8"))["released"]
    monkeypatch.undo()
    result = resume(folder)
    assert json.loads((folder / "scores.json").read_text("utf-8"))["released"] == before
    assert (
        sum(line.get("purpose") == "scores" for line in verify(folder / "ledger.jsonl").releases)
        == 1
    )
    assert result.scores.intervals == OF_NOISY_SCORES


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"private_scores": 0.95}, "must be at most 0.9"),
        ({"eval_on": "validation", "validation_size": 20}, "takes a part of epsilon"),
        ({"noise_multiplier": 1.0}, "takes a part of epsilon"),
    ],
)
def test_settings_that_do_not_go_together(config, settings, message):
    with pytest.raises(ConfigError, match=message) as raised:
        prepare(config.change(**settings))
    assert len(str(raised.value)) <= 160


def test_units_of_several_records_are_refused(config):
    schema = Path(config.data.schema)
    text = (
        schema.read_text("utf-8")
        .replace('"ignore"', '"unit"')
        .replace("[columns", "max_records = 2\n[columns", 1)
    )
    schema.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="units of several"):
        prepare(config)
