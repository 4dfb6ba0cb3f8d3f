"""UTKFace: ResNet-20 with GroupNorm on faces of 32×32, five classes of race, trained from scratch (269,397 parameters).

The DP-NGD paper trains this network on this set and does not say which of its labels it predicts; that of five classes is taken.
"""

from __future__ import annotations

from functools import partial

from dpkfc.recipes.base import image_recipe
from dpkfc.recipes.datasets import Pixels, load_pixels
from dpkfc.recipes.datasets.utkface import UTKFACE
from dpkfc.recipes.models import resnet20
from dpkfc.recipes.svhn_wrn import OF_CIFAR10

__all__ = ["RECIPE"]


def _pixels(data_dir: str | None) -> Pixels:
    return load_pixels(UTKFACE, data_dir)


RECIPE = image_recipe(
    name="utkface-resnet20",
    title="UTKFace",
    pixels=_pixels,
    build=partial(resnet20, 5),
    image_shape=(32, 32, 3),
    num_classes=5,
    normalisation=OF_CIFAR10,
)
