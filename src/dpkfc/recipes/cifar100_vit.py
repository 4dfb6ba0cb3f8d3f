"""CIFAR-100: ViT-S/16 from timm, pretrained on ImageNet, fine-tuned end to end on resized images."""

from __future__ import annotations

from dpkfc.recipes.cifar100_wrn import load_cifar100
from dpkfc.recipes.fine_tuned import fine_tuned_recipe

__all__ = ["RECIPE"]

RECIPE = fine_tuned_recipe(
    "cifar100-vit", "vit_small_patch16_224", 224, title="CIFAR-100", pixels=load_cifar100, num_classes=100
)
