"""What the recipes that fine-tune a vision model of timm share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dpkfc.recipes.base import Recipe, image_recipe
from dpkfc.recipes.config import RunConfig
from dpkfc.recipes.datasets import ExampleSet, Normalisation, Pixels
from dpkfc.recipes.models.pretrained_vision import check_timm, timm_model

__all__ = ["fine_tuned_recipe"]

_IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), origin="published with the pretrained weights")


def fine_tuned_recipe(
    name: str, model: str, side: int, *, title: str, pixels: Callable[[str | None], Pixels], num_classes: int
) -> Recipe:
    """Images of 32×32 for a model of timm, all of whose weights are trained; `pretrained` takes a file of weights.

    Args:
        name: of the recipe.
        model: of timm.
        side: of the images that the model takes.
        title: of the data set.
        pixels: its images.
        num_classes: of its labels.
    """
    build = partial(timm_model, model, side, num_classes)
    made = image_recipe(
        name=name,
        title=title,
        pixels=pixels,
        build=build,
        image_shape=(32, 32, 3),
        num_classes=num_classes,
        normalisation=_IMAGENET,
    )
    constants = {**made.constants, "pretrained weights": (f"timm {model}", "published; trained on ImageNet")}
    made = replace(made, constants=constants, heavy=True)
    read = made.load

    def load(config: RunConfig) -> ExampleSet:
        check_timm(model, config.pretrained)  # before half a minute of reading
        return read(config)

    made = replace(made, load=load)

    def variant(weights: str) -> Recipe:
        return replace(made, build=partial(build, weights))

    return replace(made, variant=variant)
