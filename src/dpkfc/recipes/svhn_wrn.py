"""SVHN: WRN-16-4 on digits of house numbers, trained from scratch with several views of every image (2,753,818 parameters)."""

from __future__ import annotations

from dataclasses import replace

from dpkfc.recipes.base import image_recipe
from dpkfc.recipes.cifar10_cnn import NORMALISATION
from dpkfc.recipes.datasets import Pixels, load_pixels
from dpkfc.recipes.datasets.svhn import SVHN
from dpkfc.recipes.models import wide_resnet

__all__ = ["OF_CIFAR10", "RECIPE"]

# Constants of another set: nothing is fitted to this one, and public images of CIFAR come in them too.
OF_CIFAR10 = replace(NORMALISATION, origin="published mean and deviation of CIFAR-10")


def _pixels(data_dir: str | None) -> Pixels:
    return load_pixels(SVHN, data_dir)


RECIPE = image_recipe(
    name="svhn-wrn",
    title="SVHN",
    pixels=_pixels,
    build=wide_resnet,
    image_shape=(32, 32, 3),
    num_classes=10,
    normalisation=OF_CIFAR10,
)
