"""An exponential moving average of the weights, for evaluation only (De et al. 2022).

    μ_t = min(μ, (1 + t) / (10 + t)),    average ← μ_t average + (1 − μ_t) θ,    t updates so far

It is a function of released weights: it costs no privacy and does not change the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dpkfc._checks import check_in_range
from dpkfc.linalg.blocks import raise_precision
from dpkfc.tensors import NamedTensors, Tensors


@dataclass(frozen=True)
class WeightEMA:
    """Settings of the average.

    Attributes:
        decay: μ in [0, 1).
        warmup: use μ_t in place of μ, so that the first updates forget faster. Without a warm-up
            the initial weights count until 1 / (1 − μ) steps have passed.

    Raises:
        ValueError: a decay outside [0, 1).
    """

    decay: float = 0.999
    warmup: bool = True

    def __post_init__(self) -> None:
        check_in_range("decay of WeightEMA", self.decay, "[0, 1)")

    def decay_at(self, update: int) -> float:
        """Return μ_t of an update, counted from 0."""
        if not self.warmup:
            return self.decay
        return min(self.decay, (1 + update) / (10 + update))

    def describe(self) -> dict[str, Any]:
        """Return plain values that determine the result."""
        return {"name": "WeightEMA", **asdict(self)}


class WeightAverage:
    """The average of one run, in float32 at least; without settings it does nothing.

    Args:
        settings: None for no average.
        parameters: trainable parameters, by name; frozen ones do not move.
    """

    def __init__(self, settings: WeightEMA | None, parameters: NamedTensors) -> None:
        self._settings = settings
        self._parameters = dict(parameters)
        self._updates = 0
        self._average: Tensors | None = None
        self._trained_weights: Tensors | None = None

    def start(self) -> None:
        """Start from the weights that the first step changes.

        Raises:
            RuntimeError: the averaged weights are in the model.
        """
        self.check_swapped_out()
        if self._settings is not None and self._average is None:
            self._average = {
                name: raise_precision(p.detach()).clone() for name, p in self._parameters.items()
            }

    def update(self) -> None:
        """Average the parameters after a step."""
        if self._settings is None or self._average is None:
            return
        weight = 1 - self._settings.decay_at(self._updates)
        with torch.no_grad():
            for name, p in self._parameters.items():
                self._average[name].lerp_(raise_precision(p.detach()), weight)
        self._updates += 1

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Put the averaged weights into the model, and restore the trained weights to the bit.

        Raises:
            RuntimeError: the average is not kept, or is in the model already.
        """
        if self._settings is None:
            raise RuntimeError(
                "no average of the weights is kept: use PrivacyConfig(weight_average=WeightEMA())"
            )
        self.check_swapped_out()
        # Before the first step the average is the weights themselves.
        average = self._average or {}
        self._trained_weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._write(average)
            yield
        finally:
            self._write(self._trained_weights)
            self._trained_weights = None

    def check_swapped_out(self) -> None:
        """Refuse to go on while the averaged weights are in the model.

        A step would be lost, and a checkpoint would hold the wrong weights.

        Raises:
            RuntimeError: the averaged weights are in the model.
        """
        if self._trained_weights is not None:
            raise RuntimeError(
                "the averaged weights are in the model: leave `with session.averaged_weights()`"
                " first"
            )

    def _write(self, values: NamedTensors) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._parameters[name].copy_(value)

    def state_dict(self) -> Tensors:
        """Return the average and the number of updates; nothing before the first."""
        self.check_swapped_out()
        if not self._average:
            return {}
        state = {f"average.{name}": value for name, value in self._average.items()}
        state["updates"] = torch.tensor(self._updates)
        return state

    def load_state_dict(self, state: NamedTensors) -> None:
        """Continue from `state_dict`; an empty one starts the average at the next step."""
        self.check_swapped_out()
        average = {}
        for name, value in state.items():
            if name != "updates":
                average[name.removeprefix("average.")] = value.clone()
        self._average = average or None
        self._updates = int(state["updates"]) if average else 0
