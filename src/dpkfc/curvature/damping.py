"""Damping and matrix roots: from an undamped factor to one side of a metric.

Relative damping (default) gives each factor its own multiple of the identity,

    A + ρ · tr(A)/d_A · I        and        G + ρ · tr(G)/d_G · I.

This is the split of Martens and Grosse of one damping λ over the two factors. They add π√λ to A and √λ/π to G with
π² = (tr(A)/d_A) / (tr(G)/d_G), which balances the two error terms. For λ = ρ² · (tr(A)/d_A) · (tr(G)/d_G):

    π √λ = ρ √( (tr A/d_A)² )    = ρ · tr(A)/d_A
    √λ/π = ρ √( (tr G/d_G)² )    = ρ · tr(G)/d_G.

So ρ has no unit: it means the same for every layer, loss scale and input scale.

Absolute damping is that of the DP-KFC paper (Algorithm 1): π added to the factors and γ inside the root, so that the
sides are (A + πI + γI)^(−p) and (G + πI + γI)^(−p).

Source: Martens and Grosse (2015), section 6.3; DP-KFC, Algorithm 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.factors import DiagonalFactor, Eigen, Factor, IsotropicFactor, is_empty
from dpkfc.curvature.layer_factors import LayerFactors
from dpkfc.linalg.metric import Dense, Diagonal, Elementwise, Entry, Identity, Kronecker, LowRank, Metric, Side


@dataclass(frozen=True, kw_only=True)
class Damping:
    """What is added to a factor and the root that is taken of it.

    Attributes:
        value: ρ (relative) or π (absolute), positive.
        mode: relative or absolute.
        gamma: γ of the absolute mode, not negative.
        exponent: p in (0, 1/2]; a side is (factor + damping)^(−p). 1/2 is full whitening.
        rank_tolerance: eigenvalues below this fraction of the damping are not kept in a low-rank side.
        max_rank: eigenpairs k kept of a side at least 4k wide. Narrower ones (k ≥ d too), and None, keep all that matter.
        tail_mass: share of the trace that may be left out; a side keeps the fewest eigenpairs that hold the others. 0 for none.
    """

    value: float = 0.1
    mode: str = "relative"
    gamma: float = 0.0
    exponent: float = 0.5
    rank_tolerance: float = 1e-2
    max_rank: int | None = 32
    tail_mass: float = 0.0

    def __post_init__(self) -> None:
        if not (self.value > 0 and math.isfinite(self.value)):
            raise ValueError(f"damping must be positive and finite, got {self.value}; 0.1 is a good start")
        if self.mode not in ("relative", "absolute"):
            raise ValueError(f"damping_mode must be 'relative' or 'absolute', got {self.mode!r}")
        if not (self.gamma >= 0 and math.isfinite(self.gamma)):
            raise ValueError(f"gamma must be finite and not negative, got {self.gamma}")
        if self.gamma > 0 and self.mode == "relative":
            raise ValueError(f"gamma={self.gamma} is read only with damping_mode='absolute'; set gamma=0")
        if not 0 < self.exponent <= 0.5:
            raise ValueError(f"exponent must lie in (0, 0.5], got {self.exponent}; 0.5 whitens fully")
        if not 0 <= self.rank_tolerance < 1:
            raise ValueError(f"rank_tolerance must lie in [0, 1), got {self.rank_tolerance}")
        if not 0 <= self.tail_mass < 1:
            raise ValueError(f"tail_mass is a share of the trace in [0, 1), got {self.tail_mass}")
        if self.max_rank is not None and (type(self.max_rank) is not int or self.max_rank < 1):
            raise ValueError(f"max_rank must be a whole number of at least 1, or None, got {self.max_rank!r}")

    def shift(self, factor: Factor) -> float:
        """What is added to every eigenvalue; 0 only for an empty factor under relative damping."""
        if self.mode == "absolute":
            return self.value + self.gamma
        return 0.0 if is_empty(factor) else self.value * factor.mean

    def root(self, values: Tensor, shift: float) -> Tensor:
        """(values + shift)^(−p), float64."""
        return (values.double() + shift).pow(-self.exponent)


def side_of(
    factor: Factor, damping: Damping, dtype: torch.dtype, *, widest_dense: int = 4096, rank: int | None = None
) -> Side:
    """The side (factor + damping)^(−p) of a metric.

    A factor with few eigenvalues that matter (kept ones ≤ d/2, or d > widest_dense) becomes `LowRank`: those below
    `rank_tolerance` times the damping, and those beyond the first `max_rank` of a wide side, are replaced by their mean,
    which keeps the trace. The metric IS then that map: norms, sums and noise all use the same one, so no guarantee rests
    on the approximation. Otherwise the side is `Dense` and exact. An empty factor under
    relative damping (a LoRA adapter at its start, a dead layer) is the identity of unit scale.

    Args:
        factor: undamped.
        damping: what to add and which root to take.
        dtype: of the resulting side.
        widest_dense: no d×d matrix is formed for a wider side.
        rank: eigenpairs kept of this side, 0 for all, whatever its width and `max_rank`; None as `max_rank` says.
    """
    shift = damping.shift(factor)
    if shift == 0.0:
        return Identity()
    match factor:
        case IsotropicFactor():
            return Identity((factor.mean + shift) ** -damping.exponent)
        case DiagonalFactor():
            return Diagonal(damping.root(factor.values, shift).to(dtype))
        case Eigen():
            return _eigen_side(factor, damping, _kept(factor, damping, shift, rank), dtype, widest_dense)


def _kept(factor: Eigen, damping: Damping, shift: float, rank: int | None) -> int:
    """How many eigenpairs a side keeps."""
    kept = int((factor.values >= damping.rank_tolerance * shift).sum()) if damping.rank_tolerance else factor.rank
    if rank is None and damping.max_rank is not None and factor.dim >= 4 * damping.max_rank:
        kept = min(kept, damping.max_rank)
    elif rank:
        kept = min(kept, rank)
    if damping.tail_mass:
        left = factor.trace - factor.values.double().cumsum(0)
        kept = min(kept, 1 + int((left > damping.tail_mass * factor.trace).sum()))
    return kept


def _eigen_side(factor: Eigen, damping: Damping, kept: int, dtype: torch.dtype, widest_dense: int) -> Side:
    shift = damping.shift(factor)
    dropped = (float(factor.values[kept:].sum()) + factor.rest) / max(1, factor.dim - kept)
    tail = (dropped + shift) ** -damping.exponent
    if kept == 0:
        return Identity(tail)
    if 2 * kept <= factor.dim or factor.dim > widest_dense:
        scale = damping.root(factor.values[:kept], shift).to(dtype)
        return LowRank(factor.vectors[:, :kept].to(dtype).contiguous(), scale, tail)
    tail = (factor.floor + shift) ** -damping.exponent  # all pairs that are held are used below
    scale = damping.root(factor.values, shift)
    vectors = factor.vectors
    root = (vectors * (scale - tail).to(vectors.dtype)) @ vectors.T
    root.diagonal().add_(tail)
    root = (root + root.T) / 2
    norm = float(scale.max()) if scale.numel() == factor.dim else max(tail, float(scale.max()))
    return Dense(root.to(dtype), norm)


def elementwise_scale(factor: Factor, damping: Damping, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """(v + damping)^(−p) in a parameter's shape, for the second moment v of its gradient; ones where v is empty."""
    shift = damping.shift(factor)
    if shift == 0.0:
        return torch.ones(shape, dtype=dtype, device=factor.values.device)
    scale = damping.root(factor.values, shift).to(dtype)
    return scale.expand(math.prod(shape)).reshape(shape).contiguous()


