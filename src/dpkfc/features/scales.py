"""Scale each channel of a feature map by its mean and deviation over a probe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import check_integer
from dpkfc.curvature.probes import Probe

# Examples of a forward pass.
CHUNK = 50


class Standardised(nn.Module):
    """Features less their mean over synthetic examples, divided by their deviation over them.

    Attributes:
        features: the feature map, `[B, ...]` to `[B, K, ...]`.
        origin: where mean and deviation come from, as plain values for a privacy card.
    """

    def __init__(
        self, features: nn.Module, mean: Tensor, deviation: Tensor, origin: dict[str, Any]
    ) -> None:
        super().__init__()
        self.features = features
        self.origin = origin
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, x: Tensor) -> Tensor:
        """Return standardised features `[B, K, ...]`."""
        features = self.features(x)
        shape = (1, -1) + (1,) * (features.dim() - 2)
        return (features - self.mean.view(shape)) / self.deviation.view(shape)


@torch.no_grad()
def standardise(
    features: nn.Module, probe: Probe, *, size: int = 4000, seed: int = 0
) -> Standardised:
    """Return a feature map with scales measured on a probe.

    Mean and deviation of a channel are taken over examples and positions, in float64. They depend
    on the probe and the seed alone, so they cost no ε.

    Args:
        features: the feature map, without parameters that train.
        probe: synthetic or public inputs.
        size: number of examples.
        seed: public seed of the probe.

    Raises:
        ValueError: private data instead of a probe, fewer than two examples, or a feature map whose
            parameters would train.
    """
    if not isinstance(probe, Probe):
        raise ValueError(
            f"standardise takes a probe, got {type(probe).__name__}: scales of private data would "
            "leak it; take DeadLeaves or another probe"
        )
    description = probe.describe()
    if description.get("uses_private_data"):
        raise ValueError(
            "standardise: this probe holds private data, and its scales would leak it; take a "
            "synthetic probe such as DeadLeaves"
        )
    check_integer("standardise: size", size, 2)
    if any(parameter.requires_grad for parameter in features.parameters()):
        raise ValueError(
            "standardise: the features have parameters that train, so their scales would move; "
            "call requires_grad_(False) first"
        )
    generator = torch.Generator().manual_seed(seed)
    moments = []
    count = 0
    for start in range(0, size, CHUNK):
        inputs, _ = probe.sample(min(CHUNK, size - start), generator)
        values = features(inputs).double().transpose(0, 1).flatten(1)
        moments.append(torch.stack([values.sum(1), values.square().sum(1)]))
        count += values.shape[1]
    mean, square = torch.stack(moments).sum(0) / count
    variance = (square - mean.square()).clamp_min(0)
    # A channel that is constant on the probe keeps its scale.
    deviation = torch.where(variance > 1e-12, variance.sqrt(), torch.ones_like(variance))
    origin = {"probe": description, "size": size, "seed": seed}
    return Standardised(features, mean.float(), deviation.float(), origin)
