"""Tiny planted copies of the data sets that recipes read, in the documented formats."""

import bz2
import csv
import gzip
import io
import json
import tarfile
import zipfile

import numpy as np
from scipy.io import savemat

from tests.app.files import encode_delta, write_cifar, write_mnist

WORDS = ("a fine film", "dull and slow", "I'd see it again<br />twice", "bad")


def _csv(rows, header=None):
    text = io.StringIO(newline="")
    csv.writer(text).writerows([header, *rows] if header else rows)
    return text.getvalue().encode()


def _texts(count, classes, first=0):
    return [(i % classes + first, f"{WORDS[i % len(WORDS)]} {i}") for i in range(count)]


def write_imdb(root, count=24):
    for name in ("train", "test"):
        rows = [(label, 9, f"{i}_9", text) for i, (label, text) in enumerate(_texts(count, 2))]
        _write_file(
            root / "imdb" / f"{name}.csv.bz2",
            bz2.compress(_csv(rows, ("label", "rating", "id", "text"))),
        )


def write_ag_news(root, count=24):
    train = _csv([*_texts(count, 4, 1), (1, "seen in the test file")], ("label", "description"))
    test = _csv(
        [(label, "a title", text + " tested") for label, text in _texts(8, 4, 1)]
        + [(2, "t", "seen in the test file")]
    )
    _write_file(root / "ag_news" / "train_subset.csv.gz", gzip.compress(train))
    _write_file(root / "ag_news" / "test.csv.gz", gzip.compress(test))


def write_stackoverflow(root, count=40):
    _write_file(
        root / "stackoverflow" / "titles.csv.gz",
        gzip.compress(_csv(_texts(count, 20, 1), ("label", "title"))),
    )


def write_sst2(root, count=24):
    for name in ("train", "dev"):
        lines = "".join(f"{text}\t{label}\n" for label, text in _texts(count, 2))
        _write_file(
            root / "sst2" / f"{name}.tsv.gz", gzip.compress(("sentence\tlabel\n" + lines).encode())
        )


def write_e2e(root, count=24):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("trainset", "devset", "testset_w_refs"):
            rows = [
                (f"name[The {i}], area[city centre]", f"The {i} is in the centre, é.")
                for i in range(count)
            ]
            archive.writestr(f"e2e-dataset/{name}.csv", _csv(rows, ("mr", "ref")))
    _write_file(root / "e2e" / "e2e-dataset.zip", packed.getvalue())


def write_dart(root, count=12):
    dev = [
        {
            "tripleset": [["A", "NEAR", str(i)], ["A", "IS", "b"]],
            "annotations": [{"text": f"A is near {i}."}, {"text": "b"}],
        }
        for i in range(count)
    ]
    triples = "<modifiedtripleset><mtriple>A | IS | b</mtriple></modifiedtripleset>"
    entry = f"<entry>{triples}<lex>A is b.</lex><lex>b it is</lex></entry>"
    test = f"<benchmark><entries>{entry * 4}</entries></benchmark>"
    _write_file(
        root / "dart" / "dart-v1.1.1-full-dev.json.gz", gzip.compress(json.dumps(dev).encode())
    )
    _write_file(root / "dart" / "dart-v1.1.1-full-test.xml.gz", gzip.compress(test.encode()))


def write_medmnist(root, name, classes, channels=1, count=24):
    rng, arrays = np.random.default_rng(0), {}
    for split in ("train", "val", "test"):
        shape = (count, 28, 28) if channels == 1 else (count, 28, 28, channels)
        arrays[f"{split}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % classes).astype(np.uint8)[:, None]
    (root / "medmnist").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(root / "medmnist" / f"{name}.npz", **arrays)


def write_svhn(root, count=24):
    """As the authors' files: the images along the last axis, and ten for a zero."""
    rng, images = np.random.default_rng(2), {}
    (root / "svhn").mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        images[name] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
        savemat(
            root / "svhn" / f"{name}_32x32.mat",
            {"X": np.moveaxis(images[name], 0, 3), "y": labels},
            do_compression=True,
        )
    return images


def write_utkface(root, count=40):
    images = np.random.default_rng(3).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    (root / "utkface").mkdir(parents=True, exist_ok=True)
    arrays = {"age": np.arange(count), "gender": np.arange(count) % 2, "race": np.arange(count) % 5}
    arrays = {name: array.astype(np.uint8) for name, array in arrays.items()}
    np.savez_compressed(root / "utkface" / "subset.npz", delta=encode_delta(images), **arrays)
    return images


def write_faces(root, names):
    """The authors' archive: JPEG files of one grey each, 200 × 200."""
    from PIL import Image

    path = root / "utkface" / "UTKFace.tar.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, grey in names.items():
            packed = io.BytesIO()
            Image.new("RGB", (200, 200), (grey, grey, grey)).save(packed, "JPEG")
            entry = tarfile.TarInfo(f"UTKFace/{name}")
            entry.size = packed.tell()
            packed.seek(0)
            archive.addfile(entry, packed)
    return path


def write_all(root):
    for write in (
        write_imdb,
        write_ag_news,
        write_stackoverflow,
        write_sst2,
        write_e2e,
        write_dart,
    ):
        write(root)
    write_mnist(root / "mnist")
    write_mnist(root / "fashion-mnist")
    write_cifar(root / "cifar10", train=24)
    write_cifar(root / "cifar100", train=24)
    write_svhn(root)
    write_utkface(root)
    for name, classes, channels in (
        ("pneumoniamnist", 2, 1),
        ("breastmnist", 2, 1),
        ("pathmnist", 9, 3),
    ):
        write_medmnist(root, name, classes, channels)
    return root


def _write_file(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
