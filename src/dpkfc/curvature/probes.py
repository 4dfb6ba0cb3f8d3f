"""Probes: where the inputs that curvature is measured on come from. None of them reads private data.

A probe is a frozen value with `sample(n, generator)`, which returns CPU tensors, and `describe()`, which is JSON-able
and goes into the plan's hash and onto the privacy card. Inputs are a tensor or a mapping of tensors, see `inputs`; token
noise has a module of its own, `tokens`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --------------------------------------------------------------------------------------------------
# What a probe hands to a model: one tensor, or a mapping of tensors whose first axis is the
# example.
#
# A tensor is passed as `model(inputs)`, a mapping as `model(**inputs)`, as tokenised text is, and a
# tuple or list as `model(*inputs)`. A model whose forward function has other arguments gets the
# mapping, or the list, as one argument.

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
Sample: TypeAlias = tuple[Inputs, Tensor | None]

# A decoder's own mask comes first: its positions are those of the logits.
_MASKS = ("decoder_attention_mask", "attention_mask")


def tensors(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every input, in the order of the names; a lone tensor has the name ""."""
    if isinstance(inputs, Tensor):
        yield "", inputs
    else:
        yield from sorted(inputs.items())


def examples(inputs: Inputs) -> int:
    """Number of examples.

    Raises:
        ValueError: tensors that disagree about it, or none at all.
    """
    sizes = {name: x.shape[0] if x.dim() else 0 for name, x in tensors(inputs)}
    if not sizes:
        raise ValueError("inputs of a probe are an empty mapping; give for example input_ids and attention_mask")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"inputs of a probe must have the same number of examples along the first axis, got {sizes}")
    return next(iter(sizes.values()))


def select(inputs: Inputs, rows: slice | Tensor) -> Inputs:
    """The inputs of some examples."""
    if isinstance(inputs, Tensor):
        return inputs[rows]
    return {name: x[rows] for name, x in inputs.items()}


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def placed(inputs: Inputs, model: nn.Module) -> Inputs:
    """Inputs on the model's device, floating point ones in its dtype."""
    device = device_of(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if isinstance(inputs, Tensor):
        return inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)
    return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in inputs.items()}


def named_inputs(inputs: Any) -> Any:
    """Return several inputs by name: those of a tuple or list by their numbers."""
    if isinstance(inputs, (tuple, list)):
        return {str(i): x for i, x in enumerate(inputs)}
    return inputs


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Return the model's output on inputs."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if list(inputs) == [str(i) for i in range(len(inputs))]:
        values = list(inputs.values())
        return model(*values) if _takes(model, positional=len(values)) else model(values)
    return model(**inputs) if _takes(model, names=list(inputs)) else model(dict(inputs))


