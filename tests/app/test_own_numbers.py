"""A number as the target of own data: its encoding, errors in its unit, and mistakes."""

import csv
import math
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from dpkfc.app.arrow import to_arrow, to_numpy
from dpkfc.app.audit_folder import audit_folder
from dpkfc.app.html.page import write_page
from dpkfc.app.owndata.files import encode_table, encode_texts
from dpkfc.app.owndata.images import encode_folder
from dpkfc.app.owndata.predictions import load_run
from dpkfc.app.owndata.schema import ImageForm, Schema, read_schema
from dpkfc.app.recipes.catalogue import recipe_of
from dpkfc.app.recipes.objective import squared_error
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import run
from tests.app.finished import call_flat, flags, read_card
from tests.app.own_files import QUICK, own_config, write_images, write_rows, write_texts
from tests.audit.quick import make_statistics_quick

SCHEMA = """\
target = "cost"
target_bounds = [100, 300]

[columns.age]
kind = "number"
bounds = [0, 100]
"""


def _write(folder, schema=SCHEMA):
    """Write 300 rows whose cost is 100 + 2 · age, among them odd values, and a schema."""
    rows = [[row % 100, 100 + 2 * (row % 100)] for row in range(300)]
    rows[0][1], rows[1][1], rows[2][1], rows[3][1] = "", "n/k", 1e9, -5
    path = folder / "schema.toml"
    path.write_text(schema, "utf-8")
    return write_rows(folder / "costs.csv", rows, ["age", "cost"]), path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run, and the table."""
    folder = tmp_path_factory.mktemp("numbers")
    path, schema = _write(folder)
    result = run(own_config(path, schema, folder / "run", steps=40, epsilon=50.0, lr=0.5))
    errors = {score.name: score.value for score in result.scores.scores}
    assert errors["mean absolute error"] < 30
    return folder / "run", path


def test_a_number_is_clamped_and_scaled_and_a_missing_one_left_out(tmp_path):
    path, schema = _write(tmp_path)
    records = encode_table(path, read_schema(schema))
    expected = torch.tensor([(2 * (row % 100)) / 100 - 1 for row in range(300)])
    expected[2], expected[3] = 1, -1
    torch.testing.assert_close(records.labels[2:], expected[2:])
    assert records.labels[:2].isnan().all()
    assert records.figures["outside of bounds", "cost"] == 2 / 300
    known = records.select_labelled()
    assert known.names[0] == 3 and len(known) == 298
    # The least value is the mark of an unknown class; as a number it is known.
    assert 4 in known.names


@pytest.mark.slow
def test_errors_are_in_the_unit_of_the_target(finished):
    folder, path = finished
    trained = load_run(folder)
    records = trained.recipe.read(path).select_labelled()
    predicted = trained.model(records.inputs).detach().squeeze(1).clamp(-1, 1)
    errors = 100 * (predicted - records.labels).double()
    mean, root = float(errors.abs().mean()), float(errors.square().mean().sqrt())
    code, text = call_flat("evaluate", folder, "--data", path)
    assert code == 0 and "298 records; 2 without a known target left out" in text
    assert f"mean absolute error {mean:.5g}" in text or f"error {mean:.4f}" in text
    assert f"root mean squared error {root:.5g}" in text or f"error {root:.4f}" in text
    assert "PRIVATE" in text and f"range {1 - mean / 200:.4f}" in text
    assert "PRIVATE" not in call_flat("evaluate", folder, "--data", path, "--public")[1]


def test_predictions_are_numbers_between_the_bounds(finished, tmp_path):
    folder, _ = finished
    new = write_rows(tmp_path / "new.csv", [[20], [80], ["?"]], ["age"])
    code, text = call_flat("predict", folder, "--data", new, "--out", tmp_path / "p.csv")
    assert code == 0, text
    with (tmp_path / "p.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["record"] for row in rows] == ["1", "2", "3"] and set(rows[0]) == {"record", "cost"}
    assert 100 <= float(rows[0]["cost"]) < float(rows[1]["cost"]) <= 300


@pytest.mark.slow
def test_card_audit_export_and_page_say_what_is_learned(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("dpkfc.audit.replay.SIZES", (1,))
    make_statistics_quick(monkeypatch)
    folder, _ = finished
    card = read_card(folder)
    assert "mean absolute error on the test set" in card["results"]
    text = (folder / "privacy_card.md").read_text("utf-8")
    assert "cost, clamped to 100 to 300; outputs −1 to 1" in text and "number of outputs" in text
    assert "constant guess 0.0000" in card["results"]["R², test"]
    assert audit_folder(folder, ["step"], runs=12).ledger.passed
    code, printed = call_flat("export", folder, "--out", tmp_path / "model.pt2")
    assert code == 0 and "target: cost, clamped to 100 to 300" in printed
    write_page([folder], tmp_path / "page.html")
    assert "1 − mean absolute error ÷ range" in (tmp_path / "page.html").read_text("utf-8")


def test_a_validation_split_is_judged_and_marked(tmp_path):
    path, schema = _write(tmp_path)
    words = [
        *flags(QUICK),
        "--validation-size=40",
        "--eval-on=validation",
        "--out",
        str(tmp_path / "run"),
    ]
    code, text = call_flat("train", "--data", path, "--target", "cost", "--schema", schema, *words)
    assert code == 0, text
    assert re.search(r"scores on the validation set, which ε .* mean absolute error .* root", text)
    assert "accuracy" not in text
    card = read_card(tmp_path / "run")
    assert card["assumed_public"]["data set"]["value"] == "costs.csv"
    assert "this card: results; all of scores.json" in card["not_private"]


@pytest.mark.parametrize("method", ["dp-kfc", "dp-adam"])
def test_other_methods_take_the_likelihood_of_a_number(tmp_path, method):
    path, schema = _write(tmp_path)
    config = own_config(path, schema, tmp_path / "run", method=method)
    assert config.preconditioner.likelihood == "gaussian"
    assert run(config).steps == 2


def test_images_and_texts_may_have_numbers_too(tmp_path):
    folder = write_images(tmp_path / "pets", 20)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.*"))
    rows = [[name, 100 + 10 * row] for row, name in enumerate(names)]
    table = write_rows(tmp_path / "labels.csv", rows, ["file", "cost"])
    bounds = Schema(target="cost", target_bounds=(100, 300), images=ImageForm(size=16))
    labels = encode_folder(folder, bounds, table).labels
    torch.testing.assert_close(labels, torch.linspace(-1, 0.9, 20))
    (folder / names[3]).write_text("no image")
    broken = encode_folder(folder, bounds, table)
    assert broken.labels.isnan().nonzero().flatten().tolist() == [3]
    texts = write_texts(tmp_path / "notes.jsonl", 10)
    form = replace(bounds.text, key="note", buckets=16)
    schema = replace(bounds, target="id", target_bounds=(0, 4), text=form)
    assert encode_texts(texts, schema).labels[-2:].tolist() == [1, 1]
    path = tmp_path / "bounds.toml"
    path.write_text('target = "cost"\ntarget_bounds = [0, 1]\n', "utf-8")
    with pytest.raises(ConfigError, match="a number for each image; give --label-file"):
        recipe_of(own_config(folder, path))


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("[100, 300]", "[300, 100]", r"target_bounds must be \[least, greatest\]"),
        ("[100, 300]", "[100]", "target_bounds must be"),
        ("[100, 300]", "[100, inf]", "target_bounds must be"),
        ("[100, 300]", "[-1e308, 1e308]", "target_bounds must be"),
        ("[100, 300]", '["a"]', "target_bounds must be a list of numbers"),
        ("target_bounds", 'classes = ["a", "b"]\ntarget_bounds', "exclude each other"),
        ("target_bounds = [100, 300]", "", "or give target_bounds of a number"),
    ],
)
def test_a_wrong_target_is_one_clear_error(tmp_path, before, after, message):
    path, schema = _write(tmp_path, SCHEMA.replace(before, after, 1))
    with pytest.raises(ConfigError, match=message) as caught:
        recipe_of(own_config(path, schema))
    assert len(str(caught.value)) - len(str(schema)) < 160


def test_a_file_without_a_number_is_one_error(finished, tmp_path):
    folder, _ = finished
    new = write_rows(tmp_path / "new.csv", [[20, "?"]], ["age", "cost"])
    code, text = call_flat("evaluate", folder, "--data", new)
    assert code == 2 and "no record has a known target" in text


def test_a_target_that_is_missing_has_no_loss_and_no_gradient():
    model = torch.nn.Linear(3, 1)
    inputs = torch.randn(4, 3)
    targets = torch.tensor([0.5, math.nan, -1.0, math.nan])
    losses = squared_error(model, (inputs, targets))
    expected = 0.5 * (model(inputs).squeeze(1) - targets).square()
    assert torch.equal(losses[[0, 2]], expected[[0, 2]]) and not losses[[1, 3]].any()
    losses[[1, 3]].sum().backward()
    assert not model.weight.grad.any()


@pytest.mark.parametrize("numbers", [[1.5, None, float("nan"), -2.0] * 5, [], [None], [7.0]])
def test_numbers_of_pyarrow_are_the_same_without_pandas(numbers):
    array = pa.array(numbers, pa.float64())
    for part in (array, array[1:], array[3:9], array[:0]):
        np.testing.assert_array_equal(to_numpy(part), part.to_numpy(zero_copy_only=False))
    missing = np.array([number is None for number in numbers], bool)
    known = np.array([0.0 if number is None else number for number in numbers])
    made = to_arrow(known, missing)
    made.validate(full=True)
    np.testing.assert_array_equal(to_numpy(made), to_numpy(array))
    assert made.null_count == array.null_count
