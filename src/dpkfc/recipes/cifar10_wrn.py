"""CIFAR-10: WRN-16-4 trained from scratch with several views of every image (De et al. 2022), 2,753,818 parameters."""

from __future__ import annotations

from dpkfc.recipes.base import image_recipe
from dpkfc.recipes.cifar10_cnn import NORMALISATION, load_cifar10
from dpkfc.recipes.models import wide_resnet

__all__ = ["RECIPE"]

RECIPE = image_recipe(
    name="cifar10-wrn",
    title="CIFAR-10",
    pixels=load_cifar10,
    build=wide_resnet,
    image_shape=(32, 32, 3),
    num_classes=10,
    normalisation=NORMALISATION,
)
