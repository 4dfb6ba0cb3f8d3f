"""Recipes of images that a table or figure of a paper needs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dpkfc.app.datasets.examples import ExampleSet
from dpkfc.app.datasets.pixels import Normalisation
from dpkfc.app.datasets.sources import CIFAR10, Source
from dpkfc.app.recipes.images import (
    CIFAR10_CNN,
    CIFAR10_NORMALISATION,
    MNIST_CNN,
    medical_recipe,
    source_recipe,
)
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig
from dpkfc_papers.recipes.image_sets import CIFAR100_TASK, PATH, SVHN, UTKFACE
from dpkfc_papers.recipes.networks import cifar_vit, mnist_mlp, mnist_vit, resnet20, wide_resnet
from dpkfc_papers.recipes.timm_models import check_timm, timm_model

# --------------------------------------------------------------------------------------------------
# MNIST: a network of two hidden layers (784-256-256-10, 269,322 parameters).

MNIST_MLP = replace(MNIST_CNN, name="mnist-mlp", build=mnist_mlp)


# --------------------------------------------------------------------------------------------------
# MNIST: a transformer of two blocks on 16 patches, 14 linear layers, as in the DP-KFC paper's
# tracking study.

MNIST_VIT = replace(MNIST_CNN, name="mnist-vit", build=mnist_vit)


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
    recipe = source_recipe(
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
        check_timm(model, config.model.pretrained)
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


CIFAR100_WRN = source_recipe(
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


SVHN_WRN = source_recipe(
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
# the label with five classes is taken.


UTKFACE_RESNET20 = source_recipe(
    "utkface-resnet20",
    UTKFACE,
    build=partial(resnet20, 5),
    image_shape=(32, 32, 3),
    num_classes=5,
    normalisation=OF_CIFAR10,
)


# --------------------------------------------------------------------------------------------------
# PathMNIST: colour images of colon tissue, nine classes; the file `pathmnist.npz` is not carried
# along.

PATHMNIST_CNN = medical_recipe("pathmnist-cnn", PATH, num_classes=9, channels=3)
