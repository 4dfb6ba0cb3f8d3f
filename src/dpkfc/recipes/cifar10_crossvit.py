"""CIFAR-10: CrossViT-Tiny-240 from timm, pretrained on ImageNet, fine-tuned end to end on resized images."""

from __future__ import annotations

from dpkfc.recipes.cifar10_cnn import load_cifar10
from dpkfc.recipes.fine_tuned import fine_tuned_recipe

__all__ = ["RECIPE"]

RECIPE = fine_tuned_recipe(
    "cifar10-crossvit", "crossvit_tiny_240", 240, title="CIFAR-10", pixels=load_cifar10, num_classes=10
)
