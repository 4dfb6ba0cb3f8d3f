"""PneumoniaMNIST: 4,708 chest X-rays of children, pneumonia or not, and the CNN of the MNIST recipe."""

from __future__ import annotations

from dpkfc.recipes.datasets.medmnist import PNEUMONIA
from dpkfc.recipes.medical import medical_recipe

__all__ = ["RECIPE"]

RECIPE = medical_recipe("pneumoniamnist-cnn", PNEUMONIA, num_classes=2)
