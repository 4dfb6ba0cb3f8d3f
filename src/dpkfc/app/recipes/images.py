"""Recipes of images: networks, and linear heads on features that need no data."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from dpkfc.app.datasets.digits import read_digits
from dpkfc.app.datasets.pixels import Normalisation
from dpkfc.app.datasets.sources import (
    BREAST,
    CIFAR10,
    FASHION_MNIST,
    MNIST,
    PNEUMONIA,
    Source,
    load_pixels,
)
from dpkfc.app.models import cifar_cnn, digits_cnn, linear_from_zero, mnist_cnn
from dpkfc.app.recipes.recipe import Recipe, image_recipe
from dpkfc.app.run_config import RunConfig
from dpkfc.curvature.probes import Probe
from dpkfc.features import FeaturesOf, JoinedFeatures, Scattering, SyntheticEncoder, SyntheticImages


def source_recipe(name: str, source: Source, **rest: Any) -> Recipe:
    """Return a recipe on the images of a source; the rest is for `image_recipe`."""
    pixels = partial(load_pixels, source)
    return image_recipe(name=name, title=source.name, pixels=pixels, **rest)


def _map_range(channels: int) -> Normalisation:
    """Return the map of the format's range to [-1, 1], for which no data are read."""
    half = (0.5,) * channels
    return Normalisation(half, half, origin="the range of the format")


# --------------------------------------------------------------------------------------------------
# MNIST: 60,000 handwritten digits, and the CNN of the DP-KFC experiments (206,922 parameters).

MNIST_NORMALISATION = Normalisation(
    (0.1307,), (0.3081,), origin="published mean and deviation of the set"
)


MNIST_CNN = source_recipe(
    "mnist-cnn",
    MNIST,
    build=mnist_cnn,
    image_shape=(28, 28, 1),
    num_classes=10,
    normalisation=MNIST_NORMALISATION,
)


# --------------------------------------------------------------------------------------------------
# Digits: 1,437 real 8×8 images that come with scikit-learn, and a small CNN. Trains in seconds.


DIGITS = image_recipe(
    name="digits",
    title="digits",
    # They need no files.
    pixels=lambda data_dir: read_digits(),
    build=digits_cnn,
    image_shape=(8, 8, 1),
    num_classes=10,
    # Pixels run from 0 to 16: this maps the format's range to [-1, 1] and reads no data.
    normalisation=Normalisation((0.5,), (0.5,), scale=16.0, origin="the range of the format"),
)


# --------------------------------------------------------------------------------------------------
# Fashion-MNIST: 60,000 images of clothes and the same CNN as for MNIST.


FASHION_MNIST_CNN = source_recipe(
    "fashion-mnist-cnn",
    FASHION_MNIST,
    build=mnist_cnn,
    image_shape=(28, 28, 1),
    num_classes=10,
    normalisation=Normalisation(
        (0.2860,), (0.3530,), origin="published mean and deviation of the set"
    ),
)


# --------------------------------------------------------------------------------------------------
# CIFAR-10: 50,000 colour images and a five-layer CNN with GroupNorm (522,122 parameters).

CIFAR10_NORMALISATION = Normalisation(
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
    origin="published mean and deviation of the set",
)


CIFAR10_CNN = source_recipe(
    "cifar10-cnn",
    CIFAR10,
    build=cifar_cnn,
    image_shape=(32, 32, 3),
    num_classes=10,
    normalisation=CIFAR10_NORMALISATION,
)


# --------------------------------------------------------------------------------------------------
# What the MedMNIST recipes share: files, public constants, and the CNN of the MNIST recipe.


def medical_recipe(name: str, source: Source, num_classes: int, channels: int = 1) -> Recipe:
    """Return a recipe on 28×28 images of MedMNIST.

    With `validation_size` above 0 it gives the validation split of the data set.
    """
    # This is the convention of MedMNIST's own experiments.
    return source_recipe(
        name,
        source,
        build=partial(mnist_cnn, num_classes, channels),
        image_shape=(28, 28, channels),
        num_classes=num_classes,
        normalisation=_map_range(channels),
    )


