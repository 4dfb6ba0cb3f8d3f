"""A probe for tables, drawn from their schema alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        draw = column.kind_value.draw
        assert draw is not None
        rows = torch.zeros(n, column.width)
        rows[:, :-1] = draw(column, torch.rand(n, generator=generator), generator)
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
