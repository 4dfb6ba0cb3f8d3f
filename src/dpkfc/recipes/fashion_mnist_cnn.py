"""Fashion-MNIST: 60,000 images of clothes and the same CNN as for MNIST."""

from __future__ import annotations

from dpkfc.recipes.base import image_recipe
from dpkfc.recipes.datasets import Normalisation, Pixels, load_pixels
from dpkfc.recipes.datasets.sources import FASHION_MNIST
from dpkfc.recipes.models import mnist_cnn

__all__ = ["RECIPE"]


def _pixels(data_dir: str | None) -> Pixels:
    return load_pixels(FASHION_MNIST, data_dir)


RECIPE = image_recipe(
    name="fashion-mnist-cnn",
    title="Fashion-MNIST",
    pixels=_pixels,
    build=mnist_cnn,
    image_shape=(28, 28, 1),
    num_classes=10,
    normalisation=Normalisation((0.2860,), (0.3530,), origin="published mean and deviation of the set"),
)