def _takes(model: nn.Module, *, names: Sequence[str] = (), positional: int = 0) -> bool:
    """Return whether the forward function of a model has arguments of these names, or so many in their order."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = {p.kind for p in parameters}
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional:
        return inspect.Parameter.VAR_POSITIONAL in kinds or len(ordered) >= positional
    known = {p.name for p in parameters}
    single = len(ordered) == 1 and inspect.Parameter.VAR_KEYWORD not in kinds
    return not single or set(names) <= known


def padding_mask(inputs: Inputs, padding: int | None = None) -> Tensor | None:
    """True `[N, T]` at the positions that are text, or None where the inputs do not say.

    Args:
        inputs: a mapping says so by its attention mask.
        padding: the id that fills bare token ids and stands nowhere else, if there is one.
    """
    if isinstance(inputs, Tensor):
        ids = padding is not None and inputs.dim() == 2 and not inputs.is_floating_point()
        return torch.ne(inputs, padding or 0) if ids else None
    held = next((inputs[name] for name in _MASKS if name in inputs), None)
    return torch.ne(held, 0) if held is not None and held.dim() == 2 else None


# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# Dead leaves: images of discs that lie over one another, with the edges and flat parts that
# Gaussian noise has not.


@dataclass(frozen=True)
class DeadLeaves:
    """Discs of random place, size and level, each over those before it, on a ground of a level of its own.

    Radii have a density that falls as r^−size_exponent between two bounds; with exponent 3 an image looks alike at every scale,
    as natural images do: its spectrum is close to that of pink noise, and unlike it it has edges. Every example is then
    standardised over all its channels and positions.

    Attributes:
        shape: `(channels, height, width)`.
        leaves: discs an image; few leave much of the ground in sight.
        size_exponent: of the density of radii, above 1.
        smallest: radius in pixels; below two a disc is no more than a speck.
        largest: radius as a share of the longer side.
        mean, std: of every example.
        channel_correlation: correlation between the channels of a leaf, in [0, 1].

    Source: the dead leaves model of Matheron (1968); scale invariance at exponent 3: Lee, Mumford and Huang (2001).
    """

    shape: tuple[int, ...]
    leaves: int = 32
    size_exponent: float = 3.0
    smallest: float = 2.0
    largest: float = 0.5
    mean: float = 0.0
    std: float = 1.0
    channel_correlation: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        check_level("DeadLeaves", self.shape, self.mean, self.std)
        if len(self.shape) != 3 or math.prod(self.shape) < 2:
            raise ValueError(f"DeadLeaves: shape must be (channels, height, width), got {self.shape}; other inputs: WhiteNoise")
        if not isinstance(self.leaves, int) or self.leaves < 1:
            raise ValueError(f"DeadLeaves: leaves must be a whole number of 1 or more, got {self.leaves}")
        if not (self.size_exponent > 1 and math.isfinite(self.size_exponent)):
            raise ValueError(f"DeadLeaves: size_exponent must be finite and above 1, got {self.size_exponent}")
        if not 0 < self.smallest <= self._largest < math.inf:
            raise ValueError(
                f"DeadLeaves: radii must lie above 0 and grow, got {self.smallest} to {self._largest:g} pixels (largest × side)"
            )
        check_correlation("DeadLeaves", self.channel_correlation)

    @property
    def _largest(self) -> float:
        return self.largest * max(self.shape[1:])

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Inputs `[n, channels, height, width]`, float32 on the CPU; no labels."""
        channels, height, width = self.shape
        radius = self._radii(torch.rand(self.leaves, n, generator=generator, dtype=torch.float64))
        # Centres lie up to a radius outside of the image, so that its border is no different from its middle.
        place = torch.rand(2, self.leaves, n, generator=generator, dtype=torch.float64)
        centre = [place[i] * (size + 2 * radius) - radius for i, size in enumerate((height, width))]
        level = torch.randn(self.leaves + 1, n, channels, generator=generator, dtype=torch.float64)
        if self.channel_correlation > 0:
            common = torch.randn(self.leaves + 1, n, 1, generator=generator, dtype=torch.float64)
            level = correlated(level, common, self.channel_correlation)
        x = level[0].view(n, channels, 1, 1).repeat(1, 1, height, width)
        down, across = torch.arange(height) + 0.5, torch.arange(width) + 0.5
        for leaf in range(self.leaves):
            rows = (down - centre[0][leaf].view(n, 1)).square().view(n, height, 1)
            columns = (across - centre[1][leaf].view(n, 1)).square().view(n, 1, width)
            inside = rows + columns <= radius[leaf].square().view(n, 1, 1)
            x = torch.where(inside.unsqueeze(1), level[leaf + 1].view(n, channels, 1, 1), x)
        return standardised(x, self.mean, self.std), None

    def _radii(self, uniform: Tensor) -> Tensor:
        """Radii of the density, from uniform numbers by its inverse distribution function."""
        power = 1 - self.size_exponent
        low, high = self.smallest**power, self._largest**power
        return (low + uniform * (high - low)) ** (1 / power)

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        return described(self)


# --------------------------------------------------------------------------------------------------
# Probes that the model has had a hand in: every second input is moved until it is sure of a class
# for it.
#
#     g_i = ∂/∂x_i −log p(y_i | x_i),   y_i drawn uniformly,   smoothed over neighbouring positions
#     x_i ← x_i − step_size · std_i · √dim · g_i / ‖g_i‖,   then back to the mean and deviation that x_i was drawn with
#
# Noise excites a layer in other directions than the private examples do; what the model has learned
# of these is in its weights, and inputs that it takes for one of its classes bring it to light.
# With such inputs alone a factor would have too little of all else. The weights are public before
# the first step and a release after every other, so whatever is computed from them has the
# guarantee they have and costs nothing (post-processing).
#
# Source: activation maximisation (Erhan et al. 2009; Simonyan, Vedaldi and Zisserman 2014), here as
# inputs of a probe.

