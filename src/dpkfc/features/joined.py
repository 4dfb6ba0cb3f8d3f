"""Several feature maps side by side, with equal weight, for a linear head."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.model_inputs import Sample
from dpkfc.curvature.probes import Probe
from dpkfc.features.cache import cached_tensors
from dpkfc.features.encoder import SyntheticEncoder
from dpkfc.features.scales import CHUNK, Standardised, standardise
from dpkfc.features.scattering import ImageShape, Scattering
from dpkfc.features.synthetic_images import SyntheticImages

# Mean of the squared norm of an example's features; learning rates of heads are relative to it.
# It is the number of scattering features of a CIFAR-10 image.
ENERGY = 15_552


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
        return FlatFeatures([self._scale(settings) for settings in self.maps])

    def _scale(self, settings: Scattering | SyntheticEncoder) -> Standardised:
        """Return a map with its scales, which are kept in the user's cache folder.

        Scales of a given probe, or of an encoder from a file, are measured anew: no digest of their
        settings covers what they hold.
        """
        module = settings.build()
        make = partial(standardise, module, self.scale_probe, size=self.size, seed=self.seed)
        if self.probe is not None or (isinstance(settings, SyntheticEncoder) and settings.weights):
            return make()
        facts = {"map": settings.describe(), "size": self.size, "seed": self.seed}
        facts["torch"] = torch.__version__
        code = [inspect.getfile(kind) for kind in (type(module), Standardised, SyntheticImages)]

        def measure() -> dict[str, Tensor]:
            made = make()
            return {"mean": made.mean, "deviation": made.deviation}

        scales = cached_tensors("scales", facts, code, measure)
        origin = {"probe": self.scale_probe.describe(), "size": self.size, "seed": self.seed}
        return Standardised(module, scales["mean"], scales["deviation"], origin)

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
        parts = [build_features(self.features)(chunk) for chunk in inputs.split(CHUNK)]
        return torch.cat(parts), labels

    def describe(self) -> dict[str, Any]:
        """Return plain values of the probe, and of the maps."""
        return {**self.probe.describe(), "features": self.features.describe()}
