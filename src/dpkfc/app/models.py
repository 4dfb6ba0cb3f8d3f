"""The networks of the recipes, and their initialisation by a public seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# --------------------------------------------------------------------------------------------------
# Small networks for 8×8 digits.


def digits_cnn(num_classes: int = 10) -> nn.Sequential:
    """Build two convolutions and two linear layers, 13,706 parameters for ten classes.

    Input `[N, 1, 8, 8]`, output `[N, num_classes]`.
    """
    return two_convolutions(1, 32 * 2 * 2, 64, num_classes)


def two_convolutions(
    channels: int,
    features: int,
    width: int,
    num_classes: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Build two convolutions that halve the image, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        activation(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, width),
        activation(),
        nn.Linear(width, num_classes),
    )


# --------------------------------------------------------------------------------------------------
# Initialisation by a public seed, which leaves the global generator as it was.


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model whose initial weights are a function of `seed` alone.

    Torch initialises layers from its global generator, which is seeded for the construction and
    restored afterwards. The noise of the mechanism comes from another stream.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def linear_from_zero(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Build a linear layer whose parameters are zero."""
    layer = nn.Linear(inputs, outputs, bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


# --------------------------------------------------------------------------------------------------
# How a model's weights lie in memory.


def channels_last(model: nn.Sequential) -> nn.Sequential:
    """Return the model with the channels of its convolutions last in memory.

    Max pooling on a CPU is then faster, and nothing else changes.
    """
    # Torch does not declare the argument.
    untyped: Any = model
    converted: nn.Sequential = untyped.to(memory_format=torch.channels_last)
    return converted


# --------------------------------------------------------------------------------------------------


def mnist_cnn(
    num_classes: int = 10, channels: int = 1, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Build two convolutions and two linear layers, 206,922 parameters for ten classes.

    This is the network of the DP-KFC experiments on MNIST. Input `[N, channels, 28, 28]`, output
    `[N, num_classes]`. Channels lie last in memory.
    """
    network = two_convolutions(channels, 32 * 7 * 7, 128, num_classes, activation)
    return channels_last(network)


# --------------------------------------------------------------------------------------------------
# A five-layer CNN for 32×32 colour images.


def _stage(channels_in: int, channels_out: int) -> list[nn.Module]:
    """Build convolution, GroupNorm and tanh at one resolution."""
    return [
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.GroupNorm(16, channels_out),
        nn.Tanh(),
    ]


def cifar_cnn(num_classes: int = 10) -> nn.Sequential:
    """Build four convolutions with GroupNorm and tanh, a mean over positions and a linear layer.

    It has 522,122 parameters. Bounded activations and normalisation within an example work well for
    private training from scratch (Papernot et al. 2021; De et al. 2022). Input `[N, 3, 32, 32]`,
    output `[N, num_classes]`. Channels lie last in memory.
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


# --------------------------------------------------------------------------------------------------


def small_cnn(channels: int, size: int, classes: int) -> nn.Sequential:
    """Build three convolutions with GroupNorm and tanh, each after the first halving the image.

    Input `[N, channels, size, size]`, output `[N, classes]`.
    """
    # Three strides of two divide the side by eight.
    side = min(4, math.ceil(size / 8))
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, stride=2, padding=2),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.Tanh(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(side),
        nn.Flatten(),
        nn.Linear(32 * side**2, classes),
    )