# --------------------------------------------------------------------------------------------------
# PneumoniaMNIST: 4,708 chest X-rays of children, pneumonia or not, and the CNN of the MNIST recipe.

PNEUMONIAMNIST_CNN = medical_recipe("pneumoniamnist-cnn", PNEUMONIA, num_classes=2)


# --------------------------------------------------------------------------------------------------
# BreastMNIST: 546 ultrasound images, malignant or not. So few examples leave little accuracy at a
# small ε.

BREASTMNIST_CNN = medical_recipe("breastmnist-cnn", BREAST, num_classes=2)


# Without the digits and the linear heads.
IMAGE_RECIPES = (
    MNIST_CNN,
    FASHION_MNIST_CNN,
    CIFAR10_CNN,
    PNEUMONIAMNIST_CNN,
    BREASTMNIST_CNN,
)


# --------------------------------------------------------------------------------------------------
# Image tasks with features that need no data: scattering, an encoder of synthetic images, a head.
#
# Neither filters, weights nor scales have seen a private or public image. Pixels are mapped from
# the range of their format, not by means of the data set.


class LinearHead(nn.Module):
    """One linear layer on features, zero at first."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = linear_from_zero(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, classes]` of features `[B, d]` of any precision."""
        logits: Tensor = self.linear(x.to(self.linear.weight.dtype))
        return logits


def image_features(shape: tuple[int, int, int], pool: int = 2) -> JoinedFeatures:
    """Return the features of images `(channels, height, width)`: both maps."""
    return JoinedFeatures((Scattering(shape), SyntheticEncoder(shape, pool=pool)))


def use_features(recipe: Recipe, settings: JoinedFeatures) -> Recipe:
    """Return a recipe of images whose model is a linear head on features."""
    (size,) = settings.feature_shape
    facts = {
        "features": ("wavelet scattering, and an encoder of synthetic images", "no data"),
        "scales of the features": (f"{settings.size:,} synthetic images", "no data"),
    }

    def probe(config: RunConfig) -> Probe:
        return FeaturesOf(settings, SyntheticImages(settings.shape))

    return replace(
        recipe,
        features=settings,
        build=partial(LinearHead, size, recipe.num_classes),
        input_shape=(size,),
        constants={**recipe.constants, **facts},
        probe=probe,
        reason="the default: a linear head on features without data; docs/results.md",
    )


def feature_recipe(
    name: str,
    source: Source,
    image_shape: tuple[int, int, int],
    num_classes: int,
    pool: int = 2,
) -> Recipe:
    """Return a recipe of a linear head on features without data.

    Args:
        name: of the recipe.
        source: of the images.
        image_shape: height, width, channels.
        num_classes: of their labels.
        pool: cells a side of the encoder's features.
    """
    height, width, channels = image_shape
    base = source_recipe(
        name,
        source,
        build=nn.Identity,
        image_shape=image_shape,
        num_classes=num_classes,
        normalisation=_map_range(channels),
    )
    return use_features(base, image_features((channels, height, width), pool))


MNIST_HEAD = replace(
    feature_recipe("mnist", MNIST, (28, 28, 1), 10),
    reason="the default: whitening was level with dp-sgd on validation in half the epochs",
)
FASHION_MNIST_HEAD = replace(
    feature_recipe("fashion-mnist", FASHION_MNIST, (28, 28, 1), 10),
    reason="the default: whitening was ahead of dp-sgd on validation; docs/results.md",
)
CIFAR10_HEAD = replace(
    feature_recipe("cifar10", CIFAR10, (32, 32, 3), 10, pool=4),
    reason=FASHION_MNIST_HEAD.reason,
)
PNEUMONIAMNIST_HEAD = feature_recipe("pneumoniamnist", PNEUMONIA, (28, 28, 1), 2)
BREASTMNIST_HEAD = feature_recipe("breastmnist", BREAST, (28, 28, 1), 2)
