"""Readers of the data sets that recipes train on, each with one clear error for a missing or damaged file."""

from __future__ import annotations

from dpkfc.recipes.datasets.cifar import read_cifar
from dpkfc.recipes.datasets.digits import read_digits
from dpkfc.recipes.datasets.errors import DatasetError
from dpkfc.recipes.datasets.examples import Examples, ExampleSet
from dpkfc.recipes.datasets.idx import read_idx
from dpkfc.recipes.datasets.images import Normalisation, Pixels
from dpkfc.recipes.datasets.sources import Source, load_pixels
from dpkfc.recipes.datasets.split import split
from dpkfc.recipes.datasets.texts import Texts, load_texts

__all__ = [
    "DatasetError",
    "ExampleSet",
    "Examples",
    "Normalisation",
    "Pixels",
    "Source",
    "Texts",
    "load_pixels",
    "load_texts",
    "read_cifar",
    "read_digits",
    "read_idx",
    "split",
]
