"""Image sets: raw pixels with labels, and the tensors that a run trains on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpkfc.recipes.datasets.errors import DatasetError
from dpkfc.recipes.datasets.examples import ExampleSet

__all__ = ["Normalisation", "Pixels"]


@dataclass(frozen=True)
class Normalisation:
    """Public constants: `(pixel / scale − mean) / std` per channel.

    Attributes:
        mean: one number per channel.
        std: one number per channel.
        scale: the largest pixel value of the format.
        origin: where the constants come from; the privacy card states it.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    origin: str = "published constants"

    def apply(self, pixels: np.ndarray) -> Tensor:
        """Tensor float32 `[N, C, H, W]` of pixels `[N, H, W, C]`."""
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        images = torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, 1), np.float32))
        return images.div_(self.scale).sub_(mean).div_(std)


@dataclass(frozen=True)
class Pixels:
    """Raw images and labels of a training and a test split, and of a validation split where the set has one of its own.

    Attributes:
        train: pixels uint8 `[N, H, W, C]` and labels `[N]`.
        test: the same for the test split.
        source: where they were read from, for the privacy card.
        validation: the same for the set's own validation split, or None.
        part: how much of the set the files hold, where that is not all of it.
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    source: str
    validation: tuple[np.ndarray, np.ndarray] | None = None
    part: str = ""

    def check(self, name: str, shape: tuple[int, ...], num_classes: int) -> Pixels:
        """These pixels, if they are what a recipe expects.

        Args:
            name: of the data set, for the error.
            shape: `(H, W, C)` of an image.
            num_classes: labels must lie in `0 … num_classes − 1`.

        Raises:
            DatasetError: another shape, another number of labels than images, no images, or a label out of range.
        """
        parts = {"training": self.train, "test": self.test} | ({"validation": self.validation} if self.validation else {})
        for part, (images, labels) in parts.items():
            where = f"{name}, {part} split from {self.source}"
            if images.shape[1:] != shape:
                raise DatasetError(f"{where}: images are {images.shape[1:]}, expected {shape}; replace the files")
            if labels.shape != (len(images),):
                found = f"{len(images)} images and labels of shape {labels.shape}"
                raise DatasetError(f"{where}: {found}; the two files do not belong together: replace them")
            if len(images) == 0:
                raise DatasetError(f"{where}: no examples; replace the files")
            if int(labels.min()) < 0 or int(labels.max()) >= num_classes:
                found = f"labels run from {int(labels.min())} to {int(labels.max())}"
                raise DatasetError(f"{where}: {found}, expected 0 to {num_classes - 1}; replace the label file")
        return self

    def tensors(self, normalisation: Normalisation) -> ExampleSet:
        """Normalised float32 images `[N, C, H, W]` and int64 labels `[N]`."""

        def made(part: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
            return normalisation.apply(part[0]), torch.from_numpy(np.asarray(part[1], np.int64))

        own = None if self.validation is None else made(self.validation)
        return ExampleSet(train=made(self.train), test=made(self.test), validation=own, source=self.source, part=self.part)
