"""MedMNIST files: one `.npz` with images and labels of a training, a validation and a test split (Yang et al. 2023)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpkfc.recipes.datasets.errors import damaged
from dpkfc.recipes.datasets.npz import read_npz
from dpkfc.recipes.datasets.sources import Source

__all__ = ["BREAST", "PATH", "PNEUMONIA", "read_medmnist"]

_SPLITS = ("train", "test", "val")


def read_medmnist(path: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Training, test and validation split.

    Returns:
        Images uint8 `[N, H, W, C]` (C is 1 for grey ones) and labels `[N]` of each.

    Raises:
        DatasetError: the file cannot be read, lacks an array, or an array has another shape or type.
    """
    names = [f"{split}_{what}" for split in _SPLITS for what in ("images", "labels")]
    arrays = read_npz(path, names)
    if missing := [name for name in names if name not in arrays]:
        raise damaged(path, f"lacks the arrays {', '.join(missing)}")
    return tuple(_split(path, split, arrays) for split in _SPLITS)


def _split(path: Path, split: str, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise damaged(path, f"`{split}_images` is {images.dtype} {images.shape} where uint8 images were expected")
    if labels.dtype.kind not in "iu" or labels.shape not in ((len(images), 1), (len(images),)):
        raise damaged(path, f"`{split}_labels` is {labels.dtype} {labels.shape} where one whole number an image was expected")
    return (images[..., None] if images.ndim == 3 else images), labels.reshape(-1)


def _source(name: str) -> Source:
    def read(paths: list[Path]) -> tuple[Any, ...]:
        return read_medmnist(paths[0])

    return Source(name=name, folder="medmnist", files=(f"{name.lower()}.npz",), read=read)


PNEUMONIA, BREAST, PATH = _source("PneumoniaMNIST"), _source("BreastMNIST"), _source("PathMNIST")
