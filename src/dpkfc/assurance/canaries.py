"""The canaries of an audit: examples that an adversary would choose, so that a bound that can be exceeded is exceeded.

A bound of the norm is easiest to break at its edges: a gradient far above and far below the clip, along the directions that
the metric stretches most and least, against the sum of the others, in one parameter group alone, and not finite at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpkfc.assurance.planted import NOBODY, Plant, PlantedLoss, plantable
from dpkfc.assurance.subject import Subject
from dpkfc.gradients.layers import Layer
from dpkfc.metric import Kronecker, Metric

__all__ = ["Canaries", "make_canaries"]

FACTORS = {
    "as it is": 1.0,
    "loss × 1e-4": 1e-4,
    "loss × 1e-30": 1e-30,
    "loss × 1e4": 1e4,
    "loss × 1e30": 1e30,
    "loss × -1": -1.0,
    "loss × -1e4": -1e4,
    "loss NaN": math.nan,
    "loss infinite": math.inf,
    "loss × 0": 0.0,
}
INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "input all zero": torch.zeros_like,
    "input all one": torch.ones_like,
    "input × 1e3": lambda x: x * 1e3,
    "input × 1e20": lambda x: x * 1e20,  # its square is infinite in float32
    "input × 1e-3": lambda x: x * 1e-3,
    "input × -1": lambda x: -x,
    "input alternating ± 30": lambda x: 30.0 * (1 - 2 * (torch.arange(x.numel()) % 2)).to(x).view(x.shape),
    "input NaN": lambda x: torch.full_like(x, math.nan),
    "input infinite": lambda x: torch.full_like(x, math.inf),
    "input with one huge entry": lambda x: torch.cat([x.new_tensor([1e6]), x.flatten()[1:]]).view(x.shape),
}
# Norms, over C times the least number of float32, whose factors no number of float32 is near: most would be rounded up.
HUGE = (1.33, 0.6, 0.28, 0.13, 0.06)
LAYERS = 12  # in which gradients are planted, spread over the depth
GAINS = 30  # rounds of power iteration


@dataclass
class Canaries:
    """A list of canaries under construction: names, the rows that carry them, and what is changed about each.

    Attributes:
        names: one a canary.
        rows: the tensors of the dataset, one example a canary.
        factors: of the losses.
        plants: chosen gradients by layer: (canary, input, output direction).
    """

    names: list[str] = field(default_factory=list)
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    plants: dict[str, list[tuple[int, Tensor, Tensor]]] = field(default_factory=dict)

    @property
    def zero(self) -> int | None:
        """The number of the first one without a loss; None where there is none."""
        return self.factors.index(0.0) if 0.0 in self.factors else None

    def add(self, name: str, row: tuple[Tensor, ...], factor: float = 1.0) -> int:
        """One more; its number."""
        self.names.append(name)
        self.rows.append(row)
        self.factors.append(factor)
        return len(self.names) - 1

    def plant(
        self, name: str, row: tuple[Tensor, ...], layer: str, gradient: tuple[Tensor, Tensor], factor: float
    ) -> None:
        """One more with the gradient factor · u aᵀ in a layer, `gradient` being (a, u)."""
        number = self.add(name, row, factor)
        self.plants.setdefault(layer, []).append((number, *gradient))

    def only(self, *wanted: str) -> Canaries:
        """Those whose names contain one of these texts, and always the one without a loss."""
        kept = [n for n, name in enumerate(self.names) if n == self.zero or any(text in name for text in wanted)]
        plants = {
            layer: [(kept.index(n), a, u) for n, a, u in several if n in kept] for layer, several in self.plants.items()
        }
        return Canaries(
            [self.names[n] for n in kept],
            [self.rows[n] for n in kept],
            [self.factors[n] for n in kept],
            {layer: several for layer, several in plants.items() if several},
        )

    def loss(self, subject: Subject) -> PlantedLoss:
        """The user's loss with these canaries in it."""
        plants = [
            Plant(
                layer,
                torch.tensor([number for number, _, _ in several]),
                torch.stack([a for _, a, _ in several]),
                torch.stack([u for _, _, u in several]),
            )
            for layer, several in self.plants.items()
        ]
        return PlantedLoss(subject.loss_fn, torch.tensor(self.factors, dtype=torch.float64), plants)

    def dataset(self, subject: Subject) -> tuple[Tensor, ...]:
        """The examples with the canaries behind them, and the ids of canaries as a last tensor.

        Where the unit is larger than a record, every record of a canary's unit carries it.
        """
        size, copies = len(subject.dataset[-1]), subject.records_of_a_unit
        columns = [
            torch.cat([x, torch.stack([row[i] for row in self.rows]).repeat_interleave(copies, 0)])
            for i, x in enumerate(subject.dataset)
        ]
        ids = torch.arange(len(self.names)).repeat_interleave(copies)
        return (*columns, torch.cat([torch.full((size,), NOBODY), ids]))

    def units(self, subject: Subject) -> Tensor | None:
        """The unit of every row of `dataset`; None where a row is a unit."""
        if subject.units is None:
            return None
        numbers = subject.unit_numbers
        canaries = torch.arange(len(self.names)) + int(numbers.max()) + 1
        return torch.cat([numbers, canaries.repeat_interleave(subject.records_of_a_unit)])


