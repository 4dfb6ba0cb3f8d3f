"""CIFAR-100: CrossViT-Tiny-240 from timm, pretrained on ImageNet, fine-tuned end to end on resized images."""

from __future__ import annotations

from dpkfc.recipes.cifar100_wrn import load_cifar100
from dpkfc.recipes.fine_tuned import fine_tuned_recipe

__all__ = ["RECIPE"]

RECIPE = fine_tuned_recipe(
    "cifar100-crossvit", "crossvit_tiny_240", 240, title="CIFAR-100", pixels=load_cifar100, num_classes=100
)
