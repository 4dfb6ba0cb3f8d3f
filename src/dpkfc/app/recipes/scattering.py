"""Image tasks whose features are fixed: scattering, with scales of dead leaves, and a linear head.

Neither the filters nor the scales see a private image. Pixels are mapped from the range of their
format, not by means of the data set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dpkfc.app.datasets.formats import Examples, ExampleSet, Normalisation, Pixels
from dpkfc.app.datasets.images import BREAST, PNEUMONIA
from dpkfc.app.datasets.sources import load_pixels
from dpkfc.app.recipes.images import load_cifar10, load_fashion_mnist, load_mnist
from dpkfc.app.recipes.recipe import Recipe, image_recipe
from dpkfc.app.settings import RunConfig
from dpkfc.curvature.probes import DeadLeaves, Probe
from dpkfc.features import FeaturesOf, Scattering, Standardised, standardise

# Synthetic images that give the scales, and their public seed.
SCALE_EXAMPLES = 4000
SCALE_SEED = 0
_CHUNK = 50


class LinearHead(nn.Module):
    """One linear layer on flattened features, zero at first."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, classes]` of features `[B, K, H, W]` of any precision."""
        logits: Tensor = self.linear(x.flatten(1).to(self.linear.weight.dtype))
        return logits


@functools.cache
def scattering_features(shape: tuple[int, int, int]) -> Standardised:
    """Return the features of images `(channels, height, width)`, scaled by dead leaves."""
    transform = Scattering(shape).build()
    return standardise(transform, DeadLeaves(shape), size=SCALE_EXAMPLES, seed=SCALE_SEED)


@torch.no_grad()
def _transform(features: nn.Module, examples: Examples) -> Examples:
    """Return features in half precision, which halves the memory of a training set."""
    parts = [features(chunk).half() for chunk in examples[0].split(_CHUNK)]
    return torch.cat(parts), examples[1]


def scattering_recipe(
    name: str,
    title: str,
    pixels: Callable[[str | None], Pixels],
    image_shape: tuple[int, int, int],
    num_classes: int,
) -> Recipe:
    """Return a recipe of a linear head on scattering features.

    Args:
        name: of the recipe.
        title: of the data set.
        pixels: reads its images.
        image_shape: height, width, channels.
        num_classes: of its labels.
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
    shape = (channels, height, width)
    settings = Scattering(shape)

    def load(config: RunConfig) -> ExampleSet:
        data = base.load(config)
        features = scattering_features(shape)
        validation = None
        if data.validation is not None:
            validation = _transform(features, data.validation)
        return replace(
            data,
            train=_transform(features, data.train),
            test=_transform(features, data.test),
            validation=validation,
        )

    def probe(config: RunConfig) -> Probe:
        return FeaturesOf(scattering_features(shape), DeadLeaves(shape))

    scales = f"{SCALE_EXAMPLES:,} dead leaves of seed {SCALE_SEED}"
    constants = {
        **base.constants,
        "features": (f"scattering, J = {settings.scales}, L = {settings.angles}", "fixed filters"),
        "scales of the features": (scales, "synthetic images"),
    }
    inputs = settings.feature_shape
    size = inputs[0] * inputs[1] * inputs[2]
    return replace(
        base,
        load=load,
        build=partial(LinearHead, size, num_classes),
        input_shape=inputs,
        constants=constants,
        probe=probe,
    )


MNIST = scattering_recipe("mnist", "MNIST", load_mnist, (28, 28, 1), 10)
FASHION_MNIST = scattering_recipe(
    "fashion-mnist", "Fashion-MNIST", load_fashion_mnist, (28, 28, 1), 10
)
CIFAR10 = scattering_recipe("cifar10", "CIFAR-10", load_cifar10, (32, 32, 3), 10)
PNEUMONIAMNIST = scattering_recipe(
    "pneumoniamnist", PNEUMONIA.name, partial(load_pixels, PNEUMONIA), (28, 28, 1), 2
)
BREASTMNIST = scattering_recipe(
    "breastmnist", BREAST.name, partial(load_pixels, BREAST), (28, 28, 1), 2
)
