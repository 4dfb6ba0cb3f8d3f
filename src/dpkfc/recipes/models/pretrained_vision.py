"""Vision models of timm with public pretrained weights, fine-tuned at their own image size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.recipes.datasets.errors import DatasetError

__all__ = ["Resized", "check_timm", "timm_model"]


class Resized(nn.Module):
    """A model behind a bilinear resize of its images to `side`."""

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, x: Tensor) -> Tensor:
        """What the model makes of resized images `[N, 3, side, side]`."""
        return self.model(F.interpolate(x, (self.side, self.side), mode="bilinear", align_corners=False))


def check_timm(name: str, weights: str = "") -> Any:
    """timm, where it is installed and a file of weights that is given is one; cheap beside reading data.

    Raises:
        DatasetError: either is missing; the message says how to get it.
    """
    try:
        import timm
    except ImportError:
        raise DatasetError("timm is not installed: pip install 'dpkfc[vision]'") from None
    if weights and not Path(weights).is_file():
        raise DatasetError(f"pretrained {weights!r} is not a file; give one with weights of timm's {name}")
    return timm


def timm_model(name: str, side: int, num_classes: int, weights: str = "") -> Resized:
    """A model of timm with a new head; weights from a file, else from where timm keeps them.

    Raises:
        DatasetError: timm is missing, or the weights cannot be had; the message says how to get them.
    """
    timm = check_timm(name, weights)
    overlay: dict[str, Any] = {"pretrained_cfg_overlay": {"file": weights}} if weights else {}
    try:
        model = timm.create_model(name, pretrained=True, num_classes=num_classes, **overlay)
    except Exception as error:  # whatever timm, its hub or the file raise becomes one line
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetError(f"timm has no weights of {name} here ({reason}); give a file of them with --pretrained") from None
    return Resized(model, side)
