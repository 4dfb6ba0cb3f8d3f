"""What the recipes that fine-tune a vision model of timm share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dpkfc.recipes.base import Recipe, image_recipe
from dpkfc.recipes.cifar10_cnn import load_cifar10
from dpkfc.recipes.config import RunConfig
from dpkfc.recipes.datasets import ExampleSet, Normalisation
from dpkfc.recipes.models.pretrained_vision import check_timm, timm_model

__all__ = ["fine_tuned_recipe"]

_IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), origin="published with the pretrained weights")


def fine_tuned_recipe(name: str, model: str, side: int) -> Recipe:
    """CIFAR-10 for a model of timm, all of whose weights are trained; `pretrained` takes a file of weights."""
    made = image_recipe(
        name=name,
        title="CIFAR-10",
        pixels=load_cifar10,
        build=partial(timm_model, model, side, 10),
        image_shape=(32, 32, 3),
        num_classes=10,
        normalisation=_IMAGENET,
    )
    made = replace(made, constants={**made.constants, "pretrained weights": (f"timm {model}", "published; trained on ImageNet")})
    read = made.load

    def load(config: RunConfig) -> ExampleSet:
        check_timm(model, config.pretrained)  # before half a minute of reading
        return read(config)

    made = replace(made, load=load)

    def variant(weights: str) -> Recipe:
        return replace(made, build=partial(timm_model, model, side, 10, weights))

    return replace(made, variant=variant)
