"""Scores equal plain counts and scikit-learn's, and their intervals cover the truth."""

import io
import json
import tracemalloc

import numpy as np
import pytest
from rich.console import Console

from dpkfc.app.class_scores import score_classes, share_score
from dpkfc.app.commands.score_tables import print_scores
from dpkfc.app.number_scores import score_numbers
from dpkfc.app.scores import digits
from tests.app.finished import read_card
from tests.app.own_files import patients, write_patients, write_rows
from tests.command_line import call

metrics = pytest.importorskip("sklearn.metrics")


def _draw(count, classes, seed=0):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, classes))
    odds = np.exp(logits)
    shares = odds.cumsum(1) / odds.sum(1, keepdims=True)
    return logits, (generator.random((count, 1)) > shares).sum(1)


def _values(scores):
    return {score.name.split(",")[0].split(" (")[0]: score.value for score in scores.scores}


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_equal_scikit_learns(classes):
    logits, labels = _draw(300, classes)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    scores = score_classes(logits, labels)
    values = _values(scores)
    given = shares if classes > 2 else shares[:, 1]
    assert values["accuracy"] == metrics.accuracy_score(labels, logits.argmax(1))
    assert values["log loss"] == pytest.approx(metrics.log_loss(labels, shares))
    assert values["AUROC"] == pytest.approx(metrics.roc_auc_score(labels, given, multi_class="ovr"))
    confusion = metrics.confusion_matrix(labels, logits.argmax(1))
    assert np.array_equal(scores.confusion, confusion)
    recalls = [score.recall.value for score in scores.classes]
    assert recalls == pytest.approx(metrics.recall_score(labels, logits.argmax(1), average=None))
    error = 0.0
    for place in range(15):
        inside = (np.minimum(shares.max(1) * 15, 14).astype(int)) == place
        right = (logits.argmax(1) == labels)[inside]
        error += abs((right - shares.max(1)[inside]).sum()) / len(labels)
    assert values["calibration error"] == pytest.approx(error)
    guess = scores.scores[0].guess
    assert guess == np.bincount(labels).max() / 300
    constant = np.tile(np.bincount(labels) / 300, (300, 1))
    assert scores.scores[2].guess == pytest.approx(metrics.log_loss(labels, constant))


def test_half_of_equal_scores_are_in_order():
    logits, labels = _draw(300, 2)
    logits = logits.round()
    area = metrics.roc_auc_score(labels, logits[:, 1] - logits[:, 0])
    assert _values(score_classes(logits, labels))["AUROC"] == pytest.approx(area)


def test_scores_of_numbers_equal_scikit_learns():
    generator = np.random.default_rng(0)
    targets = generator.normal(size=200) * 50 + 900
    predicted = targets + generator.normal(size=200) * 9
    values = _values(score_numbers(predicted, np.append(targets, np.nan)[:200]))
    assert values["R²"] == pytest.approx(metrics.r2_score(targets, predicted))
    error = metrics.mean_absolute_error(targets, predicted)
    assert values["mean absolute error"] == pytest.approx(error)
    scores = score_numbers(predicted, targets).scores
    assert scores[1].guess == pytest.approx(np.abs(targets - np.median(targets)).mean())
    assert scores[2].guess == pytest.approx(targets.std())


@pytest.mark.slow
def test_most_intervals_cover_the_truth():
    logits, labels = _draw(40_000, 2)
    truth = _values(score_classes(logits, labels))
    seen = dict.fromkeys(("accuracy", "AUROC", "log loss"), 0)
    calibrated = 0
    for seed in range(1, 61):
        for score in score_classes(*_draw(60, 2, seed)).scores:
            if score.name in seen:
                seen[score.name] += score.low <= truth[score.name] <= score.high
            else:
                calibrated += score.low == 0.0
    # Of 60 at 95 % fewer than 51 are rarer than 1 in 10,000; the bootstrap has less on few rows.
    assert min(*seen.values(), calibrated) >= 50
    # They are not simply wide.
    assert max(score.high - score.low for score in score_classes(*_draw(4000, 2)).scores) < 0.06


def test_intervals_of_many_rows_are_those_of_the_bootstrap(monkeypatch):
    """Both are drawn a thousand times, so their ends differ by about a tenth of their width."""
    logits, labels = _draw(3000, 3)
    ends = {}
    for many in (10**9, 1):
        monkeypatch.setattr("dpkfc.app.bootstrap._MANY", many)
        found = [*score_classes(logits, labels).scores, *score_numbers(logits[:, 0], labels).scores]
        ends[many] = [(score.low, score.high) for score in found]
    for (low, high), gaussian in zip(ends[10**9], ends[1], strict=True):
        assert gaussian == pytest.approx((low, high), abs=0.2 * (high - low))


