"""Small networks for 8×8 digits."""

from __future__ import annotations

from torch import nn

__all__ = ["digits_cnn", "digits_mlp"]


def digits_cnn(num_classes: int = 10) -> nn.Sequential:
    """Two convolutions and two linear layers, 13,706 parameters for ten classes.

    Input `[N, 1, 8, 8]`, output `[N, num_classes]`.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


def digits_mlp(num_classes: int = 10) -> nn.Sequential:
    """One hidden layer of 64. Input `[N, 1, 8, 8]`, output `[N, num_classes]`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))
