"""Digits: 1,437 real 8×8 images that come with scikit-learn, and a small CNN. Trains in seconds."""

from __future__ import annotations

from dpkfc.recipes.base import image_recipe
from dpkfc.recipes.datasets import Normalisation, Pixels, read_digits
from dpkfc.recipes.models import digits_cnn

__all__ = ["RECIPE"]


def _pixels(data_dir: str | None) -> Pixels:
    """The digits need no files: `data_dir` is not looked at."""
    return read_digits()


RECIPE = image_recipe(
    name="digits",
    title="digits",
    pixels=_pixels,
    build=digits_cnn,
    image_shape=(8, 8, 1),
    num_classes=10,
    # Pixels run from 0 to 16: this maps the format's range to [-1, 1] and reads no data.
    normalisation=Normalisation((0.5,), (0.5,), scale=16.0, origin="the range of the format"),
)
