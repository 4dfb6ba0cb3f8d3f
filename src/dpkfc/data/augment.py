"""Change images at random for `Session(augment=...)`, each row on its own in one pass.

A batch is a tensor of images `[N, C, H, W]`, or a tuple, list or dict. Of these the first image
tensor is changed, and the rest is passed on. All random numbers come from torch's global generator,
so that a run in test mode repeats them. In every other run the session seeds it from the operating
system for each private pass, because the view of an example must stay unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkfc._checks import check_in_range, check_integer, check_one_of

Augment = Callable[[Any], Any]


def random_crop(pad: int = 4, mode: str = "reflect") -> Augment:
    """Return an augmentation that pads every image and crops it to the old size at a random place.

    Args:
        pad: pixels on each side.
        mode: "reflect" (pad less than height and width) or "constant" (zeros).

    Raises:
        ValueError: a pad below 1 or an unknown mode.
    """
    check_integer("pad", pad, 1)
    check_one_of("mode", mode, ("reflect", "constant"))
    return _augment_images(partial(_crop, pad=pad, mode=mode))


def horizontal_flip(p: float = 0.5) -> Augment:
    """Return an augmentation that mirrors every image with probability p.

    Raises:
        ValueError: p outside [0, 1].
    """
    check_in_range("p", p, "[0, 1]")
    return _augment_images(partial(_flip, p=p))


def reflect_pad_crop_flip(pad: int = 4) -> Augment:
    """Return the augmentation of De et al. (2022) for CIFAR: reflect-pad, random crop, random flip.

    Args:
        pad: pixels on each side, less than height and width.

    Raises:
        ValueError: a pad below 1.
    """
    crop = random_crop(pad)
    flip = horizontal_flip()

    def augment(batch: Any) -> Any:
        cropped = crop(batch)
        return flip(cropped)

    return augment


def _augment_images(change: Callable[[Tensor], Tensor]) -> Augment:
    """Return an augmentation that changes the first image tensor of a batch."""

    def augment(batch: Any) -> Any:
        if _is_images(batch):
            return change(batch)
        items: dict[Any, Any] = {}
        if isinstance(batch, Mapping):
            items = dict(batch)
        elif isinstance(batch, (tuple, list)):
            items = dict(enumerate(batch))
        for key, value in items.items():
            if _is_images(value):
                items[key] = change(value)
                if isinstance(batch, Mapping):
                    return items
                return type(batch)(items.values())
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no floating-point images [N, C, H, W];"
            " write an augment of your own for it"
        )

    return augment


def _is_images(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return False
    return x.dim() == 4 and x.is_floating_point()


def _crop(x: Tensor, pad: int, mode: str) -> Tensor:
    n, _, height, width = x.shape
    if mode == "reflect" and pad >= min(height, width):
        raise ValueError(
            f"pad={pad} must be less than height and width of the images, {height}×{width}"
        )
    padded = F.pad(x, [pad] * 4, mode=mode)
    places = 2 * pad + 1
    device = x.device
    top = torch.randint(places, (n, 1)).to(device)
    left = torch.randint(places, (n, 1)).to(device)
    rows = top + torch.arange(height, device=device)
    rows = rows.unsqueeze(2)
    columns = left + torch.arange(width, device=device)
    columns = columns.unsqueeze(1)
    images = torch.arange(n, device=device)
    images = images.view(n, 1, 1)
    channels_last = padded.permute(0, 2, 3, 1)
    cropped = channels_last[images, rows, columns]
    channels_first = cropped.permute(0, 3, 1, 2)
    return channels_first.contiguous()


def _flip(x: Tensor, p: float) -> Tensor:
    is_mirrored = torch.rand(len(x)) < p
    is_mirrored = is_mirrored.to(x.device)
    is_mirrored = is_mirrored.view(-1, 1, 1, 1)
    mirrored = x.flip(3)
    return torch.where(is_mirrored, mirrored, x)
