"""CIFAR-10: 50,000 colour images and a five-layer CNN with GroupNorm (522,122 parameters)."""

from __future__ import annotations

from dpkfc.recipes.base import image_recipe
from dpkfc.recipes.datasets import Normalisation, Pixels, load_pixels
from dpkfc.recipes.datasets.sources import CIFAR10
from dpkfc.recipes.models import cifar_cnn

__all__ = ["NORMALISATION", "RECIPE", "load_cifar10"]

NORMALISATION = Normalisation(
    (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), origin="published mean and deviation of the set"
)


def load_cifar10(data_dir: str | None) -> Pixels:
    """The images, from a folder or through Hugging Face."""
    return load_pixels(CIFAR10, data_dir)


RECIPE = image_recipe(
    name="cifar10-cnn",
    title="CIFAR-10",
    pixels=load_cifar10,
    build=cifar_cnn,
    image_shape=(32, 32, 3),
    num_classes=10,
    normalisation=NORMALISATION,
)
