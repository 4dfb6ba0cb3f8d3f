"""Probes: sources of the inputs that curvature is measured on. `PrivateOracle` alone is private.

A probe derives from `Probe`: a frozen value with `sample(n, generator)`, which returns CPU tensors,
and `describe()`, which goes into the plan's hash and onto the privacy card. The command line lists
its probes in `SOURCES` of `app/settings.py` and makes them in `app/assembly.py`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpkfc._checks import (
    check_in_range,
    check_integer,
    check_not_negative,
    check_one_of,
    check_optional_integer,
    check_positive,
)

# --------------------------------------------------------------------------------------------------
# Inputs of a model: one tensor, or a mapping of tensors whose first axis is the example.
#
# A tensor is passed as `model(inputs)`, a mapping as `model(**inputs)`, as tokenised text is, and a
# tuple or list as `model(*inputs)`. A model whose forward function has other arguments gets the
# mapping, or the list, as one argument.

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
Sample: TypeAlias = tuple[Inputs, Tensor | None]

# The decoder's own mask comes first: its positions are those of the logits.
_MASKS = ("decoder_attention_mask", "attention_mask")


def tensors(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every input, sorted by name; a lone tensor has the name ""."""
    if isinstance(inputs, Tensor):
        yield "", inputs
    else:
        yield from sorted(inputs.items())


def examples(inputs: Inputs) -> int:
    """Return the number of examples.

    Raises:
        ValueError: tensors that disagree about the number, or no tensor at all.
    """
    sizes = {name: len(x) if x.dim() else 0 for name, x in tensors(inputs)}
    if not sizes:
        raise ValueError(
            "inputs of a probe are an empty mapping; give for example input_ids and attention_mask"
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "inputs of a probe must have the same number of examples along the first axis, "
            f"got {sizes}"
        )
    return next(iter(sizes.values()))


