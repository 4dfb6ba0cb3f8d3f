"""What the MedMNIST recipes share: files, public constants, and the CNN of the MNIST recipe."""

from __future__ import annotations

from functools import partial

from dpkfc.recipes.base import Recipe, image_recipe
from dpkfc.recipes.datasets import Normalisation, Pixels, Source, load_pixels
from dpkfc.recipes.models import mnist_cnn

__all__ = ["medical_recipe"]


def medical_recipe(name: str, source: Source, num_classes: int, channels: int = 1) -> Recipe:
    """A recipe on 28×28 images of MedMNIST; with `validation_size` above 0 it gives the set's own validation split."""

    def pixels(data_dir: str | None) -> Pixels:
        return load_pixels(source, data_dir)

    # The convention of MedMNIST's own experiments: the format's range goes to [-1, 1], and no data are read for it.
    half = (0.5,) * channels
    return image_recipe(
        name=name,
        title=source.name,
        pixels=pixels,
        build=partial(mnist_cnn, num_classes, channels),
        image_shape=(28, 28, channels),
        num_classes=num_classes,
        normalisation=Normalisation(half, half, origin="the range of the format"),
    )
