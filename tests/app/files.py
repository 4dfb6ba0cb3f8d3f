"""Tiny data sets on disk for tests."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def encode_delta(images: np.ndarray) -> np.ndarray:
    """Return RGB images `[N, H, W, 3]` as the uint8 array `[3, N, H, W]` for `decode_delta`."""
    red, green, blue = np.moveaxis(images, -1, 0)
    planes = np.stack([green, red - green, blue - green])
    planes = np.diff(planes, axis=2, prepend=np.zeros_like(planes[:, :, :1]))
    return np.diff(planes, axis=3, prepend=np.zeros_like(planes[..., :1]))


def idx_bytes(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_idx(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_mnist(
    folder: Path, train: int = 40, test: int = 20, suffix: str = ".gz"
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for prefix, count in (("train", train), ("t10k", test)):
        arrays[f"{prefix}-images-idx3-ubyte"] = rng.integers(
            0, 256, (count, 28, 28), dtype=np.uint8
        )
        arrays[f"{prefix}-labels-idx1-ubyte"] = np.arange(count, dtype=np.uint8) % 10
    for name, array in arrays.items():
        write_idx(folder / f"{name}{suffix}", array)
    return arrays


def write_cifar(folder: Path, train: int = 12, test: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    images = {}
    for name, count in (("train", train), ("test", test)):
        images[name] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        np.savez_compressed(folder / f"{name}.npz", delta=encode_delta(images[name]), y=labels)
    return images
