"""BreastMNIST: 546 ultrasound images, malignant or not. So few examples leave little accuracy at a small ε."""

from __future__ import annotations

from dpkfc.recipes.datasets.medmnist import BREAST
from dpkfc.recipes.medical import medical_recipe

__all__ = ["RECIPE"]

RECIPE = medical_recipe("breastmnist-cnn", BREAST, num_classes=2)
