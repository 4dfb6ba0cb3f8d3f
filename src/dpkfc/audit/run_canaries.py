"""Plant canaries in a whole training run, and listen for them in its releases.

Every canary has a gradient of its own: a fixed random matrix u aᵀ in one layer. A listener
measures how strongly the releases hold each.

The gradient of such a canary depends on nothing but the step: its sign alternates. The sum over
the steps of (−1)^t times the releases accumulates the canaries. The real examples change slowly,
so they cancel. The adversary may choose gradients anew at every step (Nasr et al. 2023), so ε
covers this choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.audit.harness import Tensors
from dpkfc.audit.planted_loss import NO_CANARY, LossFn, Plant, PlantedLoss, Shapes, find_plantable
from dpkfc.audit.step_canaries import Scores
from dpkfc.clipping import SPLIT
from dpkfc.config import Plan
from dpkfc.gradients.clipped_sum import matrix_of
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.metric import Entry, Metric
from dpkfc.privacy.mechanism import Released

# The norm of a canary's gradient over C, before the metric: far enough above the clip for most.
LOUDNESS = 1e3
# Norms and overlaps of canaries come from this many snapshots of a changing metric.
SNAPSHOTS = 3
# Up to so many entries of the layer for each canary, all canaries are solved for together.
MOST_ENTRIES = 16
MOST_SOLVED = 5000
MOST_MATERIALISED = 50_000_000


class RunCanaries:
    """What a run needs of its canaries.

    Attributes:
        loss: of the user, with the canaries in it.
        dataset: the examples, and the ids of canaries as the last tensor.
        layer: with planted gradients, "" without.
    """

    loss: PlantedLoss
    dataset: Tensors
    layer = ""

    def start_step(self, step: int) -> None:
        """Prepare a step; by default canaries are the same at every step."""

    def observe(self, released: Released, metric: Metric) -> None:
        """Take a release and the metric of its noise; by default the model alone is seen."""

    def scores(self) -> Scores:
        """Return how likely each canary was included, on its own scale `[m]`."""
        raise NotImplementedError


class PlantedCanaries(RunCanaries):
    """Canaries planted in one layer of a user's run.

    Args:
        plan: of the run; its dataset is the examples and one row a canary after them.
        model: of the run, before its first step.
        dataset: the examples `[N]`, tensors with a common first axis.
        loss_fn: of the user.
        coins: which canaries are in the training set `[m]`.
        rng: makes the directions, which are public.
        layer: path of a linear layer or convolution; None takes the largest in which a gradient can
            be planted.

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
                f"clipping={plan.clipping!r} splits gradients along a basis, so none can be "
                "planted: use kind='mislabelled'"
            )
        device = next(model.parameters()).device
        m = len(coins)
        batch = tuple(x[:2].to(device) for x in dataset)
        plantable = find_plantable(model, loss_fn, batch)
        target, (input_shape, output_shape) = _choose_layer(model, plantable, layer)
        a = _random_signs(rng, (m, *input_shape))
        if target.rule == "conv":
            u = _random_signs(rng, (m, output_shape[0]))
            inputs, rows = _one_patch(target, a, output_shape)
        else:
            u = _random_signs(rng, (m, output_shape[-1]))
            inputs, rows = _one_position(a)
        if "bias" in target.parameters:
            ones = rows.new_ones(m, 1)
            rows = torch.cat([rows, ones], 1)
        lengths = rows.norm(dim=1, keepdim=True)
        norms = u[0].norm() * lengths
        u = u * (LOUDNESS * plan.max_grad_norm / norms)
        outputs = torch.zeros(m, *output_shape)
        outputs[_planted_position(target, output_shape)] = u
        self.layer = target.display_name
        u = u.to(device)
        rows = rows.to(device)
        self.listener = Listener(target, u, rows, plan.steps)
        self._plan = plan
        # The signs of the factors change from step to step.
        self._factors = torch.from_numpy(coins.astype(np.float64))
        plant = Plant(
            layer=target.name,
            ids=torch.arange(m),
            inputs=inputs.to(device),
            outputs=outputs.to(device),
        )
        self.loss = PlantedLoss(loss_fn, self._factors, [plant])
        self.dataset = _append_rows(dataset, m)

    def start_step(self, step: int) -> None:
        """Set the sign of the step."""
        self._factors.abs_()
        self._factors *= _sign(step)

    def observe(self, released: Released, metric: Metric) -> None:
        """Add one release, given the metric of its noise."""
        self.listener.observe(released, metric)

    def scores(self) -> Scores:
        """Return how likely each canary was included, on its own scale `[m]`."""
        return self.listener.scores(self._plan)


def _sign(step: int) -> int:
    return 1 - 2 * (step % 2)


