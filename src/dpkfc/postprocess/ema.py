"""An exponential moving average of the weights, for evaluation only (De et al. 2022).

    μ_t = min(μ, (1 + t) / (10 + t)),    average ← μ_t average + (1 − μ_t) θ,    t = 0, 1, ... counts the updates

It is a function of released weights, costs no privacy and changes nothing of the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["WeightAverage", "WeightEMA"]


@dataclass(frozen=True)
class WeightEMA:
    """Settings of the average.

    Attributes:
        decay: μ in [0, 1).
        warmup: the first updates forget faster, by (1 + t) / (10 + t); without it the initial weights count until 1 / (1 − μ)
            steps have passed.

    Raises:
        ValueError: a decay outside [0, 1).
    """

    decay: float = 0.999
    warmup: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay of WeightEMA must lie in [0, 1), got {self.decay}")

    def decay_at(self, update: int) -> float:
        """μ_t of an update, counted from 0."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides the result."""
        return {"name": "WeightEMA", "decay": self.decay, "warmup": self.warmup}


class WeightAverage:
    """The average of one run, in float32 at least; without settings it does nothing.

    Args:
        settings: None for no average.
        parameters: trainable ones, by name; frozen ones do not move.
    """

    def __init__(self, settings: WeightEMA | None, parameters: Mapping[str, Tensor]) -> None:
        self._settings, self._parameters, self._updates = settings, dict(parameters), 0
        self._average: dict[str, Tensor] | None = None
        self._own: dict[str, Tensor] | None = None

    def before_step(self) -> None:
        """Start from the weights that the first step changes.

        Raises:
            RuntimeError: the averaged weights are in the model.
        """
        self.check_own_weights()
        if self._settings is not None and self._average is None:
            self._average = {name: _wide(p).clone() for name, p in self._parameters.items()}

    def update(self) -> None:
        """Take in the parameters after a step."""
        if self._settings is None or self._average is None:
            return
        share = 1 - self._settings.decay_at(self._updates)
        with torch.no_grad():
            for name, p in self._parameters.items():
                self._average[name].lerp_(_wide(p), share)
        self._updates += 1

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The averaged weights in the model; afterwards it has its own back, to the bit.

        Raises:
            RuntimeError: no average is kept, or it is in the model already.
        """
        if self._settings is None:
            raise RuntimeError("no average of the weights is kept: use PrivacyConfig(weight_average=WeightEMA())")
        self.check_own_weights()
        average = self._average or {}  # before the first step the average is the weights themselves
        self._own = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._write(average)
            yield
        finally:
            self._write(self._own)
            self._own = None

    def check_own_weights(self) -> None:
        """Raise while the averaged weights are in the model.

        Raises:
            RuntimeError: they are; a step would be lost, and a checkpoint would hold the wrong weights.
        """
        if self._own is not None:
            raise RuntimeError("the averaged weights are in the model: leave `with session.averaged_weights()` first")

    def _write(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._parameters[name].copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """The average and the number of updates; empty before the first."""
        self.check_own_weights()
        average = self._average or {}
        updates = {"updates": torch.tensor(self._updates)} if average else {}
        return {f"average.{name}": x for name, x in average.items()} | updates

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`; from an empty one the average starts anew at the next step."""
        self.check_own_weights()
        found = {name.removeprefix("average."): x.clone() for name, x in state.items() if name != "updates"}
        self._average = found or None
        self._updates = int(state["updates"]) if found else 0


def _wide(p: Tensor) -> Tensor:
    """A parameter in a type that holds small changes."""
    return p.detach() if p.dtype == torch.float64 else p.detach().float()
