"""Data files: IDX, npz, tables of sentences, public tensors. Damaged ones are refused in one line,
before anything is trained.
"""

import functools
import gzip
import io
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from dpkfc.app.datasets.cifar import read_cifar
from dpkfc.app.datasets.idx import read_idx
from dpkfc.app.datasets.text import SST2, load_texts
from dpkfc.app.pretraining import pretrain
from dpkfc.app.public_data import read_public_data
from dpkfc.app.recipes.images import CIFAR10_CNN as CIFAR10
from dpkfc.app.recipes.images import MNIST_CNN as MNIST
from dpkfc.app.run_config import make_config
from tests.app.files import idx_bytes, write_cifar, write_mnist
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
    turns = range(size(200, 12_000))
    contents = (wrap(inner.bytes()) if turn % 2 else outer.bytes() for turn in turns)
    tally.read(path, contents, lambda: read_idx(path, 3))
    tally.check(evidence, f"IDX files{', gzip' if packed else ''}", 200)


def test_idx_files_of_any_shape(tmp_path, evidence):
    """Headers that promise more than there is, or nothing at all, or more than fits into a
    machine.
    """
    tally, path = Tally(), tmp_path / "images"

    @settings(max_examples=size(50, 2_000), derandomize=True, deadline=None, database=None)
    @given(
        st.lists(st.sampled_from([0, 1, 2, 28, 2**16, 2**31, 2**32 - 1]), min_size=3, max_size=3),
        st.binary(max_size=40),
    )
    def look(shape, content):
        path.write_bytes(
            b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in shape) + content
        )
        tally.attempt(lambda: read_idx(path, 3), (shape, content), "images")

    look()
    tally.check(evidence, "IDX files, any shape", 40)


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
    for turn in range(size(300, 12_000)):
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
    tally.check(evidence, "npz files", 300)


def test_an_array_of_objects_is_refused_by_its_header(tmp_path):
    path = tmp_path / "train.npz"
    bomb, labels = np.array([Bomb()], object), np.zeros(1, np.uint8)
    for arrays in ({"x": bomb, "y": labels}, {"x": np.zeros((1, 32, 32, 3)), "y": bomb}):
        path.write_bytes(_zip({f"{name}.npy": _npy(array) for name, array in arrays.items()}))
        with pytest.raises(
            ValueError,
            match=r"train\.npz: is not a whole npz file \(\w\.npy does not hold plain numbers\)",
        ):
            read_cifar(path)


def test_other_arrays(tmp_path, evidence):
    """Whole archives with labels that are text, tables, numbers with a point, or too many."""
    tally, path = Tally(), tmp_path / "train.npz"
    kinds = ["u1", "i8", "f8", "?", "U3", "O", "M8[s]", "c16", "V4", "u1,i4"]
    shapes = [(), (0,), (2,), (2, 1), (3, 2, 32, 32), (2, 32, 32, 3), (3, 0, 32, 32)]
    rng = Mutator([b""], 5).rng
    for _ in range(size(150, 4_000)):
        arrays = {
            name: np.zeros(rng.choice(shapes), rng.choice(kinds))
            for name in rng.sample(["x", "y", "delta", "z"], 2)
        }
        path.write_bytes(_npz(**arrays))
        tally.attempt(
            lambda: read_cifar(path),
            {k: (v.shape, v.dtype) for k, v in arrays.items()},
            "train.npz",
        )
    tally.check(evidence, "npz files, other arrays", 150)


def test_a_recipe_reads_damaged_sets(tmp_path, evidence):
    """All the way to the tensors: files that belong to different sets, labels out of range, nothing
    in them.
    """
    write_mnist(tmp_path / "mnist", 3, 2, suffix="")
    write_cifar(tmp_path / "cifar10", 3, 2)
    tally = Tally()
    files = sorted([*(tmp_path / "mnist").iterdir(), *(tmp_path / "cifar10").iterdir()])
    whole = {file: file.read_bytes() for file in files}
    mutator = Mutator(list(whole.values()), 6)
    for _ in range(size(150, 5_000)):
        file = mutator.rng.choice(files)
        mutator.seeds = [
            mutator.rng.choice((whole[file], mutator.rng.choice(list(whole.values()))))
        ]
        file.write_bytes(mutator.bytes())
        recipe = MNIST if file.parent.name == "mnist" else CIFAR10
        settings = make_config(recipe=recipe.name, data_dir=str(tmp_path))
        act = functools.partial(recipe.data, settings)
        tally.attempt(act, file.read_bytes(), file.name, "files in mnist/", "files in cifar10/")
        file.write_bytes(whole[file])
    tally.check(evidence, "image sets of a recipe", 150)


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

    for turn in range(size(300, 8_000)):
        content = gzip.compress(inner.bytes(), 1) if turn % 2 else outer.bytes()
        train.write_bytes(content)
        tally.attempt(use, content, "train.tsv.gz", "sst2/")
    tally.check(evidence, "tables of sentences", 300)


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
    for turn in range(size(150, 4_000)):
        content = mutator.bytes() if turn % 2 else draw_tensor()
        path.write_bytes(content)
        tally.attempt(use, content, "public.safetensors")
    tally.check(evidence, "public tensors", 150)