def test_scores_of_many_rows_take_a_few_numbers_a_row(monkeypatch):
    """Logits in double precision take two, a matrix of all rows by bins takes fifteen."""
    count = 60_000
    logits, labels = _draw(count, 2)
    numbers = score_numbers(logits[:, 0], labels)
    monkeypatch.setattr("dpkfc.app.bootstrap._ROWS", 1 << 12)
    tracemalloc.start()
    scores = score_classes(logits, labels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 8 * count
    monkeypatch.undo()
    for found, whole in (
        (scores, score_classes(logits, labels)),
        (score_numbers(logits[:, 0], labels), numbers),
    ):
        for one, other in zip(found.scores, whole.scores, strict=True):
            ends = one.value, one.low, one.high
            assert ends == pytest.approx((other.value, other.low, other.high), rel=1e-10)


def test_a_perfect_score_of_few_rows_has_a_wide_interval():
    logits = np.array([[5.0, -5], [5, -5], [5, -5], [-5, 5]])
    accuracy, area, *_ = score_classes(logits, np.array([0, 0, 0, 1])).scores
    assert accuracy.value == area.value == 1.0
    assert accuracy.low < 0.5 and area.low < 0.5 and area.high == 1.0


def test_what_cannot_be_measured_is_no_number():
    logits, labels = _draw(20, 3)
    one_class = score_classes(logits, np.zeros(20, int))
    assert _values(one_class)["AUROC"] is None and one_class.scores[0].guess == 1.0
    assert one_class.classes[1].recall.value is None
    nothing = score_classes(logits, np.full(20, -1))
    assert nothing.scores == () and nothing.unlabelled == 20
    assert score_numbers(np.ones(3), np.full(3, np.nan)).scores == ()
    assert score_numbers(np.ones(3), np.ones(3)).scores[0].value is None
    assert share_score("recall", 0, 0).text == "–" and digits(-4e-5) == digits(-0.0) == "0.0000"
    assert json.dumps(one_class.to_json(["a", "b", "c"]), allow_nan=False)
    assert len(score_classes(*_draw(200, 50)).card_rows("test", ())) == 5


@pytest.mark.parametrize("shift", ["no.", "other"])
def test_a_file_without_a_known_test_label_says_so(tmp_path, shift):
    path, schema = write_patients(tmp_path)
    write_rows(path, [[*row[:-1], shift] for row in patients()])
    run = tmp_path / "run"
    words = ["--steps", "2", "--expected-batch-size", "32", "--out", run]
    called = call("train", "--data", path, "--schema", schema, *words)
    assert called.exit_code == 0, called.output
    text = " ".join(called.stdout.replace("│", " ").split())
    assert "no test row has a known label" in text
    assert "0.0 %" not in text and "0.0000" not in text
    card = read_card(run)
    assert card["results"]["accuracy on the test set"] == "no test row has a known label"
    page = tmp_path / "page.html"
    assert call("report", run, "--out", page).exit_code == 0
    assert "no test row has a known label" in page.read_text("utf-8")
    called = call("evaluate", run)
    assert called.exit_code == 2 and "no test row has a known label" in called.output


def test_scores_of_ten_classes_are_read_at_80_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    print_scores(console, score_classes(*_draw(400, 10)), [])
    lines = console.export_text().splitlines()
    assert any("records" in line and "recall" in line and "precision" in line for line in lines)
    assert any(all(f"→ {name}" in line for name in range(10)) for line in lines)
    rows = [line for line in lines if line.startswith("│ 3 ")]
    assert len(rows) == 2 and rows[0].count("%") == 2


def test_train_evaluate_page_and_card_show_the_same_scores(tmp_path):
    path, schema = write_patients(tmp_path)
    run, page = tmp_path / "run", tmp_path / "page.html"
    words = ["--steps", "2", "--expected-batch-size", "32", "--out", run]
    trained = call("train", "--data", path, "--schema", schema, *words)
    evaluated = call("evaluate", run)
    assert call("report", run, "--out", page).exit_code == 0
    content = json.loads((run / "scores.json").read_text("utf-8"))
    card = (run / "privacy_card.md").read_text("utf-8")
    for score in content["scores"]:
        value = f"{score['value']:.4f}"
        for text in (trained.output, evaluated.output, card, page.read_text("utf-8")):
            assert value in text, (score, text)
    assert "constant guess" in trained.output and "PRIVATE" in trained.output
