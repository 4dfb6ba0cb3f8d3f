"""MNIST: 60,000 images of handwritten digits and the CNN of the DP-KFC experiments (206,922 parameters)."""

from __future__ import annotations

from dpkfc.recipes.base import image_recipe
from dpkfc.recipes.datasets import Normalisation, Pixels, load_pixels
from dpkfc.recipes.datasets.sources import MNIST
from dpkfc.recipes.models import mnist_cnn

__all__ = ["NORMALISATION", "RECIPE", "load_mnist"]

NORMALISATION = Normalisation((0.1307,), (0.3081,), origin="published mean and deviation of the set")


def load_mnist(data_dir: str | None) -> Pixels:
    """The images, from a folder or through Hugging Face."""
    return load_pixels(MNIST, data_dir)


RECIPE = image_recipe(
    name="mnist-cnn",
    title="MNIST",
    pixels=load_mnist,
    build=mnist_cnn,
    image_shape=(28, 28, 1),
    num_classes=10,
    normalisation=NORMALISATION,
)
