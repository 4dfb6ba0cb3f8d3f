"""Image tasks with features that need no data: scattering, an encoder of synthetic images, a head.

Neither filters, weights nor scales have seen a private or public image. Pixels are mapped from the
range of their format, not by means of the data set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from dpkfc.app.datasets.formats import Normalisation, Pixels
from dpkfc.app.datasets.images import BREAST, PNEUMONIA
from dpkfc.app.datasets.sources import load_pixels
from dpkfc.app.recipes.images import load_cifar10, load_fashion_mnist, load_mnist
from dpkfc.app.recipes.recipe import Recipe, image_recipe
from dpkfc.app.settings import RunConfig
from dpkfc.curvature.probes import Probe
from dpkfc.features import (
    FeaturesOf,
    JoinedFeatures,
    Scattering,
    SyntheticEncoder,
    SyntheticImages,
)


class LinearHead(nn.Module):
    """One linear layer on features, zero at first."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

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
    title: str,
    pixels: Callable[[str | None], Pixels],
    image_shape: tuple[int, int, int],
    num_classes: int,
    pool: int = 2,
) -> Recipe:
    """Return a recipe of a linear head on features without data.

    Args:
        name: of the recipe.
        title: of the data set.
        pixels: reads its images.
        image_shape: height, width, channels.
        num_classes: of its labels.
        pool: cells a side of the encoder's features.
    """
    height, width, channels = image_shape
    half = (0.5,) * channels
    base = image_recipe(
        name=name,
        title=title,
        pixels=pixels,
        build=nn.Identity,
        image_shape=image_shape,
        num_classes=num_classes,
        normalisation=Normalisation(half, half, origin="the range of the format"),
    )
    return use_features(base, image_features((channels, height, width), pool))


MNIST = feature_recipe("mnist", "MNIST", load_mnist, (28, 28, 1), 10)
FASHION_MNIST = feature_recipe(
    "fashion-mnist", "Fashion-MNIST", load_fashion_mnist, (28, 28, 1), 10
)
CIFAR10 = feature_recipe("cifar10", "CIFAR-10", load_cifar10, (32, 32, 3), 10, pool=4)
PNEUMONIAMNIST = feature_recipe(
    "pneumoniamnist", PNEUMONIA.name, partial(load_pixels, PNEUMONIA), (28, 28, 1), 2
)
BREASTMNIST = feature_recipe(
    "breastmnist", BREAST.name, partial(load_pixels, BREAST), (28, 28, 1), 2
)
