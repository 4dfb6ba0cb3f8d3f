"""Probes: where the inputs that curvature is measured on come from. None of them reads private data.

A probe is a frozen value with `sample(n, generator)`, which returns CPU tensors, and `describe()`, which is JSON-able
and goes into the plan's hash and onto the privacy card. Inputs are a tensor or a mapping of tensors, see `inputs`; token
noise has a module of its own, `tokens`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpkfc.curvature.inputs import Inputs, Sample, examples, named_inputs, tensors

__all__ = ["FeatureNoise", "PinkNoise", "Probe", "PublicData", "WhiteNoise"]


@runtime_checkable
class Probe(Protocol):
    """What a source of probe inputs offers."""

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Inputs with n examples along the first axis, and labels or None."""
        ...

    def describe(self) -> dict[str, Any]:
        """JSON-able description, with `source` either `synthetic` or `public`."""
        ...


def check_level(name: str, shape: tuple[int, ...], mean: float, std: float) -> None:
    """Raise unless examples can have this shape, mean and deviation.

    Raises:
        ValueError: naming what cannot be.
    """
    if not shape or any(not isinstance(s, int) or s < 1 for s in shape):
        raise ValueError(f"{name}: shape must be positive integers without the batch axis, got {shape}")
    if not math.isfinite(mean):
        raise ValueError(f"{name}: mean must be finite, got {mean}")
    if not (std > 0 and math.isfinite(std)):
        raise ValueError(f"{name}: std must be positive and finite, got {std}")


def described(probe: Any, **more: Any) -> dict[str, Any]:
    """The JSON-able description of synthetic inputs: the fields of their probe."""
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(probe).items()}
    return {"kind": type(probe).__name__, "source": "synthetic", **fields, **more}


def check_correlation(name: str, correlation: float) -> None:
    """Raise unless it is a correlation between channels.

    Raises:
        ValueError: it lies outside [0, 1].
    """
    if not 0 <= correlation <= 1:
        raise ValueError(f"{name}: channel_correlation must lie in [0, 1], got {correlation}")


def correlated(own: Tensor, common: Tensor, correlation: float) -> Tensor:
    """Channels of unit variance with this correlation, from independent draws of each and a common one."""
    return math.sqrt(1 - correlation) * own + math.sqrt(correlation) * common


def standardised(x: Tensor, mean: float, std: float) -> Tensor:
    """Every example `[n, ...]` with this mean and deviation over all its entries, float32; one without any change is its mean."""
    flat = x.flatten(1)
    flat = (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True, correction=0).clamp(min=1e-12)
    return (mean + std * flat).view(x.shape).float()


@dataclass(frozen=True)
class PinkNoise:
    """Gaussian noise whose power spectrum falls as 1 / f^power_exponent, as that of natural images does.

    f is the isotropic radial frequency in cycles per sample, each axis with its own grid, so sizes need not be equal.
    The amplitude is f^(−power_exponent/2). The zero frequency takes the amplitude of the lowest other one: it stays
    finite for every exponent, and a channel's mean varies as much as its slowest wave. Every example is then
    standardised over all its channels and positions.

    Attributes:
        shape: `(channels, *spatial)` with one spatial axis or more.
        power_exponent: exponent of the POWER spectrum; 0 is white, 1 pink, 2 brown.
        mean, std: of every example.
        channel_correlation: correlation between channels, in [0, 1].

    Source: DP-KFC, Eq. 42 (power 1/f^α, amplitude 1/f^(α/2)).
    """

    shape: tuple[int, ...]
    power_exponent: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    channel_correlation: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        check_level("PinkNoise", self.shape, self.mean, self.std)
        if len(self.shape) < 2 or math.prod(self.shape) < 2:
            raise ValueError(f"PinkNoise: shape must be (channels, *spatial), got {self.shape}; vectors: FeatureNoise")
        if not math.isfinite(self.power_exponent):
            raise ValueError(f"PinkNoise: power_exponent must be finite, got {self.power_exponent}")
        check_correlation("PinkNoise", self.channel_correlation)

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Inputs `[n, channels, *spatial]`, float32 on the CPU; no labels."""
        x = torch.randn(n, *self.shape, generator=generator, dtype=torch.float64)
        if self.channel_correlation > 0:
            common = torch.randn(n, 1, *self.shape[1:], generator=generator, dtype=torch.float64)
            x = correlated(x, common, self.channel_correlation)
        axes = tuple(range(2, x.dim()))
        x = torch.fft.ifftn(torch.fft.fftn(x, dim=axes) * self._amplitude(), dim=axes).real
        return standardised(x, self.mean, self.std), None

    def _amplitude(self) -> Tensor:
        """Amplitude of every frequency, `[*spatial]`."""
        axes = [torch.fft.fftfreq(size, dtype=torch.float64) for size in self.shape[1:]]
        grid = torch.meshgrid(*axes, indexing="ij")
        radius = torch.stack([g.square() for g in grid]).sum(0).sqrt()
        if radius.numel() == 1:
            return torch.ones_like(radius)
        lowest = radius[radius > 0].min()
        # In units of the lowest frequency no power of it can overflow.
        return (radius / lowest).clamp(min=1.0).pow(-self.power_exponent / 2)

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        return described(self)


@dataclass(frozen=True)
class WhiteNoise:
    """Independent Gaussian entries.

    Attributes:
        shape: of one example, without the batch axis.
        mean, std: of every entry.
    """

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        check_level("WhiteNoise", self.shape, self.mean, self.std)

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Inputs `[n, *shape]`, float32 on the CPU; no labels."""
        return self.mean + self.std * torch.randn(n, *self.shape, generator=generator), None

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        return described(self)


