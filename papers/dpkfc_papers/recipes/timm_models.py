"""Vision models of timm with public pretrained weights, fine-tuned at their own image size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc._errors import first_line
from dpkfc.app.datasets.errors import DatasetError, import_optional


class Resized(nn.Module):
    """A model behind a bilinear resize of its images to `side`."""

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model = model
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of images `[N, 3, H, W]`."""
        size = (self.side, self.side)
        resized = F.interpolate(x, size, mode="bilinear", align_corners=False)
        return self.model(resized)


def check_timm(name: str, weights: str = "") -> Any:
    """Return the module timm after checking the file of weights, which costs little time.

    Raises:
        DatasetError: either is missing; the message says how to get it.
    """
    timm = import_optional("timm", "timm is not installed: pip install '.[vision]'")
    if weights and not Path(weights).is_file():
        raise DatasetError(
            f"pretrained {weights!r} is not a file; give one with weights of timm's {name}"
        )
    return timm


def timm_model(name: str, side: int, num_classes: int, weights: str = "") -> Resized:
    """Build a model of timm with a new head; weights from a file, else from where timm keeps them.

    Raises:
        DatasetError: timm is missing, or the weights cannot be had; the message says how to get
            them.
    """
    timm = check_timm(name, weights)
    options: dict[str, Any] = {"pretrained": True, "num_classes": num_classes}
    if weights:
        options["pretrained_cfg_overlay"] = {"file": weights}
    try:
        model = timm.create_model(name, **options)
    # Whatever timm, its hub or the file raise becomes one line.
    except Exception as error:
        raise DatasetError(
            f"timm has no weights of {name} here ({first_line(error)}); give a file of them with"
            " --pretrained"
        ) from None
    return Resized(model, side)
