"""Initialisation by a public seed, without disturbing the global generator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["seeded"]


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model whose initial weights are a function of `seed` alone.

    Torch initialises layers from its global generator; it is seeded for the construction and put back afterwards.
    The noise of the mechanism comes from another stream and is not touched by this seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
