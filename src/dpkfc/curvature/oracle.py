"""The private data themselves as a probe: an upper reference for experiments, which voids every guarantee.

This is the one value under `curvature` that holds private tensors. Whatever uses it says so: the plan has a caveat, ε is no
guarantee and the card is stamped NOT PRIVATE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpkfc.curvature.inputs import Sample

__all__ = ["PrivateOracle"]


@dataclass(frozen=True, eq=False)
class PrivateOracle:
    """Curvature of the private data, with their labels where `labels="given"`. NOT PRIVATE.

    Attributes:
        dataset: the private dataset: a tuple (inputs, labels) of tensors, or a map-style dataset of such pairs.
    """

    dataset: Any

    def __post_init__(self) -> None:
        if isinstance(self.dataset, Tensor) or not hasattr(self.dataset, "__len__"):
            raise ValueError("PrivateOracle needs a tuple (inputs, labels) of tensors or a map-style dataset of such pairs")
        if self._size < 1 or len(self._row(0)) != 2:
            raise ValueError("PrivateOracle needs at least one example, each a pair of an input and a label")

    @property
    def _whole(self) -> tuple[Tensor, ...] | None:
        held = self.dataset
        return held if isinstance(held, tuple) and all(isinstance(x, Tensor) for x in held) else None

    @property
    def _size(self) -> int:
        return len(self.dataset if self._whole is None else self._whole[0])

    def _row(self, index: int) -> tuple[Any, ...]:
        return tuple(self.dataset[index] if self._whole is None else (x[index] for x in self._whole))

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """n private examples: distinct ones while there are enough, with replacement beyond that."""
        draws = torch.randint(self._size, (n,), generator=generator)
        chosen = torch.randperm(self._size, generator=generator)[:n] if n <= self._size else draws
        rows = [self._row(int(i)) for i in chosen]
        inputs, labels = (torch.stack([torch.as_tensor(row[k]).detach().cpu() for row in rows]) for k in (0, 1))
        return inputs.float() if inputs.is_floating_point() else inputs, labels

    def describe(self) -> dict[str, Any]:
        """JSON-able description; no hash of the contents, which are private."""
        return {
            "kind": type(self).__name__,
            "source": "private",
            "provenance": "the private dataset itself",
            "examples": self._size,
            "labelled": True,
            "uses_private_data": True,
        }