def make_canaries(subject: Subject, layers: Sequence[Layer], metric: Metric) -> Canaries:
    """Canaries for a model: broken and extreme examples, then chosen gradients in up to a dozen layers.

    Args:
        subject: what is audited.
        layers: of its model.
        metric: in force at the first step.
    """
    made = Canaries()
    row = tuple(x[0] for x in subject.dataset)
    made.add("another example", tuple(x[-1] for x in subject.dataset))
    for name, factor in FACTORS.items():
        made.add(name, row, factor)
    if row[0].is_floating_point():
        for name, change in INPUTS.items():
            made.add(name, (change(row[0]), *row[1:]))
    else:
        size = len(subject.dataset[-1])
        for number in range(size // 2, min(size, size // 2 + 9)):  # of the half that no batch takes
            made.add(f"example {number}", tuple(x[number] for x in subject.dataset))
    _plant(made, subject, row, {layer.name: layer for layer in layers}, metric)
    return made


def _plant(
    made: Canaries, subject: Subject, row: tuple[Tensor, ...], layers: Mapping[str, Layer], metric: Metric
) -> None:
    shapes = plantable(subject.model(), subject.loss_fn, subject.batch(2))
    if subject.collate_fn is not None:  # where a batch decides how long its examples are, no input of one length fits
        shapes = {name: found for name, found in shapes.items() if len(found[0]) == 1}
    chosen = list(shapes)
    if len(chosen) > LAYERS:
        chosen = [chosen[round(i * (len(chosen) - 1) / (LAYERS - 1))] for i in range(LAYERS)]
    generator = torch.Generator().manual_seed(7)
    for name in chosen:
        into, out = shapes[name]
        a, u = torch.randn(into, generator=generator), torch.randn(out, generator=generator)
        for factor in (1e-3, 1.0, 1e3):
            made.plant(f"{name}: random × {factor:g}", row, name, (a, u), factor)
        made.plant(f"{name}: one entry", row, name, (_first(a), _first(u)), 1e3)
        if len(into) == len(out) == 2 and into[0] > 1:
            made.plant(f"{name}: positions cancel", row, name, _cancelling(a, u), 1.0)
        layer, entry = layers.get(name), metric.get(name)
        if layer is not None and isinstance(entry, Kronecker) and layer.rule == "linear":
            _plant_extremes(made, row, layer, entry, (into, out))
    for name in chosen[-1:]:
        a, u = (x / x.norm() for x in (torch.ones(shapes[name][0]), torch.ones(shapes[name][1])))
        for k in HUGE:
            far = k * 2.0**149 * subject.plan.max_grad_norm / 1e22
            made.plant(f"{name}: norm of {k:g} · 2^149 C", row, name, (1e22 * a, far * u), 1.0)


def _plant_extremes(
    made: Canaries, row: tuple[Tensor, ...], layer: Layer, entry: Kronecker, shapes: tuple[torch.Size, torch.Size]
) -> None:
    """Along the directions that the metric stretches most and least."""
    into, out = shapes
    has_bias = "bias" in layer.parameters
    for kind, changed in (("stretched most", entry), ("stretched least", entry.inverse())):
        a = _stretched(changed.input.apply, into[-1] + has_bias)[: into[-1]]
        u = _stretched(changed.output.apply, out[-1])
        made.plant(f"{layer.name}: {kind}", row, layer.name, (30 * a.expand(into).clone(), u.expand(out).clone()), 1e3)
        made.plant(f"{layer.name}: {kind}, small", row, layer.name, (a.expand(into).clone(), u.expand(out).clone()), 1e-3)


def _stretched(apply: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """The unit vector that a symmetric map stretches most, `[size]`, by power iteration."""
    x = torch.ones(1, size) + 0.1 * torch.sin(torch.arange(size, dtype=torch.float32))
    for _ in range(GAINS):
        try:
            x = apply(x)
        except RuntimeError:  # of another type than float32
            x = apply(x.double())
        x = x / x.norm()
    return x[0].float()


def _first(x: Tensor) -> Tensor:
    only = torch.zeros_like(x)
    only.view(-1)[0] = 1.0
    return only


def _cancelling(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients `[T, d]` of positions that cancel but for a small rest."""
    signs = torch.where(torch.arange(len(a)) % 2 == 0, 1.0, -1.0)[:, None]
    signs[len(a) - len(a) % 2 :] = 0.0
    inputs = (1e3 * torch.nn.functional.normalize(a[0], dim=0)).repeat(len(a), 1)
    inputs[0] += torch.nn.functional.normalize(a[1], dim=0)
    return inputs, 10 * signs * torch.nn.functional.normalize(u[0], dim=0)
