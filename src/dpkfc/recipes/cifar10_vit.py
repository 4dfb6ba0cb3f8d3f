"""CIFAR-10: a small vision transformer trained from scratch (four blocks of width 128 on 64 patches)."""

from __future__ import annotations

from dataclasses import replace

from dpkfc.recipes import cifar10_cnn
from dpkfc.recipes.models import cifar_vit

__all__ = ["RECIPE"]

RECIPE = replace(cifar10_cnn.RECIPE, name="cifar10-vit", build=cifar_vit)
