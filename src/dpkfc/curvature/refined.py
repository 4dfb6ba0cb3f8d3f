"""Probes that the model has had a hand in: every second input is moved until it is sure of a class for it.

    g_i = ∂/∂x_i −log p(y_i | x_i),   y_i drawn uniformly,   smoothed over neighbouring positions
    x_i ← x_i − step_size · std_i · √dim · g_i / ‖g_i‖,   then back to the mean and deviation that x_i was drawn with

Noise excites a layer in other directions than the private examples do; what the model has learned of these is in its weights,
and inputs that it takes for one of its classes bring it to light. With such inputs alone a factor would have too little of all
else. The weights are public before the first step and a release after every other, so whatever is computed from them has the
guarantee they have and costs nothing (post-processing).

Source: activation maximisation (Erhan et al. 2009; Simonyan, Vedaldi and Zisserman 2014), here as inputs of a probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkfc.curvature.inputs import Inputs, Sample
from dpkfc.curvature.probes import Probe

__all__ = ["Refined"]

_BOX: dict[int, Callable[..., Tensor]] = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}  # by axes


@dataclass(frozen=True)
class Refined:
    """Inputs of another probe, every second of them moved towards a class of the model that curvature is measured on.

    For models with a categorical or bernoulli likelihood and inputs of floating point; labels of the other probe are not used.
    A refresh costs about `steps` further forward and backward passes of half the probe.

    Attributes:
        probe: draws the inputs `[n, ...]`.
        steps: how often they are moved.
        step_size: root mean square of one move, as a share of an example's standard deviation.
        smoothing: times that a gradient is averaged over three neighbours along every spatial axis; inputs without one are not.
    """

    probe: Probe
    steps: int = 10
    step_size: float = 0.2
    smoothing: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.probe, Probe) or isinstance(self.probe, Refined):
            wanted = "another probe with sample() and describe(), such as PinkNoise(shape)"
            raise ValueError(f"Refined: probe must be {wanted}; got {self.probe!r}")
        for name, least in (("steps", 1), ("smoothing", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Refined: {name} must be a whole number of {least} or more, got {value!r}")
        if not (self.step_size > 0 and math.isfinite(self.step_size)):
            raise ValueError(f"Refined: step_size must be positive and finite, got {self.step_size}")

    @property
    def inputs(self) -> Inputs | None:
        """What the other probe holds, if anything: looked at for rows that are private too."""
        held: Inputs | None = getattr(self.probe, "inputs", None)
        return held

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Inputs of the other probe, not moved yet, and no labels."""
        return self.probe.sample(n, generator)[0], None

    def refine(self, inputs: Inputs, losses: Callable[[Tensor, slice], Tensor], rows: slice) -> Tensor:
        """Move the inputs of odd number to where their losses are lower; each keeps its mean and standard deviation.

        Args:
            inputs: `[n, ...]`, floating point; what one becomes does not depend on the others.
            losses: maps inputs `[m, ...]`, and their numbers among those of the probe that are moved, to losses `[m]`.
            rows: the numbers of `inputs` in the probe.

        Raises:
            ValueError: inputs that cannot be moved, such as token ids.
        """
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ValueError(
                f"Refined moves inputs that are one tensor of floating point numbers; {type(self.probe).__name__} gives others, "
                "such as token ids: use it as it is"
            )
        odd, numbers = slice(1 - rows.start % 2, None, 2), slice(rows.start // 2, rows.stop // 2)
        refined = inputs.clone()
        if numbers.stop > numbers.start:
            refined[odd] = self._moved(inputs[odd], lambda x: losses(x, numbers))
        return refined

    def _moved(self, x: Tensor, losses: Callable[[Tensor], Tensor]) -> Tensor:
        mean, std = _moments(x)
        for _ in range(self.steps):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_(True)
                (gradient,) = torch.autograd.grad(losses(leaf).sum(), leaf)
            x = x.detach() - self.step_size * std * self._direction(gradient)
            now, spread = _moments(x)
            x = mean + (x - now) * (std / spread.clamp(min=1e-12))
        return x

    def _direction(self, gradient: Tensor) -> Tensor:
        """Smoothed, with a root mean square of 1 in every example; 0 where there is no gradient."""
        if (box := _BOX.get(gradient.dim())) is not None:
            for _ in range(self.smoothing):
                gradient = box(gradient, 3, 1, 1, count_include_pad=False)
        size = gradient.flatten(1).square().mean(1).sqrt().view(-1, *[1] * (gradient.dim() - 1))
        return torch.where(size > 0, gradient / size, 0.0)

    def describe(self) -> dict[str, Any]:
        """JSON-able description: that of the other probe, and how its inputs are moved."""
        own = self.probe.describe()
        return {
            **own,
            "source": f"{own.get('source', 'unknown')}, refined by the released model",
            "labelled": False,
            "refine_steps": self.steps,
            "refine_step_size": self.step_size,
            "refine_smoothing": self.smoothing,
        }


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every example, `[n, 1, ...]`."""
    flat, shape = x.flatten(1), (-1, *[1] * (x.dim() - 1))
    return flat.mean(1).view(shape), flat.std(1, correction=0).view(shape)
