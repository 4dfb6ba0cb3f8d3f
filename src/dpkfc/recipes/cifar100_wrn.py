"""CIFAR-100: WRN-16-4 trained from scratch with several views of every image, 100 fine classes (2,776,948 parameters)."""

from __future__ import annotations

from functools import partial

from dpkfc.recipes.base import image_recipe
from dpkfc.recipes.datasets import Normalisation, Pixels, load_pixels
from dpkfc.recipes.datasets.sources import CIFAR100_TASK
from dpkfc.recipes.models import wide_resnet

__all__ = ["RECIPE", "load_cifar100"]


def load_cifar100(data_dir: str | None) -> Pixels:
    """The images with their fine labels, from a folder or through Hugging Face."""
    return load_pixels(CIFAR100_TASK, data_dir)


RECIPE = image_recipe(
    name="cifar100-wrn",
    title="CIFAR-100",
    pixels=load_cifar100,
    build=partial(wide_resnet, 100),
    image_shape=(32, 32, 3),
    num_classes=100,
    normalisation=Normalisation(
        (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), origin="published mean and deviation of the set"
    ),
)
