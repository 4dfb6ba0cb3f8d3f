"""The factors of one layer: what it adds to them for each kind of block, in micro-batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.blocks import Block, Lookup, Outer, Patched, PerExample, Tied
from dpkfc.curvature.factors import DiagonalFactor, Factor, FactorAccumulator, IsotropicFactor, is_empty
from dpkfc.curvature.norms import KNOWN
from dpkfc.curvature.positions import Chosen, Positions
from dpkfc.curvature.shared import Shared

__all__ = ["LayerAccumulator", "LayerFactors", "Structure", "filled", "is_known"]


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
