"""The networks of the recipes: plain torch modules without BatchNorm."""

from __future__ import annotations

from dpkfc.recipes.models.cifar import cifar_cnn
from dpkfc.recipes.models.digits import digits_cnn, digits_mlp
from dpkfc.recipes.models.mnist import mnist_cnn, mnist_mlp
from dpkfc.recipes.models.resnet import resnet20
from dpkfc.recipes.models.seeded import seeded
from dpkfc.recipes.models.vit import VisionTransformer, cifar_vit, mnist_vit
from dpkfc.recipes.models.wide_resnet import WideResNet, wide_resnet

__all__ = [
    "VisionTransformer",
    "WideResNet",
    "cifar_cnn",
    "cifar_vit",
    "digits_cnn",
    "digits_mlp",
    "mnist_cnn",
    "mnist_mlp",
    "mnist_vit",
    "resnet20",
    "seeded",
    "wide_resnet",
]
