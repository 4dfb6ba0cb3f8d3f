"""Small random data for the examples, where no folder with the real ones is given."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

SIZES = {True: 256, False: 64}


def images(root: str, train: bool, shape: tuple[int, int, int]) -> TensorDataset:
    """Return MNIST from its four files in a folder, or random images of a shape in ten classes."""
    if root:
        part = "train" if train else "t10k"
        pixels = _read(Path(root) / f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
        labels = _read(Path(root) / f"{part}-labels-idx1-ubyte.gz", 8)
        return TensorDataset((pixels.float() / 255 - 0.1307) / 0.3081, labels.long())
    generator = torch.Generator().manual_seed(int(train))
    labels = torch.randint(10, (SIZES[train],), generator=generator)
    noise = torch.randn(SIZES[train], *shape, generator=generator)
    return TensorDataset(noise + labels.view(-1, 1, 1, 1) / 5 - 1, labels)


def _read(file: Path, header: int) -> Tensor:
    with gzip.open(file) as stream:
        return torch.frombuffer(bytearray(stream.read()[header:]), dtype=torch.uint8)


def texts(train: bool, classes: int, vocabulary: int = 100) -> list[tuple[Tensor, int]]:
    """Return (token ids of any length, label); 0 is left to padding."""
    generator = torch.Generator().manual_seed(int(train))
    records = []
    for i in range(SIZES[train]):
        label = i % classes
        length = int(torch.randint(3, 20, (1,), generator=generator))
        low = 1 + label * (vocabulary // (classes + 1))
        records.append((torch.randint(low, vocabulary, (length,), generator=generator), label))
    return records
