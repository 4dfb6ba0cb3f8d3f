"""Image sets: raw pixels with labels, and the tensors that a run trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpkfc.app.datasets.errors import DatasetError, damaged_error
from dpkfc.app.datasets.examples import Examples, ExampleSet, Split

if TYPE_CHECKING:
    from torch import Tensor


def check_labels(path: Path, name: str, labels: np.ndarray) -> None:
    """Refuse labels that are not whole numbers `[N]`."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise damaged_error(
            path,
            f"`{name}` is {labels.dtype} {labels.shape} where whole numbers, one for each image,"
            " were expected",
        )


def check_pixels(path: Path, name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuse an array that is not uint8 of a shape."""
    if array.dtype != np.uint8 or array.shape != shape:
        raise damaged_error(
            path, f"`{name}` is {array.dtype} {array.shape} where uint8 {shape} was expected"
        )


# --------------------------------------------------------------------------------------------------
# Image sets: raw pixels with labels, and the tensors that a run trains on.


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
        """Return a float32 tensor `[N, C, H, W]` of pixels `[N, H, W, C]`."""
        import torch

        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        images = torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, 1), np.float32))
        return images.div_(self.scale).sub_(mean).div_(std)


@dataclass(frozen=True)
class Splits:
    """What files hold of a training and a test split, and of the set's own validation split.

    Attributes:
        train: the training split.
        test: the same for the test split.
        source: where they were read from, for the privacy card.
        validation: the same for the set's own validation split, or None.
        part: how much of the set the files hold, where that is not all of it.
    """

    train: Any
    test: Any
    source: str
    validation: Any = None
    part: str = ""

    def convert(self, change: Callable[[Any], Examples]) -> ExampleSet:
        """Return the examples that each split becomes."""
        return ExampleSet(
            train=change(self.train),
            test=change(self.test),
            validation=change(self.validation) if self.validation else None,
            source=self.source,
            part=self.part,
        )


class Pixels(Splits):
    """Splits of pixels uint8 `[N, H, W, C]` and labels `[N]`."""

    def check(self, name: str, shape: tuple[int, ...], num_classes: int) -> Pixels:
        """Return these pixels, or refuse them where a recipe expects others.

        Args:
            name: of the data set, for the error.
            shape: `(H, W, C)` of an image.
            num_classes: labels must lie in `0 … num_classes − 1`.

        Raises:
            DatasetError: another shape, another number of labels than images, no images, or a label
                out of range.
        """
        self._check(name, shape, num_classes)
        return self

    def _check(self, name: str, shape: tuple[int, ...], num_classes: int) -> None:
        parts = {"training": self.train, "test": self.test}
        if self.validation:
            parts["validation"] = self.validation
        for part, (images, labels) in parts.items():
            where = f"{name}, {part} split from {self.source}"
            if images.shape[1:] != shape:
                raise DatasetError(
                    f"{where}: images are {images.shape[1:]}, expected {shape}; replace the files"
                )
            if labels.shape != (len(images),):
                raise DatasetError(
                    f"{where}: {len(images)} images and labels of shape {labels.shape}; the two"
                    " files do not belong together: replace them"
                )
            if len(images) == 0:
                raise DatasetError(f"{where}: no examples; replace the files")
            if labels.min() < 0 or labels.max() >= num_classes:
                raise DatasetError(
                    f"{where}: labels are not all 0 to {num_classes - 1}; replace the label file"
                )

    def tensors(self, normalisation: Normalisation) -> ExampleSet:
        """Return normalised float32 images `[N, C, H, W]` and int64 labels `[N]`."""

        def convert(part: Split) -> Examples:
            import torch

            images, labels = part
            return normalisation.apply(images), torch.from_numpy(np.asarray(labels, np.int64))

        return self.convert(convert)


def hold_out(images: np.ndarray, labels: np.ndarray, count: int) -> tuple[Split, Split]:
    """Return training and test split, of which the test split takes `count` examples.

    The permutation is public and fixed.
    """
    order = np.random.Generator(np.random.PCG64(_SPLIT_SEED)).permutation(len(labels))
    test, train = order[:count], order[count:]
    return (images[train], labels[train]), (images[test], labels[test])


_SPLIT_SEED = 0