_BOX: dict[int, Callable[..., Tensor]] = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}  # by axes


@dataclass(frozen=True)
class Refined:
    """Inputs of another probe, every second of them moved towards a class of the model that curvature is measured on.

    For models with a categorical or bernoulli likelihood and inputs of floating point; labels of the other probe are not used.
    A refresh costs about `steps` further forward and backward passes of half the probe.

    Attributes:
        probe: draws the inputs `[n, ...]`.
        steps: how often they are moved.
        step_size: root mean square of one move, as a share of an example's standard deviation.
        smoothing: times that a gradient is averaged over three neighbours along every spatial axis; inputs without one are not.
    """

    probe: Probe
    steps: int = 10
    step_size: float = 0.2
    smoothing: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.probe, Probe) or isinstance(self.probe, Refined):
            wanted = "another probe with sample() and describe(), such as PinkNoise(shape)"
            raise ValueError(f"Refined: probe must be {wanted}; got {self.probe!r}")
        for name, least in (("steps", 1), ("smoothing", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Refined: {name} must be a whole number of {least} or more, got {value!r}")
        if not (self.step_size > 0 and math.isfinite(self.step_size)):
            raise ValueError(f"Refined: step_size must be positive and finite, got {self.step_size}")

    @property
    def inputs(self) -> Inputs | None:
        """What the other probe holds, if anything: looked at for rows that are private too."""
        held: Inputs | None = getattr(self.probe, "inputs", None)
        return held

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Inputs of the other probe, not moved yet, and no labels."""
        return self.probe.sample(n, generator)[0], None

    def refine(self, inputs: Inputs, losses: Callable[[Tensor, slice], Tensor], rows: slice) -> Tensor:
        """Move the inputs of odd number to where their losses are lower; each keeps its mean and standard deviation.

        Args:
            inputs: `[n, ...]`, floating point; what one becomes does not depend on the others.
            losses: maps inputs `[m, ...]`, and their numbers among those of the probe that are moved, to losses `[m]`.
            rows: the numbers of `inputs` in the probe.

        Raises:
            ValueError: inputs that cannot be moved, such as token ids.
        """
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ValueError(
                f"Refined moves inputs that are one tensor of floating point numbers; {type(self.probe).__name__} gives others, "
                "such as token ids: use it as it is"
            )
        odd, numbers = slice(1 - rows.start % 2, None, 2), slice(rows.start // 2, rows.stop // 2)
        refined = inputs.clone()
        if numbers.stop > numbers.start:
            refined[odd] = self._moved(inputs[odd], lambda x: losses(x, numbers))
        return refined

    def _moved(self, x: Tensor, losses: Callable[[Tensor], Tensor]) -> Tensor:
        mean, std = _moments(x)
        for _ in range(self.steps):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_(True)
                (gradient,) = torch.autograd.grad(losses(leaf).sum(), leaf)
            x = x.detach() - self.step_size * std * self._direction(gradient)
            now, spread = _moments(x)
            x = mean + (x - now) * (std / spread.clamp(min=1e-12))
        return x

    def _direction(self, gradient: Tensor) -> Tensor:
        """Smoothed, with a root mean square of 1 in every example; 0 where there is no gradient."""
        if (box := _BOX.get(gradient.dim())) is not None:
            for _ in range(self.smoothing):
                gradient = box(gradient, 3, 1, 1, count_include_pad=False)
        size = gradient.flatten(1).square().mean(1).sqrt().view(-1, *[1] * (gradient.dim() - 1))
        return torch.where(size > 0, gradient / size, 0.0)

    def describe(self) -> dict[str, Any]:
        """JSON-able description: that of the other probe, and how its inputs are moved."""
        own = self.probe.describe()
        return {
            **own,
            "source": f"{own.get('source', 'unknown')}, refined by the released model",
            "labelled": False,
            "refine_steps": self.steps,
            "refine_step_size": self.step_size,
            "refine_smoothing": self.smoothing,
        }


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every example, `[n, 1, ...]`."""
    flat, shape = x.flatten(1), (-1, *[1] * (x.dim() - 1))
    return flat.mean(1).view(shape), flat.std(1, correction=0).view(shape)
