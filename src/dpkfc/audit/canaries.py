"""The canaries of an audit: examples that an adversary would choose, so that a bound that can be exceeded is exceeded.

A bound of the norm is easiest to break at its edges: a gradient far above and far below the clip, along the directions that
the metric stretches most and least, against the sum of the others, in one parameter group alone, and not finite at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.audit.harness import NOBODY, Plant, PlantedLoss, Subject, plantable
from dpkfc.config import Plan
from dpkfc.gradients.clipping import SPLIT, matrix_of
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Entry, Kronecker, Metric
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


# --------------------------------------------------------------------------------------------------
# Canaries with a gradient of their own: a fixed random matrix u aᵀ in one layer, and how strongly a
# release holds each.
#
# The gradient of such a canary depends on nothing but the step: its sign alternates, so that the
# sum over the steps of (−1)^t times the releases adds up what canaries give and lets cancel what
# the real examples give, which changes slowly. The adversary may choose gradients anew at every
# step (Nasr et al. 2023), so ε covers this like anything else.

LOUDNESS = 1e3  # norm of a canary's gradient over C, before the metric: far enough above the clip for most metrics
SNAPSHOTS = 3  # of a changing metric, from which lengths and overlaps of canaries are taken
NARROW = 16  # entries of the layer a canary, up to which canaries are told apart by solving for all of them together
MOST_SOLVED, MOST_FORMED = 5000, 50_000_000
LossFn = Callable[[nn.Module, Any], Tensor]


class Impulses:
    """Canaries planted in one layer of a user's run.

    Args:
        plan: of the run; its dataset are the examples and one row a canary behind them.
        model: of the run, before its first step.
        dataset: the examples `[N]`, tensors with a common first axis.
        loss_fn: of the user.
        coins: which canaries are in the training set `[m]`.
        rng: makes the directions, which are public.
        layer: path of a linear layer or convolution; None takes the largest in which a gradient can be planted.

    Raises:
        ValueError: no such layer, or a clip that splits a gradient along a basis.
    """

    def __init__(  # noqa: PLR0917
        self,
        plan: Plan,
        model: nn.Module,
        dataset: Sequence[Tensor],
        loss_fn: LossFn,
        coins: NDArray[np.bool_],
        rng: np.random.Generator,
        layer: str | None = None,
    ) -> None:
        if plan.clipping in SPLIT:
            raise ValueError(
                f"gradients cannot be planted under clipping={plan.clipping!r}, which splits them along a basis; use "
                "kind='mislabelled'"
            )
        device, m = next(model.parameters()).device, len(coins)
        batch = tuple(x[:2].to(device) for x in dataset)
        chosen, (into, out) = _choose(model, plantable(model, loss_fn, batch), layer)
        a, u = _signs(rng, (m, *into)), _signs(rng, (m, out[0 if chosen.rule == "conv" else -1]))
        inputs, rows = (_one_patch if chosen.rule == "conv" else _one_position)(chosen, a, out)
        if "bias" in chosen.parameters:
            rows = torch.cat([rows, rows.new_ones(m, 1)], 1)
        u = u * (LOUDNESS * plan.max_grad_norm / (u[0].norm() * rows.norm(dim=1, keepdim=True)))
        outputs = torch.zeros(m, *out)
        outputs[_where(chosen, out)] = u
        self.listener = Listener(chosen, u.to(device), rows.to(device), plan.steps)
        self._plan = plan
        self._factors = torch.from_numpy(coins.astype(np.float64))  # its sign changes from step to step
        plant = Plant(chosen.name, torch.arange(m), inputs.to(device), outputs.to(device))
        self.loss = PlantedLoss(loss_fn, self._factors, [plant])
        self.dataset = _with_rows(dataset, m)

    @property
    def layer(self) -> str:
        """Where the gradients are planted."""
        return self.listener.layer.display_name

    def before_step(self, step: int) -> None:
        """Set the sign of the step."""
        self._factors.abs_().mul_(_sign(step))

    def hear(self, released: Released, metric: Metric) -> None:
        """Take in one release, in the coordinates of the metric it was noised in."""
        self.listener.hear(released, metric)

    def scores(self) -> NDArray[np.float64]:
        """How likely each canary was in, on a scale of its own `[m]`."""
        return self.listener.scores(self._plan)


def _sign(step: int) -> int:
    return 1 - 2 * (step % 2)


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.integers(0, 2, shape).astype(np.float32) * 2 - 1)


def _with_rows(dataset: Sequence[Tensor], m: int) -> tuple[Tensor, ...]:
    """The examples, m rows more (copies, whose content is replaced by what is planted), and who carries which canary."""
    size = len(dataset[0])
    copies = torch.arange(m) % size
    columns = [torch.cat([x, x[copies.to(x.device)]]) for x in dataset]
    return (*columns, torch.cat([torch.full((size,), NOBODY), torch.arange(m)]).to(dataset[0].device))


Shapes = tuple[torch.Size, torch.Size]


def _choose(model: nn.Module, shapes: dict[str, Shapes], name: str | None) -> tuple[Layer, Shapes]:
    """The layer that was asked for, or the one with the largest weight."""
    able = {layer.name: layer for layer in find_layers(model) if layer.name in shapes and _is_plain(layer)}
    if not able:
        raise ValueError("the model has no plain linear layer or convolution to plant gradients in; use kind='mislabelled'")
    if name is not None and name not in able:
        raise ValueError(f"no gradient can be planted in layer {name!r}; choose one of {', '.join(able)}")
    name = name or max(able, key=lambda key: able[key].tensor("weight").numel())
    return able[name], shapes[name]


def _is_plain(layer: Layer) -> bool:
    """A linear layer, or a convolution whose patches torch's unfold makes; of one module, with a trained weight."""
    if len(layer.modules) != 1 or "weight" not in layer.parameters or layer.rule not in ("linear", "conv"):
        return False
    if layer.rule == "linear":
        return not layer.paths
    module = layer.module
    return (
        isinstance(module, nn.Conv2d)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _where(layer: Layer, out: torch.Size) -> tuple[Any, ...]:
    """Index of the one position of `[m, *out]` that a canary's direction u is put at."""
    if layer.rule == "conv":
        return (slice(None), slice(None), out[1] // 2, out[2] // 2)
    return (slice(None), *[0] * (len(out) - 1))


def _one_position(layer: Layer, a: Tensor, out: torch.Size) -> tuple[Tensor, Tensor]:
    """Inputs that are zero but at one position, and what is there `[m, d_in]`."""
    first: tuple[Any, ...] = (slice(None), *[0] * (a.ndim - 2))
    inputs = torch.zeros_like(a)
    inputs[first] = a[first]
    return inputs, a[first]


def _one_patch(layer: Layer, a: Tensor, out: torch.Size) -> tuple[Tensor, Tensor]:
    """Inputs as they are, and the patch that one position of the output sees `[m, d_in]`."""
    module = layer.module
    assert isinstance(module, nn.Conv2d) and not isinstance(module.padding, str)
    position = (out[1] // 2) * out[2] + out[2] // 2
    options = {"dilation": module.dilation, "padding": module.padding, "stride": module.stride}
    parts = [functional.unfold(part, module.kernel_size, **options)[:, :, position] for part in a.split(64)]
    return a, torch.cat(parts)


class Listener:
    """Sums the releases of one layer, mapped so that a canary's share is ⟨u aᵀ, sum⟩ whatever the metric was.

    Args:
        layer: where the gradients are planted.
        u: `[m, d_out]`.
        a: `[m, d_in]`, with a last column of ones where the layer trains a bias.
        steps: releases to come.
    """

    def __init__(self, layer: Layer, u: Tensor, a: Tensor, steps: int) -> None:
        self.layer, self._u, self._a, self._steps = layer, u, a, steps
        self._entry: Entry | None = None
        self._pending: Tensor | None = None
        self._sum: Tensor | float = 0.0
        self._squares: list[Tensor] = []
        self._overlaps: Tensor | float = 0.0
        self._next = self._heard = 0

    def hear(self, released: Released, metric: Metric) -> None:
        """Add one release with the sign of its step."""
        entry = metric.get(self.layer.name)
        if self._pending is not None and entry is not self._entry:
            self._settle()
        self._entry = entry
        part = _sign(released.step) * matrix_of(self.layer, released.gradients)
        self._pending = part if self._pending is None else self._pending + part
        self._heard += 1

    def _settle(self) -> None:
        """Map what was summed under one metric, and note how long the canaries were in it."""
        assert self._pending is not None
        if self._heard > self._next or not self._squares:
            self._look()
            self._next = self._heard + self._steps // SNAPSHOTS
        self._sum = self._sum + _mapped(self.layer, self._entry, self._pending)
        self._pending = None

    def _look(self) -> None:
        assert self._pending is not None
        u, a, scale = _factored(self.layer, self._entry, self._u.to(self._pending), self._a.to(self._pending))
        if scale is None:
            self._squares.append((u.square().sum(1) * a.square().sum(1)).double())
        else:
            self._squares.append((u.square() @ scale.square() * a.square()).sum(1).double())
        if self._solves(scale is not None):
            self._overlaps = self._overlaps + _overlaps(u, a, scale)

    def _solves(self, is_formed: bool) -> bool:
        m, entries = len(self._u), self._u.shape[1] * self._a.shape[1]
        return m <= MOST_SOLVED and entries <= NARROW * m and not (is_formed and m * entries > MOST_FORMED)

    def scores(self, plan: Plan) -> NDArray[np.float64]:
        """Expected number of steps that each canary was in, given the releases `[m]`; up to a scale in wide layers.

        The linear estimate of least mean square error: counts are Binomial(T, q) for half the canaries and 0 for the
        others, the noise is that of the plan or, where the scores vary more than that, what they show.

        Raises:
            ValueError: no release was heard.
        """
        if self._pending is not None:
            self._settle()
        if not isinstance(self._sum, Tensor):
            raise ValueError("no release was heard")
        lengths = torch.stack(self._squares).mean(0).sqrt().clamp(min=1e-300)
        total = plan.expected_batch_size * self._sum
        share = ((self._u.to(total) @ total) * self._a.to(total)).sum(1).double() / lengths
        if not isinstance(self._overlaps, Tensor):
            return np.nan_to_num(share.cpu().numpy())
        overlaps = self._overlaps.double() / len(self._squares) / (lengths[:, None] * lengths)
        return np.nan_to_num(_solved(share.cpu(), overlaps.cpu(), plan, self._heard, lengths.cpu()))


def _solved(share: Tensor, overlaps: Tensor, plan: Plan, steps: int, lengths: Tensor) -> NDArray[np.float64]:
    """The estimate for canaries that overlap: v c (v c² K + τ²)⁻¹ (y − c K E x) for y = c K x + noise τ² K."""
    given = float(lengths.clamp(max=plan.max_grad_norm).mean())
    if plan.clipping == "normalised":
        given /= plan.max_grad_norm
    rate = plan.expected_batch_size / plan.dataset_size
    mean = steps * rate / 2
    variance = (steps * rate * (1 - rate) + (steps * rate) ** 2) / 2 - mean**2
    rest = share - given * mean * overlaps.sum(1)
    shown = float(rest.square().mean() - variance * given**2 * overlaps.square().sum(1).mean())
    noise = max(steps * plan.stddev**2, shown, 1e-9 * variance * given**2)
    system = variance * given**2 * overlaps + noise * torch.eye(len(share), dtype=overlaps.dtype)
    estimate: NDArray[np.float64] = torch.linalg.solve(system, rest).numpy()
    return estimate


def _mapped(layer: Layer, entry: Entry | None, matrix: Tensor) -> Tensor:
    """The metric's own map once more: symmetric, so that ⟨g, mapped⟩ = ⟨whitened g, released⟩."""
    if entry is None:
        return matrix
    return matrix * _scale_of(layer, entry, matrix) if isinstance(entry, Elementwise) else entry.whiten(matrix)


def _scale_of(layer: Layer, entry: Elementwise, like: Tensor) -> Tensor:
    parts = {
        name: entry.scale[role] if role in entry.scale else torch.ones_like(layer.tensor(role))
        for role, name in layer.parameters.items()
    }
    return matrix_of(layer, parts).to(like)


def _factored(layer: Layer, entry: Entry | None, u: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """u, a and scale such that the canaries in the metric are scale ⊙ u aᵀ, up to a rotation."""
    match entry:
        case None:
            return u, a, None
        case Kronecker():
            return entry.output.apply(u), entry.input.apply(a), None
        case Eigenbasis():
            entry = entry.complete_basis()
            return (
                u if entry.output is None else u @ entry.output,
                a if entry.input is None else a @ entry.input,
                entry.scale.to(u),
            )
        case Elementwise():
            return u, a, _scale_of(layer, entry, u)


def _overlaps(u: Tensor, a: Tensor, scale: Tensor | None) -> Tensor:
    """Inner products of the canaries `[m, m]`."""
    if scale is None:
        return (u @ u.T) * (a @ a.T)
    formed = (u[:, :, None] * a[:, None, :] * scale).flatten(1)
    return formed @ formed.T
