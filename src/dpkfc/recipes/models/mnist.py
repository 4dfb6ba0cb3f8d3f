"""The CNN of the MNIST and Fashion-MNIST experiments."""

from __future__ import annotations

from torch import nn

__all__ = ["mnist_cnn"]


def mnist_cnn(num_classes: int = 10) -> nn.Sequential:
    """Two convolutions and two linear layers, 206,922 parameters for ten classes.

    Input `[N, 1, 28, 28]`, output `[N, num_classes]`. The network of the DP-KFC experiments on MNIST.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
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
