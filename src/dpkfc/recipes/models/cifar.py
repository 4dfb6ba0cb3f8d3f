"""A five-layer CNN for 32×32 colour images."""

from __future__ import annotations

from torch import nn

from dpkfc.recipes.models.layout import channels_last

__all__ = ["cifar_cnn"]

_GROUPS = 16


def _stage(channels_in: int, channels_out: int) -> list[nn.Module]:
    """Convolution, GroupNorm and tanh at one resolution."""
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(_GROUPS, channels_out), nn.Tanh()]


def cifar_cnn(num_classes: int = 10) -> nn.Sequential:
    """Four convolutions with GroupNorm and tanh, a mean over positions and one linear layer: 522,122 parameters.

    Bounded activations and normalisation within an example follow what works for private training from scratch
    (Papernot et al. 2021; De et al. 2022). Input `[N, 3, 32, 32]`, output `[N, num_classes]`. Channels lie last in memory.
    """
    layers = nn.Sequential(
        *_stage(3, 64),
        nn.MaxPool2d(2),
        *_stage(64, 128),
        nn.MaxPool2d(2),
        *_stage(128, 128),
        nn.MaxPool2d(2),
        *_stage(128, 256),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, num_classes),
    )
    return channels_last(layers)
