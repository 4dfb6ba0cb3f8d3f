"""Public class weights and thresholds: what they change, and what they refuse."""

import csv

import pytest
import torch

from dpkfc.app.owndata.predictions import load_run
from dpkfc.app.recipes.catalogue import read_weights, recipe_of, run_config
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.app.toml import ConfigError
from tests.app.own_files import QUICK, own_config, write_patients
from tests.command_line import call


def _config(tmp_path, **settings):
    path, schema = write_patients(tmp_path)
    return own_config(path, schema, **settings)


def test_weights_multiply_the_loss_by_their_ratio(tmp_path):
    task = recipe_of(_config(tmp_path, class_weights="1, 4")).task
    model = torch.nn.Linear(3, 2)
    batch = torch.randn(3, 3), torch.tensor([0, 1, -1])
    plain = cross_entropy(model, batch)
    assert torch.allclose(task.loss(model, batch), plain * torch.tensor([0.25, 1.0, 1.0]))
    # No gradient is longer than without weights, so a clip keeps the ratio.
    assert read_weights("2 8", 2) == (0.25, 1.0) and read_weights("", 2) == ()


def test_a_threshold_decides_answers_scores_and_predictions(tmp_path):
    path, schema = write_patients(tmp_path)
    run, out = tmp_path / "run", tmp_path / "predictions.csv"
    words = ["--steps", "2", "--expected-batch-size", "24", "--threshold", "0.1", "--out", run]
    called = call("train", "--data", path, "--schema", schema, "--class-weights", "1 3", *words)
    assert called.exit_code == 0, called.output
    assert call("predict", run, "--data", path, "--out", out).exit_code == 0
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["class"] == ("yes" if float(row["p(yes)"]) >= 0.1 else "no")
    trained = load_run(run)
    inputs, labels = trained.recipe.data(trained.config).test
    chosen = trained.model(inputs[:]).softmax(1)[:, 1] >= 0.1
    task = trained.recipe.task
    accuracy = float((chosen == labels).double().mean())
    assert task.judge(trained.model, (inputs, labels)).accuracy == pytest.approx(accuracy)
    assert task.scores(trained.model, (inputs, labels)).scores[0].value == pytest.approx(accuracy)
    card = (run / "privacy_card.md").read_text("utf-8")
    assert "class weights" in card and "0.333333, 1" in card and "threshold" in card


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"class_weights": "balanced"}, "counts of labels are private"),
        ({"class_weights": "1"}, "must be 2 numbers above 0"),
        ({"class_weights": "1 0"}, "must be 2 numbers above 0"),
        ({"threshold": 1.0}, "threshold must be below 1"),
        ({"threshold": 0.0}, "threshold must be above 0"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message) as raised:
        recipe_of(_config(tmp_path, **settings))
    assert len(str(raised.value)) <= 160


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"recipe": "digits", "threshold": 0.2}, "is for two classes"),
        ({"recipe": "digits", "class_weights": "1 2"}, "must be 10 numbers"),
    ],
)
def test_a_recipe_of_several_classes(settings, message):
    with pytest.raises(ConfigError, match=message):
        recipe_of(run_config({**QUICK, **settings}))


def test_a_number_has_no_class_weights(tmp_path):
    path, schema = write_patients(tmp_path)
    text = schema.read_text("utf-8").split("[columns.age]")
    head = text[0].replace('target = "outcome"', 'target = "age"')
    head = head.replace('classes = ["no", "yes"]', "target_bounds = [20, 80]")
    schema.write_text(head + text[1].partition("\n\n")[2], "utf-8")
    with pytest.raises(ConfigError, match="is for classes with cross-entropy"):
        recipe_of(own_config(path, schema, class_weights="1 2"))
