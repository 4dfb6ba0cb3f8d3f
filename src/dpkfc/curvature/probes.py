"""Probes: sources of the inputs that curvature is measured on. `PrivateOracle` alone is private.

A probe derives from `Probe`: a frozen value with `sample(n, generator)`, which returns CPU tensors,
and `describe()`, which goes into the plan's hash and onto the privacy card. The command line lists
its probes in `SOURCES` of `app/settings.py` and makes them in `app/curvature_settings.py`.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dpkfc._checks import LARGEST_INTEGER, check_in_range, check_positive, show_value
from dpkfc.curvature.model_inputs import (
    Inputs,
    Sample,
    examples,
    hash_tensor,
    map_inputs,
    named_inputs,
    tensors,
)


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


class SyntheticProbe(Probe):
    """A probe whose dataclass fields describe it."""

    def _check_shape(self: Any) -> None:
        """Refuse a shape that examples cannot have."""
        object.__setattr__(self, "shape", tuple(self.shape))
        are_sizes = all(type(size) is int and 0 < size <= LARGEST_INTEGER for size in self.shape)
        if not self.shape or not are_sizes:
            raise ValueError(
                f"{type(self).__name__}: shape must be positive integers without the batch axis, "
                f"got {show_value(self.shape)}"
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


class ComparedByDescription(Probe):
    """A probe with tensors, which is equal to another one of the same description."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComparedByDescription) and self.describe() == other.describe()

    def __hash__(self) -> int:
        items = sorted(self.describe().items())
        return hash(repr(items))


@dataclass(frozen=True, eq=False)
class PublicData(ComparedByDescription):
    """Public examples: their owner allows anyone to see them, and they show no private person.

    Attributes:
        inputs: `[n, ...]`, floating point or token ids; or a mapping of such tensors with n in
            common, for example a tokenised public text with `input_ids` and `attention_mask`. A
            mapping is called as `model(**inputs)`, a tuple or list as `model(*inputs)`, and each as
            one argument of a model that takes one.
        labels: `[n, ...]` or None; read with `labels="given"` alone.
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
