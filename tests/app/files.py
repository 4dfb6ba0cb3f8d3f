"""Tiny data sets on disk for tests."""

import gzip
import struct

import numpy as np


def encode_delta(images):
    """Return RGB images `[N, H, W, 3]` as the uint8 array `[3, N, H, W]` for `decode_delta`."""
    red, green, blue = np.moveaxis(images, -1, 0)
    planes = np.stack([green, red - green, blue - green])
    planes = np.diff(planes, axis=2, prepend=np.zeros_like(planes[:, :, :1]))
    return np.diff(planes, axis=3, prepend=np.zeros_like(planes[..., :1]))


def idx_bytes(array):
    return (
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_mnist(folder, train=40, test=20, suffix=".gz"):
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


def write_cifar(folder, train=12, test=6):
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    images = {}
    for name, count in (("train", train), ("test", test)):
        images[name] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        np.savez_compressed(folder / f"{name}.npz", delta=encode_delta(images[name]), y=labels)
    return images
