"""Small networks for 28×28 images."""

from __future__ import annotations

from torch import nn

from dpkfc.recipes.models.layout import channels_last

__all__ = ["mnist_cnn", "mnist_mlp"]


def mnist_cnn(num_classes: int = 10, channels: int = 1) -> nn.Sequential:
    """Two convolutions and two linear layers, 206,922 parameters for ten classes and grey images.

    Input `[N, channels, 28, 28]`, output `[N, num_classes]`. The network of the DP-KFC experiments on MNIST. Channels lie last
    in memory.
    """
    layers = nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )
    return channels_last(layers)


def mnist_mlp(num_classes: int = 10) -> nn.Sequential:
    """Two hidden layers of 256 (784-256-256-10), 269,322 parameters. Input `[N, 1, 28, 28]`, output `[N, num_classes]`."""
    widths = (784, 256, 256)
    hidden = [layer for w, v in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(w, v), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, num_classes))