@dataclass(frozen=True)
class FeatureNoise:
    """Gaussian feature vectors, optionally sparse.

    Attributes:
        dim: length of a vector.
        mean, std: of the entries that are not zero.
        density: expected share of entries that are not zero, in (0, 1].
    """

    dim: int
    mean: float = 0.0
    std: float = 1.0
    density: float = 1.0

    def __post_init__(self) -> None:
        check_level("FeatureNoise", (self.dim,), self.mean, self.std)
        if not 0 < self.density <= 1:
            raise ValueError(f"FeatureNoise: density must lie in (0, 1], got {self.density}")

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Inputs `[n, dim]`, float32 on the CPU; no labels."""
        x = self.mean + self.std * torch.randn(n, self.dim, generator=generator)
        if self.density < 1:
            x = x * (torch.rand(n, self.dim, generator=generator) < self.density)
        return x, None

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        return described(self)


@dataclass(frozen=True, eq=False)
class PublicData:
    """Examples that are public: their owner allows anyone to see them, and no private person is in them.

    Attributes:
        inputs: `[n, ...]`, floating point or token ids; or a mapping of such tensors with n in common, for example a
            tokenised public text with `input_ids` and `attention_mask`. A mapping is called as `model(**inputs)`, a tuple or list
            as `model(*inputs)`, and each as one argument where the model takes one.
        labels: `[n, ...]` or None; read only with `labels="given"`.
        provenance: where they come from, for the privacy card.

    The caller vouches for `provenance`: private examples passed here void the privacy guarantee.
    """

    inputs: Inputs
    labels: Tensor | None = None
    provenance: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.inputs, (tuple, list)):
            object.__setattr__(self, "inputs", named_inputs(self.inputs))
        if isinstance(self.inputs, Mapping):
            object.__setattr__(self, "inputs", dict(self.inputs))
        held: dict[str, Any] = dict(tensors(self.inputs)) if isinstance(self.inputs, Tensor | dict) else {"": self.inputs}
        if "labels" in held:
            raise ValueError("PublicData: give labels as PublicData(inputs, labels=...), not among the model's inputs")
        if not held or any(not isinstance(x, Tensor) or x.dim() < 1 or x.shape[0] < 1 for x in held.values()):
            raise ValueError(
                "PublicData: inputs must be a tensor, or a mapping of tensors, with at least one example along the first axis"
            )
        if not self.provenance:
            raise ValueError("PublicData: say where they come from, provenance='...'; the privacy card prints it")
        size = examples(self.inputs)
        if self.labels is not None and self.labels.shape[:1] != (size,):
            raise ValueError(
                f"PublicData: {size} inputs but labels of shape {tuple(self.labels.shape)}; "
                "the first axis of both is the example"
            )
        if any(x.is_floating_point() and not torch.isfinite(x).all() for x in held.values()):
            raise ValueError("PublicData: inputs contain NaN or infinity")

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """n examples drawn at random: distinct ones while there are enough, with replacement beyond that."""
        size = examples(self.inputs)
        if n <= size:
            chosen = torch.randperm(size, generator=generator)[:n]
        else:
            chosen = torch.randint(size, (n,), generator=generator)
        drawn = {name: _float32(x.detach().cpu()[chosen]) for name, x in tensors(self.inputs)}
        labels = None if self.labels is None else self.labels.detach().cpu()[chosen]
        return (drawn[""] if isinstance(self.inputs, Tensor) else drawn), labels

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of names, shapes, dtypes and contents."""
        digest = hashlib.sha256()
        for name, tensor in [*tensors(self.inputs), ("", self.labels)]:
            if tensor is None:
                digest.update(b"none")
                continue
            flat = tensor.detach().cpu().contiguous()
            digest.update(f"{name}{flat.dtype}{tuple(flat.shape)}".encode())
            digest.update(flat.flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """JSON-able description: provenance, sizes and a hash of the contents."""
        shapes = {name: list(x.shape[1:]) for name, x in tensors(self.inputs)}
        return {
            "kind": type(self).__name__,
            "source": "public",
            "provenance": self.provenance,
            "examples": examples(self.inputs),
            "shape": shapes[""] if isinstance(self.inputs, Tensor) else shapes,
            "labelled": self.labels is not None,
            "sha256": self.sha256,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicData) and self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash(self.sha256)


def _float32(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x
