"""The private data as a probe: an upper reference for experiments, which voids every guarantee.

This is the one value under `curvature` that holds private tensors. Every user of it says so: the
plan has a caveat, the reported ε is not valid and the card is marked NOT PRIVATE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpkfc.curvature.model_inputs import Sample
from dpkfc.curvature.probes import Probe


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
