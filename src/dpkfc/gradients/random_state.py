"""The random state of the CPU and of a model's device: noted, compared, and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpkfc.gradients.layers import Layer

__all__ = ["device_of", "random_states", "restarter", "same_states"]


def device_of(layers: Sequence[Layer]) -> torch.device:
    """Where the parameters of a model lie."""
    return layers[0].tensor(next(iter(layers[0].parameters))).device


def random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators now."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def same_states(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether nothing was drawn in between."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def restarter(device: torch.device) -> Callable[[], None]:
    """A function that puts the generators back to where they are now."""
    states = random_states(device)

    def restart() -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], device)

    return restart