def condition_numbers(factor: Factor, damping: Damping) -> tuple[float, float]:
    """(largest ÷ smallest eigenvalue) of a factor before and after damping; infinite for a singular one.

    Where eigenpairs are left out their mean counts as the smallest, as it does in the side.
    """
    values = factor.values
    largest = float(values.max()) if values.numel() else 0.0
    if isinstance(factor, Eigen) and values.numel() < factor.dim:
        smallest = factor.floor
    else:
        smallest = float(values.min()) if values.numel() else 0.0
    shift = damping.shift(factor)
    before = largest / smallest if smallest > 0 else math.inf
    return before, (largest + shift) / (smallest + shift) if shift > 0 else 1.0


# --------------------------------------------------------------------------------------------------
# Eigenpairs that single sides keep, whatever the rule by widths says: `{"conv1.A": 32, "head.G":
# 0}`, 0 for all.
#
# They change which map the metric is, as `max_rank` does, and never what is guaranteed under it.

SHORT = {"input": "A", "output": "G"}


def side_name(layer: str, side: str) -> str:
    """`conv1.A` for the input factor of conv1."""
    return f"{layer}.{SHORT.get(side, side)}"


def rank_of(ranks: Mapping[str, int], layer: str, side: str) -> int | None:
    """Eigenpairs that this side keeps, 0 for all; None where nothing is said of it."""
    return ranks.get(side_name(layer, side))


def check_ranks(ranks: Mapping[str, int]) -> dict[str, int]:
    """A copy.

    Raises:
        ValueError: naming what is no side, or a number that is not whole or is negative.
    """
    for side, rank in dict(ranks).items():
        if not (isinstance(side, str) and side.endswith((".A", ".G")) and type(rank) is int and rank >= 0):
            raise ValueError(f"ranks maps sides, such as 'conv1.A', to the pairs they keep, 0 for all; got {side!r}: {rank!r}")
    return dict(ranks)


