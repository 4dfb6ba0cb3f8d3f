"""Canaries of one step: examples that an adversary would choose.

A bound of the norm is easiest to break at its edges. Gradients are therefore far above and far
below the clip, along the directions that the metric stretches most and least, opposed to the sum
of the others, in one parameter group alone, or not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dpkfc.audit.harness import (
    RandomWalk,
    Script,
    Subject,
    TensorTuple,
    WatchedSession,
    open_session,
    script_plan,
)
from dpkfc.audit.planted_loss import (
    NO_CANARY,
    Plant,
    PlantedLoss,
    Shapes,
    draw_batch,
    find_plantable,
)
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.metric import Kronecker, Metric
from dpkfc.privacy.mechanism import Released

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


def _alternate(x: Tensor) -> Tensor:
    values = torch.full((x.numel(),), 30.0)
    values[1::2] = -30.0
    return values.to(x).view(x.shape)


def _enlarge_first(x: Tensor) -> Tensor:
    entries = x.flatten().clone()
    entries[0] = 1e6
    return entries.view(x.shape)


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "input all zero": torch.zeros_like,
    "input all one": torch.ones_like,
    "input × 1e3": lambda x: x * 1e3,
    "input × 1e20": lambda x: x * 1e20,  # infinite squares in float32
    "input × 1e-3": lambda x: x * 1e-3,
    "input × -1": lambda x: -x,
    "input alternating ± 30": _alternate,
    "input NaN": lambda x: torch.full_like(x, math.nan),
    "input infinite": lambda x: torch.full_like(x, math.inf),
    "input with one huge entry": _enlarge_first,
}
# Norms over C times the smallest number of float32. No number of float32 is near their clip
# factors, so most of these would be rounded up.
HUGE = (1.33, 0.6, 0.28, 0.13, 0.06)
LAYERS = 12  # with planted gradients
POWER_ITERATIONS = 30
SEED = 7


# A canary, its input and its output direction.
Planted = tuple[int, Tensor, Tensor]
Scores = NDArray[np.float64]


@dataclass
class Canaries:
    """A list of canaries under construction.

    Attributes:
        names: one a canary.
        rows: the tensors of the dataset, one example a canary.
        factors: of the losses.
        plants: chosen gradients by layer: (canary, input, output direction).
    """

    names: list[str] = field(default_factory=list)
    rows: list[TensorTuple] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    plants: dict[str, list[Planted]] = field(default_factory=dict)

    @property
    def zero(self) -> int | None:
        """Number of the first canary without a loss, None if all have one."""
        if 0.0 in self.factors:
            return self.factors.index(0.0)
        return None

    def add(self, name: str, row: TensorTuple, factor: float = 1.0) -> int:
        """Add a canary and return its number."""
        self.names.append(name)
        self.rows.append(row)
        self.factors.append(factor)
        return len(self.names) - 1

    def plant(
        self,
        name: str,
        row: TensorTuple,
        layer: str,
        gradient: tuple[Tensor, Tensor],
        factor: float,
    ) -> None:
        """Add a canary with the gradient factor · u aᵀ in a layer, `gradient` being (a, u)."""
        number = self.add(name, row, factor)
        self.plants.setdefault(layer, []).append((number, *gradient))

    def loss(self, subject: Subject) -> PlantedLoss:
        """Return the user's loss with these canaries in it."""
        plants = []
        for layer, planted in self.plants.items():
            numbers, inputs, outputs = zip(*planted, strict=True)
            plant = Plant(
                layer=layer,
                ids=torch.tensor(numbers),
                inputs=torch.stack(inputs),
                outputs=torch.stack(outputs),
            )
            plants.append(plant)
        factors = torch.tensor(self.factors, dtype=torch.float64)
        return PlantedLoss(subject.loss_fn, factors, plants)

    def dataset(self, subject: Subject) -> TensorTuple:
        """Return the examples, then the canaries, with the ids of canaries as a last tensor.

        If the unit is larger than a record, every record of a canary's unit carries the canary.
        """
        copies = subject.records_of_a_unit
        columns = []
        for i, x in enumerate(subject.dataset):
            rows = torch.stack([row[i] for row in self.rows])
            repeated = rows.repeat_interleave(copies, 0)
            columns.append(torch.cat([x, repeated]))
        ids = torch.arange(len(self.names)).repeat_interleave(copies)
        size = len(subject.dataset[-1])
        no_canaries = torch.full((size,), NO_CANARY)
        return (*columns, torch.cat([no_canaries, ids]))

    def units(self, subject: Subject) -> Tensor | None:
        """Return the unit of every row of `dataset`, None if every row is a unit."""
        if subject.units is None:
            return None
        last = subject.size + len(self.names)
        canaries = torch.arange(subject.size, last)
        records = canaries.repeat_interleave(subject.records_of_a_unit)
        return torch.cat([subject.unit_numbers, records])

    def open_session(
        self,
        subject: Subject,
        script: Script,
        *,
        seed: int | None = None,
        micro: int | None = None,
        **options: Any,
    ) -> tuple[WatchedSession, RandomWalk]:
        """Open a session on a script over the examples and these canaries.

        Args:
            subject: what is audited.
            script: units of every batch.
            seed: of repeatable noise; None leaves the noise secret.
            micro: rows of a micro-batch; None leaves the plan's own.
            options: of `harness.open_session`.
        """
        size = subject.size + len(self.names)
        plan = script_plan(subject.plan, script, size, seed=seed, micro=micro)
        dataset = self.dataset(subject)
        units = self.units(subject)
        return open_session(subject, plan, dataset, units=units, verify=False, **options)

    def release_still(
        self, subject: Subject, script: Script, seed: int | None = None
    ) -> Iterator[Released]:
        """Yield the release of every batch, all at the same weights and in the same metric.

        Args:
            subject: what is audited.
            script: units of every batch.
            seed: of repeatable noise; None leaves the noise secret.
        """
        session, walk = self.open_session(subject, script, seed=seed, still=True)
        loss = self.loss(subject)
        with session:
            for batch in session.batches():
                session.step(batch, loss)
                walk.gradients.clear()
                yield session.take()


