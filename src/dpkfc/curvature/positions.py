"""Which positions of a probe factors are formed from: those that are text, and of many only so many as are needed.

A d×d factor of a sequence or image layer is a mean over examples times positions, far more rows than d as a rule. A few
positions drawn from every example estimate it without bias: with L positions of example n, k of them drawn without
replacement, and weight L/k,

    E[ Σ_(t drawn) (L/k) x_t x_tᵀ ] = Σ_t x_t x_tᵀ.

Where even one position of every example would be more rows than may be kept, m of the M pairs of an example and a group are
drawn in the same way, with weight M/m on top.

Positions are drawn from a public stream of their own, so labels and inputs of the probe do not depend on them. They
belong to examples, not to micro-batches, and layers with the same number of positions use the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LEAST_ROWS", "Chosen", "Positions"]

LEAST_ROWS = 4096  # fewer rows cost nothing worth saving


@dataclass(frozen=True)
class Chosen:
    """Rows of a layer's `[n * groups, T, d]`, flattened over its first two axes.

    Attributes:
        index: rows `[m]`, None for all.
        weight: what each row's outer product counts, `[m]`, None for 1.
        share: rows in this sum for each row of the whole, where all weights agree.
        active: positions of the whole that count.
    """

    index: Tensor | None
    weight: Tensor | None
    share: float
    active: float

    def of(self, x: Tensor) -> Tensor:
        """The rows `[m, d]` of x `[n * groups, T, d]`, scaled so that their outer products carry the weights."""
        return self.weighed(self.taken(x))

    def taken(self, x: Tensor) -> Tensor:
        """The rows `[m, d]` of x `[n * groups, T, d]` as they are."""
        # By two indices, so that a transposed x is not copied whole.
        return x.flatten(0, 1) if self.index is None else x[self.index // x.shape[1], self.index % x.shape[1]]

    def weighed(self, rows: Tensor) -> Tensor:
        """Rows `[m, d]` of these positions, scaled so that their outer products carry the weights."""
        return rows if self.weight is None else rows * self.weight.sqrt().to(rows.dtype).unsqueeze(1)


class Positions:
    """The positions of one refresh.

    Args:
        generator: a public stream used for nothing else.
        size: examples in the probe.
        rows_per_dim: a factor of size d is formed from about this many times d rows (`LEAST_ROWS` or more); None for
            all positions.
    """

    def __init__(self, generator: torch.Generator, size: int, rows_per_dim: float | None) -> None:
        self._seed = generator.initial_seed()
        self._size = size
        self._rows_per_dim = rows_per_dim
        self._keys: dict[int, Tensor] = {}
        self._held: dict[tuple[int, ...], Chosen] = {}
        self._rows = slice(0, 0)
        self._mask: Tensor | None = None

    def start(self, rows: slice, mask: Tensor | None) -> None:
        """Turn to the examples of a micro-batch; mask is True `[n, T]` at their text."""
        self._rows, self._mask, self._held = rows, mask, {}

    def mask_of(self, positions: int) -> Tensor | None:
        """The mask of a layer with so many positions, repeated where a module is used several times."""
        if self._mask is None or positions % max(1, self._mask.shape[1]) or positions == 0:
            return None
        return self._mask.repeat(1, positions // self._mask.shape[1])

    def chosen(self, x: Tensor, groups: int, dim: int, most: int | None = None) -> Chosen:
        """The rows from which a factor of size `dim` is formed, for a layer's `[n * groups, T, d]`.

        Args:
            x: the layer's, of the examples turned to.
            groups: of a convolution.
            dim: of the factor.
            most: rows of the whole probe, at most; None for any number.
        """
        positions = x.shape[1]
        key = (positions, groups, *self._wanted(positions, groups, dim, most))
        if key not in self._held:
            self._held[key] = self._choose(*key, x.device)
        return self._held[key]

    def _wanted(self, positions: int, groups: int, dim: int, most: int | None) -> tuple[int, int]:
        """(positions k of each of some pairs of example and group, number of these pairs)."""
        wanted, pairs = positions, self._size * groups
        if self._rows_per_dim is not None:
            rows = max(LEAST_ROWS, self._rows_per_dim * dim)
            wanted = min(positions, max(1, math.ceil(rows / pairs)))
        if most is None:
            return wanted, pairs
        return min(wanted, max(1, most // pairs)), min(pairs, most)

    def _choose(self, positions: int, groups: int, wanted: int, pairs: int, device: torch.device) -> Chosen:
        n, mask, part = self._rows.stop - self._rows.start, self.mask_of(positions), pairs / (self._size * groups)
        if wanted == positions and mask is None and part == 1:
            return Chosen(None, None, 1.0, float(n * groups * positions))
        active = torch.full((n,), positions) if mask is None else mask.sum(1).cpu()
        keys = self._keys_of(positions)[self._rows]
        order = (keys if mask is None else keys.masked_fill(~mask.cpu(), math.inf)).argsort(1)[:, :wanted]
        taken = active.clamp(max=wanted)
        valid = (torch.arange(wanted) < taken.unsqueeze(1)).unsqueeze(1).expand(n, groups, wanted)
        if part < 1:
            valid = valid & self._drawn(groups, pairs)[self._rows].unsqueeze(2)
        weight = (active.double() / taken.clamp(min=1) / part).view(n, 1, 1).expand(n, groups, wanted)
        first = torch.arange(n * groups).view(n, groups, 1) * positions
        index = (first + order.unsqueeze(1))[valid]
        share = 1.0
        weights: Tensor | None = weight[valid]
        if mask is None:
            share, weights = part * wanted / positions, None
        elif part == 1 and bool((active <= wanted).all()):
            weights = None
        weights = None if weights is None else weights.to(device)
        return Chosen(index.to(device), weights, share, float(active.sum()) * groups)

    def _drawn(self, groups: int, pairs: int) -> Tensor:
        """Which pairs of example and group are among so many that are drawn, `[size, groups]`, True or False."""
        generator = torch.Generator().manual_seed((self._seed - groups) % (1 << 63))
        order = torch.rand(self._size * groups, generator=generator).argsort()
        drawn = torch.zeros(self._size * groups, dtype=torch.bool)
        drawn[order[:pairs]] = True
        return drawn.view(self._size, groups)

    def _keys_of(self, positions: int) -> Tensor:
        """One random number a position of every example, `[size, positions]`; the same for the same number of positions."""
        if positions not in self._keys:
            generator = torch.Generator().manual_seed((self._seed + positions) % (1 << 63))
            self._keys[positions] = torch.rand(self._size, positions, generator=generator)
        return self._keys[positions]
