"""Fixed features whose scales come from synthetic examples: they see no private data and cost no ε.

A feature map stands before the layers that train. Neither its filters nor its scales depend on the
private examples, so ε is that of the head alone. The scales are mean and deviation of each channel
over a probe, and several maps side by side have equal weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import check_integer
from dpkfc.curvature.model_inputs import Sample
from dpkfc.curvature.probes import Probe
from dpkfc.features.encoder import EncoderFeatures, SyntheticEncoder
from dpkfc.features.scattering import ImageShape, Scattering, ScatteringTransform
from dpkfc.features.synthetic_images import SyntheticImages, draw_images

__all__ = [
    "EncoderFeatures",
    "FeaturesOf",
    "FlatFeatures",
    "JoinedFeatures",
    "Scattering",
    "ScatteringTransform",
    "Standardised",
    "SyntheticEncoder",
    "SyntheticImages",
    "build_features",
    "draw_images",
    "standardise",
]


# Mean of the squared norm of an example's features; learning rates of heads are relative to it.
# It is the number of scattering features of a CIFAR-10 image.
ENERGY = 15_552
# Examples of a forward pass.
_CHUNK = 50


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
    for start in range(0, size, _CHUNK):
        inputs, _ = probe.sample(min(_CHUNK, size - start), generator)
        values = features(inputs).double().transpose(0, 1).flatten(1)
        moments.append(torch.stack([values.sum(1), values.square().sum(1)]))
        count += values.shape[1]
    mean, square = torch.stack(moments).sum(0) / count
    variance = (square - mean.square()).clamp_min(0)
    # A channel that is constant on the probe keeps its scale.
    deviation = torch.where(variance > 1e-12, variance.sqrt(), torch.ones_like(variance))
    origin = {"probe": description, "size": size, "seed": seed}
    return Standardised(features, mean.float(), deviation.float(), origin)


@dataclass(frozen=True)
class JoinedFeatures:
    """Settings of features for a linear head: maps, and the images that give their scales.

    Attributes:
        maps: settings of each feature map, for images of one shape.
        probe: synthetic or public images; None draws `SyntheticImages`.
        size: number of images for the scales.
        seed: public seed of these images.

    Example:
        >>> shape = (1, 28, 28)
        >>> JoinedFeatures((Scattering(shape), SyntheticEncoder(shape))).feature_shape
        (4993,)
    """

    maps: Sequence[Scattering | SyntheticEncoder]
    probe: Probe | None = None
    size: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        shapes = {settings.shape for settings in self.maps}
        if len(shapes) != 1:
            raise ValueError(
                f"JoinedFeatures: every map needs images of one shape, got {sorted(shapes)}"
            )

    @property
    def shape(self) -> ImageShape:
        """Return channels, height and width of the images."""
        return self.maps[0].shape

    @property
    def scale_probe(self) -> Probe:
        """Return the images that give the scales."""
        return self.probe or SyntheticImages(self.shape)

    @property
    def feature_shape(self) -> tuple[int]:
        """Return the number of features of one image."""
        return (sum(math.prod(settings.feature_shape) for settings in self.maps),)

    def build(self) -> FlatFeatures:
        """Return the maps as a module without parameters that train.

        Raises:
            ValueError: a probe that holds private data, or a damaged weight file.
        """
        parts = []
        for settings in self.maps:
            module = settings.build()
            parts.append(standardise(module, self.scale_probe, size=self.size, seed=self.seed))
        return FlatFeatures(parts)

    def describe(self) -> dict[str, Any]:
        """Return plain values for a privacy card."""
        scales = {"probe": self.scale_probe.describe(), "size": self.size, "seed": self.seed}
        return {"maps": [settings.describe() for settings in self.maps], "scales": scales}


class FlatFeatures(nn.Module):
    """Features `[B, d]` of images: every map has the same energy, and all have `ENERGY` together.

    Args:
        parts: maps with their scales.
    """

    def __init__(self, parts: Sequence[Standardised]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        scaled = []
        for part in self.parts:
            features = part(x).flatten(1)
            energy = ENERGY / features.shape[1] / len(self.parts)
            scaled.append(features * math.sqrt(energy))
        return torch.cat(scaled, 1)


@cache
def build_features(settings: JoinedFeatures) -> FlatFeatures:
    """Return the maps of these settings, made once a process."""
    return settings.build()


@dataclass(frozen=True)
class FeaturesOf(Probe):
    """Features of a probe's inputs: one generator gives features, their scales and curvature.

    The maps are built when the first inputs are drawn.

    Attributes:
        features: settings of the maps that stand before the layers that train.
        probe: the inputs, synthetic or public.
    """

    features: JoinedFeatures
    probe: Probe

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return features with n examples along the first axis, and the probe's labels."""
        inputs, labels = self.probe.sample(n, generator)
        assert isinstance(inputs, Tensor)
        parts = [build_features(self.features)(chunk) for chunk in inputs.split(_CHUNK)]
        return torch.cat(parts), labels

    def describe(self) -> dict[str, Any]:
        """Return plain values: those of the probe, and of the maps."""
        return {**self.probe.describe(), "features": self.features.describe()}
