"""Sample the positions of a probe that factors are formed from: of many text positions only a few.

A d×d factor of a sequence or image layer is a mean over examples times positions, usually far
more rows than d. A few random positions of every example estimate it without bias. With L
positions of example n, k of them sampled without replacement, and weight L/k,

    E[ Σ_(t sampled) (L/k) x_t x_tᵀ ] = Σ_t x_t x_tᵀ.

If even one position of every example is more rows than may be kept, m of the M pairs of an
example and a group are sampled in the same way, with weight M/m on top.

Positions are sampled from a public stream of their own, so labels and inputs of the probe do not
depend on them. They belong to examples, not to micro-batches, and layers with the same number of
positions use the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.linalg.blocks import pick_rows

LEAST_ROWS = 4096  # fewer rows are not worth sampling


@dataclass(frozen=True)
class RowSubsample:
    """Rows of a layer's `[n * groups, T, d]`, flattened over its first two axes.

    Attributes:
        active: positions of the whole that count.
        index: rows `[m]`, None for all.
        weight: weight of each row's outer product, `[m]`, None for 1.
        share: rows in this sum for each row of the whole, if all weights agree.
    """

    active: float
    index: Tensor | None = None
    weight: Tensor | None = None
    share: float = 1.0

    def select_weighted(self, x: Tensor) -> Tensor:
        """Return the rows `[m, d]` of x `[n * groups, T, d]`, scaled to carry the weights."""
        rows = pick_rows(x, self.index)
        return self.weigh(rows)

    def weigh(self, rows: Tensor) -> Tensor:
        """Return rows `[m, d]` scaled so that their outer products carry the weights."""
        if self.weight is None:
            return rows
        roots = self.weight.sqrt().to(rows.dtype)
        return rows * roots.unsqueeze(1)


class RowSubsampler:
    """The positions of one refresh.

    Args:
        generator: a public stream used for nothing else.
        size: examples in the probe.
        rows_per_dim: a factor of size d is formed from about this many times d rows (`LEAST_ROWS`
            or more); None for all positions.
        share: of these rows that are taken, where later refreshes bring the others.
    """

    def __init__(
        self,
        generator: torch.Generator,
        size: int,
        rows_per_dim: float | None,
        share: float = 1.0,
    ) -> None:
        self._seed = generator.initial_seed()
        self._size = size
        self._rows_per_dim = rows_per_dim
        self._share = share
        self._keys: dict[int, Tensor] = {}
        self._subsamples: dict[tuple[int, ...], RowSubsample] = {}
        self._rows = slice(0, 0)
        self._mask: Tensor | None = None

    def start(self, rows: slice, mask: Tensor | None) -> None:
        """Start a micro-batch with these examples; mask is True `[n, T]` at their text."""
        self._rows = rows
        self._mask = mask
        self._subsamples = {}

    def mask_of(self, positions: int) -> Tensor | None:
        """Return the mask of a layer with this many positions.

        The mask repeats if the model calls a module several times.
        """
        if self._mask is None or positions == 0:
            return None
        length = max(1, self._mask.shape[1])
        calls, rest = divmod(positions, length)
        if rest:
            return None
        return self._mask.repeat(1, calls)

    def subsample(self, x: Tensor, groups: int, dim: int, most: int | None = None) -> RowSubsample:
        """Return the rows from which a factor is formed.

        Args:
            x: `[n * groups, T, d]` of a layer, for the examples of this micro-batch.
            groups: of a convolution.
            dim: size of the factor.
            most: largest number of rows of the whole probe; None for any.
        """
        positions = x.shape[1]
        pairs = self._size * groups
        wanted = positions
        if self._rows_per_dim is not None:
            rows = self._share * max(LEAST_ROWS, self._rows_per_dim * dim)
            enough = max(1, math.ceil(rows / pairs))
            wanted = min(wanted, enough)
        if most is not None:
            allowed = max(1, most // pairs)
            wanted = min(wanted, allowed)
            pairs = min(pairs, most)
        key = (positions, groups, wanted, pairs)
        if key not in self._subsamples:
            self._subsamples[key] = self._choose(*key, x.device)
        return self._subsamples[key]

    def _choose(
        self, positions: int, groups: int, wanted: int, pairs: int, device: torch.device
    ) -> RowSubsample:
        """Return `wanted` positions of each of so many pairs of an example and a group."""
        n = self._rows.stop - self._rows.start
        mask = self.mask_of(positions)
        fraction = pairs / (self._size * groups)
        if wanted == positions and mask is None and fraction == 1:
            return RowSubsample(n * groups * positions)
        active = torch.full((n,), positions)
        keys = self._keys_of(positions)[self._rows]
        if mask is not None:
            # Positions that are not text come last.
            mask = mask.cpu()
            active = mask.sum(1)
            keys = keys.masked_fill(~mask, math.inf)
        order = keys.argsort(1)[:, :wanted]
        count = active.clamp(max=wanted)
        is_chosen = torch.arange(wanted) < count.unsqueeze(1)
        shape = (n, groups, wanted)
        valid = is_chosen.unsqueeze(1).expand(shape)
        if fraction < 1:
            is_sampled = self._sample_pairs(groups, pairs)[self._rows]
            valid = valid & is_sampled.unsqueeze(2)
        pair = torch.arange(n * groups).view(n, groups, 1)
        rows = positions * pair + order.unsqueeze(1)
        index = rows[valid].to(device)
        total = float(active.sum()) * groups
        if mask is None:
            share = fraction * wanted / positions
            return RowSubsample(total, index, share=share)
        has_more = bool((active > wanted).any())
        if fraction == 1 and not has_more:
            return RowSubsample(total, index)
        weight = active.double() / count.clamp(min=1)
        weight = weight / fraction
        weight = weight.view(n, 1, 1).expand(shape)
        return RowSubsample(total, index, weight[valid].to(device))

    def _sample_pairs(self, groups: int, pairs: int) -> Tensor:
        """Return which pairs of example and group are sampled, True or False `[size, groups]`."""
        stream = self._stream(-groups)
        keys = torch.rand(self._size * groups, generator=stream)
        is_sampled = torch.zeros(len(keys), dtype=torch.bool)
        first = keys.argsort()[:pairs]
        is_sampled[first] = True
        return is_sampled.view(self._size, groups)

    def _keys_of(self, positions: int) -> Tensor:
        """Return one random number a position of every example, `[size, positions]`.

        The numbers are the same for the same number of positions.
        """
        if positions not in self._keys:
            stream = self._stream(positions)
            self._keys[positions] = torch.rand(self._size, positions, generator=stream)
        return self._keys[positions]

    def _stream(self, number: int) -> torch.Generator:
        """Return a public stream: of positions by their number, of pairs by minus the groups."""
        seed = (self._seed + number) % (1 << 63)
        return torch.Generator().manual_seed(seed)
