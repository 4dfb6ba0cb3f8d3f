"""Features of a table for an additive model, from what is public alone, and the model itself.

Each number becomes itself and a smooth curve over knots of equal distance within its bounds; other
columns stay. Rows are divided by the longest norm that they can have. No feature looks at another
row, so nothing here costs privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

# Places of a curve within the bounds of a number.
KNOTS = 16
# Knots over which a curve is alike: the correlation of two neighbours is exp(-1 / SMOOTHNESS).
SMOOTHNESS = 2.0
# Values of a number at which its effect is given.
_GRID = 61
# Rows whose features are computed at once. It changes no result.
_ROWS = 4096


@dataclass(frozen=True)
class InputColumn:
    """The places of one column in an encoded row: its values, then 1 where it is missing.

    Attributes:
        name: of the column.
        values: how many places its values take; 0 for a missing one.
        numbers: how many of them are numbers from −1 to 1 with a curve; all of them or none.
        norm: the longest norm of its values.
    """

    name: str
    values: int
    numbers: int = 0
    norm: float = 1.0


class AdditiveFeatures(nn.Module):
    """Map encoded rows `[N, width]` to features `[N, d]` of norm at most 1.

    The features are the row itself, a curve of every number over `knots` places (piecewise linear,
    made smooth by the root of an exponential kernel), and a constant.

    Args:
        columns: of an encoded row, in their order.
        knots: places of a curve; 0 for rows without curves.

    Raises:
        ValueError: no columns, or one knot.
    """

    knots: Tensor
    root: Tensor
    places: Tensor
    missing: Tensor

    def __init__(self, columns: Sequence[InputColumn], knots: int = KNOTS) -> None:
        super().__init__()
        if not columns or knots == 1 or knots < 0:
            raise ValueError(f"give columns, and 0 or at least 2 knots; got knots = {knots}")
        self.columns = tuple(columns)
        places: list[int] = []
        missing: list[int] = []
        place = 0
        squares = 1.0
        for column in self.columns:
            end = place + column.values
            places += range(place, place + column.numbers)
            missing += [end] * column.numbers
            squares += max(1.0, column.norm**2 + (column.numbers if knots else 0))
            place = end + 1
        self.width = place
        self.count = knots if places else 0
        self.features = self.width + len(places) * self.count + 1
        # Rounding in float32 must not make a row longer than 1.
        self.scale = (1 - 1e-5) / math.sqrt(squares)
        distances = torch.arange(max(1, self.count), dtype=torch.float64)
        kernel = torch.exp(-(distances[:, None] - distances).abs() / SMOOTHNESS)
        values, vectors = torch.linalg.eigh(kernel)
        root = vectors * values.clamp_min(0).sqrt() @ vectors.T
        for name, tensor in {
            "knots": distances.float(),
            "root": root.float(),
            "places": torch.tensor(places, dtype=torch.int64),
            "missing": torch.tensor(missing, dtype=torch.int64),
        }.items():
            # They follow from the columns, so no file of weights needs them.
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of encoded rows."""
        ones = torch.ones_like(x[:, :1])
        if not self.count:
            return torch.cat([x, ones], 1) * self.scale
        numbers = torch.index_select(x, 1, self.places).clamp(-1.0, 1.0)
        is_present = 1 - torch.index_select(x, 1, self.missing)
        spots = (numbers + 1) * ((self.count - 1) / 2)
        hats = functional.relu(1 - (spots.unsqueeze(2) - self.knots.to(x)).abs())
        curves = (hats * is_present.unsqueeze(2)) @ self.root.to(x)
        return torch.cat([x, curves.flatten(1), ones], 1) * self.scale

    def extra_repr(self) -> str:
        """Return the sizes, for `print(model)`."""
        return f"{self.width} -> {self.features}, knots={self.count}"


@dataclass(frozen=True)
class Effect:
    """What one column adds to the output of an additive model.

    Attributes:
        column: its name.
        inputs: encoded values of the column at which the effect is given `[g, values + 1]`; the
            last one is the missing value.
        is_curve: whether all but the last are numbers from −1 to 1, in order.
        values: the effect `[g, outputs]`, less its mean over the present values.
        deviation: standard deviation of the noise in `values` `[g, outputs]`; NaN where unknown.
    """

    column: str
    inputs: NDArray[np.float64]
    is_curve: bool
    values: NDArray[np.float64]
    deviation: NDArray[np.float64]