def check_sides(ranks: Mapping[str, int], layers: Mapping[str, Iterable[str]]) -> None:
    """Raise where eigenpairs are asked of a side that there is not.

    Args:
        ranks: by side.
        layers: layer name to the sides of its factors.

    Raises:
        ValueError: naming it.
    """
    known = {side_name(layer, side) for layer, sides in layers.items() for side in sides if side in SHORT}
    unknown = sorted(set(ranks) - known)
    if unknown:
        raise ValueError(f"ranks names sides that the model has not: {', '.join(unknown)}; `dpkfc doctor` lists its layers")


# --------------------------------------------------------------------------------------------------
# Rows for people: what became of each side of each layer.

UNREACHED = "not reached by the probe"


def layer_rows(
    name: str, factors: LayerFactors, used: LayerFactors, entry: Entry, damping: Damping
) -> list[dict[str, Any]]:
    """One row a side: what it is, how large, and its condition number before and after damping.

    Args:
        name: the layer.
        factors: its factors as measured.
        used: its factors as they were damped.
        entry: its map.
        damping: what was added.
    """
    rows = []
    for side, factor in factors.sides.items():
        before, after = condition_numbers(used.sides[side], damping)
        notes = [factors.notes.get(side, ""), "no signal on the probe" if is_empty(factor) else ""]
        if isinstance(factor, Eigen) and factor.rest > 0:
            notes.append(f"first {factor.values.numel()} eigenpairs, the others by their mean")
        rows.append(
            {
                "layer": name,
                "side": side,
                "dim": factor.dim,
                "kind": "diagonal" if isinstance(entry, Elementwise) else getattr(entry, side).kind,
                "rank": factor.rank,
                "trace": factor.trace,
                "condition_before": before,
                "condition_after": after,
                "note": "; ".join(note for note in notes if note),
            }
        )
    return rows


def identity_row(name: str, why: str = UNREACHED) -> dict[str, Any]:
    """The row of a layer without factors: it keeps the identity."""
    return {
        "layer": name,
        "side": "",
        "dim": 0,
        "kind": "identity",
        "rank": 0,
        "trace": 0.0,
        "condition_before": 1.0,
        "condition_after": 1.0,
        "note": why,
    }


# --------------------------------------------------------------------------------------------------
# The metric of a refresh from its factors, and what is said beside it.

_log = logging.getLogger(__name__)


def metric_of(
    layers: Mapping[str, LayerFactors], damping: Damping, widest: int, rank: Callable[[str, str], int | None]
) -> Metric:
    """The damped roots of all layers; layers that share the eigenpairs of a side share the side.

    Args:
        layers: factors.
        damping: what is added, and the root.
        widest: no matrix is formed for a wider side.
        rank: maps layer and side to the eigenpairs kept of it, 0 for all; None where the damping's rule holds.
    """
    known: dict[tuple[int, float, int | None], Side] = {}

    def side(name: str, which: str, factors: LayerFactors) -> Side:
        factor, own = factors.sides[which], rank(name, which)
        if not isinstance(factor, Eigen):
            return side_of(factor, damping, factors.dtype, widest_dense=widest)
        key = (id(factor.vectors), factor.trace, own)
        if key not in known:
            known[key] = side_of(factor, damping, factors.dtype, widest_dense=widest, rank=own)
        return known[key]

    metric: dict[str, Kronecker | Elementwise] = {}
    for name, factors in layers.items():
        if factors.kind == "elementwise":
            scales = {
                role: elementwise_scale(factor, damping, factors.shapes[role], factors.dtype).to(factors.device)
                for role, factor in factors.sides.items()
            }
            metric[name] = Elementwise(scales)
        else:
            metric[name] = Kronecker(*(side(name, which, factors) for which in ("input", "output")))
    return metric


def left_alone(metric: Metric, unknown: Mapping[str, str], rules: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of the layers that keep the identity."""
    unreached = [name for name in rules if name not in metric and name not in unknown]
    if unreached:
        _log.warning("the probe does not reach these layers, which keep the identity: %s", ", ".join(unreached))
    if unknown:
        _log.warning("no factors are known for these layers, which keep the identity: %s", ", ".join(unknown))
    rows = [identity_row(name, f"no factors are known for a {kind}") for name, kind in unknown.items()]
    return rows + [identity_row(name) for name in unreached]


def shapes_of(model: nn.Module, name: str, factors: LayerFactors) -> dict[str, Any]:
    """What `Preconditioner.check` compares: kind, sizes of the sides, and the weight's own shape where it has one."""
    shapes: dict[str, Any] = {"kind": factors.kind, **{side: list(x) for side, x in factors.shapes.items()}}
    try:
        weight = getattr(model.get_submodule(name), "weight", None)
    except AttributeError:
        weight = None
    return shapes | {"stored": list(weight.shape)} if isinstance(weight, Tensor) else shapes
