"""CIFAR-10: ResNet-20 with GroupNorm, trained from scratch (269,722 parameters)."""

from __future__ import annotations

from dataclasses import replace

from dpkfc.recipes import cifar10_cnn
from dpkfc.recipes.models import resnet20

__all__ = ["RECIPE"]

RECIPE = replace(cifar10_cnn.RECIPE, name="cifar10-resnet20", build=resnet20)
