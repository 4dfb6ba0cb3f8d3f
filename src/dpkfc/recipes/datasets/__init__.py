"""Readers of the data sets that recipes train on, each with one clear error for a missing or damaged file."""

from __future__ import annotations

from dpkfc.recipes.datasets.cifar import read_cifar
from dpkfc.recipes.datasets.digits import read_digits
from dpkfc.recipes.datasets.errors import DatasetError
from dpkfc.recipes.datasets.idx import read_idx
from dpkfc.recipes.datasets.images import ImageSet, Normalisation, Pixels
from dpkfc.recipes.datasets.sources import Source, load_pixels
from dpkfc.recipes.datasets.split import split

__all__ = [
    "DatasetError",
    "ImageSet",
    "Normalisation",
    "Pixels",
    "Source",
    "load_pixels",
    "read_cifar",
    "read_digits",
    "read_idx",
    "split",
]
