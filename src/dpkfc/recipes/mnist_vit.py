"""MNIST: a transformer of two blocks on 16 patches, 14 linear layers, as in the DP-KFC paper's tracking study."""

from __future__ import annotations

from dataclasses import replace

from dpkfc.recipes import mnist_cnn
from dpkfc.recipes.models import mnist_vit

__all__ = ["RECIPE"]

RECIPE = replace(mnist_cnn.RECIPE, name="mnist-vit", build=mnist_vit)
