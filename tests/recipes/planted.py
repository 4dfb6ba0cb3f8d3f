"""Tiny planted copies of the data sets that recipes read, in the documented formats."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import zipfile
from pathlib import Path

import numpy as np

from tests.recipes.files import write_cifar, write_mnist

WORDS = ("a fine film", "dull and slow", "I'd see it again<br />twice", "bad")


def _csv(rows: list[tuple], header: tuple[str, ...] | None = None) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([header, *rows] if header else rows)
    return text.getvalue().encode()


def _texts(count: int, classes: int, first: int = 0) -> list[tuple]:
    return [(i % classes + first, f"{WORDS[i % len(WORDS)]} {i}") for i in range(count)]


def write_imdb(root: Path, count: int = 24) -> None:
    for name in ("train", "test"):
        rows = [(label, 9, f"{i}_9", text) for i, (label, text) in enumerate(_texts(count, 2))]
        _put(root / "imdb" / f"{name}.csv.bz2", bz2.compress(_csv(rows, ("label", "rating", "id", "text"))))


def write_ag_news(root: Path, count: int = 24) -> None:
    train = _csv([*_texts(count, 4, 1), (1, "seen in the test file")], ("label", "description"))
    test = _csv([(label, "a title", text + " tested") for label, text in _texts(8, 4, 1)] + [(2, "t", "seen in the test file")])
    _put(root / "ag_news" / "train_subset.csv.gz", gzip.compress(train))
    _put(root / "ag_news" / "test.csv.gz", gzip.compress(test))


def write_stackoverflow(root: Path, count: int = 40) -> None:
    _put(root / "stackoverflow" / "titles.csv.gz", gzip.compress(_csv(_texts(count, 20, 1), ("label", "title"))))


def write_sst2(root: Path, count: int = 24) -> None:
    for name in ("train", "dev"):
        lines = "".join(f"{text}\t{label}\n" for label, text in _texts(count, 2))
        _put(root / "sst2" / f"{name}.tsv.gz", gzip.compress(("sentence\tlabel\n" + lines).encode()))


def write_e2e(root: Path, count: int = 24) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("trainset", "devset", "testset_w_refs"):
            rows = [(f"name[The {i}], area[city centre]", f"The {i} is in the centre, é.") for i in range(count)]
            archive.writestr(f"e2e-dataset/{name}.csv", _csv(rows, ("mr", "ref")))
    _put(root / "e2e" / "e2e-dataset.zip", packed.getvalue())


def write_dart(root: Path, count: int = 12) -> None:
    dev = [
        {"tripleset": [["A", "NEAR", str(i)], ["A", "IS", "b"]], "annotations": [{"text": f"A is near {i}."}, {"text": "b"}]}
        for i in range(count)
    ]
    triples = "<modifiedtripleset><mtriple>A | IS | b</mtriple></modifiedtripleset>"
    entry = f"<entry>{triples}<lex>A is b.</lex><lex>b it is</lex></entry>"
    test = f"<benchmark><entries>{entry * 4}</entries></benchmark>"
    _put(root / "dart" / "dart-v1.1.1-full-dev.json.gz", gzip.compress(json.dumps(dev).encode()))
    _put(root / "dart" / "dart-v1.1.1-full-test.xml.gz", gzip.compress(test.encode()))


def write_medmnist(root: Path, name: str, classes: int, channels: int = 1, count: int = 24) -> None:
    rng, arrays = np.random.default_rng(0), {}
    for split in ("train", "val", "test"):
        shape = (count, 28, 28) if channels == 1 else (count, 28, 28, channels)
        arrays[f"{split}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % classes).astype(np.uint8)[:, None]
    (root / "medmnist").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(root / "medmnist" / f"{name}.npz", **arrays)


def write_all(root: Path) -> Path:
    for write in (write_imdb, write_ag_news, write_stackoverflow, write_sst2, write_e2e, write_dart):
        write(root)
    write_mnist(root / "mnist")
    write_mnist(root / "fashion-mnist")
    write_cifar(root / "cifar10", train=24)
    for name, classes, channels in (("pneumoniamnist", 2, 1), ("breastmnist", 2, 1), ("pathmnist", 9, 3)):
        write_medmnist(root, name, classes, channels)
    return root


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
