"""The networks of the recipes: plain torch modules without BatchNorm."""

from __future__ import annotations

from dpkfc.recipes.models.cifar import cifar_cnn
from dpkfc.recipes.models.digits import digits_cnn, digits_mlp
from dpkfc.recipes.models.mnist import mnist_cnn
from dpkfc.recipes.models.seeded import seeded
from dpkfc.recipes.models.wide_resnet import WideResNet, wide_resnet

__all__ = ["WideResNet", "cifar_cnn", "digits_cnn", "digits_mlp", "mnist_cnn", "seeded", "wide_resnet"]
