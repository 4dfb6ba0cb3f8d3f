"""Data files: IDX, npz, tables of sentences, public tensors. Damaged ones are refused in one line,
before anything is trained.
"""

import gzip
import io
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save

from dpkfc.app.datasets.cifar import read_cifar
from dpkfc.app.datasets.idx import read_idx
from dpkfc.app.datasets.text import SST2, load_texts
from dpkfc.app.pretraining import pretrain
from dpkfc.app.public_data import read_public_data
from dpkfc.app.run_config import make_config
from tests.app.files import idx_bytes, write_cifar
from tests.audit.fuzzing import PICKLE, Bomb, Mutator, Tally, no_pickle
from tests.audit.sizes import size


@pytest.fixture(autouse=True)
def _no_pickle(monkeypatch):
    no_pickle(monkeypatch)
    yield


def _images(count=3):
    return np.random.default_rng(0).integers(0, 256, (count, 4, 4), dtype=np.uint8)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_damaged_idx_files(tmp_path, packed, evidence):
    wrap = gzip.compress if packed else bytes
    seeds = [idx_bytes(_images()), idx_bytes(np.arange(5)), idx_bytes(_images(0)), PICKLE]
    inner, outer = Mutator(seeds, 1), Mutator([wrap(seed) for seed in seeds], 2)
    tally, path = Tally(), tmp_path / f"images{'.gz' if packed else ''}"
    turns = range(size(80, 12_000))
    contents = (wrap(inner.bytes()) if turn % 2 else outer.bytes() for turn in turns)
    tally.read(path, contents, lambda: read_idx(path, 3))
    tally.check(evidence, f"IDX files{', gzip' if packed else ''}", 80)


def _npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _zip(members, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def _npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def test_damaged_npz_files(tmp_path, evidence):
    write_cifar(tmp_path, 2, 1)
    x = np.zeros((2, 32, 32, 3), np.uint8)
    whole = [(tmp_path / "train.npz").read_bytes(), _npz(x=x, y=np.arange(2))]
    parts = [
        _npy(x),
        _npy(np.arange(2)),
        _npy(np.array([Bomb()], object)),
        _npy(np.zeros(2, "U3")),
        PICKLE,
    ]
    outer, inner = Mutator([*whole, PICKLE], 3), Mutator(parts, 4)
    tally, path = Tally(), tmp_path / "x.npz"
    for turn in range(size(120, 12_000)):
        if turn % 2:
            content = outer.bytes()
        else:
            method = outer.rng.choice(
                (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
            )
            names = outer.rng.sample(["x.npy", "y.npy", "delta.npy", "z.npy"], 2)
            pieces = {
                name: outer.rng.choice((inner.bytes, lambda: outer.rng.choice(parts)))()
                for name in names
            }
            content = _zip(pieces, method)
        path.write_bytes(content)
        tally.attempt(lambda: read_cifar(path), content, "x.npz")
    tally.check(evidence, "npz files", 120)


def test_an_array_of_objects_is_refused_by_its_header(tmp_path):
    path = tmp_path / "train.npz"
    bomb, labels = np.array([Bomb()], object), np.zeros(1, np.uint8)
    for arrays in ({"x": bomb, "y": labels}, {"x": np.zeros((1, 32, 32, 3)), "y": bomb}):
        path.write_bytes(_zip({f"{name}.npy": _npy(array) for name, array in arrays.items()}))
        with pytest.raises(
            ValueError,
            match=r"train\.npz: is not a whole npz file \(\w\.npy does not hold plain numbers: Obj",
        ):
            read_cifar(path)


TABLE = "sentence\tlabel\na fine film\t1\ndull\t0\nnot a word of it\t0\n"


def test_damaged_tables(tmp_path, evidence):
    (tmp_path / "sst2").mkdir()
    train, dev = tmp_path / "sst2" / "train.tsv.gz", tmp_path / "sst2" / "dev.tsv.gz"
    dev.write_bytes(gzip.compress(TABLE.encode()))
    other = "s\tl\nx\t-1\n" + "y\t" + "9" * 30 + "\n\u0661\t\u0661\n"
    inner, outer = (
        Mutator([TABLE.encode(), other.encode(), PICKLE], 7),
        Mutator([gzip.compress(TABLE.encode()), PICKLE], 8),
    )
    tally = Tally()

    def use():
        texts = load_texts(SST2, tmp_path).check("SST-2", num_classes=2)
        texts.tensors(lambda lines: torch.tensor([[len(line)] for line in lines]))

    for turn in range(size(120, 8_000)):
        content = gzip.compress(inner.bytes(), 1) if turn % 2 else outer.bytes()
        train.write_bytes(content)
        tally.attempt(use, content, "train.tsv.gz", "sst2/")
    tally.check(evidence, "tables of sentences", 120)


def test_damaged_public_tensors(tmp_path, evidence):
    """The safetensors file behind `public_data`, as curvature and as pre-training read it."""
    path, net = (
        tmp_path / "public.safetensors",
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)),
    )
    config = make_config(
        recipe="digits",
        pretrain_epochs=1,
        public_data=str(path),
        preconditioner="kfac",
        source="public",
    )
    rng, tally = Mutator([b""], 9).rng, Tally()

    def draw_tensor():
        shape = rng.choice(((4, 3, 2, 2), (4, 3, 2, 2), (0, 3, 2, 2), (4, 3, 2), (12,), ()))
        kinds = (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.uint8,
            torch.bool,
        )
        inputs = (
            torch.rand(shape, generator=torch.Generator().manual_seed(rng.randrange(9))) * 3
        ).to(rng.choice(kinds))
        labels = torch.full(
            rng.choice(((4,), (4,), (3,), (4, 1), (0,), ())), rng.choice((0, 1, 2, 7, -1))
        ).to(rng.choice(kinds))
        return save(
            {
                rng.choice(("inputs", "inputs", "x")): inputs,
                rng.choice(("labels", "labels", "y")): labels,
            }
        )

    def use():
        read_public_data(path, (3, 2, 2))
        pretrain(config, net, (3, 2, 2))

    mutator = Mutator(
        [save({"inputs": torch.rand(4, 3, 2, 2), "labels": torch.tensor([0, 1, 2, 0])}), PICKLE], 10
    )
    for turn in range(size(60, 4_000)):
        content = mutator.bytes() if turn % 2 else draw_tensor()
        path.write_bytes(content)
        tally.attempt(use, content, "public.safetensors")
    tally.check(evidence, "public tensors", 60)