def _random_signs(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    bits = rng.integers(0, 2, shape).astype(np.float32)
    return torch.from_numpy(bits * 2 - 1)


def _append_rows(dataset: Sequence[Tensor], m: int) -> Tensors:
    """Return the examples, m rows more, and the ids of canaries.

    The new rows are copies of examples, whose content is replaced by the planted inputs.
    """
    size = len(dataset[0])
    copies = torch.arange(m) % size
    columns = []
    for x in dataset:
        rows = copies.to(x.device)
        columns.append(torch.cat([x, x[rows]]))
    no_canaries = torch.full((size,), NO_CANARY)
    ids = torch.cat([no_canaries, torch.arange(m)])
    return (*columns, ids.to(dataset[0].device))


def _choose_layer(
    model: nn.Module, plantable: dict[str, Shapes], name: str | None
) -> tuple[Layer, Shapes]:
    """Return the requested layer, or the plantable layer with the largest weight."""
    layers = {}
    for layer in find_layers(model):
        if layer.name in plantable and _is_plain(layer):
            layers[layer.name] = layer
    if not layers:
        raise ValueError(
            "the model has no plain linear layer or convolution to plant gradients in: "
            "use kind='mislabelled'"
        )
    if name is None:
        sizes = {path: layer.tensor("weight").numel() for path, layer in layers.items()}
        name = max(sizes, key=sizes.__getitem__)
    elif name not in layers:
        raise ValueError(
            f"no gradient can be planted in layer {name!r}: choose one of {', '.join(layers)}"
        )
    return layers[name], plantable[name]


def _is_plain(layer: Layer) -> bool:
    """Return whether a layer is linear, or a convolution whose patches `unfold` makes.

    The layer must consist of one module with a trained weight.
    """
    if len(layer.modules) != 1 or "weight" not in layer.parameters:
        return False
    if layer.rule == "linear":
        return not layer.paths
    module = layer.module
    return (
        layer.rule == "conv"
        and isinstance(module, nn.Conv2d)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _planted_position(layer: Layer, output_shape: torch.Size) -> tuple[Any, ...]:
    """Return the index of the one position of `[m, *output_shape]` that holds u."""
    if layer.rule == "conv":
        _, height, width = output_shape
        everything = slice(None)
        return (everything, everything, height // 2, width // 2)
    return _first_position(len(output_shape) + 1)


def _first_position(ndim: int) -> tuple[Any, ...]:
    """Return the index of the first position of `[m, ..., d]`."""
    firsts = [0] * (ndim - 2)
    return (slice(None), *firsts)


def _one_position(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs that are zero except at one position, and that position `[m, d_in]`."""
    first = _first_position(a.ndim)
    position = a[first]
    inputs = torch.zeros_like(a)
    inputs[first] = position
    return inputs, position


def _one_patch(layer: Layer, a: Tensor, output_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the inputs, and the patch that one position of the output sees `[m, d_in]`."""
    module = layer.module
    assert isinstance(module, nn.Conv2d) and not isinstance(module.padding, str)
    _, height, width = output_shape
    position = (height // 2) * width + width // 2
    patches = []
    for part in a.split(64):
        unfolded = functional.unfold(
            part,
            module.kernel_size,
            dilation=module.dilation,
            padding=module.padding,
            stride=module.stride,
        )
        patches.append(unfolded[:, :, position])
    return a, torch.cat(patches)


class Listener:
    """Sums the releases of one layer, and scores canaries by their inner products with the sum.

    The sum is mapped so that a canary's contribution is ⟨u aᵀ, sum⟩ for every metric.

    Args:
        layer: with the planted gradients.
        u: `[m, d_out]`.
        a: `[m, d_in]`, with a last column of ones if the layer trains a bias.
        steps: releases to come.
    """

    def __init__(self, layer: Layer, u: Tensor, a: Tensor, steps: int) -> None:
        self.layer = layer
        self._u = u
        self._a = a
        self._steps = steps
        self._entry: Entry | None = None
        self._pending: Tensor | None = None
        self._sum: Tensor | float = 0.0
        self._squared_norms: list[Tensor] = []
        self._overlaps: Tensor | float = 0.0
        self._next_snapshot = 0
        self._observed = 0

    def observe(self, released: Released, metric: Metric) -> None:
        """Add one release with the sign of its step."""
        entry = metric.get(self.layer.name)
        if self._pending is not None and entry is not self._entry:
            self._add_pending()
        self._entry = entry
        signed = _sign(released.step) * matrix_of(self.layer, released.gradients)
        if self._pending is not None:
            signed = self._pending + signed
        self._pending = signed
        self._observed += 1

    def _add_pending(self) -> None:
        """Map the sum of one metric, add it to the total, and measure the canaries if due."""
        assert self._pending is not None
        if self._observed > self._next_snapshot or not self._squared_norms:
            self._measure_canaries()
            self._next_snapshot = self._observed + self._steps // SNAPSHOTS
        mapped = _map_again(self.layer, self._entry, self._pending)
        self._sum = self._sum + mapped
        self._pending = None

    def _measure_canaries(self) -> None:
        """Store norms and overlaps of the canaries in the metric in force."""
        assert self._pending is not None
        u = self._u.to(self._pending)
        a = self._a.to(self._pending)
        u, a, scale = _transform_factors(self.layer, self._entry, u, a)
        u_squares = u.square()
        a_squares = a.square()
        if scale is None:
            squares = u_squares.sum(1) * a_squares.sum(1)
        else:
            scaled = u_squares @ scale.square()
            squares = (scaled * a_squares).sum(1)
        self._squared_norms.append(squares.double())
        if self._is_solvable(scale is not None):
            self._overlaps = self._overlaps + _inner_products(u, a, scale)

    def _is_solvable(self, is_materialised: bool) -> bool:
        """Return whether one linear system for all canaries is small enough."""
        m, d_out = self._u.shape
        entries = d_out * self._a.shape[1]
        if is_materialised and m * entries > MOST_MATERIALISED:
            return False
        return m <= MOST_SOLVED and entries <= MOST_ENTRIES * m

    def scores(self, plan: Plan) -> Scores:
        """Estimate the number of steps that each canary was in, given the releases `[m]`.

        In wide layers the estimate has an unknown scale. Otherwise it is the linear estimate of
        least mean square error. Counts are Binomial(T, q) for half the canaries and 0 for the
        others. The noise is the plan's or, if the scores vary more, what they show.

        Raises:
            ValueError: no release was observed.
        """
        if self._pending is not None:
            self._add_pending()
        if not isinstance(self._sum, Tensor):
            raise ValueError("no release was observed: call observe after every step")
        squared_norms = torch.stack(self._squared_norms).mean(0)
        norms = squared_norms.sqrt().clamp(min=1e-300)
        total = plan.expected_batch_size * self._sum
        u = self._u.to(total)
        a = self._a.to(total)
        transposed = u @ total
        products = (transposed * a).sum(1).double() / norms
        scores: Scores = products.cpu().numpy()
        if isinstance(self._overlaps, Tensor):
            overlaps = self._overlaps.double() / len(self._squared_norms)
            overlaps = overlaps / norms[:, None] / norms
            scores = _solve_counts(
                products.cpu(),
                overlaps.cpu(),
                norms.cpu(),
                plan,
                self._observed,
            )
        return np.nan_to_num(scores)


def _solve_counts(
    products: Tensor, overlaps: Tensor, norms: Tensor, plan: Plan, steps: int
) -> Scores:
    """Return the estimate for canaries that overlap.

    Source:
        v c (v c² K + τ²)⁻¹ (y − c K E x) for y = c K x + noise τ² K.
    """
    clipped_norm = float(norms.clamp(max=plan.max_grad_norm).mean())
    if plan.clipping == "normalised":
        clipped_norm /= plan.max_grad_norm
    rate = plan.expected_batch_size / plan.dataset_size
    expected = steps * rate
    mean = expected / 2
    second_moment = expected * (1 - rate) + expected**2
    variance = second_moment / 2 - mean**2
    signal = variance * clipped_norm**2
    rest = products - clipped_norm * mean * overlaps.sum(1)
    squares = overlaps.square().sum(1)
    explained = signal * squares.mean()
    shown = float(rest.square().mean() - explained)
    noise = max(steps * plan.stddev**2, shown, 1e-9 * signal)
    identity = torch.eye(len(products), dtype=overlaps.dtype)
    system = signal * overlaps + noise * identity
    estimate: Scores = torch.linalg.solve(system, rest).numpy()
    return estimate


def _map_again(layer: Layer, entry: Entry | None, matrix: Tensor) -> Tensor:
    """Apply the metric's own map once more.

    The map is symmetric, so ⟨g, mapped⟩ = ⟨whitened g, released⟩.
    """
    if entry is None:
        return matrix
    if entry.is_elementwise:
        return matrix * _scale_matrix(layer, entry, matrix)
    return entry.apply(matrix)


def _scale_matrix(layer: Layer, entry: Entry, like: Tensor) -> Tensor:
    """Return the scales of an elementwise entry as a matrix."""
    scales = {}
    for role, name in layer.parameters.items():
        ones = torch.ones_like(layer.tensor(role))
        scales[name] = entry.scales.get(role, ones)
    matrix = matrix_of(layer, scales)
    return matrix.to(like)


def _transform_factors(
    layer: Layer, entry: Any, u: Tensor, a: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return u, a and scale such that scale ⊙ u aᵀ are the preconditioned canaries.

    They are so up to a rotation.
    """
    if entry is None:
        return u, a, None
    if entry.is_elementwise:
        return u, a, _scale_matrix(layer, entry, u)
    factors: tuple[Tensor, Tensor, Tensor | None] = entry.map_factors(u, a)
    return factors


def _inner_products(u: Tensor, a: Tensor, scale: Tensor | None) -> Tensor:
    """Return the inner products of the canaries `[m, m]`."""
    if scale is None:
        products = u @ u.T
        return products * (a @ a.T)
    outer = u[:, :, None] * a[:, None, :]
    matrices = (outer * scale).flatten(1)
    return matrices @ matrices.T