def make_canaries(subject: Subject, layers: Sequence[Layer], metric: Metric) -> Canaries:
    """Make non-finite and extreme examples, and chosen gradients in up to a dozen layers.

    Args:
        subject: what is audited.
        layers: of its model.
        metric: in force at the first step.
    """
    canaries = Canaries()
    row = subject.example(0)
    canaries.add("another example", subject.example(-1))
    for name, factor in FACTORS.items():
        canaries.add(name, row, factor)
    if row[0].is_floating_point():
        for name, change in INPUTS.items():
            changed = change(row[0])
            canaries.add(name, (changed, *row[1:]))
    else:
        # No batch takes examples of the second half.
        size = len(subject.dataset[-1])
        second_half = range(size // 2, size)
        for number in second_half[:9]:
            canaries.add(f"example {number}", subject.example(number))
    by_name = {layer.name: layer for layer in layers}
    _plant_gradients(canaries, subject, row, by_name, metric)
    return canaries


def _plant_gradients(
    canaries: Canaries,
    subject: Subject,
    row: TensorTuple,
    layers: Mapping[str, Layer],
    metric: Metric,
) -> None:
    plantable = _select_plantable(subject)
    generator = torch.Generator().manual_seed(SEED)
    for name, (input_shape, output_shape) in plantable.items():
        a = torch.randn(input_shape, generator=generator)
        u = torch.randn(output_shape, generator=generator)
        for factor in (1e-3, 1.0, 1e3):
            canaries.plant(f"{name}: random × {factor:g}", row, name, (a, u), factor)
        gradient = (_first_entry(a), _first_entry(u))
        canaries.plant(f"{name}: one entry", row, name, gradient, 1e3)
        if len(input_shape) == len(output_shape) == 2 and input_shape[0] > 1:
            gradient = _cancelling_positions(a, u)
            canaries.plant(f"{name}: positions cancel", row, name, gradient, 1.0)
        layer = layers.get(name)
        entry = metric.get(name)
        sides = None if entry is None else entry.sides
        if layer is not None and sides is not None and layer.rule == "linear":
            _plant_extremes(canaries, row, layer, sides, plantable[name])
    for name, (input_shape, output_shape) in list(plantable.items())[-1:]:
        a = _unit_vector(torch.ones(input_shape))
        u = _unit_vector(torch.ones(output_shape))
        for k in HUGE:
            length = k * 2.0**149 * subject.plan.max_grad_norm / 1e22
            gradient = (1e22 * a, length * u)
            canaries.plant(f"{name}: norm of {k:g} · 2^149 C", row, name, gradient, 1.0)


def _select_plantable(subject: Subject) -> dict[str, Shapes]:
    """Return the shapes of up to LAYERS layers that gradients are planted in, evenly spaced."""
    model = subject.model()
    batch = draw_batch(model, subject.loss_fn, subject.dataset, subject.collate_fn)
    plantable = find_plantable(model, subject.loss_fn, batch)
    layers = []
    for name, shapes in plantable.items():
        # If a batch decides how long its examples are, no input of one length fits.
        if subject.collate_fn is None or len(shapes[0]) == 1:
            layers.append((name, shapes))
    if len(layers) > LAYERS:
        spacing = (len(layers) - 1) / (LAYERS - 1)
        layers = [layers[round(i * spacing)] for i in range(LAYERS)]
    return dict(layers)


def _plant_extremes(
    canaries: Canaries, row: TensorTuple, layer: Layer, entry: Kronecker, shapes: Shapes
) -> None:
    """Plant gradients along the directions that the metric stretches most and least."""
    input_shape, output_shape = shapes
    d_in = input_shape[-1]
    d_out = output_shape[-1]
    has_bias = "bias" in layer.parameters
    maps = {"stretched most": entry, "stretched least": entry.inverse()}
    for kind, kronecker in maps.items():
        direction = _find_stretched(kronecker.input.apply, d_in + has_bias)
        a = direction[:d_in].expand(input_shape).clone()
        direction = _find_stretched(kronecker.output.apply, d_out)
        u = direction.expand(output_shape).clone()
        canaries.plant(f"{layer.name}: {kind}", row, layer.name, (30 * a, u), 1e3)
        canaries.plant(f"{layer.name}: {kind}, small", row, layer.name, (a, u), 1e-3)


def _find_stretched(apply: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Return the unit vector `[size]` that a symmetric map stretches most.

    Source:
        Power iteration.
    """
    angles = torch.arange(size, dtype=torch.float32)
    x = torch.ones(1, size) + 0.1 * torch.sin(angles)
    for _ in range(POWER_ITERATIONS):
        try:
            x = apply(x)
        except RuntimeError:
            # The map has another type than float32.
            x = apply(x.double())
        x = _unit_vector(x)
    return x[0].float()


def _unit_vector(x: Tensor) -> Tensor:
    return x / x.norm()


def _first_entry(x: Tensor) -> Tensor:
    """Return a one in the first entry and zeros elsewhere."""
    one = torch.zeros_like(x)
    one.view(-1)[0] = 1.0
    return one


def _cancelling_positions(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and output gradients `[T, d]` whose positions cancel but for a small rest."""
    length = len(a)
    signs = torch.ones(length, 1)
    signs[1::2] = -1.0
    # The last of an odd number of positions has no partner.
    signs[length - length % 2 :] = 0.0
    common = 1e3 * functional.normalize(a[0], dim=0)
    inputs = common.repeat(length, 1)
    inputs[0] += functional.normalize(a[1], dim=0)
    outputs = 10 * signs * functional.normalize(u[0], dim=0)
    return inputs, outputs
