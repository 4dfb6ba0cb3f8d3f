"""MNIST: a network of two hidden layers (784-256-256-10, 269,322 parameters)."""

from __future__ import annotations

from dataclasses import replace

from dpkfc.recipes import mnist_cnn
from dpkfc.recipes.models import mnist_mlp

__all__ = ["RECIPE"]

RECIPE = replace(mnist_cnn.RECIPE, name="mnist-mlp", build=mnist_mlp)
