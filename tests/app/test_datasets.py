"""Readers, where data comes from, and one clear error for each way in which a file can be wrong."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from dpkfc.app.datasets import sources
from dpkfc.app.datasets.cifar import decode_delta, read_cifar
from dpkfc.app.datasets.digits import read_digits
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.examples import ExampleSet, split, split_off_validation
from dpkfc.app.datasets.idx import read_idx
from dpkfc.app.datasets.pixels import Normalisation, Pixels
from dpkfc.app.datasets.sources import CIFAR10, MNIST, load_pixels
from dpkfc.app.recipes.catalogue import find_recipe
from dpkfc.app.run_config import make_config
from tests.app.files import write_cifar, write_idx, write_mnist


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_idx_file_is_read_exactly(tmp_path, suffix):
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 5), dtype=np.uint8)
    assert np.array_equal(read_idx(write_idx(tmp_path / f"images{suffix}", images), 3), images)


def test_the_delta_encoding_is_the_documented_one():
    delta = np.random.default_rng(0).integers(0, 256, (3, 2, 4, 4), dtype=np.uint8)
    decoded = decode_delta(delta)
    green = delta[0].astype(int).cumsum(1).cumsum(2)
    for channel, plane in ((0, 1), (1, None), (2, 2)):
        offset = 0 if plane is None else delta[plane].astype(int).cumsum(1).cumsum(2)
        assert np.array_equal(decoded[..., channel], (green + offset) % 256)


def test_cifar_is_read_from_delta_and_from_plain_pixels(tmp_path):
    images = write_cifar(tmp_path)["train"]
    found, labels = read_cifar(tmp_path / "train.npz")
    assert np.array_equal(found, images) and len(labels) == 12
    np.savez(tmp_path / "plain.npz", x=images, y=labels)
    assert np.array_equal(read_cifar(tmp_path / "plain.npz")[0], images)


@pytest.mark.parametrize(
    "content, what",
    [
        ({"y": np.zeros(2, np.uint8)}, "expected"),
        ({"delta": np.zeros((3, 2, 32, 32), np.uint8)}, "expected"),
        (
            {"delta": np.zeros((3, 2, 8, 8), np.uint8), "y": np.zeros(2, np.uint8)},
            "`delta` is uint8",
        ),
        ({"delta": np.zeros((3, 2, 32, 32)), "y": np.zeros(2, np.uint8)}, "`delta` is float64"),
        ({"x": np.zeros((3, 32, 32, 3), np.uint8), "y": np.zeros(2, np.uint8)}, "`x` is"),
        ({"x": np.array([{}]), "y": np.array([{}])}, "train.npz"),
    ],
)
def test_an_npz_file_with_other_arrays_is_named(tmp_path, content, what):
    np.savez(tmp_path / "train.npz", **content)
    with pytest.raises(DatasetError, match=what):
        read_cifar(tmp_path / "train.npz")


def test_data_dir_holds_the_folder_or_the_files(tmp_path):
    images = write_mnist(tmp_path / "mnist")["train-images-idx3-ubyte"]
    for root in (tmp_path, tmp_path / "mnist"):
        pixels = load_pixels(MNIST, root)
        assert (
            np.array_equal(pixels.train[0][..., 0], images) and pixels.source == "files in mnist/"
        )


def test_data_dir_wins_over_the_variable(tmp_path, monkeypatch):
    write_mnist(tmp_path / "a" / "mnist", train=10)
    write_mnist(tmp_path / "b" / "mnist", train=20)
    monkeypatch.setenv("DPKFC_DATA", str(tmp_path / "b"))
    assert len(load_pixels(MNIST).train[1]) == 20
    assert len(load_pixels(MNIST, tmp_path / "a").train[1]) == 10


def test_missing_files_are_listed(tmp_path):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DatasetError, match="lacks t10k-labels-idx1-ubyte.gz; put"):
        load_pixels(MNIST, tmp_path)
    with pytest.raises(DatasetError, match=r"lacks train\.npz, test\.npz"):
        load_pixels(CIFAR10, tmp_path)
    with pytest.raises(DatasetError, match="is not a folder"):
        load_pixels(CIFAR10, tmp_path / "none")


class _Hub(ModuleType):
    """A stand-in for the `datasets` package."""

    def __init__(self, column, images, error=None):
        super().__init__("datasets")
        self.asked = []

        def load_dataset(name):
            self.asked.append(name)
            if error is not None:
                raise error
            rows = [{column: image, "label": i % 10} for i, image in enumerate(images)]
            return {"train": rows, "test": rows[:2]}

        self.load_dataset = load_dataset


@pytest.mark.parametrize(
    "source, shape, repository",
    [(MNIST, (28, 28), "ylecun/mnist"), (CIFAR10, (32, 32, 3), "uoft-cs/cifar10")],
)
def test_without_files_the_hub_is_asked(monkeypatch, source, shape, repository):
    images = list(np.random.default_rng(0).integers(0, 256, (4, *shape), dtype=np.uint8))
    hub = _Hub(source.image_column, images)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    pixels = load_pixels(source)
    assert hub.asked == [repository] and repository in pixels.source
    assert np.array_equal(pixels.train[0].reshape(4, *shape), np.stack(images))
    pixels.check(source.name, (*shape[:2], 3 if len(shape) == 3 else 1), 10)


def test_without_a_network_or_a_cached_set_the_hub_is_not_asked(tmp_path, monkeypatch):
    """Its client would try for minutes."""
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr("dpkfc.app.datasets.sources._is_reachable", lambda: False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "DPKFC_DATA"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DatasetError, match="cannot be reached: put .* and give --data-dir"):
        load_pixels(MNIST)
    assert "datasets" not in sys.modules
    (tmp_path / "hub" / "datasets--ylecun--mnist").mkdir(parents=True)
    assert sources._is_cached("ylecun/mnist") and not sources._is_cached("ylecun/other")


def test_a_variable_without_the_set_falls_through_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("DPKFC_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", _Hub("image", [np.zeros((28, 28), np.uint8)] * 3))
    assert len(load_pixels(MNIST).train[1]) == 3


@pytest.mark.parametrize(
    "module", [None, _Hub("image", [], ConnectionError("no network\nlong trace"))]
)
def test_with_nothing_anywhere_one_line_says_how_to_get_it(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(DatasetError) as raised:
        load_pixels(MNIST)
    text = str(raised.value)
    for part in ("train-images-idx3-ubyte.gz and 3 more", "--data-dir", "ylecun/mnist"):
        assert part in text
    assert ("pip install datasets" in text) == (module is None), (
        "who has the package is not told to install it"
    )
    assert "\n" not in text and len(text) <= 200


def test_digits_are_split_the_same_way_every_time():
    first, second = read_digits(), read_digits()
    assert len(first.train[1]) == 1437 and len(first.test[1]) == 360
    assert np.array_equal(first.test[0], second.test[0])
    assert set(first.test[1]) == set(range(10))


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DatasetError, match="pip install scikit-learn"):
        read_digits()


def _pixels(**replaced):
    parts = {
        "images": np.zeros((4, 8, 8, 1), np.uint8),
        "labels": np.array([0, 1, 2, 9]),
        **replaced,
    }
    return Pixels(
        (parts["images"], parts["labels"]),
        (np.zeros((1, 8, 8, 1), np.uint8), np.zeros(1, int)),
        "here",
    )


@pytest.mark.parametrize(
    "replaced, what",
    [
        ({"labels": np.array([0, 1, 2, 10])}, "labels are not all 0 to 9"),
        ({"labels": np.array([0, -1, 2, 3])}, "labels are not all 0 to 9"),
        ({"labels": np.array([0, 1])}, "4 images and labels of shape"),
        ({"images": np.zeros((4, 9, 8, 1), np.uint8)}, "expected"),
        ({"images": np.zeros((0, 8, 8, 1), np.uint8), "labels": np.zeros(0, int)}, "no examples"),
    ],
)
def test_pixels_that_do_not_fit_are_refused(replaced, what):
    assert _pixels().check("digits", (8, 8, 1), 10)
    with pytest.raises(DatasetError, match=what):
        _pixels(**replaced).check("digits", (8, 8, 1), 10)


def test_normalisation_is_per_channel():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    found = Normalisation((0.1, 0.2, 0.3), (0.5, 1.0, 2.0)).apply(pixels)
    wanted = (pixels / 255 - np.array([0.1, 0.2, 0.3])) / np.array([0.5, 1.0, 2.0])
    assert found.dtype == torch.float32
    assert np.allclose(found.numpy(), np.moveaxis(wanted, -1, 1), atol=1e-6)


def test_the_validation_split_is_public_disjoint_and_complete():
    train = (torch.arange(50), torch.arange(50) % 10)
    (kept, kept_labels), (held, _) = split(train, 12, seed=3)
    assert len(held) == 12 and len(kept) == 38
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(50))
    assert torch.equal(kept_labels, kept % 10)
    assert torch.equal(split(train, 12, seed=3)[1][0], held)
    assert not torch.equal(split(train, 12, seed=4)[1][0], held)
    assert len(split(train, 0.1)[1][0]) == 5


@pytest.mark.parametrize("size", [0, 50, 51, -1, 1.0])
def test_a_split_that_leaves_nothing_is_refused(size):
    with pytest.raises(DatasetError, match="validation_size"):
        split((torch.arange(50), torch.arange(50)), size)


def test_no_validation_changes_nothing():
    images = ExampleSet(
        train=(torch.zeros(3, 1), torch.zeros(3)), test=(torch.zeros(1, 1), torch.zeros(1))
    )
    assert split_off_validation(images, 0) is images


def test_a_recipe_delivers_normalised_tensors(tmp_path):
    write_cifar(tmp_path / "cifar10")
    recipe = find_recipe("cifar10-cnn")
    data = recipe.data(make_config(recipe="cifar10-cnn", data_dir=str(tmp_path), validation_size=4))
    assert data.train[0].shape == (8, 3, 32, 32) and data.validation[0].shape == (4, 3, 32, 32)
    assert data.train[1].dtype == torch.int64 and data.test[0].shape == (6, 3, 32, 32)
