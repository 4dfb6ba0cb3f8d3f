"""A probe for tables, drawn from their schema alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpkfc.app.owndata.columns import Column
from dpkfc.curvature.model_inputs import Sample
from dpkfc.curvature.probes import Probe


@dataclass(frozen=True)
class SchemaNoise(Probe):
    """A probe for tables: columns drawn independently, from the schema alone.

    Numbers are uniform in their bounds, categories and flags are uniform, and words of texts are
    random signs.

    Attributes:
        columns: of the schema, by name.
        missing: share of missing values.
    """

    columns: tuple[tuple[str, Column], ...]
    missing: float = 0.02

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return features `[n, width]`, no labels."""
        parts = [self._draw(column, n, generator) for _, column in self.columns]
        return torch.cat(parts, dim=1), None

    def _draw(self, column: Column, n: int, generator: torch.Generator) -> Tensor:
        rows = torch.zeros(n, column.width)
        uniform = torch.rand(n, generator=generator)
        if column.kind in ("number", "date"):
            rows[:, 0] = 2 * uniform - 1
        elif column.kind == "pair":
            rows[:, 0] = 2 * uniform - 1
            rows[:, 1] = 2 * torch.rand(n, generator=generator) - 1
        elif column.kind == "flag":
            rows[:, 0] = torch.where(uniform < 0.5, 1.0, -1.0)
        elif column.kind == "category":
            places = (uniform * (column.width - 1)).long()
            rows[torch.arange(n), places] = 1.0
        else:
            shape = n, column.width - 1
            signs = torch.randint(-1, 2, shape, generator=generator).float()
            rows[:, :-1] = functional.normalize(signs, dim=1)
        chance = torch.rand(n, generator=generator)
        is_missing = chance < self.missing
        rows[is_missing] = 0.0
        rows[is_missing, -1] = 1.0
        return rows

    def describe(self) -> dict[str, Any]:
        """Return a description that JSON can hold."""
        return {
            "kind": "SchemaNoise",
            "source": "synthetic",
            "missing": self.missing,
            "columns": [[name, column.kind, column.width] for name, column in self.columns],
        }
