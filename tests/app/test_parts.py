"""SVHN and UTKFace in their authors' formats, sets on the hub under other names, and sets that are
there in part.
"""

import gzip
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.io import savemat

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.sources import CIFAR100, load_pixels
from dpkfc.app.recipes.catalogue import find_recipe
from dpkfc.app.run_config import make_config
from dpkfc_papers.recipes.image_sets import CIFAR100_TASK, SVHN, UTKFACE, read_svhn, read_utkface
from tests.app.files import write_cifar
from tests.app.planted import write_faces, write_svhn, write_utkface


def test_svhn_is_read_with_its_zeros(tmp_path):
    images = write_svhn(tmp_path)
    pixels = load_pixels(SVHN, tmp_path)
    assert np.array_equal(pixels.train[0], images["train"]) and np.array_equal(
        pixels.test[0], images["test"]
    )
    assert pixels.train[1][:11].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    pixels.check("SVHN", (32, 32, 3), 10)


@pytest.mark.parametrize(
    "content, what",
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "lacks the arrays"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1), np.uint8)}, "`X` is float64"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1), np.uint8)}, "`y` is uint8"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((2, 1))}, "`y` is float64"),
    ],
)
def test_a_matlab_file_with_other_arrays_is_named(tmp_path, content, what):
    savemat(tmp_path / "train_32x32.mat", content)
    with pytest.raises(DatasetError, match=what):
        read_svhn(tmp_path / "train_32x32.mat")


def test_faces_are_split_by_a_public_permutation(tmp_path):
    images = write_utkface(tmp_path)
    first, again = load_pixels(UTKFACE, tmp_path), load_pixels(UTKFACE, tmp_path)
    assert (
        len(first.train[1]) == 36
        and len(first.test[1]) == 4
        and np.array_equal(first.test[0], again.test[0])
    )
    found = {
        image.tobytes(): race
        for part in (first.train, first.test)
        for image, race in zip(*part, strict=True)
    }
    assert found == {image.tobytes(): i % 5 for i, image in enumerate(images)}


def test_other_arrays_than_faces_are_named(tmp_path):
    np.savez(tmp_path / "subset.npz", delta=np.zeros((3, 2, 32, 32), np.uint8))
    with pytest.raises(DatasetError, match="lacks the arrays race"):
        read_utkface(tmp_path / "subset.npz")
    for delta, race, what in (
        ((3, 2, 16, 16), np.uint8, "`delta` is"),
        ((3, 2, 32, 32), np.float32, "`race` is float32"),
    ):
        np.savez(tmp_path / "subset.npz", delta=np.zeros(delta, np.uint8), race=np.zeros(2, race))
        with pytest.raises(DatasetError, match=what):
            read_utkface(tmp_path / "subset.npz")


def test_the_hub_is_asked_by_its_own_names(monkeypatch):
    asked = []
    row = {
        "img": np.zeros((32, 32, 3), np.uint8),
        "fine_label": 99,
        "image": np.ones((32, 32, 3), np.uint8),
        "label": 7,
    }

    def load_dataset(*names):
        asked.append(names)
        return {"train": [row], "test": [row]}

    monkeypatch.delenv("DPKFC_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_pixels(CIFAR100_TASK).train[1].tolist() == [99] and load_pixels(SVHN).train[
        1
    ].tolist() == [7]
    assert asked == [("uoft-cs/cifar100",), ("ufldl-stanford/svhn", "cropped_digits")]
    with pytest.raises(DatasetError, match="CIFAR-100 is not on this machine"):
        load_pixels(CIFAR100)  # public images of other tasks: those of the files, or none


def test_a_set_that_is_there_in_part_says_so_to_its_end(tmp_path):
    write_cifar(tmp_path / "cifar100", train=12)
    pixels = load_pixels(CIFAR100_TASK, tmp_path)
    assert (
        pixels.part == "12 of 50,000 training images"
        and pixels.source == f"files in cifar100/, {pixels.part}"
    )
    recipe = find_recipe("cifar100-wrn")
    for more in ({}, {"smoke": True}, {"validation_size": 4}):
        assert (
            recipe.data(make_config(recipe="cifar100-wrn", data_dir=str(tmp_path), **more)).part
            == pixels.part
        )
    write_cifar(tmp_path / "cifar10")
    assert (
        find_recipe("cifar10-cnn")
        .data(make_config(recipe="cifar10-cnn", data_dir=str(tmp_path)))
        .part
        == ""
    )


FACES = {"5_1_0_20170102.jpg.chip.jpg": 40, "30_0_3_20170101.jpg.chip.jpg": 200}


@pytest.mark.parametrize("kind", ["no archive", "cut", "no image", "no faces"])
def test_a_damaged_archive_is_one_line(tmp_path, kind):
    path = write_faces(tmp_path, {"note.txt": 1} if kind == "no faces" else FACES)
    whole = path.read_bytes()
    if kind == "no image":
        path.write_bytes(
            gzip.compress(gzip.decompress(whole).replace(b"\xff\xd8\xff", b"\x00\x00\x00"))
        )
    elif kind != "no faces":
        path.write_bytes(b"no archive" if kind == "no archive" else whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=r"UTKFace\.tar\.gz") as raised:
        read_utkface(path)
    assert "\n" not in str(raised.value)
