"""Gradients of single examples by layer, as matrices with the bias as last column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Gradients = dict[str, Tensor]
Metric = Mapping[str, Any]


class FrozenWeights:
    """A network at the weights of one moment.

    Attributes:
        weights: by the name of the parameter.
        layers: names of the layers with a weight and a bias.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.layers = list(dict.fromkeys(name.rsplit(".", 1)[0] for name in self.weights))

    def gradients(self, x: Tensor, y: Tensor) -> Gradients:
        """Return per-example gradients `[n, d_out, d_in + 1]` by layer."""

        def loss(weights: Mapping[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(self.model, dict(weights), one[None])
            return F.cross_entropy(logits, label[None])

        of_each = vmap(grad(loss), (None, 0, 0))(self.weights, x, y)
        matrices = {}
        for name in self.layers:
            weight = of_each[f"{name}.weight"].flatten(2)
            bias = of_each[f"{name}.bias"].unsqueeze(2)
            matrices[name] = torch.cat([weight, bias], 2)
        return matrices

    def split_step(self, step: Gradients) -> dict[str, Tensor]:
        """Return a step `[d_out, d_in + 1]` by layer as one tensor a parameter."""
        parts = {}
        for name, part in step.items():
            weight = self.weights[f"{name}.weight"]
            parts[f"{name}.weight"] = part[:, :-1].reshape(weight.shape)
            parts[f"{name}.bias"] = part[:, -1]
        return parts


def squared_norms(part: Gradients) -> Tensor:
    """Return the squared norm of every example."""
    return sum((g.flatten(1).square().sum(1) for g in part.values()), torch.zeros(()))


def apply_metric(part: Gradients, metric: Metric | None) -> Gradients:
    """Return whitened gradients; the same ones without a metric."""
    if metric is None:
        return part
    return {name: metric[name].apply(g.contiguous()) for name, g in part.items()}
