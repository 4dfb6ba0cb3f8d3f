"""Recipes of images: networks, and linear heads on features that need no data."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from dpkfc.app.datasets.digits import read_digits
from dpkfc.app.datasets.examples import ExampleSet
from dpkfc.app.datasets.pixels import Normalisation
from dpkfc.app.datasets.sources import (
    BREAST,
    CIFAR10,
    CIFAR100_TASK,
    FASHION_MNIST,
    MNIST,
    PATH,
    PNEUMONIA,
    SVHN,
    UTKFACE,
    Source,
    load_pixels,
)
from dpkfc.app.models import (
    cifar_cnn,
    cifar_vit,
    digits_cnn,
    linear_from_zero,
    mnist_cnn,
    mnist_mlp,
    mnist_vit,
    resnet20,
    wide_resnet,
)
from dpkfc.app.pretrained import check_timm, timm_model
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


def _source_recipe(name: str, source: Source, **rest: Any) -> Recipe:
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


MNIST_CNN = _source_recipe(
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
# MNIST: a network of two hidden layers (784-256-256-10, 269,322 parameters).

MNIST_MLP = replace(MNIST_CNN, name="mnist-mlp", build=mnist_mlp)


# --------------------------------------------------------------------------------------------------
# MNIST: a transformer of two blocks on 16 patches, 14 linear layers, as in the DP-KFC paper's
# tracking study.

MNIST_VIT = replace(MNIST_CNN, name="mnist-vit", build=mnist_vit)


# --------------------------------------------------------------------------------------------------
# Fashion-MNIST: 60,000 images of clothes and the same CNN as for MNIST.


FASHION_MNIST_CNN = _source_recipe(
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


CIFAR10_CNN = _source_recipe(
    "cifar10-cnn",
    CIFAR10,
    build=cifar_cnn,
    image_shape=(32, 32, 3),
    num_classes=10,
    normalisation=CIFAR10_NORMALISATION,
)


# --------------------------------------------------------------------------------------------------
# CIFAR-10: WRN-16-4 trained from scratch with several views of every image (De et al. 2022),
# 2,753,818 parameters.

CIFAR10_WRN = replace(CIFAR10_CNN, name="cifar10-wrn", build=wide_resnet)


# --------------------------------------------------------------------------------------------------
# CIFAR-10: ResNet-20 with GroupNorm, trained from scratch (269,722 parameters).

CIFAR10_RESNET20 = replace(CIFAR10_CNN, name="cifar10-resnet20", build=resnet20)


# --------------------------------------------------------------------------------------------------
# CIFAR-10: a small vision transformer trained from scratch (four blocks of width 128 on 64
# patches).

CIFAR10_VIT = replace(CIFAR10_CNN, name="cifar10-vit", build=cifar_vit)


# --------------------------------------------------------------------------------------------------
# What the recipes that fine-tune a vision model of timm share.

_IMAGENET = Normalisation(
    (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), origin="published with the pretrained weights"
)


def fine_tuned_recipe(name: str, source: Source, num_classes: int, model: str, side: int) -> Recipe:
    """Return a recipe of 32×32 images for a model of timm, all of whose weights are trained.

    `pretrained` takes a file of weights.

    Args:
        name: of the recipe.
        source: of the images.
        num_classes: of their labels.
        model: of timm.
        side: of the images that the model takes.
    """
    build = partial(timm_model, model, side, num_classes)
    recipe = _source_recipe(
        name,
        source,
        build=build,
        image_shape=(32, 32, 3),
        num_classes=num_classes,
        normalisation=_IMAGENET,
    )
    constants = {
        **recipe.constants,
        "pretrained weights": (f"timm {model}", "published; trained on ImageNet"),
    }
    read = recipe.load

    def load(config: RunConfig) -> ExampleSet:
        # The images take half a minute.
        check_timm(model, config.pretrained)
        return read(config)

    recipe = replace(recipe, constants=constants, heavy=True, load=load)

    def variant(weights: str) -> Recipe:
        return replace(recipe, build=partial(build, weights))

    return replace(recipe, variant=variant)


_SMALL_VIT = ("vit_small_patch16_224", 224)
_TINY_CROSSVIT = ("crossvit_tiny_240", 240)


# --------------------------------------------------------------------------------------------------
# CIFAR-10: ViT-S/16 from timm, pretrained on ImageNet, fine-tuned end to end on resized images.

CIFAR10_VIT_SMALL = fine_tuned_recipe("cifar10-vit-small", CIFAR10, 10, *_SMALL_VIT)


# --------------------------------------------------------------------------------------------------
# CIFAR-10: CrossViT-Tiny-240 from timm, pretrained on ImageNet, fine-tuned end to end on resized
# images.

CIFAR10_CROSSVIT = fine_tuned_recipe("cifar10-crossvit", CIFAR10, 10, *_TINY_CROSSVIT)


# --------------------------------------------------------------------------------------------------
# CIFAR-100: WRN-16-4 trained from scratch with several views of every image, 100 fine classes
# (2,776,948 parameters).


CIFAR100_WRN = _source_recipe(
    "cifar100-wrn",
    CIFAR100_TASK,
    build=partial(wide_resnet, 100),
    image_shape=(32, 32, 3),
    num_classes=100,
    normalisation=Normalisation(
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        origin="published mean and deviation of the set",
    ),
)


# --------------------------------------------------------------------------------------------------
# CIFAR-100: ViT-S/16 from timm, pretrained on ImageNet, fine-tuned end to end on resized images.

CIFAR100_VIT = fine_tuned_recipe("cifar100-vit", CIFAR100_TASK, 100, *_SMALL_VIT)


# --------------------------------------------------------------------------------------------------
# CIFAR-100: CrossViT-Tiny-240 from timm, pretrained on ImageNet, fine-tuned end to end on resized
# images.

CIFAR100_CROSSVIT = fine_tuned_recipe("cifar100-crossvit", CIFAR100_TASK, 100, *_TINY_CROSSVIT)


# --------------------------------------------------------------------------------------------------
# SVHN: WRN-16-4 on digits of house numbers, trained from scratch with several views of every image
# (2,753,818 parameters).


# Constants of another set: nothing is fitted to this one, and public images of CIFAR come in them
# too.
OF_CIFAR10 = replace(CIFAR10_NORMALISATION, origin="published mean and deviation of CIFAR-10")


SVHN_WRN = _source_recipe(
    "svhn-wrn",
    SVHN,
    build=wide_resnet,
    image_shape=(32, 32, 3),
    num_classes=10,
    normalisation=OF_CIFAR10,
)


# --------------------------------------------------------------------------------------------------
# UTKFace: ResNet-20 with GroupNorm on faces of 32×32, five classes of race, trained from scratch
# (269,397 parameters).
#
# The DP-NGD paper trains this network on this set and does not say which of its labels it predicts;
# that of five classes is taken.


UTKFACE_RESNET20 = _source_recipe(
    "utkface-resnet20",
    UTKFACE,
    build=partial(resnet20, 5),
    image_shape=(32, 32, 3),
    num_classes=5,
    normalisation=OF_CIFAR10,
)


# --------------------------------------------------------------------------------------------------
# What the MedMNIST recipes share: files, public constants, and the CNN of the MNIST recipe.


def medical_recipe(name: str, source: Source, num_classes: int, channels: int = 1) -> Recipe:
    """Return a recipe on 28×28 images of MedMNIST.

    With `validation_size` above 0 it gives the validation split of the data set.
    """
    # This is the convention of MedMNIST's own experiments.
    return _source_recipe(
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


# --------------------------------------------------------------------------------------------------
# PathMNIST: colour images of colon tissue, nine classes; the file `pathmnist.npz` is not carried
# along.

PATHMNIST_CNN = medical_recipe("pathmnist-cnn", PATH, num_classes=9, channels=3)

# All but the digits.
IMAGE_RECIPES = (
    MNIST_CNN,
    MNIST_MLP,
    MNIST_VIT,
    FASHION_MNIST_CNN,
    CIFAR10_CNN,
    CIFAR10_WRN,
    CIFAR10_RESNET20,
    CIFAR10_VIT,
    CIFAR10_VIT_SMALL,
    CIFAR10_CROSSVIT,
    CIFAR100_WRN,
    CIFAR100_VIT,
    CIFAR100_CROSSVIT,
    SVHN_WRN,
    UTKFACE_RESNET20,
    PNEUMONIAMNIST_CNN,
    BREASTMNIST_CNN,
    PATHMNIST_CNN,
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
    base = _source_recipe(
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
