"""The factors of one layer: what it adds to them for each kind of block, in micro-batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.curvature.factors import DiagonalFactor, Factor, FactorAccumulator, IsotropicFactor, Shared, is_empty
from dpkfc.linalg.blocks import Block, Lookup, Outer, Patched, PerExample, Tied
from dpkfc.linalg.metric import Diagonal, Eigenbasis, Elementwise, Entry, Identity, Kronecker, Metric

# --------------------------------------------------------------------------------------------------
# Which positions of a probe factors are formed from: those that are text, and of many only so many
# as are needed.
#
# A d×d factor of a sequence or image layer is a mean over examples times positions, far more rows
# than d as a rule. A few positions drawn from every example estimate it without bias: with L
# positions of example n, k of them drawn without replacement, and weight L/k,
#
#     E[ Σ_(t drawn) (L/k) x_t x_tᵀ ] = Σ_t x_t x_tᵀ.
#
# Where even one position of every example would be more rows than may be kept, m of the M pairs of
# an example and a group are drawn in the same way, with weight M/m on top.
#
# Positions are drawn from a public stream of their own, so labels and inputs of the probe do not
# depend on them. They belong to examples, not to micro-batches, and layers with the same number of
# positions use the same ones.

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


# --------------------------------------------------------------------------------------------------
# Per-example gradient norms on the probe, for the scale of a metric and for figures.
#
# These norms choose a number and draw pictures; no sensitivity rests on them. The certified ones
# are in `gradients`.

KNOWN = (Outer, Patched, Lookup, PerExample, Tied)
_CHUNK_ELEMENTS = 1 << 22


def probe_norms(blocks: Mapping[str, Block], *metrics: Metric, last: int | None = None) -> list[Tensor]:
    """‖P g_n‖ over all layers for each of several metrics, `[N]` in float64 on the CPU.

    Layers without an entry in a metric count as they are. Every block is looked up once, so a mapping that forms them
    on demand holds one at a time.

    Args:
        blocks: of one micro-batch.
        metrics: one or more.
        last: only so many examples at the end of it; None for all.
    """
    totals: list[Tensor] = []
    for name in blocks:
        block = blocks[name]
        if not isinstance(block, KNOWN):  # keeps the identity in every metric; its share cannot be told here
            continue
        if last is not None:
            block = block.select(slice(max(0, block.batch_size - last), block.batch_size))
        squares = [layer_squares(block, metric.get(name)).cpu() for metric in metrics]
        totals = [total + s for total, s in zip(totals, squares, strict=True)] if totals else squares
    return [total.sqrt() for total in totals]


def layer_squares(block: Block, entry: Entry | None) -> Tensor:
    """‖P g_n‖² of one layer, `[N]` in float64."""
    if isinstance(block, Patched):  # a few examples' patches at a time
        step = max(1, _CHUNK_ELEMENTS // (block.b.shape[1] * block.d_in * block.groups))
        ends = range(0, block.batch_size, step)
        parts = (block.select(slice(start, min(block.batch_size, start + step))) for start in ends)
        return torch.cat([layer_squares(part.explicit(), entry) for part in parts])
    if isinstance(entry, Eigenbasis):
        return _eigenbasis_squares(block, entry)
    match block:
        case PerExample():
            scale = entry.scale if isinstance(entry, Elementwise) else {}
            mapped = [g * scale[role] if role in scale else g for role, g in block.grads.items()]
            return torch.stack([_squares(g.reshape(len(g), -1)) for g in mapped]).sum(0)
        case Lookup():
            return _lookup_squares(block, entry if isinstance(entry, Kronecker) else Kronecker())
        case Outer():
            squares = _outer_squares(block.explicit(), entry if isinstance(entry, Kronecker) else Kronecker())
            return squares.view(-1, block.groups).sum(1)
        case Tied():
            return _tied_squares(block, entry if isinstance(entry, Kronecker) else Kronecker())
    raise ValueError(f"norms of a {type(block).__name__} are not known here")


def _eigenbasis_squares(block: Block, entry: Eigenbasis) -> Tensor:
    """By formed gradients, a few examples at a time."""
    entry = entry.complete_basis()
    match block:
        case Lookup():
            rows = block.b if entry.output is None else block.b @ entry.output
            return _lookup_squares(replace(block, b=rows * entry.scale.T[block.ids]), Kronecker())
        case Outer() | Tied():
            groups = block.groups if isinstance(block, Outer) else 1
            step = max(1, _CHUNK_ELEMENTS // entry.scale.numel())
            count = block.batch_size
            pieces = []
            for start in range(0, count, step):
                part = block.select(slice(start, min(count, start + step)))
                z = entry.rotate(part.per_example()) * entry.scale
                pieces.append(_squares(z.flatten(1)).view(-1, groups).sum(1))
            return torch.cat(pieces)
    raise ValueError(f"norms of a {type(block).__name__} are not known in an eigenbasis")


def _squares(x: Tensor) -> Tensor:
    """Σ x² over the last axis without overflow or underflow in float32."""
    return x.double().square().sum(-1)


def _outer_squares(block: Outer, entry: Kronecker) -> Tensor:
    """`[N * groups]`, from the cheaper of Gram matrices and materialised gradients."""
    positions, d_in, d_out = block.a.shape[1], block.a.shape[2], block.b.shape[2]
    if positions == 1:
        return _squares(entry.input.apply(block.a[:, 0])) * _squares(entry.output.apply(block.b[:, 0]))
    gram = positions * (d_in + d_out) < d_in * d_out
    size = positions * (positions + d_in + d_out) if gram else d_in * d_out
    step = max(1, _CHUNK_ELEMENTS // size)
    pieces = []
    for start in range(0, block.a.shape[0], step):
        a, b = block.a[start : start + step], block.b[start : start + step]
        if gram:
            a, b = entry.input.apply(a), entry.output.apply(b)
            pieces.append((torch.bmm(a, a.mT).double() * torch.bmm(b, b.mT).double()).sum((1, 2)).clamp(min=0))
        else:
            pieces.append(_squares(entry.whiten(torch.bmm(b.mT, a)).flatten(1)))
    return torch.cat(pieces)


def _lookup_squares(block: Lookup, entry: Kronecker) -> Tensor:
    """Rows with the same id add up first: a Gram matrix restricted to equal ids."""
    b = entry.output.apply(block.b).double()
    match entry.input:
        case Diagonal():
            b = b * entry.input.scale.double()[block.ids].unsqueeze(-1)
        case Identity():
            b = b * entry.input.factor
        case _:
            raise ValueError("the input side of an embedding must be diagonal or the identity")
    positions = block.ids.shape[1]
    step = max(1, _CHUNK_ELEMENTS // max(1, positions * positions))
    pieces = []
    for start in range(0, b.shape[0], step):
        rows, ids = b[start : start + step], block.ids[start : start + step]
        same = ids.unsqueeze(2) == ids.unsqueeze(1)
        pieces.append((torch.bmm(rows, rows.mT) * same).sum((1, 2)).clamp(min=0))
    return torch.cat(pieces)


def _tied_squares(block: Tied, entry: Kronecker) -> Tensor:
    """‖z‖² of the sum of both uses: that of the lookup, that of the head, and twice their inner product."""
    if not isinstance(entry.output, Identity):
        raise ValueError("the output side of a tied embedding must be the identity")
    lookup, outer = block.lookup, block.outer
    squares = _lookup_squares(lookup, Kronecker(entry.output, entry.input))
    if outer.a.shape[1] == 0:
        return squares
    squares = squares + _outer_squares(outer, entry)
    positions, rows = outer.a.shape[1], max(1, lookup.ids.shape[1])
    step = max(1, _CHUNK_ELEMENTS // (positions * rows))
    cross = []
    for start in range(0, outer.a.shape[0], step):
        part = slice(start, start + step)
        a, c = entry.input.apply(outer.a[part]).double(), entry.input.apply(lookup.b[part]).double()
        ids = lookup.ids[part].unsqueeze(1).expand(-1, positions, -1)
        cross.append((torch.bmm(a, c.mT) * outer.b[part].gather(2, ids)).sum((1, 2)))
    return (squares + 2 * entry.output.factor**2 * torch.cat(cross)).clamp(min=0)


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Structure:
    """How factors are formed.

    Attributes:
        sharing: expand or reduce, for layers with several positions.
        sides: both, input or output; the other side becomes isotropic.
        max_factor_size: largest matrix that is decomposed.
        oversize: what a wider side with more rows than that becomes, diagonal or identity (isotropic); low_rank draws so many.
        decays: whether refreshes before leave something in the factors.
        rules: kinds of layers that are preconditioned, None for all; the others become isotropic.
        kinds: layer name to kind, as far as known.
        rows_per_dim: see `Positions`.
    """

    sharing: str = "expand"
    sides: str = "both"
    max_factor_size: int = 4096
    oversize: str = "diagonal"
    decays: bool = False
    rules: tuple[str, ...] | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    rows_per_dim: float | None = None

    def shape_of(self, side: str, rule: str | None) -> str:
        """full or isotropic, for the `input` or `output` side or the elementwise scale of a layer."""
        left_out = self.rules is not None and rule not in self.rules
        other = self.sides != "both" and side in ("input", "output") and side != self.sides
        return "isotropic" if left_out or other else "full"


@dataclass(frozen=True, kw_only=True)
class LayerFactors:
    """The undamped factors of one layer.

    Attributes:
        kind: outer (matrix-shaped), lookup (embedding), tied (embedding and head) or elementwise.
        sides: `input` and `output`, or one diagonal factor per role of an elementwise layer.
        shapes: size of each side, or shape of the parameter of each role.
        dtype, device: of the layer's gradients.
        notes: side to what became of it, where that needs saying.
    """

    kind: str
    sides: Mapping[str, Factor]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    notes: Mapping[str, str] = field(default_factory=dict)

    def normalised(self) -> LayerFactors:
        """Every factor divided by its mean eigenvalue; an empty factor stays as it is."""
        sides = {name: f if is_empty(f) else f.scaled(1 / f.mean) for name, f in self.sides.items()}
        return replace(self, sides=sides)


def filled(layers: Mapping[str, LayerFactors]) -> dict[str, LayerFactors]:
    """The factors with every empty side replaced by the multiple of the identity that the other layers have on average.

    A side without a gradient (the output side of a LoRA adapter before its first step, a dead layer) has no direction to
    whiten and no scale of its own. The geometric mean of the other layers' mean eigenvalues keeps the layer in their
    units until a later refresh sees its gradient. Sides stay empty where all of their kind are.
    """
    means: dict[str, list[float]] = {}
    for _, kind, factor in _sides(layers):
        if not is_empty(factor):
            means.setdefault(kind, []).append(math.log(factor.mean))
    usual = {kind: math.exp(sum(logs) / len(logs)) for kind, logs in means.items()}
    found = {}
    for name, factors in layers.items():
        sides = {
            side: IsotropicFactor(factor.dim, usual[kind]) if is_empty(factor) and kind in usual else factor
            for side, kind, factor in _sides({name: factors})
        }
        found[name] = replace(factors, sides=sides)
    return found


def _sides(layers: Mapping[str, LayerFactors]) -> Iterable[tuple[str, str, Factor]]:
    """Side, what it is compared with, and factor."""
    for factors in layers.values():
        for side, factor in factors.sides.items():
            yield side, side if factors.kind != "elementwise" else "elementwise", factor


class LayerAccumulator:
    """The factors of one layer from blocks that arrive in pieces.

    Args:
        block: the first block; it is not added yet.
        structure: how factors are formed.
        rule: the layer's rule, None where it does not matter.
        positions: which rows to use; None for all.
        shared: what is formed once for several layers; None shares nothing.
    """

    def __init__(
        self,
        block: Block,
        structure: Structure,
        rule: str | None = None,
        positions: Positions | None = None,
        shared: Shared | None = None,
    ) -> None:
        self._structure = structure
        self._positions = positions
        self._shared = shared
        self._dtype, self._device = torch.float32, torch.device("cpu")
        match block:
            case PerExample():
                self.kind = "elementwise"
                shapes = {role: tuple(g.shape[1:]) for role, g in block.grads.items()}
            case Lookup():
                self.kind = "lookup"
                shapes = {"input": (block.num_rows,), "output": (block.b.shape[-1],)}
            case Outer() | Patched():
                self.kind = "outer"
                shapes = {"input": (block.d_in,), "output": (block.b.shape[-1],)}
            case Tied():
                self.kind = "tied"
                shapes = {"input": (block.lookup.b.shape[-1],), "output": (block.lookup.num_rows,)}
            case _:
                raise TypeError(f"no factors are known for a {type(block).__name__}")
        self._shapes: dict[str, tuple[int, ...]] = shapes
        self._sides = {name: self._side(name, math.prod(shape), rule) for name, shape in shapes.items()}

    def _side(self, name: str, dim: int, rule: str | None) -> FactorAccumulator:
        shape = self._structure.shape_of(name if self.kind != "elementwise" else "elementwise", rule)
        if shape == "full":
            diagonal = self.kind == "elementwise" or (self.kind, name) == ("lookup", "input")
            shape = "diagonal" if diagonal else "isotropic" if (self.kind, name) == ("tied", "output") else "full"
        return FactorAccumulator(
            dim,
            shape=shape,
            max_size=self._structure.max_factor_size,
            oversize=self._structure.oversize,
            decays=self._structure.decays,
            shared=self._shared if name == "input" else None,
        )

    def add(self, block: Block) -> None:
        """Add one probe micro-batch.

        Raises:
            ValueError: values that are not finite, or a block of another size.
        """
        match block:
            case PerExample():
                for role, g in block.grads.items():
                    self._note_kind(g)
                    self._sides[role].add(_at_least_float32(g).reshape(len(g), -1), block.batch_size)
            case Lookup():
                self._note_kind(block.b)
                self._sides["input"].add_diagonal(*self._reads(block))
                self._sides["output"].add(*self._output_rows(block.b, 1))
            case Outer() | Patched():
                self._note_kind(block.b)
                self._sides["input"].add(*self._input_rows(block))
                self._sides["output"].add(*self._output_rows(block.b, block.groups))
            case Tied():
                self._note_kind(block.lookup.b)
                self._add_tied(block)

    def add_inputs(self, block: Block) -> None:
        """Add what the layer has read in a probe micro-batch that was not differentiated; `add` says of what shape.

        Raises:
            ValueError: as `add`.
        """
        match block:
            case Lookup():
                self._note_kind(block.b)
                self._sides["input"].add_diagonal(*self._reads(block))
            case Outer() | Patched():
                self._note_kind(block.b)
                self._sides["input"].add(*self._input_rows(block))

    def _note_kind(self, gradient: Tensor) -> None:
        self._dtype, self._device = _at_least_float32(gradient).dtype, gradient.device

    def _chosen(self, x: Tensor, groups: int, side: str, uses: int = 1) -> Chosen:
        """The rows that a side is formed of; `uses` of them are added for one parameter."""
        if self._positions is None:
            return Chosen(None, None, 1.0, float(x.shape[0] * x.shape[1]))
        most = self._sides[side].most_rows
        return self._positions.chosen(x, groups, self._sides[side].dim, None if most is None else max(1, most // uses))

    def _some(self, rows: Tensor, groups: int, side: str, uses: int = 1) -> tuple[Tensor, float]:
        """(rows, share) of rows `[n * groups, d]` of which there is one an example: all, but where a side may keep fewer."""
        if self._sides[side].most_rows is None:
            return rows, 1.0
        chosen = self._chosen(rows.unsqueeze(1), groups, side, uses)
        return chosen.of(rows.unsqueeze(1)), chosen.share

    def _weights(self, x: Tensor, groups: int = 1) -> Tensor | None:
        """1 at the positions of x `[n * groups, T, d]` that are text and 0 at the others; None where all are."""
        mask = None if self._positions is None else self._positions.mask_of(x.shape[1])
        return None if mask is None else mask.repeat_interleave(groups, 0).to(x.device, x.dtype).unsqueeze(-1)

    def _input_rows(self, block: Outer | Patched) -> tuple[Tensor, float]:
        """(rows, divisor) of A from `[N * groups, T, d_in]`; of patches those that are chosen alone are formed."""
        if self._structure.sharing == "reduce":
            whole = block.explicit() if isinstance(block, Patched) else block
            mean, share = self._some(self._mean(_at_least_float32(whole.a), block.groups), block.groups, "input")
            return _with_ones(mean) if whole.homogeneous else mean, len(block.b) * share
        chosen = self._chosen(block.b, block.groups, "input")
        if isinstance(block, Patched):
            rows = block.explicit().a.flatten(0, 1) if chosen.index is None else block.rows(chosen.index)
            ones = block.homogeneous and chosen.index is not None
        else:
            rows, ones = chosen.taken(block.a), block.homogeneous
        rows = _at_least_float32(rows)
        return chosen.weighed(_with_ones(rows) if ones else rows), len(block.b) * chosen.share

    def _output_rows(self, b: Tensor, groups: int) -> tuple[Tensor, float]:
        """(rows, divisor) of G from `[N * groups, T, d_out]`."""
        b = _at_least_float32(b)
        if self._structure.sharing == "reduce":
            rows, share = self._some(self._summed(b, groups), groups, "output")
            return rows, b.shape[0] * share
        chosen = self._chosen(b, groups, "output")
        return chosen.of(b), chosen.active * chosen.share

    def _reads(self, block: Lookup) -> tuple[Tensor, float, float]:
        """Diagonal of Σ_n a aᵀ for one-hot inputs, `[num_rows]` (how often each row is read), divisor and number of reads."""
        weights = self._weights(block.b)
        kept = torch.ones_like(block.ids, dtype=torch.bool) if weights is None else weights.squeeze(-1) > 0
        reads = float(kept.sum())
        if self._structure.sharing == "expand":
            return torch.bincount(block.ids[kept], minlength=block.num_rows), block.batch_size, reads
        total = torch.zeros(block.num_rows, dtype=torch.float64, device=block.ids.device)
        for ids, own in zip(block.ids, kept, strict=True):
            counts = torch.bincount(ids[own], minlength=block.num_rows)
            total += (counts / own.sum().clamp(min=1)).square()
        return total, block.batch_size, reads

    def _add_tied(self, block: Tied) -> None:
        """Both uses of one weight `[V, d]`, as contributions to E gᵀg; the rows V carry a trace of one."""
        c, a, b = (_at_least_float32(x) for x in (block.lookup.b, block.outer.a, block.outer.b))
        self._sides["output"].add_diagonal(b.new_full((block.lookup.num_rows,), 1 / block.lookup.num_rows), 1.0)
        whole, pieces, uses = float(block.batch_size), [], 2
        lengths = torch.linalg.vector_norm(b, dim=-1, keepdim=True)
        for x, scale in ((c, None), (a, lengths)):
            if x.shape[1] == 0:
                continue
            if self._structure.sharing == "reduce":
                # The gradient of the two sums over positions: Σ c and, for the head, (Σ b) ⊗ (mean a).
                rows, share = self._some(self._summed(x) if scale is None else self._reduced_head(x, b), 1, "input", uses)
                rows = rows / math.sqrt(share)
            else:
                chosen = self._chosen(x, 1, "input", uses)
                rows = chosen.of(x if scale is None else x * scale) / math.sqrt(chosen.share)
            pieces.append(rows)
        if pieces:
            self._sides["input"].add(torch.cat(pieces), whole)

    def _reduced_head(self, a: Tensor, b: Tensor) -> Tensor:
        return self._mean(a) * torch.linalg.vector_norm(self._summed(b), dim=-1, keepdim=True)

    def _summed(self, x: Tensor, groups: int = 1) -> Tensor:
        """Σ_t x over the text, `[n * groups, d]`."""
        weights = self._weights(x, groups)
        return (x if weights is None else x * weights).sum(1)

    def _mean(self, x: Tensor, groups: int = 1) -> Tensor:
        """mean_t x over the text, `[n * groups, d]`."""
        weights = self._weights(x, groups)
        return x.mean(1) if weights is None else (x * weights).sum(1) / weights.sum(1).clamp(min=1)

    def apart(self, shared: Shared | None = None) -> LayerAccumulator:
        """A copy without the positions of the probe, which may go to another process; `shared`: what is formed once there."""
        twin = copy.copy(self)
        twin._positions, twin._shared = None, shared
        twin._sides = {name: side.apart(shared if name == "input" else None) for name, side in self._sides.items()}
        return twin

    def take_in(self, other: LayerAccumulator) -> None:
        """Add what another one has added up of the same layer, as if its blocks had come after the own ones."""
        for name, side in self._sides.items():
            side.take_in(other._sides[name])

    @property
    def sides(self) -> Mapping[str, FactorAccumulator]:
        """What each side, or role of an elementwise layer, has added up."""
        return self._sides

    def after(self, past: Mapping[str, FactorAccumulator], share: float) -> LayerAccumulator:
        """A copy on top of what an earlier refresh has added up, which counts `share` of what it did."""
        twin = copy.copy(self)
        twin._sides = {}
        for name, side in self._sides.items():
            shared = self._shared if name == "input" else None
            twin._sides[name] = past[name].decayed(share, shared) if name in past else side.apart(shared)
            if name in past:
                twin._sides[name].take_in(side)
        return twin

    def cost(self, parts: int) -> float:
        """What its decompositions cost, in multiplications, once so many parts of about this size have been joined."""
        return 1.0 + sum(side.cost(parts) for side in self._sides.values())

    @property
    def full_cost(self) -> float:
        """What complete bases of its sides cost."""
        return sum(float(math.prod(shape)) ** 3 for shape in self._shapes.values())

    def result(self, keep: Callable[[str], int | None] | None = None) -> LayerFactors:
        """The layer's factors.

        Args:
            keep: maps a side to the eigenpairs wanted of it where it is wide, and the trace of the rest; None for all.
        """
        sides = {name: side.result(None if keep is None else keep(name)) for name, side in self._sides.items()}
        if self.kind == "lookup":
            sides["input"] = _smoothed(sides["input"], self._sides["input"].reads)
        return LayerFactors(
            kind=self.kind,
            sides=sides,
            shapes=self._shapes,
            dtype=self._dtype,
            device=self._device,
            notes={name: side.note for name, side in self._sides.items() if side.note},
        )


def is_known(block: Any) -> bool:
    """Whether factors can be formed of a block; others keep the identity."""
    return isinstance(block, KNOWN)


def _smoothed(factor: Factor, read: float) -> Factor:
    """The diagonal of an embedding with one more read of every row, in the same trace.

    A probe that reads a large vocabulary meets most rows once or not at all, by chance. Without this a row that was met
    would be scaled many times less than its neighbour that was not.
    """
    if not isinstance(factor, DiagonalFactor) or read == 0:
        return factor
    return DiagonalFactor((factor.values + factor.trace / read) * (read / (read + factor.dim)))


def _at_least_float32(x: Tensor) -> Tensor:
    return x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()


def _with_ones(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1)
