"""Plant canaries in a whole training run, and listen for them in its releases.

Every canary has a gradient of its own: a fixed matrix u aᵀ in one layer. A listener measures how
strongly a release holds each.

The gradient of such a canary depends on nothing but the step. It has one sign in the first step of
a pair, and the other in the second, so that the difference of both steps accumulates the canary,
and real examples, which change slowly, cancel. Which sign comes first is drawn for each canary and
pair, so that canaries that overlap in the metric do not add up over the run. The adversary may
choose gradients anew at every step (Nasr et al. 2023), so ε covers this choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.audit.appended_rows import AppendedRows
from dpkfc.audit.harness import TensorTuple
from dpkfc.audit.listener import Listener
from dpkfc.audit.p_values import Floats
from dpkfc.audit.planted_loss import (
    NO_CANARY,
    LossFn,
    Plant,
    PlantedLoss,
    Shapes,
    draw_batch,
    find_plantable,
)
from dpkfc.audit.step_canaries import Scores
from dpkfc.clipping import SPLIT
from dpkfc.config import Plan
from dpkfc.data.stored_rows import StoredRows
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.metric import Metric
from dpkfc.privacy.mechanism import Released
from dpkfc.step_record import Batch

Shares = NDArray[np.uint8]
Rows = tuple[Tensor | StoredRows, ...]

# The norm of a canary's gradient over C, before the metric: far enough above the clip for most.
LOUDNESS = 1e3
# The part of a canary's squared norm that lies in the bias.
BIAS_SHARE = 1e-4


class PlantedCanaries:
    """Canaries planted in one layer of a user's run.

    Args:
        plan: of the run; its dataset is the examples and one row a canary after them.
        model: of the run, before its first step.
        dataset: the examples `[N]`, tensors or stored rows with a common first axis.
        loss_fn: of the user.
        coins: which canaries are in the training set `[m]`.
        rng: makes the directions, which are public.
        layer: path of a linear layer or convolution; None takes the largest in which a gradient can
            be planted.
        is_augmented: whether rows are changed on their way to the model.

    Raises:
        ValueError: no such layer, or a clip that splits a gradient along a basis.
    """

    def __init__(  # noqa: PLR0917
        self,
        plan: Plan,
        model: nn.Module,
        dataset: Sequence[Tensor | StoredRows],
        loss_fn: LossFn,
        coins: NDArray[np.bool_],
        rng: np.random.Generator,
        layer: str | None = None,
        *,
        is_augmented: bool = False,
    ) -> None:
        if plan.clipping in SPLIT:
            raise ValueError(
                f"clipping={plan.clipping!r} splits gradients along a basis, so none can be "
                "planted: choose another clip, or leave this audit out"
            )
        device = next(model.parameters()).device
        m = len(coins)
        batch = draw_batch(model, loss_fn, dataset)
        plantable = find_plantable(model, loss_fn, batch)
        target, (input_shape, output_shape) = _choose_layer(model, plantable, layer)
        shape, entries = (m, *input_shape), None
        if target.rule == "conv":
            u = _random_signs(rng, (m, output_shape[0]))
            inputs, rows = _one_patch(target, _random_signs(rng, shape), output_shape)
        else:
            u = _random_signs(rng, (m, output_shape[-1]))
            if m <= input_shape[-1] * output_shape[-1]:
                a, u, entries = _choose_entries(rng, shape, u)
            else:
                a = _random_signs(rng, shape)
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
        self.listener = Listener(target, u.to(device), rows.to(device), entries)
        self.coins = coins
        self.observed = 0
        self._plan = plan
        self._rng = rng
        self._first_row = len(dataset[0])
        self._signs: Floats = np.ones(m)
        self._is_taken = np.zeros(m, bool)
        self._earlier: tuple[Scores, Shares] | None = None
        self._pairs: list[tuple[NDArray[np.float32], Shares]] = []
        # A layer that reads the rows themselves finds its planted inputs there, at no cost.
        is_first = not is_augmented and _reads_rows(model, loss_fn, batch, target.module)
        plant = Plant(
            layer=target.name,
            ids=torch.arange(m),
            inputs=None if is_first else inputs.to(device),
            outputs=outputs.to(device),
        )
        self.loss = PlantedLoss(loss_fn, torch.from_numpy(coins.astype(np.float32)), [plant])
        self.dataset = _append_rows(dataset, m, inputs if is_first else None)

    def start_step(self, batch: Batch) -> None:
        """Set the signs of the step, and note which canaries take part in it."""
        if batch.step % 2 == 0:
            self._signs = self._rng.choice(np.array([-1.0, 1.0]), len(self.coins))
        else:
            self._signs = -self._signs
        self.loss.factors[:-1] = torch.from_numpy(self.coins * self._signs)
        numbers = np.asarray(batch.indices) - self._first_row
        self._is_taken = np.zeros(len(self.coins), bool)
        self._is_taken[numbers[numbers >= 0]] = True
        self._is_taken &= self.coins

    def observe(self, released: Released, metric: Metric) -> None:
        """Add one release, given the metric of its noise."""
        self.observed += 1
        scores = self._plan.expected_batch_size * self.listener.listen(released, metric)
        signed, shares = self._signs * scores, self._is_taken.astype(np.uint8)
        if released.step % 2 == 0:
            self._earlier = signed, shares
        elif self._earlier is not None:
            pair = (self._earlier[0] + signed).astype(np.float32), self._earlier[1] + shares
            self._pairs.append(pair)
            self._earlier = None

    def pairs(self) -> tuple[NDArray[np.float32], Shares]:
        """Return scores of each pair of steps, and how often each canary took part `[k, m]`.

        A score is that number times the clip norm, and Gaussian noise of twice the plan's variance.
        """
        empty = np.empty((0, len(self.coins)))
        scores = np.array([pair[0] for pair in self._pairs] or empty, np.float32)
        return scores, np.array([pair[1] for pair in self._pairs] or empty, np.uint8)

    def scores(self) -> Scores:
        """Return how likely each canary was included, on its own scale `[m]`."""
        return self.pairs()[0].sum(0, dtype=np.float64)


def _random_signs(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    bits = rng.integers(0, 2, shape).astype(np.float32)
    return torch.from_numpy(bits * 2 - 1)


def _choose_entries(
    rng: np.random.Generator, shape: tuple[int, ...], u: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Give each canary an entry of the weight of its own, so that no two overlap."""
    (m, *_, columns), outputs = shape, u.shape[1]
    entries = torch.from_numpy(rng.choice(columns * outputs, m, replace=False))
    rows, places = entries // columns, entries % columns
    inputs = torch.zeros(m, columns)
    # Next to a long input the bias, which all canaries share, hardly counts.
    inputs[torch.arange(m), places] = BIAS_SHARE**-0.5
    a = inputs.view(m, *[1] * (len(shape) - 2), columns).expand(shape)
    return a, u * nn.functional.one_hot(rows, outputs), (rows, places)


def _append_rows(dataset: Sequence[Tensor | StoredRows], m: int, inputs: Tensor | None) -> Rows:
    """Return the examples, m rows more, and the ids of canaries.

    The new rows are ones, so that no example decides what a canary contributes. Their content is
    replaced by the planted inputs: here, if inputs are given for the first tensor, or on their way.
    """
    columns = list[AppendedRows]()
    for x in dataset:
        if inputs is not None and not columns:
            rows = inputs.to(x.device, x.dtype)
        else:
            rows = torch.ones(m, *x.shape[1:], dtype=x.dtype, device=x.device)
        columns.append(AppendedRows(x, rows))
    no_canaries = torch.full((len(dataset[0]),), NO_CANARY)
    ids = torch.cat([no_canaries, torch.arange(m)])
    return (*columns, ids.to(dataset[0].device))


@torch.no_grad()
def _reads_rows(model: nn.Module, loss_fn: LossFn, batch: TensorTuple, module: nn.Module) -> bool:
    """Return whether a module is handed the first tensor of a batch as it is."""
    seen = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0] is batch[0]))
    try:
        loss_fn(model, batch)
    finally:
        hook.remove()
    return seen == [True]


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
            "leave this audit out"
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
    if a.ndim == 2:
        return a, a
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
