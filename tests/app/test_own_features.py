"""Own images become features that need no data, in training, predictions and exports alike."""

import csv

import pytest
import torch

from dpkfc.app.owndata.predictions import export_model, load_run, read_records
from dpkfc.app.owndata.recipes import own_recipe
from dpkfc.app.recipes import recipe
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import run
from tests.app.own_files import write_images

SETTINGS = {
    "steps": 2,
    "expected_batch_size": 8,
    "epsilon": 3.0,
    "accountant": "rdp",
    "max_physical_batch_size": 0,
}


def settings_of(folder, images):
    schema = folder.parent / "schema.toml"
    schema.write_text(f"[images]\n{images}", "utf-8")
    return {"data": str(folder), "schema": str(schema), "recipe": "own-images", **SETTINGS}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder of images, and the folder of a run on them."""
    place = tmp_path_factory.mktemp("features")
    folder = write_images(place / "pets", 40)
    chosen = settings_of(folder, "size = 16\n")
    assert run(run_config({**chosen, "out": str(place / "run")})).steps == 2
    return folder, place / "run"


def test_a_batch_that_is_too_large_is_refused_before_features(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "build_features", None)
    config = run_config({**settings_of(write_images(tmp_path / "pets", 40), ""), "steps": 1})
    for size in (100, 4):
        chosen = config.change(expected_batch_size=size)
        with pytest.raises((ConfigError, TypeError)) as caught:
            own_recipe(chosen).data(chosen, is_training=True)
        assert ("expected_batch_size = 100 is more" in str(caught.value)) == (size == 100)


@pytest.mark.slow
def test_a_folder_is_trained_predicted_and_exported_by_its_features(
    finished,
):
    folder, out = finished
    trained = load_run(out)
    assert trained.recipe.features is not None
    assert trained.recipe.input_shape == trained.recipe.features.feature_shape
    records = read_records(trained, folder, out)
    outputs = trained.model(records.inputs)
    path = export_model(trained, out, "torch")
    program = torch.export.load(path).module()
    assert trained.recipe.read is not None
    found = program(trained.recipe.read(folder).inputs)
    # Features of the run are in half precision.
    torch.testing.assert_close(found, outputs, rtol=0.02, atol=0.05)
    card = (out / "privacy_card.md").read_text("utf-8")
    assert "an encoder of synthetic images" in card


def test_the_network_and_large_images_learn_from_pixels(tmp_path):
    folder = write_images(tmp_path / "pets", 8)
    for images in ('size = 16\nfeatures = "network"\n', "size = 65\n"):
        recipe = own_recipe(run_config(settings_of(folder, images)))
        assert recipe.features is None and len(recipe.input_shape) == 3


@pytest.mark.parametrize("images", ['features = "deep"\n', 'size = 65\nfeatures = "synthetic"\n'])
def test_features_that_do_not_fit_are_refused(images, tmp_path):
    folder = write_images(tmp_path / "pets", 8)
    with pytest.raises(ConfigError, match="features must be synthetic"):
        own_recipe(run_config(settings_of(folder, images)))


def test_predictions_name_each_file(finished, tmp_path):
    from tests.command_line import call

    folder, trained = finished
    out = tmp_path / "predictions.csv"
    words = ["predict", str(trained), "--data", str(folder), "--out", str(out)]
    result = call(*words)
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 40