def map_inputs(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with a function of each tensor in its place."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    return {name: function(x) for name, x in inputs.items()}


def select(inputs: Inputs, rows: slice | Tensor) -> Inputs:
    """Return the inputs of some examples."""
    return map_inputs(inputs, lambda x: x[rows])


def hash_tensor(digest: Any, name: str, x: Tensor) -> None:
    """Add name, dtype, shape and contents of a tensor to a hash of `hashlib`."""
    head = f"{name}{x.dtype}{tuple(x.shape)}"
    flat = x.detach().cpu().contiguous().flatten()
    digest.update(head.encode())
    digest.update(flat.view(torch.uint8).numpy().tobytes())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


def move_to_model(inputs: Inputs, model: nn.Module) -> Inputs:
    """Return inputs on the model's device, floating point ones in its dtype."""
    device = device_of(model)
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(floating, torch.float32)

    def move(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.to(device, dtype)
        return x.to(device)

    return map_inputs(inputs, move)


_PLAIN = (bool, int, float, str, type(None))


class _KeptWeights(TorchFunctionMode):
    """Copies a parameter before an operation of the body writes to it, as inference of RWKV does.

    A copy of all parameters would double their memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = set(model.parameters())
        self.copies: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        name = getattr(func, "__name__", "")
        is_write = name.endswith("_") and not name.endswith("__")
        is_write = is_write or name.startswith(("__i", "__set"))
        if is_write and args and isinstance(args[0], Tensor) and args[0] in self._parameters:
            self.copies.setdefault(args[0], args[0].detach().clone())
        return func(*args, **(kwargs or {}))


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside; restore all that a pass changes in the model afterwards.

    That is modes and other plain attributes, buffers, parameters, and the global random state.
    """
    attributes = []
    buffers = []
    for module in model.modules():
        plain = {name: x for name, x in vars(module).items() if isinstance(x, _PLAIN)}
        attributes.append((module, plain))
        for name, buffer in module.named_buffers(recurse=False):
            before = buffer.detach().clone()
            buffers.append((module, name, buffer, before))
    device = device_of(model)
    devices = [device] if device.type == "cuda" else []
    kept = _KeptWeights(model)
    try:
        model.eval()
        # cuDNN differentiates recurrent layers in training mode only. Without dropout both modes
        # give the same result.
        for module, _ in attributes:
            module.training = isinstance(module, nn.RNNBase) and not module.dropout
        with (
            torch.random.fork_rng(devices=devices),
            torch.autocast(device.type, enabled=False),
            kept,
        ):
            yield
    finally:
        for module, plain in attributes:
            vars(module).update(plain)
        with torch.no_grad():
            for p, before in kept.copies.items():
                p.copy_(before)
            for module, name, buffer, before in buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                # torch.equal does not take sparse tensors.
                is_sparse = buffer.layout != torch.strided
                if is_sparse or not torch.equal(buffer, before):
                    buffer.copy_(before)


def named_inputs(inputs: Any) -> Any:
    """Return several inputs by name: those of a tuple or list by their numbers."""
    if isinstance(inputs, (tuple, list)):
        return {str(i): x for i, x in enumerate(inputs)}
    return inputs


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Return the model's output on inputs."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    names = list(inputs)
    values = list(inputs.values())
    if names == [str(i) for i in range(len(names))]:
        if _takes(model, positional=len(values)):
            return model(*values)
        return model(values)
    if _takes(model, names=names):
        return model(**inputs)
    return model(dict(inputs))


def _takes(model: nn.Module, *, names: Sequence[str] = (), positional: int = 0) -> bool:
    """Return whether the forward function has arguments of these names, or so many in order."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = [p.kind for p in parameters]
    ordered = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    ordered += kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if positional:
        return inspect.Parameter.VAR_POSITIONAL in kinds or ordered >= positional
    if ordered != 1 or inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    known = {p.name for p in parameters}
    return set(names) <= known


def padding_mask(inputs: Inputs, padding: int | None) -> Tensor | None:
    """Return True `[N, T]` at the positions that are text, or None if the inputs do not say.

    Args:
        inputs: a mapping says so by its attention mask.
        padding: the id that fills bare token ids and occurs nowhere else, if there is one.
    """
    if isinstance(inputs, Tensor):
        if padding is None or inputs.dim() != 2 or inputs.is_floating_point():
            return None
        return torch.ne(inputs, padding)
    for name in _MASKS:
        if name in inputs:
            mask = inputs[name]
            return torch.ne(mask, 0) if mask.dim() == 2 else None
    return None


# --------------------------------------------------------------------------------------------------


class Probe(ABC):
    """A source of probe inputs: what a refresh asks of it, with a default for the rest.

    Derive from this class, best as a frozen dataclass, and define `sample` and `describe`.

    Attributes:
        is_refined: whether `refine` changes the inputs.
    """

    is_refined = False

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs with n examples along the first axis, and labels or None."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return plain values, with `source` either `synthetic` or `public`."""

    @property
    def stored_labels(self) -> Tensor | None:
        """All labels that the probe holds; None without any.

        The default is the attribute `labels`.
        """
        labels = getattr(self, "labels", None)
        if isinstance(labels, Tensor):
            return labels
        return None

    @property
    def padding_id(self) -> int | None:
        """The id that fills bare token ids and occurs nowhere else, None without one."""
        return None

    @property
    def call_hint(self) -> str:
        """What to change if the model does not take the arguments that the probe gives it."""
        return (
            "a tensor is passed as model(x), a mapping as model(**inputs), so for a model with "
            "several inputs write a probe whose sample() returns {name of the argument: tensor} "
            "(docs/models.md)"
        )

    def refine(
        self, inputs: Inputs, losses: Callable[[Tensor, slice], Tensor], rows: slice
    ) -> Inputs:
        """Return inputs moved towards classes of the model; called if `is_refined`.

        Args:
            inputs: `[n, ...]`, on the model's device.
            losses: maps inputs `[m, ...]` and their numbers among the moved inputs to losses `[m]`.
            rows: the numbers of `inputs` in the probe.
        """
        return inputs


class _SyntheticProbe(Probe):
    """A probe whose dataclass fields describe it."""

    def _check_shape(self: Any) -> None:
        """Refuse a shape that examples cannot have."""
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape or any(not isinstance(size, int) or size < 1 for size in self.shape):
            raise ValueError(
                f"{type(self).__name__}: shape must be positive integers without the batch axis, "
                f"got {self.shape}"
            )

    def _check_numbers(self: Any, **intervals: str) -> None:
        """Refuse a mean or a deviation that examples cannot have, or a field out of its interval.

        Args:
            intervals: more fields, each with the interval of its values.
        """
        name = type(self).__name__
        check_positive(f"{name}: std", self.std)
        for field, interval in {"mean": "(-inf, inf)", **intervals}.items():
            check_in_range(f"{name}: {field}", getattr(self, field), interval)

    def describe(self) -> dict[str, Any]:
        """Return plain values: the fields of the probe."""
        description: dict[str, Any] = {"kind": type(self).__name__, "source": "synthetic"}
        for name, value in asdict(self).items():  # type: ignore[call-overload]
            description[name] = list(value) if isinstance(value, tuple) else value
        return description


def _draw_channels(
    size: Sequence[int], axis: int, correlation: float, generator: torch.Generator
) -> Tensor:
    """Return standard normal numbers, float64, whose channels have this correlation.

    Args:
        size: of the result.
        axis: of the channels.
        correlation: in [0, 1].
        generator: what draws.
    """
    own = torch.randn(size, generator=generator, dtype=torch.float64)
    if correlation == 0:
        return own
    one_channel = list(size)
    one_channel[axis] = 1
    common = torch.randn(one_channel, generator=generator, dtype=torch.float64)
    own = math.sqrt(1 - correlation) * own
    return own + math.sqrt(correlation) * common


def _standardize(x: Tensor, mean: float, std: float) -> Tensor:
    """Return examples `[n, ...]` with this mean and standard deviation each, float32.

    A constant example becomes its mean.
    """
    own_mean, spread = _moments(x)
    unit = (x - own_mean) / spread.clamp(min=1e-12)
    standardised = mean + std * unit
    return standardised.float()


@dataclass(frozen=True)
class PinkNoise(_SyntheticProbe):
    """Gaussian noise with the power spectrum 1 / f^power_exponent, like that of natural images.

    f is the isotropic radial frequency in cycles per sample. Each axis has its own grid, so sizes
    need not be equal. The amplitude is f^(−power_exponent/2). The zero frequency takes the
    amplitude of the lowest other frequency: it stays finite for every exponent, and a channel's
    mean varies as much as its slowest wave. Every example is then standardised over all channels
    and positions.

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
        self._check_shape()
        if len(self.shape) < 2 or math.prod(self.shape) < 2:
            raise ValueError(
                f"PinkNoise: shape must be (channels, *spatial), got {self.shape}; vectors: "
                "FeatureNoise"
            )
        self._check_numbers(channel_correlation="[0, 1]", power_exponent="(-inf, inf)")

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs `[n, channels, *spatial]`, float32 on the CPU; no labels."""
        x = _draw_channels((n, *self.shape), 1, self.channel_correlation, generator)
        axes = tuple(range(2, x.dim()))
        spectrum = torch.fft.fftn(x, dim=axes)
        spectrum = spectrum * self._amplitude()
        x = torch.fft.ifftn(spectrum, dim=axes)
        return _standardize(x.real, self.mean, self.std), None

    def _amplitude(self) -> Tensor:
        """Return the amplitude of every frequency, `[*spatial]`."""
        axes = [torch.fft.fftfreq(size, dtype=torch.float64) for size in self.shape[1:]]
        grid = torch.meshgrid(*axes, indexing="ij")
        squares = torch.stack(grid).square()
        radius = squares.sum(0).sqrt()
        if radius.numel() == 1:
            return torch.ones_like(radius)
        lowest = radius[radius > 0].min()
        # In units of the lowest frequency no power of it can overflow.
        relative = (radius / lowest).clamp(min=1.0)
        return relative.pow(-self.power_exponent / 2)


@dataclass(frozen=True)
class WhiteNoise(_SyntheticProbe):
    """Independent Gaussian entries.

    Attributes:
        shape: of one example, without the batch axis.
        mean, std: of every entry.
    """

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        self._check_shape()
        self._check_numbers()

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs `[n, *shape]`, float32 on the CPU; no labels."""
        normal = torch.randn(n, *self.shape, generator=generator)
        return self.mean + self.std * normal, None


@dataclass(frozen=True)
class FeatureNoise(_SyntheticProbe):
    """Gaussian feature vectors, optionally sparse.

    Attributes:
        dim: length of a vector.
        mean, std: of the entries that are not zero.
        density: expected fraction of entries that are not zero, in (0, 1].
    """

    dim: int
    mean: float = 0.0
    std: float = 1.0
    density: float = 1.0

    def __post_init__(self) -> None:
        check_integer("FeatureNoise: dim", self.dim, 1)
        self._check_numbers(density="(0, 1]")

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs `[n, dim]`, float32 on the CPU; no labels."""
        normal = torch.randn(n, self.dim, generator=generator)
        x = self.mean + self.std * normal
        if self.density < 1:
            uniform = torch.rand(n, self.dim, generator=generator)
            x = x * (uniform < self.density)
        return x, None


class _ComparedByDescription(Probe):
    """A probe with tensors, which is equal to another one of the same description."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ComparedByDescription) and self.describe() == other.describe()

    def __hash__(self) -> int:
        items = sorted(self.describe().items())
        return hash(repr(items))


@dataclass(frozen=True, eq=False)
class PublicData(_ComparedByDescription):
    """Public examples: their owner allows anyone to see them, and they show no private person.

    Attributes:
        inputs: `[n, ...]`, floating point or token ids; or a mapping of such tensors with n in
            common, for example a tokenised public text with `input_ids` and `attention_mask`. A
            mapping is called as `model(**inputs)`, a tuple or list as `model(*inputs)`, and each as
            one argument of a model that takes one.
        labels: `[n, ...]` or None; read only with `labels="given"`.
        provenance: where the examples come from, for the privacy card.

    The caller vouches for `provenance`: private examples here void the privacy guarantee.
    """

    inputs: Inputs
    labels: Tensor | None = None
    provenance: str = ""

    def __post_init__(self) -> None:
        inputs = named_inputs(self.inputs)
        values: dict[str, Any] = {"": inputs}
        if isinstance(inputs, Mapping):
            values = dict(inputs)
            inputs = values
        object.__setattr__(self, "inputs", inputs)
        self._check(values)

    def _check(self, values: Mapping[str, Tensor]) -> None:
        """Check the inputs by name, labels and provenance."""
        if "labels" in values:
            raise ValueError(
                "PublicData: give labels as PublicData(inputs, labels=...), not among the model's "
                "inputs"
            )
        if not values or not all(map(_has_rows, values.values())):
            raise ValueError(
                "PublicData: inputs must be a tensor, or a mapping of tensors, with at least one "
                "example along the first axis"
            )
        if not self.provenance:
            raise ValueError(
                "PublicData: say where they come from, provenance='...'; the privacy card prints it"
            )
        size = examples(self.inputs)
        if self.labels is not None and self.labels.shape[:1] != (size,):
            raise ValueError(
                f"PublicData: {size} inputs but labels of shape {tuple(self.labels.shape)}; "
                "the first axis of both is the example"
            )
        numbers = [x for x in values.values() if x.is_floating_point()]
        is_finite = all(torch.isfinite(x).all() for x in numbers)
        if not is_finite:
            raise ValueError("PublicData: inputs contain NaN or infinity")

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return n random examples, distinct while there are enough, with replacement beyond."""
        size = examples(self.inputs)
        if n <= size:
            chosen = torch.randperm(size, generator=generator)[:n]
        else:
            chosen = torch.randint(size, (n,), generator=generator)

        def take(x: Tensor) -> Tensor:
            return x.detach().cpu()[chosen]

        def take_numbers(x: Tensor) -> Tensor:
            rows = take(x)
            return rows.float() if rows.is_floating_point() else rows

        labels = None
        if self.labels is not None:
            labels = take(self.labels)
        return map_inputs(self.inputs, take_numbers), labels

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of names, shapes, dtypes and contents."""
        digest = hashlib.sha256()
        for name, tensor in [*tensors(self.inputs), ("", self.labels)]:
            if tensor is None:
                digest.update(b"none")
            else:
                hash_tensor(digest, name, tensor)
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return plain values: provenance, sizes and a hash of the contents."""
        shapes = {name: list(x.shape[1:]) for name, x in tensors(self.inputs)}
        return {
            "kind": type(self).__name__,
            "source": "public",
            "provenance": self.provenance,
            "examples": examples(self.inputs),
            "shape": shapes.get("", shapes),
            "labelled": self.labels is not None,
            "sha256": self.sha256,
        }


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 1 and x.shape[0] >= 1


@dataclass(frozen=True)
class DeadLeaves(_SyntheticProbe):
    """Dead leaves: discs that lie over one another, with the edges that Gaussian noise lacks.

    Discs have random places, sizes and levels. Each covers those before it, on a ground with a
    level of its own. The density of radii falls as r^−size_exponent between two bounds. With
    exponent 3 an image looks alike at every scale, as natural images do, and its spectrum is close
    to that of pink noise. Every example is then standardised over all its channels and positions.

    Attributes:
        shape: `(channels, height, width)`.
        leaves: discs an image; with few of them much of the ground shows.
        size_exponent: of the density of radii, above 1.
        smallest: radius in pixels; a disc below two is only a speck.
        largest: radius as a fraction of the longer side.
        mean, std: of every example.
        channel_correlation: correlation between the channels of a leaf, in [0, 1].

    Source: Matheron (1968); scale invariance at exponent 3: Lee, Mumford and Huang (2001).
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
        self._check_shape()
        if len(self.shape) != 3 or math.prod(self.shape) < 2:
            raise ValueError(
                f"DeadLeaves: shape must be (channels, height, width), got {self.shape}; other "
                "inputs: WhiteNoise"
            )
        check_integer("DeadLeaves: leaves", self.leaves, 1)
        self._check_numbers(channel_correlation="[0, 1]", size_exponent="(1, inf)")
        if not 0 < self.smallest <= self._largest < math.inf:
            raise ValueError(
                f"DeadLeaves: radii must lie above 0 and grow, got {self.smallest} to "
                f"{self._largest:g} pixels (largest × side)"
            )

    @property
    def _largest(self) -> float:
        return self.largest * max(self.shape[1:])

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs `[n, channels, height, width]`, float32 on the CPU; no labels."""
        channels, height, width = self.shape
        shape = (self.leaves, n, 1, 1, 1)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        radius = self._radii(uniform)
        # Centres lie up to a radius outside of the image, so that the border looks like the middle.
        place = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
        diameter = 2 * radius
        down_centre = place[0] * (height + diameter) - radius
        across_centre = place[1] * (width + diameter) - radius
        # The last three axes stand for the channels, the height and the width.
        size = (self.leaves + 1, n, channels, 1, 1)
        ground, *colours = _draw_channels(size, 2, self.channel_correlation, generator)
        x = ground.repeat(1, 1, height, width)
        down = torch.arange(height) + 0.5
        down = down.view(-1, 1)
        across = torch.arange(width) + 0.5
        for leaf, colour in enumerate(colours):
            dy = down - down_centre[leaf]
            dx = across - across_centre[leaf]
            squares = dy.square() + dx.square()
            is_inside = squares <= radius[leaf].square()
            x = torch.where(is_inside, colour, x)
        return _standardize(x, self.mean, self.std), None

    def _radii(self, uniform: Tensor) -> Tensor:
        """Return radii of the density, from uniform numbers by its inverse distribution."""
        power = 1 - self.size_exponent
        low = self.smallest**power
        high = self._largest**power
        powers = low + uniform * (high - low)
        return powers ** (1 / power)


# --------------------------------------------------------------------------------------------------
# Probes that use the model: every second input is moved until the model is sure of a class for it.
#
#     g_i = ∂/∂x_i −log p(y_i | x_i),   y_i drawn uniformly,   smoothed over neighbouring positions
#     x_i ← x_i − step_size · std_i · √dim · g_i / ‖g_i‖,   then restore mean and deviation of x_i
#
# Noise excites other directions of a layer than the private examples do. The weights hold what the
# model has learned of these directions, and inputs that it assigns to a class excite them. With
# such inputs alone a factor would lack all other directions. The weights are public before the
# first step and a release after every other step. Anything computed from them is post-processing:
# it has their guarantee and costs nothing.
#
# Source: activation maximisation (Erhan et al. 2009; Simonyan, Vedaldi and Zisserman 2014), here
# for the inputs of a probe.

# Number of axes to the mean over neighbours.
_BOX: dict[int, Callable[..., Tensor]] = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}


@dataclass(frozen=True)
class Refined(Probe):
    """Inputs of another probe, every second one moved towards a class of the model.

    For models with a categorical or bernoulli likelihood and floating point inputs. Labels of the
    other probe are not used. A refresh costs about `steps` more forward and backward passes of half
    the probe.

    Attributes:
        probe: samples the inputs `[n, ...]`.
        steps: number of moves.
        step_size: root mean square of one move, as a fraction of an example's standard deviation.
        smoothing: how often a gradient is averaged over three neighbours along every spatial axis;
            inputs without such an axis are not smoothed.
    """

    probe: Probe
    steps: int = 10
    step_size: float = 0.2
    smoothing: int = 2

    is_refined = True

    def __post_init__(self) -> None:
        if not isinstance(self.probe, Probe) or self.probe.is_refined:
            raise ValueError(
                "Refined: probe must be another probe with sample() and describe(), such as "
                f"PinkNoise(shape); got {self.probe!r}"
            )
        check_integer("Refined: steps", self.steps, 1)
        check_integer("Refined: smoothing", self.smoothing, 0)
        check_positive("Refined: step_size", self.step_size)

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs of the other probe, not moved yet, and no labels."""
        inputs, _ = self.probe.sample(n, generator)
        return inputs, None

    def refine(
        self, inputs: Inputs, losses: Callable[[Tensor, slice], Tensor], rows: slice
    ) -> Tensor:
        """Move inputs with odd numbers to lower losses; each keeps its mean and deviation.

        Args:
            inputs: `[n, ...]`, floating point; the move of one does not depend on the others.
            losses: maps inputs `[m, ...]` and their numbers among the moved inputs to losses `[m]`.
            rows: the numbers of `inputs` in the probe.

        Raises:
            ValueError: inputs that cannot be moved, such as token ids.
        """
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ValueError(
                f"Refined moves inputs that are one tensor of floating point numbers; "
                f"{type(self.probe).__name__} gives others, such as token ids: use it as it is"
            )
        odd = slice(1 - rows.start % 2, None, 2)
        numbers = slice(rows.start // 2, rows.stop // 2)
        refined = inputs.clone()
        if numbers.stop > numbers.start:
            refined[odd] = self._move(inputs[odd], lambda x: losses(x, numbers))
        return refined

    def _move(self, x: Tensor, losses: Callable[[Tensor], Tensor]) -> Tensor:
        mean, std = _moments(x)
        for _ in range(self.steps):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_(True)
                total = losses(leaf).sum()
                (gradient,) = torch.autograd.grad(total, leaf)
            move = self.step_size * std * self._direction(gradient)
            x = x.detach() - move
            now, spread = _moments(x)
            spread = spread.clamp(min=1e-12)
            stretch = std / spread
            centred = x - now
            x = mean + centred * stretch
        return x

    def _direction(self, gradient: Tensor) -> Tensor:
        """Return the smoothed gradient with a root mean square of 1 in every example, or of 0."""
        box = _BOX.get(gradient.dim())
        if box is not None:
            for _ in range(self.smoothing):
                gradient = box(gradient, 3, 1, 1, count_include_pad=False)
        squares = gradient.flatten(1).square()
        size = squares.mean(1).sqrt()
        ones = [1] * (gradient.dim() - 1)
        size = size.view(-1, *ones)
        unit = gradient / size
        return torch.where(size > 0, unit, 0.0)

    def describe(self) -> dict[str, Any]:
        """Return plain values: those of the other probe, and how its inputs are moved."""
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
    """Return mean and standard deviation of every example, `[n, 1, ...]`."""
    flat = x.flatten(1)
    shape = (-1, *[1] * (x.dim() - 1))
    mean = flat.mean(1).view(shape)
    deviation = flat.std(1, correction=0).view(shape)
    return mean, deviation


# --------------------------------------------------------------------------------------------------
# Token noise: random tokens, with the special tokens and masks that a language model expects.
#
# Such a probe shows the scale that the architecture gives activations and gradients. With token
# frequencies it also shows how often a row of the embedding is read. It has neither grammar nor
# meaning, so `PublicData` of tokenised public text is a better probe if there is any.
#
# Source: DP-KFC, appendix E.2 and Algorithm 4 (uniform tokens), section 5.3 (weighted tokens).


@dataclass(frozen=True, eq=False)
class TokenNoise(_ComparedByDescription):
    """Random tokens, `[cls] tokens [sep] [pad] …`, as a mapping for `model(**inputs)`.

    A sequence has a uniform random length from `min_length` to `length`, special tokens included.
    Unlike in the paper's Algorithm 4, the separator is the last token of the text and not masked.

    Tokens are uniform (Algorithm 4), or follow Zipf's law p ∝ 1/rank^zipf_exponent, or a given
    table. The rank of Zipf's law is the order of the ids from `first_id` on. Byte-pair and
    WordPiece vocabularies list their entries roughly from frequent to rare (that of BERT from id
    1996 on, with `first_id=1996`).

    Attributes:
        vocab_size: V, one more than the largest id.
        length: T, columns of the inputs.
        min_length: shortest text; None is the special tokens and one more token a segment.
        zipf_exponent: s of Zipf's law, about 1 for natural text; None is uniform.
        frequencies: weights of all V tokens `[V]`, not negative, instead of a law. They must come
            from public text: frequencies counted on private text void the guarantee.
        provenance: where the frequencies come from, for the privacy card; only with frequencies.
        cls_id: the first token, or None.
        sep_id: the last token of the text (of each text, with two segments), or None.
        pad_id: fills the columns after the text; needed if lengths differ.
        first_id: smaller ids are not drawn.
        exclude: more ids that are not drawn; special tokens never are.
        segments: 0 gives no `token_type_ids`, 1 gives zeros, 2 a pair of texts with types 0 and 1.
        bare: the ids alone as a tensor, for a model that is called as `model(ids)`.
    """

    vocab_size: int
    length: int
    min_length: int | None = None
    zipf_exponent: float | None = None
    frequencies: Tensor | Sequence[float] | None = None
    provenance: str = ""
    cls_id: int | None = None
    sep_id: int | None = None
    pad_id: int | None = None
    first_id: int = 0
    exclude: tuple[int, ...] = ()
    segments: int = 0
    bare: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.frequencies is not None:
            table = torch.as_tensor(self.frequencies).detach().cpu().double()
            object.__setattr__(self, "frequencies", table)
        check_integer("TokenNoise: vocab_size", self.vocab_size, 1)
        check_integer("TokenNoise: length", self.length, 1)
        check_optional_integer("TokenNoise: min_length", self.min_length, 1)
        check_one_of("TokenNoise: segments", self.segments, (0, 1, 2))
        ids = [(name, getattr(self, name)) for name in ("cls_id", "sep_id", "pad_id", "first_id")]
        ids += [("exclude", value) for value in self.exclude]
        for name, value in ids:
            if value is not None:
                check_in_range(f"TokenNoise: {name}", value, f"[0, {self.vocab_size})")
        if self.zipf_exponent is not None:
            check_not_negative("TokenNoise: zipf_exponent", self.zipf_exponent)
        self._check()

    def _check(self) -> None:
        """Check settings that belong together."""
        if self.segments == 2 and self.sep_id is None:
            raise ValueError("TokenNoise: a pair of texts (segments=2) needs sep_id between them")
        if not self._least <= self._shortest <= self.length:
            raise ValueError(
                f"TokenNoise: min_length must lie between {self._least} (the special tokens and "
                f"one more a segment) and length={self.length}, got {self._shortest}"
            )
        if self._shortest < self.length and self.pad_id is None:
            raise ValueError(
                "TokenNoise: texts of different lengths need pad_id (any id, it is masked); "
                "or set min_length=length"
            )
        if isinstance(self.frequencies, Tensor):
            self._check_frequencies(self.frequencies)
        elif self.provenance:
            raise ValueError(
                "TokenNoise: provenance says where frequencies come from, but none are given"
            )
        if not float(self._cumulative[-1]) > 0:
            raise ValueError(
                "TokenNoise: no token is left to draw; check first_id, exclude and frequencies"
            )

    def _check_frequencies(self, table: Tensor) -> None:
        if self.zipf_exponent is not None:
            raise ValueError("TokenNoise: give either zipf_exponent or frequencies, not both")
        if not self.provenance:
            raise ValueError(
                "TokenNoise: say where the frequencies come from, provenance='...', for the "
                "privacy card. Frequencies counted on private text void the guarantee."
            )
        if table.shape != (self.vocab_size,):
            raise ValueError(
                f"TokenNoise: frequencies need one number for each of vocab_size={self.vocab_size} "
                f"tokens, got shape {tuple(table.shape)}"
            )
        is_weight = torch.isfinite(table) & (table >= 0)
        bad = torch.nonzero(~is_weight).flatten().tolist()
        if bad:
            raise ValueError(
                f"TokenNoise: frequencies must be finite and not negative, but {len(bad)} are not; "
                f"the first belongs to token {bad[0]}, {float(table[bad[0]])}"
            )

    @property
    def padding_id(self) -> int | None:
        """The id that fills bare ids, None if a special token has the same id."""
        if self.pad_id in (self.cls_id, self.sep_id):
            return None
        return self.pad_id

    @property
    def call_hint(self) -> str:
        """What to change if the model does not take the arguments that the probe gives it."""
        if self.bare:
            return super().call_hint
        return (
            "for a model that is called as model(ids) give the ids alone, TokenNoise(..., "
            "bare=True)"
        )

    @property
    def _least(self) -> int:
        """The special tokens of a text, and one more token a segment."""
        texts = max(1, self.segments)
        least = texts + (self.cls_id is not None)
        if self.sep_id is not None:
            least += texts
        return least

    @property
    def _shortest(self) -> int:
        if self.min_length is None:
            return self._least
        return self.min_length

    @functools.cached_property
    def _cumulative(self) -> Tensor:
        """Running sum of the weights `[V]`, float64."""
        if isinstance(self.frequencies, Tensor):
            largest = self.frequencies.max().clamp(min=1e-300)
            weights = self.frequencies / largest
        else:
            rank = torch.arange(self.vocab_size, dtype=torch.float64) - self.first_id + 1
            rank = rank.clamp(min=1)
            exponent = self.zipf_exponent or 0.0
            weights = rank.pow(-exponent)
        weights[: self.first_id] = 0
        for special in (self.cls_id, self.sep_id, self.pad_id, *self.exclude):
            if special is not None:
                weights[special] = 0
        return weights.cumsum(0)

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return `input_ids`, `attention_mask` and `token_type_ids` (with `segments`); no labels.

        All are int64 `[n, T]`.
        """
        lengths = torch.randint(self._shortest, self.length + 1, (n, 1), generator=generator)
        place = torch.arange(self.length)
        ids = self._tokens(n, generator)
        last = lengths - 1
        is_text = place <= last
        mask = is_text.long()
        types = torch.zeros_like(mask)
        if self.segments == 2:
            # The first separator stands anywhere that leaves each text a token.
            first = 1 + (self.cls_id is not None)
            choices = last - first - 1
            uniform = torch.rand(n, 1, generator=generator, dtype=torch.float64)
            offset = (uniform * choices).long()
            middle = first + torch.minimum(offset, choices - 1)
            ids = torch.where(place == middle, self.sep_id or 0, ids)
            is_second = is_text & (place > middle)
            types = is_second.long()
        if self.sep_id is not None:
            ids = torch.where(place == last, self.sep_id, ids)
        if self.cls_id is not None:
            ids[:, 0] = self.cls_id
        ids = torch.where(is_text, ids, self.pad_id or 0)
        if self.bare:
            return ids, None
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.segments:
            inputs["token_type_ids"] = types
        return inputs, None

    def _tokens(self, n: int, generator: torch.Generator) -> Tensor:
        """Return tokens `[n, T]` by inverse transform."""
        cumulative = self._cumulative
        uniform = torch.rand(n, self.length, generator=generator, dtype=torch.float64)
        uniform = uniform * cumulative[-1]
        # With `right` a token of weight zero is never drawn: the first entry above the number is a
        # token with a positive weight.
        tokens = torch.searchsorted(cumulative, uniform, right=True)
        return tokens.clamp(max=self._last)

    @functools.cached_property
    def _last(self) -> int:
        """The last token of positive weight, for a number that rounding has moved to the end."""
        return int(torch.searchsorted(self._cumulative, self._cumulative[-1:]))

    def describe(self) -> dict[str, Any]:
        """Return plain values; a table of frequencies by its hash."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        settings["exclude"] = list(self.exclude)
        table = settings.pop("frequencies")
        provenance = settings.pop("provenance")
        own = {"kind": "TokenNoise", "source": "synthetic"}
        if table is not None:
            own["source"] = "public"
            own["provenance"] = provenance
            content = table.numpy().tobytes()
            settings["frequencies"] = hashlib.sha256(content).hexdigest()
        return own | settings

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, length: int, **settings: Any) -> TokenNoise:
        """Return token noise with the special tokens of a Hugging Face tokenizer.

        Args:
            tokenizer: called on a text; the same one that prepares the private data.
            length: T.
            settings: other fields; they override those of the tokenizer.

        Raises:
            ValueError: the tokenizer puts more than one token before or after a text.
        """
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a")["input_ids"]
        before, after = _split_special_tokens(whole, bare)
        if len(before) > 1 or len(after) > 1:
            raise ValueError(
                f"TokenNoise: the tokenizer puts the tokens {before} before and {after} after a "
                "text; at most one each is supported, so give cls_id and sep_id yourself"
            )
        pad = tokenizer.pad_token_id
        size = len(tokenizer)
        special = {i for i in tokenizer.all_special_ids if 0 <= i < size}
        fields_of_tokenizer: dict[str, Any] = {
            "vocab_size": size,
            "cls_id": before[0] if before else None,
            "sep_id": after[0] if after else None,
            "pad_id": tokenizer.eos_token_id if pad is None else pad,
            "exclude": tuple(sorted(special)),
            "segments": int("token_type_ids" in getattr(tokenizer, "model_input_names", ())),
        }
        return cls(**(fields_of_tokenizer | {"length": length} | settings))


def _split_special_tokens(
    whole: Sequence[int], inner: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the items before and after `inner` in `whole`."""
    own = list(whole)
    wanted = list(inner)
    for start in range(len(own) - len(wanted) + 1):
        stop = start + len(wanted)
        if own[start:stop] == wanted:
            return own[:start], own[stop:]
    return own, []


# --------------------------------------------------------------------------------------------------
# Text that a public language model writes, as a probe. What its own layers see is then close to
# real text, at no cost in ε: the weights are public before the first private step, and so is
# everything computed from them.

_WANTED = (
    "generated_text needs a causal language model that is called as model(input_ids=..., "
    "past_key_values=..., use_cache=True), as those of transformers; give other texts as "
    "PublicData(...)"
)


def generated_text(
    model: nn.Module,
    n: int,
    length: int,
    *,
    start_id: int,
    end_id: int | None = None,
    pad_id: int | None = None,
    seed: int = 0,
    chunk: int = 64,
    provenance: str = "",
) -> PublicData:
    """Sample texts from a causal language model, for `KFAC(probe=...)`.

    Call this before private training, or on released weights: weights that have seen private
    examples without noise void the guarantee.

    Args:
        model: called as `model(input_ids=..., past_key_values=..., use_cache=True)`, as those of
            transformers are. Its parameters, modes, buffers and the global random state stay as
            they are.
        n: number of texts, sampled once; a refresh samples its `probe_size` of them.
        length: tokens of a text T, the first included.
        start_id: the first token (GPT-2 begins a text with its end-of-text token).
        end_id: a text ends with this token, None if it never ends.
        pad_id: fills a text that has ended, masked; None takes `end_id`.
        seed: of the public stream that tokens are drawn from, by the model's whole distribution.
        chunk: texts written at once; another value draws others.
        provenance: of the weights, for the privacy card.

    Returns:
        `input_ids` and `attention_mask`, int64 `[n, length]`; no labels.

    Raises:
        ValueError: sizes that are not positive, or logits that are not finite.
        TypeError: the model cannot be called like this.
    """
    check_integer("generated_text: n", n, 1)
    check_integer("generated_text: length", length, 2)
    check_integer("generated_text: chunk", chunk, 1)
    generator = torch.Generator().manual_seed(seed)
    texts = []
    with preserve_model(model), torch.no_grad():
        for first in range(0, n, chunk):
            size = min(chunk, n - first)
            texts.append(_write(model, size, length, start_id, generator))
    ids = torch.cat(texts)
    mask = torch.ones(n, length, dtype=torch.int64)
    if end_id is not None:
        ended = (ids[:, 1:] == end_id).long().cumsum(1)
        # The end itself is part of the text.
        is_text = ended[:, :-1] == 0
        mask[:, 2:] = is_text.long()
        ids = torch.where(mask == 1, ids, end_id if pad_id is None else pad_id)
    origin = f"written by {type(model).__name__}"
    if provenance:
        origin += f" ({provenance})"
    inputs = {"input_ids": ids, "attention_mask": mask}
    return PublicData(inputs, provenance=f"{origin}, seed {seed}")


def _write(
    model: nn.Module, n: int, length: int, start_id: int, generator: torch.Generator
) -> Tensor:
    """Return texts `[n, length]`, written one token after another."""
    token = torch.full((n, 1), start_id)
    tokens = [token]
    past = None
    while len(tokens) < length:
        out = _call(model, token.to(device_of(model)), past)
        past = out.past_key_values
        logits = out.logits[:, -1].double().cpu()
        if not torch.isfinite(logits).all():
            raise ValueError("generated_text: the model's logits contain NaN or infinity")
        token = torch.multinomial(logits.softmax(1), 1, generator=generator)
        tokens.append(token)
    return torch.cat(tokens, dim=1)


def _call(model: nn.Module, ids: Tensor, past: Any) -> Any:
    try:
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
    except TypeError as error:
        raise TypeError(f"{_WANTED}: {error}") from error
    if getattr(out, "logits", None) is None or getattr(out, "past_key_values", None) is None:
        raise TypeError(
            f"{_WANTED}: it returned a {type(out).__name__} without logits or past_key_values"
        )
    return out


# --------------------------------------------------------------------------------------------------
# The private data as a probe: an upper reference for experiments, which voids every guarantee.
#
# This is the one value under `curvature` that holds private tensors. Every user of it says so: the
# plan has a caveat, the reported ε is not valid and the card is marked NOT PRIVATE.


@dataclass(frozen=True, eq=False)
class PrivateOracle(Probe):
    """Curvature of the private data, with their labels with `labels="given"`. NOT PRIVATE.

    Attributes:
        dataset: the private dataset: a tuple (inputs, labels) of tensors, or a map-style dataset of
            such pairs.
    """

    dataset: Any

    def __post_init__(self) -> None:
        if isinstance(self.dataset, Tensor) or not hasattr(self.dataset, "__len__"):
            raise ValueError(
                "PrivateOracle needs a tuple (inputs, labels) of tensors or a map-style dataset of "
                "such pairs"
            )
        if self._size < 1 or len(self._row(0)) != 2:
            raise ValueError(
                "PrivateOracle needs at least one example, each a pair of an input and a label"
            )

    @property
    def _columns(self) -> tuple[Tensor, ...] | None:
        data = self.dataset
        if isinstance(data, tuple) and all(isinstance(x, Tensor) for x in data):
            return data
        return None

    @property
    def _size(self) -> int:
        if self._columns is None:
            return len(self.dataset)
        return len(self._columns[0])

    def _row(self, index: int) -> tuple[Any, ...]:
        if self._columns is None:
            return tuple(self.dataset[index])
        return tuple(x[index] for x in self._columns)

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return n private examples, distinct while there are enough, with replacement beyond."""
        # Both are drawn for every n, so that the stream advances by the same numbers.
        chosen = torch.randint(self._size, (n,), generator=generator)
        if n <= self._size:
            chosen = torch.randperm(self._size, generator=generator)[:n]
        inputs = []
        labels = []
        for i in chosen.tolist():
            x, y = map(torch.as_tensor, self._row(i))
            inputs.append(x.detach().cpu())
            labels.append(y.detach().cpu())
        stacked = torch.stack(inputs)
        if stacked.is_floating_point():
            stacked = stacked.float()
        return stacked, torch.stack(labels)

    def describe(self) -> dict[str, Any]:
        """Return plain values, without a hash of the contents, which are private."""
        return {
            "kind": type(self).__name__,
            "source": "private",
            "provenance": "the private dataset itself",
            "examples": self._size,
            "labelled": True,
            "uses_private_data": True,
        }
