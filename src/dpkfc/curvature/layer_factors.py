"""The factors of one layer: what each kind of block adds to them, in micro-batches."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.curvature.factor_cache import FactorCache
from dpkfc.curvature.factor_sums import FactorAccumulator
from dpkfc.curvature.factors import DiagonalFactor, Factor, IsotropicFactor, is_empty
from dpkfc.curvature.row_sampling import RowSubsample, RowSubsampler
from dpkfc.linalg.blocks import (
    Block,
    Lookup,
    Outer,
    Patched,
    Tied,
    raise_precision,
)
from dpkfc.linalg.metric import Shape

Rules = Mapping[str, str]
"""Layer name to kind: linear, conv, embedding and so on."""


@dataclass(frozen=True, kw_only=True)
class FactorOptions:
    """How factors are formed.

    Attributes:
        sharing: expand or reduce, for layers with several positions.
        sides: both, input or output; the other side becomes isotropic.
        max_factor_size: largest matrix that is decomposed.
        oversize: form of a wider side with more rows: diagonal, identity (isotropic), or low_rank,
            which samples that many rows.
        decays: whether sums of earlier refreshes are kept.
        only_rules: rules of layers that are preconditioned, None for all; the others become
            isotropic.
        rules: layer name to rule, as far as known.
        rows_per_dim, row_share: see `RowSubsampler`.
    """

    sharing: str = "expand"
    sides: str = "both"
    max_factor_size: int = 4096
    oversize: str = "diagonal"
    decays: bool = False
    only_rules: tuple[str, ...] | None = None
    rules: Rules = field(default_factory=dict)
    rows_per_dim: float | None = None
    row_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LayerFactors:
    """The undamped factors of one layer.

    Attributes:
        kind: outer (matrix-shaped), lookup (embedding), tied (embedding and head) or elementwise.
        sides: `input` and `output`, or one diagonal factor per role of an elementwise layer.
        shapes: size of each side, or shape of the parameter of each role.
        dtype, device: of the layer's gradients.
        notes: side to a note on what became of it.
    """

    kind: str
    sides: Mapping[str, Factor]
    shapes: Mapping[str, Shape]
    dtype: torch.dtype
    device: torch.device
    notes: Mapping[str, str]

    def kind_of(self, side: str) -> str:
        """Return the kind of a side, among whose sides mean eigenvalues are comparable."""
        return "elementwise" if self.kind == "elementwise" else side

    def normalise(self) -> LayerFactors:
        """Return factors divided by their mean eigenvalues; an empty factor stays as it is."""
        sides = dict(self.sides)
        for name, factor in self.sides.items():
            if is_empty(factor):
                continue
            sides[name] = factor.scale_by(1 / factor.mean)
            if isinstance(factor, IsotropicFactor):
                # Exactly 1 in every layer: layers that read the same rows share whitened ones.
                sides[name] = IsotropicFactor(factor.dim, 1.0)
        return replace(self, sides=sides)


Factors = Mapping[str, LayerFactors]
"""Layer name to factors."""


def fill_empty_sides(layers: Factors) -> dict[str, LayerFactors]:
    """Replace every empty side by the multiple of the identity that other layers have on average.

    A side without a gradient (the output side of a LoRA adapter before its first step, a dead
    layer) has no direction to whiten and no scale of its own. The geometric mean of the other
    layers' mean eigenvalues keeps the layer in their units until a later refresh sees its gradient.
    Sides stay empty if all of their kind are.
    """
    logarithms: dict[str, list[float]] = defaultdict(list)
    for factors in layers.values():
        for side, factor in factors.sides.items():
            if not is_empty(factor):
                kind = factors.kind_of(side)
                logarithms[kind].append(math.log(factor.mean))
    means = {}
    for kind, values in logarithms.items():
        mean = sum(values) / len(values)
        means[kind] = math.exp(mean)
    filled: dict[str, LayerFactors] = {}
    for name, factors in layers.items():
        sides = dict(factors.sides)
        for side, factor in factors.sides.items():
            kind = factors.kind_of(side)
            if is_empty(factor) and kind in means:
                sides[side] = IsotropicFactor(factor.dim, means[kind])
        filled[name] = replace(factors, sides=sides)
    return filled


# Layer and side to the shape of a factor where it is not the usual one.
_SHAPES = {("lookup", "input"): "diagonal", ("tied", "output"): "isotropic"}


class LayerAccumulator:
    """The factors of one layer from blocks that arrive in pieces.

    Args:
        block: the first block; it is not added yet.
        options: how factors are formed.
        rule: of the layer, None if it does not matter.
        subsampler: the rows to use; None for all.
        shared: results that several layers share; None shares nothing.
    """

    def __init__(
        self,
        block: Block,
        options: FactorOptions,
        rule: str | None = None,
        subsampler: RowSubsampler | None = None,
        shared: FactorCache | None = None,
    ) -> None:
        self._options = options
        self._subsampler = subsampler
        self._shared = shared
        self._dtype = torch.float32
        self._device = torch.device("cpu")
        self.kind = block.kind
        self._shapes = block.side_shapes
        self.sides: dict[str, FactorAccumulator] = {}
        for side, shape in self._shapes.items():
            dim = math.prod(shape)
            self.sides[side] = self._make_side(side, dim, rule)

    def _make_side(self, name: str, dim: int, rule: str | None) -> FactorAccumulator:
        """Return an empty sum for a side: full, diagonal, or isotropic if it is not asked for."""
        options = self._options
        is_elementwise = self.kind == "elementwise"
        is_wanted = is_elementwise or options.sides in ("both", name)
        is_chosen = options.only_rules is None or rule in options.only_rules
        shape = "isotropic"
        if is_wanted and is_chosen:
            usual = "diagonal" if is_elementwise else "full"
            shape = _SHAPES.get((self.kind, name), usual)
        return FactorAccumulator(
            dim,
            shape=shape,
            max_size=options.max_factor_size,
            oversize=options.oversize,
            decays=options.decays,
            shared=_cache_of(name, self._shared),
        )

    def add(self, block: Any) -> None:
        """Add one probe micro-batch.

        Args:
            block: of the kind and the size of the first one.

        Raises:
            ValueError: values that are not finite, or a block of another size.
        """
        self.add_inputs(block)
        if self.kind == "elementwise":
            for role, g in block.grads.items():
                gradients = raise_precision(g)
                rows = gradients.reshape(len(g), -1)
                self.sides[role].add(rows, block.batch_size)
        elif self.kind == "tied":
            self._add_tied(block)
        else:
            rows, count = self._output_rows(block.b, block.groups)
            self.sides["output"].add(rows, count)

    def add_inputs(self, block: Any) -> None:
        """Add the inputs of the layer in a probe micro-batch that was not differentiated.

        Raises:
            ValueError: as `add`.
        """
        self._dtype = raise_precision(block.like).dtype
        self._device = block.like.device
        if self.kind == "lookup":
            counts, reads = self._reads(block)
            self.sides["input"].add_diagonal(counts, block.batch_size, reads)
        elif self.kind == "outer":
            rows, count = self._input_rows(block)
            self.sides["input"].add(rows, count)

    def _subsample(self, x: Tensor, groups: int, side: str, uses: int = 1) -> RowSubsample:
        """Return the rows that a side is formed of.

        Args:
            x: `[n * groups, T, d]`.
            groups: of a convolution.
            side: of the layer.
            uses: how often rows are added for one parameter.
        """
        if self._subsampler is None:
            count, positions, _ = x.shape
            return RowSubsample(count * positions)
        accumulator = self.sides[side]
        most = accumulator.most_rows
        if most is not None:
            most = max(1, most // uses)
        return self._subsampler.subsample(x, groups, accumulator.dim, most)

    def _text_mask(self, positions: int) -> Tensor | None:
        """Return True `[n, T]` at text positions, None for all."""
        if self._subsampler is None:
            return None
        return self._subsampler.mask_of(positions)

    def _weights(self, x: Tensor, groups: int = 1) -> Tensor | None:
        """Return 1 at text positions of x `[n * groups, T, d]` and 0 elsewhere; None for all 1."""
        mask = self._text_mask(x.shape[1])
        if mask is None:
            return None
        is_text = mask.repeat_interleave(groups, 0)
        return is_text.unsqueeze(-1).to(x)

    def _input_rows(self, block: Outer | Patched) -> tuple[Tensor, float]:
        """Return rows and divisor of A from `[N * groups, T, d_in]`.

        Only the patches of sampled rows are formed.
        """
        if self._options.sharing == "reduce":
            inputs = raise_precision(block.explicit().a)
            mean = self._average(inputs, block.groups)
            block = Outer(mean, block.b[:, :1], block.groups)
        subsample = self._subsample(block.b, block.groups, "input")
        rows = block.input_rows(subsample.index)
        rows = subsample.weigh(raise_precision(rows))
        return rows, len(block.b) * subsample.share

    def _output_rows(self, b: Tensor, groups: int) -> tuple[Tensor, float]:
        """Return rows and divisor of G from `[N * groups, T, d_out]`."""
        b = self._sum(raise_precision(b), groups)
        subsample = self._subsample(b, groups, "output")
        rows = subsample.select_weighted(b)
        return rows, subsample.active * subsample.share

    def _reads(self, block: Lookup) -> tuple[Tensor, float]:
        """Return the diagonal of Σ_n a aᵀ for one-hot inputs, and the number of reads.

        The diagonal `[num_rows]` says how often each row is read.
        """
        ids = block.ids
        size = block.num_rows
        is_text = self._text_mask(ids.shape[1])
        if is_text is None:
            is_text = torch.ones_like(ids, dtype=torch.bool)
        reads = float(is_text.sum())
        if self._options.sharing == "expand":
            return torch.bincount(ids[is_text], minlength=size), reads
        total = torch.zeros(size, dtype=torch.float64, device=ids.device)
        for own_ids, is_own_text in zip(ids, is_text, strict=True):
            counts = torch.bincount(own_ids[is_own_text], minlength=size)
            mean = counts / is_own_text.sum().clamp(min=1)
            total += mean.square()
        return total, reads

    def _add_tied(self, block: Tied) -> None:
        """Add both uses of one weight `[V, d]` to E gᵀg; the rows V carry a trace of one."""
        c = raise_precision(block.lookup.b)
        a = raise_precision(block.outer.a)
        b = raise_precision(block.outer.b)
        vocabulary = block.lookup.num_rows
        even = b.new_full((vocabulary,), 1 / vocabulary)
        self.sides["output"].add_diagonal(even, 1.0)
        # With `reduce` the gradient has both sums over positions: Σ c, and (Σ b) ⊗ (mean a).
        uses = []
        if c.shape[1]:
            uses.append(self._sum(c))
        if a.shape[1]:
            total = self._sum(b)
            sizes = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
            uses.append(self._average(a) * sizes)
        pieces = []
        for x in uses:
            subsample = self._subsample(x, 1, "input", uses=2)
            rows = subsample.select_weighted(x)
            pieces.append(rows / math.sqrt(subsample.share))
        stacked = torch.cat(pieces)
        self.sides["input"].add(stacked, float(block.batch_size))

    def _sum(self, x: Tensor, groups: int = 1) -> Tensor:
        """Return x with `expand`, and with `reduce` Σ_t x over the text, `[n * groups, 1, d]`."""
        if self._options.sharing == "expand":
            return x
        weights = self._weights(x, groups)
        if weights is not None:
            x = x * weights
        return x.sum(1, keepdim=True)

    def _average(self, x: Tensor, groups: int = 1) -> Tensor:
        """Return x with `expand`, and with `reduce` mean_t x over the text, as `_sum` does."""
        if self._options.sharing == "expand":
            return x
        weights = self._weights(x, groups)
        if weights is None:
            return x.mean(1, keepdim=True)
        count = weights.sum(1, keepdim=True).clamp(min=1)
        return self._sum(x, groups) / count

    def detached_copy(self, shared: FactorCache | None = None) -> LayerAccumulator:
        """Return a copy that can go to another process: without subsampler, with this cache."""
        twin = copy.copy(self)
        twin._subsampler = None
        twin._shared = shared
        twin.sides = {}
        for name, side in self.sides.items():
            cache = _cache_of(name, shared)
            twin.sides[name] = side.detached_copy(cache)
        return twin

    def merge(self, other: LayerAccumulator) -> None:
        """Add the sums of another accumulator of the layer, as if its blocks had come later."""
        for name, side in self.sides.items():
            side.merge(other.sides[name])

    def merge_history(
        self, past: Mapping[str, FactorAccumulator], share: float
    ) -> LayerAccumulator:
        """Return a copy that adds the sums of earlier refreshes, with the weight `share`."""
        total = self.detached_copy(self._shared)
        for name, side in self.sides.items():
            if name in past:
                cache = _cache_of(name, self._shared)
                total.sides[name] = past[name].decay(share, cache)
                total.sides[name].merge(side)
        return total

    def cost(self, parts: int) -> float:
        """Return the multiplications of all decompositions after so many parts are joined."""
        costs = [side.cost(parts) for side in self.sides.values()]
        return 1.0 + sum(costs)

    def result(self, keep: int | None = None) -> LayerFactors:
        """Return the layer's factors.

        Args:
            keep: eigenpairs wanted of a wide side, besides the trace of the rest; None for all.
        """
        sides: dict[str, Factor] = {}
        notes: dict[str, str] = {}
        for name, side in self.sides.items():
            sides[name] = side.result(keep)
            if side.note:
                notes[name] = side.note
        if self.kind == "lookup":
            reads = self.sides["input"].reads
            sides["input"] = _smooth_reads(sides["input"], reads)
        return LayerFactors(
            kind=self.kind,
            sides=sides,
            shapes=self._shapes,
            dtype=self._dtype,
            device=self._device,
            notes=notes,
        )


def _cache_of(side: str, shared: FactorCache | None) -> FactorCache | None:
    """Return the cache of a side: only input factors are shared between layers."""
    return shared if side == "input" else None


def _smooth_reads(factor: Factor, reads: float) -> Factor:
    """Return the diagonal of an embedding with one more read of every row, in the same trace.

    A probe reads most rows of a large vocabulary once or not at all, by chance. Without smoothing,
    a row that was read would be scaled many times less than a neighbour that was not.
    """
    if not isinstance(factor, DiagonalFactor) or reads == 0:
        return factor
    weight = reads / (reads + factor.dim)
    smoothed = factor.values + factor.trace / reads
    return DiagonalFactor(smoothed * weight)
