"""A file that unpacks to more than the limit is refused before the memory is taken, in every packed
format that is read.
"""

import bz2
import gzip
import io
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from dpkfc.app.datasets.cifar import read_cifar
from dpkfc.app.datasets.idx import read_idx
from dpkfc.app.datasets.sources import read_medmnist
from dpkfc.app.datasets.text import open_text
from dpkfc.app.datasets.unpacking import VARIABLE, UnpackedSizeError, check_unpacked_size
from dpkfc.app.metrics import Metrics, Row
from dpkfc_papers.recipes.image_sets import read_svhn, read_utkface
from dpkfc_papers.recipes.pairs import E2E

MIB = 1 << 20
UNPACKED = 64 * MIB


def npz(path):
    images = np.zeros(UNPACKED, np.uint8)
    np.savez_compressed(path, y=np.zeros(1, np.int64), x=images, train_images=images)


def e2e(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("e2e-dataset/trainset.csv", b"mr,ref\n" + bytes(UNPACKED))


def tar(path):
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("UTKFace/1_0_0_1.jpg")
        entry.size = UNPACKED
        archive.addfile(entry, io.BytesIO(bytes(UNPACKED)))


def read_text(path):
    with open_text(path) as file:
        file.read()


FORMATS = {
    "npz": ("train.npz", npz, read_cifar),
    "npz of another set": ("path.npz", npz, read_medmnist),
    "idx": (
        "images.gz",
        lambda path: path.write_bytes(gzip.compress(bytes(UNPACKED))),
        lambda path: read_idx(path, 3),
    ),
    "gzip": (
        "titles.csv.gz",
        lambda path: path.write_bytes(gzip.compress(bytes(UNPACKED))),
        read_text,
    ),
    "bzip2": (
        "train.csv.bz2",
        lambda path: path.write_bytes(bz2.compress(bytes(UNPACKED))),
        read_text,
    ),
    "zip": ("e2e-dataset.zip", e2e, lambda path: E2E.read([path])),
    "tar": ("UTKFace.tar.gz", tar, read_utkface),
    "MATLAB": (
        "train_32x32.mat",
        lambda path: savemat(
            path, {"X": np.zeros((1, 1, 1, UNPACKED), np.uint8), "y": [1]}, do_compression=True
        ),
        read_svhn,
    ),
}


@pytest.mark.quick("npz", "idx", "zip", "bzip2")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_unpacks_to_more_than_the_limit_is_refused_early(kind, tmp_path, monkeypatch):
    name, write, read = FORMATS[kind]
    path = tmp_path / name
    write(path)
    assert path.stat().st_size < MIB
    monkeypatch.setenv(VARIABLE, str(4 / 1024))
    tracemalloc.start()
    try:
        with pytest.raises(
            UnpackedSizeError,
            match=f"{name} unpacks to .* GiB or more, above 0.00390625 GiB; set {VARIABLE}",
        ):
            read(path)
        # scipy unpacks 128 KiB of a MATLAB file at once, up to 130 MiB, to read a header.
        assert kind == "MATLAB" or tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


def test_metrics_with_more_rows_than_the_limit_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "metrics.parquet"
    Metrics(rows=[Row(step=i, epsilon=0.5) for i in range(20_000)]).write(path)
    assert path.stat().st_size < MIB and len(Metrics.read(path).rows) == 20_000
    monkeypatch.setenv(VARIABLE, str(4 / 1024))
    with pytest.raises(UnpackedSizeError, match=VARIABLE):
        Metrics.read(path)


def test_the_variable_must_be_a_positive_number(monkeypatch):
    for wrong in ("", "much", "0", "-1", "nan"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(UnpackedSizeError, match="positive number of GiB"):
            check_unpacked_size(Path("a.npz"), 1)
