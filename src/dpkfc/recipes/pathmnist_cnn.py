"""PathMNIST: colour images of colon tissue, nine classes; the file `pathmnist.npz` is not carried along."""

from __future__ import annotations

from dpkfc.recipes.datasets.medmnist import PATH
from dpkfc.recipes.medical import medical_recipe

__all__ = ["RECIPE"]

RECIPE = medical_recipe("pathmnist-cnn", PATH, num_classes=9, channels=3)