class AdditiveModel(nn.Sequential):
    """An additive model: a linear head from zero on `AdditiveFeatures`.

    Args:
        columns: of an encoded row.
        outputs: one a class, or 1 for a number.
        knots: as of `AdditiveFeatures`.
    """

    def __init__(
        self, columns: Sequence[InputColumn], outputs: int, knots: int | None = None
    ) -> None:
        maps = AdditiveFeatures(columns, choose_knots(columns) if knots is None else knots)
        head = nn.Linear(maps.features, outputs, bias=False)
        nn.init.zeros_(head.weight)
        super().__init__(maps, head)

    @torch.no_grad()
    def split_off_features(self, rows: Tensor) -> tuple[nn.Sequential, Tensor]:
        """Return the head under its own name, and its inputs for encoded rows `[N, d]`.

        A session that trains this head on these inputs trains the model, and computes each row's
        features once instead of in every step.
        """
        maps, head = self
        assert isinstance(head, nn.Linear)
        device = next(maps.buffers()).device
        features = torch.empty(len(rows), head.in_features, dtype=rows.dtype, device=rows.device)
        for part, place in zip(rows.split(_ROWS), features.split(_ROWS), strict=True):
            place.copy_(maps(part.to(device)))
        return nn.Sequential(nn.Identity(), head), features

    @torch.no_grad()
    def effects(self, covariance: Tensor | None = None) -> list[Effect]:
        """Return what each column adds to the outputs.

        Classes are compared with their mean, so that two classes have opposite effects.

        Args:
            covariance: of the noise in the weights of one output `[d, d]`, such as
                `noise_covariance` gives; the noise of outputs is independent.
        """
        maps, head = self
        assert isinstance(maps, AdditiveFeatures) and isinstance(head, nn.Linear)
        weight = head.weight.detach().double().cpu()
        outputs = len(weight)
        if outputs > 1:
            weight = weight - weight.mean(0)
        # What is left of independent noise beside the mean of the classes.
        left = 1 - 1 / outputs if outputs > 1 else 1.0
        found = []
        place = 0
        for column in maps.columns:
            grid = _grid_of(column)
            rows = torch.zeros(len(grid), maps.width, dtype=torch.float64)
            rows[:, place : place + column.values + 1] = grid
            features = maps(rows)
            features = features - features[:-1].mean(0)
            deviation = torch.full((len(grid),), math.nan, dtype=torch.float64)
            if covariance is not None:
                noise = ((features @ covariance.double()) * features).sum(1)
                deviation = (left * noise.clamp_min(0)).sqrt()
            effect = Effect(
                column.name,
                grid.numpy(),
                column.numbers == 1,
                (features @ weight.T).numpy(),
                deviation[:, None].expand(-1, outputs).numpy(),
            )
            found.append(effect)
            place += column.values + 1
        return found


# Features of a head beyond which its d × d matrix is not formed any more.
MOST_FEATURES = 2048


def choose_knots(columns: Sequence[InputColumn]) -> int:
    """Choose the knots from the columns alone: none where the features would be too many."""
    width = sum(column.values + 1 for column in columns)
    numbers = sum(column.numbers for column in columns)
    return KNOTS if width + numbers * KNOTS < MOST_FEATURES else 0


def _grid_of(column: InputColumn) -> Tensor:
    """Return encoded values of a column; the missing value is the last."""
    if column.numbers == 1:
        values = torch.linspace(-1, 1, _GRID, dtype=torch.float64)[:, None]
    elif column.values == 1:
        # A flag is −1 or 1.
        values = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    else:
        values = torch.eye(column.values, dtype=torch.float64)
    values = functional.pad(values, (0, 1))
    missing = torch.zeros(1, column.values + 1, dtype=torch.float64)
    missing[0, -1] = 1.0
    return torch.cat([values, missing])
