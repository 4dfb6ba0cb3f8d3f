"""Probes that use the model: every second input is moved until the model is sure of a class for it.

    g_i = ∂/∂x_i −log p(y_i | x_i),   y_i drawn uniformly,   smoothed over neighbouring positions
    x_i ← x_i − step_size · std_i · √dim · g_i / ‖g_i‖,   then restore mean and deviation of x_i

Noise excites other directions of a layer than the private examples do. The weights hold what the
model has learned of these directions, and inputs that it assigns to a class excite them. With
such inputs alone a factor would lack all other directions. The weights are public before the
first step and a release after every other step. Anything computed from them is post-processing:
it has their guarantee and costs nothing.

Source: activation maximisation (Erhan et al. 2009; Simonyan, Vedaldi and Zisserman 2014), here
for the inputs of a probe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkfc._checks import check_integer, check_positive
from dpkfc.curvature.model_inputs import Inputs, Sample
from dpkfc.curvature.noise_probes import moments
from dpkfc.curvature.probes import Probe

# Number of axes to the mean over neighbours.
_BOX: dict[int, Callable[..., Tensor]] = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}


@dataclass(frozen=True)
class Refined(Probe):
    """Inputs of another probe, every second one moved towards a class of the model.

    For models with a categorical or bernoulli likelihood and floating point inputs. Labels of the
    other probe are not used. A refresh costs about `steps` more forward and backward passes of half
    the probe.

    Attributes:
        probe: samples the inputs `[n, ...]`.
        steps: number of moves.
        step_size: root mean square of one move, as a fraction of an example's standard deviation.
        smoothing: how often a gradient is averaged over three neighbours along every spatial axis;
            inputs without such an axis are not smoothed.
    """

    probe: Probe
    steps: int = 10
    step_size: float = 0.2
    smoothing: int = 2

    is_refined = True

    def __post_init__(self) -> None:
        if not isinstance(self.probe, Probe) or self.probe.is_refined:
            raise ValueError(
                "Refined: probe must be another probe with sample() and describe(), such as "
                f"PinkNoise(shape); got {self.probe!r}"
            )
        check_integer("Refined: steps", self.steps, 1)
        check_integer("Refined: smoothing", self.smoothing, 0)
        check_positive("Refined: step_size", self.step_size)

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs of the other probe, not moved yet, and no labels."""
        inputs, _ = self.probe.sample(n, generator)
        return inputs, None

    def refine(
        self, inputs: Inputs, losses: Callable[[Tensor, slice], Tensor], rows: slice
    ) -> Tensor:
        """Move inputs with odd numbers to lower losses; each keeps its mean and deviation.

        Args:
            inputs: `[n, ...]`, floating point; the move of one does not depend on the others.
            losses: maps inputs `[m, ...]` and their numbers among the moved inputs to losses `[m]`.
            rows: the numbers of `inputs` in the probe.

        Raises:
            ValueError: inputs that cannot be moved, such as token ids.
        """
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ValueError(
                f"Refined moves inputs that are one tensor of floating point numbers; "
                f"{type(self.probe).__name__} gives others, such as token ids: use it as it is"
            )
        odd = slice(1 - rows.start % 2, None, 2)
        numbers = slice(rows.start // 2, rows.stop // 2)
        refined = inputs.clone()
        if numbers.stop > numbers.start:
            refined[odd] = self._move(inputs[odd], lambda x: losses(x, numbers))
        return refined

    def _move(self, x: Tensor, losses: Callable[[Tensor], Tensor]) -> Tensor:
        mean, std = moments(x)
        for _ in range(self.steps):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_(True)
                total = losses(leaf).sum()
                (gradient,) = torch.autograd.grad(total, leaf)
            move = self.step_size * std * self._direction(gradient)
            x = x.detach() - move
            now, spread = moments(x)
            spread = spread.clamp(min=1e-12)
            stretch = std / spread
            centred = x - now
            x = mean + centred * stretch
        return x

    def _direction(self, gradient: Tensor) -> Tensor:
        """Return the smoothed gradient with a root mean square of 1 in every example, or of 0."""
        box = _BOX.get(gradient.dim())
        if box is not None:
            for _ in range(self.smoothing):
                gradient = box(gradient, 3, 1, 1, count_include_pad=False)
        squares = gradient.flatten(1).square()
        size = squares.mean(1).sqrt()
        ones = [1] * (gradient.dim() - 1)
        size = size.view(-1, *ones)
        unit = gradient / size
        return torch.where(size > 0, unit, 0.0)

    def describe(self) -> dict[str, Any]:
        """Return plain values: the other probe's, and how its inputs are moved."""
        own = self.probe.describe()
        return {
            **own,
            "source": f"{own.get('source', 'unknown')}, refined by the released model",
            "labelled": False,
            "refine_steps": self.steps,
            "refine_step_size": self.step_size,
            "refine_smoothing": self.smoothing,
        }
